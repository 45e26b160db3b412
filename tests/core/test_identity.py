"""Test session ids: the order of sources, valid ids, and derived ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.identity import (
    KNOWN_HEADERS,
    derive,
    from_body,
    from_headers,
    hash_of,
    is_valid,
    model_family,
    text_of,
)
from tests.support.timing import in_time

ID_HEADERS = (b"x-session-id",)
#: the documented headers: gateways first, then clients
HEADER_ORDER = (
    b"x-session-id",
    b"x-litellm-session-id",
    b"helicone-session-id",
    b"x-portkey-trace-id",
    b"x-bf-session-id",
    b"agent-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"thread-id",
    b"x-opencode-session",
    b"x-session-affinity",
    b"x-openwebui-chat-id",
    b"x-amp-thread-id",
    b"conversation_id",
    b"x-someones-session-id",
)
UUID = "0f5d7c9e-1111-4222-8333-444455556666"


@pytest.mark.parametrize("value", ["a", "A.b_c:d-9", "x" * 255, UUID])
def test_an_id_of_the_documented_characters_is_valid(value: str) -> None:
    assert is_valid(value)


@pytest.mark.parametrize(
    "value",
    ["", "x" * 256, "a b", "a/b", "a\n", "a\r\nx: y", "é", "漢", "a\x00", "a%2f", '"a"', "a,b", "../x", "a\u2028"],
)
def test_other_texts_are_no_valid_ids(value: str) -> None:
    assert not is_valid(value)


def test_no_documented_header_is_missing_from_the_built_in_list() -> None:
    assert HEADER_ORDER[1:-1] == KNOWN_HEADERS


@pytest.mark.parametrize("first", range(len(HEADER_ORDER)))
def test_headers_are_checked_in_documented_order(first: int) -> None:
    present = {name: b"id-%d" % index for index, name in enumerate(HEADER_ORDER) if index >= first}
    backwards = dict(reversed(present.items()))
    assert from_headers(backwards, ID_HEADERS) == f"id-{first}"


def test_configured_headers_come_first_in_their_own_order() -> None:
    headers = {b"x-litellm-session-id": b"c", b"x-two": b"b", b"x-one": b"a"}
    assert from_headers(headers, (b"x-one", b"x-two")) == "a"


@pytest.mark.parametrize("name", [b"x-session-id", b"session-id", b"x-my-session-id"])
def test_blanks_around_an_id_are_ignored(name: bytes) -> None:
    assert from_headers({name: b"\t named  "}, ID_HEADERS) == "named"


def test_an_invalid_id_is_skipped_for_the_next_header() -> None:
    assert from_headers({b"x-session-id": b"not valid", b"session-id": b"good"}, ID_HEADERS) == "good"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"x-parent-session-id": b"parent"},
        {b"x-request-id": b"r"},
        {b"my-session-id": b"a"},
        {b"x-session-ids": b"a"},
        {b"x-some-session-id": b"not valid"},
        {b"x-session-id": b""},
    ],
)
def test_headers_without_session_give_none(headers: dict[bytes, bytes]) -> None:
    assert from_headers(headers, ID_HEADERS) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"session_id": "it"}, "session_id": "b", "conversation": "c", "prompt_cache_key": "d"},
        {"session_id": "it", "conversation": "c", "prompt_cache_key": "d", "metadata": {"user_id": "u_session_e"}},
        {"conversation": "it", "prompt_cache_key": "d", "metadata": {"user_id": "u_session_e"}},
        {"conversation": {"id": "it"}, "prompt_cache_key": "d", "client_metadata": {"session_id": "f"}},
        {"client_metadata": {"session_id": "it", "thread_id": "g"}, "prompt_cache_key": "d"},
        {"client_metadata": {"thread_id": "it"}, "prompt_cache_key": "d"},
        {"client_metadata": "f", "prompt_cache_key": "it"},
        {"prompt_cache_key": "it", "metadata": {"user_id": "u_session_e"}},
        {"metadata": {"user_id": "user_1_account_2_session_it"}},
        {"metadata": {"user_id": '{"device_id": "d", "session_id": "it"}'}},
    ],
)
def test_body_fields_are_checked_in_documented_order(fields: dict[str, Any]) -> None:
    assert from_body(fields) == "it"


@pytest.mark.parametrize("bad", ["not valid", "", 7, None, True, [], {}, {"id": 3}, 1e999, "x" * 256, "\ud800"])
def test_a_body_field_that_holds_no_valid_id_is_skipped(bad: object) -> None:
    fields = {"metadata": {"session_id": bad, "user_id": bad}, "session_id": bad, "conversation": bad}
    assert from_body(fields) is None
    assert from_body({**fields, "prompt_cache_key": "good"}) == "good"


@pytest.mark.parametrize(
    "user_id",
    [
        "alice",
        f"user_1_session_{UUID} ",
        "_session_",
        "{",
        "{}",
        "[1]",
        '{"session_id": 7}',
        '{"session_id": "a b"}',
        '{"a":' * 100_000,
        "{" + "[" * 100_000,
        '{"session_id": NaN}',
    ],
)
def test_a_user_id_without_a_session_names_none(user_id: str) -> None:
    assert from_body({"metadata": {"user_id": user_id}}) is None


def test_claude_codes_user_id_names_its_session() -> None:
    user_id = f"user_{'ab' * 32}_account_{UUID}_session_{UUID}"
    assert from_body({"metadata": {"user_id": user_id}}) == UUID


@pytest.mark.parametrize("metadata", [None, 7, "x", [], [{"session_id": "a"}], True])
def test_metadata_that_is_not_an_object_is_ignored(metadata: object) -> None:
    assert from_body({"metadata": metadata}) is None


def test_user_id_without_session_is_not_a_session() -> None:
    assert from_body({"user": "alice", "safety_identifier": "alice"}) is None


def test_a_hostile_user_id_is_read_in_time_linear_in_its_length() -> None:
    with in_time():
        assert from_body({"metadata": {"user_id": "_session_" * 100_000 + "!"}}) is None


def test_a_hostile_model_name_is_read_in_time_linear_in_its_length() -> None:
    with in_time():
        derive("ns", "-latest" * 100_000 + "x", [])


def test_a_derived_id_is_valid_marked_and_the_same_each_time() -> None:
    first = derive("alice", "gpt-5", ["be brief", "hello"])
    assert first.startswith("auto-")
    assert is_valid(first)
    assert first == derive("alice", "gpt-5", ["be brief", "hello"])


@pytest.mark.parametrize(
    "other",
    [
        ("bob", "gpt-5", ["be brief", "hello"]),
        ("alice", "gpt-4", ["be brief", "hello"]),
        ("alice", None, ["be brief", "hello"]),
        ("alice", "gpt-5", ["be brief", "hello!"]),
        ("alice", "gpt-5", ["be briefhello"]),
        ("alice", "gpt-5", ["be brief", "hello", ""]),
        ("alice", "gpt-5", ["hello", "be brief"]),
        ("alice", "gpt-5", ["be", "brief hello"]),
    ],
)
def test_each_distinguishing_part_changes_the_derived_id(other: tuple[str, str | None, list[str]]) -> None:
    assert derive(*other) != derive("alice", "gpt-5", ["be brief", "hello"])


def test_conversations_with_a_long_common_prefix_have_different_ids() -> None:
    instructions = "You are an agent. " * 10_000
    assert derive("a", "m", [instructions + "1"]) != derive("a", "m", [instructions + "2"])


def test_a_lone_surrogate_can_be_hashed() -> None:
    assert is_valid(derive("a", "m", ["\ud800"]))


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("gpt-4o-2024-08-06", "gpt-4o"),
        ("claude-sonnet-4-5-20250929", "claude-sonnet-4-5"),
        ("claude-sonnet-4@20250929", "claude-sonnet-4"),
        ("gpt-5-chat-latest", "gpt-5-chat"),
        ("gemini-2.5-pro-preview-20250325", "gemini-2.5-pro"),
        ("openai/gpt-4o", "gpt-4o"),
        ("openrouter/meta/llama", "llama"),
        ("gpt-5.1", "gpt-5.1"),
        ("", ""),
    ],
)
def test_a_model_family_is_its_name_without_provider_and_date(model: str, family: str) -> None:
    assert model_family(model) == family


def test_text_is_the_identity_of_an_item() -> None:
    assert text_of("hi") == "hi"
    assert text_of([{"type": "text", "text": "a"}, "b"]) == "a\nb"
    assert text_of(None) == "null"
    assert text_of(7) == "7"


def test_parts_without_text_count_by_their_content_whatever_the_order_of_keys() -> None:
    first = {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}
    second = {"image_url": {"detail": "low", "url": "u"}, "type": "image_url"}
    assert text_of(first) == text_of(second)
    assert text_of(first) != text_of({**first, "image_url": {"url": "v"}})


def test_a_cache_mark_that_moves_does_not_change_the_identity() -> None:
    image = {"type": "image", "source": "s"}
    assert text_of({**image, "cache_control": {"type": "ephemeral"}}) == text_of(image)
    assert text_of({**image, "prompt_cache_breakpoint": {"mode": "explicit"}}) == text_of(image)
    text = {"type": "text", "text": "a"}
    assert text_of({**text, "cache_control": {"type": "ephemeral"}}) == text_of(text)


def test_text_field_that_is_not_a_string_does_not_hide_the_rest() -> None:
    assert text_of({"text": 7, "a": 1}) == json.dumps({"a": 1, "text": 7})


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_is_a_folder_in_a_path_is_no_session_id(name: str) -> None:
    assert not is_valid(name)


def test_derived_ids_do_not_change_between_versions() -> None:
    image = {"type": "image_url", "image_url": {"url": "é", "detail": "low"}, "cache_control": {"type": "ephemeral"}}
    opening = ["be brief", text_of([{"type": "text", "text": "hi"}, image, 7, None])]
    assert derive("alice", "openai/gpt-5-2025-08-07", opening) == "auto-681c5b20a434c3a5028d7757"


def test_large_content_is_identified_by_hash_of_its_bytes() -> None:
    assert hash_of(b"a") == hash_of(memoryview(b"a")) != hash_of(b"b")
