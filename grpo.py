"""GRPO for multi-turn agents: the settings, the advantages, the loss and the whole training loop.

Read env.py and agent.py first. Part 1 of this file is GRPO, and a first reading needs nothing else.
Part 2 has options that the variants use, part 3 shows what a run does, and part 4 is the command
line.

    python grpo.py                                      80 steps: the agent learns to read
    python grpo.py --variant dr_grpo                    train with a published variant
    python grpo.py --show 20                            every 20 steps, look at one group
    python grpo.py --seed 3 --lr 5e-4 --log run.jsonl   fields of RLConfig are flags

This is what train_rl, the loop, does:

    for each step:
        draw 8 tasks and let the policy attempt each of them 8 times: 8 groups of 8 attempts
        reward of an attempt = 1 if the hidden tests passed, else 0
        advantage = (reward - mean of its group) / standard deviation of its group
        pi_old = probability of each sampled token under the policy that made the attempts
        for each of 2 minibatches, 32 of the 64 attempts each:
            pi = probability of each sampled token under the policy after the updates so far
            ratio = pi / pi_old
            loss = mean over tokens of -min(ratio * advantage, clip(ratio, 0.8, 1.2) * advantage)
            one Adam step down the gradient of the loss

A group of four attempts with rewards 1, 0, 0, 0 has mean 0.25 and standard deviation 0.5 (the sum
of the squared deviations is divided by 3). The advantages are 1.5, -0.5, -0.5, -0.5. So the tokens
of the first attempt become likelier, and those of the others become less likely. A group whose
rewards are all equal has advantages of 0, and teaches nothing.

Why is that the right thing to do? From here on, pi(o) is the probability of a whole attempt o, and
R(o) its reward. We want to raise the expected reward. The sums are over all attempts that are
possible, and grad is the gradient with respect to the weights of the policy:

    expected reward = sum of R(o) pi(o)
    its gradient    = sum of R(o) grad pi(o)
                    = sum of R(o) pi(o) grad log pi(o)    because grad log pi = (grad pi) / pi
                    = expectation of R grad log pi        over attempts that the policy makes

An expectation can be estimated. So let the policy make attempts, and take a step along the mean of
R grad log pi over them. This is the policy gradient, also called REINFORCE. Five more steps lead to
GRPO:

1. Tokens. The probability of an attempt is a product over its tokens, so log pi(o) is a sum over
   them. Some factors are the policy's. The others are the environment's: how likely its answer is
   after a call. These do not depend on the weights, so they have no gradient.

2. Baseline. The expectation of grad log pi is the sum of pi(o) grad log pi(o), which is the sum of
   grad pi(o). This is 0, because all pi(o) add up to 1 whatever the weights are. So b grad log pi
   has the expectation 0 as well, for every b that does not depend on the attempt, and R may be
   replaced by R - b. If b is near the expected reward, the estimate is much less noisy: an attempt
   counts only by how far its reward differs from what was expected. PPO (proximal policy
   optimization), which GRPO simplifies, trains a second network, the critic, to predict b. GRPO
   (group relative policy optimization, DeepSeekMath, arXiv 2402.03300) samples a group of G
   attempts at the same task, and b is their mean reward. This mean does depend on the attempt,
   because it contains the attempt's own reward. But

       R - mean of the group = (G-1)/G * (R - mean of the others in the group)

   and the mean of the others is a proper baseline, because attempts are sampled independently of
   each other. So the step only becomes a little smaller.

3. Scale. GRPO divides R - b by the standard deviation of the group. The result is the advantage A:
   how much better the attempt was than expected. The derivation does not ask for this division. It
   gives more weight to tasks that are nearly always or hardly ever solved, because there the
   standard deviation is small.

4. Mean over tokens. The derivation asks for the sum over the tokens of an attempt, and the mean
   over attempts. The loop above takes the mean over all tokens instead. Its gradient has the same
   direction, because both add up the same terms. One divides by the number of attempts, and the
   other by the number of tokens. The paper takes the mean within each attempt first. This gives
   less weight to the tokens of long attempts.

5. Ratio. From the second minibatch on, the policy is no longer pi_old, the one that made the
   attempts. For any f, for example A grad log pi,

       sum of pi(o) f(o) = sum of pi_old(o) * ratio(o) * f(o)    with ratio(o) = pi(o) / pi_old(o)

   so attempts of pi_old can be used for pi, if each is weighted by its ratio. This ratio is a
   product over the policy's tokens (the environment's factors cancel), and very noisy. PPO and GRPO
   weight each token by its own ratio instead, which is good enough while pi is near pi_old.

   From here on, pi, pi_old and ratio are those of one token, as in the loop. The token contributes
   ratio * A * grad log pi. Since pi_old and A are constants,

       grad ratio = (grad pi) / pi_old = ratio * grad log pi

   and so the token's contribution is the gradient of ratio * A. The loss contains ratio * A with a
   minus sign, because the optimizer goes down.

   The clip helps to keep pi near pi_old. With ratio 1.5 and A = 1, the min chooses between 1.5, not
   clipped, and 1.2, clipped. It takes 1.2, a constant. So the token has no gradient, and is not
   pushed further out. With ratio 1.5 and A = -1, it chooses between -1.5 and -1.2. It takes -1.5,
   which has a gradient, and the token can be pushed back.

The default is not quite the paper's GRPO. It uses the mean over all tokens, and it leaves out the
KL term, which keeps pi near another policy, the reference. --variant grpo is the paper's.
"""
import argparse
import copy
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Callable, Optional

import torch

from agent import (
    PICTURE,
    behavior_stats,
    build_tokenizer,
    collate,
    decode,
    frozen_logps,
    load_policy,
    make_base_agent,
    make_rl_base,
    mean,
    most_common,
    part_file,
    picture,
    python_rng,
    rollout_batch,
    save_policy,
    similar_lengths,
    step_generator,
    token_logps,
)
from env import (
    HELDOUT_TASKS,
    TRAIN_TASKS,
    BugFixEnv,
    EditBudgetEnv,
    calls_text,
    randomize_names,
    transcript,
)
from variants import POLICY_LOSSES, VARIANTS

