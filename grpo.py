"""GRPO for multi-turn agents: the settings, the advantages, the loss and the whole training loop.

Read env.py and agent.py first. This is all that train_rl, the loop, does:

    for each step:
        draw 8 tasks and let the policy attempt each of them 8 times: 8 groups of 8 attempts
        reward of an attempt = 1 if the hidden tests passed, else 0
        advantage = (reward - mean of its group) / standard deviation of its group
        pi_old = the probabilities of the sampled tokens under the present policy
        for each of 2 minibatches, 32 of the 64 attempts each:
            ratio = pi / pi_old for each sampled token, pi being the policy now
            loss = mean over tokens of -min(ratio * advantage, clip(ratio, 0.8, 1.2) * advantage)
            one Adam step down the gradient of the loss

A group of four attempts with rewards 1, 0, 0, 0 has mean 0.25 and standard deviation 0.5. The advantages are
1.5, -0.5, -0.5, -0.5, so the tokens of the first attempt become likelier and those of the others less likely.
PPO, the algorithm before GRPO, needs a second network, the critic, to know which reward to expect. GRPO
(DeepSeekMath, arXiv 2402.03300) uses the group's mean. Its variants change a few fields of RLConfig.

    python grpo.py                                      80 steps, after which the agent reads before it edits
    python grpo.py --variant dr_grpo                    train with a published variant
    python grpo.py --show 20                            every 20 steps, see what an update did to one group
    python grpo.py --seed 3 --lr 5e-4 --log run.jsonl   every field of RLConfig is a flag
"""
import argparse
import copy
import json
import math
import numbers
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from typing import Callable, Optional

if __name__ == "__main__":      # Ctrl-C ends the script quietly during the slow imports, too
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from agent import (behavior_stats, build_tokenizer, collate, decode, load_policy, make_base_agent,
                   make_rl_base, mean, refuse_same_file, rollout_batch, save_policy, token_logps)
from env import (FIX_OP, HELDOUT_TASKS, TRAIN_TASKS, BugFixEnv, EditBudgetEnv, calls_text, randomize_names,
                 transcript)
from variants import POLICY_LOSSES, VARIANTS, translate

# The letters: N episodes of a step, B of them in a minibatch, T tokens in the longest, n sampled tokens of an
# episode, G attempts in a group, A advantage, r ratio pi / pi_old of a token.

@dataclass
class RLConfig:
    # how much is sampled, and how often it is used
    steps: int = 80                     # iterations of sample, score, update
    prompts_per_step: int = 8           # different training tasks in a step
    group_size: int = 8                 # attempts at each task, G
    minibatches: int = 2                # parts of a step's episodes, with one optimizer step for each
    epochs: int = 1                     # passes over a step's episodes
    lr: float = 1e-3                    # Adam's learning rate
    warmup_steps: int = 6               # lr rises over this many updating steps, as Adam's first are big
    max_grad_norm: float = 1.0          # gradients longer than this are shortened to it (inf: never)
    temperature: float = 1.0            # divides the logits, in sampling and in training
    # advantages
    baseline: str = "group_mean"        # group_mean | leave_one_out | length_weighted
    scale: str = "group_std"            # group_std | none | batch_std | group_mean
    # policy loss
    ratio_level: str = "token"          # token | sequence | cispo | gmpo | sapo | dppo | none (variants.py)
    eps_low: float = 0.2                # ratios are clipped below 1 - eps_low
    eps_high: float = 0.2               # and above 1 + eps_high. sapo and none do not clip
    agg: str = "token_mean"             # token_mean | seq_mean_token_mean | seq_mean_token_sum | constant
    agg_constant: Optional[float] = None    # the divisor of agg constant, in tokens per episode
    # staying close to a reference policy
    kl_coef: float = 0.0                # weight of the KL term (0: there is none)
    kl_kind: str = "k3"                 # k1 | k2 | k3, its estimator
    # which episodes are used
    dynamic_sampling: bool = False      # replace groups whose rewards are all equal by sampling more tasks
    max_sample_rounds: int = 3          # dynamic sampling: at most this many rounds of prompts_per_step tasks
    filter_zero_adv: bool = False       # drop groups whose rewards are all equal, and replace nothing
    overlong_buffer: int = 0            # penalise episodes that reach the last N turns (0: no penalty)
    mask_truncated: bool = False        # leave episodes that ran out of turns out of the loss
    # the gym
    rename: bool = True                 # give the function a random name in each episode
    max_edits: Optional[int] = 1        # edits that an episode may apply (none: no limit)
    max_turns: int = 6                  # calls that an episode may make
    reward: Optional[Callable] = None   # reward(env) -> float (none: 1 if the hidden tests passed, else 0)
    # the run
    eval_every: int = 20                # steps between evaluations on the held-out tasks (0: none)
    eval_samples: int = 4               # attempts at each task in such an evaluation
    seed: int = 0                       # decides the whole run: train_rl called again draws the same tasks

