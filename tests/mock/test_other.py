from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import pytest

from gateway.mock import Turn

if TYPE_CHECKING:
    import openai

    from gateway.mock import MockProvider
    from tests.mock.conftest import Http


def test_completions(client: openai.OpenAI, provider: MockProvider) -> None:
    answer = client.completions.create(model="m", prompt="once upon", n=2, echo=True)
    assert [choice.text for choice in answer.choices] == [
        "once uponYou said: once upon",
        "once uponYou said: once upon (choice 2)",
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5 + 9)
    assert provider.billed().total_tokens == 16


def test_completions_streamed(client: openai.OpenAI) -> None:
    with client.completions.create(
        model="m", prompt=["a", "b"], stream=True, max_tokens=3, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["You said:", "You said:"]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 6)


def test_completions_of_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=[[1, 2, 3], [4]])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert len(answer.choices) == 2


def test_embeddings_in_both_encodings(client: openai.OpenAI, provider: MockProvider) -> None:
    compressed = client.embeddings.create(model="m", input=["one two", "three"], dimensions=8)
    plain = client.embeddings.create(model="m", input=["one two", "three"], dimensions=8, encoding_format="float")
    assert [item.index for item in plain.data] == [0, 1]
    for left, right in zip(compressed.data, plain.data, strict=True):
        assert left.embedding == pytest.approx(right.embedding, abs=1e-6)
        assert sum(value * value for value in right.embedding) == pytest.approx(1)
    assert compressed.data[0].embedding != compressed.data[1].embedding
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (3, 3)
    assert provider.billed().input_tokens == 6


def test_embeddings_of_token_ids_and_without_usage(client: openai.OpenAI, web: Http) -> None:
    assert client.embeddings.create(model="m", input=[1, 2, 3]).usage.prompt_tokens == 3
    answer = web.send("POST", "/v1/embeddings", {"model": "m", "input": "x"}, {"x-mock": "usage=none"})
    assert "usage" not in answer.json


def test_models(client: openai.OpenAI, web: Http) -> None:
    assert [model.id for model in client.models.list()] == ["mock-small", "mock-large"]
    assert client.models.retrieve("org/any").id == "org/any"
    assert web.get("/v1/models/missing").status == 404


def test_an_upload_says_its_size(client: openai.OpenAI, provider: MockProvider) -> None:
    data = bytes(range(256)) * 9000 + b"\r\n--"
    file = client.files.create(file=("data.bin", data), purpose="user_data")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "data.bin", "user_data")
    call = provider.calls[-1]
    assert call.body == b""
    assert call.body_bytes > len(data)
    assert len(call.body_sha256) == 64
    assert call.billed is None


def test_an_upload_that_is_not_one(web: Http) -> None:
    assert web.send("POST", "/v1/files", b"x").status == 400
    form = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nvision\r\n--b--\r\n'
    answer = web.send("POST", "/v1/files", form, {"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "file")


def test_speech_is_binary_and_not_billed(client: openai.OpenAI, provider: MockProvider) -> None:
    answer = client.audio.speech.create(model="m", voice="alloy", input="say this", response_format="wav")
    assert answer.content == bytes(range(256)) * 2
    assert answer.response.headers["content-type"] == "audio/wav"
    assert provider.billed().calls == 0


def test_transcriptions(client: openai.OpenAI, provider: MockProvider) -> None:
    sound = io.BytesIO(b"\0" * 5000)
    sound.name = "sound.wav"
    answer = client.audio.transcriptions.create(model="m", file=sound, prompt="two words")
    assert answer.text == "A recording of 5000 bytes."
    assert answer.usage is not None
    assert answer.usage.type == "tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 6)
    assert provider.billed().total_tokens == 13
    provider.push(Turn(text="scripted"))
    sound.seek(0)
    plain = client.audio.transcriptions.create(model="m", file=sound, response_format="text")
    assert str(plain).strip() == "scripted"


def test_images(client: openai.OpenAI, provider: MockProvider) -> None:
    answer = client.images.generate(prompt="a red dot", n=2, model="m")
    assert answer.data is not None
    assert len(answer.data) == 2
    assert base64.b64decode(answer.data[0].b64_json or "", validate=True).startswith(b"\x89PNG")
    assert answer.usage is not None
    assert answer.usage.total_tokens == provider.billed().total_tokens == 3 + 2 * 272
