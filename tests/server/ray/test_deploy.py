"""What `octavo deploy` understands, and how it refuses; no cluster is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.main import main
from octavo.server.ray.deploy_config import DeployConfig
from octavo.server.ray.server_words import check_words

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--replicas", "0", "m"], "replicas = 0"),
        (["--autoscale", "moods", "m"], "autoscale.signal = 'moods'"),
        (["--autoscale", "refusals", "m"], "of signal saturation"),
        (["--autoscale", "saturation:least=2,most=4", "--replicas", "5", "m"], "replicas = 5"),
        (["--cpus-per-replica", "-1", "m"], "cpus_per_replica = -1"),
        (["--gpus-per-replica", "99", "m"], "gpus_per_replica = 99"),
        (["--resources", "TPU", "m"], "resources = 'TPU'"),
        (["--resources", '{"TPU": 0}', "m"], "resources = '{\"TPU\": 0}'"),
        (["--listen", "0.0.0.0", "m"], "loopback or node"),
        (["--listen", "node", "m"], "given with --token-file"),
        (["--name", "a b", "m"], "name = 'a b'"),
        (["--start-cluster", "--address", "x:1", "m"], "left out with --start-cluster"),
        (["--delete", "m"], "given with --name and --address alone"),
        ([], "MODEL = None"),
        (["m", "--replicas", "2"], "stand before MODEL"),
        (["m", "n"], "words behind MODEL = 'n'"),
        (["m", "--max-num-seqs", "0"], "max_num_seqs = 0"),
        (["m", "--grpc-port", "50051"], "grpc_port = 50051"),
        (["m", "--host", "0.0.0.0"], "as --listen says"),
        (["m", "--num-hosts", "2"], "a replica is one host"),
        (["m", "--tls-cert", "x", "--tls-key", "y"], "no TLS yet"),
        (["m", "--config", "x.yaml"], "give the settings as options"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_an_option_of_the_front_that_there_is_none_of_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["deploy", "--route", "--htp-port 8000", "m"])
    assert "did you mean --http-port?" in capsys.readouterr().err


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
@pytest.mark.parametrize(
    "argv", [["deploy", "m"], ["route", "--model", "m", "--backend", "ray:octavo"]]
)
def test_without_ray_the_extra_is_named(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert "pip install 'octavo[ray]'" in capsys.readouterr().err


def test_amounts_of_a_replica_are_read() -> None:
    config = DeployConfig(replicas=3, resources='{"TPU": 4, "TPU-v6e-8-head": 1}')
    assert config.other_resources() == {"TPU": 4, "TPU-v6e-8-head": 1}
    assert DeployConfig().other_resources() == {}


def test_servers_words_are_those_of_serve(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    words = ["--max-num-seqs", "3", "--token-file", str(tokens), "--drain-s", "7"]
    settings = check_words("/on/every/node", words, "node")
    assert settings.engine.model == "/on/every/node"
    assert settings.engine.max_num_seqs == 3
    assert settings.serve.drain_timeout_s == 7
    with pytest.raises(InvalidConfigError, match="http_port"):
        check_words("m", ["--http-port", "0"], "loopback")
