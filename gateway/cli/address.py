"""Where a user opens what listens on a host and a port."""

from __future__ import annotations

from ipaddress import ip_address


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
