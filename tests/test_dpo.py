"""The DPO step: against TRL's run, against PyTorch, on meshes, and where it must not learn."""

import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY_HF
from flax import nnx
from training import UNKNOWN, Trainer, gradient_norms, options, random_pairs, tiny, with_reference

from retmask_jax import batches, dpo
from retmask_jax.batches import Batch, Step
from retmask_jax.logprobs import reply_logprobs
from retmask_jax.models.decoder import parameters
from retmask_jax.preferences import Pairs

TRL = json.loads((Path(__file__).parent / "data" / "trl_dpo.json").read_text())
FULL = os.environ.get("RETMASK_FULL") == "1"


# --------------------------------------------------------------------------------- TRL's own run


def trl_rows(index):
    """(prompt, reply) of the chosen and of the rejected side."""
    chosen, rejected = TRL["pairs"][index]["chosen"], TRL["pairs"][index]["rejected"]
    return chosen, (rejected[0] or chosen[0], rejected[1])


def trl_batch(indices, length):
    """Two micro-batches of two pairs; their reference log-probs are to be set."""
    tokens = np.zeros((2, 4, length), np.int32)
    prompts, lengths = np.zeros((2, 2, 4), np.int32)
    for i, index in enumerate(indices):
        for side, (prompt, reply) in enumerate(trl_rows(index)):
            at = i // 2, 2 * side + i % 2
            lengths[at] = len(prompt) + len(reply)
            prompts[at] = len(prompt)
            tokens[at][: lengths[at]] = prompt + reply
    unknown, weights = np.zeros((2, 4), np.float32), np.ones((2, 2), np.float32)
    return Batch(tokens, prompts, lengths, unknown, weights)


def trl_options():
    return options(learning_rate=5e-5, pairs_per_step=4, micro_pairs=2, head_chunk=256)


@pytest.mark.slow
def test_log_probs_equal_trls(smollm2):
    model, _ = smollm2
    score = jax.jit(lambda *xs: reply_logprobs(model, *xs, dtype=jnp.float32, chunk=512))
    for index in range(len(TRL["pairs"]) if FULL else 4):
        for (prompt, reply), name in zip(trl_rows(index), ("chosen", "rejected"), strict=True):
            row = np.zeros((1, 128 if len(prompt + reply) <= 128 else 1024), np.int32)
            row[0, : len(prompt + reply)] = prompt + reply
            total, got = score(row, np.array([len(prompt)]), np.array([len(prompt + reply)]))
            want = TRL["pairs"][index]
            np.testing.assert_allclose(total[0], want[f"{name}_logp"], rtol=5e-5)
            if f"{name}_token_logps" in want:
                scored = got[0, len(prompt) - 1 : len(prompt + reply) - 1]
                np.testing.assert_allclose(scored, want[f"{name}_token_logps"], atol=1e-3)


@pytest.mark.slow
def test_steps_equal_trls(smollm2):
    """The first step; with RETMASK_FULL=1 all twelve, in order."""
    model, config = smollm2
    steps = TRL["trace"] if FULL else TRL["trace"][:1]
    trainer = Trainer(model, trl_options(), n_steps=12)
    todo = [trl_batch(step["pairs"], 1024 if 7 in step["pairs"] else 128) for step in steps]
    todo = [with_reference(trainer, batch) for batch in todo[:6]] * 2
    for number, (batch, want) in enumerate(zip(todo, steps, strict=False), 1):
        metrics = trainer.take(batch)
        print(number, {name: float(value) for name, value in metrics.items()}, want)
        assert metrics["loss"] == pytest.approx(want["loss"], abs=2e-3)
        close = 0.01 if number <= 6 else 0.05
        assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=close)
        assert metrics["learning_rate"] == pytest.approx(want["learning_rate"], rel=1e-6, abs=0)
        margin = want["rewards/margins"]
        assert metrics["rewards/margins"] == pytest.approx(margin, rel=0.02, abs=2e-3)
        if number == 1:
            # The first update runs at rate 0: weights stay; moments hold the clipped gradient.
            assert metrics["update_norm"] == 0 and trainer.state.applied == 1
            for name, norm in gradient_norms(trainer, metrics, config).items():
                assert norm == pytest.approx(TRL["grad_norms_step_1"][name], rel=0.01), name


