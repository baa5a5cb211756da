"""GRPO for multi-turn agents: sample groups, score them against each other, take a clipped step, repeat.

Read env.py and agent.py first; then this file, top to bottom, is the algorithm. What PPO needs a critic for,
GRPO takes from a group of attempts at the same task: an attempt is good if it did better than its siblings
(DeepSeekMath, arXiv 2402.03300). The published variants are settings of the same loop; RLConfig lists the
settings, variants.py names the variants.

    python grpo.py                                     learns to read before it edits: 80 steps
    python grpo.py --variant dr_grpo                   a published variant
    python grpo.py --base plain --rename false --max_edits none         the gym with its shortcuts open
    python grpo.py --seed 3 --lr 5e-4 --log run.jsonl --save model.pt   every field of RLConfig is a flag
"""
import argparse
import copy
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Callable, Optional

import torch

from agent import (adam, build_tokenizer, collate, first_edit, load_policy, make_base_agent, make_rl_base,
                   rollout_batch, save_policy, token_logps)
from env import (HELDOUT_TASKS, TRAIN_TASKS, BugFixEnv, EditBudgetEnv, fail, one_line_parser,
                 open_for_writing, randomize_names)

# --------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------


@dataclass
class RLConfig:
    # how much is sampled, and how it is used
    steps: int = 80                     # iterations of sample, advantage, update
    prompts_per_step: int = 8           # distinct training tasks a step
    group_size: int = 8                 # attempts at each task: the group that is its own baseline
    minibatches: int = 2                # optimizer steps an epoch; from the second on, the clip has work
    epochs: int = 1                     # passes over the sampled episodes
    lr: float = 1e-3                    # Adam's; rises to this over the first WARMUP_STEPS steps
    max_grad_norm: float = 1.0          # the gradient is cut to this norm before each optimizer step
    temperature: float = 1.0            # divides the logits, in sampling and in training alike
    # advantage
    baseline: str = "group_mean"        # group_mean | leave_one_out | length_weighted
    scale: str = "group_std"            # group_std | none | batch_std | group_mean
    # policy loss
    ratio_level: str = "token"          # token | sequence | cispo | gmpo | sapo | dppo | none; their papers'
                                        # eps and agg differ too: take a preset of variants.py
    eps_low: float = 0.2                # clip range below; no effect with ratio_level sapo and none
    eps_high: float = 0.2               # clip range above; likewise
    agg: str = "token_mean"             # token_mean | seq_mean_token_mean | seq_mean_token_sum | constant;
                                        # no effect with ratio_level gmpo
    agg_constant: Optional[float] = None        # with agg constant, which needs it: tokens an episode
    # staying near a reference policy
    kl_coef: float = 0.0                # weight of the KL term, a mean over policy tokens whatever agg is;
                                        # 0: no reference is run but one given to train_rl, to be measured
    kl_kind: str = "k3"                 # k1 | k2 | k3; no effect with kl_coef 0
    # which episodes are used
    dynamic_sampling: bool = False      # keep groups whose rewards differ, sample more to fill the batch
    max_sample_rounds: int = 3          # with dynamic_sampling: at most so many rounds of prompts_per_step
    filter_zero_adv: bool = False       # drop groups whose rewards are all equal, sample no others
    overlong_buffer: int = 0            # so many last turns are penalised
    mask_truncated: bool = False        # leave episodes that ran out of turns out of the loss
    # the gym
    rename: bool = True                 # a random function name for each episode: the name tells nothing
    max_edits: Optional[int] = 1        # edits an episode can apply; none: as many as there are turns
    max_turns: int = 6                  # calls an episode can make
    reward: Optional[Callable] = None   # reward(env) -> float; none: 1 if the hidden tests pass, else 0
    # the run
    eval_every: int = 20                # steps between evaluations on eval_tasks; 0: never
    eval_samples: int = 4               # episodes a task in each of them
    seed: int = 0                       # decides the whole run


CHOICES = {
    "baseline": ("group_mean", "leave_one_out", "length_weighted"),
    "scale": ("group_std", "none", "batch_std", "group_mean"),
    "ratio_level": ("token", "sequence", "cispo", "gmpo", "sapo", "dppo", "none"),
    "agg": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"),
    "kl_kind": ("k1", "k2", "k3"),
}
LOWEST = {      # the least value of these numbers; the others have to be greater than 0
    "steps": 0, "prompts_per_step": 1, "group_size": 2, "minibatches": 1, "epochs": 1, "max_sample_rounds": 1,
    "overlong_buffer": 0, "max_edits": 0, "max_turns": 1, "eval_every": 0, "eval_samples": 1, "seed": 0,
    "eps_low": 0.0, "eps_high": 0.0, "kl_coef": 0.0,
}


def check_config(cfg, n_tasks=None):
    """ValueError on the first field that makes no sense: its name, its value, what is allowed."""
    for field in fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(CHOICES[name])}")
        if field.type is bool and not isinstance(value, bool):
            raise ValueError(f"{name}: {value!r} is neither true nor false")
        if name == "reward" and value is not None and not callable(value):
            raise ValueError(f"reward: {value!r} is not a function of an environment")
        if field.type in (int, Optional[int], float, Optional[float]):
            if value is None and field.type in (Optional[int], Optional[float]):
                continue
            kinds = int if field.type in (int, Optional[int]) else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{name}: {value!r} is not a {'whole' if kinds is int else 'finite'} number")
            if name in LOWEST and value < LOWEST[name]:
                raise ValueError(f"{name}: {value} is too small, it must be at least {LOWEST[name]}")
            if name not in LOWEST and value <= 0:
                raise ValueError(f"{name}: {value} must be greater than 0")
    limits = [("minibatches", cfg.prompts_per_step * cfg.group_size, "the episodes of a step"),
              ("overlong_buffer", cfg.max_turns, "max_turns"), ("seed", 2 ** 32 - 1, "a 32-bit number")]
    if n_tasks is not None:
        limits.append(("prompts_per_step", n_tasks, "the training tasks there are"))
    if cfg.ratio_level in ("token", "sequence", "cispo"):
        limits.append(("eps_low", 1, "a ratio's distance from 0"))
    for name, most, why in limits:
        if getattr(cfg, name) > most:
            raise ValueError(f"{name}: {getattr(cfg, name)} is too large, it must be at most {most} ({why})")
    if cfg.agg == "constant" and cfg.agg_constant is None:
        raise ValueError("agg_constant: agg constant needs one, a number of tokens greater than 0")
    if cfg.scale == "group_mean" and cfg.overlong_buffer:
        raise ValueError("overlong_buffer: must be 0 with scale group_mean: it needs rewards >= 0")
    if cfg.filter_zero_adv and cfg.dynamic_sampling:
        raise ValueError("filter_zero_adv: must be false with dynamic_sampling, which drops the same groups")


