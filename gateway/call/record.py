"""Write the record of a call, and compute its charge from the reported usage."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from math import ceil
from typing import Final

from gateway.call.state import CLIENT_CLOSED, CallState
from gateway.core.fitting.report import Fates
from gateway.core.ledger.arithmetic import NOTHING, Amount
from gateway.core.ledger.charging import CallNeed, accounts_of, spent_by
from gateway.core.pricing import Price, cost, standard_cost
from gateway.core.record import CUTS, ORPHANED, PENDING, CallError, CallRecord, ContextRecord, Outcome, answer_name
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import kept_as
from gateway.core.usage import Charge, Usage, UsageSource
from gateway.dialects.base import Call, ParsedResponse
from gateway.dialects.limits import service_tier
from gateway.dialects.refusals import as_billed
from gateway.dialects.server_state import kept_answer, left_over
from gateway.dialects.texts import as_name, estimate, token_ids

#: the note on what a call used and its provider does not bill
_UNBILLED: Final = "unbilled"
_ALL_BILLED: Final[Mapping[str, Collection[str]]] = {}
#: outcomes of calls that nobody waited for to the end
_LEFT: Final = frozenset[Outcome]({"client_left", *CUTS})
#: what stands behind a model's name in that of one of its versions: `-2024-08-06`, `-20250514`, `-0613`, `@20250514`
_VERSION: Final = re.compile(r"[-@:](?:\d{4}-\d\d-\d\d|\d{4}|\d{6}|\d{8}|latest)")


class RecordBuilder:
    """Makes records.

    `cached_weight`: what a token counts that the provider had cached; `estimate_missing`: whether a side of which
    nothing is reported is estimated, or counts as nothing; `cost_reporters`: providers that say what a call costs;
    `named_at`: the model that a provider calls by a name; `billed_refusals`: by provider, the categories of a refusal
    before any output that it bills, where it does not bill all.
    """

    def __init__(
        self,
        facts: Callable[[Route], ModelFacts],
        clock: Callable[[], float],
        *,
        cached_weight: float,
        estimate_missing: bool,
        cost_reporters: Container[str] = (),
        named_at: Callable[[str, str], Route] = Route,
        billed_refusals: Mapping[str, Collection[str]] = _ALL_BILLED,
    ) -> None:
        self._facts = facts
        self._clock = clock
        self._cached_weight = cached_weight
        self._estimate_missing = estimate_missing
        self._cost_reporters = cost_reporters
        self._named_at = named_at
        self._billed_refusals = billed_refusals

    def of(self, state: CallState) -> CallRecord:
        """The record of a call that ends now."""
        answer = self._as_billed(state, answer_of(state))
        charge = self._charge(state, answer)
        record = self._record(state, answer, charge, self._spent(state, charge, answer))
        if charge is None or not _goes_on(state, answer):
            return record
        return self._pending(state, record, answer)

    def _as_billed(self, state: CallState, answer: ParsedResponse) -> ParsedResponse:
        """Return the answer with the usage that its provider bills; the record's note `unbilled` says what is not."""
        categories = self._billed_refusals.get(state.routing.route.provider)
        if categories is None:
            return answer
        billed, note = as_billed(answer, categories)
        if note is not None:
            state.notes[_UNBILLED] = f"not billed by {state.routing.route.provider}: {as_name(note)}"
        return billed

    @staticmethod
    def _pending(state: CallState, record: CallRecord, answer: ParsedResponse) -> CallRecord:
        """The record of a call whose answer is still being made, whoever waits for it: all that was held may be spent.

        Of an answer without an id nobody will hear how it ends.
        """
        taken = state.budget.hold
        if taken is not None and taken.hold is not None:
            record = replace(record, spent=taken.hold.amount(taken.units))
        if answer.id is None:
            return record
        return replace(record, outcome=PENDING, notes={**record.notes, "answer": as_name(answer.id)})

    def fetched(
        self, begun: CallRecord, answer: ParsedResponse, route: Route, asked: str | None, now: float
    ) -> CallRecord:
        """The record of a call that was pending, by the answer that it came to.

        `route`: the way that it took; `asked`: the service tier that it asked for; `now`: seconds since the epoch.
        """
        usage, source = self._used(begun, answer)
        notes = {name: note for name, note in begun.notes.items() if name != "price"}
        if answer.id is not None:
            notes["answer"] = as_name(answer.id)
        prices = self._known_prices([route])
        charge, spent = None, NOTHING
        if usage is not None:
            cost_usd = self._told(route, answer)
            if cost_usd is None:
                tier = asked if answer.service_tier is None else None
                named = partial(self._named_at, route.provider)
                cost_usd = self._listed(usage, answer, prices=prices, named=named, asked=tier, notes=notes)
            charge = Charge(usage, source, cost_usd)
            spent = spent_by(_least(charge, prices), self._cached_weight)
            if cost_usd is None and not prices:
                # Its price was known when it was held, and is not any more.
                spent = spent._replace(nano_usd=begun.spent.nano_usd)
        return replace(
            begun,
            outcome="provider_error" if answer.error else "ok",
            response_model=as_name(answer.model) if answer.model else begun.response_model,
            finish_reason=as_name(answer.finish_reason) if answer.finish_reason else None,
            tools=tuple(map(as_name, answer.tools)),
            charge=charge,
            spent=spent,
            duration_s=max(begun.duration_s, now - begun.started_at),
            notes=notes,
        )

    def _used(self, begun: CallRecord, answer: ParsedResponse) -> tuple[Usage | None, UsageSource]:
        """What an answer took that was pending, and who says so; None: nothing."""
        reported = answer.usage
        estimated = begun.charge.usage.input_tokens if begun.charge is not None else 0
        # What its stream had brought until its client left may be in no answer that is fetched.
        delivered = begun.charge.usage.output_tokens if begun.charge is not None else 0
        output = max(answer.output_estimate, delivered) if self._estimate_missing else 0
        if reported is not None and reported.has_tokens:
            return reported.complete(estimated, output)
        if answer.error:
            return None, "estimated"
        return Usage.of(estimated, output), "estimated"

    def unread(self, state: CallState) -> CallRecord:
        """The record where `of` fails: charged for its input as weighed, and the output that its lease has noted."""
        state.notes["usage"] = "not known: the gateway failed to read it"
        taken, charge, spent = state.budget.hold, None, NOTHING
        if state.response.is_billed or state.dispatch.is_at_work:
            tokens = state.context.plan.context.tokens if state.context.plan is not None else 0
            charge = Charge(Usage.of(tokens, taken.lease.noted if taken is not None else 0), "estimated", None)
            spent = spent_by(charge, self._cached_weight)
            if taken is not None and taken.hold is not None:
                delivered = ceil(taken.lease.noted / taken.lease.answers)
                spent = taken.hold.amount(taken.units if state.is_fetched_later else delivered)
        return self._record(state, ParsedResponse(), charge, spent)

    def _record(
        self,
        state: CallState,
        answer: ParsedResponse,
        charge: Charge | None,
        spent: Amount,
        *,
        is_orphaned: bool = False,
    ) -> CallRecord:
        incoming, call, now = state.incoming, state.call, self._clock()
        context = _context(state, answer, charge)
        if is_orphaned and context is not None and context.message_fates:
            context = replace(context, message_fates=Fates())
        return CallRecord(
            call_id=incoming.call_id,
            request_id=incoming.request_id,
            session=state.session,
            derived_session=state.derived,
            started_at=state.started_at,
            dialect=state.dialect.name,
            operation=_operation(state, call),
            provider=state.routing.route.provider,
            model=as_name(state.routing.route.model or (call.model if call else None) or ""),
            response_model=as_name(answer.model) if answer.model else None,
            stream=call.stream if call else False,
            status=state.response.status if state.response.outcome not in _LEFT else CLIENT_CLOSED,
            outcome=state.response.outcome if not is_orphaned else ORPHANED,
            error_code=state.response.fault.code if state.response.fault else None,
            error=CallError.of(state.response.fault) if state.response.fault else None,
            declared=state.budget.charged.declared if not state.budget.charged.declared.is_none else None,
            finish_reason=as_name(answer.finish_reason) if answer.finish_reason else None,
            tools=tuple(map(as_name, answer.tools)),
            charge=charge,
            overhead_s=(state.dispatch.sent_at or now) - incoming.started,
            first_byte_s=state.dispatch.head_at - incoming.started if state.dispatch.head_at is not None else None,
            duration_s=now - incoming.started,
            request_bytes=len(incoming.body),
            response_bytes=state.response.bytes_sent,
            notes=state.notes,
            context=context,
            accounts=accounts_of(state.budget.accounts.claims),
            spent=spent,
            mode=state.context.mode,
            step=state.steps.step.name if state.steps.step is not None else None,
            kept=_kept(state, answer, charge),
            answer=_found_by(state, answer),
            unread_thinking=state.context.unread_thinking,
        )

    def needs_texts(self, state: CallState) -> bool:
        """Return whether the record of a call is an estimate for which the texts of its request must be read."""
        if not self._estimate_missing or state.context.plan is not None or state.budget.text_tokens is not None:
            return False
        reported = answer_of(state).usage
        is_known = reported is not None and reported.input_tokens is not None
        return (state.response.is_billed or state.dispatch.is_at_work) and not is_known

    def orphaned(self, state: CallState, need: CallNeed) -> CallRecord:
        """Return the record of a call in case its worker ends before it settles the call.

        It is charged the expected input. The margin of the hold is for a budget that must not be exceeded; nobody
        bills it.
        """
        tokens = need.input_tokens if need.expected is None else need.expected
        cost_usd = need.rate.input * tokens if need.rate is not None else None
        charge = Charge(Usage.of(tokens, 0), "estimated", cost_usd)
        # Not by `of`: what that remarks of its charge would stand in the call's own record, which may know better.
        return self._record(state, ParsedResponse(), charge, spent_by(charge, self._cached_weight), is_orphaned=True)

    def _charge(self, state: CallState, answer: ParsedResponse) -> Charge | None:
        """What the provider bills for a call; None where it bills nothing."""
        endpoint = state.incoming.endpoint
        left_waiting = state.response.outcome in _LEFT and state.dispatch.is_at_work and state.dispatch.head_at is None
        if state.call is None or not (state.response.is_billed or (left_waiting and endpoint.metered)):
            return None
        reported = answer.usage
        if reported is not None and reported.has_tokens:
            usage, source = reported.complete(*self._estimates(state, answer))
            if _UNBILLED in state.notes and not (usage.total_tokens or reported.searches):
                # It costs nothing at any price, known or not.
                return Charge(usage, source, Decimal(0))
            return Charge(usage, source, self._cost(state, usage, answer))
        # A stream that failed says nothing of an answer that its provider goes on with.
        failed_empty = answer.error and not answer.output_estimate and not (answer.id and _goes_on(state, answer))
        # A stream of events on a path nobody knows is a model's answer all the same.
        unknown_stream = state.response.is_event_stream and answer.output_estimate > 0
        if failed_empty or not (endpoint.estimated or unknown_stream):
            return None
        usage = Usage.of(*self._estimates(state, answer))
        return Charge(usage, "estimated", self._cost(state, usage, answer))

    def _estimates(self, state: CallState, answer: ParsedResponse) -> tuple[int, int]:
        """Estimated tokens of input and output; only those of a side that was not reported are ever used."""
        if not self._estimate_missing:
            return 0, 0
        reported = answer.usage
        is_known = reported is not None and reported.input_tokens is not None
        return 0 if is_known else input_estimate(state), answer.output_estimate

    def _spent(self, state: CallState, charge: Charge | None, answer: ParsedResponse) -> Amount:
        """What is taken from budgets: where the cost is not known, no less than what is known of it."""
        if charge is None or charge.cost_usd is not None:
            return spent_by(charge, self._cached_weight)
        prices = self._prices(state, answer)
        if prices:
            tier = as_name(answer.service_tier or "")
            state.notes.setdefault("price", f'not known of the service tier "{tier}", which is a dearer one')
        spent = spent_by(_least(charge, prices), self._cached_weight)
        hold = state.budget.hold.hold if state.budget.hold is not None else None
        if hold is None or self._is_input_seen(state, answer):
            return spent
        # Of a form only its size is known, and what was held goes by that.
        return spent._replace(nano_usd=max(spent.nano_usd, hold.fixed.nano_usd))

    def _is_input_seen(self, state: CallState, answer: ParsedResponse) -> bool:
        """Whether the input is known, or can be estimated: a form or a file is not looked into."""
        reported, call = answer.usage, state.call
        if (reported is not None and reported.input_tokens is not None) or not self._estimate_missing:
            return True
        return call is None or bool(call.fields) or not call.body

    def _is_output_seen(self, state: CallState, answer: ParsedResponse) -> bool:
        """The same of the output: sound and pictures are not weighed."""
        reported = answer.usage
        if (reported is not None and reported.output_tokens is not None) or not self._estimate_missing:
            return True
        return answer.is_seen or not state.response.bytes_sent

    def _told(self, route: Route, answer: ParsedResponse) -> Decimal | None:
        """What the call costs on the word of its provider."""
        reported = answer.usage if route.provider in self._cost_reporters else None
        return reported.cost_usd if reported is not None else None

    def _cost(self, state: CallState, usage: Usage, answer: ParsedResponse) -> Decimal | None:
        told = self._told(state.routing.route, answer)
        if told is not None:
            return told
        if not (self._is_input_seen(state, answer) and self._is_output_seen(state, answer)):
            state.notes["price"] = "not known of sound, pictures or files whose usage was not reported"
            return None
        asked = None
        if answer.service_tier is None and state.call is not None:
            asked = service_tier(state.call.fields)
        prices, named = self._prices(state, answer), partial(self._named, state)
        return self._listed(usage, answer, prices=prices, named=named, asked=asked, notes=state.notes)

    def _listed(
        self,
        usage: Usage,
        answer: ParsedResponse,
        *,
        prices: Sequence[Price],
        named: Callable[[str], Route],
        asked: str | None,
        notes: dict[str, str],
    ) -> Decimal | None:
        """The cost at list prices; None where one is not known, and `notes` say of what.

        `prices`: of the models that may have answered; `named`: a model that was asked besides; `asked`: the service
        tier that was asked for, where the answer names none.
        """
        others = Decimal(0)
        for name, part in answer.usage.named if answer.usage is not None else ():
            if name != answer.model:
                price = self._facts(named(name)).price
                if price is None:
                    notes["price"] = f'not known of "{as_name(name)}", which was asked besides'
                    return None
                usage, others = usage.without(part), others + standard_cost(part, price)
        costs = [_tiered(answer, asked, usage, price) for price in prices]
        known = [one for one in costs if one is not None]
        if not known or len(known) < len(costs):
            return None
        if answer.usage is None or not (answer.usage.searches or answer.usage.picture_tokens):
            return max(known) + others
        fees = [price.search for price in prices if price.search is not None]
        if answer.usage.picture_tokens or len(fees) < len(prices):
            what = "pictures that a tool made" if answer.usage.picture_tokens else "its web searches"
            notes["price"] = f"not known of {what}"
            return None
        return max(known) + others + answer.usage.searches * max(fees)

    def _named(self, state: CallState, name: str) -> Route:
        """The model of this name at the provider that answered."""
        route = state.routing.route
        return _who_answered([route, *state.routing.instead(route)], name) or self._named_at(route.provider, name)

    def _prices(self, state: CallState, answer: ParsedResponse) -> list[Price]:
        """The price of the model that answered; those of all that may have, where that cannot be told."""
        route = state.routing.route
        instead = state.routing.instead(route, besides=False)
        if not instead:
            # Whatever it calls itself: a version that has no price of its own is the model all the same.
            return self._known_prices([route])
        may = [route, *instead]
        one = _who_answered(may, answer.model)
        if one is None and answer.model:
            one = Route(route.provider, answer.model)
        return (self._known_prices([one]) if one is not None else []) or self._known_prices(may)

    def _known_prices(self, routes: Sequence[Route]) -> list[Price]:
        return [price for route in routes if (price := self._facts(route).price) is not None]


