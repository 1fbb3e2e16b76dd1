"""The leader's executor: whatever its devices are told, the log has followers' told as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.engine.execution.dispatched_step import DispatchedStep
from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.row_inputs import RowInputs
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.executor import TransferDone
from octavo.engine.hosts import commands
from octavo.engine.hosts.host_executor import HostExecutor, Ran, Trail
from octavo.engine.hosts.leader import Leader
from octavo.engine.hosts.messages import Kind, Message
from octavo.engine.scheduler.step_plan import PageCopy, StepResult


class LeadingExecutor(HostExecutor):
    """Plans' executor on host 0 of a group.

    Until `go_live`, every host does what a start does by itself, in the same order; from then on
    followers do what the log says. A program of the shapes behind is used when all hosts have it.

    Args:
        leader: of the group.
        *args, **kwargs: as of `DeviceExecutor`.
    """

    def __init__(self, leader: Leader, *args: Any, **kwargs: Any) -> None:
        self._leader = leader
        super().__init__(*args, **kwargs)
        self._first: frozenset[StepShape] = frozenset()
        self.programs.peers = self
        self._trail = Trail()
        self._running: deque[Ran] = deque()
        self._is_trying = False

    def go_live(self, first: Sequence[StepShape]) -> None:
        """Begins to write the log, as every host is ready.

        Args:
            first: shapes whose programs all have.
        """
        self._first = frozenset(first)
        self._leader.go_live()

    # What `CompileManager` asks of the other hosts.

    def has(self, shape: StepShape) -> bool:
        """Whether followers have a program."""
        return shape in self._first or self._leader.has_program(self.shape_numbers[shape])

    def begin(self, shape: StepShape) -> None:
        """Has followers make a program that is about to be made here."""
        self._leader.wait_until_live()
        self._write(Message(Kind.COMPILE, (self.shape_numbers[shape],)))

    # What devices are told.

    def _write(self, message: Message) -> None:
        if self._leader.is_live:
            self._leader.write(message)

    def run_step(self, shape: StepShape, vector: NDArray[np.int32]) -> Any:
        self.programs.get(shape)  # what is not there is found out before followers are told
        number = self.shape_numbers[shape]
        if self._is_trying:
            self._write(commands.step(number, vector, is_trial=True))
            return DeviceExecutor.run_step(self, shape, vector)
        self.launched.launch(number, vector)
        self._leader.launching(self.launched)
        self._write(commands.step(number, vector))
        output = DeviceExecutor.run_step(self, shape, vector)
        self._running.append(self.ran(output))
        return output

    def _try_device(self) -> None:
        self._is_trying = True
        try:
            super()._try_device()
        finally:
            self._is_trying = False

    def result(self, handle: DispatchedStep) -> StepResult:
        """As `DeviceExecutor.result`.

        Raises:
            HostsDivergedError, HostLostError: the group has ended.
        """
        with self._leader.waiting():
            result = super().result(handle)
            if handle.output is not None:
                self._trail.take(self._running.popleft())
                self._leader.check(self._trail)
        return result

    def write_row(self, slot: int, inputs: RowInputs) -> None:
        self._write(commands.row(slot, inputs))
        super().write_row(slot, inputs)

    def write_masks(self, slots: NDArray[np.int32], masks: NDArray[np.uint32]) -> None:
        self._write(commands.masks(slots, masks))
        super().write_masks(slots, masks)

    def begin_copy(self, copy: PageCopy, *, is_in: bool) -> None:
        self._write(commands.copy(copy, is_in=is_in))
        super().begin_copy(copy, is_in=is_in)

    def land_copy(self, transfer_id: int, *, ok: bool) -> None:
        self._write(Message(Kind.LAND, (transfer_id, ok)))
        super().land_copy(transfer_id, ok=ok)

    def poll_transfers(self) -> list[TransferDone]:
        """Copies that ended on every host."""
        ended = []
        for done in self._copier.ended() if self._copier is not None else ():
            ok = self._leader.copy_ended(done.transfer_id, done.ok)
            if ok is not None:
                self.land_copy(done.transfer_id, ok=ok)
                ended.append(done._replace(ok=ok))
        return ended

    def reset(self) -> None:
        """As `DeviceExecutor.reset`; what fails then ends the group."""
        try:
            super().reset()
        except Exception as error:
            raise self._leader.give_up(f"no fresh device state: {error}") from error

    def start_over(self) -> None:
        self._running.clear()
        self._trail = Trail()
        self._write(Message(Kind.RESET, (self._leader.start_over(),)))
        super().start_over()

    def sleep(self, *, keep_weights: bool) -> None:
        """As `DeviceExecutor.sleep`."""
        self._write(Message(Kind.SLEEP, (keep_weights,)))
        super().sleep(keep_weights=keep_weights)

    def wake_up(self) -> None:
        """As `DeviceExecutor.wake_up`."""
        self._running.clear()
        self._trail = Trail()
        self._write(Message(Kind.WAKE, (self._leader.start_over(),)))
        super().wake_up()

    def close(self) -> None:
        """Ends the group, and what runs behind."""
        self._leader.close()
        DeviceExecutor.close(self)