# --------------------------------------------------------------------------------------------------
# Sampling groups
# --------------------------------------------------------------------------------------------------

def make_env(task, cfg, rng):
    """One environment as cfg says. An env_factory has this signature: (task, cfg, random.Random) -> env."""
    if cfg.rename:
        task = randomize_names(task, rng)
    if cfg.max_edits is None:
        return BugFixEnv(task, cfg.max_turns)
    return EditBudgetEnv(task, cfg.max_edits, cfg.max_turns)


def step_generator(seed, step):
    """The torch.Generator of one step of one run. Not one stream for the whole run: so, arms of an experiment
    that use up different amounts of chance still draw the same tasks at the same step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def python_rng(generator):
    return random.Random(torch.randint(2 ** 62, (1,), generator=generator).item())


def sample_groups(model, tok, tasks, group_size, cfg, generator, env_factory=None):
    """group_size episodes of each task, in consecutive groups: the layout that group_advantages expects.

    Each episode gets its `reward`: cfg.reward(env), or 1.0 if the hidden tests passed and 0.0 if not.
    """
    rng = python_rng(generator)
    envs = [(env_factory or make_env)(task, cfg, rng) for task in tasks for _ in range(group_size)]
    episodes = rollout_batch(model, tok, envs, generator, cfg.temperature)
    for episode in episodes:
        episode["reward"] = reward_of(episode["env"], cfg.reward)
    return episodes


def reward_of(env, reward):
    name = "env.passed" if reward is None else getattr(reward, "__name__", type(reward).__name__)
    try:
        value = float(env.passed if reward is None else reward(env))
    except Exception as error:
        raise RuntimeError(f"reward function {name} failed on a {type(env).__name__}: {error!r}") from error
    if not math.isfinite(value):
        raise RuntimeError(f"reward function {name} returned {value} for a {type(env).__name__}")
    return value


def sample_step(model, tok, cfg, train_tasks, generator, env_factory=None):
    """The episodes of one step: (kept, sampled). What is trained on, and what it cost.

    Dynamic sampling (DAPO, arXiv 2503.14476) drops groups whose rewards, before any overlong penalty, are all
    equal: they say nothing about the task. It samples further tasks until prompts_per_step groups are kept or
    max_sample_rounds is reached, then trains on what it has. Without a cap, a policy that always passes would
    be sampled for ever.
    """
    rng, size = python_rng(generator), cfg.group_size
    order, kept, sampled = [], [], []
    for _ in range(cfg.max_sample_rounds if cfg.dynamic_sampling else 1):
        if len(order) < cfg.prompts_per_step:           # no task twice before all have had their turn
            order += rng.sample(train_tasks, len(train_tasks))
        tasks, order = order[:cfg.prompts_per_step], order[cfg.prompts_per_step:]
        episodes = sample_groups(model, tok, tasks, size, cfg, generator, env_factory)
        sampled += episodes
        for group in (episodes[i:i + size] for i in range(0, len(episodes), size)):
            if not (cfg.dynamic_sampling or cfg.filter_zero_adv) or not all_equal(group):
                kept += group
        if len(kept) >= cfg.prompts_per_step * size:
            break
    return kept[:cfg.prompts_per_step * size], sampled


def all_equal(group):
    return len({episode["reward"] for episode in group}) == 1


# --------------------------------------------------------------------------------------------------
# What the agent did
# --------------------------------------------------------------------------------------------------

def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def behavior_stats(episodes):
    """Means over episodes. A reward alone cannot tell an agent that reads from one that guesses well.

    pass_rate (hidden tests), reward, reads, tests, edits (applied), first_edit_right (of those that edit),
    read_first (share of all that read before their first edit), read_then_right (of those), turns,
    policy_tokens, truncated; turns, policy_tokens and reads also of passing and of failing episodes apart.
    nan where there is nothing to take a mean of.
    """
    rows = []
    for episode in episodes:
        env, first = episode["env"], first_edit(episode)
        rows.append({
            "pass_rate": float(getattr(env, "passed", False)), "reward": episode["reward"],
            "reads": episode["calls"].count(["read"]), "tests": episode["calls"].count(["test"]),
            "edits": len(getattr(env, "edits", [])), "turns": len(episode["calls"]),
            "policy_tokens": sum(episode["mask"]), "truncated": float(getattr(env, "truncated", False)),
            "first": first, "read_first": float(first is not None and first["read_before"])})
    stats = {name: mean(row[name] for row in rows) for name in rows[0] if name != "first"}
    stats["first_edit_right"] = mean(row["first"]["right"] for row in rows if row["first"])
    stats["read_then_right"] = mean(row["first"]["right"] for row in rows if row["read_first"])
    for name in ("turns", "policy_tokens", "reads"):
        stats[f"{name}_pass"] = mean(row[name] for row in rows if row["pass_rate"])
        stats[f"{name}_fail"] = mean(row[name] for row in rows if not row["pass_rate"])
    return stats


# --------------------------------------------------------------------------------------------------
# Advantages
# --------------------------------------------------------------------------------------------------

def group_advantages(rewards, group_size, baseline="group_mean", scale="group_std", lengths=None):
    """Advantage of each episode against its group: (reward - baseline) / scale.

    rewards (N,), consecutive groups of group_size; lengths (N,), policy tokens, for length_weighted -> (N,).

    baseline  group_mean       mean of the group                                  GRPO, arXiv 2402.03300
              leave_one_out    mean of the others: G / (G - 1) * (R - mean)       RLOO, arXiv 2402.14740
              length_weighted  sum(length * R) / sum(length)                      OPO, arXiv 2505.23585
    scale     group_std        the group's deviation                              GRPO
              none             1: hard and easy tasks weigh the same              Dr. GRPO, arXiv 2503.20783
              batch_std        the deviation of all N rewards                     Lite PPO, arXiv 2508.08221
              group_mean       the group's mean; rewards >= 0, 0 if it is 0       MaxRL, arXiv 2602.02710

    Deviations are unbiased (n - 1), plus 1e-6. ValueError for a group of one, which has no deviation.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size: {group_size} must be at least 2 and divide the {len(rewards)} rewards")
    R = rewards.view(-1, group_size)                                                    # (groups, G)
    group_mean = R.mean(dim=1, keepdim=True)                                            # (groups, 1)
    if baseline == "group_mean":
        A = R - group_mean
    elif baseline == "leave_one_out":
        A = R - (R.sum(dim=1, keepdim=True) - R) / (group_size - 1)
    elif baseline == "length_weighted":
        if lengths is None:
            raise ValueError("lengths: baseline length_weighted needs them")
        L = lengths.view(-1, group_size).to(R.dtype)
        A = R - (L * R).sum(dim=1, keepdim=True) / L.sum(dim=1, keepdim=True)
    else:
        raise ValueError(f"baseline: {baseline!r} is not one of group_mean, leave_one_out, length_weighted")
    if scale == "group_std":
        A = A / (R.std(dim=1, keepdim=True) + 1e-6)
    elif scale == "batch_std":
        A = A / (rewards.std() + 1e-6)
    elif scale == "group_mean":
        if bool((R < 0).any()):
            raise ValueError("scale: group_mean needs rewards of at least 0")
        A = torch.where(group_mean > 0, A / group_mean, torch.zeros_like(A))
    elif scale != "none":
        raise ValueError(f"scale: {scale!r} is not one of group_std, none, batch_std, group_mean")
    # Equal rewards have no better and no worse. Set to 0 on purpose: in float32 the mean of eight 0.1 is not
    # 0.1, and that rounding error over an equally small deviation can come out near 1.
    equal = R.amax(dim=1, keepdim=True) == R.amin(dim=1, keepdim=True)
    return torch.where(equal, torch.zeros_like(A), A).view(-1)


