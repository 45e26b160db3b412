"""Convert one input item of a Responses request to a chat message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import encode, is_plain_text, parse_bytes, text_parts
from gateway.core.counting.parts import COMPACTIONS
from gateway.core.views.raw import compact, fields_of, object_of
from gateway.core.views.view import ChatMessage, as_chat_parts, opaque

#: A tuple instead of a set, because the value that is looked up may be any JSON, and some values are not hashable.
_USER_ROLES = ("user", "system", "developer")
#: calls of the model that the client answers
_CALLS = frozenset(
    {
        *("function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call"),
        "tool_search_call",
    }
)
#: items of the model that need no result of the client
_MODEL_ITEMS = frozenset(
    {
        *("reasoning", "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "program", "program_output"),
    }
)
_OUTPUT = "_output"
#: code that the provider runs and that makes calls
_PROGRAM = "program"
_RESULTS = frozenset({*(f"{call}{_OUTPUT}" for call in _CALLS), "tool_search_output"})
#: an output that is written as JSON, and must stay JSON
_JSON_OUTPUT = f"local_shell_call{_OUTPUT}"
#: the tools that a search found, with their definitions
_SEARCH_RESULT = "tool_search_output"
#: prefix of the IDs of reasoning items
_REASONING_ID = "rs_"
#: bytes that a message takes in addition to its own, and for each tool name
MESSAGE_BYTES: Final = 300
_NAME_BYTES: Final = 150
#: calls whose arguments are any text or JSON; the arguments of other calls have a fixed structure
_TEXT_ARGUMENTS: Final = frozenset({"function_call", "custom_tool_call"})
_NO_MESSAGE: Final = ChatMessage(b"", b"", is_marked=False)


#: The namespace of a tool (empty if none) and its name. Tools of a server are identified by the server.
Name = tuple[str, str]


class ReadItem(NamedTuple):
    """One item, converted.

    Attributes:
        kind: its kind, see `kind_of`; `named` for a reference to an item that the provider stores.
        message: its chat message if it becomes a separate one.
        part: its call, or its part of what the model said.
    """

    kind: str
    message: ChatMessage = _NO_MESSAGE
    part: dict[str, Any] | None = None
    call_id: str = ""
    role: str = ""
    #: The item's own ID if the model made it. The provider uses it to find the reasoning that led to the item.
    id: str = ""
    is_reasoning: bool = False
    #: `program`: the `call_id` of the program that it is. `made_by`: the `call_id` of the program that it belongs to.
    #: Empty for none.
    program: str = ""
    made_by: str = ""
    #: True for an assistant text that can be shortened
    is_plain: bool = False
    #: True for a call whose arguments cannot be shortened
    is_fixed: bool = False
    #: tools that a search found and that this item loads
    loads: tuple[Name, ...] = ()
    #: tools that it calls
    calls: tuple[Name, ...] = ()


def read_item(raw: bytes) -> ReadItem:
    """Convert an item; never raises. An item that cannot be parsed becomes an opaque message."""
    item, is_lossy = parse_bytes(raw)
    kind = kind_of(item)
    # A message with a plain text is used unchanged; if it cannot be written again without loss, every reader treats it
    # as sealed.
    if kind == "" or (is_lossy and not (kind == "said" and isinstance(item["content"], str))):
        # If it is a model item, the next item may have come from it, which only the provider can know.
        return ReadItem("named" if _is_reference(item) or kind == "model" else "", ChatMessage.of(opaque(raw)))
    if kind == "compact":
        return ReadItem(kind, ChatMessage.of(encode({"role": "assistant", "content": [item]})))
    if kind == "said":
        content = item["content"]
        parts = [] if isinstance(content, str) else as_chat_parts(content)
        message = raw if isinstance(content, str) else encode({**item, "content": parts})
        is_plain = item["role"] == "assistant" and not is_lossy and all(map(is_plain_text, parts))
        return ReadItem(kind, ChatMessage.of(message), role=item["role"], is_plain=is_plain)
    program, caller = _programs_of(item)
    if kind == "model":
        is_reasoning = _is_reference(item) or item["type"] == "reasoning"
        return ReadItem(
            kind, part=_model_part(item), id=_id(item), is_reasoning=is_reasoning, program=program, made_by=caller,
            loads=tuple(_found_tools(item)), calls=_called_tools(item),
        )  # fmt: skip
    call_id = _call_id(item)
    if kind == "call":
        is_fixed = item["type"] not in _TEXT_ARGUMENTS
        calls = _called_tools(item)
        return ReadItem(
            kind, part=_call(item, raw), call_id=call_id, id=_id(item), made_by=caller, is_fixed=is_fixed, calls=calls
        )
    message = encode({"role": "tool", "tool_call_id": call_id, "content": _output(item)})
    return ReadItem(kind, ChatMessage.of(message), call_id=call_id, made_by=caller, loads=tuple(_found_tools(item)))


def _called_tools(item: Mapping[str, Any]) -> tuple[Name, ...]:
    """Return the tool that a call is for, with its namespace."""
    return tuple(_names_of(item, item.get("namespace")))


def _found_tools(item: Mapping[str, Any]) -> Iterator[Name]:
    """Yield the tools that a search found.

    Tools in a namespace are also returned without it, because a call need not name the namespace.
    """
    for tool in _objects_in(item.get("tools")) if item.get("type") == _SEARCH_RESULT else ():
        yield from _names_of(tool)
        for inner in _objects_in(tool.get("tools")):
            yield from (*_names_of(inner), *_names_of(inner, tool.get("name")))


def _names_of(tool: Mapping[str, Any], space: Any = None) -> Iterator[Name]:
    name = tool.get("server_label") or tool.get("name")
    if isinstance(name, str):
        yield (space if isinstance(space, str) else ""), name


def _objects_in(tools: Any) -> Iterator[Mapping[str, Any]]:
    return (tool for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else iter(())


def _id(item: Mapping[str, Any]) -> str:
    return str(item.get("id") or "")


def _programs_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """Return the program that an item is, and the program that it belongs to."""
    kind, caller = item.get("type"), item.get("caller")
    if kind == _PROGRAM:
        return str(item.get("call_id") or ""), ""
    if kind == f"{_PROGRAM}{_OUTPUT}":
        return "", str(item.get("call_id") or "")
    return "", str(caller.get("caller_id") or "") if isinstance(caller, dict) else ""


def size_of(item: ReadItem) -> int:
    """Return the approximate size in memory, in bytes."""
    names = _NAME_BYTES * (len(item.loads) + len(item.calls))
    return MESSAGE_BYTES + names + len(item.message.raw) + (len(encode(item.part)) if item.part is not None else 0)


def kind_of(item: Any) -> str:
    """Return the kind of an item.

    - `said`: a text message.
    - `call`: a call of a client tool.
    - `result`: the result of such a call.
    - `model`: reasoning, and other items of the model that need no result.
    - `compact`: a compaction.
    - empty: anything else.
    """
    if not isinstance(item, dict):
        return ""
    if _is_reference(item):
        return "model" if item["id"].startswith(_REASONING_ID) else ""
    kind = item.get("type", "message")
    if kind == "message":
        known = item.get("role") in _USER_ROLES or item.get("role") == "assistant"
        return "said" if known and isinstance(item.get("content"), str | list) else ""
    if isinstance(kind, str) and isinstance(_call_id(item), str) and kind in _CALLS | _RESULTS:
        return "call" if kind in _CALLS else "result"
    if not isinstance(kind, str):
        return ""
    return "model" if kind in _MODEL_ITEMS else "compact" if kind in COMPACTIONS else ""


def _is_reference(item: Any) -> bool:
    """Return True if the item only names an item that the provider stores."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _call_id(item: Mapping[str, Any]) -> Any:
    """Return the `call_id`, or the `id` of a local shell's output without one."""
    call_id = item.get("call_id")
    return item.get("id") if call_id is None and item.get("type") == _JSON_OUTPUT else call_id


def _call(item: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    function = {"name": item.get("name", item["type"]), "arguments": arguments_of(item, raw)}
    return {"id": item["call_id"], "type": "function", "function": function}


def arguments_of(item: Mapping[str, Any], raw: bytes) -> str:
    """Return the arguments of a call as text; each type of call has a different field for them."""
    if isinstance(item.get("arguments"), str):
        return str(item["arguments"])
    fields = fields_of(raw)
    return compact(object_of({key: fields[key] for key in ("input", "action", "operation") if key in fields}))


def _model_part(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part that no rule changes, with about as many tokens as the item."""
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
        return as_chat_parts(output)
    if isinstance(output, str):
        return output
    return [{name: value for name, value in item.items() if name not in ("id", "call_id", "status")}]
