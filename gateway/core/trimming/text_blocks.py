"""Split a text into lines and sentences, and join the pieces that are kept, with a mark for each gap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

GAP: Final = "[...]"
GAP_LINE: Final = f"{GAP}\n"
#: A block longer than this is split at a sentence or a space: about 60 tokens, a sentence or two.
MAX_BLOCK_CHARS: Final = 240
#: Lines shorter than this are joined with the next: a gap mark costs as much as a few words.
MIN_LINE_CHARS: Final = 40
#: A gap of at least this many lines is marked with its length; a shorter one only as a gap.
_MIN_COUNTED_LINES: Final = 20

_SENTENCE_END: Final = re.compile(r"(?<=[.!?;])\s+|(?<=[\u3002\uff01\uff1f\uff1b])")
_BLANKS: Final = re.compile(r"\s+")
#: Characters of one search, about a millisecond.
_SEARCH_CHARS: Final = 32 * 1024
#: the number of a line, as tools write it before the lines of a file
_LINE_NUMBER: Final = re.compile(r" {0,7}(\d{1,7})(?:[:|\t]|→| [|:] )")
#: a passed test: pytest, unittest, cargo, TAP, go, googletest, and runners that draw a check mark
_PASSED: Final = re.compile(
    r"\s{0,12}(?:\S{1,200} PASSED\b|(?:test )?\S{1,200}(?: \([\w.]{1,200}\))? \.\.\. ok\b|ok \d{1,6}\b"
    r"|--- PASS: |=== RUN |\[ +(?:RUN|OK) +\]|PASS(?:ED)?[: ]|[\u2713\u2714\u221a] )"
)
#: A gap with fewer passing tests does not count them.
_MIN_COUNTED_TESTS: Final = 3


def split_text(text: str) -> Iterator[str]:
    """Yield lines, short ones joined and long ones split; together they are the text."""
    pending = ""
    for line in text.splitlines(keepends=True):
        if len(pending) + len(line) > MAX_BLOCK_CHARS and pending:
            yield pending
            pending = ""
        if len(line) > MAX_BLOCK_CHARS:
            yield from split_line(line)
            continue
        pending += line
        if len(pending) >= MIN_LINE_CHARS:
            yield pending
            pending = ""
    if pending:
        yield pending


def split_line(line: str) -> Iterator[str]:
    """Yield sentences, joined up to MAX_BLOCK_CHARS; a longer one is split at its last space, or anywhere."""
    begin = start = 0
    for end in _sentence_ends(line):
        if start > begin and end - begin > MAX_BLOCK_CHARS:
            yield line[begin:start]
            begin = start
        while end - begin > MAX_BLOCK_CHARS:
            at = line.rfind(" ", begin + MAX_BLOCK_CHARS // 2, begin + MAX_BLOCK_CHARS) + 1 or begin + MAX_BLOCK_CHARS
            yield line[begin:at]
            begin = at
        start = end
    yield line[begin:]


def _sentence_ends(line: str) -> Iterator[int]:
    """Yield the ends of sentences and of the line. Each search reads a part: one long search would block threads."""
    start = 0
    while start < len(line):
        stop = end = min(start + _SEARCH_CHARS, len(line))
        for match in _SENTENCE_END.finditer(line, start, stop):
            end = match.end()
            if match.start() < end == stop and (blanks := _BLANKS.match(line, stop)):
                end = blanks.end()
            yield end
        start = max(stop, end)
    yield len(line)


def join_pieces(pieces: Iterable[tuple[str, bool]], *, is_original: bool = True) -> str:
    """Return the kept pieces of a text, with a mark for each gap. Each piece comes with whether it is kept.

    `is_original`: the pieces are lines of the original text, so that marks can name and count lines.
    """
    kept: list[str] = []
    gap, line = "", 1
    for is_kept, run in groupby(pieces, key=itemgetter(1)):
        text = "".join(piece for piece, _ in run)
        if is_kept:
            if gap and not _is_marked(kept, text):
                kept.append(_mark_between(kept, gap, text, line if is_original else 0))
            line += gap.count("\n")
            kept.append(text)
            gap = ""
        else:
            gap = text
            continue
        line += text.count("\n")
    if gap and not _is_marked(kept, ""):
        kept.append(_mark_between(kept, gap, "", line if is_original else 0))
    return "".join(kept)


def _is_marked(kept: Sequence[str], text: str) -> bool:
    """Return whether the text before or after a gap has a mark of its own there."""
    return (bool(kept) and f"\n{kept[-1]}".endswith(f"\n{GAP_LINE}")) or text.startswith(GAP_LINE)


def _mark_between(kept: Sequence[str], gap: str, text: str, line: int) -> str:
    """Return the mark of a gap: on a line of its own between lines, between spaces inside a line.

    `line`: the number of the first line of the gap, or 0 if lines are not counted.
    """
    last = kept[-1] if kept else "\n"
    if not last.endswith("\n"):
        return ("" if last[-1].isspace() else " ") + GAP + (" " if text else "")
    is_whole = line > 0 and (not text or gap.endswith("\n"))
    return (gap_mark(gap, line) if is_whole else GAP) + ("\n" if text else "")


def gap_mark(gap: str, line: int) -> str:
    """Return the mark of whole lines that are omitted. `line`: the number of the first one in its text."""
    lines = gap.splitlines()
    passed = sum(map(is_passing_test, lines))
    if passed >= _MIN_COUNTED_TESTS:
        rest = len(lines) - passed
        others = f" and {rest} other line{'s' * (rest > 1)}" if rest else ""
        return f"[{passed} passing tests{others} omitted]"
    if len(lines) < _MIN_COUNTED_LINES:
        return GAP
    first, last = _LINE_NUMBER.match(lines[0]), _LINE_NUMBER.match(lines[-1])
    if first is not None and last is not None and int(last[1]) - int(first[1]) == len(lines) - 1:
        return f"[lines {first[1]} to {last[1]} omitted]"
    return f"[lines {line} to {line + len(lines) - 1} omitted]"


def is_passing_test(line: str) -> bool:
    """Return whether a line reports a test that passed, in the formats of the usual test runners."""
    return _PASSED.match(line) is not None
