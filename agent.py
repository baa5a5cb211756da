"""The policy: tokenizer, transformer, log-probabilities, rollouts, and the base agents.

Read env.py first. In reinforcement learning (RL) the policy is the thing that is trained: it
assigns a probability to every action. Here it is a language model, and its actions are the tokens
of its calls. A rollout plays an episode: the policy and the environment take turns and write into
one sequence of tokens. Only the tokens that the policy sampled are trained on. A mask says which
ones those are:

    words  issue : leap is wrong <call> read <end> def leap ( n ) ... <call> edit or_to_and <end> ok
    mask     0   0  0   0   0      1     1    1     0   0  0 0 0        1     1       1       1    0

This file is only imported. `python ablate.py base` makes its base agents and shows what they do.
"""
import copy
import json
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from env import (
    CALLS,
    FIX_OP,
    FUNCTION_NAMES,
    OPS,
    PLAYS,
    TASKS,
    TRAIN_TASKS,
    BugFixEnv,
    source_words,
)

# The letters in the comments on shapes: a batch has B rows, one for each episode, and T columns,
# the number of tokens in the longest episode. The vocabulary has V words. The model has the width D
# and H attention heads, each of d = D / H numbers. S is for the cache, and explained there.


# ---- Tokenizer -----------------------------------------------------------------------------------
# A word is a token. The tokenizer is a plain dict, word -> id.


def build_tokenizer():
    """Returns a dict, word -> id, with every word that the gym or a policy can say."""
    words = ["<call>", "<end>"] + CALLS + OPS + FUNCTION_NAMES
    words += ["issue", ":", "is", "wrong"]
    words += ["ok", "pass", "fail", "refused", "malformed", "truncated"]
    words += ["+"]                                      # only the op widen writes it
    in_sources = set()
    for task in TASKS:
        in_sources.update(source_words(task["source"]))
    words += sorted(in_sources - set(words))
    return {word: i for i, word in enumerate(words)}


def vocabulary_size(tok):
    """The number of ids that a policy needs. A tokenizer of your own may leave ids unused."""
    return max(tok.values()) + 1


def encode(tok, words):
    """Returns the ids of a list of words. Raises KeyError for an unknown word."""
    return [tok[word] for word in words]


def decode(tok, ids):
    """Returns the words of a list of ids. An id without a word becomes <unused>."""
    word_of = {i: word for word, i in tok.items()}
    return [word_of.get(i, "<unused>") for i in ids]


# ---- The policy: a decoder-only transformer ------------------------------------------------------
# Skip the lines about the cache at first. Without them this is the plain transformer. With them the
# results are the same up to rounding, and sampling is faster: see "The cache" below.


