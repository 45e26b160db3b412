"""Refusals of an output limit as providers word them, each row with where the text was seen."""

from __future__ import annotations

import json

import pytest

from gateway.dialects.limit_error import NO_OUTPUT_RULE, LimitRefusal, OutputRule, limit_refusal
from tests.dialects.test_length_error import HOSTILE, OTHERS, REFUSALS
from tests.support.timing import in_time


def openai(message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def read(body: object, status: int = 400) -> LimitRefusal | None:
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return limit_refusal(status, data)


#: source, body, the limit that was sent, the limit to send next
# fmt: off
TOO_LARGE: list[tuple[str, object, int, int]] = [
    ("diffbot/code-gpt-docs#284, OpenAI and Azure", openai(
        "max_tokens is too large: 6000. This model supports at most 4096 completion tokens, whereas you provided 6000.",
        "max_tokens"), 6000, 4096),
    ("ServiceNow, OpenAI of today", openai(
        "Invalid 'max_tokens': integer above maximum value. Expected a value <= 16384, but got 64000 instead.",
        "max_tokens", "integer_above_max_value"), 64000, 16384),
    ("OpenAI, Responses", openai(
        "Invalid 'max_output_tokens': integer above maximum value. Expected a value <= 128000, but got 200000 instead.",
        "max_output_tokens"), 200000, 128000),
    ("algorithmicsuperintelligence/optillm#4, as an SDK prints it", openai(
        "litellm.BadRequestError: OpenAIException - Error code: 400 - {'error': {'message': 'max_tokens is too large: 8192. "
        "This model supports at most 4096 completion tokens, whereas you provided 8192.', 'type': 'invalid_request_error', "
        "'param': 'max_tokens', 'code': None}}"), 8192, 4096),
    ("AQBot-Desktop/AQBot#93, in param", {"error": {
        "message": "Param Incorrect", "type": "upstream_error", "code": "400",
        "param": "max_tokens is too large: 1048576. This model supports at most 131072 completion tokens, whereas you "
                 "provided 1048576."}}, 1048576, 131072),
    ("anthropics/claude-code#11302, Anthropic", {"type": "error", "error": {
        "type": "invalid_request_error",
        "message": "max_tokens: 21333 > 4096, which is the maximum allowed number of output tokens for "
                   "claude-3-opus-20240229"}}, 21333, 4096),
    ("nickscamara/open-deep-research#19, DeepSeek", openai(
        "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]"), 16384, 8192),
    ("dataelement/Clawith#571, DeepSeek", openai(
        "Invalid max_tokens value, the valid range of max_tokens is [1, 393216]"), 512000, 393216),
    ("open-webui/open-webui#10507, DashScope", {"error": {
        "code": "invalid_parameter_error", "param": None, "type": "invalid_request_error",
        "message": "<400> InternalError.Algo.InvalidParameter: Range of max_tokens should be [1, 8192]"}}, 16384, 8192),
    ("musistudio/claude-code-router#1327, DashScope's own format", {
        "code": "InvalidParameter", "request_id": "x",
        "message": "<400> InternalError.Algo.InvalidParameter: Range of max_tokens should be [1, 8192]"}, 32000, 8192),
    ("RooCodeInc/Roo-Code#5729, Groq", openai(
        "`max_tokens` must be less than or equal to `16384`, the maximum value for `max_tokens` is less than the "
        "`context_window` for this model", "max_tokens"), 32768, 16384),
    ("Alishahryar1/free-claude-code#955, Groq", openai(
        "max_completion_tokens must be less than or equal to 40960, the maximum value for max_completion_tokens is less "
        "than the context_window for this model", "max_completion_tokens"), 64000, 40960),
    ("skapadia3214/groq-moa#8, Groq", openai(
        "max_tokens for `llama-3.1-8b-instant` must be less than or equal to 8000"), 16384, 8000),
    ("yiliqi78/TOKENICODE#3, Volcengine", {"error": {
        "code": "InvalidParameter", "param": "max_tokens", "type": "BadRequest",
        "message": "The parameter max_tokens specified in the request is not valid: integer above maximum value, expected a "
                   "value <= 32768, but got 64000 instead. Request id: 0217724325966514087c9e55f8b322b8"}}, 64000, 32768),
    ("Gitlawb/openclaude#331, Volcengine", {"error": {
        "code": "InvalidParameter", "param": "max_completion_tokens", "type": "BadRequest",
        "message": "The parameter `max_completion_tokens` specified in the request are not valid: integer above maximum "
                   "value, expected a value <= 12288, but got 32000 instead. Request id: 0217752964393142fa5"}},
     32000, 12288),
    ("docs.cohere.com, errors", {
        "message": "too many tokens: max tokens must be less than or equal to 4096, the maximum output for this model - "
                   "received 8192."}, 8192, 4096),
    ("charmbracelet/crush#946, Bedrock", {
        "message": "The maximum tokens you requested exceeds the model limit of 32768"}, 64000, 32768),
    ("vercel/ai#2772, Bedrock Converse", {
        "message": "ValidationException: The maximum tokens you requested exceeds the model limit of 4096. Try again with a "
                   "maximum tokens value that is lower than 4096."}, 7168, 4096),
    ("Bedrock, Llama", {
        "message": "Malformed input request: #/max_gen_len: 4096 is not less or equal to 2048, please reformat your input "
                   "and try again."}, 4096, 2048),
    ("BerriAI/litellm#10548, Vertex AI", {"error": {
        "code": 400, "status": "INVALID_ARGUMENT",
        "message": "Unable to submit request because it has a maxOutputTokens value of 65536 but the supported range is "
                   "from 1 (inclusive) to 65536 (exclusive). Update the value and try again."}}, 65536, 65535),
    ("stackblitz-labs/bolt.diy#955, Vertex AI", [{"error": {
        "code": 400, "status": "INVALID_ARGUMENT",
        "message": "Unable to submit request because it has a maxOutputTokens value of 655360 but the supported range is "
                   "from 1 (inclusive) to 8193 (exclusive). Update the value and try again."}}], 655360, 8192),
    ("neavo/KeywordGacha#111", {
        "code": 400, "reason": "INVALID_REQUEST_BODY", "metadata": {},
        "message": "max_tokens (current value: 4096) must be between 0 and 4000 "}, 4096, 4000),
    ("huggingface/transformers#28523, TGI", {
        "error": "Input validation error: `max_new_tokens` must be <= 192. Given: 200", "error_type": "validation"},
     200, 192),
    ("nextlevelbuilder/goclaw#660, Fireworks", openai(
        "Requests with max_tokens > 4096 must have stream=true", "max_tokens"), 8192, 4096),
    ("an OpenAI-compatible gateway", openai(
        "max_tokens (384000) exceeds model's maximum output tokens (65536)"), 384000, 65536),
    ("a server's cap", openai("max_tokens must be less than or equal to the server cap of 2048"), 4096, 2048),
    ("Zhipu", {"error": {"code": "1210", "message": "max_tokens \u53c2\u6570\u975e\u6cd5\uff0c\u53d6\u503c\u8303\u56f4[1, 4095]"}}, 8192, 4095),
    ("a validation in other words", openai("The max_output_tokens cannot be greater than 8,192."), 16384, 8192),
    ("strictly less", openai("max_tokens must be less than 8193"), 16384, 8192),
    ("OpenRouter, another's body", {"error": {
        "message": "Provider returned error", "code": 400, "metadata": {
            "raw": json.dumps(openai("max_tokens must be at most 8192 (got 16384)")), "provider_name": "X"}}}, 16384, 8192),
]

#: source, status, body, the field to use
NOT_TAKEN: list[tuple[str, int, object, str]] = [
    ("koosoli/ESPHomeDesigner#379, OpenAI", 400, openai(
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_tokens", "unsupported_parameter"), "max_completion_tokens"),
    ("caozhiyuan/copilot-api#164, Copilot", 400, {"error": {
        "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
                   "instead.", "code": "invalid_request_body"}}, "max_completion_tokens"),
    ("musistudio/claude-code-router#644, new-api", 400, openai(
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead. "
        "(request id: 20250820035846772079436Ae6eQwSP)", "max_tokens"), "max_completion_tokens"),
    ("BerriAI/litellm#8855, Azure before 2024-09", 400, openai(
        "Unrecognized request argument supplied: max_completion_tokens"), "max_tokens"),
    ("a parameter that is unknown", 400, openai("Unknown parameter: 'max_completion_tokens'."), "max_tokens"),
    ("editor-code-assistant/eca#231, Mistral", 422, {
        "object": "error", "type": "invalid_request_error", "param": None, "code": None,
        "message": {"detail": [{"type": "extra_forbidden", "loc": ["body", "max_completion_tokens"],
                                "msg": "Extra inputs are not permitted", "input": 32000}]}}, "max_tokens"),
    ("pydantic/pydantic-ai#6593, Mistral at Azure", 422, {"detail": [
        {"type": "extra_forbidden", "loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted",
         "input": 256}]}, "max_tokens"),
    ("max_tokens is deprecated", 400, openai(
        "max_tokens is deprecated in favor of max_completion_tokens"), "max_completion_tokens"),
]

OTHER: list[tuple[str, int, object]] = [
    ("OpenAI, Responses: too small", 400, openai(
        "Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16, but got 8 instead.",
        "max_output_tokens", "integer_below_min_value")),
    ("Alishahryar1/free-claude-code#1650, NIM: too small", 400, openai(
        "max_tokens must be at least 1, got -736. (parameter=max_tokens, value=-736)", "max_tokens")),
    ("Anthropic, thinking", 400, openai("`max_tokens` must be greater than `thinking.budget_tokens`.")),
    ("Codex has no output limit", 400, {"detail": "Unsupported parameter: max_output_tokens"}),
    ("a user's words in quotes", 400, openai("Invalid value: 'max_tokens must be less than or equal to 8'.")),
    ("a user's words in double quotes", 400, openai('Invalid value: "max_tokens is too large: 9, at most 8".')),
    ("a user's words after others", 400, openai("Unknown role in message: max_tokens must be at most 8")),
    ("a user's words as a model", 404, openai("The model `max_tokens must be at most 8` does not exist")),
    ("a user's words, of another parameter", 400, openai("max_tokens must be at most 8", "messages[0].content")),
    ("a field that a user sent", 422, {"detail": [
        {"type": "missing", "loc": ["body", "model"], "input": {"detail": "extra_forbidden max_tokens"}}]}),
    ("deeper in the request", 422, {"detail": [
        {"type": "extra_forbidden", "loc": ["body", "tools", 0, "max_tokens"], "msg": "Extra inputs are not permitted"}]}),
    ("no number", 400, openai("max_tokens is too large")),
    ("a rate", 429, openai("max_tokens must be at most 8")),
    ("an answer", 200, openai("max_tokens must be at most 8")),
]
# fmt: on


@pytest.mark.parametrize(("source", "body", "sent", "most"), TOO_LARGE, ids=[row[0] for row in TOO_LARGE])
def test_the_largest_output_limit_is_read_from_a_refusal(source: str, body: object, sent: int, most: int) -> None:
    result = read(body)
    assert result is not None
    assert (result.largest_below(sent), result.field_to_use) == (most, "")


@pytest.mark.parametrize(("source", "status", "body", "field"), NOT_TAKEN, ids=[row[0] for row in NOT_TAKEN])
def test_accepted_field_name_is_read_from_a_refusal(source: str, status: int, body: object, field: str) -> None:
    result = read(body, status)
    assert result is not None
    assert (result.field_to_use, result.numbers) == (field, ())


@pytest.mark.parametrize(("source", "status", "body"), OTHER, ids=[row[0] for row in OTHER])
def test_refusal_for_another_reason_does_not_change_the_output_limit(source: str, status: int, body: object) -> None:
    assert read(body, status) is None


@pytest.mark.parametrize(("source", "status", "body"), [row[:3] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_length_error_is_not_an_output_limit_error(source: str, status: int, body: object) -> None:
    assert read(body, status) is None


def test_number_not_below_the_sent_limit_is_not_a_limit() -> None:
    assert LimitRefusal((8192, 4096)).largest_below(4096) is None
    assert LimitRefusal((1, 0)).largest_below(5) is None


def test_rule_changes_the_field_once_and_the_number_downwards() -> None:
    named = NO_OUTPUT_RULE.after(LimitRefusal(field_to_use="max_tokens"), 900)
    assert named == OutputRule("max_tokens", None)
    assert named.after(LimitRefusal(field_to_use="max_completion_tokens"), 900) is None
    lower = named.after(LimitRefusal((1, 800)), 900)
    assert lower == OutputRule("max_tokens", 800)
    assert lower.after(LimitRefusal((1, 800)), 800) == OutputRule("max_tokens", 750)
    assert lower.after(LimitRefusal((1, 900)), 800) is None
    assert NO_OUTPUT_RULE.after(LimitRefusal((1, 900)), 900) is None


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_no_body_raises_or_takes_long(body: bytes) -> None:
    with in_time():
        for _ in range(50):
            limit_refusal(400, body)


def test_other_refusals_are_not_output_limit_errors() -> None:
    for source, status, body in OTHERS:
        result = read(body, status)
        assert result is None or "max" in json.dumps(body if not isinstance(body, bytes) else ""), source