# ==================================================================================================
# Part 1. GRPO
# ==================================================================================================
# An attempt at a task is an episode, and a row of a batch. The letters in the comments on shapes:
# there are N episodes in a step, B in a minibatch, and G in a group. The longest episode has T
# tokens. In formulas, A is an advantage and r is the ratio of a token.


@dataclass
class RLConfig:
    # GRPO itself
    steps: int = 80                     # iterations of sample, score, update
    prompts_per_step: int = 8           # tasks in a step
    group_size: int = 8                 # attempts at each task, G
    minibatches: int = 2                # parts of a step's batch, one Adam step each
    epochs: int = 1                     # passes over a step's episodes
    eps_low: float = 0.2                # ratios are clipped below 1 - eps_low
    eps_high: float = 0.2               # and above 1 + eps_high
    lr: float = 1e-3                    # Adam's learning rate
    temperature: float = 1.0            # divides the logits, in sampling and in training
    seed: int = 0                       # decides the whole run: the same seed repeats it

    # ---- Skip these at first. They concern details, the gym and the variants. ----
    # the optimizer
    warmup_steps: int = 6               # lr rises, as Adam's first steps are too large
    max_grad_norm: float = 1.0          # larger gradients are scaled down (inf: never)
    # the gym
    rename: bool = True                 # give the function a random name in each episode
    max_edits: Optional[int] = 1        # edits that an episode may apply (None: any number)
    max_turns: int = 6                  # calls that an episode may make
    reward: Optional[Callable] = None   # reward(env) -> float (None: env.passed)
    # evaluation on the held-out tasks
    eval_every: int = 20                # steps between two evaluations (0: none)
    eval_samples: int = 4               # attempts at each task
    # advantages
    baseline: str = "group_mean"        # group_mean | leave_one_out | length_weighted
    scale: str = "group_std"            # group_std | none | batch_std | group_mean
    # the loss
    ratio_level: str = "token"          # token: PPO's. Others: see variants.py
    agg: str = "token_mean"             # a mode of token_weights
    agg_constant: Optional[float] = None    # agg constant: sum / (rows * this)
    # staying close to a reference policy
    kl_coef: float = 0.0                # weight of the KL term (0: there is none)
    kl_kind: str = "k3"                 # k1 | k2 | k3, its estimator
    # which episodes are used
    dynamic_sampling: bool = False      # replace groups of equal rewards with others
    max_sample_rounds: int = 3          # at most this many rounds of sampling
    filter_zero_adv: bool = False       # drop groups of equal rewards
    overlong_buffer: int = 0            # 2: the last two turns cost reward
    mask_truncated: bool = False        # leave truncated episodes out of the loss


# ---- Sampling groups -----------------------------------------------------------------------------


def make_env(task, cfg, rng):
    """The environment that cfg describes. One is made for each episode.

    This is the default env_factory. To use another environment, write a function with the same
    arguments. The task already has its random name. rng is a random.Random, for anything else in
    the environment that is random.
    """
    if cfg.max_edits is None:
        return BugFixEnv(task, cfg.max_turns)
    return EditBudgetEnv(task, cfg.max_edits, cfg.max_turns)


def sample_groups(model, tok, tasks, group_size, cfg, generator, env_factory=None):
    """Plays group_size episodes of each task, and gives each episode its `reward`.

    The episodes of a group are next to each other in the returned list. Each draws its own random
    name, so the attempts of a group differ a little in their prompt. The mean of the others is
    still a valid baseline. Their names and actions are drawn independently of this attempt's.
    """
    rng = python_rng(generator)
    make = env_factory or make_env
    envs = []
    for task in tasks:
        for _ in range(group_size):
            own = copy.deepcopy(task)                   # an environment may change it
            envs.append(make(randomize_names(own, rng) if cfg.rename else own, cfg, rng))
    episodes = rollout_batch(model, tok, envs, generator, cfg.temperature)
    for episode in episodes:
        episode["reward"] = reward_of(episode["env"], cfg)
    return episodes


def reward_of(env, cfg):
    """The reward of an episode that has ended. Raises ValueError if it is not a finite number."""
    reward = env.passed if cfg.reward is None else cfg.reward(env)
    try:
        number = float(reward)
    except TypeError:                                   # None, or a tuple
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"reward: {reward!r} must be a finite number")
    return number


def sample_batch(model, tok, cfg, tasks, generator, env_factory=None):
    """The episodes of a training step: random tasks, with a group of attempts at each of them."""
    drawn = python_rng(generator).sample(tasks, cfg.prompts_per_step)
    return sample_groups(model, tok, drawn, cfg.group_size, cfg, generator, env_factory)


# ---- Advantages: how much better was an attempt than expected? -----------------------------------


