"""Test server-sent events (WHATWG HTML, section 9.2.6): every byte is kept, and memory is bounded."""

from __future__ import annotations

import tracemalloc

import pytest

from gateway.core.http.sse import EventBuffer, data_of_events, event_data, split_events
from tests.support.timing import in_time


def feed(pieces: list[bytes], limit: int | None = None) -> tuple[list[bytes], bytes]:
    buffer = EventBuffer() if limit is None else EventBuffer(limit)
    return [region for region in map(buffer.feed, pieces) if region], buffer.rest()


def data_of(pieces: list[bytes]) -> list[bytes]:
    regions, rest = feed(pieces)
    return [data for region in [*regions, rest] for block in split_events(region) if (data := event_data(block))]


def test_incomplete_event_is_buffered() -> None:
    assert feed([b"data: a", b"\n\ndata: b\n"]) == ([b"data: a\n\n"], b"data: b\n")


def test_the_rest_is_given_once() -> None:
    buffer = EventBuffer()
    buffer.feed(b"data: a")
    assert (buffer.rest(), buffer.rest()) == (b"data: a", b"")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_an_event_ends_at_a_blank_line_of_any_kind(end: bytes) -> None:
    stream = b"data: a" + end * 2 + b": note" + end * 2 + b"data:b" + end * 2
    assert data_of([stream]) == [b"a", b"b"]
    assert data_of([stream[i : i + 1] for i in range(len(stream))]) == [b"a", b"b"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_an_event_of_several_lines_is_one_event_whatever_its_line_ends(end: bytes) -> None:
    stream = end.join([b"event: x", b"id: 1", b"data: a", b"data: b", b"", b""])
    assert split_events(stream) == [stream]
    assert data_of([stream]) == [b"a\nb"]


@pytest.mark.parametrize(
    ("block", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data\n\n", b""),
        (b"data: \n\n", b""),
        (b"data: a\ndata\ndata: b\n\n", b"a\n\nb"),
        (b"event: x\ndata: a\nid: 7\nretry: 3\n\n", b"a"),
        (b": data: a\n\n", b""),
        (b"database: a\n\n", b""),
        (b"data : a\n\n", b""),
        (b" data: a\n\n", b""),
        (b"\ndata: a\n\n", b"a"),
        (b"data: a: b\n\n", b"a: b"),
        (b"data: a", b"a"),
        (b"data: \xff\n\n", b"\xff"),
        (b"", b""),
        (b"\n", b""),
    ],
)
def test_the_data_of_an_event_is_its_data_lines(block: bytes, data: bytes) -> None:
    assert event_data(block) == data


def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it() -> None:
    assert data_of([b"\xef\xbb\xbfdata: a\n\ndata: b\n\n"]) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("region", "blocks"),
    [
        (b"", []),
        (b"data: a\n\n", [b"data: a\n\n"]),
        (b"data: a\n\ndata: b\n\ndata: c", [b"data: a\n\n", b"data: b\n\n", b"data: c"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c", [b"data: a\r\n\r\n", b"data: b\r\r", b"data: c"]),
        (b"data: a\r", [b"data: a\r"]),
        (b"data: a\n\r\n", [b"data: a\n\r\n"]),
    ],
)
def test_a_region_is_cut_after_each_blank_line(region: bytes, blocks: list[bytes]) -> None:
    assert split_events(region) == blocks


@pytest.mark.parametrize(
    ("region", "data"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\nevent: x\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\n: note\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: \n\ndata: a\n\n", [b"a"]),
        (b": only a note\n\n", []),
        (b"event: x\ndata: a\n\nevent: y\ndata: b\n\n", [b"a", b"b"]),
        (b"event: x\ndata: \n\nevent: y\ndata: event: z\n\n", [b"event: z"]),
        (b"event: x\n\nevent: y\ndata: a\ndata: b\n\n", [b"a\nb"]),
        (b"event: x\nid: 1\n\nevent: y\ndata: a\n\n", [b"a"]),
        (b"event: x\ndata: a\n\n\nevent: y\n\n", [b"a"]),
        (b"event: x\ndata: a\n\ndata: b\ndata: c\n\n", [b"a", b"b\nc"]),
        (b"event: x\ndata: a\rdata: b\n\n", [b"a\nb"]),
        (b"event: x\ndata: a\nid: 1\nevent: y\ndata: b\n\n", [b"a\nb"]),
        (b"event: x\nid: 1\n\ndata: a\ndata: b\n\n", [b"a\nb"]),
        (b"event: event: x\ndata: a\n\ndata:b\ndata: c\n\n", [b"a", b"b\nc"]),
    ],
)
def test_the_data_of_a_region_is_that_of_its_events(region: bytes, data: list[bytes]) -> None:
    assert data_of_events(region) == data


@pytest.mark.parametrize("piece", [b"x" * 100, b"x\r" * 50, b"data: x\r\n" * 10, b"\xff" * 99])
def test_an_event_without_end_never_holds_more_than_the_limit(piece: bytes) -> None:
    buffer, limit = EventBuffer(1_000), 1_000
    original, went = bytearray(), bytearray()
    for _ in range(200):
        original += piece
        went += buffer.feed(piece)
        assert len(original) - len(went) <= limit
    assert bytes(went + buffer.rest()) == bytes(original)


def test_a_large_event_in_small_pieces_takes_time_linear_in_its_length() -> None:
    size, piece = 2**24, b"x" * 64
    buffer = EventBuffer(2 * size)
    with in_time():
        for _ in range(size // len(piece)):
            buffer.feed(piece)
    assert buffer.rest() == b"x" * size


def test_after_an_event_over_the_limit_the_next_one_is_whole_again() -> None:
    buffer = EventBuffer(10)
    first = [buffer.feed(piece) for piece in (b"data: " + b"x" * 20, b"x" * 20, b"\n", b"\n")]
    assert b"".join(first) == b"data: " + b"x" * 40 + b"\n\n"
    assert buffer.feed(b"data: b") == b""
    assert buffer.feed(b"\n\n") == b"data: b\n\n"


def test_the_limit_holds_for_what_follows_a_whole_event_too() -> None:
    regions, rest = feed([b"data: a\n\n" + b"y" * 50], limit=10)
    assert b"".join(regions) + rest == b"data: a\n\n" + b"y" * 50
    assert len(rest) <= 10


def test_a_whole_event_passes_at_once_however_large() -> None:
    event = b"data: " + b"x" * 100 + b"\n\n"
    assert feed([event], limit=10) == ([event], b"")


def test_a_comment_is_a_block_that_is_no_event() -> None:
    assert event_data(": totals: 漢\n\n".encode()) == b""


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_event_with_too_many_lines_is_not_parsed(end: bytes) -> None:
    line = b"data: a" + end
    assert event_data(line * 40_000 + end).count(b"a") == 40_000
    tracemalloc.start()
    try:
        assert event_data(line * 200_000 + end) == b""
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("first", [b"event: x\n", b"data: x\n"])
def test_region_with_too_many_lines_is_not_parsed(first: bytes) -> None:
    region = first + b"aa\n" * 300_000 + b"\n"
    tracemalloc.start()
    try:
        assert data_of_events(region) == []
        assert tracemalloc.get_traced_memory()[1] < 4 * len(region)
    finally:
        tracemalloc.stop()
