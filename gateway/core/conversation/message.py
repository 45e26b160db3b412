"""Parse one chat message from bytes, compute its key, and write a changed message.

Any bytes can be parsed. Bytes that are no chat message get an unknown role. A message that cannot be written again
without loss is sealed: it may be dropped, but never changed. Examples are a duplicate key, NaN, half a surrogate pair,
or very deep nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from itertools import chain, compress, count
from math import isinf
from operator import is_not
from typing import Any, Final, TypeGuard, cast

from gateway.core.conversation.json_text import run_end, string_end
from gateway.core.values import dataclass

#: a chat message as decoded JSON
Message = Mapping[str, Any]

SYSTEM_ROLES: Final = frozenset({"system", "developer"})
RESULT_ROLES: Final = frozenset({"tool", "function"})
KNOWN_ROLES: Final = SYSTEM_ROLES | RESULT_ROLES | {"user", "assistant"}
#: the role of bytes that cannot be parsed
UNKNOWN_ROLE: Final = "unknown"
#: Placeholder for a message that the provider neither reads nor bills. Its role is no chat role, so it is never changed
#: and counts no tokens.
IGNORED: Final = b'{"role":"ignored"}'

_KEY_BYTES: Final = 16
#: fields that mark the end of a cached prompt prefix, of Anthropic and OpenAI
CACHE_MARKS: Final = ("cache_control", "prompt_cache_breakpoint")
#: Matches a cache mark. An unescaped `"cache_control"` before a colon can only be a key, because inside a JSON string a
#: backslash precedes every quote. For the same reason, the comma or brace before it is not part of a string. Only flat
#: objects are removed, because their end is certain, and only if they can be written again unchanged.
_MARK_NAMES: Final = tuple(b'"%b"' % name.encode() for name in CACHE_MARKS)
_HOLDER: Final = re.compile(rb"(?:" + b"|".join(_MARK_NAMES) + rb")\s*:\s*\{")
#: the content of a flat object, see `run_end`
_FLAT: Final = re.compile(rb'(?:[\s,:]+|true|false|null|-?\d{1,18}(?![\d.eE])|"[^"\\{}]*"){0,1000}')
#: text before the next brace outside of strings, see `run_end`; a string with more than 20 escapes ends the match
_NO_BRACE: Final = re.compile(rb'(?:[^{}"]+|"[^"\\]*(?:\\.[^"\\]*){0,20}"){0,1000}', re.DOTALL)
_BRACES: Final = (b"{", b"}")
_TEXT_FIELDS: Final = frozenset({"type", "text", *CACHE_MARKS})
_SPACES: Final = re.compile(rb"\s*")
_SPACE: Final = b" \t\n\r\f\v"
#: an escape that may be half of a surrogate pair
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_write: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: JSON that is nested deeper than this is not written again, because encoders fail at some depth above it.
MAX_DEPTH: Final = 100
#: JSON text inside a message with more values than this is not parsed, because all other threads wait meanwhile. At
#: this number they wait a quarter of a second. Each value follows a comma or a bracket.
MAX_VALUES: Final = 200_000
_BEFORE_VALUES: Final = (",", "{", "[")

#: fields in which providers expect their reasoning back unchanged, because they verify it
_REASONING_FIELDS: Final = ("reasoning_details", "thinking_blocks", "reasoning_signature", "encrypted_content")
#: prefix of `format` in OpenRouter's `reasoning_details` if Claude has written them
_CLAUDE_FORMAT: Final = "anthropic"
#: Fields of a message, a call or its function that may hold a signature. Gemini's OpenAI-compatible API uses the first,
#: litellm the last.
_SIGNATURE_FIELDS: Final = ("extra_content", "thought_signature", "provider_specific_fields")
#: litellm also writes the signature into the ID of a call, after this
_SIGNED_ID: Final = "__thought__"
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
#: A tuple instead of a set, because the type of a part may be any JSON value, and some are not hashable.
THINKING_PARTS: Final = ("thinking", "redacted_thinking")
#: Fields of a chat message that hold thinking: those of litellm, of OpenRouter, and of hosts that show it as text.
THINKING_FIELDS: Final = (
    "thinking_blocks", "reasoning_details", "reasoning_content", "reasoning", "reasoning_signature",
)  # fmt: skip
#: the field in which litellm repeats the thinking
_LITELLM_FIELDS: Final = "provider_specific_fields"


@dataclass(frozen=True, slots=True)
class MessageOutline:
    """The properties of a message that do not depend on the rest of the conversation."""

    role: str
    #: IDs of its tool calls, in order
    calls: tuple[str, ...] = ()
    #: IDs and tool names of the calls that have both
    names: tuple[tuple[str, str], ...] = ()
    #: the ID of the call if it is a tool result
    result_of: str | None = None
    #: length of its text in characters
    length: int = 0
    #: hash of its text
    text_key: bytes = b""
    #: Hash of the message without cache marks and thinking, and independent of how a text is written. Clients write a
    #: single text as a list while it has a cache mark, and as a string later. They may also remove thinking later.
    identity: bytes = b""
    #: True if it may be dropped with its unit but never rewritten: signed reasoning, images, unknown parts
    sealed: bool = False
    #: True if it starts with thinking of Claude, see `_thinks`
    thinks: bool = False
    #: problems for which a provider would refuse it
    faults: tuple[str, ...] = ()
    #: characters of its role, IDs, names and faults; usually few, but possibly as many as the request has
    text_size: int = 0

    @property
    def is_known(self) -> bool:
        """Return True if it has a role of a chat message."""
        return self.role in KNOWN_ROLES


def without_cache_marks(raw: bytes) -> bytes:
    """Return a message, or any piece of JSON, without its cache marks, which clients move from turn to turn.

    Each mark is removed with one adjacent comma. Without marks, the same object is returned. Applying the function
    twice changes nothing more.
    """
    for mark in _MARK_NAMES:
        if mark in raw:
            return _without_marks(raw)
    return raw


def _without_marks(raw: bytes) -> bytes:
    kept: list[bytes] = []
    copied, is_first_field = 0, False
    first, second = map(raw.find, _MARK_NAMES)
    while first >= 0 or second >= 0:
        mark = first if second < 0 or 0 <= first < second else second
        mark_end = _flat_end(raw, mark)
        span = _mark_span(raw, mark, mark_end, copied, is_first_field=is_first_field) if mark_end is not None else None
        if span is not None:
            kept.append(raw[copied : span[0]])
            # A mark that was removed without a comma before it was the first field of its object. A mark that follows
            # directly is the first field now, which `_mark_span` cannot see from the bytes.
            is_first_field = raw[span[0] : span[0] + 1] != b","
            copied = span[1]
        resume = copied if span is not None else _after_other(raw, mark)
        first, second = (
            raw.find(name, resume) if 0 <= place < resume else place
            for name, place in zip(_MARK_NAMES, (first, second), strict=True)
        )
    return b"".join([*kept, raw[copied:]]) if copied else raw


def _flat_end(raw: bytes, at: int) -> int | None:
    """Return the end of the cache mark at `at`, or None if its object is not flat."""
    holder = _HOLDER.match(raw, at)
    if holder is None:
        return None
    end = run_end(_FLAT, raw, holder.end())
    return end + 1 if raw.startswith(b"}", end) else None


def _after_other(raw: bytes, at: int) -> int:
    """Return where to continue the search after an object that is no cache mark.

    Marks inside that object are skipped: removing one could make the object flat, so that it would look like a mark
    afterwards.
    """
    holder = _HOLDER.match(raw, at)
    if holder is None:
        return at + 1
    end, depth = holder.end(), 1
    while depth:
        brace = _next_brace(raw, end)
        if brace is None:
            return len(raw)
        depth += 1 if raw.startswith(b"{", brace) else -1
        end = brace + 1
    return end


def _next_brace(raw: bytes, at: int) -> int | None:
    """Return the index of the next brace outside of strings, or None if there is none."""
    at = run_end(_NO_BRACE, raw, at)
    while raw.startswith(b'"', at):
        closing = string_end(raw, at + 1)
        at = run_end(_NO_BRACE, raw, closing + 1)
    return at if raw.startswith(_BRACES, at) else None


def _mark_span(raw: bytes, start: int, stop: int, done: int, *, is_first_field: bool) -> tuple[int, int] | None:
    """Return the span to remove for the mark at `start`, including one comma, or None if the mark is no field.

    Args:
        raw: the message.
        start: where the mark starts.
        stop: where it ends.
        done: where the last removed span ended.
        is_first_field: True if the last removed span was the first field of an object. Then this mark is the first
            field if it follows directly.
    """
    before = start - 1
    while before >= done and raw[before] in _SPACE:
        before -= 1
    if before < done and not is_first_field:
        return None
    if before >= done and raw[before] not in b",{":
        return None
    if before >= done and raw[before] == ord(","):
        return before, stop
    spaces = _SPACES.match(raw, stop)
    end = spaces.end() if spaces is not None else stop
    return before + 1, end + (raw[end : end + 1] == b",")


def keys_of(messages: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return a hash of each message without its cache marks."""
    return tuple(map(digest, all_without_cache_marks(messages)))


