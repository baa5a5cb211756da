"""Grids of runs over seeds, as plain tables: is a difference between two settings more than seed noise?

Read grpo.py and variants.py first. A grid compares arms, which are settings that differ in a few fields.
Every arm starts from the same base agents on the same seeds, so arms are compared pair by pair. Each run uses
one thread, and there are as many processes as cores.

    python ablate.py --list                                   the grids, and about how long they take
    python ablate.py                                          the grid `arms` on three seeds
    python ablate.py settings --seeds 5 --out runs.jsonl      keep finished runs; the next call does the rest
    python ablate.py arms --lr 5e-4 --plot figures            another field for all arms; draw figures
    python ablate.py --curves a.jsonl b.jsonl --plot figures  draw what `grpo.py --log` wrote
"""
import argparse
import hashlib
import inspect
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context

if __name__ == "__main__":      # Ctrl-C ends the script quietly, except where run_jobs handles it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if __name__ == "__mp_main__":   # this is a worker process, and Ctrl-C is for its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import numpy
import torch

from agent import Policy, build_tokenizer, collate, make_base_agent, mean, refuse_same_file, token_logps
from env import HELDOUT_TASKS, TRAIN_TASKS, randomize_names
from grpo import (RLConfig, add_config_flags, aggregate_loss, compute_advantages, config_from, evaluate,
                  make_env, no_signal, rl_update, sample_groups, sample_step, step_generator, train_rl)
from variants import GRPO, VARIANTS

# ---- The grids ---------------------------------------------------------------------------------------------
# name -> what it shows, the steps of its runs, its arms (name -> the fields of RLConfig that it changes), the
# columns of its table. The other arms are compared with the first. Besides fields an arm may have
#   base     the base agent: "rl" (the default), "plain", or a tuple of the players that it imitates
#   names    "training": in training, functions get names of training tasks only
# measure names the function that makes a run. The default trains and evaluates.
LOSSES = {"clip": {}, "gspo": dict(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4),
          "cispo": dict(ratio_level="cispo", eps_low=1.0), "sapo": dict(ratio_level="sapo"),
          "gmpo": dict(ratio_level="gmpo", eps_low=0.4, eps_high=0.4),
          "dppo": dict(ratio_level="dppo", eps_low=0.15, eps_high=0.15),
          "plain gradient": dict(ratio_level="none")}
UPDATES = {2: (2, 1), 8: (4, 2), 32: (8, 4)}                # updates per batch = minibatches x epochs
SEQ_MEAN = "seq_mean_token_mean"                            # which gspo, gmpo and sapo are defined with
GRIDS = {
    "arms": dict(what="one field of the default changed at a time", steps=40, arms={
        "default": {}, "scale none": dict(scale="none"), "eps_high 0.28": dict(eps_high=0.28),
        "seq_mean_token_mean": dict(agg="seq_mean_token_mean"),
        "dynamic sampling": dict(dynamic_sampling=True)},
        columns="late reward,held-out,read 1st,1st right,tokens,clip %,zero adv,episodes,to .8 (ep)"),
    "settings": dict(what="five gyms and base agents: where does reading get learned?", steps=80, arms={
        "RL default": {}, "RL original": dict(rename=False, max_edits=None),
        "plain original": dict(base="plain", rename=False, max_edits=None),
        "plain renamed": dict(base="plain", max_edits=None), "plain one-edit": dict(base="plain")},
        columns="train,held-out,read 1st,1st right,tr. right,tests,edits,turns,tokens,early reads,late reads,"
                "early rew,late reward,early ent,late ent,base pass,base held,base reads,read right"),
    "variants": dict(what="every preset", steps=40, arms=VARIANTS,
                     columns="late reward,held-out,read 1st,1st right,tokens,clip %,kl_ref,entropy,episodes"),
    "reuse": dict(what="the losses when a batch is used for 2, 8 and 32 updates", steps=30, arms={
        f"{name} {updates} {lr:g}": dict(fields, agg=SEQ_MEAN, lr=lr, minibatches=parts, epochs=epochs)
        for lr in (1e-3, 3e-4) for updates, (parts, epochs) in UPDATES.items()
        for name, fields in LOSSES.items()}, compare=False,
        columns="late reward,held-out,clip %,approx kl,max ratio,log r A>0,log r A<0,late ent"),
    "passk": dict(what="pass@k before and after training", steps=80, measure="pass_at_k", compare=False,
                  arms={"base agent": dict(steps=0), "default": {}, "maxrl": VARIANTS["maxrl"], "grpo": GRPO},
        columns=",".join(f"{where}@{k}" for where in ("train", "held") for k in (1, 2, 4, 8, 16, 32, 64))),
    "gradients": dict(what="noise and direction of the gradient by estimator", steps=30, compare=False, arms={
        "base": dict(steps=0), "step 8": dict(steps=8), "step 30": dict(steps=30)}, measure="gradient_noise",
        columns="snr,cos mean,cos unbiased"),
    "groups": dict(what="large groups or many tasks, at 64 episodes", steps=80, measure="informative_groups",
                   arms={"base agent": dict(steps=0), "trained": {}}, compare=False,
                   columns="G=4,expect 4,G=8,expect 8,G=16,expect 16,pass rate,entropy"),
    "zero": dict(what="groups of equal rewards kept, dropped, or replaced", steps=80, arms={
        "kept": {}, "dropped": dict(filter_zero_adv=True), "replaced": dict(dynamic_sampling=True)},
        columns="late reward,held-out,early zero,late zero,passed,failed,early epis.,late epis.,to .8 (ep),"
                "to .8 (st)"),
    "length": dict(what="lengths of passed and failed episodes by aggregation", steps=40, arms={
        "token_mean": {}, "seq_mean_token_mean": dict(agg="seq_mean_token_mean"),
        "seq_mean_token_sum": dict(agg="seq_mean_token_sum"),
        "constant 24": dict(agg="constant", agg_constant=24.0)},
        columns="tokens,early tok.,late tok.,pass tok.,fail tok.,turns,pass turns,fail turns,reads,held-out"),
    "informed": dict(what="how rare informed play may be in the base agent", steps=80, arms={
        f"1 in {2 * n + 1}": dict(base=("random", "blind") * n + ("oracle",)) for n in (4, 8, 16, 32)},
        columns="base reads,read right,late reward,held-out,read 1st,1st right"),
    "names": dict(what="random names from the training tasks only", steps=80, arms={
        "all names": {}, "training names": dict(names="training")},
        columns="late reward,train,held-out,read 1st,1st right"),
    "kl": dict(what="weight and estimator of the KL term", steps=80, arms={"no KL": {}, **{
        f"{kind} {coef}": dict(kl_kind=kind, kl_coef=coef)
        for kind in ("k1", "k2", "k3") for coef in (0.01, 0.1, 1.0)}},
        columns="late reward,held-out,read 1st,1st right,kl_ref,entropy"),
    "gspo": dict(what="spread of an episode's ratio against its length", steps=20, measure="sequence_ratios",
                 arms={"default": {}}, columns="episodes,rms log s,independent,in band", compare=False),
}

