"""Is a difference between two settings real, or chance? Grids of runs over seeds, as plain tables.

Read grpo.py and variants.py first. Another seed draws another base agent, other tasks and other
samples, and the same training ends with a held-out pass rate of 0.8 or of 1.0. So one run of each
of two settings can't tell which setting is better. This file runs each on several seeds, prints
means and ranges, and says which differences chance does not explain.

    python ablate.py                                      the grid `arms` on five seeds
    python ablate.py --list                               all grids
    python ablate.py base                                 the agents that RL starts from
    python ablate.py settings --seeds 10 --out runs.jsonl keep finished runs, and do only the rest
    python ablate.py arms --arms default,"scale none"     these arms, compared with the first
    python ablate.py arms --lr 5e-4                       another field of RLConfig for all arms

An arm is a setting: a few fields of RLConfig that differ from the default. All arms of a grid run
on the same seeds, so they start from the same base agents and draw the same tasks, unless an arm
changes these. Here is what that is good for. Say that two arms end with these pass rates:

    seed               0       1       2      mean    range
    A               0.48    0.74    0.63     0.617    0.48 to 0.74
    B               0.53    0.80    0.67     0.667    0.53 to 0.80
    B minus A      +0.05   +0.06   +0.04    +0.050   +0.04 to +0.06

The two ranges are nearly the same, and yet B is ahead on every seed. Seed 0 is bad for both arms
and seed 1 is good for both. In the difference of a pair, such luck of the seed cancels.

Three seeds give only an estimate of the mean difference over all possible seeds. The 95% confidence
interval says how good it is: of a hundred such intervals, about 95 contain that mean. For n
differences d it is

    mean(d) +- t * std(d) / sqrt(n)

where t is 4.303 for three pairs, 2.776 for five, and close to 2 for many: with few seeds, std(d) is
uncertain as well. Here std(d) is 0.01, and the interval is 0.050 +- 0.025. It excludes 0, so B
counts as higher. What if the pairs were ignored? The uncertainty of both means then adds up, and
the half width is t * sqrt((std(A)^2 + std(B)^2) / n). Here t is 2.776, as for five pairs: t depends
on how many numbers there are, less one for each mean that is computed from them. That is 5 - 1 for
five pairs, and 6 - 2 for six numbers with two means. The interval is 0.050 +- 0.301, which says
nothing. This is what pairing buys.

An interval that contains 0 means that the arms are not distinguishable with this number of seeds.
It does not mean that they are equal: more seeds may show a difference. There are three limits.
Pairs help only as far as the luck is shared, and the runs of a pair drift apart as soon as their
weights differ. Of a hundred intervals for the difference of two equal arms, about five exclude 0.
And the columns of a run are correlated, so one unusual run can make several columns exclude 0 at
once. Check a finding on new seeds.
"""
import argparse
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import torch

from agent import (
    behavior,
    behavior_stats,
    build_tokenizer,
    collate,
    frozen_logps,
    load_policy,
    make_base_agent,
    mean,
    save_policy,
    step_generator,
    token_logps,
)
from env import HELDOUT_TASKS, TRAIN_TASKS, randomize_names
from grpo import (
    RLConfig,
    add_config_flags,
    aggregate_loss,
    compute_advantages,
    config_from,
    make_env,
    sample_batch,
    sample_groups,
    train_rl,
)
from variants import GRPO, VARIANTS

# ==================================================================================================
# Part 1. One grid, a run, the table, and the differences
# ==================================================================================================

# ---- A grid --------------------------------------------------------------------------------------
# headings(), below, explains the first word of a column. For the second word see watch and
# behavior_stats (train, held-out), or train_rl (early, late, all, sum).

BASIC = ["late reward", "held-out pass_rate", "held-out read_first", "held-out first_edit_right"]
GRIDS = {}
GRIDS["arms"] = dict(
    what="one field of the default changed at a time",
    steps=40,                           # of a run. Without this entry it is 80.
    arms={
        # name -> the fields of RLConfig that it changes. The first is what the others are compared
        # with.
        "default": {},
        "scale none": dict(scale="none"),
        "eps_high 0.28": dict(eps_high=0.28),
        "seq_mean_token_mean": dict(agg="seq_mean_token_mean"),
        "dynamic sampling": dict(dynamic_sampling=True),
    },
    columns=[
        *BASIC, "all policy_tokens", "all turns", "all reads", "all clip_frac",
        "all zero_adv_frac", "all episodes", "episodes to .8",
    ],
)


# ---- A run ---------------------------------------------------------------------------------------

TASK_SETS = {"train": TRAIN_TASKS, "held-out": HELDOUT_TASKS}


