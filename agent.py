"""The policy: a tokenizer, a small transformer, its rollouts and log-probabilities, and the base agents.

Read env.py first. In reinforcement learning (RL) the policy is the thing that is trained: it assigns a
probability to every action. Here it is a language model, and its actions are the tokens of its calls. A
rollout plays an episode: the policy and the environment take turns and write into one sequence of tokens.
Only the tokens that the policy sampled are trained on. A mask says which ones those are:

    words  issue : leap is wrong  <call> read <end>  def leap ( n ) : ...  <call> edit or_to_and <end>  ok ...
    mask     0   0  0   0   0       1     1    1      0   0  0 0 0 0         1     1       1       1     0

    python agent.py                 make both base agents for seeds 0 to 4 and print what they do
"""
import argparse
import copy
import json
import os
import random
import signal
from itertools import combinations

if __name__ == "__main__":      # before the slow imports: Ctrl-C and a closed pipe end the script quietly
    for name in {"SIGINT", "SIGPIPE"} & set(dir(signal)):
        signal.signal(getattr(signal, name), signal.SIG_DFL)

import torch
import torch.nn as nn
import torch.nn.functional as F

from env import (CALLS, FIX_OP, FUNCTION_NAMES, HELDOUT_TASKS, OPS, PLAYS, TASKS, TRAIN_TASKS, BugFixEnv,
                 EditBudgetEnv, randomize_names, source_words)

# The letters: B rows of a batch, T its columns, V words in the vocabulary, D width of the model, H attention
# heads of d = D / H each, `room` the places of a cache, S those of them in use.

# ---- Tokenizer: a word is a token --------------------------------------------------------------------------
def build_tokenizer():
    """Returns a plain dict, word -> id, with every word that the gym or a policy can say."""
    words = ["<call>", "<end>"] + CALLS + OPS + FUNCTION_NAMES
    words += ["issue", ":", "is", "wrong", "ok", "pass", "fail", "refused", "malformed", "truncated"]
    words += ["+"]                                              # written by the op widen only
    words += sorted({word for task in TASKS for word in source_words(task["source"])} - set(words))
    return {word: i for i, word in enumerate(words)}

def encode(tok, words):
    """Returns the ids of a list of words. An unknown word is a ValueError that names it."""
    for word in words:
        if word not in tok:
            raise ValueError(f"unknown word {word!r}, the tokenizer's {len(tok)} words are {' '.join(tok)!r}")
    return [tok[word] for word in words]

def decode(tok, ids):
    """Returns the words of a list of ids."""
    words = list(tok)
    return [words[i] for i in ids]

