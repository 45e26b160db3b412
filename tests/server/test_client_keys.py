"""Settings of client keys in the store: what a change keeps, and which values are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.errors import ConfigError
from gateway.core.ledger.arithmetic import NO_LIMITS, Limits
from gateway.core.ledger.charging import KeyContext, SharedBudgets
from gateway.core.stored import MAX_REPLACED, ReplacedSecret, StoredKey
from gateway.server.auth import digest
from gateway.server.client_keys import changed, current, new_key, rotated

NOW = 1_800_000_000.0
KEY = StoredKey("bob", b"digest", 1.0, ("gpt-*",), Limits(1_000, 5_000_000_000, None, 86_400.0), 9, NOW + 60)


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ({"usd": 10}, Limits(1_000, 10_000_000_000, None, 86_400.0)),
        ({"usd": "0.5", "tokens": None}, Limits(None, 500_000_000, None, 86_400.0)),
        ({"window": "1h", "calls": 3}, Limits(1_000, 5_000_000_000, 3, 3_600.0)),
        ({"window": None}, Limits(1_000, 5_000_000_000, None, None)),
        ({"usd": None, "tokens": None}, NO_LIMITS),
        ({}, KEY.limits),
        (None, NO_LIMITS),
    ],
)
def test_change_of_budget_keeps_limits_that_are_not_named(asked: Any, limits: Limits) -> None:
    now = changed(KEY, {"budget": asked}, NOW)
    assert now.limits == limits
    assert (now.digest, now.models, now.rpm, now.expires_at) == (KEY.digest, KEY.models, KEY.rpm, KEY.expires_at)


def test_group_must_be_configured_and_can_be_left() -> None:
    member = changed(KEY, {"group": "research"}, NOW, KeyContext(SharedBudgets(groups={"research": NO_LIMITS})))
    assert member.group == "research"
    assert changed(member, {"rpm": 3}, NOW).group == "research", "of a group that is no longer configured"
    assert changed(member, {"group": None}, NOW).group is None


def test_null_removes_a_setting_and_others_stay() -> None:
    now = changed(KEY, {"models": None, "rpm": None, "expires": None}, NOW)
    assert (now.models, now.rpm, now.expires_at, now.limits) == ((), None, None, KEY.limits)
    assert changed(KEY, {"models": ["a", "b*"]}, NOW).models == ("a", "b*")
    assert changed(KEY, {"expires": "30d"}, NOW).expires_at == NOW + 30 * 86_400


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"colour": 1}, "colour: is not a setting"),
        ({"rpm": 0}, "rpm: "),
        ({"rpm": "many"}, "rpm: "),
        ({"models": "gpt"}, "models: "),
        ({"models": [""]}, "models: each must be one pattern"),
        ({"models": ["a,b"]}, "models: each must be one pattern"),
        ({"budget": 5}, "budget: must contain"),
        ({"budget": {"usd": -1}}, "budget.usd: "),
        ({"budget": {"euro": 1}}, "budget.euro: "),
        ({"budget": {"tokens": True}}, "budget.tokens: input should be a number"),
        ({"budget": {"window": "soon"}}, "budget.window: must be a duration"),
        ({"budget": {"usd": None, "tokens": None, "window": "1h"}}, "budget.window: has no limit"),
        ({"group": "nobody"}, "group: auth.groups of the configuration has no group"),
        ({"expires": 5}, "expires: must be a date"),
        ({"expires": "2020-01-01"}, "expires: must be in the future"),
        ({"expires": ""}, "expires: must be a date"),
    ],
)
def test_error_names_the_setting(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(KEY, asked, NOW)
    assert raised.value.problems[0].startswith(problem)


@pytest.mark.parametrize("name", ["default", "cred-1", "a/b", ""])
def test_name_of_a_new_key_must_be_valid_and_not_reserved(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        new_key(name, {}, "secret", NOW)
    assert raised.value.problems[0].startswith("name: ")


def test_rotation_keeps_the_present_secret_for_the_overlap() -> None:
    once = rotated(KEY, "new", NOW, "1h")
    assert (once.digest, once.replaced) == (digest("new"), (ReplacedSecret(b"digest", NOW + 3600),))
    twice = rotated(once, "newer", NOW + 10, "60s")
    assert [one.until for one in twice.replaced] == [NOW + 3600, NOW + 70]
    assert current(twice, NOW + 100).replaced == once.replaced
    assert rotated(twice, "newest", NOW, "0").replaced == ()


def test_replaced_secrets_are_bounded() -> None:
    key = KEY
    for number in range(MAX_REPLACED):
        key = rotated(key, f"secret {number}", NOW, "1h")
    with pytest.raises(ConfigError, match="overlap: 4 replaced secrets"):
        rotated(key, "one more", NOW, "1h")
    assert len(rotated(key, "one more", NOW + 3600, "1h").replaced) == 1
    with pytest.raises(ConfigError, match="overlap: must be a duration"):
        rotated(key, "one more", NOW, "soon")
