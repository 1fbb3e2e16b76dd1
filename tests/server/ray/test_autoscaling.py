"""How many servers Serve is told to keep."""

from __future__ import annotations

from types import SimpleNamespace

from octavo.server.ray.autoscaling import NUM_REQUESTS, NUM_ROWS, SaturationPolicy

RULE = "saturation:least=1,most=8,high=0.5,low=0.1,every_s=5,calm_looks=2"


def look(
    policy: SaturationPolicy, now_s: float, num_requests: list[float], target: int | None = None
) -> int:
    """What it wants of servers of 8 rows each, which have these requests."""
    names = [f"replica-{at}" for at in range(len(num_requests))]
    context = SimpleNamespace(
        current_time=now_s,
        current_num_replicas=len(names),
        target_num_replicas=len(names) if target is None else target,
        aggregated_metrics={
            NUM_REQUESTS: dict(zip(names, num_requests, strict=True)),
            NUM_ROWS: dict.fromkeys(names, 8.0),
        },
    )
    wanted, state = policy(context)
    assert state == {}
    return wanted


def test_more_servers_come_in_proportion_and_one_goes_at_a_time() -> None:
    policy = SaturationPolicy(RULE)
    assert look(policy, 100.0, [8.0, 8.0]) == 4
    assert look(policy, 105.0, [8.0, 8.0], target=4) == 4
    assert look(policy, 110.0, [2.0, 2.0, 1.0, 1.0]) == 4
    assert look(policy, 115.0, [0.0] * 4) == 4
    assert look(policy, 120.0, [0.0] * 4) == 3


def test_between_two_looks_nothing_changes() -> None:
    policy = SaturationPolicy(RULE)
    assert look(policy, 100.0, [8.0]) == 2
    assert look(policy, 104.9, [0.0, 0.0]) == 2
    assert [look(policy, 105.0 + each, [0.0, 0.0]) for each in range(5)] == [2] * 5
    assert look(policy, 110.0, [0.0, 0.0]) == 1


def test_while_no_server_tells_anything_the_number_stays() -> None:
    policy = SaturationPolicy(RULE)
    assert look(policy, 100.0, [], target=3) == 3
    assert look(policy, 101.0, [8.0, 8.0, 8.0]) == 6
