"""Define the wire formats, and which path speaks which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final
from urllib.parse import unquote

from gateway.core.counting.measure import Wire
from gateway.core.errors import InvalidRequest
from gateway.core.values import dataclass
from gateway.dialects.anthropic_messages import AnthropicMessages
from gateway.dialects.base import Dialect
from gateway.dialects.completions import Completions
from gateway.dialects.fields import read_fields
from gateway.dialects.openai_chat import OpenAIChat
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.stored_response import StoredResponses

CHAT: Final = OpenAIChat()
_RESPONSES: Final = OpenAIResponses()

#: A POST below one of these reads or changes what an earlier, already counted call made; its answer may repeat that
#: call's usage. Compaction is a call of its own.
_STORED: Final = re.compile(r"(?:chat/completions|responses)/.")
_BILLED_BELOW_STORED: Final = re.compile(r"responses/compact$")
#: A run of a thread: a POST changes what is noted of it, and its answer may repeat the usage of the run.
_RUN: Final = re.compile(r"threads/(?!runs(?:/|$))[^/]+/runs/[^/]+$")
#: A conversation goes on at one provider (Mistral), and is only added to at another (OpenAI), on the same path.
_CONVERSATION: Final = re.compile(r"conversations/[^/]+(?:/items)?$")
#: Paths whose requests cost nothing at the known providers, as they change what is kept, check or count something.
#: They are metered by what an answer reports, and not estimated: another provider may bill them.
_KEPT: Final = re.compile(
    r"(?:(?:files|vector_stores|uploads)(?:/.+)?|conversations|containers(?:/.+/files)?|assistants|moderations"
    r"|threads(?:/(?!runs(?:/|$))[^/]+(?:/messages(?:/[^/]+)?)?)?"
    r"|fine_tuning/(?:alpha/graders/validate|checkpoints/.+/permissions)|fine-tunes/estimate-price"
    r"|.+/(?:messages/count_tokens|responses/input_tokens))$"
)
#: Work that goes on after its answer, which only says that it was begun: its path holds one of these words. Sessions
#: and machines that are opened here are among it, since what they are used for goes past the gateway.
_LATER: Final = re.compile(
    r"(?:^|/)(?:evals/|(?:[a-z]+[_-])?(?:async|batch|batches|clusters|deployments|endpoints|evaluations?|execute"
    r"|executions|fine[_-]tun(?:e|es|ing|ings)|jobs|live|queue|realtime|runs|schedules|sessions|videos?)(?:/|$))"
)
#: what ends such work, or leaves it alone for a time
_ENDED: Final = re.compile(r"/(?:archive|cancel|hangup|pause|reject|stop|terminate)$")
#: Paths below those of a model. What asks for an answer there is a call, whatever the rest of the path says: some
#: servers route by the beginning of a path.
_BELOW_MODEL: Final = re.compile(r"(?:chat/completions|completions|responses|messages|embeddings)/")
#: Where the answers to earlier calls are fetched, by how they are read.
#: https://developers.openai.com/api/docs/guides/background, https://docs.x.ai/docs/guides/deferred-chat-completions
_FETCHED: Final[Mapping[str, Sequence[tuple[re.Pattern[str], Dialect]]]] = {
    "GET": (
        (re.compile(r"responses/([^/]+)/?$", re.IGNORECASE), _RESPONSES),
        (re.compile(r"chat/deferred-completion/([^/]+)/?$", re.IGNORECASE), CHAT),
    ),
    "POST": ((re.compile(r"responses/([^/]+)/cancel/?$", re.IGNORECASE), _RESPONSES),),
}
#: Counting is free at every provider that offers it: the paths, by the format of the requests.
_COUNTING_MODELS: Final[Mapping[str, Wire]] = {
    "messages/count_tokens": "messages",
    "responses/input_tokens": "responses",
}
#: an answer that its provider keeps, and what is below it, such as `input_items`
_ABOUT: Final = re.compile(r"responses/(?!(?:compact|input_tokens)/?$)([^/]+)(?:/[a-z_]+)?/?$", re.IGNORECASE)
#: the only fields of a request that asks for no answer: about a stored one, and to a conversation that is added to
_ABOUT_STORED: Final = frozenset({"metadata"})
_ABOUT_CONVERSATION: Final = frozenset({"metadata", "items"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one path is spoken.

    `metered`: the usage in an answer is added to a session. `estimated`: so is an estimate where there is none.
    `anthropic`: the client speaks Anthropic's API. `wire`: the format of its requests, where they can be weighed.
    `deferred`: it begins something that is billed later and elsewhere. `about`: the id of an earlier answer, which is
    shown, changed or deleted; `fetches`: the same where that answer is what comes, in the state that it is in.
    `counts`: the format of the request that its provider is asked to count.
    """

    dialect: Dialect
    operation: str
    metered: bool
    estimated: bool
    anthropic: bool = False
    wire: Wire | None = None
    deferred: bool = False
    about: str | None = None
    fetches: str | None = None
    counts: Wire | None = None

    @property
    def format(self) -> str | None:
        """What `providers.NAME.dialects` calls it; None where it has no name there."""
        return self.wire or self.counts or ("embeddings" if self.operation == "embeddings" and self.metered else None)

    @property
    def may_go_on(self) -> bool:
        """Whether its requests may name an earlier answer by `previous_response_id`; compaction and counting may."""
        return self.wire == "responses" or self.operation == "responses"


