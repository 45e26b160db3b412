"""Open resources from settings, without a server."""

from __future__ import annotations

import importlib.util
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.app.resources import (
    add_counters,
    estimator_of,
    memory_of,
    open_families,
    open_store,
    problems_of,
    tls_contexts,
)
from gateway.core.counting.request import read_request
from gateway.core.errors import ConfigError, StoreUnavailable
from gateway.counters.registry import Counters
from gateway.counters.vocabularies import VOCABULARIES
from gateway.stores.memory import MemoryStore
from gateway.stores.sqlite import SqliteStore


def settings(**flags: Any) -> config.Settings:
    """Return the settings of a machine without a configuration file, changed by `flags`; `__` replaces a dot."""
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return config.load(environment={}, search=False, flags=dotted).settings


def test_commands_without_a_server_load_no_server_modules() -> None:
    code = "import sys, gateway.app.resources; print({'starlette', 'uvicorn', 'gateway.server'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(("url", "kind"), [("memory://", MemoryStore), ("sqlite://{}/gateway.db", SqliteStore)])
async def test_the_configured_store_is_opened(url: str, kind: type, tmp_path: Path) -> None:
    store = open_store(settings(store__url=url.format(tmp_path)))
    assert type(store) is kind
    await store.ping()
    await store.aclose()


def test_tls_contexts_follow_the_settings_of_each_provider() -> None:
    authorities = Path(ssl.get_default_verify_paths().openssl_cafile)
    if not authorities.is_file():
        pytest.skip("this machine has no file of authorities")
    rows = {
        "usual": {"base_url": "https://a.example.org"},
        "anybody": {"base_url": "https://b.example.org", "tls": {"verify": False}},
        "own": {"base_url": "https://c.example.org", "tls": {"ca_file": str(authorities)}},
    }
    found = tls_contexts(settings(built_in_providers=False, default_provider="own", providers=rows).providers)
    assert (found["usual"], found["anybody"]) == (True, False)
    own = found["own"]
    assert isinstance(own, ssl.SSLContext)
    assert own.verify_mode is ssl.CERT_REQUIRED


def test_every_unusable_ca_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    files = {"gone": tmp_path / "gone.pem", "empty": empty, "folder": tmp_path}
    rows = {name: {"base_url": "https://a.example.org", "tls": {"ca_file": str(f)}} for name, f in files.items()}
    with pytest.raises(ConfigError) as refused:
        tls_contexts(settings(built_in_providers=False, default_provider="gone", providers=rows).providers)
    wanted = [f"providers.{name}.tls.ca_file: {file} cannot be used" for name, file in files.items()]
    assert [problem.rpartition(": [")[0] or problem for problem in refused.value.problems] == wanted


def test_every_route_with_an_invalid_tokenizer_is_named() -> None:
    models = [{"match": str(number), "provider": "openai", "tokenizer": "no.such:Thing"} for number in range(2)]
    with pytest.raises(ConfigError) as refused:
        add_counters(Counters(), settings(models=models))
    assert [problem.partition(": ")[0] for problem in refused.value.problems] == [
        "models[0].tokenizer",
        "models[1].tokenizer",
    ]


def test_an_unknown_tokenizer_is_refused_with_the_known_names() -> None:
    names = ["o200k", "my-tokenizer", "", None, "cl100k_base", "chars/4", "heuristic", "o200k_digits"]
    models = [{"match": str(number), "provider": "openai", "tokenizer": name} for number, name in enumerate(names)]
    known = (
        f"known: o200k_base, cl100k_base, o200k_digits, {', '.join(VOCABULARIES)}, heuristic, chars/4, or your own as "
        "package.module:Class. "
        "Without this key, the model family's is used"
    )
    assert problems_of(settings(models=models)) == [
        f"models[0].tokenizer: there is no such tokenizer (did you mean o200k_base?); {known}",
        f"models[1].tokenizer: there is no such tokenizer; {known}",
    ]


@pytest.mark.skipif(importlib.util.find_spec("splintr") is not None, reason="the package is installed")
def test_a_tokenizer_whose_package_is_missing_is_refused_with_the_package() -> None:
    models = [{"match": "a", "provider": "openai", "tokenizer": "llama3"}]
    assert problems_of(settings(models=models)) == [
        "models[0].tokenizer: the tokenizer llama3 needs the package splintr-rs: pip install splintr-rs",
    ]


def test_problems_of_all_kinds_are_reported_together() -> None:
    wrong = settings(
        context__families="/no/such.yaml",
        server__host="0.0.0.0",
        providers__openai__key="sk-0123456789abcdef",
        providers__openai__tls={"ca_file": "/no/such.pem"},
        providers__aws={"adapter": "litellm", "litellm": "bedrok"},
        callbacks__observers=["no.such.Thing", "json.dumps"],
        models=[{"match": "own", "provider": "openai", "tokenizer": "no.such:Thing"}],
    )
    assert [problem.partition(": ")[0] for problem in problems_of(wrong)] == [
        "auth.keys",
        "models[0].tokenizer",
        "context.families",
        "callbacks.observers[0]",
        "callbacks.observers[1]",
        "providers.openai.tls.ca_file",
        "providers.aws.litellm",
    ]


def test_there_are_no_problems_without_a_configuration() -> None:
    assert problems_of(settings()) == []


def test_start_loads_no_package_that_a_plain_call_does_not_need() -> None:
    names = (
        "gateway.upstream.litellm",
        "httpx",
        "litellm",
        "opentelemetry",
        "redis",
        "requests",
        "rich",
        "tiktoken",
        "websockets",
        "zstandard",
    )
    code = (
        "import sys, gateway.cli.serve, gateway.app.worker, gateway.server.serving; "
        f"print({{*{names}}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


async def test_redis_without_its_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis" or "stores.redis" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreUnavailable, match="pip install 'redis"):
        open_store(settings(store__url="redis://127.0.0.1:1/0"))


OWN = """
families:
  mine: {models: "my-*", like: claude-4.5, start: 4000}
images:
  mine: {models: "my-*", rule: fixed, base: 400}
"""


def test_custom_families_are_found_next_to_the_configuration_and_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    (tmp_path / "gateway.yaml").write_text("context: {families: mine.yaml}")
    monkeypatch.chdir("/")
    loaded = config.load(tmp_path / "gateway.yaml", environment={}).settings
    assert problems_of(loaded) == []
    estimator = estimator_of(open_families(Counters(), loaded), Counters(), memory_of(loaded))
    mine, shipped = (
        read_request("chat", {"model": "m", "messages": []}, model=name) for name in ("my-1", "claude-4.5")
    )
    family = estimator.family(mine)
    assert (family.name, family.start, family.image.base) == ("mine", 4000, 400)
    assert estimator.family(shipped).name == "claude-4.5"
    assert family.message == estimator.family(shipped).message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "families: {mine: {tokenizer: nonsense}}",
            "context.families: families.mine.tokenizer: there is no such tokenizer",
        ),
        (
            "families: {mine: {tokenizer: 'no.such:Thing'}}",
            "context.families: families.mine.tokenizer: tokenizer no.such",
        ),
        ("families: {mine: {strat: 3}}", "context.families: families.mine.strat: there is no such key"),
        (
            "images: {mine: {rule: patches, patch: 0}}",
            "context.families: images.mine.patch: must be a number of 1 or more",
        ),
        ("families: [", "context.families: "),
        (None, "context.families: "),
    ],
)
def test_errors_in_custom_families_are_reported(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    [found] = problems_of(settings(context={"families": str(file)}))
    assert found.startswith(problem)
    assert text is not None or found.endswith("mine.yaml: cannot be read: No such file or directory")
