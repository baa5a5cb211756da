"""All tests, plain unittest:  python test_all.py            or a part:  python test_all.py TestLosses

The code is compared with what was worked out apart from it: by hand, by enumeration, by a second and plainer
implementation in this file, or by public trainers, whose numbers are copied below.
"""
import ast
import contextlib
import copy
import inspect
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
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn

import ablate
import agent
import env
import grpo
import variants
from agent import Policy, build_tokenizer, collate, decode, encode, rollout_batch, token_logps
from env import FIX_OP, HELDOUT_TASKS, OPS, TASKS, TRAIN_TASKS, BugFixEnv, EditBudgetEnv, apply_op
from grpo import RLConfig, aggregate_loss, group_advantages, kl_penalty, policy_loss, train_rl

HERE, TOK, SHARED = os.path.dirname(os.path.abspath(__file__)), build_tokenizer(), {}
torch.set_num_threads(1)
MATPLOTLIB = find_spec("matplotlib") is not None
LOSSES = {"token": grpo.ppo_policy_loss, **variants.POLICY_LOSSES}      # ratio_level -> loss
MODES, BASELINES, SCALES = (grpo.CHOICES[name] for name in ("agg", "baseline", "scale"))

# ---- Helpers -----------------------------------------------------------------------------------------------
def rl_base():
    """A copy of the RL base agent of seed 0, which is made once for all tests."""
    if "base" not in SHARED:
        SHARED["base"] = agent.make_rl_base(TOK, seed=0)
    return copy.deepcopy(SHARED["base"])

def fresh_policy(seed=0, **shape):
    torch.manual_seed(seed)
    return Policy(len(TOK), **shape)

def generator(seed=0):
    return torch.Generator().manual_seed(seed)