# ---- Sampling groups ---------------------------------------------------------------------------------------
def make_env(task, cfg, rng):
    """The environment that cfg describes, a new one for each episode. This is the default env_factory. Your
    own has the same arguments (rng is a random.Random) and gets tasks that are renamed already."""
    if cfg.max_edits is None:
        return BugFixEnv(task, cfg.max_turns)
    return EditBudgetEnv(task, cfg.max_edits, cfg.max_turns)

def step_generator(seed, step):
    """A torch.Generator for one step: runs that use different amounts of randomness draw the same tasks."""
    return torch.Generator().manual_seed(int(seed) * 1_000_003 + step)

def sample_groups(model, tok, tasks, group_size, cfg, generator, env_factory=None):
    """Plays group_size episodes of each task. Groups are consecutive, as group_advantages expects them.

    Each episode gets a random function name, if cfg.rename is true and the task is one of the gym, and a
    `reward`: cfg.reward(env), or else 1.0 if the hidden tests passed and 0.0 if not.
    """
    rng, envs = random.Random(torch.randint(2 ** 62, (1,), generator=generator).item()), []
    for task in (task for task in tasks for _ in range(group_size)):
        if cfg.rename and isinstance(task, dict) and {"issue", "source"} <= set(task):
            task = randomize_names(task, rng)
        envs.append((env_factory or make_env)(task, cfg, rng))
    episodes = rollout_batch(model, tok, envs, generator, cfg.temperature)
    for env, episode in zip(envs, episodes):
        episode["reward"] = float(env.passed if cfg.reward is None else cfg.reward(env))
        if not math.isfinite(episode["reward"]):
            raise ValueError(f"reward: {cfg.reward} returned {episode['reward']} on a {type(env).__name__}")
    return episodes

def no_signal(group):
    """True if group_advantages takes a group's rewards (before any overlong penalty) as equal."""
    rewards = torch.tensor([episode["reward"] for episode in group], dtype=torch.float64)
    return not group_advantages(rewards, len(group), scale="none").any()

def sample_step(model, tok, cfg, train_tasks, generator, env_factory=None):
    """The episodes of one step: (kept, sampled). Kept are trained on, sampled are all that were played.

    Dynamic sampling (DAPO, arXiv 2503.14476) drops groups whose rewards are equal and samples more tasks to
    fill the batch. After max_sample_rounds it trains on what it has, else it might sample forever.
    """
    rng, G = random.Random(torch.randint(2 ** 62, (1,), generator=generator).item()), cfg.group_size
    order, kept, sampled = [], [], []
    for _ in range(cfg.max_sample_rounds if cfg.dynamic_sampling else 1):
        if len(order) < cfg.prompts_per_step:           # no task comes twice before all have come once
            order += rng.sample(train_tasks, len(train_tasks))
        tasks, order = order[:cfg.prompts_per_step], order[cfg.prompts_per_step:]
        episodes = sample_groups(model, tok, tasks, G, cfg, generator, env_factory)
        sampled += episodes
        for group in (episodes[i:i + G] for i in range(0, len(episodes), G)):
            if not (cfg.dynamic_sampling or cfg.filter_zero_adv) or not no_signal(group):
                kept += group
        if len(kept) >= cfg.prompts_per_step * G:
            break
    return kept[:cfg.prompts_per_step * G], sampled

# ---- Advantages: how much better was an attempt than expected? ---------------------------------------------
def group_advantages(rewards, group_size, baseline="group_mean", scale="group_std", lengths=None):
    """Advantage of each episode: (reward - baseline) / scale. The baseline is the reward that was expected.

    rewards (N,) of any type, in consecutive groups of group_size. lengths (N,), the policy tokens of the
    episodes, for length_weighted. Returns (N,) in float32 or better. [1, 0, 0, 0] -> [1.5, -0.5, -0.5, -0.5].

    baseline  group_mean       mean of the group                                     GRPO, arXiv 2402.03300
              leave_one_out    mean of the others, so A = G / (G - 1) * (R - mean)   RLOO, 2402.14740
              length_weighted  sum(length * R) / sum(length)                         OPO, 2505.23585
    scale     group_std        standard deviation of the group                       GRPO
              none             1, so that very easy and hard tasks get no boost     Dr. GRPO, 2503.20783
              batch_std        standard deviation of all N rewards                   Lite PPO, 2508.08221
              group_mean       mean of the group, for rewards >= 0                   MaxRL, 2602.02710

    Standard deviations are unbiased (divided by G - 1), plus 1e-6. A group of one has none: ValueError.
    """
    rewards = torch.as_tensor(rewards)
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    if rewards.dim() != 1 or group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size: {group_size} must be at least 2 and divide the N of {rewards.shape}")
    R = rewards.view(-1, group_size)                                                    # (groups, G)
    L = torch.ones_like(rewards) if lengths is None else torch.as_tensor(lengths).to(rewards)
    if (baseline == "length_weighted" and lengths is None) or L.shape != rewards.shape:
        raise ValueError(f"lengths: {lengths} must have the shape of the rewards, {rewards.shape}")
    if scale == "group_mean" and bool((R < 0).any()):
        raise ValueError(f"scale: group_mean needs rewards of at least 0, there is {R.min():g}")
    L, mean = L.view(-1, group_size), R.mean(dim=1, keepdim=True)                       # (groups, G), (.., 1)
    baselines = {"group_mean": mean, "leave_one_out": (R.sum(dim=1, keepdim=True) - R) / (group_size - 1),
                 "length_weighted": (L * R).sum(dim=1, keepdim=True) / L.sum(dim=1, keepdim=True)}
    scales = {"group_std": R.std(dim=1, keepdim=True) + 1e-6, "none": 1, "batch_std": rewards.std() + 1e-6,
              "group_mean": mean}
    for name, value, known in (("baseline", baseline, baselines), ("scale", scale, scales)):
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")
    A = (R - baselines[baseline]) / scales[scale]                                       # (groups, G)
    # Equal rewards tell nothing, so their advantages are set to 0. The formula may give others: for eight
    # rewards of 0.1 in float32, a rounding error is divided by an equally small standard deviation.
    spread = R.amax(dim=1, keepdim=True) - R.amin(dim=1, keepdim=True)
    return A.masked_fill(spread <= 1e-6 * R.abs().amax(dim=1, keepdim=True), 0).view(-1)

