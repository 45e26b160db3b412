"""Measure the CPU time of a turn while many long sessions are active in one worker.

    python bench/many_sessions.py [--sessions 8,32] [--tokens 100000] [--memory-mb 256] [--json]

Linux. Each row is a fresh gateway with one worker in front of the built-in provider. The sessions are sent once. Then
all of them take turns, one after the other, so that a worker that evicts a session before its next call has to process
all of it again. Each row is measured without a tight budget, and with a budget of half of each session's tokens, so
that each session is trimmed; in the three formats with messages. The cost of a call includes forwarding.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from context_work import CHAT, MESSAGES, RESPONSES, Script, Turn, body_of, call, gateway, spread

#: measured turns of each session
TURNS = 4
#: approximate bytes per token of an agent's text
BYTES_A_TOKEN = 3.9


FORMS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


@dataclass
class Row:
    """The cost of the calls of a row, in ms of CPU."""

    form: str
    cut: bool
    sessions: int
    #: average of the first call of each session
    first: float
    p50: float
    p95: float
    #: memory of the process at the end, in MB
    rss: float


def history(number: int, tokens: int) -> tuple[Script, list[bytes]]:
    """Return the messages of a session, and a script that continues them."""
    script = Script(1_000 + number)
    messages, size = script.opening(), 0
    while size < tokens * BYTES_A_TOKEN:
        turn = script.turn()
        messages += turn
        size += sum(map(len, turn))
    return script, messages


def measured(name: str, sessions: int, tokens: int, memory_mb: float, *, cut: bool) -> Row:
    """Measure one row."""
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
    options = parser.parse_args()
    rows = list[Row]()
    if not options.json:
        print(f"sessions of {options.tokens:,} tokens in one worker, context.memory_mb {options.memory_mb:g}")
        print("CPU ms of a call")
        print(f"{'format':10} {'':5} {'sessions':>8} {'first':>7} {'p50':>7} {'p95':>7} {'RSS MB':>7}")
    for name in options.forms.split(","):
        for cut in (False, True):
            for sessions in map(int, options.sessions.split(",")):
                row = measured(name, sessions, options.tokens, options.memory_mb, cut=cut)
                rows.append(row)
                if not options.json:
                    print(
                        f"{row.form:10} {'cut' if cut else 'fits':5} {sessions:8} {row.first:7.1f} {row.p50:7.1f} "
                        f"{row.p95:7.1f} {row.rss:7.0f}",
                        flush=True,
                    )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
