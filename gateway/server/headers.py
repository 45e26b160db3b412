"""Every header we read or write, and the JSON shapes that stand in them. No other file spells these names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.plan import Trim, Wishes
from gateway.core.ports import ContextRecord, Headers
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage
from gateway.pipeline import Reply

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
    "x-token-usage",
    "x-context-tokens",
    "x-context-tokens-original",
    "x-context-trimmed",
    "x-context-shadow",
    "x-context-conversation-tokens",
    "x-context-tool-tokens",
    "x-gateway-overhead-ms",
    "x-gateway-upstream-error",
    "x-should-retry",
)
_TRIMS: Final[Mapping[bytes, Trim]] = {b"off": "off", b"auto": "auto", b"shadow": "shadow"}
_BUDGET_FORM: Final = re.compile(rb"0*[1-9][0-9]{0,14}")
_NO_WISHES: Final = Wishes()
_REQUEST_ID_FORM: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id(headers: Headers) -> str | None:
    """The caller's own request id, if it can be echoed and kept: 1-128 visible ASCII characters."""
    for name, value in headers:
        if name == REQUEST_ID:
            return value.decode() if _REQUEST_ID_FORM.fullmatch(value) else None
    return None


def wishes(headers: Headers) -> Wishes:
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


def of_fault(fault: GatewayError) -> Headers:
    """What tells a client whether to send the call again."""
    headers: Headers = [(b"x-should-retry", b"true" if fault.retry else b"false")]
    if fault.retry_after is not None:
        headers.append((b"retry-after", b"%d" % fault.retry_after))
    return headers


def totals_comment(totals: Totals, charge: Charge | None) -> bytes:
    """The last comment of a stream: the headers a finished answer would carry, as SSE comment lines."""
    lines = [b": x-session-usage-source: " + totals.source.encode()]
    if charge is not None:
        lines.append(b": x-token-usage: " + usage_json(charge.usage))
    lines.append(b": x-session-cumulative-token-usage: " + usage_json(totals))
    return b"\n".join(lines) + b"\n\n"
