"""Count the tokens of one part of a message, by its type.

A part type is the same in every wire format that has it. Every JSON value can be counted; parts of unknown types are
counted as JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from gateway.core.counting import media
from gateway.core.counting.binary import SEALED, binary_of, readable
from gateway.core.counting.media import Media
from gateway.core.counting.tools import compact, strings_of
from gateway.core.tools import NAME_CHARACTERS

#: Maximum depth of nested parts, which is more than any format uses. Deeper parts count as JSON text. The JSON parser
#: is no limit: since Python 3.12 it accepts JSON that is nested deeper than Python functions may call each other.
_MAX_DEPTH: Final = 8
#: the kinds of `ContentTokens` that are tokens of content; each token is in exactly one of them
_CONTENT_KINDS: Final = ("text", "result", "call", "thinking", "inline", "other")
#: fields of an item or part that models do not see
_HIDDEN_FIELDS: Final = ("id", "status", "type")
#: types of parts that contain only text
_TEXTS: Final = ("text", "input_text", "output_text")
#: types of items and blocks that replace everything before them
COMPACTIONS: Final = frozenset({"compaction", "compaction_summary"})
#: Tokens per character of the encrypted text of a web page that a search found: the median of four recorded requests to
#: Claude 4 and 4.5 with 14,000 to 210,000 such characters, which had 0.29 to 0.38.
_ENCRYPTED_TOKENS: Final = 0.34
#: For `isinstance`: decoded objects are dicts, which is checked fast. Checking only for Mapping takes ten times as
#: long.
OBJECT: Final = (dict, Mapping)


class ToolResult(NamedTuple):
    """A tool result: the ID of its call, a hash of its content, and its tokens."""

    call_id: str
    digest: bytes
    tokens: int


class Tally:
    """Sum up the token counts of a message, or of the parts inside one of its parts.

    `sums` maps kinds of `ContentTokens` to counts; `measure.py` builds the result from it.
    """

    def __init__(self, count: Callable[[str], int], depth: int = 0) -> None:
        self.count = count
        self._depth = depth
        self.sums: dict[str, int] = {}
        self.media: list[Media] = []
        self.results: list[ToolResult] = []
        self.called: list[tuple[str, str]] = []

    def add(self, kind: str, amount: int) -> None:
        """Add an amount to the sum of a kind."""
        self.sums[kind] = self.sums.get(kind, 0) + amount

    def say(self, kind: str, text: object) -> None:
        """Count a text as tokens of a kind; other values are counted as JSON."""
        if text is not None and text != "":
            self.add(kind, self.count(text if isinstance(text, str) else compact(text)))

    def unknown(self, value: object) -> None:
        """Count a part of an unknown type as JSON, and binary data in it as media."""
        if isinstance(value, str) and not value.startswith("data:"):
            self.say("text", value)
            return
        text, binaries = readable(value)
        for data, item in binaries:
            if item.kind == SEALED:
                self.seal(data)
            else:
                self.media.append(item)
        self.say("other", text)

    def fields(self, part: Mapping[str, Any]) -> None:
        """Count a part of an unknown type, without the fields that models do not see."""
        self.unknown({name: value for name, value in part.items() if name not in _HIDDEN_FIELDS})

    def seal(self, data: object) -> None:
        """Count reasoning that only the provider can read, in characters."""
        if isinstance(data, str) and data:
            self.add("sealed", len(data))
            self.add("seals", 1)

    def call(self, name: object, arguments: object, call_id: object) -> None:
        """Count a tool call."""
        if isinstance(name, str) and isinstance(call_id, str) and call_id:
            self.called.append((_short_id(call_id), name[:NAME_CHARACTERS]))
        before = self.sums.get("called", 0)
        self.add("calls", 1)
        self.say("called", name)
        self.add("call", self.sums.get("called", 0) - before)
        self.say("call", arguments)

    def result(self, call_id: object, content: object) -> None:
        """Count a tool result: its texts are `result` tokens, its images are media."""
        if isinstance(content, str):
            text, tokens = content, self.count(content) if content else 0
        else:
            inner = Tally(self.count, self._depth)
            inner.within(content)
            text, tokens = _comparable_text(content), sum(inner.sums.get(kind, 0) for kind in _CONTENT_KINDS)
            self.media += inner.media
        self.add("results", 1)
        self.add("result", tokens)
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.results.append(ToolResult(_short_id(call_id) if isinstance(call_id, str) else "", digest, tokens))

    def compacted(self, part: Mapping[str, Any]) -> None:
        """Count a compaction: encrypted by OpenAI, a text from Anthropic."""
        if isinstance(part.get("encrypted_content"), str):
            self.seal(part["encrypted_content"])
        else:
            self.fields(part)

    def parts(self, content: object) -> None:
        """Count the parts of a content, which may also be a text or a single part."""
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, str):
                self.say("text", part)
            elif isinstance(part, OBJECT):
                kind = part.get("type")
                _PARTS.get(kind if isinstance(kind, str) else "", Tally.unknown)(self, part)
            elif part is not None:
                self.unknown(part)

    def within(self, content: object) -> None:
        """Count the parts inside a part."""
        if self._depth == _MAX_DEPTH:
            self.unknown(content)
            return
        self._depth += 1
        self.parts(content)
        self._depth -= 1


def _short_id(call_id: str) -> str:
    """Return a call ID, or its hash if it is long: measures are cached, and an ID may be as long as a request."""
    if len(call_id) <= NAME_CHARACTERS:
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _comparable_text(content: object) -> str:
    """Return a text that identifies the content of a result.

    A string and a single text part with the same text give the same result.
    """
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, OBJECT) and part.get("type") in _TEXTS]
    strings = [text for text in texts if isinstance(text, str)]
    return "\0".join(strings if len(strings) == len(parts) else strings_of(content))


def _text(tally: Tally, part: Mapping[str, Any]) -> None:
    text = part.get("text", part.get("refusal"))
    if text is None:
        tally.unknown(part)
    else:
        tally.say("text", text)


def _thinking(tally: Tally, part: Mapping[str, Any]) -> None:
    thought = part.get("thinking")
    tally.say("thinking", "\n".join(strings_of(thought)) if isinstance(thought, list) else thought)


def _sealed(tally: Tally, part: Mapping[str, Any]) -> None:
    tally.seal(part.get("data"))


def _image(tally: Tally, part: Mapping[str, Any]) -> None:
    """Count OpenAI's `image_url` (an object in chat, a string in Responses) or Anthropic's `image`."""
    url_field = part.get("image_url")
    holder = url_field if isinstance(url_field, Mapping) else part
    url = holder.get("url", url_field)
    requested = holder.get("detail", part.get("detail"))
    detail = requested[:NAME_CHARACTERS] if isinstance(requested, str) else ""
    if isinstance(url, str):
        item = media.from_url(url, "image", detail)
        tally.media.append(item if item.kind == "image" else Media("image", detail=detail, size=item.size))
    elif "source" in part:
        tally.media += _source(tally, part["source"], "image", detail)
    else:
        tally.media.append(_image_in_other_field(part, detail))


def _image_in_other_field(part: Mapping[str, Any], detail: str) -> Media:
    """Return the image in another field of a part: `data` (MCP), `image` (Qwen), `b64_json`."""
    texts = [text for text in part.values() if isinstance(text, str)]
    image = next((item for item in map(binary_of, texts) if item is not None and item.kind == "image"), Media("image"))
    return replace(image, detail=detail)


def _source(tally: Tally, source: object, kind: str, detail: str = "") -> list[Media]:
    """Count the texts of Anthropic's `source` (base64, url, file, text or content) and return its media."""
    if not isinstance(source, Mapping):
        return [Media(kind, detail=detail)]
    form, data, media_type = source.get("type"), source.get("data"), source.get("media_type")
    if form == "text":
        tally.say("text", data)
        return [Media("text")]
    if form == "content":
        tally.within(source.get("content"))
        return []
    if isinstance(data, str):
        return [media.from_base64(data, media_type if isinstance(media_type, str) else "", kind, detail)]
    return [Media(kind, detail=detail)]


