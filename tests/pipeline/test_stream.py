"""Streams are passed on in the callbacks in which their pieces arrive; the task wakes only if something has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gateway.core.errors import UpstreamProtocolError
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ports import PassedPieces, TakePiece
from gateway.stores.leases import SAVE_TOKENS
from tests.support.fakes import KEY, SSE, STREAM, FakeReply, World
from tests.support.scripted import DONE, chunk, usage_chunk
from tests.support.timing import eventually


class Provider(PassedPieces):
    """A body whose pieces arrive when `send` is called. The last one is followed by `end`."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._take: TakePiece | None = None
        self._changed = asyncio.Event()
        self._end: Exception | bool = False
        #: how often the reader has slept
        self.sleeps = 0

    @property
    def is_passed_on(self) -> bool:
        """Return whether the reader sleeps, so that the next piece is taken at once."""
        return self._take is not None

    def send(self, piece: bytes) -> None:
        if self._take is None:
            self._waiting.append(piece)
        elif not self._take(piece):
            self._take = None
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        self._end = error or True
        self._changed.set()

    async def __anext__(self) -> bytes:
        raise NotImplementedError

    async def pass_to(self, take: TakePiece) -> bool:
        while self._waiting:
            if not take(self._waiting.pop(0)):
                return True
        self._take = take
        self.sleeps += 1
        try:
            while self._take is not None and not self._end:
                self._changed.clear()
                await self._changed.wait()
            is_stopped = self._take is None
        finally:
            self._take = None
        if not is_stopped and isinstance(self._end, Exception):
            raise self._end
        return is_stopped


@dataclass
class PushedReply(FakeReply):
    provider: Provider = field(default_factory=Provider)

    def chunks(self) -> Provider:
        return self.provider


@dataclass
class Client:
    """What a client got: through its connection, and from the task of the call."""

    written: list[bytes] = field(default_factory=list)
    yielded: list[bytes] = field(default_factory=list)
    is_full: bool = False

    def write(self, piece: bytes) -> bool:
        if not self.is_full:
            self.written.append(piece)
        return not self.is_full


@asynccontextmanager
async def streaming(world: World, client: Client) -> AsyncIterator[Provider]:
    """Yield the provider of a stream whose first piece, with the text "a", was passed on."""
    provider = Provider()
    world.upstream.answer = lambda _: PushedReply(headers=SSE, provider=provider)
    provider.send(chunk("a"))

    async def read() -> None:
        async with world.gateway.handle(world.incoming(STREAM)) as reply:
            assert reply.direct is not None
            assert not isinstance(reply.body, bytes)
            reply.direct.write = client.write
            async for piece in reply.body:
                client.yielded.append(piece)

    task = asyncio.create_task(read())
    await eventually(lambda: provider.is_passed_on, "the task sleeps")
    assert client.yielded == [chunk("a")]
    try:
        yield provider
        await asyncio.wait_for(task, 10)
    finally:
        task.cancel()


async def test_a_piece_is_written_in_the_callback_in_which_it_arrives() -> None:
    world, client = World(), Client()
    async with streaming(world, client) as provider:
        for text in "bcd":
            provider.send(chunk(text))
            assert client.written[-1] == chunk(text)
        assert provider.sleeps == 1
        provider.send(DONE)
        provider.end()
    assert client.written == [chunk("b"), chunk("c"), chunk("d")]
    assert world.record.outcome == "ok"


async def test_the_end_mark_waits_for_the_settlement_with_the_events_before_it() -> None:
    world, client = World(), Client()
    async with streaming(world, client) as provider:
        provider.send(chunk("b") + usage_chunk() + DONE)
        assert client.written == []
        assert world.store.settled == 0
        provider.end()
    assert client.written == []
    assert client.yielded[1:] == [chunk("b") + b": 15\n\n" + DONE]
    assert world.store.settled == 1


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_events_in_pieces_of_any_size_reach_the_client_unchanged(size: int) -> None:
    world, client = World(), Client()
    sent = b"".join([chunk("b"), b": ping\n\n", chunk("c"), usage_chunk(), DONE])
    async with streaming(world, client) as provider:
        for start in range(0, len(sent), size):
            provider.send(sent[start : start + size])
        provider.end()
    # The client did not ask for usage.
    assert b"".join([*client.written, *client.yielded[1:]]) == sent.replace(usage_chunk() + DONE, b": 15\n\n" + DONE)


