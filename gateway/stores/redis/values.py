"""Encode claims, accounts, totals and states for the Lua scripts, and decode their replies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from gateway.core.agent_use import MAX_AGENT_TOOLS, MAX_SUBAGENTS, AgentUse, subagent_of
from gateway.core.ledger import arithmetic as ledger
from gateway.core.ledger.arithmetic import (
    DIMENSIONS,
    MOST,
    Account,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Dimension,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
)
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.windows import CalendarWindow
from gateway.core.record import CallRecord
from gateway.core.retention import Retention
from gateway.core.rollup import COUNTS, PERIOD_S, UsageRow, number_of, row_names
from gateway.core.session import MAX_KEPT
from gateway.core.stored import OpenHold, SessionView
from gateway.core.tools import MAX_NAMES, MAX_RECENT, OTHERS, ToolUse
from gateway.core.usage import MAX_TOKENS, Totals
from gateway.core.values import dataclass
from gateway.stores import holds
from gateway.stores.redis.keys import Keys
from gateway.stores.rollups import added_by
from gateway.stores.sums import SUMS, sums_of, totals_of

_MICRO: Final = 1_000_000
#: no limit, or no window
_NONE: Final = -1
#: status of settle.lua: nothing was written, as the state was changed by another worker
_CHANGED: Final = 2
#: fields of a session: those of `SessionView`, then the totals
VIEW: Final = ("derived", "created", "last", *(f"t{number}" for number in range(1, len(SUMS) + 1)))
TOTALS: Final = VIEW[3:]
_ENTRIES: Final = msgspec.msgpack.Decoder(tuple[str, str, tuple[str | bool | None, ...]])
encode_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredState:
    """A session's state as stored: its version, and JSON (None if it has no state)."""

    version: int = 0
    value: bytes | None = None

    @classmethod
    def of(cls, version: bytes | int | None, value: bytes | None) -> StoredState:
        """Decode the fields of a server's reply."""
        return cls(int(version or 0), value)


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """A new state, written only if the stored state still has this version. `value`: None keeps the stored state."""

    version: int
    value: bytes | None


def compared(version: int) -> dict[str, int]:
    """Return the arguments of a script that replaces a state if it has this version."""
    return {"version": version, "step": random.getrandbits(16)}


def micro(seconds: float) -> int:
    """Convert seconds to microseconds."""
    return int(seconds * _MICRO)


def _amount(amount: Amount) -> tuple[int, int, int]:
    return min(MOST, amount[0]), min(MOST, amount[1]), min(MOST, amount[2])


def _limits(limits: Limits) -> tuple[int, int, int]:
    return _limit(limits.tokens), _limit(limits.nano_usd), _limit(limits.calls)


def _limit(limit: int | None) -> int:
    return _NONE if limit is None else min(MOST, limit)


def held(hold: Hold, claims: Iterable[Claim], keys: Keys, now: float) -> bytes:
    """Return ARGV[3] of reserve.lua: the fixed amount of a hold, the amount of a unit, and accounts with limits.

    `now`: Unix time in seconds, for windows of the calendar, whose beginning is computed here.
    """
    encoded = []
    for claim in claims:
        window = claim.configured.window
        window_us = _NONE if window is None or isinstance(window, CalendarWindow) else micro(window)
        limits = (*_limits(claim.configured), *_limits(claim.declared))
        encoded.append((keys.account(claim.key), claim.key.kind, window_us, *limits, *_further(claim, now)))
    return _pack((_amount(hold.fixed), _amount(hold.unit), encoded))


def _further(claim: Claim, now: float) -> tuple[float | bool, ...]:
    """Return what only some claims need: the share of a closing call, and the beginning of a window of the calendar."""
    window, closing = claim.configured.window, (claim.closing_share, claim.is_closing)
    if isinstance(window, CalendarWindow):
        return *closing, micro(window.bounds(now)[0])
    return closing if claim.closing_share else ()


def accounts_of(accounts: Iterable[AccountKey], keys: Keys) -> list[tuple[str, str]]:
    """Return names and kinds of the accounts that a call charges: all but counts of requests."""
    return [(keys.account(key), key.kind) for key in dict.fromkeys(accounts) if key.kind != "rate"]


