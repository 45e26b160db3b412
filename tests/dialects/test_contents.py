from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import keys_of, without_cache_marks
from gateway.core.counting.measure import Wire
from gateway.core.counting.prefix_cache import CachedPrefix, PrefixCache
from gateway.core.counting.sums import MessageSums
from gateway.core.errors import InvalidRequest
from gateway.dialects.base import Call
from gateway.dialects.contents import MAX_MESSAGES, Contents, contents_of
from gateway.dialects.fields import read_fields
from gateway.dialects.server_state import references_to_stored

MARKED = b'{"role": "user", "cache_control": {"type": "ephemeral"}}'


def call(body: Any) -> Call:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call("chat", "m", stream=False, body=raw, fields=read_fields(raw))


def contents(body: Any, wire: Wire = "chat") -> Contents:
    found = contents_of(call(body), wire)
    assert found is not None
    return found


def test_messages_keep_their_bytes() -> None:
    odd = b'{"messages": [ {"role" :"user", "content":"\\u0041"} ,{"a":1.0e3}], "model":"m"}'
    assert contents(odd).messages == (b'{"role" :"user", "content":"\\u0041"}', b'{"a":1.0e3}')


@pytest.mark.parametrize(("wire", "field"), [("chat", "messages"), ("messages", "messages"), ("responses", "input")])
def test_each_format_keeps_its_messages_in_its_own_field(wire: Wire, field: str) -> None:
    assert contents({field: [{"role": "user", "content": "x"}]}, wire).messages == (
        b'{"role": "user", "content": "x"}',
    )


@pytest.mark.parametrize(("wire", "field"), [("responses", "input"), ("completions", "prompt")])
def test_text_is_not_a_list_of_messages(wire: Wire, field: str) -> None:
    found = contents({field: "hello"}, wire)
    assert (found.messages, found.fields[field]) == (None, b'"hello"')


def test_list_of_prompts_is_not_a_conversation() -> None:
    assert contents({"prompt": ["a", "b"]}, "completions").messages is None


def test_a_body_without_messages_has_no_contents() -> None:
    assert contents_of(call({"model": "m"}), "chat") is None


def test_too_many_messages_are_not_parsed() -> None:
    assert contents_of(call({"messages": [1] * (MAX_MESSAGES + 1)}), "chat") is None
    assert contents_of(call({"messages": [1] * MAX_MESSAGES}), "chat") is not None


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "array",
    [
        b"[" + b"1," * 2_000_000 + b"1]",
        b"[" + b'{"type":"file_id"},' * 300_000 + b"1]",
        b'[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * 300_000 + b"1]}]",
        b'[{"role":"user","content":[' + b'"a",' * 1_500_000 + b'"a"]}]',
    ],
    ids=["numbers", "messages", "parts", "strings"],
)
def test_too_large_body_takes_no_more_memory_than_its_bytes(array: bytes) -> None:
    many = call(b'{"messages":' + array + b"}")
    assert contents_of(many, "chat") is None
    assert contents_of(call(b'{"prompt":' + array + b"}"), "completions") is None
    assert peak_of(lambda: contents_of(many, "chat")) < len(array) + 2**20
    assert peak_of(lambda: references_to_stored(many.fields, "messages")) < len(array) + 2**20


@pytest.mark.parametrize("field", ["tools", "functions"])
def test_too_large_tools_are_refused(field: str) -> None:
    """Tools that are not counted would be billed beyond the reservation."""
    many = b'[{"name":"f","parameters":{"enum":[' + b"{}," * 200_001 + b"1]}}]"
    with pytest.raises(InvalidRequest, match="more than 200,000 objects") as refused:
        contents_of(call(b'{"messages":[],"%b":%b}' % (field.encode(), many)), "chat")
    assert refused.value.param == field


@pytest.mark.parametrize("field", ["documents", "prediction"])
def test_other_fields_can_be_too_large_as_well(field: str) -> None:
    """Counting its tokens would require parsing it, which would delay all other calls."""
    many = b"[" + b"[]," * 1_000_001 + b"1]"
    body = call(b'{"messages":[{"role":"user","content":"x"}],"%b":%b}' % (field.encode(), many))
    assert contents_of(body, "chat") is None
    marked = call(b'{"messages":[{"role":"user","content":"x","x_gateway":{}}],"%b":%b}' % (field.encode(), many))
    with pytest.raises(InvalidRequest, match="x_gateway cannot be applied"):
        contents_of(marked, "chat")
    assert contents_of(call(b'{"prompt":"a \\"x_gateway\\"","%b":%b}' % (field.encode(), many)), "completions") is None


@pytest.mark.parametrize(
    "text", ["a," * 1_500_000, '{"a": 1}, ' * 250_000, "\\\\{," * 300_000], ids=["table", "JSON", "odd"]
)
def test_long_text_with_many_commas_and_braces_is_parsed(text: str) -> None:
    found = contents({"messages": [{"role": "user", "content": text}, {"role": "user", "content": "x"}]})
    assert [json.loads(raw)["content"] for raw in found.messages or ()] == [text, "x"]


def test_client_mark_is_removed_and_all_other_bytes_kept() -> None:
    body = (
        b'{"messages": [{"role":"user","x_gateway":{"priority":2},"content":"caf\\u00e9", "n": 1.50},'
        b'{"role":"assistant","content":"say \\"x_gateway\\" twice"}]}'
    )
    found = contents(body)
    assert found.messages == (
        b'{"role":"user","content":"caf\\u00e9","n":1.50}',
        b'{"role":"assistant","content":"say \\"x_gateway\\" twice"}',
    )
    assert (found.priorities, found.pinned, found.marked) == ({0: 2.0}, frozenset(), True)


