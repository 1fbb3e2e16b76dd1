"""What a model computes, in small parts that know no brand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten

MAX_SIZE = 2**31 - 1
"""Largest size of a model, because indices on devices are int32."""
MAX_LAYERS = 4096
"""Most layers of a model: far above any that exists, and little to build in vain."""
MAX_TENSORS = 16 * MAX_LAYERS
"""Most tensors of a checkpoint: no layer has more than sixteen."""
MAX_EOS_TOKENS = 24
"""Most ids that end a text: a row on a device has room for as many."""
MIN_NUMBER, MAX_NUMBER = 2.0**-126, 3.4028234663852886e38
"""Smallest and largest positive numbers that float32 holds in full precision."""

LayerKind = Literal["global", "sliding"]
Activation = Literal["silu", "gelu_tanh"]
RopeScalingKind = Literal["linear", "llama3", "factors"]


def is_integer(value: Any, low: int, high: int) -> bool:
    """Whether a value is an integer, no flag, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    # Compared before anything converts it: an integer of 400 digits is no float.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ModelLoadError(f"{name} = {shorten(value)} is not allowed: {allowed}")


def _positive(name: str, value: Any) -> None:
    _number(name, value, MIN_NUMBER, MAX_NUMBER, "a number above 0 that float32 holds")


def _size(name: str, value: Any, high: int = MAX_SIZE) -> None:
    if not is_integer(value, 1, high):
        raise ModelLoadError(
            f"{name} = {shorten(value)} is not allowed: an integer from 1 to {high}"
        )


