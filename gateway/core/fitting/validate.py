"""The last check on a request that was changed: would a provider take it, and is it still the same conversation?

What was wrong with the messages as the client sent them is not held against the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from gateway.core.conversation import (
    RESULT_ROLES,
    SYSTEM_ROLES,
    Conversation,
    Message,
    answered_id,
    call_ids,
    key_of,
    text_parts,
)


def problems(before: Conversation, after: Sequence[Message], tokens: int, limit: int) -> list[str]:
    """Why `after`, which weighs `tokens`, must not be sent in the place of `before`; empty if it may."""
    found = list(_faults(after))
    if found:
        known = set(_faults(before.messages))
        found = [fault for fault in found if fault not in known]
    found.extend(_lost(before, after))
    if tokens > limit:
        found.append(f"{tokens} tokens are over the limit of {limit}")
    return found


def _faults(messages: Sequence[Message]) -> Iterator[str]:
    """What a provider would refuse."""
    if not messages:
        yield "no messages"
    yield from _broken_calls(messages)
    spoken = [message.get("role") for message in messages if message.get("role") not in SYSTEM_ROLES]
    if "user" not in spoken:
        yield "no user message"
    elif spoken[0] != "user":
        yield "the first message is not a user's"
    for message in messages:
        content = message.get("content")
        if content is None and message.get("role") != "assistant":
            yield f"a {message.get('role')} message without content"


def _broken_calls(messages: Sequence[Message]) -> Iterator[str]:
    waiting: list[str] = []
    seen: set[str] = set()
    for message in messages:
        if message.get("role") in RESULT_ROLES:
            answered = str(answered_id(message))
            if answered not in waiting:
                yield f"result of {answered} without its call"
            else:
                waiting.remove(answered)
            continue
        yield from (f"call {open_id} without its result" for open_id in waiting)
        waiting = list(call_ids(message))
        yield from (f"call {again} twice" for again in waiting if again in seen)
        seen.update(waiting)
        yield from _broken_arguments(message)
    yield from (f"call {open_id} without its result" for open_id in waiting)


def _broken_arguments(message: Message) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError, RecursionError):
            yield f"arguments of call {call.get('id')} are not JSON"


def _lost(before: Conversation, after: Sequence[Message]) -> Iterator[str]:
    """What must be there as it was, and in the order it was."""
    items = before.items
    last_user = max((item.index for item in items if item.role == "user"), default=None)
    position = 0
    for item in items:
        if item.index == last_user or (item.index == len(items) - 1 and item.role in RESULT_ROLES):
            found = _position(after, position, item.role, item.text, item.answers)
        elif item.pinned:
            found = _position_as_it_was(after, position, item.key, before.messages[item.index])
        else:
            continue
        if found is None:
            yield f"messages[{item.index}] ({item.role}) was changed, moved or lost"
        else:
            position = found + 1
    if items and after and after[-1].get("role") != items[-1].role:
        yield "it does not end as it ended"
    yield from _strangers(before, after)


def _position(after: Sequence[Message], start: int, role: str, text: str, answers: str | None) -> int | None:
    """Where a message stands that says `text`, perhaps with more behind it."""
    for index in range(start, len(after)):
        message = after[index]
        is_it = message.get("role") == role and answered_id(message) == answers
        if is_it and text_parts(message.get("content")).startswith(text):
            return index
    return None


def _position_as_it_was(after: Sequence[Message], start: int, key: str, raw: Message) -> int | None:
    places = range(start, len(after))
    same = next((index for index in places if after[index] is raw), None)
    return same if same is not None else next((index for index in places if key_of(after[index]) == key), None)


def _strangers(before: Conversation, after: Sequence[Message]) -> Iterator[str]:
    """Calls that were never made, and sealed messages that are not as they were."""
    as_they_were = {id(message) for message in before.messages}
    changed = [message for message in after if id(message) not in as_they_were]
    names = {pair for message in before.messages for pair in _names(message)}
    sealed = {item.key for item in before.items if item.sealed}
    for now in Conversation.of(changed).items:
        yield from (f"call {pair[0]} was never made" for pair in _names(changed[now.index]) if pair not in names)
        if now.sealed and now.role == "assistant" and now.key not in sealed:
            yield "signed reasoning was changed"


def _names(message: Message) -> Iterator[tuple[str, str]]:
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield str(call.get("id")), str((call.get("function") or {}).get("name"))
