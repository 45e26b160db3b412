"""Public keys are read in the background, seldom, and stay known for a day without the identity provider."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler

import pytest

from gateway.server.signing_keys import MOST_AGE_S, FetchedKeys, KeyDocument, KnownKeys
from gateway.server.token_verifier import read_keys
from gateway.upstream.http import HttpUpstream, UpstreamTimeouts
from tests.support import identity_provider as idp
from tests.support.identity_provider import IdentityProvider, rsa_key, serving_keys
from tests.support.timing import LIMIT_S, eventually

READ = partial(read_keys, algorithms=("RS256",))


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Source(KeyDocument):
    """A document that the test sets. `asked`: number of reads. `gate` is cleared to hold them."""

    def __init__(self, body: bytes) -> None:
        self.url = "https://login.example/keys"
        self.body: bytes | Exception = body
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_closed = False

    async def fetch(self) -> bytes:
        self.asked += 1
        await self.gate.wait()
        if isinstance(self.body, Exception):
            raise self.body
        return self.body

    async def aclose(self) -> None:
        self.is_closed = True


def document(*names: str) -> bytes:
    return json.dumps({"keys": [idp.jwk(rsa_key(name), kid=name) for name in names]}).encode()


@asynccontextmanager
async def opened(source: Source, known: KnownKeys | None = None) -> AsyncIterator[tuple[FetchedKeys, Clock]]:
    clock = Clock()
    # Only calls cause reads in these tests, besides the first one.
    keys = FetchedKeys(source, READ, known, clock, every_s=1e6)
    yield keys, clock
    await keys.aclose()
    assert source.is_closed


async def test_keys_are_read_at_the_start_and_not_again_within_the_pause() -> None:
    source = Source(document("one"))
    async with opened(source) as (keys, clock):
        await keys.read_again()
        found = keys.find("one", "RS256")
        assert found is not None
        source.body = document("one", "two")
        for _ in range(100):
            await keys.read_again()
        assert (source.asked, keys.find("two", "RS256")) == (1, None)
        clock.seconds += 10
        await asyncio.gather(*[keys.read_again() for _ in range(100)])
        assert source.asked == 2
        assert keys.find("two", "RS256") is not None


async def test_the_same_document_leaves_the_same_keys_and_another_one_removes_withdrawn_keys() -> None:
    source = Source(document("one"))
    async with opened(source) as (keys, clock):
        await keys.read_again()
        found = keys.find("one", "RS256")
        clock.seconds += 10
        await keys.read_again()
        assert keys.find("one", "RS256") is found
        source.body = document("two")
        clock.seconds += 10
        await keys.read_again()
        assert keys.find("one", "RS256") is None


async def test_known_keys_work_for_a_day_without_the_identity_provider() -> None:
    source = Source(document("one"))
    async with opened(source) as (keys, clock):
        await keys.read_again()
        source.body = ValueError("has status 500")
        clock.seconds += MOST_AGE_S - 1
        await keys.read_again()
        assert keys.failure == "the response has status 500"
        assert keys.find("one", "RS256") is not None
        clock.seconds += 1
        assert keys.find("one", "RS256") is None


async def test_a_caller_that_leaves_does_not_stop_the_read_of_the_others() -> None:
    source = Source(document("one"))
    source.gate.clear()
    async with opened(source) as (keys, _):
        first, second = (asyncio.create_task(keys.read_again()) for _ in range(2))
        await eventually(lambda: source.asked)
        first.cancel()
        source.gate.set()
        await second
        assert first.cancelled()
        assert keys.find("one", "RS256") is not None


async def test_an_unexpected_error_is_logged_and_the_next_read_works(heard: pytest.LogCaptureFixture) -> None:
    source = Source(document("one"))
    source.body = RuntimeError("a bug")
    async with opened(source) as (keys, clock):
        await keys.read_again()
        assert keys.failure is not None
        assert "a bug" in heard.text
        source.body = document("one")
        clock.seconds += 10
        await keys.read_again()
        assert keys.failure is None


async def test_after_a_failure_the_keys_are_read_again_soon() -> None:
    source = Source(document("one"))
    source.body = ValueError("is no JWKS")
    keys = FetchedKeys(source, READ, every_s=1e6, pause_s=0.01)
    await eventually(lambda: source.asked > 2)
    source.body = document("one")
    await eventually(lambda: keys.find("one", "RS256") is not None)
    await keys.aclose()


def send_slowly(handler: BaseHTTPRequestHandler) -> None:
    """Send one byte at a time, without end."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(int(LIMIT_S * 10)):
        handler.wfile.write(b" ")
        time.sleep(0.1)


async def test_a_response_that_never_ends_is_given_up_after_five_seconds() -> None:
    with serving_keys(IdentityProvider(respond=send_slowly)) as provider:
        timeouts = UpstreamTimeouts(5, 5, 5)
        source = KeyDocument(HttpUpstream("identity provider", provider.url, timeouts), f"{provider.url}/keys")
        keys = FetchedKeys(source, READ)
        await eventually(lambda: provider.requests)
        await keys.read_again()
        assert keys.failure is not None
        assert "5 s" in keys.failure
        await keys.aclose()
