"""What is compiled: attention kernels on their own, and whole steps of two Llama sizes.

Every case says what it must read, write and compute: its floors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.aot.moved import NOTHING, Attention, Moved, attention_moved
from octavo.engine.execution.platform.kernel_choice import Kernels
from octavo.engine.execution.state import StateLayout, kv_bytes_per_token, pool_layouts
from octavo.engine.execution.step import make_step
from octavo.engine.execution.step_spec import StepShape, step_spec
from octavo.engine.execution.weights.weight_layout import abstract, loop_compiler_options
from octavo.models.config import ModelConfig
from octavo.models.flat_config import flat_config
from octavo.models.parameters import abstract_weights, declare, num_parameters
from octavo.models.rope import Rope
from octavo.pallas_kernels.compat import graph_compiler_options
from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    Backend,
    RaggedBatch,
    ragged_paged_attention,
)
from octavo.pallas_kernels.ragged_paged_attention.cost import attention_cost
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import (
    KV_DTYPES,
    SCALE_DTYPE,
    kv_quantization,
)
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout

BF16 = jnp.dtype("bfloat16")
PAGE = 64

LLAMA_1B = flat_config(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope=Rope(theta=500_000.0),
    max_position_embeddings=131_072,
)
LLAMA_8B = flat_config(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=Rope(theta=500_000.0),
    max_position_embeddings=131_072,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program.

    Attributes:
        name: in the table.
        lower: traces it for a mesh of the target.
        bytes_moved, flops: least that it must move and compute at full load.
        attention: what each layer of it attends.
        num_layers: attention calls of an iteration.
        other: what else it moves and computes in an iteration: weights, and their products.
        num_iterations: of a dispatch.
        resident_bytes: weights and KV, which the program is given.
        weight_bytes: weights alone.
        shape: of a whole step.
    """

    name: str
    lower: Callable[[Mesh, Backend], Any]
    bytes_moved: float
    flops: float
    attention: Attention
    num_layers: int = 1
    other: Moved = NOTHING
    num_iterations: int = 1
    resident_bytes: int = 0
    weight_bytes: int = 0
    shape: StepShape | None = None

    def compiler_options(self, device_kind: str) -> dict[str, str]:
        """What it is compiled with, as the engine does."""
        if self.shape is None:
            return {}
        graph = graph_compiler_options() if device_kind.startswith("NVIDIA") else {}
        return graph | loop_compiler_options(self.shape, device_kind)

    def counted(self, backend: Backend, device_kind: str) -> Moved:
        """What the kernels move and compute, counted from their block sizes, in a dispatch."""
        layer = attention_moved(self.attention, backend, device_kind)
        times = self.num_iterations
        return Moved(
            times * (self.num_layers * layer.num_bytes + self.other.num_bytes),
            times * (self.num_layers * layer.flops + self.other.flops),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Attention alone: rows that decode at `context`, and tokens of one chunk at its end.

    Attributes:
        kv: of the pool, a name of `KV_DTYPES`; None is `dtype`.
        value_size: of latents; None is keys and values apart.
        attention_chunk: at least `context`, all of which is seen then.
    """

    rows: int
    chunk: int
    context: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = PAGE
    dtype: str = "bfloat16"
    kv: str | None = None
    window: int | None = None
    softcap: float | None = None
    value_size: int | None = None
    attention_chunk: int | None = None

    @property
    def kv_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype) if self.kv is None else KV_DTYPES[self.kv]

    @property
    def name(self) -> str:
        kind = "decode" if not self.chunk else "prefill" if not self.rows else "mixed"
        parts = [f"attention {kind} {self.rows}+{self.chunk} x {self.context}"]
        parts.append(f"{self.heads[0]}/{self.heads[1]} D{self.head_dim} P{self.page_size}")
        if self.dtype != "bfloat16":
            parts.append(self.dtype)
        if self.kv:
            parts.append(f"{self.kv} KV")
        if self.attention_chunk:
            parts.append(f"chunks of {self.attention_chunk}")
        if self.value_size:
            parts.append(f"latents of {self.value_size}")
        if self.window:
            parts.append(f"window {self.window} cap {self.softcap}")
        return " ".join(parts)


ATTENTION = (
    AttentionCase(rows=64, chunk=0, context=4096),
    AttentionCase(rows=0, chunk=2048, context=8192),
    AttentionCase(rows=128, chunk=512, context=1024),
    AttentionCase(rows=64, chunk=512, context=2048, head_dim=64, page_size=16),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(8, 1), head_dim=256, page_size=128),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(16, 16), head_dim=128, page_size=256),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(12, 4), window=1024, softcap=50.0),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(16, 8), head_dim=96, page_size=32),
    AttentionCase(rows=32, chunk=512, context=8192, heads=(40, 8), attention_chunk=8192),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(32, 32), head_dim=80),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(64, 8), head_dim=192),
    AttentionCase(rows=64, chunk=0, context=4096, head_dim=64),
    AttentionCase(rows=64, chunk=0, context=4096, head_dim=64, kv="int8"),
    AttentionCase(rows=64, chunk=0, context=4096, kv="int8"),
    AttentionCase(rows=64, chunk=0, context=4096, kv="fp8"),
    AttentionCase(rows=64, chunk=0, context=4096, page_size=128, kv="int8"),
    AttentionCase(rows=0, chunk=2048, context=8192, kv="int8"),
    AttentionCase(rows=0, chunk=2048, context=8192, kv="fp8"),
    AttentionCase(rows=128, chunk=512, context=1024, kv="int8"),
    AttentionCase(rows=64, chunk=512, context=2048, head_dim=64, kv="int8"),
    AttentionCase(rows=64, chunk=512, context=2048, head_dim=64, page_size=32, kv="fp8"),
    AttentionCase(
        rows=32, chunk=256, context=2048, heads=(12, 4), kv="fp8", window=1024, softcap=50.0
    ),
    AttentionCase(
        rows=32, chunk=256, context=2048, heads=(16, 8), head_dim=96, page_size=256, kv="fp8"
    ),
    AttentionCase(
        rows=32, chunk=256, context=2048, heads=(8, 1), head_dim=256, page_size=128, kv="int8"
    ),
    AttentionCase(rows=64, chunk=512, context=2048, page_size=16, kv="int8"),
    AttentionCase(rows=64, chunk=512, context=2048, head_dim=64, page_size=16, kv="fp8"),
)
TPU_ONLY = (
    AttentionCase(rows=32, chunk=256, context=1024, heads=(9, 3), head_dim=64, dtype="float32"),
    # Gemma 4's global layers.
    AttentionCase(rows=64, chunk=0, context=4096, heads=(8, 1), head_dim=512),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(16, 2), head_dim=512, kv="fp8"),
    # DeepSeek's and Kimi's latents: all heads of V3 on one device, and an eighth of them.
    AttentionCase(rows=64, chunk=0, context=4096, heads=(128, 1), head_dim=576, value_size=512),
    AttentionCase(rows=64, chunk=0, context=4096, heads=(16, 1), head_dim=576, value_size=512),
    AttentionCase(rows=0, chunk=2048, context=8192, heads=(16, 1), head_dim=576, value_size=512),
    AttentionCase(rows=32, chunk=256, context=2048, heads=(128, 1), head_dim=576, value_size=512),
)
GPU_ONLY = (
    AttentionCase(
        rows=32, chunk=256, context=2048, heads=(8, 1), head_dim=256, page_size=128, kv="fp8"
    ),
)


def attention_cases(platform: str) -> Iterator[Case]:
    """The kernels' cases for a platform."""
    for sizes in (*ATTENTION, *(TPU_ONLY if platform == "tpu" else GPU_ONLY)):
        itemsize = jnp.dtype(sizes.dtype).itemsize
        costs = []
        seen = min(sizes.context, sizes.window or sizes.context)
        common = {
            "num_heads": sizes.heads[0],
            "num_kv_heads": sizes.heads[1],
            "head_dim": sizes.head_dim,
            "value_size": sizes.value_size,
            "q_itemsize": itemsize,
            "kv_itemsize": sizes.kv_dtype.itemsize,
            "scale_bytes": 0 if kv_quantization(sizes.kv_dtype) is None else SCALE_DTYPE.itemsize,
        }
        if sizes.rows:
            costs.append(
                attention_cost(num_queries=sizes.rows, context=seen, kv_reads=sizes.rows, **common)
            )
        if sizes.chunk:  # read once: a tile's second reading may come from a cache
            costs.append(
                attention_cost(num_queries=sizes.chunk, context=seen, kv_reads=1, **common)
            )
        # The mask hides a triangle of the chunk's own keys; a window slides along and hides none.
        hidden = 0 if sizes.window else _triangle(sizes.chunk)
        yield Case(
            name=sizes.name,
            lower=functools.partial(_lower_attention, sizes),
            bytes_moved=sum(c.bytes_accessed for c in costs),
            flops=sum(c.flops for c in costs)
            - 2 * hidden * sizes.heads[0] * (sizes.head_dim + (sizes.value_size or sizes.head_dim)),
            attention=Attention(
                rows=sizes.rows,
                chunk=sizes.chunk,
                context=sizes.context,
                seen=seen,
                num_heads=sizes.heads[0],
                num_kv_heads=sizes.heads[1],
                head_dim=sizes.head_dim,
                page_size=sizes.page_size,
                itemsize=itemsize,
                kv_dtype=sizes.kv_dtype,
                value_size=sizes.value_size,
            ),
        )


def _lower_attention(sizes: AttentionCase, mesh: Mesh, backend: Backend) -> Any:
    whole = NamedSharding(mesh, P())

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    rows = sizes.rows + (1 if sizes.chunk else 0)
    tokens = sizes.rows + sizes.chunk
    pages = -(-sizes.context // sizes.page_size)
    batch = RaggedBatch(
        block_table=array((rows, pages)),
        kv_lens=array((rows,)),
        cu_q_lens=array((rows + 1,)),
        token_row=array((tokens,)),
        token_page=array((tokens,)),
        token_offset=array((tokens,)),
        num_decode_rows=array(()),
        num_rows=array(()),
    )
    num_heads, num_kv_heads = sizes.heads
    layout = pool_layout(backend, sizes.head_dim, sizes.page_size, sizes.value_size)
    pool = jax.eval_shape(
        functools.partial(layout.zeros, rows * pages + 1, num_kv_heads, sizes.kv_dtype)
    )
    new = array((tokens, num_kv_heads, sizes.head_dim), sizes.dtype)
    params = AttentionParams(
        scale=sizes.head_dim**-0.5,
        sliding_window=sizes.window,
        logit_softcap=sizes.softcap,
        attention_chunk=sizes.attention_chunk,
    )
    run = functools.partial(
        ragged_paged_attention, params=params, backend=backend, decode_only=not sizes.chunk
    )
    return jax.jit(run, donate_argnames="kv").lower(
        array((tokens, num_heads, sizes.head_dim), sizes.dtype),
        new,
        None if sizes.value_size else new,
        kv=jax.tree.map(lambda x: array(x.shape, x.dtype), pool),
        batch=batch,
    )


STEPS = (
    (StepShape(1, 1, 4, "greedy"), 1024),
    (StepShape(32, 32, 4, "greedy"), 1024),
    (StepShape(128, 128, 4, "general"), 1024),
    (StepShape(640, 128, 0, "greedy"), 1024),
    (StepShape(2048, 32, 0, "greedy"), 8192),
)


def step_cases() -> Iterator[Case]:
    """Whole steps of the two models, each as wide as it can be."""
    for label, model in (("1B", LLAMA_1B), ("8B", LLAMA_8B)):
        parameters = num_parameters(declare(model, BF16))
        weight_bytes = parameters * BF16.itemsize
        # Of the embedding a step reads its tokens' rows; tied, it is the head too.
        embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        read_bytes = weight_bytes - embedding * BF16.itemsize
        head = model.vocab_size * model.hidden_size
        heads = model.layers[0].mixer  # as those of every layer
        for shape, context in STEPS:
            rows, chunk = _rows_and_chunk(shape)
            kv_bytes = (rows + bool(chunk)) * context * kv_bytes_per_token(model, BF16)
            linear = 2 * shape.num_tokens * (parameters - embedding - head)
            linear += 2 * shape.num_rows * head
            pairs = (shape.num_tokens * context - _triangle(chunk)) * 4 * model.num_layers
            steps = shape.num_iterations
            yield Case(
                name=f"step {label} {shape} x {context}",
                lower=functools.partial(lower_step, model, shape, context),
                bytes_moved=steps * (read_bytes + kv_bytes),
                flops=steps * (linear + pairs * heads.num_heads * heads.head_dim),
                attention=Attention(
                    rows=rows,
                    chunk=chunk,
                    context=context,
                    seen=context,
                    num_heads=heads.num_heads,
                    num_kv_heads=heads.num_kv_heads,
                    head_dim=heads.head_dim,
                    page_size=PAGE,
                    itemsize=BF16.itemsize,
                    kv_dtype=BF16,
                ),
                num_layers=model.num_layers,
                other=Moved(read_bytes + _activation_bytes(model, shape), linear),
                num_iterations=steps,
                resident_bytes=weight_bytes + kv_bytes,
                weight_bytes=weight_bytes,
                shape=shape,
            )


def _triangle(chunk: int) -> int:
    """Pairs of a chunk's queries and its own later keys."""
    return chunk * (chunk - 1) // 2


def _rows_and_chunk(shape: StepShape) -> tuple[int, int]:
    """A mixed program of 2,048 tokens is one chunk; the others' rows all decode, as does T = S."""
    if shape.is_decode:
        return shape.num_rows, 0
    if shape.num_tokens == 2048:
        return 0, 2048
    return shape.num_rows, shape.num_tokens - shape.num_rows


def _activation_bytes(model: ModelConfig, shape: StepShape) -> float:
    """Between products, read and written once: residuals and norms, qkv, gate and up, logits."""
    attention, mlp = model.layers[0].mixer, model.layers[0].feed_forward
    heads = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    layer = 4 * model.hidden_size + heads + 3 * mlp.intermediate_size
    hidden = model.num_layers * shape.num_tokens * layer * BF16.itemsize
    return 2 * (hidden + shape.num_rows * model.vocab_size * 4)


def lower_step(
    model: ModelConfig, shape: StepShape, context: int, mesh: Mesh, backend: Backend
) -> Any:
    pages = context // PAGE
    num_groups = len(model.cache_layout().groups)
    spec = step_spec(shape, pages, PAGE, num_groups)
    decoding, chunk = _rows_and_chunk(shape)
    rows = decoding + bool(chunk)
    model = model.with_tensor_parallel(mesh.size)
    layout = StateLayout(
        config=model,
        mesh=mesh,
        num_slots=shape.num_rows,
        num_pages=rows * pages * num_groups + 1,
        page_size=PAGE,
        table_pages=pages,
        dtype=BF16,
        pools=pool_layouts(model, backend, PAGE),
    )
    step = jax.jit(
        make_step(model, spec, mesh=mesh, kernels=Kernels.for_devices(mesh, backend)),
        donate_argnums=1,
    )
    vector = jax.ShapeDtypeStruct((spec.size,), jnp.int32, sharding=NamedSharding(mesh, P()))
    weights = abstract(abstract_weights(model, BF16, mesh))
    return step.lower(weights, layout.abstract(), vector)
