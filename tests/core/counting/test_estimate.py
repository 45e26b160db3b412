from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import keys_of
from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator, media_tokens
from gateway.core.counting.families import TokenizerFamilies, TokenizerFamily, families_from
from gateway.core.counting.heuristic import HeuristicCounter
from gateway.core.counting.measure import Wire
from gateway.core.counting.media import Media
from gateway.core.counting.request import RequestParts, read_request

WIRES: tuple[Wire, ...] = ("chat", "responses", "messages", "completions")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tokens(estimator: Estimator, body: dict[str, Any], wire: Wire = "chat") -> int:
    return estimator.estimate(read_request(wire, body)).tokens


def test_request_adds_up_texts_messages_and_start(estimator: Estimator) -> None:
    assert tokens(estimator, {"messages": [user("one two"), user("three")]}) == 3 + 2 * 4 + 3


def test_long_unknown_field_counts_as_overhead(estimator: Estimator) -> None:
    body = {"messages": [user("one two")]}
    bare = estimator.estimate(read_request("chat", body))
    for value in ("word " * 200, [{"text": "word " * 200}]):
        found = estimator.estimate(read_request("chat", {**body, "documents": value}))
        assert min(found.tokens - bare.tokens, found.overhead - bare.overhead) >= 200
        assert (found.source, found.shape) == ("calibrated", "other")


def test_suffix_is_counted_with_the_prompt(estimator: Estimator) -> None:
    assert tokens(estimator, {"prompt": "one two", "suffix": "word " * 200}, "completions") >= 202


def test_plain_text_is_exact_only_with_the_tokenizer_of_the_family(make: Any, words: Any) -> None:
    table = {"plain": {"exact": True, "tokenizer": "o200k_base"}}
    request = read_request("chat", {"messages": [user("hi")]})
    assert make(words, table).estimate(request).source == "calibrated"
    words.name = "tiktoken:o200k_base"
    found = make(words, table).estimate(request)
    assert (found.source, found.counter, found.family) == ("exact", "tiktoken:o200k_base", "plain")
    with_tools = read_request("chat", {"messages": [user("hi")], "tools": [{"type": "function", "name": "a"}]})
    assert make(words, table).estimate(with_tools).source == "calibrated"


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ({"messages": [user("hi")]}, ""),
        ({"messages": [{"role": "developer", "content": "x"}]}, "system"),
        ({"tools": [{"function": {"name": "a"}}], "tool_choice": "required"}, "tools+forced"),
        ({"response_format": {"json_schema": {"schema": {}}}}, "schema"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "media"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "server"),
        ({"web_search_options": {}}, "server"),
        ({"search_parameters": {"mode": "on"}}, "server"),
        ({"data_sources": [{}]}, "server"),
        ({"prompt": {"id": "pmpt_1"}}, "server"),
        ({"messages": [{"role": "user", "content": [{"type": "new"}]}]}, "other"),
    ],
)
def test_similar_requests_have_the_same_shape(estimator: Estimator, body: dict[str, Any], shape: str) -> None:
    assert estimator.estimate(read_request("chat", body)).shape == shape


def test_tools_forced_choice_and_system_prompt_cost_the_numbers_of_the_family(make: Any, words: Any) -> None:
    numbers = {"tools": 9, "tools_system": 5, "forced": 7, "forced_name": 4, "per_tool": 2, "message": 0, "system": 1}
    count = make(words, {"f": {**numbers, "rendering": "json"}})
    tool = {"type": "function", "function": {"name": "look", "description": "for it", "parameters": {"type": "object"}}}
    text = 1 + 2 + 1
    assert tokens(count, {"tools": [tool]}) == text + 9 + 2
    assert tokens(count, {"tools": [tool, tool]}) == 2 * text + 9 + 4
    assert tokens(count, {"tools": [tool], "messages": [{"role": "system", "content": ""}]}) == text + 5 + 2 + 1
    assert tokens(count, {"tools": [tool], "tool_choice": "required"}) == text + 9 + 2 + 7
    named = {"type": "function", "function": {"name": "look"}}
    assert tokens(count, {"tools": [tool], "tool_choice": named}) == text + 9 + 2 + 7 + 4 + 1