def overlong_penalty(turns, max_turns, buffer):
    """Soft overlong punishment (DAPO, arXiv 2503.14476), the length being turns: (N,) -> (N,) in [-1, 0].

    0 up to max_turns - buffer, then linear down to -1 at max_turns; never below. buffer 0: no penalty.
    """
    over = (turns - (max_turns - buffer)) / max(buffer, 1)
    return 0 - over.clamp(0, 1) if buffer else torch.zeros_like(over)


def compute_advantages(episodes, cfg):
    """Advantages (N,) of the episodes of whole groups; their rewards take the overlong penalty first."""
    rewards = torch.tensor([episode["reward"] for episode in episodes])
    lengths = torch.tensor([sum(episode["mask"]) for episode in episodes])
    turns = torch.tensor([float(len(episode["calls"])) for episode in episodes])
    rewards = rewards + overlong_penalty(turns, cfg.max_turns, cfg.overlong_buffer)
    return group_advantages(rewards, cfg.group_size, cfg.baseline, cfg.scale, lengths)


# --------------------------------------------------------------------------------------------------
# KL to a reference
# --------------------------------------------------------------------------------------------------

def kl_penalty(logp, ref_logp, kind):
    """Estimates of KL(pi || ref) from tokens that pi sampled: logp, ref_logp (B, T) -> (B, T).

    With l = log(ref / pi), never turned round (k3 would then estimate something else), and clamped, for exp:

        k1 = -l              unbiased; negative on some tokens and on some batches, which is no fault
        k2 = l^2 / 2         biased a little, never negative
        k3 = e^l - 1 - l     unbiased and never negative (Schulman's note on approximating KL; GRPO's)

    An estimator's value is one thing, its gradient as a loss another: k1's is zero in expectation (as a loss
    it moves nothing but noise; put it into the reward), k2's is that of the KL, k3's that of KL(ref || pi).
    """
    l = (ref_logp - logp).clamp(-20, 20)
    if kind == "k1":
        return -l
    if kind == "k2":
        return l ** 2 / 2
    if kind == "k3":
        return l.exp() - 1 - l
    raise ValueError(f"kl_kind: {kind!r} is not one of k1, k2, k3")


# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------
# Raising log pi of the tokens of episodes that did better than their group (A > 0) and lowering it for the
# others raises the expected reward: that is the policy gradient. The losses below are this, with brakes for
# when pi is no longer the pi_old that sampled.
#
# All are minimised. In every loss:  r = pi / pi_old of a token, its log clamped to +-20 before exp;  A = the
# episode's advantage, the same for all its tokens;  sg() = stop gradient. What stands outside the mask
# counts for nothing. The value of such a loss says little (on policy it is about 0, whatever there is to
# learn): what matters is its gradient, so it is the gradient's norm that is logged.
#
# Each function stands alone and can be copied alone. That is why the lines of aggregate_loss, and those of
# the statistics, come again at the end of each.


def aggregate_loss(per_token, mask, mode, constant=None):
    """One number from per-token losses (B, T) and mask (B, T), bool or float -> (). n_i: tokens of row i.

        token_mean           sum of all / sum_i n_i          every token of the batch weighs the same (DAPO)
        seq_mean_token_mean  mean over i of row sum / n_i    every episode does: a long one's tokens less
        seq_mean_token_sum   mean over i of row sum          every token weighs 1 / number of episodes
        constant             sum of all / (B * constant)     every token weighs that, fixed (Dr. GRPO)

    The batch is the optimizer's: an average of averages over parts of it would weigh tokens unequally. The
    seq_ modes average over rows that have a token. Never divide by T, the longest row: it changes with the
    batch. ValueError for another mode, or for constant without one.
    """
    m = mask.to(per_token.dtype)
    n = m.sum(dim=1, keepdim=True)                                                      # (B, 1)
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisors = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
                "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}
    if mode not in divisors or (mode == "constant" and constant is None):
        raise ValueError(f"agg: {mode!r} is not one of {', '.join(divisors)}, or is constant without one")
    return (per_token.masked_fill(m == 0, 0) / divisors[mode]).sum()


