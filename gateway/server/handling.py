"""Wrap the handlers of /api: authenticate the caller, and encode responses and errors as JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.config.model_catalog import Catalog
from gateway.context.inspector import Inspector
from gateway.core import errors
from gateway.core.ledger.charging import BudgetPolicy, KeyContext
from gateway.core.routing import Routes
from gateway.core.steps import Agent
from gateway.core.stored import StoredKey
from gateway.core.values import dataclass
from gateway.dialects import openai_errors
from gateway.server import headers as ours
from gateway.server.auth import Access, Authenticator, credential_hash
from gateway.server.keyring import KeyRing
from gateway.server.unrecorded import UnrecordedRefusals

Handler = Callable[[Request], Awaitable[Response]]

#: dialect and operation in the record of a refused request to /api
_API: Final = "api"
#: most rows of a list, and the longest number that is read
_MOST_ROWS: Final = 1000
_LIMIT_DIGITS: Final = 20
_MOST_BODY_BYTES: Final = 64 * 1024
_NO_STORE: Final = {"cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class ServerRules:
    """The parts that a reload replaces.

    `id_headers`: configured headers that name a session; they have priority over the built-in ones. `configured_keys`:
    the client keys of the configuration, as those of the store, without their secrets. `key_context`: what else applies
    to them. `unrecorded` and `new_id` are not replaced: they note refused requests under a new id.
    """

    authenticator: Authenticator
    keys: KeyRing
    routes: Routes
    catalog: Catalog
    inspector: Inspector
    budget: BudgetPolicy
    max_body: int
    body_timeout_s: float
    unrecorded: UnrecordedRefusals
    new_id: Callable[[], str]
    agents: Mapping[str, Agent] = field(default_factory=dict)
    id_headers: Sequence[bytes] = ()
    configured_keys: Sequence[StoredKey] = ()
    key_context: KeyContext = KeyContext()


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file that is the same for every client. `kind`: media type; `tag`: value of the header `ETag`."""

    body: bytes
    kind: str
    tag: str

    @classmethod
    def from_bytes(cls, body: bytes, kind: str) -> StaticFile:
        """Return a file with this content and media type."""
        return cls(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def file_or_not_modified(request: Request, file: StaticFile, headers: Mapping[str, str]) -> Response:
    """Return the file, or 304 if the client already has it."""
    headers = {**headers, "etag": file.tag}
    known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


def json_handler(rules: Callable[[], ServerRules], handler: Callable[[Request, Access], Awaitable[Any]]) -> Handler:
    """Return a handler that authenticates the caller, and encodes the result and errors as JSON."""

    async def handle(request: Request) -> Response:
        try:
            return _response(await handler(request, await access_of(rules, request)))
        except errors.GatewayError as fault:
            return fault_response(fault)

    return handle


async def json_body(request: Request, example: str) -> Any:
    """Return the decoded JSON body of a small request. `example`: a valid body, for the error.

    Raises:
        InvalidRequest: the body is too long, or not JSON.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY_BYTES:
            raise errors.InvalidRequest(f"The body is longer than the limit of {_MOST_BODY_BYTES:,} bytes.")
    try:
        return msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise errors.InvalidRequest(f"The body must be JSON, such as {example}.") from None


async def access_of(rules: Callable[[], ServerRules], request: Request) -> Access:
    """Return what the sender of a request to /api may see and change.

    Raises:
        Unauthenticated, Forbidden: the sender has no access.
    """
    peer, headers = request.client.host if request.client else None, request.scope["headers"]
    await rules().keys.ready()
    in_force = rules()
    try:
        await in_force.authenticator.verify_tokens(headers)
        return in_force.authenticator.api(headers, peer)
    except errors.Unauthenticated as fault:
        # A request without a credential comes from the dashboard, which then asks the user for a key.
        if credential_hash(headers) is not None:
            in_force.unrecorded.note(fault, headers, in_force.new_id(), _API, _API)
        raise


def limit_of(request: Request) -> int:
    """Return the number of rows that a request asks for with `limit`.

    Raises:
        InvalidRequest: it is not a number, or too large.
    """
    text = request.query_params.get("limit", "50")
    # `int` raises an error of its own for thousands of digits.
    if not text.isdecimal() or len(text) > _LIMIT_DIGITS or not 1 <= int(text) <= _MOST_ROWS:
        raise errors.InvalidRequest(f'"limit" must be a whole number from 1 to {_MOST_ROWS}.', param="limit")
    return int(text)


def fault_response(fault: errors.GatewayError) -> Response:
    """Return an error of the gateway on one of its own paths, in the format of OpenAI's API."""
    headers = {name.decode(): value.decode() for name, value in ours.error_headers(fault)}
    return Response(openai_errors.body(fault), fault.status, {**headers, **_NO_STORE}, "application/json")


def _response(result: Any) -> Response:
    if isinstance(result, Response):
        return result
    return _text_response(result) if isinstance(result, str) else _json_response(result)


def _text_response(text: str) -> Response:
    """Return a tool result as plain text. The headers prevent a browser from treating it as a page."""
    headers = {**_NO_STORE, "x-content-type-options": "nosniff", "content-security-policy": "sandbox"}
    return Response(text.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8", headers=headers)


def _json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=_NO_STORE)