def train_and_evaluate(model, tok, cfg, job):
    """Trains a base agent, and records what it does before, during and after the training.

        base train, base held-out    before training, see watch
        history                      a dict for each step, see train_rl
        train, held-out              after training

    job describes the run, see part 3. Only its entry names matters here. Returns {name: row}. A row
    becomes a line of the table. This function is one of several measurements, see part 2. Some of
    them return several rows for a run, each with a name. This one returns one row without a name.
    """
    # an option of part 2, see EXTRA
    factory = training_names if job["names"] == "training" else make_env
    row = {}
    for name, tasks in TASK_SETS.items():
        row[f"base {name}"] = watch(model, tok, tasks, cfg)
    row["history"] = train_rl(model, tok, cfg, TRAIN_TASKS, env_factory=factory)
    for name, tasks in TASK_SETS.items():
        row[name] = watch(model, tok, tasks, cfg)
    return {"": row}


def headings(row):
    """The numbers of a row by their headings, as a dict.

        train reads          key `reads` of the entry `train`, and so on for the other entries
        early reward         key `reward` of the history, mean of the first ten steps
        late reward          its mean over the last ten steps
        all reward           its mean over all steps
        episodes to .8       number of episodes until the mean reward of five steps is at least 0.8,
                             inf if that never happens
    """
    if "history" not in row:            # other measurements have headings already
        return row
    numbers = {}
    for entry in ("base train", "base held-out", "train", "held-out"):
        for key, number in row[entry].items():
            numbers[f"{entry} {key}"] = number
    history = row["history"]
    for part, steps in (("early", history[:10]), ("late", history[-10:]), ("all", history)):
        for key in history[0]:
            numbers[f"{part} {key}"] = mean(step[key] for step in steps)
    episodes = np.cumsum([step["episodes"] for step in history])
    numbers["episodes to .8"] = math.inf
    for end in range(5, len(history) + 1):
        if mean(step["reward"] for step in history[end - 5:end]) >= 0.8:
            numbers["episodes to .8"] = episodes[end - 1]
            break
    return numbers


# ---- The table -----------------------------------------------------------------------------------


def table_of(results, columns):
    """Turns results[arm, seed][row name] into table[line][heading][seed], a number.

    A line is an arm, or an arm and the name of one of its rows. For example,
    table["default"]["late reward"][3] is the number of seed 3.
    """
    table = {}
    for (arm, seed), rows in results.items():
        for name, row in rows.items():
            numbers = headings(row)
            line = table.setdefault(f"{arm}: {name}" if name else arm, {})
            for heading in columns:
                line.setdefault(heading, {})[seed] = numbers[heading]
    return table


def text(x, sign=""):
    """A number as text, with up to three digits, or all those before the point."""
    return f"{x:{sign}.0f}" if abs(x) >= 999.5 else f"{x:{sign}.3g}"


def summary(values):
    """The mean over seeds and the range as text. nan means that there was nothing to measure.

    "3 of 5" in place of a range: only three runs reached the goal, and the others have inf. The
    mean is that of these three.
    """
    values = [x for x in values if x == x]
    reached = [x for x in values if x < math.inf]
    if not reached:
        return f"0 of {len(values)}" if values else "-"
    if len(reached) < len(values):      # say so, because the mean flatters the arm
        return f"{text(np.mean(reached))}  {len(reached)} of {len(values)}"
    return f"{text(np.mean(values))}  {text(min(values))}..{text(max(values))}"


