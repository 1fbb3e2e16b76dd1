"""What a client that knows no proto learns from reflection and then asks; a process of its own.

Prints one JSON object. Usage: reflection_client.py ADDRESS
"""

from __future__ import annotations

import json
import sys

from grpc_requests import Client

OCTAVO = "octavo.v1.OctavoService"
INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"


def describe(client: Client, service: str, method: str) -> dict[str, object]:
    """A method's messages, and which sides stream, as the server's own descriptors say."""
    found = client.get_method_descriptor(service, method)
    kind = client.get_method_meta(service, method).method_type
    return {
        "input": found.input_type.full_name,
        "output": found.output_type.full_name,
        "streams": [not kind.is_unary_request, not kind.is_unary_response],
    }


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
        "described": {
            "generate_stream": describe(client, OCTAVO, "GenerateStream"),
            "infer_stream": describe(client, INFERENCE, "ModelStreamInfer"),
            "fields": [
                field.name
                for field in client.get_method_descriptor(OCTAVO, "Generate").input_type.fields
            ],
        },
        "health": client.service(HEALTH).Check(),
        "ready": inference.ServerReady(),
        "info": octavo.GetModelInfo(),
        "unary": octavo.Generate(request),
        "streamed": list(octavo.GenerateStream(request)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
