"""The policy: a tokenizer of whole words, a small transformer, its rollouts, its log-probabilities, its base agents.

Read env.py first. An episode is one sequence of token ids in which the environment and the policy take turns. Only what
the policy sampled is ever trained on, so a mask goes with the ids:

    words  issue : leap is wrong  <call> read <end>  def leap ( n ) : ...  <call> edit or_to_and <end>  ok  <call> ...
    mask     0   0  0   0   0       1     1    1      0   0  0 0 0 0         1     1       1       1     0     1

    python agent.py                 trains both base agents for seeds 0 to 4 and prints what they do
    python agent.py --seeds 0       for one seed
"""
import random
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from env import (CALLS, FIX_OP, FUNCTION_NAMES, HELDOUT_TASKS, OPS, PLAYS, TASKS, TRAIN_TASKS, BugFixEnv, one_line_parser,
                 randomize_names, seed_list, source_words)

# --------------------------------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------------------------------
MAX_CALL_TOKENS = 4         # <call> edit OP <end>; a call that has not ended by its fourth token is malformed
MAX_EPISODE_TOKENS = 2048   # no BugFix episode comes near; an environment that never says `done` does


def build_tokenizer():
    """word -> id, a plain dict with every word that a BugFix environment or a policy can say."""
    words = ["<call>", "<end>"] + CALLS + OPS + FUNCTION_NAMES
    words += ["issue", ":", "is", "wrong", "ok", "pass", "fail", "refused", "malformed", "truncated", "+"]
    words += sorted({word for task in TASKS for word in source_words(task["source"])} - set(words))
    return {word: i for i, word in enumerate(words)}


def encode(tok, words):
    """Words to ids. ValueError names the first word that is not in the tokenizer."""
    for word in words:
        if word not in tok:
            raise ValueError(f"unknown word {word!r}; the tokenizer has {len(tok)} words, among them {', '.join(CALLS)}")
    return [tok[word] for word in words]


def decode(tok, ids):
    """Ids to words."""
    words = list(tok)
    return [words[i] for i in ids]


