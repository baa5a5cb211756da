"""Grids of runs over seeds, as plain tables: what a difference between two runs is worth.

Read variants.py first; sections, figures and exercises are those of the chapter that this code belongs to.
Every arm of a grid is trained from the same base agents on the same seeds, so arms are compared pair by
pair. Finished runs are kept in --out: a second call with the same file runs only what is missing.

    python ablate.py --list                                    the grids, their runs, about how long
    python ablate.py                                           the grid `arms` on three seeds
    python ablate.py settings --seeds 5 --out runs.jsonl       another grid; killed, it goes on where it was
    python ablate.py arms --seeds 10 --lr 5e-4 --plot figures  a field of RLConfig for all arms without it
"""
import hashlib
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context

import numpy
import torch

from agent import adam, build_tokenizer, collate, token_logps
from env import TRAIN_TASKS, fail, one_line_parser, randomize_names, seed_list
from grpo import (RLConfig, add_config_flags, all_equal, evaluate, given_fields, make_env, mean, rl_update,
                  sample_groups, sample_step, step_generator, usable_config)
from variants import VARIANTS, base_weights, cores, late, load_weights, train_and_evaluate

# --------------------------------------------------------------------------------------------------
# The grids
# --------------------------------------------------------------------------------------------------
# name -> what it is for, steps of a run, arms (name -> the fields it changes; the first arm is what the
# others are compared with), columns of its table. Beside RLConfig fields an arm may have
#   base   "plain", or the players that its base agent imitates, in place of the RL base
#   names  "training": episodes of training draw their function's name from the training tasks' names only


def informed(n):
    return dict(base=["random", "blind"] * n + ["oracle"])


ARM_COLUMNS = ["late reward", "held-out", "reads", "first ok", "tokens", "clip %", "zero adv", "episodes",
               "to .8 (ep)"]
GRIDS = {
    "arms": dict(
        what="section 9.6: one field of the default changed at a time", steps=40, columns=ARM_COLUMNS,
        arms={
            "default": {},
            "scale none": dict(scale="none"),
            "seq_mean_token_mean": dict(agg="seq_mean_token_mean"),
            "eps_high 0.28": dict(eps_high=0.28),
            "dynamic sampling": dict(dynamic_sampling=True)}),
    "settings": dict(
        what="sections 9.3, 9.4: memorise, stack, stall, read, and the control", steps=80,
        columns=["train", "held-out", "read 1st", "first ok", "edits", "turns", "tokens", "1st ok tr.",
                 "entropy"],
        arms={
            "RL default": {},
            "RL original": dict(rename=False, max_edits=None),
            "plain original": dict(base="plain", rename=False, max_edits=None),
            "plain renamed": dict(base="plain", max_edits=None),
            "plain one-edit": dict(base="plain")}),
    "variants": dict(
        what="section 9.5 and since: every preset", steps=40,
        columns=["late reward", "held-out", "read 1st", "reads", "tokens", "clip %", "kl_ref", "entropy",
                 "episodes"],
        arms=VARIANTS),
    "groups": dict(
        what="section 9.7: attempts against tasks at 64 episodes", steps=80,
        arms={"default": {}}, columns=[]),
    "zero": dict(
        what="section 9.7: groups of equal rewards kept, dropped, or replaced", steps=80,
        columns=["late reward", "held-out", "zero early", "zero late", "epis. early", "epis. late",
                 "to .8 (ep)", "to .8 (st)"],
        arms={"kept": {}, "dropped": dict(filter_zero_adv=True), "replaced": dict(dynamic_sampling=True)}),
    "length": dict(
        what="section 9.7: lengths of passes and failures by aggregation", steps=40,
        columns=["tokens", "tokens pass", "tokens fail", "turns", "turns pass", "turns fail", "reads",
                 "held-out"],
        arms={"token_mean": {}, "seq_mean_token_mean": dict(agg="seq_mean_token_mean"),
              "seq_mean_token_sum": dict(agg="seq_mean_token_sum"),
              "constant 24": dict(agg="constant", agg_constant=24.0)}),
    "informed": dict(
        what="exercise 2: how rare may informed play be in the base agent", steps=80,
        columns=["base reads", "base right", "late reward", "held-out", "read 1st", "first ok"],
        arms={f"1 in {2 * n + 1}": informed(n) for n in (4, 8, 16, 32)}),
    "names": dict(
        what="exercise 3: renaming from the training names alone", steps=80,
        columns=["late reward", "train", "held-out", "reads", "first ok"],
        arms={"all names": {}, "training names": dict(names="training")}),
    "kl": dict(
        what="exercise 5: weight and estimator of the KL term", steps=80,
        columns=["late reward", "held-out", "read 1st", "first ok", "kl_ref", "entropy"],
        arms={"no KL": {}, **{f"{kind} {coef}": dict(kl_kind=kind, kl_coef=coef)
                              for kind in ("k1", "k2", "k3") for coef in (0.01, 0.1, 1.0)}}),
    "gspo": dict(
        what="exercise 6: spread of a sequence's log-ratio against its length", steps=20,
        arms={"default": {}}, columns=[]),
}


