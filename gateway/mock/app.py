"""Build the ASGI app of the mock provider: its endpoints, and the control paths for tests in other processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs

from gateway.mock import chat, completions, embeddings, messages, other, responses
from gateway.mock.delivery import Delivery
from gateway.mock.provider import MockExchange, MockProvider, RecordedCall
from gateway.mock.turns import Behaviour
from gateway.mock.wire import (
    ApiError,
    JsonObject,
    MockResponse,
    ReceivedCall,
    Stream,
    Whole,
    anthropic_error,
    openai_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

CONTROL_PREFIX: Final = "/__mock/"
DEFAULT_CALLS_LIMIT: Final = 100

_PLAIN: Final = Behaviour()
_SUCCESS: Final = range(200, 300)
_HTML: Final = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\n"


class MockEndpoint(NamedTuple):
    """The function that responds to a path. Only a `scripted` endpoint takes turns from the script."""

    respond: Callable[[MockExchange], MockResponse]
    scripted: bool = True


_ENDPOINTS: Final = {
    ("POST", "/v1/chat/completions"): MockEndpoint(chat.respond),
    ("POST", "/v1/completions"): MockEndpoint(completions.respond),
    ("POST", "/v1/embeddings"): MockEndpoint(embeddings.respond),
    ("POST", "/v1/responses"): MockEndpoint(responses.respond),
    ("POST", "/v1/responses/compact"): MockEndpoint(responses.compact, scripted=False),
    ("POST", "/v1/responses/input_tokens"): MockEndpoint(responses.count_input, scripted=False),
    ("POST", "/v1/messages"): MockEndpoint(messages.respond),
    ("POST", "/v1/messages/count_tokens"): MockEndpoint(messages.count_input, scripted=False),
    ("POST", "/v1/files"): MockEndpoint(other.files, scripted=False),
    ("POST", "/v1/audio/speech"): MockEndpoint(other.speech),
    ("POST", "/v1/audio/transcriptions"): MockEndpoint(other.transcriptions),
    ("POST", "/v1/images/generations"): MockEndpoint(other.images),
    ("GET", "/v1/models"): MockEndpoint(other.models, scripted=False),
}
#: how a background response is fetched and cancelled: method, slashes in the path, whether it ends with `/cancel`
_RESPONSE_PATHS: Final = (("GET", 3, False), ("POST", 4, True))
_PATHS: Final = frozenset(path for _, path in _ENDPOINTS)
_MODEL: Final = MockEndpoint(other.model, scripted=False)
_RESPONSE: Final = MockEndpoint(responses.fetch, scripted=False)


def create_app(provider: MockProvider) -> ASGIApp:
    """Return an ASGI app that serves `provider`. It supports HTTP only: no lifespan events, no WebSockets."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        request = await _read(scope, receive)
        if request is None:
            return
        number = provider.number()
        response: MockResponse
        if request.path.startswith(CONTROL_PREFIX):
            response, behaviour = _control(request, provider), _PLAIN
        else:
            response, behaviour = _decide(request, provider, number)
        await Delivery(request, behaviour, number, receive, send).run(response)

    return app


async def _read(scope: Scope, receive: Receive) -> ReceivedCall | None:
    """Return the whole request, or None if the client disconnects before it is complete."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    query = scope["query_string"].decode("latin-1")
    return ReceivedCall(scope["method"], scope["path"], query, headers, b"".join(parts))


def _decide(request: ReceivedCall, provider: MockProvider, number: int) -> tuple[MockResponse, Behaviour]:
    """Return the response and its behaviour, after recording and billing the call.

    A client that disconnects while it receives the response is billed too, as by real providers.
    """
    behaviour = _PLAIN
    response: MockResponse
    try:
        provider.authorize(request)
        endpoint = _endpoint(request)
        exchange = MockExchange.begin(request, provider, number, scripted=endpoint.scripted)
        behaviour = exchange.behaviour
        response = _fault(behaviour) or endpoint.respond(exchange)
    except ApiError as error:
        response = _refusal(error, request, behaviour, number)
    status = 200 if isinstance(response, Stream) else response.status
    if behaviour.hang or behaviour.die == 0:
        status = 0
    usage = response.usage if status in _SUCCESS else None
    provider.record(request, status=status, model=response.model, usage=usage, shares=response.shares)
    return response, behaviour


def _endpoint(request: ReceivedCall) -> MockEndpoint:
    """Return the endpoint of a request.

    Raises:
        ApiError: 404 or 405, there is no such endpoint.
    """
    endpoint = _ENDPOINTS.get((request.method, request.path))
    if endpoint:
        return endpoint
    if request.method == "GET" and request.path.startswith("/v1/models/"):
        return _MODEL
    if (request.method, request.path.count("/"), request.path.endswith("/cancel")) in _RESPONSE_PATHS and (
        request.path.startswith("/v1/responses/")
    ):
        return _RESPONSE
    if request.path in _PATHS:
        raise ApiError(405, f"Not allowed to {request.method} on {request.path}", code="method_not_supported")
    raise ApiError(404, f"Invalid URL ({request.method} {request.path})")


def _fault(behaviour: Behaviour) -> MockResponse | None:
    """Return the HTML error page, if the behaviour asks for it.

    Raises:
        ApiError: the behaviour asks for an error status.
    """
    if behaviour.html:
        return Whole(_HTML, status=502, content_type="text/html; charset=utf-8")
    if behaviour.status is not None:
        raise ApiError(behaviour.status, f"A status {behaviour.status} was asked for.", code="mock_error")
    return None


def _refusal(error: ApiError, request: ReceivedCall, behaviour: Behaviour, number: int) -> Whole:
    anthropic = request.path.startswith("/v1/messages") or request.header("anthropic-version") is not None
    content = error.body or (anthropic_error(error, f"req_mock{number}") if anthropic else openai_error(error))
    headers = [("retry-after", behaviour.retry_after)] if behaviour.retry_after is not None else []
    return Whole(content, status=error.status, headers=headers)


def _control(request: ReceivedCall, provider: MockProvider) -> Whole:
    """Serve a control path for tests in other processes. These requests are neither recorded nor billed."""
    match request.method, request.path.removeprefix(CONTROL_PREFIX):
        case "GET", "billed":
            sessions = {name: asdict(billed) for name, billed in provider.billed_by_session().items()}
            return Whole({"total": asdict(provider.billed()), "sessions": sessions})
        case "GET", "calls":
            limit = parse_qs(request.query).get("limit", [str(DEFAULT_CALLS_LIMIT)])[0]
            if not limit.isdecimal():
                return Whole(openai_error(ApiError(400, "limit must be a number >= 0", param="limit")), status=400)
            newest = provider.calls[-int(limit) :] if int(limit) else []
            return Whole({"calls": [_shown(call) for call in newest]})
        case "POST", "reset":
            provider.reset()
            return Whole({"reset": True})
        case _:
            return Whole(openai_error(ApiError(404, f"Invalid URL ({request.method} {request.path})")), status=404)


def _shown(call: RecordedCall) -> JsonObject:
    """Return a recorded call as JSON, without its body."""
    return {
        "method": call.method,
        "path": call.path,
        "query": call.query,
        "headers": call.headers,
        "body_bytes": call.body_bytes,
        "body_sha256": call.body_sha256,
        "model": call.model,
        "status": call.status,
        "billed": asdict(call.billed) if call.billed else None,
    }
