"""Linear layers whose weights and activations are eight bits wide (W8A8).

The weight is rounded once, with a scale for each output; activations are rounded in the step, with
a scale for each row; products are summed in int32 (int8) or float32 (fp8), and scaled at the end.
Under tensor parallelism a layer that contracts a split dimension sums integers over the devices, so
int8 gives the same numbers on any number of them.

XLA's own dots serve every platform. How they are best written differs (`tuning.json`): XLA's CPU
backend multiplies one row of int8 by a scalar loop, and packs a right-hand weight on every call.
Programs of one or two rows on a CPU have a weight of their own (`cpu/native_int8_linear.py`).
"""

from octavo.pallas_kernels.quantized_linear.product import (
    Formulation,
    formulations,
    quantized_linear,
    ragged_quantized_linear,
)
from octavo.pallas_kernels.quantized_linear.reference import quantized_linear_reference
from octavo.pallas_kernels.quantized_linear.rounding import QUANTIZATIONS, Quantization, quantize
from octavo.pallas_kernels.quantized_linear.weight import QuantizedWeight, quantize_weight

__all__ = [
    "QUANTIZATIONS",
    "Formulation",
    "Quantization",
    "QuantizedWeight",
    "formulations",
    "quantize",
    "quantize_weight",
    "quantized_linear",
    "quantized_linear_reference",
    "ragged_quantized_linear",
]
