"""Test reading recorded requests, and trimming them without a gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.app import resources
from gateway.core.errors import GatewayError
from gateway.replay.requests import RecordedRequest, Replay, ReplayedTurn, RequestSums, SentRequest, read_lines

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "sigma",
    "tau",
]


def said(role: str, number: int, words: int = 120) -> dict[str, Any]:
    return {"role": role, "content": " ".join(WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(words))}


def conversation(turns: int) -> list[dict[str, Any]]:
    found = [{"role": "system", "content": "You are of use."}]
    for number in range(turns):
        found += [said("user", number), said("assistant", number + 100)]
    return found[:-1]


def lines(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def read(*values: Any, whole: bool = False) -> list[RecordedRequest]:
    complaints: list[tuple[int, str]] = []
    found = list(read_lines(lines(*values), whole=whole, complain=lambda line, what: complaints.append((line, what))))
    assert complaints == []
    return found


@pytest.fixture
async def replay(tmp_path: Path) -> AsyncIterator[Replay]:
    file = tmp_path / "gateway.yaml"
    price = {"input": 1, "output": 1, "cache_read": 0.1}
    models = [{"match": "priced", "provider": "openai", "window": 100_000, "price": price}]
    file.write_text(json.dumps({"models": models}))
    with resources.inspector_of(config.load(file, environment={}).settings) as inspector:
        yield Replay(inspector, budget=1500, model=None)


def test_a_line_is_a_body_or_holds_one() -> None:
    body = {"model": "m", "messages": [said("user", 1)]}
    found = read(body, {"session": "s", "body": body}, {"session_id": "t", "request": body})
    assert [json.loads(one.body) for one in found] == [body] * 3
    assert [one.session for one in found][1:] == ["s", "t"]
    assert found[0].session.startswith("auto-")


def test_a_session_that_the_body_names_is_taken() -> None:
    body = {"model": "m", "messages": [said("user", 1)], "prompt_cache_key": "mine"}
    assert read(body)[0].session == "mine"


def test_calls_of_one_conversation_without_a_name_are_one_session() -> None:
    early, late = ({"model": "m", "messages": conversation(turns)} for turns in (1, 4))
    other = {"model": "m", "messages": [said("user", 9)]}
    first, second, third = read(early, late, other)
    assert first.session == second.session != third.session


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_line_without_request_is_reported_and_skipped(line: bytes) -> None:
    complaints: list[int] = []
    good = lines({"model": "m", "messages": [said("user", 1)]})
    found = list(read_lines([line, b"\n", *good], whole=False, complain=lambda at, _: complaints.append(at)))
    assert complaints == [1]
    assert [one.line for one in found] == [3]


def test_lone_surrogate_is_reported() -> None:
    told: list[int] = []
    half = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    whole = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    found = list(read_lines([half, whole], whole=False, complain=lambda line, _: told.append(line)))
    assert ([one.line for one in found], told) == ([2], [1])


def test_conversation_without_response_is_one_call() -> None:
    found = list(read_lines([b'{"messages": []}'], whole=True, complain=lambda _, what: pytest.fail(what)))
    assert [json.loads(one.body) for one in found] == [{"messages": []}]


def test_a_whole_conversation_is_every_call_it_was_made_of() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        said("user", 1), {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "x"}, said("assistant", 2), said("user", 3),
    ]  # fmt: skip
    found = read({"model": "m", "messages": messages}, whole=True)
    assert [len(json.loads(one.body)["messages"]) for one in found] == [1, 3, 5]


def test_consecutive_response_items_are_one_response() -> None:
    items = [
        {"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"}, {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    found = read({"model": "m", "input": items}, whole=True)
    assert [len(json.loads(one.body)["input"]) for one in found] == [1, 4]


async def turns_of(replay: Replay, turns: int) -> list[ReplayedTurn]:
    body = {"model": "priced", "messages": conversation(turns)}
    return [await replay.turn(one) for one in read(body, whole=True)]


async def test_requests_over_budget_are_trimmed(replay: Replay) -> None:
    found = await turns_of(replay, 12)
    small, large = found[1], found[-1]
    assert small.sent == small.original
    assert not small.trimmed
    assert large.sent is not None
    assert large.sent.tokens <= 1500 < large.original.tokens
    assert large.trimmed


async def test_prefix_stays_cached_between_trims(replay: Replay) -> None:
    found = [turn for turn in await turns_of(replay, 20) if turn.trimmed and turn.sent is not None]
    assert {turn.cut for turn in found} == {True, False}
    for before, turn in pairwise(found):
        if turn.sent is not None and not turn.cut and before.sent is not None and before.sent.tokens > 1100:
            assert turn.sent.cached > 1000, "what was sent before stands at its beginning"


async def test_first_request_and_short_prefix_are_not_cached(replay: Replay) -> None:
    found = await turns_of(replay, 3)
    assert found[0].original.cached == 0
    assert found[1].original.tokens < 1024
    assert found[1].original.cached == 0


async def test_the_cost_counts_cached_tokens_at_their_price(replay: Replay) -> None:
    turn = (await turns_of(replay, 12))[-1]
    original = turn.original
    assert original.cost_usd == (Decimal(original.tokens - original.cached) + Decimal(original.cached) / 10) / 1_000_000


async def test_refused_request_is_not_in_the_sums(replay: Replay) -> None:
    body = {"model": "priced", "messages": [said("user", 1, 4000)]}
    (turn,) = [await replay.turn(one) for one in read(body)]
    assert turn.sent is None
    assert turn.refusal is not None
    sums = RequestSums()
    sums.add(turn)
    assert (sums.turns, sums.refused, sums.original, sums.sent) == (1, 1, 0, 0)


async def test_text_request_is_counted_and_unchanged(replay: Replay) -> None:
    (turn,) = [await replay.turn(one) for one in read({"model": "priced", "prompt": "word " * 3000})]
    assert turn.sent == turn.original


async def test_sessions_do_not_share_trim_decisions(replay: Replay) -> None:
    body = {"model": "priced", "messages": conversation(12)}
    found = [await replay.turn(one) for name in "ab" for one in read({"session": name, "body": body})]
    assert [turn.original.cached for turn in found] == [0, 0]


async def test_a_body_that_is_no_request_is_a_fault(replay: Replay) -> None:
    with pytest.raises(GatewayError):
        await replay.turn(RecordedRequest(1, "s", b'{"messages": []}'))


def test_unknown_price_makes_the_sum_unknown() -> None:
    sums = RequestSums()
    sums.add(ReplayedTurn("s", SentRequest(10, 0, Decimal(1)), SentRequest(8, 0, None)))
    assert sums.as_json()["as_it_came"]["cost_usd"] == "1.000000"
    assert sums.as_json()["as_sent"]["cost_usd"] is None
