"""The policy: tokenizer, a small transformer, its rollouts and log-probabilities, and the base agents.

Read env.py first. An episode is one sequence of token ids in which the environment and the policy take
turns. Only what the policy sampled is ever trained on, so a mask goes with the ids:

    words  issue : leap is wrong  <call> read <end>  def leap ( n ) : ...  <call> edit or_to_and <end>  ok ...
    mask     0   0  0   0   0       1     1    1      0   0  0 0 0 0         1     1       1       1     0

    python agent.py                 trains both base agents for seeds 0 to 4 and prints what they do
    python agent.py --seeds 1       for seed 0 alone
"""
import os
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from env import (CALLS, FIX_OP, FUNCTION_NAMES, HELDOUT_TASKS, OPS, PLAYS, TASKS, TRAIN_TASKS, BugFixEnv,
                 one_line_parser, randomize_names, seed_list, source_words)

# --------------------------------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------------------------------
MAX_CALL_TOKENS = 4         # <call> edit OP <end>; a call that has not ended by its fourth token is malformed
MAX_EPISODE_TOKENS = 2048   # no BugFix episode comes near; an environment that never says `done` does


def build_tokenizer():
    """word -> id, a plain dict with every word that a BugFix environment or a policy can say."""
    words = ["<call>", "<end>"] + CALLS + OPS + FUNCTION_NAMES
    words += ["issue", ":", "is", "wrong", "ok", "pass", "fail", "refused", "malformed", "truncated"]
    words += ["+"]                                      # which only the op widen writes
    words += sorted({word for task in TASKS for word in source_words(task["source"])} - set(words))
    return {word: i for i, word in enumerate(words)}


def encode(tok, words):
    """Words to ids. ValueError names the first word that is not in the tokenizer."""
    for word in words:
        if word not in tok:
            raise ValueError(f"unknown word {word!r}; the tokenizer's {len(tok)} words: {' '.join(tok)!r}")
    return [tok[word] for word in words]


def decode(tok, ids):
    """Ids to words."""
    words = list(tok)
    return [words[i] for i in ids]