def run_main(module, *flags):
    """Runs a script's main() in this process. Returns (exit status, stdout, stderr)."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), \
            mock.patch.object(sys, "argv", [module.__name__ + ".py", *flags]):
        try:
            module.main()
        except SystemExit as error:
            status = error.code or 0
    return status, out.getvalue(), err.getvalue()

class InFolder(unittest.TestCase):
    """Tests of scripts, with a folder for their files."""
    SMALL = "--steps 2 --prompts_per_step 2 --group_size 2 --max_turns 3 --eval_every 0".split()

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.dir = folder.name

    def file(self, name, text=None):
        if text is not None:
            with open(os.path.join(self.dir, name), "w", encoding="utf-8") as file:
                file.write(text)
        return os.path.join(self.dir, name)

    def rows(self, name):
        with open(self.file(name), encoding="utf-8") as file:       # NaN and Infinity are no JSON
            return [json.loads(line, parse_constant=self.fail) for line in file]

    def start(self, script, *flags, stdout=subprocess.PIPE, **variables):
        run = subprocess.Popen([sys.executable, os.path.join(HERE, script), *flags], text=True, cwd=self.dir,
                               stdout=stdout, stderr=subprocess.PIPE, start_new_session=True,
                               env={**os.environ, **variables})
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        return run

    def refused(self, module, flags, *words):
        """The script must say so in two lines, and leave every file of the folder as it was."""
        before = {file.name: file.stat().st_mtime_ns for file in os.scandir(self.dir)}
        status, out, err = run_main(module, *flags)
        self.assertEqual((status, out, err.count("\n")), (2, "", 2), (flags, err))
        self.assertEqual({file.name: file.stat().st_mtime_ns for file in os.scandir(self.dir)}, before)
        self.assertRegex(err, rf"^usage: {module.__name__}\.py .*\n{module.__name__}\.py: error: .")
        for word in words:
            self.assertIn(word, err.splitlines()[1], flags)

def close(got, expected, tolerance=1e-6, about=""):
    """AssertionError unless two tensors, numbers or lists of numbers have one shape and differ by less."""
    got, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, expected))
    if got.shape != expected.shape or not bool(((got - expected).abs() <= tolerance).all()):
        raise AssertionError(f"{about}: {got.tolist()} is not {expected.tolist()}")

def gradient(loss_of, x):
    """The value of loss_of(x), a number, and its gradient by x."""
    x = x.detach().clone().requires_grad_()
    loss = loss_of(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]

def without_seconds(history):
    """A text with everything in a history, or in a result that has one, but the seconds."""
    return re.sub(r"'sec_\w+': [^,}]+", "", repr(history))

def random_case(B=5, T=7, seed=0, spread=0.4):
    """logp, old_logp (B, T), adv (B,) and mask (B, T) in float64. Every row has at least one token."""
    g = generator(seed)
    logp = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3 - 0.01
    old = (logp + spread * torch.randn(B, T, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)
    return logp, old, torch.randn(B, generator=g, dtype=torch.float64), mask

def tensors(case):
    """logp, old_logp, adv and mask of one of the cases below, with nan off the mask."""
    mask = torch.arange(8) < torch.tensor(case["lengths"])[:, None]
    logp, old = (torch.full(mask.shape, math.nan, dtype=torch.float64).masked_scatter(
        mask, torch.tensor(case[key], dtype=torch.float64)) for key in ("logp", "old_logp"))
    return logp, old, torch.tensor(case["adv"], dtype=torch.float64), mask

# Two cases with the values that public trainers gave for them in float64: verl at commit 1dda039b, TRL 1.16.0
# and rlhf-book at commit a66b0bf1. logp and old_logp list the policy tokens row by row, and are rounded here.
# After each loss stand three numbers of its gradient: the sum, the sum weighted by 1, 2, 3 ..., and the sum
# of magnitudes. A row of the second case has no token. TRL's luspo and verl's gmpo count it and are absent.
CLIP_HIGHER = dict(
    logp=[-3.526094, -0.578273, -2.526248, -1.903255, -2.836299, -1.635714, -0.409769, -3.096607, -2.786317,
        -3.87795, -2.834314, -1.951071, -4.101072, -0.503161, -3.266093, -0.881665, -2.99404, -3.33193,
        -1.756552, -0.624361, -2.69807, -1.255101, -2.950171, -0.955314, -1.778433, -3.151505, -1.484032,
        -1.632492, -0.637287, -2.780747, -2.508937, -2.240696, -3.325341, -1.299316, -2.306642, -0.574422,
        -2.271498, -1.583685, -2.813246, -3.717049, -1.352048, -2.608145, -2.343013],
    old_logp=[-3.690243, -0.407661, -2.855005, -2.181046, -2.791117, -1.86905, -0.348363, -2.752005,
        -2.498889, -3.251942, -2.951358, -1.485529, -3.785584, -0.808197, -3.051737, -0.4757, -2.99596,
        -2.847038, -1.714489, -0.557564, -2.231904, -1.328063, -2.919186, -1.444594, -1.498014, -3.414266,
        -1.570158, -1.622468, -0.088518, -2.968326, -2.519074, -2.064693, -3.689415, -1.076287, -2.173211,
        -0.895926, -2.066667, -1.655672, -3.013939, -3.736409, -2.105836, -2.571198, -2.314853],
    lengths=[4, 8, 6, 2, 7, 5, 3, 8], rewards=[1, 0, 0, 1, 0, 0, 0, 1], eps=(0.2, 0.28),
    adv=[0.8660239038, -0.8660239038, -0.8660239038, 0.8660239038, -0.499999, -0.499999, -0.499999, 1.499997],
    advantages={"group_mean/group_mean": [1, -1, -1, 1, -1, -1, -1, 3],  # rlhf-book, and below verl
                "length_weighted/none": [.7, -.3, -.3, .7, -8 / 23, -8 / 23, -8 / 23, 15 / 23]},
    losses={
        "token/token_mean": (0.0131372217, 0.01330657175, -5.300326676, 0.5943240918),  # TRL
        "token/seq_mean_token_mean": (-0.03313977775, -0.01474604162, -2.200321998, 0.5841236947),  # verl
        "token/seq_mean_token_sum": (0.07061256662, 0.07152282302, -28.48925589, 3.194491994),  # verl
        "token/constant": (0.004413285414, 0.004470176449, -1.780578493, 0.1996557496),  # TRL
        "sequence/seq_mean_token_mean": (-0.08097803258, -0.08097803256, -5.222212285, 0.8057425324),  # verl
        "cispo/token_mean": (-0.1052941974, 0.005420444446, -8.190171974, 0.8681595233),  # verl
        "cispo/token_mean/1.0/0.28": (-0.04075853123, -0.01917034595, -8.709222144, 0.8435687329),  # verl
        "gmpo/seq_mean_token_mean/.4/.4": (-0.06466265431, -0.1134513889, -4.679347876, 0.7032207347),  # verl
        "sapo/seq_mean_token_mean": (-0.1144522351, -0.06957961354, -4.795066987, 0.8054033483),  # verl
        "dppo/token_mean": (0.01271223196, -0.06753883363, -11.01990237, 0.8670967931),  # verl
        "none/token_mean": (-0.2334409578, 0.05646977284, -6.567428743, 0.8562892809),  # verl
        "sequence/seq_mean_token_sum": (-0.2548431418, -0.254843142, -53.54062838, 4.602504356),  # TRL
    })
MASKED_ROW = dict(
    logp=[-1.157906, -3.941894, -0.978993, -0.001, -0.263827, -2.604685, -0.610036, -0.361939, -0.448873,
        -2.808024, -3.770722, -2.244455, -2.046622, -0.500902, -0.342814, -0.207595, -3.54057, -2.082867],
    old_logp=[-1.005104, -3.376687, -1.394859, -0.351534, -0.194067, -2.452661, -0.439058, -0.464813,
        -0.494358, -3.256353, -3.907128, -2.305404, -2.040942, -0.861624, -0.795986, -0.256206, -3.69898,
        -1.680267],
    lengths=[8, 0, 6, 4], eps=(0.2, 0.2), adv=[0.7071057812, -0.7071057812, -0.7071057812, 0.7071057812],
    losses={
        "token/seq_mean_token_mean": (-0.1792169198, -0.03779576383, 0.1978282007, 0.6074026278),  # verl
        "token/seq_mean_token_sum": (-1.039312341, -0.1907854034, 8.771929565, 3.608426593),  # verl
        "token/constant": (-0.04871776597, -0.008943065782, 0.4111841984, 0.1691449965),  # TRL
        "sequence/seq_mean_token_mean": (-0.1994714535, -0.1994714535, -2.218958658, 0.7606750079),  # verl
        "sapo/seq_mean_token_mean": (-0.4750382488, -0.2105320785, -2.337027574, 0.7635646986),  # verl
    })

# ---- Tests -------------------------------------------------------------------------------------------------
class TestLosses(unittest.TestCase):
    def test_one_token_by_hand(self):
        # The token's probability goes from p to q, so r = q / p. Its loss and the slope of that by log pi.
        log, gate = math.log, lambda x: 1 / (1 + math.exp(-x))
        for level, A, p, q, value, slope, clipped in (
                ("token", 1, 0.5, 0.75, -1.3, 0, True),         # too far in the direction of A: clipped
                ("token", 1, 0.5, 0.25, -0.5, -0.5, False),     # too far against it: not clipped
                ("token", -1, 0.5, 0.75, 1.5, 1.5, False), ("token", -1, 0.5, 0.25, 0.8, 0, True),
                ("sequence", 1, 0.5, 0.75, -1.3, 0, True), ("none", 2, 0.5, 0.75, -2 * log(0.75), -2, False),
                ("cispo", 1, 0.5, 0.75, -1.3 * log(0.75), -1.3, True),          # clipped, with a gradient
                ("cispo", -1, 0.5, 0.25, 0.8 * log(0.25), 0.8, True),
                ("gmpo", 1, 0.5, 0.75, -math.exp(0.3), 0, True),        # the bounds are on log r = 0.405
                ("gmpo", -1, 0.5, 0.75, 1.5, 1.5, False), ("gmpo", -1, 0.5, 0.25, math.exp(-0.2), 0, True),
                ("sapo", 1, 0.25, 0.75, -4 * gate(2), -12 * gate(2) * gate(-2), False),
                ("sapo", -1, 0.25, 0.75, 4 / 1.05 * gate(2.1), 12 * gate(2.1) * gate(-2.1), False),
                ("dppo", 1, 0.5, 0.85, 0, 0, True),             # likelier by 0.35, and below by 0.25
                ("dppo", 1, 0.5, 0.75, -1.5 * log(0.75), -1.5, False), ("dppo", -1, 0.5, 0.25, 0, 0, True),
                ("dppo", 1, 0.01, 0.05, -5 * log(0.05), -5, False),     # r = 5, and yet likelier by only 0.04
                ("dppo", 1, 0.0002, 0.01, -20 * log(0.01), -20, False)):        # r = 50 is cut to 20
            old, new = torch.tensor([[p]]).double().log(), torch.tensor([[q]]).double().log()
            fixed = old, torch.tensor([float(A)]), torch.ones(1, 1), 0.2, 0.3
            got = gradient(lambda x: LOSSES[level](x, *fixed)[0].sum(), new)
            close([got[0], got[1].sum()], [value, slope], 1e-5, (level, A, p, q))
            self.assertEqual(LOSSES[level](new, *fixed)[1].item(), clipped, (level, A, p, q))

    def test_the_values_and_gradients_of_public_trainers(self):
        for case in (CLIP_HIGHER, MASKED_ROW):
            logp, old, adv, mask = tensors(case)
            for name, expected in case["losses"].items():
                level, agg, *eps = name.split("/")
                low, high = map(float, eps or case["eps"])
                cfg = RLConfig(ratio_level=level, agg=agg, eps_low=low, eps_high=high, agg_constant=16)
                loss, g = gradient(lambda x: policy_loss(x, old, adv, mask, cfg)[0], logp)
                weighted = g.flatten() * torch.arange(1, 1 + g.numel())
                tolerance = torch.tensor([1e-6, 1e-6, 3e-5, 1e-6]) * (10 if agg == MODES[2] else 1)
                close([loss, g.sum(), weighted.sum(), g.abs().sum()], expected, tolerance, name)
                self.assertEqual(g[~mask].abs().sum(), 0, name)

    def test_values_and_gradients_at_ratio_one_by_hand(self):
        # A row of 2 tokens with A = 1 and log pi = -0.5, and a row of 4 with A = -1 and log pi = -1. The
        # values differ, but the gradient is -A times the token's weight in the aggregation for all losses.
        logp, adv = torch.tensor([[-0.5] * 4, [-1.0] * 4]).double(), torch.tensor([1.0, -1.0])
        mask, gate = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), 2 / 1.05       # 4 / tau * sigmoid(0)
        ratio, weighted = (2 / 6, 0, 1, 0.1), (-3 / 6, -0.25, -1.5, -0.15)      # of -A, and of -A log pi
        soft = ((4 * gate - 4) / 6, (gate - 2) / 2, (4 * gate - 4) / 2, (4 * gate - 4) / 20)
        weights = mask / 6, mask / torch.tensor([[4], [8]]), mask / 2, mask / 20
        for level in LOSSES:
            values = {"token": ratio, "sequence": ratio, "gmpo": ratio, "sapo": soft}.get(level, weighted)
            for mode, value, weight in zip(MODES, values, weights):
                cfg = RLConfig(ratio_level=level, agg=mode, agg_constant=10)
                got = gradient(lambda x: policy_loss(x, logp, adv, mask, cfg)[0], logp)
                close(got[0], value, 1e-6, (level, mode))
                close(got[1], -adv[:, None] * weight, 1e-6, (level, mode))

    def test_statistics_by_hand_and_extreme_ratios(self):
        log_r = torch.tensor([[0.3, -0.1, 0.0], [-0.4, 99.0, 99.0], [0.5, 0.1, 99.0]])
        mask, old = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]), torch.full((3, 3), -1.0)
        # Clipped are 0.3 with A = 2, because e^0.3 = 1.35, and -0.4 with A = -1, because e^-0.4 = 0.67.
        _, stats = policy_loss(old + log_r, old, torch.tensor([2.0, -1, 0]), mask, RLConfig())
        self.assertEqual(" ".join(stats), "clip_frac ratio_min ratio_max logratio_pos logratio_neg")
        close([*stats.values()], [2 / 6, math.exp(-0.4), math.exp(0.5), 0.2 / 3, -0.4])
        for level, A, x in itertools.product(LOSSES, (torch.ones(3), -torch.ones(3)), (-log_r, log_r)):
            args = old, A, torch.ones(3, 3), RLConfig(ratio_level=level)
            value, g = gradient(lambda z: policy_loss(z, *args)[0], old + x)
            self.assertTrue(value.isfinite() and g.isfinite().all(), level)
            close(policy_loss(old + log_r, *args)[1]["ratio_max"].log(), 20, 1e-4)

    def test_advantages_of_any_type_for_an_episode_or_for_a_token(self):
        logp, old, _, mask = random_case(4, seed=12)
        kinds = [1.5, -2, 0, 3], [1, -2, 0, 3], [True, False, True, False]
        for adv, level in itertools.product(map(torch.tensor, kinds), LOSSES):
            results = []
            for A in (adv.double(), adv, adv[:, None].repeat(1, 7), adv[:, None].expand(4, 7)):
                args = old, A, mask, RLConfig(ratio_level=level)
                results.append(gradient(lambda z: policy_loss(z, *args)[0], logp)[1])
                close(results[-1], results[0], 1e-12, level)

    def test_shapes_that_do_not_fit_are_refused(self):
        # They would broadcast. Two rows with A = 1 and A = -1 as (2, 1) have no gradient left in most losses.
        x, A, cube = -torch.ones(4, 3), torch.ones(4), -torch.ones(3, 3, 1)     # (B, T, 1) is gather's shape
        others = x[:, :1], x[:1], x[0], x[..., None], x.sum()
        for case in ((x, x, A[:, None], x), (x, x, A[None], x), (x, x, A[:1], x), (x, x, A[0], x),
                     (x, x, A[:3], x), (x, x, x[:1], x), *((x, other, A, x) for other in others),
                     *((x, x, A, other) for other in others), (x[:1], x, A, x), (cube, cube, A[:3], cube),
                     (x[0], x[0], x[0], x[0])):
            for level, loss in LOSSES.items():
                self.assertRaises(ValueError, loss, *case)
                self.assertRaises(ValueError, policy_loss, *case, RLConfig(ratio_level=level))
        for other in others:
            self.assertRaisesRegex(ValueError, "shape", kl_penalty, x, other, "k3")
            for pair, mode in itertools.product(((x, other), (other, x), (x[0],) * 2, (cube,) * 2), MODES):
                self.assertRaisesRegex(ValueError, "shape", aggregate_loss, *pair, mode, 5)

    def test_neither_old_logp_nor_what_stands_off_the_mask_has_an_effect_on_the_gradient(self):
        logp, old, adv, mask = random_case(seed=11)
        for level, junk in itertools.product(LOSSES, (math.nan, math.inf, -math.inf, 1e30)):
            x, o, A = (tensor.masked_fill(~mask, junk) for tensor in (logp, old, adv[:, None].expand(5, 7)))
            results, cfg = [], RLConfig(ratio_level=level)
            for z, *rest in ((logp, old, adv), (x, old, adv), (logp, o, adv), (logp, old, A), (x, o, A)):
                value, g = gradient(lambda z: policy_loss(z, *rest, mask.float(), cfg)[0], z)
                stats = policy_loss(z, *rest, mask, cfg)[1].values()
                results.append(torch.stack([value, *g.flatten(), *stats]))
                close(results[-1], results[0], 1e-12, (level, junk))
            _, g = gradient(lambda x: policy_loss(x, x + (old - logp), adv, mask, cfg)[0], logp)
            close(g.flatten(), results[0][1:1 + g.numel()], 1e-12, level)

class TestAdvantages(unittest.TestCase):
    def test_by_hand_and_by_public_trainers(self):
        R, lengths = [1, 0, 0, 0, 1, 1, 0, 0], torch.tensor([1, 2, 3, 4, 1, 1, 4, 4])
        sd, batch_sd = math.sqrt(1 / 3), math.sqrt(15 / 56)     # unbiased, of 1, 1, 0, 0 and of all eight
        centred = [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]
        for name, expected in (
                ("group_mean/group_std", [1.5, -0.5, -0.5, -0.5] + [x / sd for x in centred[4:]]),
                ("leave_one_out/none", [1, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3]),
                ("group_mean/none", centred), ("group_mean/batch_std", [x / batch_sd for x in centred]),
                ("length_weighted/none", [0.9, -0.1, -0.1, -0.1, 0.8, 0.8, -0.2, -0.2])):
            close(group_advantages(R, 4, *name.split("/"), lengths), expected, 1e-5, name)
        # The deviation here is 5e-6, so the first advantage is 7.5e-6 / (5e-6 + 1e-6).
        close(group_advantages(torch.tensor([0.50001, 0.5, 0.5, 0.5], dtype=torch.float64), 4)[0], 1.25)
        R, lengths = (torch.tensor(CLIP_HIGHER[key], dtype=torch.float64) for key in ("rewards", "lengths"))
        close(group_advantages(R, 4), CLIP_HIGHER["adv"], 1e-8)
        for name, expected in CLIP_HIGHER["advantages"].items():
            close(group_advantages(R, 4, *name.split("/"), lengths), expected, 1e-8, name)
        for buffer, expected in ((2, [0, 0, -0.5, -1, -1, -1]), (0, [0] * 6)):
            close(grpo.overlong_penalty([1, 4, 5, 6, 7, 9], 6, buffer), expected)
        close(grpo.overlong_penalty([80, 81, 85, 99, 110], 100, 20), [0, -.05, -.25, -.95, -1])     # TRL's

    def test_equal_rewards_have_advantage_0_and_other_groups_do_not(self):
        # In float32 the rounding error of eight times 0.1, over its deviation, can reach 0.9.
        for (a, b), G, dtype in itertools.product(
                ((0.1, 0.1), (0.1 + 0.2, 0.3), (1e8, 1e8 + 1), (0.0, 0.0), (-2.3, -2.3)), (2, 3, 8, 64),
                (torch.float32, torch.float64)):
            R = torch.tensor([a] * (G - 1) + [b] + [a] * (G - 1) + [2 * abs(a) + 1], dtype=dtype)
            for baseline, scale in itertools.product(BASELINES, SCALES[:3] if a < 0 else SCALES):
                A = group_advantages(R, G, baseline, scale, torch.arange(1, 2 * G + 1))
                self.assertTrue((A[:G] == 0).all() and A[-1] > 0, (a, b, G, dtype, baseline, scale))
        rng, seen = random.Random(0), []        # and the filter agrees with the advantages on what is equal
        for _ in range(600):
            size, spread = rng.choice((1e-9, 1.0, 1e6)), 10 ** rng.uniform(-8, -4)
            group = [{"reward": size * (1 + rng.random() * spread), "mask": [1], "calls": [["submit"]]}
                     for _ in range(4)]
            seen.append(not grpo.compute_advantages(group, RLConfig(group_size=4)).any())
            self.assertEqual(grpo.no_signal(group), seen[-1], [episode["reward"] for episode in group])
        self.assertTrue(100 < sum(seen) < 500)

    def test_rewards_of_any_type_and_what_is_refused_by_name(self):
        for rewards in ([1, 0, 0, 0], [True, False, False, False], *(torch.tensor([1, 0, 0, 0]).to(dtype)
                        for dtype in (torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float64))):
            A = group_advantages(rewards, 4)
            close(A, [1.5, -0.5, -0.5, -0.5], 1e-5)
            close(group_advantages(rewards, 4, "length_weighted", "none", [1, 2, 3, 4]), [.9, -.1, -.1, -.1])
            self.assertEqual(A.dtype.itemsize, 8 if "float64" in repr(rewards) else 4)
        R, opo = torch.rand(4), ("length_weighted", "none")
        for args, word in (*(((r, size), "group_size") for r, size in (
                (R, 1), (R[:1], 1), (R, 3), (R, 0), (R[:, None], 2), (R[0], 2))),
                *(((R, 2, *opo, *more), "lengths") for more in ((), (R[:, None],), (R[:1],))),
                ((R, 2, "mean"), "baseline.*'mean'.*leave_one_out"),
                ((R, 2, "group_mean", "std"), "scale.*'std'.*batch_std"),
                ((-R, 2, "group_mean", "group_mean"), "group_mean.*at least 0")):
            self.assertRaisesRegex(ValueError, word, group_advantages, *args)

class TestKL(unittest.TestCase):
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))
    kl, k2 = 0.6 * math.log(3) - 0.1 * math.log(5), 0.3 * math.log(3) ** 2 + 0.05 * math.log(5) ** 2

    def test_expected_values_and_gradients_by_enumeration(self):
        # p samples, so it is a constant weight, and only the estimate has a gradient.
        logits, logq = self.p.log(), self.q.log()
        value, true = gradient(lambda z: (z.softmax(0) * (z.log_softmax(0) - logq)).sum(), logits)
        close(value, self.kl, 1e-12)                        # KL(p || q) = 0.498
        for kind, mean, slope in (("k1", self.kl, 0 * true), ("k2", self.k2, true),
                                  ("k3", self.kl, self.p - self.q)):
            got = gradient(lambda z: (self.p * kl_penalty(z.log_softmax(0), logq, kind)).sum(), logits)
            close(got[0], mean, 1e-12, kind)
            close(got[1], slope, 1e-12, kind)
            self.assertEqual(bool((kl_penalty(logits, logq, kind) < 0).any()), kind == "k1")

    def test_a_constant_reference_and_log_ratios_small_and_large(self):
        logp, ref, _, _ = random_case()
        for kind in ("k1", "k2", "k3"):
            _, expected = gradient(lambda x: kl_penalty(x, ref, kind).sum(), logp)
            close(gradient(lambda x: kl_penalty(x, x + (ref - logp), kind).sum(), logp)[1], expected, 1e-12)
            far = gradient(lambda x: kl_penalty(x, x.flip(1), kind).sum(), torch.tensor([[-99.0, 0]]))
            self.assertTrue(far[0].isfinite() and far[1].isfinite().all())
        self.assertRaisesRegex(ValueError, "kl_kind.*'k4'.*k1, k2, k3", kl_penalty, logp, ref, "k4")
        # In float32 the plain form e^l - 1 - l is wrong by up to 1e-7 here, and often negative.
        l = torch.logspace(-7, -2, 2000).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(2000)
        k3, exact = kl_penalty(torch.zeros(4000), l, "k3"), torch.expm1(l.double()) - l.double()
        self.assertGreaterEqual(k3.min(), 0)
        close((k3 - exact) / l.abs(), torch.zeros(4000), 2e-7)

class TestAggregation(unittest.TestCase):
    def test_by_hand(self):
        for mode, junk in itertools.product(MODES, (99.0, math.nan, math.inf, -math.inf)):
            x = torch.tensor([[1.0, 2.0, 3.0], [4.0, junk, junk], [junk, junk, junk]])
            mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
            expected = dict(zip(MODES, (10 / 4, (2 + 4) / 2, (6 + 4) / 2, 10 / (3 * 5))))[mode]
            for m in (mask, mask.bool(), mask.double()):
                value, g = gradient(lambda z: aggregate_loss(z, m, mode, 5), x)
                close(value, expected, 1e-6, mode)
                self.assertTrue(g.isfinite().all() and (g[mask == 0] == 0).all())
                close(aggregate_loss(x, m * 0, mode, 5), 0)             # and not 0 / 0
            wide = [nn.functional.pad(tensor, (0, 4)) for tensor in (x, mask)]      # the width plays no part
            close(aggregate_loss(*wide, mode, 5), expected)
        for dtype in (torch.float16, torch.bfloat16):       # in float16 a sum of 320,000 would be infinite
            ones = torch.ones(200, 1600, dtype=dtype)
            close([aggregate_loss(ones, ones, mode, 100) for mode in MODES], [1, 1, 1600, 16], 1e-3)
        for constant in (None, 0, 0.0, -1, math.nan):
            self.assertRaisesRegex(ValueError, "agg_constant", aggregate_loss, x, mask, "constant", constant)
        self.assertRaisesRegex(ValueError, "agg.*'mean'.*seq_mean_token_sum", aggregate_loss, x, mask, "mean")

class TestUpdate(unittest.TestCase):
    MIXED = [1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0]        # every group of four has a signal
    SILENT = [1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0]       # the second and the fourth have none

    def play(self, rewards, **fields):
        """Groups of four on the first tasks, with these rewards in place of their own: (episodes, A)."""
        tasks, cfg = TRAIN_TASKS[:len(rewards) // 4], RLConfig(**fields)
        episodes = grpo.sample_groups(rl_base(), TOK, tasks, 4, cfg, generator())
        for episode, reward in zip(episodes, rewards):
            episode["reward"] = float(reward)
        R = torch.tensor(rewards, dtype=torch.float64).view(-1, 4)
        return episodes, ((R - R.mean(1, True)) / (R.std(1, keepdim=True) + 1e-6)).flatten().float()

    def update(self, episodes, model=None, lr=0.0, ref_model=None, optimizer=None, **fields):
        """rl_update by plain gradient descent: its statistics, and the last gradient as one vector."""
        model = model or rl_base()
        cfg = RLConfig(**{"group_size": 4, "minibatches": 1, "max_grad_norm": math.inf, **fields})
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
        stats = grpo.rl_update(model, optimizer, episodes, cfg, generator(), ref_model)
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return stats, torch.cat(grads) if grads else None

    def gradient(self, model, loss):
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads])

    def logps(self, model, episode, temperature=1.0):
        """Log-probabilities of an episode's sampled tokens, from one row and without token_logps."""
        logp = torch.log_softmax(model(torch.tensor([episode["ids"]]))[0] / temperature, dim=-1)
        return torch.stack([logp[t - 1, episode["ids"][t]] for t, on in enumerate(episode["mask"]) if on])

    def recorder(self, calls):
        """token_logps that also notes the rows' ids, whether gradients are on, and the present model."""
        def record(model, batch, *rest, **more):
            calls.append((batch["ids"].tolist(), torch.is_grad_enabled(), copy.deepcopy(model)))
            return token_logps(model, batch, *rest, **more)
        return mock.patch.object(grpo, "token_logps", record)

    def test_one_minibatch_is_reinforce_with_group_advantages(self):
        model = rl_base()
        for t in (1.0, 0.6):                                    # the temperature, in sampling and in training
            episodes, A = self.play(self.MIXED, temperature=t)
            losses = [-a * self.logps(model, e, t) for a, e in zip(A, episodes)]
            for agg, loss in (("token_mean", torch.cat(losses).mean()),
                              ("seq_mean_token_mean", sum(x.mean() for x in losses) / 16)):
                stats, grad = self.update(episodes, agg=agg, temperature=t)
                close(grad, self.gradient(model, loss))
                for name, x in dict(grad_norm=grad.norm().item(), clip_frac=0, approx_kl=0, ratio_min=1,
                                    ratio_max=1, logratio_pos=0, logp_gap=0).items():
                    self.assertAlmostEqual(stats[name], x, delta=1e-4)
            for limit in (0.01, 1e3):                           # the norm is logged as it was before clipping
                clipped, short = self.update(episodes, agg=agg, temperature=t, max_grad_norm=limit)
                self.assertEqual(clipped["grad_norm"], stats["grad_norm"])
                close(short, grad * min(1, limit / grad.norm().item()))
        self.assertGreater(self.update(episodes)[0]["logp_gap"], 0.1)           # a trainer at temperature 1
        logp = torch.cat([torch.log_softmax(model(torch.tensor([e["ids"]]))[0, :-1] / t, dim=-1)[
            torch.tensor(e["mask"][1:]) > 0] for e in episodes])
        stats, _ = self.update(episodes, lr=1.0, epochs=3, temperature=t)       # of the policy that sampled:
        self.assertAlmostEqual(stats["entropy"], -(logp.exp() * logp).sum(dim=-1).mean().item(), places=4)
        episodes[3]["logps"][episodes[3]["mask"].index(1)] -= 0.25
        episodes[5]["logps"][0] = 7.0                           # off the mask, so nobody looks at it
        self.assertAlmostEqual(self.update(episodes, temperature=t)[0]["logp_gap"], 0.25, places=3)

    def test_pi_old_the_clip_and_statistics_of_unequal_minibatches(self):
        # Six minibatches of 7, 7 and 6 episodes, whose every number is worked out from single rows.
        (episodes, A), start, calls = self.play(self.MIXED + self.MIXED[:4]), rl_base(), []
        with self.recorder(calls):
            stats, grad = self.update(episodes, lr=1.2, minibatches=3, epochs=2)
        self.assertEqual([len(ids) for ids, *_ in calls], [20, 7, 7, 6, 7, 7, 6])
        width, sums, order, ratios = max(len(e["ids"]) for e in episodes), [], [], []
        padded = [e["ids"] + [0] * (width - len(e["ids"])) for e in episodes]
        for ids, _, policy in calls[1:]:
            rows = [padded.index(row) for row in ids]
            log_r = [self.logps(policy, episodes[i]) - self.logps(start, episodes[i]).detach() for i in rows]
            a, log_r = torch.cat([A[i].expand(len(x)) for x, i in zip(log_r, rows)]), torch.cat(log_r)
            r, up = log_r.exp(), a > 0
            cut = torch.where(up, r > 1.2, r < 0.8)
            expected, log_r, r = self.gradient(policy, -(r * a * ~cut).mean()), log_r.detach(), r.detach()
            sums.append([float(x) for x in (len(r), cut.sum(), (r - 1 - log_r).sum(), up.sum(),
                                            log_r[up].sum(), log_r[~up].sum(), expected.norm() * len(r))])
            order, ratios = order + rows, ratios + r.tolist()
        close(grad, expected, 1e-4)
        self.assertEqual([sorted(order[:20]), sorted(order[20:])], [list(range(20))] * 2)
        self.assertNotEqual(order[:20], order[20:])
        self.assertEqual((sums[0][1], min(part[1] for part in sums[3:]) > 0), (0, True))
        n, clips, k3, n_up, pos, neg, norms = (sum(column) for column in zip(*sums))
        for name, x in dict(clip_frac=clips / n, approx_kl=k3 / n, grad_norm=norms / n, ratio_min=min(ratios),
                            ratio_max=max(ratios), logratio_pos=pos / n_up,
                            logratio_neg=neg / (n - n_up)).items():
            self.assertAlmostEqual(stats[name] / x, 1, delta=1e-3, msg=name)

    def test_episodes_without_advantage_are_not_run_but_count(self):
        # The second epoch is compared with a loss over all rows, with the weights after the first.
        episodes, A = self.play(self.SILENT)
        batch, A = collate(episodes), A * (torch.arange(16) % 8 < 4)
        old = token_logps(rl_base(), batch).detach()
        for level, agg, eps in (("token", "token_mean", .05), ("sequence", "seq_mean_token_sum", .01),
                                ("gmpo", "seq_mean_token_mean", .05), ("cispo", "constant", .05)):
            fields = dict(ratio_level=level, agg=agg, agg_constant=24.0, eps_low=eps, eps_high=eps)
            model, calls = rl_base(), []
            self.update(episodes, model, lr=0.5, **fields)                      # the first step
            logp, cfg = token_logps(model, batch), RLConfig(**fields)
            loss, full = grpo.policy_loss(logp, old, A, batch["mask"], cfg)
            with self.recorder(calls):
                stats, grad = self.update(episodes, lr=0.5, epochs=2, **fields)
            close(grad, self.gradient(model, loss), 1e-5)
            self.assertEqual([(len(ids), on) for ids, on, _ in calls], [(16, False), (8, True), (8, True)])
            self.assertGreater(stats["clip_frac"], 0)
            self.assertAlmostEqual(stats["clip_frac"], full["clip_frac"].item() / 2, places=6)
        calls = []
        with self.recorder(calls):                                              # the KL term needs all rows
            self.update(episodes, ref_model=fresh_policy(), kl_coef=0.1, minibatches=2)
        self.assertEqual([len(ids) for ids, *_ in calls], [16, 16, 8, 8])

    def test_kl_term_is_a_token_mean_whatever_agg_is(self):
        (episodes, _), model, ref = self.play([1, 0, 0, 0] * 2), rl_base(), fresh_policy()
        l = torch.cat([self.logps(ref, e).detach() - self.logps(model, e) for e in episodes])
        values = {"k1": -l, "k2": l ** 2 / 2, "k3": l.exp() - 1 - l}
        for kind, agg in itertools.product(values, grpo.CHOICES["agg"]):
            fields = dict(ref_model=ref, kl_kind=kind, agg=agg, agg_constant=24.0)
            (stats, both), (free, alone) = (self.update(episodes, kl_coef=c, **fields) for c in (0.5, 0.0))
            close(both - alone, self.gradient(model, 0.5 * values[kind].mean()), 1e-5)
            for x in (stats["kl_ref"], free["kl_ref"]):
                self.assertAlmostEqual(x / values[kind].mean().item(), 1, delta=1e-4)
        close(alone, self.update(episodes, agg="constant", agg_constant=24.0)[1])
        self.assertRaisesRegex(ValueError, "ref_model", self.update, episodes, model, ref_model=model)

    def test_masked_truncated_episodes(self):
        # They count in their group's baseline, but in no denominator of the loss.
        (episodes, A), model = self.play([0, 1, 0, 3, 1, 0, 0, 2]), rl_base()
        for i, episode in enumerate(episodes):
            episode["env"].truncated = i % 4 == 3
        kept = [a * self.logps(model, e) for a, e in zip(A, episodes) if not e["env"].truncated]
        for agg, loss in (("token_mean", -torch.cat(kept).mean()),
                          ("seq_mean_token_mean", -sum(x.mean() for x in kept) / 6)):
            _, grad = self.update(episodes, agg=agg, mask_truncated=True)
            close(grad, self.gradient(model, loss))
        self.assertGreater((self.update(episodes)[1] - grad).abs().max(), 1e-3)

    def test_no_step_where_nothing_is_learned_or_a_number_is_not_finite(self):
        # The optimizer has momentum, so any step would change the weights.
        learn, equal, cut = (self.play(x)[0] for x in (self.MIXED, [0.1] * 8, self.MIXED[:8]))
        model, taken = rl_base(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: taken.append(1))
        for rewards, parts, steps in ((self.MIXED, 7, 7), (self.MIXED[:4], 7, 4), (self.SILENT, 16, 8)):
            taken.clear()                       # a part that is empty or has no signal takes no step
            stats, _ = self.update(self.play(rewards)[0], model, optimizer=optimizer, minibatches=parts)
            self.assertEqual(len(taken), steps)
            self.assertEqual([name for name, x in stats.items() if math.isnan(x)], ["kl_ref"])
        for episode in cut:
            episode["env"].truncated = True
        before = copy.deepcopy(model)
        for episodes in (equal, cut, []):
            stats, _ = self.update(episodes, model, optimizer=optimizer, mask_truncated=True, minibatches=3)
            self.assertEqual(stats["grad_norm"] == 0, episodes is equal)
        too_large = self.play([1e39] + [0] * 7)[0]                                  # finite in float64 only
        for episodes, extra, slope, words in (  # of the loss and its gradient, only the one named is bad
                (too_large, 0, 1, "gradient norm"), (learn, 0, math.inf, "gradient norm"),
                (learn, math.nan, 1, "loss nan")):
            hook = model.norm.bias.register_hook(lambda grad: grad * slope)
            with mock.patch.object(grpo, "aggregate_loss", lambda *args: aggregate_loss(*args) + extra):
                with self.assertRaisesRegex(FloatingPointError, words):
                    self.update(episodes, model, optimizer=optimizer, scale="none")
            hook.remove()
        self.assertTrue(all(map(torch.equal, model.parameters(), before.parameters())))

