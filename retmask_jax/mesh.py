"""The device mesh: its four axes, and how a model's weights lie on it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from retmask_jax.errors import UserError
from retmask_jax.models.config import DecoderConfig
from retmask_jax.models.decoder import Decoder, abstract
from retmask_jax.models.layers import logical_axes
from retmask_jax.models.partitioning import RULES, partition_spec

_COPY_BYTES = 4 * 2**30  # a quarter of the memory of the smallest TPU
AXES = ("data", "fsdp", "sequence", "tensor")


def mesh_shape(config: ConfigDict, n_devices: int) -> dict[str, int]:
    """The size of every mesh axis; one axis may be -1 and takes the devices that are left.

    Args:
      config: the section `mesh` of the configuration.
      n_devices: how many devices there are to fill.

    Raises:
      UserError: the sizes do not multiply to `n_devices`; names the axes and the numbers.
    """
    shape = {axis: int(config[axis]) for axis in AXES}
    asked = " x ".join(f"{axis}={size}" for axis, size in shape.items())
    free = [axis for axis, size in shape.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in shape.values()):
        raise UserError(f"mesh {asked}: sizes are positive, and at most one is -1 (fill)")
    fixed = math.prod(size for size in shape.values() if size != -1)
    if free and n_devices % fixed == 0:
        shape[free[0]] = n_devices // fixed
    if math.prod(shape.values()) != n_devices:
        raise UserError(f"mesh {asked} does not fit {n_devices} devices; change --config.mesh.*")
    return shape


def make_mesh(config: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of the section `mesh` of the configuration over `devices` (default: all).

    On several TPU slices, `data` runs across the slices, over the data-centre network, and every
    other axis stays inside one.

    Raises:
      UserError: see `mesh_shape`; or the slices do not divide `data`.
    """
    devices = devices if devices is not None else jax.devices()
    shape = mesh_shape(config, len(devices))
    axis_types = (AxisType.Auto,) * len(AXES)
    return Mesh(_grid(shape, devices), AXES, axis_types=axis_types)


def team(device: jax.Device) -> int:
    """The number of the team that a device samples with: its TPU slice, else its process.

    The TPU compiler refuses programs for a part of a v5e or v6e slice.
    """
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else device.process_index


class Teams(NamedTuple):
    """This process's place among the teams of the run; each samples its share of the work.

    Attributes:
        count: of teams.
        index: of this process's.
        leads: whether it is the one of its team that writes.
    """

    count: int
    index: int
    leads: bool


def teams() -> Teams:
    """The teams of this run."""
    first = {}  # process of each team
    for device in jax.devices():
        first.setdefault(team(device), device.process_index)
    own = team(jax.local_devices()[0])
    return Teams(len(first), sorted(first).index(own), first[own] == jax.process_index())


def team_devices() -> list[jax.Device]:
    """The devices of this process's team."""
    own = team(jax.local_devices()[0])
    return [device for device in jax.devices() if team(device) == own]


def sampling_mesh(
    config: ConfigDict,
    model: DecoderConfig,
    devices: list[jax.Device] | None = None,
    n_run: int | None = None,
) -> Mesh:
    """The mesh for sampling, over the devices of one team.

    Each axis is as long as in the run's mesh if that fits, the innermost axes first; `data` takes
    what is left. Along `fsdp` all weights would be gathered for each token. So as much of it as
    divides heads, MLP and vocabulary becomes `tensor`, and as much of the rest `data` as leaves a
    device no more than _COPY_BYTES of weights.

    Args:
      config: the whole configuration.
      model: the model's dimensions.
      devices: the team's (default: this process's team).
      n_run: how many devices the run has (default: this run).

    Raises:
      UserError: see `mesh_shape`.
    """
    devices = devices if devices is not None else team_devices()
    shape, left = mesh_shape(config.mesh, n_run or jax.device_count()), len(devices)
    for axis in reversed(AXES[1:]):
        shape[axis] = math.gcd(shape[axis], left)
        left //= shape[axis]
    shape["data"] = left
    divisible = math.gcd(model.n_heads, model.n_kv_heads, model.d_ff, model.vocab_size)
    more = math.gcd(shape["fsdp"], divisible // math.gcd(divisible, shape["tensor"]))
    shape["tensor"] *= more
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract(model)))
    held = weights * jnp.dtype(config.model.dtype).itemsize / shape["tensor"]
    split = shape["fsdp"] // more
    ways = [n for n in range(1, split + 1) if split % n == 0 and held / n <= _COPY_BYTES]
    shape["fsdp"] = min(ways, default=split)
    shape["data"] *= split // shape["fsdp"]
    axis_types = (AxisType.Auto,) * len(AXES)
    return Mesh(_grid(shape, devices), AXES, axis_types=axis_types)


