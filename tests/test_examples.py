"""Check files that users copy and read: examples, the commented configuration, the schema, and facts in documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.main import get_command

from gateway import config
from gateway.cli import app
from gateway.context.caches import DEFAULT_BYTES
from gateway.core.errors import ConfigError
from gateway.core.http.gateway_headers import DIRECTIVES, READ
from gateway.core.record import OUTCOMES
from gateway.server import headers, openapi
from gateway.upstream.litellm.faults import NOT_TRANSLATABLE

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "config" / "examples").glob("*.yaml"))
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]


def environment_of(example: Path) -> dict[str, str]:
    """Return values for the variables that an example needs."""
    named = re.search(r"^# Needs: (.*)$", example.read_text("utf-8"), re.MULTILINE)
    names = named[1].split() if named else []
    return {name: f"https://{name}.example" if "ENDPOINT" in name else f"{name}-0123456789" for name in names}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_valid_configuration(example: Path) -> None:
    settings = config.load(example, environment=environment_of(example)).settings
    config.check_exposure(settings)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_names_every_variable_that_it_needs_and_no_other(example: Path) -> None:
    needed = set(environment_of(example))
    try:
        config.load(example, environment={})
    except ConfigError as error:
        missing = {name for line in error.problems for name in re.findall(r"variable (\w+) is not set", line)}
    else:
        missing = set()
    assert missing == needed


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_the_local_example_has_no_other_provider() -> None:
    settings = config.load(ROOT / "config/examples/local.yaml", environment={}).settings
    assert list(settings.providers) == ["local"]


def test_gateway_yaml_shows_the_defaults(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    shown = config.load(ROOT / "gateway.yaml", environment={}).settings
    assert shown == config.load(empty, environment={}).settings


def uncommented() -> str:
    """Return gateway.yaml with its examples uncommented: lines with two or more spaces after `#`, or list items."""
    shown: list[str] = []
    in_example = False
    for line in (ROOT / "gateway.yaml").read_text("utf-8").splitlines():
        example = re.fullmatch(r"(\s*)#((?: |(?= - )) .*)", line)
        if example and shown and not in_example:
            # Remove the empty value before an example, which replaces it.
            shown[-1] = re.sub(r": (?:\[\]|\{\}|null)(?=\s|$)", ":", shown[-1])
        in_example = example is not None
        shown.append(example[1] + example[2] if example else line)
    return "\n".join(shown)


def test_the_commented_examples_in_gateway_yaml_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(uncommented())
    settings = config.load(file, environment={"ALICE_KEY": "0123456789abcdef"}).settings
    assert settings.auth.keys
    assert settings.auth.jwt
    assert settings.models


def keys_of_schema(node: Mapping[str, Any], schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys; `*` represents a name of the user, and list positions are omitted."""
    for option in [node, *node.get("anyOf", [])]:
        reached = schema["$defs"][option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        for name, inner in reached.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from keys_of_schema(inner, schema, f"{prefix}{name}.")
        if "items" in reached:
            yield from keys_of_schema(reached["items"], schema, prefix)
        if isinstance(reached.get("additionalProperties"), dict) and prefix == "providers.":
            yield from keys_of_schema(reached["additionalProperties"], schema, f"{prefix}*.")


def keys_of_file(node: object, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, inner in node.items():
            shown = "*" if prefix == "providers." else name
            yield f"{prefix}{shown}"
            yield from keys_of_file(inner, f"{prefix}{shown}.")
    elif isinstance(node, list):
        for inner in node:
            yield from keys_of_file(inner, prefix)


def test_every_key_is_in_gateway_yaml() -> None:
    schema = config.json_schema()
    expected = set(keys_of_schema(schema, schema))
    assert {"server.port", "auth.keys.name", "providers.*.tls.ca_file", "models.price.input"} <= expected
    assert expected - set(keys_of_file(yaml.safe_load(uncommented()))) == set()


def yaml_blocks() -> Iterator[tuple[str, str]]:
    """Yield the configuration blocks of the documents: place and text."""
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        for block in re.finditer(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            content = yaml.safe_load(block[1])
            if isinstance(content, dict) and content.keys() <= config.Settings.model_fields.keys():
                yield f"{document.name}:{text.count(chr(10), 0, block.start()) + 1}", block[1]


SHOWN = [*yaml_blocks(), *((example.name, example.read_text("utf-8")) for example in EXAMPLES)]


@pytest.mark.parametrize(("place", "text"), SHOWN, ids=[place for place, _ in SHOWN])
def test_shown_configuration_is_valid_by_the_schema(place: str, text: str) -> None:
    schema = json.loads((ROOT / "config" / "gateway.schema.json").read_text("utf-8"))
    faults = Draft202012Validator(schema).iter_errors(yaml.safe_load(text))
    assert [f"{fault.json_path}: {fault.message}" for fault in faults] == []


@pytest.mark.parametrize(
    "step",
    [{"sequence": [5]}, {"sequence": "a"}, {"conditions": [{"tool_used": {"window": 3}}]}, {"conditions": [{"x": 1}]}],
    ids=str,
)
def test_the_schema_finds_errors_of_a_step(step: Mapping[str, Any]) -> None:
    schema = json.loads((ROOT / "config" / "gateway.schema.json").read_text("utf-8"))
    assert not Draft202012Validator(schema).is_valid({"steps": [{"name": "s", **step}]})


def first_column(document: str, heading: str) -> list[str]:
    """Return the first cells of the first table below a heading, without their backquotes."""
    text = (ROOT / document).read_text("utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [row.split("|")[1].strip().strip("`") for row in rows]


def test_headers_in_readme_exist_and_readme_links_to_all() -> None:
    named = first_column("README.md", "Headers")
    assert len(named) > 5
    assert set(named) <= {*headers.RESPONSE_HEADERS, *(name.decode() for name in (*READ, *DIRECTIVES))}
    assert "](docs/reference/headers.md)" in (ROOT / "README.md").read_text("utf-8")


def test_every_written_header_is_listed() -> None:
    spelled = re.findall(r'(?<!== )b"(?:: )?(x-[a-z-]+)', Path(headers.__file__).read_text("utf-8"))
    read = {name.decode() for name in (*READ, *DIRECTIVES)}
    assert set(spelled) - read == set(headers.RESPONSE_HEADERS) - read


def reference(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text("utf-8")


def test_the_reference_has_every_key() -> None:
    schema = config.json_schema()
    rows = re.findall(r"^\| `([^`]+)` \|", reference("configuration"), re.MULTILINE)
    shown = {re.sub(r"\[\]|\.NAME", "", key) for key in rows}
    keys = {key.replace(".*", "") for key in keys_of_schema(schema, schema)}
    # Sections have headings. A block shown under one key is not shown again under another.
    missing = keys - shown - set(schema["properties"])
    assert {
        key
        for key in missing
        if not key.startswith(("steps.conditions.not_recently_used.", "agents.steps.", "auth.budget."))
    } == set()


def test_the_reference_has_every_header_and_error() -> None:
    asked = {name.decode() for name in (*READ, *DIRECTIVES)}
    page = reference("headers")
    assert {name for name in {*headers.RESPONSE_HEADERS, *asked} if f"| `{name}` |" not in page} == set()
    page = reference("errors")
    assert {kind.code for kind in openapi.error_classes() if f"| `{kind.code}` | {kind.status} |" not in page} == set()
    assert f"| `{NOT_TRANSLATABLE}` | 400 |" in page


def test_the_reference_has_every_path_and_command() -> None:
    page = reference("api")
    assert {name for name in operations() if f"\n## {name}\n" not in page} == set()
    page, commands = reference("commands"), getattr(get_command(app), "commands", {})
    assert len(commands) > 10
    assert {name for name in commands if f"\n## gateway {name}\n" not in page} == set()


def test_the_table_of_providers_matches_the_code() -> None:
    text = (ROOT / "docs" / "guides" / "providers.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.*) \|$", text, re.MULTILINE)
    variables = {name: f"{name}-0123456789" for _, _, key in rows for name in re.findall("[A-Z_]{8,}", key)}
    environment = {**variables, "AZURE_OPENAI_ENDPOINT": "https://me.example"}
    providers = config.load(environment=environment, search=False).settings.providers
    assert {name for name, _, _ in rows} == set(providers)
    for name, address, key in rows:
        row = providers[name]
        assert row.base_url == address.replace("`AZURE_OPENAI_ENDPOINT`", "https://me.example"), name
        shown = {"none": "none", "bearer": f"`{row.key.get_secret_value()[:-11]}`"}
        assert key == shown.get(row.auth, f"{shown['bearer']}, as `{row.auth}`"), name


def operations() -> set[str]:
    """Return `GET /path` of each operation."""
    paths = openapi.document()["paths"]
    return {f"{method.upper()} {path}" for path, item in paths.items() for method in item if method != "servers"}


def test_readme_links_to_the_api_reference() -> None:
    assert "](docs/reference/api.md)" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_have_existing_targets(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text("utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


#: this page names fields of responses, which are spelled like keys
API = ROOT / "docs" / "reference" / "api.md"


@pytest.mark.parametrize("document", sorted({*DOCUMENTS, *EXAMPLES} - {API}), ids=lambda path: path.name)
def test_configuration_keys_that_a_document_names_exist(document: Path) -> None:
    schema = config.json_schema()
    known = set(keys_of_schema(schema, schema))
    sections = "|".join(name for name in schema["properties"] if name not in ("models", "providers"))
    named = re.findall(rf"`((?:{sections})\.[a-z0-9_.]+)", document.read_text("utf-8"))
    # bench/steps.py is a file.
    assert [key for key in named if key.rstrip(".") not in known and not key.endswith(".py")] == []


def test_each_outcome_is_explained_where_calls_are_shown_and_logged() -> None:
    page = (ROOT / "docs/guides/monitoring.md").read_text("utf-8").split("\n## Outcomes\n", 1)[1].split("\n## ", 1)[0]
    table = (ROOT / "gateway/server/static/views/calls.js").read_text("utf-8").split("OUTCOMES = {", 1)[1].split("}")[0]
    assert set(re.findall(r"^  (\w+):", table, re.MULTILINE)) == set(OUTCOMES)
    assert {name for name in OUTCOMES if f"| `{name}` |" not in page} == set()


def test_the_monitoring_guide_names_all_opentelemetry_attributes() -> None:
    written = (ROOT / "gateway/telemetry/otel.py").read_text("utf-8")
    names = set(re.findall(r'"((?:gen_ai|gateway|http|error)\.[a-z_.]+)"', written))
    text = (ROOT / "docs/guides/monitoring.md").read_text("utf-8")
    page = text.split("\n## OpenTelemetry\n", 1)[1].split("\n## ", 1)[0]
    assert len(names) > 15
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_deployment_guide_has_the_default_of_memory_mb() -> None:
    page = (ROOT / "docs/guides/deploy.md").read_text("utf-8")
    default = config.Settings().context.memory_mb
    assert default * 2**20 == DEFAULT_BYTES
    assert re.findall(r"up to (\d+) MiB for conversations", page) == [f"{default:.0f}"]
