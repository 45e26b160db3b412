"""Write the response headers of the gateway, and read its request headers.

The names of the request headers are in `core/http/gateway_headers.py`. `core/http/headers.py` has the prefixes of the
gateway's own headers, and keeps these from providers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from gateway.call.types import NO_DIRECTIVES, ActiveStep, ClientResponse, Directives
from gateway.core.context_budget import ContextOptions, Trim
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.http.gateway_headers import (
    AGENT,
    BUDGET_TOKENS,
    BUDGET_USD,
    CONTEXT_BUDGET,
    CONTEXT_TRIM,
    DIRECTIVES,
    PARENT,
    REQUEST_ID,
    RESPONSE_MODE,
    TAG,
)
from gateway.core.http.headers import Headers, header
from gateway.core.identity import ID_FORM, LONGEST_TAG, is_tag, is_valid
from gateway.core.ledger.arithmetic import MOST_USD, NO_LIMITS, Limits, nano
from gateway.core.ledger.refusals import Allowance
from gateway.core.modes import MODES, ResponseMode, stricter
from gateway.core.record import ContextRecord
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage

#: the session's totals as JSON, and the prefix of all headers with totals
CUMULATIVE_USAGE: Final = b"x-session-cumulative-token-usage"
CUMULATIVE: Final = CUMULATIVE_USAGE.removesuffix(b"token-usage")
USAGE_FINAL: Final = b"x-session-usage-final"
SHOULD_RETRY: Final = b"x-should-retry"
#: the gateway's id of a request; the name `x-request-id` belongs to the provider's own id, which its support asks for
GATEWAY_REQUEST_ID: Final = b"x-gateway-request-id"

#: the gateway's response headers and their descriptions; web pages of allowed origins may read them
RESPONSE_HEADERS: Final[Mapping[str, str]] = {
    "x-gateway-request-id": (
        "key of `GET /api/calls/{request_id}`: the `x-request-id` of the request, or an id that the gateway made"
    ),
    "x-session-id": "the session in use",
    "x-session-cumulative-token-usage": (
        'the session\'s totals as JSON: `{"promptTokens":…,"completionTokens":…,"totalTokens":…}`'
    ),
    "x-session-cumulative-total-tokens": "the session's total tokens as a plain number",
    "x-session-cumulative-input-tokens": "the session's input tokens, including cached tokens",
    "x-session-cumulative-output-tokens": "the session's output tokens, including reasoning tokens",
    "x-session-cumulative-cached-tokens": "the session's input tokens from the provider's cache",
    "x-session-cumulative-cost-usd": (
        "the session's cost in US dollars, with six decimals; absent once a call's price is unknown"
    ),
    "x-session-cumulative-calls": "the session's number of charged calls",
    "x-session-usage-final": (
        "`true`: the totals include this call; `false`: they do not yet, because it is a stream; absent without totals"
    ),
    "x-session-usage-source": "source of the totals: `provider`, `estimated` or `mixed`",
    "x-session-budget-limit-tokens": (
        "limit of the token budget with the least remaining: of session, parent, subagent or client key"
    ),
    "x-session-budget-remaining-tokens": "remaining tokens of that budget, minus what running calls have reserved",
    "x-session-budget-limit-usd": "limit of the US dollar budget with the least remaining",
    "x-session-budget-remaining-usd": "remaining US dollars of that budget, with six decimals",
    "x-session-budget-warning": "the used share of the budget, if it is at least `budget.warn_at`",
    "x-session-closing-call": (
        "`true`: this is the last call that the session's budget allows; it calls no tools (`budget.closing`)"
    ),
    "x-session-budget-model": (
        "the cheaper model that serves the call because little of a budget is left (`budget.downgrade`)"
    ),
    "x-session-unmetered": "`true`: the call is billed after its response, and is not in the totals of any session",
    "x-token-usage": "usage of this call, if it is final, as JSON of the same shape as the totals",
    "x-context-tokens": "input tokens that the provider is expected to report for what was sent",
    "x-context-tokens-original": "the same number for the request that the client sent",
    "x-context-trimmed": (
        "`none`, or the number of messages (items in a Responses request) by what was done with them: "
        "`dedupe=3,condense=12,drop=4`. `table`, `summary`, `handle_only`: tool results in that response mode. "
        "`thinking`: thinking blocks that were removed because the model would refuse them. `unsupported`: the request "
        "was neither counted nor trimmed, as on paths other than chat, responses, messages and completions"
    ),
    "x-context-thinking": (
        "why thinking blocks are not sent. `trim`, `mode`, `tools`: a trim, a response mode or another list of tools "
        "changed what precedes them. `earlier`: they were removed on an earlier call. `refused`: the provider refused "
        "them, and the request was sent again without them"
    ),
    "x-context-shadow": "with `trim: shadow`: what trimming would have done, in the format of `x-context-trimmed`",
    "x-context-conversation-tokens": (
        "tokens of texts, tool calls and thinking in what was sent, without tool results, tool definitions and images"
    ),
    "x-context-tool-tokens": "tokens of tool results in what was sent, each counted once",
    "x-context-budget-tokens": "most input tokens of this call; absent without a limit",
    "x-context-remaining-tokens": "remaining input tokens of that budget after this request and its margin",
    "x-context-unseen": (
        "references to content that only the provider has: `previous_response_id`, `file_id`, `file_url`. "
        "It is billed, but neither trimmed nor counted, except for what the session knows of an earlier response"
    ),
    "x-response-mode": "response mode of tool results: `raw`, `table`, `summary` or `handle_only`",
    "x-session-step": "the active step",
    "x-session-sequence-index": "index of the sequence entry that is due, from 0",
    "x-session-step-warning": "tools in the response that are not due or not allowed",
    "x-session-warning": (
        "signs of a runaway agent, with their numbers: `loop=4,no_progress=9,rounds=250,seconds=3000,step_seconds=600`"
    ),
    "x-gateway-overhead-ms": "milliseconds between reading the whole request and sending it to the provider",
    "x-gateway-token-count": (
        "`estimated`: the token count in the response is the gateway's own, because the provider does not count"
    ),
    "x-gateway-upstream-error": "`true`: the error is the provider's own, passed on unchanged",
    "x-should-retry": (
        "on an error: whether sending the call again can help; `false` also if the gateway has already retried it, "
        "unless `retry-after` asks for a wait"
    ),
}
_TRIMS: Final[Mapping[bytes, Trim]] = {b"off": "off", b"auto": "auto", b"shadow": "shadow"}
#: limited in length, because `int` raises an error for thousands of digits
_BUDGET_FORM: Final = re.compile(rb"0{0,32}[1-9][0-9]{0,14}")
_TOKENS_FORM: Final = re.compile(rb"[0-9]{1,15}")
_USD_FORM: Final = re.compile(rb"[0-9]{1,7}(?:\.[0-9]{1,12})?")
#: not a header of the gateway; it is read and forwarded unchanged
_ANTHROPIC_BETA: Final = b"anthropic-beta"
#: names of all headers that `directives` reads
_DIRECTIVE_NAMES: Final = frozenset({*DIRECTIVES, _ANTHROPIC_BETA})
#: changes that `trim: shadow` does not prevent
_DONE_IN_SHADOW: Final = frozenset({*MODES, "thinking"})
#: most names of tools in a warning
_MOST_TOOL_NAMES: Final = 8
_REQUEST_ID_FORM: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id(headers: Headers) -> str | None:
    """Return the client's request id, or None if it is missing or not 1 to 128 visible ASCII characters."""
    value = header(headers, REQUEST_ID)
    return value.decode() if _REQUEST_ID_FORM.fullmatch(value) else None