class TestGym(unittest.TestCase):
    def test_each_op_repairs_its_own_family_and_blind_play_reaches_60_percent(self):
        weak = 0
        for task in TASKS:
            source, right = task["source"], FIX_OP[task["name"]]
            passing = [op for op in OPS if env.run_tests(apply_op(source, op), task["hidden"])]
            self.assertEqual(passing, [right])
            self.assertTrue(env.run_tests(apply_op(source, right), task["visible"]))
            weak += env.run_tests(source, task["visible"])
        self.assertEqual((len(set(env.FUNCTION_NAMES)), weak), (30, 8))
        self.assertEqual([FIX_OP[task["name"]] for task in HELDOUT_TASKS], [op for op in OPS for _ in "12"])
        for n, ceiling in enumerate((6, 12, 18, 18, 18), 1):
            rates = [env.blind_pass_rate(ops, TASKS) for ops in itertools.product(OPS, repeat=n)]
            self.assertEqual([max(rates), env.best_blind(n, TASKS)[0]], [ceiling / 30] * 2)

    def test_renaming_and_running_a_source(self):
        for task in TASKS:
            renamed = [env.randomize_names(task, random.Random(seed)) for seed in range(200)]
            for new in renamed:
                source = task["source"].replace(f"def {task['name']}(", f"def {new['issue'][2]}(")
                self.assertEqual(new, {**task, "issue": new["issue"], "source": source})
            self.assertEqual({new["issue"][2] for new in renamed},
                             set(env.FUNCTION_NAMES) - set(env.source_words(task["source"])))
        tests = [(([1],), [1, 2])]
        for name in ("grow", "f"):                      # running the tests does not change them
            self.assertTrue(env.run_tests(f"def {name}(xs):\n xs += [2]\n return xs", tests))
            self.assertEqual(tests, [(([1],), [1, 2])])
        self.assertRaisesRegex(ValueError, "'foo'.*or_to_and.*widen", apply_op, "def f(): return 1", "foo")
        for body in ("open('x')", "__import__('os')", "1 // 0", "f()", "xs", "("):
            self.assertFalse(env.run_tests(f"def f(): return {body}", [((), 1)]), body)

    def test_episodes(self):
        source = " ".join(env.source_words(TASKS[1]["source"]))
        for e, calls, answers, *state in (              # the state is passed, truncated, turns, edits
                (BugFixEnv(TASKS[1]), "read,test,edit or_to_and,test,submit",
                 [source, "fail", "ok", "pass", "pass"], True, False, 5, ["or_to_and"]),
                (BugFixEnv(TASKS[1]), ",edit,edit foo,read read,test,edit or_to_and",       # never submitted
                 [*["malformed"] * 4, "fail", "ok truncated"], False, True, 6, ["or_to_and"]),
                (EditBudgetEnv(TASKS[0], 0, 3), "edit or_to_and,test,submit",       # graded by hidden tests
                 ["refused", "pass", "fail"], False, False, 3, [])):
            for _ in range(2):
                self.assertEqual(e.reset(), ["issue", ":", e.task["name"], "is", "wrong"])
                got = [e.step(call.split()) for call in calls.split(",")]
                self.assertEqual([(" ".join(said), done) for said, done in got],
                                 [*zip(answers[:-1], itertools.repeat(False)), (answers[-1], True)])
                self.assertEqual([e.passed, e.truncated, e.turns, e.edits], state)
                self.assertRaisesRegex(RuntimeError, rf"'{e.task['name']}'.*reset", e.step, ["read"])

