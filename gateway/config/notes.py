"""Report settings that are valid but may be a mistake, such as keys without effect.

No note repeats a text of the file, because a secret can be in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from gateway.config.models import Model
from gateway.config.schema import Settings
from gateway.core.routing import is_of_provider, is_pattern


def without_effect(settings: Settings) -> list[str]:
    """Return a note for each setting that has no effect because of another one."""
    checks = (
        _unreachable_routes,
        _unused_summary_model,
        _ignored_ca_files,
        _windows_without_limit,
        _longer_ttl,
        _missing_key,
    )
    return [note for check in checks for note in check(settings)]


def _unreachable_routes(settings: Settings) -> Iterator[str]:
    """Yield a note for each route that no call can reach."""
    seen: dict[str, int] = {}
    for index, row in enumerate(settings.models):
        earlier = _earlier(row, seen, is_special=is_of_provider(row.match, settings.providers))
        if earlier is not None:
            yield (
                f"models[{index}].match: is never used, because models[{earlier}] matches all its names; move it before"
            )
        seen.setdefault(row.match, index)


def _earlier(row: Model, seen: dict[str, int], *, is_special: bool) -> int | None:
    """Return an earlier route that certainly matches all its calls: `*`, the same pattern, or a pattern for a name.

    `is_special`: the route only matches names that begin with a provider's, and precedes the routes that do not.
    """
    if row.match in seen:
        return seen[row.match]
    is_name = not is_pattern(row.match)
    others = () if is_special else seen.items()
    return next((at for match, at in others if match == "*" or (is_name and fnmatchcase(row.match, match))), None)


def _unused_summary_model(settings: Settings) -> Iterator[str]:
    """Yield a note about a summary model that is never called."""
    context = settings.context
    if context.summary.model is not None and "summarize" not in context.strategies:
        yield "context.summary.model: is never called, because context.strategies has no summarize; add it there"


def _ignored_ca_files(settings: Settings) -> Iterator[str]:
    """Yield a note for each ca_file without effect."""
    for name, provider in settings.providers.items():
        if provider.tls.ca_file is not None and not provider.tls.verify:
            yield (
                f"providers.{name}.tls.ca_file: is not used, because verify: false accepts every "
                "certificate; remove verify"
            )


def _windows_without_limit(settings: Settings) -> Iterator[str]:
    """Yield a note for each window of client keys, tokens or a subagent without a limit.

    The window of sessions is not checked, because it also applies to sessions with their own budget.
    """
    budgets = {f"auth.keys[{index}].budget": key.budget for index, key in enumerate(settings.auth.keys)}
    groups = settings.auth.jwt.groups if settings.auth.jwt is not None else {}
    budgets |= {f"auth.jwt.groups.{name}.budget": group.budget for name, group in groups.items()}
    budgets |= {f"auth.groups.{name}.budget": group.budget for name, group in settings.auth.groups.items()}
    budgets["auth.budget"] = settings.auth.budget
    budgets |= {f"budget.agents.{name}": budget for name, budget in settings.budget.agents.items()}
    for path, budget in budgets.items():
        if budget.window is not None and (budget.tokens, budget.usd, budget.calls) == (None, None, None):
            yield f"{path}.window: has no limit to refill; set tokens, usd or calls"


def _longer_ttl(settings: Settings) -> Iterator[str]:
    """Yield a note if sessions are kept longer than `ttl`, until orphaned calls are settled."""
    if settings.kept_s > settings.sessions.ttl_s:
        yield (
            f"sessions.ttl: sessions are kept for {settings.kept_s:g} s, twice budget.lease_s, because a call can be "
            "settled as late as that; lower budget.lease_s"
        )


def _missing_key(settings: Settings) -> Iterator[str]:
    """Yield a note if the default provider has no key, while callers send client keys instead of theirs."""
    name, has_clients = settings.default_provider, settings.auth.needs_credential
    provider = settings.providers.get(name) if name is not None and has_clients else None
    if provider is None or provider.adapter != "http" or provider.auth == "none":
        return
    if not provider.holds_credential:
        yield (
            f"providers.{name}.key: is empty, and callers send a client key, so calls reach {name} "
            "without a key unless "
            "a caller sends both"
        )
