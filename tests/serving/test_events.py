"""Streams of events on their way through, and usage."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexrepro.serving import events as module
from hexrepro.serving.events import Events, usage_of

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 300), max_size=8))
def test_wherever_it_is_cut_the_same_comes_out(cuts: list[int]) -> None:
    sent = b": ping\n\n" + TOKEN + TOKEN.replace(b"\n", b"\r\n") + USAGE + DONE
    edges = [0, *sorted(min(c, len(sent)) for c in cuts), len(sent)]
    events = Events(hide_usage=True)
    out = b"".join(events.feed(sent[a:b]) for a, b in itertools.pairwise(edges))
    assert out == b": ping\n\n" + TOKEN * 2 + DONE
    assert (events.events, events.done, events.error) == (2, True, False)
    assert events.usage == {"prompt_tokens": 7, "completion_tokens": 2}


def test_no_json_is_read_for_a_token(monkeypatch) -> None:
    """A server may put `"usage":null` into every event, and a model may write the words."""
    monkeypatch.setattr(module.json, "loads", None)
    events = Events()
    says = json.dumps({"choices": [{"delta": {"content": 'the "usage": and the "error": 3'}}]})
    for event in (TOKEN, f"data: {says}\n\n".encode(), b'data: {"choices":[],"error":null}\n\n'):
        assert events.feed(event) == event
    assert not events.error


def test_an_error_among_the_events_is_seen() -> None:
    events = Events()
    error = b'data: {"error": {"message": "engine died"}}\n\n'
    assert events.feed(TOKEN + error) == TOKEN + error
    assert events.error


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"choices": [], "usage": {"completion_tokens": 3}}, {"completion_tokens": 3}),
        ({"usage": {"completion_tokens": 3, "details": {"x": 1}}, "choices": [{"text": '"usage":{"a":1}'}]},
         {"completion_tokens": 3, "details": {"x": 1}}),
        ({"choices": [], "usage": None}, None),
        ({"choices": []}, None),
    ],
)  # fmt: skip
def test_usage_of_a_whole_answer(answer, usage) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        assert usage_of(json.dumps(answer, separators=separators).encode()) == usage
    assert usage_of(b'{"usage":') is None
    assert usage_of(b'{"usage":"\xff"}') is None
