from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.core.counting.families import TokenizerFamily
from gateway.core.counting.measure import Wire
from gateway.core.errors import InvalidRequest
from gateway.dialects.fields import read_fields, write_fields
from gateway.dialects.tool_restriction import RestrictionSupport, accepts_forced, restricted
from gateway.dialects.tools import ToolOffer, read_offer

Json = dict[str, Any]
WIRES: tuple[Wire, ...] = ("chat", "responses", "messages")
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}


def tool(wire: Wire, name: str) -> Json:
    if wire == "chat":
        return {"type": "function", "function": {"name": name, "parameters": SCHEMA}, "x_unknown": 1}
    if wire == "responses":
        return {"type": "function", "name": name, "parameters": SCHEMA, "x_unknown": 1}
    return {"name": name, "input_schema": SCHEMA, "x_unknown": 1}


def body(wire: Wire, names: Sequence[str], **fields: Any) -> Json:
    return {"model": "m", "tools": [tool(wire, name) for name in names], "x_field": {"kept": [1.0]}, **fields}


def offered(wire: Wire, request: Json) -> ToolOffer:
    found = read_offer(read_fields(json.dumps(request).encode()), wire)
    assert found is not None
    return found


def sent(
    wire: Wire,
    request: Json,
    keep: Sequence[str],
    *,
    must: bool = False,
    has_choice: bool = False,
    takes: RestrictionSupport | None = None,
) -> Json:
    """Return the body that a provider gets. `takes`: what its model accepts; default: a family without rules."""
    fields = read_fields(json.dumps(request).encode())
    offer = read_offer(fields, wire)
    assert offer is not None
    takes = takes or RestrictionSupport(has_choice, accepts_forced(TokenizerFamily(name="any"), offer))
    restriction = restricted(offer, tuple(keep), must=must, takes=takes)
    counted = dict(restriction.counted)
    if restriction.is_choice_among and not counted:
        # As many tokens as a request that leaves the choice to the model, as this one does by default.
        assert request.get("tool_choice") is None
        assert b'"required"' not in bytes(restriction.fields["tool_choice"])
        counted = {"tool_choice": b'"auto"'}
    assert counted.keys() == restriction.fields.keys()
    result: Json = json.loads(write_fields(fields, restriction.fields))
    return result


def may_call(wire: Wire, request: Json) -> tuple[set[str], bool]:
    """Read a request as its provider's documentation says: the names it may call, and whether it must call one."""
    listed = [(one.get("function") or one)["name"] for one in request.get("tools", [])]
    choice = request.get("tool_choice", "auto" if wire != "messages" else {"type": "auto"})
    if wire == "messages":
        kind = choice["type"]
        names = {choice["name"]} if kind == "tool" else set() if kind == "none" else set(listed)
        return names & set(listed), kind in ("any", "tool")
    if isinstance(choice, str):
        return (set() if choice == "none" else set(listed)), choice == "required"
    if choice["type"] == "allowed_tools":
        said = choice["allowed_tools"] if wire == "chat" else choice
        entries = [(one["function"] if wire == "chat" else one)["name"] for one in said["tools"]]
        assert set(entries) <= set(listed), "a provider refuses a choice among what it is not offered"
        return set(entries), said["mode"] == "required"
    return {(choice["function"] if wire == "chat" else choice)["name"]} & set(listed), True


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_tools_are_identified_by_name(wire: Wire) -> None:
    assert offered(wire, body(wire, ["a", "b"])).names == ("a", "b")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tools": []}])
def test_a_request_without_tools_offers_none(wire: Wire, fields: Json) -> None:
    assert read_offer(read_fields(json.dumps({"model": "m", **fields}).encode()), wire) is None


def test_formats_without_tools_offer_none() -> None:
    assert read_offer(read_fields(json.dumps(body("chat", ["a"])).encode()), "completions") is None


def test_functions_are_legacy_tools() -> None:
    request = {"functions": [{"name": "a"}, {"name": "b"}], "function_call": {"name": "b"}, "tools": None}
    offer = offered("chat", request)
    assert (offer.is_legacy, offer.names, offer.named) == (True, ("b",), "b")
    assert offered("chat", {"functions": [{"name": "a"}], "function_call": "none"}).names == ()
    assert offered("chat", {"functions": [{"name": "a"}], "tools": []}).names == ("a",)


