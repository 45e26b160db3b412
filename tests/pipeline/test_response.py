"""Forward responses: which are read whole, which are streamed, and when the call is settled."""

from __future__ import annotations

import asyncio
import gzip
from decimal import Decimal
from math import ceil

import pytest

from gateway.call.types import SessionPolicy
from gateway.core.errors import UpstreamProtocolError
from gateway.core.ledger.arithmetic import Claim, Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.record import ORPHANED
from gateway.pipeline.response import MAX_WHOLE_ANSWER
from tests.support.fakes import JSON, KEY, SSE, STREAM, FakeReply, World
from tests.support.scripted import DONE, chunk, completion, usage_chunk


@pytest.fixture
def world() -> World:
    return World()


async def test_a_response_too_large_to_be_read_is_forwarded_and_estimated(world: World) -> None:
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


async def test_a_large_response_that_breaks_is_marked_as_broken(world: World) -> None:
    piece = b"{" + b" " * (1 << 20)
    pieces = [piece] * (MAX_WHOLE_ANSWER // len(piece) + 2)
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[*pieces, UpstreamProtocolError("broken")])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        async for _ in reply.body:
            assert not reply.is_incomplete
        assert reply.is_incomplete


def spent(world: World) -> tuple[str, int, int]:
    charge = world.record.charge
    assert charge is not None
    return charge.source, charge.usage.input_tokens, charge.usage.output_tokens


async def test_the_usage_of_a_response_too_large_to_be_read_is_found(world: World) -> None:
    tail = b'], "usage": {"prompt_tokens": 100, "total_tokens": 100}}'
    numbers = [b",0.123456" * 100_000] * (MAX_WHOLE_ANSWER // 900_000 + 1)
    pieces: list[bytes] = [b'{"data": [0.1', *numbers, tail]
    world.upstream.answer = lambda _: FakeReply(pieces=pieces)
    await world.call(world.incoming(b'{"model":"m","input":"x"}', "embeddings"))
    assert spent(world) == ("provider", 100, 0)


@pytest.mark.parametrize("cut", [0, 1])
async def test_a_response_that_breaks_after_its_usage_is_charged_by_it(world: World, cut: int) -> None:
    body = completion()
    world.upstream.answer = lambda _: FakeReply(pieces=[body[: len(body) - cut], UpstreamProtocolError("broken")])
    reply, _ = await world.call()
    assert reply.status == 502
    assert spent(world) == ("provider", 10, 5)


async def test_broken_embeddings_are_not_counted_as_output(world: World) -> None:
    vectors = b'{"data": [{"embedding": [' + b"0.123456," * 100_000
    world.upstream.answer = lambda _: FakeReply(pieces=[vectors, UpstreamProtocolError("broken")])
    await world.call(world.incoming(b'{"model":"m","input":"some words"}', "embeddings"))
    assert spent(world)[2] == 0


@pytest.mark.parametrize("kind", [b"text/plain", b"text/html", b"application/octet-stream"])
async def test_a_response_is_metered_with_any_content_type(world: World, kind: bytes) -> None:
    body = completion()
    world.upstream.answer = lambda _: FakeReply(headers=[(b"content-type", kind)], pieces=[body[:5], body[5:]])
    _, original = await world.call()
    assert original == body
    assert spent(world) == ("provider", 10, 5)


@pytest.mark.parametrize(
    "headers", [[(b"content-type", b"text/plain")], [(b"content-type", b"application/x-ndjson")], JSON, []]
)
@pytest.mark.parametrize("step", [1, 5, 1_000])
async def test_a_stream_is_metered_with_any_content_type(
    world: World, headers: list[tuple[bytes, bytes]], step: int
) -> None:
    sent = b"".join([chunk("one "), chunk("two"), usage_chunk(), DONE])
    pieces = [sent[start : start + step] for start in range(0, len(sent), step)]
    world.upstream.answer = lambda _: FakeReply(headers=headers, pieces=pieces)
    _, original = await world.call(world.incoming(STREAM))
    assert spent(world) == ("provider", 10, 5)
    assert usage_chunk() not in original, "the client did not request usage"
    assert original.startswith(chunk("one ") + chunk("two"))


async def test_an_event_of_a_stream_with_a_wrong_content_type_is_not_delayed(world: World) -> None:
    first = b"data: {}\n\n"
    headers = [(b"content-type", b"text/plain")]
    world.upstream.answer = lambda _: FakeReply(headers=headers, pieces=[first, None])
    async with asyncio.timeout(10), world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        assert await anext(aiter(reply.body)) == first


async def test_plain_text_is_forwarded_unchanged(world: World) -> None:
    text = b"error: the model is tired\n" * 9
    headers = [(b"content-type", b"text/plain")]
    world.upstream.answer = lambda _: FakeReply(headers=headers, pieces=[text[:3], text[3:]])
    _, original = await world.call(world.incoming(STREAM))
    assert original == text


async def test_invalid_utf_8_in_a_response_is_forwarded_and_metered(world: World) -> None:
    body = completion().replace(b'"content": "', b'"content": "\xff\xfe')
    assert b"\xff" in body
    world.upstream.answer = lambda _: FakeReply(pieces=[body])
    reply, original = await world.call()
    assert (reply.status, original) == (200, body)
    assert spent(world) == ("provider", 10, 5)


@pytest.mark.parametrize("flaw", [b"\xef\xbb\xbf%b", b"%b\r\n--", b"%b\0", b"%b,}"])
async def test_a_response_with_invalid_json_is_forwarded_and_charged_by_its_usage(world: World, flaw: bytes) -> None:
    body = flaw % (completion()[:-1] if flaw.endswith(b"}") else completion())
    world.upstream.answer = lambda _: FakeReply(pieces=[body])
    reply, original = await world.call()
    assert (reply.status, original) == (200, body)
    assert spent(world) == ("provider", 10, 5)


@pytest.mark.parametrize("text", ["x" * 1_700 + "\x01", "x" * 1_700])
async def test_a_raw_control_character_does_not_change_the_token_count_of_an_event(world: World, text: str) -> None:
    event = chunk("here").replace(b"here", text.encode())
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), event, chunk("b"), DONE])
    _, original = await world.call(world.incoming(STREAM))
    assert event in original
    assert spent(world)[2] in (426, 427)


