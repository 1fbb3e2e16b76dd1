"""One server goes on with a stream that another began."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.client import OctavoClient
from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import Generated
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams

PROMPT = [5, 6, 7] * 9
DELTAS = SamplingParams(
    temperature=0.8, seed=11, max_tokens=300, logprobs=1, ignore_eos=True, n=2,
    frequency_penalty=0.7, output_kind=RequestOutputKind.DELTA,
)  # fmt: skip


class Reader:
    """What a client of a stream has of each completion."""

    def __init__(self, n: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.sums: list[float | None] = [None] * n
        self.ends: list[str | None] = [None] * n

    def take(self, output: Any) -> None:
        for each in output.outputs:
            self.token_ids[each.index] += each.token_ids
            self.texts[each.index] += each.text
            self.sums[each.index] = each.cumulative_logprob
            self.ends[each.index] = self.ends[each.index] or each.finish_reason

    @property
    def generated(self) -> list[Generated]:
        rows = zip(self.token_ids, self.texts, self.sums, self.ends, strict=True)
        return [Generated(tuple(ids), len(text), total, end) for ids, text, total, end in rows]


@pytest.mark.parametrize("num_messages", [1, 3])
def test_a_reader_of_two_servers_has_what_one_would_tell(live: Any, num_messages: int) -> None:
    whole, parts = Reader(2), Reader(2)
    with OctavoClient(live.grpc) as client:
        for output in client.stream(PROMPT, DELTAS):
            whole.take(output)
        stream = client.stream(PROMPT, DELTAS)
        for _, output in zip(range(num_messages), stream, strict=False):
            parts.take(output)
        stream.close()
        assert 0 < sum(map(len, parts.token_ids)) < 600
        for output in client.stream(PROMPT, DELTAS, generated=parts.generated):
            parts.take(output)
    assert (parts.token_ids, parts.texts) == (whole.token_ids, whole.texts)
    assert parts.ends == whole.ends == ["length", "length"]
    assert parts.sums == pytest.approx(whole.sums, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "generated", "field"),
    [
        ({}, [Generated((5,), 0)], "generated"),
        ({}, [Generated((5,), 0)] * 65, "generated"),
        ({}, [Generated((5,), 0), Generated((5,), 0, finish_reason="tool_calls")],
         "generated.finish_reason"),
        ({}, [Generated((5,), 0, finish_reason="stop")] * 2, "generated"),
        ({}, [Generated((5,), 0), Generated((10**6,), 0)], "generated[1].token_ids"),
        ({}, [Generated((5,) * 300, 0), Generated((5,), 0)], "generated[0].token_ids"),
        ({}, [Generated((5,) * 10_000, 0), Generated((5,), 0)], "generated[0].token_ids"),
        ({"output_kind": RequestOutputKind.CUMULATIVE}, [Generated((5,), 0)] * 2, "generated"),
    ],
)  # fmt: skip
def test_what_no_server_can_have_generated_is_refused(
    live: Any, changes: dict[str, Any], generated: list[Generated], field: str
) -> None:
    with OctavoClient(live.grpc) as client, pytest.raises(InvalidRequestError) as refused:
        list(client.stream(PROMPT, DELTAS, generated=generated, **changes))
    assert refused.value.field == field