def over_steps(column):
    return lambda run: late(run["history"], column, len(run["history"]))


def at_end(which, column):
    return lambda run: run[which][column]


def until(run, what):
    """Steps or episodes until the mean reward of five steps in a row reaches 0.8; nan if it never does."""
    history, episodes = run["history"], 0
    for i, row in enumerate(history):
        episodes += row["episodes"]
        if i >= 4 and mean(r["reward"] for r in history[i - 4:i + 1]) >= 0.8:
            return i + 1 if what == "steps" else episodes
    return math.nan


# heading -> a number of a run, decimals. train, 1st ok tr.: 8 episodes of each training task after training;
# held-out, read 1st, reads, first ok, edits: the same of held-out tasks; late: the last ten or twenty steps;
# early: the first ten; to .8: see until(); base: before training; the rest, turns and tokens too: all steps
COLUMNS = {
    "late reward": (lambda run: late(run["history"], "reward"), 2),
    "train": (at_end("train", "pass_rate"), 2), "held-out": (at_end("heldout", "pass_rate"), 2),
    "reads": (at_end("heldout", "reads"), 2), "read 1st": (at_end("heldout", "read_first"), 2),
    "first ok": (at_end("heldout", "first_edit_right"), 2),
    "1st ok tr.": (at_end("train", "first_edit_right"), 2),
    "edits": (at_end("heldout", "edits"), 2), "turns": (over_steps("turns"), 2),
    "tokens": (over_steps("policy_tokens"), 1),
    "turns pass": (over_steps("turns_pass"), 2), "turns fail": (over_steps("turns_fail"), 2),
    "tokens pass": (over_steps("policy_tokens_pass"), 1),
    "tokens fail": (over_steps("policy_tokens_fail"), 1),
    "clip %": (lambda run: 100 * over_steps("clip_frac")(run), 2), "kl_ref": (over_steps("kl_ref"), 2),
    "entropy": (over_steps("entropy"), 2),
    "zero adv": (over_steps("zero_adv_frac"), 2), "episodes": (over_steps("episodes"), 0),
    "zero early": (lambda run: mean(row["zero_adv_frac"] for row in run["history"][:10]), 2),
    "zero late": (lambda run: late(run["history"], "zero_adv_frac", 20), 2),
    "epis. early": (lambda run: mean(row["episodes"] for row in run["history"][:10]), 0),
    "epis. late": (lambda run: late(run["history"], "episodes", 20), 0),
    "to .8 (ep)": (lambda run: until(run, "episodes"), 0),
    "to .8 (st)": (lambda run: until(run, "steps"), 0),
    "base reads": (at_end("before", "read_first"), 2),
    "base right": (at_end("before", "read_then_right"), 2),
}