# --------------------------------------------------------------------------------------------------
# Policy
# --------------------------------------------------------------------------------------------------
# Tokens come packed: all real tokens of all episodes in one (N, D) tensor, so that the linear layers, most
# of the work, never touch padding. Only attention has to know which tokens form an episode. It is handed in
# as a function, attend(layer, qkv): one kind for training (packed_attention), one for sampling (run_unseen).


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend):
        x = x + self.out(attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """A decoder-only transformer of about 156k parameters, without positional embeddings and without dropout.

    No positions on purpose (arXiv 2305.19466: the causal mask alone lets a decoder count). With twenty
    training programs, the place where a source ends names the program, and a policy with positions learns
    that in place of the bug: held-out tasks then stay near chance while training tasks reach 1.
    """

    def __init__(self, vocab, width=64, layers=3, heads=4):
        super().__init__()
        self.width, self.heads = width, heads
        self.words = nn.Embedding(vocab, width)             # input embedding and, transposed, output layer
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # Embeddings of norm 1: with the usual 0.02 the tied output layer starts so flat that a few hundred
        # batches of imitation never get to "after this source, that op". Small query and key weights start
        # attention near an average over all that came before, from which "is there an `or`?" is a short way.
        nn.init.normal_(self.words.weight, std=width ** -0.5)
        for block in self.blocks:
            for layer, gain in ((block.qkv, 0.5), (block.up, 1.0), (block.out, (2 * layers) ** -0.5),
                                (block.down, (2 * layers) ** -0.5)):
                nn.init.normal_(layer.weight, std=gain * layer.in_features ** -0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, ids, attend):
        """ids (N,) -> the last hidden state of each token (N, D). attend(layer, qkv (N, 3D)) -> (N, D)."""
        x = self.words(ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, lambda qkv: attend(layer, qkv))
        return self.norm(x)

    def log_probs(self, hidden, temperature):
        """hidden (M, D) -> log-probabilities of the next word (M, V). Temperature acts here, nowhere else."""
        return torch.log_softmax(hidden @ self.words.weight.T / temperature, dim=-1)


def attention(q, k, v, attn_mask):
    """softmax(q k' / sqrt(d)) v -> (B, T, H * d). q (B, H, T, d), k and v (B, H, S, d); attn_mask, (T, S)
    or (B, 1, T, S), is -inf where q may not look. At this size a CPU runs it faster than the fused kernel."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + attn_mask
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def packed_attention(heads, lengths, rows_together=16):
    """attend() for packed episodes of lengths (B,), and `places` (N,): where each packed token is in (B, T).

    Attention needs rectangles, and the work in them grows with the square of their width. So the episodes
    are packed in order of length and go through attention a few together, each lot padded to its longest.
    """
    T, lots, places, end = int(lengths.max()), [], [], 0
    for rows in lengths.argsort().split(rows_together):
        width = int(lengths[rows].max())
        real = torch.arange(width) < lengths[rows, None]                                # (rows, width)
        places.append((rows[:, None] * T + torch.arange(width))[real])
        start, end = end, end + len(places[-1])
        causal = torch.full((width, width), float("-inf")).triu(diagonal=1)
        lots.append((slice(start, end), len(rows), width, real.flatten().nonzero()[:, 0], causal))

    def attend(layer, qkv):
        out = []
        for lot, rows, width, real, causal in lots:
            padded = qkv.new_zeros(rows * width, qkv.shape[1]).index_copy(0, real, qkv[lot])
            q, k, v = padded.view(rows, width, 3, heads, -1).permute(2, 0, 3, 1, 4)     # (rows, H, width, d)
            out.append(attention(q, k, v, causal).flatten(0, 1)[real])
        return torch.cat(out)                                                           # (N, D)

    return attend, torch.cat(places)


# --------------------------------------------------------------------------------------------------
# Rollouts
# --------------------------------------------------------------------------------------------------

def ask(env, tok, call=None):
    """An environment's reset(), or step(call): (the observation's ids, done). Trouble is reported by name."""
    name = f"{type(env).__name__}.{'reset()' if call is None else f'step({call})'}"
    try:
        observation, done = (env.reset(), False) if call is None else env.step(call)
        return encode(tok, list(observation)), bool(done)
    except Exception as error:
        wanted = "words" if call is None else "(words, done)"
        raise RuntimeError(f"{name} failed, it must return {wanted} of the tokenizer's: {error}") from error


@torch.no_grad()
def rollout_batch(model, tok, envs, generator, temperature=1.0):
    """Plays one episode in each environment, in lockstep. generator (torch.Generator): all its chance.

    Each pass feeds every live episode what it has not seen yet (after a call that is a whole observation,
    within a call the one token just sampled), with keys and values of all earlier tokens kept, and samples
    one token an episode. An episode that is done leaves the batch.

    An episode is a dict: ids, mask (1 on tokens the policy sampled) and logps (the sampler's, 0 where mask is
    0), lists of one length; calls, a list of lists of words; env. The ids that were sampled are the ids that
    are trained: nothing is decoded and encoded again.
    """
    words = list(tok)
    episodes = []
    for env in envs:
        ids, _ = ask(env, tok)
        zeros = [0] * len(ids)
        episodes.append({"ids": ids, "mask": zeros, "logps": [0.0] * len(ids), "calls": [], "env": env})
    live = list(episodes)
    unseen = [list(episode["ids"]) for episode in live]         # ids that the model has not run on yet
    call = [[] for _ in live]                                   # ids of the call that is being written
    heads, d = model.heads, model.width // model.heads
    cache = torch.zeros(len(model.blocks), 2, len(live), heads, 64, d)          # keys and values of 64 tokens
    while live:
        ends = [len(episode["ids"]) for episode in live]
        if max(ends) > MAX_EPISODE_TOKENS:
            raise RuntimeError(f"an episode of {type(live[0]['env']).__name__} passed {MAX_EPISODE_TOKENS} "
                               "tokens; does its step() ever return done?")
        if max(ends) > cache.shape[4]:                                          # room for as many again
            cache = F.pad(cache, (0, 0, 0, max(ends)))
        hidden = run_unseen(model, unseen, ends, cache)                      # (B, D)
        logp = model.log_probs(hidden, temperature)                          # (B, V)
        if torch.isnan(logp).any():
            raise FloatingPointError("the policy's probabilities are nan")
        choice = torch.multinomial(logp.exp(), 1, generator=generator)       # (B, 1)
        chosen_logp = logp.gather(1, choice)[:, 0].tolist()
        going_on = []
        for row, (i, episode) in enumerate(zip(choice[:, 0].tolist(), live)):
            episode["ids"].append(i)
            episode["mask"].append(1)
            episode["logps"].append(chosen_logp[row])
            call[row].append(i)
            unseen[row] = [i]
            if words[i] == "<end>" or len(call[row]) == MAX_CALL_TOKENS:
                spoken = [words[j] for j in call[row]]
                well_formed = spoken[0] == "<call>" and spoken[-1] == "<end>"
                episode["calls"].append(spoken[1:-1] if well_formed else spoken)
                (ids, done), call[row] = ask(episode["env"], tok, episode["calls"][-1]), []
                if done:                                         # nobody reads the last observation
                    continue
                episode["ids"] += ids
                episode["mask"] += [0] * len(ids)
                episode["logps"] += [0.0] * len(ids)
                unseen[row] += ids
            going_on.append(row)
        if len(going_on) < len(live):
            cache = cache.index_select(2, torch.tensor(going_on, dtype=torch.long))
            live, unseen, call = ([rows[row] for row in going_on] for rows in (live, unseen, call))
    return episodes


def first_edit(episode):
    """{read_before, right} of the first edit that was applied, None if there is none. right: it is the
    task's FIX_OP, looked up by the original name, which a renamed task keeps."""
    env = episode["env"]
    if not getattr(env, "edits", None):
        return None
    at = next(i for i, call in enumerate(episode["calls"]) if call == ["edit", env.edits[0]])
    right = FIX_OP.get(env.task["name"]) == env.edits[0]
    return {"read_before": ["read"] in episode["calls"][:at], "right": right}


