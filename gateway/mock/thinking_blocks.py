"""Sign thinking and compaction blocks, and read signatures back.

A signature contains everything that is needed to check the block in a later request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final, TypeVar

import msgspec

#: Types of content blocks that hold thinking.
THINKING_TYPES: Final = frozenset({"thinking", "redacted_thinking"})

#: This key is not a secret: signatures must be the same in every run, so that recorded sessions can be replayed.
_KEY: Final = b"built-in provider"
_MAC_BYTES: Final = 12

S = TypeVar("S", bound=msgspec.Struct)


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """The signed data of a thinking block."""

    account: str
    """The only account that may send the block; empty: every account."""
    model: str
    """The name of the rules of the model that created the block."""
    prefix: bytes
    """The digest of the content before the block."""
    previous: bytes
    """The identifier of the previous thinking block at that time; empty if there was none."""
    depth: int
    """The number of earlier thinking blocks at that time."""
    chain: bytes
    """The digest of the identifiers of all earlier thinking blocks."""
    response: int
    """The number of the call that created the block."""
    index: int
    """The position of the block among the thinking blocks of its response."""
    count: int
    """The number of thinking blocks in its response."""
    compaction: bytes = b""
    """The identifier of the signed compaction block in the request at that time; empty if there was none."""


class CompactionSeal(msgspec.Struct, frozen=True, array_like=True):
    """The signed data of a compaction block."""

    content: bytes
    """The digest of the summary."""
    start: bytes
    """The digest of the system prompt and the tools of the request."""
    end: bytes
    """The digest of the whole request, which kept turns continue; empty if their thinking does not stay valid."""
    role: str
    """The role of the last summarized message."""
    before: list[bytes]
    """The identifiers of the signed compaction blocks that this block replaces."""


def sign(seal: Seal | CompactionSeal) -> str:
    """Return the signature of a block."""
    data = msgspec.msgpack.encode(seal)
    return base64.b64encode(_mac(data) + data).decode()


def read(signature: str, kind: type[S]) -> S | None:
    """Return the signed data of a block, decoded as `kind`, or None if this provider did not create the signature."""
    try:
        raw = base64.b64decode(signature, validate=True)
        mac, data = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        return msgspec.msgpack.decode(data, type=kind) if hmac.compare_digest(mac, _mac(data)) else None
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return None


def identifier(signature: str) -> bytes:
    """Return a short identifier of the block with this signature.

    It does not depend on the visible text. The real API accepts a block with edited text, because the signature
    contains the thinking itself.
    """
    return hashlib.blake2b(signature.encode(), digest_size=8).digest()


def signature_of(block: dict[str, object]) -> object:
    """Return the signature of a thinking block as sent; redacted thinking has it under `data`."""
    return block.get("data" if block.get("type") == "redacted_thinking" else "signature")


def _mac(data: bytes) -> bytes:
    return hmac.digest(_KEY, data, "sha256")[:_MAC_BYTES]
