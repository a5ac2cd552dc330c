"""Real servers: started (`launch.py`), measured (`profile_endpoint.py`, with `endpoint_design.py`, `endpoint_probe.py` and
`endpoint_fit.py`), given a trace (`replay.py`, `prompts.py`, `through_gateway.py`), and held against the simulator
(`fidelity.py`, `lab.py`, `report.py`). The experiments `validation` and `validation_cpu` put these together.
"""
