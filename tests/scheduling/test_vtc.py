"""The virtual token counter (arXiv 2401.00588): cases worked out by hand, and the paper's bound on unfairness.

Prices as in the paper: 1 a prompt token, 2 a generated one. A step takes 1 s.
"""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.cluster.types import Cluster
from hexrepro.scheduling import Policy
from hexrepro.simulator import EngineOptions, simulate
from tests.strategies import make_instance, make_workload

A, B = 0, 1


def vtc(client: str = "tenant", **prices: float) -> Policy:
    return Policy("vtc", "round_robin", "vtc", queue_params=prices, client=client)


def query(tenant: int, arrival_s: float, input_tokens: int = 4, output_tokens: int = 4) -> dict:
    calls = [dict(input_tokens=input_tokens, output_tokens=output_tokens)]
    return dict(tenant=tenant, arrival_s=arrival_s, calls=calls)


BY_TENANT = vtc()


def run(queries: list[dict], policy: Policy | str = BY_TENANT, slots: int = 1):
    cluster = Cluster(
        "one", (make_instance("one", (1.0, 0, 0, 0, 0), 2**16, max_num_seqs=slots, budget=2**16),)
    )
    workload = make_workload(queries, n_tenants=2)
    return simulate(workload, cluster, policy, base_slo=100.0, engine=EngineOptions(prefix_caching="off"))


def test_two_clients_take_turns() -> None:
    """A call of 4 + 4 tokens costs 4 + 8. Counters after each: A 12, B 12, A 24 (ties to the lower index), B 24, A, A."""
    result = run([query(A, 0) for _ in range(4)] + [query(B, 0) for _ in range(2)])
    assert result.admit_s.tolist() == [0, 8, 16, 20, 4, 12]


def test_a_client_with_short_calls_gets_more_of_them() -> None:
    """A's calls cost 4 + 2 * 8 = 20, B's 4 + 2 * 3 = 10. A 20, B 10, B 20, A 40, B 30, B 40, A."""
    result = run([query(A, 0, 4, 8) for _ in range(3)] + [query(B, 0, 4, 3) for _ in range(4)])
    assert result.admit_s[:3].tolist() == [0, 14, 28]
    assert result.admit_s[3:].tolist() == [8, 11, 22, 25]


def test_prompts_are_charged_too_at_their_price() -> None:
    """With prompts free and all calls of one output length, clients alternate; at 1 a token A's long prompts tell."""
    queries = [query(A, 0, 40, 4) for _ in range(2)] + [query(B, 0, 4, 4) for _ in range(4)]
    assert run(queries, vtc(input_weight=0.0)).admit_s.tolist() == [0, 8, 4, 12, 16, 20]
    assert run(queries).admit_s.tolist() == [0, 20, 4, 8, 12, 16]  # A 48, B 12, 24, 36, 48, A by the tie


def test_who_was_away_gets_no_credit() -> None:
    """B comes at 8.5, inside A's third call. A has 24 for two calls and 4 for the third prompt: B is lifted to 28. At 12
    A has 36, B goes first (to 40), then A, then B. Without the lift B's two would both go before A's.
    """
    result = run([query(A, 0) for _ in range(4)] + [query(B, 8.5) for _ in range(2)])
    assert result.admit_s.tolist() == [0, 4, 8, 16, 12, 20]


def test_fair_to_queries_or_to_tenants() -> None:
    """A sends one query of four parallel calls and one of one, B one of one. Between queries, all three take turns."""
    four = dict(tenant=A, arrival_s=0, calls=[dict(input_tokens=4, output_tokens=4) for _ in range(4)])
    queries = [four, query(A, 0), query(B, 0)]
    assert run(queries, vtc("query")).admit_s.tolist() == [0, 12, 16, 20, 4, 8]
    assert run(queries, vtc("tenant")).admit_s.tolist() == [0, 8, 12, 16, 20, 4]


def service(result, workload: list[dict], tenant: int, times: np.ndarray) -> np.ndarray:
    """What a tenant was served by each time, in the paper's measure: 1 a prompt token of admitted calls, 2 a token out."""
    total = np.zeros(len(times))
    for i, q in enumerate(workload):
        if q["tenant"] == tenant:
            (c,) = q["calls"]
            steps = np.floor(times - result.admit_s[i])  # each ends with a token, from the first on
            total += (times >= result.admit_s[i]) * c["input_tokens"]
            total += 2 * np.clip(steps, 0, c["output_tokens"])
    return total


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_bound_between_two_backlogged_clients(slots: int, seed: int) -> None:
    """Theorem of the paper: while both have calls waiting, the services of two clients differ by 2 U at most, with
    U = max(1 * longest prompt, 2 * tokens of a full batch). FCFS exceeds it on the same calls.
    """
    rng = np.random.default_rng(seed)
    longest = 30
    queries = []
    for i in range(1600):  # A's calls are long, B's are short, and A sends three for each of B's
        tenant = B if i % 4 == 3 else A
        low = 20 if tenant == A else 1
        lengths = rng.integers(low, low + 10, 2, endpoint=True).tolist()
        queries.append(query(tenant, 0.0, *lengths))
    bound = 2 * max(longest, 2 * slots * 2 * longest)
    worst = {}
    for name, policy in (("vtc", BY_TENANT), ("fcfs", "vllm")):
        result = run(queries, policy, slots)
        tenant = np.array([q["tenant"] for q in queries])
        backlogged_s = min(result.admit_s[tenant == t].max() for t in (A, B))
        times = np.arange(1.0, backlogged_s)
        served = [service(result, queries, t, times) for t in (A, B)]
        worst[name] = np.abs(served[0] - served[1]).max()
        assert max(s[-1] for s in served) > 5 * bound  # long enough for the bound to say something
    assert worst["vtc"] <= bound < worst["fcfs"]