def test_calls_of_one_message_are_parallel(make: Any, words: Any) -> None:
    count = make(words, {"f": {"per_call": 10, "per_result": 3, "parallel": 100, "called": 1, "message": 0}})
    call = {"function": {"name": "look", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "1", "content": ""}
    one = {"messages": [{"role": "assistant", "tool_calls": [call]}, result]}
    two = {"messages": [{"role": "assistant", "tool_calls": [call, call]}, result, result]}
    assert tokens(count, one) == 2 + 10 + 3
    assert tokens(count, two) == 2 * (2 + 10 + 3) + 100


@pytest.mark.parametrize(("thoughts", "kept"), [("all", 5), ("turn", 2), ("none", 0)])
def test_earlier_thinking_counts_if_the_provider_keeps_it(make: Any, words: Any, thoughts: str, kept: int) -> None:
    count = make(words, {"f": {"thoughts": thoughts, "message": 0}})
    body = {
        "messages": [
            {"role": "assistant", "reasoning_content": "one two three"},
            user(""),
            {"role": "assistant", "reasoning_content": "four five"},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ]
    }
    assert tokens(count, body) == kept


def test_encrypted_thinking_of_the_last_turn_costs_by_its_length(make: Any, words: Any) -> None:
    count = make(words, {"f": {"thoughts": "turn", "sealed": 0.5, "seal": 100, "message": 0}})

    def body(*lengths: int) -> dict[str, Any]:
        return {"input": [user(""), *({"type": "reasoning", "encrypted_content": "x" * size} for size in lengths)]}

    assert tokens(count, body(300), "responses") == 100
    assert tokens(count, body(50), "responses") == 0
    assert tokens(count, body(300, 300), "responses") == 200
    earlier = {"input": [{"type": "reasoning", "encrypted_content": "x" * 300}, user("")]}
    assert tokens(count, earlier, "responses") == 0


def test_schema_costs_only_what_the_model_sees(make: Any, words: Any) -> None:
    count = make(words, {"f": {"schema": 2, "with_schema": 10, "message": 0}})
    form = {"name": "n", "description": "d e", "schema": {"type": "object", "additionalProperties": False}}
    assert tokens(count, {"response_format": {"json_schema": form}}) == 10 + 2 * (1 + 1 + 2)


def test_typescript_tools_include_the_namespace(make: Any, words: Any) -> None:
    count = make(words, {"f": {"rendering": "typescript", "tools": 9, "message": 0}})
    tool = {"type": "function", "function": {"name": "now"}}
    shown = "namespace functions {\n\ntype now = () => any;\n\n} // namespace functions"
    assert tokens(count, {"tools": [tool]}) == len(shown.split()) + 9


def test_media_cost_depends_on_the_kind() -> None:
    family = TokenizerFamily(name="f", audio_second=10, pdf_page=250, document=35)
    costs = [
        media_tokens(Media("audio", seconds=3), family),
        media_tokens(Media("audio", size=80_000), family),
        media_tokens(Media("pdf", pages=4), family),
        media_tokens(Media("pdf", size=500_000), family),
        media_tokens(Media("text"), family),
        media_tokens(Media("file", size=400), family),
        media_tokens(Media("video", size=400_000), family),
        media_tokens(Media("image", 512, 512), family),
    ]
    assert costs == [30, 100, 1000, 2500, 35, 10, 1000, 255]


def test_images_and_files_are_part_of_the_estimate(shipped: Estimator) -> None:
    file = {"file_data": "data:application/pdf;base64," + "QUJD" * 60_000}
    for part in ({"type": "image_url", "image_url": {"url": "https://x/y"}}, {"type": "file", "file": file}):
        body = {"messages": [user("one"), {"role": "user", "content": [part]}]}
        request = read_request("chat", body, model="gpt-4o")
        found, each = shipped.estimate(request), shipped.message_tokens(request)
        assert found.tokens == found.overhead + sum(each)
        assert each[1] > 100
        assert found.doubt > 0


def test_unknown_size_adds_doubt_to_the_estimate(estimator: Estimator) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y"}}
    found = estimator.estimate(read_request("chat", {"messages": [{"role": "user", "content": [image]}]}))
    assert found.doubt == 510
    assert estimator.estimate(read_request("chat", {"messages": [user("x")]})).doubt == 0


def test_message_tokens_are_returned_for_each_message(estimator: Estimator) -> None:
    body = {"messages": [user("one two"), {"role": "tool", "tool_call_id": "1", "content": "a b c"}], "tools": [{}]}
    assert estimator.message_tokens(read_request("chat", body)) == [6, 7]


@pytest.mark.parametrize(("wire", "field"), [("responses", "instructions"), ("messages", "system")])
def test_overhead_and_message_tokens_add_up_to_the_estimate(estimator: Estimator, wire: Wire, field: str) -> None:
    array = "input" if wire == "responses" else "messages"
    request = read_request(wire, {array: [user("one two"), user("three")], field: "word " * 200})
    found = estimator.estimate(request)
    assert found.overhead >= 200
    assert abs(found.overhead + sum(estimator.message_tokens(request)) - found.tokens) <= 2


def test_estimate_includes_the_parts_of_the_context(estimator: Estimator) -> None:
    body = {"messages": [user("one two"), {"role": "tool", "tool_call_id": "1", "content": "a b c"}]}
    found = estimator.estimate(read_request("chat", body)).context
    assert (found.conversation_tokens, found.tool_tokens) == (2, 3)


# --- count once


def test_turn_counts_only_its_new_messages(estimator: Estimator, words: Any) -> None:
    tool = {"function": {"name": "look", "description": "for it", "parameters": {}}}
    messages: list[bytes] = []
    asked: list[int] = []
    for turn in range(60):
        messages += [json.dumps(user(f"question {turn}")).encode(), json.dumps(user(f"answer {turn}")).encode()]
        before = len(words.texts)
        body = {"tools": json.dumps([tool]).encode(), "model": "m"}
        estimator.estimate(read_request("chat", body, messages=messages))
        asked.append(len(words.texts) - before)
    assert set(asked[1:]) == {2}  # the whole session costs its length, not the square of it
    assert len(set(words.texts)) == len(words.texts)


def test_decoded_messages_are_counted_once(estimator: Estimator, words: Any) -> None:
    body = {"messages": [user("one two"), user("three")]}
    estimator.estimate(read_request("chat", body))
    before = len(words.texts)
    assert estimator.estimate(read_request("chat", copy.deepcopy(body))).tokens == 3 + 8 + 3
    assert len(words.texts) == before


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (
            "messages",
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "word " * 99}]},
        ),
        ("responses", {"type": "function_call_output", "call_id": "1", "output": "word " * 99}),
    ],
)
def test_long_text_is_counted_once_for_its_format_and_for_chat(
    estimator: Estimator, words: Any, wire: Wire, message: Any
) -> None:
    request = read_request(wire, {}, messages=[json.dumps(message).encode()])
    chat = json.dumps({"role": "tool", "tool_call_id": "1", "content": "word " * 99}).encode()
    assert estimator.message_tokens(request, [chat], read_as="chat") == [4 + 99]
    assert estimator.estimate(request).context.tool_tokens == 99
    assert words.texts.count("word " * 99) == 1


