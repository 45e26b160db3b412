"""Runaway protection with real ports and the official SDKs: loops, work without user input, limits in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import openai
import pytest
from websockets.sync.client import connect

from gateway.mock import MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway
from tests.support.commands import Commands
from tests.support.gateways import GatewayThread, until
from tests.support.receiver import Receiver, serving
from tests.support.timing import LIMIT_S
from tests.support.web import CHAT

Json = dict[str, Any]
Rounds = Sequence[tuple[str, Json, str]]
READ = ("read_file", {"path": "a.txt"}, "no such file")
#: a request of each format for a task and its rounds, with the SDK: returns the headers of the response
Ask = Callable[[GatewayThread, str, Rounds, bool], dict[str, str]]


def chat_messages(task: str, rounds: Rounds) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": "Work."}, {"role": "user", "content": task}]
    for number, (name, arguments, result) in enumerate(rounds):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
        ]
    return messages


def claude_messages(task: str, rounds: Rounds) -> list[Json]:
    messages: list[Json] = [{"role": "user", "content": task}]
    for number, (name, arguments, result) in enumerate(rounds):
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result}]},
        ]
    return messages


def input_items(task: str, rounds: Rounds) -> list[Json]:
    items: list[Json] = [{"type": "message", "role": "user", "content": task}]
    for number, (name, arguments, result) in enumerate(rounds):
        items += [
            {
                "type": "function_call",
                "call_id": f"call_{number}",
                "name": name,
                "arguments": json.dumps(arguments),
            },
            {"type": "function_call_output", "call_id": f"call_{number}", "output": result},
        ]
    return items


def _headers(session: str) -> dict[str, str]:
    return {"x-session-id": session}


def ask_chat(gateway: GatewayThread, task: str, rounds: Rounds, stream: bool) -> dict[str, str]:
    with openai.OpenAI(base_url=gateway.base_url, api_key="k") as client:
        fields: Json = {"model": "mock-small", "messages": chat_messages(task, rounds), "stream": stream}
        raw = client.chat.completions.with_raw_response.create(**fields, extra_headers=_headers("s"))
        return _drained(raw)


def ask_responses(gateway: GatewayThread, task: str, rounds: Rounds, stream: bool) -> dict[str, str]:
    with openai.OpenAI(base_url=gateway.base_url, api_key="k") as client:
        fields: Json = {"model": "mock-small", "input": input_items(task, rounds), "stream": stream}
        raw = client.responses.with_raw_response.create(**fields, extra_headers=_headers("s"))
        return _drained(raw)


def ask_claude(gateway: GatewayThread, task: str, rounds: Rounds, stream: bool) -> dict[str, str]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="k") as client:
        fields: Json = {"model": "mock-small", "messages": claude_messages(task, rounds), "stream": stream}
        raw = client.messages.with_raw_response.create(**fields, max_tokens=50, extra_headers=_headers("s"))
        return _drained(raw)


def _drained(raw: Any) -> dict[str, str]:
    """Read a response to its end and return its headers."""
    response = raw.parse()
    if not hasattr(response, "model_dump"):
        for _ in response:
            pass
    return dict(raw.headers)


FORMATS = pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_claude])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving(Receiver()) as made:
        yield made


@FORMATS
@STREAMS
def test_a_loop_is_warned_and_then_refused_until_the_user_writes_again(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, ask: Ask, stream: bool
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop": {"warn": 3, "refuse": 5}})
    assert "x-session-warning" not in ask(gateway, "go", [READ] * 2, stream)
    assert ask(gateway, "go", [READ] * 3, stream)["x-session-warning"] == "loop=3"
    assert ask(gateway, "go", [READ] * 4, stream)["x-session-warning"] == "loop=4"
    before = len(mock.calls)
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
        ask(gateway, "go", [READ] * 5, stream)
    assert isinstance(refused.value, openai.BadRequestError | anthropic.BadRequestError)
    assert len(mock.calls) == before
    text = str(refused.value)
    assert 'Session "s" is stopped: the same call (read_file) had the same result 5 times in a row' in text
    assert "limit 5, runaway.loop.refuse" in text
    assert "POST /api/sessions/s/resume" in text
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert refused.value.response.headers["x-session-warning"] == "loop=5"
    record = gateway.web.get("/api/sessions/s/calls").json["calls"][0]
    assert (record["outcome"], record["error_code"]) == ("refused", "session_stopped")
    assert "5 times in a row, runaway.loop.refuse: 5" in record["notes"]["runaway"]
    assert "a.txt" not in json.dumps(record)
    assert "x-session-warning" not in ask(gateway, "another task", [READ], stream)


@FORMATS
def test_a_status_check_with_changing_results_is_no_loop(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, ask: Ask
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop.refuse": 4, "runaway.no_progress.refuse": 4})
    check = [("bash", {"command": "make status"}, f"{number} of 20 done") for number in range(20)]
    sleep = ("bash", {"command": "sleep 30"}, "")
    rounds = [each for one in check for each in (sleep, one)]
    assert "x-session-warning" not in ask(gateway, "wait for the build", rounds, False)


@FORMATS
def test_a_person_resumes_a_stopped_session_and_counting_begins_again(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, ask: Ask
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop.refuse": 4})
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
        ask(gateway, "go", [READ] * 4, False)
    assert gateway.web.get("/api/sessions/s").json["last_stop"] == "loop"
    assert gateway.web.post("/api/sessions/s/resume").json["last_stop"] is None
    for number in (4, 5, 6, 7):
        ask(gateway, "go", [READ] * number, False)
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="4 times in a row"):
        ask(gateway, "go", [READ] * 8, False)
    done = Commands(gateway.folder)("sessions", "resume", "s", "-c", gateway.file)
    assert (done.code, done.err) == (0, "resumed s\n")
    ask(gateway, "go", [READ] * 8, False)


def test_a_loop_of_texts_is_refused_and_resumed_like_one_of_calls(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop": {"warn": 3, "refuse": 5}})
    pair = [{"role": "assistant", "content": "I cannot."}, {"role": "user", "content": "continue"}]

    def status(times: int) -> tuple[int, str | None]:
        reply = gateway.web.chat("s", messages=[{"role": "user", "content": "go"}, *pair * times])
        return reply.status, reply.header("x-session-warning")

    assert [status(times) for times in (2, 3, 4, 5)] == [
        (200, None), (200, "loop=3"), (200, "loop=4"), (400, "loop=5"),
    ]  # fmt: skip
    gateway.web.post("/api/sessions/s/resume")
    assert [status(times) for times in (5, 6, 9, 10)] == [(200, None), (200, None), (200, "loop=4"), (400, "loop=5")]


def test_a_stopped_session_may_be_compacted_by_its_client(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop.refuse": 4})
    body = {"model": "mock-small", "messages": chat_messages("Work.", [("read", {}, "same")] * 5)}
    assert gateway.web.post(CHAT, body, _headers("s")).error["code"] == "session_stopped"
    compaction = {**_headers("s"), "x-claude-code-compaction": "auto"}
    assert gateway.web.post(CHAT, body, compaction).status == 200
    assert gateway.web.post(CHAT, body, _headers("s")).error["code"] == "session_stopped"


def test_resuming_an_unknown_session_is_an_error(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url)
    assert gateway.web.post("/api/sessions/none/resume").status == 404
    gateway.web.chat("other")
    done = Commands(gateway.folder)("sessions", "resume", "none", "-c", gateway.file)
    assert (done.code, "There is no session" in done.err) == (1, True)


def test_a_conversation_without_a_session_is_refused_as_well(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop.refuse": 4, "sessions.on_missing": "none"})
    refused = gateway.web.chat(messages=chat_messages("go", [READ] * 4))
    assert refused.status == 400
    assert refused.error["message"].startswith("This conversation is stopped: the same call (read_file)")
    assert refused.error["message"].endswith("Send a new user message.")
    assert refused.error["runaway"]["count"] == 4


def test_long_work_is_counted_while_the_conversation_grows(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.rounds": {"warn": 20, "refuse": 24}})
    rounds = [("bash", {"command": f"step {number}"}, f"result {number} " * 60) for number in range(24)]
    warned = [ask_chat(gateway, "go", rounds[:number], False).get("x-session-warning") for number in range(1, 24)]
    assert warned == [None] * 19 + [f"rounds={number}" for number in (20, 21, 22, 23)]
    with pytest.raises(openai.BadRequestError, match="24 rounds passed since the last new user message"):
        ask_chat(gateway, "go", rounds, False)


def test_a_limit_in_seconds_counts_from_the_last_user_message(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.seconds": 0.2, "budget.warn_at": 0.0})
    assert ask_chat(gateway, "go", [], False)["x-session-warning"] == "seconds=0"

    def is_refused() -> bool:
        reply = gateway.web.chat("s", messages=chat_messages("go", [READ]))
        return reply.status == 400 and "budget.seconds" in reply.error["message"]

    until(is_refused)
    assert ask_chat(gateway, "a new task", [READ], False)["x-session-warning"] == "seconds=0"
    until(is_refused)
    gateway.web.post("/api/sessions/s/resume")
    assert gateway.web.chat("s", messages=chat_messages("go", [READ])).status == 200


def test_a_limit_in_seconds_of_a_step_begins_again_in_the_next_step(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    steps = [
        {"name": "read", "conditions": [{"not_recently_used": "plan"}], "max_seconds": 0.2},
        {"name": "write", "is_default": True, "max_seconds": 3600},
    ]
    gateway = gateway_server(mock_server.url, steps=steps)
    messages = chat_messages("go", [READ])

    def is_refused() -> bool:
        reply = gateway.web.chat("s", messages=messages)
        return reply.status == 400 and "seconds passed since the step was entered" in reply.error["message"]

    until(is_refused)
    gateway.web.send("PATCH", "/api/sessions/s", {"active_step": "write"})
    assert gateway.web.chat("s", messages=messages).status == 200


def test_a_response_that_the_provider_keeps_continues_the_clock_of_its_session(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.seconds": 0.2})
    mock.push(Turn(tool_calls=(ToolCall("read_file", '{"path": "a.txt"}'),)))
    headers = {"x-session-id": "s"}
    first = gateway.web.post("/v1/responses", {"model": "mock-small", "input": "go"}, headers)
    output = [{"type": "function_call_output", "call_id": "call_0", "output": "none"}]
    body = {"model": "mock-small", "previous_response_id": first.json["id"], "input": output}

    def is_refused() -> bool:
        reply = gateway.web.post("/v1/responses", body, headers)
        return reply.status == 400 and reply.error["code"] == "session_stopped"

    until(is_refused)


def test_a_loop_over_a_websocket_is_found_although_each_message_has_only_new_items(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop": {"warn": 3, "refuse": 4}})
    mock.push(*[Turn(tool_calls=(ToolCall("read_file", '{"path": "a.txt"}'),))] * 8)
    items: list[Json] = [{"type": "message", "role": "user", "content": "go"}]
    previous, answered, error = None, 0, None
    url = f"{gateway.url.replace('http', 'ws')}/v1/responses"
    with connect(url, additional_headers={"x-session-id": "s"}, max_size=None) as socket:
        while error is None and answered < 8:
            body = {"type": "response.create", "model": "mock-small", "store": False, "input": items}
            socket.send(json.dumps(body | ({"previous_response_id": previous} if previous else {})))
            while True:
                event = json.loads(socket.recv(LIMIT_S))
                if event["type"] in ("response.completed", "error"):
                    break
            if event["type"] == "error":
                error = event["error"]
                continue
            answered, previous = answered + 1, event["response"]["id"]
            call = next(item for item in event["response"]["output"] if item["type"] == "function_call")
            items = [{"type": "function_call_output", "call_id": call["call_id"], "output": "no such file"}]
    assert error is not None
    assert (answered, error["code"]) == (4, "session_stopped")


def test_a_webhook_gets_one_event_for_each_threshold(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, receiver: Receiver
) -> None:
    hook = {"url": receiver.url, "events": ["on_runaway"]}
    flags = {"callbacks.webhooks": [hook], "runaway.loop": {"warn": 3, "refuse": 5}}
    gateway = gateway_server(mock_server.url, **flags)
    for number in (1, 2, 3, 4):
        ask_chat(gateway, "go", [READ] * number, False)
    for number in (5, 5, 6):
        assert gateway.web.chat("s", messages=chat_messages("go", [READ] * number)).status == 400
    gateway.stop()
    events = [json.loads(one.body) for one in receiver.requests]
    assert [(one["type"], one["data"]["action"], one["data"]["count"]) for one in events] == [
        ("on_runaway", "warn", 3),
        ("on_runaway", "refuse", 5),
    ]
    assert events[0]["data"]["session"] == "s"
    assert events[0]["data"]["tools"] == [["read_file"]]
    assert "a.txt" not in str(events)


def test_warnings_are_counted_in_the_metrics(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    for number in range(1, 7):
        ask_chat(gateway, "go", [READ] * number, False)
    text = gateway.web.get("/metrics").body.decode()
    assert 'gateway_runaway_warnings_total{kind="loop"} 1' in text


def test_everything_can_be_switched_off(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    off = {f"runaway.{rule}.warn": None for rule in ("loop", "no_progress", "rounds")}
    gateway = gateway_server(mock_server.url, **off)
    assert "x-session-warning" not in ask_chat(gateway, "go", [READ] * 50, False)


def test_a_stopped_session_stays_stopped_after_a_restart(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"runaway.loop.refuse": 4})
    assert gateway.web.chat("s", messages=chat_messages("go", [READ] * 4)).status == 400
    gateway.web.post("/api/sessions/s/resume")
    gateway.stop()
    again = gateway_server(mock_server.url, folder=gateway.folder, **{"runaway.loop.refuse": 4})
    assert again.web.chat("s", messages=chat_messages("go", [READ] * 5)).status == 200
    assert again.web.chat("s", messages=chat_messages("go", [READ] * 8)).status == 400