def answer_of(state: CallState) -> ParsedResponse:
    """What a call was answered with, as far as it came."""
    return state.response.parsed or (state.response.reader() if state.response.reader else ParsedResponse())


def _context(state: CallState, answer: ParsedResponse, charge: Charge | None) -> ContextRecord | None:
    """What the call weighed, and how much of its input tells nothing of that."""
    if state.context.plan is None:
        return None
    context, told = state.context.plan.context, answer.usage
    if told is None or told.request_tokens is None or charge is None:
        return context
    beyond = charge.usage.input_tokens - told.request_tokens
    return replace(context, beyond=beyond) if beyond > 0 else context


def has_ended(answer: ParsedResponse) -> bool:
    """Whether an answer is made, or will not be; of one that is being made nothing says why it ended.

    An error does not either: it may be of the stream, or of the request that asked for the answer.
    """
    return answer.finish_reason is not None


def _goes_on(state: CallState, answer: ParsedResponse) -> bool:
    """Whether the provider is still at work on an answer that is fetched later.

    It is not where all of it came at once with its usage, from a provider that says of no answer why it ended.
    """
    if has_ended(answer) or not state.is_fetched_later:
        return False
    reported = answer.usage
    return reported is None or not reported.output_tokens or state.response.outcome != "ok"


