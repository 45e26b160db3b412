"""The session of a call, its routes, and the models that a client key may not use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.call.routing import advisors_of, models_instead, named_session, routes_of, session_of, with_form_model
from gateway.call.types import Caller, Incoming, SessionPolicy
from gateway.core.errors import InvalidRequest, SessionRequired, UnknownModel
from gateway.core.ledger.session_key import SessionKey
from gateway.core.routing import Route
from gateway.dialects import endpoint
from tests.support.fakes import BODY, KEY, ROUTES, World
from tests.support.records import record

FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nq-1\r\n--b\r\n'
FORM_HEADERS = [(b"content-type", b"multipart/form-data; boundary=b")]


@pytest.fixture
def world() -> World:
    return World()


# --- the session --------------------------------------------------------------------------------------------------


def derived(world: World, incoming: Incoming) -> str:
    call = incoming.endpoint.dialect.read(incoming.body)
    session, is_derived = session_of(incoming, call, SessionPolicy())
    assert session is not None
    assert is_derived
    return session.id


def test_the_session_in_the_path_wins_over_a_header(world: World) -> None:
    assert named_session(world.incoming(), [b"x-session-id"]) == KEY
    assert named_session(world.incoming(path_session="t"), [b"x-session-id"]) == SessionKey("alice", "t")
    assert named_session(world.incoming(headers=[]), [b"x-session-id"]) is None


def test_a_configured_header_names_the_session(world: World) -> None:
    headers = [(b"x-mine", b"t")]
    assert named_session(world.incoming(headers=headers), [b"x-mine"]) == SessionKey("alice", "t")
    assert named_session(world.incoming(headers=headers), [b"x-session-id"]) is None


def test_the_first_of_two_equal_headers_counts(world: World) -> None:
    headers = [(b"x-session-id", b"first"), (b"x-session-id", b"second")]
    assert named_session(world.incoming(headers=headers), [b"x-session-id"]) == SessionKey("alice", "first")


@pytest.mark.parametrize("on_missing", ["derive", "require", "none"])
def test_a_session_that_the_body_names_is_not_derived(world: World, on_missing: Any) -> None:
    incoming = world.incoming(BODY[:-1] + b',"metadata":{"session_id":"b"}}')
    call = incoming.endpoint.dialect.read(incoming.body)
    assert session_of(incoming, call, SessionPolicy(on_missing=on_missing)) == (SessionKey("alice", "b"), False)


def test_a_call_without_a_session_is_accepted_or_refused_by_setting(world: World) -> None:
    incoming = world.incoming()
    call = incoming.endpoint.dialect.read(incoming.body)
    assert session_of(incoming, call, SessionPolicy(on_missing="none")) == (None, False)
    with pytest.raises(SessionRequired, match="x-mine"):
        session_of(incoming, call, SessionPolicy((b"x-mine",), "require"))


@pytest.mark.parametrize("on_missing", ["derive", "require", "none"])
@pytest.mark.parametrize("is_derived", [False, True])
def test_a_call_that_continues_a_response_has_its_session_unless_the_body_names_one(
    world: World, on_missing: Any, is_derived: bool
) -> None:
    policy, before = SessionPolicy(on_missing=on_missing), replace(record("before", 0.0), derived_session=is_derived)
    incoming = world.incoming()
    call = incoming.endpoint.dialect.read(incoming.body)
    assert session_of(incoming, call, policy, before) == (SessionKey("default", "before"), is_derived)
    incoming = world.incoming(BODY[:-1] + b',"prompt_cache_key":"b"}')
    call = incoming.endpoint.dialect.read(incoming.body)
    assert session_of(incoming, call, policy, before) == (SessionKey("alice", "b"), False)


def test_a_derived_session_is_the_same_for_one_conversation(world: World) -> None:
    first = derived(world, world.incoming())
    longer = BODY[:-2] + b',{"role":"assistant","content":"hi"}]}'
    assert derived(world, world.incoming(longer)) == first
    assert derived(world, world.incoming(BODY.replace(b"hello", b"goodbye"))) != first
    assert derived(world, world.incoming(caller=Caller("bob"))) != first


def test_calls_without_a_conversation_share_a_session_per_path(world: World) -> None:
    one, other = (world.incoming(b'{"model":"m","input":"%b"}' % text, "embeddings") for text in (b"a", b"b"))
    assert derived(world, one) == derived(world, other)
    assert derived(world, one) != derived(world, world.incoming(one.body, "images/generations"))


# --- the route ----------------------------------------------------------------------------------------------------


def resolved(incoming: Incoming) -> Route:
    call = with_form_model(incoming, incoming.endpoint.dialect.read(incoming.body))
    return routes_of(incoming, call, ROUTES, None)[0]


def test_a_form_that_names_two_models_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="more than one"):
        resolved(world.incoming(FORM + FORM, "audio/transcriptions", headers=FORM_HEADERS))


def test_a_key_limited_to_models_may_use_those_that_match_and_list_all(world: World) -> None:
    caller = Caller("alice", ("q-*",))
    assert resolved(world.incoming(BODY.replace(b'"m"', b'"q-1"'), caller=caller)).provider == "q"
    with pytest.raises(UnknownModel, match=r'"alice" may not use the model "m"; it may use q-\*'):
        resolved(world.incoming(caller=caller))
    listing = world.incoming(b"", "models", method="GET", endpoint=endpoint("GET", "models"), caller=caller)
    assert resolved(listing).model == ""


@pytest.mark.parametrize(
    "path",
    [
        "OPENAI/deployments/dear/chat/completions",
        "openai/Deployments/dear/chat/completions",
        "openai/deployments/dear/Chat/Completions",
        "openai/deployments/dear/extensions/chat/completions",
        "any/openai/deployments/dear/chat/completions",
        "openai%2Fdeployments%2Fdear/chat/completions",
        "engines/dear/completions",
        "models/dear:generateContent",
        "model/dear/converse",
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_limited_key_may_not_use_a_path_that_may_name_a_model(world: World, path: str, method: str) -> None:
    def incoming(caller: Caller) -> Incoming:
        body = BODY.replace(b'"m"', b'"q-1"')
        return world.incoming(body, path, method=method, endpoint=endpoint(method, path, body=body), caller=caller)

    with pytest.raises(UnknownModel, match=r'"alice" may not use a path that may name a model itself; it may use q-'):
        resolved(incoming(Caller("alice", ("q-*",))))
    assert resolved(incoming(Caller("alice"))).provider == "q"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "files"), ("DELETE", "files/f"), ("GET", "responses/r"), ("OPTIONS", "batches")),
        *(("POST", "files"), ("POST", "Batches"), ("POST", "messages/batches"), ("POST", "vector_stores/v/files")),
        *(("POST", "evals/e/runs"), ("PUT", "files/f"), ("POST", "fine_tuning/alpha/graders/run")),
        *(("POST", "conversations/c/items"), ("POST", "threads"), ("POST", "threads/t/messages")),
    ],
)
def test_a_limited_key_may_not_use_a_path_without_models_by_naming_one(world: World, method: str, path: str) -> None:
    body = b'{"model":"q-1","input_file_id":"f"}'

    def incoming(caller: Caller) -> Incoming:
        return world.incoming(body, path, method=method, endpoint=endpoint("POST", "x"), caller=caller)

    with pytest.raises(UnknownModel, match="may not use a path that names no model"):
        resolved(incoming(Caller("alice", ("q-*",))))
    assert resolved(incoming(Caller("alice"))).provider == "q"


@pytest.mark.parametrize(
    "path",
    ["rerank", "openai/deployments", "audio/speech", "mymodels/x", "fim/completions", "threads/runs", "threads/t/runs"],
)
def test_a_limited_key_may_use_paths_whose_body_names_an_allowed_model(world: World, path: str) -> None:
    body = BODY.replace(b'"m"', b'"q-1"')
    assert resolved(world.incoming(body, path, caller=Caller("alice", ("q-*",)))).provider == "q"


@pytest.mark.parametrize("field", ["models", "fallbacks"])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (["dear"], "dear"),
        (["q-2", "dear"], "dear"),
        ("dear", "dear"),
        ([{"model": "dear"}], "dear"),
        ([{"q-1": ["dear"]}], None),
        ([["dear"]], None),
        ([3], None),
        ({"a": "dear"}, None),
    ],
)
def test_a_limited_key_may_not_name_other_fallback_models(
    world: World, field: str, value: object, named: str | None
) -> None:
    def incoming(caller: Caller, value: object) -> Incoming:
        return world.incoming(json.dumps({**json.loads(BODY), "model": "q-1", field: value}).encode(), caller=caller)

    limited = Caller("alice", ("q-*",))
    with pytest.raises(UnknownModel, match=f'may not use the model "{named}"' if named else "may not use") as refused:
        resolved(incoming(limited, value))
    assert refused.value.param == field
    assert resolved(incoming(Caller("alice"), value)).provider == "q"
    for harmless in (None, [], ["q-2"], "q-2", [{"model": "q-2"}]):
        assert resolved(incoming(limited, harmless)).provider == "q"


def advisor(model: object, kind: str = "advisor_20260301") -> dict[str, object]:
    return {"type": kind, "name": "advisor", "model": model}


@pytest.mark.parametrize("written", [str, lambda body: body.replace('"advisor_', '"\\u0061dvisor_')])
def test_a_limited_key_may_not_name_another_advisor(world: World, written: Callable[[str], str]) -> None:
    def incoming(caller: Caller, *tools: object) -> Incoming:
        body = written(json.dumps({**json.loads(BODY), "model": "q-1", "tools": list(tools)}))
        return world.incoming(body.encode(), "messages", caller=caller)

    limited = Caller("alice", ("q-*",))
    with pytest.raises(UnknownModel, match='may not use the model "dear"') as refused:
        resolved(incoming(limited, {"name": "f", "input_schema": {}}, advisor("dear")))
    assert refused.value.param == "tools"
    assert resolved(incoming(Caller("alice"), advisor("dear"))).provider == "q"
    for harmless in (advisor("q-2"), advisor("dear", "custom"), advisor(7), advisor(None), "advisor_"):
        assert resolved(incoming(limited, harmless)).provider == "q"


DEEP = json.loads('{"type":"x","model":"dear","a":' + "[" * 200 + "]" * 200 + "}")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("tools", [None, "x", advisor("dear")], "dear"),
        ("tools", advisor("dear"), "dear"),
        ("tools", [{"type": "image_generation", "model": "dear"}], "dear"),
        ("tools", [{"type": "openrouter:advisor", "parameters": {"model": "dear"}}], "dear"),
        (
            "tools",
            [{"type": "openrouter:advisor", "parameters": {"advisors": [{"name": "a", "model": "dear"}]}}],
            "dear",
        ),
        ("tools", [{"type": "openrouter:fusion", "parameters": {"analysis_models": ["q-2", "dear"]}}], "dear"),
        ("tools", [{"type": "openrouter:advisor"}], None),
        ("tools", [{"type": "openrouter:fusion", "parameters": {}}], None),
        ("tools", [{"type": "x", "model": "q-1"}, DEEP], "dear"),
        ("plugins", [{"id": "fusion", "model": "dear"}], "dear"),
        ("compound_custom", {"models": {"answering_model": "q-2", "reasoning_model": "dear"}}, "dear"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_limited_key_may_not_name_further_models(
    world: World, path: str, field: str, value: object, named: str | None
) -> None:
    def incoming(caller: Caller) -> Incoming:
        body = {**json.loads(BODY), "model": "q-1", "input": "hi", "max_tokens": 5, field: value}
        return world.incoming(json.dumps(body).encode(), path, caller=caller)

    with pytest.raises(UnknownModel, match=f'may not use the model "{named}"' if named else "may not use") as refused:
        resolved(incoming(Caller("alice", ("q-*",))))
    assert refused.value.param == field
    assert resolved(incoming(Caller("alice"))).provider == "q"


def test_very_large_fields_are_not_decoded_to_look_for_models(world: World) -> None:
    """Decoding them would block all other calls."""
    many = b"[" + b"[]," * 400_000 + b"1]"

    def incoming(tools: bytes, models: tuple[str, ...]) -> Incoming:
        return world.incoming(b'{"model":"q-1","messages":[],"tools":%b}' % tools, caller=Caller("alice", models))

    for tools in (b'[{"type":"x","model":"q-1","y":%b}]' % many, b"[%b1]" % (b'{"model":"q-1"},' * 200_001)):
        with pytest.raises(UnknownModel, match='may not use what the field "tools" names'):
            resolved(incoming(tools, ("q-*",)))
        assert resolved(incoming(tools, ())).provider == "q"
    assert resolved(incoming(b'[{"type":"x","y":%b}]' % many, ("q-*",))).provider == "q"
    advising = incoming(b"[%b1]" % (b'{"type":"advisor_1","model":"q-2"},' * 200_001), ())
    call = advising.endpoint.dialect.read(advising.body)
    assert [route.model for route in advisors_of(call, [Route("q", "q-1")], ROUTES)] == [""]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"model": {"default": "x"}}}}},
        {"type": "function", "name": "f", "parameters": {"properties": {"models": {"type": "array"}}, "model": "x"}},
        {"name": "pick", "input_schema": {"properties": {"model": {"enum": ["x"]}}}, "model": "x"},
        {"type": "image_generation", "model": "q-2"},
        {"type": "openrouter:advisor", "parameters": {"model": "q-2"}},
        {"type": "web_search"},
    ],
)
def test_a_model_in_the_callers_own_tool_is_ignored(world: World, tool: object) -> None:
    body = json.dumps({**json.loads(BODY), "model": "q-1", "tools": [tool]}).encode()
    assert resolved(world.incoming(body, caller=Caller("alice", ("q-*",)))).provider == "q"


async def test_the_model_of_a_form_is_found(world: World) -> None:
    form = FORM + b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n\xff\x00\r\n--b--\r\n'
    await world.call(world.incoming(form, "audio/transcriptions", headers=FORM_HEADERS))
    assert world.upstream.sent[0].url.startswith("http://q/")
    assert world.upstream.sent[0].body == form.replace(b"q-1", b"q-real")
    assert world.record.model == "q-real"


async def test_a_form_is_sent_with_the_name_that_its_provider_knows(world: World) -> None:
    for asked, sent in ((b"p/whisper", b"whisper"), (b"m", b"m"), (b" q-1 ", b"q-real")):
        form = FORM.replace(b"q-1", asked).replace(b"--b--", b"--b\r\nx: y\r\n\r\nq-1 p/whisper\r\n--b--")
        await world.call(world.incoming(form, "audio/transcriptions", headers=FORM_HEADERS))
        assert world.upstream.sent[-1].body == FORM.replace(b"q-1", sent).replace(
            b"--b--", b"--b\r\nx: y\r\n\r\nq-1 p/whisper\r\n--b--"
        )


@pytest.mark.parametrize(
    "form", [b"", b"--b\r\n", b'name="model"', b'name="model"\r\n\r\n', b'name="model"\r\n\r\n\r\n']
)
async def test_a_form_without_a_model_goes_to_the_default(form: bytes, world: World) -> None:
    await world.call(world.incoming(form, "audio/transcriptions", headers=FORM_HEADERS))
    assert world.upstream.sent[0].url.startswith("http://p/")
    assert world.upstream.sent[0].body == form


async def test_a_key_limited_to_models_may_not_use_paths_that_name_none(world: World) -> None:
    incoming = world.incoming(
        b"", "files", caller=Caller("alice", ("m*",)), method="GET", endpoint=endpoint("GET", "files")
    )
    reply, _ = await world.call(incoming)
    assert reply.status == 404
    assert world.upstream.sent == []


# --- models that the provider calls instead -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"models": None, "fallbacks": []}, []),
        ({"models": ["a", "b"], "fallbacks": ["b", "c"]}, ["a", "b", "c"]),
        ({"fallbacks": [{"model": "a"}, {"max_tokens": 5}, 7]}, ["a", ""]),
        ({"models": "a"}, ["a"]),
        ({"models": [str(number) for number in range(5_000)]}, [*map(str, range(32)), ""]),
    ],
)
def test_the_models_that_a_provider_may_call_instead_are_found(
    world: World, fields: dict[str, Any], names: list[str]
) -> None:
    incoming = world.incoming(json.dumps({**json.loads(BODY), **fields}).encode())
    call = incoming.endpoint.dialect.read(incoming.body)
    found = [Route("p", "m"), Route("q", "m"), Route("p", "n")]
    assert models_instead(call, found, ROUTES) == tuple(ROUTES.route_at(one, name) for one in "pq" for name in names)
    assert advisors_of(call, found, ROUTES) == ()


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("claude-fable-5-1", ["claude-opus-4-8", "claude-opus-5"]),
        ("claude-opus-5-5", ["claude-opus-4-8", "claude-opus-5"]),
        ("anthropic/claude-sonnet-5-5", ["claude-sonnet-5"]),
        ("claude-haiku-5-5", []),
        ("an-alias", ["claude-opus-4-8", "claude-opus-5"]),
    ],
)
def test_the_default_fallback_models_of_anthropic_are_known(world: World, model: str, names: list[str]) -> None:
    body = json.dumps({**json.loads(BODY), "model": model, "fallbacks": "default"}).encode()
    call = world.incoming().endpoint.dialect.read(body)
    assert [route.model for route in models_instead(call, [Route("p", model)], ROUTES)] == names
    named = world.incoming(body, caller=Caller("alice", (model,)))
    if names:
        with pytest.raises(UnknownModel, match=names[0]):
            resolved(named)
    else:
        assert resolved(named).model == model


def test_advisor_models_are_found(world: World) -> None:
    tools = [advisor("a"), {"name": "f", "model": "x"}, advisor("b"), advisor("a"), advisor(None)]
    call = world.incoming().endpoint.dialect.read(json.dumps({**json.loads(BODY), "tools": tools}).encode())
    found = [Route("p", "m"), Route("q", "m")]
    assert advisors_of(call, found, ROUTES) == tuple(ROUTES.route_at(one, name) for one in "pq" for name in "ab")
    assert models_instead(call, found, ROUTES) == ()
