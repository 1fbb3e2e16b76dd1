"""What the command line understands, and how it refuses; no model is loaded."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.early_checks import check_cores
from octavo.engine.errors import InvalidConfigError, InvalidRequestError
from octavo.engine.sampling_defaults import SamplingDefaults
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.message import AssistantMessage, ToolCall
from octavo.server.cli.conversation import Conversation
from octavo.server.cli.engine_args import add_engine_args, engine_args
from octavo.server.cli.main import COMMANDS, main
from octavo.server.cli.prompts import add_prompt_args, read_prompts
from octavo.server.cli.sampling_args import add_sampling_args, sampling_params
from octavo.server.cli.sizes import parse_bytes, parse_rate, show_bytes, show_seconds
from octavo.server.cli.suggesting_parser import with_dashes
from octavo.server.serve_config import ServeConfig

PARAMS = SamplingParams(max_tokens=5)


def parse(add, *argv, **kwargs):
    parser = argparse.ArgumentParser()
    add(parser, **kwargs)
    return parser.parse_args(argv)


def test_every_engine_argument_is_an_option_and_only_given_ones_are_set():
    args = parse(add_engine_args, "--model", "m", "--max-num-seqs", "3", "--no-overlap")
    assert engine_args(args) == {"model": "m", "max_num_seqs": 3, "overlap": False}
    parser = argparse.ArgumentParser()
    add_engine_args(parser)
    for name in EngineConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in parser.format_help()


def test_engine_arguments_that_are_no_options_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("OCTAVO_OVERLAP", "no")
    monkeypatch.setenv("OCTAVO_SEED", "3")
    args = parse(add_engine_args, "--max-num-seqs", "3", leave_out=("seed",))
    assert engine_args(args) == {"max_num_seqs": 3, "overlap": False}


@pytest.mark.parametrize(
    "command",
    [["generate", "--prompt", "x"], ["chat"], ["compile"], ["profile"], ["bench", "throughput"]],
    ids=lambda command: command[0],
)
def test_a_variable_that_is_no_value_is_refused_by_every_command(command, monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_SLICED_WEIGHTS", "maybe")
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "OCTAVO_SLICED_WEIGHTS = 'maybe'" in told
    assert "true or false" in told


def test_a_commands_seed_is_the_requests():
    parser = argparse.ArgumentParser()
    add_sampling_args(parser, {})
    add_engine_args(parser, leave_out=("seed",))
    args = parser.parse_args(["--seed", "7"])
    assert sampling_params(args).seed == 7
    assert engine_args(args) == {}


def test_sampling_options_reach_the_parameters():
    given = {
        "--max-tokens": 9, "--temperature": 0.5, "--top-p": 0.8, "--top-k": 3, "--seed": 0,
        "--stop-token-id": 4, "--bad-word": "x",
    }  # fmt: skip
    argv = [str(word) for option in given.items() for word in option]
    argv += ["--stop", "a", "--stop", "b", "--ignore-eos"]
    args = parse(add_sampling_args, *argv, defaults={"max_tokens": 99})
    assert sampling_params(args) == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.8, top_k=3, stop=["a", "b"], ignore_eos=True,
        seed=0, stop_token_ids=[4], bad_words=["x"],
    )  # fmt: skip


def test_sampling_defaults_are_those_of_sampling_params_but_for_the_commands_own():
    args = parse(add_sampling_args, defaults={"max_tokens": 99})
    assert sampling_params(args) == SamplingParams(max_tokens=99)
    own = SamplingDefaults((("temperature", 0.6), ("max_tokens", 7)))
    assert sampling_params(args, own) == SamplingParams(temperature=0.6, max_tokens=7)
    args = parse(add_sampling_args, "--temperature", "0", defaults={"max_tokens": 99})
    assert sampling_params(args, own) == SamplingParams(temperature=0, max_tokens=7)


def test_prompts_come_from_options_in_their_order():
    args = parse(add_prompt_args, "--prompt", "a", "--prompt", "b")
    assert read_prompts(args, PARAMS) == [("a", PARAMS), ("b", PARAMS)]


def test_without_options_standard_input_is_one_prompt():
    args = parse(add_prompt_args)
    assert read_prompts(args, PARAMS, io.StringIO("two\nlines\n")) == [("two\nlines", PARAMS)]


def test_a_json_lines_file_may_set_parameters_of_each_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ["one", {"prompt": "two", "max_tokens": 7}, {"prompt_token_ids": [1, 2]}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    args = parse(add_prompt_args, "--prompts-file", str(path))
    assert read_prompts(args, PARAMS) == [
        ("one", PARAMS),
        ("two", PARAMS.replace(max_tokens=7)),
        ([1, 2], PARAMS),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "line 1.*JSON"),
        ("3", "a string or an object"),
        ("{}", "exactly one of prompt"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "exactly one of prompt"),
        ('{"prompt": 3}', "a list of token ids"),
        ('{"prompt_token_ids": [true]}', "a list of token ids"),
        ('{"prompt": "a", "max_token": 3}', "max_token.*a sampling parameter"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens = 0"),
        ("", "at least one line"),
    ],
)
def test_a_malformed_prompts_file_is_refused_by_line(line, says):
    args = parse(add_prompt_args, "--prompts-file", "-")
    with pytest.raises(InvalidRequestError, match=says):
        read_prompts(args, PARAMS, io.StringIO(line + "\n"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 * 2**30), ("16gb", 16 * 10**9), ("1.5k", 1500), ("7", 7), ("2 MiB", 2**21)],
)
def test_sizes_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size
    assert parse_rate(text + "/s") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "nan", "1e3", "5 apples", "25GB/s"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bytes(text)


def test_sizes_and_times_are_shown_in_the_unit_that_fits():
    assert [show_bytes(size) for size in (512, 1536, 3 * 2**40)] == ["512 B", "1.5 KiB", "3 TiB"]
    assert [show_seconds(time_s) for time_s in (0.00125, 2.5)] == ["1.25 ms", "2.5 s"]


class ByteTokenizer:
    """One token a character of the plain transcript."""

    def apply_chat_template(self, messages):
        return "".join(f"{message['role'][0]}{message['content']}" for message in messages)

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return list(map(ord, text))


def prompt_of(conversation, max_tokens):
    text, token_ids = conversation.prompt(ByteTokenizer(), max_tokens, {})
    assert text == "".join(map(chr, token_ids))
    return text


def test_a_conversation_forgets_its_oldest_turns_but_not_the_system_message():
    conversation = Conversation("S")
    for role, content in (("user", "aa"), ("assistant", "bb"), ("user", "cc")):
        conversation.say(role, content)
    assert prompt_of(conversation, 11) == "sSuaaabbucc"
    assert prompt_of(conversation, 10) == "sSucc"
    conversation.reset()
    conversation.say("user", "d")
    assert prompt_of(conversation, 10) == "sSud"
    conversation.system = None
    assert prompt_of(conversation, 10) == "ud"


def test_calls_and_their_results_are_forgotten_with_the_question_that_they_answer():
    conversation = Conversation(None)
    call = ToolCall("1", "f", "{}")
    for _ in range(2):
        conversation.say("user", "aa")
        conversation.answer(AssistantMessage(content="b", tool_calls=(call,)))
        conversation.tell_result(call, "c")
        conversation.answer(AssistantMessage(content="d"))
    assert prompt_of(conversation, 18) == "uaaabtcad" * 2
    assert prompt_of(conversation, 17) == "uaaabtcad"
    conversation.take_back()
    conversation.say("user", "e")
    assert prompt_of(conversation, 17) == "ue"


def test_a_message_that_cannot_fit_leaves_the_conversation_as_it_was():
    conversation = Conversation(None)
    for role, content in (("user", "aa"), ("assistant", "bb"), ("user", "too long")):
        conversation.say(role, content)
    with pytest.raises(InvalidRequestError, match="at most 7 tokens"):
        conversation.prompt(ByteTokenizer(), 7, {})
    conversation.take_back()
    conversation.say("user", "c")
    assert prompt_of(conversation, 8) == "uaaabbuc"


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["generate", "--prompt", "x", "--top-p", "3"], 2, "top_p = 3.0"),
        (["generate", "--prompts-file", "/no/such/file"], 2, "/no/such/file"),
        (["serve", "--dtype", "int8"], 2, "dtype = 'int8'"),
        (["serve", "--grpc-port", "70000"], 2, "grpc_port = 70000"),
        (["chat", "--n", "2"], 2, "n = 2"),
        (["plan", "--model", "/no/such/model"], 1, "/no/such/model"),
        (["plan", "--context", "100000000"], 2, "context = 100000000"),
        (["plan", "--gpu-memory-utilization", "2"], 2, "gpu_memory_utilization = 2.0"),
        (["convert", "/no/such/model", "{tmp}/new"], 1, "/no/such/model"),
        (["convert", "smollm2-135m", "{tmp}"], 2, "a new or empty directory"),
        (["serve", "--model", "smollm2-135m", "--load-format", "orbax"], 2, "auto or gguf, which"),
        (["serve", "--load-format", "bitsandbytes"], 2, "auto reads every kind of checkpoint"),
        (["serve", "/no/such/model", "--max-num-seqs", "4"], 1, "'/no/such/model' is not a path"),
        (["serve", "one", "--model", "other"], 2, "MODEL = 'one' is not allowed: one model, not"),
        (["serve", "--max_num_seqs", "0"], 2, "max_num_seqs = 0"),
        (["serve", "--max_num_seqs=0"], 2, "max_num_seqs = 0"),
        (["serve", "--port", "70000"], 2, "http_port = 70000"),
        (["route", "--backend", "x:1", "--model", "m", "--port", "70000"], 2, "http_port = 70000"),
        (["serve", "-tp", "0"], 2, "tensor_parallel_size = 0"),
        (["serve", "--swap-space", "9"], 2, "swap_space = 9 is not allowed: 0; see host_kv"),
        (["generate", "x", "--speculative-config", "[1]"], 2, "speculative_config = [1]"),
        (["serve", "--log-level", "LOUD"], 2, "log_level = 'LOUD'"),
        (["serve", "--enable-lora", "/no/such/model"], 2, "enable_lora = True"),
        (["admin", "drain", "--token-file", "/no/such"], 2, "token_file = '/no/such'"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr(argv, status, says, capsys, tmp_path, tiny_model):
    (tmp_path / "something").touch()
    argv = [word.format(tmp=tmp_path) for word in argv]
    if argv[0] == "plan" and "--model" not in argv:
        argv += ["--model", str(tiny_model)]
    assert main(argv) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_options_of_vllm_that_ask_for_nothing_are_taken(capsys, caplog):
    given = ["--enforce-eager", "--no-enable-log-requests", "--swap-space", "4"]
    given += ["--uvicorn-log-level", "info", "--enable-auto-tool-choice"]
    assert main(["serve", *given, "/no/such/model"]) == 1
    assert "'/no/such/model' is not a path" in capsys.readouterr().err


def test_words_that_are_no_names_of_options_keep_their_underscores():
    words = ["--a_b=c_d", "e_f", "-g_h", "--i_j k", "--", "--l_m"]
    assert with_dashes(words) == ["--a-b=c_d", *words[1:]]


def test_a_tilde_is_the_users_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    assert EngineConfig(compile_cache_dir="~/c").resolved_compile_cache_dir() == "/users/me/c"
    assert ServeConfig(token_file="~/t", profile_dir="p~").token_file == "/users/me/t"


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["serve", "--nonsense"], ["plan", "--memory", "x"]]
)
def test_arguments_that_cannot_be_parsed_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo")
    assert "--help" in line


def test_an_unexpected_error_names_itself_and_shows_its_traceback_only_when_asked(
    capsys, monkeypatch
):
    def broken(args):
        raise RuntimeError("surprise")

    monkeypatch.setattr("octavo.server.cli.models.run", broken)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == (
        "octavo: error: RuntimeError: surprise (OCTAVO_DEBUG=1 shows where)\n"
    )
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["models"])


def test_an_interrupted_command_waits_for_no_thread():
    program = """
