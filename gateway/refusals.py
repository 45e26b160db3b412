"""What providers refused lately, so that it is not asked of them with every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.core.routing import Route

#: models that are remembered
_MOST: Final = 1024
#: seconds after which a model is asked again: its provider may have learned the field
_FOR_S: Final = 3600.0


class Refusals:
    """Models that refuse one certain field of a request. Each worker has its own, and finds out by itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}

    def add(self, route: Route) -> None:
        """Note that this model refused the field just now."""
        self._since.pop((route.provider, route.model), None)
        if len(self._since) >= _MOST:
            del self._since[next(iter(self._since))]
        self._since[route.provider, route.model] = self._clock()

    def __contains__(self, route: Route) -> bool:
        """Whether this model refused the field lately."""
        since = self._since.get((route.provider, route.model))
        return since is not None and self._clock() - since < _FOR_S
