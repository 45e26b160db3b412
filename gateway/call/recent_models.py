"""Remember for an hour, in each worker, what models refused, for example a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.core.bounded import BoundedDict
from gateway.core.routing import Route
from gateway.dialects.limit_error import AS_USUAL, OutputRule

#: models that are remembered
_MOST: Final = 1024
#: seconds after which a model is tried again: its provider may have changed
_FOR_S: Final = 3600.0


class RecentModels:
    """Models of which one certain thing was seen lately. Each worker has its own, and finds out by itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = BoundedDict[tuple[str, str], float](_MOST)

    def add(self, route: Route) -> None:
        """Note that it was seen of this model just now."""
        self._since[route.provider, route.model] = self._clock()

    def __contains__(self, route: Route) -> bool:
        """Whether it was seen of this model lately."""
        since = self._since.get((route.provider, route.model))
        return since is not None and self._clock() - since < _FOR_S


class OutputRules:
    """The rules of models whose provider refused an output limit lately. Each worker has its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known = BoundedDict[tuple[str, str, bool], tuple[OutputRule, float]](_MOST)

    def of(self, route: Route, *, is_stream: bool) -> OutputRule:
        """Return the rule of a model. Some providers take less where the response is not streamed."""
        known = self._known.get((route.provider, route.model, is_stream))
        return known[0] if known is not None and self._clock() - known[1] < _FOR_S else AS_USUAL

    def keep(self, route: Route, rule: OutputRule, *, is_stream: bool) -> None:
        """Remember a rule that the provider accepted."""
        self._known[route.provider, route.model, is_stream] = rule, self._clock()