def over(column, first=0, last=None):
    """A function of a run: the mean of a column of its history over the steps first to last."""
    return lambda run: mean(row[column] for row in run["history"][first:last])

def at_end(which, column):
    return lambda run: run[which][column]

def until(what):
    """Steps or episodes until the mean reward of five steps in a row reaches 0.8, nan if it never does."""
    def measure(run):
        rows = run["history"]
        ends = [i for i in range(5, len(rows) + 1) if mean(row["reward"] for row in rows[i - 5:i]) >= 0.8]
        end = min(ends, default=math.nan)
        return end if what == "steps" or not ends else sum(row["episodes"] for row in rows[:end])
    return measure

# heading -> (a function of a run that returns a number, its decimals). train, tr. right: 8 attempts at each
# training task after training. held-out, read 1st, 1st right, reads, tests, edits: the same for held-out
# tasks. base ...: 16 attempts before training. early, late: the first and the last ten steps (the last twenty
# for zero and epis.). The rest, also turns and tokens: all steps.
COLUMNS = {
    "train": (at_end("train", "pass_rate"), 2), "tr. right": (at_end("train", "first_edit_right"), 2),
    "held-out": (at_end("heldout", "pass_rate"), 2), "read 1st": (at_end("heldout", "read_first"), 2),
    "1st right": (at_end("heldout", "first_edit_right"), 2), "reads": (at_end("heldout", "reads"), 2),
    "tests": (at_end("heldout", "tests"), 2), "edits": (at_end("heldout", "edits"), 2),
    "base pass": (at_end("before", "pass_rate"), 2), "base held": (at_end("before_heldout", "pass_rate"), 2),
    "base reads": (at_end("before", "read_first"), 2),
    "read right": (at_end("before", "read_then_right"), 2),
    "late reward": (over("reward", -10), 2), "early rew": (over("reward", 0, 10), 2),
    "early reads": (over("reads", 0, 10), 2), "late reads": (over("reads", -10), 2),
    "early ent": (over("entropy", 0, 10), 2), "late ent": (over("entropy", -10), 2),
    "entropy": (over("entropy"), 2), "turns": (over("turns"), 2), "tokens": (over("policy_tokens"), 1),
    "early tok.": (over("policy_tokens", 0, 10), 1), "late tok.": (over("policy_tokens", -10), 1),
    "pass tok.": (over("tokens_pass"), 1), "fail tok.": (over("tokens_fail"), 1),
    "pass turns": (over("turns_pass"), 2), "fail turns": (over("turns_fail"), 2),
    "kl_ref": (over("kl_ref"), 2), "approx kl": (over("approx_kl"), 3),
    "clip %": (lambda run: 100 * over("clip_frac")(run), 2), "zero adv": (over("zero_adv_frac"), 2),
    "max ratio": (lambda run: max([row["ratio_max"] for row in run["history"] if row["ratio_max"] > 0],
                                  default=math.nan), 1),
    "log r A>0": (over("logratio_pos"), 1), "log r A<0": (over("logratio_neg"), 1),
    "early zero": (over("zero_adv_frac", 0, 10), 2), "late zero": (over("zero_adv_frac", -20), 2),
    "passed": (over("all_passed"), 2), "failed": (over("all_failed"), 2), "episodes": (over("episodes"), 0),
    "early epis.": (over("episodes", 0, 10), 0), "late epis.": (over("episodes", -20), 0),
    "to .8 (ep)": (until("episodes"), 0), "to .8 (st)": (until("steps"), 0)}

