"""Where simulated clients keep their states: beside the checkpoint of their run."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from flwr.app import ConfigRecord, Context, UserConfig

from clients.algorithms import short_name
from clients.device.identity import build_client, client_name, client_setup
from task.messages import ACKNOWLEDGED_ROUND, CHECKPOINT_ROUND, RUN
from task.settings import Settings


def take_over(settings: Settings) -> None:
    """Begin with the clients' states of the run that is resumed, or with none."""
    algorithm = short_name(str(settings["algorithm"]))
    own = Path(str(settings["output"])) / algorithm / "clients"
    former = Path(str(settings["resume"])).resolve() / algorithm / "clients"
    if settings["resume"] and former == own:
        return
    shutil.rmtree(own, ignore_errors=True)
    if settings["resume"] and former.is_dir():
        shutil.copytree(former, own)


def keep(
    contexts: Iterable[Context],
    settings: UserConfig,
    run: str,
    acknowledged: Mapping[str, int],
) -> None:
    """Write what clients have in memory, as if it had been kept on the disk.

    That is the version of each one's last round that counts, where it keeps any.
    """
    # As for a run that can be resumed.
    given = {**settings, "resume": settings["output"]}
    for context in contexts:
        round_ = int(acknowledged.get(client_name(context), 0))
        config = ConfigRecord({RUN: run})
        config[ACKNOWLEDGED_ROUND] = config[CHECKPOINT_ROUND] = round_
        client = build_client(context, client_setup(context, given), config)
        arrays = client.state.load() if client.personal and round_ else None
        if arrays is not None and client.state.round == round_:
            client.state.save(arrays, round_)