@pytest.mark.parametrize(
    ("wire", "entry", "name"),
    [
        ("chat", {"type": "custom", "custom": {"name": "grep"}}, "grep"),
        ("chat", {"function": {"name": "typeless"}}, "typeless"),
        ("chat", {"type": "web_search", "web_search": {"enable": True}}, "web_search"),
        ("chat", {"type": "function", "function": {"name": ""}}, "function"),
        ("chat", {"type": "function", "function": {"name": 5}}, "function"),
        ("responses", {"type": "custom", "name": "grep"}, "grep"),
        ("responses", {"type": "web_search"}, "web_search"),
        ("responses", {"type": "web_search_preview"}, "web_search"),
        ("responses", {"type": "web_search_preview_2025_03_11"}, "web_search"),
        ("responses", {"type": "computer_use_preview", "display_width": 1}, "computer"),
        ("responses", {"type": "code_interpreter", "container": {"type": "auto"}}, "code_interpreter"),
        ("responses", {"type": "mcp", "server_label": "github", "server_url": "https://x"}, "github"),
        ("responses", {"type": "namespace", "name": "crm", "tools": []}, "crm"),
        ("messages", {"type": "web_search_20250305", "name": "web_search"}, "web_search"),
        ("messages", {"type": "code_execution_20250825", "name": "code_execution"}, "code_execution"),
        ("messages", {"type": "mcp_toolset", "mcp_server_name": "github"}, "github"),
        ("messages", {"type": "computer_toolset_20260801"}, "computer_toolset"),
        ("messages", {"name": "café ☕"}, "café ☕"),
        ("messages", {"name": "a\r\nx-evil: 1"}, "a\r\nx-evil: 1"),
    ],
)
def test_tool_is_identified_by_name_or_server_or_type(wire: Wire, entry: Json, name: str) -> None:
    assert offered(wire, {"tools": [entry]}).names == (name,)


@pytest.mark.parametrize("entry", [None, 1, "search", [], [[]], {"type": 5}, {"type": []}, {"type": {}}, {"type": ""}])
def test_invalid_entry_is_not_offered(entry: Any) -> None:
    assert offered("chat", {"tools": [entry, tool("chat", "a")]}).names == ("a",)
    assert sent("chat", {"tools": [entry, tool("chat", "a"), tool("chat", "b")]}, ["a"])["tools"] == [tool("chat", "a")]


@pytest.mark.parametrize(
    ("wire", "fields"),
    [
        ("chat", {"tools": {"0": tool("chat", "a")}}),
        ("chat", {"tools": "a"}),
        ("chat", {"tools": 1}),
        ("chat", {"tools": True}),
        ("chat", {"functions": {}}),
        ("messages", {"mcp_servers": "x"}),
        ("chat", {"Tools": [tool("chat", "a")]}),
        ("chat", {"tools": [tool("chat", "a")], "TOOL_CHOICE": "none"}),
        ("chat", {"tools": [tool("chat", "a")], "functions": [{"name": "b"}]}),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "b"}, "function": {"name": "a"}}]}),
        ("chat", {"tools": [{"type": "x", "x": {"name": "a"}, "function": {"name": "b"}}]}),
        ("responses", {"tools": [{"type": "function", "name": "a", "function": {"name": "b"}}]}),
    ],
)
def test_ambiguous_request_is_refused(wire: Wire, fields: Json) -> None:
    with pytest.raises(InvalidRequest):
        read_offer(read_fields(json.dumps({"model": "m", **fields}).encode()), wire)


def test_one_name_in_two_places_is_one_name() -> None:
    entry = {"type": "function", "name": "a", "function": {"name": "a"}}
    assert offered("chat", {"tools": [entry]}).names == ("a",)


