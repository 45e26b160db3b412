"""Make the record of a call, and compute its charge from the reported or estimated usage."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from math import ceil
from typing import Final

from gateway.call.routing import tag_in_body
from gateway.call.state import CLIENT_CLOSED, CallState
from gateway.core.ledger.arithmetic import NOTHING, Amount
from gateway.core.ledger.charging import accounts_of, spent_by
from gateway.core.ledger.output_limit import CallNeed
from gateway.core.pricing import Price, cache_savings, cost, standard_cost
from gateway.core.record import (
    CANCEL_REASONS,
    NOTE_CACHE_MARKS,
    NOTE_RESPONSE,
    ORPHANED,
    CallError,
    CallRecord,
    ContextRecord,
    Outcome,
    response_digest,
)
from gateway.core.rollup import KEY
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import kept_text
from gateway.core.trimming.report import MessageOutcomes
from gateway.core.usage import Charge, Usage, UsageSource
from gateway.dialects.base import Call, ParsedResponse
from gateway.dialects.limits import service_tier
from gateway.dialects.refusals import without_free_attempts
from gateway.dialects.server_state import continuation_ids, stored_response_id
from gateway.dialects.texts import estimate, safe_name, token_ids

_ALL_BILLED: Final[Mapping[str, Collection[str]]] = {}
#: decimals of times in a record: whole microseconds take half the bytes in a store
_DECIMALS: Final = 6
#: outcomes of calls whose client did not receive the whole response
_LEFT: Final = frozenset[Outcome]({"client_left", *CANCEL_REASONS})
#: suffixes that turn the name of a model into that of one version: `-2024-08-06`, `-20250514`, `-0613`, `@20250514`
_VERSION: Final = re.compile(r"[-@:](?:\d{4}-\d\d-\d\d|\d{4}|\d{6}|\d{8}|latest)")


class RecordBuilder:
    """Makes the records of calls.

    Args:
        facts: returns the prices and limits of a model.
        clock: returns monotonic seconds.
        cached_weight: the share of a token that a cached input token counts in token budgets.
        estimate_missing: estimate the input or the output if its usage is not reported; otherwise it counts as 0.
        cost_reporters: providers whose reported cost is used instead of list prices.
        named_at: returns the route for a provider and a model name as that provider uses it.
        billed_refusals: by provider, the refusal categories that it bills although there was no output. Providers that
            are not listed bill all refusals.
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

    def build(self, state: CallState) -> CallRecord:
        """Return the record of a call that ends now."""
        response, has_free_attempts = self._as_billed(state, response_so_far(state))
        charge = self._charge(state, response, has_free_attempts=has_free_attempts)
        if charge is not None and NOTE_CACHE_MARKS in state.notes:
            self._note_cache_savings(state, response, charge.usage)
        record = self._record(state, response, charge, self._budget_charge(state, charge, response))
        if charge is None or not _is_unfinished(state, response):
            return record
        return self._pending_record(state, record, response)

    def _as_billed(self, state: CallState, response: ParsedResponse) -> tuple[ParsedResponse, bool]:
        """Return the response with only the usage that its provider bills, and whether some usage is not billed."""
        categories = self._billed_refusals.get(state.routing.route.provider)
        if categories is None:
            return response, False
        billed, note = without_free_attempts(response, categories)
        if note is not None:
            state.notes["unbilled"] = f"not billed by {state.routing.route.provider}: {safe_name(note)}"
        return billed, note is not None

    def _note_cache_savings(self, state: CallState, response: ParsedResponse, usage: Usage) -> None:
        """Note what the gateway's cache marks saved, or cost if the prompt was only written to the cache."""
        known = [cache_savings(usage, price, response.service_tier) for price in self._prices(state, response)]
        saved = [usd for usd in known if usd is not None]
        if not saved or len(saved) < len(known):
            return
        usd = min(saved)
        if not (usage.cache_read_tokens or usage.cache_write_tokens):
            effect = "the provider cached nothing"
        elif usd >= 0:
            effect = f"saved ${usd:.6f}"
        else:
            effect = f"cost ${-usd:.6f} more, to be saved by later calls"
        state.notes[NOTE_CACHE_MARKS] += f"; {effect}"

    @staticmethod
    def _pending_record(state: CallState, record: CallRecord, response: ParsedResponse) -> CallRecord:
        """Return the record of a call whose response is still being created: the whole hold may be spent.

        A response without an id cannot be fetched, so its call does not become pending.
        """
        hold = state.budget.hold
        if hold is not None and hold.hold is not None:
            record = replace(record, spent=hold.hold.amount(hold.response_tokens))
        if response.id is None:
            return record
        return record.as_pending(safe_name(response.id))

    def build_fetched(
        self, pending: CallRecord, response: ParsedResponse, route: Route, requested_tier: str | None, now: float
    ) -> CallRecord:
        """Return the final record of a pending call, after its response was fetched.

        Args:
            pending: the record of the pending call.
            response: the complete response.
            route: the route that the call took.
            requested_tier: the service tier that the call asked for; None if it named none.
            now: Unix time in seconds.
        """
        usage, source = self._fetched_usage(pending, response)
        notes = {name: note for name, note in pending.notes.items() if name != "price"}
        if response.id is not None:
            notes[NOTE_RESPONSE] = safe_name(response.id)
        prices = self._known_prices([route])
        charge, spent = None, NOTHING
        if usage is not None:
            cost_usd = self._reported_cost(route, response)
            if cost_usd is None:
                tier = requested_tier if response.service_tier is None else None
                named = partial(self._named_at, route.provider)
                cost_usd = self._list_cost(usage, response, prices=prices, named=named, tier=tier, notes=notes)
            charge = Charge(usage, source, cost_usd)
            spent = spent_by(_with_least_cost(charge, prices), self._cached_weight)
            if cost_usd is None and not prices:
                # The price was known when the call was reserved, and is unknown now.
                spent = spent._replace(nano_usd=pending.spent.nano_usd)
        return replace(
            pending,
            outcome="provider_error" if response.error else "ok",
            response_model=safe_name(response.model) if response.model else pending.response_model,
            finish_reason=safe_name(response.finish_reason) if response.finish_reason else None,
            tools=tuple(map(safe_name, response.tools)),
            charge=charge,
            spent=spent,
            duration_s=max(pending.duration_s, now - pending.started_at),
            notes=notes,
        )

    def _fetched_usage(self, pending: CallRecord, response: ParsedResponse) -> tuple[Usage | None, UsageSource]:
        """Return the usage of a fetched response and its source; None if the response failed without any usage."""
        reported = response.usage
        estimated = pending.charge.usage.input_tokens if pending.charge is not None else 0
        # The fetched response may lack text that was streamed before the client left.
        delivered = pending.charge.usage.output_tokens if pending.charge is not None else 0
        output = max(response.output_estimate, delivered) if self._estimate_missing else 0
        if reported is not None and reported.has_tokens:
            return reported.complete(estimated, output)
        if response.error:
            return None, "estimated"
        return Usage.of(estimated, output), "estimated"

    def build_unreadable(self, state: CallState) -> CallRecord:
        """Return a record if `build` fails: it charges the counted input, and the output that the lease has noted."""
        state.notes["usage"] = "unknown: the gateway failed to read it"
        hold, charge, spent = state.budget.hold, None, NOTHING
        if state.response.is_billed or state.dispatch.is_at_work:
            tokens = state.context.plan.context.tokens if state.context.plan is not None else 0
            charge = Charge(Usage.of(tokens, hold.lease.saved.tokens if hold is not None else 0), "estimated", None)
            spent = spent_by(charge, self._cached_weight)
            if hold is not None and hold.hold is not None:
                delivered = ceil(hold.lease.saved.tokens / hold.lease.responses)
                spent = hold.hold.amount(hold.response_tokens if state.is_fetched_later else delivered)
        return self._record(state, ParsedResponse(), charge, spent)

    def _record(
        self,
        state: CallState,
        response: ParsedResponse,
        charge: Charge | None,
        spent: Amount,
        *,
        is_orphaned: bool = False,
    ) -> CallRecord:
        incoming, call, now, head_at = state.incoming, state.call, self._clock(), state.dispatch.head_at
        context = _context(state, response, charge)
        if is_orphaned and context is not None and context.message_fates:
            context = replace(context, message_fates=MessageOutcomes())
        return CallRecord(
            call_id=incoming.call_id,
            request_id=incoming.request_id,
            session=state.session,
            derived_session=state.is_session_derived,
            started_at=round(state.started_at, _DECIMALS),
            dialect=state.dialect.name,
            operation=_operation(state, call),
            provider=state.routing.route.provider,
            model=safe_name(state.routing.route.model or (call.model if call else None) or ""),
            response_model=safe_name(response.model) if response.model else None,
            stream=call.stream if call else False,
            status=state.response.status if state.response.outcome not in _LEFT else CLIENT_CLOSED,
            outcome=state.response.outcome if not is_orphaned else ORPHANED,
            error_code=state.response.fault.code if state.response.fault else None,
            error=CallError.of(state.response.fault) if state.response.fault else None,
            declared=state.budget.charged.declared if not state.budget.charged.declared.is_none else None,
            finish_reason=safe_name(response.finish_reason) if response.finish_reason else None,
            tools=tuple(map(safe_name, response.tools)),
            charge=charge,
            overhead_s=round((state.dispatch.sent_at or now) - incoming.started, _DECIMALS),
            first_byte_s=round(head_at - incoming.started, _DECIMALS) if head_at is not None else None,
            duration_s=round(now - incoming.started, _DECIMALS),
            request_bytes=len(incoming.body),
            response_bytes=state.response.bytes_sent,
            notes=state.notes,
            context=context,
            accounts=accounts_of(state.budget.accounts.claims),
            spent=spent,
            mode=state.context.mode,
            step=state.steps.step.name if state.steps.step is not None else None,
            kept=_kept_response(state, response, charge),
            answer=_lookup_name(state, response),
            unread_thinking=state.context.unread_thinking,
            labels=_labels(state),
            agent=state.agent,
        )

    def needs_texts(self, state: CallState) -> bool:
        """Return whether the record of a call is an estimate for which the texts of its request must be read."""
        if not self._estimate_missing or state.context.plan is not None or state.budget.text_tokens is not None:
            return False
        reported = response_so_far(state).usage
        is_known = reported is not None and reported.input_tokens is not None
        return (state.response.is_billed or state.dispatch.is_at_work) and not is_known

    def build_orphaned(self, state: CallState, need: CallNeed) -> CallRecord:
        """Return the record of a call in case its worker ends before it settles the call.

        It is charged the expected input. The safety margin of the hold protects the budget, but no provider bills it.
        """
        tokens = need.input_tokens if need.expected is None else need.expected
        cost_usd = need.rate.input * tokens if need.rate is not None else None
        charge = Charge(Usage.of(tokens, 0), "estimated", cost_usd)
        # `build` is not used: it adds notes about the charge, which would stay in the call's own record.
        return self._record(state, ParsedResponse(), charge, spent_by(charge, self._cached_weight), is_orphaned=True)

    def _charge(self, state: CallState, response: ParsedResponse, *, has_free_attempts: bool) -> Charge | None:
        """Return what the provider bills for a call; None if it bills nothing.

        `has_free_attempts`: usage that the provider does not bill was removed from the response.
        """
        endpoint = state.incoming.endpoint
        left_waiting = state.response.outcome in _LEFT and state.dispatch.is_at_work and state.dispatch.head_at is None
        if state.call is None or not (state.response.is_billed or (left_waiting and endpoint.metered)):
            return None
        reported = response.usage
        if reported is not None and reported.has_tokens:
            usage, source = reported.complete(*self._estimates(state, response))
            if has_free_attempts and not (usage.total_tokens or reported.searches):
                # No usage is left to bill, so an unknown price does not matter.
                return Charge(usage, source, Decimal(0))
            return Charge(usage, source, self._cost(state, usage, response))
        # A background response may still be created although its stream failed.
        failed_empty = (
            response.error and not response.output_estimate and not (response.id and _is_unfinished(state, response))
        )
        # An event stream with output is a model's response, even if the path is unknown.
        unknown_stream = state.response.is_event_stream and response.output_estimate > 0
        if failed_empty or not (endpoint.estimated or unknown_stream):
            return None
        usage = Usage.of(*self._estimates(state, response))
        return Charge(usage, "estimated", self._cost(state, usage, response))

    def _estimates(self, state: CallState, response: ParsedResponse) -> tuple[int, int]:
        """Return the estimated input and output tokens; the input is 0 if it was reported."""
        if not self._estimate_missing:
            return 0, 0
        reported = response.usage
        is_known = reported is not None and reported.input_tokens is not None
        return 0 if is_known else input_estimate(state), response.output_estimate

    def _budget_charge(self, state: CallState, charge: Charge | None, response: ParsedResponse) -> Amount:
        """Return what the call takes from budgets. If its cost is unknown, this is a lower bound of it."""
        if charge is None or charge.cost_usd is not None:
            return spent_by(charge, self._cached_weight)
        prices = self._prices(state, response)
        if prices:
            tier = safe_name(response.service_tier or "")
            state.notes.setdefault(
                "price", f'unknown for the service tier "{tier}", which costs more than the standard one'
            )
        spent = spent_by(_with_least_cost(charge, prices), self._cached_weight)
        hold = state.budget.hold.hold if state.budget.hold is not None else None
        if hold is None or self._is_input_known(state, response):
            return spent
        # The hold was made from the size of the form or file, which is all that is known of it.
        return spent._replace(nano_usd=max(spent.nano_usd, hold.fixed.nano_usd))

    def _is_input_known(self, state: CallState, response: ParsedResponse) -> bool:
        """Return whether the input is known or can be estimated. Forms and files are not read."""
        reported, call = response.usage, state.call
        if (reported is not None and reported.input_tokens is not None) or not self._estimate_missing:
            return True
        return call is None or bool(call.fields) or not call.body

    def _is_output_known(self, state: CallState, response: ParsedResponse) -> bool:
        """Return whether the output is known or can be estimated. Tokens of audio and images are not counted."""
        reported = response.usage
        if (reported is not None and reported.output_tokens is not None) or not self._estimate_missing:
            return True
        return response.is_counted or not state.response.bytes_sent

    def _reported_cost(self, route: Route, response: ParsedResponse) -> Decimal | None:
        """Return the cost that the provider reported; None if it reports none or is not in `cost_reporters`."""
        reported = response.usage if route.provider in self._cost_reporters else None
        return reported.cost_usd if reported is not None else None

    def _cost(self, state: CallState, usage: Usage, response: ParsedResponse) -> Decimal | None:
        cost_usd = self._reported_cost(state.routing.route, response)
        if cost_usd is not None:
            return cost_usd
        if not (self._is_input_known(state, response) and self._is_output_known(state, response)):
            state.notes["price"] = "unknown: no usage was reported for audio, images or files"
            return None
        tier = None
        if response.service_tier is None and state.call is not None:
            tier = service_tier(state.call.fields)
        prices, named = self._prices(state, response), partial(self._model_named, state)
        return self._list_cost(usage, response, prices=prices, named=named, tier=tier, notes=state.notes)

    def _list_cost(
        self,
        usage: Usage,
        response: ParsedResponse,
        *,
        prices: Sequence[Price],
        named: Callable[[str], Route],
        tier: str | None,
        notes: dict[str, str],
    ) -> Decimal | None:
        """Return the cost in USD at list prices; None if a price is unknown, which is noted in `notes`.

        Args:
            usage: the tokens to price.
            response: the response, for its service tier and the usage of each model.
            prices: of the models that may have responded. The highest cost counts.
            named: returns the route of a further model that the provider called.
            tier: the service tier that the call asked for, if the response names none.
            notes: the notes of the record.
        """
        others = Decimal(0)
        for name, part in response.usage.by_model if response.usage is not None else ():
            if name != response.model:
                price = self._facts(named(name)).price
                if price is None:
                    notes["price"] = f'unknown for "{safe_name(name)}", which the provider called as well'
                    return None
                usage, others = usage.without(part), others + standard_cost(part, price)
        costs = [_tier_cost(response, tier, usage, price) for price in prices]
        known = [cost_usd for cost_usd in costs if cost_usd is not None]
        if not known or len(known) < len(costs):
            return None
        if response.usage is None or not (response.usage.searches or response.usage.picture_tokens):
            return max(known) + others
        fees = [price.search for price in prices if price.search is not None]
        if response.usage.picture_tokens or len(fees) < len(prices):
            what = "images that a tool created" if response.usage.picture_tokens else "its web searches"
            notes["price"] = f"unknown for {what}"
            return None
        return max(known) + others + response.usage.searches * max(fees)

    def _model_named(self, state: CallState, name: str) -> Route:
        """Return the route of a model name at the provider that responded."""
        route = state.routing.route
        return _route_of_model([route, *state.routing.instead(route)], name) or self._named_at(route.provider, name)

    def _prices(self, state: CallState, response: ParsedResponse) -> list[Price]:
        """Return the price of the model that responded; the prices of all candidates if that model is unknown."""
        route = state.routing.route
        instead = state.routing.instead(route, besides=False)
        if not instead:
            # The response may name a version of the model, which has no price of its own.
            return self._known_prices([route])
        candidates = [route, *instead]
        responded = _route_of_model(candidates, response.model)
        if responded is None and response.model:
            responded = Route(route.provider, response.model)
        return (self._known_prices([responded]) if responded is not None else []) or self._known_prices(candidates)

    def _known_prices(self, routes: Sequence[Route]) -> list[Price]:
        return [price for route in routes if (price := self._facts(route).price) is not None]


