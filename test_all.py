"""Tests that teach: delete a function, write it again, and let its class say what is wrong.

    python test_all.py                           everything, in the order of this file
    python test_all.py -f TestGroupAdvantages    one function, up to the first failure

The class TestX belongs to the function x. A class needs only functions whose classes stand above
it, so take them from top to bottom, and use -f. Each class begins with small numbers worked out by
hand. Then come properties that hold for all numbers, values that public trainers gave, and unusual
input. The first line of a failure says what was tried and what is wrong with the result. Below it,
wrong values have a * behind them. Nothing is demanded of how a function does its work.
"""
import argparse
import contextlib
import copy
import io
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn

import ablate
import agent
import env
import grpo
import variants
from env import FIX_OP, HELDOUT_TASKS, OPS, TASKS, TRAIN_TASKS, BugFixEnv, EditBudgetEnv
from grpo import RLConfig

torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
TOK = agent.build_tokenizer()
NAN = math.nan
log = math.log
tensor = torch.tensor

# ---- Helpers -------------------------------------------------------------------------------------


class Lesson(unittest.TestCase):
    """A TestCase whose failures begin with the case and a diagnosis. A failure does not end its
    test, so that all rows of a table are seen, unless there are more than three."""

    failed = 0

    def wrong(self, case, text):
        self.failed += 1
        with self.subTest(case) if self.failed < 4 else contextlib.nullcontext():
            self.fail(f"{case}: {text}")

    def check(self, case, got, expected, mistakes=None, tolerance=1e-4):
        """Fails unless got and expected agree: tensors, lists or numbers.

        mistakes is a dict: a typical mistake in words -> the values that it leads to.
        """
        if got is None:
            return self.wrong(case, "None came back. Is a return missing?")
        if isinstance(got, tuple):
            return self.wrong(case, f"this is a tuple, not a tensor or number:\n    {got}")
        got, expected = numbers(got), numbers(expected)
        if not agree(got, expected, tolerance):
            text = diagnosis(got, expected, mistakes or {}, tolerance)
            text += "\ngot" + table(got, expected, tolerance)
            self.wrong(case, text + "\nexpected" + table(expected, expected, tolerance))

    def check_same(self, case, got, expected):
        """Fails unless got == expected: words, names and other things that are no numbers."""
        if got != expected:
            self.wrong(case, f"this is not what was expected\ngot\n    {got!r}\n"
                             f"expected\n    {expected!r}")

    def check_refused(self, case, function, *args, error=ValueError, words="", **options):
        """Fails unless function(*args) raises this error, and its message has these words."""
        try:
            got = f"the call returned\n    {repr(function(*args, **options))[:200]}"
        except error as refusal:
            if re.search(words, str(refusal)):
                return
            got = f"the message does not mention {words!r}: {refusal}"
        except Exception as other:
            got = f"{other!r} was raised"
        self.wrong(case, f"this must raise {error.__name__}, but {got}")

    def check_seeds(self, run):
        """Fails unless run(seed) depends on its seed, and on nothing else that is random."""
        before = torch.get_rng_state().tolist(), random.getstate()
        runs = [run(seed) for seed in (0, 0, 1)]
        self.check("the same seed, and another: the same result?",
                   [x == runs[0] for x in runs], [True, True, False])
        after = torch.get_rng_state().tolist(), random.getstate()
        self.check("are the global random states as they were?", after == before, True)


def numbers(x):
    return torch.as_tensor(x).detach().double()


def differ(got, expected, tolerance):
    """Which values differ, as a tensor of bool. nan equals nan only."""
    return ~torch.isclose(got, expected, tolerance, tolerance, equal_nan=True)


def agree(got, expected, tolerance):
    return got.shape == expected.shape and not differ(got, expected, tolerance).any()


def diagnosis(got, expected, mistakes, tolerance):
    """What is wrong, in one line."""
    for words, values in mistakes.items():
        if agree(got, numbers(values), tolerance):
            return words
    if got.shape != expected.shape:
        return f"the shape is {tuple(got.shape)}, and it must be {tuple(expected.shape)}"
    if (got.isnan() & ~expected.isnan()).any():
        return "nan came back. Is something 0 / 0, or taken from where a mask is 0?"
    if agree(got, -expected, tolerance):
        return "the sign is wrong"
    if got.numel() == 1:
        return "this value is wrong"
    if expected.any():
        if got.abs().max() < 1e-7:
            return "it is 0 everywhere"
        factor = (got * expected).sum() / (expected * expected).sum()
        if (expected != 0).sum() > 1 and agree(got, factor * expected, tolerance):
            return f"all values are {factor:.4g} times what was expected"
    allowed = expected.flatten().unique()
    known = ~differ(got.flatten()[:, None], allowed, tolerance)
    if len(allowed) > 2 and known.any(dim=1).all():
        return "the values are right, but at wrong places. Is something shifted or mixed up?"
    count = int(differ(got, expected, tolerance).sum())
    return f"{count} of {got.numel()} values are wrong"


def table(x, expected, tolerance):
    """A tensor as text, one line for each row, with * behind wrong values."""
    marks = torch.zeros(x.shape)
    if x.shape == expected.shape:
        marks = differ(x, expected, tolerance)
    width = x.shape[-1] if x.dim() > 0 else 1
    text = ""
    for row, row_marks in zip(x.reshape(-1, width)[:12], marks.reshape(-1, width)):
        text += "\n   "
        for value, mark in zip(row.tolist(), row_marks.tolist()):
            text += f" {value:.4g}{'*' if mark else ''}".rjust(11)
    return text


def lines_of(text):
    """The lines of a table written as text, below its heading. Each is a list of words."""
    return [line.split() for line in text.strip().splitlines()[1:]]


def floats(words):
    return [float(word) for word in words]


