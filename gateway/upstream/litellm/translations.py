"""Convert requests for litellm's chat, text and embedding functions, and their responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from gateway.dialects.base import named_event
from gateway.upstream.litellm import blocks
from gateway.upstream.litellm.arguments import (
    ANTHROPICS,
    CACHE_KEY,
    CHAT,
    EMBED,
    HINTS,
    MESSAGES,
    MESSAGES_HINTS,
    RESPONSES,
    RESPONSES_HINTS,
    TEXT,
    Fields,
    LitellmTarget,
    chat_arguments,
    is_mistral_elsewhere,
    known_fields,
    refuse_kept_by_provider,
    refuse_sound,
    split_fields,
    without_unknown_fields,
)
from gateway.upstream.litellm.items import Items
from gateway.upstream.litellm.library import Library
from gateway.upstream.litellm.toolcalls import SequentialCalls

#: fields that a response has even if they are null
_NULLS: Final = frozenset({"content", "finish_reason", "logprobs"})
_DONE: Final = b"data: [DONE]\n\n"
#: fields of a usage object that affect the price
_PRICED: Final = ("inference_geo", "speed")


class Translation(Protocol):
    """Translation of one call in one format."""

    function: str
    arguments: Fields
    left_out: list[str]

    def __init__(self, library: Library, body: Fields, target: LitellmTarget) -> None: ...

    def whole(self, completion: Any) -> bytes:
        """Return the body of a whole response."""
        ...

    def events(self, stream: Any) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        ...


class Chat:
    """Translate calls of /v1/chat/completions."""

    function = "chat"

    def __init__(self, library: Library, body: Fields, target: LitellmTarget) -> None:
        fields, self.left_out, extra = split_fields(body, CHAT, HINTS, target)
        refuse_sound(fields.get("messages"), target)
        fields["messages"] = blocks.without_empty_texts(fields.get("messages"))
        self.arguments = chat_arguments(library, fields, self.left_out, target) | extra

    def whole(self, completion: Any) -> bytes:
        """Return the body of a whole response."""
        return msgspec.json.encode(_chat_response(completion.model_dump()))

    async def events(self, stream: Any) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        calls = blocks.CallsWithoutArguments()
        async for chunk in stream:
            value = _chat_response(chunk.model_dump())
            if (missing := calls.missing(value)) is not None:
                yield _data(missing)
            yield _data(value)
        yield _DONE


class Text:
    """Translate calls of /v1/completions."""

    function = "text"

    def __init__(self, library: Library, body: Fields, target: LitellmTarget) -> None:
        fields, self.left_out, extra = split_fields(body, TEXT, HINTS, target)
        known = known_fields(library, target, "chat_completion", fields)
        self.arguments = without_unknown_fields(fields, self.left_out, target, known) | extra

    def whole(self, completion: Any) -> bytes:
        """Return the body of a whole response."""
        return msgspec.json.encode(_text_response(completion.model_dump()))

    async def events(self, stream: Any) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        async for chunk in stream:
            yield _data(_text_response(chunk.model_dump()))
        yield _DONE


class Embeddings:
    """Translate calls of /v1/embeddings."""

    function = "embed"

    def __init__(self, library: Library, body: Fields, target: LitellmTarget) -> None:
        fields, self.left_out, extra = split_fields(body, EMBED, HINTS, target)
        self.arguments = (
            without_unknown_fields(fields, self.left_out, target, known_fields(library, target, "embeddings", fields))
            | extra
        )

    def whole(self, completion: Any) -> bytes:
        """Return the body of a whole response."""
        return msgspec.json.encode(_without_nulls(completion.model_dump()))

    def events(self, stream: Any) -> AsyncIterator[bytes]:
        """Raise an error: embeddings are never streamed."""
        raise NotImplementedError


class Messages:
    """Translate calls of /v1/messages."""

    function = "chat"

    def __init__(self, library: Library, body: Fields, target: LitellmTarget) -> None:
        fields, self.left_out, extra = split_fields(body, MESSAGES, MESSAGES_HINTS, target)
        user = (fields.pop("metadata", None) or {}).get("user_id")
        stream = fields.pop("stream", False) is True
        if blocks.asks_for_citations(fields.get("messages"), fields.get("tools")):
            self.left_out.append("citations")
        fields["messages"] = blocks.with_texts(fields.get("messages"))
        if blocks.has_failed_results(fields["messages"]):
            self.left_out.append("is_error")
        request: Fields = {**fields, "model": f"{target.provider}/{target.model}"}
        if isinstance(user, str):
            request["metadata"] = {"user_id": user}
        translate = library.messages.translate_completion_input_params_with_tool_mapping
        translated, self._tool_names = translate(request, custom_llm_provider=target.provider)
        arguments = {name: value for name, value in translated.items() if name != "model" and value is not None}
        effort = arguments.get("reasoning_effort")
        if isinstance(effort, dict):
            arguments["reasoning_effort"] = effort.get("effort")
        if target.provider not in ANTHROPICS:
            is_known = "reasoning_effort" in known_fields(library, target, "chat_completion", arguments)
            self.left_out += blocks.with_effort(arguments, fields, is_known=is_known)
            blocks.with_short_user(arguments)
        if is_mistral_elsewhere(target):
            # litellm derives it from the name of the user; the client did not ask for it.
            arguments.pop(CACHE_KEY, None)
        blocks.with_files(arguments.get("messages"))
        choice = fields.get("tool_choice")
        if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True:
            arguments["parallel_tool_calls"] = False
        if stream:
            arguments |= {"stream": True, "stream_options": {"include_usage": True}}
        self.arguments = chat_arguments(library, arguments, self.left_out, target) | extra
        self._library, self._model = library, target.model

    def whole(self, completion: Any) -> bytes:
        """Return the body of a whole response."""
        translate = self._library.messages.translate_completion_output_params
        message = dict(translate(completion, tool_name_mapping=self._tool_names))
        blocks.with_signatures(message["content"])
        return msgspec.json.encode(_with_plain_usage(message, getattr(completion, "usage", None)))

    async def events(self, stream: Any) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        translate = self._library.messages.translate_completion_output_params_streaming
        async for event in translate(SequentialCalls(stream), model=self._model, tool_name_mapping=self._tool_names):
            is_end = blocks.MESSAGE_END in event and stream.usage is not None
            yield blocks.with_usage(event, _priced_usage(stream.usage)) if is_end else blocks.with_empty_start(event)


class Responses:
    """Translate calls of /v1/responses."""

    function = "chat"

    def __init__(self, library: Library, body: Fields, target: LitellmTarget) -> None:
        refuse_kept_by_provider(body)
        fields, self.left_out, extra = split_fields(body, RESPONSES, RESPONSES_HINTS, target)
        self._input = fields.pop("input", "")
        stream = fields.pop("stream", False) is True
        self._request = fields
        service_tier = {"service_tier": fields["service_tier"]} if "service_tier" in fields else {}
        translated = library.responses.transform_responses_api_request_to_chat_completion_request(
            model=target.model,
            input=self._input,
            responses_api_request=fields,
            custom_llm_provider=target.provider,
            stream=stream,
            **service_tier,
        )
        unfit = ("model", "custom_llm_provider", "reasoning_summary", "context_management", "metadata")
        arguments = {name: value for name, value in translated.items() if name not in unfit}
        self.arguments = chat_arguments(library, arguments, self.left_out, target) | extra
        self._library, self._target = library, target

    def whole(self, completion: Any) -> bytes:
        """Return the body of a whole response."""
        translate = self._library.responses.transform_chat_completion_response_to_responses_api_response
        response = translate(
            chat_completion_response=completion, request_input=self._input, responses_api_request=self._request
        )
        value = response.model_dump(mode="json", exclude_none=True)
        return msgspec.json.encode(_response(value, getattr(completion, "usage", None)))

    async def events(self, stream: Any) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        events = self._library.ResponsesStream(
            model=self._target.model,
            litellm_custom_stream_wrapper=stream,
            request_input=self._input,
            responses_api_request=self._request,
            custom_llm_provider=self._target.provider,
        )
        items, number = Items(), 0
        async for event in events:
            value = event.model_dump(mode="json", exclude_none=True)
            if "response" in value:
                _response(value["response"], stream.usage)
            if "item" in value:
                is_whole = value["type"] == "response.output_item.done"
                blocks.as_reasoning(value["item"], stream.thoughts.signed if is_whole else ())
            for item_event in items.ordered(value):
                yield named_event({**item_event, "sequence_number": number})
                number += 1


#: path below /v1/ -> the translation of its format
TRANSLATIONS: Final[Mapping[str, type[Translation]]] = {
    "chat/completions": Chat,
    "completions": Text,
    "embeddings": Embeddings,
    "messages": Messages,
    "responses": Responses,
}


def _data(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _chat_response(value: Fields) -> Fields:
    """Return a chat completion, or a chunk of one, in OpenAI's form."""
    value = _with_plain_usage(_without_nulls(value))
    for choice in value.get("choices", ()):
        for part in (choice.get("message"), choice.get("delta"), choice):
            if isinstance(part, dict) and not any((part.get("provider_specific_fields") or {}).values()):
                part.pop("provider_specific_fields", None)
    if value.get("object") == "chat.completion.chunk" and "usage" in value and not _has_content(value):
        value["choices"] = []
    return value


