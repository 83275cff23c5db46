"""Logical axes of arrays, and the one table that maps them to axes of the mesh."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp"),
    "slice_batch": ("data",),
    "length": ("sequence",),
    "position": ("data", "fsdp", "sequence"),  # positions of all rows in one axis
    # weights
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    # never split
    "layers": (),
    "head_dim": (),
}


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes on this mesh.

    Args:
      axes: a logical axis (a key of RULES) or None for each dimension.
      shape: the array's shape.
      mesh: mesh axes that it lacks count as size 1.

    Raises:
      ValueError: two dimensions want the same mesh axis, or a size is not divisible; the message
        names the axis and the numbers.
    """
    spec: list[tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for axis, size in zip(axes, shape, strict=True):
        names = _mesh_axes(axis, mesh)
        for name in names:
            if name in taken:
                raise ValueError(
                    f"mesh axis {name!r} is wanted by both {taken[name]!r} and {axis!r} of {axes}"
                )
            taken[name] = str(axis)
        ways = _ways(names, mesh)
        if size % ways:
            raise ValueError(
                f"mesh axis {' x '.join(names)} of {ways} does not divide the logical axis "
                f"{axis!r} of size {size}"
            )
        spec.append(names or None)
    return PartitionSpec(*spec)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins the sharding of an activation by logical axes, on the mesh set by `jax.set_mesh`.

    A dimension that its mesh axes do not divide stays whole: activations come in any batch size.
    Without a mesh this is the identity.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(axes, x.shape, mesh))


def activation_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """As `partition_spec`, but a dimension that its mesh axes do not divide stays whole."""
    spec = [
        names if (names := _mesh_axes(axis, mesh)) and size % _ways(names, mesh) == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return PartitionSpec(*spec)


def _mesh_axes(axis: str | None, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    if axis is None:
        return ()
    if axis not in RULES:
        raise ValueError(f"unknown logical axis {axis!r}; known: {', '.join(RULES)}")
    return tuple(name for name in RULES[axis] if mesh.shape.get(name, 1) > 1)


def _ways(names: Sequence[str], mesh: Mesh | AbstractMesh) -> int:
    ways = 1
    for name in names:
        ways *= mesh.shape[name]
    return ways
