"""Answer `GET /v1/models`: the gateway's own names, then those of the default provider.

The list has the format of the API that the client uses. The provider's data of a model is kept, with these changes:

- A name gets the provider's name in front if the bare name is routed to another provider.
- A field that the format requires is added if it is missing, and so are those of `gateway.pipeline.model_fields`.

The gateway's own names are listed even if the provider does not respond with a list.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import msgspec

from gateway.call.routing import check_model, is_allowed
from gateway.call.timeout import max_wait
from gateway.call.types import ClientResponse, Incoming, RequestReport
from gateway.core.errors import UnknownModel, UpstreamTimeout
from gateway.core.routing import Route, Routes
from gateway.core.values import dataclass
from gateway.pipeline.model_fields import with_fields
from gateway.upstream.body import Chained

T = TypeVar("T")

#: maximum bytes of a list that is read; the longest known list, OpenRouter's, has less than a million
_MOST_BYTES: Final = 4 * 2**20
#: seconds to wait for the provider's list if the gateway has names of its own to show
_MAX_WAIT_S: Final = 10.0
_OK: Final = 200
#: `groq/llama` in a path, the slash encoded or not
_PREFIXED: Final = re.compile(r"models/([^/%]+)(?:/|%2f)(.+)", re.IGNORECASE)
#: Models that are described before other calls get their turn. The first look into the tables takes 0.3 ms for each.
_WITHOUT_PAUSE: Final = 16
#: asks for a later page than the first, which has the gateway's own names
_FURTHER: Final = re.compile(r"(?:^|&)(?:after|before)(?:_id)?=")
#: headers of the provider that describe its body
_OF_THE_BODY: Final = frozenset({b"content-length", b"content-type", b"content-encoding", b"etag", b"last-modified"})

#: a model as it is listed
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Listed:
    """A provider's list: the fields around it, and its models by name. Values are raw JSON."""

    around: Mapping[str, msgspec.Raw]
    models: Mapping[str, Mapping[str, msgspec.Raw]]


_NOTHING: Final = _Listed({}, {})


