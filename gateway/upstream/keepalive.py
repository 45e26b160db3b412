"""Detect that the other side of a connection is gone.

Two things tell. Where all is quiet, the system asks now and again; that also keeps a connection known to what lies
between, however long a model thinks. Where something was sent, the system sends it again until it is acknowledged. It
goes on with that for a quarter of an hour, which is too long for a call.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from dataclasses import dataclass
from typing import Any, Final

#: how often something is sent again before its connection is given up: some 13 s for a host nearby, else more
_SENT_AGAIN: Final = 6
#: Where the system counts that, since the last word from there: `tcpi_retransmits` and `tcpi_probes` of `tcp_info`.
#: The second is of what there was no room for over there, or what did not even leave this machine.
_COUNTS: Final = slice(2, 4)


@dataclass(frozen=True, slots=True)
class KeepaliveSettings:
    """Seconds of quiet until the other side is asked, seconds between two asks, and asks in vain until the end."""

    after_s: int
    every_s: int
    times: int

    def begin(self, sock: socket.socket) -> None:
        """Have the system ask on this connection, or on those that this listener accepts."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
        for name, value in ((idle, self.after_s), ("TCP_KEEPINTVL", self.every_s), ("TCP_KEEPCNT", self.times)):
            with contextlib.suppress(AttributeError, OSError):  # where there is none, the system's own value holds
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bound_unacknowledged(sock: socket.socket, seconds: float) -> None:
    """Have the system end this connection, or those that this listener accepts, after so long without a sign of life.

    So is one whose other side has had no room for so long. Only Linux can.
    """
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))


def is_unheard(sock: Any) -> bool:
    """Whether what was sent was sent again and again, and never acknowledged. Only Linux tells.

    A host that takes nothing because it is busy acknowledges all the same.
    """
    if sys.platform != "linux":
        return False
    counts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.stop)[_COUNTS]
    return bool(max(counts) >= _SENT_AGAIN)
