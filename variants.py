"""Variants of GRPO: six more losses, fourteen published presets, and their use in other trainers.

Read grpo.py first. It has GRPO's own loss and the loop that all variants share. This file needs
only torch. A preset changes the objective as its paper does. Group sizes, learning rates, models
and data differ from those of the papers, so a preset is a starting point for experiments and not a
reproduction.

    python variants.py                             list the presets and what each is for
    python variants.py dr_grpo                     all about one
    python variants.py dr_grpo --trl               print a program that trains a chat model with TRL
    python variants.py dr_grpo --verl              print the settings for verl
    python grpo.py --variant dr_grpo               train with one
    python ablate.py variants                      train with all of them and compare
"""
import argparse
import textwrap

import torch

# ---- The losses ----------------------------------------------------------------------------------
# r = pi / pi_old is the ratio of a token, and A is the advantage of its episode. Summed over the
# tokens of an episode, each of the seven losses has a gradient of the form
#
#     sum of -A * weight * grad log pi
#
# While pi is pi_old, every weight is 1, so all seven do the same. They differ in the weight that a
# token gets after pi has moved. The last column has the weights of three tokens with A > 0 and the
# ratios 8, 1, 1, for the clip ranges of the presets:
#
#     ratio_level  loss    weight                        no gradient once this      example
#                                                        has left its range *
#     token        PPO     r                             r                          0    1    1
#     sequence     GSPO    s = exp(mean of log r)        s                          0    0    0
#     cispo        CISPO   r, clipped to its range       -                          1.2  1    1
#     gmpo         GMPO    exp(mean of clipped log r)    log r                      0    1.1  1.1
#     sapo         SAPO    4 g (1 - g) r                 -                          0.03 1    1
#     dppo         DPPO    r, at most 20                 pi - pi_old                8 ** 1    1
#     none         GPG     1                             -                          1    1    1
#
#     *   on the side to which A pushes
#     **  if pi_old was below 0.0214: then pi - pi_old, which is 7 pi_old, is below 0.15. Else 0
#
# Means are over the episode's n tokens. g is sigmoid(tau (r - 1)), and tau is about 1. GSPO and
# GMPO compute one value for an episode and return it n times, once for each of its tokens. The
# gradient of this value reaches all n tokens, each with 1/n of the weight in the table. The n
# returned values together give each token the whole weight. Below, sg(x) is x without its gradient.
#
# All of them have the arguments and results of ppo_policy_loss in grpo.py. The second result marks
# the tokens that the clip leaves without a gradient (for CISPO: would leave). To copy a loss, copy
# prepare, safe_exp and episode_mean with it.


def prepare(logp, old_logp, adv, mask):
    """Returns A and log r, (B, T) each, without a gradient through A, and 0 where the mask is 0.

    logp, old_logp (B, T) are log-probabilities of the tokens under pi and pi_old. adv is (B,), one
    advantage for an episode, or (B, T), one for a token. mask (B, T) is true or 1 on the policy's
    tokens. Raises ValueError for other shapes.
    """
    B, T = logp.shape
    if adv.shape == (B,):
        adv = adv[:, None].expand(B, T)
    if not logp.shape == old_logp.shape == adv.shape == mask.shape:
        raise ValueError(f"shapes: {logp.shape}, {old_logp.shape}, {adv.shape}, {mask.shape}")
    A = adv.detach().masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0)
    return A, log_r


def safe_exp(log_r):
    """exp(log_r), with log_r clamped so that it can't overflow."""
    return log_r.clamp(-20, 20).exp()


def episode_mean(x, mask):
    """The mean of x (B, T) over each row's tokens: (B, 1). x must be 0 where the mask is 0."""
    n = (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)               # (B, 1)
    return x.sum(dim=1, keepdim=True) / n


def gspo_policy_loss(logp, old_logp, adv, mask, eps_low=3e-4, eps_high=4e-4):
    """GSPO (arXiv 2507.18071): one ratio s, one weight and one clip decision for a whole episode.

        s = exp(mean of log r over the episode's tokens)
        loss = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)

    s is the geometric mean of the tokens' ratios. The episode's true ratio is their product, which
    would leave the clip range just because an episode is long. If s is clipped, no token of the
    episode has a gradient. Aggregate with seq_mean_token_mean, as the paper does, or weight the
    episodes by their lengths with seq_mean_token_sum (LUSPO).
    """
    A, log_r = prepare(logp, old_logp, adv, mask)
    s = safe_exp(episode_mean(log_r, mask))                             # (B, 1)
    unbounded = s * A
    bounded = s.clamp(1 - eps_low, 1 + eps_high) * A
    return -torch.minimum(unbounded, bounded), unbounded > bounded


