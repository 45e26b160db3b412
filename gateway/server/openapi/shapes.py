"""Describe the JSON of responses as JSON Schema (2020-12)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, get_args

from gateway.core.audit import ACTIONS, CONFIGURATION
from gateway.core.calling_agent import REQUEST_CLASSES
from gateway.core.counting.estimate import Source
from gateway.core.errors import GatewayError
from gateway.core.modes import MODES
from gateway.core.record import OUTCOMES, THINKING_REASONS
from gateway.core.rollup import COUNTS, LABELS
from gateway.core.runaway import KINDS
from gateway.core.thinking_origin import Reason
from gateway.core.trimming import overflow
from gateway.core.usage import UsageSource

Schema = Mapping[str, Any]

#: modules that define the gateway's errors
_ERROR_MODULES: Final = (GatewayError.__module__, overflow.__name__)


def error_classes() -> tuple[type[GatewayError], ...]:
    """Return every error class that can be raised, in the order of definition. Base classes end in `Fault`."""
    return tuple(kind for kind in _subclasses(GatewayError) if not kind.__name__.endswith("Fault"))


def _subclasses(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for inner in kind.__subclasses__():
        # Other modules may define errors that no client receives.
        if inner.__module__ in _ERROR_MODULES:
            yield inner
            yield from _subclasses(inner)


def record(about: str, fields: Mapping[str, Schema], optional: Collection[str] = ()) -> Schema:
    """Return the schema of an object with these fields. All are required except the optional ones."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "description": about, "required": required, "properties": dict(fields)}


def array(of: Schema, about: str = "") -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": of, **_about(about)}


def mapping(of: Schema, about: str = "") -> Schema:
    """Return the schema of an object whose keys are names."""
    return {"type": "object", "additionalProperties": of, **_about(about)}


def text(about: str = "", *, null: bool = False, one_of: Collection[str] = ()) -> Schema:
    """Return the schema of a string. `one_of`: all possible values."""
    values = {"enum": [*one_of, None] if null else list(one_of)} if one_of else {}
    return {"type": ["string", "null"] if null else "string", **values, **_about(about)}


def integer(about: str = "", *, null: bool = False) -> Schema:
    """Return the schema of a whole number that is never negative."""
    return {"type": ["integer", "null"] if null else "integer", "minimum": 0, **_about(about)}


def number(about: str = "", *, null: bool = False) -> Schema:
    """Return the schema of a number."""
    return {"type": ["number", "null"] if null else "number", **_about(about)}


def boolean(about: str = "", *, null: bool = False) -> Schema:
    """Return the schema of a boolean."""
    return {"type": ["boolean", "null"] if null else "boolean", **_about(about)}


