"""References to content at the provider, and responses that are billed later."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.core.conversation.message import keys_of
from gateway.core.counting.measure import Wire
from gateway.core.counting.prefix_cache import CachedPrefix, PrefixCache
from gateway.core.counting.request import ITEMS
from gateway.core.counting.sums import MessageSums
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import read_fields
from gateway.dialects.server_state import (
    continuation_ids,
    continued_from,
    is_in_background,
    references_in,
    references_to_stored,
)


def fields(**body: Any) -> Any:
    return read_fields(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"input": "hi"}, ()),
        ({"input": "hi", "previous_response_id": "resp_1"}, ("previous_response_id",)),
        ({"input": "hi", "previous_response_id": None, "conversation": None, "prompt": None}, ()),
        ({"conversation": {"id": "conv_1"}, "prompt": {"id": "p"}}, ("conversation", "prompt")),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, ("item_reference",)),
        ({"input": 'the type is "item_reference"'}, ()),
        ({"input": [{"role": "user", "content": 'say "item_reference"'}]}, ()),
    ],
)
def test_references_to_stored_content_are_named(body: dict[str, Any], kept: tuple[str, ...]) -> None:
    assert references_to_stored(fields(**body), "responses") == kept


@pytest.mark.parametrize(
    ("thread", "kept"),
    [
        ({"type": "continue", "previous_message_id": "msg_1"}, ("thread",)),
        ({"type": "create"}, ()),
        ({"type": "create", "previous_message_id": None}, ()),
        (None, ()),
    ],
)
def test_continued_thread_is_named(thread: object, kept: tuple[str, ...]) -> None:
    assert references_to_stored(fields(messages=[], thread=thread), "messages") == kept
    assert references_to_stored(fields(messages=[], thread=thread), "chat") == ()


@pytest.mark.parametrize("wire", ["chat", "messages", "completions", None])
def test_other_formats_have_no_references(wire: Wire | None) -> None:
    body = fields(prompt="a prompt", conversation="c", previous_response_id="r")
    assert references_to_stored(body, wire) == continued_from(body, wire) == continuation_ids(body, wire, "r") == ()
    assert not is_in_background(body, wire)


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        ({}, (), ("new",)),
        ({"store": None}, (), ("new",)),
        ({"previous_response_id": "r", "store": True}, ("r",), ("new",)),
        ({"previous_response_id": "r", "store": False}, ("r",), ()),
        ({"conversation": "c"}, ("c",), ("new", "c")),
        ({"conversation": {"id": "c"}, "store": False}, ("c",), ("c",)),
        ({"conversation": {"id": 5}, "previous_response_id": ["r"]}, (), ("new",)),
        ({"conversation": None, "previous_response_id": ""}, (), ("new",)),
        ({"conversation": "c" * 2_000, "previous_response_id": "r" * 2_000}, (), ("new",)),
    ],
)
def test_ids_that_a_request_continues_and_ids_that_continue_it(
    body: dict[str, Any], before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    read = fields(input="hi", **body)
    assert continued_from(read, "responses") == before
    assert continuation_ids(read, "responses", "new") == after
    own = after[1:] if after[:1] == ("new",) else after
    assert continuation_ids(read, "responses", None) == continuation_ids(read, "responses", "n" * 2_000) == own


def said(*parts: object, role: str = "user") -> list[object]:
    return [{"role": role, "content": list(parts)}]


URL = "https://example.org/a.pdf"
PDF = "data:application/pdf;base64,JVBERi0="
FILES: list[tuple[Wire, list[object], tuple[str, ...]]] = [
    ("responses", said({"type": "input_file", "file_id": "file-1"}), ("file_id",)),
    ("responses", said({"type": "input_file", "file_url": URL}), ("file_url",)),
    ("responses", said({"type": "input_file", "file_data": PDF, "file_id": None}), ()),
    (
        "responses",
        [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": "f"}]}],
        ("file_id",),
    ),
    ("chat", said({"type": "file", "file": {"file_id": "f"}}), ("file_id",)),
    ("chat", said({"type": "file", "file": {"file_data": "HTTPS://example.org/a.pdf"}}), ("file_url",)),
    ("chat", said({"type": "file", "file": {"file_data": PDF, "filename": '"file_id": "x"'}}), ()),
    ("chat", said({"type": "file", "file_id": "f"}), ("file_id",)),
    ("chat", said({"type": "document_url", "document_url": URL}), ("file_url",)),
    ("chat", said({"type": "document_url", "document_url": PDF}), ()),
    ("chat", said({"type": "video_url", "video_url": {"url": URL}}), ("file_url",)),
    ("chat", said({"type": "audio_url", "audio_url": URL}), ("file_url",)),
    (
        "chat",
        said({"type": "file", "file": {"file_id": "f"}}, {"type": "video_url", "video_url": {"url": URL}}),
        ("file_id", "file_url"),
    ),
    ("messages", said({"type": "document", "source": {"type": "file", "file_id": "f"}}), ("file_id",)),
    ("messages", said({"type": "document", "source": {"type": "url", "url": URL}}), ("file_url",)),
    ("messages", said({"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}), ()),
    (
        "messages",
        said({"type": "tool_result", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}),
        ("file_id",),
    ),
]


@pytest.mark.parametrize(("wire", "items", "kept"), FILES)
def test_file_reference_is_named(wire: Wire, items: list[object], kept: tuple[str, ...]) -> None:
    assert references_to_stored(fields(**{"input" if wire == "responses" else "messages": items}), wire) == kept


@pytest.mark.parametrize(
    ("wire", "items", "kept"),
    [*FILES, ("responses", [{"type": "item_reference", "id": "msg_1"}, *FILES[0][1]], ("item_reference", "file_id"))],
)
def test_references_in_the_cached_prefix_are_not_searched_again(
    wire: Wire, items: list[object], kept: tuple[str, ...]
) -> None:
    name, prefix_items, known = ITEMS[wire], said("word " * 1_000), PrefixCache(2**20)
    for made in (items, said("more")):
        body = json.dumps({"model": "m", name: [*prefix_items, *made, *said("end")]}).encode()
        call = Call("chat", "m", stream=False, body=body, fields=read_fields(body), usage_asked=False)
        contents = contents_of(call, wire, known)
        assert contents is not None
        assert references_to_stored(call.fields, wire, contents) == kept
        elsewhere = references_in(wire, contents.rest, contents.new_messages[:-1])
        assert tuple(sorted(elsewhere)) == (() if contents.cached_prefix is not None else tuple(sorted(kept)))
        keys = keys_of(contents.messages or ())[:-1]
        known.keep(wire, CachedPrefix(contents.text_before_last, contents.bounds, keys, "", MessageSums(), elsewhere))
        prefix_items += items


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        ("messages", {"messages": said({"type": "tool_use", "id": "t", "name": "read", "input": {"file_id": "f"}})}),
        ("messages", {"messages": said({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}})}),
        ("messages", {"messages": said({"type": "text", "text": 'the "document" "file_id": "f"'})}),
        ("chat", {"messages": said({"type": "image_url", "image_url": {"url": "https://x/y.png"}})}),
        ("chat", {"messages": [{"role": "user", "content": '{"type":"file","file_id":"f"}'}, 7, None, [{}]]}),
        ("chat", {"messages": said("file", 7, None, {"type": "file"}, {"type": "file", "file": 7, "file_id": 7})}),
        ("chat", {"messages": said({"type": "file", "file": {"file_data": 7, "file_id": ""}}, {"type": ["file"]})}),
        ("messages", {"messages": said({"type": "document"}, {"type": "document", "source": 7})}),
        ("responses", {"input": "input_file"}),
        ("responses", {"input": [{"type": "message", "role": "assistant", "content": [{
            "type": "output_text", "text": "x", "annotations": [{"type": "file_citation", "file_id": "f"}]}]}]}),
    ],
)  # fmt: skip
def test_text_about_a_file_is_not_a_reference(wire: Wire, body: dict[str, Any]) -> None:
    assert references_to_stored(fields(**body), wire) == ()


def test_large_messages_are_judged_by_the_pattern_alone() -> None:
    text = {"type": "text", "text": "x" * 2**20}
    for part, name in (({"file_id": "f"}, "file_id"), ({"file": {"file_data": URL}}, "file_url")):
        assert references_to_stored(fields(messages=said(text, {"type": "file", **part})), "chat") == (name,)
    many = said({"type": "text", "text": "hi"}) * 20_000
    assert references_to_stored(fields(messages=many + said({"type": "file", "file_id": "f"})), "chat") == ()


@pytest.mark.parametrize("deep", [5_000, 400])
def test_unreadable_messages_have_no_references(deep: int) -> None:
    part = b'{"type":"file","file_id":"f","content":' * deep + b"0" + b"}" * deep
    array = b'[{"role":"user","content":[%b]}]' % part
    assert references_to_stored({"messages": msgspec.Raw(array)}, "chat") in ((), ("file_id",))
    assert references_to_stored({"messages": msgspec.Raw(b'["file"')}, "chat") == ()


@pytest.mark.parametrize(("value", "is_so"), [(True, True), (False, False), (None, False), ("yes", True), (1, True)])
def test_background_field_means_a_background_response(value: object, is_so: bool) -> None:
    assert is_in_background(fields(input="hi", background=value), "responses") is is_so
    assert not is_in_background(fields(input="hi"), "responses")


@pytest.mark.parametrize(("value", "is_so"), [(True, True), (False, False), (None, False), ("yes", True), (1, True)])
@pytest.mark.parametrize("wire", ["chat", "responses", "messages", "completions", None])
def test_deferred_response_is_a_background_response(wire: Wire | None, value: object, is_so: bool) -> None:
    assert is_in_background(fields(messages=[], deferred=value), wire) is is_so


def test_image_background_on_an_unknown_path_is_not_a_background_response() -> None:
    for value in ("transparent", "opaque", "auto"):
        assert not is_in_background(fields(prompt="a cat", background=value), None)
    assert is_in_background(fields(input="hi", background=True), None)