def overlong_penalty(turns, max_turns, buffer):
    """Penalty for long episodes (DAPO, arXiv 2503.14476), counted in turns: (N,) -> (N,). It is 0 up to
    max_turns - buffer, falls linearly to -1 at max_turns, and is never lower. No penalty with buffer 0."""
    over = (torch.as_tensor(turns) - (max_turns - buffer)) / max(buffer, 1)
    return -over.clamp(0, 1) if buffer else torch.zeros_like(over)

def compute_advantages(episodes, cfg):
    """Advantages (N,) of the episodes of whole groups. The overlong penalty is added to the rewards first."""
    rewards = torch.tensor([episode["reward"] for episode in episodes], dtype=torch.float64)
    lengths = torch.tensor([sum(episode["mask"]) for episode in episodes])
    turns = torch.tensor([len(episode["calls"]) for episode in episodes])
    rewards = rewards + overlong_penalty(turns, cfg.max_turns, cfg.overlong_buffer)
    return group_advantages(rewards, cfg.group_size, cfg.baseline, cfg.scale, lengths).float()

# ---- KL divergence from a reference policy: a frozen one that pi should stay close to ----------------------
def kl_penalty(logp, ref_logp, kind):
    """Estimates of KL(pi || ref) at tokens that pi sampled. logp, ref_logp (B, T) -> (B, T).

    l is log(ref / pi). Keep this direction: with log(pi / ref), k3 would estimate another quantity.

        k1 = -l              unbiased. Negative on some tokens, which is normal
        k2 = l^2 / 2         slightly biased, never negative
        k3 = e^l - 1 - l     unbiased, never negative if computed with expm1. DeepSeekMath's choice

    A good estimate can be a bad loss. On average the gradient of k1 is 0, since E[grad log pi] = 0, so as a
    loss it does nothing. The gradient of k2 is that of KL(pi || ref), and that of k3 is of KL(ref || pi).
    """
    if logp.shape != ref_logp.shape:
        raise ValueError(f"shapes: logp {tuple(logp.shape)}, ref_logp {tuple(ref_logp.shape)}")
    l = (ref_logp.detach() - logp).clamp(-20, 20)               # so that exp can't overflow
    estimates = {"k1": -l, "k2": l ** 2 / 2, "k3": torch.expm1(l) - l}      # l.exp() - 1 rounds small l away
    if kind not in estimates:
        raise ValueError(f"kl_kind: {kind!r} is not one of {', '.join(estimates)}")
    return estimates[kind]

# ---- The loss ----------------------------------------------------------------------------------------------
# The policy gradient is the gradient of -A log pi at the sampled tokens. A step down it makes tokens with
# A > 0 likelier and those with A < 0 less likely, and so raises the expected reward. This holds on-policy,
# while pi is the policy that sampled. After the first update it is not. The losses then correct for that with
# the ratio r = pi / pi_old, and limit how far it can push. Such a stand-in for the objective is a surrogate.
# At r = 1 PPO's loss is -A, and so is its derivative by log pi. A only compares the attempts of one group, so
# the loss does not show how good the policy is. The norm of its gradient is logged instead.

