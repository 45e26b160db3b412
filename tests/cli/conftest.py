"""Run commands in a separate folder, without the settings and keys of the developer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.commands import Commands, Serving


@pytest.fixture
def gateway_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """`gateway_command("check", "--json")` runs it in this process, `.process(…)` in one of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for name in list(os.environ):
        if name.startswith("GATEWAY_") or name.endswith("_API_KEY"):
            monkeypatch.delenv(name)
    return Commands(folder)


@pytest.fixture
def serving(gateway_command: Commands) -> Iterator[Callable[..., Serving]]:
    """`serving("--mock", …)`: a gateway on a free port; its store is a file in the folder of `gateway_command`."""
    running: list[Serving] = []

    def start(*args: str | Path, env: Mapping[str, str] | None = None) -> Serving:
        running.append(Serving(gateway_command.folder, ("--port", "0", *args), env))
        return running[-1]

    yield start
    for gateway in running:
        gateway.stop()