def response_so_far(state: CallState) -> ParsedResponse:
    """Return the response of a call as far as it has been received."""
    return state.response.parsed or (state.response.reader() if state.response.reader else ParsedResponse())


def _context(state: CallState, response: ParsedResponse, charge: Charge | None) -> ContextRecord | None:
    """Return the token counts of the call. `beyond`: reported input of the provider's further passes over the call."""
    if state.context.plan is None:
        return None
    context, reported = state.context.plan.context, response.usage
    if state.budget.closing is not None and charge is not None:
        # The plan does not count the last instruction, so the difference to the report teaches nothing.
        return replace(context, beyond=charge.usage.input_tokens)
    if reported is None or reported.request_tokens is None or charge is None:
        return context
    beyond = charge.usage.input_tokens - reported.request_tokens
    return replace(context, beyond=beyond) if beyond > 0 else context


def has_ended(response: ParsedResponse) -> bool:
    """Return whether a response is complete or has failed, which its finish reason shows.

    An error alone does not: it may concern the stream, or the request that fetched the response.
    """
    return response.finish_reason is not None


def _is_unfinished(state: CallState, response: ParsedResponse) -> bool:
    """Return whether the provider is still creating a response that is fetched later.

    A complete response with usage has ended even without a finish reason, as some providers send none.
    """
    if has_ended(response) or not state.is_fetched_later:
        return False
    reported = response.usage
    return reported is None or not reported.output_tokens or state.response.outcome != "ok"