def test_learning_rates_equal_trls():
    rates = dpo.schedule(trl_options().train, 12)
    for count, step in enumerate(TRL["trace"]):
        assert float(rates(count)) == pytest.approx(step["learning_rate"], rel=1e-6, abs=0)


@pytest.mark.parametrize(("n_steps", "ratio"), [(1, 0.1), (1, 0.0), (3, 1.0), (5, 0.0)])
def test_schedule_of_short_runs(n_steps, ratio):
    rates = dpo.schedule(options(warmup_ratio=ratio).train, n_steps)
    values = [float(rates(count)) for count in range(n_steps)]
    assert np.isfinite(values).all()
    assert values[0] == pytest.approx(0.0 if ratio else 1e-3)


# ---------------------------------------------------------------------------------------- meshes


@pytest.fixture(scope="module")
def one_device():
    """(batch, metrics of two steps) of one device."""
    trainer = Trainer(tiny(), MESH_OPTIONS)
    batch = batches.make_batch(random_pairs(8), UNKNOWN, Step(32, tuple(range(8))), 2, 4)
    batch = with_reference(trainer, batch)
    return batch, [trainer.take(batch) for _ in range(2)]


MESH_OPTIONS = options(pairs_per_step=8, micro_pairs=4, warmup_ratio=0.0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2},
        {"tensor": 2},
        {"fsdp": 2, "tensor": 2},
        {"data": 2, "fsdp": 4},
        {"fsdp": 2, "sequence": 2, "tensor": 2},
    ],
    ids=str,
)
def test_meshes_equal_one_device(one_device, sizes):
    batch, want = one_device
    trainer = Trainer(tiny(), MESH_OPTIONS, **sizes)
    for expected in want:
        metrics = trainer.take(batch)
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    tx = dpo.optimizer(MESH_OPTIONS.train, 10, trainer.like)
    placed = dpo.state_shardings(trainer.like, tx, trainer.mesh)
    assert jax.tree.map(lambda x: x.sharding, trainer.state) == placed


# ---------------------------------------------------------------------------------- what it does


def test_step_zero_has_loss_ln2_and_margin_zero(one_device):
    _, (first, second) = one_device
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)
    for name in ("rewards/margins", "rewards/chosen", "rewards/accuracies"):
        assert first[name] == 0
    assert second["loss"] < first["loss"]


def test_micro_batches_do_not_matter():
    """Nor do the copies that fill up a last step."""
    model = tiny()
    pairs, members = random_pairs(3), Step(32, (0, 1, 2))
    results = []
    for n_micro, micro_pairs in [(1, 3), (2, 2)]:
        trainer = Trainer(model, options(micro_pairs=micro_pairs, warmup_ratio=0.0))
        batch = batches.make_batch(pairs, UNKNOWN, members, n_micro, micro_pairs)
        batch = with_reference(trainer, batch)
        first, second = trainer.take(batch), trainer.take(batch)
        assert first["tokens"] == (2 * pairs.lengths[:, 0] + pairs.lengths[:, 1:].sum(1)).sum()
        results.append([second[name] for name in ("loss", "grad_norm", "rewards/margins")])
    np.testing.assert_allclose(results, [results[0]] * 2, rtol=1e-4)


@pytest.fixture(scope="module")
def four_micro_batches():
    return Trainer(tiny(), options(micro_pairs=1, warmup_ratio=0.0))