import threading, time
from octavo.server.cli import main, models
def run(args):
    print("begun")
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise KeyboardInterrupt
models.run = run
main.entry()
"""
    command = [sys.executable, "-c", program, "models"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "")


@pytest.mark.parametrize(
    "command", [None, *sorted(COMMANDS.keys() - {"bench", "plan", "simulate"})]
)
def test_help_imports_nothing_heavy(command):
    program = (
        "import sys\n"
        "from octavo.server.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'jax', 'numpy', 'grpc', 'transformers', 'tokenizers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    argv = [word for word in (command, "--help") if word]
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: octavo" in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--promt", "x"], "unrecognized arguments: --promt; did you mean --prompt?"),
        (["serve", "--htp-port", "80"], "did you mean --http-port?"),
        (["bench", "throughput", "--num-promts", "3"], "did you mean --num-prompts?"),
        (["generate", "x", "--entirely-else"], "unrecognized arguments: --entirely-else"),
        (["genrate", "x"], "unknown command 'genrate'; did you mean generate?"),
        (["zzz"], "unknown command 'zzz': one of generate, chat"),
        (["chat", "some/model"], "did you mean --model some/model?"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_nearest(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_jax_is_imported(tmp_path):
    program = """
import sys
from octavo.server.cli.main import main
status = main(sys.argv[1:])
slow = {"jax", "transformers", "tokenizers"} & set(sys.modules)
print(status, *slow)
"""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    bad = [
        (["--model", "no-such-model"], "1", "'no-such-model' is not a path that exists"),
        (["--model", str(tmp_path)], "1", "has no config.json"),
        (["--model", str(model), "--tokenizer", "gone"], "1", "tokenizer = 'gone'"),
        (["--model", str(model), "--data-parallel-size", "9999"], "2", "number of cores"),
    ]
    for command in (["generate", "x"], ["generate", "--input", __file__, "--output", "/dev/null"],
                    ["chat"], ["serve"], ["compile"]):  # fmt: skip
        for options, status, words in bad:
            done = subprocess.run(
                [sys.executable, "-c", program, *command, *options], capture_output=True,
                text=True, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
            assert done.stdout.split() == [status]
            assert words in done.stderr
            assert len(done.stderr.splitlines()) == 1


def test_more_replicas_than_cores_are_refused_where_there_is_only_a_cpu():
    many = EngineConfig(data_parallel_size=10_000)
    with pytest.raises(InvalidConfigError, match=r"data_parallel_size = 10000 .* number of cores"):
        check_cores(many, {"JAX_PLATFORMS": "cpu"})
    check_cores(many, {"JAX_PLATFORMS": "cuda,cpu"})
    check_cores(EngineConfig(), {"JAX_PLATFORMS": "cpu"})
