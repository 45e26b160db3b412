from __future__ import annotations

import json
import math
from collections.abc import Callable
from hashlib import blake2b
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import text_of
from gateway.core.modes import MODES, SHORTEST, ResponseMode, ShownResult, mode_for, show, stricter
from gateway.core.modes.handle import ends_with_handle

CHANGING = MODES[1:]


def handle(content: str) -> str:
    return blake2b(content.encode(), digest_size=15).hexdigest()


def never(_: str) -> str:
    raise AssertionError("no handle is needed")


def result(content: Any, **fields: Any) -> bytes:
    return json.dumps({"role": "tool", "tool_call_id": "call_1", "content": content, **fields}).encode()


def shown(raw: bytes, mode: ResponseMode, handle_of: Callable[[str], str] = handle) -> ShownResult:
    found = show(raw, mode, handle_of)
    assert found is not None
    return found


def rows(count: int) -> str:
    return json.dumps(
        [{"flight_number": f"HAT{n}", "origin": "JFK", "seats_left": n * 13 % 50, "price": 1.50} for n in range(count)]
    )


TEXT = "".join(
    f"Step {n} of the plan is to visit place_{n} and to write down what is found there.\n" for n in range(80)
)


@pytest.mark.parametrize(
    ("remaining", "mode"),
    [
        (1.0, "raw"),
        (0.500001, "raw"),
        (0.5, "table"),
        (0.200001, "table"),
        (0.2, "summary"),
        (0.050001, "summary"),
        (0.05, "handle_only"),
        (0.0, "handle_only"),
        (-1.0, "handle_only"),
        (math.nan, "handle_only"),
        (math.inf, "raw"),
    ],
)
def test_the_mode_gets_stricter_as_the_budget_shrinks(remaining: float, mode: ResponseMode) -> None:
    assert mode_for(remaining) == mode


def test_modes_are_listed_from_the_mildest() -> None:
    assert MODES == ("raw", "table", "summary", "handle_only")


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(MODES, 2)))
def test_the_stricter_mode_is_the_later_one(one: ResponseMode, other: ResponseMode) -> None:
    assert stricter(one, other) == stricter(other, one) == other


def test_a_list_is_shown_as_a_table_and_needs_no_handle() -> None:
    found = shown(result(rows(20)), "table", never)
    assert (found.form, found.handle, found.content) == ("table", None, None)
    assert "flight_number|origin|seats_left|price\nHAT0|JFK|0|1.5\n" in text_of(found.raw)


def test_a_summary_names_the_handle_of_the_whole_text() -> None:
    found = shown(result(TEXT), "summary")
    text = text_of(found.raw)
    assert (found.form, found.handle, found.content) == ("summary", handle(TEXT), TEXT)
    assert text.startswith("Step 0 of the plan")
    assert text.endswith(f"\n[summary of {len(TEXT):,} characters; full text: GET /api/results/{handle(TEXT)}]")
    assert len(text) < len(TEXT) / 3


def test_the_strictest_mode_leaves_one_line() -> None:
    content = rows(200)
    found = shown(result(content), "handle_only")
    assert (found.form, found.handle, found.content) == ("handle_only", handle(content), content)
    assert text_of(found.raw) == (
        "[JSON, 200 rows with columns flight_number, origin, seats_left, price; "
        f"{len(content):,} characters; full text: GET /api/results/{handle(content)}]"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "raw",
    [
        result("short"),
        result("x" * SHORTEST),
        result("Error: " + "x" * 250),
        result(None),
        result([]),
        result(12),
        json.dumps({"role": "user", "content": TEXT}).encode(),
        json.dumps({"role": "assistant", "content": TEXT}).encode(),
        json.dumps({"role": "system", "content": TEXT}).encode(),
        json.dumps({"content": TEXT}).encode(),
        json.dumps([TEXT]).encode(),
        TEXT.encode(),
        b"\xff" * 400,
        result(TEXT, role="tool")[:-1] + b',"tool_call_id":"again"}',
        result(TEXT)[:-1] + b',"x":NaN}',
        result(TEXT + "\ud800"),
        result(TEXT)[:-1] + b',"x":' + b"[" * 200 + b"]" * 200 + b"}",
        result([{"type": "image_url", "image_url": {"url": f"https://pictures.example/{'x' * 400}"}}]),
        result([{"type": "text", "text": TEXT, "annotations": []}]),
        result([TEXT]),
        result(TEXT, thinking_blocks=[{"type": "thinking"}]),
    ],
)
def test_short_and_other_messages_are_unchanged(raw: bytes, mode: ResponseMode) -> None:
    assert show(raw, mode, never) is None


