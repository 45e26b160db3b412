"""Everything under /v1 that has no dialect of its own: forwarded untouched, metered where the answer carries usage.

The answers of `/v1/responses`, `/v1/messages`, `/v1/completions` and `/v1/embeddings` are known well enough to be read:
their usage, model, finish reason, and the text that was delivered. An answer of any other shape is searched for a
`usage` object at the places where providers put one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.dialects import anthropic_errors, openai_errors
from gateway.dialects.base import MAX_TOOLS, Answer, Call, EventReader, Verdict
from gateway.dialects.fields import decode, flag_field, read_fields, string_field, write_fields
from gateway.dialects.opening import opening_items, opening_text
from gateway.dialects.reported import UsageReader
from gateway.dialects.texts import texts

_TEXT_FIELDS: Final = ("messages", "input", "prompt", "system", "instructions", "tools")
_LAST_TYPES: Final = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
_MAYBE_LAST: Final = re.compile(rb"message_stop|response\.(?:completed|incomplete|failed)|\[DONE\]")
#: where the text of a delta stands: Messages (text, thinking, partial_json), Completions (text in a choice)
_DELTA_TEXT: Final = ("text", "thinking", "partial_json")


class PassThrough:
    """A dialect that changes nothing but the model's name, where a route says so.

    `anthropic`: the client speaks Anthropic's API, so errors have that shape. `is_read`: requests of this path are
    weighed and held, so that one which cannot be read is refused.
    """

    name = "passthrough"

    def __init__(self, operation: str, *, anthropic: bool = False, is_read: bool = False) -> None:
        self._operation = operation
        self._is_read = is_read
        self._anthropic = anthropic

    def read(self, body: bytes) -> Call:
        """See `Dialect.read`. A body that is no JSON object (a file, a form) has no fields and is not looked into."""
        if not body.lstrip(b" \t\r\n").startswith(b"{"):
            return Call(self._operation, None, stream=False, body=body, fields={})
        try:
            fields = read_fields(body)
            model = string_field(fields, "model")
            stream = flag_field(fields, "stream")
        except InvalidRequest:
            if self._is_read:
                # Forwarded unread, it would be a way round the budget.
                raise
            # What it means is the provider's to say; it gets the bytes as they came.
            return Call(self._operation, None, stream=False, body=body, fields={})
        return Call(self._operation, model, stream=stream, body=body, fields=fields, usage_asked=True)

    def write(
        self,
        call: Call,
        model: str,
        *,
        ask_usage: bool,
        messages: Sequence[bytes] | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> bytes:
        """See `Dialect.write`. Messages of these formats are never changed."""
        del ask_usage, messages
        fields = dict(changes or {})
        if call.model is not None and model != call.model:
            fields["model"] = model
        return write_fields(call.fields, fields) if fields else call.body

    def opening(self, call: Call) -> list[str] | None:
        """See `Dialect.opening`. Messages: `system` and `messages`; Responses: `instructions` and `input`."""
        if self._operation != "chat":
            return None
        return [
            *(opening_text(call.fields[name]) for name in ("system", "instructions") if name in call.fields),
            *opening_items(call.fields.get("messages") or call.fields.get("input")),
        ]

    def input_text(self, call: Call) -> Iterator[str]:
        """See `Dialect.input_text`."""
        for name in _TEXT_FIELDS:
            if name in call.fields:
                yield from texts(call.fields[name])

    def answer(self, body: bytes) -> Answer:
        """See `Dialect.answer`."""
        reader = PassThroughReader()
        reader.read(body)
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool) -> EventReader:
        """See `Dialect.reader`."""
        del call, drop_usage
        return PassThroughReader()

    def error(self, fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
        """See `Dialect.error`."""
        if self._anthropic:
            return anthropic_errors.body(fault, request_id, details)
        return openai_errors.body(fault, details)

    def error_event(self, fault: GatewayError, request_id: str) -> bytes:
        """See `Dialect.error_event`."""
        name = b"event: error\n" if self._anthropic else b""
        return name + b"data: " + self.error(fault, request_id) + b"\n\n"


class PassThroughReader:
    """Reads events, or one whole answer as if it were an event, of any of the APIs named above."""

    def __init__(self) -> None:
        self._usage = UsageReader()
        self._model: str | None = None
        self._finish_reason: str | None = None
        self._service_tier: str | None = None
        self._tools: list[str] = []
        self._output = 0.0
        self._error = False

    def plain_prefix(self, region: bytes) -> int:
        """See `EventReader.plain_prefix`."""
        found = _MAYBE_LAST.search(region)
        end = found.start() if found else len(region)
        return region.rfind(b"\n\n", 0, end) + 2 if b"\r" not in region and b"\n\n" in region[:end] else 0

    def read(self, data: bytes) -> Verdict:
        """See `EventReader.read`."""
        if data == b"[DONE]":
            return Verdict.LAST
        value = decode(data)
        if not isinstance(value, dict):
            return Verdict.PASS
        kind = value.get("type")
        self._envelopes(value, kind)
        self._text(value)
        self._tool(value)
        if value.get("error") is not None:
            self._error = True
        return Verdict.LAST if isinstance(kind, str) and kind in _LAST_TYPES else Verdict.PASS

    def _envelopes(self, value: dict[str, Any], kind: object) -> None:
        """Usage and names stand on the event itself, on its `response` (Responses) or its `message` (Messages)."""
        self._envelope(value, input_side_only=False)
        for name in ("response", "message", "x_groq"):
            inner = value.get(name)
            if isinstance(inner, dict):
                self._envelope(inner, input_side_only=kind == "message_start")

    def _envelope(self, value: dict[str, Any], *, input_side_only: bool) -> None:
        self._usage.add(value.get("usage"), input_side_only=input_side_only)
        model = value.get("model")
        if self._model is None and isinstance(model, str) and model:
            self._model = model
        tier = value.get("service_tier")
        if isinstance(tier, str):
            self._service_tier = tier
        for name in ("stop_reason", "status"):
            reason = value.get(name)
            if isinstance(reason, str):
                self._finish_reason = reason

    def _text(self, value: dict[str, Any]) -> None:
        delta = value.get("delta")
        if isinstance(delta, str):
            self._output += estimate_tokens(delta)
        elif isinstance(delta, dict):
            self._output += sum(
                estimate_tokens(part) for name in _DELTA_TEXT if isinstance(part := delta.get(name), str)
            )
            reason = delta.get("stop_reason")
            if isinstance(reason, str):
                self._finish_reason = reason
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        text, reason = choice.get("text"), choice.get("finish_reason")
        delta = choice.get("delta")
        for part in (text, delta.get("content") if isinstance(delta, dict) else None):
            if isinstance(part, str):
                self._output += estimate_tokens(part)
        if isinstance(reason, str):
            self._finish_reason = reason

    def _tool(self, value: dict[str, Any]) -> None:
        """A tool call: a `tool_use` block (Messages) or a finished `function_call` item (Responses)."""
        block, item = value.get("content_block"), value.get("item")
        if isinstance(block, dict) and block.get("type") == "tool_use":
            self._tool_name(block.get("name"))
        if value.get("type") == "response.output_item.done" and isinstance(item, dict):
            self._item(item)
        for entry in _list(value.get("content")) + _list(value.get("output")):
            if isinstance(entry, dict):
                self._item(entry)
                self._output += sum(map(estimate_tokens, texts(entry)))

    def _item(self, item: dict[str, Any]) -> None:
        if item.get("type") in ("tool_use", "function_call"):
            self._tool_name(item.get("name"))

    def _tool_name(self, name: object) -> None:
        if isinstance(name, str) and name and len(self._tools) < MAX_TOOLS:
            self._tools.append(name[:256])
            self._output += estimate_tokens(name)

    def answer(self) -> Answer:
        """See `EventReader.answer`."""
        return Answer(
            usage=self._usage.reported(),
            model=self._model,
            finish_reason=self._finish_reason,
            service_tier=self._service_tier,
            tools=tuple(self._tools),
            output_estimate=int(self._output + 0.999),
            error=self._error,
        )

    def cut_short(self) -> bytes:
        """See `EventReader.cut_short`. None is known for these formats: they are never cut."""
        return b""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
