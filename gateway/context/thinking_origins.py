"""Remember which model created the thinking blocks of a conversation, and prefer its provider while they need it.

A provider silently drops thinking blocks that it cannot read, so the record of the call reports them. After a fallback,
the conversation stays with the provider whose account created its newest blocks, as long as that provider responds.
"""

from __future__ import annotations

from typing import Final

from gateway.call.state import CallState
from gateway.core.conversation.message import digest
from gateway.core.errors import StoreUnavailable
from gateway.core.ports import ReadBody, Sessions
from gateway.core.routing import Route
from gateway.core.thinking_origin import ThinkingOrigin, ThinkingRules, followed, thinking_blocks, unread
from gateway.core.values import dataclass
from gateway.dialects.base import Call

_NOT_STORED: Final = "origin not stored: the store is unavailable"


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation: its key in the session's state, its number of thinking blocks, and their origins."""

    key: str
    blocks: int
    origins: tuple[ThinkingOrigin, ...]


class ThinkingOrigins:
    """Keeps the origin of thinking blocks with the session. `rules`: which models read whose thinking blocks."""

    def __init__(self, store: Sessions, read_body: ReadBody, rules: ThinkingRules) -> None:
        self._store = store
        self._read_body = read_body
        self._rules = rules

    @staticmethod
    def may_prefer(state: CallState) -> bool:
        """Return whether `preferred` may change something: there is thinking in the session, and a choice of routes."""
        return bool(state.context.remembered.state.thinking) and len(state.routing.routes) > 1

    def preferred(self, state: CallState, call: Call) -> tuple[Route, ...]:
        """Return the routes; those that created the newest thinking first, if no other account can read it."""
        routes, conversation = state.routing.routes, self._conversation(state, call)
        if conversation is None or not conversation.blocks or not conversation.origins:
            return routes
        newest = conversation.origins[-1]
        rule = self._rules.of(newest.model)
        if rule is None or rule.account == "any":
            return routes
        makers = [route for route in routes if route[:2] == newest[:2]]
        return (*makers, *(route for route in routes if route not in makers))

    def is_readable(self, state: CallState, call: Call, route: Route) -> bool:
        """Return whether the model of a route certainly reads all thinking blocks of a request."""
        conversation = self._conversation(state, call)
        if conversation is None or not conversation.origins or self._rules.of(route.model) is None:
            return False
        return not unread(conversation.origins, conversation.blocks, route.provider, route.model, self._rules)

    async def note_origin(self, state: CallState, call: Call) -> None:
        """Note the thinking blocks that the responding model cannot read, and that new blocks come from this model."""
        session = state.session
        if state.incoming.endpoint.wire != "messages":
            return
        conversation = await self._read_body(len(call.body), lambda: self._conversation(state, call))
        if conversation is None or session is None:
            return
        route, home, origins = state.routing.route, state.routing.home, conversation.origins
        if conversation.blocks and not origins:
            # No origin is stored. Assume that the configured first route made these blocks.
            origins = (ThinkingOrigin(home.provider, home.model, 0),)
        state.context.unread_thinking = unread(origins, conversation.blocks, route.provider, route.model, self._rules)
        after = followed(origins, conversation.blocks, route.provider, route.model)
        may_have_thinking = conversation.blocks or "thinking" in call.fields or route is not home
        if after == conversation.origins or not may_have_thinking or state.stored_session is None:
            return
        try:
            await self._store.update(session, lambda kept: kept.with_thinking(conversation.key, after))
        except StoreUnavailable:
            state.notes["thinking"] = _NOT_STORED

    def _conversation(self, state: CallState, call: Call) -> _Conversation | None:
        """Return the conversation of a call, or None if no rule for thinking blocks applies to it."""
        endpoint = state.incoming.endpoint
        if endpoint.wire != "messages" or not endpoint.metered or "messages" not in call.fields:
            return None
        if not any(self._rules.of(route.model) for route in state.routing.routes):
            return None
        parts = state.dialect.opening(call)
        if parts is None:
            return None
        key = digest("\0".join(parts).encode("utf-8", "surrogatepass")).hex()
        blocks = thinking_blocks(bytes(call.fields["messages"]))
        return _Conversation(key, blocks, state.context.remembered.state.thinking.get(key, ()))
