"""One message of a request, weighed: how many tokens of which kind, in any of the four wire formats.

A measure depends on the message and the tokenizer only, so it can be kept under the message's own bytes and added up on
every later turn. What the numbers cost at one provider is the family's to say (`families.py`). Any JSON value gives a
measure; what nobody here knows is counted as the JSON it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple, Protocol

from gateway.core.counting import media
from gateway.core.counting.media import Media
from gateway.core.counting.tools import compact, strings_of
from gateway.core.tools import NAME_CHARACTERS

#: Our words for the wire formats; a dialect's `name`.
Wire = Literal["chat", "responses", "messages", "completions"]
#: How deep parts in parts are looked into, deeper than in any format; what is deeper counts as the JSON it is. That the
#: JSON could be read is no bound: since Python 3.12 it may be nested deeper than functions may call each other.
_DEEPEST: Final = 8
#: the kinds of `Counts` that are tokens of content; together they count each token once
_SAID: Final = ("text", "result", "call", "thinking", "inline", "other")
#: fields of an item or part that no model reads
_UNSAID: Final = ("id", "status", "type")
#: stand for all before them
COMPACTIONS: Final = frozenset({"compaction", "compaction_summary"})
#: Tokens of each character of a found page's encrypted text: the median of four recorded requests of 14,000 to 210,000
#: such characters to Claude 4 and 4.5, which had 0.29 to 0.38.
_ENCRYPTED_TOKENS: Final = 0.34
#: A decoded object is a dict, which is seen at once; to ask for a Mapping takes ten times as long.
_OBJECT: Final = (dict, Mapping)


class TokenCounter(Protocol):
    """Counts the tokens of a text. `name` says how and stands beside every number: `tiktoken:o200k_base`, `chars/4`."""

    @property
    def name(self) -> str:
        """The counter's name; counters of one name count alike."""
        ...

    def count(self, text: str) -> int:
        """Tokens of a text; never raises."""
        ...


class Counts(NamedTuple):
    """What a message holds, by kind: tokens, where nothing else is said. Counts of several messages are added up."""

    text: int = 0
    result: int = 0
    call: int = 0
    thinking: int = 0
    inline: int = 0  # thinking that stands inside an assistant's text, as open models write it
    sealed: int = 0  # characters of reasoning that only the provider can read
    seals: int = 0  # pieces of such reasoning
    other: int = 0  # tokens of parts nobody here knows
    messages: int = 0  # number of messages
    calls: int = 0  # number of calls of tools
    parallel: int = 0  # number of calls beyond the first of their message
    results: int = 0  # number of results of tools
    called: int = 0  # the names of called tools, which `call` holds too: some providers repeat them above the result


class ToolResult(NamedTuple):
    """A tool result: the call it answers, a digest of its content, its tokens."""

    call_id: str
    digest: bytes
    tokens: int


class Measure(NamedTuple):
    """A message, weighed. `role`: as sent, or an item's type where it has no role; `asks`: a person wrote it.

    `called`: id and tool's name of each call that can be answered. `is_all`: the provider reads nothing before it.
    """

    counts: Counts
    media: tuple[Media, ...] = ()
    results: tuple[ToolResult, ...] = ()
    role: str = ""
    asks: bool = False
    called: tuple[tuple[str, str], ...] = ()
    is_all: bool = False


class _Tally:
    """A measure in the making."""

    def __init__(self, count: Callable[[str], int], depth: int = 0) -> None:
        self.count = count
        self._depth = depth
        self.sums: dict[str, int] = {}
        self.media: list[Media] = []
        self.results: list[ToolResult] = []
        self.called: list[tuple[str, str]] = []

    def add(self, kind: str, amount: int) -> None:
        self.sums[kind] = self.sums.get(kind, 0) + amount

    def say(self, kind: str, text: object) -> None:
        """Count a text under a kind; any other value is counted as its JSON."""
        if text is not None and text != "":
            self.add(kind, self.count(text if isinstance(text, str) else compact(text)))

    def unknown(self, value: object) -> None:
        """A part nobody here knows: its JSON, with data URLs as what they hold."""
        if isinstance(value, str) and not value.startswith("data:"):
            self.say("text", value)
            return
        strings = strings_of(value)
        if any(text.startswith("data:") for text in strings):
            self.media += [media.from_url(text) for text in strings if text.startswith("data:")]
            self.say("other", "\n".join(text for text in strings if not text.startswith("data:")))
        else:
            self.say("other", compact(value))

    def seal(self, data: object) -> None:
        """Reasoning that only the provider can read."""
        if isinstance(data, str) and data:
            self.add("sealed", len(data))
            self.add("seals", 1)

    def call(self, name: object, arguments: object, call_id: object) -> None:
        if isinstance(name, str) and isinstance(call_id, str) and call_id:
            self.called.append((call_id, name[:NAME_CHARACTERS]))
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
            inner = _Tally(self.count, self._depth)
            inner.within(content)
            said, tokens = "\0".join(strings_of(content)), sum(inner.sums.get(kind, 0) for kind in _SAID)
            self.media += inner.media
        self.add("results", 1)
        self.add("result", tokens)
        digest = blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.results.append(ToolResult(call_id if isinstance(call_id, str) else "", digest, tokens))

    def within(self, content: object) -> None:
        """The parts inside a part."""
        if self._depth == _DEEPEST:
            self.unknown(content)
            return
        self._depth += 1
        _parts(self, content)
        self._depth -= 1

    def measure(self, role: str, *, messages: int = 1, asks: bool = False) -> Measure:
        calls = self.sums.get("calls", 0)
        counts = Counts(**self.sums, messages=messages, parallel=max(0, calls - 1))
        return Measure(counts, tuple(self.media), tuple(self.results), role, asks, tuple(self.called))


