"""Name the session of a call from its headers and body, and find its routes by its model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from gateway.call.types import Caller, Incoming, SessionPolicy
from gateway.core import identity
from gateway.core.errors import InvalidRequest, SessionRequired, UnknownModel
from gateway.core.http.gateway_headers import BUDGET_TOKENS, BUDGET_USD, PARENT, SESSION
from gateway.core.http.headers import ProviderAddress, by_name, header
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.routing import Route, Routes
from gateway.dialects import WITHOUT_BODY
from gateway.dialects.base import Call
from gateway.dialects.contents import is_far_too_much
from gateway.dialects.fields import UNREADABLE, decode

_LONGEST_MODEL_NAME: Final = 256
#: how a path of no model is called in a refusal
_NO_MODEL: Final = "a path that names no model"
#: fields by which a provider is told what to call in the place of the model
_FALLBACKS: Final = "fallbacks"
_OTHER_MODELS: Final = ("models", _FALLBACKS)
#: The models that Anthropic may ask after a refusal where a request asks for `fallbacks: "default"`, by the model that
#: refused. Which one it is depends on the category of the refusal.
#: https://platform.claude.com/docs/en/build-with-claude/refusals-and-fallback and the pages on each model
_DEFAULT: Final = "default"
_DEFAULT_FALLBACKS: Final = (
    ("*haiku*", ()),
    ("*sonnet*", ("claude-sonnet-5",)),
    ("*", ("claude-opus-4-8", "claude-opus-5")),
)
#: A tool that is another model, which Anthropic has the first one ask; inside a JSON text it may be written otherwise.
_ADVISOR: Final = "advisor_"
_MAY_ADVISE: Final = re.compile(rb"advisor_|\\u")
#: Fields of which a part may say which models its provider calls besides: tools that the provider runs itself, as an
#: advisor, pictures or a panel of models, plugins of OpenRouter's, and the models behind one of Groq's.
_MAY_NAME_MODELS: Final = ("tools", "plugins", "compound_custom")
#: keys below which the names of models stand; inside a JSON text they may be written otherwise
_NAMES_MODELS: Final = re.compile(r"(?:\w+_)?models?")
_MAY_NAME_ONE: Final = re.compile(rb"models?\"|\"openrouter:|\\u")
#: Bytes of such parts that are built to look for names. More is refused for a key that is held to some models: no
#: request has as much of them, and all other calls would wait meanwhile.
_MOST_PARTS_BYTES: Final = 2**20
#: tools that the caller runs: what stands in them is its own
_OF_THE_CALLER: Final = (None, "function", "custom")
#: tools that have a model chosen while the answer is made, where they name none
_CHOOSES_ONE: Final = ("openrouter:advisor", "openrouter:fusion")
#: other models, or advisors, that are looked up for one request; more than any provider takes
_MOST_OTHERS: Final = 32
#: A path that may name a model where nobody here reads it. Providers such as Azure route without regard to case.
_MAY_BE_OF_A_MODEL: Final = re.compile(r"(?:^|/)(?:deployments?|engines?|models?)/.", re.IGNORECASE)
#: Paths of what is kept, and of work whose models stand in a file or further inside: a model at the top of such a
#: request says nothing of what is read, changed or called.
_NAMES_NO_MODEL: Final = re.compile(
    r"(?:(?:messages/)?batches|containers|evals|files|fine_tuning/alpha/graders|skills|uploads|vector_stores)(?:/|$)"
    r"|conversations/.|threads(?!(?:/[^/]+)?/runs(?:/|$))(?:/|$)",
    re.IGNORECASE,
)
#: the head of the form part that names the model, up to where its value begins
_MODEL_PART: Final = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]{0,200};[ \t]*name="?model"?[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n]+\r\n){0,8}\r\n',
    re.IGNORECASE,
)


def named_session(incoming: Incoming, id_headers: Sequence[bytes]) -> SessionKey | None:
    """The session that the path or a header names; the body is not needed for it."""
    name = incoming.path_session
    if name is None:
        name = identity.from_headers(by_name(incoming.headers), id_headers)
    return SessionKey(incoming.caller.namespace, name) if name is not None else None


def named_by_body(call: Call) -> str | None:
    """The session's id, where a field of the body gives one."""
    fields = call.fields
    if fields.keys().isdisjoint(identity.BODY_FIELDS):
        return None
    return identity.from_body({name: decode(fields[name]) for name in identity.BODY_FIELDS if name in fields})