def all_without_cache_marks(messages: Iterable[bytes]) -> list[bytes]:
    """Return each message without its cache marks; a message without marks is returned itself."""
    return list(map(without_cache_marks, messages))


def digest(raw: bytes) -> bytes:
    """Return a hash of the bytes."""
    return blake2b(raw, digest_size=_KEY_BYTES).digest()


def key_of(raw: bytes) -> tuple[bytes, bool]:
    """Return a hash of a message without its cache marks, and whether it has any."""
    unmarked = without_cache_marks(raw)
    return digest(unmarked), unmarked is not raw


class Hashed:
    """Messages, or elements of another format, with a hash of each that is computed on first use.

    Args:
        raws: the bytes of each message.
        keys: `keys_of` of the messages, if known.
        marked: indices of the messages with cache marks, if known.
        unmarked: number of first messages that are known to have no cache marks.
    """

    def __init__(
        self,
        raws: Iterable[bytes],
        keys: Iterable[bytes] | None = None,
        *,
        marked: Iterable[int] | None = None,
        unmarked: int = 0,
    ) -> None:
        self.raws = tuple(raws)
        self._unmarked = unmarked
        if keys is not None:
            self.keys = tuple(keys)
        if marked is not None:
            self.marked = frozenset(marked)

    @cached_property
    def _plains(self) -> list[bytes]:
        return [*self.raws[: self._unmarked], *all_without_cache_marks(self.raws[self._unmarked :])]

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """Return a hash of each message without its cache marks."""
        return tuple(map(digest, self._plains))

    @cached_property
    def marked(self) -> frozenset[int]:
        """Return the indices of the messages with cache marks."""
        return frozenset(compress(count(), map(is_not, self._plains, self.raws)))

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Return a hash of the unchanged bytes of each message."""
        if not self.marked:
            return self.keys
        return tuple([digest(self.raws[at]) if at in self.marked else key for at, key in enumerate(self.keys)])


_is_some: Final = cast("Callable[[bytes | None], TypeGuard[bytes]]", partial(is_not, None))


def with_changes(original: Iterable[bytes], changes: Mapping[int, bytes | None]) -> tuple[bytes, ...]:
    """Return the messages with some replaced by `changes`, or dropped if the change is None."""
    return tuple(filter(_is_some, map(changes.get, count(), original)))


def hashed(raws: Sequence[bytes] | Hashed) -> Hashed:
    """Wrap messages in `Hashed` unless they already are."""
    return raws if isinstance(raws, Hashed) else Hashed(raws)


def encode(value: object) -> bytes:
    """Return a value as compact JSON. Characters that UTF-8 cannot encode (half a surrogate pair) become `?`."""
    return _write(value).encode("utf-8", "replace")


def decode(raw: bytes) -> Any:
    """Return the value of a message that is not sealed."""
    return json.loads(raw.decode())


def parse_bytes(raw: bytes) -> tuple[Any, bool]:
    """Parse any bytes; return the value (None if it is not JSON), and whether writing it again would lose something."""
    detector = _LossDetector()
    try:
        value = detector.decoder.decode(raw.decode())
    except (ValueError, RecursionError):
        return None, True
    is_lossy = detector.is_lossy or (_may_be_deep(raw) and is_deep(value))
    return value, is_lossy or (_SURROGATE.search(raw) is not None and not _is_encodable(value))


class _LossDetector:
    """Parse JSON, and detect content that would be lost when it is written again."""

    def __init__(self) -> None:
        self.is_lossy = False
        self.decoder = json.JSONDecoder(
            object_pairs_hook=self._pairs, parse_constant=self._constant, parse_int=self._int, parse_float=self._float
        )

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        self.is_lossy = self.is_lossy or len(value) != len(pairs)
        return value

    def _constant(self, name: str) -> float:
        self.is_lossy = True
        return float(name)

    def _int(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # more digits than Python converts
            self.is_lossy = True
            return 0

    def _float(self, digits: str) -> float:
        value = float(digits)
        self.is_lossy = self.is_lossy or isinf(value)
        return value


def _is_encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def has_too_many_values(text: str) -> bool:
    """Return True if a JSON text has too many values to be parsed, see `MAX_VALUES`; this does not parse it."""
    return len(text) > MAX_VALUES and sum(map(text.count, _BEFORE_VALUES)) > MAX_VALUES


def _may_be_deep(raw: bytes) -> bool:
    return raw.count(b"{") + raw.count(b"[") >= MAX_DEPTH


def is_deep(value: object) -> bool:
    """Return True if a value is nested deeper than encoders support."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for node in level if isinstance(node, dict | list) for inner in _children(node)]
        if not level:
            return False
    return True


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def text_of(raw: bytes) -> str:
    """Return the text of any message."""
    value, _ = parse_bytes(raw)
    return text_parts(value.get("content")) if isinstance(value, dict) else ""