def reference(name: str) -> Schema:
    """Return a reference to one of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def _about(about: str) -> Mapping[str, str]:
    return {"description": about} if about else {}


#: what the gateway knows of a model; in foreign formats, so that the provider may have other types
_MODEL_FACTS: Final[Mapping[str, Schema]] = {
    "context_length": {"description": "context window that the gateway allows, in tokens"},
    "max_context_length": {"description": "the same"},
    "max_input_tokens": {"description": "the most input tokens"},
    "max_tokens": {"description": "the most output tokens"},
    "top_provider": {"description": "window and most output tokens, in the form of OpenRouter"},
    "pricing": {"description": "US dollars per token, as text"},
}
_TIME: Final = {"type": "string", "format": "date-time"}
_MAYBE_TIME: Final = {**_TIME, "type": ["string", "null"]}
_USD: Final = "in US dollars, with six decimals"
_USAGE_FIELDS: Final = {
    "input_tokens": integer("cached tokens included"),
    "output_tokens": integer("reasoning tokens included"),
    "total_tokens": integer(),
    "cache_read_tokens": integer("input tokens that the provider served from its cache"),
    "cache_write_tokens": integer("input tokens that the provider put into its cache"),
    "reasoning_tokens": integer(),
}
_STEP_FIELDS: Final = {
    "active_step": text("active step of the agent whose step state changed last", null=True),
    "steps": mapping(reference("Place"), "step state of each agent of `agents:`, by its name; `default`: of `steps:`"),
    "last_stop": text(
        "limit of runaway protection for which calls were refused last; null if none was, or since it was resumed",
        null=True,
        one_of=KINDS,
    ),
}
_BUDGET_FIELDS: Final = {
    "budget": nullable(reference("Budget")),
    "response_mode": text("how much of each tool result is sent to the model", one_of=MODES),
}
_SESSION_FIELDS: Final = {
    "id": text("session id; with the admin key, `KEY/ID` for a session of a client key"),
    "created_at": _TIME,
    "last_call_at": _TIME,
    "calls": integer("number of charged calls: those that the provider bills"),
    "calls_under_way": integer("running calls that hold a part of the budget"),
    "cumulative_token_usage": reference("Totals"),
    "usage_source": text("source of these tokens", one_of=get_args(UsageSource)),
    "cost_usd": text(f"{_USD}; null once a call's price is unknown", null=True),
    "saved_by_trimming": record(
        "input that was not sent",
        {"input_tokens": integer("estimated by the gateway"), "calls": integer("trimmed calls")},
    ),
    "used_with_children": record("used budget, including child sessions", {"tokens": integer(), "calls": integer()}),
    **_BUDGET_FIELDS,
    "derived_id": boolean("true: no call named the session; the id was derived from the start of the conversation"),
}
_USE_FIELDS: Final = {
    "calls": integer("number of charged calls"),
    "cumulative_token_usage": reference("Totals"),
    "cost_usd": text(f"{_USD}; null once a call's price is unknown", null=True),
}
_AGENT_FIELDS: Final = {
    "id": text("`main`, the id that the client sends, or `…` for all subagents beyond the first 128"),
    "type": text("such as `Explore`; null if the client does not say", null=True),
    "parent": text("the agent that started it; null if the client does not say", null=True),
    "active_step": text("step in which its last call was made", null=True),
    "created_at": _MAYBE_TIME,
    "last_call_at": _MAYBE_TIME,
    **_USE_FIELDS,
    "tools": mapping(integer(), "number of tool calls by name"),
    "with_children": nullable(record("use of this agent and of all agents below it", _USE_FIELDS)),
    "budget": nullable(reference("Budget")),
}
_TOOLS_FIELDS: Final = {
    "recent_tools": array(text(), "names of the tools called last, in order"),
    "tools": mapping(
        record(
            "use of one tool",
            {
                "calls": integer("tool calls in the session's responses"),
                "result_tokens": integer("tokens of the tool's results"),
                "results": integer("number of the tool's results"),
            },
        ),
        "by tool name; the results are those in the context of the session's last call",
    ),
}
_CALL_FIELDS: Final = {
    "request_id": text("the client's `x-request-id`, else the call id"),
    "call_id": text("unique id made by the gateway"),
    "session": text("session id; null for a call without a session", null=True),
    "started_at": _TIME,
    "dialect": text("format of the request"),
    "operation": text(),
    "provider": text("empty if none was chosen"),
    "model": text(),
    "response_model": text("model named in the response", null=True),
    "stream": boolean(),
    "status": integer("HTTP status of the response"),
    "outcome": text("explained in docs/guides/monitoring.md", one_of=OUTCOMES),
    "error_code": text("code of the gateway's own error", null=True),
    "error": nullable(reference("CallError")),
    "declared_budget": nullable(reference("Limits")),
    "finish_reason": text(null=True),
    "tools": array(text(), "names of the tools that the response calls"),
    "response_mode": text(null=True, one_of=MODES),
    "active_step": text(null=True),
    "agent": text("agent of the session that made the call; null if the client names none", null=True),
    "agent_type": text("its type, such as `Explore`", null=True),
    "parent_agent": text("the agent that started it", null=True),
    "request_class": text("what the call is for", null=True, one_of=REQUEST_CLASSES),
    "usage": nullable(reference("Usage")),
    "usage_source": text("source of the usage", null=True, one_of=get_args(UsageSource)),
    "cost_usd": text(f"{_USD}; null if the price is unknown", null=True),
    "overhead_ms": number("milliseconds from the end of the received request until it was sent to the provider"),
    "first_byte_ms": number(
        "milliseconds from the end of the received request until the head of the response; null without a response",
        null=True,
    ),
    "duration_ms": number("milliseconds from the end of the received request until the end of the call"),
    "request_bytes": integer(),
    "response_bytes": integer(),
    "notes": mapping(text(), "further remarks, by name"),
    "labels": mapping(text(), "further names by which usage is added up, such as `tag`"),
    "unread_thinking": array(
        record(
            "thinking blocks of the request that the provider drops without an error",
            {
                "blocks": integer(),
                "reason": text(
                    "`model`: the model cannot read thinking of the model that made it; `provider`: the blocks are "
                    "bound to the account of the provider that made them",
                    one_of=get_args(Reason),
                ),
                "provider": text("provider that made the blocks"),
                "model": text("model that made the blocks"),
            },
        ),
        "empty if all blocks are read, as far as is known",
    ),
    "context": nullable(reference("Context")),
}
_CONVERSATION: Final = (
    "tokens of texts (system prompt included), tool calls and thinking; without tool results, tool definitions, images"
)
_COUNT_FIELDS: Final = {
    "conversation_tokens": integer(_CONVERSATION),
    "budget": integer("most input tokens; null without a limit", null=True),
    "items": array(
        record("one message", {"index": integer(), "role": text(), "tokens": integer()}), "all messages, with `items=1`"
    ),
    "tools": reference("ToolWeights"),
}
_OPTIONAL_DETAILS: Final = ("items", "tools")

_KEY_FIELDS: Final = {
    "name": text("its sessions belong to this name"),
    "group": text("the group of `auth.groups` whose budget it shares; null: none", null=True),
    "in_configuration": boolean("true: a key of `auth.keys`, which only the configuration changes"),
    "models": array(text(), "shell patterns of the models that it may call; empty: all"),
    "budget": nullable(reference("Budget")),
    "window": text("when the budget refills, such as `1d` or `month`; null: never", null=True),
    "rpm": integer("most calls per minute; null: unlimited", null=True),
    "created_at": _MAYBE_TIME,
    "expires_at": {**_MAYBE_TIME, "description": "from then on its calls are refused; null: never"},
    "replaced_until": array(_TIME, "when each replaced secret that is still accepted ends"),
    "last_used_at": {**_MAYBE_TIME, "description": "up to a minute late; null: not for as long as sessions are kept"},
    "sessions": integer("number of stored sessions"),
    "problem": text("why its budget cannot be read; null: it can", null=True),
}
_KEY_SECRET: Final = {"key": text("the secret, which is shown only once")}
_KEY_SETTINGS: Final = {
    "models": {**array(text()), "type": ["array", "null"]},
    "budget": {
        "type": ["object", "null"],
        "description": "limits that are not named stay; null: no budget",
        "properties": {
            "tokens": integer(null=True),
            "usd": {"type": ["number", "string", "null"]},
            "calls": integer(null=True),
            "window": text("such as `1d` or `month`", null=True),
        },
        "additionalProperties": False,
    },
    "rpm": integer(null=True),
    "group": text("a group of `auth.groups`", null=True),
    "expires": text("a date, a time, or a duration from now such as `30d`", null=True),
}

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Error": record(
        "an error of the gateway, in the format of OpenAI's API",
        {
            "error": record(
                "what went wrong",
                {
                    "message": text("what happened, the number, the limit, the remedy"),
                    "type": text(),
                    "param": text("the field or header with the error", null=True),
                    "code": text("stable code for programs", one_of=sorted({kind.code for kind in error_classes()})),
                    "budget": mapping({}, "for budget errors: account, limit, used, held and needed amounts"),
                },
                optional=("budget",),
            )
        },
    ),
    "ClientKey": record("a client key, without its secret", _KEY_FIELDS),
    "ClientKeys": record(
        "client keys, sorted by name",
        {
            "keys": array(reference("ClientKey")),
            "shared": array(
                record(
                    "a budget that client keys share",
                    {
                        "group": text("null: of all client keys together", null=True),
                        "budget": nullable(reference("Budget")),
                        "window": text("when the budget refills, such as `1d` or `month`; null: never", null=True),
                        "problem": text("why its budget cannot be read; null: it can", null=True),
                    },
                ),
                "only for the admin key",
            ),
            "calls_need_key": boolean("false: calls without a client key are accepted, until the first key is made"),
            "may_change": boolean("the caller may make and change keys"),
        },
    ),
    "MadeClientKey": record("a client key with a new secret", {**_KEY_FIELDS, **_KEY_SECRET}),
    "NewClientKey": record("a client key to make", {"name": text(), **_KEY_SETTINGS}, optional=_KEY_SETTINGS),
    "ClientKeyChange": record("settings to change; others stay", _KEY_SETTINGS, optional=_KEY_SETTINGS),
    "Rotation": record("a rotation", {"overlap": text("how long the present secret is accepted, such as `24h`; or 0")}),
    "Revoked": record("a revoked client key", {"name": text(), "revoked": {"const": True}}),
    "Usage": record("the tokens of one call", _USAGE_FIELDS),
    "Totals": record(
        "the tokens of a session",
        {**_USAGE_FIELDS, "estimated_tokens": integer("the part of the total that no provider reported")},
    ),
    "UsageHeader": record(
        "tokens in the format of response headers",
        {"promptTokens": integer(), "completionTokens": integer(), "totalTokens": integer()},
    ),
    "Limits": record(
        "a budget that a call declares for its session, for example with `x-session-budget-tokens`; null: no limit",
        {"tokens": integer(null=True), "usd": text(_USD, null=True), "calls": integer(null=True)},
    ),
    "CallError": record(
        "the gateway's own error as the client received it",
        {
            "message": text("shortened to 1,000 characters"),
            "budget": {
                "type": ["object", "null"],
                "description": "for budget errors: the account, its limit, and used, held and needed amounts",
                "additionalProperties": {"type": ["integer", "string", "null"]},
            },
        },
    ),
    "Budget": record(
        "the budget of a session or of one of its agents; null for units without a limit",
        {
            "tokens": integer(null=True),
            "usd": text(null=True),
            "calls": integer(null=True),
            "used": record(
                "used so far, including child sessions or agents",
                {"tokens": integer(), "usd": text(), "calls": integer()},
            ),
            "held": integer("tokens that running calls have reserved"),
            "remaining": integer("remaining tokens", null=True),
            "used_fraction": number("used share of the limit that is used most; above 1 if the limit was exceeded"),
            "resets_in_s": integer("seconds until the budget refills; null if it does not refill", null=True),
            "kept_for_closing": integer("tokens that are kept for the closing call (`budget.closing`)", null=True),
            "is_closed": boolean("true: the closing call was taken, so that further calls are refused"),
        },
    ),
    "BurnRate": record(
        "when the budget is empty at the rate of the newest calls of the last hour; null with fewer than three calls "
        "or after ten minutes without a call",
        {
            "unit": text("the unit that is used up first", one_of=("tokens", "usd", "calls")),
            "per_minute": {"type": ["number", "string"], "description": "mean per minute; US dollars are text"},
            "per_call": {"type": ["number", "string"], "description": "mean per call; US dollars are text"},
            "calls": integer("calls on which this is based"),
            "empty_in_s": integer("seconds until the budget is empty; 0 if it is"),
            "empty_in_calls": integer("calls for which the budget is enough"),
            "refills_first": boolean("true: the budget refills before it is empty"),
        },
    ),
    "Place": record(
        "step state of one agent of `agents:` in a session",
        {
            "active_step": text(null=True),
            "description": text(null=True),
            "sequence_index": integer("index of the entry that is due, from 0", null=True),
            "sequence": array(array(text()), "entries of the sequence; any tool of an entry fulfils it"),
            "due": {"type": ["array", "null"], "items": text(), "description": "tools of which one is due"},
            "is_set": boolean("true: the step was set with the API"),
            "recent_tools": array(text(), "names of the tools called last, in order"),
        },
    ),
    "Session": record("a session and its totals", _SESSION_FIELDS),
    "SessionDetails": record(
        "a session, its tools and its steps; the totals are zero if none of its calls was charged",
        {
            **_SESSION_FIELDS,
            "created_at": {**_MAYBE_TIME, "description": "null if the session has no call of its own"},
            "last_call_at": {**_MAYBE_TIME, "description": "null without a call record"},
            "burn_rate": nullable(reference("BurnRate")),
            "declared_budget": nullable(reference("Limits")),
            "parent": text("id of the parent session, if any", null=True),
            "parents": array(
                record("a parent session", {"id": text(), "budget": nullable(reference("Budget"))}),
                "all parent sessions, the nearest first; calls are charged to their budgets too",
            ),
            **_TOOLS_FIELDS,
            **_STEP_FIELDS,
            "agents": array(
                record("one agent of the session", _AGENT_FIELDS),
                "the main agent, then the subagents by their first call; together they have the session's totals. "
                "Empty if there are no subagents",
            ),
        },
    ),
    "ChangedSession": record(
        "a session after a change; without a charged call only `id`, `budget`, `response_mode`, `active_step`, "
        "`steps` and `last_stop`",
        {**_SESSION_FIELDS, **_STEP_FIELDS},
        optional=[name for name in _SESSION_FIELDS if name not in ("id", *_BUDGET_FIELDS)],
    ),
    "SessionPage": record(
        "a page of sessions",
        {
            "sessions": array(reference("Session")),
            "cursor": text("cursor of the next page; null on the last", null=True),
        },
    ),
    "ToolWeights": mapping(
        record("one tool", {"results": integer(), "result_tokens": integer()}), "tool results, by tool name"
    ),
    "Context": record(
        "token counts of one call, and what was trimmed",
        {
            "tokens": integer("input tokens that the provider is expected to report for what was sent"),
            "original_tokens": integer("the same for what the client sent"),
            "kept_tokens": integer("the part of both that the provider keeps itself: an earlier response"),
            "source": text("accuracy of these numbers", one_of=get_args(Source)),
            "budget": integer("most input tokens of this call; null without a limit", null=True),
            "remaining": integer("remaining input tokens after this request and its margin", null=True),
            "conversation_tokens": integer(f"in what was sent: {_CONVERSATION}"),
            "tool_tokens": integer("tokens of the tool results in what was sent"),
            "tools": reference("ToolWeights"),
            "trimmed": mapping(integer(), "number of messages (in Responses: items) by what was done with them"),
            "thinking": nullable(reference("Thinking")),
            "shadow": boolean("true: trimming was only decided, and the request was sent unchanged"),
            "items": array(reference("Fate"), "all received messages, with `explain=1`; empty if nothing was changed"),
            "note": text("present if a summary would be requested first: the numbers are those without the summary"),
        },
        optional=("items", "note"),
    ),
    "Thinking": record(
        "thinking blocks of a request to a model that accepts them only after an unchanged prefix",
        {
            "received": integer("blocks that the client sent"),
            "sent": integer("blocks that were sent to the provider"),
            "reason": text(
                "why the other blocks were removed on this call; `earlier`: all were removed on earlier calls",
                null=True,
                one_of=THINKING_REASONS,
            ),
        },
    ),
    "Fate": record(
        "what was done with one message",
        {"index": integer(), "role": text(), "tokens": integer(), "sent_tokens": integer(), "rule": text()},
    ),
    "Call": record("one call, without text of prompts and responses", _CALL_FIELDS),
    "CallPage": record(
        "a page of calls, newest first",
        {"calls": array(reference("Call")), "cursor": text("cursor of the next page", null=True)},
        optional=("cursor",),
    ),
    "UsageReport": record(
        "usage by labels; the lines in the order of time and falling costs",
        {
            "from": text("begin of the first hour or day"),
            "to": text("end of the last hour or day"),
            "bucket": text(one_of=("hour", "day", "total")),
            "group_by": array(text()),
            "usage": array(reference("UsageLine")),
            "total": reference("UsageLine"),
        },
    ),
    "UsageLine": record(
        "usage with the same values of the labels in `group_by`, which are fields as well",
        {
            "start": text("begin of the hour or day; absent for the whole time"),
            **{name: text() for name in LABELS},
            **{name: integer() for name in COUNTS},
            "cost_usd": text("known costs, rounded to six decimals"),
        },
        optional=("start", *LABELS),
    ),
    "ChangePage": record(
        "a page of the audit log, newest change first",
        {"changes": array(reference("AuditEntry")), "cursor": text("cursor of the next page", null=True)},
    ),
    "AuditEntry": record(
        "a change of an administrator; it holds no secret",
        {
            "at": text("time of the change"),
            "action": text(f"{', '.join(ACTIONS)}; `unreadable` for an entry that is damaged"),
            "target": text(f"session as KEY/ID, name of a client key, or `{CONFIGURATION}`"),
            "actor": text(
                "`admin key`, `token of NAME`, `this machine without a key`, `command line` or `signal SIGHUP`"
            ),
            "origin": text("address of the connection; for a command USER@HOST"),
            "old": {"description": "what was in force before; null: nothing, or not known"},
            "new": {"description": "what is in force since; null: nothing"},
        },
    ),
    "CallEvent": record(
        "the data of an event `call`: a settled call",
        {**_CALL_FIELDS, "totals": nullable(reference("Totals"))},
    ),
    "MissedEvent": record(
        "the data of an event `missed`: events that were dropped",
        {"count": integer("number of dropped events; null: unknown", null=True)},
    ),
    "Model": record(
        "limits and prices of a model; null if unknown",
        {
            "model": text("model name in a request"),
            "provider": text(),
            "name": text("model name at the provider"),
            "window": integer("context window in tokens", null=True),
            "input": integer("most input tokens of a call, if input has its own limit", null=True),
            "output": integer("most output tokens of a call", null=True),
            "tokenizer": text(null=True),
            "price": {
                "type": ["object", "null"],
                "description": "in US dollars per million tokens; `search`: per web search",
                "additionalProperties": text(null=True),
            },
            "reasoning": boolean("whether the model can reason before it responds", null=True),
            "sources": mapping(text(), "source of each of these fields"),
        },
    ),
    "Models": record("a list of models", {"models": array(reference("Model"))}),
    "Count": record(
        "token counts of a request body",
        {
            "model": text(),
            "provider": text(),
            "wire": text("format of the body"),
            "tokens": integer("input tokens that the provider is expected to report"),
            "kept_tokens": integer("the part of `tokens` that the provider keeps itself: an earlier response"),
            "margin": integer("further tokens to keep free, because the count is an estimate"),
            "source": text("accuracy of the count", one_of=get_args(Source)),
            "counter": text("tokenizer that was used"),
            "family": text("model family whose corrections were used"),
            "tool_tokens": integer("tokens of tool results"),
            "tool_results": integer("number of different tool results"),
            "definition_tokens": integer("tokens of tool definitions"),
            **_COUNT_FIELDS,
        },
        optional=_OPTIONAL_DETAILS,
    ),
    "ContextNumbers": record(
        "the context numbers that an agent passes to its tools",
        {
            "accumulated_tool_tokens": integer("tokens of tool results"),
            "remaining": integer("remaining input tokens of the budget", null=True),
            **_COUNT_FIELDS,
        },
        optional=_OPTIONAL_DETAILS,
    ),
    "Trimmed": record(
        "a trimmed request body, and what was done",
        {"body": {"type": "object", "description": "in the format of the request"}, "context": reference("Context")},
    ),
    "Health": record(
        "the state of one worker",
        {
            "status": text(one_of=("ready", "not ready")),
            "version": text(),
            "worker": record(
                "the worker that sends this response",
                {
                    "pid": integer(),
                    "workers": integer("number of worker processes"),
                    "started_at": _TIME,
                    "calls": integer("running calls"),
                    "holds": integer("holds whose leases this worker renews"),
                },
            ),
            "store": record(
                "the store of the worker",
                {
                    "url": text("without the password"),
                    "reachable": boolean(),
                    "problem": text("why the store cannot be used", null=True),
                    "away": boolean("true: the store was unavailable when it was used last"),
                    "waiting": integer("settled calls that wait for the store"),
                    "on_failure": text("what happens to new calls while the store is unavailable"),
                },
            ),
            "default_provider": text(null=True),
            "providers": array(
                record(
                    "a provider, from the view of this worker",
                    {
                        "name": text(),
                        "adapter": text(),
                        "state": text(
                            "`ok`: its last call succeeded; `failing`: its last calls failed; `left_alone`: circuit "
                            "open, no calls are sent; `not_called`: this worker has not called it yet; `no_key`: not "
                            "called yet, and the gateway has no key for it",
                            one_of=("ok", "failing", "left_alone", "not_called", "no_key"),
                        ),
                        "failures": integer("consecutive failures"),
                        "asked_in_s": number("circuit open: seconds until the provider is tried again", null=True),
                    },
                )
            ),
            "unrecorded_refusals": array(
                record(
                    "refusals with the same error and credential",
                    {
                        "code": text(),
                        "status": integer(),
                        "credential": text("first digits of the SHA-256 of the unknown key", null=True),
                        "message": text("the last message that a client received"),
                        "count": integer(),
                        "first_at": _TIME,
                        "last_at": _TIME,
                    },
                ),
                "refusals by this worker without a call record, newest first, at most 50",
            ),
            "identity_provider": nullable(
                record(
                    "the identity provider of auth.jwt",
                    {
                        "issuer": text(),
                        "problem": text("why its keys could not be read the last time", null=True),
                    },
                )
            ),
        },
    ),
    "Alive": record("the process is running", {"status": text(one_of=("alive",))}),
    "Ready": record(
        "whether the store is writable and calls are accepted",
        {"status": text(one_of=("ready", "not ready", "stopping")), "store": text("why the store cannot be used")},
        optional=("store",),
    ),
    "Deleted": record("what was deleted", {"id": text(), "deleted": {"const": True}}),
    "Reloaded": record(
        "the configuration was read again",
        {"reloaded": {"const": True}, "needs_restart": array(text(), "changed keys that need a restart")},
        optional=("needs_restart",),
    ),
    "Change": {
        "type": "object",
        "description": "changes of a session: its budget, its step, or both",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {
            "budget": {
                "description": "limits to set; null removes a limit. `default`: restore the configured limits",
                "anyOf": [
                    {"const": "default"},
                    {
                        "type": "object",
                        "minProperties": 1,
                        "additionalProperties": False,
                        "properties": {
                            "tokens": integer(null=True),
                            "usd": {"type": ["number", "string", "null"]},
                            "calls": integer(null=True),
                        },
                    },
                ],
            },
            "active_step": text("name of the step; null: the step that the conditions select", null=True),
            "sequence_index": integer("number of completed entries of the step's sequence; default 0"),
            "agent": text("name of the agent; default: the default agent"),
        },
    },
    "ForeignModel": {
        **record(
            "a model, with further fields of its provider",
            {"id": text("model name in a request"), **_MODEL_FACTS},
            optional=_MODEL_FACTS,
        ),
        "additionalProperties": True,
    },
    "ModelList": {
        **record(
            "models in the format of OpenAI's API, or with `anthropic-version` in that of Anthropic's API",
            {"data": array(reference("ForeignModel"))},
        ),
        "additionalProperties": True,
    },
}