def column(heading):
    """(a function of a run that returns a number, its decimals)."""
    measure, digits = COLUMNS.get(heading, (None, 3 if heading in ("snr", "rms log s", "independent") else 2))
    return lambda run: measure(run) if "history" in run else run[heading], digits

# ---- One run, in a worker process --------------------------------------------------------------------------
def base_weights(seed, base):
    """The weights of a base agent as numpy arrays, which can go from one process to another."""
    torch.set_num_threads(1)
    kinds = {"rl": ("random", "blind") * 4 + ("oracle",), "plain": ("random", "blind") * 4}
    model = make_base_agent(build_tokenizer(), seed, kinds.get(base, base))
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}

def run_one(job, weights):
    """One run of a grid in one thread. Returns its result, a dict that JSON can hold."""
    torch.set_num_threads(1)
    tok, cfg = build_tokenizer(), RLConfig(**job["config"])
    model = Policy(len(tok))
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    return globals()[job["measure"]](model, tok, cfg, job)

def training_names(task, cfg, rng):
    """An env_factory that draws random names from the names of the training tasks only."""
    return make_env(randomize_names(task, rng, [t["name"] for t in TRAIN_TASKS]), cfg, rng)

def train_and_evaluate(model, tok, cfg, job):
    def lengths(row, episodes):             # more columns for the history
        for name, passed in (("pass", True), ("fail", False)):
            some = [episode for episode in episodes if episode["env"].passed == passed]
            row[f"tokens_{name}"] = mean(sum(episode["mask"]) for episode in some)
            row[f"turns_{name}"] = mean(len(episode["calls"]) for episode in some)
    before = {"before": evaluate(model, tok, TRAIN_TASKS, 16, cfg),
              "before_heldout": evaluate(model, tok, HELDOUT_TASKS, 16, cfg)}
    factory, train_cfg = None, cfg
    if job["names"] == "training":
        factory, train_cfg = training_names, replace(cfg, rename=False)
    history = train_rl(model, tok, train_cfg, TRAIN_TASKS, env_factory=factory, on_step=lengths)
    return {"history": history, **before, "train": evaluate(model, tok, TRAIN_TASKS, 8, cfg),
            "heldout": evaluate(model, tok, HELDOUT_TASKS, 8, cfg)}

def pass_at_k(model, tok, cfg, job, n=128):
    """pass@k, the probability that at least one of k attempts passes, for k up to 64.

    From c passes in n attempts, 1 - C(n - c, k) / C(n, k) is an unbiased estimate (arXiv 2107.03374).
    """
    train_rl(model, tok, cfg, TRAIN_TASKS)
    result = {}
    for where, tasks in (("train", TRAIN_TASKS), ("held", HELDOUT_TASKS)):
        played = [sample_groups(model, tok, [task], n, cfg, step_generator(cfg.seed, -10 - i))
                  for i, task in enumerate(tasks)]
        counts = [sum(episode["env"].passed for episode in episodes) for episodes in played]
        for k in (1, 2, 4, 8, 16, 32, 64):
            result[f"{where}@{k}"] = mean(1 - math.comb(n - c, k) / math.comb(n, k) for c in counts)
    return result

# Estimators of the gradient, as fields of RLConfig. The first is unbiased: its mean is the policy gradient.
UNBIASED = dict(baseline="leave_one_out", scale="none", agg="seq_mean_token_sum", agg_constant=24.0)
ESTIMATORS = {
    "leave_one_out, sum": UNBIASED,
    **{f"baseline {name}": dict(UNBIASED, baseline=name) for name in ("group_mean", "length_weighted")},
    **{f"scale {name}": dict(UNBIASED, scale=name) for name in ("group_std", "batch_std", "group_mean")},
    **{f"agg {name}": dict(UNBIASED, agg=name) for name in ("token_mean", "seq_mean_token_mean", "constant")},
    "default": {}, "grpo": dict(agg="seq_mean_token_mean")}

