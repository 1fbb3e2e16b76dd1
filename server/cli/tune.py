"""`octavo tune`: measures attention's block sizes on this device and writes them as a table.

On a CPU it measures, too, which of XLA's two libraries is the faster one for products in float32.

Engines find the table when they are built: without --output it is written where they look first
(OCTAVO_TUNING_DIR, or the user's cache folder). Where no table matches the device, dtype, heads and
page size, block sizes are computed from the device's properties, and the library is XLA's choice.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.engine.config import DEFAULT_MODEL, KV_CACHE_ALIASES
from octavo.engine.errors import InvalidConfigError

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

BACKENDS = ("auto", "xla", "mosaic_tpu", "mosaic_gpu")
PARTS = ("decode", "prefill", "products")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "int8", "fp8")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser("tune", help="measure block sizes", description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="whose heads to tune for (default: %(default)s)"
    )
    parser.add_argument("--heads", metavar="HQ/HKV/D", help="32/8/128, say, instead of a model's")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_DTYPES, default="auto",
        type=lambda text: KV_CACHE_ALIASES.get(text, text),
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=int, action="append", metavar="TOKENS",
        help="tokens in a page; may be repeated (default: the platform's)",
    )  # fmt: skip
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--attention-backend", choices=BACKENDS, default="auto")
    parser.add_argument("--part", choices=PARTS, action="append", help="(default: all that apply)")
    parser.add_argument("--rows", type=int, default=32, help="decode rows (default %(default)s)")
    parser.add_argument("--row-context", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="prefill (default %(default)s)")
    parser.add_argument("--chunk-context", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default %(default)s)")
    parser.add_argument("--output", "-o", type=Path, help="the table; entries are added to it")


def run(args: argparse.Namespace) -> int:
    """Measures and writes the table; 0."""
    for name in ("rows", "row_context", "chunk", "chunk_context", "rounds"):
        if getattr(args, name) < 1:
            raise InvalidConfigError(name, getattr(args, name), "an integer of at least 1")
    import jax
    from tqdm import tqdm

    from octavo.engine.process.own_process import prepare_to_compute
    from octavo.models.blocks.mlp import MLP
    from octavo.models.weight_variants.logit_bounds import can_bound_logits
    from octavo.pallas_kernels import tuning
    from octavo.pallas_kernels.compat import multiplies_bfloat16
    from octavo.pallas_kernels.cpu.tune_products import ModelSize, tune_products
    from octavo.pallas_kernels.ragged_paged_attention import kv_dtype
    from octavo.pallas_kernels.ragged_paged_attention.backends import (
        AttentionShape,
        choose_backend,
    )
    from octavo.pallas_kernels.ragged_paged_attention.pool_layout import default_page_size
    from octavo.pallas_kernels.ragged_paged_attention.tune import (
        Workload,
        shapes_to_tune,
        tune,
    )

    prepare_to_compute(os.environ)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    num_heads, num_kv_heads, head_dim = _heads(args)
    dtype = args.dtype if args.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    any_shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=1,
        max_tokens=args.chunk,
        q_dtype=dtype,
        kv_dtype=kv_dtype.KV_DTYPES.get(args.kv_cache_dtype, dtype),
    )
    parts = tuple(dict.fromkeys(args.part or PARTS))
    has_products = on_cpu and dtype == "float32" and args.kv_cache_dtype == "auto"
    if args.part and "products" in parts and not has_products:
        raise InvalidConfigError(
            "part", "products", "decode or prefill; products are measured on a CPU, all in float32"
        )
    page_sizes = tuple(args.block_size or [default_page_size(device.platform)])
    workload = Workload(
        rows=args.rows,
        row_context=args.row_context,
        chunk=args.chunk,
        chunk_context=args.chunk_context,
    )
    # First: it decides how the steps are compiled that attention is a part of.
    library: tuning.ProductLibrary = "ynnpack"
    if has_products:
        measured = tuning.tuned_products(dtype)
        library = library if measured is None else measured.library
    products = []
    if "products" in parts and has_products:
        config = _config(args)
        width = config.common(
            lambda layer: (
                layer.feed_forward.intermediate_size
                if isinstance(layer.feed_forward, MLP)
                else None
            )
        )
        if width is None:
            raise InvalidConfigError("model", args.model, "one whose layers have MLPs of one width")
        size = ModelSize(
            hidden_size=config.hidden_size,
            intermediate_size=width,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            can_bound_logits=can_bound_logits(config) and multiplies_bfloat16(),
        )
        tuned = tune_products(size, rounds=args.rounds)
        times = ", ".join(f"{name} {_ms(each, ', ')} ms" for name, each in tuned.ms.items())
        spans = [
            f"{name} for {span[0]} to {span[1]} rows" if span else f"never {name}"
            for name, span in (
                ("int8-split", tuned.int8_split),
                ("bounded argmax", tuned.bounded_argmax),
            )
        ]
        print(
            f"products in float32: {', '.join([tuned.library, *spans])}, block-quantized for up to "
            f"{tuned.block_quantized} rows: {times} "
            f"for {tuned.rows} rows",
            flush=True,
        )
        library = tuned.library
        products.append(tuned.entry())
    results = []
    for shape in shapes_to_tune(any_shape, page_sizes):
        backend = choose_backend(
            args.attention_backend,
            shape,
            platform=device.platform,
            device_kind=device.device_kind,
        )
        for part in parts:
            if part == "products":
                continue
            name = f"{backend} {part}, pages of {shape.page_size}"
            with tqdm(total=0, desc=name, disable=not sys.stderr.isatty()) as bar:

                def tell(done: int, total: int, bar: tqdm = bar) -> None:
                    bar.total = total
                    bar.update(done - bar.n)

                result = tune(
                    backend, shape, part, workload,
                    library=library, rounds=args.rounds, on_candidate=tell,
                )  # fmt: skip
            results.append(result)
            sizes = " ".join(f"{name}={value}" for name, value in result.tiles.items())
            print(
                f"{name}: {sizes}: {_ms(result.ms)} ms on long and short rows, by default "
                f"{_ms(result.default_ms)} ms ({result.num_candidates} candidates)",
                flush=True,
            )
    about = {
        "device": tuning.tuning_device(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "octavo " + shlex.join(sys.argv[1:]),
        "jax": jax.__version__,
        "num_threads": tuning.num_cores() if on_cpu else None,
    }
    path = args.output or tuning.user_directory() / f"{_file_name(tuning.tuning_device())}.json"
    tuning.write_table(path, about, [result.entry() for result in results], products)
    print(f"written to {path}")
    return 0


def _heads(args: argparse.Namespace) -> tuple[int, int, int]:
    """Query heads, KV heads and head size on one device."""
    if args.heads is not None:
        match = re.fullmatch(r"(\d+)/(\d+)/(\d+)", args.heads)
        sizes = tuple(int(part) for part in match.groups()) if match else (0, 0, 0)
        if min(sizes) < 1 or sizes[0] % sizes[1]:
            raise InvalidConfigError("heads", args.heads, "HQ/HKV/D, HQ a multiple of HKV")
        return sizes[0], sizes[1], sizes[2]
    split = args.tensor_parallel_size
    if split < 1:
        raise InvalidConfigError("tensor_parallel_size", split, "at least 1")
    found = {
        (each.num_heads, each.num_kv_heads, each.head_dim) for each in _config(args).attentions()
    }
    if len(found) > 1:
        raise InvalidConfigError(
            "model", args.model, "one whose layers have equal heads, or --heads"
        )
    heads = found.pop()
    if heads[1] % split:
        split = 1  # heads that do not divide run everywhere
    return heads[0] // split, heads[1] // split, heads[2]


def _config(args: argparse.Namespace) -> ModelConfig:
    from octavo.models.loading.load import load_config

    return load_config(args.model).with_tensor_parallel(args.tensor_parallel_size)


def _ms(times: tuple[float, ...], separator: str = " and ") -> str:
    return separator.join(f"{ms:.3f}" for ms in times)


def _file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
