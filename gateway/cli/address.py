"""Format the URL at which a user reaches a host and port."""

from __future__ import annotations

import contextlib
import socket
from ipaddress import ip_address
from typing import Final

#: Addresses for documentation (RFC 5737, RFC 3849). What the system would use to reach them is its address in the
#: network; nothing is sent there.
_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def url_of(host: str, port: int) -> str:
    """The URL to open. Nobody can call `0.0.0.0` or `::`, which stand for every address; loopback is one of them."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        address = ip_address(bare or "0.0.0.0")  # an empty host is every address too
    except ValueError:
        return f"http://{bare}:{port}"  # a name
    if address.version == 4:  # noqa: PLR2004
        return f"http://{'127.0.0.1' if address.is_unspecified else address}:{port}"
    # `::` takes no IPv4 calls. The % of a zone (fe80::1%eth0) is written as in any URL.
    zoned = "::1" if address.is_unspecified else str(address).replace("%", "%25")
    return f"http://[{zoned}]:{port}"


def network_url_of(host: str, port: int) -> str | None:
    """Return the URL for other machines if `host` means every address, or None if it is unknown."""
    bare = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError, OSError):  # a name; a machine without a network
        if ip_address(bare or "0.0.0.0").is_unspecified:
            family = socket.AF_INET6 if ":" in bare else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((_ELSEWHERE[family], port))
                own = probe.getsockname()[0]
            return None if ip_address(own).is_loopback else url_of(own, port)
    return None
