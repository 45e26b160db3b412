"""Choose the response mode of tool results that the model has not read yet: complete while they fit.

A budget must not hide what the model has just asked for. So a result after the model's last reply is shown as a table
at most. If it does not fit, its extract is chosen by the question, with the rules that trim a conversation. A mode that
the client asks for applies to these results as well.

A session remembers how such results were shown (`UnreadForm`). They keep this form once the model has read them, so
that the provider's prompt cache and bound thinking stay valid.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import RESULT_ROLES, Message, encode, outline_of, parse_bytes, text_parts
from gateway.core.conversation.units import Conversation
from gateway.core.modes import SHORTEST, ResponseMode, extractable_text, milder, show, stricter
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.draft import KEEP, Decision, Draft
from gateway.core.trimming.reader import Reader
from gateway.core.trimming.relevance import RelevanceFactors, last_words, rarity
from gateway.core.trimming.select import condense
from gateway.core.views.view import View, parsed_elements

#: Tokens of the line with the handle that is added to an extract.
_HANDLE_LINE_TOKENS: Final = 60
#: Tokens of the smallest useful extract. With less room, only the line with the handle is shown.
_MIN_EXTRACT_TOKENS: Final = 64
#: Share of the room that an extract is chosen for. The rest covers the difference between estimated and exact tokens.
_ROOM_SHARE: Final = 0.95
#: Share of the room for the blocks that answer the question and those around them.
_AROUND_SHARE: Final = 0.5
#: A block that answers at least this share of what the best one does has blocks around it as well.
_MIN_ANSWER_SHARE: Final = 0.5
#: These are taken with a block that answers the question, in this order: more after it than before it, as in a
#: definition with its body.
_OFFSETS: Final = (0, 1, -1, 2, 3, -2, *range(4, 17))
#: Characters of a question at each end of a longer text.
_QUESTION_CHARS: Final = 2_000
#: Characters of the arguments of one call that are part of the question.
_ARGUMENT_CHARS: Final = 500
#: Text that Claude Code adds to tool results. It is not part of the user's question.
_REMINDER: Final = "<system-reminder>"
_NAME_BYTES: Final = 8


class ResponseModes(NamedTuple):
    """The response modes of one call: of results that the model has read, and of those that it has not."""

    read: ResponseMode
    unread: ResponseMode


class ModeTry(NamedTuple):
    """One way to show the tool results of a call.

    `all_results`: change also results that keep an earlier form for the cache or for thinking; `may_extract`: shorten
    unread results if the session's budget has no room for them.
    """

    modes: ResponseModes
    all_results: bool = False
    may_extract: bool = False


class UnreadForm(NamedTuple):
    """How a result was shown before the model read it.

    `mode`: the mode of read results at that time; `blocks`: the blocks of its extract, or None if it was complete.
    """

    mode: ResponseMode
    blocks: tuple[int, ...] | None = None


class ConversationResults(NamedTuple):
    """The tool results of a conversation.

    `names`: a hash of each message that is a result, by index; `unread`: those after the model's last reply.
    """

    names: Mapping[int, str]
    unread: frozenset[int]


def modes_for(asked: ResponseMode, automatic: ResponseMode) -> ResponseModes:
    """Return the modes of a call. `asked`: by the client; `automatic`: what the budget leaves room for."""
    return ResponseModes(stricter(asked, automatic), stricter(asked, milder(automatic, "table")))


def tries_for(modes: ResponseModes, *, is_bound: bool) -> tuple[ModeTry, ...]:
    """Return the ways to show tool results, in order: each next one is tried if the budget has no room for the last.

    `is_bound`: the model binds its thinking to earlier results, so that changing them comes later.
    """
    shorter = ResponseModes("handle_only", stricter(modes.unread, "table"))
    tries = [ModeTry(modes)]
    if is_bound:
        tries.append(ModeTry(modes, all_results=True))
    tries.append(ModeTry(shorter, all_results=True, may_extract=shorter.unread == "table"))
    if shorter.unread != "handle_only":
        tries.append(ModeTry(ResponseModes("handle_only", "handle_only"), all_results=True))
    return tuple(tries)


def after_last_reply(messages: Sequence[bytes]) -> int:
    """Return the index after the model's last message or item, 0 if there is none. `messages`: in any format."""
    after = (place for place in reversed(range(len(messages))) if _is_from_model(parse_bytes(messages[place])[0]))
    return next(after, -1) + 1


def _is_from_model(message: object) -> bool:
    """Return whether the model wrote this message or item."""
    if not isinstance(message, dict):
        return False
    return message.get("role") == "assistant" or str(message.get("type")).endswith(("_call", "reasoning"))


def results_in(view: View) -> ConversationResults:
    """Return the tool results of a conversation, and which of them the model has not read yet."""
    names = parsed_elements("result name", view.chat, view.cache, _name, len, marks=False)
    first = after_last_reply(view.elements)
    found = {index: name for index, name in enumerate(names) if name}
    return ConversationResults(found, frozenset(index for index in found if view.places[index][0] >= first))


def _name(raw: bytes) -> str:
    """Return a hash of a tool result, the same with and without cache marks; empty for other and short messages."""
    if len(raw) <= SHORTEST:
        return ""
    found = outline_of(raw)
    return found.identity[:_NAME_BYTES].hex() if found.role in RESULT_ROLES else ""


