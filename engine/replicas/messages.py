"""What an engine of several replicas and the processes of these tell each other.

Each side writes pickles into a socket pair that nobody else has. A process is sent `Start` and then
commands; it answers with `Building` and `Ready`, or with `NotBuilt`, and then with news.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.input.input_processor import Submission
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv_transfer.page_batch import PageBatch
from octavo.engine.observability.load import EngineLoad
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.pooler import Pooler
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.sampling_defaults import SamplingDefaults
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.config import ModelConfig

PROBE_TOKENS = 1024
"""Prompt tokens of the larger request whose first token each load report predicts."""

# To a replica.


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message.

    Attributes:
        config: engine arguments; `data_parallel_size` is how many replicas there are.
        cores: that the process keeps to on a CPU; none where there are fewer cores than replicas.
        host_memory_bytes: of the host's memory that is its own; None where the host does not say.
        log_level: records below it are not told.
    """

    config: EngineConfig
    cores: tuple[int, ...]
    host_memory_bytes: int | None
    log_level: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A checked submission; its grammar, which cannot be sent, is compiled again."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a submission; see `Engine.abort`."""

    request_id: str
    status: RequestStatus
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Release:
    """Has a replica let go of a submission, for another to go on with. Answered by `PagesGiven`
    with the pages that came to be meanwhile, and by `Returned` once they are given; by nothing if
    it has ended.

    Attributes:
        request_id: of the submission.
        known: names of pages that are not wanted.
        waits: whether it is decoded until hardly any of its tokens are in no full page.
    """

    request_id: str
    known: frozenset[PageHash] = frozenset()
    waits: bool = True


@dataclass(frozen=True, slots=True)
class GivePages:
    """Asks for the pages of a submission: answered by `PagesGiven`, again and again, until there
    are no more.

    Attributes:
        request_id: of the submission.
        known: names of those that are not wanted.
    """

    request_id: str
    known: frozenset[PageHash]


@dataclass(frozen=True, slots=True)
class TakePages:
    """Gives pages to a replica. What it is sent later finds them."""

    batch: PageBatch


class Question(enum.Enum):
    """What an `Ask` is for: a method of `Engine` without arguments."""

    FLUSH_PREFIX_CACHE = "flush_prefix_cache"
    CHECK_INTEGRITY = "check_integrity"
    PREPARE_GRAMMARS = "prepare_grammars"
    WAIT_UNTIL_COMPILED = "wait_until_compiled"
    SCHEDULES = "schedules"


@dataclass(frozen=True, slots=True)
class Ask:
    """Calls a method; answered by `Answer`, which may take long where it waits."""

    question: Question


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the process."""


Command = Submit | Abort | Release | GivePages | TakePages | Ask | Stop

# From a replica.


@dataclass(frozen=True, slots=True)
class Building:
    """A program is there; see `on_program` of `Engine`."""

    program: str
    seconds: float
    was_cached: bool
    num_done: int
    num_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine serves.

    Attributes:
        platform, num_devices: what it sees: "cpu", "gpu" or "tpu", and how many.
        model_config, model_name, dtype, limits, tokenizer: as those of `Engine`.
        eos_token_ids: the tokenizer's and the model's.
        sampling_defaults: of the model.
        pooler, generates: as those of `InputProcessor`.
        compile_s: seconds of each program.
    """

    platform: str
    num_devices: int
    model_config: ModelConfig
    model_name: str
    dtype: str
    limits: StepLimits
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    pooler: Pooler | None
    generates: bool
    compile_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The engine could not be built."""

    error: Exception


@dataclass(frozen=True, slots=True)
class News:
    """What submissions have to tell, each only what is new, without their prompts."""

    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Returned:
    """A submission that the replica has no more and did not end: another goes on with it.

    Attributes:
        request_id: of the submission.
        cause: as a phrase.
        has_died: whether the replica was lost with it, and it may be to blame; else it was refused,
            as by a server that is going away.
    """

    request_id: str
    cause: str
    has_died: bool


@dataclass(frozen=True, slots=True)
class PagesGiven:
    """Pages of a submission that others asked for.

    Attributes:
        request_id: of the submission.
        batch: the next of them; None if there are no more.
    """

    request_id: str
    batch: PageBatch | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the replica is.

    Attributes:
        load: with the first token of a request of one prompt token predicted.
        ttft_s: by class, seconds to the first token of a prompt of one and of `PROBE_TOKENS`.
        taken_s: when, on the clock of requests. Those that were sent by then are in the figures.
        life: of the replica that it is about.
    """

    load: EngineLoad
    ttft_s: Mapping[Priority, tuple[float, float]]
    taken_s: float = 0.0
    life: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """The process lives: told every now and then, from its start on, by a thread of its own.

    Attributes:
        stuck_s: how long the engine has been in one turn; 0 while it has no work.
    """

    stuck_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the method returned, or raised."""

    question: Question
    value: Any
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    """A log record, ready to be pickled."""

    record: logging.LogRecord


@dataclass(frozen=True, slots=True)
class Broke:
    """The engine broke; the process ends."""

    error: Exception


Message = (
    Beat | Building | Ready | NotBuilt | News | Returned | PagesGiven | LoadReport | Answer | Logged
    | Broke
)  # fmt: skip
