"""Check that a trimmed request is valid and still the same conversation.

Errors that the client's messages had already are not reported. All checks use the bytes that would be sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.conversation.message import (
    RESULT_ROLES,
    SYSTEM_ROLES,
    MessageOutline,
    is_one_text,
    parse_bytes,
    without_cache_marks,
)
from gateway.core.conversation.units import Conversation, Item
from gateway.core.trimming.reader import GAP_MARK

#: text by which a result refers to another result
_REFERENCE: Final = re.compile(r"\[(?:same as|\d+ (?:items?|paragraphs?) as in) the result of ([^\]]*)\]")


def problems(
    before: Conversation, after: Conversation, tokens: int, limit: int, summary: tuple[int, bytes] | None = None
) -> list[str]:
    """Return why `after` must not be sent instead of `before`; empty if it may. `tokens`: the tokens of `after`.

    `summary`: the place in `after`, and the bytes, of the one message that `before` does not have.
    """
    found = list(_request_errors(after.outlines))
    if found:
        known = set(_request_errors(before.outlines))
        found = [fault for fault in found if fault not in known]
    found.extend(_lost_thinking(before, after))
    if summary is not None:
        found.extend(_misplaced(after, *summary))
        after = _without(after, summary[0])
    found.extend(_missing_pinned(before, after))
    found.extend(_never_made(before, after))
    found.extend(_unknown_messages(before, after))
    found.extend(_broken_references(before, after))
    found.extend(_split_groups(before, after))
    if tokens > limit:
        found.append(f"{tokens} tokens are over the limit of {limit}")
    return found


def _request_errors(messages: Sequence[MessageOutline]) -> Iterator[str]:
    """Yield errors for which a provider would refuse the request."""
    if not messages:
        yield "no messages"
    yield from _broken_calls(messages)
    spoken = [message.role for message in messages if message.role not in SYSTEM_ROLES]
    if "user" not in spoken:
        yield "no user message"
    elif spoken[0] != "user":
        yield "the first message is not a user's"
    for message in messages:
        yield from message.faults


def _lost_thinking(before: Conversation, after: Conversation) -> Iterator[str]:
    """Yield an error if the last turn lost the thinking at its start: Anthropic refuses such a request."""
    if _begins_with_thinking(before) and not _begins_with_thinking(after):
        yield "the last turn does not begin with its thinking"


def _begins_with_thinking(conversation: Conversation) -> bool:
    return any(conversation.outlines[index].thinks for index in conversation.last_turn[:1])


def _broken_calls(messages: Sequence[MessageOutline]) -> Iterator[str]:
    waiting: Counter[str] = Counter()
    seen: set[str] = set()
    for message in messages:
        if message.role in RESULT_ROLES:
            call_id = str(message.result_of)
            if waiting[call_id] > 0:
                waiting[call_id] -= 1
            else:
                yield f"result of {call_id} without its call"
            continue
        yield from _calls_without_result(waiting)
        waiting = Counter(message.calls)
        yield from (f"call {again} twice" for again in message.calls if again in seen)
        seen.update(message.calls)
    yield from _calls_without_result(waiting)


def _calls_without_result(waiting: Mapping[str, int]) -> Iterator[str]:
    return (f"call {open_id} without its result" for open_id, count in waiting.items() if count > 0)


def _misplaced(after: Conversation, place: int, raw: bytes) -> Iterator[str]:
    """Yield errors of a summary: it must be plain text of the assistant, after the task."""
    if not 0 <= place < len(after.messages) or after.messages[place] != raw:
        yield "the summary is not where it should be"
        return
    summary, _ = parse_bytes(raw)
    if set(summary) != {"role", "content"} or summary["role"] != "assistant" or not isinstance(summary["content"], str):
        yield "the summary is more than a text of the assistant's"
    if all(message.role != "user" for message in after.outlines[:place]):
        yield "the summary precedes the task"


def _without(after: Conversation, place: int) -> Conversation:
    messages, keys = list(after.messages), list(after.keys)
    del messages[place : place + 1], keys[place : place + 1]
    return Conversation(tuple(messages), tuple(keys), frozenset(), parser=after.parser)


def _unknown_messages(before: Conversation, after: Conversation) -> Iterator[str]:
    """Yield an error if there is a message that the client did not send.

    A trimmed message still has its role and its calls; results are checked by `_broken_calls`. A sealed message can
    only be replaced by a gap mark.
    """
    original = iter(before.items)
    for one, key, raw in zip(after.outlines, after.keys, after.messages, strict=True):
        if one.role not in RESULT_ROLES and not any(_may_become(item, one, key, raw) for item in original):
            yield f"a message ({one.role}) that the client did not send"
            return


def _may_become(item: Item, now: MessageOutline, key: bytes, raw: bytes) -> bool:
    if (item.role, item.calls) != (now.role, now.calls):
        return False
    return not item.sealed or item.key == key or raw == GAP_MARK


def _missing_pinned(before: Conversation, after: Conversation) -> Iterator[str]:
    """Yield errors of messages that must stay unchanged and in order."""
    items = before.items
    position = 0
    for item in items:
        if not item.pinned:
            continue
        found = _position(before, after, item, position)
        if found is None:
            yield f"messages[{item.index}] ({item.role}) was changed, moved or lost"
        else:
            position = found + 1
    if items and after.outlines and after.outlines[-1].role != items[-1].role:
        yield "the last message has another role"


def _position(before: Conversation, after: Conversation, item: Item, start: int) -> int | None:
    """Return the place of an unchanged message; a user message or result may have text added at its end."""
    places = range(start, len(after.keys))
    same = next((index for index in places if after.keys[index] == item.key), None)
    if same is not None or item.role not in RESULT_ROLES | {"user"}:
        return same
    raw = before.messages[item.index]
    alike = (i for i in places if after.outlines[i].role == item.role and after.outlines[i].result_of == item.result_of)
    return next((index for index in alike if _continues(raw, after.messages[index])), None)


def _continues(before: bytes, after: bytes) -> bool:
    """Return whether a message still has all its content, perhaps with more after it."""
    was, now = parse_bytes(before)[0], parse_bytes(after)[0]
    old, new = was.pop("content", None), now.pop("content", None)
    return was == now and _is_prefix(old, new)


def _is_prefix(old: Any, new: Any) -> bool:
    if isinstance(old, str) and isinstance(new, str):
        return new.startswith(old)
    if not isinstance(old, list) or not isinstance(new, list):
        return False
    if len(old) == len(new) == 1 and is_one_text(old) and is_one_text(new):
        return {**new[0], "text": old[0]["text"]} == old[0] and str(new[0]["text"]).startswith(old[0]["text"])
    return new[: len(old)] == old


def _never_made(before: Conversation, after: Conversation) -> Iterator[str]:
    """Yield errors of calls that were never made, and of sealed messages that were changed."""
    unchanged_keys = set(before.keys)
    names = {pair for message in before.outlines for pair in message.names}
    for message, key in zip(after.outlines, after.keys, strict=True):
        if key in unchanged_keys:
            continue
        yield from (f"call {pair[0]} was never made" for pair in message.names if pair not in names)
        if message.sealed and message.role == "assistant":
            yield "signed reasoning was changed"


def _broken_references(before: Conversation, after: Conversation) -> Iterator[str]:
    """Yield errors of results that refer to a result which is not sent before them, or not whole."""
    unchanged_keys = set(before.keys)
    changed = [
        (place, message.result_of, raw)
        for place, (message, key, raw) in enumerate(zip(after.outlines, after.keys, after.messages, strict=True))
        if message.role in RESULT_ROLES and key not in unchanged_keys and b" the result of " in raw
    ]
    original, sent = (_results(before), _results(after)) if changed else ({}, {})
    for place, call, raw in changed:
        # The same text in the tool's own output is not a reference.
        own_text = "".join(_text(one) for _, one in original.get(call, ()))
        for found in _REFERENCE.finditer(_text(raw)):
            now = [one for at, one in sent.get(found[1], ()) if at < place]
            if found[0] not in own_text and not _is_whole([one for _, one in original.get(found[1], ())], now):
                yield f"{found[0]} refers to a result that is not sent whole"


def _split_groups(before: Conversation, after: Conversation) -> Iterator[str]:
    """Yield errors of sealed messages that belong together and of which only some are sent unchanged.

    Other messages that belong together, such as words next to results, may be trimmed. They are checked in their own
    format.
    """
    if not before.following:
        return
    sent = set(after.keys)
    for run in before.runs:
        is_sealed = all(before.outlines[start].sealed for start, _ in run)
        if is_sealed and len({before.keys[start] in sent for start, _ in run}) > 1:
            yield f"messages[{run[0][0]}] without the sealed messages that belong to it"


def _is_whole(original: Sequence[bytes], sent: Sequence[bytes]) -> bool:
    """Return whether one of these results is sent whole, perhaps with more after it."""
    return any(
        without_cache_marks(was) == without_cache_marks(now) or _continues(was, now) for was in original for now in sent
    )


def _results(conversation: Conversation) -> Mapping[str | None, Sequence[tuple[int, bytes]]]:
    """Return the results and their places, by the call that they answer."""
    found: dict[str | None, list[tuple[int, bytes]]] = {}
    for place, (message, raw) in enumerate(zip(conversation.outlines, conversation.messages, strict=True)):
        if message.role in RESULT_ROLES:
            found.setdefault(message.result_of, []).append((place, raw))
    return found


def _text(raw: bytes) -> str:
    """Return the text of a result."""
    message = parse_bytes(raw)[0]
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [content]
    return "\n".join(str(part.get("text") if isinstance(part, dict) else part) for part in parts)
