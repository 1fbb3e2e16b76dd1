"""What NVIDIA's own client gets from a server; run as a process of its own, prints one JSON object.

Usage: triton_client.py ADDRESS MODEL
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

WAIT_S = 60


def tensors(**values: Any) -> list[triton.InferInput]:
    inputs = []
    for name, value in values.items():
        is_flag = isinstance(value, bool)
        tensor = triton.InferInput(name, [1], "BOOL" if is_flag else "BYTES")
        if isinstance(value, dict):
            value = json.dumps(value)
        data = value if is_flag else value.encode()
        tensor.set_data_from_numpy(np.array([data], dtype=bool if is_flag else np.object_))
        inputs.append(tensor)
    return inputs


def text_of(result: triton.InferResult) -> str:
    return b"".join(result.as_numpy("text_output")).decode()


def main(address: str, model: str) -> None:
    client = triton.InferenceServerClient(address)
    found: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True)["config"],
        "before": client.get_inference_statistics(as_json=True)["model_stats"],
    }
    params = {"temperature": "0", "max_tokens": 64}
    asked = tensors(
        text_input="abc", sampling_parameters=params, return_finish_reason=True,
        return_num_input_tokens=True, return_num_output_tokens=True,
        return_cumulative_logprob=True,
    )  # fmt: skip
    result = client.infer(model, asked, request_id="one", timeout=60_000_000, priority=1)
    found["unary"] = {
        "id": result.get_response().id,
        "text": text_of(result),
        "finish_reason": result.as_numpy("finish_reason")[0].decode(),
        "counts": [
            int(result.as_numpy(name)[0]) for name in ("num_input_tokens", "num_output_tokens")
        ],
        "cumulative_logprob": float(result.as_numpy("cumulative_logprob")[0]),
    }
    several = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 4}
    asked = tensors(
        text_input="abc", sampling_parameters=several, exclude_input_in_output=True
    )  # fmt: skip
    found["several"] = len(client.infer(model, asked).as_numpy("text_output"))
    grammar = {"structured_outputs": {"choice": ["left"]}, "max_tokens": 16}
    asked = tensors(text_input="x", sampling_parameters=grammar, exclude_input_in_output=True)
    found["grammar"] = text_of(client.infer(model, asked))
    errors = []
    for name, values in (
        (model, {"text_input": "abc", "sampling_parameters": {"temperature": 9}}),
        (model, {"text_input": "abc", "stream": True}),
        ("another", {"text_input": "abc"}),
        (model, {"text_input": "x" * 600}),
    ):
        try:
            client.infer(name, tensors(**values))
        except InferenceServerException as error:
            errors.append([error.status(), error.message()])
    found["errors"] = errors

    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    kinds = {
        "streamed": {"stream": True, "sampling_parameters": params},
        "whole": {"stream": False, "sampling_parameters": params},
        "bad": {"stream": True, "sampling_parameters": {"top_p": 7}},
    }
    for name, values in kinds.items():
        client.async_stream_infer(model, tensors(text_input="abc", **values), request_id=name)
    parts: dict[str, list[str]] = {name: [] for name in kinds}
    open_ids = set(kinds)
    while open_ids:
        result, error = answers.get(timeout=WAIT_S)
        if error is not None:
            parts["bad"].append(error.message())
            open_ids.discard("bad")
            continue
        response = result.get_response()
        parts[response.id].append(text_of(result))
        if response.parameters["triton_final_response"].bool_param:
            open_ids.discard(response.id)
    client.stop_stream()
    found["stream"] = parts
    found["after"] = client.get_inference_statistics(model, as_json=True)["model_stats"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
