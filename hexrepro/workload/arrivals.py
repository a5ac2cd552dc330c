"""Arrival processes: when queries arrive, in seconds from the start of a run.

All random numbers come from NumPy's PCG64 with the given seed, but for `released`, which repeats the released
simulator's.
"""

from __future__ import annotations

import csv
import inspect
import os
from collections.abc import Callable

import numpy as np

from hexrepro.errors import InputError


def arrival_times(
    process: str, n: int, rate_qps: float | None = None, seed: int = 0, **options: object
) -> np.ndarray:
    """Arrival times of ``n`` queries, float64[n], seconds, nondecreasing.

    ``process``: a name in :data:`PROCESSES`. ``rate_qps``: the mean rate in queries/s; only `recorded` can do
    without.
    ``options``: what the process takes besides (see its function). Every process keeps the mean rate.
    """
    if process not in PROCESSES:
        raise InputError(f"arrivals: unknown process {process!r}; known are {', '.join(PROCESSES)}")
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise InputError(f"arrivals: n is {n!r}; it must be a whole number of queries from 1")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InputError(f"arrivals: seed is {seed!r}; it must be a whole number from 0")
    if rate_qps is not None or process != "recorded":
        rate_qps = _positive("rate_qps", rate_qps)
    draw = PROCESSES[process]
    known = [name for name in inspect.signature(draw).parameters if name not in ("n", "rate_qps", "seed")]
    for name in options:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise InputError(f"arrivals: process {process!r} has no option {name!r}; {takes}")
    return draw(int(n), rate_qps, int(seed), **options)


def poisson(n: int, rate_qps: float, seed: int) -> np.ndarray:
    """Independent exponential gaps with mean 1/rate."""
    return np.cumsum(_rng(seed).standard_exponential(n)) / rate_qps


def gamma(n: int, rate_qps: float, seed: int, cv: float = 1.0) -> np.ndarray:
    """Independent gamma gaps with mean 1/rate and coefficient of variation ``cv`` (their standard deviation
    over their mean).

    cv = 1 has the law of a Poisson process, cv < 1 is more even, cv > 1 comes in clumps.
    """
    cv = _positive("cv", cv)
    shape = 1.0 / cv**2
    return np.cumsum(_rng(seed).standard_gamma(shape, n)) / (shape * rate_qps)


def onoff(
    n: int, rate_qps: float, seed: int, peak: float = 5.0, on_s: float = 10.0, random_phases: bool = True
) -> np.ndarray:
    """Bursts: Poisson arrivals at ``peak`` times the mean rate while on, none while off.

    An on phase lasts ``on_s`` seconds and an off phase (peak - 1) times that, so that the mean rate holds;
    both are means of exponential lengths, or the lengths themselves without ``random_phases``. The process is
    started in its steady state: on with probability 1/peak, somewhere inside a phase.
    """
    peak = _positive("peak", peak)
    on_s = _positive("on_s", on_s)
    if peak < 1:
        raise InputError(
            f"arrivals: peak is {peak}; it must be at least 1, the rate while on over the mean rate"
        )
    rng = _rng(seed)
    # arrivals on a clock that runs only while the process is on
    on_clock = np.cumsum(rng.standard_exponential(n)) / (rate_qps * peak)
    off_s = (peak - 1) * on_s
    starts_on = rng.random() < 1 / peak
    inside = (
        1.0 if random_phases else rng.random()
    )  # what is left of the first phase; an exponential never ages
    on, off = np.zeros(0), np.zeros(0)
    while on.sum() <= on_clock[-1]:
        more = 16 + int(on_clock[-1] / on_s)
        length = rng.standard_exponential((2, more)) if random_phases else np.ones((2, more))
        if len(on) == 0:
            length[0 if starts_on else 1, 0] *= inside
        on = np.concatenate([on, length[0] * on_s])
        off = np.concatenate([off, length[1] * off_s])
    ended = np.cumsum(on)
    phase = np.searchsorted(ended, on_clock, side="left")
    # off phases before on phase k: 0 .. k-1 when the process starts on, 0 .. k otherwise
    off_before = np.concatenate([[0.0], np.cumsum(off)])
    return on_clock + off_before[phase + (0 if starts_on else 1)]


