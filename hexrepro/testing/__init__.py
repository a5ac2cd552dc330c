"""A test kit for policies: what every scheduling policy should hold to, tried on yours.

At a terminal `python -m hexrepro.scheduling check POLICY`; in a test

    from hexrepro.testing import CHECKS, check_policy

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_policy(check):
        check_policy("my_rules.py:my_rule", check)

A policy is given by its name, a YAML file, a `Policy`, or a single rule (`path/to/file.py:function` or
`package.module:function`), which is then tried with first come, first served or with round robin beside it.

What is drawn is drawn from a seed, small examples first, and a failure is made smaller before it is told.
`checks.py` has the checks, `decisions.py` draws single decisions, `runs.py` whole runs, `starvation.py` long ones.
"""

from hexrepro.testing.checks import CHECKS, Failed, Finding, check_policy, findings

__all__ = ["CHECKS", "Failed", "Finding", "check_policy", "findings"]