def group_advantages(
    rewards, group_size, baseline="group_mean", scale="group_std", lengths=None
):
    """Advantage of each episode: A = (R - baseline) / scale, where R is its reward.

    rewards (N,), a tensor or a list, has a number for each episode, group after group. lengths
    (N,), the episodes' numbers of policy tokens, are only needed for length_weighted. Returns (N,),
    without a gradient, in float32, or in float64 if the rewards are.

        [1, 0, 0, 0] -> [1.5, -0.5, -0.5, -0.5]

    GRPO uses the first baseline and the first scale. The others belong to variants:

    baseline  group_mean       mean of the group                             GRPO, 2402.03300
              leave_one_out    mean of the others in the group               RLOO, 2402.14740
              length_weighted  sum(length * R) / sum(length) over the group   OPO, 2505.23585
                               (their mean if the lengths are all 0)
    scale     group_std        standard deviation of the group               GRPO
              none             1                                     Dr. GRPO, 2503.20783
              batch_std        standard deviation of all N rewards       Lite PPO, 2508.08221
              group_mean       mean of the group, for rewards >= 0          MaxRL, 2602.02710

    Standard deviations are the unbiased ones (of n numbers, they divide by n - 1). 1e-6 is added to
    them, and to nothing else. If all rewards of a group are equal, it teaches nothing, and its
    advantages are exactly 0 (see equal_rewards). Raises ValueError for groups of one, which leave
    nothing to compare with, for an unknown baseline or scale, for rewards that are not finite, and
    with scale group_mean for negative ones.
    """
    if group_size < 2:
        raise ValueError(f"group_size: {group_size} must be at least 2")
    rewards = torch.as_tensor(rewards).detach()
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    R = rewards.view(-1, group_size)                                    # (groups, G)
    group_mean = R.mean(dim=1, keepdim=True)                            # (groups, 1)

    if baseline == "group_mean":
        b = group_mean
    elif baseline == "leave_one_out":
        b = (group_size * group_mean - R) / (group_size - 1)            # (groups, G)
    elif baseline == "length_weighted":
        L = torch.as_tensor(lengths).to(R).view(R.shape)                # (groups, G)
        total = L.sum(dim=1, keepdim=True)                              # (groups, 1)
        b = torch.where(total > 0, (L * R).sum(dim=1, keepdim=True) / total, group_mean)
    else:
        raise ValueError(f"baseline: {baseline!r} is unknown")

    if scale == "group_std":
        divisor = R.std(dim=1, keepdim=True) + 1e-6                     # (groups, 1)
    elif scale == "none":
        divisor = 1
    elif scale == "batch_std":
        divisor = R.std() + 1e-6
    elif scale == "group_mean":
        if R.min() < 0:
            raise ValueError("rewards: scale group_mean needs rewards of at least 0")
        divisor = group_mean
    else:
        raise ValueError(f"scale: {scale!r} is unknown")

    # For equal rewards the formula alone does not give 0, because the mean has a rounding error.
    # Eight rewards of 0.1 in float32 would get advantages of 0.007.
    A = (R - b) / divisor
    return A.masked_fill(equal_rewards(R), 0).view(-1)                  # (N,)


def equal_rewards(R):
    """Which groups have equal rewards: (groups, G) -> (groups, 1) bool.

    Rewards that differ by less than a millionth of their size count as equal, because such
    differences come from rounding.
    """
    if not R.isfinite().all():
        raise ValueError("rewards: all must be finite numbers")
    spread = R.amax(dim=1, keepdim=True) - R.amin(dim=1, keepdim=True)
    return spread <= 1e-6 * R.abs().amax(dim=1, keepdim=True)


def compute_advantages(episodes, cfg):
    """Advantages (N,) of the episodes of whole groups, as cfg says."""
    rewards = torch.tensor([episode["reward"] for episode in episodes], dtype=torch.float64)
    lengths = torch.tensor([sum(episode["mask"]) for episode in episodes])
    if cfg.overlong_buffer > 0:                         # an option, see part 2
        turns = [len(episode["calls"]) for episode in episodes]
        rewards = rewards + overlong_penalty(turns, cfg.max_turns, cfg.overlong_buffer)
    return group_advantages(rewards, cfg.group_size, cfg.baseline, cfg.scale, lengths).float()


# ---- The loss of a token -------------------------------------------------------------------------
# Training is on-policy as long as pi is the policy that sampled. Then -A log pi would do as the
# loss of a token: a step down its gradient is a step along the policy gradient. From the second
# minibatch on, training is off-policy, and the loss is -r A with the token's ratio r, which is
# pi / pi_old. At r = 1 both have the same gradient.
#
# The value of the loss does not tell you how good the policy is. At r = 1 it is -A for each token.
# The advantages of a group add up to 0, so the mean is near 0 whatever the policy does. The norm of
# the gradient is logged instead. It shows whether a step had anything to learn from.


def ppo_policy_loss(logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2):
    """PPO's clipped loss (arXiv 1707.06347), which is also GRPO's, for each token:

        loss = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)

    A token is clipped, and then has no gradient, if r has already gone too far in the direction
    that A pushes. This is what the min is for. In the first minibatch r is 1, so nothing is clipped
    before the second.

                 r < 1 - eps_low    in between     r > 1 + eps_high
        A > 0    gradient           gradient       clipped
        A < 0    clipped            gradient       gradient

    With r = 1.5, a token with A = 1 is clipped and its loss is -1.2. With A = -1 it is not clipped,
    its loss is 1.5, and its gradient brings r down again.

    The clip does not stop r at the bound. It takes the gradient away after r has left the range.
    One step can carry r far past the bound, and then the token itself does not pull it back.

    logp, old_logp (B, T) are log-probabilities of the tokens under pi and pi_old. adv is A, (B,) or
    (B, T). old_logp and adv are constants, so they get no gradient. mask (B, T) is true or 1 on the
    policy's tokens. Whatever stands at other positions, even nan, changes neither the losses nor
    the gradients of these tokens. log r is clamped to +-20, so that exp can't overflow.

    Returns the losses (B, T), and which tokens are clipped (B, T). Raises ValueError for other
    shapes, also for adv (B, 1), because they would broadcast to a wrong result.
    """
    B, T = logp.shape
    if adv.shape == (B,):
        adv = adv[:, None].expand(B, T)
    if not logp.shape == old_logp.shape == adv.shape == mask.shape:
        raise ValueError(f"shapes: {logp.shape}, {old_logp.shape}, {adv.shape}, {mask.shape}")
    A = adv.detach().masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0)
    r = log_r.clamp(-20, 20).exp()
    unbounded = r * A
    bounded = r.clamp(1 - eps_low, 1 + eps_high) * A
    clipped = unbounded > bounded                       # then the loss is constant: no gradient
    return -torch.minimum(unbounded, bounded), clipped


LOSSES = {"token": ppo_policy_loss, **POLICY_LOSSES}    # the others are in variants.py


