"""Read one chat message as bytes, compute its key, and write a changed one.

Any bytes can be read. What is no chat message has an unknown role; what cannot be written anew without loss (a key that
stands twice, NaN, half a surrogate pair, nesting without end) is sealed: it may be left out, but never changed.
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
#: the role of what cannot be read
UNKNOWN: Final = "unknown"
#: Stands for a message that the provider neither reads nor bills. Its role is none of a chat, so that it is never
#: changed, and it counts no tokens.
IGNORED: Final = b'{"role":"ignored"}'

_KEY_BYTES: Final = 16
#: where a provider's prompt cache ends, as Anthropic and OpenAI say it
CACHE_MARKS: Final = ("cache_control", "prompt_cache_breakpoint")
#: A cache mark. An unescaped `"cache_control"` before a colon can only be a key, because inside a JSON string every
#: quote has a backslash before it; and the comma or brace before it is then no part of a string either. Only flat
#: objects are taken out, which end where they seem to, and of these only what can be written anew as it was.
_MARK_NAMES: Final = tuple(b'"%b"' % name.encode() for name in CACHE_MARKS)
_HOLDER: Final = re.compile(rb"(?:" + b"|".join(_MARK_NAMES) + rb")\s*:\s*\{")
#: what a flat object may hold, see `run_end`
_FLAT: Final = re.compile(rb'(?:[\s,:]+|true|false|null|-?\d{1,18}(?![\d.eE])|"[^"\\{}]*"){0,1000}')
#: what stands before the next brace outside of strings, see `run_end`; a string with more escapes ends it
_NO_BRACE: Final = re.compile(rb'(?:[^{}"]+|"[^"\\]*(?:\\.[^"\\]*){0,20}"){0,1000}', re.DOTALL)
_BRACES: Final = (b"{", b"}")
_OF_TEXT: Final = frozenset({"type", "text", *CACHE_MARKS})
_SPACES: Final = re.compile(rb"\s*")
_SPACE: Final = b" \t\n\r\f\v"
#: an escape that may be half of a pair
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_write: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: JSON nested deeper than this is not written anew: encoders give up somewhere behind it
DEEPEST: Final = 100
#: A JSON text inside a message that has more values than this is not read: all other threads would wait meanwhile, a
#: quarter of a second at this number, and as much longer as it has more. Each has a comma or a bracket before it.
MOST_VALUES: Final = 200_000
_BEFORE_VALUES: Final = (",", "{", "[")

#: where providers put reasoning that they check, or read back, byte for byte
_REASONING_FIELDS: Final = ("reasoning_details", "thinking_blocks", "reasoning_signature", "encrypted_content")
#: `format` of OpenRouter's `reasoning_details` that Claude has written begins with this
_CLAUDES: Final = "anthropic"
#: Where a signature stands beside a message, a call or its function: Gemini's own API in the format of OpenAI names the
#: first, litellm the last.
_SIGNATURE_FIELDS: Final = ("extra_content", "thought_signature", "provider_specific_fields")
#: litellm also writes it into the id of a call, behind this
_SIGNED_ID: Final = "__thought__"
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
#: A tuple and no set: the type of a part may be any JSON, which cannot always be hashed.
THINKING_PARTS: Final = ("thinking", "redacted_thinking")
#: Fields of a chat message that hold thinking: litellm's, OpenRouter's, and those of hosts that show it as text.
THINKING_FIELDS: Final = (
    "thinking_blocks", "reasoning_details", "reasoning_content", "reasoning", "reasoning_signature",
)  # fmt: skip
#: where litellm puts the same once more
_LITELLM_FIELDS: Final = "provider_specific_fields"


@dataclass(frozen=True, slots=True)
class MessageOutline:
    """What a message is, whatever its conversation."""

    role: str
    #: ids of the calls it makes, in order
    calls: tuple[str, ...] = ()
    #: ids and names of those calls that have both
    names: tuple[tuple[str, str], ...] = ()
    #: id of the call it answers
    answers: str | None = None
    #: characters of its text
    length: int = 0
    #: hash of its text
    text_key: bytes = b""
    #: Hash of all of it but its cache marks and its thinking, and but for how its text is put: clients that mark a
    #: message write its one text as a list, and as a string again once the mark has moved on. They may leave out
    #: thinking later.
    identity: bytes = b""
    #: it may be dropped with its unit, but never be rewritten: signed reasoning, images, unknown parts
    sealed: bool = False
    #: it begins with thinking of Claude's, see `_thinks`
    thinks: bool = False
    #: what a provider would not take
    faults: tuple[str, ...] = ()
    #: of its role, ids, names and faults: mostly few, but they may be as long as a request
    letters: int = 0

    @property
    def is_known(self) -> bool:
        """Whether it has a role of a chat message."""
        return self.role in KNOWN_ROLES


def plain(raw: bytes) -> bytes:
    """A message, or any piece of JSON, without its cache marks, which clients move from turn to turn.

    With each goes one comma beside it. What has none is returned itself, and so is what this function returned.
    """
    for mark in _MARK_NAMES:
        if mark in raw:
            return _without(raw)
    return raw


def _without(raw: bytes) -> bytes:
    kept: list[bytes] = []
    done, opens = 0, False
    one, other = map(raw.find, _MARK_NAMES)
    while one >= 0 or other >= 0:
        at = one if other < 0 or 0 <= one < other else other
        stop = _flat_end(raw, at)
        cut = _cut(raw, at, stop, done, opens=opens) if stop is not None else None
        if cut is not None:
            kept.append(raw[done : cut[0]])
            # What was cut without a comma before it stood behind an object's bracket, which `_cut` cannot see again: a
            # mark that follows at once is the object's first field now.
            opens = raw[cut[0] : cut[0] + 1] != b","
            done = cut[1]
        behind = done if cut is not None else _behind(raw, at)
        one, other = (
            raw.find(name, behind) if 0 <= place < behind else place
            for name, place in zip(_MARK_NAMES, (one, other), strict=True)
        )
    return b"".join([*kept, raw[done:]]) if done else raw


def _flat_end(raw: bytes, at: int) -> int | None:
    """Return the end of the cache mark at `at`, or None if its object is not flat."""
    holder = _HOLDER.match(raw, at)
    if holder is None:
        return None
    end = run_end(_FLAT, raw, holder.end())
    return end + 1 if raw.startswith(b"}", end) else None


def _behind(raw: bytes, at: int) -> int:
    """Where to look on behind something that is no mark: not in its object, which a mark cut out of it would make flat.

    So nothing is left that is a mark once others are gone.
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


