"""What stands in the record of a call, and what it is charged: as reported, else as estimated, else nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.call.record import RecordBuilder, input_estimate
from gateway.call.state import CallState
from gateway.call.types import CallAccounts, TakenHold
from gateway.core.fitting.report import Fate, Fates
from gateway.core.ledger.arithmetic import NOTHING, Amount, Hold
from gateway.core.ledger.charging import CallNeed, TokenRate
from gateway.core.plan import Plan
from gateway.core.pricing import Price, Rates, price_per_million
from gateway.core.record import ORPHANED, PENDING, CallRecord, ContextRecord, Outcome
from gateway.core.routing import ModelFacts, Route
from gateway.core.steps import Step
from gateway.core.usage import Charge, Usage
from gateway.dialects import endpoint
from gateway.dialects.base import Call, ParsedResponse
from gateway.dialects.reported import ReportedUsage
from gateway.stores.leases import Lease
from tests.support.fakes import BODY, KEY, PRICE, FakeReply, World
from tests.support.scripted import completion


@pytest.fixture
def world() -> World:
    return World()


async def test_names_of_the_provider_are_clean_in_the_record(world: World) -> None:
    body = completion(model="a\nb" + "c" * 1000)
    world.upstream.answer = lambda _: FakeReply(pieces=[body])
    await world.call()
    model = world.record.response_model
    assert model is not None
    assert model.startswith("a?b")
    assert len(model) == 256


async def test_times_and_sizes_stand_in_the_record(world: World) -> None:
    await world.call()
    record = world.record
    assert record.call_id == "call-1"
    assert record.request_id == "request-1"
    assert record.first_byte_s is not None
    assert 0 <= record.overhead_s <= record.first_byte_s <= record.duration_s < 60
    assert (record.request_bytes, record.response_bytes) == (len(BODY), len(completion()))
    assert record.session == KEY


def test_the_mode_and_the_step_of_the_call_stand_in_the_record(world: World) -> None:
    state = answered(world, ParsedResponse())
    assert (records().of(state).mode, records().of(state).step) == (None, None)
    state.context.mode, state.steps.step = "table", Step("review")
    assert (records().of(state).mode, records().of(state).step) == ("table", "review")


# --- the charge ---------------------------------------------------------------------------------------------------


def records(*, estimate_missing: bool = True) -> RecordBuilder:
    facts = ModelFacts(price=PRICE)
    return RecordBuilder(lambda _: facts, lambda: 7.0, cached_weight=1.0, estimate_missing=estimate_missing)


def answered(world: World, answer: ParsedResponse, path: str = "chat/completions") -> CallState:
    """A call that was answered with this, read to its end."""
    state = CallState.of(world.incoming(path=path), 0.0)
    state.call = state.dialect.read(BODY)
    state.routing.route = Route("q", "q-real")
    state.dispatch.sent_at, state.dispatch.head_at = 1.0, 2.0
    state.response.status, state.response.outcome, state.response.is_billed = 200, "ok", True
    state.response.parsed = answer
    return state


def test_usage_is_charged_as_it_was_reported(world: World) -> None:
    charge = records().of(answered(world, ParsedResponse(ReportedUsage(10, 5, 15), output_estimate=99))).charge
    assert charge is not None
    assert (charge.usage.input_tokens, charge.usage.output_tokens, charge.source) == (10, 5, "provider")
    assert charge.cost_usd == Decimal("0.000060")


def test_a_side_that_was_not_reported_is_estimated(world: World) -> None:
    state = answered(world, ParsedResponse(ReportedUsage(None, 5, None)))
    charge = records().of(state).charge
    assert charge is not None
    assert charge.usage.input_tokens == input_estimate(state) > 0
    assert charge.usage.output_tokens == 5


def test_without_a_report_it_is_estimated_or_counted_as_nothing_as_the_settings_say(world: World) -> None:
    state = answered(world, ParsedResponse(output_estimate=7))
    charge = records().of(state).charge
    assert charge is not None
    assert (charge.usage.output_tokens, charge.source) == (7, "estimated")
    nothing = records(estimate_missing=False).of(state).charge
    assert nothing is not None
    assert (nothing.usage.total_tokens, nothing.cost_usd) == (0, Decimal(0))


def test_a_side_alone_that_was_not_reported_counts_as_nothing_where_the_settings_say_so(world: World) -> None:
    zero = records(estimate_missing=False)
    for reported, tokens in ((ReportedUsage(50, None, None), (50, 0)), (ReportedUsage(None, 5, None), (0, 5))):
        charge = zero.of(answered(world, ParsedResponse(reported, output_estimate=7))).charge
        assert charge is not None
        assert (charge.usage.input_tokens, charge.usage.output_tokens, charge.source) == (*tokens, "mixed")


def test_what_counts_as_nothing_has_no_cost_where_the_price_is_not_known(world: World) -> None:
    made = RecordBuilder(lambda _: ModelFacts(), lambda: 7.0, cached_weight=1.0, estimate_missing=False)
    charge = made.of(answered(world, ParsedResponse(output_estimate=7))).charge
    assert charge is not None
    assert (charge.usage.total_tokens, charge.cost_usd) == (0, None)


@pytest.mark.parametrize(
    ("given", "tokens"), [([7] * 4_000, 4_000), ([[7] * 50, [7] * 30], 80), (["four" * 6, [7]], 7)]
)
async def test_ids_of_tokens_are_charged_where_nothing_is_reported(world: World, given: object, tokens: int) -> None:
    world.upstream.answer = lambda _: FakeReply(pieces=[b'{"object":"list","data":[]}'])
    await world.call(world.incoming(json.dumps({"model": "m", "input": given}).encode(), "embeddings"))
    charge = world.record.charge
    assert charge is not None
    assert (charge.usage.input_tokens, charge.usage.output_tokens, charge.source) == (tokens, 0, "estimated")


def test_an_error_without_any_text_costs_nothing(world: World) -> None:
    assert records().of(answered(world, ParsedResponse(error=True))).charge is None
    assert records().of(answered(world, ParsedResponse(error=True, output_estimate=1))).charge is not None


def test_an_answer_without_usage_is_estimated_also_on_a_path_that_nobody_knows(world: World) -> None:
    charge = records().of(answered(world, ParsedResponse(output_estimate=7), "unheard/of")).charge
    assert charge is not None
    assert (charge.source, charge.usage.output_tokens) == ("estimated", 7)


def test_what_only_keeps_something_costs_nothing_but_for_a_stream_with_a_text(world: World) -> None:
    state = answered(world, ParsedResponse(output_estimate=7), "files")
    assert records().of(state).charge is None
    state.response.is_event_stream = True
    assert records().of(state).charge is not None


@pytest.mark.parametrize(
    ("outcome", "head_at", "is_charged"),
    [
        ("client_left", None, True),
        ("too_slow", None, True),
        ("client_left", 2.0, False),
        ("upstream_failed", None, False),
    ],
)
def test_a_call_left_while_the_provider_was_at_work_is_charged_what_was_sent(
    world: World, outcome: Outcome, head_at: float | None, is_charged: bool
) -> None:
    state = answered(world, ParsedResponse())
    state.response.outcome, state.dispatch.head_at, state.response.is_billed = outcome, head_at, False
    state.dispatch.is_at_work = True
    record = records().of(state)
    assert (record.charge is not None) is is_charged
    assert record.charge is None or record.charge.usage.input_tokens == input_estimate(state)
    state.dispatch.is_at_work = False
    assert records().of(state).charge is None, "it waited for another try"


def test_what_is_not_metered_is_charged_nothing_even_if_it_is_left(world: World) -> None:
    incoming = world.incoming(method="GET", path="models", endpoint=endpoint("GET", "models"))
    state = replace(answered(world, ParsedResponse()), incoming=incoming)
    state.response.outcome, state.dispatch.head_at, state.response.is_billed = "client_left", None, False
    assert records().of(state).charge is None


def test_a_call_whose_worker_is_gone_is_charged_for_what_was_sent(world: World) -> None:
    need = CallNeed(40, rate=TokenRate(Decimal(2), Decimal(3)))
    record = records().orphaned(answered(world, ParsedResponse()), need)
    assert record.outcome == ORPHANED
    assert record.charge is not None
    assert (record.charge.usage.total_tokens, record.charge.cost_usd) == (40, Decimal(80))
    assert record.spent.tokens == 40


def test_the_record_for_a_worker_that_is_gone_tells_the_fate_of_no_message(world: World) -> None:
    fates = Fates.of([Fate("user", 40, 0, "drop")])
    context = ContextRecord(30, 70, "exact", None, 30, 0, "key", 30, trimmed={"drop": 1}, message_fates=fates)
    state = answered(world, ParsedResponse())
    state.context.plan = Plan(context, 30)
    orphaned = records().orphaned(state, CallNeed(30)).context
    assert orphaned == replace(context, message_fates=Fates())
    assert records().of(state).context == context


def test_the_record_for_a_worker_that_is_gone_leaves_no_remark_in_that_of_its_call(world: World) -> None:
    state = answered(world, ParsedResponse(), "audio/transcriptions")
    state.call = Call("transcription", None, False, b"a form", {})
    state.response.bytes_sent, state.response.parsed = 9, None
    assert records().orphaned(state, CallNeed(40)).charge is not None
    state.response.parsed = ParsedResponse(ReportedUsage(10, 5, 15))
    record = records().of(state)
    assert record.charge is not None
    assert record.charge.cost_usd is not None
    assert "price" not in record.notes


# --- what the provider says that it costs -------------------------------------------------------------------------


def of_reporter(*reporters: str, estimate_missing: bool = True) -> RecordBuilder:
    facts = ModelFacts(price=PRICE)
    return RecordBuilder(
        lambda _: facts, lambda: 7.0, cached_weight=1.0, estimate_missing=estimate_missing, cost_reporters=reporters
    )


TOLD = Decimal("0.0125")


def test_what_a_provider_says_that_a_call_costs_is_charged_instead_of_list_prices(world: World) -> None:
    state = answered(world, ParsedResponse(ReportedUsage(10, 5, 15, cost_usd=TOLD)))
    charge = of_reporter("q").of(state).charge
    assert charge is not None
    assert (charge.cost_usd, charge.source, charge.usage.total_tokens) == (TOLD, "provider", 15)
    other = of_reporter("another").of(state).charge
    assert other is not None
    assert other.cost_usd == Decimal("0.000060")


def test_a_call_that_costs_nothing_on_its_providers_word_costs_nothing(world: World) -> None:
    charge = of_reporter("q").of(answered(world, ParsedResponse(ReportedUsage(10, 5, 15, cost_usd=Decimal(0))))).charge
    assert charge is not None
    assert charge.cost_usd == 0


def test_tokens_are_estimated_and_the_cost_is_as_told_where_only_that_is_told(world: World) -> None:
    state = answered(world, ParsedResponse(ReportedUsage(None, None, None, cost_usd=TOLD), output_estimate=7))
    charge = of_reporter("q").of(state).charge
    assert charge is not None
    assert (charge.cost_usd, charge.source, charge.usage.output_tokens) == (TOLD, "estimated", 7)
    uncounted = of_reporter("q", estimate_missing=False).of(state).charge
    assert uncounted is not None
    assert (uncounted.cost_usd, uncounted.usage.total_tokens) == (TOLD, 0)


# --- further models that the provider calls -------------------------------------------------------------------------


def test_an_advisor_is_charged_at_its_own_price(world: World) -> None:
    prices = {"q-real": PRICE, "dear": price_per_million(input=Decimal(100), output=Decimal(1_000))}
    made = RecordBuilder(
        lambda route: ModelFacts(price=prices.get(route.model)), lambda: 7.0, cached_weight=1.0, estimate_missing=True
    )

    def charged(*parts: tuple[str, Usage], model: str = "q-real-20990101") -> tuple[Decimal | None, str]:
        state = answered(world, ParsedResponse(ReportedUsage(110, 55, 165, named=parts), model=model))
        state.routing.advisors = (Route("q", "dear"),)
        record = made.of(state)
        assert record.charge is not None
        assert record.charge.usage.total_tokens == 165
        return record.charge.cost_usd, record.notes.get("price", "")

    own, advice, both = Usage(10, 5, 15), Usage(100, 50, 150), Usage(110, 55, 165)
    assert charged() == charged(("q-real-20990101", both)) == charged(("q-real", both)) == (Decimal("0.00066"), "")
    assert charged(("q-real-20990101", own), ("dear", advice)) == (Decimal("0.06006"), "")
    assert charged(("dear", advice)) == charged(("dear", advice), model="calls itself so") == (Decimal("0.06006"), "")
    assert charged(("nobody", advice)) == (None, 'unknown for "nobody", which the provider called as well')


def test_web_searches_are_charged_beside_the_tokens(world: World) -> None:
    price = Price(Rates(Decimal("0.001"), Decimal("0.002")), {}, search=Decimal("0.01"))
    state = answered(world, ParsedResponse(ReportedUsage(10, 5, 15, searches=3)))
    made = RecordBuilder(lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True)
    record = made.of(state)
    assert record.charge is not None
    assert record.charge.cost_usd == Decimal("0.05")
    assert record.spent.nano_usd == 50_000_000


@pytest.mark.parametrize(
    ("reported", "fee", "cost", "note"),
    [
        (ReportedUsage(10, 5, 15, searches=3), None, None, "unknown for its web searches"),
        (ReportedUsage(10, 5, 15), None, Decimal("0.02"), None),
        (ReportedUsage(10, 5, 15, picture_tokens=9), Decimal(0), None, "unknown for images that a tool created"),
    ],
)
def test_what_a_tool_of_the_provider_costs_is_not_left_out_of_a_cost(
    world: World, reported: ReportedUsage, fee: Decimal | None, cost: Decimal | None, note: str | None
) -> None:
    price = Price(Rates(Decimal("0.001"), Decimal("0.002")), {}, search=fee)
    made = RecordBuilder(lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True)
    record = made.of(answered(world, ParsedResponse(reported)))
    assert record.charge is not None
    assert (record.charge.cost_usd, record.notes.get("price")) == (cost, note)
    assert record.spent.nano_usd == 20_000_000


# --- refusals -----------------------------------------------------------------------------------------------------


def of_refuser(price: Price | None = PRICE, **billed: tuple[str, ...]) -> RecordBuilder:
    return RecordBuilder(
        lambda _: ModelFacts(price=price),
        lambda: 7.0,
        cached_weight=1.0,
        estimate_missing=True,
        billed_refusals=billed,
    )


REFUSED = ParsedResponse(ReportedUsage(412, 0, None), finish_reason="refusal", refusal="cyber")


@pytest.mark.parametrize("price", [PRICE, None])
def test_a_refusal_that_is_not_billed_counts_as_a_call_and_nothing_more(world: World, price: Price | None) -> None:
    record = of_refuser(price, q=("bio",)).of(answered(world, REFUSED))
    assert record.charge == Charge(Usage(), "provider", Decimal(0))
    assert record.spent == Amount(0, 0, 1)
    assert record.last_turn is None
    assert record.notes["unbilled"] == "not billed by q: refused before any output (cyber): 412 input tokens"


def test_a_refusal_is_charged_as_reported_where_nothing_says_that_its_provider_does_not_bill_it(world: World) -> None:
    for of in (of_refuser(), of_refuser(another=()), of_refuser(q=("cyber",))):
        record = of.of(answered(world, REFUSED))
        assert record.charge is not None
        assert record.charge.usage.input_tokens == 412
        assert "unbilled" not in record.notes


# --- service tiers ------------------------------------------------------------------------------------------------


def test_a_tier_whose_price_nobody_knows_has_no_cost_and_takes_the_standard_one_of_budgets(world: World) -> None:
    record = records().of(answered(world, ParsedResponse(ReportedUsage(10, 5, 15), service_tier="priority")))
    assert record.charge is not None
    assert record.charge.cost_usd is None
    assert record.spent.nano_usd == 60_000
    assert 'the service tier "priority"' in record.notes["price"]


def test_a_tier_that_is_no_dearer_costs_the_standard_price(world: World) -> None:
    record = records().of(answered(world, ParsedResponse(ReportedUsage(10, 5, 15), service_tier="default")))
    assert record.charge is not None
    assert record.charge.cost_usd == Decimal("0.000060")
    assert "price" not in record.notes


def pending(world: World) -> CallRecord:
    state = answered(world, ParsedResponse(id="resp_1"), "responses")
    state.call = state.dialect.read(b'{"model":"m","input":"hi","background":true}')
    return replace(records().of(state), spent=Amount(5_000, 60_000_000, 1))


def priced(price: Price | None) -> RecordBuilder:
    return RecordBuilder(lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True)


@pytest.mark.parametrize(("named", "usd"), [(None, 22), ("default", 11), ("priority", 22)])
def test_an_answer_in_the_background_costs_what_the_tier_does_that_was_asked_for_unless_it_names_one(
    world: World, named: str | None, usd: int
) -> None:
    price = replace(PRICE, tiers={"priority": price_per_million(input=Decimal(2), output=Decimal(20))})
    made = ParsedResponse(ReportedUsage(10**6, 10**6, 2 * 10**6), finish_reason="completed", service_tier=named)
    record = priced(price).fetched(pending(world), made, Route("q", "q-real"), "priority", 0.0)
    assert record.charge is not None
    assert record.charge.cost_usd == usd
    assert record.spent == Amount(2 * 10**6, usd * 10**9, 1)


HOLD = Hold("call-1", (), Amount(100, 1_000, 1), Amount(2, 10), 1, 50)


def held(state: CallState, hold: Hold | None = HOLD, noted: int = 0) -> CallState:
    """What is held for a call with two answers, of which so many tokens are known to have come."""
    state.budget.hold = TakenHold(hold, 50, Lease("call-1", 60, 100, answers=2, noted=noted), None, CallAccounts())
    return state


def in_background(world: World, answer: ParsedResponse) -> CallState:
    state = answered(world, answer, "responses")
    state.call = state.dialect.read(b'{"model":"m","input":"hi","background":true}')
    return state


@pytest.mark.parametrize("outcome", ["ok", "client_left", "upstream_broken"])
@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_what_was_not_reported_of_an_answer_made_at_once_is_spent_as_estimated_not_as_held(
    world: World, path: str, outcome: Outcome
) -> None:
    state = held(answered(world, ParsedResponse(id="resp_1", output_estimate=7), path))
    state.response.outcome = outcome
    record = records().of(state)
    assert record.outcome == outcome
    assert record.charge is not None
    assert record.spent.tokens == record.charge.usage.total_tokens == input_estimate(state) + 7


@pytest.mark.parametrize(
    ("answer", "outcome", "is_pending"),
    [
        (ParsedResponse(id="resp_1"), "ok", True),
        (ParsedResponse(ReportedUsage(3, 4, 7), id="resp_1"), "client_left", True),
        (ParsedResponse(ReportedUsage(3, 4, 7), id="resp_1"), "ok", False),
        (ParsedResponse(ReportedUsage(3, 4, 7), id="resp_1", finish_reason="completed"), "client_left", False),
        (ParsedResponse(error=True, id="resp_1"), "ok", True),
        (ParsedResponse(ReportedUsage(3, 0, 3), id="resp_1"), "ok", True),
    ],
)
def test_all_that_was_held_is_spent_while_an_answer_is_being_made_in_the_background(
    world: World, answer: ParsedResponse, outcome: Outcome, *, is_pending: bool
) -> None:
    state = held(in_background(world, answer))
    state.response.outcome = outcome
    record = records().of(state)
    assert record.outcome == (PENDING if is_pending else outcome)
    assert record.spent == (HOLD.amount(50) if is_pending else Amount(7, 43_000, 1))


def test_all_that_was_held_stays_spent_of_an_answer_in_the_background_that_nobody_can_fetch(world: World) -> None:
    record = records().of(held(in_background(world, ParsedResponse())))
    assert (record.outcome, record.spent, "answer" in record.notes) == ("ok", HOLD.amount(50), False)


@pytest.mark.parametrize(
    ("hold", "later", "spent"),
    [
        (HOLD, False, HOLD.amount(4)),
        (HOLD, True, HOLD.amount(50)),
        (None, False, Amount(7, 0, 1)),
        (None, True, Amount(7, 0, 1)),
    ],
)
def test_a_call_that_cannot_be_read_is_spent_as_far_as_it_is_known_to_have_come(
    world: World, hold: Hold | None, spent: Amount, *, later: bool
) -> None:
    state = in_background(world, ParsedResponse()) if later else answered(world, ParsedResponse())
    state = held(state, hold, noted=7)
    record = records().unread(state)
    assert record.charge is not None
    assert (record.charge.usage.output_tokens, record.spent) == (7, spent)
    state.budget.hold = None
    assert records().unread(state).charge == Charge(Usage.of(0, 0), "estimated", None)


@pytest.mark.parametrize(
    ("billed", "at_work", "is_charged"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_call_that_cannot_be_read_costs_nothing_where_no_provider_had_it(
    world: World, *, billed: bool, at_work: bool, is_charged: bool
) -> None:
    state = held(answered(world, ParsedResponse()), noted=7)
    state.response.is_billed, state.dispatch.is_at_work = billed, at_work
    record = records().unread(state)
    assert (record.charge is not None, record.spent.calls) == (is_charged, int(is_charged))


def test_the_record_of_an_answer_that_was_fetched_says_what_it_came_to(world: World) -> None:
    begun = replace(pending(world), started_at=100.0, duration_s=2.0)
    begun = replace(begun, notes={**begun.notes, "price": "not known", "x": "y"}, tools=(), response_model="old")
    made = ParsedResponse(ReportedUsage(3, 4, 7), model="new", tools=("look",), finish_reason="failed", error=True)
    for now, lasted in ((130.0, 30.0), (90.0, 2.0)):
        record = records().fetched(begun, made, Route("q", "q-real"), None, now)
        assert (record.outcome, record.finish_reason, record.duration_s) == ("provider_error", "failed", lasted)
        assert (record.response_model, record.tools) == ("new", ("look",))
        assert record.notes == {"answer": "resp_1", "x": "y"}
    assert records().fetched(begun, replace(made, model=None), Route("q", "q-real"), None, 0.0).response_model == "old"
    orphaned = replace(begun, outcome=ORPHANED, notes={})
    assert records().fetched(orphaned, replace(made, id="resp_1"), Route("q", "q-real"), None, 0.0).was_fetched


@pytest.mark.parametrize(
    ("made", "output"),
    [
        (ParsedResponse(ReportedUsage(None, None, None, cost_usd=TOLD), output_estimate=9), 9),
        (ParsedResponse(output_estimate=9), 9),
        (ParsedResponse(output_estimate=3), 5),
    ],
)
def test_an_answer_in_the_background_that_reports_nothing_is_charged_for_what_came_of_it(
    world: World, made: ParsedResponse, output: int
) -> None:
    begun = replace(pending(world), charge=Charge(Usage.of(11, 5), "estimated", None))
    charge = records().fetched(begun, made, Route("q", "q-real"), None, 0.0).charge
    assert charge is not None
    assert (charge.usage, charge.source) == (Usage.of(11, output), "estimated")
    nothing = records(estimate_missing=False).fetched(begun, made, Route("q", "m"), None, 0.0)
    assert nothing.charge is not None
    assert nothing.charge.usage.output_tokens == 0
    failed = records().fetched(begun, replace(made, error=True), Route("q", "q-real"), None, 0.0)
    assert (failed.charge, failed.spent) == (None, NOTHING)


@pytest.mark.parametrize(
    ("told", "price", "tier", "cost", "nano_usd"),
    [
        (TOLD, PRICE, None, TOLD, 12_500_000),
        (TOLD, None, None, TOLD, 12_500_000),
        (None, PRICE, None, Decimal("0.00006"), 60_000),
        (None, PRICE, "priority", None, 60_000),
        (None, None, None, None, 60_000_000),
    ],
)
def test_an_answer_in_the_background_is_spent_as_told_else_at_its_price_else_as_it_was_held(
    world: World, told: Decimal | None, price: Price | None, tier: str | None, *, cost: Decimal | None, nano_usd: int
) -> None:
    made = ParsedResponse(ReportedUsage(10, 5, 15, cost_usd=told), finish_reason="completed", service_tier=tier)
    of = RecordBuilder(
        lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True, cost_reporters=["q"]
    )
    record = of.fetched(pending(world), made, Route("q", "q-real"), None, 0.0)
    assert record.charge is not None
    assert record.charge.cost_usd == cost
    assert record.spent == Amount(15, nano_usd, 1)


async def test_a_report_of_no_input_teaches_nothing_and_is_charged_as_it_is(world: World) -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 5, "total_tokens": 5}
    world.upstream.answer = lambda _: FakeReply(pieces=[completion(usage=usage)])
    first, _ = await world.call()
    assert first.context is not None
    assert world.record.charge is not None
    assert world.record.charge.usage.input_tokens == 0
    assert (await world.store.remembered(KEY)).last_turn is None
    again, _ = await world.call()
    assert again.context is not None
    assert again.context.tokens == first.context.tokens, "what weighs nothing to one who does not count weighs the same"


async def test_a_server_that_reports_only_new_tokens_does_not_make_a_conversation_seem_short() -> None:
    # It makes three tokens of eight characters, where they are estimated at two.
    world = World(facts=lambda _: ModelFacts(window=8_000))
    usage = {"prompt_tokens": 385, "completion_tokens": 5, "total_tokens": 390}
    world.upstream.answer = lambda _: FakeReply(pieces=[completion(usage=usage)])
    messages: list[dict[str, str]] = []
    trimmed = 0
    for turn in range(30):
        messages.append({"role": "user", "content": f"{turn} " + "x" * 1_000})
        reply, _ = await world.call(world.incoming(json.dumps({"model": "m", "messages": messages}).encode()))
        messages.append({"role": "assistant", "content": "y"})
        assert reply.context is not None
        sent = sum(len(one["content"]) for one in json.loads(world.upstream.sent[-1].body)["messages"])
        assert sent * 3 // 8 <= 8_000, turn
        trimmed += bool(reply.context.trimmed)
    assert trimmed
    assert (await world.store.totals(KEY)).input_tokens == 30 * 385, "what is reported is charged"


@pytest.mark.parametrize(
    ("passes", "is_learned"),
    [
        ([("message", 0), ("advisor_message", 5_000), ("message", 1_200)], True),
        ([("compaction", 0), ("message", -900)], False),
    ],
)
async def test_a_session_learns_what_its_request_weighed_and_is_charged_for_all_passes(
    world: World, passes: list[tuple[str, int]], is_learned: bool
) -> None:
    first, _ = await world.call()
    assert first.context is not None
    weight = 1_000 + first.context.estimate
    listed = [{"type": kind, "input_tokens": weight + more, "output_tokens": 1} for kind, more in passes]
    usage = {"input_tokens": weight, "output_tokens": 1, "iterations": listed}
    before = (await world.store.remembered(KEY)).last_turn
    world.upstream.answer = lambda _: FakeReply(pieces=[completion(usage=usage)])
    await world.call()
    record, _ = world.recorder.records[-1]
    assert record.charge is not None
    assert record.charge.usage.input_tokens == sum(weight + more for _, more in passes)
    last = (await world.store.remembered(KEY)).last_turn
    assert last is not None
    assert last.residual == 1_000 if is_learned else last == before


async def test_a_session_learns_nothing_from_a_call_whose_conversation_its_provider_edited(world: World) -> None:
    asked = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x" * 4_000}]}).encode()
    usage = {"usage": {"input_tokens": 600, "output_tokens": 1}}
    edited = {
        "context_management": {"applied_edits": [{"type": "clear_thinking_20251015", "cleared_input_tokens": 400}]}
    }
    bodies = [json.dumps({**usage, **edited}).encode(), json.dumps(usage).encode()]
    world.upstream.answer = lambda _: FakeReply(pieces=[bodies.pop(0)])
    seen = []
    for _ in range(2):
        await world.call(world.incoming(asked, "messages"))
        charge = world.recorder.records[-1][0].charge
        assert charge is not None
        assert charge.usage.input_tokens == 600, "it is charged as reported"
        seen.append((await world.store.remembered(KEY)).last_turn)
    assert seen[0] is None
    assert seen[1] is not None


# --- models in the place of the call's own ------------------------------------------------------------------------

#: USD of a million tokens, in and out
COSTS = {"m": 1, "dear": 100, "dear-2025": 7, "middle": 10}
PRICES = {name: price_per_million(input=Decimal(cost), output=Decimal(cost)) for name, cost in COSTS.items()}


def of_many(route: Route) -> ModelFacts:
    return ModelFacts(price=PRICES.get(route.model))


def charged(world: World, name: str | None, *others: str, tier: str | None = None) -> tuple[Decimal | None, Decimal]:
    """USD of a million tokens, in the record and of budgets, where the answer names a model so."""
    state = answered(world, ParsedResponse(ReportedUsage(10**6, 0, 10**6), model=name, service_tier=tier))
    state.routing.route = Route("q", "m")
    state.routing.others = tuple(Route(provider, other) for provider in "qr" for other in others)
    record = RecordBuilder(of_many, lambda: 7.0, cached_weight=1.0, estimate_missing=True).of(state)
    assert record.charge is not None
    return record.charge.cost_usd, Decimal(record.spent.nano_usd) / 10**9


@pytest.mark.parametrize(
    ("name", "others", "cost"),
    [
        # Nothing else may have answered, whatever it calls itself.
        (None, (), 1), ("m", (), 1), ("m-2024-08-06", (), 1), ("dear", (), 1),
        ("m", ("dear",), 1), ("m-2024-08-06", ("dear",), 1), ("m@20250514", ("dear",), 1),
        ("dear", ("dear",), 100), ("dear-0613", ("dear",), 100), ("middle", ("dear", "middle"), 10),
        # Its own name before that of another one's version; and a price that is known of one that nobody named.
        ("dear-2025", ("dear", "dear-2025"), 7), ("middle", ("dear",), 10),
        # Nobody knows which one it is.
        (None, ("dear", "middle"), 100), ("m-mini", ("dear",), 100), ("unheard-of", ("middle",), 10),
        ("unpriced", ("unpriced", "middle"), 10), ("", ("middle",), 10),
    ],
)  # fmt: skip
def test_the_model_that_answered_in_the_place_of_the_calls_own_is_charged_as_that_one(
    world: World, name: str | None, others: tuple[str, ...], cost: int
) -> None:
    assert charged(world, name, *others) == (Decimal(cost), Decimal(cost))


def test_of_models_without_the_price_of_a_tier_the_dearest_standard_one_is_taken_of_budgets(world: World) -> None:
    assert charged(world, None, "dear", tier="priority") == (None, Decimal(100))
