"""What a client that knows no proto learns from reflection and then asks; a process of its own.

Prints one JSON object. Usage: reflection_client.py ADDRESS
"""

from __future__ import annotations

import json
import sys

from grpc_requests import Client

OCTAVO = "octavo.v1.OctavoService"
INFERENCE = "inference.GRPCInferenceService"


def main(address: str) -> None:
    client = Client.get_by_endpoint(address)
    octavo, inference = client.service(OCTAVO), client.service(INFERENCE)
    request = {
        "prompt": "abc",
        "sampling_params": {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
        "priority": "PRIORITY_HIGH",
    }
    found = {
        "services": client.service_names,
        "methods": {OCTAVO: list(octavo.method_names), INFERENCE: list(inference.method_names)},
        "ready": inference.ServerReady(),
        "info": octavo.GetModelInfo(),
        "unary": octavo.Generate(request),
        "streamed": list(octavo.GenerateStream(request)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
