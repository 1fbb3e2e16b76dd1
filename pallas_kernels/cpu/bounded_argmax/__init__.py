"""The likeliest token without most of its rivals' logits, on a CPU that multiplies bfloat16 fast.

Of a vocabulary's logits, a float32 product as wide as no other of a model, a greedy row wants one
place. So the product is made in bfloat16, with what its roundings can have taken away at the most
added to each logit: by the Cauchy-Schwarz inequality, of x' and w' rounded from x and w,

    x · w ≤ x' · w' + |x| |w - w'| + |x - x'| |w'|

and these two products of norms are two more inputs of the same product (`LogitBounds`). The largest
such bound of each block of `BLOCK` tokens is kept, nothing else. Then blocks are looked at in
float32, those with the largest bounds first, until the best logit found exceeds every bound left:
usually after two to six blocks of three thousand. The token is that of the float32 logits, to the
last bit but for the order of sums.

Source: bounds first and few products after is Teflioudi, Gemulla, "Exact and approximate maximum
inner product search with LEMP", ACM TODS 42 (2016), there by lengths; here by roundings.

Shapes: S rows, V the vocabulary, E inputs, N blocks.
"""

from octavo.pallas_kernels.cpu.bounded_argmax.kernel import BLOCK, block_bounds, bounded_argmax
from octavo.pallas_kernels.cpu.bounded_argmax.logit_bounds import LogitBounds, make_logit_bounds
from octavo.pallas_kernels.cpu.bounded_argmax.reference import argmax_reference

__all__ = [
    "BLOCK",
    "LogitBounds",
    "argmax_reference",
    "block_bounds",
    "bounded_argmax",
    "make_logit_bounds",
]