def text_parts(content: object) -> str:
    """Return the text of a message's content, whether it is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def outline_of(raw: bytes) -> MessageOutline:
    """Parse a message without its cache marks; never raises."""
    raw = without_cache_marks(raw)
    message, is_lossy = parse_bytes(raw)
    if not isinstance(message, dict):
        return MessageOutline(UNKNOWN_ROLE, sealed=True, identity=digest(raw))
    content, role, answers = message.get("content"), str(message.get("role")), _answered_id(message)
    text = text_parts(content)
    text_key = digest(text.encode("utf-8", "surrogatepass"))
    calls = _calls(message)
    ids = _call_ids(message, calls)
    names = tuple((str(call.get("id")), str(_function(call).get("name"))) for call in calls)
    faults = tuple(_faults(message, content, calls))
    return MessageOutline(
        role=role,
        calls=ids,
        names=names,
        result_of=answers,
        length=len(text),
        text_key=text_key,
        identity=digest(raw) if is_lossy else _identity(raw, message, text_key),
        sealed=is_lossy or _is_sealed(message, content),
        thinks=role == "assistant" and _thinks(message),
        faults=faults,
        text_size=sum(map(len, chain((role, answers or ""), ids, chain.from_iterable(names), faults))),
    )


def is_one_text(content: object) -> bool:
    """Return True if a content is a single text, written as a string or as a list. Clients switch between the two."""
    if not isinstance(content, list):
        return isinstance(content, str)
    part = content[0] if len(content) == 1 else None
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and part.keys() <= _TEXT_FIELDS
    )


def _identity(raw: bytes, message: Message, text_key: bytes) -> bytes:
    remainder = without_thinking(message)
    if not is_one_text(remainder.get("content")):
        # A client may take the thinking out itself later, so what is left is hashed the same way with and without it.
        may_think = remainder is not message or message.get("role") == "assistant"
        return digest(encode(remainder) if may_think else raw)
    fields = {name: value for name, value in remainder.items() if name != "content" and name not in CACHE_MARKS}
    return digest(encode(fields) + text_key)


def without_thinking(message: Message) -> Message:
    """Return an assistant's message without its thinking; the same value if it has none."""
    if message.get("role") != "assistant":
        return message
    changes: dict[str, Any] = {}
    content, fields = message.get("content"), message.get(_LITELLM_FIELDS)
    if isinstance(content, list) and any(map(is_thinking, content)):
        changes["content"] = [part for part in content if not is_thinking(part)] or None
    if isinstance(fields, Mapping) and "thinking_blocks" in fields:
        changes[_LITELLM_FIELDS] = {name: value for name, value in fields.items() if name != "thinking_blocks"}
    if not changes and not any(message.get(name) for name in THINKING_FIELDS):
        return message
    return {name: changes.get(name, value) for name, value in message.items() if name not in THINKING_FIELDS}


