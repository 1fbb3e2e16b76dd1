"""Linear layers in float32 on a CPU whose matrix unit multiplies int8 (Intel's AMX).

Such a unit multiplies eight bits ten times as fast as a core's vectors multiply float32. A float32
number is, to 24 bits of the largest of its row, a sum of three int8 digits (`digits`), and of the
nine products of two numbers' digits, six matter: what the other three add is below a rounding of
the sum in float32. Sums of a digit's products are exact in int32, so errors come from the cut
alone: two to four times those of a product in float32, whose every addition rounds.

Source: Ozaki, Ogita, Oishi, Rump, "Error-free transformations of matrix multiplication by using
fast routines of matrix multiplication", Numer. Algorithms 59 (2012); on integer units Ootomo,
Ozaki, Yokota, arXiv 2306.11975. Here with a base of 254 instead of a power of two, which rounding
to the nearest digit allows: 24 bits of three digits.

XLA's own int8 products serve. A weight's digit meets all digits of x that matter for it in one
product, rows upon rows, so that each of its three bytes is packed once. The sums, six numbers for
each of the result, are to stay in a core's caches until they are added up: more than `CHUNK` rows
go in chunks.
"""

from octavo.pallas_kernels.cpu.int8_split_linear.digits import BASE, MAX_INPUTS, digits
from octavo.pallas_kernels.cpu.int8_split_linear.kernel import int8_split_linear
from octavo.pallas_kernels.cpu.int8_split_linear.reference import (
    int8_split_linear_reference,
    whole,
)
from octavo.pallas_kernels.cpu.int8_split_linear.weight import Int8SplitWeight, split_weight

__all__ = [
    "BASE",
    "MAX_INPUTS",
    "Int8SplitWeight",
    "digits",
    "int8_split_linear",
    "int8_split_linear_reference",
    "split_weight",
    "whole",
]