def run_unseen(model, unseen, ends, cache):
    """Runs the model on each row's unseen ids (lists; they end at token ends[row] of the episode), writing
    their keys and values to the cache (layers, 2, B, H, S, d). Gives each row's last hidden state, (B, D).

    The packed tokens (N) are written to their places in the cache, then padded to (B, widest) for attention.
    """
    B, new, S = len(unseen), torch.tensor([len(ids) for ids in unseen]), max(ends)
    widest = int(new.max())
    row = torch.repeat_interleave(torch.arange(B), new)               # (N,) the episode of each packed token
    last = new.cumsum(0) - 1                                          # (B,) where in N each episode's last is
    nth = torch.arange(len(row)) - (last - new + 1)[row]              # (N,) its number among the row's unseen
    past = torch.tensor(ends) - new                                   # (B,) tokens already in the cache
    place = past[row] + nth                                           # (N,) its place in the episode
    # the row's j-th unseen token sees the places up to its own; beyond, the row's cache is zeros or of no use
    beyond = torch.arange(S) > (past[:, None] + torch.arange(widest))[:, :, None]       # (B, widest, S)
    attn_mask = torch.zeros(B, 1, widest, S).masked_fill_(beyond[:, None], float("-inf"))

    def attend(layer, qkv):
        q, k, v = qkv.view(len(row), 3, model.heads, -1).unbind(dim=1)                  # (N, H, d)
        cache[layer, 0, row, :, place] = k
        cache[layer, 1, row, :, place] = v
        keys, values = cache[layer, :, :, :, :S]                                        # (B, H, S, d)
        if widest == 1:
            return attention(q[:, :, None], keys, values, attn_mask)[:, 0]
        queries = q.new_zeros(B, model.heads, widest, q.shape[2])
        queries[row, :, nth] = q
        return attention(queries, keys, values, attn_mask)[row, nth]

    return model(torch.tensor([i for ids in unseen for i in ids]), attend)[last]


# --------------------------------------------------------------------------------------------------
# Log-probabilities
# --------------------------------------------------------------------------------------------------

def collate(episodes):
    """Episodes to a batch of tensors: ids (B, T) padded with 0, mask (B, T) bool, lengths (B,).

    Never look for the padding by its id: 0 is a word too.
    """
    lengths = [len(episode["ids"]) for episode in episodes]

    def padded(key):
        return torch.tensor([e[key] + [0] * (max(lengths) - n) for e, n in zip(episodes, lengths)])
    return {"ids": padded("ids"), "mask": padded("mask").bool(), "lengths": torch.tensor(lengths)}