class Block(nn.Module):
    """One layer: attention, then a feed-forward network. Each adds its result to x (B, T, D)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, cache=None, layer=None):
        B, T, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1)     # (B, T, 3, H, d)
        q = qkv[:, :, 0]                                                # (B, T, H, d)
        kv = qkv[:, :, 1:]                                              # (B, T, 2, H, d)
        visible = None                                  # is_causal below makes a causal mask
        if cache is not None:
            kv = remember(cache, layer, kv)                             # (B, S, 2, H, d)
            visible = cache["visible"]                                  # (B, 1, T, S)
        k, v = kv.unbind(dim=2)
        q = q.transpose(1, 2)                                           # (B, H, T, d)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None
        )
        seen = seen.transpose(1, 2).reshape(B, T, D)
        x = x + self.out(seen)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Policy(nn.Module):
    """A transformer with 163k parameters: ids (B, T) -> logits of the next word (B, T, V).

    It has no dropout. With dropout, a token would have one probability when it is sampled and
    another when it is trained on. It has no positional embeddings. A decoder can learn enough about
    the order of words without them, since the causal mask shows each word a different set of words
    (arXiv 2305.19466). Exact positions make it easy to learn the twenty training sources by heart,
    instead of learning to find the bug. A policy with positions fails on held-out tasks.
    """

    def __init__(self, vocab, width=80, layers=2, heads=4):
        super().__init__()
        self.shape = {"vocab": vocab, "width": width, "layers": layers, "heads": heads}
        self.words = nn.Embedding(vocab, width)         # the output layer has the same weights
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # Each embedding has a norm of about 1. With the usual std of 0.02, imitation never learned
        # which op fits which source. With small weights for queries, keys and values (0.5 below),
        # attention starts as an average over all words so far. The outputs of a layer are damped,
        # because they add up in x.
        nn.init.normal_(self.words.weight, std=width ** -0.5)
        damped = (2 * layers) ** -0.5
        for block in self.blocks:
            init_linear(block.qkv, 0.5)
            init_linear(block.up, 1.0)
            init_linear(block.out, damped)
            init_linear(block.down, damped)

    def forward(self, ids, cache=None):
        """Each word sees itself and the words before it. Rows may be padded on the right.

        With a cache, ids holds only the words that each row has not read yet.
        """
        if cache is not None:
            make_room(cache, ids.shape[1])
        x = self.words(ids)                                             # (B, T, D)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.norm(x) @ self.words.weight.T                       # (B, T, V)


def init_linear(layer, gain):
    nn.init.normal_(layer.weight, std=gain * layer.in_features ** -0.5)
    nn.init.zeros_(layer.bias)


# ---- Log-probabilities ---------------------------------------------------------------------------
# An episode is a dict. Three of its entries are lists of equal length, with one value for each
# token:
#
#   ids     the tokens of policy and environment, in the order in which they were written
#   mask    1 where the player (the policy, or a scripted one) wrote the token, 0 elsewhere
#   logps   log-probability with which the policy sampled the token, 0 where it did not. Only for
#           statistics and displays: the training computes log-probabilities again


def pad(rows):
    """Lists of different lengths -> a tensor (B, T), padded on the right with 0."""
    T = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (T - len(row)) for row in rows])


def collate(episodes):
    """Returns a batch: a dict of tensors (B, T) with ids, mask (bool) and logps.

    Padding has the id 0, which is also the id of a word. That does no harm, because its mask is 0,
    and no word sees what stands to the right of it.
    """
    batch = {}
    for key in ("ids", "mask", "logps"):
        if key in episodes[0]:                          # imitation would not need logps
            batch[key] = pad([episode[key] for episode in episodes])    # (B, T)
    batch["mask"] = batch["mask"].bool()
    return batch


def log_softmax(logits, temperature):
    """Log-probabilities (..., V) of all words, from logits (..., V), in float32 or better.

    The sampler and the trainer both call it. If only one of them divided by the temperature, or if
    one used another precision, they would disagree about the probability of a token.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} must be greater than 0")
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(precise / temperature, dim=-1)


def token_logps(model, batch, temperature=1.0, with_entropy=False):
    """Log-probability of each token whose mask is 1, given the tokens before it: (B, T).

    batch has ids (B, T) and mask (B, T), which is a bool. model is any module that turns ids into
    logits (B, T, V), and log_softmax makes log-probabilities of them. Column t belongs to the token
    at t. Column 0 is always 0, because the environment speaks first.

    Set with_entropy to get a pair: the log-probabilities, and the entropy of the distribution that
    each token came from, at the same temperature, (B, T), in nats and without a gradient. Both are
    0 where the mask is 0.
    """
    ids, mask = batch["ids"], batch["mask"]
    all_logp = log_softmax(model(ids[:, :-1]), temperature)             # (B, T-1, V)
    logp = all_logp.gather(2, ids[:, 1:, None])[:, :, 0]                # (B, T-1), tokens 1 to T-1
    logp = F.pad(logp, (1, 0))                                          # (B, T), tokens 0 to T-1
    logp = logp.masked_fill(mask == 0, 0)
    if not with_entropy:
        return logp
    all_logp = all_logp.detach()
    entropy = -(all_logp.exp() * all_logp).sum(dim=-1)                  # (B, T-1)
    return logp, F.pad(entropy, (1, 0)).masked_fill(mask == 0, 0)


