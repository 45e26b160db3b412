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
)
from gateway.core.http.headers import Headers, header
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.ledger.arithmetic import MOST_USD, NO_LIMITS, Limits, nano
from gateway.core.ledger.refusals import Allowance
from gateway.core.modes import MODES, ResponseMode, stricter
from gateway.core.record import ContextRecord
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage

#: a session's totals in one, and how the names of all those begin that tell of them
CUMULATIVE_USAGE: Final = b"x-session-cumulative-token-usage"
CUMULATIVE: Final = CUMULATIVE_USAGE.removesuffix(b"token-usage")
USAGE_FINAL: Final = b"x-session-usage-final"
SHOULD_RETRY: Final = b"x-should-retry"
#: the gateway's id of a request; the name `x-request-id` belongs to the provider's own id, which its support asks for
GATEWAY_REQUEST_ID: Final = b"x-gateway-request-id"

#: the response headers of the gateway and what they say; a web page of an allowed origin may read them
EXPOSED: Final[Mapping[str, str]] = {
    "x-gateway-request-id": (
        "key of `GET /api/calls/{request_id}`: the `x-request-id` of the request, or an id that the gateway made"
    ),
    "x-session-id": "the session in use",
    "x-session-cumulative-token-usage": (
        'the session\'s totals as JSON: `{"promptTokens":…,"completionTokens":…,"totalTokens":…}`'
    ),
    "x-session-cumulative-total-tokens": "the session's total as a plain number",
    "x-session-cumulative-input-tokens": "its input tokens, cached ones included",
    "x-session-cumulative-output-tokens": "its output tokens, reasoning included",
    "x-session-cumulative-cached-tokens": "its input tokens that the provider served from its cache",
    "x-session-cumulative-cost-usd": "what it cost, with six decimals; absent once a call's price is unknown",
    "x-session-cumulative-calls": "the number of its charged calls",
    "x-session-usage-final": (
        "`true`: the totals include this call; `false`: not yet, because it is a stream; absent without totals"
    ),
    "x-session-usage-source": "source of the totals: `provider`, `estimated` or `mixed`",
    "x-session-budget-limit-tokens": (
        "limit of the token budget with the least left: the session's, a parent's or the key's"
    ),
    "x-session-budget-remaining-tokens": "remaining budget, minus what running calls have reserved",
    "x-session-budget-limit-usd": "the same with a budget in US dollars",
    "x-session-budget-remaining-usd": "remaining budget in US dollars, with six decimals",
    "x-session-budget-warning": "the used share of the budget, from `budget.warn_at` on",
    "x-session-unmetered": "`true`: the call is billed after its response, and is not in the totals of any session",
    "x-token-usage": "usage of this call, if it is final, as JSON of the same shape as the totals",
    "x-context-tokens": "input tokens that the provider is expected to report for what was sent",
    "x-context-tokens-original": "the same for what the client sent",
    "x-context-trimmed": (
        "`none`, or the number of messages (items in a Responses request) by what was done with them: "
        "`dedupe=3,condense=12,drop=4`. `table`, `summary`, `handle_only`: tool results in that response mode. "
        "`thinking`: thinking blocks that were removed because the model would refuse them. `unsupported`: the request "
        "was neither counted nor trimmed, as on paths other than chat, responses, messages and completions"
    ),
    "x-context-thinking": (
        "why thinking blocks are not sent: a `trim`, a `mode` or `tools` changed what was before them; `earlier`: "
        "removed on earlier calls; `refused` by the provider, and the request was repaired"
    ),
    "x-context-shadow": "with `trim: shadow`: what would have been done",
    "x-context-conversation-tokens": (
        "tokens of texts, tool calls and thinking in what was sent; without tool results, tool definitions and images"
    ),
    "x-context-tool-tokens": "tokens of tool results in what was sent, each counted once",
    "x-context-budget-tokens": "input tokens that this call may have; absent without a limit",
    "x-context-remaining-tokens": "what remains of that budget after this request and its margin: room for results",
    "x-context-unseen": (
        "references to content that only the provider has: `previous_response_id`, `file_id`, `file_url`. "
        "It is billed, but neither trimmed nor counted, except for what the session knows of an earlier response"
    ),
    "x-response-mode": "the mode in force for tool results: `raw`, `table`, `summary` or `handle_only`",
    "x-session-step": "the step that is active",
    "x-session-sequence-index": "index of the entry of its sequence that is due, from 0",
    "x-session-step-warning": "tools that the response calls although they are not due or not allowed",
    "x-gateway-overhead-ms": "milliseconds between reading the whole request and sending it to the provider",
    "x-gateway-upstream-error": "`true`: the error is the provider's own, passed on unchanged",
    "x-should-retry": (
        "on an error: whether sending the call again can help; `false` also if the gateway has already retried it, "
        "unless `retry-after` asks for a wait"
    ),
}
_TRIMS: Final[Mapping[bytes, Trim]] = {b"off": "off", b"auto": "auto", b"shadow": "shadow"}
#: bounded, as `int` refuses thousands of digits
_BUDGET_FORM: Final = re.compile(rb"0{0,32}[1-9][0-9]{0,14}")
_TOKENS_FORM: Final = re.compile(rb"[0-9]{1,15}")
_USD_FORM: Final = re.compile(rb"[0-9]{1,7}(?:\.[0-9]{1,12})?")
#: not ours, and forwarded as it comes
_BETAS: Final = b"anthropic-beta"
#: what `directives` looks at
_HEEDED: Final = frozenset({*DIRECTIVES, _BETAS})
#: what is done to a request also where trimming is only decided
_ALWAYS_DONE: Final = frozenset({*MODES, "thinking"})
#: names of tools in a warning
_STRAYS: Final = 8
_REQUEST_ID_FORM: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id(headers: Headers) -> str | None:
    """The caller's own request id, if it can be echoed and kept: 1-128 visible ASCII characters."""
    value = header(headers, REQUEST_ID)
    return value.decode() if _REQUEST_ID_FORM.fullmatch(value) else None


