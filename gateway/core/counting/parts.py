"""Count the tokens of one part of a message, by its type.

A part is the same in every wire format that has it. Any JSON value weighs something; what nobody here knows is counted
as the JSON it is.
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

#: How deep parts in parts are looked into, deeper than in any format; what is deeper counts as the JSON it is. That the
#: JSON could be read is no bound: since Python 3.12 it may be nested deeper than functions may call each other.
_DEEPEST: Final = 8
#: the kinds of `Counts` that are tokens of content; together they count each token once
_SAID: Final = ("text", "result", "call", "thinking", "inline", "other")
#: fields of an item or part that no model reads
_UNSAID: Final = ("id", "status", "type")
#: types of parts that are a text and no more
_TEXTS: Final = ("text", "input_text", "output_text")
#: stand for all before them
COMPACTIONS: Final = frozenset({"compaction", "compaction_summary"})
#: Tokens of each character of a found page's encrypted text: the median of four recorded requests of 14,000 to 210,000
#: such characters to Claude 4 and 4.5, which had 0.29 to 0.38.
_ENCRYPTED_TOKENS: Final = 0.34
#: A decoded object is a dict, which is seen at once; to ask for a Mapping takes ten times as long.
OBJECT: Final = (dict, Mapping)


class ToolResult(NamedTuple):
    """A tool result: the call it answers, a digest of its content, its tokens."""

    call_id: str
    digest: bytes
    tokens: int


class Tally:
    """A measure in the making: of a message, or of what stands inside one of its parts.

    `sums`: by the kinds of `Counts`, which `measure.py` makes of them.
    """

    def __init__(self, count: Callable[[str], int], depth: int = 0) -> None:
        self.count = count
        self._depth = depth
        self.sums: dict[str, int] = {}
        self.media: list[Media] = []
        self.results: list[ToolResult] = []
        self.called: list[tuple[str, str]] = []

    def add(self, kind: str, amount: int) -> None:
        """Add to the sum of a kind."""
        self.sums[kind] = self.sums.get(kind, 0) + amount

    def say(self, kind: str, text: object) -> None:
        """Count a text under a kind; any other value is counted as its JSON."""
        if text is not None and text != "":
            self.add(kind, self.count(text if isinstance(text, str) else compact(text)))

    def unknown(self, value: object) -> None:
        """A part nobody here knows: its JSON, with binary data as what it holds."""
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
        """A part nobody here knows, without the fields that no model reads."""
        self.unknown({name: value for name, value in part.items() if name not in _UNSAID})

    def seal(self, data: object) -> None:
        """Reasoning that only the provider can read."""
        if isinstance(data, str) and data:
            self.add("sealed", len(data))
            self.add("seals", 1)

    def call(self, name: object, arguments: object, call_id: object) -> None:
        """The call of a tool."""
        if isinstance(name, str) and isinstance(call_id, str) and call_id:
            self.called.append((_id(call_id), name[:NAME_CHARACTERS]))
        before = self.sums.get("called", 0)
        self.add("calls", 1)
        self.say("called", name)
        self.add("call", self.sums.get("called", 0) - before)
        self.say("call", arguments)

    def result(self, call_id: object, content: object) -> None:
        """The answer to a call: its texts are a result's, its images are images."""
        if isinstance(content, str):
            said, tokens = content, self.count(content) if content else 0
        else:
            inner = Tally(self.count, self._depth)
            inner.within(content)
            said, tokens = _words_of(content), sum(inner.sums.get(kind, 0) for kind in _SAID)
            self.media += inner.media
        self.add("results", 1)
        self.add("result", tokens)
        digest = blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.results.append(ToolResult(_id(call_id) if isinstance(call_id, str) else "", digest, tokens))

    def compacted(self, part: Mapping[str, Any]) -> None:
        """What stands for all before it: sealed by OpenAI, a text of Anthropic's."""
        if isinstance(part.get("encrypted_content"), str):
            self.seal(part["encrypted_content"])
        else:
            self.fields(part)

    def parts(self, content: object) -> None:
        """The parts of a content, which may be a text or a part by itself."""
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, str):
                self.say("text", part)
            elif isinstance(part, OBJECT):
                kind = part.get("type")
                _PARTS.get(kind if isinstance(kind, str) else "", Tally.unknown)(self, part)
            elif part is not None:
                self.unknown(part)

    def within(self, content: object) -> None:
        """The parts inside a part."""
        if self._depth == _DEEPEST:
            self.unknown(content)
            return
        self._depth += 1
        self.parts(content)
        self._depth -= 1