def session_of(
    incoming: Incoming, call: Call, policy: SessionPolicy, before: CallRecord | None = None
) -> tuple[SessionKey | None, bool]:
    """The session of a call where neither path nor headers name one, and whether it was derived.

    `before`: the call that had the answer which this one goes on from, where that is known.

    Raises:
        SessionRequired: the body names none either, and the settings ask for one, or the call does.
    """
    namespace = incoming.caller.namespace
    named = named_by_body(call)
    if named is not None:
        return SessionKey(namespace, named), False
    if before is not None:
        return before.session, before.derived_session
    if policy.on_missing == "require":
        raise SessionRequired(f"This gateway keeps a budget per session and the call names none. {_how(policy)}")
    if policy.on_missing == "none":
        asked = _asked_of_session(incoming)
        if asked is not None:
            raise SessionRequired(f"The header {asked} is for a session, and the call has none. {_how(policy)}")
        return None, False
    opening = incoming.endpoint.dialect.opening(call)
    # A call with nothing that tells conversations apart (embeddings, images) is kept per key and endpoint.
    parts = opening if opening is not None else [incoming.path]
    model = call.model if opening is not None else None
    return SessionKey(namespace, identity.derive(namespace, model, parts)), True


def _how(policy: SessionPolicy) -> str:
    first = policy.id_headers[0] if policy.id_headers else SESSION
    return f"Send the header {first.decode()}, or use the base URL /s/SESSION/v1."


def _asked_of_session(incoming: Incoming) -> str | None:
    """The header by which the call limits what its session spends, or has another one pay for it."""
    directives = incoming.directives
    if directives.parent is not None:
        return PARENT.decode()
    if directives.budget.tokens is not None:
        return BUDGET_TOKENS.decode()
    return BUDGET_USD.decode() if directives.budget.nano_usd is not None else None


def routes_of(incoming: Incoming, call: Call, routes: Routes, session: SessionKey | None) -> tuple[Route, ...]:
    """The provider of a call and the model's name there, and where it goes when that one cannot answer.

    The calls of one session go the same way.

    Raises:
        UnknownModel: nobody has it, or it is not for this client key.
    """
    model, caller = call.model, incoming.caller
    # A key without limits may use all.
    if caller.models and not is_listing(incoming):
        check_model(model, caller)
        _check_path(incoming)
        _check_others(call, caller)
    if model is not None:
        return routes.chain(model, seed_of(session, incoming.call_id))
    return (Route(incoming.provider or routes.without_model(incoming.endpoint.anthropic), ""),)


def others_of(call: Call, found: Sequence[Route], routes: Routes) -> tuple[Route, ...]:
    """The models that a call tells its providers to call in the place of its own, at each of them.

    One that cannot be read has no name, and nobody knows its price.
    """
    if call.fields.keys().isdisjoint(_OTHER_MODELS):
        return ()
    return _at_each(list(dict.fromkeys([name or "" for _, name in _others(call)])), found, routes)


def advisors_of(call: Call, found: Sequence[Route], routes: Routes) -> tuple[Route, ...]:
    """The models that a call lets its own one ask, at each of its providers."""
    if "tools" not in call.fields:
        return ()
    return _at_each(list(dict.fromkeys(_advisors(call.fields["tools"]))), found, routes)


def _at_each(named: list[str], found: Sequence[Route], routes: Routes) -> tuple[Route, ...]:
    if not named:
        return ()
    if len(named) > _MOST_OTHERS:
        # One model without a name, whose price is not known, stands for the rest.
        named[_MOST_OTHERS:] = [""]
    providers = dict.fromkeys(route.provider for route in found)
    return tuple(routes.named_at(provider, name) for provider in providers for name in named)


