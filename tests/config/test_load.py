"""Test loading gateway.yaml: errors have key paths and no secrets, and moved providers get no keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.config import (
    BUILT_IN_ROUTES,
    Provider,
    Settings,
    check_exposure,
    data_folder,
    duration,
    is_loopback,
    json_schema,
    load,
    load_passed_on,
    model_facts,
    pass_on,
    template,
)
from gateway.core.errors import ConfigError
from tests.config.conftest import Load, Problems

SECRET = "sk-hunter2-hunter2-hunter2"


def problems_of(loaded: Load, text: str, environment: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, environment)
    return caught.value.problems


# --- defaults -------------------------------------------------------------------------------------------------------------


def test_an_empty_file_gives_the_documented_defaults(loaded: Load) -> None:
    settings = loaded().settings
    assert (settings.server.host, settings.server.port, settings.server.workers) == ("127.0.0.1", 8484, 1)
    assert settings.server.max_body_mb == 64
    assert settings.default_provider == "openai"
    assert settings.sessions.id_headers == ("x-session-id",)
    assert (settings.sessions.on_missing, settings.sessions.on_disconnect) == ("derive", "drain")
    assert (settings.sessions.stream_totals, settings.sessions.usage_missing) == ("comment", "estimate")
    assert settings.sessions.ttl_s == 30 * 86_400
    assert settings.store.url == "sqlite://~/.local/share/gateway/gateway.db"
    assert settings.store.timeout_ms == 250
    assert settings.auth.keys == ()
    assert settings.auth.admin_key is None


def test_every_built_in_route_leads_to_a_built_in_provider(loaded: Load) -> None:
    assert {provider for _, provider in BUILT_IN_ROUTES} <= set(loaded().settings.providers)


def test_refusals_that_are_not_billed_are_documented_for_the_api_of_anthropic_alone(loaded: Load) -> None:
    providers = loaded("providers: {anthropic: {base_url: http://127.0.0.1:1/v1}}").settings.providers
    told = {name: one.billed_refusals for name, one in providers.items() if one.billed_refusals is not None}
    assert told == {"anthropic": ("bio", "frontier_llm", "reasoning_extraction")}


def test_the_servers_of_this_machine_get_no_credential_and_are_on_it(loaded: Load) -> None:
    providers = loaded().settings.providers
    local = {name for name, row in providers.items() if row.base_url.startswith("http://127.0.0.1:")}
    assert (
        local
        == {"ollama", "vllm", "llamacpp", "lmstudio"}
        == {name for name, row in providers.items() if row.auth == "none"}
    )


# --- azure: each customer has its own host ------------------------------------------------------------------------------

AZURE_KEY = "azure-0123456789abcdef"


@pytest.mark.parametrize("endpoint", ["https://me.openai.azure.com", "https://me.openai.azure.com/"])
def test_azure_is_built_in_where_its_endpoint_is_named(endpoint: str, loaded: Load) -> None:
    found = loaded(environment={"AZURE_OPENAI_ENDPOINT": endpoint, "AZURE_OPENAI_API_KEY": AZURE_KEY})
    azure = found.settings.providers["azure"]
    assert (azure.base_url, azure.auth) == ("https://me.openai.azure.com/openai/v1", "api-key")
    assert azure.key.get_secret_value() == AZURE_KEY
    assert found.key_sources["azure"] == "AZURE_OPENAI_API_KEY"


def test_azure_with_own_url_does_not_get_the_environment_key(loaded: Load) -> None:
    text = "providers: {azure: {base_url: 'https://own.example/openai/v1'}}"
    environment = {"AZURE_OPENAI_ENDPOINT": "https://other.example", "AZURE_OPENAI_API_KEY": AZURE_KEY}
    row = loaded(text, environment).settings.providers["azure"]
    assert (row.base_url, row.auth) == ("https://own.example/openai/v1", "api-key")
    assert row.key.get_secret_value() == ""


def test_azure_without_a_host_is_asked_for_its_address(loaded: Load) -> None:
    text = "providers: {azure: {key: 0123456789abcdef}}"
    assert problems_of(loaded, text) == ["providers.azure.base_url: field required"]
    [problem] = problems_of(loaded, "models: [{match: gpt-5, provider: azure}]")
    assert problem.startswith("models[0].provider: unknown provider")


def test_a_key_that_would_not_be_sent_is_an_error(loaded: Load) -> None:
    [problem] = problems_of(loaded, "providers: {vllm: {key: 0123456789abcdef}}")
    assert problem == "providers.vllm: auth: none sends no key; set auth: bearer, x-api-key or api-key"
    environment = {"OPENAI_API_KEY": SECRET}
    for adapter in ("http", "litellm"):
        text = f"providers: {{openai: {{auth: none, adapter: {adapter}}}}}"
        assert loaded(text, environment).settings.providers["openai"].key.get_secret_value() == ""
    row = loaded("providers: {vllm: {key: 0123456789abcdef, auth: bearer}}").settings.providers["vllm"]
    assert (row.auth, row.base_url) == ("bearer", "http://127.0.0.1:8000/v1")


def test_settings_cannot_be_changed_after_they_are_read(loaded: Load) -> None:
    settings = loaded().settings
    with pytest.raises(ValueError, match="frozen"):
        setattr(settings.server, "port", 1)  # noqa: B010  # the type checker knows it is read-only


# --- search for the file ---------------------------------------------------------------------------------------------------


def test_a_file_is_looked_for_as_named_then_in_the_environment_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert load(environment={}).file is None
    for folder, port in ((here, 1), (tmp_path / "env", 2), (tmp_path / "flag", 3)):
        folder.mkdir(exist_ok=True)
        (folder / "gateway.yaml").write_text(f"server: {{port: {port}}}")
    environment = {"GATEWAY_CONFIG": str(tmp_path / "env" / "gateway.yaml")}
    assert load(environment={}).settings.server.port == 1
    assert load(environment={"GATEWAY_CONFIG": ""}).settings.server.port == 1
    assert load(environment=environment).settings.server.port == 2
    found = load(tmp_path / "flag" / "gateway.yaml", environment=environment)
    assert (found.settings.server.port, found.file) == (3, tmp_path / "flag" / "gateway.yaml")


def test_a_named_file_that_does_not_exist_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file.*gateway init"):
        load(tmp_path / "nowhere.yaml", environment={})
    with pytest.raises(ConfigError, match="no such file"):
        load(environment={"GATEWAY_CONFIG": str(tmp_path / "nowhere" / "gateway.yaml")})


def test_a_named_folder_is_said_to_be_one(tmp_path: Path) -> None:
    for named, environment in ((tmp_path, {}), (None, {"GATEWAY_CONFIG": str(tmp_path)})):
        with pytest.raises(ConfigError) as caught:
            load(named, environment=environment)
        assert caught.value.problems == [
            f"{tmp_path}: is a folder; name the file in it, such as {tmp_path}/gateway.yaml"
        ]


def test_a_pipe_is_refused_as_it_could_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: is not a regular file"):
        load(tmp_path / "pipe", environment={})


def test_a_name_that_no_file_can_have_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"xxx: cannot be read: File name too long"):
        load(tmp_path / ("x" * 300), environment={})


def test_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_SERVER_PORT", "9123")
    monkeypatch.delenv("GATEWAY_CONFIG", raising=False)
    assert load().settings.server.port == 9123


# --- errors with their key paths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("serverr: {}", "serverr: unknown key (did you mean server?)"),
        ("server: {prot: 1}", "server.prot: unknown key (did you mean port?)"),
        ("qqqqqq: 1", "qqqqqq: unknown key"),
        ("telemetry: {log: {levl: debug}}", "telemetry.log.levl: unknown key (did you mean level?)"),
        ("providers: {openai: {kye: a}}", "providers.openai.kye: unknown key (did you mean key?)"),
        ("providers: {openai: {timeout_s: {conect: 1}}}", "providers.openai.timeout_s.conect: unknown key (did you mean connect?)"),
        ("models: [{match: a, provider: openai, betas: {x: 0}}]",
         "models[0].betas.x: input should be greater than or equal to 1"),
        ("models: [{match: a, provider: openai, betas: [x]}]",
         "models[0].betas: input should be keys and values, like {a: b}"),
        ("models: [{match: a, provider: openai, betas: {" + ", ".join(f"b{n}: 1" for n in range(17)) + "}}]",
         "models[0].betas: takes 16 entries or fewer, and has 17"),
        ("models: [{match: a, provider: openai, input: 0}]",
         "models[0].input: input should be greater than or equal to 1"),
        ("models: [{match: a, provider: openai, windw: 1}]", "models[0].windw: unknown key (did you mean window?)"),
        ("server: {port: 99999}", "server.port: input should be less than or equal to 65535"),
        ("server: {port: -1}", "server.port: input should be greater than or equal to 0"),
        ("server: {max_body_mb: 0}", "server.max_body_mb: input should be greater than 0"),
        ("sessions: {ttl: forever}", "sessions.ttl: must be a duration like 90s, 15m, 12h or 30d"),
        ("sessions: {results_max_mb: -1}", "sessions.results_max_mb: input should be greater than or equal to 0"),
        ("sessions: {results_max_mb: 1.0e300}", "sessions.results_max_mb: input should be less than or equal to 1048576"),
        ("sessions: {on_missing: guess}", "sessions.on_missing: input should be 'derive', 'require' or 'none'"),
        ("store: {url: postgres}", "store.url: must be memory://, sqlite://PATH, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/SERVICE/DB or redis+cluster://HOST:PORT,… (rediss… for TLS)"),
        ("store: {url: 'sqlite://'}", "store.url: must be memory://, sqlite://PATH, redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/SERVICE/DB or redis+cluster://HOST:PORT,… (rediss… for TLS)"),
        ("providers: {x: {base_url: 'http://h:99999/v1'}}", "providers.x.base_url: must have a host, and optionally a port from 1 to 65535"),
        ("providers: {x: {base_url: 'http://h:0/v1'}}", "providers.x.base_url: must have a host, and optionally a port from 1 to 65535"),
        ("providers: {x: {base_url: 'http://h:a/v1'}}", "providers.x.base_url: must have a host, and optionally a port from 1 to 65535"),
        ("providers: {x: {base_url: 'http://:80/v1'}}", "providers.x.base_url: must have a host, and optionally a port from 1 to 65535"),
        ("providers: {x: {base_url: 'http://[::1/v1'}}", "providers.x.base_url: must have a host, and optionally a port from 1 to 65535"),
        ("providers: {x: {base_url: 'ftp://h'}}", "providers.x.base_url: must be an http:// or https:// URL without query"),
        ("providers: {x: {base_url: 'http://h/v1?a=b'}}", "providers.x.base_url: must be an http:// or https:// URL without query"),
        ("providers: {x: {}}", "providers.x.base_url: field required"),
        ("providers: {x: {base_url: 'http://h', headers: {'a b': c}}}", "providers.x.headers: 'a b' is not a valid header name"),
        ("providers: {x: {base_url: 'http://h', auth: basic}}", "providers.x.auth: input should be 'bearer', 'x-api-key', 'api-key' or 'none'"),
        ("default_provider: opnai", "default_provider: unknown provider (did you mean openai?)"),
        ("models: [{match: a, provider: grok}]", "models[0].provider: unknown provider (did you mean groq?)"),
        ("models: [{provider: openai}]", "models[0].match: field required"),
        ("models: [{match: '', provider: openai}]", "models[0].match: matches no model; * matches all"),
        ("providers: {x/y: {base_url: 'http://h'}}", "providers: 'x/y' cannot be the name of a provider, because calls name provider/model; leave out the slash"),
        ("providers: {'': {base_url: 'http://h'}}", "providers: '' cannot be the name of a provider, because calls name provider/model"),
        ("providers: {openai: {key_prefixes: [sk-, ' ']}}", "providers.openai.key_prefixes: an empty prefix matches every key; leave it out"),
        ("store: {url: 'redis://h:99999'}", "store.url: each host is a name or an address, optionally with a port from 1 to 65535"),
        ("store: {url: 'redis://h/abc'}", "store.url: after the hosts only a database number may follow, as in /0"),
        ("store: {url: 'redis://h?foo=1'}", "store.url: unknown option; known: none without TLS (rediss://)"),
        ("store: {url: 'sqlite:///tmp/x.db?mode=ro'}", "store.url: sqlite://PATH takes no options; remove the question mark and what follows it"),
        ("models: [{match: a, provider: openai, price: {input: -1, output: 1}}]", "models[0].price.input: input should be greater than or equal to 0"),
        ("server: {host: not a host}", "server.host: is neither an address nor a host name"),
        ("server: {host: ''}", "server.host: is empty; write 127.0.0.1, or 0.0.0.0 to listen on every address"),
        ("server: {host: '[]'}", "server.host: is empty; write 127.0.0.1, or 0.0.0.0 to listen on every address"),
        ("server: {host: 'http://0.0.0.0'}", "server.host: is neither an address nor a host name"),
        ("server: {workers: 2}\nstore: {url: 'memory://'}", "server.workers: more than one worker needs a shared store; set store.url to sqlite://PATH"),
        ("store: {url: 'sqlite://~nobody-here/x.db'}", "store.url: the folder ~nobody-here is unknown; write an absolute path"),
        ("store: {journal: ~nobody-here/x}", "store.journal: the folder ~nobody-here is"),
        ('store: {url: "sqlite://a\\0b"}', "store.url: a path cannot contain the character NUL"),
        ("providers: {openai: {tls: {ca_file: ~nobody-here}}}", "providers.openai.tls.ca_file: the folder ~nobody-here is"),
        ("agents: {a: ~nobody-here/x.yaml}", "agents.a: the folder ~nobody-here is"),
        ("steps: [{name: a, conditions: [{message_matches: '" + "(" * 3000 + ")" * 3000 + "'}]}]", "steps[0].conditions[0].message_matches: is not a valid regular expression: it is nested too deeply"),
        ("models: [{match: a, provider: openai, price: {input: 1e999999, output: 1}}]", "models[0].price.input: input should be less than or equal to 4500000"),
        ("auth: {keys: [{name: a b, key: 0123456789abcdef}]}", "auth.keys[0].name: use 1-255 characters of A-Z a-z 0-9 . _ : -"),
        ("auth: {keys: [{name: a, key: short}]}", "auth.keys[0].key: a key needs at least 16 characters"),
        ("budget: {usd: 1e-99999999}", "budget.usd: is less than a billionth of a dollar; use 0, or at least 0.000000001"),
        ("budget: {usd: '0.0000000009'}", "budget.usd: is less than a billionth of a dollar"),
        ("auth: {keys: [{name: a, key: 0123456789abcdef, rpm: 99999999999999999999999}]}", "auth.keys[0].rpm: input should be less than or equal to 9007199254740992"),
        ("auth: {keys: [{name: a, key: 0123456789abcdef}, {name: a, key: 0123456789abcdeg}]}", "auth.keys: keys[0] and keys[1] have the same name"),
        ("auth: {keys: [{name: a, key: 0123456789abcdef}, {name: b, key: 0123456789abcdeg}, {name: c, key: 0123456789abcdef}]}", "auth.keys: keys[0] and keys[2] have the same key"),
        ("auth: {admin_key: 0123456789abcdef, keys: [{name: a, key: 0123456789abcdef}]}", "auth: admin_key is also a client key, and that client could raise every budget; choose another one"),
    ],
)  # fmt: skip
def test_a_problem_is_named_by_its_key_path_with_what_is_wrong(loaded: Load, text: str, problem: str) -> None:
    (found,) = problems_of(loaded, text)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("server: {port: -1}", "-1"),
        ("budget: {tokens: -5}", "-5"),
        ("budget: {usd: -0.5}", "-0.5"),
        ("budget: {lease_s: 4}", "4"),
        ("store: {timeout_ms: 0}", "0"),
        ("providers: {openai: {retries: 11}}", "11"),
        ("providers: {openai: {breaker: {failures: 0}}}", "0"),
        ("providers: {openai: {timeout_s: {connect: -1}}}", "-1"),
        ("auth: {keys: [{name: a, key: 0123456789abcdef, rpm: 0}]}", "0"),
        ("auth: {keys: [{name: a, key: 0123456789abcdef, budget: {calls: -7}}]}", "-7"),
    ],
)
def test_a_number_that_can_be_no_secret_is_shown(loaded: Load, text: str, got: str) -> None:
    (problem,) = problems_of(loaded, text)
    assert problem.endswith(f" (got {got})")


@pytest.mark.parametrize(
    "text",
    [
        "auth: {keys: [{name: a, key: 1234567890123456}]}",
        "auth: {keys: [{name: 1234567890123456, key: 0123456789abcdef}]}",
        "auth: {admin_key: 1234567890123456}",
        "auth: {admin_key: '1234567890123456', keys: [{name: a, key: '1234567890123456'}]}",
        "providers: {budget: {base_url: 'http://h', key: 1234567890123456}}",
        "providers: {retries: {base_url: 'http://h', key: 1234567890123456}}",
        "providers: {openai: {headers: {x: 1234567890123456}}}",
        "store: {url: 1234567890123456}",
        "budget: {tokens: '1234567890123456x'}",
    ],
)
def test_what_may_be_a_secret_is_never_shown(loaded: Load, text: str) -> None:
    (problem,) = problems_of(loaded, text)
    assert "1234567890123456" not in problem


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("server: [1]", "server"),
        ("providers: [1]", "providers"),
        ("providers: {openai: null}", "providers.openai"),
        ("models: {a: 1}", "models"),
        ("models: [null]", "models[0]"),
        ("auth: {keys: 7}", "auth.keys"),
        ("server: {port: {}}", "server.port"),
    ],
)
def test_a_value_of_another_shape_is_named_by_its_path(loaded: Load, text: str, path: str) -> None:
    assert [problem.partition(":")[0] for problem in problems_of(loaded, text)] == [path]


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize(
    "path",
    [
        "server.max_body_mb",
        "server.max_header_kb",
        "server.body_timeout_s",
        "server.shutdown_grace_s",
        "server.port",
        "sessions.drain_s",
        "store.timeout_ms",
        "providers.openai.timeout_s.connect",
    ],
)
def test_infinite_number_is_named_by_its_path(loaded: Load, path: str, number: str) -> None:
    *sections, key = path.split(".")
    text = "".join(f"{section}: {{" for section in sections) + f"{key}: {number}" + "}" * len(sections)
    assert [problem.partition(":")[0] for problem in problems_of(loaded, text)] == [path]


@pytest.mark.parametrize("number", ["1.0e+300", "9" * 400, "0x" + "f" * 4000])
@pytest.mark.parametrize(
    "path",
    [
        "server.max_body_mb",
        "server.max_header_kb",
        "server.body_timeout_s",
        "server.shutdown_grace_s",
        "sessions.drain_s",
        "store.timeout_ms",
        "context.budget",
        "context.reserve_tokens",
        "context.result_max_tokens",
        "providers.openai.breaker.open_s",
    ],
)
def test_too_large_number_is_named_by_its_path(loaded: Load, path: str, number: str) -> None:
    *sections, key = path.split(".")
    text = "".join(f"{section}: {{" for section in sections) + f"{key}: {number}" + "}" * len(sections)
    assert [problem.partition(":")[0] for problem in problems_of(loaded, text)] == [path]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("auth: {}\nserver: {}\nauth: {}", "auth: is set twice, in lines 1 and 3"),
        ("server:\n  port: 1\n  port: 2", "server.port: is set twice, in lines 2 and 3"),
        ("models:\n- match: a\n  provider: openai\n  match: b", "models[0].match: is set twice, in lines 2 and 4"),
        ("providers: {x: {}, 'x': {}}", "providers.x: is set twice, in lines 1 and 1"),
    ],
)
def test_duplicate_key_is_named_with_its_lines(loaded: Load, text: str, problem: str) -> None:
    (found,) = problems_of(loaded, text)
    assert found.startswith(problem)


def test_all_duplicate_keys_are_named(loaded: Load) -> None:
    found = problems_of(loaded, "store: {}\nserver: {port: 1, port: 2}\nstore: {}")
    assert [problem.partition(":")[0] for problem in found] == ["server.port", "store"]


def test_merged_key_is_no_duplicate(loaded: Load) -> None:
    text = """