def test_bytes_and_decoded_value_of_a_message_have_the_same_tokens(estimator: Estimator) -> None:
    messages: list[Any] = [user("one two"), {"role": "tool", "tool_call_id": "1", "content": "x y z"}]
    raw = [json.dumps(message).encode() for message in messages]
    mixed = [raw[0], messages[1]]
    found = {estimator.estimate(read_request("chat", {}, messages=choice)).tokens for choice in (messages, raw, mixed)}
    assert len(found) == 1


def test_same_bytes_are_counted_separately_for_each_format(make: Any, words: Any) -> None:
    """A cache key without the wire format or the tokenizer would mix up their counts."""
    count = make(words, {"f": {"result": 100, "message": 0}})
    raw = json.dumps({"role": "tool", "content": "a b"}).encode()
    chat = count.estimate(RequestParts(wire="chat", messages=[raw])).tokens
    messages = count.estimate(RequestParts(wire="messages", messages=[raw])).tokens
    assert (chat, messages) == (200, 2)


# --- laws

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", 3, None])
KINDS = st.sampled_from(
    [
        "text",
        "image_url",
        "image",
        "input_image",
        "tool_use",
        "tool_result",
        "thinking",
        "document",
        "file",
        "input_file",
        "reasoning",
        "function_call",
        "function_call_output",
        "input_audio",
        "redacted_thinking",
        "message",
        "unheard_of",
    ]
) | st.just(7)
FIELDS = st.sampled_from(
    [
        "text",
        "content",
        "image_url",
        "source",
        "input",
        "name",
        "arguments",
        "output",
        "file",
        "url",
        "data",
        "summary",
        "tool_calls",
        "function",
        "id",
        "call_id",
        "tool_use_id",
        "thinking",
        "encrypted_content",
        "reasoning_details",
        "file_data",
        "media_type",
        "input_audio",
        "detail",
        "reasoning",
        "refusal",
        "function_call",
    ]
)
PART: st.SearchStrategy[Any] = st.deferred(
    lambda: st.dictionaries(FIELDS, JSON | st.lists(PART, max_size=2), max_size=4)
).flatmap(lambda part: KINDS.map(lambda kind: {**part, "type": kind}))
MESSAGE = st.builds(
    lambda role, content, extra: {**extra, "role": role, "content": content},
    ROLES,
    JSON | st.lists(PART, max_size=3),
    st.dictionaries(FIELDS, JSON | st.lists(PART, max_size=2), max_size=3),
)
TOOL = st.builds(
    lambda name, schema, more: {"name": name, "parameters": schema, "input_schema": schema, **more},
    JSON,
    JSON,
    st.dictionaries(st.sampled_from(["type", "function", "description", "defer_loading", "tools"]), JSON, max_size=3),
)
TOP = st.sampled_from(
    [
        "system",
        "instructions",
        "tool_choice",
        "response_format",
        "text",
        "thinking",
        "reasoning",
        "output_config",
        "functions",
    ]
)
BODY = st.builds(
    lambda messages, tools, extra: {
        **extra,
        "messages": messages,
        "input": messages,
        "prompt": messages,
        "tools": tools,
    },
    JSON | st.lists(MESSAGE | PART | JSON, max_size=4),
    JSON | st.lists(TOOL | JSON, max_size=3),
    st.dictionaries(TOP, JSON | PART | TOOL, max_size=4),
)
MODELS = ("gpt-4o", "gpt-4", "gpt-5", "claude-sonnet-4-5", "gemini-2.5-pro", "deepseek-chat", "what")


