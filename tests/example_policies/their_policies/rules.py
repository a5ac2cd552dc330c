from hexrepro.scheduling.rules import dispatch_rule
from their_policies.helpers import calls_at


@dispatch_rule(weight=1.0)
def fewest_calls(call, t_comp_s, instances, params):
    """The instance with the fewest calls, each weighted by the time of this one there; ties to the lower index."""
    best = 0
    for m in range(1, len(instances)):
        if (
            params[0] * calls_at(instances[m]) * t_comp_s[m]
            < params[0] * calls_at(instances[best]) * t_comp_s[best]
        ):
            best = m
    return best
