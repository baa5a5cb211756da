"""The policy: tokenizer, a small transformer, its rollouts and log-probabilities, and the base agents.

Read env.py first. An episode is one sequence of token ids in which the environment and the policy take
turns. Only what the policy sampled is ever trained on, so a mask goes with the ids:

    words  issue : leap is wrong  <call> read <end>  def leap ( n ) : ...  <call> edit or_to_and <end>  ok ...
    mask     0   0  0   0   0       1     1    1      0   0  0 0 0 0         1     1       1       1     0

    python agent.py                 trains both base agents for seeds 0 to 4 and prints what they do
    python agent.py --seeds 1       for seed 0 alone
"""
import copy
import functools
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
IN_LOCKSTEP = 128           # episodes that are sampled together
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
# Tokens come packed: all tokens of all episodes in one (N, D) tensor, so that the linear layers, most of the
# work, see next to no padding. Only attention has to know which tokens form an episode. It is handed in as a
# function, attend(layer, qkv): one kind for training (packed_attention), one for sampling (run_unseen).


def by_onednn(f, x):
    """f(x) for x (N, D), with oneDNN's matrix products in place of torch's usual ones, which are MKL's.

    Both come with torch and give the same up to float error. On AMD processors oneDNN's are twice as fast,
    but compile something for each new N, so N is kept to few values (padded_to_128), and sampling, where it
    takes any value, is left out.
    """
    if (len(x) < 256 or len(x) % 128 or x.dtype != torch.float32 or torch.is_inference_mode_enabled()
            or not torch.backends.mkldnn.is_available()):
        return f(x)
    return f(x.to_mkldnn()).to_dense()


def padded_to_128(ids):
    """ids (N,), with zeros behind up to a multiple of 128 unless they are few."""
    return ids if len(ids) < 256 else F.pad(ids, (0, -len(ids) % 128))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mlp(self, x):
        return by_onednn(lambda h: self.down(F.gelu(self.up(h))), self.norm2(x))


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
        # Each layer adds to x twice: divided by the root of their number, the sum keeps its size.
        nn.init.normal_(self.words.weight, std=width ** -0.5)
        for block in self.blocks:
            for layer, gain in ((block.qkv, 0.5), (block.up, 1.0), (block.out, (2 * layers) ** -0.5),
                                (block.down, (2 * layers) ** -0.5)):
                nn.init.normal_(layer.weight, std=gain * layer.in_features ** -0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, ids, attend, wanted):
        """ids (N,) -> the hidden states after the last layer, (M, D), of the tokens ids[wanted], wanted (M,).

        attend(layer, qkv (N, 3D)) -> (N, D): what each token sees in those up to it. Two short cuts: without
        positions, what goes into the first layer's attention depends on the word alone, so it is computed
        once a word (V) and looked up (N); and behind the last layer's, only the wanted tokens go on.
        """
        x = self.words.weight                                                           # (V, D)
        for layer, block in enumerate(self.blocks):
            qkv = by_onednn(block.qkv, block.norm1(x))
            if layer == 0:
                x, qkv = F.embedding(ids, x), F.embedding(ids, qkv)                     # (N, D), (N, 3D)
            seen = attend(layer, qkv)                                                   # (N, D)
            if layer == len(self.blocks) - 1:
                x, seen = x[wanted], seen[wanted]                                       # (M, D)
            x = x + block.out(seen)
            x = x + block.mlp(x)
        return self.norm(x)

    def log_probs(self, hidden, temperature):
        """hidden (M, D) -> log-probabilities of the next word (M, V). Temperature acts here, nowhere else."""
        return torch.log_softmax(hidden @ self.words.weight.T / temperature, dim=-1)


def attention(q, k, v, mask):
    """softmax(q k' / sqrt(d) + mask) v: q (B, H, T, d), k and v (B, H, S, d) -> (B, T, H * d).

    mask (T, S) or (B * H, T, S): -inf where q may not look, else 0. Two products and a softmax are faster at
    this size than torch's fused kernel, on two threads above all; but for the shortest rows.
    """
    B, H, T, d = q.shape
    q, k, v = (x.reshape(B * H, -1, d) for x in (q, k, v))
    scores = torch.baddbmm(mask.to(q.dtype), q, k.transpose(1, 2), alpha=d ** -0.5)     # (B * H, T, S)
    return (scores.softmax(dim=-1) @ v).view(B, H, T, d).transpose(1, 2).flatten(2)


