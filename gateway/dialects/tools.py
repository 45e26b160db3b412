"""Read the tools that a request offers, and its choice among them.

`dialects/tool_restriction.py` tells it to offer fewer.

Tools that a provider runs itself go by their type, without what tells its versions apart: `web_search`. A set of tools
that the request does not list (those of an MCP server, a namespace) goes by the name of the set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

from gateway.core.counting.measure import Wire
from gateway.core.errors import InvalidRequest
from gateway.core.repeated import Repeated
from gateway.core.values import dataclass
from gateway.dialects.fields import AnyFields, decode, refuse_other_spellings
from gateway.dialects.reasoning import THINKING_FIELDS, turns_thinking_on

#: what a request says of calling tools: none, as the model likes, one at the least
Mode = Literal["none", "auto", "required"]
#: by format: the fields that list tools
_LISTS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("tools", "functions"),
    "responses": ("tools",),
    "messages": ("tools", "mcp_servers"),
}
#: by format: all fields that say what is offered
_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    wire: (*lists, "tool_choice", *(("function_call",) if wire == "chat" else ()), *THINKING_FIELDS)
    for wire, lists in _LISTS.items()
}
#: Some servers read keys without regard to case.
_MEANT: Final = frozenset({"tools", "functions", "mcp_servers", "tool_choice", "function_call"})
#: Offers of at most so many bytes are cached, and so many of them: an agent sends the same tools with each call.
_KNOWN_BYTES: Final = 64 * 1024
KNOWN_OFFERS: Final = 256
#: No provider takes so much; to read more would keep other calls waiting.
_MOST_BYTES: Final = 4 * 1024 * 1024
_MOST_TOOLS: Final = 20_000
MODES: Final[Mapping[object, Mode]] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
#: `web_search_preview_2025_03_11` is `web_search`, `computer_use_preview` is `computer`
_VERSION: Final = re.compile(r"(?:_use)?(?:_preview)?(?:_\d{4}_?\d\d_?\d\d)?\Z")
#: types of tools that stand for several, which answers call by their own names
_SETS: Final = re.compile(r"mcp|namespace|\w*toolset(?:_\d+)?")
#: what answers call a tool that a provider runs -> how a request offers it
_RUN_BY_PROVIDERS: Final[Mapping[str, str]] = {
    **{
        f"{name}_call": name
        for name in (
            *("web_search", "file_search", "code_interpreter", "image_generation", "computer"),
            *("local_shell", "shell", "apply_patch", "tool_search"),
        )
    },
    "bash_code_execution": "code_execution",
    "text_editor_code_execution": "code_execution",
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """One tool of a request.

    `place`: its list, and where in it; `entry`: how a choice among tools names it; `is_set`: it stands for several.
    """

    name: str
    place: tuple[str, int]
    entry: Mapping[str, object]
    is_set: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ToolOffer:
    """What a request offers, and what it says of it.

    Attributes:
        wire: its format.
        tools: those that can be told apart by a name.
        lists: the fields that list them, as they came.
        mode: whether one has to be called.
        named: the only one that may be called, where it must be that one.
        among: those that may be called where the request itself says it of some.
        choice: what stood in `tool_choice`.
        thinks: whether it turns thinking on or off; None where it says nothing.
        names: of the tools that may be called as the request stands.
        is_known: it is kept in a cache, and so is what is made of it.
    """

    wire: Wire
    tools: tuple[OfferedTool, ...]
    lists: Mapping[str, bytes]
    mode: Mode
    named: str | None
    among: frozenset[str] | None
    choice: Any
    thinks: bool | None
    names: tuple[str, ...]
    is_known: bool

    @property
    def is_legacy(self) -> bool:
        """Whether the tools are `functions`."""
        return "functions" in self.lists

    def known_as(self, name: str, one_of: str | None = None) -> str:
        """The name under which the request offers a tool that an answer calls; its own where it does not.

        `one_of`: the set that it is one of, where the answer says so.
        """
        if one_of is not None and any(tool.is_set and tool.name == one_of for tool in self.tools):
            return one_of
        if name in self.names:
            return name
        names = {tool.name for tool in self.tools}
        name = name if name in names else _RUN_BY_PROVIDERS.get(name, name)
        sets = {tool.name for tool in self.tools if tool.is_set}
        return sets.pop() if name not in names and len(sets) == 1 else name


def offer_of(fields: AnyFields, wire: Wire) -> ToolOffer | None:
    """What a request offers; None where it offers no tools.

    Raises:
        InvalidRequest: nobody can be sure what it offers.
    """
    if wire not in _LISTS:
        return None
    refuse_other_spellings(fields, _MEANT)
    given, size = [], 0
    for field in _FIELDS[wire]:
        if field in fields:
            given.append((field, data := Repeated(bytes(fields[field]))))
            size += len(data.raw)
    if size > _MOST_BYTES:
        raise InvalidRequest(
            f"The tools of a request have at most {_MOST_BYTES:,} bytes where steps hold.", param="tools"
        )
    if size <= _KNOWN_BYTES:
        return _known_offer(tuple(given), wire)
    return _read_offer(tuple(given), wire, is_known=False)


def _read_offer(given: tuple[tuple[str, Repeated], ...], wire: Wire, *, is_known: bool = True) -> ToolOffer | None:
    """What these fields offer.

    Raises:
        InvalidRequest: nobody can be sure.
    """
    fields = {field: data.raw for field, data in given}
    listed = {field: _tools(fields[field], field, wire) for field in _LISTS[wire] if field in fields}
    found = {field: tools for field, tools in listed.items() if tools}
    if not found:
        return None
    if "tools" in found and "functions" in found:
        raise InvalidRequest('Send "tools" or "functions", not both: functions are the older form.', param="functions")
    choice_field = "function_call" if "functions" in found else "tool_choice"
    choice = decode(fields[choice_field]) if choice_field in fields else None
    thinks = turns_thinking_on(fields)
    mode, named, among = _said(choice, wire)
    tools = tuple(tool for one in found.values() for tool in one)
    lists = {field: fields[field] for field in found}
    names = _callable(tools, mode, named, among)
    return ToolOffer(wire, tools, lists, mode, named, among, choice, thinks, names, is_known)


_known_offer = lru_cache(KNOWN_OFFERS)(_read_offer)


def _callable(
    tools: Sequence[OfferedTool], mode: Mode, named: str | None, among: frozenset[str] | None
) -> tuple[str, ...]:
    if mode == "none":
        return ()
    names = dict.fromkeys(tool.name for tool in tools)
    if named is not None:
        return (named,) if named in names else ()
    return tuple(names) if among is None else tuple(name for name in names if name in among)


def _tools(data: bytes, field: str, wire: Wire) -> tuple[OfferedTool, ...]:
    """The tools of one list.

    Raises:
        InvalidRequest: it is none.
    """
    values = decode(data)
    if values is None and data.strip() == b"null":
        return ()
    if not isinstance(values, list):
        raise InvalidRequest(f'The field "{field}" must be an array.', param=field)
    _check_number(values, field)
    found = (_tool(value, (field, index), wire) for index, value in enumerate(values))
    return tuple(tool for tool in found if tool is not None)


def _check_number(tools: Sequence[object], field: str) -> None:
    """Refuse far too many tools.

    Raises:
        InvalidRequest: they are.
    """
    if len(tools) > _MOST_TOOLS:
        raise InvalidRequest(f"A request has at most {_MOST_TOOLS:,} tools where steps hold.", param=field)


def _tool(value: Any, place: tuple[str, int], wire: Wire) -> OfferedTool | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "function")
    names = dict(_names(value))
    if len(set(names.values())) > 1:
        raise InvalidRequest(f"A tool has more than one name: {', '.join(names.values())[:200]}.", param=place[0])
    is_set = place[0] == "mcp_servers" or (isinstance(kind, str) and _SETS.fullmatch(kind) is not None)
    for key, name in names.items():
        entry = {"type": key, key: {"name": name}} if wire == "chat" and key != "name" else {"type": kind, "name": name}
        return OfferedTool(name, place, entry, is_set)
    if label := _text(value.get("server_label")) or _text(value.get("mcp_server_name")):
        return OfferedTool(label, place, {"type": kind, "server_label": label}, is_set)
    kind = _text(kind)
    return OfferedTool(_without_version(kind), place, {"type": kind}, is_set) if kind else None


def _names(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a tool has a name, and what it is."""
    for key in ("function", "custom", str(value.get("type"))):
        inner = value.get(key)
        if isinstance(inner, dict) and (name := _text(inner.get("name"))):
            yield key, name
    if name := _text(value.get("name")):
        yield "name", name


