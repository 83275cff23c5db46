"""The train stage: pairs, their reference log-probs, then DPO steps with checkpoints.

What a step does depends on the plan, the weights and the settings alone, so a run that was killed
and started again writes the same `metrics.jsonl` as one that was left alone.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter

from retmask_jax import batches, checkpoint_io, distributed, dpo, preferences
from retmask_jax import mesh as meshes
from retmask_jax.batches import Batch, Step
from retmask_jax.errors import UserError
from retmask_jax.models.decoder import Decoder, abstract
from retmask_jax.preferences import Pairs
from retmask_jax.progress import progress
from retmask_jax.workdir import (
    Workdir,
    append_jsonl,
    atomic_write,
    dump_row,
    is_local,
    part_path,
    read_jsonl,
    read_parts,
    write_json,
    write_part,
)

BATCHES_PER_PART = 64  # micro-batches of reference log-probs in one file

_log = logging.getLogger("retmask")


def run(config: ConfigDict, workdir: Workdir) -> None:
    """Trains from where the last checkpoint is, to the end of the plan.

    Raises:
        UserError: no pairs, a mesh that does not fit, training that broke down, or a checkpoint
            that could not be saved.
    """
    if (workdir.train / "summary.json").exists():
        _log.info("train: done already")
        return
    mesh = meshes.make_mesh(config.mesh)
    check_rows(config.train, mesh)
    source = checkpoint_io.open_source(config.model.path)
    pairs, counts = preferences.build(config, workdir, source)
    with jax.set_mesh(mesh):
        _train(config, workdir, source, mesh, pairs)
    if jax.process_index() == 0:
        summary = _summary(config, workdir, counts)
        write_json(workdir.train / "summary.json", summary)
        _log.info("train: first step %s, last step %s", summary["first"], summary["last"])


def load_trained(
    config: ConfigDict, workdir: Workdir, source: checkpoint_io.Source, mesh: Mesh, dtype: Any
) -> Decoder:
    """Loads the weights of the last checkpoint as `dtype`, sharded over `mesh`.

    Only the processes that have devices in `mesh` take part.

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
    """
    like = abstract(source.config, dtype)
    targets = _targets(dpo.as_params(like), dpo.as_params(meshes.shardings(like, mesh)))
    folder = workdir.train / "checkpoints"
    steps = ocp.utils.checkpoint_steps(folder) if folder.exists() else []
    if not steps:
        raise UserError(f"{folder}: no checkpoint; run the train stage first")
    who = {device.process_index for device in mesh.devices.flat}
    together = ocp.options.MultiprocessingOptions(primary_host=min(who), active_processes=who)
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=together)
    with ocp.CheckpointManager(folder, options=options) as manager:
        restored = _read(manager, max(steps), params=ocp.args.StandardRestore(targets))
        return dpo.as_model(like, restored.params)


def check_rows(train: ConfigDict, mesh: Mesh) -> None:
    """Refuses a micro-batch whose rows the mesh cannot share out.

    Raises:
        UserError: names the numbers.
    """
    rows, ways = 2 * train.micro_pairs, meshes.batch_ways(mesh)
    if rows % ways:
        raise UserError(
            f"config.train.micro_pairs is {train.micro_pairs}: its {rows} rows cannot be shared by "
            f"mesh.data x mesh.fsdp = {mesh.shape['data']} x {mesh.shape['fsdp']} = {ways} devices"
        )


def reference_logprobs(
    config: ConfigDict,
    workdir: Workdir,
    pairs: Pairs,
    assigned: np.ndarray,
    score: Any,
) -> np.ndarray:
    """Returns f32 [P, 2], log-probs of chosen and rejected; computes the parts that are missing.

    Args:
        assigned: i32 [P], the pairs' row lengths.
        score: Batch -> f32 [A, R], under the initial weights; called only if a part is missing.
    """
    folder = workdir.preferences / "reference"
    micro_pairs = config.train.micro_pairs
    steps = [
        step
        for bucket in np.unique(assigned)
        for step in batches.group(int(bucket), np.flatnonzero(assigned == bucket), micro_pairs)
    ]
    files = [steps[i : i + BATCHES_PER_PART] for i in range(0, len(steps), BATCHES_PER_PART)]
    missing = [i for i in range(len(files)) if not part_path(folder, i, len(files)).exists()]
    unknown = np.zeros((len(pairs), 2), np.float32)
    todo = [(i, step) for i in missing for step in files[i]]
    rows: list[dict] = []
    for i, step in progress(todo, len(todo), "reference", "batch") if todo else ():
        logps = score(batches.make_batch(pairs, unknown, step, 1, micro_pairs))
        chosen, rejected = np.asarray(logps)[0].reshape(2, micro_pairs).tolist()
        rows += [
            {"pair": pair, "chosen": c, "rejected": r}
            for pair, c, r in zip(step.pairs, chosen, rejected, strict=False)
        ]
        if step is files[i][-1]:
            if jax.process_index() == 0:
                write_part(folder, i, len(files), rows)
            rows = []
    distributed.wait("reference written")
    reference = np.full((len(pairs), 2), np.nan, np.float32)
    for row in read_parts(folder):
        reference[row["pair"]] = row["chosen"], row["rejected"]
    if not np.isfinite(reference).all():
        pair = int(np.argwhere(~np.isfinite(reference))[0, 0])
        raise UserError(
            f"{folder}: the reference log-prob of pair {pairs.names[pair]} is not a finite number; "
            "check the weights (model.path) and model.dtype"
        )
    return reference


def _train(
    config: ConfigDict,
    workdir: Workdir,
    source: checkpoint_io.Source,
    mesh: Mesh,
    pairs: Pairs,
) -> None:
    train, dtype = config.train, jnp.dtype(config.model.dtype)
    assigned = batches.assign_buckets(pairs.row_lengths, train.buckets, train.pairs_per_step)
    steps = batches.plan_steps(assigned, train.pairs_per_step, train.epochs, config.seed)
    like = abstract(source.config, jnp.float32)
    tx = dpo.optimizer(train, len(steps), like)
    placed = dpo.batch_shardings(mesh)

    def initial() -> dpo.Params:
        return dpo.as_params(checkpoint_io.load_model(source, dtype=jnp.float32, mesh=mesh))

    with _open_checkpoints(config, workdir) as manager:
        done = manager.latest_step() or 0
        params = None if done else initial()
        logprobs = dpo.make_logprobs(like, train, dtype, mesh)

        def score(batch: Batch) -> jax.Array:
            nonlocal params
            params = initial() if params is None else params
            return logprobs(params, _place(batch, placed))

        reference = reference_logprobs(config, workdir, pairs, assigned, score)
        n_micro = train.pairs_per_step // train.micro_pairs
        feed = batches.feed(pairs, reference, steps, n_micro, train.micro_pairs)
        shardings = dpo.state_shardings(like, tx, mesh)
        if done:
            params = None
            shapes = jax.eval_shape(lambda p: dpo.init_state(p, tx), dpo.as_params(like))
            state, cursor = _restore(manager, done, _targets(shapes, shardings))
            feed.set_state(cursor)
        else:
            init = jax.jit(
                lambda p: dpo.init_state(p, tx), out_shardings=shardings, donate_argnums=0
            )
            state, params = init(params), None
        _cut_metrics(workdir, done)
        step_fn = dpo.make_step(like, tx, train, len(steps), dtype, mesh)
        with _board(workdir, done) as board:
            numbers = range(done + 1, len(steps) + 1)
            for number in progress(numbers, len(numbers), "train", "step") if numbers else ():
                start = time.monotonic()
                state, metrics = step_fn(state, _place(next(feed), placed))
                row = _row(number, steps[number - 1], jax.device_get(metrics))
                seconds = time.monotonic() - start
                if jax.process_index() == 0:
                    append_jsonl(workdir.train / "metrics.jsonl", row)
                    _draw(board, row | {"speed/tokens_per_second": row["tokens"] / seconds})
                if row["bad_steps"] > train.max_bad_steps:
                    raise UserError(
                        f"train: {row['bad_steps']} steps in a row, up to step {number}, had a "
                        "loss or gradient that is not finite and were skipped "
                        "(train.max_bad_steps); the last checkpoint is that of step "
                        f"{manager.latest_step() or 0}"
                    )
                if number % train.checkpoint_every == 0 or number == len(steps):
                    _save(manager, number, state, feed.get_state())


# ---------------------------------------------------------------------------------- checkpoints


@contextlib.contextmanager
def _open_checkpoints(config: ConfigDict, workdir: Workdir) -> Iterator[ocp.CheckpointManager]:
    """The run's checkpoints; on leaving, all saves have ended, and well."""
    for name in ("absl", "asyncio"):  # there orbax also logs, at length, the errors that it raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=config.train.keep_checkpoints,
        cleanup_tmp_directories=True,
        # On a CPU a save in the background would hold the state that the next step gives away,
        # and so cost the memory of a second one.
        enable_async_checkpointing=jax.default_backend() != "cpu",
    )
    manager = ocp.CheckpointManager(workdir.train / "checkpoints", options=options)
    try:
        yield manager
        with _saving(manager):
            manager.wait_until_finished()
            manager.check_for_errors()
    finally:
        with contextlib.suppress(Exception):  # the errors of a save were raised above
            manager.close()


