"""Silence a connection without closing it, as when a host vanishes or a firewall drops its state."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from typing import Any

import pytest

#: only Linux lets a program drop its own packets
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="packets are dropped by a filter of Linux")

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
#: a filter of one instruction: keep 0 bytes of each packet
_NOTHING_PASSES = struct.pack("HBBI", 0x06, 0, 0, 0)


def mute(sock: Any) -> None:
    """Drop all packets that arrive for this socket, or for those that this listener would accept.

    The other side gets no acknowledgement and no error.
    """
    program = ctypes.create_string_buffer(_NOTHING_PASSES)
    filters = struct.pack("HL", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


def unmute(sock: Any) -> None:
    """Accept packets again."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
