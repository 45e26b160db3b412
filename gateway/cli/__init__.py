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

from gateway.cli import (
    audit,
    bench,
    demo,
    env,
    export,
    inspect,
    keys,
    models,
    price_update,
    replay,
    serve,
    sessions,
    setup,
    top,
    usage,
)
from gateway.cli.common import Command, Exit, Group

#: errors of a full disk, a broken device or a closed pipe
_OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF})
#: how to open a closed standard stream again. Stdout cannot be written then, so that lost output ends with an error.
_STANDARD_STREAMS: Final = (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))

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
app.command("models update", cls=Command)(price_update.update)
app.command("env", cls=Command)(env.env)
app.command("top", cls=Command)(top.top)
app.command("usage", cls=Command)(usage.usage)
app.command("export", cls=Command)(export.export)
app.command("audit", cls=Command)(audit.audit)
app.command("replay", cls=Command)(replay.replay)
app.command("bench", cls=Command)(bench.bench)
app.add_typer(sessions.app, name="sessions")
app.add_typer(keys.app, name="keys")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Print the version, or run a command."""
    if version:
        from gateway import __version__

        typer.echo(f"gateway {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command and end the process."""
    _reopen_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for names with characters that the encoding lacks
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _exit_unwritable(error)


def _reopen_standard_streams() -> None:
    """Open the standard streams that the caller closed (`>&-`).

    Otherwise the next file or socket would get the number of the closed stream.
    """
    for name, mode, flag in _STANDARD_STREAMS:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flag)
            os.set_inheritable(number, True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # stays open until the process ends
            setattr(sys, name, stream)


def _exit_unwritable(error: OSError) -> NoReturn:
    if not isinstance(error, BrokenPipeError):  # no message for a reader that ends early, such as `head`
        with contextlib.suppress(OSError):
            typer.echo(f"The output cannot be written: {error.strerror}.", err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # Discard the rest. The interpreter would try again to write it when it exits, and print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(Exit.FAILED)