def similar_lengths(batch, parts=4):
    """Cuts a batch into parts whose rows have similar lengths, to spend less time on padding.

    If all rows were padded to the longest one, a third of the work would be for padding. Each part
    is cut off after the last column in which one of its rows has mask 1. All tensors of the batch
    have the shape (B, T). Yields (rows, part): the row indices, and a batch of these rows.
    """
    columns = torch.arange(batch["ids"].shape[1])                       # (T,)
    last = (batch["mask"] * columns).amax(dim=1)        # (B,) the last column with mask 1
    last = last.clamp(min=1)                            # token_logps needs at least two columns
    for rows in last.argsort().tensor_split(min(parts, len(last))):
        width = int(last[rows].max()) + 1
        yield rows, {name: x[rows, :width] for name, x in batch.items()}


@torch.no_grad()
def frozen_logps(model, batch, temperature=1.0):
    """token_logps and entropies of a whole batch, (B, T) each, without a gradient."""
    logp = torch.zeros(batch["ids"].shape)
    entropy = torch.zeros(batch["ids"].shape)
    for rows, part in similar_lengths(batch):
        part_logp, part_entropy = token_logps(model, part, temperature, with_entropy=True)
        width = part_logp.shape[1]
        logp[rows, :width] = part_logp
        entropy[rows, :width] = part_entropy
    return logp, entropy


# ---- Rollouts ------------------------------------------------------------------------------------
# Besides ids, mask and logps, an episode has `calls`, each call as a list of words, and `env`, its
# environment. The ids that were sampled are the ids that are trained on. A call is decoded for the
# environment, but its text is never encoded again. Here, where a word is a token, that would do no
# harm. But a tokenizer of subwords can split the same text in another way.

MAX_CALL_TOKENS = 4         # <call> edit OP <end>. A call that has not ended by then is malformed.
MAX_EPISODE_TOKENS = 2048   # far more than an episode of this gym has


def step_generator(seed, step):
    """A torch.Generator for one training step. Its draws do not depend on earlier steps."""
    return torch.Generator().manual_seed(int(seed) * 1_000_003 + step)


def python_rng(generator):
    """A random.Random whose seed is drawn from a torch.Generator."""
    return random.Random(torch.randint(2 ** 62, (1,), generator=generator).item())


@torch.inference_mode()
def rollout_batch(model, tok, envs, generator, temperature=1.0):
    """Plays one episode in each environment. Returns the episodes, in the order of envs.

    All episodes run in lockstep, turn by turn. In each turn the policy samples a call for every
    live episode, the environments answer, and finished episodes leave. An environment gets the
    words between <call> and <end>, in a list of its own. If a call does not begin with <call>, or
    does not end with <end>, it gets all words of the call, and will answer malformed. `calls`
    keeps the same words. The answer to the last call is not appended, because nobody reads it.

    All randomness comes from generator, a torch.Generator. Raises ValueError if two episodes share
    an environment, if a reset returns no words, or for a temperature that is not above 0. Raises
    RuntimeError for an episode of more than MAX_EPISODE_TOKENS tokens, which may never end.
    """
    if len({id(env) for env in envs}) < len(envs):
        raise ValueError("envs: each episode needs an environment object of its own")
    episodes = [begin_episode(tok, env) for env in envs]
    live = list(episodes)
    cache = new_cache(model, len(live))                 # row b belongs to live[b]
    while live:
        calls = sample_calls(model, tok, live, cache, generator, temperature)
        staying = []
        for row, (episode, call) in enumerate(zip(live, calls)):
            words = decode(tok, call)
            if words[0] == "<call>" and words[-1] == "<end>":
                words = words[1:-1]
            episode["calls"].append(words)
            answer, done = episode["env"].step(list(words))
            if done:
                continue
            append(episode, encode(tok, answer), mask=0)
            if len(episode["ids"]) > MAX_EPISODE_TOKENS:
                raise RuntimeError("an episode does not end: does step ever return done?")
            staying.append(row)
        if len(staying) < len(live):
            live = [live[row] for row in staying]
            keep_rows(cache, staying)
    return episodes


def begin_episode(tok, env):
    """An episode in which only the environment has spoken."""
    episode = {"ids": [], "mask": [], "logps": [], "calls": [], "env": env}
    append(episode, encode(tok, env.reset()), mask=0)
    if not episode["ids"]:
        raise ValueError("reset: it must return at least one word")
    return episode