def spent(record: CallRecord) -> tuple[int, int, int]:
    """Return what a call charges to budgets."""
    return _amount(record.spent)


def sums(record: CallRecord) -> list[str]:
    """Return what a call adds to its session's totals, as text: Lua cannot count large numbers exactly."""
    return list(map(str, sums_of(record.charge, record.saved_tokens)))


def usage(record: CallRecord, tag: str, keys: Keys, retention: Retention) -> dict[str, Any]:
    """Return the argument about the usage to which a call is added, see `count_usage` in prelude.lua.

    `tag`: of the part of the usage. Counts are text, like those of `sums`.
    """
    periods = []
    for period in ("day", "hour"):
        number = number_of(period, record.started_at)
        ends_at = (number + 1) * PERIOD_S[period] + retention.usage_s[period]
        periods.append((keys.usage(tag, period, number), int(ends_at * 1000)))
    return {"periods": periods, "rows": row_names(record), "counts": list(map(str, added_by(record)))}


def usage_rows(number: int, reply: Sequence[bytes]) -> list[UsageRow]:
    """Decode the usage of an hour or day: names and values of the fields in turn."""
    values = dict(zip(reply[::2], reply[1::2], strict=True))
    places = range(1, len(COUNTS) + 1)
    return [
        UsageRow(number, name.decode(), [max(0, int(values.get(b"%b:%d" % (row, place), 0))) for place in places])
        for name, row in values.items()
        if name.startswith(b"{")
    ]


def last_turn(record: CallRecord) -> dict[str, str]:
    """Return the session's fields about the call's token estimate."""
    last = record.last_turn
    if last is None:
        return {}
    frames = f"{last.frames} {last.added} {last.over}" if last.frames is not None else ""
    residual = str(max(-MAX_TOKENS, min(last.residual, MAX_TOKENS)))
    return {"last_key": last.key, "residual": residual, "frames": frames}


def kept_by_provider(record: CallRecord) -> dict[str, str | int]:
    """Return the session's fields about content that the call's provider stores."""
    kept = record.counted_kept
    return {"kept": kept, "most_kept": MAX_KEPT} if kept else {}


def account(row: Sequence[Any]) -> Account:
    """Decode an account as `view` in prelude.lua returns it."""
    opened = None if row[6] == _NONE else _moment(row[6])
    decided: dict[Dimension, int | None] = {}
    for name, limit in zip(DIMENSIONS, row[7:10], strict=True):
        if limit >= _NONE:  # a smaller number means that no limit was set
            decided[name] = None if limit == _NONE else limit
    closing = row[12].decode()
    return Account(Amount(*row[:3]), Amount(*row[3:6]), opened, decided, row[11], closing)


def _moment(micros: int) -> Moment:
    return Moment(micros / _MICRO, micros / _MICRO)


def balances(claims: Sequence[Claim], now: int, rows: Sequence[Sequence[Any]]) -> tuple[Balance, ...]:
    """Return the balances of accounts at the time of the server's clock."""
    moment = _moment(now)
    return tuple(_balance_of(row, claim, moment) for claim, row in zip(claims, rows, strict=True))


def _balance_of(row: Sequence[Any], claim: Claim, moment: Moment) -> Balance:
    balance = ledger.balance_of(account(row), claim, moment)
    return replace(balance, is_absent=row[10] > 0, is_orphaned=row[10] > 1) if row[10] else balance


def granted(claims: Sequence[Claim], reply: Sequence[Any]) -> Granted:
    """Decode granted units and the balances after the reservation."""
    units, now, rows = reply
    return Granted(units, balances(claims, now, rows))


def refused(hold: Hold, claims: Sequence[Claim], reply: Sequence[Any]) -> Refused:
    """Return the refusal of a hold, as `ledger.reserve` computes it for the account that refused."""
    number, now, rows = reply
    claim = claims[number - 1]
    alone = Hold(hold.id, (claim,), hold.fixed, hold.unit, hold.least, hold.most)
    outcome = ledger.reserve({claim.key: account(rows[0])}, alone, _moment(now))
    if not isinstance(outcome, Refused):  # pragma: no cover  # Lua and Python count alike
        raise TypeError(f"{claim.key} has room for {hold.fixed} and was refused")
    return outcome


