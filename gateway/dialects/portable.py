"""Find what in a request binds it to its model, so that another model may refuse or misread it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.core.providers import MODEL_FIELDS
from gateway.dialects.audio import asks_for_more_than_text
from gateway.dialects.fields import UNREADABLE, AnyFields, Fields, decode
from gateway.dialects.reasoning import has_thinking

#: Parts with images, audio, video or files, by their type. Not every model reads them.
_MEDIA: Final = re.compile(
    rb'"type"\s*:\s*"(?:(?:input_)?(?:image|audio|video|file)(?:_url)?|document(?:_url)?|computer_screenshot)"'
)
#: Reasoning that some providers bind to their model, besides what `has_thinking` finds: of DeepSeek, Kimi and Google.
_BOUND_REASONING: Final = re.compile(rb'"(?:reasoning_content|thought_signature|thoughtSignature|extra_content)"')
#: types of tools that the client runs, which every model with tools can call, by format
_CLIENT_TOOLS: Final[Mapping[Wire, tuple[object, ...]]] = {
    "chat": ("function",),
    "responses": ("function",),
    "messages": (None, "custom"),
}
#: fields with tools or content of the provider, and fields of its newest models
_OF_PROVIDER: Final = (
    *("mcp_servers", "web_search_options", "plugins", "container", "search_parameters", "data_sources"),
    *("context_management", "prompt", "conversation", "previous_response_id", "thread", "prediction"),
)
#: names of fields that name further models
_NAMES_MODELS: Final = tuple(field.name for field in MODEL_FIELDS if field.is_instead)
_TOOL_LIST: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_MISSING: Final = b"null"


def has_model_reasoning(fields: AnyFields, wire: Wire) -> bool:
    """Return whether the messages contain reasoning that only some models accept or read."""
    messages = bytes(fields.get(ITEMS[wire], b""))
    return has_thinking(messages) or _BOUND_REASONING.search(messages) is not None


def bound_to_model(fields: Fields, wire: Wire) -> str | None:
    """Return what in a request only its own model may accept, besides reasoning; None if there is nothing.

    No JSON of the messages is parsed, so a tool call with such a `type` among its arguments counts as well.
    """
    given = next((name for name in (*_OF_PROVIDER, *_NAMES_MODELS) if _is_set(fields, name)), None)
    if given is not None:
        return f"the field {given}"
    if asks_for_more_than_text(fields):
        return "an output other than text"
    if _MEDIA.search(bytes(fields.get(ITEMS[wire], b""))):
        return "images, audio or files"
    return None if _has_client_tools_only(fields, wire) else "a tool that the provider runs"


def _is_set(fields: AnyFields, name: str) -> bool:
    return name in fields and bytes(fields[name]) not in (_MISSING, b"[]", b"{}")


def _has_client_tools_only(fields: Fields, wire: Wire) -> bool:
    if not _is_set(fields, "tools"):
        return True
    try:
        tools = _TOOL_LIST.decode(fields["tools"])
    except UNREADABLE:
        return False
    return all(decode(tool.get("type", _MISSING)) in _CLIENT_TOOLS[wire] for tool in tools)