def test_nothing_is_changed_while_there_is_budget() -> None:
    assert show(result(rows(200)), "raw", never) is None


def test_text_stays_as_it_is_among_tables() -> None:
    assert show(result(TEXT), "table", never) is None


def test_a_table_that_saves_little_stays_json() -> None:
    content = json.dumps([{"id": n, "text": "a long text, " * 30} for n in range(9)], separators=(",", ":"))
    assert show(result(content), "table", never) is None


def test_json_that_cannot_be_written_stays_as_it_is() -> None:
    assert show(result('["\\ud800"' + " " * 400 + "]"), "table", never) is None


@pytest.mark.parametrize("mode", CHANGING)
def test_all_other_fields_survive(mode: ResponseMode) -> None:
    raw = result(rows(200), name="search", x_unknown={"a": [1, None]}, cache_control={"type": "ephemeral"})
    before, after = json.loads(raw), json.loads(shown(raw, mode).raw)
    assert list(before) == list(after)
    assert {**before, "content": ""} == {**after, "content": ""}


@pytest.mark.parametrize("mode", CHANGING)
def test_function_results_are_shown_alike(mode: ResponseMode) -> None:
    raw = json.dumps({"role": "function", "name": "search", "content": rows(200)}).encode()
    assert text_of(shown(raw, mode).raw) == text_of(shown(result(rows(200)), mode).raw)


MARK = {"type": "ephemeral", "ttl": "1h"}


def test_each_part_is_a_table_of_its_own_and_keeps_its_mark() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "Found:"},
        {"type": "text", "text": rows(20), "cache_control": MARK},
        {"type": "text", "text": TEXT},
    ]
    after = json.loads(shown(result(parts), "table", never).raw)["content"]
    assert after == [parts[0], {**parts[1], "text": after[1]["text"]}, parts[2]]
    assert after[1]["text"].startswith("[JSON list as a table, 20 rows")


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
@pytest.mark.parametrize("mode", ["summary", "handle_only"])
def test_a_short_form_replaces_all_parts_and_keeps_a_cache_mark(mode: ResponseMode, mark: str) -> None:
    parts = [{"type": "text", "text": TEXT, mark: MARK}, {"type": "text", "text": rows(90)}]
    found = shown(result(parts), mode)
    assert found.content == TEXT + rows(90)
    assert json.loads(found.raw)["content"] == [{"type": "text", "text": text_of(found.raw), mark: MARK}]
    assert ends_with_handle(text_of(found.raw))


def test_parts_that_are_short_together_are_unchanged() -> None:
    parts = [{"type": "text", "text": rows(2)}, {"type": "text", "text": rows(2)}]
    assert show(result(parts), "summary", handle) is None
    assert show(result(parts[:1] * 9), "summary", handle) is not None


def test_a_table_that_saves_little_of_all_parts_stays_json() -> None:
    parts = [{"type": "text", "text": rows(9)}, {"type": "text", "text": TEXT}]
    assert show(result(parts), "table", handle) is None


@pytest.mark.parametrize("mode", ["summary", "handle_only"])
def test_a_table_that_is_short_enough_is_better_than_a_part(mode: ResponseMode) -> None:
    found = shown(result(rows(5) if mode == "handle_only" else rows(12)), mode)
    assert (found.form, found.handle) == ("table", None)