# --------------------------------------------------------------------------------------------------
# One run, in a worker process
# --------------------------------------------------------------------------------------------------


def training_names_env(task, cfg, rng):
    """make_env with names of training tasks only.

    Drawn again until it fits, so the words it must avoid are avoided.
    """
    allowed = {t["name"] for t in TRAIN_TASKS}
    renamed = randomize_names(task, rng)
    while renamed["issue"][2] not in allowed:
        renamed = randomize_names(task, rng)
    return make_env(renamed, replace(cfg, rename=False), rng)


def run_one(job, weights):
    """Trains one arm on one seed, or measures what the grids `groups` and `gspo` measure.

    Gives the result, a dict.
    """
    torch.set_num_threads(1)
    tok, cfg = build_tokenizer(), RLConfig(**job["config"])
    if job["grid"] == "gspo":
        return {"pairs": sequence_ratios(load_weights(tok, weights), tok, cfg)}
    if job["grid"] == "groups":
        trained = []
        train_and_evaluate(weights, cfg, keep_model=trained)
        policies = {"RL base": load_weights(tok, weights), "trained": trained[0]}
        return {name: informative_groups(model, tok, cfg) for name, model in policies.items()}
    factory = training_names_env if job["names"] == "training" else None
    before = evaluate(load_weights(tok, weights), tok, TRAIN_TASKS, 16, cfg)
    return {**train_and_evaluate(weights, cfg, factory, make_env), "before": before}


