"""The generated code and what it must cover."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto import generate
from octavo.server.proto.octavo.v1 import octavo_pb2, octavo_pb2_grpc


def test_generated_code_is_current(capsys):
    pytest.importorskip("grpc_tools")
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_stale_generated_code_is_noticed_and_rewritten(tmp_path, monkeypatch, capsys):
    pytest.importorskip("grpc_tools")
    for name in generate.SOURCES:
        source = tmp_path / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text((generate.ROOT / name).read_text())
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "stale: " in capsys.readouterr().out
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_the_message_has_every_sampling_parameter():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields <= set(octavo_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_the_generated_stub_offers_every_method():
    names = set(octavo_pb2.DESCRIPTOR.services_by_name["OctavoService"].methods_by_name)
    assert names <= set(dir(octavo_pb2_grpc.OctavoServiceServicer))
    assert "GenerateStream" in names
