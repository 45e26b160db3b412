from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.core.context_budget import LengthLimit
from gateway.core.counting.calibration import MAX_RESIDUALS, LastTurn, Residual
from gateway.core.errors import StoreUnavailable
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.stored import Lesson
from gateway.core.usage import Charge, Usage
from gateway.stores.learner import Learner
from gateway.stores.memory import MemoryStore
from tests.support.timing import eventually


class UnavailableStore(MemoryStore):
    """A store that a test can make unavailable."""

    away = False
    asked = 0
    writes = 0

    async def learned(self, key: str) -> bytes | None:
        self._check()
        return await super().learned(key)

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        self._check()
        self.writes += 1
        return await super().learn(lessons)

    def _check(self) -> None:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("away")


class AwayAfterOne(UnavailableStore):
    """A store that accepts one write and is unavailable at the next."""

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        if self.writes == 1:
            raise StoreUnavailable("away")
        return await super().learn(lessons)


def off(tokens: int) -> Residual:
    return Residual(tokens, 1_000)


async def settled(learner: Learner) -> None:
    await learner.aclose()


async def test_reported_lesson_is_known_at_once() -> None:
    learner = Learner(MemoryStore())
    learner.report("k", off(5))
    learner.report("k", off(7))
    assert (await learner.lessons("k")).offsets == (off(5), off(7))
    assert (await learner.lessons("other")).offsets == ()
    await settled(learner)


async def test_lessons_survive_the_worker() -> None:
    store = MemoryStore()
    first = Learner(store)
    first.report("k", off(5))
    first.report_limit("openai", "m", LengthLimit(8192))
    await settled(first)
    second = Learner(store)
    assert (await second.lessons("k")).offsets == (off(5),)
    assert await second.limit("openai", "m") == LengthLimit(8192)
    assert await second.limit("openai", "n") is None


async def test_two_workers_add_to_one_key() -> None:
    store = MemoryStore()
    one, two = Learner(store), Learner(store)
    one.report("k", off(1))
    two.report("k", off(2))
    await settled(one)
    await settled(two)
    assert (await two.lessons("k")).offsets == (off(1), off(2))


async def test_only_the_newest_lessons_are_kept() -> None:
    store = MemoryStore()
    learner = Learner(store)
    for number in range(MAX_RESIDUALS + 3):
        learner.report("k", off(number))
    assert (await learner.lessons("k")).offsets == tuple(map(off, range(3, MAX_RESIDUALS + 3)))
    await settled(learner)
    assert (await Learner(store).lessons("k")).offsets == tuple(map(off, range(3, MAX_RESIDUALS + 3)))


async def test_many_reports_are_one_write() -> None:
    store = UnavailableStore()
    learner = Learner(store, write_after_s=0.01)
    for number in range(100):
        learner.report(f"k{number}", off(1))
    await eventually(lambda: store.writes)
    await settled(learner)
    assert store.writes == 1


async def test_outage_costs_only_the_lessons_of_other_workers() -> None:
    store = UnavailableStore()
    store.away = True
    learner = Learner(store, write_after_s=0.01)
    assert (await learner.lessons("k")).offsets == ()
    learner.report("k", off(3))
    learner.report_limit("p", "m", LengthLimit(100))
    before = store.asked
    await eventually(lambda: store.asked > before)
    assert (await learner.lessons("k")).offsets == (off(3),)
    assert await learner.limit("p", "m") == LengthLimit(100)
    store.away = False
    await settled(learner)
    assert (await Learner(store).lessons("k")).offsets == (off(3),)


async def test_rest_of_a_failed_write_is_written_again() -> None:
    store = AwayAfterOne()
    learner = Learner(store)
    keys = [f"k{number}" for number in range(600)]
    for key in keys:
        learner.report(key, off(3))
    learner.report_limit("p", "m", LengthLimit(100))
    await settled(learner)
    assert (await learner.lessons(keys[0])).offsets == (off(3),)
    store.writes = -10
    await settled(learner)
    known = Learner(store)
    assert [(await known.lessons(key)).offsets for key in keys] == [(off(3),)] * len(keys)
    assert await known.limit("p", "m") == LengthLimit(100)


async def test_limit_is_dropped_when_a_longer_request_succeeds() -> None:
    store = MemoryStore()
    learner = Learner(store)
    learner.report_limit("p", "m", LengthLimit(2_000))
    learner.record(answered(2_000), None)
    assert await learner.limit("p", "m") == LengthLimit(2_000)
    learner.record(answered(2_001), None)
    assert await learner.limit("p", "m") is None
    await settled(learner)
    assert await Learner(store).limit("p", "m") is None


async def test_a_limit_of_the_input_is_learned_as_such_and_kept_for_other_workers() -> None:
    store, limit = MemoryStore(), LengthLimit(272_000, of_input=True)
    learner = Learner(store)
    learner.report_limit("p", "m", limit)
    assert await learner.limit("p", "m") == limit
    await settled(learner)
    assert await Learner(store).limit("p", "m") == limit


async def test_a_window_is_not_forgotten_for_what_the_passes_of_one_call_come_to() -> None:
    learner = Learner(MemoryStore())
    learner.report_limit("p", "m", LengthLimit(2_000))
    learner.record(replace(answered(2_900), context=replace(counted(1_500, 1, None), beyond=1_400)), None)
    assert await learner.limit("p", "m") == LengthLimit(2_000)
    assert (await learner.lessons("k")).offsets == (Residual(0, 1_500),)


