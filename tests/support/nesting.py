"""How deep JSON must be nested that no Python reads it."""

from __future__ import annotations

from typing import Final

#: levels; Python 3.14 reads as many as the stack of a thread has room for, which are some hundred thousand
DEEP: Final = 1_000_000