def test_c12_identical_pair_forced_in_teaches_nothing(four_micro_batches):
    """C12: loss ln 2, zero gradient, not an accuracy win."""
    trainer = four_micro_batches
    trainer.restart()
    ids = np.array([5, 9, 3, 7, 8, 7, 8], np.int32)
    pairs = Pairs(ids, np.array([[3, 2, 2]], np.int32), np.array(["same/0"]))
    batch = batches.make_batch(pairs, UNKNOWN, Step(32, (0,)), 4, 1)
    metrics = trainer.take(with_reference(trainer, batch))
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert metrics["grad_norm"] < 1e-5
    assert metrics["rewards/accuracies"] == 0


def test_d1_small_updates_move_the_masters():
    """D1: weight 0.02, stored in bfloat16 at the source, AdamW, rate 5e-7, 100 steps."""
    train = options(learning_rate=5e-7, warmup_ratio=0.0, weight_decay=0.0).train
    start = {"w": jnp.full((4, 4), 0.02, jnp.bfloat16).astype(jnp.float32)}
    tx = dpo.optimizer(train, 100, nnx.Dict(w=nnx.Param(start["w"])))
    gradient = {"w": jnp.full((4, 4), 1e-3)}

    @jax.jit
    def step(weight, moments):
        updates, moments = tx.update(gradient, moments, weight)
        return optax.apply_updates(weight, updates), moments

    weight, moments = start, tx.init(start)
    for _ in range(100):
        weight, moments = step(weight, moments)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(moments) if x.ndim)
    moved = float(jnp.max(jnp.abs(weight["w"] - start["w"])))
    # Half a bfloat16 step at 0.02 is 6e-5: stored so, every one of these updates would vanish.
    assert 1e-5 < moved < 6e-5


def test_d1_easy_pairs_are_learned():
    """D1: with computation in bfloat16, masters and moments are float32 and the loss falls."""
    config = options(warmup_ratio=0.0, learning_rate=3e-4)
    config.model.dtype = "bfloat16"
    trainer = Trainer(tiny(), config, n_steps=8)
    batch = batches.make_batch(random_pairs(4), UNKNOWN, Step(32, (0, 1, 2, 3)), 2, 2)
    batch = with_reference(trainer, batch)
    for _ in range(8):
        metrics = trainer.take(batch)
    assert metrics["loss"] < 0.6
    assert metrics["update_norm"] > 0
    assert {x.dtype for x in trainer.state.params.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("family", TINY_HF)
def test_only_matrices_decay(family):
    model = tiny(family)
    train = options(weight_decay=0.5, warmup_ratio=0.0, learning_rate=0.1).train
    params = dpo.as_params(model)
    tx = dpo.optimizer(train, 10, model)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda p, g: tx.update(g, tx.init(p), p))(params, zeros)
    decayed = {name for name, update in updates.items() if np.any(update)}
    assert decayed == {name for name in parameters(model) if "norm" not in name}
    assert "embed" in decayed


def test_t8_step_with_nan_is_skipped_whole(four_micro_batches):
    """T8: NaN in micro-batch 2 of 4: weights, moments and count stay; good steps go on."""
    trainer = four_micro_batches
    trainer.restart()
    good = batches.make_batch(random_pairs(4), UNKNOWN, Step(32, (0, 1, 2, 3)), 4, 1)
    good = with_reference(trainer, good)
    spoiled = np.array(good.reference_logps)
    spoiled[1] = np.nan
    bad = good._replace(reference_logps=spoiled)
    trainer.take(good)
    before = jax.tree.map(np.array, trainer.state)
    for count in (1, 2, 3):
        metrics = trainer.take(bad)
        assert metrics["bad_steps"] == metrics["skipped"] == count
        assert metrics["update_norm"] == 0
    for name in ("params", "moments", "applied"):
        for old, new in zip(
            jax.tree.leaves(getattr(before, name)),
            jax.tree.leaves(getattr(trainer.state, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(old, new)
    metrics = trainer.take(good)
    assert (metrics["bad_steps"], metrics["skipped"]) == (0, 3)
    assert metrics["update_norm"] > 0
