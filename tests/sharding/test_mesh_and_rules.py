"""Where arrays live: meshes, canonical partitions, and the fallback to whole copies."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from octavo.sharding import distributed
from octavo.sharding.mesh import make_mesh, tensor_parallel_size
from octavo.sharding.rules import DEFAULT_RULES, AxisRules, canonical_spec


def test_a_mesh_has_a_data_axis_of_one_and_automatic_axes():
    mesh = make_mesh(2)
    assert dict(mesh.shape) == {"data": 1, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert tensor_parallel_size(mesh) == 2
    assert list(make_mesh(1, jax.devices()[1:]).devices.flat) == [jax.devices()[1]]


@pytest.mark.parametrize("size", [0, -1, 99])
def test_a_mesh_wider_than_the_machine_is_refused_with_the_limit(size):
    with pytest.raises(ValueError, match=rf"tensor_parallel_size = {size} .* 1 to 2"):
        make_mesh(size, jax.devices()[:2])


def test_partitions_are_canonical():
    assert DEFAULT_RULES.spec(("vocab", "embed")) == P("tensor")
    assert DEFAULT_RULES.spec(("embed", None, "mlp")) == P(None, None, "tensor")
    assert DEFAULT_RULES.spec(("embed",)) == P()
    assert len(canonical_spec(["x", None, None])) == 1


def test_a_dimension_that_does_not_divide_is_kept_whole():
    mesh = make_mesh(2)
    assert DEFAULT_RULES.sharding(mesh, ("mlp", "embed"), (6, 4)).spec == P("tensor")
    assert DEFAULT_RULES.sharding(mesh, ("mlp", "embed"), (7, 4)).spec == P()


def test_experts_are_split_or_else_their_features():
    mesh, axes = make_mesh(2), ("expert", "embed", "mlp")
    assert DEFAULT_RULES.sharding(mesh, axes, (4, 8, 6)).spec == P("tensor")
    assert DEFAULT_RULES.sharding(mesh, axes, (3, 8, 6)).spec == P(None, None, "tensor")
    assert DEFAULT_RULES.sharding(mesh, axes, (3, 8, 7)).spec == P()
    assert DEFAULT_RULES.spec(axes) == P("tensor")


def test_unknown_names_and_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="logical axis = 'hedas'"):
        DEFAULT_RULES.spec(("hedas",))
    with pytest.raises(ValueError, match="2 names"):
        AxisRules(table=(("a", None),)).sharding(make_mesh(1), ("a",), (2, 2))


def test_one_process_starts_nothing():
    assert distributed.initialize(environ={}) is False
    assert distributed.initialize(num_processes=1, environ={}) is False
    assert distributed.initialize(environ={"OCTAVO_NUM_PROCESSES": "1"}) is False


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OCTAVO_NUM_PROCESSES": "two"}, "OCTAVO_NUM_PROCESSES = 'two'"),
        ({"OCTAVO_COORDINATOR": "host:1"}, "num_processes = None"),
        ({"OCTAVO_NUM_PROCESSES": "2"}, "coordinator_address = None"),
        (
            {"OCTAVO_NUM_PROCESSES": "2", "OCTAVO_COORDINATOR": "h:1", "OCTAVO_PROCESS_ID": "2"},
            "process_id = 2 is not allowed: 0 to 1",
        ),
    ],
)
def test_a_half_described_group_of_processes_is_refused(environ, words):
    with pytest.raises(ValueError) as caught:
        distributed.initialize(environ=environ)
    assert words in str(caught.value)
