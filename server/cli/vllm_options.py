"""What vLLM's users write on a command line or in a YAML file.

Settings that go by another name there are renamed. Those that are not settings here are taken where
they change no answer, as `LLM` takes them, and refused with the reason otherwise.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from octavo.engine.engine_arguments import NEUTRAL, SWITCHES, WITHOUT_EFFECT, check_others

RENAMED = {
    "port": "http_port",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "ssl_ca_certs": "tls_client_ca",
}
"""vLLM's name -> the setting."""
ALIASES = {name: (f"--{theirs.replace('_', '-')}",) for theirs, name in RENAMED.items()}
"""Setting -> vLLM's option."""
ENGINE_ALIASES = {"tensor_parallel_size": ("-tp",), "data_parallel_size": ("-dp",)}

_SERVER_SWITCHES = {
    "disable_fastapi_docs", "disable_uvicorn_access_log", "enable_auto_tool_choice",
    "enable_log_requests",
}  # fmt: skip
_SERVER_OTHERS = {"max_log_len", "uvicorn_log_level"}
_ALL_SWITCHES = SWITCHES | _SERVER_SWITCHES | {"enable_lora", "enable_prompt_adapter"}
NAMES = (WITHOUT_EFFECT | NEUTRAL.keys() | _SERVER_SWITCHES | _SERVER_OTHERS) - {"use_tqdm_on_load"}
"""Of vLLM's settings that are none here."""
_PREFIX = "vllm_"


def add_vllm_options(group: Any) -> None:
    """Adds the options that are not settings; help does not show them."""
    for name in sorted(NAMES):
        kind: dict[str, Any] = {"type": _value}
        if name in _ALL_SWITCHES:
            kind = {"action": argparse.BooleanOptionalAction}
        option = "--" + name.replace("_", "-")
        common = {"dest": _PREFIX + name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(option, **kind, **common)


def check_vllm_options(args: argparse.Namespace) -> None:
    """Refuses those of them that ask for something.

    Raises:
        InvalidConfigError: a value that changes answers there.
    """
    given = vars(args)
    check_vllm_settings({name: given[_PREFIX + name] for name in NAMES if _PREFIX + name in given})


def check_vllm_settings(given: dict[str, object]) -> None:
    """The same of settings by name."""
    server = {name for name in given if name in _SERVER_SWITCHES | _SERVER_OTHERS}
    check_others(given, without_effect=WITHOUT_EFFECT | server)


def _value(text: str) -> object:
    """What an option says: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
