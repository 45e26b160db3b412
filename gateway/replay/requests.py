"""Trim recorded requests with a configuration, and compute what that costs.

Nothing is sent, no model is called. A line of a recording is a request body, or an object that holds one as `body` or
`request`; `session` (or what the body itself says) tells conversations apart. What a provider would have cached is
reckoned as its prompt cache works: the messages that stand unchanged at the beginning of the request before, from
1,024 tokens on (https://platform.openai.com/docs/guides/prompt-caching).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from decimal import Decimal
from itertools import takewhile
from operator import eq
from typing import Any, Final

import msgspec

from gateway.call.types import PlanRequest
from gateway.context.inspector import Inspector
from gateway.core import identity
from gateway.core.context_budget import ContextOptions
from gateway.core.conversation.message import plain
from gateway.core.counting.request import ITEMS
from gateway.core.fitting.overflow import BudgetTooSmall, ContextOverflow
from gateway.core.pricing import standard_cost
from gateway.core.session import Remembered
from gateway.core.usage import Usage
from gateway.core.values import dataclass
from gateway.core.views import VIEWED
from gateway.dialects.opening import opening_items
from gateway.replay.records import is_record, values_in

#: tokens from which on a provider caches the beginning of a prompt
_LEAST_CACHED: Final = 1_024
#: where a line may hold its body
_BODIES: Final = ("body", "request")
_SESSIONS: Final = ("session", "session_id")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recording. `line`: where it stands."""

    line: int
    session: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as it would go out. `cached`: of its tokens, those the provider would have had already."""

    tokens: int
    cached: int
    cost_usd: Decimal | None


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One request and what would have become of it.

    Attributes:
        original: sent as it came.
        sent: sent as it was decided; None where it would have been refused.
        budget: input tokens it was allowed; None: nothing limits it.
        trimmed: number of messages by the rule that changed them.
        cut: it does not begin with all that was sent of the request before it.
        refusal: why it would have been refused.
    """

    session: str
    original: SentRequest
    sent: SentRequest | None
    budget: int | None = None
    trimmed: Mapping[str, int] = field(default_factory=dict)
    cut: bool = False
    refusal: str | None = None


