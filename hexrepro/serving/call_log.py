"""A log of calls that ended, one JSON object a line: what a trace needs, and never a prompt, an answer or a key.

The gateway writes one when it is told a file (`call_log=FILE`); agents write their own, which `hexrepro.workload` reads as a
trace in the same way. Lines are appended whole, so a log that was cut off lacks at most its last line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from hexrepro.errors import InputError


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call. Times are Unix time in seconds; None where it is not known.

    query          calls with the same id, of the same tenant, are one query
    call           a number that no other call of the log has
    after          the calls that this one waited for
    slo_s          seconds that the whole query may take
    issued_s       when the client sent it; first_token_s, finished_s as the client saw them
    input_tokens   of the prompt, those found in the prefix cache (cached_tokens) included; 0 where it was not read
    ended          done, or how it failed: failed, broken, rejected, cancelled; or why the gateway turned it away before it had
                   a place at an instance: refused_overload, refused_tenant, refused_no_instance, refused_draining
    """

    query: str
    call: int
    after: tuple[int, ...]
    stage: str
    tenant: str
    slo_s: float | None
    model: str | None
    issued_s: float
    first_token_s: float | None
    finished_s: float
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    instance: str | None
    ended: str = "done"


class CallLog:
    """Appends records to a file. A context manager; `write` may be given several at once, for one write to the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            if self._file.tell() and not _ends_in_newline(
                self.path
            ):  # cut off: what follows shall not be lost with it
                self._file.write(b"\n")
        except OSError as error:
            raise InputError(f"call log {self.path}: it cannot be written ({error.strerror})") from None

    def write(self, records: Iterable[CallRecord]) -> None:
        lines = [json.dumps(asdict(record), separators=(",", ":")) + "\n" for record in records]
        if lines:
            self._file.write("".join(lines).encode())
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CallLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
