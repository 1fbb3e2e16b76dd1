"""Tenants' counters, their lines, and whose turn is next."""

from __future__ import annotations

import random

import pytest

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.request import Priority
from octavo.engine.scheduler.fairness import TenantCounters
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.step_time_model import StepTimeModel
from octavo.engine.scheduler.tenant_lines import Kind, TenantLines

STEP_S = 0.05


def constant_machine(token_edges=(16,)):
    return StepTimeModel(token_edges, fixed_s=STEP_S, decode_row_s=0.0, prefill_token_s=0.0)


@pytest.fixture
def counters():
    return TenantCounters()


@pytest.fixture
def entry(fakes, counters):
    kv = KVManager(num_pages=2, page_size=4, enable_prefix_caching=False)
    numbers = iter(range(10_000))

    def make(tenant, *place, priority=Priority.NORMAL):
        number = next(numbers)
        request = fakes.request(str(number), tenant=tenant, priority=priority)
        made = LiveRequest(
            request=request, number=number, pages=kv.open(request), tenant=counters.enter(tenant)
        )
        made.place = place
        return made

    return make


class TestCounters:
    def test_each_output_token_counts_twice(self, counters):
        a = counters.enter("a")
        counters.serve(a, 100, 10)
        assert counters.served[a] == 120
        counters.enter("b")
        counters.serve_rows([a, a], [3, 1])
        assert counters.served[a] == 128

    def test_a_tenant_alone_is_counted_like_one_of_several(self, counters):
        a = counters.enter("a")
        counters.serve_rows([a] * 5)
        counters.enter("b")
        counters.serve_rows([a] * 5)
        assert counters.served[a] == 20

    def test_a_tenant_that_begins_to_wait_is_level_with_the_least_served(self, counters):
        a, b = counters.enter("a"), counters.enter("b")
        counters.serve(a, 100, 0)
        counters.begin_to_wait(b, least=80.0)
        assert counters.served[b] == 80
        counters.begin_to_wait(a, least=80.0)
        assert counters.served[a] == 100  # what it had more than others is not forgiven

    def test_where_none_waits_the_level_is_that_of_the_last_that_did(self, counters):
        a, b = counters.enter("a"), counters.enter("b")
        counters.begin_to_wait(a, None)
        counters.waits_last("a")
        counters.serve(a, 70, 0)
        counters.begin_to_wait(b, None)
        assert counters.served[b] == 70

    def test_tenants_that_come_and_go_are_forgotten_but_not_those_that_owe(self, counters):
        heavy = counters.enter("heavy")
        counters.serve(heavy, 1_000_000, 0)
        counters.leave("heavy")
        for number in range(5_000):
            counters.enter(str(number))
            counters.leave(str(number))
        assert len(counters.served) <= 4_096
        assert counters.enter("heavy") == heavy
        assert counters.served[heavy] == 1_000_000


class TestTurns:
    def order(self, lines, token_s=1.0, **only):
        return [entry.number for _, entry in lines.in_turn(token_s, **only)]

    def test_the_least_served_tenant_comes_first_and_within_it_the_earliest(self, counters, entry):
        lines = TenantLines(counters)
        flood = [entry("flood", float(second)) for second in range(3)]
        late = [entry("small", 100.0), entry("small", 99.0)]
        for waiting in (*flood, *late):
            lines.insert(waiting, Kind.OPEN)
        counters.serve(flood[0].tenant, 1, 0)
        assert self.order(lines) == [4, 3, 0, 1, 2]

    def test_a_turn_follows_the_counters_while_requests_wait(self, counters, entry):
        lines = TenantLines(counters)
        a, b = [entry("a", float(n)) for n in range(3)], [entry("b", float(n)) for n in range(3)]
        for waiting in (*a, *b):
            lines.insert(waiting, Kind.OPEN)
        got = []
        for _, waiting in lines.in_turn(1.0):
            lines.remove(waiting)
            counters.serve(waiting.tenant, 10 if waiting in a else 4, 0)
            got.append("a" if waiting in a else "b")
        # Counters before each: 0:0, 10:0, 10:4, 10:8, 10:12, 20:12
        assert got == ["a", "b", "b", "b", "a", "a"]

    def test_a_lead_is_worth_seconds_where_something_is_due(self, counters, entry):
        lines = TenantLines(counters)
        ahead, level = entry("ahead", 5.0), entry("level", 7.0)
        for waiting in (ahead, level):
            lines.insert(waiting, Kind.DUE)
        counters.serve(ahead.tenant, 100, 0)
        assert self.order(lines, 0.01) == [0, 1]
        assert self.order(lines, 0.03) == [1, 0]

    def test_pinned_requests_come_first_and_demoted_ones_last_whatever_the_counters(
        self, counters, entry
    ):
        lines = TenantLines(counters)
        kinds = {
            Kind.DEMOTED: entry("least", float("inf"), 0.0),
            Kind.OPEN: entry("most", 3.0),
            Kind.PINNED: entry("most", float("-inf"), 1.0),
        }
        for kind, waiting in kinds.items():
            lines.insert(waiting, kind)
        counters.serve(kinds[Kind.OPEN].tenant, 1000, 0)
        assert self.order(lines) == [2, 1, 0]

    def test_a_demoted_request_comes_after_every_running_prompt_that_is_not(self, counters, entry):
        lines = TenantLines(counters)
        lines.insert(entry("a", float("inf"), 3.0), Kind.DEMOTED)
        ahead = entry("b", float("inf"), 2.0)
        lines.insert(ahead, Kind.DEMOTED)
        counters.serve(ahead.tenant, 9, 0)
        turns = list(lines.in_turn(1.0))
        assert [entry.number for _, entry in turns] == [0, 1]
        prompt = ((1e9, 1e9), 7)  # of another tenant, far ahead
        assert all(turn > prompt for turn, _ in turns)

    def test_the_first_of_a_class_is_by_turn_too(self, counters, entry):
        lines = TenantLines(counters)
        for tenant, place in (("b", 2.0), ("a", 1.0)):
            for priority in (Priority.HIGH, Priority.LOW):
                waiting = entry(tenant, place, priority=priority)
                lines.insert(waiting, Kind.OPEN)
        counters.serve(waiting.tenant, 1, 0)
        assert self.order(lines, priority=Priority.LOW) == [1, 3]

    @pytest.mark.parametrize("seed", range(20))
    def test_it_is_the_order_of_a_sorted_list_of_heads(self, counters, entry, seed):
        """Against the definition, with requests that come, leave and are passed over."""
        rng = random.Random(seed)
        lines, waiting = TenantLines(counters), {}
        for _ in range(120):
            if waiting and rng.random() < 0.4:
                gone = rng.choice(list(waiting))
                lines.remove(gone)
                del waiting[gone]
            else:
                kind = rng.choice(list(Kind))
                place = (float(rng.randrange(9)), float(rng.randrange(3)))
                if kind is Kind.PINNED:
                    place = (float("-inf"), place[1])
                elif kind is Kind.DEMOTED:
                    place = (float("inf"), *place)
                made = entry(rng.choice("abc"), *place, priority=rng.choice(list(Priority)))
                lines.insert(made, kind)
                waiting[made] = kind
            counters.serve(rng.randrange(1 + max(e.tenant for e in waiting) if waiting else 1),
                           rng.randrange(9), 0)  # fmt: skip
            lines.check_integrity(list(waiting))
            assert self.order(lines, 0.5) == by_definition(waiting, counters, 0.5)


