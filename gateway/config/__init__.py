"""gateway.yaml -> frozen `Settings`."""

from gateway.config.load import (
    Loaded,
    built_in_providers,
    data_folder,
    families,
    is_loopback,
    load,
    load_passed_on,
    model_facts,
    pass_on,
    refuse_open_door,
    template,
)
from gateway.config.schema import (
    BUILT_IN_ROUTES,
    Context,
    Facts,
    Model,
    PriceRow,
    Provider,
    Settings,
    duration,
    json_schema,
)

__all__ = [
    "BUILT_IN_ROUTES",
    "Context",
    "Facts",
    "Loaded",
    "Model",
    "PriceRow",
    "Provider",
    "Settings",
    "built_in_providers",
    "data_folder",
    "duration",
    "families",
    "is_loopback",
    "json_schema",
    "load",
    "load_passed_on",
    "model_facts",
    "pass_on",
    "refuse_open_door",
    "template",
]
