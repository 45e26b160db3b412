from __future__ import annotations

import pytest

from gateway.core.errors import InvalidRequest, MethodNotAllowed, NotFound
from gateway.server.paths import PathRequest, split_path


@pytest.mark.parametrize(
    ("path", "session", "rest"),
    [
        ("/v1/chat/completions", None, "chat/completions"),
        ("/v1/v1/chat/completions", None, "chat/completions"),
        ("/chat/completions", None, "chat/completions"),
        ("/messages", None, "messages"),
        ("/messages/count_tokens", None, "messages/count_tokens"),
        ("/models/org%2Fname", None, "models/org%2Fname"),
        ("/audio/transcriptions", None, "audio/transcriptions"),
        ("/files", None, "files"),
        ("/s/a/conversations/c/items", "a", "conversations/c/items"),
        ("/s/a/v1/chat/completions", "a", "chat/completions"),
        ("/s/a/chat/completions", "a", "chat/completions"),
        ("/s/a%3Ab/v1/models", "a:b", "models"),
        ("/s/a%2Fb/v1/models", "a/b", "models"),
        ("/s//v1/models", "", "models"),
        ("/v1/anything/at/all", None, "anything/at/all"),
        ("/v1/files/..a/b..", None, "files/..a/b.."),
        ("/v1/files/...", None, "files/..."),
        ("/v1/s/a/v1/models", None, "s/a/v1/models"),
    ],
)
def test_a_path_is_split(path: str, session: str | None, rest: str) -> None:
    assert split_path(path.encode(), "GET") == (session, rest, False, None)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/v1",
        "/v1/",
        "/v1/v1/",
        "/s",
        "/s/",
        "/s/a",
        "/s/a/",
        "/s/a/b",
        "/x",
        "/V1/models",
        "/chat",
        "/modelsx",
        "/filesx",
        "/s/a/s/b/v1/models",
        "*",
    ],
)
def test_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFound, match=r"Send calls to /v1 .* dashboard, if it is on, is at /ui"):
        split_path(path.encode())


@pytest.mark.parametrize(
    "path",
    [
        "/v1/..",
        "/v1/.",
        "/v1/../x",
        "/v1/a/../../x",
        "/v1/%2e%2e/x",
        "/v1/%2E./x",
        "/v1/a%2f..%2fb",
        "/v1/..%2fb",
        "/v1/a\\b",
        "/v1/a%5cb",
        "/v1/a b",
        "/v1/a%20",
        "/v1/%20a",
        "/v1/a/%20/b",
        "/v1/a%0ab",
        "/v1/a%00",
        "/v1/a%7f",
        "/models/..",
        "/s/a/v1/../../api/sessions",
    ],
)
def test_path_with_dot_segments_or_control_characters_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        split_path(path.encode())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            (method, path)
            for method in ("GET", "POST")
            for path in ("files/my%20file", "models/caf%C3%A9", "a%22%3c%20b")
        ),
        ("GET", "files/50%25"),
    ],
)
def test_valid_escapes_stay_as_they_are(method: str, path: str) -> None:
    assert split_path(f"/v1/{path}".encode(), method).path == path


@pytest.mark.parametrize("path", ["/v1/a%2f..", "/v1/a%2f%2e%2e", "/v1/a%2f.%2fb", "/v1//x", "/v1/a//b"])
def test_path_that_a_provider_may_resolve_differently_is_refused(path: str) -> None:
    """A server that decodes a path before it resolves it would read another folder."""
    try:
        rest = split_path(path.encode()).path
    except (InvalidRequest, NotFound):
        return
    assert ".." not in rest.replace("%2e", ".").replace("%2f", "/").split("/")


@pytest.mark.parametrize("method", ["TRACE", "CONNECT"])
def test_trace_and_connect_are_not_forwarded(method: str) -> None:
    with pytest.raises(MethodNotAllowed):
        split_path(b"/v1/files", method)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "QUERY"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/v1/chat%252Fcompletions",
        "/v1/completions%3Fx",
        "/v1/messages%23x",
        "/v1/responses%2f",
    ],
)
def test_billed_path_may_not_contain_encoded_separators(method: str, path: str) -> None:
    with pytest.raises(InvalidRequest):
        split_path(path.encode(), method)
    for reading in ("GET", "DELETE"):
        assert split_path(b"/v1/models/org%2Fname%3Av1%2525", reading).path == "models/org%2Fname%3Av1%2525"


