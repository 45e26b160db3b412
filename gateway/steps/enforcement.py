"""Find the active step of a call's agent, restrict the call's tools to it, and advance the step by the tools used.

The rules are in `core/steps/`. The position of an agent in its steps is part of the session's state in the store. The
rules are always applied to the stored position, so that concurrent calls on any worker see each other's changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import Final

import msgspec

from gateway.call.observers import notify_step
from gateway.call.recent_models import RecentModels
from gateway.call.state import CallState
from gateway.call.types import ActiveStep, PlanRequest
from gateway.context.planner import Planner
from gateway.core.counting.families import TokenizerFamily
from gateway.core.counting.request import ITEMS
from gateway.core.errors import InvalidRequest, StoreConflict, StoreDamaged, StoreUnavailable, ToolNotAllowed
from gateway.core.http.gateway_headers import AGENT
from gateway.core.http.headers import ProviderAddress
from gateway.core.ledger.charging import remaining_fraction
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, RecordRefused, Sessions
from gateway.core.record import CallRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Places, SessionState, with_agent_step
from gateway.core.steps import DEFAULT_AGENT, Agent, ConditionFacts, Patterns, Step, StepState, Used
from gateway.core.times import Clocks
from gateway.core.views import VIEWED
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.reasoning import has_thinking, referenced_tools
from gateway.dialects.texts import safe_name
from gateway.dialects.tool_changes import changes_tools, refuses_changes
from gateway.dialects.tool_restriction import (
    UNRESTRICTED,
    RestrictionSupport,
    ToolRestriction,
    accepts_forced,
    offering_all,
    restricted,
)
from gateway.dialects.tools import ToolOffer, read_offer
from gateway.steps.last_user_message import NewestMessages

_AT_START: Final = StepState()
_NO_FACTS: Final = ConditionFacts()
_UNAVAILABLE: Final = "not stored: the store is unavailable"
_CHANGED: Final = "not stored: other calls changed the session at each try"
_REFUSED: Final = "not stored: the store refuses the record of the call"
_UNHEARD: Final = "not stored: the client left before the response ended"
_DAMAGED: Final = "not stored: the session's data in the store is damaged"
_REASONS: Final = ((StoreConflict, _CHANGED), (RecordRefused, _REFUSED), (StoreDamaged, _DAMAGED))
#: A refusal that concerns the choice of tools contains one of these words, in lower case: the names of the field in the
#: APIs, and the wording of Anthropic ("forces tool use") and Google ("forced function calling").
_ABOUT_CHOICE: Final = (
    *(b"allowed_tools", b"tool_choice", b"toolchoice", b"tool choice", b"function_call"),
    *(b"forces tool", b"forced tool", b"force tool", b"forced function"),
)
#: A refusal of a forced call because the model thinks contains this word.
_ABOUT_THINKING: Final = b"think"
_BOUND: Final = "the model's thinking is valid only with the same list of tools"
_REFERRED: Final = "messages refer to them"
_UNFORCED: Final = "no tool call is forced: the model refuses that, or refuses it while thinking"
#: Finish reasons of a truncated response. Its tool calls may be truncated too, so clients do not run them.
_TRUNCATED: Final = frozenset(
    {
        *("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded", "incomplete"),
        *("content_filter", "refusal", "failed", "cancelled"),
    }
)
#: the pattern that denies all tools
_EVERYTHING: Final = "*"
#: entries in the cache of the tools that a step allows of an offer
_CACHED: Final = 256
#: maximum number of names in an error or a note
_SHOWN: Final = 16


class Steps:
    """Enforces the steps of agents, for all calls."""

    def __init__(
        self,
        *,
        agents: Mapping[str, Agent],
        store: Sessions,
        planner: Planner,
        providers: Mapping[str, ProviderAddress],
        facts: Callable[[Route], ModelFacts],
        observers: Sequence[Observer],
        clocks: Clocks,
    ) -> None:
        self._agents = agents
        self._store = store
        self._planner = planner
        self._last_messages = NewestMessages()
        self._providers = providers
        self._facts = facts
        self._listeners = [observer.stepped for observer in observers if type(observer).stepped is not Observer.stepped]
        self._clocks = clocks
        #: models that refused a choice of some tools (`allowed_tools`)
        self._no_choice = RecentModels(clocks.monotonic)
        #: models that refused a forced tool call
        self._no_force = RecentModels(clocks.monotonic)
        #: models that refused a system message that withdraws tools
        self._no_changes = RecentModels(clocks.monotonic)

    # --- before the call ---------------------------------------------------------------------------------------

    async def begin(self, state: CallState, call: Call) -> None:
        """Find the active step of the call, and the tools that it allows.

        Raises:
            InvalidRequest: the call names an unknown agent, or its tools cannot be read.
            ToolNotAllowed: the tools that the call offers do not agree with the step.
        """
        if state.context.compaction is not None:
            # A compaction calls no tools, and a restriction would change what is compacted.
            return
        agent, session, incoming = self._agent(state), state.session, state.incoming
        if agent is None or session is None or incoming.endpoint.wire not in VIEWED or incoming.purpose is not None:
            return
        if state.stored_session is None:
            # The position is unknown. Starting from the first step could refuse tools that are allowed now.
            state.notes["step"] = "none: the store is unavailable"
            return
        facts = await self._facts_of(agent, state, call)
        at = state.context.remembered.state.steps.get(agent.name, _AT_START)
        place = agent.with_active_step(at, facts)
        if place is not at:
            place = await self._enter(state, session, agent, facts, place)
        active = state.steps.active = ActiveStep(agent, facts, place)
        step = state.steps.step = agent.step(place)
        if step is None or step.enforce == "observe":
            return
        offer = read_offer(call.fields, incoming.endpoint.wire)
        if offer is None:
            return
        if offer.mode == "none" or asks_for_compaction(call.fields, incoming.endpoint.wire):
            # Nothing to restrict, but some models require the same list of tools with each call.
            active.offer, active.callable_tools, active.is_free = offer, offer.names, True
        else:
            _restrict_offer(active, step, step.due(place.index), offer, session)
            # The client asks for a text: with a forced call it would receive no summary.
            active.must_call = active.must_call and not state.is_compaction

    async def _enter(
        self, state: CallState, session: SessionKey, agent: Agent, facts: ConditionFacts, expected: StepState
    ) -> StepState:
        """Enter the step that follows from the stored position, and store it; return `expected` if that fails."""
        before = entered = _AT_START

        def change(kept: SessionState) -> SessionState:
            nonlocal before, entered
            before = kept.steps.get(agent.name, _AT_START)
            entered = agent.with_active_step(before, facts)
            return kept if entered == before else kept.with_step(agent.name, entered)

        try:
            await self._store.update(session, change)
        except StoreUnavailable as error:
            state.notes["step"] = _reason_not_stored(error)
            return expected
        self._tell(session, agent, before, entered, ())
        return entered

    def _agent(self, state: CallState) -> Agent | None:
        """Return the agent of the call: that of its route, else the one that the call names, else the default.

        Raises:
            InvalidRequest: the agent is not configured.
        """
        name = state.routing.route.agent or state.incoming.directives.agent
        if name is None:
            return self._agents.get(DEFAULT_AGENT)
        if name not in self._agents:
            known = ", ".join(sorted(self._agents)) or "none"
            raise InvalidRequest(f'Unknown agent "{name}"; agents with steps: {known}.', param=AGENT.decode())
        return self._agents[name]

    async def _facts_of(self, agent: Agent, state: CallState, call: Call) -> ConditionFacts:
        """Return the values that the agent's conditions test. Only what they need is computed."""
        if not agent.reads_facts:
            return _NO_FACTS
        left = remaining_fraction(state.budget.accounts.budgets) if agent.reads_budget else 1.0
        wire, contents = state.incoming.endpoint.wire, None
        if wire is not None and (agent.reads_message or agent.reads_tokens):
            contents = await self._planner.contents(call, wire)
            # A huge body is read again when it is planned: many may wait for that, and would use too much memory.
            state.steps.contents = None if self._planner.is_huge(call) else contents
        if contents is None:
            return ConditionFacts(left=left)
        tokens = None
        if agent.reads_tokens:
            options = state.incoming.directives.context
            request = PlanRequest(
                contents, state.routing.route, self._facts(state.routing.route), options, len(call.body)
            )
            state.steps.counts = await self._planner.count_tokens(request, state.context.remembered)
            tokens = state.steps.counts.original.tokens
        return ConditionFacts(
            await self._last_messages.ahead_of(contents) if agent.reads_message else None, tokens, left
        )

    @staticmethod
    def may_restrict(state: CallState) -> bool:
        """Return whether `restrict` may change something: a step restricts tools, or an earlier step withdrew some."""
        active = state.steps.active
        return (active is not None and active.offer is not None) or bool(state.context.remembered.state.tool_changes)

    def restrict(self, state: CallState) -> None:
        """Choose how the request to the current provider states which tools may be called."""
        active, call = state.steps.active, state.call
        if call is None:
            return
        if active is None or active.offer is None:
            state.steps.restriction = self._offering_all(state, call)
            return
        offer = active.offer
        support = self._support(state, active, offer, call.fields.get(ITEMS[offer.wire], b""))
        restriction = restricted(offer, active.callable_tools, must=active.must_call, takes=support)
        if active.is_free and restriction.withdrawal is not None:
            restriction = replace(restriction, withdrawal=replace(restriction.withdrawal, withdrawn=None))
        state.steps.restriction = restriction
        _note_limits(state, active, support)

    def _support(
        self, state: CallState, active: ActiveStep, offer: ToolOffer, items: bytes | msgspec.Raw
    ) -> RestrictionSupport:
        """Return the restrictions that the model accepts, by its family, the request, and recent refusals."""
        route, step = state.routing.route, active.step
        family = self._planner.family(route, offer.wire)
        # The messages are copied only if they are read below.
        messages = bytes(items) if offer.wire == "messages" or family.binding == "prefix" else b""
        referenced = referenced_tools(messages) if offer.wire == "messages" else frozenset()
        is_bound = _is_bound(family, offer, messages)
        allowed = None
        if step is not None and is_bound and self._may_withdraw(state, family, offer, messages):
            names = tuple(tool.name for tool in offer.tools)
            allowed = frozenset(names if active.is_free else step.callable(names, step.due(active.state.index)))
        return RestrictionSupport(
            self._providers[route.provider].allowed_tools
            and not _is_refused(route, active.refused_choice, self._no_choice),
            accepts_forced(family, offer) and not _is_refused(route, active.refused_force, self._no_force),
            _ever_callable(active.agent, offer) | referenced if is_bound else None,
            referenced,
            allowed,
        )

    def _may_withdraw(self, state: CallState, family: TokenizerFamily, offer: ToolOffer, messages: bytes) -> bool:
        """Return whether a system message inside the conversation can withdraw tools.

        The gateway adds nothing if the client changes tools in this way itself.
        """
        route = state.routing.route
        return (
            family.tool_changes == "accepted"
            and offer.wire == "messages"
            and not self._providers[route.provider].is_translated
            and not _is_refused(route, state.steps.refused_changes, self._no_changes)
            and not changes_tools(messages)
        )

    def _offering_all(self, state: CallState, call: Call) -> ToolRestriction:
        """Return the restriction that offers withdrawn tools again, for a request that no step restricts."""
        wire = state.incoming.endpoint.wire
        with contextlib.suppress(InvalidRequest):
            offer = read_offer(call.fields, wire) if wire is not None else None
            if offer is not None:
                family, messages = (
                    self._planner.family(state.routing.route, offer.wire),
                    bytes(call.fields[ITEMS[offer.wire]]),
                )
                is_bound = _is_bound(family, offer, messages)
                if is_bound and self._may_withdraw(state, family, offer, messages):
                    return offering_all(offer, is_free=asks_for_compaction(call.fields, wire))
        return UNRESTRICTED

    def restrict_again(self, state: CallState, refusal: bytes) -> bool:
        """Restrict the tools in another way if that is what the provider refused; return False if it is not.

        - A refused system message that withdraws tools is left out.
        - First the choice of some tools is left out, then the forced call. If the refusal mentions thinking, the forced
          call is left out first, because thinking is a reason to refuse that only.
        """
        active, sent, route = state.steps.active, state.steps.restriction, state.routing.route
        text = refusal.lower()
        if state.context.adds_tool_changes and refuses_changes(refusal, state.context.sent_messages):
            state.steps.refused_changes = route
            self.restrict(state)
            return True
        if active is None or not any(word in text for word in _ABOUT_CHOICE):
            return False
        is_choice = sent.is_choice_among and active.refused_choice != route
        is_force = sent.is_forced and active.refused_force != route
        if is_force and (not is_choice or _ABOUT_THINKING in text):
            active.refused_force = route
        elif is_choice:
            active.refused_choice = route
        else:
            return False
        self.restrict(state)
        return True

    def accepted(self, state: CallState) -> None:
        """Remember the restriction that the model refused, now that it has accepted the call without it.

        Only this shows that the restriction was the reason for the refusal.
        """
        active, route = state.steps.active, state.routing.route
        if state.steps.refused_changes == route:
            self._no_changes.add(route)
            state.notes["tool_changes"] = "the provider refused system messages that withdraw tools"
        if active is None:
            return
        if active.refused_choice == route:
            self._no_choice.add(route)
            state.notes["tool_choice"] = "the provider refused allowed_tools, so its list of tools is shorter"
        if active.refused_force == route:
            self._no_force.add(route)

    # --- after it ----------------------------------------------------------------------------------------------

    def transition(self, state: CallState, record: CallRecord) -> StepTransition | None:
        """Return the step transition caused by the response's tool calls, or None.

        None if the response calls no tools or was truncated, so that its tool calls will not be run. Also None if the
        client left before the response ended; a note then says so.
        """
        active = state.steps.active
        if active is None or not record.tools:
            return None
        if record.finish_reason in _TRUNCATED or (record.outcome != "ok" and record.finish_reason is None):
            return None
        if state.settlement.is_unheard:
            state.notes["step"] = _UNHEARD
            return None
        return StepTransition(active, _offered_names(state, active, record.tools), record)

    def accept_transition(self, state: CallState, going: StepTransition) -> CallRecord:
        """Accept the transition that was stored with the record, notify observers, and return the record."""
        active, session, used = going.stepped, state.session, going.used
        active.state, active.stray = used.state, used.stray
        if session is not None:
            self._tell(session, active.agent, going.at, used.state, going.tools)
        return going.record

    def apply_unstored(self, state: CallState, going: StepTransition, error: StoreUnavailable) -> None:
        """Apply the transition to the position that this call knows, after it could not be stored.

        The position in the steps is guidance, so its loss is no reason to fail the call.

        `error`: why it was not stored.
        """
        active = going.stepped
        active.state, active.stray = active.agent.after_tools(active.state, going.tools, active.facts)
        state.notes |= {"step": _reason_not_stored(error), **_stray_note(active.stray)}

    def _tell(
        self, session: SessionKey, agent: Agent, before: StepState, after: StepState, tools: Sequence[str]
    ) -> None:
        if self._listeners:
            notify_step(self._listeners, session, agent, (before, after), at=self._clocks.wall(), tools=tools)


