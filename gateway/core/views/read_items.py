"""Read one input item of a Responses request as a chat message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import encode, is_plain_text, read, text_parts
from gateway.core.counting.parts import COMPACTIONS
from gateway.core.views.raw import compact, fields_of, object_of
from gateway.core.views.view import ChatMessage, opaque, said

#: A tuple and no set: what is looked up in it may be any JSON, which cannot always be hashed.
_SPEAKERS = ("user", "system", "developer")
#: made by the model, answered by the client
_CALLS = frozenset(
    {
        *("function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call"),
        "tool_search_call",
    }
)
#: made by the model, and answered where it runs
_DEEDS = frozenset(
    {
        *("reasoning", "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "program", "program_output"),
    }
)
_OUTPUT = "_output"
#: code that runs where the model does and makes calls
_PROGRAM = "program"
_RESULTS = frozenset({*(f"{call}{_OUTPUT}" for call in _CALLS), "tool_search_output"})
#: its output is written as JSON, and must stay that
_JSON_OUTPUT = f"local_shell_call{_OUTPUT}"
#: tools that a search found, with their definitions
_FOUND = "tool_search_output"
#: what ids of reasoning begin with
_REASONING_ID = "rs_"
#: bytes that a message takes beside its own, and each name of a tool
MESSAGE_BYTES: Final = 300
_NAME_BYTES: Final = 150
#: calls whose arguments are any text or JSON; those of the others have a form of their own
_FREE: Final = frozenset({"function_call", "custom_tool_call"})
_NO_MESSAGE: Final = ChatMessage(b"", b"", is_marked=False)


#: of a tool: its namespace, empty for none, and its name; a server's tools are known by their server
Name = tuple[str, str]


class ReadItem(NamedTuple):
    """One item. `message`: where it is one by itself; `part`: a call, or a part of what the model said."""

    kind: str
    message: ChatMessage = _NO_MESSAGE
    part: dict[str, Any] | None = None
    call_id: str = ""
    role: str = ""
    #: the item's own id, where the model made it: by this the provider knows of which reasoning it came
    id: str = ""
    is_reasoning: bool = False
    #: `call_id` of the program that it is, and of the program that it belongs to; empty for none
    program: str = ""
    by: str = ""
    #: words of the assistant's that can be cut
    is_plain: bool = False
    #: a call that cannot be
    is_fixed: bool = False
    #: tools that were found by a search, and are loaded by this
    loads: tuple[Name, ...] = ()
    #: tools that it calls
    calls: tuple[Name, ...] = ()


def read_item(raw: bytes) -> ReadItem:
    """What an item is. Nothing fails: what cannot be read is told of as it stands."""
    item, is_odd = read(raw)
    kind = kind_of(item)
    # A text alone is read as it stands; what is odd in it seals it there.
    if kind == "" or (is_odd and not (kind == "said" and isinstance(item["content"], str))):
        # What follows may have come of what the model did, which only the provider can tell.
        return ReadItem("named" if _is_name(item) or kind == "deed" else "", ChatMessage.of(opaque(raw)))
    if kind == "compact":
        return ReadItem(kind, ChatMessage.of(encode({"role": "assistant", "content": [item]})))
    if kind == "said":
        content = item["content"]
        parts = [] if isinstance(content, str) else said(content)
        message = raw if isinstance(content, str) else encode({**item, "content": parts})
        is_plain = item["role"] == "assistant" and not is_odd and all(map(is_plain_text, parts))
        return ReadItem(kind, ChatMessage.of(message), role=item["role"], is_plain=is_plain)
    program, by = _program(item)
    if kind == "deed":
        is_reasoning = _is_name(item) or item["type"] == "reasoning"
        return ReadItem(
            kind, part=_deed(item), id=_id(item), is_reasoning=is_reasoning, program=program, by=by,
            loads=tuple(_loaded(item)), calls=_called(item),
        )  # fmt: skip
    call_id = _call_id(item)
    if kind == "call":
        is_fixed = item["type"] not in _FREE
        calls = _called(item)
        return ReadItem(
            kind, part=_call(item, raw), call_id=call_id, id=_id(item), by=by, is_fixed=is_fixed, calls=calls
        )
    message = encode({"role": "tool", "tool_call_id": call_id, "content": _output(item)})
    return ReadItem(kind, ChatMessage.of(message), call_id=call_id, by=by, loads=tuple(_loaded(item)))


def _called(item: Mapping[str, Any]) -> tuple[Name, ...]:
    """The tool that a call is for."""
    return tuple(_named(item, item.get("namespace")))


def _loaded(item: Mapping[str, Any]) -> Iterator[Name]:
    """The tools that a search found. A call need not name the namespace that its tool is in."""
    for tool in _listed(item.get("tools")) if item.get("type") == _FOUND else ():
        yield from _named(tool)
        for inner in _listed(tool.get("tools")):
            yield from (*_named(inner), *_named(inner, tool.get("name")))


def _named(tool: Mapping[str, Any], space: Any = None) -> Iterator[Name]:
    name = tool.get("server_label") or tool.get("name")
    if isinstance(name, str):
        yield (space if isinstance(space, str) else ""), name


def _listed(tools: Any) -> Iterator[Mapping[str, Any]]:
    return (tool for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else iter(())


def _id(item: Mapping[str, Any]) -> str:
    return str(item.get("id") or "")


def _program(item: Mapping[str, Any]) -> tuple[str, str]:
    """The program that an item is, and the one that it belongs to."""
    kind, caller = item.get("type"), item.get("caller")
    if kind == _PROGRAM:
        return str(item.get("call_id") or ""), ""
    if kind == f"{_PROGRAM}{_OUTPUT}":
        return "", str(item.get("call_id") or "")
    return "", str(caller.get("caller_id") or "") if isinstance(caller, dict) else ""


def size_of(found: ReadItem) -> int:
    """Bytes that it takes."""
    names = _NAME_BYTES * (len(found.loads) + len(found.calls))
    return MESSAGE_BYTES + names + len(found.message.raw) + (len(encode(found.part)) if found.part is not None else 0)


def kind_of(item: Any) -> str:
    """`said`, `call`, `result`, `deed`, `compact`; empty for what is none of them."""
    if not isinstance(item, dict):
        return ""
    if _is_name(item):
        return "deed" if item["id"].startswith(_REASONING_ID) else ""
    kind = item.get("type", "message")
    if kind == "message":
        known = item.get("role") in _SPEAKERS or item.get("role") == "assistant"
        return "said" if known and isinstance(item.get("content"), str | list) else ""
    if isinstance(kind, str) and isinstance(_call_id(item), str) and kind in _CALLS | _RESULTS:
        return "call" if kind in _CALLS else "result"
    if not isinstance(kind, str):
        return ""
    return "deed" if kind in _DEEDS else "compact" if kind in COMPACTIONS else ""


def _is_name(item: Any) -> bool:
    """Whether it only names an item that the provider keeps."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _call_id(item: Mapping[str, Any]) -> Any:
    """The `call_id`; a local shell's output may have an `id` in its place."""
    call_id = item.get("call_id")
    return item.get("id") if call_id is None and item.get("type") == _JSON_OUTPUT else call_id


