"""Assign the pieces of tool calls in litellm's chat stream to their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

if TYPE_CHECKING:
    from gateway.upstream.litellm.observed import ObservedStream

#: fields of a delta with content other than tool calls
_CONTENT: Final = ("content", "reasoning_content", "thinking_blocks")


class StreamToolCalls:
    """Tool calls of one stream, by choice and number, with their arguments so far.

    Each call has a number, and only its first piece has its id and name. Some hosts give all calls of a response the
    same number, so their ids distinguish them. Others send id and name with every piece, even with a new id.
    """

    def __init__(self) -> None:
        #: the provider's number -> the number that the gateway gives the current call, and the id of that call
        self._now: dict[tuple[int, int], tuple[int, str | None]] = {}
        self._arguments: dict[tuple[int, int], list[str]] = {}
        #: the next free number, by choice
        self._next: dict[int, int] = {}

    def see(self, choice: Any) -> None:
        """Read the tool calls in a chunk of a choice, and change their numbers to the gateway's."""
        for call in getattr(getattr(choice, "delta", None), "tool_calls", None) or ():
            place = choice.index, call.index
            number, known = self._now.get(place, (None, None))
            if number is None or self._is_new(call, known, choice.index, number):
                self._begin(place, call)
            else:
                call.index = number
                if known and call.id:
                    call.id = call.function.name = None
            if call.function.arguments:
                self._arguments[choice.index, call.index].append(call.function.arguments)

    def _is_new(self, call: Any, known: str | None, choice: int, number: int) -> bool:
        # A new id means a new call only if the previous call is complete.
        return bool(call.id and call.function.name) and call.id != known and self.is_whole(choice, number)

    def _begin(self, place: tuple[int, int], call: Any) -> None:
        choice, wanted = place
        following = self._next.get(choice, 0)
        call.index = following if place in self._arguments else wanted
        self._next[choice] = max(following, call.index + 1)
        self._now[place] = call.index, call.id
        self._arguments[choice, call.index] = []

    def arguments(self, choice: int, number: int) -> str:
        """Return the arguments of a call that were received so far."""
        return "".join(self._arguments[choice, number])

    def is_whole(self, choice: int, number: int) -> bool:
        """Return True if the arguments of a call are complete, so that no piece of them can follow."""
        pieces = self._arguments[choice, number]
        if not pieces or not pieces[-1].rstrip().endswith("}"):
            return False
        try:
            msgspec.json.decode("".join(pieces))
        except msgspec.DecodeError:
            return False
        return True


class SequentialCalls:
    """A chat stream in which each tool call ends before the next begins, as in the blocks of a Messages stream.

    If pieces of several calls are interleaved, those of the first call pass at once. Each other call follows it as one
    piece. litellm would put every piece into the block that began last.
    """

    def __init__(self, stream: ObservedStream) -> None:
        self._stream = stream
        self._choice = 0
        self._live: int | None = None
        self._ended: set[int] = set()
        #: the first piece of each waiting call
        self._held: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            chunk = await anext(self._stream)
            if not chunk.choices or self._has_due(chunk.choices[0]):
                return chunk

    def _has_due(self, choice: Any) -> bool:
        """Reduce a chunk to what may pass now; return whether anything is left."""
        delta, self._choice = choice.delta, choice.index
        calls = getattr(delta, "tool_calls", None) or []
        has_content = any(getattr(delta, name, None) for name in _CONTENT)
        has_live_call = any(call.index == self._live for call in calls)
        due = self._rest() if has_content and not has_live_call else []
        due += [call for call in calls if self._is_due(call)]
        due += self._rest() if choice.finish_reason else []
        if due != calls:
            delta.tool_calls = due or None
        return bool(due or has_content or choice.finish_reason or not calls)

    def _is_due(self, call: Any) -> bool:
        """Return True if a piece belongs to the current call; otherwise its call waits.

        Raises:
            UpstreamProtocolError: its call has ended, and nothing can be added to it.
        """
        number = call.index
        if number in self._ended:
            if (call.function.arguments or "").strip():
                raise self._stream.failed("The provider's stream continued a tool call that had ended.")
            return False
        if (
            self._live not in (None, number)
            and not self._held
            and self._stream.calls.is_whole(self._choice, self._live)
        ):
            self._ended.add(self._live)
            self._live = None
        if self._live is None:
            self._live = number
        if number != self._live:
            self._held.setdefault(number, call)
        return bool(number == self._live)

    def _rest(self) -> list[Any]:
        """Return the waiting calls, each complete, and end the current call."""
        calls, self._held = self._held, {}
        for number, call in calls.items():
            call.function.arguments = self._stream.calls.arguments(self._choice, number)
        self._ended.update(calls, () if self._live is None else (self._live,))
        self._live = None
        return list(calls.values())
