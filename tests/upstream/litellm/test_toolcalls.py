"""Tool calls in a chat stream: they are distinguished, and sent one after the other in a Messages stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.core.errors import UpstreamProtocolError
from gateway.upstream.litellm.toolcalls import SequentialCalls, StreamToolCalls


def piece(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> Any:
    return SimpleNamespace(index=index, id=call_id, function=SimpleNamespace(name=name, arguments=arguments))


def first_piece(index: int, call_id: str, arguments: str = "") -> Any:
    return piece(index, arguments, call_id, "get")


def chunk(*calls: Any, text: str | None = None, end: str | None = None) -> Any:
    delta = SimpleNamespace(content=text, tool_calls=list(calls) or None)
    return SimpleNamespace(choices=[SimpleNamespace(index=0, delta=delta, finish_reason=end)])


class Stream:
    """Replaces `ObservedStream` for the code that reads from it."""

    def __init__(self, *chunks: Any) -> None:
        self.calls = StreamToolCalls()
        self.failure: Exception | None = None
        self._chunks = self._each(chunks)

    async def _each(self, chunks: tuple[Any, ...]) -> AsyncIterator[Any]:
        for one in chunks:
            for choice in one.choices:
                self.calls.see(choice)
            yield one

    async def __anext__(self) -> Any:
        return await anext(self._chunks)

    def failed(self, message: str) -> UpstreamProtocolError:
        return UpstreamProtocolError(message)


async def contents_of(*chunks: Any) -> list[Any]:
    """Return the content of each remaining chunk: (id, number, arguments) of calls, a text, or an end."""
    said: list[Any] = []
    stream: Any = Stream(*chunks)
    async for one in SequentialCalls(stream):
        for choice in one.choices:
            calls = choice.delta.tool_calls or ()
            said += [choice.delta.content] if choice.delta.content else []
            said += [(call.id, call.index, call.function.arguments) for call in calls]
            said += [choice.finish_reason] if choice.finish_reason else []
    return said


def end() -> Any:
    return chunk(end="tool_calls")


async def test_sequential_calls_are_streamed_as_they_arrive() -> None:
    first, second = chunk(first_piece(0, "a")), chunk(first_piece(1, "b", '{"b":'))
    said = await contents_of(first, chunk(piece(0, '{"a":1} ')), second, chunk(piece(1, "2}")), end())
    assert said == [("a", 0, ""), (None, 0, '{"a":1} '), ("b", 1, '{"b":'), (None, 1, "2}"), "tool_calls"]


async def test_of_interleaved_calls_the_first_is_streamed_and_others_are_whole() -> None:
    turns = [chunk(piece(0, '{"a":')), chunk(piece(1, '{"b":')), chunk(piece(0, "1}")), chunk(piece(1, "2}"))]
    said = await contents_of(
        chunk(first_piece(0, "a")), chunk(first_piece(1, "b")), *turns, chunk(first_piece(2, "c", "{}")), end()
    )
    assert said == [
        ("a", 0, ""),
        (None, 0, '{"a":'),
        (None, 0, "1}"),
        ("b", 1, '{"b":2}'),
        ("c", 2, "{}"),
        "tool_calls",
    ]


async def test_a_chunk_with_pieces_of_several_calls_and_the_end_loses_none() -> None:
    said = await contents_of(
        chunk(first_piece(0, "a"), first_piece(1, "b")), chunk(piece(0, "{}"), piece(1, "[2]"), end="tool_calls")
    )
    assert said == [("a", 0, ""), (None, 0, "{}"), ("b", 1, "[2]"), "tool_calls"]


async def test_text_ends_the_calls_before_it() -> None:
    said = await contents_of(
        chunk(first_piece(0, "a")),
        chunk(first_piece(1, "b", "{}")),
        chunk(text="so"),
        chunk(first_piece(2, "c")),
        end(),
    )
    assert said == [("a", 0, ""), "so", ("b", 1, "{}"), ("c", 2, ""), "tool_calls"]


async def test_late_arguments_are_not_added_to_another_call() -> None:
    with pytest.raises(UpstreamProtocolError, match="had ended"):
        await contents_of(chunk(first_piece(0, "a", '{"a":')), chunk(text="so"), chunk(piece(0, "1}")), end())
    said = await contents_of(
        chunk(first_piece(0, "a", "{}")), chunk(first_piece(1, "b", "{}")), chunk(piece(0, " ")), end()
    )
    assert said == [("a", 0, "{}"), ("b", 1, "{}"), "tool_calls"]


async def test_calls_with_one_number_are_distinguished_by_id() -> None:
    said = await contents_of(
        chunk(first_piece(0, "a", "{}")), chunk(first_piece(0, "b", '{"b":')), chunk(piece(0, "2}")), end()
    )
    assert said == [("a", 0, "{}"), ("b", 1, '{"b":'), (None, 1, "2}"), "tool_calls"]
    said = await contents_of(
        chunk(first_piece(0, "a", "{}"), first_piece(0, "b", "{}")), chunk(first_piece(1, "c", "{}")), end()
    )
    assert said == [("a", 0, "{}"), ("b", 1, "{}"), ("c", 2, "{}"), "tool_calls"]


@pytest.mark.parametrize("repeated", ["a", "another"])
async def test_piece_with_a_repeated_id_begins_no_call(repeated: str) -> None:
    said = await contents_of(
        chunk(first_piece(0, "a", '{"a"')), chunk(first_piece(0, repeated, ":{}")), chunk(first_piece(0, repeated, "}"))
    )
    assert said == [("a", 0, '{"a"'), (None, 0, ":{}"), (None, 0, "}")]
