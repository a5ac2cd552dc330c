"""The random numbers that a rule may use: a call's own, whatever the thread or the order of the calls."""

import numpy as np

from hexrepro.compiled import kernel


@kernel
def uniform(seed, index):
    """A uniform number in [0, 1) that depends on seed and index alone (SplitMix64)."""
    z = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(index + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * (1.0 / (1 << 53))
