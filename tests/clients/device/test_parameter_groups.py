"""Parameter groups: errors for contradictory and misspelled groups."""

import own_tasks
import pytest
from client_messages import new_context
from refusals import assert_says

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.groups import HEAD, REPRESENTATION
from flwr_frl.clients.device.state import PersonalState

TASK = own_tasks.task_of()


def client_with(base: type[Client] = Client, **groups) -> Client:
    kind = type("Mine", (base,), groups)
    state = PersonalState(new_context())
    return kind(TASK, 0, state, kind._settings_type())


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        ({"shared": (HEAD,), "personal": (HEAD,)}, "'head.' in shared and in pers"),
        *(
            ({where: (group,)}, f"'{group.strip('.')}.'; expected one of ['head.'")
            for where in ("shared", "sent", "personal")
            for group in ("heads", "represenation.")
        ),
    ],
)
def test_contradictory_and_misspelled_groups_are_refused(groups, line):
    client = client_with(**groups)
    assert_says(line, client.get_properties, {})
    assert_says("Mine has no update", client.update)


def test_groups_may_be_named_without_dots():
    client = client_with(shared="representation", personal=("head", "memory"))
    assert client.shared == client.sent == (REPRESENTATION,)
    assert client.personal == (HEAD, "memory.")


def test_a_sent_group_without_arrays_is_refused():
    client = client_with(shared=(REPRESENTATION, "second."))
    client._receive(client.get_parameters({}), {})
    line = "returns no array 'second.representation.0.weight' to send; its sent"
    assert_says(line, client._reply, 0.0)
