"""Run openai-python's own API tests with and without the gateway, and compare the results.

    python bench/clients/sdk_suite.py OPENAPI.json [--environments FOLDER] [--tests tests/api_resources/chat]

OPENAPI.json is OpenAI's document, openapi.json of github.com/openai/openai-openapi. The SDK's source package is
downloaded from PyPI, and steady (@stdy/cli), which responds as the document says, from the npm registry. The tests run
against steady, then against `gateway serve --upstream` in front of it. Many fail without the gateway, too, because the
document is older than the SDK. The exit code is 1 if a test fails only through the gateway.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from run import ROOT, STARTS_S, await_address, clean, npm_install, use_recent_node

STEADY_PORT = 4010
STEADY = f"http://127.0.0.1:{STEADY_PORT}"
#: how the SDK writes arrays and objects in queries and forms, as in its own scripts/mock
BRACKETS = [
    f"--validator-{place}-{kind}-format=brackets" for place in ("query", "form") for kind in ("array", "object")
]
TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-xdist", "inline-snapshot", "rich", "trio", "respx", "httpx2")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_PASSED = re.compile(r"(\d+) passed")


def bring(folder: Path) -> Path:
    """Install the SDK's source with its tests, with a `venv` and a `steady` for them; return its folder."""
    if not (folder / "steady/.installed").exists():
        venv.create(folder / "venv", with_pip=True, clear=True)
        pip = [str(folder / "venv/bin/python"), "-m", "pip"]
        download = [*pip, "download", "--quiet", "--no-deps", "--no-binary=openai", f"--dest={folder}", "openai"]
        subprocess.run(download, env=clean(), check=True)
        (archive,) = folder.glob("openai-*.tar.gz")
        subprocess.run(["tar", "-xzf", str(archive), "-C", str(folder)], check=True)
        source = str(folder / archive.name.removesuffix(".tar.gz"))
        subprocess.run([*pip, "install", "--quiet", f"{source}[aiohttp]", *TEST_PACKAGES], env=clean(), check=True)
        npm_install(folder / "steady", ["@stdy/cli"])
    (source_folder,) = (path.parent for path in folder.glob("openai-*/pyproject.toml"))
    return source_folder


@contextlib.contextmanager
def steady(folder: Path, document: Path) -> Iterator[None]:
    """Run the mock. The gateway calls its provider below /v1, so the paths are moved there."""
    content = json.loads(document.read_text())
    content["paths"] = {f"/v1{path}": item for path, item in content["paths"].items()}
    moved = folder / "openapi-v1.json"
    moved.write_text(json.dumps(content))
    command = [str(folder / "steady/node_modules/.bin/steady"), "--quiet", "--host=127.0.0.1", f"--port={STEADY_PORT}"]
    with (folder / "steady.log").open("wb") as log:
        process = subprocess.Popen([*command, *BRACKETS, str(moved)], env=clean(), stdout=log, stderr=log)
    try:
        _await_steady(process)
        yield
    finally:
        process.terminate()
        process.wait(STARTS_S)


def _await_steady(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_S
    while True:
        assert process.poll() is None, f"steady did not start; is port {STEADY_PORT} free?"
        assert time.monotonic() < deadline, "steady did not start in time"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{STEADY}/_x-steady/health"):
            return
        time.sleep(0.2)


@contextlib.contextmanager
def gateway(work: Path) -> Iterator[str]:
    """Run `gateway serve --upstream` in front of steady."""
    log = work / "gateway.log"
    store = f"--store=sqlite://{work / 'gateway.db'}"
    command = [sys.executable, "-m", "gateway", "serve", f"--upstream={STEADY}/v1", "--port=0", store]
    environment = {**clean(), "PYTHONPATH": str(ROOT), "HOME": str(work)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=work, env=environment, stderr=output)
    try:
        yield await_address(process, log)
    finally:
        process.terminate()
        process.wait(STARTS_S)


def play(folder: Path, source: Path, base_url: str, tests: Sequence[str]) -> tuple[int, set[str]]:
    """Return the number of tests that pass against an address, and the names of failing tests."""
    quiet = ["-q", "-n", "2", "--durations=0", "--durations-min=60", "-p", "no:cacheprovider", "--tb=no"]
    command = [str(folder / "venv/bin/python"), "-m", "pytest", *quiet, *tests]
    environment = {**clean(), "TEST_API_BASE_URL": base_url}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    passed = _PASSED.search(done.stdout)
    assert passed is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return int(passed[1]), set(_FAILED.findall(done.stdout))


def main() -> None:
    """Read the command line, run the tests twice and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--environments", type=Path, help="folder to install into and to use again")
    parser.add_argument("--tests", nargs="+", default=["tests/api_resources"], metavar="PATH")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        environments = (asked.environments or work).resolve()
        use_recent_node(environments)
        folder = environments / "openai-python-suite"
        folder.mkdir(parents=True, exist_ok=True)
        source = bring(folder)
        with steady(folder, asked.document):
            passed, failed = play(folder, source, f"{STEADY}/v1", asked.tests)
            with gateway(work) as url:
                passed_through, failed_through = play(folder, source, f"{url}/v1", asked.tests)
    print(f"{source.name}: {passed:,} passed without the gateway, {passed_through:,} through it")
    worse = sorted(failed_through - failed)
    print("\n".join(f"only through the gateway fails {name}" for name in worse))
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