@pytest.fixture(scope="module")
def shipped(families: TokenizerFamilies) -> Estimator:
    counter = HeuristicCounter()
    return Estimator(families, lambda _tokenizer: counter, CountCache(limit_bytes=100_000))


@settings(max_examples=300, deadline=None)
@given(BODY, st.sampled_from(WIRES), st.sampled_from(MODELS))
def test_any_json_is_estimated_consistently_and_never_below_zero(
    shipped: Estimator, body: Any, wire: Wire, model: str
) -> None:
    first = shipped.estimate(read_request(wire, body, model=model))
    assert first.tokens >= 0
    assert min(first.context.conversation_tokens, first.context.tool_tokens, first.doubt) >= 0
    assert shipped.estimate(read_request(wire, body, model=model)) == first
    raw = {name: json.dumps(value).encode() for name, value in body.items()}
    assert shipped.estimate(read_request(wire, raw, model=model)) == first
    assert min(shipped.message_tokens(read_request(wire, body, model=model)), default=0) >= -100


@settings(max_examples=60, deadline=None)
@given(st.lists(TOOL, min_size=2, max_size=5), st.integers(), st.sampled_from(MODELS))
def test_the_order_of_tools_does_not_matter(shipped: Estimator, tools: list[Any], seed: int, model: str) -> None:
    shuffled = random.Random(seed).sample(tools, len(tools))
    found = [shipped.estimate(read_request("chat", {"tools": order}, model=model)) for order in (tools, shuffled)]
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30).map(user), max_size=6), st.text(max_size=30), st.sampled_from(MODELS))
def test_added_message_never_lowers_the_estimate(
    shipped: Estimator, messages: list[Any], text: str, model: str
) -> None:
    before = shipped.estimate(read_request("chat", {"messages": messages}, model=model)).tokens
    after = shipped.estimate(read_request("chat", {"messages": [*messages, user(text)]}, model=model)).tokens
    assert after >= before


