"""Read rounds of calls and results from the messages of each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.measure import Wire
from gateway.core.runaway import NO_ROUNDS, RoundReader
from gateway.dialects.rounds import read_rounds

Json = dict[str, Any]
#: a format, and the messages of one round: id, tool, arguments as JSON, result
Format = tuple[Wire, Callable[[str, str, str, Any], list[Json]]]


def array(messages: Sequence[Json]) -> bytes:
    return json.dumps(messages).encode()


def read(wire: Wire, messages: Sequence[Json]) -> RoundReader:
    return read_rounds(wire, array(messages))[1]


def chat(name: str, tool: str, arguments: str, result: Any) -> list[Json]:
    call = {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": result},
    ]


def messages(name: str, tool: str, arguments: str, result: Any) -> list[Json]:
    call = {"type": "tool_use", "id": name, "name": tool, "input": json.loads(arguments)}
    back = {"type": "tool_result", "tool_use_id": name, "content": result}
    return [
        {"role": "assistant", "content": [{"type": "text", "text": f"Call {name}."}, call]},
        {"role": "user", "content": [back]},
    ]


def responses(name: str, tool: str, arguments: str, result: Any) -> list[Json]:
    return [
        {"type": "reasoning", "id": f"rs_{name}", "summary": []},
        {"type": "function_call", "call_id": name, "name": tool, "arguments": arguments},
        {"type": "function_call_output", "call_id": name, "output": result},
    ]


def user(wire: Wire, text: Any) -> Json:
    return {"role": "user", "content": text, **({"type": "message"} if wire == "responses" else {})}


FORMATS = pytest.mark.parametrize(
    ("wire", "made"), [("chat", chat), ("messages", messages), ("responses", responses)], ids=lambda one: str(one)[:9]
)


@FORMATS
def test_rounds_are_equal_whatever_their_ids_are(wire: Wire, made: Callable[..., list[Json]]) -> None:
    same = [made(f"c{number}", "read", '{"path": "a"}', "text") for number in range(4)]
    reader = read(wire, [user(wire, "go"), *(message for one in same for message in one)])
    assert (reader.number, reader.known, reader.runs[0], reader.tools[-1]) == (4, 3, 3, ("read",))


@FORMATS
@pytest.mark.parametrize(
    ("tool", "arguments", "result"),
    [("write", '{"path": "a"}', "text"), ("read", '{"path": "b"}', "text"), ("read", '{"path": "a"}', "other")],
)
def test_another_tool_argument_or_result_is_another_round(
    wire: Wire, made: Callable[..., list[Json]], tool: str, arguments: str, result: str
) -> None:
    reader = read(wire, [*made("1", "read", '{"path": "a"}', "text"), *made("2", tool, arguments, result)])
    assert (reader.number, reader.known) == (2, 0)


@FORMATS
def test_arguments_are_compared_regardless_of_the_order_of_their_keys(
    wire: Wire, made: Callable[..., list[Json]]
) -> None:
    first = made("1", "read", '{"path": "a", "line": 7}', "text")
    assert read(wire, [*first, *made("2", "read", '{"line":7,"path":"a"}', "text")]).known == 1
    assert read(wire, [*first, *made("2", "read", '{"line":8,"path":"a"}', "text")]).known == 0


@FORMATS
def test_a_result_in_a_list_equals_the_same_text_as_a_string(wire: Wire, made: Callable[..., list[Json]]) -> None:
    listed = [{"type": "input_text" if wire == "responses" else "text", "text": "found"}]
    reader = read(wire, [*made("1", "read", "{}", "found"), *made("2", "read", "{}", listed)])
    assert reader.known == 1
    assert read(wire, [*made("1", "read", "{}", "found"), *made("2", "read", "{}", [*listed, *listed])]).known == 0


@FORMATS
def test_a_user_message_begins_a_new_work(wire: Wire, made: Callable[..., list[Json]]) -> None:
    before = [user(wire, "go"), *made("1", "read", "{}", "x")]
    assert read(wire, before).number == 1
    assert read(wire, [*before, user(wire, "stop")]).number == 0
    assert read(wire, [*before, user(wire, "stop")]).work not in (0, read(wire, before).work)


@FORMATS
def test_a_reminder_of_the_client_is_no_user_message(wire: Wire, made: Callable[..., list[Json]]) -> None:
    before = [user(wire, "go"), *made("1", "read", "{}", "x")]
    reader = read(wire, [*before, user(wire, "<system-reminder>\nUse the list of tasks.</system-reminder>")])
    assert (reader.number, reader.work) == (1, read(wire, before).work)


def test_words_beside_a_result_are_a_user_message_unless_they_are_a_reminder() -> None:
    call, result = messages("1", "read", "{}", "x")
    reminder = {"type": "text", "text": "<system-reminder>x</system-reminder>"}
    assert read("messages", [call, {**result, "content": [*result["content"], reminder]}]).number == 1
    words = {"type": "text", "text": "Stop that."}
    assert read("messages", [call, {**result, "content": [*result["content"], words]}]).number == 0


@FORMATS
def test_a_message_that_cannot_be_read_is_skipped(wire: Wire, made: Callable[..., list[Json]]) -> None:
    odd: list[Json] = [{"role": 7}, {"type": [1]}, {"role": "assistant", "content": 3, "tool_calls": "x"}]
    one, other = made("1", "read", "{}", "x"), made("2", "read", "{}", "x")
    assert read(wire, [*one, *odd, *other, *odd]).number == 2


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800", "b": 1}', '{"a": 1, "b": ', "text", "", '{"a":1,"b":' + "1" * 5000]
)
def test_arguments_of_any_form_can_be_compared(arguments: str) -> None:
    assert read("chat", [*chat("1", "read", arguments, "x"), *chat("2", "read", arguments, "x")]).known == 1


@pytest.mark.parametrize("raw", [b"[", b'[{"role":"user","content":"\\ud800"}]', b"{}", b"[" * 5000])
@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_an_array_that_cannot_be_read_has_no_rounds(wire: Wire, raw: bytes) -> None:
    assert read_rounds(wire, raw)[1].rounds == NO_ROUNDS


def test_older_and_other_forms_of_calls_are_read() -> None:
    old: list[Json] = [
        {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}},
        {"role": "function", "name": "read", "content": "x"},
    ]
    assert read("chat", old * 2).known == 1
    custom: list[Json] = [
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "run", "input": "x"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    assert read("chat", custom * 2).known == 1
    shell: list[Json] = [
        {"type": "local_shell_call", "call_id": "1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "1", "output": "a"},
    ]
    assert read("responses", shell * 2).known == 1
    patch: list[Json] = [
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "failed"},
    ]
    assert read("responses", patch * 2).known == 1


@FORMATS
def test_parallel_calls_are_one_round(wire: Wire, made: Callable[..., list[Json]]) -> None:
    calls = [made(name, "read", json.dumps({"path": name}), name) for name in "ab"]
    both = [*(one[-2] for one in calls), *(one[-1] for one in calls)]
    if wire == "chat":
        both[0]["tool_calls"] += both.pop(1)["tool_calls"]
    elif wire == "messages":
        both = [
            {"role": "assistant", "content": [*both[0]["content"], *both[1]["content"]]},
            {"role": "user", "content": [*both[2]["content"], *both[3]["content"]]},
        ]
    reader = read(wire, both * 3)
    assert (reader.number, reader.runs[0], reader.tools[-1]) == (3, 2, ("read", "read"))


def test_a_result_without_its_call_is_no_round() -> None:
    assert read("responses", [{"type": "function_call_output", "call_id": "1", "output": "x"}]).number == 0


@FORMATS
@given(data=st.data())
def test_messages_can_be_read_in_parts(wire: Wire, made: Callable[..., list[Json]], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.sampled_from("abu"), min_size=1, max_size=12))
    all_messages = [
        message
        for number, step in enumerate(steps)
        for message in ([user(wire, f"u{number}")] if step == "u" else made(str(number), step, "{}", step))
    ]
    end = data.draw(st.integers(1, len(all_messages)))
    kept, _ = read_rounds(wire, array(all_messages[:end]), NO_ROUNDS)
    _, reader = read_rounds(wire, array(all_messages[end - 1 :]), kept)
    assert reader.rounds == read(wire, all_messages).rounds
