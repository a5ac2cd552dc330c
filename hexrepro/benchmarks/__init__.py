"""Benchmarks as commands: `python -m hexrepro.benchmarks NAME` prints figures measured side by side in one run."""