@pytest.mark.parametrize(
    ("wire", "choice", "mode", "names"),
    [
        ("chat", "none", "none", ()),
        ("chat", "auto", "auto", ("a", "b")),
        ("chat", None, "auto", ("a", "b")),
        ("chat", "required", "required", ("a", "b")),
        ("chat", "NONE", "auto", ("a", "b")),
        ("chat", {"type": "none"}, "auto", ("a", "b")),
        ("chat", {}, "auto", ("a", "b")),
        ("chat", {"type": []}, "auto", ("a", "b")),
        ("chat", 5, "auto", ("a", "b")),
        ("chat", {"type": "function", "function": {"name": "b"}}, "required", ("b",)),
        ("chat", {"type": "function", "function": {"name": "z"}}, "required", ()),
        ("responses", {"type": "function", "name": "b"}, "required", ("b",)),
        ("responses", {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]},
         "required", ("b",)),
        ("chat", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "a"}}, 5, {"type": 6}]}}, "auto", ("a",)),
        ("responses", {"type": "allowed_tools", "tools": "x"}, "auto", ()),
        ("responses", {"type": "allowed_tools", "mode": [], "tools": []}, "auto", ()),
        ("messages", "none", "auto", ("a", "b")),
        ("messages", {"type": "none"}, "none", ()),
        ("messages", {"type": "any"}, "required", ("a", "b")),
        ("messages", {"type": "auto", "disable_parallel_tool_use": True}, "auto", ("a", "b")),
        ("messages", {"type": "tool", "name": "b"}, "required", ("b",)),
    ],
)  # fmt: skip
def test_choice_is_read(wire: Wire, choice: Any, mode: str, names: tuple[str, ...]) -> None:
    offer = offered(wire, body(wire, ["a", "b"], tool_choice=choice))
    assert (offer.mode, offer.names) == (mode, names)


def test_a_server_or_a_hosted_tool_may_be_chosen_too() -> None:
    tools = [{"type": "mcp", "server_label": "github"}, {"type": "web_search_preview"}]
    choices = [
        ({"type": "mcp", "server_label": "github", "name": "list_issues"}, ("github",)),
        ({"type": "web_search_preview"}, ("web_search",)),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ("web_search",)),
    ]
    for choice, names in choices:
        assert offered("responses", {"tools": tools, "tool_choice": choice}).names == names


@pytest.mark.parametrize(
    ("wire", "entries", "used", "known"),
    [
        ("responses", [{"type": "web_search_preview"}], "web_search_call", "web_search"),
        ("responses", [{"type": "computer_use_preview"}], "computer_call", "computer"),
        ("responses", [{"type": "mcp", "server_label": "github"}], "create_issue", "github"),
        ("responses", [{"type": "namespace", "name": "crm"}], "list_orders", "crm"),
        ("responses", [{"type": "mcp", "server_label": "a"}, {"type": "mcp", "server_label": "b"}], "x", "x"),
        ("responses", [tool("responses", "web_search_call")], "web_search_call", "web_search_call"),
        ("responses", [tool("responses", "a")], "mystery", "mystery"),
        ("messages", [{"type": "code_execution_20250825", "name": "code_execution"}],
         "bash_code_execution", "code_execution"),
        ("messages", [{"type": "mcp_toolset", "mcp_server_name": "github"}, tool("messages", "a")], "a", "a"),
    ],
)  # fmt: skip
def test_called_tool_has_its_offered_name(wire: Wire, entries: list[Json], used: str, known: str) -> None:
    assert offered(wire, {"tools": entries}).offered_name(used) == known


def test_mcp_servers_are_tools() -> None:
    servers = [{"type": "url", "url": "https://a", "name": "a"}, {"type": "url", "url": "https://b", "name": "b"}]
    toolsets = [{"type": "mcp_toolset", "mcp_server_name": name} for name in ("a", "b")]
    listed = {"tools": [*toolsets, tool("messages", "c")], "mcp_servers": servers}
    assert offered("messages", listed).names == ("a", "b", "c")
    restrict = sent("messages", listed, ["b"])
    assert (restrict["tools"], restrict["mcp_servers"]) == ([toolsets[1]], [servers[1]])
    alone = sent("messages", {"mcp_servers": servers}, ["a"])
    assert alone == {"mcp_servers": [servers[0]]}


# --- restricting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("has_choice", [True, False])
def test_a_request_that_offers_nothing_else_is_not_changed(wire: Wire, has_choice: bool) -> None:
    request = body(wire, ["a", "b"])
    assert sent(wire, request, ["a", "b"], has_choice=has_choice) == request


def test_choice_among_tools_keeps_the_list() -> None:
    restrict = sent("chat", body("chat", ["a", "b", "c"]), ["a", "c"], has_choice=True)
    assert [one["function"]["name"] for one in restrict["tools"]] == ["a", "b", "c"]
    entries = [{"type": "function", "function": {"name": name}} for name in ("a", "c")]
    assert restrict["tool_choice"] == {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": entries}}
    restrict = sent("responses", body("responses", ["a", "b"]), ["b"], has_choice=True)
    assert restrict["tool_choice"] == {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]
    }  # fmt: skip


