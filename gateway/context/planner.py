"""Count and trim requests, in threads if that takes long.

The tokens of a request with few new messages are counted in the event loop, which costs less than a switch to a
thread. All other counts run in threads, and so does every trim. There are few threads: with more of them, the event
loop would wait too long for the interpreter lock.
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
from gateway.core.context_budget import ContextPolicy, LengthLimit, Trim, budget_of, with_call_limits
from gateway.core.conversation.message import Hashed, digest
from gateway.core.conversation.units import Conversation
from gateway.core.counting.counted import CountedRequest, LearnedCorrections, calibration_key_of, count_tokens
from gateway.core.counting.estimate import Estimate, Estimator
from gateway.core.counting.families import TokenizerFamily
from gateway.core.counting.largest_part import RequestPart, largest_overhead
from gateway.core.counting.measure import Wire
from gateway.core.counting.overhead import Overhead
from gateway.core.counting.prefix_cache import CachedPrefix, is_worth_keeping
from gateway.core.counting.request import ITEMS, SCHEMA_FIELDS, Piece, RequestParts, key_of_fields, read_request
from gateway.core.counting.sums import MessageSums
from gateway.core.modes.unread import ConversationResults, chosen_blocks, results_in, tokens_complete
from gateway.core.plan import ChoiceBudget, InvalidPlan, Plan, TokenCounters, make_room, unchanged_plan
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered
from gateway.core.thinking import BoundConversation
from gateway.core.trimming.deadline import DeadlinePassed
from gateway.core.trimming.overflow import BudgetTooSmall, ContextOverflow, TextTooLong
from gateway.core.trimming.preread import messages_to_read, read_ahead
from gateway.core.trimming.reader import Framing, Reader
from gateway.core.trimming.summary import SummaryUse
from gateway.core.views import VIEWED, View, view_of
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.contents import Contents, contents_of
from gateway.dialects.server_state import continued_from, references_in
from gateway.stores.learner import Learner

logger = logging.getLogger("gateway")
T = TypeVar("T")

#: Bytes after the known prefix of a request that are read in the event loop: a few milliseconds if all are new.
_INLINE_BYTES: Final = 32 * 1024
#: Larger bodies are parsed in a thread. Parsing one of this size takes some three milliseconds.
READ_IN_LOOP: Final = 512 * 1024
#: Larger bodies are counted one after the other. A single C call reads one of their parts and keeps the interpreter
#: lock for tens of milliseconds. Two such calls at once would block the event loop for too long.
_HUGE_BYTES: Final = 8 * 1024 * 1024
#: number of threads of each kind
_READING: Final = 1
_COUNTING: Final = 2
_COUNTING_HUGE: Final = 1
_TRIMMING: Final = 1
#: bytes in memory for each byte of a decoded schema
_DECODED: Final = 20
#: maximum bytes of a character in memory
_CHARACTER: Final = 4
#: A budget in tokens that no request exceeds, so that only earlier trim decisions are applied.
_ENOUGH: Final = 2**40
#: A longer wait for a thread, as a multiple of the deadline, reduces the time of the trim itself.
_MAX_WAITED: Final = 5


class _Estimated(NamedTuple):
    """A request with its estimated tokens. `keys`, `overhead`: None if its messages are not an array."""

    request: RequestParts
    estimate: Estimate
    keys: tuple[bytes, ...] | None
    overhead: Overhead | None


class PlannerThreads:
    """The threads for slow counts and trims. The planner of a new configuration takes them over from the old one."""

    def __init__(self) -> None:
        # Reading takes milliseconds and must not wait for work that takes seconds.
        self.reading = ThreadPoolExecutor(_READING, "reading")
        # Counting must not wait for a long trim.
        self.counts = ThreadPoolExecutor(_COUNTING, "counting")
        self.huge = ThreadPoolExecutor(_COUNTING_HUGE, "counting-huge")
        self.trimming = ThreadPoolExecutor(_TRIMMING, "trimming")

    def counting(self, size: int) -> ThreadPoolExecutor:
        """Return the threads that count a body of so many bytes."""
        return self.huge if size > _HUGE_BYTES else self.counts

    def close(self) -> None:
        """End the threads. Calls that wait for them have been cancelled before."""
        for pool in (self.reading, self.counts, self.huge, self.trimming):
            pool.shutdown(wait=False, cancel_futures=True)


class Planner:
    """Counts and trims the requests of all calls.

    Args:
        estimator: counts tokens.
        loop_bytes: returns how many new bytes a tokenizer may count in the event loop; 0 if it is not loaded.
        learner: what was learned of models from reported usage and refusals.
        policy: the budget, and how it is kept.
        clock: returns monotonic seconds.
        memory: the caches; None to create them.
        threads: the threads; None to create them.
        translated: providers that always receive the chat format, because their adapter translates.
    """

    def __init__(
        self,
        estimator: Estimator,
        loop_bytes: Callable[[str], int],
        learner: Learner,
        policy: ContextPolicy,
        *,
        clock: Callable[[], float],
        memory: ContextCaches | None = None,
        threads: PlannerThreads | None = None,
        translated: frozenset[str] = frozenset(),
    ) -> None:
        self.policy = policy
        self._policy_keeping = replace(policy, fit=replace(policy.fit, keeps_decisions=True))
        # No turn follows for which room would have to be left.
        self._policy_of_compaction = replace(policy, budget=None, fit=replace(policy.fit, low_water=1.0))
        self._estimator = estimator
        self._loop_bytes = loop_bytes
        self._learner = learner
        self._clock = clock
        memory = memory or ContextCaches()
        #: the prefixes of requests that were read before, see `contents_of`
        self.prefixes = memory.prefixes
        self._overhead, self._views, self._reader_cache = memory.overhead, memory.views, memory.reader
        self._threads = threads or PlannerThreads()
        self._translated = translated
        #: Held while a huge body is planned, because its parts then take several times its size in memory.
        self.huge_turn = asyncio.Lock()
        self._reading_ahead = Lock()

    async def plan(
        self,
        request: PlanRequest,
        remembered: Remembered,
        reported_limit: LengthLimit | None = None,
        *,
        use: SummaryUse = "off",
    ) -> Plan:
        """Return what to send of a request.

        Other sessions' corrections never lead to a refusal: a refused call reports no usage that could correct them.

        Args:
            request: the request.
            remembered: what its session remembers.
            reported_limit: the limit that the provider has just named in a refusal.
            use: whether a summary may be requested first.
        """
        counts = await self._count_tokens(request, remembered, reported_limit)
        plan = await self._plan(request, counts, remembered, use)
        if plan.is_safe or not counts.learned.includes_other_sessions:
            return plan
        without_others = await self._plan(request, counts.without_others, remembered, use)
        return without_others if without_others.is_safe else plan

    async def budget(self, request: PlanRequest, remembered: Remembered) -> int | None:
        """Return the maximum input tokens of a call; None if nothing limits them."""
        counts = await self._count_tokens(request, remembered, None)
        return budget_of(
            self._policy_of(request),
            with_call_limits(request.facts, request.options, counts.learned.limit),
            request.options,
        )

    def _policy_of(self, request: PlanRequest) -> ContextPolicy:
        """Return the settings for one call. `context.budget` does not limit what a client summarizes."""
        if request.is_compaction:
            return self._policy_of_compaction
        return self._policy_keeping if request.keeps_decisions else self.policy

    async def _plan(self, request: PlanRequest, counts: RequestCounts, remembered: Remembered, use: SummaryUse) -> Plan:
        original, learned, keys, overhead = counts
        facts = with_call_limits(request.facts, request.options, learned.limit)
        policy = self._policy_of(request)
        budget, window = budget_of(policy, facts, request.options), facts.window
        is_compaction = asks_for_compaction(request.contents.fields, request.contents.wire)
        trim = "off" if is_compaction else request.options.trim or self.policy.trim
        unchanged = unchanged_plan(original, budget, self.policy.safety, window=window)
        if trim == "off" or (budget is None and not request.keeps_decisions):
            return unchanged
        if budget is None:
            plan = await self._plan(
                replace(request, options=replace(request.options, budget=_ENOUGH)), counts, remembered, use
            )
            return replace(plan, context=replace(plan.context, budget=None))
        if keys is None or request.contents.wire not in VIEWED:
            return await self._plan_text(unchanged, request, original, budget, trim)
        if original.fits(budget, self.policy.safety) and not request.keeps_decisions:
            self._read_ahead(original, request.contents, keys, budget)
            return unchanged
        scales, since = TokenCounters(self._estimator, self._reader(original), overhead), self._clock()
        # Earlier trim decisions were made for a lower budget.
        state = replace(remembered.state, trim_decisions={}) if request.is_compaction else remembered.state

        def choose() -> Plan:
            deadline, is_shadow = self._deadline(since), trim == "shadow"
            room = ChoiceBudget(budget, policy, is_shadow, state, learned, deadline, use, request.salt, window)
            return self._trimmed(original, request, keys, room, scales)

        try:
            plan = await _run_in(self._threads.trimming, choose)
        except InvalidPlan:
            logger.exception("trimming failed: the request is forwarded unchanged, although it is over its budget")
            return unchanged
        except (ContextOverflow, BudgetTooSmall) as overflow:
            if trim == "shadow" or self.policy.overflow == "forward":
                return unchanged
            part = await self._largest_overhead(request)
            return replace(unchanged, overflow=overflow if part is None else overflow.with_part(part))
        self._read_ahead(original, request.contents, keys, budget)
        return plan

    async def _plan_text(
        self, unchanged: Plan, request: PlanRequest, original: CountedRequest, budget: int, trim: Trim
    ) -> Plan:
        """Return the plan for a request that is one text: it is sent unchanged or refused, and never trimmed."""
        tokens = original.expected.tokens
        if tokens <= budget or trim == "shadow" or self.policy.overflow != "error":
            return unchanged
        part = await self._largest_overhead(request)
        if part is not None and part.tokens <= original.estimate.tokens - original.estimate.overhead:
            part = None
        overflow = TextTooLong(needed=tokens, budget=budget, param=ITEMS[request.contents.wire], part=part)
        return replace(unchanged, overflow=overflow)

    async def _largest_overhead(self, request: PlanRequest) -> RequestPart | None:
        """Return the largest part of a request outside its messages; None if no part is large."""
        contents, route = request.contents, request.route

        def count_tokens(fields: Mapping[str, Piece]) -> int:
            counted = read_request(
                contents.wire, fields, model=route.model, provider=route.provider, messages=(),
                tokenizer=request.facts.tokenizer or "",
            )  # fmt: skip
            return self._estimator.estimate(counted).tokens

        threads = self._threads.counting(request.size)
        return await _run_in(threads, lambda: largest_overhead(contents.wire, contents.fields, count_tokens))

    def _trimmed(
        self,
        original: CountedRequest,
        request: PlanRequest,
        keys: Sequence[bytes],
        room: ChoiceBudget,
        scales: TokenCounters,
    ) -> Plan:
        view = self.view(request.contents, keys)
        # Providers of the other formats merge consecutive messages of one role, or accept any order.
        is_sent_as_chat = request.contents.wire == "chat" or request.route.provider in self._translated
        family = self._estimator.family(original.request)
        takes_turns = is_sent_as_chat and family.turns == "strict"
        bound = view.marks.bound if family.binding == "prefix" else frozenset[int]()
        conversation = self._conversation(view, request.contents, bound, takes_turns=takes_turns)
        return make_room(original, view, conversation, room, scales)

    def view(self, contents: Contents, keys: Sequence[bytes] | None = None) -> View:
        """Return the messages of a request as chat messages. `keys`: their keys, if these are known."""
        original = Hashed(contents.messages or (), keys, unmarked=_unmarked(contents))
        return view_of(contents.wire, original, self._views)

    def _read_ahead(self, original: CountedRequest, contents: Contents, keys: Sequence[bytes], budget: int) -> None:
        """Let a thread read some messages that the next trim will need. One such task runs at a time."""
        span = messages_to_read(len(keys), original.expected.tokens / budget)
        if not span or not self._reading_ahead.acquire(blocking=False):
            return
        reader, since = self._reader(original), self._clock()

        def work() -> None:
            try:
                part = Hashed(contents.between(span.start, span.stop), keys[span.start : span.stop])
                read_ahead(view_of(contents.wire, part, self._views).chat, reader, self._deadline(since))
            except Exception:
                logger.exception("reading messages ahead failed; the next trim reads them itself")
            finally:
                self._reading_ahead.release()

        try:
            self._threads.trimming.submit(work)
        except RuntimeError:
            # The worker is stopping.
            self._reading_ahead.release()

    def is_bound(self, route: Route, wire: Wire) -> bool:
        """Return whether a model binds thinking to its prefix."""
        return self._estimator.families.find(route.model, route.provider, wire).binding == "prefix"

    async def bound(self, contents: Contents) -> BoundConversation | None:
        """Return the conversation for a model that binds thinking to its prefix, or None if it has no messages.

        It is read in the event loop if few of its bytes are new, as each message is read only once.
        """
        if contents.wire not in VIEWED or contents.messages is None:
            return None
        received = Hashed(contents.messages, unmarked=_unmarked(contents))

        def read() -> BoundConversation:
            return BoundConversation(contents.wire, received, cache=self._views)

        known = len(contents.cached_prefix.text) if contents.cached_prefix is not None else 0
        size = len(contents.array or b"")
        if size - known <= _INLINE_BYTES:
            return read()
        return await _run_in(self._threads.counting(size), read)

    @staticmethod
    def is_large(call: Call) -> bool:
        """Return whether a call's body is too large to be read in the event loop."""
        return len(call.body) > READ_IN_LOOP

    @staticmethod
    def is_huge(call: Call) -> bool:
        """Return whether a call's body is so large that such calls are planned one at a time (`huge_turn`)."""
        return len(call.body) > _HUGE_BYTES

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Run work that reads a body of `size` bytes: in the event loop, or in a thread if the body is large."""
        return work() if size <= READ_IN_LOOP else await _run_in(self._threads.reading, work)

    async def contents(self, call: Call, wire: Wire) -> Contents | None:
        """Return the contents of a call, or None if they cannot be read. See `contents_of`."""
        size = len(call.body)
        if size <= READ_IN_LOOP:
            return contents_of(call, wire, self.prefixes)
        return await _run_in(self._threads.counting(size), lambda: contents_of(call, wire, self.prefixes))

    async def count_tokens(self, request: PlanRequest, remembered: Remembered) -> RequestCounts:
        """Return the token counts of a request before trimming."""
        return await self._count_tokens(request, remembered, None)

    async def _count_tokens(
        self, request: PlanRequest, remembered: Remembered, reported_limit: LengthLimit | None
    ) -> RequestCounts:
        if request.counts is not None and reported_limit is None:
            return request.counts
        parts, estimate, keys, overhead = await self._read_and_estimate(request)
        if reported_limit is None:
            reported_limit = await self._learned_limit(request)
        kept = remembered.kept_tokens(parts.provider, continued_from(request.contents.fields, parts.wire))
        key = calibration_key_of(parts, estimate, kept)
        learned = LearnedCorrections(*await self._learner.lessons(key), remembered.last_turn, reported_limit, kept)
        return RequestCounts(count_tokens(parts, estimate, learned, key), learned, keys, overhead)

    async def _learned_limit(self, request: PlanRequest) -> LengthLimit | None:
        """Return the limit that the provider named in a recent refusal, unless the configuration sets that limit."""
        rule = request.route.rule
        configured = rule.facts if rule is not None else ModelFacts()
        if configured.window is not None and configured.input is not None:
            return None
        reported_limit = await self._learner.limit(request.route.provider, request.limit_model)
        if reported_limit is None or (configured.input if reported_limit.of_input else configured.window) is not None:
            return None
        return reported_limit

    async def _read_and_estimate(self, request: PlanRequest) -> _Estimated:
        """Return the request with its estimated tokens. They are counted in the event loop if few bytes are new."""
        estimator, key = self._estimator, _key_of(request)
        known = self._overhead.find(key) if request.contents.array is not None else None
        parts = known.request if known is not None else request_of(request)
        loop_bytes = self._loop_bytes(estimator.tokenizer(parts))
        if known is not None and not (loop_bytes and known.counter.name == estimator.counter(parts).name):
            # The configuration has another tokenizer for the model now.
            known = None
        if loop_bytes and self._new_bytes(request, parts, known) <= loop_bytes:
            return self._estimate(request.contents, parts, known, key)
        threads = self._threads.counting(request.size)
        return await _run_in(threads, lambda: self._estimate(request.contents, parts, known, key))

    def _new_bytes(self, request: PlanRequest, parts: RequestParts, known: Overhead | None) -> int:
        start, array = request.contents.cached_prefix, request.contents.array or b""
        new = request.size if known is None else len(array)
        if start is None or start.kind != (self._estimator.kind(parts) if known is None else known.kind):
            return new
        return new - len(start.text)

    def _estimate(self, contents: Contents, parts: RequestParts, known: Overhead | None, key: Hashable) -> _Estimated:
        estimator = self._estimator
        if contents.array is None:
            return _Estimated(parts, estimator.estimate(parts), None, None)
        overhead = known
        if overhead is None:
            overhead = estimator.overhead(parts)
            self._overhead.keep(key, overhead, _overhead_bytes(contents))
        sums, keys = self._sums(overhead, contents)
        return _Estimated(parts, estimator.from_sums(overhead, sums), keys, overhead)

    def _sums(self, overhead: Overhead, contents: Contents) -> tuple[MessageSums, tuple[bytes, ...]]:
        """Return the token sums and keys of all messages, and cache those of all but the last.

        The last message is not cached, because clients may still change it.
        """
        estimator, kind = self._estimator, overhead.kind
        # `fresh` has no cache marks: `contents_of` removes them.
        start, fresh, keys = contents.cached_prefix, contents.new_messages, tuple(map(digest, contents.new_messages))
        known, before = (start.keys, start.sums) if start is not None else ((), None)
        if start is not None and start.kind != kind:
            before = estimator.sums(overhead, (contents.messages or ())[: len(known)], known)
        last = max(0, len(fresh) - 1) if is_worth_keeping(contents.array or b"") else 0
        if last > 0:
            before = estimator.sums(overhead, fresh[:last], keys[:last], before)
            at_provider = references_in(contents.wire, contents.rest, fresh[:last])
            at_provider |= start.server_references if start is not None else frozenset()
            prefix = CachedPrefix(
                contents.text_before_last, contents.bounds, known + keys[:last], kind, before, at_provider,
                contents.rounds or (start.rounds if start is not None else None),
            )  # fmt: skip
            self.prefixes.keep(contents.wire, prefix, instead_of=start)
        return estimator.sums(overhead, fresh[last:], keys[last:], before), known + keys

    def _conversation(
        self, view: View, contents: Contents, bound: frozenset[int], *, takes_turns: bool
    ) -> Conversation:
        """Return the conversation that a trim works on; `bound`: messages that must stay unchanged."""
        priorities_by_place = (contents.priorities or {}).items()
        priorities = {index: priority for place, priority in priorities_by_place for index in view.indices({place})}
        return Conversation.of(
            view.chat,
            self._reader_cache,
            pinned=view.marks.held | bound | view.indices(contents.pinned),
            priorities=dict.fromkeys(view.marks.stale, 0.0) | priorities,
            keep_last_turns=self.policy.keep_last_turns,
            takes_turns=takes_turns,
            tools=[contents.fields[name] for name in ("tools", "functions") if name in contents.fields],
            needed=view.marks.needed,
            following=view.marks.following,
            leading=view.marks.undroppable,
        )

    async def results_in(self, view: View) -> ConversationResults:
        """Return the tool results of a conversation. In the loop if there is little of it."""
        if sum(map(len, view.messages)) <= _INLINE_BYTES:
            return results_in(view)
        return await _run_in(self._threads.counts, lambda: results_in(view))

    async def tokens_complete(self, request: PlanRequest, remembered: Remembered, results: Sequence[bytes]) -> int:
        """Return the tokens of results that are shown complete, as tables."""
        reader = self._reader((await self.count_tokens(request, remembered)).original)
        return await _run_in(self._threads.counts, lambda: tokens_complete(results, reader))

    async def chosen_blocks(
        self, request: PlanRequest, remembered: Remembered, view: View, results: Sequence[int], room: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Return the blocks of results that answer the question best; none if that takes too long."""
        reader, since = self._reader((await self.count_tokens(request, remembered)).original), self._clock()

        def choose() -> Mapping[int, tuple[int, ...]]:
            try:
                return chosen_blocks(view.messages, results, room, reader, self._deadline(since))
            except DeadlinePassed:
                return {}

        return await _run_in(self._threads.trimming, choose)

    def family(self, route: Route, wire: Wire) -> TokenizerFamily:
        """Return the family of a route's model: its numbers, and the requests that it refuses."""
        return self._estimator.families.find(route.model, route.provider, wire)

    async def message_tokens(self, request: PlanRequest) -> list[int]:
        """Return the tokens of each message."""
        parts, messages = request_of(request), request.contents.messages
        threads = self._threads.counting(request.size)
        return await _run_in(threads, lambda: self._estimator.message_tokens(parts, messages))

    def _deadline(self, since: float) -> Callable[[], bool]:
        """Return a function that returns True once a trim that begins now has taken too long.

        `since`: when the trim was requested. Waiting for other trims does not shorten its time, unless it waited for
        more than five deadlines.
        """
        allowed = self.policy.deadline_s
        end = min(self._clock(), since + _MAX_WAITED * allowed) + allowed
        return lambda: self._clock() > end

    def _reader(self, original: CountedRequest) -> Reader:
        """Return a reader of chat messages that counts as the request's model does, with learned frame tokens."""
        request, frame = original.request, round(original.expected.frame)
        framing = Framing(call=frame) if original.estimate.has_tools else Framing(message=frame)
        bare = RequestParts(
            wire=request.wire, model=request.model, provider=request.provider, tokenizer=request.tokenizer
        )
        family = self._estimator.family(request)
        return self._reader_cache.with_counter(
            lambda messages: self._estimator.message_tokens(bare, messages, read_as="chat"),
            # models of one family may have different rules for images
            f"{family.name}\0{family.image}\0{request.tokenizer}",
            framing,
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def _unmarked(contents: Contents) -> int:
    """Return the number of messages at the start that have no cache marks for sure."""
    return len(contents.cached_prefix.keys) if contents.cached_prefix is not None and contents.is_split_exact else 0


async def _run_in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _key_of(request: PlanRequest) -> Hashable:
    """Return a key of everything that `request_of` reads."""
    contents, route = request.contents, request.route
    fields = key_of_fields(contents.wire, contents.fields)
    return contents.wire, route.model, route.provider, request.facts.tokenizer, fields


def _overhead_bytes(contents: Contents) -> int:
    """Return the approximate bytes in memory of a request without its messages."""
    fields = contents.fields
    form = sum([len(fields.get(name, b"")) for name in SCHEMA_FIELDS[contents.wire]])
    # Callers may send unknown fields with long names, which are part of the key.
    names = _CHARACTER * sum(map(len, fields))
    return names + sum(map(len, fields.values())) - len(fields[ITEMS[contents.wire]]) + _DECODED * form


def request_of(request: PlanRequest) -> RequestParts:
    """Return the parts of a request. Messages in an array are left out, as they are counted one by one."""
    contents = request.contents
    return read_request(
        contents.wire,
        contents.fields,
        model=request.route.model,
        provider=request.route.provider,
        messages=None if contents.array is None else (),
        tokenizer=request.facts.tokenizer or "",
    )
