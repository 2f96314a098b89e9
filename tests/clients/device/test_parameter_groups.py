"""Parameter groups: errors for contradictory and misspelled groups."""

import pytest
import torch
from client_messages import new_context
from torch import nn

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.parameter_groups import HEAD, REPRESENTATION
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel

EXAMPLES = ExampleSet(torch.zeros(2, 3), torch.tensor([0, 1]))
TASK = ExampleTask(
    lambda: SplitModel(nn.Linear(3, 4), nn.Linear(4, 2)), [EXAMPLES], [EXAMPLES]
)


def client_with(base: type[Client] = Client, **slots: tuple[str, ...]) -> Client:
    kind = type("Mine", (base,), slots)
    state = PersonalState(new_context())
    return kind(TASK, 0, state, kind.settings_type())


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (
            {"shared": (HEAD,), "personal": (HEAD,)},
            r"'head\.' in shared and in pers",
        ),
        *(
            ({where: (group,)}, words)
            for where in ("shared", "sent", "personal")
            for group, words in (
                ("heads", r"'heads\.'; expected one of 'representat"),
                ("represenation.", r"'represenation\.'; expected one of 'representat"),
            )
        ),
    ],
)
def test_contradictory_and_misspelled_groups_are_refused(groups, line):
    client = client_with(**groups)
    with pytest.raises(SettingsError, match=line):
        client.get_properties({})
    with pytest.raises(SettingsError, match="Mine has no update"):
        client.update()


def test_groups_may_be_named_without_dots():
    client = client_with(shared="representation", personal=("head", "memory"))
    assert client.shared == client.sent == (REPRESENTATION,)
    assert client.personal == (HEAD, "memory.")


@pytest.mark.parametrize("loss", [None, "0.1", torch.ones(2)])
def test_an_update_without_a_loss_is_refused(loss):
    class Mine(Client):
        def update(self):
            return loss

    client = client_with(Mine)
    with pytest.raises(SettingsError, match=r"Mine\.update returns .*; expected the"):
        client.fit(client.get_parameters({}), {})


def test_custom_group_names_may_resemble_built_in_ones():
    class Heads(Client):
        def initial_group(self, slot):
            return {"first": torch.zeros(2)}

    client = client_with(Heads, shared=(REPRESENTATION,), personal=("heads.",))
    assert client.get_properties({})["num-examples"] == 2


def test_a_sent_group_without_arrays_is_refused():
    client = client_with(shared=(REPRESENTATION, "second."))
    client.receive(client.get_parameters({}), {})
    line = r"^Mine has no array 'second\.representation\.weight' to send; its sent"
    with pytest.raises(SettingsError, match=line):
        client.send(0.0)