def test_choice_names_hosted_tools_and_servers_as_in_the_api() -> None:
    tools = [{"type": "mcp", "server_label": "github"}, {"type": "web_search_preview"}, tool("responses", "a")]
    restrict = sent("responses", {"tools": tools}, ["github", "web_search"], must=True, has_choice=True)
    assert restrict["tool_choice"] == {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp", "server_label": "github"}, {"type": "web_search_preview"}],
    }


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        ("chat", {"type": "function", "function": {"name": "b"}}),
        ("responses", {"type": "function", "name": "b"}),
        ("messages", {"type": "tool", "name": "b"}),
    ],
)
@pytest.mark.parametrize("has_choice", [True, False])
def test_only_allowed_tool_is_named_and_the_list_kept(wire: Wire, choice: Json, has_choice: bool) -> None:
    restrict = sent(wire, body(wire, ["a", "b"]), ["b"], must=True, has_choice=has_choice)
    assert restrict == {**body(wire, ["a", "b"]), "tool_choice": choice}


def test_set_of_tools_is_not_named_but_offered_alone() -> None:
    servers = [{"type": "url", "name": "srv", "url": "https://x"}]
    restrict = sent("messages", {"tools": [tool("messages", "a")], "mcp_servers": servers}, ["srv"], must=True)
    assert restrict == {"tools": [], "mcp_servers": servers, "tool_choice": {"type": "any"}}


def test_other_fields_of_a_choice_are_kept() -> None:
    said = {"type": "auto", "disable_parallel_tool_use": True}
    request = body("messages", ["a", "b", "c"], tool_choice=said)
    assert sent("messages", request, ["a"], must=True)["tool_choice"] == {**said, "type": "tool", "name": "a"}
    assert sent("messages", request, ["a", "b"], must=True)["tool_choice"] == {**said, "type": "any"}
    assert sent("messages", request, ["a", "b"])["tool_choice"] == said
    odd = body("messages", ["a", "b"], tool_choice="auto")
    assert sent("messages", odd, ["a"], must=True)["tool_choice"] == {"type": "tool", "name": "a"}


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}])
def test_no_tool_is_forced_while_claude_thinks(thinking: Json) -> None:
    restrict = sent("messages", body("messages", ["a", "b"], thinking=thinking), ["a"], must=True)
    assert "tool_choice" not in restrict
    assert [one["name"] for one in restrict["tools"]] == ["a"]
    off = body("messages", ["a", "b"], thinking={"type": "disabled"})
    assert sent("messages", off, ["a"], must=True)["tool_choice"]["type"] == "tool"


THINKS = {"thinking": {"type": "enabled"}}
OFF = {"thinking": {"type": "disabled"}}


@pytest.mark.parametrize(
    ("family", "wire", "fields", "expected"),
    [
        (TokenizerFamily(name="x"), "chat", THINKS, True),
        (TokenizerFamily(name="x"), "messages", {}, True),
        (TokenizerFamily(name="x"), "messages", THINKS, False),
        (TokenizerFamily(name="x", binding="prefix"), "messages", THINKS, True),
        (TokenizerFamily(name="x", forced_choice="refused"), "messages", OFF, False),
        (TokenizerFamily(name="x", forced_choice="not_thinking"), "chat", {}, True),
        (TokenizerFamily(name="x", forced_choice="not_thinking"), "chat", {"enable_thinking": True}, False),
        (TokenizerFamily(name="x", forced_choice="not_thinking", thinks="unasked"), "chat", {}, False),
        (TokenizerFamily(name="x", forced_choice="not_thinking", thinks="unasked"), "chat", OFF, True),
        (
            TokenizerFamily(name="x", forced_choice="not_thinking", thinks="unasked"),
            "responses",
            {"reasoning": {}},
            False,
        ),
    ],
)
def test_family_decides_when_a_tool_may_be_forced(
    family: TokenizerFamily, wire: Wire, fields: Json, expected: bool
) -> None:
    assert accepts_forced(family, offered(wire, body(wire, ["a"], **fields))) is expected


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("has_choice", [True, False])
def test_a_model_that_refuses_force_is_restricted_without_it(wire: Wire, has_choice: bool) -> None:
    takes = RestrictionSupport(has_choice, forced=False)
    restrict = sent(wire, body(wire, ["a", "b", "c"]), ["a", "b"], must=True, takes=takes)
    assert may_call(wire, restrict) == ({"a", "b"}, False)
    assert may_call(wire, sent(wire, body(wire, ["a", "b"]), ["a"], must=True, takes=takes)) == ({"a"}, False)