class TestPolicy(unittest.TestCase):
    def test_the_forward_pass_in_chunks_is_that_of_the_whole_row(self):
        model, rng, rows = fresh_policy().double(), random.Random(0), [[] for _ in range(5)]
        cache = model.new_cache(5)
        for _ in range(14):                             # the cache's room, 64 at first, has to grow twice
            chunks = [[rng.randrange(len(TOK)) for _ in range(rng.choice((1, 1, 2, 20)))] for _ in rows]
            with torch.no_grad():
                logits = agent.read(model, chunks, cache)
            for row, chunk, got in zip(rows, chunks, logits):
                row += chunk
                close(got, model(torch.tensor([row]))[0, -1], 1e-9)
        self.assertEqual(cache["lengths"].tolist(), [len(row) for row in rows])
        self.assertGreater(cache["lengths"].max(), 128)

    def test_sampler_and_trainer_agree_whatever_the_company(self):
        model, ends = rl_base(), [1 + i % 6 for i in range(30)]         # episodes leave at different turns
        for temperature in (1.0, 0.6):
            envs = [EditBudgetEnv(task, 1, end) for task, end in zip(TASKS, ends)]
            episodes = rollout_batch(model, TOK, envs, generator(1), temperature)
            batch = collate(episodes)
            logps = token_logps(model, batch, temperature)
            close(logps, batch["logps"], 1e-4)
            for row, e in enumerate(episodes):
                self.assertIs(e["env"], envs[row])
                close(token_logps(model, collate([e]), temperature)[0], logps[row, :len(e["ids"])], 1e-5)

    def test_log_probabilities_and_entropies_of_a_readers_own_model(self):
        torch.manual_seed(0)
        embed, gru, head = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)
        for B, T in ((1, 2), (2, 9), (3, 9), (5, 9), (11, 30)):
            ids, mask = torch.randint(9, (B, T)), torch.rand(B, T) < 0.3
            mask[:, 0], mask[0] = False, False          # one row has no token
            got = token_logps(lambda x: head(gru(embed(x))[0]), {"ids": ids, "mask": mask.long()}, 0.5, True)
            logp = (head(gru(embed(ids))[0]) / 0.5).log_softmax(-1)[:, :-1]
            expected = logp.gather(2, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)
            for a, b in zip(got, expected):
                close(a, nn.functional.pad(b, (1, 0)) * mask, 1e-5, (B, T))
            self.assertTrue(got[0].requires_grad and not got[1].requires_grad)

    def test_masks_cover_the_policys_tokens_and_nothing_else(self):
        class Babbler(Policy):                          # its calls begin or end well, both, or neither
            def forward(self, ids, cache=None):
                said = torch.tensor(encode(TOK, ["<call>", "read", "edit", "widen", "<end>"]))
                return torch.full((*ids.shape, len(TOK)), -1e9).index_fill(2, said, 0.0)
        babbler, envs = Babbler(len(TOK), width=8, heads=1), [EditBudgetEnv(task, 1) for task in TASKS * 2]
        babble = rollout_batch(babbler, TOK, copy.deepcopy(envs), generator(2))
        for episode in babble + rollout_batch(rl_base(), TOK, envs, generator()):
            e, words, mask = copy.deepcopy(episode["env"]), [], []
            heard = e.reset()
            for call in episode["calls"]:               # a whole call is reported without <call> and <end>
                whole = len(call) < 4 and call[-1:] != ["<end>"]
                said = ["<call>", *call, "<end>"] if whole else call
                self.assertTrue(whole or said[0] != "<call>" or said[-1] != "<end>")
                words, mask = words + heard + said, mask + [0] * len(heard) + [1] * len(said)
                heard, done = e.step(call)
            self.assertEqual((decode(TOK, episode["ids"]), episode["mask"], done), (words, mask, True))

    def test_trouble_in_a_readers_environment_is_named(self):
        model, e = fresh_policy(), BugFixEnv(TASKS[0])
        self.assertRaisesRegex(ValueError, "same BugFixEnv", rollout_batch, model, TOK, [e, e], generator())
        for answer, issue, words in (
                (17, ["ok"], r"Odd\.step\("), (0, [], r"Odd\.reset.*at least one"), (0, 17, r"Odd\.reset\("),
                ((["no"], 0), ["ok"], r"Odd\.step\(.*'no'"), ((["ok"] * 40, 0), ["ok"], "Odd.*done")):
            e = type("Odd", (), {"reset": lambda self: issue, "step": lambda self, words: answer})()
            self.assertRaisesRegex(RuntimeError, words, rollout_batch, model, TOK, [e], generator())

    def test_behavior_by_hand(self):
        def episode(calls, reward, mask, **attributes):
            calls = [call.split() for call in calls.split(",")]
            return {"env": SimpleNamespace(**attributes), "calls": calls, "mask": mask, "reward": reward}
        leap = {"task": {"name": "leap"}, "edits": ["or_to_and"], "passed": True, "truncated": False}
        expected = {"pass_rate": 1 / 4, "reward": 2 / 4, "reads": 4 / 4, "tests": 1 / 4, "edits": 2 / 2,
                    "read_first": 1 / 4, "first_edit_right": 1 / 2, "read_then_right": 1 / 1, "turns": 9 / 4,
                    "policy_tokens": 6 / 4, "truncated": 1 / 4}     # the last two environments have no edits
        for edits in (3, None, "text", ({},)):
            stats = agent.behavior_stats([
                episode("read,edit or_to_and,test,submit", 1.0, [0, 1, 1], **leap),
                episode("edit widen,read", 0.0, [1], task={"name": "mean"}, edits=["widen"], truncated=True),
                episode("submit", 0.5, [1, 1]), episode("read,read", 0.5, [1, 0], edits=edits, task="leap")])
            self.assertEqual(set(stats), set(expected))
            close([stats[name] for name in expected], [*expected.values()])
            own = agent.behavior_stats([episode("read", 0.0, [1], edits=[edits])])
            self.assertTrue(own["edits"] == 1 and math.isnan(own["first_edit_right"]))
        self.assertRaisesRegex(ValueError, "episodes", agent.behavior_stats, [])

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path, model = os.path.join(folder, "policy"), fresh_policy(width=24, layers=1, heads=3)
            agent.save_policy(model, TOK, {"lr": 1}, path)
            loaded, ids, saved = agent.load_policy(TOK, path), torch.arange(20)[None], torch.load(path)
            self.assertTrue(torch.equal(loaded(ids), model(ids)) and os.listdir(folder) == ["policy"])
            self.assertRaisesRegex(ValueError, "words", agent.load_policy, {**TOK, "more": len(TOK)}, path)
            for file in ({**saved, "shape": {**saved["shape"], "width": 48}}, {**saved, "weights": {}}, "x"):
                torch.save(file, path)
                self.assertRaisesRegex(ValueError, "no policy", agent.load_policy, TOK, path)

    def test_base_agents(self):
        make, before = agent.make_base_agent, (torch.get_rng_state().tolist(), random.getstate())
        a, b = (make(TOK, 5, ("oracle",), batches=1) for _ in range(2))
        self.assertEqual((torch.get_rng_state().tolist(), random.getstate()), before)
        self.assertTrue(all(map(torch.equal, a.parameters(), b.parameters())))
        for kinds in (("nosuch",), ()):
            self.assertRaisesRegex(ValueError, "kinds.*random, blind, oracle", make, TOK, 0, kinds)

