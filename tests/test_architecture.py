"""Check imports between packages and of third-party packages. Modules are parsed with `ast`, not imported."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gateway"

#: package -> the other packages that it may import
ALLOWED = {
    "core": set(),
    "dialects": {"core"},
    "stores": {"core"},
    "counters": {"core"},
    "telemetry": {"core"},
    "config": {"core"},
    "upstream": {"core", "dialects"},
    "call": {"core", "dialects", "stores"},
    "context": {"core", "dialects", "stores", "call"},
    "replay": {"core", "dialects", "call", "context"},
    "background": {"core", "dialects", "stores", "call"},
    "steps": {"core", "dialects", "call", "context"},
    "budget": {"core", "dialects", "stores", "call", "background", "steps"},
    "pipeline": {"core", "dialects", "stores", "upstream", "call", "context", "background", "steps", "budget"},
    "server": {
        *("core", "dialects", "stores", "upstream", "telemetry", "config", "call", "context", "budget", "pipeline"),
    },
    "app": {
        *("core", "dialects", "stores", "counters", "upstream", "telemetry", "config"),
        *("call", "context", "background", "steps", "budget", "pipeline", "server"),
    },
    # what `import gateway` offers
    "library": {"core", "counters", "config"},
    "": {"library"},
    "mock": set(),
    "bench": {"core", "stores", "mock"},
    # a module that agents copy into their own code
    "client": set(),
}
#: these may import every package
ROOTS = {"cli", "__main__"}
#: third-party package -> prefixes of the modules that may import it
HOMES = {
    "aiohappyeyeballs": ("gateway.upstream.origin",),
    "pydantic": ("gateway.config",),
    "yaml": ("gateway.config",),
    "regex": ("gateway.config.steps",),
    "opentelemetry": ("gateway.telemetry.otel",),
    "matplotlib": ("gateway.cli.recordings",),
    "sqlite3": ("gateway.stores.sqlite",),
    "redis": ("gateway.stores.redis",),
    "hiredis": ("gateway.stores.redis.wire",),
    "starlette": ("gateway.server", "gateway.mock"),
    "uvicorn": (
        "gateway.server.protocol",
        "gateway.server.cycle",
        "gateway.server.socket_protocol",
        "gateway.server.serving",
        "gateway.mock",
    ),
    "zstandard": ("gateway.server.zstd",),
    "httptools": ("gateway.server.protocol", "gateway.upstream.connection"),
    "typer": ("gateway.cli",),
    "rich": ("gateway.cli",),
    "tiktoken": ("gateway.counters.tiktoken",),
    "jwt": ("gateway.server.token_verifier",),
    "cryptography": ("gateway.server.token_verifier",),
    "splintr": ("gateway.counters.vocabularies",),
    "ctok": ("gateway.counters.vocabularies",),
    "litellm": ("gateway.upstream.litellm",),
    "httpx": ("gateway.upstream.litellm",),
    "msgspec": tuple(f"gateway.{part}" for part in {*ALLOWED, *ROOTS} - {"core"}),
}
#: pure code gets the time, randomness and the outside world as arguments
IMPURE = {"asyncio", "time", "random", "os", "socket", "sqlite3", "threading"}
#: module without a test file of the same name -> the test that covers it, with the reason
TESTED_ELSEWHERE = {
    "core.rollup": "stores/test_rollups.py",  # what stores add up
    "core.retention": "stores/test_rollups.py",
    "stores.sqlite.usage": "stores/test_rollups.py",
    "config.history": "stores/test_rollups.py",
    "counters.chunks": "counters/test_tiktoken.py",  # long texts
    "": "library/test_import.py",  # its names are imported late
    "core.views": "core/views/test_view.py",  # the table of formats
    "core.views.read_messages": "core/views/test_messages.py",  # covered by the tests of whole messages
    "core.views.read_items": "core/views/test_responses.py",
    "core.steps": "core/steps/test_machine.py",  # the names of both its modules
    "core.trimming.trim": "core/trimming/test_trim_conversation.py",  # what it leaves shows from turn to turn
    "core.trimming.policy": "core/trimming/test_trim_conversation.py",
    "core.ports": "stores/test_contract.py",  # Protocols; the contract test checks their implementations
    "core.stored": "stores/test_contract.py",  # plain values that stores return
    "core.http.request": "upstream/test_http.py",  # plain values that are sent
    "stores.memory.accounts": "stores/test_ledger_contract.py",
    "stores.memory.calls": "stores/test_contract.py",
    "stores.memory.lists": "stores/test_lists.py",
    "stores.sums": "stores/test_contract.py",  # totals of stores that do their own sums
    # These parts of one store are tested through what the store keeps, on a real server.
    "stores.redis.values": "stores/test_ledger_contract.py",
    "stores.redis.per_server": "stores/test_ledger_machine.py",
    "stores.redis.per_slot": "stores/test_ledger_contract.py",
    "stores.redis.lists": "stores/test_contract.py",
    "stores.redis.keys": "stores/test_contract.py",
    "stores.redis.scripts": "stores/test_redis.py",
    "stores.redis.write_combiner": "stores/test_redis.py",
    "stores.redis.cluster": "stores/test_redis_cluster.py",
    "stores.redis.link": "stores/test_redis.py",
    "stores.redis.wire": "stores/test_redis.py",
    "stores.redis.state_updates": "stores/test_redis.py",
    "stores.redis.servers": "stores/test_redis.py",
    "stores.redis.settings": "stores/test_redis.py",
    "stores.redis.clock_jumps": "stores/test_redis_cluster.py",
    "stores.cursor": "stores/test_contract.py",  # cursors are tested through the pages of lists
    "dialects.openai_errors": "dialects/test_errors.py",  # compares the two error formats
    "dialects.anthropic_errors": "dialects/test_errors.py",
    "dialects.choices": "dialects/test_openai_chat.py",  # and test_completions.py, whose formats share it
    "dialects.response_state": "dialects/test_openai_responses.py",  # filled by the reader of each format
    "dialects.responses_output": "dialects/test_openai_responses.py",
    "dialects.tool_restriction": "dialects/test_tools.py",  # the offered tools are restricted, and read again
    "dialects.fields": "dialects/test_base.py",  # one set of bodies is read, identified and counted
    "dialects.opening": "dialects/test_base.py",
    "dialects.texts": "dialects/test_base.py",
    "pipeline.closing": "e2e/test_closing.py",  # which calls may close shows in whole calls
    "pipeline.downgrade": "e2e/test_downgrade.py",
    "upstream.litellm.library": "upstream/test_litellm.py",  # one adapter, tested from outside
    "upstream.litellm.faults": "upstream/test_litellm.py",
    "upstream.litellm.observed": "upstream/test_litellm.py",
    "upstream.litellm.translations": "e2e/test_translation.py",
    "upstream.litellm.arguments": "e2e/test_translation.py",
    "upstream.litellm.blocks": "e2e/test_translation.py",
    "dialects": "dialects/test_endpoints.py",  # the table of endpoints
    "__main__": "cli",  # one line: python -m gateway
    # These modules need a real port, a real client and a provider with real faults.
    "pipeline.exchange": "e2e/test_accounting.py",
    "app.worker": "e2e/test_shutdown.py",
    "app.reloadable": "e2e/test_reload.py",
    "app.token_issuer": "e2e/test_bearer_tokens.py",
    "app.assembly": "pipeline/test_exchange.py",  # it assembles the fakes of these tests
    "config.policies": "e2e/test_budget_settings.py",  # each key has its effect; keys of context: e2e/test_context.py
    "stores.states": "stores/test_contract.py",  # what a store returns for a valid and for an invalid state
    "stores.clock": "stores/test_ledger_contract.py",  # the time of a store without an injected clock
    "stores.sqlite.latest": "stores/test_latest.py",
    "stores.sqlite.agents": "stores/test_agents.py",
    "stores.memory.agents": "stores/test_agents.py",
    "core.audit": "stores/test_audit.py",  # plain values that stores return
    "stores.audit_entries": "stores/test_audit.py",
    "stores.memory.audit": "stores/test_audit.py",
    "stores.memory.latest": "stores/test_latest.py",
    "stores.sqlite.audit": "stores/test_audit.py",
    "stores.redis.audit": "stores/test_audit.py",
    "server.session_changes": "server/test_audit.py",  # each change is recorded
    "telemetry.metrics.families": "telemetry/test_metrics.py",  # each family is shown by its name
    "telemetry.metrics.exposition": "telemetry/test_metrics.py",
    "telemetry.budget_alerts": "stores/test_budget_alerts.py",  # its guarantees depend on the store
    "telemetry.alert_outbox": "stores/test_budget_alerts.py",
    "stores.sqlite.accounts": "stores/test_ledger_contract.py",
    "context.inspector": "server/test_context.py",
    "server.endpoints": "e2e/test_leaving.py",  # its effect on a call shows on the connection of the call
    "server.socket_calls": "server/test_sockets.py",  # its effect on a call shows on the connection of the call
    "server.agents": "e2e/test_agents.py",
    "server.openapi.shapes": "server/test_openapi.py",  # one document
    "server.openapi.paths": "server/test_openapi.py",
    # These parts of a call are tested through whole calls.
    "call.types": "pipeline/test_exchange.py",
    "call.state": "pipeline/test_exchange.py",
    "stores.availability": "stores/test_fallback.py",
    "budget.settlement": "pipeline/test_exchange.py",
    "budget.accounts": "pipeline/test_exchange.py",
    "context.request": "e2e/test_context.py",
    "call.bound_thinking": "e2e/test_thinking.py",
    "context.repair": "e2e/test_context.py",  # for length; for thinking: e2e/test_thinking.py
    "dialects.thinking_fields": "e2e/test_thinking.py",  # what is sent, and which requests are unchanged
    "context.thinking_origins": "e2e/test_thinking_origins.py",
    "pipeline.compaction": "e2e/test_compaction.py",
    "background.index": "e2e/test_background.py",
    "background.settlement": "e2e/test_background.py",
    "dialects.stored_response": "e2e/test_background.py",
}
#: tested as a whole from outside: the built-in provider over HTTP, the commands by their output, the configuration by
#: its text
TESTED_AS_A_WHOLE = {"mock": "mock", "cli": "cli", "config": "config"}


def imports(source: str) -> Iterator[str]:
    """Yield every module that a source imports, at any place in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "relative"
        elif isinstance(node, ast.ImportFrom) and node.module == "gateway":
            yield from (f"gateway.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def is_below(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def second(name: str) -> str:
    """Return `core` for `gateway.core.http.sse`."""
    return name.partition(".")[2].partition(".")[0]


def breach(module: str, imported: str) -> str | None:
    """Return what is wrong with `module` importing `imported`, or None."""
    part, target = second(module), imported.partition(".")[0]
    if target == "gateway":
        other = second(imported)
        known = part in ROOTS or other in ("", "__version__", part)
        return None if known or other in ALLOWED[part] else f"{module} may not import {imported}"
    if target in HOMES:
        return None if is_below(module, HOMES[target]) else f"{target} does not live in {module}"
    if target not in sys.stdlib_module_names:
        return f"{target}, imported by {module}, has no home"
    if part in ("core", "dialects") and target in IMPURE:
        return f"{module} is pure and may not import {imported}"
    return None


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def breaches_in(module: str, source: str) -> list[str]:
    return [problem for imported in imports(source) if (problem := breach(module, imported)) is not None]


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_module_imports_only_allowed_packages(module: str, path: Path) -> None:
    assert breaches_in(module, path.read_text("utf-8")) == []


def test_every_allowed_import_is_used() -> None:
    imported = {module: set(imports(path.read_text("utf-8"))) for module, path in modules()}
    parts = {(second(module), second(name)) for module, names in imported.items() for name in names}
    unused = {(part, other) for part, others in ALLOWED.items() for other in others} - parts
    assert not unused
    packages = {(module, name.partition(".")[0]) for module, names in imported.items() for name in names}
    for package, homes in HOMES.items():
        users = [module for module, name in packages if name == package]
        empty = [home for home in homes if not any(is_below(module, (home,)) for module in users)]
        # msgspec may be used everywhere.
        assert not empty or package == "msgspec", (package, empty)


def test_every_package_has_a_row_in_the_import_table() -> None:
    parts = {module.split(".")[1] for module, _ in modules() if "." in module}
    assert parts <= {*ALLOWED, *ROOTS}


def test_the_import_table_has_no_cycle() -> None:
    order = list(TopologicalSorter(ALLOWED).static_order())
    assert order.index("core") < order.index("call") < order.index("pipeline") < order.index("server")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gateway.core.http.sse", "import asyncio"),
        ("gateway.core.http.sse", "from time import monotonic"),
        ("gateway.core.http.sse", "import os.path"),
        ("gateway.core.http.sse", "import msgspec"),
        ("gateway.core.http.sse", "from gateway.dialects import base"),
        ("gateway.core.http.sse", "from gateway import dialects"),
        ("gateway.core.http.sse", "from ..dialects import base"),
        ("gateway.core.http.sse", "def late():\n    import random"),
        ("gateway.core.http.sse", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket"),
        ("gateway.dialects.base", "import threading"),
        ("gateway.dialects.base", "from gateway.stores import memory"),
        ("gateway.stores.memory", "import gateway.upstream.http"),
        ("gateway.stores.memory", "import sqlite3"),
        ("gateway.stores.settler", "from sqlite3 import OperationalError"),
        ("gateway.stores.sqlite", "from gateway import config"),
        ("gateway.telemetry.log", "from gateway.stores.memory import MemoryStore"),
        ("gateway.config", "from gateway.stores.learner import Learner"),
        ("gateway.pipeline.exchange", "from gateway.server import headers"),
        ("gateway.pipeline.exchange", "import httptools"),
        ("gateway.budget.accounts", "from gateway.pipeline.exchange import Gateway"),
        ("gateway.call.types", "from gateway.context.planner import Planner"),
        ("gateway.server.app", "from gateway.app import worker"),
        ("gateway.server.app", "from uvicorn import Config"),
        ("gateway.server.app", "import yaml"),
        ("gateway.mock.app", "from gateway.core import sse"),
        ("gateway.app.worker", "import pydantic"),
        ("gateway.context.planner", "from gateway.server.app import GatewayApp"),
        ("gateway.cli", "import litellm"),
        ("gateway.cli", "import requests"),
    ],
)
def test_a_breach_is_seen(module: str, source: str) -> None:
    assert len(breaches_in(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gateway.core.http.sse", "import re\nfrom gateway.core import errors\nfrom collections.abc import Iterator"),
        ("gateway.dialects.base", "import json\nimport msgspec\nfrom gateway.core.errors import GatewayError"),
        ("gateway.stores.sqlite", "import asyncio\nimport sqlite3\nfrom gateway.stores.cursor import Cursor"),
        ("gateway.config.model_catalog", "from gateway.config import Facts"),
        ("gateway.app.worker", "from gateway.server.app import GatewayApp\nimport msgspec"),
        ("gateway.cli.serve", "import typer\nfrom gateway import __version__"),
    ],
)
def test_allowed_imports_are_accepted(module: str, source: str) -> None:
    assert breaches_in(module, source) == []


