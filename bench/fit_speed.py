"""Measure the CPU time of counting and trimming per turn on raw bytes, in one growing session.

    python bench/fit_speed.py SCORER.py DATA_DIR [--tokens 100000] [--json OUT]

SCORER.py (the trim benchmark) builds the session from recorded conversations. A turn does what a gateway does: hash the
messages, estimate the request, trim it with recall of what was said. Then, in idle time, it reads a few messages ahead
of the next trim. Kinds of turns: the first request of a long conversation, with and without a trim; turns that fit;
turns that continue an earlier trim; turns that trim; and reading ahead. The garbage collector runs as in a worker.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.app.worker import collect_rarely
from gateway.core.conversation.message import Hashed
from gateway.core.conversation.units import Conversation
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.families import families_from
from gateway.core.counting.measure import TokenCounter
from gateway.core.counting.request import read_request
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.preread import messages_to_read, read_ahead
from gateway.core.trimming.reader import Reader
from gateway.core.trimming.report import TrimmedConversation
from gateway.core.trimming.trim_conversation import trim_conversation
from gateway.core.trimming.trim_decision import TrimDecision
from gateway.counters.tiktoken import load, rank_folders

#: the policy of `gateway serve`
POLICY = TrimPolicy(recall="said")
FAMILIES = Path(__file__).resolve().parent.parent / "config" / "families.yaml"


class Session:
    """The state that a gateway has for a session, and its caches."""

    def __init__(self, tokens: TokenCounter) -> None:
        families = families_from(yaml.safe_load(FAMILIES.read_text("utf-8")))
        self.estimator = Estimator(families, lambda _: tokens, CountCache())
        self.reader = Reader(self.count_tokens)
        self.trim_decision: TrimDecision | None = None
        #: CPU milliseconds of reading ahead, by turn
        self.ahead: list[float] = []

    def count_tokens(self, raws: Sequence[bytes]) -> Sequence[int]:
        return self.estimator.message_tokens(read_request("chat", {"model": b'"gpt-4o"'}, messages=raws))

    def turn(self, raws: Sequence[bytes], limit: int) -> tuple[TrimmedConversation, float]:
        """Play a turn; return its result and its CPU milliseconds."""
        start = time.thread_time()
        conversation = Conversation.of(raws, self.reader)
        request = read_request("chat", {"model": b'"gpt-4o"'}, messages=raws)
        self.estimator.estimate(request, keys=conversation.keys)
        stored = TrimDecision.from_json(self.trim_decision.to_json()) if self.trim_decision is not None else None
        fitted = trim_conversation(conversation, limit, self.reader, trim_decision=stored, policy=POLICY)
        spent = (time.thread_time() - start) * 1e3
        self.trim_decision = fitted.trim_decision
        self._read_ahead(conversation, limit)
        return fitted, spent

    def _read_ahead(self, conversation: Conversation, limit: int) -> None:
        start = time.thread_time()
        filled = sum(self.reader.token_counts(conversation)) / limit
        some = messages_to_read(len(conversation.keys), filled)
        if some:
            part = slice(some.start, some.stop)
            read_ahead(Hashed(conversation.messages[part], conversation.keys[part]), self.reader)
        self.ahead.append((time.thread_time() - start) * 1e3)


def session_of(scorer: Any, data: str, tokens: int) -> list[bytes]:
    scorer.set_tokenizer(None)
    found = sorted(scorer.load(data), key=lambda one: hashlib.sha256(one["id"].encode()).hexdigest())
    return [json.dumps(message, ensure_ascii=False).encode() for message in scorer.growing(found, tokens)]


def summary_of(kind: str, spent: list[float]) -> dict[str, Any]:
    spent.sort()
    found = {"p50": spent[len(spent) // 2], "p95": spent[int(len(spent) * 0.95)], "max": spent[-1]} if spent else {}
    print(f"{kind:28}", *(f"{name} {value:7.2f} ms" for name, value in found.items()), f"({len(spent)} turns)")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scorer", type=Path)
    parser.add_argument("data")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.scorer.resolve().parent))
    raws = session_of(importlib.import_module(arguments.scorer.stem), arguments.data, arguments.tokens)
    tokens = next(filter(None, (load(folder, "o200k_base") for folder in rank_folders())), None)
    if tokens is None:
        raise SystemExit("the ranks of o200k_base are missing: install litellm, or set TIKTOKEN_CACHE_DIR")
    tokens.count("warm")
    collect_rarely()
    ends = [e for e in range(2, len(raws) + 1) if e == len(raws) or b'"role": "assistant"' in raws[e][:30]]
    print(f"{len(raws)} messages, {sum(map(len, raws)):,} bytes")
    found: dict[str, Any] = {}

    fits = Session(tokens)
    total = fits.turn(raws, 10**9)[0].tokens
    found["first sight, fits"] = summary_of(
        "first sight, fits", [Session(tokens).turn(raws, 10**9)[1] for _ in range(3)]
    )
    late = [end for end in ends if end > 0.8 * len(raws)]
    found["fits"] = summary_of("fits", [fits.turn(raws[:end], 10**9)[1] for end in late for _ in range(3)])

    for share in (0.5, 0.9):
        limit = int(total * share)
        cold = [Session(tokens).turn(raws, limit)[1] for _ in range(3)]
        found[f"first sight, cut to {share}"] = summary_of(f"first sight, cut to {share}", cold)
        session = Session(tokens)
        cuts, resumed = list[float](), list[float]()
        for end in ends:
            fitted, spent = session.turn(raws[:end], limit)
            if fitted.applied:
                cuts.append(spent)
            elif fitted.changed and end > 0.8 * len(raws):
                resumed.append(spent)
        found[f"cut to {share}"] = summary_of(f"cut to {share}", cuts)
        found[f"resumed at {share}"] = summary_of(f"resumed at {share}", resumed)
        found[f"read ahead at {share}"] = summary_of(f"read ahead at {share}", session.ahead)
        other = Session(tokens)
        other.turn(raws, 10**9)
        other.trim_decision = session.trim_decision
        found[f"resumed by another worker at {share}"] = summary_of(
            f"resumed by another worker at {share}", [other.turn(raws, limit)[1]]
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