def ppo_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2,
                    agg="token_mean", constant=None):
    """PPO's clipped surrogate (arXiv 1707.06347) with GRPO's advantages (arXiv 2402.03300):

        -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)

    The smaller of the two, whatever the sign of A: a token is clipped, and loses its gradient, only where r
    has already gone too far in the direction that A pushes. With one optimizer step a batch r is 1 and no
    token is ever clipped; from the second minibatch on the clip has work.

    logp, old_logp, mask (B, T), adv (B,) -> (loss (), stats): clip_frac, the share of tokens that are
    clipped, ratio_min, ratio_max.
    """
    m, A = mask.to(logp.dtype), adv[:, None]                                            # (B, T), (B, 1)
    r = (logp - old_logp).masked_fill(m == 0, 0).clamp(-20, 20).exp()                   # (B, T)
    free, held = r * A, r.clamp(1 - eps_low, 1 + eps_high) * A
    per_token, clipped = -torch.minimum(free, held), free > held
    n = m.sum(dim=1, keepdim=True)                      # to the loss: aggregate_loss; then the statistics
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisor = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
               "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}[agg]
    loss = (per_token.masked_fill(m == 0, 0) / divisor).sum()
    r = r.detach()
    return loss, {"clip_frac": (clipped * m).sum() / m.sum().clamp(min=1),
                  "ratio_min": r.masked_fill(m == 0, float("inf")).min(),
                  "ratio_max": r.masked_fill(m == 0, 0).max()}


def gspo_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2, agg="seq_mean_token_mean",
                     constant=None):
    """GSPO (arXiv 2507.18071): one ratio, one clip, one weight to an episode, s_i = exp(mean_t log r_it):

        -min(s_i A, clip(s_i, 1 - eps_low, 1 + eps_high) A)       for every token of episode i

    The mean of the log-ratios, not their sum: a product of ratios would leave any band as it gets longer. s
    moves much less than r, so the paper's band reaches 3e-4 to each side, for outputs of thousands of tokens;
    at 0.2 it never clips. Averages over episodes; with agg seq_mean_token_sum each weighs by its length, and
    it is LUSPO (arXiv 2602.05261). Shapes as in ppo_policy_loss; clip_frac and the ratio's range are of s.
    """
    m, A = mask.to(logp.dtype), adv[:, None]
    log_r = (logp - old_logp).masked_fill(m == 0, 0)
    n = m.sum(dim=1, keepdim=True)                                                      # (B, 1)
    s = (log_r.sum(dim=1, keepdim=True) / n.clamp(min=1)).clamp(-20, 20).exp()          # (B, 1)
    free, held = s * A, s.clamp(1 - eps_low, 1 + eps_high) * A
    per_token = -torch.minimum(free, held).expand_as(logp)
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisor = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
               "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}[agg]
    loss = (per_token.masked_fill(m == 0, 0) / divisor).sum()
    s = s.detach()
    return loss, {"clip_frac": ((free > held) & (n > 0)).to(m.dtype).sum() / rows,
                  "ratio_min": s.masked_fill(n == 0, float("inf")).min(),
                  "ratio_max": s.masked_fill(n == 0, 0).max()}