def token_logps(model, batch, temperature=1.0, with_entropy=False):
    """Log-probability of each token the policy sampled, given all before it: (B, T), 0 where the mask is 0.

    The only such function in the project: old, new and reference log-probabilities come from it, so where the
    weights are the same the ratio is 1. The output layer runs at the policy's tokens alone, a third of all.
    with_entropy: gives (log-probabilities, mean entropy in nats of the policy's next-word distributions).
    """
    ids, mask = batch["ids"], batch["mask"]
    attend, places = packed_attention(model.heads, batch["lengths"] - 1)     # the last token predicts nothing
    T = int(batch["lengths"].max())
    inputs, targets = ids[:, :T - 1].flatten()[places], ids[:, 1:T].flatten()[places]   # (N,)
    sampled = mask[:, 1:T].flatten()[places].nonzero()[:, 0]                            # (M,) indices into N
    logp = model.log_probs(model(inputs, attend)[sampled], temperature)                 # (M, V)
    chosen = logp.gather(1, targets[sampled, None])[:, 0]                               # (M,)
    spread = chosen.new_zeros(ids.shape[0] * (T - 1)).index_copy(0, places[sampled], chosen)
    spread = F.pad(spread.view(-1, T - 1), (1, ids.shape[1] - T))                       # (B, T)
    if not with_entropy:
        return spread
    logp = logp.detach()
    return spread, -(logp.exp() * logp).sum(dim=-1).mean()


# --------------------------------------------------------------------------------------------------
# Base agents: imitation of scripted play, the starting points of RL
# --------------------------------------------------------------------------------------------------
IMITATION_LR, IMITATION_BATCHES, DEMOS_PER_BATCH = 2e-3, 220, 36


def demonstrate(tok, task, play, rng):
    """One episode by a scripted player ("random", "blind" or "oracle"): {ids, mask} as in a rollout."""
    env = BugFixEnv(task)
    ids = encode(tok, env.reset())
    mask = [0] * len(ids)
    for call in PLAYS[play](task, rng):
        spoken = encode(tok, ["<call>", *call, "<end>"])
        observation, done = env.step(call)
        seen = [] if done else encode(tok, observation)
        ids += spoken + seen
        mask += [1] * len(spoken) + [0] * len(seen)
    return {"ids": ids, "mask": mask}


@torch.no_grad()
def reading_habit(model, tok):
    """P(the right op | issue, a read, the source), mean over each family's training tasks: a list of five.

    By teacher forcing under random names, so that it is the source that tells the op.
    """
    rng = random.Random(0)
    tasks = [randomize_names(task, rng) for task in TRAIN_TASKS for _ in range(3)]
    episodes = [demonstrate(tok, task, "oracle", rng) for task in tasks]
    op_at = [e["ids"].index(tok["edit"]) + 1 for e in episodes]         # no source and no issue has the word
    logps = token_logps(model, collate(episodes))
    return logps[torch.arange(len(op_at)), torch.tensor(op_at)].exp().view(5, -1).mean(dim=1).tolist()


def make_base_agent(tok, seed=0, kinds=("random", "blind") * 4, rename=False, batches=IMITATION_BATCHES,
                    habit=None, quiet=True):
    """A policy that imitates scripted play on the training tasks: maximum likelihood, Adam.

    kinds    the mixture of players, each "random", "blind" or "oracle"
    rename   False: a fixed set of demonstrations, two by each of kinds on each task under its own name. What
             is imitated often enough gets known by heart, so the base agent can tell one name from another,
             and RL has something to tie an op to. True: plays anew for each batch, under random names.
    habit    stop as soon as reading_habit() is at least this in every family

    Gives a running average of the weights of some twenty batches: from one batch to the next the share of
    episodes that read wanders between .09 and .18. ValueError names an unknown player.
    """
    unknown = [kind for kind in kinds if kind not in PLAYS]
    if unknown or not kinds:
        raise ValueError(f"kinds: {unknown or 'none'} given; allowed: {', '.join(PLAYS)}, at least one")
    rng, started = random.Random(seed), time.perf_counter()
    with torch.random.fork_rng(devices=[]):             # torch's global stream is left as the caller has it
        torch.manual_seed(seed)
        model, average = Policy(len(tok)), Policy(len(tok))
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=IMITATION_LR, betas=(0.9, 0.95), foreach=True)
    plays = [(task, kind) for kind in kinds for task in TRAIN_TASKS]
    known = [] if rename else [demonstrate(tok, task, kind, rng) for task, kind in plays * 2]
    for batch in range(1, batches + 1):
        if rename:
            chosen = rng.sample(plays, DEMOS_PER_BATCH)
            demos = [demonstrate(tok, randomize_names(task, rng), kind, rng) for task, kind in chosen]
        else:
            demos = rng.sample(known, DEMOS_PER_BATCH)
        logps = token_logps(model, collate(demos))
        loss = -logps.sum() / sum(sum(demo["mask"]) for demo in demos)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.05)
        if batch % 100 == 0 and not quiet:
            print(f"  batch {batch:3}: loss {loss:.3f}, {time.perf_counter() - started:.1f} s", flush=True)
        if batch % 10 == 0 and habit is not None and min(reading_habit(average, tok)) >= habit:
            break
    if not quiet:
        print(f"  ended after {batch} batches, {time.perf_counter() - started:.1f} s", flush=True)
    return average


