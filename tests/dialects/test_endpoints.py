"""The format of each path, and which paths are charged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.dialects import endpoint
from gateway.dialects.anthropic_messages import AnthropicMessages
from gateway.dialects.completions import Completions
from gateway.dialects.openai_chat import OpenAIChat
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.dialects.passthrough import PassThrough

# method, path: operation, metered, estimated, anthropic
TABLE = {
    ("POST", "chat/completions"): ("chat", True, True, False),
    ("POST", "responses"): ("chat", True, True, False),
    ("POST", "messages"): ("chat", True, True, True),
    ("POST", "completions"): ("text_completion", True, True, False),
    ("POST", "embeddings"): ("embeddings", True, True, False),
    ("POST", "images/generations"): ("images", True, True, False),
    ("POST", "audio/speech"): ("audio", True, True, False),
    ("POST", "moderations"): ("moderations", True, False, False),
    ("POST", "responses/compact"): ("responses", True, True, False),
    ("POST", "files"): ("files", True, False, False),
    ("POST", "uploads"): ("uploads", True, False, False),
    ("POST", "uploads/upload_1/parts"): ("uploads", True, False, False),
    ("POST", "containers/c_1/files"): ("containers", True, False, False),
    ("POST", "batches"): ("batches", True, True, False),
    ("POST", "messages/count_tokens"): ("messages", False, False, True),
    ("POST", "responses/input_tokens"): ("responses", False, False, False),
    ("POST", "responses/resp_1/cancel"): ("responses", False, False, False),
    ("POST", "responses/compact/x"): ("responses", False, False, False),
    ("POST", "chat/completions/chatcmpl-1"): ("chat", False, False, False),
    ("POST", "files/file-1"): ("files", True, False, False),
    ("POST", "vector_stores/vs_1/search"): ("vector_stores", True, False, False),
    ("POST", "messages/batches"): ("messages", True, True, True),
    ("POST", "threads/t_1"): ("threads", True, False, False),
    ("POST", "threads/t_1/messages"): ("threads", True, False, False),
    ("POST", "threads/t_1/messages/m_1"): ("threads", True, False, False),
    ("POST", "threads/t_1/runs"): ("threads", True, True, False),
    ("POST", "threads/t_1/runs/r_1"): ("threads", False, False, False),
    ("POST", "threads/t_1/runs/r_1/cancel"): ("threads", False, False, False),
    ("POST", "threads/t_1/runs/r_1/submit_tool_outputs"): ("threads", True, True, False),
    ("POST", "threads/t_1/answers"): ("threads", True, True, False),
    ("POST", "batches/b_1/cancel"): ("batches", False, False, False),
    ("POST", "batches/b_1/requests"): ("batches", True, True, False),
    ("POST", "messages/batches/b_1/cancel"): ("messages", False, False, True),
    ("POST", "fine_tuning/jobs/j_1/cancel"): ("fine_tuning", False, False, False),
    ("POST", "fine_tuning/jobs/j_1/start"): ("fine_tuning", True, True, False),
    ("POST", "fine_tuning/jobs/j_1/resume"): ("fine_tuning", True, True, False),
    ("POST", "fine_tuning/alpha/graders/run"): ("fine_tuning", True, True, False),
    ("POST", "fine_tuning/alpha/graders/validate"): ("fine_tuning", True, False, False),
    ("POST", "fine_tuning/checkpoints/c:1/permissions"): ("fine_tuning", True, False, False),
    ("POST", "fine-tunes/estimate-price"): ("fine-tunes", True, False, False),
    ("POST", "chatkit/sessions/s_1/cancel"): ("chatkit", False, False, False),
    ("POST", "agents/completions/count_tokens"): ("agents", True, True, False),
    ("POST", "elsewhere/messages/count_tokens"): ("elsewhere", True, False, False),
    ("PUT", "files/file-1"): ("files", True, False, False),
    ("PATCH", "agents/a_1"): ("agents", True, True, False),
    ("QUERY", "images/generations"): ("images", True, True, False),
    ("BREW", "x"): ("x", True, True, False),
    ("PUT", "messages/count_tokens"): ("messages", True, True, True),
    ("PATCH", "responses/resp_1"): ("responses", True, True, False),
    ("PUT", "batches/b_1/cancel"): ("batches", True, True, False),
    ("PUT", "threads/t_1/runs/r_1"): ("threads", True, True, False),
    ("HEAD", "x"): ("x", False, False, False),
    ("OPTIONS", "files"): ("files", False, False, False),
    ("DELETE", "files/file-1"): ("files", False, False, False),
    ("GET", "chat/completions"): ("chat", False, False, False),
    ("GET", "models"): ("models", False, False, False),
    ("GET", "responses/resp_1"): ("responses", False, False, False),
    ("DELETE", "responses/resp_1"): ("responses", False, False, False),
    ("GET", "messages"): ("chat", False, False, True),
    ("POST", ""): ("other", True, True, False),
    ("POST", "/x"): ("other", True, True, False),
    ("POST", "messagesx"): ("messagesx", True, True, False),
    ("POST", "x" * 100): ("x" * 64, True, True, False),
}


@pytest.mark.parametrize(("method", "path"), TABLE)
def test_path_is_metered_and_estimated_as_in_the_table(method: str, path: str) -> None:
    result = endpoint(method, path)
    assert (result.operation, result.metered, result.estimated, result.anthropic) == TABLE[method, path]


@pytest.mark.parametrize(
    ("path", "deferred"),
    [
        *((path, True) for path in ("batches", "messages/batches", "fine_tuning/jobs", "videos", "threads/t_1/runs")),
        *((path, True) for path in ("threads/runs", "evals/e_1/runs", "realtime/client_secrets", "Batches")),
        *((path, True) for path in ("batch/jobs", "batches/b_1/requests", "async/chat/completions", "queue/submit")),
        *(
            (path, True)
            for path in ("fine-tunes", "fine_tunings", "fine_tuning/alpha/graders/run", "fine_tuning/jobs/j")
        ),
        *(
            (path, True)
            for path in ("chatkit/sessions", "sessions/s_1/events", "live/sessions", "realtime", "embed/jobs")
        ),
        *((path, True) for path in ("fine_tuning/jobs/j_1/start", "rl/training-sessions/s_1/operations/sample")),
        *(
            (path, True)
            for path in ("evaluation", "videos/generations", "workflows/w_1/execute", "threads/t_1/runs/r/x")
        ),
        *((path, False) for path in ("responses", "chat/completions", "images/generations", "files", "threads")),
        *((path, False) for path in ("batches/b_1/cancel", "messages/batches/b_1/cancel", "rerank", "evals")),
        *((path, False) for path in ("workflows/accounts/a/models/m/text_to_image", "vector_stores/v_1/file_batches")),
        *((path, False) for path in ("chatkit/sessions/s_1/cancel", "realtime/calls/c_1/hangup", "agents/completions")),
    ],
)
def test_deferred_work_is_recognized(path: str, deferred: bool) -> None:
    assert endpoint("POST", path).deferred is deferred
    assert not endpoint("GET", path).deferred


@pytest.mark.parametrize("path", ["Chat/Completions", "RESPONSES", "messages/", "Embeddings"])
def test_path_is_recognized_in_any_case(path: str) -> None:
    assert endpoint("POST", path) == endpoint("POST", path.lower().rstrip("/"))
    assert endpoint("POST", path).estimated


DIALECTS = {
    "chat/completions": (OpenAIChat, "chat"),
    "responses": (OpenAIResponses, "responses"),
    "messages": (AnthropicMessages, "messages"),
    "completions": (Completions, "completions"),
    "embeddings": (PassThrough, None),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_only_post_on_a_known_path_has_its_dialect(path: str) -> None:
    dialect, wire = DIALECTS[path]
    result = endpoint("POST", path)
    assert (type(result.dialect), result.wire) == (dialect, wire)
    assert endpoint("POST", path + "/").dialect is result.dialect
    for other in (endpoint("GET", path), endpoint("DELETE", path), endpoint("POST", path + "/x")):
        assert (type(other.dialect), other.wire) == (PassThrough, None)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions", "embeddings"])
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xef\xbb\xbf{}", b'{"model":7}', b'{"model":"a","model":"a"}', b"\xff\xfe{\x00"]
)
def test_unreadable_embeddings_request_is_refused(path: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        endpoint("POST", path).dialect.read(body)


def test_anthropic_headers_select_anthropic_errors_on_other_paths() -> None:
    assert endpoint("GET", "models", anthropic=True).anthropic
    assert not endpoint("POST", "chat/completions", anthropic=True).anthropic


def test_nothing_is_estimated_that_is_not_metered() -> None:
    for method, path in TABLE:
        result = endpoint(method, path)
        assert result.metered or not result.estimated


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions", "embeddings"])
def test_request_for_a_response_is_a_call_with_any_method(path: str) -> None:
    for method in ("POST", "PUT", "PATCH", "QUERY"):
        assert endpoint(method, path) is endpoint("POST", path)
    for method in ("GET", "HEAD", "OPTIONS", "DELETE"):
        dialect = endpoint(method, path).dialect
        assert dialect.read(b"").fields == {}
        with pytest.raises(InvalidRequest, match="POST"):
            dialect.read(b'{"model": "m"}')


MODEL_PATHS = ("chat/completions", "completions", "responses", "messages", "embeddings")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "QUERY"])
@pytest.mark.parametrize("suffix", ["x", "x/y", "count_tokens", "x/input_tokens", "chat/completions"])
@pytest.mark.parametrize("path", MODEL_PATHS)
def test_request_for_a_response_below_a_model_path_is_metered(path: str, suffix: str, method: str) -> None:
    if f"{path}/{suffix}" == "messages/count_tokens":
        return
    for body in (
        b'{"model":"m","input":"hi"}',
        b'{"metadata":{},"n":1}',
        b'{"metadata":{},"metadata":{}}',
        b"\xff",
        b"[]",
    ):
        for written in (f"{path}/{suffix}", f"{path.upper()}/{suffix}/"):
            result = endpoint(method, written, body=body)
            assert (result.metered, result.estimated) == (True, True), body


@pytest.mark.parametrize("path", ["chat/completions/chatcmpl-1", "responses/resp_1/cancel"])
@pytest.mark.parametrize("body", [b"", b" \r\n", b"{}", b'{"metadata":{"input":"x"}}'])
def test_request_about_an_earlier_response_is_not_metered(path: str, body: bytes) -> None:
    assert not endpoint("POST", path, body=body).metered


@pytest.mark.parametrize("path", ["conversations/conv_1", "conversations/conv_1/restart", "conversations/conv_1/items"])
@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"inputs":"hi"}', b'{"items":[],"inputs":"hi"}', b'{"metadata":{},"metadata":{}}']
)
def test_request_that_may_continue_a_conversation_is_a_call(path: str, body: bytes) -> None:
    result = endpoint("POST", path, body=body)
    assert (result.metered, result.estimated, result.deferred) == (True, True, False)


@pytest.mark.parametrize("body", [b'{"metadata":{"a":"b"}}', b'{"items":[{"type":"message","content":"hi"}]}'])
def test_adding_to_a_stored_conversation_is_not_a_call(body: bytes) -> None:
    assert not endpoint("POST", "conversations/conv_1", body=body).metered
    assert not endpoint("POST", "conversations/conv_1/items", body=body).metered
    assert endpoint("POST", "conversations/conv_1/restart", body=body).metered


def test_ending_started_work_is_free_only_without_a_request() -> None:
    for path in ("async/chat/completions/cancel", "batches/b_1/cancel"):
        assert not endpoint("POST", path, body=b'{"metadata":{}}').metered
        result = endpoint("POST", path, body=b'{"model":"m","messages":[]}')
        assert (result.metered, result.deferred) == (True, True)


@pytest.mark.parametrize(
    ("path", "field"), [("messages/count_tokens", "messages"), ("responses/input_tokens", "input")]
)
def test_client_marks_are_removed_before_provider_counting(path: str, field: str) -> None:
    mark = {"x_gateway": {"priority": "pinned"}}
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    marked = {**message, "content": [{**message["content"][0], **mark}], **mark}
    dialect = endpoint("POST", path).dialect
    call = dialect.read(json.dumps({"model": "m", field: [marked, message], "x_gateway": 1}).encode())
    assert json.loads(call.body) == {"model": "m", field: [message, message], "x_gateway": 1}
    assert json.loads(call.with_model("n", {})) == {"model": "n", field: [message, message], "x_gateway": 1}
    for plain in (
        b'{"model": "m",  "%b": [{"text": "\\"x_gateway\\""}]}' % field.encode(),
        b'"x_gateway"',
        b'{"x_gateway":1}',
    ):
        assert dialect.read(plain).body == plain
    with pytest.raises(InvalidRequest, match=r"\[0\]\.x_gateway"):
        dialect.read(json.dumps({field: [{**message, "x_gateway": 5}]}).encode())


@pytest.mark.parametrize("path", ["messages/count_tokens", "responses/input_tokens"])
def test_token_counting_is_free(path: str) -> None:
    assert not endpoint("POST", path, body=b'{"model":"m","messages":[]}').metered
    for method in ("PUT", "PATCH", "QUERY"):
        assert endpoint(method, path, body=b'{"model":"m","messages":[]}').metered


@pytest.mark.parametrize("path", ["files", "files/f", "images/generations", "models", "x", "vector_stores/v"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_body_is_refused_with_methods_without_body(method: str, path: str) -> None:
    result = endpoint(method, path, body=b'{"model":"m"}')
    assert not result.metered
    assert result.dialect.read(b"").fields == {}
    with pytest.raises(InvalidRequest, match="POST"):
        result.dialect.read(b'{"model":"m"}')


@pytest.mark.parametrize(
    ("path", "estimated"), [("images/generations", True), ("x", True), ("files/f", False), ("vector_stores/v", False)]
)
def test_delete_with_a_body_is_metered(path: str, estimated: bool) -> None:
    body = b'{"model":"m"}'
    result = endpoint("DELETE", path, body=body)
    assert (result.metered, result.estimated) == (True, estimated)
    assert result.dialect.read(body).model == "m"
    assert not endpoint("DELETE", path, body=b" \r\n").metered


@pytest.mark.parametrize("body", [b'{"metadata":{"a":"b"}}', b"{}", b""])
def test_changing_the_metadata_of_a_run_is_free_and_other_requests_are_not(body: bytes) -> None:
    assert not endpoint("POST", "threads/t_1/runs/r_1", body=body).metered
    assert endpoint("POST", "threads/t_1/runs/r_1", body=b'{"model":"m","messages":[]}').metered


@pytest.mark.parametrize("path", MODEL_PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_methods_without_body_have_none_below_a_model_path(method: str, path: str) -> None:
    result = endpoint(method, f"{path}/x")
    assert not result.metered
    result.dialect.read(b"")
    with pytest.raises(InvalidRequest):
        result.dialect.read(b'{"model":"m"}')


@pytest.mark.parametrize(
    ("method", "path", "fetched"),
    [
        ("GET", "responses/resp_A1", "resp_A1"),
        ("GET", "Responses/resp%5FA1/", "resp_A1"),
        ("POST", "responses/resp_A1/cancel", "resp_A1"),
        ("GET", "chat/deferred-completion/A-1", "A-1"),
        ("GET", "responses/resp_A1/input_items", None),
        ("GET", "chat/completions/chatcmpl-1", None),
        ("DELETE", "responses/resp_A1", None),
        ("POST", "responses/resp_A1", None),
        ("POST", "responses", None),
    ],
)
def test_paths_that_fetch_an_earlier_response(method: str, path: str, fetched: str | None) -> None:
    result = endpoint(method, path)
    assert result.fetched_id == fetched
    assert not (result.metered and fetched)


@pytest.mark.parametrize(
    ("method", "path", "about"),
    [
        ("GET", "responses/resp_A1", "resp_A1"),
        ("DELETE", "Responses/resp%5FA1/", "resp_A1"),
        ("GET", "responses/resp_A1/input_items", "resp_A1"),
        ("POST", "responses/resp_A1/cancel", "resp_A1"),
        ("POST", "responses/resp_A1", "resp_A1"),
        ("GET", "chat/deferred-completion/A-1", "A-1"),
        ("GET", "responses/resp_A1/../../files", None),
        ("POST", "responses/input_tokens", None),
        ("POST", "responses/compact", None),
        ("POST", "responses", None),
        ("GET", "chat/completions/chatcmpl-1", None),
    ],
)
def test_paths_about_an_earlier_response(method: str, path: str, about: str | None) -> None:
    assert endpoint(method, path).response_id == about


def test_calls_that_may_continue_an_earlier_response() -> None:
    paths = ["responses", "responses/compact", "responses/input_tokens", "chat/completions", "messages", "embeddings"]
    assert [path for path in paths if endpoint("POST", path).may_continue] == paths[:3]


def test_cancel_that_asks_for_a_response_is_a_call() -> None:
    result = endpoint("POST", "responses/resp_1/cancel", body=b'{"model": "m", "input": "hi"}')
    assert (result.metered, result.fetched_id) == (True, None)
