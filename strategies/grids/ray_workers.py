"""The Ray workers of this process: started once, on one machine or on a cluster."""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.common.settings import SettingsError

# Number of processes that share a GPU; more would wait for each other and use memory.
WORKERS_A_GPU = 4
# Seconds within which a Ray cluster must answer, and one of its workers must start.
ANSWERS_WITHIN, STARTS_WITHIN = 10.0, 300.0
# Workers of the last run in this process, by their number and their share of a GPU.
_pool: dict[tuple[int, float], list[Any]] = {}
# Modification times of modules that workers may have imported.
_written: dict[str, int] = {}


class RayWorkers:
    """Worker processes, which get work once they have started.

    On the CPU there is one worker per core of the cluster. On GPUs that Ray assigns,
    and on a single device such as ``cuda:1``, there are at most `WORKERS_A_GPU` for
    each. Ray restarts a worker that dies. The next run in this process reuses the
    workers, unless a module has been edited.

    Parameters
    ----------
    kind : type
        Class of the workers, with a method ``ready``.
    device : str
        The setting of this name.

    Attributes
    ----------
    idle : list
        Workers without work.
    starting : dict
        Workers that are starting, by Ray's handle of their ``ready``.
    """

    def __init__(self, kind: type, device: str) -> None:
        import ray

        if not ray.is_initialized():
            # Workers of an earlier Ray session are invalid.
            _pool.clear()
            _start_ray()
        self._ray: Any = ray
        self.count, self._share = shares(device, ray.cluster_resources())  # type: ignore[no-untyped-call]
        key = self.count, self._share
        if _are_edited() or key not in _pool:
            # Earlier workers have imported old modules, and hold the cores.
            for worker in (w for workers in _pool.values() for w in workers):
                ray.kill(worker)
            _pool.clear()
            _pool[key] = []
        self._workers = _pool[key]
        remote: Any = ray.remote(num_cpus=1, num_gpus=self._share, max_restarts=-1)
        # Also replaces workers that the last run has lost.
        while len(self._workers) < self.count:
            self._workers.append(remote(kind).remote())
        self.idle: list[Any] = []
        self.starting: dict[Any, Any] = {}
        self._since, self._reason = time.monotonic(), "there are no cores"
        self._await(self._workers)

    def _await(self, workers: Iterable[Any]) -> None:
        for worker in workers:
            # Wait while Ray restarts it.
            ready = worker.ready.options(max_task_retries=-1)
            self.starting[ready.remote()] = worker

    def welcome(self, handle: Any) -> None:
        """Add a started worker to the idle ones, or remove one that cannot start."""
        worker = self.starting.pop(handle)
        try:
            self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            self._reason = str(error).strip().splitlines()[-1]
            self._workers.remove(worker)
        else:
            self.idle.append(worker)
            self._since = time.monotonic()

    def await_restart(self, worker: Any) -> None:
        """Wait for a dead worker, and for the idle ones, which may be dead as well."""
        self._await([worker, *self.idle])
        self.idle.clear()
        self._since = time.monotonic()

    def restart(self, workers: Iterable[Any]) -> None:
        """End the work of workers, which Ray then starts again."""
        for worker in workers:
            self._ray.kill(worker, no_restart=False)
            self.await_restart(worker)

    def patience(self) -> float:
        """Return the remaining seconds for a worker to start.

        Raises
        ------
        SettingsError
            If none has started in time, or none is starting.
        """
        left = self._since + STARTS_WITHIN - time.monotonic()
        if not self.starting:
            raise SettingsError(f"no Ray worker starts: {self._reason}")
        if left <= 0:
            raise SettingsError(f"no Ray worker has started within {STARTS_WITHIN:g} s")
        return left