def cispo_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2, agg="token_mean",
                      constant=None):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped, the token's gradient is not:

        -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi

    Exactly the tokens that PPO's clip silences keep a gradient here. The paper trains with no lower bound,
    which is eps_low = 1. Shapes as in ppo_policy_loss; clip_frac: tokens out of the band where A pushes.
    """
    m, A = mask.to(logp.dtype), adv[:, None]                                            # (B, T), (B, 1)
    r = (logp - old_logp).masked_fill(m == 0, 0).clamp(-20, 20).exp()                   # (B, T)
    weight = r.detach().clamp(1 - eps_low, 1 + eps_high)
    per_token, clipped = -weight * A * logp, r * A > weight * A
    n = m.sum(dim=1, keepdim=True)                      # to the loss: aggregate_loss; then the statistics
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisor = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
               "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}[agg]
    loss = (per_token.masked_fill(m == 0, 0) / divisor).sum()
    r = r.detach()
    return loss, {"clip_frac": (clipped * m).sum() / m.sum().clamp(min=1),
                  "ratio_min": r.masked_fill(m == 0, float("inf")).min(),
                  "ratio_max": r.masked_fill(m == 0, 0).max()}


def gmpo_policy_loss(logp, old_logp, adv, mask, eps_low=0.4, eps_high=0.4, agg="seq_mean_token_mean",
                     constant=None):
    """GMPO (arXiv 2507.20673): the geometric mean of an episode's ratios, each clipped, not the arithmetic:

        m_it = sign(A) min(sign(A) log r, sign(A) clip(log r, -eps_low, eps_high))
        loss = -mean_i A_i exp(mean_t m_it)

    The bounds are on log r. Always a mean over episodes with a token: agg and constant are there for the
    common signature and do nothing. Shapes as in ppo_policy_loss.
    """
    m, A = mask.to(logp.dtype), adv[:, None]
    log_r = (logp - old_logp).masked_fill(m == 0, 0).clamp(-20, 20)                     # (B, T)
    free, held = A.sign() * log_r, A.sign() * log_r.clamp(-eps_low, eps_high)
    n = m.sum(dim=1, keepdim=True)                                                      # (B, 1)
    geometric = ((A.sign() * torch.minimum(free, held)).sum(dim=1, keepdim=True) / n.clamp(min=1)).exp()
    loss = -((A * geometric).masked_fill(n == 0, 0)).sum() / (n > 0).to(m.dtype).sum().clamp(min=1)
    r = log_r.exp().detach()
    return loss, {"clip_frac": ((free > held) * m).sum() / m.sum().clamp(min=1),
                  "ratio_min": r.masked_fill(m == 0, float("inf")).min(),
                  "ratio_max": r.masked_fill(m == 0, 0).max()}


def sapo_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2,
                     agg="seq_mean_token_mean", constant=None, tau_pos=1.0, tau_neg=1.05):
    """SAPO (arXiv 2511.20347): a soft gate, not a clip; the gradient fades as r leaves 1, and never ends:

        -(4 / tau) sigmoid(tau (r - 1)) A          tau = tau_pos where A > 0, else tau_neg (a little harder)

    Shapes as in ppo_policy_loss. eps_low and eps_high are there for the common signature and do nothing;
    clip_frac is 0.
    """
    m, A = mask.to(logp.dtype), adv[:, None]                                            # (B, T), (B, 1)
    r = (logp - old_logp).masked_fill(m == 0, 0).clamp(-20, 20).exp()                   # (B, T)
    tau = torch.where(A > 0, torch.full_like(A, tau_pos), torch.full_like(A, tau_neg))
    per_token, clipped = -4 / tau * torch.sigmoid(tau * (r - 1)) * A, torch.zeros_like(m)
    n = m.sum(dim=1, keepdim=True)                      # to the loss: aggregate_loss; then the statistics
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisor = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
               "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}[agg]
    loss = (per_token.masked_fill(m == 0, 0) / divisor).sum()
    r = r.detach()
    return loss, {"clip_frac": (clipped * m).sum() / m.sum().clamp(min=1),
                  "ratio_min": r.masked_fill(m == 0, float("inf")).min(),
                  "ratio_max": r.masked_fill(m == 0, 0).max()}


def dppo_policy_loss(logp, old_logp, adv, mask, eps_low=0.15, eps_high=0.15, agg="token_mean",
                     constant=None):
    """DPPO (arXiv 2602.04879): a trust region in probabilities, not in ratios (the total-variation form):

        -sg(min(r, 20)) A log pi     where A > 0 and pi - pi_old <= eps_high,
                                     or A <= 0 and pi - pi_old >= -eps_low;  else 0

    A rare token may double and double again, a likely one may not move by more than eps. What is left out
    has no gradient and still counts as a token. Shapes as in ppo_policy_loss; clip_frac: tokens left out.
    """
    m, A = mask.to(logp.dtype), adv[:, None]                                            # (B, T), (B, 1)
    r = (logp - old_logp).masked_fill(m == 0, 0).clamp(-20, 20).exp()                   # (B, T)
    moved = (logp.exp() - old_logp.exp()).detach()
    clipped = torch.where(A > 0, moved > eps_high, moved < -eps_low)
    per_token = -r.detach().clamp(max=20) * A * logp * ~clipped
    n = m.sum(dim=1, keepdim=True)                      # to the loss: aggregate_loss; then the statistics
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisor = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
               "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}[agg]
    loss = (per_token.masked_fill(m == 0, 0) / divisor).sum()
    r = r.detach()
    return loss, {"clip_frac": (clipped * m).sum() / m.sum().clamp(min=1),
                  "ratio_min": r.masked_fill(m == 0, float("inf")).min(),
                  "ratio_max": r.masked_fill(m == 0, 0).max()}


def pg_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2, agg="token_mean",
                   constant=None):
    """The plain policy gradient, no ratio and no clip: -A log pi (REINFORCE; GPG, arXiv 2504.02546).

    Shapes as in ppo_policy_loss. eps_low and eps_high are there for the common signature and do nothing; the
    ratio is reported and not used; clip_frac is 0.
    """
    m, A = mask.to(logp.dtype), adv[:, None]                                            # (B, T), (B, 1)
    r = (logp - old_logp).masked_fill(m == 0, 0).clamp(-20, 20).exp()                   # (B, T)
    per_token, clipped = -A * logp, torch.zeros_like(m)
    n = m.sum(dim=1, keepdim=True)                      # to the loss: aggregate_loss; then the statistics
    rows = (n > 0).to(m.dtype).sum().clamp(min=1)
    divisor = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
               "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}[agg]
    loss = (per_token.masked_fill(m == 0, 0) / divisor).sum()
    r = r.detach()
    return loss, {"clip_frac": (clipped * m).sum() / m.sum().clamp(min=1),
                  "ratio_min": r.masked_fill(m == 0, float("inf")).min(),
                  "ratio_max": r.masked_fill(m == 0, 0).max()}


POLICY_LOSSES = {"token": ppo_policy_loss, "sequence": gspo_policy_loss, "cispo": cispo_policy_loss,
                 "gmpo": gmpo_policy_loss, "sapo": sapo_policy_loss, "dppo": dppo_policy_loss,
                 "none": pg_policy_loss}


def policy_loss(logp, old_logp, adv, mask, cfg):
    """The loss that cfg.ratio_level names, with cfg's clip range and aggregation."""
    loss = POLICY_LOSSES[cfg.ratio_level]
    return loss(logp, old_logp, adv, mask, cfg.eps_low, cfg.eps_high, cfg.agg, cfg.agg_constant)


# --------------------------------------------------------------------------------------------------
# The update
# --------------------------------------------------------------------------------------------------

def take(batch, rows):
    """Some rows of a batch, in this order."""
    return {name: tensor[rows] for name, tensor in batch.items()}


def logps_and_entropies(model, batch, idle, temperature):
    """token_logps with_entropy, (B, T) each, without a gradient for the rows that are idle, (B,) bool."""
    parts, order = [], torch.cat([(~idle).nonzero(), idle.nonzero()])[:, 0]
    for rows in order.split([int((~idle).sum()), int(idle.sum())]):
        if len(rows):
            with torch.set_grad_enabled(not idle[rows[0]]):
                parts.append(token_logps(model, take(batch, rows), temperature, with_entropy=True))
    logps, entropies = (torch.cat(part)[order.argsort()] for part in zip(*parts))
    return logps, entropies


