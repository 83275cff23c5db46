import gzip
import json
import logging
import signal
import subprocess
import sys
import textwrap

import pytest

from retmask_jax import workdir as wd
from retmask_jax.configs import base
from retmask_jax.errors import UserError
from retmask_jax.workdir import Workdir


def run_killed(code: str, *args) -> None:
    """Runs Python code that ends by killing itself, as `kill -9` would."""
    code = "import os, signal, sys\nfrom retmask_jax import workdir as wd\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_atomic_write_replaces_whole_files_only(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    with wd.atomic_write(path) as file:
        file.write("one\r\n\u2028")
    assert path.read_bytes() == "one\r\n\u2028".encode()
    with pytest.raises(RuntimeError), wd.atomic_write(path, "wb") as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == "one\r\n\u2028".encode()
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_atomic_write_survives_a_kill(tmp_path):
    path = tmp_path / "x.json"
    wd.write_json(path, {"old": 1})
    run_killed(
        """
        with wd.atomic_write(sys.argv[1]) as file:
            file.write('{"ne')
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    assert wd.read_json(path) == {"old": 1}
    wd.write_json(path, {"new": 1})
    assert wd.read_json(path) == {"new": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    wd.write_json(path, {"old": 1})
    (tmp_path / ".x.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        wd.write_json(path, {"new": "x" * 100_000})
    assert error.value.filename == str(path)
    assert wd.read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_object_stores_get_whole_files_only(tmp_path, monkeypatch):
    monkeypatch.setattr(wd, "is_local", lambda path: False)
    path = tmp_path / "a" / "rows.jsonl"
    with pytest.raises(RuntimeError), wd.atomic_write(path) as file:
        file.write("half")
        raise RuntimeError
    assert not path.exists()
    wd.append_jsonl(path, {"id": 1})
    path.write_bytes(path.read_bytes() + b'{"id":')
    wd.append_jsonl(path, {"id": 2})
    assert path.read_text() == '{"id": 1}\n{"id": 2}\n'


def test_c7_lone_surrogates_become_replacement_characters(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rb'{"content": "ok \ud83d end", "n": [{"\udc00": "\ud83d\ude00"}]}' + b"\n")
    rows = wd.read_jsonl(path)
    assert rows == [{"content": "ok \ufffd end", "n": [{"\ufffd": "\U0001f600"}]}]
    wd.write_json(tmp_path / "out.json", {"text": "ok \ud83d end"})
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == {"text": "ok \ufffd end"}
    wd.write_part(tmp_path, 0, 1, [{"text": "\udfff"}])
    assert wd.read_parts(tmp_path) == [{"text": "\ufffd"}]


def test_c9_a_byte_order_mark_changes_nothing(tmp_path):
    rows = [{"id": i, "text": "ä"} for i in range(3)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows)
    plain, marked = tmp_path / "plain.jsonl", tmp_path / "marked.jsonl"
    plain.write_bytes(text.encode())
    marked.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert wd.read_jsonl(plain) == wd.read_jsonl(marked) == rows
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert wd.read_json(tmp_path / "x.json") == {"a": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{"a": \n{"a": 2}\n', "row 2: not valid JSON"),
        (b'{"a": 1}\n[1]\n', "row 2: a JSON object is needed, not [1]"),
        (b'{"a": 1}\n"text"', "row 2: a JSON object is needed"),
        (b'{"a": 1}\n\n{"a": "\xff"}\n', "row 3: not UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), "row 1: not UTF-8"),
    ],
)
def test_a_bad_row_is_named(tmp_path, data, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        wd.read_jsonl(path)
    assert str(error.value).startswith(f"{path}, {message}")


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        wd.read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="a folder where a file is needed"):
        wd.read_json(tmp_path)
    (tmp_path / "x.json").write_text('{\n"a": }')
    with pytest.raises(UserError, match=r"x\.json: not valid JSON, line 2"):
        wd.read_json(tmp_path / "x.json")


TAILS = {
    "torn": (b'{"id": 7, "text": "ab', []),
    "half a character": ('{"id": 7, "text": "ä'.encode()[:-1], []),
    "whole, no newline": (b'{"id": 7, "text": "ab"}', [7]),
    "no tail": (b"", []),
}


@pytest.mark.parametrize("tail", TAILS)
def test_s6_append_repairs_a_torn_tail(tmp_path, tail):
    data, kept = TAILS[tail]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 6, "text": "' + b"x" * 70_000 + b'"}\n' + data)
    assert [row["id"] for row in wd.read_jsonl(path)] == [6, *kept]
    for number in (8, 9):
        wd.append_jsonl(path, {"id": number})
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == [6, *kept, 8, 9]


def test_s6_a_torn_last_line_is_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 6}\n{"id": 7, "te')
    with caplog.at_level(logging.WARNING):
        assert wd.read_jsonl(path) == [{"id": 6}]
    assert "torn last line" in caplog.text and "row 2" in caplog.text


def test_s6_append_to_a_full_disk_leaves_whole_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": 2}')
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    wd.append_jsonl(sys.argv[1], {"id": 3})
    try:
        wd.append_jsonl(sys.argv[1], {"id": 4, "text": "x" * 200})
    except OSError:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run_killed(code, path)
    assert path.read_text() == '{"id": 1}\n{"id": 2}\n{"id": 3}\n'


def test_parts_are_repeatable_and_whole(tmp_path):
    rows = [{"id": str(i), "text": "ü" * i} for i in range(5)]
    folder = tmp_path / "generate"
    for index in range(2):
        wd.write_part(folder, index, 2, rows[index * 3 : index * 3 + 3])
    names = ["part-00000-of-00002.jsonl.gz", "part-00001-of-00002.jsonl.gz"]
    assert [p.name for p in wd.parts(folder)] == names
    assert wd.read_parts(folder) == rows
    first = wd.part_path(folder, 0, 2)
    data = first.read_bytes()
    first.unlink()
    with pytest.raises(UserError, match=r"part-00000-of-00002\.jsonl\.gz: missing"):
        wd.read_parts(folder)
    wd.write_part(folder, 0, 2, rows[:3])
    assert first.read_bytes() == data
    first.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"part-00000-of-00002\.jsonl\.gz: damaged"):
        wd.read_parts(folder)
    first.write_bytes(gzip.compress(b"x\n"))
    with pytest.raises(UserError, match="row 1: not valid JSON"):
        wd.read_parts(folder)
    with pytest.raises(UserError, match="run the stage that writes it"):
        wd.read_parts(tmp_path / "nowhere")


def test_t2_a_relative_root_is_fixed_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = Workdir("out/run 1")
    monkeypatch.chdir("/")
    work.freeze(base.get_config())
    assert (tmp_path / "out" / "run 1" / "config.json").exists()
    assert str(work.train) == str(tmp_path / "out" / "run 1" / "train")


def test_freeze_names_what_differs(tmp_path):
    config = base.get_config()
    work = Workdir(tmp_path)
    config.seed = 9
    work.freeze(config)
    config.seed = 0
    work.freeze(config)
    work.detect.mkdir()
    frozen = (tmp_path / "config.json").read_bytes()
    work.freeze(base.get_config())

    config.mesh.fsdp = 4
    config.generate.slots = 3
    config.train.checkpoint_every = 1
    work.freeze(config)

    config.train.beta = 0.2
    config.heads.k = 7
    config.train.buckets = (128, 4096)
    with pytest.raises(UserError) as error:
        work.freeze(config)
    message = str(error.value)
    assert f"{tmp_path} was made with another config" in message
    assert "heads.k: null → 7" in message and "train.beta: 0.1 → 0.2" in message
    assert "train.buckets: [256, 512, 1024, 2048, 4096] → [128, 4096]" in message
    assert "mesh" not in message and "slots" not in message
    assert (tmp_path / "config.json").read_bytes() == frozen


def test_changeable_fields_exist():
    assert set(wd.CHANGEABLE) <= base.OPTIONS.keys()


def test_the_lock_keeps_others_out_and_dies_with_its_owner(tmp_path):
    hold = "with wd.Workdir(sys.argv[1]).lock():\n    os.kill(os.getpid(), signal.SIGKILL)"
    run_killed(hold, tmp_path)
    work = Workdir(tmp_path)
    with work.lock(), pytest.raises(UserError, match="in use by another retmask process"):
        work.lock().__enter__()
    with work.lock():
        pass
