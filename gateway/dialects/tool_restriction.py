"""Restrict a request to some of its tools.

Two ways to narrow. A choice among some tools (`allowed_tools`, as OpenAI has it) leaves the list of tools as it is, and
with it the provider's prompt cache, which begins with the tools. Where a provider knows no such choice the list is
made shorter. A call that must use one certain tool names it and needs neither.

Where a model's thinking is bound to its list of tools, the list is the same with each call, whatever the step. If the
model accepts it, a system message withdraws the other tools (see `gateway.core.tool_changes`).
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
#: what an entry of a list says of itself: the provider's cache ends here; it is loaded when a search has found it
_MARK: Final = "cache_control"
_LATER: Final = "defer_loading"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Which tools a system message inside the conversation withdraws.

    Attributes:
        tools: names of the tools that such a message may name.
        withdrawn: those of them that are not offered now; None if nothing changes.
    """

    tools: frozenset[str]
    withdrawn: frozenset[str] | None = frozenset()


@dataclass(frozen=True, slots=True)
class ToolRestriction:
    """How a request is narrowed: the fields to set, encoded.

    `counted`: the fields that change what a request weighs, as they are weighed: of a choice among tools only its mode,
    since no model reads it; `is_choice_among`: they hold nothing but such a choice, which a provider may not know;
    `is_forced`: they force a tool call that the client did not; `beyond`: tools that stay offered though they may not
    be called; `withdrawal`: what is withdrawn by a system message; None if the model accepts no such message.
    """

    fields: Mapping[str, msgspec.Raw]
    counted: Mapping[str, bytes]
    is_choice_among: bool = False
    is_forced: bool = False
    beyond: tuple[str, ...] = ()
    withdrawal: Withdrawal | None = None

    @classmethod
    def of(cls, changes: Mapping[str, object]) -> ToolRestriction:
        """Of fields as values."""
        encoded = {name: msgspec.json.encode(value) for name, value in changes.items()}
        choice = changes.get("tool_choice")
        counted, is_among = encoded, isinstance(choice, dict) and choice.get("type") == "allowed_tools"
        if isinstance(choice, dict) and is_among:
            counted = {**encoded, "tool_choice": msgspec.json.encode(choice.get("allowed_tools", choice)["mode"])}
        fields = {name: msgspec.Raw(data) for name, data in encoded.items()}
        return cls(fields, counted, is_among and len(changes) == 1)


UNRESTRICTED: Final = ToolRestriction({}, {})
#: what weighs no more than a request that says nothing of it
_AS_UNSAID: Final = {"tool_choice": b'"auto"'}


class RestrictionSupport(NamedTuple):
    """What a model accepts of what restricts its tools.

    Attributes:
        choice: a choice among some tools (`allowed_tools`).
        forced: a forced tool call.
        listed: the names that its list of tools must have with each call, whatever the step; None: any.
        referenced: names that a list may not lack, because messages refer to them.
        allowed: names that the step allows, if a system message can withdraw the other tools; None if it cannot.
    """

    choice: bool = False
    forced: bool = True
    listed: frozenset[str] | None = None
    referenced: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None


def takes_forced(family: TokenizerFamily, offer: ToolOffer) -> bool:
    """Return whether a model accepts that a tool call is forced, as far as its family and the request say."""
    if family.forced_choice == "accepted":
        # Claude models before those whose thinking is bound refuse it while they think
        # (https://platform.claude.com/docs/en/build-with-claude/extended-thinking, "Extended thinking with tool use").
        return family.binding == "prefix" or not (offer.wire == "messages" and offer.thinks)
    thinks = family.thinks == "unasked" if offer.thinks is None else offer.thinks
    return family.forced_choice == "not_thinking" and not thinks