def _are_edited() -> bool:
    """Return whether a module's file has changed since the last call.

    Installed packages are not checked.
    """
    written: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__dict__", {}).get("__file__") or "")
        if path and not path.startswith((sys.prefix, sys.base_prefix)):
            with contextlib.suppress(OSError):
                written[name] = os.stat(path).st_mtime_ns
    edited = any(_written.get(name, at) != at for name, at in written.items())
    _written.update(written)
    return edited


def shares(device: str, resources: Mapping[str, float]) -> tuple[int, float]:
    """Return the number of workers, and the share of a GPU that Ray assigns to each.

    ``resources`` are those of the cluster. The share is 0 on the CPU and on a device
    that is named by its number.
    """
    cores, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    if device in ("auto", "cuda") and gpus:
        return min(cores, WORKERS_A_GPU * gpus), 1 / WORKERS_A_GPU
    if device in ("auto", "cpu"):
        return cores, 0.0
    return min(cores, WORKERS_A_GPU), 0.0


def _start_ray() -> None:
    import ray

    if orphans := _orphans():
        text = "processes of a Ray that was killed are still there; to end them: kill"
        log(WARNING, "%s %s", text, " ".join(map(str, orphans)))
    # Workers inherit the environment, but not this process's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    _check_answers(address)
    try:
        with _authentication(starts_ray=address in ("", "local")):
            ray.init(
                # Without an address Ray looks for a cluster on this machine, and waits
                # for minutes for one that has ended.
                address or "local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=ERROR,
            )
    # Ray has no exception type for a start that takes too long.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        what = "Ray does not start, without which there is --backend inline"
        if address:
            what = f"RAY_ADDRESS is {address!r}, where no Ray cluster answers"
        raise SettingsError(f"{what}: {reason}") from error


@contextlib.contextmanager
def _authentication(starts_ray: bool) -> Iterator[None]:
    """Set how the Ray that is started or joined in this context authenticates.

    By default Ray listens on every interface and asks for no credentials, so anybody on
    the network could run code in its workers. A Ray that we start listens on loopback
    and requires a random token, unless the user has chosen ``RAY_AUTH_MODE``.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    added = {}
    if starts_ray and "RAY_AUTH_MODE" not in os.environ:
        added["RAY_AUTH_MODE"] = "token"
        if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            added["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    multi_node = ray_constants.ENABLE_RAY_CLUSTER
    os.environ |= added
    # Ray has no argument for this: `_node_ip_address` replaces loopback by the address
    # on the network.
    ray_constants.ENABLE_RAY_CLUSTER = multi_node and not starts_ray
    # Ray reads the variables when it is imported and keeps the token for later starts.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        # The workers have the token by now. Left in place, it would be taken for the
        # token of the next cluster that this process joins.
        ray_constants.ENABLE_RAY_CLUSTER = multi_node
        for name in added:
            del os.environ[name]


def _check_answers(address: str) -> None:
    """Raise `SettingsError` unless gRPC answers; Ray itself would try for ever."""
    host_and_port = address.removeprefix("ray://")
    if ":" not in host_and_port or os.environ.get("RAY_USE_TLS") == "1":
        return  # "auto", "local", empty, or with TLS: Ray checks these itself.
    import grpc

    with grpc.insecure_channel(host_and_port) as channel:
        try:
            grpc.channel_ready_future(channel).result(ANSWERS_WITHIN)
        except grpc.FutureTimeoutError:
            raise SettingsError(
                f"RAY_ADDRESS is {address!r}, where no Ray cluster answers within "
                f"{ANSWERS_WITHIN:g} s; expected HOST:PORT of one, or not be set"
            ) from None


def _orphans() -> list[int]:
    """Return Ray's processes that outlived the process that started them."""
    orphans = []
    for process in Path("/proc").glob("[0-9]*"):
        # Processes of other users, and ones that have just ended, cannot be read.
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            # The name, in parentheses, may contain anything; state and parent follow.
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            is_ours = process.stat().st_uid == os.getuid()
            if is_ours and command.startswith(b"ray::") and parent == "1":
                orphans.append(int(process.name))
    return sorted(orphans)
