from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.errors import UnknownModel
from gateway.core.routing import ModelRule, Route, Routes

ALIAS = ModelRule("my-alias", "openai", "gpt-5.1")
GPT = ModelRule("gpt-*", "openai")
GPT_LATER = ModelRule("gpt-4*", "groq")
O_SERIES = ModelRule("o[0-9]*", "openai")
RULES = [ALIAS, GPT, GPT_LATER, O_SERIES]
PROVIDERS = ["openai", "groq", "anthropic"]


@pytest.fixture
def routes() -> Routes:
    return Routes(RULES, PROVIDERS, "openai", "anthropic")


def test_the_first_rule_that_matches_wins(routes: Routes) -> None:
    assert routes.resolve("gpt-4o") == Route("openai", "gpt-4o", GPT)


def test_an_alias_is_sent_under_its_other_name(routes: Routes) -> None:
    assert routes.resolve("my-alias") == Route("openai", "gpt-5.1", ALIAS)


@pytest.mark.parametrize(("model", "rule"), [("o3-mini", O_SERIES), ("omni", None), ("GPT-4", None), ("xgpt-4", None)])
def test_patterns_are_shell_patterns_and_know_case(routes: Routes, model: str, rule: ModelRule | None) -> None:
    assert routes.resolve(model).rule == rule


def test_provider_prefix_precedes_general_rules() -> None:
    rules = [ModelRule("*", "openai"), ModelRule("gro*/llama-4", "openai"), ModelRule("llama-4", "openai")]
    assert Routes(rules, PROVIDERS, "openai").resolve("groq/llama-4") == Route("groq", "llama-4")


def test_rule_for_provider_prefix_precedes_the_prefix() -> None:
    own, hosted = ModelRule("groq/own*", "groq"), ModelRule("openai/gpt-oss-*", "groq")
    routes = Routes([ModelRule("*", "anthropic"), own, hosted], PROVIDERS, "openai")
    assert routes.resolve("groq/own-1") == Route("groq", "groq/own-1", own)
    assert routes.resolve("openai/gpt-oss-20b") == Route("groq", "openai/gpt-oss-20b", hosted)
    assert routes.resolve("openai/gpt-5") == Route("openai", "gpt-5")
    assert routes.resolve("groq/own/model") == Route("groq", "own/model"), "* takes no slash there"


def test_an_unused_provider_before_a_slash_is_part_of_a_name() -> None:
    routes = Routes([], PROVIDERS, "groq", unused={"openai"})
    assert routes.resolve("openai/gpt-oss-20b") == Route("groq", "openai/gpt-oss-20b")
    assert routes.resolve("anthropic/claude") == Route("anthropic", "claude")
    assert routes.leads_to("openai/gpt-oss-20b", "groq")


def test_rule_for_unused_provider_prefix_comes_first() -> None:
    hosted = ModelRule("openai/gpt-oss-*", "groq")
    routes = Routes([ModelRule("*", "anthropic"), hosted], PROVIDERS, "groq", unused={"openai"})
    assert routes.resolve("openai/gpt-oss-20b") == Route("groq", "openai/gpt-oss-20b", hosted)
    assert routes.resolve("openai/gpt-oss/20b").provider == "anthropic", "* takes no slash there"
    assert routes.resolve("openai/gpt-5").provider == "anthropic"


def test_slash_after_unknown_provider_is_part_of_the_name(routes: Routes) -> None:
    assert routes.resolve("meta/llama-4") == Route("openai", "meta/llama-4")


def test_model_named_like_a_provider_is_a_model(routes: Routes) -> None:
    assert routes.resolve("groq") == Route("openai", "groq")


def test_a_model_that_nothing_names_goes_to_the_default_provider(routes: Routes) -> None:
    assert routes.resolve("whatever") == Route("openai", "whatever")


def test_without_a_default_provider_an_unknown_model_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnknownModel, match=r'"nope".*anthropic, groq, openai.*default_provider') as caught:
        Routes(RULES, PROVIDERS, None).resolve("nope")
    assert caught.value.param == "model"


@pytest.mark.parametrize(("anthropic", "provider"), [(True, "anthropic"), (False, "openai")])
def test_path_without_model_goes_to_provider_of_its_api(routes: Routes, anthropic: bool, provider: str) -> None:
    assert routes.provider_without_model(anthropic) == provider


def test_a_path_without_a_model_goes_to_the_default_where_anthropic_is_not_configured() -> None:
    assert Routes([], ["openai"], "openai").provider_without_model(anthropic=True) == "openai"


def test_a_path_without_a_model_and_without_a_default_is_refused() -> None:
    with pytest.raises(UnknownModel, match="names no model"):
        Routes([], ["openai"], None).provider_without_model(anthropic=False)


@pytest.mark.parametrize(
    ("model", "provider", "leads"),
    [("gpt-4o", "openai", True), ("gpt-4o", "groq", False), ("my-alias", "openai", False), ("x", "openai", True)],
)
def test_leads_to_requires_same_name_at_provider(routes: Routes, model: str, provider: str, leads: bool) -> None:
    assert routes.leads_to(model, provider) is leads


