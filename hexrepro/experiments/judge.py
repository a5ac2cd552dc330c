"""The judge of a plan: simulates a mix, and says whether it meets the demand.

Three sets of arrival seeds, none in two of them: on the first (selection.seeds) alpha is chosen, on the second mixes are
picked, on the third the picked ones are measured once more and reported. Among many mixes the cheapest that looks good enough
is often one that was lucky (the winner's curse); on arrivals that had no part in picking it the luck is gone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hexrepro import simulator
from hexrepro.cluster.types import Cluster
from hexrepro.experiments.cache import code_version, fingerprint, write_atomically
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.mixes import Counts, Offer, Verdict
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings
from hexrepro.report.intervals import mean_interval
from hexrepro.report.metrics import cost_per_1000, quantile, throughput_qps
from hexrepro.scheduling import Policy

SAMPLES = ("attainment", "p95_s", "throughput_qps", "drift")


@dataclass(frozen=True)
class Demand:
    """This share of the queries within slo_s seconds (times each tenant's scale)."""

    attainment: float
    slo_s: float


class Judge:
    """Simulates a mix, and says whether it meets the demand."""

    def __init__(
        self,
        setting: Setting,
        picking: Setting,
        policy: Policy,
        offers: Sequence[Offer],
        demand: Demand,
        settings: Settings,
        cache: Path,
        *,
        alphas: tuple[float, ...],
        cut: float,
        progress: Cells | None = None,
    ) -> None:
        # alike but for their arrivals: those that are reported, and those that pick
        self.setting, self.picking = setting, picking
        self.policy, self.offers, self.demand = policy, offers, demand
        self.settings, self.cut, self.cache, self.progress = settings, cut, cache, progress
        chosen = settings.alpha is None and policy.name in settings.selection.policies
        self.alphas = alphas if chosen else ()
        recipe = Path(__file__).read_text(encoding="utf-8")
        self._prefix = fingerprint(
            code_version(), recipe, setting.fingerprint, picking.fingerprint, policy, demand, self.alphas, self.cut,
            settings.confidence,
        )  # fmt: skip

    def __call__(self, counts: Counts) -> Verdict:
        return self.of_cluster(cluster_of(self.offers, counts), counts)

    def of_cluster(self, cluster: Cluster, counts: Counts) -> Verdict:
        """The verdict on any cluster, from the cache or by simulation."""
        file = self.cache / f"{fingerprint(self._prefix, cluster)}.plan.json"
        try:
            told, cached = json.loads(file.read_text()), True
            samples = {name: np.array(told[name], np.float64) for name in SAMPLES}
            alpha, cut, fresh = told["alpha"], told["cut"], told["fresh"]
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged from outside
            (alpha, cut, fresh, samples), cached = self._simulate(cluster), False
            told = {"alpha": alpha, "cut": cut, "fresh": fresh} | {n: x.tolist() for n, x in samples.items()}
            write_atomically(file, lambda part: part.write_text(json.dumps(told)))
        if self.progress:
            self.progress.advance(cached)
        price = cluster.price_per_hour
        return Verdict(
            counts=counts,
            price_per_hour=price,
            alpha=alpha,
            attainment=samples["attainment"],
            interval=mean_interval(samples["attainment"], self.settings.confidence),
            p95_s=samples["p95_s"],
            cost_per_1000=cost_per_1000(price, samples["throughput_qps"]),
            drift=samples["drift"],
            target=self.demand.attainment,
            cut=cut,
            fresh=fresh,
        )

    def _simulate(self, cluster: Cluster) -> tuple[float | None, bool, bool, dict[str, np.ndarray]]:
        """(alpha, given up?, fresh?, samples of the seeds on which the verdict falls)."""
        s, policy = self.setting, self.policy
        alpha = policy.dispatch_params.get("alpha", policy.dispatch_rule.defaults.get("alpha"))
        seeds = len(s.selection_seeds)
        alphas = self.alphas or (alpha,)
        params = [policy.with_params(alpha=a).dispatch_vector for a in self.alphas] or [
            policy.dispatch_vector
        ]
        tried = self._grid(
            cluster,
            np.tile(s.selection_arrivals_s, (len(params), 1)),
            np.tile(s.selection_seeds, len(params)),
            np.repeat(np.stack(params), seeds, axis=0),
        )
        tried = {name: x.reshape(len(params), seeds) for name, x in tried.items()}
        attained, p95_s = tried["attainment"], tried["p95_s"]
        # the most attained; of equals the least P95, and the least alpha
        best = min(range(len(params)), key=lambda a: (-attained[a].mean(), p95_s[a].mean(), a))
        if attained[best].max() < self.demand.attainment - self.cut:
            return alphas[best], True, False, {name: x[best] for name, x in tried.items()}
        rows = np.repeat(params[best][None, :], len(s.seeds), axis=0)
        samples = self._grid(cluster, self.picking.arrivals_s, self.picking.seeds, rows)
        picked = (
            float(mean_interval(samples["attainment"], self.settings.confidence).low)
            >= self.demand.attainment - 1e-12
        )
        if picked:
            samples = self._grid(cluster, s.arrivals_s, s.seeds, rows)
        return alphas[best], False, picked, samples

    def _grid(self, cluster: Cluster, arrivals_s, seeds, params) -> dict[str, np.ndarray]:
        """SAMPLES of each run: float64[R]."""
        s = self.setting
        grid = simulator.simulate_grid(
            s.workload,
            cluster,
            self.policy,
            arrivals_s=arrivals_s,
            seeds=seeds,
            dispatch_params=params,
            base_slo=self.demand.slo_s,
            engine=s.engine,
            estimates=s.estimator,
            workers=self.settings.workers,
        )
        latency_s = grid.latency_s
        third = latency_s.shape[1] // 3 or 1
        with np.errstate(invalid="ignore"):
            drift = latency_s[:, -third:].mean(axis=1) / latency_s[:, -2 * third : -third or None].mean(
                axis=1
            )
        samples = (
            np.mean(latency_s <= grid.slo_s, axis=1),
            quantile(latency_s, 0.95),
            throughput_qps(grid.arrival_s, grid.finish_s),
            drift,
        )
        return dict(zip(SAMPLES, samples, strict=True))


def cluster_of(offers: Sequence[Offer], counts: Counts, name: str = "plan") -> Cluster:
    """The mix as a cluster, GPU after GPU in the order of the offers."""
    return Cluster(
        name,
        tuple(
            replace(offer.spec, name=f"{offer.gpu}-{i}")
            for offer, count in zip(offers, counts, strict=True)
            for i in range(count)
        ),
    )