def is_thinking(part: object) -> bool:
    """Return True if a part of a message's content is thinking of Claude."""
    return isinstance(part, Mapping) and part.get("type") in THINKING_PARTS


def _calls(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _call_ids(message: Message, calls: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the IDs of the calls of a message; an old `function_call` is identified by the name of its function."""
    ids = [str(call.get("id")) for call in calls]
    legacy_call = message.get("function_call")
    if isinstance(legacy_call, Mapping):
        ids.append(f"function:{legacy_call.get('name')}")
    return tuple(ids)


def _answered_id(message: Message) -> str | None:
    role = message.get("role")
    if role == "tool":
        return str(message.get("tool_call_id"))
    return f"function:{message.get('name')}" if role == "function" else None


def _is_sealed(message: Message, content: object) -> bool:
    if is_signed(message):
        return True
    if content is None or isinstance(content, str):
        return False
    return not isinstance(content, list) or not all(is_plain_text(part) for part in content)


def is_signed(message: Message) -> bool:
    """Return True if a field outside of the content ties a message to the model's reasoning.

    Nothing in such a message may change.
    """
    if any(message.get(name) for name in _REASONING_FIELDS) or _has_signature(message):
        return True
    calls = message.get("tool_calls")
    return bool(calls) and (not isinstance(calls, list) or any(_is_signed_call(call) for call in calls))


def _thinks(message: Message) -> bool:
    """Return True if the message has thinking of Claude in a field of litellm or OpenRouter.

    Anthropic checks that a turn starts with its thinking. No other provider does, so signed reasoning of other models
    does not count.
    """
    blocks, details = message.get("thinking_blocks"), message.get("reasoning_details")
    if isinstance(blocks, list) and blocks:
        return True
    return isinstance(details, list) and any(_is_by_claude(one) for one in details)


def _is_by_claude(detail: object) -> bool:
    if not isinstance(detail, Mapping):
        return False
    return bool(detail.get("signature")) or str(detail.get("format")).startswith(_CLAUDE_FORMAT)


def _is_signed_call(call: object) -> bool:
    """Return True if a call is no plain function call, or carries a signature of the model's reasoning."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return True
    return _SIGNED_ID in str(call.get("id")) or _has_signature(call) or _has_signature(call["function"])


def _has_signature(holder: Mapping[str, Any]) -> bool:
    """Return True if a signature field has a value; some clients fill it with nulls."""
    values = (holder.get(name) for name in _SIGNATURE_FIELDS)
    return any(any(value.values()) if isinstance(value, Mapping) else bool(value) for value in values)


def is_plain_text(part: object) -> bool:
    """Return True if a part is text and nothing depends on its exact wording (annotations point at characters)."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind in _REASONING_PARTS:
        return False
    return isinstance(part.get("text"), str) and _TEXT_FIELDS.issuperset(part)


def _faults(message: Message, content: object, calls: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if content is None and message.get("role") != "assistant":
        yield f"a {message.get('role')} message without content"
    for call in calls:
        arguments = _function(call).get("arguments") or "{}"
        if isinstance(arguments, str) and has_too_many_values(arguments):
            continue
        try:
            json.loads(arguments)
        except (ValueError, TypeError, RecursionError):
            yield f"arguments of call {call.get('id')} are not JSON"