def directives(headers: Headers) -> Directives:
    """What a request's headers ask of the gateway.

    Raises:
        InvalidRequest: one of them says nothing that is known.
    """
    if _HEEDED.isdisjoint(dict(headers)):
        return NO_DIRECTIVES
    return Directives(
        _options(headers),
        _declared(headers),
        _response_mode(headers),
        _name(headers, PARENT, "a session id"),
        _name(headers, AGENT, "the name of an agent"),
    )


def _options(headers: Headers) -> ContextOptions:
    """What a request's headers ask of its context.

    Raises:
        InvalidRequest: one of them says nothing that is known.
    """
    trim: Trim | None = None
    budget: int | None = None
    betas: frozenset[str] = frozenset()
    for name, value in headers:
        if name == CONTEXT_TRIM:
            trim = _TRIMS.get(value.strip().lower())
            if trim is None:
                raise _wrong(CONTEXT_TRIM, "off, auto or shadow")
        elif name == CONTEXT_BUDGET:
            asked = context_budget(value, f"The header {CONTEXT_BUDGET.decode()}", CONTEXT_BUDGET.decode())
            budget = min(asked, budget or MAX_TOKENS)
        elif name == _BETAS:
            betas |= {beta.strip() for beta in value.decode("latin-1").split(",")}
    return ContextOptions(trim, budget, betas=betas)


def context_budget(value: bytes, what: str, param: str) -> int:
    """The tokens that a request asks its context to fit into; `what`: how a complaint names the value.

    Raises:
        InvalidRequest: it is no such number.
    """
    if not _BUDGET_FORM.fullmatch(value.strip()):
        raise InvalidRequest(f"{what} is a number of input tokens, 1 or more.", param=param)
    return int(value)


def _declared(headers: Headers) -> Limits:
    """The session budget that a request declares; the least where it does so twice.

    Raises:
        InvalidRequest: it is no number.
    """
    tokens: int | None = None
    nano_usd: int | None = None
    for name, value in headers:
        if name == BUDGET_TOKENS:
            if not _TOKENS_FORM.fullmatch(value.strip()):
                raise _wrong(BUDGET_TOKENS, "a number of tokens")
            tokens = min(int(value), tokens if tokens is not None else MAX_TOKENS)
        elif name == BUDGET_USD:
            if not _USD_FORM.fullmatch(value.strip()):
                raise _wrong(BUDGET_USD, "a number of US dollars, such as 0.50")
            asked = nano(min(Decimal(MOST_USD), Decimal(value.strip().decode())))
            nano_usd = min(asked, nano_usd if nano_usd is not None else asked)
    return NO_LIMITS if tokens is None and nano_usd is None else Limits(tokens, nano_usd)


def _response_mode(headers: Headers) -> ResponseMode:
    """How a request asks for its tool results to be shown; the strictest where it says so twice.

    Raises:
        InvalidRequest: it is none of the modes.
    """
    mode: ResponseMode = "raw"
    for name, value in headers:
        if name == RESPONSE_MODE:
            asked = next((one for one in MODES if one.encode() == value.strip().lower()), None)
            if asked is None:
                raise _wrong(RESPONSE_MODE, f"one of {', '.join(MODES)}")
            mode = stricter(mode, asked)
    return mode


def _name(headers: Headers, wanted: bytes, what: str) -> str | None:
    """The name that a header gives; None where it is not there. `what`: what kind of name that is, for a complaint.

    Raises:
        InvalidRequest: it is no name.
    """
    for name, value in headers:
        if name == wanted:
            text = value.decode("latin-1").strip()
            if not is_valid(text):
                raise _wrong(wanted, f"{what}: {ID_FORM}")
            return text
    return None


def _wrong(header: bytes, what: str) -> InvalidRequest:
    """What is said of a header that cannot be read; `what`: what it has to be."""
    return InvalidRequest(f"The header {header.decode()} is {what}.", param=header.decode())


