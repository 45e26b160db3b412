"""Test the data on providers."""

from __future__ import annotations

import re

import pytest

from gateway.config import built_in_providers
from gateway.core.providers import (
    CHOOSING_TOOLS,
    HOSTS,
    MODEL_FIELDS,
    OBJECT_PATHS,
    PRICE_TABLE_ALIASES,
    PROVIDERS,
    host_row,
    price_factor,
)


def test_each_provider_has_one_row_and_each_row_says_something() -> None:
    names = [row.name for row in PROVIDERS]
    assert len(set(names)) == len(names)
    assert [row.name for row in PROVIDERS if not (row.models or row.price_table or row.telemetry)] == []
    assert {row.name for row in PROVIDERS if row.models} <= set(built_in_providers())


def test_no_pattern_of_models_belongs_to_two_providers() -> None:
    patterns = [pattern for row in PROVIDERS for pattern in row.models]
    assert len(set(patterns)) == len(patterns)


@pytest.mark.parametrize(
    ("host", "field", "compacts", "factor"),
    [
        ("api.openai.com", "max_completion_tokens", True, None),
        ("eu.api.openai.com", "max_completion_tokens", True, "regional_processing_uplift_multiplier_eu"),
        ("us.api.openai.com", "max_completion_tokens", True, "regional_processing_uplift_multiplier_us"),
        ("mine.openai.azure.com", "max_completion_tokens", True, None),
        ("mine.services.ai.azure.com", "max_completion_tokens", True, None),
        ("notopenai.com", "max_tokens", None, None),
        ("api.mistral.ai", "max_tokens", None, None),
        ("", "max_tokens", None, None),
    ],
)
def test_a_host_has_the_row_of_its_ending(host: str, field: str, compacts: bool | None, factor: str | None) -> None:
    row = host_row(host)
    assert (row.limit_field, row.compacts, price_factor(host)) == (field, compacts, factor)


def test_no_row_of_hosts_hides_a_later_one() -> None:
    endings = [row.ending for row in HOSTS]
    hidden = [(one, later) for at, one in enumerate(endings) for later in endings[at + 1 :] if later.endswith(one)]
    assert hidden == []


def test_another_domain_may_end_with_the_same_letters() -> None:
    assert host_row("openrouter.ai").chat_cache_marks
    for row in HOSTS:
        assert host_row(f"other{row.ending.removeprefix('.')}") != row


def test_every_model_has_default_fallbacks() -> None:
    defaults = [field.default for field in MODEL_FIELDS if field.default]
    assert all(default[-1][0] == "*" for default in defaults)
    assert all(field.is_instead for field in MODEL_FIELDS if field.default)


def test_patterns_and_aliases_are_well_formed() -> None:
    assert all(re.compile(path) for path in OBJECT_PATHS)
    assert not set(PRICE_TABLE_ALIASES) & set(PRICE_TABLE_ALIASES.values())
    assert all(":" in kind for kind in CHOOSING_TOOLS)
