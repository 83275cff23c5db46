import logging

from retmask_jax import progress as module
from retmask_jax.progress import clock, progress


def test_clock():
    assert [clock(s) for s in (0, 6.6, 59.6, 185, 7380)] == ["0s", "7s", "1m00s", "3m05s", "2h03m"]


def test_the_log_tells_how_far_it_is(monkeypatch, caplog):
    times = iter([0.0, 10.0, 31.0, 90.0, 100.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    with caplog.at_level(logging.INFO):
        assert list(progress("abc", 3, "detect", "batch")) == ["a", "b", "c"]
    assert caplog.messages == [
        "detect: 2/3 batches in 31s (0.06 batch/s), 16s left",
        "detect: 3/3 batches in 1m40s (0.03 batch/s)",
    ]


def test_it_stops_when_the_loop_does():
    seen = []
    for item in progress(iter(range(10)), None, "count"):
        seen.append(item)
        if item == 2:
            break
    assert seen == [0, 1, 2]