def test_json_of_mostly_white_space_is_shown_whole() -> None:
    found = shown(result(json.dumps({"a": 1, "b": [1, 2]}, indent=100)), "handle_only", never)
    assert text_of(found.raw) == '{"a":1,"b":[1,2]}'


def test_a_handle_must_save_more_than_its_line() -> None:
    assert show(result("word " * 70), "handle_only", handle) is None
    assert show(result("word " * 120), "handle_only", handle) is not None
    assert show(result("word " * 120), "handle_only", lambda _: "x" * 128) is None


def test_many_spaces_count_as_characters() -> None:
    assert len(shown(result(" " * 100_000 + "x"), "summary").raw) < 1000


def test_a_handle_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="a handle is made of"):
        show(result(TEXT), "summary", lambda _: "a b")


@pytest.mark.parametrize("mode", CHANGING)
def test_the_same_message_is_always_shown_the_same_way(mode: ResponseMode) -> None:
    assert show(result(rows(200)), mode, handle) == show(result(rows(200)), mode, handle)


@pytest.mark.parametrize("again", CHANGING)
@pytest.mark.parametrize("mode", ["summary", "handle_only"])
@pytest.mark.parametrize("content", [TEXT, rows(200), rows(2000), json.dumps({"a": {"b": TEXT}}), "é" * 9000])
def test_a_shown_result_gets_no_second_handle(content: str, mode: ResponseMode, again: ResponseMode) -> None:
    assert show(shown(result(content), mode).raw, again, never) is None


def test_a_long_text_with_a_handle_line_is_still_shortened() -> None:
    line = f"\n[summary of 9,999 characters; full text: GET /api/results/{handle('')}]"
    assert show(result(TEXT[:2000] + line), "summary", never) is None
    found = shown(result(TEXT * 3 + line), "summary")
    assert found.content == TEXT * 3 + line


def test_a_long_text_with_a_table_heading_is_still_shortened() -> None:
    head = "[JSON list as a table, 9 rows, nothing left out; empty cell: no such key]\n"
    assert show(result(head + TEXT[:2000]), "handle_only", never) is None
    assert shown(result(head + TEXT * 3), "handle_only").content == head + TEXT * 3


values = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)
contents = st.one_of(
    st.text(min_size=250, max_size=900),
    st.builds(lambda value, gap, times: json.dumps([value] * times, indent=gap), values, st.sampled_from([None, 1, 9]), st.integers(1, 60)),
    st.builds(lambda value, times: "\n".join([json.dumps({"a": value, "bcdefgh": times})] * times), values, st.integers(1, 60)),
    st.builds(lambda line, times: f"{line}\n" * times, st.text(min_size=1, max_size=99), st.integers(1, 99)),
)  # fmt: skip
messages = st.one_of(
    st.builds(result, contents),
    st.builds(lambda texts: result([{"type": "text", "text": text} for text in texts]), st.lists(contents, max_size=3)),
)


@given(messages, st.sampled_from(CHANGING))
@settings(max_examples=200, deadline=None)
def test_shown_results_are_shorter_and_stable(raw: bytes, mode: ResponseMode) -> None:
    found = show(raw, mode, handle)
    if found is None:
        return
    before, after = text_of(raw), text_of(found.raw)
    assert len(after) <= 0.9 * len(before)
    assert (found.handle is None) == (found.content is None) == (found.form == "table")
    assert found.content in (None, before)
    assert MODES.index(found.form) <= MODES.index(mode)
    assert show(found.raw, mode, never if found.handle else handle) is None


@given(st.binary(max_size=600) | st.builds(lambda value: json.dumps(value).encode(), values), st.sampled_from(MODES))
@settings(max_examples=100, deadline=None)
def test_any_bytes_can_be_shown(raw: bytes, mode: ResponseMode) -> None:
    assert show(raw + b" " * SHORTEST, mode, handle) is None
