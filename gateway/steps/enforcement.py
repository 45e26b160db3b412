"""Find the active step of a call's agent, restrict its tools, and move the step by the tools used.

The rules are `core/steps/`. Where a session is in its steps is kept in its state, and changed by the rules applied to
what the store holds at that moment: calls side by side, on any worker, each see what the others did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import Final

import msgspec

from gateway.call.observers import tell_step
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
from gateway.core.session import Places, SessionState, moved
from gateway.core.steps import DEFAULT_AGENT, Agent, ConditionFacts, Patterns, Step, StepState, Used
from gateway.core.views import VIEWED
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.reasoning import has_thinking, referenced_tools
from gateway.dialects.texts import as_name
from gateway.dialects.tool_changes import changes_tools, refuses_changes
from gateway.dialects.tool_restriction import (
    UNRESTRICTED,
    RestrictionSupport,
    ToolRestriction,
    offering_all,
    restricted,
    takes_forced,
)
from gateway.dialects.tools import ToolOffer, offer_of
from gateway.steps.last_user_message import NewestMessages

_AT_START: Final = StepState()
_NO_FACTS: Final = ConditionFacts()
_UNAVAILABLE: Final = "not kept: the store is away"
_CHANGED: Final = "not kept: others changed the session each time"
_REFUSED: Final = "not kept: the store cannot take the call's record"
_UNHEARD: Final = "not kept: its client had left before it ended"
_DAMAGED: Final = "not kept: the store cannot read what it holds of the session"
_REASONS: Final = ((StoreConflict, _CHANGED), (RecordRefused, _REFUSED), (StoreDamaged, _DAMAGED))
#: A provider's refusal that is about the choice of tools has one of these words, in lower case: the field in the
#: spellings of the APIs, and how Anthropic ("forces tool use") and Google ("forced function calling") speak of it.
_ABOUT_CHOICE: Final = (
    *(b"allowed_tools", b"tool_choice", b"toolchoice", b"tool choice", b"function_call"),
    *(b"forces tool", b"forced tool", b"force tool", b"forced function"),
)
#: a refusal that is about a forced call while the model thinks has this word
_ABOUT_THINKING: Final = b"think"
_BOUND: Final = "the model's thinking is valid only with the same list of tools"
_REFERRED: Final = "messages refer to them"
_UNFORCED: Final = "no tool call is forced: the model refuses that, or does while it thinks"
#: how an answer ends that was cut: a call of a tool in it may be cut as well, and nobody runs that
_CUT: Final = frozenset(
    {
        *("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded", "incomplete"),
        *("content_filter", "refusal", "failed", "cancelled"),
    }
)
#: the pattern by which a step denies all tools
_EVERYTHING: Final = "*"
#: size of the cache of which tools of an offer a step lets a call use
_KNOWN: Final = 256
#: names that an error shows
_SHOWN: Final = 16


class Steps:
    """Keeps sessions in their steps. Shared by all calls."""

    def __init__(
        self,
        *,
        agents: Mapping[str, Agent],
        store: Sessions,
        planner: Planner,
        providers: Mapping[str, ProviderAddress],
        facts: Callable[[Route], ModelFacts],
        observers: Sequence[Observer],
        is_unavailable: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._agents = agents
        self._is_unavailable = is_unavailable
        self._store = store
        self._planner = planner
        self._newest = NewestMessages()
        self._providers = providers
        self._facts = facts
        self._listeners = [one.stepped for one in observers if type(one).stepped is not Observer.stepped]
        self._wall = wall
        #: models that refused a choice among some tools
        self._no_choice = RecentModels(clock)
        #: models that refused a forced tool call
        self._no_force = RecentModels(clock)
        #: models that refused a system message that withdraws tools
        self._no_changes = RecentModels(clock)

    # --- before the call ---------------------------------------------------------------------------------------

    async def begin(self, progress: CallState, call: Call) -> None:
        """Find the step that the call is made in, and what it allows.

        Raises:
            InvalidRequest: it names an agent that does not exist, or its tools cannot be read.
            ToolNotAllowed: what it offers does not go together with the step.
        """
        if progress.compaction is not None:
            # It calls no tools, and a choice among them would spoil it.
            return
        agent, session, incoming = self._agent(progress), progress.session, progress.incoming
        if agent is None or session is None or incoming.endpoint.wire not in VIEWED or incoming.purpose is not None:
            return
        if self._is_unavailable():
            # Nobody knows where the session is: to begin anew would refuse it what it may do.
            progress.notes["step"] = "none: the store is away"
            return
        facts = await self._look(agent, progress, call)
        at = progress.remembered.state.steps.get(agent.name, _AT_START)
        state = agent.entered(at, facts)
        if state is not at:
            state = await self._enter(progress, session, agent, facts, state)
        stepped = progress.stepped = ActiveStep(agent, facts, state)
        step = progress.step = agent.step(state)
        if step is None or step.enforce == "observe":
            return
        offer = offer_of(call.fields, incoming.endpoint.wire)
        if offer is None:
            return
        if offer.mode == "none" or asks_for_compaction(call.fields, incoming.endpoint.wire):
            # Nothing to restrict, but a list that must be the same with each call is the same here.
            stepped.offer, stepped.keep, stepped.is_free = offer, offer.names, True
        else:
            _hold_to(stepped, step, step.due(state.index), offer, session)

    async def _enter(
        self, progress: CallState, session: SessionKey, agent: Agent, facts: ConditionFacts, expected: StepState
    ) -> StepState:
        """Enter the step that follows from the state in the store now, and keep that; `expected` where that fails."""
        at = after = _AT_START
        if self._is_unavailable():
            progress.notes["step"] = _UNAVAILABLE
            return expected

        def change(state: SessionState) -> SessionState:
            nonlocal at, after
            at = state.steps.get(agent.name, _AT_START)
            after = agent.entered(at, facts)
            return state if after == at else state.with_step(agent.name, after)

        try:
            await self._store.update(session, change)
        except StoreUnavailable as error:
            progress.notes["step"] = _why(error)
            return expected
        self._tell(session, agent, at, after, ())
        return after

    def _agent(self, progress: CallState) -> Agent | None:
        """The agent whose steps the call takes: its route's, else the one that it names, else the default one."""
        name = progress.route.agent or progress.incoming.directives.agent
        if name is None:
            return self._agents.get(DEFAULT_AGENT)
        if name not in self._agents:
            known = ", ".join(sorted(self._agents)) or "none"
            raise InvalidRequest(f'There is no agent "{name}" with steps; configured: {known}.', param=AGENT.decode())
        return self._agents[name]

    async def _look(self, agent: Agent, progress: CallState, call: Call) -> ConditionFacts:
        """What the agent's conditions look at, and no more than that."""
        if not agent.reads_facts:
            return _NO_FACTS
        left = remaining_fraction(progress.book.budgets) if agent.reads_budget else 1.0
        wire, contents = progress.incoming.endpoint.wire, None
        if wire is not None and (agent.reads_message or agent.reads_tokens):
            contents = await self._planner.contents(call, wire)
            # A huge one is read again when it is its turn to be planned: many may wait for that.
            progress.contents = None if self._planner.is_huge(call) else contents
        if contents is None:
            return ConditionFacts(left=left)
        tokens = None
        if agent.reads_tokens:
            options = progress.incoming.directives.context
            asked = PlanRequest(contents, progress.route, self._facts(progress.route), options, len(call.body))
            progress.counts = await self._planner.count_tokens(asked, progress.remembered)
            tokens = progress.counts.original.tokens
        return ConditionFacts(await self._newest.ahead_of(contents) if agent.reads_message else None, tokens, left)

    @staticmethod
    def may_restrict(progress: CallState) -> bool:
        """Return whether `restrict` may change something: a step restricts tools, or an earlier step withdrew some."""
        stepped = progress.stepped
        return (stepped is not None and stepped.offer is not None) or bool(progress.remembered.state.tool_changes)

    def restrict(self, progress: CallState) -> None:
        """Decide how the current provider is told which tools may be called."""
        stepped, call = progress.stepped, progress.call
        if call is None:
            return
        if stepped is None or stepped.offer is None:
            progress.restricted = self._offering_all(progress, call)
            return
        offer = stepped.offer
        takes = self._takes(progress, stepped, offer, call.fields.get(ITEMS[offer.wire], b""))
        restriction = restricted(offer, stepped.keep, must=stepped.must, takes=takes)
        if stepped.is_free and restriction.withdrawal is not None:
            restriction = replace(restriction, withdrawal=replace(restriction.withdrawal, withdrawn=None))
        progress.restricted = restriction
        _note_limits(progress, stepped, takes)

    def _takes(
        self, progress: CallState, stepped: ActiveStep, offer: ToolOffer, items: bytes | msgspec.Raw
    ) -> RestrictionSupport:
        """Return what the model of a route accepts, by its family, the request, and what it refused lately."""
        route, step = progress.route, stepped.step
        family = self._planner.family(route, offer.wire)
        # Copied only for the models and formats that are looked into.
        messages = bytes(items) if offer.wire == "messages" or family.binding == "prefix" else b""
        referenced = referenced_tools(messages) if offer.wire == "messages" else frozenset()
        is_bound = _is_bound(family, offer, messages)
        allowed = None
        if step is not None and is_bound and self._may_withdraw(progress, family, offer, messages):
            names = tuple(tool.name for tool in offer.tools)
            allowed = frozenset(names if stepped.is_free else step.callable(names, step.due(stepped.state.index)))
        return RestrictionSupport(
            self._providers[route.provider].allowed_tools and not _is_in(route, stepped.refused, self._no_choice),
            takes_forced(family, offer) and not _is_in(route, stepped.unforced, self._no_force),
            _ever_callable(stepped.agent, offer) | referenced if is_bound else None,
            referenced,
            allowed,
        )

    def _may_withdraw(self, progress: CallState, family: TokenizerFamily, offer: ToolOffer, messages: bytes) -> bool:
        """Return whether a system message inside the conversation can withdraw tools.

        A client that changes tools in this way itself knows which ones are offered, so the gateway adds nothing.
        """
        route = progress.route
        return (
            family.tool_changes == "accepted"
            and offer.wire == "messages"
            and not self._providers[route.provider].is_translated
            and not _is_in(route, progress.refused_changes, self._no_changes)
            and not changes_tools(messages)
        )

    def _offering_all(self, progress: CallState, call: Call) -> ToolRestriction:
        """Return how a request that no step restricts offers the tools again that were withdrawn before."""
        wire = progress.incoming.endpoint.wire
        with contextlib.suppress(InvalidRequest):
            offer = offer_of(call.fields, wire) if wire is not None else None
            if offer is not None:
                family, messages = (
                    self._planner.family(progress.route, offer.wire),
                    bytes(call.fields[ITEMS[offer.wire]]),
                )
                is_bound = _is_bound(family, offer, messages)
                if is_bound and self._may_withdraw(progress, family, offer, messages):
                    return offering_all(offer, is_free=asks_for_compaction(call.fields, wire))
        return UNRESTRICTED

    def restrict_again(self, progress: CallState, refusal: bytes) -> bool:
        """Whether a provider's refusal is about what it was told of its tools, so that it is told in another way.

        First it is told without a choice among some tools, then without a forced call; the other way round where the
        refusal says that the model thinks, since that is a reason to refuse a forced call only.
        """
        stepped, sent, route = progress.stepped, progress.restricted, progress.route
        text = refusal.lower()
        if progress.adds_tool_changes and refuses_changes(refusal, progress.sent_messages):
            progress.refused_changes = route
            self.restrict(progress)
            return True
        if stepped is None or not any(word in text for word in _ABOUT_CHOICE):
            return False
        is_choice = sent.is_choice_among and stepped.refused != route
        is_force = sent.is_forced and stepped.unforced != route
        if is_force and (not is_choice or _ABOUT_THINKING in text):
            stepped.unforced = route
        elif is_choice:
            stepped.refused = route
        else:
            return False
        self.restrict(progress)
        return True

    def taken(self, progress: CallState) -> None:
        """A provider took the call. Only now is it sure that the choice was the reason for what it refused before."""
        stepped, route = progress.stepped, progress.route
        if progress.refused_changes == route:
            self._no_changes.add(route)
            progress.notes["tool_changes"] = "the provider refused system messages that withdraw tools"
        if stepped is None:
            return
        if stepped.refused == route:
            self._no_choice.add(route)
            progress.notes["tool_choice"] = "allowed_tools is refused by the provider; its list of tools is shorter"
        if stepped.unforced == route:
            self._no_force.add(route)

    # --- after it ----------------------------------------------------------------------------------------------

    def going(self, progress: CallState, record: CallRecord) -> Going | None:
        """How the session goes on by the tools that an answer calls; None where it does not, or nobody can say.

        Tools of an answer that was cut are not counted: nobody will run them.
        """
        stepped = progress.stepped
        if stepped is None or not record.tools:
            return None
        if record.finish_reason in _CUT or (record.outcome != "ok" and record.finish_reason is None):
            return None
        if progress.is_unheard:
            progress.notes["step"] = _UNHEARD
            return None
        going = Going(stepped, _known_as(progress, stepped, record.tools), record)
        if self._is_unavailable():
            self.unkept(progress, going)
            return None
        return going

    def gone(self, progress: CallState, going: Going) -> CallRecord:
        """Take over the step that was kept with the record; that record."""
        stepped, session, used = going.stepped, progress.session, going.used
        stepped.state, stepped.stray = used.state, used.stray
        if session is not None:
            self._tell(session, stepped.agent, going.at, used.state, going.tools)
        return going.record

    def unkept(self, progress: CallState, going: Going, error: StoreUnavailable | None = None) -> None:
        """Go on from the step that this call knows, as it could not be kept; `error`: why, None: the store is away.

        Where a session is in its steps is guidance, and no reason to refuse a call that may be made.
        """
        stepped = going.stepped
        stepped.state, stepped.stray = stepped.agent.used(stepped.state, going.tools, stepped.facts)
        progress.notes |= {"step": _why(error), **_stray_note(stepped.stray)}

    def _tell(
        self, session: SessionKey, agent: Agent, before: StepState, after: StepState, tools: Sequence[str]
    ) -> None:
        if self._listeners:
            tell_step(self._listeners, session, agent, (before, after), at=self._wall(), tools=tools)


