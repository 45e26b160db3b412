"""`gateway check`, `init`, `schema`."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from gateway.mock import MockProvider, MockServer
from tests.conftest import closed_port
from tests.support.commands import Commands
from tests.support.gateways import ROOT

BROKEN = """
server: {prot: 9000, workers: 0}
providers:
  own: {base_url: ftp://example.org}
default_provider: opnai
models:
  - {match: "gpt-*", provider: onw}
sessions: {ttl: 30 days}
store: {url: "postgres://db"}
auth: {keys: [{name: alice, key: "${ALICE_KEY}"}]}
"""
PROBLEMS = {
    "server.prot": "did you mean port?",
    "server.workers": "greater than or equal to 1",
    "providers.own.base_url": "http:// or https://",
    "default_provider": "did you mean openai?",
    "models[0].provider": "did you mean own?",
    "sessions.ttl": "30d",
    "store.url": "sqlite://PATH",
    "auth.keys[0].key": "ALICE_KEY",
}


def only(url: str, **provider: object) -> str:
    """A configuration with one provider and no other."""
    return json.dumps(
        {
            "built_in_providers": False,
            "default_provider": "own",
            "providers": {"own": {"base_url": url, **provider}},
            "store": {"url": "memory://"},
        }
    )


# --- check --------------------------------------------------------------------------------------------------------


def test_control_characters_in_the_file_are_replaced(gateway_command: Commands) -> None:
    done = gateway_command("check", "-c", gateway_command.file('"se\\arver": 1\n"a\\nb": 1'))
    assert done.code == 3
    assert [line.partition(":")[0] for line in done.lines] == ["se?rver", "a?b"]


def test_a_variable_that_sets_nothing_is_a_note_and_no_problem(gateway_command: Commands) -> None:
    env = {"GATEWAY_SERVER_PROT": "sk-hunter2", "GATEWAY_SERVICE_HOST": "10.0.0.1"}
    done = gateway_command("check", env=env)
    assert (done.code, done.out) == (0, "")
    note = "GATEWAY_SERVER_PROT: this variable has no effect: unknown key (did you mean GATEWAY_SERVER_PORT?)"
    assert done.err.splitlines()[1] == note
    assert done.err.count("GATEWAY_") == 2
    assert note in json.loads(gateway_command("check", "--json", env=env).out)["notes"]
    assert "hunter2" not in done.all


def test_the_defaults_have_no_problem(gateway_command: Commands) -> None:
    done = gateway_command("check")
    assert (done.code, done.out) == (0, "")
    assert "built-in defaults" in done.err
    assert "no problems" in done.err


def test_a_file_in_the_folder_is_found_and_named(gateway_command: Commands) -> None:
    gateway_command.file("server: {port: 9000}", "gateway.yaml")
    assert "gateway.yaml" in gateway_command("check").err


def test_a_file_named_by_the_environment_is_read(gateway_command: Commands) -> None:
    file = gateway_command.file("stroe: {}")
    done = gateway_command("check", env={"GATEWAY_CONFIG": str(file)})
    assert (done.code, done.out) == (3, "stroe: unknown key (did you mean store?)\n")


def test_all_problems_are_reported_at_once_with_key_and_remedy(gateway_command: Commands) -> None:
    done = gateway_command("check", "-c", gateway_command.file(BROKEN))
    assert done.code == 3
    found = {line.partition(": ")[0]: line for line in done.lines}
    assert found.keys() == PROBLEMS.keys()
    assert len(done.lines) == len(PROBLEMS), "each problem once"
    assert [path for path, remedy in PROBLEMS.items() if remedy not in found[path]] == []


def test_problems_as_json(gateway_command: Commands) -> None:
    done = gateway_command("check", "--json", "-c", gateway_command.file("stroe: {}"))
    assert done.code == 3
    assert json.loads(done.out) == {
        "problems": ["stroe: unknown key (did you mean store?)"],
        "notes": [],
    }
    right = gateway_command("check", "--json")
    assert right.code == 0
    assert json.loads(right.out)["problems"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: [", "not valid YAML"),
        ("- a\n- b", "must contain keys and values"),
        ("server: {port: 99999}", "server.port: "),
        ("server: 7", "server: "),
        ("providers: [openai]", "providers: "),
        ("models: gpt-4", "models: "),
        ("? " + "a" * 100_000 + "\n: 1", "unknown key"),
        ("server: &a {port: *a}", ""),
        ("server: {max_body_mb: .inf}", "server.max_body_mb: "),
        ("auth: {}\nauth: {}", "auth: is set twice"),
        ("sessions: {id_headers: [bad header]}", "sessions.id_headers: "),
    ],
)
def test_file_of_any_shape_gets_readable_errors(text: str, said: str, gateway_command: Commands) -> None:
    done = gateway_command("check", "-c", gateway_command.file(text))
    assert done.code == 3
    assert said in done.out


def test_file_that_is_not_text_is_a_problem(gateway_command: Commands) -> None:
    file = gateway_command.folder / "own.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    done = gateway_command("check", "-c", file)
    assert done.code == 3
    assert "cannot be read" in done.out or "not valid YAML" in done.out


def test_a_missing_file_is_a_problem_with_its_remedy(gateway_command: Commands) -> None:
    done = gateway_command("check", "-c", "missing.yaml")
    assert done.code == 3
    assert done.lines == ["missing.yaml: there is no such file; create it with: gateway init missing.yaml"]


def test_wrong_usage_of_check_ends_with_2(gateway_command: Commands) -> None:
    assert gateway_command("check", "--onlin").code == 2
    assert gateway_command("check", "own.yaml").code == 2, "the file goes with -c"


def test_an_environment_variable_is_checked_like_the_file(gateway_command: Commands) -> None:
    done = gateway_command("check", env={"GATEWAY_SERVER_PORT": "many"})
    assert done.code == 3
    assert done.out.startswith("server.port: ")


def test_open_access_is_a_problem(gateway_command: Commands) -> None:
    file = gateway_command.file("server: {host: 0.0.0.0}")
    assert gateway_command("check", "-c", file).code == 0, "no key is held"
    done = gateway_command("check", "-c", file, env={"OPENAI_API_KEY": "sk-openai-0123456789"})
    assert done.code == 3
    assert done.out.startswith("auth.keys: ")
    assert "openai" in done.out


def test_workers_on_a_memory_store_are_a_problem(gateway_command: Commands) -> None:
    done = gateway_command("check", "-c", gateway_command.file("{server: {workers: 2}, store: {url: 'memory://'}}"))
    assert done.code == 3
    assert done.out.startswith("server.workers: ")


def test_litellm_provider_must_be_known(gateway_command: Commands) -> None:
    text = "{store: {url: 'memory://'}, default_provider: aws, providers: {aws: {adapter: litellm, litellm: %s}}}"
    done = gateway_command("check", "--online", "-c", gateway_command.file(text % "bedrock"))
    assert (done.code, done.out) == (0, "")
    assert "providers.aws: not asked" in done.err
    done = gateway_command("check", "-c", gateway_command.file(text % "bedrok"))
    assert done.code == 3
    assert done.out == "providers.aws.litellm: litellm knows no provider 'bedrok' (did you mean bedrock?)\n"


def test_observer_that_cannot_be_created_is_a_problem(gateway_command: Commands) -> None:
    done = gateway_command("check", "-c", gateway_command.file("{callbacks: {observers: [no.such.Thing]}}"))
    assert done.code == 3
    assert done.out.startswith("callbacks.observers[0]: no.such.Thing cannot be loaded: ModuleNotFoundError")


def test_all_problems_that_prevent_a_start_are_found_at_once(gateway_command: Commands) -> None:
    file = gateway_command.file(
        "{server: {host: 0.0.0.0}, callbacks: {observers: [no.such.Thing]},"
        " models: [{match: own, provider: openai, tokenizer: 'no.such:Counter'}],"
        " providers: {openai: {tls: {ca_file: missing.pem}}, groq: {tls: {ca_file: gone.pem}}}}"
    )
    done = gateway_command("check", "-c", file, env={"OPENAI_API_KEY": SECRET})
    assert done.code == 3
    assert sorted(line.partition(": ")[0] for line in done.lines) == [
        "auth.keys",
        "callbacks.observers[0]",
        "models[0].tokenizer",
        "providers.groq.tls.ca_file",
        "providers.openai.tls.ca_file",
    ]
    assert "missing.pem cannot be used: " in done.out


def test_problem_that_online_finds_again_is_reported_once(gateway_command: Commands, mock_server: MockServer) -> None:
    file = gateway_command.file(only(mock_server.url, tls={"ca_file": "missing.pem"}))
    done = gateway_command("check", "--online", "-c", file)
    assert done.code == 3
    assert len(done.lines) == 1
    assert done.out.startswith("providers.own.tls.ca_file: missing.pem cannot be used: ")
    assert "store.url: memory:// is writable" in done.err, "the rest was looked at all the same"


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry/exporter"])
def test_telemetry_without_all_of_its_packages_is_a_problem(missing: str, gateway_command: Commands) -> None:
    hidden = gateway_command.folder / missing
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError")
    file = gateway_command.file("{telemetry: {otel: true}, callbacks: {observers: [no.such.Thing]}}")
    done = gateway_command.process("check", "-c", file, env={"PYTHONPATH": f"{gateway_command.folder}:{ROOT}"})
    assert done.code == 3
    assert [line.partition(": ")[0] for line in done.lines] == ["callbacks.observers[0]", "telemetry.otel"]
    assert "pip install" in done.lines[1]


def test_steps_of_agents_are_listed(gateway_command: Commands) -> None:
    steps = "[{name: work, is_default: true}, {name: review, conditions: [{tool_used: write}]}]"
    file = gateway_command.file(f"steps: [{{name: s}}]\nagents: {{writer: {{steps: {steps}}}}}")
    done = gateway_command("check", "-c", file)
    assert done.code == 0
    assert "calls without an agent: 1 step, s" in done.err
    assert "writer: 2 steps, work, review" in done.err


def test_online_asks_the_provider_and_opens_the_store(
    gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    done = gateway_command("check", "--online", "-c", gateway_command.file(only(mock_server.url)))
    assert (done.code, done.out) == (0, "")
    assert f"providers.own: {mock_server.url}/v1/models answered 200" in done.err
    assert "store.url: memory:// is writable" in done.err
    assert [(call.method, call.path) for call in mock.calls] == [("GET", "/v1/models")]


def test_online_asks_providers_that_need_no_key_where_the_configuration_names_them(
    gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    nobody = f"http://127.0.0.1:{closed_port()}/v1"
    config = {
        "store": {"url": "memory://"},
        "default_provider": None,
        "providers": {
            "own": {"base_url": mock_server.url, "auth": "none"},
            "callers": {"base_url": nobody},
            "ollama": {"base_url": nobody},
        },
        "models": [{"match": "qwen*", "provider": {"lmstudio": 1}, "fallback": ["vllm/qwen"]}],
    }
    done = gateway_command("check", "--online", "-c", gateway_command.file(json.dumps(config)))
    assert done.code == 3
    asked = [line.partition(":")[0] for line in (done.out + done.err).splitlines() if line.startswith("providers.")]
    assert sorted(asked) == ["providers.lmstudio", "providers.ollama", "providers.own", "providers.vllm"]
    assert f"providers.own: {mock_server.url}/v1/models answered 200" in done.err


def test_online_names_a_provider_that_does_not_respond(gateway_command: Commands) -> None:
    file = gateway_command.file(only(f"http://127.0.0.1:{closed_port()}"))
    assert gateway_command("check", "-c", file).code == 0
    done = gateway_command("check", "--online", "-c", file)
    assert done.code == 3
    assert len(done.lines) == 1
    assert done.out.startswith("providers.own: ")


def test_online_names_a_store_that_cannot_be_opened(gateway_command: Commands, mock_server: MockServer) -> None:
    gateway_command.file("", "no-folder")
    settings = {**json.loads(only(mock_server.url)), "store": {"url": "sqlite://no-folder/gateway.db"}}
    done = gateway_command("check", "--online", "--json", "-c", gateway_command.file(json.dumps(settings)))
    assert done.code == 3
    shown = json.loads(done.out)
    assert [line.partition(": ")[0] for line in shown["problems"]] == ["store.url"]
    assert any("answered 200" in line for line in shown["notes"]), "the provider was asked all the same"


def test_online_names_a_journal_that_cannot_be_written(gateway_command: Commands, mock_server: MockServer) -> None:
    in_the_way, store = gateway_command.file("", "no-folder"), gateway_command.folder / "gateway.db"
    settings = {**json.loads(only(mock_server.url)), "store": {"url": f"sqlite://{store}", "journal": str(in_the_way)}}
    done = gateway_command("check", "--online", "-c", gateway_command.file(json.dumps(settings)))
    assert done.code == 3
    assert len(done.lines) == 1
    assert done.out.startswith(f"store.journal: the journal {in_the_way}")


def test_online_checks_what_serve_would_use_and_leaves_an_existing_store_usable(
    gateway_command: Commands, mock_server: MockServer
) -> None:
    store = gateway_command.folder / "folder" / "gateway.db"
    settings = {**json.loads(only(mock_server.url)), "store": {"url": f"sqlite://{store}"}}
    for _ in range(2):
        assert gateway_command("check", "--online", "-c", gateway_command.file(json.dumps(settings))).code == 0
    assert gateway_command("sessions", "list", "--json", "--store", f"sqlite://{store}").out == "[]\n"


# --- secrets ------------------------------------------------------------------------------------------------------

SECRET = "sk-secret-Zq8vR2mK7x"


@pytest.mark.parametrize(
    "text",
    [
        'providers: {openai: {key: "%s", kye: 1}}',
        'providers: {openai: {kye: "%s"}}',
        'providers: {openai: {key: ["%s"]}}',
        'providers: {openai: "%s"}',
        'providers: {openai: {auth: "%s"}}',
        'providers: {own: {base_url: "https://user:%s@example.org"}}',
        'providers: {own: {base_url: "https://example.org/v1?key=%s"}}',
        'providers: {openai: {headers: {"x key": "%s"}}}',
        'providers: {openai: {headers: {x-key: "%s\\u00e9"}}}',
        'providers: {openai: {headers: "%s"}}',
        'auth: "%s"',
        'auth: {keys: "%s"}',
        'auth: {keys: ["%s"]}',
        'auth: {keys: [{name: a, key: "%s"}, {name: b, key: "%s"}]}',
        'auth: {keys: [{name: "%s x", key: short}]}',
        'auth: {admin_key: ["%s"]}',
        'auth: {keys: [{name: a, key: "%s}]}',
        "auth: {admin_key: *%s}",
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(text: str, gateway_command: Commands) -> None:
    written = gateway_command.file(text.replace("%s", SECRET))
    expanded = gateway_command.file(text.replace("%s", "${OPENAI_API_KEY}"), "expanded.yaml")
    for file in (written, expanded):
        for args in (["check"], ["check", "--json"], ["models", "gpt-5"], ["sessions", "list"]):
            done = gateway_command(*args, "-c", file, env={"OPENAI_API_KEY": SECRET})
            assert done.code in (2, 3)
            assert SECRET not in done.all


def test_provider_keys_are_never_shown(gateway_command: Commands, mock_server: MockServer, mock: MockProvider) -> None:
    keys = [{"name": "alice", "key": f"{SECRET}-alice"}]
    settings = {**json.loads(only(mock_server.url, key="${OWN_KEY}")), "auth": {"keys": keys, "admin_key": SECRET}}
    file = gateway_command.file(json.dumps(settings))
    env = {"OWN_KEY": f"{SECRET}-own"}
    for args in (["check"], ["check", "--online"], ["check", "--online", "--json"], ["models", "gpt-5", "--json"]):
        done = gateway_command(*args, "-c", file, env=env)
        assert done.code == 0
        assert SECRET not in done.all
    assert mock.calls[-1].header("authorization") == f"Bearer {SECRET}-own", "it was used"


# --- init ---------------------------------------------------------------------------------------------------------


def test_init_writes_a_file_that_passes_check_and_changes_nothing(gateway_command: Commands) -> None:
    done = gateway_command("init")
    assert (done.code, done.out) == (0, "")
    assert "gateway.yaml" in done.err
    assert gateway_command("check").code == 0
    file = gateway_command.folder / "gateway.yaml"
    assert file.read_text().partition("#\n")[2] == (ROOT / "gateway.yaml").read_text().partition("#\n")[2] != ""

    from gateway import config

    assert config.load(file, environment={}).settings == config.Settings(
        providers=config.load(environment={}).settings.providers
    )


@pytest.mark.parametrize("schema", [None, "gateway.schema.json", "config/gateway.schema.json"])
def test_init_names_a_schema_only_where_there_is_one(schema: str | None, gateway_command: Commands) -> None:
    if schema is not None:
        (gateway_command.folder / schema).parent.mkdir(exist_ok=True)
        (gateway_command.folder / schema).write_text("{}")
    assert gateway_command("init").code == 0
    lines = (gateway_command.folder / "gateway.yaml").read_text().splitlines()
    named = [line for line in lines if re.match(r"#\s*yaml-language-server\s*:", line)]
    if schema is None:
        assert named == []
        assert "gateway schema > gateway.schema.json" in lines[0]
    else:
        assert named == lines[:1] == [f"# yaml-language-server: $schema=./{schema}"]


def test_init_names_a_schema_from_where_the_file_is(gateway_command: Commands) -> None:
    (gateway_command.folder / "gateway.schema.json").write_text("{}")
    (gateway_command.folder / "below").mkdir()
    assert gateway_command("init", "below/gateway.yaml").code == 0
    assert (
        "yaml-language-server: $schema"
        not in (gateway_command.folder / "below/gateway.yaml").read_text().partition("\n")[0]
    )


def test_init_names_the_file_as_json(gateway_command: Commands) -> None:
    done = gateway_command("init", "own.yaml", "--json")
    assert (done.code, done.err, json.loads(done.out)) == (0, "", {"file": "own.yaml", "written": True})
    assert (gateway_command.folder / "own.yaml").exists()
    again = gateway_command("init", "own.yaml", "--json")
    assert (again.code, again.out) == (1, "")


def test_init_never_overwrites(gateway_command: Commands) -> None:
    file = gateway_command.file("server: {port: 9000}", "gateway.yaml")
    done = gateway_command("init")
    assert done.code == 1
    assert "not overwritten" in done.err
    assert file.read_text() == "server: {port: 9000}"


def test_init_does_not_follow_a_dangling_link(gateway_command: Commands) -> None:
    (gateway_command.folder / "gateway.yaml").symlink_to(gateway_command.folder / "elsewhere")
    assert gateway_command("init").code == 1
    assert not (gateway_command.folder / "elsewhere").exists()


def test_init_says_why_it_cannot_write(gateway_command: Commands) -> None:
    for target in ("missing/gateway.yaml", "."):
        done = gateway_command("init", target)
        assert done.code == 1
        assert len(done.err.splitlines()) == 1


# --- schema -------------------------------------------------------------------------------------------------------


def test_schema_is_valid_and_accepts_the_template(gateway_command: Commands) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    done = gateway_command.process("schema")
    assert (done.code, done.err) == (0, "")
    schema = json.loads(done.out)
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    files = [ROOT / "gateway.yaml", *(ROOT / "config" / "examples").glob("*.yaml")]
    for file in files:
        validator(schema).validate(yaml.safe_load(file.read_text()))
    mistakes: list[dict[str, object]] = [{"stroe": {}}, {"server": {"port": "x"}}]
    wrong = [list(validator(schema).iter_errors(value)) for value in mistakes]
    assert all(wrong)


def test_schema_has_a_title(gateway_command: Commands) -> None:
    assert json.loads(gateway_command("schema").out)["title"] == "gateway.yaml"


def test_schema_describes_every_key_and_contains_no_secret(gateway_command: Commands) -> None:
    done = gateway_command("schema", env={"OPENAI_API_KEY": SECRET})
    schema = json.loads(done.out)
    assert SECRET not in done.out
    server = schema["$defs"]["Server"]["properties"]
    assert [name for name, key in server.items() if not key.get("description")] == []


def test_the_schema_in_the_repository_is_the_current_one(gateway_command: Commands) -> None:
    kept = json.loads((ROOT / "config" / "gateway.schema.json").read_text())
    assert json.loads(gateway_command("schema").out) == kept


def test_every_example_passes_check(gateway_command: Commands) -> None:
    for file in sorted((ROOT / "config" / "examples").glob("*.yaml")):
        text = file.read_text()
        env = {name: f"https://{name.lower().replace('_', '-')}.example.org" for name in _variables(text)}
        done = gateway_command("check", "-c", file, env=env)
        assert (done.code, done.out) == (0, ""), file.name


def _variables(text: str) -> set[str]:
    return set(re.findall(r"\$\{([A-Z_]+)", text))
