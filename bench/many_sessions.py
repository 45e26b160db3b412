"""What does a turn cost while many long sessions are at work in one worker? CPU time of the gateway process.

    python bench/many_sessions.py [--sessions 8,32] [--tokens 100000] [--memory-mb 256] [--json]

Linux. Each row is a fresh gateway with one worker in front of the built-in provider. So many
sessions of so many tokens each are seen once; then all of them take turns, one after the other, so that a worker that
forgets a session before it calls again has to work all of it out anew. Without a tight budget, and with one of half of
each session's tokens, so that each was cut; in the three formats with messages. What a call costs includes forwarding.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from context_work import CHAT, MESSAGES, RESPONSES, Script, Turn, body_of, call, gateway, spread

#: turns of each session that are measured
TURNS = 4
#: of an agent's text, about
BYTES_A_TOKEN = 3.9


FORMS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


@dataclass
class Row:
    """What the calls of a row took, in ms of CPU."""

    form: str
    cut: bool
    sessions: int
    #: on average, when each session was seen first
    first: float
    p50: float
    p95: float
    #: of the process at the end, in MB
    rss: float


def history(number: int, tokens: int) -> tuple[Script, list[bytes]]:
    """A session's messages, and what goes on from them."""
    script = Script(1_000 + number)
    messages, size = script.opening(), 0
    while size < tokens * BYTES_A_TOKEN:
        turn = script.turn()
        messages += turn
        size += sum(map(len, turn))
    return script, messages


def measured(name: str, sessions: int, tokens: int, memory_mb: float, *, cut: bool) -> Row:
    """One row."""
    path, budget = FORMS[name], tokens // 2 if cut else None
    playing = [history(number, tokens) for number in range(sessions)]
    with gateway(f"context: {{memory_mb: {memory_mb}}}") as running:

        def turn(number: int) -> Turn:
            body = body_of(playing[number][1], path)
            return call(running, body, session=f"s{number}", path=path, budget=budget)

        first = [turn(number) for number in range(sessions)]
        turns = list[Turn]()
        for _ in range(TURNS):
            for number, (script, messages) in enumerate(playing):
                messages.extend(script.turn())
                turns.append(turn(number))
        rss = _rss_mb(running.pid)
    if not all((one.trimmed != "none") is cut for one in turns):
        sys.exit(f"{name}: {'not all' if cut else 'some'} calls were cut")
    cpu = spread([one.cpu for one in turns])
    return Row(name, cut, sessions, sum(one.cpu for one in first) / sessions, cpu["p50"], cpu["p95"], rss)


def _rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", default="8,32", help="how many at once, a row for each number")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each session")
    parser.add_argument("--memory-mb", type=float, default=256, help="context.memory_mb")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    rows = list[Row]()
    if not told.json:
        print(f"sessions of {told.tokens:,} tokens in one worker, context.memory_mb {told.memory_mb:g}")
        print("CPU ms of a call")
        print(f"{'format':10} {'':5} {'sessions':>8} {'first':>7} {'p50':>7} {'p95':>7} {'RSS MB':>7}")
    for name in told.forms.split(","):
        for cut in (False, True):
            for sessions in map(int, told.sessions.split(",")):
                row = measured(name, sessions, told.tokens, told.memory_mb, cut=cut)
                rows.append(row)
                if not told.json:
                    print(
                        f"{row.form:10} {'cut' if cut else 'fits':5} {sessions:8} {row.first:7.1f} {row.p50:7.1f} "
                        f"{row.p95:7.1f} {row.rss:7.0f}",
                        flush=True,
                    )
    if told.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
