"""The input vector: what the packer writes is what the step reads."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from octavo.engine.execution.packing import NO_SLOT, decode_order, known_tokens, pack
from octavo.engine.execution.platform.buckets import make_lattice
from octavo.engine.execution.step_spec import NEW_ROW_FLOATS, NEW_ROW_INTS, StepShape, step_spec
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.step_plan import DecodeRow, DecodeRows, PrefillRow, StepPlan


def make_request(name: str, prompt: list[int], **changes: object) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.5, top_p=0.75, prompt_logprobs=1),
        seed=(1 << 62) + 0xFFFFFFF0,
        eos_token_ids=(2,),
        max_tokens=9,
        arrival_s=0.0,
        **changes,  # type: ignore[arg-type]
    )


def decode_row(slot: int, start: int, max_new_tokens: int = 1) -> DecodeRow:
    request = make_request(f"d{slot}", [1])
    return DecodeRow(request=request, slot=slot, start=start, max_new_tokens=max_new_tokens)


def make_plan(decodes: list[DecodeRow], prefills: list[PrefillRow], **changes: object) -> StepPlan:
    return StepPlan(
        step_id=0,
        decode_rows=DecodeRows.of(decodes),
        prefill_rows=tuple(prefills),
        **{"num_steps": 1, "page_updates": (), **changes},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "shape", [StepShape(32, 8, 0), StepShape(8, 8, 4), StepShape(1, 1, 1)], ids=str
)
def test_both_sides_read_the_same_fields(shape: StepShape) -> None:
    spec = step_spec(shape, 8, 16, has_snapshots=True)
    vector = np.random.default_rng(0).integers(0, 1000, spec.size, dtype=np.int32)
    traced = jax.jit(spec.unpack)(vector)
    views = spec.views(vector)
    assert traced.keys() == views.keys()
    for name, view in views.items():
        np.testing.assert_array_equal(np.asarray(traced[name]), view)
    assert sum(view.size for view in views.values()) == spec.size  # nothing unused, no overlap


def test_a_mixed_plan_in_blocks_row_after_row() -> None:
    prompt = list(range(100, 140))
    chunk = PrefillRow(
        request=make_request("p", prompt),
        slot=3,
        start=16,
        num_tokens=5,
        samples=False,
        is_new=True,
        page_ids=(7, 9),
    )
    plan = make_plan([decode_row(1, 5), decode_row(2, 50)], [chunk], page_updates=((1, 0, 4),))
    spec = step_spec(StepShape(32, 8, 0), 8, 16)
    order = decode_order(plan)
    assert order.tolist() == [1, 0]  # the longest first
    fields = spec.views(pack(plan, spec, order, trash_slot=8))
    assert fields["num_decode_rows"] == 2
    assert fields["num_rows"] == 3
    assert fields["row_slot"].tolist() == [2, 1, 3, 8, 8, 8, 8, 8]
    assert fields["cu_q_lens"].tolist() == [0, 1, 2, 7, 7, 7, 7, 7, 7]
    assert fields["token_row"][:7].tolist() == [0, 1, 2, 2, 2, 2, 2]
    assert fields["token_ids"][2:7].tolist() == prompt[16:21]
    assert fields["score_ids"][2:7].tolist() == prompt[17:22]
    assert fields["score_ids"][7:].max() == -1
    assert fields["row_max_new_tokens"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert fields["page_updates"][0].tolist() == [1, 0, 4]
    assert (fields["page_updates"][1:, 0] == NO_SLOT).all()
    ints = dict(zip(NEW_ROW_INTS, fields["new_ints"][0].tolist(), strict=True))
    assert ints["max_total_tokens"] == 49
    seed = (ints["seed_high"] & 0xFFFFFFFF) << 32 | (ints["seed_low"] & 0xFFFFFFFF)
    assert seed == (1 << 62) + 0xFFFFFFF0
    floats = dict(zip(NEW_ROW_FLOATS, fields["new_floats"][0].tolist(), strict=True))
    assert (floats["temperature"], floats["top_p"]) == (0.5, 0.75)
    assert fields["new_table"][0, 0].tolist() == [7, 9, 0, 0, 0, 0, 0, 0]
    assert fields["new_slot"].tolist() == [3, *[NO_SLOT] * (len(fields["new_slot"]) - 1)]


def test_rows_read_their_own_states_but_for_those_that_begin_with_a_snapshot() -> None:
    request = make_request("p", list(range(40)))
    places = {"request": request, "num_tokens": 8, "samples": False}
    begins = PrefillRow(
        **places, slot=3, start=16, is_new=True, restores=4, saves=((20, 0), (24, 5))
    )
    goes_on = PrefillRow(**places, slot=5, start=8, is_new=False)
    plan = make_plan([decode_row(1, 5)], [begins, goes_on])
    spec = step_spec(StepShape(32, 8, 0), 8, 16, has_snapshots=True)
    fields = spec.views(pack(plan, spec, decode_order(plan), trash_slot=8))
    assert fields["state_source"].tolist() == [1, 9 + 4, 5, 8, 8, 8, 8, 8]
    assert fields["save_at"].tolist() == [[0, 0], [20, 24], *[[0, 0]] * 6]
    assert fields["save_slot"][1].tolist() == [9, 9 + 5]
    decode = step_spec(StepShape(8, 8, 4), 8, 16, has_snapshots=True)
    assert "save_at" not in {field.name for field in decode.fields}


def test_known_tokens_run_on_from_prompt_to_output() -> None:
    request = make_request("r", [1, 2, 3], output_token_ids=[4, 5])
    assert list(known_tokens(request, 0, 5)) == [1, 2, 3, 4, 5]
    assert list(known_tokens(request, 1, 3)) == [2, 3]
    assert list(known_tokens(request, 3, 5)) == [4, 5]


def test_the_lattice_takes_every_plan_within_its_limits() -> None:
    lattice = make_lattice(
        max_num_seqs=40, max_num_batched_tokens=200, num_steps=4, variants=("general",)
    )
    assert [s.num_rows for s in lattice.decode] == [1, 4, 8, 16, 24, 32, 40]
    assert [s.num_tokens for s in lattice.mixed] == [32, 128, 200]
    everything = set(lattice.shapes).__contains__
    for num_decodes in range(1, 41):
        plan = make_plan([decode_row(i, 3) for i in range(num_decodes)], [], num_steps=4)
        shape = lattice.choose(plan, "general", everything)
        assert shape.is_decode
        assert shape in lattice.shapes
        smaller = [s for s in lattice.decode if s.num_rows < shape.num_rows]
        assert all(s.num_rows < num_decodes for s in smaller)
    for count in range(1, lattice.max_prefill_rows + 1):
        rows = [
            PrefillRow(
                request=make_request("p", [1] * 9),
                slot=i,
                start=0,
                num_tokens=3,
                samples=False,
                is_new=True,
            )
            for i in range(count)
        ]
        shape = lattice.choose(make_plan([], rows), "general", everything)
        assert shape.num_new_rows >= count
        assert shape in lattice.shapes


@pytest.mark.parametrize(("rows", "small"), [(0, []), (4, [4]), (8, [8]), (32, [8, 16])])
def test_what_follows_a_cached_prefix_has_small_programs(rows: int, small: list[int]) -> None:
    """However few rows read block-quantized weights."""
    lattice = make_lattice(
        max_num_seqs=32, max_num_batched_tokens=512, num_steps=4, variants=("general",),
        block_quantized_rows=rows,
    )  # fmt: skip
    in_blocks = [shape for shape in lattice.mixed if shape.block_quantized]
    assert [shape.num_tokens for shape in in_blocks] == small


@pytest.mark.parametrize("max_num_seqs", [16, 128])
def test_a_few_tokens_each_of_many_prompts_take_a_small_program(max_num_seqs: int) -> None:
    lattice = make_lattice(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=512, num_steps=4, variants=("general",)
    )
    rows = [
        PrefillRow(
            request=make_request("p", [1] * 2), slot=i, start=0, num_tokens=2, samples=True,
            is_new=True,
        )
        for i in range(16)
    ]  # fmt: skip
    shape = lattice.choose(make_plan([], rows), "general", set(lattice.shapes).__contains__)
    assert shape.num_tokens == 32


def test_the_coarse_programs_serve_every_plan_until_finer_ones_are_there() -> None:
    lattice = make_lattice(
        max_num_seqs=40, max_num_batched_tokens=200, num_steps=4, variants=("greedy", "general")
    )
    assert len(lattice.shapes) == len(set(lattice.shapes)) == 2 * (7 + 3)
    coarse = set(lattice.coarse)
    for num_decodes in (1, 17, 40):
        decodes = [decode_row(i, 3) for i in range(num_decodes)]
        plan = make_plan(decodes, [], num_steps=4)
        assert lattice.choose(plan, "greedy", coarse.__contains__) == StepShape(40, 40, 4, "greedy")
        prefill = PrefillRow(
            request=make_request("p", [1] * 9),
            slot=num_decodes,
            start=0,
            num_tokens=3,
            samples=False,
            is_new=True,
        )
        plan = make_plan(decodes[:39], [prefill])
        assert lattice.choose(plan, "general", coarse.__contains__) == StepShape(200, 40, 0)


def test_a_plan_without_any_program_gets_the_smallest_shape() -> None:
    lattice = make_lattice(
        max_num_seqs=40, max_num_batched_tokens=200, num_steps=4, variants=("general",)
    )
    plan = make_plan([decode_row(0, 3)], [], num_steps=4)
    assert lattice.choose(plan, "general", lambda shape: False) == StepShape(1, 1, 4)


def test_decode_programs_are_finer_where_padding_costs_most() -> None:
    lattice = make_lattice(
        max_num_seqs=256, max_num_batched_tokens=512, num_steps=4, variants=("general",)
    )
    rows = [s.num_rows for s in lattice.decode]
    assert rows == [1, 4, 8, 16, 24, 32, *range(48, 129, 16), 160, 192, 224, 256]
    assert lattice.token_edges == (32, 128, 256, 384, 512)


def test_a_cpu_has_a_program_for_twelve_rows_and_one_for_64_tokens() -> None:
    lattice = make_lattice(
        max_num_seqs=24, max_num_batched_tokens=1024, num_steps=4, variants=("general",),
        has_dear_rows=True,
    )  # fmt: skip
    assert [s.num_rows for s in lattice.decode] == [1, 4, 8, 12, 16, 24]
    assert lattice.token_edges == (32, 64, 128, 256, 384, 512, 768, 1024)


@pytest.mark.parametrize(
    ("max_num_seqs", "wanted"),
    [
        (1, [(1, True), (1, False)]),
        (4, [(1, True), (4, True), (4, False)]),
        (24, [(1, True), (4, True), (6, True), (8, True), (16, True), (24, False)]),
    ],
)
def test_few_rows_read_block_quantized_weights_once_their_program_is_there(
    max_num_seqs: int, wanted: list[tuple[int, bool]]
) -> None:
    lattice = make_lattice(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=128, num_steps=4, variants=("general",),
        block_quantized_rows=16,
    )  # fmt: skip
    assert [(shape.num_rows, shape.block_quantized) for shape in lattice.decode] == wanted
    # What readiness waits for compiles as fast as ever.
    assert not any(shape.block_quantized for shape in lattice.coarse)
    plan = make_plan([decode_row(0, 3)], [], num_steps=4)
    first = lattice.choose(plan, "general", set(lattice.coarse).__contains__)
    assert first == lattice.decode[-1]
    everything = lattice.choose(plan, "general", set(lattice.shapes).__contains__)
    assert everything == StepShape(1, 1, 4, block_quantized=True)
    # A few tokens of a prompt, too.
    found = [(shape.num_tokens, shape.block_quantized) for shape in lattice.mixed]
    assert found == [(8, True), (16, True), (32, False), (128, False)]
    few = PrefillRow(
        request=make_request("p", [1] * 100), slot=0, start=93, num_tokens=7, samples=True,
        is_new=True,
    )  # fmt: skip
    small = lattice.choose(make_plan([], [few]), "general", set(lattice.shapes).__contains__)
    assert small == StepShape(8, min(8, max_num_seqs), 0, block_quantized=True)


@pytest.mark.parametrize(
    ("block_quantized_rows", "finer"),
    [(0, set()), (4, set()), (16, {6}), (24, {6, 20}), (32, {6, 20, 28})],
)
def test_programs_of_block_quantized_weights_are_finer(
    block_quantized_rows: int, finer: set[int]
) -> None:
    lattice = make_lattice(
        max_num_seqs=32, max_num_batched_tokens=128, num_steps=4, variants=("general",),
        block_quantized_rows=block_quantized_rows,
    )  # fmt: skip
    assert {shape.num_rows for shape in lattice.decode} == {1, 4, 8, 16, 24, 32} | finer
    assert all(shape.block_quantized for shape in lattice.decode if shape.num_rows in finer)


@pytest.mark.parametrize(
    ("max_num_seqs", "has_blocks"), [(1, True), (4, True), (24, True), (4, False)]
)
def test_the_program_that_compiles_soonest_serves_until_a_faster_one_is_there(
    max_num_seqs: int, has_blocks: bool
) -> None:
    lattice = make_lattice(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=128, num_steps=4, variants=("general",),
        block_quantized_rows=16 * has_blocks, has_quick=True,
    )  # fmt: skip
    quick = StepShape(max_num_seqs, max_num_seqs, 4, quick=True)
    quick_prompts = StepShape(128, max_num_seqs, 0, quick=True)
    assert lattice.coarse == (quick_prompts, quick)
    assert not any(shape.quick for shape in lattice.fine)
    assert set(lattice.full) == set(lattice.fine)
    assert lattice.token_edges == ((8, 16, 32, 128) if has_blocks else (32, 128))
    row = PrefillRow(
        request=make_request("p", [1] * 100), slot=0, start=0, num_tokens=100, samples=False,
        is_new=True,
    )  # fmt: skip
    chunk = make_plan([], [row])
    assert lattice.choose(chunk, "general", set(lattice.coarse).__contains__) == quick_prompts
    fast_prompts = StepShape(128, max_num_seqs, 0)
    assert lattice.choose(chunk, "general", set(lattice.shapes).__contains__) == fast_prompts
    plan = make_plan([decode_row(i, 3) for i in range(max_num_seqs)], [], num_steps=4)
    assert lattice.choose(plan, "general", set(lattice.coarse).__contains__) == quick
    in_blocks = has_blocks and max_num_seqs <= 16
    fast = StepShape(max_num_seqs, max_num_seqs, 4, block_quantized=in_blocks)
    assert lattice.choose(plan, "general", set(lattice.shapes).__contains__) == fast
    # Programs are told apart by their texts.
    assert len({str(shape) for shape in lattice.shapes}) == len(lattice.shapes)


def test_a_plan_beyond_the_lattice_is_an_invariant_broken() -> None:
    lattice = make_lattice(
        max_num_seqs=4, max_num_batched_tokens=16, num_steps=1, variants=("general",)
    )
    with pytest.raises(AssertionError):
        lattice.choose(make_plan([decode_row(i, 3) for i in range(5)], []), "general", bool)
