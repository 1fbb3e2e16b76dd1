"""What hosts of a group must have in common, by name: versions, settings, model, programs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform.engine_setup import EngineSetup

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
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
"""Places of a file of weights that its fingerprint reads, its ends among them."""

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
    return versions | {"model": fingerprint(model)} | shared


def facts_of_setup(setup: EngineSetup) -> Facts:
    """What a host decided by its devices; sizes apart, which are agreed on."""
    devices = setup.mesh.devices
    return {
        "mesh": [list(devices.shape), [device.process_index for device in devices.flat]],
        "devices": sorted({f"{device.platform} {device.device_kind}" for device in devices.flat}),
        "dtype of KV": str(setup.kv_dtype),
        "page size": setup.limits.page_size,
        "attention": setup.backend,
        "layers": _digest([repr(setup.model).encode()]),
        "weight variants": repr(setup.variants),
        "programs": _digest([repr(setup.lattice).encode()]),
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


def fingerprint(model: Path) -> str:
    """Tells checkpoints apart: names and sizes of their files, and samples of what is in them.

    Tokenizers are left out: followers read none.
    """
    if model.is_dir():
        files = sorted(path for path in model.rglob("*") if path.is_file())
        weights = [path for path in files if path.suffix in (".safetensors", ".gguf")]
        config = model / "config.json"
        files = [*weights, *[config] * config.exists()] if weights else files
    else:
        files = [model]
    parts: list[bytes] = []
    for path in files:
        name = path.relative_to(model).as_posix() if model.is_dir() else ""
        parts += [name.encode(), *_samples(path)]
    return _digest(parts)


def _samples(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    yield str(size).encode()
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb") as file:
        for start in sorted({last * part // (SAMPLES - 1) for part in range(SAMPLES)}):
            file.seek(start)
            yield file.read(SAMPLE_BYTES)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:16]
