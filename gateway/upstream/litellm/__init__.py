"""Translate requests and responses through litellm.

Each call becomes one chat, text or embedding call of litellm, and its response is converted back to the client's
format. The rest of the gateway therefore meters it like any other call. litellm is loaded in a thread when the first
such provider is configured, and calls wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.core.counting.families import TokenizerFamilies
from gateway.core.errors import (
    GatewayError,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.http.headers import CREDENTIALS, credential
from gateway.core.http.request import Outgoing
from gateway.core.ports import Upstream, UpstreamReply
from gateway.core.values import dataclass
from gateway.upstream.body import AlreadyRead
from gateway.upstream.litellm import arguments, faults, library, translations
from gateway.upstream.litellm.library import NOT_INSTALLED, Library
from gateway.upstream.litellm.observed import ObservedStream

logger = logging.getLogger("gateway")

_JSON: Final = ((b"content-type", b"application/json"),)
_EVENTS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"),)
#: The only header of a caller that the provider reads. All others are for the API that the client uses.
_BETA: Final = b"anthropic-beta"


@dataclass(frozen=True, slots=True)
class LitellmSettings:
    """Settings of one provider.

    Attributes:
        name: its name in the configuration.
        provider: litellm's name for it.
        base_url: its address; empty for litellm's default.
        headers: names of the configured headers.
        is_keyless: litellm finds the credential itself, or none is needed.
        options: further arguments for litellm.
        connect_s: seconds to connect.
        first_byte_s: seconds to the head of a response.
        between_bytes_s: seconds between two chunks of a response.
        families: what the models accept and refuse.
    """

    name: str
    provider: str
    base_url: str
    headers: frozenset[bytes]
    is_keyless: bool
    options: Mapping[str, str]
    connect_s: float
    first_byte_s: float
    between_bytes_s: float
    families: TokenizerFamilies


def _reason(error: BaseException) -> str:
    """Return why litellm cannot be loaded. Texts of litellm's own exceptions are left out."""
    return NOT_INSTALLED if str(error) == NOT_INSTALLED else type(error).__name__


class LitellmUpstream:
    """Send requests to one provider through litellm. Create it in a running event loop; it starts loading litellm."""

    def __init__(self, settings: LitellmSettings) -> None:
        self.settings = settings
        library.acquire()
        self._loading = asyncio.ensure_future(asyncio.to_thread(library.load))
        self._loading.add_done_callback(self._loaded)

    def _loaded(self, loading: asyncio.Future[Library]) -> None:
        if not loading.cancelled() and (error := loading.exception()) is not None:
            logger.error("provider %s: litellm cannot be loaded: %s", self.settings.name, _reason(error))

    async def library(self) -> Library:
        """Return litellm when it is loaded.

        Raises:
            UpstreamUnreachable: it cannot be loaded.
        """
        try:
            return await asyncio.shield(self._loading)
        except Exception as error:
            raise UpstreamUnreachable(
                f'The provider "{self.settings.name}" needs litellm, which failed to load: {_reason(error)}.'
            ) from error

    def send(self, request: Outgoing) -> _SendContext:
        """Return the context in which the request is sent."""
        return _SendContext(self, request)

    async def aclose(self) -> None:
        """Close litellm's connections if no other provider uses them."""
        loaded = None
        with contextlib.suppress(Exception):
            loaded = await asyncio.shield(self._loading)
        await library.release(loaded)


