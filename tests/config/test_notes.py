"""Test notes about keys without effect."""

from __future__ import annotations

import json

import pytest

from tests.config.conftest import Load

BLOCK = {"base_url": "http://127.0.0.1:1/v1", "auth": "none"}
FACTS = {"price": {"input": 1, "output": 2}}


def routes(*matches: str) -> str:
    return json.dumps({"models": [{"match": match, "provider": "groq"} for match in matches]})


def before(index: int, earlier: int) -> str:
    return f"models[{index}].match: is never used, because models[{earlier}] matches all its names; move it before"


@pytest.mark.parametrize(
    ("matches", "notes"),
    [
        (("*", "gpt-*", "llama"), (before(1, 0), before(2, 0))),
        (("gpt-*", "llama", "gpt-*", "llama"), (before(2, 0), before(3, 1))),
        (("llama", "gpt-?", "gpt-5"), (before(2, 1),)),
        (("gpt-5", "gpt-*", "*"), ()),
        (("gpt-*", "gpt-5*", "[*]", "*-mini"), ()),
    ],
)
def test_unreachable_route_is_noted(matches: tuple[str, ...], notes: tuple[str, ...], loaded: Load) -> None:
    assert loaded(routes(*matches)).notes == notes


def test_a_route_for_names_that_begin_with_a_provider_comes_before_those_that_take_all(loaded: Load) -> None:
    assert loaded(routes("*", "openai/gpt-5", "qwen/qwen3", "openai/gpt-5")).notes == (before(2, 0), before(3, 1))


def test_the_route_that_serve_adds_for_one_provider_is_not_noted(loaded: Load) -> None:
    assert loaded(routes("a", "*"), flags={"only_provider": {"name": "m", "block": BLOCK, "facts": FACTS}}).notes == ()


def test_a_model_for_summaries_without_summarize_is_noted(loaded: Load) -> None:
    text = "context: {strategies: [drop], summary: {model: gpt-5.1-mini}}"
    assert loaded(text).notes == (
        "context.summary.model: is never called, because context.strategies has no summarize; add it there",
    )
    assert loaded(text.replace("[drop]", "[summarize, drop]")).notes == ()


def test_ca_file_with_verify_false_is_noted(loaded: Load) -> None:
    text = "providers: {openai: {tls: {verify: false, ca_file: ca.pem}}}"
    assert loaded(text).notes == (
        "providers.openai.tls.ca_file: is not used, because verify: false accepts every certificate; remove verify",
    )
    assert loaded(text.replace("false", "true")).notes == ()
    assert loaded(text.replace(", ca_file: ca.pem", "")).notes == ()


def test_a_window_of_a_client_key_without_a_limit_is_noted(loaded: Load) -> None:
    text = "default_provider: ollama\nauth: {keys: [{name: alice, key: 0123456789abcdef, budget: {window: 1d}}]}"
    assert loaded(text).notes == ("auth.keys[0].budget.window: has no limit to refill; set tokens, usd or calls",)
    assert loaded(text.replace("window", "calls: 0, window")).notes == ()
    assert loaded("budget: {window: 1d}").notes == (), "a session may have a budget of its own"
    note = "budget.agents.Explore.window: has no limit to refill; set tokens, usd or calls"
    assert loaded("budget: {agents: {Explore: {window: 1d}}}").notes == (note,)


def test_a_ttl_shorter_than_two_leases_is_noted(loaded: Load) -> None:
    text = "default_provider: ollama\nsessions: {ttl: 90s}"
    (note,) = loaded(text).notes
    assert note.startswith("sessions.ttl: sessions are kept for 360 s, twice budget.lease_s")
    assert loaded(text + "\nbudget: {lease_s: 45}").notes == ()
    assert loaded(text.replace("90s", "6m")).notes == ()


@pytest.mark.parametrize("clients", ["keys: [{name: alice, key: 0123456789abcdef}]", "required: true"])
def test_a_default_provider_without_a_key_is_noted_where_callers_send_client_keys(clients: str, loaded: Load) -> None:
    text = f"auth: {{{clients}}}"
    (note,) = loaded(text).notes
    assert note.startswith("providers.openai.key: is empty, and callers send a client key")
    assert loaded(text, {"OPENAI_API_KEY": "sk-hunter2"}).notes == ()
    assert loaded(f"{text}\nproviders: {{openai: {{headers: {{authorization: Bearer a}}}}}}").notes == ()
    assert loaded(f"{text}\ndefault_provider: ollama").notes == (), "it takes none"
    assert loaded(f"{text}\ndefault_provider: null").notes == ()
    assert loaded("").notes == (), "callers send their own"
