"""Check that a release has one version: `versions.py v1.2.3` compares it with package, chart and changelog."""

# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
#: file -> pattern of the version in it
PLACES: Final = {
    "gateway/__init__.py": r'^__version__ = "(.+)"$',
    "config/deploy/helm/Chart.yaml": r"^appVersion: (.+)$",
    "CHANGELOG.md": r"^## \[(\d.+?)\]",
}


def versions() -> dict[str, str]:
    """Return the version that each file names; empty if it names none."""
    found = {}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else ""
    return found


def main() -> int:
    """Print the files that name another version than the tag."""
    (tag,) = sys.argv[1:]
    wrong = {name: version for name, version in versions().items() if f"v{version}" != tag}
    for name, version in wrong.items():
        print(f"{name} has the version {version or 'none'}, and the tag is {tag}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
