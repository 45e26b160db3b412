from __future__ import annotations

from dataclasses import fields, replace

import pytest

from gateway.core.counting.families import TokenizerFamilies, TokenizerFamily, families_from
from gateway.core.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "provider", "wire", "name"),
    [
        ("gpt-4o-mini-2024-07-18", "openai", "chat", "gpt-4o"),
        ("gpt-4.1", "openai", "responses", "gpt-4o-responses"),
        ("openai/gpt-4o", "openrouter", "chat", "gpt-4o"),
        ("gpt-4-0613", "openai", "chat", "gpt-4"),
        ("openai/gpt-4", "openrouter", "chat", "gpt-4"),
        ("gpt-35-turbo", "azure", "chat", "gpt-4"),
        ("gpt-3.5-turbo-instruct", "openai", "completions", "completions"),
        ("llama3", "ollama", "completions", "completions-other"),
        ("codestral-latest", "mistral", "completions", "completions-digits"),
        ("Qwen/Qwen2.5-Coder-7B", "vllm", "completions", "completions-digits"),
        ("gpt-5-mini", "openai", "chat", "gpt-5-chat"),
        ("gpt-5-mini", "my-own-name", "chat", "gpt-5-chat"),
        ("openai/gpt-5", "openrouter", "chat", "gpt-5-hosted"),
        ("gpt-5.1-codex", "openai", "responses", "gpt-5-responses"),
        ("openai/o4-mini", "openrouter", "chat", "o-series"),
        ("openai/gpt-oss-120b", "groq", "chat", "gpt-oss"),
        ("us.anthropic.claude-3-7-sonnet-20250219-v1:0", "bedrock", "messages", "claude-4"),
        ("claude-sonnet-4-20250514", "anthropic", "messages", "claude-4"),
        ("claude-opus-4-1", "anthropic", "messages", "claude-4"),
        ("anthropic/claude-sonnet-4.5", "openrouter", "chat", "claude-4.5"),
        ("claude-haiku-4-5-20251001", "anthropic", "messages", "claude-4.5"),
        ("claude-opus-4-1-20250805", "anthropic", "messages", "claude-4"),
        ("claude-opus-4-8", "anthropic", "messages", "claude-new"),
        ("anthropic/claude-opus-4.7", "openrouter", "chat", "claude-new"),
        ("claude-3-haiku-20240307", "anthropic", "messages", "claude-3-haiku"),
        ("claude-3-5-sonnet-latest", "anthropic", "messages", "claude-3.5"),
        ("google/gemini-3-pro-preview", "vercel", "chat", "gemini-3"),
        ("google/gemma-3-27b-it", "openrouter", "chat", "gemma"),
        ("Qwen/Qwen3.5-9B", "doubleword", "chat", "qwen-3.5"),
        ("meta-llama/Llama-3.3-70B-Instruct", "together", "chat", "llama"),
        ("ollama/llama3.2", "litellm", "chat", "llama"),
        ("llama3.2:3b", "ollama", "chat", "llama-3.2-ollama"),
        ("llama3.3", "ollama", "chat", "llama"),
        ("qwen3:8b", "ollama", "chat", "qwen-ollama"),
        ("deepseek-r1:8b", "ollama", "chat", "deepseek-r1"),
        ("deepseek-r1-distill-qwen-32b", "groq", "chat", "deepseek-qwen"),
        ("grok-4-fast", "xai", "chat", "grok-xai"),
        ("x-ai/grok-4.1-fast", "openrouter", "chat", "grok"),
        ("llama3:8b", "ollama", "chat", "llama-3"),
        ("llama3-70b-8192", "groq", "chat", "llama-3"),
        ("deepseek-v4-flash", "deepseek", "responses", "deepseek-responses"),
        ("deepseek-v4-flash", "vllm", "responses", "deepseek"),
        ("ollama/qwen3-coder:480b-cloud", "litellm", "chat", "qwen-coder"),
        ("ollama/kimi-k2:1t-cloud", "litellm", "chat", "kimi"),
        ("something-new", "somewhere", "chat", "other"),
        ("", "", "chat", "other"),
    ],
)
def test_shipped_table_knows_its_models(
    families: TokenizerFamilies, model: str, provider: str, wire: str, name: str
) -> None:
    assert families.find(model, provider, wire).name == name


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [
        ("gemini-2.5-flash", "o200k_digits"),
        ("google/gemini-3-pro-preview", "o200k_digits"),
        ("gemma3:4b", "o200k_digits"),
        ("mistral-small-latest", "o200k_digits"),
        ("codestral-2508", "o200k_digits"),
        ("Qwen/Qwen3-32B", "o200k_digits"),
        ("qwen3-coder", "o200k_digits"),
        ("qvq-max", "o200k_digits"),
        ("voxtral-small-2507", "o200k_digits"),
        ("mathstral:7b", "o200k_digits"),
        ("labs-leanstral-2603", "o200k_digits"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "o200k_digits"),
        ("deepseek-r1-distill-llama-70b", "o200k_base"),
        ("qwencloud/deepseek-v4-pro", "o200k_base"),
        ("deepseek-chat", "o200k_base"),
        ("gpt-5.1", "o200k_base"),
        ("gpt-4-0613", "cl100k_base"),
    ],
)
def test_models_without_number_tokens_are_counted_by_digit(
    families: TokenizerFamilies, model: str, tokenizer: str
) -> None:
    assert families.find(model, "x", "chat").tokenizer == tokenizer


