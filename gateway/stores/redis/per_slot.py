"""Reserve and settle in parts, if the keys are on different servers of a cluster.

- A hold is taken in parts. The first part is in the slot of its call (the home), and stores where the other parts will
  be. The others follow in the order of the claims. If one is refused, the parts taken so far are given back.
- A hold is listed before it is taken, and is never taken after its lease has ended. If this process ends in between,
  the hold becomes overdue like any other.
- A settlement charges accounts on other servers first, adds the usage, and charges the session last, each once. A
  repeated settlement continues where the last one stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim, Granted, Hold, Refused, refused
from gateway.core.record import CallRecord
from gateway.core.stored import MOST_LATEST, OpenHold, Sort
from gateway.stores import holds
from gateway.stores.damage import UnreadHolds
from gateway.stores.record_encoding import decode_record
from gateway.stores.redis import values
from gateway.stores.redis.clock_jumps import ClockJumps
from gateway.stores.redis.keys import NAMESAKES, SHARDS, USAGE_SHARDS, session_of, tag_of_account, usage_tag
from gateway.stores.redis.link import Link
from gateway.stores.redis.per_server import LedgerOperations, LedgerScripts, Settlement, home_of, settlement
from gateway.stores.redis.scripts import Command
from gateway.stores.redis.values import StateUpdate, StoredState

#: status of reserve.lua: this part of a hold was not taken, as its lease had ended already
_LATE = 2
#: status of settle.lua: nothing was written, as the hold has parts on other servers
_HAS_PARTS = 3


@dataclass(slots=True)
class _Part:
    """The part of a hold in one slot. `hold`: its key."""

    hold: str
    units: int
    claims: Sequence[Claim]
    balances: tuple[Balance, ...]


class PerSlotLedger:
    """A ledger whose keys are on several servers of a cluster. The first lines of the module explain the order."""

    usage_tags: Sequence[str] = tuple([f"usage{number}" for number in range(USAGE_SHARDS)])

    def __init__(self, link: Link, scripts: LedgerScripts, monotonic: Callable[[], float]) -> None:
        self._link = link
        self._scripts = scripts
        self._keys = scripts.keys
        self._unread = UnreadHolds()
        #: one for the server of each list of open holds
        self._clock_jumps = [ClockJumps(monotonic) for _ in range(SHARDS)]

    # --- reserving ----------------------------------------------------------------------------------------------------

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        hold, home = opened.hold, home_of(opened.orphaned)
        wanted = _by_tag(home, hold.claims)
        others = _joined(tag for tag, _ in wanted if tag != home)
        arguments = self._scripts.reserve_arguments(opened, lease_s) | {"others": others}
        arguments["deadline"] = await self._announce(hold, home, arguments["lease"])
        parts: list[_Part] = []
        # One after the other: of calls that compete for the same accounts, the one that gets the first gets them all.
        for tag, claims in wanted:
            part = await self._take(tag, claims, opened, arguments | {"home": tag == home})
            if not isinstance(part, _Part):
                await self._undo(parts, hold.id)
                return await self._final_refusal(part, hold)
            parts.append(part)
            arguments["most"] = part.units
        return await self._equalize(parts, hold.claims)

    async def _final_refusal(self, reason: Refused | StoreDamaged, hold: Hold) -> Refused:
        """Return the refusal for the client. A permanent one takes precedence over one that may pass.

        An account that was not asked yet may refuse permanently.

        Raises:
            StoreDamaged: it is the reason.
        """
        if isinstance(reason, StoreDamaged):
            raise reason
        if not reason.is_temporary:
            return reason
        balances = self.balances(hold.claims, await self._link.call(*self.ask_balances(hold.claims)))
        permanent = refused(balances, hold)
        return reason if permanent is None or permanent.is_temporary else permanent

    async def _announce(self, hold: Hold, home: str, lease: int) -> int:
        arguments = {"id": hold.id, "tag": home, "lease": lease}
        announce = self._scripts.call("announce", self._keys.shard_of(hold.id), arguments)
        listed = self._scripts.list_accounts([claim.key for claim in hold.claims])
        deadline, *_ = await self._link.call(announce, *listed)
        return int(deadline)

    async def _take(
        self, tag: str, claims: Sequence[Claim], opened: OpenHold, arguments: Mapping[str, Any]
    ) -> _Part | Refused | StoreDamaged:
        hold = opened.hold
        name = self._keys.hold(hold.id, tag)
        settled = self._keys.calls(tag)[0] if arguments["home"] else self._keys.settled(tag, hold.id)
        keys = (name, settled, *(self._keys.account(claim.key) for claim in claims))
        held = values.held(hold, claims, self._keys, self._scripts.now())
        command = self._scripts.call("reserve", keys, arguments, held, holds.encode(opened))
        try:
            [(status, *reply)] = await self._link.call(command)
        except StoreDamaged as error:
            return error
        if status == _LATE:
            raise StoreUnavailable("The store took longer than the lease of the hold. Try again shortly.")
        if status == 0:
            return values.refused(replace(hold, most=arguments["most"]), claims, reply)
        granted = values.granted(claims, reply)
        return _Part(name, granted.units, claims, granted.balances)

    async def _undo(self, parts: Sequence[_Part], hold_id: str) -> None:
        for part in reversed(parts):
            arguments = self._scripts.basic() | {"undo": hold_id}
            await self._link.call(self._scripts.call("lessen", (part.hold,), arguments))
        await self._forget(hold_id)

    async def _equalize(self, parts: Sequence[_Part], claims: Sequence[Claim]) -> Granted:
        """Give back the units that a part has beyond those of the smallest part."""
        units = min(part.units for part in parts)
        for part in parts:
            if part.units > units:
                arguments = self._scripts.basic() | {"units": part.units - units}
                [reply] = await self._link.call(self._scripts.call("lessen", (part.hold,), arguments))
                if reply is not None:
                    part.balances = values.balances(part.claims, *reply)
        balance = {one.key: one for part in parts for one in part.balances}
        return Granted(units, tuple(balance[claim.key] for claim in claims))

    # --- open holds ---------------------------------------------------------------------------------------------------

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        home = await self._find_home(hold_id)
        opened = await self._read_hold(hold_id, home) if home is not None else None
        if home is None or opened is None:
            return None
        parts: list[_Part] = []
        for tag, claims in _by_tag(home, opened.hold.claims):
            name = self._keys.hold(hold_id, tag)
            arguments = self._scripts.basic() | {"units": parts[-1].units if parts else units}
            [reply] = await self._link.call(self._scripts.call("extend", (name,), arguments))
            if reply is None:
                # The call is being settled.
                return None
            granted = values.granted(claims, reply)
            parts.append(_Part(name, granted.units, claims, granted.balances))
        return await self._equalize(parts, opened.hold.claims)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        held = await asyncio.gather(*(self._renew(hold_id, tokens) for hold_id, tokens in noted.items()))
        return frozenset(one for one, is_held in zip(noted, held, strict=True) if not is_held)

    async def _renew(self, hold_id: str, tokens: int) -> bool:
        """Renew one hold; return False if it does not exist."""
        home = await self._find_home(hold_id)
        if home is None:
            return False
        arguments = {"noted": [tokens], "ids": [hold_id]}
        command = self._scripts.call("renew", (self._keys.hold(hold_id, home),), arguments)
        [[lease]] = await self._link.call(command)
        if lease:
            deadlines = self._keys.shard_of(hold_id)[:1]
            await self._link.call(self._scripts.call("prolong", deadlines, {"lease": lease, "id": hold_id}))
        return bool(lease)

    async def overdue(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue_holds`."""
        asked = {"limit": limit + len(self._unread)}
        shards = (self._scripts.call("overdue", self._keys.shard(one), asked) for one in range(SHARDS))
        replies = await asyncio.gather(*(self._link.call(command) for command in shards))
        found: list[OpenHold] = []
        for jumps, [(now, pairs)] in zip(self._clock_jumps, replies, strict=True):
            jumps.check(now)
            for hold_id, tag in pairs:
                if len(found) < limit:
                    found += await self._overdue_hold(hold_id.decode(), tag.decode(), jumps)
        return found

    async def _overdue_hold(self, hold_id: str, home: str, jumps: ClockJumps) -> list[OpenHold]:
        """Return a hold whose lease is over; an empty list if its worker may still renew it, or it does not exist."""
        with self._unread.passed_over(hold_id):
            *row, lease = await self._row(hold_id, home)
            if jumps.may_be_renewed(lease):
                return []
            opened = values.opened(row)
            if opened is not None:
                return [opened]
            # It was never taken, or was settled by a worker that ended before it removed the entry.
            await self._list_settled(hold_id, home)
            await self._forget(hold_id)
        return []

    async def _list_settled(self, call_id: str, home: str) -> None:
        """List a call if it is settled, because its worker may have ended before it did so."""
        row, (last, *sums) = await self._link.call(
            ("HGET", self._keys.calls(home)[1], call_id),
            ("HMGET", self._keys.session(home), "last", *values.TOTALS),
        )
        if row is not None:
            record = decode_record(row, call_id, session_of(home))
            await self._link.call(*self._index_commands(record, home, (1, sums, last, None)))

    async def _find_home(self, hold_id: str) -> str | None:
        [tag] = await self._link.call(("HGET", self._keys.shard_of(hold_id)[1], hold_id))
        return None if tag is None else tag.decode()

    async def _read_hold(self, hold_id: str, home: str) -> OpenHold | None:
        *row, _ = await self._row(hold_id, home)
        return values.opened(row)

    async def _row(self, hold_id: str, home: str) -> Sequence[bytes | None]:
        [row] = await self._link.call(("HMGET", self._keys.hold(hold_id, home), "u", "n", "v", "l"))
        fields: Sequence[bytes | None] = row
        return fields

    async def _forget(self, hold_id: str) -> None:
        await self._link.call(*self._forget_commands(hold_id))

    def _forget_commands(self, hold_id: str) -> list[Command]:
        deadlines, places = self._keys.shard_of(hold_id)
        return [("ZREM", deadlines, hold_id), ("HDEL", places, hold_id)]

    # --- settling -----------------------------------------------------------------------------------------------------

    async def settle(
        self, record: CallRecord, update: StateUpdate | None, claims: Sequence[Claim]
    ) -> Settlement | StoredState:
        """See `Store.settle_and_read`."""
        home = home_of(record)
        reply = await self._settle(record, home, None, update)
        if reply[0] == _HAS_PARTS:
            opened = values.opened(reply[1:])
            held = [claim.key for claim in opened.hold.claims] if opened is not None else []
            reply = await self._settle(record, home, held, update)
        newer = values.newer_state(reply)
        if newer is not None:
            return newer  # the next try skips the accounts on other servers, which are charged already
        after = [*self._index_commands(record, home, reply), *self._forget_commands(record.call_id)]
        _, balances = await asyncio.gather(self._link.call(*after), self._read_balances(claims))
        return settlement(record, reply, balances)

    async def _settle(
        self, record: CallRecord, home: str, held: Sequence[AccountKey] | None, update: StateUpdate | None
    ) -> Sequence[Any]:
        """Run the settlement, and return the reply of settle.lua.

        `held`: the accounts of the hold. None: assume that these are the charged accounts, which settle.lua checks.
        """
        accounts: dict[str, list[AccountKey]] = {tag_of_account(key): [] for key in held or ()}
        for key in record.accounts:
            accounts.setdefault(tag_of_account(key), []).append(key)
        at_home = accounts.pop(home, [])
        tag = usage_tag(record.call_id)
        await asyncio.gather(
            self._settle_part(tag, (), record, self._scripts.usage(record, tag)),
            *(self._settle_part(tag, keys, record) for tag, keys in accounts.items()),
        )
        arguments = self._scripts.settle_arguments(record, values.accounts_of(at_home, self._keys))
        if held is None:
            arguments["others"] = _joined(accounts)
        names = (self._keys.hold(record.call_id, home), *self._keys.all_of(home))
        [reply] = await self._link.call(self._scripts.settle(names, arguments, record, update))
        fields: Sequence[Any] = reply
        return fields

    async def _read_balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...] | None:
        """Return the balances after a settlement; None if they cannot be read, as the call is settled anyway."""
        with contextlib.suppress(StoreUnavailable):
            return self.balances(claims, await self._link.call(*self.ask_balances(claims)))
        return None

    async def _settle_part(
        self, tag: str, accounts: Sequence[AccountKey], record: CallRecord, usage: Mapping[str, Any] | None = None
    ) -> None:
        names = (self._keys.hold(record.call_id, tag), self._keys.settled(tag, record.call_id))
        arguments = self._scripts.basic() | {
            "id": record.call_id,
            "lost": record.outcome if record.is_provisional else False,
            "spent": values.spent(record),
            "accounts": values.accounts_of(accounts, self._keys),
            **(usage or {}),
        }
        await self._link.call(self._scripts.call("settle_part", names, arguments))

    def _index_commands(self, record: CallRecord, home: str, reply: Sequence[Any]) -> list[Command]:
        """Return commands that list the call and its session.

        A call that was settled before is listed as well, as the worker that settled it may have died before it did so.
        """
        is_new, sums, last, _ = reply
        index, ttl = self._scripts.index(record), self._scripts.ttl_ms
        commands: list[Command] = [
            ("SET", index["id"], home, "PX", ttl),
            ("ZADD", index["oldest"], "LT", index["began"], home),
        ]
        commands += [self._add_place(name, index["place"], NAMESAKES) for name in index["named"]]
        commands += [self._add_place(names["calls"], index["place"], MOST_LATEST) for names in index["lists"]]
        if last is not None:
            scores: tuple[tuple[Sort, bytes | None], ...] = (("recent", last), ("tokens", sums[3]), ("cost", sums[12]))
            commands += [
                self._rank(names[sort], index["member"], score or b"0", grows=sort == "recent")
                for names in index["lists"]
                for sort, score in scores
            ]
        if is_new:
            arguments = self._scripts.basic() | {"most": MOST_LATEST}
            entry = values.entry(record.call_id, home, sums)
            commands.append(self._scripts.call("note", self._keys.latest, arguments, entry))
        return commands

    def _add_place(self, name: str, place: str, most: int) -> Command:
        return self._scripts.call("name", (name,), {"place": place, "most": most, "ttl": self._scripts.ttl_ms})

    def _rank(self, name: str, member: str, score: bytes, *, grows: bool) -> Command:
        arguments = {"member": member, "score": score.decode(), "grows": grows, "ttl": self._scripts.ttl_ms}
        return self._scripts.call("rank", (name,), arguments)

    def ask_balances(self, claims: Sequence[Claim]) -> list[Command]:
        """See `LedgerOperations`. One command for each account, as they may be on different servers."""
        return [self._scripts.call("standings", (self._keys.account(claim.key),), {}) for claim in claims]

    def balances(self, claims: Sequence[Claim], replies: Sequence[Any]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        return tuple(
            balance
            for claim, (now, rows) in zip(claims, replies, strict=True)
            for balance in values.balances((claim,), now, rows)
        )


def _joined(tags: Iterable[str]) -> str:
    """Return the tags of a hold's other parts as its home stores them."""
    return " ".join(sorted(tags))


def _by_tag(home: str, claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    """Group claims by the tag of their accounts: first those of the home, even if none, then the others in order."""
    at_home = [claim for claim in claims if tag_of_account(claim.key) == home]
    others = [claim for claim in claims if tag_of_account(claim.key) != home]
    grouped: dict[str, list[Claim]] = {home: at_home}
    for tag, claims_of_tag in groupby(others, lambda claim: tag_of_account(claim.key)):
        grouped.setdefault(tag, []).extend(claims_of_tag)
    return list(grouped.items())


if TYPE_CHECKING:
    _: type[LedgerOperations] = PerSlotLedger
