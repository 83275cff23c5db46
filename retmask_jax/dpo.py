"""DPO: the loss, the optimiser, and the step over all micro-batches as one compiled program.

Direct Preference Optimization, arXiv 2305.18290, eq. 7.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from retmask_jax import mesh as meshes
from retmask_jax.batches import Batch
from retmask_jax.logprobs import reply_logprobs
from retmask_jax.models.decoder import Decoder, parameters
from retmask_jax.models.kernels import kernel_of
from retmask_jax.models.layers import Scale

Params = dict[str, jax.Array]  # the weights by path, as `parameters` names them


class State(NamedTuple):
    """What a step takes and gives.

    Attributes:
        params: float32 master weights.
        moments: the optimiser's state, float32.
        applied: i32 [], updates applied; decides the learning rate.
        bad_steps: i32 [], steps skipped in a row up to now.
        skipped: i32 [], steps skipped in all.
    """

    params: Params
    moments: Any
    applied: jax.Array
    bad_steps: jax.Array
    skipped: jax.Array


def pair_losses(logps: jax.Array, reference_logps: jax.Array, beta: float) -> jax.Array:
    """-log sigmoid(beta * ((chosen - its reference) - (rejected - its reference))).

    Args:
        logps, reference_logps: f32 [R], first half chosen, second half rejected.

    Returns:
        f32 [R / 2].
    """
    chosen, rejected = jnp.split(beta * (logps - reference_logps), 2)
    return -jax.nn.log_sigmoid(chosen - rejected)


def _measure(
    model: Decoder, micro: Batch, total: jax.Array, beta: float, options: dict
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A micro-batch's share of the step's loss and metrics, which are means over its pairs."""
    logps, _ = reply_logprobs(model, micro.tokens, micro.prompt_lengths, micro.lengths, **options)
    weights = micro.weights / total
    loss = jnp.sum(weights * pair_losses(logps, micro.reference_logps, beta))
    rewards = jnp.split(beta * (logps - micro.reference_logps), 2)
    sides = jnp.split(logps, 2)
    means = {
        "loss": loss,
        "rewards/chosen": jnp.sum(weights * rewards[0]),
        "rewards/rejected": jnp.sum(weights * rewards[1]),
        "rewards/margins": jnp.sum(weights * (rewards[0] - rewards[1])),
        "rewards/accuracies": jnp.sum(weights * (rewards[0] > rewards[1])),
        "logps/chosen": jnp.sum(weights * sides[0]),
        "logps/rejected": jnp.sum(weights * sides[1]),
        "tokens": jnp.sum(jnp.tile(micro.weights, 2) * micro.lengths),
    }
    return loss, means


def as_params(model: Decoder) -> Params:
    """The model's leaves (arrays, shapes or shardings) by path."""
    return dict(zip(parameters(model), jax.tree.leaves(model), strict=True))


