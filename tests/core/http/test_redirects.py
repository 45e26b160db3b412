"""Test that redirects of a provider are refused with their target."""

from __future__ import annotations

import pytest

from gateway.core.errors import UpstreamRedirect
from gateway.core.http.redirects import check_redirect

URL = "https://provider.example/v1/chat/completions"


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (b"https://other.example/x", "other.example"),
        (b"//other.example:81/x", "other.example:81"),
        (b"/v1/other", "provider.example"),
        (b"https://name:secret@other.example/", "other.example"),
        (b"http://[::1]:8000/", "[::1]:8000"),
        (b"http://[broken/", "an address that cannot be read"),
        (b"http://\xe9\x00<b>/", "an address that cannot be read"),
        (b"", "no address"),
    ],
)
def test_message_names_the_status_and_the_target_host(location: bytes, shown: str) -> None:
    with pytest.raises(UpstreamRedirect) as raised:
        check_redirect("mine", URL, 307, [(b"location", location)])
    assert f"answered 307, a redirect to {shown}. " in raised.value.message
    assert "providers.mine.base_url" in raised.value.message


@pytest.mark.parametrize("status", [200, 204, 400, 429, 500])
def test_other_statuses_are_no_redirects(status: int) -> None:
    check_redirect("mine", URL, status, [(b"location", b"/elsewhere")])
