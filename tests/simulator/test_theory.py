"""The engine against queueing theory: mean waits within simulation intervals, and `ciw` as an outside witness.

An instance is turned into a textbook queue by its settings:

- a single server: max_num_seqs = 1, one output token, so that a call is one engine step whose time grows with its prompt;
- k servers: max_num_seqs = k and a step that costs the same whatever the batch, so that a call of N output tokens takes N
  steps; there are tens of thousands of steps in a mean service, so that N is as good as continuous;
- processor sharing: a step costs the same for each sequence in it, so that all present get an equal share.

Every interval is a Student interval over independent replications (own arrivals and own lengths), the first and the last
calls of each left out. The seeds are 0, 1, 2, ..., not chosen. Each interval alone has confidence 1 - 0.01 / INTERVALS, so
that, if the engine is right, all of them together hold their means with probability 99 % (Bonferroni).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hexrepro.cluster.types import Cluster
from hexrepro.scheduling import Policy
from hexrepro.scheduling.rules import queue_rule
from hexrepro.simulator import EngineOptions, simulate
from hexrepro.workload.types import Workload
from tests.strategies import make_instance

LOADS = (0.3, 0.6, 0.8, 0.9)
REPLICATIONS = 24
INTERVALS = 34  # in this file: 12 M/G/1, 8 M/M/k, 8 with priorities, 4 processor sharing, 2 against ciw
CONFIDENCE = 1 - 0.01 / INTERVALS
TOKEN_S = 2.0**-14  # a prompt token, or a decode step
NO_TIME_S = 2.0**-40  # a latency model wants base_s > 0

FCFS = Policy("fcfs", dispatch="round_robin", queue="fcfs")


@queue_rule()
def by_tenant(call, params):
    """Tenant 0 before tenant 1, whoever came first."""
    return float(call.tenant)


PRIORITY = Policy("priority", dispatch="round_robin", queue=f"{__name__}:by_tenant")


# ------------------------------------------------------------------------------------------ queues as an instance


def single_server() -> Cluster:
    return _alone((NO_TIME_S, TOKEN_S, 0.0, 0.0, 0.0), max_num_seqs=1)


def servers(k: int) -> Cluster:
    return _alone((TOKEN_S, 0.0, 0.0, 0.0, 0.0), max_num_seqs=k)


def processor_sharing() -> Cluster:
    return _alone((NO_TIME_S, 0.0, 0.0, TOKEN_S, 0.0), max_num_seqs=512)


def _alone(coefficients: tuple[float, ...], max_num_seqs: int) -> Cluster:
    """One instance, never short of memory or of budget."""
    return Cluster("one", (make_instance("one", coefficients, 2**30, 16, max_num_seqs, 2**30),))


def single_calls(arrival_s: np.ndarray, input_tokens, output_tokens, tenant=0) -> Workload:
    """Queries of one call each."""
    n = len(arrival_s)

    def column(values) -> np.ndarray:
        return np.broadcast_to(values, n).astype(np.int32)

    return Workload(
        name="single calls",
        stage_names=("call",),
        stage=column(0),
        input_tokens=column(input_tokens),
        output_tokens=column(output_tokens),
        template=column(-1),
        template_tokens=column(0),
        context=column(-1),
        context_tokens=column(0),
        tool_time_s=np.zeros(n),
        succ_offsets=np.zeros(n + 1, np.int32),
        successors=np.zeros(0, np.int32),
        query_offsets=np.arange(n + 1, dtype=np.int32),
        arrival_s=arrival_s,
        tenant=column(tenant),
        tenant_names=("first", "second"),
        slo_scale=np.ones(n),
    )


def run(workload: Workload, cluster: Cluster, policy: Policy = FCFS):
    return simulate(workload, cluster, policy, base_slo=1.0, engine=EngineOptions(prefix_caching="off"))


def poisson(rng: np.random.Generator, n: int, rate_qps: float) -> np.ndarray:
    return rng.exponential(1 / rate_qps, n).cumsum()


# ------------------------------------------------------------------------------------------------ service times


class Lengths:
    """A distribution of service times, in tokens of TOKEN_S: how to draw them, and their first two moments in seconds."""

    def __init__(self, draw, mean: float, mean_square: float):
        self.draw, self.mean_s, self.mean_square_s2 = draw, mean * TOKEN_S, mean_square * TOKEN_S**2


def constant(tokens: int) -> Lengths:
    return Lengths(lambda rng, n: np.full(n, tokens), tokens, tokens**2)


def geometric(mean: int) -> Lengths:
    """1, 2, 3, ... with the given mean: the exponential distribution in whole tokens."""
    return Lengths(lambda rng, n: rng.geometric(1 / mean, n), mean, mean * (2 * mean - 1))


def two_sizes(small: int, large: int, share_large: float) -> Lengths:
    p = share_large
    return Lengths(
        lambda rng, n: np.where(rng.random(n) < p, large, small),
        (1 - p) * small + p * large,
        (1 - p) * small**2 + p * large**2,
    )


ONE = constant(1)
MEAN = 10_000
DISTRIBUTIONS = {
    "M/D/1": constant(MEAN),
    "M/M/1": geometric(MEAN),
    "M/G/1": two_sizes(5_000, 40_000, 1 / 7),  # squared coefficient of variation 1.5
}


# -------------------------------------------------------------------------------------------------- the yardstick


def calls_at(rho: float) -> int:
    """Calls of a replication: waits are the longer alike, the heavier the load."""
    return round(max(25_000, 10_000 / (1 - rho)))


def counted(values):
    """Without the first and the last 5 %: there the queue is shorter than it is in the long run."""
    cut = len(values) // 20
    return values[cut:-cut]


def interval(means: list[float]) -> tuple[float, float]:
    """Student interval of the expected value, at CONFIDENCE, from the means of independent replications."""
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(means) - 1) * np.std(means, ddof=1) / math.sqrt(len(means))
    return float(np.mean(means) - half), float(np.mean(means) + half)


def assert_mean(means: list[float], theory: float, less: float = 0.0, more: float = 0.0) -> None:
    """The theoretical mean lies in the interval, or off it by what steps of finite length explain: the engine's mean may be
    up to `less` below the theory's and up to `more` above. The interval is narrow enough to say something.
    """
    low, high = interval(means)
    assert low - more <= theory <= high + less, f"theory {theory:.6g} s, simulated {low:.6g} to {high:.6g} s"
    assert (high - low) / 2 <= theory / 8


def mean_waits(cluster: Cluster, rate_qps: float, n: int, prompts=ONE, outputs=ONE) -> list[float]:
    means = []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        workload = single_calls(poisson(rng, n, rate_qps), prompts.draw(rng, n), outputs.draw(rng, n))
        result = run(workload, cluster)
        means.append(counted(result.admit_s - result.arrival_s).mean())
    return means


# ------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize("rho", LOADS)
@pytest.mark.parametrize("queue", DISTRIBUTIONS)
def test_pollaczek_khinchine(queue: str, rho: float) -> None:
    """M/G/1: mean wait = rate * E[S^2] / (2 (1 - rho))."""
    service = DISTRIBUTIONS[queue]
    rate = rho / service.mean_s
    theory = rate * service.mean_square_s2 / (2 * (1 - rho))
    assert_mean(mean_waits(single_server(), rate, calls_at(rho), prompts=service), theory)


def erlang_c(k: int, offered: float) -> float:
    """The probability that an arrival finds all k servers taken; offered = rate * E[S]."""
    blocked = 1.0  # Erlang B, server by server
    for i in range(1, k + 1):
        blocked = offered * blocked / (i + offered * blocked)
    return blocked / (1 - offered / k * (1 - blocked))


@pytest.mark.parametrize("rho", LOADS)
@pytest.mark.parametrize("k", [2, 4])
def test_erlang_c(k: int, rho: float) -> None:
    """M/M/k: mean wait = C(k, rate * E[S]) * E[S] / (k (1 - rho)).

    A call that comes during a step waits for its end even where a server is free: up to one step more than in theory.
    """
    service = geometric(4 * MEAN)
    rate = k * rho / service.mean_s
    theory = erlang_c(k, k * rho) * service.mean_s / (k * (1 - rho))
    assert_mean(mean_waits(servers(k), rate, calls_at(rho), outputs=service), theory, more=TOKEN_S)


@pytest.mark.parametrize("rho", LOADS)
def test_cobham(rho: float) -> None:
    """Non-preemptive priorities, M/G/1: W1 = W0 / (1 - rho1), W2 = W1 / (1 - rho), W0 = sum of rate_i E[S_i^2] / 2."""
    share = 0.4  # of the calls are first class
    services = (geometric(6_000), DISTRIBUTIONS["M/G/1"])
    mix_s = share * services[0].mean_s + (1 - share) * services[1].mean_s
    rates = rho / mix_s * np.array([share, 1 - share])
    residual_s = sum(rate * s.mean_square_s2 / 2 for rate, s in zip(rates, services, strict=True))
    rho_first = rates[0] * services[0].mean_s
    theory = residual_s / (1 - rho_first), residual_s / (1 - rho_first) / (1 - rho)

    n, means = calls_at(rho), []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        arrival_s, second = poisson(rng, n, rates.sum()), rng.random(n) >= share
        tokens = np.where(second, services[1].draw(rng, n), services[0].draw(rng, n))
        result = run(single_calls(arrival_s, tokens, 1, second), single_server(), PRIORITY)
        wait_s, second = counted(result.admit_s - result.arrival_s), counted(second)
        means.append((wait_s[~second].mean(), wait_s[second].mean()))
    for simulated, expected in zip(np.transpose(means), theory, strict=True):
        assert_mean(simulated.tolist(), float(expected))


@pytest.mark.parametrize("rho", [0.3, 0.8])
@pytest.mark.parametrize("service", [constant(2_000), geometric(2_000)], ids=["M/D/1-PS", "M/M/1-PS"])
def test_processor_sharing(service: Lengths, rho: float) -> None:
    """M/G/1-PS: mean time in system = E[S] / (1 - rho), whatever the distribution of S.

    Tokens are of finite length: a call waits for the round in progress and is served round by round, a round of all
    present (1 / (1 - rho) of them on average) more or less than in theory at each end.
    """
    n, times = calls_at(rho), []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        arrival_s = poisson(rng, n, rho / service.mean_s)
        result = run(single_calls(arrival_s, 1, service.draw(rng, n)), processor_sharing())
        times.append(counted(result.latency_s).mean())
    rounds_s = 2 * TOKEN_S / (1 - rho)
    assert_mean(times, service.mean_s / (1 - rho), less=rounds_s, more=rounds_s)


def test_lindley() -> None:
    """One server, call by call: each wait is max(0, wait + service - time between arrivals) of the one before."""
    rng = np.random.default_rng(0)
    n = 20_000
    arrival_s, tokens = poisson(rng, n, 0.9 / (MEAN * TOKEN_S)), geometric(MEAN).draw(rng, n)
    service_s = NO_TIME_S + TOKEN_S * tokens
    wait_s = np.zeros(n)
    for i in range(1, n):
        wait_s[i] = max(0.0, wait_s[i - 1] + service_s[i - 1] - (arrival_s[i] - arrival_s[i - 1]))
    result = run(single_calls(arrival_s, tokens, 1), single_server())
    np.testing.assert_allclose(result.admit_s - result.arrival_s, wait_s, rtol=0, atol=1e-6)


def test_ciw_agrees_on_two_servers_with_priorities() -> None:
    """M/M/2 with two classes whose service times differ: no closed form, so another simulator is the judge.

    The intervals of the differences (Welch) hold zero.
    """
    ciw = pytest.importorskip("ciw")
    k, replications, n = 2, 16, 4_000
    mean_tokens = (MEAN // 2, 2 * MEAN)
    rates = (
        0.8 * k * np.array([0.5, 0.5]) / np.multiply(mean_tokens, TOKEN_S)
    )  # each class brings half of the load

    network = ciw.create_network(
        arrival_distributions={
            c: [ciw.dists.Exponential(r)] for c, r in zip("AB", rates.tolist(), strict=True)
        },
        service_distributions={
            c: [ciw.dists.Exponential(1 / (m * TOKEN_S))] for c, m in zip("AB", mean_tokens, strict=True)
        },
        number_of_servers=[k],
        priority_classes={"A": 0, "B": 1},
    )
    witness, ours = [], []
    for seed in range(replications):
        ciw.seed(seed)
        simulation = ciw.Simulation(network)
        simulation.simulate_until_max_customers(n, method="Finish")
        records = counted(sorted(simulation.get_all_records(), key=lambda record: record.arrival_date))
        witness.append([np.mean([r.waiting_time for r in records if r.customer_class == c]) for c in "AB"])

        rng = np.random.default_rng(seed)
        arrival_s = poisson(rng, n, rates.sum())
        second = rng.random(n) < rates[1] / rates.sum()
        tokens = np.where(second, rng.geometric(1 / mean_tokens[1], n), rng.geometric(1 / mean_tokens[0], n))
        result = run(single_calls(arrival_s, 1, tokens, second), servers(k), PRIORITY)
        wait_s, second = counted(result.admit_s - result.arrival_s), counted(second)
        ours.append([wait_s[~second].mean(), wait_s[second].mean()])
    test = stats.ttest_ind(ours, witness, equal_var=False)
    difference = test.confidence_interval(CONFIDENCE)
    assert (difference.low <= TOKEN_S).all()
    assert (difference.high >= 0).all()
    assert np.mean(ours, axis=0)[1] > 3 * np.mean(ours, axis=0)[0]  # the case is one where priority matters