def newer_state(reply: Sequence[Any]) -> StoredState | None:
    """Return the newer state that prevented a settlement; None if the call is settled."""
    status, *rest = reply
    return StoredState.of(*rest) if status == _CHANGED else None


def opened(reply: Sequence[bytes | None]) -> OpenHold | None:
    """Decode a hold from `units, noted, value`; return None if it does not exist."""
    units, noted, value = reply
    if units is None or noted is None or value is None:
        return None
    return holds.decode(value, int(units), int(noted))


def entry(call_id: str, tag: str, sums: Sequence[bytes | None]) -> bytes:
    """Encode an entry of the list of settled calls: call id, tag of its record, and its session's sums after it."""
    return _pack((call_id, tag, [None if one is None else one.decode() for one in sums]))


def noted(encoded: bytes) -> tuple[str, str, Totals]:
    """Decode what `entry` or settle.lua has encoded."""
    call_id, tag, sums = _ENTRIES.decode(encoded)
    return call_id, tag, totals_of([int(one or 0) for one in sums])


def totals(row: Sequence[bytes | None]) -> Totals:
    """Decode totals; zero if there are none."""
    return totals_of([int(one or 0) for one in row])


def tools(record: CallRecord) -> dict[str, Any]:
    """Return the argument about the tools that a call asked for; empty if it asked for none."""
    names = record.counted_tools
    return {"tools": {"names": names, "most": MAX_NAMES, "recent": MAX_RECENT, "others": OTHERS}} if names else {}


def agent(record: CallRecord) -> dict[str, Any]:
    """Return the argument about the subagent that made a call; empty for the main agent."""
    name = subagent_of(record)
    if name is None or record.agent is None:
        return {}
    told = {"parent": record.agent.parent, "type": record.agent.type, "step": record.step}
    bounds = {"most": MAX_SUBAGENTS, "most_tools": MAX_AGENT_TOOLS, "others": OTHERS}
    return {"agent": {"id": name, **{key: value for key, value in told.items() if value is not None}, **bounds}}


def agent_uses(fields: Sequence[bytes]) -> list[AgentUse]:
    """Decode what the subagents of a session used, from all fields of the hash that settle.lua describes."""
    values = {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    tools: dict[str, dict[str, int]] = {}
    for name, value in values.items():
        kind, _, rest = name.partition("/")
        if kind == "u":
            agent_id, _, tool = rest.partition("/")
            tools.setdefault(agent_id, {})[tool] = int(value)
    return [_agent_use(values, name[2:], tools) for name in values if name.startswith("c/")]


def _agent_use(values: Mapping[str, str], id_: str, tools: Mapping[str, Mapping[str, int]]) -> AgentUse:
    return AgentUse(
        id_,
        values.get(f"p/{id_}"),
        values.get(f"y/{id_}"),
        values.get(f"s/{id_}") or None,
        float(values[f"c/{id_}"]),
        float(values.get(f"l/{id_}", 0)),
        totals_of([int(values.get(f"{number}/{id_}", 0)) for number in range(1, len(SUMS) + 1)]),
        tools.get(id_, {}),
    )


def tool_use(calls: Sequence[bytes], recent: Sequence[bytes]) -> ToolUse:
    """Decode the tools of a session. `calls`: names and counts in turn; `recent`: names of the last calls."""
    numbers = {name.decode(): int(number) for name, number in zip(calls[::2], calls[1::2], strict=True)}
    return ToolUse(tuple(map(bytes.decode, recent)), numbers)


def view(key: SessionKey, row: Sequence[bytes | None], tools: ToolUse) -> SessionView | None:
    """Decode a session from the fields of `VIEW`; return None if it does not exist."""
    derived, created, last = row[:3]
    if created is None or last is None:
        return None
    return SessionView(key, float(created), float(last), totals(row[3:]), derived == b"1", tools)
