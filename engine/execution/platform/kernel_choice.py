"""Chooses an engine's kernels, and tries them before anything relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.state import head_axis, query_axis
from octavo.models.blocks.attention import LayerAttention
from octavo.models.blocks.experts import Experts, Gate
from octavo.models.config import ModelConfig
from octavo.pallas_kernels.ragged_paged_attention import Backend
from octavo.pallas_kernels.ragged_paged_attention.backends import AttentionShape, choose_backend
from octavo.pallas_kernels.routed_experts import ExpertBackend, backend_for
from octavo.pallas_kernels.tuning import check_tables
from octavo.sharding.rules import DEFAULT_RULES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which implementations a model's steps are compiled with.

    Attributes:
        attention: of all layers' attention.
        experts: of all layers' routed experts.
    """

    attention: Backend
    experts: ExpertBackend

    @classmethod
    def for_devices(cls, mesh: Mesh, attention: Backend) -> Kernels:
        """The attention that is given, and what is fastest on a mesh's devices for all else."""
        device = mesh.devices.flat[0]
        return cls(attention=attention, experts=backend_for(device.platform, device.device_kind))


def choose_attention(
    requested: str,
    model: ModelConfig,
    mesh: Mesh,
    *,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    page_size: int,
    max_tokens: int,
) -> Backend:
    """The backend for `--attention-backend` on this mesh.

    A Pallas kernel is compiled for a small batch in the heads and pages of each of the model's
    layers, as far as they differ, and its numbers are compared with the reference's: what a device
    does not do rightly is found here and never in a step. "auto" then falls back to XLA with a
    warning. All layers have the same backend.

    Args:
        requested: the engine's argument.
        dtype: of activations.
        kv_dtype: of KV.
        page_size: tokens.
        max_tokens: most tokens of a step.

    Raises:
        InvalidConfigError: the named backend cannot serve the model on this device, or does not
            agree with the reference there; a table of block sizes that cannot be used.
    """
    device = mesh.devices.flat[0]
    check_tables()
    backend: Backend = "xla"
    layers = dict.fromkeys(
        (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.asked)
        for attention in model.attentions()
    )
    shapes = []
    for num_heads, num_kv_heads, head_dim, asked in layers:
        shape = AttentionShape(
            num_heads=num_heads // _split(query_axis(num_heads, num_kv_heads, mesh), mesh),
            num_kv_heads=num_kv_heads // _split(head_axis(num_kv_heads, mesh), mesh),
            head_dim=head_dim,
            value_size=asked.value_size,
            attention_chunk=asked.attention_chunk,
            page_size=page_size,
            max_tokens=max_tokens,
            q_dtype=dtype,
            kv_dtype=kv_dtype,
        )
        shapes.append((shape, asked))
    for shape in dict.fromkeys(shape for shape, _ in shapes):
        backend = choose_backend(
            requested, shape, platform=device.platform, device_kind=device.device_kind
        )
        if backend in ("xla", "reference"):
            return backend  # one layer that a kernel cannot take, and none gets it
    for shape, asked in shapes:
        problem = _problem(backend, shape, asked)
        if problem is None:
            continue
        if requested != "auto":
            raise InvalidConfigError("attention_backend", requested, f"xla: here {problem}")
        logger.warning("attention_backend=%s is not used, xla is: %s", backend, problem)
        return "xla"
    return backend


def _split(axis: str | None, mesh: Mesh) -> int:
    """Parts that a mesh axis cuts an array in; None cuts none."""
    return 1 if axis is None else int(mesh.shape[axis])


def choose_experts(model: ModelConfig, mesh: Mesh, *, dtype: jnp.dtype) -> ExpertBackend:
    """The implementation of routed experts on this mesh.

    A Pallas kernel is compared with the ragged products in the widths of each kind of experts that
    the model has; where it fails or differs, the ragged products are used, with a warning.

    Args:
        model: as sharded.
        dtype: of activations.
    """
    chosen = Kernels.for_devices(mesh, "xla").experts
    kinds = dict.fromkeys(
        layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)
    )
    if chosen != "mosaic_gpu" or dtype != jnp.bfloat16:
        return chosen  # what XLA compiles, or what the kernel leaves to it
    for experts in kinds:
        problem = _expert_problem(chosen, experts, model.hidden_size, mesh)
        if problem is not None:
            logger.warning("the kernel %s of routed experts is not used: %s", chosen, problem)
            return "ragged"
    return chosen


def _problem(backend: Backend, shape: AttentionShape, asked: LayerAttention) -> str | None:
    """What is wrong with a backend on the device at hand; None if nothing is."""
    # Imported here: a CPU never needs it.
    from octavo.pallas_kernels.ragged_paged_attention import AttentionParams
    from octavo.pallas_kernels.ragged_paged_attention.self_check import check_backend

    params = AttentionParams(
        scale=asked.scale,
        sliding_window=asked.sliding_window,
        logit_softcap=asked.logit_softcap,
    )
    return _tried(lambda: check_backend(backend, shape, params, has_sinks=asked.has_sinks))


def _expert_problem(
    backend: ExpertBackend, experts: Experts, hidden_size: int, mesh: Mesh
) -> str | None:
    """What is wrong with a backend on the device at hand; None if nothing is."""
    from octavo.pallas_kernels.routed_experts.self_check import check_experts

    shape = (experts.router.num_experts, hidden_size, experts.intermediate_size)
    # Whole experts, or a part of each one's features.
    sharding = DEFAULT_RULES.sharding(mesh, ("expert", "embed", "mlp"), shape)
    width = sharding.shard_shape(shape)[2]
    gate = Gate(experts.activation, experts.gate_limit) if experts.gated else Gate("relu")
    return _tried(lambda: check_experts(backend, hidden_size, width, gate, has_biases=experts.bias))


def _tried(check: Callable[[], float | None]) -> str | None:
    """What a check of a kernel against its reference found; None if all is well."""
    try:
        worst = check()
    except InvalidConfigError:
        raise  # a table of block sizes: the user's to mend
    except Exception as error:  # whatever a compiler or a device may raise
        logger.debug("a kernel was tried", exc_info=True)
        return f"it fails with {type(error).__name__}: {str(error)[:200]}"
    return None if worst is None else f"it differs from the reference by {worst:.3g}"
