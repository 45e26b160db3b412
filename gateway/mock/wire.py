"""Requests, responses, usage and errors that all wire formats of the mock provider share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

#: A JSON object.
JsonObject = dict[str, object]
#: A limit of output tokens. A negative one would truncate the text from its end.
Limit = Annotated[int, msgspec.Meta(ge=0)]
#: The number of choices in one response. 128 is OpenAI's limit; without it, a call could use up all memory.
Number = Annotated[int, msgspec.Meta(ge=1, le=128)]

#: The type of an error by status: (OpenAI, Anthropic).
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
    """An error response, before it is rendered in the format of an API."""

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
        """The JSON to send, for an API with its own error format; None: the format of the endpoint."""


@dataclass(frozen=True, slots=True)
class ReceivedCall:
    """A request as received. Header names are lower case; `query` has no `?`."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the first value of the header `name` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class MockUsage:
    """Tokens of one call. `cached` is a part of `input`, and `reasoning` is a part of `output`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0

    @property
    def total(self) -> int:
        """Return the sum of input and output."""
        return self.input + self.output

    def plus(self, other: MockUsage) -> MockUsage:
        """Return the sum of this usage and another one."""
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
    """One event of a stream. `content` events count for `chunks`, `interval` and `die`; `done` ends the stream."""

    data: bytes
    kind: Literal["meta", "content", "done"] = "meta"


@dataclass(frozen=True, slots=True)
class Whole:
    """A response that is sent at once. `usage` is billed; None: nothing. A dict is sent as JSON."""

    content: JsonObject | bytes
    model: str = ""
    usage: MockUsage | None = None
    status: int = 200
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = field(default=())
    shares: Sequence[Share] = ()
    """What is billed for each model; empty: all of `usage` is billed for `model`."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A response that is sent as server-sent events. `usage` is billed; None: nothing."""

    frames: list[SentEvent]
    model: str = ""
    usage: MockUsage | None = None
    shares: Sequence[Share] = ()
    """What is billed for each model; empty: all of `usage` is billed for `model`."""


MockResponse = Whole | Stream

encode = msgspec.json.Encoder().encode


def decode(body: bytes, kind: type[T]) -> T:
    """Return a JSON body decoded as `kind`.

    Raises:
        ApiError: 400, the body is not JSON, or a field is missing or has the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request. ({error})") from None


def data_frame(value: JsonObject, kind: Literal["meta", "content", "done"] = "meta") -> SentEvent:
    """Return an event without a name, as in OpenAI's older APIs."""
    return SentEvent(b"data: " + encode(value) + b"\n\n", kind)


def named_frame(value: JsonObject, kind: Literal["meta", "content", "done"] = "meta") -> SentEvent:
    """Return an event whose name is the `type` of its data."""
    return SentEvent(b"event: " + str(value["type"]).encode() + b"\ndata: " + encode(value) + b"\n\n", kind)


def check_model(model: str) -> None:
    """Refuse a model whose name starts with `missing`; all other models exist.

    Raises:
        ApiError: 404, the model does not exist.
    """
    if model.startswith("missing"):
        message = f"The model `{model}` does not exist or you do not have access to it."
        raise ApiError(404, message, code="model_not_found")


def openai_error(error: ApiError) -> JsonObject:
    """Return the body of an error in OpenAI's format."""
    server = "server_error" if error.status >= _FIRST_SERVER_ERROR else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, (server, ""))[0]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError, request_id: str) -> JsonObject:
    """Return the body of an error in Anthropic's format."""
    other = "api_error" if error.status >= _FIRST_SERVER_ERROR else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, ("", other))[1]
    body: JsonObject = {"type": kind, "message": error.message}
    if error.code and error.code.startswith("compaction_"):
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body, "request_id": request_id}
