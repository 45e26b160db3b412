"""Find the session id of a call in headers or body, or derive one from the conversation.

A derived id is a hash of what stays the same within a conversation and differs between conversations: client key, model
family, system text, and the whole first user item. A prefix of that item is not enough, because some clients begin
every session with the same instructions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from gateway.core.conversation.message import CACHE_MARKS
from gateway.core.http.gateway_headers import PARENT

# "." and ".." would be treated as folders in a path
_VALID: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]{1,255}\Z")
#: the ids that `is_valid` accepts, as a pattern of JSON Schema
ID_PATTERN: Final = r"^(?!\.{1,2}$)[A-Za-z0-9._:-]{1,255}$"
#: the ids that `is_valid` accepts, for messages
ID_FORM: Final = '1-255 characters of A-Z a-z 0-9 . _ : - (neither "." nor "..")'

#: most characters of a tag, which has the form of a session id otherwise
LONGEST_TAG: Final = 64

#: session headers of other gateways and of clients, in order
KNOWN_HEADERS: Final = (
    b"x-litellm-session-id",
    b"helicone-session-id",
    b"x-portkey-trace-id",
    b"x-bf-session-id",
    b"agent-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"thread-id",
    b"x-opencode-session",
    b"x-session-affinity",
    b"x-openwebui-chat-id",
    b"x-amp-thread-id",
    b"conversation_id",
)
#: whitespace around a header value, which is not part of it (RFC 9110, section 5.5)
_WHITESPACE: Final = b" \t"
_LONGEST_MODEL_NAME: Final = 256
#: sets of header names for which the session headers are cached
_KNOWN_NAMES: Final = 128
#: created once, because creating an encoder costs more than encoding a small part
_canonical: Final = json.JSONEncoder(sort_keys=True).encode
#: `gpt-4o-2024-08-06`, `claude-sonnet-4-5-20250929`, `…-latest`, `…@20250929`: one family under several dates
_MODEL_DATE: Final = re.compile(r"(?:[-@](?:\d{8}|\d{4}-\d{2}-\d{2}|latest|preview))+\Z")


def is_valid(session_id: str) -> bool:
    """Return whether a text has the form of a session id, or of another name that clients choose: see `ID_FORM`."""
    return _VALID.match(session_id) is not None


def is_tag(tag: object) -> bool:
    """Return whether a value is a tag, by which usage is added up: a name of at most `LONGEST_TAG` characters."""
    return isinstance(tag, str) and len(tag) <= LONGEST_TAG and is_valid(tag)


def from_headers(headers: Mapping[bytes, bytes], id_headers: Sequence[bytes]) -> str | None:
    """Return the first valid session id among the headers (names in lower case), or None."""
    for name in _session_headers(tuple(headers), tuple(id_headers)):
        value = headers[name].strip(_WHITESPACE).decode("latin-1")
        if is_valid(value):
            return value
    return None


@lru_cache(_KNOWN_NAMES)
def _session_headers(names: tuple[bytes, ...], id_headers: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return which of these headers can name a session, the preferred first; computed once for the same names."""
    known = filter(frozenset(names).__contains__, (*id_headers, *KNOWN_HEADERS))
    others = [name for name in names if name.endswith(b"-session-id") and name.startswith(b"x-") and name != PARENT]
    return (*known, *others)


def from_body(fields: Mapping[str, Any]) -> str | None:
    """Return the first valid session id among the decoded body fields (`BODY_FIELDS`), or None."""
    metadata = fields.get("metadata")
    conversation = fields.get("conversation")
    # Codex: subagents share the session id, and each has its own thread id.
    client = client if isinstance(client := fields.get("client_metadata"), dict) else {}
    candidates = (
        metadata.get("session_id") if isinstance(metadata, dict) else None,
        fields.get("session_id"),
        conversation.get("id") if isinstance(conversation, dict) else conversation,
        client.get("session_id"),
        client.get("thread_id"),
        fields.get("prompt_cache_key"),
        _anthropic_user_id(metadata.get("user_id")) if isinstance(metadata, dict) else None,
    )
    return next((value for value in candidates if isinstance(value, str) and is_valid(value)), None)


#: the top-level fields that `from_body` reads
BODY_FIELDS: Final = ("metadata", "session_id", "conversation", "client_metadata", "prompt_cache_key")


def _anthropic_user_id(user_id: object) -> str | None:
    """Return the session id in `user_…_account_…_session_UUID` of Claude Code, or in the JSON of its later versions."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            value = json.loads(user_id).get("session_id")
        except (ValueError, AttributeError, RecursionError):
            return None
        return value if isinstance(value, str) else None
    _, marker, session = user_id.rpartition("_session_")
    return session if marker else None


def derive(namespace: str, model: str | None, opening: Sequence[str]) -> str:
    """Return a session id for a call that names none. `opening`: the system texts and the first user item."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (namespace, model_family(model or ""), *opening)]
    digest = hashlib.sha256(b"".join([b"%d:%b" % (len(part), part) for part in parts]))
    return f"auto-{digest.hexdigest()[:24]}"


def model_family(model: str) -> str:
    """Return the name of a model without provider and date."""
    return _MODEL_DATE.sub("", model.rpartition("/")[2][:_LONGEST_MODEL_NAME])


def text_of(content: object) -> str:
    """Return the text that identifies the content of an item; parts that are not text as canonical JSON.

    Cache marks are left out, because clients move them from turn to turn.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(text_of(part) for part in content)
    if isinstance(content, dict):
        text = content.get("text")
        if isinstance(text, str):
            return text
        kept = {name: value for name, value in content.items() if name not in CACHE_MARKS}
        return _canonical(kept)
    return json.dumps(content)


def hash_of(raw: bytes | memoryview) -> str:
    """Return a hash of raw bytes, to identify content that is too large to decode."""
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"
