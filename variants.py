"""Fourteen published variants of GRPO, each a handful of fields of the one loop in grpo.py.

Read grpo.py first. What is said of a paper here is its objective; group sizes, learning rates, models and
data differ, so a preset is a starting point for an experiment, not a reproduction.

    python variants.py                                  the presets: paper, date, fields, what each is for
    python variants.py --run                            train each for 40 steps from the same base agent
    python variants.py --run gspo,dapo --steps 80 --seeds 3
    python variants.py --translate trl                  the presets in the settings of TRL; or of verl
"""
import math
import os
import textwrap
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

import torch

from agent import Policy, build_tokenizer, make_base_agent, make_rl_base
from env import HELDOUT_TASKS, TRAIN_TASKS, fail, one_line_parser, seed_list
from grpo import RLConfig, evaluate, mean, train_rl, usable_config

# --------------------------------------------------------------------------------------------------
# The presets
# --------------------------------------------------------------------------------------------------
# Plain dicts: RLConfig(**VARIANTS["gspo"]) is all it takes. The family's common ancestor is DeepSeekMath's
# GRPO, and what --variant prints is the difference from it.
GRPO = dict(agg="seq_mean_token_mean", kl_coef=0.04, kl_kind="k3")
NO_KL = dict(GRPO, kl_coef=0.0)

VARIANTS = {
    "default": dict(agg="token_mean", kl_coef=0.0),
    "grpo": GRPO,
    # the constant is the most policy tokens an episode can have, 6 turns of 4; the loss is then about half
    # the token mean's, which Adam does not notice: it divides the gradient by its own size
    "dr_grpo": dict(NO_KL, scale="none", agg="constant", agg_constant=24.0),
    "dapo": dict(NO_KL, eps_high=0.28, agg="token_mean", dynamic_sampling=True, overlong_buffer=2),
    # summed over tokens the loss is some 13 times the mean; max_grad_norm and Adam take that out again
    "rloo": dict(NO_KL, baseline="leave_one_out", scale="none", minibatches=1, agg="seq_mean_token_sum"),
    # bounds for outputs of thousands of tokens, kept: on thirteen tokens they clip a good part of each
    # second minibatch
    "gspo": dict(NO_KL, ratio_level="sequence", eps_low=3e-4, eps_high=4e-4),
    "cispo": dict(NO_KL, ratio_level="cispo", agg="token_mean"),
    "gmpo": dict(NO_KL, ratio_level="gmpo", eps_low=0.4, eps_high=0.4),
    "sapo": dict(NO_KL, ratio_level="sapo"),
    "luspo": dict(NO_KL, ratio_level="sequence", eps_low=2e-3, eps_high=2.5e-3, agg="seq_mean_token_sum"),
    "lite_ppo": dict(NO_KL, scale="batch_std", agg="token_mean"),
    "gpg": dict(NO_KL, ratio_level="none", scale="none", agg="token_mean"),
    # its baseline is that of least variance if gradients grow with length; the mean over tokens, kept from
    # GRPO so that one thing changes, divides that growth out again
    "opo": dict(NO_KL, baseline="length_weighted", scale="none", ratio_level="none", minibatches=1),
    "maxrl": dict(NO_KL, scale="group_mean", ratio_level="none", agg="token_mean"),
    "dppo": dict(NO_KL, ratio_level="dppo", eps_low=0.15, eps_high=0.15, agg="token_mean"),
}

