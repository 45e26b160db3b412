"""Find the attempts of a refused request that the provider does not bill.

Anthropic answers a refusal with status 200 and `stop_reason: refusal`. It does not bill one that came before any
output, unless its category is one of a few; one that came after output is billed. The usage shows the tokens in any
case. With `fallbacks` another model is asked after a refusal: `usage.iterations` has the passes of each model, and each
attempt is judged by itself.

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
    """An attempt that ended in a refusal before any output. `model`: None where the usage names none."""

    model: str | None
    category: str | None
    usage: Usage

    def __str__(self) -> str:
        who = f"{self.model} " if self.model is not None else ""
        category = self.category or "no category"
        return f"{who}refused before any output ({category}): {self.usage.input_tokens:,} input tokens"


def as_billed(answer: ParsedResponse, categories: Collection[str]) -> tuple[ParsedResponse, str | None]:
    """Return the answer with the usage that its provider bills, and a note on what is not billed, or None.

    `categories`: of a refusal before any output, those that are billed.
    """
    free = [one for one in _refused(answer) if one.category not in categories]
    if not free:
        return answer, None
    reported = answer.usage or _NOTHING
    if reported.attempts:
        billed = _without(reported, free)
    else:
        billed = replace(_NOTHING, searches=reported.searches, request_tokens=0)
    return replace(answer, usage=billed), "; ".join(map(str, free))


def _refused(answer: ParsedResponse) -> Iterator[_Refused]:
    """Find the attempts that refused before any output."""
    reported = answer.usage or _NOTHING
    is_refused = answer.finish_reason == _REFUSED
    if not reported.attempts:
        if is_refused and not reported.output_tokens and not answer.output_estimate:
            yield _Refused(None, answer.refusal, reported.complete(0, 0)[0])
        return
    # One fallback block for each model that refused and was followed by another one, in order.
    *earlier, last = reported.attempts
    for index, (model, usage) in enumerate(earlier):
        if not usage.output_tokens:
            yield _Refused(model, answer.declined[index] if index < len(answer.declined) else None, usage)
    if is_refused and not last[1].output_tokens:
        yield _Refused(last[0], answer.refusal, last[1])


def _without(reported: ReportedUsage, free: Sequence[_Refused]) -> ReportedUsage:
    """Return the usage without some of its attempts. It teaches nothing of the size of the request any more."""
    left, named = reported, dict(reported.named)
    for one in free:
        known = {name: number for name in _COUNTS if (number := getattr(left, name)) is not None}
        left = replace(left, **{name: max(0, number - getattr(one.usage, name)) for name, number in known.items()})
        if one.model in named:
            named[one.model] = named[one.model].without(one.usage)
    return replace(left, named=tuple(named.items()), request_tokens=0)