def informative_groups(model, tok, cfg, draws=10):
    """For G = 4, 8, 16 at 64 episodes:
    [G, share of groups whose rewards differ, the prediction, distinct tasks].

    A task of pass rate p gives a group without variance with probability p^G + (1 - p)^G. p is estimated
    from 64 other episodes a task.
    """
    apart = sample_groups(model, tok, TRAIN_TASKS, 64, cfg, step_generator(cfg.seed, -2))
    rates = [mean(episode["reward"] for episode in apart[i:i + 64]) for i in range(0, len(apart), 64)]
    rows = []
    for G in (4, 8, 16):
        differ = []
        for draw in range(draws):
            part = replace(cfg, group_size=G, prompts_per_step=64 // G)
            _, episodes = sample_step(model, tok, part, TRAIN_TASKS, step_generator(cfg.seed, -100 - draw))
            differ += [not all_equal(episodes[i:i + G]) for i in range(0, 64, G)]
        rows.append([G, mean(differ), mean(1 - p ** G - (1 - p) ** G for p in rates), 64 // G])
    return rows


def sequence_ratios(model, tok, cfg):
    """[policy tokens, log s, the sum of squared token log-ratios]
    of episodes that the last minibatch has not seen.

    Each step: sample, update on one half of the episodes, and compare the other half before and after.
    """
    optimizer_step, pairs = partial(adam(list(model.parameters())), cfg.lr), []
    one_step = replace(cfg, minibatches=1)
    for step in range(cfg.steps):
        generator = step_generator(cfg.seed, step)
        episodes, _ = sample_step(model, tok, cfg, TRAIN_TASKS, generator)
        middle = len(episodes) // 2
        batch = collate(episodes[middle:])
        with torch.no_grad():
            old = token_logps(model, batch)
        rl_update(model, optimizer_step, episodes[:middle], one_step, generator)
        with torch.no_grad():
            log_r = token_logps(model, batch) - old                       # (B, T), 0 off the mask
        n = batch["mask"].sum(dim=1)
        pairs += torch.stack((n, log_r.sum(dim=1) / n, (log_r ** 2).sum(dim=1)), dim=1).tolist()
    return pairs


# --------------------------------------------------------------------------------------------------
# All runs of a grid: what is finished is kept
# --------------------------------------------------------------------------------------------------

def code_version():
    """A hash of the files that decide a run: results of other code are not taken for this one's."""
    here, text = os.path.dirname(os.path.abspath(__file__)), b""
    for name in ("env.py", "agent.py", "grpo.py", "variants.py", "ablate.py"):
        with open(os.path.join(here, name), "rb") as file:
            text += file.read()
    return hashlib.sha256(text).hexdigest()[:12]


def jobs_of(grid, arms, seeds, given):
    """The runs of a grid, each a dict of plain values. An arm's own fields stand above the given ones."""
    jobs = []
    for arm in arms:
        changed = GRIDS[grid]["arms"][arm]
        special = {name: changed[name] for name in ("base", "names") if name in changed}
        fields = {name: value for name, value in changed.items() if name not in special}
        for seed in seeds:
            cfg = usable_config({"steps": GRIDS[grid]["steps"], "eval_every": 0},
                                {**given, **fields, "seed": seed})
            jobs.append({"grid": grid if grid in ("groups", "gspo") else "train", "arm": arm, "seed": seed,
                         "config": asdict(cfg), "base": special.get("base"), "names": special.get("names")})
    return jobs


def job_key(job, version):
    """What makes two runs the same run: everything but the arm's name."""
    return json.dumps({**{name: value for name, value in job.items() if name != "arm"}, "code": version},
                      sort_keys=True)


def swap_nan(value, old, new):
    """Nested lists and dicts with nan for None or the other way round: JSON has no nan."""
    if isinstance(value, dict):
        return {name: swap_nan(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [swap_nan(part, old, new) for part in value]
    return (new if value is old or (isinstance(value, float) and math.isnan(value) and old is math.nan)
            else value)


def read_results(path):
    """{key: result} of the complete lines of a file of results;
    a torn last line is passed over and made good.

    One line and exit status 2 if the file is something else:
    nothing is appended to a file that is not ours.
    """
    results = {}
    try:
        with open(path, "a+b") as file:
            file.seek(0)
            lines = file.read().split(b"\n")
            if lines[-1]:            # killed while writing: whatever follows must begin on its own line
                file.write(b"\n")
    except OSError as error:
        fail(f"--out {path}: cannot be written: {error.strerror}")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line else None
            if record:
                results[record["key"]] = swap_nan(record["result"], None, math.nan)
        except (ValueError, TypeError, KeyError):
            if not line.startswith(b'{"key": '):    # the beginning of ours, torn by a kill, is passed over
                fail(f"--out {path}: line {number} is not a result of this program")
    return results


def ignore_interrupt():
    signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is the parent's to handle


def run_grid(jobs, n_jobs, out=None, known=()):
    """Runs what is not known yet, out being the file that known was read from.

    Gives ({(arm, seed): result}, [(arm, seed, error)], interrupted).
    """
    version, started = code_version(), time.perf_counter()
    done = {(job["arm"], job["seed"]): known[job_key(job, version)]
            for job in jobs if job_key(job, version) in known}
    todo = [job for job in jobs if (job["arm"], job["seed"]) not in done]
    failed, interrupted, finished, trouble = [], False, 0, None
    bases = {}
    for job in todo:
        bases.setdefault(
            (job["seed"], tuple(job["base"]) if isinstance(job["base"], list) else job["base"]),
            []).append(job)
    if done:
        print(f"{len(done)} of {len(jobs)} runs are in {out} already", flush=True)
    pool = ProcessPoolExecutor(n_jobs, mp_context=get_context("spawn"), initializer=ignore_interrupt)
    try:
        waiting = {pool.submit(base_weights, base): base for base in bases}
        while waiting:
            show_progress(finished, len(todo), min(n_jobs, len(waiting)), started)
            ready, _ = wait(waiting, timeout=5, return_when=FIRST_COMPLETED)
            for future in ready:
                what = waiting.pop(future)
                error = future.exception()
                if what in bases:                           # a base agent: its runs can start
                    for job in bases.pop(what):
                        if error:
                            failed.append((job["arm"], job["seed"], f"base agent: {error!r}"))
                        else:
                            waiting[pool.submit(run_one, job, future.result())] = json.dumps(job)
                    continue
                job, finished = json.loads(what), finished + 1
                if error:
                    failed.append((job["arm"], job["seed"], repr(error)))
                    continue
                done[job["arm"], job["seed"]] = future.result()
                if out and trouble is None:
                    trouble = append_result(out, job, version, future.result())
    except KeyboardInterrupt:
        interrupted = True
    except BrokenProcessPool:
        failed.append(("-", "-", "a worker process died (out of memory?)"))
    finally:
        for process in list((pool._processes or {}).values()) if interrupted else []:
            process.terminate()                 # there is no public way to stop runs that have begun
        pool.shutdown(wait=not interrupted, cancel_futures=True)
    show_progress(finished, len(todo), 0, started)
    print(file=sys.stderr)
    if trouble:
        failed.append(("-", "-", trouble))
    return done, failed, interrupted


def append_result(out, job, version, result):
    """One line, in one write.

    Gives None, or what went wrong; the runs go on, their results are then in the table only.
    """
    record = {"key": job_key(job, version), "arm": job["arm"], "seed": job["seed"], "config": job["config"],
              "versions": {"code": version, "torch": torch.__version__, "numpy": numpy.__version__,
                           "python": sys.version.split()[0]}, "result": swap_nan(result, math.nan, None)}
    try:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        return f"--out {out}: {error.strerror}; results from then on are not in it"


def show_progress(finished, total, running, started):
    seconds = time.perf_counter() - started
    left = (f"about {seconds / finished * (total - finished):.0f} s left" if finished
            else "making base agents")
    print(f"\r{finished} of {total} runs done, {running} running, {seconds:.0f} s, {left}     ", end="",
          file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
         2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
         2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


def t_interval(values):
    """(mean, half width) of the 95% confidence interval of a mean, Student's t;
    half width nan for fewer than two.

    Beyond 30 degrees of freedom the quantile is 1.96 + 2.45 / df, within 0.001 of the true one.
    """
    n = len(values)
    if n < 2:
        return mean(values), math.nan
    centre = mean(values)
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (n - 1))
    quantile = T_975[n - 2] if n - 1 <= len(T_975) else 1.96 + 2.45 / (n - 1)
    return centre, quantile * deviation / math.sqrt(n)


def verdict(pairs, centre, half):
    if not any(pairs):
        return "equal"
    if len(pairs) < 3:
        return "too few seeds"
    return "within seed noise" if abs(centre) <= half else ("higher" if centre > 0 else "lower")


def number(value, digits):
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def print_arms(grid, done, arms, seeds):
    """The grid's table: a line of means and a line of min..max an arm;
    then the paired differences from the first arm.
    """
    columns = GRIDS[grid]["columns"]
    width = max(len(arm) for arm in arms) + 1
    column_width = min(13, (120 - width) // len(columns))
    print(f"\n{'mean; range':{width}}" + "".join(f"{name:>{column_width}}" for name in columns))
    for arm in arms:
        runs = [done[arm, seed] for seed in seeds if (arm, seed) in done]
        values = {name: [COLUMNS[name][0](run) for run in runs] for name in columns}
        means, ranges = [], []
        for name in columns:
            there = [value for value in values[name] if not math.isnan(value)]
            digits = COLUMNS[name][1] - (name == "clip %" and max(there, default=0) >= 10)  # for want of room
            means.append(number(mean(there), digits))
            ranges.append(f"{min(there):.{digits}f}..{max(there):.{digits}f}" if there else "-")
            if there and len(there) < len(runs):
                ranges[-1] = f"({len(there)} of {len(runs)})"
        print(f"{arm:{width}}" + "".join(f"{cell:>{column_width}}" for cell in means))
        print(f"{f'  {len(runs)} seeds':{width}}" + "".join(f"{cell:>{column_width}}" for cell in ranges))
    print_differences(done, arms, seeds, columns, width)


def print_differences(done, arms, seeds, columns, width):
    first, compared, apart = list(arms)[0], 0, 0
    print(f"\n{f'minus {first}':{width}}{'':2}{'column':12}{'difference':>12}{'95% interval':>22}"
          "   verdict")
    for arm in list(arms)[1:]:
        both = [seed for seed in seeds if (arm, seed) in done and (first, seed) in done]
        for name in columns:
            measure, digits = COLUMNS[name][0], COLUMNS[name][1] + 1
            pairs = [measure(done[arm, seed]) - measure(done[first, seed]) for seed in both]
            pairs = [pair for pair in pairs if not math.isnan(pair)]
            if not pairs:
                continue
            centre, half = t_interval(pairs)
            word = verdict(pairs, centre, half)
            compared += word not in ("equal", "too few seeds")
            apart += word in ("higher", "lower")
            between = ("-" if math.isnan(half)
                       else f"{centre - half:+.{digits}f}..{centre + half:+.{digits}f}")
            print(f"{arm:{width}}  {name:12}{centre:+12.{digits}f}{between:>22}   {word}")
    print(f"\n{compared} comparisons, {apart} outside seed noise; "
          f"by chance alone about {0.05 * compared:.0f} would be.")


def print_groups(done, seeds):
    print(f"\n{'policy':10}{'G':>4}{'tasks':>7}{'informative groups':>20}{'min..max':>14}"
          f"{'1 - p^G - (1-p)^G':>20}")
    for policy in ("RL base", "trained"):
        for i in range(3):
            rows = [done["default", seed][policy][i] for seed in seeds if ("default", seed) in done]
            share = [row[1] for row in rows]
            if rows:
                print(f"{policy:10}{rows[0][0]:4}{rows[0][3]:7}{mean(share):20.2f}"
                      f"{f'{min(share):.2f}..{max(share):.2f}':>14}{mean(row[2] for row in rows):20.2f}")


def print_sequence_ratios(done, seeds):
    pairs = [pair for seed in seeds if ("default", seed) in done for pair in done["default", seed]["pairs"]]
    if not pairs:
        return
    token = math.sqrt(sum(pair[2] for pair in pairs) / sum(pair[0] for pair in pairs))
    print(f"\ntoken log-ratios have root mean square {token:.4f}; "
          "were they independent, log s would have that / sqrt(tokens)\n"
          f"\n{'policy tokens':15}{'episodes':>9}{'rms log s':>11}{'rms / sqrt(n)':>15}{'ratio':>7}"
          f"{'outside 3e-4, 4e-4':>20}")
    for low, high in ((1, 7), (8, 10), (11, 13), (14, 17), (18, 24)):
        rows = [pair for pair in pairs if low <= pair[0] <= high]
        if len(rows) > 1:
            spread, n = math.sqrt(mean(pair[1] ** 2 for pair in rows)), mean(pair[0] for pair in rows)
            own = math.sqrt(sum(pair[2] for pair in rows) / sum(pair[0] for pair in rows)) / math.sqrt(n)
            outside = mean(not math.log(1 - 3e-4) <= pair[1] <= math.log(1 + 4e-4) for pair in rows)
            print(f"{f'{low} to {high}':15}{len(rows):9}{spread:11.4f}{own:15.4f}{spread / own:7.2f}"
                  f"{outside:20.2f}")
    print("\nrms / sqrt(n): from the token log-ratios of the same episodes. "
          "ratio above 1: tokens of an episode move together")


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------
# told apart by any eye (Okabe and Ito)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"


def plot(grid, arms, done, seeds, folder):
    """Figure 9.1 for the grid settings, 9.2 and 9.3 for arms; gives the files written."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    arms = {arm: [done[arm, seed] for seed in seeds if (arm, seed) in done] for arm in arms}
    arms = {arm: runs for arm, runs in arms.items() if runs}
    figures = {"settings": {"settings.png": plot_settings},
               "arms": {"arms.png": plot_curves, "sampling.png": plot_sampling}}
    files = []
    for name, draw in figures[grid].items():
        figure = draw(plt, arms)
        figure.tight_layout()
        files.append(os.path.join(folder, name))
        figure.savefig(files[-1], dpi=110)
        plt.close(figure)
    return files


def plot_settings(plt, arms):
    """Figure 9.1: held-out behaviour after training, a bar for the mean and a dot for each seed."""
    order = [arm for arm in ("plain original", "plain renamed", "plain one-edit", "RL default",
                             "RL original") if arm in arms]
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True)
    for axis, (label, column) in zip(axes, (("held-out pass rate", "pass_rate"),
                                            ("episodes that read first", "read_first"),
                                            ("first edit right", "first_edit_right"))):
        for y, arm in enumerate(order):
            values = [run["heldout"][column] for run in arms[arm]]
            axis.barh(y, mean(values), color=BLUE if arm.startswith("RL") else GREY, height=0.6)
            axis.plot(values, [y] * len(values), "o", color="black", markersize=3, alpha=0.6)
        if column != "read_first":
            axis.axvline(0.2, color=ORANGE, linewidth=1, linestyle=":")
        axis.set(xlim=(0, 1.02), xlabel=label, yticks=range(len(order)), yticklabels=order)
    axes[0].invert_yaxis()
    axes[2].text(0.22, -0.42, "guess", color=ORANGE, fontsize=8)
    return figure


def band(axis, runs, column, color, label):
    """Mean over seeds with a min..max band, against the step."""
    curves = numpy.array([[row[column] for row in run["history"]] for run in runs])    # (seeds, steps)
    smooth = numpy.apply_along_axis(lambda c: numpy.convolve(c, numpy.ones(3) / 3, "valid"), 1, curves)
    steps = numpy.arange(smooth.shape[1]) + 1
    axis.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axis.plot(steps, smooth.mean(axis=0), color=color, label=label)


def plot_curves(plt, arms):
    """Figure 9.2: reward against the step, each arm beside the default,
    bands over seeds (a mean of three steps).
    """
    first, *others = arms
    figure, axes = plt.subplots(1, max(len(others), 1), figsize=(9, 2.6), sharey=True, squeeze=False)
    for axis, arm in zip(axes[0], others):
        band(axis, arms[first], "reward", GREY, first)
        band(axis, arms[arm], "reward", BLUE, "this arm")
        axis.set(title=arm, xlabel="step", ylim=(0, 1))
    axes[0][0].set_ylabel("batch reward")
    axes[0][0].legend(loc="lower right", frameon=False)
    return figure


def plot_sampling(plt, arms):
    """Figure 9.3: the share of groups without variance;
    reward against episodes sampled, default and dynamic sampling.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
    first = list(arms)[0]
    band(left, arms[first], "zero_adv_frac", GREY, first)
    left.set(xlabel="step", ylabel="groups of equal rewards", ylim=(0, 1))
    for arm, color in ((first, GREY), ("dynamic sampling", BLUE)):
        for i, run in enumerate(arms.get(arm, [])):
            episodes = numpy.cumsum([row["episodes"] for row in run["history"]])
            reward = numpy.convolve([row["reward"] for row in run["history"]], numpy.ones(5) / 5, "valid")
            right.plot(episodes[4:], reward, color=color, alpha=0.6, linewidth=1,
                       label=arm if i == 0 else None)
    right.set(xlabel="episodes sampled", ylabel="batch reward (mean of 5 steps)", ylim=(0, 1))
    right.legend(loc="lower right", frameon=False)
    return figure


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

def list_grids(n_seeds, n_jobs):
    print(f"{'grid':10}{'arms':>5}{'runs':>6}{'about':>8}   on {n_seeds} seeds and {n_jobs} processes")
    for name, grid in GRIDS.items():
        runs = len(grid["arms"]) * n_seeds
        bases = len({str(arm.get("base")) for arm in grid["arms"].values()})
        # seconds of a step, a run's evaluations and a base agent, on the machine of the README's figures
        seconds = (runs * (0.12 * grid["steps"] + 1) + n_seeds * 10 * bases) / n_jobs
        print(f"{name:10}{len(grid['arms']):5}{runs:6}{seconds:6.0f} s   {grid['what']}")


def main():
    parser = one_line_parser(__doc__)
    parser.add_argument("grid", nargs="?", default="arms", help="one of " + ", ".join(GRIDS))
    parser.add_argument("--list", action="store_true", help="say what each grid is")
    parser.add_argument("--seeds", type=seed_list, default=[0, 1, 2], metavar="N",
                        help="a number of seeds or a list 0,3,7")
    parser.add_argument("--arms", metavar="NAMES",
                        help="these arms only, a,b,c; the first is what the others are compared with")
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N",
                        help="worker processes (default: the cores)")
    parser.add_argument("--out", metavar="FILE", help="keep each finished run; skip those the file has")
    parser.add_argument("--plot", metavar="DIR", help="draw figures into this folder (needs matplotlib)")
    add_config_flags(parser)
    args = parser.parse_args()
    given = given_fields(args)
    if args.grid not in GRIDS:
        fail(f"unknown grid {args.grid!r}; known: {', '.join(GRIDS)}")
    if args.jobs < 1:
        fail(f"--jobs: {args.jobs} must be at least 1")
    if "seed" in given:
        fail("--seed: here it is --seeds, a number of seeds or a list 0,3,7")
    if args.plot:
        if not os.path.isdir(args.plot):
            fail(f"--plot {args.plot}: no such folder")
        if args.grid not in ("settings", "arms"):
            fail(f"--plot: there is no figure for the grid {args.grid}, only for settings and arms")
        if find_spec("matplotlib") is None:
            fail("--plot: matplotlib is not installed: pip install matplotlib")
    if args.list:
        list_grids(len(args.seeds), args.jobs)
        return
    known = list(GRIDS[args.grid]["arms"])
    arms = [arm.strip() for arm in args.arms.split(",")] if args.arms else known
    for arm in arms:
        if arm not in known or arms.count(arm) > 1:
            fail(f"--arms: {arm!r} is unknown or there twice; known: {', '.join(known)}")
    jobs = jobs_of(args.grid, arms, args.seeds, given)
    sys.exit(report(args, arms, jobs))


def report(args, arms, jobs):
    """Runs the grid, prints its table, draws its figures. Gives the exit status."""
    known = read_results(args.out) if args.out else {}
    version = f"code {code_version()}, torch {torch.__version__}"
    print(f"grid {args.grid}: {GRIDS[args.grid]['what']}; {len(jobs)} runs, "
          f"{args.jobs} processes of one thread, {version}", flush=True)
    done, failed, interrupted = run_grid(jobs, args.jobs, args.out, known)
    if args.grid == "groups":
        print_groups(done, args.seeds)
    elif args.grid == "gspo":
        print_sequence_ratios(done, args.seeds)
    elif done:
        print_arms(args.grid, done,
                   [arm for arm in arms if any((arm, seed) in done for seed in args.seeds)], args.seeds)
    for file in plot(args.grid, arms, done, args.seeds, args.plot) if args.plot and done else []:
        print(f"figure {file}")
    for arm, seed, error in failed:
        print(f"failed: arm {arm}, seed {seed}: {error}", file=sys.stderr)
    if interrupted:
        kept = f"; {args.out} has them" if args.out else ""
        print(f"interrupted: {len(done)} of {len(jobs)} runs were finished{kept}", file=sys.stderr)
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    main()