# ---- The policy: a decoder-only transformer ----------------------------------------------------------------
class Block(nn.Module):
    """One layer: attention, then a feed-forward network. Each adds its result to x (B, T, D)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, keys_values=None, places=None, visible=None):
        """keys_values (B, room, 2, H, d), places (B, T), visible (B, 1, T, S): see Policy.forward."""
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1)                         # (B, T, 3, H, d)
        q, k, v = qkv.unbind(dim=2)                                                         # (B, T, H, d)
        if keys_values is not None:
            keys_values[torch.arange(B)[:, None], places] = qkv[:, :, 1:]       # k and v, into the cache
            k, v = keys_values[:, :visible.shape[3]].unbind(dim=2)                          # (B, S, H, d)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)                   # (B, H, ., d)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=(visible is None))
        x = x + self.out(seen.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class Policy(nn.Module):
    """A transformer with 163k parameters: ids (B, T) -> logits of the next word (B, T, V).

    It has no dropout, because sampler and trainer must agree while the weights are the same. It has no
    positional embeddings, since a decoder can do without them (arXiv 2305.19466). With twenty training
    programs, the position where a source ends identifies the program. A policy with positions learns that
    instead of the bug, and fails on held-out tasks.
    """

    def __init__(self, vocab, width=80, layers=2, heads=4):
        super().__init__()
        self.shape = {"vocab": vocab, "width": width, "layers": layers, "heads": heads}
        self.words = nn.Embedding(vocab, width)     # the input embedding, and transposed the output layer
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # Embeddings get norm 1. With the usual std of 0.02, the logits start so equal that imitation never
        # learns which op fits which source. Small query and key weights let attention start as an average
        # over all earlier words. A layer's outputs are scaled down because they add up in x.
        nn.init.normal_(self.words.weight, std=width ** -0.5)
        for block in self.blocks:
            for layer, gain in ((block.qkv, 0.5), (block.up, 1.0), (block.out, (2 * layers) ** -0.5),
                                (block.down, (2 * layers) ** -0.5)):
                nn.init.normal_(layer.weight, std=gain * layer.in_features ** -0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, ids, cache=None):
        """Each word sees itself and the words before it. Rows may be padded on the right with anything.

        With a cache (see new_cache; without gradients only), ids holds the words that each row has not read
        yet. Their keys and values go behind the row's others. The caller then adds the number of real words
        to cache["lengths"]. Padding is written too, but no word looks beyond its own place.
        """
        x = self.words(ids)                                                                 # (B, T, D)
        if cache is None:
            for block in self.blocks:
                x = block(x)
        else:
            places = cache["lengths"][:, None] + torch.arange(ids.shape[1])                 # (B, T)
            S = int(places.max()) + 1
            missing = S - cache["keys_values"].shape[2]
            if missing > 0:                     # with some room to spare, so that this happens rarely
                cache["keys_values"] = F.pad(cache["keys_values"], (0, 0, 0, 0, 0, 0, 0, missing + 64))
            visible = (torch.arange(S) <= places[:, :, None])[:, None]                      # (B, 1, T, S)
            for block, keys_values in zip(self.blocks, cache["keys_values"]):
                x = block(x, keys_values, places, visible)
        return self.norm(x) @ self.words.weight.T

    def new_cache(self, B):
        """An empty cache for B rows: keys_values (layers, B, room, 2, H, d), and lengths (B,), the number of
        words that each row has read. What stands beyond lengths is junk, which the next words overwrite."""
        H, d = self.shape["heads"], self.shape["width"] // self.shape["heads"]
        return {"keys_values": self.words.weight.new_zeros(self.shape["layers"], B, 64, 2, H, d),
                "lengths": torch.zeros(B, dtype=torch.long)}

# ---- Rollouts ----------------------------------------------------------------------------------------------
MAX_CALL_TOKENS = 4         # <call> edit OP <end>. A call that has not ended by then is malformed.
MAX_EPISODE_TOKENS = 2048   # more than any BugFix episode has: only an environment that never ends gets there

def ask(env, tok, call=None):
    """Calls env.reset(), or env.step(call). Returns (ids of its words, done). RuntimeError if it fails."""
    try:
        words, done = (env.reset(), False) if call is None else env.step(call)
        if call is None and not words:
            raise ValueError("there must be at least one word")
        return encode(tok, list(words)), bool(done)
    except Exception as error:
        what = "reset() must return words" if call is None else f"step({call}) must return (words, done)"
        raise RuntimeError(f"{type(env).__name__}.{what} of the tokenizer: {error!r}") from error

@torch.inference_mode()
def rollout_batch(model, tok, envs, generator, temperature=1.0):
    """Plays one episode in each environment, all in lockstep, turn by turn. Returns the list of episodes.

    In each turn every live episode reads what its environment said last, and samples its call token by token.
    Then the environments answer, and finished episodes leave. All randomness comes from the torch.Generator.

    An episode is a dict. ids, mask (1 on tokens that the policy sampled, 0 on words of the environment) and
    logps (the sampler's log-probabilities, 0 where the mask is 0) are lists of equal length. calls has each
    call as a list of words, env is the environment. The ids that were sampled are the ids that are trained
    on. Nothing is decoded and encoded again, because that can change ids.
    """
    if len({id(env) for env in envs}) < len(envs):
        raise ValueError(f"the same {type(envs[0]).__name__} object was given for several episodes")
    heard = [ask(env, tok)[0] for env in envs]                  # per row, the ids that the model must read
    episodes = [{"ids": list(ids), "mask": [0] * len(ids), "logps": [0.0] * len(ids), "calls": [], "env": env}
                for ids, env in zip(heard, envs)]
    live, cache = list(episodes), model.new_cache(len(envs))    # row b of the cache belongs to live[b]
    while live:
        logits = read(model, heard, cache)                                                  # (B, V)
        calls = sample_calls(model, tok, live, logits, cache, generator, temperature)
        staying, heard = [], []
        for row, (episode, call) in enumerate(zip(live, calls)):
            words = decode(tok, call)
            if words[0] == "<call>" and words[-1] == "<end>":   # if not, the markers go to it too
                words = words[1:-1]
            episode["calls"].append(words)
            ids, done = ask(episode["env"], tok, words)
            if done:                                            # nobody reads the last answer
                continue
            for key, values in (("ids", ids), ("mask", [0] * len(ids)), ("logps", [0.0] * len(ids))):
                episode[key] += values
            if len(episode["ids"]) > MAX_EPISODE_TOKENS:
                raise RuntimeError(f"{type(episode['env']).__name__}: an episode passed {MAX_EPISODE_TOKENS} "
                                   "tokens. Does step() ever return done?")
            staying.append(row)
            heard.append(call[-1:] + ids)               # the call's last token is not in the cache yet
        if len(staying) < len(live):
            live = [live[row] for row in staying]
            cache = {"keys_values": cache["keys_values"][:, staying], "lengths": cache["lengths"][staying]}
    return episodes

def read(model, new_ids, cache):
    """Feeds each row its new ids (a list of lists). Returns the logits after each row's last one, (B, V)."""
    lengths = torch.tensor([len(ids) for ids in new_ids])
    padded = torch.tensor([ids + [0] * (int(lengths.max()) - len(ids)) for ids in new_ids])
    logits = model(padded, cache)                                                           # (B, T, V)
    cache["lengths"] += lengths
    return logits[torch.arange(len(new_ids)), lengths - 1]

def sample_calls(model, tok, live, logits, cache, generator, temperature):
    """Samples a call for each live episode and appends it there. Returns the calls as lists of ids.

    A row whose call has ended keeps running until the longest call ends. What it computes is junk: the row's
    length does not grow, so the words that it reads next overwrite it.
    """
    calls, writing = [[] for _ in live], torch.ones(len(live), dtype=torch.bool)
    for n in range(1, MAX_CALL_TOKENS + 1):
        logp = torch.log_softmax(logits / temperature, dim=-1)                              # (B, V)
        if torch.isnan(logp).any():
            raise FloatingPointError("the policy's probabilities are nan, so its weights are broken")
        chosen = torch.multinomial(logp.exp(), 1, generator=generator)                      # (B, 1)
        chosen_logp = logp.gather(1, chosen)[:, 0].tolist()
        for row in writing.nonzero()[:, 0].tolist():
            calls[row].append(int(chosen[row]))
            for key, value in (("ids", int(chosen[row])), ("mask", 1), ("logps", chosen_logp[row])):
                live[row][key].append(value)
        writing &= chosen[:, 0] != tok["<end>"]
        if n == MAX_CALL_TOKENS or not writing.any():
            return calls
        logits = model(chosen, cache)[:, 0]                                                 # (B, V)
        cache["lengths"] += writing

# ---- Log-probabilities -------------------------------------------------------------------------------------
def collate(episodes):
    """Episodes -> a batch of tensors (B, T): ids, mask (bool), logps if there are any; and lengths (B,).

    Rows are padded on the right with 0. Padding can't be recognised by its id, because 0 is a word too.
    """
    lengths = [len(episode["ids"]) for episode in episodes]

    def padded(key):
        return torch.tensor([e[key] + [0] * (max(lengths) - n) for e, n in zip(episodes, lengths)])
    batch = {key: padded(key) for key in ("ids", "mask", "logps") if key in episodes[0]}
    return {**batch, "mask": batch["mask"].bool(), "lengths": torch.tensor(lengths)}

def token_logps(model, batch, temperature=1.0, with_entropy=False):
    """Log-probability of each token that the policy sampled, given the tokens before it: (B, T), 0 off the
    mask. Column t belongs to the token at t, and column 0 is always 0.

    model is any causal module, ids (B, T) -> logits (B, T, V). batch has ids and mask. All log-probabilities
    of the trainer come from here, so new and old ones are equal while the weights are. The temperature
    divides the logits as in sampling. with_entropy: also returns the entropies in nats of the distributions
    that the tokens came from, (B, T), without gradient. The rows go through the model in four buckets of
    similar length, because padding all of them to the longest takes longer.
    """
    ids, mask = batch["ids"], batch["mask"].bool()
    B, T = ids.shape
    last = (mask * torch.arange(T, device=ids.device)).amax(dim=1)          # (B,) the last sampled token
    order, parts = last.argsort(), []
    for rows in order.tensor_split(min(4, B)):
        n = max(int(last[rows].max()), 1)                       # reading tokens 0 to n - 1 predicts 1 to n
        logp = torch.log_softmax(model(ids[rows, :n]) / temperature, dim=-1)                # (b, n, V)
        found = [logp.gather(2, ids[rows, 1:n + 1, None])[..., 0]]                          # (b, n)
        if with_entropy:
            found.append(-(logp.detach().exp() * logp.detach()).sum(dim=-1))                # (b, n)
        parts.append([F.pad(values, (1, T - 1 - n)) for values in found])                   # (b, T)
    back = order.argsort()                                                  # to the order of the batch
    results = [torch.cat(part)[back].masked_fill(~mask, 0) for part in zip(*parts)]
    return tuple(results) if with_entropy else results[0]

# ---- Base agents: imitation of scripted play. They are the starting points of RL. --------------------------
IMITATION_BATCHES, DEMOS_PER_BATCH, IMITATION_LR = 190, 32, 2e-3

def demonstrate(tok, task, kind, rng):
    """One episode of a scripted player ("random", "blind" or "oracle"): {ids, mask} as in a rollout."""
    env = BugFixEnv(task)
    ids = encode(tok, env.reset())
    mask = [0] * len(ids)
    for call in PLAYS[kind](task, rng):
        said = encode(tok, ["<call>", *call, "<end>"])
        words, done = env.step(call)
        answer = [] if done else encode(tok, words)
        ids += said + answer
        mask += [1] * len(said) + [0] * len(answer)
    return {"ids": ids, "mask": mask}

def make_base_agent(tok, seed=0, kinds=("random", "blind") * 4, batches=IMITATION_BATCHES):
    """A policy that imitates scripted play on the training tasks, by maximum likelihood.

    It imitates a fixed set of demonstrations: two by each player in kinds (from env.PLAYS, repeat one to give
    it a larger share) on each task under its own name. Seen so often, the names are learned too, and RL can
    tie an op to a name. Returns a running average of the weights over some twenty batches, because how often
    the policy reads varies much between batches. ValueError for an unknown kind or none.
    """
    unknown = [kind for kind in kinds if kind not in PLAYS]
    if unknown or not kinds:
        raise ValueError(f"kinds: {unknown or 'none'} given, allowed are {', '.join(PLAYS)}, at least one")
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):             # leave torch's global random state alone
        torch.manual_seed(seed)
        model = Policy(len(tok))
    average = copy.deepcopy(model)
    demos = [demonstrate(tok, task, kind, rng) for kind in kinds for task in TRAIN_TASKS for _ in range(2)]
    optimizer = torch.optim.Adam(model.parameters(), lr=IMITATION_LR, betas=(0.9, 0.95))
    for _ in range(batches):
        batch = collate(rng.sample(demos, DEMOS_PER_BATCH))
        loss = -token_logps(model, batch).sum() / batch["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.lerp_(weight, 0.05)
    return average

def make_rl_base(tok, seed=0):
    """The base agent that RL can build on: the same, but one demonstration in nine is the oracle's. It reads
    now and then, and when it has read, it is right more often than a guess."""
    return make_base_agent(tok, seed, ("random", "blind") * 4 + ("oracle",))

def save_policy(model, tok, config, path):
    """Writes weights, architecture, words and config (a dict, for the record). The file appears whole or not
    at all. If it can't be written: OSError, or torch's RuntimeError."""
    torch.save({"shape": model.shape, "weights": model.state_dict(), "words": list(tok),
                "config": json.dumps(config, default=str)}, path + ".part")
    os.replace(path + ".part", path)

def load_policy(tok, path):
    """Reads a file of save_policy. OSError if it can't be read, ValueError if it has no policy that fits."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        words = saved["words"]
        with torch.random.fork_rng(devices=[]):         # leave torch's global random state alone
            model = Policy(**saved["shape"])
        model.load_state_dict(saved["weights"])
    except OSError:
        raise
    except Exception as error:      # torch fails in many ways on a file of another kind
        raise ValueError(f"has no policy whose weights fit its architecture ({type(error).__name__})"
                         ) from error
    if words != list(tok):
        raise ValueError(f"has a policy for {len(words)} words, which are not the tokenizer's {len(tok)}")
    return model

def refuse_same_file(parser, paths):
    """Ends the script if two of the paths (flag -> path or None) are one file."""
    for (flag, path), (other_flag, other) in combinations([item for item in paths.items() if item[1]], 2):
        if os.path.realpath(path) == os.path.realpath(other) or (
                os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)):
            parser.error(f"argument {other_flag}: {other} must be another file than that of {flag}")

# ---- What an agent did -----------------------------------------------------------------------------------
def mean(values):
    """The mean of those values that are not nan, or nan if there are none."""
    values = [value for value in values if value == value]
    return sum(values) / len(values) if values else float("nan")

def first_edit(episode):
    """{read_before, right} of the first edit that was applied, or None. right: it is the op in FIX_OP for the
    task's original name. Your own environment need not have a list `edits` or a task of the gym."""
    edits, task = getattr(episode["env"], "edits", None), getattr(episode["env"], "task", None)
    if not isinstance(edits, list) or not edits or ["edit", edits[0]] not in episode["calls"]:
        return None
    before = episode["calls"][:episode["calls"].index(["edit", edits[0]])]
    name = task.get("name") if isinstance(task, dict) else None
    return {"read_before": ["read"] in before, "right": FIX_OP.get(name) == edits[0]}

def behavior_stats(episodes):
    """Means over episodes, a dict. The reward alone can't tell an agent that reads from one that guesses.

    pass_rate (hidden tests), reward; reads, tests and edits (applied ones) per episode; read_first, the share
    that reads before its first edit; first_edit_right and read_then_right, the share of first edits that are
    right, of all and of those after a read; turns, policy_tokens, and the share that is truncated. nan where
    there is nothing to count. ValueError without episodes.
    """
    if not episodes:
        raise ValueError("episodes: there are none to evaluate")
    rows, nan = [], float("nan")
    for episode in episodes:
        env, first = episode["env"], first_edit(episode) or {}
        edits = getattr(env, "edits", None)
        rows.append({
            "pass_rate": bool(getattr(env, "passed", False)), "reward": episode.get("reward", nan),
            "reads": episode["calls"].count(["read"]), "tests": episode["calls"].count(["test"]),
            "edits": len(edits) if isinstance(edits, list) else nan,
            "read_first": first.get("read_before", False), "first_edit_right": first.get("right", nan),
            "read_then_right": first["right"] if first.get("read_before") else nan,
            "turns": len(episode["calls"]), "policy_tokens": sum(episode["mask"]),
            "truncated": bool(getattr(env, "truncated", False))})
    return {name: mean(row[name] for row in rows) for name in rows[0]}

# ---- Command line: what the two base agents do before any RL -----------------------------------------------
def base_agent_stats(model, tok, tasks, seed):
    """16 attempts at each task in the default gym (random names, one edit), as a dict of numbers. Here the
    advantage of an attempt is its reward minus the mean reward of all attempts at its task. If reading has no
    advantage, RL has no reason to do it more often."""
    rng, advantages = random.Random(seed), {True: [], False: []}
    envs = [EditBudgetEnv(randomize_names(task, rng), 1) for task in tasks for _ in range(16)]
    episodes = rollout_batch(model, tok, envs, torch.Generator().manual_seed(seed))
    for i, episode in enumerate(episodes):
        baseline = mean(env.passed for env in envs[i - i % 16:i - i % 16 + 16])
        advantages[["read"] in episode["calls"]].append(envs[i].passed - baseline)
    return {**behavior_stats(episodes), "advantage_if_read": mean(advantages[True]),
            "advantage_if_not": mean(advantages[False]),
            "entropy": -mean(logp for e in episodes for logp, m in zip(e["logps"], e["mask"]) if m)}

def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 101), metavar="N",
                        help="the number of seeds, 1 to 100 (default 5)")
    seeds, tok, rows = parser.parse_args().seeds, build_tokenizer(), {}
    torch.set_num_threads(1)
    for seed in range(seeds):
        for kind, make in (("plain", make_base_agent), ("rl", make_rl_base)):
            print(f"seed {seed}: base agent {kind}", flush=True)
            model = make(tok, seed)
            for label, tasks in (("training", TRAIN_TASKS), ("held-out", HELDOUT_TASKS)):
                rows.setdefault(f"{kind}, {label}", []).append(base_agent_stats(model, tok, tasks, seed))
    for column in "pass_rate read_first read_then_right entropy advantage_if_read advantage_if_not".split():
        print(f"\n{column}, mean (range) over {seeds} seeds")
        for label, stats in rows.items():
            values = [row[column] for row in stats]
            print(f"  {label:16}{mean(values):7.3f}  ({min(values):.3f} to {max(values):.3f})")

if __name__ == "__main__":
    main()
