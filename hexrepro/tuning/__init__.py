"""Finding the parameters that serve a load best.

Offline: `space.py`, what may be varied; `objective.py`, what is wanted of it; `evaluate.py`, many candidates on many
arrival seeds in one compiled call; `samplers.py`, Optuna's samplers and storages; `offline.py`, the search; `choice.py`,
how sure and how flat the answer is.
"""
