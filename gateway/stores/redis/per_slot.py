"""Reserve and settle in parts, if the keys are on different servers of a cluster.

A hold is taken part by part: first where its call is at home, which keeps where the others will lie, then on the other
accounts in the order of the claims; what was taken is given back when a later part is refused. A hold is listed before
it is taken, and never taken after its lease has ended: should this process end in between, it is overdue like any
other. A settlement does what is on other servers first and the session last, each once; offered again it goes on where
it had stopped.
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
from gateway.stores.damage import UnreadHolds
from gateway.stores.redis import values
from gateway.stores.redis.clock_jumps import ClockJumps
from gateway.stores.redis.keys import NAMESAKES, SHARDS, tag_of_account
from gateway.stores.redis.link import Link
from gateway.stores.redis.per_server import LedgerScripts, LedgerVerbs, Settlement, home_of, settlement
from gateway.stores.redis.scripts import Command
from gateway.stores.redis.values import StateUpdate, StoredState

#: status of reserve.lua: a part of a hold was not taken, as it came after the end of its lease
_LATE = 2
#: status of settle.lua: nothing was written, as the hold lies on further servers
_ELSEWHERE = 3


@dataclass(slots=True)
class _Part:
    """The part of a hold that lies in one slot. `hold`: its key."""

    hold: str
    units: int
    claims: Sequence[Claim]
    balances: tuple[Balance, ...]


class PerSlotLedger:
    """See the module."""

    def __init__(self, link: Link, clerk: LedgerScripts, moment: Callable[[], float]) -> None:
        self._link = link
        self._clerk = clerk
        self._keys = clerk.keys
        self._unread = UnreadHolds()
        #: of the server that each list of open holds is on
        self._leaps = [ClockJumps(moment) for _ in range(SHARDS)]

    # --- reserving ----------------------------------------------------------------------------------------------------

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        hold, home = opened.hold, home_of(opened.orphaned)
        wanted = _by_tag(home, hold.claims)
        arguments = self._clerk.taking(opened, lease_s) | {"others": _listed(tag for tag, _ in wanted if tag != home)}
        arguments["deadline"] = await self._announce(hold, home, arguments["lease"])
        parts: list[_Part] = []
        # One after the other: of calls that want the last of the same accounts, who gets the first gets them all.
        for tag, claims in wanted:
            part = await self._take(tag, claims, opened, arguments | {"home": tag == home})
            if not isinstance(part, _Part):
                await self._undo(parts, hold.id)
                return await self._surest(part, hold)
            parts.append(part)
            arguments["most"] = part.units
        return await self._level(parts, hold.claims)

    async def _surest(self, found: Refused | StoreDamaged, hold: Hold) -> Refused:
        """The refusal to give in place of one that may pass: an account that was not asked yet may refuse for good.

        Raises:
            StoreDamaged: it is the reason.
        """
        if isinstance(found, StoreDamaged):
            raise found
        if not found.is_passing:
            return found
        balance = self.balances(hold.claims, await self._link.call(*self.ask_balances(hold.claims)))
        sure = refused(balance, hold)
        return found if sure is None or sure.is_passing else sure

    async def _announce(self, hold: Hold, home: str, lease: int) -> int:
        arguments = {"id": hold.id, "tag": home, "lease": lease}
        announce = self._clerk.call("announce", self._keys.shard_of(hold.id), arguments)
        deadline, *_ = await self._link.call(announce, *self._clerk.noticed([claim.key for claim in hold.claims]))
        return int(deadline)

    async def _take(
        self, tag: str, claims: Sequence[Claim], opened: OpenHold, arguments: Mapping[str, Any]
    ) -> _Part | Refused | StoreDamaged:
        hold = opened.hold
        name = self._keys.hold(hold.id, tag)
        settled = self._keys.calls(tag)[0] if arguments["home"] else self._keys.settled(tag, hold.id)
        keys = (name, settled, *(self._keys.account(claim.key) for claim in claims))
        compressed = values.held(hold, claims, self._keys)
        verb = self._clerk.call("reserve", keys, arguments, compressed, values.encode_json(opened))
        try:
            [(status, *reply)] = await self._link.call(verb)
        except StoreDamaged as error:
            return error
        if status == _LATE:
            raise StoreUnavailable("The store took longer than the lease of a hold. Try again shortly.")
        if status == 0:
            return values.refused(replace(hold, most=arguments["most"]), claims, reply)
        granted = values.granted(claims, reply)
        return _Part(name, granted.units, claims, granted.balances)

    async def _undo(self, parts: Sequence[_Part], hold_id: str) -> None:
        for part in reversed(parts):
            await self._link.call(self._clerk.call("lessen", (part.hold,), self._clerk.basic() | {"undo": True}))
        await self._forget(hold_id)

    async def _level(self, parts: Sequence[_Part], claims: Sequence[Claim]) -> Granted:
        """Give back the units that a part has more than the smallest."""
        units = min(part.units for part in parts)
        for part in parts:
            if part.units > units:
                arguments = self._clerk.basic() | {"units": part.units - units}
                [reply] = await self._link.call(self._clerk.call("lessen", (part.hold,), arguments))
                if reply is not None:
                    part.balances = values.balances(part.claims, *reply)
        balance = {one.key: one for part in parts for one in part.balances}
        return Granted(units, tuple(balance[claim.key] for claim in claims))

    # --- open holds ---------------------------------------------------------------------------------------------------

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        home = await self._home(hold_id)
        opened = await self._opened(hold_id, home) if home is not None else None
        if home is None or opened is None:
            return None
        parts: list[_Part] = []
        for tag, claims in _by_tag(home, opened.hold.claims):
            name = self._keys.hold(hold_id, tag)
            arguments = self._clerk.basic() | {"units": parts[-1].units if parts else units}
            [reply] = await self._link.call(self._clerk.call("extend", (name,), arguments))
            if reply is None:
                # It is being settled.
                return None
            granted = values.granted(claims, reply)
            parts.append(_Part(name, granted.units, claims, granted.balances))
        return await self._level(parts, opened.hold.claims)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        held = await asyncio.gather(*(self._renew(hold_id, tokens) for hold_id, tokens in noted.items()))
        return frozenset(one for one, is_held in zip(noted, held, strict=True) if not is_held)

    async def _renew(self, hold_id: str, tokens: int) -> bool:
        """Whether there is such a hold."""
        home = await self._home(hold_id)
        if home is None:
            return False
        arguments = {"noted": [tokens], "ids": [hold_id]}
        verb = self._clerk.call("renew", (self._keys.hold(hold_id, home),), arguments)
        [[lease]] = await self._link.call(verb)
        if lease:
            deadlines = self._keys.shard_of(hold_id)[:1]
            await self._link.call(self._clerk.call("prolong", deadlines, {"lease": lease, "id": hold_id}))
        return bool(lease)

    async def overdue(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue`."""
        asked = {"limit": limit + len(self._unread)}
        shards = (self._clerk.call("overdue", self._keys.shard(one), asked) for one in range(SHARDS))
        replies = await asyncio.gather(*(self._link.call(verb) for verb in shards))
        found: list[OpenHold] = []
        for leaps, [(now, pairs)] in zip(self._leaps, replies, strict=True):
            leaps.look(now)
            for hold_id, tag in pairs:
                if len(found) < limit:
                    found += await self._left(hold_id.decode(), tag.decode(), leaps)
        return found

    async def _left(self, hold_id: str, home: str, leaps: ClockJumps) -> list[OpenHold]:
        """A hold whose lease is over; nothing where its worker may still renew it, or it is no hold any more."""
        with self._unread.passed_over(hold_id):
            *row, lease = await self._row(hold_id, home)
            if leaps.leaves(lease):
                return []
            opened = values.opened(row)
            if opened is not None:
                return [opened]
            await self._forget(hold_id)  # never taken, or settled by one that ended before it could say so
        return []

    async def _home(self, hold_id: str) -> str | None:
        [tag] = await self._link.call(("HGET", self._keys.shard_of(hold_id)[1], hold_id))
        return None if tag is None else tag.decode()

    async def _opened(self, hold_id: str, home: str) -> OpenHold | None:
        *row, _ = await self._row(hold_id, home)
        return values.opened(row)

    async def _row(self, hold_id: str, home: str) -> Sequence[bytes | None]:
        [row] = await self._link.call(("HMGET", self._keys.hold(hold_id, home), "u", "n", "v", "l"))
        found: Sequence[bytes | None] = row
        return found

    async def _forget(self, hold_id: str) -> None:
        await self._link.call(*self._forgetting(hold_id))

    def _forgetting(self, hold_id: str) -> list[Command]:
        deadlines, places = self._keys.shard_of(hold_id)
        return [("ZREM", deadlines, hold_id), ("HDEL", places, hold_id)]

    # --- settling -----------------------------------------------------------------------------------------------------

    async def settle(
        self, record: CallRecord, move: StateUpdate | None, claims: Sequence[Claim]
    ) -> Settlement | StoredState:
        """See `Store.closing`."""
        home = home_of(record)
        reply = await self._settle(record, home, None, move)
        if reply[0] == _ELSEWHERE:
            opened = values.opened(reply[1:])
            held = [claim.key for claim in opened.hold.claims] if opened is not None else []
            reply = await self._settle(record, home, held, move)
        changed = values.kept(reply)
        if changed is not None:
            return changed  # what was done on other servers is done once, and passed over when it is asked for again
        after = [*self._index(record, home, reply), *self._forgetting(record.call_id)]
        _, balance = await asyncio.gather(self._link.call(*after), self._balance(claims))
        return settlement(record, reply, balance)

    async def _settle(
        self, record: CallRecord, home: str, held: Sequence[AccountKey] | None, move: StateUpdate | None
    ) -> Sequence[Any]:
        """What the verb says. `held`: the accounts that the hold lies on; None: on those that are charged, it seems."""
        accounts: dict[str, list[AccountKey]] = {tag_of_account(key): [] for key in held or ()}
        for key in record.accounts:
            accounts.setdefault(tag_of_account(key), []).append(key)
        at_home = accounts.pop(home, [])
        await asyncio.gather(*(self._settle_part(tag, keys, record) for tag, keys in accounts.items()))
        arguments = self._clerk.settling(record, values.accounts_of(at_home, self._keys))
        if held is None:
            arguments["others"] = _listed(accounts)
        names = (self._keys.hold(record.call_id, home), *self._keys.all_of(home))
        [reply] = await self._link.call(self._clerk.settle(names, arguments, record, move))
        found: Sequence[Any] = reply
        return found

    async def _balance(self, claims: Sequence[Claim]) -> tuple[Balance, ...] | None:
        """How accounts stand after a settlement, which is one also where they cannot be read."""
        with contextlib.suppress(StoreUnavailable):
            return self.balances(claims, await self._link.call(*self.ask_balances(claims)))
        return None

    async def _settle_part(self, tag: str, accounts: Sequence[AccountKey], record: CallRecord) -> None:
        names = (self._keys.hold(record.call_id, tag), self._keys.settled(tag, record.call_id))
        arguments = self._clerk.basic() | {
            "lost": record.outcome if record.is_provisional else False,
            "spent": values.spent(record),
            "accounts": values.accounts_of(accounts, self._keys),
        }
        await self._link.call(self._clerk.call("settle_part", names, arguments))

    def _index(self, record: CallRecord, home: str, reply: Sequence[Any]) -> list[Command]:
        """Make the call and its session findable; also where it was settled before, by a worker that may have died."""
        is_new, sums, last, _ = reply
        index, ttl = self._clerk.index(record), self._clerk.ttl_ms
        commands: list[Command] = [
            ("SET", index["id"], home, "PX", ttl),
            ("ZADD", index["oldest"], "LT", index["began"], home),
        ]
        commands += [self._placed(name, index["place"], NAMESAKES) for name in index["named"]]
        commands += [self._placed(names["calls"], index["place"], MOST_LATEST) for names in index["lists"]]
        if last is not None:
            scores: tuple[tuple[Sort, bytes | None], ...] = (("recent", last), ("tokens", sums[3]), ("cost", sums[12]))
            commands += [
                self._ranked(names[sort], index["member"], score or b"0", grows=sort == "recent")
                for names in index["lists"]
                for sort, score in scores
            ]
        if is_new:
            arguments = self._clerk.basic() | {"most": MOST_LATEST}
            entry = values.entry(record.call_id, home, sums)
            commands.append(self._clerk.call("note", self._keys.latest, arguments, entry))
        return commands

    def _placed(self, name: str, place: str, most: int) -> Command:
        return self._clerk.call("name", (name,), {"place": place, "most": most, "ttl": self._clerk.ttl_ms})

    def _ranked(self, name: str, member: str, score: bytes, *, grows: bool) -> Command:
        arguments = {"member": member, "score": score.decode(), "grows": grows, "ttl": self._clerk.ttl_ms}
        return self._clerk.call("rank", (name,), arguments)

    def ask_balances(self, claims: Sequence[Claim]) -> list[Command]:
        """See `LedgerVerbs`. A verb for each, which may go to another server."""
        return [self._clerk.call("standings", (self._keys.account(claim.key),), {}) for claim in claims]

    def balances(self, claims: Sequence[Claim], replies: Sequence[Any]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        return tuple(
            stand
            for claim, (now, rows) in zip(claims, replies, strict=True)
            for stand in values.balances((claim,), now, rows)
        )


def _listed(tags: Iterable[str]) -> str:
    """Where the parts of a hold lie beside its home, as that keeps it."""
    return " ".join(sorted(tags))


def _by_tag(home: str, claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    """The claims by where they lie: those at home first, even if there are none, then the others in their order."""
    at_home = [claim for claim in claims if tag_of_account(claim.key) == home]
    others = [claim for claim in claims if tag_of_account(claim.key) != home]
    found: dict[str, list[Claim]] = {home: at_home}
    for tag, some in groupby(others, lambda claim: tag_of_account(claim.key)):
        found.setdefault(tag, []).extend(some)
    return list(found.items())


if TYPE_CHECKING:
    _: type[LedgerVerbs] = PerSlotLedger