UPDATE_STATS = ("clip_frac", "approx_kl", "ratio_min", "ratio_max", "entropy", "grad_norm", "kl_ref")


def rl_update(model, optimizer_step, episodes, cfg, generator, ref_model=None):
    """cfg.epochs passes over the episodes, each in cfg.minibatches optimizer steps at most; changes model.

    optimizer_step(): moves the weights down their gradients; agent.adam's with its lr, or the step of a torch
    optimizer. Gives a dict: UPDATE_STATS over the minibatches (nan if there were none) and sec_old, the
    seconds for log-probabilities of pi_old and of the reference. FloatingPointError before a step whose loss
    or gradient is not finite: the weights stay the last good ones.
    """
    if not episodes:                            # dynamic sampling or filtering left nothing
        return {**dict.fromkeys(UPDATE_STATS, math.nan), "sec_old": 0.0}
    batch, advantages = collate(episodes), compute_advantages(episodes, cfg)
    if cfg.mask_truncated:                      # overlong filtering (DAPO): in the baseline, not in the loss
        batch["mask"] &= ~torch.tensor([episode["env"].truncated for episode in episodes])[:, None]
    epochs = [torch.randperm(len(episodes), generator=generator).chunk(cfg.minibatches)
              for _ in range(cfg.epochs)]
    # pi_old: computed by the trainer's own function, not taken from the sampler, so that r begins at 1. For
    # the first minibatch it is filled in when its turn comes (number 0): the policy is still the old one.
    started = time.perf_counter()
    old_logp = model.words.weight.new_zeros(batch["ids"].shape)                         # (N, T)
    with torch.no_grad():
        for rows in epochs[0][1:]:
            old_logp[rows] = token_logps(model, take(batch, rows), cfg.temperature)
        if ref_model is not None:
            batch["ref_logp"] = token_logps(ref_model, batch, cfg.temperature)
    sec_old, steps = time.perf_counter() - started, []
    for number, rows in enumerate(rows for minibatches in epochs for rows in minibatches):
        part, adv = take(batch, rows), advantages[rows]
        mask = part["mask"]
        if not mask.any():                      # all truncated and masked: no token, no mean, no step
            continue
        # A is a factor of every policy loss: where it is 0, or there is no token, there is no gradient and no
        # need to run backwards; unless the KL term pulls (or an entropy bonus would, were there one)
        idle = (adv == 0) | ~mask.any(dim=1)                                            # (B,)
        if ref_model is not None and cfg.kl_coef > 0:
            idle = torch.zeros_like(idle)
        logp, entropy = logps_and_entropies(model, part, idle, cfg.temperature)         # (B, T)
        if number == 0:
            old_logp[rows] = logp.detach()
        loss, stats = policy_loss(logp, old_logp[rows], adv, mask, cfg)
        # KL(pi_old || pi), since it is pi_old that sampled the tokens
        stats["approx_kl"] = kl_penalty(old_logp[rows], logp.detach(), "k3")[mask].mean()
        if ref_model is not None:
            kl = kl_penalty(logp, part["ref_logp"], cfg.kl_kind)[mask].mean()
            loss, stats["kl_ref"] = loss + cfg.kl_coef * kl, kl.detach()
        model.zero_grad()
        if not idle.all():
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise FloatingPointError(f"loss {loss.item()}, gradient norm {norm.item()}, largest ratio "
                                     f"{stats['ratio_max'].item():.3g}")
        if not idle.all():                      # else there is nothing but Adam's momentum to follow
            optimizer_step()
        stats.update(entropy=entropy[mask].mean(), grad_norm=norm)
        steps.append({name: value.item() for name, value in stats.items()})
    combine = {"ratio_min": min, "ratio_max": max}
    columns = {name: [stats[name] for stats in steps if name in stats] or [math.nan] for name in UPDATE_STATS}
    return {**{name: combine.get(name, mean)(column) for name, column in columns.items()}, "sec_old": sec_old}


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------
# Adam's first steps have full size in every weight, however small the gradient; without a gentle start they
# break one base agent in six or so, which then runs out of turns and finds nothing to learn from.
WARMUP_STEPS = 6


def train_rl(model, tok, cfg, train_tasks, eval_tasks=None, ref_model=None, env_factory=None, on_step=None):
    """Trains model in place. Gives the history, a dict for each step: behavior_stats of all that was sampled,
    rl_update's statistics, and

        episodes, tokens    what was sampled, kept or not; the environment's tokens too
        tokens_trained      tokens of the episodes that were kept
        zero_adv_frac       share of the sampled groups whose rewards, before a penalty, were all equal
        eval_pass_rate      on eval_tasks, every eval_every steps and after the last; else nan
        sec_sample, sec_update

    ref_model: what the KL term pulls to; if kl_coef > 0 and none is given, a frozen copy of the starting
    model. on_step(row) is called after each step and ends the training by returning True. ValueError for a
    cfg that makes no sense; FloatingPointError, the model being the last good one, where numbers end.
    """
    check_config(cfg, len(train_tasks))
    if cfg.kl_coef > 0 and ref_model is None:
        ref_model = copy.deepcopy(model).requires_grad_(False)
    adam_step = adam(list(model.parameters()))
    history, good = [], copy.deepcopy(model.state_dict())
    for step in range(cfg.steps):
        generator = step_generator(cfg.seed, step)
        lr = cfg.lr * min(1, (step + 1) / WARMUP_STEPS)
        started = time.perf_counter()
        try:
            kept, sampled = sample_step(model, tok, cfg, train_tasks, generator, env_factory)
            sampled_at, good = time.perf_counter(), copy.deepcopy(model.state_dict())
            update = rl_update(model, partial(adam_step, lr), kept, cfg, generator, ref_model)
            updated_at, pass_rate = time.perf_counter(), math.nan
            if eval_tasks and cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps - 1):
                evaluation = evaluate(model, tok, eval_tasks, cfg.eval_samples, cfg, env_factory)
                pass_rate = evaluation["pass_rate"]
            elif step == cfg.steps - 1:
                check_policy(model, sampled[:1], cfg)
        except FloatingPointError as error:             # back to the last weights that could be sampled from
            model.load_state_dict(good)
            raise FloatingPointError(f"step {step}: {error}; learning rate {cfg.lr}") from None
        groups = [sampled[i:i + cfg.group_size] for i in range(0, len(sampled), cfg.group_size)]
        row = {"step": step, **behavior_stats(sampled), "episodes": len(sampled),
               "tokens": sum(len(episode["ids"]) for episode in sampled),
               "tokens_trained": sum(len(episode["ids"]) for episode in kept),
               "zero_adv_frac": mean(all_equal(group) for group in groups), **update,
               "eval_pass_rate": pass_rate, "sec_sample": sampled_at - started,
               "sec_update": updated_at - sampled_at}
        history.append(row)
        if on_step and on_step(row):
            break
    return history


