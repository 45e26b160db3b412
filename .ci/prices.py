"""Write the tables of the package from the installed litellm: prices, limits, token ranks. `make prices` runs it.

config/prices.json.gz holds what the gateway reads of litellm's price file, with today's date. config/ranks/ holds the
rank files of tiktoken's encodings, which change only with a new encoding.
"""

# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import sys
from datetime import UTC, datetime
from pathlib import Path

from gateway.config.price_table import TABLE_FILE, PriceTable, compressed_table
from gateway.counters.tiktoken import TABLES

_CONFIG = Path(__file__).resolve().parent.parent / "config"
_PRICES = "model_prices_and_context_window_backup.json"


def main() -> int:
    """Write the files; the exit code."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        print("litellm is not installed: pip install -e '.[dev]'", file=sys.stderr)
        return 1
    package = Path(spec.origin).parent
    source, today = f"litellm {importlib.metadata.version('litellm')}", datetime.now(UTC).date().isoformat()
    prices = compressed_table((package / _PRICES).read_bytes(), source, today)
    (_CONFIG / TABLE_FILE).write_bytes(prices)
    print(f"{TABLE_FILE}: {len(PriceTable(prices)):,} entries of {source}, {len(prices) / 1e3:.0f} kB")
    folder = _CONFIG / "ranks"
    folder.mkdir(exist_ok=True)
    for table in TABLES.values():
        ranks = (package / "litellm_core_utils" / "tokenizers" / table.file).read_bytes()
        (folder / f"{table.file}.gz").write_bytes(gzip.compress(ranks, mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
