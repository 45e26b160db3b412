"""Test the view of Anthropic's messages as chat messages, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.conversation.message import IGNORED, encode, outline_of, without_cache_marks
from gateway.core.conversation.units import Conversation
from gateway.core.modes import show
from gateway.core.views import new_faults, view_of
from gateway.core.views.view import View
from tests.support.timing import in_time

Json = dict[str, Any]


def view(*elements: Json) -> View:
    return view_of("messages", [encode(element) for element in elements])


def seen(found: View) -> list[Json]:
    return [json.loads(raw) for raw in found.messages]


def restored(found: View, changes: dict[int, Json | None]) -> list[Json]:
    written = {index: None if form is None else encode(form) for index, form in changes.items()}
    return [json.loads(raw) for raw in found.restored(written).raws]


TASK: Json = {"role": "user", "content": "Find it."}
CALLS: Json = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "search", "input": {"q": 1}},
        {"type": "tool_use", "id": "b", "name": "search", "input": {}},
    ],
}
ANSWERS: Json = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "two"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "a", "content": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "And be quick."},
    ],
}


def test_results_and_words_of_one_message_become_separate_messages() -> None:
    found = seen(view(TASK, CALLS, ANSWERS))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "user"]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["a", "b"]
    assert found[1]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q":1}'}
    assert (found[2]["tool_call_id"], found[2]["content"]) == ("b", [{"type": "text", "text": "two"}])
    assert (found[3]["tool_call_id"], found[3]["content"]) == ("a", "one")
    assert found[4]["content"] == [{"type": "text", "text": "And be quick."}]


def reference(name: str) -> Json:
    return {"type": "tool_reference", "tool_name": name}


def used(name: str, tool: str) -> list[Json]:
    result = {"type": "tool_result", "tool_use_id": name, "content": "found"}
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": name, "name": tool, "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]


def test_message_that_loaded_a_tool_is_needed_by_its_calls() -> None:
    search, found = used("s", "ToolSearch")
    found["content"][0]["content"] = [reference("get"), reference("put")]
    loaded = view(TASK, search, found, *used("a", "get"), *used("b", "other"))
    assert loaded.marks.needed == {2}, "the result alone"
    assert view(TASK, search, found, *used("b", "other")).marks.needed == set()


def test_tool_loaded_by_anthropic_search_is_needed_by_later_calls() -> None:
    searched: list[Json] = [
        {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_regex", "input": {"query": "get"}},
        {
            "type": "tool_search_tool_result",
            "tool_use_id": "s",
            "content": {"type": "tool_search_tool_search_result", "tool_references": [reference("get")]},
        },
    ]
    call, found = used("a", "get")
    call["content"] = [*searched, *call["content"]]
    assert view(TASK, call, found).marks.needed == set(), "they stay or go together"
    assert view(TASK, call, found, *used("b", "get")).marks.needed == {1}


@pytest.mark.parametrize(
    "odd", [{"type": "tool_reference"}, {"type": "tool_reference", "tool_name": 7}, "get", 7, None]
)
def test_invalid_reference_loads_nothing(odd: Any) -> None:
    search, found = used("s", "ToolSearch")
    for content in ([odd], {"tool_references": [odd]}, {"tool_references": odd}):
        found["content"][0]["content"] = content
        assert view(TASK, search, found, *used("a", "get")).marks.needed == set()


def test_thinking_seals_its_message() -> None:
    raws = view(TASK, CALLS, ANSWERS).messages
    assert outline_of(raws[1]).sealed
    assert not outline_of(raws[3]).sealed


def test_cache_marks_are_kept_on_their_messages() -> None:
    raws = view(TASK, CALLS, ANSWERS).messages
    assert [without_cache_marks(raw) != raw for raw in raws] == [False, False, False, True, False]


def test_changed_result_keeps_the_other_fields_of_its_block() -> None:
    found = view(TASK, CALLS, ANSWERS)
    sent = restored(found, {2: {"role": "tool", "content": "short"}})
    assert sent[2]["content"] == [{**ANSWERS["content"][0], "content": "short"}, *ANSWERS["content"][1:]]
    assert sent[:2] == [TASK, CALLS]


def test_rest_of_a_partly_dropped_message_stays() -> None:
    sent = restored(view(TASK, CALLS, ANSWERS), {1: None, 2: None, 3: None})
    assert sent == [TASK, {"role": "user", "content": [ANSWERS["content"][2]]}]


def test_words_between_kept_calls_are_changed() -> None:
    calls = {"role": "assistant", "content": [*CALLS["content"][1:]], "id": "msg_1"}
    found = view(TASK, calls, ANSWERS)
    parts = [{"type": "text", "text": "[...]"}, {"type": "text", "text": "look"}]
    sent = restored(found, {1: {**seen(found)[1], "content": parts}})
    assert sent[1] == {"role": "assistant", "content": [*parts, *CALLS["content"][2:]], "id": "msg_1"}


def test_empty_text_blocks_are_not_written() -> None:
    found = view(TASK, CALLS, {**ANSWERS, "content": ANSWERS["content"][:2]}, {"role": "assistant", "content": "Done."})
    sent = restored(found, {4: {"role": "assistant", "content": " "}})
    assert sent[3] == {"role": "assistant", "content": "Done."}, "nothing would be left of it"


def test_calls_of_two_messages_with_joint_results_are_one_unit() -> None:
    first, second = ({"role": "assistant", "content": [CALLS["content"][place]]} for place in (2, 3))
    found = view(TASK, first, second, ANSWERS)
    assert found.places[:2] == ((0,), (1, 2))
    assert restored(found, {1: None, 2: None, 3: None}) == [
        TASK,
        {"role": "user", "content": [ANSWERS["content"][2]]},
    ]
    assert restored(found, {1: {"role": "assistant", "content": "x"}})[1:3] == [first, second]


def test_calls_and_results_with_words_between_are_one_unit() -> None:
    block = {"type": "text", "text": "Be quick."}
    words: Json = {"role": "user", "content": [block]}
    results: Json = {"role": "user", "content": [*told(0)["content"], *told(1)["content"]]}
    for between, places in (
        ([words, words, results], [(1,), (4,), (4,)]),
        ([told(0), words, told(1)], [(1,), (2,), (4,)]),
        ([told(0, block), told(1)], [(1,), (2,), (3,)]),
    ):
        found = view(TASK, {"role": "assistant", "content": [use(0), use(1)]}, *between, SAID, TASK)
        conversation = Conversation.of(found.messages, pinned=found.marks.held)
        unit = next(unit for unit in conversation.units if found.places[unit.start] == (1,))
        assert [found.places[index] for index in unit.indices] == places
        left = restored(found, dict.fromkeys(unit.indices))
        assert left == [TASK, *(words for one in between if block in one["content"]), SAID, TASK]


def asks(name: str, *behind: Json) -> Json:
    server = {"type": "server_tool_use", "id": name, "name": "code_execution", "input": {}}
    return {"role": "assistant", "content": [{"type": "text", "text": "I ask."}, server, *behind]}


def serves(name: str, *behind: Json, kind: str = "code_execution") -> Json:
    result = {"type": f"{kind}_tool_result", "tool_use_id": name, "content": []}
    return {"role": "assistant", "content": [result, *behind]}


def called(number: int, by: str) -> Json:
    """Return a call that server code makes while it runs."""
    return {**use(number), "caller": {"type": "code_execution_20250825", "tool_id": by}}


def assert_is_one_unit(*elements: Json) -> None:
    """Check that all elements between the first and the last, which are user messages, are one unit."""
    found = view(*elements)
    conversation = Conversation.of(found.messages, pinned=found.marks.held)
    unit = next(unit for unit in conversation.units if found.places[unit.start][0] == 1)
    assert not unit.pinned
    assert restored(found, dict.fromkeys(unit.indices)) == [elements[0], elements[-1]]


def test_server_call_and_its_later_result_are_one_unit() -> None:
    assert_is_one_unit(TASK, asks("s", called(0, "s")), told(0), serves("s"), TASK)
    assert_is_one_unit(TASK, asks("s", use(0)), told(0), serves("s", kind="advisor"), TASK)
    assert_is_one_unit(TASK, asks("s"), serves("s", kind="web_search"), TASK)
    loop = [
        asks("s", called(0, "s")),
        told(0),
        {"role": "assistant", "content": [called(1, "s")]},
        told(1),
        serves("s"),
    ]
    assert_is_one_unit(TASK, *loop, TASK)
    mcp = {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "x", "input": {}}
    assert_is_one_unit(TASK, {"role": "assistant", "content": [mcp]}, SAID, serves("m", kind="mcp"), TASK)
    shared = [asks("s", use(0)), told(0), serves("s", *asks("t")["content"]), serves("t")]
    assert_is_one_unit(TASK, *shared, TASK)


def test_message_with_many_server_calls_is_parsed_in_time() -> None:
    blocks = [
        block
        for number in range(50_000)
        for block in (
            {"type": "mcp_tool_use", "id": f"t{number}"},
            {"type": "mcp_tool_result", "tool_use_id": f"t{number}"},
        )
    ]
    message = encode({"role": "assistant", "content": blocks})
    with in_time():
        assert len(view_of("messages", [message]).messages) == 1


def test_results_between_a_server_call_and_its_result_can_be_changed() -> None:
    elements = [TASK, asks("s", called(0, "s")), told(0, {"type": "text", "text": "And?"}), serves("s"), TASK]
    found = view(*elements)
    assert [one["role"] for one in seen(found)] == ["user", "assistant", "tool", "user", "user"]
    assert found.places == ((0,), (1, 3), (2,), (2,), (4,))
    sent = restored(found, {2: {"role": "tool", "content": "short"}})
    assert sent[2]["content"] == [{**told(0)["content"][0], "content": "short"}, {"type": "text", "text": "And?"}]
    assert [sent[place] for place in (0, 1, 3, 4)] == [elements[place] for place in (0, 1, 3, 4)]
    assert restored(found, {1: None, 2: None}) == [TASK, {"role": "user", "content": elements[2]["content"][1:]}, TASK]


def test_results_read_by_code_are_never_changed() -> None:
    for loop in ([asks("s", called(0, "s"))], [asks("s"), {"role": "assistant", "content": [called(0, "s")]}]):
        for rest in ([], [serves("s"), TASK]):
            found = view(TASK, *loop, told(0), *rest)
            results = [raw for raw in found.messages if json.loads(raw)["role"] == "tool"]
            assert [outline_of(raw).sealed for raw in results] == [True]
    assert not outline_of(view(TASK, asks("s", use(0)), told(0), serves("s"), TASK).messages[2]).sealed
    rows = json.dumps([{"id": number, "name": "a row"} for number in range(50)])
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0", "content": rows}]}
    for call, is_shown in ((called(0, "s"), False), (use(0), True)):
        shown = show(view(TASK, asks("s", {**call, "id": "c0"}), result).messages[2], "table", str)
        assert (shown is not None) is is_shown


def test_same_id_in_another_turn_joins_nothing() -> None:
    both = asks("s", *serves("s")["content"])
    assert view(TASK, both, TASK, both, TASK).places == ((0,), (1,), (2,), (3,), (4,))
    again = view(TASK, asks("s"), serves("s"), TASK, asks("s"), serves("s"), TASK)
    assert again.places == ((0,), (1, 2), (3,), (4, 5), (6,))


def test_unfinished_server_call_is_held() -> None:
    loop = [asks("s", called(0, "s")), told(0, {"type": "text", "text": "And?"})]
    more = [{"role": "assistant", "content": [called(1, "s")]}, told(1)]
    assert held(TASK, SAID, TASK, *loop, *more) == {2, 3, 5}
    conversation = Conversation.of(view(TASK, SAID, TASK, *loop, *more).messages, pinned={3})
    assert [unit.indices for unit in conversation.units][3:] == [range(3, 6), range(6, 7)], "with all their results"
    assert held(TASK, *loop, SAID, TASK) == set()


def test_neighbors_of_an_unparsable_message_with_calls_are_held() -> None:
    turn = [TASK, using(0), told(0)]
    calls, results = ([encode(one) for one in turn * 3] for _ in range(2))
    calls[4] = calls[4].replace(b'"input":{}', b'"input":{"a":1,"a":2}')
    results[5] = results[5].replace(b'"type":"tool_result"', b'"type":"tool_result","x":"\\ud83d"')
    for raws in (calls, results):
        found = view_of("messages", raws)
        assert {place for index in found.marks.held for place in found.places[index]} >= {4, 5}
        assert not found.marks.held & found.indices({1, 2, 7})
        gone = dict.fromkeys(set(range(len(found.messages))) - found.marks.held - found.indices({0, 6, 7, 8}))
        assert new_faults("messages", raws, found.restored(gone)) == []
    words = [encode(one) for one in (TASK, SAID, TASK)]
    words[1] = words[1].replace(b'"content"', b'"x":"\\ud83d","content"')
    assert view_of("messages", words).marks.held == frozenset()


def test_server_call_with_result_in_an_unparsable_message_is_held() -> None:
    odd = encode(serves("s")).replace(b'"content":[]', b'"content":[],"content":[]')
    found = view_of("messages", [encode(TASK), encode(asks("s")), odd, encode(TASK)])
    assert found.marks.held == {1}
    found = view_of("messages", [encode(TASK), odd.replace(b"code_execution_tool_result", b"x"), encode(TASK)])
    assert found.marks.held == frozenset()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"system","content":[{"type":"text","text":"x"}]}',
        b'{"role":"user","content":null}',
        b'{"role":"user","content":["x"]}',
        b'{"role":"user","content":[{"type":"text","text":"x","text":"y"}]}',
        b"[]",
        b"nonsense",
    ],
)
def test_unknown_elements_stay_unchanged(raw: bytes) -> None:
    found = view_of("messages", [encode(TASK), raw])
    assert not outline_of(found.messages[1]).is_known
    assert found.restored({}).raws == (encode(TASK), raw)


def test_summary_is_a_user_message() -> None:
    found = view(TASK, CALLS, {**ANSWERS, "content": ANSWERS["content"][:2]}, CALLS)
    told = encode({"role": "assistant", "content": "[summary of 3 earlier messages]\nAll was well."})
    sent = found.restored({1: told, 2: None, 3: None}, {1}).raws
    assert json.loads(sent[1]) == {"role": "user", "content": "[summary of 3 earlier messages]\nAll was well."}
    assert len(sent) == 3


def thinking(number: int) -> Json:
    """Return a message of an agent loop that starts with thinking."""
    return {"role": "assistant", "content": [CALLS["content"][0], use(number)]}


def use(number: int) -> Json:
    return {"type": "tool_use", "id": f"t{number}", "name": "search", "input": {}}


def using(number: int) -> Json:
    return {"role": "assistant", "content": [use(number)]}


def told(number: int, *behind: Json) -> Json:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "x"}, *behind]}


def held(*elements: Json) -> set[int]:
    """Return the indices of elements that must stay."""
    found = view(*elements)
    return {place for index in found.marks.held | found.marks.undroppable for place in found.places[index]}


SAID: Json = {"role": "assistant", "content": "Done."}


def test_thinking_at_the_start_of_the_last_turn_is_held() -> None:
    loop = [thinking(0), told(0), using(1), told(1), using(2), told(2)]
    assert held(TASK, *loop) == {1}
    assert held(TASK, *loop, SAID, TASK) == set()
    assert held(TASK, *loop, SAID, TASK, thinking(3), told(3), using(4), told(4)) == {9}
    assert held(TASK, thinking(0), told(0), thinking(1), told(1)) == set(), "so does what is left without the first"
    assert held(TASK, using(0), told(0), thinking(1), told(1)) == set(), "it is no thinking that it began with"


def test_words_next_to_results_may_or_may_not_start_a_turn() -> None:
    words = {"type": "text", "text": "And be quick."}
    assert held(TASK, thinking(0), told(0, words), thinking(1), told(1), using(2), told(2)) == {0, 1, 3}
    assert held(TASK, thinking(0), told(0, words), using(1), told(1), using(2), told(2)) == {0, 1}
    assert held(TASK, thinking(0), told(0, words), thinking(1), told(1), thinking(2), told(2)) == {0}


def test_task_is_held_if_later_words_are_next_to_results() -> None:
    reminder = {"type": "text", "text": "<system-reminder>The list is empty.</system-reminder>"}
    loop = [using(0), told(0, reminder), using(1), told(1, reminder)]
    assert held(SAID, TASK, *loop) == {1, 4}, "and the call whose result was not read yet"
    assert held(TASK, using(0), told(0), SAID, TASK, *loop) == {4, 7}
    assert held(TASK, *loop, SAID, TASK) == set(), "the last words of all stand alone"
    assert held(*loop) == {2}


@pytest.mark.parametrize("kind", ["thinking", "redacted_thinking"])
def test_thinking_of_either_kind_is_held(kind: str) -> None:
    first = {"role": "assistant", "content": [{"type": kind, "data": "eA=="}, use(0)]}
    assert held(TASK, first, told(0), using(1), told(1)) == {1}


def test_gap_mark_is_an_assistant_message() -> None:
    talk = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}
    found = view(TASK, talk, {"role": "user", "content": "And now?"})
    mark = {"role": "assistant", "content": "[...]"}
    assert [json.loads(raw) for raw in found.restored({1: encode(mark)}, {1}).raws][1] == mark


def test_summary_inside_a_thinking_turn_is_an_assistant_message() -> None:
    found = view(TASK, thinking(0), told(0), using(1), told(1), using(2), told(2))
    short = encode({"role": "assistant", "content": "[summary]"})
    sent = found.restored({3: short, 4: None}, {3}).raws
    assert json.loads(sent[3]) == {"role": "assistant", "content": "[summary]"}
    assert new_faults("messages", found.elements, sent) == []
    before = view(TASK, thinking(0), told(0), using(1), told(1), TASK, thinking(2), told(2))
    assert json.loads(before.restored({1: short, 2: None}, {1}).raws[1])["role"] == "user"
    another = view(TASK, thinking(0), told(0), TASK, using(1), told(1), using(2), told(2))
    assert json.loads(another.restored({4: short, 5: None}, {4}).raws[4])["role"] == "user"
    words = {"type": "text", "text": "And be quick."}
    overhead = view(TASK, thinking(0), told(0, words), using(1), told(1), using(2), told(2))
    sent = overhead.restored({4: short, 5: None}, {4}).raws
    assert json.loads(sent[3])["role"] == "assistant"
    assert new_faults("messages", overhead.elements, sent) == []


def test_summary_before_thinking_is_a_user_message() -> None:
    elements = [TASK, thinking(0), told(0), using(1), told(1), thinking(2), told(2)]
    short = encode({"role": "assistant", "content": "[summary]"})
    for before, gone in ((elements, (3, 4)), ([*elements[:5], NOTE, *elements[5:]], (3, 4))):
        found = view(*before)
        sent = found.restored(dict.fromkeys(gone) | {gone[0]: short}, {gone[0]}).raws
        assert [json.loads(raw)["role"] for raw in sent[2:4]] == ["user", "user"]
        assert json.loads(sent[3])["content"] == "[summary]"
        assert json.loads(sent[-2]) == thinking(2)
        assert new_faults("messages", found.elements, sent) == []


NUMBERS = b'{"n":[1E5,1.10,-0.0,3.14159265358979323846264338327950288],"t":"\\u30a8\\/"}'


@pytest.mark.parametrize("is_followed", [False, True])
def test_call_arguments_keep_the_spelling_of_numbers(is_followed: bool) -> None:
    asked = NUMBERS.replace(b",", b" , ")
    call = b'{"type":"tool_use","id":"t0","name":"f","input":' + asked + b"}"
    said = b'{"role":"assistant","content":[{"type":"text","text":"a"},' + call + b"]}"
    more = b'{"role":"assistant","content":[' + call.replace(b"t0", b"t1") + b"]}"
    found = view_of("messages", [encode(TASK), said, *([more] if is_followed else []), encode(told(0))])
    told_of = [one["function"]["arguments"] for one in seen(found)[1]["tool_calls"]]
    assert told_of == [NUMBERS.decode().replace("\\u30a8\\/", "エ/")] * (1 + is_followed)


def test_unchanged_parts_next_to_a_change_keep_their_bytes() -> None:
    text, more = b'{"type":"text","text":"\\u30a8 long"}', b'{"type":"text","citations":null,"text":"\\u30a8"}'
    call = b'{"type":"tool_use","id":"t0","name":"f","input":' + NUMBERS + b"}"
    said = b'{"role": "assistant", "x": ' + NUMBERS + b', "content": [' + b", ".join([text, call, more]) + b"]}"
    found = view_of("messages", [encode(TASK), said, encode(told(0)), encode(TASK)])
    parts = [{"type": "text", "text": "short"}, {"type": "text", "text": "エ"}]
    sent = found.restored({1: encode({**seen(found)[1], "content": parts})}).raws
    content = b",".join([b'{"type":"text","text":"short"}', more, call])
    assert sent[1] == b'{"role":"assistant","x":' + NUMBERS + b',"content":[' + content + b"]}"


def test_changed_result_keeps_the_bytes_of_its_other_parts() -> None:
    image = b'{"type":"image","source":' + NUMBERS + b"}"
    start = b'{"type":"tool_result","x":' + NUMBERS + b',"tool_use_id":"t0","content":'
    parts = b'[{"type":"text","text":"long"},' + image + b',{"type":"text","text":"\\u30a8"}]'
    told_so = b'{"role":"user","content":[' + start + parts + b"}]}"
    found = view_of("messages", [encode(TASK), encode(using(0)), told_so, encode(TASK)])
    form = seen(found)[2]
    form["content"][0]["text"] = "short"
    assert found.restored({2: encode(form)}).raws[2] == told_so.replace(b'"long"', b'"short"')
    whole = found.restored({2: encode({**form, "content": "x"})}).raws[2]
    assert whole == b'{"role":"user","content":[' + start + b'"x"}]}'


def test_shortened_arguments_are_written_into_their_call() -> None:
    call = b'{"type":"tool_use","x":' + NUMBERS + b',"input":' + NUMBERS + b',"id":"t0","name":"f"}'
    same = call.replace(b"t0", b"t1")
    said = b'{"role":"assistant","content":[{"type": "text", "text": "a"},' + call + b"," + same + b"]}"
    answers: Json = {"role": "user", "content": [*told(0)["content"], *told(1)["content"]]}
    found = view_of("messages", [encode(TASK), said, encode(answers), encode(TASK)])
    form = seen(found)[1]
    form["tool_calls"][0]["function"]["arguments"] = '{"t":"[...]"}'
    cut = said.replace(b'"input":' + NUMBERS, b'"input":{"t":"[...]"}', 1)
    assert found.restored({1: encode(form)}).raws[1] == cut


def test_emptied_text_is_not_sent_with_its_call() -> None:
    said: Json = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *using(0)["content"]]}
    found = view_of("messages", [encode(one) for one in (TASK, said, told(0), TASK)])
    form = seen(found)[1] | {"content": [{"type": "text", "text": "[...]"}]}
    assert json.loads(found.restored({1: encode(form)}).raws[1])["content"] == using(0)["content"]


def test_merged_system_messages_keep_their_bytes() -> None:
    odd = b'{"role":"system","x":1E5,"content":[{"type":"text","text":"\\u30a8"}]}'
    found = view_of("messages", [encode(one) for one in (TASK, NOTE, SAID, TASK)] + [odd, encode(SAID), encode(TASK)])
    both = b'{"role":"system","x":1E5,"content":[{"type":"text","text":"Be quick."},{"type":"text","text":"\\u30a8"}]}'
    assert found.restored({2: None}).raws[2] == both


NOTE: Json = {"role": "system", "content": "Be quick."}
OTHER: Json = {"role": "system", "content": [{"type": "text", "text": "Be slow."}]}


@pytest.mark.parametrize("gone", [{2, 3}, {5}, {2, 3, 5}])
def test_system_message_stays_between_user_and_assistant(gone: set[int]) -> None:
    elements = [TASK, SAID, using(0), told(0), NOTE, SAID, {"role": "user", "content": "Go on."}, using(1), told(1)]
    found = view(*elements)
    sent = restored(found, dict.fromkeys(gone))
    assert NOTE in sent
    assert new_faults("messages", found.elements, [encode(one) for one in sent]) == []
    assert [one for one in sent if one != NOTE] == [
        one for place, one in enumerate(elements) if place not in gone and one != NOTE
    ]


def test_neighboring_system_messages_are_merged() -> None:
    found = view(TASK, NOTE, SAID, {"role": "user", "content": "Go on."}, OTHER, SAID, TASK)
    both = {"role": "system", "content": [{"type": "text", "text": "Be quick."}, *OTHER["content"]]}
    assert restored(found, {2: None}) == [TASK, {"role": "user", "content": "Go on."}, both, SAID, TASK]
    assert restored(found, {2: None, 5: None})[-1] == both


def test_message_before_the_last_system_message_is_held() -> None:
    assert held(TASK, using(0), told(0), NOTE) == {2}
    assert held(TASK, using(0), told(0), NOTE, SAID) == set()


@pytest.mark.parametrize(
    "note",
    [
        {"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "search"}}]},
        {"role": "system", "content": [{"type": "text", "text": "x"}, {"type": "tool_addition"}]},
        {"role": "system", "content": None},
    ],
)
def test_neighbors_of_immovable_instructions_are_held(note: Json) -> None:
    assert held(TASK, using(0), told(0), note, using(1), told(1), TASK) == {2, 3, 4}


def test_system_message_merges_with_immovable_instructions() -> None:
    note = {"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "search"}}]}
    found = view(TASK, NOTE, SAID, {"role": "user", "content": "Go on."}, note, SAID, TASK)
    both = {"role": "system", "content": [{"type": "text", "text": "Be quick."}, *note["content"]]}
    assert restored(found, {2: None})[2:] == [both, SAID, TASK]


def changing(**tools: str) -> Json:
    blocks = [
        {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}} for name, kind in tools.items()
    ]
    return {"role": "system", "content": blocks}


def test_withdrawn_tools_stay_withdrawn_if_neighbors_are_dropped() -> None:
    first, second = changing(read="removal", run="removal"), changing(read="addition", edit="removal")
    elements = [TASK, using(0), told(0), first, using(1), told(1), second, using(2), told(2), SAID, TASK]
    assert held(*elements) == set()
    found = view(*elements)
    sent = restored(found, dict.fromkeys([1, 2, 4, 5]))
    assert changing(run="removal", read="addition", edit="removal") in sent
    assert new_faults("messages", found.elements, [encode(one) for one in sent]) == []


def test_system_messages_at_unknown_positions_are_not_moved() -> None:
    server = {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "f", "input": {}}]}
    elements = [TASK, server, NOTE, SAID, TASK]
    assert held(*elements) == {1, 2, 3}
    assert restored(view(*elements), {0: None}) == elements[1:]


def test_instructions_inside_user_messages_are_held() -> None:
    note = {"type": "mid_conv_system", "content": [{"type": "text", "text": "Never delete."}]}
    found = view(TASK, using(0), told(0, note), SAID, TASK)
    assert found.marks.held == {3}, "the words, and not the results beside them"


def test_last_compaction_stays_and_messages_before_it_count_nothing() -> None:
    compact = {"role": "assistant", "content": [{"type": "compaction", "content": "All was well."}]}
    found = view(TASK, compact, TASK, using(0), told(0), compact, TASK, using(1), told(1))
    assert found.marks.held == {5}
    assert found.messages[:5] == (IGNORED,) * 5
    assert IGNORED not in found.messages[5:]
    assert found.elements[:5] == found.restored(dict.fromkeys(range(6, 9))).raws[:5], "they are sent as they came"
    assert IGNORED not in view(TASK, SAID).messages


def test_messages_after_a_signed_compaction_are_bound_up_to_the_last_thinking() -> None:
    block = {"type": "compaction", "content": "All was well.", "signature": "c2ln"}
    signed = {"role": "assistant", "content": [block]}
    kept = [signed, TASK, CALLS, ANSWERS, SAID, TASK]
    assert view(*kept).marks.bound == {1, 2}
    assert view(*kept).marks.held >= {0}
    assert view(*kept, CALLS, ANSWERS).marks.bound == set(range(1, 9)), (
        "results and words of ANSWERS are three messages"
    )
    assert view(signed, TASK, SAID, TASK).marks.bound == frozenset(), "without thinking nothing is bound"
    unsigned = {"role": "assistant", "content": [{"type": "compaction", "content": "All was well."}]}
    failed = {"role": "assistant", "content": [{**block, "content": None}]}
    assert view(TASK, unsigned, *kept[1:]).marks.bound == frozenset()
    assert view(TASK, failed, *kept[1:]).marks.bound == frozenset(), (
        "the provider takes no notice of a failed compaction"
    )


@pytest.mark.parametrize("block", [{"signature": "c2ln"}, {"encrypted_content": "b3BhcXVl"}, {}])
def test_compaction_block_keeps_its_bytes_in_a_trim(block: Json) -> None:
    compact = (
        b'{"role":"assistant","content":[{ "content" : "All was w\\u00e8ll.","type":"compaction"%b }]}'
        % b"".join(b',"%b" : "%b"' % (name.encode(), value.encode()) for name, value in block.items())
    )
    raws = [compact, *(encode(one) for one in (TASK, using(0), told(0), SAID, TASK))]
    found = view_of("messages", raws)
    conversation = Conversation.of(found.messages, pinned=found.marks.held)
    gone = dict.fromkeys(index for unit in conversation.units if not unit.pinned for index in unit.indices)
    assert gone
    assert found.restored(gone).raws[0] == compact


def test_failed_compaction_replaces_nothing() -> None:
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    found = view(TASK, using(0), told(0), failed, TASK)
    assert IGNORED not in found.messages