class StepTransition:
    """A step transition, applied by the store to the stored position when it writes the record (`StepEnding`).

    The store may apply it several times. The attributes are those of the last time.

    Attributes:
        stepped: the position that the call knows.
        tools: the tools that the response calls.
        at: the position before.
        used: the position after, and tools that were not allowed.
        record: the record of the call, with a note on these tools.
    """

    def __init__(self, active: ActiveStep, tools: Sequence[str], record: CallRecord) -> None:
        self.stepped = active
        self.tools = tools
        self.at = _AT_START
        self.used = Used(_AT_START)
        self.record = self._plain = record

    def __call__(self, places: Places) -> tuple[Places, CallRecord]:
        """Return the positions after the transition, and the record to write."""
        agent, plain = self.stepped.agent, self._plain
        at = self.at = places.get(agent.name, _AT_START)
        used = self.used = agent.after_tools(at, self.tools, self.stepped.facts)
        self.record = replace(plain, notes={**plain.notes, **_stray_note(used.stray)}) if used.stray else plain
        return places if used.state == at else with_agent_step(places, agent.name, used.state), self.record


def _is_bound(family: TokenizerFamily, offer: ToolOffer, messages: bytes) -> bool:
    """Return whether the thinking of a request is bound to its list of tools."""
    return family.binding == "prefix" and (offer.thinks is not False or has_thinking(messages))