def _cut(raw: bytes, start: int, stop: int, done: int, *, opens: bool) -> tuple[int, int] | None:
    """What goes with the mark at `start`: the comma before it, or one behind it where it is an object's first field.

    `opens`: what was cut up to `done` was the first field, so that this is one, too, if it is next.
    """
    before = start - 1
    while before >= done and raw[before] in _SPACE:
        before -= 1
    if before < done and not opens:
        return None
    if before >= done and raw[before] not in b",{":
        return None
    if before >= done and raw[before] == ord(","):
        return before, stop
    behind = _SPACES.match(raw, stop)
    end = behind.end() if behind is not None else stop
    return before + 1, end + (raw[end : end + 1] == b",")


def keys_of(messages: Iterable[bytes]) -> tuple[bytes, ...]:
    """A hash of each message without its cache marks."""
    return tuple(map(digest, plains_of(messages)))


def plains_of(messages: Iterable[bytes]) -> list[bytes]:
    """Each message without its cache marks, itself where it has none."""
    return list(map(plain, messages))


def digest(raw: bytes) -> bytes:
    """A hash of the bytes as they are."""
    return blake2b(raw, digest_size=_KEY_BYTES).digest()


def key_of(raw: bytes) -> tuple[bytes, bool]:
    """A hash of a message without its cache marks, and whether it has any."""
    bare = plain(raw)
    return digest(bare), bare is not raw


class Hashed:
    """Messages, or elements of another format, with a hash of each, which is worked out when it is first asked for.

    Args:
        raws: the bytes of each.
        keys: what `keys_of` says of them, where it was asked before.
        marked: the places of those with cache marks, where that is known.
        unmarked: so many at the beginning are known to have none.
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
        return [*self.raws[: self._unmarked], *plains_of(self.raws[self._unmarked :])]

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """A hash of each without its cache marks."""
        return tuple(map(digest, self._plains))

    @cached_property
    def marked(self) -> frozenset[int]:
        """The places of those that have cache marks."""
        return frozenset(compress(count(), map(is_not, self._plains, self.raws)))

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """A hash of each as it stands."""
        if not self.marked:
            return self.keys
        return tuple([digest(self.raws[at]) if at in self.marked else key for at, key in enumerate(self.keys)])


_is_some: Final = cast("Callable[[bytes | None], TypeGuard[bytes]]", partial(is_not, None))


def instead(original: Iterable[bytes], changes: Mapping[int, bytes | None]) -> tuple[bytes, ...]:
    """Bytes with others in the place of some; None stands for nothing."""
    return tuple(filter(_is_some, map(changes.get, count(), original)))


def hashed(raws: Sequence[bytes] | Hashed) -> Hashed:
    """These with their hashes."""
    return raws if isinstance(raws, Hashed) else Hashed(raws)


def encode(value: object) -> bytes:
    """Compact JSON. What UTF-8 has no bytes for (half a surrogate pair, out of a JSON text in the text) reads `?`."""
    return _write(value).encode("utf-8", "replace")


def decode(raw: bytes) -> Any:
    """The value of a message that is not sealed."""
    return json.loads(raw.decode())


def read(raw: bytes) -> tuple[Any, bool]:
    """The value of any bytes, None for what is no JSON; and whether writing it anew would lose something."""
    odd = _Odd()
    try:
        value = odd.decoder.decode(raw.decode())
    except (ValueError, RecursionError):
        return None, True
    is_odd = odd.found or (_may_be_deep(raw) and is_deep(value))
    return value, is_odd or (_SURROGATE.search(raw) is not None and not _is_writable(value))


class _Odd:
    """Finds what JSON allows, or what is often written as JSON, that does not come back as it was."""

    def __init__(self) -> None:
        self.found = False
        self.decoder = json.JSONDecoder(
            object_pairs_hook=self._pairs, parse_constant=self._constant, parse_int=self._int, parse_float=self._float
        )

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        self.found = self.found or len(value) != len(pairs)
        return value

    def _constant(self, name: str) -> float:
        self.found = True
        return float(name)

    def _int(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # more digits than Python converts
            self.found = True
            return 0

    def _float(self, digits: str) -> float:
        value = float(digits)
        self.found = self.found or isinf(value)
        return value


def _is_writable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def has_too_many_values(text: str) -> bool:
    """Whether a JSON text is not read for what it says, see `MOST_VALUES`; told without reading it."""
    return len(text) > MOST_VALUES and sum(map(text.count, _BEFORE_VALUES)) > MOST_VALUES


def _may_be_deep(raw: bytes) -> bool:
    return raw.count(b"{") + raw.count(b"[") >= DEEPEST


def is_deep(value: object) -> bool:
    """Nested deeper than can be relied on."""
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for node in level if isinstance(node, dict | list) for inner in _children(node)]
        if not level:
            return False
    return True


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def text_of(raw: bytes) -> str:
    """The text of any message."""
    value, _ = read(raw)
    return text_parts(value.get("content")) if isinstance(value, dict) else ""


def text_parts(content: object) -> str:
    """The text of a message's content, whether a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def outline_of(raw: bytes) -> MessageOutline:
    """Read a message, but for its cache marks; never raises."""
    raw = plain(raw)
    message, is_odd = read(raw)
    if not isinstance(message, dict):
        return MessageOutline(UNKNOWN, sealed=True, identity=digest(raw))
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
        answers=answers,
        length=len(text),
        text_key=text_key,
        identity=digest(raw) if is_odd else _identity(raw, message, text_key),
        sealed=is_odd or _is_sealed(message, content),
        thinks=role == "assistant" and _thinks(message),
        faults=faults,
        letters=sum(map(len, chain((role, answers or ""), ids, chain.from_iterable(names), faults))),
    )