class Going:
    """An `Ending`: the rules go on from what the store holds, by the tools that an answer calls.

    It may be applied more than once; `at` (the state before), `used` (what the tools made of it) and `record` are those
    of the last time.
    """

    def __init__(self, stepped: ActiveStep, tools: Sequence[str], record: CallRecord) -> None:
        self.stepped = stepped
        self.tools = tools
        self.at = _AT_START
        self.used = Used(_AT_START)
        self.record = self._plain = record

    def __call__(self, places: Places) -> tuple[Places, CallRecord]:
        """See `Ending`."""
        agent, plain = self.stepped.agent, self._plain
        at = self.at = places.get(agent.name, _AT_START)
        used = self.used = agent.used(at, self.tools, self.stepped.facts)
        self.record = replace(plain, notes={**plain.notes, **_stray_note(used.stray)}) if used.stray else plain
        return places if used.state == at else moved(places, agent.name, used.state), self.record


def _is_bound(family: TokenizerFamily, offer: ToolOffer, messages: bytes) -> bool:
    """Return whether the thinking of a request is bound to its list of tools."""
    return family.binding == "prefix" and (offer.thinks is not False or has_thinking(messages))


def _is_in(route: Route, refused: Route | None, lately: RecentModels) -> bool:
    """Whether a model refused something in this call, or lately."""
    return route == refused or route in lately