def _is_refused(route: Route, refusing: Route | None, recent: RecentModels) -> bool:
    """Return whether a model refused something in this call, or recently."""
    return route == refusing or route in recent


def _ever_callable(agent: Agent, offer: ToolOffer) -> frozenset[str]:
    """Return the tools of an offer that the agent may call in at least one of its steps."""
    return frozenset([tool.name for tool in offer.tools if agent.ever_allows(tool.name)])


def _note_limits(state: CallState, active: ActiveStep, support: RestrictionSupport) -> None:
    """Note in the record which restrictions of the step the request could not state, and why."""
    beyond, is_forced = (
        state.steps.restriction.still_offered,
        active.offer is not None and active.offer.mode == "required",
    )
    reason = _BOUND if support.listed is not None else _REFERRED
    for name, note in (
        ("step_tools", f"offered although not due or not allowed: {_list(beyond)}; {reason}" if beyond else None),
        ("step_required", _UNFORCED if active.must_call and not support.forced and not is_forced else None),
    ):
        state.notes.pop(name, None)  # a note for the previous route
        if note is not None:
            state.notes[name] = note


def _reason_not_stored(error: StoreUnavailable) -> str:
    return next((why for kind, why in _REASONS if isinstance(error, kind)), _UNAVAILABLE)