def _id(call_id: str) -> str:
    """What tells a call from others: measures are kept, and an id may be as long as a request."""
    if len(call_id) <= NAME_CHARACTERS:
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _words_of(content: object) -> str:
    """What tells a result's content from others: a text in a part by itself says what the bare text says."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, OBJECT) and part.get("type") in _TEXTS]
    words = [text for text in texts if isinstance(text, str)]
    return "\0".join(words if len(words) == len(parts) else strings_of(content))


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
    """OpenAI's `image_url` (an object in chat, a string in responses), Anthropic's `image`."""
    named = part.get("image_url")
    holder = named if isinstance(named, Mapping) else part
    url = holder.get("url", named)
    asked = holder.get("detail", part.get("detail"))
    detail = asked[:NAME_CHARACTERS] if isinstance(asked, str) else ""
    if isinstance(url, str):
        found = media.from_url(url, "image", detail)
        tally.media.append(found if found.kind == "image" else Media("image", detail=detail, size=found.size))
    elif "source" in part:
        tally.media += _source(tally, part["source"], "image", detail)
    else:
        tally.media.append(_held_image(part, detail))


def _held_image(part: Mapping[str, Any], detail: str) -> Media:
    """Return the image that stands in another field of a part: `data` (MCP), `image` (Qwen), `b64_json`."""
    texts = [text for text in part.values() if isinstance(text, str)]
    found = next((item for item in map(binary_of, texts) if item is not None and item.kind == "image"), Media("image"))
    return replace(found, detail=detail)


def _source(tally: Tally, source: object, kind: str, detail: str = "") -> list[Media]:
    """Anthropic's `source`: base64, url, file, text or content."""
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
    tally.media.append(media.seconds_of(holder if isinstance(holder, Mapping) else {}))


def _file(tally: Tally, part: Mapping[str, Any]) -> None:
    """`file` of chat, `input_file` of responses, `document_url` of Mistral: a PDF unless it says otherwise."""
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
    """Pages that Anthropic found. Their texts are for the model alone to read, and are sent back with each turn."""
    found = part.get("content")
    for page in found if isinstance(found, list) else [found]:
        if not isinstance(page, OBJECT):
            tally.say("text", page)
            continue
        for field, value in page.items():
            if field == "encrypted_content" and isinstance(value, str):
                tally.add("text", round(_ENCRYPTED_TOKENS * len(value)))
            elif field not in _UNSAID:
                tally.say("text", value)


def _served_result(tally: Tally, part: Mapping[str, Any]) -> None:
    """What Anthropic's code execution printed: the output is encrypted where a program read the results of tools."""
    content = part.get("content")
    fields = content if isinstance(content, OBJECT) else {}
    said = {name: text for name, text in fields.items() if name.startswith("encrypted_") and isinstance(text, str)}
    if said:
        tally.add("text", round(_ENCRYPTED_TOKENS * sum(map(len, said.values()))))
        tally.fields({**part, "content": {name: value for name, value in fields.items() if name not in said}})
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
    **dict.fromkeys(("code_execution_tool_result", "advisor_tool_result"), _served_result),
    **dict.fromkeys(COMPACTIONS, Tally.compacted),
}


def is_compaction(block: Mapping[str, Any]) -> bool:
    """Whether a block of Anthropic's stands for all before it. One that failed has no content, and is ignored."""
    return block.get("type") == "compaction" and isinstance(block.get("content"), str)
