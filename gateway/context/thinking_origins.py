"""Remember who made the thinking blocks of a conversation, and stay with that provider while they are bound to it.

A provider drops thinking blocks that it cannot read, without an error, so the record of the call reports it. After a
fallback the conversation stays with the provider whose account made its newest blocks, as long as that one responds.
"""

from __future__ import annotations

from typing import Final

from gateway.call.state import CallState
from gateway.core.conversation.message import digest
from gateway.core.errors import StoreUnavailable
from gateway.core.ports import ReadBody, Sessions
from gateway.core.thinking_origin import ThinkingOrigin, ThinkingRules, followed, thinking_blocks, unread
from gateway.core.values import dataclass
from gateway.dialects.base import Call

_UNKEPT: Final = "origin not stored: the store is unavailable"


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The conversation of a call: its key in the session's state, its thinking blocks, and who made them."""

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
    def may_prefer(progress: CallState) -> bool:
        """Return whether `prefer` may change something: the session has thinking, and the call has several routes."""
        return bool(progress.remembered.state.thinking) and len(progress.routes) > 1

    def prefer(self, progress: CallState, call: Call) -> None:
        """Move the provider that made the newest thinking blocks to the front, if no other account can read them."""
        found = self._conversation(progress, call)
        if found is None or not found.blocks or not found.origins:
            return
        newest = found.origins[-1]
        rule = self._rules.of(newest.model)
        if rule is None or rule.account == "any":
            return
        makers = [route for route in progress.routes if route[:2] == newest[:2]]
        progress.routes = (*makers, *(route for route in progress.routes if route not in makers))
        progress.route = progress.routes[0]

    async def answered(self, progress: CallState, call: Call) -> None:
        """Note what the target could not read of the conversation, and that it makes the blocks from now on."""
        session = progress.session
        if progress.incoming.endpoint.wire != "messages":
            return
        found = await self._read_body(len(call.body), lambda: self._conversation(progress, call))
        if found is None or session is None:
            return
        route, home, origins = progress.route, progress.home, found.origins
        if found.blocks and not origins:
            # No origin is stored. Assume that the configured first route made these blocks.
            origins = (ThinkingOrigin(home.provider, home.model, 0),)
        progress.unread_thinking = unread(origins, found.blocks, route.provider, route.model, self._rules)
        after = followed(origins, found.blocks, route.provider, route.model)
        may_have_thinking = found.blocks or "thinking" in call.fields or route is not home
        if after == found.origins or not may_have_thinking or progress.book.is_blind:
            return
        try:
            await self._store.update(session, lambda state: state.with_thinking(found.key, after))
        except StoreUnavailable:
            progress.notes["thinking"] = _UNKEPT

    def _conversation(self, progress: CallState, call: Call) -> _Conversation | None:
        """Return the conversation of a call, or None if no rule for thinking blocks applies to it."""
        endpoint = progress.incoming.endpoint
        if endpoint.wire != "messages" or not endpoint.metered or "messages" not in call.fields:
            return None
        if not any(self._rules.of(route.model) for route in progress.routes):
            return None
        parts = progress.dialect.opening(call)
        if parts is None:
            return None
        key = digest("\0".join(parts).encode("utf-8", "surrogatepass")).hex()
        blocks = thinking_blocks(bytes(call.fields["messages"]))
        return _Conversation(key, blocks, progress.remembered.state.thinking.get(key, ()))
