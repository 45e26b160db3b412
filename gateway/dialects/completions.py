"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.core.errors import GatewayError
from gateway.dialects import openai_errors
from gateway.dialects.base import Answer, Call, EventReader
from gateway.dialects.choices import COMPLETIONS_FORM, ChoicesReader, asks_for_usage, read_whole, usage_wish
from gateway.dialects.fields import flag_field, model_field, read_fields
from gateway.dialects.texts import texts_of_fields

_TEXT_FIELDS: Final = ("prompt", "suffix")


class Completions:
    """The dialect of plain text completions."""

    name = "completions"

    def read(self, body: bytes) -> Call:
        """See `Dialect.read`. The prompt may be absent: then a model goes on from nothing."""
        fields = read_fields(body)
        return Call(
            operation="text_completion",
            model=model_field(fields),
            stream=flag_field(fields, "stream"),
            body=body,
            fields=fields,
            usage_asked=asks_for_usage(fields),
        )

    def write(
        self,
        call: Call,
        model: str,
        *,
        ask_usage: bool,
        messages: Sequence[bytes] | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> bytes:
        """See `Dialect.write`. A prompt has no messages; `ask_usage` as in chat."""
        del messages
        return call.written(model, {**(changes or {}), **(usage_wish(call) if ask_usage else {})})

    def opening(self, call: Call) -> list[str] | None:
        """See `Dialect.opening`: a prompt is no conversation."""
        del call
        return None

    def input_text(self, call: Call) -> Iterator[str]:
        """See `Dialect.input_text`."""
        return texts_of_fields(call.fields, _TEXT_FIELDS)

    def answer(self, body: bytes) -> Answer:
        """See `Dialect.answer`."""
        return read_whole(body, COMPLETIONS_FORM)

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """See `Dialect.reader`."""
        del call, input_tokens
        return ChoicesReader(COMPLETIONS_FORM, drop_usage=drop_usage)

    def error(self, fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
        """See `Dialect.error`."""
        del request_id
        return openai_errors.body(fault, details)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """See `Dialect.error_event`."""
        del request_id, number
        return openai_errors.event(fault)
