"""Recorded streams of many providers, split in many ways: the usage, the events and the bytes stay the same."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import GatewayError
from gateway.dialects import endpoint
from gateway.dialects.base import Call, EventReader, ParsedResponse, StreamMeter, Verdict

FOLDER = Path(__file__).parent / "streams"
STREAMS: list[dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text("utf-8"))["streams"]
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses", "completions": "completions"}


def name_of(stream: dict[str, Any]) -> str:
    return str(stream["name"])


every_stream = pytest.mark.parametrize("stream", STREAMS, ids=name_of)


def body_of(stream: dict[str, Any]) -> bytes:
    return (FOLDER / str(stream["file"])).read_bytes()


def reader_of(stream: dict[str, Any], *, drop_usage: bool) -> EventReader:
    dialect = endpoint("POST", PATHS[stream["api"]]).dialect
    return dialect.reader(Call("chat", "m", stream=True, body=b"", fields={}), drop_usage=drop_usage)


class Recorder:
    """Records the data of each event on its way to a reader."""

    def __init__(self, reader: EventReader) -> None:
        self.seen: list[bytes] = []
        self._reader = reader

    def plain_prefix(self, region: bytes) -> int:
        return self._reader.plain_prefix(region)

    def read(self, data: bytes) -> Verdict:
        self.seen.append(data)
        return self._reader.read(data)

    def read_all(self, events: Sequence[bytes]) -> None:
        self.seen += events
        self._reader.read_all(events)

    def answer(self) -> ParsedResponse:
        return self._reader.answer()

    def next_number(self) -> int:
        return self._reader.next_number()

    def failed(self, fault: GatewayError, number: int) -> bytes:
        return self._reader.failed(fault, number)

    def cut_short(self) -> bytes:
        return self._reader.cut_short()


# --- ways to split ----------------------------------------------------------------------------------------------------

Cut = Callable[[bytes], list[bytes]]


def whole(body: bytes) -> list[bytes]:
    return [body]


def byte_by_byte(body: bytes) -> list[bytes]:
    return [body[at : at + 1] for at in range(len(body))]


def at(body: bytes, places: set[int]) -> list[bytes]:
    ends = sorted({place for place in places if 0 < place < len(body)} | {len(body)})
    return [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def at_random(seed: int) -> Cut:
    def cut(body: bytes) -> list[bytes]:
        choose = random.Random(seed)
        return at(body, {choose.randrange(len(body)) for _ in range(choose.choice([3, 20, 100]))})

    return cut


def inside_characters_and_line_ends(body: bytes) -> list[bytes]:
    continued = {place for place, byte in enumerate(body) if 0x80 <= byte < 0xC0}
    return at(body, continued | {result.start() + 1 for result in re.finditer(rb"\r\n|\n\n|\r\r", body)})


def several_events_a_piece(body: bytes) -> list[bytes]:
    ends = [result.end() for result in re.finditer(rb"(?:\r\n|\n|\r){2}", body)]
    return at(body, set(ends[2::3]))


def an_event_and_a_half_a_piece(body: bytes) -> list[bytes]:
    ends = [result.end() for result in re.finditer(rb"(?:\r\n|\n|\r){2}", body)]
    return at(body, {end + 9 for end in ends})


CUTS: dict[str, Cut] = {
    "whole": whole,
    "byte by byte": byte_by_byte,
    "random 1": at_random(1),
    "random 2": at_random(2),
    "random 3": at_random(3),
    "inside characters": inside_characters_and_line_ends,
    "several events": several_events_a_piece,
    "an event and a half": an_event_and_a_half_a_piece,
}
every_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)


# --- an independent reading ---------------------------------------------------------------------------------------------------------


def events_of(body: bytes) -> list[bytes]:
    """Return the data of each event, parsed line by line as the standard says, including an unfinished event."""
    result: list[bytes] = []
    lines: list[bytes] = []
    for line in [*re.split(rb"\r\n|\r|\n", body), b""]:
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            result.append(b"\n".join(lines))
            lines = []
    return result


def is_usage_only(data: bytes) -> bool:
    chunk = json.loads(data) if data.startswith(b"{") else {}
    return isinstance(chunk.get("usage"), dict) and not chunk.get("choices") and "error" not in chunk


def metered(
    stream: dict[str, Any], body: bytes, cut: Cut, *, drop_usage: bool
) -> tuple[bytes, ParsedResponse, list[bytes]]:
    recorder = Recorder(reader_of(stream, drop_usage=drop_usage))
    meter = StreamMeter(recorder)
    out = b"".join(map(meter.feed, cut(body)))
    out += meter.close()
    return out, meter.response(), recorder.seen


def sums(answer: ParsedResponse) -> dict[str, int] | None:
    if answer.usage is None:
        return None
    usage, source = answer.usage.complete(-1, -1)
    assert source == "provider"
    return {"prompt": usage.input_tokens, "completion": usage.output_tokens, "total": usage.total_tokens}


# --- the tests --------------------------------------------------------------------------------------------------------------------------


def test_every_recording_is_listed_and_as_it_was_recorded() -> None:
    assert sorted(stream["file"] for stream in STREAMS) == sorted(path.name for path in FOLDER.glob("*.sse"))
    assert len(STREAMS) == 34
    for stream in STREAMS:
        assert hashlib.sha256(body_of(stream)).hexdigest() == stream["sha256"], stream["name"]


@every_stream
def test_independent_parser_finds_the_events_of_the_manifest(stream: dict[str, Any]) -> None:
    events = events_of(body_of(stream))
    assert len(events) == stream["events"]
    assert (events[-1] == b"[DONE]") == stream["done_marker"]


@every_stream
@every_cut
def test_recorded_stream_keeps_usage_events_and_bytes(stream: dict[str, Any], cut: Cut) -> None:
    body = body_of(stream)
    out, answer, seen = metered(stream, body, cut, drop_usage=False)
    assert out == body
    assert sums(answer) in [stream["usage"], *stream.get("usage_also", [])]
    end = next((place for place, data in enumerate(seen) if data == b"[DONE]"), len(seen))
    assert seen[: end + 1] == events_of(body)[: end + 1]
    assert answer == metered(stream, body, whole, drop_usage=False)[1]


@every_stream
@every_cut
def test_client_without_usage_option_gets_everything_else(stream: dict[str, Any], cut: Cut) -> None:
    body = body_of(stream)
    out, answer, _ = metered(stream, body, cut, drop_usage=True)
    dropped = stream["api"] in ("chat", "completions")
    expected = [data for data in events_of(body) if not (dropped and is_usage_only(data))]
    assert events_of(out) == expected
    if expected == events_of(body):
        assert out == body
    assert answer == metered(stream, body, whole, drop_usage=False)[1]


@every_stream
@every_cut
def test_no_recorded_stream_lacks_its_end(stream: dict[str, Any], cut: Cut) -> None:
    body = body_of(stream)
    meter = StreamMeter(reader_of(stream, drop_usage=False))
    out = b"".join(map(meter.feed, cut(body)))
    assert not meter.lacks_end()
    assert out + meter.close() == body


def said(api: str, *events: dict[str, Any] | str) -> StreamMeter:
    meter = StreamMeter(reader_of({"api": api}, drop_usage=False))
    meter.feed(
        b"".join(b"data: %b\n\n" % (one if isinstance(one, str) else json.dumps(one)).encode() for one in events)
    )
    return meter


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


TEXT, CALL = choice(delta={"content": "Hello"}), choice(delta={"tool_calls": [{"index": 0, "function": {"name": "f"}}]})
PROMPTED = choice(text="Hello")
START = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}
DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}}
CREATED = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}
WORD = {"type": "response.output_text.delta", "output_index": 0, "delta": "Hello"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 1}


@pytest.mark.parametrize(
    ("api", "events"),
    [
        *((api, ()) for api in PATHS),
        *(("chat", (event,)) for event in (TEXT, CALL)),
        ("completions", (PROMPTED,)),
        *(("messages", events) for events in ((START,), (START, DELTA), (DELTA,))),
        *(("responses", events) for events in ((CREATED,), (CREATED, WORD), (WORD,))),
    ],
)
def test_empty_or_unfinished_stream_lacks_its_end(api: str, events: tuple[dict[str, Any], ...]) -> None:
    meter = said(api, *events)
    meter.feed(b": a comment\n\n")
    assert meter.lacks_end()


@pytest.mark.parametrize(
    ("api", "events"),
    [
        *(
            ("chat", (TEXT, end))
            for end in ("[DONE]", choice(delta={}, finish_reason="stop"), {"choices": [], "usage": USAGE})
        ),
        ("chat", (TEXT, {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]})),
        ("chat", ({**TEXT, "usage": USAGE},)),
        ("chat", (TEXT, {"error": {"message": "no"}})),
        *(("completions", (PROMPTED, end)) for end in ("[DONE]", choice(text="", finish_reason="length"))),
        *(("messages", (START, DELTA, end)) for end in ("[DONE]", {"type": "message_stop"}, {"type": "error"})),
        ("messages", (START, DELTA, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}})),
        ("messages", (START, DELTA, {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 4}})),
        *(
            ("responses", (CREATED, WORD, end))
            for end in (
                "[DONE]",
                {"type": "response.completed", "response": {"status": "completed"}},
                {"type": "error"},
            )
        ),
        *((api, ({"event": "token", "data": "Hello"},)) for api in PATHS),
        *((api, ("Hello",)) for api in PATHS),
    ],
)
def test_finished_or_unreadable_stream_lacks_nothing(api: str, events: tuple[dict[str, Any] | str, ...]) -> None:
    assert not said(api, *events).lacks_end()


def test_end_mark_without_blank_line_counts() -> None:
    meter = said("chat", TEXT)
    assert meter.feed(b"data: [DONE]\n") == b""
    assert not meter.lacks_end()
    assert meter.close() == b"data: [DONE]\n"


@pytest.mark.parametrize("stream", [stream for stream in STREAMS if b"\r" not in body_of(stream)], ids=name_of)
@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
@pytest.mark.parametrize("cut", [whole, byte_by_byte, at_random(4)], ids=["whole", "byte by byte", "random"])
def test_a_recorded_stream_under_other_line_ends_reads_the_same(stream: dict[str, Any], end: bytes, cut: Cut) -> None:
    body = body_of(stream)
    other = body.replace(b"\n", end)
    out, answer, _ = metered(stream, other, cut, drop_usage=False)
    assert out == other
    assert answer == metered(stream, body, whole, drop_usage=False)[1]


@pytest.mark.parametrize("stream", [stream for stream in STREAMS if stream["done_marker"]], ids=name_of)
@every_cut
def test_the_end_mark_waits_for_the_close(stream: dict[str, Any], cut: Cut) -> None:
    meter = StreamMeter(reader_of(stream, drop_usage=False))
    passed = b"".join(map(meter.feed, cut(body_of(stream))))
    assert b"[DONE]" not in passed
    assert b"[DONE]" in meter.close()
    assert meter.ended


def test_azures_first_chunk_without_choices_reaches_the_client() -> None:
    stream = next(stream for stream in STREAMS if stream["name"] == "azure-model-router")
    body = body_of(stream)
    assert b"prompt_filter_results" in events_of(body)[0]
    for cut in CUTS.values():
        out, _, _ = metered(stream, body, cut, drop_usage=True)
        assert events_of(out)[0] == events_of(body)[0]


def test_an_error_inside_a_stream_is_seen() -> None:
    broken = {
        stream["name"] for stream in STREAMS if metered(stream, body_of(stream), whole, drop_usage=False)[1].error
    }
    assert broken == {"openrouter-error", "groq-tool-use-failed"}


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("deepseek-tool-call", ("weather",)),
        ("xai-tool-call", ("weather",)),
        ("groq-tool-call", ("weather",)),
        ("alibaba-tool-call", ("weather",)),
        ("openai-chat-text", ()),
        ("anthropic-text", ()),
    ],
)
def test_tools_called_in_a_recorded_stream_are_named(name: str, tools: tuple[str, ...]) -> None:
    stream = next(stream for stream in STREAMS if stream["name"] == name)
    assert metered(stream, body_of(stream), byte_by_byte, drop_usage=True)[1].tools == tools


@pytest.mark.parametrize(
    "name",
    ["openai-chat-text", "openai-completion", "anthropic-text", "deepseek-reasoner", "mistral-text"],
)
def test_estimated_output_is_near_the_billed_output(name: str) -> None:
    stream = next(stream for stream in STREAMS if stream["name"] == name)
    estimate = metered(stream, body_of(stream), whole, drop_usage=False)[1].output_estimate
    assert 0.4 < estimate / stream["usage"]["completion"] < 2.5
