"""Calls that continue from a response stored at the provider: their session and their route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.call.types import Caller, ClientResponse, Incoming, SessionPolicy
from gateway.core.errors import UpstreamTimeout
from gateway.core.http.headers import ProviderAddress
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.record import CallRecord
from gateway.core.routing import ModelRule, Routes
from gateway.dialects import endpoint
from tests.support.fakes import SSE, FakeReply, World

#: a model that two providers share, each of which stores its own responses
SHARED = Routes([ModelRule("m", "p", shares=(("p", 1.0), ("q", 1.0)))], ["p", "q"], "p")
USAGE = {"input_tokens": 100, "output_tokens": 40, "total_tokens": 140}


def answers(world: World, answer_id: str, **said: Any) -> None:
    body = json.dumps({"id": answer_id, "status": "completed", "output": [], "usage": USAGE, **said}).encode()
    world.upstream.answer = lambda _: FakeReply(pieces=[body])


def asking(world: World, text: str = "hi", path: str = "responses", **fields: Any) -> Incoming:
    """Return a call that names no session itself."""
    changes = {name: fields.pop(name) for name in ("headers", "caller") if name in fields}
    body = json.dumps({"model": "m", "input": text, **fields}).encode()
    return world.incoming(body, path, **{"headers": [(b"content-type", b"application/json")], **changes})


def about(world: World, method: str, path: str, **changes: Any) -> Incoming:
    made = endpoint(method, path)
    return world.incoming(b"", path, **{"method": method, "endpoint": made, "headers": [], **changes})


async def made(world: World, incoming: Incoming) -> CallRecord:
    await world.call(incoming)
    return world.recorder.records[-1][0]


def last_provider(world: World) -> str:
    """Return the name of the provider that was called last."""
    return world.upstream.sent[-1].url.removeprefix("http://")[0]


async def test_a_continued_call_keeps_the_session_and_provider_of_the_response() -> None:
    world, asked = World(routes=SHARED), set[str]()
    for number in range(12):
        answers(world, f"resp_{number}")
        first = await made(world, asking(world, f"begin {number}"))
        answers(world, f"resp_{number}_2")
        second = await made(world, asking(world, f"go on {number}", previous_response_id=f"resp_{number}"))
        third = await made(world, asking(world, "and on", previous_response_id=f"resp_{number}_2"))
        assert (second.session, second.provider, second.derived_session) == (first.session, first.provider, True)
        assert (third.session, third.provider) == (first.session, first.provider)
        asked.add(first.provider)
    assert asked == {"p", "q"}


async def test_the_tokens_of_the_previous_response_count_for_the_budget() -> None:
    world = World(budget=BudgetPolicy(session=Limits(tokens=250)))
    answers(world, "resp_1")
    await world.call(asking(world, max_output_tokens=50))
    reply, body = await world.call(asking(world, "more", previous_response_id="resp_1", max_output_tokens=50))
    assert reply.status == 400
    assert json.loads(body)["error"]["code"] == "budget_exhausted"
    assert len(world.upstream.sent) == 1


async def test_a_call_that_names_its_session_still_goes_to_the_provider_of_the_response() -> None:
    routes = Routes([ModelRule("m", "p", fallback=("q/m",))], ["p", "q"], "p")
    world = World(routes=routes)

    def of_the_second(request: Outgoing) -> FakeReply:
        body = json.dumps({"id": "resp_1", "status": "completed", "output": [], "usage": USAGE}).encode()
        return FakeReply(503) if request.url.startswith("http://p/") else FakeReply(pieces=[body])

    world.upstream.answer = of_the_second
    named = [(b"x-session-id", b"mine")]
    assert (await made(world, asking(world, headers=named))).provider == "q"
    sent = len(world.upstream.sent)
    second = await made(
        world, asking(world, "on", headers=[(b"x-session-id", b"other")], previous_response_id="resp_1")
    )
    assert second.session is not None
    assert (second.session.id, second.provider) == ("other", "q")
    assert len(world.upstream.sent) == sent + 1, "the first provider, which does not know it, is not asked"


async def test_a_credential_for_another_provider_is_refused_even_with_a_previous_response() -> None:
    world = World(routes=Routes([ModelRule("m", "p", fallback=("q/m",))], ["p", "q"], "p"))
    world.providers["p"] = ProviderAddress("p", "http://p/v1", key_prefixes=("sk-p-",))
    world.providers["q"] = ProviderAddress("q", "http://q/v1", key="held", key_prefixes=("sk-q-",))
    answers(world, "resp_1")
    at_p = world.upstream.answer
    world.upstream.answer = lambda request: FakeReply(503) if request.url.startswith("http://p/") else at_p(request)
    assert (await made(world, asking(world, headers=[(b"authorization", b"Bearer sk-p-1")]))).provider == "q"
    sent = len(world.upstream.sent)
    other = [(b"authorization", b"Bearer sk-q-1")]
    reply, _ = await world.call(asking(world, headers=other, previous_response_id="resp_1"))
    assert (reply.status, len(world.upstream.sent)) == (401, sent), "as without a previous response"


async def test_a_model_not_offered_by_the_provider_of_the_response_uses_its_own_route() -> None:
    world = World(routes=Routes([ModelRule("m", "q"), ModelRule("n", "p")], ["p", "q"], "p"))
    answers(world, "resp_1")
    first = await made(world, asking(world))
    second = await made(world, asking(world, model="n", previous_response_id="resp_1"))
    assert (second.session, first.provider, second.provider) == (first.session, "q", "p")


@pytest.mark.parametrize("on_missing", ["require", "none"])
async def test_the_previous_response_names_the_session_if_none_would_be_derived(on_missing: Any) -> None:
    world = World(SessionPolicy(on_missing=on_missing))
    answers(world, "resp_1")
    first = await made(world, asking(world, headers=[(b"x-session-id", b"mine")]))
    second = await made(world, asking(world, "on", previous_response_id="resp_1"))
    assert second.session == first.session is not None
    assert not second.derived_session


async def test_another_client_key_cannot_use_the_response_id() -> None:
    world = World(routes=SHARED)
    world.upstream.answer = lambda _: FakeReply(404, pieces=[b"{}"])
    alone = [await made(world, asking(world, str(number), caller=Caller("bob"))) for number in range(8)]
    for number in range(8):
        answers(world, f"resp_{number}")
        first = await made(world, asking(world, "hi", headers=[(b"x-session-id", b"%d" % number)]))
        second = await made(
            world, asking(world, str(number), caller=Caller("bob"), previous_response_id=f"resp_{number}")
        )
        assert (second.session, second.provider) == (alone[number].session, alone[number].provider)
        assert second.session != first.session


@pytest.mark.parametrize("previous", ["resp_1", "resp_unknown", "", None, 7, {"id": []}])
async def test_a_response_that_is_not_stored_or_unknown_names_no_session(previous: Any) -> None:
    world = World()
    answers(world, "resp_1")
    first = await made(world, asking(world, store=False))
    second = await made(world, asking(world, "on", store=False, previous_response_id=previous))
    alike = await made(world, asking(world, "on", store=False))
    assert first.session != second.session == alike.session


async def test_a_broken_stream_is_known_by_its_first_event() -> None:
    world = World()
    begun = b'data: {"type":"response.created","response":{"id":"resp_1","status":"in_progress","output":[]}}\n\n'
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[begun, UpstreamTimeout("gone")])
    first = await made(world, asking(world, stream=True))
    answers(world, "resp_2")
    assert (await made(world, asking(world, "on", previous_response_id="resp_1"))).session == first.session


async def test_a_background_response_is_known_before_it_is_complete() -> None:
    world = World()
    answers(world, "resp_1", status="queued", usage=None)
    first = await made(world, asking(world, background=True))
    assert first.outcome == "pending"
    assert (await made(world, asking(world, "on", previous_response_id="resp_1"))).session == first.session


@pytest.mark.parametrize("path", ["responses/compact", "responses/input_tokens"])
async def test_compaction_and_counting_use_the_provider_of_the_response(path: str) -> None:
    world, asked = World(routes=SHARED), set[str]()
    for number in range(12):
        answers(world, f"resp_{number}")
        first = await made(world, asking(world, f"begin {number}"))
        await world.call(asking(world, "x", path, previous_response_id=f"resp_{number}"))
        assert last_provider(world) == first.provider
        asked.add(first.provider)
        if path == "responses/compact":
            assert world.recorder.records[-1][0].session == first.session
    assert asked == {"p", "q"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "responses/resp_1"),
        ("DELETE", "responses/resp_1"),
        ("GET", "responses/resp_1/input_items"),
        ("POST", "responses/resp_1/cancel"),
    ],
)
async def test_requests_about_a_response_go_to_the_provider_that_stores_it(method: str, path: str) -> None:
    world = World(routes=Routes([ModelRule("m", "q")], ["p", "q"], "p"))
    answers(world, "resp_1")
    await world.call(asking(world))
    limited = Caller("alice", models=("m",))
    assert (await world.call(about(world, method, path, caller=limited)))[0].status == 200
    assert last_provider(world) == "q"
    await world.call(about(world, method, path, caller=Caller("bob")))
    assert last_provider(world) == "p", "like a request without a model"
    refused, _ = await world.call(about(world, method, path, caller=Caller("bob", models=("m",))))
    assert refused.status == 404


@pytest.mark.parametrize("is_known", [False, True])
async def test_without_the_store_a_call_with_an_unknown_session_gets_503(is_known: bool) -> None:
    """`is_known`: the gateway already knows that the store is unavailable."""
    world = World(SessionPolicy(on_missing="require"))
    world.store.away = True
    if is_known:
        await world.call(world.incoming())
    reply, body = await world.call(asking(world, "on", previous_response_id="resp_1"))
    assert (reply.status, json.loads(body)["error"]["code"]) == (503, "store_unavailable")


async def test_without_the_store_an_open_gateway_derives_the_session_from_the_text() -> None:
    world = World()
    world.settler.availability.accepts_without_store = world.store.away = True
    reply = await answered(world, previous_response_id="resp_1")
    assert reply.request.session == (await answered(world)).request.session is not None


async def answered(world: World, **fields: Any) -> ClientResponse:
    answers(world, "resp_2")
    reply, _ = await world.call(asking(world, **fields))
    assert reply.status == 200
    return reply
