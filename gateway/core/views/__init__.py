"""Show requests of all APIs as chat messages, so that one set of rules trims them all."""

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
#: formats whose messages can be chosen among
VIEWED: Final = frozenset(_VIEWS)


def view_of(wire: Wire, elements: Sequence[bytes] | Hashed, book: ElementCache | None = None) -> View:
    """The elements of a request's array, as they stand in its body, as chat messages.

    `book`: remembers what was read of each; a long conversation is the same from turn to turn but for its end.
    """
    return _VIEWS[wire](hashed(elements), book)


__all__ = ["VIEWED", "ElementCache", "View", "new_faults", "view_of"]
