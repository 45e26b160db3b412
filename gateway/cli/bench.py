"""`gateway bench`: measure what a call costs on this machine, with the built-in provider."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gateway.cli.common import AsJson, Exit, print_json, print_table, stop

if TYPE_CHECKING:
    from gateway.bench.measure import Report, ResultRow

_NUMBERS = ("calls", "CPU µs/call", "µs/chunk", "p50 ms", "direct", "p99 ms", "direct p99", "wrong")
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO = ("direct p99", "p99 ms", "direct", "µs/chunk")
#: number of problems that are printed, and characters of each
_MOST_PROBLEMS = 5
_PROBLEM_CHARS = 300
#: milliseconds from which no decimals are shown
_EXACT_TO_MS = 100


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Make an eighth of the calls: faster, less precise.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure CPU time and calls per second on this machine. Takes half a minute, needs no key and no network.

    Every response and every total is checked; exit code 1 if one is wrong.
    """
    from gateway.bench.measure import WORKLOADS, fewer, run
    from gateway.bench.servers import NotStarted

    todo = fewer(WORKLOADS) if quick else WORKLOADS
    started = time.monotonic()
    try:
        with _sigterm_as_interrupt(), _progress_bar(len(todo)) as progress:
            report = run(todo, progress)
    except NotStarted as fault:
        stop(str(fault), Exit.FAILED)
    except KeyboardInterrupt:
        stop("Interrupted before the benchmark was complete.", Exit.FAILED)
    print_report(report, quick=quick, as_json=as_json)
    typer.echo(f"{time.monotonic() - started:.0f} s", err=True)


def print_report(report: Report, *, quick: bool, as_json: bool) -> None:
    """Print the results. End the command with exit code 1 if a check failed."""
    if as_json:
        print_json({**_machine(), "quick": quick, **report.as_json()})
    else:
        _print_tables(report)
    if report.problems:
        shown = "\n".join(problem[:_PROBLEM_CHARS] for problem in report.problems[:_MOST_PROBLEMS])
        stop(f"{len(report.problems):,} checks failed. This is a bug, please report it:\n{shown}", Exit.FAILED)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the processes of the command end with it."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _ProgressBar:
    """Show which step is running."""

    def __init__(self, workloads: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from gateway.bench.measure import OTHER_STEPS

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        # Drawn only between two steps: a drawing thread would use processor time during a measurement.
        self.shown = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task = self.shown.add_task("", total=workloads + OTHER_STEPS, completed=-1)

    def __call__(self, step: str) -> None:
        self.shown.update(self._task, description=step, advance=1, refresh=True)


@contextmanager
def _progress_bar(workloads: int) -> Iterator[_ProgressBar]:
    steps = _ProgressBar(workloads)
    with steps.shown:
        yield steps


def _machine() -> dict[str, object]:
    import os
    import platform

    from gateway import __version__

    return {
        "gateway": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def _print_tables(report: Report) -> None:
    print_table(
        ("workload", *_NUMBERS), [_cells(row) for row in report.workloads], right=_NUMBERS, first_to_go=_FIRST_TO_GO
    )
    sys.stdout.write("\n")
    print_table(("", ""), list(_facts(report)))


def _cells(row: ResultRow) -> list[str]:
    return [
        row.name,
        f"{row.calls:,}",
        f"{row.cpu_us:,.0f}",
        f"{row.cpu_us_per_chunk:.1f}" if row.cpu_us_per_chunk is not None else "",
        _ms(row.through.p50_ms),
        _ms(row.direct.p50_ms),
        _ms(row.through.p99_ms),
        _ms(row.direct.p99_ms),
        f"{row.wrong:,}",
    ]


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < _EXACT_TO_MS else f"{value:,.0f}"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    counted, most = report.counted, report.calls_per_second
    yield "tokens of all sessions", f"{counted.tokens:,}, in {counted.sessions:,} sessions and {counted.calls:,} calls"
    yield "the provider's own count", f"{counted.billed_tokens:,}"
    if report.hold_and_settle_us is not None:
        yield "hold and settle on SQLite", f"{report.hold_and_settle_us:,.0f} µs of CPU"
    yield "start until ready", f"{report.start_s:.1f} s"
    if report.memory_mb is not None and report.memory_after_mb is not None:
        yield "memory", f"{report.memory_mb:,.0f} MB at the start, {report.memory_after_mb:,.0f} MB at the end"
    if most is not None:
        yield "one worker on a full core", f"{most:,} small calls per second; plan for half of that"
