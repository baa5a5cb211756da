"""Fourteen published variants of GRPO: their losses, their settings, and the same in other trainers.

Read grpo.py first. It has GRPO's own loss and the loop that all variants share. This file needs torch only.
A preset changes the objective as its paper does. Group sizes, learning rates, models and data differ from the
papers, so a preset is a starting point for experiments and not a reproduction.

    python variants.py                             list the presets: paper, date, fields, what each is for
    python grpo.py --variant dr_grpo               train with one
    python ablate.py variants                      train with all of them and compare
    python grpo.py --variant gspo --translate trl  print the same settings for another trainer
"""
import signal
import textwrap

if __name__ == "__main__":      # before the slow import: Ctrl-C and a closed pipe end the script quietly
    for name in {"SIGINT", "SIGPIPE"} & set(dir(signal)):
        signal.signal(getattr(signal, name), signal.SIG_DFL)

import torch

# ---- The other losses --------------------------------------------------------------------------------------
# They have the signature of ppo_policy_loss in grpo.py, and the same meaning of every argument:
#
#   logp, old_logp (B, T)   log-probabilities of the tokens under the present policy pi and under pi_old
#   adv (B,) or (B, T)      the advantage A, one for an episode or one for a token
#   mask (B, T)             true (or 1) on the policy's tokens. Nothing else counts.
#   returns                 per-token losses (B, T), to be minimised, and which tokens are clipped (B, T) bool
#
# r = pi / pi_old is a token's ratio, and sg() stops the gradient. Every function begins with the same lines,
# so that each can be copied alone. They check the shapes, because a wrong one, such as adv (B, 1), would
# broadcast to nonsense without an error. They give A the shape (B, T), and compute log r. Both are 0 off the
# mask, and log r is clamped so that exp can't overflow.

def gspo_policy_loss(logp, old_logp, adv, mask, eps_low=3e-4, eps_high=4e-4):
    """GSPO (arXiv 2507.18071): one ratio s, one weight and one clip decision for a whole episode.

        s = exp(mean of log r over the episode's tokens)
        loss = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)

    s is a geometric mean. The product of the ratios would leave the clip range just because an episode is
    long. Returns the episode's value at every token, so seq_mean_token_mean averages over episodes, and
    seq_mean_token_sum weights them by length (LUSPO).
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0).clamp(-20, 20)
    n = (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)                                   # (B, 1)
    s = (log_r.sum(dim=1, keepdim=True) / n).exp().expand_as(logp)                          # (B, T)
    unclipped, clipped = s * A, s.clamp(1 - eps_low, 1 + eps_high) * A
    return -torch.minimum(unclipped, clipped), unclipped > clipped

def cispo_policy_loss(logp, old_logp, adv, mask, eps_low=1.0, eps_high=0.2):
    """CISPO (MiniMax-M1, arXiv 2506.13585): clips the factor in front of log pi.

        loss = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi

    So the tokens that lose their gradient to PPO's clip keep it here. eps_low = 1 means no lower bound, as in
    the paper. A token counts as clipped where PPO with the same bounds would have clipped it.
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0).clamp(-20, 20)
    r = log_r.detach().exp()                                                                # (B, T)
    weight = r.clamp(1 - eps_low, 1 + eps_high)
    return -weight * A * logp, r * A > weight * A

def gmpo_policy_loss(logp, old_logp, adv, mask, eps_low=0.4, eps_high=0.4):
    """GMPO (arXiv 2507.20673): the geometric mean of an episode's ratios, after each of them was clipped.

        m = sign(A) min(sign(A) log r, sign(A) clip(log r, -eps_low, eps_high))     for each token
        loss = -A exp(mean of m over the episode's tokens)

    log r is clipped in the direction in which A pushes only. One outlier moves a geometric mean less than an
    arithmetic one. Returns the episode's value at every token, for the paper with seq_mean_token_mean.
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0).clamp(-20, 20)
    sign = A.sign()
    unclipped, clipped = sign * log_r, sign * log_r.clamp(-eps_low, eps_high)               # (B, T)
    n = (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)                                   # (B, 1)
    mean_m = (sign * torch.minimum(unclipped, clipped)).sum(dim=1, keepdim=True) / n                # (B, 1)
    return -(A * mean_m.exp()).expand_as(logp), unclipped > clipped

def sapo_policy_loss(logp, old_logp, adv, mask, eps_low=0.0, eps_high=0.0, tau_pos=1.0, tau_neg=1.05):
    """SAPO (arXiv 2511.20347): a soft gate instead of a clip. The gradient fades as r moves away from 1.

        loss = -(4 / tau) sigmoid(tau (r - 1)) A      tau = tau_pos where A > 0, else tau_neg, a little larger

    eps_low and eps_high are not used, and no token counts as clipped.
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0).clamp(-20, 20)
    up = (A > 0).to(logp.dtype)
    tau = tau_pos * up + tau_neg * (1 - up)
    return -4 / tau * torch.sigmoid(tau * (log_r.exp() - 1)) * A, torch.zeros_like(log_r, dtype=torch.bool)

