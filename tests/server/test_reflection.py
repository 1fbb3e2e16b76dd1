"""Clients that have none of our protos find the services by reflection and use them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.server.client import OctavoClient
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

CLIENT = Path(__file__).with_name("reflection_client.py")
MANY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_requests") is None,
    reason="grpc-requests is not installed: requirements-clients.txt",
)
def test_a_client_without_protos_generates(live):
    done = subprocess.run(
        [sys.executable, str(CLIENT), live.grpc],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"octavo.v1.OctavoService", "grpc.health.v1.Health"} <= set(found["services"])
    assert "GenerateStream" in found["methods"]["octavo.v1.OctavoService"]
    assert "ModelStreamInfer" in found["methods"]["inference.GRPCInferenceService"]
    described = found["described"]
    assert described["generate_stream"] == {
        "input": "octavo.v1.GenerateRequest", "output": "octavo.v1.GenerateResponse",
        "streams": [False, True],
    }  # fmt: skip
    assert described["infer_stream"]["streams"] == [True, True]
    assert described["fields"] == list(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert found["health"] == {"status": "SERVING"}
    assert found["ready"] == {"ready": True}
    assert found["info"]["model"] == "tiny"
    with OctavoClient(live.grpc) as client:
        expected = client.generate("abc", MANY).outputs[0]
    [output] = found["unary"]["outputs"]
    assert output["text"] == expected.text
    assert output["finish_reason"] == "FINISH_REASON_LENGTH"
    parts = [part["outputs"][0].get("text", "") for part in found["streamed"]]
    assert "".join(parts) == expected.text
    # How many messages there are is a matter of the machine's speed.
    ends = [bool(part.get("finished")) for part in found["streamed"]]
    assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="no grpcurl here")
def test_grpcurl_lists_describes_and_calls(live):
    def grpcurl(*args: str) -> str:
        return subprocess.run(
            ["grpcurl", "-plaintext", *args],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip

    assert "octavo.v1.OctavoService" in grpcurl(live.grpc, "list").split()
    described = grpcurl(live.grpc, "describe", "octavo.v1.OctavoService")
    assert "rpc GenerateStream" in described
    body = json.dumps({"prompt": "abc", "sampling_params": {"max_tokens": 3, "ignore_eos": True}})
    answer = json.loads(grpcurl("-d", body, live.grpc, "octavo.v1.OctavoService/Generate"))
    [output] = answer["outputs"]
    # Descriptors that come by reflection name no JSON names: older versions keep the proto's.
    assert len(output.get("tokenIds") or output["token_ids"]) == 3