class _SendContext:
    """One request: entered when its response has begun, left when it is no longer read."""

    __slots__ = ("_request", "_secrets", "_stream", "_upstream")

    def __init__(self, upstream: LitellmUpstream, request: Outgoing) -> None:
        self._upstream = upstream
        self._request = request
        self._stream: ObservedStream | None = None
        self._secrets: tuple[str, ...] = tuple(upstream.settings.options.values())

    async def __aenter__(self) -> UpstreamReply:
        settings = self._upstream.settings
        form = self._form()
        key = self._key()
        loaded = await self._upstream.library()
        loaded.keep_quiet()
        self._request.on_work(is_so=True)
        try:
            async with asyncio.timeout(settings.first_byte_s):
                return await self._call(loaded, form, key)
        except TimeoutError as error:
            await self.__aexit__()
            raise UpstreamTimeout(
                f'The provider "{settings.name}" did not begin a response within {settings.first_byte_s:g} s '
                "(timeout_s.first_byte)."
            ) from error
        except BaseException:
            await self.__aexit__()
            raise

    def _form(self) -> type[translations.Translation]:
        settings, url = self._upstream.settings, self._request.url
        path = url.removeprefix(f"{settings.base_url}/").partition("?")[0]
        form = translations.TRANSLATIONS.get(path.strip("/").lower())
        if form is None or self._request.method != "POST":
            raise NotFound(
                f'"{settings.name}" is used through a translation (adapter: litellm), which supports only POST of '
                f"{', '.join(translations.TRANSLATIONS)}."
            )
        return form

    def _key(self) -> str | None:
        """Return the credential in the request: the configured one or the caller's; None if none is needed."""
        settings = self._upstream.settings
        key = next((credential(value) for name, value in self._request.headers if name in CREDENTIALS), None)
        if key:
            self._secrets = (*self._secrets, key)
        elif not settings.is_keyless:
            # litellm would look for a credential in the environment, which is not meant for callers.
            raise Unauthenticated(
                f'The call has no credential, and none is configured for "{settings.name}". Send one, or set '
                f"providers.{settings.name}.key, or auth: none if litellm finds it itself."
            )
        return key

    async def _call(self, loaded: Library, form: type[translations.Translation], key: str | None) -> UpstreamReply:
        settings = self._upstream.settings
        try:
            call = _translated(loaded, form, settings, self._request)
            # A call overrides configured options. The values of `_fixed` override everything.
            given = {**settings.options, **call.arguments, **self._fixed(loaded, form, key)}
            completion = await getattr(loaded, call.function)(**given)
            if call.arguments.get("stream") is not True:
                return AlreadyRead(200, _JSON, call.whole(completion))
            self._stream = ObservedStream(completion)
            await self._stream.begin()
            return _Streamed(self, call.events(self._stream))
        except GatewayError:
            raise
        except Exception as error:
            result = faults.convert(error, settings.name, self._secrets)
            if isinstance(result, GatewayError):
                raise result from error
            return result.as_reply(anthropic=form is translations.Messages)

    def _fixed(self, loaded: Library, form: type[translations.Translation], key: str | None) -> dict[str, Any]:
        """Return the arguments that the caller cannot choose."""
        settings = self._upstream.settings
        passed_names = settings.headers | ({_BETA} if form is translations.Messages else frozenset())
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self._request.headers
            if name in passed_names
        }
        longest = max(settings.first_byte_s, settings.between_bytes_s)
        return {
            **({"api_base": settings.base_url} if settings.base_url else {}),
            **({"extra_headers": headers} if headers else {}),
            "custom_llm_provider": settings.provider,
            "api_key": key,
            "timeout": loaded.Timeout(longest, connect=settings.connect_s),
            "num_retries": 0,
            "max_retries": 0,
        }

    async def pieces(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events as they arrive; convert exceptions to the gateway's errors."""
        settings = self._upstream.settings
        try:
            while True:
                async with asyncio.timeout(settings.between_bytes_s):
                    event = await anext(events)
                if self._stream is not None and self._stream.failure is not None:
                    raise self._stream.failure
                yield event
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise UpstreamTimeout(
                f'The provider "{settings.name}" sent nothing for longer than {settings.between_bytes_s:g} s '
                "(timeout_s.between_bytes)."
            ) from error
        except GatewayError:
            raise
        except Exception as error:
            raise faults.stream_error(error, settings.name, self._secrets) from error

    async def __aexit__(self, *_: object) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


def _translated(
    loaded: Library, form: type[translations.Translation], settings: LitellmSettings, request: Outgoing
) -> translations.Translation:
    """Return the call in litellm's form.

    Raises:
        InvalidRequest: it cannot be translated.
    """
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    target = arguments.target_of(settings.provider, body.get("model"), settings.base_url, settings.families)
    try:
        call = form(loaded, body, target)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if hasattr(error, "status_code"):
            raise
        raise InvalidRequest(f"The request cannot be translated ({type(error).__name__}).") from error
    if call.left_out:
        # The note is not named `left_out`: that note names models without a budget reservation.
        request.note("untranslated", ", ".join(sorted(call.left_out)))
    return call


class _Streamed:
    """A streamed response."""

    status = 200
    headers: Sequence[tuple[bytes, bytes]] = _EVENTS

    def __init__(self, sending: _SendContext, events: AsyncIterator[bytes]) -> None:
        self._sending = sending
        self._events = events

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the events as an iterator."""
        return self._sending.pieces(self._events)


if TYPE_CHECKING:
    _: type[Upstream] = LitellmUpstream
