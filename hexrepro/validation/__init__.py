"""Real servers: started (`launch.py`), measured (`profile_endpoint.py`), given a trace (`replay.py`), and held against the
simulator (`fidelity.py`, `lab.py`, `report.py`). The experiments `validation` and `validation_cpu` put these together.
"""
