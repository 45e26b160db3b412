"""Apply the ledger's arithmetic to accounts and holds, inside a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from gateway.core.errors import StoreDamaged
from gateway.core.ledger import arithmetic as ledger
from gateway.core.ledger.arithmetic import (
    EMPTY,
    MOST,
    NOTHING,
    Account,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Dimension,
    Granted,
    Moment,
    Refused,
)
from gateway.core.record import CallRecord
from gateway.core.stored import OpenHold
from gateway.stores import holds
from gateway.stores.damage import UNREADABLE, UnreadHolds, unreadable
from gateway.stores.sqlite.schema import hold_key

_USED: Final = ("used_tokens", "used_nano_usd", "used_calls")
_HELD: Final = ("held_tokens", "held_nano_usd", "held_calls")
#: columns that `account` decodes
COLUMNS: Final = (*_USED, *_HELD, "opened_wall", "opened_mono", "opened_boot", "decided", "epoch", "closing")
_ACCOUNT: Final = f"SELECT {', '.join(COLUMNS)} FROM accounts WHERE kind = ? AND namespace = ? AND id = ?"  # noqa: S608  # constants
_KEEP_ACCOUNT: Final = (
    f"INSERT INTO accounts (kind, namespace, id, {', '.join(COLUMNS)}, changed_at) "  # noqa: S608  # constants
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    + "".join(f"{name} = excluded.{name}, " for name in COLUMNS)
    # A call that ended earlier may be settled later, out of a journal. It must not make the account older.
    + "changed_at = max(changed_at, excluded.changed_at)"
)
#: `ledger.settle` as one statement, as every call needs it: adds the spent amount, and gives back the hold
_SETTLE: Final = (
    f"INSERT INTO accounts (kind, namespace, id, {', '.join((*_USED, *_HELD))}, changed_at) "  # noqa: S608  # constants
    "VALUES (?, ?, ?, ?, ?, ?, 0, 0, 0, ?) ON CONFLICT DO UPDATE SET "
    + "".join(f"{name} = min({name} + excluded.{name}, {MOST}), " for name in _USED)
    + "".join(f"{name} = max({name} - ?, 0), " for name in _HELD)
    + "changed_at = max(changed_at, excluded.changed_at) "
    # SQLite would count a value that is not a number as zero. So no row is changed then, which the caller treats as
    # damage.
    + "WHERE "
    + " AND ".join(f"typeof({name}) = 'integer'" for name in (*_USED, *_HELD))
)
#: `ledger.with_call_ended` for a call that cost nothing
_REOPEN: Final = (
    "UPDATE accounts SET closing = NULL "
    "WHERE kind = ?1 AND namespace = ?2 AND id = ?3 AND substr(closing, 1, length(?4) + 1) = ?4 || ' '"
)
_HOLD: Final = "SELECT units, noted, value FROM holds WHERE key = ? AND id = ?"
#: the units of an open hold, and 1 if its call is settled already
_KNOWN: Final = (
    "SELECT (SELECT units FROM holds WHERE key = ?1 AND id = ?2), "
    "EXISTS (SELECT 1 FROM calls WHERE call_id = ?2) OR EXISTS (SELECT 1 FROM gone WHERE call_id = ?2)"
)
_KEEP_HOLD: Final = (
    "INSERT INTO holds (key, id, units, noted, accounts, held_tokens, held_nano_usd, held_calls, boot, mono, wall, "
    "lease_s, value) VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
#: up to one row each: the record of a settled call, that of a deleted call, and the hold
_FOUND: Final = (
    "SELECT 'settled', record, epochs, NULL, NULL, NULL FROM calls WHERE call_id = ?2 UNION ALL "  # noqa: S608  # constants
    "SELECT 'gone', record, epochs, NULL, NULL, NULL FROM gone WHERE call_id = ?2 UNION ALL "
    f"SELECT 'held', key, accounts, {', '.join(_HELD)} FROM holds WHERE key = ?1 AND id = ?2"
)
_DROP_HOLD: Final = "DELETE FROM holds WHERE key = ?"
_ADD_UNITS: Final = (
    "UPDATE holds SET units = units + ?, held_tokens = ?, held_nano_usd = ?, held_calls = ? WHERE key = ? AND id = ?"
)
_RENEW: Final = "UPDATE holds SET boot = ?, mono = ?, wall = ?, noted = max(noted, ?) WHERE key = ? AND id = ?"
#: `ledger.is_over`: renewed before the last boot (another boot id, or a monotonic clock ahead of now), or too long ago
_OVERDUE: Final = (
    "SELECT id, units, noted, value FROM holds "
    "WHERE boot != :boot OR mono > :mono OR :mono - mono > lease_s LIMIT :limit"
)
_NO_ACCOUNTS: Final[ledger.Accounts] = {}
_NOT_HELD: Final[tuple[Sequence[AccountKey], Amount]] = ((), NOTHING)
#: decodes limits that an operator set
_DECIDED: Final = msgspec.json.Decoder(dict[Dimension, int | None])
#: the start of a window in `COLUMNS`: the fields of a `Moment`
_Opened = tuple[float, float, str]

#: `ledger.with_new_period`, or with `_FORGET` in it `ledger.after_deletion`
_CLEAR: Final = (
    "UPDATE accounts SET used_tokens = 0, used_nano_usd = 0, used_calls = 0, epoch = epoch + 1, closing = NULL{} "
    "WHERE kind = ? AND namespace = ? AND id = ?"
)
#: the condition for the accounts of a session's agents, see `AccountKey`
OF_AGENTS: Final = "kind = 'agent' AND namespace = ? AND id > ? AND id < ?"
_CLEAR_AGENTS: Final = f"{_CLEAR.partition('WHERE')[0]}WHERE {OF_AGENTS}"
_FORGET: Final = ", opened_wall = NULL, opened_mono = NULL, opened_boot = NULL, decided = NULL" + "".join(
    f", {name} = iif(typeof({name}) = 'integer', {name}, 0)" for name in _HELD
)


def reserve(db: sqlite3.Connection, opened: OpenHold, lease_s: float, now: Moment) -> Granted | Refused:
    """See `Store.reserve`."""
    hold = opened.hold
    at = _at(hold.id)
    units, is_settled = db.execute(_KNOWN, at).fetchone()
    if units is not None:
        return Granted(units, balances(db, hold.claims, now))
    if is_settled:
        # The reservation comes too late: a hold that is taken now would never be given back.
        return Granted(hold.least, balances(db, hold.claims, now))
    outcome = ledger.reserve(_accounts(db, (claim.key for claim in hold.claims)), hold, now)
    if isinstance(outcome, Refused):
        return outcome
    granted, changes = outcome
    _keep(db, changes, now.wall)
    keys = _encode_accounts(claim.key for claim in hold.claims)
    held = hold.amount(granted.units)
    value = holds.encode(opened)
    db.execute(_KEEP_HOLD, (*at, granted.units, keys, *held, now.boot, now.mono, now.wall, lease_s, value))
    return granted


def extend(db: sqlite3.Connection, hold_id: str, units: int, now: Moment) -> Granted | None:
    """See `Store.extend`."""
    at = _at(hold_id)
    row = db.execute(_HOLD, at).fetchone()
    if row is None:
        return None
    opened = _opened(row)
    hold = opened.hold
    granted, changes = ledger.extend(_accounts(db, (claim.key for claim in hold.claims)), hold, units, now)
    _keep(db, changes, now.wall)
    db.execute(_ADD_UNITS, (granted.units, *hold.amount(opened.units + granted.units), *at))
    return granted


def renew(db: sqlite3.Connection, noted: Mapping[str, int], now: Moment) -> frozenset[str]:
    """See `Store.renew`."""
    moment = (now.boot, now.mono, now.wall)
    return frozenset(
        one for one, tokens in noted.items() if not db.execute(_RENEW, (*moment, tokens, *_at(one))).rowcount
    )


def overdue(db: sqlite3.Connection, limit: int, now: Moment, unread: UnreadHolds) -> list[OpenHold]:
    """See `Store.overdue_holds`."""
    found = []
    for hold_id, *row in db.execute(_OVERDUE, {"boot": now.boot, "mono": now.mono, "limit": limit + len(unread)}):
        with unread.passed_over(hold_id):
            found.append(_opened(row))
    return found[:limit]


def balances(
    db: sqlite3.Connection, claims: Sequence[Claim], now: Moment, known: ledger.Accounts = _NO_ACCOUNTS
) -> tuple[Balance, ...]:
    """See `Store.balances`. `known`: accounts that were read just before."""
    accounts = {**_accounts(db, [claim.key for claim in claims if claim.key not in known]), **known}
    return tuple([ledger.balance_of(accounts.get(claim.key, EMPTY), claim, now) for claim in claims])


def decide(db: sqlite3.Connection, key: AccountKey, limits: Mapping[Dimension, int | None] | None, now: Moment) -> None:
    """See `Store.override_limits`."""
    account = _accounts(db, (key,)).get(key, EMPTY)
    overrides = {**account.overrides, **limits} if limits is not None else {}
    _keep(db, {key: replace(account, overrides=overrides)}, now.wall)


class HeldAccounts(NamedTuple):
    """The amount that is held for a call, and its accounts. `key`: of the hold's row."""

    key: int
    accounts: Sequence[AccountKey]
    amount: Amount


