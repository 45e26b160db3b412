"""Read the tools that a request offers, and its choice among them.

`dialects/tool_restriction.py` changes a request so that it offers fewer tools.

A tool that the provider runs is named by its type without the version, such as `web_search`. A set of tools that the
request does not list (an MCP server, a namespace) is named by the name of the set.
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

#: how tools are to be called: not at all, as the model decides, or at least one
Mode = Literal["none", "auto", "required"]
#: the fields that list tools, by format
_LISTS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("tools", "functions"),
    "responses": ("tools",),
    "messages": ("tools", "mcp_servers"),
}
#: all fields that describe the offer, by format
_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    wire: (*lists, "tool_choice", *(("function_call",) if wire == "chat" else ()), *THINKING_FIELDS)
    for wire, lists in _LISTS.items()
}
#: the fields to check for other spellings, because some servers ignore the case of keys
_MEANT: Final = frozenset({"tools", "functions", "mcp_servers", "tool_choice", "function_call"})
#: Size limit in bytes of a cached offer, and the number of cached offers. An agent sends the same tools with each call.
_KNOWN_BYTES: Final = 64 * 1024
KNOWN_OFFERS: Final = 256
#: No provider accepts as much, and parsing more would delay other calls.
_MAX_BYTES: Final = 4 * 1024 * 1024
_MAX_TOOLS: Final = 20_000
MODES: Final[Mapping[object, Mode]] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
#: `web_search_preview_2025_03_11` is `web_search`, `computer_use_preview` is `computer`
_VERSION: Final = re.compile(r"(?:_use)?(?:_preview)?(?:_\d{4}_?\d\d_?\d\d)?\Z")
#: types of entries that represent a set of tools, which a response calls by their own names
_SETS: Final = re.compile(r"mcp|namespace|\w*toolset(?:_\d+)?")
#: name of a provider-run tool in a response -> its name in a request
_PROVIDER_TOOLS: Final[Mapping[str, str]] = {
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

    Attributes:
        name: the name by which a step or a response refers to it.
        place: the field of its list, and its index there.
        entry: how a choice among tools names it.
        is_set: it represents a set of tools.
    """

    name: str
    place: tuple[str, int]
    entry: Mapping[str, object]
    is_set: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ToolOffer:
    """Tools that a request offers, and its choice among them.

    Attributes:
        wire: the format of the request.
        tools: the tools that can be identified by a name.
        lists: the fields that list the tools, unchanged.
        mode: whether a tool must be called.
        named: the one tool that must be called, if the request names it.
        among: the tools that may be called, if the request itself restricts them.
        choice: the value of `tool_choice`.
        thinks: True or False if the request turns thinking on or off; None if it does not say.
        names: the names of the tools that may be called according to the request.
        is_known: this offer is cached, so its restrictions can be cached too.
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
        """Return True if the tools are in the legacy field `functions`."""
        return "functions" in self.lists

    def offered_name(self, name: str, one_of: str | None = None) -> str:
        """Return the name under which the request offers a called tool; the name itself if it does not offer it.

        `one_of`: the set that the tool belongs to, if the response names it.
        """
        if one_of is not None and any(tool.is_set and tool.name == one_of for tool in self.tools):
            return one_of
        if name in self.names:
            return name
        names = {tool.name for tool in self.tools}
        name = name if name in names else _PROVIDER_TOOLS.get(name, name)
        sets = {tool.name for tool in self.tools if tool.is_set}
        return sets.pop() if name not in names and len(sets) == 1 else name


def read_offer(fields: AnyFields, wire: Wire) -> ToolOffer | None:
    """Return the tools that a request offers; None if it offers none.

    Raises:
        InvalidRequest: the offer is ambiguous or too large.
    """
    if wire not in _LISTS:
        return None
    refuse_other_spellings(fields, _MEANT)
    given, size = [], 0
    for field in _FIELDS[wire]:
        if field in fields:
            given.append((field, data := Repeated(bytes(fields[field]))))
            size += len(data.raw)
    if size > _MAX_BYTES:
        raise InvalidRequest(
            f"The tools of a request may have at most {_MAX_BYTES:,} bytes when steps are enforced.", param="tools"
        )
    if size <= _KNOWN_BYTES:
        return _known_offer(tuple(given), wire)
    return _read_offer(tuple(given), wire, is_known=False)


def _read_offer(given: tuple[tuple[str, Repeated], ...], wire: Wire, *, is_known: bool = True) -> ToolOffer | None:
    """Return the offer in these fields.

    Raises:
        InvalidRequest: the offer is ambiguous.
    """
    fields = {field: data.raw for field, data in given}
    listed = {field: _tools(fields[field], field, wire) for field in _LISTS[wire] if field in fields}
    offered = {field: tools for field, tools in listed.items() if tools}
    if not offered:
        return None
    if "tools" in offered and "functions" in offered:
        raise InvalidRequest('Send "tools" or "functions", not both: functions are the older form.', param="functions")
    choice_field = "function_call" if "functions" in offered else "tool_choice"
    choice = decode(fields[choice_field]) if choice_field in fields else None
    thinks = turns_thinking_on(fields)
    mode, named, among = _read_choice(choice, wire)
    tools = tuple(tool for entries in offered.values() for tool in entries)
    lists = {field: fields[field] for field in offered}
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
    """Return the tools of one list.

    Raises:
        InvalidRequest: the value is not a list, or has too many tools.
    """
    values = decode(data)
    if values is None and data.strip() == b"null":
        return ()
    if not isinstance(values, list):
        raise InvalidRequest(f'The field "{field}" must be an array.', param=field)
    _check_number(values, field)
    entries = (_tool(value, (field, index), wire) for index, value in enumerate(values))
    return tuple(tool for tool in entries if tool is not None)


def _check_number(tools: Sequence[object], field: str) -> None:
    """Refuse too many tools.

    Raises:
        InvalidRequest: there are more than `_MAX_TOOLS`.
    """
    if len(tools) > _MAX_TOOLS:
        raise InvalidRequest(f"A request may have at most {_MAX_TOOLS:,} tools when steps are enforced.", param=field)


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
    """Yield the places in an entry that hold a name, with the name."""
    for key in ("function", "custom", str(value.get("type"))):
        inner = value.get(key)
        if isinstance(inner, dict) and (name := _text(inner.get("name"))):
            yield key, name
    if name := _text(value.get("name")):
        yield "name", name


def _text(value: Any) -> str:
    """Return the value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def _without_version(kind: str) -> str:
    return _VERSION.sub("", kind, count=1) or kind


