"""Find the attempts of a refused request that the provider does not bill.

Anthropic reports a refusal with status 200 and `stop_reason: refusal`. A refusal before any output is not billed,
except in a few categories. A refusal after output is billed. The usage shows the tokens in any case. With `fallbacks`
another model is called after a refusal. `usage.iterations` has the passes of each model, and each attempt is judged
separately.

https://platform.claude.com/docs/en/build-with-claude/refusals-and-fallback,
https://platform.claude.com/docs/en/release-notes/overview (24 September 2026). Which categories are billed is in
config/providers.yaml.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import Final

from gateway.core.usage import Usage
from gateway.core.values import dataclass
from gateway.dialects.base import ParsedResponse
from gateway.dialects.reported import ReportedUsage

_REFUSED: Final = "refusal"
_COUNTS: Final = tuple(field.name for field in fields(Usage))
_NOTHING: Final = ReportedUsage(0, 0, None)


@dataclass(frozen=True, slots=True)
class _Refused:
    """An attempt that was refused before any output. `model`: None if the usage names none."""

    model: str | None
    category: str | None
    usage: Usage

    def __str__(self) -> str:
        who = f"{self.model} " if self.model is not None else ""
        category = self.category or "no category"
        return f"{who}refused before any output ({category}): {self.usage.input_tokens:,} input tokens"


def without_free_attempts(response: ParsedResponse, categories: Collection[str]) -> tuple[ParsedResponse, str | None]:
    """Return the response with the usage that its provider bills, and a note about what is not billed, or None.

    `categories`: the categories in which a refusal before any output is billed.
    """
    free = [attempt for attempt in _refused(response) if attempt.category not in categories]
    if not free:
        return response, None
    reported = response.usage or _NOTHING
    if reported.attempts:
        billed = _without(reported, free)
    else:
        billed = replace(_NOTHING, searches=reported.searches, request_tokens=0)
    return replace(response, usage=billed), "; ".join(map(str, free))


def _refused(response: ParsedResponse) -> Iterator[_Refused]:
    """Yield the attempts that were refused before any output."""
    reported = response.usage or _NOTHING
    is_refused = response.finish_reason == _REFUSED
    if not reported.attempts:
        if is_refused and not reported.output_tokens and not response.output_estimate:
            yield _Refused(None, response.refusal, reported.complete(0, 0)[0])
        return
    # There is one fallback block for each model that refused and was followed by another one, in order.
    *earlier, last = reported.attempts
    for index, (model, usage) in enumerate(earlier):
        if not usage.output_tokens:
            yield _Refused(
                model, response.fallback_refusals[index] if index < len(response.fallback_refusals) else None, usage
            )
    if is_refused and not last[1].output_tokens:
        yield _Refused(last[0], response.refusal, last[1])


def _without(reported: ReportedUsage, free: Sequence[_Refused]) -> ReportedUsage:
    """Return the usage without some attempts. Its `request_tokens` is 0: it does not predict the next request."""
    rest, named = reported, dict(reported.by_model)
    for attempt in free:
        known = {name: number for name in _COUNTS if (number := getattr(rest, name)) is not None}
        rest = replace(rest, **{name: max(0, number - getattr(attempt.usage, name)) for name, number in known.items()})
        if attempt.model in named:
            named[attempt.model] = named[attempt.model].without(attempt.usage)
    return replace(rest, by_model=tuple(named.items()), request_tokens=0)
