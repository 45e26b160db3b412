"""Count the tokens of one message by kind, in each wire format.

A measure depends only on the message and the tokenizer. So it is cached under the key of the message and added up again
on every later turn. The model family turns the counts into provider tokens (`families.py`). Every JSON value can be
measured; unknown values are counted as JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from gateway.core.counting.media import Media
from gateway.core.counting.parts import COMPACTIONS, OBJECT, Tally, ToolResult, is_compaction
from gateway.core.tools import NAME_CHARACTERS

#: names of the wire formats; also the `name` of a dialect
Wire = Literal["chat", "responses", "messages", "completions"]
#: prefixes of the address of an image; any other string is base64 data
_ADDRESSES: Final = ("data:", "http://", "https://")
#: the only fields of most chat messages
_PLAIN: Final = frozenset({"role", "content"})


class TokenCounter(Protocol):
    """Count the tokens of texts. The `name` identifies the method: `tiktoken:o200k_base`, `chars/4`."""

    @property
    def name(self) -> str:
        """Return the counter's name; counters with the same name return the same counts."""
        ...

    def count(self, text: str) -> int:
        """Return the token count of a text; never raises."""
        ...


class ContentTokens(NamedTuple):
    """The content of messages by kind, in tokens unless noted. Counts of several messages can be added."""

    text: int = 0
    result: int = 0
    call: int = 0
    thinking: int = 0
    inline: int = 0  # thinking inside an assistant's text, as open models write it
    sealed: int = 0  # characters of encrypted reasoning, which only the provider can read
    seals: int = 0  # number of pieces of encrypted reasoning
    other: int = 0  # parts of unknown types
    messages: int = 0  # number of messages
    calls: int = 0  # number of tool calls
    parallel: int = 0  # number of tool calls after the first of their message
    results: int = 0  # number of tool results
    called: int = 0  # names of called tools, which `call` includes too; some providers repeat them above the result


class MeasuredMessage(NamedTuple):
    """The token counts of one message.

    Attributes:
        counts: the counts by kind.
        media: images, audio and files.
        results: the tool results in it.
        role: its role, or the type of an item without a role.
        is_by_user: True if a person wrote it.
        called: ID and tool name of each call that can have a result.
        replaces_earlier: True if the provider reads nothing before this message.
    """

    counts: ContentTokens
    media: tuple[Media, ...] = ()
    results: tuple[ToolResult, ...] = ()
    role: str = ""
    is_by_user: bool = False
    called: tuple[tuple[str, str], ...] = ()
    replaces_earlier: bool = False


def measure(wire: Wire, message: object, counter: TokenCounter) -> MeasuredMessage:
    """Measure one decoded message, input item or prompt."""
    tally = Tally(counter.count)
    if wire == "completions":
        _prompt(tally, message)
        return _measured_message(tally, "user", messages=0, asks=True)
    if not isinstance(message, OBJECT):
        tally.unknown(message)
        return _measured_message(tally, "user", asks=True)
    return _READERS[wire](tally, message)


def text_measure(text: object, counter: TokenCounter) -> MeasuredMessage:
    """Measure a system prompt in a separate field: `system`, `instructions`."""
    tally = Tally(counter.count)
    tally.parts(text)
    return _measured_message(tally, "system")


def other_measure(value: object, counter: TokenCounter) -> MeasuredMessage:
    """Measure a field that no rule knows."""
    tally = Tally(counter.count)
    tally.unknown(value)
    return _measured_message(tally, "", messages=0)


def _measured_message(tally: Tally, role: str, *, messages: int = 1, asks: bool = False) -> MeasuredMessage:
    calls = tally.sums.get("calls", 0)
    counts = ContentTokens(**tally.sums, messages=messages, parallel=max(0, calls - 1))
    role = role[:NAME_CHARACTERS]
    return MeasuredMessage(counts, tuple(tally.media), tuple(tally.results), role, asks, tuple(tally.called))


def _prompt(tally: Tally, prompt: object) -> None:
    """Count a prompt: a text, texts, token IDs, or lists of token IDs."""
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
        thinking, mark, answer = (
            content.partition("</think>") if role == "assistant" and isinstance(content, str) else ("", "", "")
        )
        if mark:
            tally.say("inline", thinking)
        tally.parts(answer if mark else content)
        if not message.keys() <= _PLAIN:
            tally.say("text", message.get("refusal"))
            tally.say("text", message.get("name"))
            _chat_images(tally, message)
            _chat_calls(tally, message)
            _chat_thinking(tally, message)
    return _measured_message(tally, role, asks=role == "user")


def _chat_images(tally: Tally, message: Mapping[str, Any]) -> None:
    """Count images outside of the content: parts of an assistant's message (OpenRouter), or base64 texts (Ollama)."""
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
    legacy_call = message.get("function_call")
    if isinstance(legacy_call, OBJECT):
        # Neither the call nor its result has an ID; both are identified by the name of the function.
        tally.call(legacy_call.get("name"), legacy_call.get("arguments"), legacy_call.get("name"))


def _chat_thinking(tally: Tally, message: Mapping[str, Any]) -> None:
    """Count earlier thinking; hosts use different field names and often send it twice."""
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
        return _measured_message(tally, "")
    if kind == "message":
        role = _role(item)
        tally.parts(item.get("content"))
        return _measured_message(tally, role, asks=role == "user")
    if kind in ("function_call", "custom_tool_call"):
        tally.call(item.get("name"), item.get("arguments", item.get("input")), item.get("call_id"))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        tally.result(item.get("call_id"), item.get("output"))
    elif kind == "reasoning":
        sealed = item.get("encrypted_content")
        tally.seal(sealed)
        for part in _texts_of(item.get("summary")) if not sealed else ():
            tally.say("thinking", part)
        return _measured_message(tally, "reasoning", messages=0)
    elif kind in COMPACTIONS:
        tally.compacted(item)
    elif kind == "item_reference":
        return _measured_message(tally, "item_reference", messages=0)
    else:
        tally.fields(item)
    return _measured_message(tally, kind)


def _texts_of(parts: object) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            yield text


def _messages(tally: Tally, message: Mapping[str, Any]) -> MeasuredMessage:
    content, role = message.get("content"), _role(message)
    start = _last_compaction(content) if isinstance(content, list) else None
    tally.parts(content[start:] if isinstance(content, list) else content)
    measured = _measured_message(tally, role, asks=role == "user" and not tally.results)
    return measured._replace(replaces_earlier=start is not None)


def _last_compaction(blocks: Sequence[Any]) -> int | None:
    """Return the index of the last compaction block, which replaces everything before it, or None.

    Anthropic drops what precedes it and does not bill it:
    https://platform.claude.com/docs/en/build-with-claude/compaction-threshold. OpenAI differs: the model reads what is
    left before a `compaction` item, and it is billed (https://github.com/pydantic/pydantic-ai/issues/7224).
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
