"""Import litellm late, and turn off its network access, retries, callbacks and logs.

Importing litellm takes seconds and over 100 MB. Only a configuration with such a provider does it, in a thread. This
module names everything that is used of litellm. Every call is made as a chat call: litellm's own functions for Messages
and Responses need packages of its proxy, but its translations of these formats do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import threading
import warnings
from contextvars import ContextVar
from typing import Any, Final

from gateway.core.values import dataclass

#: Read by litellm during its import: it uses the tables in its package and reads no .env file.
_ENVIRONMENT: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",
}
_SETTINGS: Final = {
    "suppress_debug_info": True,
    "set_verbose": False,
    "telemetry": False,
    "turn_off_message_logging": True,
    "disable_streaming_logging": True,
    "disable_hf_tokenizer_download": True,
    # The aiohttp transport leaves connections open that are never closed.
    "disable_aiohttp_transport": True,
    "drop_params": False,
    "modify_params": False,
    "num_retries": 0,
    "cache": None,
}
_CALLBACKS: Final = (
    "callbacks", "input_callback", "success_callback", "failure_callback", "service_callback",
    "_async_input_callback", "_async_success_callback", "_async_failure_callback",
)  # fmt: skip
#: loggers of litellm and of its clients, which log addresses that may contain a key
_LOGGERS: Final = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router", "httpx", "httpcore", "openai", "botocore")
#: warnings of pydantic when it first uses litellm's types
_PYDANTIC_WARNINGS: Final = (
    ".*`ReadOnly` qualifier.*",
    ".*conflict with protected namespace.*",
    ".*Accessing the.*attribute on",
)
#: the module of its Messages translation, from version 1.109 on and before
_ADAPTER: Final = "litellm.llms.anthropic.messages.adapters.transformation"
_ADAPTER_BEFORE: Final = "litellm.llms.anthropic.pass_through.adapters.transformation"
#: what a gateway of requirements-small.lock says
NOT_INSTALLED: Final = "litellm is not installed. Install it with: pip install 'litellm>=1.106,<2'"
_lock: Final = threading.Lock()
#: id of the event loop -> number of providers that use its clients
_users: Final[dict[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Library:
    """Parts of litellm that are used.

    Attributes:
        chat: calls a chat model.
        text: calls a completion model.
        embed: calls an embedding model.
        supported: returns the parameters that a model accepts.
        options: returns what a provider is sent for some parameters.
        sees: returns whether a model accepts images.
        messages: translates requests and responses of the Messages format.
        responses: translates requests and responses of the Responses format.
        ResponsesStream: translates streams to the Responses format.
        Timeout: holds the time to connect and the time for everything else.
        clients: litellm's cached connections.
        providers: names of the providers that it knows.
    """

    chat: Any
    text: Any
    embed: Any
    supported: Any
    options: Any
    sees: Any
    messages: Any
    responses: Any
    ResponsesStream: Any
    Timeout: Any
    clients: Any
    providers: frozenset[str]
    _is_internal: ContextVar[bool]

    def keep_quiet(self) -> None:
        """Keep calls in this task out of litellm's success and failure logging."""
        self._is_internal.set(True)


def load() -> Library:
    """Import litellm and return it ready to use. The first time takes seconds: call it in a thread.

    Raises:
        ImportError: litellm is not installed, or its version is not supported.
    """
    with _lock:
        for name, text in _ENVIRONMENT.items():
            os.environ.setdefault(name, text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = _imported()
        for pattern in _PYDANTIC_WARNINGS:
            warnings.filterwarnings("ignore", message=pattern)
        return loaded


def _imported() -> Library:
    try:
        import httpx  # noqa: PLC0415
        import litellm  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name in {"httpx", "litellm"}:
            raise ImportError(NOT_INSTALLED) from None
        raise
    from litellm._internal_context import is_internal_call  # noqa: PLC0415
    from litellm.litellm_core_utils.get_supported_openai_params import get_supported_openai_params  # noqa: PLC0415
    from litellm.responses.litellm_completion_transformation import (  # noqa: PLC0415
        streaming_iterator,
        transformation,
    )

    for name, value in _SETTINGS.items():
        setattr(litellm, name, value)
    for name in _CALLBACKS:
        setattr(litellm, name, [])
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # Imported objects are permanent, so full garbage collections need not examine them.
    gc.freeze()
    return Library(
        chat=litellm.acompletion,
        text=litellm.atext_completion,
        embed=litellm.aembedding,
        supported=get_supported_openai_params,
        options=litellm.utils.get_optional_params,
        sees=litellm.supports_vision,
        messages=_anthropic_adapter(),
        responses=transformation.LiteLLMCompletionResponsesConfig,
        ResponsesStream=streaming_iterator.LiteLLMCompletionStreamingIterator,
        Timeout=httpx.Timeout,
        clients=litellm.in_memory_llm_clients_cache,
        providers=frozenset(provider.value for provider in litellm.LlmProviders)
        | frozenset(map(str, litellm.openai_compatible_providers)),
        _is_internal=is_internal_call,
    )


def _anthropic_adapter() -> Any:
    """Return litellm's translator between Messages and chat.

    Raises:
        ImportError: it is in neither of the two modules.
    """
    try:
        module = importlib.import_module(_ADAPTER)
    except ModuleNotFoundError as error:
        if error.name is None or not _ADAPTER.startswith(error.name):
            raise
        module = importlib.import_module(_ADAPTER_BEFORE)
    return module.AnthropicAdapter()


def acquire() -> None:
    """Count one more provider that uses litellm's connections on this event loop."""
    loop = id(asyncio.get_running_loop())
    with _lock:
        _users[loop] = _users.get(loop, 0) + 1


async def release(library: Library | None) -> None:
    """Count one provider less; after the last one close the connections, which litellm shares between providers."""
    loop = id(asyncio.get_running_loop())
    with _lock:
        _users[loop] -= 1
        if _users[loop]:
            return
        del _users[loop]
    if library is None:
        return
    clients = library.clients.cache_dict
    # The suffix by which litellm marks the clients of an event loop differs between versions, so it is asked for it.
    mark = library.clients.update_cache_key_with_event_loop("")
    for key in [key for key in clients if str(key).endswith(mark)]:
        client = clients.pop(key, None)
        client = getattr(client, "client", client)
        close = getattr(client, "aclose", None) or getattr(client, "close", None)
        with contextlib.suppress(Exception):
            closing = close() if close is not None else None
            if closing is not None:
                await closing
