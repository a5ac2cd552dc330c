"""The agent end to end: through the gateway, before a scripted model, on the example database."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from hexrepro.errors import InputError
from hexrepro.serving.call_log import CallLog
from hexrepro.serving.headers import OUTPUT_TOKENS
from hexrepro.text2sql.agent import Options, Run, answer
from hexrepro.text2sql.benchmark import Load, benchmark, report
from hexrepro.text2sql.database import Database
from hexrepro.text2sql.model import Model
from hexrepro.text2sql.questions import example_questions, load_questions
from hexrepro.text2sql.railway import make_railway
from hexrepro.text2sql.watch import bar, console, picture
from tests.serving.scripted import Act, Server, in_loop, running, settled
from tests.text2sql.scripted_model import GOLD, Prompt, ScriptedModel, knows, misnamed, wrong

QUESTIONS = load_questions(example_questions())
CANCELLED = "How many trains of intercity lines were cancelled?"  # two tables; the answer is 6
COSTS = (
    "Which driver drove the most trains that were not cancelled? Give the surname and the number of trains."
)


@pytest.fixture(scope="module")
def railway(tmp_path_factory):
    path = tmp_path_factory.mktemp("railway") / "railway.sqlite"
    make_railway(path)
    return Database(path, seconds=2.0)


async def through_the_gateway(
    servers: list[Server], database, question=CANCELLED, *, log=None, **options
) -> Run:
    """One question; afterwards the gateway must have nothing under way, and know that the query is over."""
    async with running(servers) as gateway:
        async with Model(f"{gateway.url}/v1", log=log) as model:
            run = await answer(question, model, database, Options(**options), slo_s=60.0, tenant="t")
        await settled(gateway)
        assert gateway.coordinator.queries_under_way == 0
        return run


def stages(run: Run) -> Counter:
    return Counter(step.stage for step in run.calls)


# ---- a good model, and mistakes ----------------------------------------------------------------------------------


@in_loop
async def test_agreeing_candidates_are_the_answer(railway) -> None:
    server = ScriptedModel(lambda prompt, number: knows(prompt))
    run = await through_the_gateway([server], railway)
    assert run.picked.sql == GOLD[CANCELLED]
    assert run.picked.result.rows == ((6,),)
    assert run.why == "all 2 have the same rows"
    assert stages(run) == {"keywords": 1, "retriever": 3, "candidate": 2}
    # the linked schema: what was chosen, and keys; nothing of other tables
    prompt = next(b["messages"][1]["content"] for b in server.bodies if Prompt.of(b).task == "SQL")
    assert "CNCL" in prompt
    assert "PAX" not in prompt
    assert "table DLY" not in prompt


@in_loop
async def test_prompts_share_their_beginning(railway) -> None:
    """What prefix caching lives on: the whole schema for all questions, the linked one for the later calls of a query."""
    server = ScriptedModel(lambda prompt, number: knows(prompt, first=lambda gold, style: misnamed(gold)))
    await through_the_gateway([server], railway, always_test=True)
    first, later = [], []
    for body in server.bodies:
        early = Prompt.of(body).task.split()[0] in ("keywords", "tables", "columns")
        (first if early else later).append(body["messages"][1]["content"])
    whole = f"Schema:\n{railway.schema()}\n\nQuestion: "
    assert len(first) == 4
    assert all(text.startswith(whole) for text in first)
    linked = later[0].split("\n\nTask:")[0]
    assert len(later) >= 2 + 2 + 1 + 3
    assert all(text.startswith(linked) for text in later)


@in_loop
async def test_errors_and_empty_results_are_sent_back(railway) -> None:
    """Candidate 1: a wrong column, then a wrong value, then right. Candidate 2: no SQL at all, then right."""
    seen = []

    def first(gold: str, style: int) -> str:
        return misnamed(gold)

    def corrected(gold: str, prompt: Prompt) -> str:
        seen.append(prompt.text.partition("Task: correct")[2])
        return gold.replace("'IC'", "'ICE'").replace("COUNT(*)", "T.TRN_ID") if "failed" in seen[-1] else gold

    def say(prompt: Prompt, number: int) -> str:
        if prompt.task == "SQL" and prompt.style == 2:
            return "I would count the trains."
        return knows(prompt, first=first, corrected=corrected)

    run = await through_the_gateway([ScriptedModel(say)], railway)
    assert [c.corrections for c in run.candidates] == [2, 1]
    assert run.picked.result.rows == ((6,),)
    assert stages(run)["revise"] == 3
    assert any("no such column: T.CNCLX" in text for text in seen)
    assert any("gave no rows" in text for text in seen)
    assert any("it held no SELECT statement" in text for text in seen)


@in_loop
async def test_corrections_are_bounded_and_the_best_attempt_is_kept(railway) -> None:
    """An empty result that is only made worse: it is the answer after as many corrections as allowed."""

    def say(prompt: Prompt, number: int) -> str:
        empty = "SELECT TRN_ID FROM TRN WHERE CNCL = 7"
        return knows(
            prompt, first=lambda gold, style: empty, corrected=lambda gold, prompt: "SELECT nothing FROM TRN"
        )

    run = await through_the_gateway([ScriptedModel(say)], railway, corrections=2)
    assert [c.corrections for c in run.candidates] == [2, 2]
    assert run.picked.sql == "SELECT TRN_ID FROM TRN WHERE CNCL = 7"
    assert run.picked.result.rank == 1


@in_loop
async def test_a_model_that_stands_by_an_empty_result_is_believed(railway) -> None:
    empty = "SELECT TRN_ID FROM TRN WHERE CNCL = 7"
    say = lambda prompt, number: knows(  # noqa: E731
        prompt, first=lambda gold, style: empty, corrected=lambda gold, prompt: empty
    )
    run = await through_the_gateway([ScriptedModel(say)], railway, corrections=5)
    assert [c.corrections for c in run.candidates] == [1, 1]


@in_loop
async def test_a_wrong_candidate_is_outvoted_by_the_unit_tests(railway) -> None:
    """Two of three candidates are wrong, and the same; two of three checks find the right one."""

    def say(prompt: Prompt, number: int) -> str:
        if prompt.task == "evaluate" and "rows fit" in prompt.text:
            return "1: pass\n2: pass\n3: pass"
        return knows(prompt, first=lambda gold, style: gold if style == 2 else wrong(gold))

    run = await through_the_gateway([ScriptedModel(say)], railway, candidates=3)
    assert [c.passed for c in run.candidates] == [1, 3, 1]
    assert run.picked is run.candidates[1]
    assert run.picked.sql == GOLD[CANCELLED]
    assert run.why == "passed 3 of 3 checks"
    assert stages(run)["evaluate"] == 3
    assert stages(run)["unit_tester"] == 0  # no tie


@in_loop
async def test_a_tie_is_decided_by_the_unit_tester_s_choice(railway) -> None:
    def say(prompt: Prompt, number: int) -> str:
        if prompt.task == "evaluate":
            return "1: pass\n2: pass"
        return knows(prompt, first=lambda gold, style: gold if style == 2 else wrong(gold))

    run = await through_the_gateway([ScriptedModel(say)], railway)
    assert stages(run)["unit_tester"] == 1
    assert run.picked.sql == GOLD[CANCELLED]
    assert run.why == "passed 3 of 3 checks, as did others; chosen among them"


@in_loop
async def test_sql_that_does_harm_is_never_run(railway) -> None:
    """It is refused, sent back, and the database is as it was."""
    harm = ["DELETE FROM TRN", "SELECT 1; DROP TABLE TRN"]
    before = railway.path.read_bytes()
    say = lambda prompt, number: knows(prompt, first=lambda gold, style: harm[style - 1])  # noqa: E731
    run = await through_the_gateway([ScriptedModel(say)], railway)
    assert [c.corrections for c in run.candidates] == [1, 1]
    assert run.picked.result.rows == ((6,),)
    assert railway.path.read_bytes() == before
    assert sum(step.name.startswith("run") for step in run.steps) == 2  # the corrected ones only


# ---- gibberish, and servers that fail ----------------------------------------------------------------------------

GIBBERISH = (
    "",
    "t45 t7 t300 t8",
    "```sql\n```",
    "```sql\nSELECT * FROM nowhere",
    '["TRN", ',
    '{"tables": null}',
    "<think>it never ends",
    "SELECT",
    "1: pass 2",
    "\x00\ufffd é \u202e",
    "[[[[[[",
    "DROP TABLE STN",
)


@in_loop
async def test_any_answers_are_survived(railway) -> None:
    """Each text in every place; then all mixed up."""
    scripts = [lambda prompt, number, text=text: text for text in GIBBERISH]
    scripts.append(lambda prompt, number: GIBBERISH[number * 5 % len(GIBBERISH)])
    server = ScriptedModel(scripts[0])
    async with running([server]) as gateway, Model(f"{gateway.url}/v1") as model:
        for script in scripts:
            server.say = script
            run = await answer(CANCELLED, model, railway, Options(corrections=1, always_test=True))
            assert run.picked is None
            assert run.why == "no candidate could be run"
            done = stages(run)
            assert done["keywords"] == done["generate_unit_test"] == done["unit_tester"] == 1
            assert done["candidate"] == done["revise"] == 2
            console(stderr=True).print(picture(run))
        assert gateway.coordinator.queries_under_way == 0


@in_loop
async def test_without_the_gateway_and_with_calls_that_break(railway) -> None:
    """Any OpenAI-compatible server will do, one that gives no token counts too. A lost answer is an answer without SQL."""

    def act(body: dict, number: int) -> Act:
        lost = Prompt.of(body).task == "SQL" and Prompt.of(body).style == 1
        return Act(fault="error", after=1) if lost else Act()

    server = ScriptedModel(lambda prompt, number: knows(prompt), act, usage=False)
    await server.start()
    try:
        async with Model(f"{server.url}/v1", model="m") as model:
            run = await answer(CANCELLED, model, railway)
            assert model.uncounted
    finally:
        await server.stop()
    assert run.picked.result.rows == ((6,),)
    assert [c.corrections for c in run.candidates] == [1, 0]
    lost = [step for step in run.steps if step.lost]
    assert [step.name for step in lost] == ["candidate 1"]
    assert "broke off: engine died" in lost[0].note
    assert all(step.answer.instance is None and step.answer.input_tokens > 100 for step in run.calls)


@in_loop
async def test_a_server_that_goes_away_in_the_middle_is_one_mistake(railway) -> None:
    server = ScriptedModel(lambda prompt, number: knows(prompt))
    server.act = lambda body, number: Act(fault="abort") if number >= 4 else Act()
    await server.start()
    try:
        async with Model(f"{server.url}/v1", model="m") as model:
            model._client = model._client.with_options(max_retries=0)
            with pytest.raises(InputError, match="nobody answers there"):
                await answer(CANCELLED, model, railway)
    finally:
        await server.stop()


# ---- the record --------------------------------------------------------------------------------------------------


@in_loop
async def test_the_record_is_the_graph_that_was_run(railway, tmp_path) -> None:
    """Two questions into one log, on two instances, with corrections and a tie."""

    def say(prompt: Prompt, number: int) -> str:
        if prompt.task == "evaluate":
            return "1: pass\n2: pass"
        return knows(prompt, first=lambda gold, style: misnamed(gold) if style == 1 else wrong(gold))

    servers = [ScriptedModel(say), ScriptedModel(say)]
    runs = []
    for question in (CANCELLED, COSTS):  # the second log goes on where the first ended
        with CallLog(tmp_path / "calls.jsonl") as log:
            runs.append(await through_the_gateway(servers, railway, question, log=log))
    records = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    by_call = {r["call"]: r for r in records}
    assert len(by_call) == len(records) == sum(len(s.bodies) for s in servers)
    assert {r["ended"] for r in records} == {"done"}
    assert {r["instance"] for r in records} <= {"a100-0", "a100-1"}
    assert {(r["slo_s"], r["tenant"], r["model"]) for r in records} == {(60.0, "t", "m")}
    for r in records:
        workflow, _, r["stage"] = r["stage"].partition("/")
        assert workflow == "chess"

    follows = {
        "keywords": set(),
        "retriever": {"keywords", "retriever"},
        "candidate": {"retriever"},
        "revise": {"candidate", "revise"},
        "generate_unit_test": {"candidate", "revise"},
        "evaluate": {"generate_unit_test"},
        "unit_tester": {"evaluate"},
    }
    for r in records:
        assert r["issued_s"] <= r["first_token_s"] <= r["finished_s"]
        before = [by_call[call] for call in r["after"]]
        assert {b["stage"] for b in before} <= follows[r["stage"]]
        assert bool(before) == (r["stage"] != "keywords")
        for b in before:
            assert b["query"] == r["query"]
            assert b["finished_s"] <= r["issued_s"]

    for run in runs:
        mine = [r for r in records if r["query"] == run.query.id]
        assert Counter(r["stage"] for r in mine) == stages(run)
        of = {stage: [r for r in mine if r["stage"] == stage] for stage in follows}
        tables, *columns = sorted(of["retriever"], key=lambda r: r["call"])
        assert len(columns) == 2
        assert all(r["after"] == [tables["call"]] for r in columns)
        assert all(r["after"] == sorted(c["call"] for c in columns) for r in of["candidate"])
        revised, untouched = [], []
        for r in of["candidate"]:
            (revised if any(r["call"] in v["after"] for v in of["revise"]) else untouched).append(r["call"])
        assert len(revised) == len(untouched) == len(of["revise"]) == 1
        # the unit tests wait for the last call of each candidate
        assert of["generate_unit_test"][0]["after"] == sorted([*untouched, of["revise"][0]["call"]])
        assert len(of["evaluate"]) == 3
        assert of["unit_tester"][0]["after"] == sorted(r["call"] for r in of["evaluate"])

    # token counts as the servers counted them
    words = Counter(
        sum(len(m["content"].split()) for m in body["messages"])
        for server in servers
        for body in server.bodies
    )
    assert Counter(r["input_tokens"] for r in records) == words
    assert all(r["cached_tokens"] == r["input_tokens"] // 2 and r["output_tokens"] > 0 for r in records)


@in_loop
async def test_a_correction_tells_how_long_it_will_be(railway, monkeypatch) -> None:
    asked = []

    async def stream(self, body, where, answer):
        asked.append(where)
        answer.text = knows(Prompt.of(body), first=lambda gold, style: misnamed(gold))

    monkeypatch.setattr(Model, "_stream", stream)
    async with Model("http://127.0.0.1:1/v1", model="m") as model:
        await answer(CANCELLED, model, railway)
    lengths = {where["X-Hexrepro-Stage"]: where.get(OUTPUT_TOKENS) for where in asked}
    assert int(lengths.pop("revise")) == len(misnamed(GOLD[CANCELLED])) // 4
    assert set(lengths.values()) == {None}


# ---- many questions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [Load(concurrency=3), Load(rate_qps=100.0, seed=1)])
def test_a_benchmark_counts_what_is_right(railway, load) -> None:
    """Of four questions the model gets one wrong."""
    questions = [QUESTIONS[i] for i in (0, 2, 4, 7)]

    def say(prompt: Prompt, number: int) -> str:
        bad = prompt.question == questions[3].question
        return knows(prompt, first=lambda gold, style: wrong(gold) if bad else gold)

    @in_loop
    async def check() -> None:
        server, scored = ScriptedModel(say), []
        async with running([server]) as gateway, Model(f"{gateway.url}/v1") as model:
            await benchmark(questions, model, railway, load=load, slo_s=30.0, done=scored.append)
        assert Counter(s.question for s in scored if s.right) == Counter(questions[:3])
        assert len(scored) == 4
        out = console(stderr=False)
        with out.capture() as text:
            out.print(report(scored, slo_s=30.0))
        assert (
            "Execution accuracy: 3 of 4, 75% (95 % interval 30% to 95%)" in text.get()
        )  # Wilson's, from a table
        assert "SLO of 30 s met: 4 of 4" in text.get()
        row = next(line.split() for line in text.get().splitlines() if line.split()[:1] == ["candidate"])
        assert row[1:3] == ["8", "2.0"]

    check()


@in_loop
async def test_a_benchmark_s_order_of_rows(railway) -> None:
    """The stops of a line in another order are wrong where the question asks for an order, and right where not."""
    backwards = GOLD[QUESTIONS[2].question] + " DESC"
    server, scored = ScriptedModel(lambda p, n: knows(p, first=lambda gold, style: backwards)), []
    asked = [QUESTIONS[2], replace(QUESTIONS[2], ordered=False)]
    async with running([server]) as gateway, Model(f"{gateway.url}/v1") as model:
        await benchmark(asked, model, railway, done=scored.append)
    assert [s.right for s in scored] == [False, True]


@in_loop
async def test_a_question_whose_own_sql_fails_is_a_mistake(railway) -> None:
    async with Model("http://127.0.0.1:1/v1", model="m") as model:
        with pytest.raises(InputError, match="its own SQL fails"):
            await benchmark([replace(QUESTIONS[0], sql="SELECT x FROM STN")], model, railway)


# ---- the picture -------------------------------------------------------------------------------------------------


def test_the_time_line() -> None:
    assert bar(0.0, 24.0, 24.0) == "█" * 24
    assert bar(6.0, 12.0, 24.0) == " " * 6 + "█" * 6
    assert bar(12.0, 12.5, 24.0) == " " * 12 + "▌"
    assert bar(24.0, 24.0, 24.0) == " " * 23 + "█"
    assert bar(0.0, 0.0, 0.0) == "▏"


@in_loop
async def test_the_picture_shows_who_ran_where(railway) -> None:
    servers = [
        ScriptedModel(lambda p, n: knows(p, first=lambda gold, style: misnamed(gold))) for _ in range(2)
    ]
    run = await through_the_gateway(servers, railway)
    out = console(stderr=False)
    with out.capture() as text:
        out.print(picture(run))
    lines = text.get().splitlines()
    assert lines[0].strip() == CANCELLED
    assert "8 LLM calls" in lines[1]
    assert "2 corrections" in lines[1]
    for step in run.calls:
        line = next(line for line in lines if line.strip().startswith(step.name))
        assert step.answer.instance in {"a100-0", "a100-1"}
        assert "a100-" in line
    assert any("no such column" in line for line in lines)
    with out.capture() as text:
        out.print(picture(run, width=80), width=80)
    assert all(len(line) <= 80 for line in text.get().splitlines())
    assert "no such column" in text.get()
