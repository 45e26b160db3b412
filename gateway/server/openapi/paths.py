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
    TAG,
)
from gateway.core.identity import ID_FORM, ID_PATTERN, LONGEST_TAG
from gateway.core.modes import MODES
from gateway.core.rollup import LABELS
from gateway.core.stored import SORTS
from gateway.server.headers import RESPONSE_HEADERS
from gateway.server.openapi.shapes import Schema, reference
from gateway.server.usage import BUCKETS, FORMATS

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
#: a client key; no key if none is configured
_CALLERS: Final[Sequence[Mapping[str, Any]]] = ({"clientKey": []}, {"clientKeyHeader": []}, {})
#: a client key or the admin key; no key if none is configured
_CALLERS_AND_ADMIN: Final[Sequence[Mapping[str, Any]]] = (*_CALLERS, {"adminKey": []})
#: the admin key; if none is configured, no key for requests from this machine
_ADMIN: Final[Sequence[Mapping[str, Any]]] = ({"adminKey": []}, {})
_PUBLIC: Final[Sequence[Mapping[str, Any]]] = ()
#: every forwarded path also exists under /s/{session}, which names the session
_PROXIED_SERVERS: Final = (
    {"url": "/"},
    {
        "url": "/s/{session}",
        "description": "the same, with the session named in the path",
        "variables": {"session": {"default": "my-session", "description": ID_FORM}},
    },
)
_INTEGER_HEADERS: Final = ("-tokens", "-tokens-original", "-calls", "-index")
_JSON_HEADERS: Final = ("-token-usage",)
#: the largest number of tokens that a request may name
_MOST_TOKENS: Final = 10**15 - 1
_TIME: Final = {"type": "string", "examples": ["2026-11-28", "2026-11-28T13:00:00Z"]}
#: each label is a query parameter of its own
_LABELS: Final = {"type": "object", "properties": {name: {"type": "string"} for name in LABELS}}
_BUDGET: Final = {"type": "integer", "minimum": 1, "maximum": _MOST_TOKENS}
_NAME: Final = {"type": "string", "pattern": ID_PATTERN}
#: Schemas of headers with restricted values. Upper case words and leading zeros are accepted too.
_HEADER_SCHEMAS: Final[Mapping[bytes, Schema]] = {
    CONTEXT_BUDGET: _BUDGET,
    CONTEXT_TRIM: {"type": "string", "enum": list(get_args(Trim))},
    BUDGET_TOKENS: {"type": "integer", "minimum": 0, "maximum": _MOST_TOKENS},
    BUDGET_USD: {"type": "string", "pattern": r"^[0-9]{1,7}(\.[0-9]{1,12})?$"},
    RESPONSE_MODE: {"type": "string", "enum": list(MODES)},
    PARENT: _NAME,
    AGENT: _NAME,
    TAG: {**_NAME, "maxLength": LONGEST_TAG},
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
    return _parameter(name, "query", f"`1` or `true`: {about} Other values: no.", {"type": "string"})


def _shared(name: str) -> Mapping[str, str]:
    return {"$ref": f"#/components/parameters/{name}"}


#: parameters that several paths share, and the request headers of forwarded calls
PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "session": _parameter(
        "id",
        "path",
        "Session id; with the admin key, `KEY/ID` for a session of a client key.",
        {"type": "string"},
        required=True,
    ),
    "limit": _parameter(
        "limit",
        "query",
        "Most entries to return, 1 to 1,000; default 50.",
        {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50},
    ),
    "cursor": _parameter("cursor", "query", "The `cursor` of the previous page.", {"type": "string"}),
    "agent": _parameter(
        "agent", "query", "Only calls of this agent of the session; `main` for the main agent.", {"type": "string"}
    ),
    "explain": _flag("explain", "include what was done with each message."),
    "items": _flag("items", "include the tokens of each message."),
    "tools": _flag("tools", "include the tokens of each tool's results."),
    "budget": _parameter(
        "budget",
        "query",
        "Most input tokens, like `x-context-budget`; applies if lower than configured.",
        _BUDGET,
    ),
    "wire": _parameter(
        "wire", "query", "Format of the body; guessed if omitted.", {"type": "string", "enum": list(WIRES)}
    ),
    "forSession": _parameter(
        "session",
        "query",
        "The session of the request: its state and remaining budget are used. If omitted, the session named in a "
        "header or the body, like for a call; no id is derived.",
        {"type": "string"},
    ),
    **{
        name.decode(): _parameter(
            name.decode(), "header", about[0].upper() + about[1:] + ".", _HEADER_SCHEMAS.get(name, {"type": "string"})
        )
        for name, about in {**READ, **DIRECTIVES}.items()
    },
}


