"""Count the tokens of one message by kind, in each wire format.

A measure depends on the message and the tokenizer only, so it can be kept under the message's own bytes and added up on
every later turn. What the numbers cost at one provider is the family's to say (`families.py`). Any JSON value gives a
measure; what nobody here knows is counted as the JSON it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from gateway.core.counting.media import Media
from gateway.core.counting.parts import COMPACTIONS, OBJECT, Tally, ToolResult, is_compaction
from gateway.core.tools import NAME_CHARACTERS

#: Our words for the wire formats; a dialect's `name`.
Wire = Literal["chat", "responses", "messages", "completions"]
#: how the address of a picture begins; anything else is its data
_ADDRESSES: Final = ("data:", "http://", "https://")
#: the fields of most chat messages
_PLAIN: Final = frozenset({"role", "content"})


class TokenCounter(Protocol):
    """Counts the tokens of a text. `name` says how and stands beside every number: `tiktoken:o200k_base`, `chars/4`."""

    @property
    def name(self) -> str:
        """The counter's name; counters of one name count alike."""
        ...

    def count(self, text: str) -> int:
        """Tokens of a text; never raises."""
        ...


class ContentTokens(NamedTuple):
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


class MeasuredMessage(NamedTuple):
    """A message, weighed. `role`: as sent, or an item's type where it has no role; `asks`: a person wrote it.

    `called`: id and tool's name of each call that can be answered. `is_all`: the provider reads nothing before it.
    """

    counts: ContentTokens
    media: tuple[Media, ...] = ()
    results: tuple[ToolResult, ...] = ()
    role: str = ""
    asks: bool = False
    called: tuple[tuple[str, str], ...] = ()
    is_all: bool = False


def measure(wire: Wire, message: object, counter: TokenCounter) -> MeasuredMessage:
    """The measure of one decoded message, input item or prompt."""
    tally = Tally(counter.count)
    if wire == "completions":
        _prompt(tally, message)
        return _measured(tally, "user", messages=0, asks=True)
    if not isinstance(message, OBJECT):
        tally.unknown(message)
        return _measured(tally, "user", asks=True)
    return _READERS[wire](tally, message)


def text_measure(text: object, counter: TokenCounter) -> MeasuredMessage:
    """The measure of a system text that stands in a field of its own: `system`, `instructions`."""
    tally = Tally(counter.count)
    tally.parts(text)
    return _measured(tally, "system")


def other_measure(value: object, counter: TokenCounter) -> MeasuredMessage:
    """The measure of a field that nobody here knows."""
    tally = Tally(counter.count)
    tally.unknown(value)
    return _measured(tally, "", messages=0)


def _measured(tally: Tally, role: str, *, messages: int = 1, asks: bool = False) -> MeasuredMessage:
    calls = tally.sums.get("calls", 0)
    counts = ContentTokens(**tally.sums, messages=messages, parallel=max(0, calls - 1))
    role = role[:NAME_CHARACTERS]
    return MeasuredMessage(counts, tuple(tally.media), tuple(tally.results), role, asks, tuple(tally.called))


def _prompt(tally: Tally, prompt: object) -> None:
    """A text, texts, token ids, or lists of token ids."""
    for item in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(item, int):
            tally.add("text", 1)
        elif isinstance(item, list):
            tally.add("text", len(item))
        else:
            tally.unknown(item)


def _chat(tally: Tally, message: Mapping[str, Any]) -> MeasuredMessage:
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
        tally.parts(said if end else content)
        if not message.keys() <= _PLAIN:
            tally.say("text", message.get("refusal"))
            tally.say("text", message.get("name"))
            _chat_images(tally, message)
            _chat_calls(tally, message)
            _chat_thoughts(tally, message)
    return _measured(tally, role, asks=role == "user")


def _chat_images(tally: Tally, message: Mapping[str, Any]) -> None:
    """Count pictures outside the content: parts of an assistant's message (OpenRouter), or base64 texts (Ollama)."""
    images = message.get("images")
    for image in images if isinstance(images, list) else ():
        if isinstance(image, str):
            url = image if image.startswith(_ADDRESSES) else f"data:,{image}"
            tally.parts({"type": "image_url", "image_url": url})
        else:
            tally.parts(image)


def _chat_calls(tally: Tally, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if not isinstance(call, OBJECT):
            tally.unknown(call)
            continue
        inner = call.get("function", call.get("custom"))
        function = inner if isinstance(inner, OBJECT) else {}
        tally.call(function.get("name"), function.get("arguments", function.get("input")), call.get("id"))
    old = message.get("function_call")
    if isinstance(old, OBJECT):
        # It has no id, and neither has its result: both go by the function's name.
        tally.call(old.get("name"), old.get("arguments"), old.get("name"))


def _chat_thoughts(tally: Tally, message: Mapping[str, Any]) -> None:
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


def _responses(tally: Tally, item: Mapping[str, Any]) -> MeasuredMessage:
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        tally.fields(item)
        return _measured(tally, "")
    if kind == "message":
        role = _role(item)
        tally.parts(item.get("content"))
        return _measured(tally, role, asks=role == "user")
    if kind in ("function_call", "custom_tool_call"):
        tally.call(item.get("name"), item.get("arguments", item.get("input")), item.get("call_id"))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        tally.result(item.get("call_id"), item.get("output"))
    elif kind == "reasoning":
        sealed = item.get("encrypted_content")
        tally.seal(sealed)
        for part in _texts_in(item.get("summary")) if not sealed else ():
            tally.say("thinking", part)
        return _measured(tally, "reasoning", messages=0)
    elif kind in COMPACTIONS:
        tally.compacted(item)
    elif kind == "item_reference":
        return _measured(tally, "item_reference", messages=0)
    else:
        tally.fields(item)
    return _measured(tally, kind)


def _texts_in(parts: object) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            yield text


def _messages(tally: Tally, message: Mapping[str, Any]) -> MeasuredMessage:
    content, role = message.get("content"), _role(message)
    place = _compaction(content) if isinstance(content, list) else None
    tally.parts(content[place:] if isinstance(content, list) else content)
    found = _measured(tally, role, asks=role == "user" and not tally.results)
    return found._replace(is_all=place is not None)


def _compaction(blocks: Sequence[Any]) -> int | None:
    """The place of the last compaction, a block that stands for all before it; None where there is none.

    Anthropic drops what lies before it, and bills nothing for it:
    https://platform.claude.com/docs/en/build-with-claude/compaction-threshold. OpenAI differs: what is left before a
    `compaction` item is read by the model and billed (https://github.com/pydantic/pydantic-ai/issues/7224).
    """
    places = (place for place, block in enumerate(blocks) if isinstance(block, Mapping) and is_compaction(block))
    return max(places, default=None)


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    return role if isinstance(role, str) else "user"


_READERS: Final[Mapping[str, Callable[[Tally, Mapping[str, Any]], MeasuredMessage]]] = {
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
}
