"""Respond to the smaller endpoints: models, files, audio and images."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.mock import multipart, tokens
from gateway.mock.windows import MODEL_WINDOWS
from gateway.mock.wire import ApiError, JsonObject, MockResponse, MockUsage, Number, Whole, check_model, decode

if TYPE_CHECKING:
    from gateway.mock.provider import MockExchange

MODELS: Final = tuple(MODEL_WINDOWS)
_MODELS_CREATED: Final = 1_700_000_000

#: A PNG of one pixel.
_PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
_IMAGE_TOKENS: Final = 272
_BYTES_PER_AUDIO_TOKEN: Final = 1_000
_AUDIO_TYPES: Final = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


class SpeechRequest(msgspec.Struct):
    """The fields of a speech request that the mock provider uses."""

    model: str
    input: str
    response_format: str = "mp3"


class ImageRequest(msgspec.Struct):
    """The fields of an image request that the mock provider uses."""

    prompt: str
    model: str = "mock-image"
    n: Number | None = None


def models(exchange: MockExchange) -> MockResponse:
    """List the models, in Anthropic's format for its clients and in OpenAI's for others."""
    if exchange.request.header("anthropic-version"):
        data = [_anthropic_model(name) for name in MODELS]
        return Whole({"data": data, "has_more": False, "first_id": MODELS[0], "last_id": MODELS[-1]})
    return Whole({"object": "list", "data": [_openai_model(name) for name in MODELS]})


def model(exchange: MockExchange) -> MockResponse:
    """Describe one model. Every model exists, except those whose name starts with `missing`."""
    name = exchange.request.path.removeprefix("/v1/models/")
    check_model(name)
    shape = _anthropic_model if exchange.request.header("anthropic-version") else _openai_model
    return Whole(shape(name), name)


def files(exchange: MockExchange) -> MockResponse:
    """Accept an upload and return its size, without storing the file. Nothing is billed."""
    fields = multipart.parse(exchange.request)
    file = multipart.required(fields, "file")
    content: JsonObject = {
        "id": f"file-mock{exchange.number}",
        "object": "file",
        "bytes": len(file.data),
        "created_at": int(time.time()),
        "filename": file.filename,
        "purpose": multipart.required(fields, "purpose").text,
        "status": "processed",
    }
    return Whole(content)


def speech(exchange: MockExchange) -> MockResponse:
    """Respond with bytes instead of real audio, 256 for each token of the text. No tokens are billed."""
    body = decode(exchange.request.body, SpeechRequest)
    check_model(body.model)
    kind = _AUDIO_TYPES.get(body.response_format)
    if kind is None:
        raise ApiError(400, f"Unknown audio format '{body.response_format}'.", param="response_format")
    audio = bytes(range(256)) * max(1, tokens.count(body.input)) + bytes(exchange.behaviour.pad)
    return Whole(audio, body.model, content_type=kind)


def transcriptions(exchange: MockExchange) -> MockResponse:
    """Respond to an upload with a text that names its size. One token is billed for each 1000 bytes."""
    fields = multipart.parse(exchange.request)
    file = multipart.required(fields, "file")
    name = multipart.required(fields, "model").text
    check_model(name)
    prompt = tokens.count(fields["prompt"].text) if "prompt" in fields else 0
    audio = max(1, len(file.data) // _BYTES_PER_AUDIO_TOKEN)
    scripted = exchange.turn.text if exchange.turn else None
    text = scripted if scripted is not None else f"A recording of {len(file.data)} bytes."
    usage = exchange.settle(MockUsage(audio + prompt, tokens.count(text)))
    if "response_format" in fields and fields["response_format"].text == "text":
        return Whole(text.encode() + b"\n", name, usage, content_type="text/plain; charset=utf-8")
    content: JsonObject = {"text": text}
    if exchange.shows_usage:
        content["usage"] = {
            "type": "tokens",
            "input_tokens": usage.input,
            "input_token_details": {"text_tokens": prompt, "audio_tokens": max(0, usage.input - prompt)},
            "output_tokens": usage.output,
            "total_tokens": usage.total,
        }
    return Whole(content, name, usage)


def images(exchange: MockExchange) -> MockResponse:
    """Respond with `n` images of one pixel."""
    body = decode(exchange.request.body, ImageRequest)
    check_model(body.model)
    count = body.n or 1
    usage = exchange.settle(MockUsage(tokens.count(body.prompt), _IMAGE_TOKENS * count))
    picture = base64.b64encode(_PIXEL + bytes(exchange.behaviour.pad)).decode()
    content: JsonObject = {
        "created": int(time.time()),
        "background": "opaque",
        "data": [{"b64_json": picture} for _ in range(count)],
        "output_format": "png",
        "quality": "low",
        "size": "1024x1024",
    }
    if exchange.shows_usage:
        content["usage"] = {
            "input_tokens": usage.input,
            "input_tokens_details": {"text_tokens": usage.input, "image_tokens": 0},
            "output_tokens": usage.output,
            "total_tokens": usage.total,
        }
    return Whole(content, body.model, usage)


def _openai_model(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": _MODELS_CREATED, "owned_by": "mock"}


def _anthropic_model(name: str) -> JsonObject:
    return {"type": "model", "id": name, "display_name": name, "created_at": "2023-11-14T22:13:20Z"}