def gradient_noise(model, tok, cfg, job, batches=60):
    """How noisy and how biased is the gradient of one batch, under each estimator? A dict for each of them:

        snr            signal-to-noise ratio |E g|^2 / E|g - E g|^2. The estimate |mean g|^2 of |E g|^2 is
                       too large by E|g - E g|^2 / batches, which is subtracted
        cos mean       cosine between one batch's gradient and the mean of the other half of the batches
        cos unbiased   cosine between its mean over one half and the first estimator's mean over the other
    """
    train_rl(model, tok, cfg, TRAIN_TASKS)
    parameters, gradients = list(model.parameters()), []
    for i in range(batches):
        _, episodes = sample_step(model, tok, cfg, TRAIN_TASKS, step_generator(cfg.seed, 10_000 + i))
        batch = collate(episodes)
        logp, rows = token_logps(model, batch, cfg.temperature), []
        for fields in ESTIMATORS.values():
            part = replace(cfg, **fields)
            per_token = -compute_advantages(episodes, part)[:, None] * logp
            loss = aggregate_loss(per_token, batch["mask"], part.agg, part.agg_constant)
            gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in gradient]))
        gradients.append(torch.stack(rows))
    g = torch.stack(gradients, dim=1)                                       # (estimators, batches, weights)
    halves = (g[:, 0::2], g[:, 1::2])
    means = [half.mean(dim=1) for half in halves]                               # (estimators, weights) each
    cosine = torch.nn.functional.cosine_similarity
    result = {}
    for e, name in enumerate(ESTIMATORS):
        noise = g[e].var(dim=0).sum()
        signal = g[e].mean(dim=0).square().sum() - noise / batches
        result[name] = {
            "snr": (signal / noise).item(),
            "cos mean": mean(cosine(halves[i][e], means[1 - i][e][None]).mean().item() for i in (0, 1)),
            "cos unbiased": mean(cosine(means[i][e], means[1 - i][0], dim=0).item() for i in (0, 1))}
    return {"rows": result}

