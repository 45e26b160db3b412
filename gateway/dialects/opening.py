"""Read the system texts and the first user item, which identify a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.core.identity import hash_of, text_of
from gateway.dialects.fields import decode

_ABSENT: Final = msgspec.Raw(b"")
#: Bytes of content that are decoded to identify a conversation. Plain text needs no decoding and does not count.
_DECODED_BYTES: Final = 32 * 1024
#: bytes of the longest role that is decoded, with any escapes
_MAX_ROLE_BYTES: Final = 64


class _Item(msgspec.Struct, gc=False):
    role: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT


class _Part(msgspec.Struct, gc=False):
    text: msgspec.Raw = _ABSENT


def _head_decoder(length: int) -> msgspec.json.Decoder[msgspec.Struct]:
    """Return a decoder for the first elements of an array, which skips the others without creating objects."""
    elements = [(f"element{place}", msgspec.Raw, _ABSENT) for place in range(length)]
    return msgspec.json.Decoder(msgspec.defstruct("_Head", elements, array_like=True, gc=False))


_ITEM_DECODER: Final = msgspec.json.Decoder(_Item)
_PART_DECODER: Final = msgspec.json.Decoder(_Part)
#: elements of an array that are read: first a small number, which is nearly always enough, then the maximum
_NEAR: Final = 16
_FAR: Final = 1024
_NEAR_DECODER: Final = _head_decoder(_NEAR)
_FAR_DECODER: Final = _head_decoder(_FAR)


def _elements(array: msgspec.Raw) -> Iterator[msgspec.Raw]:
    """Yield the first `_FAR` elements of an array.

    Raises:
        DecodeError: the value is not an array.
        RecursionError: it is nested too deep to be read at this depth of the call stack.
    """
    near = _present(_NEAR_DECODER.decode(array))
    yield from near
    if len(near) == _NEAR:
        yield from _present(_FAR_DECODER.decode(array))[_NEAR:]


def _present(head: msgspec.Struct) -> tuple[msgspec.Raw, ...]:
    elements = msgspec.structs.astuple(head)
    return elements[: len(elements) - elements.count(_ABSENT)]


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def identifying_texts(raw: msgspec.Raw | None) -> list[str]:
    """Return the texts that identify a conversation: the system texts before the first user item, and that item.

    Only the first `_FAR` items are read, and none after the first user item.
    """
    if raw is None:
        return []
    if _first(raw) != b"[":
        return [identifying_text(raw)]
    try:
        return _opening_of(_elements(raw))
    except (msgspec.DecodeError, RecursionError):
        return [hash_of(memoryview(raw))]


def _opening_of(items: Iterator[msgspec.Raw]) -> list[str]:
    reader = _OpeningReader()
    texts: list[str] = []
    for item in items:
        role, content = _role_and_content(item)
        if role in ("system", "developer", "user"):
            texts.append(reader.text(content))
        if role == "user":
            break
    return texts


def _role_and_content(raw: msgspec.Raw) -> tuple[str | None, msgspec.Raw]:
    try:
        item = _ITEM_DECODER.decode(raw)
    except msgspec.DecodeError:
        return None, _ABSENT
    role = decode(item.role) if memoryview(item.role).nbytes <= _MAX_ROLE_BYTES else None
    return role if isinstance(role, str) else None, item.content


def identifying_text(raw: msgspec.Raw) -> str:
    """Return the text that identifies a conversation in one value: a string, or a list of parts."""
    return _OpeningReader().text(raw)


class _OpeningReader:
    """Return the texts that identify a conversation, and decode only a limited part of them.

    - A string is used itself, whatever its length.
    - Other content, up to `_DECODED_BYTES` in total, is decoded and identified by `text_of`.
    - Beyond that, each part is identified by its text, or by a hash of its bytes if it has no text.

    Clients write these first items in the same way on every turn, so the id stays the same. A cache mark may move
    between texts. The id changes only if the mark moves to a part without text (an image) in content this large.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _DECODED_BYTES

    def text(self, raw: msgspec.Raw) -> str:
        """Return the text that identifies one value; an absent value counts as null."""
        first = _first(raw)
        if first != b'"':
            size = memoryview(raw).nbytes
            if size > self._left:
                return _text_of_parts(raw) if first == b"[" else _text_or_hash(raw)
            self._left -= size
        return _text_or_bytes(decode(raw), raw)


def _text_of_parts(raw: msgspec.Raw) -> str:
    try:
        parts = _present(_FAR_DECODER.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        parts = ()
    return "\n".join(map(_text_or_hash, parts)) if 0 < len(parts) < _FAR else hash_of(memoryview(raw))


def _text_or_hash(raw: msgspec.Raw) -> str:
    try:
        text = raw if _first(raw) == b'"' else _PART_DECODER.decode(raw).text
    except (msgspec.DecodeError, RecursionError):
        text = _ABSENT
    value = decode(text) if _first(text) == b'"' else None
    return value if isinstance(value, str) else hash_of(memoryview(raw))


def _text_or_bytes(content: object, raw: msgspec.Raw) -> str:
    try:
        return text_of(content)
    except RecursionError:
        return bytes(raw).decode("utf-8", "replace")