def modulated(
    n: int, rate_qps: float, seed: int, sigma: float = 0.5, corr_queries: float = 50.0
) -> np.ndarray:
    """Poisson arrivals whose rate wanders: its logarithm is an Ornstein-Uhlenbeck process in its steady state.

    ``sigma``: standard deviation of the log rate. ``corr_queries``: the log rate's correlation time in mean gaps, so that
    counts are as bursty at any rate (as a recorded trace is when it is stretched). The mean rate holds:
    the rate is rate_qps * exp(sigma x - sigma^2 / 2), x standard normal. It is held for 1/20 of the correlation time.
    """
    sigma, corr = _positive("sigma", sigma), _positive("corr_queries", corr_queries)
    rng = _rng(seed)
    count = np.cumsum(rng.standard_exponential(n))  # arrival times on a clock on which the rate is 1
    step = corr / 20
    keep = np.exp(-step / corr)
    x, upto = (
        rng.standard_normal(),
        [0.0],
    )  # the log rate over sigma; the expected count at the end of each step
    while upto[-1] <= count[-1]:
        for noise in rng.standard_normal(16 + int(n / step)) * np.sqrt(1 - keep**2):
            upto.append(upto[-1] + step * np.exp(sigma * x - sigma**2 / 2))
            x = keep * x + noise
    return np.interp(count, upto, np.arange(len(upto)) * step) / rate_qps


def deterministic(n: int, rate_qps: float, seed: int) -> np.ndarray:
    """One query every 1/rate seconds, the first after 1/rate. The seed has no effect."""
    return np.arange(1, n + 1) / rate_qps


def released(n: int, rate_qps: float, seed: int) -> np.ndarray:
    """The released simulator's arrivals: Poisson from NumPy's legacy generator, the same numbers for the same
    seed."""
    size = int(rate_qps * 1.2 * 2 * n / rate_qps)
    legacy = np.random.RandomState(seed)
    return np.cumsum(legacy.gamma(1, 1 / rate_qps, size=size))[:n]


def recorded(n: int, rate_qps: float | None, seed: int, times_s: object = None) -> np.ndarray:
    """The first ``n`` of the given ``times_s``, shifted so that the first is 0, and stretched to a mean rate
    if one is given.

    The mean rate of recorded times is (n - 1) gaps over the time between the first and the last. The seed has
    no effect.
    """
    if times_s is None:
        raise InputError(
            "arrivals: process 'recorded' needs the option times_s, the recorded times in seconds"
        )
    times = np.asarray(times_s)
    if times.ndim != 1 or times.dtype.kind not in "iuf":
        raise InputError(f"arrivals: times_s must be a list of numbers, not {times.ndim}-d {times.dtype}")
    times = times.astype(np.float64)
    if len(times) < n:
        raise InputError(f"arrivals: times_s holds {len(times)} times; it must hold at least n = {n}")
    times = times[:n]
    if not np.isfinite(times).all():
        at = int(np.argmin(np.isfinite(times)))
        raise InputError(f"arrivals: times_s[{at}] is {times[at]}; it must be finite")
    if np.any(np.diff(times) < 0):
        at = int(np.argmax(np.diff(times) < 0)) + 1
        raise InputError(
            f"arrivals: times_s[{at}] is {times[at]}, before {times[at - 1]}; times must not fall"
        )
    times = times - times[0]
    if rate_qps is None or n == 1:
        return times
    if times[-1] == 0:
        raise InputError("arrivals: all of times_s are equal; a rate can only be given to times that differ")
    return times * ((n - 1) / times[-1] / rate_qps)


PROCESSES: dict[str, Callable[..., np.ndarray]] = {
    "poisson": poisson,
    "gamma": gamma,
    "onoff": onoff,
    "modulated": modulated,
    "deterministic": deterministic,
    "recorded": recorded,
    "released": released,
}


def read_times_s(path: str | os.PathLike[str]) -> np.ndarray:
    """Recorded arrival times from a text file, float64[n], seconds from the first.

    One time a line: seconds as a number, or a date and time of day. In a CSV file the first column counts; a first line
    that holds no time is taken for a header.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            cells = [row[0].strip() for row in csv.reader(file) if row and row[0].strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    times: list[float] = []
    for line, text in enumerate(cells):
        time = _seconds(text)
        if time is not None:
            times.append(time)
        elif line > 0:
            raise InputError(f"{path}: line {line + 1} holds {text!r}; it must be seconds or a date and time")
    if len(times) < 2:
        raise InputError(f"{path}: holds {len(times)} times; it must hold at least 2, one a line")
    later = np.array(times)
    if np.any(np.diff(later) < 0):
        at = int(np.argmax(np.diff(later) < 0)) + 1
        raise InputError(f"{path}: time {at + 1} is before the one above it; times must not fall")
    return later - later[0]


def _seconds(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        try:
            # NumPy reads ISO 8601 with any number of decimals
            return float(np.datetime64(text.rstrip("Z"), "ns").astype(np.int64)) * 1e-9
        except ValueError:
            return None
    return number if np.isfinite(number) else None


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _positive(name: str, value: object) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not np.isfinite(value) or value <= 0:
        raise InputError(f"arrivals: {name} is {value!r}; it must be a finite number above 0")
    return float(value)
