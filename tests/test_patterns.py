"""Compare patterns of `re` with plain scanners on any supported Python version.

Requests are trimmed by what these patterns find: Python versions that match differently would send different bytes.
The scanners define what each pattern means. No pattern may use memory for each repetition in long input.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import _flat_end, _next_brace, without_cache_marks
from gateway.core.errors import InvalidRequest
from gateway.core.trimming import parameters, terms
from gateway.dialects import partial_body as glimpsed
from gateway.dialects import texts
from gateway.dialects.fields import read_fields
from gateway.telemetry.bodies import _Body
from gateway.upstream.litellm.items import _Input

EXAMPLES: Final = 150
MARKS: Final = "./@:#-"
SPACE: Final = b" \t\n\r\f\v"


def words(*pieces: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces) | st.text(max_size=2), max_size=12).map("".join)


def raws(*pieces: bytes, most: int = 14) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(pieces), max_size=most).map(b"".join)


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def past(text: str, at: int, is_inside: Callable[[str], bool]) -> int:
    while at < len(text) and is_inside(text[at]):
        at += 1
    return at


def scanned_terms(text: str) -> Iterator[str]:
    """Yield words, and words joined by marks."""
    at = 0
    while at < len(text):
        end = past(text, at, is_word)
        if end == at:
            at += 1
            continue
        while (joined := past(text, past(text, end, MARKS.__contains__), is_word)) > end and is_word(text[joined - 1]):
            end = joined
        yield text[at:end]
        at = end


@given(words("a", "distance", "9", "_", ".", ":", "/", "@", "#", "-", " ", "\n", "é", "漢", "\u0301", "²"))
@settings(max_examples=EXAMPLES, deadline=None)
@example("distance: 5")
@example("a.b..c- d_e:/f-.-.-")
@example("a" + "." * 3000 + "b" + "-" * 3000)
def test_terms_are_words_joined_by_marks(text: str) -> None:
    assert terms._TERM.findall(text) == list(scanned_terms(text))


def test_a_mark_at_the_end_is_not_part_of_a_term() -> None:
    assert terms._TERM.findall("distance: 5, user.name. a-b--c: x") == ["distance", "5", "user.name", "a-b--c", "x"]


def scanned_labels(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = past(text, at, lambda character: is_word(character) or character == "-")
        if end > at and text.startswith(": ", end):
            yield text[at:end]
        at = max(end, at + 1)


@given(words("a", "userId", "_", "-", ":", ": ", " ", "\n", "é", "7"))
@settings(max_examples=EXAMPLES, deadline=None)
@example("user-id: 7, name: x: y a:b -: ")
def test_labels_are_the_words_before_a_colon_and_a_space(text: str) -> None:
    expected: dict[str, list[int]] = {}
    for label in scanned_labels(text):
        expected[parameters.spelled(label)] = [0]
    assert parameters.labelled([text]) == expected


def scanned_token(raw: bytes, at: int) -> int:
    """Return the end of a token that a flat object may contain; `at` itself for all else."""
    if raw[at : at + 1] in (b",", b":") or raw[at] in SPACE:
        return at + 1
    for word in (b"true", b"false", b"null"):
        if raw.startswith(word, at):
            return at + len(word)
    if raw[at : at + 1] == b'"':
        end = at + 1
        while end < len(raw) and raw[end] not in b'"\\{}':
            end += 1
        return end + 1 if raw[end : end + 1] == b'"' else at
    end = digits = at + (raw[at : at + 1] == b"-")
    while end < len(raw) and raw[end] in b"0123456789":
        end += 1
    is_whole = 1 <= end - digits <= 18 and raw[end : end + 1] not in (b".", b"e", b"E")
    return end if is_whole else at


def scanned_holder(raw: bytes, at: int) -> int | None:
    """Return the position after the name of a cache mark, its colon and the bracket of its object."""
    for name in (b'"cache_control"', b'"prompt_cache_breakpoint"'):
        if raw.startswith(name, at):
            at += len(name)
            break
    else:
        return None
    for sign in b":{":
        while at < len(raw) and raw[at] in SPACE:
            at += 1
        if raw[at : at + 1] != bytes([sign]):
            return None
        at += 1
    return at


def scanned_flat_end(raw: bytes) -> int | None:
    end = scanned_holder(raw, 0)
    if end is None:
        return None
    while end < len(raw) and (behind := scanned_token(raw, end)) > end:
        end = behind
    return end + 1 if raw[end : end + 1] == b"}" else None


NUMBERS = (b"1", b"-7", b"1" * 18, b"1" * 19, b"1.5", b"2e9", b"-", b"00")


@given(
    st.sampled_from(
        [b'"cache_control":{', b'"prompt_cache_breakpoint" :\n{', b'"cache_control":[', b'"cache_control"']
    ),
    raws(b"}", b"{", b",", b":", b" ", b"\n", b'"ttl"', b'"a}"', b'"\\n"', b'"', b"true", b"nul", b"null", *NUMBERS),
    st.sampled_from([b"}", b"", b"}}"]),
)
@settings(max_examples=EXAMPLES, deadline=None)
@example(b'"cache_control":{', b'"type":"ephemeral","ttl":"1h"', b"}")
@example(b'"cache_control":{', b"1," * 2500, b"}")
@example(b'"cache_control":{', b'"a":1,' * 2500, b'"}')
@example(b'"cache_control":{', b'"a":' + b"1" * 18 + b"e", b"}")
def test_a_cache_mark_ends_with_its_flat_object(start: bytes, inside: bytes, end: bytes) -> None:
    raw = start + inside + end
    assert _flat_end(raw, 0) == scanned_flat_end(raw)


def scanned_brace(raw: bytes, at: int) -> int | None:
    while at < len(raw) and raw[at] not in b"{}":
        if raw[at] == ord('"'):
            at += 1
            while at < len(raw) and raw[at] != ord('"'):
                at += 2 if raw[at] == ord("\\") else 1
        at += 1
    return at if at < len(raw) else None


@given(
    raws(b"{", b"}", b'"', b"\\", b'\\"', b"a", b'"{"', b'"\\\\"', b"\n", b'"' + b"\\n" * 21 + b'}"'), st.integers(0, 4)
)
@settings(max_examples=EXAMPLES, deadline=None)
@example(b'"a",' * 2500 + b"}", 0)
@example(b'"' + b'\\"' * 2500 + b'}"{', 0)
@example(b'"' + b'\\"' * 2500 + b"}{", 0)
@example(b'"\\', 0)
def test_the_next_brace_is_outside_of_strings(raw: bytes, at: int) -> None:
    at = min(at, len(raw))
    assert _next_brace(raw, at) == scanned_brace(raw, at)


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\{}:,[] \n\té😀'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def strings(value: Any, *, keys: bool) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, keys=keys)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from [name] if keys else []
            yield from strings(item, keys=keys)


@given(jsons, st.booleans(), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
@example(["x " + "\n" * 3000, {"\n" * 150: "\\" * 3000, "a": '"' * 100}], False, True)
@example({"a": "\n" * 101, "\n" * 100: 1}, False, False)
@example([1, "x\\", '"', {"a\\": "\\\\", '"': '\\"'}], True, True)
def test_the_texts_of_a_body_are_the_strings_in_it(value: Any, is_ascii: bool, keys: bool) -> None:
    raw = msgspec.Raw(json.dumps(value, ensure_ascii=is_ascii).encode())
    found = list(texts.texts_of_fields({"a": raw}, ["a"], unknown=keys))
    assert found == list(strings(value, keys=keys))


FIELDS = (b"content", b"text", b"arguments", b"reasoning", b"reasoning_content", b"thinking", b"refusal")


def scanned_opening(raw: bytes, at: int) -> int | None:
    """Return the first character of the string of a text field, if such a field starts here."""
    for name in FIELDS:
        if raw.startswith(b'"%b"' % name, at):
            end = at + len(name) + 2
            for sign in b':"':
                while end < len(raw) and raw[end] in SPACE:
                    end += 1
                if raw[end : end + 1] != bytes([sign]):
                    return None
                end += 1
            return end
    return None


def scanned_texts(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        start = scanned_opening(raw, at)
        at += 1
        if start is None:
            continue
        end = start
        while end < len(raw) and raw[end] != ord('"') and raw[end:] != b"\\":
            end += 2 if raw[end] == ord("\\") else 1
        yield raw[start:end]
        at = end


@given(
    raws(b'"text"', b'"content":"', b'"content" : "', b'"refusal":\n"', b'"', b"\\", b'\\"', b":", b"a", b"\n", b"{")
)
@settings(max_examples=EXAMPLES, deadline=None)
@example(b'{"text":"' + b"\\n" * 2500 + b'","content":"b')
@example(b'{"text":"\\')
def test_the_texts_of_a_partial_body_are_the_strings_of_its_fields(raw: bytes) -> None:
    assert list(glimpsed._texts(raw)) == list(scanned_texts(raw))


def scanned_half(raw: bytes) -> int | None:
    """Return the position of an escaped half of a surrogate pair without its other half."""
    at = 0
    while at < len(raw):
        if raw.startswith(b"\\u", at) and raw[at + 2 : at + 6].lower() in (b"d83d", b"de00"):
            is_high = raw[at + 2 : at + 6].lower() == b"d83d"
            if not is_high or raw[at + 6 : at + 12].lower() != b"\\ude00":
                return at
            at += 12
        else:
            at += 2 if raw[at] == ord("\\") else 1
    return None


@given(raws(b"\\ud83d", b"\\uDE00", b"\\ud83d\\ude00", b"\\\\", b"a", b"ud83d", b'\\"', b"\\n", most=10))
@settings(max_examples=EXAMPLES, deadline=None)
@example(b"\\\\" * 2500 + b"\\ud83d")
@example(b"\\\\" * 2500 + b"ud83d")
@example(b"\\\\ud83d\\ude00")
def test_a_lone_surrogate_is_found_after_any_escapes(inside: bytes) -> None:
    body = b'{"a":"' + inside + b'"}'
    half = scanned_half(body)
    if half is None:
        assert bytes(read_fields(body)["a"]) == b'"' + inside + b'"'
        return
    with pytest.raises(InvalidRequest, match=f"at byte {half} is a lone surrogate"):
        read_fields(body)


@given(st.text(st.sampled_from('Q"\\\n'), min_size=1, max_size=8), st.integers(0, 24))
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_secret_is_masked_even_if_its_body_breaks_off(secret: str, cut: int) -> None:
    raw = json.dumps({"api_key": secret, "b": "shown"}).encode()
    for piece in (raw, raw[: len('{"api_key": "') + cut]):
        body = _Body()
        body.add(piece)
        assert "Q" not in body.text
    whole = _Body()
    whole.add(raw)
    assert json.loads(whole.text) == {"api_key": "***", "b": "shown"}


@given(st.text(max_size=30) | st.text(st.sampled_from('"\\\n😀a\x01'), max_size=30), st.booleans(), st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_input_of_a_custom_tool_is_read_from_any_chunks(text: str, is_ascii: bool, data: st.DataObject) -> None:
    raw = json.dumps({"content": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    read = _Input()
    said = [read.more(raw[start:end]) for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert "".join(said) == text


def test_a_long_input_of_a_custom_tool_is_read_whole() -> None:
    text = '\n"é😀' * 2000
    assert _Input().more(json.dumps({"content": text})) == text


LONG = 150_000


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda: terms._TERM.findall("a." * LONG), id="joined term"),
        pytest.param(lambda: terms._TERM.findall("a" + "." * LONG), id="marks"),
        pytest.param(lambda: parameters.labelled(["a" * LONG]), id="label"),
        pytest.param(lambda: without_cache_marks(b'{"cache_control":{' + b"1," * LONG + b"}}"), id="numbers in a mark"),
        pytest.param(lambda: without_cache_marks(b'{"cache_control":{' + b"1" * LONG + b"}}"), id="digits in a mark"),
        pytest.param(
            lambda: without_cache_marks(b'{"cache_control":{' + b'"\\n",' * LONG + b"}}"), id="escapes beside a mark"
        ),
        pytest.param(
            lambda: without_cache_marks(b'{"cache_control":{"a":"' + b'\\"' * LONG + b'"}}'), id="escapes in a mark"
        ),
        pytest.param(lambda: without_cache_marks(b'{"cache_control":{' + b'"' * LONG), id="quotes in a mark"),
        pytest.param(lambda: list(glimpsed._texts(b'"text":"' + b"\\n" * LONG)), id="text of a broken answer"),
        pytest.param(lambda: list(glimpsed._texts(b'"text":' * LONG)), id="fields of a broken answer"),
        pytest.param(lambda: _Input().more('{"content":"' + "\\n" * LONG), id="input of a custom tool"),
    ],
)
def test_patterns_use_no_memory_for_repetitions_in_long_input(read: Callable[[], object]) -> None:
    read()
    tracemalloc.start()
    try:
        result = read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    # An unbounded repeated group would take 140 bytes for each repetition: 21 MB.
    assert peak < 8 * 2**20