#: characters of an operation that is called as its path begins: it stands in each record, and callers choose it
_LONGEST_OPERATION: Final = 64
#: Methods of requests that are free as long as they have no body. All others are metered as POST.
WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
#: the one of these with which some APIs take a body; it is metered then
_MAY_HAVE_BODY: Final = "DELETE"
#: what is known well enough to be estimated where the provider reports nothing; by POST
_KNOWN: Final[Mapping[str, Endpoint]] = {
    "chat/completions": Endpoint(CHAT, "chat", metered=True, estimated=True, wire="chat"),
    "responses": Endpoint(_RESPONSES, "chat", metered=True, estimated=True, wire="responses"),
    "messages": Endpoint(AnthropicMessages(), "chat", metered=True, estimated=True, anthropic=True, wire="messages"),
    "completions": Endpoint(Completions(), "text_completion", metered=True, estimated=True, wire="completions"),
    "embeddings": Endpoint(PassThrough("embeddings", is_read=True), "embeddings", metered=True, estimated=True),
}


def endpoint(method: str, path: str, *, anthropic: bool = False, body: bytes = b"") -> Endpoint:
    """The endpoint of a path relative to `/v1/`, such as `chat/completions`; `anthropic`: its headers say so.

    `body`: what came to it, which tells a call from a request about an earlier answer.
    """
    # Some servers route without regard to case.
    asked, path = path, path.rstrip("/").lower()
    known, is_below = _KNOWN.get(path), _BELOW_MODEL.match(path) is not None
    is_of_model = known is not None or is_below
    # Some servers do not look at the method: a body makes a call of it.
    has_body = method not in WITHOUT_BODY or (method == _MAY_HAVE_BODY and not is_of_model and bool(body.strip()))
    if known is not None and has_body:
        return known
    operation = known.operation if known is not None else path.partition("/")[0][:_LONGEST_OPERATION] or "other"
    anthropic = anthropic or path == "messages" or path.startswith("messages/")
    metered = has_body and not _is_free(method, path, body)
    # A body that is not metered is not forwarded.
    is_empty = not has_body
    for where, made in _FETCHED.get(method, ()) if not metered else ():
        if (found := where.match(asked)) is not None:
            dialect, answer_id = StoredResponses(operation, made, is_empty=is_empty), unquote(found[1])
            return Endpoint(dialect, operation, metered=False, estimated=False, about=answer_id, fetches=answer_id)
    about = _ABOUT.match(asked) if not metered else None
    counts = _COUNTING_MODELS.get(path) if has_body and not metered else None
    is_kept = _KEPT.match(path) is not None
    return Endpoint(
        PassThrough(operation, anthropic=anthropic, is_empty=is_empty, counts=counts),
        operation,
        metered=metered,
        estimated=metered and not is_kept,
        anthropic=anthropic,
        deferred=metered and not is_kept and _LATER.search(path) is not None,
        about=unquote(about[1]) if about is not None else None,
        counts=counts,
    )


def _is_free(method: str, path: str, body: bytes) -> bool:
    """Return whether a request with a body is one of those that no provider bills: by method, path and fields."""
    if method != "POST":
        return False
    if path in _COUNTING_MODELS:
        return True
    if _LATER.search(path) and _ENDED.search(path):
        return not _asks(body)
    if _STORED.match(path) or _RUN.match(path):
        return not _BILLED_BELOW_STORED.match(path) and not _asks(body)
    if _CONVERSATION.match(path):
        said = _said(body)
        return bool(said) and said is not None and said <= _ABOUT_CONVERSATION
    return False


def _asks(body: bytes) -> bool:
    """Whether a body may ask for an answer."""
    if not body.strip():
        return False
    said = _said(body)
    # What cannot be read may be known to its provider.
    return said is None or not said <= _ABOUT_STORED


def _said(body: bytes) -> AbstractSet[str] | None:
    """The fields of a body; None where it cannot be read."""
    try:
        return read_fields(body).keys()
    except InvalidRequest:
        return None
