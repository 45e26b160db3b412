"""Write streams of OpenAI's chat and completions APIs, with usage where servers put it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from gateway.mock.wire import ApiError, JsonObject, MockUsage, SentEvent, data_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gateway.mock.turns import UsagePlacement

DONE: Final = SentEvent(b"data: [DONE]\n\n", "done")


class StreamChunk(NamedTuple):
    """One chunk, with one choice in it. The last step of a stream finishes its last choice."""

    choice: JsonObject
    kind: Literal["meta", "content", "finish"]


def usage_json(usage: MockUsage) -> JsonObject:
    """`usage` as chat and completions report it."""
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
    """Refuse `stream_options` where OpenAI does, or where this server is told to not know the field.

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
    """Refuse a choice among some tools where this server is told to not know it.

    Raises:
        ApiError: 400.
    """
    if refuse and isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise ApiError(400, "Invalid value: 'allowed_tools' is no tool_choice of this model.", param="tool_choice")


def with_usage(body: JsonObject, usage: MockUsage, placement: UsagePlacement, request_id: str) -> JsonObject:
    """A whole answer (or a stream's last chunk) with `usage` where the placement has it."""
    report = usage_json(usage)
    if placement not in {"none", "groq"}:
        body = {**body, "usage": report}
    if placement in {"groq", "groq_both"}:
        body = {**body, "x_groq": {"id": request_id, "usage": report}}
    return body


def frames(
    base: JsonObject, steps: Sequence[StreamChunk], usage: MockUsage, placement: UsagePlacement, *, asked: bool
) -> list[SentEvent]:
    """The events of a stream. `base`: the fields all chunks share; `asked`: the client wants a usage chunk."""
    if asked and placement == "trailing":
        base = {**base, "usage": None}
    found = list(_chunks(base, steps, usage, placement))
    if placement == "twice" or (asked and placement in {"trailing", "running"}):
        found.append(data_frame({**base, "choices": [], "usage": usage_json(usage)}))
    found.append(DONE)
    return found


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
