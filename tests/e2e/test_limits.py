"""Under a budget, no output is longer than what is reserved for it, whichever names of limits a provider knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import ByteServer, Connection, completion
from tests.support.web import CHAT, HI, Reply

Body = dict[str, Any]
#: output tokens of a provider without a limit
ENDLESS = 50_000


class Billing:
    """A provider that writes as much as the body allows by its own reading, and bills 10 input tokens."""

    def __init__(self, reads: Callable[[Body], int | None]) -> None:
        self._reads = reads
        self.bodies: list[Body] = []
        self.billed = 0

    def __call__(self, connection: Connection) -> None:
        body = connection.request.json
        output = min(ENDLESS, self._reads(body) or ENDLESS) * body.get("n", 1)
        self.bodies.append(body)
        self.billed += 10 + output
        usage = {"prompt_tokens": 10, "completion_tokens": output, "total_tokens": 10 + output}
        connection.whole(completion(usage=usage))


def older(body: Body) -> int | None:
    """Read the limit like DeepSeek, Ollama and LM Studio: they know one name and ignore others."""
    return body.get("max_tokens")


def llama(body: Body) -> int | None:
    """Read the limit like llama.cpp's server; a negative number means no limit."""
    limit = body.get("n_predict", body.get("max_tokens", -1))
    return limit if limit is not None and limit >= 0 else None


def ask(gateway: GatewayThread, path: str = CHAT, **fields: Any) -> Reply:
    return gateway.web.post(path, {"model": "m", "messages": HI, **fields}, {"x-session-id": "s"})


def used(gateway: GatewayThread) -> Any:
    return gateway.web.get("/api/sessions/s").json["budget"]["used"]


# --- the names of limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "limit"), [(2_000, 100), (300, 4_000)])
def test_an_output_limit_is_renamed_to_the_field_that_the_provider_knows(
    byte_server: StartUpstream, gateway_server: StartGateway, budget: int, limit: int
) -> None:
    provider = Billing(older)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": budget})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ask(gateway, max_completion_tokens=limit), range(8)))
    assert provider.billed <= budget
    # Cerebras and others refuse a body with both names.
    assert all("max_completion_tokens" not in body for body in provider.bodies)
    assert {key for key in provider.bodies[0] if key != "max_tokens"} == {"model", "messages"}


def test_a_provider_with_the_newer_limit_field_gets_only_that_field(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    provider = Billing(lambda body: body.get("max_completion_tokens"))
    upstream = {"base_url": byte_server(provider).url, "auth": "none", "limit_field": "max_completion_tokens"}
    gateway = gateway_server(upstream["base_url"], **{"budget.tokens": 1_000, "providers": {"upstream": upstream}})
    assert ask(gateway, max_completion_tokens=100).status == 200
    assert provider.bodies == [{"model": "m", "messages": HI, "max_completion_tokens": 100}]


@pytest.mark.parametrize("limits", [{}, {"budget.calls": 10}], ids=["none", "calls"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_completion_tokens": 100}),
        (CHAT, {"max_tokens": 16, "n_predict": -1}),
        (CHAT, {}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
def test_without_a_token_budget_the_limits_are_forwarded_unchanged(
    byte_server: StartUpstream, gateway_server: StartGateway, limits: Any, path: str, fields: Body
) -> None:
    models = [{"match": "m", "provider": "upstream", "window": 8_192, "output": 50}]
    upstream = byte_server(Billing(older))
    gateway = gateway_server(upstream.url, models=models, **limits)
    body = b'{"model":  "m", "messages": [{"role":"user","content":"hi"}],' + json.dumps(fields).encode()[1:]
    body = body if fields else body.replace(b",}", b"}")
    assert gateway.web.send("POST", path, body, {"x-session-id": "s"}).status == 200
    assert upstream.requests[-1].body == body


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 16, "n_predict": ENDLESS},
        {"max_tokens": 16, "n_predict": -1},
        {"n_predict": -1},
        {"n_predict": "many"},
        {"n_predict": 400},
    ],
)
def test_n_predict_of_llama_cpp_is_reserved_and_lowered(
    byte_server: StartUpstream, gateway_server: StartGateway, path: str, limits: Body
) -> None:
    provider = Billing(llama)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 1_000})
    assert ask(gateway, path, prompt="hi", **limits).status == 200
    assert provider.billed == used(gateway)["tokens"] <= 1_000
    body = provider.bodies[0]
    assert 0 < body["n_predict"] < 1_000
    # Other servers do not know `n_predict`.
    assert 0 < body["max_tokens"] < 1_000


