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
            help="Also ask providers for their models, where no caller's key is needed, and open the store.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find every problem of the configuration at once. Exit with code 3 if there is one."""
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
        notes += [*loaded.notes, *_steps_of(loaded.settings)]
        problems = problems_of(loaded.settings)
        if online:
            from gateway.cli.online import probe

            for line, is_problem in probe(loaded.settings):
                (problems if is_problem else notes).append(line)
    problems = list(dict.fromkeys(problems))  # what was found in the settings, online meets again
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


def _steps_of(settings: Settings) -> list[str]:
    """What agents have steps, and which."""
    agents = {name: agent.steps for name, agent in settings.agents.items()}
    if settings.steps:
        agents = {"calls whose agent is not named": settings.steps, **agents}
    return [
        f"{name}: {len(steps)} step{'s' * (len(steps) > 1)}, {', '.join(step.name for step in steps)}"
        for name, steps in agents.items()
    ]


#: how editors are told of a schema, and where it may be, seen from the file
_SCHEMA_LINE: Final = "# yaml-language-server: $schema=./"
_SCHEMAS: Final = ("gateway.schema.json", "config/gateway.schema.json")
_NO_SCHEMA: Final = (
    "# For an editor that completes and checks this file: gateway schema > gateway.schema.json\n"
    f"# beside it; then replace these two lines with: {_SCHEMA_LINE}{_SCHEMAS[0]}"
)


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("gateway.yaml"), as_json: AsJson = False
) -> None:
    """Write a commented gateway.yaml; never over an existing file."""
    from gateway.config import template

    try:
        text = _with_schema(template(), file.parent)
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        stop(f"{file} exists and is not overwritten. Name another file: gateway init FILE", Exit.FAILED)
    except OSError as error:
        stop(f"{file} cannot be written: {error.strerror}", Exit.FAILED)
    if as_json:
        print_json({"file": str(file), "written": True})
    else:
        typer.echo(f"wrote {file}; check it with: gateway check -c {file}", err=True)


def _with_schema(text: str, folder: Path) -> str:
    """The text, its first line naming a schema that is there: editors complain of one that is not."""
    found = next((name for name in _SCHEMAS if (folder / name).is_file()), None)
    _, _, rest = text.partition("\n")
    return f"{_NO_SCHEMA if found is None else _SCHEMA_LINE + found}\n{rest}"


def schema() -> None:
    """Print the JSON Schema of gateway.yaml, for editors."""
    with config_problems():
        from gateway.config import json_schema

        print_json(json_schema())