def informative_groups(model, tok, cfg, job, draws=10):
    """The share of groups whose rewards differ, for groups of 4, 8 and 16 and 64 episodes in all.

    A task of pass rate p gives a group of equal rewards with probability p^G + (1 - p)^G. Here p is estimated
    from 64 other attempts at each task.
    """
    train_rl(model, tok, cfg, TRAIN_TASKS)
    apart = sample_groups(model, tok, TRAIN_TASKS, 64, cfg, step_generator(cfg.seed, -2))
    rates = [mean(episode["reward"] for episode in apart[i:i + 64]) for i in range(0, len(apart), 64)]
    logps = [logp for e in apart for logp, sampled in zip(e["logps"], e["mask"]) if sampled]
    result = {"pass rate": mean(rates), "entropy": -mean(logps)}
    for G in (4, 8, 16):
        differ, part = [], replace(cfg, group_size=G, prompts_per_step=64 // G)
        for draw in range(draws):
            _, episodes = sample_step(model, tok, part, TRAIN_TASKS, step_generator(cfg.seed, -100 - draw))
            differ += [not no_signal(episodes[i:i + G]) for i in range(0, 64, G)]
        result[f"G={G}"], result[f"expect {G}"] = mean(differ), mean(1 - p ** G - (1 - p) ** G for p in rates)
    return result

def sequence_ratios(model, tok, cfg, job):
    """How far does GSPO's ratio s of an episode move in one update, by the number of its policy tokens?

    Each step updates on one half of the episodes and looks at the other half. If the log-ratios of its n
    tokens were independent, the root mean square of log s would be that of log r divided by sqrt(n).
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
    seen = []                                                   # (policy tokens, log s, sum of squared log r)
    for step in range(cfg.steps):
        generator = step_generator(cfg.seed, step)
        _, episodes = sample_step(model, tok, cfg, TRAIN_TASKS, generator)
        middle = len(episodes) // 2
        batch = collate(episodes[middle:])
        with torch.no_grad():
            old = token_logps(model, batch, cfg.temperature)
        rl_update(model, optimizer, episodes[:middle], replace(cfg, minibatches=1), generator)
        with torch.no_grad():
            log_r = token_logps(model, batch, cfg.temperature) - old                        # (B, T)
        n = batch["mask"].sum(dim=1)
        seen += torch.stack((n, log_r.sum(dim=1) / n, log_r.square().sum(dim=1)), dim=1).tolist()
    result = {}
    for low, high in ((1, 7), (8, 10), (11, 13), (14, 17), (18, 99)):
        rows = [row for row in seen if low <= row[0] <= high]
        result[f"{low} to {high} tokens"] = {
            "episodes": len(rows), "rms log s": math.sqrt(mean(row[1] ** 2 for row in rows)),
            "independent": math.sqrt(mean(row[2] / row[0] ** 2 for row in rows)),
            "in band": mean(math.log(1 - 3e-4) <= row[1] <= math.log(1 + 4e-4) for row in rows)}
    return {"rows": result}

# ---- All runs of a grid, on one pool of processes ----------------------------------------------------------
WORKERS = (base_weights, run_one, training_names, train_and_evaluate, pass_at_k, gradient_noise,
           informative_groups, sequence_ratios)

@cache
def versions():
    """A hash of the code that decides a run, and the versions of torch and numpy. All are part of the key."""
    text = "".join(inspect.getsource(function) for function in WORKERS) + repr(ESTIMATORS)
    for name in ("env.py", "agent.py", "variants.py", "grpo.py"):
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
            text += file.read()
    return {"code": hashlib.sha256(text.encode()).hexdigest()[:12], "torch": torch.__version__,
            "numpy": numpy.__version__}

def jobs_of(grid, arms, seeds, parser, args):
    """The runs of a grid, each a dict of plain values. An arm's own fields win over those given as flags."""
    jobs = []
    for arm in arms:
        fields = dict(GRIDS[grid]["arms"][arm])
        base, names = fields.pop("base", "rl"), fields.pop("names", "all")
        for seed in seeds:
            given = argparse.Namespace(**{**vars(args), **fields, "seed": seed})
            cfg = config_from(parser, given, steps=GRIDS[grid]["steps"], eval_every=0)
            jobs.append({"measure": GRIDS[grid].get("measure", "train_and_evaluate"), "config": asdict(cfg),
                         "arm": arm, "seed": seed, "base": base, "names": names})
    return jobs

def key_of(job):
    """Two runs with the same key are the same run. The arm's name does not matter."""
    return json.dumps({**job, "arm": None, **versions()}, sort_keys=True)

BASE_SECONDS = 5

def seconds_of(job):
    """About how long a run takes, without its base agent, on the machine of the README's figures."""
    cfg = job["config"]
    update = 0.05 * cfg["epochs"] * (2 if cfg["kl_coef"] else 1) + 0.002 * cfg["epochs"] * cfg["minibatches"]
    sample = 0.07 * (2 if cfg["dynamic_sampling"] else 1)
    return cfg["steps"] * (sample + update) + {"pass_at_k": 15, "gradient_noise": 20}.get(job["measure"], 3)

def swap(value, old, new):
    """Nested dicts and lists with nan in place of None, or None in place of nan, which JSON does not have."""
    if isinstance(value, dict):
        return {name: swap(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [swap(part, old, new) for part in value]
    return new if value is old or (value != value and old != old) else value

def read_results(path):
    """{key: result} of a file of --out. A line that a kill tore is skipped. ValueError for other files."""
    results, text = {}, ""
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            results[record["key"]] = swap(record["result"], None, math.nan)
        except (ValueError, TypeError, KeyError):
            if not '{"key": '.startswith(line[:8]):
                raise ValueError(f"has no result of this script in line {number}") from None
    with open(path, "a", encoding="utf-8") as file:             # it can be written
        file.write("" if text.endswith("\n") or not text else "\n")    # and the next result begins a line
    return results

def run_jobs(jobs, n_jobs, out=None, known=()):
    """Runs all jobs that are not known. Returns ({(arm, seed): result}, list of failures, interrupted)."""
    done = {(job["arm"], job["seed"]): known[key_of(job)] for job in jobs if key_of(job) in known}
    todo = [job for job in jobs if (job["arm"], job["seed"]) not in done]
    if done:
        print(f"{len(done)} of {len(jobs)} runs are in {out}", flush=True)
    bases, finished, started = {(job["seed"], job["base"]) for job in todo}, 0, time.perf_counter()
    total = len(bases) * BASE_SECONDS + sum(map(seconds_of, todo))
    weights, failed, interrupted = {}, [], False
    def progress(doing):
        seconds = time.perf_counter() - started
        left = f"about {seconds / finished * (total - finished):.0f} s left" if finished else ""
        print(f"\r{doing}, {seconds:.0f} s, {left}".ljust(79), end="", file=sys.stderr, flush=True)
    pool = ProcessPoolExecutor(n_jobs, mp_context=get_context("spawn"))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        futures = {pool.submit(base_weights, *base): base for base in sorted(bases, key=str)}
        for future in as_completed(futures):
            weights[futures[future]] = future.result()
            finished += BASE_SECONDS
            progress(f"{len(weights)} of {len(bases)} base agents")
        futures = {pool.submit(run_one, job, weights[job["seed"], job["base"]]): job for job in todo}
        for number, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            try:
                done[job["arm"], job["seed"]] = result = future.result()
                if out:
                    line = json.dumps({"key": key_of(job), "result": swap(result, math.nan, None)})
                    with open(out, "a", encoding="utf-8") as file:
                        file.write(line + "\n")
            except Exception as error:
                failed.append(f"arm {job['arm']}, seed {job['seed']}: {error!r}")
            finished += seconds_of(job)
            progress(f"{number} of {len(todo)} runs")
    except KeyboardInterrupt:
        interrupted = True
        for process in list((pool._processes or {}).values()):
            process.terminate()                 # there is no public way to stop a run that has begun
    except Exception as error:
        failed.append(f"a worker process or a base agent: {error!r}")
    signal.signal(signal.SIGINT, handler)
    pool.shutdown(wait=not interrupted, cancel_futures=True)
    print(file=sys.stderr)
    return done, failed, interrupted

def expand(done, arms):
    """A result with rows becomes one arm for each row. Returns the new (done, arms)."""
    for arm, seed in [key for key in done if "rows" in done[key]]:
        for name, row in done.pop((arm, seed))["rows"].items():
            done[f"{arm}: {name}", seed] = row
    names = list(dict.fromkeys(arm for arm, _ in done))
    return done, sorted(names, key=lambda name: next(i for i, arm in enumerate(arms) if name.startswith(arm)))

# ---- Tables ------------------------------------------------------------------------------------------------
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
         2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
         2.045, 2.042]                                      # for 1 to 30 degrees of freedom

def t_interval(values):
    """(mean, half width) of the 95% confidence interval of a mean, by Student's t. nan for fewer than two.
    Beyond 30 degrees of freedom, 1.96 + 2.45 / df is the quantile to 0.001."""
    n, centre = len(values), mean(values)
    if n < 2:
        return centre, math.nan
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (n - 1))
    return centre, (T_975[n - 2] if n <= 31 else 1.96 + 2.45 / (n - 1)) * deviation / math.sqrt(n)

def print_table(done, arms, seeds, columns):
    """A line of means and a line of ranges for each arm, in as many blocks as fit into 100 characters."""
    label = max(map(len, [*arms, "mean; range"])) + 1
    per_block = max((100 - label) // 13, 1)
    for first in range(0, len(columns), per_block):
        block = columns[first:first + per_block]
        print("\n" + "mean; range".ljust(label) + "".join(f"{heading:>13}" for heading in block))
        for arm in arms:
            runs, means, ranges = [done[arm, seed] for seed in seeds if (arm, seed) in done], "", ""
            for heading in block:
                measure, digits = column(heading)
                values = [value for value in map(measure, runs) if value == value]
                low, middle, high = (f"{x:.{digits}f}" if abs(x) < 1e3 or not digits else f"{x:.0e}" for x in
                                     (min(values, default=0), mean(values), max(values, default=0)))
                means += f"{middle if values else '-':>13}"
                span = f"{low}..{high}" if len(values) == len(runs) else f"{len(values)} of {len(runs)}"
                ranges += f" {span:>12}"
            print(f"{arm:{label}}{means}\n{f'  {len(runs)} seeds':{label}}{ranges}")

def print_differences(done, arms, seeds, columns, show_all):
    """Differences from the first arm, seed by seed. Those within seed noise are counted only."""
    if len(seeds) < 3:
        return print("\nno differences: with fewer than three seeds they say nothing")
    rows, compared, noise = [], 0, 0
    for arm in arms[1:]:
        both = [seed for seed in seeds if (arm, seed) in done and (arms[0], seed) in done]
        for heading in columns:
            measure, digits = column(heading)
            pairs = [measure(done[arm, seed]) - measure(done[arms[0], seed]) for seed in both]
            pairs = [pair for pair in pairs if pair == pair]
            if len(pairs) < 3 or not any(pairs):        # equal on every seed
                continue
            (centre, half), compared = t_interval(pairs), compared + 1
            verdict = "within seed noise" if abs(centre) <= half else "higher" if centre > 0 else "lower"
            noise += abs(centre) <= half
            if show_all or abs(centre) > half:
                between = f"{centre - half:+.{digits + 1}f} to {centre + half:+.{digits + 1}f}"
                rows.append(f"{arm:22}{heading:13}{centre:+10.{digits + 1}f}{between:>24}   {verdict}")
    print(f"\n{f'minus {arms[0]}':22}{'column':13}{'difference':>10}{'95% interval':>24}")
    print("\n".join(rows + [f"{noise} of {compared} differences are within seed noise. If no arm had any "
                            f"effect, about {0.05 * compared:.0f} would be outside."]))

# ---- Figures -----------------------------------------------------------------------------------------------
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000"]

def new_figure(panels, width=9, height=2.8, **sharing):
    """(figure, list of axes). Made without pyplot, so that it needs no display and no backend."""
    os.environ["MPLBACKEND"] = "agg"                        # a notebook may have left another one
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, **sharing)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes

def smoothed(values, window=3):
    """(steps, running means) over at most window steps."""
    values = list(values) or [math.nan]
    window = min(window, len(values))
    sums = numpy.convolve(numpy.array(values, dtype=float), numpy.ones(window) / window, "valid")
    return numpy.arange(len(sums)) + window / 2 + 0.5, sums

def band(axis, runs, key, color, label):
    """The mean over the runs of a column of their histories, with their range."""
    curves = numpy.array([smoothed([row[key] for row in run["history"]])[1] for run in runs])
    steps = smoothed([row[key] for row in runs[0]["history"]])[0]
    axis.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axis.plot(steps, curves.mean(axis=0), color=color, label=label, marker="o" if len(steps) < 5 else None)

def draw_bars(arms, columns, done, seeds):
    """Each arm's mean as a bar and its seeds as dots, one panel a column."""
    figure, axes = new_figure(len(columns), height=0.8 + 0.28 * len(arms), sharey=True)
    for axis, heading in zip(axes, columns):
        for y, arm in enumerate(arms):
            values = [column(heading)[0](done[arm, seed]) for seed in seeds if (arm, seed) in done]
            axis.barh(y, numpy.nan_to_num(mean(values)), color=COLORS[0], height=0.6, alpha=0.7)
            axis.plot(values, [y] * len(values), "o", color="black", markersize=2.5, alpha=0.6)
        axis.set(xlabel=heading, yticks=range(len(arms)), yticklabels=arms)
    axes[0].invert_yaxis()
    return figure

def draw_arms(arms, columns, done, seeds):
    """The reward over the steps, each arm beside the first."""
    runs = {arm: [done[arm, seed] for seed in seeds if (arm, seed) in done] for arm in arms}
    figure, axes = new_figure(max(len(arms) - 1, 1), height=2.6, sharey=True)
    for axis, arm in zip(axes, arms[1:] or arms):
        band(axis, runs[arms[0]], "reward", COLORS[6], arms[0])
        band(axis, runs[arm], "reward", COLORS[0], "this arm")
        axis.set(title=arm, xlabel="step", ylim=(0, 1))
    axes[0].set_ylabel("reward of the batch")
    axes[0].legend(loc="lower right", frameon=False)
    return figure

def draw_sampling(arms, columns, done, seeds):
    """Left: groups without a signal. Right: the reward against the episodes that were sampled."""
    figure, (left, right) = new_figure(2)
    for arm, color in ((arms[0], COLORS[6]), ("dynamic sampling", COLORS[0])):
        runs = [done[arm, seed] for seed in seeds if (arm, seed) in done]
        if runs:
            band(left, runs, "zero_adv_frac", color, arm)
        for i, run in enumerate(runs):
            reward = smoothed([row["reward"] for row in run["history"]], 5)[1]
            episodes = numpy.cumsum([row["episodes"] for row in run["history"]])[-len(reward):]
            right.plot(episodes, reward, color=color, alpha=0.6, linewidth=1, label=None if i else arm)
    left.set(xlabel="step", ylabel="share of groups with equal rewards", ylim=(0, 1))
    right.set(xlabel="episodes sampled", ylabel="reward (mean of 5 steps)", ylim=(0, 1))
    right.legend(loc="lower right", frameon=False)
    return figure

def draw_reuse(arms, columns, done, seeds):
    """The late reward against the updates per batch, a line for each loss, a panel for each learning rate."""
    figure, axes = new_figure(2, height=3.2, sharey=True)
    for axis, lr in zip(axes, ("0.001", "0.0003")):
        for color, name in zip(COLORS, LOSSES):
            points = []                                         # (updates, mean, lowest, highest)
            for updates in UPDATES:
                runs = [done[key] for key in done if key[0] == f"{name} {updates} {lr}" and key[1] in seeds]
                values = [column("late reward")[0](run) for run in runs]
                if values:
                    points.append((updates, mean(values), min(values), max(values)))
            if points:
                x, centre, low, high = zip(*points)
                axis.plot(x, centre, "o-", color=color, label=name, markersize=3)
                axis.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
        axis.set(title=f"lr {lr}", xscale="log", xlabel="updates per batch", ylim=(0, 1))
        axis.set_xticks(list(UPDATES), [str(updates) for updates in UPDATES])
        axis.minorticks_off()
    axes[0].set_ylabel("late reward")
    next(axis for axis in axes[::-1] if axis.lines).legend(frameon=False, fontsize=8)
    return figure

def draw_passk(arms, columns, done, seeds):
    (figure, axes), ks = new_figure(2, sharey=True), (1, 2, 4, 8, 16, 32, 64)
    for axis, where, title in zip(axes, ("train", "held"), ("training tasks", "held-out tasks")):
        for color, arm in zip(COLORS, arms):
            runs = [done[arm, seed] for seed in seeds if (arm, seed) in done]
            curves = numpy.array([[run[f"{where}@{k}"] for k in ks] for run in runs])
            axis.plot(ks, curves.mean(axis=0), "o-", color=color, label=arm, markersize=3)
            axis.fill_between(ks, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.1, linewidth=0)
        axis.set(title=title, xscale="log", xlabel="k", ylim=(0, 1.02))
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.minorticks_off()
    axes[0].set_ylabel("pass@k")
    axes[1].legend(loc="lower right", frameon=False)
    return figure

FIGURES = {"arms": {"arms": draw_arms, "sampling": draw_sampling}, "reuse": {"reuse": draw_reuse},
           "passk": {"passk": draw_passk}}

def draw_curves(paths):
    """The course of the runs whose logs `grpo.py --log` wrote. ValueError for another kind of file."""
    keys = {"reward": "reward", "read_first": "read 1st", "first_edit_right": "1st right",
            "eval_pass_rate": "held-out", "entropy": "entropy", "clip_frac": "clip"}
    figure, axes = new_figure(len(keys), width=14)
    for color, path in zip(COLORS * len(paths), paths):
        with open(path, encoding="utf-8", errors="replace") as file:
            try:
                first, *rows = map(json.loads, file)
                first["config"]
                for axis, key in zip(axes, keys):
                    points = [(row["step"], row[key]) for row in rows if row[key] is not None]
                    axis.plot(*zip(*points or [(math.nan, math.nan)]), "o-", color=color, markersize=2,
                              label=os.path.basename(path))
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path} is not a log of grpo.py") from None
    for axis, key in zip(axes, keys):
        axis.set(title=keys[key], xlabel="step")
    axes[0].legend(frameon=False)
    return figure