def test_a_negative_n_predict_is_set_to_the_output_limit_of_the_model(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    provider = Billing(llama)
    models = [{"match": "m", "provider": "upstream", "output": 200}]
    gateway = gateway_server(byte_server(provider).url, models=models, **{"budget.tokens": 100_000})
    assert ask(gateway, n_predict=-1).status == 200
    assert provider.bodies[0]["n_predict"] == 200


def test_the_output_of_all_n_choices_is_reserved(byte_server: StartUpstream, gateway_server: StartGateway) -> None:
    provider = Billing(older)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 40_000})
    refused = ask(gateway, n=16_000, max_tokens=30)
    assert (refused.status, refused.error["code"], provider.billed) == (400, "budget_exhausted", 0)
    assert ask(gateway, n=2_000, max_tokens=30).status == 200
    assert 20_000 < provider.billed <= 40_000


# --- calls without a limit ----------------------------------------------------------------------------------------

WINDOW = 8_192


def vllm(connection: Connection) -> None:
    """Respond like a server that refuses requests larger than its window."""
    body = connection.request.json
    asked, limit = len(json.dumps(body["messages"])) // 4, body.get("max_tokens") or 0
    if asked + limit > WINDOW:
        parts = f"{asked} in the messages, {limit} in the completion"
        said = f"This model's maximum context length is {WINDOW} tokens. However, you requested {asked + limit} tokens"
        said = f"{said} ({parts}). Please reduce the length of the messages or completion."
        connection.whole(json.dumps({"error": {"message": said}}).encode(), status=b"400 Bad Request")
        return
    connection.whole(completion(usage={"prompt_tokens": asked, "completion_tokens": 5, "total_tokens": asked + 5}))


@pytest.mark.parametrize("output", [{}, {"output": WINDOW}], ids=["output unknown", "output known"])
@pytest.mark.parametrize("limits", [{"budget.calls": 10}, {"budget.tokens": 30_000}, {"budget.tokens": 1_000_000}])
@pytest.mark.parametrize("words", [1, 3_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_set_by_the_gateway_fits_into_the_window(
    byte_server: StartUpstream, gateway_server: StartGateway, limits: Any, output: Body, words: int, *, stream: bool
) -> None:
    upstream = byte_server(vllm)
    models = [{"match": "m", "provider": "upstream", "window": WINDOW, **output}]
    gateway = gateway_server(upstream.url, models=models, **limits)
    reply = ask(gateway, messages=[{"role": "user", "content": "a sea " * words}], stream=stream)
    assert reply.status == 200, reply.body
    limit = upstream.requests[0].json.get("max_tokens")
    if "budget.calls" in limits:
        assert limit is None
    elif not output:
        assert 16 <= limit < WINDOW - 2 * (words - 1), "input and limit must fit into the window"


def test_a_window_learned_from_an_error_bounds_the_output_limit(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    upstream = byte_server(vllm)
    gateway = gateway_server(upstream.url, **{"budget.tokens": 1_000_000})
    assert [ask(gateway).status for _ in range(2)] == [200, 200]
    limits = [one.json["max_tokens"] for one in upstream.requests]
    assert len(limits) == 3
    assert limits[0] > WINDOW > limits[1] == limits[2] > WINDOW - 100


def test_a_client_limit_larger_than_the_window_is_refused_as_without_a_budget(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    upstream = byte_server(vllm)
    gateway = gateway_server(upstream.url, **{"budget.tokens": 1_000_000})
    assert ask(gateway, max_tokens=9_000).status == 400
    assert [one.json["max_tokens"] for one in upstream.requests] == [9_000]


@pytest.mark.parametrize(("prompt", "fields", "held"), [("hi", {}, 16), (["a"] * 3, {"n": 2}, 96)])
def test_a_completion_without_a_limit_gets_the_default_of_its_api(
    byte_server: StartUpstream, gateway_server: StartGateway, prompt: object, fields: Body, held: int
) -> None:
    provider = Billing(older)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 100_000})
    body = {"model": "m", "prompt": prompt, **fields}
    reply = gateway.web.post("/v1/completions", body, {"x-session-id": "s", "x-session-budget-tokens": str(held + 40)})
    assert reply.status == 200, reply.body
    assert provider.bodies == [{**body, "max_tokens": 16}]
    short = {"x-session-id": "t", "x-session-budget-tokens": str(held)}
    assert gateway.web.post("/v1/completions", body, short).error["code"] == "budget_exhausted"


# --- alternative models -------------------------------------------------------------------------------------------

PRICES = [
    {"match": "cheap", "provider": "upstream", "price": {"input": 0.1, "output": 0.4}},
    {"match": "openai/dear", "provider": "upstream", "price": {"input": 150, "output": 600}},
]


def router(connection: Connection) -> None:
    """Respond like a provider that could not serve the requested model."""
    body = connection.request.json
    instead = [*body.get("models", []), *(one["model"] for one in body.get("fallbacks", []))]
    model = (instead or [body["model"]])[0]
    output = body["max_tokens"]
    usage = {"prompt_tokens": 10, "completion_tokens": output, "total_tokens": 10 + output}
    connection.whole(completion(model=model, usage=usage))


def bills(upstream: ByteServer) -> float:
    return sum(float(one.json["max_tokens"] * 600 / 1e6 + 10 * 150 / 1e6) for one in upstream.requests)


@pytest.mark.parametrize("others", [{"models": ["openai/dear"]}, {"fallbacks": [{"model": "openai/dear"}]}])
def test_alternative_models_are_reserved_at_their_own_price(
    byte_server: StartUpstream, gateway_server: StartGateway, others: Body
) -> None:
    upstream = byte_server(router)
    gateway = gateway_server(upstream.url, models=PRICES, **{"budget.usd": 1})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ask(gateway, model="cheap", max_tokens=10_000, **others), range(8)))
    assert 0.5 < bills(upstream) <= 1
    assert float(used(gateway)["usd"]) == pytest.approx(bills(upstream))