def _least(charge: Charge | None, prices: Sequence[Price]) -> Charge | None:
    """The charge for a budget: where its cost is not known, at the dearest of the standard prices."""
    if charge is None or charge.cost_usd is not None or not prices:
        return charge
    return replace(charge, cost_usd=max(standard_cost(charge.usage, price) for price in prices))


def _tiered(answer: ParsedResponse, asked: str | None, usage: Usage, price: Price) -> Decimal | None:
    """The cost in the service tier that the answer names; where it names none, in the one asked for, if dearer."""
    if asked is None:
        return cost(usage, price, answer.service_tier)
    return max(standard_cost(usage, price), cost(usage, price, asked) or Decimal(0))


def _kept(state: CallState, answer: ParsedResponse, charge: Charge | None) -> str:
    """What the session notes of an answer that later calls may go on from: its id, and the tokens it adds to them.

    All tokens of the call but those that each request sends again, such as its tools. Empty where no usage was reported
    or the provider keeps nothing.
    """
    call, plan = state.call, state.context.plan
    if call is None:
        return ""
    ids = left_over(call.fields, state.incoming.endpoint.wire, answer.id)
    return kept_of(state.routing.route.provider, charge, ids, plan.overhead if plan is not None else 0)


def _found_by(state: CallState, answer: ParsedResponse) -> str | None:
    """What the call is found by when a later one goes on from its answer; see `CallRecord.answer`."""
    fields = state.call.fields if state.call is not None else {}
    kept = kept_answer(fields, state.incoming.endpoint.wire, answer.id)
    return answer_name(kept) if kept is not None else None