def test_every_family_of_the_table_can_be_matched(families: TokenizerFamilies) -> None:
    """A family whose patterns match everything would hide the families below it."""
    examples = {
        "mistral-venice": ("mistral-small", "venice"),
        "qwen-venice": ("qwen3", "venice"),
        "grok-azure": ("grok-4", "azure"),
        "llama-4-groq": ("llama-4-scout", "groq"),
        "gpt-5-hosted": ("gpt-5", "openrouter"),
        "claude-5.5": ("claude-opus-5-5", "anthropic"),
        "claude-haiku-next": ("claude-haiku-6", "anthropic"),
        "claude-haiku-5.5": ("claude-haiku-5-5", "anthropic"),
        "claude-new": ("claude-opus-5", "anthropic"),
        "deepseek-responses": ("deepseek-v4-flash", "deepseek"),
        "o-series": ("o3", "openai"),
        "gpt-hosted-next": ("gpt-7", "openrouter"),
        "gpt-chat-next": ("gpt-7", "openai"),
        "gpt-responses-next": ("gpt-7", "openai"),
        "gemini-3": ("gemini-3-pro", "gemini"),
        "gemini": ("gemini-2.5-pro", "gemini"),
        "grok-4.3": ("grok-4.3", "xai"),
        "grok": ("grok-4", "openrouter"),
        "grok-xai": ("grok-4", "xai"),
        "qwen-3.5": ("qwen3.5-9b", "x"),
        "qwen": ("qwen3-32b", "x"),
        "qwen-ollama": ("qwen3:4b", "ollama"),
        "llama-3.2-ollama": ("llama3.2:3b", "ollama"),
        "deepseek-r1": ("deepseek-r1:70b", "ollama"),
        "llama-next": ("llama-5", "x"),
        "claude-4.5": ("claude-sonnet-4-5", "anthropic"),
        "claude-4": ("claude-sonnet-4", "anthropic"),
        "claude-3.5": ("claude-3-5-sonnet", "anthropic"),
    }
    for family in families:
        model, provider = examples.get(family.name, (family.models[0].replace("*", ""), "x"))
        wire = family.wires[0].replace("*", "chat")
        found = families.find(model, provider, wire)
        assert found.name == family.name, family.name


def test_every_number_of_the_table_names_its_source() -> None:
    from pathlib import Path

    table = (Path(__file__).parents[3] / "config" / "families.yaml").read_text("utf-8").partition("\nfamilies:")[2]
    skipped = ("models:", "providers:", "wires:", "like:", "vocabulary:", '"')  # a list of patterns may take two lines
    numbers = [line for line in table.splitlines() if line.startswith("    ") and not line.strip().startswith(skipped)]
    missing = [line for line in numbers if "  # " not in line and "spread" not in line]
    assert numbers
    assert missing == []


