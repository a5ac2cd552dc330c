"""A discrete-event simulator of LLM instances with continuous batching, faithful to vLLM's scheduler.

`simulate` runs one workload once, `simulate_grid` many times in parallel. `loop.py` is the event loop, `batching.py` one
instance, `kv.py` its block pool and prefix cache, `fairness.py` VTC's counters, `heaps.py` the priority queues.
"""

from hexrepro.simulator.engine import EngineOptions, simulate, simulate_grid
from hexrepro.simulator.results import GridResult, Result

__all__ = ["EngineOptions", "GridResult", "Result", "simulate", "simulate_grid"]
