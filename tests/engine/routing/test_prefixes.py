"""What a router believes that replicas hold."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.routing.prefixes import CHUNK_TOKENS, PrefixMemory, prompt_chunks

chains = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda parts: tuple(hash(tuple(parts[: n + 1])) for n in range(len(parts)))
)
events = st.lists(
    st.tuples(st.sampled_from(("learn", "forget")), st.integers(0, 2), chains), max_size=40
)


@given(events, chains, st.integers(1, 8))
def test_what_is_known_is_what_was_learned_and_not_pushed_out(events, asked, most) -> None:
    memory, held = PrefixMemory(3, most), [[], [], []]  # oldest first
    for what, replica, chain in events:
        mine = held[replica]
        if what == "forget":
            memory.forget(replica)
            mine.clear()
            continue
        memory.learn(replica, chain)
        for chunk in reversed(chain):
            if chunk in mine:
                mine.remove(chunk)
            mine.append(chunk)
        del mine[: max(0, len(mine) - most)]
    expected = []
    for mine in held:
        known = 0
        while known < len(asked) and asked[known] in mine:
            known += 1
        expected.append(known)
    assert memory.num_known(asked).tolist() == expected
    assert [memory.num_held(replica) for replica in range(3)] == [len(mine) for mine in held]


def test_equal_beginnings_have_equal_chunks_and_no_others() -> None:
    one, other = list(range(300)), [*range(200), *range(7, 107)]
    assert prompt_chunks(one)[:3] == prompt_chunks(other)[:3]
    assert prompt_chunks(one)[3] != prompt_chunks(other)[3]
    assert len(prompt_chunks(one[: 2 * CHUNK_TOKENS])) == 1  # the last token is always computed
    roots = {prompt_chunks(one, tenant=t, cache_salt=s)[0] for t in ("", "a") for s in ("", "a")}
    assert len(roots) == 4
    assert prompt_chunks(one, tenant="a", cache_salt="bc") != prompt_chunks(
        one, tenant="ab", cache_salt="c"
    )


def test_chunks_are_equal_in_every_process() -> None:
    code = (
        "from octavo.engine.routing.prefixes import prompt_chunks;"
        "print(prompt_chunks(list(range(200)), tenant='t'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert found.stdout.strip() == str(prompt_chunks(list(range(200)), tenant="t"))