class FoundCall(NamedTuple):
    """What the file contains of a call that ends.

    Attributes:
        settled: record and budget periods, if the call is settled.
        held: the hold, if the call is not settled.
        gone: record and budget periods, if the call was settled and deleted with its session. The record is None unless
            the call was orphaned.
    """

    settled: tuple[bytes, bytes | None] | None = None
    held: HeldAccounts | None = None
    gone: tuple[bytes | None, bytes | None] | None = None


_NOTHING_FOUND: Final = FoundCall()


def found(db: sqlite3.Connection, call_id: str) -> FoundCall:
    """Read whether a call is settled, and if not, its hold."""
    rows = {what: row for what, *row in db.execute(_FOUND, _at(call_id))}
    if not rows:
        return _NOTHING_FOUND
    if "settled" in rows:
        record, periods, *_ = rows["settled"]
        return FoundCall(settled=(record, periods))
    if "gone" in rows:
        record, periods, *_ = rows["gone"]
        return FoundCall(gone=(record, periods))
    key, accounts, *amount = rows["held"]
    return FoundCall(held=HeldAccounts(key, _decode_accounts(accounts), Amount(*amount)))


def settle(db: sqlite3.Connection, record: CallRecord, held: HeldAccounts | None) -> None:
    """Charge the accounts of a call that was not settled before, and give back its hold."""
    holding, back = _NOT_HELD
    if held is not None:
        _, holding, back = held
        db.execute(_DROP_HOLD, (held.key,))
    spent, ended = NOTHING.plus(record.spent), record.started_at + record.duration_s
    # Both lists are needed: a hold may be on parents that the record does not name.
    for key in dict.fromkeys((*holding, *record.accounts)):
        if key.kind != "rate":
            charged = spent if key in record.accounts else NOTHING
            if not db.execute(_SETTLE, (*key, *charged, ended, *(back if key in holding else NOTHING))).rowcount:
                raise damaged(db, key)
            if spent == NOTHING and key in holding:
                db.execute(_REOPEN, (*key, record.call_id))