def aggregate_loss(per_token, mask, mode, constant=None):
    """One loss from per-token losses (B, T) and a mask (B, T), bool or float. n: a row's tokens in the mask.

                             formula                         a token's weight in rows of 2 and 4 tokens
        token_mean           sum of all / sum of all n       1/6   1/6    (DAPO)
        seq_mean_token_mean  mean over rows of (sum / n)     1/4   1/8    less in a longer episode (GRPO)
        seq_mean_token_sum   mean over rows of sum           1/2   1/2    (RLOO)
        constant             sum of all / (B * constant)     1/20  1/20   if constant is 10 (Dr. GRPO)

    Give it the whole batch of an optimizer step. Averaging over averages of its parts would weight tokens
    unequally. The two seq_mean modes average over rows that have a token. The constant is fixed beforehand,
    unlike T, which changes from batch to batch. ValueError for shapes, modes and constants that don't fit.
    """
    if per_token.shape != mask.shape or mask.dim() != 2:
        raise ValueError(f"shapes: per_token {tuple(per_token.shape)}, mask {tuple(mask.shape)}")
    if mode == "constant" and not (constant is not None and constant > 0):
        raise ValueError(f"agg_constant: {constant} must be greater than 0 with agg constant")
    x = per_token.to(torch.promote_types(per_token.dtype, torch.float32))       # float16 sums are too coarse
    n = (mask != 0).sum(dim=1, keepdim=True)                                            # (B, 1)
    rows = (n > 0).sum().clamp(min=1)
    divisors = {"token_mean": n.sum().clamp(min=1), "seq_mean_token_mean": rows * n.clamp(min=1),
                "seq_mean_token_sum": rows, "constant": len(n) * (constant or 1)}
    if mode not in divisors:
        raise ValueError(f"agg: {mode!r} is not one of {', '.join(divisors)}")
    return (x.masked_fill(mask == 0, 0) / divisors[mode]).sum()