def test_forced_choice_of_the_client_is_kept_even_if_the_model_refuses_it() -> None:
    request = body("chat", ["a", "b"], tool_choice="required")
    assert sent("chat", request, ["a", "b"], must=True, takes=RestrictionSupport(forced=False)) == request


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("keep", [["a"], ["a", "b"], ["b"], []])
@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_bound_tool_list_is_the_same_in_every_step(wire: Wire, keep: list[str], must: bool, forced: bool) -> None:
    takes = RestrictionSupport(forced=forced, listed=frozenset("abc"))
    restrict = sent(wire, body(wire, ["a", "x", "b", "c"]), keep, must=must, takes=takes)
    assert [(one.get("function") or one)["name"] for one in restrict["tools"]] == ["a", "b", "c"]
    names, is_forced = may_call(wire, restrict)
    if not keep:
        assert names == set()
    elif must and forced:
        assert is_forced
        assert names == (set(keep) if len(keep) == 1 else set("abc"))
    else:
        assert (names, is_forced) == (set("abc"), False)


@pytest.mark.parametrize(
    ("keep", "must", "choice", "beyond"),
    [
        (("a",), False, False, ("b",)),
        (("a",), True, False, ()),
        (("a",), False, True, ()),
        (("a", "b"), False, False, ()),
        ((), False, False, ()),
    ],
)
def test_tools_that_stay_offered_are_named(
    keep: tuple[str, ...], must: bool, choice: bool, beyond: tuple[str, ...]
) -> None:
    offer = offered("chat", body("chat", ["a", "b"]))
    assert (
        restricted(offer, keep, must=must, takes=RestrictionSupport(choice, listed=frozenset("ab"))).still_offered
        == beyond
    )


def test_bound_tool_list_is_the_same_if_the_client_excludes_tools() -> None:
    request = body("messages", ["a", "b"], tool_choice={"type": "none"})
    restrict = sent("messages", request, [], takes=RestrictionSupport(listed=frozenset("a")))
    assert (restrict["tools"], restrict["tool_choice"]) == ([tool("messages", "a")], {"type": "none"})


def test_empty_bound_list_is_unchanged() -> None:
    restrict = sent("messages", body("messages", ["a"]), [], takes=RestrictionSupport(listed=frozenset()))
    assert restrict == {**body("messages", ["a"]), "tool_choice": {"type": "none"}}


def test_a_shorter_list_keeps_the_tools_that_messages_refer_to() -> None:
    request = body("messages", ["a", "b", "c"])
    takes = RestrictionSupport(referenced=frozenset(["c", "gone"]))
    assert [one["name"] for one in sent("messages", request, ["a"], takes=takes)["tools"]] == ["a", "c"]
    assert restricted(offered("messages", request), ("a",), must=False, takes=takes).still_offered == ("c",)


def test_only_a_new_forced_choice_is_marked_as_forced() -> None:
    def is_forced(**fields: Any) -> bool:
        return restricted(
            offered("chat", body("chat", ["a", "b"], **fields)), ("a",), must=True, takes=RestrictionSupport()
        ).is_forced

    assert is_forced()
    assert not is_forced(tool_choice="required")


@pytest.mark.parametrize(("wire", "none"), [("chat", "none"), ("responses", "none"), ("messages", {"type": "none"})])
def test_no_allowed_tool_keeps_the_list_and_sets_choice_none(wire: Wire, none: Any) -> None:
    for has_choice in (True, False):
        restrict = sent(wire, body(wire, ["a"]), [], has_choice=has_choice)
        assert restrict == {**body(wire, ["a"]), "tool_choice": none}
    request = body(wire, ["a"], tool_choice=none)
    assert sent(wire, request, []) == request


def test_legacy_functions_are_restricted_in_their_own_form() -> None:
    functions = [{"name": name, "parameters": SCHEMA} for name in ("a", "b", "c")]
    request = {"functions": functions}
    assert sent("chat", request, ["b"], must=True, has_choice=True) == {**request, "function_call": {"name": "b"}}
    assert sent("chat", request, ["a", "c"], must=True, has_choice=True) == {"functions": [functions[0], functions[2]]}
    assert sent("chat", request, []) == {**request, "function_call": "none"}


