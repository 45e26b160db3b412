"""Forward requests about a stored response, and read its usage."""

from __future__ import annotations

from typing import Any, Final

from gateway.dialects.base import Call, Dialect, EventReader, ParsedResponse
from gateway.dialects.openai_responses import LAST_EVENTS, ResponsesReader
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.response_state import ResponseState

_RESPONSES: Final = "responses"


class StoredResponses(PassThrough):
    """Requests as `PassThrough` has them, and answers as `made` reads those that it makes at once."""

    def __init__(self, operation: str, made: Dialect, *, is_empty: bool) -> None:
        super().__init__(operation, is_empty=is_empty)
        self._made = made

    def answer(self, body: bytes) -> ParsedResponse:
        """See `Dialect.answer`."""
        return self._made.answer(body)

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """See `Dialect.reader`. Nothing was asked for here, so nothing is dropped."""
        del drop_usage, input_tokens
        if self._made.name == _RESPONSES:
            return _AnyPartReader(None, lambda: 0)
        return self._made.reader(call, drop_usage=False)


class _AnyPartReader(ResponsesReader):
    """Reads a stream that may begin anywhere (`starting_after`): its last event says all of its answer, or none."""

    def _other(self, kind: str, value: dict[str, Any], data: bytes) -> None:
        response = value.get("response")
        if kind in LAST_EVENTS and isinstance(response, dict):
            if response.get("output"):
                self._gathered = ResponseState()
            # What came before was an error of the stream, or is said again.
            self._gathered.error = False
        super()._other(kind, value, data)
