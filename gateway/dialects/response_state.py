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

#: Tokens per character of encrypted reasoning. Recorded streams that report the billed tokens have 0.12 at OpenAI and
#: 0.09 at Anthropic.
_OPAQUE_TOKENS: Final = 1 / 8
#: characters of a call's arguments that are kept to detect whether the call is complete
_MAX_ARGUMENTS: Final = 65_536


class ArgumentPieces:
    """Arguments of a tool call, collected piece by piece up to a size limit."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def add(self, arguments: object) -> None:
        """Add a piece: a text, or all arguments as an object."""
        if isinstance(arguments, dict) and not is_deep(arguments):
            arguments = encode(arguments).decode()
        if isinstance(arguments, str) and self._size <= _MAX_ARGUMENTS:
            self._size += len(arguments)
            self._parts.append(arguments)
            if self._size > _MAX_ARGUMENTS:
                self._parts = []

    @property
    def text(self) -> str:
        """Return all arguments without surrounding white space; empty if they are too long."""
        return "".join(self._parts).strip()

    def is_object(self) -> bool:
        """Return whether the arguments are one complete JSON object."""
        text = self.text
        if not (text.startswith("{") and text.endswith("}")):
            return False
        try:
            return isinstance(msgspec.json.decode(text), dict)
        except UNREADABLE:
            return False


class CalledTools:
    """The tools that a response calls, collected from pieces."""

    __slots__ = ("_arguments", "_calls", "_ids", "_last_call", "_latest")

    def __init__(self) -> None:
        #: the index of the choice, the name of the tool, and the set that it belongs to
        self._calls: dict[object, tuple[int, str, str | None]] = {}
        #: the first call id that was sent for each key
        self._ids: dict[object, str] = {}
        #: for a key that several calls share: the key of the last of these calls
        self._latest: dict[object, object] = {}
        #: the key of the call that got the last arguments, and these arguments
        self._last_call: object = None
        self._arguments = ArgumentPieces()

    def __len__(self) -> int:
        return len(self._calls)

    def of_choice(self, choice: int) -> list[tuple[str, str | None]]:
        """Return the names of the tools that a choice calls, each with the set that it belongs to."""
        return [(name, among) for by, name, among in self._calls.values() if by == choice]

    def add(
        self,
        name: object,
        key: object = None,
        call_id: object = None,
        choice: int = 0,
        *,
        one_of: object = None,
        arguments: object = None,
    ) -> float:
        """Note the name of a called tool, or more arguments of a call. Return the tokens of a new name.

        Args:
            name: the name of the tool; if it is not text, only the arguments are added.
            key: identifies the call within the response; None: every piece is a new call.
            call_id: another id than the first one under the same key means another call. Without an id the same key
                is the same call, unless that call is complete.
            choice: the index of the choice with the call, if the response has several.
            one_of: the set that the tool belongs to; ignored if it is not text.
            arguments: the arguments of the call, or a piece of them.
        """
        is_named = isinstance(name, str) and name != ""
        key = self._key_of(name if is_named else None, key, call_id, arguments)
        tokens = self._add_call(name, key, call_id, choice, one_of) if isinstance(name, str) and is_named else 0.0
        if self._last_call != key:
            self._last_call, self._arguments = key, ArgumentPieces()
        self._arguments.add(arguments)
        return tokens

    def _key_of(self, name: object, key: object, call_id: object, arguments: object) -> object:
        """Return the key of the call that a piece belongs to."""
        if key is None:
            return len(self._calls)
        known = self._ids.get(key)
        if call_id and name and known is None and key in self._calls and not self._is_next(key, name, arguments):
            known = self._ids[key] = str(call_id)
        if call_id and known is not None:
            return key if known == str(call_id) else (key, str(call_id))
        latest = self._latest.get(key, key)
        if name and self._is_next(latest, name, arguments) and len(self._calls) < MAX_TOOLS:
            latest = self._latest[key] = (key, len(self._calls))
        return latest

    def _is_next(self, key: object, name: object, arguments: object) -> bool:
        """Return whether a piece with a name begins a new call, because the call under its key is complete.

        Some hosts number every call 0 and send no id. Others repeat the name with each piece, or repeat a whole call.
        """
        if key not in self._calls or self._last_call != key or not self._arguments.is_object():
            return False
        if not isinstance(name, str) or name[:NAME_CHARACTERS] != self._calls[key][1]:
            return True
        pieces = ArgumentPieces()
        pieces.add(arguments)
        return pieces.text.startswith("{") and self._arguments.text not in (pieces.text, "{}")

    def _add_call(self, name: str, key: object, call_id: object, choice: int, one_of: object) -> float:
        """Note a call, and return the tokens that its name adds."""
        if key in self._calls:
            return self._name_again(key, name)
        if len(self._calls) < MAX_TOOLS:
            among = one_of[:NAME_CHARACTERS] if isinstance(one_of, str) else None
            self._calls[key] = choice, name[:NAME_CHARACTERS], among
            if call_id:
                self._ids[key] = str(call_id)
        return estimate_tokens(name)

    def _name_again(self, key: object, name: str) -> float:
        """Note another name under a key: some hosts repeat the name in every piece, others send it in pieces.

        Without an id the second name may belong to a second call, so the first name stays.
        """
        choice, known, among = self._calls[key]
        if name == known or key not in self._ids:
            return 0.0
        self._calls[key] = choice, (known + name)[:NAME_CHARACTERS], among
        return estimate_tokens(name)


class ResponseState:
    """Content of a response that was read so far: the first model that it names, the last value of other fields."""

    __slots__ = (
        *("_audio", "_declined", "_model", "_output", "_tools"),
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
        self._tools = CalledTools()
        self._output = 0.0
        self._audio = AudioCounter()
        self.refusal: str | None = None
        self._declined: list[str | None] = []

    def set_model_and_tier(self, model: object, service_tier: object) -> None:
        """Take the model and the service tier; a value that is not text is ignored."""
        if self._model is None and isinstance(model, str) and model:
            self._model = model
        if isinstance(service_tier, str):
            self.service_tier = service_tier

    def set_finish_reason(self, reason: object) -> None:
        """Take the finish reason."""
        if isinstance(reason, str):
            self.finish_reason = reason

    def declined(self, category: object, model: object) -> None:
        """Note that a model refused, with the category; `model`: the model that continues."""
        if len(self._declined) < MAX_TOOLS:
            self._declined.append(category if isinstance(category, str) else None)
        if isinstance(model, str) and model:
            self._model = model

    def failed(self, error: object) -> None:
        """Note an error; an empty value, or an object with only nulls, is not an error."""
        if any(part is not None for part in error.values()) if isinstance(error, dict) else error:
            self.error = True

    def count_tokens(self, value: object) -> float:
        """Count the tokens of every text in a value as output; return them."""
        if value is None:
            return 0.0
        tokens = estimate_tokens(value) if type(value) is str else sum(map(estimate_tokens, texts(value)))
        self._output += tokens
        return tokens

    def count_arguments(self, value: object) -> None:
        """Count the arguments of a call as JSON; an empty object is a placeholder that a stream fills later."""
        if value and isinstance(value, dict) and not is_deep(value):
            self.count_tokens(encode(value).decode())
        else:
            self.count_tokens(value)

    def count_audio(self, data: object, transcript: object = None) -> None:
        """Count audio in base64, and its transcript, which is billed separately."""
        if isinstance(data, str):
            self._output += self._audio.tokens(data)
        self.count_tokens(transcript)

    def count_opaque(self, value: object, already: float = 0.0) -> None:
        """Count encrypted reasoning. `already`: tokens of the same reasoning that were readable."""
        if isinstance(value, str):
            self._output += max(0.0, len(value) * _OPAQUE_TOKENS - already)

    def add_tool_call(
        self,
        name: object,
        key: object = None,
        call_id: object = None,
        choice: int = 0,
        *,
        one_of: object = None,
        arguments: object = None,
    ) -> None:
        """Note the name of a called tool, or more arguments of a call. See `CalledTools.add`."""
        self._output += self._tools.add(name, key, call_id, choice, one_of=one_of, arguments=arguments)

    @property
    def model(self) -> str | None:
        """Return the first model that was named."""
        return self._model

    @property
    def is_empty(self) -> bool:
        """Return True if no output was read yet."""
        return not self._output and not self._tools

    @property
    def output_estimate(self) -> int:
        """Return the estimated tokens of the output, rounded up."""
        return rounded_up(self._output)

    def answer(self, choice: int = 0) -> ParsedResponse:
        """Return what was read so far, with the tools that this choice calls."""
        called = self._tools.of_choice(choice)
        return ParsedResponse(
            usage=self.usage.reported(),
            model=self._model,
            finish_reason=self.finish_reason,
            service_tier=self.service_tier,
            tools=tuple([name for name, _ in called]),
            tool_sets=tuple([among for _, among in called]),
            output_estimate=self.output_estimate,
            error=self.error,
            id=self.id,
            is_counted=self.is_seen,
            refusal=self.refusal,
            fallback_refusals=tuple(self._declined),
        )
