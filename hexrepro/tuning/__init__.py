"""The search for α and other parameters of a policy.

Offline, over whole traces: `space.py` says what is searched, `objective.py` what is wanted, `evaluate.py` scores candidates,
`samplers.py` and `offline.py` search with Optuna, `choice.py` says how sure the best one is. Online, by replaying what has
just happened: `online.py` decides, `history.py` keeps what was seen, `replay.py` guesses the near future, `feed.py` ties a
tuner to a simulation.
"""