def ppo_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2):
    """PPO's clipped surrogate (arXiv 1707.06347): -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)

    Because of the min, a token is clipped, and has no gradient, only if r has already gone too far in the
    direction in which A pushes. In the first minibatch r is 1, so the clip acts from the second on.

                 r < 1 - eps_low    in between     r > 1 + eps_high
        A > 0    gradient           gradient       clipped
        A < 0    clipped            gradient       gradient

    logp, old_logp (B, T) are log-probabilities of the tokens, adv (B,) or (B, T) is A, mask (B, T) is true
    (or 1) on the policy's tokens. Returns losses (B, T) and which tokens are clipped (B, T), meaningless off
    the mask. The losses in variants.py have the same arguments and results. ValueError for other shapes.
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)        # (B, T)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0).clamp(-20, 20)         # (B, T)
    r = log_r.exp()                                                                     # (B, T)
    unclipped, clipped = r * A, r.clamp(1 - eps_low, 1 + eps_high) * A
    return -torch.minimum(unclipped, clipped), unclipped > clipped

def policy_loss(logp, old_logp, adv, mask, cfg):
    """The scalar loss that cfg chooses, and a dict of statistics of the policy's tokens: clip_frac (the share
    that is clipped), ratio_min, ratio_max, logratio_pos and logratio_neg (mean log r where A > 0, A < 0)."""
    losses = {"token": ppo_policy_loss, **POLICY_LOSSES}
    per_token, clipped = losses[cfg.ratio_level](logp, old_logp, adv, mask, cfg.eps_low, cfg.eps_high)
    loss = aggregate_loss(per_token, mask, cfg.agg, cfg.agg_constant)
    on = mask != 0
    log_r = (logp - old_logp).detach()[on].clamp(-20, 20)                               # (policy tokens,)
    A = (adv if adv.shape == logp.shape else adv[:, None]).expand_as(logp)[on]          # (policy tokens,)
    low, high = log_r.aminmax() if len(log_r) else (log_r.mean(), log_r.mean())         # without tokens nan
    return loss, {"clip_frac": clipped[on].float().mean(), "ratio_min": low.exp(), "ratio_max": high.exp(),
                  "logratio_pos": log_r[A > 0].mean(), "logratio_neg": log_r[A < 0].mean()}

# ---- The update --------------------------------------------------------------------------------------------
UPDATE_STATS = ("clip_frac", "approx_kl", "ratio_min", "ratio_max", "logratio_pos", "logratio_neg", "entropy",
                "grad_norm", "kl_ref", "logp_gap")

def rl_update(model, optimizer, episodes, cfg, generator, ref_model=None):
    """cfg.epochs passes over the episodes, each with cfg.minibatches optimizer steps. Changes model.

    Returns a dict of UPDATE_STATS, nan where there is nothing to measure. approx_kl is KL(pi_old || pi).
    logp_gap is the largest difference between the sampler's and the trainer's log-probability of a token.
    FloatingPointError before a step whose loss or gradient is not finite.
    """
    if ref_model is model:
        raise ValueError("ref_model: the policy can't be its own reference, because the KL would always be 0")
    if not episodes:                            # dynamic sampling or filtering has left nothing
        return dict.fromkeys(UPDATE_STATS, math.nan)
    batch, adv = collate(episodes), compute_advantages(episodes, cfg)                   # (N, T), (N,)
    if cfg.mask_truncated:                      # truncated ones count in the baseline only
        cut = torch.tensor([bool(getattr(episode["env"], "truncated", False)) for episode in episodes])
        batch["mask"] &= ~cut[:, None]
    mask, records = batch["mask"], []
    with torch.no_grad():       # pi_old is computed by the same function as pi, so that r starts at 1
        old_logp, entropy = token_logps(model, batch, cfg.temperature, with_entropy=True)   # (N, T)
        ref_logp = None if ref_model is None else token_logps(ref_model, batch, cfg.temperature)
    # If A is 0 and no KL term pulls, an episode has no gradient whatever pi is, so it is not run again. It
    # keeps pi_old's log-probabilities (r = 1), and its tokens still count in the loss's divisor.
    needed = mask.any(dim=1) & ((adv != 0) | bool(ref_model is not None and cfg.kl_coef > 0))     # (N,)
    for _ in range(cfg.epochs):
        for rows in torch.randperm(len(episodes), generator=generator).tensor_split(cfg.minibatches):
            old, m, run, logp = old_logp[rows], mask[rows], needed[rows], old_logp[rows].clone()    # (B, ...)
            if run.any():
                part = {name: tensor[rows[run]] for name, tensor in batch.items()}
                logp[run] = token_logps(model, part, cfg.temperature)
            loss, stats = policy_loss(logp, old, adv[rows], m, cfg)
            ran = m & run[:, None]                                                      # (B, T)
            stats["approx_kl"] = kl_penalty(old, logp.detach(), "k3")[ran].mean()
            if ref_model is not None:           # the mean over policy tokens, whatever cfg.agg is
                kl = kl_penalty(logp, ref_logp[rows], cfg.kl_kind)[ran].mean()
                stats["kl_ref"], loss = kl.detach(), loss + cfg.kl_coef * kl
            stats["grad_norm"] = torch.zeros(())
            if run.any():
                optimizer.zero_grad()
                loss.backward()
                stats["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
                if not (loss.isfinite() and stats["grad_norm"].isfinite()):
                    raise FloatingPointError(f"loss {loss:.3g}, gradient norm {stats['grad_norm']:.3g}, "
                                             f"largest ratio {stats['ratio_max']:.3g}")
                optimizer.step()
            tokens = {"approx_kl": ran, "kl_ref": ran, "logratio_pos": m & (adv[rows] > 0)[:, None],
                      "logratio_neg": m & (adv[rows] < 0)[:, None]}     # the others: all of m
            records.append({name: (stats[name].item(), tokens.get(name, m).sum().item()) for name in stats})
    gap = (old_logp - batch.get("logps", old_logp))[mask].abs()
    return {**average(records), "entropy": entropy[mask].mean().item(),
            "logp_gap": gap.max().item() if len(gap) else math.nan}

def average(records):
    """Token-weighted means of UPDATE_STATS. A record of a minibatch: name -> (mean, number of tokens)."""
    result = dict.fromkeys(UPDATE_STATS, math.nan)
    for name in records[0]:
        if values := [record[name] for record in records if record[name][1]]:
            result[name] = sum(value * n for value, n in values) / sum(n for _, n in values)
        if values and name in ("ratio_min", "ratio_max"):
            result[name] = (min if name == "ratio_min" else max)(values)[0]
    return result

# ---- The loop ----------------------------------------------------------------------------------------------
def train_rl(model, tok, cfg, train_tasks, eval_tasks=None, ref_model=None, env_factory=None, on_step=None):
    """Trains model in place. Returns the history, a list with a dict for each step:

        step, and behavior_stats of all sampled episodes
        episodes, tokens                        how many were sampled, tokens of policy and environment
        zero_adv_frac, all_passed, all_failed   shares of groups: rewards are equal; all pass; all fail
        UPDATE_STATS                            see rl_update and policy_loss
        eval_pass_rate                          on eval_tasks every eval_every steps and at the end, else nan
        sec_sample, sec_update                  seconds

    ref_model is the reference of the KL term, by default a copy of the present model if kl_coef > 0.
    on_step(row, episodes) is called after each step with its dict and the episodes that were trained on.
    ValueError for settings that make no sense. FloatingPointError, with the step, for a loss or gradient that
    is not finite. The model then has the weights from before that optimizer step.
    """
    check_config(cfg, len(train_tasks))
    if cfg.kl_coef > 0 and ref_model is None:
        ref_model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    history, n_updated = [], 0
    for step in range(cfg.steps):
        generator, started = step_generator(cfg.seed, step), time.perf_counter()
        try:
            kept, sampled = sample_step(model, tok, cfg, train_tasks, generator, env_factory)
            sampled_at = time.perf_counter()
            for parameters in optimizer.param_groups:
                parameters["lr"] = cfg.lr * min(1, (n_updated + 1) / max(cfg.warmup_steps, 1))
            update = rl_update(model, optimizer, kept, cfg, generator, ref_model)
            updated_at, evaluation = time.perf_counter(), {"pass_rate": math.nan}
            if eval_tasks and cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps - 1):
                evaluation = evaluate(model, tok, eval_tasks, cfg.eval_samples, cfg, env_factory)
        except FloatingPointError as error:
            raise FloatingPointError(f"step {step}: {error}. Try an lr below {cfg.lr:g}") from None
        n_updated += update["grad_norm"] > 0
        groups = [sampled[i:i + cfg.group_size] for i in range(0, len(sampled), cfg.group_size)]
        passes = [behavior_stats(group)["pass_rate"] for group in groups if no_signal(group)]
        history.append({
            "step": step, **behavior_stats(sampled), "episodes": len(sampled),
            "tokens": sum(len(episode["ids"]) for episode in sampled),
            "zero_adv_frac": len(passes) / len(groups), "all_passed": passes.count(1) / len(groups),
            "all_failed": passes.count(0) / len(groups), **update, "eval_pass_rate": evaluation["pass_rate"],
            "sec_sample": sampled_at - started, "sec_update": updated_at - sampled_at})
        if on_step:
            on_step(history[-1], kept)
    return history

def evaluate(model, tok, tasks, n_samples, cfg, env_factory=None):
    """behavior_stats of n_samples episodes of each task, with cfg. cfg.seed alone decides the randomness."""
    return behavior_stats(
        sample_groups(model, tok, tasks, n_samples, cfg, step_generator(cfg.seed, -1), env_factory))

# ---- Command line. From here on nothing is about GRPO. -----------------------------------------------------
CHOICES = {"baseline": ("group_mean", "leave_one_out", "length_weighted"),
           "scale": ("group_std", "none", "batch_std", "group_mean"), "kl_kind": ("k1", "k2", "k3"),
           "agg": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"),
           "ratio_level": ("token", *POLICY_LOSSES)}
LOWEST = {"steps": 0, "prompts_per_step": 1, "group_size": 2, "minibatches": 1, "epochs": 1,
          "eval_samples": 1, "warmup_steps": 0, "max_sample_rounds": 1, "overlong_buffer": 0, "max_edits": 0,
          "max_turns": 1, "eval_every": 0, "seed": 0, "eps_low": 0, "eps_high": 0, "kl_coef": 0}  # others > 0

def check_config(cfg, n_tasks=None):
    """ValueError for the first field that makes no sense, with its name, its value and what is allowed."""
    def require(name, holds, rule):
        if not holds:
            raise ValueError(f"{name}: {getattr(cfg, name)!r} must be {rule}")
    for field in fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        kind, *optional = getattr(field.type, "__args__", (field.type,))        # Optional[int]: int, NoneType
        if value is None and optional:
            continue
        if name in CHOICES:
            require(name, value in CHOICES[name], f"one of {', '.join(CHOICES[name])}")
        elif name == "reward":
            require(name, callable(value), "a function of an environment")
        elif kind is bool:
            require(name, type(value).__name__ in ("bool", "bool_"), "true or false")       # bool_ is numpy's
        else:
            number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
            finite = number and (abs(value) < math.inf or value == math.inf and name == "max_grad_norm")
            require(name, finite and not isinstance(value, bool), f"a finite {kind.__name__}")
            require(name, value >= LOWEST.get(name, value), f"at least {LOWEST.get(name)}")
            require(name, value > 0 or name in LOWEST, "greater than 0")
    episodes, turns = cfg.prompts_per_step * cfg.group_size, cfg.max_turns
    require("minibatches", cfg.minibatches <= episodes, f"at most {episodes}, the episodes of a step")
    if n_tasks is not None:
        require("prompts_per_step", cfg.prompts_per_step <= n_tasks, f"at most {n_tasks}, the training tasks")
    require("overlong_buffer", cfg.overlong_buffer <= turns, f"at most {turns}, the value of max_turns")
    require("eps_low", cfg.eps_low <= 1 or cfg.ratio_level in ("gmpo", "sapo", "none"), "at most 1")
    require("agg_constant", cfg.agg != "constant" or cfg.agg_constant, "a number if agg is constant")
    if cfg.scale == "group_mean":
        require("overlong_buffer", not cfg.overlong_buffer, "0 with scale group_mean: rewards must be >= 0")
    if cfg.dynamic_sampling:
        require("filter_zero_adv", not cfg.filter_zero_adv, "false with dynamic_sampling: it drops them too")
    require("seed", cfg.seed < 2 ** 32, "below 2^32")

def number_or_none(text):
    return None if text.lower() == "none" else int(text) if text.strip("-").isdecimal() else float(text)

def add_config_flags(parser):
    """Adds a flag for each field but the callable. Flags that are not given are absent from the namespace."""
    kind = {bool: str.lower, Optional[int]: number_or_none, Optional[float]: number_or_none}
    for field in fields(RLConfig):
        if field.name != "reward":
            parser.add_argument(f"--{field.name}", type=kind.get(field.type, field.type), metavar="X",
                                choices=("true", "false") if field.type is bool else CHOICES.get(field.name),
                                default=argparse.SUPPRESS, help=f"see RLConfig, default {field.default}")

def config_from(parser, args, **preset):
    """RLConfig of a preset and the fields given as flags, which win. Ends the script if it makes no sense."""
    given = {field.name: getattr(args, field.name) for field in fields(RLConfig) if hasattr(args, field.name)}
    cfg = RLConfig(**{**preset, **{k: {"true": True, "false": False}.get(v, v) for k, v in given.items()}})
    try:
        check_config(cfg, len(TRAIN_TASKS))
    except ValueError as error:
        parser.error(f"argument --{error}")
    return cfg

# table heading, the same in every table and in the README -> key of the history
PROGRESS = {"step": "step", "reward": "reward", "read 1st": "read_first", "1st right": "first_edit_right",
            "tokens": "policy_tokens", "entropy": "entropy", "clip": "clip_frac", "grad": "grad_norm",
            "zero adv": "zero_adv_frac", "passed": "all_passed", "failed": "all_failed",
            "held-out": "eval_pass_rate", "seconds": "seconds"}
OUTCOME = {"pass rate": "pass_rate", "read 1st": "read_first", "1st right": "first_edit_right",
           "reads": "reads", "tests": "tests", "edits": "edits", "turns": "turns", "tokens": "policy_tokens",
           "truncated": "truncated"}

def table_row(columns, stats=None):
    """A line of a table: the headings, or below them the values of stats."""
    def cell(x):
        return "-" if x != x else f"{x:.{0 if isinstance(x, int) else 3 if 0 < abs(x) < 0.1 else 2}f}"
    return "".join(f"{heading if stats is None else cell(stats[key]):>{max(len(heading), 5) + 2}}"
                   for heading, key in columns.items())

def show_group(step, episodes, model, tok, cfg):
    """Prints one group of a step's episodes, and what the update did to its best and its worst attempt."""
    groups = [range(i, i + cfg.group_size) for i in range(0, len(episodes), cfg.group_size)]
    rows = next((rows for rows in groups if not no_signal([episodes[i] for i in rows])), None)
    if rows is None:
        return print(f"\nstep {step}: in no group do the rewards differ\n")
    batch, adv, weights = collate(episodes), compute_advantages(episodes, cfg), {}
    with torch.no_grad():
        before, after = batch["logps"], token_logps(model, batch, cfg.temperature)
    loss = {"token": ppo_policy_loss, **POLICY_LOSSES}[cfg.ratio_level]
    clipped = loss(after, before, adv, batch["mask"], cfg.eps_low, cfg.eps_high)[1]
    for mode in CHOICES["agg"]:         # a token's weight in the loss is the derivative by its per-token loss
        x = torch.zeros_like(after).requires_grad_()
        aggregate_loss(x, batch["mask"], mode, cfg.agg_constant or 24.0).backward()
        weights[mode] = x.grad.amax(dim=1)
    worst, *_, best = sorted(rows, key=lambda i: episodes[i]["reward"])
    task = episodes[best]["env"].task
    print(f"\nstep {step}: one group after the update, repaired by {FIX_OP[task['name']]}\n"
          f"{transcript(BugFixEnv(task), [['read']])}\n\nattempt  reward  advantage  calls")
    for i in rows:
        print(f"{i:7}{episodes[i]['reward']:8.2f}{adv[i]:+11.2f}  {calls_text(episodes[i]['calls'])}")
    for i in (best, worst):
        print(f"\nattempt {i}, advantage {adv[i]:+.2f}. Weight of each of its trained tokens in the loss:\n  "
              + ", ".join(f"{mode} {weight[i]:.5f}" for mode, weight in weights.items())
              + f"\n  {'token':12}{'before':>8}{'after':>8}{'ratio':>8}")
        words, mask = decode(tok, episodes[i]["ids"]), episodes[i]["mask"]
        for sampled, places in groupby(range(len(words)), key=lambda t: mask[t]):
            if not sampled:
                print("  not trained on:", " ".join(words[t] for t in places).replace("\n", "\\n"))
            for t in places:
                p, q = before[i, t].exp(), after[i, t].exp()
                print(f"  {words[t]:12}{p:8.3f}{q:8.3f}{q / p:8.3f}{'  clipped' if clipped[i, t] else ''}")
    print()

