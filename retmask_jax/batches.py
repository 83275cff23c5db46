"""Which pairs make which step, and the arrays of a step.

Every pair has one row length for the whole run (its bucket), so that its log-probs are always
computed in one shape. The plan of all steps is made up front and depends on nothing but the pairs'
lengths, the settings and the seed: a position in it is an exact data cursor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from retmask_jax.preferences import CHOSEN, REJECTED, Pairs


class Step(NamedTuple):
    """The pairs of one optimiser step, and the length their rows are padded to."""

    bucket: int
    pairs: tuple[int, ...]


class Batch(NamedTuple):
    """A step's arrays: A micro-batches of R rows, the first half chosen, the second rejected.

    Attributes:
        tokens: i32 [A, R, T], right-padded.
        prompt_lengths: i32 [A, R].
        lengths: i32 [A, R]: prompt and reply.
        reference_logps: f32 [A, R]: the reference's log-prob of the reply.
        weights: f32 [A, R / 2]: 1 for a pair, 0 for one that fills up a last step.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    reference_logps: np.ndarray
    weights: np.ndarray


def assign_buckets(
    row_lengths: np.ndarray, buckets: Sequence[int], pairs_per_step: int
) -> np.ndarray:
    """Gives each pair its row length.

    It is the smallest bucket that holds the pair's longer row, but that the pairs that would leave
    a bucket's last step part empty (its longest ones) join the next bucket that has any pairs. So
    only the highest one ends in a part-empty step.

    Args:
        row_lengths: i32 [P].
        buckets: ascending; the last holds every row.

    Returns:
        i32 [P].
    """
    order = np.argsort(row_lengths, kind="stable")
    assigned = np.empty(len(row_lengths), np.int32)
    ends = np.searchsorted(row_lengths[order], buckets, side="right")
    start = 0
    for bucket, end in zip(buckets, ends, strict=True):
        if end < len(order):
            end = start + (end - start) // pairs_per_step * pairs_per_step
        assigned[order[start:end]] = bucket
        start = end
    return assigned


def plan_steps(assigned: np.ndarray, pairs_per_step: int, epochs: int, seed: int) -> list[Step]:
    """Plans all steps: in each epoch every pair once, steps of one bucket each, in random order."""
    steps = []
    for epoch in range(epochs):
        rng = np.random.default_rng([seed, epoch])
        shuffled = []
        for bucket in np.unique(assigned):
            members = rng.permutation(np.flatnonzero(assigned == bucket))
            shuffled += group(int(bucket), members, pairs_per_step)
        steps += [shuffled[i] for i in rng.permutation(len(shuffled))]
    return steps


def group(bucket: int, members: np.ndarray, size: int) -> list[Step]:
    """Cuts the pairs of a bucket into steps of `size`, in order."""
    return [
        Step(bucket, tuple(members[i : i + size].tolist())) for i in range(0, len(members), size)
    ]


def make_batch(
    pairs: Pairs, reference: np.ndarray, step: Step, n_micro: int, micro_pairs: int
) -> Batch:
    """Builds the arrays of a step.

    Args:
        reference: f32 [P, 2]: log-probs of chosen and rejected.
        n_micro: A; with micro_pairs (R / 2) it must hold the step's pairs. What is left over is
            filled with copies of the step's first pair that weigh 0.
    """
    room = n_micro * micro_pairs
    members = np.array(step.pairs + step.pairs[:1] * (room - len(step.pairs)))
    weights = (np.arange(room) < len(step.pairs)).astype(np.float32)

    def rows(per_side: np.ndarray) -> np.ndarray:  # [pairs, 2, …] -> [A, R, …]
        split = per_side.reshape(n_micro, micro_pairs, *per_side.shape[1:])
        return np.ascontiguousarray(np.concatenate([split[:, :, 0], split[:, :, 1]], axis=1))

    tokens = np.zeros((room, 2, step.bucket), np.int32)
    for i, pair in enumerate(members):
        for side in (CHOSEN, REJECTED):
            row = pairs.row(pair, side)
            tokens[i, side, : len(row)] = row
    prompts = np.repeat(pairs.lengths[members, :1], 2, axis=1)
    return Batch(
        tokens=rows(tokens),
        prompt_lengths=rows(prompts),
        lengths=rows(prompts + pairs.lengths[members, 1:]),
        reference_logps=rows(reference[members].astype(np.float32)),
        weights=weights.reshape(n_micro, micro_pairs),
    )


def feed(
    pairs: Pairs, reference: np.ndarray, steps: Sequence[Step], n_micro: int, micro_pairs: int
) -> grain.DatasetIterator:
    """Iterates over the batches of the planned steps, built ahead of use.

    The iterator's state (get_state, set_state) is the number of steps taken.
    """
    return iter(
        grain.MapDataset.source(steps)
        .map(lambda step: make_batch(pairs, reference, step, n_micro, micro_pairs))
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    )
