"""`gateway check`, `init` and `schema`: check and write configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.common import AsJson, ConfigFile, Exit, config_problems, print_json, printable, stop

if TYPE_CHECKING:
    from gateway.config import Settings


def check(
    config: ConfigFile = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Also ask providers for their models, if the gateway has their key, and open the store.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the configuration and print all problems. Exit with code 3 if there is one."""
    from gateway import config as configuration
    from gateway.app.resources import problems_of
    from gateway.core.errors import ConfigError
    from gateway.counters.registry import Counters

    notes: list[str] = Counters().notes()
    try:
        loaded = configuration.load(config)
    except ConfigError as error:
        problems = error.problems
    else:
        notes.append(f"read {loaded.file or 'built-in defaults'}")
        notes += [*loaded.notes, *_step_notes(loaded.settings)]
        problems = problems_of(loaded.settings)
        if online:
            from gateway.cli.online import probe

            for line, is_problem in probe(loaded.settings):
                (problems if is_problem else notes).append(line)
    problems = list(dict.fromkeys(problems))  # the checks of --online may find the same problems again
    if as_json:
        print_json({"problems": problems, "notes": notes})
    else:
        for line in notes:
            typer.echo(printable(line), err=True)
        for line in problems:
            typer.echo(printable(line))
        if not problems:
            typer.echo("no problems", err=True)
    raise typer.Exit(Exit.PROBLEMS if problems else Exit.DONE)


def _step_notes(settings: Settings) -> list[str]:
    """Return a line for each agent with steps: their number and names."""
    agents = {name: agent.steps for name, agent in settings.agents.items()}
    if settings.steps:
        agents = {"calls without an agent": settings.steps, **agents}
    return [
        f"{name}: {len(steps)} step{'s' * (len(steps) > 1)}, {', '.join(step.name for step in steps)}"
        for name, steps in agents.items()
    ]


#: comment that names the schema for editors, and the paths of the schema relative to the file
_SCHEMA_LINE: Final = "# yaml-language-server: $schema=./"
_SCHEMAS: Final = ("gateway.schema.json", "config/gateway.schema.json")
_NO_SCHEMA: Final = (
    "# Let your editor check this file: run gateway schema > gateway.schema.json in this folder,\n"
    f"# then replace these two lines with: {_SCHEMA_LINE}{_SCHEMAS[0]}"
)


def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("gateway.yaml"), as_json: AsJson = False
) -> None:
    """Write a commented gateway.yaml. An existing file is never overwritten."""
    from gateway.config import template

    try:
        text = _with_schema(template(), file.parent)
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        stop(f"{file} exists and was not overwritten. Name another file: gateway init FILE", Exit.FAILED)
    except OSError as error:
        stop(f"{file} cannot be written: {error.strerror}", Exit.FAILED)
    if as_json:
        print_json({"file": str(file), "written": True})
    else:
        typer.echo(f"wrote {file}; check it with: gateway check -c {file}", err=True)


def _with_schema(text: str, folder: Path) -> str:
    """Return the text with a first line for editors: the path of the schema if it exists, else how to create it.

    Editors report an error if the schema does not exist.
    """
    existing = next((name for name in _SCHEMAS if (folder / name).is_file()), None)
    _, _, rest = text.partition("\n")
    return f"{_NO_SCHEMA if existing is None else _SCHEMA_LINE + existing}\n{rest}"


def schema() -> None:
    """Print the JSON Schema of gateway.yaml, for editors."""
    with config_problems():
        from gateway.config import json_schema

        print_json(json_schema())