@torch.no_grad()
def check_policy(model, episodes, cfg):
    """FloatingPointError if the weights are such that nothing can be sampled any more."""
    if token_logps(model, collate(episodes), cfg.temperature).isnan().any():
        raise FloatingPointError("the policy's probabilities are nan")


def evaluate(model, tok, tasks, n_samples, cfg, env_factory=None, keep=None):
    """behavior_stats over n_samples episodes a task, sampled at cfg.temperature in the gym of cfg.

    The same cfg.seed gives the same stream of chance, whatever was trained before. keep: a list that gets
    the episodes.
    """
    episodes = sample_groups(model, tok, tasks, n_samples, cfg, step_generator(cfg.seed, -1), env_factory)
    if keep is not None:
        keep += episodes
    return behavior_stats(episodes)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

def add_config_flags(parser):
    """A flag for each field of RLConfig but the callable; one that is not given leaves no trace."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a name"}

    def reader(field):
        kinds = getattr(field.type, "__args__", (field.type,))                  # Optional[int]: int, NoneType
        kind, optional = kinds[0], len(kinds) > 1

        def read(text):
            try:
                if optional and text.lower() == "none":
                    return None
                return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
            except (KeyError, ValueError):
                wanted = names[kind] + (" or none" if optional else "")
                raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        return read

    group = parser.add_argument_group("fields of RLConfig, each explained where the class is")
    for field in fields(RLConfig):
        if field.name != "reward":
            group.add_argument(f"--{field.name}", type=reader(field), default=argparse.SUPPRESS, metavar="X",
                               help=f"default {field.default}")


def given_fields(args):
    """The RLConfig fields that were given as flags, as a dict."""
    return {field.name: getattr(args, field.name) for field in fields(RLConfig) if hasattr(args, field.name)}


def usable_config(preset, given):
    """RLConfig of a preset's fields overridden by the given ones; exit status 2 if it makes no sense."""
    cfg = RLConfig(**{**preset, **given})
    try:
        check_config(cfg, len(TRAIN_TASKS))
    except ValueError as error:
        fail(f"--{error}")
    return cfg


COLUMNS = {     # heading of the progress table -> column of the history, width, decimals
    "step": ("step", 4, 0), "reward": ("reward", 7, 2), "reads": ("reads", 6, 2),
    "first ok": ("first_edit_right", 9, 2), "tokens": ("policy_tokens", 7, 1), "entropy": ("entropy", 8, 2),
    "clip": ("clip_frac", 6, 3), "grad": ("grad_norm", 6, 2), "zero adv": ("zero_adv_frac", 9, 2),
    "held-out": ("eval_pass_rate", 9, 2)}


def cell(value, width, decimals):
    return f"{'-':>{width}}" if math.isnan(value) else f"{value:{width}.{decimals}f}"


def print_outcome(before, after, episodes):
    """The final table, the base agent above the trained one; then what held-out episodes look like."""
    columns = ("pass_rate", "read_first", "first_edit_right", "reads", "tests", "edits", "turns",
               "policy_tokens", "truncated")
    print(f"\n{'':24}" + "".join(f"{name.replace('_', ' '):>{len(name) + 2}}" for name in columns))
    for name, stats in [*before.items(), *after.items()]:
        print(f"{name:24}" + "".join(cell(stats[column], len(column) + 2, 2) for column in columns))
    shapes = Counter(", ".join("edit OP" if call[:1] == ["edit"] else " ".join(call) for call in e["calls"])
                     for e in episodes)
    print(f"\nthe most common of the {len(episodes)} held-out episodes after training")
    for shape, count in shapes.most_common(5):
        print(f"{count:5}  {shape}")


def main():
    parser = one_line_parser(__doc__)
    add_config_flags(parser)
    parser.add_argument("--variant", metavar="NAME", help="a preset of variants.py; other flags override it")
    parser.add_argument("--base", choices=("rl", "plain"), help="the starting policy (default rl)")
    parser.add_argument("--init", metavar="FILE", help="start from a model that --save wrote")
    parser.add_argument("--save", metavar="FILE", help="write the trained model")
    parser.add_argument("--log", metavar="FILE", help="write configuration and history, a JSON object a line")
    parser.add_argument("--threads", type=int, default=1, metavar="N",
                        help="torch threads (default 1; two are faster on an idle machine only)")
    parser.add_argument("--quiet", action="store_true", help="print the final tables only")
    parser.add_argument("--bench", action="store_true", help="measure the speed of training instead")
    args = parser.parse_args()
    preset = {}
    if args.variant is not None:
        from variants import VARIANTS, describe         # here: at the top of the file it would be a circle
        if args.variant not in VARIANTS:
            fail(f"--variant: unknown variant {args.variant!r}; known: {', '.join(VARIANTS)}")
        preset = VARIANTS[args.variant]
    cfg = usable_config(preset, given_fields(args))
    if args.init and args.base:
        fail("--base: cannot be given with --init, which is a starting policy too")
    if not 1 <= args.threads <= 64:
        fail(f"--threads: {args.threads} must be from 1 to 64")
    torch.set_num_threads(args.threads)
    tok, model = build_tokenizer(), None
    if args.init:
        try:
            model = load_policy(tok, args.init)
        except OSError as error:
            fail(f"--init {args.init}: cannot be read: {error.strerror}")
        except ValueError as error:
            fail(f"--init {args.init}: {error}")
    if args.save:                                       # it can be written: better known now than at the end
        existed = os.path.exists(args.save)
        open_for_writing("--save", args.save, "a").close()
        if not existed:
            os.remove(args.save)
    log = open_for_writing("--log", args.log, "w") if args.log else None
    if args.variant is not None and not args.quiet:
        print(describe(args.variant, given_fields(args)))
    sys.exit(run(args, cfg, tok, model, log))


