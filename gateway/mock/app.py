"""Route requests to the provider's endpoints, and control it from other processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs

from gateway.mock import chat, completions, embeddings, messages, other, responses
from gateway.mock.delivery import Delivery
from gateway.mock.provider import MockExchange, MockProvider, RecordedCall
from gateway.mock.turns import Behaviour
from gateway.mock.wire import Answer, ApiError, JsonObject, ReceivedCall, Stream, Whole, anthropic_error, openai_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

CONTROL_PREFIX: Final = "/__mock/"
DEFAULT_CALLS_LIMIT: Final = 100

_PLAIN: Final = Behaviour()
_SUCCESS: Final = range(200, 300)
_HTML: Final = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\n"


class MockEndpoint(NamedTuple):
    """What answers a path. Only a `scripted` one takes turns of the script."""

    answer: Callable[[MockExchange], Answer]
    scripted: bool = True


_ENDPOINTS: Final = {
    ("POST", "/v1/chat/completions"): MockEndpoint(chat.answer),
    ("POST", "/v1/completions"): MockEndpoint(completions.answer),
    ("POST", "/v1/embeddings"): MockEndpoint(embeddings.answer),
    ("POST", "/v1/responses"): MockEndpoint(responses.answer),
    ("POST", "/v1/responses/compact"): MockEndpoint(responses.compact, scripted=False),
    ("POST", "/v1/responses/input_tokens"): MockEndpoint(responses.count_input, scripted=False),
    ("POST", "/v1/messages"): MockEndpoint(messages.answer),
    ("POST", "/v1/messages/count_tokens"): MockEndpoint(messages.count_input, scripted=False),
    ("POST", "/v1/files"): MockEndpoint(other.files, scripted=False),
    ("POST", "/v1/audio/speech"): MockEndpoint(other.speech),
    ("POST", "/v1/audio/transcriptions"): MockEndpoint(other.transcriptions),
    ("POST", "/v1/images/generations"): MockEndpoint(other.images),
    ("GET", "/v1/models"): MockEndpoint(other.models, scripted=False),
}
#: how a response that is made in the background is fetched, and cancelled: method, slashes of the path, its end
_OF_A_RESPONSE: Final = (("GET", 3, False), ("POST", 4, True))
_PATHS: Final = frozenset(path for _, path in _ENDPOINTS)
_MODEL: Final = MockEndpoint(other.model, scripted=False)
_RESPONSE: Final = MockEndpoint(responses.fetch, scripted=False)


def create_app(provider: MockProvider) -> ASGIApp:
    """An ASGI app that answers for `provider`. It speaks HTTP only: no lifespan, no websockets."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        request = await _read(scope, receive)
        if request is None:
            return
        number = provider.number()
        answer: Answer
        if request.path.startswith(CONTROL_PREFIX):
            answer, behaviour = _control(request, provider), _PLAIN
        else:
            answer, behaviour = _decide(request, provider, number)
        await Delivery(request, behaviour, number, receive, send).run(answer)

    return app


async def _read(scope: Scope, receive: Receive) -> ReceivedCall | None:
    """The whole request; None where the client leaves before it is here."""
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


def _decide(request: ReceivedCall, provider: MockProvider, number: int) -> tuple[Answer, Behaviour]:
    """The answer and how it behaves, already recorded and billed: a client that leaves now pays all the same."""
    behaviour = _PLAIN
    answer: Answer
    try:
        provider.authorize(request)
        endpoint = _endpoint(request)
        exchange = MockExchange.begin(request, provider, number, scripted=endpoint.scripted)
        behaviour = exchange.behaviour
        answer = _fault(behaviour) or endpoint.answer(exchange)
    except ApiError as error:
        answer = _refusal(error, request, behaviour, number)
    status = 200 if isinstance(answer, Stream) else answer.status
    if behaviour.hang or behaviour.die == 0:
        status = 0
    usage = answer.usage if status in _SUCCESS else None
    provider.record(request, status=status, model=answer.model, usage=usage, shares=answer.shares)
    return answer, behaviour


def _endpoint(request: ReceivedCall) -> MockEndpoint:
    """What answers `request`.

    Raises:
        ApiError: 404 or 405, nothing does.
    """
    found = _ENDPOINTS.get((request.method, request.path))
    if found:
        return found
    if request.method == "GET" and request.path.startswith("/v1/models/"):
        return _MODEL
    if (request.method, request.path.count("/"), request.path.endswith("/cancel")) in _OF_A_RESPONSE and (
        request.path.startswith("/v1/responses/")
    ):
        return _RESPONSE
    if request.path in _PATHS:
        raise ApiError(405, f"Not allowed to {request.method} on {request.path}", code="method_not_supported")
    raise ApiError(404, f"Invalid URL ({request.method} {request.path})")


def _fault(behaviour: Behaviour) -> Answer | None:
    """The answer in place of any other, if the behaviour asks for one.

    Raises:
        ApiError: it asks for an error.
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
    """Answer a test that looks at the provider from another process; neither recorded nor billed."""
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
    """A record without its body."""
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
