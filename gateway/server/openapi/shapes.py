"""Describe the JSON of responses as JSON Schema (2020-12)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, get_args

from gateway.core.counting.estimate import Source
from gateway.core.errors import GatewayError
from gateway.core.fitting import overflow
from gateway.core.modes import MODES
from gateway.core.record import OUTCOMES, THINKING_REASONS
from gateway.core.thinking_origin import Reason
from gateway.core.usage import UsageSource

Schema = Mapping[str, Any]

#: those of `core.errors` and of what is defined beside them
_CORE: Final = (GatewayError.__module__, overflow.__name__)


def faults() -> tuple[type[GatewayError], ...]:
    """Every error that is raised, in the order they are defined: without those that only groups are named after."""
    return tuple(kind for kind in _kinds(GatewayError) if not kind.__name__.endswith("Fault"))


def _kinds(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for inner in kind.__subclasses__():
        # A library that is not on the way of a call has errors of its own.
        if inner.__module__ in _CORE:
            yield inner
            yield from _kinds(inner)


def record(about: str, fields: Mapping[str, Schema], optional: Collection[str] = ()) -> Schema:
    """An object that always has these fields, but for the optional ones."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "description": about, "required": required, "properties": dict(fields)}


def rows(of: Schema, about: str = "") -> Schema:
    """An array."""
    return {"type": "array", "items": of, **_about(about)}


def table(of: Schema, about: str = "") -> Schema:
    """An object whose keys are names."""
    return {"type": "object", "additionalProperties": of, **_about(about)}


def text(about: str = "", *, null: bool = False, one_of: Collection[str] = ()) -> Schema:
    """A string. `one_of`: the values there are."""
    values = {"enum": [*one_of, None] if null else list(one_of)} if one_of else {}
    return {"type": ["string", "null"] if null else "string", **values, **_about(about)}


def whole(about: str = "", *, null: bool = False) -> Schema:
    """A whole number, never negative."""
    return {"type": ["integer", "null"] if null else "integer", "minimum": 0, **_about(about)}


def number(about: str = "", *, null: bool = False) -> Schema:
    """A number."""
    return {"type": ["number", "null"] if null else "number", **_about(about)}


def flag(about: str = "", *, null: bool = False) -> Schema:
    """True or false."""
    return {"type": ["boolean", "null"] if null else "boolean", **_about(about)}


def named(name: str) -> Schema:
    """One of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def maybe(schema: Schema) -> Schema:
    """It, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def _about(about: str) -> Mapping[str, str]:
    return {"description": about} if about else {}


