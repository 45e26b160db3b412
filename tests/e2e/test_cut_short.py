"""Streams that a budget ends early, and streams that break, as the official SDKs read them.

Recorded streams are replayed up to an event and ended there by their dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.core.errors import UpstreamProtocolError
from gateway.core.http.sse import split_events
from gateway.dialects import endpoint
from gateway.dialects.base import ParsedResponse, StreamMeter
from tests.support.scripted import SSE_HEAD, ByteServer, Connection

FOLDER = Path(__file__).parent.parent / "dialects" / "streams"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": []},
    "completions": {"model": "m", "prompt": "hi"},
    "messages": {"model": "m", "messages": [], "max_tokens": 9},
    "responses": {"model": "m", "input": "hi there"},
}
RECORDED = {
    "openai-chat-text": "chat/completions",
    "openai-completion": "completions",
    "anthropic-text": "messages",
    "anthropic-redacted-thinking": "messages",
    "llamacpp-messages": "messages",
    "openai-responses-text": "responses",
    "openai-responses-usage": "responses",
    "azure-responses-text": "responses",
}


def of(*paths: str) -> pytest.MarkDecorator:
    """Return a parametrization over every event of every recorded stream of these paths."""
    cases = []
    for name, path in RECORDED.items():
        count = len(split_events((FOLDER / f"{name}.sse").read_bytes()))
        cases += [pytest.param(name, at, id=f"{name} {at}") for at in range(count - 1) if path in paths]
    return pytest.mark.parametrize(("name", "at"), cases)


def metered(name: str, at: int) -> tuple[bytes, StreamMeter]:
    """Return the bytes that a client has received after `at` events, and their meter."""
    path = RECORDED[name]
    dialect = endpoint("POST", path).dialect
    call = dialect.read(json.dumps({**BODIES[path], "stream": True}).encode())
    meter = StreamMeter(dialect.reader(call, drop_usage=True))
    events = split_events((FOLDER / f"{name}.sse").read_bytes())[:at]
    return b"".join(map(meter.feed, events)), meter


Replay = Callable[[bytes], str]


@pytest.fixture(scope="module")
def replay() -> Iterator[Replay]:
    """Yield a function that makes a server send these events and returns its URL."""

    def nothing(connection: Connection) -> None:
        del connection

    server = ByteServer(nothing).__enter__()

    def play(events: bytes) -> str:
        server.script = lambda connection: connection.send(SSE_HEAD + events)
        return server.url

    yield play
    server.__exit__()


def ended(name: str, at: int, replay: Replay) -> tuple[str, ParsedResponse]:
    """Return the URL of a stream that is ended after `at` events, and its parsed response."""
    passed, meter = metered(name, at)
    return replay(passed + meter.end_at_limit()), meter.response()


@pytest.fixture(scope="module")
def sdk() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url="http://127.0.0.1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url="http://127.0.0.1", api_key="any", max_retries=0) as client:
        yield client


@of("chat/completions", "completions")
def test_a_choices_stream_that_is_ended_early_has_one_finish_reason(
    name: str, at: int, replay: Replay, sdk: openai.OpenAI
) -> None:
    url, answer = ended(name, at, replay)
    client = sdk.with_options(base_url=url)
    chunks: Any = (
        client.completions.create(model="m", prompt="hi", stream=True)
        if RECORDED[name] == "completions"
        else client.chat.completions.create(model="m", messages=[], stream=True)
    )
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [answer.finish_reason]


@of("messages")
def test_a_message_stream_that_is_ended_early_is_valid_for_the_sdk(
    name: str, at: int, replay: Replay, claude: anthropic.Anthropic
) -> None:
    url, answer = ended(name, at, replay)
    with claude.with_options(base_url=url).messages.stream(model="m", max_tokens=9, messages=[]) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert events[-1].type == "message_stop"
    assert message.stop_reason == answer.finish_reason
    if answer.finish_reason == "max_tokens" and answer.usage is not None and answer.usage.output_tokens is None:
        assert message.usage.output_tokens == answer.output_estimate
    text = "".join(event.text for event in events if event.type == "text")
    assert "".join(block.text for block in message.content if block.type == "text") == text
    type(message).model_validate(message.to_dict())


@of("responses")
def test_a_response_stream_that_is_ended_early_is_incomplete_for_the_sdk(
    name: str, at: int, replay: Replay, sdk: openai.OpenAI
) -> None:
    url, answer = ended(name, at, replay)
    events = list(sdk.with_options(base_url=url).responses.create(model="m", input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    response = last.response
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage is not None
    assert response.usage.output_tokens == answer.output_estimate
    assert response.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(item.arguments for item in response.output if item.type == "function_call") == "".join(arguments)
    type(response).model_validate(response.to_dict())
    with sdk.with_options(base_url=url).responses.stream(model="m", input="hi") as stream:
        *_, final = stream
    assert final.type == "response.incomplete"
    assert final.response.output == response.output


@pytest.mark.parametrize("name", ["openai-chat-text", "openai-completion", "openai-responses-text"])
@pytest.mark.parametrize("at", [0, 3])
def test_an_openai_stream_that_breaks_raises_in_the_sdk(name: str, at: int, replay: Replay, sdk: openai.OpenAI) -> None:
    passed, _ = metered(name, at)
    path = RECORDED[name]
    url = replay(passed + endpoint("POST", path).dialect.error_event(UpstreamProtocolError("it broke off"), "r"))
    with pytest.raises(openai.APIError, match="it broke off") as caught:
        list(sdk.with_options(base_url=url).post(f"/{path}", body=BODIES[path], cast_to=object, stream=True,
                                                stream_cls=openai.Stream[object]))  # fmt: skip
    assert caught.value.code == "upstream_protocol_error"


@pytest.mark.parametrize("at", [0, 4])
def test_an_anthropic_stream_that_breaks_raises_in_the_sdk(
    at: int, replay: Replay, claude: anthropic.Anthropic
) -> None:
    passed, _ = metered("anthropic-text", at)
    url = replay(passed + endpoint("POST", "messages").dialect.error_event(UpstreamProtocolError("it broke off"), "r"))
    with pytest.raises(anthropic.APIStatusError, match="it broke off"):
        list(claude.with_options(base_url=url).messages.create(model="m", max_tokens=9, messages=[], stream=True))