@pytest.mark.parametrize(
    ("model", "binding", "forced_choice"),
    [
        ("claude-fable-5-2", "prefix", "refused"),
        ("claude-fable-5-1-20260801", "prefix", "refused"),
        ("claude-mythos-5-2", "prefix", "refused"),
        ("anthropic/claude-opus-5.5", "prefix", "refused"),
        ("us.anthropic.claude-sonnet-5-5-20260901-v1:0", "prefix", "refused"),
        ("claude-haiku-5-5", "prefix", "accepted"),
        ("claude-fable-5", "none", "accepted"),
        ("claude-fable-5-20260101", "none", "accepted"),
        ("claude-opus-5-20260301", "none", "accepted"),
        ("claude-sonnet-5@20260101", "none", "accepted"),
        ("claude-opus-4-8", "none", "accepted"),
        ("claude-haiku-4-5", "none", "accepted"),
        ("claude-mythos-5", "none", "accepted"),
        ("claude-mythos-preview", "none", "accepted"),
        ("anthropic.claude-instant-v1", "none", "accepted"),
        ("claude-mythos-5-1", "prefix", "refused"),
        ("global.anthropic.claude-opus-5-5", "prefix", "refused"),
        ("claude-sonnet-5-5@default", "prefix", "refused"),
        ("anthropic/claude-opus-5.5-fast", "prefix", "refused"),
        ("~anthropic/claude-opus-latest", "prefix", "refused"),
        ("~anthropic/claude-haiku-latest", "prefix", "accepted"),
    ],
)
def test_table_lists_claude_models_that_bind_thinking_and_refuse_a_forced_tool(
    families: TokenizerFamilies, model: str, binding: str, forced_choice: str
) -> None:
    found = families.find(model, "anthropic", "messages")
    assert (found.binding, found.forced_choice) == (binding, forced_choice)


@pytest.mark.parametrize(
    ("model", "forced_choice", "thinks"),
    [
        ("deepseek-v4-flash", "not_thinking", "unasked"),
        ("deepseek/deepseek-v4-pro", "not_thinking", "unasked"),
        ("deepseek-reasoner", "not_thinking", "unasked"),
        ("deepseek-chat", "not_thinking", "asked"),
        ("deepseek-ai/DeepSeek-V3.1", "not_thinking", "asked"),
        ("qwen3.5-plus", "not_thinking", "unasked"),
        ("qwen3.8-max", "not_thinking", "unasked"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "not_thinking", "unasked"),
        ("qwq-plus", "not_thinking", "unasked"),
        ("qwen-plus", "not_thinking", "asked"),
        ("qwen3-coder-plus", "not_thinking", "asked"),
        ("moonshotai/kimi-k2.6", "not_thinking", "unasked"),
        ("accounts/fireworks/models/kimi-k2p5", "not_thinking", "unasked"),
        ("kimi-k3", "not_thinking", "unasked"),
        ("kimi-k2-thinking-turbo", "not_thinking", "unasked"),
        ("kimi-k2-0905-preview", "accepted", "asked"),
        ("gpt-6.2-sol", "accepted", "asked"),
    ],
)
@pytest.mark.parametrize("wire", ["chat", "messages"])
def test_table_lists_open_models_that_refuse_a_forced_tool_while_thinking(
    families: TokenizerFamilies, model: str, forced_choice: str, thinks: str, wire: str
) -> None:
    found = families.find(model, "x", wire)
    assert (found.forced_choice, found.thinks) == (forced_choice, thinks)


