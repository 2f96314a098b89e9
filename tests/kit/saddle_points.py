"""Saddle-point algorithms on one small graph."""

import numpy as np

from benchmarks.multi_task import directed
from flwr_frl.task.saddle_point import SaddlePoint
from flwr_frl.task.tasks.multi_task import build_problem

EDGES = np.array([(0, 1), (0, 3), (1, 2), (1, 3), (1, 4), (3, 4)])
PAIRS = directed(EDGES)


def algorithm(name="qcqp", nodes=range(5), seed=0, **settings):
    pairs = np.array([pair for pair in PAIRS if pair[0] in nodes])
    problem, constraint = build_problem(name, nodes, pairs, seed)
    return SaddlePoint(problem, constraint, **settings)