@pytest.mark.parametrize(
    ("path", "session", "rest", "deployment"),
    [
        ("/openai/deployments/gpt-4o/chat/completions", None, "chat/completions", "gpt-4o"),
        ("/openai/deployments/org/name/embeddings", None, "embeddings", "org/name"),
        ("/v1/deployments/gpt-4o/completions", None, "completions", "gpt-4o"),
        ("/deployments/gpt-4o/audio/speech", None, "audio/speech", "gpt-4o"),
        ("/openai/responses", None, "responses", None),
        ("/openai/v1/responses/resp_1/input_items", None, "responses/resp_1/input_items", None),
        ("/s/a/openai/v1/models", "a", "models", None),
        ("/s/a/openai/deployments/m/chat/completions", "a", "chat/completions", "m"),
    ],
)
def test_path_of_azure_clients_is_understood(path: str, session: str | None, rest: str, deployment: str | None) -> None:
    assert split_path(path.encode()) == (session, rest, True, deployment)


@pytest.mark.parametrize(
    "path", ["/openai", "/openai/", "/openai/deployments/m", "/deployments/m/other", "/openai/v2/responses"]
)
def test_other_paths_of_azure_are_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        split_path(path.encode())


@pytest.mark.parametrize("name", ["..", ".", "a%2fb", "a b", "a;b", "a//b"])
def test_deployment_may_not_contain_encoded_separators(name: str) -> None:
    with pytest.raises(InvalidRequest):
        split_path(f"/openai/deployments/{name}/chat/completions".encode())


def test_only_the_api_version_is_removed_from_a_query() -> None:
    query = b"a=1&api-version=2024-10-21&b=2"
    assert split_path(b"/openai/responses").query(query) == "a=1&b=2"
    assert split_path(b"/openai/responses").query(b"api-version=v1") == ""
    assert split_path(b"/v1/responses").query(query) == query.decode()


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{ "model": "m" , "n": 1.0}', b'{ "model": "m" , "n": 1.0}'),
        (b'{"model":"gpt-4o","n":1.0}', b'{"model":"m","n":1.0}'),
        (b'{"n":1.0}', b'{"n":1.0,"model":"m"}'),
        (b"", b""),
        (b"RIFF", b"RIFF"),
    ],
)
def test_deployment_of_the_path_becomes_the_model_of_the_body(body: bytes, sent: bytes) -> None:
    assert split_path(b"/openai/deployments/m/chat/completions").named_in(body) == sent
    assert split_path(b"/openai/v1/chat/completions").named_in(body) == body


@pytest.mark.parametrize(
    "path", ["vector_stores", "chat/completions/id", "responses/id/cancel", "conversations", "files"]
)
def test_body_of_a_path_without_a_model_is_unchanged(path: str) -> None:
    assert split_path(f"/openai/deployments/m/{path}".encode()).named_in(b'{"metadata": {}}') == b'{"metadata": {}}'


@pytest.mark.parametrize(
    "path", ["responses/compact", "audio/speech", "images/generations", "moderations", "embeddings/"]
)
def test_deployment_replaces_the_model_in_all_formats(path: str) -> None:
    assert split_path(f"/deployments/m/{path}".encode()).named_in(b'{"model":"x"}') == b'{"model":"m"}'


PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = PART % (b"file", b"x") + b"--b--\r\n"


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        (FILE, PART % (b"model", b"m") + FILE),
        (PART % (b"model", b"other") + FILE, PART % (b"model", b"m") + FILE),
        (PART % (b"model", b"m") + FILE, PART % (b"model", b"m") + FILE),
        (PART % (b"model", b"a") * 2 + FILE, PART % (b"model", b"a") * 2 + FILE),
        (b"--b", b"--b"),
    ],
)
def test_deployment_becomes_the_model_of_a_form(form: bytes, sent: bytes) -> None:
    assert split_path(b"/openai/deployments/m/audio/transcriptions").named_in(form) == sent


def test_body_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        split_path(b"/openai/deployments/m/chat/completions").named_in(b'{"model": ')


@pytest.mark.parametrize(("length", "is_known"), [(20, True), (2_000, False)])
def test_short_paths_are_cached(length: int, is_known: bool) -> None:
    path = b"/v1/models/" + b"a" * length
    first, again = split_path(path, "GET"), split_path(path, "GET")
    assert first == again == PathRequest(None, path.decode()[4:])
    assert (first is again) == is_known


def test_refused_path_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            split_path(b"/v1/a%2fb", "POST")
        assert split_path(b"/v1/a%2fb", "GET").path == "a%2fb"
