"""Read and write numbers for people: `600,000`, `500k`, `$20`, `50 %`, `30d`. The dashboard uses the same formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import typer

from gateway.cli.common import quoted

#: the factor of each letter that may follow a number
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
#: no limit has more than 20 digits
_NUMBER: Final = re.compile(r"\$?([0-9]{1,3}(?:[,_][0-9]{3}){1,6}|[0-9]{1,20})(\.[0-9]{1,12})? ?([kmgKMG]?)")
_SPANS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
#: decimals of the smallest cost in a call record
_MOST_DECIMALS: Final = 6

#: a relative change of a limit, such as `+50%`
RAISE: Final = re.compile(r"\+ ?([0-9]{1,6}(?:\.[0-9]{1,3})?) ?%")


def number(text: str) -> Decimal:
    """Return the number that a text means, such as `600,000`, `1.5M` or `$20`.

    Raises:
        ValueError: it is not a number.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a number; write it as 600,000, 600000 or 600k")
    whole, rest, unit = match[1].replace(",", "").replace("_", ""), match[2] or "", match[3].lower()
    return Decimal(whole + rest) * _UNITS[unit]


def whole_number(text: str) -> int:
    """Return the whole number that a text means, such as `600,000` or `1.5M`.

    Raises:
        ValueError: it is not a whole number, or the meaning of its point is uncertain, as in `600.000`.
    """
    value = number(text)
    # In many languages a point groups digits: 600.000 would be read as a thousandth of the intended number.
    if value != value.to_integral_value() or ("." in text and text.strip()[-1:].isdigit()):
        raise ValueError("not a whole number; write it as 600,000, 600000 or 600k")
    return int(value)


def count(least: int, most: int = 2**53) -> Callable[[str | int], int]:
    """Return the parser of an option whose value is a whole number in a range."""

    def parse(given: str | int) -> int:
        try:
            value = whole_number(str(given))
        except ValueError as error:
            raise typer.BadParameter(f"{quoted(str(given))} is {error}.") from None
        if not least <= value <= most:
            raise typer.BadParameter(f"{value:,} is not in the range {least:,} to {most:,}.")
        return value

    return parse


def raised(limit: int | str, percent: Decimal, *, whole: bool) -> str:
    """Return a limit that is `percent` higher. `whole`: round down to a whole number, for tokens and calls."""
    value = Decimal(limit) * (100 + percent) / 100
    return str(int(value)) if whole else f"{round(value, _MOST_DECIMALS):f}"


def dollars(amount: Decimal | str) -> str:
    """Return US dollars without rounding: `$20`, `$0.50`, `$0.0123`."""
    whole, _, rest = f"{Decimal(amount).normalize():,f}".partition(".")
    return f"${whole}.{rest:0<2}" if rest else f"${whole}"


def cost(amount: Decimal | str | None) -> str:
    """Return a cost in US dollars, rounded to cents from one dollar and to three digits below; `?` if unknown."""
    if amount is None:
        return "?"
    value = Decimal(amount)
    is_small = 0 < value < 1
    return dollars(round(value, min(_MOST_DECIMALS, 2 - value.adjusted()) if is_small else 2))


def share(fraction: float, decimals: int = 0) -> str:
    """Return a fraction in percent: `50 %`."""
    return f"{fraction * 100:,.{decimals}f} %"


def moment(time: str) -> str:
    """Return an ISO time in whole seconds: `2026-11-28T12:05:00Z`."""
    return re.sub(r"\.\d+", "", time).replace("+00:00", "Z")


def until_empty(rate: Mapping[str, Any] | None) -> str:
    """Return when a budget is empty by its `burn_rate`: `in 40m, 12 calls`; an empty text if that is unknown."""
    if rate is None:
        return ""
    if not rate["empty_in_s"]:
        return "now"
    if rate["refills_first"]:
        return "not before it refills"
    calls = rate["empty_in_calls"]
    return f"in {span(rate['empty_in_s'])}, {calls:,} call{'' if calls == 1 else 's'}"


def span(seconds: float) -> str:
    """Return a duration in its largest unit and the next smaller one: `30d`, `1h 30m`."""
    rest, parts = round(seconds), list[tuple[int, str]]()
    for size, unit in _SPANS:
        parts.append((rest // size, unit))
        rest %= size
    first = next((place for place, (amount, _) in enumerate(parts) if amount), 0)
    return " ".join(f"{amount}{unit}" for amount, unit in parts[first : first + 2] if amount) or "0s"