def by_definition(waiting, counters, token_s):
    """Entry by entry: the least claim among the heads of all lines."""
    left, order = dict(waiting), []
    # The level is that of the tenants that wait, passed over or not.
    level = min((counters.served[entry.tenant] for entry in waiting), default=0.0)
    while left:
        heads = {}
        for entry, kind in left.items():
            name = (entry.tenant, entry.request.priority, kind)
            if name not in heads or (entry.place, entry.number) < heads[name][:2]:
                heads[name] = (entry.place, entry.number, entry, kind)
        open_s = min((h[0][0] for h in heads.values() if h[3] is Kind.OPEN), default=0.0)

        def claim(head, open_s=open_s):
            place, number, entry, kind = head
            lead_s = (counters.served[entry.tenant] - level) * token_s
            base_s = open_s if kind is Kind.OPEN else 0.0 if kind is Kind.DEMOTED else place[0]
            return (kind is Kind.DEMOTED, base_s + lead_s, place, number)

        chosen = min(heads.values(), key=claim)[2]
        order.append(chosen.number)
        del left[chosen]
    return order


class TestScheduler:
    def test_output_tokens_are_charged_as_they_are_produced(self, drive, request_of):
        driver = drive(policy="auto", enable_prefix_caching=True)
        served = driver.scheduler._table.tenants.served
        request = driver.add(request_of("a", [1] * 8, 8, tenant="a"))
        other = driver.add(request_of("b", [2] * 8, 2, tenant="b"))
        while not request.status.is_finished or not other.status.is_finished:
            driver.turn()
            started = request.metrics.first_scheduled_s is not None
            assert served[0] == 8 * started + 2 * len(request.output_token_ids)
        driver.add(request_of("again", [1] * 8, 2, tenant="a"))
        before = served[0]
        driver.drain()
        assert served[0] < before + 8 + 2 * 2  # cached prefix tokens cost nothing

    def test_a_request_of_a_tenant_ahead_waits_behind_one_that_came_later(self, drive, request_of):
        driver = drive({"max_num_seqs": 1}, policy="auto", enable_prefix_caching=False)
        for number in range(3):
            driver.add(request_of(f"a{number}", [number] * 8, 6, tenant="a", arrival_s=0.0))
        driver.turn()
        driver.add(request_of("b", [9] * 8, 6, tenant="b", arrival_s=1.0))
        driver.drain()
        begun = [r.request.request_id for p in driver.plans for r in p.prefill_rows if r.is_new]
        assert begun == ["a0", "b", "a1", "a2"]

    def test_who_is_furthest_ahead_gives_its_pages_up_first(self, drive, request_of):
        """The small tenant's request came last, and by arrival alone would give way."""
        driver = drive(
            {"num_pages": 13, "max_num_seqs": 4}, policy="auto", enable_prefix_caching=False
        )
        for number in range(2):
            driver.add(request_of(f"a{number}", [number] * 14, 20, tenant="a", arrival_s=0.0))
        for _ in range(3):
            driver.turn()
        small = driver.add(request_of("b", [9] * 4, 20, tenant="b", arrival_s=1.0))
        driver.drain()
        assert driver.scheduler.load().num_preemptions > 0
        assert small.metrics.num_preemptions == 0

    def test_other_policies_than_auto_and_slo_know_no_turns(self):
        named = {name for name in ("auto", "slo", "fcfs", "edf", "priority", "sjf")
                 if get_policy(name).turns is not None}  # fmt: skip
        assert named == {"auto", "slo"}
