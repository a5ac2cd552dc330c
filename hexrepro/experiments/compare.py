"""The main job: all policies against a baseline, on each cluster view, trace and rate, over many arrival seeds.

Every policy sees the same arrivals at the same seed, so policies are compared in pairs. Where alpha has to be chosen,
it is chosen on arrivals of other seeds than those reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from hexrepro.errors import InputError
from hexrepro.experiments import Job, cells, outputs
from hexrepro.experiments.cache import check_cache_dir, prune
from hexrepro.experiments.cells import Cell, Setting
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.outcome import Outcome, describe, gain_tables, short, summarise
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, read_settings
from hexrepro.report import tables
from hexrepro.scheduling import Policy, load_policy


def run(job: Job) -> None:
    """Compute or fetch every cell, print a table for each setting, and write the results."""
    settings = read_settings(job.cfg, job.choices)
    policies = policies_of(settings)
    plan = [(setting, cells_of(setting, policies, settings)) for setting in settings_of(settings)]
    outputs.check_writable(job.run_dir)
    cache = check_cache_dir()

    printed = Printed()
    outcomes: list[Outcome] = []
    with Cells(sum(len(group) for _, group in plan), printed.out) as progress:
        for setting, group in plan:
            progress.begin(short(setting, settings))
            results = {}
            for cell in group:
                results[cell.policy.name] = cells.get(cell, cache, settings.workers, settings.calls)
                progress.advance(results[cell.policy.name].cached)
            outcome = Outcome(setting, results, summarise(setting, results, settings))
            outcomes.append(outcome)
            progress.setting_done(short(setting, settings))
            columns = tables.columns(settings.slo_scale, setting.cluster.price_per_hour is not None)
            printed.add(
                tables.comparison_table(
                    describe(setting, settings), outcome.rows, columns, settings.confidence
                )
            )
    for table in gain_tables(outcomes, settings):
        printed.add(table)
    outputs.write(job, settings, outcomes, printed.text())
    prune(cache)
    printed.results(job.run_dir)


def policies_of(settings: Settings) -> list[Policy]:
    """The policies in order, alpha set where the config gives it."""
    policies = [_load(name, spec) for name, spec in settings.policies.items()]
    for policy in policies:
        if policy.name in settings.selection.policies and "alpha" not in policy.dispatch_rule.defaults:
            raise InputError(
                f"selection.policies names {policy.name}, whose dispatch rule has no parameter alpha; leave it out"
            )
    if settings.alpha is None:
        return policies
    return [
        p.with_params(alpha=settings.alpha) if p.name in settings.selection.policies else p for p in policies
    ]


def _load(name: str, spec: Mapping | str) -> Policy:
    policy = load_policy(spec)
    if policy.name != name:
        raise InputError(f"policy/{name}.yaml: name is {policy.name}; it must be the file's name, {name}")
    return policy


def cells_of(setting: Setting, policies: list[Policy], settings: Settings) -> list[Cell]:
    chosen = settings.selection
    to_choose = chosen.policies if settings.alpha is None else ()
    return [Cell(setting, policy, chosen.alphas if policy.name in to_choose else ()) for policy in policies]
