"""The plan stage without the TPU compiler; tests/test_plan_tpu.py has the rest."""

import csv
import json
import math

import jax
import pytest
from conftest import tiny_hf
from jax.sharding import AbstractMesh, AxisType

from retmask_jax import chips, cli, estimate, plan
from retmask_jax.chips import CHIPS, Slice, open_slice
from retmask_jax.configs import base, llama31_8b
from retmask_jax.errors import UserError
from retmask_jax.estimate import Estimate
from retmask_jax.hlo import Cost
from retmask_jax.mesh import AXES
from retmask_jax.models.decoder import abstract, parameters
from retmask_jax.models.layers import logical_axes
from retmask_jax.models.partitioning import partition_spec
from retmask_jax.programs import Work, model_flops, read_model

MODELS = ("Llama-3.1-8B-Instruct", "Qwen3-8B", "Olmo-3-7B-Think")


def model(name: str):
    config = base.get_config()
    config.model.path = f"/nowhere/{name}"
    return read_model(config)[0]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B-Instruct", 8.030),
        ("Llama-3.2-3B-Instruct", 3.213),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.721),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("Qwen3-32B", 32.762),
        ("Olmo-3-7B-Instruct", 7.298),
        ("Olmo-3-7B-Think", 7.298),
        ("SmolLM2-360M-Instruct", 0.362),
        ("SmolLM2-1.7B-Instruct", 1.711),
    ],
)
def test_built_in_dimensions_give_the_published_number_of_weights(name, billions):
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract(model(name))))
    assert weights / 1e9 == pytest.approx(billions, abs=0.001)


def test_dimensions_come_from_a_file_or_a_folder_before_the_table(tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_hf("qwen3")))
    config = base.get_config()
    config.model.path = str(folder)
    found, name = read_model(config)
    assert (found.d_model, name) == (64, "Qwen3-8B")
    found, name = read_model(llama31_8b.get_config(), str(folder / "config.json"))
    assert (found.family, found.d_model) == ("qwen3", 64)


@pytest.mark.parametrize(
    ("path", "model_config", "message"),
    [
        ("/nowhere/Falcon", "", "give --model_config=FILE"),
        ("/nowhere/Qwen3-8B", "/nowhere/config.json", "no such file or folder"),
    ],
)
def test_no_dimensions(path, model_config, message):
    config = base.get_config()
    config.model.path = path
    with pytest.raises(UserError, match=message):
        read_model(config, model_config)


def test_model_flops_by_hand():
    """6 N D and the attention of half a square: Llama-3.1-8B on one row of 1,024 tokens."""
    config = model("Llama-3.1-8B-Instruct")
    matrices = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128256 * 4096
    attention = 12 * 32 * 4096 * 512.5 * 1024
    flops = model_flops(config, 1024, {"full": 512.5}, passes=3, scored=1024)
    assert flops == pytest.approx(6 * matrices * 1024 + attention, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 32, 1, 1), (2, 16, 1, 2), (1, 256, 1, 1)])
def test_every_weight_above_a_megabyte_is_split(name, shape):
    mesh = AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)
    ways = shape[1] * shape[3]
    for path, param in parameters(abstract(model(name))).items():
        spec = partition_spec(logical_axes(param), param.shape, mesh)
        split = math.prod(mesh.shape[axis] for axis in jax.tree.leaves(tuple(spec)))
        if math.prod(param.shape) * 4 / param.shape[0] ** path.startswith("blocks") > 1e6:
            assert split == ways, path


def test_mesh_shapes():
    shapes = list(plan.mesh_shapes(8, 2))
    assert len(shapes) == len({tuple(shape.values()) for shape in shapes}) == 10
    assert all(math.prod(shape.values()) == 8 and shape["data"] % 2 == 0 for shape in shapes)


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 20.81G of 15.75G hbm. Exceeded hbm capacity by 5.06G.\n\nTotal …",
            int(20.81 * 2**30),
            int(15.75 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (804.03M) exceeds available HBM (15.75G).",
            int(804.03 * 2**20),
            int(15.75 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: something new", None, None),
    ],
)
def test_what_does_not_fit_is_read_from_the_compiler(message, needed, available):
    assert estimate.exhausted(message) == (needed, available)


