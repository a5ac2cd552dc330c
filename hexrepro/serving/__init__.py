"""The live system: an OpenAI-compatible gateway in front of real servers, with the simulator's own rules.

A request's way: `gateway.py` (HTTP) -> `access.py`, `request_body.py`, `protocol.py` (may it, is it right) -> `dispatcher.py`
(placed, queued, sent, sent elsewhere) -> `upstream.py`, `connections.py` (the server) -> `relay.py`, `events.py` (a stream on
its way back). What is turned away is told in the words of `refusals.py`; `about.py` answers all that is no call.

`coordinator.py` decides, without I/O and with the clock passed in: `decision.py` is one decision, `account.py` the load and
speed of the instances, `queries.py` which calls belong together, `learning.py` what is believed of stages. `queueing.py` orders
what waits, `health.py` looks after the instances. `config.py` reads the cluster file and the settings, `options.py` is the
coordinator's part of them. `recorder.py` writes the call log, `metrics.py` is what Prometheus reads, `tuner_log.py` what the
tuner of alpha hears. `workflow.py` releases the calls of a declared workflow, at the client's side.

`python -m hexrepro.serving cluster=FILE` runs it; `check.py` asks the servers first.
"""
