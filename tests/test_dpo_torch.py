"""Three optimiser steps against a hand-written DPO in PyTorch."""

import numpy as np
import pytest
import torch
from conftest import TINY_HF, tiny_hf
from torch_reference import torch_model
from training import UNKNOWN, Trainer, gradient_norms, options, random_pairs, tiny, with_reference

from retmask_jax import batches, dpo
from retmask_jax.batches import Step
from retmask_jax.models import weight_names

pytestmark = pytest.mark.torch


def torch_logps(model, row, n_prompt):
    ids = torch.from_numpy(row.astype(np.int64))[None]
    logps = model(ids).logits[0].log_softmax(-1)
    return logps[n_prompt - 1 : -1].gather(1, ids[0, n_prompt:, None]).sum()


@pytest.mark.parametrize("family", TINY_HF)
def test_steps_equal_pytorchs(family):
    """Three steps of a hand-written DPO with torch's autograd, clipping and AdamW."""
    model = tiny(family)
    config = options(micro_pairs=2, warmup_ratio=0.0, remat=True)
    pairs, train = random_pairs(4), config.train
    trainer = Trainer(model, config, n_steps=6)
    batch = batches.make_batch(pairs, UNKNOWN, Step(32, (0, 1, 2, 3)), 2, 2)
    batch = with_reference(trainer, batch)

    reference = torch_model(model, tiny_hf(family))
    with torch.no_grad():
        initial = [
            [torch_logps(reference, pairs.row(i, side), pairs.lengths[i, 0]) for side in (0, 1)]
            for i in range(4)
        ]
    names = dict(reference.named_parameters())
    groups = [
        {"params": [p for name, p in names.items() if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in names.items() if "norm" in name], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=(train.b1, train.b2), eps=train.eps)
    rates = dpo.schedule(train, 6)
    for count in range(3):
        adam.zero_grad()
        losses = []
        for i, (c0, r0) in enumerate(initial):
            chosen, rejected = (
                torch_logps(reference, pairs.row(i, side), pairs.lengths[i, 0]) for side in (0, 1)
            )
            margin = train.beta * ((chosen - c0) - (rejected - r0))
            losses.append(-torch.nn.functional.logsigmoid(margin) / 4)
        sum(losses).backward()
        want = {
            slot.name: names[slot.name].grad.norm().item() for slot in weight_names(model.config)
        }
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), train.clip_norm)
        for group in adam.param_groups:
            group["lr"] = float(rates(count))
        adam.step()

        metrics = trainer.take(batch)
        assert metrics["loss"] == pytest.approx(float(sum(losses)), rel=1e-3)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        if count == 0:
            for name, got in gradient_norms(trainer, metrics, model.config).items():
                assert got == pytest.approx(want[name], rel=1e-3), name

    ours = torch_model(dpo.as_model(model, trainer.params()), tiny_hf(family))
    for name, value in ours.named_parameters():
        got, want = value.detach().numpy(), names[name].detach().numpy()
        # Adam divides by the gradient's own size: where that is tiny, rounding decides the sign.
        assert np.mean(np.abs(got - want) > 2e-5) < 1e-3, name
