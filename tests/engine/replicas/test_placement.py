"""Who gets a request: by what replicas report, and another where one has no room."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.engine.config import Role
from octavo.engine.errors import OverloadedError, UnattainableTargetError
from octavo.engine.input.input_processor import Submission
from octavo.engine.observability.load import EngineLoad
from octavo.engine.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.engine.replicas import messages
from octavo.engine.replicas.placement import Placement
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.routing.policies import POLICIES, get_route_policy
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.scheduler.standing import UNKNOWN, Standing, merge_standings
from octavo.engine.simulation.virtual_clock import VirtualClock
from tests.engine.made_requests import make_request

IDLE = UNKNOWN._replace(num_rows=32, kv_tokens=64_000, free_tokens=64_000)
BUSY = IDLE._replace(
    num_running=32, num_waiting=9, prompt_tokens=(50_000,) * len(Priority), output_tokens=9_000.0
)


def report(standing: Standing, taken_s: float = 0.0, life: int = 1) -> messages.LoadReport:
    figures: dict[str, Any] = {
        field.name: 0
        for field in dataclasses.fields(EngineLoad)
        if field.default is dataclasses.MISSING
    }
    load = EngineLoad(**figures | {"queues": {}, "steps_by_tokens": ()}, standing=standing)
    return messages.LoadReport(load, dict.fromkeys(Priority, (0.0, 0.0)), taken_s, life)


@dataclass
class FakeReplica:
    """Notes what it is sent."""

    index: int
    life: int = 1
    ready: Any = "ready"
    report: messages.LoadReport | None = None
    is_lost: bool = False
    is_quiet: bool = False
    sent: list[messages.Command] = field(default_factory=list)

    def send(self, command: messages.Command) -> int:
        self.sent.append(command)
        return self.life

    @property
    def requests(self) -> list[str]:
        return [each.submission.request_id for each in self.sent
                if isinstance(each, messages.Submit)]  # fmt: skip


class Group:
    """Two replicas that tell nothing unless they are made to."""

    def __init__(
        self, policy: str = "forecast", num_replicas: int = 2, roles: Sequence[Role] = ()
    ) -> None:
        self.clock = VirtualClock()
        self.replicas = [FakeReplica(index) for index in range(num_replicas)]
        self.placement = Placement(self.replicas, self.clock, get_route_policy(policy), roles)

    def submit(self, name: str, prompt: list[int] | None = None, **fields: Any) -> None:
        params = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.DELTA)
        request = make_request(
            name, prompt or [len(name)] * 50, 20, arrival_s=self.clock.now_s(), **fields
        )
        submission = Submission(request_id=name, prompt=None, params=params, sequences=(request,))
        self.placement.submit(submission)

    def where(self, name: str) -> int:
        found = self.placement.where(name)
        assert found is not None
        return found.index

    def tell(self, name: str, token_ids: list[int], error: Exception | None = None) -> None:
        completion = CompletionOutput(0, "", token_ids, finish_reason="failed" if error else None)
        output = RequestOutput(
            name, None, [], None, [completion], error is not None, RequestMetrics(0.0),
            error=error, engine_id=name,
        )  # fmt: skip
        self.placement.tell(output, (self.where(name), 1))

    def outcome(self, name: str) -> Exception | None:
        for transcript in self.placement.touched:
            if transcript.submission.request_id == name and transcript.finished:
                return transcript.sequences[0].request.error
        return None


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "prefix_affinity"])
def test_requests_without_targets_are_spread_though_reports_are_fresh(policy: str) -> None:
    """What was reported is not counted twice, and not forgotten either."""
    group = Group(policy)
    for number in range(24):
        group.submit(f"r{number:02}")
        group.clock.advance(0.2)
        for replica in group.replicas:
            running = IDLE._replace(num_running=len(replica.requests), output_tokens=200.0)
            replica.report = report(running, group.clock.now_s())
    counts = [len(replica.requests) for replica in group.replicas]
    assert max(counts) - min(counts) <= (12 if policy == "power_of_two" else 2), counts


def test_a_request_goes_where_others_sent_less() -> None:
    """The load that another front gave is seen in reports alone."""
    group = Group()
    group.replicas[0].report, group.replicas[1].report = report(BUSY), report(IDLE)
    for number in range(4):
        group.submit(f"r{number}")
    assert group.replicas[1].requests == ["r0", "r1", "r2", "r3"]


def test_a_report_of_an_earlier_life_is_not_heard() -> None:
    group = Group()
    group.replicas[0].report = report(IDLE)
    group.replicas[0].ready = None
    group.placement.bury((0, 1), "it fell")
    group.replicas[0].life, group.replicas[0].ready = 2, "ready"
    group.replicas[0].report = report(BUSY, 1.0, life=1)
    group.replicas[1].report = report(BUSY, 1.0)
    group.placement.begin((0, 2))
    group.submit("it")
    assert group.where("it") == 0


def test_a_replica_that_begins_anew_has_nothing_cached() -> None:
    group, prompt = Group(), [*range(1000)]
    for replica in group.replicas:
        replica.report = report(IDLE)
    group.submit("first", prompt)
    at = group.where("first")
    group.tell("first", [], UnattainableTargetError("ttft_target_s", 1.0, 2.0))
    group.submit("second", [*prompt, 1])
    assert group.where("second") == at
    group.replicas[at].ready = None
    group.placement.bury((at, 1), "it fell")
    group.replicas[at].life, group.replicas[at].ready = 2, "ready"
    group.placement.begin((at, 2))
    group.submit("third", [*prompt, 2])
    assert group.where("second") == group.where("third") == 1 - at


def test_who_is_refused_goes_to_another_once() -> None:
    group = Group()
    group.submit("it", ttft_target_s=5.0)
    first = group.where("it")
    group.tell("it", [], OverloadedError("full", 3.0))
    assert group.where("it") == 1 - first
    assert group.outcome("it") is None
    group.tell("it", [], OverloadedError("full here too", 7.0))
    assert "full here too" in str(group.outcome("it"))
    assert len(group.placement) == 0


def test_who_would_be_late_elsewhere_too_hears_the_first_refusal() -> None:
    group = Group()
    for replica in group.replicas:
        replica.report = report(BUSY)
    group.submit("it", ttft_target_s=0.1)
    group.tell("it", [], OverloadedError("full", 3.0))
    assert "full; try again in 3 s" in str(group.outcome("it"))
    assert sum(len(replica.requests) for replica in group.replicas) == 1


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ([], UnattainableTargetError("ttft_target_s", 0.1, 0.3)),
        ([5, 6], OverloadedError("shed", 1.0)),
    ],
    ids=["no idle server could", "it had begun"],
)
def test_what_no_other_would_do_better_is_told(told: list[int], error: Exception) -> None:
    group = Group()
    group.submit("it")
    if told:
        group.tell("it", told)
    group.tell("it", [], error)
    assert group.outcome("it") is error


def test_who_is_being_ended_goes_nowhere() -> None:
    group = Group()
    group.submit("it")
    at = group.where("it")
    group.placement.end("it", status=RequestStatus.CANCELLED, error=None)
    group.tell("it", [], OverloadedError("full", 3.0))
    assert not group.replicas[1 - at].requests
    assert len(group.placement) == 0


@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "both")], ids=" and ".join)
def test_a_request_leaves_at_once_where_prompts_are_computed(roles: Sequence[Role]) -> None:
    """Decoding there until a page is full would take as many steps of prompts."""
    group = Group(roles=roles)
    group.replicas[1].ready = None
    group.submit("it")
    group.replicas[1].ready = "ready"
    assert group.placement.move("it", 1)
    group.placement.take_pages(messages.PagesGiven("it", None), (0, 1))
    assert group.replicas[0].sent[-1] == messages.Release("it", waits=roles[0] == "both")


def test_replicas_may_come_later() -> None:
    group = Group(num_replicas=1)
    group.replicas[0].report = report(BUSY)
    group.submit("before")
    group.replicas.append(FakeReplica(1, report=report(IDLE)))
    group.placement.begin((1, 1))
    group.submit("after")
    assert (group.where("before"), group.where("after")) == (0, 1)


def test_several_schedulers_stand_as_one_of_their_speed() -> None:
    both = merge_standings([BUSY, IDLE])
    assert both.num_rows == 64
    assert both.prompt_tokens == BUSY.prompt_tokens
    assert both.prompt_token_s == pytest.approx(IDLE.prompt_token_s / 2)
    assert both.busy_s == 0.0
    assert both.step_s == IDLE.step_s
    assert merge_standings([BUSY]) is BUSY
