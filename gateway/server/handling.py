"""Wrap each handler of /api: authentication, JSON responses and errors."""

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
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.routing import Routes
from gateway.core.steps import Agent
from gateway.core.values import dataclass
from gateway.dialects import openai_errors
from gateway.server import headers as ours
from gateway.server.auth import Access, Authenticator, credential_hash
from gateway.server.keyring import KeyRing
from gateway.server.unrecorded import UnrecordedRefusals

Handler = Callable[[Request], Awaitable[Response]]

#: the format and the operation of requests to /api that are refused
_API: Final = "api"
_NO_STORE: Final = {"cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class ServerRules:
    """What a reload replaces. `id_headers`: those that name a session, before the known ones.

    `unrecorded` and `new_id` stay: they note who was refused, under a new id.
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


@dataclass(frozen=True, slots=True)
class StaticFile:
    """What is served the same to everybody. `tag`: as HTTP's `ETag`."""

    body: bytes
    kind: str
    tag: str

    @classmethod
    def of(cls, body: bytes, kind: str) -> StaticFile:
        """The file with this content, of this media type."""
        return cls(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def unless_known(request: Request, file: StaticFile, headers: Mapping[str, str]) -> Response:
    """The file, or 304 where whoever asks has it already."""
    headers = {**headers, "etag": file.tag}
    known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


def wrapped(rules: Callable[[], ServerRules], handler: Callable[[Request, Access], Awaitable[Any]]) -> Handler:
    """The handler, told who asks; its answer is written as JSON and its faults as errors."""

    async def handle(request: Request) -> Response:
        try:
            return _answer(await handler(request, await accessed(rules, request)))
        except errors.GatewayError as fault:
            return fault_response(fault)

    return handle


async def accessed(rules: Callable[[], ServerRules], request: Request) -> Access:
    """What whoever asks may see and do.

    Raises:
        Unauthenticated, Forbidden: nothing.
    """
    peer, headers = request.client.host if request.client else None, request.scope["headers"]
    await rules().keys.ready()
    now = rules()
    try:
        return now.authenticator.api(headers, peer)
    except errors.Unauthenticated as fault:
        # Without any credential it is a browser that opens the dashboard, which then asks for a key.
        if credential_hash(headers) is not None:
            now.unrecorded.note(fault, headers, now.new_id(), _API, _API)
        raise


def fault_response(fault: errors.GatewayError) -> Response:
    """An error of ours on a path that no dialect speaks."""
    headers = {name.decode(): value.decode() for name, value in ours.of_fault(fault)}
    return Response(openai_errors.body(fault), fault.status, {**headers, **_NO_STORE}, "application/json")


def _answer(found: Any) -> Response:
    if isinstance(found, Response):
        return found
    return _text(found) if isinstance(found, str) else _json(found)


def _text(text: str) -> Response:
    """What a tool said, for whoever asks; a browser must not take it for a page."""
    headers = {**_NO_STORE, "x-content-type-options": "nosniff", "content-security-policy": "sandbox"}
    return Response(text.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8", headers=headers)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=_NO_STORE)
