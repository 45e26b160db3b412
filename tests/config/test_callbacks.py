from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.core.errors import ConfigError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
HOOK = {"url": "https://app.example/hooks"}


def load(folder: Path, callbacks: dict[str, Any]) -> config.Callbacks:
    file = folder / "gateway.yaml"
    file.write_text(json.dumps({"callbacks": callbacks}))
    return config.load(file, environment={}).settings.callbacks


def test_a_webhook_needs_an_address_alone(tmp_path: Path) -> None:
    [hook] = load(tmp_path, {"webhooks": [HOOK]}).webhooks
    assert (hook.url, hook.events, hook.secret, hook.timeout_s) == (HOOK["url"], ("on_finish",), None, 10)


def test_budget_thresholds_are_sorted_and_unique(tmp_path: Path) -> None:
    assert load(tmp_path, {}).budget_thresholds == (50, 80, 95, 100)
    assert load(tmp_path, {"budget_thresholds": [90, 75, 90]}).budget_thresholds == (75, 90)


@pytest.mark.parametrize("wrong", [[], [0], [101], [50] * 11, ["half"], 80])
def test_invalid_budget_thresholds_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"budget_thresholds": wrong})
    assert error.value.problems[0].startswith("callbacks.budget_thresholds")


def test_names_of_headers_are_taken_as_they_are_compared(tmp_path: Path) -> None:
    [hook] = load(tmp_path, {"webhooks": [{**HOOK, "headers": {"Authorization": "Bearer x y"}}]}).webhooks
    assert hook.headers == {"authorization": "Bearer x y"}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"url": "app.example"}, "url: must be a URL like https://app.example/hooks/gateway"),
        ({"url": "ftp://app.example"}, "url: must be"),
        ({"url": "https://"}, "url: must be"),
        ({"url": "https://app.example:99999/"}, "url: must be"),
        ({"url": "https://app.example/a b"}, "url: must be"),
        ({"url": "https://app.example/#x"}, "url: must be"),
        ({"url": "https://ü.example/"}, "url: must be"),
        ({"events": []}, "events: "),
        ({"events": ["on_finish", "on_start"]}, "events[1]: "),
        ({"secret": "hush"}, "secret: must be whsec_ and 24 to 64 random bytes"),
        ({"secret": "whsec_c2hvcnQ="}, "secret: must be whsec_"),
        ({"timeout_s": 0}, "timeout_s: "),
        ({"timeout_s": 61}, "timeout_s: "),
        ({"headers": {"a b": "c"}}, "headers: "),
        ({"headers": {"webhook-signature": "c"}}, "headers: "),
        ({"headers": {"Content-Length": "1"}}, "headers: "),
        ({"headers": {"x": "a\r\nb: c"}}, "headers: "),
        ({"method": "GET"}, "method: unknown key"),
        ({"format": "html"}, "format: "),
    ],
)
def test_invalid_webhook_is_refused_with_reason(changed: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"webhooks": [HOOK, {**HOOK, **changed}]})
    [found] = error.value.problems
    assert found.startswith(f"callbacks.webhooks[1].{problem}")


@pytest.mark.parametrize(
    "changed",
    [
        {"url": "https://app.example/ very-secret"},
        {"secret": "very-secret"},
        {"headers": {"x": "very-secret\n\u00e9"}},
        {"headers": "very-secret"},
    ],
)
def test_errors_do_not_repeat_secrets(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"webhooks": [{**HOOK, **changed}]})
    assert "very-secret" not in str(error.value)


def test_nothing_secret_is_shown(tmp_path: Path) -> None:
    hook = {"url": "https://app.example/very-secret", "secret": SECRET, "headers": {"x": "very-secret"}}
    shown = repr(load(tmp_path, {"webhooks": [hook]}))
    assert "very-secret" not in shown
    assert SECRET not in shown


@pytest.mark.parametrize("path", ["a.b", "a.b.C", "a.b:C", "über.b.C"])
def test_an_observer_is_named_by_its_dotted_path(path: str, tmp_path: Path) -> None:
    assert load(tmp_path, {"observers": [path]}).observers == (path,)


@pytest.mark.parametrize("path", ["a", "", "a..b", ".a", "a.b.", "a/b.C", "a.b:C.d", "1a.b"])
def test_invalid_dotted_path_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {"observers": [path]})
    assert error.value.problems == ["callbacks.observers: must be dotted paths like package.module.Class"]