def speaking(found: Sequence[Route], spoken: str | None, providers: Mapping[str, ProviderAddress]) -> tuple[Route, ...]:
    """Those of the routes whose provider takes the call's format; all of them where `spoken`, its name, is None.

    Raises:
        InvalidRequest: none does.
    """
    kept = tuple([route for route in found if _takes(providers[route.provider], spoken)])
    if kept:
        return kept
    said = {route.provider: ", ".join(providers[route.provider].dialects or ()) for route in found}
    takes = "; ".join(f"{name} takes {dialects}" for name, dialects in said.items())
    raise InvalidRequest(
        f"No provider of this model takes calls in the format {spoken}: {takes} (providers.NAME.dialects). Call it in "
        "one of these formats, call a model of another provider, or use adapter: litellm, which translates.",
        param="model",
    )


def first_at(provider: str, found: Sequence[Route]) -> tuple[Route, ...]:
    """The same routes, those to this provider before the others."""
    return tuple(sorted(found, key=lambda route: route.provider != provider))


def _takes(provider: ProviderAddress, spoken: str | None) -> bool:
    return spoken is None or provider.dialects is None or spoken in provider.dialects


def seed_of(session: SessionKey | None, call_id: str) -> str:
    """What decides which of several providers a call goes to."""
    return f"{session.namespace}\0{session.id}" if session is not None else call_id


def is_listing(incoming: Incoming) -> bool:
    """Whether a request asks for the list of models, or for one of them, as many clients do before anything else."""
    return incoming.method in ("GET", "HEAD") and incoming.path.partition("/")[0] == "models"


def _check_path(incoming: Incoming) -> None:
    """Refuse a path that may name another model than the body, or takes none.

    Raises:
        UnknownModel: it may.
    """
    path = unquote(incoming.path)
    if _MAY_BE_OF_A_MODEL.search(path):
        raise _not_for(incoming.caller, "a path that may name a model itself", "model")
    if incoming.method in WITHOUT_BODY or _NAMES_NO_MODEL.match(path):
        raise _not_for(incoming.caller, _NO_MODEL, "model")


def _check_others(call: Call, caller: Caller) -> None:
    """Refuse a call that names a further model which the client key may not use.

    Raises:
        UnknownModel: one of them is not for this key, or its name cannot be read.
    """
    for field, name in (*_others(call), *_besides(call)):
        check_model(name, caller, field)


def _besides(call: Call) -> Iterator[tuple[str, str | None]]:
    """The field and the name of each model that may be called besides; None: it cannot be read, or is chosen later."""
    left = _MOST_PARTS_BYTES
    for field in _MAY_NAME_MODELS:
        for raw in _parts(bytes(call.fields.get(field, b""))):
            left -= len(raw)
            part = decode(raw) if left >= 0 else None
            kind = part.get("type") if isinstance(part, dict) else None
            if part is None:
                yield field, None
            elif field != "tools" or kind not in _OF_THE_CALLER:
                names = [*_names_in(part)]
                yield from ((field, name) for name in names)
                if kind in _CHOOSES_ONE and not names:
                    yield field, None


def _parts(raw: bytes) -> list[bytes]:
    """The objects of an array, or the one object, which may name models; all of it where it cannot be taken apart."""
    try:
        parts = [*map(bytes, _ARRAY.decode(raw))] if raw[:1] == b"[" and not is_far_too_much(raw) else [raw]
    except UNREADABLE:
        parts = [raw]
    return [part for part in parts if part[:1] in (b"{", b"[") and _MAY_NAME_ONE.search(part)]


