"""What the audit log shows of two configurations."""

from __future__ import annotations

import json
from typing import Any

from gateway.config.differences import differences
from gateway.config.schema import Settings

SECRET = "secret-0123456789abcdef"


def compared(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    before, after = differences(Settings.model_validate(old), Settings.model_validate(new))
    return dict(before), dict(after)


def test_equal_configurations_differ_in_nothing() -> None:
    assert compared({"budget": {"tokens": 5}}, {"budget": {"tokens": 5}}) == ({}, {})


def test_numbers_and_switches_are_shown() -> None:
    old = {"budget": {"tokens": 5, "usd": "1.50", "modes": True}}
    assert compared(old, {"budget": {"tokens": 7, "modes": False}, "server": {"shutdown_grace_s": 2.5}}) == (
        {"server.shutdown_grace_s": 30.0, "budget.tokens": 5, "budget.usd": "1.50", "budget.modes": True},
        {"server.shutdown_grace_s": 2.5, "budget.tokens": 7, "budget.usd": None, "budget.modes": False},
    )


def test_keys_and_models_are_named() -> None:
    row = {"name": "alice", "key": SECRET}
    bob = {"name": "bob", "key": f"{SECRET}-2", "rpm": 3}
    assert compared({"auth": {"keys": [row]}}, {"auth": {"keys": [bob, {**row, "rpm": 9}]}}) == (
        {"auth.keys[alice].rpm": None},
        {"auth.keys[alice].rpm": 9, "auth.keys[bob]": "set"},
    )
    assert compared({"auth": {"keys": [bob]}}, {}) == ({"auth.keys[bob]": "set"}, {})


def test_no_text_is_shown() -> None:
    def settings(mark: str) -> dict[str, Any]:
        return {
            "auth": {"admin_key": f"{SECRET}-admin-{mark}", "keys": [{"name": "a", "key": f"{SECRET}-{mark}"}]},
            "store": {"url": f"redis://:{SECRET}{mark}@localhost/0"},
            "providers": {
                "own": {
                    "base_url": f"https://example.org/{SECRET}{mark}",
                    "key": f"{SECRET}-{mark}",
                    "headers": {"x-secret": f"{SECRET}{mark}"},
                    "options": {"pin": f"{SECRET}{mark}"},
                    "adapter": "litellm",
                    "litellm": "openai",
                }
            },
            "callbacks": {
                "webhooks": [{"url": f"https://example.org/{SECRET}{mark}", "headers": {"x-a": f"{SECRET}{mark}"}}]
            },
            "server": {"cors_origins": [f"https://{SECRET}{mark}.example"]},
        }

    both = compared(settings("one"), settings("two"))
    assert SECRET not in json.dumps(both)
    for path in ("auth.admin_key", "auth.keys[a].key", "store.url", "providers.own.headers.x-secret"):
        assert both[0][path] == both[1][path] == "set", path
    assert both[0]["providers.own.options.pin"] == "set"


def test_a_large_difference_is_bounded() -> None:
    agents = {f"agent-{number}": {"tokens": number} for number in range(1, 100)}
    new = {name: {"tokens": row["tokens"] + 1} for name, row in agents.items()}
    before, after = compared({"budget": {"agents": agents}}, {"budget": {"agents": new}})
    assert len(before) == len(after) == 51
    assert before["other keys"] == 49