def _document(tally: Tally, part: Mapping[str, Any]) -> None:
    for field in ("title", "context"):
        tally.say("text", part.get(field))
    tally.media += _source(tally, part.get("source"), "pdf")


def _audio(tally: Tally, part: Mapping[str, Any]) -> None:
    holder = part.get("input_audio")
    tally.media.append(media.read_audio(holder if isinstance(holder, Mapping) else {}))


def _file(tally: Tally, part: Mapping[str, Any]) -> None:
    """Count a `file` of chat, `input_file` of Responses or `document_url` of Mistral.

    The part counts as a PDF unless its type says otherwise.
    """
    inner = part.get("file")
    holder = inner if isinstance(inner, Mapping) else part
    tally.say("text", holder.get("filename", holder.get("document_name")))
    data = holder.get("file_data", holder.get("file_url", holder.get("document_url")))
    if not isinstance(data, str):
        tally.media.append(Media("pdf"))
        return
    head, comma, rest = data.partition(",") if data.startswith("data:") else ("", "", data)
    kind = head[5:].partition(";")[0]
    if comma and media.is_text_type(kind):
        tally.say("text", media.decode_text(rest) if head.endswith("base64") else rest)
    elif comma or not data.startswith("http"):
        tally.media.append(media.from_base64(rest, kind, "file"))
    else:
        tally.media.append(Media("pdf"))


