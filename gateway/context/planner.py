"""Count and trim requests, in threads if that takes long.

Requests with little new in them are weighed in the loop, which costs less than handing them to a thread. All others,
and every choice of what to keep, run in threads, few of them: with more, the loop would wait too long for its turn at
the interpreter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Final, NamedTuple, TypeVar

from gateway.call.types import PlanRequest, RequestCounts
from gateway.context.caches import ContextCaches
from gateway.core.context_budget import ContextPolicy, LengthLimit, Trim, budget_of, within
from gateway.core.conversation.message import Hashed, digest
from gateway.core.conversation.units import Conversation
from gateway.core.counting.counted import CountedRequest, Learned, count_tokens, key_of
from gateway.core.counting.estimate import Estimate, Estimator
from gateway.core.counting.families import TokenizerFamily
from gateway.core.counting.largest_part import RequestPart, largest_overhead
from gateway.core.counting.measure import Wire
from gateway.core.counting.overhead import Overhead
from gateway.core.counting.prefix_cache import CachedPrefix, is_worth_keeping
from gateway.core.counting.request import FORM_FIELDS, ITEMS, Piece, RequestParts, key_of_fields, read_request
from gateway.core.counting.sums import MessageSums
from gateway.core.fitting.deadline import DeadlinePassed
from gateway.core.fitting.overflow import BudgetTooSmall, ContextOverflow, TextTooLong
from gateway.core.fitting.preread import due, read_ahead
from gateway.core.fitting.reader import Framing, Reader
from gateway.core.fitting.summary import Use
from gateway.core.modes.unread import ConversationResults, chosen_blocks, results_in, tokens_complete
from gateway.core.plan import InvalidPlan, Plan, Room, Scales, as_it_came, make_room
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered
from gateway.core.thinking import BoundConversation
from gateway.core.views import VIEWED, View, view_of
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.contents import Contents, contents_of
from gateway.dialects.server_state import continued_from, named_in
from gateway.stores.learner import Learner

logger = logging.getLogger("gateway")
T = TypeVar("T")

#: Bytes behind the known beginning of a request that are weighed in the loop: a few milliseconds if all are new.
_INLINE_BYTES: Final = 32 * 1024
#: bytes of a body that is taken apart beside the loop: some three milliseconds
_LARGE_BYTES: Final = 512 * 1024
#: Bytes of a body that is counted after all others of this size. Many of its parts are read by one C call each, which
#: keeps the interpreter for tens of milliseconds: two at once would keep the event loop waiting for too long.
_HUGE_BYTES: Final = 8 * 1024 * 1024
#: threads of each kind
_READING: Final = 1
_COUNTING: Final = 2
_COUNTING_HUGE: Final = 1
_FITTING: Final = 1
#: bytes that one of a schema takes once it is built
_BUILT: Final = 20
#: bytes that a character of a text takes at the most
_CHARACTER: Final = 4
#: tokens: a budget that leaves nothing out, for what was decided under a smaller one
_ENOUGH: Final = 2**40
#: how long a choice may wait for others without losing time of its own, in deadlines
_MOST_WAITED: Final = 5


class _Estimated(NamedTuple):
    request: RequestParts
    estimate: Estimate
    keys: tuple[bytes, ...] | None
    overhead: Overhead | None


class PlannerThreads:
    """Where planning takes long. Several planners may share them, one after the other."""

    def __init__(self) -> None:
        # What takes milliseconds must not wait for what takes seconds.
        self.reading = ThreadPoolExecutor(_READING, "reading")
        # A long choice must not keep those waiting who only want to be weighed.
        self.counts = ThreadPoolExecutor(_COUNTING, "weighing")
        self.huge = ThreadPoolExecutor(_COUNTING_HUGE, "counting-huge")
        self.fitting = ThreadPoolExecutor(_FITTING, "fitting")

    def counting(self, size: int) -> ThreadPoolExecutor:
        """Return the threads that count a body of so many bytes."""
        return self.huge if size > _HUGE_BYTES else self.counts

    def close(self) -> None:
        """Let them end; calls that wait for them have been cut by then."""
        for pool in (self.reading, self.counts, self.huge, self.fitting):
            pool.shutdown(wait=False, cancel_futures=True)


class Planner:
    """Plans calls. Shared by all; what it keeps is in `memory`, None for one of its own.

    `translated`: providers that are sent a chat, whichever format a call came in.
    """

    def __init__(
        self,
        estimator: Estimator,
        is_loaded: Callable[[str], bool],
        learner: Learner,
        policy: ContextPolicy,
        *,
        deadline_s: float,
        clock: Callable[[], float],
        memory: ContextCaches | None = None,
        threads: PlannerThreads | None = None,
        translated: frozenset[str] = frozenset(),
    ) -> None:
        self.policy = policy
        self._keeping = replace(policy, fit=replace(policy.fit, keeps_decisions=True))
        self._estimator = estimator
        self._is_loaded = is_loaded
        self._learner = learner
        self._deadline_s = deadline_s
        self._clock = clock
        memory = memory or ContextCaches()
        #: to look beginnings up in, see `contents_of`
        self.known = memory.known
        self._overhead, self._views, self._book = memory.overhead, memory.views, memory.book
        self._threads = threads or PlannerThreads()
        self._translated = translated
        #: Held while a huge body is planned: its parts take a few times its size meanwhile.
        self.huge_turn = asyncio.Lock()
        self._reading_ahead = Lock()

    async def plan(
        self, asked: PlanRequest, remembered: Remembered, said: LengthLimit | None = None, *, use: Use = "off"
    ) -> Plan:
        """What to send. `said`: by a provider, just now; `use`: whether a summary may be asked for first.

        No call is refused because of what other sessions taught: a refused call reports no usage to correct that.
        """
        counts = await self._count_tokens(asked, remembered, said)
        plan = await self._planned(asked, counts, remembered, use)
        if plan.is_safe or not counts.learned.is_of_others:
            return plan
        alone = await self._planned(asked, counts.alone, remembered, use)
        return alone if alone.is_safe else plan

    async def budget(self, asked: PlanRequest, remembered: Remembered) -> int | None:
        """Return the input tokens that a call may take; None where nothing limits it."""
        counts = await self._count_tokens(asked, remembered, None)
        return budget_of(self.policy, within(asked.facts, asked.options, counts.learned.limit), asked.options)

    async def _planned(self, asked: PlanRequest, counts: RequestCounts, remembered: Remembered, use: Use) -> Plan:
        original, learned, keys, overhead = counts
        facts = within(asked.facts, asked.options, learned.limit)
        budget, window = budget_of(self.policy, facts, asked.options), facts.window
        is_compaction = asks_for_compaction(asked.contents.fields, asked.contents.wire)
        trim = "off" if is_compaction else asked.options.trim or self.policy.trim
        unchanged = as_it_came(original, budget, self.policy.safety, window=window)
        if trim == "off" or (budget is None and not asked.keeps_decisions):
            return unchanged
        if budget is None:
            plan = await self._planned(
                replace(asked, options=replace(asked.options, budget=_ENOUGH)), counts, remembered, use
            )
            return replace(plan, context=replace(plan.context, budget=None))
        if keys is None or asked.contents.wire not in VIEWED:
            return await self._of_one_text(unchanged, asked, original, budget, trim)
        if original.fits(budget, self.policy.safety) and not asked.keeps_decisions:
            self._read_ahead(original, asked.contents, keys, budget)
            return unchanged
        scales, since = Scales(self._estimator, self._reader(original), overhead), self._clock()
        policy = self._keeping if asked.keeps_decisions else self.policy

        def choose() -> Plan:
            deadline, is_shadow = self._deadline(since), trim == "shadow"
            room = Room(budget, policy, is_shadow, remembered.state, learned, deadline, use, asked.salt, window)
            return self._roomy(original, asked, keys, room, scales)

        try:
            plan = await _run_in(self._threads.fitting, choose)
        except InvalidPlan:
            logger.exception("a request is forwarded as it came, though it is over its budget")
            return unchanged
        except (ContextOverflow, BudgetTooSmall) as overflow:
            if trim == "shadow" or self.policy.overflow == "forward":
                return unchanged
            part = await self._largest_overhead(asked)
            return replace(unchanged, overflow=overflow if part is None else overflow.naming(part))
        self._read_ahead(original, asked.contents, keys, budget)
        return plan

    async def _of_one_text(
        self, unchanged: Plan, asked: PlanRequest, original: CountedRequest, budget: int, trim: Trim
    ) -> Plan:
        """The plan for a request without messages to choose among: sent as it came, or refused."""
        tokens = original.expected.tokens
        if tokens <= budget or trim == "shadow" or self.policy.overflow != "error":
            return unchanged
        part = await self._largest_overhead(asked)
        if part is not None and part.tokens <= original.estimate.tokens - original.estimate.overhead:
            part = None
        overflow = TextTooLong(needed=tokens, budget=budget, param=ITEMS[asked.contents.wire], part=part)
        return replace(unchanged, overflow=overflow)

    async def _largest_overhead(self, asked: PlanRequest) -> RequestPart | None:
        """What takes most of a request beside its messages."""
        contents, route = asked.contents, asked.route

        def count_tokens(fields: Mapping[str, Piece]) -> int:
            request = read_request(
                contents.wire, fields, model=route.model, provider=route.provider, messages=(),
                tokenizer=asked.facts.tokenizer or "",
            )  # fmt: skip
            return self._estimator.estimate(request).tokens

        threads = self._threads.counting(asked.size)
        return await _run_in(threads, lambda: largest_overhead(contents.wire, contents.fields, count_tokens))

    def _roomy(
        self, original: CountedRequest, asked: PlanRequest, keys: Sequence[bytes], room: Room, scales: Scales
    ) -> Plan:
        view = self.view(asked.contents, keys)
        # The other formats join neighbours of one role, or take any order.
        is_sent_as_chat = asked.contents.wire == "chat" or asked.route.provider in self._translated
        family = self._estimator.family(original.request)
        takes_turns = is_sent_as_chat and family.turns == "strict"
        bound = view.bound if family.binding == "prefix" else frozenset[int]()
        conversation = self._conversation(view, asked.contents, bound, takes_turns=takes_turns)
        return make_room(original, view, conversation, room, scales)

    def view(self, contents: Contents, keys: Sequence[bytes] | None = None) -> View:
        """Its messages as chat messages. `keys`: of the messages, where they are known."""
        original = Hashed(contents.messages or (), keys, unmarked=_unmarked(contents))
        return view_of(contents.wire, original, self._views)

    def _read_ahead(self, original: CountedRequest, contents: Contents, keys: Sequence[bytes], budget: int) -> None:
        """Have a thread read some of what a coming cut needs. Nobody waits for it, and one at a time is enough."""
        some = due(len(keys), original.expected.tokens / budget)
        if not some or not self._reading_ahead.acquire(blocking=False):
            return
        reader, since = self._reader(original), self._clock()

        def work() -> None:
            try:
                part = Hashed(contents.between(some.start, some.stop), keys[some.start : some.stop])
                read_ahead(view_of(contents.wire, part, self._views).chat, reader, self._deadline(since))
            except Exception:
                logger.exception("messages cannot be read ahead; a cut reads them all the same")
            finally:
                self._reading_ahead.release()

        try:
            self._threads.fitting.submit(work)
        except RuntimeError:
            # The worker is stopping.
            self._reading_ahead.release()

    def is_bound(self, route: Route, wire: Wire) -> bool:
        """Return whether a model binds thinking to its prefix."""
        return self._estimator.families.of(route.model, route.provider, wire).binding == "prefix"

    async def bound(self, contents: Contents) -> BoundConversation | None:
        """Return the conversation for a model that binds thinking to its prefix, or None if it has no messages.

        In the loop where little of it is new: each message is read once.
        """
        if contents.wire not in VIEWED or contents.messages is None:
            return None
        received = Hashed(contents.messages, unmarked=_unmarked(contents))

        def read() -> BoundConversation:
            return BoundConversation(contents.wire, received, book=self._views)

        known = len(contents.start.text) if contents.start is not None else 0
        size = len(contents.array or b"")
        if size - known <= _INLINE_BYTES:
            return read()
        return await _run_in(self._threads.counting(size), read)

    @staticmethod
    def is_large(call: Call) -> bool:
        """Return whether a call's body is not to be gone over in the loop."""
        return len(call.body) > _LARGE_BYTES

    @staticmethod
    def is_huge(call: Call) -> bool:
        """Return whether a call's body is planned while no other of its size is, see `huge_turn`."""
        return len(call.body) > _HUGE_BYTES

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Do work that goes over a body of `size` bytes: in the loop, or in a thread if the body is large."""
        return work() if size <= _LARGE_BYTES else await _run_in(self._threads.reading, work)

    async def contents(self, call: Call, wire: Wire) -> Contents | None:
        """See `contents_of`."""
        size = len(call.body)
        if size <= _LARGE_BYTES:
            return contents_of(call, wire, self.known)
        return await _run_in(self._threads.counting(size), lambda: contents_of(call, wire, self.known))

    async def count_tokens(self, asked: PlanRequest, remembered: Remembered) -> RequestCounts:
        """What a request weighs."""
        return await self._count_tokens(asked, remembered, None)

    async def _count_tokens(
        self, asked: PlanRequest, remembered: Remembered, said: LengthLimit | None
    ) -> RequestCounts:
        if asked.counts is not None and said is None:
            return asked.counts
        request, estimate, keys, overhead = await self._estimated(asked)
        if said is None:
            said = await self._said_before(asked)
        kept = remembered.kept_by(request.provider, continued_from(asked.contents.fields, request.wire))
        key = key_of(request, estimate, kept)
        learned = Learned(*await self._learner.taught(key), remembered.last_turn, said, kept)
        return RequestCounts(count_tokens(request, estimate, learned, key), learned, keys, overhead)

    async def _said_before(self, asked: PlanRequest) -> LengthLimit | None:
        """What a provider said of late, unless the configuration names that limit, which is not overruled by it."""
        rule = asked.route.rule
        configured = rule.facts if rule is not None else ModelFacts()
        if configured.window is not None and configured.input is not None:
            return None
        said = await self._learner.limit(asked.route.provider, asked.limited)
        if said is None or (configured.input if said.of_input else configured.window) is not None:
            return None
        return said

    async def _estimated(self, asked: PlanRequest) -> _Estimated:
        """The request, what it weighs, and the keys of its messages. In the loop where little is new."""
        estimator, key = self._estimator, _key_of(asked)
        known = self._overhead.find(key) if asked.contents.array is not None else None
        request = known.request if known is not None else request_of(asked)
        is_loaded = self._is_loaded(estimator.tokenizer(request))
        if known is not None and not (is_loaded and known.counter.name == estimator.counter(request).name):
            # The configuration has another tokenizer for the model now.
            known = None
        if is_loaded and self._new_bytes(asked, request, known) <= _INLINE_BYTES:
            return self._estimate(asked.contents, request, known, key)
        threads = self._threads.counting(asked.size)
        return await _run_in(threads, lambda: self._estimate(asked.contents, request, known, key))

    def _new_bytes(self, asked: PlanRequest, request: RequestParts, known: Overhead | None) -> int:
        start, array = asked.contents.start, asked.contents.array or b""
        new = asked.size if known is None else len(array)
        if start is None or start.kind != (self._estimator.kind(request) if known is None else known.kind):
            return new
        return new - len(start.text)

    def _estimate(self, contents: Contents, request: RequestParts, known: Overhead | None, key: Hashable) -> _Estimated:
        estimator = self._estimator
        if contents.array is None:
            return _Estimated(request, estimator.estimate(request), None, None)
        overhead = known
        if overhead is None:
            overhead = estimator.overhead(request)
            self._overhead.keep(key, overhead, _size_beside(contents))
        sums, keys = self._sums(overhead, contents)
        return _Estimated(request, estimator.of(overhead, sums), keys, overhead)

    def _sums(self, overhead: Overhead, contents: Contents) -> tuple[MessageSums, tuple[bytes, ...]]:
        """Sums and keys of all messages. Those of all but the last, which clients may yet change, are remembered."""
        estimator, kind = self._estimator, overhead.kind
        # What is fresh has no cache marks any more.
        start, fresh, keys = contents.start, contents.fresh, tuple(map(digest, contents.fresh))
        known, before = (start.keys, start.sums) if start is not None else ((), None)
        if start is not None and start.kind != kind:
            before = estimator.sums(overhead, (contents.messages or ())[: len(known)], known)
        last = max(0, len(fresh) - 1) if is_worth_keeping(contents.array or b"") else 0
        if last > 0:
            before = estimator.sums(overhead, fresh[:last], keys[:last], before)
            elsewhere = named_in(contents.wire, contents.rest, fresh[:last])
            elsewhere |= start.elsewhere if start is not None else frozenset()
            begun = CachedPrefix(contents.settled, contents.bounds, known + keys[:last], kind, before, elsewhere)
            self.known.keep(contents.wire, begun, instead_of=start)
        return estimator.sums(overhead, fresh[last:], keys[last:], before), known + keys

    def _conversation(
        self, view: View, contents: Contents, bound: frozenset[int], *, takes_turns: bool
    ) -> Conversation:
        """Return the conversation that a trim works on; `bound`: messages that must stay unchanged."""
        asked = (contents.priorities or {}).items()
        priorities = {index: priority for place, priority in asked for index in view.indices({place})}
        return Conversation.of(
            view.chat,
            self._book,
            pinned=view.held | bound | view.indices(contents.pinned),
            priorities=dict.fromkeys(view.stale, 0.0) | priorities,
            keep_last_turns=self.policy.keep_last_turns,
            takes_turns=takes_turns,
            tools=[contents.fields[name] for name in ("tools", "functions") if name in contents.fields],
            needed=view.needed,
            following=view.following,
            leading=view.leading,
        )

    async def results_in(self, view: View) -> ConversationResults:
        """Return the tool results of a conversation. In the loop if there is little of it."""
        if sum(map(len, view.messages)) <= _INLINE_BYTES:
            return results_in(view)
        return await _run_in(self._threads.counts, lambda: results_in(view))

    async def tokens_complete(self, asked: PlanRequest, remembered: Remembered, results: Sequence[bytes]) -> int:
        """Return the tokens of results that are shown complete, as tables."""
        reader = self._reader((await self.count_tokens(asked, remembered)).original)
        return await _run_in(self._threads.counts, lambda: tokens_complete(results, reader))

    async def chosen_blocks(
        self, asked: PlanRequest, remembered: Remembered, view: View, results: Sequence[int], room: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Return the blocks of results that answer the question best; none if that takes too long."""
        reader, since = self._reader((await self.count_tokens(asked, remembered)).original), self._clock()

        def choose() -> Mapping[int, tuple[int, ...]]:
            try:
                return chosen_blocks(view.messages, results, room, reader, self._deadline(since))
            except DeadlinePassed:
                return {}

        return await _run_in(self._threads.fitting, choose)

    def family(self, route: Route, wire: Wire) -> TokenizerFamily:
        """Return the family of a route's model: its numbers, and the requests that it refuses."""
        return self._estimator.families.of(route.model, route.provider, wire)

    async def message_tokens(self, asked: PlanRequest) -> list[int]:
        """What each message weighs."""
        request, messages = request_of(asked), asked.contents.messages
        threads = self._threads.counting(asked.size)
        return await _run_in(threads, lambda: self._estimator.message_tokens(request, messages))

    def _deadline(self, since: float) -> Callable[[], bool]:
        """Says True once a choice that begins now has taken too long. `since`: when it was asked for.

        That others chose before it is no reason to choose worse, unless it has waited for them for very long.
        """
        end = min(self._clock(), since + _MOST_WAITED * self._deadline_s) + self._deadline_s
        return lambda: self._clock() > end

    def _reader(self, original: CountedRequest) -> Reader:
        """What is known of chat messages, with the weights of the request's family, and what was learned of frames."""
        request, frame = original.request, round(original.expected.frame)
        framing = Framing(call=frame) if original.estimate.has_tools else Framing(message=frame)
        bare = RequestParts(
            wire=request.wire, model=request.model, provider=request.provider, tokenizer=request.tokenizer
        )
        family = self._estimator.family(request)
        return self._book.counts(
            lambda messages: self._estimator.message_tokens(bare, messages, read_as="chat"),
            # models of one family may have different rules for images
            f"{family.name}\0{family.image}\0{request.tokenizer}",
            framing,
        )

    def close(self) -> None:
        """See `PlannerThreads.close`."""
        self._threads.close()


