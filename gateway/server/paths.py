"""Split request paths into session and provider path.

Clients of Azure OpenAI put their model into the path, as the deployment to call. They are understood as well: what
they ask for is the same.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

from gateway.call.routing import form_naming
from gateway.core.errors import InvalidRequest, MethodNotAllowed, NotFound
from gateway.dialects import WITHOUT_BODY
from gateway.dialects.fields import read_fields, string_field, write_fields

#: paths of OpenAI's and Anthropic's APIs, understood without /v1 in front for a base URL given without it
_BARE: Final = (
    r"(?:chat/completions|completions|embeddings|responses|messages|models|assistants|audio|batches|containers"
    r"|conversations|evals|files|fine_tuning|images|moderations|threads|uploads|vector_stores|videos)(?:/|$)"
)
_IS_BARE: Final = re.compile(_BARE)
#: the same behind what Azure's clients write before them, who may be given either address as their base URL
_AZURE: Final = re.compile(rf"(?:openai/(?:v1/)?)?(?:deployments/(?P<deployment>.+?)/)?(?P<path>{_BARE}.*)")
_UNSAFE: Final = re.compile(rb"[\x00-\x1f\x7f\\;]")
#: unreserved characters (RFC 3986, section 2.3), encoded
_NEEDLESS: Final = re.compile(r"%(?:[46][1-9a-f]|[57][0-9a]|3[0-9]|2[de]|5f|7e)", re.IGNORECASE)
#: a slash, a percent sign, and where a query or a fragment begins, encoded
_HIDDEN: Final = re.compile(r"%(?:2f|25|3f|23)", re.IGNORECASE)
#: Paths whose bodies name a model. Some of Azure's clients write the deployment before all others, too.
_OF_A_MODEL: Final = re.compile(
    r"(?:(?:chat/)?completions|embeddings|moderations|responses(?:/compact|/input_tokens)?|messages(?:/count_tokens)?"
    r"|audio/.+|images/.+|videos)/?",
    re.IGNORECASE,
)
#: What is sent in these is no call. A server that knows TRACE repeats the request in its answer, with the gateway's key
#: in it; after a CONNECT the connection may be a tunnel, and the next call would go into that.
_NOT_FORWARDED: Final = frozenset({"TRACE", "CONNECT"})
#: a parameter of Azure's clients, which says nothing to others
_VERSION: Final = "api-version="
#: paths that stay known, and the bytes of the longest: many name a session
_KNOWN: Final = 1024
_LONGEST_KNOWN: Final = 256


class PathRequest(NamedTuple):
    """What a path asks for.

    Attributes:
        session: that it names.
        path: relative to `/v1/`, still encoded.
        azure: whether it was written as Azure's clients do.
        deployment: the model that it names.
    """

    session: str | None
    path: str
    azure: bool = False
    deployment: str | None = None

    def query(self, raw: bytes) -> str:
        """The query for the provider, still encoded. Azure's version is of an API that is not called."""
        query = raw.decode("latin-1")
        if not self.azure:
            return query
        return "&".join([one for one in query.split("&") if not one.startswith(_VERSION)])

    def named_in(self, body: bytes) -> bytes:
        """The body with the model in it that the path names; the same bytes where it says so already, or names none.

        Raises:
            InvalidRequest: it looks like a JSON object, and cannot be read.
        """
        if self.deployment is None or not _OF_A_MODEL.fullmatch(self.path):
            return body
        if body.startswith(b"--"):
            return form_naming(self.deployment, body)
        if not body.lstrip().startswith(b"{"):
            return body
        fields = read_fields(body)
        if string_field(fields, "model") == self.deployment:
            return body
        return write_fields(fields, {"model": self.deployment})


def split_path(raw_path: bytes, method: str = "POST") -> PathRequest:
    """What a request's path asks for. Those that come again and again are looked at once.

    `/s/{session}` may stand in front; `/v1` may be missing before a known endpoint, or stand twice.

    Raises:
        NotFound: nothing is forwarded under this path.
        MethodNotAllowed: nothing is forwarded by this method.
        InvalidRequest: the path leaves its folder, or holds control characters.
    """
    return (_known_split if len(raw_path) <= _LONGEST_KNOWN else _split)(raw_path, method)


def _split(raw_path: bytes, method: str) -> PathRequest:
    if method in _NOT_FORWARDED:
        raise MethodNotAllowed(f"{method} is not forwarded.")
    path, session = raw_path.decode("latin-1"), None
    if path.startswith("/s/"):
        session, _, path = path[3:].partition("/")
        session, path = unquote_to_bytes(session).decode("latin-1"), "/" + path
    versioned = False
    while path.startswith("/v1/"):
        path, versioned = path[3:], True
    path = path[1:]
    is_bare = _IS_BARE.match(path) is not None
    azure = None if is_bare else _AZURE.fullmatch(path)
    if not path or not (versioned or is_bare or azure):
        raise NotFound(
            "There is nothing under this path. Calls go to /v1 or to /s/SESSION/v1; sessions are under /api/sessions, "
            "and the dashboard, where it is on, is /ui."
        )
    plain = unquote_to_bytes(path)
    segments = plain.split(b"/")
    if any(segment in (b".", b"..") for segment in segments):
        raise InvalidRequest("The path must not contain . or .. segments.")
    # Names of models may hold a slash (GET models/org%2Fname); what is billed may not, nor any other mark of a path.
    hidden = method not in WITHOUT_BODY and _HIDDEN.search(path)
    # A path that two programs may read differently would be forwarded as one thing and metered as another.
    # A space may be part of a name, as %20; at the end of a segment some servers drop it.
    spaced = " " in path or any(segment != segment.strip(b" ") for segment in segments)
    if _UNSAFE.search(plain) or spaced or b"" in segments[:-1] or _NEEDLESS.search(path) or hidden:
        raise InvalidRequest(
            "The path must not contain backslashes, semicolons, control characters, empty segments, spaces other than "
            "%20 within a name, or letters, digits and marks of a path that are percent-encoded."
        )
    if azure is None:
        return PathRequest(session, path)
    deployment = azure["deployment"]
    return PathRequest(session, azure["path"], azure=True, deployment=deployment and unquote(deployment))


_known_split = lru_cache(_KNOWN)(_split)
