"""A discrete-event simulator of LLM instances with continuous batching, faithful to vLLM's scheduler (V1, 0.32).

`simulate` runs one workload once, `simulate_grid` many times in parallel, and a `Simulation` (`session.py`) can be stopped
and changed on its way. Behind them: `start.py`, how a run begins on a busy cluster; `loop.py`, the event loop and dispatch;
`instance.py`, one instance's steps, with `waiting.py`, `decoding.py` and `preemption.py`; `kv.py`, its block pool and prefix
cache; `fairness.py`, VTC's counters; `heaps.py`, priority queues; `state.py`, the memory they all work on.

Where it differs from vLLM on purpose:
- scheduling is synchronous (`async_scheduling` off): the next step is planned when the last has ended;
- planning, sampling and the API take no time, and a step's time is the latency model's;
- calls of equal priority are ordered by their arrival at the instance, to the last;
- a call that could never fit into the KV pool is refused beforehand;
- one KV cache group of full attention: no sliding windows, speculative decoding, LoRA, multimodal input or KV transfer.
"""

from hexrepro.simulator.engine import EngineOptions, Start, simulate, simulate_grid
from hexrepro.simulator.results import GridResult, Result
from hexrepro.simulator.session import Simulation

__all__ = ["EngineOptions", "GridResult", "Result", "Simulation", "Start", "simulate", "simulate_grid"]
