"""One precedence: options over the environment over the file over defaults."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.main import main
from octavo.server.cli.settings import SECTIONS, read_settings, setting_kinds


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_options_go_before_the_environment_before_the_file(write):
    file = write("max_num_seqs: 3\ngrpc-port: 1003\ndrain_timeout_s: 3\nlog_level: error\n")
    environ = {"OCTAVO_GRPC_PORT": "1002", "OCTAVO_MAX_NUM_SEQS": "2", "OCTAVO_DEBUG": "1"}
    settings = read_settings({"max_num_seqs": 1}, environ, file)
    assert settings.engine.max_num_seqs == 1
    assert settings.serve.grpc_port == 1002
    assert settings.serve.drain_timeout_s == 3.0
    assert settings.log.log_level == "error"
    assert settings.serve.host == "127.0.0.1"


def test_no_name_stands_for_two_settings():
    assert len(setting_kinds()) == sum(len(dataclasses.fields(kind)) for kind in SECTIONS)


def test_the_environment_speaks_in_text():
    environ = {
        "OCTAVO_ENABLE_PREFIX_CACHING": "No", "OCTAVO_LOG_PROMPTS": "true",
        "OCTAVO_KEEPALIVE_S": "1.5", "OCTAVO_HTTP_PORT": "none", "OCTAVO_TOKEN_FILE": "/x",
    }  # fmt: skip
    settings = read_settings({}, environ, None)
    assert settings.engine.enable_prefix_caching is False
    assert settings.log.log_prompts is True
    assert settings.serve.keepalive_s == 1.5
    assert settings.serve.http_port is None
    assert settings.serve.token_file == "/x"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OCTAVO_GRPC_PORT": "x"}, "OCTAVO_GRPC_PORT = 'x'"),
        ({"OCTAVO_OVERLAP": "maybe"}, "OCTAVO_OVERLAP = 'maybe'"),
        ({"OCTAVO_GRPC_PORT": "70000"}, "grpc_port = 70000"),
        ({"OCTAVO_LOG_FORMAT": "xml"}, "log_format = 'xml'"),
    ],
)
def test_a_bad_variable_is_named(environ, named):
    with pytest.raises(InvalidConfigError, match=named):
        read_settings({}, environ, None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_num_seq: 3", "max_num_seq = 3 is not allowed: .*; did you mean max_num_seqs"),
        ("max_num_seqs: many", "max_num_seqs = 'many'"),
        ("max_num_seqs: 2.5", "max_num_seqs = 2.5"),
        ("max_num_seqs: true", "max_num_seqs = True"),
        ("max_num_seqs:", "max_num_seqs = None"),
        ("overlap: 1", "overlap = 1"),
        ("port: x", "http_port = 'x'"),
        ("enable-lora: true", "enable_lora = True is not allowed: False"),
        ("model: [a]", r"model = \['a'\]"),
        ("host: 1", "host = 1"),
        ("- max_num_seqs", "a YAML mapping"),
        ("a: [", "config"),
        ("host: !!python/object/apply:os.getcwd []", "config"),
    ],
)
def test_a_bad_line_of_the_file_is_named(write, text, named):
    with pytest.raises(InvalidConfigError, match=named):
        read_settings({}, {}, write(text))


def test_an_empty_file_sets_nothing(write):
    assert read_settings({}, {}, write("# nothing\n")) == read_settings({}, {}, None)


def test_a_file_may_be_one_of_vllms(write):
    text = """
port: 8000
served-model-name: m
enforce-eager: true
swap-space: 4
allowed-origins: ["*"]
override-generation-config: {temperature: 0.5}
log-level: INFO
"""
    settings = read_settings({}, {}, write(text))
    assert settings.serve.http_port == 8000
    assert settings.serve.cross_origin()["allow_origins"] == ["*"]
    assert settings.engine.served_model_name == "m"
    assert settings.engine.override_generation_config == '{"temperature": 0.5}'
    assert settings.log.log_level == "info"


def test_a_file_may_say_none(write):
    assert read_settings({}, {}, write("http_port: null")).serve.http_port is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config", "/nowhere/x.yaml"], "config = '/nowhere/x.yaml'"),
        (["--tls-cert", "x"], "tls_key = None"),
        (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "tls_cert = '/nowhere'"),
        (["--token-file", "/nowhere"], "token_file = '/nowhere'"),
        (["--http-port", "50051"], "http_port = 50051"),
        (["--drain-timeout", "-1"], "drain_timeout_s = -1.0"),
        (["--stuck-after-s", "0"], "stuck_after_s = 0.0"),
        (["--max-concurrent-requests", "0"], "max_concurrent_requests = 0"),
    ],
)
def test_bad_settings_end_the_command_with_one_line(arguments, named, capsys):
    assert main(["serve", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line
