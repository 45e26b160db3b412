"""Compile the test files once, before the processes of pytest-xdist start, instead of once in each of them.

pytest rewrites the `assert` statements of a file when it compiles it, which takes two thirds of the time to collect the
tests, and keeps the result beside the file. Processes that start together all find nothing and do the same work.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: Fewer files are compiled faster than a process starts.
_WORTH_IT: Final = 40


def compile_tests(arguments: Iterable[str], root: Path) -> None:
    """Compile the test files that pytest's arguments name and that have changed, on all cores.

    Errors are ignored: the processes that run the tests find and report them.
    """
    if sys.dont_write_bytecode:
        return
    paths = [root / argument.partition("::")[0] for argument in arguments]
    files = {file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])}
    changed = [str(file) for file in sorted(files) if file.is_file() and not _is_compiled(file)]
    if len(changed) < _WORTH_IT:
        return
    cores = os.cpu_count() or 1
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    parts = [changed[core::cores] for core in range(cores)]
    running = [
        subprocess.Popen([*command, *part], cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in parts
        if part
    ]
    for process in running:
        process.wait()


def _is_compiled(file: Path) -> bool:
    folder = Path(importlib.util.cache_from_source(str(file))).parent
    modified = file.stat().st_mtime
    pattern = f"{file.stem}.{sys.implementation.cache_tag}-pytest-*.pyc"
    return any(compiled.stat().st_mtime >= modified for compiled in folder.glob(pattern))
