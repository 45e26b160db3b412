"""The line of one call with our own fakes: every way out settles once, and nothing that fails beside it fails a call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import count
from typing import Any

import pytest

from gateway.budgeting import Budgets
from gateway.config import families
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.errors import StoreUnavailable, UpstreamProtocolError, UpstreamUnreachable
from gateway.core.fitting.epochs import FitPolicy
from gateway.core.fitting.strategies import strategies_of
from gateway.core.forwarding import Provider
from gateway.core.ledger import Claim, Granted, Limits, Refused, Standing
from gateway.core.plan import ContextPolicy, SummaryModel
from gateway.core.ports import CallRecord, Headers, OpenHold, Outgoing, SessionKey
from gateway.core.pricing import price_per_million
from gateway.core.routing import ModelFacts, ModelRule, Route, Routes
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.spending import BudgetPolicy
from gateway.core.usage import Totals
from gateway.dialects import endpoint
from gateway.pipeline import MAX_WHOLE_ANSWER, Caller, Exchange, Gateway, Incoming, Reply, SessionPolicy
from gateway.planning import Planner
from gateway.results import Results
from gateway.stores.blind import Blind
from gateway.stores.learner import Learner
from gateway.stores.leases import Leases
from gateway.stores.memory import MemoryStore
from gateway.stores.settler import Settler
from tests.support.scripted import DONE, chunk, completion, usage_chunk

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello there"}]}'
STREAM = BODY[:-1] + b',"stream":true}'
KEY = SessionKey("alice", "s")
JSON: Headers = [(b"Content-Type", b"application/json; charset=utf-8")]
SSE: Headers = [(b"content-type", b"text/event-stream")]


@dataclass
class FakeReply:
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = field(default_factory=lambda: JSON)
    pieces: Sequence[bytes | Exception | None] = (completion(),)
    """None: nothing more comes."""

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if piece is None:
                await asyncio.sleep(60)
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield piece


@dataclass
class FakeUpstream:
    answer: Callable[[Outgoing], FakeReply] = lambda _: FakeReply()
    sent: list[Outgoing] = field(default_factory=list)
    open: int = 0

    @asynccontextmanager
    async def send(self, request: Outgoing) -> AsyncIterator[FakeReply]:
        self.sent.append(request)
        answer = self.answer(request)
        self.open += 1
        try:
            yield answer
        finally:
            self.open -= 1

    async def aclose(self) -> None:
        pass


class Recorder:
    def __init__(self) -> None:
        self.records: list[tuple[CallRecord, Totals | None]] = []

    def record(self, call: CallRecord, totals: Totals | None) -> None:
        self.records.append((call, totals))


class Failing:
    def record(self, call: CallRecord, totals: Totals | None) -> None:
        raise RuntimeError("an observer's bug")


class AwayStore(MemoryStore):
    """A memory store that can be away."""

    away = False
    settled = 0

    async def settle(self, record: CallRecord) -> Totals:
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("away")
        self.settled += 1
        return await super().settle(record)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        self._look()
        return await super().update(session, change)

    async def totals(self, session: SessionKey) -> Totals:
        self._look()
        return await super().totals(session)

    async def remembered(self, session: SessionKey) -> Remembered:
        self._look()
        return await super().remembered(session)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        self._look()
        return await super().reserve(opened, lease_s)

    async def standings(self, claims: Sequence[Claim]) -> tuple[Standing, ...]:
        self._look()
        return await super().standings(claims)

    async def ping(self) -> None:
        self._look()

    def _look(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


class World:
    """A gateway of fakes."""

    def __init__(self, policy: SessionPolicy | None = None, budget: BudgetPolicy | None = None) -> None:
        self.upstream, self.store, self.recorder = FakeUpstream(), AwayStore(), Recorder()
        self.settler = Settler(self.store)
        self.providers = {"p": Provider("p", "http://p/v1", "none"), "q": Provider("q", "http://q/v1", key="held")}
        ids = count(1)
        learner = Learner(self.store)
        self.planner = Planner(
            Estimator(families(), lambda _: CharacterCounter(), CountCache()),
            lambda _: True,
            learner,
            ContextPolicy(),
            deadline_s=5,
            clock=time.monotonic,
        )
        price = price_per_million(input=Decimal(1), output=Decimal(10))
        self.gateway = Gateway(
            routes=Routes([ModelRule("q-*", "q", "q-real")], list(self.providers), "p"),
            providers=self.providers,
            upstreams=dict.fromkeys(self.providers, self.upstream),
            facts=lambda route: ModelFacts(price=price) if route.provider == "q" else ModelFacts(),
            store=self.store,
            settler=self.settler,
            planner=self.planner,
            budgets=Budgets(
                self.store,
                Leases(self.store, self.settler.settle, lease_s=60),
                Blind(),
                budget or BudgetPolicy(),
                time.time,
            ),
            results=Results(self.store),
            learner=learner,
            observers=[Failing(), self.recorder],
            policy=policy or SessionPolicy(),
            totals_comment=lambda totals, _, __: b": %d\n\n" % totals.total_tokens,
            new_id=lambda: f"id-{next(ids)}",
        )
        self._requests = count(1)

    def incoming(self, body: bytes = BODY, path: str = "chat/completions", **changes: Any) -> Incoming:
        number = next(self._requests)
        plain = Incoming(
            call_id=f"call-{number}",
            request_id=f"request-{number}",
            method="POST",
            path=path,
            query="",
            headers=[(b"x-session-id", b"s"), (b"content-type", b"application/json")],
            body=body,
            unpacked=False,
            endpoint=endpoint("POST", path),
            caller=Caller("alice"),
            path_session=None,
            started=self.gateway.clock(),
        )
        return replace(plain, **changes)

    async def call(self, incoming: Incoming | None = None) -> tuple[Reply, bytes]:
        """A reply and its whole body, as a client that stays gets it."""
        async with self.gateway.handle(incoming or self.incoming()) as reply:
            return reply, await whole(reply)

    @property
    def record(self) -> CallRecord:
        """The only record there is."""
        [(record, _)] = self.recorder.records
        return record


async def whole(reply: Reply) -> bytes:
    if isinstance(reply.body, bytes):
        return reply.body
    return b"".join([piece async for piece in reply.body])


@pytest.fixture
def world() -> World:
    return World()


# --- the ways out -------------------------------------------------------------------------------------------------


def refuse(_: Outgoing) -> FakeReply:
    raise UpstreamUnreachable("no")


BROKEN = UpstreamProtocolError("broke off")
WAYS_OUT: dict[str, tuple[bytes, Callable[[Outgoing], FakeReply], str, bool]] = {
    "whole": (BODY, lambda _: FakeReply(), "ok", True),
    "stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE]), "ok", True),
    "stream without an end mark": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk()]), "ok", True),
    "stream without usage": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), DONE]), "ok", True),
    "empty stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[]), "ok", True),
    "file": (BODY, lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x"]), "ok", True),
    "refused body": (b"nonsense", lambda _: FakeReply(), "refused", False),
    "unreachable": (BODY, refuse, "upstream_failed", False),
    "provider error": (BODY, lambda _: FakeReply(429, pieces=[b"{}"]), "provider_error", False),
    "redirect": (BODY, lambda _: FakeReply(302, pieces=[b""]), "provider_error", False),
    "huge provider error": (BODY, lambda _: FakeReply(500, pieces=[b"x" * 2_000_000]), "upstream_failed", False),
    "error that breaks off": (BODY, lambda _: FakeReply(500, pieces=[b"x", BROKEN]), "upstream_failed", False),
    "whole breaks off": (BODY, lambda _: FakeReply(pieces=[b"{", BROKEN]), "upstream_broken", True),
    "stream breaks off": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), BROKEN]), "upstream_broken", True),
    "file breaks off": (BODY, lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x", BROKEN]), "upstream_broken", True),
    "error in the stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), b'data: {"error":{}}\n\n', DONE]), "provider_error", True),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS_OUT)
async def test_every_way_out_settles_once_and_closes_the_connection(name: str, world: World) -> None:
    body, answer, outcome, charged = WAYS_OUT[name]
    world.upstream.answer = answer
    await world.call(world.incoming(body))
    assert world.record.outcome == outcome
    assert (world.record.charge is not None) is charged
    assert world.store.settled == 1
    assert world.upstream.open == 0
    assert (await world.store.totals(KEY)).calls == charged


CANCELLED: dict[str, tuple[bytes, Callable[[Outgoing], FakeReply]]] = {
    "while a whole answer is read": (BODY, lambda _: FakeReply(pieces=[b"{", None])),
    "while an error is read": (BODY, lambda _: FakeReply(500, pieces=[b"{", None])),
    "in a stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), None])),
    "in a file": (BODY, lambda _: FakeReply(headers=[(b"content-type", b"audio/wav")], pieces=[b"x", None])),
    "before the first piece of a stream": (STREAM, lambda _: FakeReply(headers=SSE, pieces=[None])),
}


@pytest.mark.parametrize("name", CANCELLED)
async def test_a_cancelled_call_settles_once_too(name: str, world: World) -> None:
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


async def test_cancelled_after_the_last_byte_it_stays_what_it_was(world: World) -> None:
    async def cancelled() -> None:
        async with world.gateway.handle(world.incoming()) as reply:
            assert reply.final
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    assert world.record.outcome == "ok"
    assert world.store.settled == 1


async def test_a_bug_is_settled_as_one_and_raised(world: World) -> None:
    def bug(_: Outgoing) -> FakeReply:
        raise ZeroDivisionError

    world.upstream.answer = bug
    with pytest.raises(ZeroDivisionError):
        await world.call()
    assert (world.record.outcome, world.record.status, world.record.charge) == ("internal_error", 500, None)


async def test_a_bug_while_passing_on_is_charged(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("one two three"), ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        await world.call(world.incoming(STREAM))
    assert world.record.outcome == "internal_error"
    assert world.record.charge is not None
    assert world.record.charge.usage.output_tokens > 0


# --- what fails beside a call -------------------------------------------------------------------------------------


async def test_an_observer_that_fails_fails_no_call_and_no_other_observer(world: World) -> None:
    reply, body = await world.call()
    assert reply.status == 200
    assert json.loads(body)["usage"]["total_tokens"] == 15
    assert world.record.outcome == "ok"


async def test_while_the_store_is_away_answers_go_on_and_their_usage_is_kept(world: World) -> None:
    def answer(_: Outgoing) -> FakeReply:
        world.store.away = True
        return FakeReply()

    world.upstream.answer = answer
    async with world.gateway.handle(world.incoming()) as reply:
        assert reply.status == 200
        assert reply.totals is None
        assert not reply.final
    refused, body = await world.call()
    assert (refused.status, json.loads(body)["error"]["code"]) == (503, "store_unavailable")
    assert len(world.upstream.sent) == 1
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 15


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_store_that_is_away_refuses_calls_before_they_cost(world: World, body: bytes) -> None:
    world.store.away = True
    for _ in range(2):
        reply, _ = await world.call(world.incoming(body))
        assert reply.status == 503
    assert world.upstream.sent == []
    world.store.away = False
    await world.settler.aclose()


async def test_where_calls_go_on_without_the_store_they_are_added_when_it_is_back(world: World) -> None:
    world.settler.is_open = True
    world.store.away = True
    for _ in range(3):
        reply, _ = await world.call()
        assert reply.status == 200
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 3 * 15


async def test_without_the_store_no_more_is_spent_than_was_left_when_it_was_last_seen() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=79)))
    world.settler.is_open = True
    assert (await world.call())[0].status == 200
    world.store.away = True
    statuses = [(await world.call())[0].status for _ in range(4)]
    assert statuses == [200, 200, 200, 400], (
        "64 of 79 tokens were left, each call takes 15, and needs 34 to be let through"
    )
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 4 * 15


# --- the way down -------------------------------------------------------------------------------------------------


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


async def test_a_credential_of_another_provider_is_not_handed_out(world: World) -> None:
    world.providers["p"] = Provider("p", "http://p/v1", key_prefixes=("pk-",))
    world.providers["other"] = Provider("other", "http://o/v1", key_prefixes=("sk-",))
    incoming = world.incoming(headers=[(b"authorization", b"Bearer sk-secret-of-other")])
    reply, body = await world.call(incoming)
    assert reply.status == 401
    assert b"sk-secret" not in body
    assert world.upstream.sent == []


async def test_the_model_of_a_form_is_found(world: World) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nq-1\r\n--b\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n\xff\x00\r\n--b--\r\n'
    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    await world.call(world.incoming(form, "audio/transcriptions", headers=headers))
    assert world.upstream.sent[0].url.startswith("http://q/")
    assert world.record.model == "q-real"


@pytest.mark.parametrize(
    "form", [b"", b"--b\r\n", b'name="model"', b'name="model"\r\n\r\n', b'name="model"\r\n\r\n\r\n']
)
async def test_a_form_without_a_model_goes_to_the_default(form: bytes, world: World) -> None:
    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    await world.call(world.incoming(form, "audio/transcriptions", headers=headers))
    assert world.upstream.sent[0].url.startswith("http://p/")
    assert world.upstream.sent[0].body == form


async def test_a_key_limited_to_models_may_not_use_paths_that_name_none(world: World) -> None:
    incoming = world.incoming(
        b"", "files", caller=Caller("alice", ("m*",)), method="GET", endpoint=endpoint("GET", "files")
    )
    reply, _ = await world.call(incoming)
    assert reply.status == 404
    assert world.upstream.sent == []


async def test_a_call_refused_before_its_body_was_read_is_answered_with_its_totals(world: World) -> None:
    await world.call()
    reply, body = await world.call(world.incoming(b"", refused=UpstreamProtocolError("whatever")))
    assert json.loads(body)["error"]["message"] == "whatever"
    assert reply.totals is not None
    assert reply.totals.total_tokens == 15
    assert len(world.upstream.sent) == 1


# --- the answer ---------------------------------------------------------------------------------------------------


async def test_a_whole_answer_that_is_too_large_to_be_read_is_passed_on_and_estimated(world: World) -> None:
    piece = b"x" * (1 << 20)
    world.upstream.answer = lambda _: FakeReply(pieces=[piece] * (MAX_WHOLE_ANSWER // len(piece) + 2))
    size = 0
    async with world.gateway.handle(world.incoming()) as reply:
        assert not isinstance(reply.body, bytes)
        async for part in reply.body:
            size += len(part)
    assert size == MAX_WHOLE_ANSWER + 2 * len(piece)
    charge = world.record.charge
    assert charge is not None
    assert charge.source == "estimated"
    assert charge.usage.input_tokens > 0


async def test_the_end_mark_is_out_only_after_the_settlement(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk() + DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        async for piece in reply.body:
            if b"[DONE]" in piece:
                assert world.store.settled == 1
                assert piece.startswith(b": 15\n\n")
                break
            assert world.store.settled == 0


async def test_a_refusal_of_stream_options_is_tried_again_once(world: World) -> None:
    refusal = FakeReply(400, pieces=[b'{"error":{"message":"unknown field stream_options"}}'])

    def answer(request: Outgoing) -> FakeReply:
        if b"stream_options" in request.body:
            return refusal
        return FakeReply(headers=SSE, pieces=[chunk("a"), DONE])

    world.upstream.answer = answer
    for sent in (2, 3):
        reply, _ = await world.call(world.incoming(STREAM))
        assert reply.status == 200
        assert len(world.upstream.sent) == sent
    assert world.upstream.open == 0
    assert [record.notes.get("stream_usage") for record, _ in world.recorder.records] == [
        "refused by the provider",
        None,
    ]
    assert (await world.store.totals(KEY)).calls == 2


async def test_a_provider_that_refuses_either_way_is_passed_on(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(400, pieces=[b'{"error":{"message":"no stream_options"}}'])
    reply, body = await world.call(world.incoming(STREAM))
    assert (reply.status, reply.upstream_error) == (400, True)
    assert b"no stream_options" in body
    assert len(world.upstream.sent) == 2


async def test_the_memory_of_refusals_is_bounded(world: World) -> None:
    for number in range(3000):
        world.gateway.remember_refusal(Route("p", f"model-{number}"))
    remembered = [world.gateway.refuses_usage(Route("p", f"model-{number}")) for number in range(3000)]
    assert sum(remembered) == 1024
    assert remembered[-1]
    assert not remembered[0]


async def test_names_of_the_provider_are_clean_in_the_record(world: World) -> None:
    body = completion(model="a\nb" + "c" * 1000)
    world.upstream.answer = lambda _: FakeReply(pieces=[body])
    await world.call()
    model = world.record.response_model
    assert model is not None
    assert model.startswith("a?b")
    assert len(model) == 256


@pytest.mark.parametrize("policy", ["derive", "require", "none"])
async def test_what_is_not_metered_has_no_session(policy: Any) -> None:
    world = World(SessionPolicy(on_missing=policy))
    incoming = world.incoming(b"", "models", method="GET", endpoint=endpoint("GET", "models"), headers=[])
    reply, _ = await world.call(incoming)
    assert reply.status == 200
    assert reply.session is None
    assert world.record.session is None
    assert world.record.charge is None


async def test_times_and_sizes_stand_in_the_record(world: World) -> None:
    await world.call()
    record = world.record
    assert record.call_id == "call-1"
    assert record.request_id == "request-1"
    assert record.first_byte_s is not None
    assert 0 <= record.overhead_s <= record.first_byte_s <= record.duration_s < 5
    assert (record.request_bytes, record.response_bytes) == (len(BODY), len(completion()))
    assert record.session == KEY


def test_handle_gives_an_exchange_that_has_done_nothing_yet(world: World) -> None:
    assert isinstance(world.gateway.handle(world.incoming()), Exchange)
    assert world.recorder.records == []


# --- summaries ----------------------------------------------------------------------------------------------------


def long_body(turns: int = 30) -> bytes:
    said = [
        {"role": role, "content": f"{role} {turn} " * 40} for turn in range(turns) for role in ("user", "assistant")
    ]
    return json.dumps({"model": "m", "messages": [*said, {"role": "user", "content": "And now?"}]}).encode()


class SummingWorld(World):
    """A world whose conversations may take 1,500 tokens, and whose model "q-1" sums them up."""

    def __init__(self) -> None:
        super().__init__()
        route = self.gateway.routes.resolve("q-1")
        strategies = strategies_of(["summarize", "condense", "drop"], shorten_tokens=100, summary_tokens=100)
        policy = ContextPolicy(
            budget=1500, fit=FitPolicy(strategies=strategies), summary=SummaryModel("q-1", route, ModelFacts(), 100)
        )
        self.gateway.planner = Planner(
            Estimator(families(), lambda _: CharacterCounter(), CountCache()),
            lambda _: True,
            Learner(self.store),
            policy,
            deadline_s=5,
            clock=time.monotonic,
        )

    @property
    def summary_and_call(self) -> tuple[CallRecord, CallRecord]:
        """The records of a call with a summary, in the order in which they were settled."""
        [(summary, _), (call, _)] = self.recorder.records
        assert (summary.operation, call.operation) == ("summary", "chat")
        return summary, call


@pytest.fixture
def summing() -> SummingWorld:
    return SummingWorld()


def is_for_a_summary(request: Outgoing) -> bool:
    return request.url.startswith("http://q/")


def hanging(pieces: Sequence[bytes | Exception | None]) -> Callable[[Outgoing], FakeReply]:
    return lambda request: FakeReply(pieces=pieces) if is_for_a_summary(request) else FakeReply()


async def test_a_summary_is_settled_before_its_call_is_sent(summing: SummingWorld) -> None:
    settled = []

    def answer(request: Outgoing) -> FakeReply:
        settled.append(summing.store.settled)
        return FakeReply()

    summing.upstream.answer = answer
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    assert settled == [0, 1]
    summary, call = summing.summary_and_call
    assert summary.charge is not None
    assert summary.charge.cost_usd == Decimal("0.000060")
    assert summary.context is None
    assert summary.notes == {"for": call.call_id}
    assert call.context is not None
    assert call.context.trimmed["summarize"] > 0
    assert b"hello" in summing.upstream.sent[1].body


@pytest.mark.parametrize("pieces", [[None], [b"{", None]])
async def test_a_summary_that_takes_too_long_is_charged_and_done_without(
    summing: SummingWorld, pieces: list[bytes | None]
) -> None:
    summing.gateway.summary_s = 0.02
    summing.upstream.answer = hanging(pieces)
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    summary, call = summing.summary_and_call
    assert (summary.outcome, summary.status, call.outcome) == ("too_slow", 499, "ok")
    assert summary.charge is not None
    assert summary.charge.usage.input_tokens > 100
    assert call.notes["summary"] == "none: it took longer than 0.02 s"
    assert call.context is not None
    assert "summarize" not in call.context.trimmed
    assert summing.upstream.open == 0
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("reason", [None, "cut_at_shutdown"])
async def test_a_call_that_is_cut_during_its_summary_settles_both_once(
    summing: SummingWorld, reason: str | None
) -> None:
    summing.upstream.answer = hanging([None])
    task = asyncio.create_task(summing.call(summing.incoming(long_body())))
    while not summing.upstream.sent:
        await asyncio.sleep(0.001)
    task.cancel(reason) if reason else task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    summary, call = summing.summary_and_call
    assert summary.outcome == call.outcome == (reason or "client_left")
    assert summary.charge is not None
    assert call.charge is None
    assert summing.store.settled == 2
    assert summing.upstream.open == 0
    assert (await summing.store.totals(KEY)).calls == 1


async def test_a_call_that_is_cut_when_its_summary_is_too_slow_is_cut_all_the_same(summing: SummingWorld) -> None:
    summing.gateway.summary_s = 0.02
    summing.upstream.answer = hanging([None])
    task = asyncio.create_task(summing.call(summing.incoming(long_body())))
    while not summing.upstream.sent:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Where that cut off the settlement too, it is offered again.
    await summing.settler.aclose()
    assert (await summing.store.totals(KEY)).calls == 1


async def test_while_the_store_is_away_a_call_is_sent_without_the_summary_that_cannot_be_kept(
    summing: SummingWorld,
) -> None:
    def answer(_: Outgoing) -> FakeReply:
        summing.store.away = True
        return FakeReply()

    summing.upstream.answer = answer
    summing.settler.is_open = True
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    _, main = summing.upstream.sent
    assert b"[summary of" not in main.body
    _, call = summing.summary_and_call
    assert call.notes["summary"] == "none: away"
    summing.store.away = False
    await summing.settler.aclose()
    assert (await summing.store.totals(KEY)).total_tokens == 2 * 15


async def test_an_answer_in_pieces_that_nobody_asked_for_is_no_summary(summing: SummingWorld) -> None:
    pieces = [chunk("a"), usage_chunk(), DONE]
    summing.upstream.answer = lambda request: (
        FakeReply(headers=SSE, pieces=pieces) if is_for_a_summary(request) else FakeReply()
    )
    reply, _ = await summing.call(summing.incoming(long_body()))
    assert reply.status == 200
    summary, call = summing.summary_and_call
    assert summary.charge is not None
    assert call.notes["summary"].endswith("was answered without a text")
    assert summing.upstream.open == 0


async def test_a_summary_of_a_guessed_session_leaves_it_marked_as_guessed(summing: SummingWorld) -> None:
    await summing.call(summing.incoming(long_body(), headers=[]))
    summary, call = summing.summary_and_call
    assert summary.session == call.session
    assert summary.derived_session
    assert call.session is not None
    view = await summing.store.session(call.session)
    assert view is not None
    assert view.derived


async def test_a_client_key_for_some_models_only_may_be_given_a_summary_by_another(summing: SummingWorld) -> None:
    reply, _ = await summing.call(summing.incoming(long_body(), caller=Caller("alice", ("m",))))
    assert reply.status == 200
    assert "summarize" in (reply.context.trimmed if reply.context else {})
