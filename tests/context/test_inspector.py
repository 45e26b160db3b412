"""Inspecting a large request does not block other calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import config
from gateway.app.resources import inspector_of
from gateway.context.inspector import Inspector
from gateway.core.errors import InvalidRequest
from gateway.core.session import Remembered
from tests.support.threads import CountedThreads

SMALL = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
LARGE = {**SMALL, "messages": [{"role": role, "content": "word " * 40_000} for role in ("user", "assistant")]}


@pytest.fixture
async def inspector() -> AsyncIterator[Inspector]:
    with inspector_of(config.load(None, environment={}).settings) as made:
        yield made


@pytest.mark.parametrize(("body", "handed"), [(SMALL, 0), (LARGE, 1)], ids=["small", "large"])
async def test_a_large_body_is_read_in_a_thread(body: Any, handed: int, inspector: Inspector) -> None:
    threads = CountedThreads(1)
    asyncio.get_running_loop().set_default_executor(threads)
    await inspector.read_async(json.dumps(body).encode())
    assert threads.handed == handed


async def test_a_body_is_read_the_same_in_the_loop_and_in_a_thread(inspector: Inspector) -> None:
    for body in (SMALL, LARGE):
        raw = json.dumps(body).encode()
        assert await inspector.read_async(raw, wire="chat") == inspector.read(raw, wire="chat")
        with pytest.raises(InvalidRequest):
            await inspector.read_async(raw[:-1])


async def test_large_messages_show_the_same_roles_as_small_ones(inspector: Inspector) -> None:
    for body in (SMALL, LARGE):
        _, asked = inspector.read(json.dumps(body).encode())
        found = await inspector.count(asked, Remembered(), ["items"])
        assert [item["role"] for item in found["items"]] == [one["role"] for one in body["messages"]]  # type: ignore[index]
