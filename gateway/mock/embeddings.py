"""Respond to OpenAI embeddings: `POST /v1/embeddings`."""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from gateway.mock.completions import input_tokens, inputs
from gateway.mock.wire import JsonObject, MockResponse, MockUsage, Whole, check_model, decode, encode

if TYPE_CHECKING:
    from gateway.mock.provider import MockExchange

DEFAULT_DIMENSIONS: Final = 64
#: 3072 is the maximum of OpenAI's largest model
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=3072)]


class EmbeddingRequest(msgspec.Struct):
    """The fields of an embedding request that the mock provider uses."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = None


def respond(exchange: MockExchange) -> MockResponse:
    """Respond to an embedding request with one unit vector for each input, made from the digest of the input."""
    body = decode(exchange.request.body, EmbeddingRequest)
    check_model(body.model)
    items = inputs(body.input)
    usage = MockUsage(exchange.settle(MockUsage(sum(map(input_tokens, items)), 0)).input, 0)
    data = []
    for index, item in enumerate(items):
        values = _vector(encode(item), body.dimensions or DEFAULT_DIMENSIONS)
        encoded: object = values
        if body.encoding_format == "base64":
            encoded = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    content: JsonObject = {"object": "list", "data": data, "model": body.model}
    if exchange.shows_usage:
        content["usage"] = {"prompt_tokens": usage.input, "total_tokens": usage.total}
    return Whole(content, body.model, usage)


def _vector(data: bytes, dimensions: int) -> list[float]:
    """Return a vector of length 1 with `dimensions` components; always the same for the same data."""
    raw = hashlib.shake_128(data).digest(dimensions)
    values = [byte - 127.5 for byte in raw]
    norm = math.sqrt(sum(value * value for value in values))
    return [value / norm for value in values]