def make_rl_base(tok, seed=0, quiet=True):
    """The base agent that RL can build on: one demonstration in nine is the oracle's: reads, then repairs.

    Training stops while the habit is weak: an agent that reads in one episode of seven or so and is then
    right about every other time. Each family must have some of it: an op that never follows a read is one
    that RL never finds. Names are random, as in the gym it is for; the source alone can tell the op.
    """
    kinds = ("random", "blind") * 4 + ("oracle",)
    return make_base_agent(tok, seed, kinds, rename=True, batches=800, habit=0.33, quiet=quiet)


def save_policy(model, tok, config, path):
    """Writes weights, words and a dict of plain values; through a second file, so that a full disk costs no
    earlier one. OSError or RuntimeError (torch's for a full disk) if it cannot."""
    torch.save({"model": model.state_dict(), "words": list(tok), "config": config}, path + ".part")
    os.replace(path + ".part", path)


def load_policy(tok, path):
    """The policy in a file of save_policy. OSError if it cannot be read, ValueError if it is no such file."""
    model = Policy(len(tok))
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        words = saved["words"]
        model.load_state_dict(saved["model"])
    except OSError:
        raise
    except Exception as error:      # a file that is none of ours fails in torch in many ways
        raise ValueError(f"not a policy that was saved here ({type(error).__name__})") from error
    if words != list(tok):
        raise ValueError("a policy with another tokenizer's words")
    return model


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

def base_agent_stats(model, tok, tasks, seed, n_samples=16):
    """What a base agent does in the gym as built (own names, unlimited edits), over n_samples a task."""
    envs = [BugFixEnv(task) for task in tasks for _ in range(n_samples)]
    episodes = rollout_batch(model, tok, envs, torch.Generator().manual_seed(seed))
    firsts = [first_edit(episode) for episode in episodes]
    reading = [first for first in firsts if first and first["read_before"]]
    policy_logps = [logp for e in episodes for logp, sampled in zip(e["logps"], e["mask"]) if sampled]
    return {"pass rate": sum(env.passed for env in envs) / len(envs), "reads first": len(reading) / len(envs),
            "then right": sum(first["right"] for first in reading) / max(len(reading), 1),
            "edits": sum(len(env.edits) for env in envs) / len(envs),
            "entropy": -sum(policy_logps) / len(policy_logps)}      # from the sampled tokens: unbiased


def main():
    parser = one_line_parser(__doc__)
    parser.add_argument("--seeds", type=seed_list, default=[0, 1, 2, 3, 4], metavar="N",
                        help="a number of seeds or a list 0,3,7 (default 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tok = build_tokenizer()
    makers = {"plain": make_base_agent, "rl": make_rl_base}
    rows = {}
    for (name, make), seed in ((maker, seed) for maker in makers.items() for seed in args.seeds):
        print(f"base agent {name}, seed {seed}", flush=True)
        model = make(tok, seed, quiet=False)
        for label, tasks in (("training", TRAIN_TASKS), ("held-out", HELDOUT_TASKS)):
            rows.setdefault((name, label), []).append(base_agent_stats(model, tok, tasks, seed))
    columns = list(rows["plain", "training"][0])
    print(f"\n{len(args.seeds)} seeds, mean and range\n{'':18}" + "".join(f"{c:>20}" for c in columns))
    for (name, label), stats in rows.items():
        values = {column: [row[column] for row in stats] for column in columns}
        print(f"{name + ', ' + label:18}" + "".join(
            f"{sum(v) / len(v):8.2f} ({min(v):.2f}-{max(v):.2f})" for v in values.values()))


if __name__ == "__main__":
    main()
