"""/ui over HTTP: the served files, their security policy, their caching and their sources."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import pytest

from gateway.mock import MockServer
from gateway.server.dashboard import FOLDER, POLICY, Dashboard
from tests.conftest import StartGateway
from tests.support.web import Web

#: most bytes of all files together, as sent
_MOST_BYTES = 300 * 1024
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())


def assets(web: Web) -> list[str]:
    """Return the files that the page names."""
    return re.findall(r'(?:src|href)="(ui/[^"]+)"', web.get("/ui").body.decode())


def test_page_and_its_files_are_served_with_a_strict_policy(web: Web) -> None:
    found = assets(web)
    assert len(found) >= 5
    for path in ["/ui", *(f"/{name}" for name in found)]:
        answer = web.get(path)
        assert answer.status == 200, path
        assert answer.header("content-security-policy") == POLICY
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("referrer-policy") == "no-referrer"
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_has_its_media_type(path: Path, web: Web) -> None:
    version = assets(web)[0].split("/")[1]
    if path.name == "index.html":
        return
    answer = web.get(f"/ui/{version}/{path.relative_to(FOLDER).as_posix()}")
    assert answer.body == path.read_bytes()
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
    assert (answer.header("content-type") or "").split(";")[0] == kinds[path.suffix]


BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def test_browser_at_the_root_is_redirected_to_the_dashboard(web: Web) -> None:
    answer = web.get("/", BROWSER)
    assert (answer.status, answer.header("location"), answer.header("vary")) == (307, "ui", "accept")
    assert urljoin(f"{web.url}/", answer.header("location")) == f"{web.url}/ui"
    assert web.get("/?a=b", BROWSER).status == 307


@pytest.mark.parametrize("headers", [{}, {"accept": "*/*"}, {"accept": "application/json"}])
def test_api_clients_at_the_root_get_an_error(headers: dict[str, str], web: Web) -> None:
    answer = web.get("/", headers)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert web.post("/", {}, {**headers, **BROWSER}).status == 404


def test_without_a_dashboard_a_browser_is_not_redirected(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"server.dashboard": False})
    assert gateway.web.get("/", BROWSER).body.replace(b" ", b"") == gateway.web.get("/").body.replace(b" ", b"")
    assert gateway.web.get("/", BROWSER).status == 404


def test_page_is_revalidated_and_its_files_are_cached(web: Web) -> None:
    page, script = web.get("/ui"), web.get(f"/{assets(web)[0]}")
    assert page.header("cache-control") == "no-cache"
    assert "immutable" in (script.header("cache-control") or "")
    again = web.get("/ui", {"if-none-match": f'"other", W/{page.header("etag")}'})
    assert (again.status, again.body, again.header("etag")) == (304, b"", page.header("etag"))
    assert web.get("/ui", {"if-none-match": '"other"'}).status == 200


def test_file_of_another_version_is_served_but_not_cached(web: Web) -> None:
    answer = web.get("/ui/0123456789abcdef/app.js")
    assert (answer.status, answer.header("cache-control")) == (200, "no-cache")


def test_another_file_makes_another_version(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("{version}")
    (tmp_path / "app.js").write_text("1")
    first = Dashboard(is_on=True, folder=tmp_path).version
    (tmp_path / "app.js").write_text("2")
    assert Dashboard(is_on=True, folder=tmp_path).version != first


@pytest.mark.parametrize(
    "path",
    ["/ui/v/none.js", "/ui/v/../app.py", "/ui/v/%2e%2e/dashboard.py", "/ui/v/index.html", "/ui/v/", "/uix"],
)
def test_other_paths_are_not_found(path: str, web: Web) -> None:
    answer = web.get(path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_trailing_slash_redirects_to_the_page(web: Web) -> None:
    answer = web.get("/ui/")
    assert (answer.status, answer.header("location")) == (308, "../ui")


def test_dashboard_paths_accept_only_get(web: Web) -> None:
    assert web.post("/ui").status == 405


def test_it_can_be_switched_off(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"server.dashboard": False})
    for path in ("/ui", "/ui/v/app.js"):
        assert gateway.web.get(path).status == 404
    assert gateway.web.get("/api/sessions").status == 200


def test_page_without_data_needs_no_key(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, **{"auth.admin_key": "admin-key-0123456789", "auth.required": True})
    assert gateway.web.get("/ui").status == 200
    assert gateway.web.get("/api/sessions").status == 401


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < _MOST_BYTES


@pytest.mark.parametrize("path", [path for path in FILES if "vendor" not in path.parts], ids=lambda path: path.name)
def test_files_load_no_other_host_and_create_no_markup(path: Path) -> None:
    text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", 'style="', "onclick="):
        assert word not in text.replace("onclick: ", ""), word


def test_third_party_files_include_their_licence() -> None:
    assert "MIT" in (FOLDER / "vendor" / "uPlot.LICENSE.txt").read_text("utf-8")
    assert "v1.6.32" in (FOLDER / "vendor" / "uPlot.min.js").read_text("utf-8")[:100]
