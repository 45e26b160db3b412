"""Restrict a request to some of its tools.

There are three ways:

- A choice among some tools (OpenAI's `allowed_tools`) keeps the list of tools unchanged. This keeps the provider's
  prompt cache, whose prefix begins with the tools.
- If a provider knows no such choice, the list is shortened.
- A call that must use one certain tool names it in `tool_choice`.

If a model's thinking is bound to its list of tools, the list is the same with each call, in every step. If the model
accepts it, a system message withdraws the other tools (see `gateway.core.tool_changes`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from gateway.core.counting.families import TokenizerFamily
from gateway.core.counting.measure import Wire
from gateway.core.values import dataclass
from gateway.dialects.fields import join
from gateway.dialects.tools import KNOWN_OFFERS, MODES, Mode, OfferedTool, ToolOffer

_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL: Final = msgspec.Raw(b"null")
#: Fields of an entry in a list of tools: the provider's cache ends here; the tool is loaded after a search found it.
_CACHE_MARK: Final = "cache_control"
_DEFERRED: Final = "defer_loading"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Tools that a system message inside the conversation withdraws.

    Attributes:
        tools: names of the tools that such a message may name.
        withdrawn: those of them that are not offered now; None if nothing changes.
    """

    tools: frozenset[str]
    withdrawn: frozenset[str] | None = frozenset()


@dataclass(frozen=True, slots=True)
class ToolRestriction:
    """Changes that restrict the tools of a request.

    Attributes:
        fields: the fields to set, encoded.
        counted: the fields that change the token count of the request. Of a choice among tools only the mode counts,
            because no model reads the choice.
        is_choice_among: `fields` has only a choice among tools, which a provider may not know.
        is_forced: `fields` forces a tool call that the client did not force.
        still_offered: tools that stay offered although they must not be called.
        withdrawal: the tools that a system message withdraws; None if the model accepts no such message.
    """

    fields: Mapping[str, msgspec.Raw]
    counted: Mapping[str, bytes]
    is_choice_among: bool = False
    is_forced: bool = False
    still_offered: tuple[str, ...] = ()
    withdrawal: Withdrawal | None = None

    @classmethod
    def of(cls, changes: Mapping[str, object]) -> ToolRestriction:
        """Create a restriction from decoded fields."""
        encoded = {name: msgspec.json.encode(value) for name, value in changes.items()}
        choice = changes.get("tool_choice")
        counted, is_among = encoded, isinstance(choice, dict) and choice.get("type") == "allowed_tools"
        if isinstance(choice, dict) and is_among:
            counted = {**encoded, "tool_choice": msgspec.json.encode(choice.get("allowed_tools", choice)["mode"])}
        fields = {name: msgspec.Raw(data) for name, data in encoded.items()}
        return cls(fields, counted, is_among and len(changes) == 1)


UNRESTRICTED: Final = ToolRestriction({}, {})
#: a field that has no more tokens than a request without it
_DEFAULT_CHOICE: Final = {"tool_choice": b'"auto"'}


class RestrictionSupport(NamedTuple):
    """Ways to restrict tools that a model accepts.

    Attributes:
        choice: a choice among some tools (`allowed_tools`).
        forced: a forced tool call.
        listed: the names that its list of tools must have with each call, in every step; None if it is free.
        referenced: names that the list must contain, because messages refer to them.
        allowed: names that the step allows, if a system message can withdraw the other tools; None if it cannot.
    """

    choice: bool = False
    forced: bool = True
    listed: frozenset[str] | None = None
    referenced: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None


def accepts_forced(family: TokenizerFamily, offer: ToolOffer) -> bool:
    """Return whether a model accepts a forced tool call, according to its family and the request."""
    if family.forced_choice == "accepted":
        # Claude models before those with bound thinking refuse a forced call while thinking is on
        # (https://platform.claude.com/docs/en/build-with-claude/extended-thinking, "Extended thinking with tool use").
        return family.binding == "prefix" or not (offer.wire == "messages" and offer.thinks)
    thinks = family.thinks == "unasked" if offer.thinks is None else offer.thinks
    return family.forced_choice == "not_thinking" and not thinks