async def test_a_client_that_does_not_read_makes_the_provider_wait() -> None:
    world, client = World(), Client()
    async with streaming(world, client) as provider:
        client.is_full = True
        provider.send(chunk("b"))
        assert not provider.is_passed_on
        provider.send(chunk("c"))
        assert client.written == []
        client.is_full = False
        await eventually(lambda: provider.is_passed_on, "the task sleeps again")
        assert client.yielded[1:] == [chunk("b")]
        assert client.written == [chunk("c")]
        provider.send(DONE)
        provider.end()


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    world, client = World(), Client()
    async with streaming(world, client) as provider:
        provider.send(chunk("b"))
        provider.end(UpstreamProtocolError("broken"))
    assert b'"error"' in client.yielded[-1]
    assert world.record.outcome == "upstream_broken"


async def test_a_long_piece_is_passed_on_after_its_progress_is_saved() -> None:
    world, client = World(), Client()
    async with streaming(world, client) as provider:
        (lease,) = world.leases._open.values()
        provider.send(chunk("word" * 2 * SAVE_TOKENS))
        assert client.written == []
        await eventually(lambda: len(client.yielded) > 1, "the piece is passed on")
        assert lease.saved.tokens >= 2 * SAVE_TOKENS
        provider.send(DONE)
        provider.end()


async def test_progress_is_saved_before_more_tokens_are_passed_on() -> None:
    world, client = World(), Client()
    async with streaming(world, client) as provider:
        for _ in range(20):
            provider.send(chunk("word" * (SAVE_TOKENS // 8)))
            await eventually(lambda: provider.is_passed_on, "the task sleeps")
        (lease,) = world.leases._open.values()
        assert lease.delivered() - lease.saved.tokens <= 2 * SAVE_TOKENS
        assert lease.saved.tokens > 0
        assert provider.sleeps < 20, "not after each piece"
        provider.send(DONE)
        provider.end()


@pytest.mark.parametrize("words", [25, 100, 400])
async def test_a_stream_ends_with_its_budget_as_if_its_task_had_read_each_piece(words: int) -> None:
    ends = []
    for is_direct in (False, True):
        world, client = World(budget=BudgetPolicy(session=Limits(tokens=3_000))), Client()
        pieces = [chunk("a"), *[chunk("word" * words)] * 400]
        world.upstream.answer = lambda _, pieces=pieces: FakeReply(headers=SSE, pieces=pieces)  # type: ignore[misc]
        async with world.gateway.handle(world.incoming(STREAM)) as reply:
            assert reply.direct is not None
            assert not isinstance(reply.body, bytes)
            if is_direct:
                reply.direct.write = client.write
            yielded = [piece async for piece in reply.body]
        # A long piece waits until its progress is saved.
        assert bool(client.written) is (is_direct and words < SAVE_TOKENS)
        assert b'"length"' in yielded[-1]
        assert world.record.outcome == "budget_end"
        ends.append((len(client.written) + len(yielded), (await world.store.totals(KEY)).total_tokens))
    assert ends[0] == ends[1]


async def test_keys_are_masked_in_errors_of_the_stream() -> None:
    world, client = World(), Client()
    world.gateway.relay._secrets = [b"held"]
    error = b'data: {"choices":[{"delta":{"content":"x"}}],"error":"the key held is wrong"}\n\n'
    async with streaming(world, client) as provider:
        provider.send(error)
        provider.send(DONE)
        provider.end()
    assert b"held" not in b"".join([*client.written, *client.yielded])


async def test_without_a_connection_to_write_to_the_reader_gets_all_pieces() -> None:
    world = World()
    pieces = [chunk("a"), chunk("b"), chunk("c")]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[*pieces, usage_chunk(), DONE])
    async with world.gateway.handle(world.incoming(STREAM)) as reply:
        assert not isinstance(reply.body, bytes)
        assert [piece async for piece in reply.body] == [*pieces, b": 15\n\n" + DONE]
