"""Every scheduling decision, in one copy: the simulator compiles these functions in, the gateway calls them.

`views.py` says what a rule may look at, `dispatch.py` picks an instance for a call, `queues.py` orders the calls that
wait at an instance, `estimates.py` predicts times and splits the SLO, `policy.py` names the pairs. `hexrepro/testing` tries a
policy of anybody's.
"""

from hexrepro.scheduling.estimates import Estimates, base_slo_s, estimate
from hexrepro.scheduling.policy import Policy, load_policy, policy_names

__all__ = ["Estimates", "Policy", "base_slo_s", "estimate", "load_policy", "policy_names"]