def policy_loss(logp, old_logp, adv, mask, cfg):
    """The losses of tokens (B, T), and which are clipped, by the function that cfg names."""
    loss = LOSSES[cfg.ratio_level]
    return loss(logp, old_logp, adv, mask, cfg.eps_low, cfg.eps_high)


# ---- From the losses of tokens to one loss -------------------------------------------------------


def token_weights(mask, mode, constant=None):
    """The weight of each token in the loss: (B, T), 0 where the mask is 0.

    The loss is the sum of weight times per-token loss. The modes differ in what is averaged:

                             the loss is the              a token's weight in rows of 2 and 4 tokens
        token_mean           mean over all tokens         1/6   1/6    the same everywhere (DAPO)
        seq_mean_token_mean  mean of the rows' means      1/4   1/8    less in long rows (GRPO)
        seq_mean_token_sum   mean of the rows' sums       1/2   1/2    (RLOO)
        constant             sum / (rows * constant)      1/20  1/20   if constant is 10 (Dr. GRPO)

    The two seq_ modes count only rows that have a token, and constant counts all rows. The constant
    must not change during training. So it can't be T, which differs from batch to batch. The mask
    must be that of the whole minibatch, even if the model is run on parts of it (see rl_update).
    """
    on = (mask != 0).float()                            # (B, T) 1 on the policy's tokens
    n = on.sum(dim=1, keepdim=True).clamp(min=1)        # (B, 1) tokens in each row
    rows = on.any(dim=1).sum().clamp(min=1)             # () rows that have a token
    if mode == "token_mean":
        return on / on.sum().clamp(min=1)
    if mode == "seq_mean_token_mean":
        return on / n / rows
    if mode == "seq_mean_token_sum":
        return on / rows
    if mode == "constant" and (constant or 0) > 0:
        return on / (len(on) * constant)
    raise ValueError(f"agg: {mode!r} is unknown, or agg_constant {constant} is not above 0")


def aggregate_loss(per_token, mask, mode, constant=None):
    """One loss from per-token losses (B, T): the sum of weight times loss.

    rl_update computes the same sum in parts. This function is for code that does not need parts.
    """
    if per_token.shape != mask.shape:
        raise ValueError(f"shapes: {per_token.shape} and {mask.shape} differ")
    weight = token_weights(mask, mode, constant)                        # (B, T)
    return (weight * per_token.masked_fill(mask == 0, 0)).sum()


# ---- The update ----------------------------------------------------------------------------------


def rl_update(model, optimizer, episodes, cfg, generator, ref_model=None):
    """Trains on the episodes of a step. Returns statistics, see update_stats.

    It passes over the episodes cfg.epochs times. Each pass cuts them anew into cfg.minibatches
    minibatches, at random by generator, whose sizes differ by at most one. (A cut may separate the
    attempts of a group, whose advantages are known by then.) For each minibatch it takes an
    optimizer step down the gradient of

        sum of token_weights * policy_loss over the minibatch's policy tokens,
        plus the KL term if cfg.kl_coef > 0, see kl_penalty

    A gradient whose norm is above cfg.max_grad_norm is scaled down to it.

    Without a KL term, rows whose advantage is 0 have no gradient. The model is not run on them, and
    they are not in the statistics, but their tokens count in token_weights. If no row is left, or
    none has a policy token, no step is taken, because Adam's momentum would move the weights even
    with a gradient of 0. Raises FloatingPointError before a step whose gradient is not finite. If
    there are no episodes, all statistics are nan.

    It stores in each episode its `advantage`, and the `weight` that each of its tokens had in the
    loss of the last epoch, one number each, even if no step was taken.
    """
    if not episodes:                                    # an option of part 2 dropped all groups
        return dict.fromkeys(UPDATE_STATS, math.nan)
    batch = make_batch(model, episodes, cfg, ref_model)                 # (N, T) each
    seen, norms = [], []                                # for the statistics
    for _ in range(cfg.epochs):
        order = torch.randperm(len(episodes), generator=generator)
        for rows in order.tensor_split(cfg.minibatches):
            on = batch["mask"][rows]                    # (B, T) the policy's tokens
            batch["weight"][rows] = token_weights(on, cfg.agg, cfg.agg_constant)

            # Leave out rows without a gradient. The weights include their tokens.
            useful = on.any(dim=1)                                      # (B,)
            if cfg.kl_coef == 0:
                useful &= batch["adv"][rows].any(dim=1)
            if not useful.any():
                continue
            to_run = {name: x[rows[useful]] for name, x in batch.items()}

            # The rows are run in parts of similar length, to save padding. Each backward() adds to
            # the gradient. Every token already has its weight in the whole minibatch, and rows do
            # not influence each other. So the gradients of the parts add up to that of the loss. A
            # mean within each part would not.
            optimizer.zero_grad()
            for _, part in similar_lengths(to_run):
                logp = token_logps(model, part, cfg.temperature)        # (b, t) of this part
                per_token, clipped = policy_loss(
                    logp, part["old_logp"], part["adv"], part["mask"], cfg
                )
                loss = (part["weight"] * per_token).sum()
                if cfg.kl_coef > 0:                     # an option, see kl_penalty
                    kl = kl_penalty(logp, part["ref_logp"], cfg.kl_kind)
                    loss = loss + cfg.kl_coef * kl[part["mask"]].sum() / on.sum()
                loss.backward()
                # for update_stats only: log r, clipped and A of each of the policy's tokens
                log_r = logp.detach() - part["old_logp"]
                seen.append([x[part["mask"]] for x in (log_r, clipped, part["adv"])])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            if not norm.isfinite():
                raise FloatingPointError(f"the gradient is {norm}: try a lower lr")
            optimizer.step()
            norms.append(norm.item())
    for i, episode in enumerate(episodes):
        episode["advantage"] = batch["adv"][i, 0].item()
        episode["weight"] = batch["weight"][i].max().item()     # 0 at other tokens
    return update_stats(batch, seen, norms, cfg)


