"""Test the view of Responses items as chat messages, case by case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.core.conversation.message import encode, outline_of
from gateway.core.conversation.units import Conversation
from gateway.core.counting.cache import CountCache
from gateway.core.views import new_faults, view_of
from gateway.core.views.view import View

Json = dict[str, Any]


def view(*elements: Json) -> View:
    return view_of("responses", [encode(element) for element in elements])


def seen(found: View) -> list[Json]:
    return [json.loads(raw) for raw in found.messages]


def restored(found: View, changes: Mapping[int, Json | None]) -> list[Json]:
    written = {index: None if form is None else encode(form) for index, form in changes.items()}
    return [json.loads(raw) for raw in found.restored(written).raws]


def call(name: str) -> Json:
    return {"type": "function_call", "call_id": name, "name": "search", "arguments": "{}", "id": f"fc_{name}"}


def output(name: str, said: Any = "found") -> Json:
    return {"type": "function_call_output", "call_id": name, "output": said}


def thought(name: str) -> Json:
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "encrypted_content": "Z2VoZWlt"}


TASK = {"role": "user", "content": [{"type": "input_text", "text": "Find it."}]}
NEXT = {"role": "user", "content": "And now?"}


def test_parallel_calls_are_one_message_and_their_results_follow() -> None:
    found = view(TASK, call("a"), call("b"), output("b"), output("a"), NEXT)
    assert found.places == ((0,), (1, 2), (3,), (4,), (5,))
    assert [one["role"] for one in seen(found)] == ["user", "assistant", "tool", "tool", "user"]
    assert seen(found)[0]["content"] == [{"type": "text", "text": "Find it."}]


def loaded(name: str | None, *tools: Json) -> list[Json]:
    execution = "client" if name is not None else "server"
    return [
        {"type": "tool_search_call", "call_id": name, "execution": execution, "arguments": {}, "status": "completed"},
        {"type": "tool_search_output", "call_id": name, "execution": execution, "tools": [*tools]},
    ]


SEARCH: Json = {"type": "function", "name": "search", "defer_loading": True, "parameters": {}}
SPACE: Json = {"type": "namespace", "name": "crm", "tools": [SEARCH]}


@pytest.mark.parametrize(
    ("tool", "use", "is_needed"),
    [
        (SEARCH, call("a"), True),
        (SPACE, {**call("a"), "namespace": "crm"}, True),
        (SPACE, call("a"), True),
        (SPACE, {**call("a"), "namespace": "erp"}, False),
        ({**SEARCH, "name": "other"}, call("a"), False),
        ({"type": "mcp", "server_label": "docs"}, {"type": "mcp_call", "server_label": "docs", "name": "ask"}, True),
        ({"name": 7, "tools": 7}, call("a"), False),
    ],
)
def test_message_that_loaded_a_tool_is_needed_by_its_calls(tool: Json, use: Json, *, is_needed: bool) -> None:
    of_client = view(TASK, *loaded("s", tool), NEXT, use, output("a"))
    assert of_client.marks.needed == ({2} if is_needed else set())
    of_server = view(TASK, *loaded(None, tool), call("b"), output("b"), NEXT, use, output("a"))
    assert of_server.marks.needed == ({1} if is_needed else set())
    assert view(TASK, use, output("a"), NEXT, *loaded("s", tool)).marks.needed == set()


def test_reasoning_stays_with_the_items_it_led_to() -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": "I look."}],
    }
    found = view(TASK, thought("1"), said, call("a"), output("a"), thought("2"), said, NEXT)
    assert found.places == ((0,), (1, 2, 3), (4,), (5, 6), (7,))
    assert [outline_of(raw).sealed for raw in found.messages] == [False, True, False, True, False]
    assert restored(found, {1: None, 2: None}) == [TASK, thought("2"), said, NEXT]


def test_results_after_other_calls_are_matched() -> None:
    found = view(TASK, thought("1"), call("a"), thought("2"), call("b"), output("a"), output("b"), NEXT)
    assert found.places == ((0,), (1, 2), (5,), (3, 4), (6,), (7,))
    assert restored(found, {1: None, 2: None}) == [TASK, thought("2"), call("b"), output("b"), NEXT]


def test_calls_after_a_result_start_a_new_message() -> None:
    found = view(TASK, call("a"), output("a"), call("b"), output("b"), NEXT)
    assert found.places == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_results_at_the_end_of_the_input_are_held() -> None:
    found = view(TASK, call("a"), call("b"), output("a"), output("b"))
    assert found.marks.held == {2, 3}
    assert view(TASK, call("a"), output("a"), NEXT).marks.held == frozenset()


def test_result_of_a_call_stored_by_the_provider_is_held() -> None:
    found = view(output("a"), NEXT, call("b"), output("b"), NEXT)
    assert found.marks.held == {0}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"type": "compaction_trigger"},
        {"id": "msg_1"},
        {"type": "something_new", "call_id": "a"},
        {"type": "function_call", "name": "no_id"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": None},
        {"type": 3},
    ],
)
def test_unknown_items_are_unchanged_and_held(item: Json) -> None:
    found = view(TASK, item, NEXT)
    assert not outline_of(found.messages[1]).is_known
    assert found.marks.held == {1}


def test_items_that_cannot_be_written_again_are_unchanged() -> None:
    odd = b'{"role":"user","content":[{"type":"input_text","text":"x"}],"role":"user"}'
    found = view_of("responses", [odd, encode(NEXT)])
    assert not outline_of(found.messages[0]).is_known
    assert found.restored({}).raws == (odd, encode(NEXT))


def test_changed_texts_have_the_types_of_responses() -> None:
    said = {"role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "long", "annotations": []}]}
    found = view(
        TASK, said, call("a"), output("a", [{"type": "input_text", "text": "long"}]), call("b"), output("b"), NEXT
    )
    short = [{"type": "text", "text": "short"}]
    sent = restored(found, {index: {"role": "x", "content": short} for index in (0, 1, 2)} | {4: {"content": "short"}})
    assert sent[0] == {"role": "user", "content": [{"type": "input_text", "text": "short"}]}
    assert sent[1] == {**said, "content": [{"type": "output_text", "text": "short", "annotations": []}]}
    assert sent[3] == output("a", [{"type": "input_text", "text": "short"}])
    assert sent[5] == output("b", "short")


def test_annotated_text_is_not_changed() -> None:
    note = {"type": "url_citation", "start_index": 0, "end_index": 4, "url": "https://example.com", "title": "x"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "long", "annotations": [note]}]}
    assert outline_of(view(TASK, said, NEXT).messages[1]).sealed


def test_calls_join_the_text_directly_before_them() -> None:
    part = {"type": "output_text", "text": "I look.", "annotations": []}
    said = {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}
    found = view(TASK, said, said, call("a"), call("b"), output("a"), output("b"), said, NEXT)
    assert found.places == ((0,), (1,), (2, 3, 4), (5,), (6,), (7,), (8,))
    both = seen(found)[2]
    assert [one["id"] for one in both.pop("tool_calls")] == ["a", "b"]
    assert both == {**said, "content": [{"type": "text", "text": "I look."}]}
    short = {"role": "assistant", "content": [{"type": "text", "text": "short"}]}
    assert restored(found, {2: short})[2:5] == [{**said, "content": [{**part, "text": "short"}]}, call("a"), call("b")]
    assert restored(found, {2: None, 3: None, 4: None}) == [TASK, said, said, NEXT]


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "[...]"}]])
def test_emptied_text_is_not_sent_with_its_calls(content: Any) -> None:
    said = {"role": "assistant", "content": "I look." if content is None else [{"type": "output_text", "text": "Yes"}]}
    found = view(TASK, said, call("a"), output("a"), NEXT)
    assert restored(found, {1: {**seen(found)[1], "content": content}}) == [TASK, call("a"), output("a"), NEXT]


@pytest.mark.parametrize("odd", ["reasoning", "function_call", "function_call_output"])
def test_items_next_to_an_unparsable_item_are_held(odd: str) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "Z2VoZWlt"}
    raws = [encode(one) for name in "abc" for one in (NEXT, thought, call(name), output(name))]
    place = next(place for place in range(4, 8) if json.loads(raws[place]).get("type") == odd)
    raws[place] = raws[place].replace(b'"type":', b'"x":"\\ud83d","type":')
    found = view_of("responses", [*raws, encode(NEXT)])
    units = Conversation.of(found.messages, pinned=found.marks.held).units
    gone = dict.fromkeys(index for unit in units if not unit.pinned for index in unit.indices)
    assert found.indices({1, 2, 3, 9, 10, 11}) <= gone.keys()
    sent = found.restored(gone).raws
    assert raws[place] in sent
    assert new_faults("responses", raws, sent) == []


def test_sealed_text_before_calls_is_a_separate_message() -> None:
    note = {"type": "url_citation", "start_index": 0, "end_index": 4, "url": "https://example.com", "title": "x"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "long", "annotations": [note]}]}
    assert view(TASK, said, call("a"), output("a"), NEXT).places == ((0,), (1,), (2,), (3,), (4,))
    odd = b'{"role":"assistant","content":"long","role":"assistant"}'
    raws = [encode(TASK), odd, encode(call("a")), encode(output("a")), encode(NEXT)]
    assert view_of("responses", raws).places == ((0,), (1,), (2,), (3,), (4,))


def test_call_of_a_stored_program_does_not_join_a_text() -> None:
    said = {"role": "assistant", "content": "I look."}
    assert held(TASK, said, coded(call("a")), output("a"), NEXT) == {2}


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_shortened_arguments_are_written_into_their_call(kind: str) -> None:
    name, original, cut = (
        ("arguments", '{"n": 1.10, "t": "long"}', '{"n":1.10,"t":"[...]"}')
        if kind == "function_call"
        else ("input", "long", "[...]")
    )
    called = {"type": kind, "call_id": "a", "name": "f", name: original, "id": "fc_1"}
    same = {**called, "call_id": "b"}
    answers = [{"type": f"{kind}_output", "call_id": one, "output": "done"} for one in "ab"]
    said = {"role": "assistant", "content": "I look."}
    found = view(TASK, said, called, same, *answers, NEXT)
    form = seen(found)[1]
    form["tool_calls"][0]["function"]["arguments"] = cut if kind == "function_call" else '{"input":"[...]"}'
    assert restored(found, {1: form}) == [TASK, said, {**called, name: cut}, same, *answers, NEXT]


@pytest.mark.parametrize("kind", ["shell_call", "local_shell_call", "apply_patch_call", "computer_call"])
def test_calls_with_fixed_arguments_are_not_shortened(kind: str) -> None:
    called = {"type": kind, "call_id": "a", "operation": {"type": "update_file", "diff": "long"}}
    found = view(TASK, called, {"type": f"{kind}_output", "call_id": "a", "output": "done"}, NEXT)
    assert outline_of(found.messages[1]).sealed


@pytest.mark.parametrize("kind", ["web_search_call", "code_interpreter_call", "mcp_call"])
def test_model_items_stay_with_the_text_of_the_model(kind: str) -> None:
    deed = {"type": kind, "id": "x_1", "status": "completed", "action": {"query": "q"}}
    said = {"role": "assistant", "content": "It is so."}
    found = view(TASK, deed, said, NEXT)
    assert found.places == ((0,), (1, 2), (3,))
    assert outline_of(found.messages[1]).sealed


def test_call_arguments_keep_the_spelling_of_numbers() -> None:
    called = b'{"type":"computer_call","call_id":"a","action":{"type":"wait", "seconds":1.10}}'
    output = {"type": "computer_call_output", "call_id": "a", "output": "done"}
    found = view_of("responses", [encode(TASK), called, encode(output), encode(NEXT)])
    (call,) = json.loads(found.messages[1])["tool_calls"]
    assert call["function"]["arguments"] == '{"action":{"type":"wait","seconds":1.10}}'


@pytest.mark.parametrize("kind", ["local_shell_call", "computer_call", "apply_patch_call", "tool_search_call"])
def test_other_client_calls_have_results(kind: str) -> None:
    result = kind.removesuffix("_call") + "_output" if kind == "tool_search_call" else f"{kind}_output"
    called = {"type": kind, "call_id": "a", "action": {"type": "exec"}}
    found = view(TASK, called, {"type": result, "call_id": "a", "output": {"image_url": "data:,"}}, NEXT)
    assert outline_of(found.messages[1]).calls == ("a",)
    assert outline_of(found.messages[2]).result_of == "a"
    assert outline_of(found.messages[2]).sealed


def test_summary_is_an_assistant_message() -> None:
    found = view(TASK, call("a"), output("a"), NEXT)
    told = encode({"role": "assistant", "content": "[summary of 2 earlier messages]\nAll was well."})
    sent = found.restored({1: told, 2: None}, {1}).raws
    assert [json.loads(raw) for raw in sent] == [TASK, json.loads(told), NEXT]


def named(name: str) -> Json:
    return {"type": "item_reference", "id": name}


def held(*elements: Json) -> set[int]:
    """Return the indices of elements that must stay."""
    found = view(*elements)
    return {place for index in found.marks.held for place in found.places[index]}


@pytest.mark.parametrize("reference", [named("rs_1"), {"id": "rs_1"}])
def test_referenced_reasoning_stays_with_the_items_it_led_to(reference: Json) -> None:
    said = {"type": "message", "role": "assistant", "id": "msg_1", "content": []}
    found = view(TASK, reference, call("a"), output("a"), reference, said, NEXT)
    assert found.places == ((0,), (1, 2), (3,), (4, 5), (6,))
    assert found.marks.held == frozenset()
    assert restored(found, {1: None, 2: None}) == [TASK, reference, said, NEXT]


def test_reasoning_stays_with_referenced_items() -> None:
    assert held(TASK, named("rs_1"), named("fc_1"), output("a"), NEXT) == {1, 2, 3}
    assert held(TASK, thought("1"), named("msg_1"), NEXT) == {1, 2}
    assert held(TASK, thought("1"), call("a"), named("fc_2"), output("a"), NEXT) == {3}, "the call came of it"


def test_item_after_a_reference_stays_with_it() -> None:
    said = {"role": "assistant", "content": "Done."}
    assert held(TASK, named("ws_1"), said, NEXT) == {1, 2}
    assert held(TASK, named("ws_1"), thought("1"), call("a"), output("a"), said, NEXT) == {1, 2, 3}
    assert held(TASK, named("msg_1"), NEXT, said, NEXT) == {1}
    assert held(TASK, named("fc_1"), output("b"), call("a"), output("a"), NEXT) == {1, 2}


def test_last_compaction_stays_and_the_items_before_it_are_stale() -> None:
    first, last = ({"type": "compaction", "id": one, "encrypted_content": "x"} for one in ("cmp_1", "cmp_2"))
    found = view(TASK, call("a"), output("a"), first, NEXT, last, call("b"), output("b"), NEXT)
    assert found.marks.held == {5}
    assert found.marks.stale == {0, 1, 2, 3, 4}
    assert all(outline_of(found.messages[index]).sealed for index in (3, 5))
    assert view(TASK, call("a"), last, output("a"), NEXT).marks.stale == {0}, "a call and its result are one"
    assert view(TASK, NEXT).marks.stale == frozenset()


def test_json_output_is_not_changed() -> None:
    called = {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}}
    found = view(TASK, called, {"type": "local_shell_call_output", "call_id": "a", "output": '{"stdout":"x"}'}, NEXT)
    assert outline_of(found.messages[2]).sealed


def test_local_shell_output_may_have_only_an_id() -> None:
    called = {"type": "local_shell_call", "id": "lsh_1", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}}
    for name in ("a", "lsh_1"):
        output = {"type": "local_shell_call_output", "id": name, "output": "{}"}
        found = view(TASK, called, output, NEXT)
        assert found.marks.held == frozenset()
        assert outline_of(found.messages[1]).calls == ("a",)
        assert outline_of(found.messages[2]).result_of == "a"
        assert restored(found, {1: None, 2: None}) == [TASK, NEXT]
    other = {"type": "local_shell_call_output", "id": "b", "output": "{}"}
    assert held(TASK, called, other, NEXT) == {2}
    both = {"type": "local_shell_call_output", "id": "b", "call_id": "a", "output": "{}"}
    assert held(TASK, called, both, NEXT) == set()


def test_calls_of_one_reasoning_stay_together_with_results_between() -> None:
    loop = [thought("1"), call("a"), output("a"), call("b"), output("b")]
    found = view(TASK, *loop, thought("2"), call("c"), output("c"), NEXT)
    assert found.places == ((0,), (1, 2), (3,), (4,), (5,), (6, 7), (8,), (9,))
    assert found.marks.following == {3}, "it stays or goes with the one before"
    assert [outline_of(raw).sealed for raw in found.messages[1:5]] == [True, False, True, False]
    assert restored(found, {2: {"role": "tool", "tool_call_id": "a", "content": "[...]"}})[3] == output("a", "[...]")
    longer = view(TASK, *loop, call("c"), output("c"))
    assert longer.marks.following == {3, 5}
    assert longer.messages[:5] == found.messages[:5], "what there was of it is as it was"
    said = {"role": "assistant", "content": "Done."}
    assert view(TASK, *loop[:3], said, *loop[3:], NEXT).places[3:6] == ((4, 5), (6,), (7,)), "another answer"


@pytest.mark.parametrize("kind", ["web_search_call", "code_interpreter_call", "mcp_call"])
def test_model_items_next_to_calls_stay_with_their_reasoning(kind: str) -> None:
    deed = {"type": kind, "id": "x_1", "status": "completed"}
    behind = [thought("2"), call("c"), output("c"), NEXT]
    found = view(TASK, thought("1"), call("a"), deed, output("a"), *behind)
    assert found.places == ((0,), (1, 2, 3), (4,), (5, 6), (7,), (8,))
    assert restored(found, dict.fromkeys((1, 2))) == [TASK, *behind]
    # each result directly after its call
    found = view(TASK, thought("1"), call("a"), output("a"), deed, *behind)
    assert found.places == ((0,), (1, 2), (3,), (4,), (5, 6), (7,), (8,))
    assert found.marks.following == {3}
    # without reasoning
    found = view(TASK, call("a"), output("a"), deed, call("c"), output("c"), NEXT)
    assert found.places == ((0,), (1,), (2,), (3, 4), (5,), (6,))


def test_calls_without_provider_id_are_separate() -> None:
    unnamed = {name: value for name, value in call("b").items() if name != "id"}
    found = view(TASK, thought("1"), call("a"), output("a"), unnamed, output("b"), NEXT)
    assert found.places == ((0,), (1, 2), (3,), (4,), (5,), (6,))


def test_unchanged_parts_next_to_a_change_keep_their_bytes() -> None:
    numbers = b'{"n":[1E5,1.10,-0.0],"t":"\\u30a8\\/"}'
    kept = b'{"type":"output_text","text":"\\u30a8","annotations":[],"logprobs":[]}'
    said = (
        b'{"type":"message","role":"assistant","id":"msg_1","x":' + numbers + b',"content":'
        b'[{"type":"output_text","text":"long","annotations":[]},' + kept + b"]}"
    )
    found = view_of("responses", [encode(TASK), said, encode(NEXT)])
    form = seen(found)[1]
    assert found.restored({1: encode(form)}).raws[1] == said
    form["content"][0]["text"] = "short"
    assert found.restored({1: encode(form)}).raws[1] == said.replace(b'"long"', b'"short"')
    told = b'{"type":"function_call_output","call_id":"a","x":' + numbers + b',"output":"long"}'
    found = view_of("responses", [encode(TASK), encode(call("a")), told, encode(NEXT)])
    sent = found.restored({2: encode({"role": "tool", "content": "short"})}).raws
    assert sent[2] == told.replace(b'"long"', b'"short"')


def coded(item: Json, by: str = "p") -> Json:
    return {**item, "caller": {"type": "program", "caller_id": by}}


PROGRAM: Json = {"type": "program", "id": "pr_1", "call_id": "p", "code": "await search()", "fingerprint": "f"}
RAN: Json = {"type": "program_output", "id": "po_1", "call_id": "p", "result": "2", "status": "completed"}


def test_program_is_kept_or_dropped_with_its_calls_and_output() -> None:
    ran = [thought("1"), PROGRAM, coded(call("a")), output("a"), coded(call("b")), coded(output("b")), RAN]
    said = {"role": "assistant", "content": "Two."}
    found = view(TASK, *ran, said, NEXT)
    assert found.places == ((0,), (1, 2, 3, 5, 7), (4,), (6,), (8,), (9,))
    assert found.marks.held == frozenset()
    assert restored(found, dict.fromkeys((1, 2, 3))) == [TASK, said, NEXT]
    without = [encode(item) for item in (TASK, *ran[2:], said, NEXT)]
    assert new_faults("responses", [encode(item) for item in (TASK, *ran, said, NEXT)], without)
    two = [PROGRAM, {**PROGRAM, "call_id": "q"}, coded(call("a"), "q"), output("a"), RAN, {**RAN, "call_id": "q"}]
    assert view(TASK, *two, NEXT).places == ((0,), (1, 2, 3, 5, 6), (4,), (7,))


def test_results_read_by_a_program_are_never_changed() -> None:
    for made, told in ((coded(call("a")), output("a")), (call("a"), coded(output("a")))):
        found = view(TASK, PROGRAM, made, told, NEXT)
        assert [outline_of(raw).sealed for raw in found.messages] == [False, True, True, False]
    assert not outline_of(view(TASK, PROGRAM, call("a"), output("a"), NEXT).messages[2]).sealed


def test_calls_of_a_stored_program_are_held() -> None:
    assert held(TASK, coded(call("a")), output("a"), NEXT) == {1}
    assert held(TASK, RAN, NEXT) == {1}
    unknown = view(TASK, coded(output("a")), NEXT)
    assert unknown.marks.held == {1}
    assert outline_of(unknown.messages[1]).sealed


def test_run_of_one_reasoning_before_a_compaction_is_stale() -> None:
    compaction = {"type": "compaction", "id": "cmp_1", "encrypted_content": "Z2VoZWlt"}
    loop = [thought("1"), call("a"), output("a"), call("b")]
    assert view(TASK, *loop, output("b"), compaction, NEXT).marks.stale == {0, 1, 2, 3, 4}
    assert view(TASK, *loop, compaction, output("b"), NEXT).marks.stale == {0}, "a part of it stands behind that"


def test_cached_call_of_another_request_does_not_change_binding() -> None:
    book = CountCache()
    alone = [encode(one) for one in ({"role": "user", "content": "Go."}, call("b"), output("b"))]
    bound = [encode(one) for one in ({"role": "user", "content": "Go."}, thought("1"), call("a"), output("a"))]
    bound += alone[1:]
    for elements in (alone, bound, alone):
        assert view_of("responses", elements, book).messages == view_of("responses", elements).messages
