"""Load gateway.yaml into frozen `Settings`."""

from gateway.config.access import ClientKey, KeyBudget
from gateway.config.callbacks import Callbacks, Webhook
from gateway.config.complaints import did_you_mean
from gateway.config.load import (
    Loaded,
    built_in_providers,
    check_exposure,
    client_key,
    data_folder,
    families,
    is_loopback,
    load,
    load_passed_on,
    model_facts,
    named_providers,
    pass_on,
    share_metrics,
    shared_metrics,
    template,
    unused_providers,
)
from gateway.config.models import Facts, Model, PriceRow, RateRow
from gateway.config.providers import Provider
from gateway.config.restart import reloaded
from gateway.config.schema import BUILT_IN_ROUTES, Context, Settings, json_schema
from gateway.config.section import duration, expand_home
from gateway.config.steps import AgentSteps, StepCondition, StepRow, matcher

__all__ = [
    "BUILT_IN_ROUTES",
    "AgentSteps",
    "Callbacks",
    "ClientKey",
    "Context",
    "Facts",
    "KeyBudget",
    "Loaded",
    "Model",
    "PriceRow",
    "Provider",
    "RateRow",
    "Settings",
    "StepCondition",
    "StepRow",
    "Webhook",
    "built_in_providers",
    "check_exposure",
    "client_key",
    "data_folder",
    "did_you_mean",
    "duration",
    "expand_home",
    "families",
    "is_loopback",
    "json_schema",
    "load",
    "load_passed_on",
    "matcher",
    "model_facts",
    "named_providers",
    "pass_on",
    "reloaded",
    "share_metrics",
    "shared_metrics",
    "template",
    "unused_providers",
]