def test_deep_nesting_does_not_fail(shipped: Estimator) -> None:
    deep: Any = "bottom"
    for _ in range(50_000):
        deep = [deep]
    for body in ({"messages": [{"role": "user", "content": deep}]}, {"tools": deep}, {"messages": deep}):
        assert shipped.estimate(read_request("chat", body)).tokens >= 0
    raw = b'{"role":"user","content":' + b"[" * 100_000
    assert shipped.estimate(read_request("chat", {}, messages=[raw])).tokens > 1000


def _result(inner: object) -> object:
    return [{"type": "tool_result", "tool_use_id": "t", "content": inner}]


def _document(inner: object) -> object:
    return [{"type": "document", "source": {"type": "content", "content": inner}}]


def _namespace(inner: object) -> object:
    return [{"type": "namespace", "name": "n", "tools": inner}]


@pytest.mark.parametrize("within", [_result, _document, _namespace])
def test_parts_nested_deeper_than_the_recursion_limit_are_counted(
    within: Callable[[object], object], shipped: Estimator
) -> None:
    deep: Any = "bottom " * 500
    for _ in range(5_000):
        deep = within(deep)
    body = {"tools": deep} if within is _namespace else {"messages": [{"role": "user", "content": deep}]}
    assert shipped.estimate(read_request("messages", body)).tokens > 500


def test_empty_family_table_still_counts(words: Any) -> None:
    count = Estimator(families_from({}), lambda _tokenizer: words, CountCache())
    assert tokens(count, {"messages": [user("one two")]}) == 4 + 2


def test_known_keys_are_not_hashed_again_and_give_the_same_estimate(estimator: Estimator, words: Any) -> None:
    raws = [b'{"role":"user","content":"one two"}', b'{"role":"user","content":"three"}']
    request = read_request("chat", {}, messages=raws)
    plain = estimator.estimate(request)
    assert estimator.estimate(request, keys=[b"a", b"b"]) == plain
    asked = len(words.texts)
    assert estimator.estimate(read_request("chat", {}, messages=raws[:1]), keys=[b"b"]).tokens < plain.tokens
    assert len(words.texts) == asked


# --- compactions --------------------------------------------------------------------------------------------------

COMPACTION = {"type": "compaction", "content": "all was well"}


def claude(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"system": "be brief", "messages": list(turns)}


def test_messages_before_an_anthropic_compaction_are_not_counted(estimator: Estimator) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "word " * 500}, image]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "word " * 500}]}
    blocks = [COMPACTION, {"type": "text", "text": "go on"}]
    summed_up: dict[str, Any] = {"role": "assistant", "content": blocks}
    within = {"role": "assistant", "content": [{"type": "text", "text": "word " * 500}, *blocks]}
    bare = estimator.estimate(read_request("messages", claude(summed_up, user("hi"))))
    befores: list[list[dict[str, Any]]] = [[asked, result, summed_up], [asked, within], [asked, summed_up, within]]
    for before in befores:
        found = estimator.estimate(read_request("messages", claude(*before, user("hi"))))
        assert (found.tokens, found.doubt, found.context) == (bare.tokens, bare.doubt, bare.context)


def test_failed_compaction_replaces_nothing(estimator: Estimator) -> None:
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    assert tokens(estimator, claude(user("word " * 500), failed), "messages") > 500


def test_items_before_an_openai_compaction_are_counted(estimator: Estimator) -> None:
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": "Z2VoZWlt"}
    assert tokens(estimator, {"input": [user("word " * 500), item]}, "responses") > 500


def test_sums_continued_after_a_compaction_equal_the_sums_of_all_messages(estimator: Estimator) -> None:
    turns: list[dict[str, Any]] = [
        user("word " * 500),
        {"role": "assistant", "content": [COMPACTION]},
        user("hi"),
        user("there"),
    ]
    overhead = estimator.overhead(read_request("messages", claude(*turns)))
    whole = estimator.sums(overhead, turns)
    for place in range(len(turns)):
        assert estimator.sums(overhead, turns[place:], before=estimator.sums(overhead, turns[:place])) == whole