def print_outcome(policies, tok, cfg):
    """Plays and prints the final tables. policies: {"before": the base agent, "after": the trained one}."""
    print("\n" + " " * 22 + table_row(OUTCOME))
    for when, model in policies.items():
        for label, tasks in (("training tasks", TRAIN_TASKS), ("held-out tasks", HELDOUT_TASKS)):
            episodes = sample_groups(model, tok, tasks, 16, cfg, step_generator(cfg.seed, -1))
            print(f"{f'{when}, {label}':22}" + table_row(OUTCOME, behavior_stats(episodes)))
        policies[when] = episodes
    print("\npass rate of each held-out task, after\n  " + ", ".join(
        f"{task['name']} {mean(e['env'].passed for e in episodes[16 * i:16 * i + 16]):.2f}"
        for i, task in enumerate(HELDOUT_TASKS)) + f"\n\nthe most common of these {len(episodes)} episodes")
    for calls, count in Counter(calls_text(episode["calls"]) for episode in episodes).most_common(6):
        print(f"{count:5}  {calls}")
    for when, (episode, *_) in policies.items():
        task = episode["env"].task
        print(f"\n{when}: a held-out task, repaired by {FIX_OP[task['name']]}\n"
              + transcript(make_env(task, cfg, None), episode["calls"]))

