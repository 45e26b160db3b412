"""One call with fakes: every way to end settles once, and other failures do not fail the call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.call.types import Caller, Directives, SessionPolicy
from gateway.core.context_budget import ContextOptions
from gateway.core.errors import StoreUnavailable, UpstreamProtocolError, UpstreamUnreachable
from gateway.core.http.headers import ProviderAddress
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import NOTHING, AccountKey, Claim, Granted, Limits, Refused
from gateway.core.ledger.charging import BudgetPolicy, KeyLimits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.routing import ModelRule, Routes
from gateway.core.session import kept_text
from gateway.core.stored import OpenHold
from gateway.dialects import endpoint
from gateway.pipeline.exchange import Exchange
from tests.support.fakes import BODY, KEY, SSE, STREAM, FakeReply, UnavailableStore, World
from tests.support.records import record
from tests.support.scripted import DONE, chunk, completion, usage_chunk
from tests.support.timing import eventually


@pytest.fixture
def world() -> World:
    return World()


# --- ways to end --------------------------------------------------------------------------------------------------


def refuse(_: Outgoing) -> FakeReply:
    raise UpstreamUnreachable("no")


BROKEN = UpstreamProtocolError("broke off")
WAYS_OUT: dict[str, tuple[bytes, Callable[[Outgoing], FakeReply], str, bool]] = {
    "whole": (BODY, lambda _: FakeReply(), "ok", True),
    "stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE]), "ok", True),
    "stream without an end mark": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk()]), "ok", True),
    "stream without usage": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), DONE]), "ok", True),
    "empty stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[]), "upstream_broken", True),
    "stream that ends in the middle": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a")]), "upstream_broken", True),
    "file": (BODY, lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x"]), "ok", True),
    "refused body": (b"nonsense", lambda _: FakeReply(), "refused", False),
    "unreachable": (BODY, refuse, "upstream_failed", False),
    "provider error": (BODY, lambda _: FakeReply(429, pieces=[b"{}"]), "provider_error", False),
    "redirect": (BODY, lambda _: FakeReply(302, pieces=[b""]), "upstream_failed", False),
    "huge provider error": (BODY, lambda _: FakeReply(500, pieces=[b"x" * 2_000_000]), "upstream_failed", False),
    "error that breaks off": (BODY, lambda _: FakeReply(500, pieces=[b"x", BROKEN]), "upstream_failed", False),
    "whole breaks off": (BODY, lambda _: FakeReply(pieces=[b"{", BROKEN]), "upstream_broken", True),
    "stream breaks off": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), BROKEN]), "upstream_broken", True),
    "file breaks off": (BODY, lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x", BROKEN]), "upstream_broken", True),
    "error in the stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), b'data: {"error":{"message":"overloaded"}}\n\n', DONE]), "provider_error", True),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS_OUT)
async def test_every_end_of_a_call_settles_once_and_closes_the_connection(name: str, world: World) -> None:
    body, answer, outcome, charged = WAYS_OUT[name]
    world.upstream.answer = answer
    await world.call(world.incoming(body))
    assert world.record.outcome == outcome
    assert (world.record.charge is not None) is charged
    assert world.store.settled == 1
    assert world.upstream.open == 0
    assert (await world.store.totals(KEY)).calls == charged


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_the_store_is_read_once_before_a_call_is_sent(body: bytes, world: World) -> None:
    asked: list[str] = []

    def answer(_: Outgoing) -> FakeReply:
        asked.extend(world.store.asked)
        return FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE]) if body is STREAM else FakeReply()

    world.upstream.answer = answer
    await world.call()
    asked.clear()
    world.store.asked.clear()
    reply, _ = await world.call(world.incoming(body))
    assert asked == ["opening"]
    assert reply.totals is not None
    assert reply.totals.calls == (1 if body is STREAM else 2), "a stream reports the earlier usage at its start"


async def test_the_totals_sent_before_a_file_are_read_when_it_arrives(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x"])
    async with world.gateway.handle(world.incoming()) as reply:
        assert world.store.asked == ["opening", "totals"], "the totals read at the start are too old"
        assert reply.totals is not None


async def test_a_call_of_a_session_with_a_parent_is_charged_to_both(world: World) -> None:
    plain = world.incoming()
    named = replace(plain, directives=replace(plain.directives, parent="above"))
    await world.call(named)
    await world.call()
    above = AccountKey("session", "alice", "above")
    assert [record.accounts for record, _ in world.recorder.records] == [(above, KEY.account)] * 2
    balance = await world.store.balances([Claim(above), Claim(KEY.account)])
    assert [one.used.calls for one in balance] == [2, 2]


CANCELLED: dict[str, tuple[bytes, Callable[[Outgoing], FakeReply]]] = {
    "while a whole answer is read": (BODY, lambda _: FakeReply(pieces=[b"{", None])),
    "while an error is read": (BODY, lambda _: FakeReply(500, pieces=[b"{", None])),
    "in a stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), None])),
    "in a file": (BODY, lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x", None])),
    "before the first piece of a stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[None])),
}


@pytest.mark.parametrize("name", CANCELLED)
async def test_a_cancelled_call_settles_once(name: str, world: World) -> None:
    body, world.upstream.answer = CANCELLED[name]
    task = asyncio.create_task(world.call(world.incoming(body)))
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (world.record.outcome, world.record.status) == ("client_left", 499)
    assert world.store.settled == 1
    assert world.upstream.open == 0
    assert (world.record.charge is None) is ("error" in name)


async def cancelled_twice(world: World, body: bytes) -> None:
    """Cancel a call in the middle of its response, and again while the store settles it slowly."""
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), None])
    task = asyncio.create_task(world.call(world.incoming(body)))
    await eventually(lambda: world.upstream.sent)
    assert world.leases.count == 1
    world.store.is_slow = True
    task.cancel("client_stalled")
    await eventually(lambda: world.store.is_settling)
    world.store.is_slow = False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_call_cancelled_again_while_it_settles_leaves_nothing_open(body: bytes, world: World) -> None:
    await cancelled_twice(world, body)
    assert (world.leases.count, world.upstream.open) == (0, 0)
    [(record, totals)] = world.recorder.records
    assert (record.outcome, record.status, totals) == ("client_stalled", 499, None)
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).calls == 1


async def test_only_a_known_cancel_reason_becomes_an_outcome(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), None])
    task = asyncio.create_task(world.call(world.incoming(STREAM)))
    await eventually(lambda: world.upstream.sent)
    task.cancel("somebody else's words")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.record.outcome == "client_left"


async def test_a_cancel_after_the_last_byte_does_not_change_the_outcome(world: World) -> None:
    async def cancelled() -> None:
        async with world.gateway.handle(world.incoming()) as reply:
            assert reply.is_final
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    assert world.record.outcome == "ok"
    assert world.store.settled == 1


async def test_an_internal_error_is_settled_and_raised(world: World) -> None:
    def bug(_: Outgoing) -> FakeReply:
        raise ZeroDivisionError

    world.upstream.answer = bug
    with pytest.raises(ZeroDivisionError):
        await world.call()
    assert (world.record.outcome, world.record.status, world.record.charge) == ("internal_error", 500, None)


async def test_an_internal_error_while_forwarding_is_charged(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("one two three"), ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        await world.call(world.incoming(STREAM))
    assert world.record.outcome == "internal_error"
    assert world.record.charge is not None
    assert world.record.charge.usage.output_tokens > 0


# --- failures outside of the call ---------------------------------------------------------------------------------


async def test_a_failing_observer_affects_no_call_and_no_other_observer(world: World) -> None:
    reply, body = await world.call()
    assert reply.status == 200
    assert json.loads(body)["usage"]["total_tokens"] == 15
    assert world.record.outcome == "ok"


async def test_while_the_store_is_unavailable_running_calls_complete_and_are_settled_later(world: World) -> None:
    def answer(_: Outgoing) -> FakeReply:
        world.store.away = True
        return FakeReply()

    world.upstream.answer = answer
    async with world.gateway.handle(world.incoming()) as reply:
        assert reply.status == 200
        assert reply.totals is None
        assert not reply.is_final
    refused, body = await world.call()
    assert (refused.status, json.loads(body)["error"]["code"]) == (503, "store_unavailable")
    assert len(world.upstream.sent) == 1
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 15


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_unavailable_store_refuses_calls_before_they_are_sent(world: World, body: bytes) -> None:
    world.store.away = True
    for _ in range(2):
        reply, _ = await world.call(world.incoming(body))
        assert reply.status == 503
    assert world.upstream.sent == []
    world.store.away = False
    await world.settler.aclose()


async def test_calls_made_without_the_store_are_added_when_it_is_available_again(world: World) -> None:
    world.settler.availability.accepts_without_store = True
    world.store.away = True
    for _ in range(3):
        reply, _ = await world.call()
        assert reply.status == 200
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 3 * 15


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        (Directives(ContextOptions(budget=3_000)), "decision not stored: the store is unavailable"),
        (Directives(mode="summary"), None),
    ],
    ids=["cut", "mode"],
)
async def test_no_call_waits_for_a_store_known_to_be_unavailable(
    world: World, asked: Directives, note: str | None
) -> None:
    rows = "\n".join(f"row {number} says what {number * 7919}" for number in range(60))
    said: list[dict[str, object]] = [{"role": "user", "content": "look"}]
    for turn in range(30):
        calls = [{"id": f"c{turn}", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        said += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn} {rows}"},
            {"role": "user", "content": f"and number {turn}?"},
        ]
    world.settler.availability.accepts_without_store = True
    await world.call()
    world.store.away = True
    world.settler.availability.report(StoreUnavailable("away"))
    reply, _ = await world.call(world.incoming(json.dumps({"model": "m", "messages": said}).encode(), directives=asked))
    assert (reply.status, world.recorder.records[-1][0].notes.get("context")) == (200, note)
    assert set(world.store.missed) <= {"ping"}
    world.store.away = False
    await world.settler.aclose()


async def test_without_the_store_only_the_last_known_remaining_budget_is_used() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=79)))
    world.settler.availability.accepts_without_store = True
    assert (await world.call())[0].status == 200
    world.store.away = True
    replies = [(await world.call())[0] for _ in range(4)]
    assert [reply.allowance.remaining_tokens for reply in replies if reply.allowance] == [49, 34, 19, 19]
    assert [reply.status for reply in replies] == [200, 200, 200, 400], (
        "64 of 79 tokens were left, each call takes 15, and needs 34 to be let through"
    )
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 4 * 15


class ShrinkingStore(UnavailableStore):
    """A store that has less space when results are stored than it reported before."""

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        return await super().keep_results(session, texts, 1)


@pytest.mark.parametrize("limits", [Limits(tokens=100_000), Limits(calls=9), Limits()], ids=["tokens", "calls", "none"])
async def test_results_that_could_not_be_stored_are_not_sent_beyond_the_reservation(limits: Limits) -> None:
    world = World(budget=BudgetPolicy(session=limits), store=ShrinkingStore())
    rows = "\n".join(f"row {number} says what {number * 7919}" for number in range(900))
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": rows},
    ]
    body = json.dumps({"model": "m", "messages": said}).encode()
    reply, body_text = await world.call(world.incoming(body, directives=Directives(mode="handle_only")))
    (balance,) = await world.store.balances([Claim(KEY.account)])
    assert balance.held == NOTHING
    if limits.tokens is None:
        assert (reply.status, len(world.upstream.sent)) == (200, 1), "the size does not count for this budget"
    else:
        assert (reply.status, world.upstream.sent, balance.used) == (503, [], NOTHING)
        assert b"Try again shortly" in body_text


async def store_response(world: World, tokens: int) -> None:
    """Record a response of the session with this number of stored tokens."""
    await world.store.settle(replace(record("s", 0.0), session=KEY, kept=kept_text("p", ["resp_1"], tokens)))


async def test_stored_tokens_make_no_room_for_results_that_could_not_be_stored() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=200_000)), store=ShrinkingStore())
    await store_response(world, 80_000)
    rows = "\n".join(f"row {number} says what {number * 7919}" for number in range(900))
    said = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": rows},
    ]
    body = json.dumps({"model": "m", "previous_response_id": "resp_1", "input": said}).encode()
    asked = Directives(mode="handle_only")
    reply, body_text = await world.call(world.incoming(body, "responses", directives=asked))
    assert (reply.status, world.upstream.sent) == (503, [])
    assert b"Try again shortly" in body_text


def form(size: int) -> bytes:
    return b"--b" + b"x" * (size - 3)


def fim(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "four" * 8, **fields}).encode()


@pytest.mark.parametrize(
    ("path", "body", "needed"),
    [
        ("audio/transcriptions", form(4_001), 1_001),
        ("images/edits", form(10_000_000), 16_384),
        # Unreadable bodies are forwarded unchanged.
        ("fim/completions", b'{"model":"m","model":"m"}'.ljust(400_000), 100_000),
        ("fim/completions", b'\xef\xbb\xbf {"model":"m"}'.ljust(400_000), 100_000),
        ("fim/completions", fim(max_tokens=8_000), 10 + 8_000),
        ("fim/completions", fim(max_tokens=16, max_output_tokens="500", max_completion_tokens=50), 10 + 500),
        ("fim/completions", fim(max_tokens=500, n=3), 10 + 3 * 500),
        ("fim/completions", fim(max_tokens=None), 10),
        ("images/generations", fim(n=4), 10),
        ("files", form(4_000), 1),
        ("uploads/upload_1/parts", form(4_000), 1),
        ("containers/c_1/files", form(4_000), 1),
    ],
)
async def test_calls_without_token_counts_reserve_by_size_and_limits(path: str, body: bytes, needed: int) -> None:
    for limit, status in ((needed, 200), (needed - 1, 400)):
        world = World(budget=BudgetPolicy(session=Limits(tokens=limit)))
        assert (await world.call(world.incoming(body, path)))[0].status == status
        assert [sent.body for sent in world.upstream.sent] == [body] * (status == 200)


async def test_a_call_cancelled_while_it_reserves_leaves_no_hold() -> None:
    key = KeyLimits(Limits(calls=5))
    world = World(SessionPolicy(on_missing="none"))
    world.store.responds_late = True
    plain = world.incoming(headers=[(b"content-type", b"application/json")])
    incoming = replace(plain, caller=Caller("alice", budget=key), path_session=None)
    claim = Claim(AccountKey("key", "alice"), key.limits)
    task = asyncio.create_task(world.call(incoming))
    while not (await world.store.balances([claim]))[0].held.calls:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (balance,) = await world.store.balances([claim])
    assert (balance.held.calls, balance.used.calls) == (0, 0)
    assert world.upstream.sent == []


async def test_a_refusal_names_the_remedy_for_the_refusing_budget(world: World) -> None:
    declared = Directives(budget=Limits(tokens=5))
    for caller in (Caller("alice"), Caller("alice", budget=KeyLimits(Limits(tokens=10**6)))):
        _, body = await world.call(world.incoming(caller=caller, directives=declared))
        assert "declares this budget in x-session-budget-tokens" in json.loads(body)["error"]["message"]
    caller = Caller("alice", budget=KeyLimits(Limits(tokens=5)))
    _, body = await world.call(world.incoming(caller=caller, directives=declared))
    assert "Raise it with: gateway keys set alice --budget-tokens" in json.loads(body)["error"]["message"]


async def test_a_hold_taken_although_the_store_seemed_unavailable_is_released() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)))
    world.store.loses_response = True
    reply, _ = await world.call()
    assert reply.status == 503
    assert world.upstream.sent == []
    await world.settler.aclose()
    (balance,) = await world.store.balances([Claim(KEY.account)])
    assert not any(balance.held), "otherwise an unsent call is charged when its lease ends"
    assert not any(balance.used)


@pytest.mark.parametrize("named", ["above", None])
async def test_without_the_store_a_call_is_charged_to_the_last_known_parents(named: str | None) -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)))
    world.settler.availability.accepts_without_store = True
    keys = (KEY, SessionKey("alice", "above"), SessionKey("alice", "top"))
    await world.store.update(keys[1], lambda state: state.with_parent("top"))
    await world.call(world.incoming(directives=Directives(parent="above")))
    world.store.away = True
    assert (await world.call(world.incoming(directives=Directives(parent=named))))[0].status == 200
    world.store.away = False
    await world.settler.aclose()
    balances = await world.store.balances([Claim(key.account) for key in keys])
    assert [balance.used.tokens for balance in balances] == [30, 30, 30]


@pytest.mark.parametrize("goes_at", ["the start", "the hold"])
async def test_a_call_that_names_its_parent_is_charged_to_the_parents_known_at_an_outage(
    goes_at: str,
) -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)))
    world.settler.availability.accepts_without_store = True
    above, top = SessionKey("alice", "above"), SessionKey("alice", "top")
    await world.store.update(above, lambda state: state.with_parent("top"))
    world.store.away, world.store.loses_response = goes_at == "the start", goes_at == "the hold"
    reply, _ = await world.call(world.incoming(directives=Directives(parent="above")))
    assert (reply.status, "store" in world.record.notes) == (200, True)
    world.store.away = world.store.loses_response = False
    await world.settler.aclose()
    balances = await world.store.balances([Claim(key.account) for key in (KEY, above, top)])
    known = {"the start": 2, "the hold": 3}[goes_at]
    assert [(balance.used.tokens, any(balance.held)) for balance in balances] == [(15, False)] * known + [
        (0, False)
    ] * (3 - known)


async def test_holds_of_running_calls_count_as_used_without_the_store() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=79)))
    world.settler.availability.accepts_without_store = True
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as running:
        assert running.status == 200
        world.store.away = True
        assert [(await world.call())[0].status for _ in range(2)] == [400, 400], (
            "the stream has reserved the remaining budget"
        )
        world.store.away = False


class CountingStore(UnavailableStore):
    """Count the requested reservations."""

    reserved = 0

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        self.reserved += 1
        return await super().reserve(opened, lease_s)


async def test_a_stream_reserved_during_an_outage_does_not_wait_for_the_store_afterwards() -> None:
    store = CountingStore()
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)), store=store)
    world.settler.availability.accepts_without_store = True
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE])
    store.away = True
    async with world.gateway.handle(world.incoming(STREAM)) as running:
        store.away = False
        await eventually(lambda: not world.settler.availability.is_unavailable)
        assert not isinstance(running.body, bytes)
        assert [part async for part in running.body]
    await world.settler.aclose()
    assert store.reserved == 0, "the hold is taken when leases are renewed"
    (balance,) = await store.balances([Claim(KEY.account)])
    assert (balance.used.tokens, balance.held.tokens) == (15, 0)


# --- sending to the provider --------------------------------------------------------------------------------------


async def test_a_route_changes_the_model_and_the_credential(world: World) -> None:
    await world.call(world.incoming(BODY.replace(b'"m"', b'"q-1"')))
    [sent] = world.upstream.sent
    assert sent.url == "http://q/v1/chat/completions"
    assert json.loads(sent.body)["model"] == "q-real"
    assert (b"authorization", b"Bearer held") in sent.headers
    charge = world.record.charge
    assert charge is not None
    assert charge.cost_usd == Decimal("0.000060")
    assert world.record.model == "q-real"


async def test_a_credential_of_another_provider_is_not_forwarded(world: World) -> None:
    world.providers["p"] = ProviderAddress("p", "http://p/v1", key_prefixes=("pk-",))
    world.providers["other"] = ProviderAddress("other", "http://o/v1", key_prefixes=("sk-",))
    incoming = world.incoming(headers=[(b"authorization", b"Bearer sk-secret-of-other")])
    reply, body = await world.call(incoming)
    assert reply.status == 401
    assert b"sk-secret" not in body
    assert world.upstream.sent == []


async def test_a_call_refused_before_its_body_is_read_reports_the_totals(world: World) -> None:
    await world.call()
    reply, body = await world.call(world.incoming(b"", refused=UpstreamProtocolError("whatever")))
    assert json.loads(body)["error"]["message"] == "whatever"
    assert reply.totals is not None
    assert reply.totals.total_tokens == 15
    assert len(world.upstream.sent) == 1


async def test_a_learned_window_applies_to_all_clients_for_an_hour(world: World) -> None:
    refusal = {"code": "context_length_exceeded", "message": "This model's maximum context length is 600 tokens."}
    answers = iter([FakeReply(400, pieces=[json.dumps({"error": refusal}).encode()])])
    world.upstream.answer = lambda _: next(answers, FakeReply())
    said = [
        {"role": role, "content": f"{turn} " + "word " * 40} for turn in range(30) for role in ("user", "assistant")
    ]
    body = json.dumps({"model": "m", "messages": [*said, {"role": "user", "content": "go on"}]}).encode()

    async def sent_for(client: str) -> bytes:
        await world.call(world.incoming(body, caller=Caller(client)))
        return world.upstream.sent[-1].body

    assert len(await sent_for("mallory")) < len(body)
    assert len(await sent_for("alice")) < len(body)
    world.ahead_s = 3_600
    assert await sent_for("bob") == body
    assert len(world.upstream.sent) == 4


async def test_a_length_error_without_a_number_trims_below_what_was_sent(world: World) -> None:
    await store_response(world, 80_000)
    refusal = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
    answers = iter([FakeReply(400, pieces=[json.dumps({"error": refusal}).encode()])])
    world.upstream.answer = lambda _: next(answers, FakeReply())
    said = [
        {"role": role, "content": f"{turn} " + "word " * 40} for turn in range(30) for role in ("user", "assistant")
    ]
    said.append({"role": "user", "content": "go on"})
    body = json.dumps({"model": "m", "previous_response_id": "resp_1", "input": said}).encode()
    reply, _ = await world.call(world.incoming(body, "responses"))
    first, second = (one.body for one in world.upstream.sent)
    assert (reply.status, first) == (200, body)
    assert len(second) < len(first)


@pytest.mark.parametrize(("counted", "sent"), [(900, 2), (3_000, 1)])
async def test_a_request_trimmed_again_stays_within_its_reservation(counted: int, sent: int) -> None:
    """The provider's own count of a refused call is known. A request above the reservation is not sent."""
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_200)))
    said = f"This model's maximum context length is 850 tokens. However, your messages resulted in {counted} tokens."
    error = {"code": "context_length_exceeded", "message": said}
    answers = iter([FakeReply(400, pieces=[json.dumps({"error": error}).encode()])])
    world.upstream.answer = lambda _: next(answers, FakeReply())
    turns = [
        {"role": role, "content": f"{turn} " + "word " * 40} for turn in range(8) for role in ("user", "assistant")
    ]
    body = json.dumps({"model": "m", "messages": [*turns, {"role": "user", "content": "go on"}]}).encode()
    reply, _ = await world.call(world.incoming(body))
    assert len(world.upstream.sent) == sent
    assert reply.status == (200 if sent > 1 else 400)
    plan = world.record.context
    assert plan is not None
    assert plan.tokens <= 1_200


