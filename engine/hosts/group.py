"""A group of hosts from its start on, as seen from its leader and from a follower."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.device_start import of_one_engine, start_device
from octavo.engine.engine import Engine
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform.engine_setup import EngineSetup
from octavo.engine.execution.programs.compile_cache import cache_counts, open_compile_cache
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.hosts.follower import Follower
from octavo.engine.hosts.handshake import Door, join, refusal
from octavo.engine.hosts.host_executor import FollowingExecutor
from octavo.engine.hosts.hosts_config import HostsConfig
from octavo.engine.hosts.identity import check_same, facts_of_process, facts_of_setup
from octavo.engine.hosts.leader import LOST_STATUS, Leader, end_process
from octavo.engine.hosts.leading_executor import LeadingExecutor
from octavo.engine.hosts.messages import Kind, Message
from octavo.models.loading.locate import locate
from octavo.sharding import distributed


class LeadingHosts:
    """The group, as its leader sees it.

    Args:
        leader: of the log.
        start_s: seconds in which all hosts must be ready.
    """

    def __init__(self, leader: Leader, start_s: float) -> None:
        self.leader = leader
        self._start_s = start_s

    def agree(self, setup: EngineSetup) -> int:
        """KV pages that every host has room for.

        Raises:
            InvalidConfigError: a host decided otherwise than this one.
        """
        ours, least = facts_of_setup(setup), setup.limits.num_pages
        for host_id, message in sorted(self.leader.answers(Kind.SETUP, self._start_s).items()):
            theirs = message.json()
            least = min(least, *message.numbers)
            try:
                check_same(theirs, ours, host_id)
            except InvalidConfigError as error:
                self.leader.write(refusal(error))
                raise
        self.leader.write(Message(Kind.AGREED, (least,)))
        return least

    def make_executor(self, *args: Any, **kwargs: Any) -> LeadingExecutor:
        """The leader's executor; arguments as of `DeviceExecutor`."""
        self._executor = LeadingExecutor(self.leader, *args, **kwargs)
        return self._executor

    def go_live(self, first: Sequence[StepShape]) -> None:
        """Waits until every host is ready, and begins the log.

        Args:
            first: shapes whose programs all have by then.
        """
        self.leader.answers(Kind.READY, self._start_s)
        self._executor.go_live(first)

    def read_weights(self) -> None:
        """Has followers read weights that were not kept asleep."""
        self.leader.write(Message(Kind.READ_WEIGHTS))


def lead(place: HostsConfig, config: EngineConfig) -> LeadingHosts:
    """Waits for a group's followers. Called before JAX looks for devices.

    Args:
        place: of the leader.
        config: of the engine.

    Raises:
        InvalidConfigError: a host differs from this one, or an address cannot be bound.
        HostLostError: not all hosts have come in time.
    """
    door = Door(place)
    links = door.meet_all(facts_of_process(config, locate(config.model)[0]))
    leader = Leader(links, door.commands_key, place.hosts_timeout_s, place.hosts_step_s)
    with _ended_on_failure(leader):
        _join_mesh(place, config)
    return LeadingHosts(leader, place.hosts_start_s)


def leading_engine(
    place: HostsConfig, config: EngineConfig, *, progress: bool = False
) -> AsyncEngine:
    """The engine of a group, which its leader serves. Called before JAX looks for devices.

    When the group ends, every stream ends with the reason, and a moment later the process.

    Args:
        progress: show a bar while programs compile.

    Raises: as for `lead` and `Engine`.
    """
    hosts = lead(place, config)
    with _ended_on_failure(hosts.leader):
        engine = AsyncEngine(engine=Engine(config, progress=progress, hosts=hosts))
    hosts.leader.listeners.append(engine.give_up_soon)
    return engine


@contextlib.contextmanager
def _ended_on_failure(group: Leader | Follower) -> Iterator[None]:
    """Ends the group if the block fails: the others would wait for this host.

    The process then ends with `LOST_STATUS`, without the goodbye that JAX waits for.
    """
    try:
        yield
    except BaseException:
        group.close()
        atexit.register(end_process, LOST_STATUS)
        raise


class _FollowingHosts:
    """The group, as a follower's start sees it."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def agree(self, setup: EngineSetup) -> int:
        facts = Message.of_json(Kind.SETUP, facts_of_setup(setup))
        self._follower.report(Message(Kind.SETUP, (setup.limits.num_pages,), facts.arrays))
        (num_pages,) = self._follower.answer(Kind.AGREED).numbers
        return num_pages

    def make_executor(self, *args: Any, **kwargs: Any) -> FollowingExecutor:
        self.executor = FollowingExecutor(*args, **kwargs)
        return self.executor


def follow(place: HostsConfig, config: EngineConfig) -> None:
    """Follows a group's leader until it ends the group. Called before JAX looks for devices.

    A leader that is lost ends this process.

    Raises:
        InvalidConfigError: this host differs from the leader.
        HostLostError: there is no leader.
        ModelLoadError: the checkpoint cannot be used.
    """
    assert place.host_id is not None
    link = join(place, facts_of_process(config, locate(config.model)[0]))
    follower = Follower(link, place.hosts_timeout_s)
    with _ended_on_failure(follower):
        _join_mesh(place, config)
        follow_log(follower, config)


def follow_log(follower: Follower, config: EngineConfig) -> None:
    """Follows a leader on devices that JAX sees.

    Raises: as for `follow`.
    """
    config = of_one_engine(config)
    cache_counts()
    cache = open_compile_cache(config.resolved_compile_cache_dir())
    with cache.in_use():
        hosts = _FollowingHosts(follower)
        start = start_device(config, cache, hosts=hosts)
        start.set_weights()
        start.executor.warm_up(config.warm_up)
        follower.run(hosts.executor, start.set_weights)
    start.executor.close()


def _join_mesh(place: HostsConfig, config: EngineConfig) -> None:
    """Has JAX see every host's devices.

    Raises:
        InvalidConfigError: the engine does not take all of them.
    """
    host, port = place.bind
    bind = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    distributed.initialize(
        place.coordinator, place.size, place.host_id, {}, coordinator_bind_address=bind
    )
    if config.tensor_parallel_size != jax.device_count():
        raise InvalidConfigError(
            "tensor_parallel_size",
            config.tensor_parallel_size,
            f"{jax.device_count()}, the devices of all {place.size} hosts together",
        )