def cispo_policy_loss(logp, old_logp, adv, mask, eps_low=1.0, eps_high=0.2):
    """CISPO (MiniMax-M1, arXiv 2506.13585): clips the factor in front of log pi.

        loss = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi

    So the tokens that lose their gradient to PPO's clip keep it here. With eps_low = 1 there is no
    lower bound, as in the paper. The second result marks the tokens that PPO would have clipped
    with the same bounds.
    """
    A, log_r = prepare(logp, old_logp, adv, mask)
    r = safe_exp(log_r.detach())
    weight = r.clamp(1 - eps_low, 1 + eps_high)
    return -weight * A * logp, r * A > weight * A


def gmpo_policy_loss(logp, old_logp, adv, mask, eps_low=0.4, eps_high=0.4):
    """GMPO (arXiv 2507.20673): the geometric mean of an episode's clipped ratios.

        m = min(log r, eps_high) where A > 0, and max(log r, -eps_low) where A < 0
        loss = -A exp(mean of m over the episode's tokens)

    eps_low and eps_high bound log r, not r. Only the clipped tokens lose their gradient, and the
    others keep it. The paper prefers the geometric mean because a single large ratio changes it
    less than it would change an arithmetic mean. Aggregate with seq_mean_token_mean, as the paper
    does.
    """
    A, log_r = prepare(logp, old_logp, adv, mask)
    too_high = (A > 0) & (log_r > eps_high)
    too_low = (A < 0) & (log_r < -eps_low)
    m = log_r.masked_fill(too_high, eps_high).masked_fill(too_low, -eps_low)
    return -(A * safe_exp(episode_mean(m, mask))), too_high | too_low


def sapo_policy_loss(logp, old_logp, adv, mask, eps_low=0, eps_high=0, tau_pos=1.0, tau_neg=1.05):
    """SAPO (arXiv 2511.20347): a soft gate instead of a clip.

        loss = -(4 / tau) sigmoid(tau (r - 1)) A      tau = tau_pos where A > 0, else tau_neg

    A token's weight is 4 g (1 - g) r with the gate g = sigmoid(tau (r - 1)). The factor 4 g (1 - g)
    is 1 at r = 1 and fades on both sides, a little sooner where A < 0. It fades slowly: at r = 1.2
    it is still 0.99. eps_low and eps_high are not used, and no token counts as clipped.
    """
    A, log_r = prepare(logp, old_logp, adv, mask)
    tau = torch.where(A > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (safe_exp(log_r) - 1))
    return -4 / tau * gate * A, torch.zeros_like(mask, dtype=torch.bool)


def dppo_policy_loss(logp, old_logp, adv, mask, eps_low=0.15, eps_high=0.15):
    """DPPO (arXiv 2602.04879): drops tokens whose probability has already moved too far.

        loss = -sg(min(r, 20)) A log pi
        but 0 where A > 0 and pi - pi_old > eps_high, or A < 0 and pi - pi_old < -eps_low

    So with A > 0, a token that went from 0.01 to 0.15 is still pushed up, but one that went from
    0.8 to 0.96 is not. A dropped token gets no further push, and nothing brings it back within eps
    either. It still counts as a token in the aggregation.
    """
    A, log_r = prepare(logp, old_logp, adv, mask)
    moved = (logp.exp() - old_logp.exp()).detach()
    too_high = (A > 0) & (moved > eps_high)
    too_low = (A < 0) & (moved < -eps_low)
    dropped = too_high | too_low
    weight = safe_exp(log_r.detach()).clamp(max=20)
    return (-weight * A * logp).masked_fill(dropped, 0), dropped


def pg_policy_loss(logp, old_logp, adv, mask, eps_low=0, eps_high=0):
    """The plain policy gradient (REINFORCE, and GPG, arXiv 2504.02546): -A log pi.

    old_logp, eps_low and eps_high are not used, and no token counts as clipped.
    """
    A, _ = prepare(logp, old_logp, adv, mask)
    return -(A * logp), torch.zeros_like(mask, dtype=torch.bool)


# RLConfig.ratio_level -> loss. GRPO's own, "token", is in grpo.py.
POLICY_LOSSES = {
    "sequence": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "gmpo": gmpo_policy_loss,
    "sapo": sapo_policy_loss,
    "dppo": dppo_policy_loss,
    "none": pg_policy_loss,
}


# ---- The presets ---------------------------------------------------------------------------------
# Plain dicts of RLConfig fields: RLConfig(**VARIANTS["gspo"]) is a preset's configuration. The dict
# GRPO has the objective of DeepSeekMath, and NO_KL is GRPO without the KL term.

