"""Convert claims, accounts, totals and states for the scripts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

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
from gateway.core.record import CallRecord
from gateway.core.session import MAX_KEPT
from gateway.core.stored import OpenHold, SessionView
from gateway.core.tools import MAX_NAMES, MAX_RECENT, OTHERS, ToolUse
from gateway.core.usage import MAX_TOKENS, Totals
from gateway.core.values import dataclass
from gateway.stores.redis.keys import Keys
from gateway.stores.sums import SUMS, sums_of, totals_of

_MICRO: Final = 1_000_000
#: no limit, no window
_NONE: Final = -1
#: status of settle.lua: nothing was written, as others have changed the state
_CHANGED: Final = 2
#: fields of a session: those of `SessionView`, then the totals
VIEW: Final = ("derived", "created", "last", *(f"t{number}" for number in range(1, len(SUMS) + 1)))
TOTALS: Final = VIEW[3:]
_HOLDS: Final = msgspec.json.Decoder(OpenHold)
_ENTRIES: Final = msgspec.msgpack.Decoder(tuple[str, str, tuple[str | bool | None, ...]])
encode_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredState:
    """A session's state as it is kept: JSON, None where there is none, and its version."""

    version: int = 0
    value: bytes | None = None

    @classmethod
    def of(cls, version: bytes | int | None, value: bytes | None) -> StoredState:
        """As a server gives it."""
        return cls(int(version or 0), value)


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """What becomes of a state if it still has this version; `value`: None where it stays as it is."""

    version: int
    value: bytes | None


def compared(version: int) -> dict[str, int]:
    """The arguments of a verb that keeps a state in the place of this version."""
    return {"version": version, "step": random.getrandbits(16)}


def micro(seconds: float) -> int:
    """Microseconds."""
    return int(seconds * _MICRO)


def _amount(amount: Amount) -> tuple[int, int, int]:
    return min(MOST, amount[0]), min(MOST, amount[1]), min(MOST, amount[2])


def _limits(limits: Limits) -> tuple[int, int, int]:
    return _limit(limits.tokens), _limit(limits.nano_usd), _limit(limits.calls)


def _limit(limit: int | None) -> int:
    return _NONE if limit is None else min(MOST, limit)


def held(hold: Hold, claims: Iterable[Claim], keys: Keys) -> bytes:
    """ARGV[3] of reserve.lua: what a hold holds at once and for each unit, and on which accounts, with their limits."""
    compressed = []
    for claim in claims:
        window = claim.configured.window_s
        limits = (*_limits(claim.configured), *_limits(claim.declared))
        compressed.append(
            (keys.account(claim.key), claim.key.kind, _NONE if window is None else micro(window), *limits)
        )
    return _pack((_amount(hold.fixed), _amount(hold.unit), compressed))


def accounts_of(accounts: Iterable[AccountKey], keys: Keys) -> list[tuple[str, str]]:
    """Those that are charged when a call ends: all but counts of requests."""
    return [(keys.account(key), key.kind) for key in dict.fromkeys(accounts) if key.kind != "rate"]


def spent(record: CallRecord) -> tuple[int, int, int]:
    """What of a call counts against budgets."""
    return _amount(record.spent)


def sums(record: CallRecord) -> list[str]:
    """Return what a call adds to its session, as text: Lua would not count it exactly."""
    return list(map(str, sums_of(record.charge, record.saved_tokens)))


def last_turn(record: CallRecord) -> dict[str, str]:
    """What the session remembers of the call's estimate."""
    last = record.last_turn
    if last is None:
        return {}
    frames = f"{last.frames} {last.added} {last.over}" if last.frames is not None else ""
    residual = str(max(-MAX_TOKENS, min(last.residual, MAX_TOKENS)))
    return {"last_key": last.key, "residual": residual, "frames": frames}


def kept_by_provider(record: CallRecord) -> dict[str, str | int]:
    """What the session remembers of what the call's provider keeps."""
    kept = record.counted_kept
    return {"kept": kept, "most_kept": MAX_KEPT} if kept else {}


