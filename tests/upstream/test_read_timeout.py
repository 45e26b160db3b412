"""One timer per stream, which notices only a wait that lasts too long."""

from __future__ import annotations

import asyncio
import socket
import time

from gateway.upstream.read_timeout import ReadTimeout
from tests.support.timing import run_without_waiting


def test_expired_wait_is_noticed_once() -> None:
    async def wait() -> None:
        expired: list[int] = []
        silence = ReadTimeout(50, lambda: expired.append(1))
        silence.begin()
        await asyncio.sleep(49)
        assert expired == []
        await asyncio.sleep(2)
        assert expired == [1]
        await asyncio.sleep(1_000)
        silence.stop()
        assert expired == [1]

    run_without_waiting(wait())


def test_short_waits_and_the_time_between_them_do_not_count() -> None:
    async def wait() -> None:
        expired: list[int] = []
        silence = ReadTimeout(50, lambda: expired.append(1))
        for _ in range(6):
            silence.begin()
            await asyncio.sleep(40)
            silence.end()
            await asyncio.sleep(70)
        silence.stop()
        assert expired == []

    run_without_waiting(wait())


def test_data_received_while_suspended_ends_the_wait() -> None:
    async def wait() -> None:
        expired: list[int] = []
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        client_socket, server_socket = socket.socketpair()
        with client_socket, server_socket:
            loop.add_reader(client_socket, heard.set)
            silence = ReadTimeout(0.01, lambda: expired.append(1))
            silence.begin()
            server_socket.send(b"an answer")
            time.sleep(0.3)  # blocks the event loop
            await heard.wait()
            silence.end()
            loop.remove_reader(client_socket)
            await asyncio.sleep(0.3)
            silence.stop()
        assert expired == []

    asyncio.run(wait())


def test_nothing_expires_after_stop() -> None:
    async def wait() -> None:
        expired: list[int] = []
        silence = ReadTimeout(50, lambda: expired.append(1))
        silence.begin()
        silence.stop()
        await asyncio.sleep(1_000)
        assert expired == []

    run_without_waiting(wait())