@pytest.mark.parametrize(("limits", "is_cut"), [(Limits(calls=9), False), (Limits(tokens=50_000), True)])
async def test_a_request_to_a_fallback_stays_within_a_token_reservation(limits: Limits, *, is_cut: bool) -> None:
    """The tokenizer of the other model counts more tokens for the same text, and nothing is reserved again."""
    routes = Routes([ModelRule("gpt-4o", "p", fallback=("q/claude-opus-4-5",))], ["p", "q"], "p")
    world = World(budget=BudgetPolicy(session=limits), routes=routes)
    world.upstream.answer = lambda request: FakeReply(503 if request.url.startswith("http://p/") else 200)
    turns = [
        {"role": role, "content": f"{turn} " + "word " * 40} for turn in range(30) for role in ("user", "assistant")
    ]
    messages = [*turns, {"role": "user", "content": "go on"}]
    body = json.dumps({"model": "gpt-4o", "messages": messages, "max_tokens": 100}).encode()
    reply, _ = await world.call(world.incoming(body))
    first, second = (json.loads(one.body)["messages"] for one in world.upstream.sent)
    assert (reply.status, first) == (200, messages)
    assert (len(second) < len(first)) is is_cut


@pytest.mark.parametrize("trim", ["auto", "off", "shadow"])
@pytest.mark.parametrize("reported", [[9_000], [10, 10, 10, 9_000]], ids=["the first", "among others"])
async def test_usage_reported_for_other_sessions_refuses_no_session(reported: list[int], trim: Any) -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=1_000)))

    async def ask(session: str, tokens: int) -> int:
        usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
        world.upstream.answer = lambda _: FakeReply(pieces=[completion(usage=usage)])
        incoming = world.incoming(headers=[(b"x-session-id", session.encode())])
        options = replace(incoming.directives.context, trim=trim)
        incoming = replace(incoming, directives=replace(incoming.directives, context=options))
        return (await world.call(incoming))[0].status

    first = [await ask(f"first-{number}", tokens) for number, tokens in enumerate(reported)]
    assert first == [200] * len(reported)
    assert [await ask(f"later-{number}", 10) for number in range(5)] == [200] * 5
    assert await ask(f"first-{len(reported) - 1}", 10) == 400, "a session's own report applies to itself"


@pytest.mark.parametrize("policy", ["derive", "require", "none"])
async def test_unmetered_calls_have_no_session(policy: Any) -> None:
    world = World(SessionPolicy(on_missing=policy))
    incoming = world.incoming(b"", "models", method="GET", endpoint=endpoint("GET", "models"), headers=[])
    reply, _ = await world.call(incoming)
    assert reply.status == 200
    assert reply.request.session is None
    assert world.record.session is None
    assert world.record.charge is None


def test_handle_returns_an_exchange_that_has_not_started(world: World) -> None:
    assert isinstance(world.gateway.handle(world.incoming()), Exchange)
    assert world.recorder.records == []
