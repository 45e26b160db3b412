"""Define the settings of sinks, which receive the records of all calls."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from gateway.config.section import Duration, Section, duration, expand_home


class Sink(Section):
    """A receiver of the records of all calls."""

    kind: Literal["jsonl"] = Field("jsonl", description="jsonl: files of JSON lines, one for each day.")
    path: Path = Field(
        description="Folder of the files, calls-2026-11-28.jsonl and so on. The gateway creates it. Each record is "
        "written at least once."
    )
    keep: Duration | None = Field(
        None, description="A file is deleted this long after its day, such as 90d. null: files are never deleted."
    )

    @field_validator("path")
    @classmethod
    def _path(cls, value: Path) -> Path:
        return expand_home(value)

    @property
    def keep_s(self) -> int | None:
        """Return `keep` in seconds."""
        return duration(self.keep) if self.keep is not None else None