def run(args, cfg, tok, model, log):
    """Base agent, training, evaluation and tables, as the command line says. Gives the exit status."""
    started, rows, status, interrupted = time.perf_counter(), [], 0, []

    def say(text):
        if not args.quiet:
            print(text, flush=True)

    def write(line):
        nonlocal log, status
        try:
            if log:
                print(json.dumps(line), file=log, flush=True)
        except OSError as error:
            print(f"grpo.py: --log {args.log}: {error.strerror}; it keeps what it has", file=sys.stderr)
            log, status = None, 1

    def on_step(row):
        rows.append(row)
        write({name: None if math.isnan(value) else value for name, value in row.items()})
        if row["step"] % 5 == 0 or row["step"] == cfg.steps - 1 or interrupted:
            say("".join(cell(row[name], width, digits) for name, width, digits in COLUMNS.values())
                + f"{time.perf_counter() - started:9.1f}")
        return bool(interrupted)

    def on_interrupt(*_):           # the step is finished first, the model is whole; a second ends at once
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if model is None:
        say(f"base agent ({args.base or 'rl'}), by imitation:")
        model = (make_base_agent if args.base == "plain" else make_rl_base)(tok, cfg.seed, quiet=args.quiet)
    if args.bench:
        bench(model, tok, cfg)
        return 0
    sets = {"training tasks": TRAIN_TASKS, "held-out tasks": HELDOUT_TASKS}
    before = {f"before, {name}": evaluate(model, tok, tasks, 16, cfg) for name, tasks in sets.items()}
    write({"config": asdict(replace(cfg, reward=None)), "variant": args.variant, "torch": torch.__version__,
           "base": args.init or args.base or "rl", "threads": args.threads})
    say(f"\n{cfg.steps} steps of {cfg.prompts_per_step} tasks x {cfg.group_size} attempts, seed {cfg.seed}:")
    say("".join(f"{name:>{width}}" for name, (_, width, _) in COLUMNS.items()) + f"{'seconds':>9}")
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        train_rl(model, tok, cfg, TRAIN_TASKS, HELDOUT_TASKS, on_step=on_step)
    except FloatingPointError as error:
        print(f"grpo.py: stopped at {error}; the model is the last good one", file=sys.stderr)
        status = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.save:
        try:
            save_policy(model, tok, asdict(replace(cfg, reward=None)), args.save)
        except (OSError, RuntimeError) as error:
            print(f"grpo.py: --save {args.save}: not written: {str(error).splitlines()[0]}", file=sys.stderr)
            status = 1
    if interrupted:
        last = f": reward {rows[-1]['reward']:.2f}, reads {rows[-1]['reads']:.2f}" if rows else ""
        written = [f"{flag} {path}" for flag, path in (("--log", args.log), ("--save", args.save)) if path]
        print(f"stopped after {len(rows)} of {cfg.steps} steps{last}"
              + (f"; written: {', '.join(written)}" if written else ""))
        return 130
    episodes = []
    after = {"after, training tasks": evaluate(model, tok, TRAIN_TASKS, 16, cfg),
             "after, held-out tasks": evaluate(model, tok, HELDOUT_TASKS, 16, cfg, keep=episodes)}
    print_outcome(before, after, episodes)
    say(f"\n{time.perf_counter() - started:.1f} seconds in all, torch threads: {args.threads}")
    return status


def matrix_rate():
    """Floating-point operations a second of a 1024 x 1024 float32 product, the best of twenty."""
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), math.inf
    for _ in range(20):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * 1024 ** 3 / best


def bench(model, tok, cfg):
    """Trains without evaluation and prints where the time goes and how near to the machine's limit that is.

    Useful work: 2 operations for each parameter and token forwards, 4 backwards. A token is sampled (2), gets
    an old log-probability (2) and is trained on (6); padding is not counted.
    """
    rate, started = matrix_rate(), time.perf_counter()
    history = train_rl(model, tok, replace(cfg, eval_every=0), TRAIN_TASKS)
    seconds = time.perf_counter() - started
    rate = max(rate, matrix_rate())

    def total(column):
        return sum(row[column] for row in history)
    phases = {"sampling": total("sec_sample"), "old log-probs": total("sec_old"),
              "update": total("sec_update") - total("sec_old")}
    phases["the rest"] = seconds - sum(phases.values())
    print(f"\n{cfg.steps} steps in {seconds:.2f} s, torch threads: {torch.get_num_threads()}")
    for name, part in phases.items():
        print(f"  {name:14}{part:7.2f} s{part / seconds:7.1%}")
    policy_tokens = sum(row["episodes"] * row["policy_tokens"] for row in history)
    print(f"  a second: {total('episodes') / seconds:.0f} episodes, {policy_tokens / seconds:.0f} policy "
          f"tokens, {total('tokens') / seconds:.0f} tokens")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    work = parameters * (2 * total("tokens") + (2 + 6 * cfg.epochs) * total("tokens_trained")) / seconds
    print(f"  useful work {work / 1e9:.1f} GFLOP/s, {work / rate:.2f} of a matrix product's {rate / 1e9:.0f}")
    try:
        import resource
        unit = 2 ** 20 if sys.platform == "darwin" else 2 ** 10
        print(f"  peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.0f} MB")
    except ImportError:
        print("  peak memory: this system does not say")


if __name__ == "__main__":
    main()
