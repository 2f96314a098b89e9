"""Ray for simulations: its start, on one machine or a cluster, and its workers."""

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from logging import ERROR

from flwr_frl.common.errors import SettingsError

# Number of processes that share a GPU; more would wait for each other and use memory.
WORKERS_A_GPU = 4
# Seconds within which a Ray cluster must answer.
ANSWERS_WITHIN = 10.0


def resources_of_a_worker(
    device: str, resources: Mapping[str, float]
) -> tuple[int, dict[str, float]]:
    """Return how many workers run at a time, and what Ray reserves for each.

    There is one worker per core of the cluster. On GPUs that Ray assigns, and on a
    single device such as ``cuda:1``, there are at most `WORKERS_A_GPU` for each.

    Parameters
    ----------
    device : str
        The setting of this name.
    resources : mapping
        Resources of the cluster, by name.
    """
    cores, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    if device in ("auto", "cuda") and gpus:
        share = {"num_cpus": 1.0, "num_gpus": 1 / WORKERS_A_GPU}
        return min(cores, WORKERS_A_GPU * gpus), share
    # Ray does not know a device that is selected by its index: cores limit its workers.
    each = 1 if device in ("auto", "cpu") else -(-cores // WORKERS_A_GPU)
    return cores // each, {"num_cpus": float(each), "num_gpus": 0.0}


def start_ray() -> None:
    """Start Ray on this machine, or join the cluster of ``RAY_ADDRESS``, once.

    The next run in this process uses the same workers.
    """
    import ray

    if ray.is_initialized():
        return
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
