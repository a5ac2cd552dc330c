"""hexrepro-gateway: OpenAI's API in front of your model servers, scheduled call by call.

    python -m hexrepro.serving cluster=FILE [NAME=VALUE ...]        run it (installed: hexrepro-gateway cluster=FILE ...)
    python -m hexrepro.serving cluster=FILE check=true              ask every server whether it is ready, and go
    python -m hexrepro.serving --help

cluster=FILE   your servers, models and tenants; conf/serving/example_cluster.yaml is one to copy
policy=NAME    how calls are dispatched and ordered (hexgen_flow); `python -m hexrepro --help` lists all
view=NAME      which hardware profile of the model is believed (silicon, measured); a file's own `profile` goes first
NAME=VALUE     the settings below; those in groups as timeouts.chunk_s=30

SIGTERM and Ctrl-C drain: new calls are turned away with 503, those under way end, then the process goes. A second signal goes
at once. Exit code: 0 drained (or all well, with check=true), 1 calls were cut off (or an instance is not ready), 2 a mistake in
arguments or files, told in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys

from hexrepro.errors import InputError, command
from hexrepro.paths import conf_dir


@command()
def main(argv: list[str]) -> int:
    """Run until told to stop; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print((conf_dir() / "serving" / "gateway.yaml").read_text())
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        from hexrepro.serving.check import check
        from hexrepro.serving.gateway import Gateway
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is missing: pip install 'hexrepro[serving]'") from error
    from hexrepro.serving.config import load_serving, parse_overrides

    overrides = parse_overrides(argv)
    only_check = overrides.pop("check", False)
    if not isinstance(only_check, bool):
        raise InputError(f"serving: check={only_check!r} must be true or false")
    try:
        gateway = Gateway(load_serving(overrides))
        if only_check:
            return 0 if _runner()(check(gateway.serving)) else 1
        _allow_many_connections()
        return _runner()(_serve(gateway))
    except OSError as error:
        raise InputError(f"serving: {error}") from error


def _allow_many_connections() -> None:
    """As many open files as the system lets us have: a call takes two connections, and the usual limit is 1024 files."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _runner():
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run
    return uvloop.run


async def _serve(gateway) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with gateway:
        draining: list[asyncio.Task] = []

        def told() -> None:
            if draining:
                stop.set()
                return
            logging.getLogger("hexrepro.serving").info("draining")
            draining.append(asyncio.create_task(gateway.drain()))
            draining[0].add_done_callback(lambda _: stop.set())

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told)
        names = ", ".join(spec.name for spec in gateway.serving.cluster.instances)
        policy = gateway.coordinator.policy.name
        print(f"hexrepro gateway on {gateway.url}/v1: {policy} over {names}", flush=True)
        gc.collect()
        gc.freeze()  # what the imports left is here to stay: collecting it again would hold up calls for 100 ms and more
        gc.set_threshold(20_000, 20, 50)
        await stop.wait()
        return 0 if draining[0].done() and draining[0].result() else 1


if __name__ == "__main__":
    sys.exit(main())