def _search_result(tally: Tally, part: Mapping[str, Any]) -> None:
    """Count pages that Anthropic's search found. Their encrypted text is sent back with each turn."""
    content = part.get("content")
    for page in content if isinstance(content, list) else [content]:
        if not isinstance(page, OBJECT):
            tally.say("text", page)
            continue
        for field, value in page.items():
            if field == "encrypted_content" and isinstance(value, str):
                tally.add("text", round(_ENCRYPTED_TOKENS * len(value)))
            elif field not in _HIDDEN_FIELDS:
                tally.say("text", value)


def _code_result(tally: Tally, part: Mapping[str, Any]) -> None:
    """Count the output of Anthropic's code execution, which is encrypted if a program read tool results."""
    content = part.get("content")
    fields = content if isinstance(content, OBJECT) else {}
    encrypted = {name: text for name, text in fields.items() if name.startswith("encrypted_") and isinstance(text, str)}
    if encrypted:
        tally.add("text", round(_ENCRYPTED_TOKENS * sum(map(len, encrypted.values()))))
        tally.fields({**part, "content": {name: value for name, value in fields.items() if name not in encrypted}})
    else:
        tally.fields(part)


def _tool_use(tally: Tally, part: Mapping[str, Any]) -> None:
    tally.call(part.get("name"), part.get("input"), part.get("id"))


def _tool_result(tally: Tally, part: Mapping[str, Any]) -> None:
    tally.result(part.get("tool_use_id"), part.get("content"))


def _no_tokens(_tally: Tally, _part: Mapping[str, Any]) -> None:
    return


Part = Callable[[Tally, Any], None]
_PARTS: Final[Mapping[str, Part]] = {
    "text": _text,
    "input_text": _text,
    "output_text": _text,
    "refusal": _text,
    "summary_text": _text,
    "reasoning_text": _text,
    "thinking": _thinking,
    "redacted_thinking": _sealed,
    "image": _image,
    "image_url": _image,
    "input_image": _image,
    "document": _document,
    "document_url": _file,
    "file": _file,
    "input_file": _file,
    "input_audio": _audio,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "container_upload": _no_tokens,
    "web_search_tool_result": _search_result,
    **dict.fromkeys(("code_execution_tool_result", "advisor_tool_result"), _code_result),
    **dict.fromkeys(COMPACTIONS, Tally.compacted),
}


def is_compaction(block: Mapping[str, Any]) -> bool:
    """Return True if an Anthropic block replaces everything before it.

    A failed compaction has no content and is ignored.
    """
    return block.get("type") == "compaction" and isinstance(block.get("content"), str)
