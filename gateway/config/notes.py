"""Report settings that are valid but may be a mistake, such as keys without effect.

No line repeats a text that stands in the file: a secret may stand in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from gateway.config.models import Model
from gateway.config.schema import Settings
from gateway.core.routing import is_of_provider, is_pattern


def without_effect(settings: Settings) -> list[str]:
    """What is set and changes nothing, as another key stands against it."""
    checks = (_unreached, _unasked, _unread, _unlimited, _kept_longer, _keyless)
    return [note for check in checks for note in check(settings)]


def _unreached(settings: Settings) -> Iterator[str]:
    """Routes that no call takes by the name it gives."""
    seen: dict[str, int] = {}
    for index, row in enumerate(settings.models):
        earlier = _earlier(row, seen, is_special=is_of_provider(row.match, settings.providers))
        if earlier is not None:
            yield f"models[{index}].match: no call comes here: models[{earlier}] takes all its names; put it before"
        seen.setdefault(row.match, index)


def _earlier(row: Model, seen: dict[str, int], *, is_special: bool) -> int | None:
    """The route before it that surely takes all its calls; of two patterns only `*` and the same one are sure.

    `is_special`: a route for names that begin with a provider's comes before all that are for others, too.
    """
    if row.match in seen:
        return seen[row.match]
    is_name = not is_pattern(row.match)
    others = () if is_special else seen.items()
    return next((at for match, at in others if match == "*" or (is_name and fnmatchcase(row.match, match))), None)


def _unasked(settings: Settings) -> Iterator[str]:
    """A model for summaries that nobody asks for."""
    context = settings.context
    if context.summary.model is not None and "summarize" not in context.strategies:
        yield "context.summary.model: is not called, as context.strategies has no summarize; add it there"


def _unread(settings: Settings) -> Iterator[str]:
    """Authorities to trust where anybody is trusted."""
    for name, provider in settings.providers.items():
        if provider.tls.ca_file is not None and not provider.tls.verify:
            yield f"providers.{name}.tls.ca_file: is not read, as verify: false trusts anybody; leave verify out"


def _unlimited(settings: Settings) -> Iterator[str]:
    """Windows of client keys without a limit; that of sessions also serves those with a budget of their own."""
    for index, key in enumerate(settings.auth.keys):
        budget = key.budget
        if budget.window is not None and (budget.tokens, budget.usd, budget.calls) == (None, None, None):
            yield f"auth.keys[{index}].budget.window: there is nothing to refill; set tokens, usd or calls"


def _kept_longer(settings: Settings) -> Iterator[str]:
    """A time to live that is over before calls of workers that are gone are settled."""
    if settings.kept_s > settings.sessions.ttl_s:
        yield (
            f"sessions.ttl: sessions are kept for {settings.kept_s:g} s, which is twice budget.lease_s, as a call may "
            "be settled as late as that; lower budget.lease_s"
        )


def _keyless(settings: Settings) -> Iterator[str]:
    """A provider that is to be called with a key, where callers send the gateway's own instead of theirs."""
    name, has_clients = settings.default_provider, bool(settings.auth.keys) or settings.auth.required
    provider = settings.providers.get(name) if name is not None and has_clients else None
    if provider is None or provider.adapter != "http" or provider.auth == "none":
        return
    if not provider.holds_credential:
        yield (
            f"providers.{name}.key: is empty, and callers send a client key: calls reach {name} without a key, unless "
            "a caller sends both"
        )
