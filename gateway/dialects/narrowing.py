"""How a request is told to call some of its tools only.

Two ways to narrow. A choice among some tools (`allowed_tools`, as OpenAI has it) leaves the list of tools as it is, and
with it the provider's prompt cache, which begins with the tools. Where a provider knows no such choice the list is
made shorter. A call that must use one certain tool names it and needs neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.values import dataclass
from gateway.dialects.fields import join
from gateway.dialects.tools import KNOWN_OFFERS, MODES, Mode, Offer, Tool

_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL: Final = msgspec.Raw(b"null")
#: what an entry of a list says of itself: the provider's cache ends here; it is loaded when a search has found it
_MARK: Final = "cache_control"
_LATER: Final = "defer_loading"


@dataclass(frozen=True, slots=True)
class Narrowing:
    """How a request is narrowed: the fields to set, encoded.

    `weighed`: the fields that change what a request weighs, as they are weighed: of a choice among tools only its mode,
    since no model reads it; `is_choice_among`: they hold nothing but such a choice, which a provider may not know.
    """

    fields: Mapping[str, msgspec.Raw]
    weighed: Mapping[str, bytes]
    is_choice_among: bool = False

    @classmethod
    def of(cls, changes: Mapping[str, object]) -> Narrowing:
        """Of fields as values."""
        encoded = {name: msgspec.json.encode(value) for name, value in changes.items()}
        choice = changes.get("tool_choice")
        weighed, is_among = encoded, isinstance(choice, dict) and choice.get("type") == "allowed_tools"
        if isinstance(choice, dict) and is_among:
            weighed = {**encoded, "tool_choice": msgspec.json.encode(choice.get("allowed_tools", choice)["mode"])}
        fields = {name: msgspec.Raw(data) for name, data in encoded.items()}
        return cls(fields, weighed, is_among and len(changes) == 1)


NOT_NARROWED: Final = Narrowing({}, {})
#: what weighs no more than a request that says nothing of it
_AS_UNSAID: Final = {"tool_choice": b'"auto"'}


def narrowed(offer: Offer, keep: tuple[str, ...], *, must: bool, has_choice: bool) -> Narrowing:
    """How a request is told to call these tools only; not at all where it says so already.

    Args:
        offer: what the request offers.
        keep: tools of it that may be called.
        must: one of them has to be.
        has_choice: the provider knows a choice among some tools.
    """
    narrow = _known_narrowing if offer.is_known else _narrowed
    return narrow(offer, keep, must, has_choice)


def _narrowed(offer: Offer, keep: tuple[str, ...], must: bool, has_choice: bool) -> Narrowing:  # noqa: FBT001
    changes = _changes(offer, keep, must=must, has_choice=has_choice)
    if not changes:
        return NOT_NARROWED
    narrowing = Narrowing.of(changes)
    is_as_before = offer.choice is None and narrowing.weighed == _AS_UNSAID
    return replace(narrowing, weighed={}) if is_as_before else narrowing


_known_narrowing = lru_cache(KNOWN_OFFERS)(_narrowed)


def _changes(offer: Offer, keep: Collection[str], *, must: bool, has_choice: bool) -> dict[str, object]:
    names = frozenset(keep)
    kept = tuple(tool for tool in offer.tools if tool.name in names)
    if not kept:
        return {_choice_field(offer): _none(offer)} if offer.mode != "none" else {}
    # One whose type is the word of a mode cannot be named: the choice would be read as that mode.
    is_one = len(kept) == 1 and not kept[0].is_set and kept[0].entry.get("type") not in MODES
    must = must and offer.can_force and (is_one or not offer.is_legacy)
    is_narrower = not names.issuperset(offer.names)
    mode: Mode = "required" if must else offer.mode
    if not is_narrower and (mode == offer.mode or offer.named is not None):
        return {}
    if must and is_one:
        return {_choice_field(offer): _named(offer, kept[0])}
    if not is_narrower:
        return {"tool_choice": _among(offer, mode)}
    if has_choice and offer.wire != "messages" and not offer.is_legacy:
        return {"tool_choice": _allowed(offer.wire, kept, mode)}
    return _shorter(offer, kept, mode)


def _choice_field(offer: Offer) -> str:
    return "function_call" if offer.is_legacy else "tool_choice"


def _shorter(offer: Offer, kept: Sequence[Tool], mode: Mode) -> dict[str, object]:
    """Lists of fewer tools; a choice among tools that the request had is among fewer as well."""
    places = [tool.place for tool in kept]
    changes: dict[str, object] = {
        field: join(_entries(raw, {index for listed, index in places if listed == field}))
        for field, raw in offer.lists.items()
    }
    if offer.among is not None:
        changes["tool_choice"] = _allowed(offer.wire, kept, mode)
    elif mode != offer.mode:
        changes["tool_choice"] = _among(offer, mode)
    return changes


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


def _allowed(wire: Wire, kept: Sequence[Tool], mode: Mode) -> dict[str, object]:
    """See https://platform.openai.com/docs/guides/function-calling, "Allowed tools"."""
    said = {"mode": mode, "tools": [tool.entry for tool in kept]}
    return {"type": "allowed_tools", "allowed_tools": said} if wire == "chat" else {"type": "allowed_tools", **said}


def _among(offer: Offer, mode: Mode) -> object:
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


def _named(offer: Offer, tool: Tool) -> object:
    if offer.is_legacy:
        return {"name": tool.name}
    if offer.wire == "messages":
        choice = offer.choice if isinstance(offer.choice, dict) else {}
        return {**choice, "type": "tool", "name": tool.name}
    return tool.entry


def _none(offer: Offer) -> object:
    return {"type": "none"} if offer.wire == "messages" else "none"
