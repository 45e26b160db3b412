"""Run the command `gateway`, also as `python -m gateway`."""

from __future__ import annotations

import gc
import sys

#: Allocations between two runs of the garbage collector. With Python's 700, a tenth of the start is spent in it, and it
#: finds nothing, because imported objects stay.
_GC_THRESHOLD = 50_000


def main() -> None:
    """Run the command; Ctrl-C while it is still being imported ends it as quietly as later."""
    gc.set_threshold(_GC_THRESHOLD)
    try:
        from gateway.cli import main as command  # noqa: PLC0415  # Ctrl-C may come meanwhile
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
