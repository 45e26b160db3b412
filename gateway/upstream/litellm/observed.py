"""Read errors and usage from a litellm stream before it is translated."""

from __future__ import annotations

import contextlib
from typing import Any, Self

from gateway.core.errors import UpstreamProtocolError
from gateway.upstream.litellm.blocks import SignedThoughts
from gateway.upstream.litellm.toolcalls import StreamToolCalls


class ObservedStream:
    """litellm's stream of chat chunks, which remembers errors, usage, thinking and tool calls.

    The code that translates the stream would write an error into the response, as if the provider had sent it. litellm
    also ends a broken stream as if the model had finished. A stream without a finish reason is therefore incomplete.
    """

    def __init__(self, stream: Any) -> None:
        self.failure: Exception | None = None
        #: the last reported usage
        self.usage: Any = None
        #: the thinking so far
        self.thoughts = SignedThoughts()
        #: the tool calls so far
        self.calls = StreamToolCalls()
        #: the first chunk, read by `begin`
        self._first: Any = None
        self._stream = stream
        #: The object that reads from the provider. It is inside a text stream, or is the stream of the provider's SDK.
        self._source = getattr(stream, "completion_stream", stream) if not hasattr(stream, "fetch_stream") else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def begin(self) -> None:
        """Read the first chunk. Some providers are called only then, and others refuse in the first event, with 200.

        An error here is not a response yet. It costs nothing, and another provider can be called.
        """
        if hasattr(self._source, "fetch_stream"):
            await self._source.fetch_stream()
        with contextlib.suppress(StopAsyncIteration):
            self._first = await anext(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            chunk = await anext(self._stream)
            if self._is_made_up(chunk):
                raise UpstreamProtocolError("The provider's stream ended before the response was complete.")
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.failure = error
            raise
        self.usage = getattr(chunk, "usage", None) or self.usage
        for choice in chunk.choices:
            self.calls.see(choice)
            self.thoughts.see(getattr(getattr(choice, "delta", None), "thinking_blocks", None) or ())
        return chunk

    def failed(self, message: str) -> UpstreamProtocolError:
        """Return an error for a stream that the translation finds invalid, and remember it."""
        error = UpstreamProtocolError(message)
        self.failure = error
        return error

    def _is_made_up(self, chunk: Any) -> bool:
        """Return True if litellm reports a finish reason that the provider did not send."""
        source = self._source
        if getattr(source, "received_finish_reason", "unknown") is not None or source.intermittent_finish_reason:
            return False
        return any(getattr(choice, "finish_reason", None) for choice in chunk.choices)

    async def aclose(self) -> None:
        """Close the connection to the provider."""
        close = getattr(self._source, "aclose", None) or self._source.close
        await close()