def make_batch(model, episodes, cfg, ref_model):
    """All that an update needs to know about its episodes: a dict of tensors (N, T)."""
    if ref_model is model:
        raise ValueError("ref_model: a policy's distance from itself is always 0")
    batch = collate(episodes)
    A = compute_advantages(episodes, cfg)                               # (N,)
    batch["adv"] = A[:, None].expand(batch["ids"].shape)    # (N, T) like all the others
    batch["weight"] = torch.zeros(batch["ids"].shape)   # rl_update fills it in
    if cfg.mask_truncated:
        # Truncated episodes count for the baseline of their group, but not in the loss.
        kept = torch.tensor([not episode["env"].truncated for episode in episodes])
        batch["mask"] = batch["mask"] & kept[:, None]
    # No step has been taken yet, so the model is still pi_old. Its log-probabilities are computed
    # again, by the function that computes pi. Those of the sampler differ a little, because
    # computing with a cache rounds differently, and r should start at 1.
    batch["old_logp"], batch["entropy"] = frozen_logps(model, batch, cfg.temperature)
    if ref_model is not None:
        batch["ref_logp"], _ = frozen_logps(ref_model, batch, cfg.temperature)
    return batch


# ---- The loop ------------------------------------------------------------------------------------


def train_rl(
    model, tok, cfg, train_tasks,
    eval_tasks=None, ref_model=None, env_factory=None, on_step=None,
):
    """Trains model in place. Returns the history, a list with a dict for each step:

        step, and behavior_stats of all sampled episodes
        episodes                                how many were sampled
        tokens                                  all their tokens, policy's and environment's
        zero_adv_frac, all_passed, all_failed   shares of groups: equal rewards; all pass; all fail
        UPDATE_STATS                            see update_stats
        eval_pass_rate                          on eval_tasks, nan in steps without an evaluation
        sec_sample, sec_update                  seconds

    ref_model is the reference of the KL term, by default a copy of the untrained model.
    env_factory(task, cfg, rng) makes an environment. on_step(row, episodes) is called after each
    step. row is the dict of the step, to which on_step may add. episodes are those that were
    trained on.
    """
    check_config(cfg, len(train_tasks))
    if cfg.kl_coef > 0 and ref_model is None:
        ref_model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))     # lr is set below
    changes = 0                                 # steps of this loop that changed the model
    history = []
    for step in range(cfg.steps):
        start = time.perf_counter()
        generator = step_generator(cfg.seed, step)
        if cfg.dynamic_sampling or cfg.filter_zero_adv:     # options, see part 2
            kept, sampled = sample_step(model, tok, cfg, train_tasks, generator, env_factory)
        else:
            kept = sampled = sample_batch(model, tok, cfg, train_tasks, generator, env_factory)
        sampled_at = time.perf_counter()

        # The warmup counts only steps that changed the model.
        warmup = min(1, (changes + 1) / max(1, cfg.warmup_steps))
        optimizer.param_groups[0]["lr"] = cfg.lr * warmup
        update = rl_update(model, optimizer, kept, cfg, generator, ref_model)
        if update["grad_norm"] > 0:
            changes += 1
        updated_at = time.perf_counter()

        row = {
            "step": step,
            **behavior_stats(sampled),
            **group_stats(sampled, cfg),
            **update,
            "eval_pass_rate": math.nan,
            "sec_sample": sampled_at - start,
            "sec_update": updated_at - sampled_at,
        }
        last = step == cfg.steps - 1
        if eval_tasks and cfg.eval_every > 0 and (last or step % cfg.eval_every == 0):
            stats = evaluate(model, tok, eval_tasks, cfg.eval_samples, cfg, env_factory)
            row["eval_pass_rate"] = stats["pass_rate"]
        history.append(row)
        if on_step:
            on_step(row, kept)
    return history


def evaluate(model, tok, tasks, n_samples, cfg, env_factory=None):
    """behavior_stats of n_samples episodes of each task. cfg.seed alone decides the randomness."""
    generator = step_generator(cfg.seed, -1)            # no training step has the number -1
    return behavior_stats(
        sample_groups(model, tok, tasks, n_samples, cfg, generator, env_factory)
    )


# ==================================================================================================
# Part 2. Options that the variants use
# ==================================================================================================


def split_groups(episodes, cfg):
    """The groups of a list of episodes."""
    G = cfg.group_size
    return [episodes[i:i + G] for i in range(0, len(episodes), G)]


def zero_advantage(group):
    """True if the rewards of a group are equal (before any overlong penalty)."""
    rewards = [episode["reward"] for episode in group]
    return bool(equal_rewards(torch.tensor([rewards], dtype=torch.float64)))


def sample_step(model, tok, cfg, train_tasks, generator, env_factory=None):
    """The episodes of one step with groups of equal rewards left out: (kept, sampled).

    kept are trained on, sampled are all that were played. Dynamic sampling (DAPO, arXiv 2503.14476)
    samples more tasks until the batch is full again. After max_sample_rounds it trains on what it
    has, because otherwise it might sample forever. filter_zero_adv replaces nothing.
    """
    rng = python_rng(generator)
    P, G = cfg.prompts_per_step, cfg.group_size
    rounds = cfg.max_sample_rounds if cfg.dynamic_sampling else 1
    order = []                                          # all tasks, shuffled, as often as needed
    while len(order) < rounds * P:
        order += rng.sample(train_tasks, len(train_tasks))
    kept, sampled = [], []
    for i in range(0, rounds * P, P):
        episodes = sample_groups(model, tok, order[i:i + P], G, cfg, generator, env_factory)
        sampled += episodes
        for group in split_groups(episodes, cfg):
            if not zero_advantage(group):
                kept += group
        if len(kept) >= P * G:
            break
    return kept[:P * G], sampled