def packed_attention(heads, lengths):
    """attend() for packed episodes of lengths (B,), and `places` (N,): each packed token's index in a
    flattened (B, T), T the longest.

    Attention needs rectangles. So the longest episode and all at least 0.9 as long are packed together, each
    padded to it, then the longest of the others, and so on: some 3% of padding, five rectangles or so. Tokens
    behind the last rectangle (padded_to_128) see nothing, and nobody sees them.
    """
    T, n, rectangles = int(lengths.max()), lengths.tolist(), []                 # lists of rows
    for row in lengths.argsort(descending=True).tolist():
        if not rectangles or n[row] < 0.9 * n[rectangles[-1][0]]:
            rectangles.append([])
        rectangles[-1].append(row)
    shapes = [(len(rows), n[rows[0]]) for rows in rectangles]
    places = [(torch.tensor(rows)[:, None] * T + torch.arange(n[rows[0]])).flatten() for rows in rectangles]
    sizes = [len(place) for place in places]
    masks = [torch.full((width, width), float("-inf")).triu(diagonal=1) for _, width in shapes]

    def attend(layer, qkv):
        *parts, rest = qkv.split([*sizes, len(qkv) - sum(sizes)])
        seen = []
        for part, (count, width), mask in zip(parts, shapes, masks):
            q, k, v = part.view(count, width, 3, heads, -1).permute(2, 0, 3, 1, 4)      # (count, H, width, d)
            if width > 32:
                seen.append(attention(q, k, v, mask).flatten(0, 1))
            else:
                fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                seen.append(fused.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat([*seen, rest.new_zeros(len(rest), rest.shape[1] // 3)])        # (N, D)

    return attend, torch.cat(places)


# --------------------------------------------------------------------------------------------------
# Rollouts
# --------------------------------------------------------------------------------------------------

def ask(env, tok, call=None):
    """An environment's reset(), or step(call): (the observation's ids, done). Trouble is reported by name."""
    name = f"{type(env).__name__}.{'reset()' if call is None else f'step({call})'}"
    try:
        observation, done = (env.reset(), False) if call is None else env.step(call)
        ids = encode(tok, list(observation))
        if call is None and not ids:
            raise ValueError("no word to begin with")
        return ids, bool(done)
    except Exception as error:
        wanted = "words, at least one" if call is None else "(words, done)"
        raise RuntimeError(f"{name} failed: {error!r}. It must return {wanted}, in the tokenizer's words"
                           ) from error


def speak(env, tok, ids):
    """The token ids of a call to its environment: (the call's words, the observation's ids, done)."""
    call = decode(tok, ids)
    if call[0] == "<call>" and call[-1] == "<end>":             # else malformed, and handed over as it is
        call = call[1:-1]
    return call, *ask(env, tok, call)


@torch.inference_mode()
def rollout_batch(model, tok, envs, generator, temperature=1.0):
    """Plays one episode in each environment, in lockstep. generator (torch.Generator): the only chance in it.

    Each pass feeds every live episode what it has not seen yet (after a call that is a whole observation,
    within a call the one token just sampled), with keys and values of all earlier tokens kept, and samples
    one token an episode. An episode that is done leaves the batch. No more than IN_LOCKSTEP are played at a
    time: beyond that, keys and values outgrow a processor's cache.

    An episode is a dict: ids, mask (1 on tokens the policy sampled) and logps (the sampler's, 0 where mask is
    0), three lists of equal length; calls, a list of lists of words; env. The ids that were sampled are the
    ids that are trained: nothing is decoded and encoded again.
    """
    if len(envs) > IN_LOCKSTEP:
        some = [envs[i:i + IN_LOCKSTEP] for i in range(0, len(envs), IN_LOCKSTEP)]
        return [e for part in some for e in rollout_batch(model, tok, part, generator, temperature)]
    episodes = []
    for env in envs:
        ids, _ = ask(env, tok)
        episodes.append({"ids": ids, "mask": [0] * len(ids), "logps": [0.0] * len(ids), "calls": [],
                         "env": env})
    # row b of all four is the same episode; one that is done leaves them
    live = list(episodes)
    unseen = [episode["ids"][:] for episode in live]            # ids that the model has not run on yet
    call = [[] for _ in live]                                   # ids of the call that is being written
    cache = model.words.weight.new_zeros(                       # keys and values: room for 96 tokens
        len(model.blocks), 2, len(live), model.heads, 96, model.width // model.heads)
    while live:
        ends = [len(episode["ids"]) for episode in live]
        if max(ends) > MAX_EPISODE_TOKENS:
            endless = type(live[ends.index(max(ends))]["env"]).__name__
            raise RuntimeError(f"an episode of {endless} passed {MAX_EPISODE_TOKENS} tokens; does its step() "
                               "ever return done?")
        need = max(ends) + max(len(new) for new in unseen)      # padding may reach as far beyond the end
        if need > cache.shape[4]:                                            # room for half as many again
            cache = F.pad(cache, (0, 0, 0, need * 3 // 2 - cache.shape[4]))
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
            if i == tok["<end>"] or len(call[row]) == MAX_CALL_TOKENS:
                said, ids, done = speak(episode["env"], tok, call[row])
                episode["calls"].append(said)
                call[row] = []
                if done:                                         # nobody reads the last observation
                    continue
                episode["ids"] += ids
                episode["mask"] += [0] * len(ids)
                episode["logps"] += [0.0] * len(ids)
                unseen[row] += ids
            going_on.append(row)
        if len(going_on) < len(live):
            for layer in cache:                     # the others' rows move up, over those that are done
                layer[:, :len(going_on), :, :max(ends)] = layer[:, going_on, :, :max(ends)]
            cache = cache[:, :, :len(going_on)]
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
    their keys and values to the cache (layers, 2, B, H, room, d). Gives each row's last hidden state, (B, D).

    Within a call a row has one unseen token, after it two or more, after a read some twenty. Attention needs
    rectangles: if at most half of the rows have more than two, the first two tokens of every row are one and
    the rest of the long rows another; else all is one. Shorter rows are padded. What padding leaves in the
    cache is behind the row's end: out of sight, and overwritten by the tokens that come there.
    """
    B, widest = len(unseen), max(len(new) for new in unseen)
    long = [row for row, new in enumerate(unseen) if len(new) > 2]
    cut = 2 if 0 < len(long) <= B / 2 else widest
    ids, rectangles, last = [], [], [0] * B                     # last: where in ids each row's last one is
    for rows, start, stop in (range(B), 0, cut), (long, cut, widest):
        if start == stop:
            continue
        for row in rows:                                        # a long row's last: set now, and set right in
            new = unseen[row][start:stop]                       # the second turn
            last[row] = len(ids) + len(new) - 1
            ids += new + [0] * (stop - start - len(new))
        before = torch.tensor([ends[row] - len(unseen[row]) + start for row in rows])
        place = before[:, None] + torch.arange(stop - start)    # (rows, width), within each row's episode
        S = int(place.max()) + 1
        beyond = torch.arange(S) > place.repeat_interleave(model.heads, dim=0)[:, :, None]
        mask = torch.where(beyond, float("-inf"), 0.0)          # (rows * H, width, S)
        rectangles.append((torch.tensor(rows), place, S, mask))
    sizes = [place.numel() for _, place, _, _ in rectangles]

    def attend(layer, qkv):
        seen = []
        for part, (rows, place, S, mask) in zip(qkv.split(sizes), rectangles):
            part = part.view(*place.shape, 3, model.heads, -1)          # (rows, width, 3, H, d)
            cache[layer][:, rows[:, None], :, place] = part[:, :, 1:]   # set as (rows, width, 2, H, d)
            k, v = cache[layer][:, :, :, :S] if len(rows) == B else cache[layer][:, rows, :, :S]
            seen.append(attention(part[:, :, 0].transpose(1, 2), k, v, mask).flatten(0, 1))
        return torch.cat(seen)                                                          # (N, D)

    return model(torch.tensor(ids), attend, torch.tensor(last))


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
    with_entropy: gives (log-probabilities, entropies in nats of the next-word distributions), both (B, T);
    the entropies are a measurement and carry no gradient.
    """
    ids, mask = batch["ids"], batch["mask"]
    attend, places = packed_attention(model.heads, batch["lengths"] - 1)     # the last token predicts nothing
    T = int(batch["lengths"].max())
    inputs, targets = ids[:, :T - 1].flatten()[places], ids[:, 1:T].flatten()[places]   # (N,)
    sampled = mask[:, 1:T].flatten()[places].nonzero()[:, 0]                            # (M,) indices into N
    hidden = model(padded_to_128(inputs), attend, padded_to_128(sampled))[:len(sampled)]     # (M, D)
    logp = model.log_probs(hidden, temperature)                                         # (M, V)
    chosen = logp.gather(1, targets[sampled, None])[:, 0]                               # (M,)

    def spread(values):                                                                 # (M,) -> (B, T)
        flat = values.new_zeros(ids.shape[0] * (T - 1)).index_copy(0, places[sampled], values)
        return F.pad(flat.view(-1, T - 1), (1, ids.shape[1] - T))

    if not with_entropy:
        return spread(chosen)
    logp = logp.detach()
    return spread(chosen), spread(-(logp.exp() * logp).sum(dim=-1))


# --------------------------------------------------------------------------------------------------
# Optimizer
# --------------------------------------------------------------------------------------------------

def adam(weights, betas=(0.9, 0.95), eps=1e-8):
    """Adam (arXiv 1412.6980) for a list of weights. Gives step(lr), which moves them down their gradients:

        m += (1 - b1) (g - m)      v += (1 - b2) (g^2 - v)
        w -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    torch.optim.Adam comes to the same; but the first optimizer of torch.optim that a process makes imports
    torch's compiler, which takes as long as ten training steps, and 70 MB. b2 is lower than its 0.999, which
    after some hundred steps would still remember the first. Weights that are frozen, or that the loss does
    not reach, stay where they are. (torch._foreach_op_: op_ on each of a list.)
    """
    weights = [w for w in weights if w.requires_grad]
    m, v, t = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights], 0

    @torch.no_grad()
    def step(lr):
        nonlocal t
        t += 1
        g = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        torch._foreach_lerp_(m, g, 1 - betas[0])
        torch._foreach_mul_(v, betas[1])
        torch._foreach_addcmul_(v, g, g, 1 - betas[1])
        root = torch._foreach_sqrt(v)
        torch._foreach_div_(root, (1 - betas[1] ** t) ** 0.5)
        torch._foreach_add_(root, eps)
        torch._foreach_addcdiv_(weights, m, root, -lr / (1 - betas[0] ** t))

    return step


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


@functools.lru_cache
def habit_batch(words):
    """The questions of reading_habit: the oracle's plays up to the op, the op alone to be predicted.

    words: the tokenizer's, a tuple, which can be remembered. The batch is asked every ten batches."""
    rng, questions, tok = random.Random(0), [], {word: i for i, word in enumerate(words)}
    for task in (randomize_names(task, rng) for task in TRAIN_TASKS for _ in range(3)):
        ids = demonstrate(tok, task, "oracle", rng)["ids"]
        ids = ids[:ids.index(tok["edit"]) + 2]                          # no source and no issue has the word
        questions.append({"ids": ids, "mask": [0] * (len(ids) - 1) + [1]})
    return collate(questions)


@torch.no_grad()
def reading_habit(model, tok):
    """P(the right op | issue, a read, the source), mean over each family's training tasks: a list of five.

    By teacher forcing under random names, so that it is the source that tells the op.
    """
    logps = token_logps(model, habit_batch(tuple(tok))).sum(dim=1)      # (60,): families x tasks x names
    return logps.exp().view(5, -1).mean(dim=1).tolist()


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
        model = Policy(len(tok))
    average = copy.deepcopy(model)
    weights, averages = list(model.parameters()), list(average.parameters())
    step = adam(weights)
    plays = [(task, kind) for kind in kinds for task in TRAIN_TASKS]
    plays *= -(-DEMOS_PER_BATCH // len(plays))          # one kind alone has fewer than a batch
    known = [] if rename else [demonstrate(tok, task, kind, rng) for task, kind in plays * 2]
    number = 0
    for number in range(1, batches + 1):
        if rename:
            chosen = rng.sample(plays, DEMOS_PER_BATCH)
            demos = [demonstrate(tok, randomize_names(task, rng), kind, rng) for task, kind in chosen]
        else:
            demos = rng.sample(known, DEMOS_PER_BATCH)
        batch = collate(demos)
        loss = -token_logps(model, batch).sum() / batch["mask"].sum()
        model.zero_grad()
        loss.backward()
        step(IMITATION_LR)
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 0.05)
        if number % 100 == 0 and not quiet:
            print(f"  batch {number:3}: loss {loss:.3f}, {time.perf_counter() - started:.1f} s", flush=True)
        if number % 10 == 0 and habit is not None and min(reading_habit(average, tok)) >= habit:
            break
    if not quiet:
        print(f"  ended after {number} batches, {time.perf_counter() - started:.1f} s", flush=True)
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
        words, weights = saved["words"], saved["model"]
        if words == list(tok):
            model.load_state_dict(weights)
    except OSError:
        raise
    except Exception as error:      # a file that is none of ours fails in torch in many ways
        raise ValueError(f"not a policy that was saved here ({type(error).__name__})") from error
    if words != list(tok):
        raise ValueError("a policy with another tokenizer's words")
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise ValueError("a policy with weights that are not finite")
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