@pytest.mark.parametrize(
    ("model", "newest", "provider", "wire"),
    [
        ("claude-opus-6", "claude-opus-5-5", "anthropic", "messages"),
        ("claude-opus-5-7", "claude-opus-5-5", "anthropic", "messages"),
        ("claude-zephyr-1", "claude-fable-5-2", "anthropic", "messages"),
        ("claude-6-sonnet", "claude-sonnet-5-5", "anthropic", "messages"),
        ("us.anthropic.claude-opus-6-20270101-v1:0", "claude-opus-5-5", "bedrock", "messages"),
        ("claude-fable-6@20270101", "claude-fable-5-2", "vertex", "messages"),
        ("claude-haiku-6", "claude-haiku-5-5", "anthropic", "messages"),
        ("anthropic/claude-haiku-6", "anthropic/claude-haiku-5.5", "openrouter", "chat"),
        ("gpt-7", "gpt-6.2-sol", "openai", "chat"),
        ("gpt-7", "gpt-6.2-sol", "openai", "responses"),
        ("openai/gpt-7-sol", "openai/gpt-6.2-sol", "openrouter", "chat"),
        ("chat-latest", "gpt-6.2-sol", "openai", "chat"),
        ("gemini-5-neon", "gemini-3.8-flash", "gemini", "chat"),
        ("~google/gemini-flash-latest", "google/gemini-3.8-flash", "openrouter", "chat"),
        ("grok-5", "grok-4.7", "xai", "responses"),
        ("x-ai/grok-5-fast", "x-ai/grok-4.7", "openrouter", "chat"),
        ("mistral-large-9", "mistral-large-latest", "mistral", "chat"),
        ("glm-9", "glm-5.3", "zai", "chat"),
        ("deepseek-v5", "deepseek-v4-flash", "deepseek", "chat"),
        ("kimi-k4", "kimi-k3", "moonshot", "chat"),
        ("qwen4-max", "qwen3.8-max", "dashscope", "chat"),
        ("Qwen/Qwen4-32B", "Qwen/Qwen3.8-27B", "together", "chat"),
        ("meta-llama/Llama-5-Scout", "meta-llama/Llama-4-Scout", "together", "chat"),
    ],
)
def test_unlisted_model_of_a_known_vendor_uses_the_newest_family(
    families: TokenizerFamilies, model: str, newest: str, provider: str, wire: str
) -> None:
    found, expected = families.find(model, provider, wire), families.find(newest, provider, wire)
    assert found == replace(
        expected, name=found.name, models=found.models, providers=found.providers, wires=found.wires
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("claude-haiku-5-5", "claude-haiku-5.5"),
        ("us.anthropic.claude-haiku-5-5", "claude-haiku-5.5"),
        ("claude-4.5-haiku", "claude-4.5"),
        ("databricks-claude-sonnet-4-1", "claude-4"),
        ("claude-4-opus", "claude-4"),
        ("anthropic-claude-3.7-sonnet", "claude-4"),
        ("claude-3-5-haiku@20241022", "claude-3.5"),
        ("anthropic.claude-v2:1", "claude-3.5"),
        ("anthropic.claude-instant-v1", "claude-3.5"),
        ("claude-2.1", "claude-3.5"),
        ("claude-4-8-opus", "claude-new"),
        ("claude-5-sonnet", "claude-new"),
        ("claude-fable-5@default", "claude-new"),
        ("gemini-1.5-pro", "gemini"),
        ("gemini-2.0-flash-001", "gemini"),
        ("gemini-4-argon", "gemini-3"),
        ("gemini-gemma-2-27b-it", "gemma"),
        ("grok-4.20-0309-reasoning", "grok"),
        ("grok-code-fast-1", "grok"),
        ("databricks-grok-4-7", "grok-4.3"),
        ("qwen3-8b", "qwen"),
        ("qwen3:4b", "qwen"),
        ("qwen-plus-2025-04-28", "qwen"),
        ("qwen3p7-plus", "qwen-3.5"),
        ("codellama-7b", "llama"),
        ("us.meta.llama4-scout-17b-instruct-v1:0", "llama-4"),
        ("ft:gpt-3.5-turbo-0125:org::id", "gpt-4"),
        ("ft:o4-mini-2025-04-16:org::id", "o-series"),
        ("moonshot-v1-128k", "kimi"),
    ],
)
def test_a_published_model_keeps_its_own_family(families: TokenizerFamilies, model: str, name: str) -> None:
    assert families.find(model, "x", "chat").name == name


@pytest.mark.parametrize(
    ("model", "edge"),
    [
        ("claude-opus-4-6", 1568),
        ("claude-haiku-4-5-20251001", 1568),
        ("claude-3-5-sonnet-20241022", 1568),
        ("claude-opus-4-7", 2576),
        ("claude-sonnet-5@default", 2576),
        ("claude-fable-5-1", 2576),
        ("us.anthropic.claude-haiku-5-5", 2576),
        ("claude-zephyr-1", 2576),
    ],
)
def test_an_image_is_shrunk_to_the_edge_of_the_models_generation(
    families: TokenizerFamilies, model: str, edge: int
) -> None:
    assert families.find(model, "anthropic", "messages").image.edge == edge


@pytest.mark.parametrize(
    ("model", "rule"),
    [("gpt-4o", "tiles"), ("gpt-5-2025-08-07", "tiles"), ("databricks-gpt-5-4", "patches"), ("gpt-7", "patches")],
)
def test_images_of_an_unlisted_gpt_use_the_newest_rule(families: TokenizerFamilies, model: str, rule: str) -> None:
    assert families.find(model, "openai", "chat").image.rule == rule


