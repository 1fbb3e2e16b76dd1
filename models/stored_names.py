"""What a family's checkpoints call the tensors of a layer, where it is not what most call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.tensor_layouts import Tensor

_KINDS = (".weight", ".bias")


@dataclass(frozen=True, slots=True)
class Fused:
    """One stored tensor that holds several: the rows of the first, then those of the next.

    Attributes:
        name, gguf: of the stored tensor, without ".weight" and ".bias".
        parts: the common names of what it holds.
    """

    name: str
    gguf: str
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names("fused", (self.name, self.gguf, *self.parts))


@dataclass(frozen=True, slots=True)
class StoredNames:
    """Names on disk, without ".weight" and ".bias".

    Attributes:
        renamed: a common name, and the one that Hugging Face's files of the family have for it.
        fused: tensors that hold several of the common ones.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    fused: tuple[Fused, ...] = ()

    def __post_init__(self) -> None:
        for pair in self.renamed:
            _check_names("renamed", pair)
            if len(pair) != 2:
                raise ModelLoadError(f"renamed = {shorten(pair)} is not allowed: pairs of names")

    def resolve(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """The tensors of a layer as they are stored, by their common names."""
        common = {tensor.name: tensor for tensor in tensors}
        stored = dict(common)
        for old, new in self.renamed:
            for kind in _KINDS:
                if old + kind in common:
                    stored[old + kind] = dataclasses.replace(common[old + kind], name=new + kind)
        for fused in self.fused:
            for kind in _KINDS:
                parts = [common[part + kind] for part in fused.parts if part + kind in common]
                num_rows = sum(part.shape[0] for part in parts)
                first_row = 0
                for part in parts:
                    stored[part.name] = dataclasses.replace(
                        part,
                        name=fused.name + kind,
                        gguf=fused.gguf + kind,
                        first_row=first_row,
                        stored_rows=num_rows,
                    )
                    first_row += part.shape[0]
        return stored


def _check_names(field: str, names: tuple[str, ...]) -> None:
    if not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{field} = {shorten(names)} is not allowed: names of tensors")


COMMON = StoredNames()
"""What Llama's files call them."""
FUSED_QKV = Fused(
    "self_attn.qkv_proj", "attn_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
)
FUSED_GATE_UP = Fused("mlp.gate_up_proj", "ffn_up", ("mlp.gate_proj", "mlp.up_proj"))
