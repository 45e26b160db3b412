"""Audio in responses: its token estimate, and whether a call asks for audio."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gateway.dialects.audio import AudioCounter, asks_for_more_than_text
from gateway.dialects.choices import CHAT_FORM, ChoicesReader
from gateway.dialects.fields import read_fields
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.dialects.passthrough import PassThroughReader

#: one second of 24 kHz in 16 bits, and one second of 16 kbit/s
PCM = base64.b64encode(b"\x01\x00" * 24_000).decode()
PACKED = 2_000


def compressed(head: bytes) -> str:
    return base64.b64encode(head + bytes(PACKED - len(head))).decode()


def counted(*pieces: str) -> float:
    sound = AudioCounter()
    return sum(map(sound.tokens, pieces))


@pytest.mark.parametrize(
    "second",
    [
        PCM,
        base64.b64encode(b"RIFF" + b"\x00" * 47_996).decode(),
        base64.b64encode(b"\xff\xff" * 24_000).decode(),
        *map(compressed, (b"ID3", b"OggS", b"fLaC", b"\xff\xfb", b"\xff\xf3", b"\xff\xf1", b"\xff\xf9")),
        *map(compressed, (b"\x00\x00\x00\x1cftyp", b"\x1aE\xdf\xa3")),
    ],
    ids=lambda text: text[:8],
)
def test_one_second_of_audio_is_twenty_tokens(second: str) -> None:
    assert counted(second) == pytest.approx(20, rel=0.01)
    size = len(second) // 7
    assert counted(*(second[start : start + size] for start in range(0, len(second), size))) == pytest.approx(
        20, rel=0.01
    )


def test_empty_data_does_not_decide_the_audio_format() -> None:
    assert counted("", compressed(b"OggS")) == pytest.approx(20, rel=0.01)


def chat(*parts: dict[str, Any]) -> int:
    reader = ChoicesReader(CHAT_FORM, drop_usage=False)
    for part in parts:
        reader.read(json.dumps({"choices": [{"index": 0, "delta": part}]}).encode())
    return reader.answer().output_estimate


def test_audio_and_transcript_are_counted_in_a_chat_stream() -> None:
    assert chat({"audio": {"id": "a", "transcript": "x" * 80}}) == 20
    assert chat({"audio": {"id": "a", "data": PCM}}) == 20
    assert chat(*[{"audio": {"data": PCM, "transcript": "x" * 8}}] * 10) == 220


@pytest.mark.parametrize("audio", [None, 7, "x" * 80, [], {}, {"data": 7, "transcript": None}, {"data": None}])
def test_other_values_are_not_counted_as_audio(audio: object) -> None:
    assert chat({"audio": audio}) == 0


def test_audio_is_counted_in_a_whole_response() -> None:
    audio = {"id": "a", "data": PCM, "transcript": "x" * 80, "expires_at": 1}
    reader = ChoicesReader(CHAT_FORM, drop_usage=False)
    reader.read(json.dumps({"choices": [{"message": {"content": None, "audio": audio}}]}).encode())
    assert reader.answer().output_estimate == 40


def test_audio_is_counted_on_an_unknown_path() -> None:
    for name in ("delta", "message"):
        reader = PassThroughReader()
        reader.read(json.dumps({"choices": [{name: {"audio": {"data": PCM, "transcript": "x" * 80}}}]}).encode())
        assert reader.answer().output_estimate == 40


def test_audio_is_counted_once_in_a_responses_response() -> None:
    dialect = OpenAIResponses()
    part = {"type": "output_audio", "data": PCM, "transcript": "x" * 80}
    item = {"id": "i", "type": "message", "content": [part]}
    call = dialect.read(b'{"model":"m","input":"hi"}')
    for kind in ("audio", "output_audio"):
        reader = dialect.reader(call, drop_usage=False)
        said = {"output_index": 0, "item_id": "i"}
        reader.read(json.dumps({"type": f"response.{kind}.delta", "delta": PCM, **said}).encode())
        assert reader.answer().output_estimate == 20
        for name in (f"{kind}.transcript", f"{kind}_transcript"):
            reader.read(json.dumps({"type": f"response.{name}.delta", "delta": "x" * 40, **said}).encode())
        assert reader.answer().output_estimate == 40
        done = {"type": "response.output_item.done", "output_index": 0, "item": item}
        reader.read(json.dumps(done).encode())
        assert reader.answer().output_estimate == 40
    assert dialect.answer(json.dumps({"output": [item]}).encode()).output_estimate == 40


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ({}, False),
        ({"modalities": ["text"], "audio": None}, False),
        ({"modalities": None}, False),
        ({"modalities": ["text", "audio"]}, True),
        ({"modalities": ["image", "text"]}, True),
        ({"modalities": "audio"}, True),
        ({"output_modalities": ["audio"]}, True),
        ({"audio": {"voice": "alloy", "format": "pcm16"}}, True),
        ({"modalities": ["text"] * 100_000}, True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_request_may_ask_for_more_than_text(body: dict[str, Any], asks: bool) -> None:
    assert asks_for_more_than_text(read_fields(json.dumps({"model": "m", **body}).encode())) is asks
