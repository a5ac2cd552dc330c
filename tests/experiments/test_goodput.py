"""Goodput's bisection on responses whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hexrepro.cli import main
from hexrepro.experiments.goodput import highest_rate


@pytest.mark.parametrize("within", [0.1, 0.01, 1e-4])
def test_the_border_of_a_monotone_response_is_found(within):
    border = np.array([0.02, 0.3, 0.31, 1.0, 5.0, 9.9])
    asked = []

    def meets(rates):
        asked.append(rates.copy())
        return rates <= border

    found = highest_rate(meets, np.full(6, 0.3), low=0.01, high=10.0, within=within)
    np.testing.assert_allclose(found, border, rtol=within)
    assert np.min(asked) >= 0.01
    assert np.max(asked) <= 10.0


def test_out_of_reach_is_said():
    # met nowhere; met everywhere; met exactly up to the ends
    border = np.array([0.0, np.inf, 0.01, 10.0])
    found = highest_rate(lambda rates: rates <= border, np.full(4, 0.5), low=0.01, high=10.0, within=0.01)
    assert found[0] == 0.0
    assert found[1] == 10.0
    assert found[2] == pytest.approx(0.01, rel=0.01)
    assert found[3] == 10.0


def test_one_of_several_borders_is_found():
    def meets(rates):  # met below 1 and between 2 and 3
        return (rates < 1.0) | ((rates > 2.0) & (rates < 3.0))

    found = highest_rate(meets, np.array([0.1, 2.5, 8.0]), low=0.01, high=10.0, within=0.001)
    for rate in found:
        assert min(abs(rate - 1.0), abs(rate - 3.0)) < 0.01


def test_a_whole_run_on_a_queue_of_known_capacity(tmp_path, cell_cache, monkeypatch):
    """A stand-in for the simulator: latencies are 1/(1 - rate/capacity), capacity 2 for vllm and 3 for eft."""
    from hexrepro import simulator

    def simulate_grid(workload, cluster, policy, *, arrivals_s, base_slo, **_):
        rate = workload.n_queries / arrivals_s[:, -1]
        capacity = {"vllm": 2.0, "eft": 3.0, "hexgen_flow": 1.0 + policy.dispatch_params.get("alpha", 0.0)}[
            policy.name
        ]
        with np.errstate(divide="ignore"):
            latency_s = np.where(rate < capacity, 1.0 / (1.0 - rate / capacity), np.inf)

        class Grid:
            pass

        grid = Grid()
        grid.latency_s = np.repeat(latency_s[:, None], workload.n_queries, axis=1)
        grid.slo_s = np.full_like(grid.latency_s, 2.0)  # met up to half of the capacity
        return grid

    monkeypatch.setattr(simulator, "simulate_grid", simulate_grid)
    argv = [
        "experiment=throughput", "run=goodput", "cluster=hetero1", "profile=[silicon]", "workload=trace1", "seeds=3",
        "policy=[vllm,eft]", "goodput.policies=[eft]", "goodput.n_queries=5", "goodput.slo_scales=[5]", "goodput.within=0.001",
        "workload.arrivals=deterministic", f"hydra.sweep.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(argv) == 0
    table = pd.read_csv(next((tmp_path / "run").glob("*/goodput.csv"))).set_index("policy")
    assert table.rate_at_qps["vllm"] == pytest.approx(1.0, rel=0.002)
    assert table.rate_at_qps["eft"] == pytest.approx(1.5, rel=0.002)
    assert table.ratio["eft"] == pytest.approx(1.5, rel=0.003)
    assert (table.attainment == 0.95).all()

    monkeypatch.setattr(simulator, "simulate_grid", None)  # all is cached
    assert main([*argv, f"hydra.sweep.dir={tmp_path / 'again'}"]) == 0
