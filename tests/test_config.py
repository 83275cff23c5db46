import pytest

from retmask_jax import config as cfg
from retmask_jax.configs import base
from retmask_jax.errors import UserError

HEAD = "from retmask_jax.configs import base\n"
GOOD = (
    HEAD
    + "def get_config(arg=''):\n    c = base.get_config()\n    c.model.path = 'm'\n    return c\n"
)


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


def fails(spec, *overrides):
    with pytest.raises(UserError) as error:
        cfg.load(spec, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_file_with_overrides(tmp_path):
    config = cfg.load(
        write(tmp_path, GOOD),
        [
            "--config.train.beta=0.2",
            "--config.heads.k=3",
            "--config.train.buckets=(128, 4096)",
            "--config.heads.list=('1-2', '3-4')",
            "--noconfig.train.remat",
            "--config.export.dtype=float32",
            "--config.chat.date=1 Jan 2026",
        ],
    )
    assert (config.train.beta, config.heads.k, config.train.remat) == (0.2, 3, False)
    assert (config.train.buckets, config.heads.list) == ((128, 4096), ("1-2", "3-4"))
    assert (config.export.dtype, config.chat.date) == ("float32", "1 Jan 2026")
    assert config.is_locked


def test_installed_configs_go_by_name_or_by_file():
    by_name = cfg.load("qwen3:0.6b")
    assert by_name.model.path.endswith("Qwen3-0.6B")
    assert cfg.load(f"{base.__file__.replace('base', 'qwen3')}:0.6b") == by_name


def test_t2_data_paths_are_fixed_at_the_start(tmp_path, monkeypatch):
    spec = write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    config = cfg.load(spec, ["--config.prompts.path=in put/p.jsonl", "--config.haystack.path=/h"])
    assert config.prompts.path == str(tmp_path / "in put" / "p.jsonl")
    assert config.model.path == str(tmp_path / "m")
    assert config.haystack.path == "/h" and config.haystack.needles == ""
    remote = cfg.load(spec, ["--config.model.path=gs://bucket/m"])
    assert remote.model.path == "gs://bucket/m"


def test_a_config_file_that_cannot_be_used_is_named(tmp_path):
    assert "nowhere.py: no such config file; the installed configs are base, " in fails(
        "nowhere.py"
    )
    assert "a folder; --config takes a file" in fails(str(tmp_path))
    for text, message in {
        "def get_config(:\n": "mine.py, line 1: invalid syntax",
        HEAD + "import nothing_of_this_name\n": "mine.py, line 2: No module named",
        HEAD: "mine.py: module 'retmask_config' has no attribute 'get_config'",
        "def get_config():\n    return {}\n": "must return an ml_collections ConfigDict",
        GOOD.replace("c.model.path", "c.model.pth"): "mine.py, line 4: ",
        GOOD.replace("'m'", "3"): "mine.py, line 4: ",
        GOOD.replace("'m'", "''"): "config.model.path is empty",
        "\0": "mine.py",
    }.items():
        assert message in fails(write(tmp_path, text)), text
    (tmp_path / "mine.py").write_bytes(b"x = '\xff'")
    assert "mine.py" in fails(str(tmp_path / "mine.py"))
    assert "no Qwen3 of size '9b'; it is one of 0.6b" in fails("qwen3:9b")
    assert "takes no argument, not 'x'" in fails("llama31_8b:x")


def test_a_config_with_fields_of_its_own_is_refused(tmp_path):
    extra = "    c.unlock()\n    c.train.betta = 1\n    return c\n"
    message = fails(write(tmp_path, GOOD.replace("    return c\n", extra)))
    assert message.startswith("config.train.betta: no such option; did you mean train.beta")
    gone = "    c.unlock()\n    del c.train.beta\n    return c\n"
    assert "config.train.beta: missing" in fails(
        write(tmp_path, GOOD.replace("    return c\n", gone))
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.trian.beta=1", "--config.trian.beta: no such option; did you mean train.beta"),
        ("--config.beta=1", "--config.beta: no such option; did you mean train.beta"),
        ("--config.train.beta=much", "--config.train.beta=much: could not convert"),
        ("--config.heads.k=1.5", "--config.heads.k=1.5: invalid literal for int()"),
        ("--config.heads.k=0", "config.heads.k is 0; the least is 1"),
        ("--config.train.remat=perhaps", "--config.train.remat=perhaps: "),
        ("--config.train.beta=nan", "config.train.beta is nan; the least is 0"),
        ("--config.train.learning_rate=inf", "config.train.learning_rate is inf"),
        ("--config.generate.top_p=1.5", "config.generate.top_p is 1.5; the most is 1"),
        ("--config.generate.temperature=-1", "config.generate.temperature is -1.0"),
        ("--config.detect.lengths=0", "config.detect.lengths is 0; the least is 1"),
        ("--config.model.dtype=fp8", "config.model.dtype is 'fp8'; it must be float32 or bfloat16"),
        ("--config.export.dtype=int8", "config.export.dtype is 'int8'"),
        ("--config.heads.rule=best", "config.heads.rule is 'best'; it must be threshold or top"),
        ("--config.heads.rule=top", "config.heads.k is not set"),
        ("--config.heads.rule=list", "config.heads.list is empty"),
        ("--config.heads.list=('3',)", "config.heads.list: '3' is not a 'layer-head'"),
        ("--config.detect.max_length=10", "config.detect: no 20 lengths lie between"),
        ("--config.evaluate.min_length=50000", "config.evaluate: no 10 lengths lie between"),
        ("--config.train.micro_pairs=5", "config.train.micro_pairs is 5; it must divide"),
        ("--config.train.buckets=(4096, 64)", "config.train.buckets is (4096, 64); it must ascend"),
        ("--config.train.buckets=(64, 99)", "config.train.buckets ends at 99"),
        ("--config.train.buckets=(64, 4096.5)", "config.train.buckets holds 4096.5"),
        ("--config.train.buckets=()", "config.train.buckets is (); it must ascend"),
        ("--config.mesh.data=-1", "config.mesh: only one of its sizes may be -1"),
        ("--config.mesh.tensor=0", "config.mesh: a size must be -1 or at least 1"),
        ("--config.mesh.tensor=-2", "config.mesh.tensor is -2; the least is -1"),
    ],
)
def test_a_bad_value_is_named(flag, message, tmp_path):
    assert message in fails(write(tmp_path, GOOD), flag)


def test_every_option_is_described_with_its_default():
    text = cfg.describe("run")
    for name, option in base.OPTIONS.items():
        assert f"  --config.{name}=" in text and option.help in text
    detect = cfg.describe("detect")
    assert "--config.detect.max_length=50000\n      tokens: " in detect
    assert "--config.heads.rule=threshold\n" in detect
    assert "[threshold | top | random | nonretrieval | list]" in detect
    assert "--config.train" not in detect
    groups = {name.split(".")[0] for name in base.OPTIONS}
    read = {group for groups in cfg.GROUPS.values() for group in groups}
    assert groups <= read <= groups | base.OPTIONS.keys()
    assert "--config.detect.pass_recall=" in cfg.describe("evaluate")


def test_the_defaults_keep_their_own_rules():
    config = base.get_config()
    config.model.path = "m"
    cfg.validate(config)
