"""The `gateway` command. Only typer and rich are imported before the command is known; the rest waits until then."""

from __future__ import annotations

import typer

from gateway.cli import bench, demo, env, inspect, keys, models, replay, serve, sessions, setup, top

app = typer.Typer(
    name="gateway",
    help="An OpenAI-compatible gateway that meters every session of a long-running agent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("check")(setup.check)
app.command("init")(setup.init)
app.command("schema")(setup.schema)
app.command("count")(inspect.count)
app.command("trim")(inspect.trim)
app.command("models")(models.models)
app.command("env")(env.env)
app.command("top")(top.top)
app.command("replay")(replay.replay)
app.command("bench")(bench.bench)
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
    """The console script."""
    app()
