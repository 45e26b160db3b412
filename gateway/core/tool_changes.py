"""Withdraw tools inside a conversation, and offer them again, by system messages.

Claude models that bind thinking to its prefix bind it to the list of tools as well, so a step cannot shorten that list.
These models accept system messages that change which tools are offered from their place on. The client does not know
these messages. The gateway repeats each of them at the same place in every later request of the conversation.
(https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import encode, parse_bytes
from gateway.core.thinking import BoundConversation
from gateway.core.views.read_messages import OFFER, WITHDRAW

#: Changes that a session remembers, over all of its conversations. With more, the older half is forgotten: thinking
#: after the first of them is then removed, once for many changes.
MAX_CHANGES: Final = 256
#: Characters of all tool names in the changes of a session. With more, the older half is forgotten as well.
MAX_NAMES: Final = 64 * 1024
#: Characters of the tool names in one change. A longer one is not made.
MAX_CHANGE_NAMES: Final = MAX_NAMES // 4


class ToolChange(NamedTuple):
    """A system message that the gateway adds after the first `size` positions of a conversation.

    Attributes:
        size: see `gateway.core.thinking` for positions.
        received: hash of these positions as the client sent them, without thinking.
        withdrawn: names of tools that are not offered from here on.
        offered: names of withdrawn tools that are offered again from here on.
    """

    size: int
    received: str
    withdrawn: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()

    @property
    def characters(self) -> int:
        """Return the number of characters of all names."""
        return sum(map(len, (*self.withdrawn, *self.offered)))

    def message(self, tools: Collection[str]) -> bytes | None:
        """Return the system message, or None if it would be empty.

        `tools`: the names that the request lists. The provider refuses a change that names another tool.
        """
        named = ((WITHDRAW, self.withdrawn), (OFFER, self.offered))
        blocks = [_block(kind, name) for kind, names in named for name in names if name in tools]
        return encode({"role": "system", "content": blocks}) if blocks else None


def _block(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


def withdrawn_after(changes: Iterable[ToolChange], at_start: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the names of the tools that are withdrawn after these changes."""
    names = at_start
    for change in changes:
        names = (names - {*change.offered}) | {*change.withdrawn}
    return names


def changes_of(conversation: BoundConversation, remembered: Iterable[ToolChange]) -> tuple[ToolChange, ...]:
    """Return the remembered changes that belong to this conversation and whose place is still valid, in order."""
    sizes = {change.size for change in remembered}
    hashes = conversation.hashes_at(sizes)
    return tuple(
        change
        for change in sorted(remembered, key=lambda change: change.size)
        if hashes.get(change.size) == change.received and may_be_inserted_at(conversation, change.size)
    )


def with_wanted(
    changes: Sequence[ToolChange], wanted: frozenset[str], conversation: BoundConversation, at_start: frozenset[str]
) -> tuple[ToolChange, ...]:
    """Return the changes of a conversation, with one at its end that leaves these tools withdrawn.

    A change that an earlier try of the same request made is replaced. A change with too many names is not made.

    Args:
        changes: see `changes_of`.
        wanted: the tools to be withdrawn.
        conversation: the messages of the client.
        at_start: tools that were withdrawn before the first change.
    """
    size = conversation.size
    before = tuple(change for change in changes if change.size < size)
    withdrawn = withdrawn_after(before, at_start)
    if wanted == withdrawn and len(before) == len(changes):
        return before
    received = conversation.hashes_at((size,))[size]
    change = ToolChange(size, received, tuple(sorted(wanted - withdrawn)), tuple(sorted(withdrawn - wanted)))
    return (*before, change) if change.characters <= MAX_CHANGE_NAMES else tuple(changes)


def may_be_inserted_at(conversation: BoundConversation, size: int) -> bool:
    """Return whether a change may be inserted here: after a user message, and before an assistant message or the end.

    System messages next to this place are ignored, because the provider reads them together with the change.
    """
    messages, place = conversation.messages, conversation.index_of(size)
    before = next((role for raw in reversed(messages[:place]) if (role := _role(raw)) != "system"), "")
    after = next((role for raw in messages[place:] if (role := _role(raw)) != "system"), "assistant")
    return before == "user" and after == "assistant"


def inserted(
    conversation: BoundConversation, changes: Iterable[ToolChange], tools: Collection[str]
) -> Mapping[int, Sequence[bytes]]:
    """Return the system messages of these changes by the index of the message that each of them precedes."""
    messages: dict[int, list[bytes]] = {}
    for change in changes:
        message = change.message(tools)
        if message is not None:
            messages.setdefault(conversation.index_of(change.size), []).append(message)
    return messages


def remember_change(changes: Sequence[ToolChange], change: ToolChange) -> tuple[ToolChange, ...]:
    """Return the changes of a session with one more, which replaces another one at the same place.

    The older half is dropped when they exceed `MAX_CHANGES` or `MAX_NAMES`.
    """
    kept = [*(earlier for earlier in changes if earlier[:2] != change[:2]), change]
    while len(kept) > MAX_CHANGES or sum(earlier.characters for earlier in kept) > MAX_NAMES:
        kept = kept[(len(kept) + 1) // 2 :]
    return tuple(kept)


def _role(raw: bytes) -> str:
    message, _ = parse_bytes(raw)
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else ""