def correct(db: sqlite3.Connection, record: CallRecord, orphaned: CallRecord, charged: ledger.Periods) -> None:
    """Replace the charge of an orphaned call. `orphaned`: its earlier record; `charged`: the budget periods of that."""
    accounts = _accounts(db, record.accounts)
    ended = record.started_at + record.duration_s
    changes = ledger.correct(accounts, record.accounts, orphaned.spent, record.spent, charged, record.call_id)
    _keep(db, changes, ended)


def clear(db: sqlite3.Connection, key: AccountKey) -> None:
    """Set the usage of a session's account, and of the accounts of its agents, to zero. Holds stay."""
    db.execute(_CLEAR.format(""), key)
    db.execute(_CLEAR_AGENTS.format(""), of_agents(key.namespace, key.id))


def forget(db: sqlite3.Connection, key: AccountKey) -> None:
    """Set these accounts to zero and remove their limits, as the session is deleted. Holds stay."""
    db.execute(_CLEAR.format(_FORGET), key)
    db.execute(_CLEAR_AGENTS.format(_FORGET), of_agents(key.namespace, key.id))


def of_agents(namespace: str, session_id: str) -> tuple[str, str, str]:
    """Return the values of `OF_AGENTS`: the zero is the character after the slash."""
    return namespace, f"{session_id}/", f"{session_id}0"


