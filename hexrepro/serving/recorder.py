"""The gateway's entries in its call log: made as calls end, written once a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrepro.serving.call_log import CallLog, CallRecord

if TYPE_CHECKING:
    from hexrepro.serving.dispatcher import Live

log = logging.getLogger("hexrepro.serving")

_AT_ONCE = 32  # records written before calls have their turn again


class Recorder:
    """Keeps records until `flush` writes them. Raises InputError if the file cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self._log = CallLog(path)
        # numbers that no other call of the file has, those of earlier gateways included: microseconds since 1970; from there on
        # even ones for calls that were placed, odd ones for those turned away
        self._first = time.time_ns() // 2000 * 2
        self._turned_away = 0
        self._records: list[CallRecord] = []
        self._broken = False

    def ended(self, live: Live, how: str, now_s: float) -> None:
        """A call has ended. `now_s`: on the gateway's clock."""
        asked, p = live.asked, live.placement
        unix_s = time.time() - now_s
        number = self._first + 2 * p.call
        self._records.append(
            CallRecord(
                query=asked.query if asked.query is not None else f"call-{number}",
                call=number,
                after=tuple(self._first + 2 * before for before in p.after),
                stage=p.stage,
                tenant=live.tenant,
                slo_s=p.slo_s,
                model=asked.model,
                issued_s=unix_s + live.arrived_s,
                first_token_s=None if live.first_token_s is None else unix_s + live.first_token_s,
                finished_s=unix_s + now_s,
                input_tokens=live.input_tokens,
                cached_tokens=live.cached_tokens,
                output_tokens=live.output_tokens,
                instance=live.instance,
                ended=how,
            )
        )

    def turned_away(
        self,
        why: str,
        place: Mapping[str, Any],
        model: str | None,
        input_tokens: int | None,
        issued_s: float,
        now_s: float,
    ) -> None:
        """A call has been refused before it had a place at an instance, so what it waited for is not known; model and tokens
        are not where its body was not read. `place`: as `protocol.place_of` says."""
        unix_s = time.time() - now_s
        number = self._first + 2 * self._turned_away + 1
        self._turned_away += 1
        self._records.append(
            CallRecord(
                query=place["query"] or f"call-{number}",
                call=number,
                after=(),
                stage=place["stage"],
                tenant=place["tenant"],
                slo_s=place["slo_s"],
                model=model,
                issued_s=unix_s + issued_s,
                first_token_s=None,
                finished_s=unix_s + now_s,
                input_tokens=input_tokens or 0,
                cached_tokens=None,
                output_tokens=0,
                instance=None,
                ended=f"refused_{why}",
            )
        )

    async def flush(self) -> None:
        """Write what there is, and let others run in between."""
        while self._records:
            self._write()
            await asyncio.sleep(0)

    def close(self) -> None:
        """Write what is left."""
        while self._records:
            self._write()
        with contextlib.suppress(OSError):
            self._log.close()

    def _write(self) -> None:
        records, self._records = self._records[:_AT_ONCE], self._records[_AT_ONCE:]
        try:
            self._log.write(records)
        except OSError as error:  # serving goes on without its log
            if not self._broken:
                log.error("the call log cannot be written, calls are missing in it: %s", error.strerror)
            self._broken = True
        else:
            self._broken = False
