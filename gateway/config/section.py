"""What every block of gateway.yaml has in common."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A block: unknown keys are refused, and what is left empty is as if it were not there."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, str_strip_whitespace=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        """Without `server:` with nothing below, as it is left when all its keys are commented out."""
        if not isinstance(value, dict):
            return value
        return {
            key: "off" if inner is False and cls._can_be_off(key) else inner
            for key, inner in value.items()
            if inner is not None or not cls._is_section(key)
        }

    @classmethod
    def _can_be_off(cls, key: object) -> bool:
        """YAML reads a bare `off` as false."""
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is not None and any(
            "off" in get_args(kind) for kind in (field.annotation, *get_args(field.annotation))
        )

    @classmethod
    def _is_section(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        kind = field.annotation if field is not None else None
        return get_origin(kind) in (dict, tuple) or (isinstance(kind, type) and issubclass(kind, Section))