def restricted(offer: ToolOffer, keep: tuple[str, ...], *, must: bool, takes: RestrictionSupport) -> ToolRestriction:
    """Return the changes so that a request calls these tools only; no changes if it already does.

    Args:
        offer: the tools that the request offers.
        keep: names of the tools that may be called.
        must: one of them must be called.
        takes: the ways to restrict tools that the model accepts.
    """
    restrict = _known_restriction if offer.is_known else _restricted
    return restrict(offer, keep, must, takes)


def _restricted(offer: ToolOffer, keep: tuple[str, ...], must: bool, takes: RestrictionSupport) -> ToolRestriction:  # noqa: FBT001
    names = frozenset(keep)
    kept = tuple(tool for tool in offer.tools if tool.name in names)
    is_forced = must and takes.forced and bool(kept) and (_is_one(kept) or not offer.is_legacy)
    changes = _changes(offer, kept, takes, is_forced=is_forced)
    withdrawal = _withdrawal(offer, kept, takes)
    withdrawn = (withdrawal.withdrawn if withdrawal is not None else None) or frozenset()
    beyond = tuple(name for name in _beyond(offer, kept, takes, is_forced=is_forced) if name not in withdrawn)
    if not changes:
        return (
            replace(UNRESTRICTED, still_offered=beyond, withdrawal=withdrawal) if beyond or withdrawal else UNRESTRICTED
        )
    restriction = replace(
        ToolRestriction.of(changes),
        is_forced=is_forced and offer.mode != "required",
        still_offered=beyond,
        withdrawal=withdrawal,
    )
    has_same_count = offer.choice is None and restriction.counted == _DEFAULT_CHOICE
    return replace(restriction, counted={}) if has_same_count else restriction


_known_restriction = lru_cache(KNOWN_OFFERS)(_restricted)


def _changes(
    offer: ToolOffer, kept: Sequence[OfferedTool], takes: RestrictionSupport, *, is_forced: bool
) -> dict[str, object]:
    """Return the fields to set, as decoded values."""
    same = _lists(offer, takes.listed) if takes.listed is not None else {}
    if not kept:
        return same | ({_choice_field(offer): _none(offer)} if offer.mode != "none" else {})
    is_stricter = not {tool.name for tool in kept}.issuperset(offer.names)
    mode: Mode = "required" if is_forced else offer.mode
    if not is_stricter and (mode == offer.mode or offer.named is not None):
        return same
    if is_forced and _is_one(kept):
        return same | {_choice_field(offer): _named(offer, kept[0])}
    if is_stricter and (offer.among is not None or _has_choice(offer, takes)):
        choice: dict[str, object] = {"tool_choice": _allowed(offer.wire, kept, mode)}
    else:
        choice = {"tool_choice": _among(offer, mode)} if mode != offer.mode else {}
    if not is_stricter or takes.listed is not None or _has_choice(offer, takes):
        return same | choice
    return _lists(offer, {tool.name for tool in kept} | takes.referenced) | choice


def _is_one(kept: Sequence[OfferedTool]) -> bool:
    """Return True if only one tool may be called and a choice can name it.

    A tool whose type is the word of a mode cannot be named: the provider would read the choice as that mode.
    """
    return len(kept) == 1 and not kept[0].is_set and kept[0].entry.get("type") not in MODES


def _has_choice(offer: ToolOffer, takes: RestrictionSupport) -> bool:
    return takes.choice and offer.wire != "messages" and not offer.is_legacy


def _beyond(
    offer: ToolOffer, kept: Sequence[OfferedTool], takes: RestrictionSupport, *, is_forced: bool
) -> tuple[str, ...]:
    """Return the tools that stay offered although they must not be called."""
    is_in_choice = (is_forced and _is_one(kept)) or offer.among is not None or _has_choice(offer, takes)
    if not kept or is_in_choice or (takes.listed is None and not takes.referenced):
        return ()
    names = {tool.name for tool in kept}
    listed = names | takes.referenced if takes.listed is None else takes.listed
    return tuple(name for name in offer.names if name in listed and name not in names)


def offering_all(offer: ToolOffer, *, is_free: bool) -> ToolRestriction:
    """Return the changes that offer all tools again, including withdrawn ones, for a request without restriction.

    `is_free`: the response calls no tools, so nothing has to change.
    """
    withdrawn = None if is_free or offer.mode == "none" else frozenset[str]()
    return replace(UNRESTRICTED, withdrawal=Withdrawal(_named_by_messages(offer, None), withdrawn))


