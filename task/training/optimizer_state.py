"""The state of an optimiser by names, with which a later training continues.

Names are those of torch, such as ``exp_avg`` or ``momentum_buffer``, followed by a dot
and the name of the parameter.
"""

from collections.abc import Mapping

from torch import Tensor

from flwr_frl.common.settings import SettingsError
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.sgd import Optimizer

State = dict[str, Tensor]


def set_state(
    optimizer: Optimizer, model: SplitModel, state: Mapping[str, Tensor]
) -> None:
    """Continue from a saved state.

    Entries of parameters that are frozen, missing or of another shape are ignored.

    Parameters
    ----------
    optimizer : Optimizer
        An optimiser for parameters of the model; it must not have made a step.
    model : SplitModel
        The model.
    state : mapping of str to Tensor
        As `read_state` returns it.
    """
    split = [(*key.partition(".")[::2], tensor) for key, tensor in state.items()]
    for name, parameter in model.named_parameters():
        saved = {entry: tensor for entry, of, tensor in split if of == name}
        fits = all(t.ndim == 0 or t.shape == parameter.shape for t in saved.values())
        if saved and fits and parameter.requires_grad:
            # torch's optimisers count steps on the CPU.
            optimizer.state[parameter] = {
                entry: tensor.clone()
                if tensor.ndim == 0 and (parameter.ndim or entry == "step")
                else tensor.to(parameter, copy=True)
                for entry, tensor in saved.items()
            }


def read_state(optimizer: Optimizer, model: SplitModel) -> State:
    """Return the state of an optimiser of some of a model's parameters.

    Raises
    ------
    SettingsError
        If it contains anything but numbers and tensors of the parameters' shapes.
    """
    state: State = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            reason = ""
            if not isinstance(value, Tensor):
                reason = f"is a {type(value).__name__}, not a tensor"
            elif value.ndim and value.shape != parameter.shape:
                reason = f"has another shape than the parameter {name!r}"
            if reason:
                raise SettingsError(
                    "optimizer-state is 'kept'; expected 'renewed' with this "
                    f"optimizer, whose {entry!r} {reason}",
                    "optimizer-state",
                )
            state[f"{entry}.{name}"] = value.detach()
    return state