def test_like_starts_from_the_numbers_of_another_family_but_not_from_its_models() -> None:
    found = families_from(
        {"families": {"a": {"models": ["a*"], "start": 7, "tools": 2}, "b": {"like": "a", "tools": 3}}}
    )
    assert (found.find("x", "", "chat").name, found.find("x", "", "chat").start, found.find("x", "", "chat").tools) == (
        "b",
        7,
        3,
    )


def test_first_match_is_used_and_an_empty_table_has_default_numbers() -> None:
    found = families_from({"families": {"first": {"models": "m*"}, "second": {"models": ["*"]}}})
    assert [found.find(model, "", "chat").name for model in ("M1", "n")] == ["first", "second"]
    assert families_from({}).find("any", "", "chat") == TokenizerFamily(name="unknown")


def test_own_table_is_searched_first_and_may_refer_to_the_other() -> None:
    shipped = {"families": {"a": {"start": 7}}, "images": {"all": {"rule": "fixed", "base": 9}}}
    own = {
        "families": {"b": {"models": "b*", "like": "a", "tools": 3}},
        "images": {"b": {"models": "b*", "rule": "tiles"}},
    }
    found = families_from(shipped, own)
    mine, other = (found.find(model, "", "chat") for model in ("b-1", "c"))
    assert (mine.name, mine.start, mine.tools, mine.image.rule) == ("b", 7, 3, "tiles")
    assert (other.name, other.image.base) == ("a", 9)
    with pytest.raises(ConfigError, match=r"families\.b\.like: there is no family 'z' above this one"):
        families_from(shipped, {"families": {"b": {"like": "z"}}})


def test_numbers_of_a_vocabulary_are_used_where_it_is_installed() -> None:
    table = {
        "families": {
            "a": {"models": "a*", "text": 1.1, "start": 7, "vocabulary": {"tokenizer": "own", "text": 1}},
            "b": {"models": "b*", "like": "a", "tools": 5, "vocabulary": {"tools": 4}},
            "c": {"models": "c*", "like": "a", "tokenizer": "cl100k_base", "vocabulary": {"tools": 4}},
        }
    }
    with_it, without = families_from(table, vocabularies=["own"]), families_from(table)
    plain, exact = (found.find("a", "", "chat") for found in (without, with_it))
    assert (plain.tokenizer, plain.text, plain.start) == ("o200k_base", 1.1, 7)
    assert (exact.tokenizer, exact.text, exact.start) == ("own", 1, 7)
    plain, exact = (found.find("b", "", "chat") for found in (without, with_it))
    assert (plain.tokenizer, plain.text, plain.tools) == ("o200k_base", 1.1, 5)
    assert (exact.tokenizer, exact.text, exact.tools) == ("own", 1, 4)
    assert with_it.find("c", "", "chat").tools == 0


def test_image_rules_are_matched_independently_of_families() -> None:
    found = families_from({"images": {"small": {"models": ["*mini*"], "rule": "fixed", "base": 9}}})
    assert found.find("a-mini", "", "chat").image.base == 9
    assert found.find("a", "", "chat").image.base == 85


