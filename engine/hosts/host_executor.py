"""An executor of one host of a group, which keeps digests of what its device was told and said.

Tokens alone would not show that a host went astray: its part of each sum is wrong, and so all hosts
read the same wrong tokens. So one digest covers the programs that were launched and their input,
and is there at once, also if the hosts then wait for each other for ever. Another one covers tokens
and, every few steps, the rows' state on this host's devices.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from octavo.engine.config import WarmUp
from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.executor import TransferDone

DIGEST_STEPS = 4
"""Steps after which followers report their digests."""
MAX_BEHIND = 4
"""Steps after such a report was due, by whose end the leader must have it: what went astray is
found at most `DIGEST_STEPS + MAX_BEHIND` steps later."""


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """A step that was queued.

    Attributes:
        tokens: on the device; each host has them whole.
        rows: digest of the rows' state after it, on the device; None of most steps.
    """

    tokens: jax.Array
    rows: jax.Array | None


class Trail:
    """A digest of all steps since the last reset.

    Attributes:
        num_steps: that it covers.
        value: 32 bits.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.value = 0
        self._rows: jax.Array | None = None

    def launch(self, number: int, vector: NDArray[np.int32]) -> None:
        """Adds the next step as it was launched: its shape's number, and its input."""
        self.value = zlib.crc32(vector, self.value ^ number)
        self.num_steps += 1

    def take(self, ran: Ran) -> None:
        """Adds what the next step came to, and rows' state after the step before it, which is there
        by now; waits for the step.

        Raises: whatever the step raised on the device.
        """
        value = zlib.crc32(np.asarray(ran.tokens), self.value)
        if self._rows is not None:
            value = zlib.crc32(np.asarray(self._rows), value)
        self.value, self.num_steps, self._rows = value, self.num_steps + 1, ran.rows

    @property
    def is_due(self) -> bool:
        """Whether its value is to be reported now."""
        return self.num_steps % DIGEST_STEPS == 0


class HostExecutor(DeviceExecutor):
    """What leader and followers have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape_numbers = {shape: number for number, shape in enumerate(self.lattice.shapes)}
        """Shapes' names on the wire."""
        self.launched = Trail()
        """Steps as they were launched since the last reset."""
        whole = NamedSharding(self._mesh, P())
        self._digest_rows = jax.jit(digest_rows, out_shardings=whole)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """As `DeviceExecutor.warm_up`."""
        super().warm_up(*args, **kwargs)
        jax.block_until_ready(self._digest_rows(self._rows()))

    def run_step(self, shape: StepShape, vector: NDArray[np.int32]) -> Any:
        """As `DeviceExecutor.run_step`."""
        self.launched.launch(self.shape_numbers[shape], vector)
        return super().run_step(shape, vector)

    def ran(self, output: Any) -> Ran:
        """What the digest takes of the step that was launched last."""
        # The step before a report: the report's own would wait for it.
        is_next_due = (self.launched.num_steps + 1) % DIGEST_STEPS == 0
        return Ran(output.tokens, self._digest_rows(self._rows()) if is_next_due else None)

    def start_over(self) -> None:
        """As `DeviceExecutor.start_over`."""
        super().start_over()
        self.launched = Trail()

    def wake_up(self) -> None:
        """As `DeviceExecutor.wake_up`."""
        super().wake_up()
        self.launched = Trail()

    def _rows(self) -> tuple[jax.Array, ...]:
        """The rows' state, which every host has whole; what is as wide as the vocabulary is left
        out."""
        state = self._state
        rows = (state.num_computed_tokens, state.max_total_tokens, state.last_token, state.stopped)
        return state.block_table, *rows, *jax.tree.leaves(state.sampling)


class FollowingExecutor(HostExecutor):
    """A follower's: what it is told comes from the log, and so does what it compiles behind."""

    def awaited(self, mode: WarmUp) -> tuple[tuple[StepShape, ...], tuple[StepShape, ...]]:
        """As `DeviceExecutor.awaited`."""
        return super().awaited(mode)[0], ()

    def try_step(self, shape: StepShape, vector: NDArray[np.int32]) -> None:
        """Runs a step that is no part of the digest, to its end."""
        jax.block_until_ready((DeviceExecutor.run_step(self, shape, vector), self._state))

    def on_copy_ended(self, tell: Callable[[TransferDone], None]) -> None:
        """Has the end on this host of the copy that was begun last told, from a thread."""
        assert self._copier is not None
        self._copier.on_ended(tell)


def digest_rows(arrays: tuple[jax.Array, ...]) -> jax.Array:
    """A digest of rows' state: uint32. The trash row, the last one, is left out.

    Each number is weighed by a hash of its place, so that numbers that change places count.

    Args:
        arrays: the block table `[groups, slots, …]`, and others `[slots, …]`.
    """
    total = jnp.uint32(0)
    for salt, array in enumerate((arrays[0].swapaxes(0, 1), *arrays[1:])):
        rows = array[:-1]
        if rows.dtype == jnp.bool_:
            rows = rows.astype(jnp.int32)
        words = lax.bitcast_convert_type(rows, jnp.uint32).reshape(-1)
        places = jnp.arange(words.size, dtype=jnp.uint32) + jnp.uint32(salt << 24)
        total += jnp.sum(_mix(words ^ _mix(places)), dtype=jnp.uint32)
    return total


def _mix(words: jax.Array) -> jax.Array:
    """A hash of each word."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)
    return words ^ (words >> 16)
