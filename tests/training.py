"""What the tests of training share: meshes of virtual devices, options, pairs of random tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from conftest import tiny_hf
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from retmask_jax import dpo
from retmask_jax.configs import base
from retmask_jax.mesh import AXES, make_mesh
from retmask_jax.models import config_from_hf, weight_names
from retmask_jax.models.decoder import Decoder, abstract
from retmask_jax.models.layers import Scale
from retmask_jax.preferences import Pairs

UNKNOWN = np.zeros((1000, 2), np.float32)  # reference log-probs, to be set


def mesh_of(**sizes: int) -> Mesh:
    """A mesh over the first devices; axes that are not named have size 1."""
    config = ConfigDict({axis: sizes.get(axis, 1) for axis in AXES})
    return make_mesh(config, jax.devices()[: math.prod(sizes.values())])


def options(**changes: object) -> ConfigDict:
    """A config for tiny models, with changes to its section `train`."""
    config = base.get_config()
    config.model.dtype = "float32"
    config.train.update(
        {
            "pairs_per_step": 4,
            "micro_pairs": 2,
            "learning_rate": 1e-3,
            "buckets": (16, 32),
            "head_chunk": 16,
            **changes,
        }
    )
    return config


@functools.cache
def tiny(family: str = "llama") -> Decoder:
    """Random float32 weights for the config `conftest.tiny_hf(family)`, drawn by numpy."""
    rng = np.random.default_rng(0)

    def draw(param: nnx.Param) -> nnx.Param:
        mean = float(isinstance(param, Scale))
        return jax.tree.map(
            lambda x: jnp.asarray(mean + 0.15 * rng.standard_normal(x.shape), jnp.float32), param
        )

    model = abstract(config_from_hf(tiny_hf(family)))
    return jax.tree.map(draw, model, is_leaf=lambda node: isinstance(node, nnx.Param))


def random_pairs(count: int, seed: int = 0, longest: int = 30, vocab: int = 128) -> Pairs:
    """Pairs of random tokens; rows of up to `longest`."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, longest // 2, count)
    replies = rng.integers(1, longest // 2, (count, 2))
    lengths = np.column_stack([prompts, replies]).astype(np.int32)
    return Pairs(
        tokens=rng.integers(3, vocab, lengths.sum()).astype(np.int32),
        lengths=lengths,
        names=np.array([f"p{i}/0" for i in range(count)]),
    )


class Trainer:
    """A model with its compiled step; `take` takes one step and returns its metrics."""

    def __init__(self, model, config, n_steps=10, **mesh):
        self.like = abstract(model.config)
        self.mesh = mesh_of(**(mesh or {"fsdp": 1}))
        train, dtype = config.train, jnp.dtype(config.model.dtype)
        tx = dpo.optimizer(train, n_steps, self.like)
        placed = dpo.state_shardings(self.like, tx, self.mesh)
        initial = jax.tree.map(np.asarray, dpo.init_state(dpo.as_params(model), tx))
        self._start = lambda: jax.device_put(initial, placed)
        self.restart()
        self.step = dpo.make_step(self.like, tx, train, n_steps, dtype, self.mesh)
        self.score = dpo.make_logprobs(self.like, train, dtype, self.mesh)

    def restart(self):
        self.state = self._start()

    def take(self, batch):
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, batch)
        return jax.device_get(metrics)

    def logprobs(self, batch):
        with jax.set_mesh(self.mesh):
            return np.asarray(self.score(self.state.params, batch))

    def params(self):
        return jax.tree.map(np.array, self.state.params)


def with_reference(trainer, batch):
    return batch._replace(reference_logps=trainer.logprobs(batch))


def gradient_norms(trainer, metrics, config):
    """The gradient's norm by Hugging Face tensor, from the first moments after one step."""
    scale = 0.1 * min(1.0, 1.0 / float(metrics["grad_norm"]))
    moments = trainer.state.moments[1][0].mu
    norms = {}
    for slot in weight_names(config):
        value = moments[slot.path] if slot.group is None else moments[slot.path][slot.group]
        norms[slot.name] = float(jnp.linalg.norm(value)) / scale
    return norms