def _with_least_cost(charge: Charge | None, prices: Sequence[Price]) -> Charge | None:
    """Return the charge with a cost if that is unknown: the highest of the standard prices, a lower bound."""
    if charge is None or charge.cost_usd is not None or not prices:
        return charge
    return replace(charge, cost_usd=max(standard_cost(charge.usage, price) for price in prices))


def _tier_cost(response: ParsedResponse, tier: str | None, usage: Usage, price: Price) -> Decimal | None:
    """Return the cost in the tier of the response, or if it names none, the higher of standard and requested tier."""
    if tier is None:
        return cost(usage, price, response.service_tier)
    return max(standard_cost(usage, price), cost(usage, price, tier) or Decimal(0))


def _kept_response(state: CallState, response: ParsedResponse, charge: Charge | None) -> str:
    """Return what the session stores about a response that later calls may continue: its ids and its tokens.

    Empty if no usage was reported or the provider does not keep the response.
    """
    call, plan = state.call, state.context.plan
    if call is None:
        return ""
    ids = continuation_ids(call.fields, state.incoming.endpoint.wire, response.id)
    return kept_response(state.routing.route.provider, charge, ids, plan.overhead if plan is not None else 0)


def _labels(state: CallState) -> dict[str, str]:
    """Return the names by which the usage of a call is added up, besides its session's client key and its model."""
    labels: dict[str, str] = {}
    if state.session is None:
        labels[KEY] = state.incoming.caller.namespace
    if state.incoming.caller.budget.group is not None:
        labels["group"] = state.incoming.caller.budget.group
    tag = state.incoming.directives.tag or (tag_in_body(state.call) if state.call is not None else None)
    if tag is not None:
        labels["tag"] = tag
    return labels


