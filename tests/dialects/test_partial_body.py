"""Usage and texts of incomplete responses."""

from __future__ import annotations

import json

import pytest

from gateway.dialects import CHAT, endpoint
from gateway.dialects.base import ParsedResponse
from gateway.dialects.partial_body import PartialBody, read_partial, read_whole
from gateway.dialects.passthrough import PassThrough

USAGE = {"prompt_tokens": 100, "completion_tokens": 40, "total_tokens": 140}
EMBEDDINGS = endpoint("POST", "embeddings").dialect


def chat(text: str, **more: object) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"id": "x", "choices": [{"index": 0, "message": message}], **more}).encode()


def usage_of(answer: ParsedResponse) -> tuple[int | None, int | None] | None:
    return (answer.usage.input_tokens, answer.usage.output_tokens) if answer.usage is not None else None


def test_body_that_lacks_only_its_end_is_read_as_complete() -> None:
    body = chat("hello", usage=USAGE)
    assert read_partial(CHAT, body, has_texts=True) == CHAT.answer(body)
    assert usage_of(read_partial(CHAT, body[:-1], has_texts=True)) == (100, 40)


def test_body_that_lacks_a_part_is_not_parsed() -> None:
    parsed = []

    class Asked(PassThrough):
        def answer(self, body: bytes) -> ParsedResponse:
            parsed.append(body)
            return super().answer(body)

    vectors = b'{"data": [{"embedding": [0.5' + b",0.5" * 100_000
    assert read_partial(Asked("embeddings"), vectors, has_texts=False) == ParsedResponse()
    assert parsed == []


def test_usage_is_read_if_the_body_breaks_off_after_it() -> None:
    body = chat("hello", usage=USAGE, more="x" * 500)
    at = body.index(b'"more"')
    for end in range(at, len(body), 7):
        assert usage_of(read_partial(CHAT, body[:end], has_texts=True)) == (100, 40)
    assert usage_of(read_partial(CHAT, body[: at - 10], has_texts=True)) is None


def test_text_that_mentions_usage_is_not_usage() -> None:
    body = chat('see "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}')
    assert usage_of(read_partial(CHAT, body[:-3], has_texts=True)) is None


def test_received_texts_are_estimated_without_usage() -> None:
    body = chat('word \\ " é ' * 400)
    weights = [
        read_partial(CHAT, body[:end], has_texts=True).output_estimate for end in (63, len(body) // 2, len(body) - 3)
    ]
    assert weights == sorted(weights)
    whole = CHAT.answer(body).output_estimate
    assert weights[0] < weights[1] < weights[2] <= whole * 1.2
    assert weights[2] > whole * 0.5


@pytest.mark.parametrize("cut", [1, 3, 5_000])
def test_numbers_and_images_are_not_counted(cut: int) -> None:
    vector = json.dumps({"data": [{"embedding": [0.123456] * 20_000}], "model": "e"}).encode()
    assert read_partial(EMBEDDINGS, vector[:-cut], has_texts=False) == ParsedResponse()
    images = endpoint("POST", "images/generations").dialect
    picture = json.dumps({"created": 1, "data": [{"b64_json": "iVBORw0KGgo" * 20_000}]}).encode()
    seen = read_partial(images, picture[:-cut], has_texts=True)
    assert (seen.output_estimate, seen.is_counted) == (0, False)
    assert read_partial(CHAT, chat('the "b64_json": "x"')[:-cut], has_texts=True).is_counted


def test_start_and_end_of_a_long_body_are_enough() -> None:
    body = json.dumps({"data": [{"embedding": [0.5] * 1_000_000}], "usage": {"prompt_tokens": 9, "total_tokens": 9}})
    partial = PartialBody(EMBEDDINGS, has_texts=False)
    for start in range(0, len(body), 10_000):
        partial.feed(body[start : start + 10_000].encode())
    answer = partial.answer()
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.output_estimate) == (9, 0)


def test_body_without_usage_has_none() -> None:
    for body in (
        b"",
        b"{",
        b'{"usage"',
        b'{"usage":{' * 50,
        b'{"usage": null' + b" " * 99,
        b'\xef\xbb\xbf [{"usage": 7',
    ):
        assert read_partial(CHAT, body, has_texts=True) == ParsedResponse()


def test_body_that_is_not_json_counts_as_text() -> None:
    assert read_partial(CHAT, b"x" * 20_000, has_texts=True).output_estimate == 5_000
    assert read_partial(CHAT, b"x" * 20_000, has_texts=False).output_estimate == 0


FLAWED = {
    "a byte order mark": lambda body: b"\xef\xbb\xbf" + body,
    "bytes after it": lambda body: body + b"\r\n0\r\n",
    "a zero after it": lambda body: body + b"\0",
    "a comma too many": lambda body: body[:-1] + b",}",
    "a raw line end": lambda body: body.replace(b"hello", b"hel\nlo"),
    "nested deep": lambda body: body[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a second object": lambda body: body[:-1] + b"}\n" + body,
}


@pytest.mark.parametrize("flaw", FLAWED)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat("hello" * 40, usage=USAGE)),
        ("completions", json.dumps({"choices": [{"text": "hello" * 40}], "usage": USAGE}).encode()),
        ("messages", json.dumps({"content": [{"type": "text", "text": "hello" * 40}], "usage": USAGE}).encode()),
        (
            "responses",
            json.dumps({"output": [{"content": [{"type": "t", "text": "hello" * 40}]}], "usage": USAGE}).encode(),
        ),
        ("rerank", json.dumps({"content": "hello" * 40, "usage": USAGE}).encode()),
    ],
)
def test_complete_body_with_a_flaw_is_read(path: str, body: bytes, flaw: str) -> None:
    dialect = endpoint("POST", path).dialect
    flawed = FLAWED[flaw](body)
    assert usage_of(read_whole(dialect, flawed, has_texts=True)) == (100, 40)
    bare = FLAWED[flaw](body.replace(b'"usage"', b'"none"'))
    assert usage_of(read_whole(dialect, bare, has_texts=True)) is None
    assert read_whole(dialect, bare, has_texts=True).output_estimate >= 50


def test_complete_body_without_json_or_usage_is_not_searched() -> None:
    ranked = json.dumps({"created": 1, "data": [{"score": 1, "document": {"text": "hello"}}]}).encode()
    for body in (b"", b"{}", b"null", b"<html>hello</html>", ranked):
        assert read_whole(endpoint("POST", "rerank").dialect, body, has_texts=True) == ParsedResponse()
