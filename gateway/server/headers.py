"""Every header we read or write, and the JSON shapes that stand in them. No other file spells these names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from gateway.calls import NO_DIRECTIVES, Directives, Reply
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.identity import is_valid
from gateway.core.ledger import NO_LIMITS, Limits, nano
from gateway.core.modes import MODES, ResponseMode, stricter
from gateway.core.plan import Trim, Wishes
from gateway.core.ports import ContextRecord, Headers
from gateway.core.spending import Allowance
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage

REQUEST_ID: Final = b"x-request-id"
#: every header of ours on an answer; what a web page of an allowed origin may read
EXPOSED: Final = (
    "x-request-id",
    "x-session-id",
    "x-session-cumulative-token-usage",
    "x-session-cumulative-total-tokens",
    "x-session-cumulative-input-tokens",
    "x-session-cumulative-output-tokens",
    "x-session-cumulative-cached-tokens",
    "x-session-cumulative-cost-usd",
    "x-session-cumulative-calls",
    "x-session-usage-final",
    "x-session-usage-source",
    "x-session-budget-limit-tokens",
    "x-session-budget-remaining-tokens",
    "x-session-budget-limit-usd",
    "x-session-budget-remaining-usd",
    "x-session-budget-warning",
    "x-token-usage",
    "x-context-tokens",
    "x-context-tokens-original",
    "x-context-trimmed",
    "x-context-shadow",
    "x-context-conversation-tokens",
    "x-context-tool-tokens",
    "x-response-mode",
    "x-gateway-overhead-ms",
    "x-gateway-upstream-error",
    "x-should-retry",
)
_TRIMS: Final[Mapping[bytes, Trim]] = {b"off": "off", b"auto": "auto", b"shadow": "shadow"}
_BUDGET_FORM: Final = re.compile(rb"0*[1-9][0-9]{0,14}")
#: what a request may ask with
DIRECTIVES: Final = frozenset(
    {
        b"x-context-trim", b"x-context-budget", b"x-session-budget-tokens", b"x-session-budget-usd",
        b"x-response-mode", b"x-parent-session-id",
    }
)  # fmt: skip
_TOKENS_FORM: Final = re.compile(rb"[0-9]{1,15}")
_USD_FORM: Final = re.compile(rb"[0-9]{1,7}(?:\.[0-9]{1,12})?")
_NO_WISHES: Final = Wishes()
_REQUEST_ID_FORM: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id(headers: Headers) -> str | None:
    """The caller's own request id, if it can be echoed and kept: 1-128 visible ASCII characters."""
    for name, value in headers:
        if name == REQUEST_ID:
            return value.decode() if _REQUEST_ID_FORM.fullmatch(value) else None
    return None


def directives(headers: Headers) -> Directives:
    """What a request's headers ask of the gateway.

    Raises:
        InvalidRequest: one of them says nothing that is known.
    """
    if not any(name in DIRECTIVES for name, _ in headers):
        return NO_DIRECTIVES
    return Directives(_wishes(headers), _declared(headers), _response_mode(headers), _parent(headers))


def _wishes(headers: Headers) -> Wishes:
    """What a request's headers ask of its context.

    Raises:
        InvalidRequest: one of them says nothing that is known.
    """
    trim: Trim | None = None
    budget: int | None = None
    for name, value in headers:
        if name == b"x-context-trim":
            trim = _TRIMS.get(value.strip().lower())
            if trim is None:
                raise InvalidRequest("The header x-context-trim is off, auto or shadow.", param="x-context-trim")
        elif name == b"x-context-budget":
            if not _BUDGET_FORM.fullmatch(value.strip()):
                raise InvalidRequest(
                    "The header x-context-budget is a number of input tokens, 1 or more.", param="x-context-budget"
                )
            budget = min(int(value), budget or MAX_TOKENS)
    return _NO_WISHES if trim is None and budget is None else Wishes(trim, budget)


def _declared(headers: Headers) -> Limits:
    """The session budget that a request declares; the least where it does so twice.

    Raises:
        InvalidRequest: it is no number.
    """
    tokens: int | None = None
    nano_usd: int | None = None
    for name, value in headers:
        if name == b"x-session-budget-tokens":
            if not _TOKENS_FORM.fullmatch(value.strip()):
                raise InvalidRequest(
                    "The header x-session-budget-tokens is a number of tokens.", param="x-session-budget-tokens"
                )
            tokens = min(int(value), tokens if tokens is not None else MAX_TOKENS)
        elif name == b"x-session-budget-usd":
            if not _USD_FORM.fullmatch(value.strip()):
                raise InvalidRequest(
                    "The header x-session-budget-usd is a number of US dollars, such as 0.50.",
                    param="x-session-budget-usd",
                )
            asked = nano(Decimal(value.strip().decode()))
            nano_usd = min(asked, nano_usd if nano_usd is not None else asked)
    return NO_LIMITS if tokens is None and nano_usd is None else Limits(tokens, nano_usd)


