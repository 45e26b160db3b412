from __future__ import annotations

import json

import pytest

from gateway.core.errors import InvalidRequest
from gateway.dialects.fields import read_fields, without_session_id, write_fields


def body(text: str) -> bytes:
    """Return a body with a message that has this JSON text."""
    return b'{"model":"m","messages":[{"role":"user","content":"' + text.encode() + b'"}]}'


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (r"cut \ud83d", r"\ud83d"),
        (r"cut \ud83d here", r"\ud83d"),
        (r"\ude00 cut", r"\ude00"),
        (r"\ud83d\ud83d\ude00", r"\ud83d"),
        (r"\ud83d\ude00\uDE00", r"\uDE00"),
        (r"\\\\\ud83d", r"\ud83d"),
        (r"\ud83d\n", r"\ud83d"),
    ],
)
def test_lone_surrogate_is_refused_with_a_remedy(text: str, half: str) -> None:
    raw = body(text)
    json.loads(raw)  # the standard library accepts it
    with pytest.raises(InvalidRequest) as refused:
        read_fields(raw)
    message = refused.value.message
    place = message.split(" at byte ")[1].split(" ")[0]
    assert raw[int(place) :].startswith(half.encode())
    assert f"{half} at byte" in message
    assert "lone surrogate" in message
    assert "toWellFormed" in message


@pytest.mark.parametrize(
    "text", [r"\ud83d\ude00", r"\\ud83d", r"\\\\ud83d", r"\\\ud83d\ude00", "\U0001f600", r"\ue000"]
)
def test_whole_characters_are_read(text: str) -> None:
    assert list(read_fields(body(text))) == ["model", "messages"]


@pytest.mark.parametrize("raw", [b'{"a":', b'{"a":"\\\\ud83d"', b'{"a":"\\ud83d\\ude00"', b"no json"])
def test_other_invalid_json_has_another_message(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is not valid JSON"):
        read_fields(raw)


@pytest.mark.parametrize(
    ("body", "in_metadata", "left"),
    [
        ({"session_id": "s", "metadata": {"session_id": "s"}}, False, {"metadata": {"session_id": "s"}}),
        ({"session_id": 7, "metadata": {"session_id": "s"}}, True, {}),
        ({"metadata": {"session_id": "s", "user_id": "u"}}, True, {"metadata": {"user_id": "u"}}),
        ({"metadata": {"user_id": "u"}}, True, {"metadata": {"user_id": "u"}}),
        ({"metadata": 7, "prompt_cache_key": "k"}, True, {"metadata": 7, "prompt_cache_key": "k"}),
    ],
)
def test_only_the_session_id_is_removed(body: dict[str, object], left: dict[str, object], *, in_metadata: bool) -> None:
    fields = read_fields(json.dumps(body).encode())
    assert json.loads(write_fields(fields, without_session_id(fields, in_metadata=in_metadata))) == left


MIB = 2**20


@pytest.mark.parametrize("at", [9, MIB - 1, MIB, MIB + 1, 2 * MIB - 2, 3 * MIB - 3])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82x", b"\xf0\x9f\x98", b"\xc3"])
def test_first_invalid_utf_8_byte_is_named(at: int, bad: bytes) -> None:
    start = b'{"a": "' + "é".encode()
    body = start + b"x" * (at - len(start)) + bad + b"y" * MIB
    with pytest.raises(InvalidRequest, match=rf"\(byte {at}\)"):
        read_fields(body)
    with pytest.raises(InvalidRequest, match=rf"\(byte {at}\)"):
        read_fields(body[: at + len(bad)].removesuffix(b"x"))


def test_characters_across_check_blocks_are_valid() -> None:
    for shift in range(4):
        text = "x" * shift + "😀" * (MIB // 2)
        assert bytes(read_fields(b'{"a":"' + text.encode() + b'"}')["a"]) == b'"' + text.encode() + b'"'