def save_figures(folder, figures):
    for name, figure in figures.items():
        figure.savefig(os.path.join(folder, f"{name}.png"), dpi=110)
        print(f"figure {os.path.join(folder, name)}.png")

# ---- Command line ------------------------------------------------------------------------------------------
def seed_list(text):
    """'3,5,7' -> [3, 5, 7], and '5' -> [0, 1, 2, 3, 4]."""
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in text.removesuffix(",").split(",")]
    seeds = numbers if "," in text else list(range(min(numbers[0], 10_000)))
    if min(seeds, default=-1) < 0 or max(seeds) >= 2 ** 32 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seeds (5) or different seeds (0,3,7)")
    return seeds

def list_grids(args, parser):
    print(f"{'grid':10}{'arms':>5}{'runs':>6}{'about':>8}   {len(args.seeds)} seeds, {args.jobs} processes")
    for name, grid in GRIDS.items():
        jobs = jobs_of(name, list(grid["arms"]), args.seeds, parser, args)
        bases = {(job["seed"], job["base"]) for job in jobs}
        seconds = (sum(map(seconds_of, jobs)) + BASE_SECONDS * len(bases)) / args.jobs
        print(f"{name:10}{len(grid['arms']):5}{len(jobs):6}{seconds:6.0f} s   {grid['what']}")

