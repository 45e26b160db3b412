"""Sort the parts of a tool result: text that can be shortened, parts that can be stored, and others.

| part | treated as |
|---|---|
| plain text, document with its text inside, search result | text: it can be shortened |
| the same with citations enabled | unchanged: a citation points at its characters |
| image, file or sound whose bytes are in the request | media: it can be stored and left out |
| image, file or sound given by an address or an id | unchanged: there are no bytes to store |
| anything else | unchanged: its meaning is not known here |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.core.conversation.message import CACHE_MARKS, encode, is_plain_text
from gateway.core.counting.images import COMMON_RULE, image_tokens
from gateway.core.counting.media import from_base64, from_url
from gateway.core.values import dataclass

#: Characters of text that are about one token.
_CHARS_PER_TOKEN: Final = 4
_TEXT_PATH: Final = ("text",)
#: Fields that name a document or search result for the model.
_NAME_FIELDS: Final = ("title", "source", "context")

_DOCUMENT_FIELDS: Final = frozenset({"type", "source", "title", "context", "citations", *CACHE_MARKS})
_SEARCH_RESULT_FIELDS: Final = frozenset({"type", "source", "title", "content", "citations", *CACHE_MARKS})
_IMAGE_FIELDS: Final = frozenset({"type", "source", *CACHE_MARKS})
_BASE64_FIELDS: Final = frozenset({"type", "media_type", "data"})
_IMAGE_URL_FIELDS: Final = frozenset({"type", "image_url", "detail", *CACHE_MARKS})
_FILE_FIELDS: Final = frozenset({"file_data", "filename"})
_AUDIO_FIELDS: Final = frozenset({"data", "format"})


@dataclass(frozen=True, slots=True)
class _Media:
    """An image, file or sound. `name`: its kind in words; `size`: characters of text with the same token count."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A part that may be left out. `path`: the field that holds its text, either a string or a list of text parts."""

    original: Mapping[str, Any]
    path: tuple[str, ...] = ()
    media: _Media | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        value: Any = self.original if self.path else ()
        for name in self.path:
            value = value[name]
        return (value,) if isinstance(value, str) else tuple(part["text"] for part in value)

    @property
    def reads(self) -> str:
        """Return its texts and the fields that name it, each on a line of its own."""
        names = () if self.path == _TEXT_PATH else (self.original.get(name) for name in _NAME_FIELDS)
        return "\n".join([*(name for name in names if isinstance(name, str)), *self.texts])

    def shaped(self, shape: Callable[[str], str]) -> Any:
        """Return the part with `shape` applied to each of its texts."""
        return _with_shape(self.original, self.path, shape)


class ResultContent:
    """The content of a tool result, a text or parts, and the parts of it that a short form replaces.

    Attributes:
        texts: the texts that may be changed, in order.
        text: these texts joined, as the model reads them.
        media_size: characters of text with the same token count as the media that are left out.
    """

    def __init__(self, content: Any, *, with_media: bool = False) -> None:
        """Read the parts. `with_media`: the short form also replaces images, files and sounds."""
        parts = content if isinstance(content, list) else [{"text": content}] if isinstance(content, str) else []
        self._content = content
        self._all = parts
        self._parts = {
            place: one for place, part in enumerate(parts) if (one := _part(part, with_media=with_media)) is not None
        }
        replaceable = [*self._parts.values()]
        text_parts = [part for part in replaceable if part.media is None]
        self._media = [part.media for part in replaceable if part.media is not None]
        self._is_plain = all(part.path == _TEXT_PATH for part in replaceable)
        self.texts = tuple(text for part in text_parts for text in part.texts)
        is_named = any(part.path != _TEXT_PATH for part in text_parts)
        self.text = ("\n" if is_named else "").join(part.reads for part in text_parts)
        self.media_size = sum(media.size for media in self._media)

    @property
    def original(self) -> str:
        """Return what a short form replaces: the text, or a JSON list of parts if they are more than plain text."""
        if self._is_plain:
            return self.text
        return encode([part.original for part in self._parts.values()]).decode()

    @property
    def media(self) -> str:
        """Return how many images, files and sounds a short form replaces, in words; empty if none."""
        names = [media.name for media in self._media]
        counts = [(names.count(name), name) for name in ("image", "file", "sound")]
        return ", ".join(f"{count:,} {name}{'' if count == 1 else 's'}" for count, name in counts if count)

    def shaped(self, shape: Callable[[str], str]) -> Any:
        """Return the content with `shape` applied to each of its texts."""
        if isinstance(self._content, str):
            return shape(self._content)
        return [
            one.shaped(shape) if (one := self._parts.get(place)) is not None and one.path else part
            for place, part in enumerate(self._all)
        ]

    def shortened(self, text: str) -> Any:
        """Return the content with this text instead of the last replaced part, and without the other replaced parts."""
        if isinstance(self._content, str):
            return text
        last = max(self._parts)
        plain = [one.original for one in self._parts.values() if one.path == _TEXT_PATH] or [{"type": "text"}]
        fields = {name: value for part in plain for name, value in part.items() if name not in CACHE_MARKS}
        short = {**fields, "text": text, **self._cache_mark(last)}
        return [
            short if place == last else part
            for place, part in enumerate(self._all)
            if place == last or place not in self._parts
        ]

    def _cache_mark(self, last: int) -> dict[str, Any]:
        """Return the last cache mark among the replaced parts, unless a part that stays has a later one.

        So marks with different times to live keep their order, which the provider requires.
        """
        mark: dict[str, Any] = {}
        for place, part in enumerate(self._all[: last + 1]):
            own = {name: part[name] for name in CACHE_MARKS if part.get(name)} if isinstance(part, Mapping) else {}
            if own:
                mark = own if place in self._parts else {}
        return mark


