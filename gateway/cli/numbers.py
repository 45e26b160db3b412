"""Read and write numbers as people do: `600,000`, `500k`, `$20`, `50 %`, `30d`. The dashboard writes them alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

import typer

from gateway.cli.common import quoted

#: the factor of each letter that may follow a number
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
#: 20 digits are more than any limit has
_NUMBER: Final = re.compile(r"\$?([0-9]{1,3}(?:[,_][0-9]{3}){1,6}|[0-9]{1,20})(\.[0-9]{1,12})? ?([kmgKMG]?)")
_SPANS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
#: decimals of the smallest cost that a record has
_MOST_DECIMALS: Final = 6

#: a limit that is raised by a part of itself: `+50%`
RAISE: Final = re.compile(r"\+ ?([0-9]{1,6}(?:\.[0-9]{1,3})?) ?%")


def number(text: str) -> Decimal:
    """Return the number that a text stands for, such as `600,000`, `1.5M` or `$20`.

    Raises:
        ValueError: it is none, or what its point means is not certain, as in `600.000`.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a number; write it as 600,000, 600000 or 600k")
    whole, rest, unit = match[1].replace(",", "").replace("_", ""), match[2] or "", match[3].lower()
    return Decimal(whole + rest) * _UNITS[unit]


def whole_number(text: str) -> int:
    """Return the whole number that a text stands for, such as `600,000` or `1.5M`.

    Raises:
        ValueError: it is none.
    """
    found = number(text)
    # In many languages a point groups digits: 600.000 would be a thousandth of what was meant.
    if found != found.to_integral_value() or ("." in text and text.strip()[-1:].isdigit()):
        raise ValueError("not a whole number; write it as 600,000, 600000 or 600k")
    return int(found)


def count(least: int, most: int = 2**53) -> Callable[[str | int], int]:
    """Return the parser of an option that takes a whole number in a range."""

    def parsed(given: str | int) -> int:
        try:
            found = whole_number(str(given))
        except ValueError as error:
            raise typer.BadParameter(f"{quoted(str(given))} is {error}.") from None
        if not least <= found <= most:
            raise typer.BadParameter(f"{found:,} is not in the range {least:,} to {most:,}.")
        return found

    return parsed


def raised(limit: int | str, percent: Decimal, *, whole: bool) -> str:
    """Return a limit that is so many percent higher. `whole`: it counts tokens or calls, which have no parts."""
    found = Decimal(limit) * (100 + percent) / 100
    return str(int(found)) if whole else f"{round(found, _MOST_DECIMALS):f}"


def dollars(amount: Decimal | str) -> str:
    """Return US dollars to the last digit: `$20`, `$0.50`, `$0.0123`."""
    whole, _, rest = f"{Decimal(amount).normalize():,f}".partition(".")
    return f"${whole}.{rest:0<2}" if rest else f"${whole}"


def cost(amount: Decimal | str | None) -> str:
    """Return what was spent, rounded to cents from one dollar up and to three digits below; `?` if it is unknown."""
    if amount is None:
        return "?"
    value = Decimal(amount)
    is_small = 0 < value < 1
    return dollars(round(value, min(_MOST_DECIMALS, 2 - value.adjusted()) if is_small else 2))


def share(fraction: float, decimals: int = 0) -> str:
    """Return a part of one in percent: `50 %`."""
    return f"{fraction * 100:,.{decimals}f} %"


def moment(time: str) -> str:
    """Return an ISO time in whole seconds: `2026-11-28T12:05:00Z`."""
    return re.sub(r"\.\d+", "", time).replace("+00:00", "Z")


def span(seconds: float) -> str:
    """Return a time in its largest unit and the next smaller one: `30d`, `1h 30m`."""
    rest, parts = round(seconds), list[tuple[int, str]]()
    for size, unit in _SPANS:
        parts.append((rest // size, unit))
        rest %= size
    first = next((place for place, (amount, _) in enumerate(parts) if amount), 0)
    return " ".join(f"{amount}{unit}" for amount, unit in parts[first : first + 2] if amount) or "0s"