def as_model(like: Decoder, params: Params) -> Decoder:
    """The inverse: a model of the shape of `like` that holds `params`."""
    leaves = [params[name] for name in parameters(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def schedule(train: ConfigDict, n_steps: int) -> optax.Schedule:
    """Learning rate by updates applied: up from 0 in a line, then down in a cosine.

    The warm-up takes ceil(warmup_ratio * n_steps) steps; the first step runs at 0 if there is any.
    The cosine would reach final_learning_rate_ratio of the peak one step after the last.
    """
    warmup = math.ceil(train.warmup_ratio * n_steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else train.learning_rate,
        peak_value=train.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(n_steps, warmup + 1),
        end_value=train.learning_rate * train.final_learning_rate_ratio,
    )


def optimizer(train: ConfigDict, n_steps: int, like: Decoder) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW that decays matrices (the embedding too), not norms."""
    decays = {name: not isinstance(param, Scale) for name, param in parameters(like).items()}
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(
            schedule(train, n_steps),
            b1=train.b1,
            b2=train.b2,
            eps=train.eps,
            weight_decay=train.weight_decay,
            mask=decays,
        ),
    )


def init_state(params: Params, tx: optax.GradientTransformation) -> State:
    """The state before the first step; float32 moments of zeros."""
    applied, bad_steps, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
    return State(params, tx.init(params), applied, bad_steps, skipped)


def state_shardings(like: Decoder, tx: optax.GradientTransformation, mesh: Mesh) -> State:
    """Where each array of the state lies; moments lie as their weights do."""
    params = as_params(meshes.shardings(like, mesh))
    moments = jax.eval_shape(tx.init, as_params(like))
    everywhere = NamedSharding(mesh, PartitionSpec())
    moments = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        moments,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return State(params, moments, everywhere, everywhere, everywhere)


def batch_shardings(mesh: Mesh) -> Batch:
    """Rows over the data axes; weights, one a pair, are everywhere."""
    rows = meshes.batch_sharding(mesh, None)
    return Batch(rows, rows, rows, rows, NamedSharding(mesh, PartitionSpec()))


def _model_options(train: ConfigDict, dtype: jnp.dtype, mesh: Mesh) -> dict[str, Any]:
    """How `reply_logprobs` runs, in a step and for the reference alike."""
    kernel = kernel_of(mesh.devices.flat[0].platform)
    return {"dtype": dtype, "chunk": train.head_chunk, "remat": train.remat, "kernel": kernel}


def make_step(
    like: Decoder,
    tx: optax.GradientTransformation,
    train: ConfigDict,
    n_steps: int,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """Compiles (once a bucket) the step over all micro-batches; it takes over the old state.

    Gradients are summed in float32. If the loss or the gradient's norm is not finite, weights,
    moments and count stay as they are and the step counts as skipped.

    Metrics, each f32 []: loss, rewards/*, logps/* (means over the step's pairs), grad_norm (before
    clipping), update_norm (of the change of the weights), learning_rate (used), tokens, and i32
    bad_steps, skipped.

    Args:
        like: the model, abstract.
        train: the section `train` of the configuration.
        n_steps: of the whole run.
        dtype: of the computation.
        mesh: must be set (`jax.set_mesh`) when the step is called.
    """
    options = _model_options(train, dtype, mesh)
    placed = state_shardings(like, tx, mesh)
    learning_rate = schedule(train, n_steps)

    def loss_of(params: Params, micro: Batch, total: jax.Array) -> tuple[jax.Array, dict]:
        return _measure(as_model(like, params), micro, total, train.beta, options)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        total = jnp.sum(batch.weights)

        def accumulate(sums: tuple, micro: Batch) -> tuple[tuple, None]:
            (_, means), grads = jax.value_and_grad(loss_of, has_aux=True)(
                state.params, micro, total
            )
            grads, means = jax.tree.map(jnp.add, sums, (grads, means))
            return (jax.lax.with_sharding_constraint(grads, placed.params), means), None

        shapes = jax.eval_shape(loss_of, state.params, jax.tree.map(lambda x: x[0], batch), total)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state.params, shapes[1]))
        (grads, metrics), _ = jax.lax.scan(accumulate, zeros, batch)

        grad_norm = optax.tree.norm(grads)
        good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
        updates, moments = tx.update(grads, state.moments, state.params)
        params = optax.apply_updates(state.params, updates)
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, params, state.params))
        params, moments = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (params, moments),
            (state.params, state.moments),
        )
        bad = (~good).astype(jnp.int32)
        new_state = State(
            params=params,
            moments=moments,
            applied=state.applied + 1 - bad,
            bad_steps=(state.bad_steps + 1) * bad,
            skipped=state.skipped + bad,
        )
        metrics |= {
            "grad_norm": grad_norm,
            "update_norm": jnp.where(good, moved, 0.0),
            "learning_rate": learning_rate(state.applied),
            "bad_steps": new_state.bad_steps,
            "skipped": new_state.skipped,
        }
        return new_state, metrics

    return jax.jit(
        step,
        in_shardings=(placed, batch_shardings(mesh)),
        out_shardings=(placed, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )


def make_logprobs(
    like: Decoder, train: ConfigDict, dtype: jnp.dtype, mesh: Mesh
) -> Callable[[Params, Batch], jax.Array]:
    """Compiles (once a bucket) the summed log-probs f32 [A, R] of a batch, as a step sees them."""
    options = _model_options(train, dtype, mesh)

    def logprobs(params: Params, batch: Batch) -> jax.Array:
        def one(_: None, micro: Batch) -> tuple[None, jax.Array]:
            rows = micro.tokens, micro.prompt_lengths, micro.lengths
            return None, reply_logprobs(as_model(like, params), *rows, **options)[0]

        return jax.lax.scan(one, None, batch)[1]

    return jax.jit(
        logprobs,
        in_shardings=(as_params(meshes.shardings(like, mesh)), batch_shardings(mesh)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
