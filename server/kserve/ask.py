"""From a `ModelInferRequest` to what the engine takes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.request import Priority
from octavo.engine.sampling_defaults import SamplingDefaults
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.kserve.tensors import read_inputs
from octavo.server.proto.kserve.v2 import inference_pb2 as pb

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
"""Input -> datatype; all but the first may be left out."""
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
MAX_ID_CHARS = 200
MAX_ENTRIES = 256
"""Of a request's inputs, outputs and parameters, each."""
MAX_PARAMETERS_CHARS = 262_144

_FIELDS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
_FLOATS = frozenset(name for name, default in _FIELDS.items() if type(default) is float)
_INTEGERS = frozenset(
    ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
)
_FLAGS = frozenset(name for name, default in _FIELDS.items() if type(default) is bool)
_IGNORED = ("sequence_", "triton_")
_MICROSECONDS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as the engine takes it.

    Attributes:
        prompt: the text.
        params: how its continuation is chosen.
        stream: whether the answer comes piece by piece.
        before: what stands before the continuation in the output: the prompt, or nothing.
        wanted: outputs to give.
        request_id: the client's own id; None if it gave none.
        priority, timeout_s: see `Front.generate`.
    """

    prompt: str
    params: SamplingParams
    stream: bool
    before: str
    wanted: tuple[str, ...]
    request_id: str | None
    priority: Priority
    timeout_s: float | None


def read_ask(request: pb.ModelInferRequest, defaults: SamplingDefaults, *, may_stream: bool) -> Ask:
    """Checks a request.

    Args:
        defaults: what it takes that it does not say.
        may_stream: whether the answer may come piece by piece.

    Raises:
        InvalidRequestError: something that can never be served; names the field.
    """
    check_entries(request)
    inputs = read_inputs(request, INPUTS)
    if "text_input" not in inputs:
        raise InvalidRequestError("text_input", None, "given: it is required")
    stream = inputs.get("stream", False)
    if stream and not may_stream:
        raise InvalidRequestError("stream", True, "false, or ask by ModelStreamInfer")
    excludes = inputs.get("exclude_input_in_output", stream)
    if stream and not excludes:
        allowed = "true, or not given, when streaming"
        raise InvalidRequestError("exclude_input_in_output", False, allowed)
    request_id = check_id(request)
    options, values = read_options(request.parameters)
    values |= _sampling_parameters(inputs.get("sampling_parameters"))
    if inputs.get("return_cumulative_logprob"):
        values.setdefault("logprobs", 0)
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    params = defaults.params(**values, output_kind=kind)
    if stream and params.n > 1:
        raise InvalidRequestError("n", params.n, "1 when streaming")
    return Ask(
        prompt=inputs["text_input"],
        params=params,
        stream=stream,
        before="" if excludes else inputs["text_input"],
        wanted=_wanted(request, inputs),
        request_id=request_id,
        priority=options.get("priority", Priority.NORMAL),
        timeout_s=options.get("timeout_s"),
    )


def check_entries(request: pb.ModelInferRequest) -> None:
    """Raises InvalidRequestError for too many inputs, outputs or parameters."""
    for name in ("inputs", "outputs", "parameters"):
        if (count := len(getattr(request, name))) > MAX_ENTRIES:
            raise InvalidRequestError(name, f"{count} entries", f"at most {MAX_ENTRIES}")


def check_id(request: pb.ModelInferRequest) -> str | None:
    """The client's own id; None if it gave none. Raises InvalidRequestError for a long one."""
    if len(request.id) > MAX_ID_CHARS:
        raise InvalidRequestError("id", request.id, f"at most {MAX_ID_CHARS} characters")
    return request.id or None


def _wanted(request: pb.ModelInferRequest, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    wanted = ["text_output"]
    wanted += [name for name in OUTPUTS if inputs.get(f"return_{name}")]
    for output in request.outputs:
        if output.name not in wanted:
            allowed = f"{', '.join(OUTPUTS)}; all but the first with their return_ input"
            raise InvalidRequestError("outputs", output.name, allowed)
    return tuple(wanted)


def _sampling_parameters(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    if len(text) > MAX_PARAMETERS_CHARS:
        allowed = f"at most {MAX_PARAMETERS_CHARS} characters of JSON"
        raise InvalidRequestError("sampling_parameters", f"{len(text)} characters", allowed)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequestError("sampling_parameters", text, "a JSON object") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("sampling_parameters", text, "a JSON object")
    return {name: _typed(name, value) for name, value in values.items()}


def read_options(
    parameters: Mapping[str, pb.InferParameter],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the request, and sampling parameters."""
    options: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        value = None if which is None else getattr(parameter, which)
        if name.startswith(_IGNORED):
            continue
        if name == "priority":
            options["priority"] = _priority(value)
        elif name == "timeout":
            options["timeout_s"] = _timeout_s(value)
        else:
            values[name] = _typed(name, value)
    return options, values


def _priority(value: object) -> Priority:
    if isinstance(value, int) and value == 0:
        return Priority.NORMAL
    if isinstance(value, int) and 1 <= value <= len(Priority):
        return Priority(value - 1)
    raise InvalidRequestError("priority", value, "1 to 4, 1 served first; 0 is normal")


def _timeout_s(value: object) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InvalidRequestError("timeout", value, "microseconds; 0 for none")
    return value * _MICROSECONDS or None


def _typed(name: str, value: Any) -> Any:
    """A sampling parameter, whose numbers may have been written as text, as Triton's users do."""
    if name not in _FIELDS or name == "output_kind":
        names = ", ".join(field for field in _FIELDS if field != "output_kind")
        raise InvalidRequestError("sampling_parameters", name, names)
    if not isinstance(value, str):
        return value
    try:
        if name in _FLOATS:
            return float(value)
        if name in _INTEGERS:
            return int(value)
    except ValueError:
        raise InvalidRequestError(name, value, "a number") from None
    if name in _FLAGS and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value