def account(row: Sequence[int]) -> Account:
    """An account as `view` in the scripts gives it."""
    opened = None if row[6] == _NONE else _moment(row[6])
    decided: dict[Dimension, int | None] = {}
    for name, limit in zip(DIMENSIONS, row[7:10], strict=True):
        if limit >= _NONE:  # a smaller one: none was decided
            decided[name] = None if limit == _NONE else limit
    return Account(Amount(*row[:3]), Amount(*row[3:6]), opened, decided)


def _moment(micros: int) -> Moment:
    return Moment(micros / _MICRO, micros / _MICRO)


def balances(claims: Sequence[Claim], now: int, rows: Sequence[Sequence[int]]) -> tuple[Balance, ...]:
    """How the accounts stand by the server's clock."""
    moment = _moment(now)
    return tuple(_balance_of(row, claim, moment) for claim, row in zip(claims, rows, strict=True))


def _balance_of(row: Sequence[int], claim: Claim, moment: Moment) -> Balance:
    balance = ledger.balance_of(account(row), claim, moment)
    return replace(balance, is_absent=row[10] > 0, is_orphaned=row[10] > 1) if row[10] else balance


def granted(claims: Sequence[Claim], reply: Sequence[Any]) -> Granted:
    """Units, and how the accounts stand after it."""
    units, now, rows = reply
    return Granted(units, balances(claims, now, rows))


def refused(hold: Hold, claims: Sequence[Claim], reply: Sequence[Any]) -> Refused:
    """Why a hold was not taken: what `ledger.reserve` says of the account that refused."""
    number, now, rows = reply
    claim = claims[number - 1]
    alone = Hold(hold.id, (claim,), hold.fixed, hold.unit, hold.least, hold.most)
    outcome = ledger.reserve({claim.key: account(rows[0])}, alone, _moment(now))
    if not isinstance(outcome, Refused):  # pragma: no cover  # both count alike
        raise TypeError(f"{claim.key} has room for {hold.fixed} and was refused")
    return outcome


def kept(reply: Sequence[Any]) -> StoredState | None:
    """The state for which a settlement was not written; None where it was."""
    status, *rest = reply
    return StoredState.of(*rest) if status == _CHANGED else None


def opened(reply: Sequence[bytes | None]) -> OpenHold | None:
    """A hold as `units, noted, value`; None where it is gone."""
    units, noted, value = reply
    if units is None or noted is None or value is None:
        return None
    return replace(_HOLDS.decode(value), units=int(units), noted=int(noted))


def entry(call_id: str, tag: str, sums: Sequence[bytes | None]) -> bytes:
    """What is noted of a settled call: its id, where its record is, and its session's sums after it."""
    return _pack((call_id, tag, [None if one is None else one.decode() for one in sums]))


def noted(compressed: bytes) -> tuple[str, str, Totals]:
    """What `entry` or settle.lua has packed."""
    call_id, tag, sums = _ENTRIES.decode(compressed)
    return call_id, tag, totals_of([int(one or 0) for one in sums])


def totals(row: Sequence[bytes | None]) -> Totals:
    """Totals as they are kept; zero where there are none."""
    return totals_of([int(one or 0) for one in row])


def tools(record: CallRecord) -> dict[str, Any]:
    """What the session remembers of the tools that the call asked for; nothing where it asked for none."""
    names = record.counted_tools
    return {"tools": {"names": names, "most": MAX_NAMES, "recent": MAX_RECENT, "others": OTHERS}} if names else {}


def tool_use(calls: Sequence[bytes], recent: Sequence[bytes]) -> ToolUse:
    """Calls of tools as they are kept: names and numbers in turn; the last names."""
    numbers = {name.decode(): int(number) for name, number in zip(calls[::2], calls[1::2], strict=True)}
    return ToolUse(tuple(map(bytes.decode, recent)), numbers)


def view(key: SessionKey, row: Sequence[bytes | None], tools: ToolUse) -> SessionView | None:
    """A session as `VIEW` reads it."""
    derived, created, last = row[:3]
    if created is None or last is None:
        return None
    return SessionView(key, float(created), float(last), totals(row[3:]), derived == b"1", tools)
