"""Compare token counts with the usage that providers report, on recorded requests.

Each line of the data is a JSON object with `request`, `wire`, `provider`, `model`, `session`, `kinds` and
`reported_prompt_tokens`.

    python bench/count_truth.py DATA.jsonl   replay in order, learning from every report; and the safety margin
    python bench/count_truth.py --speed      a session of 100,000 tokens: first sight, and further turns
    score.py DATA.jsonl count_truth:tokens   for a scorer: function(request) -> int, the wire guessed
    score.py DATA.jsonl count_truth:tokens_of_call   function(request, meta) -> int, with what a gateway knows
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from gateway.core.counting.cache import CountCache  # noqa: E402
from gateway.core.counting.calibration import MAX_RESIDUALS, LastTurn, Residual, calibration_key, correct_estimate  # noqa: E402
from gateway.core.counting.estimate import Estimate, Estimator  # noqa: E402
from gateway.core.counting.families import families_from  # noqa: E402
from gateway.core.counting.measure import Wire  # noqa: E402
from gateway.core.counting.request import read_request, wire_of  # noqa: E402
from gateway.counters.registry import Counters  # noqa: E402

WIRES: dict[str, Wire] = {
    "openai_chat": "chat",
    "openai_responses": "responses",
    "anthropic": "messages",
    "openai_completions": "completions",
}
#: kinds whose size cannot be read from the request
HARD = {"image", "media", "server_tools"}


@cache
def estimator() -> Estimator:
    counters = Counters()
    table = yaml.safe_load((ROOT / "config" / "families.yaml").read_text("utf-8"))
    return Estimator(families_from(table, vocabularies=counters.vocabularies), counters.counter, CountCache())


def tokens(request: Mapping[str, Any]) -> int:
    return estimator().estimate(read_request(wire_of(request), request)).tokens


def tokens_of_call(request: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
    return estimate_of_call(request, meta).tokens


def estimate_of_call(request: Mapping[str, Any], meta: Mapping[str, Any]) -> Estimate:
    wire = WIRES.get(meta.get("wire") or "", "chat")
    return estimator().estimate(
        read_request(wire, request, model=model_of(request, meta), provider=meta["provider"] or "")
    )


def model_of(request: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Return the model; if an address names it, as with Azure, the gateway knows it from its route."""
    return str(request.get("model") or meta.get("model") or "")


def replay(records: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Estimate, Any]]:
    residuals: dict[str, tuple[Residual, ...]] = {}
    surprises: dict[str, tuple[Residual, ...]] = {}
    frames: dict[str, tuple[Residual, ...]] = {}
    sessions: dict[str, LastTurn] = {}
    for record in records:
        estimate = estimate_of_call(record["request"], record)
        key = calibration_key(
            record["provider"] or "", model_of(record["request"], record), WIRES[record["wire"]], estimate.shape
        )
        session = record.get("session") or ""
        known = residuals.get(key, ()), sessions.get(session), surprises.get(key, ())
        found = correct_estimate(estimate, key, *known, frames=frames.get(key, ()))
        yield record, estimate, found
        if found.last is not None:
            surprise = record["reported_prompt_tokens"] - found.tokens
            surprises[key] = (*surprises.get(key, ()), Residual(surprise, estimate.tokens))[-MAX_RESIDUALS:]
        residual = record["reported_prompt_tokens"] - estimate.tokens
        residuals[key] = (*residuals.get(key, ()), Residual(residual, estimate.tokens))[-MAX_RESIDUALS:]
        if session:
            before = found.last
            last = before.followed_by(residual, estimate.frames) if before else LastTurn(key, residual, estimate.frames)
            sessions[session] = last
            if last.over:
                frames[key] = (*frames.get(key, ()), Residual(last.added, last.over))[-MAX_RESIDUALS:]


def show(name: str, errors: list[float]) -> None:
    size = sorted(map(abs, errors))
    if size:
        share = 100 * sum(error <= 5 for error in size) / len(size)
        middle, high = size[len(size) // 2], size[int(len(size) * 0.95)]
        print(f"{name:44s}{len(size):6d}{middle:9.2f}{high:9.1f}{share:9.1f}")


def report(path: str) -> None:
    lines = Path(path).read_text("utf-8").splitlines()
    records = [
        record for record in map(json.loads, lines) if record["wire"] in WIRES and record["reported_prompt_tokens"]
    ]
    cold: list[float] = []
    after: dict[str, list[float]] = {"learned": [], "other": []}
    images: dict[str, list[float]] = {}
    under: list[bool] = []
    for record, estimate, found in replay(records):
        reported = record["reported_prompt_tokens"]
        error = 100 * (estimate.tokens - reported) / reported
        kinds = set(record["kinds"])
        if "image" in kinds:
            known = "size known" if not estimate.doubt else "size not in the request"
            images.setdefault(known, []).append(error)
        if kinds & HARD:
            continue
        cold.append(error)
        after["learned" if found.source == "learned" else "other"].append(100 * (found.tokens - reported) / reported)
        under.append(found.safe_tokens < 0.98 * reported)
    print(f"{'':44s}{'n':>6s}{'median':>9s}{'p95':>9s}{'within5':>9s}")
    show("cold", cold)
    show("in order, something learned", after["learned"])
    show("in order, nothing learned", after["other"])
    for name, errors in images.items():
        show(f"images, {name}", errors)
    print(f"under by more than 2 % with the safety margin: {100 * sum(under) / len(under):.1f} %")


def speed() -> None:
    words = "The gateway counts the tokens of every message once and keeps the number under the message's own bytes. "
    messages: list[bytes] = []
    while len(messages) < 500:
        number = len(messages)
        text = f"{number}: " + "".join(f"{words}{number * 7 + part} " for part in range(9))
        messages.append(json.dumps({"role": "assistant" if number % 2 else "user", "content": text}).encode())
    count = estimator()
    count.estimate(read_request("chat", {"model": "gpt-4o"}, messages=messages[:1]))
    started = time.perf_counter()
    first = count.estimate(read_request("chat", {"model": "gpt-4o"}, messages=messages))
    took = 1e3 * (time.perf_counter() - started)
    print(f"first sight of {first.tokens:,} tokens in {len(messages)} messages: {took:.1f} ms")
    turns = []
    for turn in range(200):
        messages.append(json.dumps({"role": "user", "content": f"turn {turn}: {words * 3}"}).encode())
        started = time.perf_counter()
        count.estimate(read_request("chat", {"model": "gpt-4o"}, messages=messages))
        turns.append(1e3 * (time.perf_counter() - started))
    turns.sort()
    print(f"a further turn: median {turns[100]:.2f} ms, p95 {turns[190]:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("data", nargs="?", metavar="DATA.jsonl")
    what.add_argument("--speed", action="store_true")
    asked = parser.parse_args()
    speed() if asked.speed else report(asked.data)