class TestSampling(unittest.TestCase):
    def test_groups_are_consecutive_and_renamed_before_a_readers_factory(self):
        given, tasks = [TASKS[1], TASKS[9], {"name": "own", "id": 7}, "text"], []
        def factory(task, cfg, rng):
            tasks.append(task)
            return grpo.make_env(task if "source" in task else TASKS[0], cfg, rng)
        for cfg, kind in ((RLConfig(max_turns=2), EditBudgetEnv),
                          (RLConfig(max_turns=2, rename=False, max_edits=None), BugFixEnv)):
            tasks.clear()
            episodes = grpo.sample_groups(fresh_policy(), TOK, given, 8, cfg, generator(), factory)
            self.assertEqual([task["name"] for task in tasks[:16]], ["leap"] * 8 + ["ratio"] * 8)
            self.assertEqual(tasks[16:], given[2:3] * 8 + given[3:] * 8)
            self.assertTrue(all(e["env"].task is task for e, task in zip(episodes[:16], tasks)))
            self.assertEqual({(type(e["env"]), e["env"].max_turns) for e in episodes}, {(kind, 2)})
            self.assertEqual(len({task["issue"][2] for task in tasks[:8]}) > 3, cfg.rename)

    def step(self, rewards, **fields):
        """sample_step with rewards that depend on the task's name: (kept, sampled) as lists of names."""
        cfg = RLConfig(prompts_per_step=4, group_size=4, max_turns=1,
                       reward=lambda env: rewards(env.task["name"]), **fields)
        both = grpo.sample_step(fresh_policy(), TOK, cfg, TRAIN_TASKS, generator())
        return [[episode["env"].task["name"] for episode in episodes] for episodes in both]

    def test_dynamic_sampling_and_filtering(self):
        dice, good = random.Random(0), {task["name"] for task in TRAIN_TASKS[:9]}
        def some(name):
            return dice.random() if name in good else 1.0
        for rewards, fields, expected in (
                (lambda name: dice.random(), dict(dynamic_sampling=True), [16, 16]), (some, {}, [16, 16]),
                (lambda name: 1.0, dict(dynamic_sampling=True), [0, 48]),       # three rounds are the cap
                (lambda name: 1.0, dict(filter_zero_adv=True), [0, 16])):
            self.assertEqual([len(x) for x in self.step(rewards, **fields)], expected)
        kept, sampled = self.step(some, dynamic_sampling=True, max_sample_rounds=5)
        self.assertEqual(kept, [name for name in sampled if name in good][:16])
        kept, sampled = self.step(some, filter_zero_adv=True)
        self.assertEqual((kept, len(sampled)), ([name for name in sampled if name in good], 16))
        for value in (math.nan, math.inf):
            self.assertRaisesRegex(ValueError, f"^reward: .*{value}", self.step, lambda name: value)
        _, sampled = self.step(lambda name: 1.0, dynamic_sampling=True, max_sample_rounds=6)
        self.assertEqual((len(sampled), len(set(sampled[:80]))), (96, 20))      # all before a second time

    def test_runs_that_consume_different_randomness_draw_the_same_tasks(self):
        drawn = set()
        def note(row, episodes):
            drawn.add((row["step"], *dict.fromkeys(e["env"].task["name"] for e in episodes)))
        for fields in ({}, dict(max_turns=2), dict(group_size=2), dict(epochs=3), dict(temperature=2.0)):
            TestLoop.train(self, steps=3, on_step=note, **fields)
        self.assertEqual(len(drawn), 3)

class TestLoop(unittest.TestCase):
    def train(self, model=None, eval_tasks=None, ref_model=None, env_factory=None, on_step=None, **fields):
        """train_rl, small. By default rewards are random, so that there is always something to learn."""
        dice, model = random.Random(0), model or rl_base()
        streams = torch.get_rng_state().tolist(), random.getstate()
        cfg = RLConfig(**{"steps": 1, "prompts_per_step": 2, "group_size": 4, "max_turns": 3,
                          "reward": lambda env: dice.random(), **fields})
        history = train_rl(model, TOK, cfg, TRAIN_TASKS, eval_tasks, ref_model, env_factory, on_step)
        self.assertEqual((torch.get_rng_state().tolist(), random.getstate()), streams)
        return history

    def numbers(self, **fields):
        """The history as a text, without its seconds."""
        return without_seconds(self.train(**fields))

    def test_it_learns_to_read(self):
        model, cfg = rl_base(), RLConfig(steps=30)
        before = grpo.evaluate(model, TOK, HELDOUT_TASKS, 4, cfg)
        history = train_rl(model, TOK, cfg, TRAIN_TASKS)
        after = grpo.evaluate(model, TOK, HELDOUT_TASKS, 4, cfg)
        self.assertTrue(before["read_first"] < 0.4 and after["read_first"] > 0.7, (before, after))
        self.assertGreater(after["pass_rate"], 0.35)                # a player who never looks has 0.20
        self.assertLess(max(row["logp_gap"] for row in history), 1e-4)

    def test_columns_on_step_and_what_is_reported(self):
        class Rigged(BugFixEnv):
            def step(self, words):
                self.done, self.passed = True, bool(next(outcomes))
                return ["pass"], True
        for outcomes, fields, expected in (
                ([1] * 4 + [0] * 8 + [0, 1, 0, 1], dict(filter_zero_adv=True), [16, .75, .25, .5, 4]),
                ([1] * 4 + [0, 1] * 6, dict(reward=lambda env: 2.0), [16, 1, .25, 0, 16]),
                ([0] * 32 + [1, 0] * 8, dict(dynamic_sampling=True), [48, 2 / 3, 0, 2 / 3, 16])):
            share, outcomes, seen = sum(outcomes) / len(outcomes), iter(outcomes), []
            row, = self.train(prompts_per_step=4, env_factory=lambda task, *_: Rigged(task), **{
                "reward": None, **fields}, on_step=lambda *both: seen.extend(both))
            self.assertIs(row, seen[0])
            self.assertEqual([row[name] for name in ("episodes", "zero_adv_frac", "all_passed", "all_failed")]
                             + [len(seen[1])], expected)
            self.assertAlmostEqual(row["pass_rate"], share)
        history = self.train(steps=3, on_step=lambda row, episodes: True)       # what it returns is ignored
        self.assertEqual([row["step"] for row in history], [0, 1, 2])
        self.assertEqual(self.train(steps=0), [])

    def test_warmup_counts_steps_with_an_update(self):
        rates, dice, now, adam_step = [], random.Random(0), [0], torch.optim.Adam.step
        def step(self, *args, **kwargs):
            rates.append((round(self.param_groups[0]["lr"], 9), self.param_groups[0]["betas"]))
            return adam_step(self, *args, **kwargs)
        with mock.patch.object(torch.optim.Adam, "step", step):
            self.train(steps=7, lr=0.003, warmup_steps=3, minibatches=1, on_step=lambda *_: now.append(0),
                       reward=lambda env: 0.0 if len(now) in (2, 4) else dice.random())
        self.assertEqual(rates, [(rate, (0.9, 0.95)) for rate in (.001, .002, .003, .003, .003)])

    def test_evaluation(self):
        for steps, every, wanted in ((5, 2, "10101"), (4, 3, "1001"), (3, 0, "000"), (3, 9, "101")):
            made = []
            history = self.train(steps=steps, eval_every=every, eval_samples=3, eval_tasks=HELDOUT_TASKS[:2],
                                 env_factory=lambda task, *_: made.append(task) or BugFixEnv(task, 2))
            self.assertEqual("".join("01"[row["eval_pass_rate"] >= 0] for row in history), wanted)
            self.assertEqual(len(made), steps * 8 + wanted.count("1") * 6)
        self.assertRaisesRegex(ValueError, "none", grpo.evaluate, rl_base(), TOK, [], 4, RLConfig())
        self.assertRaisesRegex(ValueError, "at most 0", train_rl, rl_base(), TOK, RLConfig(), [])

    def test_the_reference_is_a_frozen_copy(self):
        fields, model, given = dict(steps=3, kl_coef=0.1, lr=0.01), rl_base(), rl_base()
        self.assertEqual(self.numbers(ref_model=given, **fields), self.numbers(**fields))
        self.assertTrue(all(map(torch.equal, given.parameters(), rl_base().parameters())))
        self.assertLess(*(self.train(**fields)[i]["kl_ref"] for i in (0, 2)))
        self.assertRaisesRegex(ValueError, "ref_model", self.train, model, ref_model=model, kl_coef=0.1)

    def test_settings_that_make_no_sense_are_refused_by_name(self):
        bad = dict(steps=-1, prompts_per_step=21, group_size=1, minibatches=0, epochs=0, lr=0.0, scale="std",
                   warmup_steps=-1, max_grad_norm=-1.0, temperature=0.0, baseline="mean", ratio_level="ppo",
                   eps_low=-0.1, eps_high=math.nan, agg="mean", agg_constant=0.0, kl_coef=-1.0, kl_kind="k4",
                   dynamic_sampling="yes", max_sample_rounds=0, filter_zero_adv=1, overlong_buffer=7,
                   mask_truncated=None, rename="no", max_edits=-1, max_turns=0, reward=3, eval_every=-1,
                   eval_samples=0, seed=-1)
        self.assertEqual(set(bad), {field.name for field in grpo.fields(RLConfig)})
        more = [("steps", 2.5), ("steps", None), ("steps", True), ("minibatches", 65), ("lr", math.inf),
                ("lr", "fast"), ("seed", 2 ** 32), ("seed", 10 ** 400), ("eps_low", 1.5),
                ("agg_constant", None), ("overlong_buffer", 2), ("filter_zero_adv", True)]
        beside = {"agg_constant": {"agg": "constant"}, "overlong_buffer": {"scale": "group_mean"},
                  "filter_zero_adv": {"dynamic_sampling": True}}
        for name, value in [*bad.items(), *more]:
            fields = {**beside.get(name, {}), name: value}
            with self.assertRaisesRegex(ValueError, "^" + re.escape(f"{name}: {value!r} must be ") + "."):
                train_rl(nn.Linear(1, 1), TOK, RLConfig(**fields), TRAIN_TASKS)
            if name != "reward":
                flags = [word for key, x in fields.items() for word in (f"--{key}", str(x).lower())]
                status, out, err = run_main(grpo, *flags)
                self.assertEqual((status, out, err.count("\n")), (2, "", 2), (flags, err))
                self.assertRegex(err, rf"(?i)grpo.py: error: argument --{name}: .*{re.escape(flags[-1][:9])}")

    def test_numpy_numbers(self):
        def numpy(x, kind=None):
            return torch.tensor(x, dtype=kind).numpy()[()] if isinstance(x, (bool, int, float)) else x
        fields = {field.name: field.default for field in grpo.fields(RLConfig) if field.name != "reward"}
        fields.update(steps=2, prompts_per_step=2, group_size=4, max_turns=3, minibatches=3, kl_coef=0.1,
                      agg="constant", agg_constant=24.0, overlong_buffer=1, max_grad_norm=math.inf, seed=7)
        exact = {name: float(numpy(x)) if type(x) is float else x for name, x in fields.items()}
        theirs = {**{name: numpy(x) for name, x in fields.items()}, "seed": numpy(7, torch.uint8)}
        self.assertEqual(self.numbers(**theirs), self.numbers(**exact))
        self.assertNotEqual(self.numbers(**theirs), self.numbers(**{**exact, "seed": 8}))