def overlong_penalty(turns, max_turns, buffer):
    """Penalty for long episodes (DAPO, arXiv 2503.14476), counted in turns: (N,) -> (N,).

    It is 0 up to max_turns - buffer, falls linearly to -1 at max_turns, and is never lower.
    """
    turns = torch.as_tensor(turns)
    if buffer == 0:
        return torch.zeros(turns.shape)
    over = turns - (max_turns - buffer)
    return -(over / buffer).clamp(0, 1)


def kl_penalty(logp, ref_logp, kind):
    """Estimates of KL(pi || ref) at tokens that pi sampled. logp, ref_logp (B, T) -> (B, T).

    The Kullback-Leibler divergence says how far pi is from a reference policy, which is frozen.
    Here it compares distributions of the next token: it is the expectation of log(pi / ref) over
    tokens that pi samples. With l = log(ref / pi):

        k1 = -l              unbiased. Negative on some tokens, which is normal
        k2 = l^2 / 2         slightly biased, never negative
        k3 = e^l - 1 - l     unbiased, never negative if computed with expm1. DeepSeekMath's choice

    k3 is k1 + (e^l - 1). It is unbiased because k1 is, and because e^l - 1 has the expectation 0:
    e^l is ref / pi, so its expectation is the sum of pi * (ref / pi) over all tokens. This is the
    sum of ref, which is 1.

    A good estimate can be a bad loss. The KL depends on the weights in two ways: through the
    estimate, and through which tokens pi samples. backward() sees only the first. So even an
    unbiased estimate can have a different gradient from the KL's. Here g is grad log pi, so -g is
    grad l:

              gradient       its expectation over tokens that pi samples
        k1    g              0, so as a loss it only adds noise
        k2    -l g           the gradient of KL(pi || ref)
        k3    (1 - e^l) g    the gradient of KL(ref || pi)

    k2: grad KL(pi || ref) = grad of the sum of pi * (-l)
                           = sum of (grad pi) * (-l) + sum of pi * g      since grad (-l) = g
                           = sum of pi * (-l g) + 0                       since grad pi = pi * g
    k3: g alone has the expectation 0. Since pi e^l = ref, the expectation of -e^l g is the sum of
    -ref * grad log pi. This is the gradient of KL(ref || pi), the sum of ref * log(ref / pi).

    From the second minibatch on, pi_old made the tokens. Then all of this is only approximate.

    ref_logp gets no gradient. l is clamped to +-20, so that exp can't overflow. Raises ValueError
    for another kind, and for shapes that differ.

    The KL term of the loss is kl_coef times the mean of the estimates over the minibatch's policy
    tokens, whatever cfg.agg is. The trainers TRL and verl average it as they average the loss.
    """
    if logp.shape != ref_logp.shape:
        raise ValueError(f"shapes: {logp.shape} and {ref_logp.shape} differ")
    l = (ref_logp.detach() - logp).clamp(-20, 20)
    if kind == "k1":
        return -l
    if kind == "k2":
        return l ** 2 / 2
    if kind == "k3":
        # in float32, l.exp() - 1 - l is negative for about a third of small values of l
        return torch.expm1(l) - l
    raise ValueError(f"kl_kind: {kind!r} is unknown")


# ==================================================================================================
# Part 3. What a run does
# ==================================================================================================

# ---- Statistics ----------------------------------------------------------------------------------

UPDATE_STATS = (
    "clip_frac", "approx_kl", "ratio_min", "ratio_max", "logratio_pos", "logratio_neg",
    "entropy", "grad_norm", "kl_ref", "logp_gap",
)


def update_stats(batch, seen, norms, cfg):
    """What rl_update did, as a dict of numbers. nan where there is nothing to measure.

    seen has log r, clipped and A of the policy's tokens in each part. norms has the norm of each
    step's gradient.

    These are measured on the tokens that the model was run on. Without a KL term, they are the
    policy's tokens in episodes whose advantage is not 0:

        ratio_min, ratio_max         the smallest and the largest ratio
        logratio_pos, logratio_neg   the mean of log r where A > 0, and where A < 0
        approx_kl                    how far pi has moved from pi_old: the mean of r - 1 - log r.
                                     The tokens are pi_old's, so this is k3 with pi_old in the
                                     place of pi, and pi in that of ref: KL(pi_old || pi)

    Each minibatch is measured just before its own step. So the ratios of the first are 1 (up to
    rounding), and what the last step does is not seen.

    These are measured on all the policy's tokens of the batch:

        clip_frac    the share that was clipped
        entropy      of the policy that sampled, in nats: how undecided it was
        kl_ref       an estimate of KL(pi_old || reference), see kl_penalty
        logp_gap     the largest difference between the sampler's and the trainer's log-probability

    grad_norm is the mean norm of the gradients before they were scaled down. It is 0 if there were
    episodes but no step was taken.
    """
    on = batch["mask"]
    stats = dict.fromkeys(UPDATE_STATS, math.nan)
    stats["grad_norm"] = 0
    if on.any():
        stats["clip_frac"] = 0
        stats["entropy"] = batch["entropy"][on].mean()
        stats["logp_gap"] = (batch["old_logp"] - batch["logps"])[on].abs().max()
        if "ref_logp" in batch:
            kl = kl_penalty(batch["old_logp"], batch["ref_logp"], cfg.kl_kind)
            stats["kl_ref"] = kl[on].mean()
    if norms:
        # join the parts: (tokens,) each
        log_r, clipped, A = (torch.cat(parts) for parts in zip(*seen))
        stats.update(
            grad_norm=mean(norms),
            clip_frac=clipped.sum() / (cfg.epochs * on.sum()),
            approx_kl=(torch.expm1(log_r) - log_r).mean(),
            ratio_min=log_r.min().exp(),
            ratio_max=log_r.max().exp(),
            logratio_pos=log_r[A > 0].mean(),
            logratio_neg=log_r[A < 0].mean(),
        )
    return {name: float(value) for name, value in stats.items()}


