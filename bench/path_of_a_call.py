"""Count the code that one call runs: files, changes of file, functions, new dataclass instances, and bytecodes.

    python bench/path_of_a_call.py [--json] [--files]

A gateway with SQLite runs in a thread of this process, and the built-in provider in its own process. After some calls
of the same session, one small chat call is counted until it is settled. `sys.setprofile` reports the functions, and
`sys.settrace` the bytecodes. A chunk of a paced stream is the difference between a long and a short stream, divided by
the number of chunks between them. Counts do not depend on the load of the machine. Code in C is not counted.

Each count is the lowest of some calls, because timers of the gateway can run during a call. "In gateway" are files of
the package `gateway/`. "All" includes uvicorn, asyncio and other packages. Threads other than that of the event loop,
such as the writer of SQLite, are counted apart. The exit code is 1 if a target is missed. `--files` prints the number
of calls into each file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gateway import config
from gateway.app import worker
from gateway.bench import servers
from gateway.bench.load import LoadClient, Workload
from gateway.server import serving

PACKAGE = str(Path(serving.__file__).resolve().parent.parent)
#: name of the thread of the event loop (`ServerThread`)
LOOP = "gateway"
#: seconds after a response until its record is written
SETTLES_S = 0.25
CALLS, WARM_UP = 5, 20
SHORT, LONG = 20, 120
MOST_FILES, MOST_CHANGES, MOST_BYTECODES = 60, 200, 9_000

SMALL = Workload("small chat call", 1, CALLS, warm_up=WARM_UP)
STREAM = Workload("paced stream", 1, CALLS, warm_up=2, interval_s=0.01)


@dataclass
class CallPath:
    """What ran during one call. `calls`: functions in the order in which they were called, of the event loop."""

    calls: list[CodeType] = field(default_factory=list)
    bytecodes: Counter[str] = field(default_factory=Counter)
    elsewhere: int = 0


class Recorder:
    """Records what the threads of this process run while `path` is set. Threads must start after `install`."""

    def __init__(self) -> None:
        self.path: CallPath | None = None

    def install(self) -> None:
        threading.setprofile(self._profile)
        threading.settrace(self._trace)

    def remove(self) -> None:
        threading.setprofile(None)
        threading.settrace(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        path = self.path
        if path is not None and event == "call" and threading.current_thread().name == LOOP:
            path.calls.append(frame.f_code)

    def _trace(self, frame: FrameType, _: str, __: Any) -> Any:
        if self.path is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        is_loop, file = threading.current_thread().name == LOOP, frame.f_code.co_filename

        def count(_: FrameType, event: str, ___: Any) -> Any:
            path = self.path
            if event == "opcode" and path is not None:
                if is_loop:
                    path.bytecodes[file] += 1
                else:
                    path.elsewhere += 1
            return count

        return count

    @contextmanager
    def recording(self) -> Iterator[CallPath]:
        """Record until the end of the block, and until what follows the call is done."""
        self.path = path = CallPath()
        yield path
        time.sleep(SETTLES_S)
        self.path = None


def is_ours(file: str) -> bool:
    return file.startswith(PACKAGE)


def is_dataclass_init(code: CodeType) -> bool:
    # `dataclasses` compiles the constructors from text, without a file.
    return code.co_filename == "<string>" and code.co_name == "__init__"


@dataclass(frozen=True)
class Counts:
    """The counts of one call.

    Attributes:
        files: files of the gateway that were entered.
        changes: calls of a function of the gateway in another file than the one called before.
        functions: calls of functions of the gateway, including each resumption of a coroutine.
        all_functions: the same with those of other packages.
        instances: dataclass instances that were created.
        bytecodes: bytecodes in functions of the gateway.
        all_bytecodes: the same with those of other packages.
        thread_bytecodes: bytecodes in other threads.
    """

    files: float
    changes: float
    functions: float
    all_functions: float
    instances: float
    bytecodes: float
    all_bytecodes: float
    thread_bytecodes: float

    @classmethod
    def of(cls, path: CallPath) -> Counts:
        ours = [code.co_filename for code in path.calls if is_ours(code.co_filename)]
        return cls(
            files=len(set(ours)),
            changes=sum(one != before for before, one in pairwise(ours)),
            functions=len(ours),
            all_functions=len(path.calls),
            instances=sum(map(is_dataclass_init, path.calls)),
            bytecodes=sum(number for file, number in path.bytecodes.items() if is_ours(file)),
            all_bytecodes=path.bytecodes.total(),
            thread_bytecodes=path.elsewhere,
        )

    def per_chunk(self, shorter: Counts, chunks: int) -> Counts:
        """Return the counts of one of the chunks by which this stream is longer."""
        before = asdict(shorter)
        return Counts(**{name: round((value - before[name]) / chunks, 1) for name, value in asdict(self).items()})


@contextmanager
def served(folder: Path, upstream: str) -> Iterator[str]:
    """Yield the address of a gateway in a thread of this process."""
    file = folder / "gateway.yaml"
    keys = {
        "providers": {"bench": {"base_url": upstream, "auth": "none"}},
        "default_provider": "bench",
        "built_in_providers": False,
        "models": [{"match": "*", "provider": "bench", "price": {"input": 0.15, "output": 0.60}}],
        "store": {"url": f"sqlite://{folder / 'gateway.db'}"},
        "telemetry": {"log": {"level": "error"}},
    }
    file.write_text(json.dumps(keys))

    def load() -> config.Loaded:
        return config.load(file, environment={})

    limits = load().settings.server
    options = serving.make_config(
        worker.build_app(load),
        max_head_bytes=int(limits.max_header_kb * 1024),
        max_body=int(limits.max_body_mb * 2**20),
        head_timeout_s=limits.header_timeout_s,
        grace_s=limits.shutdown_grace_s,
    )
    with serving.ServerThread(options) as server:
        yield server.url


def lowest(recorder: Recorder, url: str, workload: Workload) -> tuple[Counts, CallPath]:
    """Return the counts of the call of the workload that ran the fewest bytecodes."""
    client = LoadClient(url, f"{workload.name}-{workload.chunks}", workload, 0, threading.Event())
    paths = []
    client.make(workload.warm_up)
    time.sleep(SETTLES_S)
    for _ in range(workload.calls):
        with recorder.recording() as path:
            (response,) = client.make(1)
        assert response.status == 200, response.content
        paths.append(path)
    client.close()
    best = min(paths, key=lambda path: path.bytecodes.total())
    return Counts.of(best), best


def measured() -> tuple[Counts, Counts, CallPath]:
    """Return the counts of a small call and of a paced chunk, and what the small call ran."""
    recorder = Recorder()
    with servers.provider() as upstream, tempfile.TemporaryDirectory() as folder:
        recorder.install()
        try:
            with served(Path(folder), upstream) as url:
                small, path = lowest(recorder, url, SMALL)
                short, _ = lowest(recorder, url, replace(STREAM, chunks=SHORT))
                long, _ = lowest(recorder, url, replace(STREAM, chunks=LONG))
        finally:
            recorder.remove()
    return small, long.per_chunk(short, LONG - SHORT), path


def shown(small: Counts, chunk: Counts) -> str:
    targets = {"files": MOST_FILES, "changes": MOST_CHANGES, "all_bytecodes": MOST_BYTECODES}
    lines = [f"{'':18}{'small call':>12}{'target':>9}{'paced chunk':>13}"]
    for name, value in asdict(small).items():
        per_chunk = "" if name in ("files", "changes") else f"{asdict(chunk)[name]:,.1f}"
        target = f"{targets[name]:,}" if name in targets else ""
        lines.append(f"{name.replace('_', ' '):18}{value:>12,.0f}{target:>9}{per_chunk:>13}")
    return "\n".join(lines)


def shown_files(path: CallPath) -> str:
    """Return one line for each file of the gateway: calls of its functions, bytecodes, name."""
    calls = Counter(code.co_filename for code in path.calls if is_ours(code.co_filename))
    lines = [f"{'calls':>6}{'bytecodes':>11}  file"]
    for file, number in sorted(path.bytecodes.items(), key=lambda item: -item[1]):
        name = file.removeprefix(f"{PACKAGE}/") if is_ours(file) else "/".join(Path(file).parts[-2:])
        lines.append(f"{calls[file] or '':>6}{number:>11,}  {name}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--files", action="store_true")
    options = parser.parse_args(arguments)
    small, chunk, path = measured()
    if options.json:
        print(json.dumps({"small_call": asdict(small), "paced_chunk": asdict(chunk)}, indent=2))
    else:
        print(shown(small, chunk))
    if options.files:
        print(shown_files(path))
    is_met = small.files <= MOST_FILES and small.changes <= MOST_CHANGES and small.all_bytecodes <= MOST_BYTECODES
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
