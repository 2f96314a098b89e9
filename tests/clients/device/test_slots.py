"""Slots: what is said of those that cannot be."""

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from clients.base import Client
from clients.device.slots import HEAD, REPRESENTATION
from clients.device.state import PersonalState
from task.base import ExampleTask
from task.examples import ExampleSet
from task.models import SplitModel
from task.settings import SettingsError

EXAMPLES = ExampleSet(torch.zeros(2, 3), torch.tensor([0, 1]))
TASK = ExampleTask(
    lambda: SplitModel(nn.Linear(3, 4), nn.Linear(4, 2)), [EXAMPLES], [EXAMPLES]
)


def client_with(base: type[Client] = Client, **slots: tuple[str, ...]) -> Client:
    kind = type("Mine", (base,), slots)
    state = PersonalState(Context(1, 1, {}, RecordDict(), {}))
    return kind(TASK, 0, state, kind.settings_type())


def test_a_slot_is_not_both_shared_and_personal():
    client = client_with(shared=(REPRESENTATION, HEAD), personal=(HEAD,))
    line = r"^Mine has 'head\.' in shared and in personal; a slot must be in one"
    with pytest.raises(SettingsError, match=line):
        client.get_properties({})
