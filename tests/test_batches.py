"""Buckets, the plan of steps, the arrays of a step, and the feed that can be resumed."""

import collections
import json

import numpy as np
import pytest
from training import random_pairs

from retmask_jax import batches
from retmask_jax.batches import Step

BUCKETS = (8, 16, 32, 64)


def test_smallest_bucket_that_holds_the_longer_row():
    lengths = np.array([8, 9, 16, 17, 3, 32])
    assert batches.assign_buckets(lengths, BUCKETS, 1).tolist() == [8, 16, 16, 32, 8, 32]


def test_left_over_pairs_join_the_next_bucket_that_has_any():
    # Of 5 pairs up to 8 tokens the 4 shortest fill steps of 2; the longest goes past the empty 16.
    lengths = np.array([5, 8, 4, 6, 7, 20, 21])
    assert batches.assign_buckets(lengths, BUCKETS, 2).tolist() == [8, 32, 8, 8, 8, 32, 32]


@pytest.mark.parametrize("pairs_per_step", [1, 3, 8, 500])
def test_at_most_one_step_an_epoch_is_part_empty(pairs_per_step):
    lengths = np.random.default_rng(0).integers(2, 65, 200)
    assigned = batches.assign_buckets(lengths, BUCKETS, pairs_per_step)
    assert (assigned >= lengths).all()
    assert set(assigned) <= set(BUCKETS)
    plan = batches.plan_steps(assigned, pairs_per_step, 2, seed=0)
    per_epoch = -(-len(lengths) // pairs_per_step)
    assert len(plan) == 2 * per_epoch
    for epoch in (plan[:per_epoch], plan[per_epoch:]):
        assert sorted(pair for step in epoch for pair in step.pairs) == list(range(200))
        assert sum(len(step.pairs) < pairs_per_step for step in epoch) <= 1
    for step in plan:
        assert {int(assigned[pair]) for pair in step.pairs} == {step.bucket}


def test_plan_follows_the_seed():
    assigned = batches.assign_buckets(np.full(40, 5), BUCKETS, 4)
    one, same, other = (batches.plan_steps(assigned, 4, 2, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert one[:10] != one[10:]


def test_arrays_of_a_step():
    pairs = random_pairs(3)
    reference = np.arange(6, dtype=np.float32).reshape(3, 2)
    batch = batches.make_batch(pairs, reference, Step(32, (2, 0, 1)), 2, 2)
    assert batch.tokens.shape == (2, 4, 32)
    assert batch.weights.tolist() == [[1, 1], [1, 0]]
    places = [(0, 0, 2, 0), (0, 2, 2, 1), (0, 1, 0, 0), (0, 3, 0, 1), (1, 0, 1, 0), (1, 2, 1, 1)]
    for a, r, pair, side in [*places, (1, 1, 2, 0), (1, 3, 2, 1)]:  # the last two fill up
        row = pairs.row(pair, side)
        assert batch.tokens[a, r, : len(row)].tolist() == row.tolist()
        assert not batch.tokens[a, r, len(row) :].any()
        assert batch.lengths[a, r] == len(row)
        assert batch.prompt_lengths[a, r] == pairs.lengths[pair, 0]
        assert batch.reference_logps[a, r] == reference[pair, side]


def test_feed_goes_on_from_its_state():
    pairs = random_pairs(40)
    assigned = batches.assign_buckets(pairs.row_lengths, (16, 32), 4)
    plan = batches.plan_steps(assigned, 4, 2, seed=3)
    reference = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)

    def feed():
        return batches.feed(pairs, reference, plan, 2, 2)

    whole = list(feed())
    assert collections.Counter(batch.tokens.shape[2] for batch in whole) == (
        collections.Counter(step.bucket for step in plan)
    )
    first = feed()
    for _ in range(7):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    second = feed()
    second.set_state(state)
    rest = list(second)
    assert len(rest) == len(whole) - 7
    for got, want in zip(rest, whole[7:], strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
