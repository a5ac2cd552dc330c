"""`python -m hexrepro.workload`: what it prints, draws and writes, and its one line for each mistake."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from hexrepro.experiments import inputs
from hexrepro.workload import Workload, arrival_times, generate, read, write
from hexrepro.workload.__main__ import main
from hexrepro.workload.survey import survey
from tests.workload import traces_by_hand as by_hand
from tests.workload.samples import fields
from tests.workload.traces_by_hand import AGENTIC, AZURE, LOG, MOONCAKE


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty directory; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        code = main([str(a) for a in argv])
        return code, *capsys.readouterr()

    return run


# ---- the numbers -------------------------------------------------------------------------------------------


def test_sizes_shapes_and_sharing_by_hand():
    found = survey(Workload(**fields()))  # a chain of three, and a call with two successors
    assert (found.queries, found.calls) == (2, 6)
    assert found.depth.tolist() == [3, 2]
    assert found.width.tolist() == [1, 2]
    plan, writing = found.stages
    assert (plan.name, plan.calls) == ("plan", 2)
    assert writing.input.tolist() == [200, 250, 300, 300]
    assert writing.output.tolist() == [10, 20, 40, 40]
    assert writing.shared.tolist() == [140, 140, 170, 170]
    assert writing.tool_s.tolist() == [0, 0, 0.5, 0.5]
    assert found.shared_share == pytest.approx((2 * 50 + 2 * 140 + 2 * 170) / 1210)
    # found in a cache: the second plan's 50; of the writers' template 3 * 80, and a context each query
    assert found.found_share == pytest.approx((50 + 240 + 60 + 90) / 1210)
    assert (found.templates, found.contexts) == (2, 2)


def test_burstiness_by_hand():
    """Gaps 1 and 3 in turns: standard deviation 1 over mean 2. In windows of 10 s come 5 queries each but for the ends."""
    arrival_s = np.concatenate([[0], np.cumsum(np.tile([1.0, 3.0], 150))])
    w = generate("tiny", n_queries=len(arrival_s)).with_arrivals(arrival_s)
    a = survey(w).arrivals
    assert a.span_s == 600
    assert a.rate_qps == 0.5
    assert a.gap_cv == pytest.approx(0.5, rel=0.01)
    # windows of 20 s hold exactly 10; those of 10 s hold 6 and 4 in turns
    assert a.dispersion[10] == pytest.approx(1 / 5, rel=0.02)
    assert set(a.dispersion) == {10}  # in 1 s comes less than one query, and of 60 s there are but ten


@pytest.mark.parametrize(("process", "options"), [("poisson", {}), ("gamma", {"cv": 3.0})])
def test_burstiness_of_known_processes(process, options):
    """A renewal process has gaps of its cv, and in long windows a dispersion of cv squared."""
    w = generate("tiny", n_queries=20_000).with_arrivals(arrival_times(process, 20_000, 2.0, 1, **options))
    a = survey(w).arrivals
    cv = options.get("cv", 1.0)
    assert a.gap_cv == pytest.approx(cv, rel=0.05)
    assert a.dispersion[60] == pytest.approx(cv**2, rel=0.25)


def test_two_queries_at_once_have_no_rate():
    a = survey(Workload(**fields(arrival_s=[1.0, 1.0]))).arrivals
    assert a.span_s == 0
    assert math.isnan(a.rate_qps)


# ---- inspect -----------------------------------------------------------------------------------------------


def test_inspect_says_what_a_file_holds(run, tmp_path):
    by_hand.write(tmp_path / "a.jsonl", [*AGENTIC, AGENTIC[4] | {"request_id": "f", "output_length": 0}])
    code, out, err = run("inspect", "a.jsonl")
    assert code == 0
    assert err == ""
    for words in (
        "a.jsonl: agentic_mooncake",
        "queries, calls    2, 5",
        "calls of a query  1 to 4, mean 2.5",
        "depth, width      1 to 3, mean 2.0; 1 to 2, mean 1.5",
        "1.333 queries/s over 0.75 s",
        "56.5% of the prompt tokens, by 1 template and 0 contexts; a cache without limit finds 37.6%",
        "8 / 17 / 24 / 24",
        "a.jsonl: left out, 1 of 6 lines that cannot be used:",
        "line 6: output_length is 0: it must be a whole number of tokens from 1",
    ):
        assert words in out


def test_inspect_takes_several_files(run, tmp_path):
    by_hand.write(tmp_path / "a.csv", AZURE)
    by_hand.write(tmp_path / "m.jsonl", MOONCAKE)
    code, out, _ = run("inspect", "a.csv", "m.jsonl")
    assert code == 0
    assert "a.csv: azure" in out
    assert "m.jsonl: mooncake" in out


def test_names_are_shown_as_they_are(run, tmp_path):
    """Not as rich's markup, nor as matplotlib's formulas."""
    rows = [
        row | {"stage": ("[/b]", "$x_$")[i % 2], "tenant": "[/c]" if i == 4 else "t"}
        for i, row in enumerate(AGENTIC)
    ]
    by_hand.write(tmp_path / "a.jsonl", rows)
    code, out, _ = run("inspect", "a.jsonl", "--figure", "it.svg")
    assert code == 0
    for words in ("[/b]", "$x_$", "[/c] (1)"):
        assert words in out


def test_the_arrival_of_a_single_query_is_no_lack_of_arrivals(run, tmp_path):
    by_hand.write(tmp_path / "a.jsonl", AGENTIC[4:])
    _, out, _ = run("inspect", "a.jsonl")
    assert "arrivals          of one query: no rate" in out


@pytest.mark.parametrize("kind", ["DAGs that arrive", "single calls of many stages", "no arrivals"])
def test_inspect_draws(run, tmp_path, kind):
    if kind == "DAGs that arrive":
        w = generate("trace4", n_queries=30)
        w, ending = w.with_arrivals(arrival_times("gamma", 30, 1.0, 0, cv=8.0)), ".png"
    elif kind == "no arrivals":
        w, ending = generate("tiny", n_queries=5), ".svg"
    else:
        w, ending = generate("chat", n_queries=200), ".svg"
        others = {"stage_names": tuple(f"stage {i}" for i in range(20)), "stage": np.arange(200) % 20}
        w = Workload(**{f: getattr(w, f) for f in w.__dataclass_fields__} | others)
        w = w.with_arrivals(arrival_times("poisson", 200, 1.0, 0))
    write(w, tmp_path / "it.parquet")
    code, out, _ = run("inspect", "it.parquet", "--figure", f"it{ending}")
    assert code == 0
    assert f"Figure: it{ending}" in out
    drawn = (tmp_path / f"it{ending}").read_bytes()
    assert drawn.startswith(b"\x89PNG" if ending == ".png" else b"<?xml")


# ---- convert -----------------------------------------------------------------------------------------------


def test_convert_translates_and_says_what_it_left_out(run, tmp_path):
    by_hand.write(tmp_path / "log.jsonl", [*LOG, LOG[1] | {"call": 9, "query": "z", "ended": "failed"}])
    code, out, err = run("convert", "log.jsonl", "it.parquet")
    assert code == 0
    assert out == "it.parquet: 2 queries, 5 calls, as parquet\n"
    assert "left out, 1 of 6 lines that cannot be used" in err
    assert "line 6: ended is 'failed'" in err
    code, out, err = run("convert", "it.parquet", "it.jsonl", "--write-block-tokens", 32)
    assert (code, out, err) == (0, "it.jsonl: 2 queries, 5 calls, as agentic_mooncake\n", "")
    assert read("it.jsonl").workload.n_calls == 5
    code, *_ = run("convert", "it.jsonl", "it.dat", "--format", "released_json")
    assert code == 0
    assert (tmp_path / "it.dat").read_text().startswith("[")


def test_list_names_the_formats(run):
    code, out, _ = run("list")
    assert code == 0
    for name in (
        "parquet",
        "released_json",
        "workflow_csv",
        "agentic_mooncake",
        "mooncake",
        "azure",
        "call_log",
    ):
        assert f"\n  {name} " in out


MISTAKES = {
    "no such file": (["inspect", "none.csv"], ["none.csv: cannot be read (No such file"]),
    "no trace": (["inspect", "other.txt"], ["other.txt: in none of the formats", "mooncake"]),
    "strict": (
        ["inspect", "bad.csv", "--strict"],
        ["bad.csv: row 2: ContextTokens is -1; it must be a whole number"],
    ),
    "strict convert": (["convert", "bad.csv", "it.parquet", "--strict"], ["bad.csv: row 2"]),
    "unknown format": (["inspect", "good.csv", "--format", "azur"], ["format 'azur' is unknown", "azure"]),
    "another format": (["inspect", "good.csv", "--format", "mooncake"], ["good.csv: ", "not valid JSON"]),
    "unknown end": (["convert", "good.csv", "it.txt"], ["it.txt", ".parquet"]),
    "not written": (["convert", "good.csv", "it.csv", "--format", "azure"], ["'azure' is not written"]),
    "unwritable": (["convert", "good.csv", "no/it.parquet"], ["no/it.parquet: cannot be written"]),
    "figure's end": (["inspect", "good.csv", "--figure", "it.gif"], ["--figure it.gif", ".png"]),
    "figure's place": (
        ["inspect", "good.csv", "--figure", "no/it.png"],
        ["--figure no/it.png", "cannot be written"],
    ),
    "two figures": (["inspect", "good.csv", "good.csv", "--figure", "it.png"], ["--figure", "one FILE"]),
}


@pytest.mark.parametrize(("argv", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(argv, says, run, tmp_path):
    by_hand.write(tmp_path / "good.csv", AZURE)
    by_hand.write(tmp_path / "bad.csv", AZURE.replace("4808", "-1"))
    by_hand.write(tmp_path / "other.txt", "hello")
    code, _, err = run(*argv)
    assert code == 2
    assert err.startswith("hexrepro: ")
    assert err.count("\n") == 1, err
    for words in says:
        assert words in err
    assert {p.name for p in tmp_path.iterdir()} == {"good.csv", "bad.csv", "other.txt"}


@pytest.mark.parametrize("argv", [["inspect"], ["inspect", "a", "--block-tokens", "0"], ["inspekt"], []])
def test_a_wrong_option_is_argparses(argv, run):
    with pytest.raises(SystemExit) as exit_:
        run(*argv)
    assert exit_.value.code == 2


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['x', '--help']\n"
        "from hexrepro.workload.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'numba', 'pandas', 'hydra', 'scipy', 'matplotlib', 'pyarrow', 'rich'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for words in ("inspect", "convert", "list", "agentic_mooncake", "azure"):
        assert words in done.stdout


# ---- experiments -------------------------------------------------------------------------------------------


class FileTraffic:
    def __init__(self, path):
        self.path = str(path)


def test_experiments_read_every_format_and_say_once_what_was_left_out(tmp_path, capsys):
    path = by_hand.write(tmp_path / "a.csv", AZURE + "2023-11-16 18:17:06,0,1\n")
    for _ in range(2):
        w = inputs.load_trace("file", FileTraffic(path))
        assert w.n_calls == 3
        assert w.has_arrivals
    err = capsys.readouterr().err
    assert err.count("left out, 1 of 4 rows that cannot be used") == 1
    assert err.startswith("hexrepro: ")
