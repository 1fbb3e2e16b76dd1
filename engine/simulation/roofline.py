"""Step times of machines that are not here: what bandwidth and arithmetic allow, less what is lost.

A step reads the weights once, reads the KV that its rows attend to, and computes two operations a
weight and token plus attention; it takes the longer of the two, and a fixed cost. Of routed experts
it reads those that its tokens choose, as if by chance. It is an estimate: a profile of the real
machine is better wherever there is one.

Source: Williams, Waterman, Patterson 2009 (the roofline).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.step_time import StepWork
from octavo.models.cache_spec import RecurrentState
from octavo.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A chip's published figures.

    Attributes:
        name: of the chip.
        bytes_per_s: memory bandwidth.
        flops_per_s: dense bfloat16 arithmetic.
        memory_bytes: its memory.
        host_bytes_per_s: to the host's memory, one direction.
        link_bytes_per_s: to other chips, all links together.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    host_bytes_per_s: float
    link_bytes_per_s: float


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA's data sheets of H100 SXM and H200 SXM: dense BF16, HBM3(e), PCIe 5 ×16, NVLink 4.
        Device(name="h100", bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80e9,
               host_bytes_per_s=55e9, link_bytes_per_s=900e9),
        Device(name="h200", bytes_per_s=4.8e12, flops_per_s=989e12, memory_bytes=141e9,
               host_bytes_per_s=55e9, link_bytes_per_s=900e9),
        # Google Cloud's TPU system architecture pages, a chip each; the host link is an estimate.
        Device(name="v5e", bytes_per_s=0.819e12, flops_per_s=197e12, memory_bytes=16e9,
               host_bytes_per_s=16e9, link_bytes_per_s=200e9),
        Device(name="v5p", bytes_per_s=2.765e12, flops_per_s=459e12, memory_bytes=95e9,
               host_bytes_per_s=16e9, link_bytes_per_s=600e9),
        Device(name="v6e", bytes_per_s=1.638e12, flops_per_s=918e12, memory_bytes=32e9,
               host_bytes_per_s=32e9, link_bytes_per_s=448e9),
        Device(name="tpu7x", bytes_per_s=7.38e12, flops_per_s=2307e12, memory_bytes=192e9,
               host_bytes_per_s=32e9, link_bytes_per_s=1200e9),
    )
}  # fmt: skip


def get_device(name: str) -> Device:
    """The device called `name`.

    Raises:
        InvalidConfigError: no figures are known for it.
    """
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise InvalidConfigError("device", name, " or ".join(DEVICES)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineStepTime:
    """Step time of a model on one or several equal devices that share each layer.

    Attributes:
        device: the chip.
        num_weights: parameters that a token is multiplied by.
        num_idle_weights: parameters of the experts that a token does not choose.
        chosen_share: of the experts, those that a token chooses.
        num_layers, hidden_size: of the model.
        num_query_numbers: numbers of a token's queries, over all heads and layers.
        kv_bytes_per_token: over all caches.
        weight_bytes: a parameter.
        num_devices: that share each layer.
        bandwidth_share, flops_share: what of the published figures is reached.
        fixed_s: of every iteration: launches, sampling, synchronization.
    """

    device: Device
    num_weights: float
    num_layers: int
    hidden_size: int
    num_query_numbers: int
    kv_bytes_per_token: float
    num_idle_weights: float = 0.0
    chosen_share: float = 1.0
    weight_bytes: float = 2.0
    num_devices: int = 1
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    fixed_s: float = 1e-3

    def seconds(self, work: StepWork) -> float:
        """All iterations of a dispatch."""
        if work.num_steps == 1:
            return self._iteration(work)
        return sum(self._iteration(work.iteration(i)) for i in range(work.num_steps))

    def _iteration(self, work: StepWork) -> float:
        n = work.num_tokens
        pairs = work.decode_context + work.num_decode_rows + work.prefill_attention
        # KV is read once a chunk, not once a query.
        kv_read = work.decode_context + work.prefill_context + n
        flops = 2 * self.num_weights * n
        flops += 4 * self.num_query_numbers * pairs
        passed_by = self.num_idle_weights * (1.0 - self.chosen_share) ** max(n - 1, 0)
        num_read = self.num_weights + self.num_idle_weights - passed_by
        num_bytes = self.weight_bytes * num_read + self.kv_bytes_per_token * kv_read
        bandwidth = self.device.bytes_per_s * self.bandwidth_share * self.num_devices
        rate = self.device.flops_per_s * self.flops_share * self.num_devices
        return self.fixed_s + max(num_bytes / bandwidth, flops / rate) + self._exchange_s(n)

    def _exchange_s(self, num_tokens: int) -> float:
        """Two all-reduces a layer, of every token's activations."""
        k = self.num_devices
        if k == 1:
            return 0.0
        num_bytes = 2 * self.num_layers * num_tokens * self.hidden_size * self.weight_bytes
        return num_bytes * 2 * (k - 1) / k / self.device.link_bytes_per_s


def roofline(
    device: Device | str,
    config: ModelConfig,
    *,
    num_devices: int = 1,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
) -> RooflineStepTime:
    """The step time of a model's shapes on a device.

    Args:
        device: the chip or its name.
        config: the model.
        num_devices: that share each layer.
        weight_bytes, kv_bytes: a number of the weights, and of the KV cache.

    Raises:
        InvalidConfigError: an unknown device, or weights that do not fit.
    """
    device = get_device(device) if isinstance(device, str) else device
    num_weights = config.num_layer_weights() + config.vocab_size * config.hidden_size
    # Layers with experts are alike in all models that exist.
    num_idle_weights = config.num_idle_layer_weights()
    num_stored = num_weights + num_idle_weights
    if num_stored * weight_bytes > 0.95 * device.memory_bytes * num_devices:
        raise InvalidConfigError(
            "num_devices",
            num_devices,
            f"enough {device.name} for {num_stored * weight_bytes / 1e9:.1f} GB of weights "
            f"({device.memory_bytes / 1e9:.0f} GB each)",
        )
    return RooflineStepTime(
        device=device,
        num_weights=num_weights,
        num_idle_weights=num_idle_weights,
        chosen_share=min(layer.chosen_share for layer in config.layers),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_query_numbers=sum(
            attention.num_heads * attention.head_dim for attention in config.attentions()
        ),
        kv_bytes_per_token=kv_bytes * _numbers_per_token(config),
        weight_bytes=weight_bytes,
        num_devices=num_devices,
    )


def _numbers_per_token(config: ModelConfig) -> int:
    """Numbers that the pages of all layers hold of a token."""
    caches = config.own_caches()
    return sum(c.numbers_per_token for c in caches if not isinstance(c, RecurrentState))


def kv_capacity(model: RooflineStepTime) -> int:
    """Tokens of KV that fit beside the weights in nine tenths of the memory."""
    memory = model.device.memory_bytes * model.num_devices * 0.9
    weights = (model.num_weights + model.num_idle_weights) * model.weight_bytes
    return int((memory - weights) / model.kv_bytes_per_token)
