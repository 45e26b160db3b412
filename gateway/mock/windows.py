"""Refuse input that is too long for a model, in each API's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.mock.wire import ApiError

if TYPE_CHECKING:
    from gateway.mock.provider import MockExchange

#: Tokens of input by model, for a provider that is to be as strict as its models are said to be.
MODEL_WINDOWS: Final = {"mock-small": 16_000, "mock-large": 128_000}

_CODE: Final = "context_length_exceeded"


def check_chat(exchange: MockExchange, model: str, messages: int, functions: int) -> None:
    """Refuse a chat whose messages and functions are together too long.

    Raises:
        ApiError: 400, in the words of OpenAI's chat API.
    """
    tokens = messages + functions
    window = _exceeded(exchange, model, tokens)
    if window is None:
        return
    parts = f" ({messages} in the messages, {functions} in the functions)" if functions else ""
    what = "messages or functions" if functions else "messages"
    message = (
        f"This model's maximum context length is {window} tokens. However, your messages resulted in {tokens} "
        f"tokens{parts}. Please reduce the length of the {what}."
    )
    raise ApiError(400, message, param="messages", code=_CODE)


def check_response(exchange: MockExchange, model: str, tokens: int) -> None:
    """Refuse an input that is too long for a response.

    Raises:
        ApiError: 400, in the words OpenAI has for its newer models. Another wording of theirs says no number.
    """
    window = _exceeded(exchange, model, tokens)
    if window is not None:
        message = (
            f"Input tokens exceed the configured limit of {window} tokens. Your messages resulted in {tokens} tokens. "
            "Please reduce the length of the messages."
        )
        raise ApiError(400, message, param="input", code=_CODE)


def check_message(exchange: MockExchange, model: str, tokens: int) -> None:
    """Refuse a prompt that is too long for a message.

    Raises:
        ApiError: 400, in Anthropic's words.
    """
    window = _exceeded(exchange, model, tokens)
    if window is not None:
        raise ApiError(400, f"prompt is too long: {tokens} tokens > {window} maximum")


def _exceeded(exchange: MockExchange, model: str, tokens: int) -> int | None:
    """The window that an input of `tokens` is too long for; None where it fits, or there is none."""
    asked = exchange.behaviour.window
    window = exchange.provider.windows.get(model) if asked is None else asked
    return window if window is not None and tokens > window else None