def group_stats(episodes, cfg):
    """Counts of the episodes of a step, and the shares of its groups with equal rewards."""
    groups = split_groups(episodes, cfg)
    n = len(groups)
    rates = [behavior_stats(group)["pass_rate"] for group in groups if zero_advantage(group)]
    known = math.nan if math.isnan(sum(rates)) else n   # nan if an environment has no `passed`
    return {
        "episodes": len(episodes),
        "tokens": sum(len(episode["ids"]) for episode in episodes),
        "zero_adv_frac": len(rates) / n,
        "all_passed": rates.count(1) / known,
        "all_failed": rates.count(0) / known,
    }


# ---- Tables --------------------------------------------------------------------------------------

PROGRESS = "step reward  read 1st  1st right  entropy  clip  zero adv  held-out"


def progress_line(row):
    """The numbers of a step, below the headings of PROGRESS. Shows nan as "-"."""
    return (
        f"{row['step']:4}{row['reward']:7.3f}{row['read_first']:10.3f}"
        f"{row['first_edit_right']:11.3f}{row['entropy']:9.3f}{row['clip_frac']:6.3f}"
        f"{row['zero_adv_frac']:10.3f}{row['eval_pass_rate']:10.3f}"
    ).replace("nan", "  -")


OUTCOME = "pass rate  read 1st  1st right  reads  tests  edits  turns  tokens  truncated"


def outcome_line(stats):
    """What an agent did, below the headings of OUTCOME. Shows nan as "-"."""
    return (
        f"{stats['pass_rate']:9.3f}{stats['read_first']:10.3f}{stats['first_edit_right']:11.3f}"
        f"{stats['reads']:7.2f}{stats['tests']:7.2f}{stats['edits']:7.2f}{stats['turns']:7.2f}"
        f"{stats['policy_tokens']:8.2f}{stats['truncated']:11.3f}"
    ).replace("nan", "  -")


def show_group(step, episodes, model, tok, cfg):
    """Prints one group of a step, and what the update did to its best and its worst attempt."""
    groups = [group for group in split_groups(episodes, cfg) if not zero_advantage(group)]
    if not groups:
        print(f"\nstep {step}: the rewards are equal within every group\n")
        return
    group = groups[0]
    print(f"\nstep {step}: one group after the update (each attempt has another function name)")
    print(transcript(BugFixEnv(group[0]["env"].task), [["read"]]))
    print("\nattempt  reward  advantage  weight of a token  calls")
    for i, e in enumerate(group):
        numbers = f"{i:7}{e['reward']:8.2f}{e['advantage']:+11.2f}{e['weight']:19.5f}"
        print(f"{numbers}  {calls_text(e['calls'])}")

    batch = collate(group)
    A = torch.tensor([episode["advantage"] for episode in group])       # (G,)
    before = batch["logps"]                             # (G, T) the sampler's, almost pi_old
    after, _ = frozen_logps(model, batch, cfg.temperature)              # (G, T)
    # the tokens that would be clipped if another step followed
    _, clipped = policy_loss(after, before, A, batch["mask"], cfg)
    for i in (int(A.argmax()), int(A.argmin())):
        print(f"\nattempt {i}, advantage {A[i]:+.2f}")
        print("  token         before   after   ratio")
        words = decode(tok, group[i]["ids"])
        mask = group[i]["mask"]
        # stretches of words by the same speaker
        for sampled, places in groupby(range(len(words)), key=lambda t: mask[t]):
            if not sampled:
                text = " ".join(words[t] for t in places)
                print("  not trained on:", text.replace("\n", "\\n"))
                continue
            for t in places:
                p, q = before[i, t].exp(), after[i, t].exp()
                note = "  clipped" if clipped[i, t] else ""
                print(f"  {words[t]:12}{p:8.3f}{q:8.3f}{q / p:8.3f}{note}")
    print()


def print_outcome(before, after, tok, cfg):
    """Plays with two policies, before and after training, and prints what they do."""
    print(f"\n{'':24}{OUTCOME}")
    played = {}
    for when, model in (("before", before), ("after", after)):
        for label, tasks in (("training tasks", TRAIN_TASKS), ("held-out tasks", HELDOUT_TASKS)):
            episodes = sample_groups(model, tok, tasks, 16, cfg, step_generator(cfg.seed, -1))
            print(f"{when + ', ' + label:24}{outcome_line(behavior_stats(episodes))}")
        played[when] = episodes                         # those on the held-out tasks, the last

    # An example: the first of the attempts before training that failed in the most common way. Then
    # the attempt with the same index after training. It is at the same task.
    failed = [episode for episode in played["before"] if not episode["env"].passed]
    example = played["before"].index(most_common(failed or played["before"]))
    for when, episodes in played.items():
        env = make_env(episodes[example]["env"].task, cfg, None)
        print(f"\n{when}, on a held-out task")
        print(transcript(env, episodes[example]["calls"]))


# ==================================================================================================
# Part 4. Command line. Nothing from here on is about GRPO.
# ==================================================================================================
# ---- Command line --------------------------------------------------------------------------------

CHOICES = {
    "baseline": ("group_mean", "leave_one_out", "length_weighted"),
    "scale": ("group_std", "none", "batch_std", "group_mean"),
    "ratio_level": tuple(LOSSES),
    "agg": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"),
    "kl_kind": ("k1", "k2", "k3"),
}


LOWEST = {
    # field -> its smallest value
    "steps": 0,
    "prompts_per_step": 1,
    "group_size": 2,
    "minibatches": 1,
    "epochs": 1,
    "eps_low": 0,
    "eps_high": 0,
    "seed": 0,
    "warmup_steps": 0,
    "max_turns": 1,
    "eval_every": 0,
    "eval_samples": 1,
    "kl_coef": 0,
    "max_sample_rounds": 1,
    "overlong_buffer": 0,
}


