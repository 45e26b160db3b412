"""Score the trimming of recorded conversations: an adapter for the trim benchmark, and a command that prints its table.

    python bench/fit.py SCORER.py DATA_DIR [--recall off|said|all] [--limit N] [--json OUT]
    python bench/fit.py SCORER.py DATA_DIR --wire responses|messages
    python bench/fit.py SCORER.py DATA_DIR --gateway [--on-overflow error|least|forward]
    python bench/fit.py SCORER.py DATA_DIR --leave-one-out FIT_LOW_WATER=0.46,0.62 [--limit N]

SCORER.py scores a function(request, budget) -> request on recorded conversations; its --help describes it. `trim` is
that function. It stores its trim decisions by the hash of the messages, as a server does. With `--wire`, it trims in
the format of another API (see wires.py). The variables FIT_RECALL, FIT_LOW_WATER, FIT_STALE, FIT_SAVING and FIT_WORTH
(JSON) change the policy for one run. With `--leave-one-out`, one of them takes each of some values. For every source,
the value that is best for the other sources is chosen, and what this source has then is printed: a constant that is
right for one source alone does worse than it seems.

At the end, it prints what the scorer does not measure, by budget: the share of the lines of condensed tool results that
are only a gap mark, and the share of results followed by more recalled text than twice their own. JSON has no such
lines: its marks are values.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple

import msgspec
from wires import REQUEST_TOKENS, Wired

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import RECALL_HEADING, Draft
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.relevance import RelevanceFactors
from gateway.core.trimming.strategies import Condense, Dedupe, Drop, Shorten
from gateway.core.trimming.trim_conversation import find, trim_conversation
from gateway.core.trimming.trim_decision import TrimDecision


def counter() -> Callable[[str], int]:
    """Return the tokens of a text by o200k_base, with the tables in the litellm wheel."""
    found = importlib.util.find_spec("litellm")
    if "TIKTOKEN_CACHE_DIR" not in os.environ and found is not None and found.origin:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(found.origin).parent / "litellm_core_utils" / "tokenizers")
    import tiktoken  # noqa: PLC0415 - it reads the variable while it is imported

    encode = tiktoken.get_encoding("o200k_base").encode
    return lambda text: len(encode(text, disallowed_special=()))


def policy() -> TrimPolicy:
    names = {
        "FIT_LOW_WATER": "low_water",
        "FIT_STALE": "stale",
        "FIT_SAVING": "recall_saving",
        "FIT_SHARE": "recall_share",
    }
    numbers: dict[str, Any] = {name: float(os.environ[key]) for key, name in names.items() if key in os.environ}
    worth = RelevanceFactors(**json.loads(os.environ.get("FIT_WORTH", "{}")))
    strategies = (Dedupe(), Condense(worth), Shorten(), Drop())
    recall: Any = os.environ.get("FIT_RECALL", "off")
    return TrimPolicy(strategies=strategies, recall=recall, relevance=worth, **numbers)


class Trimmer:
    """A trimmer with its caches and trim decisions, stored by the hash of the messages."""

    def __init__(self) -> None:
        self._count = counter()
        self._reader = Reader(counter_of(self._count))
        self._policy = policy()
        self._trim_decisions: dict[str, dict[str, TrimDecision]] = {}
        self._tools: dict[str, int] = {}

    def __call__(self, request: dict[str, Any], budget: int) -> dict[str, Any]:
        original = request["messages"]
        raws = [msgspec.json.encode(message) for message in original]
        tools = [msgspec.json.encode(request["tools"])] if request.get("tools") else []
        conversation = Conversation.of(raws, self._reader, tools=tools)
        salt = str(request.get("user", ""))
        limit = budget - self._overhead(request)
        trim_decisions = self._trim_decisions.setdefault(salt, {})
        trim_decision = find(trim_decisions.values(), conversation, salt)
        try:
            fitted = trim_conversation(
                conversation, limit, self._reader, trim_decision=trim_decision, policy=self._policy, salt=salt
            )
        except ContextOverflow:
            # The scorer knows the requests that cannot be trimmed enough, and leaves them out except for their cost. It
            # treats a refusal as the whole request sent. Other trimmers send the messages that must stay, over the
            # limit.
            least = Drop().apply(Draft.untouched(conversation, self._reader), 0)
            return {**request, "messages": _decoded(least.sent().messages, raws, original)}
        if not fitted.changed:
            return request
        if fitted.trim_decision is not None and fitted.trim_decision is not trim_decision:
            # as it is read from a store
            trim_decision = TrimDecision.from_json(json.loads(json.dumps(fitted.trim_decision.to_json())))
            if trim_decision is not None:
                trim_decisions[trim_decision.prefix] = trim_decision
        return {**request, "messages": _decoded(fitted.messages, raws, original)}

    def _overhead(self, request: dict[str, Any]) -> int:
        written = json.dumps(request["tools"], ensure_ascii=False) if request.get("tools") else ""
        if written not in self._tools:
            self._tools[written] = self._count(written)
        return self._tools[written] + REQUEST_TOKENS


def _decoded(sent: Sequence[bytes], raws: Sequence[bytes], original: Sequence[Any]) -> list[Any]:
    """Return the messages as values; kept messages are unchanged."""
    known = {id(raw): message for raw, message in zip(raws, original, strict=True)}
    return [known[id(raw)] if id(raw) in known else json.loads(raw) for raw in sent]


#: a line that is only a gap mark
GAP_LINE = re.compile(r"\s*\[(\.\.\.|lines \d+ to \d+ omitted|\d+ passing tests( and \d+ other lines?)? omitted)\]\s*")


class Readability:
    """Count gap marks and recalled text in the tool results that are sent; each different form of a result once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str]] = set()
        #: by budget: condensed results, their lines, lines that are gap marks, results with recall, those with much
        self._counts: dict[str, list[int]] = {}

    def add(self, request: dict[str, Any], sent: dict[str, Any]) -> None:
        session = str(request.get("user", ""))
        counts = self._counts.setdefault(session.rpartition("@")[2], [0] * 5)
        originals = {m["tool_call_id"]: m["content"] for m in request["messages"] if m["role"] == "tool"}
        for message in sent["messages"]:
            text = message.get("content")
            key = (session, str(message.get("tool_call_id")), str(text))
            if message["role"] != "tool" or not isinstance(text, str) or key in self._seen:
                continue
            self._seen.add(key)
            own, heading, recalled = text.partition(RECALL_HEADING)
            own = own.removesuffix("\n\n") if heading else own
            counts[3] += bool(heading)
            counts[4] += len(recalled) > 2 * len(own)
            if own not in (originals[message["tool_call_id"]], "", "[...]"):
                lines = own.splitlines()
                counts[0] += 1
                counts[1] += len(lines)
                counts[2] += sum(GAP_LINE.fullmatch(line) is not None for line in lines)

    def print(self) -> None:
        print(f"{'budget':8}{'condensed':>10}{'lines':>8}{'only gap':>10}{'with recall':>13}{'over twice':>12}")
        for budget, (condensed, lines, gaps, recalls, much) in self._counts.items():
            shares = f"{100 * gaps / max(1, lines):9.1f}%{recalls:13}{100 * much / max(1, recalls):11.1f}%"
            print(f"{budget:8}{condensed:10}{lines:8}{shares}")


