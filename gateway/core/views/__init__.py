"""Convert requests of all APIs to chat messages and back, so that one set of rules trims them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.core.conversation.message import Hashed, hashed
from gateway.core.counting.measure import Wire
from gateway.core.views.check import new_faults
from gateway.core.views.messages import MessagesView
from gateway.core.views.responses import ResponsesView
from gateway.core.views.view import ChatView, ElementCache, View

_VIEWS: Final[Mapping[Wire, Callable[[Hashed, ElementCache | None], View]]] = {
    "chat": ChatView,
    "messages": MessagesView,
    "responses": ResponsesView,
}
#: formats whose messages can be trimmed
VIEWED: Final = frozenset(_VIEWS)


def view_of(wire: Wire, elements: Sequence[bytes] | Hashed, cache: ElementCache | None = None) -> View:
    """Return the elements of a request's array, in the bytes of the body, as a view of chat messages.

    `cache` caches what was parsed of each element; a long conversation only differs at its end from turn to turn.
    """
    return _VIEWS[wire](hashed(elements), cache)


__all__ = ["VIEWED", "ElementCache", "View", "new_faults", "view_of"]
