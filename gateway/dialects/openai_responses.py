"""Read and write /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from gateway.core.conversation.message import encode
from gateway.core.errors import GatewayError
from gateway.dialects import openai_errors
from gateway.dialects.base import Call, EventReader, ParsedResponse, Verdict, length_before, named_event
from gateway.dialects.fields import decode_response, flag_field, read_fields, string_field
from gateway.dialects.opening import identifying_text, identifying_texts
from gateway.dialects.reported import ReportedUsage
from gateway.dialects.response_state import ResponseState
from gateway.dialects.responses_output import MAX_ITEMS, MAX_KEPT, DeliveredOutput
from gateway.dialects.stream_batch import BatchReader, runs_of_kind
from gateway.dialects.texts import estimate, texts_of_fields

_TEXT_FIELDS: Final = ("instructions", "input", "prompt", "tools", "text")
#: the last event of a stream
LAST_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
#: The last event, and the end mark of some hosts, have one of these. Text in a response may have them too.
_LAST_MARKS: Final = (b"response.completed", b"response.incomplete", b"response.failed", b"[DONE]")
_FAILED: Final = frozenset({"error", "response.failed"})
#: Calls of the client's tools. A hosted tool may have no name (`web_search_call`) and is named by its type.
_NAMED_CALLS: Final = ("function_call", "custom_tool_call")
_FAILED_STATUS: Final = "failed"
#: The statuses of a response that has ended. With an unknown status it may still continue.
_ENDED: Final = frozenset({"completed", "incomplete", _FAILED_STATUS, "cancelled"})
#: the fields of an item with text; in the parts of an item the text is in `text` or `refusal`
_ITEM_TEXTS: Final = ("arguments", "input", "code", "action")
_ITEM_PARTS: Final = ("content", "summary")
_PART_TEXTS: Final = ("text", "refusal")
#: deltas of audio in base64, and the part of an item that has all of it
_AUDIO_DELTAS: Final = frozenset({"response.audio.delta", "response.output_audio.delta"})
_AUDIO_PART: Final = "output_audio"
#: Fields of a response that the provider did not describe: nothing was generated, or the stream was ended early.
SKELETON: Final[Mapping[str, object]] = {
    "id": "resp_none",
    "object": "response",
    "created_at": 0,
    "error": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
_IDENTIFYING: Final = ("id", "created_at", "model")


class OpenAIResponses:
    """Dialect of OpenAI's Responses API."""

    name = "responses"

    def read(self, body: bytes) -> Call:
        """Read a request body. The model may be absent (stored prompts have one); every stream reports its usage."""
        fields = read_fields(body)
        return Call(
            "chat",
            string_field(fields, "model") or None,
            stream=flag_field(fields, "stream"),
            body=body,
            fields=fields,
            usage_asked=True,
        )

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """Return the fields that make a stream report its usage."""
        del call
        return {}

    def opening(self, call: Call) -> list[str] | None:
        """Return the texts that identify the conversation."""
        instructions = [identifying_text(call.fields["instructions"])] if "instructions" in call.fields else []
        return [*instructions, *identifying_texts(call.fields.get("input"))]

    def input_text(self, call: Call) -> Iterator[str]:
        """Yield the texts of the request."""
        return texts_of_fields(call.fields, _TEXT_FIELDS)

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response."""
        reader = ResponsesReader(None, lambda: 0)
        reader.whole(decode_response(body))
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """Return a reader for one stream. No event has only usage, so nothing is dropped."""
        del drop_usage
        return ResponsesReader(
            call.model, lambda: estimate(self.input_text(call)) if input_tokens is None else input_tokens
        )

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """Return the error body."""
        del request_id
        return openai_errors.body(fault)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """Return the error as the last event of a stream.

        The documentation has the fields of the error in the event itself, and OpenAI's streams have them in `error`.
        The event has both, because the official Python SDK only raises for the latter.
        """
        del request_id
        details = {"code": fault.code, "message": fault.message, "param": fault.param}
        nested = {"type": fault.openai_type, **details}
        return named_event({"type": "error", **details, "sequence_number": number, "error": nested})


#: the fields of an event that locate the text of its delta
_PLACE: Final = ("item_id", "output_index", "content_index", "summary_index")


class _Event(msgspec.Struct, gc=False):
    """Fields of an event that are read from a text delta. Numbers with a decimal point are not accepted here."""

    type: str | None = None
    delta: str | None = None
    sequence_number: int | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = 0
    summary_index: int | None = 0


_TYPE_AND_PLACE: Final = attrgetter("type", *_PLACE)


class ResponsesReader(BatchReader[_Event]):
    """Read the events of one stream, or one whole response.

    `model`: the requested model. `count_input`: counts the tokens of the request, which only the last event reports.
    """

    decoder = msgspec.json.Decoder(list[_Event])

    def __init__(self, model: str | None, count_input: Callable[[], int]) -> None:
        self._asked_model = model
        self._count_input = count_input
        self._state = ResponseState()
        self._delivered = DeliveredOutput()
        #: the first event with the response; if it is too large, only the identifying fields
        self._first_event: bytes | None = None
        self._number = -1
        #: items whose text came in deltas
        self._streamed_items: set[object] = set()

    def plain_prefix(self, region: bytes) -> int:
        """Return the length of the leading events that can be read later."""
        return length_before(region, _LAST_MARKS)

    def read(self, data: bytes) -> Verdict:
        """Read one event."""
        if data == b"[DONE]":
            return Verdict.LAST
        value = decode_response(data)
        if not isinstance(value, dict):
            return Verdict.PASS
        kind = value.get("type")
        if not isinstance(kind, str):
            kind = ""
        self._numbered(value.get("sequence_number"))
        delta = value.get("delta")
        if isinstance(delta, str):
            self._delta(kind, value, delta)
        elif kind.startswith("response.output_item."):
            self._item_event(kind, value, data)
        else:
            self._other(kind, value, data)
        return Verdict.LAST if kind in LAST_EVENTS else Verdict.PASS

    def read_decoded(self, events: Sequence[bytes], decoded: Sequence[_Event]) -> None:
        """Read decoded events. Nearly all are deltas of one text, which are added together."""
        for (kind, *place), batch, run in runs_of_kind(events, decoded, _TYPE_AND_PLACE):
            deltas = [event.delta for event in run]
            if kind is None or kind in _AUDIO_DELTAS or None in deltas:
                for data in batch:
                    self.read(data)
                continue
            self._delta(kind, dict(zip(_PLACE, place, strict=True)), "".join(filter(None, deltas)))
            numbers = (event.sequence_number for event in reversed(run))
            self._number = next((number for number in numbers if number is not None), self._number)

    def _numbered(self, number: object) -> None:
        if type(number) is int:
            self._number = number

    def whole(self, response: Any) -> None:
        """Read a whole response."""
        if isinstance(response, dict):
            self._response(response)
            self._output(response)

    def _other(self, kind: str, value: dict[str, Any], data: bytes) -> None:
        self._state.failed(kind in _FAILED or value.get("error"))
        response = value.get("response")
        if not isinstance(response, dict):
            return
        if self._first_event is None:
            self._first_event = data if len(data) <= MAX_KEPT else encode({"response": _known(response)})
        self._response(response)
        if kind not in LAST_EVENTS:
            return
        if self._state.finish_reason is None:
            self._state.set_finish_reason(kind.removeprefix("response."))
        if self._state.is_empty:
            # Some hosts send the output only in the last event.
            self._output(response)

    def _response(self, response: dict[str, Any]) -> None:
        state = self._state
        state.usage.add(response.get("usage"))
        if (tool_usage := response.get("tool_usage")) is not None:
            state.usage.add_tools(tool_usage)
        state.set_model_and_tier(response.get("model"), response.get("service_tier"))
        response_id = response.get("id")
        state.id = response_id if isinstance(response_id, str) else state.id
        status, details = response.get("status"), response.get("incomplete_details")
        is_running = isinstance(status, str) and status not in _ENDED
        if not is_running:
            state.set_finish_reason(status)
        if isinstance(details, dict) and not is_running:
            state.set_finish_reason(details.get("reason"))
        state.failed(status == _FAILED_STATUS or response.get("error"))

    def _output(self, response: dict[str, Any]) -> None:
        output = response.get("output")
        for item in output if isinstance(output, list) else ():
            if isinstance(item, dict):
                self._tool(item, None)
                self._count_item(item)

    def _count_item(self, item: dict[str, Any]) -> None:
        for name in _ITEM_TEXTS:
            self._state.count_tokens(item.get(name))
        for name in _ITEM_PARTS:
            parts = item.get(name)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict):
                    self._count_part(part)
        self._state.count_opaque(item.get("encrypted_content"))

    def _count_part(self, part: dict[str, Any]) -> None:
        for text in _PART_TEXTS:
            self._state.count_tokens(part.get(text))
        if part.get("type") == _AUDIO_PART:
            self._state.count_audio(part.get("data"), part.get("transcript"))

    def _delta(self, kind: str, value: dict[str, Any], delta: str) -> None:
        if len(self._streamed_items) < MAX_ITEMS:
            self._streamed_items.add(_key(value, value.get("item_id")))
        if kind in _AUDIO_DELTAS:
            self._state.count_audio(delta)
        else:
            self._state.count_tokens(delta)
            self._delivered.add_text(kind, value, delta)

    def _item_event(self, kind: str, value: dict[str, Any], data: bytes) -> None:
        item = value.get("item")
        if not isinstance(item, dict):
            return
        key, is_done = _key(value, item.get("id")), kind == "response.output_item.done"
        self._tool(item, key)
        if is_done and key in self._streamed_items:
            self._state.count_opaque(item.get("encrypted_content"))
        elif is_done:
            self._count_item(item)
        self._delivered.item(value.get("output_index"), item, data, is_done=is_done)

    def _tool(self, item: dict[str, Any], key: object) -> None:
        kind, name = item.get("type"), item.get("name")
        one_of = item.get("server_label") or item.get("namespace")
        if kind in _NAMED_CALLS:
            self._state.add_tool_call(name, key, one_of=one_of)
        elif isinstance(kind, str) and kind.endswith("_call"):
            self._state.add_tool_call(name or kind, key, one_of=one_of)

    def answer(self) -> ParsedResponse:
        """Return what was read so far."""
        return self._state.answer()

    def next_number(self) -> int:
        """Return the number of the next event."""
        return self._number + 1

    def cut_short(self) -> bytes:
        """Return the events that end the stream at the output limit, without those that end each item."""
        self._state.set_finish_reason("max_output_tokens")
        end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return self._ended(end, self.next_number(), is_begun=self._first_event is not None)

    def failed(self, fault: GatewayError, number: int) -> bytes:
        """Return `response.failed`, as OpenAI does: some clients wait for the end of the response itself."""
        # OpenAI's code must be from a fixed set. The gateway's own code is in the preceding error event.
        end = {"status": _FAILED_STATUS, "error": {"code": "server_error", "message": fault.message}}
        return self._ended(end, number, is_begun=True)

    def _ended(self, end: Mapping[str, object], number: int, *, is_begun: bool) -> bytes:
        """Return the events that end the response in this state; `is_begun`: it needs no event that begins it."""
        # This is None if the event is nested so deep that it cannot be parsed at this depth of the call stack.
        event = decode_response(self._first_event) if self._first_event is not None else None
        known = event["response"] if event is not None else {}
        try:
            return self._end_events(known, {**end, "output": self._delivered.items()}, number, is_begun=is_begun)
        except RecursionError:
            # The event was parsed, but is too deep to be encoded at this depth of the call stack.
            return self._end_events(_known(known), {**end, "output": []}, number, is_begun=is_begun)

    def _end_events(
        self, known: Mapping[str, object], end: Mapping[str, object], number: int, *, is_begun: bool
    ) -> bytes:
        response = {**SKELETON, "model": self._asked_model, **known}
        events: list[dict[str, object]] = []
        if not is_begun:
            events.append({"type": "response.created", "response": {**response, "status": "in_progress", "output": []}})
        events.append({"type": f"response.{end['status']}", "response": {**response, **end, "usage": self._usage()}})
        return b"".join(named_event({**event, "sequence_number": place}) for place, event in enumerate(events, number))

    def _usage(self) -> dict[str, object]:
        reported, output = self._state.usage.reported(), self._state.output_estimate
        nothing = ReportedUsage(None, None, None)
        usage, _ = (reported or nothing).complete(self._count_input(), output)
        return {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cache_read_tokens,
                "cache_write_tokens": usage.cache_write_tokens,
            },
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _key(event: Mapping[str, Any], item_id: object) -> object:
    """Return the key of an item in a stream; None if the event names neither its index nor its id."""
    index = event.get("output_index")
    return index if type(index) is int else item_id if isinstance(item_id, str) else None


def _known(response: Mapping[str, Any]) -> dict[str, object]:
    return {name: value for name in _IDENTIFYING if isinstance(value := response.get(name), str | int | float)}