def tokens_complete(results: Sequence[bytes], reader: Reader) -> int:
    """Return the tokens of results that are shown complete, as tables."""
    shown = [show(raw, "table", str) for raw in results]
    raws = [raw if one is None else one.raw for raw, one in zip(results, shown, strict=True)]
    return sum(reader.token_counts(Conversation.of(raws, reader)))


def chosen_blocks(
    messages: Sequence[bytes], results: Sequence[int], room: int, reader: Reader, expired: Callable[[], bool]
) -> Mapping[int, tuple[int, ...]]:
    """Return the blocks of each result that answer the question best, by index.

    Without blocks, only the handle of a result is shown. A result that is not in the mapping fits unchanged.

    Args:
        messages: the conversation, as chat messages.
        results: the indices of the results to shorten.
        room: tokens for all of them together.
        reader: counts tokens.
        expired: see `Deadline`.

    Raises:
        DeadlinePassed: choosing took too long.
    """
    texts = {index: text for index in results if (text := extractable_text(messages[index])) is not None}
    room = int(room * _ROOM_SHARE) - _HANDLE_LINE_TOKENS * len(texts)
    if room < _MIN_EXTRACT_TOKENS:
        return dict.fromkeys(texts, ())
    calls = _calls(messages)
    asked = [calls.get(outline_of(messages[index]).result_of, ("", "")) for index in texts]
    query: list[Message] = []
    for number, (text, (name, _)) in enumerate(zip(texts.values(), asked, strict=True)):
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        query.append({"role": "assistant", "content": None, "tool_calls": [call]})
        query.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
    query.append({"role": "user", "content": "\n".join([_question(messages), *(arguments for _, arguments in asked)])})
    draft = Draft.untouched(Conversation.of_messages(query, reader), reader, deadline=Deadline(expired))
    overhead = sum(count for index, count in enumerate(draft.token_counts()) if query[index]["role"] != "tool")
    places = dict(zip(range(1, len(query), 2), texts, strict=False))
    around = _around(draft, [*places], _AROUND_SHARE * room)
    decisions = condense(draft, room - round(around.tokens) + overhead, RelevanceFactors()).decisions
    return {
        index: _picked(draft, place, decisions[place], around.blocks[place])
        for place, index in places.items()
        if decisions[place] != KEEP
    }


class _Around(NamedTuple):
    """Numbers of blocks by message, and their estimated tokens."""

    blocks: Mapping[int, set[int]]
    tokens: float


def _around(draft: Draft, results: Sequence[int], room: float) -> _Around:
    """Return the blocks that answer the question best and the blocks around them, such as the body of a function.

    The rules that trim a conversation take single blocks, because the model has read the other blocks before. Here the
    model has not read the result yet.
    """
    question_terms, known = last_words(draft), {index: draft.known(index) for index in results}
    places = [(index, number) for index, one in known.items() for number in range(len(one.terms))]
    asked = {place: question_terms.keys() & {*known[place[0]].terms[place[1]]} for place in places}
    term_counts = Counter(term for terms in asked.values() for term in terms)
    scores = {
        place: sum(rarity(question_terms[term], len(places), term_counts[term]) for term in terms)
        for place, terms in asked.items()
        if terms
    }
    best, taken = max(scores.values(), default=0.0), {index: set[int]() for index in results}
    left = room
    for index, number in sorted(scores, key=lambda place: -scores[place]):
        if scores[index, number] < _MIN_ANSWER_SHARE * best:
            break
        for neighbour in (number + step for step in _OFFSETS):
            if neighbour in taken[index] or not 0 <= neighbour < len(known[index].terms):
                continue
            if known[index].costs[neighbour] > left:
                break
            left -= known[index].costs[neighbour]
            taken[index].add(neighbour)
    return _Around(taken, room - left)


def _picked(draft: Draft, place: int, decision: Decision, around: set[int]) -> tuple[int, ...]:
    return draft.known(place).sliced.with_needed({*around, *(decision if isinstance(decision, tuple) else ())})


def _calls(messages: Sequence[bytes]) -> Mapping[str | None, tuple[str, str]]:
    """Return the name and the argument values of each tool call, by id; the newest if an id occurs twice."""
    found: dict[str | None, tuple[str, str]] = {}
    for raw in reversed(messages):
        message = parse_bytes(raw)[0] if b'"tool_calls"' in raw else None
        for call in (message.get("tool_calls") or ()) if isinstance(message, dict) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                name, arguments = str(function.get("name") or ""), str(function.get("arguments") or "")
                found.setdefault(str(call.get("id")), (name, _values(arguments)))
    return found


def _values(arguments: str) -> str:
    """Return the values of a call's arguments as text: their names are not what is asked for."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments[:_ARGUMENT_CHARS]
    values = value.values() if isinstance(value, dict) else [value]
    texts = (one if isinstance(one, str) else encode(one).decode() for one in islice(values, 20))
    return "\n".join(texts)[:_ARGUMENT_CHARS]


def _question(messages: Sequence[bytes]) -> str:
    """Return the user's newest words; of a long text its first and last characters."""
    for raw in reversed(messages):
        message = parse_bytes(raw)[0] if b'"user"' in raw else None
        if isinstance(message, dict) and message.get("role") == "user":
            text = _words(message.get("content"))
            if text:
                limit = _QUESTION_CHARS
                return text if len(text) <= 2 * limit else f"{text[:limit]}\n{text[-limit:]}"
    return ""


def _words(content: Any) -> str:
    if isinstance(content, list):
        content = [part for part in content if not text_parts([part]).lstrip().startswith(_REMINDER)]
    return text_parts(content).strip()
