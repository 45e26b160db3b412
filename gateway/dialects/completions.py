"""Read and write /v1/completions."""

from __future__ import annotations

from gateway.dialects.base import Call
from gateway.dialects.choices import COMPLETIONS_FORM, ChoicesDialect, asks_for_usage
from gateway.dialects.fields import flag_field, model_field, read_fields


class Completions(ChoicesDialect):
    """Dialect of text completions."""

    name = "completions"
    _form = COMPLETIONS_FORM
    _text_fields = ("prompt", "suffix")

    def read(self, body: bytes) -> Call:
        """Read a request body. The prompt may be absent: the model then starts from nothing."""
        fields = read_fields(body)
        return Call(
            operation="text_completion",
            model=model_field(fields),
            stream=flag_field(fields, "stream"),
            body=body,
            fields=fields,
            usage_asked=asks_for_usage(fields),
        )

    def opening(self, call: Call) -> list[str] | None:
        """Return None: a prompt is not a conversation."""
        del call
        return None