# --------------------------------------------------------------------------------------------------
# Policy
# --------------------------------------------------------------------------------------------------
# Tokens come packed: all real tokens of all episodes in one (N, D) tensor, so that the linear layers, nearly all of
# the work, never touch padding. Only attention has to know which tokens form an episode. It is handed in as a function,
# attend(layer, q, k, v), one kind for training (packed_attention) and one for sampling (in rollout_batch).

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(attend(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """A decoder-only transformer of about 156k parameters, without positional embeddings and without dropout.

    No positions on purpose (arXiv 2305.19466: the causal mask alone lets a decoder count). With twenty training
    programs, the place where a source ends names the program, and a policy with positions learns that instead of the
    bug: held-out tasks then stay near chance while training tasks reach 1.
    """

    def __init__(self, vocab, width=64, layers=3, heads=4):
        super().__init__()
        self.width, self.heads = width, heads
        self.words = nn.Embedding(vocab, width)             # input embedding and, transposed, output layer
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # Embeddings of norm 1: with the usual 0.02 the tied output layer starts so flat that a few hundred batches of
        # imitation never get to "after this source, that op". Small query and key weights start attention near an
        # average over everything before, from which "is there an `or`?" is a short way.
        nn.init.normal_(self.words.weight, std=width ** -0.5)
        for block in self.blocks:
            for layer, gain in ((block.qkv, 0.5), (block.up, 1.0), (block.out, (2 * layers) ** -0.5),
                                (block.down, (2 * layers) ** -0.5)):
                nn.init.normal_(layer.weight, std=gain * layer.in_features ** -0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, ids, attend):
        """ids (N,), attend(layer, q, k, v: (N, D)) -> (N, D). Gives the last hidden state of each token, (N, D)."""
        x = self.words(ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, lambda q, k, v: attend(layer, q, k, v))
        return self.norm(x)

    def log_probs(self, hidden, temperature):
        """hidden (M, D) -> log-probabilities of every next word (M, V). Temperature acts here and nowhere else."""
        return torch.log_softmax(hidden @ self.words.weight.T / temperature, dim=-1)


def split_heads(x, heads):
    """(B, T, D) -> (B, heads, T, D / heads)"""
    B, T, D = x.shape
    return x.view(B, T, heads, D // heads).transpose(1, 2)


def attention(q, k, v, hidden_from):
    """softmax(q k' / sqrt(d)) v; q (B, H, T, d), k and v (B, H, S, d), hidden_from (.., T, S) is -inf where q may not
    look. Written out: at these sizes it is faster on a CPU than the fused kernel. Gives (B, T, H * d)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + hidden_from
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def packed_attention(heads, lengths, rows_together=16):
    """attend() for packed episodes of these lengths (B,), and `places` (N,): where the packed tokens stand in (B, T).

    Attention needs rectangles, and the work in them grows with the square of their width. So the episodes are packed in
    order of length and go through attention a few together, each lot padded to its own longest only.
    """
    T, lots, places, end = int(lengths.max()), [], [], 0
    for rows in lengths.argsort().split(rows_together):
        width = int(lengths[rows].max())
        real = torch.arange(width) < lengths[rows, None]                                     # (rows, width)
        places.append((rows[:, None] * T + torch.arange(width))[real])
        start, end = end, end + len(places[-1])
        causal = torch.full((width, width), float("-inf")).triu(diagonal=1)
        lots.append((slice(start, end), len(rows), width, real.flatten().nonzero()[:, 0], causal))

    def attend(layer, q, k, v):
        packed, out = torch.cat((q, k, v), dim=-1), []                                       # (N, 3D)
        for lot, rows, width, real, causal in lots:
            padded = packed.new_zeros(rows * width, packed.shape[1]).index_copy(0, real, packed[lot])
            q, k, v = (split_heads(x, heads) for x in padded.view(rows, width, -1).chunk(3, dim=-1))
            out.append(attention(q, k, v, causal).flatten(0, 1)[real])
        return torch.cat(out)                                                                # (N, D)

    return attend, torch.cat(places)


# --------------------------------------------------------------------------------------------------
# Rollouts
# --------------------------------------------------------------------------------------------------

def take_turn(env, call):
    """One call to an environment: (observation's words, done). Trouble in it is reported with its class's name."""
    try:
        observation, done = env.step(call)
        observation = list(observation)
    except Exception as error:
        raise RuntimeError(f"{type(env).__name__}.step({call}) failed, it must return (words, done): {error!r}") from error
    return observation, bool(done)


@torch.no_grad()
def rollout_batch(model, tok, envs, generator, temperature=1.0):
    """Plays one episode in each environment, all in lockstep. generator: torch.Generator, the only source of chance.

    Each pass feeds every live episode what it has not seen yet (after a call that is a whole observation, within a call
    the one token just sampled), with keys and values of all earlier tokens kept, and samples one token an episode. An
    episode that is done leaves the batch.

    An episode is a dict: ids, mask (1 on tokens the policy sampled) and logps (the sampler's, 0 where mask is 0), lists
    of one length; calls, the list of calls made, each a list of words; env. The ids that were sampled are the ids that
    are trained: nothing is decoded and encoded again.
    """
    words = list(tok)
    episodes = []
    for env in envs:
        ids = encode(tok, env.reset())
        episodes.append({"ids": ids, "mask": [0] * len(ids), "logps": [0.0] * len(ids), "calls": [], "env": env})
    live = list(episodes)
    unseen = [list(episode["ids"]) for episode in live]         # ids that the model has not run on yet
    call = [[] for _ in live]                                   # ids of the call that is being written
    cache = torch.zeros(len(model.blocks), 2, len(live), 64, model.width)    # keys and values
    while live:
        ends = [len(episode["ids"]) for episode in live]
        if max(ends) > MAX_EPISODE_TOKENS:
            raise RuntimeError(f"an episode of {type(live[0]['env']).__name__} passed {MAX_EPISODE_TOKENS} tokens; "
                               "does step() ever return done?")
        if max(ends) > cache.shape[3]:                                       # room for as many tokens again
            cache = F.pad(cache, (0, 0, 0, max(ends)))
        hidden = run_unseen(model, unseen, ends, cache)                      # (B, D)
        logp = model.log_probs(hidden, temperature)                          # (B, V)
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
                episode["calls"].append(spoken[1:-1] if well_formed else spoken)     # `<` in it: malformed to any env
                observation, done = take_turn(episode["env"], episode["calls"][-1])
                if done:                                         # nobody reads the last observation
                    continue
                ids, call[row] = encode(tok, observation), []
                episode["ids"] += ids
                episode["mask"] += [0] * len(ids)
                episode["logps"] += [0.0] * len(ids)
                unseen[row] += ids
            going_on.append(row)
        if len(going_on) < len(live):
            cache = cache[:, :, going_on]
            live, unseen, call = ([rows[row] for row in going_on] for rows in (live, unseen, call))
    return episodes


def first_edit(episode):
    """{read_before, right} of the first edit that was applied, None if there is none. The right op is FIX_OP's, looked
    up by the task's original name, which a renamed task keeps."""
    env = episode["env"]
    if not getattr(env, "edits", None):
        return None
    at = next(i for i, call in enumerate(episode["calls"]) if call == ["edit", env.edits[0]])
    return {"read_before": ["read"] in episode["calls"][:at], "right": FIX_OP.get(env.task["name"]) == env.edits[0]}


def run_unseen(model, unseen, ends, cache):
    """Runs the model on each row's unseen ids (lists of ids; they end at token ends[row] of the episode), writing
    their keys and values to the cache (layers, 2, B, S, D). Gives the last token's hidden state of each row, (B, D)."""
    B, new, S = len(unseen), torch.tensor([len(ids) for ids in unseen]), max(ends)
    widest = int(new.max())
    row = torch.repeat_interleave(torch.arange(B), new)                      # (N,) the episode of each packed token
    last = new.cumsum(0) - 1                                                 # (B,) where in N each episode's last is
    nth = torch.arange(len(row)) - (last - new + 1)[row]                     # (N,) its number among the row's unseen
    past = torch.tensor(ends) - new                                          # (B,) tokens already in the cache
    place = past[row] + nth                                                  # (N,) its place in the episode
    # the row's j-th unseen token sees the places up to its own; what the cache holds beyond is from nobody
    beyond = torch.arange(S) > (past[:, None] + torch.arange(widest))[:, :, None]             # (B, widest, S)
    hidden_from = torch.zeros(B, 1, widest, S).masked_fill_(beyond[:, None], float("-inf"))

    def attend(layer, q, k, v):
        cache[layer, 0, row, place] = k
        cache[layer, 1, row, place] = v
        keys, values = (split_heads(x, model.heads) for x in cache[layer, :, :, :S])
        if widest == 1:
            return attention(split_heads(q[:, None], model.heads), keys, values, hidden_from)[:, 0]
        queries = q.new_zeros(B, widest, model.width)
        queries[row, nth] = q
        return attention(split_heads(queries, model.heads), keys, values, hidden_from)[row, nth]

    return model(torch.tensor([i for ids in unseen for i in ids]), attend)[last]


# --------------------------------------------------------------------------------------------------
# Log-probabilities
# --------------------------------------------------------------------------------------------------

def collate(episodes):
    """Episodes to a batch of tensors: ids (B, T) padded with 0, mask (B, T) bool, lengths (B,). Never look for the
    padding by its id: 0 is a word too."""
    T = max(len(episode["ids"]) for episode in episodes)
    padded = {key: [episode[key] + [0] * (T - len(episode["ids"])) for episode in episodes] for key in ("ids", "mask")}
    return {"ids": torch.tensor(padded["ids"]), "mask": torch.tensor(padded["mask"]).bool(),
            "lengths": torch.tensor([len(episode["ids"]) for episode in episodes])}


def token_logps(model, batch, temperature=1.0, with_entropy=False):
    """Log-probability of each token that the policy sampled, given all before it: (B, T), 0 where the mask is 0.

    The only such function in the project: old, new and reference log-probabilities come from it, so on unchanged
    weights the ratio is 1 to the last bit. The output layer runs at the policy's tokens alone, a third of all.
    with_entropy: gives (log-probabilities, mean entropy in nats of the policy's next-word distributions).
    """
    ids, mask = batch["ids"], batch["mask"]
    attend, places = packed_attention(model.heads, batch["lengths"] - 1)     # the last token predicts nothing
    T = int(batch["lengths"].max())
    inputs, targets = ids[:, :T - 1].flatten()[places], ids[:, 1:T].flatten()[places]         # (N,)
    sampled = mask[:, 1:T].flatten()[places].nonzero()[:, 0]                                  # (M,) indices into N
    logp = model.log_probs(model(inputs, attend)[sampled], temperature)                       # (M, V)
    chosen = logp.gather(1, targets[sampled, None])[:, 0]                                     # (M,)
    spread = chosen.new_zeros(ids.shape[0] * (T - 1)).index_copy(0, places[sampled], chosen)
    spread = F.pad(spread.view(-1, T - 1), (1, ids.shape[1] - T))                             # (B, T)
    if not with_entropy:
        return spread
    logp = logp.detach()
    return spread, -(logp.exp() * logp).sum(dim=-1).mean()


# --------------------------------------------------------------------------------------------------
# Base agents: imitation of scripted play, the starting points of RL
# --------------------------------------------------------------------------------------------------
IMITATION_LR = 2e-3
IMITATION_BATCHES, DEMOS_PER_BATCH = 180, 36


def demonstrate(tok, task, play, rng):
    """One episode on the task by a scripted player ("random", "blind" or "oracle"): {ids, mask} as in a rollout."""
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
    """P(the right op | issue, a read, the source), the mean over each family's training tasks: a list of five.

    By teacher forcing under renamed functions, so that it is the source that tells the op.
    """
    rng = random.Random(0)
    episodes = [demonstrate(tok, randomize_names(task, rng), "oracle", rng) for task in TRAIN_TASKS for _ in range(4)]
    logps = token_logps(model, collate(episodes))
    op_at = [next(t for t, i in enumerate(e["ids"]) if e["mask"][t] and e["ids"][t - 1] == tok["edit"]) for e in episodes]
    return logps[torch.arange(len(op_at)), torch.tensor(op_at)].exp().view(5, -1).mean(dim=1).tolist()


def make_base_agent(tok, seed=0, kinds=("random", "blind") * 4, rename=False, batches=IMITATION_BATCHES, habit=None,
                    quiet=True):
    """A policy that imitates scripted play on the training tasks, under their own names: maximum likelihood, Adam.

    kinds: the mixture of players, each "random", "blind" or "oracle", taken in turn. With habit, stops as soon as
    reading_habit() is at least that in every family. The policy given back is a running average of the last twenty
    batches' weights or so: from one batch to the next, the share of episodes that read wanders between .09 and .18.
    """
    unknown = [kind for kind in kinds if kind not in PLAYS]
    if unknown or not kinds:
        raise ValueError(f"kinds: unknown player {unknown}; allowed: {', '.join(PLAYS)}, at least one")
    rng, started = random.Random(seed), time.perf_counter()
    with torch.random.fork_rng(devices=[]):                     # the seed is ours; the caller's stays as it was
        torch.manual_seed(seed)
        model, average = Policy(len(tok)), Policy(len(tok))
    average.load_state_dict(model.state_dict())
    plays = [(task, kind) for kind in kinds for task in TRAIN_TASKS]
    pool = [demonstrate(tok, task, kind, rng) for task, kind in plays]
    optimizer = torch.optim.Adam(model.parameters(), lr=IMITATION_LR, betas=(0.9, 0.95), foreach=True)
    for batch in range(1, batches + 1):
        if rename:
            demos = [demonstrate(tok, randomize_names(task, rng), kind, rng) for task, kind in rng.sample(plays, DEMOS_PER_BATCH)]
        else:
            demos = rng.sample(pool, DEMOS_PER_BATCH)
        logps = token_logps(model, collate(demos))
        loss = -logps.sum() / sum(sum(demo["mask"]) for demo in demos)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.05)
        if batch % 10 == 0 and habit is not None and min(reading_habit(average, tok)) >= habit:
            break
        if batch % 100 == 0 and not quiet:
            print(f"  imitation, batch {batch:3}: loss {loss:.3f}, {time.perf_counter() - started:.1f} s", flush=True)
    if not quiet:
        print(f"  imitation ended after {batch} batches, {time.perf_counter() - started:.1f} s", flush=True)
    return average


def make_rl_base(tok, seed=0, quiet=True):
    """The base agent that RL can build on: one demonstration in nine is the oracle's, who reads, then applies the op.

    Training stops while the habit is weak: an agent that reads in one episode of eight or so and is then right about
    every other time. Every family has to have some of it; an op that never follows a read is one RL never finds.
    """
    return make_base_agent(tok, seed, ("random", "blind") * 4 + ("oracle",), rename=True, batches=800, habit=0.33, quiet=quiet)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

def base_agent_stats(model, tok, tasks, seed, n_samples=16):
    """What a base agent does in the gym as built (function names, unlimited edits): shares over n_samples a task."""
    envs = [BugFixEnv(task) for task in tasks for _ in range(n_samples)]
    episodes = rollout_batch(model, tok, envs, torch.Generator().manual_seed(seed))
    firsts = [first_edit(episode) for episode in episodes]
    reading = [first for first in firsts if first and first["read_before"]]
    policy_logps = [logp for episode in episodes for logp, sampled in zip(episode["logps"], episode["mask"]) if sampled]
    return {"pass rate": sum(env.passed for env in envs) / len(envs), "reads first": len(reading) / len(envs),
            "then right": sum(first["right"] for first in reading) / max(len(reading), 1),
            "edits": sum(len(env.edits) for env in envs) / len(envs),
            "entropy": -sum(policy_logps) / len(policy_logps)}         # of the sampled tokens: an estimate without bias


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
    print(f"\n{len(args.seeds)} seeds, mean and range\n{'':18}" + "".join(f"{column:>20}" for column in columns))
    for (name, label), stats in rows.items():
        values = {column: [row[column] for row in stats] for column in columns}
        print(f"{name + ', ' + label:18}" + "".join(
            f"{sum(v) / len(v):8.2f} ({min(v):.2f}-{max(v):.2f})" for v in values.values()))


if __name__ == "__main__":
    main()