def run(args, cfg, tok, model):
    """Does what the command line says. Returns the exit status, where None means success."""
    rows, started, warned = [], time.perf_counter(), False
    say = (lambda text: None) if args.quiet else partial(print, flush=True)
    def write(line):
        if args.log:
            with open(args.log, "a", encoding="utf-8") as file:
                print(json.dumps({key: x if x == x else None for key, x in line.items()}), file=file)
    def on_step(row, episodes):
        nonlocal warned
        rows.append({**row, "seconds": time.perf_counter() - started})
        write(row)
        if row["step"] % 5 == 0 or row["step"] == cfg.steps - 1:
            say(table_row(PROGRESS, rows[-1]))
        if not warned and len(rows) >= 10 and not any(r["grad_norm"] > 0 for r in rows[-10:]):
            warned = True
            say("ten steps without a gradient: the attempts of each group all " + (
                "pass, so there is nothing left to learn" if row["pass_rate"] > 0.5 else
                "fail. Is lr or temperature too high, or max_turns too low?"))
        if args.show and row["step"] % args.show == 0:
            show_group(row["step"], episodes, model, tok, cfg)

    try:
        if args.translate:
            print(translate(cfg, args.translate), end="", flush=True)
            return
        if model is None:
            say(f"making the base agent ({args.base or 'rl'}) by imitation, then {cfg.steps} steps of RL")
            model = (make_base_agent if args.base == "plain" else make_rl_base)(tok, cfg.seed)
        base = copy.deepcopy(model)
        settings = {name: str(x) if x == math.inf else x for name, x in asdict(cfg).items()}
        write({"config": settings, "variant": args.variant, "base": args.init or args.base or "rl",
               "torch": torch.__version__})
        say(table_row(PROGRESS))
        try:
            train_rl(model, tok, cfg, TRAIN_TASKS, HELDOUT_TASKS, on_step=on_step)
        finally:                                            # however training ends, what was learned is kept
            if args.save:
                save_policy(model, tok, asdict(cfg), args.save)
        print_outcome({"before": base, "after": model}, tok, cfg)
        sampling, updates, *counts = (
            sum(row[key] for row in rows) for key in ("sec_sample", "sec_update", "episodes", "tokens"))
        episodes, tokens = (count / (sampling + updates + 1e-9) for count in counts)
        print(f"\n{sampling:.1f} s sampling, {updates:.1f} s updating: {episodes:.0f} episodes a second, "
              f"{tokens:.0f} tokens a second", flush=True)
    except KeyboardInterrupt:
        print(f"\nstopped after {len(rows)} of {cfg.steps} steps", file=sys.stderr)
        return 130
    except BrokenPipeError:                                 # nobody reads any more, so print into the void
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FloatingPointError, OSError, RuntimeError) as error:
        print(f"grpo.py: stopped: {error}", file=sys.stderr)
        return 1

