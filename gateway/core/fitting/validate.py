"""Check that a trimmed request is valid and still the same conversation.

What was wrong with the messages as the client sent them is not held against the result. Everything is read off the
bytes that would be sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.conversation.message import RESULT_ROLES, SYSTEM_ROLES, MessageOutline, is_one_text, plain, read
from gateway.core.conversation.units import Conversation, Item
from gateway.core.fitting.reader import GAP_MARK

#: words that stand for what another result says
_POINTS: Final = re.compile(r"\[(?:same as|\d+ (?:items?|paragraphs?) as in) the result of ([^\]]*)\]")


def problems(
    before: Conversation, after: Conversation, tokens: int, limit: int, summary: tuple[int, bytes] | None = None
) -> list[str]:
    """Why `after`, which weighs `tokens`, must not be sent in the place of `before`; empty if it may.

    `summary`: the place in `after` of the one message that `before` does not have, and its bytes.
    """
    found = list(_faults(after.outlines))
    if found:
        known = set(_faults(before.outlines))
        found = [fault for fault in found if fault not in known]
    found.extend(_thoughtless(before, after))
    if summary is not None:
        found.extend(_misplaced(after, *summary))
        after = _without(after, summary[0])
    found.extend(_orphaned(before, after))
    found.extend(_strangers(before, after))
    found.extend(_invented(before, after))
    found.extend(_pointless(before, after))
    found.extend(_parted(before, after))
    if tokens > limit:
        found.append(f"{tokens} tokens are over the limit of {limit}")
    return found


def _faults(messages: Sequence[MessageOutline]) -> Iterator[str]:
    """What a provider would refuse."""
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


def _thoughtless(before: Conversation, after: Conversation) -> Iterator[str]:
    """Claude's last turn begins with its thinking, if it did so: Anthropic refuses what does not."""
    if _begins_with_thinking(before) and not _begins_with_thinking(after):
        yield "the last turn does not begin with its thinking"


def _begins_with_thinking(conversation: Conversation) -> bool:
    return any(conversation.outlines[index].thinks for index in conversation.last_turn[:1])


def _broken_calls(messages: Sequence[MessageOutline]) -> Iterator[str]:
    waiting: Counter[str] = Counter()
    seen: set[str] = set()
    for message in messages:
        if message.role in RESULT_ROLES:
            answered = str(message.answers)
            if waiting[answered] > 0:
                waiting[answered] -= 1
            else:
                yield f"result of {answered} without its call"
            continue
        yield from _unanswered(waiting)
        waiting = Counter(message.calls)
        yield from (f"call {again} twice" for again in message.calls if again in seen)
        seen.update(message.calls)
    yield from _unanswered(waiting)


def _unanswered(waiting: Mapping[str, int]) -> Iterator[str]:
    return (f"call {open_id} without its result" for open_id, count in waiting.items() if count > 0)


def _misplaced(after: Conversation, place: int, raw: bytes) -> Iterator[str]:
    """A summary is told by the assistant, behind the task, and is nothing but text."""
    if not 0 <= place < len(after.messages) or after.messages[place] != raw:
        yield "the summary is not where it should be"
        return
    told, _ = read(raw)
    if set(told) != {"role", "content"} or told["role"] != "assistant" or not isinstance(told["content"], str):
        yield "the summary is more than a text of the assistant's"
    if all(message.role != "user" for message in after.outlines[:place]):
        yield "the summary stands before the task"


def _without(after: Conversation, place: int) -> Conversation:
    messages, keys = list(after.messages), list(after.keys)
    del messages[place : place + 1], keys[place : place + 1]
    return Conversation(tuple(messages), tuple(keys), frozenset(), book=after.book)


def _invented(before: Conversation, after: Conversation) -> Iterator[str]:
    """Messages that nobody sent. What was cut still has its role and its calls; results were looked at already.

    In the place of a sealed one there stands nothing but a mark.
    """
    original = iter(before.items)
    for one, key, raw in zip(after.outlines, after.keys, after.messages, strict=True):
        if one.role not in RESULT_ROLES and not any(_may_become(item, one, key, raw) for item in original):
            yield f"a message ({one.role}) that never came"
            return


def _may_become(item: Item, now: MessageOutline, key: bytes, raw: bytes) -> bool:
    if (item.role, item.calls) != (now.role, now.calls):
        return False
    return not item.sealed or item.key == key or raw == GAP_MARK