def check_config(cfg, n_tasks=math.inf):
    """Raises ValueError for the first setting that makes no sense, with its name and value."""
    episodes = cfg.prompts_per_step * cfg.group_size
    has_constant = cfg.agg != "constant" or (cfg.agg_constant or 0) > 0
    may_be_negative = cfg.scale == "group_mean" and cfg.overlong_buffer > 0
    both_filters = cfg.filter_zero_adv and cfg.dynamic_sampling
    rules = [
        # field, whether it makes sense, what is required
        ("prompts_per_step", cfg.prompts_per_step <= n_tasks, f"at most {n_tasks} (tasks)"),
        ("minibatches", cfg.minibatches <= episodes, f"at most {episodes} (episodes)"),
        ("eps_low", cfg.eps_low <= 1, "at most 1"),
        ("lr", cfg.lr > 0, "greater than 0"),
        ("temperature", cfg.temperature > 0, "greater than 0"),
        ("seed", cfg.seed < 2 ** 32, "below 2^32"),
        ("max_grad_norm", cfg.max_grad_norm > 0, "greater than 0"),
        ("max_edits", (cfg.max_edits or 0) >= 0, "none, or at least 0"),
        ("agg_constant", has_constant, "greater than 0 with agg constant"),
        ("overlong_buffer", cfg.overlong_buffer <= cfg.max_turns, "at most max_turns"),
        ("overlong_buffer", not may_be_negative, "0 with scale group_mean: rewards must be >= 0"),
        ("filter_zero_adv", not both_filters, "false with dynamic_sampling, which does more"),
    ]
    for name, lowest in LOWEST.items():
        rules.append((name, getattr(cfg, name) >= lowest, f"at least {lowest}"))
    for name, allowed in CHOICES.items():
        rules.append((name, getattr(cfg, name) in allowed, f"one of {', '.join(allowed)}"))
    for name, holds, required in rules:
        if not holds:
            raise ValueError(f"{name}: {getattr(cfg, name)!r} must be {required}")


def true_or_false(text):
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def int_or_none(text):
    return None if text == "none" else int(text)


def add_config_flags(parser):
    """Adds a flag for each field. Flags that are not given are left out of args."""
    # the types int, float and str can be used as they are
    kinds = {bool: true_or_false, Optional[int]: int_or_none, Optional[float]: float}
    for field in fields(RLConfig):
        if field.name != "reward":
            parser.add_argument(
                f"--{field.name}",
                type=kinds.get(field.type, field.type),
                metavar="X",
                default=argparse.SUPPRESS,
                help=f"see RLConfig, default {field.default}",
            )


def config_from(parser, settings):
    """The RLConfig with these fields. Ends the script if it makes no sense."""
    cfg = RLConfig(**settings)
    try:
        check_config(cfg, len(TRAIN_TASKS))
    except ValueError as error:
        parser.error(f"argument --{error}")
    return cfg


def savable(path):
    """The path, if a policy can be saved there. It is better to fail now than after training."""
    try:
        open(part_file(path), "ab").close()
        os.remove(part_file(path))
    except OSError as error:
        raise argparse.ArgumentTypeError(error)
    return path


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="grpo.py [-h] [--FLAG X] ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--variant", choices=VARIANTS, default="default", metavar="NAME", help="a preset")
    flag("--base", choices=("rl", "plain"), default="rl", help="the base agent")
    flag("--init", metavar="FILE", help="start from a policy that --save wrote")
    flag("--save", metavar="FILE", type=savable, help="write the trained policy")
    flag("--log", metavar="FILE", type=argparse.FileType("a"), help="append the history")
    flag("--show", type=int, default=0, metavar="N", help="show one group every N steps")
    flag("--threads", type=int, default=1, choices=range(1, 65), metavar="N", help="1 to 64")
    add_config_flags(parser)
    args = parser.parse_args()
    # the flags that are fields of RLConfig
    given = {name: x for name, x in vars(args).items() if name in vars(RLConfig())}
    cfg = config_from(parser, {**VARIANTS[args.variant], **given})
    torch.set_num_threads(args.threads)
    tok = build_tokenizer()
    try:
        model = load_policy(tok, args.init) if args.init else None
    except Exception as error:                  # the wrong kind of file can raise almost any
        parser.error(f"argument --init: {args.init} can't be loaded: {error!r:.60}")
    train(args, cfg, tok, model)


def train(args, cfg, tok, model):
    """Trains and prints. Saves the policy, if --save is given, however the training ends."""
    if model is None:
        print(f"making the base agent ({args.base}) by imitation", flush=True)
        make = make_rl_base if args.base == "rl" else make_base_agent
        model = make(tok, cfg.seed)
    base = copy.deepcopy(model)
    idle = 0                                    # steps without a gradient, in a row

    def write(record):
        if args.log:                            # JSON has no nan, so null stands for it
            line = {key: None if x != x else x for key, x in record.items()}
            print(json.dumps(line), file=args.log, flush=True)

    def on_step(row, episodes):
        nonlocal idle
        write(row)
        print(f"{progress_line(row)} {picture(row)}", flush=True)
        if args.show > 0 and row["step"] % args.show == 0:
            show_group(row["step"], episodes, model, tok, cfg)
        idle = 0 if row["grad_norm"] > 0 else idle + 1
        if idle == 10:
            print("ten steps without a gradient: the rewards are equal within every group")

    config = asdict(cfg)
    config["max_grad_norm"] = str(cfg.max_grad_norm)    # JSON has no infinity either
    write({"config": config, "variant": args.variant, "base": args.init or args.base})
    print(PICTURE)
    print(PROGRESS, flush=True)
    # A termination signal, or a closed terminal, ends the training like Ctrl-C
    stop = signal.default_int_handler
    signal.signal(signal.SIGTERM, stop)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stop)      # under nohup it stays ignored
    try:
        train_rl(model, tok, cfg, TRAIN_TASKS, HELDOUT_TASKS, on_step=on_step)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if args.save:
            save_policy(model, tok, asdict(cfg), args.save)
    print_outcome(base, model, tok, cfg)


if __name__ == "__main__":
    main()
