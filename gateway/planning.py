"""Planning a call: `gateway.core.plan` with what it needs, off the event loop where it takes long.

Small requests are weighed in the loop, which costs less than handing them to a thread. Large ones, and every choice of
what to keep, run in threads, few of them: with more, the loop would wait too long for its turn at the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, TypeVar

from gateway.core.conversation import Conversation
from gateway.core.counting.estimate import Estimate, Estimator
from gateway.core.counting.request import Request, read_request
from gateway.core.fitting.overflow import BudgetTooSmall, ContextOverflow
from gateway.core.fitting.reader import Reader
from gateway.core.fitting.summary import Use
from gateway.core.plan import (
    ContextPolicy,
    Learned,
    Plan,
    Room,
    Scales,
    Weighed,
    Wishes,
    as_it_came,
    budget_of,
    key_of,
    make_room,
    weigh,
)
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered
from gateway.dialects.contents import Contents
from gateway.stores.learner import Learner

T = TypeVar("T")

#: A request up to this size is weighed in the loop: a few milliseconds where nothing of it was ever seen.
_INLINE_BYTES: Final = 32 * 1024
_WEIGHING: Final = 2
_FITTING: Final = 1
#: formats whose messages can be chosen among
FITTED: Final = frozenset({"chat"})
#: for what is known of messages: their blocks, terms and weights
_BOOK_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Asked:
    """One call to be planned. `size`: bytes of its body."""

    contents: Contents
    route: Route
    facts: ModelFacts
    wishes: Wishes
    size: int


class Planner:
    """Plans calls. Shared by all; what it keeps is bounded and belongs to no session."""

    def __init__(
        self,
        estimator: Estimator,
        is_loaded: Callable[[str], bool],
        learner: Learner,
        policy: ContextPolicy,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.policy = policy
        self._estimator = estimator
        self._is_loaded = is_loaded
        self._learner = learner
        self._deadline_s = deadline_s
        self._clock = clock
        self._book = Reader(_no_weights, limit_bytes=_BOOK_BYTES, lock=Lock())
        # A long choice must not keep those waiting who only want to be weighed.
        self._weighing = ThreadPoolExecutor(_WEIGHING, "weighing")
        self._fitting = ThreadPoolExecutor(_FITTING, "fitting")

    async def plan(self, asked: Asked, remembered: Remembered, window: int | None = None, *, use: Use = "off") -> Plan:
        """What to send. `window`: what a provider said just now; `use`: whether a summary may be asked for first."""
        came, learned, conversation = await self._weigh(asked, remembered, window)
        budget = budget_of(self.policy, asked.facts, asked.wishes, learned.window)
        trim = asked.wishes.trim or self.policy.trim
        is_fitted = trim != "off" and asked.contents.wire in FITTED
        if budget is None or conversation is None or not is_fitted or came.fits(budget, self.policy.safety):
            return as_it_came(came, budget)
        room = Room(budget, self.policy, trim == "shadow", remembered.state, learned, self._deadline(), use)
        scales = Scales(self._estimator, self._reader(came.request))
        try:
            return await _run_in(self._fitting, lambda: make_room(came, conversation, room, scales))
        except (ContextOverflow, BudgetTooSmall) as overflow:
            plan = as_it_came(came, budget)
            return plan if trim == "shadow" or self.policy.overflow == "forward" else replace(plan, overflow=overflow)

    async def weigh(self, asked: Asked, remembered: Remembered) -> tuple[Weighed, Learned]:
        """What a request weighs, and what is known from earlier calls."""
        came, learned, _ = await self._weigh(asked, remembered, None)
        return came, learned

    async def _weigh(
        self, asked: Asked, remembered: Remembered, window: int | None
    ) -> tuple[Weighed, Learned, Conversation | None]:
        request = request_of(asked)

        def work() -> tuple[Estimate, Conversation | None]:
            conversation = self._conversation(asked.contents)
            keys = conversation.keys if conversation is not None else None
            return self._estimator.estimate(request, keys=keys), conversation

        is_large = asked.size > _INLINE_BYTES or not self._is_loaded(self._estimator.tokenizer(request))
        estimate, conversation = await _run_in(self._weighing, work) if is_large else work()
        rule = asked.route.rule
        if window is None and (rule is None or rule.facts.window is None):
            # A window that the configuration names is not overruled by what a provider once said.
            window = await self._learner.window(request.provider, request.model)
        learned = await self._learned(request, estimate, remembered, window)
        return weigh(request, estimate, learned), learned, conversation

    def _conversation(self, contents: Contents) -> Conversation | None:
        if contents.messages is None:
            return None
        return Conversation.of(
            contents.messages,
            self._book,
            pinned=contents.pinned,
            priorities=contents.priorities,
            keep_last_turns=self.policy.keep_last_turns,
        )

    async def message_tokens(self, asked: Asked) -> list[int]:
        """What each message weighs."""
        return await _run_in(self._weighing, lambda: self._estimator.message_tokens(request_of(asked)))

    async def _learned(
        self, request: Request, estimate: Estimate, remembered: Remembered, window: int | None
    ) -> Learned:
        key = key_of(request, estimate)
        offsets, surprises = await self._learner.offsets(key), await self._learner.surprises(key)
        return Learned(offsets, surprises, remembered.last_turn, window)

    def _deadline(self) -> Callable[[], bool]:
        end = self._clock() + self._deadline_s
        return lambda: self._clock() > end

    def _reader(self, request: Request) -> Reader:
        """What is known of messages, with the weights of the request's family."""
        bare = Request(wire=request.wire, model=request.model, provider=request.provider, tokenizer=request.tokenizer)
        return self._book.weighing(
            lambda messages: self._estimator.message_tokens(replace(bare, messages=messages)),
            f"{self._estimator.family(request).name}\0{request.tokenizer}",
        )

    def close(self) -> None:
        """Let the threads end; calls that wait for them have been cut by then."""
        for threads in (self._weighing, self._fitting):
            threads.shutdown(wait=False, cancel_futures=True)


async def _run_in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _no_weights(messages: Sequence[bytes]) -> Sequence[int]:
    """Weights depend on the model, see `Planner._reader`."""
    raise AssertionError(f"{len(messages)} messages are weighed without a model")


def request_of(asked: Asked) -> Request:
    """The request as it is weighed."""
    contents = asked.contents
    return read_request(
        contents.wire,
        contents.fields,
        model=asked.route.model,
        provider=asked.route.provider,
        messages=contents.messages,
        tokenizer=asked.facts.tokenizer or "",
    )
