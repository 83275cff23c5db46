"""Logical axes to mesh axes: the table, its refusals, and the mesh section of a config."""

import jax
import numpy as np
import pytest
from conftest import TINY_HF, tiny_hf
from jax.sharding import AxisType, PartitionSpec
from ml_collections import ConfigDict

from retmask_jax.errors import UserError
from retmask_jax.mesh import AXES, batch_sharding, batch_ways, make_mesh, mesh_shape, shardings
from retmask_jax.models import config_from_hf
from retmask_jax.models.decoder import abstract, parameters
from retmask_jax.models.partitioning import partition_spec


def section(**sizes: int) -> ConfigDict:
    return ConfigDict({"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1, **sizes})


def mesh_of(**sizes: int):
    return make_mesh(section(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def test_one_axis_fills():
    assert mesh_shape(section(fsdp=-1, tensor=2), 8) == {
        "data": 1,
        "fsdp": 4,
        "sequence": 1,
        "tensor": 2,
    }


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"fsdp": 3}, "8 devices"),
        ({"fsdp": -1, "tensor": 3}, "8 devices"),
        ({"fsdp": -1, "data": -1}, "at most one"),
        ({"fsdp": 0}, "positive"),
        ({"fsdp": 16}, "fsdp=16"),
    ],
)
def test_impossible_meshes_are_refused(sizes, word):
    with pytest.raises(UserError, match=word):
        mesh_shape(section(**sizes), 8)


def test_specs():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    spec = partition_spec(("embed", "heads", "head_dim"), (64, 8, 16), mesh)
    assert spec == PartitionSpec(("fsdp",), ("tensor",), None)
    assert partition_spec(("batch", None), (8, 5), mesh) == PartitionSpec(("data", "fsdp"), None)
    assert batch_ways(mesh) == 4
    assert batch_sharding(mesh).shard_shape((8,)) == (2,)


def test_refusals_name_axis_and_numbers():
    mesh = mesh_of(fsdp=2, tensor=4)
    with pytest.raises(ValueError, match=r"tensor of 4 does not divide .*'heads' of size 9"):
        partition_spec(("embed", "heads", "head_dim"), (64, 9, 16), mesh)
    with pytest.raises(ValueError, match=r"'tensor' is wanted by both 'heads' and 'mlp'"):
        partition_spec(("heads", "mlp"), (8, 8), mesh)
    with pytest.raises(ValueError, match="unknown logical axis 'width'"):
        partition_spec(("width",), (8,), mesh)
    model = abstract(
        config_from_hf(tiny_hf("llama", num_attention_heads=6, num_key_value_heads=2, head_dim=8)),
        "float32",
    )
    with pytest.raises(UserError, match=r"blocks\.0\.attention\.\w: .*tensor of 4"):
        shardings(model, mesh)


@pytest.mark.parametrize("family", TINY_HF)
def test_every_matrix_is_split_and_every_weight_is_a_shard_of_itself(family):
    mesh = mesh_of(fsdp=4, tensor=2)
    model = abstract(config_from_hf(tiny_hf(family)), "float32")
    placed = parameters(shardings(model, mesh))
    for name, param in parameters(model).items():
        shard = placed[name].get_value().shard_shape(param.shape)
        if "norm" not in name:
            assert np.prod(shard) * 8 == np.prod(param.shape), name
