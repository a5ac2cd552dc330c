"""The gateway through real sockets: what clients see, and what servers get."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import replace

import aiohttp
import openai
import pytest

from hexrepro.errors import InputError
from hexrepro.serving import gateway as gateway_module
from hexrepro.serving import headers as names
from hexrepro.serving.config import Tenant
from hexrepro.serving.coordinator import Options
from tests.serving.scripted import MODEL, QUICK, Act, Server, ask, client, in_loop, post, running, settled

# ------------------------------------------------------------------------------------------ answers


@in_loop
async def test_the_openai_client_gets_what_the_server_says() -> None:
    server = Server()
    async with running([server]) as gateway:
        api = client(gateway)
        whole = await api.chat.completions.create(**ask())
        assert whole.choices[0].message.content == "t0 t1 t2 "
        assert whole.usage.completion_tokens == 3
        text = await api.completions.create(model=MODEL, prompt="SELECT", max_tokens=2)
        assert text.choices[0].text == "t0 t1 "
        parts = [c async for c in await api.chat.completions.create(**ask(stream=True))]
        assert [p.choices[0].delta.content for p in parts] == ["t0 ", "t1 ", "t2 "]
        parts = [
            c
            async for c in await api.completions.create(model=MODEL, prompt=[1, 2], max_tokens=2, stream=True)
        ]
        assert "".join(p.choices[0].text for p in parts) == "t0 t1 "
        assert [m.id async for m in api.models.list()] == [MODEL]
        await settled(gateway)
        assert server.finished == 4


@in_loop
async def test_usage_is_asked_of_the_server_and_shown_to_those_who_asked() -> None:
    server = Server()
    async with running([server]) as gateway:
        api = client(gateway)
        parts = [c async for c in await api.chat.completions.create(**ask(stream=True))]
        assert all(p.usage is None and p.choices for p in parts)
        assert server.bodies[-1]["stream_options"] == {"include_usage": True}
        options = {"include_usage": True}
        parts = [
            c async for c in await api.chat.completions.create(**ask(stream=True, stream_options=options))
        ]
        assert parts[-1].usage.completion_tokens == 3
        stage = gateway.coordinator.stages.called("call")
        assert stage.finished == 2
        odd = {"include_usage": False, "continuous_usage_stats": True}
        parts = [c async for c in await api.chat.completions.create(**ask(stream=True, stream_options=odd))]
        assert all(p.usage is None and p.choices for p in parts)
        assert server.bodies[-1]["stream_options"] == {"include_usage": True}
        assert stage.output_median == 3.0


@in_loop
async def test_a_call_belongs_where_its_headers_or_its_body_say() -> None:
    server = Server()
    async with running([server]) as gateway:
        api = client(gateway)
        ours = {names.QUERY: "q1", names.STAGE: "draft", names.WORKFLOW: "chess", names.SLO: "30"}
        first = await api.chat.completions.with_raw_response.create(**ask(), extra_headers=ours)
        assert first.headers[names.INSTANCE] == "a100-0"
        of = gateway.coordinator
        assert of.queries_under_way == 1
        query = of._queries.get(("", "q1"))
        assert query.slo_s == 30.0
        same = {"hexrepro": {"query": "q1", "stage": "fix", "workflow": "chess", "slo_s": 99, "final": True}}
        await api.chat.completions.create(**ask(), extra_body=same)
        assert "hexrepro" not in server.bodies[-1]
        assert not any(name.lower().startswith("x-hexrepro") for name in server.headers[-1])
        assert of.queries_under_way == 0
        assert query.slo_s == 30.0
        assert {depth for depths in query.steps.values() for depth in depths} == {0, 1}
        assert [s.name for s in of.stages.list] == ["chess/draft", "chess/fix"]


@in_loop
async def test_a_query_can_be_ended_from_outside() -> None:
    async with running([Server()]) as gateway, aiohttp.ClientSession() as session:
        await post(gateway, ask(), **{names.QUERY: "q1"})
        for status in (200, 404):
            async with session.delete(gateway.url + "/hexrepro/queries/q1") as answer:
                assert answer.status == status
        assert gateway.coordinator.queries_under_way == 0


@in_loop
async def test_what_the_server_rejects_reaches_the_client_as_it_is() -> None:
    server = Server(lambda body, number: Act(status=400))
    async with running([server]) as gateway:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="scripted"):
                await client(gateway).chat.completions.create(**ask(stream=stream))
        assert len(server.bodies) == 2  # not tried again
        assert gateway.coordinator.is_open.all()
        await settled(gateway)


# ------------------------------------------------------------------------------------------ order


@in_loop
async def test_calls_wait_in_the_order_of_their_keys_and_no_more_run_than_may() -> None:
    """One slot: while the first runs, three come with falling SLOs; they are served in the order of urgency."""
    server = Server(lambda body, number: Act(first_s=0.05))
    async with running([server], concurrency=1) as gateway:
        first = asyncio.create_task(post(gateway, ask()))
        while not server.bodies:
            await asyncio.sleep(0.001)
        rest = []
        for slo in (90, 60, 30):
            rest.append(asyncio.create_task(post(gateway, ask(user=f"slo{slo}"), **{names.SLO: str(slo)})))
            await asyncio.sleep(0.005)
        assert gateway.coordinator.calls_waiting == 3
        await asyncio.gather(first, *rest)
        assert [b.get("user") for b in server.bodies] == [None, "slo30", "slo60", "slo90"]
        assert server.most_running == 1
        await settled(gateway)


@in_loop
async def test_in_engine_mode_calls_go_at_once_and_carry_their_priority() -> None:
    server = Server(lambda body, number: Act(first_s=0.2))
    async with running([server], mode="engine", concurrency=1) as gateway:
        slos = (90, 30, 60)
        tasks = []
        for slo in slos:
            tasks.append(asyncio.create_task(post(gateway, ask(), **{names.SLO: str(slo)})))
            await asyncio.sleep(0.003)
        await asyncio.gather(*tasks)
        assert server.most_running == 3
        by_slo = dict(zip(slos, (b["priority"] for b in server.bodies), strict=True))
        assert by_slo[30] < by_slo[60] < by_slo[90]
        assert all(type(p) is int for p in by_slo.values())
        await settled(gateway)


@pytest.mark.parametrize("mode", ["gateway", "engine"])
def test_a_client_cannot_give_itself_a_priority(mode: str) -> None:
    """vLLM would take it: the least first, and preempted last."""

    @in_loop
    async def check() -> None:
        server = Server()
        async with running([server], mode=mode) as gateway:
            assert (await post(gateway, ask(priority=-(2**40), user="me")))[0] == 200
            await post(gateway, ask())
            mine, other = server.bodies
            assert mine["user"] == "me"
            if mode == "gateway":
                assert "priority" not in mine
            else:  # what came first is more urgent
                assert mine["priority"] < other["priority"]
                assert mine["priority"] != -(2**40)

    check()


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[1]", None),
        ({"messages": [{"role": "user", "content": "hi"}]}, "model"),
        ({"model": MODEL}, "messages"),
        ({"model": MODEL, "messages": []}, "messages"),
        ({"model": MODEL, "messages": ["hi"]}, "messages[0]"),
        ({"model": MODEL, "messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (ask(stream="yes"), "stream"),
        (ask(n=0), "max_tokens"),
        (ask(n=True), "max_tokens"),
        (ask(hexrepro=3), "hexrepro"),
        (ask(hexrepro={"slo": 3}), "hexrepro.slo"),
        (ask(hexrepro={"slo_s": -1}), "hexrepro.slo_s"),
        (ask(hexrepro={"slo_s": "NaN"}), "hexrepro.slo_s"),
        (ask(hexrepro={"output_tokens": 1e300}), "hexrepro.output_tokens"),
        (ask(hexrepro={"query": "x" * 201}), "hexrepro.query"),
        (ask(hexrepro={"final": "maybe"}), "hexrepro.final"),
        (ask(hexrepro={"stage": "two\nlines"}), "hexrepro.stage"),
        (ask(hexrepro={"stage": "\ud800"}), "hexrepro.stage"),
        (ask() | {"n": 0}, "n"),
        (ask() | {"n": 10**5}, "n"),
        (json.dumps(ask()).encode("utf-16"), None),
    ],
)
def test_a_bad_request_is_told_its_field(body, param) -> None:
    @in_loop
    async def check() -> None:
        server = Server()
        async with running([server]) as gateway:
            status, _, answer = await post(gateway, body)
            error = json.loads(answer)["error"]
            assert status == 400
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert param is None or param in error["message"]
            assert server.bodies == []
            await settled(gateway)

    check()


@in_loop
async def test_other_refusals() -> None:
    async with running([Server()], max_body_bytes=1000, max_header_bytes=4000) as gateway:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client(gateway).chat.completions.create(**ask(model="nobody"))
        status, _, answer = await post(gateway, ask(user="x" * 1000))
        assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")
        status, _, answer = await post(gateway, ask(), path="/v1/embeddings")
        assert (status, json.loads(answer)["error"]["code"]) == (404, "not_found")
        status, _, _ = await post(gateway, ask(), **{names.SLO: "soon"})
        assert status == 400
        status, _, _ = await post(gateway, ask(), **{names.QUERY: "x" * 5000})
        assert status == 400
        async with aiohttp.ClientSession() as session, session.get(gateway.url + "/v1/completions") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        with pytest.raises(openai.NotFoundError):
            await client(gateway).models.retrieve("nobody")
        assert (await client(gateway).models.retrieve(MODEL)).id == MODEL


@in_loop
async def test_a_body_without_a_length_is_cut_off_at_the_limit() -> None:
    async def endless():
        for _ in range(100):
            yield b" " * 1000

    async with (
        running([Server()], max_body_bytes=10_000) as gateway,
        aiohttp.ClientSession() as session,
        session.post(gateway.url + "/v1/completions", data=endless()) as answer,
    ):
        assert answer.status == 413


@in_loop
async def test_with_keys_only_their_holders_are_served() -> None:
    tenants = (Tenant("gold", "key-of-gold"), Tenant("bronze", "key-of-bronze", max_under_way=1))
    server = Server(lambda body, number: Act(first_s=0.05))
    async with running([server], tenants=tenants) as gateway:
        for key in ("wrong", "key-of-gol", "key-of-gold2", "ключ"):
            status, headers, answer = await post(gateway, ask(), Authorization=f"Bearer {key}")
            assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await client(gateway, "wrong").models.list()
        await client(gateway, "key-of-gold").chat.completions.create(**ask())
        assert "Authorization" not in server.headers[0]
        with pytest.raises(openai.PermissionDeniedError):
            await client(gateway, "key-of-gold").chat.completions.create(
                **ask(), extra_headers={names.TENANT: "bronze"}
            )
        bronze = client(gateway, "key-of-bronze")
        answers = await asyncio.gather(
            *(bronze.chat.completions.create(**ask()) for _ in range(3)), return_exceptions=True
        )
        refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
        assert len(refused) == 2
        assert refused[0].response.headers["Retry-After"] == "1"
        await settled(gateway)


@in_loop
async def test_overload_is_refused_with_the_time_to_come_back() -> None:
    server = Server(lambda body, number: Act(first_s=0.1))
    async with running([server], concurrency=1, max_waiting=1) as gateway:
        answers = await asyncio.gather(*(post(gateway, ask()) for _ in range(5)))
        assert sorted(status for status, _, _ in answers) == [200, 200, 429, 429, 429]
        full = next(headers for status, headers, _ in answers if status == 429)
        assert int(full["Retry-After"]) >= 1
        await settled(gateway)


def test_a_policy_that_needs_counters_at_the_instances_is_refused() -> None:
    @in_loop
    async def check() -> None:
        with pytest.raises(InputError, match="vtc"):
            async with running([Server()], policy="vtc"):
                pass

    check()


@in_loop
async def test_a_tenants_limit_holds_while_its_calls_are_on_their_way_to_a_lane() -> None:
    """Two calls at the same time, each waiting for its prompt to be counted: only one may come in."""
    async with running([Server()], tokenize="upstream", max_under_way=1) as gateway:
        answers = await asyncio.gather(*(post(gateway, ask(user=str(i))) for i in range(3)))
        assert sorted(status for status, _, _ in answers) == [200, 429, 429]
        await settled(gateway)


async def exchange(gateway, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes, and read what comes until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_s)
    answer = await reader.read()
    writer.close()
    return answer


@in_loop
async def test_a_body_that_does_not_come_is_not_waited_for_and_one_that_breaks_off_is_no_call(
    monkeypatch,
) -> None:
    monkeypatch.setattr(gateway_module, "_LINGER_S", 0.05)
    server = Server()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    async with running([server], timeouts=replace(QUICK.timeouts, body_s=0.1)) as gateway:
        answer = await exchange(gateway, head + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"body_timeout"' in answer
        answer = await exchange(gateway, head + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n")
        assert b" 400 " in answer[:20]
        _reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await asyncio.sleep(0.02)
        assert server.bodies == []
        await settled(gateway)


@pytest.mark.parametrize(
    "head", [b"NOT HTTP AT ALL\r\n\r\n", b"GET /health HTTP/1.1\r\nA: " + b"a" * 5000 + b"\r\n\r\n"]
)
def test_what_is_no_http_gets_plain_text_and_is_logged_without_it(head: bytes, caplog) -> None:
    """aiohttp answers it before the gateway sees a request; what comes after it on other connections is served."""

    @in_loop
    async def check() -> None:
        async with running([Server()], max_header_bytes=4000) as gateway:
            answer = await exchange(gateway, head)
            assert b" 400 Bad Request" in answer.partition(b"\r\n")[0]
            assert b"text/plain" in answer
            assert (await post(gateway, ask()))[0] == 200

    check()
    assert "NOT HTTP" not in caplog.text
    assert "aaaa" not in caplog.text


@in_loop
async def test_bodies_in_chunks_and_clients_that_ask_before_they_send() -> None:
    server = Server()
    body = json.dumps(ask()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    async with running([server]) as gateway:
        pieces = [b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:9], body[9:], b"")]
        answer = await exchange(gateway, head + b"Transfer-Encoding: chunked\r\n\r\n", *pieces, pause_s=0.005)
        assert answer.startswith(b"HTTP/1.1 200")
        expecting = head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        answer = await exchange(gateway, expecting, body, pause_s=0.01)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        # without persistent connections and chunks (HTTP/1.0), a stream ends with its connection
        stream = json.dumps(ask(stream=True)).encode()
        old = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(stream)
        head, _, events = (await exchange(gateway, old + stream)).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")
        await settled(gateway)


# ------------------------------------------------------------------------------------------ lengths


def arrivals(gateway) -> list:
    """(prompt tokens, what else the coordinator is told), from here on."""
    seen = []
    arrived = gateway.coordinator.call_arrived
    gateway.coordinator.call_arrived = lambda *a, **k: (seen.append((a[2], k)), arrived(*a, **k))[1]
    return seen


@in_loop
async def test_the_bounds_of_an_answer_are_those_of_the_server() -> None:
    """/v1/completions makes 16 tokens where nothing is said, and takes 0 with echo; numbers beyond all use do no harm."""
    async with running([Server(lambda body, number: Act(tokens=2))]) as gateway:
        seen = arrivals(gateway)
        plain = {"model": MODEL, "prompt": "x"}
        for more in ({}, {"max_tokens": None}, {"max_tokens": 0, "echo": True}, {"max_tokens": 10**400}):
            assert (await post(gateway, plain | more, "/v1/completions"))[0] == 200
        assert [k["max_tokens"] for _, k in seen] == [16, None, 0, 10**6]
        del seen[:]
        for more in ({}, {"max_completion_tokens": 7}, {"max_completion_tokens": None}):
            assert (await post(gateway, ask(5) | more))[0] == 200
        assert [k["max_tokens"] for _, k in seen] == [5, 7, 5]
        await settled(gateway)


@in_loop
async def test_sequences_of_one_call_are_learned_one_by_one_and_kept_in_memory_together() -> None:
    """n = 4, and 24 tokens counted: 6 for each."""
    server = Server(lambda body, number: Act(tokens=24, first_s=0.03))
    async with running([server]) as gateway:
        seen = arrivals(gateway)
        of = gateway.coordinator
        call = asyncio.create_task(post(gateway, ask(n=6) | {"n": 4}))
        while not of.calls_under_way:
            await asyncio.sleep(0.001)
        assert of.views["output_tokens"][0] == 4 * 6
        await call
        assert of.stages.called("call").output_median == 6.0
        batch = {"model": MODEL, "prompt": ["one", "two", "three"], "n": 2}
        await post(gateway, batch, "/v1/completions")
        await post(gateway, batch | {"prompt": [[1, 2], [3]], "n": 1}, "/v1/completions")
        assert [(tokens, k["sequences"]) for tokens, k in seen] == [(7, 4), (3, 6), (3, 2)]
        await settled(gateway)


@in_loop
async def test_text_without_utf8_passes_and_does_not_spoil_the_metrics() -> None:
    """A lone surrogate in a prompt is JSON; in a name it is refused, and so are bytes in a header that are no UTF-8."""
    server = Server()
    async with running([server], mode="engine") as gateway, aiohttp.ClientSession() as session:
        odd = [{"role": "user", "content": "\ud800 é"}]
        status, _, _ = await post(gateway, ask(messages=odd, hexrepro={"query": "q"}, priority=1))
        assert status == 200
        assert server.bodies[-1]["messages"] == odd
        body = json.dumps(ask()).encode()
        answer = await exchange(
            gateway,
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Hexrepro-Stage: \xff\xfe\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body,
        )
        assert answer.startswith(b"HTTP/1.1 400")
        async with session.get(gateway.url + "/metrics") as metrics:
            assert metrics.status == 200


# ------------------------------------------------------------------------------------------ what it shows


@in_loop
async def test_metrics_and_health() -> None:
    servers = [Server(), Server()]
    async with running(servers) as gateway, aiohttp.ClientSession() as session:
        await post(gateway, ask(stream=True))
        await post(gateway, {"model": MODEL})
        async with session.get(gateway.url + "/metrics") as answer:
            text = await answer.text()
        for line in (
            'hexrepro_answers_total{status="200"} 1.0',
            'hexrepro_answers_total{status="400"} 1.0',
            'hexrepro_calls_total{end="done",instance="a100-0"} 1.0',
            'hexrepro_instance_up{instance="a100-1"} 1.0',
            "hexrepro_decision_seconds_count 1.0",
            "hexrepro_first_token_seconds_count 1.0",
            "hexrepro_alpha 0.5",
            'hexrepro_stage_output_tokens{stage="call"} 3.0',
        ):
            assert line in text
        async with session.get(gateway.url + "/health") as answer:
            assert answer.status == 200
            assert await answer.json() == {"status": "ok", "instances": {"a100-0": True, "a100-1": True}}


@in_loop
async def test_no_prompt_and_no_key_is_logged(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "the-secret-of-the-prompt"
    act = {0: Act(status=500), 1: Act(fault="abort", after=1)}
    server = Server(lambda body, number: act.get(number, Act()))
    async with running([server], tenants=(Tenant("gold", "key-of-gold"),)) as gateway:
        body = ask(messages=[{"role": "user", "content": secret}], stream=True)
        for key in ("key-of-gold", "key-of-gold", "key-that-is-wrong"):
            await post(gateway, body, Authorization=f"Bearer {key}")
        await post(gateway, b'{"model": "' + secret.encode() + b'"', Authorization="Bearer key-of-gold")
        # what aiohttp cannot read it would quote in its log
        await exchange(
            gateway,
            b"GET / HTTP/1.1\r\nAuthorization: Bearer key-of-gold\x01" + secret.encode() + b"\r\n\r\n",
        )
        await settled(gateway)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("hexrepro")]
    assert any("call 0" in line for line in ours)
    assert any(r.name == "hexrepro.serving.http" for r in caplog.records)
    everything = caplog.text
    assert secret not in everything
    assert "key-" not in everything
    assert "key-of-gold" not in repr(gateway.serving)


@in_loop
async def test_prompts_are_counted_by_the_server_once() -> None:
    server = Server()
    async with running([server], tokenize="upstream") as gateway:
        seen = []
        arrived = gateway.coordinator.call_arrived
        gateway.coordinator.call_arrived = lambda *a, **k: (seen.append(a[2]), arrived(*a, **k))[1]
        for _ in range(3):
            await post(
                gateway, {"model": MODEL, "prompt": "one two three", "max_tokens": 1}, "/v1/completions"
            )
        await post(gateway, {"model": MODEL, "prompt": [5, 6, 7, 8, 9], "max_tokens": 1}, "/v1/completions")
        assert seen == [3, 3, 3, 5]
        assert server.tokenized == 1


@in_loop
async def test_without_asking_prompts_are_estimated_as_servers_counted() -> None:
    """The scripted server says 7 tokens for 70 characters: from then on 10 characters are a token."""
    server = Server()
    async with running([server]) as gateway:
        seen = []
        arrived = gateway.coordinator.call_arrived
        gateway.coordinator.call_arrived = lambda *a, **k: (seen.append(a[2]), arrived(*a, **k))[1]
        for characters in (70, 200):
            await post(gateway, {"model": MODEL, "prompt": "x" * characters}, "/v1/completions")
        assert seen == [18, 20]


@in_loop
async def test_idle_queries_end_by_themselves() -> None:
    async with running([Server()], coordinator=Options(idle_s=0.2)) as gateway:
        await post(gateway, ask(), **{names.QUERY: "q"})
        assert gateway.coordinator.queries_under_way == 1
        for _ in range(40):
            await asyncio.sleep(0.1)
            if gateway.coordinator.queries_under_way == 0:
                break
        assert gateway.coordinator.queries_under_way == 0


@in_loop
async def test_the_tuners_alpha_is_applied() -> None:
    """The tuner hears of the calls in its own thread; what it decides is what the dispatch rule uses from then on."""
    async with running([Server(), Server()], tune=True) as gateway:
        log = gateway.coordinator.tuner_log
        heard = []

        def step(now_s: float) -> None:
            heard.append(len(log.tuner.history.finished))
            log.tuner.alpha = 0.125

        log.tuner.step = step
        await post(gateway, ask(stream=True))
        for _ in range(60):
            await asyncio.sleep(0.05)
            if gateway.coordinator.alpha == 0.125:
                break
        assert gateway.coordinator.alpha == 0.125
        assert heard[-1] == 1
        assert len(log.tuner.history.arrivals) == 1


@in_loop
async def test_a_tuner_that_takes_its_time_holds_up_nothing_else(tmp_path) -> None:
    path, go_on = tmp_path / "calls.jsonl", threading.Event()
    async with running([Server()], tune=True, call_log=str(path)) as gateway:
        gateway.coordinator.tuner_log.tuner.step = lambda now_s: go_on.wait(10)
        try:
            await asyncio.sleep(1.2)  # by now its thread waits
            await post(gateway, ask())
            async with asyncio.timeout(3):
                while not path.read_text():
                    await asyncio.sleep(0.05)
        finally:
            go_on.set()