def report(args, parser, arms):
    """Runs a grid, prints its tables and draws its figures. Returns the exit status."""
    grid, known = GRIDS[args.grid], {}
    jobs = jobs_of(args.grid, arms, args.seeds, parser, args)
    if args.out:
        try:
            known = read_results(args.out)
        except (OSError, ValueError) as error:
            parser.error(f"argument --out: {args.out} {getattr(error, 'strerror', None) or error}")
    seconds = sum(seconds_of(job) for job in jobs if key_of(job) not in known) / args.jobs
    print(f"grid {args.grid}: {grid['what']}\n{len(jobs)} runs, about {seconds + 5:.0f} s, "
          + ", ".join(f"{name} {version}" for name, version in versions().items()), flush=True)
    done, failed, interrupted = run_jobs(jobs, args.jobs, args.out, known)
    finished, first, (done, arms) = len(done), arms[0], expand(done, arms)
    if done:
        columns = grid["columns"].split(",")
        print_table(done, arms, args.seeds, columns)
        if grid.get("compare", True) and arms[0] == first and len(arms) > 1:
            print_differences(done, arms, args.seeds, columns, args.all)
        if args.plot:
            save_figures(args.plot, {name: draw(arms, columns[:4], done, args.seeds) for name, draw in
                                     FIGURES.get(args.grid, {args.grid: draw_bars}).items()})
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    if interrupted:
        kept = f", {args.out} has them" if args.out and finished else ""
        print(f"interrupted after {finished} of {len(jobs)} runs{kept}", file=sys.stderr)
    return 130 if interrupted else 1 if failed else 0

