"""Rules for splitting modules of ``transformers`` and ``peft`` into parts.

Neither package is imported here; a task that uses one has already imported it.
"""

from typing import Any

from torch import nn


def saved_head(module: nn.Module) -> str:
    """Return the name of the last module in a model's ``modules_to_save``; "" if none.

    ``peft`` trains these modules beside the adapters.
    """
    names = [name for name, m in module.named_modules() if _is_saved(m)]
    return names[-1] if names else ""


def without_copy(module: nn.Module) -> nn.Module:
    """Return the trainable copy in a wrapper of ``modules_to_save``.

    Other modules are returned unchanged.
    """
    if not _is_saved(module):
        return module
    return next(module.get_submodule("modules_to_save").children())


def return_logits(module: nn.Module) -> None:
    """Make a model of ``transformers`` return its logits instead of an output object.

    Other modules stay as they are.
    """
    base: Any = module
    if hasattr(module, "get_base_model"):
        base = base.get_base_model()
    if any(kind.__name__ == "PreTrainedModel" for kind in type(base).__mro__):
        module.register_forward_hook(_take_logits)


def logits_of(output: Any) -> Any:
    """Return the logits in an output object, and anything else unchanged."""
    return getattr(output, "logits", output)


def _take_logits(module: nn.Module, inputs: Any, output: Any) -> Any:
    return logits_of(output)


def _is_saved(module: nn.Module) -> bool:
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")