GRPO = dict(agg="seq_mean_token_mean", kl_coef=0.04, kl_kind="k3")
NO_KL = dict(GRPO, kl_coef=0.0)

VARIANTS = {
    "default": dict(NO_KL, agg="token_mean"),
    "grpo": GRPO,
    # an episode has at most 24 policy tokens: 6 calls of 4
    "dr_grpo": dict(NO_KL, scale="none", agg="constant", agg_constant=24.0),
    "dapo": dict(
        NO_KL, eps_high=0.28, agg="token_mean", dynamic_sampling=True, overlong_buffer=2
    ),
    # with one update on each batch, r stays 1 and nothing is clipped
    "rloo": dict(
        NO_KL, baseline="leave_one_out", scale="none", minibatches=1, agg="seq_mean_token_sum"
    ),
    "gspo": dict(NO_KL, ratio_level="sequence", eps_low=3e-4, eps_high=4e-4),
    "cispo": dict(NO_KL, ratio_level="cispo", eps_low=1.0, agg="token_mean"),
    "gmpo": dict(NO_KL, ratio_level="gmpo", eps_low=0.4, eps_high=0.4),
    "sapo": dict(NO_KL, ratio_level="sapo"),
    "luspo": dict(
        NO_KL, ratio_level="sequence", eps_low=2e-3, eps_high=2.5e-3, agg="seq_mean_token_sum"
    ),
    "lite_ppo": dict(NO_KL, scale="batch_std", agg="token_mean"),
    # Without a ratio, nothing would correct for a second minibatch, which is off-policy. So the
    # next three make one update on each batch, too.
    "gpg": dict(
        NO_KL, ratio_level="none", scale="none", minibatches=1, filter_zero_adv=True,
        agg="token_mean",
    ),
    "opo": dict(
        NO_KL, ratio_level="none", baseline="length_weighted", scale="none", minibatches=1,
        agg="seq_mean_token_sum",
    ),
    "maxrl": dict(
        NO_KL, ratio_level="none", scale="group_mean", minibatches=1, agg="token_mean"
    ),
    "dppo": dict(NO_KL, ratio_level="dppo", eps_low=0.15, eps_high=0.15, agg="token_mean"),
}

ABOUT = {
    # name -> where it comes from, what it is for
    "default": (
        "this project",
        "GRPO with the same weight for every token and without a reference policy.",
    ),
    "grpo": (
        "DeepSeekMath, arXiv 2402.03300, 02/24",
        "The first: the mean reward of a group replaces the critic. The paper has groups "
        "of 64 and one update per batch. Here groups have 8, and there are two updates.",
    ),
    "dr_grpo": (
        "Dr. GRPO, arXiv 2503.20783, 03/25",
        "Removes two biases: dividing by the length spares long failures, and "
        "dividing by the standard deviation favours very easy and very hard tasks.",
    ),
    "dapo": (
        "DAPO, arXiv 2503.14476, 03/25",
        "A higher upper bound, groups without a gradient replaced, a mean over all "
        "tokens, and a penalty for long episodes (counted in turns).",
    ),
    "rloo": (
        "RLOO, arXiv 2402.14740, 02/24",
        "REINFORCE with the mean of the other attempts as baseline. The whole episode is "
        "one action, so its tokens are summed. With one update, r stays 1: it never clips.",
    ),
    "gspo": (
        "GSPO, arXiv 2507.18071, 07/25",
        "An episode has one reward, so it has one ratio as well. Ratios of single tokens "
        "are too noisy. The clip range is the paper's, for outputs of thousands of "
        "tokens. Here it clips much more, because a mean over few tokens is noisier.",
    ),
    "cispo": (
        "CISPO (MiniMax-M1), arXiv 2506.13585, 06/25",
        "Clips the weight, so that rare but decisive tokens keep a gradient. The paper "
        "tunes the upper bound and names no value. Here eps_high is 0.2.",
    ),
    "gmpo": (
        "GMPO, arXiv 2507.20673, 07/25",
        "A geometric mean of the token ratios, for which a single large ratio counts less "
        "than for an arithmetic mean, and a wider clip range.",
    ),
    "sapo": (
        "SAPO, arXiv 2511.20347, 11/25",
        "A soft gate instead of the hard clip. It closes a little sooner for negative "
        "advantages.",
    ),
    "luspo": (
        "LUSPO, arXiv 2602.05261, 02/26",
        "GSPO with each episode weighted by its length. Without that, a token counts less "
        "in a long episode than in a short one.",
    ),
    "lite_ppo": (
        "Lite PPO, arXiv 2508.08221, 08/25",
        "Subtracts the group's mean, divides by the standard deviation of the whole "
        "batch, takes a mean over all tokens, and nothing else.",
    ),
    "gpg": (
        "GPG, arXiv 2504.02546, 04/25",
        "The plain policy gradient with a group baseline. The paper scales the loss up to "
        "compensate for groups without a gradient. Here they are left out instead.",
    ),
    "opo": (
        "OPO, arXiv 2505.23585, 05/25",
        "Strictly on-policy. The baseline is the one with the least noisy gradient, if the "
        "squared norm of an episode's gradient grows in proportion to its length. That "
        "fits a gradient summed over tokens, so the loss is a sum over tokens.",
    ),
    "maxrl": (
        "MaxRL, arXiv 2602.02710, 02/26",
        "Divides by the mean reward. With large groups it maximizes the mean over tasks of "
        "log(pass rate), where others maximize the mean pass rate: rare successes weigh more.",
    ),
    "dppo": (
        "DPPO, arXiv 2602.04879, 02/26",
        "Limits how far a probability moves, not its ratio: rare tokens may move by large "
        "ratios, but likely ones may not.",
    ),
}