async def test_an_absurd_number_in_a_response_does_not_affect_its_usage(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(
        pieces=[completion().replace(b'"created": 1', b'"created": ' + b"9" * 5_000)]
    )
    await world.call()
    assert spent(world) == ("provider", 10, 5)


async def test_embeddings_are_metered_with_any_content_type(world: World) -> None:
    body = b'{"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}'
    world.upstream.answer = lambda _: FakeReply(headers=[(b"content-type", b"text/plain")], pieces=[body])
    await world.call(world.incoming(b'{"model":"m","input":"x"}', "embeddings"))
    assert spent(world) == ("provider", 7, 0)


async def test_invalid_utf_8_in_a_stream_is_forwarded_and_metered(world: World) -> None:
    pieces = [chunk("a"), chunk("bad").replace(b"bad", b"b\xffd"), chunk("c"), usage_chunk(), DONE]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=pieces)
    _, original = await world.call(world.incoming(STREAM))
    assert b"b\xffd" in original
    assert b"[DONE]" in original
    assert spent(world) == ("provider", 10, 5)


@pytest.mark.parametrize("is_asked", [True, False])
async def test_usage_after_the_end_mark_is_charged_and_forwarded_only_if_requested(
    world: World, is_asked: bool
) -> None:
    body = STREAM[:-1] + b',"stream_options":{"include_usage":true}}' if is_asked else STREAM
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), DONE + usage_chunk()])
    _, original = await world.call(world.incoming(body))
    assert spent(world) == ("provider", 10, 5)
    assert original == chunk("a") + b": 15\n\n" + DONE + (usage_chunk() if is_asked else b"")