def _text(value: Any) -> str:
    """A name; empty where it is none."""
    return value if isinstance(value, str) else ""


def _without_version(kind: str) -> str:
    return _VERSION.sub("", kind, count=1) or kind


def _said(choice: Any, wire: Wire) -> tuple[Mode, str | None, frozenset[str] | None]:
    """Mode, the only tool, and the tools among which one may be called.

    "none" only in the form that the provider reads: where it reads another it may go on as if nothing were said.

    Raises:
        InvalidRequest: it names far too many.
    """
    if isinstance(choice, str):
        mode = MODES.get(choice, "auto")
        return "auto" if mode == "none" and wire == "messages" else mode, None, None
    if not isinstance(choice, dict):
        return "auto", None, None
    kind = choice.get("type")
    if kind == "allowed_tools" and wire != "messages":
        inner = choice.get("allowed_tools")
        said = inner if isinstance(inner, dict) else choice
        entries = said.get("tools")
        entries = entries if isinstance(entries, list) else []
        _check_number(entries, "tool_choice")
        names = [_entry_name(entry) for entry in entries]
        return _mode_of(said.get("mode")), None, frozenset(name for name in names if name is not None)
    if isinstance(kind, str) and kind in MODES:
        return "auto" if kind == "none" and wire != "messages" else MODES[kind], None, None
    named = _entry_name(choice)
    return ("auto" if named is None else "required"), named, None


def _mode_of(value: object) -> Mode:
    return "required" if value == "required" else "auto"


def _entry_name(entry: Any) -> str | None:
    """The tool that an entry of a choice is about."""
    if not isinstance(entry, dict):
        return None
    if label := _text(entry.get("server_label")):
        return label
    return next((name for _, name in _names(entry)), None) or _without_version(_text(entry.get("type"))) or None
