"""`python -m hexrepro.serving` as a process."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from hexrepro.serving import __main__ as command
from tests.serving.scripted import Act, Server, ask, in_loop

CURL = shutil.which("curl")


def test_a_mistake_is_one_line(capsys, tmp_path) -> None:
    assert command.main([f"cluster={tmp_path / 'none.yaml'}"]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    assert "max_waiting" in capsys.readouterr().out


async def started(tmp_path, server: Server):
    """The process and its address."""
    cluster = {"name": "t", "model": "llama-3.1-70b", "models": ["m"]}
    cluster["instances"] = [{"gpu": "a100", "url": server.url}]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
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
