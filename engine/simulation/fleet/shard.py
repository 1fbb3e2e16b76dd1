"""Replicas that one process plays, and the processes that do so."""

from __future__ import annotations

import gc
import heapq
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from octavo.engine.routing.report import ReplicaReport
from octavo.engine.simulation.fleet.machines import Machine
from octavo.engine.simulation.fleet.messages import Cancel, Counts, Ended, Order, Submit
from octavo.engine.simulation.fleet.replica import ReplicaOptions, SimulatedReplica
from octavo.engine.simulation.workloads.traffic import Arrival

Mail = Mapping[int, Sequence[Submit | Cancel | Order]]
"""By replica, what it is sent."""


class ShardPlan(NamedTuple):
    """What a shard is made of; travels to its process.

    Attributes:
        indices: of its replicas.
        machines: of each of them.
        num_replicas: in the fleet, those that may yet be started included.
        num_up: replicas that serve from the start: the first ones.
        arrivals: of the run.
        options: what all replicas have alike.
    """

    indices: tuple[int, ...]
    machines: tuple[Machine, ...]
    num_replicas: int
    num_up: int
    arrivals: Sequence[Arrival]
    options: ReplicaOptions


class Told(NamedTuple):
    """What replicas had to tell of a while.

    Attributes:
        ended: requests that are over there, in the order in which replicas are played.
        reports: their reports.
        next_s: when the next thing happens at any of them; infinity if nothing does.
    """

    ended: list[Ended]
    reports: list[ReplicaReport]
    next_s: float


class Shard(Protocol):
    """Replicas somewhere."""

    def begin(self, until_s: float, mail: Mail) -> None:
        """Begins to play all that happens before a time."""
        ...

    def finish(self) -> Told:
        """Waits for it; what the replicas told."""
        ...

    def close(self) -> dict[int, Counts]:
        """What each replica did. The shard must not be used after it."""
        ...


class LocalShard:
    """Replicas in this process. Only those that have something to do are looked at."""

    def __init__(self, plan: ShardPlan) -> None:
        self._replicas = {
            index: SimulatedReplica(
                index, plan.num_replicas, machine, plan.arrivals, plan.options,
                is_up=index < plan.num_up,
            )
            for index, machine in zip(plan.indices, plan.machines, strict=True)
        }  # fmt: skip
        self._due = [(replica.next_s, index) for index, replica in self._replicas.items()]
        heapq.heapify(self._due)
        self._due_s = {index: next_s for next_s, index in self._due}
        self._told = Told([], [], 0.0)

    def begin(self, until_s: float, mail: Mail) -> None:
        """Plays all that happens before a time."""
        replicas, due, due_s = self._replicas, self._due, self._due_s
        for index, messages in mail.items():
            replica = replicas[index]
            for message in messages:
                replica.send(message)
            if replica.next_s < due_s[index]:
                due_s[index] = replica.next_s
                heapq.heappush(due, (replica.next_s, index))
        ended: list[Ended] = []
        reports: list[ReplicaReport] = []
        ready = set()
        while due and due[0][0] < until_s:
            next_s, index = heapq.heappop(due)
            if next_s == due_s[index]:
                ready.add(index)
        for index in sorted(ready):
            replica = replicas[index]
            replica.advance(until_s, ended, reports)
            due_s[index] = next_s = replica.next_s
            if next_s < math.inf:
                heapq.heappush(due, (next_s, index))
        self._told = Told(ended, reports, due[0][0] if due else math.inf)

    def finish(self) -> Told:
        """What the replicas told."""
        return self._told

    def close(self) -> dict[int, Counts]:
        """What each replica did."""
        return {index: replica.counts() for index, replica in self._replicas.items()}


class ProcessShard:
    """Replicas in a process of their own."""

    def __init__(self, plan: ShardPlan) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, plan), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, until_s: float, mail: Mail) -> None:
        """Has the process play all that happens before a time."""
        self._connection.send((until_s, dict(mail)))

    def finish(self) -> Told:
        """Waits for the process.

        Raises:
            Exception: what went wrong there.
        """
        found = self._connection.recv()
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Told)
        return found

    def close(self) -> dict[int, Counts]:
        """Ends the process; what each of its replicas did."""
        self._connection.send(None)
        counts = self._connection.recv()
        self._process.join()
        if isinstance(counts, BaseException):
            raise counts
        assert isinstance(counts, dict)
        return counts


def _serve(connection: Connection, plan: ShardPlan) -> None:
    """What a shard's process does."""
    try:
        shard = LocalShard(plan)
        gc.collect()
        gc.freeze()
        while (order := connection.recv()) is not None:
            shard.begin(*order)
            connection.send(shard.finish())
        connection.send(shard.close())
    except BaseException as error:
        connection.send(error)
        raise


def make_shards(plan: ShardPlan, num_processes: int) -> list[Shard]:
    """All replicas of a plan, dealt out to processes; in this one if that is to be 0."""
    if not num_processes:
        return [LocalShard(plan)]
    shards: list[Shard] = []
    for at in range(num_processes):
        part = plan._replace(
            indices=plan.indices[at::num_processes], machines=plan.machines[at::num_processes]
        )
        shards.append(ProcessShard(part))
    return shards
