"""Test the processes of the bench: how they end, and the message if they do not start."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.bench import servers
from tests.support.commands import environment
from tests.support.gateways import until

PROVIDES = "from gateway.bench import servers\nwith servers.provider() as url:\n    print(url, flush=True)\n    input()"


def answers(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    return False


def test_provider_runs_inside_its_context() -> None:
    with servers.provider() as url:
        assert answers(url)
    assert not answers(url)


def test_a_provider_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", PROVIDES],
        env=environment(tmp_path, None),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        try:
            assert answers(url)
        finally:
            owner.kill()
    until(lambda: not answers(url), what="the provider ends too")


def test_a_gateway_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(servers.NotStarted, match=r"providers\.bench\.base_url"):
        with servers.gateway(tmp_path, "nonsense"):
            raise AssertionError("it started")
