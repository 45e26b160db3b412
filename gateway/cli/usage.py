"""`gateway usage`: show usage by client key, model or another label, with bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, print_json, print_table, quoted, stop
from gateway.cli.numbers import cost, share
from gateway.cli.sessions import StoreUrl, with_store

if TYPE_CHECKING:
    from gateway.core.rollup import UsageGroup
    from gateway.server.usage import UsageReport

#: characters of a full bar
_BAR_WIDTH: Final = 12
#: eighths of a character
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_NUMBERS: Final = ("calls", "refused", "failed", "input", "output", "cost")
#: columns that a small terminal leaves out, in this order
_FIRST_TO_GO: Final = ("failed", "refused", "input", "output")
_PICO: Final = 12


def usage(  # noqa: PLR0917  # typer makes an option of each
    by: Annotated[
        str,
        typer.Option("--by", metavar="LABEL,…", help="key, model, provider, tag, group or agent; several: key,model."),
    ] = "key",
    last: Annotated[
        str, typer.Option(metavar="SPAN", help="The last days, or with --bucket hour hours, such as 30d or 24h.")
    ] = "30d",
    bucket: Annotated[
        str, typer.Option(metavar="total|day|hour", help="One line for the whole time, or for each.")
    ] = "total",
    config: ConfigFile = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text.")] = False,
) -> None:
    """Show calls, tokens and costs by client key, model or another label. Days are those of UTC."""
    from gateway.core.errors import InvalidRequest
    from gateway.server.usage import csv_text, groups_of, line_json, report_of

    try:
        report = report_of(_parameters(by, last, bucket), None, time.time())
        groups = with_store(config, store, lambda opened: groups_of(opened, report))
    except InvalidRequest as fault:
        stop(fault.message.replace("group_by", "--by").replace("bucket must", "--bucket must"), Exit.USAGE)
    if as_json:
        print_json([line_json(report, group) for group in groups])
    elif as_csv:
        sys.stdout.writelines(csv_text(report, groups))
    else:
        _print(report, groups)


def _parameters(by: str, last: str, bucket: str) -> Mapping[str, str]:
    from gateway.config.section import duration
    from gateway.core.times import time_text

    try:
        seconds = duration(last)
    except ValueError as error:
        stop(f"--last {quoted(last)}: {error}.", Exit.USAGE)
    now, step = time.time(), 3600 if bucket == "hour" else 86_400
    # The hour or day that is running counts as one.
    return {"group_by": by, "bucket": bucket, "from": time_text(max(0, now - max(0, seconds - step)))}


def _print(report: UsageReport, groups: Sequence[UsageGroup]) -> None:
    from gateway.core.rollup import COUNTS

    lines = [dict(zip(COUNTS, group.counts, strict=True)) for group in groups]
    # Without prices, the bars show tokens.
    measure = "cost_pico_usd" if any(line["cost_pico_usd"] for line in lines) else "total_tokens"
    largest, whole = max([1, *(line[measure] for line in lines)]), max(1, sum(line[measure] for line in lines))
    rows = [
        [
            *_start(report, group),
            *(label or "-" for label in group.labels),
            *(
                f"{line[name]:,}"
                for name in ("calls", "refused_calls", "failed_calls", "input_tokens", "output_tokens")
            ),
            _cost(line),
            f"{share(line[measure] / whole):>5} {_bar(line[measure] / largest)}",
        ]
        for group, line in zip(groups, lines, strict=True)
    ]
    of = "cost" if measure == "cost_pico_usd" else "tokens"
    columns = (*(["start"] if report.bucket != "total" else []), *report.by, *_NUMBERS, f"share of {of}")
    print_table(columns, rows, right=(*_NUMBERS, f"share of {of}"), first_to_go=_FIRST_TO_GO)


def _start(report: UsageReport, group: UsageGroup) -> list[str]:
    if group.start is None:
        return []
    return [
        datetime.fromtimestamp(group.start, UTC).strftime("%Y-%m-%d %H:00" if report.bucket == "hour" else "%Y-%m-%d")
    ]


def _cost(line: Mapping[str, int]) -> str:
    """Return the cost of a line; with a plus if the price of some calls is unknown, so that it is more."""
    known = cost(Decimal(line["cost_pico_usd"]).scaleb(-_PICO))
    return f"{known}+" if line["unpriced_calls"] else known


def _bar(fraction: float) -> str:
    eighths = round(fraction * _BAR_WIDTH * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{bar:<{_BAR_WIDTH}}"
