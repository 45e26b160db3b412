"""Forward requests about a stored response, and read its usage."""

from __future__ import annotations

from typing import Any, Final

from gateway.dialects.base import Call, Dialect, EventReader, ParsedResponse
from gateway.dialects.openai_responses import LAST_EVENTS, ResponsesReader
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.response_state import ResponseState

_RESPONSES: Final = "responses"


class StoredResponses(PassThrough):
    """Forward requests like `PassThrough`. Read responses with `response_dialect`, the dialect that created them."""

    def __init__(self, operation: str, response_dialect: Dialect, *, is_empty: bool) -> None:
        super().__init__(operation, is_empty=is_empty)
        self._response_dialect = response_dialect

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response."""
        return self._response_dialect.answer(body)

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """Return a reader for one stream. The gateway asked for no usage chunk, so no event is dropped."""
        del drop_usage, input_tokens
        if self._response_dialect.name == _RESPONSES:
            return _AnyPartReader(None, lambda: 0)
        return self._response_dialect.reader(call, drop_usage=False)


class _AnyPartReader(ResponsesReader):
    """Read a stream that may start anywhere (`starting_after`). Its last event has the whole response, or nothing."""

    def _other(self, kind: str, value: dict[str, Any], data: bytes) -> None:
        response = value.get("response")
        if kind in LAST_EVENTS and isinstance(response, dict):
            if response.get("output"):
                self._state = ResponseState()
            # An earlier error was an error of the stream only, or the last event repeats it.
            self._state.error = False
        super()._other(kind, value, data)
