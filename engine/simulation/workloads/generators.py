"""Generated workloads: kinds of traffic that servers meet.

A kind is a frozen dataclass: its fields are the parameters that `--workload` takes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import ClassVar

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.simulation.workloads.bench_requests import Range
from octavo.engine.simulation.workloads.generator import Generator, Turn
from octavo.engine.simulation.workloads.prompts import Segment, stream_of
from octavo.engine.simulation.workloads.traffic import TrafficClass

MOST_ZIPF = 3.0
"""Above this a handful of documents is all that is ever chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(Generator):
    """Independent short requests.

    Attributes:
        input_len, output_len: tokens, uniform.
    """

    name: ClassVar[str] = "chat"

    input_len: Range = (16, 1024)
    output_len: Range = (16, 256)

    @property
    def max_input(self) -> int:
        return self.input_len[1]

    @property
    def max_output(self) -> int:
        return self.output_len[1]

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        lengths = rng.randint(*self.input_len), rng.randint(*self.output_len)
        return [Turn(0.0, *lengths, (), self.traffic_class())]


@dataclass(frozen=True, slots=True, kw_only=True)
class TightChat(Chat):
    """Chats that are read as they are written: short prompts, 30 ms a token.

    Attributes: as of `Chat`.
    """

    name: ClassVar[str] = "tight-chat"

    input_len: Range = (64, 512)
    output_len: Range = (200, 600)
    tpot_s: float | None = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts(Chat):
    """Chats that come in bursts: gamma waits with a coefficient of variation of 4.

    Attributes: as of `Chat`.
    """

    name: ClassVar[str] = "bursts"

    cv: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood(Chat):
    """One tenant floods the server beside one that does not.

    Attributes:
        ratio: requests of tenant `flood` to one of tenant `calm`.
    """

    name: ClassVar[str] = "flood"
    rate: ClassVar[float] = 11.0

    ratio: float = 10.0

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        name = "flood" if rng.random() * (1 + self.ratio) < self.ratio else "calm"
        (turn,) = Chat.session(self, rng, seed, index)
        return [turn._replace(traffic_class=_of_tenant(self.traffic_class(name), name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions(Generator):
    """Conversations of several turns, each with the whole history in its prompt.

    A turn arrives `think_s` (exponential, on average) after the one before it would have ended at
    a nominal pace: `pace_ttft_s` to its first token and `pace_tpot_s` a token. It does not wait for
    the true end: the traffic is open loop, and the same for every policy. The history holds the
    answers of the right lengths as the session has them, not as an engine says them; so a turn
    finds the prompt of the turn before it in the prefix cache, and that turn's answer not.

    Attributes:
        first_len: prompt tokens of the first turn, uniform.
        new_len: tokens that each further turn adds to the history, uniform.
        output_len: tokens of each answer, uniform.
        turns: of a session, uniform; it ends earlier before the turn that `max_context` forbids.
        max_context: most prompt tokens of a turn.
        think_s: between the nominal end of an answer and the next turn, on average.
        pace_ttft_s, pace_tpot_s: the nominal pace.
    """

    name: ClassVar[str] = "sessions"

    first_len: Range = (4096, 8192)
    new_len: Range = (256, 2048)
    output_len: Range = (100, 500)
    turns: Range = (4, 12)
    max_context: int = 28_672
    think_s: float = 10.0
    pace_ttft_s: float = 0.5
    pace_tpot_s: float = 0.03
    ttft_s: float | None = 2.0

    def __post_init__(self) -> None:
        Generator.__post_init__(self)
        if self.max_context < self.first_len[1]:
            raise InvalidConfigError(
                "max_context", self.max_context, f"at least first_len's {self.first_len[1]} tokens"
            )

    @property
    def max_input(self) -> int:
        return self.max_context

    @property
    def max_output(self) -> int:
        return self.output_len[1]

    @property
    def longest_session_s(self) -> float:
        turn_s = self.pace_ttft_s + self.pace_tpot_s * self.output_len[1] + 3 * self.think_s
        return self.turns[1] * turn_s

    def turns_per_session(self) -> float:
        return _mean_turns(self)

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        stream, traffic_class = stream_of("session", seed, index), self.traffic_class()
        context, now_s, turns = rng.randint(*self.first_len), 0.0, []
        for _ in range(rng.randint(*self.turns)):
            if context > self.max_context:
                break
            num_output = rng.randint(*self.output_len)
            history = (Segment(stream, context),)
            turns.append(Turn(now_s, context, num_output, history, traffic_class))
            think_s = rng.expovariate(1 / self.think_s) if self.think_s else 0.0
            now_s += self.pace_ttft_s + self.pace_tpot_s * num_output + think_s
            context += num_output + rng.randint(*self.new_len)
        return turns


@functools.lru_cache(maxsize=64)
def _mean_turns(sessions: Sessions) -> float:
    """Turns of a session in the mean of 4,000: how `max_context` cuts them has no closed form."""
    rng, count = random.Random("turns"), 4000
    return sum(len(sessions.session(rng, 0, 0)) for _ in range(count)) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents(Generator):
    """Agents whose prompts all begin with a long system prompt.

    Attributes:
        shared_len: tokens of a system prompt.
        own_len: tokens after it, uniform.
        output_len: tokens, uniform.
        num_prompts: different system prompts; each request has one of them at random.
    """

    name: ClassVar[str] = "agents"

    shared_len: int = 8192
    own_len: Range = (256, 256)
    output_len: Range = (32, 256)
    num_prompts: int = 1

    @property
    def max_input(self) -> int:
        return self.shared_len + self.own_len[1]

    @property
    def max_output(self) -> int:
        return self.output_len[1]

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        system = stream_of("system prompt", seed, rng.randrange(self.num_prompts))
        num_input = self.shared_len + rng.randint(*self.own_len)
        segments = (Segment(system, self.shared_len),)
        num_output = rng.randint(*self.output_len)
        return [Turn(0.0, num_input, num_output, segments, self.traffic_class())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval(Generator):
    """Questions behind documents: long prompts, of which those on popular documents begin alike.

    Attributes:
        instruction_len: tokens of the instruction with which all prompts begin.
        num_documents: in the collection.
        zipf: exponent of their popularity, 0 (uniform) to 3: document k is chosen as k ** -zipf.
        documents: different ones in a prompt, uniform; in the order in which they were chosen.
        document_len: tokens of a document, uniform over the collection.
        question_len, output_len: tokens, uniform.
    """

    name: ClassVar[str] = "retrieval"

    instruction_len: int = 256
    num_documents: int = 1000
    zipf: float = 1.0
    documents: Range = (1, 4)
    document_len: Range = (1024, 4096)
    question_len: Range = (16, 256)
    output_len: Range = (64, 512)
    ttft_s: float | None = 3.0

    def __post_init__(self) -> None:
        Generator.__post_init__(self)
        if self.zipf > MOST_ZIPF:
            raise InvalidConfigError("zipf", self.zipf, f"0 to {MOST_ZIPF:g}")
        if self.documents[1] > self.num_documents:
            raise InvalidConfigError(
                "documents", self.documents[1], f"at most num_documents = {self.num_documents}"
            )

    @property
    def max_input(self) -> int:
        longest = self.documents[1] * self.document_len[1]
        return self.instruction_len + longest + self.question_len[1]

    @property
    def max_output(self) -> int:
        return self.output_len[1]

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        popularity = _zipf(self.num_documents, self.zipf)
        chosen: dict[int, None] = {}
        for _ in range(rng.randint(*self.documents)):
            # Of those that are left, as popular as they are among each other.
            while True:
                document = bisect.bisect(popularity, rng.random() * popularity[-1])
                if document not in chosen:
                    break
            chosen[document] = None
        segments = [Segment(stream_of("instruction", seed), self.instruction_len)]
        segments += [self._document(seed, document) for document in chosen]
        num_input = sum(num for _, num in segments) + rng.randint(*self.question_len)
        num_output = rng.randint(*self.output_len)
        return [Turn(0.0, num_input, num_output, tuple(segments), self.traffic_class())]

    def _document(self, seed: int, number: int) -> Segment:
        stream = stream_of("document", seed, number)
        return Segment(stream, random.Random(stream).randint(*self.document_len))


@functools.lru_cache(maxsize=16)
def _zipf(count: int, exponent: float) -> list[float]:
    """Cumulated weights k ** -exponent of k = 1, …, count."""
    return list(itertools.accumulate(k**-exponent for k in range(1, count + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Generator):
    """Answers of thousands of tokens; some are read as they come, the others are batch work.

    Attributes:
        input_len: tokens, uniform.
        median, sigma: of the log-normal output length: median tokens and the logarithm's deviation.
        min_output, max_output_len: tokens between which outputs are kept.
        batch_share: of the requests, in class `batch`: low priority, due within `e2e_s`.
    """

    name: ClassVar[str] = "reasoning"

    input_len: Range = (64, 1024)
    median: int = 2500
    sigma: float = 0.6
    min_output: int = 200
    max_output_len: int = 10_000
    batch_share: float = 0.3
    ttft_s: float | None = 5.0
    tpot_s: float | None = 0.06
    e2e_s: float | None = 600.0

    def __post_init__(self) -> None:
        Generator.__post_init__(self)
        if self.max_output_len < self.min_output:
            raise InvalidConfigError(
                "max_output_len", self.max_output_len, f"at least min_output = {self.min_output}"
            )

    @property
    def max_input(self) -> int:
        return self.input_len[1]

    @property
    def max_output(self) -> int:
        return self.max_output_len

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        is_batch = rng.random() < self.batch_share
        num_input = rng.randint(*self.input_len)
        drawn = round(self.median * rng.lognormvariate(0.0, self.sigma))
        num_output = min(self.max_output_len, max(self.min_output, drawn))
        if is_batch:
            promised = TrafficClass(
                name="batch", tenant=self.tenant, e2e_target_s=self.e2e_s, priority=Priority.LOW
            )
        else:
            promised = TrafficClass(
                name=self.name, tenant=self.tenant, ttft_target_s=self.ttft_s,
                tpot_target_s=self.tpot_s,
            )  # fmt: skip
        return [Turn(0.0, num_input, num_output, (), promised)]


@functools.lru_cache(maxsize=256)
def _of_tenant(traffic_class: TrafficClass, tenant: str) -> TrafficClass:
    return replace(traffic_class, tenant=tenant)


GENERATORS: dict[str, type[Generator]] = {
    kind.name: kind
    for kind in (Chat, TightChat, Sessions, Agents, Retrieval, Reasoning, Flood, Bursts)
}
"""Kinds by name. `mix` is all of them but `chat`, in equal parts."""
