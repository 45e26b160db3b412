"""Test which settings need a restart, and that the documents list them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from tests.support.gateways import ROOT


def settings(**blocks: Any) -> config.Settings:
    return config.Settings.model_validate(blocks)


#: each key of the sections in which some need a restart, with another value than its default
CHANGED: dict[str, dict[str, Any]] = {
    "server": {
        "host": "::1", "port": 1, "workers": 2, "max_body_mb": 1, "max_concurrency": 1, "max_header_kb": 1,
        "header_timeout_s": 1, "body_timeout_s": 1, "write_timeout_s": 1, "cors_origins": ("https://a.example",),
        "shutdown_grace_s": 1, "dashboard": False,
    },
    "context": {
        "trim": "off", "budget": 9, "reserve_tokens": 9, "low_water": 0.5, "strategies": ("drop",),
        "keep_last_turns": 2, "result_max_tokens": 20, "recall": "off", "summary": {"model": "m"},
        "on_overflow": "least", "cache": "auto", "safety": 2, "deadline_ms": 9, "families": "mine.yaml", "memory_mb": 512,
    },
    "store": {"url": "memory://", "timeout_ms": 1, "on_failure": "open", "journal": "off"},
    "telemetry": {"log": {"format": "json", "level": "error"}, "metrics": False, "otel": True},
    "callbacks": {"webhooks": ({"url": "https://a.example", "events": ["on_finish"]},), "observers": ("a.B",),
                  "budget_thresholds": (90,)},
}  # fmt: skip
FOLLOWS = {
    "server": {"max_body_mb", "max_concurrency", "body_timeout_s", "write_timeout_s"},
    "context": {*CHANGED["context"]} - {"families", "memory_mb"},
}
VAIN = [
    *(f"{name}.{key}" for name, follows in FOLLOWS.items() for key in CHANGED[name] if key not in follows),
    *(f"store.{key}" for key in CHANGED["store"]),
    *("telemetry.log.format", "telemetry.log.level", "telemetry.metrics", "telemetry.otel"),
    *("callbacks.webhooks", "callbacks.observers", "callbacks.budget_thresholds"),
]


def test_what_needs_a_restart_stays_and_is_named_key_by_key() -> None:
    started, read = settings(), settings(**CHANGED)
    in_force, named = config.reloaded(started, read)
    assert sorted(named) == sorted(VAIN)
    for section in ("store", "telemetry", "callbacks"):
        assert getattr(in_force, section) == getattr(started, section)
    for name, follows in FOLLOWS.items():
        for key in CHANGED[name]:
            source = getattr(read if key in follows else started, name)
            assert getattr(getattr(in_force, name), key) == getattr(source, key), key


def test_every_key_of_these_sections_is_looked_at() -> None:
    for name, block in CHANGED.items():
        section = getattr(settings(), name)
        assert set(block) == set(type(section).model_fields)
        assert all(getattr(section, key) != getattr(getattr(settings(**CHANGED), name), key) for key in block)


def test_everything_else_is_as_it_was_read() -> None:
    blocks = {"budget": {"tokens": 5}, "auth": {"required": True}, "sessions": {"ttl": "1d"}, "default_provider": None}
    in_force, named = config.reloaded(settings(), settings(**blocks))
    assert (in_force, named) == (settings(**blocks), [])


@pytest.mark.parametrize(
    ("url", "named"), [("redis://localhost", ["sessions.ttl"]), ("memory://", []), ("sqlite:///a.db", [])]
)
def test_redis_ttl_needs_a_restart(url: str, named: list[str]) -> None:
    store = {"url": url}
    started, read = (settings(store=store, sessions={"ttl": ttl, "drain_s": 1}) for ttl in ("1d", "2d"))
    in_force, found = config.reloaded(started, read)
    assert found == named
    assert in_force.sessions.ttl == ("1d" if named else "2d")
    assert in_force.sessions.drain_s == 1


def test_the_next_reload_names_it_again_until_it_is_as_it_was_started() -> None:
    started, read = settings(), settings(server={"port": 1})
    first, _ = config.reloaded(started, read)
    assert config.reloaded(first, read)[1] == ["server.port"]
    assert config.reloaded(first, started)[1] == []


def named_in(file: str) -> set[str]:
    text = Path(ROOT, file).read_text("utf-8")
    if file == "gateway.yaml":
        text = text.replace("\n#", "")
        [sections, keys, last] = re.findall(
            r"These keys need a restart: ([^;]+); of server: ([^;]+); with a Redis also (\S+)\. ", text
        )[0]
        return {*sections.split(", "), *(f"server.{key}" for key in keys.split(", ")), last}
    [table] = re.findall(r"These keys need a restart:\n\n(.*?)\n\n", text, re.DOTALL)
    return {name for row in table.splitlines() for name in re.findall(r"`([a-z0-9_.]+)`", row.split("|")[1])}


@pytest.mark.parametrize("file", ["gateway.yaml", "docs/guides/deploy.md"])
def test_the_documents_name_what_needs_a_restart(file: str) -> None:
    assert named_in(file) == {
        *("store", "telemetry", "callbacks", "sessions.ttl", "context.families", "context.memory_mb"),
        *(key for key in VAIN if key.startswith("server.")),
    }
