"""What of a call lies elsewhere, where nobody here counts it: content that the provider keeps, a bill that comes later.

A client is told of both, in `x-context-unseen` and `x-session-unmetered`.
"""

from __future__ import annotations

from typing import Final

from gateway.core.counting.measure import Wire
from gateway.dialects.fields import Fields, decode, is_given

#: fields of a Responses request that stand for content which its provider has
_KEPT: Final = ("previous_response_id", "conversation", "prompt")
#: an item that stands for one of an earlier answer; inside a JSON text its quotes would have backslashes before them
_REFERENCE: Final = "item_reference"
_REFERENCE_MARK: Final = b'"item_reference"'


def kept_elsewhere(fields: Fields, wire: Wire | None) -> tuple[str, ...]:
    """What of a request stands for content that its provider keeps: it is neither weighed nor cut, and is billed."""
    if wire != "responses":
        return ()
    found = [name for name in _KEPT if is_given(fields, name)]
    if "input" in fields and _REFERENCE_MARK in bytes(fields["input"]):
        found.append(_REFERENCE)
    return tuple(found)


def is_in_background(fields: Fields, wire: Wire | None) -> bool:
    """Whether an answer is made later, and billed when it is."""
    return wire == "responses" and "background" in fields and decode(fields["background"]) not in (None, False)
