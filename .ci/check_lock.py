"""Check that the lock files match pyproject.toml, offline; `make lock` renews them.

A lock file matches if every direct dependency is pinned to a version that pyproject.toml allows, every pin has a hash,
and the file has no address. requirements-small.lock lacks the packages that a plain gateway does not need, and all that
only they need. `--small` prints the direct dependencies that it has.
"""

# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

#: Packages that the small install lacks: for `adapter: litellm`, a Redis, request bodies in zstd, and a faster event
#: loop of 14 MB. docs/guides/deploy.md lists them.
_NOT_SMALL = frozenset({"litellm", "redis", "uvloop", "zstandard"})
_ROOT = Path(__file__).resolve().parent.parent
_PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


def problems(name: str, wanted: Sequence[str], unwanted: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the problems of one lock file. `wanted`: the requirements in pyproject.toml; `unwanted`: never pinned."""
    text = (_ROOT / name).read_text("utf-8")
    pins: dict[str, Version] = {}
    for block in re.split(r"\n(?=\S)", text):
        match = _PIN.match(block)
        if match is None:
            continue
        pins[canonicalize_name(match[1])] = Version(match[2])
        if "--hash=sha256:" not in block:
            yield f"{name}: {match[1]} has no hash"
    if not pins:
        yield f"{name}: pins nothing"
    yield from (f"{name}: {package} is pinned, but does not belong there" for package in sorted(unwanted & {*pins}))
    if re.search(r"://|--(?:extra-)?index-url|--find-links", text):
        yield f"{name}: names an address; pip's own configuration says where packages come from"
    for line in wanted:
        requirement = Requirement(line)
        pinned = pins.get(canonicalize_name(requirement.name))
        if pinned is None:
            yield f"{name}: {requirement.name} is not pinned"
        elif not requirement.specifier.contains(pinned, prereleases=True):
            yield f"{name}: {requirement.name} is pinned to {pinned}, pyproject.toml wants {requirement.specifier}"


def main() -> int:
    """Print the problems, or the dependencies of the small install; the exit code."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    runtime: list[str] = project["dependencies"]
    dev: list[str] = project["optional-dependencies"]["dev"]
    small = [line for line in runtime if canonicalize_name(Requirement(line).name) not in _NOT_SMALL]
    if "--small" in sys.argv[1:]:
        print("\n".join(small))
        return 0
    found = [
        *problems("requirements.lock", runtime),
        *problems("requirements-dev.lock", [*runtime, *dev]),
        *problems("requirements-small.lock", small, _NOT_SMALL),
    ]
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("Renew them with: make lock", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
