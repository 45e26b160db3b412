"""Collect text, tool calls, usage and finish reason while a response is read."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.conversation.message import encode, is_deep
from gateway.core.counting.heuristic import estimate_tokens, rounded_up
from gateway.core.tools import NAME_CHARACTERS
from gateway.dialects.audio import AudioCounter
from gateway.dialects.base import MAX_TOOLS, ParsedResponse
from gateway.dialects.fields import UNREADABLE
from gateway.dialects.reported import UsageReader
from gateway.dialects.texts import texts

#: Tokens of a character of reasoning that comes encrypted. Recorded streams that say what it was billed at have 0.12 at
#: OpenAI and 0.09 at Anthropic.
_OPAQUE_TOKENS: Final = 1 / 8
#: characters of the arguments of a call that are kept, to see whether it is complete
_MOST_ARGUMENTS: Final = 65_536


class ArgumentPieces:
    """The arguments of a call as they come, as far as they are looked at."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def add(self, arguments: object) -> None:
        """Add a piece: a text, or all of the arguments as an object."""
        if isinstance(arguments, dict) and not is_deep(arguments):
            arguments = encode(arguments).decode()
        if isinstance(arguments, str) and self._size <= _MOST_ARGUMENTS:
            self._size += len(arguments)
            self._parts.append(arguments)
            if self._size > _MOST_ARGUMENTS:
                self._parts = []

    @property
    def text(self) -> str:
        """All of it without white space around; empty if it is far too long."""
        return "".join(self._parts).strip()

    def is_object(self) -> bool:
        """Return whether this is a whole JSON object."""
        text = self.text
        if not (text.startswith("{") and text.endswith("}")):
            return False
        try:
            return isinstance(msgspec.json.decode(text), dict)
        except UNREADABLE:
            return False


