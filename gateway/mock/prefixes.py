"""Compute a digest of the content before a thinking block, and find where two such contents differ."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from gateway.mock.thinking_blocks import THINKING_TYPES
from gateway.mock.wire import JsonObject

#: Digests that are kept to find where a prefix differs; older ones are dropped.
MAX_REMEMBERED: Final = 100_000

_DIGEST_BYTES: Final = 12
_encode = msgspec.json.Encoder(order="sorted").encode


class PrefixPart(NamedTuple):
    """The name of one part of a prefix, for errors, and the digest of the prefix up to and including this part."""

    name: str
    digest: bytes


class Prefix:
    """The content of a request up to some point, without thinking blocks. `add` extends it."""

    def __init__(self, system: object, tools: list[JsonObject] | None) -> None:
        """Start with the system prompt and the tools.

        A tool with `defer_loading` is added later, at each block that refers to it.
        """
        offered = tools or []
        self._deferred = {str(tool.get("name")): tool for tool in offered if tool.get("defer_loading") is True}
        loaded = [_plain(tool) for tool in offered if tool.get("defer_loading") is not True]
        self._parts: list[PrefixPart] = []
        self._grow("system", [_plain(block) for block in blocks_of(system)])
        self._grow("tools", loaded)
        self._start = list(self._parts)

    @property
    def digest(self) -> bytes:
        """Return the digest of all parts."""
        return self._parts[-1].digest

    @property
    def parts(self) -> list[PrefixPart]:
        """Return a copy of the parts."""
        return list(self._parts)

    @property
    def start(self) -> bytes:
        """Return the digest of the system prompt and the tools."""
        return self._start[-1].digest

    def restart(self) -> None:
        """Remove everything except the system prompt and the tools, as a compaction block does."""
        self._parts = list(self._start)

    def resume(self, name: str, digest: bytes) -> None:
        """Continue after a signed compaction block. `digest`: of the content that the block replaces."""
        self._parts = [*self._start, PrefixPart(name, digest)]

    def add(self, name: str, role: str, block: JsonObject, *, opens: bool) -> None:
        """Add a content block of a message. `opens`: it is the first block of its message that is not thinking."""
        referenced = {tool: self._deferred.get(tool) for tool in _references(block)}
        tools = [_plain(tool) for tool in referenced.values() if tool is not None]
        self._grow(name, [role if opens else "", _plain(block), *tools])

    def _grow(self, name: str, value: object) -> None:
        before = self._parts[-1].digest if self._parts else b""
        digest = hashlib.blake2b(before + _encode(value), digest_size=_DIGEST_BYTES).digest()
        self._parts.append(PrefixPart(name, digest))


class PrefixMemory:
    """Store the digests of earlier prefixes, so that an error can name the first part that changed."""

    def __init__(self) -> None:
        self._before: OrderedDict[bytes, bytes] = OrderedDict()

    def remember(self, prefix: Prefix) -> None:
        """Store the digests of a prefix."""
        before = b""
        for part in prefix.parts:
            # The content that a compaction block replaces is already stored, from earlier requests.
            self._before.setdefault(part.digest, before)
            self._before.move_to_end(part.digest)
            before = part.digest
        while len(self._before) > MAX_REMEMBERED:
            self._before.popitem(last=False)

    def clear(self) -> None:
        """Remove all digests."""
        self._before.clear()

    def first_change(self, wanted: bytes, parts: list[PrefixPart]) -> str | None:
        """Return the name of the first of `parts` that is not in the prefix with the digest `wanted`.

        Return None if that prefix is no longer stored, or if `parts` is a shorter version of it.
        """
        known: set[bytes] = set()
        while wanted in self._before:
            known.add(wanted)
            wanted = self._before[wanted]
        if wanted:
            return None
        return next((part.name for part in parts if part.digest not in known), None)


def blocks_of(content: object) -> list[JsonObject]:
    """Return the content blocks of a message or system prompt. A string becomes one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def is_thinking(block: JsonObject) -> bool:
    """Return True for a block that holds thinking."""
    return block.get("type") in THINKING_TYPES


def _plain(block: JsonObject) -> JsonObject:
    """Return a block without parts that do not change its meaning: cache marks, nulls, and queries of URLs."""
    plain = _bare(block)
    if "content" in plain:
        plain["content"] = [_bare(inner) for inner in blocks_of(plain["content"])] or plain["content"]
    return plain


def _bare(block: JsonObject) -> JsonObject:
    """Do the same as `_plain`, but not for the blocks inside a tool result."""
    bare = {key: value for key, value in block.items() if key != "cache_control" and value is not None}
    source = bare.get("source")
    if isinstance(source, dict) and isinstance(source.get("url"), str):
        # A signed URL can be renewed for the same file. The path identifies the file, because it is not downloaded.
        bare["source"] = {**source, "url": source["url"].partition("?")[0]}
    return bare


def _references(value: object) -> Iterator[str]:
    """Yield the names of the tools that a content block refers to."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            if item.get("type") == "tool_reference":
                yield str(item.get("tool_name", item.get("name")))
            pending += item.values()
        elif isinstance(item, list):
            pending += item