class ModelList:
    """Respond to GET and HEAD of /v1/models and /v1/models/{id}.

    `call` forwards a request to the provider. `describe` returns the fields that describe a model (`model_fields`).
    """

    def __init__(
        self,
        routes: Routes,
        call: Callable[[Incoming], AbstractAsyncContextManager[ClientResponse]],
        describe: Callable[[Route], Mapping[str, Any]],
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        self._routes = routes
        self._call = call
        self._describe = describe
        self._max_wait_s = max_wait_s

    def handle(self, incoming: Incoming) -> AbstractAsyncContextManager[ClientResponse]:
        """Return the response to one request, as a context manager like that of any other call.

        The response to HEAD has the body of GET, because its headers depend on it. The server does not send this body.
        """
        incoming = replace(incoming, method="GET")
        name = unquote(incoming.path.partition("/")[2].rstrip("/"))
        if incoming.refused is not None:
            return self._call(incoming)
        return self._one(incoming, name) if name else self._all(incoming)

    @asynccontextmanager
    async def _one(self, incoming: Incoming, name: str) -> AsyncIterator[ClientResponse]:
        try:
            check_model(name, incoming.caller)
        except UnknownModel as fault:
            incoming = replace(incoming, refused=fault)
        else:
            if name in self._routes.names():
                yield _reply(self._own(name, incoming))
                return
        prefixed = _PREFIXED.fullmatch(incoming.path)
        if prefixed is not None and unquote(prefixed[1]) in self._routes.providers:
            route = self._routes.resolve(name)
            # A host may use names with a slash itself: then the slash does not separate provider and model.
            path = f"models/{prefixed[2]}" if route.model == unquote(prefixed[2]).rstrip("/") else incoming.path
            incoming = replace(incoming, path=path, provider=route.provider)
        async with self._call(incoming) as reply:
            model = await _read(reply, _one_model)
            shown = with_fields(model, self._fields(name)) if model is not None else None
            yield reply if shown is None or shown == model else _reply(shown, reply)

    def _own(self, name: str, incoming: Incoming) -> Entry:
        """Return a name of the gateway as it describes it itself."""
        return {**_skeleton(name, self._routes.resolve(name).provider, incoming), **self._fields(name)}

    def _fields(self, name: str) -> Mapping[str, Any]:
        """Return the fields that describe a model; none if no call can name it."""
        try:
            return self._describe(self._routes.resolve(name))
        except UnknownModel:
            return {}

    @asynccontextmanager
    async def _all(self, incoming: Incoming) -> AsyncIterator[ClientResponse]:
        own = [name for name in dict.fromkeys(self._routes.names()) if is_allowed(name, incoming.caller.models)]
        if own:
            yield await self._with_own(own, incoming)
            return
        async with self._call(incoming) as reply:
            listed = await _read(reply, _listed)
            # A list that cannot be read might show a client key more models than it may use.
            if listed is None and (reply.status != _OK or not incoming.caller.models):
                yield reply
            else:
                yield await self._list(own, listed or _NOTHING, incoming, reply)

    async def _with_own(self, own: Iterable[str], incoming: Incoming) -> ClientResponse:
        try:
            async with max_wait(self._max_wait_s), self._call(incoming) as reply:
                listed = await _read(reply, _listed)
        except UpstreamTimeout:
            listed = None
        return await (self._list(own, listed, incoming, reply) if listed else self._list(own, _NOTHING, incoming))

    async def _list(
        self, own: Iterable[str], listed: _Listed, incoming: Incoming, reply: ClientResponse | None = None
    ) -> ClientResponse:
        """Return the gateway's names and the provider's models.

        A model of the provider whose bare name is routed to another provider gets the provider's name in front.
        """
        provider = self._routes.provider_without_model(incoming.endpoint.anthropic) if listed.models else ""
        leads_there = {name for name in listed.models if self._routes.leads_to(name, provider)}
        models: list[Entry] = []
        for name in own if not _FURTHER.search(incoming.query) else ():
            known = with_fields(listed.models[name], self._fields(name)) if name in leads_there else {}
            models.append({**self._own(name, incoming), **known})
        ours = set(self._routes.names())
        for number, (name, model) in enumerate(listed.models.items()):
            if number % _WITHOUT_PAUSE == 0:
                await asyncio.sleep(0)
            shown = name if name in leads_there else f"{provider}/{name}"
            if name not in ours and is_allowed(shown, incoming.caller.models):
                known = with_fields(model, self._fields(shown))
                models.append({**_skeleton(shown, provider, incoming), **known, "id": shown})
        if incoming.endpoint.anthropic:
            ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
            # The provider's own `first_id` and `last_id` have precedence: it knows them.
            return _reply({"has_more": False, **ends, **listed.around, "data": models}, reply)
        return _reply({"object": "list", **listed.around, "data": models}, reply)


def _reply(content: Mapping[str, Any], theirs: ClientResponse | None = None) -> ClientResponse:
    """Return a response with this content, and with the headers of the provider's response that it replaces."""
    kept = [pair for pair in theirs.headers if pair[0] not in _OF_THE_BODY] if theirs is not None else []
    overhead_s = theirs.request.overhead_s if theirs is not None else 0.0
    headers = [(b"content-type", b"application/json"), *kept]
    return ClientResponse(_OK, headers, msgspec.json.encode(content), RequestReport(overhead_s=overhead_s))


def _skeleton(name: str, provider: str, incoming: Incoming) -> dict[str, Any]:
    """Return the required fields of a model. Its date is unknown; Anthropic uses the start of Unix time for that."""
    if incoming.endpoint.anthropic:
        made = "1970-01-01T00:00:00Z"
        return {"type": "model", "id": name, "display_name": name, "created_at": made, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": provider}


async def _read(reply: ClientResponse, parse: Callable[[bytes], T | None]) -> T | None:
    """Return what the provider lists; None if the response is something else or far too long. It can be passed on."""
    if reply.status != _OK or isinstance(reply.body, bytes):
        return None
    body, read, size = reply.body, list[bytes](), 0
    async for piece in body:
        read.append(piece)
        size += len(piece)
        if size > _MOST_BYTES:
            break
    reply.body = Chained(read, body)
    return parse(b"".join(read)) if size <= _MOST_BYTES and not reply.is_incomplete else None


def _one_model(body: bytes) -> Mapping[str, msgspec.Raw] | None:
    """Parse one model; None if the body is none."""
    try:
        model = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return model if msgspec.json.decode(model["id"], type=str) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None


def _listed(body: bytes) -> _Listed | None:
    """Parse a list in the format of either API, or a bare JSON array as Together sends it; None if it is not a list."""
    rows, around = msgspec.Raw(body), dict[str, msgspec.Raw]()
    models: dict[str, Mapping[str, msgspec.Raw]] = {}
    try:
        if not body.lstrip().startswith(b"["):
            around = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            rows = around.pop("data", msgspec.Raw(b""))
        for model in msgspec.json.decode(rows, type=list[dict[str, msgspec.Raw]]):
            models.setdefault(msgspec.json.decode(model["id"], type=str), model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    return _Listed(around, models)
