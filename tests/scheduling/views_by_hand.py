"""Views for rules, made by hand: what a test doesn't name is harmless."""

from __future__ import annotations

import numpy as np

from hexrepro.scheduling.rules import Rule
from hexrepro.scheduling.views import CALL, INSTANCE


def instances(count: int = 0, **columns) -> np.ndarray:
    """INSTANCE[M], one value a column for all or a list of M. A step takes 1 s, memory and slots are plenty."""
    count = count or max(np.size(values) for values in columns.values())
    views = np.zeros(count, INSTANCE)
    defaults = dict(base_s=1.0, max_num_seqs=256, max_num_batched_tokens=2048, block_size=16, load_weight=1.0)
    for name, values in (defaults | dict(kv_capacity_tokens=2**20) | columns).items():
        views[name] = values
    return views


def call(**fields) -> np.record:
    """CALL: a prompt of 10 tokens, 10 more expected."""
    view = np.zeros(1, CALL)
    for name, value in (dict(input_tokens=10, output_tokens=10.0) | fields).items():
        view[name] = value
    return view[0]


def decide(rule: Rule, views: np.ndarray, t_comp_s=None, the_call=None, **params: float) -> int:
    """The instance that a dispatch rule picks; t_comp_s[M] is 1 s everywhere if not given."""
    t_comp_s = np.ones(len(views)) if t_comp_s is None else np.array(t_comp_s, np.float64)
    return rule(call() if the_call is None else the_call, t_comp_s, views, rule.params(**params))