def _orphaned(before: Conversation, after: Conversation) -> Iterator[str]:
    """What must be there as it was, and in the order it was."""
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
        yield "it does not end as it ended"


def _position(before: Conversation, after: Conversation, item: Item, start: int) -> int | None:
    """Where a message stands as it was; behind the words of a user or a tool there may be more."""
    places = range(start, len(after.keys))
    same = next((index for index in places if after.keys[index] == item.key), None)
    if same is not None or item.role not in RESULT_ROLES | {"user"}:
        return same
    raw = before.messages[item.index]
    alike = (i for i in places if after.outlines[i].role == item.role and after.outlines[i].answers == item.answers)
    return next((index for index in alike if _continues(raw, after.messages[index])), None)


def _continues(before: bytes, after: bytes) -> bool:
    """Whether a message says all that it said, and perhaps something more behind it."""
    was, now = read(before)[0], read(after)[0]
    old, new = was.pop("content", None), now.pop("content", None)
    return was == now and _begins(old, new)


def _begins(old: Any, new: Any) -> bool:
    if isinstance(old, str) and isinstance(new, str):
        return new.startswith(old)
    if not isinstance(old, list) or not isinstance(new, list):
        return False
    if len(old) == len(new) == 1 and is_one_text(old) and is_one_text(new):
        return {**new[0], "text": old[0]["text"]} == old[0] and str(new[0]["text"]).startswith(old[0]["text"])
    return new[: len(old)] == old


def _strangers(before: Conversation, after: Conversation) -> Iterator[str]:
    """Calls that were never made, and sealed messages that are not as they were."""
    as_they_were = set(before.keys)
    names = {pair for message in before.outlines for pair in message.names}
    for message, key in zip(after.outlines, after.keys, strict=True):
        if key in as_they_were:
            continue
        yield from (f"call {pair[0]} was never made" for pair in message.names if pair not in names)
        if message.sealed and message.role == "assistant":
            yield "signed reasoning was changed"


def _pointless(before: Conversation, after: Conversation) -> Iterator[str]:
    """Results that point at one which is not sent before them, or not whole."""
    as_they_were = set(before.keys)
    changed = [
        (place, message.answers, raw)
        for place, (message, key, raw) in enumerate(zip(after.outlines, after.keys, after.messages, strict=True))
        if message.role in RESULT_ROLES and key not in as_they_were and b" the result of " in raw
    ]
    original, sent = (_results(before), _results(after)) if changed else ({}, {})
    for place, call, raw in changed:
        # What a tool says of itself is no such word.
        said = "".join(_text(one) for _, one in original.get(call, ()))
        for found in _POINTS.finditer(_text(raw)):
            now = [one for at, one in sent.get(found[1], ()) if at < place]
            if found[0] not in said and not _is_whole([one for _, one in original.get(found[1], ())], now):
                yield f"{found[0]} is not true"


def _parted(before: Conversation, after: Conversation) -> Iterator[str]:
    """Sealed messages that go together, which are sent as they came or not at all: of these only some are.

    What else goes together (words beside results) may be cut, and is looked at in its own format.
    """
    if not before.following:
        return
    sent = set(after.keys)
    for run in before.runs:
        is_sealed = all(before.outlines[start].sealed for start, _ in run)
        if is_sealed and len({before.keys[start] in sent for start, _ in run}) > 1:
            yield f"messages[{run[0][0]}] without all that came of the same"


def _is_whole(original: Sequence[bytes], sent: Sequence[bytes]) -> bool:
    """Whether one of these results is sent as it came, perhaps with more behind it."""
    return any(plain(was) == plain(now) or _continues(was, now) for was in original for now in sent)


def _results(conversation: Conversation) -> Mapping[str | None, Sequence[tuple[int, bytes]]]:
    """Results and where they stand, by the call that they answer."""
    found: dict[str | None, list[tuple[int, bytes]]] = {}
    for place, (message, raw) in enumerate(zip(conversation.outlines, conversation.messages, strict=True)):
        if message.role in RESULT_ROLES:
            found.setdefault(message.answers, []).append((place, raw))
    return found


def _text(raw: bytes) -> str:
    """The text of a result."""
    message = read(raw)[0]
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [content]
    return "\n".join(str(part.get("text") if isinstance(part, dict) else part) for part in parts)
