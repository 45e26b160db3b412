"""State the rules of Claude models that concern one request alone: its fields, and the order of its messages.

Used by `claude_checker`, so no code of the gateway is used. The sources are the "what's new" page of each model and the
reference of the Messages API.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Block = Mapping[str, Any]
Body = Mapping[str, Any]

BETA = "thinking-binding-controls-2026-08-01"

_NAME = re.compile(r"claude-(fable|mythos|opus|sonnet|haiku)-(\d+)(?:-(\d)(?!\d))?")
_TOP = ("fable", "mythos")


@dataclass(frozen=True)
class Finding:
    """A rule that a request breaks: where, which rule, and what the provider does about it."""

    path: str
    rule: str
    detail: str
    effect: Literal["refused", "dropped", "tolerated"] = "refused"
    sure: bool = True


@dataclass(frozen=True)
class Model:
    """A Claude model: the family of its name, and its version."""

    family: str
    version: tuple[int, int]

    @classmethod
    def of(cls, name: str) -> "Model":
        found = _NAME.search(name)
        return cls(found[1], (int(found[2]), int(found[3] or 0))) if found else cls("other", (0, 0))

    @property
    def checks_prefix(self) -> bool:
        """Return True for the models that bind thinking to its prefix: 5.1 and later, and 5.5 and later."""
        return self.version >= ((5, 1) if self.family in _TOP else (5, 5)) and self.family != "other"

    @property
    def always_refuses(self) -> bool:
        """Return True if a changed prefix is an error on every account, even on old accounts."""
        return self.family in _TOP and self.version >= ((5, 2) if self.family == "fable" else (5, 1))

    def reads(self, other: "Model") -> bool | None:
        """Return whether this model reads the thinking of `other`, or None if the pages do not say."""
        if self == other:
            return True
        if other.family in _TOP and other.version >= (5, 2):
            return self.family in _TOP and self.version >= (5, 2)
        if self.family in _TOP and self.version[0] == 5 and self.version[1] == 1:
            return True if other.family in _TOP or other.version <= (5, 0) or other.family == "opus" else None
        if self.family == "opus" and self.version == (5, 5):
            if other.family in _TOP:
                return False
            return True if other.version <= (5, 0) or other.family == "sonnet" else None
        if self.family == "sonnet" and self.version == (5, 5):
            if other.family in _TOP or (other.family == "opus" and other.version >= (5, 0)):
                return False
            return True if other.version <= (5, 0) and other.family in ("sonnet", "opus", "haiku") else None
        if self.family == "haiku" and self.version == (5, 5):
            return False
        return None


def request_rules(body: Body, beta: str) -> Iterator[Finding]:
    """Yield the request fields that a model refuses."""
    model = Model.of(body["model"])
    thinking = body.get("thinking") or {}
    if "block_binding" in thinking and BETA not in beta:
        yield Finding("thinking.block_binding", "beta", "Extra inputs are not permitted")
    if not model.checks_prefix:
        return
    if (body.get("tool_choice") or {}).get("type") in ("any", "tool") and model.family != "haiku":
        yield Finding("tool_choice", "forced", "this model does not accept a forced tool call")
    kinds = {"adaptive"} | {"sonnet": {"between_tools"}, "haiku": {"disabled"}}.get(model.family, set())
    if thinking and thinking.get("type") not in kinds:
        yield Finding("thinking.type", "thinking_type", f"allowed: {sorted(kinds)}")
    if thinking.get("type") == "between_tools" and len(thinking) > 1:
        yield Finding("thinking", "between_tools", "no other field is allowed")
    effort = (body.get("output_config") or {}).get("effort")
    if thinking.get("type") in ("disabled", "between_tools") and effort in ("xhigh", "max"):
        yield Finding("thinking.type", "thinking_type", f"not with effort {effort}")
    if body["messages"][-1]["role"] == "assistant":
        yield Finding(f"messages.{len(body['messages']) - 1}", "prefill", "the last message is the assistant's")
    # The default of `top_p` is not stated for the other models.
    top = (None, 0.99) if model.family == "haiku" else (None, 0.99, 1)
    if body.get("temperature") not in (None, 1) or body.get("top_k") is not None:
        yield Finding("temperature", "sampling", "sampling parameters are not accepted")
    is_both = model.family == "haiku" and body.get("top_p") is not None and body.get("temperature") is not None
    if body.get("top_p") not in top or is_both:
        yield Finding("top_p", "sampling", "sampling parameters are not accepted")


def grammar(body: Body) -> Iterator[Finding]:
    """Yield where messages are not a valid conversation: order, empty content, unpaired tool calls."""
    if body["messages"][0]["role"] != "user":
        yield Finding("messages.0", "first", "the first message is not the user's")
    calls: list[str] = []
    for number, message in enumerate(body["messages"]):
        if message["role"] == "system":
            continue
        content = blocks(message["content"])
        if not content or any(one.get("type") == "text" and not one["text"].strip() for one in content):
            yield Finding(f"messages.{number}", "empty", "empty content or empty text")
        results = [one["tool_use_id"] for one in content if one.get("type") == "tool_result"]
        if sorted(results) != sorted(calls) or (results and message["role"] != "user"):
            yield Finding(f"messages.{number}", "pairs", f"results {results} for calls {calls}")
        if any(one.get("type") != "tool_result" for one in content[: len(results)]):
            yield Finding(f"messages.{number}", "pairs", "content before the tool results")
        calls = [one["id"] for one in content if one.get("type") == "tool_use"]
    if calls:
        yield Finding(f"messages.{len(body['messages']) - 1}", "pairs", f"no results for {calls}")


def blocks(content: object) -> list[Block]:
    """Return content as a list of blocks: a string is short for one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list | tuple) else []