def main():
    parser = argparse.ArgumentParser(description=__doc__, usage="grpo.py [-h] [--FLAG X] ...",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flag = parser.add_argument
    flag("--variant", choices=list(VARIANTS), metavar="NAME", help=f"a preset: {', '.join(VARIANTS)}")
    flag("--base", choices=("rl", "plain"), help="the base agent to start from (default rl)")
    flag("--init", metavar="FILE", help="start from a policy that --save wrote")
    flag("--save", metavar="FILE", help="write the trained policy")
    flag("--log", metavar="FILE", help="write the settings and the history, a JSON object a line")
    flag("--show", type=int, default=0, metavar="N", help="look at one group every N steps")
    flag("--translate", choices=("trl", "verl"), help="print the settings for that trainer, and do no more")
    flag("--threads", type=int, default=1, choices=range(1, 65), metavar="N", help="torch threads, 1 to 64")
    flag("--quiet", action="store_true", help="print the final tables only")
    add_config_flags(parser)
    args, tok, model = parser.parse_args(), build_tokenizer(), None
    cfg = config_from(parser, args, **VARIANTS.get(args.variant, {}))
    if args.init and args.base:
        parser.error(f"argument --base: {args.base} can't be given with --init")
    if args.show < 0:
        parser.error(f"argument --show: {args.show} must be at least 0")
    refuse_same_file(parser, {"--init": args.init, "--save": args.save, "--log": args.log,
                              "--save (before it is complete)": args.save and args.save + ".part"})
    try:                                                    # find out now, and not after the training
        name = "init"
        model = load_policy(tok, args.init) if args.init else None
        name, new = "save", args.save and not os.path.exists(args.save)
        open(args.save or os.devnull, "ab").close()
        if new:
            os.remove(args.save)
        name = "log"
        open(args.log or os.devnull, "w").close()
    except (OSError, ValueError) as error:
        parser.error(f"argument --{name}: {getattr(args, name)} {getattr(error, 'strerror', None) or error}")
    torch.set_num_threads(args.threads)
    signal.signal(signal.SIGINT, signal.default_int_handler)        # run handles Ctrl-C from here on
    sys.exit(run(args, cfg, tok, model))

if __name__ == "__main__":
    main()