def test_allowed_forced_choice_is_kept() -> None:
    choice = {"type": "function", "function": {"name": "a"}}
    request = body("chat", ["a", "b"], tool_choice=choice)
    for must in (True, False):
        assert sent("chat", request, ["a"], must=must, has_choice=True) == request


def test_clients_choice_among_tools_is_restricted_further() -> None:
    def among(*names: str, mode: str = "auto") -> Json:
        entries = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}

    request = body("chat", ["a", "b", "c"], tool_choice=among("a", "b"))
    assert sent("chat", request, ["a", "b", "c"]) == request
    assert sent("chat", request, ["b"], has_choice=True)["tool_choice"] == among("b")
    assert sent("chat", request, ["a", "b"], must=True)["tool_choice"] == among("a", "b", mode="required")
    shorter = sent("chat", request, ["b", "a"][:1], has_choice=False)
    assert (shorter["tools"], shorter["tool_choice"]) == ([tool("chat", "b")], among("b"))


def test_cache_mark_moves_from_a_removed_tool_to_the_previous_one() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    first, second, third = (tool("messages", name) for name in "abc")

    def shorter(*tools: Any, keep: str) -> Any:
        return sent("messages", {"tools": tools}, list(keep))["tools"]

    assert shorter(first, second, {**third, **mark}, keep="ab") == [first, {**second, **mark}]
    assert shorter(first, {**second, **mark}, third, keep="ac") == [{**first, **mark}, third]
    assert shorter({**first, **mark}, second, keep="b") == [second], "before it there is none"
    own = {**first, "cache_control": {"type": "ephemeral"}}
    assert shorter(own, {**second, **mark}, keep="a") == [own], "one has a mark of its own"
    assert shorter(first, {**second, "cache_control": None}, keep="a") == [first]
    assert shorter(first, ["cache_control"], second, keep="a") == [first]
    assert shorter(first, {**second, "defer_loading": True}, {**third, **mark}, keep="ab") == [
        first,
        {**second, "defer_loading": True},
    ], "none may stand on a tool that is loaded later"


def test_deferred_tools_are_loaded_if_no_others_remain() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "search"}
    later = [{**tool("messages", name), "defer_loading": True} for name in "ab"]
    request = {"tools": [search, *later]}
    assert sent("messages", request, ["a"])["tools"] == [{**later[0], "defer_loading": False}], (
        "else Anthropic refuses the list"
    )
    assert sent("messages", request, ["search", "a"])["tools"] == [search, later[0]]


def test_tools_with_one_name_are_kept_or_removed_together() -> None:
    twins = {"tools": [tool("chat", "a"), tool("chat", "b"), tool("chat", "a")]}
    assert sent("chat", twins, ["a"])["tools"] == [tool("chat", "a"), tool("chat", "a")]
    assert sent("chat", twins, ["b"])["tools"] == [tool("chat", "b")]


def test_kept_entries_keep_their_bytes() -> None:
    raw = b'{"tools": [ {"name" : "a", "n": 1e999} ,{"name":"b","x":1.0e0} ]}'
    offer = read_offer(read_fields(raw), "messages")
    assert offer is not None
    kept = bytes(restricted(offer, ("a",), must=False, takes=RestrictionSupport()).fields["tools"])
    assert kept == b'[{"name" : "a", "n": 1e999}]'


@pytest.mark.parametrize("wire", WIRES)
def test_large_offer_is_read_but_not_cached(wire: Wire) -> None:
    request = body(wire, [f"tool_{number}" for number in range(2000)])
    offer, again = offered(wire, request), offered(wire, request)
    assert (len(offer.names), offer.is_known, offer is again) == (2000, False, False)
    restrict = sent(wire, request, ["tool_7", "tool_1999"])
    assert restrict["tools"] == [request["tools"][7], request["tools"][1999]]
    small = body(wire, ["a"])
    assert offered(wire, small) is offered(wire, small)


@pytest.mark.parametrize("field", ["tools", "tool_choice"])
def test_too_many_tools_are_refused(field: str) -> None:
    def request(number: int) -> Json:
        many = [{"name": f"t{index}"} for index in range(number)]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": many}}
        return body("chat", ["look"], tool_choice=choice) if field == "tool_choice" else {"tools": many}

    assert offered("chat", request(20_000))
    with pytest.raises(InvalidRequest, match="at most 20,000 tools") as refused:
        offered("chat", request(20_001))
    assert refused.value.param == field


