"""Describe the paths of the API: parameters and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from gateway.context.inspector import WIRES
from gateway.core.context_budget import Trim
from gateway.core.http.gateway_headers import (
    AGENT,
    BUDGET_TOKENS,
    BUDGET_USD,
    CONTEXT_BUDGET,
    CONTEXT_TRIM,
    DIRECTIVES,
    PARENT,
    READ,
    RESPONSE_MODE,
)
from gateway.core.identity import ID_FORM, ID_PATTERN
from gateway.core.modes import MODES
from gateway.core.stored import SORTS
from gateway.server.headers import EXPOSED
from gateway.server.openapi.shapes import Schema, named

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
#: a client key, or none: where none is configured
_CALLERS: Final[Sequence[Mapping[str, Any]]] = ({"clientKey": []}, {"clientKeyHeader": []}, {})
#: these, or the admin key
_ANYONE: Final[Sequence[Mapping[str, Any]]] = (*_CALLERS, {"adminKey": []})
#: the admin key, or none: for requests from this machine where none is configured
_ADMIN: Final[Sequence[Mapping[str, Any]]] = ({"adminKey": []}, {})
_NOBODY_ASKED: Final[Sequence[Mapping[str, Any]]] = ()
#: every proxied path also stands under /s/{session}, which names the session
_PROXIED_SERVERS: Final = (
    {"url": "/"},
    {
        "url": "/s/{session}",
        "description": "the same, with the session named by the path",
        "variables": {"session": {"default": "my-session", "description": ID_FORM}},
    },
)
_WHOLE_HEADERS: Final = ("-tokens", "-tokens-original", "-calls", "-index")
_JSON_HEADERS: Final = ("-token-usage",)
#: of tokens that a request names
_MOST: Final = 10**15 - 1
_BUDGET: Final = {"type": "integer", "minimum": 1, "maximum": _MOST}
_NAME: Final = {"type": "string", "pattern": ID_PATTERN}
#: What a header may say that is refused otherwise. Words are taken in capitals, too, and numbers with zeros before.
_SAID: Final[Mapping[bytes, Schema]] = {
    CONTEXT_BUDGET: _BUDGET,
    CONTEXT_TRIM: {"type": "string", "enum": list(get_args(Trim))},
    BUDGET_TOKENS: {"type": "integer", "minimum": 0, "maximum": _MOST},
    BUDGET_USD: {"type": "string", "pattern": r"^[0-9]{1,7}(\.[0-9]{1,12})?$"},
    RESPONSE_MODE: {"type": "string", "enum": list(MODES)},
    PARENT: _NAME,
    AGENT: _NAME,
}


def _parameter(name: str, place: str, about: str, schema: Schema, *, required: bool = False) -> Mapping[str, Any]:
    return {
        "name": name,
        "in": place,
        "description": about,
        "schema": schema,
        **({"required": True} if required else {}),
    }


def _flag(name: str, about: str) -> Mapping[str, Any]:
    return _parameter(name, "query", f"`1` or `true`: {about} All else: not.", {"type": "string"})


def _shared(name: str) -> Mapping[str, str]:
    return {"$ref": f"#/components/parameters/{name}"}


#: parameters that several paths have; headers that ask for something of a proxied call
PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "session": _parameter(
        "id", "path", "The session's id; `KEY/ID` for whoever sees the sessions of all client keys.",
        {"type": "string"}, required=True,
    ),
    "limit": _parameter(
        "limit", "query", "How many at the most, 1 to 1,000; 50 by default.",
        {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50},
    ),
    "cursor": _parameter("cursor", "query", "What the page before gave.", {"type": "string"}),
    "explain": _flag("explain", "what became of each message."),
    "items": _flag("items", "each message's tokens."),
    "tools": _flag("tools", "the tokens of each tool's results."),
    "budget": _parameter(
        "budget", "query", "Input tokens, if lower than the configured ones; as `x-context-budget`.",
        _BUDGET,
    ),
    "wire": _parameter(
        "wire", "query", "The body's format; guessed without it.", {"type": "string", "enum": list(WIRES)}
    ),
    "forSession": _parameter(
        "session", "query",
        "The session the request is for: what it knows and has left counts. Without it, the one that a header or "
        "the body names, as in a call; none is derived.",
        {"type": "string"},
    ),
    **{
        name.decode(): _parameter(
            name.decode(), "header", about[0].upper() + about[1:] + ".", _SAID.get(name, {"type": "string"})
        )
        for name, about in {**READ, **DIRECTIVES}.items()
    },
}  # fmt: skip


def _header(name: str, about: str) -> Mapping[str, Any]:
    if name.endswith(_JSON_HEADERS):
        return {"description": about, "content": {_JSON: {"schema": named("UsageHeader")}}}
    return {"description": about, "schema": {"type": "integer" if name.endswith(_WHOLE_HEADERS) else "string"}}


HEADERS: Final = {name: _header(name, about) for name, about in EXPOSED.items()}

_FORWARDED: Final = {
    "description": "The provider's response, unchanged; in a stream the session's totals are in its last comment.",
    "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in EXPOSED},
    "content": {_JSON: {"schema": {}}, _EVENTS: {"schema": {"type": "string"}}},
}
RESPONSES: Final[Mapping[str, Any]] = {
    "Error": {
        "description": "An error of the gateway.",
        "headers": {
            name: {"$ref": f"#/components/headers/{name}"} for name in ("x-gateway-request-id", "x-should-retry")
        },
        "content": {_JSON: {"schema": named("Error")}},
    },
    "Forwarded": _FORWARDED,
    "ForwardedError": {
        **_FORWARDED,
        "description": "An error of the gateway in the format of the path, or the provider's own as it came "
        "(`x-gateway-upstream-error: true`). Codes and types: docs/reference/errors.md.",
        "content": {_JSON: {"schema": {"type": "object"}}},
    },
}


def _answer(about: str, schema: Schema, kind: str = _JSON) -> Mapping[str, Any]:
    return {"description": about, "content": {kind: {"schema": schema}}}


def _operation(
    name: str,
    about: str,
    answers: Mapping[str, Any],
    *,
    parameters: Sequence[str | Mapping[str, Any]] = (),
    body: Mapping[str, Any] | None = None,
    security: Sequence[Mapping[str, Any]] = _ANYONE,
) -> Mapping[str, Any]:
    """`parameters`: names of shared ones, or such as only this has."""
    found: dict[str, Any] = {"operationId": name, "summary": about, "security": list(security)}
    if parameters:
        found["parameters"] = [_shared(one) if isinstance(one, str) else one for one in parameters]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return {**found, "responses": dict(answers)}


def _api(name: str, about: str, schema: str, **more: Any) -> Mapping[str, Any]:
    """An operation that answers with one of our shapes, or an error."""
    answers = {"200": _answer(about, named(schema)), "default": {"$ref": "#/components/responses/Error"}}
    return _operation(name, about, answers, **more)


def _other(name: str, about: str, kind: str, **more: Any) -> Mapping[str, Any]:
    """One that answers with a text."""
    answer = _answer(about, {"type": "string"}, kind)
    return _operation(name, about, {"200": answer, "default": {"$ref": "#/components/responses/Error"}}, **more)


def _body(about: str, *, needs_model: bool = True) -> Mapping[str, Any]:
    """A request body, of which no more is said than that it names a model."""
    model = {"properties": {"model": {"type": "string", "minLength": 1}}, "required": ["model"]}
    return {"type": "object", "description": about, **(model if needs_model else {})}


def _proxied(name: str, about: str, *, needs_model: bool = True) -> Mapping[str, Any]:
    forwarded = {
        "200": {"$ref": "#/components/responses/Forwarded"},
        "default": {"$ref": "#/components/responses/ForwardedError"},
    }
    body = _body("As the provider takes it.", needs_model=needs_model)
    asked = [header.decode() for header in (*READ, *DIRECTIVES)]
    operation = _operation(name, about, forwarded, parameters=asked, body=body, security=_CALLERS)
    return {"servers": list(_PROXIED_SERVERS), "post": operation}


def _listing(name: str, about: str, schema: Schema, **more: Any) -> Mapping[str, Any]:
    answers = {"200": _answer(about, schema), "default": {"$ref": "#/components/responses/ForwardedError"}}
    return {"servers": list(_PROXIED_SERVERS), "get": _operation(name, about, answers, security=_CALLERS, **more)}


_PART: Final = _parameter("q", "query", "A part of the name.", {"type": "string"})
_LIKE: Final = _parameter("q", "query", "A part of the name, or a shell pattern.", {"type": "string"})
_BODY: Final = _body("A request body of any of the formats that are weighed.")
_LOOK: Final = ("budget", "items", "tools", "wire", "forSession")

OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "/api/sessions": {
        "get": _api(
            "listSessions", "Sessions, newest first.", "SessionPage",
            parameters=(
                "limit", "cursor", _PART,
                _parameter("sort", "query", "Their order, the largest first.",
                           {"enum": list(SORTS), "default": SORTS[0]}),
            ),
        )
    },
    "/api/sessions/{id}": {
        "get": _api("getSession", "One session: totals, budget, tools, steps.", "SessionDetails",
                    parameters=("session",)),
        "patch": _api("changeSession", "Raise, lower or lift its budget, or set its step.", "ChangedSession",
                      parameters=("session",), body=named("Change"), security=_ADMIN),
        "delete": _api("deleteSession", "Forget it and its calls.", "Deleted",
                       parameters=("session",), security=_ADMIN),
    },
    "/api/sessions/{id}/calls": {
        "get": _api("listSessionCalls", "Its call records, newest first.", "CallPage",
                    parameters=("session", "limit", "cursor"))
    },
    "/api/sessions/{id}/reset": {
        "post": _api("resetSession", "Its totals, and what it has used of its budget, to zero.", "ChangedSession",
                     parameters=("session",), security=_ADMIN)
    },
    "/api/calls": {
        "get": _api("listCalls", "The newest call records of all sessions.", "CallPage", parameters=("limit",))
    },
    "/api/calls/{request_id}": {
        "get": _api(
            "getCall", "One call record.", "Call",
            parameters=(
                _parameter("request_id", "path", "Its `x-gateway-request-id`, or the `call_id` of its record.",
                           {"type": "string"}, required=True),
                "explain",
            ),
        )
    },
    "/api/results/{handle}": {
        "get": _other(
            "getResult", "The full text of a tool result that was shown shorter.", "text/plain",
            parameters=(_parameter("handle", "path", "As it was shown.", {"type": "string"}, required=True),),
        )
    },
    "/api/count": {
        "post": _api("count", "What a request body weighs.", "Count", parameters=_LOOK, body=_BODY)
    },
    "/api/context": {
        "post": _api("context", "The numbers an agent hands to its tools.", "ContextNumbers",
                     parameters=_LOOK, body=_BODY)
    },
    "/api/trim": {
        "post": _api(
            "trim",
            "A request body as it would be forwarded with its tool results as they came, whatever response mode is in "
            "force, and what was decided.",
            "Trimmed",
            parameters=("budget", "explain", "wire", "forSession"),
            body=_BODY,
        )
    },
    "/api/models": {
        "get": _api("listModelFacts", "Provider, window, limits of input and output, and prices of models.", "Models",
                    parameters=("limit", _LIKE))
    },
    "/api/events": {
        "get": {
            **_other("listen", "Calls as they are settled, as server-sent events: `call` and `missed`.", _EVENTS),
            "x-event-data": {"call": named("CallEvent"), "missed": named("MissedEvent")},
        }
    },
    "/api/health": {
        "get": _api("getHealth", "How this worker, its store and its providers do.", "Health", security=_ADMIN)
    },
    "/api/reload": {
        "post": _api("reload", "Read the configuration again.", "Reloaded", security=_ADMIN)
    },
    "/healthz": {"get": _api("isAlive", "The process is alive.", "Alive", security=_NOBODY_ASKED)},
    "/readyz": {
        "get": _operation(
            "isReady", "The store can be written.",
            {"200": _answer("It can.", named("Ready")), "503": _answer("It cannot.", named("Ready"))},
            security=_NOBODY_ASKED,
        )
    },
    "/metrics": {
        "get": _other("getMetrics", "Figures for Prometheus.", "text/plain", security=_ADMIN)
    },
    "/openapi.json": {
        "get": _operation("describe", "This document.", {"200": _answer("OpenAPI 3.1.", {"type": "object"})},
                          security=_NOBODY_ASKED)
    },
    "/": {
        "get": _operation("openDashboard", "Leads a browser (`Accept: text/html`) to `/ui`.",
                          {"307": {"description": "To `/ui`."}, "default": {"$ref": "#/components/responses/Error"}},
                          security=_NOBODY_ASKED)
    },
    "/ui": {"get": _other("showDashboard", "The dashboard, a page.", "text/html", security=_NOBODY_ASKED)},
    "/ui/": {
        "get": _operation("leadToDashboard", "Leads to `/ui`.", {"308": {"description": "To `/ui`."}},
                          security=_NOBODY_ASKED)
    },
    "/ui/{version}/{name}": {
        "get": _operation(
            "getDashboardFile", "A file of the dashboard.",
            {"200": {"description": "The file."}, "default": {"$ref": "#/components/responses/Error"}},
            parameters=[
                _parameter(name, "path", "As the page names it.", {"type": "string"}, required=True)
                for name in ("version", "name")
            ],
            security=_NOBODY_ASKED,
        )
    },
}  # fmt: skip
PROXIED: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": _proxied("chat", "OpenAI's chat completions."),
    "/v1/responses": _proxied("respond", "OpenAI's responses.", needs_model=False),
    "/v1/messages": _proxied("messages", "Anthropic's messages."),
    "/v1/completions": _proxied("complete", "OpenAI's older completions."),
    "/v1/embeddings": _proxied("embed", "OpenAI's embeddings.", needs_model=False),
    "/v1/models": _listing("listModels", "The models that can be asked for.", named("ModelList")),
    "/v1/models/{model}": _listing(
        "getModel", "One of them.", named("ForeignModel"),
        parameters=(_parameter("model", "path", "Its name.", {"type": "string"}, required=True),),
    ),
}  # fmt: skip
