"""Render streams of OpenAI's chat and completions APIs, with usage in the places where servers report it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from gateway.mock.wire import ApiError, JsonObject, MockUsage, SentEvent, data_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gateway.mock.turns import UsagePlacement

DONE: Final = SentEvent(b"data: [DONE]\n\n", "done")


class StreamChunk(NamedTuple):
    """One chunk with one choice. The last chunk of a stream finishes its last choice."""

    choice: JsonObject
    kind: Literal["meta", "content", "finish"]


def usage_json(usage: MockUsage) -> JsonObject:
    """Return usage in the format of chat and completions."""
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def check_stream_options(*, present: bool, stream: bool, refuse: bool) -> None:
    """Refuse `stream_options` without `stream`, as OpenAI does, or always if `refuse` is set.

    Raises:
        ApiError: 400.
    """
    if present and refuse:
        message = "Unrecognized request argument supplied: stream_options"
        raise ApiError(400, message, param="stream_options", code="unknown_parameter")
    if present and not stream:
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise ApiError(400, message, param="stream_options")


def check_tool_choice(choice: object, *, refuse: bool) -> None:
    """Refuse a `tool_choice` of type `allowed_tools` if `refuse` is set.

    Raises:
        ApiError: 400.
    """
    if refuse and isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise ApiError(400, "Invalid value: 'allowed_tools' is no tool_choice of this model.", param="tool_choice")


def with_usage(body: JsonObject, usage: MockUsage, placement: UsagePlacement, request_id: str) -> JsonObject:
    """Return a response, or the last chunk of a stream, with usage in the places that `placement` names."""
    report = usage_json(usage)
    if placement not in {"none", "groq"}:
        body = {**body, "usage": report}
    if placement in {"groq", "groq_both"}:
        body = {**body, "x_groq": {"id": request_id, "usage": report}}
    return body


def frames(
    base: JsonObject, steps: Sequence[StreamChunk], usage: MockUsage, placement: UsagePlacement, *, wants_usage: bool
) -> list[SentEvent]:
    """Return the events of a stream. `base`: fields of all chunks; `wants_usage`: the client wants a usage chunk."""
    if wants_usage and placement == "trailing":
        base = {**base, "usage": None}
    events = list(_chunks(base, steps, usage, placement))
    if placement == "twice" or (wants_usage and placement in {"trailing", "running"}):
        events.append(data_frame({**base, "choices": [], "usage": usage_json(usage)}))
    events.append(DONE)
    return events


def _chunks(
    base: JsonObject, steps: Sequence[StreamChunk], usage: MockUsage, placement: UsagePlacement
) -> Iterator[SentEvent]:
    parts = _content_count(steps)
    sent = 0
    for index, step in enumerate(steps):
        chunk: JsonObject = {**base, "choices": [step.choice]}
        if step.kind == "content":
            sent += 1
        if index == len(steps) - 1 and placement != "trailing":
            chunk = with_usage(chunk, usage, placement, f"req_{base['id']}")
        elif placement == "running":
            chunk["usage"] = usage_json(MockUsage(usage.input, usage.output * sent // max(parts, 1), usage.cached))
        yield data_frame(chunk, "content" if step.kind == "content" else "meta")


def _content_count(steps: Iterable[StreamChunk]) -> int:
    return sum(step.kind == "content" for step in steps)