async def test_limit_of_any_worker_is_trusted_for_an_hour() -> None:
    store, clock = MemoryStore(), [1e9]
    first = Learner(store, now=lambda: clock[0])
    first.report_limit("p", "m", LengthLimit(2_000))
    await settled(first)
    clock[0] += 3_000
    second = Learner(store, now=lambda: clock[0])
    assert (await first.limit("p", "m"), await second.limit("p", "m")) == (LengthLimit(2_000), LengthLimit(2_000))
    clock[0] += 601
    assert (await first.limit("p", "m"), await second.limit("p", "m")) == (None, None)
    assert await Learner(store, now=lambda: clock[0]).limit("p", "m") is None


async def test_limit_learned_by_one_worker_reaches_others_within_a_minute() -> None:
    store, clock = UnavailableStore(), [1e9]
    first, second = (Learner(store, now=lambda: clock[0]) for _ in range(2))
    assert await second.limit("p", "m") is None
    first.report_limit("p", "m", LengthLimit(2_000))
    await settled(first)
    clock[0] += 60
    assert await second.limit("p", "m") == LengthLimit(2_000)
    asked, store.away = store.asked, True
    assert [await second.limit("p", "m") for _ in range(3)] == [LengthLimit(2_000)] * 3
    assert store.asked == asked, "the store is not asked on each call"
    clock[0] += 60
    assert [await second.limit("p", "m") for _ in range(3)] == [LengthLimit(2_000)] * 3, (
        "what was known holds while it is away"
    )
    assert store.asked == asked + 1


async def test_failed_read_is_repeated_after_the_outage() -> None:
    store, clock = UnavailableStore(), [1e9]
    first, second = (Learner(store, now=lambda: clock[0]) for _ in range(2))
    first.report("k", off(3))
    await settled(first)
    store.away = True
    assert [(await second.lessons("k")).offsets for _ in range(3)] == [()] * 3
    store.away = False
    clock[0] += 60
    assert (await second.lessons("k")).offsets == (off(3),)


async def test_a_window_that_is_not_written_yet_holds_for_an_hour() -> None:
    clock = [1e9]
    store = UnavailableStore()
    store.away = True
    learner = Learner(store, now=lambda: clock[0])
    learner.report_limit("p", "m", LengthLimit(2_000))
    clock[0] += 3_601
    assert await learner.limit("p", "m") is None
    await settled(learner)


async def test_a_window_that_is_named_again_holds_from_then_on() -> None:
    store, clock = MemoryStore(), [1e9]
    learner = Learner(store, now=lambda: clock[0])
    for window in (2_000, 3_000):
        learner.report_limit("p", "m", LengthLimit(window))
        await settled(learner)
        clock[0] += 3_599
        assert await learner.limit("p", "m") == LengthLimit(window)
    clock[0] += 1
    assert await learner.limit("p", "m") is None


async def test_limit_dated_in_the_future_is_ignored() -> None:
    store = MemoryStore()
    ahead = Learner(store, now=lambda: 2e9)
    ahead.report_limit("p", "m", LengthLimit(2_000))
    await settled(ahead)
    assert await Learner(store, now=lambda: 1e9).limit("p", "m") is None


def answered(tokens: int) -> CallRecord:
    return CallRecord(
        call_id="c", request_id="c", session=None, derived_session=False, started_at=0.0, dialect="chat",
        operation="chat", provider="p", model="m", response_model=None, stream=False, status=200, outcome="ok",
        error_code=None, finish_reason=None, tools=(), charge=Charge(Usage.of(tokens, 1), "provider"),
        overhead_s=0.0, first_byte_s=None, duration_s=0.0, request_bytes=0, response_bytes=0,
    )  # fmt: skip


async def test_frame_tokens_of_a_session_are_known_to_other_workers() -> None:
    store = MemoryStore()
    learner = Learner(store)
    first = counted(100, 1, None)
    learner.record(replace(answered(150), context=first), None)
    assert (await learner.lessons("k")).frames == ()
    learner.record(replace(answered(280), context=counted(200, 2, first.reported(150))), None)
    assert (await learner.lessons("k")).frames == (Residual(30, 1),)
    assert (await learner.lessons("k")).offsets == (Residual(50, 100), Residual(80, 200))
    await settled(learner)
    assert (await Learner(store).lessons("k")).frames == (Residual(30, 1),)


def counted(tokens: int, frames: int, before: LastTurn | None) -> ContextRecord:
    return ContextRecord(tokens, tokens, "calibrated", None, tokens, 0, "k", tokens, frames=frames, before=before)


async def test_damaged_lesson_is_ignored() -> None:
    store = MemoryStore()

    def damaged(_: Any) -> bytes:
        return b"{"

    def leave(value: bytes, _: Any) -> bytes:
        return value

    odd = [
        b'"8192"',
        b"true",
        b"-1",
        b'{"window":"8192","at":1}',
        b'{"window":8192,"at":"1"}',
        b'{"window":8192}',
        b"{}",
    ]
    await store.learn({"offsets\nk": damaged, "window\np\nm": damaged})
    await store.learn({f"window\np\n{number}": partial(leave, value) for number, value in enumerate(odd)})
    learner = Learner(store, now=lambda: 1.0)
    assert (await learner.lessons("k")).offsets == ()
    assert await learner.limit("p", "m") is None
    assert [await learner.limit("p", str(number)) for number in range(len(odd))] == [None] * len(odd)


async def test_one_absurd_report_teaches_nothing_of_other_sessions() -> None:
    learner = Learner(MemoryStore())
    learner.report_limit("p", "m", LengthLimit(2_000))
    for tokens in (10**12, 200_000):
        learner.record(replace(answered(tokens), context=counted(8, 1, None)), None)
    assert await learner.lessons("k") == ((), (), ())
    assert await learner.limit("p", "m") == LengthLimit(2_000)
    learner.record(replace(answered(5_000), context=counted(8, 1, None)), None)
    assert (await learner.lessons("k")).offsets == (Residual(4_992, 8),), "a host's own system prompt"
