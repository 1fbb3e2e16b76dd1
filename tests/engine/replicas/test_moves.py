"""Requests that move between replicas while they run: their readers notice nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.errors import InvalidConfigError
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.replicas.moves import FEW_PAGES, FIXED_S, MAX_ROUNDS, Move, MovePrices
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from octavo.engine.request import RequestStatus
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.structured.params import StructuredOutputsParams
from tests.engine.replicas.conftest import ARGUMENTS, num_cores

DELTA = RequestOutputKind.DELTA
WAIT_S = 120.0
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, output_kind=DELTA)
PARAMS: dict[str, SamplingParams] = {
    "greedy": LONG,
    "seeded": LONG.replace(temperature=0.9, seed=5),
    "final": LONG.replace(output_kind=RequestOutputKind.FINAL_ONLY),
    "cumulative": LONG.replace(output_kind=RequestOutputKind.CUMULATIVE, logprobs=2),
    "two": LONG.replace(n=2, temperature=0.9, seed=3, max_tokens=60),
    "penalized": LONG.replace(presence_penalty=0.5, repetition_penalty=1.2, logprobs=1),
    "stop": LONG.replace(stop=["zz", "q"], min_tokens=30),
    "grammar": LONG.replace(
        temperature=1.0,
        seed=2,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{40,90}"),
    ),
    "prompt logprobs": LONG.replace(prompt_logprobs=1),
}
PROMPTS = [f"{'so ' * (5 + 7 * n)}the {n}th prompt" for n in range(len(PARAMS))]


class Reader:
    """What clients have of requests."""

    def __init__(self, engine: Engine | ReplicatedEngine) -> None:
        self.engine = engine
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.kinds: dict[str, RequestOutputKind] = {}

    def submit(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> None:
        for prompt, each in zip(prompts, params, strict=True):
            now_s = self.engine.clock.now_s()
            submission = self.engine.inputs.process("it", prompt, each, now_s=now_s)
            grammar = self.engine.inputs.grammar_of(each)
            self.outputs[submission.request_id] = []
            self.kinds[submission.request_id] = each.output_kind
            object.__setattr__(submission, "grammar", grammar)
            self.engine.submit(submission)

    @property
    def ids(self) -> list[str]:
        return [*self.outputs]

    def read(self) -> None:
        for output in self.engine.step():
            self.outputs[output.engine_id].append(output)

    def read_all(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while self.engine.has_unfinished:
            assert time.monotonic() < end_s
            self.read()

    def told(self) -> list[Any]:
        """Of each request, what all its outputs say together."""
        return [_told(outputs, self.kinds[name]) for name, outputs in self.outputs.items()]


def _told(outputs: list[RequestOutput], kind: RequestOutputKind) -> Any:
    last = outputs[-1]
    assert last.finished
    assert last.error is None, last.error
    parts: list[Any] = []
    for index in range(len(last.outputs)):
        said = outputs if kind is DELTA else outputs[-1:]
        own = [each for output in said for each in output.outputs if each.index == index]
        tokens = [token for each in own for token in each.token_ids]
        reasons = [each.finish_reason for each in own if each.finish_reason]
        parts.append((tokens, "".join(each.text for each in own), reasons[-1]))
    scores = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    return parts, len(scores[0]) if scores else None


@pytest.fixture(scope="module")
def expected(alone: Engine) -> list[Any]:
    reader = Reader(alone)
    reader.submit(PROMPTS, list(PARAMS.values()))
    reader.read_all()
    return reader.told()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        pair: ReplicatedEngine = request.getfixturevalue("pair")
        end_s = time.monotonic() + WAIT_S
        while not all(replica.ready for replica in pair.replicas):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert not pair.has_unfinished
        pair.check_integrity()
        while pair.load().num_free_pages != pair.load().num_total_pages:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def shuffle(pair: ReplicatedEngine, reader: Reader, rng: random.Random) -> int:
    """Moves a request to the replica that does not have it; how many went on their way."""
    live = [each for each in reader.ids if pair.where(each) is not None]
    if not live:
        return 0
    request_id = rng.choice(live)
    where = pair.where(request_id)
    assert where is not None
    return pair.move(request_id, 1 - where.index)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_notices_that_requests_move(
    pair: ReplicatedEngine, expected: list[Any], seed: int
) -> None:
    """All kinds of requests, moved to and fro as they run."""
    rng, reader, num_begun, num_before = random.Random(seed), Reader(pair), 0, pair.moves.num_moves
    reader.submit(PROMPTS, list(PARAMS.values()))
    while pair.has_unfinished:
        reader.read()
        if rng.random() < 0.3:
            num_begun += shuffle(pair, reader, rng)
    assert reader.told() == expected
    assert num_begun >= pair.moves.num_moves - num_before > 5
    assert pair.moves.num_pages > 5
    assert pair.load().num_moved == pair.moves.num_moves
    end_s = time.monotonic() + WAIT_S
    while not (pair.load().num_pages_given and pair.load().num_pages_taken):
        assert time.monotonic() < end_s, "no report tells of pages"
        time.sleep(0.01)


@pytest.mark.parametrize("ends", ["source", "target"])
def test_a_replica_dies_in_the_midst_of_moves(
    pair: ReplicatedEngine, expected: list[Any], ends: str
) -> None:
    reader = Reader(pair)
    names = [name for name in PARAMS if name != "prompt logprobs"]
    chosen = [list(PARAMS).index(name) for name in names]
    reader.submit([PROMPTS[i] for i in chosen], [PARAMS[name] for name in names])
    while sum(len(outputs) for outputs in reader.outputs.values()) < 10:
        reader.read()
    for request_id in reader.ids:
        where = pair.where(request_id)
        if where is not None and where.index == 0:
            pair.move(request_id, 1)
    victim = pair.replicas[0 if ends == "source" else 1]
    assert victim.process_id is not None
    os.kill(victim.process_id, signal.SIGKILL)
    reader.read_all()
    assert reader.told() == [expected[i] for i in chosen]


def test_a_request_that_is_aborted_on_its_way_ends(pair: ReplicatedEngine) -> None:
    for _ in range(8):
        reader = Reader(pair)
        reader.submit([PROMPTS[3]], [LONG])
        [request_id] = reader.ids
        while not reader.outputs[request_id]:
            reader.read()
        where = pair.where(request_id)
        assert where is not None
        assert pair.move(request_id, 1 - where.index)
        assert not pair.move(request_id, 1 - where.index), "it is on its way"
        for _ in range(random.Random(0).randrange(4)):
            reader.read()
        assert pair.abort(request_id)
        reader.read_all()
        last = reader.outputs[request_id][-1]
        assert last.finished
        assert last.outputs[0].finish_reason == RequestStatus.CANCELLED.value


def test_what_cannot_move_stays(pair: ReplicatedEngine) -> None:
    assert not pair.move("nobody", 0)
    reader = Reader(pair)
    reader.submit([PROMPTS[0]], [LONG])
    [request_id] = reader.ids
    where = pair.where(request_id)
    assert where is not None
    assert not pair.move(request_id, where.index)
    reader.read_all()


def test_prompts_apart_from_decoding(
    model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one replica for each, whatever moving costs: the same tokens, and none decodes to its
    end where prompts are computed."""
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    monkeypatch.setattr(MovePrices, "is_better_apart", lambda *args: True)
    config = EngineConfig(
        model=str(model), data_parallel_size=2, replica_roles="prefill, decode", **ARGUMENTS
    )
    engine = ReplicatedEngine(config)
    reader = Reader(engine)
    reader.submit(PROMPTS, list(PARAMS.values()))
    reader.read_all()
    assert reader.told() == expected
    assert engine.moves.num_moves == len(PROMPTS)
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("prefill", "one for each of 2 replicas"),
        ("prefill,encode", "both, prefill, decode"),
        ("prefill,prefill", "one takes decode, of 2"),
        ("decode,decode", "one takes prefill"),
    ],
)
def test_roles_that_do_not_fit_are_refused(value: str, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words) as caught:
        EngineConfig(data_parallel_size=2, replica_roles=value, host_kv_memory_bytes=1 << 20)
    assert caught.value.field == "replica_roles"