def _has_content(chunk: Fields) -> bool:
    return any(choice.get("finish_reason") or any(_filled(choice.get("delta"))) for choice in chunk.get("choices", ()))


def _filled(delta: object) -> Iterator[object]:
    if isinstance(delta, dict):
        yield from (value for name, value in delta.items() if name != "role")


def _text_response(value: Fields) -> Fields:
    value = _with_plain_usage(_without_nulls(value))
    for choice in value.get("choices", ()):
        choice.setdefault("text", "")
    return value


def _response(value: Fields, reported: Any) -> Fields:
    """Return a response in OpenAI's form. It is never stored, whatever the request asked for."""
    value["store"] = False
    for item in value.get("output", ()):
        blocks.as_reasoning(item)
    return _with_plain_usage(value, reported)


def _with_plain_usage(value: Fields, reported: Any = None) -> Fields:
    """Return a response without the cost that litellm computes; the gateway uses its own price tables.

    `reported`: the usage of the chat call from which litellm derived `value`.
    """
    usage = value.get("usage")
    if isinstance(usage, dict):
        usage.pop("cost", None)
        usage.update(_priced_usage(usage if reported is None else reported))
    return value


def _priced_usage(reported: Any) -> Fields:
    """Return the usage fields that affect Anthropic's price, by their own names; litellm's formats have no others."""
    usage = reported if isinstance(reported, dict) else reported.model_dump() if reported is not None else {}
    priced = {name: value for name in _PRICED if isinstance(value := usage.get(name), str)}
    written = (usage.get("prompt_tokens_details") or {}).get("cache_creation_token_details")
    return {**priced, "cache_creation": written} if written else priced


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None or name in _NULLS}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
