"""FedBABU compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from layered import gradients, loss_of, start
from paper_rounds import run_variant
from softmax_runs import RATE, STEPS, N, assert_near, run

TASK = {"task": "layered:layered"}


def numpy_fedbabu(found):
    """Run Algorithm 1 with the clients that trained; return the body by round."""
    (a, w), rounds = start(), []
    for clients in found.trained:
        bodies = []
        for i in clients:
            body = a
            for _ in range(STEPS):
                body = body - RATE * gradients(body, w, i)[0]
            bodies.append(body)
        a = found.mean(bodies, clients)
        rounds.append(a)
    return rounds


def body_of(arrays) -> np.ndarray:
    weight, bias = (arrays[f"representation.0.{n}"] for n in ("weight", "bias"))
    return np.column_stack([weight, bias]).astype(float)


def fine_tuned(a, w, i, part, epochs):
    for _ in range(epochs):
        of_body, of_head, _ = gradients(a, w, i)
        a = a - RATE * of_body * (part != "head")
        w = w - RATE * of_head * (part != "representation")
    return a, w


@pytest.mark.parametrize(
    ("part", "weighting"),
    [("head", "uniform"), ("representation", "uniform"), ("all", "examples")],
)
def test_every_round_matches_the_paper(part, weighting):
    more = {"finetune_epochs": 4, "finetune_part": part, "weighting": weighting}
    result = run_variant("fedbabu", 3, evaluate=True, **more, **TASK)
    expected = numpy_fedbabu(result)
    for now, a in enumerate(expected):
        assert_near(body_of(result.arrays[now]), a)
        for i in range(N):
            tuned = fine_tuned(a, start()[1], i, part, 4)
            loss = result.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(*tuned, i), abs=1e-5)


def test_head_is_never_sent_and_no_state_is_kept():
    result = run("fedbabu", 3, evaluate=True, **TASK)
    body = ["representation.0.weight", "representation.0.bias"]
    for kind in ("train", "evaluate"):
        for message, reply in result.between(kind):
            assert list(message.content["arrays"]) == body
            assert list(reply.content.get("arrays", body)) == body
    assert result.kept[-1] == [{}] * N


def test_structure_distinguishes_another_initial_head():
    def said(nudged: float = 0.0) -> object:
        client = run("fedbabu", 0, **TASK).client(0, 0)
        state = client.task.initial_state
        moved = {"head.weight": state["head.weight"] + nudged}
        task = type("Task", (), {"classes": client.task.classes})()
        task.initial_state = {**state, **moved}
        client.task = task
        return client._structure()

    # Machines may differ in the last bits.
    assert said() == said(1e-8) != said(1e-2)
