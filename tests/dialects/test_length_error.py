"""Refusals for length as providers word them, each row with where the text was seen; numbers and names are theirs.

Sources are issues of public repositories (`owner/name#number`) or files of theirs that hold the text. Where one quotes
only the sentence, the body around it is the provider's usual one.
"""

from __future__ import annotations

import json
import random
from typing import Final

import pytest

from gateway.dialects.length_error import LengthError, length_error
from tests.support.timing import in_time


def openai(
    message: str, code: str | int | None = None, kind: str | None = "invalid_request_error"
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic(message: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}, "request_id": "req_1"}


def server(message: str) -> dict[str, object]:
    """Return a response as vLLM and SGLang send it."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def read(body: object, status: int = 400) -> LengthError | None:
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return length_error(status, data)


#: limit, requested tokens, output tokens, and whether the limit is of the input alone
Numbers = tuple[int | None, int | None, int | None] | tuple[int, int | None, int | None, bool]
OF_INPUT: Final = True
# fmt: off
REFUSALS: list[tuple[str, int, object, Numbers]] = [
    # --- OpenAI and Azure
    ("dimagi/open-chat-studio#463", 400, openai(
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 8202 tokens. "
        "Please reduce the length of the messages.", "context_length_exceeded"), (8192, 8202, None)),
    ("brianpetro/obsidian-smart-connections#867, LangChain notebooks", 400, openai(
        "This model's maximum context length is 16385 tokens. However, your messages resulted in 29429 tokens (28993 in "
        "the messages, 436 in the functions). Please reduce the length of the messages or functions.",
        "context_length_exceeded"), (16385, 29429, None)),
    ("ChatGPTNextWeb/NextChat#3195", 400, openai(
        "This model's maximum context length is 8192 tokens. However, you requested 8256 tokens (64 in the messages, "
        "8192 in the completion). Please reduce the length of the messages or completion.",
        "context_length_exceeded"), (8192, 64, 8192)),
    ("the same with functions", 400, openai(
        "This model's maximum context length is 4097 tokens. However, you requested 5360 tokens (1000 in the messages, "
        "360 in the functions, and 4000 in the completion). Please reduce the length of the messages, functions, or "
        "completion.", "context_length_exceeded"), (4097, 1360, 4000)),
    ("spring-boot-user-beans#136, completions", 400, openai(
        "This model's maximum context length is 4097 tokens, however you requested 4130 tokens (130 in your prompt; "
        "4000 for the completion). Please reduce your prompt; or completion length."), (4097, 130, 4000)),
    ("lm-sys/RouteLLM#34, embeddings", 400, openai(
        "This model's maximum context length is 8192 tokens, however you requested 8977 tokens (8977 in your prompt; "
        "0 for the completion). Please reduce your prompt; or completion length."), (8192, 8977, 0)),
    ("cline/cline#5474", 400, openai(
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 289650 tokens. Please "
        "reduce the length of the messages.", "context_length_exceeded"), (272000, 289650, None, OF_INPUT)),
    ("BerriAI/litellm#18927", 400, openai("Input tokens exceed the configured limit of 272000 tokens."),
     (272000, None, None, OF_INPUT)),
    ("VectorlyApp/bluebox#66, responses", 400, openai(
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
        "context_length_exceeded"), (None, None, None)),
    ("Niek/chatgpt-web#525", 400, openai(
        "This model's maximum context length has been exceeded. Please reduce the length of the messages."),
     (None, None, None)),
    ("a code that is known with words that are not", 400, openai("Zu lang.", "context_length_exceeded"),
     (None, None, None)),
    ("elastic/kibana, convert_upstream_error.test.ts: a round apostrophe", 400, openai(
        "This model\N{RIGHT SINGLE QUOTATION MARK}s maximum context length is 131072 tokens. However, you requested "
        "671051 tokens (670951 in the messages, 100 in the completion)."), (131072, 670951, 100)),
    # --- Anthropic, there and at Vertex
    ("anthropics/claude-code#12186", 400, anthropic("prompt is too long: 208310 tokens > 200000 maximum"),
     (200000, 208310, None)),
    ("anthropics/claude-code#228", 400, anthropic(
        "input length and `max_tokens` exceed context limit: 184915 + 20000 > 204648, decrease input length or "
        "`max_tokens` and try again"), (204648, 184915, 20000)),
    ("stackblitz/bolt.new#7414", 400, anthropic(
        "input length and max_tokens exceed context limit: 90402 + 116650 > 204648, decrease input length or "
        "max_tokens and try again"), (204648, 90402, 116650)),
    ("anthropics/claude-code#2569, through a proxy", 413, openai(json.dumps(anthropic("Prompt is too long")), "413"),
     (None, None, None)),
    # --- Google
    ("google-gemini/gemini-cli#4692", 400, [{"error": {
        "code": 400, "status": "INVALID_ARGUMENT",
        "message": "The input token count (2845475) exceeds the maximum number of tokens allowed (1048576)."}}],
     (1048576, 2845475, None, OF_INPUT)),
    ("BerriAI/litellm#18282", 400, {"error": {
        "code": 400, "status": "INVALID_ARGUMENT",
        "message": "The input token count exceeds the maximum number of tokens allowed (1048576)."}},
     (1048576, None, None, OF_INPUT)),
    ("google-gemini/gemini-cli#4231, an error in a message", 400, {"error": {
        "message": '{\n  "error": {\n    "code": 400,\n    "message": "The input token count (3475108) exceeds the maximum '
                   'number of tokens allowed (1048576).",\n    "status": "INVALID_ARGUMENT"\n  }\n}\n',
        "code": 400, "status": "Bad Request"}}, (1048576, 3475108, None, OF_INPUT)),
    ("google-gemini/gemini-cli#19727, Vertex AI", 400, {"error": {
        "code": 400, "status": "INVALID_ARGUMENT",
        "message": "Unable to submit request because the input token count is 1251952 but model only supports up to "
                   "1048576. Reduce the input token count and try again."}}, (1048576, 1251952, None, OF_INPUT)),
    # --- Bedrock
    ("aws-samples/bedrock-chat#95", 400, {"message": "Input is too long for requested model."}, (None, None, None)),
    ("aws-samples/bedrock-chat#95, streamed", 400, {
        "message": "An error occurred (validationException) when calling the InvokeModelWithResponseStream operation: "
                   "Input is too long for requested model."}, (None, None, None)),
    ("continuedev/continue#6005", 400, {
        "message": "The model returned the following errors: Input is too long for requested model."},
     (None, None, None)),
    ("pkdone/paul-genai-test-tools-ts, bedrock manifest", 400, {
        "message": "400 Bad Request: Too many input tokens. Max input tokens: 8192, request input token count: 9279 "},
     (8192, 9279, None)),
    ("the same", 400, {
        "message": "ValidationException: This model's maximum context length is 8192 tokens. Please reduce the length "
                   "of the prompt"}, (8192, None, None)),
    ("vals-ai/model-library, Amazon Nova", 400, {
        "message": "The model returned the following errors: Input Tokens Exceeded: Number of input tokens exceeds "
                   "maximum length. Please update the input to try again."}, (None, None, None)),
    # --- OpenRouter
    ("OpenHands/OpenHands#9937", 400, {"error": {
        "message": "This endpoint's maximum context length is 131072 tokens. However, you requested about 138956 tokens "
                   "(7884 of text input, 131072 in the output). Please reduce the length of either one, or use the "
                   '"middle-out" transform to compress your prompt automatically.',
        "code": 400, "metadata": {"provider_name": None}}}, (131072, 7884, 131072)),
    ("earendil-works/pi#6378", 400, {"error": {
        "message": "This endpoint's maximum context length is 262000 tokens. However, you requested about 263390 tokens "
                   "(658 of text input, 732 of tool input, 262000 in the output). Please reduce the length of either "
                   "one, or use the context-compression plugin to compress your prompt automatically.",
        "code": 400, "metadata": {"provider_name": None}}}, (262000, 1390, 262000)),
    ("pydantic/pydantic-ai: a total that is not split", 400, {"error": {
        "code": 400,
        "message": "This endpoint's maximum context length is 128000 tokens. However, you requested about 150008 tokens. "
                   "Please reduce the length of either one."}}, (128000, None, None)),
    ("cline/cline#13194, another's body", 400, {"error": {
        "message": "Provider returned error", "code": 400, "metadata": {
            "raw": json.dumps({"error": {
                "message": "This model's maximum context length is 262144 tokens. However, your messages resulted in "
                           "262897 tokens. Please reduce the length of the messages.",
                "type": "Bad Request", "code": 400}}),
            "provider_name": "Nvidia", "is_byok": False}}}, (262144, 262897, None)),
    ("ai-christianson/RA.Aid#41, DeepInfra behind it", 400, {"error": {
        "message": "ConnectionError: " + json.dumps(server(
            "This model's maximum context length is 16000 tokens. However, you requested 17165 tokens (13069 in the "
            "messages, 4096 in the completion). Please reduce the length of the messages or completion.")),
        "code": 502}}, (16000, 13069, 4096)),
    # --- hosts
    ("letta-ai/letta#1963, Groq", 400, {"error": {
        "message": "Please reduce the length of the messages or completion.", "type": "invalid_request_error",
        "param": "messages", "code": "context_length_exceeded"}}, (None, None, None)),
    ("cline/cline#5140, Cerebras", 400, {
        "message": "Please reduce the length of the messages or completion. Current length is 42328 while limit is "
                   "40000", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"},
     (40000, None, None)),
    ("pydantic/pydantic-ai, Mistral", 400, {
        "object": "error", "type": "invalid_request_invalid_args", "param": None, "code": "3051",
        "message": "Prompt contains 150004 tokens and 0 draft tokens, too large for model with 131072 maximum context "
                   "length"}, (131072, 150004, None)),
    ("vals-ai/model-library, Mistral", 400, {"object": "error", "message": "Prompt 262280 > 262144 maximum context length"},
     (262144, 262280, None)),
    ("evalstate/fast-agent#621, DeepSeek", 400, openai(
        "This model's maximum context length is 131072 tokens. However, you requested 131134 tokens (122942 in the "
        "messages, 8192 in the completion). Please reduce the length of the messages or completion.",
        "invalid_request_error"), (131072, 122942, 8192)),
    ("cline/cline#3120, xAI", 400, {
        "code": "Client specified an invalid argument",
        "error": "This model's maximum prompt length is 131072 but the request contains 136973 tokens."},
     (131072, 136973, None)),
    ("pydantic/pydantic-ai, Cohere", 400, {
        "id": "bda42bf8-db3f-4c32-bb2c-f76466e42a1e",
        "message": "too many tokens: size limit exceeded by 19296 tokens. Try using shorter or fewer inputs. The limit "
                   "for this model is 132000 tokens."}, (132000, 151296, None)),
    ("docs.cohere.com, errors", 400, {
        "message": "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 4292. Try using "
                   "a shorter prompt, or enabling prompt truncating."}, (4081, 4292, None)),
    ("docs.cohere.com, errors", 400, {
        "message": "too many tokens: size limit exceeded by 11326 tokens. Try using shorter or fewer inputs, or setting "
                   "prompt_truncation='AUTO'."}, (None, None, None)),
    ("earendil-works/pi, overflow.ts: Together", 400, openai(
        "The input (516368 tokens) is longer than the model's context length (262144 tokens)."), (262144, 516368, None)),
    ("elastic/kibana, convert_upstream_error.test.ts: Together", 422, openai(
        "Input token count + max_tokens parameter must be less than the context length of the model being queried. Set "
        "max_tokens to a lower number."), (None, None, None)),
    ("vals-ai/model-library, Fireworks", 400, openai(
        "The prompt is too long: 1000008, model maximum context length: 131071"), (131071, 1000008, None)),
    ("microsoft/vscode#289219, GitHub Copilot", 400, {"error": {
        "message": "prompt token count of 1236658 exceeds the limit of 128000",
        "code": "model_max_prompt_tokens_exceeded"}}, (128000, 1236658, None, OF_INPUT)),
    ("MoonshotAI/kimi-cli#2011", 400, {"error": {
        "message": "Invalid request: Your request exceeded model token limit: 262144 (requested: 269030)",
        "type": "invalid_request_error"}}, (262144, None, None)),
    ("QwenLM/qwen-code#98, DashScope", 400, {
        "error": {"code": "invalid_parameter_error", "param": None, "type": "invalid_request_error",
                  "message": "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 204800]"},
        "request_id": "81a373d6"}, (204800, None, None, OF_INPUT)),
    ("LLM-Red-Team/qwen-free-api#23, DashScope's own API", 400, {
        "code": "InvalidParameter", "message": "Range of input length should be [1, 6000]", "request_id": "x"},
     (6000, None, None, OF_INPUT)),
    ("NousResearch/hermes-agent#14743, MiniMax: the number is a code", 400, {
        "type": "error", "error": {"type": "bad_request_error", "http_code": "400",
                                   "message": "invalid params, context window exceeds limit (2013)"}},
     (None, None, None)),
    ("zeroclaw-labs/zeroclaw#4124, Z.ai", 400, {"error": {"code": "1261", "message": "Prompt exceeds max length"}},
     (None, None, None)),
    ("langgenius/dify#32221, Volcengine", 400, {"error": {
        "code": "InvalidParameter", "message": "Input length 203743 exceeds the maximum length 202752. Request id: 02"}},
     (202752, 203743, None)),
    ("sipeed/picoclaw, Volcengine", 400, {"error": {
        "code": "InvalidParameter", "message": "Total tokens of image and text exceed max message tokens. Request id: 0"}},
     (None, None, None)),
    ("vals-ai/model-library, Poolside", 400, {"error": {
        "code": 400, "type": "Bad Request",
        "message": "Input length 264373 exceeds the maximum allowed input length of 262112 tokens."}},
     (262112, 264373, None)),
    # --- vLLM
    ("vllm-project/vllm#20409", 400, server(
        "This model's maximum context length is 16384 tokens. However, you requested 122946 tokens (112946 in the "
        "messages, 10000 in the completion). Please reduce the length of the messages or completion. None"),
     (16384, 112946, 10000)),
    ("THUDM/LongBench#104: a total that is not split", 400, server(
        "This model's maximum context length is 131072 tokens. However, you requested 351430 tokens. Please reduce the "
        "length of the messages or completion."), (131072, None, None)),
    ("vllm-project/vllm, serving_engine.py until 2025", 400, server(
        "This model's maximum context length is 4096 tokens. However, you requested 5036 tokens in the messages, Please "
        "reduce the length of the messages."), (4096, 5036, None)),
    ("vals-ai/model-library", 400, openai(
        "This model's maximum context length is 262144 tokens. However, your request has 1000010 input tokens. Please "
        "reduce the length of the input messages. None", 400, "BadRequestError"), (262144, 1000010, None)),
    ("claude-code-best/claude-code#272", 400, server(
        "'max_tokens' or 'max_completion_tokens' is too large: 64000. This model's maximum context length is 64001 "
        "tokens and your request has 24235 input tokens (64000 > 64001 - 24235). None"), (64001, 24235, 64000)),
    ("AIDotNet/OpenCowork#82: at least is no count", 400, openai(
        "This model's maximum context length is 262144 tokens. However, you requested 128000 output tokens and your "
        "prompt contains at least 134145 input tokens, for a total of at least 262145 tokens. Please reduce the length "
        "of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=134145)",
        400, "BadRequestError"), (262144, None, 128000)),
    ("vLLM: characters are no tokens", 400, openai(
        "This model's maximum context length is 4096 tokens. However, you requested 4096 output tokens and your prompt "
        "contains 581 characters (more than 0 characters, which is the upper bound for 0 input tokens).", 400),
     (4096, None, 4096)),
    ("vllm-project/vllm, vllm/renderers/params.py: one more than fits, as far as it counts", 400, server(
        "You passed 3585 input tokens and requested 512 output tokens. However, the model's context length is only 4096 "
        "tokens, resulting in a maximum input length of 3584 tokens. Please reduce the length of the input prompt."),
     (4096, None, 512)),
    ("the same", 400, server(
        "You passed 600000 input characters and requested 0 output tokens. However, the model's context length is only "
        "4096 tokens, resulting in a maximum input length of 4096 tokens (at most 524288 characters). Please reduce the "
        "length of the input prompt."), (4096, None, 0)),
    ("vllm-project/vllm, Rust front end", 400, openai(
        "this model's maximum context length is 32768 tokens, but the prompt contains 40000 input tokens"),
     (32768, 40000, None)),
    ("xorbitsai/inference#3785", 400, {
        "detail": "[address=0.0.0.0:37591, pid=324770] The decoder prompt (length 17772) is longer than the maximum "
                  "model length of 16384. Make sure that `max_model_len` is no smaller than the number of text tokens."},
     (16384, 17772, None)),
    ("EleutherAI/lm-evaluation-harness#2880", 400, server(
        "ValueError: Prompt length of 5016 is longer than the maximum model length of 4096."), (4096, 5016, None)),
    # --- SGLang
    ("QwenLM/Qwen3#1321", 400, server(
        "The input (61709 tokens) is longer than the model's context length (40960 tokens)."), (40960, 61709, None)),
    ("RooCodeInc/Roo-Code#6806", 400, server(
        "Requested token count exceeds the model's maximum context length of 98304 tokens. You requested a total of "
        "115623 tokens: 10527 tokens from the input messages and 105096 tokens for the completion. Please reduce the "
        "number of tokens in the input messages or the completion to fit within the limit."), (98304, 10527, 105096)),
    ("sgl-project/sglang#4048", 400, server(
        "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens). Use a shorter input or enable "
        "--allow-auto-truncate."), (59862, 160062, None)),
    ("earendil-works/pi, overflow.ts", 400, server(
        "Input length (265330) exceeds model's maximum context length (262144)."), (262144, 265330, None)),
    # --- llama.cpp and what is built on it
    ("ggml-org/llama.cpp#19774", 400, {"error": {
        "code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 4390, "n_ctx": 4096,
        "message": "request (4390 tokens) exceeds the available context size (4096 tokens), try increasing it"}},
     (4096, 4390, None)),
    ("ggml-org/llama.cpp#15780, as it was first", 500, {"error": {
        "code": 500, "type": "exceed_context_size_error", "n_prompt_tokens": 1407, "n_ctx": 256,
        "message": "the request exceeds the available context size. try increasing the context size or enable context "
                   "shift"}}, (256, 1407, None)),
    ("continuedev/continue#9797, before that", 400, {"error": {
        "code": 400, "type": "invalid_request_error",
        "message": "the request exceeds the available context size, try increasing it"}}, (None, None, None)),
    ("ggml-org/llama.cpp#19774", 500, {"error": {
        "code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}, (None, None, None)),
    ("fedora-copr/logdetective-website#193, llama-cpp-python", 500, {"error": {
        "message": "Requested tokens (2285) exceed context window of 2048", "type": "internal_server_error",
        "param": None, "code": None}}, (2048, 2285, None)),
    ("nano-step/nano-brain#208, Ollama", 400, {"error": "the input length exceeds the context length"},
     (None, None, None)),
    ("Ollama 0.40: llama.cpp's answer as text", 400, {"error": json.dumps({"error": {
        "code": 400, "message": "request (2622 tokens) exceeds the available context size (512 tokens), try increasing it",
        "type": "exceed_context_size_error", "n_prompt_tokens": 2622, "n_ctx": 512}})}, (512, 2622, None)),
    ("dyad-sh/dyad#3498, Ollama's cloud", 400, {
        "error": "prompt too long; exceeded max context length by 540451 tokens (ref: 00ad71bb)"}, (None, None, None)),
    ("lmstudio-ai/lmstudio-bug-tracker#546", 400, {
        "error": "Trying to keep the first 111490 tokens when context the overflows. However, the model is loaded with "
                 "context length of only 32768 tokens, which is not enough. Try to load the model with a larger context "
                 "length, or provide a shorter input. Error Data: n/a, Additional Data: n/a"}, (32768, None, None)),
    ("lmstudio-ai/lmstudio-bug-tracker#2256", 400, {"error": {
        "message": "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: "
                   "23678>= n_ctx: 9472). Try to load the model with a larger context length, or provide a shorter "
                   "input."}}, (9472, None, None)),
    ("lmstudio-ai/examples#29", 400, {"error": "Error: Input length 6491 exceeds context length 1500"},
     (1500, 6491, None)),
    ("ValueCell-ai/ClawX#658, oMLX", 400, openai(
        "Prompt too long: 41911 tokens exceeds max context window of 32768 tokens"), (32768, 41911, None)),
    ("ddalcu/mlx-serve#66", 400, anthropic("Prompt exceeds maximum context length"), (None, None, None)),
    ("earendil-works/pi#6262, DS4: numbers with commas", 400, openai(
        "Prompt has 5,958,968 tokens, but the configured context size is 256,000 tokens"), (256000, 5958968, None)),
    # --- TGI
    ("bytedance/UI-TARS-desktop#626", 422, {
        "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 65537. Given: 79993 `inputs` "
                 "tokens and 1024 `max_new_tokens`", "error_type": "validation"}, (65537, 79993, 1024)),
    ("huggingface/text-generation-inference#937", 422, {
        "error": "Input validation error: `inputs` must have less than 1024 tokens. Given: 1872",
        "error_type": "validation"}, (1024, 1872, None, OF_INPUT)),
    # --- LiteLLM's proxy
    ("BrokkAi/brokk-app#540: bytes as Python prints them", 400, openai(
        'litellm.BadRequestError: AnthropicException - b\'{"type":"error","error":{"type":"invalid_request_error",'
        '"message":"input length and `max_tokens` exceed context limit: 179413 + 32768 > 200000, decrease input length '
        "or `max_tokens` and try again\"}}'. Received Model Group=anthropic/claude-sonnet-4\nAvailable Model Group "
        "Fallbacks=None", "400", None), (200000, 179413, 32768)),
    ("OpenHands/OpenHands#4894", 400, openai(
        'litellm.BadRequestError: litellm.ContextWindowExceededError: AnthropicError - {"type":"error","error":{"type":'
        '"invalid_request_error","message":"prompt is too long: 210543 tokens > 200000 maximum"}}\nReceived Model Group=x',
        "400", None), (200000, 210543, None)),
    ("BerriAI/litellm, exception_mapping_utils.py", 400, openai(
        "litellm.ContextWindowExceededError: litellm.BadRequestError: ContextWindowExceededError: OpenAIException - This "
        "model's maximum context length is 128000 tokens. However, your messages resulted in 150008 tokens. Please "
        "reduce the length of the messages. Received Model Group=gpt-4o", "400", None), (128000, 150008, None)),
    ("the same with what an SDK prints", 400, openai(
        "litellm.ContextWindowExceededError: OpenAIException - Error code: 400 - {'error': {'message': \"This model's "
        "maximum context length is 16385 tokens. However, your messages resulted in 29429 tokens\", 'type': "
        "'invalid_request_error', 'param': 'messages', 'code': 'context_length_exceeded'}}", "400", None),
     (16385, 29429, None)),
    ("a kind of error that says it, with words that are not known", 400, openai(
        "litellm.ContextWindowExceededError: SomeException - zu lang", "400", None), (None, None, None)),
    # --- in unknown wording
    ("langgenius/dify#19394, SiliconFlow", 400, {
        "code": 20015, "message": "length of prompt_tokens (12000) must be less than max_seq_len (6000).", "data": None},
     (6000, 12000, None)),
    ("MoonshotAI/MoonshotAI-Cookbook#18", 400, openai("model max length exceeded, max length:8192"), (8192, None, None)),
    ("daisuke-awaji/moca#254", 400, {"message": "Prompt exceeds 200,000 token limit (200,049 tokens)"},
     (200000, 200049, None)),
    ("NVIDIA/TensorRT-LLM", 400, openai(
        "The sum of prompt length (4000) and query length (0) should not exceed max_num_tokens (2048)"), (2048, 4000, None)),
    ("a prompt and an output", 500, {"error": "Prompt length (9000) exceeds maximum sequence length (8192)"},
     (8192, 9000, None)),
    ("a model's name with digits", 400, openai("The context length of model qwen3-32b is 40960 tokens, but the request has "
        "50000 tokens"), (40960, 50000, None)),
    ("no number", 400, openai("The request exceeds the context window of the model."), (None, None, None)),
    ("a limit alone", 400, openai("The number of input tokens must not be greater than 32768"), (32768, None, None)),
    ("a comparison", 400, openai("prompt tokens (9000) > n_ctx (8192)"), (8192, 9000, None)),
    # --- no JSON
    ("words alone", 400, "Input is too long for requested model.", (None, None, None)),
]
# fmt: on


@pytest.mark.parametrize(("source", "status", "body", "numbers"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_length_error_is_read(source: str, status: int, body: object, numbers: Numbers) -> None:
    assert read(body, status) == LengthError(*numbers)


WINDOW = "This model's maximum context length is 8 tokens. However, your messages resulted in 9 tokens."
LONG = "prompt is too long: 9 tokens > 8 maximum"

# fmt: off
OTHERS: list[tuple[str, int, object]] = [
    # --- rates, quotas, tariffs
    ("DrShushen/climb#13", 429, {"error": {
        "message": "Request too large for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Requested "
                   "30601. The input or output tokens must be reduced in order to run successfully.", "type": "tokens",
        "param": None, "code": "rate_limit_exceeded"}}),
    ("continuedev/continue#10218, Groq", 413, {"error": {
        "message": "Request too large for model `llama-3.3-70b-versatile` in organization `org_x` service tier "
                   "`on_demand` on tokens per minute (TPM): Limit 12000, Requested 14137, please reduce your message size "
                   "and try again.", "type": "tokens", "code": "rate_limit_exceeded"}}),
    ("anthropics/claude-code#42616", 429, {"type": "error", "error": {
        "type": "rate_limit_error", "message": "Extra usage is required for long context requests."}}),
    ("anthropics/claude-code#27944", 400, anthropic("The long context beta is not yet available for this subscription.")),
    ("Bedrock", 429, {"message": "Too many tokens, please wait before trying again."}),
    ("Bedrock, should it answer 400", 400, {"message": "Too many tokens, please wait before trying again."}),
    ("OpenAI", 429, openai("You exceeded your current quota, please check your plan and billing details.",
                           "insufficient_quota", "insufficient_quota")),
    ("Anthropic", 400, anthropic("Your credit balance is too low to access the Anthropic API.")),
    ("MoonshotAI/Kimi-K2#5", 403, openai("Your account is not active, organization exceeded current quota")),
    # --- output that may not be as long
    ("ChatGPTNextWeb/NextChat#3195", 400, openai(
        "max_tokens is too large: 8192. This model supports at most 4096 completion tokens, whereas you provided 8192.")),
    ("anthropics/claude-code#11302", 400, anthropic(
        "max_tokens: 21333 > 4096, which is the maximum allowed number of output tokens for claude-3-opus-20240229")),
    ("RooCodeInc/Roo-Code#5729", 400, openai(
        "max_tokens must be less than or equal to 16384, the maximum value for max_tokens is less than the context_window "
        "for this model")),
    ("docs.cohere.com, errors", 400, {
        "message": "too many tokens: max tokens must be less than or equal to 4096, the maximum output for this model - "
                   "received 8192."}),
    ("charmbracelet/crush#946, Bedrock", 400, {
        "message": "The maximum tokens you requested exceeds the model limit of 32768"}),
    ("nickscamara/open-deep-research#19", 400, openai(
        "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]")),
    ("huggingface/transformers#28523, TGI", 422, {
        "error": "Input validation error: `max_new_tokens` must be <= 192. Given: 200", "error_type": "validation"}),
    # --- sentences that are similar to a length error
    ("SiliconFlow, of an output", 400, {
        "code": 20015, "message": "max_tokens (16384) must be less than max_seq_len (8192).", "data": None}),
    ("quoted", 400, openai("'the prompt is longer than 8 tokens' exceeds the maximum of tokens")),
    ("another word", 400, openai("The tool prompt exceeds the maximum of 8 tokens")),
    ("a rate", 400, openai("The number of tokens exceeds the maximum of 8 tokens per request")),
    # --- bytes, characters, images
    ("anthropics/claude-code#10314", 413, {"error": {
        "type": "request_too_large", "message": "Request exceeds the maximum size"}}),
    ("nginx", 413, b"<html>\r\n<head><title>413 Request Entity Too Large</title></head>\r\n<body>prompt is too long</body>"),
    ("Anthropic", 400, anthropic(
        "messages.0.content.1.image.source.base64: image exceeds 5 MB maximum: 6291456 bytes > 5242880 bytes")),
    ("OpenAI: one string of characters", 400, openai(
        "Invalid 'messages[0].content': string too long. Expected a string with maximum length 1048576, but got a string "
        "with length 2000000 instead.", "string_above_max_length")),
    ("ryanadoty/Amazon-Bedrock-Amazon-RDS-POC#9", 400, {
        "message": "Malformed input request: expected maxLength: 42000, actual: 46735, please reformat your input and try "
                   "again."}),
    ("langchain-ai/langchain-aws#419", 400, {
        "message": "1 validation error detected: Value at 'body' failed to satisfy constraint: Member must have length less "
                   "than or equal to 25000000"}),
    ("llama.cpp, embeddings", 500, {"error": {
        "code": 500, "type": "server_error",
        "message": "input is too large to process. increase the physical batch size"}}),
    # --- text of the request, or of the gateway
    ("OpenAI", 400, openai(f"Invalid value: '{WINDOW}'. Supported values are: 'auto'.")),
    ("OpenAI", 404, openai(f"The model `{WINDOW}` does not exist", "model_not_found")),
    ("OpenAI, should it answer 400", 400, openai(f"The model `{LONG}` does not exist", "model_not_found")),
    ("Anthropic", 400, anthropic(f"messages.0: unknown role `{LONG}`")),
    ("vLLM: the request as Python prints it", 400, server(
        f"[{{'type': 'missing', 'loc': ('body', 'model'), 'msg': 'Field required', 'input': {{'message': \"{WINDOW}\"}}}}]")),
    ("vLLM: the same as JSON", 400, server(json.dumps(
        [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": {"message": LONG}}]))),
    ("FastAPI", 422, {"detail": [
        {"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": {"message": WINDOW}}]}),
    ("a field of the request named in the refusal of another", 400, {
        "error": {"message": "Invalid request", "param": LONG, "type": "invalid_request_error"}, "request": {"error": LONG}}),
    ("OpenHands/OpenHands#5350: another reason first", 400, openai(
        'litellm.BadRequestError: BedrockException - {"message":"messages.32.content: Conversation blocks and tool result '
        'blocks cannot be provided in the same turn."}\nError doing the fallback: litellm.BadRequestError: '
        f'litellm.ContextWindowExceededError: AnthropicError - {{"message":"{LONG}"}}', "400", None)),
    # --- other statuses, and responses
    ("success", 200, openai(WINDOW, "context_length_exceeded")),
    ("a rate however it is worded", 429, openai(WINDOW, "context_length_exceeded")),
    ("unavailable", 503, openai(LONG)),
    ("nothing", 400, b""),
    ("null", 400, b"null"),
    ("an empty list", 400, b"[]"),
    ("numbers", 400, b"[1, 2]"),
    ("an error of numbers", 400, {"error": 5, "message": ["prompt is too long"], "code": 1, "type": {}}),
]
# fmt: on


@pytest.mark.parametrize(("source", "status", "body"), OTHERS, ids=[row[0] for row in OTHERS])
def test_error_with_another_reason_is_not_a_length_error(source: str, status: int, body: object) -> None:
    assert read(body, status) is None


def test_incomplete_body_is_read_partly() -> None:
    whole = json.dumps(openai(WINDOW + "x" * 100_000)).encode()
    assert length_error(400, whole) == length_error(400, whole[:300]) == LengthError(8, 9)


def test_only_numeric_fields_are_read_as_numbers() -> None:
    def llama(**numbers: object) -> dict[str, object]:
        return {"error": {"type": "exceed_context_size_error", **numbers}}

    assert read(llama(n_ctx=True, n_prompt_tokens=5)) == LengthError()
    assert read(llama(n_ctx=0)) == LengthError()
    assert read(llama(n_ctx=8, n_prompt_tokens="9")) == LengthError(8)
    assert read(llama(n_ctx=10**30)) == LengthError(2**53)
    assert read({"error": json.dumps(llama(n_ctx=8, n_prompt_tokens=9))}) == LengthError(8, 9)
    assert read(openai("prompt is too long: 5 tokens > 0 maximum")) == LengthError(None, 5)
    assert read(openai(f"prompt is too long: {'9' * 5000} tokens > 8 maximum")) == LengthError()


def test_nested_errors_are_read_to_a_limited_depth() -> None:
    body: object = openai(LONG)
    for _ in range(3):
        body = openai(json.dumps(body))
    assert read(body) == LengthError(8, 9)


NAMES = ("message", "Message", "error", "detail")
HOSTILE = {
    "deep": b"[" * 70_000,
    "deep objects": b'{"error":' * 10_000,
    "deep and closed": b"[" * 30_000 + b"]" * 30_000,
    "digits": b'{"error":{"message":"prompt is too long: ' + b"9" * 65_000,
    "a huge number": b'{"error":{"n_ctx":' + b"9" * 60_000 + b',"type":"exceed_context_size_error"}}',
    "spaces": b'{"error":{"message":"' + b" " * 60_000 + b'"}}',
    "labels": b"ValueError: " * 6_000,
    "printed": b"{'type': '" * 7_000,
    "quotes": b"\"'" * 32_000,
    "backslashes": b'{"error":{"message":"' + b"\\\\" * 30_000 + b'"}}',
    "brackets": b"This model's maximum context length is 8 tokens. However, you requested 9 tokens (" + b"9 in a " * 9_000,
    "no text": bytes(range(256)) * 300,
    "surrogates": b'{"error":{"message":"\\ud800\\udfff prompt is too long"}}',
    "wide": '{"error":{"message":"漢字"}}'.encode("utf-16"),
    "much": b'{"error":"' + b"x" * 20_000_000 + b'"}',
    "boxes": json.dumps(dict.fromkeys(NAMES, json.dumps(dict.fromkeys(NAMES, json.dumps(dict.fromkeys(NAMES, "x" * 99)))))).encode(),
}  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_no_body_raises_or_takes_long(body: bytes) -> None:
    # One pass takes a millisecond at most. Trying every start with every end of the body would take a second.
    with in_time():
        for _ in range(100):
            length_error(400, body)


def test_no_mutation_of_a_refusal_raises() -> None:
    chance = random.Random(7)
    bodies = [json.dumps(row[2]).encode() for row in REFUSALS]
    for _ in range(3_000):
        data = bytearray(chance.choice(bodies))
        for _ in range(chance.randint(1, 6)):
            start = chance.randrange(len(data))
            data[start : start + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 4))
        result = length_error(400, bytes(data))
        assert result is None or all(
            number is None or number >= 0 for number in (result.limit, result.input_tokens, result.output)
        )
