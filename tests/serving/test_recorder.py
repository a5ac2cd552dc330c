"""The gateway's call log: what is in it, what is not, and that it survives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from hexrepro.errors import InputError
from hexrepro.serving import headers as names
from hexrepro.serving.config import Tenant
from hexrepro.workload import read
from tests.serving.scripted import Act, Server, ask, in_loop, post, running, settled

SECRET = "the-secret-of-the-prompt"


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(query: str, stage: str, **more: str) -> dict[str, str]:
    return {names.QUERY: query, names.STAGE: stage, "Authorization": "Bearer key-of-gold"} | more


@in_loop
async def test_every_call_that_ended_is_in_it(tmp_path) -> None:
    path = tmp_path / "logs" / "calls.jsonl"
    acts = {"broken": Act(fault="abort", after=1), "rejected": Act(status=400), "failed": Act(status=500)}
    acts |= {"cancelled": Act(first_s=5.0)}
    drafting = Act(first_s=0.2)  # long enough for both to be under way
    server = Server(lambda body, number: {"draft": drafting, **acts}.get(body.get("user"), Act(first_s=0.02)))
    settings = dict(call_log=str(path), attempts=1, failures=9, tenants=(Tenant("gold", "key-of-gold"),))
    began_s = time.time()
    async with running([server], **settings) as gateway:
        secret = [{"role": "user", "content": SECRET}]
        await post(gateway, ask(messages=secret, stream=True), **said("q", "link", **{names.SLO: "30"}))
        draft = ask(messages=secret, user="draft")
        await asyncio.gather(*(post(gateway, draft, **said("q", "draft")) for _ in range(2)))
        await post(gateway, ask(n=2), **said("q", "pick"))
        for how in ("broken", "rejected", "failed"):
            await post(gateway, ask(user=how, stream=how == "broken"), **said(how, "other"))
        gone = asyncio.create_task(post(gateway, ask(user="cancelled"), **said("cancelled", "other")))
        while not server.bodies or server.bodies[-1].get("user") != "cancelled":
            await asyncio.sleep(0.005)
        gone.cancel()
        await post(gateway, ask(), Authorization="Bearer key-of-gold")  # says nothing: a query of its own
        await settled(gateway)
        await gateway.drain()
    ended_s = time.time()
    records = lines(path)
    link, *drafts, pick = [r for r in records if r["query"] == "q"]
    assert (link["stage"], pick["stage"], {d["stage"] for d in drafts}) == ("link", "pick", {"draft"})
    assert link["after"] == []
    assert [d["after"] for d in drafts] == [[link["call"]]] * 2
    assert sorted(pick["after"]) == sorted(d["call"] for d in drafts)
    for record in (link, *drafts, pick):
        assert (record["tenant"], record["model"], record["slo_s"]) == ("gold", "m", 30.0)
        assert (record["instance"], record["ended"]) == ("a100-0", "done")
        assert (record["input_tokens"], record["cached_tokens"]) == (7, None)  # as the server counted
        assert began_s < record["issued_s"] < record["finished_s"] < ended_s
    assert [r["output_tokens"] for r in (link, *drafts, pick)] == [3, 3, 3, 2]
    assert link["issued_s"] + 0.02 <= link["first_token_s"] <= link["finished_s"] <= pick["issued_s"]
    assert pick["first_token_s"] is None  # an answer in one piece
    ends = {r["query"]: r for r in records if r["query"] in acts}
    assert {query: r["ended"] for query, r in ends.items()} == {query: query for query in acts}
    assert {query: r["output_tokens"] for query, r in ends.items()} == dict.fromkeys(acts, 0) | {"broken": 1}
    (single,) = [r for r in records if r["query"].startswith("call-")]
    assert single["after"] == []
    assert len({r["call"] for r in records}) == len(records) == 9
    assert SECRET not in path.read_text()
    assert "key-of" not in path.read_text()


@in_loop
async def test_a_call_that_is_turned_away_is_in_it_with_its_reason(tmp_path) -> None:
    """Load that a replay should know of; wrong requests and wrong keys are not: they are no load, and anybody can send them."""
    path = tmp_path / "calls.jsonl"
    slow = Server(lambda body, number: Act(first_s=0.15))
    tenants = (Tenant("gold", "key-of-gold", 1), Tenant("lead", "key-of-lead"))
    settings = dict(call_log=str(path), concurrency=1, max_waiting=0, tenants=tenants, patience_s=0.0)
    async with running([slow], **settings) as gateway:
        lead = {"Authorization": "Bearer key-of-lead"}
        first = asyncio.create_task(post(gateway, ask(), **said("q", "link")))
        while not slow.bodies:
            await asyncio.sleep(0.005)
        full = await post(gateway, ask(), **said("p", "link"))  # before its body is read
        assert full[0] == 429
        gateway.dispatcher.settings = replace(gateway.dispatcher.settings, max_waiting=9)
        body = ask(hexrepro={"query": "o", "slo_s": 7}, messages=[{"role": "user", "content": SECRET}])
        assert (await post(gateway, body, **said("p", "draft")))[0] == 429  # the tenant's limit
        assert (await post(gateway, b"{", **said("p", "draft")))[0] == 400
        assert (await post(gateway, ask(), **lead | {names.TENANT: "gold"}))[0] == 403
        assert (await post(gateway, ask(), Authorization="Bearer none"))[0] == 401
        assert (await first)[0] == 200
        gateway.coordinator.instance_down(0)
        assert (await post(gateway, ask(), **lead))[0] == 503
        await gateway.drain()
        assert (await post(gateway, ask(), **lead))[0] == 503
        counted = {
            s.labels["reason"]: s.value
            for family in gateway.metrics.refused.collect()
            for s in family.samples
            if s.name.endswith("_total")
        }
    records = lines(path)
    assert len({r["call"] for r in records}) == len(records) == 5
    shown = [(r["query"][:5], r["stage"], r["tenant"], r["model"], r["slo_s"], r["ended"]) for r in records]
    assert shown == [
        ("p", "link", "gold", None, None, "refused_overload"),
        ("o", "draft", "gold", "m", 7.0, "refused_tenant"),
        ("q", "link", "gold", "m", 60.0, "done"),
        ("call-", "call", "lead", "m", None, "refused_no_instance"),
        ("call-", "call", "lead", None, None, "refused_draining"),
    ]
    assert counted == {"overload": 1, "tenant": 1, "no_instance": 1, "draining": 1}
    assert [r["input_tokens"] > 0 for r in records] == [False, True, True, True, False]
    assert SECRET not in path.read_text()
    loaded = read(path)
    assert loaded.workload.n_calls == 1
    (note,) = [n for n in loaded.report.notes if "turned away" in n]
    assert "4 calls turned away by the gateway (draining 1, no_instance 1, overload 1, tenant 1)" in note


@in_loop
async def test_a_call_that_is_turned_away_and_tried_again_is_tool_time(tmp_path) -> None:
    path = tmp_path / "calls.jsonl"
    async with running([Server()], call_log=str(path), max_under_way=1) as gateway:
        await post(gateway, ask(), **{names.QUERY: "q"})
        gateway.dispatcher.under_way[""] = 1  # as if another call were there
        assert (await post(gateway, ask(), **{names.QUERY: "q"}))[0] == 429
        gateway.dispatcher.under_way.clear()
        await asyncio.sleep(0.1)
        assert (await post(gateway, ask(), **{names.QUERY: "q"}))[0] == 200
    loaded = read(path)
    assert loaded.report.complete
    assert loaded.workload.n_calls == 2
    assert 0.1 < loaded.workload.tool_time_s[1] < 1.0


@in_loop
async def test_logrotates_copytruncate_loses_no_line_that_comes_after(tmp_path) -> None:
    path = tmp_path / "calls.jsonl"
    async with running([Server()], call_log=str(path)) as gateway:
        await post(gateway, ask(), **{names.QUERY: "before"})
        await gateway._recorder.flush()
        os.truncate(path, 0)
        await post(gateway, ask(), **{names.QUERY: "after"})
    assert [r["query"] for r in lines(path)] == ["after"]  # and no hole of zeros before it


@in_loop
async def test_a_gateway_goes_on_with_the_file_of_the_one_before(tmp_path) -> None:
    path = tmp_path / "calls.jsonl"
    for _ in range(2):
        async with running([Server()], call_log=str(path)) as gateway:
            await post(gateway, ask())
    assert len({r["call"] for r in lines(path)}) == 2


@in_loop
async def test_a_file_that_cannot_be_written_is_a_mistake_at_the_start(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"call log .*file/calls.jsonl: it cannot be written"):
        async with running([Server()], call_log=str(tmp_path / "file" / "calls.jsonl")):
            pass


@in_loop
async def test_serving_goes_on_when_the_disk_is_full(tmp_path, caplog) -> None:
    caplog.set_level(logging.ERROR)
    path = tmp_path / "calls.jsonl"
    async with running([Server()], call_log=str(path)) as gateway:
        log = gateway._recorder._log
        write, log.write = (
            log.write,
            lambda records: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        await post(gateway, ask())
        await gateway._recorder.flush()
        log.write = write
        assert (await post(gateway, ask()))[0] == 200
    assert len(lines(path)) == 1
    assert "calls are missing in it: No space left on device" in caplog.text


@in_loop
async def test_a_kill_loses_at_most_the_last_second(tmp_path) -> None:
    server = Server()
    await server.start()
    cluster = {"name": "t", "model": "llama-3.1-70b", "models": ["m"]}
    cluster["instances"] = [{"gpu": "a100", "url": server.url}]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    path = tmp_path / "calls.jsonl"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hexrepro.serving", f"cluster={tmp_path / 'cluster.yaml'}", "port=0", f"call_log={path}",
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        line = (await process.stdout.readline()).decode()
        gateway = SimpleNamespace(url=line.split()[3].removesuffix("/v1:"))
        for _ in range(3):
            assert (await post(gateway, ask()))[0] == 200
        async with asyncio.timeout(2.0):
            while len(lines(path)) < 3:
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        await process.wait()
        await server.stop()
    assert [r["ended"] for r in lines(path)] == ["done"] * 3