def test_many_tools_are_looked_up_in_constant_time() -> None:
    """Comparing each of thousands of tools with all others would delay all other calls for minutes."""

    class Names(tuple[str, ...]):
        __slots__ = ()

        def __contains__(self, name: object) -> bool:
            raise AssertionError(f"{name} is searched for")

    names = [f"tool_{number}" * 10 for number in range(1_000)]
    offer = offered("chat", body("chat", names))
    assert not offer.is_known
    found = restricted(offer, Names(names[:2]), must=False, takes=RestrictionSupport(choice=True))
    assert found.is_choice_among


def test_too_large_offer_is_not_read() -> None:
    with pytest.raises(InvalidRequest, match="4,194,304 bytes"):
        offered("chat", body("chat", ["x" * 5_000_000]))


NAMES = st.lists(st.sampled_from("abcdé"), min_size=1, max_size=5)


def choices(wire: Wire) -> st.SearchStrategy[Any]:
    name = st.sampled_from("abcdé")
    if wire == "messages":
        kinds = st.sampled_from(["auto", "any", "none"]).map(lambda kind: {"type": kind})
        return st.none() | kinds | name.map(lambda one: {"type": "tool", "name": one})

    def entry(one: str) -> Json:
        return {"type": "function", "function": {"name": one}} if wire == "chat" else {"type": "function", "name": one}

    def among(said: tuple[str, list[str]]) -> Json:
        inner = {"mode": said[0], "tools": [entry(one) for one in said[1]]}
        return (
            {"type": "allowed_tools", "allowed_tools": inner} if wire == "chat" else {"type": "allowed_tools", **inner}
        )

    some = st.tuples(st.sampled_from(["auto", "required"]), st.lists(name, min_size=1, unique=True)).map(among)
    return st.none() | st.sampled_from(["auto", "required", "none"]) | name.map(entry) | some


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.data())
def test_only_kept_tools_may_be_called_and_unknown_fields_survive(wire: Wire, data: st.DataObject) -> None:
    choice = data.draw(choices(wire))
    request = body(wire, data.draw(NAMES), **({} if choice is None else {"tool_choice": choice}))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = {(one.get("function") or one)["name"] for one in request["tools"]}
        inner = choice.get("allowed_tools", choice)
        inner["tools"] = [one for one in inner["tools"] if (one.get("function") or one)["name"] in listed]
        assume(inner["tools"])
    offer = offered(wire, request)
    before, forced = may_call(wire, request)
    assert set(offer.names) == before
    keep = data.draw(st.lists(st.sampled_from(sorted(before)), unique=True)) if before else []
    assume(offer.named is None or set(keep) == before)  # otherwise the call is refused
    must, has_choice = data.draw(st.booleans()), data.draw(st.booleans())
    restrict = sent(wire, request, keep, must=must, has_choice=has_choice)
    after, is_forced = may_call(wire, restrict)
    assert after == set(keep)
    if keep:
        assert is_forced == (forced or must)
    if has_choice and wire != "messages":
        assert restrict["tools"] == request["tools"], "the list stays, and with it the provider's cache"
    assert all(one in request["tools"] for one in restrict["tools"])
    assert {name: value for name, value in restrict.items() if name not in ("tools", "tool_choice")} == {
        name: value for name, value in request.items() if name not in ("tools", "tool_choice")
    }


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "function", "none", "mcp", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "function", "custom", "server_label", "tools", "mode", "allowed_tools"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.sampled_from(WIRES),
    st.dictionaries(
        st.sampled_from(["tools", "functions", "mcp_servers", "tool_choice", "function_call", "thinking"]), ANYTHING
    ),
    st.booleans(),
    st.booleans(),
)
@example("messages", {"tools": [{"name": "a"}], "thinking": {"type": []}}, False, False)
@example("chat", {"tools": [{"type": "none"}, {}]}, True, False)
def test_odd_json_never_raises(wire: Wire, fields: Mapping[str, Any], must: bool, has_choice: bool) -> None:
    raw = read_fields(json.dumps(fields).encode())
    try:
        offer = read_offer(raw, wire)
    except InvalidRequest:
        return
    if offer is None:
        return
    for keep in (offer.names, offer.names[:1], ()):
        changes = restricted(offer, keep, must=must, takes=RestrictionSupport(has_choice, forced=True))
        again = read_offer(read_fields(write_fields(raw, changes.fields)), wire)
        assert again is None or set(again.names) <= set(keep)
        offer.offered_name("web_search_call")