def curves(args, parser):
    try:
        figure = draw_curves(args.curves)
    except (OSError, ValueError) as error:
        parser.error(f"argument --curves: {error}")
    save_figures(args.plot, {"curves": figure})

def main():
    parser = argparse.ArgumentParser(description=__doc__, usage="ablate.py [-h] [GRID] [--FLAG X] ...",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flag = parser.add_argument
    flag("grid", nargs="?", default="arms", choices=list(GRIDS), metavar="GRID", help=", ".join(GRIDS))
    flag("--list", action="store_true", help="list the grids and about how long they take")
    flag("--seeds", type=seed_list, default=[0, 1, 2], metavar="N", help="a number of seeds, or a list 0,3,7")
    flag("--arms", metavar="NAMES", help="only these arms, a,b,c. The others are compared with the first")
    flag("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)")
    flag("--all", action="store_true", help="print differences within seed noise too")
    flag("--out", metavar="FILE", help="keep every finished run in this file, and skip those that it has")
    flag("--plot", metavar="DIR", help="draw figures into this folder (needs matplotlib)")
    flag("--curves", nargs="+", metavar="LOG", help="draw logs of grpo.py into --plot DIR, and run nothing")
    add_config_flags(parser)
    args = parser.parse_args()
    config_from(parser, args)
    known = list(GRIDS[args.grid]["arms"])
    arms = [arm.strip() for arm in args.arms.split(",")] if args.arms else known
    if wrong := [arm for arm in arms if arm not in known or arms.count(arm) > 1]:
        parser.error(f"argument --arms: {wrong[0]!r} is unknown or given twice, known are {', '.join(known)}")
    if hasattr(args, "seed"):
        parser.error(f"argument --seed: {args.seed} must be given as --seeds, a number of seeds or a list")
    if args.jobs < 1:
        parser.error(f"argument --jobs: {args.jobs} must be at least 1")
    if args.plot and not os.path.isdir(args.plot):
        parser.error(f"argument --plot: {args.plot} must be a folder that exists")
    if args.plot and find_spec("matplotlib") is None:
        parser.error(f"argument --plot: {args.plot} needs matplotlib: pip install matplotlib")
    if args.curves and not args.plot:
        parser.error(f"argument --curves: {args.curves[0]} needs --plot DIR, which says where to draw")
    refuse_same_file(parser, {"--out": args.out, **{f"--curves {path}": path for path in args.curves or []}})
    try:
        status = (list_grids(args, parser) if args.list else curves(args, parser) if args.curves else
                  report(args, parser, arms))
        sys.stdout.flush()
    except BrokenPipeError:                                 # nobody reads any more, so print into the void
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)

if __name__ == "__main__":
    main()