def print_table(table, columns):
    """Prints means and ranges over seeds, as many columns beside each other as fit on a screen."""
    width = max(map(len, table), default=0)
    per_block = max(1, (100 - width) // 27)
    for first in range(0, len(columns), per_block):
        block = columns[first:first + per_block]
        print("\n" + " " * width + "".join(f" {heading:>26}" for heading in block))
        for name, line in table.items():
            cells = "".join(f" {summary(line[heading].values()):>26}" for heading in block)
            print(f"{name:{width}}{cells}")


# ---- The differences -----------------------------------------------------------------------------

# The t of the head of this file, which is Student's t. It depends on the degrees of freedom, here
# the number of pairs less 1. This list is for 1 to 7.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365]


def t_interval(values):
    """The mean of at least two values, and the half width of its 95% confidence interval."""
    n = len(values)
    freedom = n - 1
    if freedom <= len(T):
        t = T[freedom - 1]
    else:                                               # a series, accurate to 0.001
        t = 1.96 + 2.372 / freedom + 2.823 / freedom ** 2 + 2.556 / freedom ** 3
    return np.mean(values), t * np.std(values, ddof=1) / math.sqrt(n)


UNCLEAR = ["not distinguishable", "equal on every seed", "too few pairs"]


def compare(ours, theirs):
    """Two cells (seed -> number), seed by seed: (verdict, the differences)."""
    seeds = [seed for seed in ours if seed in theirs]
    never = [seed for seed in seeds if math.inf in (ours[seed], theirs[seed])]
    if never:                           # to leave them out would flatter the arm that failed
        return f"at least one of the two never reached it on seeds {never}", []
    d = [ours[seed] - theirs[seed] for seed in seeds]
    d = [x for x in d if x == x]
    if len(d) < 3:
        return "too few pairs", d
    if not any(d):
        return "equal on every seed", d
    centre, half = t_interval(d)
    if abs(centre) <= half:
        return "not distinguishable", d
    return "higher" if centre > 0 else "lower", d


def print_differences(table, columns, show_all):
    """Compares each line of the table with the first, as the head of this file explains."""
    first, *others = table
    print(f"\n{'minus ' + first:22}{'column':28}difference and 95% interval")
    counts = Counter()
    for name in others:
        for heading in columns:
            verdict, d = compare(table[name][heading], table[first][heading])
            counts[verdict] += 1
            interval = ""
            if len(d) >= 3:
                centre, half = t_interval(d)
                interval = f"{text(centre, '+')}  {text(centre - half, '+')} to "
                interval += text(centre + half, "+")
            if show_all or verdict not in UNCLEAR:
                print(f"{name:22}{heading:28}{interval:28} {verdict} ({len(d)} pairs)")
    unclear, equal, few = [counts[verdict] for verdict in UNCLEAR]
    seeds = len(table[first][columns[0]])
    total = counts["higher"] + counts["lower"] + unclear
    print(f"""
{unclear} of {total} differences are not distinguishable from 0 with {seeds} seeds,
{equal} are equal on every seed, and {few} have fewer than three pairs (--all shows these).
If no arm had any effect, about {0.05 * total:.1f} intervals would exclude 0. The columns of one run
are correlated, so such outliers come in clumps.""")


# ==================================================================================================
# Part 2. More grids and measurements. Skip these at first.
# ==================================================================================================

# ---- More grids ----------------------------------------------------------------------------------


def with_oracle(n):
    """One demonstration of informed play for every 2 n of uninformed play."""
    return dict(kinds=("random", "blind") * n + ("oracle",))


RL = with_oracle(4)                                     # the agents of make_rl_base
PLAIN = {}                                              # and of make_base_agent

# A grid may have `measure`, a key of MEASUREMENTS, and compare=False, if its arms should not be
# compared with the first, unless --arms chooses some. Besides fields of RLConfig, an arm may have
# these entries. The values are the defaults.
EXTRA = {
    "base": RL,             # the base agent, as arguments of make_base_agent
    "train": True,          # False: do not train, and look at the base agent
    "names": "all",         # training: random names come from the training tasks only
}

GRIDS["base"] = dict(
    what="the base agents, and whether reading has an advantage for them",
    steps=0,
    measure="base_agent_stats",
    arms={"plain": dict(base=PLAIN), "rl": {}},
    columns=[
        "pass_rate", "read_first", "read_then_right", "entropy", "adv_read", "adv_not_read",
    ],
)

MEMORISE = dict(base=PLAIN, rename=False, max_edits=None)
GRIDS["settings"] = dict(
    what="five gyms and base agents: in which does the agent learn to read?",
    arms={
        # Named after what the agent does, or the role of the run. With random names it can't learn
        # an edit for each name by heart. With one edit it can't stack edits until one fits.
        "read": {},
        "control": dict(rename=False, max_edits=None),
        "memorise": MEMORISE,
        "stack": dict(base=PLAIN, max_edits=None),
        "stall": dict(base=PLAIN),
    },
    columns=[
        "train pass_rate", "train first_edit_right", *BASIC, "held-out tests",
        "held-out edits", "held-out same_calls", "all turns", "all policy_tokens", "early reads",
        "late reads", "early entropy", "late entropy", "base train pass_rate",
        "base train read_first", "base train read_then_right", "base train entropy",
    ],
)

# Without random names and a limit on edits, the plain agent can get stuck. A stack of edits repairs
# 60% of the tasks, and once the policy has become certain of it, all attempts at the others fail.
# Groups that fail as a whole have no gradient. What helps, and what does it cost?
GRIDS["memorise"] = dict(
    what="exploration that ends too early, and what helps",
    arms={
        "default": MEMORISE,
        "groups of 16": dict(MEMORISE, group_size=16, prompts_per_step=4),
        "eps_high 0.28": dict(MEMORISE, eps_high=0.28),
        "maxrl": dict(MEMORISE, **VARIANTS["maxrl"]),
        "temperature 1.3": dict(MEMORISE, temperature=1.3),
        "160 steps": dict(MEMORISE, steps=160),
        "long imitation": dict(MEMORISE, base=dict(batches=300)),
    },
    columns=[
        "train pass_rate", "train unsolved", "held-out pass_rate", "late reward",
        "late all_failed", "base train entropy", "early entropy", "late entropy", "all episodes",
    ],
)

GRIDS["variants"] = dict(
    what="every preset of variants.py",
    steps=40,
    arms=VARIANTS,
    columns=[
        *BASIC, "all policy_tokens", "all clip_frac", "all kl_ref", "all entropy", "all episodes",
    ],
)

# Each loss has a clip range of its own. If two losses differ, is it the loss or the range? So PPO's
# clip is also run with the ranges of GSPO and GMPO, and CISPO and DPPO with ranges other than those
# of their presets. GMPO keeps log r within 0.4 of 0, so r is between 0.67 and 1.49. Two more arms
# clip only tokens of failed attempts (A < 0), or only those of passed ones (A > 0).
LOSSES = {name: VARIANTS[name] for name in ("gspo", "gmpo", "cispo", "dppo", "sapo")}
LOSSES.update({
    "clip": {},
    "clip failures": dict(eps_high=1e6),
    "clip passes": dict(eps_low=1.0),
    "clip like gspo": dict(eps_low=3e-4, eps_high=4e-4),
    "clip like gmpo": dict(eps_low=0.33, eps_high=0.49),
    "cispo 0.2": dict(ratio_level="cispo", eps_low=0.2),
    "dppo 0.05": dict(ratio_level="dppo", eps_low=0.05, eps_high=0.05),
    "dppo 0.3": dict(ratio_level="dppo", eps_low=0.3, eps_high=0.3),
    "plain gradient": dict(ratio_level="none"),
})


def reuse_arms():
    """All losses with all numbers of updates and two learning rates. agg is that of GSPO."""
    arms = {}
    for lr in (3e-4, 1e-3):
        for minibatches, epochs in ((2, 1), (4, 2), (8, 4)):
            for loss, changed in LOSSES.items():
                arms[f"{loss} x{minibatches * epochs} lr {lr:g}"] = dict(
                    changed,
                    lr=lr,
                    minibatches=minibatches,
                    epochs=epochs,
                    agg="seq_mean_token_mean",
                )
    return arms


GRIDS["reuse"] = dict(
    what="the losses when a batch is used for 2, 8 and 32 updates",
    steps=30,
    arms=reuse_arms(),
    columns=[
        "late reward", "held-out pass_rate", "all approx_kl", "all ratio_max", "all logratio_neg",
    ],
    compare=False,
)

KS = (1, 2, 4, 8, 16, 32, 64)                           # the k of pass@k
GRIDS["passk"] = dict(
    what="pass@k before and after training",
    measure="pass_at_k",
    arms={
        "base agent": dict(train=False),
        "default": {},
        "maxrl": VARIANTS["maxrl"],
        "grpo": GRPO,
    },
    columns=[f"train @{k}" for k in KS] + [f"held-out @{k}" for k in KS],
)

GRIDS["gradients"] = dict(
    what="noise and direction of the gradient, by estimator",
    steps=30,
    measure="gradient_noise",
    arms={"base": dict(train=False), "step 8": dict(steps=8), "step 30": {}},
    columns=["snr", "cosine"],
)

GRIDS["zero"] = dict(
    what="groups of equal rewards: how many there are, and what to do with them",
    arms={
        "kept": {},
        "dropped": dict(filter_zero_adv=True),
        "replaced": dict(dynamic_sampling=True),
    },
    columns=[
        "late reward", "held-out pass_rate", "early zero_adv_frac", "late zero_adv_frac",
        "all all_passed", "all all_failed", "early episodes", "late episodes", "episodes to .8",
        "base train differ_4", "base train differ_8", "base train differ_16",
        "train differ_4", "train differ_8", "train differ_16",
    ],
)

GRIDS["informed"] = dict(
    what="rarer informed play in the base agent, or fewer random names in training",
    arms={
        "1 in 9": {},
        "1 in 17": dict(base=with_oracle(8)),
        "1 in 33": dict(base=with_oracle(16)),
        "1 in 65": dict(base=with_oracle(32)),
        "training names": dict(names="training"),
    },
    columns=["base train read_first", "base train read_then_right", "train pass_rate", *BASIC],
)


def kl_arms():
    """Three estimators of the KL term with three weights, and no KL term."""
    arms = {"no KL": {}}
    for kind in ("k1", "k2", "k3"):
        for coef in (0.01, 0.1, 1.0):
            arms[f"{kind} {coef}"] = dict(kl_kind=kind, kl_coef=coef)
    return arms


GRIDS["kl"] = dict(
    what="weight and estimator of the KL term",
    arms=kl_arms(),
    columns=[*BASIC, "all kl_ref", "all entropy"],
)

GRIDS["ratio_spread"] = dict(
    what="GSPO's ratio of an episode: how widely it spreads, by length of the episode",
    steps=20,
    measure="ratio_spread",
    arms={"default": dict(minibatches=1)},
    columns=["mean log_s", "rms log_s", "independent"],
)


# ---- More measurements ---------------------------------------------------------------------------
# A measurement gets the base agent, may train it, and returns rows: name -> dict of numbers.


def training_names(task, cfg, rng):
    """An env_factory that draws the random names from those of the training tasks."""
    names = [other["name"] for other in TRAIN_TASKS if other["name"] != task["name"]]
    if cfg.rename:                      # once more: it may have got a held-out name
        task = randomize_names(task, rng, names)
    return make_env(task, cfg, rng)


def watch(model, tok, tasks, cfg, n=16):
    """What an agent does in n attempts at each task: behavior_stats and more, as a dict.

        entropy         of the policy, in nats: the mean of -log p over the tokens that it sampled
        unsolved        number of tasks that no attempt passes
        same_calls      share of attempts whose calls are of the same kinds, in the same order, as
                        those of the most common attempt
        adv_read        mean advantage of the attempts that read before their first edit
        adv_not_read    mean advantage of the others
        counts          how many attempts at each task passed
        differ_8        share of groups of 8 attempts whose rewards differ, also for 4 and 16

    Here the advantage of an attempt is its reward minus the mean reward of all attempts at its
    task. If reading has no advantage, RL has no reason to do it more often.
    """
    episodes = sample_groups(model, tok, tasks, n, cfg, step_generator(cfg.seed, -1))
    passed = np.array([episode["env"].passed for episode in episodes])  # (tasks * n,)
    counts = passed.reshape(-1, n).sum(axis=1).tolist()
    advantage = passed - np.repeat(counts, n) / n                       # (tasks * n,)
    read_first = np.array([behavior(episode)["read_first"] == 1 for episode in episodes])
    tokens = sum(sum(episode["mask"]) for episode in episodes)
    logps = sum(sum(episode["logps"]) for episode in episodes)
    kinds = Counter()
    for episode in episodes:
        kinds[", ".join(" ".join(call[:1]) for call in episode["calls"])] += 1
    stats = {
        **behavior_stats(episodes),
        "entropy": -logps / tokens,
        "unsolved": counts.count(0),
        "counts": counts,
        "same_calls": max(kinds.values()) / len(episodes),
        "adv_read": mean(advantage[read_first]),
        "adv_not_read": mean(advantage[~read_first]),
    }
    for G in (4, 8, 16):
        stats[f"differ_{G}"] = mean(rewards_differ(c, n, G) for c in counts)
    return stats


def rewards_differ(c, n, G):
    """The probability that of G attempts some pass and some fail, if c of n attempts passed.

    In every group some pass, or some fail, or both. So P(some pass) + P(some fail) - P(both) = 1.
    Like pass@k the estimate is unbiased, which means right on average. The obvious
    1 - p^G - (1 - p)^G with p = c / n is too low on average.
    """
    return any_passed(c, n, G) + any_passed(n - c, n, G) - 1


def base_agent_stats(model, tok, cfg, job):
    """What the base agent does in 64 attempts at each task, in the default gym."""
    return {name: watch(model, tok, tasks, cfg, 64) for name, tasks in TASK_SETS.items()}


def any_passed(c, n, k):
    """pass@k of a task of which c of n attempts passed, see pass_at_k."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_at_k(model, tok, cfg, job, n=64):
    """pass@k, the probability that at least one of k attempts passes: a mean over tasks.

    pass@1 is the pass rate. pass@k for a large k shows what the agent can do at all. RL may raise
    the first and lower the second, because it makes the agent more certain. But there are only five
    ops here: even guessing among them has a pass@64 of about 1. Only tasks that need several right
    choices in a row could show an ability that guessing does not have.

    If c of n attempts passed, C(n - c, k) of the C(n, k) ways to choose k attempts choose failed
    ones only. So 1 - C(n - c, k) / C(n, k) is an unbiased estimate (arXiv 2107.03374). The obvious
    1 - (1 - c / n)^k is too low on average.
    """
    train_rl(model, tok, cfg, TRAIN_TASKS)
    row = {}
    for where, tasks in TASK_SETS.items():
        counts = watch(model, tok, tasks, cfg, n)["counts"]
        for k in KS:
            row[f"{where} @{k}"] = mean(any_passed(c, n, k) for c in counts)
    return {"": row}


# Estimators of the gradient, as fields of RLConfig. The first is unbiased: on average it is the
# policy gradient. The next five change one thing about it.
UNBIASED = dict(baseline="leave_one_out", scale="none", agg="seq_mean_token_sum")
ESTIMATORS = {
    "unbiased": UNBIASED,
    "baseline length_weighted": dict(UNBIASED, baseline="length_weighted"),
    "scale group_std": dict(UNBIASED, scale="group_std"),
    "scale group_mean": dict(UNBIASED, scale="group_mean"),
    "agg token_mean": dict(UNBIASED, agg="token_mean"),
    "agg seq_mean_token_mean": dict(UNBIASED, agg="seq_mean_token_mean"),
}


def gradient_noise(model, tok, cfg, job, batches=40):
    """How noisy and how biased is the gradient g of one batch? A row for each estimator.

        snr       signal-to-noise ratio: the squared length of the mean gradient, divided by the
                  noise. The noise is the mean squared distance of one batch's g from that mean. The
                  mean of a few batches still contains some of it. This makes the squared length too
                  large, by noise / batches on average, which the code subtracts
        cosine    between this estimator's mean g over the even batches, and the mean g of
                  "unbiased" over the odd ones. If both used the same batches, their common noise
                  would make them look alike

    The rows "all" use every episode. The rows "matched" use as many passed as failed episodes of
    each length. If two estimators differ in "all" and agree in "matched", it is the different
    lengths of passed and failed episodes that set them apart. But "matched" also has equal numbers
    of passed and failed episodes. To check that the agreement does not come from this alone, the
    rows "balanced" have equal numbers too, of any lengths.
    """
    train_rl(model, tok, cfg, TRAIN_TASKS)
    gradients = {}                      # (episodes, estimator) -> one g per batch
    for i in range(batches):
        generator = step_generator(cfg.seed, 10_000 + i)
        episodes = sample_batch(model, tok, cfg, TRAIN_TASKS, generator)
        batch = collate(episodes)
        logp = token_logps(model, batch, cfg.temperature)               # (N, T)
        on = batch["mask"]                                              # (N, T)
        lengths = on.sum(dim=1)                                         # (N,)
        masks = {
            "all": on,
            "balanced": on & same_lengths(episodes, 0 * lengths),
            "matched": on & same_lengths(episodes, lengths),
        }
        for choice, mask in masks.items():
            for name, changed in ESTIMATORS.items():
                own = replace(cfg, **changed)
                A = compute_advantages(episodes, own)                   # (N,), of whole groups
                loss = aggregate_loss(-A[:, None] * logp, mask, own.agg)
                g = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                g = torch.nn.utils.parameters_to_vector(g)              # (weights,)
                gradients.setdefault((choice, name), []).append(g)
    rows = {}
    for (choice, name), g in gradients.items():
        g = torch.stack(g)                                              # (batches, weights)
        unbiased = torch.stack(gradients[choice, "unbiased"])
        noise = g.var(dim=0).sum()
        signal = g.mean(dim=0).square().sum() - noise / batches
        cosine = torch.cosine_similarity(g[::2].mean(dim=0), unbiased[1::2].mean(dim=0), dim=0)
        rows[f"{choice}, {name}"] = {"snr": (signal / noise).item(), "cosine": cosine.item()}
    return rows


def same_lengths(episodes, lengths):
    """Chooses as many passed as failed episodes of each length: (N, 1) bool.

    The kind of an episode is its length and whether it passed. If its length has p passed and f
    failed ones, the first min(p, f) of each kind are chosen.
    """
    passed = torch.tensor([episode["env"].passed for episode in episodes])
    same_length = lengths[:, None] == lengths                           # (N, N)
    p = (same_length & passed).sum(dim=1)                               # (N,)
    f = (same_length & ~passed).sum(dim=1)                              # (N,)
    same_kind = same_length & (passed[:, None] == passed)               # (N, N)
    earlier = same_kind.tril(-1).sum(dim=1)             # (N,) how many of its kind precede it
    return (earlier < torch.minimum(p, f))[:, None]


def ratio_spread(model, tok, cfg, job):
    """How far does GSPO's ratio s of an episode move in one update? A row for a range of lengths.

    The episodes are new ones, sampled by the policy as it was before the update.

        mean log_s    log s is the mean of an episode's n log-ratios
        rms log_s     its root mean square
        independent   what rms log_s would be if an episode's log-ratios were independent and had
                      the mean 0. Such numbers partly cancel: a typical mean of n of them is sqrt(n)
                      times smaller than a typical single one
    """
    before = deepcopy(model)
    seen = []                           # n, log s, and the sum of squared log r / n^2

    def on_step(row, episodes):
        generator = step_generator(cfg.seed, 10_000 + row["step"])
        batch = collate(sample_batch(before, tok, cfg, TRAIN_TASKS, generator))
        after, _ = frozen_logps(model, batch, cfg.temperature)          # (B, T)
        log_r = after - batch["logps"]
        n = batch["mask"].sum(dim=1)                                    # (B,)
        seen.append(torch.stack([n, log_r.sum(dim=1) / n, log_r.square().sum(dim=1) / n ** 2]))
        before.load_state_dict(model.state_dict())

    train_rl(model, tok, cfg, TRAIN_TASKS, on_step=on_step)
    n, log_s, apart = torch.cat(seen, dim=1).double().numpy()           # (episodes,) each
    rows = {}
    for shortest, longest in ((1, 7), (8, 10), (11, 13), (14, 17), (18, 99)):
        some = (shortest <= n) & (n <= longest)
        rows[f"{shortest} to {longest} tokens"] = {
            "mean log_s": mean(log_s[some]),
            "rms log_s": mean(log_s[some] ** 2) ** 0.5,
            "independent": mean(apart[some]) ** 0.5,
        }
    return rows


MEASUREMENTS = {
    "train_and_evaluate": train_and_evaluate,
    "base_agent_stats": base_agent_stats,
    "pass_at_k": pass_at_k,
    "gradient_noise": gradient_noise,
    "ratio_spread": ratio_spread,
}


# ==================================================================================================
# Part 3. Processes, files and the command line. Nothing here is about RL.
# ==================================================================================================

# ---- Jobs ----------------------------------------------------------------------------------------
# A job is a dict of plain values that describes a run completely. It goes to a worker process, and
# with the result into the file of --out.


def make_jobs(parser, grid_name, arms, seeds, given):
    """A job for each arm and seed. given has the fields of RLConfig from the command line."""
    grid = GRIDS[grid_name]
    default = {**vars(RLConfig()), "steps": grid.get("steps", 80), "eval_every": 0}
    jobs = []
    for arm in arms:
        changed = {**EXTRA, **grid["arms"][arm]}
        extra = {name: changed.pop(name) for name in EXTRA}
        # A flag may not contradict an arm. A field that an arm sets to its default value does not
        # count: presets name such fields too.
        for name, value in changed.items():
            if name in given and value != default[name]:
                parser.error(f"argument --{name}: the arm {arm!r} sets it to {value!r}")
        settings = {**default, **changed, **given}
        if not extra["train"]:
            settings["steps"] = 0
        for seed in seeds:
            jobs.append({
                "grid": grid_name,
                "arm": arm,
                "seed": seed,
                **extra,
                "measure": grid.get("measure", "train_and_evaluate"),
                "config": asdict(config_from(parser, {**settings, "seed": seed})),
            })
    return jobs


@cache
def versions():
    """A hash of the code (with its comments), and the versions of the packages."""
    modules = ("env", "agent", "grpo", "variants")
    # Of this file only what decides a result. A new column keeps old runs valid.
    functions = (training_names, watch, any_passed, rewards_differ, same_lengths)
    text = repr([ESTIMATORS, KS])
    for part in (*map(sys.modules.get, modules), *functions, *MEASUREMENTS.values()):
        text += inspect.getsource(part)
    return {
        "code": hashlib.sha256(text.encode()).hexdigest()[:12],
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def identity(record):
    """What identifies a run, as text. The names of the grid and of the arm do not matter."""
    record = {"versions": versions(), **record}         # a job has no versions: take ours
    return to_json([record.get(name) for name in ("versions", "measure", "config", *EXTRA)])


# ---- Finished runs in a file: one JSON object per line -------------------------------------------

START = '{"grid":'                                      # how each line begins


def to_json(record):
    """JSON has no nan and no inf, so null stands for them."""
    return re.sub("NaN|-?Infinity", "null", json.dumps(record))


def null_to_nan(entries):
    return {name: math.nan if x is None else x for name, x in entries.items()}


def parse_records(text, path):
    """The records in the text of a file. Lines cut off when a run was killed are skipped.

    Raises ValueError for a file of another kind.
    """
    records = []
    for line in text.split("\n"):
        if not START.startswith(line[:len(START)]):     # a line may be cut off within START
            raise ValueError(f"{path}: ablate.py did not write the line {line[:40]!r}")
        try:
            records.append(json.loads(line, object_hook=null_to_nan))
        except ValueError:
            continue
    return records


def read_runs(file):
    """The finished runs of a file opened with "a+": identity -> result."""
    file.seek(0)
    text = file.read()
    records = parse_records(text, file.name)
    if text and not text.endswith("\n"):                # the next run gets a line of its own
        file.write("\n")
    return {identity(record): record["result"] for record in records}


# ---- Processes -----------------------------------------------------------------------------------


def save_base(seed, base, path):
    """Makes a base agent and writes it to a file. Runs in a worker process."""
    tok = build_tokenizer()
    save_policy(make_base_agent(tok, seed, **base), tok, {}, path)


def run_job(job_and_path):
    """One run, from the base agent in a file. Runs in a worker process.

    Returns the job and its rows, or None if it failed, so that the other runs go on.
    """
    job, path = job_and_path
    tok = build_tokenizer()
    try:
        measure = MEASUREMENTS[job["measure"]]
        return job, measure(load_policy(tok, path), tok, RLConfig(**job["config"]), job)
    except Exception as error:
        print(f"\narm {job['arm']}, seed {job['seed']} failed: {error!r}", file=sys.stderr)
        return job, None


def run_jobs(jobs, processes, out=None):
    """Runs what the file out does not have, and appends it. Returns (arm, seed) -> rows."""
    known = read_runs(out) if out else {}
    todo = {identity(job): job for job in jobs if identity(job) not in known}
    context = multiprocessing.get_context("spawn")
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # workers inherit it: they ignore Ctrl-C
    pool = context.Pool(processes, torch.set_num_threads, (1,))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ctrl-C leaves this block. Then the pool is terminated first, and the folder is deleted.
    with tempfile.TemporaryDirectory() as folder, pool:
        bases, runs = {}, []                            # arms share the base agents
        for job in todo.values():
            base = to_json([job["seed"], job["base"]])
            path = os.path.join(folder, f"{hash(base)}.pt")
            bases[base] = job["seed"], job["base"], path
            runs.append((job, path))
        pool.starmap(save_base, bases.values(), chunksize=1)
        for number, (job, rows) in enumerate(pool.imap_unordered(run_job, runs), 1):
            print(f"\r{number} of {len(runs)} runs", end="", file=sys.stderr, flush=True)
            if rows is None:
                continue
            line = to_json({**job, "versions": versions(), "result": rows})
            known[identity(job)] = parse_records(line, "")[0]["result"]     # as from the file
            if out:
                print(line, file=out, flush=True)
    found = [job for job in jobs if identity(job) in known]
    return {(job["arm"], job["seed"]): known[identity(job)] for job in found}


# ---- Command line --------------------------------------------------------------------------------


def seed_list(text):
    """'5' -> [0, 1, 2, 3, 4], and '3,5,7' -> [3, 5, 7]."""
    numbers = [int(part) for part in text.split(",")]
    if len(numbers) == 1:
        numbers = list(range(numbers[0]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError("a number of seeds (5), or different seeds (0,3,7)")
    return numbers


def parse_args():
    """The arguments of the command line, and the jobs that they ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="ablate.py [-h] [GRID] [--FLAG X] ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("grid", nargs="?", default="arms", choices=GRIDS, metavar="GRID", help="see --list")
    flag("--list", action="store_true", help="list the grids and run nothing")
    flag("--seeds", type=seed_list, default="5", help="how many, or which: 0,3,7")
    flag("--arms", help="these arms only, separated by commas")
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))            # this process may use fewer
    # Windows allows no more than 61
    flag("--jobs", type=int, choices=range(1, 62), default=min(61, cores), metavar="N",
         help="processes")
    flag("--out", type=argparse.FileType("a+", encoding="utf-8", errors="replace"),
         help="keep finished runs here, and skip those that it has")
    flag("--all", action="store_true", help="show all differences")
    add_config_flags(parser)
    args = parser.parse_args()

    known_arms = GRIDS[args.grid]["arms"]
    arms = list(dict.fromkeys(args.arms.split(","))) if args.arms else list(known_arms)
    for arm in arms:
        if arm not in known_arms:
            parser.error(f"argument --arms: {arm!r} is not one of {', '.join(known_arms)}")
    given = {name: value for name, value in vars(args).items() if name in vars(RLConfig())}
    for name in ("seed", "eval_every", "eval_samples"):
        if name in given:
            parser.error(f"argument --{name}: it is not used here. See --seeds and the columns")
    return args, make_jobs(parser, args.grid, arms, args.seeds, given)


def main():
    args, jobs = parse_args()
    if args.list:
        for name, grid in GRIDS.items():
            size = f"{len(grid['arms']):3} arms of {grid.get('steps', 80):2} steps"
            print(f"{name:13}{size}  {grid['what']}")
        return
    grid = GRIDS[args.grid]
    columns = grid["columns"]
    print(f"grid {args.grid}: {grid['what']}")
    try:
        results = run_jobs(jobs, args.jobs, args.out)
    except KeyboardInterrupt:
        print("\nstopped. Finished runs are in the file of --out, if there is one", file=sys.stderr)
        sys.exit(130)

    table = table_of(results, columns)
    print_table(table, columns)
    # Not if the first arm has failed, or has several lines
    if (args.arms or grid.get("compare", True)) and jobs[0]["arm"] in table:
        print_differences(table, columns, args.all)
    if len(results) < len(jobs):
        sys.exit(f"{len(jobs) - len(results)} runs failed, and are missing above")


if __name__ == "__main__":
    main()