def _stray_note(stray: Sequence[str]) -> dict[str, str]:
    return {"stray_tools": ", ".join(stray[:_SHOWN])} if stray else {}


def _offered_names(state: CallState, active: ActiveStep, tools: Sequence[str]) -> Sequence[str]:
    """Return the tools that a response calls, by the names under which the request offered them."""
    call, wire, offer = state.call, state.incoming.endpoint.wire, active.offer
    if offer is None and call is not None and wire is not None:
        with contextlib.suppress(InvalidRequest):
            offer = read_offer(call.fields, wire)
    if offer is None:
        return tools
    sets = state.response.parsed.tool_sets if state.response.parsed is not None else ()
    if not any(sets) and all(map(offer.names.__contains__, tools)):
        return tools
    # `safe_name`, because clients may choose any name for a set of tools.
    return [safe_name(offer.offered_name(tool, tool_set)) for tool, tool_set in zip_longest(tools, sets[: len(tools)])]


def _restrict_offer(
    active: ActiveStep, step: Step, due: Patterns | None, offer: ToolOffer, session: SessionKey
) -> None:
    """Restrict the tools that a call offers to those that the step allows now.

    Raises:
        ToolNotAllowed: none of them is allowed, a forced tool is not, or the step rejects calls that offer others.
    """
    callable_tools, is_accepted = (_cached_allowed_of if offer.is_known else _allowed_of)(step, due, offer)
    if not is_accepted:
        if offer.named is not None:
            raise ToolNotAllowed(
                _refusal_text(active, step, f"forces {_list([offer.named])}", session), param="tool_choice"
            )
        callable_names = frozenset(callable_tools)
        outside = [name for name in offer.names if name not in callable_names]
        raise ToolNotAllowed(_refusal_text(active, step, f"offers {_list(outside)}", session), param="tools")
    if step.enforce != "reject":
        active.offer, active.callable_tools = offer, callable_tools
        active.must_call = step.enforce == "require" and due is not None