def test_longer_request_with_known_keys_continues_from_the_shorter_one(make: Any, words: Any) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": "{}"}}
    said = [
        {"role": "system", "content": "be good"},
        user("one two"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "three four five"},
        {"role": "assistant", "content": "<think>hm hm</think> six"},
        {"role": "tool", "tool_call_id": "a", "content": "three four five"},
        user("seven"),
        {"role": "assistant", "content": "eight", "reasoning_content": "nine ten"},
    ]
    raws = [json.dumps(message).encode() for message in said]
    keys, warm = keys_of(raws), make(words, {"plain": {"start": 3}})
    for end in (4, 5, 8, 7, 8):
        request = read_request("chat", {"model": "m"}, messages=raws[:end])
        cold = make(words, {"plain": {"start": 3}})
        assert warm.estimate(request, keys=keys[:end]) == cold.estimate(request) == warm.estimate(request)
    for end in (8, 4):  # another system text, and another tokenizer, is another kind of request
        other = read_request("responses", {"instructions": "word " * end}, messages=raws[:end])
        assert warm.estimate(other, keys=keys[:end]) == warm.estimate(other)


USER, ANSWER, SYSTEM = ({"role": role, "content": "x"} for role in ("user", "assistant", "system"))


@pytest.mark.parametrize(
    ("model", "provider", "messages", "frame"),
    [
        # what providers reported for texts of known length, minus the text
        ("mistral-large-latest", "mistral", [USER], 3),
        ("mistral-large-latest", "mistral", [SYSTEM, USER], 5),
        ("mistral-large-latest", "mistral", [SYSTEM, USER, ANSWER, USER], 8),
        ("mistral-small-latest", "mistral", [USER], 15),
        ("llama-3.3-70b-versatile", "groq", [USER], 35),
        ("llama-3.3-70b-versatile", "groq", [SYSTEM, USER], 35),
        ("llama-3.3-70b-versatile", "groq", [USER, ANSWER, USER], 45),
        ("llama3.2:3b", "ollama", [SYSTEM, USER], 25),
        ("glm-4.7", "zai", [USER], 5),
        ("glm-4.5-air", "zai", [SYSTEM, USER], 5),
        ("qwen3", "ollama", [USER], 10),
        ("qwen3-8b", "vllm", [USER], 8),
        ("deepseek-chat", "deepseek", [USER, ANSWER, USER], 8),
        ("deepseek/deepseek-r1", "openrouter", [USER], 3),
        ("gemini-2.5-flash", "openrouter", [SYSTEM, USER], 0),
        ("claude-sonnet-4-5", "anthropic", [USER], 7),
        ("claude-sonnet-4-5", "anthropic", [USER, ANSWER, USER], 13),
        ("claude-sonnet-5", "anthropic", [USER], 6),
    ],
)
def test_messages_cost_what_providers_reported(
    families_with_vocabularies: TokenizerFamilies,
    model: str,
    provider: str,
    messages: list[dict[str, str]],
    frame: int,
) -> None:
    count = Estimator(families_with_vocabularies, lambda _: HeuristicCounter(), CountCache())
    found = count.estimate(read_request("chat", {"model": model, "messages": messages}, provider=provider))
    assert found.tokens - len(messages) == frame


def test_grok_bills_the_encrypted_reasoning_of_earlier_turns_and_no_summary(
    families_with_vocabularies: TokenizerFamilies,
) -> None:
    """A pair of recorded requests: 908 characters took 148 tokens, a summary took none."""
    count = Estimator(families_with_vocabularies, lambda _: HeuristicCounter(), CountCache())

    def tokens(**reasoning: object) -> int:
        items = [USER, {"type": "reasoning", **reasoning}, ANSWER, USER]
        return count.estimate(read_request("responses", {"model": "grok-4.3", "input": items}, provider="xai")).tokens

    summary = [{"type": "summary_text", "text": "the user asks what is in this file"}]
    assert tokens(summary=summary) == tokens(summary=[])
    assert tokens(encrypted_content="x" * 908, summary=summary) - tokens(summary=[]) == pytest.approx(148, abs=5)
