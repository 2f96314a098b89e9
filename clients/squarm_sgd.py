"""SQuARM-SGD (Singh, UCLA 2024, chapter 3): compressed, lazy, with momentum."""

from clients.device.state import PersonalState
from clients.gossip.base import GossipClient, randomness
from clients.gossip.relayed import Config, Relayed
from clients.gossip.schedules import Schedule, threshold
from task.settings import Settings, require
from task.tasks.image import Task


class SQuARMSGDClient(GossipClient):
    """Algorithm 1, in the memory-efficient form.

    Besides its model x_i a node keeps its own public estimate x̂_i and the weighted sum
    Σ_j w_ij x̂_j of its neighbours', however many they are.
    """

    vectors = ("momentum", "estimate", "neighbours")

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Settings
    ) -> None:
        super().__init__(task, index, state, settings)
        require(self.local_steps >= 1, "local-steps", self.local_steps, "at least 1")
        self.threshold = self.make_threshold()

    @property
    def local_steps(self) -> int:
        """Iterations between two exchanges, H."""
        return int(self.settings["local-steps"])

    def make_threshold(self) -> Schedule:
        """Return the trigger's threshold c_t."""
        return threshold(str(self.settings["trigger"]))

    def mix(self, round_: int, messages: list[Relayed], config: Config) -> None:
        """Line 16: x ← x + γ Σ_j w_ij (x̂_j − x̂_i), after x̂_j ← x̂_j + q_j.

        Parameters
        ----------
        round_ : int
            Ignored.
        messages : list of Relayed
            The neighbours' q_j; whoever sent none keeps its estimate.
        config : dict
            ``consensus-step``, γ, and ``neighbour-weight``, Σ_j w_ij.
        """
        neighbours, estimate = self.kept["neighbours"], self.kept["estimate"]
        for message in messages:
            q = self.received(message)
            if q is not None:
                neighbours.add_(q, alpha=message.weight)
        difference = neighbours.sub(estimate, alpha=float(config["neighbour-weight"]))
        self.x.add_(difference, alpha=float(config["consensus-step"]))

    def message(self, server_round: int) -> bytes:
        """Lines 8 to 13: if ‖x − x̂‖² > c_t η_t², send q = C(x − x̂); x̂ ← x̂ + q.

        The first round is no exception, as in the algorithm's box; the section's text
        has all nodes send in it.

        Parameters
        ----------
        server_round : int
            The round, from 1.

        Returns
        -------
        bytes
            q, or nothing.
        """
        difference = self.x - self.kept["estimate"]
        t = self.iterations(server_round)[-1]
        if difference.square().sum().item() <= self.threshold(t) * self.rate(t) ** 2:
            return b""
        data = self.compressor.compress(difference, randomness())
        self.kept["estimate"] += self.compressor.decompress(data, self.dimension)
        return data
