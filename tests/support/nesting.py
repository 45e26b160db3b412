"""Define a JSON nesting depth that no Python version can parse."""

from __future__ import annotations

from typing import Final

#: Levels. Python 3.14 parses as many as a thread's stack holds: some hundred thousand.
DEEP: Final = 1_000_000
