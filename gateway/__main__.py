"""Run the command `gateway`, also as `python -m gateway`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; Ctrl-C while it is still being imported ends it as quietly as later."""
    try:
        from gateway.cli import main as command  # noqa: PLC0415  # Ctrl-C may come meanwhile
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