def directives(headers: Headers) -> Directives:
    """Read the headers that change how the gateway handles a request.

    Raises:
        InvalidRequest: a header has an invalid value.
    """
    if _DIRECTIVE_NAMES.isdisjoint(dict(headers)):
        return NO_DIRECTIVES
    return Directives(
        _options(headers),
        _declared_budget(headers),
        _response_mode(headers),
        _name(headers, PARENT, "a session id"),
        _name(headers, AGENT, "the name of an agent"),
        _tag(headers),
    )


def _options(headers: Headers) -> ContextOptions:
    """Read the headers about the context of a request.

    Raises:
        InvalidRequest: a header has an invalid value.
    """
    trim: Trim | None = None
    budget: int | None = None
    betas: frozenset[str] = frozenset()
    for name, value in headers:
        if name == CONTEXT_TRIM:
            trim = _TRIMS.get(value.strip().lower())
            if trim is None:
                raise _invalid(CONTEXT_TRIM, "off, auto or shadow")
        elif name == CONTEXT_BUDGET:
            asked = context_budget(value, f"The header {CONTEXT_BUDGET.decode()}", CONTEXT_BUDGET.decode())
            budget = min(asked, budget or MAX_TOKENS)
        elif name == _ANTHROPIC_BETA:
            betas |= {beta.strip() for beta in value.decode("latin-1").split(",")}
    return ContextOptions(trim, budget, betas=betas)