def append(episode, ids, mask, logp=0.0):
    """Appends tokens of one speaker to an episode."""
    episode["ids"] += ids
    episode["mask"] += [mask] * len(ids)
    episode["logps"] += [logp] * len(ids)


def sample_calls(model, tok, live, cache, generator, temperature):
    """Samples one call for each live episode, token by token, and appends it to the episode.

    Returns the calls as lists of ids. All rows run until the longest call ends. What is sampled for
    a row whose call has ended is ignored.
    """
    calls = [[] for _ in live]
    writing = range(len(live))                          # the rows whose call has not ended
    for _ in range(MAX_CALL_TOKENS):
        logits = next_logits(model, live, cache)        # (B, V) at each row's last token
        logp = log_softmax(logits, temperature)                         # (B, V)
        chosen = torch.multinomial(logp.exp(), 1, generator=generator)  # (B, 1)
        chosen_logp = logp.gather(1, chosen)[:, 0].tolist()
        chosen = chosen[:, 0].tolist()
        for row in writing:
            calls[row].append(chosen[row])
            append(live[row], [chosen[row]], mask=1, logp=chosen_logp[row])
        writing = [row for row in writing if chosen[row] != tok["<end>"]]
        if not writing:
            break
    return calls


# ---- The cache: skip it at first -----------------------------------------------------------------
# A token's keys and values depend only on the token itself and those before it. So they stay the
# same while an episode grows. The cache keeps them, and the policy computes only those of new
# tokens. In this section, T is the number of new tokens in the row that has the most of them. The
# cache is a dict:
#
#   lengths       (B,) how many tokens each row has read
#   keys_values   (layers, B, room, 2, H, d) their keys and values. Each row has `room` places, and
#                 those at the end are free
#   places        (B, T) the places of the new tokens
#   visible       (B, 1, T, S) true where a new token sees a place. S places are in use
#
# make_room sets the last two. A row with fewer than T new tokens also stores padding, after its new
# tokens. The new tokens do not see this padding, because a token sees only places up to its own.
# The row's next tokens overwrite it, because `lengths` does not count it.


def next_logits(model, live, cache):
    """Logits of the next token of each live episode, (B, V).

    Without a cache this would be model(pad(all ids)), taken at each row's last token. Here each row
    reads only the tokens that are not in its cache yet. A row has none if its call has ended while
    other rows are still writing. Then it reads padding, and its logits are junk that nobody uses.
    """
    have_read = cache["lengths"].tolist()
    unread = [episode["ids"][n:] for episode, n in zip(live, have_read)]
    n_new = torch.tensor([len(ids) for ids in unread])                  # (B,)
    logits = model(pad(unread), cache)                                  # (B, T, V)
    cache["lengths"] += n_new
    return logits[torch.arange(len(live)), n_new - 1]       # index -1, which is junk, if n_new is 0


def new_cache(model, B):
    """An empty cache for B rows."""
    H = model.shape["heads"]
    d = model.shape["width"] // H
    weight = model.words.weight
    return {
        "lengths": torch.zeros(B, dtype=torch.long),
        "keys_values": weight.new_zeros(model.shape["layers"], B, 64, 2, H, d),
    }


def make_room(cache, T):
    """Prepares a cache for T new tokens in each row."""
    cache["places"] = cache["lengths"][:, None] + torch.arange(T)       # (B, T)
    S = int(cache["places"].max()) + 1
    missing = S - cache["keys_values"].shape[2]
    if missing > 0:                                     # 64 more, so that this happens rarely
        # F.pad takes pairs (before, after), from the last dimension on. Only room grows
        cache["keys_values"] = F.pad(cache["keys_values"], (0, 0, 0, 0, 0, 0, 0, missing + 64))
    visible = torch.arange(S) <= cache["places"][:, :, None]            # (B, T, S)
    cache["visible"] = visible[:, None]


def remember(cache, layer, kv):
    """Stores keys and values of the new tokens (B, T, 2, H, d). Returns all (B, S, 2, H, d)."""
    rows = torch.arange(len(kv))[:, None]                               # (B, 1)
    stored = cache["keys_values"][layer]                                # (B, room, 2, H, d)
    stored[rows, cache["places"]] = kv
    S = cache["visible"].shape[3]
    return stored[:, :S]


