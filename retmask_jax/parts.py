"""Sampling cut into parts: a part's file is on disk whole or not at all, so a kill loses little.

Part i belongs to team i % their number; see `mesh.team`. The processes of a team sample it
together, in step, and the first of them writes it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
from etils import epath

from retmask_jax import distributed
from retmask_jax.errors import UserError
from retmask_jax.mesh import teams
from retmask_jax.progress import progress
from retmask_jax.sampler import Completion, Request
from retmask_jax.workdir import PathLike, part_path, read_json, write_json, write_part

_log = logging.getLogger("retmask")

Sample = Callable[[Iterator[Request]], Iterator[Completion]]  # a Sampler


@dataclass(frozen=True)
class Job:
    """One row of a part: what to ask, and how its completion becomes the row."""

    request: Request
    row: Callable[[Completion], dict]


def cut(items: Sequence, size: int) -> list[Sequence]:
    """Cuts items into parts of `size`, in order."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def hold(path: PathLike, summary: dict, changed: str) -> None:
    """Writes what the parts are made of at the first start and holds later starts to it.

    Raises:
        UserError: it was something else; `changed` says what has changed.
    """
    if jax.process_index() == 0 and not epath.Path(path).exists():
        write_json(path, summary)
    distributed.wait(f"{path} written")
    if read_json(path) != summary:
        raise UserError(
            f"{path}: this work directory was begun with {changed}; use another --workdir"
        )


def absent(folder: PathLike, total: int) -> list[int]:
    """Returns the parts of `total` that are not on disk."""
    return [i for i in range(total) if not part_path(folder, i, total).exists()]


def unfinished(folder: PathLike, total: int) -> list[int]:
    """Returns the parts of `total` that are this team's and not on disk."""
    own = teams()
    mine = range(own.index, total, own.count)
    missing = [i for i in absent(folder, total) if i in mine]
    distributed.wait(f"{folder}: parts counted")  # before another process of the team writes one
    if len(missing) < len(mine) and missing:
        _log.info("goes on: %d of %d parts are done", len(mine) - len(missing), len(mine))
    return missing


def complete(
    folder: PathLike,
    total: int,
    jobs: Iterable[tuple[int, Sequence[Job]]],
    sampler: Sample,
    *,
    n_rows: int,
    label: str,
    unit: str,
) -> None:
    """Samples parts as one stream, and writes each with its rows in order once it is whole.

    Args:
        folder: where the parts go.
        total: number of all parts.
        jobs: (index, its rows) of the parts to do; read as the sampler needs them. A part without
            rows is written empty.
        sampler: answers the requests in any order.
        n_rows: for the progress bar.
        label: for the progress bar.
        unit: what a row is called there.
    """
    leads = teams().leads
    rows: dict[int, list[dict]] = {}
    left: dict[int, int] = {}
    asked: dict[str, tuple[int, int, Job]] = {}

    def requests() -> Iterator[Request]:
        for part, members in jobs:
            if leads and not members:
                write_part(folder, part, total, [])
            rows[part], left[part] = [{} for _ in members], len(members)
            for place, job in enumerate(members):
                asked[job.request.id] = part, place, job
                yield job.request

    for completion in progress(sampler(requests()), n_rows, label, unit):
        part, place, job = asked.pop(completion.id)
        if not leads:
            continue
        rows[part][place] = job.row(completion)
        left[part] -= 1
        if not left[part]:
            write_part(folder, part, total, rows.pop(part))