def dppo_policy_loss(logp, old_logp, adv, mask, eps_low=0.15, eps_high=0.15):
    """DPPO (arXiv 2602.04879): drops tokens whose probability, not ratio, has moved too far already.

        loss = -sg(min(r, 20)) A log pi     0 where A > 0 and pi - pi_old > eps_high,
                                            and where A < 0 and pi - pi_old < -eps_low

    The probability of a rare token may double several times, that of a likely one may not. The rule only
    stops further pushes. It does not bring a token back within eps. A dropped token has no gradient but still
    counts as a token. Here it counts as clipped.
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)
    log_r = (logp - old_logp.detach()).masked_fill(mask == 0, 0).clamp(-20, 20)
    moved = (logp.exp() - old_logp.exp()).detach().masked_fill(mask == 0, 0)                # (B, T)
    dropped = ((A > 0) & (moved > eps_high)) | ((A < 0) & (moved < -eps_low))
    return -log_r.detach().exp().clamp(max=20) * A * logp * ~dropped, dropped

def pg_policy_loss(logp, old_logp, adv, mask, eps_low=0.0, eps_high=0.0):
    """The plain policy gradient (REINFORCE, and GPG, arXiv 2504.02546): -A log pi, without ratio and clip.

    old_logp, eps_low and eps_high are not used, and no token counts as clipped.
    """
    if logp.dim() != 2 or not (logp.shape == old_logp.shape == mask.shape
                               and adv.shape in (logp.shape, logp.shape[:1])):
        raise ValueError(f"logp {logp.shape}, old_logp {old_logp.shape}, adv {adv.shape}, mask {mask.shape}")
    A = (adv if adv.shape == logp.shape else adv[:, None]).masked_fill(mask == 0, 0)
    return -(A * logp), torch.zeros_like(logp, dtype=torch.bool)

# RLConfig.ratio_level -> loss. grpo.py adds its own under "token".
POLICY_LOSSES = {"sequence": gspo_policy_loss, "cispo": cispo_policy_loss, "gmpo": gmpo_policy_loss,
                 "sapo": sapo_policy_loss, "dppo": dppo_policy_loss, "none": pg_policy_loss}

# ---- The presets -------------------------------------------------------------------------------------------
# Plain dicts of RLConfig fields, so RLConfig(**VARIANTS["gspo"]) is all it takes. GRPO is DeepSeekMath's, and
# NO_KL is the same without the KL term.
GRPO = dict(agg="seq_mean_token_mean", kl_coef=0.04, kl_kind="k3")
NO_KL = dict(GRPO, kl_coef=0.0)

VARIANTS = {
    "default": dict(NO_KL, agg="token_mean"),
    "grpo": GRPO,
    # 24 is the largest number of policy tokens in an episode: 6 turns of 4
    "dr_grpo": dict(NO_KL, scale="none", agg="constant", agg_constant=24.0),
    "dapo": dict(NO_KL, eps_high=0.28, agg="token_mean", dynamic_sampling=True, overlong_buffer=2),
    "rloo": dict(NO_KL, baseline="leave_one_out", scale="none", minibatches=1, agg="seq_mean_token_sum"),
    "gspo": dict(NO_KL, ratio_level="sequence", eps_low=3e-4, eps_high=4e-4),
    "cispo": dict(NO_KL, ratio_level="cispo", eps_low=1.0, agg="token_mean"),
    "gmpo": dict(NO_KL, ratio_level="gmpo", eps_low=0.4, eps_high=0.4),
    "sapo": dict(NO_KL, ratio_level="sapo"),
    "luspo": dict(NO_KL, ratio_level="sequence", eps_low=2e-3, eps_high=2.5e-3, agg="seq_mean_token_sum"),
    "lite_ppo": dict(NO_KL, scale="batch_std", agg="token_mean"),
    # without a ratio, a second minibatch would be off-policy without a correction: so one update per batch
    "gpg": dict(NO_KL, ratio_level="none", scale="none", minibatches=1, filter_zero_adv=True,
                agg="token_mean"),
    "opo": dict(NO_KL, baseline="length_weighted", scale="none", ratio_level="none", minibatches=1,
                agg="seq_mean_token_sum"),
    "maxrl": dict(NO_KL, scale="group_mean", ratio_level="none", minibatches=1, agg="token_mean"),
    "dppo": dict(NO_KL, ratio_level="dppo", eps_low=0.15, eps_high=0.15, agg="token_mean"),
}

ABOUT = {       # name -> paper, arXiv number, month of its first version, what it is for
    "default": ("this project", "-", "-", "GRPO with the same weight for every token and no reference."),
    "grpo": ("DeepSeekMath", "2402.03300", "02/24", "The first: the mean reward of a group replaces the "
             "critic. The paper has groups of 64 and one update per batch. Here it is 8 and two."),
    "dr_grpo": ("Dr. GRPO", "2503.20783", "03/25", "Removes two biases: dividing by the length spares long "
                "failures, dividing by the standard deviation favours very easy and very hard tasks."),
    "dapo": ("DAPO", "2503.14476", "03/25", "More room upwards for rare tokens, only groups with a gradient, "
             "a token mean, a penalty for long episodes (here counted in turns)."),
    "rloo": ("RLOO", "2402.14740", "02/24", "REINFORCE with the mean of the other attempts as baseline. The "
             "whole episode is one action, so its tokens are summed. It never clips."),
    "gspo": ("GSPO", "2507.18071", "07/25", "The reward is one number for an episode, so the ratio is too: "
             "token ratios are too noisy. The band is the paper's, for outputs of thousands of tokens."),
    "cispo": ("CISPO (MiniMax-M1)", "2506.13585", "06/25", "Clips the weight, so that rare but decisive "
              "tokens keep a gradient. The paper tunes the upper bound and names no value, here it is .2."),
    "gmpo": ("GMPO", "2507.20673", "07/25", "A geometric mean of the token ratios, which outliers move less, "
             "and a wider band."),
    "sapo": ("SAPO", "2511.20347", "11/25", "A soft gate instead of the hard clip, which closes sooner for "
             "negative advantages."),
    "luspo": ("LUSPO", "2602.05261", "02/26", "GSPO with each episode weighted by its length, against a bias "
              "towards short ones."),
    "lite_ppo": ("Lite PPO", "2508.08221", "08/25", "The group's mean, the standard deviation of the whole "
                 "batch and a token mean, and nothing else."),
    "gpg": ("GPG", "2504.02546", "04/25", "The plain policy gradient with a group baseline. The paper "
            "scales the loss up for groups without a gradient. Here they are left out of the mean instead."),
    "opo": ("OPO", "2505.23585", "05/25", "Strictly on-policy. Its baseline has the least variance if the "
            "squared norm of an episode's gradient grows with its length, so tokens are summed."),
    "maxrl": ("MaxRL", "2602.02710", "02/26", "Divides by the mean reward, so tasks that are rarely solved "
              "weigh more. This approaches maximum likelihood. Here with one update a batch."),
    "dppo": ("DPPO", "2602.04879", "02/26", "A trust region in probabilities: rare tokens may move by large "
             "ratios, likely ones may not."),
}

def print_presets():
    for name, (paper, number, month, what) in ABOUT.items():
        changed = {field: value for field, value in VARIANTS[name].items() if value != GRPO.get(field)}
        fields = ", ".join(f"{field} {value}" for field, value in changed.items()) or "no difference"
        print(f"{name:9} {paper}" + (f", arXiv {number}, {month}" if number != "-" else ""))
        for label, text in (("fields", fields), ("", what)):
            print(textwrap.fill(text, 100, initial_indent=f"{'':10}{label:7}", subsequent_indent=" " * 17))
    print("\nfields: the difference from grpo, which has", ", ".join(f"{k} {v}" for k, v in GRPO.items()))

# ---- Translation: the same run in TRL 1.16.0 or verl 0.9.1 -------------------------------------------------
# The output's first line is the verdict. "exact": the advantages and the loss's gradient are the same, except
# for 1e-4 or 1e-6 beside a standard deviation. "with a caveat": it says what differs, or what you must add.
# "cannot": no setting does it. In AGG and ADVANTAGE, the first name is TRL's and the second is verl's.
MAX_TOKENS, SEQ = 512, "seq_mean_token_mean"            # 512 stands for the reader's own limit
AGG = {"token_mean": ("bnpo", "token-mean"), "seq_mean_token_sum": ("luspo", "seq-mean-token-sum"),
       SEQ: ("grpo", "seq-mean-token-mean"), "constant": ("dr_grpo", "seq-mean-token-sum-norm")}
VERL_LOSS = {"token": "vanilla", "sequence": "gspo", "cispo": "cispo", "gmpo": "geo_mean", "sapo": "sapo",
             "dppo": "dppo_tv", "none": "gpg"}
NEAREST = {"dppo": "loss_type='cispo' with epsilon_high=20.0 has DPPO's weight, but not its mask",
           "none": "loss_type='cispo', epsilon_high=2**-10, rewards times 1024: a cap so low fixes the ratio"}
ADVANTAGE = {           # (baseline, scale) -> TRL's scale_rewards and verl's adv_estimator. None: code
    ("group_mean", "group_std"): ("group", "grpo"), ("group_mean", "batch_std"): ("batch", None),
    ("group_mean", "none"): ("none", "grpo"), ("leave_one_out", "none"): ("none", "rloo"),
    ("length_weighted", "none"): (None, "opo")}
# The code for all other advantages. It calls group_advantages of grpo.py.
TRL_CODE = """from grpo import group_advantages        # this project's; or paste the function here

