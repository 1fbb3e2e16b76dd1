"""The plain reference of attention as one program: run operation by operation, each of its fifty
would be compiled by itself for every shape, which takes most of a test's time."""

from __future__ import annotations

import jax

from octavo.pallas_kernels.ragged_paged_attention import reference

attend_reference = jax.jit(reference.attend_reference, static_argnames="params")
