"""Parallel streams without a limit share a budget by what such streams usually need, and stay within it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import openai
import pytest
from openai import AsyncOpenAI

from gateway.mock import Behaviour, MockProvider, MockServer, Turn
from gateway.mock.tokens import count
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread

pytestmark = pytest.mark.long

MODEL = "mock-small"
BUDGET, CALLS, MOST_EARLIER, USUAL = 6_000, 50, 100, 60
#: what each ended stream may cost beyond its hold: its last read, in events of about 190 bytes with one token
LAST_READ = 16 * 1024 // 190
SAY: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Say some words."}]


class Answer(NamedTuple):
    text: str
    is_complete: bool


async def chat(client: AsyncOpenAI, session: str) -> Answer:
    finish, text = None, ""
    async with await client.chat.completions.create(
        model=MODEL, messages=SAY, stream=True, extra_headers={"x-session-id": session}
    ) as stream:
        async for part in stream:
            for choice in part.choices:
                text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
    return Answer(text, finish == "stop")


async def response(client: AsyncOpenAI, session: str) -> Answer:
    status, text = None, ""
    async with await client.responses.create(
        model=MODEL, input="Say some words.", stream=True, extra_headers={"x-session-id": session}
    ) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type in {"response.completed", "response.incomplete"}:
                status = event.response.status
    return Answer(text, status == "completed")


async def whole(client: AsyncOpenAI, session: str) -> Answer:
    made = await client.chat.completions.create(model=MODEL, messages=SAY, extra_headers={"x-session-id": session})
    return Answer(made.choices[0].message.content or "", made.choices[0].finish_reason == "stop")


Call = Callable[[AsyncOpenAI, str], Awaitable[Answer]]


@pytest.fixture
def gateway(mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    model = {"match": MODEL, "provider": "upstream", "reasoning": False, "output": 16_000}
    return gateway_server(mock_server.url, models=[model], **{"budget.tokens": BUDGET})


async def shared(gateway: GatewayThread, mock: MockProvider, call: Call, length: int, teacher: Call) -> list[Answer]:
    """Teach the usual length, make parallel calls with another one in one session, and return what was admitted."""

    def turn(words: int, delay: float = 0.0) -> Turn:
        return Turn(" word" * words, behaviour=Behaviour(delay=delay, interval=0.005))

    async with AsyncOpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:

        async def admitted(session: str) -> Answer | None:
            try:
                return await call(client, session)
            except openai.RateLimitError as refused:
                if refused.code != "budget_busy":
                    raise
                return None

        for number in range(MOST_EARLIER):
            if is_known(gateway, f"earlier-{number - 1}"):
                break
            mock.push(turn(USUAL))
            assert (await teacher(client, f"earlier-{number}")).is_complete
        before = len(mock.calls)
        mock.push(*[turn(length, delay=1.0)] * CALLS)
        answers = await asyncio.gather(*[admitted("shared") for _ in range(CALLS)])
    assert len(mock.calls) - before == len([answer for answer in answers if answer is not None])
    return [answer for answer in answers if answer is not None]


def is_known(gateway: GatewayThread, session: str) -> bool:
    """Return whether the call of a session reserved the usual output of its model.

    A stream teaches nothing if it arrives in one piece, which also happens on a busy machine.
    """
    calls = gateway.web.get(f"/api/sessions/{session}/calls").json.get("calls", ())
    return any("reserved" in call["notes"] for call in calls)


def used(gateway: GatewayThread) -> int:
    budget = gateway.web.get("/api/sessions/shared").json["budget"]
    return int(budget["used"]["tokens"])


@pytest.mark.parametrize("call", [chat, response])
async def test_parallel_streams_of_usual_length_share_a_small_budget(
    call: Call, gateway: GatewayThread, mock: MockProvider
) -> None:
    answers = await shared(gateway, mock, call, USUAL, call)
    assert len(answers) >= 15
    assert all(answer.is_complete for answer in answers)
    assert used(gateway) <= BUDGET


@pytest.mark.parametrize("call", [chat, response])
async def test_parallel_streams_of_a_provider_that_suddenly_says_more_stay_within_the_bound(
    call: Call, gateway: GatewayThread, mock: MockProvider
) -> None:
    answers = await shared(gateway, mock, call, 15 * USUAL, call)
    ended = [answer for answer in answers if not answer.is_complete]
    assert ended
    sent = sum(count(answer.text) for answer in answers)
    assert sent <= BUDGET + len(ended) * LAST_READ
    assert used(gateway) <= BUDGET + len(ended) * LAST_READ


async def test_parallel_calls_that_are_not_streamed_reserve_as_before(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    answers = await shared(gateway, mock, whole, 3 * USUAL, chat)
    assert 1 <= len(answers) <= 5
    assert all(answer.is_complete for answer in answers)
    bodies = [json.loads(call.body) for call in mock.calls]
    limits = [body.get("max_tokens") for body in bodies if not body.get("stream")]
    assert all(limit is not None and limit > 3 * USUAL for limit in limits), "no response is cut short"
    assert used(gateway) <= BUDGET