def test_the_compilers_other_errors_are_told():
    with pytest.raises(UserError, match="the TPU compiler failed: INTERNAL: broken"):
        estimate.exhausted("INTERNAL:  broken")


@pytest.mark.parametrize(
    ("topology", "slices", "message"),
    [
        ("", 1, "--topology=: want CHIP:AxB"),
        ("v5e", 1, "want CHIP:AxB"),
        ("v9:2x2", 1, "CHIP one of v4, v5e, v5p, v6e, tpu7x"),
        ("v5e:4xx", 1, "want CHIP:AxB"),
        ("v5e:2x2", 0, "--slices=0"),
    ],
)
def test_a_slice_that_cannot_be(topology, slices, message):
    with pytest.raises(UserError, match=message):
        open_slice(topology, slices)


def test_without_the_tpu_compiler(monkeypatch):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'retmask-jax\[tpu\]'"):
        open_slice("v5e:2x2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology=v9:2x2"], "CHIP one of"),
        (["--topology=v5e:2x2", "--stage=export"], "--stage=export: it is one of train, generate"),
        (["--topology=v5e:2x2", "--sweep"], "give --workdir=DIR"),
        (["--topologie=v5e:2x2"], "Did you mean: topology"),
        (["--topology=v5e:2x2", "--masked"], "--masked goes with the stage export only"),
    ],
)
def test_mistakes_on_the_command_line(options, message, capsys):
    assert cli.main(["plan", "--config=llama31_8b", *options]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--topology=" in out and "--sweep=False" in out and "--config.mesh.fsdp=-1" in out


def test_a_sweep_ranks_what_fits_and_keeps_what_does_not(monkeypatch, tmp_path, capsys):
    """Speeds and memory are made up: the mesh with tensor 2 is the fastest, tensor 4 cannot be."""

    def made_up(config, where, stage, model, mesh, row_length, export_hlo):
        shape = dict(mesh.shape)
        work = Work("train", lambda: None, {"weights": 2**30}, 1e12, 1000, "step", (1,))
        if shape["tensor"] == 4:
            raise UserError("mesh axis tensor of 4 does not divide")
        if shape["data"] > 1:
            yield Estimate(work, shape, 40 * 2**30, 16 * 2**30, fits=False)
            return
        seconds = {"compute": 1.0, "memory": 0.5, "interconnect": 3.0 / shape["tensor"]}
        yield Estimate(
            work, shape, 8 * 2**30, 16 * 2**30, fits=True, cost=Cost(1e12, 1e9),
            seconds=seconds | {"network": 0.0}, peak_flops=1e12,
        )  # fmt: skip

    monkeypatch.setattr(plan, "estimates", made_up)
    monkeypatch.setattr(
        plan, "open_slice", lambda name, n: Slice(name, CHIPS["v5e"], (2, 2), n, jax.devices()[:4])
    )
    config = llama31_8b.get_config()
    plan.run(config, topology="v5e:2x2", sweep=True, workdir=str(tmp_path))
    base = tmp_path / "plan" / "train-Llama-3.1-8B-Instruct-v5e-2x2-1"
    rows = list(csv.DictReader(base.with_name(base.name + ".csv").open()))
    assert len(rows) == 10
    assert (rows[0]["tensor"], rows[0]["step_s"], rows[0]["mfu"]) == ("2", "1.5", "0.6667")
    assert [row["fits"] for row in rows] == sorted((row["fits"] for row in rows), reverse=True)
    notes = [row["note"] for row in rows if row["tensor"] == "4"]
    assert notes == ["mesh axis tensor of 4 does not divide"]
    assert base.with_name(base.name + ".png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "does not fit: weights 1.00; peak at least 40.00 of 16.00 GiB a device" in out
    assert "impossible: mesh axis tensor of 4 does not divide" in out
