"""Test that every model of a known vendor has a family: in the installed litellm table and in models.yaml."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import families
from gateway.config.price_table import load_price_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "models.py"))


def table(provider: str, *names: str) -> dict[str, msgspec.Raw]:
    entry = json.dumps({"litellm_provider": provider, "mode": "chat"}).encode()
    return {name: msgspec.Raw(entry) for name in names}


def test_every_chat_model_of_a_known_vendor_has_a_family(script: dict[str, Any]) -> None:
    models = list(script["known_models"](load_price_table(), families()))
    assert len(models) > 500
    assert script["without_family"](models) == []


def test_a_model_without_a_family_is_named(script: dict[str, Any]) -> None:
    models = script["known_models"](table("openai", "zephyr-1", "gpt-5"), families())
    assert script["without_family"](models) == ["openai/zephyr-1"]


def test_every_row_of_the_own_table_has_a_family(script: dict[str, Any]) -> None:
    models = list(script["known_models"]({}, families()))
    assert {one.model for one in models} >= {"claude-fable-5-2", "gpt-6.2-sol"}
    assert script["without_family"](models) == script["unlisted"](models) == []


def test_each_exception_is_still_needed(script: dict[str, Any]) -> None:
    models = [one for one in script["known_models"](load_price_table(), families()) if one.family.name == "other"]
    used = {pattern for pattern in script["NO_FAMILY"] if any(Path(one.model).match(pattern) for one in models)}
    assert used == set(script["NO_FAMILY"])


def test_models_that_only_the_rule_for_new_ones_matches_are_listed_without_aliases(script: dict[str, Any]) -> None:
    models = script["known_models"](
        table("anthropic", "claude-opus-6", "claude-opus-latest", "claude-opus-5-5"), families()
    )
    assert [one.model for one in script["unlisted"](models)] == ["claude-opus-6"]


def test_what_is_known_is_printed() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "models.py"), "haiku-5-5", "fable-5-2"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    lines = [line.split() for line in ran.stdout.splitlines()]
    claude = "1,000,000 128,000"
    assert f"claude-haiku-5.5 anthropic/claude-haiku-5-5 {claude} 0.1 0.5 prefix accepted".split() in lines
    assert f"claude-5.5 anthropic/claude-fable-5-2 {claude} 8 40 prefix refused".split() in lines
    assert ["openai/gpt-6.2-sol"] in lines
