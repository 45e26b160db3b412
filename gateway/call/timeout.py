"""Bound the time for calls that the gateway makes itself, such as summaries and model lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from gateway.core.errors import UpstreamTimeout
from gateway.core.record import TOO_SLOW


@asynccontextmanager
async def max_wait(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after this many seconds.

    The cancel carries a message for two reasons:
    - It becomes the outcome in the record of the call that is cancelled.
    - It distinguishes this cancel from one by another task, which is raised unchanged.

    Raises:
        UpstreamTimeout: the block took longer.
    """
    task = cast("asyncio.Task[object]", asyncio.current_task())
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel, TOO_SLOW)
    try:
        yield
    except asyncio.CancelledError as error:
        if error.args != (TOO_SLOW,) or task.uncancel() > 0:
            raise
        raise UpstreamTimeout(f"it took longer than {seconds:g} s") from None
    finally:
        timer.cancel()
