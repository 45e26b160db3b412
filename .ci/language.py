"""Refuse words that this project has replaced, in comments, docstrings and pages.

    python .ci/language.py [PATH…]

Without a path: everything that git knows. A line that ends in `# language: ok` is left out: it quotes somebody else.
"""

# ruff: noqa: INP001, T201  # a command

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

#: pattern -> what to write instead, in code and in pages
REPLACED = {
    r"weigh(?:s|ed|ing|er|ers)?": "count tokens, token count",
    r"as (?:it|they) came": "unchanged",
    r"(?:in|takes?|took|taking) (?:the|its|their) places? of|in (?:its|their) place": "instead of, replaces",
    r"whoever": "name the component or the person",
    r"stands? (?:in|beside|before|behind|for|there|where|at|under|above)": "is in, precedes, follows",
    r"tells?|told": "notify, return, report, show",
    r"left alone": "circuit open, unchanged",
    r"elsewhere": "name the place",
    r"anew": "again",
    r"taken for|takes? (?:it|them) for": "treated as",
    r"go(?:es|ne|ing)? on (?:from|with)|gone on": "continue",
    r"lately|of late": "recently",
    r"whereabouts|hitherto|thereof|by and by": "plain words",
    r"is (?:there|away)|(?:are|be|was|were) away": "available, unavailable",
    r"so far as|inasmuch": "if, as far as",
    r"epochs?": "trim decision, budget period (seconds since the epoch: Unix time)",
}
#: the same, in code only; pages may say "behind a proxy" and "narrow screens"
REPLACED_IN_CODE = REPLACED | {
    r"weights?": "tokens, token count",
    r"narrow(?:s|ed|ing|er|est)?": "restrict",
    r"beside": "overhead, next to, besides",
    r"behind": "after",
    r"nobody|somebody": "name the component or the person",
}
THIS = Path(__file__).relative_to(Path.cwd())
OK = "language: ok"


def any_of(words: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern that finds each of these words."""
    return re.compile(r"\b(?:" + "|".join(f"(?:{pattern})" for pattern in words) + r")\b", re.IGNORECASE)


IN_CODE, IN_PAGES = any_of(REPLACED_IN_CODE), any_of(REPLACED)


def instead_of(word: str) -> str:
    """Return what to write instead of a word."""
    return next(better for pattern, better in REPLACED_IN_CODE.items() if re.fullmatch(pattern, word, re.IGNORECASE))


def prose_of_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of all comments and docstrings with their numbers."""
    before, depth = tokenize.NEWLINE, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        starts_statement = before in {
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.NL,
            tokenize.ENCODING,
        }
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and starts_statement and not depth):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
        if token.type == tokenize.OP:
            depth += (token.string in tuple("([{")) - (token.string in tuple(")]}"))
        if token.type != tokenize.COMMENT:
            before = token.type


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown page outside of code blocks, with their numbers."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`", "", line)


def found_in(path: Path) -> Iterator[str]:
    """Yield each replaced word of a file, with its place and what to write instead."""
    text = path.read_text("utf-8")
    is_code = path.suffix == ".py"
    for number, line in (prose_of_code if is_code else prose_of_page)(text):
        if not line.endswith(OK):
            for match in (IN_CODE if is_code else IN_PAGES).finditer(re.sub(r"`[^`]*`", "", line)):
                yield f"{path}:{number}: {match.group()!r}: write {instead_of(match.group())}"


def main(paths: list[str]) -> int:
    """Print all replaced words; return 1 if there are any."""
    listed = subprocess.run(["git", "ls-files", *paths], capture_output=True, text=True, check=True).stdout.split()  # noqa: S603, S607
    files = [path for path in map(Path, listed) if path.suffix in {".py", ".md"} and path.is_file() and path != THIS]
    found = [line for path in files for line in found_in(path)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