def _with_shape(value: Any, path: tuple[str, ...], shape: Callable[[str], str]) -> Any:
    if path:
        return {**value, path[0]: _with_shape(value[path[0]], path[1:], shape)}
    return shape(value) if isinstance(value, str) else [_with_shape(part, _TEXT_PATH, shape) for part in value]


def _part(part: Any, *, with_media: bool) -> _Part | None:
    """Return the part if it may be left out, or None if it stays unchanged."""
    if is_plain_text(part):
        return _Part(part, _TEXT_PATH)
    if not isinstance(part, Mapping) or _is_cited(part):
        return None
    path = _path(part)
    if path is not None:
        return _Part(part, path)
    media = _media(part) if with_media else None
    return _Part(part, media=media) if media is not None else None


def _is_cited(part: Mapping[str, Any]) -> bool:
    citations = part.get("citations")
    return bool(citations.get("enabled") if isinstance(citations, Mapping) else citations)


def _path(part: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the field with the texts of a document or search result; None if it has other parts or is neither."""
    if part.get("type") == "search_result":
        return ("content",) if _has_only(part, _SEARCH_RESULT_FIELDS) and _is_plain_list(part.get("content")) else None
    source = part.get("source")
    if part.get("type") != "document" or not _has_only(part, _DOCUMENT_FIELDS) or not isinstance(source, Mapping):
        return None
    kind, held = source.get("type"), source.get("content")
    if kind == "text" and _has_only(source, _BASE64_FIELDS) and isinstance(source.get("data"), str):
        return "source", "data"
    is_read = kind == "content" and source.keys() <= {"type", "content"}
    return ("source", "content") if is_read and (isinstance(held, str) or _is_plain_list(held)) else None


def _is_plain_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_plain_text, value))


def _has_only(part: Mapping[str, Any], names: frozenset[str]) -> bool:
    return all(name in names for name, value in part.items() if value is not None)


def _media(part: Mapping[str, Any]) -> _Media | None:
    """Return an image, file or sound whose bytes are in the request; None for anything else."""
    kind = part.get("type")
    reader = _MEDIA_READERS.get(kind) if isinstance(kind, str) else None
    return reader(part) if reader is not None else None


def _read_source(part: Mapping[str, Any]) -> _Media | None:
    """Read Anthropic's `image` and `document`."""
    source, is_image = part.get("source"), part.get("type") == "image"
    if not _has_only(part, _IMAGE_FIELDS if is_image else _DOCUMENT_FIELDS) or not isinstance(source, Mapping):
        return None
    data = source.get("data")
    if source.get("type") != "base64" or not isinstance(data, str) or not _has_only(source, _BASE64_FIELDS):
        return None
    return _image(image_tokens(from_base64(data, kind="image"), COMMON_RULE)) if is_image else _Media("file", len(data))


def _read_image_url(part: Mapping[str, Any]) -> _Media | None:
    """Read `image_url` of Chat Completions and `input_image` of Responses."""
    value = part.get("image_url")
    holder = value if isinstance(value, Mapping) else {"url": value}
    url, detail = holder.get("url"), holder.get("detail", part.get("detail"))
    if not _has_only(part, _IMAGE_URL_FIELDS) or not holder.keys() <= {"url", "detail"}:
        return None
    if not isinstance(url, str) or not url.startswith("data:"):
        return None
    return _image(image_tokens(from_url(url, "image", str(detail or "")), COMMON_RULE))


def _image(tokens: float) -> _Media:
    return _Media("image", int(tokens * _CHARS_PER_TOKEN))


def _read_file(part: Mapping[str, Any]) -> _Media | None:
    """Read `file` of Chat Completions and `input_file` of Responses."""
    holder = _only_object(part, "file") if part["type"] == "file" else _other_fields(part)
    data = holder.get("file_data")
    if not _has_only(holder, _FILE_FIELDS) or not isinstance(data, str) or data.startswith("http"):
        return None
    return _Media("file", len(data))


def _read_audio(part: Mapping[str, Any]) -> _Media | None:
    holder = _only_object(part, "input_audio")
    data = holder.get("data")
    return _Media("sound", len(data)) if _has_only(holder, _AUDIO_FIELDS) and isinstance(data, str) else None


def _only_object(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a name in a part that has no other fields, else an empty one."""
    inner = part.get(name)
    return inner if isinstance(inner, Mapping) and _other_fields(part).keys() <= {name} else {}


def _other_fields(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in part.items() if name not in ("type", *CACHE_MARKS)}


_MEDIA_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], _Media | None]]] = {
    "image": _read_source,
    "document": _read_source,
    "image_url": _read_image_url,
    "input_image": _read_image_url,
    "file": _read_file,
    "input_file": _read_file,
    "input_audio": _read_audio,
}
