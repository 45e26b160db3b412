"""Reserve and settle with one script, if all keys are on one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from gateway.core.errors import StoreDamaged
from gateway.core.ids import first_id_at
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Granted, Refused
from gateway.core.record import CallRecord
from gateway.core.retention import Retention
from gateway.core.stored import MOST_LATEST, SORTS, CallEnd, OpenHold
from gateway.core.usage import Totals
from gateway.core.values import dataclass
from gateway.stores import holds
from gateway.stores.damage import UnreadHolds
from gateway.stores.record_encoding import encode_record
from gateway.stores.redis import values
from gateway.stores.redis.clock_jumps import ClockJumps
from gateway.stores.redis.keys import NAMESAKES, Keys, member_of, tag_of, tag_of_account, tag_of_call, usage_tag
from gateway.stores.redis.link import Link, call_each, undamaged
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.redis.values import StateUpdate, StoredState

#: Records kept per session. Totals do not change when a record is dropped.
CALLS_PER_SESSION: Final = 1000
#: Seconds that keys live longer than their data is kept, or up to an hour less, see `live` in prelude.lua. So the
#: hourly `expire` comes first.
_GRACE_S: Final = 10_800.0


@dataclass(frozen=True, slots=True)
class Settlement:
    """The result of a settlement. `version`: of the session's changed state; None if the state did not change."""

    call_end: CallEnd
    version: int | None = None


class LedgerOperations(Protocol):
    """The methods of a store that handle budgets; `Ledger` describes each of them.

    `settle` with an `update` changes the session's state in the same step. If the state has changed meanwhile, it
    writes nothing and returns the newer state. `claims`: accounts to read after the settlement.

    `usage_tags` are the hash tags of the parts of the usage.

    `ask_balances` returns the commands that read balances, to be sent together with others. `balances` decodes their
    replies.
    """

    usage_tags: Sequence[str]

    async def settle(  # noqa: D102
        self, record: CallRecord, update: StateUpdate | None, claims: Sequence[Claim]
    ) -> Settlement | StoredState: ...
    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused: ...  # noqa: D102
    async def extend(self, hold_id: str, units: int) -> Granted | None: ...  # noqa: D102
    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]: ...  # noqa: D102
    async def overdue(self, limit: int) -> Sequence[OpenHold]: ...  # noqa: D102
    def ask_balances(self, claims: Sequence[Claim]) -> list[Command]: ...  # noqa: D102
    def balances(self, claims: Sequence[Claim], replies: Sequence[Any]) -> tuple[Balance, ...]: ...  # noqa: D102


def home_of(record: CallRecord) -> str:
    """Return the hash tag under which a call is stored: of its session, or of the call if it has none."""
    key = record.session
    return tag_of(key.namespace, key.id) if key is not None else tag_of_call(record.call_id)


def settlement(record: CallRecord, reply: Sequence[Any], balances: tuple[Balance, ...] | None) -> Settlement:
    """Combine the reply of settle.lua with the balances after it."""
    _, sums, _, version = reply
    totals = values.totals(sums) if record.session is not None else Totals()
    return Settlement(CallEnd(totals, balances), version)