def _withdrawal(offer: ToolOffer, kept: Sequence[OfferedTool], takes: RestrictionSupport) -> Withdrawal | None:
    if takes.allowed is None:
        return None
    tools = _named_by_messages(offer, takes.listed)
    # If no tool may be called, `tool_choice` says so, and the conversation stays as it is.
    return Withdrawal(tools, tools - takes.allowed if kept else None)


def _named_by_messages(offer: ToolOffer, listed: frozenset[str] | None) -> frozenset[str]:
    """Return the tools that a system message can withdraw: they have a name and are offered from the start."""
    later = {
        (field, index)
        for field, raw in offer.lists.items()
        if _DEFERRED.encode() in raw
        for index, entry in enumerate(map(bytes, _RAW_LIST.decode(raw)))
        if _is_loaded_later(entry)
    }
    return frozenset(
        tool.name
        for tool in offer.tools
        if tool.entry.get("name") == tool.name
        and not (tool.is_set or tool.place in later)
        and (listed is None or tool.name in listed)
    )


def _choice_field(offer: ToolOffer) -> str:
    return "function_call" if offer.is_legacy else "tool_choice"


def _lists(offer: ToolOffer, names: Collection[str]) -> dict[str, object]:
    """Return the lists with these tools only; empty if the lists have no other tools, or none of these."""
    places = [tool.place for tool in offer.tools if tool.name in names]
    if not places or len(places) == len(offer.tools):
        return {}
    return {
        field: join(_entries(raw, {index for listed, index in places if listed == field}))
        for field, raw in offer.lists.items()
    }


def _entries(raw: bytes, places: Collection[int]) -> list[bytes]:
    """Return the entries of a list at these places, changed so that the provider accepts them without the others.

    A cache mark moves to the previous kept entry. A list is refused if all its tools are loaded after a search
    (https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool).
    """
    kept: list[bytes] = []
    for index, entry in enumerate(map(bytes, _RAW_LIST.decode(raw))):
        if index in places:
            kept.append(entry)
        elif kept and _CACHE_MARK.encode() in entry and entry.startswith(b"{"):
            kept[-1] = _marked(kept[-1], _ENTRY.decode(entry).get(_CACHE_MARK, _NULL))
    if all(map(_is_loaded_later, kept)):
        kept = [_with(entry, {_DEFERRED: msgspec.Raw(b"false")}) for entry in kept]
    return kept


def _marked(entry: bytes, mark: msgspec.Raw) -> bytes:
    has_mark = bytes(_ENTRY.decode(entry).get(_CACHE_MARK, _NULL)) != bytes(_NULL)
    if has_mark or bytes(mark) == bytes(_NULL) or _is_loaded_later(entry):
        return entry
    return _with(entry, {_CACHE_MARK: mark})


def _is_loaded_later(entry: bytes) -> bool:
    return _DEFERRED.encode() in entry and bytes(_ENTRY.decode(entry).get(_DEFERRED, _NULL)) == b"true"


def _with(entry: bytes, changes: Mapping[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode({**_ENTRY.decode(entry), **changes})


def _allowed(wire: Wire, kept: Sequence[OfferedTool], mode: Mode) -> dict[str, object]:
    """Return a choice among tools: https://platform.openai.com/docs/guides/function-calling, "Allowed tools"."""
    allowed = {"mode": mode, "tools": [tool.entry for tool in kept]}
    if wire == "chat":
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return {"type": "allowed_tools", **allowed}


def _among(offer: ToolOffer, mode: Mode) -> object:
    """Return the request's choice with another mode."""
    choice = offer.choice
    if offer.wire == "messages":
        return {**(choice if isinstance(choice, dict) else {}), "type": "any" if mode == "required" else mode}
    if offer.among is None:
        return mode
    inner = choice.get("allowed_tools")
    if isinstance(inner, dict):
        return {**choice, "allowed_tools": {**inner, "mode": mode}}
    return {**choice, "mode": mode}


def _named(offer: ToolOffer, tool: OfferedTool) -> object:
    if offer.is_legacy:
        return {"name": tool.name}
    if offer.wire == "messages":
        choice = offer.choice if isinstance(offer.choice, dict) else {}
        return {**choice, "type": "tool", "name": tool.name}
    return tool.entry


def _none(offer: ToolOffer) -> object:
    return {"type": "none"} if offer.wire == "messages" else "none"
