"""The record of a call and its charge: reported usage, else an estimate, else nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.call.record import RecordBuilder, input_estimate
from gateway.call.state import CallState
from gateway.call.types import CallAccounts, TakenHold
from gateway.core.ledger.arithmetic import NOTHING, Amount, Hold
from gateway.core.ledger.charging import TokenRate
from gateway.core.ledger.output_limit import CallNeed
from gateway.core.plan import Plan
from gateway.core.pricing import Price, Rates, price_per_million
from gateway.core.record import ORPHANED, PENDING, CallRecord, ContextRecord, Outcome
from gateway.core.routing import ModelFacts, Route
from gateway.core.steps import Step
from gateway.core.trimming.report import MessageOutcome, MessageOutcomes
from gateway.core.usage import Charge, Usage
from gateway.dialects import endpoint
from gateway.dialects.base import Call, ParsedResponse
from gateway.dialects.reported import ReportedUsage
from gateway.stores.leases import Lease, SavedProgress
from tests.support.fakes import BODY, KEY, PRICE, FakeReply, World
from tests.support.scripted import completion


@pytest.fixture
def world() -> World:
    return World()


async def test_names_from_the_provider_are_sanitized_in_the_record(world: World) -> None:
    body = completion(model="a\nb" + "c" * 1000)
    world.upstream.answer = lambda _: FakeReply(pieces=[body])
    await world.call()
    model = world.record.response_model
    assert model is not None
    assert model.startswith("a?b")
    assert len(model) == 256


async def test_the_record_has_times_and_sizes(world: World) -> None:
    await world.call()
    record = world.record
    assert record.call_id == "call-1"
    assert record.request_id == "request-1"
    assert record.first_byte_s is not None
    assert 0 <= record.overhead_s <= record.first_byte_s <= record.duration_s < 60
    assert (record.request_bytes, record.response_bytes) == (len(BODY), len(completion()))
    assert record.session == KEY


def test_the_record_has_the_mode_and_the_step(world: World) -> None:
    state = answered(world, ParsedResponse())
    assert (records().build(state).mode, records().build(state).step) == (None, None)
    state.context.mode, state.steps.step = "table", Step("review")
    assert (records().build(state).mode, records().build(state).step) == ("table", "review")


# --- the charge ---------------------------------------------------------------------------------------------------


def records(*, estimate_missing: bool = True) -> RecordBuilder:
    facts = ModelFacts(price=PRICE)
    return RecordBuilder(lambda _: facts, lambda: 7.0, cached_weight=1.0, estimate_missing=estimate_missing)


def answered(world: World, answer: ParsedResponse, path: str = "chat/completions") -> CallState:
    """Return the state of a call whose response is complete."""
    state = CallState.of(world.incoming(path=path), 0.0)
    state.call = state.dialect.read(BODY)
    state.routing.route = Route("q", "q-real")
    state.dispatch.sent_at, state.dispatch.head_at = 1.0, 2.0
    state.response.status, state.response.outcome, state.response.is_billed = 200, "ok", True
    state.response.parsed = answer
    return state


def test_reported_usage_is_charged(world: World) -> None:
    charge = records().build(answered(world, ParsedResponse(ReportedUsage(10, 5, 15), output_estimate=99))).charge
    assert charge is not None
    assert (charge.usage.input_tokens, charge.usage.output_tokens, charge.source) == (10, 5, "provider")
    assert charge.cost_usd == Decimal("0.000060")


def test_an_unreported_side_is_estimated(world: World) -> None:
    state = answered(world, ParsedResponse(ReportedUsage(None, 5, None)))
    charge = records().build(state).charge
    assert charge is not None
    assert charge.usage.input_tokens == input_estimate(state) > 0
    assert charge.usage.output_tokens == 5


def test_unreported_usage_is_estimated_or_zero_by_setting(world: World) -> None:
    state = answered(world, ParsedResponse(output_estimate=7))
    charge = records().build(state).charge
    assert charge is not None
    assert (charge.usage.output_tokens, charge.source) == (7, "estimated")
    nothing = records(estimate_missing=False).build(state).charge
    assert nothing is not None
    assert (nothing.usage.total_tokens, nothing.cost_usd) == (0, Decimal(0))


def test_an_unreported_side_is_zero_without_estimates(world: World) -> None:
    zero = records(estimate_missing=False)
    for reported, tokens in ((ReportedUsage(50, None, None), (50, 0)), (ReportedUsage(None, 5, None), (0, 5))):
        charge = zero.build(answered(world, ParsedResponse(reported, output_estimate=7))).charge
        assert charge is not None
        assert (charge.usage.input_tokens, charge.usage.output_tokens, charge.source) == (*tokens, "mixed")


def test_uncounted_usage_without_a_price_has_no_cost(world: World) -> None:
    made = RecordBuilder(lambda _: ModelFacts(), lambda: 7.0, cached_weight=1.0, estimate_missing=False)
    charge = made.build(answered(world, ParsedResponse(output_estimate=7))).charge
    assert charge is not None
    assert (charge.usage.total_tokens, charge.cost_usd) == (0, None)


@pytest.mark.parametrize(
    ("given", "tokens"), [([7] * 4_000, 4_000), ([[7] * 50, [7] * 30], 80), (["four" * 6, [7]], 7)]
)
async def test_token_ids_are_counted_if_no_usage_is_reported(world: World, given: object, tokens: int) -> None:
    world.upstream.answer = lambda _: FakeReply(pieces=[b'{"object":"list","data":[]}'])
    await world.call(world.incoming(json.dumps({"model": "m", "input": given}).encode(), "embeddings"))
    charge = world.record.charge
    assert charge is not None
    assert (charge.usage.input_tokens, charge.usage.output_tokens, charge.source) == (tokens, 0, "estimated")


def test_an_error_without_any_text_costs_nothing(world: World) -> None:
    assert records().build(answered(world, ParsedResponse(error=True))).charge is None
    assert records().build(answered(world, ParsedResponse(error=True, output_estimate=1))).charge is not None


def test_a_response_without_usage_is_estimated_on_an_unknown_path(world: World) -> None:
    charge = records().build(answered(world, ParsedResponse(output_estimate=7), "unheard/of")).charge
    assert charge is not None
    assert (charge.source, charge.usage.output_tokens) == ("estimated", 7)


def test_storing_costs_nothing_unless_text_is_streamed(world: World) -> None:
    state = answered(world, ParsedResponse(output_estimate=7), "files")
    assert records().build(state).charge is None
    state.response.is_event_stream = True
    assert records().build(state).charge is not None


@pytest.mark.parametrize(
    ("outcome", "head_at", "is_charged"),
    [
        ("client_left", None, True),
        ("too_slow", None, True),
        ("client_left", 2.0, False),
        ("upstream_failed", None, False),
    ],
)
def test_a_client_that_leaves_a_working_provider_is_charged_the_input(
    world: World, outcome: Outcome, head_at: float | None, is_charged: bool
) -> None:
    state = answered(world, ParsedResponse())
    state.response.outcome, state.dispatch.head_at, state.response.is_billed = outcome, head_at, False
    state.dispatch.is_at_work = True
    record = records().build(state)
    assert (record.charge is not None) is is_charged
    assert record.charge is None or record.charge.usage.input_tokens == input_estimate(state)
    state.dispatch.is_at_work = False
    assert records().build(state).charge is None, "it waited for another try"


def test_an_unmetered_call_is_free_even_if_the_client_leaves(world: World) -> None:
    incoming = world.incoming(method="GET", path="models", endpoint=endpoint("GET", "models"))
    state = replace(answered(world, ParsedResponse()), incoming=incoming)
    state.response.outcome, state.dispatch.head_at, state.response.is_billed = "client_left", None, False
    assert records().build(state).charge is None


def test_an_orphaned_call_is_charged_the_expected_input(world: World) -> None:
    need = CallNeed(40, rate=TokenRate(Decimal(2), Decimal(3)))
    record = records().build_orphaned(answered(world, ParsedResponse()), need)
    assert record.outcome == ORPHANED
    assert record.charge is not None
    assert (record.charge.usage.total_tokens, record.charge.cost_usd) == (40, Decimal(80))
    assert record.spent.tokens == 40


def test_the_orphan_record_has_no_message_fates(world: World) -> None:
    fates = MessageOutcomes.of([MessageOutcome("user", 40, 0, "drop")])
    context = ContextRecord(30, 70, "exact", None, 30, 0, "key", 30, trimmed={"drop": 1}, message_fates=fates)
    state = answered(world, ParsedResponse())
    state.context.plan = Plan(context, 30)
    orphaned = records().build_orphaned(state, CallNeed(30)).context
    assert orphaned == replace(context, message_fates=MessageOutcomes())
    assert records().build(state).context == context


def test_the_orphan_record_adds_no_note_to_the_calls_record(world: World) -> None:
    state = answered(world, ParsedResponse(), "audio/transcriptions")
    state.call = Call("transcription", None, False, b"a form", {})
    state.response.bytes_sent, state.response.parsed = 9, None
    assert records().build_orphaned(state, CallNeed(40)).charge is not None
    state.response.parsed = ParsedResponse(ReportedUsage(10, 5, 15))
    record = records().build(state)
    assert record.charge is not None
    assert record.charge.cost_usd is not None
    assert "price" not in record.notes


# --- costs that the provider reports --------------------------------------------------------------------------------


def of_reporter(*reporters: str, estimate_missing: bool = True) -> RecordBuilder:
    facts = ModelFacts(price=PRICE)
    return RecordBuilder(
        lambda _: facts, lambda: 7.0, cached_weight=1.0, estimate_missing=estimate_missing, cost_reporters=reporters
    )


TOLD = Decimal("0.0125")


def test_a_reported_cost_is_charged_instead_of_list_prices(world: World) -> None:
    state = answered(world, ParsedResponse(ReportedUsage(10, 5, 15, cost_usd=TOLD)))
    charge = of_reporter("q").build(state).charge
    assert charge is not None
    assert (charge.cost_usd, charge.source, charge.usage.total_tokens) == (TOLD, "provider", 15)
    other = of_reporter("another").build(state).charge
    assert other is not None
    assert other.cost_usd == Decimal("0.000060")


def test_a_reported_cost_of_zero_is_charged(world: World) -> None:
    charge = (
        of_reporter("q").build(answered(world, ParsedResponse(ReportedUsage(10, 5, 15, cost_usd=Decimal(0))))).charge
    )
    assert charge is not None
    assert charge.cost_usd == 0


def test_a_reported_cost_is_charged_with_estimated_tokens(world: World) -> None:
    state = answered(world, ParsedResponse(ReportedUsage(None, None, None, cost_usd=TOLD), output_estimate=7))
    charge = of_reporter("q").build(state).charge
    assert charge is not None
    assert (charge.cost_usd, charge.source, charge.usage.output_tokens) == (TOLD, "estimated", 7)
    uncounted = of_reporter("q", estimate_missing=False).build(state).charge
    assert uncounted is not None
    assert (uncounted.cost_usd, uncounted.usage.total_tokens) == (TOLD, 0)


# --- further models that the provider calls -------------------------------------------------------------------------


def test_an_advisor_is_charged_at_its_own_price(world: World) -> None:
    prices = {"q-real": PRICE, "dear": price_per_million(input=Decimal(100), output=Decimal(1_000))}
    made = RecordBuilder(
        lambda route: ModelFacts(price=prices.get(route.model)), lambda: 7.0, cached_weight=1.0, estimate_missing=True
    )

    def charged(*parts: tuple[str, Usage], model: str = "q-real-20990101") -> tuple[Decimal | None, str]:
        state = answered(world, ParsedResponse(ReportedUsage(110, 55, 165, by_model=parts), model=model))
        state.routing.advisors = (Route("q", "dear"),)
        record = made.build(state)
        assert record.charge is not None
        assert record.charge.usage.total_tokens == 165
        return record.charge.cost_usd, record.notes.get("price", "")

    own, advice, both = Usage(10, 5, 15), Usage(100, 50, 150), Usage(110, 55, 165)
    assert charged() == charged(("q-real-20990101", both)) == charged(("q-real", both)) == (Decimal("0.00066"), "")
    assert charged(("q-real-20990101", own), ("dear", advice)) == (Decimal("0.06006"), "")
    assert charged(("dear", advice)) == charged(("dear", advice), model="calls itself so") == (Decimal("0.06006"), "")
    assert charged(("nobody", advice)) == (None, 'unknown for "nobody", which the provider called as well')


def test_web_searches_are_charged_in_addition_to_tokens(world: World) -> None:
    price = Price(Rates(Decimal("0.001"), Decimal("0.002")), {}, search=Decimal("0.01"))
    state = answered(world, ParsedResponse(ReportedUsage(10, 5, 15, searches=3)))
    made = RecordBuilder(lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True)
    record = made.build(state)
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
def test_an_unknown_fee_of_a_provider_tool_makes_the_cost_unknown(
    world: World, reported: ReportedUsage, fee: Decimal | None, cost: Decimal | None, note: str | None
) -> None:
    price = Price(Rates(Decimal("0.001"), Decimal("0.002")), {}, search=fee)
    made = RecordBuilder(lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True)
    record = made.build(answered(world, ParsedResponse(reported)))
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
def test_an_unbilled_refusal_counts_only_as_a_call(world: World, price: Price | None) -> None:
    record = of_refuser(price, q=("bio",)).build(answered(world, REFUSED))
    assert record.charge == Charge(Usage(), "provider", Decimal(0))
    assert record.spent == Amount(0, 0, 1)
    assert record.last_turn is None
    assert record.notes["unbilled"] == "not billed by q: refused before any output (cyber): 412 input tokens"


def test_a_refusal_is_charged_unless_the_provider_is_known_not_to_bill_it(world: World) -> None:
    for of in (of_refuser(), of_refuser(another=()), of_refuser(q=("cyber",))):
        record = of.build(answered(world, REFUSED))
        assert record.charge is not None
        assert record.charge.usage.input_tokens == 412
        assert "unbilled" not in record.notes


# --- service tiers ------------------------------------------------------------------------------------------------


def test_an_unknown_tier_price_has_no_cost_and_charges_budgets_the_standard_price(world: World) -> None:
    record = records().build(answered(world, ParsedResponse(ReportedUsage(10, 5, 15), service_tier="priority")))
    assert record.charge is not None
    assert record.charge.cost_usd is None
    assert record.spent.nano_usd == 60_000
    assert 'the service tier "priority"' in record.notes["price"]


def test_a_cheaper_tier_costs_the_standard_price(world: World) -> None:
    record = records().build(answered(world, ParsedResponse(ReportedUsage(10, 5, 15), service_tier="default")))
    assert record.charge is not None
    assert record.charge.cost_usd == Decimal("0.000060")
    assert "price" not in record.notes


def pending(world: World) -> CallRecord:
    state = answered(world, ParsedResponse(id="resp_1"), "responses")
    state.call = state.dialect.read(b'{"model":"m","input":"hi","background":true}')
    return replace(records().build(state), spent=Amount(5_000, 60_000_000, 1))


def priced(price: Price | None) -> RecordBuilder:
    return RecordBuilder(lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True)


@pytest.mark.parametrize(("named", "usd"), [(None, 22), ("default", 11), ("priority", 22)])
def test_a_background_response_without_a_tier_costs_the_requested_tier(
    world: World, named: str | None, usd: int
) -> None:
    price = replace(PRICE, tiers={"priority": price_per_million(input=Decimal(2), output=Decimal(20))})
    made = ParsedResponse(ReportedUsage(10**6, 10**6, 2 * 10**6), finish_reason="completed", service_tier=named)
    record = priced(price).build_fetched(pending(world), made, Route("q", "q-real"), "priority", 0.0)
    assert record.charge is not None
    assert record.charge.cost_usd == usd
    assert record.spent == Amount(2 * 10**6, usd * 10**9, 1)


HOLD = Hold("call-1", (), Amount(100, 1_000, 1), Amount(2, 10), 1, 50)


def held(state: CallState, hold: Hold | None = HOLD, noted: int = 0) -> CallState:
    """Hold tokens for a call with two responses, of which `noted` tokens have arrived."""
    state.budget.hold = TakenHold(
        hold, 50, Lease("call-1", 60, 100, responses=2, saved=SavedProgress(tokens=noted)), None, CallAccounts()
    )
    return state


def in_background(world: World, answer: ParsedResponse) -> CallState:
    state = answered(world, answer, "responses")
    state.call = state.dialect.read(b'{"model":"m","input":"hi","background":true}')
    return state


@pytest.mark.parametrize("outcome", ["ok", "client_left", "upstream_broken"])
@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_unreported_usage_is_spent_as_estimated_not_as_held(world: World, path: str, outcome: Outcome) -> None:
    state = held(answered(world, ParsedResponse(id="resp_1", output_estimate=7), path))
    state.response.outcome = outcome
    record = records().build(state)
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
def test_the_whole_hold_is_spent_while_a_background_response_is_created(
    world: World, answer: ParsedResponse, outcome: Outcome, *, is_pending: bool
) -> None:
    state = held(in_background(world, answer))
    state.response.outcome = outcome
    record = records().build(state)
    assert record.outcome == (PENDING if is_pending else outcome)
    assert record.spent == (HOLD.amount(50) if is_pending else Amount(7, 43_000, 1))


def test_the_hold_stays_spent_for_a_background_response_without_id(world: World) -> None:
    record = records().build(held(in_background(world, ParsedResponse())))
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
def test_an_unreadable_response_is_charged_the_delivered_tokens(
    world: World, hold: Hold | None, spent: Amount, *, later: bool
) -> None:
    state = in_background(world, ParsedResponse()) if later else answered(world, ParsedResponse())
    state = held(state, hold, noted=7)
    record = records().build_unreadable(state)
    assert record.charge is not None
    assert (record.charge.usage.output_tokens, record.spent) == (7, spent)
    state.budget.hold = None
    assert records().build_unreadable(state).charge == Charge(Usage.of(0, 0), "estimated", None)


@pytest.mark.parametrize(
    ("billed", "at_work", "is_charged"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_an_unreadable_call_is_free_if_no_provider_received_it(
    world: World, *, billed: bool, at_work: bool, is_charged: bool
) -> None:
    state = held(answered(world, ParsedResponse()), noted=7)
    state.response.is_billed, state.dispatch.is_at_work = billed, at_work
    record = records().build_unreadable(state)
    assert (record.charge is not None, record.spent.calls) == (is_charged, int(is_charged))


def test_the_record_of_a_fetched_response_has_its_result(world: World) -> None:
    begun = replace(pending(world), started_at=100.0, duration_s=2.0)
    begun = replace(begun, notes={**begun.notes, "price": "not known", "x": "y"}, tools=(), response_model="old")
    made = ParsedResponse(ReportedUsage(3, 4, 7), model="new", tools=("look",), finish_reason="failed", error=True)
    for now, lasted in ((130.0, 30.0), (90.0, 2.0)):
        record = records().build_fetched(begun, made, Route("q", "q-real"), None, now)
        assert (record.outcome, record.finish_reason, record.duration_s) == ("provider_error", "failed", lasted)
        assert (record.response_model, record.tools) == ("new", ("look",))
        assert record.notes == {"answer": "resp_1", "x": "y"}
    assert (
        records().build_fetched(begun, replace(made, model=None), Route("q", "q-real"), None, 0.0).response_model
        == "old"
    )
    orphaned = replace(begun, outcome=ORPHANED, notes={})
    assert records().build_fetched(orphaned, replace(made, id="resp_1"), Route("q", "q-real"), None, 0.0).was_fetched


@pytest.mark.parametrize(
    ("made", "output"),
    [
        (ParsedResponse(ReportedUsage(None, None, None, cost_usd=TOLD), output_estimate=9), 9),
        (ParsedResponse(output_estimate=9), 9),
        (ParsedResponse(output_estimate=3), 5),
    ],
)
def test_a_background_response_without_usage_is_estimated(world: World, made: ParsedResponse, output: int) -> None:
    begun = replace(pending(world), charge=Charge(Usage.of(11, 5), "estimated", None))
    charge = records().build_fetched(begun, made, Route("q", "q-real"), None, 0.0).charge
    assert charge is not None
    assert (charge.usage, charge.source) == (Usage.of(11, output), "estimated")
    nothing = records(estimate_missing=False).build_fetched(begun, made, Route("q", "m"), None, 0.0)
    assert nothing.charge is not None
    assert nothing.charge.usage.output_tokens == 0
    failed = records().build_fetched(begun, replace(made, error=True), Route("q", "q-real"), None, 0.0)
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
def test_a_background_response_spends_the_reported_cost_or_the_price_or_the_hold(
    world: World, told: Decimal | None, price: Price | None, tier: str | None, *, cost: Decimal | None, nano_usd: int
) -> None:
    made = ParsedResponse(ReportedUsage(10, 5, 15, cost_usd=told), finish_reason="completed", service_tier=tier)
    of = RecordBuilder(
        lambda _: ModelFacts(price=price), lambda: 7.0, cached_weight=1.0, estimate_missing=True, cost_reporters=["q"]
    )
    record = of.build_fetched(pending(world), made, Route("q", "q-real"), None, 0.0)
    assert record.charge is not None
    assert record.charge.cost_usd == cost
    assert record.spent == Amount(15, nano_usd, 1)


async def test_a_report_without_input_is_charged_and_not_learned(world: World) -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 5, "total_tokens": 5}
    world.upstream.answer = lambda _: FakeReply(pieces=[completion(usage=usage)])
    first, _ = await world.call()
    assert first.request.context is not None
    assert world.record.charge is not None
    assert world.record.charge.usage.input_tokens == 0
    assert (await world.store.remembered(KEY)).last_turn is None
    again, _ = await world.call()
    assert again.request.context is not None
    assert again.request.context.tokens == first.request.context.tokens, (
        "what weighs nothing to one who does not count weighs the same"
    )


async def test_a_server_that_reports_only_new_tokens_does_not_make_a_conversation_seem_short() -> None:
    # The tokenizer of the server counts three tokens for eight characters; the estimate is two.
    world = World(facts=lambda _: ModelFacts(window=8_000))
    usage = {"prompt_tokens": 385, "completion_tokens": 5, "total_tokens": 390}
    world.upstream.answer = lambda _: FakeReply(pieces=[completion(usage=usage)])
    messages: list[dict[str, str]] = []
    trimmed = 0
    for turn in range(30):
        messages.append({"role": "user", "content": f"{turn} " + "x" * 1_000})
        reply, _ = await world.call(world.incoming(json.dumps({"model": "m", "messages": messages}).encode()))
        messages.append({"role": "assistant", "content": "y"})
        assert reply.request.context is not None
        sent = sum(len(one["content"]) for one in json.loads(world.upstream.sent[-1].body)["messages"])
        assert sent * 3 // 8 <= 8_000, turn
        trimmed += bool(reply.request.context.trimmed)
    assert trimmed
    assert (await world.store.totals(KEY)).input_tokens == 30 * 385, "what is reported is charged"


@pytest.mark.parametrize(
    ("passes", "is_learned"),
    [
        ([("message", 0), ("advisor_message", 5_000), ("message", 1_200)], True),
        ([("compaction", 0), ("message", -900)], False),
    ],
)
async def test_a_session_learns_the_request_tokens_and_is_charged_for_all_passes(
    world: World, passes: list[tuple[str, int]], is_learned: bool
) -> None:
    first, _ = await world.call()
    assert first.request.context is not None
    weight = 1_000 + first.request.context.estimate
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


async def test_a_session_learns_nothing_if_the_provider_edited_the_conversation(world: World) -> None:
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


# --- models that the provider calls instead -------------------------------------------------------------------------

#: USD per million tokens, input and output
COSTS = {"m": 1, "dear": 100, "dear-2025": 7, "middle": 10}
PRICES = {name: price_per_million(input=Decimal(cost), output=Decimal(cost)) for name, cost in COSTS.items()}


def of_many(route: Route) -> ModelFacts:
    return ModelFacts(price=PRICES.get(route.model))


def charged(world: World, name: str | None, *others: str, tier: str | None = None) -> tuple[Decimal | None, Decimal]:
    """Return the USD of a million tokens, in the record and for budgets, if the response names this model."""
    state = answered(world, ParsedResponse(ReportedUsage(10**6, 0, 10**6), model=name, service_tier=tier))
    state.routing.route = Route("q", "m")
    state.routing.others = tuple(Route(provider, other) for provider in "qr" for other in others)
    record = RecordBuilder(of_many, lambda: 7.0, cached_weight=1.0, estimate_missing=True).build(state)
    assert record.charge is not None
    return record.charge.cost_usd, Decimal(record.spent.nano_usd) / 10**9


@pytest.mark.parametrize(
    ("name", "others", "cost"),
    [
        # No other model may have responded, so the name in the response does not matter.
        (None, (), 1), ("m", (), 1), ("m-2024-08-06", (), 1), ("dear", (), 1),
        ("m", ("dear",), 1), ("m-2024-08-06", ("dear",), 1), ("m@20250514", ("dear",), 1),
        ("dear", ("dear",), 100), ("dear-0613", ("dear",), 100), ("middle", ("dear", "middle"), 10),
        # An exact name wins over the version of another model. A known price is used for an unexpected model.
        ("dear-2025", ("dear", "dear-2025"), 7), ("middle", ("dear",), 10),
        # The model is unknown, so the highest price counts.
        (None, ("dear", "middle"), 100), ("m-mini", ("dear",), 100), ("unheard-of", ("middle",), 10),
        ("unpriced", ("unpriced", "middle"), 10), ("", ("middle",), 10),
    ],
)  # fmt: skip
def test_the_model_that_responded_instead_is_charged_at_its_price(
    world: World, name: str | None, others: tuple[str, ...], cost: int
) -> None:
    assert charged(world, name, *others) == (Decimal(cost), Decimal(cost))


def test_budgets_are_charged_the_highest_standard_price_if_the_tier_price_is_unknown(world: World) -> None:
    assert charged(world, None, "dear", tier="priority") == (None, Decimal(100))