def is_one_text(content: object) -> bool:
    """Whether a content is one text, put as a string or as a list: clients change that from turn to turn."""
    if not isinstance(content, list):
        return isinstance(content, str)
    part = content[0] if len(content) == 1 else None
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and part.keys() <= _OF_TEXT
    )


def _identity(raw: bytes, message: Message, text_key: bytes) -> bytes:
    bare = without_thinking(message)
    if not is_one_text(bare.get("content")):
        # A client may take the thinking out itself later, so what is left is hashed the same way with and without it.
        may_think = bare is not message or message.get("role") == "assistant"
        return digest(encode(bare) if may_think else raw)
    rest = {name: value for name, value in bare.items() if name != "content" and name not in CACHE_MARKS}
    return digest(encode(rest) + text_key)


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
    """Return whether a part of a message's content is thinking of Claude's."""
    return isinstance(part, Mapping) and part.get("type") in THINKING_PARTS


def _calls(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _call_ids(message: Message, calls: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Ids of the calls a message makes; a call of the old `function_call` kind is known by its function's name."""
    ids = [str(call.get("id")) for call in calls]
    old = message.get("function_call")
    if isinstance(old, Mapping):
        ids.append(f"function:{old.get('name')}")
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
    """Whether something beside its content ties a message to what the model thought, so that nothing of it changes."""
    if any(message.get(name) for name in _REASONING_FIELDS) or _has_signature(message):
        return True
    calls = message.get("tool_calls")
    return bool(calls) and (not isinstance(calls, list) or any(_is_signed_call(call) for call in calls))


def _thinks(message: Message) -> bool:
    """Whether thinking of Claude's stands beside it, as litellm and OpenRouter put it there.

    Anthropic looks whether a turn begins so. Nobody else does, so that signed reasoning of other models is none.
    """
    blocks, details = message.get("thinking_blocks"), message.get("reasoning_details")
    if isinstance(blocks, list) and blocks:
        return True
    return isinstance(details, list) and any(_is_claudes(one) for one in details)


def _is_claudes(detail: object) -> bool:
    if not isinstance(detail, Mapping):
        return False
    return bool(detail.get("signature")) or str(detail.get("format")).startswith(_CLAUDES)


def _is_signed_call(call: object) -> bool:
    """A call that is not a plain function call, or carries a signature of the model's thought beside it."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return True
    return _SIGNED_ID in str(call.get("id")) or _has_signature(call) or _has_signature(call["function"])


def _has_signature(holder: Mapping[str, Any]) -> bool:
    """Return True if a field for signatures says something; some clients fill it with nulls."""
    said = (holder.get(name) for name in _SIGNATURE_FIELDS)
    return any(any(value.values()) if isinstance(value, Mapping) else bool(value) for value in said)


def is_plain_text(part: object) -> bool:
    """Text and nothing that depends on its exact wording (annotations point at characters)."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind in _REASONING_PARTS:
        return False
    return isinstance(part.get("text"), str) and _OF_TEXT.issuperset(part)


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
