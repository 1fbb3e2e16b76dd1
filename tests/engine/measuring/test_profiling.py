"""Profiling an engine: every program is reached, and the engine is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.engine.measuring.profiling import measure_programs, profile_engine

# One for all tests: whoever builds it again finds its programs in the cache.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 4, "host_kv_memory_bytes": 1 << 20, "max_model_len": 256, "warm_up": "full",
}  # fmt: skip


def test_a_profile_holds_every_program_and_the_link_to_the_host(
    make_llm: Callable[..., Any],
) -> None:
    engine = make_llm(**ENGINE).engine
    shares: list[float] = []
    executor = engine.core.executor
    profile = profile_engine(engine, on_progress=shares.append)
    lattice = engine.executor.lattice
    assert [(p.num_tokens, p.num_rows, p.num_steps) for p in profile.programs] == [
        (shape.num_tokens, shape.num_rows, shape.num_steps)
        for shape in (*lattice.decode, *lattice.mixed)
    ]
    for program in profile.programs:
        # On a busy machine the least squares may give all of it to one of them.
        costs = (program.base_s, program.iteration_s, program.row_s, program.token_s)
        assert sum(costs) + program.decode_context_s + program.decode_longest_s > 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert profile.link is not None
    assert profile.link.bytes_per_page == engine.executor.page_bytes
    assert profile.link.bytes_per_s > 0
    assert engine.core.executor is executor
    load = engine.load()  # prompts found in the prefix cache would have cost nothing
    assert load.prefix_cache_hits == 0 or load.num_preemptions > 0


def test_sequences_are_no_longer_than_the_profile_is_wanted_for(
    make_llm: Callable[..., Any],
) -> None:
    engine = make_llm(**ENGINE).engine
    measured = measure_programs(engine, seed=1, longest_context=96)
    # Prompts of up to 128 tokens that arrive while others decode, and 48 tokens of output.
    assert max(sample.work.longest_decode for _, sample in measured.samples) < 128 + 48
    assert max(sample.work.prefill_context for _, sample in measured.samples) < 128