def periods(db: sqlite3.Connection, keys: Sequence[AccountKey]) -> Sequence[int]:
    """Return the current budget period of each account."""
    accounts = _accounts(db, keys)
    return [accounts.get(key, EMPTY).period for key in keys]


def _at(hold_id: str) -> tuple[int, str]:
    return hold_key(hold_id), hold_id


def _encode_accounts(keys: Iterable[AccountKey]) -> str:
    """Encode the accounts of a hold as text. No part of a key has a line break or a zero byte."""
    return "\n".join(["\0".join(key) for key in keys if key.kind != "rate"])


def _decode_accounts(text: str) -> list[AccountKey]:
    return [AccountKey(*line.split("\0")) for line in text.split("\n")] if text else []  # type: ignore[arg-type]


def _accounts(db: sqlite3.Connection, keys: Iterable[AccountKey]) -> dict[AccountKey, Account]:
    found = {}
    for key in keys:
        row = db.execute(_ACCOUNT, key).fetchone()
        if row is not None:
            found[key] = account(db, key, row)
    return found


def account(db: sqlite3.Connection, key: AccountKey, row: Sequence[Any]) -> Account:
    """Decode an account from `COLUMNS`.

    Raises:
        StoreDamaged: the columns do not contain an account.
    """
    try:
        return _account(row)
    except UNREADABLE as error:
        raise damaged(db, key) from error


def _account(row: Sequence[Any]) -> Account:
    wall, decided, period, closing = row[6], *row[9:]
    if {*map(type, row[:6]), type(period)} != {int}:
        raise TypeError(row)
    opened = Moment(*msgspec.convert(row[6:9], _Opened)) if wall is not None else None
    overrides = _DECIDED.decode(decided) if decided else {}
    return Account(Amount(*row[:3]), Amount(*row[3:6]), opened, overrides, period, closing or "")


def damaged(db: sqlite3.Connection, key: AccountKey) -> StoreDamaged:
    """Return the error for an account that cannot be read."""
    file = db.execute("PRAGMA database_list").fetchone()[2]
    return StoreDamaged(unreadable("/".join(part for part in key if part), Path(file).name))


def _keep(db: sqlite3.Connection, changes: Mapping[AccountKey, Account], now: float) -> None:
    for key, account in changes.items():
        opened = account.opened
        decided = msgspec.json.encode(account.overrides) if account.overrides else None
        times = (opened.wall, opened.mono, opened.boot) if opened is not None else (None, None, None)
        kept = (*account.used, *account.held, *times, decided, account.period, account.closing or None)
        db.execute(_KEEP_ACCOUNT, (*key, *kept, now))


def _opened(row: Sequence[Any]) -> OpenHold:
    units, noted, value = row
    return holds.decode(value, units, noted)
