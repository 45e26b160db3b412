"""A gateway with fake providers, store and observers: nothing leaves the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import count
from typing import Any

from gateway.app.assembly import assemble
from gateway.budget.reservation import Budgets
from gateway.call.types import Caller, ClientResponse, Incoming, SessionPolicy
from gateway.config import families
from gateway.context.planner import Planner
from gateway.context.summaries import SUMMARY_S
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.context_budget import ContextPolicy, SummaryModel
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.heuristic import CharacterCounter
from gateway.core.errors import StoreUnavailable
from gateway.core.http.headers import Headers, ProviderAddress
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import Balance, Claim, Granted, Refused
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer
from gateway.core.pricing import price_per_million
from gateway.core.record import CallRecord
from gateway.core.routing import ModelFacts, ModelRule, Route, Routes
from gateway.core.runaway import RunawayAlert, RunawayPolicy
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.steps import Agent
from gateway.core.stored import CallStart, OpenHold, StepEnding
from gateway.core.usage import Totals
from gateway.dialects import endpoint
from gateway.stores.fallback import FallbackStore
from gateway.stores.learner import Learner
from gateway.stores.leases import Leases
from gateway.stores.memory import MemoryStore
from gateway.stores.settler import Settler
from tests.support.scripted import completion

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello there"}]}'
STREAM = BODY[:-1] + b',"stream":true}'
KEY = SessionKey("alice", "s")
JSON: Headers = [(b"content-type", b"application/json; charset=utf-8")]
ROUTES = Routes([ModelRule("q-*", "q", "q-real")], ["p", "q"], "p")
PRICE = price_per_million(input=Decimal(1), output=Decimal(10))
SSE: Headers = [(b"content-type", b"text/event-stream")]


@dataclass
class FakeReply:
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = field(default_factory=lambda: JSON)
    pieces: Sequence[bytes | Exception | None] = (completion(),)
    """None: the stream stays silent from there."""

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if piece is None:
                await asyncio.sleep(60)
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield piece


@dataclass
class FakeUpstream:
    answer: Callable[[Outgoing], FakeReply] = lambda _: FakeReply()
    sent: list[Outgoing] = field(default_factory=list)
    open: int = 0

    @asynccontextmanager
    async def send(self, request: Outgoing) -> AsyncIterator[FakeReply]:
        self.sent.append(request)
        request.on_work(is_so=True)
        answer = self.answer(request)
        self.open += 1
        try:
            yield answer
        finally:
            self.open -= 1

    async def aclose(self) -> None:
        pass


class Recorder(Observer):
    def __init__(self) -> None:
        self.records: list[tuple[CallRecord, Totals | None]] = []
        self.alerts: list[RunawayAlert] = []

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        self.records.append((call, totals))

    def warned(self, alert: RunawayAlert) -> None:
        self.alerts.append(alert)


class Failing(Observer):
    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        raise RuntimeError("an observer's bug")


class UnavailableStore(MemoryStore):
    """A memory store that can be unavailable.

    - `responds_late`: it reserves, but responds a minute later.
    - `loses_response`: it reserves, but its response is lost.
    - `is_slow`: it takes a minute to settle.
    - `fails_updates`: it does not change the state of sessions.
    """

    away = False
    responds_late = False
    loses_response = False
    is_slow = False
    is_settling = False
    fails_updates = False
    settled = 0

    def __init__(self) -> None:
        super().__init__()
        #: names of the reads of sessions and accounts, in order
        self.asked: list[str] = []
        #: names of the requests that failed because the store was unavailable
        self.missed: list[str] = []

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        await asyncio.sleep(0)
        if self.is_slow:
            self.is_settling = True
            await asyncio.sleep(60)
        if self.away:
            raise StoreUnavailable("away")
        self.settled += 1
        return await super().settle(record, ending)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        self._access("update")
        if self.fails_updates:
            raise StoreUnavailable("no answer in time")
        return await super().update(session, change)

    async def totals(self, session: SessionKey) -> Totals:
        self._access("totals", is_read=True)
        return await super().totals(session)

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        asked = [*self.asked, "opening"]
        found = await super().open_call(session, claims, with_totals=with_totals, above=above)
        self.asked = asked
        return found

    async def remembered(self, session: SessionKey) -> Remembered:
        self._access("remembered", is_read=True)
        return await super().remembered(session)

    async def call_of_response(self, namespace: str, answer: str) -> CallRecord | None:
        self._access("answered", is_read=True)
        return await super().call_of_response(namespace, answer)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        self._access("reserve")
        granted = await super().reserve(opened, lease_s)
        if self.responds_late:
            await asyncio.sleep(60)
        if self.loses_response:
            raise StoreUnavailable("no answer in time")
        return granted

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        self._access("standings", is_read=True)
        return await super().balances(claims)

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        self._access("missing_results")
        return await super().missing_results(session, handles)

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        self._access("keep_results")
        return await super().keep_results(session, texts, most)

    async def ping(self) -> None:
        self._access("ping")

    def _access(self, name: str, *, is_read: bool = False) -> None:
        if is_read:
            self.asked.append(name)
        if self.away:
            self.missed.append(name)
            raise StoreUnavailable("away")


class World:
    """A gateway of fakes. Models named "q-…" go to provider q, which has a price and a key; others go to provider p."""

    def __init__(
        self,
        policy: SessionPolicy | None = None,
        budget: BudgetPolicy | None = None,
        context: ContextPolicy | None = None,
        *,
        summary_s: float = SUMMARY_S,
        result_model: SummaryModel | None = None,
        agents: Mapping[str, Agent] | None = None,
        runaway: RunawayPolicy | None = None,
        store: UnavailableStore | None = None,
        upstream: FakeUpstream | None = None,
        routes: Routes = ROUTES,
        facts: Callable[[Route], ModelFacts] = lambda route: ModelFacts(price=PRICE if route.provider == "q" else None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstream, self.store, self.recorder = upstream or FakeUpstream(), store or UnavailableStore(), Recorder()
        self.settler = Settler(self.store)
        fallback = FallbackStore(self.store, self.settler.availability)
        self.providers = {
            "p": ProviderAddress("p", "http://p/v1", "none"),
            "q": ProviderAddress("q", "http://q/v1", key="held"),
        }
        ids = count(1)
        #: records that are settled later if the worker dies while the store is unavailable
        self.noted: Sequence[CallRecord] = ()
        self.leases = Leases(
            fallback,
            self.settler.settle,
            lease_s=60,
            availability=self.settler.availability,
            note=self._note,
        )
        #: seconds by which the worker's clock is ahead of the machine's clock
        self.ahead_s = 0.0
        self.learner = learner = Learner(self.store, now=lambda: time.time() + self.ahead_s)
        planner = Planner(
            Estimator(families(), lambda _: CharacterCounter(), CountCache()),
            lambda _: True,
            learner,
            context or ContextPolicy(),
            clock=time.monotonic,
        )
        self.gateway = assemble(
            routes=routes,
            providers=self.providers,
            upstreams=dict.fromkeys(self.providers, self.upstream),
            facts=facts,
            store=fallback,
            settler=self.settler,
            planner=planner,
            budgets=Budgets(
                fallback,
                self.leases,
                budget or BudgetPolicy(),
                time.time,
            ),
            results=ToolResultRenderer(fallback, 2**26),
            learner=learner,
            observers=[Failing(), self.recorder],
            policy=policy or SessionPolicy(),
            totals_comment=lambda totals, *_: b": %d\n\n" % totals.total_tokens,
            new_id=lambda: f"id-{next(ids)}",
            clock=clock,
            summary_s=summary_s,
            result_model=result_model,
            agents=agents,
            runaway=runaway,
        )
        self._requests = count(1)

    def incoming(self, body: bytes = BODY, path: str = "chat/completions", **changes: Any) -> Incoming:
        number = next(self._requests)
        plain = Incoming(
            call_id=f"call-{number}",
            request_id=f"request-{number}",
            method="POST",
            path=path,
            query="",
            headers=[(b"x-session-id", b"s"), (b"content-type", b"application/json")],
            body=body,
            decompressed=False,
            endpoint=endpoint("POST", path),
            caller=Caller("alice"),
            path_session=None,
            started=self.gateway.clock(),
        )
        return replace(plain, **changes)

    async def _note(self, records: Sequence[CallRecord]) -> None:
        self.noted = records

    async def call(self, incoming: Incoming | None = None) -> tuple[ClientResponse, bytes]:
        """Return a response and its whole body, as a client gets it that stays connected."""
        async with self.gateway.handle(incoming or self.incoming()) as reply:
            return reply, await whole(reply)

    @property
    def record(self) -> CallRecord:
        """Return the only record."""
        [(record, _)] = self.recorder.records
        return record


async def whole(reply: ClientResponse) -> bytes:
    if isinstance(reply.body, bytes):
        return reply.body
    return b"".join([piece async for piece in reply.body])