def measure(wire: Wire, message: object, counter: TokenCounter) -> Measure:
    """The measure of one decoded message, input item or prompt."""
    tally = _Tally(counter.count)
    if wire == "completions":
        _prompt(tally, message)
        return tally.measure("user", messages=0, asks=True)
    if not isinstance(message, _OBJECT):
        tally.unknown(message)
        return tally.measure("user", asks=True)
    return _READERS[wire](tally, message)


def text_measure(text: object, counter: TokenCounter) -> Measure:
    """The measure of a system text that stands in a field of its own: `system`, `instructions`."""
    tally = _Tally(counter.count)
    _parts(tally, text)
    return tally.measure("system")


def other_measure(value: object, counter: TokenCounter) -> Measure:
    """The measure of a field that nobody here knows."""
    tally = _Tally(counter.count)
    tally.unknown(value)
    return tally.measure("", messages=0)


def _prompt(tally: _Tally, prompt: object) -> None:
    """A text, texts, token ids, or lists of token ids."""
    for item in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(item, int):
            tally.add("text", 1)
        elif isinstance(item, list):
            tally.add("text", len(item))
        else:
            tally.unknown(item)


def _parts(tally: _Tally, content: object) -> None:
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            tally.say("text", part)
        elif isinstance(part, _OBJECT):
            kind = part.get("type")
            _PARTS.get(kind if isinstance(kind, str) else "", _Tally.unknown)(tally, part)
        elif part is not None:
            tally.unknown(part)


def _text(tally: _Tally, part: Mapping[str, Any]) -> None:
    text = part.get("text", part.get("refusal"))
    if text is None:
        tally.unknown(part)
    else:
        tally.say("text", text)


def _thinking(tally: _Tally, part: Mapping[str, Any]) -> None:
    thought = part.get("thinking")
    tally.say("thinking", "\n".join(strings_of(thought)) if isinstance(thought, list) else thought)


def _sealed(tally: _Tally, part: Mapping[str, Any]) -> None:
    tally.seal(part.get("data"))


def _image(tally: _Tally, part: Mapping[str, Any]) -> None:
    """OpenAI's `image_url` (an object in chat, a string in responses), Anthropic's `image`."""
    named = part.get("image_url")
    holder = named if isinstance(named, Mapping) else part
    url = holder.get("url", named)
    asked = holder.get("detail", part.get("detail"))
    detail = asked if isinstance(asked, str) else ""
    if isinstance(url, str):
        found = media.from_url(url, "image", detail)
        tally.media.append(found if found.kind == "image" else Media("image", detail=detail, size=found.size))
    else:
        tally.media += _source(tally, part.get("source"), "image", detail)


def _source(tally: _Tally, source: object, kind: str, detail: str = "") -> list[Media]:
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


def _document(tally: _Tally, part: Mapping[str, Any]) -> None:
    for field in ("title", "context"):
        tally.say("text", part.get(field))
    tally.media += _source(tally, part.get("source"), "pdf")


def _audio(tally: _Tally, part: Mapping[str, Any]) -> None:
    holder = part.get("input_audio")
    tally.media.append(media.seconds_of(holder if isinstance(holder, Mapping) else {}))


def _file(tally: _Tally, part: Mapping[str, Any]) -> None:
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


def _search_result(tally: _Tally, part: Mapping[str, Any]) -> None:
    """Pages that Anthropic found. Their texts are for the model alone to read, and are sent back with each turn."""
    found = part.get("content")
    for page in found if isinstance(found, list) else [found]:
        if not isinstance(page, _OBJECT):
            tally.say("text", page)
            continue
        for field, value in page.items():
            if field == "encrypted_content" and isinstance(value, str):
                tally.add("text", round(_ENCRYPTED_TOKENS * len(value)))
            elif field not in _UNSAID:
                tally.say("text", value)


def _tool_use(tally: _Tally, part: Mapping[str, Any]) -> None:
    tally.call(part.get("name"), part.get("input"), part.get("id"))


