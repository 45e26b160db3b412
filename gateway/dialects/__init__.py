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

#: A POST below one of these reads or changes the result of an earlier call that is already counted. Its response may
#: repeat the usage of that call. Compaction is a separate call.
_STORED: Final = re.compile(r"(?:chat/completions|responses)/.")
_BILLED_BELOW_STORED: Final = re.compile(r"responses/compact$")
#: A run of a thread: a POST changes its metadata, and the response may repeat the usage of the run.
_RUN: Final = re.compile(r"threads/(?!runs(?:/|$))[^/]+/runs/[^/]+$")
#: One provider (Mistral) continues a conversation at this path, and another one (OpenAI) only adds items to it.
_CONVERSATION: Final = re.compile(r"conversations/[^/]+(?:/items)?$")
#: Paths whose requests are free at the known providers: they change stored data, or check or count something. Their
#: reported usage is metered, because another provider may bill them. They are not estimated.
_FREE: Final = re.compile(
    r"(?:(?:files|vector_stores|uploads)(?:/.+)?|conversations|containers(?:/.+/files)?|assistants|moderations"
    r"|threads(?:/(?!runs(?:/|$))[^/]+(?:/messages(?:/[^/]+)?)?)?"
    r"|fine_tuning/(?:alpha/graders/validate|checkpoints/.+/permissions)|fine-tunes/estimate-price"
    r"|.+/(?:messages/count_tokens|responses/input_tokens))$"
)
#: Work that continues after the response, which only confirms its start: the path has one of these words. This includes
#: opening sessions and machines, because the gateway does not see how they are used.
_STARTS_WORK: Final = re.compile(
    r"(?:^|/)(?:evals/|(?:[a-z]+[_-])?(?:async|batch|batches|clusters|deployments|endpoints|evaluations?|execute"
    r"|executions|fine[_-]tun(?:e|es|ing|ings)|jobs|live|queue|realtime|runs|schedules|sessions|videos?)(?:/|$))"
)
#: ends or pauses such work
_ENDS_WORK: Final = re.compile(r"/(?:archive|cancel|hangup|pause|reject|stop|terminate)$")
#: paths from which the responses to earlier calls are fetched, and the dialects that read these responses
#: https://developers.openai.com/api/docs/guides/background, https://docs.x.ai/docs/guides/deferred-chat-completions
_FETCHED: Final[Mapping[str, Sequence[tuple[re.Pattern[str], Dialect]]]] = {
    "GET": (
        (re.compile(r"responses/([^/]+)/?$", re.IGNORECASE), _RESPONSES),
        (re.compile(r"chat/deferred-completion/([^/]+)/?$", re.IGNORECASE), CHAT),
    ),
    "POST": ((re.compile(r"responses/([^/]+)/cancel/?$", re.IGNORECASE), _RESPONSES),),
}
#: Token counting, which is free at every provider that offers it: path -> format of the request.
_COUNTING_MODELS: Final[Mapping[str, Wire]] = {
    "messages/count_tokens": "messages",
    "responses/input_tokens": "responses",
}
#: a stored response, and the paths below it, such as `input_items`
_ABOUT: Final = re.compile(r"responses/(?!(?:compact|input_tokens)/?$)([^/]+)(?:/[a-z_]+)?/?$", re.IGNORECASE)
#: The only fields of a request that asks for no response: one about a stored response, or one that adds to a
#: conversation.
_ABOUT_STORED: Final = frozenset({"metadata"})
_ABOUT_CONVERSATION: Final = frozenset({"metadata", "items"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path under /v1, and how the gateway handles it.

    Attributes:
        dialect: its wire format.
        operation: the name of the operation in records.
        metered: the usage in a response is added to a session.
        estimated: an estimate is added if the response reports no usage.
        anthropic: the client uses Anthropic's API.
        wire: the format of the requests, if their tokens can be counted.
        deferred: the call starts work that is billed later, without the gateway.
        response_id: the id of an earlier response that is read, changed or deleted.
        fetched_id: the same id, if the response is that earlier response in its current state.
        counts: the format of a request whose tokens the provider is asked to count.
    """

    dialect: Dialect
    operation: str
    metered: bool
    estimated: bool
    anthropic: bool = False
    wire: Wire | None = None
    deferred: bool = False
    response_id: str | None = None
    fetched_id: str | None = None
    counts: Wire | None = None

    @property
    def format(self) -> str | None:
        """Return the name of the format in `providers.NAME.dialects`; None if it has no name there."""
        return self.wire or self.counts or ("embeddings" if self.operation == "embeddings" and self.metered else None)

    @property
    def may_continue(self) -> bool:
        """Return True if requests may have `previous_response_id`, which includes compaction and token counting."""
        return self.wire == "responses" or self.operation == "responses"


#: Characters of an operation that is named after its path. Callers choose the path, and each record has the operation.
_MAX_OPERATION: Final = 64
#: Methods of requests that are free as long as they have no body. All others are metered as POST.
WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
#: The method of these that some APIs use with a body. It is metered if it has one.
_MAY_HAVE_BODY: Final = "DELETE"
#: the endpoints (POST) whose tokens can be estimated if the provider reports no usage
_KNOWN: Final[Mapping[str, Endpoint]] = {
    "chat/completions": Endpoint(CHAT, "chat", metered=True, estimated=True, wire="chat"),
    "responses": Endpoint(_RESPONSES, "chat", metered=True, estimated=True, wire="responses"),
    "messages": Endpoint(AnthropicMessages(), "chat", metered=True, estimated=True, anthropic=True, wire="messages"),
    "completions": Endpoint(Completions(), "text_completion", metered=True, estimated=True, wire="completions"),
    "embeddings": Endpoint(PassThrough("embeddings", is_read=True), "embeddings", metered=True, estimated=True),
}
#: Paths below those of a model. A request there that asks for a response is a call, whatever the rest of the path is,
#: because some servers route by prefix.
_BELOW_MODEL: Final = re.compile(rf"(?:{'|'.join(_KNOWN)})/")


def endpoint(method: str, path: str, *, anthropic: bool = False, body: bytes = b"") -> Endpoint:
    """Return the endpoint of a path relative to `/v1/`, such as `chat/completions`.

    Args:
        method: the HTTP method.
        path: the path.
        anthropic: the headers are those of Anthropic's API.
        body: the body, which distinguishes a call from a request about an earlier response.
    """
    # Some servers ignore the case of paths.
    original_path, path = path, path.rstrip("/").lower()
    known, is_below = _KNOWN.get(path), _BELOW_MODEL.match(path) is not None
    is_of_model = known is not None or is_below
    # Some servers ignore the method, so a request with a body is treated as a call.
    has_body = method not in WITHOUT_BODY or (method == _MAY_HAVE_BODY and not is_of_model and bool(body.strip()))
    if known is not None and has_body:
        return known
    operation = known.operation if known is not None else path.partition("/")[0][:_MAX_OPERATION] or "other"
    anthropic = anthropic or path == "messages" or path.startswith("messages/")
    metered = has_body and not _is_free(method, path, body)
    # A body that is not metered is not forwarded.
    is_empty = not has_body
    for pattern, reader_dialect in _FETCHED.get(method, ()) if not metered else ():
        if (match := pattern.match(original_path)) is not None:
            dialect, response_id = StoredResponses(operation, reader_dialect, is_empty=is_empty), unquote(match[1])
            return Endpoint(
                dialect, operation, metered=False, estimated=False, response_id=response_id, fetched_id=response_id
            )
    about = _ABOUT.match(original_path) if not metered else None
    counts = _COUNTING_MODELS.get(path) if has_body and not metered else None
    is_free = _FREE.match(path) is not None
    return Endpoint(
        PassThrough(operation, anthropic=anthropic, is_empty=is_empty, counts=counts),
        operation,
        metered=metered,
        estimated=metered and not is_free,
        anthropic=anthropic,
        deferred=metered and not is_free and _STARTS_WORK.search(path) is not None,
        response_id=unquote(about[1]) if about is not None else None,
        counts=counts,
    )


def _is_free(method: str, path: str, body: bytes) -> bool:
    """Return True for a request with a body that no provider bills, judged by method, path and fields."""
    if method != "POST":
        return False
    if path in _COUNTING_MODELS:
        return True
    if _STARTS_WORK.search(path) and _ENDS_WORK.search(path):
        return not _may_ask(body)
    if _STORED.match(path) or _RUN.match(path):
        return not _BILLED_BELOW_STORED.match(path) and not _may_ask(body)
    if _CONVERSATION.match(path):
        names = _field_names(body)
        return bool(names) and names is not None and names <= _ABOUT_CONVERSATION
    return False


def _may_ask(body: bytes) -> bool:
    """Return True if a body may ask for a response."""
    if not body.strip():
        return False
    names = _field_names(body)
    # The provider may understand a body that the gateway cannot read.
    return names is None or not names <= _ABOUT_STORED


def _field_names(body: bytes) -> AbstractSet[str] | None:
    """Return the names of the fields of a body; None if it cannot be read."""
    try:
        return read_fields(body).keys()
    except InvalidRequest:
        return None
