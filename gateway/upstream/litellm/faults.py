"""Convert litellm's exceptions to the gateway's errors, without tracebacks and keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from gateway.core.errors import (
    GatewayError,
    UpstreamNotAccepted,
    UpstreamProtocolError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
    UpstreamUntranslated,
)
from gateway.core.values import dataclass
from gateway.upstream.body import AlreadyRead

#: the prefix that litellm puts before the provider's message
_PREFIX: Final = re.compile(
    r"\A(?:litellm\.)?[A-Za-z_.]{1,60}(?:Error|Exception|Timeout)(?: [A-Za-z]{1,40}Error)?(?:: ?| - )"
)
#: litellm's advice for its own callers, and its diagnosis
_ADVICE: Final = re.compile(
    r"(?s)(?:\n\s*Traceback \(most recent|\n+This looks like a bug in LiteLLM|\s+To drop these, |\.? Handle with `).*"
)
_MAX_MESSAGE: Final = 4096
_HIDDEN: Final = "***"
#: Characters of the shortest secret that is hidden. Shorter ones are parts of too many words.
_MIN_SECRET: Final = 4
_CONNECT: Final = frozenset({"ConnectError", "ClientConnectorError", "ConnectionRefusedError"})
_NOT_ACCEPTED: Final = "ConnectTimeout"
_BROKEN: Final = frozenset(
    {
        "ReadError", "WriteError", "RemoteProtocolError", "ClientOSError", "ServerDisconnectedError",
        "ConnectionResetError", "ClientPayloadError", "BrokenPipeError", "NetworkError",
    }
)  # fmt: skip
_TIMEOUTS: Final = frozenset({"Timeout", "TimeoutException", "ReadTimeout", "TimeoutError", "APITimeoutError"})
#: the code for a call that litellm cannot translate; reported as a refusal, instead of a provider's response
NOT_TRANSLATABLE: Final = "not_translatable"
#: litellm's exceptions for such a call
_UNTRANSLATED: Final = frozenset({"UnsupportedParamsError", "LiteLLMUnknownProvider", "ImageFetchError"})
_RETURNED: Final = frozenset({"retry-after", "request-id", "x-request-id", "x-should-retry", "retry-after-ms"})

_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error",
    529: "overloaded_error", 503: "overloaded_error",
}  # fmt: skip
_OPENAI_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """A provider's refusal, without litellm's additions."""

    status: int
    message: str
    code: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def as_reply(self, *, anthropic: bool) -> AlreadyRead:
        """Return the refusal as a response in the client's format."""
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")  # noqa: PLR2004
            coded = {"code": self.code} if self.code else {}  # as in the gateway's own errors
            value: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": self.message, **coded}}
        else:
            kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")  # noqa: PLR2004
            value = {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}
        headers = [(b"content-type", b"application/json"), *self.headers]
        return AlreadyRead(self.status, headers, msgspec.json.encode(value))


def convert(error: Exception, name: str, secrets: Iterable[str]) -> Refusal | GatewayError:
    """Return the provider's refusal, or the gateway's error if there was no response. `name`: of the provider."""
    kinds = [type(link).__name__ for link in _chain(error)]
    if kinds[0] in _UNTRANSLATED:
        return Refusal(400, _message(error, secrets), NOT_TRANSLATABLE)
    if _NOT_ACCEPTED in kinds:
        return UpstreamNotAccepted(f'The provider "{name}" did not accept a connection in time (timeout_s.connect).')
    if kinds[0] in _TIMEOUTS or (kinds[0] == "APIConnectionError" and _TIMEOUTS.intersection(kinds)):
        return UpstreamTimeout(f'The provider "{name}" did not respond in time (timeout_s).')
    status = _first_status(error)
    if status is None or (status >= 500 and _CONNECT.union(_BROKEN).intersection(kinds)):  # noqa: PLR2004
        return _unreached(error, kinds, name)
    code = "context_length_exceeded" if "ContextWindowExceededError" in kinds else None
    return Refusal(status, _message(error, secrets), code, _headers(error))


def stream_error(error: Exception, name: str, secrets: Iterable[str]) -> GatewayError:
    """Return the error for a stream that broke off."""
    result = convert(error, name, secrets)
    if isinstance(result, GatewayError):
        return result
    return UpstreamProtocolError(f'The provider "{name}" broke off its response: {result.message}')


def _unreached(error: Exception, kinds: list[str], name: str) -> GatewayError:
    if _CONNECT.intersection(kinds):
        return UpstreamRefused(f'The provider "{name}" cannot be reached: no connection was made. Try again later.')
    if _BROKEN.intersection(kinds):
        return UpstreamUnreachable(f'The provider "{name}" cannot be reached: the connection failed or was reset.')
    missing = next((link.name for link in _chain(error) if isinstance(link, ImportError) and link.name), None)
    if missing:
        return UpstreamUntranslated(f'litellm needs the Python package "{missing}" for the provider "{name}".')
    return UpstreamUntranslated(
        f'litellm could not translate the call to "{name}" or its response ({kinds[-1]}). '
        "Remove unusual fields. If it persists, it is a bug of litellm."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and its causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_status(error: Exception) -> int | None:
    """Return the status of the provider's response, or None; litellm has fewer error types than there are statuses.

    `APIConnectionError` is skipped, because litellm gives it a status although there is no response.
    """
    links = [link for link in _chain(error) if type(link).__name__ != "APIConnectionError"]
    statuses = [getattr(link, "status_code", None) for link in links]
    return next((status for status in reversed(statuses) if isinstance(status, int) and 400 <= status <= 599), None)  # noqa: PLR2004


def _message(error: Exception, secrets: Iterable[str]) -> str:
    text = _ADVICE.sub("", str(getattr(error, "message", "") or error)).strip()
    while match := _PREFIX.match(text):
        text = text[match.end() :]
    text = _message_in_body(text) or text
    for secret in secrets:
        if len(secret) >= _MIN_SECRET:
            text = text.replace(secret, _HIDDEN)
    return text[:_MAX_MESSAGE] or "The provider refused the call and did not say why."


def _message_in_body(text: str) -> str | None:
    """Return the message in an error body, which litellm prints as JSON or as Python bytes."""
    start = text.find("{")
    if start < 0:
        return None
    inner = text[start : text.rfind("}") + 1]
    if text[:start].endswith(("b'", 'b"')):
        try:
            inner = ast.literal_eval(text[start - 2 : text.rfind(text[start - 1]) + 1]).decode("utf-8", "replace")
        except (ValueError, SyntaxError):
            return None
    try:
        value = msgspec.json.decode(inner)
    except msgspec.DecodeError:
        return None
    error = value.get("error", value) if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None


def _headers(error: Exception) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of the provider's response about retries and the request id."""
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None) or {}
    more = getattr(error, "litellm_response_headers", None) or {}
    named = {str(name).lower(): str(value) for name, value in (*dict(more).items(), *dict(headers).items())}
    return tuple(
        (name.encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in named.items()
        if name in _RETURNED
    )
