"""The cheapest mix of instances that meets a demand: the search, whatever judges a mix.

A mix is how many instances there are of each kind. Optuna's TPE first looks for a mix that meets the demand and costs little.
Then every cheaper mix is ruled out, or found to be better:

- by work: even with perfect batching and dispatch its engines could not do the work in time (`work_bounds`);
- as part of a mix that clearly fails (`monotone`): taking instances away does not help, unless those taken are slower than all
  that stay. A slow instance may do harm, since a policy sends it calls that then hold up their queries (two B200s met an
  SLO that they missed with an L40S beside them); so that a mix fails says nothing of the same mix without its slow ones. It
  remains an assumption, which `monotone=false` does without;
- by the judge.

Of what is left, the mix with the most capacity is judged first: no other mix that is left contains it, and what it tells
rules out most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hexrepro.cluster.latency import solo_terms
from hexrepro.cluster.types import InstanceSpec
from hexrepro.errors import InputError
from hexrepro.report.intervals import Interval
from hexrepro.tuning.samplers import silence
from hexrepro.workload.types import Workload

MOST_MIXES = 500_000
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    """A kind of instance that may be bought: at most so many, each at so many $ an hour (all its GPUs)."""

    gpu: str
    most: int
    price_per_hour: float
    spec: InstanceSpec


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the judge says of a mix. attainment, p95_s, cost_per_1000 and drift: float64[R], one value a seed.

    `cut`: given up after the arrivals on which alpha is chosen. `fresh`: good enough on the seeds that pick, so that the
    samples are of the reported seeds, which had no part in that; else they are of the seeds on which it was refused.
    `of_seeds`: on how many seeds the demand is met. drift: mean latency in the last third of the queries over that in the
    middle third.
    """

    counts: Counts
    price_per_hour: float
    alpha: float | None
    attainment: np.ndarray
    interval: Interval
    p95_s: np.ndarray
    cost_per_1000: np.ndarray
    drift: np.ndarray
    target: float
    cut: bool = False
    fresh: bool = False

    @property
    def meets(self) -> bool:
        """Shown to meet the demand: the interval's lower end is not below it."""
        return not self.cut and float(self.interval.low) >= self.target - 1e-12

    @property
    def fails(self) -> bool:
        """Shown to fail."""
        return self.cut or float(self.interval.high) < self.target

    @property
    def of_seeds(self) -> int:
        return int(np.sum(self.attainment >= self.target - 1e-12))


@dataclass(eq=False)
class Space:
    """All mixes of the offers: counts int64[N, G], price_per_hour float64[N], and `capacity` float64[N]: work that can be done
    in time over work to be done, at the very most; below 1 a mix is hopeless. The mixes are in order: by price, then by the
    number of instances, then by counts. slowness float64[G]: what a call takes on each kind."""

    offers: Sequence[Offer]
    counts: np.ndarray
    price_per_hour: np.ndarray
    capacity: np.ndarray
    slowness: np.ndarray
    place: dict[Counts, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {tuple(row): i for i, row in enumerate(self.counts.tolist())}

    def part_of(self, at: int) -> np.ndarray:
        """bool[N]: mixes that mix `at` contains, and that do not come of it by taking only its slow instances away."""
        whole = self.counts[at]
        slowest = np.where(self.counts > 0, self.slowness, -np.inf).max(axis=1, keepdims=True)
        taken = self.counts < whole
        return (self.counts <= whole).all(axis=1) & (~taken | (self.slowness <= slowest)).all(axis=1)

    @property
    def hopeless(self) -> np.ndarray:
        return self.capacity < 1.0


def all_mixes(offers: Sequence[Offer], bounds: np.ndarray, slowness: np.ndarray | None = None) -> Space:
    """Every mix but the empty one. bounds float64[V, G]: see `work_bounds`; slowness: as in `Space`, None: all alike."""
    size = math.prod(offer.most + 1 for offer in offers)
    if size > MOST_MIXES:
        raise InputError(
            f"plan.gpus: there are {size} mixes, more than {MOST_MIXES}; lower the counts, or leave out a GPU"
        )
    axes = [np.arange(offer.most + 1) for offer in offers]
    counts = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(offers))[1:]
    price = np.round(counts @ np.array([offer.price_per_hour for offer in offers]), 9)
    order = np.lexsort((*counts.T[::-1], counts.sum(axis=1), price))
    counts, price = counts[order], price[order]
    slowness = np.zeros(len(offers)) if slowness is None else slowness
    return Space(offers, counts, price, (counts @ bounds.T).min(axis=1), slowness)