def test_many_names_do_not_fill_the_memory() -> None:
    found = families_from({"families": {"all": {}}})
    for number in range(10_000):
        found.find(f"model-{number}", "", "chat")
    assert len(found._known) <= 4096


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"family": {}}, "family: there is no such key"),
        ({"families": []}, "families: must hold keys and values, not list"),
        ({"families": {"a": 3}}, "families.a: must hold keys and values, not int"),
        ({"families": {"a": {"strat": 3}}}, "families.a.strat: there is no such key"),
        ({"families": {"a": {"start": "3"}}}, "families.a.start: must be a number"),
        ({"families": {"a": {"start": float("nan")}}}, "families.a.start: must be a number"),
        ({"families": {"a": {"start": True}}}, "families.a.start: must be a number"),
        ({"families": {"a": {"vocabulary": {"strat": 3}}}}, "families.a.vocabulary.strat: there is no such key"),
        ({"families": {"a": {"vocabulary": {"vocabulary": {}}}}}, "families.a.vocabulary.vocabulary: there is no such"),
        ({"families": {"a": {"vocabulary": 3}}}, "families.a.vocabulary: must hold keys and values, not int"),
        ({"families": {"a": {"exact": 1}}}, "families.a.exact: must be true or false"),
        ({"families": {"a": {"tokenizer": 1}}}, "families.a.tokenizer: must be a text"),
        ({"families": {"a": {"rendering": "xml"}}}, "families.a.rendering: must be one of typescript, json"),
        ({"families": {"a": {"thoughts": "some"}}}, "families.a.thoughts: must be one of all, turn, none"),
        ({"families": {"a": {"like": "b"}}}, "families.a.like: there is no family 'b' above this one"),
        ({"families": {"a": {"tools_system": None}}}, "families.a.tools_system: must be a number"),
        ({"images": {"a": {"rule": "magic"}}}, "images.a.rule: "),
        ({"images": {"a": {"rule": "fixed", "cost": 3}}}, "images.a.cost: "),
        ({"images": {"a": {"rule": "fixed", "base": "3"}}}, "images.a.base: "),
        ({"images": {"a": {"rule": "patches", "patch": 0}}}, "images.a.patch: must be a number of 1 or more"),
        ({"images": {"a": {"rule": "patches", "cap": 0}}}, "images.a.cap: must be a number of 1 or more"),
        ({"images": {"a": {"rule": "fixed", "base": -1}}}, "images.a.base: must be a number of 0 or more"),
        ({"images": {"a": {"rule": "fixed", "models": [3]}}}, "images.a.models: must be a pattern"),
        ({"families": {"a": {"text": -3}}}, "families.a.text: must be 0 or more"),
        ({"families": {"a": {"wires": ["chta"]}}}, "families.a.wires: chta is none of chat, "),
        ({"families": {"a": {"models": {"a": "b"}}}}, "families.a.models: must be a pattern"),
        ({"families": {"a": {"providers": []}}}, "families.a.providers: must be a pattern"),
    ],
)
def test_errors_in_the_table_name_their_path(table: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        families_from(table)  # type: ignore[arg-type]  # what a user may write
    assert complaint in str(raised.value)


def test_every_key_is_a_number_a_choice_or_a_list() -> None:
    kinds = {str(item.type) for item in fields(TokenizerFamily)}
    assert {kind for kind in kinds if not kind.startswith(("float", "tuple", "Literal"))} == {
        "str",
        "bool",
        "ImageRule",
    }


@pytest.mark.parametrize(
    ("model", "sampling", "prefill"),
    [
        ("claude-fable-5-2", "fixed", "refused"),
        ("claude-haiku-5-5", "fixed", "refused"),
        ("claude-opus-5", "fixed", "refused"),
        ("anthropic.claude-opus-4-7-v1:0", "fixed", "refused"),
        ("claude-sonnet-4-5", "free", "accepted"),
        ("gpt-5", "free", "accepted"),
    ],
)
def test_table_lists_models_that_refuse_sampling_and_prefill(
    families: TokenizerFamilies, model: str, sampling: str, prefill: str
) -> None:
    found = families.find(model, "anthropic", "chat")
    assert (found.sampling, found.prefill) == (sampling, prefill)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"models": "m*", "account": "theirs"}, "thinking.a.account: must be one of any, own"),
        (
            {"models": "m*", "reads": []},
            "thinking.a.reads: must be a pattern such as my-model-*, or a list of patterns",
        ),
        ({"models": "m*", "reed": "x"}, "thinking.a.reed: there is no such key"),
        ({"models": 7}, "thinking.a.models: must be a pattern such as my-model-*, or a list of patterns"),
        (7, "thinking.a: must hold keys and values, not int"),
    ],
)
def test_invalid_thinking_rule_is_refused_with_its_key(row: object, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        families_from({"thinking": {"a": row}})
    assert refused.value.problems == [problem]


def test_own_thinking_rules_precede_those_of_the_table() -> None:
    own = {"thinking": {"mine": {"models": ["CLAUDE-sonnet-5-5*"], "account": "any"}}}
    rules = families_from({"thinking": {"a": {"models": ["*sonnet*"], "account": "own"}}}, own).thinking
    found = [rules.of(name) for name in ("claude-sonnet-5-5", "sonnet-6", "other")]
    assert [one.account if one else None for one in found] == ["any", "own", None]
