"""Read the name and the group of a caller from the claims of a verified token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.core.identity import is_valid
from gateway.core.ledger.session_key import BEARER_PREFIX

#: the group whose rights all callers have that are in no other one
OTHERS: Final = "*"
#: characters of the longest name
MOST_NAMED: Final = 255 - len(BEARER_PREFIX)
#: characters of a name that a namespace cannot contain, and the colon, which escapes them
_ESCAPED: Final = re.compile(r"[^A-Za-z0-9._-]")


def claim_at(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim, or None. A path with dots leads into claims that are objects, unless a claim has this name."""
    if path in claims:
        return claims[path]
    name, dot, rest = path.partition(".")
    inner = claims.get(name)
    return claim_at(inner, rest) if dot and isinstance(inner, dict) else None


def namespace_of(name: object) -> str | None:
    """Return the namespace of a caller with this name in its token; None if the name is empty, too long or not a text.

    Different names have different namespaces: each character that a namespace cannot contain is written as a colon and
    two hexadecimal digits for each of its bytes.
    """
    if not isinstance(name, str) or not name:
        return None
    namespace = BEARER_PREFIX + _ESCAPED.sub(_escape, name)
    return namespace if is_valid(namespace) else None


def _escape(match: re.Match[str]) -> str:
    return "".join([f":{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass")])


def group_of(value: object, known: Iterable[str]) -> str | None:
    """Return the first known group that a claim names, else `OTHERS` if that is known, else None.

    Args:
        value: the claim: a group or a list of groups.
        known: the configured groups in order.
    """
    named = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    known = list(known)
    found = next((group for group in known if group != OTHERS and group in named), None)
    return found or (OTHERS if OTHERS in known else None)