def _grid(shape: dict[str, int], devices: list[jax.Device]) -> np.ndarray:
    """The devices in the order in which neighbours on the mesh are near one another."""
    sizes = tuple(shape.values())
    if devices[0].platform != "tpu":
        return mesh_utils.create_device_mesh(sizes, devices)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if shape["data"] % slices:
        raise UserError(
            f"mesh data={shape['data']} is not a multiple of the {slices} slices that it runs "
            f"across; set --config.mesh.data={slices}"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (sizes[0] // slices, *sizes[1:]),
        (slices, *(1 for _ in sizes[1:])),
        devices,
        allow_split_physical_axes=True,
    )


def shardings(model: Decoder, mesh: Mesh) -> Decoder:
    """The model with, in place of each array, its NamedSharding.

    Args:
      model: with arrays or jax.ShapeDtypeStruct.
      mesh: any mesh with axes out of AXES.

    Raises:
      UserError: an axis of the mesh does not divide a weight; names weight, axis and numbers.
    """

    def one(path: tuple, param: nnx.Param) -> nnx.Param:
        try:
            spec = partition_spec(logical_axes(param), param.shape, mesh)
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise UserError(f"{name}: {error}; change --config.mesh.*") from None
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), param)

    return jax.tree_util.tree_map_with_path(
        one, model, is_leaf=lambda node: isinstance(node, nnx.Param)
    )


def cut_along(sharding: NamedSharding, shape: Sequence[int], dims: Sequence[int]) -> NamedSharding:
    """A sharding with parts as large, but cut along `dims` as far as they can be.

    The mesh's axes are taken apart into prime factors. Those that cut another dimension move to the
    first of `dims` that they divide; what none of them can take stays.
    """
    mesh, left = sharding.mesh, list(shape)
    spec = [jax.tree.leaves(part) for part in (*sharding.spec, *(() for _ in shape))][: len(shape)]
    cuts = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
    factors = [(axis, prime) for axis, size in mesh.shape.items() for prime in _primes(size)]
    placed: list[list[str]] = [[] for _ in shape]

    def place(i: int, dim: int) -> None:
        placed[dim].append(f"factor{i}")
        left[dim] //= factors[i][1]

    elsewhere = []
    for i, (axis, _) in enumerate(factors):
        if cuts.get(axis) in dims:
            place(i, cuts[axis])
        elif axis in cuts:
            elsewhere.append(i)
    for i in elsewhere:
        axis, prime = factors[i]
        place(i, next((dim for dim in dims if left[dim] % prime == 0), cuts[axis]))
    names = [f"factor{i}" for i in range(len(factors))]
    grid = mesh.devices.reshape([prime for _, prime in factors])
    fine = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(fine, PartitionSpec(*(tuple(axes) for axes in placed)))


def _primes(n: int) -> list[int]:
    """The prime factors of n, ascending."""
    found = []
    for divisor in range(2, n + 1):
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
    return found


def batch_sharding(mesh: Mesh, *leading: None) -> NamedSharding:
    """Rows over the data axes; `leading` Nones stand for axes in front of the rows."""
    return NamedSharding(mesh, PartitionSpec(*leading, RULES["batch"]))


def batch_ways(mesh: Mesh) -> int:
    """Over how many shards the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])
