"""Run the mock provider: its script, the calls that it received, and the ledger of what it billed."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gateway.mock.claude_rules import ModelRules
from gateway.mock.prefixes import PrefixMemory
from gateway.mock.turns import BadBehaviourError, Behaviour, Turn, with_header
from gateway.mock.wire import ApiError, JsonObject, MockUsage, ReceivedCall, Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.mock.strict import StrictRules

#: Recorded calls that are kept; older ones are dropped.
MAX_RECORDS: Final = 10_000
#: Of a body with more bytes, only the length and the digest are kept.
MAX_KEPT_BODY: Final = 1_000_000
#: Prompt prefixes that are kept; older ones are dropped.
MAX_PREFIXES: Final = 100_000
#: Stored responses and conversations that requests can continue; older ones are dropped.
MAX_STORED: Final = 10_000
#: A shared prefix with fewer tokens is not reported as cached.
MIN_CACHED_TOKENS: Final = 64
#: How many messages before a cache mark a stored prefix may end. Claude looks at 20 content blocks.
MAX_BEFORE_MARK: Final = 20

_DEFAULT: Final = Behaviour()
_NO_WINDOWS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Billed:
    """Billed tokens. `input_tokens` includes cached tokens; `calls` is the number of billed calls."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    calls: int = 0

    def plus(self, usage: MockUsage) -> Billed:
        """Return the sum of this and one more call."""
        return Billed(
            self.input_tokens + usage.input,
            self.output_tokens + usage.output,
            self.total_tokens + usage.total,
            self.calls + 1,
        )


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call as received, with the status of its response and what was billed."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    """Lower-case names and values, in order of arrival."""
    body: bytes
    """The raw body; empty if it was larger than 1 MB."""
    body_bytes: int
    """The length of the body as received."""
    body_digest: str
    """The SHA-256 of the body in hex if `body` was dropped, otherwise empty."""
    model: str
    """The requested model; empty if the call was refused or names none."""
    status: int
    """The status of the response; 0 if there was none (`hang=1`, `die=0`)."""
    billed: Billed | None
    """None if nothing was billed."""

    @property
    def body_sha256(self) -> str:
        """Return the SHA-256 of the body as received, in hex."""
        return self.body_digest or hashlib.sha256(self.body).hexdigest()

    def header(self, name: str) -> str | None:
        """Return the first value of the header `name` (lower case), or None."""
        return next((value for key, value in self.headers if key == name), None)


class MockLedger:
    """What a provider has billed: in total, by session and by model. The caller holds a lock."""

    def __init__(self) -> None:
        self.total = Billed()
        self.sessions: dict[str, Billed] = {}
        self.models: dict[str, Billed] = {}

    def bill(self, usage: MockUsage, shares: Sequence[Share], session: str | None) -> None:
        """Bill the usage of one call: its shares to their models, all of it to its session."""
        self.total = self.total.plus(usage)
        for share in shares:
            self.models[share.model] = self.models.get(share.model, Billed()).plus(share.usage)
        if session is not None:
            self.sessions[session] = self.sessions.get(session, Billed()).plus(usage)


class MockProvider:
    """A deterministic LLM provider. Other threads may read it while it serves requests.

    `behaviour`, `windows`, `claude` and `strict` are attributes that may be replaced at any time.

    Args:
        script: the turns to respond with, one per call to a generating endpoint, in order of arrival. After the last
            turn, responses are made from the request.
        api_key: the required credential; None to accept any.
        behaviour: the behaviour of responses, unless a turn or the `x-mock` header says otherwise.
        windows: the maximum of input tokens by model, such as `MODEL_WINDOWS`; other models have no limit.
        claude: the request rules of Claude models to enforce, such as `CLAUDE_RULES`.
        strict: the request rules of other models to enforce, such as `STRICT_MODELS`.
    """

    def __init__(
        self,
        script: Sequence[Turn] = (),
        *,
        api_key: str | None = None,
        behaviour: Behaviour = _DEFAULT,
        windows: Mapping[str, int] = _NO_WINDOWS,
        claude: tuple[ModelRules, ...] = (),
        strict: Sequence[StrictRules] = (),
    ) -> None:
        self.behaviour = behaviour
        self.windows = windows
        self.claude = claude
        self.strict = strict
        self.prefix_memory = PrefixMemory()
        #: missing parts of requests that are no error, but make the responses of a real model worse
        self.degraded: deque[str] = deque(maxlen=MAX_RECORDS)
        self._api_key = api_key
        self._script = deque(script)
        self._calls: deque[RecordedCall] = deque(maxlen=MAX_RECORDS)
        self._ledger = MockLedger()
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._stored: OrderedDict[str, int] = OrderedDict()
        self._background: OrderedDict[str, list[JsonObject]] = OrderedDict()
        self._numbers = count(1)
        self._lock = Lock()

    @property
    def calls(self) -> list[RecordedCall]:
        """Return a copy of the newest 10,000 calls, oldest first."""
        with self._lock:
            return list(self._calls)

    def billed(self, session: str | None = None) -> Billed:
        """Return what was billed in total, or for the calls with this `x-session-id`."""
        with self._lock:
            return self._ledger.total if session is None else self._ledger.sessions.get(session, Billed())

    def billed_by_session(self) -> dict[str, Billed]:
        """Return a copy of what was billed for each `x-session-id`."""
        with self._lock:
            return dict(self._ledger.sessions)

    def billed_by_model(self) -> dict[str, Billed]:
        """Return a copy of what was billed at the rates of each model."""
        with self._lock:
            return dict(self._ledger.models)

    def push(self, *turns: Turn) -> None:
        """Add turns to the end of the script."""
        self._script.extend(turns)

    def reset(self) -> None:
        """Remove calls, ledger, prompt cache, stored responses and remaining turns. Call numbers are not reset."""
        with self._lock:
            self._script.clear()
            self._calls.clear()
            self._ledger = MockLedger()
            self._prefixes.clear()
            self._stored.clear()
            self._background.clear()
            self.prefix_memory.clear()
            self.degraded.clear()

    def next_turn(self) -> Turn | None:
        """Remove the next turn from the script and return it, or None if there is none."""
        return self._script.popleft() if self._script else None

    def number(self) -> int:
        """Return a number that no earlier call had."""
        return next(self._numbers)

    def authorize(self, request: ReceivedCall) -> None:
        """Check the credential of a request, in the header of OpenAI's or Anthropic's API.

        Raises:
            ApiError: 401, the credential is missing or wrong.
        """
        if self._api_key is None:
            return
        bearer = (request.header("authorization") or "").removeprefix("Bearer ")
        given = request.header("x-api-key") or bearer
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    def stored_tokens(self, name: str | None) -> int:
        """Return the tokens of a stored response or conversation with its whole history; 0 if it is unknown."""
        return self._stored.get(name, 0) if name is not None else 0

    def store(self, name: str, tokens: int) -> None:
        """Store the tokens of a response or of a conversation, including its history."""
        self._stored[name] = tokens
        self._stored.move_to_end(name)
        if len(self._stored) > MAX_STORED:
            self._stored.popitem(last=False)

    def keep(self, name: str, running: JsonObject, finished: JsonObject) -> None:
        """Store a background response: `running` is returned by the first fetch, `finished` by all later ones."""
        self._background[name] = [running, finished]
        if len(self._background) > MAX_STORED:
            self._background.popitem(last=False)

    def fetch(self, name: str, *, cancel: bool) -> JsonObject | None:
        """Return the present state of a background response, or None if it is unknown.

        `cancel`: cancel the response, unless it is finished.
        """
        states = self._background.get(name)
        if states is None:
            return None
        if cancel and len(states) > 1:
            states[:] = [{**states[0], "status": "cancelled"}]
        return states.pop(0) if len(states) > 1 else states[0]

    def cached_tokens(
        self, model: str, messages: Iterable[tuple[bytes, int]], marked: Sequence[int] | None = None
    ) -> int:
        """Return the tokens of the longest prefix that an earlier call to the model also had, and store this prompt.

        `messages`: the raw JSON of each message and its tokens. A prefix of fewer than 64 tokens counts as 0.
        `marked`: indices of the messages with a cache mark: prefixes are stored only up to these, and are found only up
            to them and a few messages before each. None: the API needs no marks.
        """
        cached = 0
        tokens = 0
        key = hash(model)
        for index, (raw, size) in enumerate(messages):
            tokens += size
            key = hash((key, raw))
            if key in self._prefixes and (
                marked is None or any(mark - MAX_BEFORE_MARK <= index <= mark for mark in marked)
            ):
                cached = tokens
            if marked is None or index in marked:
                self._prefixes[key] = None
                self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return cached if cached >= MIN_CACHED_TOKENS else 0

    def record(
        self,
        request: ReceivedCall,
        *,
        status: int,
        model: str = "",
        usage: MockUsage | None = None,
        shares: Sequence[Share] = (),
    ) -> None:
        """Record a request, and bill its usage in total, to its session and to its models."""
        is_small = len(request.body) <= MAX_KEPT_BODY
        call = RecordedCall(
            method=request.method,
            path=request.path,
            query=request.query,
            headers=request.headers,
            body=request.body if is_small else b"",
            body_bytes=len(request.body),
            body_digest="" if is_small else hashlib.sha256(request.body).hexdigest(),
            model=model,
            status=status,
            billed=Billed().plus(usage) if usage else None,
        )
        with self._lock:
            self._calls.append(call)
            if usage is not None:
                self._ledger.bill(usage, shares or [Share(model, usage)], request.header("x-session-id"))


@dataclass(frozen=True, slots=True)
class MockExchange:
    """One running call: the request, its turn of the script, its behaviour, and the provider."""

    request: ReceivedCall
    provider: MockProvider
    turn: Turn | None
    behaviour: Behaviour
    number: int
    """The number of the call, from which its identifiers are made."""

    @classmethod
    def begin(cls, request: ReceivedCall, provider: MockProvider, number: int, *, scripted: bool) -> MockExchange:
        """Take the next turn if the call is `scripted`, and decide the behaviour of the response.

        Raises:
            ApiError: 400, the `x-mock` header is not valid.
        """
        turn = provider.next_turn() if scripted else None
        behaviour = turn.behaviour if turn and turn.behaviour else provider.behaviour
        header = request.header("x-mock")
        if header is not None:
            try:
                behaviour = with_header(behaviour, header)
            except BadBehaviourError as error:
                raise ApiError(400, str(error), param="x-mock") from None
        return cls(request, provider, turn, behaviour, number)

    def settle(self, counted: MockUsage) -> MockUsage:
        """Return the usage to report and bill: fixed numbers if the behaviour or the turn has any, else `counted`."""
        forced = self.behaviour.tokens or (self.turn and self.turn.usage)
        return MockUsage(*forced) if forced else counted

    @property
    def shows_usage(self) -> bool:
        """Return True if usage is reported at all, for responses that can report it in one place only."""
        return self.behaviour.usage != "none"