ABOUT = {   # name -> paper, arXiv number of its first version, month, what it is for
    "default": ("this project", "-", "-", "GRPO with every token weighing the same, and no reference "
                "model."),
    "grpo": ("DeepSeekMath", "2402.03300", "02/24", "The ancestor: no critic, the group's mean and "
             "deviation instead; the paper takes one update a batch, G = 64."),
    "dr_grpo": ("Dr. GRPO", "2503.20783", "03/25", "Takes out two biases: dividing by the length spares "
                "long failures, dividing by the deviation favours tasks nearly always or nearly never "
                "solved."),
    "dapo": ("DAPO", "2503.14476", "03/25", "Room upwards for rare tokens, groups that carry a gradient "
             "only, a token mean, a penalty on running long (overlong filtering is mask_truncated)."),
    "rloo": ("RLOO", "2402.14740", "02/24", "REINFORCE with the other attempts as baseline, the whole "
             "episode one action: G / (G - 1) times Dr. GRPO's advantage, and no clip."),
    "gspo": ("GSPO", "2507.18071", "07/25", "One ratio and one clip for an episode, as the reward is one "
             "for an episode; made for mixture-of-experts models."),
    "cispo": ("CISPO (MiniMax-M1)", "2506.13585", "06/25", "Clips the weight and not the gradient, so rare "
              "turning-point tokens are not dropped."),
    "gmpo": ("GMPO", "2507.20673", "07/25", "The geometric mean of token ratios, which an outlier moves "
             "less, in a wider band."),
    "sapo": ("SAPO", "2511.20347", "11/25", "A gate that closes softly in place of the clip, sooner for "
             "negative advantages."),
    "luspo": ("LUSPO", "2602.05261", "02/26", "GSPO with each episode weighted by its length, against a "
              "bias to the short."),
    "lite_ppo": ("Lite PPO", "2508.08221", "08/25", "Group mean, deviation of the whole batch, token mean: "
                 "claims to need nothing else."),
    "gpg": ("GPG", "2504.02546", "04/25", "The bare policy gradient with a group baseline: no ratio, no "
            "clip, no deviation."),
    "opo": ("OPO", "2505.23585", "05/25", "Exactly on policy, with the baseline of least variance when a "
            "gradient grows with its length."),
    "maxrl": ("MaxRL", "2602.02710", "02/26", "Divides by the mean reward, so that a task's weight grows "
              "as it is solved more rarely: nearer to maximum likelihood."),
    "dppo": ("DPPO", "2602.04879", "02/26", "A trust region in probabilities: rare tokens may move by "
             "large ratios, likely ones may not."),
}


def differences(config, reference):
    """{field: (value, reference's value)} of the fields in which two RLConfigs differ."""
    mine, theirs = asdict(config), asdict(reference)
    return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def describe(name, given):
    """Lines that say what `--variant name` runs: its fields against GRPO's, and the flags that override
    them."""
    changed = differences(RLConfig(**VARIANTS[name]), RLConfig(**GRPO))
    lines = [f"variant {name} ({ABOUT[name][0]}, arXiv {ABOUT[name][1]}) against DeepSeekMath's GRPO:"]
    lines += [f"  {field} = {mine}  (GRPO: {theirs})" for field, (mine, theirs) in changed.items()]
    lines += ["  no difference"] if not changed else []
    preset = RLConfig(**VARIANTS[name])
    lines += [f"  {field} = {value}  (by flag; the preset has {getattr(preset, field)})"
              for field, value in given.items()]
    return "\n".join(lines)


def print_presets():
    for name, (paper, number, month, what) in ABOUT.items():
        changed = differences(RLConfig(**VARIANTS[name]), RLConfig(**GRPO))
        fields = ", ".join(f"{field} {mine}" for field, (mine, _) in changed.items()) or "-"
        print(f"{name:9} {paper}" + (f", arXiv {number}, {month}" if number != "-" else ""))
        for label, text in (("fields", fields), ("", what)):
            print(textwrap.fill(text, 100, initial_indent=f"{'':10}{label:7}", subsequent_indent=" " * 17))
    print("\nfields: the difference from grpo, which is", ", ".join(f"{k} {v}" for k, v in GRPO.items()))


# --------------------------------------------------------------------------------------------------
# Runs, in worker processes (ablate.py uses these too)
# --------------------------------------------------------------------------------------------------

