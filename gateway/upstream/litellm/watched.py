"""Read errors and usage from a litellm stream before it is translated."""

from __future__ import annotations

import contextlib
from typing import Any, Self

from gateway.core.errors import UpstreamProtocolError
from gateway.upstream.litellm.blocks import SignedThoughts
from gateway.upstream.litellm.toolcalls import Calls


class Watched:
    """litellm's stream of chat chunks, its failures kept.

    What turns it into another format would write a failure into the answer, as if the provider had said so. And litellm
    ends a stream that broke off as if the model had come to its end: what has no finish reason is not whole.
    """

    def __init__(self, stream: Any) -> None:
        self.failure: Exception | None = None
        #: the usage that was reported last
        self.usage: Any = None
        #: what was thought so far
        self.thoughts = SignedThoughts()
        #: the calls of tools so far
        self.calls = Calls()
        #: the piece that was waited for at the beginning
        self._first: Any = None
        self._stream = stream
        #: what talks to the provider: a text stream wraps it, or is itself that of the provider's SDK
        self._source = getattr(stream, "completion_stream", stream) if not hasattr(stream, "fetch_stream") else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def begin(self) -> None:
        """Wait for the first piece: some are only asked then, and others refuse in their first event, with status 200.

        What is refused here is no answer yet, costs nothing and can be asked of another.
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
                raise UpstreamProtocolError("The provider's stream ended before the answer was complete.")
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
        """The error to raise where what reads the stream finds it wrong."""
        error = UpstreamProtocolError(message)
        self.failure = error
        return error

    def _is_made_up(self, chunk: Any) -> bool:
        """Whether it says that the answer is finished although the provider did not."""
        source = self._source
        if getattr(source, "received_finish_reason", "unknown") is not None or source.intermittent_finish_reason:
            return False
        return any(getattr(choice, "finish_reason", None) for choice in chunk.choices)

    async def aclose(self) -> None:
        """Hang up on the provider."""
        close = getattr(self._source, "aclose", None) or self._source.close
        await close()
