"""Parts: whole or absent, in order, shared by processes."""

import pytest

from retmask_jax import parts
from retmask_jax.mesh import Teams
from retmask_jax.parts import Job, complete, cut, unfinished
from retmask_jax.sampler import Completion, Request
from retmask_jax.workdir import parts as files_of
from retmask_jax.workdir import read_parts


def jobs(slices: list) -> list[tuple[int, list[Job]]]:
    return [
        (i, [Job(Request(name, (1,)), lambda done: {"id": done.id}) for name in names])
        for i, names in enumerate(slices)
    ]


def backwards(requests):
    """A sampler that answers everything, the last request first."""
    for request in reversed(list(requests)):
        yield Completion(request.id, (2,), "stop")


def test_rows_keep_their_order_whatever_the_order_of_answers(tmp_path):
    slices = [["a", "b", "c"], [], ["d"]]
    complete(tmp_path, 3, jobs(slices), backwards, n_rows=4, label="test", unit="row")
    assert len(files_of(tmp_path)) == 3
    assert [row["id"] for row in read_parts(tmp_path)] == ["a", "b", "c", "d"]


def test_a_part_is_whole_or_absent(tmp_path):
    def dies(requests):
        for n, request in enumerate(requests):
            if n == 3:
                raise KeyboardInterrupt
            yield Completion(request.id, (2,), "stop")

    slices = cut(list("abcde"), 2)
    assert slices == [["a", "b"], ["c", "d"], ["e"]]
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, 3, jobs(slices), dies, n_rows=5, label="test", unit="row")
    assert [path.name for path in files_of(tmp_path)] == ["part-00000-of-00003.jsonl.gz"]
    assert unfinished(tmp_path, 3) == [1, 2]


def test_teams_share_the_parts(monkeypatch, tmp_path):
    shares = []
    for index in range(3):
        monkeypatch.setattr(parts, "teams", lambda index=index: Teams(3, index, True))
        shares.append(unfinished(tmp_path, 8))
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_one_of_a_team_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "teams", lambda: Teams(1, 0, False))
    asked = []

    def sampler(requests):
        for request in requests:
            asked.append(request.id)
            yield Completion(request.id, (2,), "stop")

    complete(tmp_path, 2, jobs([["a", "b"], []]), sampler, n_rows=2, label="test", unit="row")
    assert asked == ["a", "b"] and not list(tmp_path.iterdir())
