"""Trim recorded requests with a configuration, and compute their cost.

Nothing is sent and no model is called. A line of a recording is a request body, or an object with one in `body` or
`request`. `session`, or the session id in the body, distinguishes conversations. The cached tokens are computed like
those of a provider's prompt cache: the common prefix of messages with the request before, if it has at least 1,024
tokens (https://platform.openai.com/docs/guides/prompt-caching).
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
from gateway.core.conversation.message import without_cache_marks
from gateway.core.counting.request import ITEMS
from gateway.core.pricing import standard_cost
from gateway.core.session import Remembered
from gateway.core.trimming.overflow import BudgetTooSmall, ContextOverflow
from gateway.core.usage import Usage
from gateway.core.values import dataclass
from gateway.core.views import VIEWED
from gateway.dialects.opening import identifying_texts
from gateway.replay.records import is_record, values_in

#: the shortest prefix of a prompt that a provider caches, in tokens
_LEAST_CACHED: Final = 1_024
#: fields of a line that can hold its body
_BODIES: Final = ("body", "request")
_SESSIONS: Final = ("session", "session_id")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recording. `line`: its line number."""

    line: int
    session: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The cost of a request. `cached`: those of its tokens that the provider would read from its cache."""

    tokens: int
    cached: int
    cost_usd: Decimal | None


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """The result of one request.

    Attributes:
        original: the request sent unchanged.
        sent: the request after trimming; None if it would have been refused.
        budget: the input tokens that it was allowed; None: unlimited.
        trimmed: number of messages by the rule that changed them.
        cut: its prefix is not all of what was sent for the request before it.
        refusal: why it would have been refused; None if not.
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
    """Yield the requests of a recording in order. Lines without one are skipped and passed to `complain`.

    `whole`: each line is a whole conversation, and all its calls are yielded.
    """
    for number, value in values_in(lines, complain):
        try:
            session, body = _request_in(value)
        except ValueError as error:
            complain(number, str(error))
            continue
        bodies = _turns(body) if whole else [body]
        for call_body in bodies:
            try:
                raw = json.dumps(call_body, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                complain(number, "contains half a character (a lone surrogate), which no provider accepts")
                break
            yield RecordedRequest(number, session or _session_of(call_body, number), raw)


def _request_in(value: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the named session, or None, and the body.

    Raises:
        ValueError: there is no body.
    """
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004  # an invalid line of text
    body = next((value[name] for name in _BODIES if isinstance(value.get(name), dict)), value)
    if not any(name in body for name in ITEMS.values()):
        if is_record(value):
            raise ValueError("is a record of a call, which has no text: use --records")
        raise ValueError('is not a request: it has neither "messages" nor "input" nor "prompt"')
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
    opening = identifying_texts(msgspec.Raw(json.dumps(array).encode()))
    return identity.derive("", None, opening)


def _turns(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a whole conversation: one per response of the model, and one for what follows it."""
    name = next((name for name in ("messages", "input") if isinstance(body.get(name), list)), None)
    if name is None:
        yield body
        return
    items = body[name]
    for index in range(1, len(items)):
        if _is_from_model(items[index]) and not _is_from_model(items[index - 1]):
            yield {**body, name: items[:index]}
    if not items or not _is_from_model(items[-1]):
        yield body


def _is_from_model(item: Any) -> bool:
    """Return whether the model produced an item."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    is_call = isinstance(kind, str) and (kind.endswith("_call") or kind == "reasoning")
    return is_call or item.get("role") == "assistant"


@dataclass(slots=True)
class _Session:
    """The state of a session during a replay."""

    remembered: Remembered = field(default_factory=Remembered)
    original: Sequence[bytes] = ()
    sent: Sequence[bytes] = ()


class Replay:
    """Replay requests of any number of sessions, in the given order.

    `budget`: most input tokens of a call, if lower than configured. `model`: the model to assume instead of the
    request's own.
    """

    def __init__(self, inspector: Inspector, *, budget: int | None, model: str | None) -> None:
        self._inspector = inspector
        self._options = ContextOptions(trim="auto", budget=budget)
        self._model = model
        self._sessions: dict[str, _Session] = {}

    async def turn(self, recorded: RecordedRequest) -> ReplayedTurn:
        """Return the result of a request.

        Raises:
            InvalidRequest: its tokens cannot be counted.
            UnknownModel: no provider serves its model.
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
        """Return the cost of a request, its messages, and whether they lack the prefix `before`."""
        counted = await self._inspector.count(asked, Remembered(), ["items"])
        messages = [without_cache_marks(raw) for raw in asked.contents.messages or ()]
        same = sum(1 for _ in takewhile(bool, map(eq, messages, before)))
        tokens, total = [item["tokens"] for item in counted["items"]], counted["tokens"]
        cached = min(total, sum(tokens[:same]) + counted["definition_tokens"]) if same else 0
        cached = cached if cached >= _LEAST_CACHED else 0
        price, usage = asked.facts.price, replace(Usage.of(total, 0), cache_read_tokens=cached)
        paid = standard_cost(usage, price) if price is not None else None
        return SentRequest(total, cached, paid), messages, same < len(before)


@dataclass(slots=True)
class RequestSums:
    """The sums of the turns of a session, or of all sessions. Costs are None if a price is unknown."""

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
        """Add a turn. A refused turn sends nothing, so its original tokens are not added either."""
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
        """Return the sums as JSON."""
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


def _plus(total: Decimal | None, cost: Decimal | None) -> Decimal | None:
    return total + cost if total is not None and cost is not None else None


def _usd(value: Decimal | None) -> str | None:
    return f"{value:.6f}" if value is not None else None