def _response_mode(headers: Headers) -> ResponseMode:
    """How a request asks for its tool results to be shown; the strictest where it says so twice.

    Raises:
        InvalidRequest: it is none of the modes.
    """
    mode: ResponseMode = "raw"
    for name, value in headers:
        if name == b"x-response-mode":
            asked = next((one for one in MODES if one.encode() == value.strip().lower()), None)
            if asked is None:
                raise InvalidRequest(
                    f"The header x-response-mode is one of {', '.join(MODES)}.", param="x-response-mode"
                )
            mode = stricter(mode, asked)
    return mode


def _parent(headers: Headers) -> str | None:
    """The session that a request says its own one works for.

    Raises:
        InvalidRequest: it is no session id.
    """
    for name, value in headers:
        if name == b"x-parent-session-id":
            text = value.decode("latin-1").strip()
            if not is_valid(text):
                raise InvalidRequest(
                    "The header x-parent-session-id is a session id: 1-255 characters of A-Z a-z 0-9 . _ : -",
                    param="x-parent-session-id",
                )
            return text
    return None


def usage_json(usage: Usage | Totals) -> bytes:
    """`{"promptTokens":…,"completionTokens":…,"totalTokens":…}`."""
    return (
        b'{"promptTokens":%d,"completionTokens":%d,"totalTokens":%d}'
        % (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    )  # fmt: skip


def of_reply(reply: Reply, request: str) -> Headers:
    """Our headers on a reply, after the provider's."""
    headers: Headers = [
        (REQUEST_ID, request.encode()),
        (b"x-gateway-overhead-ms", b"%.2f" % (reply.overhead_s * 1000)),
    ]
    if reply.session is not None:
        headers.append((b"x-session-id", reply.session.id.encode()))
        if reply.totals is not None:
            headers += _of_totals(reply.totals)
        headers.append((b"x-session-usage-final", b"true" if reply.final else b"false"))
    if reply.final and reply.charge is not None:
        headers.append((b"x-token-usage", usage_json(reply.charge.usage)))
    if reply.context is not None:
        headers += _of_context(reply.context)
    if reply.allowance is not None:
        headers += _of_allowance(reply.allowance)
    if reply.mode is not None:
        headers.append((b"x-response-mode", reply.mode.encode()))
    if reply.upstream_error:
        headers.append((b"x-gateway-upstream-error", b"true"))
    if reply.fault is not None:
        headers += of_fault(reply.fault)
    return headers


def _of_totals(totals: Totals) -> Headers:
    headers: Headers = [
        (b"x-session-cumulative-token-usage", usage_json(totals)),
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
    trimmed = ",".join(f"{rule}={number}" for rule, number in context.trimmed.items()).encode() or b"none"
    headers: Headers = [
        (b"x-context-tokens", b"%d" % context.tokens),
        (b"x-context-tokens-original", b"%d" % context.original_tokens),
        (b"x-context-trimmed", b"none" if context.shadow else trimmed),
        (b"x-context-conversation-tokens", b"%d" % context.conversation_tokens),
        (b"x-context-tool-tokens", b"%d" % context.tool_tokens),
    ]
    if context.shadow:
        headers.append((b"x-context-shadow", trimmed))
    return headers


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


def of_fault(fault: GatewayError) -> Headers:
    """What tells a client whether to send the call again."""
    headers: Headers = [(b"x-should-retry", b"true" if fault.retry else b"false")]
    if fault.retry_after is not None:
        headers.append((b"retry-after", b"%d" % fault.retry_after))
    return headers


def totals_comment(totals: Totals, charge: Charge | None, allowance: Allowance | None) -> bytes:
    """The last comment of a stream: the headers a finished answer would carry, as SSE comment lines."""
    lines = [b": x-session-usage-source: " + totals.source.encode()]
    if charge is not None:
        lines.append(b": x-token-usage: " + usage_json(charge.usage))
    if allowance is not None:
        lines += [b": %b: %b" % pair for pair in _of_allowance(allowance)]
    lines.append(b": x-session-cumulative-token-usage: " + usage_json(totals))
    return b"\n".join(lines) + b"\n\n"