def pasted(function):
    """The function's own source, executed alone where nothing but torch is imported."""
    scope = {"torch": torch}
    exec(inspect.getsource(function), scope)
    return scope[function.__name__]

class TestCopying(unittest.TestCase):
    def test_each_alone_in_any_float_type_and_on_another_device(self):
        (*case, mask), (aggregate, advantages, kl, penalty) = random_case(4, 6, seed=11), map(pasted, (
            aggregate_loss, group_advantages, kl_penalty, grpo.overlong_penalty))
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for original, kind in itertools.product(LOSSES.values(), kinds):
            loss, (x, o, A) = pasted(original), (tensor.to(kind) for tensor in case)
            got, g = gradient(lambda z: aggregate(loss(z, o, A, mask)[0], mask, "token_mean"), x)
            exact = aggregate_loss(original(*case, mask)[0], mask, "token_mean")
            close(got, exact, 0.1 if kind.itemsize == 2 else 1e-5, (original.__name__, kind))
            self.assertTrue(g.isfinite().all() and g.dtype == loss(x, o, A, mask)[0].dtype == kind)
            close(kl(x, o, "k3"), kl_penalty(x.double(), o.double(), "k3"), 0.05)
            close(advantages((A > 0).to(A), 2), group_advantages((case[2] > 0).double(), 2), 1e-5)
            x = torch.ones(4, 6, device="meta")         # without data, but devices can't be mixed by mistake
            self.assertEqual(aggregate(loss(x, x, x[:, 0], x)[0], x, "token_mean").device.type, "meta")
        A = advantages(x[:, 0], 2, "length_weighted", "batch_std", x[:, 1])
        self.assertEqual((A[:, None] * kl(x, x, "k3") + penalty(x, 6, 2)).device.type, "meta")

MEAN, SEQ_MEAN, SEQ_SUM, _ = MODES
PRESETS = dict(     # name -> arXiv number, and the difference from DeepSeekMath's GRPO without a KL term
    dr_grpo=("2503.20783", dict(scale="none", agg="constant", agg_constant=24.0)),
    dapo=("2503.14476", dict(eps_high=0.28, agg=MEAN, dynamic_sampling=True, overlong_buffer=2)),
    rloo=("2402.14740", dict(baseline="leave_one_out", scale="none", minibatches=1, agg=SEQ_SUM)),
    gspo=("2507.18071", dict(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4)),
    cispo=("2506.13585", dict(ratio_level="cispo", eps_low=1.0, agg=MEAN)),
    gmpo=("2507.20673", dict(ratio_level="gmpo", eps_low=0.4, eps_high=0.4)),
    sapo=("2511.20347", dict(ratio_level="sapo")),
    luspo=("2602.05261", dict(ratio_level="sequence", eps_low=2e-3, eps_high=2.5e-3, agg=SEQ_SUM)),
    lite_ppo=("2508.08221", dict(scale="batch_std", agg=MEAN)),
    gpg=("2504.02546", dict(ratio_level="none", scale="none", minibatches=1, filter_zero_adv=True, agg=MEAN)),
    opo=("2505.23585", dict(baseline="length_weighted", scale="none", ratio_level="none", minibatches=1,
                            agg=SEQ_SUM)),
    maxrl=("2602.02710", dict(scale="group_mean", ratio_level="none", minibatches=1, agg=MEAN)),
    dppo=("2602.04879", dict(ratio_level="dppo", eps_low=0.15, eps_high=0.15, agg=MEAN)))

class TestVariants(unittest.TestCase):
    def test_presets_and_their_printed_table(self):
        paper = dict(agg=SEQ_MEAN, kl_coef=0.04, kl_kind="k3")
        expected = {"default": RLConfig(), "grpo": RLConfig(**paper), **{
            name: RLConfig(**{**paper, "kl_coef": 0.0, **fields}) for name, (_, fields) in PRESETS.items()}}
        self.assertEqual({name: RLConfig(**fields) for name, fields in variants.VARIANTS.items()}, expected)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            variants.print_presets()
        for name, (number, _) in PRESETS.items():                   # a number begins with year and month
            self.assertRegex(out.getvalue(), rf"\n{name} .*, arXiv {number}, {number[2:4]}/{number[:2]}\n")

    def test_every_preset_trains_and_one_update_a_batch_never_clips(self):
        for name, fields in variants.VARIANTS.items():
            history = TestLoop.train(self, steps=2, warmup_steps=0, **{"lr": 1e-3, **fields})
            self.assertGreater(min(row["grad_norm"] for row in history), 0, name)
            clipped = max(row["clip_frac"] for row in history)
            reused = fields.get("minibatches") != 1
            self.assertTrue(clipped > 0.02 if name == "gspo" else clipped == 0 or reused, (name, clipped))

    def test_imports_and_line_budgets(self):
        for module, lines, allowed in (
                (env, 380, ""), (agent, 420, "env torch"), (grpo, 640, "env agent variants torch"),
                (variants, 350, "torch"), (ablate, 700, "env agent grpo variants torch numpy matplotlib"),
                (sys.modules[__name__], 1395, "env agent grpo variants ablate torch")):
            text = inspect.getsource(module)
            self.assertTrue(text.count("\n") <= lines and max(map(len, text.splitlines())) <= 110, module)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    name = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
                    self.assertIn(name, [*sys.stdlib_module_names, *allowed.split()])

class TestTranslate(unittest.TestCase):
    def both(self, fields):
        """TRL's text and settings, verl's text and settings (as text, without actor_rollout_ref)."""
        python, bash = (variants.translate(RLConfig(**fields), trainer) for trainer in ("trl", "verl"))
        calls = [node.value for node in ast.parse(python).body if isinstance(node, ast.Assign)]
        trl = {word.arg: ast.literal_eval(word.value) for call in calls for word in call.keywords}
        array = bash.partition("OVERRIDES=(\n")[2].partition("\n)\n")[0]
        verl = re.findall(r"^    (?:actor_rollout_ref\.)?([\w.]+)=(\S+)(?:  # .+)?$", array, re.M)
        self.assertEqual(len(verl), len(array.splitlines()))
        return python, trl, bash, dict(verl)

    def check(self, fields):
        """Sizes and steps are those of the configuration. Returns the two verdicts."""
        cfg, (python, trl, bash, verl) = RLConfig(**fields), self.both(fields)
        updates, G = cfg.minibatches * cfg.epochs, cfg.group_size
        if trl:
            names = "max_steps num_generations num_iterations learning_rate warmup_steps adam_beta2 bf16"
            self.assertEqual([trl[name] for name in names.split()], [
                cfg.steps * updates, G, cfg.epochs, cfg.lr, cfg.warmup_steps * updates, 0.95, False])
            self.assertEqual(trl["per_device_train_batch_size"] * cfg.minibatches, cfg.prompts_per_step * G)
        if verl:
            names = "trainer.total_training_steps rollout.n actor.ppo_epochs actor.optim.lr"
            self.assertEqual([float(verl[x]) for x in names.split()], [cfg.steps, G, cfg.epochs, cfg.lr])
            self.assertEqual(int(verl["actor.ppo_mini_batch_size"]) * cfg.minibatches, cfg.prompts_per_step)
        verdicts = [re.match(r"# (exact|with a caveat|cannot)(\n|: )", text)[1] for text in (python, bash)]
        self.assertEqual([bool(trl), bool(verl)], [verdict != "cannot" for verdict in verdicts])
        return verdicts

    def test_presets_have_the_verdicts_that_were_measured_and_no_old_mistake(self):
        caveats = ("grpo dapo cispo gpg opo maxrl".split(), "grpo dapo gmpo lite_ppo gpg maxrl".split())
        found = {name: self.both(fields) for name, fields in variants.VARIANTS.items()}
        for name, fields in variants.VARIANTS.items():
            wanted = ["with a caveat" if name in names else "exact" for names in caveats]
            self.assertEqual(self.check(fields), ["cannot", "exact"] if name == "dppo" else wanted, name)
            subprocess.run(["bash", "-n"], input=found[name][2], text=True, check=True)
            flags = "--variant", name, "--translate", "verl"
            self.assertEqual(run_main(grpo, *flags), (0, found[name][2], ""))
        trl, verl = ({name: found[name][i] for name in found} for i in (1, 3))
        self.assertEqual((trl["opo"]["steps_per_generation"], trl["cispo"]["epsilon_high"],
                          trl["rloo"]["reward_weights"]), (1, 1.2, [8 / 7]))
        self.assertEqual(trl["dr_grpo"]["reward_weights"], [trl["dr_grpo"]["max_completion_length"] / 24])
        self.assertEqual((verl["dapo"]["algorithm.filter_groups.metric"], verl["dppo"]["actor.clip_ratio_c"],
                          verl["grpo"]["actor.shuffle"]), ("acc", "20.0", "True"))

    def test_any_valid_configuration_is_translated(self):
        rng = random.Random(0)
        choices = dict(
            steps=[0, 7], prompts_per_step=[4, 6, 9], group_size=[2, 5, 8], minibatches=[1, 2], epochs=[1, 2],
            max_grad_norm=[0.5, math.inf], agg_constant=[7], kl_coef=[0.0, 0.1], kl_kind=["k2", "k3"],
            baseline=BASELINES, scale=SCALES, agg=MODES, ratio_level=[*LOSSES], eps_low=[0.0, 1.0],
            overlong_buffer=[0, 2], filter_zero_adv=[False, True], dynamic_sampling=[False, True])
        for _ in range(300):
            fields = {name: rng.choice(values) for name, values in choices.items()}
            fields["filter_zero_adv"] &= not fields["dynamic_sampling"]     # check_config does not allow both
            fields["overlong_buffer"] *= fields["scale"] != "group_mean"
            grpo.check_config(RLConfig(**fields))
            self.check(fields)