def test_roles_want_a_way_for_pages() -> None:
    with pytest.raises(InvalidConfigError, match="host_kv_memory_bytes"):
        EngineConfig(data_parallel_size=2, replica_roles="prefill,both")


def test_roles_want_prefix_caching() -> None:
    with pytest.raises(InvalidConfigError, match="enable_prefix_caching"):
        EngineConfig(
            data_parallel_size=2, replica_roles="prefill,both", host_kv_memory_bytes=1 << 20,
            enable_prefix_caching=False,
        )  # fmt: skip


def test_a_move_ends_once_a_round_is_short() -> None:
    move = Move((1, 1), 0.0)
    move.take([bytes([n]) for n in range(40)])
    assert not move.is_over()
    move.take([bytes([100 + n]) for n in range(FEW_PAGES)])
    assert move.is_over()
    endless = Move((1, 1), 0.0)
    for n in range(MAX_ROUNDS):
        endless.take([bytes([n, k]) for k in range(20)])
        assert endless.is_over() == (n == MAX_ROUNDS - 1)


def test_prices_follow_what_moves_take() -> None:
    prices = MovePrices()
    move = Move((1, 1), 10.0)
    move.take([bytes([n]) for n in range(100)])
    prices.observe(move, 10.0 + FIXED_S + 0.5)
    assert prices.page_s == pytest.approx(0.005)
    assert prices.move_s(1600, 16) == pytest.approx(FIXED_S + 0.5)
