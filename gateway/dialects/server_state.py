"""Find references to content that only the provider has, such as `previous_response_id`.

The client is informed in the headers `x-context-unseen` and `x-session-unmetered`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.dialects.contents import MAX_MESSAGES, Contents, is_too_large
from gateway.dialects.fields import UNREADABLE, AnyFields, Fields, decode, is_given

#: fields of a Responses request that refer to content at the provider
_KEPT: Final = ("previous_response_id", "conversation", "prompt")
#: The fields whose tokens may be known from an earlier response. A response is added to the named conversation.
_CONTINUED_FROM: Final = _KEPT[:2]
#: size limit in bytes of an id; no provider has longer ones
_MAX_ID: Final = 1024
#: the field of a Messages request that continues a response stored at Anthropic
_THREAD: Final = "thread"
_CONTINUED: Final = re.compile(rb'"previous_message_id"\s*:\s*"')
#: an item that refers to an item of an earlier response; inside a JSON text its quotes would be escaped
_REFERENCE: Final = "item_reference"
_REFERENCE_MARK: Final = re.compile(rb'"item_reference"')
#: The field with the messages of each format, and the types of parts that may refer to a file. An image is not one of
#: them: its tokens have an upper bound, which is reserved.
_MESSAGES: Final[Mapping[Wire, str]] = {"chat": "messages", "messages": "messages", "responses": "input"}
_MARKS: Final[Mapping[Wire, re.Pattern[bytes]]] = {
    "chat": re.compile(rb'"(?:file|document_url|video_url|audio_url)"'),
    "messages": re.compile(rb'"document"'),
    "responses": re.compile(rb'"input_file"'),
}
_PARTS: Final = frozenset({"file", "input_file", "document", "document_url", "video_url", "audio_url"})
#: the fields by which a part refers to a file that it does not contain
_FILE_ID: Final = "file_id"
_FILE_URL: Final = "file_url"
#: fields with the rest of a part, and fields with nested parts
_HOLDERS: Final = ("file", "source", "video_url", "audio_url")
_WITHIN: Final = ("content", "output")
#: fields that may have an address: file data may be one, and some types are given by one
_ADDRESSES: Final = (_FILE_URL, "file_data", "document_url", "video_url", "audio_url", "url")
_NAMED: Final = re.compile(
    rb'"(?:(file_id)"\s*:|(?:file_url|file_data|document_url|video_url|audio_url|url)"\s*:\s*"[hH][tT][tT][pP])'
)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
#: the maximum depth of nested parts, and the maximum bytes of messages that are decoded to find them
_MAX_DEPTH: Final = 8
_MAX_BYTES: Final = 2**20
#: how a response is generated: in the background, or deferred (https://docs.x.ai/docs/guides/deferred-chat-completions)
_BACKGROUND: Final = "background"
_DEFERRED: Final = "deferred"
#: the format in which such responses can be fetched
_FETCHED_IN: Final[Mapping[str, Wire]] = {_BACKGROUND: "responses", _DEFERRED: "chat"}
#: values of `background` in the images API
_IMAGE_BACKGROUNDS: Final = ("transparent", "opaque", "auto")


def references_to_stored(fields: Fields, wire: Wire | None, contents: Contents | None = None) -> tuple[str, ...]:
    """Return the references of a request to content that only the provider has: not counted or trimmed, but billed.

    `contents`: the contents of the request, if they were read. The references in a cached prefix are known.
    """
    if wire is None or wire not in _MESSAGES:
        return ()
    field = _MESSAGES[wire]
    references = [name for name in _KEPT if is_given(fields, name)] if wire == "responses" else []
    if wire == "messages" and _THREAD in fields and _CONTINUED.search(fields[_THREAD]):
        references.append(_THREAD)
    if field not in fields:
        return tuple(references)
    if contents is None or contents.array is None:
        named = references_in(wire, memoryview(fields[field]), None)
    else:
        start = contents.cached_prefix
        named = references_in(wire, contents.rest, contents.new_messages) | (
            start.server_references if start is not None else frozenset()
        )
    return (*references, *sorted(named, key=lambda name: (name != _REFERENCE, name)))  # items before files


def references_in(wire: Wire, text: bytes | memoryview, messages: Sequence[bytes] | None) -> frozenset[str]:
    """Return the kinds of references in messages. `text`: an array, or the rest of an array after some messages.

    `messages`: the messages to search in; None: all messages of a whole array.
    """
    references = set[str]()
    if wire == "responses" and _REFERENCE_MARK.search(text):
        references.update([_REFERENCE] if messages is None or any(map(_REFERENCE_MARK.search, messages)) else ())
    marks = _MARKS.get(wire)
    if marks is not None and marks.search(text):
        references |= _names(_elements(bytes(text)) if messages is None else messages)
    return frozenset(references)


def continued_from(fields: AnyFields, wire: Wire | None) -> tuple[str, ...]:
    """Return the ids of the earlier response and of the conversation that a request continues."""
    return _ids(fields, _CONTINUED_FROM) if wire == "responses" else ()


def previous_response_id(fields: AnyFields) -> str | None:
    """Return the id of the response that a Responses request continues, or None."""
    return next(iter(_ids(fields, _CONTINUED_FROM[:1])), None)


def stored_response_id(fields: AnyFields, wire: Wire | None, response_id: str | None) -> str | None:
    """Return the id of a response if its provider stores it, so that later requests can continue it; else None."""
    if wire != "responses" or not response_id or len(response_id) > _MAX_ID:
        return None
    return response_id if bytes(fields.get("store", b"")) != b"false" else None


def continuation_ids(fields: AnyFields, wire: Wire | None, response_id: str | None) -> tuple[str, ...]:
    """Return the ids by which later requests can continue a response."""
    if wire != "responses":
        return ()
    named, kept = _ids(fields, _CONTINUED_FROM[1:]), stored_response_id(fields, wire, response_id)
    return (kept, *named) if kept is not None else named


def _ids(fields: AnyFields, names: Sequence[str]) -> tuple[str, ...]:
    if fields.keys().isdisjoint(names):
        return ()
    raws = (fields[name] for name in names if name in fields)
    values = (decode(raw) for raw in raws if memoryview(raw).nbytes <= _MAX_ID)
    ids = (value.get("id") if isinstance(value, dict) else value for value in values)
    return tuple(value for value in ids if isinstance(value, str) and value)


def _elements(array: bytes) -> Sequence[msgspec.Raw]:
    if is_too_large(array):
        return ()
    try:
        return _LIST.decode(array)
    except UNREADABLE:
        return ()


def _names(messages: Sequence[bytes | msgspec.Raw]) -> set[str]:
    """Return how messages refer to files that they do not contain."""
    kinds, left = set[str](), _MAX_BYTES
    for raw in messages[:MAX_MESSAGES]:
        named = _NAMED.search(raw)
        if named is None:
            continue
        left -= memoryview(raw).nbytes
        if left >= 0:
            kinds.update(_files(decode(raw)))
        else:
            # Decoding more for one word in a header would take too long, so the pattern alone decides.
            kinds.add(_FILE_ID if named[1] else _FILE_URL)
    return kinds


def _files(value: object, depth: int = 0) -> Iterator[str]:
    """Yield how a message, or a part of one, refers to files that it does not contain."""
    if isinstance(value, list):
        for part in value:
            yield from _files(part, depth + 1) if isinstance(part, dict) else ()
    if not isinstance(value, dict) or depth > _MAX_DEPTH:
        return
    for name in _WITHIN:
        inner = value.get(name)
        # A single nested part counts as one level deeper, like one in a list.
        yield from _files([inner] if isinstance(inner, dict) else inner, depth)
    kind = value.get("type")
    if isinstance(kind, str) and kind in _PARTS:
        yield from _named([value, *(inner for name in _HOLDERS if isinstance(inner := value.get(name), dict))])


def _named(holders: list[dict[str, Any]]) -> Iterator[str]:
    for holder in holders:
        if isinstance(known := holder.get(_FILE_ID), str) and known:
            yield _FILE_ID
        addresses = (holder.get(name) for name in _ADDRESSES)
        if any(isinstance(value, str) and value[:4].lower() == "http" for value in addresses):
            yield _FILE_URL


def _is_deferred(fields: Fields) -> bool:
    return _DEFERRED in fields and decode(fields[_DEFERRED]) not in (None, False)


def is_in_background(fields: Fields, wire: Wire | None) -> bool:
    """Return True if a response is generated later, and billed then.

    `deferred` is known at one provider only, but accepted on every path. An unknown path may have either field.
    """
    if _is_deferred(fields):
        return True
    if wire not in ("responses", None) or _BACKGROUND not in fields:
        return False
    value = decode(fields[_BACKGROUND])
    return value not in (None, False) and (wire is not None or value not in _IMAGE_BACKGROUNDS)


def is_fetched_later(fields: Fields, wire: Wire | None) -> bool:
    """Return True if a background response is fetched by its id, in the format of an immediate response."""
    return wire == _FETCHED_IN[_DEFERRED if _is_deferred(fields) else _BACKGROUND] and is_in_background(fields, wire)