def base_weights(job):
    """job (seed, None | "plain" | kinds) -> the base agent's weights as numpy arrays, which any process can
    take.

    None: the RL base. "plain": the plain one. kinds: players, see make_base_agent, imitated under random
    names.
    """
    seed, which = job
    torch.set_num_threads(1)
    tok = build_tokenizer()
    if which is None:
        model = make_rl_base(tok, seed)
    else:
        model = (make_base_agent(tok, seed) if which == "plain" else
                 make_base_agent(tok, seed, which, rename=True, batches=400))
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def load_weights(tok, weights):
    model = Policy(len(tok))
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    return model


def train_and_evaluate(weights, cfg, env_factory=None, held_out_factory=None, keep_model=None):
    """One run in one thread: {history, train, heldout}, the last two behavior_stats of 8 episodes a task at
    the end."""
    torch.set_num_threads(1)
    tok = build_tokenizer()
    model = load_weights(tok, weights)
    history = train_rl(model, tok, cfg, TRAIN_TASKS, env_factory=env_factory)
    if keep_model is not None:
        keep_model.append(model)
    return {"history": history, "train": evaluate(model, tok, TRAIN_TASKS, 8, cfg, env_factory),
            "heldout": evaluate(model, tok, HELDOUT_TASKS, 8, cfg, held_out_factory or env_factory)}


