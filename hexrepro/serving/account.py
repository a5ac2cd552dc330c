"""The instances as the rules see them: what each has to do, by the coordinator's own books, and how fast it is believed to be.

The books are kept as the simulator keeps its own, in the same order of operations, so that they are equal to the bit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.scheduling.views import SPEEDS, believe, instance_views
from hexrepro.serving.queries import Call

_BAND = 1.2  # an instance's speed is corrected when it is off by more than this factor
_LEAST_TOKENS = 8  # of an answer whose pace is held against the model


class Account:
    """views  INSTANCE[M], what is believed of each instance, and the load columns that are booked here
    speed     float64[M], an instance takes so many times what its latency model says
    waiting   calls that wait, at all instances together
    """

    def __init__(self, cluster: Cluster, speed_window: int) -> None:
        self._cluster, self._window = cluster, speed_window
        self.views = instance_views(cluster)
        self.speed = np.ones(len(cluster))
        self.waiting = 0
        self._idle = self.views.copy()  # as configured
        self._columns = {name: self.views[name] for name in self.views.dtype.names}
        self._paces: list[deque[float]] = [deque(maxlen=max(speed_window, 1)) for _ in cluster.instances]

    # ---- load ----------------------------------------------------------------------------------------------

    def book(self, call: Call) -> None:
        """The call waits at its instance (simulator: `place`)."""
        c, m = self._columns, call.instance
        output_tokens = call.output_estimate * call.sequences
        c["prefill_tokens"][m] += call.prefill_left
        c["output_tokens"][m] += output_tokens
        c["kv_tokens"][m] += call.input_tokens + output_tokens
        c["outstanding_s"][m] += call.estimate_s
        c["dispatched_s"][m] += call.estimate_s
        self.waiting += 1
        c["waiting"][m] += 1
        c["waiting_s"][m] += call.estimate_s

    def start(self, call: Call) -> None:
        """It runs (simulator: `admit`). Nothing if that was known."""
        if not call.running:
            call.running = True
            self._columns["running"][call.instance] += 1
            self._not_waiting(call)

    def first_token(self, call: Call, now_s: float) -> None:
        """Its prompt has been computed."""
        self.start(call)
        self._prompt_done(call)
        call.first_token_s, call.batch = now_s, int(self._columns["running"][call.instance])

    def leave(self, call: Call) -> None:
        """Take it off its instance (simulator: `next_finished`)."""
        c, m = self._columns, call.instance
        if call.running:
            c["running"][m] -= 1
        else:
            self._not_waiting(call)
        if call.prefill_left > 0.0:
            self._prompt_done(call)
        outstanding = c["running"][m] + c["waiting"][m] > 0
        output_tokens = call.output_estimate * call.sequences
        kv_tokens = call.input_tokens + output_tokens
        c["outstanding_s"][m] = c["outstanding_s"][m] - call.estimate_s if outstanding else 0.0
        c["output_tokens"][m] = c["output_tokens"][m] - output_tokens if outstanding else 0.0
        c["kv_tokens"][m] = c["kv_tokens"][m] - kv_tokens if outstanding else 0.0

    def _not_waiting(self, call: Call) -> None:
        c, m = self._columns, call.instance
        self.waiting -= 1
        c["waiting"][m] -= 1
        c["waiting_s"][m] = c["waiting_s"][m] - call.estimate_s if c["waiting"][m] > 0 else 0.0

    def _prompt_done(self, call: Call) -> None:
        at = self._columns["prefill_tokens"]
        at[call.instance] = max(0.0, at[call.instance] - call.prefill_left)
        call.prefill_left = 0.0

    # ---- speed ---------------------------------------------------------------------------------------------

    def believe(self, m: int, factor: float) -> None:
        """Instance m takes `factor` times as long as its latency model says."""
        believe(self.views, self._idle, m, factor)
        self.speed[m] = factor

    def believed_cluster(self) -> Cluster:
        """The cluster with the step times that are believed at present."""
        instances = tuple(
            replace(spec, latency=replace(spec.latency, **{n: float(view[n]) for n in SPEEDS}))
            for spec, view in zip(self._cluster.instances, self.views, strict=True)
        )
        return Cluster(self._cluster.name, instances)

    def slower_by(self, call: Call, now_s: float, output_tokens: int) -> float | None:
        """The factor that calls of the call's instance now say, this finished one included, if it is to be believed: when
        `speed_window` of them are together, and it is off by more than 20 %.

        The pace of a call's decode steps is held against the latency model at the batch that it ran in. Prompts of other calls
        lengthen steps too, on all instances alike; the median over calls and the band of 20 % keep that noise out.
        """
        if self._window == 0 or call.first_token_s is None:
            return None
        if output_tokens < _LEAST_TOKENS or call.sequences > 1:
            return None
        m, at = call.instance, self._idle[call.instance]
        batch = 0.5 * (call.batch + self._columns["running"][m] + 1)
        kv_tokens = batch * (call.input_tokens + 0.5 * output_tokens)
        predicted_s = float(at["base_s"] + at["sequence_s"] * batch + at["kv_token_s"] * kv_tokens)
        paces = self._paces[m]
        paces.append((now_s - call.first_token_s) / (output_tokens - 1) / predicted_s)
        if len(paces) < self._window:
            return None
        factor = float(np.median(paces))
        paces.clear()
        return factor if factor > 0 and not 1 / _BAND < factor / self.speed[m] < _BAND else None
