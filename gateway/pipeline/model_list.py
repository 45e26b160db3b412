"""Answer `GET /v1/models`: the gateway's own names, then those of the default provider.

In the shape of the API whose client asks. What a provider writes of a model is kept, but for two things: its name has
the provider's in front where the bare one leads elsewhere, and a field that the shape asks for is added where it lacks.
A provider that does not answer, or not with a list, hides nothing of what is ours.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from gateway.call.routing import check_model, is_allowed
from gateway.call.timeout import max_wait
from gateway.call.types import ClientResponse, Incoming
from gateway.core.errors import UnknownModel, UpstreamTimeout
from gateway.core.routing import Routes
from gateway.core.values import dataclass
from gateway.upstream.body import chain

#: a longer list is not read; the longest known, OpenRouter's, has less than one million
_MOST_BYTES: Final = 4 * 2**20
#: within which the provider must have sent its list, where there is something to show without it
_MAX_WAIT_S: Final = 10.0
_OK: Final = 200
#: `groq/llama` in a path, the slash encoded or not
_PREFIXED: Final = re.compile(r"models/([^/%]+)(?:/|%2f)(.+)", re.IGNORECASE)
#: asks for another page than the first, on which our own names stand
_FURTHER: Final = re.compile(r"(?:^|&)(?:after|before)(?:_id)?=")
#: of the provider's headers, those that hold for its body only
_OF_THE_BODY: Final = frozenset({b"content-length", b"content-type", b"content-encoding", b"etag", b"last-modified"})

#: a model as it is listed
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Listed:
    """A provider's list: what stands around it, and its models by name. Values as raw bytes."""

    around: Mapping[str, msgspec.Raw]
    models: Mapping[str, Mapping[str, msgspec.Raw]]


_NOTHING: Final = _Listed({}, {})


class ModelList:
    """Answers GET and HEAD of /v1/models and /v1/models/{id}. `call` forwards a request, as it does any other."""

    def __init__(
        self,
        routes: Routes,
        call: Callable[[Incoming], AbstractAsyncContextManager[ClientResponse]],
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        self._routes = routes
        self._call = call
        self._max_wait_s = max_wait_s

    def handle(self, incoming: Incoming) -> AbstractAsyncContextManager[ClientResponse]:
        """The answer to one request; a context manager like that of any other call.

        That to HEAD has the body that GET would have: the server leaves it out. Its headers are made of it.
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
                yield _reply(_skeleton(name, self._routes.resolve(name).provider, incoming))
                return
        prefixed = _PREFIXED.fullmatch(incoming.path)
        if prefixed is not None and unquote(prefixed[1]) in self._routes.providers:
            route = self._routes.resolve(name)
            # A host's own name goes there whole: the slash in it is no mark between a provider and a model.
            path = f"models/{prefixed[2]}" if route.model == unquote(prefixed[2]).rstrip("/") else incoming.path
            incoming = replace(incoming, path=path, provider=route.provider)
        async with self._call(incoming) as reply:
            yield reply

    @asynccontextmanager
    async def _all(self, incoming: Incoming) -> AsyncIterator[ClientResponse]:
        own = [name for name in dict.fromkeys(self._routes.names()) if is_allowed(name, incoming.caller.models)]
        if own:
            yield await self._with_own(own, incoming)
            return
        async with self._call(incoming) as reply:
            listed = await _read(reply)
            # What could not be read might show a key more than it may call.
            if listed is None and (reply.status != _OK or not incoming.caller.models):
                yield reply
            else:
                yield self._list(own, listed or _NOTHING, incoming, reply)

    async def _with_own(self, own: Iterable[str], incoming: Incoming) -> ClientResponse:
        try:
            async with max_wait(self._max_wait_s), self._call(incoming) as reply:
                listed = await _read(reply)
        except UpstreamTimeout:
            listed = None
        return self._list(own, listed, incoming, reply) if listed else self._list(own, _NOTHING, incoming)

    def _list(
        self, own: Iterable[str], listed: _Listed, incoming: Incoming, reply: ClientResponse | None = None
    ) -> ClientResponse:
        """Ours and theirs. Under a name that leads elsewhere, theirs has its provider's name in front."""
        provider = self._routes.without_model(incoming.endpoint.anthropic) if listed.models else ""
        leads_there = {name for name in listed.models if self._routes.leads_to(name, provider)}
        models: list[Entry] = []
        for name in own if not _FURTHER.search(incoming.query) else ():
            known = listed.models[name] if name in leads_there else {}
            models.append({**_skeleton(name, self._routes.resolve(name).provider, incoming), **known})
        ours = set(self._routes.names())
        for name, model in listed.models.items():
            shown = name if name in leads_there else f"{provider}/{name}"
            if name not in ours and is_allowed(shown, incoming.caller.models):
                models.append({**_skeleton(shown, provider, incoming), **model, "id": shown})
        if incoming.endpoint.anthropic:
            ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
            # Where the provider names the ends of its page, those it knows.
            return _reply({"has_more": False, **ends, **listed.around, "data": models}, reply)
        return _reply({"object": "list", **listed.around, "data": models}, reply)


def _reply(content: Mapping[str, Any], theirs: ClientResponse | None = None) -> ClientResponse:
    """An answer with this content, in the place of the provider's where there was one."""
    kept = [pair for pair in theirs.headers if pair[0] not in _OF_THE_BODY] if theirs is not None else []
    overhead_s = theirs.overhead_s if theirs is not None else 0.0
    headers = [(b"content-type", b"application/json"), *kept]
    return ClientResponse(_OK, headers, msgspec.json.encode(content), overhead_s=overhead_s)


def _skeleton(name: str, provider: str, incoming: Incoming) -> dict[str, Any]:
    """The fields that a model must have. Nobody knows when it was made; the epoch is Anthropic's word for that."""
    if incoming.endpoint.anthropic:
        made = "1970-01-01T00:00:00Z"
        return {"type": "model", "id": name, "display_name": name, "created_at": made, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": provider}


async def _read(reply: ClientResponse) -> _Listed | None:
    """The provider's list. None where its answer is none or far too long; the answer can be passed on then."""
    if reply.status != _OK or isinstance(reply.body, bytes):
        return None
    body, read, size = reply.body, list[bytes](), 0
    async for piece in body:
        read.append(piece)
        size += len(piece)
        if size > _MOST_BYTES:
            break
    reply.body = chain(read, body)
    return _listed(b"".join(read)) if size <= _MOST_BYTES and not reply.broken else None


def _listed(body: bytes) -> _Listed | None:
    """A list in the shape of either API; Together's stands bare."""
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
