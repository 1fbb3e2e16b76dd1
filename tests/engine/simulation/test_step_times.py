"""Step times: published coefficients, rooflines, and profiles that survive a file."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.step_plan import DecodeRow, DecodeRows, PrefillRow, StepPlan
from octavo.engine.simulation.executor import HostOverhead, SwapLink
from octavo.engine.simulation.profile import Profile, ProgramCost, Sample, fit_link, fit_program
from octavo.engine.simulation.roofline import DEVICES, kv_capacity, roofline
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME, StepWork, step_work
from octavo.engine.simulation.workloads.traffic import Arrival, make_request
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.config import ModelConfig
from octavo.models.flat_config import flat_config
from octavo.models.rope import Rope

LLAMA_8B = flat_config(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position_embeddings=8192,
)  # fmt: skip


def test_the_published_fit_has_two_regimes() -> None:
    small = StepWork(10, 1, 400, decode_context=5000, prefill_context=100)
    expected = 0.014936 + 5.882475e-5 * 410 + 2.247956e-5 * 400 + 3.634519e-5 * 10
    expected += 1.111258e-7 * 5000 + 7.554773e-7 * 100
    assert NIYAMA_STEP_TIME.seconds(small) == pytest.approx(expected)
    large = StepWork(13, 1, 500, decode_context=5000, prefill_context=100)
    expected = 0.005004 + 2.71905e-5 * 513 + 6.863043e-5 * 500 - 4.143993e-5 * 13
    expected += 1.663409e-7 * 5000 + 2.727223e-6 * 100
    assert NIYAMA_STEP_TIME.seconds(large) == pytest.approx(expected)


def test_several_iterations_cost_as_much_as_one_after_the_other() -> None:
    work = StepWork(10, decode_context=5000, num_steps=4)
    single = sum(NIYAMA_STEP_TIME.seconds(work.iteration(i)) for i in range(4))
    assert NIYAMA_STEP_TIME.seconds(work) == pytest.approx(single)


def test_the_work_of_a_plan_is_what_its_rows_attend_to() -> None:
    arrival = Arrival(request_id="a", arrival_s=0.0, num_input=40, num_output=8)
    request = make_request(arrival, max_tokens=8, number=0)
    plan = StepPlan(
        step_id=0,
        decode_rows=DecodeRows.of(
            DecodeRow(request=request, slot=slot, start=start, max_new_tokens=4)
            for slot, start in enumerate((10, 70, 20))
        ),
        prefill_rows=(
            PrefillRow(request, 3, start=6, num_tokens=4, samples=True, is_new=False),
        ),
        num_steps=4,
        page_updates=(),
    )  # fmt: skip
    work = step_work(plan)
    # Queries at 6, 7, 8 and 9 attend to 7, 8, 9 and 10 keys.
    assert work == StepWork(
        3, 1, 4, decode_context=100, prefill_context=6, prefill_attention=34.0, num_steps=4,
        longest_decode=70,
    )  # fmt: skip
    third = work.iteration(2)
    assert (third.decode_context, third.longest_decode, third.num_steps) == (106, 72, 1)
    assert StepWork(0, 1, 4).iteration(2).longest_decode == 0


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_roofline_is_bound_by_memory_in_decode_and_by_arithmetic_in_prefill(name: str) -> None:
    model = replace(roofline(name, LLAMA_8B, num_devices=2), fixed_s=0.0)
    twice = replace(model, device=replace(model.device, bytes_per_s=2 * model.device.bytes_per_s))
    decode, prefill = StepWork(8, decode_context=8000), StepWork(0, 1, 8192, prefill_attention=3e7)
    assert twice.seconds(decode) < 0.7 * model.seconds(decode)
    assert twice.seconds(prefill) == pytest.approx(model.seconds(prefill))


def test_an_h100_decodes_llama_8b_in_about_7_milliseconds() -> None:
    # 16 GB of weights at 80% of 3.35 TB/s is 5.6 ms, plus a fixed millisecond.
    model = roofline("h100", LLAMA_8B)
    assert model.num_weights == pytest.approx(7.5e9, rel=0.02)
    assert model.kv_bytes_per_token == 131_072
    assert 6e-3 < model.seconds(StepWork(1, decode_context=100)) < 8e-3
    assert 300_000 < kv_capacity(model) < 500_000


def test_experts_are_stored_whole_read_as_they_are_chosen_and_multiplied_by_few() -> None:
    # Qwen3-30B-A3B: 128 experts of 768, 8 a token.
    experts = Experts(router=Router(num_experts=128, num_chosen=8), intermediate_size=768)
    attention = Attention(num_heads=32, num_kv_heads=4, head_dim=128, rope=Rope())
    norms = Norms(norm=RMSNorm())
    layer = LayerSpec(mixer=attention, feed_forward=experts, norms=norms)
    config = ModelConfig(
        vocab_size=151_936, hidden_size=2048, layers=(layer,) * 48, final_norm=norms.norm
    )
    model = replace(roofline("h200", config), fixed_s=0.0)
    stored = model.num_weights + model.num_idle_weights
    assert model.num_weights == pytest.approx(3.0e9, rel=0.05)
    assert stored == pytest.approx(30.2e9, rel=0.02)
    one, many = StepWork(1), StepWork(512)
    read_s = 2 / (0.8 * 4.8e12)
    assert model.seconds(one) == pytest.approx(model.num_weights * read_s, rel=0.01)
    assert model.seconds(many) == pytest.approx(stored * read_s, rel=0.01)
    two = model.num_weights + model.num_idle_weights * 8 / 128
    assert model.seconds(StepWork(2)) == pytest.approx(two * read_s, rel=0.01)
    with pytest.raises(InvalidConfigError, match=r"enough h100 for 60\.\d GB"):
        roofline(replace(DEVICES["h100"], memory_bytes=60e9), config)
    assert kv_capacity(model) == int((0.9 * 141e9 - 2 * stored) / model.kv_bytes_per_token)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="num_devices = 1"):
        roofline("v5e", replace(LLAMA_8B, layers=LLAMA_8B.layers * 2))
    with pytest.raises(InvalidConfigError, match="device = 'abacus'"):
        roofline("abacus", LLAMA_8B)


def program(**changes: float) -> ProgramCost:
    values = {"num_tokens": 8, "num_rows": 8, "num_new_rows": 0, "num_steps": 4, "base_s": 1e-3}
    return ProgramCost(**{**values, **changes})  # type: ignore[arg-type]


def test_a_fit_finds_what_a_program_costs() -> None:
    true = program(iteration_s=4e-3, row_s=1e-4, decode_context_s=2e-7)
    rng = random.Random(1)
    samples = []
    for _ in range(300):
        rows = rng.randint(1, 8)
        work = StepWork(
            rows, decode_context=rng.randint(0, 20_000), num_steps=rng.choice((1, 2, 4))
        )
        samples.append(Sample(work=work, seconds=true.seconds(work) * rng.lognormvariate(0, 0.02)))
    found = fit_program(samples, num_tokens=8, num_rows=8, num_new_rows=0, num_steps=4)
    for sample in samples:
        assert found.seconds(sample.work) == pytest.approx(true.seconds(sample.work), rel=0.06)
    assert found.noise < 0.05
    assert min(found.base_s, found.iteration_s, found.row_s, found.decode_context_s) >= 0


def test_a_program_whose_rows_attend_in_groups_is_priced_by_the_longest_of_them() -> None:
    true = program(iteration_s=4e-3, decode_longest_s=2e-5)
    # Iterations attend to 100, 101, 102 and 103 positions: 4 * 4 ms + 406 * 20 us, and the base.
    work = StepWork(3, decode_context=120, num_steps=4, longest_decode=100)
    assert true.seconds(work) == pytest.approx(1e-3 + 16e-3 + 8.12e-3)
    assert true.seconds(StepWork(0, 1, 8, num_steps=1)) == pytest.approx(5e-3)

    rng = random.Random(3)
    samples = []
    for _ in range(200):
        contexts = [rng.randint(8, 400) for _ in range(rng.randint(1, 8))]
        work = StepWork(
            len(contexts), decode_context=sum(contexts), num_steps=rng.choice((1, 2, 4)),
            longest_decode=max(contexts),
        )  # fmt: skip
        samples.append(Sample(work=work, seconds=true.seconds(work)))
    found = fit_program(samples, num_tokens=8, num_rows=8, num_new_rows=0, num_steps=4)
    assert found.decode_longest_s == pytest.approx(true.decode_longest_s)
    assert found.decode_context_s == pytest.approx(0, abs=1e-9)
    assert found.noise < 1e-6


def test_iterations_share_what_a_program_took_that_always_ran_as_many() -> None:
    samples = [Sample(work=StepWork(8, decode_context=800, num_steps=4), seconds=0.2)] * 3
    found = fit_program(samples, num_tokens=8, num_rows=8, num_new_rows=0, num_steps=4)
    assert found.seconds(StepWork(8, decode_context=800, num_steps=4)) == pytest.approx(0.2)
    assert found.seconds(StepWork(8, decode_context=800, num_steps=1)) == pytest.approx(0.05)


def test_a_fit_prices_noisy_steps_right_in_sum_and_leaves_out_disturbed_ones() -> None:
    true = program(iteration_s=4e-3, row_s=1e-4)
    rng = random.Random(2)
    samples = [
        Sample(work=work, seconds=true.seconds(work) * rng.lognormvariate(0, 0.15))
        for work in (StepWork(rng.randint(1, 8), decode_context=100) for _ in range(400))
    ]
    disturbed = [Sample(work=StepWork(8), seconds=1.0) for _ in range(8)]
    found = fit_program(
        [*samples, *disturbed], num_tokens=8, num_rows=8, num_new_rows=0, num_steps=4
    )
    measured = sum(sample.seconds for sample in samples)
    priced = sum(found.seconds(sample.work) for sample in samples)
    assert priced == pytest.approx(measured, rel=0.01)


def test_a_profile_prices_work_by_the_smallest_program_that_takes_it() -> None:
    profile = Profile(
        programs=(
            program(base_s=1.0),
            program(num_tokens=32, num_rows=32, base_s=2.0),
            program(num_tokens=64, num_rows=32, num_new_rows=4, num_steps=0, base_s=3.0),
        ),
        host=HostOverhead(plan_s=1e-4),
        limits=replica_limits(kv_tokens=1024),
    )
    assert profile.seconds(StepWork(8)) == 1.0
    assert profile.seconds(StepWork(9)) == 2.0
    assert profile.seconds(StepWork(2, 1, 30)) == 3.0
    assert profile.seconds(StepWork(2, 9, 30)) == 3.0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = Profile(
        programs=(program(),), host=HostOverhead(plan_s=1e-4, commit_row_s=1e-6),
        limits=replica_limits(kv_tokens=1024), about={"model": "m"},
        link=SwapLink(bytes_per_page=1 << 18, bytes_per_s=2e9, latency_s=1e-3),
    )  # fmt: skip
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_a_profile_from_before_links_were_measured_has_none(tmp_path: Path) -> None:
    limits = replica_limits(kv_tokens=1024)
    Profile(programs=(program(),), host=HostOverhead(), limits=limits).save(tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_text())
    del values["link"]
    (tmp_path / "p.json").write_text(json.dumps(values))
    assert Profile.load(tmp_path / "p.json").link is None


def test_a_profile_of_the_first_format_prices_nothing_by_the_longest_row(tmp_path: Path) -> None:
    limits = replica_limits(kv_tokens=1024)
    Profile(programs=(program(),), host=HostOverhead(), limits=limits).save(tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_text())
    assert values["format"] == "octavo-profile-2"
    values["format"] = "octavo-profile-1"
    del values["programs"][0]["decode_longest_s"]
    (tmp_path / "p.json").write_text(json.dumps(values))
    assert Profile.load(tmp_path / "p.json").programs == (program(),)


def test_a_link_is_found_from_copies_of_few_and_of_many_pages() -> None:
    true = SwapLink(bytes_per_page=1 << 18, bytes_per_s=2e9, latency_s=1e-3)
    found = fit_link([(n, true.seconds(n)) for n in (1, 8, 64, 256)], 1 << 18)
    assert found.bytes_per_s == pytest.approx(2e9)
    assert found.latency_s == pytest.approx(1e-3)
    alone = fit_link([(8, true.seconds(8))], 1 << 18)
    assert alone.seconds(8) == pytest.approx(true.seconds(8))


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": "octavo-profile-2"}', '{"format": "other"}', "[1]"]
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(InvalidConfigError, match="profile = "):
        Profile.load(tmp_path / "p.json")
