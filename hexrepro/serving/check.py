"""`check=true`: asks every instance whether it is there and serves what clients will ask for, before any client does."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hexrepro.serving.config import Serving
from hexrepro.serving.connections import Lost
from hexrepro.serving.upstream import Upstream


@dataclass(frozen=True)
class Finding:
    """What one instance said. `models`: its names for what it serves; None if it did not say. `took_s`: of `/health`."""

    instance: str
    url: str
    is_up: bool
    says: str
    models: tuple[str, ...] | None
    took_s: float

    def serves(self, asked: tuple[str, ...]) -> bool:
        return self.models is not None and set(asked) <= set(self.models)


async def check(serving: Serving, console: Console | None = None) -> bool:
    """Print a table of the instances; True if all are up and serve every model that clients may ask for."""
    upstreams = [
        Upstream(spec.name, url, serving.settings.timeouts, key)
        for spec, url, key in zip(serving.cluster.instances, serving.urls, serving.keys, strict=True)
    ]
    try:
        findings = await asyncio.gather(*map(_ask, upstreams))
    finally:
        for upstream in upstreams:
            upstream.pool.close()
    asked = serving.models
    table = Table("instance", "url", "up", f"serves {', '.join(asked)}", "latency, ms", box=None)
    for finding in findings:
        serves = "yes" if finding.serves(asked) else _instead(finding)
        took = f"{1e3 * finding.took_s:.1f}" if finding.is_up else "–"
        table.add_row(finding.instance, finding.url, finding.says, serves, took)
    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=150)
    console.print(table)
    return all(f.is_up and f.serves(asked) for f in findings)


async def _ask(upstream: Upstream) -> Finding:
    began_s = time.perf_counter()
    took_s, models = 0.0, None
    try:
        status = (await upstream.get("/health")).status
        took_s = time.perf_counter() - began_s
        is_up, says = status == 200, "yes" if status == 200 else f"no: status {status}"
        if is_up:
            answer = await upstream.get("/v1/models")
            if answer.status in (401, 403):
                says = "yes, but it refuses the key (api_key_env)"
            elif answer.status == 200:
                models = tuple(str(m["id"]) for m in json.loads(answer.content)["data"])
    except TimeoutError:
        is_up, says = False, f"no: no answer in {upstream.timeouts.probe_s:g} s"
    except OSError:
        is_up, says = False, "no: it refuses connections"
    except Lost:
        is_up, says = False, "no: it broke off its answer"
    except (ValueError, KeyError, TypeError):
        is_up, says = True, "yes"  # but what it says of its models cannot be read
    return Finding(upstream.name, upstream.url, is_up, says, models, took_s)


def _instead(finding: Finding) -> str:
    if finding.models is None:
        return "–" if not finding.is_up else "it does not say"
    return "no: " + (", ".join(finding.models) or "nothing")
