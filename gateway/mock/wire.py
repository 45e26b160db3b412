"""Define requests, responses and errors that all formats share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

#: A decoded JSON object, or one about to be encoded.
JsonObject = dict[str, object]
#: Tokens that an answer may take at the most; a negative number would cut it from its end.
Limit = Annotated[int, msgspec.Meta(ge=0)]
#: Answers to one request: OpenAI's own bound. Without one, a call could take all memory there is.
Number = Annotated[int, msgspec.Meta(ge=1, le=128)]

#: The broad kind of an error, by status, in each API's words: (OpenAI, Anthropic).
_ERROR_TYPES: Final = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
    529: ("server_error", "overloaded_error"),
}
_FIRST_SERVER_ERROR: Final = 500


class ApiError(Exception):
    """A refusal, not yet in an API's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        body: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.body = body
        """The JSON to send, for an API with an error shape of its own; None: the shape of the endpoint."""


@dataclass(frozen=True, slots=True)
class ReceivedCall:
    """A call as received. Header names are lower case; `query` has no `?`."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of the header `name` (lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class MockUsage:
    """Tokens of one call, >= 0. `cached` is a part of `input`, `reasoning` of `output`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0

    @property
    def total(self) -> int:
        """Input and output together."""
        return self.input + self.output

    def plus(self, other: MockUsage) -> MockUsage:
        """Return this and what another pass used."""
        return MockUsage(
            self.input + other.input,
            self.output + other.output,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
        )


class Share(NamedTuple):
    """What one model bills for a call that several models worked on."""

    model: str
    usage: MockUsage


class SentEvent(NamedTuple):
    """One event of a stream as sent. `content` counts for `chunks`, `interval` and `die`; `done` ends the stream."""

    data: bytes
    kind: Literal["meta", "content", "done"] = "meta"


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer sent at once. `usage` is what it bills, None: nothing. A dict is sent as JSON."""

    content: JsonObject | bytes
    model: str = ""
    usage: MockUsage | None = None
    status: int = 200
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = field(default=())
    shares: Sequence[Share] = ()
    """What each model bills; empty: `model` bills all of it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer sent as server-sent events. `usage` is what it bills; None: nothing."""

    frames: list[SentEvent]
    model: str = ""
    usage: MockUsage | None = None
    shares: Sequence[Share] = ()
    """What each model bills; empty: `model` bills all of it."""


Answer = Whole | Stream

encode = msgspec.json.Encoder().encode


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`.

    Raises:
        ApiError: 400, it is not JSON or lacks what a `kind` needs.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request. ({error})") from None


def data_frame(value: JsonObject, kind: Literal["meta", "content", "done"] = "meta") -> SentEvent:
    """An event without a name, as OpenAI's older APIs send them."""
    return SentEvent(b"data: " + encode(value) + b"\n\n", kind)


def named_frame(value: JsonObject, kind: Literal["meta", "content", "done"] = "meta") -> SentEvent:
    """An event named by the `type` of its data."""
    return SentEvent(b"event: " + str(value["type"]).encode() + b"\ndata: " + encode(value) + b"\n\n", kind)


def check_model(model: str) -> None:
    """Every model is known, except those whose name starts with `missing`.

    Raises:
        ApiError: 404, it is unknown.
    """
    if model.startswith("missing"):
        message = f"The model `{model}` does not exist or you do not have access to it."
        raise ApiError(404, message, code="model_not_found")


def openai_error(error: ApiError) -> JsonObject:
    """The body of `error` in OpenAI's shape."""
    server = "server_error" if error.status >= _FIRST_SERVER_ERROR else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, (server, ""))[0]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError, request_id: str) -> JsonObject:
    """The body of `error` in Anthropic's shape."""
    other = "api_error" if error.status >= _FIRST_SERVER_ERROR else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, ("", other))[1]
    body: JsonObject = {"type": kind, "message": error.message}
    if error.code and error.code.startswith("compaction_"):
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body, "request_id": request_id}