def _unmarked(contents: Contents) -> int:
    """How many messages at the beginning surely have no cache marks."""
    return len(contents.start.keys) if contents.start is not None and contents.is_as_known else 0


async def _run_in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _key_of(asked: PlanRequest) -> Hashable:
    """All that `request_of` reads."""
    contents, route = asked.contents, asked.route
    fields = key_of_fields(contents.wire, contents.fields)
    return contents.wire, route.model, route.provider, asked.facts.tokenizer, fields


def _size_beside(contents: Contents) -> int:
    """About the bytes that are held of what stands beside the messages."""
    fields = contents.fields
    form = sum([len(fields.get(name, b"")) for name in FORM_FIELDS[contents.wire]])
    # Names are as long as callers like, and those that nobody knows are part of the key.
    names = _CHARACTER * sum(map(len, fields))
    return names + sum(map(len, fields.values())) - len(fields[ITEMS[contents.wire]]) + _BUILT * form


def request_of(asked: PlanRequest) -> RequestParts:
    """The request, without the messages of an array, which are weighed apart."""
    contents = asked.contents
    return read_request(
        contents.wire,
        contents.fields,
        model=asked.route.model,
        provider=asked.route.provider,
        messages=None if contents.array is None else (),
        tokenizer=asked.facts.tokenizer or "",
    )