async def test_the_end_mark_is_sent_after_the_settlement(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk() + DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        async for piece in reply.body:
            if b"[DONE]" in piece:
                assert world.store.settled == 1
                assert piece.startswith(b": 15\n\n")
                break
            assert world.store.settled == 0


async def holds(world: World) -> int:
    """Return the number of calls for which the session's account has a reservation."""
    (balance,) = await world.store.balances([Claim(KEY.account)])
    return balance.held.calls


@pytest.mark.parametrize("headers", [SSE, [(b"content-type", b"audio/wav")]])
async def test_a_stream_is_reserved_when_its_first_part_is_sent(
    world: World, headers: list[tuple[bytes, bytes]]
) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=headers, pieces=[chunk("a"), chunk("b"), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        assert await holds(world) == 0
        assert await anext(aiter(reply.body)) == chunk("a")
        assert await holds(world) == 1
    assert await holds(world) == 0


async def test_a_stream_that_arrives_whole_is_settled_without_a_reservation(world: World) -> None:
    whole_stream = chunk("a") + usage_chunk() + DONE
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[whole_stream])
    world.store.responds_late = True  # a reservation would take a minute
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        pieces = [piece async for piece in reply.body]
    assert pieces == [chunk("a") + b": 15\n\n" + DONE]
    assert world.store.settled == 1


async def test_a_stream_continues_if_the_store_becomes_unavailable_before_its_first_part(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        world.store.away = True
        assert b"".join([piece async for piece in reply.body]) == chunk("a") + DONE
    assert world.settler.availability.is_unavailable
    world.store.away = False
    await world.settler.aclose()
    assert (await world.store.totals(KEY)).total_tokens == 15


async def test_a_stream_that_cannot_be_reserved_is_journaled_before_its_first_part_is_sent(world: World) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        world.store.away = True
        await anext(aiter(reply.body))
        (noted,) = world.noted
        assert (noted.outcome, noted.charge is not None) == (ORPHANED, True), "needed if this worker dies now"
    await world.settler.aclose()


async def test_a_stream_continues_under_a_budget_set_before_its_first_part(
    world: World,
) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[chunk("a"), usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        await world.store.override_limits(KEY.account, {"tokens": 1})
        body = aiter(reply.body)
        await anext(body)
        (orphaned,) = await world.store.calls(KEY, 9)
        assert (orphaned.outcome, orphaned.charge is not None) == (ORPHANED, True), "needed if this worker dies now"
        assert b"".join([piece async for piece in body]).endswith(DONE)
    (record,) = await world.store.calls(KEY, 9)
    assert record.outcome == "ok"
    assert (await world.store.totals(KEY)).total_tokens == 15


async def test_without_stream_totals_a_stream_is_forwarded_unchanged() -> None:
    world = World(SessionPolicy(stream_totals=False))
    pieces = [chunk("a"), DONE]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=pieces)
    _, body = await world.call(world.incoming(STREAM))
    assert body == b"".join(pieces)


@pytest.mark.parametrize("is_compressed", [False, True])
async def test_a_file_keeps_its_content_length_unless_it_is_decompressed(world: World, is_compressed: bool) -> None:
    plain = b"sound" * 100
    sent = gzip.compress(plain) if is_compressed else plain
    headers = [(b"content-type", b"audio/wav"), (b"content-length", b"%d" % len(sent))]
    headers += [(b"content-encoding", b"gzip")] if is_compressed else []
    world.upstream.answer = lambda _: FakeReply(headers=headers, pieces=[sent[:20], sent[20:]])
    reply, body = await world.call()
    assert body == plain
    assert (b"content-length" in dict(reply.headers)) is not is_compressed
    assert world.record.response_bytes == len(plain)


@pytest.mark.parametrize("content_type", ["application/json", "application/problem+json", "Application/JSON", ""])
async def test_a_json_response_is_settled_before_it_is_forwarded(world: World, content_type: str) -> None:
    world.upstream.answer = lambda _: FakeReply(headers=[(b"content-type", content_type.encode())])
    async with world.gateway.handle(world.incoming()) as reply:
        assert isinstance(reply.body, bytes)
        assert reply.is_final
        assert world.store.settled == 1
        assert reply.charge is not None


async def test_an_error_of_the_provider_is_forwarded_with_the_totals_and_costs_nothing(world: World) -> None:
    await world.call()
    world.upstream.answer = lambda _: FakeReply(429, pieces=[b'{"error":', b'"slow down"}'])
    reply, body = await world.call()
    assert (reply.status, reply.upstream_error, reply.is_final) == (429, True, True)
    assert body == b'{"error":"slow down"}'
    assert reply.totals is not None
    assert reply.totals.total_tokens == 15


# --- audio and images ---------------------------------------------------------------------------------------------


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nq-x\r\n--b\r\n\r\n' + b"\0" * 9_000 + b"\r\n--b--\r\n"
)
FORM_HEADERS = [(b"x-session-id", b"s"), (b"content-type", b"multipart/form-data; boundary=b")]
SPEECH = b'{"model":"q-x","input":"say this"}'
USAGE = b', "usage": {"input_tokens": 50, "output_tokens": 7}}'


async def charged(world: World, path: str, body: bytes, kind: bytes, answer: bytes) -> tuple[int, int, Decimal | None]:
    world.upstream.answer = lambda _: FakeReply(headers=[(b"content-type", kind)], pieces=[answer[:9], answer[9:]])
    headers = {"headers": FORM_HEADERS} if body is FORM else {}
    _, original = await world.call(world.incoming(body, path, **headers))
    assert original == answer
    charge = world.record.charge
    assert charge is not None
    return charge.usage.input_tokens, charge.usage.output_tokens, charge.cost_usd


@pytest.mark.parametrize("kind", [b"audio/mpeg", b"application/octet-stream"])
async def test_the_cost_of_audio_output_is_unknown(world: World, kind: bytes) -> None:
    tokens_in, tokens_out, usd = await charged(world, "audio/speech", SPEECH, kind, b"\xff\xfb" * 900)
    assert (tokens_in > 0, tokens_out, usd) == (True, 0, None)
    assert (await world.store.totals(KEY)).unpriced_calls == 1
    assert "audio" in world.record.notes["price"]
    assert world.record.spent.nano_usd > 0, "the known minimum is charged to the budget"


@pytest.mark.parametrize(
    "answer", [b'{"data": [{"b64_json": "aGVsbG8="}]}', b'{"data": [{"url": "http://x"}]}', b'{"audio": "aGVsbG8="}']
)
async def test_the_cost_of_images_is_unknown(world: World, answer: bytes) -> None:
    assert (await charged(world, "images/generations", SPEECH, b"application/json", answer))[1:] == (0, None)


@pytest.mark.parametrize(
    ("kind", "answer", "output"),
    [
        (b"application/json", b'{"text": "' + b"word" * 100 + b'"}', 100),
        (b"text/plain; charset=utf-8", b"word" * 100, 100),
    ],
)
async def test_a_transcription_is_counted_but_the_cost_of_its_audio_is_unknown(
    kind: bytes, answer: bytes, output: int
) -> None:
    world = World(budget=BudgetPolicy(session=Limits(nano_usd=10**9)))
    assert await charged(world, "audio/transcriptions", FORM, kind, answer) == (0, output, None)
    hold = ceil(len(FORM) / 4) * 1_000
    assert world.record.spent.nano_usd == max(hold, output * 10_000)


async def test_media_with_reported_usage_have_a_cost(world: World) -> None:
    said = await charged(world, "audio/transcriptions", FORM, b"application/json", b'{"text": "words"' + USAGE)
    assert said == (50, 7, Decimal("0.00012"))


async def test_a_response_without_media_has_an_estimated_cost(world: World) -> None:
    answer = b'{"results": [{"index": 0, "relevance_score": 0.5}]}'
    assert (await charged(world, "rerank", SPEECH, b"application/json", answer))[2] == Decimal("0.000002")