def _tool_result(tally: _Tally, part: Mapping[str, Any]) -> None:
    tally.result(part.get("tool_use_id"), part.get("content"))


def _compacted(tally: _Tally, part: Mapping[str, Any]) -> None:
    """What stands for all before it: sealed by OpenAI, a text of Anthropic's."""
    if isinstance(part.get("encrypted_content"), str):
        tally.seal(part["encrypted_content"])
    else:
        tally.unknown({name: value for name, value in part.items() if name not in _UNSAID})


def _no_tokens(_tally: _Tally, _part: Mapping[str, Any]) -> None:
    return


Part = Callable[[_Tally, Any], None]
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
    **dict.fromkeys(COMPACTIONS, _compacted),
}


def _chat(tally: _Tally, message: Mapping[str, Any]) -> Measure:
    role = _role(message)
    if role in ("tool", "function"):
        tally.result(message.get("tool_call_id", message.get("name")), message.get("content"))
    else:
        content = message.get("content")
        thought, end, said = (
            content.partition("</think>") if role == "assistant" and isinstance(content, str) else ("", "", "")
        )
        if end:
            tally.say("inline", thought)
        _parts(tally, said if end else content)
        tally.say("text", message.get("refusal"))
        tally.say("text", message.get("name"))
        _chat_calls(tally, message)
        _chat_thoughts(tally, message)
    return tally.measure(role, asks=role == "user")


def _chat_calls(tally: _Tally, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if not isinstance(call, _OBJECT):
            tally.unknown(call)
            continue
        inner = call.get("function", call.get("custom"))
        function = inner if isinstance(inner, _OBJECT) else {}
        tally.call(function.get("name"), function.get("arguments", function.get("input")), call.get("id"))
    old = message.get("function_call")
    if isinstance(old, _OBJECT):
        # It has no id, and neither has its result: both go by the function's name.
        tally.call(old.get("name"), old.get("arguments"), old.get("name"))


def _chat_thoughts(tally: _Tally, message: Mapping[str, Any]) -> None:
    """Earlier thinking, which hosts name differently and often send back twice."""
    for field in ("reasoning_content", "reasoning"):
        if isinstance(message.get(field), str) and message[field]:
            tally.say("thinking", message[field])
            return
    details = message.get("reasoning_details")
    for detail in details if isinstance(details, list) else []:
        if isinstance(detail, Mapping):
            tally.say("thinking", detail.get("text", detail.get("summary")))
            tally.seal(detail.get("data"))


def _responses(tally: _Tally, item: Mapping[str, Any]) -> Measure:
    kind = item.get("type", "message")
    if kind == "message":
        role = _role(item)
        _parts(tally, item.get("content"))
        return tally.measure(role, asks=role == "user")
    if kind in ("function_call", "custom_tool_call"):
        tally.call(item.get("name"), item.get("arguments", item.get("input")), item.get("call_id"))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        tally.result(item.get("call_id"), item.get("output"))
    elif kind == "reasoning":
        sealed = item.get("encrypted_content")
        tally.seal(sealed)
        for part in _texts_in(item.get("summary")) if not sealed else ():
            tally.say("thinking", part)
        return tally.measure("reasoning", messages=0)
    elif kind in COMPACTIONS:
        _compacted(tally, item)
    elif kind == "item_reference":
        return tally.measure("item_reference", messages=0)
    else:
        tally.unknown({name: value for name, value in item.items() if name not in _UNSAID})
    return tally.measure(kind if isinstance(kind, str) else "")


def _texts_in(parts: object) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            yield text


def _messages(tally: _Tally, message: Mapping[str, Any]) -> Measure:
    content, role = message.get("content"), _role(message)
    place = _compaction(content) if isinstance(content, list) else None
    _parts(tally, content[place:] if isinstance(content, list) else content)
    found = tally.measure(role, asks=role == "user" and not tally.results)
    return found._replace(is_all=place is not None)


def _compaction(blocks: Sequence[Any]) -> int | None:
    """The place of the last compaction, a block that stands for all before it; None where there is none.

    Anthropic drops what lies before it, and bills nothing for it:
    https://platform.claude.com/docs/en/build-with-claude/compaction-threshold. OpenAI differs: what is left before a
    `compaction` item is read by the model and billed (https://github.com/pydantic/pydantic-ai/issues/7224).
    """
    places = (place for place, block in enumerate(blocks) if isinstance(block, Mapping) and is_compaction(block))
    return max(places, default=None)


def is_compaction(block: Mapping[str, Any]) -> bool:
    """Whether a block of Anthropic's stands for all before it. One that failed has no content, and is ignored."""
    return block.get("type") == "compaction" and isinstance(block.get("content"), str)


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    return role if isinstance(role, str) else "user"


_READERS: Final[Mapping[str, Callable[[_Tally, Mapping[str, Any]], Measure]]] = {
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
}