def _ever_callable(agent: Agent, offer: ToolOffer) -> frozenset[str]:
    """The tools of an offer that the agent may call in any of its steps."""
    return frozenset([tool.name for tool in offer.tools if agent.ever_allows(tool.name)])


def _note_limits(progress: CallState, stepped: ActiveStep, takes: RestrictionSupport) -> None:
    """Note for the call's record what of the step its provider could not be told, and why."""
    beyond, is_forced = progress.restricted.beyond, stepped.offer is not None and stepped.offer.mode == "required"
    reason = _BOUND if takes.listed is not None else _REFERRED
    for name, note in (
        ("step_tools", f"offered though not due or not allowed: {_list(beyond)}; {reason}" if beyond else None),
        ("step_required", _UNFORCED if stepped.must and not takes.forced and not is_forced else None),
    ):
        progress.notes.pop(name, None)  # what was noted for the route before
        if note is not None:
            progress.notes[name] = note


def _why(error: StoreUnavailable | None) -> str:
    return next((why for kind, why in _REASONS if isinstance(error, kind)), _UNAVAILABLE)


def _stray_note(stray: Sequence[str]) -> dict[str, str]:
    return {"stray_tools": ", ".join(stray[:_SHOWN])} if stray else {}


def _known_as(progress: CallState, stepped: ActiveStep, tools: Sequence[str]) -> Sequence[str]:
    """Tools that an answer calls by the names under which they were offered."""
    call, wire, offer = progress.call, progress.incoming.endpoint.wire, stepped.offer
    if offer is None and call is not None and wire is not None:
        with contextlib.suppress(InvalidRequest):
            offer = offer_of(call.fields, wire)
    if offer is None:
        return tools
    sets = progress.answer.sets if progress.answer is not None else ()
    if not any(sets) and all(map(offer.names.__contains__, tools)):
        return tools
    # `as_name`, since a client may give a set of tools any name.
    return [as_name(offer.known_as(tool, one_of)) for tool, one_of in zip_longest(tools, sets[: len(tools)])]


