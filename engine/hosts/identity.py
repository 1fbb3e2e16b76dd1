"""What hosts of a group must have in common, by name: versions, settings, model, programs."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform.engine_setup import EngineSetup
from octavo.models.loading.checkpoint_digest import checkpoint_digest

PROTOCOL = 1
"""Of the messages. One that knows another one is refused."""
OWN_SETTINGS = frozenset(
    (
        *("model", "tokenizer", "served_model_name", "chat_template", "compile_cache_dir"),
        *("tool_call_parser", "reasoning_parser", "reranker", "scheduling_policy", "watermark"),
        *("enable_prefix_caching", "overlap", "replica_timeout_s", "revision", "fail_on_compile"),
    )
)
"""Settings that may differ: they name a host's own files, or serve the leader's planning alone."""

Facts = dict[str, Any]
"""What a host is, by name, as JSON can say it."""


def facts_of_process(config: EngineConfig, model: Path) -> Facts:
    """What can be compared before JAX looks for devices.

    Args:
        model: the checkpoint, on this host.
    """
    import jax

    settings = dataclasses.asdict(config)
    shared = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
    versions = {"protocol": PROTOCOL, "octavo": __version__, "jax": jax.__version__}
    return versions | {"model": checkpoint_digest(model)} | shared


def facts_of_setup(setup: EngineSetup) -> Facts:
    """What a host decided by its devices; sizes apart, which are agreed on."""
    devices = setup.mesh.devices
    return {
        "mesh": [list(devices.shape), [device.process_index for device in devices.flat]],
        "devices": sorted({f"{device.platform} {device.device_kind}" for device in devices.flat}),
        "dtype of KV": str(setup.kv_dtype),
        "page size": setup.limits.page_size,
        "attention": setup.kernels.attention,
        "routed experts": setup.kernels.experts,
        "layers": _digest(repr(setup.model)),
        "weight variants": repr(setup.variants),
        "programs": _digest(repr(setup.lattice)),
        "limits": repr(dataclasses.replace(setup.limits, num_pages=2, num_host_pages=0)),
        "pages of the host tier": setup.limits.num_host_pages,
    }


def check_same(theirs: Facts, ours: Facts, host_id: int) -> None:
    """Refuses a host that differs.

    Args:
        theirs: of the host with this number.
        ours: the leader's.

    Raises:
        InvalidConfigError: names the first thing that differs.
    """
    for name in dict.fromkeys((*ours, *theirs)):
        if theirs.get(name) != ours.get(name):
            allowed = f"{ours.get(name)!r}, as on host 0 (host {host_id} differs)"
            raise InvalidConfigError(name, theirs.get(name), allowed)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