_TIME: Final = {"type": "string", "format": "date-time"}
_MAYBE_TIME: Final = {**_TIME, "type": ["string", "null"]}
_USD: Final = "in US dollars, with six decimals"
_USAGE_FIELDS: Final = {
    "input_tokens": whole("cached tokens included"),
    "output_tokens": whole("reasoning tokens included"),
    "total_tokens": whole(),
    "cache_read_tokens": whole("input tokens that the provider served from its cache"),
    "cache_write_tokens": whole("input tokens that the provider put into its cache"),
    "reasoning_tokens": whole(),
}
_STEP_FIELDS: Final = {
    "active_step": text("the step of the agent whose place changed last", null=True),
    "steps": table(named("Place"), "the place of each agent in its steps, by the agent's name"),
}
_BUDGET_FIELDS: Final = {
    "budget": maybe(named("Budget")),
    "response_mode": text("how its tool results are shown", one_of=MODES),
}
_SESSION_FIELDS: Final = {
    "id": text("with the client key's name and a slash in front for whoever sees the sessions of all keys"),
    "created_at": _TIME,
    "last_call_at": _TIME,
    "calls": whole("calls that were counted: those that the provider bills"),
    "calls_under_way": whole("calls that hold a part of its budget now"),
    "cumulative_token_usage": named("Totals"),
    "usage_source": text("on whose word these tokens are", one_of=get_args(UsageSource)),
    "cost_usd": text(f"{_USD}; null once a call's price is unknown", null=True),
    "saved_by_trimming": record(
        "what was not sent",
        {"input_tokens": whole("by the gateway's estimate"), "calls": whole("calls that were trimmed")},
    ),
    "used_with_children": record(
        "what counts against its budget, with what sessions below it used", {"tokens": whole(), "calls": whole()}
    ),
    **_BUDGET_FIELDS,
    "derived_id": flag("nothing named it: the id was derived from how the conversation begins"),
}
_TOOLS_FIELDS: Final = {
    "recent_tools": rows(text(), "tools of its last calls, in their order"),
    "tools": table(
        record(
            "what is counted of one tool",
            {
                "calls": whole("calls of it that the session's answers asked for"),
                "result_tokens": whole("tokens of its results"),
                "results": whole("number of its results"),
            },
        ),
        "by name; results are those in its context at its last call",
    ),
}
_CALL_FIELDS: Final = {
    "request_id": text("the caller's own, else the gateway's"),
    "call_id": text("the gateway's, unique"),
    "session": text("the session's id; null where it has none", null=True),
    "started_at": _TIME,
    "dialect": text("the format it was read in"),
    "operation": text(),
    "provider": text("empty where none was chosen"),
    "model": text(),
    "response_model": text("the model that the answer names", null=True),
    "stream": flag(),
    "status": whole("the HTTP status of the answer"),
    "outcome": text("docs/guides/monitoring.md says what each means", one_of=OUTCOMES),
    "error_code": text("of the gateway's own error", null=True),
    "error": maybe(named("CallError")),
    "declared_budget": maybe(named("Limits")),
    "finish_reason": text(null=True),
    "tools": rows(text(), "names of the tools that the answer asks for"),
    "response_mode": text(null=True, one_of=MODES),
    "active_step": text(null=True),
    "usage": maybe(named("Usage")),
    "usage_source": text("on whose word the usage is", null=True, one_of=get_args(UsageSource)),
    "cost_usd": text(f"{_USD}; null where the price is unknown", null=True),
    "overhead_ms": number("milliseconds from when the request had been read until it was sent on"),
    "first_byte_ms": number("the same until the head of the answer came; null where none did", null=True),
    "duration_ms": number("the same until the call had ended"),
    "request_bytes": whole(),
    "response_bytes": whole(),
    "notes": table(text(), "what else is known, by name"),
    "unread_thinking": rows(
        record(
            "thinking blocks of the request that were dropped without an error",
            {
                "blocks": whole(),
                "reason": text(
                    "`model`: the model does not read those of the one that made them; `provider`: they are bound to "
                    "the account of the provider that made them",
                    one_of=get_args(Reason),
                ),
                "provider": text("that made them"),
                "model": text("that made them"),
            },
        ),
        "empty where all are read, as far as is known",
    ),
    "context": maybe(named("Context")),
}
_CONVERSATION: Final = "texts, calls and thinking, system texts too; no tool results, definitions of tools or images"
_WEIGHT_FIELDS: Final = {
    "conversation_tokens": whole(_CONVERSATION),
    "budget": whole("input tokens that are allowed; null where nothing limits them", null=True),
    "items": rows(
        record("one message", {"index": whole(), "role": text(), "tokens": whole()}), "with `items=1`: each message"
    ),
    "tools": named("ToolWeights"),
}
_SHOWN: Final = ("items", "tools")

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Error": record(
        "an error of the gateway, in the form of OpenAI's API",
        {
            "error": record(
                "what went wrong",
                {
                    "message": text("what, the number, the limit, the remedy"),
                    "type": text(),
                    "param": text("the field or header it is about", null=True),
                    "code": text("for programs", one_of=sorted({kind.code for kind in faults()})),
                    "budget": table({}, "the arithmetic, with codes of budgets"),
                },
                optional=("budget",),
            )
        },
    ),
    "Usage": record("the tokens of one call", _USAGE_FIELDS),
    "Totals": record(
        "the tokens of a session",
        {**_USAGE_FIELDS, "estimated_tokens": whole("the part of these that no provider reported")},
    ),
    "UsageHeader": record(
        "tokens as they stand in headers",
        {"promptTokens": whole(), "completionTokens": whole(), "totalTokens": whole()},
    ),
    "Limits": record(
        "a budget that a call declares for its session, such as with `x-session-budget-tokens`; null: no limit",
        {"tokens": whole(null=True), "usd": text(_USD, null=True), "calls": whole(null=True)},
    ),
    "CallError": record(
        "the gateway's own error as the client received it",
        {
            "message": text("cut to 1,000 characters"),
            "budget": {
                "type": ["object", "null"],
                "description": "with codes of budgets, the arithmetic: whose account, its limit, what was needed",
                "additionalProperties": {"type": ["integer", "string", "null"]},
            },
        },
    ),
    "Budget": record(
        "what a session may spend; limits that it does not have are null",
        {
            "tokens": whole(null=True),
            "usd": text(null=True),
            "calls": whole(null=True),
            "used": record("so far, with child sessions", {"tokens": whole(), "usd": text(), "calls": whole()}),
            "held": whole("tokens that calls under way may still use"),
            "remaining": whole("tokens that are left", null=True),
            "used_fraction": number("used share of the limit that is used most; above 1 where it was overshot"),
            "resets_in_s": whole("seconds until it refills; null where it does not", null=True),
        },
    ),
    "Place": record(
        "where one agent of a session is in its steps",
        {
            "active_step": text(null=True),
            "description": text(null=True),
            "sequence_index": whole("the place that is due, from 0 on", null=True),
            "sequence": rows(rows(text()), "tools, place by place; of a place any one"),
            "due": {"type": ["array", "null"], "items": text(), "description": "of these tools one is due"},
            "is_set": flag("the step was set by hand"),
            "recent_tools": rows(text(), "names of the tools used last, in their order"),
        },
    ),
    "Session": record("a session and its totals", _SESSION_FIELDS),
    "SessionDetails": record(
        "a session, its tools and its steps; where none of its calls was charged, its totals are zero",
        {
            **_SESSION_FIELDS,
            "created_at": {**_MAYBE_TIME, "description": "null where it made no call itself"},
            "last_call_at": {**_MAYBE_TIME, "description": "null where there is no record of a call"},
            "declared_budget": maybe(named("Limits")),
            "parent": text("the session that this one works for, if any", null=True),
            "parents": rows(
                record("a session above this one", {"id": text(), "budget": maybe(named("Budget"))}),
                "whose budgets its calls use too, from the nearest up",
            ),
            **_TOOLS_FIELDS,
            **_STEP_FIELDS,
        },
    ),
    "ChangedSession": record(
        "a session as it is after a change; where no call of it was counted, only `id`, `budget`, `response_mode`, "
        "`active_step` and `steps`",
        {**_SESSION_FIELDS, **_STEP_FIELDS},
        optional=[name for name in _SESSION_FIELDS if name not in ("id", *_BUDGET_FIELDS)],
    ),
    "SessionPage": record(
        "some sessions",
        {"sessions": rows(named("Session")), "cursor": text("for the next page; null on the last", null=True)},
    ),
    "ToolWeights": table(record("one tool", {"results": whole(), "result_tokens": whole()}), "results, by tool"),
    "Context": record(
        "what one call weighed and what was left out of it",
        {
            "tokens": whole("input tokens that the provider is expected to report for what was sent"),
            "original_tokens": whole("the same for what came"),
            "kept_tokens": whole("the part of both that is not sent: an earlier answer, which the provider keeps"),
            "source": text("how good these numbers are", one_of=get_args(Source)),
            "budget": whole("input tokens that were allowed", null=True),
            "remaining": whole("what is left of them beside what was sent and its margin", null=True),
            "conversation_tokens": whole(f"of what was sent, {_CONVERSATION}"),
            "tool_tokens": whole("tokens of the tool results in what was sent"),
            "tools": named("ToolWeights"),
            "trimmed": table(whole(), "messages (of Responses: items) by what was done with them, as in `items`"),
            "thinking": maybe(named("Thinking")),
            "shadow": flag("it was only decided; what was sent is what came"),
            "items": rows(named("Fate"), "with `explain=1`: each message that came; empty where nothing was changed"),
            "note": text("where a summary would be asked for first: what is told is what would be sent without it"),
        },
        optional=("items", "note"),
    ),
    "Thinking": record(
        "thinking blocks of a request to a model that accepts them only after an unchanged prefix",
        {
            "received": whole("blocks that the client sent"),
            "sent": whole("blocks that were sent to the provider"),
            "reason": text(
                "why others were removed on this call; `earlier`: all of them were removed on earlier calls",
                null=True,
                one_of=THINKING_REASONS,
            ),
        },
    ),
    "Fate": record(
        "what became of one message",
        {"index": whole(), "role": text(), "tokens": whole(), "sent_tokens": whole(), "rule": text()},
    ),
    "Call": record("one call; no prompt or answer text", _CALL_FIELDS),
    "CallPage": record(
        "some calls, newest first",
        {"calls": rows(named("Call")), "cursor": text("for the next page", null=True)},
        optional=("cursor",),
    ),
    "CallEvent": record(
        "the data of an event `call`: a call that was settled",
        {**_CALL_FIELDS, "totals": maybe(named("Totals"))},
    ),
    "MissedEvent": record(
        "the data of an event `missed`: events that were dropped", {"count": whole("null: nobody knows", null=True)}
    ),
    "Model": record(
        "what is known of a model; null where nobody says",
        {
            "model": text("the name to ask for"),
            "provider": text(),
            "name": text("its name at the provider"),
            "window": whole("context window in tokens", null=True),
            "input": whole("most input tokens of a call, where those are limited for themselves", null=True),
            "output": whole("most tokens of an answer", null=True),
            "tokenizer": text(null=True),
            "price": {
                "type": ["object", "null"],
                "description": "in US dollars for a million tokens; `search` for each web search",
                "additionalProperties": text(null=True),
            },
            "reasoning": flag("it may think before it answers", null=True),
            "sources": table(text(), "where each of these was read"),
        },
    ),
    "Models": record("some models", {"models": rows(named("Model"))}),
    "Count": record(
        "what a request body weighs",
        {
            "model": text(),
            "provider": text(),
            "wire": text("its format"),
            "tokens": whole("input tokens that the provider is expected to report"),
            "kept_tokens": whole("the part of them that is not sent: an earlier answer, which the provider keeps"),
            "margin": whole("tokens to keep free beside them, as they are an estimate"),
            "source": text("how good the number is", one_of=get_args(Source)),
            "counter": text("the tokenizer"),
            "family": text("the model family whose numbers were used"),
            "tool_tokens": whole("tokens of tool results"),
            "tool_results": whole("number of different tool results"),
            "definition_tokens": whole("tokens of the definitions of tools"),
            **_WEIGHT_FIELDS,
        },
        optional=_SHOWN,
    ),
    "ContextNumbers": record(
        "the numbers an agent hands on to its tools",
        {
            "accumulated_tool_tokens": whole("tokens of tool results"),
            "remaining": whole("input tokens that the budget leaves", null=True),
            **_WEIGHT_FIELDS,
        },
        optional=_SHOWN,
    ),
    "Trimmed": record(
        "a request body as it would be forwarded, and why",
        {"body": {"type": "object", "description": "in the format it came in"}, "context": named("Context")},
    ),
    "Health": record(
        "how one worker does",
        {
            "status": text(one_of=("ready", "not ready")),
            "version": text(),
            "worker": record(
                "the worker that answers",
                {
                    "pid": whole(),
                    "workers": whole("processes that were started side by side"),
                    "started_at": _TIME,
                    "calls": whole("calls under way"),
                    "holds": whole("holds that it keeps alive"),
                },
            ),
            "store": record(
                "its store",
                {
                    "url": text("without a password"),
                    "reachable": flag(),
                    "problem": text("why it cannot be used", null=True),
                    "away": flag("it could not be used when it was used last"),
                    "waiting": whole("settled calls that wait for it"),
                    "on_failure": text("what becomes of new calls meanwhile"),
                },
            ),
            "default_provider": text(null=True),
            "providers": rows(
                record(
                    "a provider as this worker saw it",
                    {
                        "name": text(),
                        "adapter": text(),
                        "state": text(
                            "`not_called`: not by this worker yet; `no_key`: nor has the gateway a key for it",
                            one_of=("ok", "failing", "left_alone", "not_called", "no_key"),
                        ),
                        "failures": whole("failures in a row"),
                        "asked_in_s": number("where it is left alone: seconds until it is asked again", null=True),
                    },
                )
            ),
            "unrecorded_refusals": rows(
                record(
                    "refusals with the same error and credential",
                    {
                        "code": text(),
                        "status": whole(),
                        "credential": text("the beginning of the SHA-256 of the unknown key", null=True),
                        "message": text("that the client received last"),
                        "count": whole(),
                        "first_at": _TIME,
                        "last_at": _TIME,
                    },
                ),
                "refusals by this worker that have no record in the store, the newest first, at most 50",
            ),
        },
    ),
    "Alive": record("the process answers", {"status": text(one_of=("alive",))}),
    "Ready": record(
        "whether the store can be written, and calls are taken",
        {"status": text(one_of=("ready", "not ready", "stopping")), "store": text("why it cannot")},
        optional=("store",),
    ),
    "Deleted": record("what was deleted", {"id": text(), "deleted": {"const": True}}),
    "Reloaded": record(
        "the configuration was read again",
        {"reloaded": {"const": True}, "needs_restart": rows(text(), "keys that were changed and need a restart")},
        optional=("needs_restart",),
    ),
    "Change": {
        "type": "object",
        "description": "what is to be changed of a session; at least a budget or a step",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {
            "budget": {
                "description": "limits to set; null lifts one. `default`: all as they are configured",
                "anyOf": [
                    {"const": "default"},
                    {
                        "type": "object",
                        "minProperties": 1,
                        "additionalProperties": False,
                        "properties": {
                            "tokens": whole(null=True),
                            "usd": {"type": ["number", "string", "null"]},
                            "calls": whole(null=True),
                        },
                    },
                ],
            },
            "active_step": text("null: the one that the conditions say", null=True),
            "sequence_index": whole("entries of the step's sequence that are done; without it none"),
            "agent": text("whose step; without it the default agent's"),
        },
    },
    "ForeignModel": {
        **record("a model, with what its provider writes of it", {"id": text("the name to ask for")}),
        "additionalProperties": True,
    },
    "ModelList": {
        **record(
            "models in the form of OpenAI's API, or with `anthropic-version` in that of Anthropic's",
            {"data": rows(named("ForeignModel"))},
        ),
        "additionalProperties": True,
    },
}
