"""Split the text of a tool result by its kind: errors, test runs, code, diffs, tables, headings, plain lines.

A block is a region of a few lines, because single lines between gaps are hard to read.

| lines | blocks |
|---|---|
| reports of errors | a block each; all other blocks need the first one, or the last one of a traceback |
| passing tests | a block for each run of them, with little relevance; its gap mark counts them |
| heads of functions, sections, tables, or files in a diff | a block each, that the lines below it need |
| all others | regions of 160 characters or more |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Final, NamedTuple

from gateway.core.trimming.text_blocks import MAX_BLOCK_CHARS, is_passing_test, split_line
from gateway.core.values import dataclass

#: A region ends with the line that makes it this long, or at an empty line after half of it.
_REGION_CHARS: Final = 160
#: Shorter runs of passing tests are lines like any other.
_MIN_PASSING_TESTS: Final = 3
#: Factors of the relevance of blocks.
_ERROR_FACTOR: Final = 3.0
_PASSING_FACTOR: Final = 0.1
_TRACEBACK: Final = "Traceback (most recent call last)"
#: Characters at the start of a line that show its kind. A longer pattern would look at every character of a long line.
_LINE: Final = re.compile(
    r"""
    (?P<error>
        [ \t]{0,4}(?:[A-Za-z_][\w.]{0,80})?(?:Error|Exception|Interrupt)(?:\s*\(|:|\s*$)  # ValueError: x
      | (?:ERROR|FATAL|CRITICAL|FAILED|FAIL|E\ {3})\b
      | (?:npm\ ERR!|panic:|fatal:|thread\ '[^']{0,80}'\ panicked|Caused\ by:|Segmentation\ fault)
      | (?:\S{1,200}:\ )?(?:fatal\ )?error(?:\[\w{1,8}\])?:?\s
      | \S{1,30}[ T]\S{1,30}\ \W{0,2}(?:ERROR|FATAL|CRITICAL)\b                        # a log with a time
    )
  | (?P<head>
        (?:\ {0,8}\d{1,7}(?:[:|\t]|\ [|:]))?[ \t]{0,24}                                # the number of a line
        (?:(?:export|default|async|pub|static|public|private|protected|abstract|final|inline|unsafe)\s{1,2}){0,4}
        (?:def|class|func|fn|function|impl|struct|interface|enum|trait|namespace)\s{1,2}[\w(*<]
      | (?:\ {0,8}\d{1,7}[:|\t])?[A-Za-z_][\w\ *&:<>,]{2,80}\([^;={}]{0,120}[,)]\s{0,4}\{?\s*$   # a function in C
      | \#{1,6}\ \S
      | diff\ --git\ |\+\+\+\ \S
      | (?:[A-Z][A-Z%_]{1,24}\ {1,40}){2,12}[A-Z][A-Z%_]{1,24}\s*$                     # names of columns
    )
  | (?P<start>@@\ )
    """,
    re.VERBOSE,
)


class ResultPiece(NamedTuple):
    """A block of a result: its text, the number of the block that it needs or -1, and the factor of its relevance."""

    text: str
    needs: int = -1
    factor: float = 1.0


@dataclass(slots=True)
class _Regions:
    """The regions found so far. `kinds`: of each of them, as the groups of `_LINE`, or `passed` or none."""

    texts: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    size: int = 0

    def flush(self, kind: str = "") -> None:
        if self.pending:
            self.texts.append("".join(self.pending))
            self.kinds.append(kind)
            self.pending, self.size = [], 0

    def add(self, line: str, kind: str) -> None:
        if kind:
            self.flush()
        if len(line) > MAX_BLOCK_CHARS:
            self.flush()
            for piece in split_line(line):
                self.pending = [piece]
                self.flush(kind)
            return
        self.pending.append(line)
        self.size += len(line)
        is_end = self.size >= _REGION_CHARS or (line.isspace() and 2 * self.size >= _REGION_CHARS)
        if kind in ("error", "head") or is_end:
            self.flush(kind if kind != "start" else "")


def split_result(text: str) -> list[ResultPiece]:
    """Return the blocks of a tool result that is not JSON. Joined, they are the whole text."""
    regions = _Regions()
    passed: list[str] = []
    for line in text.splitlines(keepends=True):
        if is_passing_test(line):
            passed.append(line)
            continue
        _add_passed(regions, passed)
        found = _LINE.match(line)
        regions.add(line, str(found.lastgroup) if found is not None else "")
    _add_passed(regions, passed)
    regions.flush()
    return list(_pieces(regions, is_traceback=_TRACEBACK in text))


def _add_passed(regions: _Regions, passed: list[str]) -> None:
    if len(passed) >= _MIN_PASSING_TESTS:
        regions.flush()
        regions.pending = [*passed]
        regions.flush("passed")
    else:
        for line in passed:
            regions.add(line, "")
    passed.clear()


def _pieces(regions: _Regions, *, is_traceback: bool) -> Iterator[ResultPiece]:
    kinds = regions.kinds
    errors = [number for number, kind in enumerate(kinds) if kind == "error"]
    needed = (errors[-1] if is_traceback else errors[0]) if errors else -1
    head = -1
    for number, (text, kind) in enumerate(zip(regions.texts, kinds, strict=True)):
        if kind == "head" and not errors:
            head = number
        needs = needed if errors else head
        factor = _ERROR_FACTOR if kind == "error" else _PASSING_FACTOR if kind == "passed" else 1.0
        yield ResultPiece(text, needs if needs != number else -1, factor)
