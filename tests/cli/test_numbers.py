"""Numbers as the commands read and write them."""

from __future__ import annotations

import re

import pytest

from gateway.cli import numbers
from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("600000", 600_000),
        ("600,000", 600_000),
        ("600_000", 600_000),
        ("500k", 500_000),
        ("500 K", 500_000),
        ("1.5M", 1_500_000),
        ("1,500k", 1_500_000),
        ("2g", 2 * 10**9),
        ("0", 0),
        (" 7 ", 7),
    ],
)
def test_a_whole_number_is_read_as_people_write_it(text: str, meant: int) -> None:
    assert numbers.whole_number(text) == meant


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, ""),
        ((2_400, 12, False), "in 40m, 12 calls"),
        ((50, 1, False), "in 50s, 1 call"),
        ((0, 0, False), "now"),
        ((2_400, 12, True), "not before it refills"),
    ],
)
def test_burn_rate_is_shown_in_words(rate: tuple[int, int, bool] | None, text: str) -> None:
    names = ("empty_in_s", "empty_in_calls", "refills_first")
    assert numbers.until_empty(None if rate is None else dict(zip(names, rate, strict=True))) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "6,00",
        "600.000",
        "5.0",
        "1.0005k",
        "-1",
        "+50%",
        "1e3",
        "٣",
        "1,000,00",
        "0x10",
        "9" * 5000,
        "1k2",
        "nan",
    ],
)
def test_invalid_or_ambiguous_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 600,000"):
        numbers.whole_number(text)


def test_dollars_may_have_their_sign_and_cents() -> None:
    assert [str(numbers.number(text)) for text in ("$20", "20.50", "$1,000.5", "2k")] == [
        "20",
        "20.50",
        "1000.5",
        "2000",
    ]


@pytest.mark.parametrize(
    ("amount", "exact", "rounded"),
    [
        ("20.000000", "$20", "$20"),
        ("0.5", "$0.50", "$0.50"),
        ("37037.036730", "$37,037.03673", "$37,037.04"),
        ("0.0123456", "$0.0123456", "$0.0123"),
        ("0.000000", "$0", "$0"),
        ("100", "$100", "$100"),
        ("0.000001", "$0.000001", "$0.000001"),
    ],
)
def test_limits_are_exact_and_costs_are_rounded(amount: str, exact: str, rounded: str) -> None:
    assert (numbers.dollars(amount), numbers.cost(amount)) == (exact, rounded)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (90, "1m 30s"), (3600, "1h"), (5400, "1h 30m"), (86_400 * 30, "30d"), (90_061, "1d 1h")],
)
def test_a_time_is_shown_in_its_two_largest_units(seconds: int, text: str) -> None:
    assert numbers.span(seconds) == text


def test_a_budget_is_raised_by_numbers_as_people_write_them(
    mock_server: MockServer, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 20})
    assert gateway.web.chat("s").status == 200
    store = ["-c", str(gateway.file)]

    def said(*args: str) -> str:
        done = gateway_command("sessions", "budget", "s", *args, *store)
        assert done.code == 0, done.err
        return done.err

    assert "s: 30 calls (" in said("--calls", "+50%"), "of the configured one"
    assert "s: 600,000 tokens, 30 calls (" in said("600,000")
    assert "s: 900,000 tokens, 30 calls (" in said("+50%")
    assert "s: 500,000 tokens, $20, 30 calls (" in said("500k", "--usd", "$20")
    assert "s: 500,000 tokens, $25, 30 calls (" in said("--usd", "+25%")
    assert "s: 500,000 tokens, $1,000.50, 1,500 calls (" in said("--usd", "$1,000.50", "--calls", "1.5k")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["600.000"], 'tokens "600.000": not a whole number; write it as 600,000'),
        (["+50%"], 'tokens "+50%": there is no limit to raise'),
        (["10", "--calls", "+x%"], '--calls "+x%": not a number'),
        (
            ["9g", "--calls", "99999999999999999999"],
            '"99999999999999999999": "budget.calls" must be a whole number from 0 to',
        ),
    ],
)
def test_a_budget_that_is_no_number_is_refused_and_changes_nothing(
    args: list[str], reason: str, mock_server: MockServer, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url)
    assert gateway.web.chat("s").status == 200
    done = gateway_command("sessions", "budget", "s", *args, "-c", gateway.file)
    assert (done.code, done.out) == (2, "")
    assert reason in done.err
    assert "  no\n" not in done.err
    shown = gateway_command("sessions", "budget", "s", "--calls", "none", "-c", gateway.file)
    assert shown.err == "s: no budget\n"


def test_options_take_such_numbers_too(gateway_command: Commands) -> None:
    done = gateway_command("keys", "add", "alice", "--budget-tokens", "500k", "--budget-usd", "$20", "--rpm", "1,000")
    assert done.code == 0
    row = next(line for line in gateway_command("keys").lines if line.startswith("alice"))
    assert row.split()[1:5] == ["all", "500,000", "$20", "1,000"]
    body = gateway_command.file('{"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}', "body.json")
    assert "of 1,500 (" in gateway_command("trim", body, "--budget", "1.5k").err
    refused = gateway_command("trim", body, "--budget", "many")
    assert (refused.code, refused.out) == (2, "")
    assert '"many" is not a number' in refused.err


@pytest.mark.parametrize(
    "args",
    [[], ["serve"], ["demo"], ["trim"], ["models"], ["top"], ["replay"], ["sessions", "budget"], ["keys", "add"]],
)
def test_help_names_what_an_option_takes_in_words(args: list[str], gateway_command: Commands) -> None:
    shown = gateway_command.process(*args, "--help").out
    assert "<" not in shown.replace("<=", "")
    assert "on/off" in shown
    assert not args or re.search(r" (N|N\|\+N%\|none) ", shown)
