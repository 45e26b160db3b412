"""Read recorded calls from a store, from the API or from the JSON log.

A line is one record from `GET /api/calls/{id}`, a page of records (`{"calls": […]}`), or a line of the log. The log has
neither cached tokens nor the cost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Final

import msgspec

from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey
from gateway.core.ports import Sessions, Store
from gateway.core.record import CallRecord
from gateway.core.usage import MAX_TOKENS, Charge, Usage, UsageSource
from gateway.core.values import dataclass

#: sessions, or records of a session, that are read at once
_PAGE: Final = 1000
#: fields that a request has and a record has not
_REQUEST: Final = ("messages", "input", "prompt", "body", "request")

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """A recorded call.

    Attributes:
        at: Unix time in seconds.
        charge: the charge of its session; None: none.
        original: input tokens of the request as received; None if they were not counted.
        sent: input tokens of the request as sent; None if they were not counted.
        accounts: all accounts that it was charged to; empty if the record does not have them.
        has_details: the record contains cached tokens and cost.
    """

    call_id: str
    request_id: str
    session: SessionKey | None
    at: float
    provider: str
    model: str
    stream: bool
    charge: Charge | None
    original: int | None
    sent: int | None
    accounts: tuple[AccountKey, ...] = ()
    has_details: bool = True


def replayed_call(record: CallRecord) -> ReplayedCall:
    """Convert a record of a store."""
    context = record.context
    return ReplayedCall(
        call_id=record.call_id,
        request_id=record.request_id,
        session=record.session,
        at=record.started_at,
        provider=record.provider,
        model=record.model,
        stream=record.stream,
        charge=record.charge,
        original=context.original_tokens if context is not None else None,
        sent=context.original_tokens - context.saved_tokens if context is not None else None,
        accounts=record.accounts,
    )


async def read_store(store: Store, sessions: Sequence[SessionKey] | None) -> AsyncIterator[ReplayedCall]:
    """Yield the records of these sessions, or of all.

    Raises:
        StoreUnavailable: the store cannot be read.
    """
    keys = sessions if sessions is not None else [key async for key in _sessions(store)]
    for key in keys:
        before: str | None = None
        while page := await store.calls(key, _PAGE, before):
            for record in page:
                yield replayed_call(record)
            before = page[-1].call_id


async def _sessions(store: Sessions) -> AsyncIterator[SessionKey]:
    cursor: str | None = None
    while True:
        page = await store.sessions(None, _PAGE, cursor, "recent")
        for view in page.sessions:
            yield view.key
        cursor = page.cursor
        if cursor is None:
            return


def values_in(lines: Iterable[bytes], complain: Callable[[int, str], None]) -> Iterator[tuple[int, Any]]:
    """Yield line number and JSON value of each line that is not empty. `complain` receives invalid lines."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            complain(number, f"is not JSON: {error.msg} (column {error.colno})")
        except ValueError as error:
            complain(number, f"is not JSON: {error}")
        except RecursionError:
            complain(number, "is nested too deeply")
        else:
            yield number, value


def read_records(lines: Iterable[bytes], complain: Callable[[int, str], None]) -> Iterator[ReplayedCall]:
    """Yield the records in these lines. Lines without one are skipped and passed to `complain`."""
    for number, value in values_in(lines, complain):
        try:
            yield from _records_in(value)
        except ValueError as error:
            complain(number, str(error))


def _records_in(value: Any) -> list[ReplayedCall]:
    """Return the records in the value of a line.

    Raises:
        ValueError: the value has none.
    """
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004  # an invalid line of text
    if isinstance(value.get("calls"), list):
        return [_shown(call) for call in value["calls"]]
    if "event" in value:
        return [_logged(value)] if value["event"] == "call" else []
    if "call_id" not in value and any(name in value for name in _REQUEST):
        raise ValueError("is a request, not a record of a call: leave out --records")
    return [_shown(value)]


def is_record(value: Any) -> bool:
    """Return whether a value is a record or a page of records."""
    return isinstance(value, dict) and ("call_id" in value or isinstance(value.get("calls"), list))


class _Usage(msgspec.Struct):
    """The field `usage` of a call in the API."""

    input_tokens: _Tokens
    output_tokens: _Tokens
    total_tokens: _Tokens
    cache_read_tokens: _Tokens = 0
    cache_write_tokens: _Tokens = 0
    reasoning_tokens: _Tokens = 0


class _Context(msgspec.Struct):
    """The field `context` of a call in the API."""

    tokens: _Tokens
    original_tokens: _Tokens
    shadow: bool = False


class _Shown(msgspec.Struct):
    """A call in the API."""

    call_id: str
    request_id: str
    session: str | None
    started_at: datetime
    provider: str
    model: str
    stream: bool
    usage: _Usage | None = None
    usage_source: UsageSource | None = None
    cost_usd: Decimal | None = None
    context: _Context | None = None


class _Logged(msgspec.Struct):
    """A call in the log."""

    call_id: str
    request_id: str
    namespace: str | None
    session: str | None
    time: float
    provider: str
    model: str
    stream: bool
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    usage_source: UsageSource | None = None
    context_tokens: _Tokens | None = None
    context_tokens_original: _Tokens | None = None


def _shown(value: Any) -> ReplayedCall:
    call = msgspec.convert(value, _Shown)
    usage, context = call.usage, call.context
    charge = None
    if usage is not None:
        counted = Usage(
            usage.input_tokens,
            usage.output_tokens,
            usage.total_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )
        charge = Charge(counted, call.usage_source or "provider", call.cost_usd)
    sent = None
    if context is not None:
        sent = context.original_tokens if context.shadow else context.tokens
    return ReplayedCall(
        call_id=call.call_id,
        request_id=call.request_id,
        session=_session(call.session) if call.session is not None else None,
        at=call.started_at.timestamp(),
        provider=call.provider,
        model=call.model,
        stream=call.stream,
        charge=charge,
        original=context.original_tokens if context is not None else None,
        sent=sent,
    )


def _logged(value: Any) -> ReplayedCall:
    call = msgspec.convert(value, _Logged)
    charge = None
    if call.input_tokens is not None and call.output_tokens is not None:
        charge = Charge(Usage.of(call.input_tokens, call.output_tokens), call.usage_source or "provider")
    return ReplayedCall(
        call_id=call.call_id,
        request_id=call.request_id,
        session=SessionKey(call.namespace or OPEN_NAMESPACE, call.session) if call.session is not None else None,
        at=call.time,
        provider=call.provider,
        model=call.model,
        stream=call.stream,
        charge=charge,
        original=call.context_tokens_original,
        sent=call.context_tokens,
        has_details=False,
    )


def _session(text: str) -> SessionKey:
    """Parse the name of a session as shown to the admin: `ID` or `KEY/ID`.

    Raises:
        ValueError: the text cannot be the name of a session.
    """
    key = SessionKey.parse(text)
    if key is None:
        raise ValueError("has an impossible session name")
    return key