def keep_rows(cache, rows):
    """Keeps only these rows."""
    cache["lengths"] = cache["lengths"][rows]
    cache["keys_values"] = cache["keys_values"][:, rows]


# ---- Base agents: RL starts from an imitation of scripted play -----------------------------------

IMITATION_BATCHES = 190
DEMOS_PER_BATCH = 32
IMITATION_LR = 2e-3


def demonstrate(tok, task, kind, rng):
    """One episode of the scripted player PLAYS[kind]."""
    episode = begin_episode(tok, BugFixEnv(task))
    for call in PLAYS[kind](task, rng):
        append(episode, encode(tok, ["<call>", *call, "<end>"]), mask=1)
        answer, done = episode["env"].step(call)
        if not done:
            append(episode, encode(tok, answer), mask=0)
    return episode


def make_base_agent(tok, seed=0, kinds=("random", "blind") * 4, batches=IMITATION_BATCHES):
    """A policy that imitates scripted play on the training tasks, by maximum likelihood.

    It imitates a fixed set of demonstrations. Each entry of kinds adds two demonstrations by that
    player for each training task, so a player that is listed more often has a larger share.

    The functions keep their own names here, so a name tells which task it is. The demonstrations
    are a fixed set, less than twenty for each name, so the policy can learn them by heart, and with
    them the names. This is a deliberate trap. RL can then learn which op belongs to which name, and
    never read. The README shows an agent that falls into the trap. Random names in the gym prevent
    it.

    Returns a policy whose weights are an exponential moving average, over about the last twenty
    batches. How often the policy reads changes a lot from one batch to the next, and with averaged
    weights much less.
    """
    rng = random.Random(seed)
    demos = []
    for kind in kinds:
        for task in TRAIN_TASKS:
            demos.append(demonstrate(tok, task, kind, rng))
            demos.append(demonstrate(tok, task, kind, rng))
    with torch.random.fork_rng(devices=[]):             # leave torch's global random state alone
        torch.manual_seed(seed)
        model = Policy(vocabulary_size(tok))
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=IMITATION_LR, betas=(0.9, 0.95))
    for _ in range(batches):
        batch = collate(rng.sample(demos, DEMOS_PER_BATCH))
        logp = sum(token_logps(model, part).sum() for rows, part in similar_lengths(batch))
        loss = -logp / batch["mask"].sum()              # a mean over the player's tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean_weight, weight in zip(average.parameters(), model.parameters()):
                mean_weight.lerp_(weight, 0.05)
    return average


def make_rl_base(tok, seed=0):
    """The default base agent: one demonstration in nine is the oracle's.

    It reads now and then. After reading, its edit is right more often than a guess would be. This
    is what RL can build on.
    """
    return make_base_agent(tok, seed, ("random", "blind") * 4 + ("oracle",))


# ---- Files ---------------------------------------------------------------------------------------


def save_policy(model, tok, config, path):
    """Writes weights, architecture, words and config (a dict, for the record) to a file.

    It writes to a temporary file first and then renames it, so an older policy is never left half
    overwritten.
    """
    model = getattr(model, "_orig_mod", model)          # torch.compile wraps the policy
    saved = {
        "shape": model.shape,
        "weights": model.state_dict(),
        "words": dict(tok),
        "config": json.dumps(config, default=str),
    }
    part = part_file(path)
    torch.save(saved, part)
    os.replace(part, part.removesuffix(".part"))        # part_file followed links


def part_file(path):
    """Where save_policy writes first. Raises OSError if path exists and is not a regular file."""
    path = os.path.realpath(path)                       # replace what a link leads to
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    return path + ".part"


