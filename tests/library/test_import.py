"""Test that the names of the library are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gateway

#: prints the modules that a program has imported besides those of Python
PROGRAM = """
import sys
before = set(sys.modules)
{program}
print(*sorted({{name.partition('.')[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names))
print(len([name for name in sys.modules if name.startswith('gateway')]))
"""


def imported(program: str) -> tuple[list[str], int]:
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program=program)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return printed[0].split(), int(printed[1])


def test_import_of_the_package_imports_nothing_else() -> None:
    assert imported("import gateway; gateway.__version__") == (["gateway"], 1)


def test_budget_manager_needs_no_other_package() -> None:
    program = "from gateway import BudgetExhausted, BudgetManager, TokenCounter, render_result\n"
    program += "BudgetManager(100).render('text'); BudgetManager(100).allocate('text')"
    packages, modules = imported(program)
    assert packages == ["gateway"]
    assert modules < 80


@pytest.mark.parametrize("counter", ["tiktoken_counter()", "model_counter('gpt-5.1')"])
def test_counters_import_tiktoken_but_not_litellm(counter: str) -> None:
    packages, _ = imported(f"import gateway; gateway.{counter}.count('text')")
    assert "tiktoken" in packages
    assert not {"litellm", "redis", "starlette", "uvicorn"} & {*packages}


def test_every_name_can_be_imported_and_is_listed() -> None:
    assert {*gateway.__all__} <= {*dir(gateway)}
    for name in gateway.__all__:
        assert getattr(gateway, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gateway' has no attribute 'Budget'"):
        _ = gateway.Budget  # type: ignore[attr-defined]