def _matches_head_dim(factors: tuple[float, ...], head_dim: int) -> None:
    if len(factors) != head_dim // 2:
        raise ModelLoadError(
            f"rope scaling factors = {len(factors)} numbers is not allowed: {head_dim // 2}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies beyond the context it was first trained on.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides low frequencies by
            `factor` and blends in between; "factors" divides frequency i by `factors[i]`.
        factor: the divisor.
        low_freq_factor, high_freq_factor: ends of the blend, of "llama3".
        original_max_position: context before stretching, of "llama3".
        factors: one divisor a frequency (head_dim / 2 of them), of "factors".
    """

    kind: RopeScalingKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeScalingKind):
            raise UnsupportedModelError(
                f"rope scaling = {shorten(self.kind)} is not supported: "
                f"{', '.join(get_args(RopeScalingKind))}"
            )
        _positive("rope scaling factor", self.factor)
        _positive("low_freq_factor", self.low_freq_factor)
        _positive("high_freq_factor", self.high_freq_factor)
        _size("original_max_position", self.original_max_position)
        for factor in self.factors:
            _positive("rope scaling factors", factor)
        if self.kind == "factors" and not self.factors:
            raise ModelLoadError("rope scaling factors = () is not allowed: one a frequency")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"low_freq_factor = {self.low_freq_factor} is not allowed: "
                f"below high_freq_factor ({self.high_freq_factor})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: base of the frequencies.
        scaling: how they are stretched, if at all.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _positive("rope theta", self.theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What a layer asks of attention; hashable, so that it can be a static argument.

    Attributes:
        scale: multiplies q · k.
        sliding_window: a token at position p sees positions > p - sliding_window; None sees all
            up to p.
        logit_softcap: c in c · tanh(logit / c), applied before the mask; None does not cap.
    """

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Immutable and hashable; checked on construction.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim:
            sizes. Query head h reads KV head h // (num_heads / num_kv_heads).
        rms_norm_eps: added to the mean square of every norm.
        activation: of the gate of the MLP.
        tie_word_embeddings: whether logits come from the embedding itself.
        qkv_bias, attention_out_bias, mlp_bias: which linear layers add a bias.
        qk_norm: normalize each head's query and key before the rotary embedding.
        post_norms: also normalize what attention and MLP return, before the residual sum.
        norm_offset: what the architecture adds to a norm's stored weight (1 for Gemma). Weights in
            memory already include it.
        rope: of global layers.
        local_rope: of sliding layers; None takes `rope`.
        layer_kinds: one entry a layer.
        sliding_window: see `LayerAttention`; needed if any layer is "sliding".
        attn_logit_softcap, final_logit_softcap: see `LayerAttention`; of the last logits.
        query_scale: multiplies q · k.
        embedding_scale: multiplies embeddings, rounded to their dtype first.
        max_position_embeddings: positions the model was made for.
        bos_token_id: of the beginning of a text, if there is one.
        eos_token_ids: any of these ends a text.
        checkpoint_dtype: of most weights on disk.
        kv_head_copies: adjacent KV heads that are copies of one head of the checkpoint, so that
            KV heads divide over devices; `num_kv_heads` counts the copies.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    rope: Rope = dataclasses.field(default_factory=Rope)
    local_rope: Rope | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    sliding_window: int | None = None
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    query_scale: float = 0.0
    embedding_scale: float | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"
    kv_head_copies: int = 1

    def __post_init__(self) -> None:
        for name in _SIZES:
            _size(name, getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelLoadError(
                    f"{name} = {shorten(getattr(self, name))} is not allowed: true or false"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_kv_heads = {self.num_kv_heads} is not allowed: "
                f"a divisor of num_heads ({self.num_heads})"
            )
        if self.num_kv_heads % self.kv_head_copies:
            raise ModelLoadError(
                f"kv_head_copies = {self.kv_head_copies} is not allowed: "
                f"a divisor of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim = {self.head_dim} is not allowed: an even number")
        _positive("rms_norm_eps", self.rms_norm_eps)
        if self.activation not in get_args(Activation):
            raise UnsupportedModelError(
                f"activation = {shorten(self.activation)} is not supported: "
                f"{' or '.join(get_args(Activation))}"
            )
        if not self.layer_kinds:
            object.__setattr__(self, "layer_kinds", ("global",) * self.num_layers)
        known = get_args(LayerKind)  # a tuple, which may be asked about what has no hash
        if len(self.layer_kinds) != self.num_layers or any(
            kind not in known for kind in self.layer_kinds
        ):
            raise ModelLoadError(
                f"layer_kinds = {shorten(self.layer_kinds)} is not allowed: "
                f"{self.num_layers} times global or sliding"
            )
        if "sliding" in self.layer_kinds or self.sliding_window is not None:
            _size("sliding_window", self.sliding_window)
        if self.query_scale == 0.0:
            object.__setattr__(self, "query_scale", 1.0 / math.sqrt(self.head_dim))
        _positive("query_scale", self.query_scale)
        for name in ("attn_logit_softcap", "final_logit_softcap", "embedding_scale"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        _number("norm_offset", self.norm_offset, -MAX_NUMBER, MAX_NUMBER, "a finite number")
        if not isinstance(self.checkpoint_dtype, str):
            raise ModelLoadError(
                f"checkpoint_dtype = {shorten(self.checkpoint_dtype)} is not allowed: text"
            )
        self._check_token_ids()
        if self.rope is None:
            raise ModelLoadError("rope = None is not allowed: an object")
        for rope in (self.rope, self.local_rope):
            if rope is not None and rope.scaling is not None and rope.scaling.kind == "factors":
                _matches_head_dim(rope.scaling.factors, self.head_dim)

    def _check_token_ids(self) -> None:
        if len(self.eos_token_ids) > MAX_EOS_TOKENS:
            raise ModelLoadError(
                f"eos_token_id = {shorten(self.eos_token_ids)} is not allowed: "
                f"at most {MAX_EOS_TOKENS} token ids"
            )
        named = [("eos_token_id", token_id) for token_id in self.eos_token_ids]
        if self.bos_token_id is not None:
            named.append(("bos_token_id", self.bos_token_id))
        for name, token_id in named:
            if not is_integer(token_id, 0, self.vocab_size - 1):
                raise ModelLoadError(
                    f"{name} = {shorten(token_id)} is not allowed: 0 to {self.vocab_size - 1}, "
                    "by vocab_size"
                )

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_checkpoint_kv_heads(self) -> int:
        """KV heads on disk, before copies are made."""
        return self.num_kv_heads // self.kv_head_copies

    def attention(self, layer: int) -> LayerAttention:
        """What layer `layer` asks of attention."""
        sliding = self.layer_kinds[layer] == "sliding"
        return LayerAttention(
            scale=self.query_scale,
            sliding_window=self.sliding_window if sliding else None,
            logit_softcap=self.attn_logit_softcap,
        )

    def layer_rope(self, kind: LayerKind) -> Rope:
        """The rotary embedding of layers of `kind`."""
        return self.local_rope if kind == "sliding" and self.local_rope is not None else self.rope

    def with_tensor_parallel(self, tensor_parallel_size: int) -> ModelConfig:
        """The same model with KV heads copied so that they divide over devices.

        The copies are lcm(num_kv_heads, size) / num_kv_heads, if query heads divide over the
        result. If not, nothing changes: `AxisRules.sharding` then keeps attention whole on every
        device, while MLP and vocabulary are still split.

        Raises:
            ModelLoadError: the size is below 1.
        """
        if tensor_parallel_size < 1:
            raise ModelLoadError(
                f"tensor_parallel_size = {tensor_parallel_size} is not allowed: at least 1"
            )
        original = self.num_checkpoint_kv_heads
        num_kv_heads = math.lcm(original, tensor_parallel_size)
        if self.num_heads % num_kv_heads:
            num_kv_heads = original
        return dataclasses.replace(
            self, num_kv_heads=num_kv_heads, kv_head_copies=num_kv_heads // original
        )

    def without_kv_head_copies(self) -> ModelConfig:
        """The same model with the checkpoint's own KV heads."""
        return dataclasses.replace(
            self, num_kv_heads=self.num_checkpoint_kv_heads, kv_head_copies=1
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, fit for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`.

        Raises:
            ModelLoadError: a field that is missing, unknown or malformed.
        """
        fields = dict(values)
        try:
            for name in ("rope", "local_rope"):
                if fields.get(name) is not None:
                    rope = dict(fields[name])
                    if rope.get("scaling") is not None:
                        scaling = dict(rope["scaling"])
                        scaling["factors"] = tuple(scaling.get("factors", ()))
                        rope["scaling"] = RopeScaling(**scaling)
                    fields[name] = Rope(**rope)
            for name in ("layer_kinds", "eos_token_ids"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except ModelLoadError:
            raise
        except (TypeError, ValueError) as error:
            why = shorten(str(error), limit=200)
            raise ModelLoadError(f"the stored model configuration is malformed: {why}") from error


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "kv_head_copies",
)
_FLAGS = (
    "tie_word_embeddings",
    "qkv_bias",
    "attention_out_bias",
    "mlp_bias",
    "qk_norm",
    "post_norms",
)
