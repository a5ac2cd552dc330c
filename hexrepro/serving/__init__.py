"""The live system: a coordinator with the simulator's own rules, and an OpenAI-compatible gateway in front of real servers.

`coordinator.py` decides, without I/O and with the clock passed in. `queueing.py` orders what waits, `learning.py` is what is
believed of stages, `gateway.py` speaks HTTP, `workflow.py` releases the calls of a declared workflow, `config.py` reads the
cluster file. `python -m hexrepro.serving cluster=FILE` runs it.
"""