def _names_in(value: object) -> Iterator[str]:
    """The texts below keys that name models, at any depth."""
    if isinstance(value, list):
        for inner in value:
            yield from _names_in(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        if _NAMES_MODELS.fullmatch(key):
            yield from (one for one in (inner if isinstance(inner, list) else [inner]) if isinstance(one, str))
        yield from _names_in(inner)


class _Tool(msgspec.Struct):
    """What of a tool says that it is a model."""

    type: Any = None
    model: Any = None


_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TOOLS: Final = msgspec.json.Decoder(list[_Tool])


def _advisors(tools: msgspec.Raw) -> Iterator[str]:
    if not _MAY_ADVISE.search(tools):
        return
    if is_far_too_much(bytes(tools)):
        # Which models these are is not looked for: one without a name, whose price is not known, stands for them.
        yield ""
        return
    try:
        found = _TOOLS.decode(tools)
    except UNREADABLE:
        return
    for tool in found:
        if isinstance(tool.type, str) and tool.type.startswith(_ADVISOR) and isinstance(tool.model, str):
            yield tool.model


def _others(call: Call) -> Iterator[tuple[str, str | None]]:
    """The field and the name of each model that may be called instead; None: what cannot be read."""
    for field in _OTHER_MODELS:
        named = decode(call.fields[field]) if field in call.fields else None
        if field == _FALLBACKS and named == _DEFAULT:
            yield from ((field, name) for name in _default_fallbacks(call.model or ""))
            continue
        for one in named if isinstance(named, list) else [] if named is None else [named]:
            name = one.get("model") if isinstance(one, dict) else one
            yield field, name if isinstance(name, str) else None


def _default_fallbacks(model: str) -> Sequence[str]:
    """Return the models that Anthropic may ask by default after this one has refused."""
    return next(names for pattern, names in _DEFAULT_FALLBACKS if fnmatchcase(model, pattern))


def check_model(model: str | None, caller: Caller, field: str = "model") -> None:
    """Refuse what a client key may not call; None: a path that names no model, or what cannot be read.

    Raises:
        UnknownModel: it is not for this key.
    """
    if not is_allowed(model, caller.models):
        unnamed = _NO_MODEL if field == "model" else f'what the field "{field}" names'
        asked = f'the model "{model[:100]}"' if model else unnamed
        raise _not_for(caller, asked, field)


def _not_for(caller: Caller, asked: str, field: str) -> UnknownModel:
    return UnknownModel(
        f'The client key "{caller.namespace}" may not use {asked}; it may use {", ".join(caller.models)}.', param=field
    )


def is_allowed(model: str | None, patterns: Sequence[str]) -> bool:
    """Whether a model may be called by a client key with these patterns; with none, all may."""
    return not patterns or (model is not None and any(fnmatchcase(model, pattern) for pattern in patterns))


def with_form_model(incoming: Incoming, call: Call) -> Call:
    """The call with the `model` field of a form, where one of the first parts holds it (audio, images).

    Raises:
        InvalidRequest: the form names the model twice.
    """
    if call.model is not None or not header(incoming.headers, b"content-type").startswith(b"multipart/form-data"):
        return call
    found = list(_MODEL_PART.finditer(incoming.body))
    if len(found) > 1:
        raise InvalidRequest('The form holds more than one part named "model". Send it once.', param="model")
    start = found[0].end() if found else 0
    stop = incoming.body.find(b"\r\n", start, start + _LONGEST_MODEL_NAME) if found else 0
    name = incoming.body[start:stop].decode("utf-8", "replace").strip() if stop > start else ""
    return replace(call, model=name, model_at=(start, stop)) if name else call


def form_naming(model: str, body: bytes) -> bytes:
    """A form that names this model, where it names one or none; its own bytes where it names several."""
    found = list(_MODEL_PART.finditer(body))
    if len(found) > 1:
        return body
    if found:
        start = found[0].end()
        stop = body.find(b"\r\n", start)
        return b"".join((body[:start], model.encode(), body[stop:])) if stop >= 0 else body
    boundary, mark, _ = body.partition(b"\r\n")
    part = b'Content-Disposition: form-data; name="model"'
    return b"\r\n".join((boundary, part, b"", model.encode(), body)) if mark else body