def restricted(offer: ToolOffer, keep: tuple[str, ...], *, must: bool, takes: RestrictionSupport) -> ToolRestriction:
    """How a request is told to call these tools only; not at all where it says so already.

    Args:
        offer: what the request offers.
        keep: tools of it that may be called.
        must: one of them has to be.
        takes: what its model accepts.
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
    beyond = tuple(one for one in _beyond(offer, kept, takes, is_forced=is_forced) if one not in withdrawn)
    if not changes:
        return replace(UNRESTRICTED, beyond=beyond, withdrawal=withdrawal) if beyond or withdrawal else UNRESTRICTED
    restriction = replace(
        ToolRestriction.of(changes),
        is_forced=is_forced and offer.mode != "required",
        beyond=beyond,
        withdrawal=withdrawal,
    )
    is_as_before = offer.choice is None and restriction.counted == _AS_UNSAID
    return replace(restriction, counted={}) if is_as_before else restriction


_known_restriction = lru_cache(KNOWN_OFFERS)(_restricted)


def _changes(
    offer: ToolOffer, kept: Sequence[OfferedTool], takes: RestrictionSupport, *, is_forced: bool
) -> dict[str, object]:
    """The fields to set, as values."""
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
    """Whether what may be called is one tool that can be named.

    One whose type is the word of a mode cannot: the choice would be read as that mode.
    """
    return len(kept) == 1 and not kept[0].is_set and kept[0].entry.get("type") not in MODES


def _has_choice(offer: ToolOffer, takes: RestrictionSupport) -> bool:
    return takes.choice and offer.wire != "messages" and not offer.is_legacy


def _beyond(
    offer: ToolOffer, kept: Sequence[OfferedTool], takes: RestrictionSupport, *, is_forced: bool
) -> tuple[str, ...]:
    """Return the tools that stay offered though they may not be called."""
    is_told = (is_forced and _is_one(kept)) or offer.among is not None or _has_choice(offer, takes)
    if not kept or is_told or (takes.listed is None and not takes.referenced):
        return ()
    names = {tool.name for tool in kept}
    listed = names | takes.referenced if takes.listed is None else takes.listed
    return tuple(name for name in offer.names if name in listed and name not in names)


def offering_all(offer: ToolOffer, *, is_free: bool) -> ToolRestriction:
    """Return how a request that no step restricts offers its tools again: all that were withdrawn before.

    `is_free`: its response calls no tools, so nothing has to change.
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
    """Return the tools that a system message can withdraw: each has a name, and is offered from the start."""
    later = {
        (field, index)
        for field, raw in offer.lists.items()
        if _LATER.encode() in raw
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
    """The lists with these tools only; nothing where they have no others, or none of these."""
    places = [tool.place for tool in offer.tools if tool.name in names]
    if not places or len(places) == len(offer.tools):
        return {}
    return {
        field: join(_entries(raw, {index for listed, index in places if listed == field}))
        for field, raw in offer.lists.items()
    }


def _entries(raw: bytes, places: Collection[int]) -> list[bytes]:
    """The entries of a list at these places, so that they can stand without the others.

    A mark for the provider's cache moves to the entry before it. A list of nothing but tools that are loaded when a
    search has found them is refused (https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool).
    """
    kept: list[bytes] = []
    for index, entry in enumerate(map(bytes, _RAW_LIST.decode(raw))):
        if index in places:
            kept.append(entry)
        elif kept and _MARK.encode() in entry and entry.startswith(b"{"):
            kept[-1] = _marked(kept[-1], _ENTRY.decode(entry).get(_MARK, _NULL))
    if all(map(_is_loaded_later, kept)):
        kept = [_with(entry, {_LATER: msgspec.Raw(b"false")}) for entry in kept]
    return kept


def _marked(entry: bytes, mark: msgspec.Raw) -> bytes:
    has_mark = bytes(_ENTRY.decode(entry).get(_MARK, _NULL)) != bytes(_NULL)
    if has_mark or bytes(mark) == bytes(_NULL) or _is_loaded_later(entry):
        return entry
    return _with(entry, {_MARK: mark})


def _is_loaded_later(entry: bytes) -> bool:
    return _LATER.encode() in entry and bytes(_ENTRY.decode(entry).get(_LATER, _NULL)) == b"true"


def _with(entry: bytes, changes: Mapping[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode({**_ENTRY.decode(entry), **changes})


def _allowed(wire: Wire, kept: Sequence[OfferedTool], mode: Mode) -> dict[str, object]:
    """Return a choice among tools: https://platform.openai.com/docs/guides/function-calling, "Allowed tools"."""
    said = {"mode": mode, "tools": [tool.entry for tool in kept]}
    return {"type": "allowed_tools", "allowed_tools": said} if wire == "chat" else {"type": "allowed_tools", **said}


def _among(offer: ToolOffer, mode: Mode) -> object:
    """The choice with another mode."""
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