def context_budget(value: bytes, what: str, param: str) -> int:
    """Return the context budget of a request in tokens. `what`: name of the value in an error.

    Raises:
        InvalidRequest: the value is not a whole number from 1.
    """
    if not _BUDGET_FORM.fullmatch(value.strip()):
        raise InvalidRequest(f"{what} must be a number of input tokens, 1 or more.", param=param)
    return int(value)


def _declared_budget(headers: Headers) -> Limits:
    """Return the session budget that a request declares. Of repeated headers, the lowest value is used.

    Raises:
        InvalidRequest: a value is not a number.
    """
    tokens: int | None = None
    nano_usd: int | None = None
    for name, value in headers:
        if name == BUDGET_TOKENS:
            if not _TOKENS_FORM.fullmatch(value.strip()):
                raise _invalid(BUDGET_TOKENS, "a number of tokens")
            tokens = min(int(value), tokens if tokens is not None else MAX_TOKENS)
        elif name == BUDGET_USD:
            if not _USD_FORM.fullmatch(value.strip()):
                raise _invalid(BUDGET_USD, "a number of US dollars, such as 0.50")
            asked = nano(min(Decimal(MOST_USD), Decimal(value.strip().decode())))
            nano_usd = min(asked, nano_usd if nano_usd is not None else asked)
    return NO_LIMITS if tokens is None and nano_usd is None else Limits(tokens, nano_usd)


def _response_mode(headers: Headers) -> ResponseMode:
    """Return the requested response mode. Of repeated headers, the strictest mode is used.

    Raises:
        InvalidRequest: the mode is unknown.
    """
    mode: ResponseMode = "raw"
    for name, value in headers:
        if name == RESPONSE_MODE:
            asked = next((known for known in MODES if known.encode() == value.strip().lower()), None)
            if asked is None:
                raise _invalid(RESPONSE_MODE, f"one of {', '.join(MODES)}")
            mode = stricter(mode, asked)
    return mode


def _name(headers: Headers, wanted: bytes, what: str) -> str | None:
    """Return the name in a header, or None without the header. `what`: kind of the name, for an error.

    Raises:
        InvalidRequest: the name is not valid.
    """
    for name, value in headers:
        if name == wanted:
            text = value.decode("latin-1").strip()
            if not is_valid(text):
                raise _invalid(wanted, f"{what}: {ID_FORM}")
            return text
    return None


def _tag(headers: Headers) -> str | None:
    """Return the tag of a request, or None.

    Raises:
        InvalidRequest: the tag is not valid.
    """
    tag = _name(headers, TAG, "a tag")
    if tag is not None and not is_tag(tag):
        raise _invalid(TAG, f"a tag of at most {LONGEST_TAG} characters, not {len(tag)}")
    return tag