class LedgerScripts:
    """Keys, scripts, and their common arguments, for both kinds of ledger."""

    def __init__(self, keys: Keys, scripts: Scripts, now: Callable[[], float], retention: Retention) -> None:
        self.keys = keys
        self.call = scripts.call
        self.ttl_s = retention.sessions_s + _GRACE_S
        self.ttl_ms = int(self.ttl_s * 1000)
        self.now = now
        self.retention = retention
        self._calls_per_session = retention.calls_per_session or CALLS_PER_SESSION

    def basic(self) -> dict[str, Any]:
        """Return the arguments of all scripts that write: time to live (ms), and Unix seconds for `expire`."""
        return {"ttl": self.ttl_ms, "at": repr(self.now())}

    def reserve_arguments(self, opened: OpenHold, lease_s: float) -> dict[str, Any]:
        """Return the arguments of reserve.lua."""
        hold = opened.hold
        return self.basic() | {
            "id": hold.id,
            "least": hold.least,
            "most": hold.most,
            "lease": values.micro(lease_s),
            "home": True,
        }

    def settle_arguments(self, record: CallRecord, accounts: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the arguments of settle.lua."""
        return self.basic() | {
            "id": record.call_id,
            "lost": record.outcome if record.is_provisional else False,
            "session": record.session is not None,
            "spent": values.spent(record),
            "accounts": accounts,
            "sums": values.sums(record),
            "keep": self._calls_per_session,
            "oldest": first_id_at(self.now() - self.ttl_s),
            "derived": int(record.derived_session),
            "started": repr(float(record.started_at)),
            "ended": repr(float(record.started_at + record.duration_s)),
            **values.last_turn(record),
            **values.kept_by_provider(record),
            **values.tools(record),
            **values.agent(record),
        }

    def usage(self, record: CallRecord, tag: str) -> dict[str, Any]:
        """Return the argument that adds a call to a part of the usage."""
        return {"usage": values.usage(record, tag, self.keys, self.retention)}

    def settle(
        self, keys: Sequence[str], arguments: dict[str, Any], record: CallRecord, update: StateUpdate | None
    ) -> Command:
        """Return the command that settles a call and updates its session's state."""
        more = [encode_record(record)]
        if update is not None:
            arguments |= values.compared(update.version)
            more += [update.value] if update.value is not None else []
        return self.call("settle", keys, arguments, *more)

    def list_accounts(self, accounts: Sequence[AccountKey]) -> list[Command]:
        """Return commands that list sessions with accounts, so that `expire` finds those that never made a call."""
        now = repr(self.now())
        tags = [tag_of_account(key) for key in accounts if key.kind == "session"]
        if not tags:
            return []
        return [("ZADD", self.keys.alone, "GT", *(part for tag in tags for part in (now, tag)))]

    def names(self, record: CallRecord) -> list[str]:
        """Return the keys that lead to a call: by the client's request id, and by the response id."""
        names = list[str]()
        if record.request_id != record.call_id:
            scopes = [None] if record.session is None else [None, record.session.namespace]
            names += [self.keys.named(scope, record.request_id) for scope in scopes]
        if record.session is not None and record.answer is not None:
            names.append(self.keys.answered(record.session.namespace, record.answer))
        return names

    def lists(self, record: CallRecord) -> list[dict[str, str]]:
        """Return the names of the lists that a call and its session are in: of its namespace and of all."""
        if record.session is None:
            return []
        return [
            {"calls": self.keys.newest(scope)} | {sort: self.keys.sorted_list(scope, sort) for sort in SORTS}
            for scope in (None, record.session.namespace)
        ]

    def index(self, record: CallRecord) -> dict[str, Any]:
        """Return the argument `index` of settle.lua: the lists in which the call and its session appear."""
        tag = home_of(record)
        return {
            "holds": self.keys.holds,
            "id": self.keys.place(record.call_id),
            "tag": tag,
            "named": self.names(record),
            "place": f"{record.call_id}\n{tag}",
            "oldest": self.keys.oldest,
            "latest": self.keys.latest,
            "most": MOST_LATEST,
            "namesakes": NAMESAKES,
            "began": int(record.started_at * 1000),
            "lists": self.lists(record),
            "member": member_of(record.session) if record.session is not None else "",
        }


class PerServerLedger:
    """A ledger whose keys are all on one server."""

    usage_tags: Sequence[str] = (usage_tag(),)

    def __init__(self, link: Link, scripts: LedgerScripts, monotonic: Callable[[], float]) -> None:
        self._link = link
        self._scripts = scripts
        self._keys = scripts.keys
        self._unread = UnreadHolds()
        self._clock_jumps = ClockJumps(monotonic)

    async def settle(
        self, record: CallRecord, update: StateUpdate | None, claims: Sequence[Claim]
    ) -> Settlement | StoredState:
        """See `Store.settle_and_read`."""
        scripts, tag = self._scripts, home_of(record)
        arguments = scripts.settle_arguments(record, values.accounts_of(record.accounts, self._keys))
        arguments |= {"index": scripts.index(record), **scripts.usage(record, usage_tag())}
        keys = (self._keys.hold(record.call_id), *self._keys.all_of(tag))
        commands = [scripts.settle(keys, arguments, record, update), *self.ask_balances(claims)]
        # The call is settled even if an account cannot be read after it.
        reply, *balance = await call_each(self._link, commands)
        reply = undamaged(reply)
        newer = values.newer_state(reply)
        return newer or settlement(record, reply, self._readable_balances(claims, balance) if claims else ())

    def _readable_balances(self, claims: Sequence[Claim], replies: Sequence[Any]) -> tuple[Balance, ...] | None:
        is_damaged = any(isinstance(reply, StoreDamaged) for reply in replies)
        return None if is_damaged else self.balances(claims, replies)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        scripts, hold = self._scripts, opened.hold
        keys = (
            self._keys.hold(hold.id),
            self._keys.calls(home_of(opened.orphaned))[0],
            *(self._keys.account(claim.key) for claim in hold.claims),
        )
        noticed = scripts.list_accounts([claim.key for claim in hold.claims])
        arguments = scripts.reserve_arguments(opened, lease_s) | {"index": self._keys.holds, "noticed": noticed}
        held = values.held(hold, hold.claims, self._keys, self._scripts.now())
        command = scripts.call("reserve", keys, arguments, held, holds.encode(opened))
        [(status, *reply)] = await self._link.call(command)
        return values.granted(hold.claims, reply) if status == 1 else values.refused(hold, hold.claims, reply)

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        hold = self._keys.hold(hold_id)
        arguments = self._scripts.basic() | {"units": units}
        reply, kept = await self._link.call(
            self._scripts.call("extend", (hold,), arguments), ("HMGET", hold, "u", "n", "v")
        )
        opened = values.opened(kept)
        return values.granted(opened.hold.claims, reply) if reply is not None and opened is not None else None

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        if not noted:
            return frozenset()
        arguments = {"noted": list(noted.values()), "ids": list(noted), "index": self._keys.holds}
        holds = [self._keys.hold(one) for one in noted]
        [leases] = await self._link.call(self._scripts.call("renew", holds, arguments))
        return frozenset(one for one, lease in zip(noted, leases, strict=True) if not lease)

    async def overdue(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue_holds`."""
        keys = (self._keys.holds, self._keys.places)
        [(now, ids)] = await self._link.call(self._scripts.call("overdue", keys, {"limit": limit + len(self._unread)}))
        self._clock_jumps.check(now)
        if not ids:
            return []
        names = [hold_id.decode() for hold_id, _ in ids]
        kept = await call_each(self._link, [("HMGET", self._keys.hold(one), "u", "n", "v", "l") for one in names])
        overdue, missing = list[OpenHold](), list[str]()
        for name, reply in zip(names, kept, strict=True):
            with self._unread.passed_over(name):
                *row, lease = undamaged(reply)
                if self._clock_jumps.may_be_renewed(lease):
                    continue
                opened = values.opened(row)
                if opened is not None:
                    overdue.append(opened)
                else:
                    missing.append(name)
        if missing:
            # The server has lost these holds, for example by an eviction. If they stayed listed, they would fill the
            # limit of each later search.
            await self._link.call(("ZREM", self._keys.holds, *missing))
        return overdue[:limit]

    def ask_balances(self, claims: Sequence[Claim]) -> list[Command]:
        """See `LedgerOperations`. One script reads all accounts."""
        keys = [self._keys.account(claim.key) for claim in claims]
        return [self._scripts.call("standings", keys, {})] if keys else []

    def balances(self, claims: Sequence[Claim], replies: Sequence[Any]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        return tuple(one for now, rows in replies for one in values.balances(claims, now, rows))


if TYPE_CHECKING:
    _: type[LedgerOperations] = PerServerLedger