# ---- The same in other trainers ------------------------------------------------------------------
# For each preset: a verdict, and the fields of TRL 1.16.0 and verl 0.9.1 that do the same. All
# other fields are those of TRL_BASE and VERL_BASE. The verdicts begin with one of three words:
#
#   exact    The advantages and the gradient of the loss are the same, or the same up to a factor
#            that the verdict names. Only the small number added to a standard deviation differs:
#            1e-4 in TRL, and 1e-6 here and in verl.
#   close    They are the same except for what the verdict names.
#   nearest  The trainer can't express it, and this is the most similar loss that it has.
#
# This holds in a single process without gradient accumulation. Two details of the loop differ
# whatever the preset is. The warmup begins with a learning rate of 0 there, and of lr / 6 here. A
# minibatch without a gradient makes an update there, by Adam's momentum, and none here. The program
# for TRL does both as grpo.py does.
#
# verl's fields are written in short: the template below has their full names. Besides verdict,
# four entries are not fields. `module` and `trainer` say what to import from TRL. `penalty` is code
# added to the reward. `advantages` is code for advantages that a trainer does not have: it computes
# A (groups, G) from R (groups, G), the rewards, and n (groups, G), the numbers of policy tokens. It
# is indented because it becomes the body of a function.

RLOO_ADVANTAGES = """\
    others = (R.sum(dim=1, keepdim=True) - R) / (R.shape[1] - 1)
    A = R - others                                      # the mean reward of the others"""

LITE_PPO_ADVANTAGES = """\
    A = (R - R.mean(dim=1, keepdim=True)) / (R.std() + 1e-6)"""

GPG_ADVANTAGES = """\
    kept = (R != R[:, :1]).any(dim=1, keepdim=True)     # the groups whose rewards differ
    # the trainer divides by all tokens, and grpo.py by those of the kept groups
    share = (n * kept).sum() / n.sum()
    A = (R - R.mean(dim=1, keepdim=True)) * kept / share.clamp(min=1e-6)"""

OPO_ADVANTAGES = """\
    baseline = (n * R).sum(dim=1, keepdim=True) / n.sum(dim=1, keepdim=True)
    A = R - baseline"""

MAXRL_ADVANTAGES = """\
    mean = R.mean(dim=1, keepdim=True)
    A = (R - mean) / mean.clamp(min=1e-6)               # 0 where no attempt passed"""

TRL_BASE = dict(
    module="trl",
    trainer="GRPO",
    loss_type="bnpo",           # the mean over all tokens of a minibatch
    importance_sampling_level="token",
    epsilon=0.2,
    epsilon_high=0.2,
    scale_rewards="group",
    beta=0.0,
    steps_per_generation=2,
    advantages="",
    penalty="",
)