def _invalid(header: bytes, what: str) -> InvalidRequest:
    """Return the error about an invalid header. `what`: what its value must be."""
    return InvalidRequest(f"The header {header.decode()} must be {what}.", param=header.decode())


def usage_json(usage: Usage | Totals) -> bytes:
    """Return token counts as JSON: `{"promptTokens":…,"completionTokens":…,"totalTokens":…}`."""
    return (
        b'{"promptTokens":%d,"completionTokens":%d,"totalTokens":%d}'
        % (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    )  # fmt: skip


def _call_headers(charge: Charge | None, allowance: Allowance | None, stepped: ActiveStep | None) -> Headers:
    """Return the headers of an ended call, without its session's totals."""
    headers: Headers = []
    if charge is not None:
        headers.append((b"x-token-usage", usage_json(charge.usage)))
    if allowance is not None:
        headers += _allowance_headers(allowance)
    if stepped is not None:
        headers += _step_headers(stepped)
    return headers


def response_headers(reply: ClientResponse, request: str) -> Headers:
    """Return the gateway's headers of a response. They follow the provider's headers."""
    headers: Headers = [
        (GATEWAY_REQUEST_ID, request.encode()),
        (b"x-gateway-overhead-ms", b"%.2f" % (reply.request.overhead_s * 1000)),
    ]
    if reply.request.session is not None:
        headers.append((b"x-session-id", reply.request.session.id.encode()))
        if reply.totals is not None:
            headers += _totals_headers(reply.totals)
            headers.append((USAGE_FINAL, b"true" if reply.is_final else b"false"))
    if reply.charge is not None:
        headers.append((b"x-token-usage", usage_json(reply.charge.usage)))
    if reply.request.context is not None:
        headers += _context_headers(reply.request.context)
    headers += _budget_headers(reply)
    headers += _uncounted_headers(reply)
    if reply.request.mode is not None:
        headers.append((b"x-response-mode", reply.request.mode.encode()))
    headers += _agent_headers(reply)
    if reply.upstream_error:
        headers.append((b"x-gateway-upstream-error", b"true"))
    if reply.fault is not None:
        headers += error_headers(reply.fault)
    return headers


def _budget_headers(reply: ClientResponse) -> Headers:
    headers = _allowance_headers(reply.allowance) if reply.allowance is not None else []
    if reply.request.is_closing:
        headers.append((b"x-session-closing-call", b"true"))
    if reply.request.cheaper_model is not None:
        headers.append((b"x-session-budget-model", reply.request.cheaper_model.encode("ascii", "replace")))
    return headers


def _agent_headers(reply: ClientResponse) -> Headers:
    headers = _step_headers(reply.active_step) if reply.active_step is not None else []
    if reply.request.warnings:
        text = ",".join([f"{found.kind}={found.number}" for found in reply.request.warnings])
        headers.append((b"x-session-warning", text.encode()))
    return headers


def _uncounted_headers(reply: ClientResponse) -> Headers:
    headers: Headers = [(b"x-context-trimmed", b"unsupported")] if reply.request.is_uncounted else []
    if reply.request.at_provider:
        headers.append((b"x-context-unseen", ",".join(reply.request.at_provider).encode()))
    if reply.request.is_billed_later:
        headers.append((b"x-session-unmetered", b"true"))
    if reply.request.is_count_estimated:
        headers.append((b"x-gateway-token-count", b"estimated"))
    return headers


def _totals_headers(totals: Totals) -> Headers:
    headers: Headers = [
        (CUMULATIVE_USAGE, usage_json(totals)),
        (b"x-session-cumulative-total-tokens", b"%d" % totals.total_tokens),
        (b"x-session-cumulative-input-tokens", b"%d" % totals.input_tokens),
        (b"x-session-cumulative-output-tokens", b"%d" % totals.output_tokens),
        (b"x-session-cumulative-cached-tokens", b"%d" % totals.cache_read_tokens),
        (b"x-session-cumulative-calls", b"%d" % totals.calls),
        (b"x-session-usage-source", totals.source.encode()),
    ]
    if not totals.unpriced_calls:
        headers.append((b"x-session-cumulative-cost-usd", f"{totals.cost_usd:.6f}".encode()))
    return headers


def _context_headers(context: ContextRecord) -> Headers:
    # With `trim: shadow`, trimming is only decided. Response modes and removed thinking still apply.
    sent = trimmed = _rules_text(context.trimmed)
    if context.shadow:
        sent = _rules_text({rule: number for rule, number in context.trimmed.items() if rule in _DONE_IN_SHADOW})
    headers: Headers = [
        (b"x-context-tokens", b"%d" % context.tokens),
        (b"x-context-tokens-original", b"%d" % context.original_tokens),
        (b"x-context-trimmed", sent),
        (b"x-context-conversation-tokens", b"%d" % context.conversation_tokens),
        (b"x-context-tool-tokens", b"%d" % context.tool_tokens),
    ]
    if context.budget is not None:
        headers.append((b"x-context-budget-tokens", b"%d" % context.budget))
        headers.append((b"x-context-remaining-tokens", b"%d" % (context.remaining or 0)))
    if context.thinking is not None and context.thinking.reason:
        headers.append((b"x-context-thinking", context.thinking.reason.encode()))
    if context.shadow:
        headers.append((b"x-context-shadow", trimmed))
    return headers


def _rules_text(numbers: Mapping[str, int]) -> bytes:
    return ",".join([f"{rule}={number}" for rule, number in numbers.items()]).encode() or b"none"


def _allowance_headers(allowance: Allowance) -> Headers:
    headers: Headers = []
    if allowance.limit_tokens is not None:
        headers.append((b"x-session-budget-limit-tokens", b"%d" % allowance.limit_tokens))
        headers.append((b"x-session-budget-remaining-tokens", b"%d" % (allowance.remaining_tokens or 0)))
    if allowance.limit_usd is not None:
        headers.append((b"x-session-budget-limit-usd", allowance.limit_usd.encode()))
        headers.append((b"x-session-budget-remaining-usd", (allowance.remaining_usd or "0").encode()))
    if allowance.warning is not None:
        headers.append((b"x-session-budget-warning", f"{allowance.warning:.4f}".encode()))
    return headers


def _step_headers(stepped: ActiveStep) -> Headers:
    """Return the active step and its sequence index, and a warning about stray calls."""
    headers: Headers = []
    step = stepped.step
    if step is not None:
        headers.append((b"x-session-step", step.name.encode()))
        if (place := stepped.agent.finished_entries(stepped.state)) is not None:
            headers.append((b"x-session-sequence-index", b"%d" % place))
    if stepped.stray:
        # The model can choose any name, so it may contain other characters than ASCII.
        names = ", ".join(stepped.stray[:_MOST_TOOL_NAMES]).encode("ascii", "replace")
        headers.append((b"x-session-step-warning", b"not due or not allowed: " + names))
    return headers


def error_headers(fault: GatewayError) -> Headers:
    """Return the headers about retries: whether a client should retry, and when."""
    headers: Headers = [(SHOULD_RETRY, b"true" if fault.retry else b"false")]
    if fault.retry_after is not None:
        headers.append((b"retry-after", b"%d" % fault.retry_after))
    return headers


def totals_comment(
    totals: Totals, charge: Charge | None, allowance: Allowance | None, stepped: ActiveStep | None = None
) -> bytes:
    """Return the last comment of a stream, as SSE comment lines with the headers of the settled call.

    The totals as JSON are the last line, where a person who reads the stream looks first.
    """
    usage, *numbers = _totals_headers(totals)
    headers = [*numbers, *_call_headers(charge, allowance, stepped), usage]
    return b"\n".join([b": %b: %b" % pair for pair in headers]) + b"\n\n"
