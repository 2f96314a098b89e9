"""Keep the states of a client's optimisers between rounds (`optimizer-state`)."""

from flwr_frl.clients.device.conversions import to_tensors
from flwr_frl.clients.device.state_file import OPTIMIZER
from flwr_frl.common.sealed import Arrays
from flwr_frl.task.devices import CPU
from flwr_frl.task.training.optimizer_state import State


class OptimizerStates:
    """The states of the optimisers in one `Client.fit`.

    States are numbered by the calls of `Client.train`, since each call may train a
    different part or model.

    Parameters
    ----------
    optimizer : str
        The setting ``optimizer``. Saved states of a different optimiser are not used.
    """

    def __init__(self, optimizer: str) -> None:
        self.optimizer = optimizer
        self._loaded: State = {}
        self._states: list[State] = []
        # The client's arrays that were last saved, and how many states with them.
        self._saved: Arrays = {}
        self._saved_states = 0

    def _prefix(self, number: int) -> str:
        return f"{OPTIMIZER}{number}.{self.optimizer}."

    def load(self, arrays: Arrays) -> None:
        """Take the states of the last round from a client's saved arrays."""
        states = {n: a for n, a in arrays.items() if n.startswith(OPTIMIZER)}
        self._loaded = to_tensors(states, CPU)
        # They stay the client's version if `fit` saves no other.
        self._saved = {n: a for n, a in arrays.items() if n not in states}

    def of_next_call(self) -> State:
        """Return the state for the next `Client.train`, which updates it in place."""
        prefix = self._prefix(len(self._states))
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in self._loaded.items()
            if name.startswith(prefix)
        }
        self._states.append(state)
        return state

    def saved_with(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a client's new version, with the states so far."""
        # The arrays may be views of parameters, which later calls train.
        self._saved = {name: array.copy() for name, array in arrays.items()}
        self._saved_states = len(self._states)
        states = {
            self._prefix(number) + name: tensor.detach().cpu().numpy()
            for number, state in enumerate(self._states)
            for name, tensor in state.items()
        }
        return {**arrays, **states}

    def unsaved(self) -> Arrays | None:
        """Return the last saved arrays with all states; None if nothing is missing."""
        if self._saved_states == len(self._states):
            return None
        return self.saved_with(self._saved)
