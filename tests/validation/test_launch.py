"""The launcher, with a small HTTP server in vLLM's place: what it starts, waits for, reports and ends.

A script stands in for vLLM's Python. It gets vLLM's command line, and does what the model's name says.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hexrepro.cluster.latency import LatencyModel
from hexrepro.errors import InputError
from hexrepro.validation.launch import ServerSpec, launch, vllm_python
from hexrepro.validation.tiny_model import TinyModel

PYTHON = """#!{python}
import http.server, json, os, signal, subprocess, sys, time
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
does = arguments["--model"]
print("started as", does, flush=True)
if does == "fails":
    print("ValueError: the KV cache is too small")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(3)
if does == "hangs":
    time.sleep(600)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if does == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(dict(pid=os.getpid(), child=child.pid, argv=sys.argv[1:], cwd=os.getcwd(),
                                         env=dict(os.environ))).encode())
    def log_message(self, *_): pass
time.sleep(0.3)
http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Answer).serve_forever()
"""


@pytest.fixture
def python(tmp_path) -> str:
    path = tmp_path / "fake" / "python"
    path.parent.mkdir()
    path.write_text(PYTHON.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def asked(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return json.load(response)


def is_alive(pid: int) -> bool:
    """A zombie that nobody waits for (a container's first process may not) is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_gone(*pids: int) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until and any(map(is_alive, pids)):
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_starts_waits_and_ends_children_too(tmp_path, python):
    said = []
    with launch(
        [ServerSpec("a", "one"), ServerSpec("b", "two")], tmp_path / "run", python=python, say=said.append
    ) as servers:
        told = [asked(server.url) for server in servers]
        assert [t["argv"][t["argv"].index("--model") + 1] for t in told] == ["one", "two"]
        assert all(is_alive(t["pid"]) and is_alive(t["child"]) for t in told)
        assert [s.log.read_text() for s in servers] == ["started as one\n", "started as two\n"]
        assert all(0.3 < s.ready_s < 20 for s in servers)
    assert is_gone(*(pid for t in told for pid in (t["pid"], t["child"])))
    assert len(said) == 2
    assert "(2/2)" in said[1]


def test_ends_them_on_an_error_in_the_block(tmp_path, python):
    told = {}

    def block():
        with launch([ServerSpec("a", "one")], tmp_path, python=python) as servers:
            told.update(asked(servers[0].url))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert is_gone(told["pid"], told["child"])


def test_kills_what_does_not_go(tmp_path, python, monkeypatch):
    monkeypatch.setattr("hexrepro.validation.launch.STOP_S", 0.3)
    with launch([ServerSpec("a", "stubborn")], tmp_path, python=python) as servers:
        told = asked(servers[0].url)
    assert is_gone(told["pid"], told["child"])


def test_ends_no_other_process(tmp_path, python):
    other = subprocess.Popen([python, "--model", "hangs"], stdout=subprocess.DEVNULL)
    try:
        with launch([ServerSpec("a", "one")], tmp_path, python=python):
            pass
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_them_first(tmp_path, python, number):
    """Ctrl-C and SIGTERM to the program that launched."""
    code = (
        "import sys, time\n"
        "from hexrepro.validation.launch import ServerSpec, launch\n"
        f"with launch([ServerSpec('a', 'one')], {str(tmp_path / 'run')!r}, python={python!r}) as servers:\n"
        "    print(servers[0].url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        told = asked(program.stdout.readline().strip())
        program.send_signal(number)
        program.wait(20)
        assert is_gone(told["pid"], told["child"])
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_a_server_that_fails_names_itself_and_the_cause(tmp_path, python):
    with (
        pytest.raises(InputError, match=r"server 'bad' .* KV cache is too small.*bad\.log") as error,
        launch([ServerSpec("good", "one"), ServerSpec("bad", "fails")], tmp_path, python=python),
    ):
        pytest.fail("it must not begin")
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_ready_in_time(tmp_path, python):
    with (
        pytest.raises(
            InputError, match=r"server 'slow' \(port \d+\) is not ready after 0.5 s: started as hangs"
        ),
        launch([ServerSpec("slow", "hangs")], tmp_path, python=python, ready_s=0.5),
    ):
        pytest.fail("it must not begin")


def test_a_port_in_use(tmp_path, python):
    with launch([ServerSpec("a", "one")], tmp_path, python=python) as servers:
        with (
            pytest.raises(
                InputError, match=f"server 'b': port {servers[0].port} of 127.0.0.1 cannot be used"
            ),
            launch([ServerSpec("b", "one", port=servers[0].port)], tmp_path, python=python),
        ):
            pytest.fail("it must not begin")
        assert asked(servers[0].url)


def test_what_a_paced_server_is_given(tmp_path, python, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    # the fake goes by the model's folder, which is none of its words: it serves
    spec = ServerSpec(
        "a", TinyModel(layers=2), pace=LatencyModel(0.1, 1e-4), pace_scale=0.25, kv_blocks=100, block_size=32,
        scheduling="fcfs", prefix_caching=False, arguments=("--seed", "1"),
    )  # fmt: skip
    with launch([spec], tmp_path / "run", python=python) as servers:
        told = asked(servers[0].url)
    argv, env = told["argv"], told["env"]
    value = dict(itertools.pairwise(argv))
    assert value["--worker-cls"] == "hexrepro.validation.paced_worker.PacedWorker"
    assert Path(value["--model"], "config.json").is_file()
    # 100 blocks and the null block, of 32 tokens, of 2 layers * key and value * 32 numbers * 4 bytes
    assert int(value["--kv-cache-memory-bytes"]) == 101 * 32 * 2 * 2 * 32 * 4
    assert value["--max-model-len"] == "3200"
    assert value["--scheduling-policy"] == "fcfs"
    assert "--no-enable-prefix-caching" in argv
    assert value["--seed"] == "1"
    assert '"scale": 0.25' in env["HEXREPRO_PACE"]
    # its path holds the worker and nothing else of ours
    assert env["PYTHONPATH"] != "/somewhere"
    assert sorted(p.name for p in Path(env["PYTHONPATH"]).rglob("*.py")) == [
        "__init__.py",
        "__init__.py",
        "paced_worker.py",
    ]
    assert spec.instance().latency == LatencyModel(0.025, 2.5e-5)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_cores(tmp_path, python):
    core = min(os.sched_getaffinity(0))
    with launch([ServerSpec("a", "one", cores=(core,))], tmp_path, python=python) as servers:
        assert os.sched_getaffinity(asked(servers[0].url)["pid"]) == {core}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(name="a/b"), "name must be of letters"),
        (dict(kv_blocks=0), "kv_blocks is 0"),
        (dict(scheduling="random"), "scheduling is 'random'"),
        (dict(pace=3.0), "pace is 3.0"),
        (dict(pace_scale=0.0), "pace_scale is 0.0"),
        (dict(port=70000), "port is 70000"),
    ],
)
def test_refuses_a_wrong_spec(wrong, says):
    with pytest.raises(InputError, match=says):
        ServerSpec(**{"name": "a"} | wrong)


def test_names_must_differ(tmp_path, python):
    with (
        pytest.raises(InputError, match="each a name of its own"),
        launch([ServerSpec("a")] * 2, tmp_path, python=python),
    ):
        pass


def test_the_variable_must_name_a_program(monkeypatch):
    monkeypatch.setenv("HEXREPRO_VLLM_PYTHON", "/no/such/python")
    with pytest.raises(InputError, match="there is no such program"):
        vllm_python()
