"""The simulator held against real servers: launched here, or the user's.

For each set of servers: profile them through their API; choose rates and alphas with what was fitted; replay a trace under each
policy through a gateway of its own, at each load, several times; simulate the same; compare. How it is measured and kept is in
`hexrepro/validation/lab.py`, what is compared and why in `report.py` beside it. An interrupted run goes on where it was, and a
finished one is compared anew without a server.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product

import numpy as np
import pandas as pd

from hexrepro.errors import InputError
from hexrepro.experiments import Job, outputs, tidy
from hexrepro.experiments.compare import policies_of
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.settings import Settings, read_settings
from hexrepro.scheduling import Policy
from hexrepro.validation import report, tables
from hexrepro.validation.config import Case, Options, cases_of, flag, options_of
from hexrepro.validation.lab import DIRECT, PROFILE, Lab
from hexrepro.validation.launch import vllm_python
from hexrepro.validation.model import loads_of, simulated, simulations
from hexrepro.validation.report import Compared


def run(job: Job) -> None:
    """Measure what is not there yet, simulate, compare, print and write."""
    settings = read_settings(job.cfg, job.choices)
    options = options_of(job.cfg)
    policies = policies_of(settings)
    for policy in policies:
        if policy.queue_rule.fair:
            raise InputError(
                f"policy {policy.name}: its queue needs counters at the instances, which the gateway has not"
            )
    cases = cases_of(job.cfg, settings, options)
    outputs.check_writable(job.run_dir)
    if flag(job.cfg, "dry_run"):
        for case in cases:
            print("\n".join(_plan(case, settings, options, policies)))
        with suppress(OSError):  # nothing is in it, unless it is one of the user's own
            job.run_dir.rmdir()
        return
    for case in cases:
        if case.fleet.specs and not (case.folder / PROFILE).exists():
            vllm_python()  # a Python without vLLM shows here, not after the first setting
    printed = Printed()
    found: list[Compared] = []
    summaries: list[pd.DataFrame] = []
    for case in cases:
        if flag(job.cfg, "fresh"):
            shutil.rmtree(case.folder, ignore_errors=True)
        compared = _measure(case, settings, options, policies)
        found += compared
        rows = report.summary(compared, case.bars, settings.confidence)
        summaries.append(rows)
        for load in options.loads:
            of = [c for c in compared if c.load == load]
            printed.add(tables.table(of, rows[rows["load"] == load], settings.confidence))
    _write(job, cases, found, summaries, settings.confidence, printed)
    printed.results(job.run_dir)


def _plan(case: Case, settings: Settings, options: Options, policies: Sequence[Policy]) -> Iterator[str]:
    """What would be done, in words."""
    w, fleet = case.workload, case.fleet
    yield f"setting {fleet.name}"
    for i, name in enumerate(fleet.names):
        launched = f"launched, {'paced' if fleet.specs[i].pace else 'computing'}" if fleet.specs else ""
        yield f"  server {name}: {launched or fleet.urls[i]}"
    longest = int((w.input_tokens + w.output_tokens).max())
    yield (
        f"  one replay: {w.n_queries} queries, {w.n_calls} calls, {w.input_tokens.sum():,} prompt and"
        f" {w.output_tokens.sum():,} output tokens, longest call {longest:,}"
    )
    names = [p.name for p in policies] + ["fixed placement"] * options.fixed_placement
    replays = len(names) * len(options.loads) * options.repeats
    yield (
        f"  {replays} replays: {', '.join(names)}; each {', '.join(options.loads)}, {options.repeats} times"
    )
    cluster = case.known
    if cluster is None:
        yield f"  rates: known after profiling; a replay takes {options.limit_s:g} s at most"
    else:
        total_s = 0.0
        for load in loads_of(case, cluster, settings, options, policies):
            ends_s = [simulated(case, load, cluster, p, 0.0).end_s for p in load.policies]
            total_s += options.repeats * sum(ends_s)
            yield f"  {load.name}: {load.rate_qps:.3g} queries/s, {np.mean(ends_s):.0f} s a replay"
        yield f"  all replays: about {total_s / 60:.0f} min, besides launching and profiling"
    yield f"  kept in {case.folder}"


def _measure(case: Case, settings: Settings, options: Options, policies: Sequence[Policy]) -> list[Compared]:
    """Replay everything, repeat by repeat, so that a machine that drifts does so for all policies alike; then simulate."""
    kept: dict[tuple[str, str], list] = {}
    with Lab(case.fleet, case.folder, case.shared, options.queue_mode, _say) as lab:
        slowdown = lab.core_slowdown()  # before there are servers
        lab.profile(case.workload)
        cluster, api_s = lab.cluster(), lab.api_s
        loads = loads_of(case, cluster, settings, options, policies)
        gateway_s = lab.gateway_s(policies[0], case.workload)
        todo = list(product(range(options.repeats), loads, range(len(loads[0].policies))))
        limits = dict(call_timeout_s=options.call_timeout_s, limit_s=options.limit_s)
        for i, (repeat, load, which) in enumerate(todo):
            policy = load.policies[which]
            key = f"{policy.name}_{load.name}_{repeat}"
            measured, about, was_there = lab.replay(load.workload, policy, key, load.base_slo_s, **limits)
            kept.setdefault((load.name, policy.name), []).append((measured, about))
            note = f"kept from {about.began}" if was_there else measured.report(load.workload)
            _say(f"{case.fleet.name}: {i + 1}/{len(todo)} {policy.name}, {load.name}: {note}")
    found = []
    for load in loads:
        for policy in load.policies:
            replays, about = zip(*kept[load.name, policy.name], strict=True)
            added_s = np.zeros(1) if policy.name == DIRECT else gateway_s
            alpha = "alpha" in policy.dispatch_rule.defaults
            found.append(
                Compared(
                    setting=case.fleet.name,
                    load=load.name,
                    policy=policy.name,
                    dispatch=policy.dispatch,
                    alpha=policy.dispatch_params.get("alpha") if alpha else None,
                    rate_qps=load.rate_qps,
                    workload=load.workload,
                    replays=replays,
                    about=about,
                    core_slowdown=slowdown,
                    **simulations(case, load, cluster, policy, replays, api_s, added_s, options),
                )
            )
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(
    job: Job,
    cases: Sequence[Case],
    found: Sequence[Compared],
    summaries: Sequence[pd.DataFrame],
    confidence: float,
    printed: Printed,
) -> None:
    """The run directory's files, and the tables over all settings."""
    from hexrepro.report import agreement, style

    of = {case.fleet.name: [c for c in found if c.setting == case.fleet.name] for case in cases}
    summary = pd.concat(summaries)
    pairs = pd.concat([report.ranks(group, confidence) for group in of.values()])
    queries = report.queries(found)
    if len(pairs):
        printed.add(tables.rank_table(pairs))
    if (bars := tables.bar_table(summary)) is not None:
        printed.add(bars)
    with outputs.all_or_nothing(job.run_dir) as part:
        tidy.write(part / "summary.csv", summary)
        tidy.write(part / "ranks.csv", pairs)
        tidy.write(part / "spread.csv", report.spread(found))
        tidy.write(part / "queries.csv", queries)
        tidy.write(part / "replays.csv", report.replays(found))
        report.calls(found).to_parquet(part / "calls.parquet", index=False)
        for case in cases:
            name = case.fleet.name
            shutil.copyfile(case.folder / PROFILE, part / f"profile_{name}.yaml")
            figure = agreement.agreement_figure(
                queries[queries["setting"] == name],
                title=f"{name}: latency of queries, simulated against measured, mean of the replays",
            )
            style.save(figure, part / f"agreement_{name}")
        (part / "tables.txt").write_text(printed.text(), encoding="utf-8")
        outputs.write_config(job, part)