def _hold_to(stepped: ActiveStep, step: Step, due: Patterns | None, offer: ToolOffer, session: SessionKey) -> None:
    """Hold what a call offers to what the step allows now.

    Raises:
        ToolNotAllowed: that cannot be, or the step wants such calls refused.
    """
    keep, is_right = (_known_kept if offer.is_known else _kept)(step, due, offer)
    if not is_right:
        if offer.named is not None:
            raise ToolNotAllowed(_reason(stepped, step, f"forces {_list([offer.named])}", session), param="tool_choice")
        kept = frozenset(keep)
        outside = [name for name in offer.names if name not in kept]
        raise ToolNotAllowed(_reason(stepped, step, f"offers {_list(outside)}", session), param="tools")
    if step.enforce != "reject":
        stepped.offer, stepped.keep = offer, keep
        stepped.must = step.enforce == "require" and due is not None


def _kept(step: Step, due: Patterns | None, offer: ToolOffer) -> tuple[tuple[str, ...], bool]:
    """The tools of an offer that may be called, and whether a call with this offer may be made."""
    keep = step.callable(offer.names, due)
    has_outside = len(keep) < len(offer.names)
    is_none = step.allowed == () or _EVERYTHING in step.denied
    is_wrong = (not keep and not is_none) or (has_outside and (offer.named is not None or step.enforce == "reject"))
    return keep, not is_wrong


_known_kept = lru_cache(_KNOWN)(_kept)


def _reason(stepped: ActiveStep, step: Step, does: str, session: SessionKey) -> str:
    agent, state = stepped.agent, stepped.state
    due = agent.due(state)
    if due is not None:
        wanted = f"entry {state.index + 1} of {len(step.sequence)} of its sequence is due, {' or '.join(due)}"
    else:
        wanted = f"it allows {_list(step.allowed if step.allowed is not None else ('all tools',))}"
        wanted += f" but {_list(step.denied)}" if step.denied else ""
    whose = f', "agent": "{agent.name}"' if agent.name != DEFAULT_AGENT else ""
    return (
        f'Session "{session.id}" is in the step "{step.name}": {wanted}. The request {does}. '
        f'Offer what the step wants, or set another step: PATCH /api/sessions/{session.id} {{"active_step": …{whose}}}.'
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(name[:80] for name in names[:_SHOWN]) or "none") + more
