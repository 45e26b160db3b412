"""A session's totals are the sum of the usage that the provider reported and billed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gateway.mock import MockProvider, MockServer, Turn
from gateway.mock.turns import Behaviour
from tests.conftest import Scripted, StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import DONE, SSE_HEAD, Connection, chunk, completion
from tests.support.web import CHAT, HI, Web, parse_usage

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
]


def billed(provider: MockProvider) -> tuple[int, int, int]:
    ledger = provider.billed()
    return ledger.input_tokens, ledger.output_tokens, ledger.total_tokens


def test_a_session_of_twenty_calls_has_the_totals_that_the_provider_billed(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    reported = [0, 0, 0]
    messages: list[Any] = [{"role": "system", "content": "You answer briefly. " * 20}]

    def add(usage: Any) -> None:
        for index, value in enumerate((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)):
            reported[index] += value

    with openai.OpenAI(
        base_url=gateway.base_url, api_key="any", max_retries=0, default_headers={"x-session-id": "agent-1"}
    ) as client:
        for number in range(20):
            messages.append({"role": "user", "content": f"question {number}: what is {number} + {number}?"})
            tools: Any = {"tools": TOOLS} if number % 3 == 0 else {}
            if number % 2:
                stream = client.chat.completions.create(
                    model="mock-small",
                    messages=messages,
                    stream=True,
                    stream_options={"include_usage": True},
                    **tools,
                )
                *_, last = list(stream)
                add(last.usage)
                messages.append({"role": "assistant", "content": "an answer"})
                continue
            raw = client.chat.completions.with_raw_response.create(model="mock-small", messages=messages, **tools)
            completion = raw.parse()
            add(completion.usage)
            message = completion.choices[0].message
            messages.append(message.to_dict())
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "found"})
            shown = raw.headers["x-session-cumulative-token-usage"]
            assert parse_usage(shown) == tuple(reported)
            assert raw.headers["x-session-cumulative-total-tokens"] == str(reported[2])
            assert raw.headers["x-session-cumulative-input-tokens"] == str(reported[0])
            assert raw.headers["x-session-cumulative-output-tokens"] == str(reported[1])
            assert raw.headers["x-session-cumulative-calls"] == str(number + 1)
            assert raw.headers["x-session-usage-final"] == "true"
            assert raw.headers["x-session-usage-source"] == "provider"
            usage = completion.usage
            assert usage is not None
            own = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
            assert parse_usage(raw.headers["x-token-usage"]) == own
    assert tuple(reported) == billed(mock)
    view = gateway.web.get("/api/sessions/agent-1").json
    assert view["calls"] == 20
    assert "search" in view["recent_tools"]
    usage_view = view["cumulative_token_usage"]
    assert (usage_view["input_tokens"], usage_view["output_tokens"], usage_view["total_tokens"]) == billed(mock)
    assert usage_view["estimated_tokens"] == 0
    assert 0 < usage_view["cache_read_tokens"] < usage_view["input_tokens"]

    gateway.stop()
    again = gateway_server(mock_server.url, folder=gateway.folder)
    assert again.web.get("/api/sessions/agent-1").json == view
    answer = again.web.stream("agent-1")
    assert answer.totals == billed(mock)
    assert again.web.get("/api/sessions/agent-1").json["calls"] == 21


def test_a_stream_has_earlier_totals_in_its_headers_and_new_totals_in_its_last_comment(
    web: Web, mock: MockProvider, session: str
) -> None:
    before = web.chat(session).totals
    answer = web.stream(session)
    assert answer.header("x-session-usage-final") == "false"
    assert parse_usage(answer.header("x-session-cumulative-token-usage") or "") == before
    assert answer.header("x-token-usage") is None
    assert answer.totals == billed(mock)
    assert answer.comments["x-session-usage-source"] == "provider"
    own = parse_usage(answer.comments["x-token-usage"])
    assert tuple(a + b for a, b in zip(before, own, strict=True)) == answer.totals
    # The comment precedes the end mark, so that a client that stops reading at the end mark has seen the comment.
    assert answer.body.index(b": x-session-cumulative") < answer.body.index(b"data: [DONE]")
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_stream_totals_off_adds_no_comment_to_streams(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.stream_totals": "off"})
    answer = gateway.web.stream("s")
    assert answer.comments == {}
    assert gateway.web.chat("s").totals == billed(mock)


@pytest.mark.parametrize("requested", [True, False])
@pytest.mark.parametrize("placement", ["trailing", "finish", "running", "groq", "groq_both", "twice"])
def test_usage_counts_once_at_any_position_in_a_stream(
    placement: str, requested: bool, web: Web, mock: MockProvider, session: str
) -> None:
    options = {"stream_options": {"include_usage": True}} if requested else {}
    answer = web.stream(session, f"usage={placement};chunks=5;tokens=100/20", **options)
    assert answer.totals == billed(mock) == (100, 20, 120)
    assert answer.comments["x-session-usage-source"] == "provider"
    assert web.chat(session).totals == billed(mock)


@pytest.mark.parametrize("placement", ["trailing", "groq", "groq_both"])
def test_usage_counts_once_at_any_position_in_a_response(
    placement: str, web: Web, mock: MockProvider, session: str
) -> None:
    answer = web.chat(session, f"usage={placement};tokens=100/20")
    assert answer.totals == billed(mock) == (100, 20, 120)
    assert answer.header("x-session-usage-source") == "provider"


@pytest.mark.parametrize("stream", [True, False])
def test_missing_usage_is_estimated_and_marked_as_estimated(stream: bool, web: Web, session: str) -> None:
    answer = web.chat(session, "usage=none;chunks=40", stream=stream)
    source = answer.comments["x-session-usage-source"] if stream else answer.header("x-session-usage-source")
    assert source == "estimated"
    view = web.get(f"/api/sessions/{session}").json["cumulative_token_usage"]
    assert view["input_tokens"] > 0
    assert view["output_tokens"] >= 40
    assert view["estimated_tokens"] == view["total_tokens"]
    assert web.chat(session).header("x-session-usage-source") == "mixed"


def test_missing_usage_counts_zero_if_configured(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.usage_missing": "zero"})
    answer = gateway.web.chat("s", "usage=none")
    assert answer.totals == (0, 0, 0)
    assert answer.header("x-session-cumulative-calls") == "1"


@pytest.mark.parametrize("stream", [True, False])
def test_usage_of_zero_is_not_treated_as_missing(stream: bool, web: Web, session: str) -> None:
    answer = web.chat(session, "tokens=0/0", stream=stream)
    assert answer.totals == (0, 0, 0)
    view = web.get(f"/api/sessions/{session}").json
    assert view["calls"] == 1
    assert view["usage_source"] == "provider"


def test_all_choices_and_parallel_tool_calls_are_counted_once(web: Web, mock: MockProvider, session: str) -> None:
    web.chat(session, n=3)
    web.stream(session, n=3)
    messages = [{"role": "user", "content": "use tools in parallel"}]
    other = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
    for stream in (True, False):
        body = {"model": "mock-small", "messages": messages, "tools": [*TOOLS, other], "stream": stream}
        assert web.post(CHAT, body, {"x-session-id": session}).status == 200
    assert web.get(f"/api/sessions/{session}").json["recent_tools"] == ["search", "fetch"] * 2
    assert web.chat(session).totals == billed(mock)


def test_calls_with_the_same_request_id_are_all_charged(web: Web, mock: MockProvider, session: str) -> None:
    headers = {"x-session-id": session, "x-request-id": "same", "idempotency-key": "same"}
    body = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}]}
    answers = [web.post(CHAT, body, headers) for _ in range(3)]
    assert mock.billed().calls == 3
    assert answers[-1].totals == billed(mock)
    assert answers[-1].header("x-gateway-request-id") == "same"


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        "12",
        {},
        {"prompt_tokens": -5, "completion_tokens": -5, "total_tokens": -10},
        {"prompt_tokens": True, "completion_tokens": False},
        {"prompt_tokens": "7", "completion_tokens": [], "total_tokens": {}},
        {"prompt_tokens": 1.5, "completion_tokens": None},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_invalid_usage_is_estimated(usage: object, stream: bool, scripted: Scripted, session: str) -> None:
    def script(connection: Connection) -> None:
        if stream:
            connection.send(SSE_HEAD + chunk("hello there") + chunk(choices=[], usage=usage) + DONE)
        else:
            connection.whole(completion(usage=usage))

    web = scripted.play(script)
    answer = web.chat(session, stream=stream)
    assert answer.status == 200
    view = web.get(f"/api/sessions/{session}").json
    assert view["usage_source"] == "estimated"
    assert view["cumulative_token_usage"]["output_tokens"] > 0
    assert view["cumulative_token_usage"]["input_tokens"] > 0


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1" + b"0" * 400, b"-0", b"1e3"])
@pytest.mark.parametrize("stream", [True, False])
def test_invalid_json_numbers_in_usage_do_not_break_the_response(
    number: bytes, stream: bool, scripted: Scripted, session: str
) -> None:
    usage = {"prompt_tokens": "@", "completion_tokens": 5}
    whole = completion(usage=usage).replace(b'"@"', number)
    event = chunk(choices=[], usage=usage).replace(b'"@"', number)

    def script(connection: Connection) -> None:
        if stream:
            connection.send(SSE_HEAD + chunk("hello") + event + DONE)
        else:
            connection.whole(whole)

    web = scripted.play(script)
    answer = web.chat(session, stream=stream)
    assert answer.status == 200
    if not stream:
        assert answer.body == whole
    tokens_in, tokens_out, total = answer.totals
    assert tokens_out == 5
    assert 0 <= tokens_in <= 2**53
    assert total >= tokens_in + tokens_out


def test_the_usage_of_a_scripted_turn_is_charged(web: Web, mock: MockProvider, session: str) -> None:
    mock.push(Turn(text="one", usage=(7, 3)), Turn(text="two", behaviour=Behaviour(tokens=(11, 2))))
    web.chat(session)
    assert web.chat(session).totals == (18, 5, 23)


def test_a_refused_call_still_reports_the_totals(web: Web, gateway: GatewayThread, session: str) -> None:
    totals = web.chat(session).totals
    refused = web.post(CHAT, b"not json", {"x-session-id": session})
    assert refused.status == 400
    assert refused.totals == totals
    assert refused.header("x-session-id") == session
    assert refused.header("x-session-usage-final") == "true"


def test_caching_for_an_hour_costs_more_than_for_five_minutes(
    gateway_server: StartGateway, byte_server: Any, session: str
) -> None:
    kinds = iter([(1_000_000, 0), (0, 1_000_000)])

    def script(connection: Connection) -> None:
        minutes, hour = next(kinds)
        usage = {
            "input_tokens": 0,
            "cache_creation_input_tokens": minutes + hour,
            "cache_creation": {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour},
            "output_tokens": 0,
        }
        message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-opus-4-6", "content": []}
        connection.whole(json.dumps({**message, "stop_reason": "end_turn", "usage": usage}).encode())

    provider = {"base_url": byte_server(script).url + "/v1", "key": "k"}
    flags = {"built_in_providers": True, "providers": {"anthropic": provider}, "default_provider": "anthropic"}
    web = gateway_server(provider["base_url"], **flags).web
    body = {"model": "claude-opus-4-6", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(2):
        assert web.post("/v1/messages", body, {"x-session-id": session}).status == 200
    calls = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert sorted(float(call["cost_usd"]) for call in calls) == [6.25, 10.0]


# --- a provider that reports the cost of a call -------------------------------------------------------------------

OPENROUTER_USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "cost": 0.0125,
    "is_byok": False,
    "cost_details": {"upstream_inference_cost": 0.0125},
}


XAI_USAGE = {
    "prompt_tokens": 429,
    "completion_tokens": 44,
    "total_tokens": 975,
    "completion_tokens_details": {"reasoning_tokens": 502},
    "cost_in_usd_ticks": 8702400,
}


def reports_cost(connection: Connection) -> None:
    if not connection.request.json.get("stream"):
        connection.whole(completion(usage=OPENROUTER_USAGE))
        return
    connection.send(SSE_HEAD + chunk("hello") + chunk(choices=[], usage=OPENROUTER_USAGE) + DONE)


def reports_ticks(connection: Connection) -> None:
    if not connection.request.json.get("stream"):
        connection.whole(completion(usage=XAI_USAGE))
        return
    connection.send(SSE_HEAD + chunk("hello") + chunk(choices=[], usage=XAI_USAGE) + DONE)


@pytest.mark.parametrize("stream", [False, True])
def test_the_cost_ticks_that_xai_reports_are_charged(
    gateway_server: StartGateway, byte_server: StartUpstream, stream: bool
) -> None:
    upstream = byte_server(reports_ticks)
    gateway = gateway_server(
        upstream.url,
        built_in_providers=True,
        **{"providers.xai": {"base_url": upstream.url, "auth": "none", "key": ""}},
    )
    body = {"model": "xai/grok-code-fast-1", "messages": HI, "stream": stream}
    assert gateway.web.post("/v1/chat/completions", body, {"x-session-id": "s"}).status == 200
    assert float(gateway.web.get("/api/sessions/s").json["cost_usd"]) == pytest.approx(0.00087)


@pytest.mark.parametrize(
    ("requested", "reported_tier", "usd"),
    [("priority", None, 200), ("priority", "default", 100), ("flex", None, 100), ("flex", "flex", 50)],
)
def test_the_requested_service_tier_is_charged_if_the_response_names_none(
    gateway_server: StartGateway, byte_server: StartUpstream, requested: str, reported_tier: str | None, usd: float
) -> None:
    """gpt-5.4 costs 2.50 and 15 USD per million input and output tokens; `priority` doubles and `flex` halves that."""
    upstream = byte_server(
        lambda connection: connection.whole(completion(**({"service_tier": reported_tier} if reported_tier else {})))
    )
    openai = {"base_url": upstream.url, "auth": "none", "key": ""}
    gateway = gateway_server(upstream.url, built_in_providers=True, **{"providers.openai": openai})
    body = {"model": "openai/gpt-5.4", "messages": HI, "service_tier": requested}
    assert gateway.web.post("/v1/chat/completions", body, {"x-session-id": "s"}).status == 200
    assert float(gateway.web.get("/api/sessions/s").json["cost_usd"]) == pytest.approx(usd / 10**6, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("provider", "usd"), [("openrouter", 0.0125), ("another", 0.00002)])
def test_a_reported_cost_is_charged_only_from_openrouter(
    gateway_server: StartGateway, byte_server: StartUpstream, stream: bool, provider: str, usd: float
) -> None:
    upstream = byte_server(reports_cost)
    gateway = gateway_server(
        upstream.url,
        built_in_providers=True,
        models=[{"match": "m", "provider": provider, "price": {"input": 1, "output": 2}}],
        **{
            "providers.openrouter": {"base_url": upstream.url, "auth": "none", "key": ""},
            "providers.another": {"base_url": upstream.url, "auth": "none"},
        },
    )
    body = {"model": "m", "messages": HI, "stream": stream}
    assert gateway.web.post("/v1/chat/completions", body, {"x-session-id": "s"}).status == 200
    assert float(gateway.web.get("/api/sessions/s").json["cost_usd"]) == usd
