"""What a handler takes for its client's leaving."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from octavo.server.grpc_refusal import has_left


class Context:
    """A call whose end is known at the given look."""

    def __init__(self, ends_at_look: int) -> None:
        self.looks = 0
        self._ends_at_look = ends_at_look

    def done(self) -> bool:
        self.looks += 1
        return self.looks >= self._ends_at_look


def group(*errors: Exception) -> ExceptionGroup:
    return ExceptionGroup("of a task group", errors)


@pytest.mark.parametrize(
    "error",
    [
        grpc.aio.UsageError("ended"),
        group(grpc.aio.InternalError("a write")),
        group(group(grpc.aio.InternalError("a write")), grpc.aio.UsageError("ended")),
    ],
    ids=["alone", "in a group", "in a group of groups"],
)
def test_a_failed_write_waits_for_grpc_to_say_that_the_client_has_left(error):
    context = Context(ends_at_look=4)
    assert asyncio.run(has_left(context, error))
    assert context.looks == 4


@pytest.mark.parametrize(
    "error", [ValueError("x"), group(ValueError("x"), grpc.aio.UsageError("ended"))]
)
def test_any_other_error_is_the_servers_own_while_the_call_lives(error):
    context = Context(ends_at_look=4)
    assert not asyncio.run(has_left(context, error))
    assert context.looks == 1
