"""Store a trim decision for the first messages of a conversation, without their text.

It holds only numbers: of messages, and of the blocks that are kept of them. A decision is read from a store and may be
damaged. So reading it raises only ValueError and takes a limited amount of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from gateway.core.trimming.draft import (
    DROP,
    KEEP,
    SUMMARIZED,
    Decision,
    Draft,
    DuplicateResult,
    Lines,
    SummaryEntry,
    is_summarized,
)
from gateway.core.values import dataclass

#: Version of the block splitting and of this format; decisions of other versions are ignored.
VERSION: Final = 5

#: Limit for the numbers in a decision: all messages of one request cannot have more blocks.
_MAX_NUMBERS: Final = 1_000_000
#: short names of the strategies that choose blocks
_SHORT_RULES: Final = {"condense": "c", "shorten": "s"}
_LONG_RULES: Final = {short: rule for rule, short in _SHORT_RULES.items()}
_RECALLED: Final = re.compile(r"(\d+)<(.+)")
#: letters that are followed by a number of messages
_RUNS: Final[Mapping[str, Decision]] = {"k": KEEP, "d": DROP, "m": SUMMARIZED}
#: the place of a summary
_SUMMARY: Final = "~"


@dataclass(frozen=True, slots=True)
class DecisionDetails:
    """A trim decision in detail, as `TrimDecision.read` returns it."""

    decisions: tuple[Decision, ...]
    recalls: Mapping[int, Lines]
    #: message -> the strategy that chose its blocks
    rules: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class TrimDecision:
    """The trim decision for the first `size` messages, whose hash is `prefix`."""

    prefix: str
    size: int
    #: The decisions in short form. `k3 d2 c0-2,5 =4 =4/1 7<3:0-2` means: keep 3 messages; drop 2; `condense` keeps
    #: blocks 0 to 2 and 5; same as message 4; same as message 4 in part 1, which is left out; recall blocks 0 to 2 of
    #: message 3 at the end of message 7. `~ m3` means: a summary is sent instead of a message and of three more.
    plan: str
    #: the id of that summary; its text is stored separately
    summary: str | None = None

    @classmethod
    def of(cls, prefix: str, draft: Draft) -> TrimDecision:
        """Return the trim decision of a draft for all its messages."""
        words = [
            *_format_decisions(draft),
            *(f"{index}<{_format_lines(lines)}" for index, lines in sorted(draft.recalls.items())),
        ]
        summary = draft.summary
        return cls(prefix, len(draft.decisions), " ".join(words), summary[1].id if summary is not None else None)

    def read(self, summaries: Mapping[str, str] | None = None) -> DecisionDetails:
        """Return the decision in detail. `summaries`: texts by id.

        Raises:
            ValueError: the plan is invalid, or its summary is not in `summaries`.
        """
        numbers = _Numbers()
        decisions: list[Decision] = []
        recalls: dict[int, Lines] = {}
        rules: dict[int, str] = {}
        for word in self.plan.split():
            recalled = _RECALLED.fullmatch(word)
            if recalled is not None:
                recalls[int(recalled[1])] = tuple(_parse_line(line, numbers) for line in recalled[2].split(";"))
                continue
            parsed, rule = _parse_word(word, numbers, self.size)
            if rule:
                rules[len(decisions)] = rule
            decisions.extend(parsed)
            if len(decisions) > self.size:
                break
        if len(decisions) != self.size:
            raise ValueError("size")
        if self.summary is not None:
            _put_summary(decisions, self.summary, summaries or {})
        elif any(map(is_summarized, decisions)):
            raise ValueError("no summary")
        return DecisionDetails(tuple(decisions), recalls, rules)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as a JSON value."""
        value: dict[str, Any] = {"v": VERSION, "prefix": self.prefix, "size": self.size, "plan": self.plan}
        return value if self.summary is None else {**value, "summary": self.summary}

    @classmethod
    def from_json(cls, value: Any) -> TrimDecision | None:
        """Return the decision, or None if the value is not a decision of this version."""
        if not isinstance(value, Mapping) or value.get("v") != VERSION:
            return None
        prefix, size, plan = value.get("prefix"), value.get("size"), value.get("plan")
        if not (isinstance(prefix, str) and isinstance(size, int) and isinstance(plan, str)):
            return None
        summary = value.get("summary")
        return cls(prefix, size, plan, summary) if summary is None or isinstance(summary, str) else None


def _format_decisions(draft: Draft) -> Iterator[str]:
    written = (_format_word(decision, draft.rules.get(index, "")) for index, decision in enumerate(draft.decisions))
    for word, same in groupby(written):
        count = sum(1 for _ in same)
        yield from [f"{word}{count}"] if word in _RUNS else [word] * count


def _format_word(decision: Decision, rule: str) -> str:
    if isinstance(decision, DuplicateResult):
        return f"={decision.source}" + ("/" + format_spans(decision.parts) if decision.parts else "")
    if isinstance(decision, tuple):
        return _SHORT_RULES.get(rule, f"{rule}:") + format_spans(decision)
    if isinstance(decision, SummaryEntry):
        return _SUMMARY
    return next(word for word, run in _RUNS.items() if run == decision)


def _parse_word(word: str, numbers: _Numbers, size: int) -> tuple[Sequence[Decision], str]:
    """Return the decisions of one word of a plan, and the strategy if it chose blocks."""
    rule, colon, spans = word.rpartition(":")
    kind, rest = word[0], word[1:]
    if colon or kind in _LONG_RULES:
        return [numbers.of(spans if colon else rest)], rule if colon else _LONG_RULES[kind]
    if kind == "=":
        of, _, parts = rest.partition("/")
        return [DuplicateResult(int(of), numbers.of(parts))], ""
    if word == _SUMMARY:
        return [SummaryEntry("", 0, "")], ""
    if kind not in _RUNS or not 0 < int(rest) <= size:
        raise ValueError(word)
    return [_RUNS[kind]] * int(rest), ""


def _put_summary(decisions: list[Decision], summary: str, texts: Mapping[str, str]) -> None:
    """Put the summary's text into the decisions.

    Raises:
        ValueError: there is no such text, or the summary is not the first of the messages that it replaces.
    """
    summed = [index for index, decision in enumerate(decisions) if is_summarized(decision)]
    first, *others = [decisions[index] for index in summed] or [KEEP]
    if summary not in texts or not isinstance(first, SummaryEntry) or any(other != SUMMARIZED for other in others):
        raise ValueError("summary")
    decisions[summed[0]] = replace(first, id=summary, count=len(summed), text=texts[summary])


def _format_lines(lines: Lines) -> str:
    return ";".join(f"{source}:{format_spans(blocks)}" for source, blocks in lines)


def _parse_line(line: str, numbers: _Numbers) -> tuple[int, tuple[int, ...]]:
    source, _, spans = line.partition(":")
    return int(source), numbers.of(spans)


def format_spans(numbers: Sequence[int]) -> str:
    """Return `(0, 1, 2, 5)` as `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


class _Numbers:
    """Parse spans of numbers, up to a limit of numbers in total."""

    def __init__(self) -> None:
        self._left = _MAX_NUMBERS

    def of(self, spans: str) -> tuple[int, ...]:
        """Return the numbers of spans, the reverse of `format_spans`; raises ValueError if they are invalid."""
        numbers: list[int] = []
        for span in spans.split(",") if spans else ():
            low, _, high = span.partition("-")
            first, last = int(low), int(high or low)
            self._left -= max(0, last - first) + 1
            if self._left < 0:
                raise ValueError("too many numbers")
            numbers.extend(range(first, last + 1))
        return tuple(numbers)
