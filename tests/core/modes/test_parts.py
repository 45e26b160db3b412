"""Tool results with several kinds of parts: which are shortened, which are stored, and which stay."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import encode
from gateway.core.counting.measure import Wire
from gateway.core.modes import SHORTEST, ResponseMode, ShownResult, original_of, show, summarizable_text, with_summary
from gateway.core.modes.handle import ends_with_handle
from gateway.core.modes.parts import ResultContent
from gateway.core.views import new_faults, view_of

Json = dict[str, Any]

ROWS = json.dumps([{"id": number, "name": f"item {number}", "state": "open"} for number in range(80)])
TEXT = "\n".join(f"line {number}: the value of part {number} is {number * number}" for number in range(200))
HOUR, FIVE = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
LOSSY: tuple[ResponseMode, ...] = ("summary", "handle_only")
CHANGING: tuple[ResponseMode, ...] = ("table", *LOSSY)


def png(width: int, height: int) -> str:
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", width, height)
    return base64.b64encode(head + bytes(range(256)) * 2).decode()


PNG = png(800, 600)


def text(said: str, **fields: Any) -> Json:
    return {"type": "text", "text": said, **fields}


def image(**fields: Any) -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}, **fields}


def document(held: str, **fields: Any) -> Json:
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": held}, **fields}


def found(*texts: str, **fields: Any) -> Json:
    content = [text(one) for one in texts]
    return {"type": "search_result", "source": "https://a.example/1", "title": "Parts", "content": content, **fields}


def result(*parts: Any) -> bytes:
    return json.dumps({"role": "tool", "tool_call_id": "c", "content": list(parts)}).encode()


def handle(kept: str) -> str:
    return f"tr_{len(kept)}"


def shown(mode: ResponseMode, *parts: Any) -> ShownResult:
    one = show(result(*parts), mode, handle)
    assert one is not None
    return one


def content(one: ShownResult) -> Any:
    return json.loads(one.raw)["content"]


LINKED = {"type": "image", "source": {"type": "url", "url": "https://a.example/p.png"}}
NAMED = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
CITED = [
    document(TEXT, citations={"enabled": True}),
    found(TEXT, citations={"enabled": True}),
    text(TEXT, citations=[1]),
]
STAYS = [
    LINKED,
    NAMED,
    {"type": "image_url", "image_url": {"url": "https://a.example/p.png", "detail": "low"}},
    {"type": "input_image", "file_id": "file_1"},
    {"type": "input_file", "file_url": "https://a.example/p.pdf"},
    {"type": "tool_reference", "tool_name": "search"},
    {"type": "thinking", "thinking": TEXT, "signature": "s"},
    {"type": "image", "source": {"type": "base64", "data": PNG}, "signature": "s"},
    {"type": "text", "text": TEXT, "signature": "s"},
    {"type": "search_result", "content": [image()], "source": "s", "title": "t"},
    {"type": "document", "source": {"type": "content", "content": [text(TEXT), image()]}},
    {"type": ["text"], "text": TEXT},
    TEXT,
    None,
    *CITED,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["table", "summary"])
def test_text_next_to_an_image_is_shortened_and_the_image_stays(mode: ResponseMode) -> None:
    one = shown(mode, image(), text(ROWS), image(cache_control=FIVE))
    [first, short, last] = content(one)
    assert (first, last) == (image(), image(cache_control=FIVE))
    assert short["type"] == "text"
    assert "id|name|state" in short["text"]
    assert one.form == mode
    assert (one.content, one.handle) == ((ROWS, handle(ROWS)) if mode == "summary" else (None, None))


@pytest.mark.parametrize("stays", STAYS)
@pytest.mark.parametrize("mode", CHANGING)
def test_unknown_parts_and_parts_without_bytes_stay(mode: ResponseMode, stays: Any) -> None:
    assert show(result(stays, text("short")), mode, handle) is None
    one = shown(mode, stays, text(ROWS), stays)
    assert [content(one)[place] for place in (0, 2)] == [stays, stays]
    assert len(content(one)[1]["text"]) < len(ROWS) / 2
    assert one.content in {None, ROWS}


@pytest.mark.parametrize(
    "part",
    [
        document(ROWS, title="Parts", context="of a car", citations={"enabled": False}),
        {"type": "document", "source": {"type": "content", "content": ROWS}},
        {"type": "document", "source": {"type": "content", "content": [text(ROWS)]}, "title": None},
        found(ROWS),
    ],
)
def test_the_text_in_a_document_or_search_result_is_text(part: Json) -> None:
    [table] = content(shown("table", part))
    assert json.dumps(ROWS) not in json.dumps(table)
    assert {**table, "source": 0, "content": 0} == {**part, "source": 0, "content": 0}, "all around it stays"
    assert "id|name|state" in summarizable_text(result(table))
    for mode in LOSSY:
        one = shown(mode, part)
        [short] = content(one)
        assert (short["type"], short.keys()) == ("text", {"type", "text"})
        assert ends_with_handle(short["text"])
        assert json.loads(one.content or "") == [part], "the titles and sources are kept as well"


def test_an_extract_can_name_its_sources() -> None:
    said = summarizable_text(
        result(found("One.", "Two."), text("Three."), document("Four.", title="Fourth", context="c"))
    )
    assert said == "Parts\nhttps://a.example/1\nOne.\nTwo.\nThree.\nFourth\nc\nFour."
    assert summarizable_text(result(text("a"), text("b"), image())) == "ab"
    [short] = content(shown("summary", found(TEXT), found(TEXT)))
    assert short["text"].startswith("Parts\nhttps://a.example/1\n")


def test_several_texts_become_one_at_the_last_place() -> None:
    one = shown("summary", text(TEXT), LINKED, text(ROWS), NAMED)
    assert [part["type"] for part in content(one)] == ["image", "text", "document"]
    assert one.content == TEXT + ROWS
    tables = content(shown("table", text(ROWS), LINKED, found(ROWS)))
    assert [part["type"] for part in tables] == ["text", "image", "search_result"]


@pytest.mark.parametrize(
    "media",
    [
        image(),
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "high"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "low", "file_id": None},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PNG}, "title": "t"},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PNG}", "filename": "a.pdf"}},
        {"type": "input_file", "file_data": PNG, "filename": "a.pdf"},
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
    ],
)
def test_media_with_bytes_are_stored_with_the_text(media: Json) -> None:
    one = shown("handle_only", text("Taken."), media, text(TEXT))
    [short] = content(one)
    assert ends_with_handle(short["text"])
    assert 'begins "Taken.' in short["text"]
    assert json.loads(one.content or "") == [text("Taken."), media, text(TEXT)]
    assert content(shown("handle_only", media)) == [text(content(shown("handle_only", media))[0]["text"])]
    for mode in ("table", "summary"):
        assert show(result(text("Taken."), media), mode, handle) is None


def test_the_handle_line_counts_the_media() -> None:
    media = [image(), image(), {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}]
    [short] = content(shown("handle_only", *media))
    assert short["text"].startswith("[2 images, 1 sound; ")
    [short] = content(shown("handle_only", text("Done."), *media[:1]))
    assert short["text"].startswith('[text, 1 line, begins "Done.", 1 image; ')


def test_every_byte_of_an_image_is_stored() -> None:
    one = shown("handle_only", text("Taken."), image())
    [_, kept] = json.loads(one.content or "")
    assert base64.b64decode(kept["source"]["data"]) == base64.b64decode(PNG)
    assert original_of(result(text("Taken."), image()), "handle_only") == one.content


@pytest.mark.parametrize(
    ("marks", "left"),
    [
        ([None, "kept", HOUR], ["kept", HOUR]),
        ([HOUR, "kept", None], ["kept", HOUR]),
        ([HOUR, ("kept", FIVE), None], [("kept", FIVE), None]),
        ([HOUR, ("kept", HOUR), FIVE], [("kept", HOUR), FIVE]),
        ([FIVE, FIVE], [FIVE]),
        ([HOUR, None, ("kept", HOUR)], [HOUR, ("kept", HOUR)]),
    ],
)
def test_cache_marks_keep_their_order(marks: list[Any], left: list[Any]) -> None:
    def part(mark: Any) -> Json:
        kept = mark[1] if isinstance(mark, tuple) else None
        if mark == "kept" or kept:
            return {**LINKED, **({"cache_control": kept} if kept else {})}
        return text(TEXT, **({"cache_control": mark} if mark else {}))

    sent = content(shown("summary", *map(part, marks)))
    assert [(one["type"], one.get("cache_control")) for one in sent] == [
        (part(mark)["type"], part(mark).get("cache_control")) for mark in left
    ]


def test_a_models_summary_replaces_the_extract() -> None:
    raw = result(image(), found(TEXT, cache_control=FIVE))
    one = show(raw, "summary", handle)
    assert one is not None
    assert one.summary_limits is not None
    [first, said] = json.loads(with_summary(raw, "Said.", "tr_1"))["content"]
    assert first == image()
    assert said == text(f"Said.\n[summary of {len(one.content or ''):,} characters; "
                        "full text: GET /api/results/tr_1]", cache_control=FIVE)  # fmt: skip


def test_an_image_as_small_as_its_line_stays() -> None:
    address = {"url": f"data:image/png;base64,{PNG}", "detail": "low"}
    low = {"type": "image_url", "image_url": address}
    assert ResultContent([low], with_media=True).media_size == 340
    assert show(result(low), "handle_only", lambda _: "x" * 128) is None
    assert show(result(low), "handle_only", handle) is not None


# --- laws, in each format ---------------------------------------------------------------------------------------------

words = st.sampled_from(["", "short", ROWS, TEXT, ROWS[:350], "é\n" * 400, json.dumps({"a": "b" * 500})])
marks = st.sampled_from([{}, {"cache_control": FIVE}])
anthropic = st.one_of(
    st.builds(lambda said, mark: text(said or "x", **mark), words, marks),
    st.builds(
        lambda said, mark, cited: document(said, **mark, citations={"enabled": cited}), words, marks, st.booleans()
    ),
    st.builds(lambda said, more, mark: found(said or "x", more or "y", **mark), words, words, marks),
    st.sampled_from([image(), image(cache_control=FIVE), LINKED, NAMED, {"type": "tool_reference", "tool_name": "a"}]),
)
chat = st.one_of(
    st.builds(lambda said, mark: text(said, **mark), words, marks),
    st.sampled_from([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, {"type": "x", "text": TEXT, "y": 1}]),
)  # fmt: skip
responses = st.one_of(
    st.builds(lambda said: {"type": "input_text", "text": said}, words),
    st.sampled_from([
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"},
        {"type": "input_image", "image_url": "https://a.example/p.png"},
        {"type": "input_file", "file_data": f"data:application/pdf;base64,{PNG}", "filename": "a.pdf"},
        {"type": "input_file", "file_id": "file_1"},
    ]),
)  # fmt: skip
PARTS = {"chat": chat, "messages": anthropic, "responses": responses}


def request(wire: Wire, parts: list[Json]) -> list[bytes]:
    """Return a request with one tool result that has these parts."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    elements: dict[str, list[Json]] = {
        "chat": [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": parts},
        ],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}]},
        ],
        "responses": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": parts},
        ],
    }
    return [json.dumps(one, indent=1).encode() for one in [{"role": "user", "content": "look"}, *elements[wire]]]


