"""Texts that are cut out of events alike: what would be parsed, or nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.alike import TextFrame

FRAME = TextFrame(b'{"a":1,"t":"', b"", b'","z":0}')
PADDED = TextFrame(FRAME.before, b'","obfuscation":"', FRAME.after)


def event(written: bytes) -> bytes:
    return FRAME.before + written + FRAME.after


def padded(written: bytes, padding: bytes) -> bytes:
    return event(written + PADDED.between + padding)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=6))
def test_the_texts_are_those_that_were_written(texts: list[str]) -> None:
    found = FRAME.texts([event(json.dumps(text)[1:-1].encode()) for text in texts])
    assert found == texts


WRITTEN = st.binary(max_size=3) | st.text('"\\,n]\n{', max_size=6).map(str.encode)


@given(st.lists(WRITTEN, min_size=1, max_size=5))
def test_nothing_is_found_that_parsing_would_not_find(written: list[bytes]) -> None:
    events = [event(one) for one in written]
    found = FRAME.texts(events)
    if found is not None:
        assert [json.loads(one) for one in events] == [{"a": 1, "t": text, "z": 0} for text in found]


@given(st.lists(st.tuples(WRITTEN, WRITTEN), min_size=1, max_size=5))
def test_nor_is_it_where_the_text_has_padding_behind_it(written: list[tuple[bytes, bytes]]) -> None:
    events = [padded(*one) for one in written]
    found = PADDED.texts(events)
    if found is not None:
        assert [(one["a"], one["t"], one["z"]) for one in map(json.loads, events)] == [(1, text, 0) for text in found]


def test_what_stands_around_a_text_is_found_with_the_padding_behind_it() -> None:
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
def test_of_events_with_another_among_them_nothing_is_taken(odd: bytes, place: int) -> None:
    events = [event(b"one"), event(b"two")]
    assert FRAME.texts(events) == ["one", "two"]
    events.insert(place, odd)
    assert FRAME.texts(events) is None


def test_the_quote_behind_a_text_is_not_taken_for_one_within_it() -> None:
    assert FRAME.texts([event(b"a\\"), event(b',"c')]) is None


def test_none_at_all_have_no_texts() -> None:
    assert FRAME.texts([]) is None