def slope(function, x):
    """The gradient of function(x).sum() by x, which is 0 if x has no effect."""
    x = x.detach().clone().requires_grad_()
    total = function(x).sum()
    if total.requires_grad:
        total.backward()
    return torch.zeros_like(x) if x.grad is None else x.grad


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights_of(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class FolderLesson(Lesson):
    """Works in an empty folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder.name)

    def run_here(self, module, flags):
        """main() of a script, in this process: (exit status, stdout, stderr)."""
        status = 0
        with contextlib.redirect_stdout(io.StringIO()) as out, \
                contextlib.redirect_stderr(io.StringIO()) as err, \
                mock.patch.object(sys, "argv", [module.__name__, *flags.split()]):
            try:
                module.main()
            except SystemExit as end:
                status = end.code
        return status, out.getvalue(), err.getvalue()


class InOrder(unittest.TestLoader):
    """Loads tests in the order of this file. unittest's own loader goes by the alphabet."""

    def getTestCaseNames(self, case):
        order = [name for parent in case.__mro__ for name in vars(parent)]
        return sorted(super().getTestCaseNames(case), key=order.index)

    def loadTestsFromModule(self, module, **options):
        cases = [x for name, x in vars(module).items() if name.startswith("Test")]
        return self.suiteClass(map(self.loadTestsFromTestCase, cases))


# ---- Policies that fit on paper, and one that does not -------------------------------------------

SHARED = []


def rl_base():
    """A copy of the base agent of seed 0. It is made once for all tests."""
    if not SHARED:
        SHARED.append(agent.make_rl_base(TOK, 0))
    return copy.deepcopy(SHARED[0])


class Parrot(agent.Policy):
    """A policy that only looks at the last word. follow says, for a word, how likely each word is
    to come next. After all other words it says <call>."""

    def __init__(self, follow, tok=TOK):
        with torch.random.fork_rng():
            super().__init__(agent.vocabulary_size(tok), width=8, layers=1, heads=1)
        logits = torch.full((agent.vocabulary_size(tok),) * 2, -1e9)
        logits[:, tok["<call>"]] = 0
        for word, chances in follow.items():
            logits[tok[word]] = -1e9
            for next_word, chance in chances.items():
                logits[tok[word], tok[next_word]] = log(chance)
        self.logits = nn.Parameter(logits)

    def forward(self, ids, cache=None):
        return self.logits[ids]


def coin(read=0.5, tok=TOK):
    """It reads with this probability, and otherwise it submits, whatever it has heard."""
    end = {"<end>": 1}
    choice = {"read": read, "submit": 1 - read}
    return Parrot({"<call>": choice, "read": end, "submit": end}, tok)


class YesOrNo(nn.Module):
    """A policy with a weight z[w] for each word w. After w it says yes with the probability
    sigmoid(z[w]), and otherwise no. At z = 0 the slopes of log p(yes) and log p(no) by z are 1/2
    and -1/2."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.zeros(12))

    def forward(self, ids):
        yes = self.z[ids][:, :, None]
        no = torch.zeros_like(yes)
        never = torch.full((*ids.shape, 10), -100.0)
        return torch.cat([no, yes, never], dim=2)


NO, YES = 0, 1


def play(ids, reward, turns=1):
    """An episode of YesOrNo, in which the environment says each second word, from the first."""
    mask = [0, 1] * (len(ids) // 2)
    return {
        "ids": ids,
        "mask": mask,
        "logps": [on * log(0.5) for on in mask],
        "reward": float(reward),
        "calls": [["submit"]] * turns,
        "env": SimpleNamespace(truncated=False),
    }


# ==================================================================================================
# env.py
# ==================================================================================================


class TestRunTests(Lesson):
    def test_pass_or_fail(self):
        """True if the function passes all tests. A source that raises an exception fails"""
        right = ["n * n", "pow(abs(n), len(list('ab')))", "sorted(reversed([n * n]))[0]"]
        for body in right + ["n + n", "n // 0", "unknown", "("]:
            got = env.run_tests(f"def square(n): return {body}", [((2,), 4), ((3,), 9)])
            self.check(f"square(2) = 4, square(3) = 9, and the body {body}", got, body in right)
        tests = [(([1],), [1, 2])]
        env.run_tests("def grow(xs):\n    xs += [2]\n    return xs", tests)
        self.check_same("the tests, after a function that changes its arguments", tests,
                        [(([1],), [1, 2])])


class TestBlindPassRate(Lesson):
    def test_what_blind_play_can_reach(self):
        """each op repairs 6 of 30 tasks, and no sequence of ops repairs more than 18"""
        for op in OPS:
            family = [task for task in TASKS if FIX_OP[task["name"]] == op]
            got = [env.blind_pass_rate([op], tasks) for tasks in (TASKS, HELDOUT_TASKS, family)]
            self.check(f"shares of all tasks, of held-out ones, and of its own that {op} repairs",
                       got, [1 / 5, 1 / 5, 1])
        for n, best in ((2, 12), (3, 18)):
            sequences = itertools.product(OPS, repeat=n)
            got = max(env.blind_pass_rate(ops, TASKS) for ops in sequences)
            self.check(f"the best of all sequences of {n} ops", got, best / 30)
        self.check_refused("an unknown op", env.apply_op, "a or b", "repair")


class TestRandomizeNames(Lesson):
    def test_every_task(self):
        """the function gets another name in issue and source, and nothing else changes"""
        for task in TASKS:
            for seed in range(60):
                new = env.randomize_names(task, random.Random(seed))
                name = new["issue"][2]
                source = task["source"].replace(f"def {task['name']}(", f"def {name}(")
                issue = f"issue : {name} is wrong".split()
                self.check_same(f"{task['name']}, renamed", new,
                                {**task, "issue": issue, "source": source})
                clash = name in env.source_words(task["source"])
                self.check(f"{task['name']}: does it have the word {name}?", clash, False)

    def test_tasks_of_a_readers_own(self):
        """the name is taken from the source, whatever the issue says, and other tasks stay"""
        task = dict(issue="repair total".split(), source="def total(xs): return xs.total")
        new = env.randomize_names(task, random.Random(0), ["total"] + ["xs"] * 9 + ["leap"])
        self.check_same("a task with another issue", new, dict(
            issue="repair leap".split(), source="def leap(xs): return xs.total"))
        other = {"question": "2 + 2"}
        self.check_same("a task without a source", env.randomize_names(other, None), other)


class TestBugFixEnv(Lesson):
    def follow(self, episode, text, **state):
        """Makes the calls of a text, twice, and checks the answers and what is said afterwards."""
        lines = [line.split("|") for line in text.strip().splitlines()]
        for reset in ("first", "second"):
            case = f"{type(episode).__name__} after the {reset} reset"
            self.check_same(f"{case}: the issue", episode.reset(), episode.task["issue"])
            for turn, (call, answer) in enumerate(lines, 1):
                got = episode.step(call.split())
                self.check_same(f"{case}: the answer in turn {turn}, and done", got,
                                (answer.split(), turn == len(lines)))
            for name, value in state.items():
                self.check_same(f"{case}: {name}", getattr(episode, name), value)
            self.check_refused(f"{case}: a call after the end", episode.step, ["read"],
                               error=RuntimeError)

    def test_submitted(self):
        """the answers to all calls, and a right submission"""
        self.follow(BugFixEnv(TASKS[16]), """
            read            | def odds ( xs ) : return [ x for x in xs if x // 2 == 1 ]
            test            | fail
            edit div_to_mod | ok
            test            | pass
            submit          | pass
        """, passed=True, truncated=False, turns=5, edits=["div_to_mod"])

    def test_never_submitted(self):
        """an episode that runs out of turns is not graded, and wrong calls are malformed"""
        self.follow(BugFixEnv(TASKS[1]), """
                           | malformed
            edit           | malformed
            edit repair    | malformed
            read read      | malformed
            test           | fail
            edit or_to_and | ok truncated
        """, passed=False, truncated=True, turns=6, edits=["or_to_and"])


class TestEditBudgetEnv(TestBugFixEnv):
    def test_edits_are_refused(self):
        """an edit beyond max_edits uses a turn and changes nothing. The hidden tests grade"""
        self.follow(EditBudgetEnv(TASKS[0], 1, 3), """
            edit or_to_and | ok
            edit and_to_or | refused
            submit         | pass
        """, passed=True, truncated=False, turns=3, edits=["or_to_and"])
        self.follow(EditBudgetEnv(TASKS[0], 0, 3), """
            edit or_to_and | refused
            test           | pass
            submit         | fail
        """, passed=False, truncated=False, turns=3, edits=[])


# ==================================================================================================
# agent.py
# ==================================================================================================


class TestTokenLogps(Lesson):
    # A model of three words that looks at the last word only. Row w has the probabilities of the
    # words that may follow w. Its logits are their logarithms plus 3, which softmax takes away.
    NEXT = tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.1, 0.4]])

    def logps(self, *masks, temperature=1.0, logits=NEXT.log() + 3, **options):
        """token_logps of the words 0, 1, 2, 0, and with a second mask also of 2, 0, 1, 1."""
        ids = tensor([[0, 1, 2, 0], [2, 0, 1, 1]])[:len(masks)]
        batch = {"ids": ids, "mask": tensor(masks) == 1}
        return agent.token_logps(lambda ids: logits[ids], batch, temperature, **options)

    def test_one_row(self):
        """the logits after a word are about the next word, so column t needs the logits at t - 1"""
        # 0 -> 1 has the probability 0.2, 1 -> 2 has 0.6, and 2 -> 0 has 0.5. Nothing comes before
        # the first word, so it has no probability. Its column is 0.
        a, b, c = log(0.2), log(0.6), log(0.5)
        self.check("the words 0, 1, 2, 0", self.logps([0, 1, 1, 1]), [[0, a, b, c]], {
            "column 0 is missing. Put a 0 before the others": [[a, b, c]],
            "the values stand one column too far left, and the mask cut one off": [[0, b, c, 0]],
            "the mask is shifted by one. The mask at t is about ids[t]": [[0, 0, b, c]],
            "the mask is shifted. The mask at t is about ids[t]": [[0, a, b, 0]],
            "this is each word's probability after itself. Logits at t are about ids[t + 1]":
                [[0, log(0.3), log(0.4), log(0.7)]],
            "these are probabilities. Their logarithms are needed": [[0, 0.2, 0.6, 0.5]],
        })
        got = self.logps([0, 1, 0, 1], [0, 1, 1, 0])
        self.check("two rows, 0, 1, 2, 0 with the mask 0, 1, 0, 1, and 2, 0, 1, 1 with 0, 1, 1, 0",
                   got, [[0, a, 0, c], [0, c, a, 0]], {
            "the mask is ignored. Where it is 0, the value is 0":
                [[0, a, b, c], [0, c, a, log(0.3)]],
        })

    def test_the_temperature(self):
        """the logits are divided by the temperature, and then comes the softmax"""
        # At temperature 1/2 a probability is squared, and then divided by the sum of the squares.
        # Those after 0 become 0.49, 0.04 and 0.01, divided by 0.54.
        got = self.logps([0, 1, 0, 0], temperature=0.5)
        self.check("0 -> 1 at temperature 0.5", got[0, 1], log(0.04 / 0.54), {
            "this is the value at temperature 1. Is the temperature forgotten?": log(0.2),
            "the logits are multiplied by the temperature": -1.2748,
            "the log-probabilities are divided. Divide the logits, before the softmax": log(0.04),
        })
        self.check_refused("the temperature 0", self.logps, [0, 1, 0, 0], temperature=0.0)

    def test_the_entropy(self):
        """-sum of p log p over all words that might have been sampled, in nats, without a graph"""
        # At temperature 1/2, the probabilities after 0 are 49/54, 4/54 and 1/54, and those after 1
        # are 1/46, 9/46 and 36/46. At temperature 1, the entropies would be 0.8018 and 0.8979.
        z = self.NEXT.log().requires_grad_()
        _, got = self.logps([0, 1, 1, 0], temperature=0.5, logits=z, with_entropy=True)
        self.check("the entropies after 0 and 1, temperature 0.5, mask 0, 1, 1, 0", got,
                   [[0, 0.3549, 0.5943, 0]], {
            "this is the entropy at temperature 1": [[0, 0.8018, 0.8979, 0]]})
        self.check("has the entropy a graph?", got.requires_grad, False)

    def test_the_gradient(self):
        """the gradient reaches the model, because the loss is made of these values"""
        # By the logits after 0, the slope of log p(1) is onehot(1) - p = -0.7, 0.8, -0.1.
        got = slope(lambda z: self.logps([0, 1, 0, 0], logits=z), self.NEXT.log())
        expected = [[-0.7, 0.8, -0.1], [0, 0, 0], [0, 0, 0]]
        self.check("0 -> 1, gradient by the logits. Is a detach too many?", got, expected)

    def test_logits_in_half_precision(self):
        """the softmax is computed in float32 at least. In bfloat16 it would be off by 1%"""
        z = 4 * torch.randn(3, 3, generator=generator()).bfloat16()
        got = self.logps([0, 1, 1, 1], logits=z)
        expected = self.logps([0, 1, 1, 1], logits=z.double())
        self.check("logits in bfloat16", got, expected, tolerance=1e-5)


class Talker:
    """An environment of a reader's own. It answers with many words, and changes what it gets."""

    def __init__(self, turns):
        self.turns = turns

    def reset(self):
        self.left = self.turns
        return ["issue"]

    def step(self, words):
        self.left -= 1
        words.clear()
        return ["ok"] * 40, self.left == 0


class TestRolloutBatch(Lesson):
    def roll(self, model, envs, temperature=1.0, seed=0, tok=TOK):
        return agent.rollout_batch(model, tok, envs, generator(seed), temperature)

    def test_one_turn(self):
        """words, mask, log-probabilities and calls of an episode with one call"""
        # After <call>, this policy reads with the probability 3/4 and submits with 1/4.
        for temperature, p in ((1.0, 3 / 4), (0.5, 9 / 10)):    # 9 / 10 = 3^2 / (3^2 + 1^2)
            envs = [BugFixEnv(TASKS[0], 1) for _ in range(300)]
            for episode, own in zip(self.roll(coin(3 / 4), envs, temperature), envs):
                said = "read" if own.truncated else "submit"
                case = f"`{said}` at temperature {temperature}"
                self.check_same(f"{case}: calls", episode["calls"], [[said]])
                words = f"issue : between is wrong <call> {said} <end>"
                self.check_same(f"{case}: words. The answer to the last call is left out",
                                " ".join(agent.decode(TOK, episode["ids"])), words)
                self.check(f"{case}: mask", episode["mask"], [0] * 5 + [1] * 3)
                expected = [0] * 6 + [log(p if said == "read" else 1 - p), 0]
                self.check(f"{case}: log-probabilities", episode["logps"], expected)
            share = sum(own.truncated for own in envs) / 300    # those that have read
            self.check(f"the share of `read` at {temperature}", share, p, tolerance=0.06)

    def test_words_and_mask(self):
        """the sampled words are whole calls, and between them the environment speaks"""
        words = {"<call>": 0.3, "read": 0.2, "edit": 0.1, "widen": 0.1, "<end>": 0.3}
        babbler = Parrot(dict.fromkeys(TOK, words))
        for episode in self.roll(babbler, [EditBudgetEnv(task, 1) for task in TASKS]):
            mask, again, calls = episode["mask"], episode["env"], []
            heard, done = again.reset(), False
            words = agent.decode(TOK, episode["ids"])
            for sampled, places in itertools.groupby(range(len(words)), lambda t: mask[t]):
                part = [words[t] for t in places]
                if not sampled:
                    self.check_same(f"words with mask 0 in {words}", part, heard)
                    continue
                ended = part.index("<end>") if "<end>" in part else 3
                self.check(f"the call {part} ends with <end> or the fourth token, at place",
                           len(part) - 1, ended)
                framed = part[0] == "<call>" and part[-1] == "<end>"
                calls.append(part[1:-1] if framed else part)
                heard, done = again.step(calls[-1])
            self.check_same(f"calls in {words}", episode["calls"], calls)
            self.check(f"is a call the end of {words}?", [mask[-1], done], [1, 1])

    def test_sampler_and_trainer_agree(self):
        """the log-probabilities that are noted are those of token_logps for the row alone"""
        # Rows that leave in different turns, and some long ones
        envs = [EditBudgetEnv(task, 1, 1 + i % 6) for i, task in enumerate(TASKS)]
        envs += [Talker(5), Talker(6), Talker(2)]
        for i, episode in enumerate(self.roll(rl_base(), envs, 0.6)):
            expected = agent.token_logps(rl_base(), agent.collate([episode]), 0.6)
            self.check(f"episode {i}, beside longer ones, at temperature 0.6",
                       [episode["logps"]], expected)
            self.check(f"is episode {i} that of environment {i}?", episode["env"] is envs[i], True)

    def test_randomness(self):
        """the generator alone decides, and torch's and Python's own random states stay"""
        def calls(seed):
            episodes = self.roll(coin(), [BugFixEnv(task) for task in TASKS], seed=seed)
            return [episode["calls"] for episode in episodes]
        self.check_seeds(calls)

    def test_a_readers_own(self):
        """an environment gets a copy of a call, any vocabulary works, and nonsense is refused"""
        # Words in another order, and two of three ids have no word
        tok = {word: 3 * i + 1 for i, word in enumerate(sorted(TOK))}
        episode, = self.roll(coin(1 - 1e-9, tok), [Talker(2)], tok=tok)
        self.check_same("the calls of a reader", episode["calls"], [["read"], ["read"]])
        one = BugFixEnv(TASKS[0])
        mute = SimpleNamespace(reset=lambda: [])
        self.check_refused("an environment for two episodes", self.roll, coin(), [one, one])
        self.check_refused("a reset without any word", self.roll, coin(), [mute])
        self.check_refused("no end in sight", self.roll, coin(), [Talker(300)], error=RuntimeError)
        self.check_refused("the temperature -1", self.roll, coin(), [one], -1.0)


class TestMakeBaseAgent(Lesson):
    def test_imitation(self):
        """the oracle's tokens become likely, the seed decides, and global random states stay"""
        tok = {word: 2 * i for i, word in enumerate(sorted(TOK))}   # gaps in the ids
        made = []

        def weights(seed):
            made.append(agent.make_base_agent(tok, seed, ("oracle",), batches=25))
            return weights_of(made[-1]).tolist()
        self.check_seeds(weights)
        demos = [agent.demonstrate(tok, task, "oracle", None) for task in TRAIN_TASKS]
        batch = agent.collate(demos)
        # read, edit, test and submit have 3 + 4 + 3 + 3 tokens, and there are 20 tasks.
        self.check("the oracle's tokens", batch["mask"].sum(), 260)
        p = agent.token_logps(made[0], batch)[batch["mask"]].exp().mean()
        self.check("is the oracle's mean probability above 1/4?", p > 0.25, True)


class TestSavePolicy(FolderLesson):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.model = agent.Policy(agent.vocabulary_size(TOK), width=24, layers=1, heads=3)

    def save(self, path, model=None):
        agent.save_policy(model or self.model, TOK, {"lr": 1}, path)

    def loaded(self, case, tok=TOK):
        model = agent.load_policy(tok, "x.pt")
        ids = torch.arange(20)[None]
        self.check(f"{case}: logits", model(ids)[0, -1], self.model(ids)[0, -1], tolerance=0)

    def test_there_and_back(self):
        """weights and architecture come back, and words are compared by their ids"""
        self.save("x.pt")
        self.loaded("what was saved")
        self.loaded("with the words in another order", dict(sorted(TOK.items())))
        other = {**TOK, "read": TOK["edit"], "edit": TOK["read"]}
        self.check_refused("two words with other ids", agent.load_policy, other, "x.pt")
        self.check_same("files in the folder", os.listdir(), ["x.pt"])
        self.save("x.pt", SimpleNamespace(_orig_mod=self.model))
        self.loaded("a policy in a module like that of torch.compile")

    def test_finished_work_is_kept(self):
        """a link stays a link, what is no file is refused, and a failure keeps the older file"""
        os.symlink("x.pt", "link")
        self.save("link")
        self.loaded("the file that the link leads to")
        # Not a real device: as root, a wrong save_policy would replace it.
        os.mkfifo("pipe")
        self.check_refused("a pipe", self.save, "pipe", error=OSError)

        def fail(saved, path):
            open(path, "w").close()
            raise OSError("no space")
        with mock.patch.object(torch, "save", fail):
            self.check_refused("a full disk", self.save, "x.pt", error=OSError)
        self.loaded("the older file, after one that could not be written")


class TestBehaviorStats(Lesson):
    def episode(self, calls, **said):
        """An episode whose environment has these attributes."""
        calls = [call.split() for call in calls.split(", ")]
        return {"calls": calls, "mask": [0, 1, 1], "logps": [0, -1, -1], "reward": 0.5,
                "env": SimpleNamespace(**said)}

    def test_four_episodes(self):
        """means over four episodes of the task leap, which or_to_and repairs"""
        def of(calls, edits, passed=False, truncated=False):
            return self.episode(calls, task=TASKS[1], edits=edits.split(), passed=passed,
                                truncated=truncated)
        stats = agent.behavior_stats([
            of("read, edit or_to_and, test, submit", "or_to_and", passed=True),
            of("edit widen, read, submit", "widen"),
            of("edit or_to_and, submit", "or_to_and", passed=True),
            of("read, read", "", truncated=True),
        ])
        expected = """
            name             mean
            pass_rate        0.5
            reward           0.5
            reads            1
            tests            0.25
            edits            0.75
            read_first       0.25   an episode without an edit has not read before one
            first_edit_right 0.6667
            read_then_right  1
            turns            2.75
            policy_tokens    2
            truncated        0.25
            read_passed      0.25
            read_failed      0
            guess_passed     0.25
            guess_failed     0.25
        """
        for name, value, *_ in lines_of(expected):
            self.check(name, stats[name], float(value))
        picture = 8 * "R" + 8 * "G" + 8 * "." + 8 * "x"
        self.check_same("the picture", agent.picture(stats), picture)

    def test_an_environment_that_does_not_say(self):
        """nan, and not 0, where an environment has no `passed`, `truncated` or `edits`"""
        silent = self.episode("read, submit")
        stats = agent.behavior_stats([silent])
        for name in ("pass_rate", "truncated", "edits", "read_first", "first_edit_right"):
            self.check(name, stats[name], NAN)
        stats = agent.behavior_stats([silent, self.episode("read", passed=True)])
        self.check("pass_rate, if one of two environments says", stats["pass_rate"], 1)


# ==================================================================================================
# grpo.py and variants.py: advantages
# ==================================================================================================


class TestGroupAdvantages(Lesson):
    # Two groups of four. The means are 1/4 and 1/2.
    REWARDS = tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
    CENTRED = REWARDS - tensor([1 / 4] * 4 + [1 / 2] * 4)

    def check_table(self, cases, rewards, group_size, lengths):
        for baseline, scale, *expected in lines_of(cases):
            got = grpo.group_advantages(rewards, group_size, baseline, scale, lengths)
            case = f"baseline {baseline}, scale {scale}, rewards {rewards}, lengths {lengths}"
            self.check(case, got, floats(expected))

    def test_one_group(self):
        """A = (R - mean of the group) / unbiased standard deviation of the group"""
        # Rewards 1, 0, 0, 0 have the mean 1/4, and R - mean is 3/4, -1/4, -1/4, -1/4. The squares
        # 9/16, 1/16, 1/16, 1/16 add up to 3/4. Divided by G - 1 = 3, this is the variance, 1/4, and
        # its root is the deviation, 1/2. Then 3/4 / (1/2) = 1.5.
        # Divided by G = 4, the variance would be 3/16, and its root 0.4330.
        centred = self.CENTRED[:4]
        got = grpo.group_advantages(self.REWARDS[:4], 4)
        self.check("rewards 1, 0, 0, 0 in one group", got, [1.5, -0.5, -0.5, -0.5], {
            "this is the biased deviation. Divide by G - 1, and not by G": centred / 0.4330,
            "the deviation is missing. Only the mean is subtracted": centred,
            "this is divided by the variance. The deviation is its root": centred / 0.25,
            "the mean is not subtracted": [2, 0, 0, 0],
        })

    def test_two_groups(self):
        """each group has its own mean and its own deviation, and its rewards are neighbours"""
        # Group 2: R - mean is 1/2, 1/2, -1/2, -1/2, the variance is 4 * 1/4 / 3 = 1/3, its root is
        # 0.5774, and 1/2 / 0.5774 = 0.8660. All eight have the mean 3/8 and the deviation 0.5175.
        a = 0.8660
        got = grpo.group_advantages(self.REWARDS, 4)
        expected = [1.5, -0.5, -0.5, -0.5, a, a, -a, -a]
        self.check("groups 1, 0, 0, 0 and 1, 1, 0, 0", got, expected, {
            "the deviation is that of the whole batch": self.CENTRED / 0.5175,
            "both are those of the whole batch": (self.REWARDS - 3 / 8) / 0.5175,
            "the groups are wrong. The rewards of a group stand next to each other":
                [a, -0.5, -a, -0.5, a, 1.5, -a, -0.5],
        })

    def test_baselines_and_scales_of_the_variants(self):
        """each baseline and each scale, alone or together, with sums and means over a group"""
        cases = """
            baseline        scale       A in group 1      group 2
            group_mean      none        .75 -.25 -.25 -.25   .5 .5 -.5 -.5
            group_mean      batch_std   1.4491 -.483 -.483 -.483  .9661 .9661 -.9661 -.9661
            group_mean      group_mean  3 -1 -1 -1           1 1 -1 -1
            leave_one_out   none        1 -.3333 -.3333 -.3333  .6667 .6667 -.6667 -.6667
            leave_one_out   group_mean  4 -1.3333 -1.3333 -1.3333  1.3333 1.3333 -1.3333 -1.3333
            length_weighted none        .9 -.1 -.1 -.1       .8 .8 -.2 -.2
        """
        # batch_std: the deviation of all eight is 0.5175, and .75 / .5175 = 1.4491.
        # group_mean: divided by 1/4 and 1/2. leave_one_out: minus the mean of the three others.
        # length_weighted: group 1 has a reward of 1 in 1 of 10 tokens, and group 2 in 2 of 10.
        self.check_table(cases, [1, 0, 0, 0, 1, 1, 0, 0], 4, [1, 2, 3, 4, 1, 1, 4, 4])
        got = grpo.group_advantages(self.REWARDS, 4, "length_weighted", "none", [0] * 8)
        self.check("length_weighted without any token: the group's mean", got, self.CENTRED)

    def test_equal_rewards(self):
        """a group of equal rewards has advantages of exactly 0, also if they differ by rounding"""
        rewards = tensor([0.0] * 8 + [0.1] * 8 + [1.0] * 7 + [1.0000001])
        choices = grpo.CHOICES["baseline"], grpo.CHOICES["scale"]
        for baseline, scale in itertools.product(*choices):
            got = grpo.group_advantages(rewards, 8, baseline, scale, range(1, 25))
            self.check(f"groups of 0, of 0.1, and of 1 with one 1.0000001, baseline {baseline}, "
                       f"scale {scale}", got, [0.0] * 24, tolerance=0)

    def test_the_small_number(self):
        """1e-6 is added to a standard deviation, and to nothing else"""
        cases = """
            scale       first   others  A of the first
            group_std   .50001  .5      1.25    7.5e-6 / (5e-6 + 1e-6)
            batch_std   .50001  .5      1.25
            group_mean  4e-6    0       3       3e-6 / 1e-6
        """
        for scale, *line in lines_of(cases):
            first, other, expected = floats(line[:3])
            rewards = [first, other, other, other]
            got = grpo.group_advantages(tensor(rewards).double(), 4, "group_mean", scale)
            self.check(f"rewards {rewards}, scale {scale}: the first", got[0], expected,
                       tolerance=0.01)

    def test_public_trainers(self):
        """verl (group_std, leave_one_out, length_weighted) and TRL (none)"""
        cases = """
            baseline        scale      A of rewards .9 .1 .4 and 1 .2 .7 with 8 5 3 and 6 2 7 tokens
            group_mean      group_std  1.07222 -.90726 -.16496  .90726 -1.07222 .16496
            group_mean      none       .43333 -.36667 -.06667   .36667 -.43333 .06667
            leave_one_out   none       .65 -.55 -.1             .55 -.65 .1
            length_weighted none       .34375 -.45625 -.15625   .24667 -.55333 -.05333
        """
        self.check_table(cases, [0.9, 0.1, 0.4, 1.0, 0.2, 0.7], 3, [8, 5, 3, 6, 2, 7])

    def test_unusual_input(self):
        """rewards of any type, without a graph, and ValueError for what makes no sense"""
        f = grpo.group_advantages
        R = self.REWARDS[:4]
        for rewards in ([1, 0, 0, 0], R.bool(), R.bfloat16(), R - 1):
            self.check(f"the rewards {rewards}", f(rewards, 4), [1.5, -0.5, -0.5, -0.5])
        if f(torch.rand(4, requires_grad=True), 4).requires_grad:
            self.wrong("rewards with a graph", "the advantages have one too. Detach them")
        refused = self.check_refused
        refused("the unknown baseline 'median'", f, R, 4, "median")
        refused("the unknown scale 'range'", f, R, 4, "group_mean", "range")
        refused("a reward below 0 with scale group_mean", f, R - 1, 4, "group_mean", "group_mean")
        for scale in ("group_std", "none"):
            refused(f"groups of one, scale {scale}", f, R, 1, "group_mean", scale)
        for bad in (NAN, math.inf, -math.inf):
            refused(f"a reward of {bad}", f, [bad, 0, 0, 1], 4, words="reward")


class TestOverlongPenalty(Lesson):
    def test_ramp(self):
        """0 up to max_turns - buffer, then linear down to -1 at max_turns, and never lower"""
        cases = """
            turns  max_turns  buffer  penalty
            1      6          2       0
            4      6          2       0
            5      6          2       -0.5     half of the way from 4 to 6
            6      6          2       -1
            9      6          2       -1
            6      6          0       0        no buffer, no penalty
            80     100        20      0        this and the next four are values of TRL
            81     100        20      -0.05
            85     100        20      -0.25
            99     100        20      -0.95
            110    100        20      -1
        """
        for turns, limit, buffer, expected, *_ in lines_of(cases):
            got = grpo.overlong_penalty([int(turns)], int(limit), int(buffer))
            case = f"{turns} turns, max_turns {limit}, buffer {buffer}"
            self.check(case, got, [float(expected)])


class TestComputeAdvantages(Lesson):
    def test_one_group(self):
        """group_advantages of the episodes' rewards, with the settings of cfg"""
        def f(rewards, **fields):
            # The episodes have 1, 2, 3 and 4 tokens of the policy, and as many turns.
            episodes = [play([2, YES] * n, R, turns=n) for n, R in enumerate(rewards, 1)]
            episodes[0]["mask"] += [0] * 9
            return grpo.compute_advantages(episodes, RLConfig(group_size=4, **fields))
        self.check("rewards 1, 0, 0, 0", f([1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5])
        # The baseline is (1 * 1 + 4 * 1) / 10. The environment's tokens do not count.
        got = f([1, 0, 0, 1], baseline="length_weighted", scale="none")
        self.check("length_weighted", got, [0.5, -0.5, -0.5, 0.5])
        # The penalties are 0, 0, -1/2, -1, so the rewards become 1, 0, 1/2, -1. Their mean is 1/8.
        got = f([1, 0, 1, 0], scale="none", max_turns=4, overlong_buffer=2)
        self.check("with an overlong penalty", got, [0.875, -0.125, 0.375, -1.125])
        got = f([1e9, 1e9 + 1004, 1e9, 1e9], scale="none")      # float32 sees steps of 64 here
        self.check("large rewards", got, [-251, 753, -251, -251])


# ==================================================================================================
# grpo.py and variants.py: the losses
# ==================================================================================================

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


class TestTokenWeights(Lesson):
    # Two rows with 2 and 4 policy tokens. Words of the environment and padding are between them.
    MASK = tensor([[0, 1, 0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 1, 0]])

    def test_rows_of_two_and_four_tokens(self):
        """the weight of a token in each row, as in the docstring's table"""
        # 6 tokens have 1/6 each. A row has 1/2, for its 2 or 4 tokens together, or for each of
        # them. The constant is 10: 1 / (2 rows * 10).
        weights = [1 / 6, 1 / 6], [1 / 4, 1 / 8], [1 / 2, 1 / 2], [1 / 20, 1 / 20]
        for mode, of_rows in zip(MODES, weights):
            expected = self.MASK * tensor(of_rows)[:, None]
            got = grpo.token_weights(self.MASK, mode, 10)
            self.check(f"{mode}, weights", got, expected, {
                "tokens in short rows weigh more. This is the mean of the rows' means":
                    self.MASK * tensor([[1 / 4], [1 / 8]]),
                "the divisor is the padded width. Count tokens": self.MASK / 16,
                "all columns weigh. Only policy tokens count": torch.full((2, 8), 1 / 16),
            })

    def test_rows_without_a_token(self):
        """the seq_ modes do not count a row without a token, and no token at all is not 0 / 0"""
        mask = torch.cat([self.MASK, torch.zeros(1, 8)])
        for mode in MODES[:3]:
            expected = torch.cat([grpo.token_weights(self.MASK, mode), torch.zeros(1, 8)])
            got = grpo.token_weights(mask, mode)
            self.check(f"{mode}, and a third row without a token", got, expected, {
                "the third row counts as a row": expected * 2 / 3})
            got = grpo.token_weights(self.MASK * 0, mode).sum()
            self.check(f"{mode}, without any token", got, 0)

    def test_unusual_input(self):
        """ValueError for what makes no sense"""
        for rest in (["mean"], ["constant", None], ["constant", 0], ["constant", NAN]):
            self.check_refused(f"the mode {rest}", grpo.token_weights, self.MASK, *rest)


class TestAggregateLoss(Lesson):
    # Losses 1 and 3 in the first row, 4, 4, 4 and 8 in the second, and nan where the mask is 0
    MASK = TestTokenWeights.MASK
    LOSSES = torch.full((2, 8), NAN).masked_scatter(MASK == 1, tensor([1.0, 3, 4, 4, 4, 8]))

    def test_two_rows(self):
        """one number in each mode"""
        # 24 / 6 tokens. The mean of 4 / 2 and 20 / 4. The mean of the sums 4 and 20. 24 / (2 rows *
        # the constant 10).
        for mode, expected in zip(MODES, (4, 3.5, 12, 1.2)):
            got = grpo.aggregate_loss(self.LOSSES, self.MASK, mode, 10)
            self.check(f"{mode} of losses 1, 3 and 4, 4, 4, 8", got, expected, {
                "this is the mean of the rows' means": 3.5,
                "this is the mean over all tokens": 4,
                "the divisor is the padded width. Count tokens and not columns": 24 / 16,
            })

    def test_unusual_input(self):
        """half precision does not overflow, and shapes that would broadcast raise ValueError"""
        ones = torch.ones(200, 1600).half()
        for mode, expected in zip(MODES, (1, 1, 1600, 16)):
            got = grpo.aggregate_loss(ones, ones, mode, 100)
            self.check(f"{mode} of 320,000 float16 losses", got, expected, tolerance=1e-3)
        self.check_refused("losses (2, 8) and a mask (1, 8)", grpo.aggregate_loss,
                           self.LOSSES, self.MASK[:1], MODES[0])


# A case that public trainers computed, of four rows with 8, 0, 6 and 4 policy tokens and with the
# advantages 0.7071 times 1, -1, -1, 1. Where the mask is 0 stands nan, so that it is seen if it
# takes part.
TRAINERS_LOGP = """
    -1.1579 -3.9419 -.979 -.001 -.2638 -2.6047 -.61 -.3619 -.4489 -2.808 -3.7707 -2.2445 -2.0466
    -.5009 -.3428 -.2076 -3.5406 -2.0829
"""
TRAINERS_OLD_LOGP = """
    -1.0051 -3.3767 -1.3949 -.3515 -.1941 -2.4527 -.4391 -.4648 -.4944 -3.2564 -3.9071 -2.3054
    -2.0409 -.8616 -.796 -.2562 -3.699 -1.6803
"""
# What they gave: the loss, and of its gradient by logp the sum weighted by 1, 2, 3 ... 32, and the
# sum of magnitudes. The constant is 16. verl counts the row without a token in GMPO's mean over
# rows, so its three values are multiplied by 4/3 here.
TRAINERS = """
    ratio_level eps      mode                 loss      weighted  magnitudes
    token       .2 .2    token_mean           -.17322   1.46199   .60140      TRL
    token       .2 .2    seq_mean_token_mean  -.17922   .19783    .60740      verl
    token       .2 .2    seq_mean_token_sum   -1.03931  8.77193   3.60843     verl
    token       .2 .2    constant             -.04872   .41118    .16915      TRL
    sequence    .2 .2    seq_mean_token_mean  -.19947   -2.21896  .76068      verl
    cispo       .2 .2    token_mean           .07790    -.67040   .73352      verl
    cispo       1. .2    token_mean           .03126    -.50764   .71925      verl
    gmpo        .4 .4    seq_mean_token_mean  -.19570   -.49299   .66636      verl
    sapo        .2 .2    seq_mean_token_mean  -.47504   -2.33703  .76356      verl
    dppo        .2 .2    token_mean           -.01775   1.28336   .66095      verl
    none        .2 .2    token_mean           .16792    -.98209   .70711      verl
"""


class LossLesson(Lesson):
    """What is demanded of all losses. Those of GSPO and GMPO are one value for a row of tokens."""

    level = ""          # the loss is the one with this ratio_level
    bounds = (0.2, 0.2)                                 # eps_low and eps_high
    # A token's probability under pi_old and under pi, its A, and what the loss gives for it: the
    # value, the slope of the value by log pi, and whether the token is clipped.
    CELLS = "p_old  p  A  loss  slope  clipped"

    def loss(self, *args):
        both = grpo.LOSSES[self.level](*args, *self.bounds)
        return [x.expand(args[0].shape) for x in both]

    def run_loss(self, old, new, adv, mask=1):
        """Tokens with these probabilities: their losses, the slopes by log pi, who is clipped."""
        logp = tensor(new).log()                                        # (B, T)
        mask = mask * torch.ones(logp.shape)
        rest = tensor(old).log(), tensor(adv), mask
        values, clipped = self.loss(logp, *rest)
        return values, slope(lambda x: self.loss(x, *rest)[0] * mask, logp), clipped

    def test_single_tokens(self):
        """loss, slope by log pi, and clipping of single tokens"""
        for line in lines_of(self.CELLS):
            old, new, A, value, by_logp = floats(line[:5])
            r = new / old
            low, high = self.bounds
            case = f"p {old} -> {new} (r = {r:.4g}), A = {A:.0f}, eps {low} and {high}"
            values, grad, clipped = self.run_loss([[old]], [[new]], [A])
            bounded = min(max(r, 1 - low), 1 + high)
            self.check(f"{case}: loss", values, [[value]], {
                "-r A came. Is the clip missing, or is it max in place of min?": [[-r * A]],
                "-clip(r) A came. Is it max for min, or is there no min?": [[-bounded * A]],
            })
            self.check(f"{case}: slope by log pi", grad, [[by_logp]], {
                "it is 0, but this token has a gradient. Is one detach too many, or the mask "
                "inverted?": [[0.0]],
                "it is r A, but this token has another gradient, or none": [[-r * A]],
                "the sign is wrong. Is the ratio upside down?": [[-by_logp]],
            })
            self.check(f"{case}: is it clipped?", clipped, [[line[5] == "yes"]])

    def test_while_pi_is_pi_old(self):
        """at r = 1 the slope by log pi is -A, and adv is (B,) or (B, T), of any type"""
        p = [[0.5, 0.25], [0.125, 0.5]]
        for adv in ([2.0, -3.0], [2, -3], [[2.0, 2.0], [-3.0, -3.0]]):
            _, grad, _ = self.run_loss(p, p, adv)
            self.check(f"r = 1 and adv = {adv}: slope", grad, [[-2, -2], [3, 3]], {
                "adv stands along the tokens. Make (B,) into (B, 1)": [[-2, 3], [-2, 3]],
            })

    def test_what_is_constant(self):
        """adv has no gradient, and old_logp has none, even if logp itself is old_logp"""
        logp, A, mask = tensor([[-1.0, -2.0]]), tensor([[1.5, 1.5]]), torch.ones(1, 2)
        by_adv = slope(lambda A: self.loss(logp, logp, A, mask)[0], A)
        self.check("slope by adv. Is a detach missing?", by_adv, [[0, 0]])
        by_logp = slope(lambda x: self.loss(x, x, A, mask)[0], logp)
        self.check("slope if logp itself is passed as old_logp. Is a detach missing?", by_logp,
                   [[-1.5, -1.5]])

    def test_public_trainers(self):
        """loss and gradient that verl and TRL gave. See TRAINERS"""
        mask = torch.arange(8) < tensor([[8], [0], [6], [4]])
        A = 0.7071057812 * tensor([1, -1, -1, 1])
        logp, old = (torch.full((4, 8), NAN).masked_scatter(mask, tensor(floats(text.split())))
                     for text in (TRAINERS_LOGP, TRAINERS_OLD_LOGP))
        for level, low, high, mode, *expected, name in lines_of(TRAINERS):
            if level == self.level:
                cfg = RLConfig(ratio_level=level, eps_low=float(low), eps_high=float(high))

                def loss(logp):
                    values, _ = grpo.policy_loss(logp, old, A, mask, cfg)
                    return grpo.aggregate_loss(values, mask, mode, 16)
                grad = slope(loss, logp)
                by_place = (grad.flatten() * torch.arange(1, 33)).sum()
                got = torch.stack([loss(logp), by_place, grad.abs().sum()])
                self.check(f"{name}, {mode}, eps {low} and {high}: the loss, and two sums of its "
                           "slopes", got, floats(expected))

    def test_unusual_input(self):
        """extreme ratios are finite, and wrong shapes raise ValueError"""
        new, old = tensor([[-0.001, -100.0]] * 2), tensor([[-100.0, -0.001]] * 2)

        def values(x):
            return self.loss(x, old, tensor([1.0, -1.0]), torch.ones(2, 2))[0]
        got = torch.stack([values(new), slope(values, new)])
        if not got.isfinite().all():
            self.wrong("log r = 99 and -99, A = 1 and -1", "exp overflows, so limit log r first. "
                       f"The losses, and their slopes by log pi, are\n{got}")
        x, A = -torch.ones(3, 2), torch.ones(3)
        for rest in ([x[:, :1], A, x], [x, A[:, None], x]):
            shapes = [tuple(y.shape) for y in rest]
            self.check_refused(f"logp (3, 2), and old_logp, adv, mask {shapes}",
                               self.loss, x, *rest)


class TestPpoPolicyLoss(LossLesson):
    level = "token"
    bounds = (0.2, 0.3)
    # The loss is -min(r A, clip(r) A), and clip(r) is at least 0.8 and at most 1.3. The slope of r
    # by log pi is r. So the slope is -r A, or 0 if the token is clipped.
    CELLS = """
        p_old  p     A   loss  slope  clipped
        0.5    0.5   1   -1    -1     no
        0.5    0.5   -1  1     1      no
        0.5    0.25  1   -0.5  -0.5   no         r A = 0.5 is smaller than clip(r) A = 0.8
        0.5    0.75  1   -1.3  0      yes        clip(r) A = 1.3 is smaller than r A = 1.5
        0.5    0.25  -1  0.8   0      yes        clip(r) A = -0.8 is smaller than r A = -0.5
        0.5    0.75  -1  1.5   1.5    no         r A = -1.5 is smaller than clip(r) A = -1.3
        0.1    0.11  2   -2.2  -2.2   no
        0.1    0.8   -1  8     8      no         a failure that became likelier is brought back
        0.5    0.75  0   0     0      no
    """


class TestGspoPolicyLoss(LossLesson):
    level = "sequence"

    def test_one_ratio_for_a_row(self):
        """s = exp(mean of log r over the row's tokens), the geometric mean of the ratios"""
        # Ratios 8, 1 and 1 have the product 8, so the geometric mean is 8^(1/3) = 2. With the two
        # columns where the mask is 0, it would be 8^(1/5) = 1.5157. Each token's loss is -s A = -2.
        self.bounds = (0.9, 9.0)                        # so wide that nothing is clipped
        old, new = [[0.1, 0.5, 0.2, 0.5, 0.5]], [[0.8, 0.5, 0.2, 0.5, 0.5]]
        values, grad, _ = self.run_loss(old, new, [1.0], tensor([[1, 1, 1, 0, 0]]))
        self.check("ratios 8, 1, 1 and A = 1", values[0, :3], [-2, -2, -2], {
            "this is the product of the ratios. Divide the sum of log r by the number of tokens":
                [-8, -8, -8],
            "each token has its own ratio. GSPO has one for a row": [-8, -1, -1],
            "this is the arithmetic mean. First the mean of log r, then exp": [-10 / 3] * 3,
            "the divisor is the padded width 5. Divide by the number of tokens, 3": [-1.5157] * 3,
        })
        # By each log pi, the slope of s is s / 3, and three losses have three times that.
        self.check("ratios 8, 1, 1: slopes of their sum", grad, [[-2, -2, -2, 0, 0]])

    def test_the_clip(self):
        """a row is clipped as a whole, if s has gone too far in the direction A pushes"""
        self.bounds = (0.5, 0.5)
        cases = """
            p_new    A   loss   slope  clipped
            0.08     1   -1.5   0      1        ratios 8, 1, 1 have s = 2, clipped at 1.5
            0.08     -1  2      2      0
            0.00015625  1   -0.25  -0.25  0        ratios 1/64, 1, 1 have s = 1/4
            0.00015625  -1  0.5    0      1        clipped at 0.5
        """
        for line in lines_of(cases):
            new, A, *expected = floats(line[:5])
            got = self.run_loss([[0.01, 0.5, 0.2]], [[new, 0.5, 0.2]], [A])
            for what, x, value in zip(("losses", "slopes", "clipped"), got, expected):
                case = f"ratios {new / 0.01:.4g}, 1, 1 and A = {A}: {what}"
                self.check(case, x, [[value] * 3])


class TestCispoPolicyLoss(LossLesson):
    level = "cispo"
    bounds = (0.2, 0.3)
    # The loss is -clip(r) A log pi, and clip(r) is a constant. So the slope is -clip(r) A.
    CELLS = """
        p_old  p     A   loss      slope  clipped
        0.5    0.6   1   0.61299   -1.2   no       -1.2 log 0.6
        0.5    0.75  1   0.37399   -1.3   yes      PPO gives this token no gradient
        0.5    0.25  -1  -1.10904  0.8    yes      0.8 log 0.25
        0.5    0.75  -1  -0.37399  1.3    no
        0.5    0.25  1   1.10904   -0.8   no
    """


class TestGmpoPolicyLoss(LossLesson):
    level = "gmpo"

    def test_the_geometric_mean_of_clipped_ratios(self):
        """m is log r, clipped where A pushes, and the loss is -A exp(mean of m)"""
        # The bounds of log r are -log 4 and log 2. Ratios 8, 1 and 0.5 with A = 1: 8 becomes 2, and
        # the geometric mean of 2, 1 and 1/2 is 1. Without the clip it would be 4^(1/3) = 1.5874.
        self.bounds = (log(4), log(2))
        three = [[0.1, 0.5, 0.4]], [[0.8, 0.5, 0.2]]
        values, grad, clipped = self.run_loss(*three, [1.0])
        self.check("ratios 8, 1, 0.5 and A = 1", values, [[-1] * 3], {
            "nothing is clipped": [[-1.5874] * 3],
            "this is the arithmetic mean. First the mean of m, then exp": [[-3.5 / 3] * 3],
        })
        self.check("ratios 8, 1, 0.5 and A = 1: slopes, 0 if clipped", grad, [[0, -1, -1]])
        self.check("ratios 8, 1, 0.5 and A = 1: clipped", clipped, [[True, False, False]])
        # A = -1 pushes down. Ratios 1/16 and 4: 1/16 becomes 1/4, 4 stays, and the root is 1.
        values, grad, _ = self.run_loss([[0.8, 0.2]], [[0.05, 0.8]], [-1.0])
        self.check("ratios 1/16, 4 and A = -1", values, [[1] * 2])
        self.check("ratios 1/16, 4 and A = -1: slopes", grad, [[0, 1]])


class TestSapoPolicyLoss(LossLesson):
    level = "sapo"
    # The loss is -(4 / tau) g A with g = sigmoid(tau (r - 1)), and the slope is -4 g (1 - g) r A.
    # tau is 1 where A > 0, and otherwise 1.05. At r = 3, g is sigmoid(2) = 0.8808 or sigmoid(2.1) =
    # 0.8909.
    CELLS = """
        p_old  p     A   loss      slope     clipped
        0.25   0.75  1   -3.52319  -1.25993  no       -4 * 0.8808, and that * 0.1192 * 3
        0.25   0.75  -1  3.39392   1.16634   no       4 / 1.05 * 0.8909
        0.5    0.5   -2  3.80952   2         no       4 / 1.05 * 0.5 * 2
    """


class TestDppoPolicyLoss(LossLesson):
    level = "dppo"
    bounds = (0.2, 0.3)
    # The loss is -min(r, 20) A log pi, with the slope -min(r, 20) A, because the factor is a
    # constant. It is 0 if p moved by more than 0.2 down or 0.3 up, in the direction A pushes.
    CELLS = """
        p_old   p     A   loss      slope  clipped
        0.5     0.75  1   0.43152   -1.5   no       -1.5 log 0.75
        0.5     0.85  1   0         0      yes      0.35 up
        0.5     0.85  -1  -0.27628  1.7    no       up, and A pushes down
        0.5     0.25  -1  0         0      yes      0.25 down
        0.5     0.25  1   0.69315   -0.5   no       down, and A pushes up
        0.01    0.05  1   14.97866  -5     no       r is 5, but p moved by 0.04 only
        0.0002  0.01  1   92.10340  -20    no       r is 50
    """


class TestPgPolicyLoss(LossLesson):
    level = "none"
    # The loss is -A log pi, whatever pi_old was.
    CELLS = """
        p_old  p     A   loss      slope  clipped
        0.5    0.75  2   0.57536   -2     no       -2 log 0.75
        0.01   0.75  -1  -0.28768  1      no
    """


class TestKlPenalty(Lesson):
    # Three words and their probabilities. KL(P || Q) = 0.6 log 3 + 0 + 0.1 log(1/5) = 0.4982
    P = tensor([0.6, 0.3, 0.1])
    Q = tensor([0.2, 0.3, 0.5])

    def test_one_token(self):
        """k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l, with l = log(ref / pi)"""
        # pi = 1/2 and ref = 1/4, so l = -log 2 = -0.6931, and e^l = 1/2. The other way round, l
        # would be 0.6931, and e^l would be 2. verl (k1, k2) and TRL (k3) gave the second values.
        logp, ref_logp = tensor([log(0.5), -1.0]), tensor([log(0.25), -0.69063])
        cases = """
            kind  value   second    if l has the wrong sign
            k1    .6931   -.30937   -.6931  .30937
            k2    .2402   .04786    0       0
            k3    .1931   .05320    .3069   .04329
        """
        for kind, *line in lines_of(cases):
            values = floats(line)
            got = grpo.kl_penalty(logp, ref_logp, kind)
            self.check(f"{kind} at pi = 1/2, ref = 1/4 and l = 0.30937", got, values[:2], {
                "a sign is wrong. l is log(ref / pi), and k1 is -l": values[2:]})

    def test_mean_slopes(self):
        """as a loss, k1 does nothing, k2 lowers KL(pi || ref), and k3 lowers KL(ref || pi)"""
        # By the logits, grad log pi(x) = onehot(x) - P. So the gradient of KL(ref || pi) = -sum of
        # Q log pi is P - Q, and that of KL(pi || ref) is P (log(P / Q) - KL).
        P, log_q = self.P, self.Q.log()
        by_k2 = P * (P.log() - log_q - 0.4982)
        for kind, expected in (("k1", [0, 0, 0]), ("k2", by_k2), ("k3", P - self.Q)):
            def mean(z):
                return (P * grpo.kl_penalty(z.log_softmax(0), log_q, kind)).sum()
            got = slope(mean, P.log())
            self.check(f"{kind}, mean slope by the logits of three words (0 if logp is detached)",
                       got, expected)

    def test_unusual_input(self):
        """a constant reference, small and large log-ratios, and ValueError for other kinds"""
        for kind in ("k1", "k2", "k3"):
            got = slope(lambda ref: grpo.kl_penalty(self.P, ref, kind), self.Q)
            self.check(f"{kind}, slope by ref_logp. Is a detach missing?", got, [0, 0, 0])
        # l.exp() rounds a small l away, and torch.expm1(l), which is e^l - 1, does not. There k3 is
        # nearly l^2 / 2. At l = 8 it is 2980.958 - 9, and its slope by log pi is 1 - 2980.958.
        l = tensor([1e-4, 8.0, 99.0])
        got = grpo.kl_penalty(0 * l, l, "k3")
        by_logp = slope(lambda logp: grpo.kl_penalty(logp, l, "k3"), 0 * l)
        self.check("k3 over its true value, at log(ref / pi) = 0.0001 and 8. Use expm1",
                   got[:2] / tensor([5e-9, 2971.958]), [1, 1], tolerance=1e-3)
        self.check("its slopes by log pi", by_logp[:2], [-1e-4, -2979.958])
        if not (got[2].isfinite() and -math.inf < by_logp[2] <= 0):
            self.wrong("log(ref / pi) = 99", "exp overflows, so limit l itself first. k3 is "
                       f"{got[2]}, and its slope by log pi {by_logp[2]}")
        self.check_refused("the kind k4", grpo.kl_penalty, self.P, self.Q, "k4")
        self.check_refused("shapes 3 and 1", grpo.kl_penalty, self.P, self.Q[:1], "k3")


# ==================================================================================================
# grpo.py: sampling, the update and the loop
# ==================================================================================================


class TestSampleGroups(Lesson):
    def sample(self, tasks, size, factory=None, **fields):
        cfg = RLConfig(**fields)
        return grpo.sample_groups(rl_base(), TOK, tasks, size, cfg, generator(), factory)

    def test_groups_and_rewards(self):
        """a group's episodes are neighbours with new names, and the reward is 1 if one passed"""
        episodes = self.sample([TASKS[0], TASKS[9]], 30)
        names = [episode["env"].task["name"] for episode in episodes]
        self.check_same("the tasks", names, ["between"] * 30 + ["ratio"] * 30)
        issues = {episode["env"].task["issue"][2] for episode in episodes[:30]}
        self.check("are there more than 9 names in a group?", len(issues) > 9, True)
        passed = [episode["env"].passed for episode in episodes]
        self.check("have some episodes passed, but not all?", 0 < sum(passed) < 60, True)
        self.check("the rewards", [episode["reward"] for episode in episodes], passed)
        episode, *_ = self.sample(TASKS, 1, reward=lambda env: env.turns / 4, max_turns=1)
        self.check("a reward of turns / 4", episode["reward"], 1 / 4)

    def test_a_readers_own(self):
        """a factory gets copies of tasks of any kind, and a bad reward is refused by name"""
        def factory(task, cfg, rng):
            task["tests"].clear()
            return grpo.make_env(TASKS[0], cfg, rng)
        task = {"tests": [4]}
        for rename in (True, False):
            episode, _ = self.sample([task], 2, factory, rename=rename, max_edits=None)
            self.check_same("a task, after a factory emptied its list", task, {"tests": [4]})
        self.check_same("env without max_edits", type(episode["env"]), BugFixEnv)
        for bad in (NAN, -math.inf, None, (1, 2)):
            self.check_refused(f"a reward of {bad}", self.sample, TASKS[:1], 2,
                               words="reward", reward=lambda env: bad)


class TestSampleStep(Lesson):
    def test_groups_of_equal_rewards_are_left_out(self):
        """kept are the groups whose rewards differ, sampled are all. A full batch has 16"""
        dice = random.Random(0)

        def reward(env):
            return dice.random() if env.task in good else 1.0
        cases = """
            field            rounds  good  kept  sampled
            filter_zero_adv  3       0     0     16
            filter_zero_adv  3       20    16    16
            dynamic_sampling 3       20    16    16
            dynamic_sampling 5       10    16    ?       some rounds more, until 16 are kept
            dynamic_sampling 3       0     0     48      all rounds
            dynamic_sampling 6       0     0     96
        """
        for field, rounds, number, *counts in lines_of(cases):
            good = TRAIN_TASKS[:int(number)]
            cfg = RLConfig(prompts_per_step=4, group_size=4, max_turns=1, rename=False,
                           reward=reward, max_sample_rounds=int(rounds), **{field: True})
            kept, sampled = ([episode["env"].task for episode in episodes] for episodes in
                             grpo.sample_step(coin(), TOK, cfg, TRAIN_TASKS, generator()))
            case = f"{field}, at most {rounds} rounds, {number} of 20 tasks unequal"
            unequal = [task for task in sampled if task in good]
            self.check_same(f"{case}: kept", kept, unequal[:16])
            for count, episodes in zip(counts, (kept, sampled)):
                if count != "?":
                    self.check(f"{case}: number of episodes", len(episodes), int(count))
        names = {task["name"] for task in sampled[:80]}
        self.check("tasks in five rounds of four: none comes twice", len(names), 20)


def same_question():
    """A group of four episodes that hear the word 2. One says yes and has the reward 1, so A = 1.5.
    Three say no, and have A = -0.5."""
    return [play([2, say], say) for say in (YES, NO, NO, NO)]


def own_questions():
    """Two groups of four. Each episode hears a word of its own, 2 to 9, and all say yes. So episode
    i alone moves z[2 + i], by A (1 - p(yes)) times its token's weight."""
    return [play([2 + i, YES], reward) for i, reward in enumerate([1, 0, 0, 0, 1, 1, 0, 0])]


OWN_A = tensor([1.5, -0.5, -0.5, -0.5, 0.8660, 0.8660, -0.8660, -0.8660])


class TestRlUpdate(Lesson):
    def update(self, episodes, lr=1.0, model=None, ref_model=None, optimizer=None, order=0,
               **fields):
        """rl_update by plain gradient descent. Returns the weights after it, and the statistics."""
        model = model or YesOrNo()
        cfg = RLConfig(**{"group_size": 4, "minibatches": 1, "max_grad_norm": math.inf, **fields})
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
        stats = grpo.rl_update(model, optimizer, episodes, cfg, generator(order), ref_model)
        return weights_of(model), stats

    def test_one_step(self):
        """one step down the gradient of -mean(r A): the rewarded word becomes likelier"""
        # r = 1, so the slope of the loss by z[2] is -mean(A * slope of log p) =
        # -(1.5 * 1/2 + 3 * (-0.5) * (-1/2)) / 4 = -0.375. The learning rate is 1.
        z, _ = self.update(same_question())
        self.check("z[2] after one step", z[2], 0.375, {
            "the step goes the wrong way. Is a minus missing in the loss?": -0.375,
            "nothing moved. Is something detached, or is there no optimizer step?": 0.0,
            "the reward was taken in place of the advantage": 0.125,
            "the divisor is too large. Is the environment or padding counted?": 0.1875,
        })
        # Each z[2 + i] has the slope A / 2 / 8. The squares of all A add up to 6.
        z, stats = self.update(own_questions(), max_grad_norm=0.1)
        self.check("length of the step with max_grad_norm 0.1, and grad_norm, before it was "
                   "shortened", [z.norm(), stats["grad_norm"]], [0.1, 6 ** 0.5 / 16])
        z, _ = self.update(same_question(), temperature=2.0)
        self.check("z[2] after a step at temperature 2, half as far", z[2], 0.1875, {
            "this is the step at temperature 1. Is the temperature forgotten?": 0.375})

    def test_two_steps(self):
        """in the second step a token's weight is r = pi / pi_old, and no longer 1"""
        # With lr 0.4, the first step leads to z = 0.15, p(yes) = 0.5374, r(yes) = 1.0749 and
        # r(no) = 0.9251. The second slope is
        # -(1.5 * 1.0749 * 0.4626 + 1.5 * 0.9251 * 0.5374) / 4 = -0.3729. At r = 1 it is -0.375.
        z, _ = self.update(same_question(), lr=0.4, epochs=2)
        self.check("z[2] after two epochs", z[2], 0.15 + 0.4 * 0.3729, {
            "only one step was made. Are the epochs counted?": 0.15,
            "r was 1 in the second step. Is pi_old computed anew?": 0.15 + 0.4 * 0.375,
            "the first gradient is still there. Is zero_grad missing?": 0.15 + 0.4 * 0.7479,
        }, tolerance=2e-5)

    def test_the_clip_and_the_statistics(self):
        """a clipped token has no gradient. Each statistic is over the tokens of its docstring"""
        # Four episodes more hear 3, where p(yes) is sigmoid(1) = 0.7311, and have equal rewards.
        # With lr 4, the first step leads to z[2] = 0.75, because a token's weight is 1/8. Then
        # p(yes) is 0.6792 and p(no) 0.3208. Before, both were 0.5. So r is 1.3584 for yes, with A >
        # 0, and 0.6416 for no, with A < 0. In the second epoch all four are clipped.
        episodes = same_question() + [play([3, YES], 1) for _ in range(4)]
        episodes[0]["logps"][1] += 0.3
        expected = """
            name          value
            clip_frac     0.25     4 tokens of 8, in the second of two epochs
            approx_kl     0.0385   k3: (0.0521 + 3 * 0.0854) / 8, since it is 0 in the first epoch
            ratio_min     0.6416
            ratio_max     1.3584
            logratio_pos  0.1532   half of log 1.3584
            logratio_neg  -0.2219  half of log 0.6416
            entropy       0.6377   the mean of 0.6931 after 2 and 0.5822 after 3
            grad_norm     0.0938   half of 0.1875
            logp_gap      0.3799   log(0.7311 / 0.5), as those who heard 3 noted log 0.5
        """
        for kl_coef in (1e-9, 0.0):
            model = YesOrNo()
            model.z.data[3] = 1.0
            z, stats = self.update(episodes, 4.0, model, YesOrNo(), epochs=2, kl_coef=kl_coef)
            self.check("z[2] after two epochs, all clipped in the second", z[2], 0.75, {
                "it moved in the second, or rows with A = 0 are missing in token_weights": 1.5})
            # l = log(0.5 / 0.7311) where 3 was heard, and else 0
            self.check(f"kl_ref, over all policy tokens, with kl_coef {kl_coef}", stats["kl_ref"],
                       (0.5 / 0.7311 - 1 - log(0.5 / 0.7311)) / 2)
        for name, value, *_ in lines_of(expected):
            self.check(f"{name}, over the tokens that update_stats names", stats[name],
                       float(value), tolerance=2e-4)

    def test_each_episode_has_its_own(self):
        """its own advantage, pi_old and weight, in minibatches of equal and of unequal sizes"""
        for parts, weights in ((2, [1 / 4] * 8), (5, [1 / 2] * 6 + [1] * 2)):
            case = f"8 episodes in {parts} minibatches"
            episodes, model = own_questions(), YesOrNo()
            model.z.data = torch.linspace(-2, 2, 12)
            p = torch.sigmoid(model.z[2:10]).detach()
            z, _ = self.update(episodes, model=model, minibatches=parts)
            moved = (z - torch.linspace(-2, 2, 12))[2:10] / (1 - p)
            self.check(f"{case}: how far each moved its z, over A (1 - p), sorted. At 0, is a "
                       "rest dropped? Otherwise, do the rows of A and old_logp fit?",
                       (moved / OWN_A).sort().values, weights)
            for name, expected in (("advantage", OWN_A), ("weight", moved / OWN_A)):
                got = [episode[name] for episode in episodes]
                self.check(f"{case}: `{name}` in each", got, expected)

    def test_what_is_trained_on(self):
        """only what the policy said, and no truncated episode with mask_truncated"""
        # [2, yes] has A = 0.7071, and [3, yes, 4, yes, 5, yes] has A = -0.7071. Each token has the
        # weight 1/4. In the mean of the rows' means it would be 1/2 and 1/6.
        a = 0.7071 / 8                                  # 1/2, the slope at z = 0, times 1/4
        episodes = [play([2, YES], 1), play([3, YES, 4, YES, 5, YES], 0)]
        z, _ = self.update(episodes, group_size=2)
        expected = [0, a, -a, -a, -a]
        self.check("z[1], where the environment speaks next, to z[5]", z[1:6], expected, {
            "this is the mean of the rows' means": [0, 2 * a, *[-2 / 3 * a] * 3]})
        self.check("`weight`, of one token", [e["weight"] for e in episodes], [1 / 4] * 2)
        episodes = own_questions()[:4]
        episodes[1]["env"].truncated = True
        z, _ = self.update(episodes, mask_truncated=True)
        kept = OWN_A[:4] / 2 * tensor([1, 0, 1, 1])
        self.check("the second of four is truncated and masked: z", z[2:6], kept / 3, {
            "it still counts as a token": kept / 4})
        got = [episode["weight"] for episode in episodes]
        self.check("`weight` in the episodes", got, [1 / 3, 0, 1 / 3, 1 / 3])

    def test_the_kl_term(self):
        """kl_coef times the mean of k3 pulls the policy to the reference"""
        # All rewards are equal, so only this term acts. The reference says yes with 3/4. The slope
        # of k3 by log pi is 1 - ref / pi, -1/2 for yes and 1/2 for no. So by z[2] it is
        # (-1/2 * 1/2 + 3 * 1/2 * (-1/2)) / 4 = -0.25. With kl_coef 2, the step is 0.5.
        ref_model = YesOrNo()
        ref_model.z.data[:] = log(3)
        episodes = same_question()
        episodes[0]["reward"] = 0.0
        z, _ = self.update(episodes, ref_model=ref_model, kl_coef=2.0)
        self.check("z[2] after a step of the KL term alone", z[2], 0.5, {
            "kl_coef is forgotten, or padding counts": 0.25, "the KL term has no effect": 0})
        self.check_refused("the policy as its own reference", self.update, episodes,
                           model=ref_model, ref_model=ref_model)

    def test_all_losses_and_modes(self):
        """two steps on unequal rows are those of one plain loss over all rows"""
        # The third group has equal rewards, and one row has no token of the policy.
        rewards = [1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1]
        episodes = [play([2 + i % 10, i % 2] * (1 + i % 5), R) for i, R in enumerate(rewards)]
        episodes[1]["mask"] = [0, 0] * 2
        batch = agent.collate(episodes)
        ref_model = YesOrNo()
        ref_model.z.data = torch.linspace(-1, 1, 12)
        ref = agent.token_logps(ref_model, batch)
        old = agent.token_logps(YesOrNo(), batch)
        for level, agg, kl_coef in itertools.product(grpo.LOSSES, MODES, (0, 1)):
            fields = dict(ratio_level=level, agg=agg, agg_constant=9, kl_coef=kl_coef,
                          kl_kind="k2")
            z, _ = self.update(episodes, 0.5, ref_model=ref_model, epochs=2, **fields)
            cfg = RLConfig(group_size=4, **fields)
            A = grpo.compute_advantages(episodes, cfg)
            model = YesOrNo()
            for _ in range(2):
                logp = agent.token_logps(model, batch)
                values, _ = grpo.policy_loss(logp, old, A, batch["mask"], cfg)
                kl = grpo.kl_penalty(logp, ref, "k2")[batch["mask"]].mean()
                loss = grpo.aggregate_loss(values, batch["mask"], agg, 9) + kl_coef * kl
                model.z.data -= 0.5 * torch.autograd.grad(loss, model.z)[0]
            self.check(f"{level}, {agg}, kl_coef {kl_coef}: z", z, model.z, tolerance=1e-6)

    def test_no_step_without_a_gradient(self):
        """weights stay where nothing is learned, also with momentum, or if the gradient is inf"""
        model = YesOrNo()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        options = dict(model=model, optimizer=optimizer, mask_truncated=True)
        before, _ = self.update(same_question(), **options)
        equal, cut = same_question(), same_question()
        equal[0]["reward"] = 0.0
        for episode in cut:
            episode["env"].truncated = True
        for case, episodes, norm in (("equal rewards", equal, 0), ("no episode", [], NAN),
                                     ("all truncated and masked", cut, 0)):
            z, stats = self.update(episodes, minibatches=3, **options)
            self.check(f"{case}: the weights, if no step is taken", z, before, tolerance=0)
            self.check(f"{case}: grad_norm", stats["grad_norm"], norm)
        model.z.register_hook(lambda grad: grad * math.inf)
        self.check_refused("an infinite gradient", self.update, same_question(),
                           error=FloatingPointError, **options)
        self.check("weights after an infinite gradient. Is the check before the step?",
                   weights_of(model), before)

    def test_minibatches(self):
        """one with nothing to learn does not end the pass, and the generator alone cuts them"""
        episodes = own_questions()
        episodes[0]["reward"] = 0.0
        z, _ = self.update(episodes, minibatches=8)
        self.check("the rewards of the first group are equal: which z[2] to z[9] have moved?",
                   z[2:10] != 0, [False] * 4 + [True] * 4)
        self.check_seeds(lambda seed: self.update(same_question(), 3.0, minibatches=4, epochs=3,
                                                  order=seed)[0].tolist())


class TestTrainRl(Lesson):
    def train(self, model=None, tasks=None, ref=None, factory=None, on_step=None, **fields):
        """train_rl of a policy that reads or submits in its only turn. Submitting is rewarded."""
        cfg = RLConfig(**{"steps": 1, "prompts_per_step": 2, "group_size": 8, "max_turns": 1,
                          "reward": lambda env: float(not env.truncated), **fields})
        return grpo.train_rl(model or coin(), TOK, cfg, TRAIN_TASKS, tasks, ref, factory, on_step)

    def test_it_learns_what_is_rewarded(self):
        """the choice that is rewarded becomes likely, and on_step gets the rows of the history"""
        seen = []
        history = self.train(steps=15, lr=0.5, on_step=lambda row, _: seen.append(row) or True)
        rewards = [row["reward"] for row in history]
        self.check(f"below 0.8 at first and above 0.9 at last? The rewards are {rewards}",
                   [rewards[0] < 0.8, rewards[-1] > 0.9], [True, True])
        self.check_same("what on_step gets", seen, history)

    def test_the_base_agent_learns_to_read(self):
        """thirty steps of the default: most episodes read first, and more of them pass"""
        model, cfg = rl_base(), RLConfig(steps=30)
        history = grpo.train_rl(model, TOK, cfg, TRAIN_TASKS)
        after = grpo.evaluate(model, TOK, HELDOUT_TASKS, 4, cfg)
        for name, least in (("read_first", 0.7), ("pass_rate", 0.35)):
            case = f"{name} above {least}? It is {after[name]:.2f}"
            self.check(case, after[name] > least, True)
        gaps = [row["logp_gap"] for row in history]
        self.check("the largest logp_gap. Do sampler and trainer agree?", max(gaps), 0)

    def test_reproducible(self):
        """the seed decides everything, and the tasks of a step depend on nothing else"""
        drawn = []

        def names(row, episodes):
            drawn.append({episode["env"].task["name"] for episode in episodes})

        def history(seed, **fields):
            rows = self.train(steps=3, on_step=names, seed=seed, **fields)
            return re.sub(r"'sec_\w+': [^,}]+", "", repr(rows))
        self.check_seeds(history)
        history(0, group_size=4, epochs=2)
        self.check_same("the tasks of a run with other settings", drawn[9:], drawn[:3])

    def test_warmup(self):
        """the learning rate rises with each step that has a gradient"""
        # Adam's first step moves each weight that has a gradient by the learning rate, whatever the
        # gradient is. Rewards are equal in the steps 0 and 1.
        model, moved = coin(), []
        w = [weights_of(model)]

        def on_step(row, episodes):
            w.append(weights_of(model))
            moved.append((w[-1] - w[-2]).abs().max())
        self.train(model, steps=6, lr=0.03, warmup_steps=3, minibatches=1, on_step=on_step,
                   reward=lambda env: float(len(moved) > 1 and not env.truncated))
        self.check("largest change of a weight, steps 0 to 2", moved[:3], [0, 0, 0.01], {
            "the warmup is over. Do steps without a gradient count?": [0, 0, 0.03]})
        self.check("fifth and sixth step: near lr", moved[4:], [0.03] * 2, tolerance=0.007)

    def test_the_reference(self):
        """by default it is a frozen copy of the policy as it was at the start"""
        fields = dict(steps=3, kl_coef=0.1, lr=0.3)
        own, other = ([row["kl_ref"] for row in self.train(ref=ref, **fields)]
                      for ref in (None, coin()))
        self.check("kl_ref with a copy given, and by default", other, own)
        self.check("kl_ref: 0 at first, and then more?", [own[0], own[2] > 0], [0, 1])

    def test_what_is_reported(self):
        """statistics are over all that was sampled, and nan is what an environment does not say"""
        class Rigged(BugFixEnv):
            def step(self, words):
                self.passed = bool(outcomes.pop(0))
                return ["ok"], True
        outcomes = [1] * 4 + [0] * 8 + [0, 1, 0, 1]
        row, = self.train(factory=lambda task, cfg, rng: Rigged(task), reward=None, group_size=4,
                          prompts_per_step=4, filter_zero_adv=True)
        names = "episodes zero_adv_frac all_passed all_failed pass_rate"
        got = [row[name] for name in names.split()]
        self.check(f"1111 0000 0000 0101: {names}", got, [16, 3 / 4, 1 / 4, 2 / 4, 6 / 16])
        row, = self.train(factory=lambda *_: Talker(1), reward=lambda env: 1.0)
        got = [row[name] for name in names.split()]
        self.check(f"an environment without `passed`: {names}", got, [16, 1, NAN, NAN, NAN])

    def test_evaluation(self):
        """every eval_every steps and after the last, on the evaluation's tasks"""
        def factory(task, cfg, rng):
            made.append(task in HELDOUT_TASKS)
            return BugFixEnv(task, 1)
        made = []
        history = self.train(None, HELDOUT_TASKS[:2], factory=factory, rename=False, steps=6,
                             eval_every=2, eval_samples=3)
        got = [row["step"] for row in history if row["eval_pass_rate"] >= 0]
        self.check_same("6 steps, eval_every 2: the steps with a value", got, [0, 2, 4, 5])
        self.check("number of episodes on those tasks", sum(made), 4 * 6)


class TestVariants(Lesson):
    # What each paper changes of DeepSeekMath's GRPO without its KL term
    PAPERS = """
        name      fields
        default   agg=token_mean
        grpo      kl_coef=0.04
        dr_grpo   scale=none agg=constant agg_constant=24.0
        dapo      eps_high=0.28 agg=token_mean dynamic_sampling=True overlong_buffer=2
        rloo      baseline=leave_one_out scale=none minibatches=1 agg=seq_mean_token_sum
        gspo      ratio_level=sequence eps_low=0.0003 eps_high=0.0004
        cispo     ratio_level=cispo eps_low=1.0 agg=token_mean
        gmpo      ratio_level=gmpo eps_low=0.4 eps_high=0.4
        sapo      ratio_level=sapo
        luspo     ratio_level=sequence eps_low=0.002 eps_high=0.0025 agg=seq_mean_token_sum
        lite_ppo  scale=batch_std agg=token_mean
        gpg       ratio_level=none scale=none minibatches=1 filter_zero_adv=True agg=token_mean
        opo       ratio_level=none baseline=length_weighted scale=none minibatches=1
                  agg=seq_mean_token_sum
        maxrl     ratio_level=none scale=group_mean minibatches=1 agg=token_mean
        dppo      ratio_level=dppo eps_low=0.15 eps_high=0.15 agg=token_mean
    """.replace("\n                  ", " ")

    def test_presets(self):
        """each has the fields of its paper, and trains"""
        common = {"agg=seq_mean_token_mean", "kl_coef=0.0", "kl_kind=k3"}
        papers = {name: changes for name, *changes in lines_of(self.PAPERS)}
        self.check_same("the names", sorted(variants.VARIANTS), sorted(papers))
        for name, fields in variants.VARIANTS.items():
            got = {f"{key}={value}" for key, value in fields.items()} - common
            self.check_same(f"the fields of {name}", got, set(papers[name]))
            row, = TestTrainRl.train(self, max_turns=2, **fields)
            self.check(f"{name}: is there a gradient?", row["grad_norm"] > 0, True)


class TestProgram(FolderLesson):
    def printed(self, flags):
        _, out, _ = self.run_here(variants, flags)
        return out

    def test_the_gym_for_trl(self):
        """programs for all presets, whose class BugFix plays as this gym does"""
        calls = "edit or_to_and, edit widen, edit x, test, submit, test"
        answers = "ok, refused, malformed, pass, pass, the attempt is over"
        for name in variants.VARIANTS:
            self.printed(f"{name} --verl")
            program = self.printed(f"{name} --trl")
            compile(program, name, "exec")
            start, end = program.index("TASK = {"), program.index("def report")
            scope = {**vars(env), "random": random}
            exec(program[start:end], scope)
            gym = scope["BugFix"]()
            gym.reset("leap")
            self.check_same(f"{name}: the source", gym.read(), gym._env.source)
            got = []
            for call in calls.split(", "):
                method, *words = call.split()
                got.append(getattr(gym, method)(*words))
            self.check_same(f"{name}: {calls}", ", ".join(got), answers)
            # dapo subtracts 1 for an episode of six turns
            self.check(f"{name}: the reward", gym.get_reward(), 0 if name == "dapo" else 1)

    def test_settings(self):
        """some that have other names or numbers in the other trainer"""
        cases = """
            preset trainer setting
            gspo   --trl   epsilon_high=0.0004
            dppo   --verl  clip_ratio_c=20.0
        """
        for preset, trainer, setting in lines_of(cases):
            program = self.printed(f"{preset} {trainer}")
            self.check(f"is {setting} in {preset} {trainer}?", setting in program, True)

    def test_code_for_advantages(self):
        """it computes those of group_advantages"""
        R = tensor([[1.0, 0, 0, 1], [0, 0, 0, 0]])
        n = tensor([[3, 5, 2, 4], [1, 1, 1, 1]])
        for name in ("rloo", "lite_ppo", "gpg", "opo", "maxrl"):
            scope = {"R": R, "n": n}
            exec("if True:\n" + getattr(variants, f"{name.upper()}_ADVANTAGES"), scope)
            cfg = RLConfig(**variants.VARIANTS[name])
            A = grpo.group_advantages(R.flatten(), 4, cfg.baseline, cfg.scale, n.flatten())
            if name == "gpg":                           # 14 of the 18 tokens have a gradient
                A = A * 18 / 14
            self.check(f"{name}: advantages", scope["A"].flatten(), A)


# ==================================================================================================
# ablate.py
# ==================================================================================================


class TestTInterval(Lesson):
    def test_mean_and_half_width(self):
        """mean +- t std / sqrt(n), where std is unbiased and t has n - 1 degrees of freedom"""
        # The mean is 0.05, std is 0.01, and 4.303 * 0.01 / sqrt(3) = 0.0248.
        got = list(ablate.t_interval([0.05, 0.06, 0.04]))
        self.check("mean and half width for 0.05, 0.06, 0.04", got, [0.05, 0.0248])
        # The values are -1 and 1, n / 2 of each, so std is sqrt(n / (n - 1)).
        for n, t in ((8, 2.3646), (10, 2.2622), (1002, 1.9623)):
            _, half = ablate.t_interval([-1, 1] * (n // 2))
            self.check(f"t for {n} values", half * math.sqrt(n - 1), t, tolerance=1e-3)


class TestCompare(Lesson):
    def test_verdicts(self):
        """pairs that are equal, or too few, or without a number, are named and not dropped"""
        cases = """
            ours        | verdict
            .55 .76 .64 | higher | ahead on every seed, by about the same
            .45 .64 .56 | lower
            .6  .7  .6  | not distinguishable | ahead on one seed
            .5  .7  .6  | equal on every seed
            .6  .7  nan | too few pairs
        """
        theirs = dict(enumerate([0.5, 0.7, 0.6]))
        for line in cases.strip().splitlines()[1:]:
            ours, expected, *_ = line.split("|")
            got, _ = ablate.compare(dict(enumerate(floats(ours.split()))), theirs)
            self.check_same(f"{ours} and .5 .7 .6", got, expected.strip())

    def test_never_reached(self):
        """if a run never reached it there is no interval, and the seeds are named"""
        verdict, d = ablate.compare({0: 9, 1: math.inf, 2: 8}, {0: 9, 1: 7, 2: math.inf})
        self.check_same("differences, which would flatter one of the two", d, [])
        self.check_same("seeds in the verdict", re.findall(r"\d", verdict), ["1", "2"])


class TestWatch(Lesson):
    def test_the_advantage_of_reading(self):
        """the mean of reward - mean of the task, for those that read before their first edit"""
        # Two tasks with eight attempts of two kinds each. A pass has the advantage 1/2, and a
        # failure -1/2. Only attempts of the first kind read before their first edit.
        kinds = (("read, edit widen, submit", ["widen"], True),
                 ("edit widen, read, submit", ["widen"], False),
                 ("edit widen, submit", ["widen"], True), ("read, submit", [], False))
        episodes = []
        for calls, edits, passed in kinds:
            episodes += 8 * [TestBehaviorStats.episode(self, calls, task=TASKS[0], edits=edits,
                                                       passed=passed)]
        with mock.patch.object(ablate, "sample_groups", return_value=episodes):
            stats = ablate.watch(None, None, None, RLConfig())
        got = stats["adv_read"], stats["adv_not_read"]
        self.check("those that read first, and others", tensor(got), [1 / 2, -1 / 6])


class TestAnyPassed(Lesson):
    def test_it_is_unbiased(self):
        """the mean over all outcomes of 5 attempts is the probability, also of rewards_differ"""
        for k in (2, 3, 5):
            some = both = 0
            for c in range(6):                          # c of 5 attempts pass, with this chance
                chance = math.comb(5, c) * 0.3 ** c * 0.7 ** (5 - c)
                some += chance * ablate.any_passed(c, 5, k)
                both += chance * ablate.rewards_differ(c, 5, k)
            self.check(f"pass rate 0.3, k = {k}: pass@k, and the chance that k rewards differ",
                       [some, both], [1 - 0.7 ** k, 1 - 0.7 ** k - 0.3 ** k])


def make_job(grid, arm, seed=0, **given):
    job, = ablate.make_jobs(argparse.ArgumentParser(), grid, [arm], [seed], given)
    return job


class TestReadRuns(FolderLesson):
    def test_identity(self):
        """the names of grid and arm do not matter, and all that decides the result does"""
        runs = [make_job("arms", "default"), make_job("variants", "default"),
                make_job("arms", "scale none"), make_job("arms", "default", seed=1)]
        got = [ablate.identity(job) == ablate.identity(runs[0]) for job in runs]
        self.check("itself, in another grid, another arm, another seed: is it the same run?", got,
                   [True, True, False, False])

    def test_finished_runs(self):
        """they are found again, nan too, and a line that was cut off does not spoil the next"""
        job = make_job("arms", "default", max_grad_norm=math.inf)
        record = {**job, "versions": ablate.versions(), "result": {"x": NAN}}
        line = ablate.to_json(record)
        json.loads(line, parse_constant=self.fail)      # nan and inf are not JSON
        with open("runs", "a+") as file:
            file.write(line + "\n" + line[:50])
            known = ablate.read_runs(file)
            self.check("the result nan", known[ablate.identity(job)]["x"], NAN)
            print(line, file=file, flush=True)
            file.seek(0)
            self.check_same("the last line", file.read().split("\n")[-2], line)

    def test_another_kind(self):
        """a file of another kind is refused by name, and is not changed"""
        with open("notes", "w+") as file:
            file.write('{"config": {}}\n')             # a log of grpo.py
            self.check_refused("a log", ablate.read_runs, file)
        self.check("bytes of the log", os.path.getsize("notes"), 15)


class TestRunJobs(Lesson):
    def test_one_fails(self):
        """the others go on, and have a number for each column of the grids"""
        jobs = [make_job("settings", arm, steps=1) for arm in ("read", "control")]
        jobs[1]["config"]["lr"] = NAN                   # train_rl refuses it
        with contextlib.redirect_stderr(io.StringIO()):
            results = ablate.run_jobs(jobs, 1)
        self.check_same("the runs with a result", list(results), [("read", 0)])
        for grid in ablate.GRIDS.values():
            if "measure" not in grid:
                ablate.table_of(results, grid["columns"])


# ==================================================================================================
# Command lines and README
# ==================================================================================================


class TestCheckConfig(FolderLesson):
    # The first flag of a line is refused.
    BAD_FLAGS = """
        flags
        --steps -1
        --steps 1.5
        --prompts_per_step 21
        --group_size 1
        --minibatches 0
        --minibatches 65
        --epochs 0
        --lr 0
        --lr nan
        --lr fast
        --eps_low -0.1
        --eps_low 1.5
        --eps_high nan
        --temperature 0
        --temperature -1
        --seed -1
        --warmup_steps -1
        --max_grad_norm 0
        --max_edits -1
        --max_edits few
        --max_turns 0
        --rename maybe
        --eval_every -1
        --eval_samples 0
        --baseline mean
        --scale std
        --ratio_level ppo
        --agg mean
        --agg_constant 0 --agg constant
        --kl_coef -1
        --kl_kind k4
        --max_sample_rounds 0
        --overlong_buffer 7
        --overlong_buffer 2 --variant maxrl
        --filter_zero_adv true --variant dapo
        --variant no
        --base no
        --step 3
        --threads x
        --init none.pt
        --init words.pt
        --init log
        --save none/x.pt
        --save log/x.pt
        --save .
        --save pipe
        --log none/log
    """

    def test_flags_that_make_no_sense(self):
        """exit status 2 before any work, with the name of the flag, and older files stay"""
        agent.save_policy(rl_base(), dict(zip(TOK, reversed(TOK.values()))), {}, "words.pt")
        with open("log", "w") as file:
            file.write("older")
        os.mkfifo("pipe")
        for flags in lines_of(self.BAD_FLAGS):
            case = "--log log " + " ".join(flags)
            status, out, err = self.run_here(grpo, case)
            named = bool(re.search(rf"error: .*{flags[0]}\b", err))
            self.check_same(f"{case}: exit status, output, does the error name {flags[0]}?",
                            (status, out, named), (2, "", True))
        self.check("bytes of the older log", os.path.getsize("log"), 5)


class TestMain(FolderLesson):
    def setUp(self):
        super().setUp()
        agent.save_policy(rl_base(), TOK, {}, "base.pt")

    def start(self, flags):
        command = [sys.executable, os.path.join(HERE, "grpo.py"), *flags.split()]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def test_a_run_with_everything(self):
        """preset and flags, log, lens, and a policy that plays as it did when loaded"""
        with open("log", "w") as file:
            file.write('{"older": 1}\n')
        run = self.start("--init base.pt --variant dr_grpo --scale group_std --steps 3 "
                         "--log log --save saved.pt --show 2 --threads 1 --max_grad_norm inf "
                         "--lr 0.01 --mask_truncated true --warmup_steps 0 --prompts_per_step 4 "
                         "--max_edits none")
        out, err = run.communicate()
        self.check_same("exit status and stderr", (run.returncode, err), (0, ""))
        with open("log") as file:                       # NaN, for example, is not JSON
            lines = [json.loads(line, parse_constant=self.fail) for line in file]
        older, settings, *rows = lines
        self.check_same("the older line of the log", older, {"older": 1})
        got = [settings["config"][name] for name in ("agg", "scale", "lr")]
        self.check_same("fields of preset and flags", got, ["constant", "group_std", 0.01])
        self.check_same("steps in the log", [row["step"] for row in rows], [0, 1, 2])
        self.check_same("steps under the lens", re.findall(r"\nstep (\d): ", out), ["0", "2"])
        weights = re.findall(r" (\d\.\d{5})  ", out)      # of a token in a minibatch of 16 rows
        self.check_same("the largest weight under the lens", max(weights), f"{1 / 16 / 24:.5f}")
        _, again, _ = self.run_here(grpo, "--init saved.pt --steps 0 --max_edits none")
        for tasks in ("training", "held-out"):
            after = re.search(rf"after, {tasks} tasks +(.*)", out)[1]
            before = re.search(rf"before, {tasks} tasks +(.*)", again)[1]
            self.check_same(f"what was saved, on {tasks} tasks", before, after)

    def test_stopped(self):
        """Ctrl-C and a termination signal save the policy, and the exit status is 130"""
        signal.signal(signal.SIGINT, signal.default_int_handler)    # runs would inherit SIG_IGN
        sent = signal.SIGINT, signal.SIGTERM
        runs = [self.start(f"--init base.pt --save {x.name} --steps 5000") for x in sent]
        for x, run in zip(sent, runs):
            while not re.match(" +3 ", run.stdout.readline()):
                self.assertIsNone(run.poll())
            run.send_signal(x)
            run.communicate(timeout=60)
            self.check(f"{x.name}: exit status", run.returncode, 130)
            loaded = weights_of(agent.load_policy(TOK, x.name))
            self.check(f"{x.name}: is what was saved the policy of the start?",
                       torch.equal(loaded, weights_of(rl_base())), False)

    @mock.patch.object(ablate, "run_jobs", None)        # no row of the table should get there
    def test_the_other_scripts(self):
        """what they print, or the flag that the error names"""
        cases = """
            script   | flags                        | status | says
            env      |                              | 0      | 3125 +0\\.60
            env      | --task between --ops widen   | 0      | submit +fail
            env      | --ops x                      | 2      | --ops
            variants |                              | 0      | (?s)dapo.*maxrl
            variants | ppo                          | 2      | NAME
            variants | --trl                        | 2      | NAME
            variants | gspo --trl --verl            | 2      | --verl
            ablate   | --list                       | 0      | arms +5 arms
            ablate   | --scale none                 | 2      | --scale.*scale none
            ablate   | --arms no                    | 2      | --arms
            ablate   | --seed 3                     | 2      | --seed\\b
            ablate   | --seeds 1,1                  | 2      | --seeds
            ablate   | --jobs 0                     | 2      | --jobs
        """
        for line in cases.strip().splitlines()[1:]:
            script, flags, status, words = map(str.strip, line.split("|"))
            got, out, err = self.run_here(sys.modules[script], flags)
            said = err.split("error: ")[-1] if got else out
            self.check_same(f"{script}.py {flags}: exit status, and does it say {words!r}?",
                            (str(got), bool(re.search(words, said))), (status, True))


class TestReadme(FolderLesson):
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        TEXT = file.read()

    def test_examples(self):
        """the environment of one's own is learned"""
        block, = re.findall(r"```python\n(.*?)```", self.TEXT, re.S)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, {"__name__": "readme"})
        before, after = floats(re.findall(r"\d\.\d+", out.getvalue()))
        self.check(f"{out.getvalue()}: is the reward low, then high?",
                   [before < 0.7, after > 0.9], [True, True])


if __name__ == "__main__":
    unittest.main(testLoader=InOrder(), warnings="ignore")
