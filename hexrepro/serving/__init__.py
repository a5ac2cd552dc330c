"""The live system: an OpenAI-compatible gateway in front of real servers, with the simulator's own rules.

A request's way: `gateway.py` (HTTP) -> `access.py`, `protocol.py` (may it, is it right) -> `dispatcher.py` (placed, queued,
sent, sent elsewhere) -> `upstream.py`, `connections.py` (the server) -> `relay.py`, `events.py` (a stream on its way back).
`coordinator.py` decides, without I/O and with the clock passed in: `decision.py` is one decision, `learning.py` what is
believed of stages. `queueing.py` orders what waits, `health.py` looks after the instances, `config.py` reads the cluster
file, `workflow.py` releases the calls of a declared workflow. `python -m hexrepro.serving cluster=FILE` runs it.
"""
