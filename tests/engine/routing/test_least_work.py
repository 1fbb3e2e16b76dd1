"""`least_work`: what was sent, what is cached and what has ended, of silent replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.routing import router as routing
from octavo.engine.routing.policies import get_route_policy
from octavo.engine.routing.prefixes import CHUNK_TOKENS, MAX_CHUNKS, prompt_chunks
from octavo.engine.routing.request import Route, RouteRequest

BOTH = (0, 1)
PREFIX = list(range(4 * CHUNK_TOKENS))


class Router(routing.Router):
    def __init__(self, num_replicas: int, most_chunks: int = MAX_CHUNKS) -> None:
        super().__init__(num_replicas, get_route_policy("least_work"), most_chunks=most_chunks)

    def choose(
        self, name: str, prompt: list[int], max_tokens: int, *, among, cache_salt: str = ""
    ) -> int:
        request = RouteRequest(
            request_id=name,
            num_prompt_tokens=len(prompt),
            chunks=prompt_chunks(prompt, cache_salt=cache_salt),
            max_tokens=max_tokens,
        )
        choice = self.route(request, 0.0, among=among)
        assert isinstance(choice, Route)
        return choice.replica

    def work(self, replica: int) -> float:
        return float(self.view.own_work[replica])


def test_requests_that_share_nothing_are_dealt_out_evenly() -> None:
    router = Router(3)
    prompts = ([n] * 100 for n in range(30))
    chosen = [router.choose(str(n), prompt, 64, among=range(3)) for n, prompt in enumerate(prompts)]
    assert [chosen.count(replica) for replica in range(3)] == [10, 10, 10]
    assert chosen[:3] == [0, 1, 2]


def test_a_long_prompt_counts_for_several_short_ones() -> None:
    router = Router(2)
    assert router.choose("long", [7] * 2000, 8, among=BOTH) == 0
    assert [router.choose(str(n), [n] * 50, 8, among=BOTH) for n in range(5)] == [1] * 5


def test_what_has_ended_counts_no_more() -> None:
    router = Router(2)
    assert router.choose("long", [7] * 2000, 8, among=BOTH) == 0
    router.ended("long")
    router.ended("long")
    assert router.work(0) == 0
    assert router.choose("next", [8] * 50, 8, among=BOTH) == 0


def after_one_each() -> Router:
    """Replica 1 has seen the prefix and replica 0 something else; both have nothing to do."""
    router = Router(2)
    assert router.choose("other", [9] * 10, 1, among=BOTH) == 0
    assert router.choose("first", [*PREFIX, 1], 1, among=BOTH) == 1
    for each in ("other", "first"):
        router.ended(each)
    return router


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    assert after_one_each().choose("second", [*PREFIX, 2], 1, among=BOTH) == 1


def test_another_salt_knows_nothing_of_it() -> None:
    assert after_one_each().choose("it", [*PREFIX, 2], 1, cache_salt="x", among=BOTH) == 0


def test_nor_does_a_replica_that_lost_its_cache() -> None:
    router = after_one_each()
    router.prefixes.forget(1)
    assert router.choose("second", [*PREFIX, 2], 1, among=BOTH) == 0


def test_a_known_beginning_is_not_waited_for_longer_than_it_spares() -> None:
    router = Router(2)
    router.choose("first", [*PREFIX, 1], 1, among=BOTH)
    router.ended("first")
    chosen = [router.choose(str(n), [*PREFIX, n, n], 64, among=BOTH) for n in range(12)]
    assert chosen[0] == 0
    assert set(chosen) == {0, 1}


def test_only_those_that_can_take_it_are_asked() -> None:
    router = Router(3)
    assert [router.choose(str(n), [n], 1, among=(2,)) for n in range(4)] == [2] * 4


def test_answers_are_expected_to_be_as_long_as_those_before() -> None:
    router = Router(2)
    for n in range(200):
        router.choose(str(n), [1], 4000, among=BOTH)
        router.ended(str(n), 1000)
    router.choose("an answer", [2], 4000, among=BOTH)
    assert router.work(0) > 2000
    router.ended("an answer")
    router.choose("a short one", [3], 10, among=BOTH)
    assert router.work(0) < 100


def test_no_more_is_remembered_than_may_be() -> None:
    router = Router(1, most_chunks=3)
    router.choose("a", [*PREFIX, 1], 1, among=(0,))
    assert router.work(0) > len(PREFIX)
    router.ended("a")
    router.choose("b", [*PREFIX, 2], 1, among=(0,))  # its first three chunks are known
    assert router.work(0) < len(PREFIX) - 2 * CHUNK_TOKENS


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 300), st.integers(1, 50)),
        max_size=60,
    )
)
def test_work_is_that_of_what_is_under_way(events) -> None:
    """Whatever comes and goes: nothing is owed by a replica without requests, or below nothing."""
    router, live = Router(3), {}
    for number, (ends, victim, num_prompt, max_tokens) in enumerate(events):
        if ends and live:
            name = sorted(live)[victim % len(live)]
            router.ended(name, max_tokens)
            del live[name]
        else:
            live[str(number)] = router.choose(
                str(number), [number % 5] * num_prompt, max_tokens, among=range(3)
            )
        for replica in range(3):
            busy = replica in live.values()
            assert (router.work(replica) > 0) == busy