@pytest.mark.parametrize("others", [["openai/dear", "unheard-of"], [7]])
def test_alternative_models_without_a_price_are_refused_under_a_usd_budget(
    byte_server: StartUpstream, gateway_server: StartGateway, others: list[object]
) -> None:
    upstream = byte_server(router)
    gateway = gateway_server(upstream.url, models=PRICES, **{"budget.usd": 1})
    refused = ask(gateway, model="cheap", max_tokens=10, models=others)
    assert (refused.status, refused.error["code"], upstream.requests) == (400, "price_unknown", [])
    assert ask(gateway, model="cheap", max_tokens=10, models=[]).status == 200


OWN_PASS = {"type": "message", "model": "cheap", "input_tokens": 100, "output_tokens": 10}
DEAR_PASS = {"model": "openai/dear", "input_tokens": 200, "output_tokens": 100}
PASSES_USD = (100 * 0.1 + 10 * 0.4 + 200 * 150 + 100 * 600) / 1e6


def made_in(*passes: dict[str, object]) -> bytes:
    """Return a message whose usage has these iterations."""
    usage = {"input_tokens": 100, "output_tokens": 10, "iterations": passes}
    return json.dumps({"type": "message", "model": "cheap", "content": [], "usage": usage}).encode()


def test_an_advisor_model_is_reserved_and_charged_at_its_own_price(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    response = made_in(OWN_PASS, {"type": "advisor_message", **DEAR_PASS})
    upstream = byte_server(lambda connection: connection.whole(response))
    gateway = gateway_server(upstream.url, models=PRICES, **{"budget.usd": 1})

    def advised(model: str, limit: int) -> Reply:
        tool = {"type": "advisor_20260301", "name": "advisor", "model": model}
        return ask(gateway, "/v1/messages", model="cheap", max_tokens=limit, tools=[tool])

    refused = advised("unheard-of", 10)
    assert (refused.status, refused.error["code"], upstream.requests) == (400, "price_unknown", [])
    assert advised("openai/dear", 10_000).status == 200
    assert upstream.requests[0].json["max_tokens"] < 1_700, "1 USD is 1,667 of its tokens"
    assert float(used(gateway)["usd"]) == pytest.approx(PASSES_USD)


def test_an_iteration_of_a_model_named_only_in_the_response_is_charged_at_its_price(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    response = made_in({"type": "compaction", **DEAR_PASS}, OWN_PASS)
    upstream = byte_server(lambda connection: connection.whole(response))
    gateway = gateway_server(upstream.url, models=PRICES)
    assert ask(gateway, "/v1/messages", model="cheap", max_tokens=100).status == 200
    cost = gateway.web.get("/api/sessions/s").json["cost_usd"]
    assert cost is not None
    assert float(cost) == pytest.approx(PASSES_USD)


# --- what counts, and its price -----------------------------------------------------------------------------------


def test_reported_cached_tokens_above_the_input_do_not_lower_the_charge(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 990, "total_tokens": 1_000}
    response = completion(usage={**usage, "prompt_tokens_details": {"cached_tokens": 1_000}})
    upstream = byte_server(lambda connection: connection.whole(response))
    gateway = gateway_server(upstream.url, **{"budget.tokens": 100_000, "budget.count_cached": 0.1})
    assert ask(gateway, max_tokens=1_000).status == 200
    assert used(gateway)["tokens"] == 991


def test_a_lowered_limit_keeps_the_share_of_thinking(byte_server: StartUpstream, gateway_server: StartGateway) -> None:
    upstream = byte_server(lambda connection: connection.whole(b'{"usage":{"input_tokens":9,"output_tokens":9}}'))
    gateway = gateway_server(upstream.url, **{"budget.tokens": 5_100})
    thinking = {"type": "enabled", "budget_tokens": 10_000}
    assert ask(gateway, "/v1/messages", max_tokens=16_000, thinking=thinking).status == 200
    body = upstream.requests[0].json
    assert 5_000 < body["max_tokens"] < 5_100
    assert body["thinking"]["budget_tokens"] / body["max_tokens"] == pytest.approx(10 / 16, abs=0.001)


@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_call_with_max_tokens_zero_is_forwarded_with_zero(
    byte_server: StartUpstream, gateway_server: StartGateway, stream: bool
) -> None:
    upstream = byte_server(lambda connection: connection.whole(b'{"usage":{"input_tokens":9,"output_tokens":0}}'))
    gateway = gateway_server(upstream.url, **{"budget.tokens": 2_000})
    assert ask(gateway, "/v1/messages", max_tokens=0, stream=stream).status == 200
    assert upstream.requests[0].json["max_tokens"] == 0
    assert used(gateway)["tokens"] == 9
    assert ask(gateway, max_tokens=0).status == 200
    assert upstream.requests[1].json["max_tokens"] > 0, "no limit at some servers"


@pytest.mark.parametrize("mark", ['"1h"', '"1\\u0068"', '"\\u0031h"', '"\\u0031\\u0068"', '"5m"'])
def test_the_price_of_a_one_hour_cache_is_reserved_in_any_spelling(
    byte_server: StartUpstream, gateway_server: StartGateway, mark: str
) -> None:
    price = {"input": 1, "output": 1, "cache_read": 0.1, "cache_write": 1.25, "cache_write_1h": 2}
    upstream = byte_server(lambda connection: connection.whole(b'{"usage":{"input_tokens":9,"output_tokens":9}}'))
    models = [{"match": "c", "provider": "upstream", "price": price}]
    gateway = gateway_server(upstream.url, models=models, **{"budget.usd": 0.0070})
    text = "a sea " * 1_750
    part = f'{{"type":"text","text":"{text}","cache_control":{{"type":"ephemeral","ttl":{mark}}}}}'
    body = f'{{"model":"c","max_tokens":16,"messages":[{{"role":"user","content":[{part}]}}]}}'
    reply = gateway.web.send("POST", "/v1/messages", body.encode(), {"x-session-id": "s"})
    assert reply.status == (200 if mark == '"5m"' else 400), reply.body


# --- limits that a provider refuses -------------------------------------------------------------------------------


class Refusing(Billing):
    """A provider that refuses requests with the text from `says`, and responds to the others."""

    def __init__(self, says: Callable[[Body], str | None]) -> None:
        super().__init__(older)
        self._says = says
        self.seen: list[Body] = []

    def __call__(self, connection: Connection) -> None:
        self.seen.append(connection.request.json)
        said = self._says(connection.request.json)
        if said is None:
            super().__call__(connection)
        else:
            connection.whole(json.dumps({"error": {"message": said}}).encode(), status=b"400 Bad Request")


def at_most_4096(body: Body) -> str | None:
    limit = body.get("max_tokens", 0)
    return f"max_tokens is too large: {limit}. This model supports at most 4096." if limit > 4096 else None


def newer_only(body: Body) -> str | None:
    said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    return said if "max_tokens" in body else None


def test_a_refused_limit_of_the_gateway_is_lowered_and_remembered(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    provider = Refusing(at_most_4096)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 1_000_000})
    assert [ask(gateway).status for _ in range(2)] == [200, 200]
    assert [body["max_tokens"] for body in provider.seen] == [16_384, 4_096, 4_096]


def test_a_refused_limit_field_is_changed_and_remembered(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    provider = Refusing(newer_only)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 1_000_000})
    assert [ask(gateway, max_completion_tokens=500).status, ask(gateway).status] == [200, 200]
    assert [("max_tokens" in body, body.get("max_completion_tokens")) for body in provider.seen] == [
        (True, None),
        (False, 500),
        (False, 16_384),
    ]


def test_a_refused_limit_of_the_client_is_not_changed(byte_server: StartUpstream, gateway_server: StartGateway) -> None:
    provider = Refusing(at_most_4096)
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 1_000_000})
    assert ask(gateway, max_tokens=5_000).status == 400
    assert [body["max_tokens"] for body in provider.seen] == [5_000]


def test_a_limit_learned_from_an_error_is_forgotten_if_it_did_not_help(
    byte_server: StartUpstream, gateway_server: StartGateway
) -> None:
    errors = iter(["max_tokens must be at most 100", "another reason"])
    provider = Refusing(lambda _: next(errors, None))
    gateway = gateway_server(byte_server(provider).url, **{"budget.tokens": 1_000_000})
    assert [ask(gateway).status for _ in range(2)] == [400, 200]
    assert [body["max_tokens"] for body in provider.seen] == [16_384, 100, 16_384]
