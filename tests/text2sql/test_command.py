"""`python -m hexrepro.text2sql` as its users meet it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys

import pytest

from hexrepro.serving.config import Tenant
from hexrepro.text2sql.__main__ import main
from tests.serving.scripted import Act, in_loop, running
from tests.text2sql.scripted_model import GOLD, Prompt, ScriptedModel, knows

QUESTION = "How many trains of intercity lines were cancelled?"


def good() -> ScriptedModel:
    return ScriptedModel(lambda prompt, number: knows(prompt))


async def command(*argv: str) -> int:
    """In a thread, beside the servers of the test's loop."""
    return await asyncio.to_thread(main, list(argv))


def test_a_question_is_answered(capsys, tmp_path) -> None:
    record = tmp_path / "new" / "calls.jsonl"

    @in_loop
    async def check() -> None:
        async with running([good()]) as gateway:
            assert await command(QUESTION, "--url", f"{gateway.url}/v1", "--record", str(record)) == 0

    check()
    out, err = capsys.readouterr()
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    assert lines[0] == GOLD[QUESTION] + ";"
    assert lines[-1] == "6"
    assert "retriever columns of TRN" in err
    assert "Candidate 1 of 2: all 2 have the same rows" in err
    assert len(record.read_text().splitlines()) == 6


def test_no_answer_is_exit_code_1(capsys) -> None:
    @in_loop
    async def check() -> None:
        async with running([ScriptedModel(lambda prompt, number: "no idea")]) as gateway:
            assert await command(QUESTION, "--url", f"{gateway.url}/v1", "--corrections", "0") == 1

    check()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(
        "hexrepro: No answer: no candidate could be run (1: it held no SELECT"
    )


def test_a_benchmark_is_reported(capsys, tmp_path) -> None:
    (tmp_path / "q.yaml").write_text(json.dumps({"questions": [{"question": QUESTION, "sql": "SELECT 6"}]}))
    assert main(["--make-database", str(tmp_path / "db.sqlite")]) == 0

    @in_loop
    async def check() -> None:
        async with running([good()]) as gateway:
            asked = ("--database", str(tmp_path / "db.sqlite"), "--questions", str(tmp_path / "q.yaml"))
            assert await command("--benchmark", *asked, "--url", f"{gateway.url}/v1") == 0

    check()
    assert "Execution accuracy: 1 of 1" in capsys.readouterr().out


# ---- mistakes ----------------------------------------------------------------------------------------------------


def one_line(capsys) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("hexrepro: ")
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["q", "--candidates", "0"], "--candidates: '0' must be a whole number of at least 1"),
        (["q", "--slo", "-1"], "--slo: '-1' must be a number above 0"),
        (["q", "--colour"], "unrecognized arguments: --colour"),
        (["--slo", "3"], "give one of: a question"),
        (["q", "--benchmark"], "give one of: a question"),
        (["--benchmark", "--database", "x"], "needs --questions"),
        (["q", "--database", "none.sqlite"], "database none.sqlite: there is no such file"),
        (["q", "--url", "localhost:8080"], "must begin with http://"),
        (["q", "--record", "/dev/null/x"], "call log /dev/null/x: it cannot be written"),
        (["--make-database", "/dev/null/x"], "/dev/null/x: cannot be written"),
    ],
)
def test_a_mistake_is_one_line(argv, says, capsys) -> None:
    assert main(argv) == 2
    assert says in one_line(capsys)


def test_nobody_answers(capsys) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        assert main(["q", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}/v1"]) == 2
    assert "nobody answers there; start the gateway or give another --url" in one_line(capsys)


def test_unknown_model_and_wrong_key(capsys, monkeypatch) -> None:
    @in_loop
    async def check() -> None:
        async with running([good()], tenants=(Tenant("gold", "right"),)) as gateway:
            url = ("--url", f"{gateway.url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "wrong")
            assert await command(QUESTION, *url) == 2
            assert "the API key was not accepted" in one_line(capsys)
            monkeypatch.setenv("OPENAI_API_KEY", "right")
            assert await command(QUESTION, *url, "--tenant", "silver", "--model", "m") == 2
            assert "another tenant" in capsys.readouterr().err.splitlines()[-1]
            assert await command(QUESTION, *url, "--model", "gpt") == 2
            assert "The model 'gpt' does not exist; there is m" in capsys.readouterr().err.splitlines()[-1]
            assert await command(QUESTION, "--url", gateway.url, "--model", "m") == 2
            assert "which mostly ends in /v1" in capsys.readouterr().err.splitlines()[-1]

    check()


def test_several_models_must_be_chosen_from(capsys) -> None:
    @in_loop
    async def check() -> None:
        async with running([good()], models=("m", "n")) as gateway:
            assert await command(QUESTION, "--url", f"{gateway.url}/v1") == 2

    check()
    assert "has m, n; name the one to use with --model" in one_line(capsys)


def test_help_comes_at_once() -> None:
    code = (
        "import sys; from hexrepro.text2sql.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'openai', 'numpy', 'rich', 'yaml', 'sqlite3'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "--corrections N" in done.stdout


@in_loop
async def test_ctrl_c_ends_it_and_the_call_upstream(tmp_path) -> None:
    def slow(body: dict, number: int) -> Act:
        return Act(first_s=60.0 if Prompt.of(body).task == "SQL" else 0.0)

    server, record = ScriptedModel(lambda prompt, number: knows(prompt), slow), tmp_path / "calls.jsonl"
    async with running([server]) as gateway:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hexrepro.text2sql", QUESTION, "--url", f"{gateway.url}/v1", "--record", str(record),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            while server.running < 2:  # both candidates
                assert process.returncode is None
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.wait_for(process.communicate(), 30.0)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 130
        assert out == b""
        assert err.decode().splitlines()[-1] == "hexrepro: interrupted"
        assert b"Traceback" not in err
        while server.running:
            await asyncio.sleep(0.02)
        assert server.cancelled == 2
    ended = [json.loads(line)["ended"] for line in record.read_text().splitlines()]
    assert ended == ["done"] * 4 + ["cancelled"] * 2