def usage_json(usage: Usage | Totals) -> bytes:
    """`{"promptTokens":…,"completionTokens":…,"totalTokens":…}`."""
    return (
        b'{"promptTokens":%d,"completionTokens":%d,"totalTokens":%d}'
        % (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    )  # fmt: skip


def _of_call(charge: Charge | None, allowance: Allowance | None, stepped: ActiveStep | None) -> Headers:
    """What is known of a call once it has ended, beside its session's totals."""
    headers: Headers = []
    if charge is not None:
        headers.append((b"x-token-usage", usage_json(charge.usage)))
    if allowance is not None:
        headers += _of_allowance(allowance)
    if stepped is not None:
        headers += _of_steps(stepped)
    return headers


def of_reply(reply: ClientResponse, request: str) -> Headers:
    """Our headers on a reply, after the provider's."""
    headers: Headers = [
        (GATEWAY_REQUEST_ID, request.encode()),
        (b"x-gateway-overhead-ms", b"%.2f" % (reply.overhead_s * 1000)),
    ]
    if reply.session is not None:
        headers.append((b"x-session-id", reply.session.id.encode()))
        if reply.totals is not None:
            headers += _of_totals(reply.totals)
            headers.append((USAGE_FINAL, b"true" if reply.final else b"false"))
    if reply.charge is not None:
        headers.append((b"x-token-usage", usage_json(reply.charge.usage)))
    if reply.context is not None:
        headers += _of_context(reply.context)
    if reply.allowance is not None:
        headers += _of_allowance(reply.allowance)
    headers += _of_what_is_not_counted(reply)
    if reply.mode is not None:
        headers.append((b"x-response-mode", reply.mode.encode()))
    if reply.stepped is not None:
        headers += _of_steps(reply.stepped)
    if reply.upstream_error:
        headers.append((b"x-gateway-upstream-error", b"true"))
    if reply.fault is not None:
        headers += of_fault(reply.fault)
    return headers


def _of_what_is_not_counted(reply: ClientResponse) -> Headers:
    headers: Headers = [(b"x-context-trimmed", b"unsupported")] if reply.is_unfitted else []
    if reply.unseen:
        headers.append((b"x-context-unseen", ",".join(reply.unseen).encode()))
    if reply.is_unmetered:
        headers.append((b"x-session-unmetered", b"true"))
    return headers


def _of_totals(totals: Totals) -> Headers:
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


def _of_context(context: ContextRecord) -> Headers:
    # With `trim: shadow` the rules of trimming are only decided. Modes and removed thinking are sent as they are.
    done = {rule: number for rule, number in context.trimmed.items() if not context.shadow or rule in _ALWAYS_DONE}
    trimmed, sent = _rules(context.trimmed), _rules(done)
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


def _rules(numbers: Mapping[str, int]) -> bytes:
    return ",".join([f"{rule}={number}" for rule, number in numbers.items()]).encode() or b"none"


def _of_allowance(allowance: Allowance) -> Headers:
    headers: Headers = []
    if allowance.limit_tokens is not None:
        headers.append((b"x-session-budget-limit-tokens", b"%d" % allowance.limit_tokens))
        headers.append((b"x-session-budget-remaining-tokens", b"%d" % (allowance.left_tokens or 0)))
    if allowance.limit_usd is not None:
        headers.append((b"x-session-budget-limit-usd", allowance.limit_usd.encode()))
        headers.append((b"x-session-budget-remaining-usd", (allowance.left_usd or "0").encode()))
    if allowance.warning is not None:
        headers.append((b"x-session-budget-warning", f"{allowance.warning:.4f}".encode()))
    return headers


def _of_steps(stepped: ActiveStep) -> Headers:
    """The step, and the place in its sequence that is due; nothing where no step is active."""
    headers: Headers = []
    step = stepped.step
    if step is not None:
        headers.append((b"x-session-step", step.name.encode()))
        if (place := stepped.agent.place(stepped.state)) is not None:
            headers.append((b"x-session-sequence-index", b"%d" % place))
    if stepped.stray:
        # A tool's name is the model's to choose.
        names = ", ".join(stepped.stray[:_STRAYS]).encode("ascii", "replace")
        headers.append((b"x-session-step-warning", b"not due or not allowed: " + names))
    return headers


def of_fault(fault: GatewayError) -> Headers:
    """What tells a client whether to send the call again."""
    headers: Headers = [(SHOULD_RETRY, b"true" if fault.retry else b"false")]
    if fault.retry_after is not None:
        headers.append((b"retry-after", b"%d" % fault.retry_after))
    return headers


def totals_comment(
    totals: Totals, charge: Charge | None, allowance: Allowance | None, stepped: ActiveStep | None = None
) -> bytes:
    """The last comment of a stream, as SSE comment lines: what a finished answer says in its headers.

    The totals as JSON are its last line, where who reads a stream by eye looks first.
    """
    usage, *numbers = _of_totals(totals)
    found = [*numbers, *_of_call(charge, allowance, stepped), usage]
    return b"\n".join([b": %b: %b" % pair for pair in found]) + b"\n\n"