def work_bounds(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    attainment: float,
    horizon_s: float,
    prefix_caching: str,
) -> np.ndarray:
    """What one instance of each offer contributes to the work, at most: float64[V, G]; a mix meets the demand only if its sum
    over instances reaches 1 in each of the V rows.

    The queries that meet their SLO are done within `horizon_s`, and at least those with the least work must. A call takes an
    engine at least its prompt's uncached tokens, its sequences' share of full steps, and the KV that it reads. How calls are
    divided among unlike instances is left open: for any value v(c) of a call, an instance earns at most max_c v(c)/w(c) a
    second. Each row takes as v the work on one of the offers.
    """
    work = np.stack([_least_work_s(workload, offer.spec, prefix_caching) for offer in offers])
    needed = math.ceil(attainment * workload.n_queries - 1e-9 * workload.n_queries)
    rows = []
    for value in work:
        of_query = np.add.reduceat(value, workload.query_offsets[:-1])
        need = np.sort(of_query)[:needed].sum()
        rows.append(horizon_s * (value / work).max(axis=1) / need)
    return np.array(rows)


def _least_work_s(workload: Workload, spec: InstanceSpec, prefix_caching: str) -> np.ndarray:
    """Seconds that each call takes an engine at the very least: float64[n]."""
    cached = np.zeros(workload.n_calls)
    if prefix_caching != "off":
        cached = workload.template_tokens.astype(np.float64)
    if prefix_caching == "full":
        cached = cached + workload.context_tokens
    output = workload.output_tokens.astype(np.float64)
    _, prefill, context, _, kv_read = solo_terms(
        workload.input_tokens, cached, output, spec.max_num_batched_tokens
    )
    model = spec.latency
    in_full_step = model.sequence_s + model.base_s / spec.max_num_seqs
    return (
        model.prefill_token_s * prefill
        + model.prefill_context_s * context
        + in_full_step * output
        + model.kv_token_s * kv_read
    )


@dataclass(eq=False)
class Found:
    """A finished search: what was judged, and the cheapest mix that meets the demand (None: none was found).

    proved: all cheaper mixes are ruled out, so many by work, as part of a failing mix, and by the judge.
    """

    verdicts: dict[Counts, Verdict]
    best: Verdict | None
    proved: bool
    by_work: int
    by_part: int
    by_judge: int


