"""`python -m hexrepro.serving cluster=FILE [NAME=VALUE ...]`, or `hexrepro-gateway` when installed: run the gateway.

SIGTERM and Ctrl-C drain it: new calls are turned away, those under way end, then it goes. A second signal goes at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

from hexrepro.errors import InputError
from hexrepro.paths import conf_dir


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; returns the exit code (0 drained, 1 calls were cut off, 2 a user's mistake)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print((conf_dir() / "serving" / "gateway.yaml").read_text())
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        try:
            from hexrepro.serving.gateway import Gateway
        except ModuleNotFoundError as error:
            raise InputError(f"{error.name} is missing: pip install 'hexrepro[serving]'") from error
        from hexrepro.serving.config import load_serving, parse_overrides

        return _runner()(_serve(Gateway, load_serving(parse_overrides(argv))))
    except InputError as mistake:
        print(f"hexrepro: {' '.join(str(mistake).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hexrepro: {error}", file=sys.stderr)
        return 2


def _runner():
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run
    return uvloop.run


async def _serve(gateway_type, serving) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with gateway_type(serving) as gateway:
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
        names = ", ".join(spec.name for spec in serving.cluster.instances)
        policy = gateway.coordinator.policy.name
        print(f"hexrepro gateway on {gateway.url}/v1: {policy} over {names}", flush=True)
        gc.collect()
        gc.freeze()  # what the imports left is here to stay: collecting it again would hold up calls for 100 ms and more
        gc.set_threshold(20_000, 20, 50)
        await stop.wait()
        return 0 if draining[0].done() and draining[0].result() else 1


if __name__ == "__main__":
    sys.exit(main())