def test_refused_name_leads_to_no_provider() -> None:
    assert not Routes([], ["openai"], None).leads_to("x", "openai")


def test_every_provider_is_named(routes: Routes) -> None:
    assert routes.providers == {"openai", "groq", "anthropic"}


# --- several routes for one model -----------------------------------------------------------------------------------------

SHARED = ModelRule("shared", "openai", "m", shares=(("openai", 3.0), ("groq", 1.0)))


def test_sessions_are_distributed_by_share_and_stay() -> None:
    routes = Routes([SHARED], PROVIDERS, None)
    firsts = [routes.chain("shared", f"session {number}")[0].provider for number in range(4000)]
    assert 0.72 < firsts.count("openai") / 4000 < 0.78
    assert firsts[:50] == [routes.chain("shared", f"session {number}")[0].provider for number in range(50)]
    for first in ("openai", "groq"):
        preferred = Routes([replace(SHARED, provider=first)], PROVIDERS, None)
        assert preferred.resolve("shared").provider == first, "without a session, the one that is named first"


def test_the_others_that_share_a_model_come_after_the_first() -> None:
    chain = Routes([SHARED], PROVIDERS, None).chain("shared", "s")
    assert {route.provider for route in chain} == {"openai", "groq"}
    assert {route.model for route in chain} == {"m"}


def test_new_provider_only_moves_its_own_sessions() -> None:
    more = ModelRule("shared", "openai", "m", shares=(("openai", 3.0), ("groq", 1.0), ("mistral", 1.0)))
    before, after = Routes([SHARED], PROVIDERS, None), Routes([more], [*PROVIDERS, "mistral"], None)
    moved = [
        (was, now)
        for number in range(1000)
        if (was := before.chain("shared", str(number))[0].provider)
        != (now := after.chain("shared", str(number))[0].provider)
    ]
    assert moved
    assert {now for _, now in moved} == {"mistral"}


def test_fallbacks_follow_once_each_up_to_the_limit() -> None:
    rules = [
        ModelRule("first", "openai", fallback=("second", "groq/third", "first", "second")),
        ModelRule("second", "groq", fallback=("never",)),
    ]
    chain = Routes(rules, PROVIDERS, "openai").chain("first", "s")
    assert [(route.provider, route.model) for route in chain] == [
        ("openai", "first"),
        ("groq", "second"),
        ("groq", "third"),
    ]
    many = ModelRule("many", "openai", fallback=tuple(f"groq/{number}" for number in range(20)))
    assert len(Routes([many], PROVIDERS, None).chain("many", "s")) == 8


def test_model_is_found_by_its_name_at_the_provider() -> None:
    rules = [
        ModelRule("openai/*", "groq"),
        ModelRule("openai/o1-pro", "openai"),
        ModelRule("alias", "openai", "real"),
        ModelRule("gpt-*", "groq", shares=(("groq", 1.0), ("openai", 1.0))),
    ]
    routes = Routes(rules, PROVIDERS, None)
    assert routes.route_at("openai", "openai/o1-pro") == Route("openai", "openai/o1-pro", rules[1])
    assert routes.route_at("openai", "real") == Route("openai", "real", rules[2])
    assert routes.route_at("openai", "alias") == Route("openai", "alias"), "no provider knows an alias of ours"
    assert routes.route_at("openai", "gpt-5") == Route("openai", "gpt-5", rules[3])
    assert routes.route_at("groq", "groq/x") == Route("groq", "groq/x")


def test_route_of_earlier_call_is_found_by_its_rule() -> None:
    rules = [ModelRule("cheap", "openai", "real"), ModelRule("dear", "openai", "real")]
    routes = Routes(rules, PROVIDERS, None)
    for rule in rules:
        found = routes.route_of_call("openai", "real", rule.match)
        assert (found, found.rule) == (routes.resolve(rule.match), rule)
    assert routes.route_of_call("openai", "real", None) == Route("openai", "real")
    assert routes.route_of_call("openai", "real", "gone") == Route("openai", "real")


def test_the_names_of_models_are_those_of_rules_that_are_no_patterns(routes: Routes) -> None:
    assert routes.names() == ["my-alias"]


def test_seed_with_lone_surrogate_is_routed() -> None:
    rule = ModelRule("m", "openai", shares=(("openai", 1), ("groq", 1)))
    assert len(Routes([rule], PROVIDERS, None).chain("m", "\ud800")) == 2


def test_the_agent_of_a_route_is_that_of_its_rule() -> None:
    assert Route("openai", "m", ModelRule("m", "openai", agent="support")).agent == "support"
    assert Route("openai", "m", ALIAS).agent is None
    assert Route("openai", "m").agent is None


def test_model_without_rule_has_one_route(routes: Routes) -> None:
    assert routes.chain("groq/x", "s") == (Route("groq", "x"),)