@contextlib.contextmanager
def _saving(manager: ocp.CheckpointManager) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        manager.reload()
        kept = manager.all_steps()
        intact = f"that of step {max(kept)} is intact" if kept else "there is none yet"
        reason = " ".join(str(error).split())
        reason = reason if len(reason) < 200 else f"…{reason[-199:]}"
        raise UserError(
            f"{manager.directory}: a checkpoint could not be saved ({reason}); {intact}; "
            "mend it, then the same command goes on from there"
        ) from error


def _save(manager: ocp.CheckpointManager, step: int, state: dpo.State, cursor: dict) -> None:
    """Starts to save; raises the error of an earlier save that failed."""
    with _saving(manager):
        manager.check_for_errors()
        if is_local(manager.directory):
            need = sum(x.nbytes for x in jax.tree.leaves(state))
            free = shutil.disk_usage(manager.directory).free
            if free < need:
                raise OSError(f"it takes {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
        manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave(state._replace(params=None)),
                cursor=ocp.args.JsonSave(cursor),
            ),
        )


def _restore(
    manager: ocp.CheckpointManager, step: int, targets: dpo.State
) -> tuple[dpo.State, dict]:
    restored = _read(
        manager,
        step,
        params=ocp.args.StandardRestore(targets.params),
        optimizer=ocp.args.StandardRestore(targets._replace(params=None)),
        cursor=ocp.args.JsonRestore(),
    )
    _log.info("train: goes on after step %d", step)
    return restored.optimizer._replace(params=restored.params), restored.cursor