class MyTrainer({base}Trainer):            # in place of {base}Trainer, in one process
    def _calculate_rewards(self, *args):
        self.scores = super()._calculate_rewards(*args)
        return self.scores
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        n = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum(1)       # the policy's tokens
        A = group_advantages(self.scores.nansum(1), {G}, "{baseline}", "{scale}", n)
        return batch | dict(advantages=A * {factor})
"""
VERL_CODE = """cat > my_advantages.py <<'END'
import torch
from grpo import group_advantages                           # this project's; or paste the function here
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("my_advantages")
def my_advantages(token_level_rewards, response_mask, index, **kwargs):
    order = torch.tensor(index.argsort())                   # puts a group's episodes side by side
    R, n = token_level_rewards.sum(1)[order], response_mask.sum(1)[order]
    A = group_advantages(R, {G}, "{baseline}", "{scale}", n)[order.argsort()]
    return (A[:, None] * response_mask,) * 2
END
export VERL_USE_EXTERNAL_MODULES=my_advantages PYTHONPATH="$PWD:$PYTHONPATH"
"""

def trl_settings(cfg, level, loss, code, factor):           # as Python, after the code for the advantages
    updates, G, base = cfg.minibatches * cfg.epochs, cfg.group_size, "GMPO" if level == "gmpo" else "GRPO"
    scaling = "none" if code else ADVANTAGE[cfg.baseline, cfg.scale][0]
    weight = 1.0 if code else factor * (G / (G - 1) if cfg.baseline == "leave_one_out" else 1)
    return f"""from trl{'.experimental.gmpo' if level == 'gmpo' else ''} import {base}Config, {base}Trainer
{code}args = {base}Config(
    loss_type="{loss}", importance_sampling_level="{'sequence' if level == 'sequence' else 'token'}",
    epsilon={cfg.eps_low}, epsilon_high={cfg.eps_high + (level == 'cispo')},  # cispo: the cap, 1 + eps_high
    scale_rewards="{scaling}", reward_weights=[{weight}],  # adds 1e-4 to it; one for each reward function
    beta={cfg.kl_coef * factor}, use_bias_correction_kl=False,  # default True: k3 times the ratio
    max_steps={cfg.steps * updates}, warmup_steps={cfg.warmup_steps * updates},  # in updates, from rate 0
    num_generations={G}, per_device_train_batch_size={cfg.prompts_per_step * G // cfg.minibatches},
    steps_per_generation={cfg.minibatches}, gradient_accumulation_steps=1,  # in one process, bnpo needs 1
    num_iterations={cfg.epochs},  # all over the same minibatches; here they are drawn anew
    learning_rate={cfg.lr}, lr_scheduler_type="constant_with_warmup", seed={cfg.seed},  # default: falls to 0
    adam_beta2=0.95, weight_decay=0.0, max_grad_norm={min(cfg.max_grad_norm, 1e9)},  # default beta2: .999
    temperature={cfg.temperature}, max_tool_calling_iterations={cfg.max_turns},  # a last text can follow
    max_completion_length={MAX_TOKENS},  # yours (tools' tokens too); dr_grpo divides by it, weights undo it
    mask_truncated_completions={bool(cfg.mask_truncated)},  # looks at the last token, not at turns
    bf16=False, disable_dropout=True,  # default bf16=True, which large models need
    vllm_importance_sampling_correction=False,  # default True: with vLLM, a weight in the loss
)
"""

def verl_settings(cfg, level, loss, code):                  # as bash
    G, episodes = cfg.group_size, cfg.prompts_per_step // cfg.minibatches * cfg.group_size
    settings = [
        'model.path="$MODEL"', 'data.train_files="$TRAIN"', 'data.val_files="$VALIDATION"',
        "rollout.name=vllm", "rollout.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1",
        'trainer.logger="[console]"', f"data.seed={cfg.seed}", f"actor.data_loader_seed={cfg.seed}",
        f"actor.policy_loss.loss_mode={loss}", f"actor.loss_agg_mode={AGG[cfg.agg][1]}",
        f"actor.loss_scale_factor={cfg.agg_constant or 'null'}  # the divisor of seq-mean-token-sum-norm",
        f"actor.clip_ratio_low={cfg.eps_low}", f"actor.clip_ratio_high={cfg.eps_high}  # not clip_ratio",
        f"actor.clip_ratio_c={20.0 if level == 'dppo' else 1e9}  # default 3: one more bound",
        f"algorithm.adv_estimator={'my_advantages' if code else ADVANTAGE[cfg.baseline, cfg.scale][1]}",
        f"algorithm.norm_adv_by_std_in_grpo={cfg.scale == 'group_std'}  # read by grpo only",
        f"actor.use_kl_loss={cfg.kl_coef > 0}", f"actor.kl_loss_coef={cfg.kl_coef}",
        f"actor.kl_loss_type={cfg.kl_kind}", f"algorithm.filter_groups.enable={bool(cfg.dynamic_sampling)}",
        f"algorithm.filter_groups.metric={'acc' if cfg.overlong_buffer else 'reward'}  # without a penalty",
        f"trainer.total_training_steps={cfg.steps}", "trainer.total_epochs=1000000  # the steps decide",
        f"data.train_batch_size={cfg.prompts_per_step}  # prompts", f"rollout.n={G}",
        f"actor.ppo_mini_batch_size={episodes // G}  # prompts", f"actor.ppo_epochs={cfg.epochs}",
        f"actor.ppo_micro_batch_size_per_gpu={episodes}  # less if memory is short",
        *[f"{part}.log_prob_micro_batch_size_per_gpu={episodes}" for part in ("rollout", "ref")],
        "actor.shuffle=True  # default False: in the groups' order", f"rollout.temperature={cfg.temperature}",
        f"actor.optim.lr={cfg.lr}", f"actor.optim.lr_warmup_steps={cfg.warmup_steps}  # from rate 0",
        'actor.optim.betas="[0.9,0.95]"  # default .999 for the second', "actor.optim.weight_decay=0.0",
        f"actor.optim.clip_grad={min(cfg.max_grad_norm, 1e9)}", "rollout.multi_turn.enable=True",
        'rollout.multi_turn.tool_config_path="$TOOLS"', "rollout.agent.default_agent_loop=tool_agent",
        f"rollout.multi_turn.max_assistant_turns={cfg.max_turns + 1}  # the last one's call is not made",
        f"data.max_response_length={MAX_TOKENS}  # yours, with the tools' tokens"]
    prefix = ("actor", "rollout", "ref", "model")           # of the keys that belong to actor_rollout_ref
    lines = "\n".join("    " + "actor_rollout_ref." * line.startswith(prefix) + line for line in settings)
    return ("MODEL=your/model TRAIN=train.parquet VALIDATION=test.parquet TOOLS=tools.yaml\n" + code
            + f'OVERRIDES=(\n{lines}\n)\npython3 -m verl.trainer.main_ppo "${{OVERRIDES[@]}}" "$@"\n')

def translate(cfg, trainer):
    """The settings of "trl" (Python) or "verl" (bash) for cfg, any object with RLConfig's fields, as text."""
    trl, updates, G, level = trainer == "trl", cfg.minibatches * cfg.epochs, cfg.group_size, cfg.ratio_level
    # some losses exist there with one aggregation only
    only = {"gmpo": SEQ, "sapo": SEQ, "cispo": "token_mean" if trl else cfg.agg}.get(level, cfg.agg)
    missing = cfg.agg != only or (trl and level in ("dppo", "none"))
    if missing and updates == 1:
        level, missing = "token", False                     # every ratio is 1, so all levels are the same
    trl_loss = level if level in ("cispo", "sapo") else AGG[cfg.agg][0]
    loss = trl_loss if trl else VERL_LOSS[level]
    parts = cfg.prompts_per_step * (G if trl else 1)        # prompts or episodes, to be split
    yours = f"# Yours: tools, reward and environment (rename {cfg.rename}, max_edits {cfg.max_edits}).\n"
    cannot = [f"# cannot: {text}.\n" for applies, text in [
        (parts % cfg.minibatches, f"all minibatches have one size. Nearest: a number that divides {parts}"),
        (missing, f"there is no {level} loss with {cfg.agg}. Nearest: " + NEAREST.get(level, f"agg {only}")),
        (trl and cfg.kl_coef and cfg.kl_kind != "k3", "KL is k3. Nearest to k2: use_bias_correction_kl=True"),
        (cfg.steps == 0, "steps is 0, so there is nothing to train")] if applies]
    if cannot:
        return "".join(cannot) + yours
    # TRL's dr_grpo divides by MAX_TOKENS instead of the constant, so the rewards get a factor
    factor, code = MAX_TOKENS / cfg.agg_constant if loss == "dr_grpo" else 1.0, ""
    names = ADVANTAGE.get((cfg.baseline, cfg.scale), (None, None))
    if not names[0 if trl else 1] or (factor != 1 and cfg.scale != "none"):     # it would undo the factor
        code = (TRL_CODE if trl else VERL_CODE).format(
            base="GMPO" if level == "gmpo" else "GRPO", G=G, factor=factor, baseline=cfg.baseline,
            scale=cfg.scale)
    turns = "tool messages" if trl else "extra_info['num_turns'] // 2 - 1. Also return acc without it"
    caveats = [f"# with a caveat: {text}.\n" for applies, text in [
        (code, "the advantages need the code below"),
        (cfg.kl_coef and cfg.agg != "token_mean", f"the KL term is averaged as {cfg.agg}, here over tokens"),
        (cfg.overlong_buffer, f"add min(0, max(-1, ({cfg.max_turns - cfg.overlong_buffer} - turns) / "
         f"{cfg.overlong_buffer})) to your reward, with turns = {turns}"),
        (cfg.filter_zero_adv or (trl and cfg.dynamic_sampling), "groups of equal rewards count in the mean"),
        (not trl and cfg.dynamic_sampling, "sampling ends when the batch is full, not by max_sample_rounds"),
        (trl and loss == "cispo" and updates > 1, "eps_low is 1, and all minibatches have one divisor"),
        (loss == "geo_mean", "a minibatch has to be one micro-batch on every GPU"),
        (cfg.mask_truncated, "episodes that run out of turns are not masked")] if applies] or ["# exact\n"]
    settings = trl_settings(cfg, level, loss, code, factor) if trl else verl_settings(cfg, level, loss, code)
    return "".join(caveats) + yours + settings

if __name__ == "__main__":
    print_presets()
