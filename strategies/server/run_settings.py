"""Settings of a run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from flwr_frl.common.settings import Checked, PathText, checked_by, setting


@dataclass(frozen=True)
class RunSettings(Checked):
    """Settings of a run besides those of its algorithm and its task.

    Parameters
    ----------
    algorithm : str, default "fedrep"
        A name of ``--list``, or the import path ``package.module:Class`` of a strategy.
    task : str, default "digits"
        A name of ``--list``, or the import path ``package.module:function`` of a task.
    num_clients : int, default 20
        Number of clients in simulation.
    num_server_rounds : int, default 30
        Number of rounds.
    round_timeout : float, default 3600
        Seconds to wait for the replies of a round. The default of ``simulation.py`` and
        ``simulate`` is one year.
    max_empty_rounds : int, default 0
        Number of consecutive rounds without a valid reply after which the run ends; 0
        sets no limit. The default of ``simulation.py`` and ``simulate`` is 3.
    evaluate_every : int, default 5
        Rounds between two evaluations; 0 evaluates the last rounds only.
    evaluate_last : int, default 10
        Number of rounds at the end that are evaluated; with ``result-protocol`` at its
        default, the result is their mean. With 0 it is the last evaluation by
        ``evaluate-every``.
    result_protocol : {"mean-last", "last"}, default "mean-last"
        Rounds of the result: the mean of the last ``evaluate-last`` rounds, or the last
        evaluated round. No round is chosen by its result.
    new_clients : int, default 0
        Number of simulated clients, drawn by the seed, that take no part in the
        training. After the last round each of them trains its personal part, such as a
        head, on its data. On devices use `flwr_frl.predict.personalize`.
    names_by_key : bool, default False
        Whether a client's name belongs to the key of the SuperNode that first used it,
        in a run and in runs that resume it. Requires a SuperLink with
        ``--enable-supernode-auth``; otherwise a SuperNode has a new key at every start.
    output : str, default "results"
        Folder of the results.
    checkpoint_every : int, default 0
        Rounds between two checkpoints; 0 writes one only when the run ends, fails or is
        interrupted.
    resume : str, default ""
        Results folder of the run to resume.
    tracker : str, default ""
        Import path ``package.module:Class`` of an experiment tracker, such as those for
        TensorBoard, W&B and MLflow in docs/your-own.md.
    tracker_uri : str, default ""
        Folder or address that is passed to the tracker.
    """

    algorithm: str = setting("fedrep", form="a name or import path", code=True)
    task: str = setting("digits", form="a name or import path", code=True)
    num_clients: int = setting(20, ge=1, le=1_000_000)
    num_server_rounds: int = setting(30, ge=1, may_differ="on resume")
    round_timeout: float = setting(3600.0, gt=0, may_differ="always")
    max_empty_rounds: int = setting(0, ge=0, may_differ="always")
    evaluate_every: int = setting(5, ge=0, may_differ="on resume")
    evaluate_last: int = setting(10, ge=0, may_differ="on resume")
    result_protocol: Literal["mean-last", "last"] = setting(
        "mean-last", may_differ="on resume"
    )
    new_clients: int = setting(0, ge=0)
    names_by_key: bool = setting(False, may_differ="always")
    output: Annotated[PathText, checked_by(bool)] = setting(
        "results", form="a directory", may_differ="always"
    )
    checkpoint_every: int = setting(0, ge=0, may_differ="always")
    resume: PathText = setting("", form="a directory", may_differ="always")
    tracker: str = setting("", form="an import path", may_differ="always")
    tracker_uri: str = setting(
        "", form="an address", may_differ="always", unused_if={"tracker": ("",)}
    )
