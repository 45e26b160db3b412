"""Split request paths into session and provider path.

Clients of Azure OpenAI name the model in the path, as the deployment to call. These paths are understood too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

from gateway.call.routing import form_with_model
from gateway.core.errors import InvalidRequest, MethodNotAllowed, NotFound
from gateway.dialects import WITHOUT_BODY
from gateway.dialects.fields import read_fields, string_field, write_fields

#: paths of OpenAI's and Anthropic's APIs; they also work without /v1, for clients whose base URL lacks it
_BARE: Final = (
    r"(?:chat/completions|completions|embeddings|responses|messages|models|assistants|audio|batches|containers"
    r"|conversations|evals|files|fine_tuning|images|moderations|threads|uploads|vector_stores|videos)(?:/|$)"
)
_IS_BARE: Final = re.compile(_BARE)
#: the same paths with the prefixes of Azure's clients, for base URLs with and without /v1
_AZURE: Final = re.compile(rf"(?:openai/(?:v1/)?)?(?:deployments/(?P<deployment>.+?)/)?(?P<path>{_BARE}.*)")
_UNSAFE: Final = re.compile(rb"[\x00-\x1f\x7f\\;]")
#: percent-encoded unreserved characters (RFC 3986, section 2.3)
_NEEDLESSLY_ENCODED: Final = re.compile(r"%(?:[46][1-9a-f]|[57][0-9a]|3[0-9]|2[de]|5f|7e)", re.IGNORECASE)
#: percent-encoded slash, percent sign, question mark and number sign
_ENCODED_SEPARATORS: Final = re.compile(r"%(?:2f|25|3f|23)", re.IGNORECASE)
#: Paths whose bodies name a model. Some of Azure's clients also write the deployment before other paths.
_WITH_MODEL: Final = re.compile(
    r"(?:(?:chat/)?completions|embeddings|moderations|responses(?:/compact|/input_tokens)?|messages(?:/count_tokens)?"
    r"|audio/.+|images/.+|videos)/?",
    re.IGNORECASE,
)
#: Methods that are never forwarded. The response to TRACE can contain the request with the gateway's key. After CONNECT
#: the connection can become a tunnel, into which the next call would be sent.
_NOT_FORWARDED: Final = frozenset({"TRACE", "CONNECT"})
#: query parameter of Azure's clients, which other providers do not know
_API_VERSION: Final = "api-version="
#: number of cached paths, and the longest one in bytes; many paths name a session
_CACHED_PATHS: Final = 1024
_LONGEST_CACHED: Final = 256


class PathRequest(NamedTuple):
    """The parts of a request path.

    Attributes:
        session: the session that the path names, or None.
        path: path relative to `/v1/`, still percent-encoded.
        azure: the path has the form of Azure's clients.
        deployment: the model that the path names, or None.
    """

    session: str | None
    path: str
    azure: bool = False
    deployment: str | None = None

    def query(self, raw: bytes) -> str:
        """Return the query for the provider, still encoded. `api-version` is removed, because Azure is not called."""
        query = raw.decode("latin-1")
        if not self.azure:
            return query
        return "&".join([item for item in query.split("&") if not item.startswith(_API_VERSION)])

    def named_in(self, body: bytes) -> bytes:
        """Return the body with the model that the path names, or the same bytes if nothing needs to change.

        Raises:
            InvalidRequest: the body starts like a JSON object, but cannot be parsed.
        """
        if self.deployment is None or not _WITH_MODEL.fullmatch(self.path):
            return body
        if body.startswith(b"--"):
            return form_with_model(self.deployment, body)
        if not body.lstrip().startswith(b"{"):
            return body
        fields = read_fields(body)
        if string_field(fields, "model") == self.deployment:
            return body
        return write_fields(fields, {"model": self.deployment})


def split_path(raw_path: bytes, method: str = "POST") -> PathRequest:
    """Split a request path into its parts. Short paths are cached.

    The path may start with `/s/{session}`. `/v1` may be missing before a known endpoint, and may be repeated.

    Raises:
        NotFound: nothing is forwarded under this path.
        MethodNotAllowed: the method is never forwarded.
        InvalidRequest: the path has `.` or `..` segments, control characters or needless encodings.
    """
    return (_cached_split if len(raw_path) <= _LONGEST_CACHED else _split)(raw_path, method)


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
            "This path does not exist. Send calls to /v1 or /s/SESSION/v1. Sessions are under /api/sessions; the "
            "dashboard, if it is on, is at /ui."
        )
    plain = unquote_to_bytes(path)
    segments = plain.split(b"/")
    if any(segment in (b".", b"..") for segment in segments):
        raise InvalidRequest("The path must not contain . or .. segments.")
    # Names of models may contain a slash (GET models/org%2Fname). Paths of billed calls may not contain separators.
    has_hidden_separator = method not in WITHOUT_BODY and _ENCODED_SEPARATORS.search(path)
    # Two programs may read such a path differently. It could then be metered as one path and served as another.
    # A name may contain a space (%20). Some servers drop a space at the end of a segment.
    has_wrong_space = " " in path or any(segment != segment.strip(b" ") for segment in segments)
    if (
        _UNSAFE.search(plain)
        or has_wrong_space
        or b"" in segments[:-1]
        or _NEEDLESSLY_ENCODED.search(path)
        or has_hidden_separator
    ):
        raise InvalidRequest(
            "The path must not contain backslashes, semicolons, control characters, empty segments, spaces except "
            "%20 within a name, or percent-encoded letters, digits and separators."
        )
    if azure is None:
        return PathRequest(session, path)
    deployment = azure["deployment"]
    return PathRequest(session, azure["path"], azure=True, deployment=deployment and unquote(deployment))


_cached_split = lru_cache(_CACHED_PATHS)(_split)