def late(history, column, last=10):
    """Mean of a column over the last steps, without the steps that have no value in it."""
    return mean(row[column] for row in history[-last:] if not math.isnan(row[column]))


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_presets(names, steps, seeds, jobs):
    """Trains each preset on each seed and prints a row a preset as its last seed ends: means over the
    seeds."""
    configs = {name: [usable_config({**VARIANTS[name], "steps": steps}, {"seed": seed})
                      for seed in seeds] for name in names}
    columns = [("late reward", 12, 2), ("held-out", 9, 2), ("reads", 7, 2), ("tokens", 7, 1),
               ("clip", 7, 3), ("kl_ref", 7, 2), ("entropy", 8, 2), ("episodes", 9, 0), ("seconds", 8, 1)]
    print(f"{len(names)} presets x {len(seeds)} seeds, {steps} steps each, {jobs} processes of one "
          f"thread\n\n{'preset':10}" + "".join(f"{name:>{width}}" for name, width, _ in columns),
          flush=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        weights = list(pool.map(base_weights, [(seed, None) for seed in seeds]))
        futures = {name: [pool.submit(train_and_evaluate, weights[i], cfg)
                          for i, cfg in enumerate(configs[name])] for name in names}
        for name in names:
            runs = [future.result() for future in futures[name]]
            values = [mean(late(run["history"], "reward") for run in runs),
                      mean(run["heldout"]["pass_rate"] for run in runs),
                      mean(run["heldout"]["reads"] for run in runs),
                      *(mean(late(run["history"], column, steps) for run in runs)
                        for column in ("policy_tokens", "clip_frac", "kl_ref", "entropy")),
                      mean(sum(row["episodes"] for row in run["history"]) for run in runs),
                      mean(sum(row["sec_sample"] + row["sec_update"] for row in run["history"])
                           for run in runs)]
            print(f"{name:10}" + "".join(
                f"{'-':>{width}}" if math.isnan(value) else f"{value:{width}.{digits}f}"
                for value, (_, width, digits) in zip(values, columns)), flush=True)
    print("\nlate reward: mean of the last ten steps. held-out pass rate and reads: 80 episodes a seed "
          "after training. The\nother columns: means over all steps. One seed is one draw: ablate.py says "
          "what a difference is worth.")


# --------------------------------------------------------------------------------------------------
# Translation: the same presets in the trainers that people use at scale
# --------------------------------------------------------------------------------------------------
# Names and meanings as read in the trainers' own sources: TRL 1.16.0 (trl/trainer/grpo_config.py,
# grpo_trainer.py) and verl 0.9.1 (verl/trainer/ppo/core_algos.py, verl/trainer/config). A cell that begins
# with "cannot" has no setting; one with "NOT" warns of a setting that has the name and does something else.
ACTOR = "actor_rollout_ref.actor"


def trl_common(cfg):
    episodes = cfg.prompts_per_step * cfg.group_size
    return [
        ("steps", f"max_steps={cfg.steps * cfg.minibatches * cfg.epochs} (counts optimizer steps)"),
        ("group_size", f"num_generations={cfg.group_size}"),
        ("prompts_per_step, minibatches", f"per_device_train_batch_size={episodes // cfg.minibatches}, "
         f"steps_per_generation={cfg.minibatches} (one process, gradient_accumulation_steps=1)"),
        ("epochs", f"num_iterations={cfg.epochs}"),
        ("lr", f'learning_rate={cfg.lr:g}, lr_scheduler_type="constant" (the default decays to 0)'),
        ("max_grad_norm, temperature", f"max_grad_norm={cfg.max_grad_norm}, temperature={cfg.temperature}"),
        ("mask_truncated", f"mask_truncated_completions={cfg.mask_truncated}"),
        ("filter_zero_adv, max_sample_rounds", "cannot"),
    ]


def trl_preset(cfg):
    G, on_policy, constant = cfg.group_size, cfg.minibatches * cfg.epochs == 1, f"{cfg.agg_constant or 0:g}"
    token_mean = ('loss_type="bnpo" (one process). NOT the default "dapo": it divides by the generation '
                  "batch's tokens")
    losses = {
        ("token", "token_mean"): token_mean,
        ("token", "seq_mean_token_mean"): 'loss_type="grpo"',
        ("token", "seq_mean_token_sum"): 'loss_type="luspo", importance_sampling_level="token" (warns, and '
                                         "works)",
        ("token", "constant"): f'loss_type="dr_grpo", max_completion_length={constant} (constant '
                               "and limit in one)",
        ("sequence", "seq_mean_token_mean"): 'loss_type="grpo", importance_sampling_level="sequence". NOT '
                                             'with the default loss_type "dapo", which weighs by length',
        ("sequence", "seq_mean_token_sum"): 'loss_type="luspo", importance_sampling_level="sequence" (its '
                                            "default is NOT)",
        ("cispo", "token_mean"): 'loss_type="cispo" (denominator: the generation batch\'s tokens, as '
                                 '"dapo")',
        ("gmpo", "seq_mean_token_mean"): "GMPOTrainer and GMPOConfig of trl.experimental.gmpo",
        ("sapo", "seq_mean_token_mean"): 'loss_type="sapo", sapo_temperature_pos=1.0, '
                                         "sapo_temperature_neg=1.05",
        ("none", "seq_mean_token_mean"): 'loss_type="grpo": with one optimizer step a batch the ratio is 1 '
                                         "all the same",
        ("none", "token_mean"): "cannot: no switch takes the ratio out (with one optimizer step a batch it "
                                "is 1)",
        ("dppo", "token_mean"): "cannot",
    }
    ranges = f"epsilon={cfg.eps_low:g}, epsilon_high={cfg.eps_high:g}"
    if cfg.ratio_level == "cispo":
        ranges = (f"epsilon_high={1 + cfg.eps_high:g} (the cap itself, NOT its distance from 1: unset it "
                  "is 0.2); eps_low: cannot, there is no lower bound")
    return [
        ("baseline", {"group_mean": "nothing to set: it has no other", "length_weighted": "cannot",
                      "leave_one_out": f'reward_weights=[{G}/{G - 1}] with scale_rewards="none" gives the '
                                       "same numbers; RLOOTrainer has beta 0.05, a product of ratios and "
                                       "no multi-turn tools"
                      }[cfg.baseline]),
        ("scale", {"group_std": 'scale_rewards="group" (+ 1e-4, here + 1e-6)',
                   "none": 'scale_rewards="none"',
                   "batch_std": 'scale_rewards="batch" (+ 1e-4, here + 1e-6)',
                   "group_mean": "cannot by an option"}[cfg.scale]),
        ("ratio_level, agg", losses[cfg.ratio_level, cfg.agg]),
        ("eps_low, eps_high", "no effect" if cfg.ratio_level in ("sapo", "none") or on_policy else
         "cannot" if cfg.ratio_level == "dppo" else ranges),
        ("kl_coef, kl_kind", "beta=0.0" if not cfg.kl_coef else
         f"beta={cfg.kl_coef}, use_bias_correction_kl=False (True, the default, is k3 times the ratio: NOT "
         "k3's gradient)"),
        ("dynamic_sampling", "cannot" if cfg.dynamic_sampling else "nothing to set: it has none"),
        ("overlong_buffer", "reward function get_soft_overlong_punishment(max_completion_len, "
         "soft_punish_cache): tokens, not turns" if cfg.overlong_buffer else "-"),
    ]


def verl_common(cfg):
    return [
        ("steps", f"trainer.total_training_steps={cfg.steps}"),
        ("group_size", f"actor_rollout_ref.rollout.n={cfg.group_size}"),
        ("prompts_per_step", f"data.train_batch_size={cfg.prompts_per_step}"),
        ("minibatches",
         f"{ACTOR}.ppo_mini_batch_size={cfg.prompts_per_step // cfg.minibatches} (in prompts)"),
        ("epochs", f"{ACTOR}.ppo_epochs={cfg.epochs}"),
        ("lr", f"{ACTOR}.optim.lr={cfg.lr:g}, {ACTOR}.optim.weight_decay=0 (default 0.01)"),
        ("max_grad_norm",
         f"{ACTOR}.optim.clip_grad={cfg.max_grad_norm}. NOT {ACTOR}.grad_clip, which nothing reads"),
        ("temperature", f"actor_rollout_ref.rollout.temperature={cfg.temperature}"),
        ("mask_truncated, filter_zero_adv", "cannot"),
    ]


def verl_preset(cfg):
    constant = f"{cfg.agg_constant or 0:g}"
    estimator = {"group_mean": "grpo", "leave_one_out": "rloo", "length_weighted": "opo"}[cfg.baseline]
    scales = {"group_std": "algorithm.norm_adv_by_std_in_grpo=True",
              "none": "algorithm.norm_adv_by_std_in_grpo=False",
              "batch_std": "cannot; reinforce_plus_plus_baseline is near, and NOT the same (whitens by "
                           "token)",
              "group_mean": "cannot; an advantage function of one's own through register_adv_est"}
    mode = {"token": "vanilla", "sequence": "gspo", "cispo": "cispo", "gmpo": "geo_mean", "sapo": "sapo",
            "dppo": "dppo_tv", "none": "gpg"}[cfg.ratio_level]
    loss = f"{ACTOR}.policy_loss.loss_mode={mode}" + {
        "vanilla": f", {ACTOR}.clip_ratio_c=1e9 (at its default, 3, a second clip acts where A < 0)",
        "dppo_tv": f", {ACTOR}.clip_ratio_c=20.0 (at its default, 3, the ratio's cap is 3)",
        "geo_mean": " (one micro-batch a minibatch: the gradient is NOT divided by their number)",
        "sapo": f", {ACTOR}.tau_pos=1.0, {ACTOR}.tau_neg=1.05",
        "gpg": ". NOT adv_estimator=gpg, which has a factor more"}.get(mode, "")
    agg = {"token_mean": "token-mean", "seq_mean_token_mean": "seq-mean-token-mean",
           "seq_mean_token_sum": "seq-mean-token-sum",
           "constant": f"seq-mean-token-sum-norm, {ACTOR}.loss_scale_factor={constant}"}[cfg.agg]
    note = {"gspo": " (obeyed from 0.9.1 on; unset, the default token-mean is NOT GSPO)",
            "geo_mean": " (ignored: a mean over sequences)", "sapo": " (ignored: this one)"}.get(mode, "")
    return [
        ("baseline", f"algorithm.adv_estimator={estimator} (the default is gae)"),
        ("scale", "no scaling in this estimator" if estimator != "grpo" else scales[cfg.scale]),
        ("ratio_level", loss), ("agg", f"{ACTOR}.loss_agg_mode={agg}{note}"),
        ("eps_low, eps_high",
         "no effect" if mode in ("gpg", "sapo") or cfg.minibatches * cfg.epochs == 1 else
         f"{ACTOR}.clip_ratio_low={cfg.eps_low:g}, {ACTOR}.clip_ratio_high={cfg.eps_high:g} (clip_ratio "
         "alone is NOT read)"),
        ("kl_coef, kl_kind", f"{ACTOR}.use_kl_loss=False" if not cfg.kl_coef else
         f"{ACTOR}.use_kl_loss=True, {ACTOR}.kl_loss_coef={cfg.kl_coef}, "
         f"{ACTOR}.kl_loss_type=low_var_kl (clamped to +-10)"),
        ("dynamic_sampling", "algorithm.filter_groups.enable=True, algorithm.filter_groups.metric=reward; "
         "the cap on rounds (max_num_gen_batches) is NOT read: it samples until full"
         if cfg.dynamic_sampling else "algorithm.filter_groups.enable=False"),
        ("overlong_buffer", "reward.reward_manager.name=dapo, "
         "+reward.reward_kwargs.overlong_buffer_cfg.{enable,len,penalty_factor,log}, "
         "+reward.reward_kwargs.max_resp_len; tokens, not turns, and no floor at -1"
         if cfg.overlong_buffer else "-"),
    ]


TRAINERS = {"trl": ("TRL 1.16.0, GRPOConfig", trl_common, trl_preset),
            "verl": ("verl 0.9.1", verl_common, verl_preset)}


def print_translation(trainer):
    title, common, preset = TRAINERS[trainer]

    def row(field, text):
        print(textwrap.fill(text, 108, initial_indent=f"  {field:34} ", subsequent_indent=" " * 37,
                            break_long_words=False, break_on_hyphens=False))

    print(f"{title}\n\nall presets, at this project's sizes")
    for field, text in common(RLConfig()):
        row(field, text)
    for name, fields in VARIANTS.items():
        cfg = RLConfig(**fields)
        print(f"\n{name}")
        for field, text in preset(cfg):
            if text != "-":
                value = ", ".join(str(getattr(cfg, part)) for part in field.split(", "))
                row(f"{field} = {value}" if len(field) + len(value) < 31 else field, text)


def main():
    parser = one_line_parser(__doc__)
    parser.add_argument("--run", nargs="?", const="all", metavar="NAMES",
                        help="train these presets (default all), a,b,c")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (default 40)")
    parser.add_argument("--seeds", type=seed_list, default=[0],
                        help="a number of seeds or a list 0,3,7 (default 1)")
    parser.add_argument("--jobs", type=int, default=cores(), help="worker processes (default: the cores)")
    parser.add_argument("--translate", choices=TRAINERS, help="the presets in another trainer's settings")
    args = parser.parse_args()
    if args.translate and args.run:
        fail("--translate: cannot be given with --run")
    if args.jobs < 1:
        fail(f"--jobs: {args.jobs} must be at least 1")
    if args.translate:
        print_translation(args.translate)
    elif args.run:
        names = list(VARIANTS) if args.run == "all" else args.run.split(",")
        for name in names:
            if name not in VARIANTS:
                fail(f"--run: unknown variant {name!r}; known: {', '.join(VARIANTS)}")
        run_presets(names, args.steps, args.seeds, args.jobs)
    else:
        print_presets()


if __name__ == "__main__":
    main()
