"""Progress of long loops: a bar with rate and time left, and a line in the log now and then."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

LOG_EVERY = 30.0  # seconds between two lines in the log

T = TypeVar("T")

_log = logging.getLogger("retmask.progress")


def progress(iterable: Iterable[T], total: int | None, label: str, unit: str = "it") -> Iterator[T]:
    """Yields the items of `iterable` and shows how far it is on stderr.

    On a terminal it draws a bar with rate and time left. The log gets a line every 30 seconds and
    one at the end, which is also what stderr shows where it is not a terminal.

    Args:
        iterable: what to go through.
        total: number of items, or None where nobody knows.
        label: what is being done, e.g. "detect".
        unit: name of one item, e.g. "trial".
    """
    start = last = time.monotonic()
    done = 0
    with tqdm(iterable, total=total, desc=label, unit=unit, disable=None, leave=False) as bar:
        for item in bar:
            yield item
            done += 1
            now = time.monotonic()
            if now - last >= LOG_EVERY and done != total:
                last = now
                _log.info(_line(label, unit, done, total, now - start))
    _log.info(_line(label, unit, done, done, time.monotonic() - start))


def _line(label: str, unit: str, done: int, total: int | None, seconds: float) -> str:
    units = unit + ("es" if unit.endswith(("ch", "s")) else "s")
    count = f"{label}: {done}" + (f"/{total}" if total else "") + f" {units}"
    rate = done / seconds if seconds else 0.0
    left = ""
    if total and done and done < total:
        left = f", {clock((total - done) * seconds / done)} left"
    return f"{count} in {clock(seconds)} ({rate:.2f} {unit}/s){left}"


def clock(seconds: float) -> str:
    """Returns a duration as 7s, 3m05s or 2h03m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