#: Match possessive repetition (`*+`, `++`, `?+`, `{2}+`) or an atomic group in a regular expression. Escapes and
#: character classes are matched first, without the group.
NOT_BEFORE_3_11_5 = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|((?:[*+?]|\{\d*,?\d*\})\+|\(\?>)", re.DOTALL)


def broken_patterns_in(source: str) -> list[str]:
    """Return the strings of a module with `re` that have patterns which some Python versions match incorrectly."""
    if "re" not in set(imports(source)):
        return []
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    texts = (value.decode("latin-1") if isinstance(value, bytes) else value for value in constants)
    return [
        text for text in texts if isinstance(text, str) and any(found[1] for found in NOT_BEFORE_3_11_5.finditer(text))
    ]


@pytest.mark.parametrize("folder", ["gateway", "bench", ".ci"])
def test_no_pattern_needs_a_newer_python_than_debian_has(folder: str) -> None:
    # Possessive repetition and atomic groups match incorrectly in Python 3.11.0 to 3.11.4, and Debian 12 has 3.11.2
    # (https://github.com/python/cpython/issues/106052, https://github.com/python/cpython/issues/100061). Write
    # alternatives that exclude each other, or see `gateway/core/conversation/json_text.py`.
    paths = (ROOT / folder).rglob("*.py")
    found = {path.name: patterns for path in paths if (patterns := broken_patterns_in(path.read_text("utf-8")))}
    assert found == {}


@pytest.mark.parametrize("pattern", [r"\w++", r"(?:a|b)*+c", r"x?+", r"[a-z]{2,3}+", r"(?>a|ab)c", r"[^]]*+", r"\*++"])
def test_possessive_repetitions_and_atomic_groups_are_found(pattern: str) -> None:
    assert broken_patterns_in(f"import re\nre.compile({pattern!r})") == [pattern]
    assert broken_patterns_in(f"import re\nre.compile({pattern.encode()!r})") == [pattern]


@pytest.mark.parametrize("pattern", [r"\*+", r"[*+]+", r"[]*+]", r"a\++", r"(?:a)+", r"\(?>", r"a{2}b+"])
def test_similar_patterns_are_allowed(pattern: str) -> None:
    assert broken_patterns_in(f"import re\nre.compile({pattern!r})") == []


def holds_tests(place: str) -> bool:
    path = Path(__file__).parent / place
    return path.is_file() or any(path.glob("test_*.py"))


def test_every_module_has_a_test_of_its_name_or_a_reason() -> None:
    missing = []
    for module, path in modules():
        name = module.removeprefix("gateway").removeprefix(".")
        folder, _, last = name.rpartition(".")
        places = ["/".join([*folder.split("."), f"test_{last}.py"]).removeprefix("/")]
        places += [TESTED_ELSEWHERE.get(name, "-"), TESTED_AS_A_WHOLE.get(name.partition(".")[0], "-")]
        is_empty = path.name == "__init__.py" and len(ast.parse(path.read_text("utf-8")).body) <= 2
        if not is_empty and not any(map(holds_tests, places)):
            missing.append(module)
    assert missing == []


def test_every_module_has_a_docstring() -> None:
    """`.ci/reference.py` makes the list of modules from these sentences."""
    sources = {module: ast.parse(path.read_text("utf-8")) for module, path in modules()}
    assert [module for module, tree in sources.items() if not ast.get_docstring(tree)] == []


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the methods and fields of a class."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
            names.add(part.attr)
    return names


def test_every_attribute_that_a_docstring_or_comment_names_exists() -> None:
    sources = {path: path.read_text("utf-8") for _, path in modules()}
    classes = [node for text in sources.values() for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    members = {node.name: members_of(node) for node in classes}
    for node in classes:
        members[node.name] |= {name for base in node.bases for name in members.get(ast.unparse(base), ())}
    unknown = [
        f"{path.name}: {name}.{attribute}"
        for path, text in sources.items()
        for name, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`", text)
        if name in members and attribute not in members[name]
    ]
    assert unknown == []


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


MOST_PARAMETERS = 8
MOST_ATTRIBUTES = 15
#: classes that still have more attributes; the list only gets shorter
MORE_ATTRIBUTES = {"GatewayProtocol", "HttpResponse", "Origin"}


def parameters_of(node: ast.ClassDef) -> int:
    """Return the number of parameters of the constructor that a class defines, without `self`."""
    found = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return max((len(one.args.posonlyargs + one.args.args + one.args.kwonlyargs) - 1 for one in found), default=0)


def mutable_attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the fields of a dataclass that is not frozen, and the attributes that methods set on `self`."""
    decorators = [ast.unparse(one) for one in node.decorator_list]
    names = set()
    if any("dataclass" in one and "frozen=True" not in one for one in decorators):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        names |= {part.target.id for part in fields if isinstance(part.target, ast.Name)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            names.add(part.attr)
    return names


def classes() -> Iterator[ast.ClassDef]:
    for _, path in modules():
        yield from (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef))


def test_no_constructor_has_too_many_parameters() -> None:
    assert {node.name for node in classes() if parameters_of(node) > MOST_PARAMETERS} == set()


def test_no_object_has_too_many_mutable_attributes() -> None:
    assert {node.name for node in classes() if len(mutable_attributes_of(node)) > MOST_ATTRIBUTES} == MORE_ATTRIBUTES


def test_parameters_and_mutable_attributes_are_counted() -> None:
    (node,) = ast.parse(
        "@dataclass(slots=True)\nclass A:\n    a: int\n    def __init__(self, b, /, c, *, d=1):\n"
        "        self.e, self._f = b, c\n        self.g[0] = self.a.h = d\n"
    ).body
    assert isinstance(node, ast.ClassDef)
    assert parameters_of(node) == 3
    assert mutable_attributes_of(node) == {"a", "e", "_f"}
    node.decorator_list = [ast.parse("dataclass(frozen=True)").body[0].value]  # type: ignore[attr-defined]
    assert mutable_attributes_of(node) == {"e", "_f"}


def test_every_package_is_listed_in_the_architecture_page() -> None:
    document = (ROOT / "docs/architecture.md").read_text("utf-8")
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}/`" not in document] == []


def test_every_file_named_in_the_architecture_page_exists() -> None:
    document = (ROOT / "docs/architecture.md").read_text("utf-8")
    named = re.findall(r"`([a-z0-9_/]+\.py)`", document)
    assert [name for name in named if not ((PACKAGE / name).is_file() or (ROOT / name).is_file())] == []


def test_every_exception_names_an_existing_module_and_test() -> None:
    known = {module.removeprefix("gateway").removeprefix(".") for module, _ in modules()}
    assert set(TESTED_ELSEWHERE) <= known
    places = [*TESTED_ELSEWHERE.values(), *TESTED_AS_A_WHOLE.values()]
    assert [place for place in places if not holds_tests(place)] == []