def _header(name: str, about: str) -> Mapping[str, Any]:
    if name.endswith(_JSON_HEADERS):
        return {"description": about, "content": {_JSON: {"schema": reference("UsageHeader")}}}
    return {"description": about, "schema": {"type": "integer" if name.endswith(_INTEGER_HEADERS) else "string"}}


HEADERS: Final = {name: _header(name, about) for name, about in RESPONSE_HEADERS.items()}

_FORWARDED: Final = {
    "description": "The provider's response, unchanged. The last comment of a stream contains the session's totals.",
    "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in RESPONSE_HEADERS},
    "content": {_JSON: {"schema": {}}, _EVENTS: {"schema": {"type": "string"}}},
}
RESPONSES: Final[Mapping[str, Any]] = {
    "Error": {
        "description": "An error of the gateway.",
        "headers": {
            name: {"$ref": f"#/components/headers/{name}"} for name in ("x-gateway-request-id", "x-should-retry")
        },
        "content": {_JSON: {"schema": reference("Error")}},
    },
    "Forwarded": _FORWARDED,
    "ForwardedError": {
        **_FORWARDED,
        "description": "An error of the gateway in the format of the path, or the provider's own error unchanged "
        "(`x-gateway-upstream-error: true`). Codes and types: docs/reference/errors.md.",
        "content": {_JSON: {"schema": {"type": "object"}}},
    },
}


def _response(about: str, schema: Schema, kind: str = _JSON) -> Mapping[str, Any]:
    return {"description": about, "content": {kind: {"schema": schema}}}


def _operation(
    name: str,
    about: str,
    responses: Mapping[str, Any],
    *,
    parameters: Sequence[str | Mapping[str, Any]] = (),
    body: Mapping[str, Any] | None = None,
    security: Sequence[Mapping[str, Any]] = _CALLERS_AND_ADMIN,
) -> Mapping[str, Any]:
    """Return an operation. `parameters`: names of shared parameters, and parameters that only this operation has."""
    operation: dict[str, Any] = {"operationId": name, "summary": about, "security": list(security)}
    if parameters:
        operation["parameters"] = [_shared(item) if isinstance(item, str) else item for item in parameters]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return {**operation, "responses": dict(responses)}


def _json_operation(name: str, about: str, schema: str, **more: Any) -> Mapping[str, Any]:
    """Return an operation whose response is JSON with one of `SCHEMAS`, or an error."""
    responses = {"200": _response(about, reference(schema)), "default": {"$ref": "#/components/responses/Error"}}
    return _operation(name, about, responses, **more)


def _text_operation(name: str, about: str, kind: str, **more: Any) -> Mapping[str, Any]:
    """Return an operation whose response is text, or an error."""
    response = _response(about, {"type": "string"}, kind)
    return _operation(name, about, {"200": response, "default": {"$ref": "#/components/responses/Error"}}, **more)


def _body(about: str, *, needs_model: bool = True) -> Mapping[str, Any]:
    """Return the schema of a request body; only its model is described."""
    model = {"properties": {"model": {"type": "string", "minLength": 1}}, "required": ["model"]}
    return {"type": "object", "description": about, **(model if needs_model else {})}


def _forwarded_path(name: str, about: str, *, needs_model: bool = True) -> Mapping[str, Any]:
    forwarded = {
        "200": {"$ref": "#/components/responses/Forwarded"},
        "default": {"$ref": "#/components/responses/ForwardedError"},
    }
    body = _body("The request in the provider's format.", needs_model=needs_model)
    headers = [header.decode() for header in (*READ, *DIRECTIVES)]
    operation = _operation(name, about, forwarded, parameters=headers, body=body, security=_CALLERS)
    return {"servers": list(_PROXIED_SERVERS), "post": operation}


def _listing(name: str, about: str, schema: Schema, **more: Any) -> Mapping[str, Any]:
    responses = {"200": _response(about, schema), "default": {"$ref": "#/components/responses/ForwardedError"}}
    return {"servers": list(_PROXIED_SERVERS), "get": _operation(name, about, responses, security=_CALLERS, **more)}


_PART: Final = _parameter("q", "query", "Part of the session id.", {"type": "string"})
_PATTERN: Final = _parameter("q", "query", "Part of the model name, or a shell pattern.", {"type": "string"})
_BODY: Final = _body("A request body in one of the formats whose tokens the gateway counts.")
_COUNT_PARAMETERS: Final = ("budget", "items", "tools", "wire", "forSession")

_KEY_NAME: Final = _parameter("name", "path", "Name of the client key.", {"type": "string"}, required=True)

OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "/api/keys": {
        "get": _json_operation("listKeys", "List client keys: all for the admin key, else the caller's.", "ClientKeys"),
        "post": _operation(
            "addKey",
            "Make a client key. Its secret is shown once.",
            {
                "201": _response("Made.", reference("MadeClientKey")),
                "default": {"$ref": "#/components/responses/Error"},
            },
            body=reference("NewClientKey"),
            security=_ADMIN,
        ),
    },
    "/api/keys/{name}": {
        "patch": _json_operation(
            "changeKey",
            "Change a client key of the store, and keep its secret.",
            "ClientKey",
            parameters=(_KEY_NAME,),
            body=reference("ClientKeyChange"),
            security=_ADMIN,
        ),
        "delete": _json_operation(
            "revokeKey",
            "Revoke a client key of the store. Its sessions stay.",
            "Revoked",
            parameters=(_KEY_NAME,),
            security=_ADMIN,
        ),
    },
    "/api/keys/{name}/rotate": {
        "post": _json_operation(
            "rotateKey",
            "Give a client key a new secret. The present one is accepted for the overlap.",
            "MadeClientKey",
            parameters=(_KEY_NAME,),
            body=reference("Rotation"),
            security=_ADMIN,
        )
    },
    "/api/sessions": {
        "get": _json_operation(
            "listSessions",
            "List sessions, newest first.",
            "SessionPage",
            parameters=(
                "limit",
                "cursor",
                _PART,
                _parameter(
                    "sort", "query", "Order of the sessions, descending.", {"enum": list(SORTS), "default": SORTS[0]}
                ),
            ),
        )
    },
    "/api/sessions/{id}": {
        "get": _json_operation(
            "getSession", "Get one session: totals, budget, tools, steps.", "SessionDetails", parameters=("session",)
        ),
        "patch": _json_operation(
            "changeSession",
            "Change or remove a session's budget, or set its step.",
            "ChangedSession",
            parameters=("session",),
            body=reference("Change"),
            security=_ADMIN,
        ),
        "delete": _json_operation(
            "deleteSession",
            "Delete a session and its call records.",
            "Deleted",
            parameters=("session",),
            security=_ADMIN,
        ),
    },
    "/api/sessions/{id}/calls": {
        "get": _json_operation(
            "listSessionCalls",
            "List the call records of a session, newest first.",
            "CallPage",
            parameters=("session", "limit", "cursor", "agent"),
        )
    },
    "/api/sessions/{id}/reset": {
        "post": _json_operation(
            "resetSession",
            "Set a session's totals and used budget to zero.",
            "ChangedSession",
            parameters=("session",),
            security=_ADMIN,
        )
    },
    "/api/sessions/{id}/resume": {
        "post": _json_operation(
            "resumeSession",
            "Allow the calls of a session again that runaway protection refuses.",
            "ChangedSession",
            parameters=("session",),
            security=_ADMIN,
        )
    },
    "/api/calls": {
        "get": _json_operation(
            "listCalls", "List the newest call records of all sessions.", "CallPage", parameters=("limit",)
        )
    },
    "/api/calls/{request_id}": {
        "get": _json_operation(
            "getCall",
            "Get one call record.",
            "Call",
            parameters=(
                _parameter(
                    "request_id",
                    "path",
                    "The `x-gateway-request-id` of the call, or the `call_id` of its record.",
                    {"type": "string"},
                    required=True,
                ),
                "explain",
            ),
        )
    },
    "/api/usage": {
        "get": _operation(
            "getUsage",
            "Add up calls, tokens and costs by labels, for each hour or day (UTC) or the whole time.",
            {
                "200": {
                    "description": "The report.",
                    "content": {
                        _JSON: {"schema": reference("UsageReport")},
                        "application/x-ndjson": {"schema": {"type": "string"}},
                        "text/csv": {"schema": {"type": "string"}},
                    },
                },
                "default": {"$ref": "#/components/responses/Error"},
            },
            parameters=(
                _parameter(
                    "group_by", "query", f"Labels, separated by commas: {', '.join(LABELS)}.", {"type": "string"}
                ),
                _parameter("from", "query", "Begin, as a date or time in UTC; default 29 days before `to`.", _TIME),
                _parameter("to", "query", "End: the last hour or day, which is included; default now.", _TIME),
                _parameter("bucket", "query", "One line for each of these.", {"enum": list(BUCKETS), "default": "day"}),
                _parameter("format", "query", "Format of the response.", {"enum": list(FORMATS), "default": "json"}),
                {
                    **_parameter("labels", "query", "Values of labels, such as `tag=nightly`.", _LABELS),
                    "style": "form",
                    "explode": True,
                },
            ),
        )
    },
    "/api/audit": {
        "get": _json_operation(
            "listChanges",
            "List the changes of administrators, newest first.",
            "ChangePage",
            parameters=(
                "limit",
                "cursor",
                _parameter(
                    "target",
                    "query",
                    "Only changes whose target contains this text: a session, a client key or `configuration`.",
                    {"type": "string", "maxLength": 512},
                ),
            ),
            security=_ADMIN,
        )
    },
    "/api/results/{handle}": {
        "get": _text_operation(
            "getResult",
            "Get the full text of a tool result that was sent in a shorter form.",
            "text/plain",
            parameters=(
                _parameter("handle", "path", "The handle in the shorter form.", {"type": "string"}, required=True),
            ),
        )
    },
    "/api/count": {
        "post": _json_operation(
            "count", "Count the tokens of a request body.", "Count", parameters=_COUNT_PARAMETERS, body=_BODY
        )
    },
    "/api/context": {
        "post": _json_operation(
            "context",
            "Get the context numbers that an agent passes to its tools.",
            "ContextNumbers",
            parameters=_COUNT_PARAMETERS,
            body=_BODY,
        )
    },
    "/api/trim": {
        "post": _json_operation(
            "trim",
            "Trim a request body as for forwarding, and explain the result. Response modes are not applied.",
            "Trimmed",
            parameters=("budget", "explain", "wire", "forSession"),
            body=_BODY,
        )
    },
    "/api/models": {
        "get": _json_operation(
            "listModelFacts",
            "List models: provider, context window, limits of input and output, prices.",
            "Models",
            parameters=("limit", _PATTERN),
        )
    },
    "/api/events": {
        "get": {
            **_text_operation(
                "listen", "Stream calls when they are settled, as server-sent events `call` and `missed`.", _EVENTS
            ),
            "x-event-data": {"call": reference("CallEvent"), "missed": reference("MissedEvent")},
        }
    },
    "/api/health": {
        "get": _json_operation(
            "getHealth", "Get the state of this worker, its store and its providers.", "Health", security=_ADMIN
        )
    },
    "/api/reload": {
        "post": _json_operation("reload", "Read the configuration again and apply it.", "Reloaded", security=_ADMIN)
    },
    "/healthz": {"get": _json_operation("isAlive", "Check that the process is running.", "Alive", security=_PUBLIC)},
    "/readyz": {
        "get": _operation(
            "isReady",
            "Check that the store is writable and calls are accepted.",
            {"200": _response("Ready.", reference("Ready")), "503": _response("Not ready.", reference("Ready"))},
            security=_PUBLIC,
        )
    },
    "/metrics": {"get": _text_operation("getMetrics", "Get metrics for Prometheus.", "text/plain", security=_ADMIN)},
    "/openapi.json": {
        "get": _operation(
            "describe", "Get this document.", {"200": _response("OpenAPI 3.1.", {"type": "object"})}, security=_PUBLIC
        )
    },
    "/": {
        "get": _operation(
            "openDashboard",
            "Redirect a browser (`Accept: text/html`) to `/ui`.",
            {"307": {"description": "To `/ui`."}, "default": {"$ref": "#/components/responses/Error"}},
            security=_PUBLIC,
        )
    },
    "/ui": {"get": _text_operation("showDashboard", "Get the page of the dashboard.", "text/html", security=_PUBLIC)},
    "/ui/": {
        "get": _operation(
            "leadToDashboard", "Redirect to `/ui`.", {"308": {"description": "To `/ui`."}}, security=_PUBLIC
        )
    },
    "/ui/{version}/{name}": {
        "get": _operation(
            "getDashboardFile",
            "Get a file of the dashboard.",
            {"200": {"description": "The file."}, "default": {"$ref": "#/components/responses/Error"}},
            parameters=[
                _parameter(name, "path", "As in the links of the page.", {"type": "string"}, required=True)
                for name in ("version", "name")
            ],
            security=_PUBLIC,
        )
    },
}
PROXIED: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": _forwarded_path("chat", "Forward a call in the format of OpenAI's chat completions."),
    "/v1/responses": _forwarded_path(
        "respond", "Forward a call in the format of OpenAI's responses.", needs_model=False
    ),
    "/v1/messages": _forwarded_path("messages", "Forward a call in the format of Anthropic's messages."),
    "/v1/completions": _forwarded_path("complete", "Forward a call in the format of OpenAI's older completions."),
    "/v1/embeddings": _forwarded_path(
        "embed", "Forward a call in the format of OpenAI's embeddings.", needs_model=False
    ),
    "/v1/models": _listing("listModels", "List the models that can be called.", reference("ModelList")),
    "/v1/models/{model}": _listing(
        "getModel",
        "Get one model.",
        reference("ForeignModel"),
        parameters=(_parameter("model", "path", "Name of the model.", {"type": "string"}, required=True),),
    ),
}
