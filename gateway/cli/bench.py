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
#: columns that a narrow terminal has no room for, in this order
_FIRST_TO_GO = ("direct p99", "p99 ms", "direct", "µs/chunk")
#: problems that are told one by one, and characters of each
_SHOWN = 5
_LONGEST = 300
#: milliseconds from which on no decimals are shown
_EXACT_TO_MS = 100


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="An eighth of the calls: some seconds, rougher.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what a call costs on this machine, against the built-in provider. No key, no network, half a minute.

    Every answer and every total is checked; exit code 1 where one is wrong.
    """
    from gateway.bench.measure import WORKLOADS, fewer, run
    from gateway.bench.servers import NotStarted

    todo = fewer(WORKLOADS) if quick else WORKLOADS
    started = time.monotonic()
    try:
        with _ended_by_sigterm(), _steps(len(todo)) as progress:
            report = run(todo, progress)
    except NotStarted as fault:
        stop(str(fault), Exit.FAILED)
    except KeyboardInterrupt:
        stop("Ended before it was done.", Exit.FAILED)
    tell(report, quick=quick, as_json=as_json)
    typer.echo(f"{time.monotonic() - started:.0f} s", err=True)


def tell(report: Report, *, quick: bool, as_json: bool) -> None:
    """Print what was found; the end of the command where something was wrong."""
    if as_json:
        print_json({**_machine(), "quick": quick, **report.as_json()})
    else:
        _print(report)
    if report.problems:
        told = "\n".join(one[:_LONGEST] for one in report.problems[:_SHOWN])
        stop(f"{len(report.problems):,} things were wrong, which is a bug, please report it:\n{told}", Exit.FAILED)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that its processes end with it."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Steps:
    """Shows which step is running."""

    def __init__(self, workloads: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from gateway.bench.measure import OTHER_STEPS

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        # Drawn between two steps only: a thread that draws would take its share of what is measured.
        self.shown = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task = self.shown.add_task("", total=workloads + OTHER_STEPS, completed=-1)

    def __call__(self, step: str) -> None:
        self.shown.update(self._task, description=step, advance=1, refresh=True)


@contextmanager
def _steps(workloads: int) -> Iterator[_Steps]:
    steps = _Steps(workloads)
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


def _print(report: Report) -> None:
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
        yield "hold and settle, on SQLite", f"{report.hold_and_settle_us:,.0f} µs of CPU"
    yield "from start to taking calls", f"{report.start_s:.1f} s"
    if report.memory_mb is not None and report.memory_after_mb is not None:
        yield "memory", f"{report.memory_mb:,.0f} MB at first, {report.memory_after_mb:,.0f} MB at the end"
    if most is not None:
        yield "one worker, all of a core", f"{most:,} small calls a second; plan for half of that"
