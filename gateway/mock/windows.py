"""Refuse input that exceeds the context window of a model, with the error messages of each API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.mock.wire import ApiError

if TYPE_CHECKING:
    from gateway.mock.provider import MockExchange

#: Maximum of input tokens by model, for a provider that enforces the documented limits.
MODEL_WINDOWS: Final = {"mock-small": 16_000, "mock-large": 128_000}

_CODE: Final = "context_length_exceeded"


def check_chat(exchange: MockExchange, model: str, messages: int, functions: int) -> None:
    """Refuse a chat request whose messages and functions together exceed the context window.

    Raises:
        ApiError: 400, with the message of OpenAI's chat API.
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
    """Refuse a Responses request whose input exceeds the context window.

    Raises:
        ApiError: 400, with OpenAI's message for newer models. Another message of OpenAI has no numbers.
    """
    window = _exceeded(exchange, model, tokens)
    if window is not None:
        message = (
            f"Input tokens exceed the configured limit of {window} tokens. Your messages resulted in {tokens} tokens. "
            "Please reduce the length of the messages."
        )
        raise ApiError(400, message, param="input", code=_CODE)


def check_message(exchange: MockExchange, model: str, tokens: int) -> None:
    """Refuse a Messages request whose prompt exceeds the context window.

    Raises:
        ApiError: 400, with Anthropic's message.
    """
    window = _exceeded(exchange, model, tokens)
    if window is not None:
        raise ApiError(400, f"prompt is too long: {tokens} tokens > {window} maximum")


def _exceeded(exchange: MockExchange, model: str, tokens: int) -> int | None:
    """Return the context window if the input exceeds it; None if the input fits or there is no limit."""
    window = exchange.behaviour.window
    if window is None:
        window = exchange.provider.windows.get(model)
    return window if window is not None and tokens > window else None
