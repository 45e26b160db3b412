"""Which path speaks which format, and which one is charged."""

from __future__ import annotations

import pytest

from gateway.dialects import CHAT, endpoint
from gateway.dialects.passthrough import PassThrough

# method, path: operation, metered, estimated, anthropic
TABLE = {
    ("POST", "chat/completions"): ("chat", True, True, False),
    ("POST", "responses"): ("chat", True, True, False),
    ("POST", "messages"): ("chat", True, True, True),
    ("POST", "completions"): ("text_completion", True, True, False),
    ("POST", "embeddings"): ("embeddings", True, True, False),
    ("POST", "images/generations"): ("images", True, False, False),
    ("POST", "audio/speech"): ("audio", True, False, False),
    ("POST", "moderations"): ("moderations", True, False, False),
    ("POST", "responses/compact"): ("responses", True, False, False),
    ("POST", "files"): ("files", True, False, False),
    ("POST", "batches"): ("batches", True, False, False),
    ("POST", "messages/count_tokens"): ("messages", False, False, True),
    ("POST", "responses/input_tokens"): ("responses", False, False, False),
    ("POST", "responses/resp_1/cancel"): ("responses", False, False, False),
    ("POST", "responses/compact/x"): ("responses", False, False, False),
    ("POST", "chat/completions/chatcmpl-1"): ("chat", False, False, False),
    ("POST", "files/file-1"): ("files", False, False, False),
    ("POST", "vector_stores/vs_1/search"): ("vector_stores", False, False, False),
    ("POST", "messages/batches"): ("messages", True, False, True),
    ("GET", "chat/completions"): ("chat", False, False, False),
    ("GET", "models"): ("models", False, False, False),
    ("GET", "responses/resp_1"): ("responses", False, False, False),
    ("DELETE", "responses/resp_1"): ("responses", False, False, False),
    ("GET", "messages"): ("chat", False, False, True),
    ("POST", ""): ("other", True, False, False),
    ("POST", "/x"): ("other", True, False, False),
    ("POST", "messagesx"): ("messagesx", True, False, False),
}


@pytest.mark.parametrize(("method", "path"), TABLE)
def test_a_path_is_metered_and_estimated_as_the_table_says(method: str, path: str) -> None:
    found = endpoint(method, path)
    assert (found.operation, found.metered, found.estimated, found.anthropic) == TABLE[method, path]


def test_only_a_chat_call_has_the_chat_dialect() -> None:
    assert endpoint("POST", "chat/completions").dialect is CHAT
    assert isinstance(endpoint("GET", "chat/completions").dialect, PassThrough)
    assert isinstance(endpoint("POST", "responses").dialect, PassThrough)


def test_a_client_that_says_it_speaks_anthropics_api_is_believed_on_any_other_path() -> None:
    assert endpoint("GET", "models", anthropic=True).anthropic
    assert not endpoint("POST", "chat/completions", anthropic=True).anthropic


def test_nothing_is_estimated_that_is_not_metered() -> None:
    for method, path in TABLE:
        found = endpoint(method, path)
        assert found.metered or not found.estimated
