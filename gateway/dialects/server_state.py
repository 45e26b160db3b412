"""Find references to content that only the provider has, such as `previous_response_id`.

A client is told of both, in `x-context-unseen` and `x-session-unmetered`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.dialects.contents import MOST_MESSAGES, Contents, is_far_too_much
from gateway.dialects.fields import UNREADABLE, AnyFields, Fields, decode, is_given

#: fields of a Responses request that stand for content which its provider has
_KEPT: Final = ("previous_response_id", "conversation", "prompt")
#: those of which an earlier answer may have told what they weigh; an answer is added to the conversation that is named
_CONTINUED_FROM: Final = _KEPT[:2]
#: bytes of what names one of them; no provider's ids are longer
_MOST_ID: Final = 1024
#: the same of a Messages request: what goes on with an answer that Anthropic keeps
_THREAD: Final = "thread"
_CONTINUED: Final = re.compile(rb'"previous_message_id"\s*:\s*"')
#: an item that stands for one of an earlier answer; inside a JSON text its quotes would have backslashes before them
_REFERENCE: Final = "item_reference"
_REFERENCE_MARK: Final = re.compile(rb'"item_reference"')
#: Where parts of each format stand, and the types of those that may stand for a file. An image is none of them: what it
#: weighs is bounded, and is held.
_MESSAGES: Final[Mapping[Wire, str]] = {"chat": "messages", "messages": "messages", "responses": "input"}
_MARKS: Final[Mapping[Wire, re.Pattern[bytes]]] = {
    "chat": re.compile(rb'"(?:file|document_url|video_url|audio_url)"'),
    "messages": re.compile(rb'"document"'),
    "responses": re.compile(rb'"input_file"'),
}
_PARTS: Final = frozenset({"file", "input_file", "document", "document_url", "video_url", "audio_url"})
#: what a part calls a file that it does not hold
_FILE_ID: Final = "file_id"
_FILE_URL: Final = "file_url"
#: what holds the rest of a part, and where parts of parts stand
_HOLDERS: Final = ("file", "source", "video_url", "audio_url")
_WITHIN: Final = ("content", "output")
#: a file's data may be its address, and so may be what some types are named by
_ADDRESSES: Final = (_FILE_URL, "file_data", "document_url", "video_url", "audio_url", "url")
_NAMED: Final = re.compile(
    rb'"(?:(file_id)"\s*:|(?:file_url|file_data|document_url|video_url|audio_url|url)"\s*:\s*"[hH][tT][tT][pP])'
)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
#: deeper than parts stand in parts, and bytes of messages that are built to look for them
_DEEPEST: Final = 8
_MOST_BYTES: Final = 2**20
#: what an answer is to be made in: the background, or later (https://docs.x.ai/docs/guides/deferred-chat-completions)
_BACKGROUND: Final = "background"
_DEFERRED: Final = "deferred"
#: the format in which each of them is known to be fetched
_FETCHED_IN: Final[Mapping[str, Wire]] = {_BACKGROUND: "responses", _DEFERRED: "chat"}
#: what the API of images says of a picture's
_OF_PICTURES: Final = ("transparent", "opaque", "auto")


def kept_by_provider(fields: Fields, wire: Wire | None, contents: Contents | None = None) -> tuple[str, ...]:
    """What of a request stands for content that others keep: it is neither weighed nor cut, and is billed.

    `contents`: of the request, where they are there: of what is known of their beginning this is known too.
    """
    if wire is None or wire not in _MESSAGES:
        return ()
    field = _MESSAGES[wire]
    found = [name for name in _KEPT if is_given(fields, name)] if wire == "responses" else []
    if wire == "messages" and _THREAD in fields and _CONTINUED.search(fields[_THREAD]):
        found.append(_THREAD)
    if field not in fields:
        return tuple(found)
    if contents is None or contents.array is None:
        said = named_in(wire, memoryview(fields[field]), None)
    else:
        start = contents.start
        said = named_in(wire, contents.rest, contents.fresh) | (start.elsewhere if start is not None else frozenset())
    return (*found, *sorted(said, key=lambda name: (name != _REFERENCE, name)))  # items before files


def named_in(wire: Wire, text: bytes | memoryview, messages: Sequence[bytes] | None) -> frozenset[str]:
    """How messages name what others keep. `text`: an array, or what is left of one behind some of its messages.

    `messages`: those of it that are looked at; None: all, of a whole array.
    """
    found = set[str]()
    if wire == "responses" and _REFERENCE_MARK.search(text):
        found.update([_REFERENCE] if messages is None or any(map(_REFERENCE_MARK.search, messages)) else ())
    marks = _MARKS.get(wire)
    if marks is not None and marks.search(text):
        found |= _names(_elements(bytes(text)) if messages is None else messages)
    return frozenset(found)


def continued_from(fields: AnyFields, wire: Wire | None) -> tuple[str, ...]:
    """The ids of what a request goes on from: of an earlier answer, of a conversation."""
    return _ids(fields, _CONTINUED_FROM) if wire == "responses" else ()


def earlier_answer(fields: AnyFields) -> str | None:
    """The id of the answer that a request of the Responses API goes on from."""
    return next(iter(_ids(fields, _CONTINUED_FROM[:1])), None)


def kept_answer(fields: AnyFields, wire: Wire | None, answer_id: str | None) -> str | None:
    """The id of an answer to a request, where its provider keeps it for others to go on from."""
    if wire != "responses" or not answer_id or len(answer_id) > _MOST_ID:
        return None
    return answer_id if bytes(fields.get("store", b"")) != b"false" else None


def left_over(fields: AnyFields, wire: Wire | None, answer_id: str | None) -> tuple[str, ...]:
    """The ids under which others may go on from an answer to a request."""
    if wire != "responses":
        return ()
    named, kept = _ids(fields, _CONTINUED_FROM[1:]), kept_answer(fields, wire, answer_id)
    return (kept, *named) if kept is not None else named


def _ids(fields: AnyFields, names: Sequence[str]) -> tuple[str, ...]:
    if fields.keys().isdisjoint(names):
        return ()
    raws = (fields[name] for name in names if name in fields)
    said = (decode(raw) for raw in raws if memoryview(raw).nbytes <= _MOST_ID)
    ids = (one.get("id") if isinstance(one, dict) else one for one in said)
    return tuple(one for one in ids if isinstance(one, str) and one)


def _elements(array: bytes) -> Sequence[msgspec.Raw]:
    if is_far_too_much(array):
        return ()
    try:
        return _LIST.decode(array)
    except UNREADABLE:
        return ()


def _names(messages: Sequence[bytes | msgspec.Raw]) -> set[str]:
    """How messages name files that they do not hold."""
    found, left = set[str](), _MOST_BYTES
    for raw in messages[:MOST_MESSAGES]:
        named = _NAMED.search(raw)
        if named is None:
            continue
        left -= memoryview(raw).nbytes
        if left >= 0:
            found.update(_files(decode(raw)))
        else:
            # Too much to be built for a word in a header: it is believed.
            found.add(_FILE_ID if named[1] else _FILE_URL)
    return found


def _files(value: object, depth: int = 0) -> Iterator[str]:
    """How a message, or a part of one, names files that it does not hold."""
    if isinstance(value, list):
        for part in value:
            yield from _files(part, depth + 1) if isinstance(part, dict) else ()
    if not isinstance(value, dict) or depth > _DEEPEST:
        return
    for name in _WITHIN:
        inner = value.get(name)
        # What stands there by itself is one level more, as what stands in a list.
        yield from _files([inner] if isinstance(inner, dict) else inner, depth)
    kind = value.get("type")
    if isinstance(kind, str) and kind in _PARTS:
        yield from _named([value, *(inner for name in _HOLDERS if isinstance(inner := value.get(name), dict))])


def _named(holders: list[dict[str, Any]]) -> Iterator[str]:
    for holder in holders:
        if isinstance(known := holder.get(_FILE_ID), str) and known:
            yield _FILE_ID
        addresses = (holder.get(name) for name in _ADDRESSES)
        if any(isinstance(one, str) and one[:4].lower() == "http" for one in addresses):
            yield _FILE_URL


def _is_deferred(fields: Fields) -> bool:
    return _DEFERRED in fields and decode(fields[_DEFERRED]) not in (None, False)


def is_in_background(fields: Fields, wire: Wire | None) -> bool:
    """Whether an answer is made later, and billed when it is.

    What is asked for at one provider is believed at all; on a path that nobody knows as well.
    """
    if _is_deferred(fields):
        return True
    if wire not in ("responses", None) or _BACKGROUND not in fields:
        return False
    said = decode(fields[_BACKGROUND])
    return said not in (None, False) and (wire is not None or said not in _OF_PICTURES)


def is_fetched_later(fields: Fields, wire: Wire | None) -> bool:
    """Whether such an answer is fetched by its id when it is made, in the format of one that was made at once."""
    return wire == _FETCHED_IN[_DEFERRED if _is_deferred(fields) else _BACKGROUND] and is_in_background(fields, wire)