def _call(item: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    function = {"name": item.get("name", item["type"]), "arguments": arguments_of(item, raw)}
    return {"id": item["call_id"], "type": "function", "function": function}


def arguments_of(item: Mapping[str, Any], raw: bytes) -> str:
    """The arguments of a call, whatever they are named in its kind."""
    if isinstance(item.get("arguments"), str):
        return str(item["arguments"])
    fields = fields_of(raw)
    return compact(object_of({key: fields[key] for key in ("input", "action", "operation") if key in fields}))


def _deed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A part that no rule changes, and that weighs about as much as the item."""
    if item.get("type") != "reasoning":
        return {name: value for name, value in item.items() if name != "status"}
    if item.get("encrypted_content"):
        return {"type": "redacted_thinking", "data": item["encrypted_content"], "id": item.get("id")}
    return {"type": "thinking", "thinking": text_parts(item.get("summary")), "id": item.get("id")}


def _output(item: Mapping[str, Any]) -> Any:
    output = item.get("output")
    if item["type"] == _JSON_OUTPUT:
        return [{"type": _JSON_OUTPUT, "output": output}]
    if isinstance(output, list):
        return said(output)
    if isinstance(output, str):
        return output
    return [{name: value for name, value in item.items() if name not in ("id", "call_id", "status")}]
