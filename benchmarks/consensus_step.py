"""Effect of the consensus step γ on the distance between nodes, by compressor.

Ten nodes with two classes of the bundled digits each train with SQuARM-SGD (five local
steps, momentum) on a ring and on a complete graph, with logistic regression and a small
MLP. A cell is the consensus distance after the last round, relative to that without any
communication, in the worst of these four cases. γ is a multiple of the step that
``consensus-step="auto"`` selects for the compressor, but at most 1.
"""

import argparse
from typing import Any

from rich.progress import track

from benchmarks.common import RESULTS, markdown, write
from flwr_frl import simulate
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.gossip.mixing import practical_step
from flwr_frl.task.compression.per_tensor import create
from flwr_frl.task.tasks import build_task

COMPRESSORS: tuple[tuple[str, dict[str, float]], ...] = (
    ("identity", {}),
    ("sign", {}),
    ("qsgd", {}),
    *(
        (name, {"k": k})
        for name in ("top-k", "sign-top-k", "rand-k")
        for k in (0.1, 0.01)
    ),
)
FACTORS = (1 / 4, 1 / 2, 1, 2, 4)
GRAPHS, MODELS = ("ring", "complete"), ("logistic", "mlp-2")
NODES = 10


def distance(arguments: argparse.Namespace, **settings: Any) -> float:
    """Return the consensus distance after the last round."""
    run = simulate(
        *("squarm-sgd", "inline"),
        clients=NODES,
        rounds=arguments.rounds,
        seed=arguments.seed,
        output=arguments.output,
        evaluate_every=arguments.rounds,
        evaluate_last=1,
        **settings,
    )
    return float(run.rows[-1]["consensus-distance"])


def main() -> None:
    """Run the grid and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="results/consensus-step")
    arguments = parser.parse_args()
    places = [(graph, model) for graph in GRAPHS for model in MODELS]
    # With a negligible step, nodes train without communication.
    alone = {
        place: distance(arguments, graph=place[0], model=place[1], consensus_step=1e-12)
        for place in places
    }
    entries: list[dict[str, Any]] = []
    for name, own in track(COMPRESSORS, description="compressors"):
        settings = {
            "compressor": name,
            **{f"compressor_{n}": v for n, v in own.items()},
        }
        for factor in FACTORS:
            ratios, steps = [], []
            for graph, model in places:
                step = min(1.0, factor * default(model, name, **own))
                place = {"graph": graph, "model": model}
                more = {"compressor": name, "consensus_step": step, **settings}
                found = distance(arguments, **place, **more)
                ratios.append(found / alone[graph, model])
                steps.append(step)
            entry = {"factor": factor, "steps": steps, "ratios": ratios}
            entries.append({"compressor": label(name, own), **entry})
    draw(entries)
    rows = [
        [
            f"`{label(name, own)}`",
            *(cell(entries, label(name, own), f) for f in FACTORS),
        ]
        for name, own in COMPRESSORS
    ]
    columns = ["compressor", *(f"{factor:g} x" for factor in FACTORS)]
    body = (
        f"{NODES} nodes, {arguments.rounds} rounds of five local steps, seed "
        f"{arguments.seed} (a single seed). Entries are the consensus distance "
        "relative to that without communication, for the worst of two graphs and two "
        f"models; the step for `{MODELS[0]}` is in parentheses. **Bold** is the "
        f"default. {driven_apart(entries)}\n\n"
        + markdown(columns, rows)
        + "\n![consensus distance](consensus_step.png)\n"
    )
    data = {"entries": entries, "places": places}
    write("consensus_step", "The consensus step by compressor", body, data)


def driven_apart(entries: list[dict[str, Any]]) -> str:
    """Return a sentence on compressors whose default is worse than no messages."""
    names = [
        f"`{entry['compressor']}`"
        for entry in entries
        if entry["factor"] == 1 and max(entry["ratios"]) > 1
    ]
    if not names:
        return "With all compressors, messages reduce the distance."
    return f"With {', '.join(names)} messages increase the distance (above 1)."


def label(name: str, own: dict[str, float]) -> str:
    """Return a compressor's name with its k."""
    return f"{name} {own['k']:g}" if own else name


def default(model: str, name: str, **own: float) -> float:
    """Return the default step for messages of a model's size."""
    task = build_task(resolve({"model": model, "num-clients": NODES}), NODES)
    size = sum(parameter.numel() for parameter in task.initial_model().parameters())
    return practical_step(create(name, **own).typical_omega(size))


def cell(entries: list[dict[str, Any]], name: str, factor: float) -> str:
    """Return one cell of the table."""
    (entry,) = [e for e in entries if (e["compressor"], e["factor"]) == (name, factor)]
    text = f"{max(entry['ratios']):.3g}"
    mark = "**" if factor == 1 else ""
    return f"{mark}{text}{mark} ({entry['steps'][0]:.3g})"


def draw(entries: list[dict[str, Any]]) -> None:
    """Plot the worst ratio against the factor, with a line for each compressor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(dict.fromkeys(entry["compressor"] for entry in entries))
    for name in names:
        of = [entry for entry in entries if entry["compressor"] == name]
        worst = [min(max(entry["ratios"]), 1e3) for entry in of]
        axes.plot([entry["factor"] for entry in of], worst, marker="o", label=name)
    axes.axvline(1, color="grey", lw=0.8, ls=":")
    axes.axhline(1, color="grey", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="consensus step / default")
    axes.set(ylabel="consensus distance / without communication")
    axes.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
    axes.minorticks_off()
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "consensus_step.png", dpi=150)


if __name__ == "__main__":
    main()
