"""Compare other vocabularies with the counters that are used for their models, on your own texts.

    pip install splintr-rs ctok
    python bench/vocabularies.py CONVERSATIONS.jsonl ... [--llama-server http://127.0.0.1:8199]

Each line of a file (also compressed by gzip) is an object with `messages`, or with a `request` that has them. The
packages contain the vocabularies that the gateway can use, see gateway/counters/vocabularies.py. llama.cpp's server
counts with the vocabulary of its model. A ratio is tokens of the vocabulary over tokens of our counter.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gateway.counters.registry import DIGITS, FALLBACK, Counters

Count = Callable[[str], int]
#: characters per text, and texts per role and file: enough for a result, and minutes faster
LONGEST, MOST = 8_000, 200
SHORTEST = 200


def served(url: str) -> Count:
    """Return the vocabulary of the model that a llama.cpp server has loaded."""

    def count(text: str) -> int:
        body = json.dumps({"content": text, "add_special": False}).encode()
        asked = urllib.request.Request(f"{url}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return len(json.load(answer)["tokens"])

    return count


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield role and text of the messages in a file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            held = json.loads(line)
            for message in held.get("messages") or held.get("request", {}).get("messages") or ():
                if isinstance(message.get("content"), str) and len(message["content"]) >= SHORTEST:
                    yield message["role"], message["content"][:LONGEST]


def sample(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Return texts by role, with a maximum number per file."""
    chosen: dict[str, list[str]] = {}
    for path in paths:
        by_role: dict[str, list[str]] = {}
        for role, text in texts(path):
            by_role.setdefault(role, []).append(text)
        for role, found in by_role.items():
            random.Random(0).shuffle(found)
            chosen.setdefault(role, []).extend(found[:MOST])
    return chosen


def row(counts: Sequence[int], ours: Sequence[int]) -> str:
    ratios = sorted(theirs / max(1, own) for theirs, own in zip(counts, ours, strict=True))
    low, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.05, 0.95))
    return f"{sum(counts) / sum(ours):7.2f} {statistics.median(ratios):7.2f} {low:6.2f} to {high:4.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama-server", metavar="URL", help="count with the model that is served there, too")
    options = parser.parse_args()
    chosen, counters = sample(options.files), Counters()
    vocabularies: dict[str, Callable[[str], int]] = {
        name: counters.counter(name).count for name in sorted(counters.vocabularies)
    }
    if options.llama_server:
        vocabularies["served"] = served(options.llama_server.rstrip("/"))
    ours = {name: counters.counter(name) for name in (FALLBACK, DIGITS)}
    print(f"{'':12} {'role':10} {'texts':>6}" + "".join(f"   {name:>28}" for name in ours))
    print(" " * 30 + "   in all  median   p5  to p95 " * len(ours))
    for name, count in vocabularies.items():
        for role, found in chosen.items():
            theirs = [count(text) for text in found]
            cells = (row(theirs, [counter.count(text) for text in found]) for counter in ours.values())
            print(f"{name:12} {role:10} {len(found):6}" + "   " + "   ".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