_trimmers: list[Trimmer | Wired] = []
_readability = Readability()


def trim(request: dict[str, Any], budget: int) -> dict[str, Any]:
    """Trim a request; this is the adapter."""
    if not _trimmers:
        wire: Any = os.environ.get("FIT_WIRE", "chat")
        _trimmers.append(Trimmer() if wire == "chat" else Wired(wire, counter(), policy()))
        if wire == "chat":
            atexit.register(_readability.print)
    sent = _trimmers[0](request, budget)
    if sent is not request and "@" in str(request.get("user")):  # the scorer's sessions are named CONVERSATION@BUDGET
        _readability.add(request, sent)
    return sent


class Measured(NamedTuple):
    """The mean evidence and cost of a source over all budgets."""

    evidence: float
    cost: float


def measured_by_source(scored: Mapping[str, Any]) -> dict[str, Measured]:
    """Return what each source has in the JSON of the scorer; a source without points or without a cost is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for budget in scored["budgets"].values():
        for source, row in budget["sources"].items():
            if row["evidence"] is not None:
                found.setdefault(source, []).append((row["evidence"], row["cost10"] or 0.0))
    return {source: Measured(*map(mean, zip(*rows, strict=True))) for source, rows in found.items()}


def best_elsewhere(by_value: Mapping[str, Mapping[str, Measured]], left_out: str) -> str:
    """Return the value with the most evidence on average over all sources but one."""

    def evidence(value: str) -> float:
        return mean(one.evidence for source, one in by_value[value].items() if source != left_out)

    return max(by_value, key=evidence)


def left_out_table(by_value: Mapping[str, Mapping[str, Measured]]) -> Iterator[str]:
    """Yield a line per source: its spread over the values, and what it has with the value chosen without it."""
    yield f"{'source':<12}{'least':>8}{'most':>8}{'chosen':>10}{'evidence':>10}{'cost.1':>8}"
    chosen: list[Measured] = []
    for source in sorted(set.intersection(*(set(found) for found in by_value.values()))):
        value = best_elsewhere(by_value, source)
        evidence = [found[source].evidence for found in by_value.values()]
        chosen.append(by_value[value][source])
        yield (
            f"{source:<12}{100 * min(evidence):8.1f}{100 * max(evidence):8.1f}{value:>10}"
            f"{100 * chosen[-1].evidence:10.1f}{chosen[-1].cost:8.2f}"
        )
    shares = [100 * one.evidence for one in chosen]
    yield f"mean {mean(shares):.1f}, from {min(shares):.1f} to {max(shares):.1f}, deviation {pstdev(shares):.1f}"


def leave_one_out(score: Sequence[str], environment: Mapping[str, str], choice: str) -> int:
    """Score every value of a variable, and print what each source has with the value chosen on the others."""
    name, _, values = choice.partition("=")
    by_value: dict[str, dict[str, Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for value in values.split(","):
            out = Path(folder, "scored.json")
            command = [*score, "--quiet", f"--json={out}"]
            if code := subprocess.run(command, env={**environment, name: value}, check=False).returncode:
                return code
            by_value[value] = measured_by_source(json.loads(out.read_text("utf-8")))
    print("\n".join(left_out_table(by_value)))
    return 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def through_gateway(arguments: argparse.Namespace) -> int:
    """Score what a provider receives from `gateway serve`, with a fresh store per budget; the scorer is upstream."""
    code = 0
    for budget in arguments.budgets.split(","):
        port, upstream = free_port(), free_port()
        environment = {
            **os.environ,
            "GATEWAY_CONTEXT_RECALL": arguments.recall,
            "GATEWAY_CONTEXT_ON_OVERFLOW": arguments.on_overflow,
            "GATEWAY_TELEMETRY_LOG_LEVEL": "error",
        }
        flags = ["--upstream", f"http://127.0.0.1:{upstream}/v1", "--port", str(port), "--store", "memory://"]
        gateway = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", *flags], env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            assert gateway.stderr is not None
            print(gateway.stderr.readline().strip(), flush=True)
            score = [sys.executable, str(arguments.scorer.resolve()), "score", "--data", str(arguments.data)]
            target = ["--gateway", f"http://127.0.0.1:{port}", "--upstream-port", str(upstream)]
            extra = ["--budgets", budget, *([f"--limit={arguments.limit}"] if arguments.limit else [])]
            code |= subprocess.run([*score, *target, *extra], check=False).returncode
        finally:
            gateway.terminate()
            gateway.wait()
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scorer", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--recall", choices=("off", "said", "all"), default="said")
    parser.add_argument("--limit")
    parser.add_argument("--budgets", default="50%,25%,12%,8k")
    parser.add_argument("--json")
    parser.add_argument("--wire", choices=("chat", "responses", "messages"), default="chat")
    parser.add_argument("--gateway", action="store_true", help="through a running gateway, which this starts")
    parser.add_argument("--leave-one-out", metavar="NAME=VALUE,VALUE,...")
    parser.add_argument("--on-overflow", choices=("error", "least", "forward"), default="error")
    arguments = parser.parse_args()
    if arguments.gateway:
        return through_gateway(arguments)
    here = Path(__file__).resolve()
    environment = {**os.environ, "FIT_RECALL": arguments.recall, "FIT_WIRE": arguments.wire}
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent.parent), str(here.parent)])
    common = [sys.executable, str(arguments.scorer.resolve())]
    source = ["--data", str(arguments.data), "--trimmer", "fit:trim"]
    extra = [f"--{name}={value}" for name in ("limit", "json") if (value := getattr(arguments, name))]
    score = [*common, "score", *source, "--budgets", arguments.budgets, *extra]
    if arguments.leave_one_out:
        return leave_one_out(score, environment, arguments.leave_one_out)
    scored = subprocess.run(score, env=environment, check=False)
    if arguments.wire != "chat":
        return scored.returncode  # most of the time would be for converting formats
    speed = subprocess.run([*common, "speed", *source], env=environment, check=False)
    return scored.returncode or speed.returncode


if __name__ == "__main__":
    sys.exit(main())