def _allowed_of(step: Step, due: Patterns | None, offer: ToolOffer) -> tuple[tuple[str, ...], bool]:
    """Return the tools of an offer that may be called, and whether the step accepts the offer."""
    callable_tools = step.callable(offer.names, due)
    has_outside = len(callable_tools) < len(offer.names)
    is_none = step.allowed == () or _EVERYTHING in step.denied
    is_refused = (not callable_tools and not is_none) or (
        has_outside and (offer.named is not None or step.enforce == "reject")
    )
    return callable_tools, not is_refused


_cached_allowed_of = lru_cache(_CACHED)(_allowed_of)


def _refusal_text(active: ActiveStep, step: Step, action: str, session: SessionKey) -> str:
    agent, state = active.agent, active.state
    due = agent.due(state)
    if due is not None:
        wanted = f"entry {state.index + 1} of {len(step.sequence)} of its sequence is due, {' or '.join(due)}"
    else:
        wanted = f"it allows {_list(step.allowed if step.allowed is not None else ('all tools',))}"
        wanted += f" but {_list(step.denied)}" if step.denied else ""
    agent_field = f', "agent": "{agent.name}"' if agent.name != DEFAULT_AGENT else ""
    return (
        f'Session "{session.id}" is in the step "{step.name}": {wanted}. The request {action}. '
        "Offer the tools of the step, or set another step: "
        f'PATCH /api/sessions/{session.id} {{"active_step": …{agent_field}}}.'
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(name[:80] for name in names[:_SHOWN]) or "none") + more