class ResponseState:
    """What was read of an answer so far: the first model that it names, and the last of every other name."""

    __slots__ = (
        *("_arguments", "_declined", "_ids", "_latest", "_model", "_output", "_sound", "_tools", "_written"),
        *("error", "finish_reason", "id", "is_seen", "refusal", "service_tier", "usage"),
    )

    def __init__(self) -> None:
        self.usage = UsageReader()
        self.finish_reason: str | None = None
        self.error = False
        self.id: str | None = None
        self.is_seen = True
        self._model: str | None = None
        self.service_tier: str | None = None
        #: calls: the choice that makes them, the tool, and the set that it is one of
        self._tools: dict[object, tuple[int, str, str | None]] = {}
        #: the first id that each of them was named with
        self._ids: dict[object, str] = {}
        #: by the key that several calls were sent under: the key of the last one
        self._latest: dict[object, object] = {}
        #: the key of the call whose arguments came last, and these arguments
        self._written: object = None
        self._arguments = ArgumentPieces()
        self._output = 0.0
        self._sound = AudioCounter()
        self.refusal: str | None = None
        self._declined: list[str | None] = []

    def head(self, model: object, service_tier: object) -> None:
        """Take what an answer says of itself; what is no text says nothing."""
        if self._model is None and isinstance(model, str) and model:
            self._model = model
        if isinstance(service_tier, str):
            self.service_tier = service_tier

    def ended(self, reason: object) -> None:
        """Take why it ended."""
        if isinstance(reason, str):
            self.finish_reason = reason

    def declined(self, category: object, model: object) -> None:
        """Take that a model refused, and why; `model`: the one that goes on."""
        if len(self._declined) < MAX_TOOLS:
            self._declined.append(category if isinstance(category, str) else None)
        if isinstance(model, str) and model:
            self._model = model

    def failed(self, error: object) -> None:
        """Take what it says of an error; what is empty, or holds nothing but nulls, says that there is none."""
        if any(part is not None for part in error.values()) if isinstance(error, dict) else error:
            self.error = True

    def count_tokens(self, value: object) -> float:
        """Add every text in a value to what was delivered; its tokens."""
        if value is None:
            return 0.0
        tokens = estimate_tokens(value) if type(value) is str else sum(map(estimate_tokens, texts(value)))
        self._output += tokens
        return tokens

    def count_arguments(self, value: object) -> None:
        """Add the arguments of a call, which a model writes as JSON; an empty object is what a stream fills later."""
        if value and isinstance(value, dict) and not is_deep(value):
            self.count_tokens(encode(value).decode())
        else:
            self.count_tokens(value)

    def count_audio(self, data: object, transcript: object = None) -> None:
        """Add sound in base64, and what it says, which is billed beside it."""
        if isinstance(data, str):
            self._output += self._sound.tokens(data)
        self.count_tokens(transcript)

    def count_opaque(self, value: object, already: float = 0.0) -> None:
        """Add reasoning that came encrypted. `already`: tokens of the same that were readable."""
        if isinstance(value, str):
            self._output += max(0.0, len(value) * _OPAQUE_TOKENS - already)

    def tool(
        self,
        name: object,
        key: object = None,
        call_id: object = None,
        choice: int = 0,
        *,
        one_of: object = None,
        arguments: object = None,
    ) -> None:
        """Take the name of a tool that is called, or more arguments of a call.

        Args:
            name: its name; where it is no text, only arguments are taken.
            key: tells the calls of an answer apart; None: each is another.
            call_id: where it differs from the first one under a key, it is another call; without it the same key is
                the same call, unless that call is complete.
            choice: the index of the choice that calls it, where an answer has several.
            one_of: the set that it is one of; passed over where it is no text.
            arguments: of the call, or a piece of them.
        """
        is_named = isinstance(name, str) and name != ""
        key = self._key_of(name if is_named else None, key, call_id, arguments)
        if isinstance(name, str) and is_named:
            self._named(name, key, call_id, choice, one_of)
        if self._written != key:
            self._written, self._arguments = key, ArgumentPieces()
        self._arguments.add(arguments)

    def _key_of(self, name: object, key: object, call_id: object, arguments: object) -> object:
        """Return the key of the call that a piece belongs to."""
        if key is None:
            return len(self._tools)
        known = self._ids.get(key)
        if call_id and name and known is None and key in self._tools and not self._is_next(key, name, arguments):
            known = self._ids[key] = str(call_id)
        if call_id and known is not None:
            return key if known == str(call_id) else (key, str(call_id))
        latest = self._latest.get(key, key)
        if name and self._is_next(latest, name, arguments) and len(self._tools) < MAX_TOOLS:
            latest = self._latest[key] = (key, len(self._tools))
        return latest

    def _is_next(self, key: object, name: object, arguments: object) -> bool:
        """Return whether a named piece begins another call than the one under its key, as that one is complete.

        Some hosts number every call 0 and give none an id; others repeat the name with each piece, or all of a call.
        """
        if key not in self._tools or self._written != key or not self._arguments.is_object():
            return False
        if not isinstance(name, str) or name[:NAME_CHARACTERS] != self._tools[key][1]:
            return True
        begun = ArgumentPieces()
        begun.add(arguments)
        return begun.text.startswith("{") and self._arguments.text not in (begun.text, "{}")

    def _named(self, name: str, key: object, call_id: object, choice: int, one_of: object) -> None:
        if key in self._tools:
            self._go_on(key, name)
            return
        self._output += estimate_tokens(name)
        if len(self._tools) < MAX_TOOLS:
            among = one_of[:NAME_CHARACTERS] if isinstance(one_of, str) else None
            self._tools[key] = choice, name[:NAME_CHARACTERS], among
            if call_id:
                self._ids[key] = str(call_id)

    def _go_on(self, key: object, name: str) -> None:
        """Take a name once more under a key: some hosts repeat all of it in every piece, others send it in pieces.

        Without an id a second name may as well be that of a second call, and the first one stays.
        """
        choice, begun, among = self._tools[key]
        if name != begun and key in self._ids:
            self._output += estimate_tokens(name)
            self._tools[key] = choice, (begun + name)[:NAME_CHARACTERS], among

    @property
    def model(self) -> str | None:
        """The first model that was named."""
        return self._model

    @property
    def is_empty(self) -> bool:
        """Whether nothing was delivered yet, as far as it is read."""
        return not self._output and not self._tools

    @property
    def output_estimate(self) -> int:
        """Estimated tokens of what was delivered, rounded up."""
        return rounded_up(self._output)

    def answer(self, choice: int = 0) -> ParsedResponse:
        """All that was read so far; of the tools, what this choice calls."""
        called = [(name, among) for by, name, among in self._tools.values() if by == choice]
        return ParsedResponse(
            usage=self.usage.reported(),
            model=self._model,
            finish_reason=self.finish_reason,
            service_tier=self.service_tier,
            tools=tuple([name for name, _ in called]),
            sets=tuple([among for _, among in called]),
            output_estimate=self.output_estimate,
            error=self.error,
            id=self.id,
            is_seen=self.is_seen,
            refusal=self.refusal,
            declined=tuple(self._declined),
        )
