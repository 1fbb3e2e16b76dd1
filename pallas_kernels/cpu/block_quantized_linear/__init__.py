"""Linear layers on a CPU whose float32 weights are read as the checkpoint's few bits.

A step of one row reads every weight once and multiplies it once, so it takes as long as reading
takes. A block-quantized checkpoint says the same numbers in a sixth of the bytes: they are
dequantized in registers, code · scale + minimum in float32, which is bit for bit what the loader
makes of them, and multiplied in float32. Only the order of the sum differs from another product's.

XLA's CPU backend compiles it to one native function, loops and all, if the call says that it is
small and not to be inlined; each loop over a block's outputs is then vectorized, given that every
row of codes is a slice of its own (sliced as one array, it is copied first) and that vectors may be
512 bits wide (`COMPILER_OPTIONS`).

For several rows the same weight is laid out in panels of `PANEL` outputs (`PanelWeight`). A panel's
block is dequantized once, into a buffer that the first cache holds, and `LANES` of its outputs are
multiplied with one row after the other: LLVM keeps half of their weights in registers for all rows,
and a row's inputs are read as operands of multiplications, one number for all lanes.
"""

from octavo.pallas_kernels.cpu.block_quantized_linear.kernel import (
    COMPILER_OPTIONS,
    block_quantized_linear,
)
from octavo.pallas_kernels.cpu.block_quantized_linear.reference import (
    block_quantized_linear_reference,
    dequantized,
)
from octavo.pallas_kernels.cpu.block_quantized_linear.weight import (
    BlockQuantizedWeight,
    PanelWeight,
    abstract_block_quantized,
    lay_out_blocks,
    make_panels,
)

__all__ = [
    "COMPILER_OPTIONS",
    "BlockQuantizedWeight",
    "PanelWeight",
    "abstract_block_quantized",
    "block_quantized_linear",
    "block_quantized_linear_reference",
    "dequantized",
    "lay_out_blocks",
    "make_panels",
]
