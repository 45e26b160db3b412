"""Determine the session of a call from its path, headers and body, and its routes from its model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from gateway.call.types import Caller, Incoming, SessionPolicy
from gateway.core import calling_agent, identity
from gateway.core.calling_agent import CallingAgent
from gateway.core.errors import InvalidRequest, SessionRequired, UnknownModel
from gateway.core.http.gateway_headers import BUDGET_TOKENS, BUDGET_USD, PARENT, SESSION
from gateway.core.http.headers import ProviderAddress, by_name, header
from gateway.core.ledger.session_key import SessionKey
from gateway.core.providers import (
    ADVISOR_TYPES,
    CHOOSING_TOOLS,
    MODEL_FIELDS,
    MODEL_PATH,
    OBJECT_PATHS,
)
from gateway.core.record import CallRecord
from gateway.core.routing import Route, Routes
from gateway.dialects import WITHOUT_BODY
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.client_compaction import has_compaction_prompt
from gateway.dialects.contents import is_too_large
from gateway.dialects.fields import UNREADABLE, decode

#: largest `client_metadata` that is read for the agent of a call, in bytes
_MOST_METADATA: Final = 65_536
#: bytes that are read of a model name in a form
_LONGEST_MODEL_NAME: Final = 256
#: describes in an error a path without a model
_NO_MODEL: Final = "a path that names no model"
#: fields with models that may be called instead of the call's own model, and fields with further models
_OTHER_MODELS: Final = tuple(field.name for field in MODEL_FIELDS if field.is_instead)
_FURTHER_MODELS: Final = tuple(field.name for field in MODEL_FIELDS if not field.is_instead)
#: see `ModelField.default`
_DEFAULT_VALUE: Final = "default"
#: finds tools that may be advisors; JSON may escape letters (`\u0061`)
_MAY_ADVISE: Final = re.compile("|".join([*map(re.escape, ADVISOR_TYPES), r"\\u"]).encode())
#: keys whose values are names of models
_NAMES_MODELS: Final = re.compile(r"(?:\w+_)?models?")
#: finds a part that may name a model; JSON may escape its letters
_MAY_NAME_MODEL: Final = re.compile(
    "|".join(['models?"', *(f'"{re.escape(name)}' for name in CHOOSING_TOOLS), r"\\u"]).encode()
)
#: Bytes of such parts that are decoded to look for names; decoding more would block the event loop. A client key that
#: is limited to some models is refused beyond this. No real request has as much of them.
_MAX_PARTS_BYTES: Final = 2**20
#: types of tools that the caller runs itself; a model name in them is data of the caller
_RUN_BY_CALLER: Final = (None, "function", "custom")
#: other models, or advisors, that are looked up for one request; more than any provider accepts
_MAX_OTHERS: Final = 32
_MODEL_IN_PATH: Final = re.compile(MODEL_PATH, re.IGNORECASE)
_MODEL_NOT_AT_TOP: Final = re.compile("|".join(OBJECT_PATHS), re.IGNORECASE)
#: the headers of the form part `model`, up to its value
_MODEL_PART: Final = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]{0,200};[ \t]*name="?model"?[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n]+\r\n){0,8}\r\n',
    re.IGNORECASE,
)


def named_session(incoming: Incoming, id_headers: Sequence[bytes]) -> SessionKey | None:
    """Return the session that the path or a header names, or None. The body is not read."""
    name = incoming.path_session
    if name is None:
        name = identity.from_headers(by_name(incoming.headers), id_headers)
    return SessionKey(incoming.caller.namespace, name) if name is not None else None


def session_id_in_body(call: Call) -> str | None:
    """Return the session id from a field of the body, or None."""
    fields = call.fields
    if fields.keys().isdisjoint(identity.BODY_FIELDS):
        return None
    return identity.from_body({name: decode(fields[name]) for name in identity.BODY_FIELDS if name in fields})


def tag_in_body(call: Call) -> str | None:
    """Return the tag that `metadata.tag` of the body names, or None."""
    metadata = decode(call.fields["metadata"]) if "metadata" in call.fields else None
    tag = metadata.get("tag") if isinstance(metadata, dict) else None
    return tag if identity.is_tag(tag) else None


def calling_agent_of(incoming: Incoming, call: Call, *, is_compaction: bool = False) -> CallingAgent | None:
    """Return the agent of the session that makes a call, or None if the client says nothing about agents.

    `is_compaction`: the call asks its provider for a compaction. The prompt of a client that summarizes its
    conversation itself is recognized here.
    """
    if incoming.purpose is not None:
        return incoming.purpose.agent
    raw = call.fields.get(calling_agent.BODY_FIELD)
    metadata = decode(raw) if raw is not None and len(raw) <= _MOST_METADATA else None
    agent, wire = calling_agent.calling_agent(by_name(incoming.headers), metadata), incoming.endpoint.wire
    if is_compaction or asks_for_compaction(call.fields, wire) or has_compaction_prompt(call, wire):
        return replace(agent or CallingAgent(), request_class="compaction")
    return agent


def session_of(
    incoming: Incoming, call: Call, policy: SessionPolicy, before: CallRecord | None = None
) -> tuple[SessionKey | None, bool]:
    """Return the session of a call whose path and headers name none, and whether its id was derived.

    The first of these that exists:
    - the session that a field of the body names
    - the session of `before`, the call whose response this one continues
    - None if the settings derive no sessions, else an id derived from the first messages

    Raises:
        SessionRequired: there is none, but the settings require one, or a header of the call needs one.
    """
    namespace = incoming.caller.namespace
    session_id = session_id_in_body(call)
    if session_id is not None:
        return SessionKey(namespace, session_id), False
    if before is not None:
        return before.session, before.derived_session
    if policy.on_missing == "require":
        raise SessionRequired(f"This gateway requires a session, and the call names none. {_remedy(policy)}")
    if policy.on_missing == "none":
        limiting_header = _session_header(incoming)
        if limiting_header is not None:
            raise SessionRequired(
                f"The header {limiting_header} applies to a session, and the call has none. {_remedy(policy)}"
            )
        return None, False
    opening = incoming.endpoint.dialect.opening(call)
    # Calls without a conversation (embeddings, images) share one session per client key and endpoint.
    parts = opening if opening is not None else [incoming.path]
    model = call.model if opening is not None else None
    return SessionKey(namespace, identity.derive(namespace, model, parts)), True


def _remedy(policy: SessionPolicy) -> str:
    first = policy.id_headers[0] if policy.id_headers else SESSION
    return f"Send the header {first.decode()}, or use the base URL /s/SESSION/v1."


def _session_header(incoming: Incoming) -> str | None:
    """Return the header that declares a budget or a parent for the session of the call; None if there is none."""
    directives = incoming.directives
    if directives.parent is not None:
        return PARENT.decode()
    if directives.budget.tokens is not None:
        return BUDGET_TOKENS.decode()
    return BUDGET_USD.decode() if directives.budget.nano_usd is not None else None


def routes_of(incoming: Incoming, call: Call, routes: Routes, session: SessionKey | None) -> tuple[Route, ...]:
    """Return the routes of a call: the provider with its name for the model, then the fallbacks.

    All calls of one session have the same routes.

    Raises:
        UnknownModel: no provider has the model, or the client key may not use it.
    """
    model, caller = call.model, incoming.caller
    # A key without patterns may use all models.
    if caller.models and not is_listing(incoming):
        check_model(model, caller)
        _check_path(incoming)
        _check_further_models(call, caller)
    if model is not None:
        return routes.chain(model, route_seed(session, incoming.call_id))
    return (Route(incoming.provider or routes.provider_without_model(incoming.endpoint.anthropic), ""),)


def models_instead(call: Call, chosen: Sequence[Route], routes: Routes) -> tuple[Route, ...]:
    """Return the models that the providers of a call may use instead of its own, at each provider.

    A model whose name cannot be read gets an empty name, so that its price is unknown.
    """
    if call.fields.keys().isdisjoint(_OTHER_MODELS):
        return ()
    return _at_each(list(dict.fromkeys([name or "" for _, name in _models_instead(call)])), chosen, routes)


def advisors_of(call: Call, chosen: Sequence[Route], routes: Routes) -> tuple[Route, ...]:
    """Return the models that the model of a call may ask as advisors, at each provider."""
    if "tools" not in call.fields:
        return ()
    return _at_each(list(dict.fromkeys(_advisors(call.fields["tools"]))), chosen, routes)


def _at_each(names: list[str], chosen: Sequence[Route], routes: Routes) -> tuple[Route, ...]:
    if not names:
        return ()
    if len(names) > _MAX_OTHERS:
        # The rest is replaced by one model without a name, whose price is unknown.
        names[_MAX_OTHERS:] = [""]
    providers = dict.fromkeys(route.provider for route in chosen)
    return tuple(routes.route_at(provider, name) for provider in providers for name in names)


def routes_for_format(
    routes: Sequence[Route], format_name: str | None, providers: Mapping[str, ProviderAddress]
) -> tuple[Route, ...]:
    """Return the routes whose provider accepts the format of a call; all of them if the format has no name.

    Raises:
        InvalidRequest: no provider accepts it.
    """
    accepting = tuple([route for route in routes if _accepts(providers[route.provider], format_name)])
    if accepting:
        return accepting
    formats = {route.provider: ", ".join(providers[route.provider].dialects or ()) for route in routes}
    accepted = "; ".join(f"{name} accepts {dialects}" for name, dialects in formats.items())
    raise InvalidRequest(
        f"No provider of this model accepts the format {format_name}: {accepted} (providers.NAME.dialects). Use one of "
        "these formats or another model, or set adapter: litellm, which translates.",
        param="model",
    )


def provider_first(provider: str, routes: Sequence[Route]) -> tuple[Route, ...]:
    """Return the routes with those to this provider first."""
    return tuple(sorted(routes, key=lambda route: route.provider != provider))


def _accepts(provider: ProviderAddress, format_name: str | None) -> bool:
    return format_name is None or provider.dialects is None or format_name in provider.dialects


def route_seed(session: SessionKey | None, call_id: str) -> str:
    """Return the text that selects one of several providers: the same one for all calls of a session."""
    return f"{session.namespace}\0{session.id}" if session is not None else call_id


def is_listing(incoming: Incoming) -> bool:
    """Return whether a request asks for the list of models or for one entry, as many clients do first."""
    return incoming.method in ("GET", "HEAD") and incoming.path.partition("/")[0] == "models"


def _check_path(incoming: Incoming) -> None:
    """Refuse a path that may name another model than the body, or that is used without a model.

    Raises:
        UnknownModel: the path may call a model that the client key does not allow.
    """
    path = unquote(incoming.path)
    if _MODEL_IN_PATH.search(path):
        raise _not_for(incoming.caller, "a path that may name a model itself", "model")
    if incoming.method in WITHOUT_BODY or _MODEL_NOT_AT_TOP.match(path):
        raise _not_for(incoming.caller, _NO_MODEL, "model")


def _check_further_models(call: Call, caller: Caller) -> None:
    """Refuse a call that names a further model which the client key may not use.

    Raises:
        UnknownModel: the key may not use one of them, or its name cannot be read.
    """
    for field, name in (*_models_instead(call), *_further_models(call)):
        check_model(name, caller, field)


def _further_models(call: Call) -> Iterator[tuple[str, str | None]]:
    """Yield the field and the name of each further model that the provider may call.

    The name is None if it cannot be read, or if the provider chooses the model later.
    """
    left = _MAX_PARTS_BYTES
    for field in _FURTHER_MODELS:
        for raw in _parts(bytes(call.fields.get(field, b""))):
            left -= len(raw)
            part = decode(raw) if left >= 0 else None
            kind = part.get("type") if isinstance(part, dict) else None
            if part is None:
                yield field, None
            elif field != "tools" or kind not in _RUN_BY_CALLER:
                names = [*_names_in(part)]
                yield from ((field, name) for name in names)
                if kind in CHOOSING_TOOLS and not names:
                    yield field, None


def _parts(raw: bytes) -> list[bytes]:
    """Return the objects in a field, one or an array of them, that may name models.

    An array that cannot be split is returned as one part.
    """
    try:
        parts = [*map(bytes, _ARRAY.decode(raw))] if raw[:1] == b"[" and not is_too_large(raw) else [raw]
    except UNREADABLE:
        parts = [raw]
    return [part for part in parts if part[:1] in (b"{", b"[") and _MAY_NAME_MODEL.search(part)]


def _names_in(value: object) -> Iterator[str]:
    """Yield the names of models in a JSON value, at any depth."""
    if isinstance(value, list):
        for inner in value:
            yield from _names_in(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        if _NAMES_MODELS.fullmatch(key):
            yield from (name for name in (inner if isinstance(inner, list) else [inner]) if isinstance(name, str))
        yield from _names_in(inner)


class _Tool(msgspec.Struct):
    """The fields of a tool that show whether it is a model."""

    type: Any = None
    model: Any = None


_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TOOLS: Final = msgspec.json.Decoder(list[_Tool])


def _advisors(tools: msgspec.Raw) -> Iterator[str]:
    if not _MAY_ADVISE.search(tools):
        return
    if is_too_large(bytes(tools)):
        # Too much to decode: these models are replaced by one without a name, whose price is unknown.
        yield ""
        return
    try:
        decoded = _TOOLS.decode(tools)
    except UNREADABLE:
        return
    for tool in decoded:
        if isinstance(tool.type, str) and tool.type.startswith(ADVISOR_TYPES) and isinstance(tool.model, str):
            yield tool.model


def _models_instead(call: Call) -> Iterator[tuple[str, str | None]]:
    """Yield the field and the name of each model that may be called instead; the name is None if unreadable."""
    for field in MODEL_FIELDS:
        if not field.is_instead:
            continue
        value = decode(call.fields[field.name]) if field.name in call.fields else None
        if field.default and value == _DEFAULT_VALUE:
            names = next(names for pattern, names in field.default if fnmatchcase(call.model or "", pattern))
            yield from ((field.name, name) for name in names)
            continue
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            name = entry.get("model") if isinstance(entry, dict) else entry
            yield field.name, name if isinstance(name, str) else None


def check_model(model: str | None, caller: Caller, field: str = "model") -> None:
    """Refuse a model that a client key may not use. None: the path names no model, or its name cannot be read.

    Raises:
        UnknownModel: the key may not use it.
    """
    if not is_allowed(model, caller.models):
        unnamed = _NO_MODEL if field == "model" else f'what the field "{field}" names'
        what = f'the model "{model[:100]}"' if model else unnamed
        raise _not_for(caller, what, field)


def _not_for(caller: Caller, what: str, field: str) -> UnknownModel:
    return UnknownModel(
        f'The client key "{caller.namespace}" may not use {what}; it may use {", ".join(caller.models)}.', param=field
    )


def is_allowed(model: str | None, patterns: Sequence[str]) -> bool:
    """Return whether a client key with these patterns may use a model; without patterns it may use all."""
    return not patterns or (model is not None and any(fnmatchcase(model, pattern) for pattern in patterns))


def with_form_model(incoming: Incoming, call: Call) -> Call:
    """Return the call with the model that a form names (audio, images); otherwise the call unchanged.

    Raises:
        InvalidRequest: the form names the model twice.
    """
    if call.model is not None or not header(incoming.headers, b"content-type").startswith(b"multipart/form-data"):
        return call
    parts = list(_MODEL_PART.finditer(incoming.body))
    if len(parts) > 1:
        raise InvalidRequest('The form has more than one part named "model". Send it once.', param="model")
    start = parts[0].end() if parts else 0
    stop = incoming.body.find(b"\r\n", start, start + _LONGEST_MODEL_NAME) if parts else 0
    name = incoming.body[start:stop].decode("utf-8", "replace").strip() if stop > start else ""
    return replace(call, model=name, model_at=(start, stop)) if name else call


def form_with_model(model: str, body: bytes) -> bytes:
    """Return the form with this model in its `model` part; unchanged if it has several such parts."""
    parts = list(_MODEL_PART.finditer(body))
    if len(parts) > 1:
        return body
    if parts:
        start = parts[0].end()
        stop = body.find(b"\r\n", start)
        return b"".join((body[:start], model.encode(), body[stop:])) if stop >= 0 else body
    boundary, mark, _ = body.partition(b"\r\n")
    part = b'Content-Disposition: form-data; name="model"'
    return b"\r\n".join((boundary, part, b"", model.encode(), body)) if mark else body
