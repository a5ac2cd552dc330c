"""A simulated coordinator: it tells a tuner what happens in a `Simulation`, and lets it set alpha."""

from __future__ import annotations

import numpy as np

from hexrepro.simulator.session import Simulation
from hexrepro.tuning.online import OnlineTuner

_ARRIVED, _FIRST, _FINISHED, _DISPATCHED = range(4)  # in this order at equal times


class Feed:
    """Passes on the events of a simulation, in order of time, each once."""

    def __init__(self, simulation: Simulation, tuner: OnlineTuner) -> None:
        self.simulation, self.tuner = simulation, tuner
        self._told_s = -np.inf
        self._first = 0  # the first query that has not finished
        self._left = np.diff(simulation.workload.query_offsets).tolist()
        self._alpha = list(simulation.policy.dispatch_rule.defaults).index("alpha")

    def advance(self, until_s: float) -> None:
        """Let the simulation go on to `until_s`, tell the tuner, and use the alpha that it then wants."""
        self.simulation.advance(until_s)
        self.tell()
        self.tuner.step(until_s)
        self.simulation.params[self._alpha] = self.tuner.alpha

    def tell(self) -> None:
        """Pass on what has happened since the last time."""
        w, calls, history = self.simulation.workload, self.simulation.calls, self.tuner.history
        since_s, now_s = self._told_s, self.simulation.now_s
        self._told_s = now_s
        # what is new lies between the first unfinished query and the last that has arrived
        while self._first < w.n_queries - 1 and self._left[self._first] == 0:
            self._first += 1
        last = int(np.searchsorted(w.arrival_s, now_s, side="right"))
        begin, end = int(w.query_offsets[self._first]), int(w.query_offsets[last])
        events = []
        for kind, first, times in (
            (_ARRIVED, self._first, w.arrival_s[self._first : last]),
            (_FIRST, begin, calls["first_token_s"][begin:end]),
            (_FINISHED, begin, calls["finish_s"][begin:end]),
            (_DISPATCHED, begin, calls["release_s"][begin:end]),
        ):
            new = first + np.flatnonzero((times > since_s) & (times <= now_s))
            events += zip(times[new - first].tolist(), [kind] * len(new), new.tolist(), strict=True)
        events.sort()
        for time_s, kind, i in events:
            if kind == _ARRIVED:
                history.query_arrived(
                    i, time_s, slo_s=float(self.simulation.slo_s[i]), tenant=int(w.tenant[i])
                )
                continue
            query = int(w.query[i])
            if kind == _DISPATCHED:
                history.call_dispatched(
                    query,
                    i,
                    time_s,
                    stage=w.stage_names[w.stage[i]],
                    input_tokens=int(w.input_tokens[i]),
                    instance=int(calls["instance"][i]),
                    key=float(calls["key"][i]),
                    estimate_s=float(calls["estimate_s"][i]),
                    budget_s=float(calls["budget_s"][i]),
                    template=int(w.template[i]),
                    template_tokens=int(w.template_tokens[i]),
                )
            elif kind == _FIRST:
                history.first_token(query, i, time_s)
            else:
                history.call_finished(query, i, time_s, int(w.output_tokens[i]))
                self._left[query] -= 1
                if self._left[query] == 0:
                    history.query_finished(query, time_s)
