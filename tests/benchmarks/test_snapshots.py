"""What snapshots of recurrent states spare: conversations want one place each."""

from __future__ import annotations

from benchmarks.snapshots import ALL, WORKLOADS, conversations, share_found


def test_conversations_in_turn_find_all_there_is_with_a_place_each() -> None:
    found = [share_found(conversations(4), rows=4, places=places, seed=1) for places in (4, ALL)]
    assert found[0] == found[1] > 0.5


def test_a_system_prompt_outlives_those_who_come_once() -> None:
    name = "32 users by and by, one system prompt"
    found = [share_found(WORKLOADS[name], rows=8, places=places, seed=1) for places in (2, ALL)]
    assert found[0] == found[1] > 0.7


def test_a_conversation_beside_a_system_prompt_needs_no_more() -> None:
    workload = conversations(3, system=1024)
    found = [share_found(workload, rows=4, places=places, seed=1) for places in (4, ALL)]
    assert found[0] > 0.95 * found[1]