def read_lines(
    lines: Iterable[bytes], *, whole: bool, complain: Callable[[int, str], None]
) -> Iterator[RecordedRequest]:
    """The requests of a recording, in order. `whole`: each is a whole conversation, of which every call is made anew.

    `complain` is told of lines that hold no request; they are passed over.
    """
    for number, value in values_in(lines, complain):
        try:
            session, body = _request_in(value)
        except ValueError as error:
            complain(number, str(error))
            continue
        bodies = _turns(body) if whole else [body]
        for one in bodies:
            try:
                written = json.dumps(one, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                complain(number, "holds half a character (a lone surrogate), which no provider takes")
                break
            yield RecordedRequest(number, session or _session_of(one, number), written)


def _request_in(value: Any) -> tuple[str | None, dict[str, Any]]:
    """Session, where one is named, and body.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")  # noqa: TRY004  # of a line of text
    body = next((value[name] for name in _BODIES if isinstance(value.get(name), dict)), value)
    if not any(name in body for name in ITEMS.values()):
        if is_record(value):
            raise ValueError("is a record of a call, which holds no text: read it with --records")
        raise ValueError('holds no request: neither "messages" nor "input" nor "prompt"')
    if body is value:
        return None, body
    return next((value[name] for name in _SESSIONS if isinstance(value.get(name), str)), None), body


def _session_of(body: Mapping[str, Any], number: int) -> str:
    named = identity.from_body(body)
    if named is not None:
        return named
    array = next((body[name] for name in ("messages", "input") if isinstance(body.get(name), list)), None)
    if array is None:
        return f"line-{number}"
    opening = opening_items(msgspec.Raw(json.dumps(array).encode()))
    return identity.derive("", None, opening)


def _turns(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The calls that a whole conversation was made of: one for each answer of the model, and the one that came last."""
    name = next((name for name in ("messages", "input") if isinstance(body.get(name), list)), None)
    if name is None:
        yield body
        return
    items = body[name]
    for index in range(1, len(items)):
        if _is_answer(items[index]) and not _is_answer(items[index - 1]):
            yield {**body, name: items[:index]}
    if not items or not _is_answer(items[-1]):
        yield body


def _is_answer(item: Any) -> bool:
    """Whether the model said it."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    is_call = isinstance(kind, str) and (kind.endswith("_call") or kind == "reasoning")
    return is_call or item.get("role") == "assistant"


@dataclass(slots=True)
class _Session:
    """What is known of a session while it is replayed."""

    remembered: Remembered = field(default_factory=Remembered)
    original: Sequence[bytes] = ()
    sent: Sequence[bytes] = ()


class Replay:
    """Replays requests, of any number of sessions, in the order they are given.

    `budget`: input tokens of a call, if lower than what the configuration says; `model`: to plan for, instead of each
    request's own.
    """

    def __init__(self, inspector: Inspector, *, budget: int | None, model: str | None) -> None:
        self._inspector = inspector
        self._options = ContextOptions(trim="auto", budget=budget)
        self._model = model
        self._sessions: dict[str, _Session] = {}

    async def turn(self, recorded: RecordedRequest) -> ReplayedTurn:
        """What would have become of a request.

        Raises:
            InvalidRequest: it is no request that could be weighed.
            UnknownModel: nobody serves its model.
        """
        known = self._sessions.setdefault(recorded.session, _Session())
        call, asked = self._inspector.read(recorded.body, model=self._model, options=self._options)
        original, known.original, _ = await self._sent(asked, known.original)
        if asked.contents.wire not in VIEWED:
            return ReplayedTurn(recorded.session, original, original)
        try:
            body, plan = await self._inspector.trim(call, asked, known.remembered)
        except (ContextOverflow, BudgetTooSmall) as refusal:
            return ReplayedTurn(recorded.session, original, None, refusal=refusal.message)
        if plan.trim_decision is not None:
            state = known.remembered.state.with_trim_decision(plan.trim_decision, instead_of=plan.resumed)
            known.remembered = replace(known.remembered, state=state)
        if body is not call.body:
            _, asked = self._inspector.read(body, model=self._model, wire=asked.contents.wire, options=self._options)
        sent, known.sent, is_cut = await self._sent(asked, known.sent)
        return ReplayedTurn(recorded.session, original, sent, plan.context.budget, plan.context.trimmed, is_cut)

    async def _sent(self, asked: PlanRequest, before: Sequence[bytes]) -> tuple[SentRequest, Sequence[bytes], bool]:
        """A request as it would go out; its messages; whether it no longer begins with those `before` it."""
        counted = await self._inspector.count(asked, Remembered(), ["items"])
        messages = [plain(raw) for raw in asked.contents.messages or ()]
        same = sum(1 for _ in takewhile(bool, map(eq, messages, before)))
        tokens, total = [item["tokens"] for item in counted["items"]], counted["tokens"]
        cached = min(total, sum(tokens[:same]) + counted["definition_tokens"]) if same else 0
        cached = cached if cached >= _LEAST_CACHED else 0
        price, usage = asked.facts.price, replace(Usage.of(total, 0), cache_read_tokens=cached)
        paid = standard_cost(usage, price) if price is not None else None
        return SentRequest(total, cached, paid), messages, same < len(before)


@dataclass(slots=True)
class RequestSums:
    """What all turns of a session, or of all, come to. `cost_usd` is None where a price is unknown."""

    turns: int = 0
    refused: int = 0
    trimmed: int = 0
    cuts: int = 0
    original: int = 0
    sent: int = 0
    original_cached: int = 0
    sent_cached: int = 0
    original_usd: Decimal | None = Decimal(0)
    sent_usd: Decimal | None = Decimal(0)
    rules: Counter[str] = field(default_factory=Counter)

    def add(self, turn: ReplayedTurn) -> None:
        """One more turn. A refused one sends nothing; what it came with is left out of both sides."""
        self.turns += 1
        if turn.sent is None:
            self.refused += 1
            return
        self.trimmed += bool(turn.trimmed)
        self.cuts += turn.cut
        self.original += turn.original.tokens
        self.sent += turn.sent.tokens
        self.original_cached += turn.original.cached
        self.sent_cached += turn.sent.cached
        self.original_usd = _plus(self.original_usd, turn.original.cost_usd)
        self.sent_usd = _plus(self.sent_usd, turn.sent.cost_usd)
        self.rules.update(turn.trimmed)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "requests": self.turns,
            "refused": self.refused,
            "trimmed": self.trimmed,
            "cuts": self.cuts,
            "as_it_came": {
                "tokens": self.original,
                "cached": self.original_cached,
                "cost_usd": _usd(self.original_usd),
            },
            "as_sent": {"tokens": self.sent, "cached": self.sent_cached, "cost_usd": _usd(self.sent_usd)},
            "rules": dict(self.rules),
        }


def _plus(total: Decimal | None, one: Decimal | None) -> Decimal | None:
    return total + one if total is not None and one is not None else None


def _usd(value: Decimal | None) -> str | None:
    return f"{value:.6f}" if value is not None else None
