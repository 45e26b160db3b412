"""Text frames: texts are cut out of similar events as if the events were parsed, or not at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.text_frame import TextFrame

FRAME = TextFrame(b'{"a":1,"t":"', b"", b'","z":0}')
PADDED = TextFrame(FRAME.before, b'","obfuscation":"', FRAME.after)


def event(written: bytes) -> bytes:
    return FRAME.before + written + FRAME.after


def padded(written: bytes, padding: bytes) -> bytes:
    return event(written + PADDED.between + padding)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=6))
def test_extracted_texts_equal_the_written_texts(texts: list[str]) -> None:
    result = FRAME.texts([event(json.dumps(text)[1:-1].encode()) for text in texts])
    assert result == texts


WRITTEN = st.binary(max_size=3) | st.text('"\\,n]\n{', max_size=6).map(str.encode)


@given(st.lists(WRITTEN, min_size=1, max_size=5))
def test_nothing_is_extracted_that_parsing_would_not_give(written: list[bytes]) -> None:
    events = [event(one) for one in written]
    result = FRAME.texts(events)
    if result is not None:
        assert [json.loads(one) for one in events] == [{"a": 1, "t": text, "z": 0} for text in result]


@given(st.lists(st.tuples(WRITTEN, WRITTEN), min_size=1, max_size=5))
def test_padded_texts_are_extracted_like_parsed_ones(written: list[tuple[bytes, bytes]]) -> None:
    events = [padded(*one) for one in written]
    result = PADDED.texts(events)
    if result is not None:
        assert [(one["a"], one["t"], one["z"]) for one in map(json.loads, events)] == [(1, text, 0) for text in result]


def test_frame_around_a_text_includes_the_padding() -> None:
    plain, hidden = event(b"abc"), padded(b"abc", b"xy")
    start, end = len(FRAME.before), len(FRAME.before) + 3
    assert TextFrame.around(plain, start, end) == FRAME
    assert TextFrame.around(hidden, start, end) == PADDED
    assert PADDED.texts([hidden, padded(b"", b""), padded(b"d\\n", b"z")]) == ["abc", "", "d\n"]
    assert PADDED.texts([hidden, plain]) is None
    assert PADDED.texts([hidden, padded(b"d", b'","t":"e')]) is None


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"7",
        FRAME.before,
        FRAME.after,
        FRAME.before[:-1] + FRAME.after,
        FRAME.before + FRAME.after[1:],
        event(b"b") + b" ",
        event(b"b") + event(b"c"),
        event(b"b") + b"\n" + event(b"c"),
        event(b'b","t":"c'),
        event(b'b"\n,"c'),
        event(b"b\n"),
        event(b"b\\"),
        event(b"\\ud83d"),
        event(b"\xff"),
        event(b"b").replace(b"1", b"2"),
        event(b"b").replace(b"0", b"1"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_texts_are_extracted_if_one_event_differs(odd: bytes, place: int) -> None:
    events = [event(b"one"), event(b"two")]
    assert FRAME.texts(events) == ["one", "two"]
    events.insert(place, odd)
    assert FRAME.texts(events) is None


def test_closing_quote_is_not_part_of_the_text() -> None:
    assert FRAME.texts([event(b"a\\"), event(b',"c')]) is None


def test_no_events_have_no_texts() -> None:
    assert FRAME.texts([]) is None
