"""Test notes about environment variables that look like keys, with the nearest key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gateway.config import load
from gateway.config.variables import unknown_variables
from gateway.core.errors import ConfigError
from tests.config.conftest import Load, Problems

SECRET = "sk-hunter2"

Notes = Callable[..., tuple[str, ...]]


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """Return the notes of a configuration in this environment."""

    def run(environment: Mapping[str, str], text: str = "") -> tuple[str, ...]:
        file = tmp_path / "gateway.yaml"
        file.write_text(text)
        return load(file, environment=environment).notes

    return run


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GATEWAY_SERVER_PROT", "GATEWAY_SERVER_PORT"),
        ("GATEWAY_PORT", "GATEWAY_SERVER_PORT"),
        ("GATEWAY_Server_Port", "GATEWAY_SERVER_PORT"),
        ("GATEWAY_STOER_URL", "GATEWAY_STORE_URL"),
        ("GATEWAY_AUTH_KEYS_0_KEY", "GATEWAY_AUTH_KEYS"),
        ("GATEWAY_BUDGET_TOKEN", "GATEWAY_BUDGET_TOKENS"),
        ("GATEWAY_PROVIDERS_OPENAI_KYE", "GATEWAY_PROVIDERS_OPENAI_KEY"),
        ("GATEWAY_PROVIDERS_OWN_BASEURL", "GATEWAY_PROVIDERS_OWN_BASE_URL"),
    ],
)
def test_a_variable_that_is_nearly_a_key_is_named_with_it_and_never_its_value(name: str, meant: str) -> None:
    (line,) = unknown_variables({name: SECRET}, ["openai", "own"])
    assert line == f"{name}: this variable has no effect: unknown key (did you mean {meant}?)"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GATEWAY_PROVIDERS_MY_PROV_BASE_URL", ""),
        ("GATEWAY_PROVIDERS_MY_PROV_BASEURL", ""),
        ("GATEWAY_PROVIDERS_OPENAI", ""),
        ("GATEWAY_PROVIDERS_OPNAI_BASE_URL", " (did you mean GATEWAY_PROVIDERS_OPENAI_BASE_URL?)"),
    ],
)
def test_variable_of_unconfigured_provider_has_a_remedy(name: str, meant: str) -> None:
    (line,) = unknown_variables({name: SECRET}, ["openai", "groq"])
    assert line == (
        f"{name}: this variable has no effect: this provider is not configured{meant}; "
        "add it to the file under providers: first"
    )


def test_a_variable_that_is_like_no_key_is_named_alone() -> None:
    assert unknown_variables({"GATEWAY_NOPE": SECRET}, []) == ["GATEWAY_NOPE: this variable has no effect: unknown key"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("GATEWAY_SERVICE_PORT", "80"),
        ("GATEWAY_SERVICE_PORT_HTTP", "80"),
        ("GATEWAY_PORT", "tcp://10.0.0.1:80"),
        ("GATEWAY_PORT_8484_TCP", "tcp://10.0.0.1:8484"),
        ("GATEWAY_PORT_8484_TCP_PROTO", "tcp"),
        ("GATEWAY_PORT_8484_TCP_PORT", "8484"),
        ("GATEWAY_PORT_8484_TCP_ADDR", "10.0.0.1"),
        ("GATEWAY_PORT_53_UDP_ADDR", "10.0.0.1"),
        ("GATEWAY_REDIS_SERVICE_HOST", "10.0.0.1"),
        ("GATEWAY_REDIS_PORT", "tcp://10.0.0.1:6379"),
        ("GATEWAY_REDIS_PORT_6379_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_kubernetes_service_variables_are_ignored(name: str, value: str) -> None:
    assert unknown_variables({name: value}, []) == []


@pytest.mark.parametrize(
    "name", ["HOME", "GATEWAY_", "_GATEWAY_FLAGS", "_GATEWAY_COMPLETE", "MY_GATEWAY_PORT", "GATEWAY"]
)
def test_variable_of_another_program_is_ignored(name: str) -> None:
    assert unknown_variables({name: "x"}, []) == []


def test_every_variable_that_is_used_is_known(notes: Notes, tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text('steps: [{name: "${GATEWAY_STEP}", available_tools: {allowed: [a]}}]')
    environment = {
        "GATEWAY_CONFIG": "elsewhere.yaml",
        "GATEWAY_SERVER_PORT": "1",
        "GATEWAY_BUILT_IN_PROVIDERS": "true",
        "GATEWAY_PROVIDERS_OPENAI_KEY": SECRET,
        "GATEWAY_PROVIDERS_AZURE_MAX_CONNECTIONS": "7",
        "GATEWAY_PROVIDERS_MY_HOST_TIMEOUT_S_CONNECT": "7",
        "GATEWAY_ALICE": "0123456789abcdef",
        "GATEWAY_UNSET": "",
        "GATEWAY_STEP": "first",
        "GATEWAY_AUTH_ADMIN_KEY": "${GATEWAY_ADMIN_SECRET}",
        "GATEWAY_ADMIN_SECRET": "0123456789abcdeg",
    }
    text = """
providers: {my-host: {base_url: "http://h"}, azure: {base_url: "http://a"}}
auth: {keys: [{name: "a${GATEWAY_UNSET:-b}", key: "${GATEWAY_ALICE}"}]}
agents: {one: agent.yaml}
"""
    assert notes(environment, text) == ()
    assert notes({**environment, "GATEWAY_ALICE_2": "x", "GATEWAY_A": "y"}, text)[0].startswith("GATEWAY_A: ")


def test_every_key_of_the_file_that_init_writes_has_a_variable(notes: Notes) -> None:
    found = notes({"GATEWAY_SERVER_DASHBOARD": "true", "GATEWAY_TELEMETRY_LOG_LEVEL": "info", "GATEWAY_STEPS": "[]"})
    assert found == ()


def test_a_problem_of_a_key_that_a_variable_overrides_names_it_and_one_of_a_flag_does_not(
    problems: Problems, loaded: Load
) -> None:
    set_by = {"GATEWAY_SERVER_PORT": "many", "GATEWAY_AUTH_KEYS": "[{name: a}]"}
    assert problems("server: {port: 8484}\nbudget: {tokens: -1}", set_by) == [
        "server.port: input should be a valid integer, unable to parse string as an integer (from GATEWAY_SERVER_PORT)",
        "auth.keys[0].key: field required (from GATEWAY_AUTH_KEYS)",
        "budget.tokens: input should be greater than or equal to 0 (got -1)",
    ]
    with pytest.raises(ConfigError) as refused:
        loaded("", {"GATEWAY_SERVER_PORT": "1"}, {"server.port": -1})
    assert refused.value.problems == ["server.port: input should be greater than or equal to 0 (got -1)"]
