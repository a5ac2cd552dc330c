"""`python -m hexrepro.serving` as a process."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from hexrepro.serving import __main__ as command
from hexrepro.serving.check import check
from hexrepro.serving.config import read_cluster
from tests.serving.scripted import Act, Server, ask, in_loop

CURL = shutil.which("curl")


def test_a_mistake_is_one_line(capsys, tmp_path) -> None:
    assert command.main([f"cluster={tmp_path / 'none.yaml'}"]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    assert "max_waiting" in capsys.readouterr().out


def cluster_file(tmp_path, *urls: str, models: tuple[str, ...] = ("m",)) -> str:
    cluster = {"name": "t", "model": "llama-3.1-70b", "models": list(models)}
    cluster["instances"] = [{"gpu": "a100", "url": url} for url in urls]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prot=1"], "'prot' is not known"),
        (["port=99999"], "port=99999 must be at most 65535"),
        (["port=high"], "port='high' must be a whole number"),
        (["host=999.0.0.1"], "cannot listen at host=999.0.0.1"),
        (["policy=best"], "best"),
        (["policy=vtc"], "vtc needs virtual token counters"),
        (["view=gold"], "gold"),
        (["timeouts=3"], "timeouts"),
        (["check=maybe"], "check='maybe' must be true or false"),
        (["call_log=/dev/null/x"], "call log /dev/null/x: it cannot be written"),
        (["a b"], "name=value"),
    ],
)
def test_a_bad_setting_is_one_clear_line(capfd, tmp_path, arguments, says) -> None:
    path = cluster_file(tmp_path, "http://127.0.0.1:1")
    assert command.main([f"cluster={path}", *arguments]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert err.startswith("hexrepro: ")
    assert err.count("\n") == 1


def test_a_port_in_use_is_one_clear_line(capfd, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([f"cluster={cluster_file(tmp_path, 'http://127.0.0.1:1')}", f"port={port}"]) == 2
    err = capfd.readouterr().err
    assert f"cannot listen at host=127.0.0.1 port={port}" in err
    assert err.count("\n") == 1


@in_loop
async def test_check_tells_which_instances_are_ready(tmp_path) -> None:
    fine, other, sick, gone = Server(), Server(models=("else",)), Server(), Server()
    for server in (fine, other, sick, gone):
        await server.start()
    sick.healthy = False
    await gone.stop()
    loop = asyncio.get_running_loop()
    serving = read_cluster(Path(cluster_file(tmp_path, *(s.url for s in (fine, other, sick, gone)))))
    console = Console(file=io.StringIO(), width=150)
    assert not await check(serving, console)
    rows = console.file.getvalue().splitlines()
    for name, says in (("a100-0", "yes yes"), ("a100-1", "yes no: else"), ("a100-2", "no: status 503"),
                       ("a100-3", "no: it refuses connections")):  # fmt: skip
        (row,) = [row for row in rows if row.split()[:1] == [name]]
        assert says in " ".join(row.split()), row
    path = cluster_file(tmp_path, fine.url)
    code = await loop.run_in_executor(
        None, lambda: subprocess.run([sys.executable, "-m", "hexrepro.serving", f"cluster={path}", "check=true"],
                                     capture_output=True, text=True, check=False))  # fmt: skip
    assert code.returncode == 0, code.stderr
    assert "a100-0" in code.stdout
    for server in (fine, other, sick):
        await server.stop()


async def started(tmp_path, server: Server):
    """The process and its address."""
    path = cluster_file(tmp_path, server.url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hexrepro.serving", f"cluster={path}", "port=0", "drain_s=5",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    line = (await process.stdout.readline()).decode()
    assert "hexrepro gateway on" in line, (await process.stderr.read()).decode()
    return process, line.split()[3].rstrip(":")


async def curl(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(CURL, "-sS", "-N", *arguments, stdout=subprocess.PIPE)


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
@in_loop
async def test_curl_streams_and_sigterm_lets_it_finish(tmp_path) -> None:
    server = Server(lambda body, number: Act(token_s=0.1))
    await server.start()
    process, url = await started(tmp_path, server)
    try:
        data = json.dumps(ask(8, stream=True))
        call = await curl(f"{url}/chat/completions", "-H", "Content-Type: application/json", "-d", data)
        assert (await call.stdout.readline()).startswith(b"data: {")
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        refused = await curl("-o", "/dev/null", "-w", "%{http_code}", f"{url}/chat/completions", "-d", data)
        assert (await refused.communicate())[0] == b"503"
        rest, _ = await call.communicate()
        assert rest.count(b"data: ") == 8  # seven tokens and the end
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.stop()