TRL = {
    "default": dict(
        verdict="exact, with loss_type bnpo. TRL's own default, dapo, differs by a factor near 1."
    ),
    "grpo": dict(
        verdict="close. The KL term is averaged like the loss, over the tokens of each episode "
        "first. In grpo.py it is a mean over all tokens.",
        loss_type="grpo", beta=0.04
    ),
    "dr_grpo": dict(
        verdict="exact up to a constant factor. TRL divides by max_completion_length, not by 24. "
        "Adam cancels such a factor, so only max_grad_norm notices it.",
        loss_type="dr_grpo", scale_rewards="none"
    ),
    "dapo": dict(
        verdict="close. TRL does not replace groups of equal rewards, and their tokens count in "
        "the mean. The penalty for long episodes is a part of get_reward.",
        epsilon_high=0.28, penalty=" - min(1, max(0, (self._env.turns - 4) / 2))"
    ),
    "rloo": dict(
        verdict="exact, with code for the advantages. luspo sums the tokens of an episode.",
        loss_type="luspo", steps_per_generation=1, advantages=RLOO_ADVANTAGES
    ),
    "gspo": dict(
        verdict="exact. With bnpo or dapo, longer episodes would weigh more.",
        loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "cispo": dict(
        verdict="close. TRL divides the loss of each minibatch by the mean of both token counts, "
        "grpo.py by its own. (In TRL's cispo, epsilon_high is the bound itself.)",
        loss_type="cispo", epsilon_high=1.2
    ),
    "gmpo": dict(
        verdict="exact, with a trainer of its own, which does not read loss_type.",
        module="trl.experimental.gmpo", trainer="GMPO", epsilon=0.4, epsilon_high=0.4
    ),
    "sapo": dict(verdict="exact. Both values of tau are TRL's defaults.", loss_type="sapo"),
    "luspo": dict(
        verdict="exact.",
        loss_type="luspo", importance_sampling_level="sequence", epsilon=2e-3,
        epsilon_high=2.5e-3
    ),
    "lite_ppo": dict(verdict="exact.", scale_rewards="batch"),
    # The next three make one update on each batch. So all ratios are 1, and PPO's loss has the
    # gradient of -A log pi.
    "gpg": dict(
        verdict="exact, with code that also makes up for the groups without a gradient.",
        steps_per_generation=1, advantages=GPG_ADVANTAGES
    ),
    "opo": dict(
        verdict="exact, with code for the advantages.",
        loss_type="luspo", steps_per_generation=1, advantages=OPO_ADVANTAGES
    ),
    "maxrl": dict(
        verdict="exact, with code for the advantages.",
        steps_per_generation=1, advantages=MAXRL_ADVANTAGES
    ),
    "dppo": dict(
        verdict="nearest: CISPO with the bound 20, which is DPPO's. But no token is dropped.",
        loss_type="cispo", epsilon_high=20.0
    ),
}

VERL_BASE = dict(
    adv_estimator="grpo",
    norm_adv_by_std_in_grpo=True,
    filter_groups=False,
    loss_mode="vanilla",
    loss_agg_mode="token-mean",
    clip_ratio_low=0.2,
    clip_ratio_high=0.2,
    clip_ratio_c=1e9,
    use_kl_loss=False,
    ppo_mini_batch_size=4,      # in tasks: half of the 8
    advantages="",
)

VERL = {
    "default": dict(verdict="exact."),
    "grpo": dict(
        verdict="close. The KL term is averaged like the loss, over the tokens of each episode "
        "first. In grpo.py it is a mean over all tokens.",
        loss_agg_mode="seq-mean-token-mean", use_kl_loss=True
    ),
    "dr_grpo": dict(
        verdict="exact. loss_scale_factor is the constant, and 24 is that of this gym.",
        norm_adv_by_std_in_grpo=False, loss_agg_mode="seq-mean-token-sum-norm",
    ),
    "dapo": dict(
        verdict="close. Sampling ends when the batch is full, not after three rounds. Your reward "
        "function must subtract the penalty, and return the reward without it as acc.",
        filter_groups=True, clip_ratio_high=0.28
    ),
    "rloo": dict(
        verdict="exact.",
        adv_estimator="rloo", loss_agg_mode="seq-mean-token-sum", ppo_mini_batch_size=8
    ),
    "gspo": dict(
        verdict="exact in 0.9.1. Other versions ignore loss_agg_mode, but do the same.",
        loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=3e-4,
        clip_ratio_high=4e-4
    ),
    "cispo": dict(verdict="exact.", loss_mode="cispo", clip_ratio_low=1.0),
    "gmpo": dict(
        verdict="exact, if a minibatch is one micro-batch on every GPU.",
        loss_mode="geo_mean", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=0.4,
        clip_ratio_high=0.4
    ),
    "sapo": dict(
        verdict="exact. Both values of tau are verl's defaults.",
        loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"
    ),
    "luspo": dict(
        verdict="exact in 0.9.1. Other versions ignore loss_agg_mode, and do what GSPO does.",
        loss_mode="gspo", loss_agg_mode="seq-mean-token-sum", clip_ratio_low=2e-3,
        clip_ratio_high=2.5e-3
    ),
    "lite_ppo": dict(
        verdict="exact, with code for the advantages.",
        adv_estimator="my_advantages", advantages=LITE_PPO_ADVANTAGES
    ),
    "gpg": dict(
        verdict="exact, with code that also makes up for the groups without a gradient.",
        adv_estimator="my_advantages", loss_mode="gpg", ppo_mini_batch_size=8,
        advantages=GPG_ADVANTAGES
    ),
    "opo": dict(
        verdict="exact.",
        adv_estimator="opo", loss_mode="gpg", loss_agg_mode="seq-mean-token-sum",
        ppo_mini_batch_size=8
    ),
    "maxrl": dict(
        verdict="exact, with code for the advantages.",
        adv_estimator="my_advantages", loss_mode="gpg", ppo_mini_batch_size=8,
        advantages=MAXRL_ADVANTAGES
    ),
    "dppo": dict(
        verdict="exact. clip_ratio_c is the bound on the weight.",
        loss_mode="dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0
    ),
}


# ---- The program for TRL -------------------------------------------------------------------------
# It trains a chat model on this gym. The entries above are put in place of the names in braces.

TRL_PROGRAM = '''\
"""Trains a chat model on the BugFix gym, with TRL 1.16.0 and the settings of {name}.

Run it beside env.py, in one process, after pip install trl==1.16.0:

    python train_trl.py --model Qwen/Qwen3-0.6B
    python train_trl.py --model Qwen/Qwen3-0.6B --cpu --steps 2     a trial run without a GPU
"""
# Compared with grpo.py --variant {name}:
{verdict}
#
# The class Trainer makes two details of the loop match grpo.py. Two others differ: in each pass
# over the 20 shuffled tasks, TRL takes 16 and drops four. And after its last call, the model may
# write some text, which is trained on too.
import argparse
import random

import torch
from datasets import Dataset
from transformers import PrinterCallback
from {module} import {trainer}Config, {trainer}Trainer

from env import HELDOUT_TASKS, TASKS, TRAIN_TASKS, EditBudgetEnv, randomize_names, source_words

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a chat model with tools")
parser.add_argument("--steps", type=int, default=80, help="batches to sample and train on")
parser.add_argument("--cpu", action="store_true", help="no GPU, and 64 tokens per episode")
args = parser.parse_args()

# ---- What to decide, besides the model ---------------------------------------------------
MAX_TOKENS = 64 if args.cpu else 1024   # of an episode, with the answers of the tools
LEARNING_RATE = 1e-6        # grpo.py has 1e-3, for a policy with 4,000 times fewer weights
TASKS_PER_STEP, G = 8, 8    # tasks in a batch, and attempts at each of them: the groups
PARTS = 1                   # to cut a minibatch into. More need less memory, but bnpo then
                            # averages the means of the parts
# As in grpo.py:
MINIBATCHES = {steps_per_generation}             # updates on each batch
WARMUP = 6                  # the learning rate rises during the first steps

# ---- The gym -----------------------------------------------------------------------------
PROMPT = """\\
A Python function has one bug. Repair it with the tools. `read` shows its source. `edit` makes
one of five repairs, wherever it fits: or_to_and, and_to_or, div_to_mod (// becomes %),
mod_to_div (% becomes //), or widen (range(1, n) becomes range(1, n + 1)). A second edit is
refused. `test` runs a few tests, which may be too weak to notice the bug. `submit` ends the
attempt, and hidden tests decide whether it passed. Make at most six calls, one at a time, and
do not forget to submit. Then say: done.

"""
TASK = {{task["name"]: task for task in TASKS}}
played = []     # (passed, read before the first edit) of the episodes since the last report


class BugFix:
    """One episode. Its public methods, with their docstrings, become tools of the model."""

    def reset(self, task, **row):
        """Begins an episode. Returns the issue, which TRL appends to the prompt."""
        self._env = EditBudgetEnv(randomize_names(TASK[task], random), max_edits=1)
        self._read_first = False
        return " ".join(self._env.reset())

    def _call(self, *words):
        if self._env.done:
            return "the attempt is over"
        answer, done = self._env.step(list(words))
        return " ".join(answer)

    def read(self) -> str:
        """Shows the source of the function."""
        source = self._env.source
        if not self._env.edits:
            self._read_first = True
        # With line breaks and indentation, because a chat model knows Python that way
        return self._call("read").replace(" ".join(source_words(source)), source)

    def edit(self, op: str) -> str:
        """Makes a repair wherever it fits in the source.

        Args:
            op: or_to_and, and_to_or, div_to_mod, mod_to_div or widen
        """
        return self._call("edit", op)

    def test(self) -> str:
        """Runs the visible tests on the source: pass or fail."""
        return self._call("test")

    def submit(self) -> str:
        """Submits the source to the hidden tests and ends the attempt: pass or fail."""
        return self._call("submit")

    def get_reward(self) -> float:
        """TRL calls it at the end of each episode."""
        read_first = self._read_first and self._env.edits != []
        played.append((self._env.passed, read_first))
        return float(self._env.passed){penalty}


def report(label):
    passed, read_first = (sum(column) / len(played) for column in zip(*played))
    print(f"{{label:18}}pass rate {{passed:.3f}}  read first {{read_first:.3f}}", flush=True)
    played.clear()


def dataset(tasks):
    prompt = [dict(role="user", content=PROMPT)]
    return Dataset.from_list([dict(prompt=prompt, task=task["name"]) for task in tasks])


# ---- The trainer -------------------------------------------------------------------------
class Trainer({trainer}Trainer):
    """TRL's trainer, with some details as in grpo.py."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        # All updates of a step have the same rate: 1/6, 2/6, ... TRL's own warmup rises
        # with each update, and its first update has rate 0.
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer,
            lambda update: min(1, (update // MINIBATCHES + 1) / WARMUP),
        )
        return self.lr_scheduler

    def training_step(self, *inputs):
        loss = super().training_step(*inputs)
        # Without a gradient there must be no update. TRL would make one, in which Adam's
        # momentum moves the weights. A gradient of None prevents that.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not any(gradient.any() for gradient in gradients):
            self.model.zero_grad(set_to_none=True)
        if played:
            report(f"step {{self.state.global_step // MINIBATCHES}}")
        return loss
{advantages}

settings = {trainer}Config(
    # the loss and the advantages of {name}
    loss_type="{loss_type}",
    importance_sampling_level="{importance_sampling_level}",
    epsilon={epsilon},
    epsilon_high={epsilon_high},  # for cispo this is the bound itself, else the bound - 1
    scale_rewards="{scale_rewards}",
    beta={beta},  # weight of the KL term, which is k3
    use_bias_correction_kl=False,  # the default, True, multiplies k3 by the ratio
    # the batch, counted in episodes, and the steps, counted in updates
    num_generations=G,
    per_device_train_batch_size=TASKS_PER_STEP * G // MINIBATCHES // PARTS,
    gradient_accumulation_steps=PARTS,
    steps_per_generation=MINIBATCHES * PARTS,
    per_device_eval_batch_size=G,
    max_steps=args.steps * MINIBATCHES,
    # the optimizer
    learning_rate=LEARNING_RATE,
    adam_beta2=0.95,  # the default is 0.999
    weight_decay=0.0,
    max_grad_norm=1.0,
    # sampling
    temperature=1.0,  # it also divides the logits in training
    max_completion_length=MAX_TOKENS,  # dr_grpo divides by it
    max_tool_calling_iterations=6,
    chat_template_kwargs=dict(enable_thinking=False),  # thoughts would use up MAX_TOKENS
    vllm_importance_sampling_correction=False,  # with vLLM, True is one more weight
    # the machine
    use_cpu=args.cpu,
    bf16=not args.cpu,
    output_dir="trl-{name}",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=args.model,
    reward_funcs=None,  # get_reward is enough
    args=settings,
    train_dataset=dataset(TRAIN_TASKS),
    eval_dataset=dataset(HELDOUT_TASKS),
    environment_factory=BugFix,
)
trainer.remove_callback(PrinterCallback)  # it prints some forty numbers of TRL's own
trainer.evaluate()  # G attempts at each held-out task
report("held-out, before")
trainer.train()
trainer.evaluate()
report("held-out, after")
trainer.save_model()\
'''

# It goes into class Trainer, for advantages that TRL does not have.

TRL_ADVANTAGES = '''
    def _calculate_rewards(self, *inputs):
        self.rewards = super()._calculate_rewards(*inputs)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        R = self.rewards.sum(dim=1).view(-1, G)                     # (groups, G)
        n = (batch["completion_mask"] * batch["tool_mask"]).sum(dim=1).view(-1, G)
        batch["advantages"] = advantages(R, n).view(-1)             # instead of TRL's own
        return batch


def advantages(R, n):
    """The preset's advantages, from rewards and numbers of the model's tokens."""
{advantages}
    return A
'''

# ---- The settings for verl -----------------------------------------------------------------------

VERL_PROGRAM = """\
# The settings of {name} for verl 0.9.1, to run in a shell
#
# Compared with grpo.py --variant {name}:
{verdict}
#
# You supply a GPU, the tools (tools.yaml), the reward, the data (train.parquet, test.parquet),
# the model, its lengths and its learning rate. verl's warmup gives the first step the rate 0, and
# a minibatch without a gradient still makes an update, by Adam's momentum.
{advantages}
settings=(
    algorithm.adv_estimator={adv_estimator}
    algorithm.norm_adv_by_std_in_grpo={norm_adv_by_std_in_grpo}  # only grpo reads it
    algorithm.filter_groups.enable={filter_groups}
    algorithm.filter_groups.metric=acc  # the default, reward, includes a penalty
    actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}
    actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}
    actor_rollout_ref.actor.loss_scale_factor=24  # only seq-mean-token-sum-norm reads it
    actor_rollout_ref.actor.clip_ratio_low={clip_ratio_low}
    actor_rollout_ref.actor.clip_ratio_high={clip_ratio_high}
    actor_rollout_ref.actor.clip_ratio_c={clip_ratio_c}  # the default 3 is one more bound
    actor_rollout_ref.actor.use_kl_loss={use_kl_loss}
    actor_rollout_ref.actor.kl_loss_coef=0.04
    actor_rollout_ref.actor.kl_loss_type=low_var_kl  # k3
    actor_rollout_ref.actor.ppo_mini_batch_size={ppo_mini_batch_size}  # in tasks
    actor_rollout_ref.actor.shuffle=True  # the default False keeps the order of the groups
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=6
    actor_rollout_ref.actor.optim.betas="[0.9,0.95]"  # the default is 0.999 for the second
    actor_rollout_ref.actor.optim.weight_decay=0.0
    actor_rollout_ref.rollout.n=8  # attempts at each task
    actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=7  # the last makes no call
    data.train_batch_size=8  # tasks in a step
    data.max_response_length=1024  # with the answers of the tools
    trainer.total_training_steps=80
)
python3 -m verl.trainer.main_ppo "${{settings[@]}}" \\
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml \\
    data.train_files=train.parquet data.val_files=test.parquet "$@"\
"""

VERL_ADVANTAGES = """\
cat > my_advantages.py <<'END'
import torch
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("my_advantages")
def my_advantages(token_level_rewards, response_mask, index, **kwargs):
    order = torch.tensor(index.argsort())           # puts the attempts of a group side by side
    R = token_level_rewards.sum(dim=1)[order].view(-1, 8)           # (groups, G)
    n = response_mask.sum(dim=1)[order].view(-1, 8)
{advantages}
    A = A.view(-1)[order.argsort(), None] * response_mask           # the order as it was
    return A, A
END
export VERL_USE_EXTERNAL_MODULES=my_advantages PYTHONPATH="$PWD:$PYTHONPATH"
"""


def program(name, table, base, template, advantages):
    """The text that hands a preset over to another trainer."""
    fields = {**base, **table[name], "name": name}
    if fields["advantages"]:
        fields["advantages"] = advantages.format(**fields)
    fields["verdict"] = textwrap.indent(textwrap.fill(fields["verdict"], 90), "# ")
    return template.format(**fields)


# ---- Command line --------------------------------------------------------------------------------


def describe(name, handover):
    """Prints where a preset comes from, how its fields differ from grpo's, and what it is for."""
    paper, what = ABOUT[name]
    fields = VARIANTS[name].items()
    changed = [f"{key} {x}" for key, x in fields if name == "grpo" or x != GRPO.get(key)]
    texts = [", ".join(changed), what]
    if handover:
        texts += ["TRL: " + TRL[name]["verdict"], "verl: " + VERL[name]["verdict"]]
    print(f"{name:9} {paper}")
    for text in texts:
        print(textwrap.indent(textwrap.fill(text, 88), " " * 10))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", choices=VARIANTS, metavar="NAME", help="only this")
    flag = parser.add_mutually_exclusive_group().add_argument
    flag("--trl", action="store_true", help="print a program that trains with it in TRL 1.16.0")
    flag("--verl", action="store_true", help="print its settings for verl 0.9.1")
    args = parser.parse_args()
    name = args.preset
    if not name and (args.trl or args.verl):
        parser.error("argument NAME: --trl and --verl need the name of a preset")
    if args.trl:
        print(program(name, TRL, TRL_BASE, TRL_PROGRAM, TRL_ADVANTAGES))
    elif args.verl:
        print(program(name, VERL, VERL_BASE, VERL_PROGRAM, VERL_ADVANTAGES))
    else:
        for shown in [name] if name else VARIANTS:
            describe(shown, handover=name is not None)
        print("\nThe fields are those that differ from grpo's (for grpo, all that it sets).")


if __name__ == "__main__":
    main()
