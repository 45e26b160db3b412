"""Read the public keys of the identity provider (JWKS), and read them again in the background.

Calls wait for a read only if their token names an unknown key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from gateway.core.errors import GatewayError
from gateway.core.http.headers import is_success
from gateway.core.http.request import Outgoing
from gateway.core.ports import Upstream
from gateway.core.values import dataclass
from gateway.server.token_verifier import NO_KEYS, PublicKeys

logger = logging.getLogger("gateway")

#: seconds between two reads in the background
_READ_EVERY_S: Final = 300.0
#: seconds between two reads that calls cause, however many tokens name unknown keys
_PAUSE_S: Final = 10.0
#: Seconds that keys are used after their last read, if the identity provider is unavailable.
MOST_AGE_S: Final = 24 * 3600.0
#: seconds for one read, with connection and body
TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 256 * 1024
_HEADERS: Final = [
    (b"accept", b"application/json"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"llm-session-gateway"),
]


class KeySource(Protocol):
    """Where the public keys come from."""

    @property
    def failure(self) -> str | None:
        """Return why the keys could not be read the last time, or None."""
        ...

    def find(self, key_id: str | None, algorithm: str) -> Any:
        """Return the key for a token, or None."""
        ...

    async def read_again(self) -> None:
        """Read the keys again, unless that was done just now."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class FixedKeys:
    """Keys of a file, which a reload reads again."""

    failure: str | None = None

    def __init__(self, keys: PublicKeys) -> None:
        self._keys = keys

    def find(self, key_id: str | None, algorithm: str) -> Any:
        """Return the key for a token, or None."""
        return self._keys.find(key_id, algorithm)

    async def read_again(self) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys of the last successful read. `document`: as received; `read_at`: monotonic seconds."""

    keys: PublicKeys = NO_KEYS
    document: bytes = b""
    read_at: float = -math.inf


class KeyDocument:
    """The document with the public keys at the identity provider. `upstream`: the connection to it."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self.url = url
        self._upstream = upstream

    async def fetch(self) -> bytes:
        """Return the document.

        Raises:
            ValueError: the response has an error status, or is too large. The message is the end of a sentence.
            GatewayError: there is no response.
        """
        request = Outgoing("GET", self.url, _HEADERS, b"")
        body = bytearray()
        async with self._upstream.send(request) as reply:
            if not is_success(reply.status):
                raise ValueError(f"has status {reply.status}")
            async for chunk in reply.chunks():
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise ValueError(f"has more than {_MOST_BYTES:,} bytes")
        return bytes(body)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._upstream.aclose()


class FetchedKeys:
    """Keys that are fetched from the identity provider. Create it in a running event loop.

    Args:
        document: the document with the keys.
        read: returns its keys; raises `ValueError` if there are none.
        known: keys that were read before a reload.
    """

    def __init__(
        self,
        document: KeyDocument,
        read: Callable[[bytes], PublicKeys],
        known: KnownKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        every_s: float = _READ_EVERY_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self.known = known or KnownKeys()
        self.failure: str | None = None
        self.document = document
        self._read_keys = read
        self._clock = clock
        self._every_s = every_s
        self._pause_s = pause_s
        self._tried_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._chore = asyncio.create_task(self._keep_fresh())

    def find(self, key_id: str | None, algorithm: str) -> Any:
        """Return the key for a token, or None if it is unknown or was read too long ago."""
        is_usable = self._clock() - self.known.read_at < MOST_AGE_S
        return self.known.keys.find(key_id, algorithm) if is_usable else None

    async def read_again(self) -> None:
        """Read the keys again, unless that was done just now. A failure is noted in `failure`."""
        if self._reading is None:
            if self._clock() - self._tried_at < self._pause_s:
                return
            self._tried_at = self._clock()
            self._reading = asyncio.create_task(self._read())
        # All callers wait for the same read, which goes on if one of them leaves.
        await asyncio.shield(self._reading)

    async def _keep_fresh(self) -> None:
        while True:
            await self.read_again()
            # If the provider is unavailable, its next keys are needed as soon as it is back.
            await asyncio.sleep(self._every_s if self.failure is None else self._pause_s)

    async def _read(self) -> None:
        failure = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                document = await self.document.fetch()
            keys = self.known.keys
            # The same keys stay the same objects, so that verified tokens stay verified.
            if document != self.known.document:
                keys = await asyncio.to_thread(self._read_keys, document)
            self.known = KnownKeys(keys, document, self._clock())
        except TimeoutError:
            failure = f"no response within {TIMEOUT_S:g} s"
        except GatewayError as error:
            failure = error.message.rstrip(".")
        except ValueError as error:
            failure = f"the response {error}"
        except Exception:
            logger.exception("reading the keys of the identity provider failed; it will be tried again")
            failure = "an error of the gateway, see its log"
        self._note(failure)
        self._reading = None

    def _note(self, failure: str | None) -> None:
        if failure is not None and self.failure is None:
            logger.warning(
                "auth.jwt.jwks_url: the keys of the identity provider cannot be read: %s. Keys that are known are used "
                "for %d hours after they were read.",
                failure,
                MOST_AGE_S // 3600,
            )
        if failure is None and self.failure is not None:
            logger.warning("auth.jwt.jwks_url: the keys of the identity provider can be read again")
        self.failure = failure

    async def aclose(self) -> None:
        """Stop reading."""
        tasks = [task for task in (self._chore, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.document.aclose()