class TestAblate(InFolder):
    @classmethod
    def setUpClass(cls):
        """Few tasks and attempts. cls.real: measure -> the result of one real run with it."""
        super().setUpClass()
        evaluate, grad = grpo.evaluate, torch.autograd.grad
        weights = {name: tensor.numpy() for name, tensor in rl_base().state_dict().items()}
        cfg = RLConfig(steps=2, prompts_per_step=4, warmup_steps=0)
        cls.real, cls.gradients = {}, []
        patch = mock.patch.multiple(
            ablate, ProcessPoolExecutor=lambda jobs, **options: ThreadPoolExecutor(1),     # of this process
            base_weights=lambda seed, base: weights,
            TRAIN_TASKS=TRAIN_TASKS[:16], HELDOUT_TASKS=HELDOUT_TASKS[:2],
            evaluate=lambda *args: evaluate(*args[:3], args[3] // 8, *args[4:]))
        patch.start()
        cls.addClassCleanup(patch.stop)
        def recorded(*args, **options):
            found = grad(*args, **options)
            cls.gradients.append(torch.cat([g.flatten() for g in found]).double())
            return found
        with mock.patch.object(torch.autograd, "grad", recorded):
            for measure, options in dict(
                    train_and_evaluate={}, gradient_noise={"batches": 6}, sequence_ratios={},
                    pass_at_k={"n": 64}, informative_groups={"draws": 4}).items():
                cls.real[measure] = getattr(ablate, measure)(rl_base(), TOK, cfg, {"names": "all"}, **options)

    def small(self, *flags, **replaced):
        with mock.patch.multiple(ablate, key_of=ablate.key_of, **replaced):
            return run_main(ablate, *"--steps 2 --prompts_per_step 2".split(), *flags)

    def fake(self, job, weights=None):
        """A result like the real one of its measure with other numbers, as extreme as they may be."""
        large = dict(ratio_max=4e8, logratio_pos=-20, logratio_neg=-20, snr=-0.1, episodes=192)
        rng = random.Random(str((job["arm"], job["seed"])))
        def other(x, name=""):
            if isinstance(x, dict):
                return {key: other(value, key) for key, value in x.items()}
            if isinstance(x, list):
                return [other(row) for row in x[:max(job["config"]["steps"], 1)]]
            return large.get(name, 1) * rng.random()
        return other(self.real[job["measure"]])

    def table(self, out, columns):
        """{arm: [(mean, range), ...]} of a printed table. No line is too long, and no columns touch."""
        lines, found = out[out.index("\nmean; range"):].splitlines(), {}
        self.assertEqual([line for line in lines if len(line) > 100], [])
        for above, line in zip(lines, lines[1:]):
            if match := re.match(r"  \d+ seeds( .*)", line):
                words, ranges = above.split(), match[1].replace(" of ", "/").split()
                cells = zip(words[-len(ranges):], ranges)
                found.setdefault(" ".join(words[:-len(ranges)]), []).extend(cells)
        self.assertEqual({len(cells) for cells in found.values()}, {len(columns)}, out)
        return found

    def test_table_and_resuming(self):
        path, versions, run_one = self.file("runs"), ablate.versions(), mock.Mock(side_effect=ablate.run_one)
        columns = ablate.GRIDS["arms"]["columns"].split(",")
        def again(**replaced):
            run_one.reset_mock()
            status, out, _ = self.small("--arms", "default,scale none", "--out", path,
                                        **{"run_one": run_one, **replaced})
            return status, run_one.call_count, out[out.find("\nmean; range"):]
        status, n, table = again()
        lines, runs = [json.dumps(row) + "\n" for row in self.rows("runs")], [
            row["result"] for row in self.rows("runs")[:3]]
        cells = self.table(table, columns)["default"]
        for heading, x in (("held-out", [run["heldout"]["pass_rate"] for run in runs]), (
                "late reward", [sum(row["reward"] for row in run["history"]) / 2 for run in runs])):
            expected = f"{sum(x) / 3:.2f}", f"{min(x):.2f}..{max(x):.2f}"
            self.assertEqual(cells[columns.index(heading)], expected)
        self.assertEqual((status, n, cells[-1]), (0, 6, ("-", "0/3")))
        self.file("runs", "".join(lines[:4]) + lines[4][:500])      # as a kill leaves it, with a torn line
        self.assertEqual((again(), again()), ((0, 2, table), (0, 0, table)))
        with mock.patch("builtins.open", mock.mock_open(read_data="")):
            self.assertNotEqual(ablate.versions.__wrapped__()["code"], versions["code"])
        for other in dict(code="other"), dict(torch="2.0"), dict(numpy="2.0"):      # so nothing is reused
            self.assertEqual(again(versions=lambda: {**versions, **other}, run_one=lambda *_: 1 / 0)[0], 1)
        for text in ("text\n", '{"step": 1}\n', "no end of line", lines[0] + "[1]"):
            self.refused(ablate, ["--out", self.file("foreign", text)], self.file("foreign") + " has no")

    def test_pairing_and_runs_that_raise(self):
        arms = dict(default={}, twin={}, dynamic=dict(dynamic_sampling=True))
        runs, real = {}, ablate.run_one
        def kept(job, weights):
            run = runs[job["arm"], job["seed"]] = real(job, weights)
            return run if (job["arm"], job["seed"]) != ("dynamic", 1) else 1 / 0
        with mock.patch.dict(ablate.GRIDS["arms"], arms=arms):
            status, out, err = self.small("--out", self.file("pairs"), run_one=kept)
        self.assertEqual((status, len(self.rows("pairs"))), (1, 8))
        self.assertIn("\nfailed: arm dynamic, seed 1: ZeroDivisionError('division by zero')\n", err)
        self.assertRegex(out, r"\ndynamic +\d.*\n  2 seeds(.*\n)*minus default((?!\ntwin )(.|\n))*$")
        pure = {key: without_seconds(run) for key, run in runs.items()}
        self.assertTrue(all(pure["default", seed] == pure["twin", seed] for seed in range(3)))
        self.assertEqual(len(set(pure.values())), 6)

    def test_intervals_and_differences(self):
        close(ablate.t_interval([1.0, 2.0, 3.0, 4.0]), [2.5, 3.182 * math.sqrt(5 / 3) / 2])
        for df, t in ((1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (40, 2.021), (100, 1.984)):
            half = ablate.t_interval([1.0, -1.0] + [0.0] * (df - 1))[1]
            close(half * math.sqrt(df + 1) / math.sqrt(2 / df), t, 2e-3)
        run = {"history": [{"reward": r, "episodes": 10} for r in (0, 0, 1, 1, 1, 0.9, 0.8)]}
        self.assertEqual([ablate.until(what)(run) for what in ("steps", "episodes")], [7, 70])
        done = {(arm, seed): {"history": [], "heldout": dict(pass_rate=p, reads=r, tests=t, edits=1)}
                for arm, rows in (("a", [(0.5, 1, 1), (0.4, 1, 1), (0.6, 1, 1)]),
                                  ("b", [(0.61, 0, 2), (0.5, 0, 1), (0.72, 0.1, 0)]))
                for seed, (p, r, t) in enumerate(rows)}
        for seeds, show_all, shown in ((2, True, 0), (3, False, 2), (3, True, 3)):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                ablate.print_differences(
                    done, "ab", range(seeds), "held-out reads tests edits".split(), show_all)
            rows = [" ".join(line.split()) for line in out.getvalue().splitlines()[2:]]
            self.assertEqual(rows[:-1], [
                "b held-out +0.110 +0.085 to +0.135 higher", "b reads -0.967 -1.110 to -0.823 lower",
                "b tests +0.000 -2.484 to +2.484 within seed noise"][:shown])
            self.assertEqual("1 of 3 differences are within seed noise" in str(rows), seeds == 3)

    def test_every_grid_its_table_and_its_figures(self):
        figures, plot = {}, ["--plot", self.dir] if MATPLOTLIB else []
        for (name, grid), steps in itertools.product(ablate.GRIDS.items(), ("1", "2")):
            real = self.real[grid.get("measure", "train_and_evaluate")]
            columns = grid["columns"].split(",")
            for run, heading in itertools.product(real.get("rows", {"": real}).values(), columns):
                self.assertIsInstance(ablate.column(heading)[0](run), (int, float))
            _, out, err = self.small(name, *plot, "--steps", steps, run_one=self.fake,
                                     save_figures=lambda _, made: figures.update(made))
            arms = [f"{arm}: {row}" for arm in grid["arms"] for row in real.get("rows", ())]
            self.assertEqual(list(self.table(out, columns)), arms or list(grid["arms"]), err)
            self.assertEqual("\nminus " in out, grid.get("compare", True))
        self.assertEqual(set(figures), {*ablate.GRIDS, "sampling"} if MATPLOTLIB else set())
        with contextlib.redirect_stdout(io.StringIO()):
            ablate.save_figures(self.dir, figures)

    def test_measures_by_hand(self):
        passes = [0, 1, 9, 65, *[66] * 12, 3, 60]                   # of 66 attempts at each task
        def attempts(model, tok, tasks, n, cfg, generator):
            c = passes[(ablate.TRAIN_TASKS + ablate.HELDOUT_TASKS).index(tasks[0])]
            return [{"env": SimpleNamespace(passed=i < c)} for i in range(n)]
        with mock.patch.object(ablate, "sample_groups", attempts):
            found = ablate.pass_at_k(fresh_policy(), TOK, RLConfig(steps=0), None, n=66)
        for k in (1, 2, 64):                        # by enumeration of the draws, or of what they leave out
            draws = list(itertools.combinations(range(66), min(k, 66 - k)))
            p = [sum(min(draw) < c if k < 3 else c > sum(i < c for i in draw) for draw in draws) / len(draws)
                 for c in passes]
            close([found[f"train@{k}"], found[f"held@{k}"]], [sum(p[:16]) / 16, sum(p[16:]) / 2], 1e-9)
        found = self.real["informative_groups"]
        close(*([found[f"{name}{G}"] for G in (4, 8, 16)] for name in ("G=", "expect ")), 0.25)

    def test_gradient_noise_by_the_plain_formulas(self):
        rows, first = self.real["gradient_noise"]["rows"], self.gradients[::len(ablate.ESTIMATORS)]
        def cos(a, b):
            return torch.nn.functional.cosine_similarity(sum(a), sum(b), dim=0)
        for e, name in enumerate(rows):
            g = self.gradients[e::len(rows)]                        # of six batches, (weights,) each
            noise = sum((x - sum(g) / 6).square().sum() for x in g) / 5
            close(list(rows[name].values()), [
                ((sum(g) / 6).square().sum() - noise / 6) / noise,
                sum(cos([g[i]], g[1 - i % 2::2]) for i in range(6)) / 6,
                (cos(g[::2], first[1::2]) + cos(g[1::2], first[::2])) / 2], 1e-4, name)
        with mock.patch.object(ablate, "token_logps", side_effect=KeyError) as logps:
            for measure in (ablate.gradient_noise, ablate.sequence_ratios):
                self.assertRaises(KeyError, measure, rl_base(), TOK, RLConfig(steps=1, temperature=2.0), None)
                self.assertEqual(logps.call_args.args[2], 2.0)

    def test_curves_of_logs(self):
        agent.save_policy(rl_base(), TOK, {}, self.file("model"))
        logs = [self.file("log1"), self.file("log2")]
        with mock.patch.object(grpo, "print_outcome"):
            for n, log in zip("12", logs):
                run_main(grpo, "--init", self.file("model"), *self.SMALL, "--log", log, "--steps", n)
        with mock.patch.object(ablate, "find_spec", lambda name: None):
            self.refused(ablate, ["--curves", *logs, "--plot", self.dir], "pip install matplotlib")
        if MATPLOTLIB:
            drawn = [list(line.get_ydata()) for line in ablate.draw_curves(logs).axes[0].lines]
            self.assertEqual(drawn, [[row["reward"] for row in self.rows(f"log{n}")[1:]] for n in (1, 2)])
            for text in ("text\n", "", "[1, 2]\n", '{"step": 1}\n', '{"key": "", "result": {}}\n'):
                self.refused(ablate, ["--curves", self.file("other", text), "--plot", self.dir], "--curves")

    def test_list_and_flags(self):
        _, out, _ = run_main(ablate, "--list", "--seeds", "2")
        sizes = {name: len(grid["arms"]) for name, grid in ablate.GRIDS.items()}
        self.assertEqual([line.split()[:3] for line in out.splitlines()[1:]],
                         [[name, str(n), str(2 * n)] for name, n in sizes.items()])
        for case in f"""nosuch 'nosuch', --seeds 0 number, --seeds 1;1 different, --seeds -2 number,
                --seeds 1;x '1;x', --seeds 0;4294967296 4294967296, --seed 3 --seeds, --jobs 0 at least 1,
                --arms default;no 'no', --arms default;default twice, --jobs x 'x', --lr 0 greater than 0,
                --steps -1 at least 0, --plot /no folder, --out {self.dir} directory,
                --curves {self.dir} --plot""".split(","):
            flag, *value, word = case.replace(";", ",").split(maxsplit=2 if "--" in case[:20] else 1)
            self.refused(ablate, [flag, *value], flag, word.strip())

class TestCommandLine(InFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = os.path.join(cls.dir, "model.pt")
        agent.save_policy(rl_base(), TOK, {}, cls.model)

    def test_flags_that_make_no_sense(self):
        keep = ["--log", self.file("keep", "keep"), "--save", self.file("new.pt"), "--init", self.model]
        for module, flag, *words in (
                (grpo, "--steps 1.5", "int"), (grpo, "--lr fast", "float"), (grpo, "--max_edits few", "none"),
                (grpo, "--base rl", "--init"), (grpo, "--variant no", "gspo"), (grpo, "--threads 0", "64"),
                (grpo, "--show -1", "at least 0"), (grpo, "--translate no", "verl"), (grpo, "--step 3"),
                (grpo, "--steps", "argument"), (grpo, "--filter_zero_adv true --variant dapo", "false"),
                (grpo, "--overlong_buffer 2 --variant maxrl", "0 with"), (agent, "--seeds x", "int"),
                (agent, "--seeds 0", "1", "100"), (env, "--task nosuch", "leap", "tally"), (env, "--x"),
                (env, "--ops no", "or_to_and", "widen"), (env, "--ops" + 5 * " widen", "5", "at most 4")):
            self.refused(module, keep * (module is grpo) + flag.split(), flag.split()[0], *words)

    def test_files_that_do_not_fit(self):
        plain, soft, hard = self.file("plain", "text\n"), *map(self.file, "ab")
        os.symlink(plain, soft)
        os.link(plain, hard)
        with open(self.model, "rb") as whole, open(self.file("broken"), "wb") as part:
            part.write(whole.read()[:5000])
        agent.save_policy(rl_base(), dict(reversed(TOK.items())), {}, self.file("words"))
        keep = ["--log", self.file("keep", "keep"), "--save", self.file("new.pt")]
        for flag, names in (("--init", "words broken plain none ."), ("--save", "."), ("--log", "no/log")):
            for name in names.split():
                self.refused(grpo, [*keep, flag, self.file(name)], flag, self.file(name))
        for flag, path, other_flag, other in [("--log", a, "--save", b) for a, b in (
                (plain, plain), (plain, soft), (hard, plain), (self.file("./plain"), plain), (soft, hard),
                (self.file("new"), self.file("./new")), (self.file("new.part"), self.file("new")))] + [
                ("--init", self.model, flag, self.model) for flag in ("--save", "--log")]:
            self.refused(grpo, [flag, path, other_flag, other], flag, other_flag, "another file")

    def test_a_run_with_everything(self):
        flags = "--variant dr_grpo --scale group_std --prompts_per_step 4 --max_grad_norm inf --steps".split()
        status, out, err = run_main(
            grpo, "--init", self.model, "--log", self.file("run"), "--save", self.file("saved.pt"), *flags,
            *"3 --show 2 --lr 0.01 --warmup_steps 0 --epochs 3".split())
        self.assertEqual((status, err), (0, ""))
        settings, *rows = self.rows("run")
        self.assertEqual([settings["config"][name] for name in "agg agg_constant kl_coef scale lr".split()],
                         ["constant", 24.0, 0.0, "group_std", 0.01])            # by preset, and by flag
        self.assertLessEqual({"step", "reward", "tokens", "eval_pass_rate", *grpo.UPDATE_STATS}, {*rows[2]})
        self.assertEqual(re.findall(r"\nstep (\d): ", out), ["0", "2"])
        shown = out[out.index("\nstep 0: one group"):out.index("\nstep 2: ")]
        self.assertRegex(shown, r"(?s)def \w+\(.*attempt +reward +advantage +calls(\n +\d +[01].00 .*){8}")
        self.assertIn("  clipped\n", shown)
        for sign, text in zip("+-", shown.split("\nattempt ")[2:]):     # the best attempt, and the worst
            self.assertRegex(text, rf"^\d, advantage \{sign}(.*\n)+  not trained on: issue : \w+ is wrong\n")
            tokens = re.findall(r"\n  (\S+) +(\d\.\d{3}) +(\d\.\d{3}) +(\d+\.\d{3})(  clipped)?", text)
            for word, old, new, ratio, clipped in tokens:
                self.assertLess(abs(float(new) - float(ratio) * float(old)), 0.001 * (1 + float(ratio)))
                self.assertEqual(bool(clipped), float(ratio) > 1.2 if sign == "+" else float(ratio) < 0.8)
            for mode, n in zip(MODES, (rows[0]["policy_tokens"], len(tokens), 1, 24)):
                self.assertIn(f" {mode} {1 / 32 / n:.5f}", text)
        self.assertRegex(out, r"(?s)these 160 episodes\n +\d+  .*\nafter: a held-out task, repaired by \w+\n"
                         r"issue : \w+ is wrong\n  > .* s updating: \d+ episodes a second, \d+ tokens")
        _, again, _ = run_main(grpo, "--init", self.file("saved.pt"), *flags, "0", "--quiet")
        after, saved = (re.findall(rf"\n{when}, (\S+) tasks +(.*)", text)
                        for when, text in (("after", out), ("before", again)))
        self.assertTrue(len(after) == 2 and after == saved)             # what was saved plays as it did

    def test_what_stops_a_run_loses_nothing_that_was_finished(self):
        saved, dumps = self.file("kept.pt", "text"), json.dumps
        def full(x, **fields):
            if x.get("step") == 1:
                raise OSError(28, "No space left on device")
            return dumps(x, **fields)
        for flags, words in ((f"--log {self.file('full')}", "No space"), ("--lr 1e30", r"step \d+: .*lr")):
            with mock.patch.object(json, "dumps", full):
                status, out, err = run_main(grpo, "--init", self.model, "--save", saved, *self.SMALL,
                                            *"--steps 9 --prompts_per_step 8".split(), *flags.split())
            self.assertEqual((status, err.count("\n")), (1, 1), err)
            self.assertRegex(err, words)
            new, old = agent.load_policy(TOK, saved).parameters(), rl_base().parameters()
            changes = torch.cat([(a - b).flatten() for a, b in zip(new, old)])
            self.assertTrue(changes.isfinite().all() and changes.any())

    def test_interrupts(self):
        training = self.start("grpo.py", "--init", self.model, "--log", "stopped", "--save", "stopped.pt",
                              "--steps", "5000")
        making = self.start("grpo.py", "--save", "none.pt")
        # A stand-in for torch, whose import waits to be interrupted.
        os.mkdir(self.file("slow"))
        self.file("slow/torch.py", "import time\nprint('here', flush=True)\ntime.sleep(60)\n")
        for script in ("grpo.py", "agent.py", "variants.py", "ablate.py"):
            run = self.start(script, PYTHONPATH=self.file("slow"))
            self.assertEqual(run.stdout.readline(), "here\n")
            run.send_signal(signal.SIGINT)
            self.assertNotIn("Traceback", run.communicate(timeout=60)[1], script)
            self.assertIn(run.returncode, (130, -signal.SIGINT))
        self.assertIn("making the base agent", making.stdout.readline())
        making.send_signal(signal.SIGINT)
        self.assertEqual(making.communicate(timeout=60)[1], "\nstopped after 0 of 80 steps\n")
        self.assertEqual((making.returncode, os.path.exists(self.file("none.pt"))), (130, False))
        while not re.match(" +5 ", training.stdout.readline()):
            self.assertIsNone(training.poll())
        training.send_signal(signal.SIGINT)
        err, rows = training.communicate(timeout=60)[1], self.rows("stopped")
        self.assertEqual([row.get("step") for row in rows], [None, *range(len(rows) - 1)])
        self.assertRegex(err, rf"^\nstopped after ({len(rows) - 1}|{len(rows)}) of 5000 steps\n$")
        self.assertEqual(training.returncode, 130)
        agent.load_policy(TOK, self.file("stopped.pt"))

    def test_closed_pipes(self):
        runs = [self.start("grpo.py", "--init", self.model, "--save", "piped.pt", "--steps", "6")]
        for script, *flags in (["env.py"], ["agent.py"], ["variants.py"], ["ablate.py", "--list"]):
            reader, writer = os.pipe()
            os.close(reader)
            runs.append(self.start(script, *flags, stdout=writer))
            os.close(writer)
        runs[0].stdout.readline()
        runs[0].stdout.close()
        self.assertEqual([run.stderr.read() for run in runs], [""] * 5)
        agent.load_policy(TOK, self.file("piped.pt"))

    def test_two_processes_optimised_and_with_warnings_as_errors(self):
        self.file("imports.py", "import random, signal, torch\ndef state():\n    return (random.getstate(), "
                  "torch.get_num_threads(), torch.get_rng_state().tolist(), signal.getsignal(2))\n"
                  "torch.set_num_threads(2)\nbefore = state()\nimport grpo\n"
                  "grpo.load_policy(grpo.build_tokenizer(), 'model.pt')\nprint(state() == before)\n")
        imports = self.start(self.file("imports.py"), PYTHONPATH=HERE)
        flags = ["--init", self.model, *self.SMALL]
        runs = [self.start("grpo.py", *flags, "--log", f"log{i}", PYTHONWARNINGS="error",
                           PYTHONHASHSEED=str(i), PYTHONOPTIMIZE=str(i)) for i in range(2)]
        outs, errs = zip(*(run.communicate(timeout=60) for run in runs))
        self.assertEqual((imports.communicate(), *errs), (("True\n", ""), "", ""))
        self.assertEqual(*(out[out.index("\nbefore"):out.rindex("\n\n")] for out in outs))
        self.assertEqual(*(without_seconds(self.rows(f"log{i}")) for i in range(2)))

    def test_interrupts_and_closed_pipes_of_ablate(self):
        for name in ("env.py", "agent.py", "variants.py", "grpo.py", "ablate.py"):  # with a quick base agent
            with open(os.path.join(HERE, name)) as old:
                self.file(name, re.sub("(?m)^(IMITATION_BATCHES, .*) = 190,", r"\1 = 3,", old.read()))
        flags = "--arms default --seeds 4 --jobs 2 --steps 1 --prompts_per_step 2 --out runs".split()
        def start(*more):
            return self.start(self.file("ablate.py"), *flags, *more, MPLBACKEND="no such")
        def finished():
            return [row["key"] for row in self.rows("runs")] if "runs" in os.listdir(self.dir) else []
        run = start()
        while not finished() and run.poll() is None:
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
        self.assertEqual((run.returncode, "Traceback" in err), (130, False), err)
        self.assertRegex(err, rf"\ninterrupted after {len(finished())} of 4 runs, runs has them\n$")
        self.assertRegex(out, rf"\ndefault .*\n  {len(finished())} seeds ")
        run = start(*["--plot", "."] * MATPLOTLIB)          # without a display, with a wrong backend
        while "runs are in" not in run.stdout.readline():
            self.assertIsNone(run.poll())
        run.stdout.close()
        self.assertNotIn("Traceback", run.stderr.read())
        self.assertEqual((run.wait(), len(finished()), len(set(finished()))), (141, 4, 4))

class TestReadme(unittest.TestCase):
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        text = file.read()

    def test_the_examples_run(self):
        blocks = re.findall(r"```python\n(.*?)```", self.text, re.S)
        train, make, base = grpo.train_rl, agent.make_base_agent, rl_base()
        def few(model, tok, cfg, *args, **options):
            return train(model, tok, RLConfig(**{**vars(cfg), "steps": min(cfg.steps, 20)}), *args, **options)
        def shared(tok, *args, **options):
            return copy.deepcopy(base) if list(tok) == list(TOK) else make(tok, *args, **options)
        for block in blocks:
            with mock.patch.multiple(agent, make_base_agent=shared, make_rl_base=shared), \
                    mock.patch.object(grpo, "train_rl", few), torch.random.fork_rng(), \
                    contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
            self.assertRegex(out.getvalue(), r"\d", block)
            for first, last in re.findall(r"([\d.]*\d) -> ([\d.]*\d)", out.getvalue()):
                self.assertGreater(float(last), float(first), block)
        self.assertIn(len(blocks), (3, 4))

    def test_every_command_is_accepted_and_every_link_leads_to_a_file(self):
        commands = {*re.findall(r"\bpython (\w+\.py[^`\n|;&>#()]*)", self.text)}
        scripts = dict(env=env, agent=agent, grpo=grpo, ablate=ablate, variants=SimpleNamespace(
            main=variants.print_presets, __name__="variants"))
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(folder)            # agent.py looks for its words after its flags, and is stopped there
            os.mkdir("figures")
            stack.enter_context(mock.patch.object(agent, "build_tokenizer", side_effect=SystemExit))
            for target in ("grpo.run", "grpo.load_policy", "ablate.report", "ablate.draw_curves",
                           "ablate.save_figures", "ablate.find_spec"):
                stack.enter_context(mock.patch(target, return_value=0))
            for command in commands:
                name, *flags = re.sub(r"\bNAME\b", "gspo", re.sub(r"\bN\b", "3", command)).split()
                if name == "test_all.py":
                    self.assertLessEqual({flag.split(".")[0] for flag in flags}, {*globals()}, command)
                else:
                    status, _, err = run_main(scripts[name[:-3]], *flags)
                    self.assertEqual((status, err), (0, ""), command)
        self.assertGreater(len(commands), 12)
        for link in re.findall(r"\]\(([^)#:]+)\)", self.text):
            self.assertTrue(os.path.exists(os.path.join(HERE, link)), link)

if __name__ == "__main__":
    unittest.main()