def _lookup_name(state: CallState, response: ParsedResponse) -> str | None:
    """Return the name by which a later call that continues this response finds its record (`CallRecord.answer`)."""
    fields = state.call.fields if state.call is not None else {}
    kept = stored_response_id(fields, state.incoming.endpoint.wire, response.id)
    return response_digest(kept) if kept is not None else None


def kept_response(provider: str, charge: Charge | None, ids: Sequence[str], overhead: int) -> str:
    """Return what a session stores about a response that later calls may continue under these ids.

    The tokens are all of the call except `overhead`, which each request sends again, such as its tools.
    """
    if charge is None or charge.source != "provider" or not ids:
        return ""
    return kept_text(provider, ids, charge.usage.input_tokens + charge.usage.output_tokens - overhead)


def _route_of_model(routes: Sequence[Route], name: str | None) -> Route | None:
    """Return the route whose model has this name or a version of it; None if there is none."""
    if name is None:
        return None
    for route in routes:
        if route.model == name:
            return route
    for route in routes:
        if name.startswith(route.model) and _VERSION.fullmatch(name, len(route.model)):
            return route
    return None


def input_estimate(state: CallState) -> int:
    """Return the estimated input tokens of a call.

    These are the counted tokens of what was sent. Without a count, the tokens of its texts are estimated.
    """
    plan = state.context.plan
    return plan.context.tokens if plan is not None else text_estimate(state) + state.kept_by(state.routing.route)


def text_estimate(state: CallState) -> int:
    """Return the estimated tokens of the texts of a call whose tokens are not counted; computed once."""
    call = state.call
    if call is not None and state.budget.text_tokens is None:
        state.budget.text_tokens = estimate(state.dialect.input_text(call)) + token_ids(call.fields)
    return state.budget.text_tokens or 0


def _operation(state: CallState, call: Call | None) -> str:
    purpose = state.incoming.purpose
    if purpose is not None:
        return purpose.operation
    return call.operation if call else state.incoming.endpoint.operation
