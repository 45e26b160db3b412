"""What every store must do, whatever it is made of."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

import pytest

from gateway.core.counting.calibration import LastTurn
from gateway.core.counting.context import ToolResultTokens
from gateway.core.errors import InvalidRequest
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, CallError, CallRecord, ContextRecord
from gateway.core.runaway import WorkState
from gateway.core.session import MAX_KEPT, Places, Remembered, SessionState, kept_text
from gateway.core.steps import StepState
from gateway.core.stored import ReplacedSecret, SessionView, Sort, StoredKey
from gateway.core.thinking_origin import ThinkingOrigin
from gateway.core.tools import MAX_NAMES, MAX_RECENT, OTHERS, ToolUse
from gateway.core.trimming.report import MessageOutcome, MessageOutcomes
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage, UsageSource
from gateway.stores.memory.calls import CALLS_PER_SESSION
from tests.stores.counting import counts, counts_apart, ending, number_apart, number_in
from tests.stores.files import Clock
from tests.support.timing import LIMIT_S

T = TypeVar("T")
MakeRecord = Callable[..., CallRecord]

KEY = SessionKey("alice", "s")
CHARGE = Charge(Usage(10, 5, 15, 4, 3, 2), "provider", Decimal("0.000123"))
ONCE = Totals().add(CHARGE)
#: more than any tool results here have
ROOM = 2**20
EPOCH = {"v": 1, "prefix": "p1", "decisions": [1, "0-3 7", [2]], "recalls": {"5": [[3, "1-2"]]}}
STATE = SessionState({"p1": EPOCH})


def counted_tokens(
    key: str = "openai\ngpt-5", estimate: int = 8, original: int = 20, sent: int = 20, **fields: Any
) -> ContextRecord:
    """Return a record of a call with these numbers."""
    return ContextRecord(sent, original, "calibrated", 1_000, sent, 0, key, estimate, **fields)


def one_more(known: bytes | None) -> bytes:
    return (known or b"") + b"x"


def fails(_: object) -> Any:
    raise RuntimeError("a bug in a change")


async def soon(work: Awaitable[T]) -> T:
    """A store that never answers fails the test instead of stopping it."""
    return await asyncio.wait_for(work, LIMIT_S)


async def all_pages(store: Store, limit: int, sort: Sort, namespace: str | None = "alice") -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.sessions(namespace, limit, cursor, sort)
        assert len(page.sessions) <= limit
        found += [view.key.id for view in page.sessions]
        cursor = page.cursor
        if cursor is None:
            return found
        assert len(found) < 100, "the list does not end"


# --- settling -----------------------------------------------------------------------------------------------------------


async def test_an_unknown_session_has_no_totals_and_does_not_exist(store: Store) -> None:
    assert await store.totals(KEY) == Totals()
    assert await store.session(KEY) is None
    assert await store.calls(KEY, 10) == []


async def test_settling_gives_the_totals_after_it_and_so_does_every_other_look(
    store: Store, record: MakeRecord
) -> None:
    assert await store.settle(record(at=1_000.0, charge=CHARGE)) == ONCE
    assert await store.totals(KEY) == ONCE
    tools = ToolUse(("search", "search"), {"search": 2})
    assert await store.session(KEY) == SessionView(KEY, 1_000.0, 1_002.0, ONCE, tools=tools)


async def test_every_kind_of_count_adds_up(store: Store, record: MakeRecord) -> None:
    sources: list[UsageSource] = ["provider", "estimated", "mixed"]
    expected = Totals()
    for number, source in enumerate(sources):
        charge = Charge(Usage(7, 5, 13, 3, 2, 1), source, None if number == 0 else Decimal("0.25"))
        expected = expected.add(charge, number * 11)
        assert await store.settle(record(charge=charge, context=counted_tokens(original=20 + number * 11))) == expected
    assert expected.source == "mixed"


async def test_settling_one_call_again_adds_nothing_even_if_it_says_otherwise(store: Store, record: MakeRecord) -> None:
    first = record(charge=CHARGE)
    await store.settle(first)
    assert await store.settle(first) == ONCE
    other = Charge(Usage.of(999, 999), "provider", Decimal(9))
    assert await store.settle(record(call_id=first.call_id, charge=other)) == ONCE
    assert len(await store.calls(KEY, 10)) == 1


async def test_calls_that_share_a_clients_request_id_are_each_charged(store: Store, record: MakeRecord) -> None:
    for _ in range(3):
        await store.settle(record(request_id="the-same", charge=CHARGE))
    assert (await store.totals(KEY)).calls == 3


async def test_a_call_without_a_charge_is_kept_but_adds_nothing(store: Store, record: MakeRecord) -> None:
    refused = record(charge=None, at=100.0, duration_s=1.0)
    assert await store.settle(refused) == Totals()
    view = await store.session(KEY)
    assert view is not None
    assert (view.totals, view.created_at, view.last_call_at) == (Totals(), 100.0, 101.0)
    assert [one.key for one in (await store.sessions("alice", 10, None, "recent")).sessions] == [KEY]
    assert len(await store.calls(KEY, 10)) == 1
    await store.settle(record(charge=CHARGE))
    assert await store.settle(record(charge=None)) == ONCE


async def test_a_call_without_a_session_is_kept(store: Store, record: MakeRecord) -> None:
    alone = record(None)
    assert await store.settle(alone) == Totals()
    assert await store.call(None, alone.call_id) == alone
    assert await store.call("alice", alone.call_id) is None
    assert (await store.sessions(None, 10, None, "recent")).sessions == []


async def test_a_charge_of_zero_counts_as_a_call(store: Store, record: MakeRecord) -> None:
    assert await store.settle(record(charge=Charge(Usage(), "provider", Decimal(0)))) == Totals(calls=1)


async def test_a_session_begins_with_its_first_call_and_its_last_call_never_goes_back(
    store: Store, record: MakeRecord
) -> None:
    for at in (1_000.0, 3_000.0, 2_000.0):
        await store.settle(record(at=at))
    view = await store.session(KEY)
    assert view is not None
    assert (view.created_at, view.last_call_at) == (1_000.0, 3_002.0)


async def test_derived_session_is_marked(store: Store, record: MakeRecord) -> None:
    await store.settle(record(derived_session=True))
    await store.settle(record("named"))
    views = {view.key.id: view.derived for view in (await store.sessions("alice", 10, None, "recent")).sessions}
    assert views == {"s": True, "named": False}


async def test_record_is_read_as_written(store: Store, record: MakeRecord) -> None:
    first = record(
        model="модель 漢 \"'; DROP TABLE calls;--",
        first_byte_s=None,
        notes={"a": "b\n"},
        error=CallError("Session “s” has …", {"limit": 3, "needed": 9, "unit": "usd", "used": "0.000001", "x": None}),
        declared=Limits(tokens=3),
    )
    await store.settle(first)
    assert await store.call("alice", first.call_id) == first
    assert list(await store.calls(KEY, 1)) == [first]


async def test_record_is_read_with_its_token_counts(store: Store, record: MakeRecord) -> None:
    fates = MessageOutcomes.of([MessageOutcome("user", 7, 7, "kept"), MessageOutcome("tool", 9, 2, "condense")])
    weights = {"search": ToolResultTokens(2, 90), "größer …": ToolResultTokens(1, 7)}
    context = counted_tokens(trimmed={"digest_results": 1}, shadow=True, message_fates=fates, tool_weights=weights)
    full = record(context=context)
    await store.settle(full)
    assert await store.call("alice", full.call_id) == full


# --- what was saved, and the last turn ------------------------------------------------------------------------------------


async def test_saved_tokens_and_their_calls_are_added_up(store: Store, record: MakeRecord) -> None:
    contexts = [
        counted_tokens(original=50, sent=20),
        None,
        counted_tokens(original=30, sent=30),
        counted_tokens(original=9, sent=4),
        counted_tokens(sent=99),
    ]
    for context in contexts:
        totals = await store.settle(record(charge=CHARGE, context=context))
    assert (totals.calls, totals.trimmed_calls, totals.saved_tokens) == (5, 2, 35)
    assert (totals.unpriced_calls, totals.cost_usd) == (0, Decimal("0.000615"))
    assert await store.totals(KEY) == totals
    view = await store.session(KEY)
    assert view is not None
    assert view.totals == totals


async def test_shadow_trimming_counts_no_saved_tokens(store: Store, record: MakeRecord) -> None:
    totals = await store.settle(record(charge=CHARGE, context=counted_tokens(original=50, sent=20, shadow=True)))
    assert totals == ONCE


async def test_a_session_remembers_how_far_off_the_last_reported_call_was(store: Store, record: MakeRecord) -> None:
    assert await store.remembered(KEY) == Remembered()
    await store.settle(record(charge=CHARGE, context=counted_tokens("a", estimate=8)))
    assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("a", 2))
    await store.settle(record(charge=CHARGE, context=counted_tokens("b", estimate=20)))
    assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("b", -10))
    await store.settle(record(charge=CHARGE, context=counted_tokens("", estimate=10)))
    assert await store.remembered(KEY) == Remembered(last_turn=LastTurn("", 0))


async def test_a_session_remembers_what_its_frames_add(store: Store, record: MakeRecord) -> None:
    await store.settle(record(charge=CHARGE, context=counted_tokens("a", estimate=8, frames=3)))
    first = (await store.remembered(KEY)).last_turn
    assert first == LastTurn("a", 2, 3)
    await store.settle(record(charge=CHARGE, context=None))
    assert (await store.remembered(KEY)).last_turn == first
    await store.settle(record(charge=CHARGE, context=counted_tokens("a", estimate=16, frames=1, before=first)))
    second = (await store.open_call(KEY, (), with_totals=False)).remembered.last_turn
    assert second == LastTurn("a", -6, 1, 8, 2)
    await store.settle(record(charge=CHARGE, context=counted_tokens("a", estimate=10, before=second)))
    assert (await store.remembered(KEY)).last_turn in (LastTurn("a", 0), LastTurn("a", 0, None, 8, 2))


async def test_a_session_remembers_what_its_providers_keep_the_newest_first(store: Store, record: MakeRecord) -> None:
    first, second = kept_text("p", ("a",), 1), kept_text("p", ("b", "c"), 2)
    await store.settle(record(charge=CHARGE, kept=first))
    again = record(charge=CHARGE, kept=second)
    for _ in range(2):
        await store.settle(again)
    await store.settle(record(charge=CHARGE))
    await store.settle(record(charge=None, kept=kept_text("p", ("d",), 3)))
    await store.settle(record("other", charge=CHARGE, kept=kept_text("p", ("e",), 4)))
    assert (await store.remembered(KEY)).kept == second + first
    assert (await store.open_call(KEY, (), with_totals=True)).remembered.kept == second + first
    await store.reset(KEY)
    assert (await store.remembered(KEY)).kept == second + first
    await soon(asyncio.gather(*(store.settle(record(charge=CHARGE, kept=second)) for _ in range(20))))
    assert (await store.remembered(KEY)).kept == (second * 20)[:MAX_KEPT]
    await store.delete(KEY)
    assert (await store.remembered(KEY)).kept == ""


async def test_a_call_that_reported_nothing_or_too_little_does_not_change_the_last_turn(
    store: Store, record: MakeRecord
) -> None:
    first = record(charge=CHARGE, context=counted_tokens("a"))
    await store.settle(first)
    await store.settle(record(charge=CHARGE, context=None))
    await store.settle(record(charge=None, context=counted_tokens("b")))
    for source in ("estimated", "mixed"):
        await store.settle(record(charge=Charge(Usage.of(900, 1), source), context=counted_tokens("b")))
    await store.settle(record(charge=CHARGE, context=counted_tokens("too little for its text", estimate=900)))
    await store.settle(record(call_id=first.call_id, charge=CHARGE, context=counted_tokens("again")))
    await store.settle(record("other", charge=CHARGE, context=counted_tokens("c")))
    assert (await store.remembered(KEY)).last_turn == LastTurn("a", 2)


@pytest.mark.parametrize("reported", [2**63, 10**400], ids=["2^63", "10^400"])
async def test_an_absurd_report_leaves_a_last_turn_no_smaller_than_the_largest_count(
    store: Store, record: MakeRecord, reported: int
) -> None:
    absurd = record(charge=Charge(Usage.of(reported, 1), "provider"), context=counted_tokens("a"))
    other = record("other", charge=CHARGE, context=counted_tokens("image", estimate=2**70, original=2**80))
    await soon(asyncio.gather(store.settle(absurd), store.settle(other)))
    last = (await store.remembered(KEY)).last_turn
    assert last is not None
    assert last.residual >= MAX_TOKENS
    last = (await store.remembered(SessionKey("alice", "other"))).last_turn
    assert last is not None
    assert last.residual <= -MAX_TOKENS
    assert (await store.totals(SessionKey("alice", "other"))).saved_tokens >= MAX_TOKENS


# --- tools ----------------------------------------------------------------------------------------------------------------


async def tools_of(store: Store, key: SessionKey = KEY) -> ToolUse:
    """What a look at the session says. A list says the rest."""
    view = await soon(store.session(key))
    listed = (await soon(store.sessions(key.namespace, 1_000, None, "recent"))).sessions
    found = next((one for one in listed if one.key == key), None)
    if view is None or found is None:
        assert view is found is None
        return ToolUse()
    assert found == replace(view, tools=ToolUse())
    return view.tools


async def test_session_counts_the_tools_of_its_calls(store: Store, record: MakeRecord) -> None:
    for tools in (("search", "read", "search"), (), ("größer\n\0'", "123"), ("read",)):
        await store.settle(record(tools=tools, charge=CHARGE))
        await store.settle(record("other", tools=("elsewhere",)))
    recent = ("search", "read", "search", "größer\n\0'", "123", "read")
    assert await tools_of(store) == ToolUse(recent, {"search": 2, "read": 2, "größer\n\0'": 1, "123": 1})
    assert await tools_of(store, SessionKey("alice", "other")) == ToolUse(("elsewhere",) * 4, {"elsewhere": 4})


async def test_a_session_that_called_no_tool_knows_of_none(store: Store, record: MakeRecord) -> None:
    await store.settle(record(tools=()))
    assert await tools_of(store) == ToolUse()


async def test_tools_beyond_the_first_ones_are_counted_together(store: Store, record: MakeRecord) -> None:
    names = [f"tool-{number}" for number in range(MAX_NAMES + 5)]
    expected = ToolUse()
    for some in (names[:200], [OTHERS, *names[150:]], [*names[-2:], names[0], OTHERS]):
        expected = expected.with_calls(some)
        await store.settle(record(tools=tuple(some)))
    assert (len(expected.calls), len(expected.recent)) == (MAX_NAMES + 1, MAX_RECENT)
    assert await tools_of(store) == expected


async def test_tools_of_calls_at_once_all_count(store: Store, record: MakeRecord) -> None:
    await soon(asyncio.gather(*(store.settle(record(tools=("a", f"b{number}"))) for number in range(20))))
    use = await tools_of(store)
    assert use.calls == {"a": 20, **{f"b{number}": 1 for number in range(20)}}
    assert sorted(use.recent) == sorted([*["a"] * 20, *(f"b{number}" for number in range(20))])


async def test_tools_count_once_however_often_their_call_is_offered(store: Store, record: MakeRecord) -> None:
    item = record(tools=("a",))
    for _ in range(3):
        await store.settle(item)
    assert await tools_of(store) == ToolUse(("a",), {"a": 1})


@pytest.mark.parametrize("known", [(), ("a",)])
async def test_tools_of_an_orphaned_call_count_once_with_its_own_record(
    store: Store, record: MakeRecord, known: tuple[str, ...]
) -> None:
    real = record(tools=("a", "b"))
    await store.settle(replace(real, outcome=ORPHANED, tools=known))
    assert await tools_of(store) == ToolUse()
    for _ in range(2):
        await store.settle(real)
    await store.settle(replace(real, outcome=ORPHANED))
    assert await tools_of(store) == ToolUse(("a", "b"), {"a": 1, "b": 1})


async def test_uncharged_call_or_call_without_session_adds_no_tools(store: Store, record: MakeRecord) -> None:
    await store.settle(record(tools=("a",)))
    await store.settle(record(tools=("b",), charge=None))
    await store.settle(record(None, tools=("c",)))
    assert await tools_of(store) == ToolUse(("a",), {"a": 1})


@pytest.mark.parametrize("again", ["reset", "delete", "expire"])
async def test_reset_clears_the_tools_of_its_session_only(store: Store, record: MakeRecord, again: str) -> None:
    other = SessionKey("alice", "other")
    await store.settle(record(tools=("a",)))
    await store.settle(record("other", at=5_000.0, tools=("c",)))
    if again == "expire":
        assert await store.expire(3_000.0) == 1
    else:
        assert await (store.reset(KEY) if again == "reset" else store.delete(KEY))
    assert await tools_of(store) == ToolUse()
    await store.settle(record(at=4_000.0, tools=("b",)))
    assert await tools_of(store) == ToolUse(("b",), {"b": 1})
    assert await tools_of(store, other) == ToolUse(("c",), {"c": 1})


# --- states ---------------------------------------------------------------------------------------------------------------


async def test_a_state_is_remembered_as_it_was_changed_each_change_on_the_one_before(store: Store) -> None:
    assert await store.update(KEY, lambda state: state.with_trim_decision(EPOCH)) == STATE
    assert await store.remembered(KEY) == Remembered(STATE)
    second = {**EPOCH, "prefix": "p2", "decisions": []}
    both = await store.update(KEY, lambda state: state.with_trim_decision(second))
    assert list(both.trim_decisions.items()) == [("p1", EPOCH), ("p2", second)]
    assert (await store.remembered(KEY)).state == both
    assert list((await store.remembered(KEY)).state.trim_decisions) == ["p1", "p2"]


async def test_thinking_origins_are_kept_with_the_other_state(store: Store) -> None:
    origins = (ThinkingOrigin("a", "claude-sonnet-5-5", 0), ThinkingOrigin("b", "claude-sonnet-5-5", 3))
    await store.update(KEY, lambda _: STATE)
    await store.update(KEY, lambda state: state.with_step("a", StepState("debate", 1, ())))
    await store.update(KEY, lambda state: state.with_thinking("talk", origins))
    state = (await store.remembered(KEY)).state
    assert (state.thinking, state.trim_decisions, list(state.steps)) == ({"talk": origins}, STATE.trim_decisions, ["a"])
    await store.update(KEY, lambda state: state.with_step("a", StepState("work", 0, ())))
    assert (await store.remembered(KEY)).state.thinking == {"talk": origins}


async def test_works_are_kept_with_the_other_state_until_a_person_resumes_them(store: Store) -> None:
    works = {"b": WorkState(1000.5, "draft", 1010.25, ("seconds",), "loop", 12, 3), "a": WorkState(2000.0)}
    await store.update(KEY, lambda _: STATE)
    for name, work in works.items():
        await store.update(KEY, partial(SessionState.with_work, name=name, work=work))
    await store.update(KEY, lambda state: state.with_step("x", StepState("debate", 1, ())))
    state = (await store.remembered(KEY)).state
    assert (list(state.works.items()), state.stopped) == (list(works.items()), works["b"])
    assert state.trim_decisions == STATE.trim_decisions
    resumed = await store.update(KEY, lambda state: state.resumed(3000.0))
    assert resumed.works == {"b": WorkState(3000.0, "draft", 3000.0, lifted=12), "a": works["a"]}
    assert (await store.remembered(KEY)).state == resumed
    assert resumed.stopped is None


async def test_where_agents_are_in_their_steps_is_remembered_in_the_order_in_which_they_went_on(store: Store) -> None:
    places = {"b": StepState("debate", 2, ("search", "café"), is_set=True), "a": StepState(None, 0, ("x",))}
    await store.update(KEY, lambda state: state.with_step("b", places["b"]))
    await store.update(KEY, lambda state: state.with_step("a", places["a"]))
    assert list((await store.remembered(KEY)).state.steps.items()) == list(places.items())


async def test_a_state_may_come_before_its_session_and_makes_none(store: Store, record: MakeRecord) -> None:
    await store.update(KEY, lambda _: STATE)
    assert await store.session(KEY) is None
    assert (await store.sessions(None, 10, None, "recent")).sessions == []
    assert not await store.reset(KEY)
    assert await store.settle(record(charge=CHARGE, context=counted_tokens("a"))) == ONCE
    assert await store.remembered(KEY) == Remembered(STATE, LastTurn("a", 2))
    assert (await store.update(KEY, counts)) == counts(STATE)
    assert await store.totals(KEY) == ONCE


@pytest.mark.parametrize("other", [SessionKey("bob", "s"), SessionKey("alice", "S"), SessionKey("", "alice/s")])
async def test_no_other_session_has_a_part_in_a_state(store: Store, other: SessionKey) -> None:
    await store.update(KEY, lambda _: STATE)
    assert await store.remembered(other) == Remembered()
    await store.update(other, counts)
    await store.delete(other)
    assert await store.remembered(KEY) == Remembered(STATE)


async def test_changes_at_once_all_count_among_settlements_and_lessons(store: Store, record: MakeRecord) -> None:
    work: list[Awaitable[object]] = []
    for _ in range(40):
        work += [store.update(KEY, counts), store.settle(record(charge=CHARGE)), store.learn({"k": one_more})]
        work += [store.update(KEY, counts_apart)]
    await soon(asyncio.gather(*work))
    state = (await store.remembered(KEY)).state
    assert (number_in(state.steps), number_apart(state)) == (40, 40)
    assert (await store.totals(KEY)).calls == 40
    assert await store.learned("k") == b"x" * 40


async def test_failing_change_writes_nothing_and_fails_alone(store: Store, record: MakeRecord) -> None:
    await store.update(KEY, counts)
    await store.learn({"k": one_more})
    results = await soon(
        asyncio.gather(
            store.settle(record(charge=CHARGE)),
            store.update(KEY, fails),
            store.update(KEY, counts),
            store.learn({"new": one_more, "k": fails}),
            store.learn({"k": one_more}),
            return_exceptions=True,
        )
    )
    assert [isinstance(result, RuntimeError) for result in results] == [False, True, False, True, False]
    assert await counted(store) == 2
    assert (await store.learned("new"), await store.learned("k")) == (None, b"xx")
    assert await store.totals(KEY) == ONCE


async def test_a_change_whose_caller_is_cancelled_leaves_the_store_sound(store: Store) -> None:
    task = asyncio.create_task(store.update(KEY, counts))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert number_in((await soon(store.update(KEY, counts))).steps) == 2


# --- steps that the end of a call changes -------------------------------------------------------------------------


async def counted(store: Store) -> int:
    return number_in((await store.remembered(KEY)).state.steps)


async def test_step_transition_is_stored_once_with_the_record(store: Store, record: MakeRecord) -> None:
    first, second = record(charge=CHARGE), record(charge=CHARGE)
    for time in range(1, 4):
        assert await store.settle(first, ending(first)) == ONCE, time
        assert await counted(store) == 1
    await store.update(KEY, counts)
    assert await store.settle(second, ending(second)) == ONCE.add(CHARGE)
    assert await store.settle(second) == ONCE.add(CHARGE)
    assert await counted(store) == 3
    found = [(one.call_id, dict(one.notes)) for one in await store.calls(KEY, 10)]
    assert found == [(second.call_id, {"number": "3"}), (first.call_id, {"number": "1"})]
    assert [one.call.notes["number"] for one in (await store.settled_after(0, 10)).settled] == ["1", "3"]
    by_id = await store.call("alice", second.call_id)
    assert by_id is not None
    assert by_id.notes == {"number": "3"}


async def test_orphaned_call_advances_its_step_only_with_its_own_record(store: Store, record: MakeRecord) -> None:
    own = record(charge=CHARGE)
    orphaned = replace(own, outcome=ORPHANED)
    await store.settle(orphaned)
    assert await counted(store) == 0
    for _ in range(2):
        assert await store.settle(own, ending(own)) == ONCE
        assert await store.settle(orphaned) == ONCE
        assert await counted(store) == 1


async def test_the_end_of_a_call_may_leave_the_steps_as_they_are(store: Store, record: MakeRecord) -> None:
    state = counts(STATE)
    await store.update(KEY, lambda _: state)
    for known in (state, None):
        one = record(charge=CHARGE)

        def end(places: Places, one: CallRecord = one) -> tuple[Places, CallRecord]:
            return places, replace(one, notes={"seen": str(places == state.steps)})

        await store.settle(one, end)
        found = await store.call("alice", one.call_id)
        assert found is not None
        assert found.notes == {"seen": str(known is not None)}
        assert await store.remembered(KEY) == Remembered(known or SessionState())
        await store.delete(KEY)


@pytest.mark.parametrize("between", ["delete", "delete and count"])
async def test_a_call_that_ends_after_its_session_was_deleted_goes_on_from_what_there_is_then(
    store: Store, record: MakeRecord, between: str
) -> None:
    await store.update(KEY, lambda _: STATE)
    await store.settle(record(charge=CHARGE))
    assert (await store.open_call(KEY, [], with_totals=False)).remembered.state == STATE
    await store.delete(KEY)
    if "count" in between:
        await store.update(KEY, counts)
    late = record(charge=CHARGE)
    assert await store.settle(late, ending(late)) == ONCE
    assert await counted(store) == 1 + ("count" in between)
    assert (await store.remembered(KEY)).state.trim_decisions == {}


async def test_the_end_of_a_call_changes_nothing_but_the_steps(store: Store, record: MakeRecord) -> None:
    await store.update(KEY, lambda _: STATE)
    one = record(charge=CHARGE)
    await store.settle(one, ending(one))
    assert (await store.remembered(KEY)).state == counts(STATE)


async def test_calls_that_end_at_once_each_go_on_from_the_one_before(store: Store, record: MakeRecord) -> None:
    calls = [record(charge=CHARGE) for _ in range(40)]
    work: list[Awaitable[object]] = []
    for one in calls:
        work += [store.settle(one, ending(one)), store.update(KEY, counts), store.settle(one, ending(one))]
        work += [store.update(KEY, counts_apart)]
    await soon(asyncio.gather(*work))
    assert (await counted(store), (await store.totals(KEY)).calls) == (80, 40)
    assert number_apart((await store.remembered(KEY)).state) == 40
    numbers = [int(one.notes["number"]) for one in await store.calls(KEY, 50)]
    assert len(set(numbers)) == 40, "none is skipped, none seen twice"


# --- lessons --------------------------------------------------------------------------------------------------------------


async def test_a_lesson_adds_to_what_was_learned_under_its_key(store: Store) -> None:
    seen = list[bytes | None]()

    def lesson(known: bytes | None) -> bytes:
        seen.append(known)
        return (known or b"") + b"\x00\xff"

    assert await store.learned("a") is None
    assert await store.learn({"a": lesson}) == {"a": b"\x00\xff"}
    assert await store.learn({"a": lesson, "b\n漢": lambda _: b""}) == {"a": b"\x00\xff" * 2, "b\n漢": b""}
    assert seen == [None, b"\x00\xff"]
    assert [await store.learned(key) for key in ("a", "b\n漢", "b", "A")] == [b"\x00\xff" * 2, b"", None, None]


async def test_learning_no_lessons_writes_nothing(store: Store) -> None:
    assert await soon(store.learn({})) == {}


# --- many at once ---------------------------------------------------------------------------------------------------------


async def test_sixty_four_settlements_at_once_all_count_and_duplicates_do_not(store: Store, record: MakeRecord) -> None:
    records = [record(charge=CHARGE) for _ in range(64)]
    results = await soon(asyncio.gather(*(store.settle(item) for item in [*records, *records[:32]])))
    assert sorted({totals.calls for totals in results}) == list(range(1, 65))
    totals = await store.totals(KEY)
    assert (totals.calls, totals.input_tokens, totals.cost_usd) == (64, 640, Decimal("0.007872"))


async def test_any_interleaving_over_several_sessions_ends_in_the_same_totals(store: Store, record: MakeRecord) -> None:
    choose = random.Random(3)
    records = [
        record(f"s{choose.randrange(4)}", charge=Charge(Usage.of(choose.randrange(99), 1), "provider", Decimal("0.1")))
        for _ in range(64)
    ]
    expected: dict[str, Totals] = {}
    for item in records:
        assert item.session is not None
        assert item.charge is not None
        expected[item.session.id] = expected.get(item.session.id, Totals()).add(item.charge)
    choose.shuffle(records)

    async def one(item: CallRecord) -> None:
        for _ in range(choose.randrange(3)):
            await asyncio.sleep(0)
        await store.settle(item)

    await soon(asyncio.gather(*map(one, records)))
    found = {name: await store.totals(SessionKey("alice", name)) for name in expected}
    assert found == expected


async def test_a_settlement_whose_caller_is_cancelled_is_written_all_the_same_and_once(
    store: Store, record: MakeRecord
) -> None:
    item = record(charge=CHARGE)
    task = asyncio.create_task(store.settle(item))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await soon(store.settle(item)) == ONCE


# --- hostile values -----------------------------------------------------------------------------------------------------------


async def test_the_largest_usage_a_provider_can_report_never_lowers_or_breaks_a_total(
    store: Store, record: MakeRecord
) -> None:
    huge = Charge(Usage(MAX_TOKENS, MAX_TOKENS, 2 * MAX_TOKENS), "provider", None)
    before = await soon(store.settle(record(charge=huge)))
    assert before.total_tokens == 2 * MAX_TOKENS
    for _ in range(30):
        results = await soon(asyncio.gather(*(store.settle(record(charge=huge)) for _ in range(40))))
        after = max(results, key=lambda totals: totals.calls)
        assert type(after.total_tokens) is int
        assert after.total_tokens >= before.total_tokens
        assert after.input_tokens >= before.input_tokens
        before = after
    assert await store.totals(KEY) == before


async def test_an_absurd_cost_never_lowers_or_breaks_a_total(store: Store, record: MakeRecord) -> None:
    absurd = Charge(Usage.of(1, 1), "provider", Decimal(10) ** 10)
    spent = Decimal(0)
    for calls in range(1, 5):
        totals = await soon(store.settle(record(charge=absurd)))
        assert totals.calls == calls
        assert totals.cost_usd >= spent > -1
        spent = totals.cost_usd
    assert await store.totals(KEY) == totals


async def test_every_store_stops_at_the_same_totals(store: Store, record: MakeRecord) -> None:
    dear = Charge(Usage(MAX_TOKENS, MAX_TOKENS, 2 * MAX_TOKENS), "provider", Decimal(1_500_000))
    for cost in (1_500_000, 3_000_000, 4_500_000):
        assert (await soon(store.settle(record(charge=dear)))).cost_usd == cost, "the largest budget is counted"
    for _ in range(2):
        assert (await soon(store.settle(record(charge=dear)))).cost_usd == Decimal("4611686.018427387904")
    assert (await store.totals(KEY)).cost_usd == Decimal("4611686.018427387904")


async def test_a_small_cost_is_kept_exactly(store: Store, record: MakeRecord) -> None:
    tiny = Charge(Usage.of(1, 0), "provider", Decimal("0.0000000375"))
    for _ in range(3):
        await store.settle(record(charge=tiny))
    assert (await store.totals(KEY)).cost_usd == Decimal("0.0000001125")


@pytest.mark.parametrize(
    "fields",
    [
        {"charge": Charge(Usage.of(2**63, 1), "provider", None)},
        {"charge": Charge(Usage.of(10**400, 1), "provider", None)},
        {"charge": Charge(Usage.of(1, 1), "provider", Decimal("1e400"))},
    ],
    ids=["2^63 tokens", "10^400 tokens", "10^400 USD"],
)
async def test_a_charge_beyond_any_bound_takes_no_other_settlement_with_it(
    store: Store, record: MakeRecord, fields: dict[str, object]
) -> None:
    good = [record("good", charge=CHARGE) for _ in range(2)]
    bad = record("bad", **fields)
    results = await soon(
        asyncio.gather(*(store.settle(item) for item in [good[0], bad, good[1]]), return_exceptions=True)
    )
    assert isinstance(results[0], Totals)
    assert isinstance(results[2], Totals)
    assert (await store.totals(SessionKey("alice", "good"))).calls == 2


# --- isolation ------------------------------------------------------------------------------------------------------------------


async def test_one_id_under_two_keys_is_two_sessions(store: Store, record: MakeRecord) -> None:
    await store.settle(record(namespace="alice", charge=CHARGE))
    await store.settle(record(namespace="bob", charge=CHARGE))
    for namespace in ("alice", "bob"):
        assert await store.totals(SessionKey(namespace, "s")) == ONCE
        assert len(await store.calls(SessionKey(namespace, "s"), 10)) == 1


@pytest.mark.parametrize(
    ("namespace", "session"),
    [
        ("alice", "S"),
        ("Alice", "s"),
        ("", "alice/s"),
        ("alice/", "s"),
        ("alice", "s "),
        ("alice%", "s"),
        ("a_ice", "s"),
    ],
)
async def test_no_other_spelling_reaches_a_session(
    store: Store, record: MakeRecord, namespace: str, session: str
) -> None:
    item = record(request_id="mine", charge=CHARGE)
    await store.settle(item)
    other = SessionKey(namespace, session)
    assert await store.totals(other) == Totals()
    assert await store.session(other) is None
    assert await store.calls(other, 10) == []
    assert not await store.reset(other)
    assert not await store.delete(other)
    if namespace != "alice":
        assert await store.call(namespace, "mine") is None
        assert await store.call(namespace, item.call_id) is None
        assert (await store.sessions(namespace, 10, None, "recent")).sessions == []
    assert await store.totals(KEY) == ONCE


# --- calls ------------------------------------------------------------------------------------------------------------------------


async def test_calls_come_newest_first_and_no_more_than_asked(store: Store, record: MakeRecord) -> None:
    items = [record(at=1_000.0 + number) for number in range(5)]
    for item in items:
        await store.settle(item)
    assert list(await store.calls(KEY, 10)) == items[::-1]
    assert list(await store.calls(KEY, 2)) == items[:2:-1]


async def test_a_list_of_calls_continues_where_the_last_one_ended(store: Store, record: MakeRecord) -> None:
    items = [record(at=1_000.0 + number) for number in range(5)]
    for item in items:
        await store.settle(item)
    assert list(await store.calls(KEY, 2, items[3].call_id)) == [items[2], items[1]]
    assert list(await store.calls(KEY, 9, items[1].call_id)) == [items[0]]
    assert list(await store.calls(KEY, 9, items[0].call_id)) == []


async def test_the_newest_call_is_the_one_that_began_last_whenever_it_was_settled(
    store: Store, record: MakeRecord
) -> None:
    early, late = record(at=1_000.0, request_id="r"), record(at=2_000.0, request_id="r")
    await store.settle(late)
    await store.settle(early)
    assert list(await store.calls(KEY, 10)) == [late, early]
    assert await store.call("alice", "r") == late


async def test_a_call_is_found_by_its_request_id_and_by_its_call_id(store: Store, record: MakeRecord) -> None:
    item = record(request_id="req-1")
    await store.settle(item)
    for namespace in ("alice", None):
        assert await store.call(namespace, "req-1") == item
        assert await store.call(namespace, item.call_id) == item
        assert await store.call(namespace, "unknown") is None


async def test_the_newest_of_several_calls_with_one_request_id_is_found_each_in_its_namespace(
    store: Store, record: MakeRecord
) -> None:
    items = [
        record(at=1_000.0 + number, request_id="r", namespace=namespace)
        for number, namespace in enumerate(["alice", "alice", "bob"])
    ]
    for item in items:
        await store.settle(item)
    assert await store.call("alice", "r") == items[1]
    assert await store.call("bob", "r") == items[2]
    assert await store.call(None, "r") == items[2]


async def test_a_client_cannot_hide_a_call_by_sending_its_id_as_a_request_id(store: Store, record: MakeRecord) -> None:
    hidden = record(at=1_000.0, namespace="alice")
    await store.settle(hidden)
    await store.settle(record(at=2_000.0, namespace="bob", request_id=hidden.call_id))
    assert await store.call(None, hidden.call_id) == hidden


async def test_the_newest_call_with_an_answer_is_found_by_it_in_its_own_namespace_alone(
    store: Store, record: MakeRecord
) -> None:
    items = [
        record(at=1_000.0 + number, session=session, answer="a1", namespace=namespace)
        for number, (session, namespace) in enumerate([("s", "alice"), ("t", "alice"), ("s", "bob")])
    ]
    for item in (items[1], items[0], items[2], record(at=5_000.0), record(at=5_000.0, answer="a2")):
        await store.settle(item)
    assert await store.call_of_response("alice", "a1") == items[1]
    assert await store.call_of_response("bob", "a1") == items[2]
    assert await store.call_of_response("carol", "a1") is None
    assert await store.call_of_response("alice", "unknown") is None


async def test_orphaned_call_is_found_by_its_response_once_known(store: Store, record: MakeRecord) -> None:
    real = record(charge=CHARGE, answer="a1")
    await store.settle(replace(real, outcome=ORPHANED, answer=None))
    assert await store.call_of_response("alice", "a1") is None
    await store.settle(real)
    assert await store.call_of_response("alice", "a1") == real


async def test_deleted_call_is_not_found_by_its_response(store: Store, record: MakeRecord) -> None:
    await store.settle(record("s", at=1_000.0, charge=CHARGE, answer="deleted"))
    await store.settle(record("t", at=1_000.0, charge=CHARGE, answer="expired"))
    await store.delete(KEY)
    assert await store.call_of_response("alice", "deleted") is None
    assert await store.call_of_response("alice", "expired") is not None
    await store.expire(2_000.0)
    assert await store.call_of_response("alice", "expired") is None


# --- sessions -----------------------------------------------------------------------------------------------------------------------


async def test_sessions_are_sorted_by_last_call_or_by_tokens_largest_first(store: Store, record: MakeRecord) -> None:
    for number, size in enumerate([30, 10, 20]):
        await store.settle(record(f"s{number}", at=1_000.0 + number, charge=Charge(Usage.of(size, 0), "provider")))
    assert await all_pages(store, 10, "recent") == ["s2", "s1", "s0"]
    assert await all_pages(store, 10, "tokens") == ["s0", "s2", "s1"]


@pytest.mark.parametrize("sort", ["recent", "tokens"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
async def test_pages_show_each_session_once_in_order_also_among_equals(
    store: Store, record: MakeRecord, sort: Sort, limit: int
) -> None:
    for number in range(7):
        size = [5, 9, 5, 5, 9, 5, 1][number]
        await store.settle(record(f"s{number}", at=1_000.0 + size, charge=Charge(Usage.of(size, 0), "provider")))
    assert await all_pages(store, limit, sort) == ["s4", "s1", "s5", "s3", "s2", "s0", "s6"]


async def test_a_last_page_that_is_full_has_no_cursor(store: Store, record: MakeRecord) -> None:
    for number in range(2):
        await store.settle(record(f"s{number}", at=1_000.0 + number))
    assert (await store.sessions("alice", 2, None, "recent")).cursor is None
    assert (await store.sessions("alice", 1, None, "recent")).cursor is not None


async def test_pages_over_all_namespaces_show_each_session_once(store: Store, record: MakeRecord) -> None:
    for namespace in ("alice", "bob"):
        for session in ("a", "b"):
            await store.settle(record(session, namespace=namespace))
    assert await all_pages(store, 1, "recent", None) == ["b", "a", "b", "a"]
    assert await all_pages(store, 1, "recent", "bob") == ["b", "a"]


async def test_pages_are_complete_with_totals_beyond_double_precision(store: Store, record: MakeRecord) -> None:
    charge = Charge(Usage.of(MAX_TOKENS, 1), "provider", None)
    for session in ("a", "b", "c"):
        await store.settle(record(session, charge=charge))
    assert await all_pages(store, 1, "tokens") == ["c", "b", "a"]


async def test_a_session_deleted_between_two_pages_does_not_shift_the_rest(store: Store, record: MakeRecord) -> None:
    for number in range(4):
        await store.settle(record(f"s{number}", at=1_000.0 + number))
    first = await store.sessions("alice", 2, None, "recent")
    await store.delete(first.sessions[1].key)
    second = await store.sessions("alice", 2, first.cursor, "recent")
    assert [view.key.id for view in second.sessions] == ["s1", "s0"]


@pytest.mark.parametrize(
    "cursor",
    ["x", "!!!", "e30=", "W10=", "WzEsMl0=", "WyJhIiwiYiIsImMiXQ==", "WzEsImEiLG51bGxd", "é", "\x00", "A" * 10_000],
)
async def test_a_cursor_that_no_list_returned_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await store.sessions("alice", 10, cursor, "recent")
    assert caught.value.param == "cursor"


@pytest.mark.parametrize("value", ["18446744073709551615", "9223372036854775808", "-9223372036854775809", "1e999"])
@pytest.mark.parametrize("sort", ["recent", "tokens"])
async def test_a_cursor_with_a_number_that_no_session_has_is_refused(store: Store, value: str, sort: Sort) -> None:
    cursor = base64.urlsafe_b64encode(f'[{value},"a","b"]'.encode()).decode()
    with pytest.raises(InvalidRequest) as caught:
        await store.sessions("alice", 10, cursor, sort)
    assert caught.value.param == "cursor"


async def test_a_forged_cursor_shows_nothing_of_another_namespace(store: Store, record: MakeRecord) -> None:
    for namespace in ("alice", "bob"):
        for number in range(3):
            await store.settle(record(f"s{number}", at=1_000.0 + number, namespace=namespace))
    cursor = (await store.sessions("bob", 1, None, "recent")).cursor
    page = await store.sessions("alice", 10, cursor, "recent")
    assert {view.key.namespace for view in page.sessions} == {"alice"}


# --- reset, delete, expire ------------------------------------------------------------------------------------------------------------


async def test_a_reset_zeroes_the_totals_and_keeps_session_and_calls(store: Store, record: MakeRecord) -> None:
    await store.settle(record(at=1_000.0, derived_session=True, context=counted_tokens(original=99)))
    assert await store.reset(KEY)
    assert await store.session(KEY) == SessionView(KEY, 1_000.0, 1_002.0, Totals(), derived=True)
    assert len(await store.calls(KEY, 10)) == 1
    assert await store.settle(record(charge=CHARGE)) == ONCE


async def test_a_reset_is_of_the_totals_alone(store: Store, record: MakeRecord) -> None:
    await store.update(KEY, lambda _: STATE)
    await store.settle(record(charge=CHARGE, context=counted_tokens("a")))
    assert await store.reset(KEY)
    assert await store.remembered(KEY) == Remembered(STATE, LastTurn("a", 2))


async def test_deleted_session_keeps_no_state(store: Store, record: MakeRecord) -> None:
    for settled in (True, False):
        await store.update(KEY, lambda _: STATE)
        if settled:
            await store.settle(record(charge=CHARGE, context=counted_tokens("a")))
        assert await store.delete(KEY) is settled
        assert await store.remembered(KEY) == Remembered()


async def test_a_call_settled_before_a_reset_and_offered_again_after_it_adds_nothing(
    store: Store, record: MakeRecord
) -> None:
    item = record()
    await store.settle(item)
    await store.reset(KEY)
    assert await store.settle(item) == Totals()


async def test_a_deleted_session_is_forgotten_with_its_calls_and_no_other_is(store: Store, record: MakeRecord) -> None:
    item, other = record(request_id="r", charge=CHARGE), record("other", charge=CHARGE)
    await store.settle(item)
    await store.settle(other)
    assert await store.delete(KEY)
    assert await store.session(KEY) is None
    assert await store.totals(KEY) == Totals()
    assert await store.calls(KEY, 10) == []
    assert await store.call(None, "r") is None
    assert await store.call(None, item.call_id) is None
    assert await store.totals(SessionKey("alice", "other")) == ONCE


async def test_a_deleted_session_is_forgotten_with_calls_that_are_older_than_those_it_lists(
    store: Store, record: MakeRecord
) -> None:
    calls = [record(at=1_000.0 + number) for number in range(CALLS_PER_SESSION + 5)]
    for call in calls:
        await store.settle(call)
    assert await store.delete(KEY)
    assert [await store.call(None, call.call_id) for call in (*calls[:6], calls[-1])] == [None] * 7


async def test_reset_and_delete_say_when_there_is_no_such_session(store: Store) -> None:
    assert not await store.reset(KEY)
    assert not await store.delete(KEY)


async def test_sessions_expire_by_their_last_call_and_take_their_calls_along(store: Store, record: MakeRecord) -> None:
    old, new = record("old", at=1_000.0), record("new", at=2_000.0)
    await store.settle(old)
    await store.settle(new)
    assert await store.expire(1_500.0) == 1
    assert await store.session(SessionKey("alice", "old")) is None
    assert await store.calls(SessionKey("alice", "old"), 10) == []
    assert await store.call(None, old.call_id) is None
    assert await store.call(None, new.call_id) == new
    assert await store.expire(1_500.0) == 0


async def test_a_session_whose_calls_were_all_refused_expires_and_is_deleted_as_any_other(
    store: Store, record: MakeRecord
) -> None:
    await store.settle(record("old", charge=None, at=1_000.0, duration_s=1.0))
    await store.settle(record("deleted", charge=None, at=3_000.0, duration_s=1.0))
    # A refused call is the last call of its session as well, so the session stays.
    await store.settle(record("both", charge=CHARGE, at=1_000.0, duration_s=1.0))
    await store.settle(record("both", charge=None, at=3_000.0, duration_s=1.0))
    assert await store.expire(2_000.0) == 1
    assert await store.delete(SessionKey("alice", "deleted"))
    page = await store.sessions("alice", 10, None, "recent")
    assert [(view.key.id, view.totals, view.last_call_at) for view in page.sessions] == [("both", ONCE, 3_001.0)]
    for gone in ("old", "deleted"):
        assert await store.calls(SessionKey("alice", gone), 10) == []


async def test_a_session_whose_last_call_ended_just_then_does_not_expire(store: Store, record: MakeRecord) -> None:
    await store.settle(record(at=1_000.0))
    assert await store.expire(1_002.0) == 0
    assert await store.expire(1_002.5) == 1


async def test_old_calls_of_a_session_that_lives_on_expire_and_its_totals_stay(
    store: Store, record: MakeRecord
) -> None:
    old, new = record(at=1_000.0, charge=CHARGE), record(at=2_000.0, charge=CHARGE)
    await store.settle(old)
    await store.settle(new)
    assert await store.expire(1_500.0) == 0
    assert (await store.totals(KEY)).calls == 2
    assert await store.call(None, old.call_id) is None
    assert list(await store.calls(KEY, 10)) == [new]


async def test_calls_without_a_living_session_expire_too(store: Store, record: MakeRecord) -> None:
    refused, alone = record("never", at=1_000.0, charge=None), record(None, at=1_000.0)
    await store.settle(refused)
    await store.settle(alone)
    await store.expire(1_500.0)
    assert await store.call(None, refused.call_id) is None
    assert await store.call(None, alone.call_id) is None
    assert await store.calls(SessionKey("alice", "never"), 10) == []


async def test_a_state_expires_with_its_session(store: Store, record: MakeRecord, clock: Clock) -> None:
    await store.update(KEY, lambda _: STATE)
    await store.settle(record(charge=CHARGE, at=1_000.0, context=counted_tokens("a")))
    assert await store.expire(1_500.0) == 1
    assert await store.remembered(KEY) == Remembered()


async def test_a_state_that_was_changed_later_than_its_session_was_settled_outlives_it(
    store: Store, record: MakeRecord, clock: Clock
) -> None:
    await store.settle(record(charge=CHARGE, at=1_000.0, context=counted_tokens("a")))
    clock.time = 1_600.0
    await store.update(KEY, lambda _: STATE)
    assert await store.expire(1_500.0) == 1
    assert await store.remembered(KEY) == Remembered(STATE)
    assert await store.expire(1_700.0) == 0
    assert await store.remembered(KEY) == Remembered()


async def test_an_old_state_goes_if_it_has_no_session_and_stays_if_it_has(
    store: Store, record: MakeRecord, clock: Clock
) -> None:
    keys = {name: SessionKey("alice", name) for name in ("old", "young", "living")}
    await store.settle(record("living", at=5_000.0))
    for name, key in keys.items():
        clock.time = 2_000.0 if name == "young" else 1_000.0
        await store.update(key, lambda _: STATE)
    assert await store.expire(1_000.0) == 0
    assert (await store.remembered(keys["old"])).state == STATE
    assert await store.expire(1_500.0) == 0
    assert {name: bool((await store.remembered(key)).state.trim_decisions) for name, key in keys.items()} == {
        "old": False,
        "young": True,
        "living": True,
    }


async def test_old_lessons_expire(store: Store, clock: Clock) -> None:
    await store.learn({"old": one_more, "again": one_more})
    clock.time = 2_000.0
    await store.learn({"again": one_more, "new": one_more})
    assert await store.expire(1_000.0) == 0
    assert await store.learned("old") == b"x"
    assert await store.expire(1_500.0) == 0
    assert [await store.learned(key) for key in ("old", "again", "new")] == [None, b"xx", b"x"]


async def test_all_calls_of_a_long_session_expire(store: Store, record: MakeRecord) -> None:
    items = [record(f"s{number}", at=1_000.0) for number in range(450)]
    items += [record(None, at=1_000.0) for _ in range(450)]
    await asyncio.gather(*(store.settle(item) for item in items))
    assert await store.expire(2_000.0) == 450
    assert (await store.sessions(None, 10, None, "recent")).sessions == []
    assert [await store.call(None, item.call_id) for item in items[::50]] == [None] * 18


# --- tool results and client keys -----------------------------------------------------------------------------------------


async def test_tool_results_are_kept_by_handle_each_in_its_session_and_read_in_its_namespace(store: Store) -> None:
    other = SessionKey("bob", "s")
    assert list(await store.missing_results(KEY, ["a", "b"])) == ["a", "b"]
    await store.keep_results(KEY, {"a": "text \x00 漢" * 1_000, "at": "", "size": ""}, ROOM)
    assert list(await store.missing_results(KEY, ["a", "b", "at"])) == ["b"]
    assert list(await store.missing_results(other, ["a"])) == ["a"]
    for namespace in ("alice", None):
        assert await store.result(namespace, "a") == "text \x00 漢" * 1_000
        assert await store.result(namespace, "at") == ""
        assert await store.result(namespace, "size") == ""
        assert await store.result(namespace, "b") is None
    assert await store.result("bob", "a") is None
    assert await store.session(KEY) is None
    await store.keep_results(KEY, {}, ROOM)
    assert list(await store.missing_results(KEY, [])) == []


async def test_a_tool_result_with_half_a_character_is_kept_as_it_came(store: Store) -> None:
    text = "a\ud800b 漢"
    assert list(await store.keep_results(KEY, {"h": text}, ROOM)) == []
    assert await store.results(KEY, ["h"]) == {"h": text}
    assert await store.result("alice", "h") == text
    assert await store.results_size(KEY) == len(text.encode("utf-8", "surrogatepass"))


async def test_the_results_of_a_session_go_with_it_and_those_of_others_stay(store: Store, record: MakeRecord) -> None:
    other = SessionKey("alice", "other")
    await store.settle(record())
    for key in (KEY, other):
        await store.keep_results(key, {"same": "text"}, ROOM)
    await store.keep_results(KEY, {"own": "text"}, ROOM)
    assert await store.delete(KEY)
    assert list(await store.missing_results(KEY, ["same", "own"])) == ["same", "own"]
    assert (await store.result("alice", "same"), await store.result("alice", "own")) == ("text", None)


async def test_old_results_go_if_they_have_no_session_and_stay_if_they_have(
    store: Store, record: MakeRecord, clock: Clock
) -> None:
    living, young = SessionKey("alice", "living"), SessionKey("alice", "young")
    await store.settle(record("living", at=5_000.0))
    for key in (KEY, living):
        await store.keep_results(key, {"h": "text"}, ROOM)
    clock.time = 2_000.0
    await store.keep_results(young, {"h": "text"}, ROOM)
    assert await store.expire(1_500.0) == 0
    gone = [list(await store.missing_results(key, ["h"])) for key in (KEY, living, young)]
    assert gone == [["h"], [], []]


async def test_texts_are_kept_up_to_the_last_byte_of_the_room_there_is(store: Store) -> None:
    assert await store.results_size(KEY) == 0
    assert list(await store.keep_results(KEY, {"a": "漢", "b": "é", "c": "x" * 5}, 10)) == []
    assert await store.results_size(KEY) == 3 + 2 + 5, "bytes, not characters"
    assert list(await store.keep_results(KEY, {"d": "x"}, 10)) == ["d"]
    assert await store.result("alice", "d") is None
    assert list(await store.missing_results(KEY, ["a", "b", "c", "d"])) == ["d"]
    assert list(await store.keep_results(KEY, {"d": "x"}, 11)) == []
    assert await store.results_size(KEY) == 11


async def test_text_without_room_leaves_room_for_later_texts(store: Store) -> None:
    texts = {"long": "x" * 9, "a": "x" * 4, "longer": "x" * 7, "b": "x" * 4}
    assert list(await store.keep_results(KEY, texts, 8)) == ["long", "longer"]
    assert await store.results_size(KEY) == 8
    assert [await store.result("alice", handle) for handle in texts] == [None, "xxxx", None, "xxxx"]


async def test_stored_text_is_accepted_again_without_room_and_counts_once(store: Store) -> None:
    await store.keep_results(KEY, {"a": "x" * 6}, 10)
    for most in (10, 6, 0):
        assert list(await store.keep_results(KEY, {"a": "x" * 6, "b": "x" * 5}, most)) == ["b"]
        assert await store.results_size(KEY) == 6
        assert await store.result("alice", "a") == "x" * 6, "it never makes room, be the bound lower now"
    assert list(await store.keep_results(KEY, {"a": "x" * 6, "b": "x" * 4}, 10)) == []


async def test_a_handle_keeps_the_text_that_it_was_given_first(store: Store) -> None:
    assert list(await store.keep_results(KEY, {"a": "first", "none": ""}, ROOM)) == []
    assert list(await store.keep_results(KEY, {"a": "another", "none": "another"}, ROOM)) == []
    assert await store.results(KEY, ["a", "none"]) == {"a": "first", "none": ""}
    assert await store.results_size(KEY) == len("first")


async def test_the_texts_of_several_handles_are_read_at_once_of_one_session_only(store: Store) -> None:
    other = SessionKey("alice", "other")
    await store.keep_results(KEY, {"a": "text \x00 漢", "b": "", "size": "9"}, ROOM)
    await store.keep_results(other, {"c": "of another"}, ROOM)
    assert await store.results(KEY, ["b", "never", "a", "c", "size"]) == {"a": "text \x00 漢", "b": "", "size": "9"}
    assert await store.results(KEY, []) == {}
    assert await store.results(SessionKey("bob", "s"), ["a"]) == {}


async def test_results_limit_applies_per_session_and_resets_with_deletion(
    store: Store, record: MakeRecord, clock: Clock
) -> None:
    other = SessionKey("alice", "other")
    await store.settle(record())
    for key in (KEY, other):
        assert list(await store.keep_results(key, {"h": "x" * 10}, 10)) == []
    await store.delete(KEY)
    assert (await store.results_size(KEY), await store.results_size(other)) == (0, 10)
    assert list(await store.keep_results(KEY, {"new": "x" * 10}, 10)) == []
    clock.time = 3_000.0
    await store.expire(2_000.0)
    assert (await store.results_size(KEY), await store.results_size(other)) == (0, 0)
    assert list(await store.keep_results(other, {"new": "x" * 10}, 10)) == []


async def test_texts_that_come_at_once_are_together_no_more_than_there_is_room(store: Store) -> None:
    texts = {f"h{number}": "x" * (number % 7 + 1) for number in range(60)}
    offers = [dict(list(texts.items())[first : first + 9]) for first in range(0, 54, 3)]
    refused = await soon(asyncio.gather(*(store.keep_results(KEY, some, 100) for some in offers)))
    kept = texts.keys() - await store.missing_results(KEY, list(texts))
    assert await store.results_size(KEY) == sum(len(texts[handle]) for handle in kept)
    assert 94 <= await store.results_size(KEY) <= 100
    for some, gone in zip(offers, refused, strict=True):
        assert some.keys() - gone <= kept, "what was not refused is there"


async def test_a_client_key_is_kept_once_by_its_name_until_it_is_revoked(store: Store) -> None:
    full = StoredKey("b", b"\x00\xff digest", 1_000.5, ("gpt-*",), Limits(5, 2**40, None, 60.0), 9)
    small = StoredKey("a", b"", 0.0)
    assert await store.keys() == []
    assert await store.add_key(full)
    assert await store.add_key(small)
    assert not await store.add_key(StoredKey("b", b"other", 1.0))
    assert list(await store.keys()) == [small, full]
    assert await store.revoke_key("b")
    assert not await store.revoke_key("b")
    assert list(await store.keys()) == [small]
    await store.expire(10.0**9)
    assert list(await store.keys()) == [small]


async def test_one_of_several_client_keys_of_a_name_that_are_added_at_once_is_kept(store: Store) -> None:
    added = await soon(asyncio.gather(*(store.add_key(StoredKey("a", bytes([n]), 0.0)) for n in range(8))))
    assert sorted(added) == [False] * 7 + [True]
    assert [key.digest for key in await store.keys()] == [bytes([added.index(True)])]


async def test_a_client_key_is_changed_and_keeps_what_the_change_does_not_name(store: Store) -> None:
    old = StoredKey("a", b"one", 1.0, ("gpt-*",), Limits(calls=5), 9)
    assert await store.add_key(old)
    changed = await store.change_key("a", lambda key: replace(key.rotated(b"two", 10.0, 60.0), expires_at=99.5))
    assert changed == replace(old, digest=b"two", expires_at=99.5, replaced=(ReplacedSecret(b"one", 70.0),))
    assert list(await store.keys()) == [changed]
    assert await store.change_key("b", lambda key: key) is None
    with pytest.raises(ZeroDivisionError):
        await store.change_key("a", lambda key: replace(key, rpm=key.rpm // 0 if key.rpm else 1))
    assert list(await store.keys()) == [changed]


async def test_no_change_of_a_client_key_is_lost_among_others_at_the_same_time(store: Store) -> None:
    await store.add_key(StoredKey("a", b"", 0.0, rpm=0))
    await soon(
        asyncio.gather(*(store.change_key("a", lambda key: replace(key, rpm=(key.rpm or 0) + 1)) for _ in "12345"))
    )
    assert [key.rpm for key in await store.keys()] == [5]


async def test_the_sessions_of_each_namespace_are_counted(store: Store, record: MakeRecord) -> None:
    for session, namespace in (("a", "alice"), ("b", "alice"), ("a", "bob")):
        await store.settle(record(session, namespace=namespace))
    assert list(await store.session_counts(["bob", "nobody", "alice"])) == [1, 0, 2]
    await store.delete(SessionKey("alice", "a"))
    assert list(await store.session_counts(["alice"])) == [1]
    assert list(await store.session_counts([])) == []


async def test_a_store_that_works_answers_a_ping(store: Store) -> None:
    await soon(store.ping())