def held(wire: Wire, raw: bytes) -> list[Json]:
    """Return the parts of the result in such a request."""
    element = json.loads(raw)
    if wire == "messages":
        element = element["content"][0]
    parts: list[Json] = element["output" if wire == "responses" else "content"]
    return parts


@pytest.mark.parametrize("wire", PARTS)
@given(st.data())
@settings(max_examples=120, deadline=None)
def test_law_parts_are_valid_unchanged_or_stored_whole(wire: Wire, data: st.DataObject) -> None:
    received = data.draw(st.lists(PARTS[wire], min_size=1, max_size=5))
    mode = data.draw(st.sampled_from(CHANGING))
    elements = request(wire, received)
    view = view_of(wire, elements)
    one = show(view.messages[-1], mode, handle)
    if one is None:
        return
    sent = view.with_messages([*view.messages[:-1], one.raw])
    assert sent[:-1] == tuple(elements[:-1])
    assert new_faults(wire, elements, sent) == []
    after = held(wire, sent[-1])
    name = "input_text" if wire == "responses" else "text"
    assert after != received
    if one.form == "table":
        assert (one.content, one.handle) == (None, None)
        assert [part["type"] for part in after] == [part["type"] for part in received]
        assert [part.get("cache_control") for part in after] == [part.get("cache_control") for part in received]
        assert all(a == b for a, b in zip(after, received, strict=True) if "image" in a["type"] or "file" in a["type"])
        return
    [short] = [part for part in after if part["type"] == name and ends_with_handle(part.get("text", ""))]
    rest = [part for part in after if part is not short]
    kept = one.content or ""
    try:
        gone = [{**part, "type": name} if part.get("type") == "text" else part for part in json.loads(kept)]
    except (ValueError, TypeError, AttributeError):
        gone = []
    is_parts = bool(gone) and all(part in received for part in gone)
    left = [part for part in received if part not in gone] if is_parts else [p for p in received if not is_plain(p)]
    if not is_parts:
        assert kept == "".join(part["text"] for part in received if is_plain(part))
    assert rest == left, "what is not behind the handle stands where it stood, and each is in one place"
    assert f"/api/results/{handle(kept)}]" in short["text"]
    assert len(short["text"]) < len(kept)
    order = [place for place, part in enumerate(received) if part.get("cache_control")]
    assert len([part for part in after if part.get("cache_control")]) <= len(order)
    again = view_of(wire, sent)
    assert show(again.messages[-1], mode, handle) is None, "it is not shown shorter once more"


def is_plain(part: Json) -> bool:
    return set(part) <= {"type", "text", "cache_control"}


def test_law_plain_texts_are_stored_as_text() -> None:
    for mode in LOSSY:
        assert shown(mode, text(ROWS)).content == ROWS
        assert shown(mode, text(ROWS), LINKED, text(TEXT)).content == ROWS + TEXT


@given(st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)
       | st.dictionaries(st.sampled_from(["type", "text", "source", "content", "data", "image_url", "file", "url",
                                          "input_audio", "citations", "cache_control", "file_data"]),
                         inner | st.sampled_from(["image", "document", "search_result", "image_url", "file", "content",
                                                  "input_audio", "text", "base64", "data:x"]), max_size=5),
       max_leaves=20), st.sampled_from(CHANGING))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_law_any_parts_can_be_shown(value: Any, mode: ResponseMode) -> None:
    one = show(encode({"role": "tool", "content": [text(ROWS), value]}), mode, handle)
    assert one is not None
    assert len(one.raw) > 0
    assert len(ROWS) > SHORTEST
