"""Keep the provider's script, its calls, and the ledger of what it billed."""

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

#: Records kept, the newest.
MAX_RECORDS: Final = 10_000
#: Bytes of a body above which only its length and digest are kept.
MAX_KEPT_BODY: Final = 1_000_000
#: Prompt prefixes remembered, the newest.
MAX_PREFIXES: Final = 100_000
#: Answers and conversations that requests may go on from, the newest.
MAX_STORED: Final = 10_000
#: Tokens below which a shared prefix is not worth reporting as cached.
MIN_CACHED_TOKENS: Final = 64

_DEFAULT: Final = Behaviour()
_NO_WINDOWS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Billed:
    """What the provider charged, in tokens. `input_tokens` includes cached ones; `calls` counts the charged calls."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    calls: int = 0

    def plus(self, usage: MockUsage) -> Billed:
        """This and one more call."""
        return Billed(
            self.input_tokens + usage.input,
            self.output_tokens + usage.output,
            self.total_tokens + usage.total,
            self.calls + 1,
        )


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call as received and what came of it."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    """Lower-case name and value, in order of arrival."""
    body: bytes
    """Raw; empty where it was over 1 MB."""
    body_bytes: int
    """Its length as received."""
    body_digest: str
    """SHA-256 in hex where `body` was dropped, otherwise empty."""
    model: str
    """As asked for; empty where the call was refused or names none."""
    status: int
    """As decided; 0: never answered (`hang=1`, `die=0`)."""
    billed: Billed | None
    """None: nothing was charged."""

    @property
    def body_sha256(self) -> str:
        """SHA-256 of the body as received, in hex."""
        return self.body_digest or hashlib.sha256(self.body).hexdigest()

    def header(self, name: str) -> str | None:
        """The first value of the header `name` (lower case)."""
        return next((value for key, value in self.headers if key == name), None)


class MockProvider:
    """A deterministic LLM provider.

    `script`: the turns to answer with, one per call to a generating endpoint in order of arrival; when they run out,
    answers are made up from the request. `api_key`: the credential to insist on, None: none. `behaviour`: of every
    answer that neither a turn nor an `x-mock` header says more about. `windows`: the most input tokens by model, such
    as `MODEL_WINDOWS`; a model that is not in it takes any number. `claude`: the request rules of Claude models to
    enforce, such as `CLAUDE_RULES`; `strict`: those of other models, such as `STRICT_MODELS`; by default none. These
    four may be replaced at any time.

    Safe to read from other threads while it serves.
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
        #: what requests lacked that makes a real model answer worse, but is no error; the newest
        self.degraded: deque[str] = deque(maxlen=MAX_RECORDS)
        self._api_key = api_key
        self._script = deque(script)
        self._calls: deque[RecordedCall] = deque(maxlen=MAX_RECORDS)
        self._total = Billed()
        self._sessions: dict[str, Billed] = {}
        self._models: dict[str, Billed] = {}
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._stored: OrderedDict[str, int] = OrderedDict()
        self._made: OrderedDict[str, list[JsonObject]] = OrderedDict()
        self._numbers = count(1)
        self._lock = Lock()

    @property
    def calls(self) -> list[RecordedCall]:
        """The newest 10,000 calls, oldest first; a copy."""
        with self._lock:
            return list(self._calls)

    def billed(self, session: str | None = None) -> Billed:
        """What was charged: in all, or to the calls with this `x-session-id`."""
        with self._lock:
            return self._total if session is None else self._sessions.get(session, Billed())

    def billed_by_session(self) -> dict[str, Billed]:
        """What was charged to each `x-session-id` seen; a copy."""
        with self._lock:
            return dict(self._sessions)

    def billed_by_model(self) -> dict[str, Billed]:
        """Return what was charged at the rates of each model; a copy."""
        with self._lock:
            return dict(self._models)

    def push(self, *turns: Turn) -> None:
        """Add turns to the end of the script."""
        self._script.extend(turns)

    def reset(self) -> None:
        """Forget calls, ledger, prompt cache, stored answers and unplayed turns. Identifiers go on counting."""
        with self._lock:
            self._script.clear()
            self._calls.clear()
            self._total = Billed()
            self._sessions.clear()
            self._models.clear()
            self._prefixes.clear()
            self._stored.clear()
            self._made.clear()
            self.prefix_memory.clear()
            self.degraded.clear()

    def next_turn(self) -> Turn | None:
        """Take the next scripted turn."""
        return self._script.popleft() if self._script else None

    def number(self) -> int:
        """A number no earlier call had."""
        return next(self._numbers)

    def authorize(self, request: ReceivedCall) -> None:
        """Check the credential of `request`, in either API's header.

        Raises:
            ApiError: 401, it is missing or wrong.
        """
        if self._api_key is None:
            return
        bearer = (request.header("authorization") or "").removeprefix("Bearer ")
        given = request.header("x-api-key") or bearer
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    def stored_tokens(self, name: str | None) -> int:
        """Tokens of what was said up to an answer or in a conversation; 0 for one that is not known."""
        return self._stored.get(name, 0) if name is not None else 0

    def store(self, name: str, tokens: int) -> None:
        """Keep an answer, or a conversation as it is now."""
        self._stored[name] = tokens
        self._stored.move_to_end(name)
        if len(self._stored) > MAX_STORED:
            self._stored.popitem(last=False)

    def keep(self, name: str, running: JsonObject, made: JsonObject) -> None:
        """Keep an answer that is made in the background: as it is when it is next fetched, and from then on."""
        self._made[name] = [running, made]
        if len(self._made) > MAX_STORED:
            self._made.popitem(last=False)

    def fetch(self, name: str, *, cancel: bool) -> JsonObject | None:
        """Such an answer as it is now; None where there is none. `cancel`: it is made no further, if it is not made."""
        states = self._made.get(name)
        if states is None:
            return None
        if cancel and len(states) > 1:
            states[:] = [{**states[0], "status": "cancelled"}]
        return states.pop(0) if len(states) > 1 else states[0]

    def cached_tokens(self, model: str, messages: Iterable[tuple[bytes, int]]) -> int:
        """Tokens of the longest run of first messages that an earlier call to `model` began with; remembers this one.

        `messages`: the raw JSON of each and its tokens. 0 below 64 tokens.
        """
        seen = 0
        tokens = 0
        key = hash(model)
        for raw, size in messages:
            tokens += size
            key = hash((key, raw))
            if key in self._prefixes:
                seen = tokens
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return seen if seen >= MIN_CACHED_TOKENS else 0

    def record(
        self,
        request: ReceivedCall,
        *,
        status: int,
        model: str = "",
        usage: MockUsage | None = None,
        shares: Sequence[Share] = (),
    ) -> None:
        """Keep `request` and charge `usage` for it, to its session and to its models too."""
        small = len(request.body) <= MAX_KEPT_BODY
        call = RecordedCall(
            method=request.method,
            path=request.path,
            query=request.query,
            headers=request.headers,
            body=request.body if small else b"",
            body_bytes=len(request.body),
            body_digest="" if small else hashlib.sha256(request.body).hexdigest(),
            model=model,
            status=status,
            billed=Billed().plus(usage) if usage else None,
        )
        session = request.header("x-session-id")
        with self._lock:
            self._calls.append(call)
            if usage is None:
                return
            self._total = self._total.plus(usage)
            for share in shares or [Share(model, usage)]:
                self._models[share.model] = self._models.get(share.model, Billed()).plus(share.usage)
            if session is not None:
                self._sessions[session] = self._sessions.get(session, Billed()).plus(usage)


@dataclass(frozen=True, slots=True)
class MockExchange:
    """One call being answered: the request, what the script says about it, and the provider."""

    request: ReceivedCall
    provider: MockProvider
    turn: Turn | None
    behaviour: Behaviour
    number: int
    """Unlike that of any other call; identifiers are made of it."""

    @classmethod
    def begin(cls, request: ReceivedCall, provider: MockProvider, number: int, *, scripted: bool) -> MockExchange:
        """Take the next turn if this call is `scripted`, and settle how the answer behaves.

        Raises:
            ApiError: 400, the `x-mock` header cannot be read.
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
        """What to report and bill: the forced numbers if there are any, otherwise what was `counted`."""
        forced = self.behaviour.tokens or (self.turn and self.turn.usage)
        return MockUsage(*forced) if forced else counted

    @property
    def show_usage(self) -> bool:
        """Whether a whole answer, or an API with one way to report usage, reports it."""
        return self.behaviour.usage != "none"