def load_policy(tok, path):
    """Returns the policy that save_policy wrote to a file, if it was trained with these words."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    words = saved["words"]
    if isinstance(words, list):                         # an older file: words in the order of ids
        words = {word: i for i, word in enumerate(words)}
    if words != tok:
        raise ValueError(f"{path}: the policy was trained with another vocabulary")
    with torch.random.fork_rng(devices=[]):             # leave torch's global random state alone
        model = Policy(**saved["shape"])
    model.load_state_dict(saved["weights"])
    return model


# ---- What an agent did ---------------------------------------------------------------------------
NAN = float("nan")


def mean(values):
    """The mean of those values that are not nan, or nan if there are none."""
    values = [value for value in values if value == value]
    if not values:
        return NAN
    return sum(values) / len(values)


def number_or_nan(env, name):
    """An attribute of an environment as a number, or nan if the environment does not have it."""
    value = getattr(env, name, None)
    return NAN if value is None else float(value)


def behavior(episode):
    """What the agent did in one episode, as a dict of numbers. See behavior_stats.

    An environment of your own may have no list `edits` of the ops that were applied, or a task that
    is not one of the gym's.
    """
    env, calls = episode["env"], episode["calls"]
    edits = getattr(env, "edits", None)
    n_edits = read_first = first_edit_right = read_then_right = NAN
    if isinstance(edits, list):
        n_edits = len(edits)
        if not edits:
            read_first = 0.0
        elif ["edit", edits[0]] in calls:               # false if another env's edits are not ops
            before = calls[:calls.index(["edit", edits[0]])]
            read_first = float(["read"] in before)
            first_edit_right = is_right(env, edits[0])
    if read_first == 1:
        read_then_right = first_edit_right
    passed = number_or_nan(env, "passed")
    truncated = number_or_nan(env, "truncated")
    failed = 1 - passed - truncated                     # submitted, but wrong
    return {
        "pass_rate": passed,
        "reward": episode.get("reward", NAN),
        "reads": calls.count(["read"]),
        "tests": calls.count(["test"]),
        "edits": n_edits,
        "read_first": read_first,
        "first_edit_right": first_edit_right,
        "read_then_right": read_then_right,
        "turns": len(calls),
        "policy_tokens": sum(episode["mask"]),
        "truncated": truncated,
        "read_passed": read_first * passed,
        "read_failed": read_first * failed,
        "guess_passed": (1 - read_first) * passed,
        "guess_failed": (1 - read_first) * failed,
    }


def is_right(env, op):
    """1 if the op repairs the task, 0 if not, nan if the task is not one of the gym's."""
    task = getattr(env, "task", None)
    if not isinstance(task, dict) or task.get("name") not in FIX_OP:
        return NAN
    return float(op == FIX_OP[task["name"]])


def behavior_stats(episodes):
    """Means over episodes, as a dict. nan where no environment provides the value.

    The reward alone does not show whether an agent reads or guesses.

        pass_rate                   share that passes the hidden tests
        reads, tests, edits         number of each in an episode (edits: those that were applied)
        read_first                  share of episodes that read before their first edit
        first_edit_right            share of first edits that are the right op
        read_then_right             the same, among episodes that read first
        turns, policy_tokens        length of an episode
        truncated                   share that runs out of turns
        read_passed, read_failed    share that read first, submitted, and were right or wrong
        guess_passed, guess_failed  the same for those that did not read first

    An episode without an edit counts among those that did not read first. truncated and the last
    four shares add up to 1.
    """
    rows = [behavior(episode) for episode in episodes]
    return {name: mean(row[name] for row in rows) for name in rows[0]}


# grpo.py prints this at the start of a training, above the lines for the steps.
PICTURE = """
At the end of each line, a character stands for 1/32 of the step's attempts, sorted:
  R  read before editing, and passed      r  read before editing, and failed
  G  guessed, and passed                  .  guessed (or edited nothing), and failed
  x  ran out of turns
"""
LETTERS = {
    "R": "read_passed",
    "r": "read_failed",
    "G": "guess_passed",
    ".": "guess_failed",
    "x": "truncated",
}


def picture(stats):
    """Draws what the episodes did from their behavior_stats, as one string. See PICTURE."""
    text = ""
    share = 0
    for letter, key in LETTERS.items():
        share += stats[key]                             # a running total
        text = text.ljust(round(32 * share), letter)    # fill up with the letter to that total
    return text


def most_common(episodes):
    """The first episode that makes the most common sequence of calls."""
    calls = [episode["calls"] for episode in episodes]
    return episodes[calls.index(max(calls, key=calls.count))]
