"""Commands over a tiny model, whole."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from safetensors.numpy import load_file

from octavo.server.cli.main import main
from tests.models.loading.stored.writers import FORMATS, quantized, write_safetensors


@pytest.fixture
def engine_options(tiny_model):
    words = "--max-num-seqs 4 --max-num-batched-tokens 32 --max-model-len 128 --num-kv-pages 40"
    return ["--model", str(tiny_model), *words.split(), "--fail-on-compile"]


def generate_json(capsys, *argv):
    assert main(["generate", "--json", "--quiet", "--ignore-eos", *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_generate_prints_one_json_object_a_prompt_and_streams_the_same_text(
    engine_options, capsys, tmp_path
):
    options = ["--max-tokens", "9", *engine_options]
    path = tmp_path / "prompts.jsonl"
    lines = ["ab", {"prompt": "c"}, {"prompt_token_ids": [66, 67], "max_tokens": 4}]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = generate_json(capsys, "--prompts-file", str(path), *options)
    assert first["prompt"] == "ab"
    assert first["prompt_token_ids"] == [66, 67]
    assert len(first["token_ids"]) == 9
    assert first["finish_reason"] == "length"
    assert {"load_s", "ttft_ms", "tpot_ms", "tokens_per_s"} <= first["timings"].keys()
    assert second["prompt"] == "c"
    assert third["prompt"] is None
    assert third["token_ids"] == first["token_ids"][:4]

    assert main(["generate", "ab", "--ignore-eos", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == first["text"] + "\n"
    assert "9 tokens in " in captured.err


def test_prompts_are_words_or_an_option_and_not_both(engine_options, capsys):
    options = ["--max-tokens", "3", *engine_options]
    words = generate_json(capsys, "ab", "a b c", *options)
    assert [each["prompt"] for each in words] == ["ab", "a b c"]
    named = generate_json(capsys, "--prompt", "ab", "--prompt", "a b c", *options)
    assert [each["token_ids"] for each in named] == [each["token_ids"] for each in words]
    with pytest.raises(SystemExit) as ended:
        main(["generate", "ab", "--prompt", "cd", *options])
    assert ended.value.code == 2
    assert "argument --prompt: not allowed with argument PROMPT" in capsys.readouterr().err


def test_a_batch_skips_bad_lines_only_if_told_to(engine_options, capsys, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "ab", "max_tokens": 3}\n{"prompt": ""}\n"cd"\n')
    argv = ["generate", "--input", str(source), "--output", str(output), "--max-tokens", "3"]
    argv += engine_options
    assert main([*argv, "--quiet"]) == 2
    assert "line 2: prompt" in capsys.readouterr().err
    assert main([*argv, "--on-error", "skip"]) == 0
    told = capsys.readouterr().err
    assert "octavo: skipped line 2: prompt" in told
    assert "1 with an error" in told
    records = map(json.loads, output.read_text().splitlines())
    assert {record["line"]: "error" in record for record in records} == {
        1: False, 2: True, 3: False
    }  # fmt: skip


def test_a_converted_checkpoint_generates_the_same_tokens(engine_options, capsys, tmp_path):
    target = tmp_path / "converted"
    assert main(["convert", engine_options[1], str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    options = ["--prompt", "ab", "--max-tokens", "6", *engine_options]
    [original] = generate_json(capsys, *options)
    [converted] = generate_json(capsys, *options, "--model", str(target))
    assert converted["token_ids"] == original["token_ids"]


@pytest.mark.parametrize("name", ["fp8 in blocks", "packed 4 bits by group"])
def test_a_checkpoint_of_few_bits_generates_the_same_tokens_converted(
    name, engine_options, tiny_model, capsys, tmp_path
):
    source, target = tmp_path / "source", tmp_path / "converted"
    shutil.copytree(tiny_model, source)
    stored, _ = quantized(name, load_file(source / "model.safetensors"))
    write_safetensors(source / "model.safetensors", stored)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = FORMATS[name][0]
    (source / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(source), str(target)]) == 0
    assert "safetensors, as it was stored" in capsys.readouterr().out
    options = ["--prompt", "ab", "--max-tokens", "6", *engine_options]
    texts = [generate_json(capsys, *options, "--model", str(each)) for each in (source, target)]
    assert texts[0][0]["token_ids"] == texts[1][0]["token_ids"]


def test_chat_answers_each_line_and_remembers(engine_options, capsys, monkeypatch):
    def chat(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        options = ["--ignore-eos", "--max-tokens", "5", "--temperature", "0", *engine_options]
        assert main(["chat", "--quiet", *options]) == 0
        return capsys.readouterr()

    once = chat("hi").out
    assert once
    # After a reset the same line has the same answer. A line that cannot fit is refused and
    # forgotten. The last line is not the first of its conversation, so its answer is another.
    many = chat("hi", "/reset", "hi", "x" * 500, "hi", "/exit", "never read")
    assert many.out.startswith(once * 2)
    assert many.out.removeprefix(once * 2) not in ("", once)
    assert "at most" in many.err


def test_models_lists_the_default_model_and_architectures(capsys):
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "smollm2-135m" in [model["name"] for model in listed["packaged"]]
    assert "LlamaForCausalLM" in listed["architectures"]
    [phi] = [each for each in listed["families"] if each["architectures"] == ["Phi3ForCausalLM"]]
    assert (phi["gguf"], phi["real"]) == ("phi3", None)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m" in out
    assert "Phi-3, Phi-3.5, Phi-4, Phi-4-mini\n      Phi3ForCausalLM\n" in out
    assert "served: SmolLM2-135M (GGUF)" in out


def test_converted_checkpoints_hold_a_tokenizer_that_transformers_opens(
    tiny_model, capsys, tmp_path
):
    from transformers import AutoTokenizer

    from octavo.engine.text.tokenizer import Tokenizer

    target = tmp_path / "converted"
    assert main(["convert", str(tiny_model), str(target)]) == 0
    own = Tokenizer.from_source(tiny_model)
    theirs = AutoTokenizer.from_pretrained(str(target))
    assert theirs("ab c")["input_ids"] == own.encode("ab c")
    assert theirs.chat_template == own.chat_template
    assert Tokenizer.from_source(target).encode("ab c") == own.encode("ab c")
