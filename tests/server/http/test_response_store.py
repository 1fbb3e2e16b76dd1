"""The store of responses against a plain list that says what it should hold."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.server.http.responses.store import ENTRY_BYTES, ResponseStore, StoredResponse

OWNERS = ["", "tenant a", "tenant b"]
MAX_BYTES, MAX_ENTRIES, MAX_AGE_S = 8 * ENTRY_BYTES, 6, 10.0


def response(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    """A response that takes `size` bytes besides what every one takes."""
    text = json.dumps("x" * max(0, size - 8)).encode()
    return StoredResponse(
        id=name,
        previous_id=previous,
        head=b'{"id":1}',
        inputs=text[: max(0, size - 8)],
        outputs=b"",
    )


@dataclass
class Line:
    """What the list knows of a response."""

    owner: str
    stored: StoredResponse
    used_s: float


class StoreAndList(RuleBasedStateMachine):
    """Every rule does the same to both; lines stand in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.store = ResponseStore(
            max_bytes=MAX_BYTES, max_entries=MAX_ENTRIES, max_age_s=MAX_AGE_S,
            clock=lambda: self.now_s,
        )  # fmt: skip
        self.lines: list[Line] = []
        self.count = 0
        self.made: list[tuple[str, str]] = []

    def expire(self) -> None:
        self.lines = [line for line in self.lines if line.used_s >= self.now_s - MAX_AGE_S]

    def find(self, owner: str, name: str | None) -> Line | None:
        found = (line for line in self.lines if (line.owner, line.stored.id) == (owner, name))
        return next(found, None)

    def use(self, owner: str, name: str) -> tuple[list[StoredResponse], str | None]:
        chain: list[Line] = []
        wanted: str | None = name
        while (line := self.find(owner, wanted)) is not None:
            chain.insert(0, line)
            wanted = line.stored.previous_id
        for line in chain:
            line.used_s = self.now_s
            self.lines.remove(line)
            self.lines.append(line)
        return [line.stored for line in chain], wanted

    def share(self, owner: str) -> float:
        own = [line.stored.num_bytes for line in self.lines if line.owner == owner]
        return max(sum(own) / MAX_BYTES, len(own) / MAX_ENTRIES)

    def is_full(self) -> bool:
        num_bytes = sum(line.stored.num_bytes for line in self.lines)
        return num_bytes > MAX_BYTES or len(self.lines) > MAX_ENTRIES

    @rule(
        owner=st.sampled_from(OWNERS), size=st.sampled_from([8, 100, 900, 2000, 8 * ENTRY_BYTES]),
        previous=st.integers(0, 5), again=st.booleans(),
    )  # fmt: skip
    def put(self, owner: str, size: int, previous: int, again: bool) -> None:
        self.expire()
        own = [name for of, name in self.made if of == owner]
        name = own[-1] if again and own else f"resp_{self.count}"
        self.count += 1
        before = own[-1 - previous] if previous < len(own) and own[-1 - previous] != name else None
        stored = response(name, before, size)
        self.made.append((owner, name))
        if (line := self.find(owner, name)) is not None:
            self.lines.remove(line)
            if before is not None and self.leads_to(owner, before, name):
                stored = response(name, None, size)
        assert self.store.put(owner, stored) == (stored.num_bytes <= MAX_BYTES)
        if stored.num_bytes > MAX_BYTES:
            return
        self.lines.append(Line(owner, stored, self.now_s))
        self.use(owner, name)
        while self.is_full():
            owners = [
                each for each in OWNERS
                if any(line.owner == each and line.stored.id != name for line in self.lines)
            ]  # fmt: skip
            most = max(map(self.share, owners))
            # Of several with the largest share either may give up; the store has chosen.
            firsts = [
                next(line for line in self.lines if line.owner == each)
                for each in owners if self.share(each) == most
            ]  # fmt: skip
            held = {
                (each, key) for each, owned in self.store._owners.items() for key in owned.entries
            }
            gone = [line for line in firsts if (line.owner, line.stored.id) not in held]
            assert gone
            self.lines.remove(gone[0])
        assert self.find(owner, name) is not None

    def leads_to(self, owner: str, name: str | None, wanted: str) -> bool:
        while (line := self.find(owner, name)) is not None:
            name = line.stored.previous_id
        return name == wanted

    @precondition(lambda self: self.made)
    @rule(owner=st.sampled_from(OWNERS), pick=st.integers(0, 10**6))
    def read(self, owner: str, pick: int) -> None:
        self.expire()
        name = self.made[pick % len(self.made)][1]
        expected = self.use(owner, name)
        assert self.store.chain(owner, name) == expected
        found = self.store.get(owner, name)
        assert found == (expected[0][-1] if expected[0] else None)

    @precondition(lambda self: self.made)
    @rule(owner=st.sampled_from(OWNERS), pick=st.integers(0, 10**6))
    def delete(self, owner: str, pick: int) -> None:
        self.expire()
        name = self.made[pick % len(self.made)][1]
        line = self.find(owner, name)
        assert self.store.delete(owner, name) == (line is not None)
        if line is not None:
            self.lines.remove(line)

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def counts_are_of_what_is_held(self) -> None:
        held = [each for owned in self.store._owners.values() for each, _ in owned.entries.values()]
        assert self.store.num_entries == len(held) <= MAX_ENTRIES
        assert self.store.num_bytes == sum(each.num_bytes for each in held) <= MAX_BYTES
        fresh = [line for line in self.lines if line.used_s >= self.now_s - MAX_AGE_S]
        assert {line.stored.id for line in fresh} <= {each.id for each in held}
        assert all(owned.entries for owned in self.store._owners.values())


StoreAndList.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_store_holds_what_the_list_says = StoreAndList.TestCase


def test_a_response_is_its_head_and_its_output():
    stored = StoredResponse(
        id="a", previous_id=None, head=b'{"id":"a"}', inputs=b"[]", outputs=b'[{"type":"message"}]'
    )
    assert json.loads(stored.json) == {"id": "a", "output": [{"type": "message"}]}


def test_a_flood_of_one_owner_pushes_out_its_own():
    store = ResponseStore(max_bytes=10**6, max_entries=10, max_age_s=60)
    store.put("quiet", response("resp_quiet"))
    for index in range(100):
        store.put("loud", response(f"resp_{index}"))
    assert store.get("quiet", "resp_quiet") is not None
    assert store.get("loud", "resp_99") is not None
    assert store.get("loud", "resp_90") is None


def test_nothing_is_kept_by_a_store_of_no_size():
    store = ResponseStore(max_bytes=0, max_entries=10, max_age_s=60)
    assert not store.is_on
    assert not store.put("", response("resp_1"))
    assert store.get("", "resp_1") is None


@pytest.mark.parametrize("size", [1, 3])
def test_the_newest_response_is_always_kept(size):
    store = ResponseStore(max_bytes=10**6, max_entries=size, max_age_s=60)
    previous = None
    for index in range(5):
        store.put("", response(f"resp_{index}", previous))
        previous = f"resp_{index}"
        assert store.get("", previous) is not None
    chain, missing = store.chain("", "resp_4")
    assert [each.id for each in chain] == [f"resp_{index}" for index in range(5 - size, 5)]
    assert missing == f"resp_{4 - size}"