def _read(manager: ocp.CheckpointManager, step: int, **items: Any) -> ocp.args.Composite:
    """Reads items of a checkpoint.

    Raises:
        UserError: it is damaged; orbax has no exception of its own for that.
    """
    try:
        return manager.restore(step, args=ocp.args.Composite(**items))
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:
        raise UserError(
            f"{manager.directory / str(step)}: this checkpoint cannot be read "
            f"({type(error).__name__}: {' '.join(str(error).split())[:150]}); delete it, and the "
            "train stage goes on from the one before"
        ) from None


def _targets(shapes: Any, shardings: Any) -> Any:
    """What to restore: shapes and dtypes of one tree, placed as the other says."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _place(batch: Batch, shardings: Batch) -> Batch:
    """Puts a batch, which every process holds whole, on the devices."""
    return jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i]),
        batch,
        shardings,
    )


# -------------------------------------------------------------------------------------- metrics


def _row(number: int, step: Step, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
    """A step's row of metrics.jsonl: nothing that depends on time, no number that is not finite."""
    row: dict[str, Any] = {"step": number, "row_length": step.bucket, "pairs": len(step.pairs)}
    for name, value in metrics.items():
        if np.isfinite(value):
            row[name] = value.item()
    return row


def _cut_metrics(workdir: Workdir, done: int) -> None:
    """Cuts the rows of steps after the checkpoint: they will be taken again."""
    path = workdir.train / "metrics.jsonl"
    if jax.process_index() or not path.exists():
        return
    with atomic_write(path) as file:
        kept = [row for row in read_jsonl(path) if row["step"] <= done]
        file.writelines(dump_row(row) + "\n" for row in kept)


@contextlib.contextmanager
def _board(workdir: Workdir, done: int) -> Iterator[SummaryWriter | None]:
    """TensorBoard files, on the first process and a local file system."""
    if jax.process_index() or not is_local(workdir.root):
        yield None
        return
    with SummaryWriter(str(workdir.train / "tensorboard"), purge_step=done + 1) as writer:
        yield writer


def _draw(board: SummaryWriter | None, row: dict[str, Any]) -> None:
    for name, value in row.items():
        if board and name != "step":
            board.add_scalar(name if "/" in name else f"train/{name}", value, row["step"])


def _summary(config: ConfigDict, workdir: Workdir, counts: dict) -> dict[str, Any]:
    """What the run came to, from its metrics; warns if nothing was learned."""
    rows = read_jsonl(workdir.train / "metrics.jsonl")
    measured = [row for row in rows if "loss" in row]
    moved = any(row["update_norm"] > 0 for row in rows)
    if not moved:
        _log.warning(
            "train: the policy still equals the reference, no weight has changed in %d steps "
            "(%d skipped, train.learning_rate %g, warm-up starts at 0)",
            len(rows),
            rows[-1]["skipped"],
            config.train.learning_rate,
        )
    shown = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    return {
        "pairs": counts["pairs"],
        "dropped": counts["dropped"],
        "steps": len(rows),
        "skipped_steps": rows[-1]["skipped"],
        "equals_reference": not moved,
        "first": {name: measured[0].get(name) for name in shown} if measured else {},
        "last": {name: measured[-1].get(name) for name in shown} if measured else {},
    }