def _read_choice(choice: Any, wire: Wire) -> tuple[Mode, str | None, frozenset[str] | None]:
    """Return the mode, the only tool that must be called, and the tools that may be called.

    The mode is "none" only in the provider's own form. A provider ignores other forms, and the model may call a tool.

    Raises:
        InvalidRequest: the choice names too many tools.
    """
    if isinstance(choice, str):
        mode = MODES.get(choice, "auto")
        return "auto" if mode == "none" and wire == "messages" else mode, None, None
    if not isinstance(choice, dict):
        return "auto", None, None
    kind = choice.get("type")
    if kind == "allowed_tools" and wire != "messages":
        inner = choice.get("allowed_tools")
        allowed = inner if isinstance(inner, dict) else choice
        entries = allowed.get("tools")
        entries = entries if isinstance(entries, list) else []
        _check_number(entries, "tool_choice")
        names = [_entry_name(entry) for entry in entries]
        return _mode_of(allowed.get("mode")), None, frozenset(name for name in names if name is not None)
    if isinstance(kind, str) and kind in MODES:
        return "auto" if kind == "none" and wire != "messages" else MODES[kind], None, None
    named = _entry_name(choice)
    return ("auto" if named is None else "required"), named, None


def _mode_of(value: object) -> Mode:
    return "required" if value == "required" else "auto"


def _entry_name(entry: Any) -> str | None:
    """Return the name of the tool in an entry of a choice."""
    if not isinstance(entry, dict):
        return None
    if label := _text(entry.get("server_label")):
        return label
    return next((name for _, name in _names(entry)), None) or _without_version(_text(entry.get("type"))) or None