class Search:
    """Looks for the cheapest mix. `judge` is asked once for each mix, at most `most` times in all."""

    def __init__(
        self, space: Space, judge: Callable[[Counts], Verdict], *, monotone: bool = True, most: int = 400
    ) -> None:
        self.space, self.judge, self.monotone, self.most = space, judge, monotone, most
        self.verdicts: dict[Counts, Verdict] = {}
        self.ruled_out = space.hopeless.copy()  # and what a failing mix contains
        self.best: int | None = None

    def run(self, trials: int, seed: int = 0) -> Found:
        """TPE for `trials` trials, then every cheaper mix."""
        self.try_(
            len(self.space.counts) - 1
        )  # all instances: is there an answer at all, and how far from it are we?
        if not self.ruled_out.all():
            self._sample(trials, seed)
            self._close()
        return self.found()

    def found(self) -> Found:
        """The state of the search."""
        end = len(self.space.counts) if self.best is None else self.best
        judged = np.zeros(end, bool)
        for counts in self.verdicts:
            if self.space.place[counts] < end:
                judged[self.space.place[counts]] = True
        by_work = int(np.sum(self.space.hopeless[:end] & ~judged))
        by_part = int(np.sum(self.ruled_out[:end] & ~self.space.hopeless[:end] & ~judged))
        best = None if self.best is None else self.verdicts[self._counts(self.best)]
        proved = by_work + by_part + int(judged.sum()) == end
        return Found(self.verdicts, best, proved, by_work, by_part, int(judged.sum()))

    def try_(self, at: int) -> Verdict | None:
        """The verdict on a mix, judged now if need be; None where the judge may not be asked any more."""
        counts = self._counts(at)
        if counts not in self.verdicts:
            if len(self.verdicts) >= self.most:
                return None
            verdict = self.judge(counts)
            self.verdicts[counts] = verdict
            if verdict.meets:
                self.best = at if self.best is None else min(self.best, at)
            elif self.monotone and verdict.fails:
                self.ruled_out |= self.space.part_of(at)
            else:
                self.ruled_out[at] = True
        return self.verdicts[counts]

    def fewest_of(self, gpu: int) -> tuple[Verdict | None, bool]:
        """The least number of instances of one kind alone that meets the demand, None where not even the most do; and whether
        the judge was asked enough to know.
        """
        low, high, found = 1, self.space.offers[gpu].most, None
        while low <= high:
            middle = (low + high) // 2 if found is not None else high
            counts = [0] * len(self.space.offers)
            counts[gpu] = middle
            at = self.space.place[tuple(counts)]
            hopeless = self.ruled_out[at] and tuple(counts) not in self.verdicts
            verdict = None if hopeless else self.try_(at)
            if verdict is None and not hopeless:
                return None, False
            if verdict is not None and verdict.meets:
                found, high = verdict, middle - 1
            elif found is None:
                return None, True
            else:
                low = middle + 1
        return found, True

    def next_best(self, wanted: int, tries: int) -> None:
        """Judge mixes beyond the best in order of price until `wanted` more of them meet the demand."""
        if self.best is None:
            return
        for at in range(self.best + 1, len(self.space.counts)):
            if wanted == 0 or tries == 0:
                return
            if self.ruled_out[at] and self._counts(at) not in self.verdicts:
                continue
            tries -= self._counts(at) not in self.verdicts
            verdict = self.try_(at)
            if verdict is None:
                return
            wanted -= verdict.meets

    def _sample(self, trials: int, seed: int) -> None:
        """Optuna proposes; hopeless mixes, dearer ones than the best, and repeats cost nothing. A mix that fails is worse than
        any that meets the demand, the more so the less it attains or could do.
        """
        import optuna

        silence()
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=min(10, trials))
        )
        dearest = float(self.space.price_per_hour[-1])
        for _ in range(trials):
            trial = study.ask()
            counts = tuple(trial.suggest_int(o.gpu, 0, o.most) for o in self.space.offers)
            at = self.space.place.get(counts)
            if at is None:  # nothing at all
                value = 3 * dearest
            elif self.ruled_out[at] and counts not in self.verdicts:
                value = dearest * (3 - min(1.0, float(self.space.capacity[at])))
            elif self.best is not None and at > self.best:
                value = float(self.space.price_per_hour[at])  # no answer, whether it meets the demand or not
            else:
                verdict = self.try_(at)
                if verdict is None:
                    return
                value = verdict.price_per_hour
                if not verdict.meets:
                    value = dearest * (2 - float(verdict.attainment.mean()))
            study.tell(trial, value)

    def _close(self) -> None:
        """Judge cheaper mixes, the most capable first, until none is left."""
        while True:
            end = len(self.space.counts) if self.best is None else self.best
            left = np.flatnonzero(~self.ruled_out[:end])
            if self.best is None:  # what has met the demand is no candidate any more
                left = np.array([at for at in left if self._counts(at) not in self.verdicts], np.int64)
            if not len(left) or self.try_(int(left[np.argmax(self.space.capacity[left])])) is None:
                return

    def _counts(self, at: int) -> Counts:
        return tuple(self.space.counts[at].tolist())
