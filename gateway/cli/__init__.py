"""Define the command `gateway` and its subcommands.

Only typer and rich are imported before the command is known; the rest waits until then.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Final, NoReturn

import typer

from gateway.cli import bench, demo, env, inspect, keys, models, replay, serve, sessions, setup, top
from gateway.cli.common import Command, Exit, Group

#: what is said where a disk, a device or a reader takes no more
_WRITING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF})
#: how a closed stream is opened again. Nothing can be written to this stdout: what should go there is missed.
_STANDARD: Final = (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))

app = typer.Typer(
    name="gateway",
    cls=Group,
    help="An OpenAI-compatible gateway that meters every session of a long-running agent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=Command)(serve.serve)
app.command("demo", cls=Command)(demo.demo)
app.command("check", cls=Command)(setup.check)
app.command("init", cls=Command)(setup.init)
app.command("schema", cls=Command)(setup.schema)
app.command("count", cls=Command)(inspect.count)
app.command("trim", cls=Command)(inspect.trim)
app.command("models", cls=Command)(models.models)
app.command("env", cls=Command)(env.env)
app.command("top", cls=Command)(top.top)
app.command("replay", cls=Command)(replay.replay)
app.command("bench", cls=Command)(bench.bench)
app.add_typer(sessions.app, name="sessions")
app.add_typer(keys.app, name="keys")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
    """Print the version, or run a command."""
    if version:
        from gateway import __version__

        typer.echo(f"gateway {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command and end the process."""
    _reopen()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that its encoding does not have
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITING:
            raise
        _cannot_write(error)


def _reopen() -> None:
    """Open again what the caller closed (`>&-`), or the next file or socket would take its number."""
    for name, mode, flag in _STANDARD:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flag)
            os.set_inheritable(number, True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # for as long as the process
            setattr(sys, name, stream)


def _cannot_write(error: OSError) -> NoReturn:
    if not isinstance(error, BrokenPipeError):  # a reader that has had enough, as `head`, is told nothing
        with contextlib.suppress(OSError):
            typer.echo(f"The output cannot be written: {error.strerror}.", err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What is left in it goes nowhere, or the interpreter would try again at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(Exit.FAILED)
