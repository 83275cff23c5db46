"""Several processes as one run: how they meet, wait for one another, and end together.

JAX's coordination service, which runs in the first process, tells each whether the others live. One
that is killed, or out of reach, ends the others within `lost_after` seconds; one that fails tells
them why, and they end at once.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import clusters
from jax._src import distributed as service  # JAX offers no other way to its barriers and keys

from retmask_jax.errors import UserError

LOST_AFTER = 60  # seconds without a sign of life
FOREVER = 10**9  # milliseconds: the longest wait for a slower process, 11 days

_CLUSTERS = ("gcetpu", "gketpu", "slurm", "ompi")  # that JAX finds out about without being told
_NEWS, _GOOD = "retmask/news", "done"
_FAREWELL = 2.0  # seconds that the first process still serves the others
_LOST = (
    "another process of the run is gone or out of reach (its own output may say why); the same "
    "command goes on where it stopped"
)
_ending = threading.Lock()  # taken by the one thread that ends the process
_waits = itertools.count()
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p


@contextlib.contextmanager
def together(
    explain: Callable[[BaseException], tuple[str, int]],
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    lost_after: int = LOST_AFTER,
) -> Iterator[None]:
    """Joins the other processes of the run for the length of the block; alone, does nothing.

    Must come before anything that touches a device. Without `coordinator`, `processes` and
    `process` the run is what JAX finds out: the workers of all TPU slices, or the tasks of a Slurm
    or Open MPI job. An exception in the block ends this process and, as it is told, the others.

    Args:
        explain: exception -> what to say in one line ("": not foreseen) and the exit status.
        coordinator: host:port of the first process, for all to meet at.
        processes: how many there are; 1 keeps this one alone; 0: see above.
        process: which one this is, from 0; -1: see above.
        lost_after: seconds without a sign of life until a process counts as lost.

    Raises:
        UserError: arguments that do not go together.
    """
    where = _find(coordinator, processes, process)
    if lost_after < 1:
        raise UserError(f"--lost_after={lost_after}: wants a number of seconds")
    if where is None:
        yield
        return
    # JAX's preemption service would have a process live on after SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    default = _libc.signal(signal.SIGABRT, _aborted)
    jax.distributed.initialize(**where, heartbeat_timeout_seconds=lost_after)
    listener = threading.Thread(target=_listen, daemon=True)
    listener.start()
    try:
        yield
        wait("the run is done")
        if jax.process_index() == 0:
            service.global_state.client.key_value_set(_NEWS, _GOOD)
        listener.join()
        jax.distributed.shutdown()
    except (Exception, KeyboardInterrupt) as error:
        line, status = (_LOST, 1) if _lost_peer(error) else explain(error)
        if not line:
            traceback.print_exc()
        _fail(line or f"{type(error).__name__}: {error}", status)
    _libc.signal(signal.SIGABRT, ctypes.c_void_p(default))


def _find(coordinator: str, processes: int, process: int) -> dict[str, Any] | None:
    """Returns how to call jax.distributed.initialize, or None where this process is alone."""
    if processes == 1:
        return None
    if not coordinator and processes == 0 and process == -1:
        known = [env for env in clusters.ClusterEnv._cluster_types if env.name in _CLUSTERS]
        cluster = next((env for env in known if env.is_env_present()), None)
        if cluster is None or cluster.get_process_count() == 1:
            return None
        return {"cluster_detection_method": cluster.name}
    if not coordinator.rpartition(":")[2].isdecimal() or not 0 <= process < processes:
        raise UserError(
            f"--coordinator={coordinator} --processes={processes} --process={process}: want "
            "HOST:PORT, how many processes there are, and which of them this is, from 0"
        )
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
        "cluster_detection_method": "deactivate",
    }


def wait(what: str) -> None:
    """Returns when every process of the run has come to this call, however long that takes.

    Unlike a collective of JAX it has no time limit of the backend's, and keeps no device busy.
    """
    if client := service.global_state.client:
        client.wait_at_barrier(f"retmask {next(_waits)}: {what}", FOREVER)


def _fail(line: str, status: int) -> None:
    """Ends this process. An ordinary exit would wait for processes that wait for this one."""
    _ending.acquire()
    sys.stdout.flush()
    news = f"{status} process {service.global_state.process_id} failed: {line}"
    # In a thread, because the call does not return where JAX is about to abort this process.
    teller = threading.Thread(target=_tell, args=(news,), daemon=True)
    teller.start()
    teller.join(_FAREWELL)
    _leave(line, status)


def _tell(news: str) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was faster, or none can hear
        service.global_state.client.key_value_set(_NEWS, news)


def _lost_peer(error: BaseException | None) -> bool:
    """Tells whether `error` or one that it came from is what the loss of a process looks like."""
    while error is not None:
        if any(word in str(error) for word in ("Gloo", "NCCL", "CoordinationService", "heartbeat")):
            return True
        error = error.__cause__ or error.__context__
    return False


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    """Runs when JAX, having said so at length, aborts a process whose peer is lost.

    It is set by the C library, because Python's own handlers would run after that, i.e. never.
    """
    _libc.signal(signal.SIGABRT, None)
    _ending.acquire()
    _leave(_LOST, 1)


def _listen() -> None:
    """Waits for another process to fail, or for the end."""
    try:
        news = service.global_state.client.blocking_key_value_get(_NEWS, FOREVER)
    except jax.errors.JaxRuntimeError:
        return  # the first process is lost: JAX aborts this one
    if news != _GOOD:
        status, _, line = news.partition(" ")
        _ending.acquire()
        _leave(line, int(status))


def _leave(line: str, status: int) -> None:
    if service.global_state.process_id == 0:
        time.sleep(_FAREWELL)
    os.write(2, f"retmask: error: {' '.join(line.split())}\n".encode())  # the last that is said
    os._exit(status)