def kept_of(provider: str, charge: Charge | None, ids: Sequence[str], overhead: int) -> str:
    """The same, of an answer that others may go on from under these ids. `overhead`: tokens that are sent again."""
    if charge is None or charge.source != "provider" or not ids:
        return ""
    return kept_as(provider, ids, charge.usage.input_tokens + charge.usage.output_tokens - overhead)


def _who_answered(may: Sequence[Route], name: str | None) -> Route | None:
    """Which of these models has this name, or that of one of its versions."""
    if name is None:
        return None
    for route in may:
        if route.model == name:
            return route
    for route in may:
        if name.startswith(route.model) and _VERSION.fullmatch(name, len(route.model)):
            return route
    return None


def input_estimate(state: CallState) -> int:
    """Input tokens of a call by our own reckoning: what was sent where it was weighed, else what its texts come to."""
    plan = state.context.plan
    return plan.context.tokens if plan is not None else text_estimate(state) + state.kept_by(state.routing.route)


def text_estimate(state: CallState) -> int:
    """What the texts of a call come to, which is not weighed."""
    call = state.call
    if call is not None and state.budget.text_tokens is None:
        state.budget.text_tokens = estimate(state.dialect.input_text(call)) + token_ids(call.fields)
    return state.budget.text_tokens or 0


def _operation(state: CallState, call: Call | None) -> str:
    purpose = state.incoming.purpose
    if purpose is not None:
        return purpose.operation
    return call.operation if call else state.incoming.endpoint.operation
