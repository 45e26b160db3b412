"""Test that requests are refused and accepted by the same rules as in the real APIs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.mock import STRICT_MODELS, MockProvider, StrictRules, ToolCall, Turn
from tests.mock.conftest import CHAT, Http, Reply

Json = dict[str, Any]

GEMINI, DEEPSEEK, KIMI, QWEN = "gemini-3.1-pro", "deepseek-v4-pro", "kimi-k3", "qwen3.5-plus"
MISTRAL, MINISTRAL = "mistral-large-2611", "ministral-14b"
SOL, CODEX, GPT = "gpt-6.2-sol", "gpt-5.3-codex", "gpt-5.4"
TASK = {"role": "user", "content": "look it up"}
TOOL = {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}
LOOKUP = ToolCall("lookup", '{"key": "a"}')
UNPAIRED = "must be followed by tool messages"


@pytest.fixture(autouse=True)
def strict(provider: MockProvider) -> Iterator[MockProvider]:
    provider.strict = STRICT_MODELS
    yield provider
    provider.strict = ()


# --- chat -----------------------------------------------------------------------------------------------------------


def ask(web: Http, model: str, messages: list[Json], **fields: object) -> Reply:
    tools = [{"type": "function", "function": TOOL}]
    return web.send("POST", CHAT, {"model": model, "messages": messages, "tools": tools, **fields})


def called(web: Http, strict: MockProvider, model: str, messages: list[Json], calls: int = 1) -> list[Json]:
    """Return the messages after one more response with tool calls, and their results."""
    strict.push(Turn(tool_calls=(LOOKUP,) * calls))
    message = ask(web, model, messages).json["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "found"} for call in message["tool_calls"]]
    return [*messages, message, *results]


def answered(web: Http, model: str, messages: list[Json]) -> list[Json]:
    """Return the messages after one more response with text."""
    return [*messages, ask(web, model, messages).json["choices"][0]["message"]]


def without(messages: list[Json], index: int, field: str) -> list[Json]:
    """Return the messages without one field of one message."""
    kept = {key: value for key, value in messages[index].items() if key != field}
    return [*messages[:index], kept, *messages[index + 1 :]]


def refusal(reply: Reply) -> str:
    assert reply.status == 400
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


def unsigned(messages: list[Json], index: int, signature: str | None = None, call: int = 0) -> list[Json]:
    """Return the messages with another signature of one tool call, or without it."""
    changed = json.loads(json.dumps(messages))
    made = changed[index]["tool_calls"][call]
    made.pop("extra_content", None)
    if signature is not None:
        made["extra_content"] = {"google": {"thought_signature": signature}}
    return list(changed)


def signature_of(messages: list[Json], index: int, call: int = 0) -> str | None:
    found = messages[index]["tool_calls"][call].get("extra_content", {}).get("google", {}).get("thought_signature")
    return found if found is None else str(found)


def test_no_rules_apply_by_default(web: Http, provider: MockProvider) -> None:
    provider.strict = ()
    reply = ask(web, DEEPSEEK, [TASK], tool_choice="required").json["choices"][0]["message"]
    assert "reasoning_content" not in reply
    assert reply["tool_calls"][0]["id"].startswith("call_mock")


def test_other_models_have_no_rules(web: Http) -> None:
    assert ask(web, "gpt-4o", [TASK], tool_choice="required").status == 200


def test_gemini_requires_signatures_in_the_current_turn(web: Http, strict: MockProvider) -> None:
    messages = called(web, strict, GEMINI, called(web, strict, GEMINI, [TASK]))
    assert ask(web, GEMINI, messages).status == 200
    for index in (1, 3):
        reply = ask(web, GEMINI, unsigned(messages, index))
        assert reply.status == 400
        [body] = reply.json
        assert body["error"]["status"] == "INVALID_ARGUMENT"
        assert body["error"]["message"].startswith("Function call is missing a thought_signature in functionCall parts")
        assert f"function call `default_api:lookup` , position {index}." in body["error"]["message"]


def test_gemini_signs_the_first_of_parallel_calls_only(web: Http, strict: MockProvider) -> None:
    messages = called(web, strict, GEMINI, [TASK], calls=2)
    assert signature_of(messages, 1)
    assert signature_of(messages, 1, call=1) is None
    assert ask(web, GEMINI, messages).status == 200
    assert ask(web, GEMINI, unsigned(messages, 1)).status == 400


def test_gemini_requires_no_signatures_in_earlier_turns(web: Http, strict: MockProvider) -> None:
    messages = answered(web, GEMINI, called(web, strict, GEMINI, [TASK]))
    assert ask(web, GEMINI, [*unsigned(messages, 1), TASK]).status == 200


def test_gemini_refuses_signatures_of_other_models_and_accepts_the_placeholder(web: Http, strict: MockProvider) -> None:
    messages = called(web, strict, GEMINI, [TASK])
    other = signature_of(called(web, strict, "gemini-3-flash", [TASK]), 1)
    for signature in (other, f"{signature_of(messages, 1)}A", "none at all"):
        reply = ask(web, GEMINI, unsigned(messages, 1, signature))
        assert (reply.status, reply.json[0]["error"]["message"]) == (400, "Corrupted thought signature.")
    assert ask(web, GEMINI, unsigned(messages, 1, "skip_thought_signature_validator")).status == 200


def test_gemini_signs_calls_in_a_stream_too(web: Http, strict: MockProvider) -> None:
    strict.push(Turn(tool_calls=(LOOKUP,)))
    events = ask(web, GEMINI, [TASK], stream=True).events
    [opened] = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ()) if "id" in call]
    assert opened["extra_content"]["google"]["thought_signature"]


@pytest.mark.parametrize("model", [DEEPSEEK, KIMI, QWEN])
def test_thinking_models_answer_with_reasoning(web: Http, strict: MockProvider, model: str) -> None:
    reply = ask(web, model, [TASK]).json
    reasoning = reply["choices"][0]["message"]["reasoning_content"]
    assert reasoning
    usage = reply["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    deltas = [event["choices"][0]["delta"] for event in ask(web, model, [TASK], stream=True).events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning


@pytest.mark.parametrize("off", [{"thinking": {"type": "disabled"}}, {"enable_thinking": False}])
@pytest.mark.parametrize("model", [DEEPSEEK, KIMI, QWEN])
def test_reasoning_is_not_required_while_thinking_is_off(
    web: Http, strict: MockProvider, model: str, off: Json
) -> None:
    messages = called(web, strict, model, [TASK])
    reply = ask(web, model, without(messages, 1, "reasoning_content"), tool_choice="required", **off)
    assert reply.status == 200
    assert "reasoning_content" not in reply.json["choices"][0]["message"]


def test_deepseek_requires_reasoning_of_all_turns_with_calls(web: Http, strict: MockProvider) -> None:
    messages = [*answered(web, DEEPSEEK, called(web, strict, DEEPSEEK, [TASK])), TASK]
    assert ask(web, DEEPSEEK, messages).status == 200
    for index in (1, 3):
        text = refusal(ask(web, DEEPSEEK, without(messages, index, "reasoning_content")))
        assert text == "The `reasoning_content` in the thinking mode must be passed back to the API."


@pytest.mark.parametrize(
    ("reading", "refused"), [("none", set()), ("turn", {5}), ("calls", {1, 5}), ("turns", {1, 3, 5})]
)
def test_required_reasoning_for_each_setting(web: Http, strict: MockProvider, reading: Any, refused: set[int]) -> None:
    strict.strict = [replace(rules, reasoning_back=reading) for rules in STRICT_MODELS]
    first = [*answered(web, DEEPSEEK, called(web, strict, DEEPSEEK, [TASK])), TASK]
    messages = called(web, strict, DEEPSEEK, first)
    statuses = {i: ask(web, DEEPSEEK, without(messages, i, "reasoning_content")).status for i in (1, 3, 5)}
    assert {index for index, status in statuses.items() if status == 400} == refused


def test_a_turn_without_calls_needs_no_reasoning(web: Http, strict: MockProvider) -> None:
    strict.push(Turn(text="done"))
    messages = [*answered(web, DEEPSEEK, [TASK]), TASK]
    assert ask(web, DEEPSEEK, without(messages, 1, "reasoning_content")).status == 200


def test_kimi_says_which_message_lacks_its_reasoning(web: Http, strict: MockProvider) -> None:
    messages = [*answered(web, KIMI, called(web, strict, KIMI, [TASK])), TASK]
    assert ask(web, KIMI, without(messages, 3, "reasoning_content")).status == 200
    text = refusal(ask(web, KIMI, without(messages, 1, "reasoning_content")))
    assert text == "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1"


@pytest.mark.parametrize(
    ("model", "choice", "text"),
    [
        (DEEPSEEK, "required", "Thinking mode does not support this tool_choice"),
        (DEEPSEEK, "lookup", "Thinking mode does not support this tool_choice"),
        (KIMI, "required", "tool_choice 'required' is incompatible with thinking enabled"),
        (KIMI, "lookup", "tool_choice 'specified' is incompatible with thinking enabled"),
        (QWEN, "required", "The tool_choice parameter does not support being set to required or object"),
        (QWEN, "lookup", "The tool_choice parameter does not support being set to required or object"),
    ],
)
def test_forced_tool_choice_is_refused_while_thinking_is_on(web: Http, model: str, choice: str, text: str) -> None:
    forced = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    assert text in refusal(ask(web, model, [TASK], tool_choice=forced))
    assert ask(web, model, [TASK], tool_choice="auto").status == 200
    assert ask(web, model, [TASK], tool_choice="none").status == 200


@pytest.mark.parametrize("model", [GEMINI, MISTRAL])
def test_forced_tool_choice_is_accepted_by_other_models(web: Http, model: str) -> None:
    assert ask(web, model, [TASK], tool_choice="required").status == 200


def mistral_refusal(reply: Reply) -> tuple[str, str]:
    assert reply.status == 400
    assert reply.json["object"] == "error"
    return reply.json["code"], reply.json["message"]


def test_mistral_calls_have_ids_of_nine_characters(web: Http, strict: MockProvider) -> None:
    messages = called(web, strict, MISTRAL, [TASK], calls=2)
    names = [call["id"] for call in messages[1]["tool_calls"]]
    assert len(set(names)) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{9}", name) for name in names)
    assert ask(web, MISTRAL, messages).status == 200


def test_mistral_refuses_other_ids(web: Http, strict: MockProvider) -> None:
    messages = json.loads(json.dumps(called(web, strict, MISTRAL, [TASK])))
    messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "call_12345"
    code, text = mistral_refusal(ask(web, MISTRAL, messages))
    assert (code, text) == ("3280", "Tool call id was call_12345 but must be a-z, A-Z, 0-9, with a length of 9.")


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_mistral_requires_a_user_or_tool_message_at_the_end(web: Http, role: str) -> None:
    code, text = mistral_refusal(ask(web, MISTRAL, [{"role": role, "content": "hi"}]))
    assert code == "3230"
    assert text == f"Expected last role User or Tool (or Assistant with prefix True) for serving but got {role}"


def test_mistral_accepts_an_assistant_prefix_at_the_end(web: Http) -> None:
    assert ask(web, MISTRAL, [TASK, {"role": "assistant", "content": "hi", "prefix": True}]).status == 200


def test_mistral_refuses_a_user_after_a_tool(web: Http, strict: MockProvider) -> None:
    messages = [*called(web, strict, MISTRAL, [TASK]), TASK]
    assert mistral_refusal(ask(web, MISTRAL, messages)) == ("3230", "Unexpected role 'user' after role 'tool'")


def test_two_of_one_role_in_a_row_are_refused_by_the_chat_template_only(web: Http) -> None:
    said = {"role": "assistant", "content": "hi"}
    for messages in ([TASK, TASK], [TASK, said, said, TASK]):
        assert ask(web, MISTRAL, messages).status == 200
        code, text = mistral_refusal(ask(web, MINISTRAL, messages))
        assert code == "3230"
        assert text.startswith("Unexpected role")


@pytest.mark.parametrize("model", [GEMINI, DEEPSEEK, MISTRAL])
def test_calls_and_results_come_in_pairs(web: Http, strict: MockProvider, model: str) -> None:
    messages = called(web, strict, model, [TASK], calls=2)
    assert UNPAIRED in ask(web, model, messages[:-1]).body.decode()
    said = {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    assert UNPAIRED in ask(web, model, [*messages[:-1], said, TASK]).body.decode()
    orphan = [TASK, said, {"role": "tool", "tool_call_id": "abcdefghi", "content": "found"}]
    assert "must be a response to a preceding message" in ask(web, model, orphan).body.decode()


# --- responses ------------------------------------------------------------------------------------------------------


def respond(web: Http, model: str, items: list[Json], **fields: object) -> Reply:
    body = {
        "model": model,
        "input": items,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", **TOOL}],
        **fields,
    }
    return web.send("POST", "/v1/responses", body)


def run(web: Http, strict: MockProvider, model: str, **turn: Any) -> list[Json]:
    """Return the items after a response with reasoning, text and a tool call, and the tool result."""
    strict.push(Turn(**{"text": "I look.", "tool_calls": (LOOKUP,), **turn}))
    output = respond(web, model, [TASK]).json["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "found"}
        for item in output
        if item["type"] == "function_call"
    ]
    return [TASK, *output, *results]


def kinds(items: list[Json]) -> list[str]:
    return [item.get("type", "message") for item in items]


def test_gpt_begins_with_encrypted_reasoning(web: Http, strict: MockProvider) -> None:
    items = run(web, strict, GPT)
    assert kinds(items) == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert items[1]["id"].startswith("rs_")
    assert items[1]["encrypted_content"]
    last = respond(web, GPT, items).json
    assert kinds(last["output"]) == ["reasoning", "message"]
    usage = last["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_ciphertext_is_shown_where_it_is_asked_for(web: Http) -> None:
    [item, _] = respond(web, GPT, [TASK], include=[], tools=[]).json["output"]
    assert item["type"] == "reasoning"
    assert "encrypted_content" not in item


def test_a_stream_brings_the_same_items(web: Http, strict: MockProvider) -> None:
    strict.push(Turn(text="I look.", tool_calls=(LOOKUP,)))
    events = respond(web, SOL, [TASK], stream=True).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert kinds(done) == ["reasoning", "message", "function_call"]
    assert done[0]["encrypted_content"]
    opened = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in opened] == [item["id"] for item in done]
    said = [event for event in events if event["type"].startswith("response.output_text")]
    assert {event["item_id"] for event in said} == {done[1]["id"]}


def test_gpt_refuses_reasoning_without_what_followed_it(web: Http, strict: MockProvider) -> None:
    items = run(web, strict, GPT, text=None)
    reasoning = items[1]
    other = run(web, strict, GPT, text=None)
    for orphan in ([TASK, reasoning], [reasoning, TASK], [TASK, reasoning, *other[2:]]):
        text = refusal(respond(web, GPT, orphan))
        assert text == f"Item '{reasoning['id']}' of type 'reasoning' was provided without its required following item."


def test_gpt_refuses_what_followed_reasoning_without_it(web: Http, strict: MockProvider) -> None:
    items = run(web, strict, GPT)
    reasoning, message, call = items[1:4]
    for left in ([TASK, message], [TASK, *items[3:]]):
        text = refusal(respond(web, GPT, left))
        found = left[1]
        assert text == (
            f"Item '{found['id']}' of type '{found['type']}' was provided without its required 'reasoning' item: "
            f"'{reasoning['id']}'."
        )
    unnamed = {key: value for key, value in call.items() if key != "id"}
    assert respond(web, GPT, [TASK, unnamed, items[4]]).status == 200


def test_gpt_refuses_a_call_without_its_output(web: Http, strict: MockProvider) -> None:
    items = run(web, strict, GPT)
    text = refusal(respond(web, GPT, [*items[:4], TASK]))
    assert text == f"No tool output found for function call {items[3]['call_id']}."


def test_gpt_refuses_an_output_without_its_call(web: Http, strict: MockProvider) -> None:
    output = run(web, strict, GPT)[4]
    text = refusal(respond(web, GPT, [TASK, output]))
    assert text == f"No tool call found for function call output with call_id {output['call_id']}."
    assert respond(web, GPT, [output], previous_response_id="resp_mock1").status == 200


def test_gpt_refuses_changed_ciphertext(web: Http, strict: MockProvider) -> None:
    items = run(web, strict, GPT)
    other = run(web, strict, GPT)[1]["encrypted_content"]
    sealed = items[1]["encrypted_content"]
    for changed in (sealed[:-4] + "AAAA", "nothing", sealed[1:], other):
        reply = respond(web, GPT, [TASK, {**items[1], "encrypted_content": changed}, *items[2:]])
        assert refusal(reply).startswith(f"The encrypted content for item {items[1]['id']} could not be verified.")
        assert reply.json["error"]["code"] == "invalid_encrypted_content"


@pytest.mark.parametrize("model", [CODEX, GPT, SOL])
def test_message_without_phase_degrades_the_response(web: Http, strict: MockProvider, model: str) -> None:
    items = run(web, strict, model)
    final = respond(web, model, items).json["output"]
    assert (items[2]["phase"], final[-1]["phase"]) == ("commentary", "final_answer")
    assert list(strict.degraded) == []
    unphased = [TASK, items[1], {key: value for key, value in items[2].items() if key != "phase"}, *items[3:]]
    assert respond(web, model, unphased).status == 200
    assert list(strict.degraded) == ["input[2]: an assistant message without phase"]
    strict.reset()
    assert not strict.degraded


def test_earlier_models_have_no_phase(web: Http, strict: MockProvider) -> None:
    strict.strict = [replace(rules, phases=False) for rules in STRICT_MODELS]
    items = run(web, strict, GPT)
    assert "phase" not in items[2]
    assert respond(web, GPT, items).status == 200
    assert not strict.degraded


@pytest.mark.parametrize("stream", [False, True])
def test_a_compaction_is_one_item_that_comes_back_unchanged(web: Http, strict: MockProvider, stream: bool) -> None:
    items = run(web, strict, SOL)
    reply = respond(web, SOL, [*items, {"type": "compaction_trigger"}], stream=stream)
    [item] = reply.events[-1]["response"]["output"] if stream else reply.json["output"]
    assert item["type"] == "compaction"
    assert item["id"].startswith("cmp_")
    assert respond(web, SOL, [item, TASK]).status == 200
    for changed in ({**item, "encrypted_content": "AAAA"}, {**item, "id": "cmp_other"}):
        reply = respond(web, SOL, [changed, TASK])
        assert refusal(reply)
        assert reply.json["error"]["code"] == "invalid_encrypted_content"


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 1), ("top_p", 1), ("top_logprobs", 2), ("reasoning", {"effort": "none"})]
)
def test_sol_refuses_what_it_does_not_support(web: Http, field: str, value: object) -> None:
    reply = respond(web, SOL, [TASK], **{field: value})
    assert "is not supported with this model." in refusal(reply)
    assert reply.json["error"]["param"].startswith(field)
    assert respond(web, CODEX, [TASK], **{field: value}).status == 200


def test_sol_takes_another_effort_and_refuses_logprobs_of_a_chat(web: Http) -> None:
    assert respond(web, SOL, [TASK], reasoning={"effort": "low"}).status == 200
    assert "'logprobs'" in refusal(ask(web, SOL, [TASK], logprobs=True))


# --- the table ------------------------------------------------------------------------------------------------------


def test_patterns_are_lower_case_and_every_entry_can_match() -> None:
    patterns = [pattern for rules in STRICT_MODELS for pattern in rules.models]
    assert patterns == [pattern.lower() for pattern in patterns]
    assert len(patterns) == len(set(patterns))


def test_custom_rules(web: Http, strict: MockProvider) -> None:
    strict.strict = [StrictRules(models=("own-*",), refused_fields=("seed",))]
    assert "'seed'" in refusal(ask(web, "Own-Model", [TASK], seed=1))
    assert ask(web, "other", [TASK], seed=1).status == 200
