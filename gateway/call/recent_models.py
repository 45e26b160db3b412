"""Remember for an hour which models refused something, such as a request field. Each worker remembers its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.core.bounded import BoundedDict
from gateway.core.routing import Route
from gateway.dialects.limit_error import NO_OUTPUT_RULE, OutputRule

#: maximum number of remembered models
_MAX_MODELS: Final = 1024
#: seconds after which a model is tried again: its provider may have changed
_REMEMBERED_S: Final = 3600.0


class RecentModels:
    """Models that showed one certain behavior recently. Workers do not share it: each one observes it itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = BoundedDict[tuple[str, str], float](_MAX_MODELS)

    def add(self, route: Route) -> None:
        """Note that this model has shown the behavior now."""
        self._since[route.provider, route.model] = self._clock()

    def __contains__(self, route: Route) -> bool:
        """Return whether this model has shown the behavior within the last hour."""
        since = self._since.get((route.provider, route.model))
        return since is not None and self._clock() - since < _REMEMBERED_S


class OutputRules:
    """Output rules of models whose provider refused an output limit recently. Workers do not share them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known = BoundedDict[tuple[str, str, bool], tuple[OutputRule, float]](_MAX_MODELS)

    def of(self, route: Route, *, is_stream: bool) -> OutputRule:
        """Return the rule of a model. Some providers accept a lower limit if the response is not streamed."""
        known = self._known.get((route.provider, route.model, is_stream))
        return known[0] if known is not None and self._clock() - known[1] < _REMEMBERED_S else NO_OUTPUT_RULE

    def remember(self, route: Route, rule: OutputRule, *, is_stream: bool) -> None:
        """Remember a rule that the provider has accepted."""
        self._known[route.provider, route.model, is_stream] = rule, self._clock()