providers:
  a: {timeout_s: &slow {<<: &base {connect: 1, first_byte: 2}, connect: 3}, base_url: http://h}
  b: {timeout_s: {<<: *slow, first_byte: 4}, base_url: http://h}
"""
    providers = loaded(text).settings.providers
    limits = [(providers[name].timeout_s.connect, providers[name].timeout_s.first_byte) for name in ("a", "b")]
    assert limits == [(3, 2), (3, 4)]


@pytest.mark.parametrize(
    "text",
    [
        "server:",
        "auth:",
        "providers:",
        "models:",
        "telemetry:\n  log:",
        "auth:\n  keys:",
        "providers:\n  openai:\n    timeout_s:\n    headers:",
        "\n".join(f"{name}:" for name in ("server", "auth", "models", "sessions", "store", "telemetry")),
    ],
)
def test_a_section_with_nothing_below_counts_as_not_given(loaded: Load, text: str) -> None:
    assert loaded(text).settings == loaded("").settings


def test_a_variable_reaches_below_an_empty_section(loaded: Load) -> None:
    assert loaded("server:", {"GATEWAY_SERVER_PORT": "1234"}).settings.server.port == 1234


def test_a_header_that_could_not_be_sent_names_no_session(loaded: Load) -> None:
    for name in ("bad header", "", "a:b", "é"):
        found = problems_of(loaded, f"sessions: {{id_headers: [X-Good, '{name}']}}")
        assert [problem.partition(":")[0] for problem in found] == ["sessions.id_headers"]
    assert loaded("sessions: {id_headers: [X-Good_1]}").settings.sessions.id_headers == ("x-good_1",)


def test_credential_and_gateway_headers_cannot_name_sessions(loaded: Load) -> None:
    for name in ("Authorization", "x-api-key", "API-Key", "x-goog-api-key", "x-portkey-virtual-key"):
        [problem] = problems_of(loaded, f"sessions: {{id_headers: [X-Good, {name}]}}")
        assert problem == (
            f"sessions.id_headers: {name.lower()} holds a credential, which would be stored and logged as a session id"
        )
    for name in ("X-Parent-Session-Id", "x-session-agent", "x-session-budget-tokens", "x-context-trim"):
        [problem] = problems_of(loaded, f"sessions: {{id_headers: [X-Good, {name}]}}")
        assert problem.startswith(f"sessions.id_headers: {name.lower()} has another meaning for the gateway")
    assert loaded("sessions: {id_headers: [x-session-id, x-request-id]}").settings.sessions.id_headers


def test_every_problem_is_named_at_once(loaded: Load) -> None:
    found = problems_of(loaded, "server: {port: x, wrkers: 1}\nsessions: {ttl: 3x}\nmodels: [{match: a}]\nextra: 1")
    assert {problem.partition(":")[0] for problem in found} == {
        "server.port", "server.wrkers", "sessions.ttl", "models[0].provider", "extra",
    }  # fmt: skip


def test_every_reference_to_a_provider_that_is_not_there_is_named_at_once(loaded: Load) -> None:
    found = problems_of(loaded, "default_provider: a1\nmodels: [{match: a, provider: b1}, {match: b, provider: c1}]")
    paths = sorted(problem.partition(":")[0] for problem in found)
    assert paths == ["default_provider", "models[0].provider", "models[1].provider"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "is not valid YAML"),
        ("- a", "must contain keys and values, like server: {port: 8484}, not a list"),
        ("just text", "not a text"),
        ("8484", "not a single value"),
        ("a: \x07", "YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(loaded: Load, text: str, why: str) -> None:
    (problem,) = problems_of(loaded, text)
    assert why in problem
    assert "gateway.yaml: " in problem


def test_a_file_that_is_no_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"gateway\.yaml: cannot be read"):
        load(file, environment={})


# --- precedence ---------------------------------------------------------------------------------------------------------------------


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(loaded: Load) -> None:
    environment, flags = {"GATEWAY_SERVER_PORT": "2"}, {"server.port": 3}
    assert loaded("server: {port: 1}").settings.server.port == 1
    assert loaded("server: {port: 1}", environment).settings.server.port == 2
    assert loaded("server: {port: 1}", environment, flags).settings.server.port == 3


def test_override_keeps_neighbouring_keys(loaded: Load) -> None:
    settings = loaded("server: {port: 1, host: localhost}", {"GATEWAY_SERVER_PORT": "2"}).settings
    assert (settings.server.host, settings.server.port) == ("localhost", 2)


@pytest.mark.parametrize(
    ("variable", "text", "path", "value"),
    [
        ("GATEWAY_SERVER_MAX_BODY_MB", "1.5", "server.max_body_mb", 1.5),
        ("GATEWAY_SESSIONS_ID_HEADERS", "[X-A, x-b]", "sessions.id_headers", ("x-a", "x-b")),
        ("GATEWAY_SESSIONS_TTL", "12h", "sessions.ttl", "12h"),
        ("GATEWAY_TELEMETRY_LOG_LEVEL", "debug", "telemetry.log.level", "debug"),
        ("GATEWAY_DEFAULT_PROVIDER", "null", "default_provider", None),
        ("GATEWAY_DEFAULT_PROVIDER", "groq", "default_provider", "groq"),
        ("GATEWAY_STORE_URL", "memory://", "store.url", "memory://"),
    ],
)
def test_any_key_can_be_set_by_a_variable(loaded: Load, variable: str, text: str, path: str, value: object) -> None:
    found: object = loaded("", {variable: text}).settings
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_providers_keys_can_be_set_by_variables_also_under_a_name_with_a_dash(loaded: Load) -> None:
    environment = {"GATEWAY_PROVIDERS_MY_HOST_TIMEOUT_S_CONNECT": "7", "GATEWAY_PROVIDERS_OPENAI_MAX_CONNECTIONS": "5"}
    providers = loaded("providers: {my-host: {base_url: 'http://h'}}", environment).settings.providers
    assert providers["my-host"].timeout_s.connect == 7
    assert providers["openai"].max_connections == 5


GUARDED = """
server: {host: 127.0.0.2, port: 1}
auth: {keys: [{name: alice, key: 0123456789abcdef}], admin_key: 0123456789abcdeg}
budget: {tokens: 100, window: 1d}
steps: [{name: first, available_tools: {allowed: [a]}}]
providers: {openai: {key: sk-1}}
"""


@pytest.mark.parametrize("nothing", ["", " ", "\n"])
@pytest.mark.parametrize(
    "key",
    [
        "SERVER_HOST",
        "SERVER_PORT",
        "AUTH_KEYS",
        "AUTH_ADMIN_KEY",
        "AUTH_REQUIRED",
        "BUDGET_TOKENS",
        "BUDGET_WINDOW",
        "STEPS",
        "STORE_URL",
        "PROVIDERS_OPENAI_KEY",
        "PROVIDERS_OPENAI_BASE_URL",
    ],
)
def test_empty_variable_has_no_effect(loaded: Load, key: str, nothing: str) -> None:
    assert loaded(GUARDED, {f"GATEWAY_{key}": nothing}).settings == loaded(GUARDED).settings


def test_variable_null_sets_null(loaded: Load) -> None:
    environment = {"GATEWAY_BUDGET_TOKENS": "null", "GATEWAY_BUDGET_WINDOW": "null", "GATEWAY_AUTH_KEYS": "[]"}
    settings = loaded(GUARDED, environment).settings
    assert (settings.budget.tokens, settings.budget.window, settings.auth.keys) == (None, None, ())


def test_a_wrong_variable_is_named_by_the_key_it_sets(loaded: Load) -> None:
    (problem,) = problems_of(loaded, "", {"GATEWAY_SERVER_PORT": "many"})
    assert problem.startswith("server.port: ")


@pytest.mark.parametrize("number", ["0x" + "f" * 4000, "9" * 5000, "2001-99-99", "[" * 3000])
def test_variable_with_impossible_number_is_named_by_its_key(loaded: Load, number: str) -> None:
    (problem,) = problems_of(loaded, "", {"GATEWAY_SERVER_PORT": number})
    assert problem.startswith("server.port: ")


def test_variables_of_other_programs_are_ignored(loaded: Load) -> None:
    environment = {"GATEWAY_PORT": "tcp://10.0.0.1:80", "GATEWAY_SERVER": "x", "GATEWAY_SERVICE_HOST": "y"}
    assert loaded("", environment).settings == loaded().settings


@pytest.mark.parametrize(
    "secret",
    [
        "1234567890123456",
        "0x1234567890abcdef",
        "1234567890e12345",
        "sk-0123456789: abc",
        "sk-0123456789 #abc",
        "*sk-0123456789abc",
        "[0123456789abcdef",
    ],
)
def test_a_secret_from_a_variable_is_taken_as_it_is_written(loaded: Load, secret: str) -> None:
    settings = loaded("", {"GATEWAY_AUTH_ADMIN_KEY": secret, "GATEWAY_PROVIDERS_OPENAI_KEY": secret}).settings
    assert settings.auth.admin_key is not None
    assert settings.auth.admin_key.get_secret_value() == secret
    assert settings.providers["openai"].key.get_secret_value() == secret


# --- ${NAME} --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("${NAME}", "value"),
        ("a-${NAME}-b", "a-value-b"),
        ("${NAME}${NAME}", "valuevalue"),
        ("${NAME:-default}", "value"),
        ("${UNSET:-default}", "default"),
        ("${EMPTY:-default}", "default"),
        ("${UNSET:-}x", "x"),
        ("$NAME", "$NAME"),
        ("${1X}", "${1X}"),
        ("${NAME", "${NAME"),
    ],
)
def test_a_variable_in_a_string_is_replaced(loaded: Load, written: str, host: str) -> None:
    settings = loaded(f"server: {{host: '{written}'}}", {"NAME": "value", "EMPTY": ""}).settings
    assert settings.server.host == host


def test_what_a_variable_holds_is_not_expanded_again(loaded: Load) -> None:
    assert loaded("server: {host: '${A}'}", {"A": "${B}", "B": "b"}).settings.server.host == "${B}"


def test_every_variable_that_is_not_set_is_named_with_its_key_and_the_remedy(loaded: Load) -> None:
    found = problems_of(loaded, "server: {host: '${A}'}\nauth: {keys: [{name: '${B}', key: '${C}'}]}")
    expected = {"server.host": "A", "auth.keys[0].name": "B", "auth.keys[0].key": "C"}
    assert len(found) == len(expected)
    for (path, name), problem in zip(expected.items(), found, strict=True):
        assert problem.startswith(f"{path}: the environment variable {name} is not set; set it")
        assert problem.endswith(f"write ${{{name}:-default}}")


def test_a_reference_is_checked_after_its_variable_was_replaced(loaded: Load) -> None:
    text = "default_provider: '${P:-openai}'\nmodels: [{match: a, provider: '${P:-groq}'}]"
    settings = loaded(text).settings
    assert (settings.default_provider, settings.models[0].provider) == ("openai", "groq")
    assert [problem.partition(":")[0] for problem in problems_of(loaded, text, {"P": "nobody"})] == [
        "default_provider",
        "models[0].provider",
    ]


def test_workers_without_a_shared_store_are_refused_wherever_the_values_come_from(loaded: Load) -> None:
    for text, environment in [
        ("server: {workers: '${W}'}\nstore: {url: '${S}'}", {"W": "2", "S": "memory://"}),
        ("", {"GATEWAY_SERVER_WORKERS": "2", "GATEWAY_STORE_URL": "memory://"}),
    ]:
        (problem,) = problems_of(loaded, text, environment)
        assert problem.startswith("server.workers: ")


# --- providers -------------------------------------------------------------------------------------------------------------------------


def test_a_block_adds_to_the_built_in_provider_key_by_key(loaded: Load) -> None:
    provider = loaded("providers: {openai: {max_connections: 7}}", {"OPENAI_API_KEY": SECRET}).settings.providers[
        "openai"
    ]
    assert provider.max_connections == 7
    assert provider.base_url == "https://api.openai.com/v1"
    assert provider.key.get_secret_value() == SECRET


def test_a_provider_moved_by_the_file_does_not_get_the_key_of_the_old_address(loaded: Load) -> None:
    text = "providers: {openai: {base_url: 'http://elsewhere/v1'}}"
    found = loaded(text, {"OPENAI_API_KEY": SECRET})
    assert found.settings.providers["openai"].key.get_secret_value() == ""
    assert "openai" not in found.key_sources


def test_a_provider_moved_by_a_flag_does_not_get_the_key_of_the_old_address(loaded: Load) -> None:
    flags = {"providers.openai.base_url": "http://elsewhere/v1"}
    assert loaded("", {"OPENAI_API_KEY": SECRET}, flags).settings.providers["openai"].key.get_secret_value() == ""


def test_a_provider_moved_by_a_variable_does_not_get_the_key_of_the_old_address(loaded: Load) -> None:
    environment = {"OPENAI_API_KEY": SECRET, "GATEWAY_PROVIDERS_OPENAI_BASE_URL": "http://elsewhere/v1"}
    provider = loaded("", environment).settings.providers["openai"]
    assert provider.base_url == "http://elsewhere/v1"
    assert provider.key.get_secret_value() == ""


def test_a_provider_moved_together_with_its_key_keeps_it(loaded: Load) -> None:
    text = "providers: {openai: {base_url: 'http://elsewhere', key: '${MINE}'}}"
    found = loaded(text, {"MINE": SECRET, "OPENAI_API_KEY": "other"})
    assert found.settings.providers["openai"].key.get_secret_value() == SECRET
    assert found.key_sources == {"openai": "MINE"}


def test_it_is_known_where_each_key_came_from(loaded: Load) -> None:
    text = "providers: {mine: {base_url: 'http://h', key: written-here}, bare: {base_url: 'http://h'}}"
    assert loaded(text, {"OPENAI_API_KEY": "a", "GROQ_API_KEY": ""}).key_sources == {
        "openai": "OPENAI_API_KEY",
        "mine": "configuration",
    }


def test_a_key_that_a_variable_would_replace_comes_from_the_configuration(loaded: Load) -> None:
    text = "providers: {mine: {base_url: 'http://h', key: '${MINE:-written-here}'}}"
    assert loaded(text).key_sources == {"mine": "configuration"}
    assert loaded(text, {"MINE": SECRET}).key_sources == {"mine": "MINE"}


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("http://h", "http://h/v1"),
        ("http://h/", "http://h/v1"),
        ("https://h:8443/api/v2/", "https://h:8443/api/v2"),
        ("http://[::1]:9/x", "http://[::1]:9/x"),
    ],
)
def test_a_bare_host_gets_the_version_segment_and_a_path_is_kept(loaded: Load, written: str, address: str) -> None:
    found = loaded(f"providers: {{x: {{base_url: '{written}'}}}}").settings
    assert found.providers["x"].base_url == address


@pytest.mark.parametrize(
    "address", ["http://", "http:///v1", "h", "//h", "http://h/v1#x", "http://h/a b", "file:///etc", "http://h\n"]
)
def test_what_is_no_address_is_refused(loaded: Load, address: str) -> None:
    (problem,) = problems_of(loaded, f'providers: {{x: {{base_url: "{address}"}}}}'.replace("\n", "\\n\\n x"))
    assert problem.startswith("providers.x.base_url: must be an http:// or https:// URL")


def test_fixed_headers_are_kept_in_lower_case_and_may_not_break_out(loaded: Load) -> None:
    text = 'providers: {x: {base_url: "http://h", headers: {X-Team: "a\\tb"}}}'
    assert loaded(text).settings.providers["x"].headers == {"x-team": "a\tb"}
    for value in ("a\\r\\nx: y", "\\x00", "é"):
        (problem,) = problems_of(loaded, text.replace("a\\tb", value))
        assert problem == "providers.x.headers: the value of 'X-Team' has characters that are not allowed in headers"


def test_a_provider_may_be_named_by_a_number(loaded: Load) -> None:
    settings = loaded("providers: {1: {base_url: 'http://h'}}\ndefault_provider: '1'").settings
    assert "1" in settings.providers
    (problem,) = problems_of(loaded, "providers: {1: {base_url: 'http://h'}}\ndefault_provider: nobody")
    assert problem.startswith("default_provider: ")


def test_the_built_in_providers_can_be_switched_off_in_the_file_and_by_a_variable(loaded: Load) -> None:
    text = "providers: {mine: {base_url: 'http://h'}}\ndefault_provider: mine\n"
    assert set(loaded(text + "built_in_providers: false").settings.providers) == {"mine"}
    assert set(loaded(text, {"GATEWAY_BUILT_IN_PROVIDERS": "false"}).settings.providers) == {"mine"}


def test_missing_default_provider_is_named(loaded: Load) -> None:
    found = problems_of(loaded, "built_in_providers: false\nproviders: {mine: {base_url: 'http://h'}}")
    assert [problem.partition(":")[0] for problem in found] == ["default_provider"]


def test_no_default_provider_is_a_choice(loaded: Load) -> None:
    assert loaded("default_provider: null").settings.default_provider is None
    text = "built_in_providers: false\nproviders: {mine: {base_url: 'http://h'}}\ndefault_provider: null"
    assert loaded(text).settings.default_provider is None


# --- secrets -----------------------------------------------------------------------------------------------------------------------------


def test_secrets_are_not_in_the_repr_of_settings(loaded: Load) -> None:
    text = f"auth: {{admin_key: {SECRET}-1, keys: [{{name: a, key: {SECRET}-2}}]}}\nproviders: {{x: {{base_url: 'http://h', key: {SECRET}-3}}}}"
    found = loaded(text, {"OPENAI_API_KEY": f"{SECRET}-4"})
    assert SECRET not in repr(found)
    assert SECRET not in str(found.settings)
    assert SECRET not in repr(found.settings.model_dump())
    assert SECRET not in found.settings.model_dump_json()


@pytest.mark.parametrize(
    "text",
    [
        "auth: {admin_key: [SECRET]}",
        "auth: {admin_key: {a: SECRET}}",
        "auth: {keys: [SECRET]}",
        "auth: {keys: SECRET}",
        "auth: {keys: {a: SECRET}}",
        "auth: {keys: [{name: a, key: [SECRET]}]}",
        "auth: {keys: [{name: a, kye: SECRET}]}",
        "auth: {keys: [{nam: a, key: SECRET}]}",
        "auth: SECRET",
        "auth: {adminkey: SECRET}",
        "providers: {openai: {key: [SECRET]}}",
        "providers: {openai: {kye: SECRET}}",
        "providers: {openai: SECRET}",
        "providers: SECRET",
        "providers: {x: {key: SECRET}}",
        "providers: {x: {base_url: 'https://user:SECRET@h'}}",
        "providers: {x: {base_url: 'https://h/v1?key=SECRET'}}",
        'providers: {x: {base_url: "http://h", headers: {authorization: "Bearer\\r\\nSECRET"}}}',
        'providers: {x: {base_url: "http://h", headers: {authorization: ["SECRET"]}}}',
        'providers: {openai: {key: "SECRET\\q"}}',
        "providers: {openai: {key: *SECRET}}",
        "providers: {openai: {key: !SECRET x}}",
        "providers: {openai: {key: SECRET",
        "key: SECRET: x",
        "store: {url: 'redis://:SECRET@h:x'}",
        "store: {url: 'redis+sentinel://:SECRET@h'}",
    ],
)
def test_a_secret_in_a_wrong_place_is_not_in_the_message(loaded: Load, text: str) -> None:
    problems = problems_of(loaded, text.replace("SECRET", SECRET))
    assert SECRET not in "\n".join(problems)


def test_a_secret_number_in_a_header_is_not_in_the_message(loaded: Load) -> None:
    text = "providers: {x: {base_url: 'http://h', headers: {x-api-key: 1234567890123456}}}"
    assert "1234567890123456" not in "\n".join(problems_of(loaded, text))


def test_a_variable_that_holds_a_secret_is_named_by_name_only(loaded: Load) -> None:
    found = problems_of(loaded, "providers: {openai: {base_url: '${OPENAI_API_KEY}'}}", {"OPENAI_API_KEY": SECRET})
    assert SECRET not in "\n".join(found)


# --- open access ---------------------------------------------------------------------------------------------------------------------------

OPEN = "server: {host: 0.0.0.0}"
KEYS = "auth: {keys: [{name: a, key: 0123456789abcdef}]}"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.example.com", "localhost.evil"]
)
def test_provider_key_on_network_needs_client_keys(loaded: Load, host: str) -> None:
    settings = loaded(f"server: {{host: '{host}'}}", {"OPENAI_API_KEY": SECRET}).settings
    with pytest.raises(
        ConfigError, match=r"auth\.keys: .*openai.*Set auth\.keys, .*or listen on 127\.0\.0\.1"
    ) as caught:
        check_exposure(settings)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        (OPEN, {}),
        (f"{OPEN}\n{KEYS}", {"OPENAI_API_KEY": SECRET}),
        (f"{OPEN}\nauth: {{required: true}}", {"OPENAI_API_KEY": SECRET}),
        ("server: {host: 127.0.0.1}", {"OPENAI_API_KEY": SECRET}),
        ("server: {host: localhost}", {"OPENAI_API_KEY": SECRET}),
        ("server: {host: '::1'}", {"OPENAI_API_KEY": SECRET}),
    ],
)
def test_other_open_configurations_are_allowed(loaded: Load, text: str, environment: dict[str, str]) -> None:
    check_exposure(loaded(text, environment).settings)


@pytest.mark.parametrize("written", ["''", "'${ADMIN:-}'", "'  '"])
def test_empty_admin_key_is_no_key(loaded: Load, written: str) -> None:
    try:
        settings = loaded(f"auth: {{admin_key: {written}}}").settings
    except ConfigError as error:
        problems = error.problems
    else:
        problems = ["auth.admin_key: unset"] if settings.auth.admin_key is None else []
    assert [problem.partition(":")[0] for problem in problems] == ["auth.admin_key"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.255.1.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("128.0.0.1", False),
     ("::", False), ("", False), ("127.0.0.1\n", False), ("127.0.0", False)],
)  # fmt: skip
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


# --- durations, stores, tables ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000), ("36500d", 3_153_600_000)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: int) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0s", "00d", "5", "s", "1 s", "1w", "-1s", "1.5h", "1h30m", "1s\n", "1S", "36501d", "9" * 400 + "d", "٣d"],
)
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration(text)


@pytest.mark.parametrize("url", ["redis://user:SECRET@h:1/2", "rediss+sentinel://:SECRET@h,i:2/main/1"])
def test_the_password_of_a_store_is_shown_nowhere(loaded: Load, url: str) -> None:
    settings = loaded(f"store: {{url: '{url}'}}".replace("SECRET", SECRET)).settings
    assert SECRET in settings.store.url
    assert SECRET not in f"{settings!r} {settings} {settings.store} {settings.store.shown_url}"
    assert settings.store.shown_url == url.replace("user:", "").replace(":SECRET@", "").replace("SECRET@", "")


def test_a_stores_path_is_below_the_home_folder_where_it_says_so(loaded: Load) -> None:
    settings = loaded("store: {url: 'sqlite://~/x.db'}").settings
    assert settings.store.sqlite_path == Path.home() / "x.db"
    assert loaded("store: {url: 'sqlite:///tmp/x.db'}").settings.store.sqlite_path == Path("/tmp/x.db")
    assert loaded("store: {url: 'memory://'}").settings.store.sqlite_path is None


def test_the_table_of_model_facts_is_read_and_its_problems_are_named(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("a: {window: 5, price: {input: 0.15, output: 1}}\n1: {}")
    found = model_facts(file)
    assert set(found) == {"a", "1"}
    assert found["a"].price is not None
    assert found["a"].price.input == Decimal("0.15")
    file.write_text("a: {windw: 5}\nb: {window: 0, input: 0}")
    with pytest.raises(ConfigError) as caught:
        model_facts(file)
    assert [problem.partition(":")[2].strip().partition(":")[0] for problem in caught.value.problems] == [
        "a.windw",
        "b.window",
        "b.input",
    ]


def test_the_shipped_tables_are_where_they_are_looked_for() -> None:
    assert (data_folder() / "providers.yaml").is_file()
    assert model_facts()


def test_every_setting_is_described_for_editors() -> None:
    schema = json_schema()
    missing = [
        f"{section['title']}.{name}"
        for section in (schema, *schema["$defs"].values())
        for name, field in section.get("properties", {}).items()
        if "description" not in field and "$ref" not in field and section["title"] != "PriceRow"
    ]
    assert missing == []
    assert all(section["description"] for section in schema["$defs"].values())


def test_the_schema_in_the_repository_is_the_one_the_code_gives() -> None:
    written = json.loads((data_folder() / "gateway.schema.json").read_text("utf-8"))
    assert written == json.loads(json.dumps(json_schema()))


def test_the_file_that_init_writes_holds_the_defaults_and_nothing_else(loaded: Load) -> None:
    assert loaded(template()).settings == loaded().settings


def test_workers_and_reloads_read_what_the_command_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("server: {port: 1, workers: 2}")
    monkeypatch.setattr("os.environ", dict(os.environ))
    pass_on(file, {"server.port": 3})
    found = load_passed_on()
    assert (found.file, found.settings.server.port, found.settings.server.workers) == (file, 3, 2)


# --- summaries ------------------------------------------------------------------------------------------------------------


def test_no_summary_model_by_default(loaded: Load) -> None:
    summary = loaded().settings.context.summary
    assert (summary.model, summary.max_tokens) == (None, 800)


def test_summaries_need_a_model_that_is_named_and_served(loaded: Load) -> None:
    [problem] = problems_of(loaded, "context: {strategies: [summarize, drop]}")
    assert problem.startswith("context.summary.model: summarize needs a model")
    nobody = "default_provider: null\ncontext: {strategies: [summarize, drop], summary: {model: small}}"
    [problem] = problems_of(loaded, nobody)
    assert problem.startswith("context.summary.model: No provider is configured")
    for model in ("gpt-5.1-mini", "groq/llama", "mine"):
        text = nobody.replace("small", model) + "\nmodels: [{match: mine, provider: openai}]"
        assert loaded(text).settings.context.summary.model == model
    [problem] = problems_of(loaded, nobody.replace("small", "gpt-5.1") + "\nbuilt_in_providers: false")
    assert problem.startswith("context.summary.model: No provider")


def test_closing_calls_and_a_cheaper_model_are_off_by_default(loaded: Load) -> None:
    budget = loaded().settings.budget
    assert (budget.closing, budget.downgrade) == (None, None)
    made = loaded("budget: {closing: {}, downgrade: {model: small}}").settings.budget
    assert made.closing is not None
    assert made.downgrade is not None
    assert (made.closing.reserve, "{tokens}" in made.closing.message, made.downgrade.below) == (0.1, True, 0.2)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("closing: {reserve: 0}", "budget.closing.reserve"),
        ("closing: {reserve: 0.6}", "budget.closing.reserve"),
        ("closing: {message: ''}", "budget.closing.message"),
        ("closing: {message: '{usd} left'}", "budget.closing.message: contains a name in braces other than {tokens}"),
        ("closing: {room: 1}", "budget.closing.room"),
        ("downgrade: {below: 0.2}", "budget.downgrade.model"),
        ("downgrade: {below: 1, model: small}", "budget.downgrade.below"),
        ("downgrade: {model: small}", "budget.downgrade.model: No provider is configured"),
    ],
)
def test_an_error_of_them_names_its_key(loaded: Load, text: str, path: str) -> None:
    [problem] = problems_of(loaded, f"default_provider: null\nbudget: {{{text}}}")
    assert problem.startswith(path), problem


def test_result_summary_model_must_have_a_provider(loaded: Load) -> None:
    assert loaded().settings.budget.summary_model is None
    text = "default_provider: null\nbudget: {summary_model: small}"
    [problem] = problems_of(loaded, text)
    assert problem.startswith("budget.summary_model: No provider is configured")
    served = loaded(text + "\nmodels: [{match: small, provider: openai}]").settings
    assert served.budget.summary_model == "small"


def test_summaries_are_asked_of_a_provider_that_takes_chat(loaded: Load) -> None:
    text = "models: [{match: small, provider: openai}]\nproviders: {openai: {dialects: [FORMAT]}}\n"
    summed = text + "budget: {summary_model: small}\ncontext: {summary: {model: openai/any}}"
    assert problems_of(loaded, summed.replace("FORMAT", "responses, messages")) == [
        f"{path}: summaries use the format chat, which providers.openai.dialects does not list"
        for path in ("budget.summary_model", "context.summary.model")
    ]
    assert loaded(summed.replace("FORMAT", "responses, chat")).settings.budget.summary_model == "small"
    assert loaded(text.replace("FORMAT", "responses")).settings.providers["openai"].dialects == ("responses",)
    [problem] = problems_of(loaded, text.replace("FORMAT", "chats"))
    assert problem.startswith("providers.openai.dialects[0]: input should be 'chat', ")
    [problem] = problems_of(loaded, text.replace("FORMAT", ""))
    assert problem == "providers.openai.dialects: is empty; name formats, or leave it out to send every call"


def test_shared_and_fallback_models_must_have_a_provider(loaded: Load) -> None:
    text = "default_provider: null\nmodels: [{match: a, provider: {openai: 3, groq: 1}, fallback: [groq/x, a-typo]}]"
    [problem] = problems_of(loaded, text)
    assert problem.startswith("models[0].fallback[1]: No provider is configured")
    assert loaded(text.replace(", a-typo", "")).settings.models[0].providers == ("openai", "groq")
    [problem] = problems_of(loaded, "models: [{match: a, provider: {openai: 1, gorq: 1}}]")
    assert problem.startswith("models[0].provider: unknown provider")
    for wrong in ("{}", "{openai: 0}", "{openai: -1}"):
        assert problems_of(loaded, f"models: [{{match: a, provider: {wrong}}}]")


@pytest.mark.parametrize("tokens", [0, 49, 4001])
def test_a_summary_has_a_sensible_length(loaded: Load, tokens: int) -> None:
    [problem] = problems_of(loaded, f"context: {{summary: {{max_tokens: {tokens}}}}}")
    assert problem.startswith("context.summary.max_tokens: ")


# --- journals and names of keys -------------------------------------------------------------------------------------------


def journal_of(loaded: Load, **store: str) -> Path | None:
    return loaded(json.dumps({"store": store})).settings.store.journal_path


def test_two_stores_never_share_a_journal(loaded: Load, tmp_path: Path) -> None:
    named = str(tmp_path / "journals")
    places = [
        journal_of(loaded, url=url, **extra)
        for url in ("redis://one:6379/0", "redis://two:6379/0", "redis://one:6379/1", f"sqlite://{tmp_path}/a.db")
        for extra in ({}, {"journal": named})
    ]
    assert None not in places
    assert len(set(places)) == len(places)


def test_the_journal_of_a_redis_does_not_change_with_its_password(loaded: Load) -> None:
    one, other = (journal_of(loaded, url=f"redis://:{word}@one:6379") for word in ("old-word", "new-word"))
    assert one == other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://h", "redis://H:6379/0"),
        ("redis://h/", "rediss://user:word@h?ssl_check_hostname=false"),
        ("redis://[::1]", "redis://[::1]:6379"),
        ("redis+cluster://a,b:7000", "redis+cluster://b:7000,a:6379/0"),
        ("redis+sentinel://a,b/my%2dmain", "redis+sentinel://b:26379,a/my-main/0"),
    ],
)
def test_the_journal_of_a_redis_does_not_change_with_how_its_address_is_written(
    loaded: Load, one: str, other: str
) -> None:
    assert journal_of(loaded, url=one) == journal_of(loaded, url=other)


def test_the_journal_of_a_file_does_not_change_with_how_its_path_is_written(
    loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = str(tmp_path / "journals")
    monkeypatch.chdir(tmp_path)
    here = journal_of(loaded, url="sqlite://a.db", journal=named)
    assert journal_of(loaded, url=f"sqlite://{tmp_path}/a.db", journal=named) == here
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert journal_of(loaded, url="sqlite://a.db", journal=named) != here, "it is another file"


def test_no_journal_in_memory_or_if_off(loaded: Load) -> None:
    assert journal_of(loaded, url="memory://") is None
    assert loaded("store: {url: 'redis://one', journal: off}").settings.store.journal_path is None


@pytest.mark.parametrize("name", ["default", "anonymous", "cred-0123456789abcdef"])
def test_a_client_key_is_not_named_like_callers_that_have_none(loaded: Load, name: str) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys\[0\]\.name: .*callers without a key"):
        loaded(json.dumps({"auth": {"keys": [{"name": name, "key": "0123456789abcdef"}]}}))


# --- adapter: litellm -------------------------------------------------------------------------------------------------


def test_a_translated_provider_needs_no_address_and_its_address_is_taken_as_it_is(loaded: Load) -> None:
    text = "providers: {aws: {adapter: litellm, litellm: bedrock}, own: {adapter: litellm, base_url: 'http://h/'}}"
    rows = loaded(text).settings.providers
    assert (rows["aws"].base_url, rows["aws"].litellm) == ("", "bedrock")
    assert rows["own"].base_url == "http://h"


def test_a_built_in_provider_that_is_translated_keeps_its_key_and_no_address(loaded: Load) -> None:
    row = loaded("providers: {anthropic: {adapter: litellm}}", {"ANTHROPIC_API_KEY": "k"}).settings.providers[
        "anthropic"
    ]
    assert (row.base_url, row.headers, row.key.get_secret_value()) == ("", {}, "k")
    assert row.key_prefixes == ("sk-ant-",)


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("{adapter: litelm, base_url: 'http://h'}", "providers.x.adapter: input should be 'http' or 'litellm'"),
        ("{base_url: 'http://h', litellm: bedrock}", "providers.x: litellm and options need adapter: litellm"),
        ("{base_url: 'http://h', options: {a: b}}", "providers.x: litellm and options need adapter: litellm"),
        ("{adapter: litellm, litellm: '../x'}", "providers.x.litellm: must be a provider name of litellm, like bedrock or vertex_ai"),
        ("{adapter: litellm, options: {api_key: k}}", "providers.x.options: 'api_key' is set by the gateway, or is not an argument of litellm"),
        ("{adapter: litellm, options: {_x: k}}", "providers.x.options: '_x' is set by the gateway, or is not an argument of litellm"),
        ("{adapter: litellm, tls: {verify: false}}", "providers.x: tls does not work with adapter: litellm; set SSL_CERT_FILE in the environment"),
    ],
)  # fmt: skip
def test_settings_that_need_another_adapter_are_refused(loaded: Load, block: str, complaint: str) -> None:
    assert problems_of(loaded, f"providers: {{x: {block}}}") == [complaint]


def test_a_credential_that_litellm_finds_by_itself_is_a_held_one(loaded: Load) -> None:
    text = "{server: {host: 0.0.0.0}, providers: {aws: {adapter: litellm, litellm: bedrock, auth: none}}}"
    with pytest.raises(ConfigError, match=r"auth\.keys: .*aws"):
        check_exposure(loaded(text).settings)


# --- any content of the file ------------------------------------------------------------------------------------------


def key_paths(section: type[BaseModel], *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys that are not sections."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from key_paths(kind, *before, name)
        else:
            yield (*before, name)


PATHS = [*key_paths(Settings), *key_paths(Provider, "providers", "openai"), ("agents", "a")]
NUMBERS = ["9" * 400, "0x" + "f" * 4000, "1.0e+300", "1e999", ".nan", "-1", "2001-01-01"]
STEPS = [{"name": "a", "conditions": [{"message_matches": "(" * 3000 + ")" * 3000}]}]
WORDS = ["~nobody-here", "~/x", "${A}", "${A:-}", "5s", "99999999999d", "off", "http://[", "redis://:", "sqlite://~x"]
ODD = st.sampled_from([*NUMBERS, *WORDS, "\udc80", "\0", "\n", "*", "!x", "&a", "[" * 3000])
ODD_VALUES = st.recursive(
    ODD | st.just(STEPS) | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ODD | st.just("name"), inner, max_size=2),
    max_leaves=4,
)


def flow(value: Any) -> str:
    """Return a value as YAML on one line. Texts have no quotes, so that they can be anything."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return str(value)


@given(st.sampled_from(PATHS), ODD_VALUES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_value_is_taken_or_named_by_its_path(path: tuple[str, ...], value: Any, is_json: bool) -> None:
    tree: Any = value
    for name in reversed(path):
        tree = {name: tree}
    text = json.dumps(tree) if is_json else flow(tree)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "gateway.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        problems: list[str] = []
        try:
            load(file, environment={})
        except ConfigError as error:
            problems = error.problems
    assert all(problem.startswith((path[0], str(file), "default_provider")) for problem in problems)


def test_errors_in_budgets_of_agents_name_the_agent(problems: Problems) -> None:
    rows = '{Explore: {usd: -1, foo: 2}, "*": {tokens: many}}'
    assert problems(f"budget: {{agents: {rows}}}") == [
        "budget.agents.Explore.usd: input should be greater than or equal to 0 (got -1)",
        "budget.agents.Explore.foo: unknown key",
        "budget.agents.*.tokens: input should be a valid integer, unable to parse string as an integer",
    ]
    [main] = problems("budget: {agents: {main: {tokens: 5}}}")
    assert main == "budget.agents: 'main' is the whole session; set tokens, usd or calls of budget instead"
    [odd] = problems('budget: {agents: {"a b": {tokens: 5}}}')
    assert odd.startswith("budget.agents: 'a b' cannot be the type or the id of an agent; use * or 1-255 characters")
    assert problems("budget: {agents: {Explore: {usd: 1, window: 1d}, '*': {calls: 0}}}") == []
