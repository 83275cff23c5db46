"""What TPU chips can do: public figures, and the slices that the TPU compiler knows.

Compute, memory and data-centre network are Google's, from the page of each chip under
https://docs.cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x; read in November 2026). The speed
of one link, one way, is that of the table in https://jax-ml.github.io/scaling-book/tpus (same
date), a little below Google's nominal figure. Where a chip has two TensorCores that JAX shows as
one device (v4, v5p) figures are of the chip; where it shows two (tpu7x), each has half.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from retmask_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU.

    Attributes:
        name: as in a topology's name.
        flops: bfloat16 peak per second.
        hbm_bytes: memory.
        hbm_bandwidth: bytes per second.
        link_bandwidth: bytes per second through one link to one neighbour, one way.
        network_bandwidth: bytes per second to other slices.
        ring: a slice's dimension of a multiple of this size closes to a ring.
        ring_needs_all: only if every dimension does.
        options: what the compiler needs to know beside the topology's name.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    ring: int
    ring_needs_all: bool
    options: tuple[tuple[str, Any], ...] = ()


_GIB = 2**30
_MEGACORE = (("chip_config_name", "megacore"),)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * _GIB, 1200e9, 45e9, 6.25e9, 4, True, _MEGACORE),
        Chip("v5e", 197e12, 16 * _GIB, 819e9, 45e9, 3.125e9, 16, False),
        Chip("v5p", 459e12, 95 * _GIB, 2765e9, 90e9, 6.25e9, 4, True, _MEGACORE),
        Chip("v6e", 918e12, 32 * _GIB, 1638e9, 90e9, 12.5e9, 16, False),
        Chip("tpu7x", 2307e12 / 2, 96 * _GIB, 7380e9 / 2, 90e9 / 2, 12.5e9 / 2, 4, True),
    )
}


@dataclasses.dataclass(frozen=True)
class Links:
    """How fast a group of devices exchanges data.

    Attributes:
        bandwidth: bytes per second that a device sends at once along all dimensions of the slice
            that the group spans; a ring counts both ways.
        longest: devices along the longest of those dimensions.
        longest_bandwidth: the share of `bandwidth` along it.
    """

    bandwidth: float
    longest: int
    longest_bandwidth: float


def links(chip: Chip, dims: Sequence[int], group: Sequence[jax.Device]) -> Links:
    """The links that a collective among devices of one slice of shape `dims` can use."""
    coordinates = np.array([device.coords for device in group])
    spanned = {
        d: len(np.unique(coordinates[:, d]))
        for d in range(coordinates.shape[1])
        if len(np.unique(coordinates[:, d])) > 1
    }
    speeds = {d: _bandwidth(chip, dims, d, size) for d, size in spanned.items()}
    if not spanned:  # the two devices of one chip
        return Links(chip.link_bandwidth, 2, chip.link_bandwidth)
    longest = max(spanned, key=lambda d: spanned[d] / speeds[d])
    return Links(sum(speeds.values()), spanned[longest], speeds[longest])


def _bandwidth(chip: Chip, dims: Sequence[int], d: int, size: int) -> float:
    closes = [dim % chip.ring == 0 for dim in dims]
    ring = size == dims[d] and (all(closes) if chip.ring_needs_all else closes[d])
    return chip.link_bandwidth * (2 if ring else 1)


@dataclasses.dataclass(frozen=True)
class Slice:
    """TPU slices of one shape, known to the compiler.

    Attributes:
        name: such as v5e:4x8.
        dims: chips along each dimension.
        count: how many such slices.
        devices: of all slices.
    """

    name: str
    chip: Chip
    dims: tuple[int, ...]
    count: int
    devices: list[jax.Device]


def open_slice(topology: str, slices: int = 1) -> Slice:
    """Asks the TPU compiler for a slice such as v5e:4x8, or several of them.

    Raises:
        UserError: libtpu is not installed, or there is no such slice.
    """
    known = f"want CHIP:AxB or CHIP:AxBxC, CHIP one of {', '.join(CHIPS)}, e.g. v5e:4x8"
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise UserError(f"--topology={topology}: {known}")
    if slices < 1:
        raise UserError(f"--slices={slices}: at least 1")
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            "plan needs the TPU compiler: pip install 'retmask-jax[tpu]' (no TPU is needed)"
        )
    for variable, value in {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(variable, value)
    chip, dims = CHIPS[name], tuple(int(d) for d in shape.split("x"))
    options = dict(chip.options, chips_per_host_bounds=_host_bounds(dims))
    if slices > 1:
        options["num_slices"] = slices
    try:
        found = topologies.get_topology_desc(topology, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={topology}: {one_line(error)}; {known}") from None
    return Slice(topology, chip, dims, slices, list(found.devices))


def _host_bounds(dims: Sequence[int]) -> tuple[int, int, int]:
    """Chips of one host: a whole small slice of a flat torus (up to 8 chips), else 2 x 2."""
    if len(dims) == 2 and math.prod(dims) <= 8:
        return (*dims, 1)
    return (2, 2, 1)


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