@pytest.mark.parametrize(
    ("own", "parts", "kept"),
    [
        (None, [3, None], 3.0),
        (None, [0, None], 1.0),
        (None, [0, 0.5], 0.5),
        (2, [0, None], 2.0),
        (None, ["pinned", 3], "pinned"),
        (0, ["pinned"], "pinned"),
        ("pinned", [0], "pinned"),
    ],
)
def test_message_has_the_highest_priority_of_itself_and_its_parts(own: object, parts: list[object], kept: Any) -> None:
    def marked(fields: dict[str, Any], priority: object) -> dict[str, Any]:
        return fields if priority is None else {**fields, "x_gateway": {"priority": priority}}

    results = [{"type": "tool_result", "tool_use_id": f"t{at}", "content": "R"} for at in range(len(parts))]
    original = [marked(result, priority) for result, priority in zip(results, parts, strict=True)]
    found = contents({"messages": [marked({"role": "user", "content": original}, own)]}, "messages")
    assert [json.loads(raw) for raw in found.messages or ()] == [{"role": "user", "content": results}]
    assert found.pinned == ({0} if kept == "pinned" else frozenset())
    assert found.priorities == ({} if kept == "pinned" else {0: kept})


def test_invalid_mark_of_a_part_is_refused_with_its_place() -> None:
    part = {"type": "text", "text": "x", "x_gateway": {"priority": -1}}
    with pytest.raises(InvalidRequest) as refused:
        contents({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
    assert refused.value.param == "messages[0].content[1].x_gateway.priority"


def test_tool_arguments_are_not_marks() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x_gateway": {"priority": 3}}}
    assert not contents({"messages": [{"role": "assistant", "content": [call, "x_gateway", 1]}]}, "messages").marked


def test_pinned_message_is_reported() -> None:
    found = contents({"messages": [{"role": "user", "x_gateway": {"priority": "pinned"}}]})
    assert (found.pinned, found.priorities, found.marked) == (frozenset({0}), {}, True)


def test_text_that_mentions_the_mark_is_not_a_mark() -> None:
    body = {"messages": [{"role": "user", "content": '"x_gateway"', "name": "x_gateway"}, ["x_gateway"]]}
    found = contents(body)
    assert not found.marked
    assert found.messages == tuple(json.dumps(message).encode() for message in body["messages"])


@pytest.mark.parametrize(
    "mark",
    [1, "high", {"prio": 1}, {"priority": -1}, {"priority": 101}, {"priority": True}, {"priority": "first"},
     {"priority": None}, {"priority": [1]}, {"priority": 10**350}],
)  # fmt: skip
def test_invalid_mark_is_refused_with_its_place(mark: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        contents({"messages": [{"role": "user"}, {"role": "user", "x_gateway": mark}]})
    assert "messages[1].x_gateway" in refused.value.message
    assert str(refused.value.param).startswith("messages[1].x_gateway")


def test_too_long_mark_is_not_decoded() -> None:
    mark = {"priority": 1, "why": "x" * 1_000}
    with pytest.raises(InvalidRequest, match=r'"messages\[0\].x_gateway" has 1,0\d\d bytes; it may have 1,024'):
        contents({"messages": [{"role": "user", "x_gateway": mark}]})


@pytest.mark.parametrize(("wire", "field"), [("messages", "messages"), ("responses", "input")])
def test_messages_of_other_formats_can_be_marked(wire: Wire, field: str) -> None:
    found = contents({field: [{"role": "user", "content": "x", "x_gateway": {"priority": 3}}]}, wire)
    assert found.priorities == {0: 3.0}
    assert found.messages == (b'{"role":"user","content":"x"}',)
    with pytest.raises(InvalidRequest) as refused:
        contents({field: [{"role": "user", "x_gateway": {"priority": -1}}]}, wire)
    assert str(refused.value.param).startswith(f"{field}[0].x_gateway")


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([b'{"role":"user","content":"a"}', b"[1 , 2]", b'"x, y"', b"1.50", MARKED]), max_size=9),
    st.sampled_from([b",", b", ", b" ,\n\t"]),
    st.lists(st.integers(1, 12), max_size=4),
    st.tuples(st.integers(0, 11), st.integers(0, 11)).map(sorted),
)
def test_messages_and_bounds_are_the_same_with_any_cached_prefix(
    rest: list[bytes], comma: bytes, ends: list[int], some: list[int]
) -> None:
    everything = [json.dumps({"role": "system", "content": "long " * 1000}).encode(), *rest]
    known = PrefixCache(2**20)
    for end in [*ends, len(everything)]:
        body = b'{"messages": [ ' + comma.join(everything[:end]) + b" ]}"
        found = contents_of(call(body), "chat", known)
        assert found is not None
        first, stop = some
        assert found.between(first, stop) == tuple(everything[:end][first:stop])
        assert found.messages == tuple(everything[:end])
        plains = tuple(without_cache_marks(raw) for raw in everything[:end])
        settled = plains[:-1] if found.new_messages else plains
        cached_prefix = CachedPrefix(found.text_before_last, found.bounds, keys_of(settled), "", MessageSums())
        assert cached_prefix.messages == settled
        known.keep("chat", cached_prefix, instead_of=found.cached_prefix)
