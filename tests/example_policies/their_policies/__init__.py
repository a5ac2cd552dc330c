"""Two policies: one as a `Policy`, one as a YAML file beside this one."""

from pathlib import Path

from hexrepro.scheduling import Policy

LEAN = Policy(
    "lean", dispatch="their_policies.rules:fewest_calls", queue="urgency", dispatch_params={"weight": 1.0}
)
PATIENT = Path(__file__).with_name("patient.yaml")
