"""Load a text as gateway.yaml, with its own environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gateway.config import Loaded, load
from gateway.core.errors import ConfigError

Load = Callable[..., Loaded]
Problems = Callable[..., list[str]]


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    """Load a text with only these variables and flags."""

    def run(
        text: str = "", environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
    ) -> Loaded:
        file = tmp_path / "gateway.yaml"
        file.write_text(text, "utf-8")
        return load(file, environment=environment or {}, flags=flags)

    return run


@pytest.fixture
def problems(loaded: Load) -> Problems:
    """Return the errors of a text; empty if it loads."""

    def run(text: str = "", environment: Mapping[str, str] | None = None) -> list[str]:
        try:
            loaded(text, environment)
        except ConfigError as error:
            return error.problems
        return []

    return run
