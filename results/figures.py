"""Draws the figures from files that `ablate.py --out` and `grpo.py --log` wrote.

Run these in the project's folder. They take hours, except for the first two:

    python grpo.py --log read.log
    python grpo.py --base plain --log stall.log
    python ablate.py settings --seeds 10 --out settings.jsonl
    python ablate.py arms --seeds 10 --out arms.jsonl
    python ablate.py reuse --seeds 5 --out reuse.jsonl
    python ablate.py passk --seeds 5 --out passk.jsonl
    pip install matplotlib
    python results/figures.py                  all figures
    python results/figures.py mosaic passk     two of them

Each figure is a PNG in the folder results. It needs no display.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ablate import GRIDS, KS, LOSSES, headings, make_jobs, parse_records, t_interval  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
OUTCOMES = {
    # key in the log -> (colour, label)
    "read_passed": ("#009E73", "read, passed"),
    "read_failed": ("#A6DCC8", "read, failed"),
    "guess_passed": ("#E69F00", "guessed, passed"),
    "guess_failed": ("#D9D9D9", "guessed, failed"),
    "truncated": ("#555555", "ran out of turns"),
}


# ---- Reading -------------------------------------------------------------------------------------


def read_log(path):
    """The last run of a file of grpo.py --log: a list of rows. nan stands for null."""
    runs = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:                              # empty, or cut off by a kill
            continue
        if "config" in row:
            runs.append([])
        elif runs:
            runs[-1].append({key: np.nan if x is None else x for key, x in row.items()})
    if not runs or not runs[-1]:
        raise ValueError(f"{path}: this is no log of grpo.py with a finished step")
    return runs[-1]


def read_grid(path, grid):
    """The runs of a grid from a file of ablate.py --out: arm -> seed -> row.

    Only seeds on which all arms have a run are used. Raises ValueError if there are none.
    """
    records = parse_records(Path(path).read_text(encoding="utf-8", errors="replace"), path)
    found = {key_of(record): record["result"] for record in records}
    seeds = sorted({record["seed"] for record in records})
    jobs = make_jobs(argparse.ArgumentParser(), grid, list(GRIDS[grid]["arms"]), seeds, {})
    runs = {job["arm"]: {} for job in jobs}
    for job in jobs:
        if key_of(job) in found:
            runs[job["arm"]][job["seed"]] = found[key_of(job)][""]
    shared = set(seeds).intersection(*runs.values())
    if not shared:
        missing = [arm for arm in runs if not runs[arm]]
        raise ValueError(f"{path}: no seed has a run of each arm of {grid}. Missing: {missing}")
    print(f"{path}: {len(shared)} seeds")
    return {arm: {seed: rows[seed] for seed in sorted(shared)} for arm, rows in runs.items()}


def key_of(record):
    """What makes a run this run, whatever version of the code made it."""
    parts = [record[name] for name in ("measure", "config", "base", "train", "names")]
    return json.dumps(parts, sort_keys=True).replace("NaN", "null").replace("Infinity", "null")


def curve(run, key):
    return np.array([step[key] for step in run["history"]], dtype=float)


def smooth(values, window=5):
    """The mean of each `window` values in a row, or of all if there are fewer."""
    window = min(window, len(values))
    return np.convolve(values, np.ones(window) / window, "valid")


# ---- Drawing -------------------------------------------------------------------------------------


def panels(count, height, **sharing):
    figure = Figure(figsize=(8.3, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False, **sharing)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def mosaic(logs):
    """Each step is a column: its attempts, sorted and coloured by what they did."""
    figure, axes = panels(2, 3.4, sharey=True)
    titles = ("1 of 9 examples read, then edited right", "no example did so")
    for axis, rows, title in zip(axes, logs, titles):
        top = np.ones(len(rows))
        steps = np.arange(len(rows))
        for key, (colour, label) in OUTCOMES.items():
            share = np.nan_to_num([row[key] for row in rows])
            axis.bar(steps, -share, 1, bottom=top, color=colour, label=label, linewidth=0)
            top = top - share
        axis.set(title=title, xlabel="step", xlim=(-0.5, len(rows) - 0.5), ylim=(0, 1), yticks=[])
    axes[0].set_ylabel("64 attempts of a step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, handlelength=1.2, columnspacing=1.2)
    return figure


def settings(runs):
    """Bars for the means on training and held-out tasks, and a dot for each run."""
    arms = ["memorise", "stack", "stall", "read", "control"]
    figure, (axis,) = panels(1, 3.6)
    sides = ((-0.2, "train", "training tasks", GREY), (0.2, "held-out", "held-out tasks", BLUE))
    for shift, where, label, colour in sides:
        for x, arm in enumerate(arms):
            values = [run[where]["pass_rate"] for run in runs[arm].values()]
            axis.bar(x + shift, np.mean(values), 0.36, color=colour, alpha=0.55, label=label)
            label = None                                # one entry in the legend is enough
            spread = np.linspace(-0.1, 0.1, len(values))
            axis.plot(x + shift + spread, values, "o", color="black", markersize=3, alpha=0.7)
    for y, label in ((0.2, "one guess: .20"), (0.6, "best fixed sequence: .60")):
        axis.axhline(y, color="black", linestyle="--", linewidth=0.8)
        axis.text(len(arms) - 0.42, y, label, va="center", fontsize=9)
    axis.set(ylabel="pass rate after 80 steps", ylim=(0, 1.02), xlim=(-0.5, len(arms) - 0.45))
    axis.set_xticks(range(len(arms)))
    axis.set_xticklabels(arms)
    axis.legend(loc="upper left", ncols=2, frameon=False, bbox_to_anchor=(0, 1.15))
    return figure


def curves(runs):
    """Reward and reading of the default run, a thin line for each seed."""
    figure, axes = panels(2, 3.0, sharey=True)
    for axis, key, title in zip(axes, ("reward", "read_first"), ("reward", "reads first")):
        lines = [curve(run, key) for run in runs["read"].values()]
        for line in lines:
            axis.plot(line, color=BLUE, linewidth=0.7, alpha=0.4)
        axis.plot(np.mean(lines, axis=0), color=BLUE, linewidth=2.2)
        axis.set(title=f"{title}, {len(lines)} seeds and their mean", xlabel="step", ylim=(0, 1))
    axes[0].set_ylabel("share of attempts")
    return figure


def differences(runs):
    """Arms minus the default, paired by seed: means and 95% intervals."""
    arms = list(runs)[1:]
    columns = {"late reward": "late reward", "held-out pass_rate": "held-out pass rate"}
    figure, axes = panels(2, 2.6, sharey=True)
    for axis, (heading, title) in zip(axes, columns.items()):
        axis.axvline(0, color=GREY, linewidth=1)
        for y, arm in enumerate(arms):
            first = runs["default"]
            d = [headings(run)[heading] - headings(first[seed])[heading]
                 for seed, run in runs[arm].items()]
            centre, half = t_interval(d)
            colour = GREY if abs(centre) <= half else ORANGE
            axis.errorbar(centre, y, xerr=half, fmt="o", color=colour, capsize=4)
            axis.plot(d, [y + 0.22] * len(d), "|", color=colour, alpha=0.6)
        axis.set(title=f"{title}, minus default", yticks=range(len(arms)))
        axis.set_yticklabels(arms)
    axes[0].invert_yaxis()
    return figure


def sampling(runs):
    """Dynamic sampling beside the default: better per step, worse per attempt."""
    figure, axes = panels(2, 3.0, sharey=True)
    for arm, colour in (("default", GREY), ("dynamic sampling", BLUE)):
        rewards = np.array([smooth(curve(run, "reward")) for run in runs[arm].values()])
        total = np.array([np.cumsum(curve(run, "episodes")) for run in runs[arm].values()])
        steps = np.arange(total.shape[1])[-rewards.shape[1]:]
        episodes = total[:, -rewards.shape[1]:]
        for axis, x in ((axes[0], np.tile(steps, (len(rewards), 1))), (axes[1], episodes)):
            for xs, ys in zip(x, rewards):
                axis.plot(xs, ys, color=colour, linewidth=0.6, alpha=0.4)
            axis.plot(x.mean(axis=0), rewards.mean(axis=0), color=colour, linewidth=2.2, label=arm)
    axes[0].set(title="better per step", xlabel="step", ylim=(0, 1))
    axes[0].set_ylabel("reward, mean of 5 steps")
    axes[1].set(title="worse per attempt", xlabel="attempts")
    axes[1].legend(loc="lower right", frameon=False)
    return figure


def reuse(runs):
    """The late reward against the updates per batch, a line for each loss.

    With a blue loss, a token that has moved too far has no gradient, whether it was pushed up or
    down. With an orange loss it keeps its gradient, at least on one of the two sides.
    """
    unbounded = ("cispo", "cispo 0.2", "sapo", "plain gradient", "clip failures", "clip passes")
    figure, axes = panels(2, 4.6, sharey=True)
    for axis, lr in zip(axes, (3e-4, 1e-3)):
        ends = []
        for loss in LOSSES:
            names = [f"{loss} x{updates} lr {lr:g}" for updates in (2, 8, 32)]
            y = [np.mean([headings(run)["late reward"] for run in runs[name].values()])
                 for name in names]
            colour = ORANGE if loss in unbounded else BLUE
            axis.plot(range(3), y, "o-", color=colour, markersize=3, linewidth=1.2)
            ends.append((y[-1], loss, colour))
        places = [-0.05]
        for y, _, _ in sorted(ends):                    # labels must not lie on each other
            places.append(max(y, places[-1] + 0.045))
        down = np.mean(places[1:]) - np.mean([y for y, _, _ in ends])
        down = min(down, places[1])                     # the lowest label stays above the axis
        for place, (y, loss, colour) in zip(places[1:], sorted(ends)):
            line = dict(arrowstyle="-", color=colour, linewidth=0.5, relpos=(0, 0.5))
            axis.annotate(loss, (2, y), (2.35, place - down), color=colour, fontsize=9,
                          va="center", arrowprops=line)
        axis.set(title=f"learning rate {lr:g}", xlabel="updates per batch", xlim=(-0.1, 3.3),
                 xticks=range(3), ylim=(-0.03, 1))
        axis.set_xticklabels(["2", "8", "32"])
    axes[0].set_ylabel("reward of the last ten steps")
    figure.supxlabel("blue: tokens that have moved too far have no gradient.  "
                     "orange: they keep it, at least on one side", fontsize=10)
    return figure


def passk(runs):
    """pass@k on held-out tasks, before and after training."""
    figure, (axis,) = panels(1, 3.8)
    means = {}
    for arm, colour in zip(runs, (GREY, BLUE, GREEN, ORANGE)):
        rows = np.array([[run[f"held-out @{k}"] for k in KS] for run in runs[arm].values()])
        means[arm] = rows.mean(axis=0)
        axis.plot(KS, means[arm], "o-", color=colour, label=arm, markersize=4)
    guessing = [1 - 0.8 ** k for k in KS]
    axis.plot(KS, guessing, ":", color="black", label="guessing among five repairs")
    gap = means["base agent"] - means["default"]
    crossing = np.flatnonzero((gap[:-1] < 0) & (gap[1:] >= 0))
    if len(crossing) > 0:                               # between two k, on the logarithmic axis
        i = crossing[0]
        part = gap[i] / (gap[i] - gap[i + 1])
        k = KS[i] * (KS[i + 1] / KS[i]) ** part
        y = means["default"][i] * (1 - part) + means["default"][i + 1] * part
        axis.annotate(f"base agent and default\ncross near k = {k:.0f}", (k, y), (k, y - 0.3),
                      arrowprops=dict(arrowstyle="->"), fontsize=10, ha="center")
    axis.set(xscale="log", xlabel="k, attempts at a task", ylabel="pass@k, held-out tasks",
             ylim=(0, 1.03))
    axis.set_xticks(KS, [str(k) for k in KS])
    axis.minorticks_off()
    axis.legend(loc="lower right", frameon=False)
    return figure


# ---- Command line --------------------------------------------------------------------------------

FIGURES = {
    # name -> (function, what it reads)
    "mosaic": (mosaic, ["read.log", "stall.log"]),
    "settings": (settings, "settings"),
    "curves": (curves, "settings"),
    "differences": (differences, "arms"),
    "sampling": (sampling, "arms"),
    "reuse": (reuse, "reuse"),
    "passk": (passk, "passk"),
}


def read_input(source, folder):
    if isinstance(source, str):
        return read_grid(folder / f"{source}.jsonl", source)
    return [read_log(folder / name) for name in source]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--data", type=Path, default=Path("."), help="the folder of these files")
    parser.add_argument("--to", type=Path, default=HERE, help="the folder of the figures")
    args = parser.parse_args()
    names = args.names or list(FIGURES)
    inputs = {}
    try:                                                # find out before anything is drawn
        if not args.to.is_dir():
            raise ValueError(f"--to: {args.to} is not a folder")
        for name in names:
            if name not in FIGURES:
                raise ValueError(f"{name!r} is not one of {', '.join(FIGURES)}")
            inputs[name] = read_input(FIGURES[name][1], args.data)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    for name in names:
        figure = FIGURES[name][0](inputs[name])
        figure.savefig(args.to / f"{name}.png", dpi=200)
        print(args.to / f"{name}.png")


if __name__ == "__main__":
    main()
