"""`octavo plan`: what a model needs, from its config alone; no weights are loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine.config import DEFAULT_MODEL
from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.capacity import Capacity
from octavo.server.cli.dependent_args import check_left_out
from octavo.server.cli.plan_fleet import add_fleet_plan_args, run_fleet_plan
from octavo.server.cli.sizes import parse_bytes, parse_rate, show_bytes, show_seconds

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.models.config import ModelConfig

MAX_CONTEXT = 8192
"""Default of --context where the model allows more, as for the engine's max_model_len."""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "plan",
        description="Size KV cache, concurrency, and swap and hand-off times from a model's config "
        "alone: a config.json, a Hugging Face directory, a GGUF file, an Orbax checkpoint or a "
        "packaged model's name. With --slo: how many replicas a workload needs to be on time.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument(
        "--memory", type=parse_bytes, default="16GiB", metavar="SIZE",
        help="memory of all devices together (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=int, metavar="TOKENS",
        help=f"prompt and output of a request (default: the model's, at most {MAX_CONTEXT})",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of weights and KV; auto is the checkpoint's own (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization", default="none", metavar="FORM",
        help="of weights: none, int8, fp8, or stored: as the checkpoint has them "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE",
        help="of KV: auto is that of the weights (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="TOKENS",
        help="tokens in a page (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
        help="share of the memory that may be filled (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--bandwidth", type=parse_rate, default="25GB/s", metavar="RATE",
        help="between device and host, for swaps (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--network-bandwidth", type=parse_rate, metavar="RATE",
        help="between replicas, for hand-offs (default: as --bandwidth)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="devices that share each layer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    add_fleet_plan_args(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 0, also when the weights do not fit."""
    if args.slo is not None:
        return run_fleet_plan(args)
    check_left_out(args, add_fleet_plan_args, "--slo")
    from octavo.engine.config import EngineConfig

    # Borrowed for its checks.
    engine_config = EngineConfig(
        block_size=args.block_size,
        tensor_parallel_size=args.tensor_parallel_size,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    config = read_model_config(args.model).with_tensor_parallel(args.tensor_parallel_size)
    dtype = config.checkpoint_dtype if args.dtype == "auto" else args.dtype
    dtype = "float32" if dtype == "float32" else "bfloat16"
    report = plan_report(args, config, dtype, engine_config)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def read_model_config(model: str) -> ModelConfig:
    """A model's config, from the smallest file that holds it.

    Raises:
        ModelLoadError: there is no such model, or its config is damaged.
        UnsupportedModelError: it asks for mathematics that Octavo does not implement.
    """
    if model.endswith(".json"):
        from octavo.models.families.table import config_from_hf
        from octavo.models.loading.json_file import read_json
        from octavo.models.loading.stored.formats import without_quantization

        values, _ = without_quantization(read_json(Path(model).expanduser()))
        return config_from_hf(values)
    from octavo.models.loading.load import load_config

    return load_config(model)


def plan_report(
    args: argparse.Namespace, config: ModelConfig, dtype: str, engine_config: EngineConfig
) -> dict[str, Any]:
    """The plan as JSON has it: sizes in bytes, times in seconds."""
    import jax.numpy as jnp

    from octavo.engine.execution.platform.kv_memory import requested_kv_dtype
    from octavo.engine.execution.state import kv_bytes_per_token
    from octavo.models.parameters import declare, num_parameters

    if args.context is not None and args.context > config.max_position_embeddings:
        raise InvalidConfigError(
            "context", args.context, f"at most the model's {config.max_position_embeddings}"
        )
    specs = declare(config, jnp.dtype(dtype))
    kv_dtype = requested_kv_dtype(engine_config, jnp.dtype(dtype))
    capacity = Capacity(
        weight_bytes=_weight_bytes(args, config, dtype),
        kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
        page_size=args.block_size,
        context_tokens=args.context or min(config.max_position_embeddings, MAX_CONTEXT),
        memory_bytes=args.memory,
        utilization=args.gpu_memory_utilization,
        bandwidth=args.bandwidth,
        network_bandwidth=args.network_bandwidth or args.bandwidth,
        windows=config.cache_layout().windows,
        state_bytes=sum(state.num_bytes for state in config.cache_layout().states),
    )
    return {
        "model": args.model,
        "dtype": dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": kv_dtype.name,
        "num_parameters": num_parameters(specs),
        "num_idle_parameters": config.num_idle_layer_weights(),
        "weight_bytes": capacity.weight_bytes,
        "kv_bytes_per_token": capacity.kv_bytes_per_token * len(capacity.windows),
        "windows": list(capacity.windows),
        "page_size": capacity.page_size,
        "kv_bytes_per_page": capacity.kv_bytes_per_page,
        "memory_bytes": capacity.memory_bytes,
        "kv_pool_bytes": capacity.kv_pool_bytes,
        "num_pages": capacity.num_pages,
        "context_tokens": capacity.context_tokens,
        "pages_per_request": capacity.pages_per_request,
        "max_concurrent_requests": capacity.max_concurrent_requests,
        "request_kv_bytes": capacity.request_kv_bytes,
        "request_state_bytes": capacity.state_bytes,
        "swap_s": capacity.swap_s,
        "hand_off_s": capacity.hand_off_s,
    }


def _weight_bytes(args: argparse.Namespace, config: ModelConfig, dtype: str) -> int:
    import jax
    import jax.numpy as jnp

    from octavo.models.loading.load import open_model
    from octavo.models.parameters import (
        abstract_weights,
        declare,
        is_spec,
        num_bytes,
        num_parameters,
    )
    from octavo.models.quantization import (
        abstract_quantized_weights,
        check_quantization,
        rounded_form,
    )
    from octavo.sharding.mesh import make_mesh

    form = check_quantization(args.quantization)
    if form is None:  # no device is asked for
        leaves = jax.tree.leaves(declare(config, jnp.dtype(dtype)), is_leaf=is_spec)
        return sum(num_parameters({"": leaf}) * leaf.dtype.itemsize for leaf in leaves)
    mesh = make_mesh(1)
    if form == "stored" and not args.model.endswith(".json"):
        return num_bytes(open_model(args.model, dtype, mesh, form).abstract_weights())
    rounded = rounded_form(form, "a config.json alone")
    assert rounded is not None
    dense = abstract_weights(config, jnp.dtype(dtype), mesh)
    return num_bytes(abstract_quantized_weights(dense, config, rounded, mesh))


def _print(report: dict[str, Any]) -> None:
    """The plan as people read it."""
    context = report["context_tokens"]
    rows = [
        ("model", f"{Path(report['model']).name} in {report['dtype']}{_show_form(report)}"),
        ("weights", _show_weights(report)),
        ("KV per token", show_bytes(report["kv_bytes_per_token"])),
        (f"KV per page of {report['page_size']}", show_bytes(report["kv_bytes_per_page"])),
        ("cache groups", _show_windows(report["windows"])),
        ("memory", show_bytes(report["memory_bytes"])),
        ("KV pool", f"{show_bytes(report['kv_pool_bytes'])}, {report['num_pages']:,} pages"),
        (f"requests of {context:,} tokens", f"{report['max_concurrent_requests']:,} at once"),
        ("KV of one such request", show_bytes(report["request_kv_bytes"])),
    ]
    if report["request_state_bytes"]:  # which no page holds: nothing is swapped or handed off
        rows.append(("its recurrent states", show_bytes(report["request_state_bytes"])))
    else:
        rows.append(("swap out, or in", show_seconds(report["swap_s"])))
        rows.append(("hand-off to a replica", show_seconds(report["hand_off_s"])))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if report["kv_pool_bytes"] == 0:
        print("The weights alone do not fit this memory.")


def _show_form(report: dict[str, Any]) -> str:
    """What of the model has another dtype than it has itself."""
    form, kv_dtype = report["quantization"], report["kv_cache_dtype"]
    weights = {"none": "", "stored": ", weights as they are stored"}.get(form, f", weights {form}")
    return weights + (f", KV {kv_dtype}" if kv_dtype != report["dtype"] else "")


def _show_weights(report: dict[str, Any]) -> str:
    """All weights, and with experts how many of them a token is multiplied by."""
    number, idle = report["num_parameters"], report["num_idle_parameters"]
    active = f", {number - idle:,} active" if idle else ""
    return f"{show_bytes(report['weight_bytes'])}, {number:,} numbers{active}"


def _show_windows(windows: list[int | None]) -> str:
    """What cache groups keep, those alike together."""
    kinds = dict.fromkeys(windows)
    parts = [
        f"{windows.count(window)} of {'all tokens' if window is None else f'the last {window:,}'}"
        for window in kinds
    ]
    return ", ".join(parts)
