"""The BugFix gym: thirty one-bug Python functions, and an agent that may read, test, edit and submit.

Read this file first; it needs nothing but the standard library. The task is deliberately small: five kinds
of bug, five repair ops, and the op that repairs a task can be told from its source and from nothing else
once the function's name is randomised. What a policy does instead, while a gym still lets it, is what the
rest of the project is about.

    python env.py                               the oracle plays one task, then the best blind op sequences
    python env.py --task leap                   the same with another task
    python env.py --task leap --ops or_to_and   show the source, apply these ops, submit
"""
import argparse
import itertools
import random
import re
import sys

# --------------------------------------------------------------------------------------------------
# Repair ops
# --------------------------------------------------------------------------------------------------
# An op rewrites every place in the source that its pattern matches, right or wrong. Two pairs of ops undo
# each other (or_to_and / and_to_or, div_to_mod / mod_to_div): whichever of a pair comes last decides, so a
# fixed sequence of ops, however long, repairs one family of each pair and the fifth: 3 of 5, 60% of the
# tasks. That is the ceiling of blind play with unlimited edits; with one edit it is 1 of 5.
REWRITES = {
    "or_to_and":  (r"\bor\b", "and"),
    "and_to_or":  (r"\band\b", "or"),
    "div_to_mod": (r"//", "%"),
    "mod_to_div": (r"%", "//"),
    "widen":      (r"\brange\((\w+, )?([a-z])\)", r"range(\1\2 + 1)"),     # range(1, n) -> range(1, n + 1)
}
OPS = list(REWRITES)
# family i is repaired by op i
FAMILIES = ["wrong_or", "wrong_and", "wrong_div", "wrong_mod", "short_range"]


def apply_op(source, op):
    """The source (str) after one op. ValueError names an op that does not exist."""
    if op not in REWRITES:
        raise ValueError(f"unknown op {op!r}; allowed: {', '.join(OPS)}")
    pattern, replacement = REWRITES[op]
    return re.sub(pattern, replacement, source)


def source_words(source):
    """A source as the words an agent reads; a line break is the word '\\n', indentation is not a word."""
    return re.findall(r"\w+|//|[=!<>*+]=|\n|[^\w\s]", source)


# --------------------------------------------------------------------------------------------------
# Tasks
# --------------------------------------------------------------------------------------------------
# Six tasks to a family: four to train on, then two held out. Each bug can be told from its source, never from
# its name: most by a rule of Python or of arithmetic, a few by what such code usually means.
#
#   wrong_or     `lo < x or x < hi` is true of every x; `b > 0 or a % b` may divide by the 0 it asks about
#   wrong_and    `x == a and x == b` is never true; `len(xs) and 1` is no default
#   wrong_div    `n // 2 == 0` asks for a remainder; so does an index that should wrap round
#   wrong_mod    sum % len is no mean, and len % 2 is no middle
#   short_range  range(1, n) leaves out n
#
# The word to look for (or, and, //, %, range) is not enough: in sixteen sources a second such word stands
# where it is right, and the op for that word would break it. `leap` has a right % beside its wrong `or`,
# `average` a right `or` beside its wrong %. No order of preference among the five words answers all thirty.
#
# A test is (arguments, expected result). Visible tests are what the agent's `test` call runs; those of eight
# tasks are weak, as tests are: they pass on the buggy source. Hidden tests grade.
TASKS = [
    # wrong_or: repaired by or_to_and
    dict(name="between", family="wrong_or",
         source="def between(x, lo, hi): return lo < x or x < hi",
         visible=[((3, 1, 5), True)],
         hidden=[((3, 1, 5), True), ((0, 1, 5), False), ((9, 1, 5), False), ((5, 1, 5), False)]),
    dict(name="leap", family="wrong_or",
         source="def leap(n):\n    if n % 4 == 0 or n % 100 != 0: return 1\n    return 0",
         visible=[((2024,), 1), ((1900,), 0)],
         hidden=[((2024,), 1), ((1900,), 0), ((2023,), 0), ((1996,), 1)]),
    dict(name="divides", family="wrong_or",
         source="def divides(a, b): return b > 0 or a % b == 0",
         visible=[((6, 4), False)],
         hidden=[((6, 4), False), ((6, 3), True), ((6, 0), False), ((0, 5), True)]),
    dict(name="inner", family="wrong_or",
         source="def inner(xs, n): return [x for x in xs if x > 0 or x < n]",
         visible=[(([1, 7, 3], 5), [1, 3])],
         hidden=[(([1, 7, 3], 5), [1, 3]), (([-2, 2], 4), [2]), (([0, 4], 4), [])]),
    dict(name="valid", family="wrong_or",
         source="def valid(n):\n    if n > 0 or n < 100: return 1\n    return 0",
         visible=[((42,), 1)],
         hidden=[((42,), 1), ((0,), 0), ((100,), 0), ((-3,), 0)]),
    dict(name="proper", family="wrong_or",
         source="def proper(a, b): return a % b == 0 or a > b",
         visible=[((8, 3), False)],
         hidden=[((8, 3), False), ((8, 4), True), ((8, 8), False), ((9, 3), True)]),

    # wrong_and: repaired by and_to_or
    dict(name="outside", family="wrong_and",
         source="def outside(x, lo, hi): return x < lo and x > hi",
         visible=[((0, 1, 5), True)],
         hidden=[((0, 1, 5), True), ((9, 1, 5), True), ((3, 1, 5), False)]),
    dict(name="either", family="wrong_and",
         source="def either(x, a, b):\n    if x == a and x == b: return 1\n    return 0",
         visible=[((2, 2, 7), 1)],
         hidden=[((2, 2, 7), 1), ((7, 2, 7), 1), ((3, 2, 7), 0)]),
    dict(name="share", family="wrong_and",
         source="def share(xs): return sum(xs) // (len(xs) and 1)",
         visible=[(([4, 6],), 5)],
         hidden=[(([4, 6],), 5), (([],), 0), (([9],), 9), (([3, 3, 3],), 3)]),
    dict(name="ratio", family="wrong_and",
         source="def ratio(a, b): return a // (b and 1)",
         visible=[((6, 1), 6)],
         hidden=[((6, 1), 6), ((6, 3), 2), ((6, 0), 6)]),
    dict(name="bits", family="wrong_and",
         source="def bits(xs): return [x for x in xs if x == 0 and x == 1]",
         visible=[(([1, 5, 0],), [1, 0])],
         hidden=[(([1, 5, 0],), [1, 0]), (([2, 3],), []), (([0],), [0])]),
    dict(name="growth", family="wrong_and",
         source="def growth(lo, hi): return 100 * hi // (lo and 1)",
         visible=[((2, 6), 300)],
         hidden=[((2, 6), 300), ((0, 5), 500), ((3, 12), 400), ((1, 4), 400)]),

    # wrong_div: repaired by div_to_mod
    dict(name="even", family="wrong_div",
         source="def even(n):\n    if n // 2 == 0: return 1\n    return 0",
         visible=[((6,), 1)],
         hidden=[((6,), 1), ((7,), 0), ((1,), 0), ((2,), 1)]),
    dict(name="cycle", family="wrong_div",
         source="def cycle(xs, i): return xs[i // len(xs)]",
         visible=[(([5, 7], 0), 5)],
         hidden=[(([5, 7], 0), 5), (([5, 7], 1), 7), (([5, 7, 9], 5), 9), (([4], 3), 4)]),
    dict(name="thirds", family="wrong_div",
         source="def thirds(xs): return sum(1 for x in xs if x > 0 and x // 3 == 0)",
         visible=[(([3, 4, 9],), 2)],
         hidden=[(([3, 4, 9],), 2), (([1, -3],), 0), (([6, 0],), 1)]),
    dict(name="factor", family="wrong_div",
         source="def factor(a, b): return b > 0 and a // b == 0",
         visible=[((6, 3), True)],
         hidden=[((6, 3), True), ((3, 6), False), ((7, 2), False), ((5, 0), False)]),
    dict(name="odds", family="wrong_div",
         source="def odds(xs): return [x for x in xs if x // 2 == 1]",
         visible=[(([1, 2, 5],), [1, 5])],
         hidden=[(([1, 2, 5],), [1, 5]), (([2],), []), (([9, 3],), [9, 3])]),
    dict(name="fizz", family="wrong_div",
         source="def fizz(n): return n > 0 and n // 3 == 0",
         visible=[((0,), False)],
         hidden=[((0,), False), ((9,), True), ((2,), False), ((3,), True)]),

    # wrong_mod: repaired by mod_to_div
    dict(name="mean", family="wrong_mod",
         source="def mean(xs): return sum(xs) % len(xs)",
         visible=[(([4, 6],), 5)],
         hidden=[(([4, 6],), 5), (([9],), 9), (([1, 2, 3],), 2)]),
    dict(name="deal", family="wrong_mod",
         source="def deal(n, a): return [n % a for i in range(a)]",
         visible=[((6, 2), [3, 3])],
         hidden=[((6, 2), [3, 3]), ((9, 3), [3, 3, 3]), ((5, 1), [5])]),
    dict(name="scale", family="wrong_mod",
         source="def scale(xs, b): return [x % (b or 1) for x in xs]",
         visible=[(([4, 6], 2), [2, 3])],
         hidden=[(([4, 6], 2), [2, 3]), (([9, 3], 3), [3, 1]), (([5], 0), [5])]),
    dict(name="percent", family="wrong_mod",
         source="def percent(a, b): return 100 * a % (b or 1)",
         visible=[((1, 4), 25)],
         hidden=[((1, 4), 25), ((3, 4), 75), ((0, 0), 0), ((2, 2), 100)]),
    dict(name="middle", family="wrong_mod",
         source="def middle(xs): return xs[len(xs) % 2]",
         visible=[(([3, 1, 2],), 1)],
         hidden=[(([3, 1, 2],), 1), (([5, 4, 3, 2, 1],), 3), (([7],), 7), (([6, 8, 9, 0],), 9)]),
    dict(name="average", family="wrong_mod",
         source="def average(xs): return sum(xs) % (len(xs) or 1)",
         visible=[(([],), 0)],
         hidden=[(([],), 0), (([4, 6],), 5), (([8],), 8), (([3, 3, 3],), 3)]),

    # short_range: repaired by widen
    dict(name="triangle", family="short_range",
         source="def triangle(n): return sum(range(1, n))",
         visible=[((3,), 6)],
         hidden=[((3,), 6), ((1,), 1), ((0,), 0), ((4,), 10)]),
    dict(name="evens", family="short_range",
         source="def evens(n): return [i for i in range(1, n) if i % 2 == 0]",
         visible=[((6,), [2, 4, 6])],
         hidden=[((6,), [2, 4, 6]), ((5,), [2, 4]), ((2,), [2])]),
    dict(name="divisors", family="short_range",
         source="def divisors(a): return [i for i in range(1, a) if a % i == 0]",
         visible=[((6,), [1, 2, 3, 6])],
         hidden=[((6,), [1, 2, 3, 6]), ((5,), [1, 5]), ((1,), [1])]),
    dict(name="factorial", family="short_range",
         source="def factorial(n, p=1):\n    for i in range(1, n): p = p * i\n    return p",
         visible=[((0,), 1), ((1,), 1)],
         hidden=[((0,), 1), ((1,), 1), ((3,), 6), ((4,), 24)]),
    dict(name="cubes", family="short_range",
         source="def cubes(n): return sum(i * i * i for i in range(1, n))",
         visible=[((2,), 9)],
         hidden=[((2,), 9), ((1,), 1), ((3,), 36)]),
    dict(name="tally", family="short_range",
         source="def tally(a, n): return sum(1 for i in range(1, n) if i % a == 0)",
         visible=[((3, 6), 2)],
         hidden=[((3, 6), 2), ((2, 4), 2), ((2, 5), 2), ((1, 1), 1)]),
]
FUNCTION_NAMES = [task["name"] for task in TASKS]
# task name -> the op that repairs it
FIX_OP = {task["name"]: OPS[FAMILIES.index(task["family"])] for task in TASKS}
for _task in TASKS:
    # the same words for all tasks, but for the name
    _task["issue"] = ["issue", ":", _task["name"], "is", "wrong"]
TRAIN_TASKS = [task for i, task in enumerate(TASKS) if i % 6 < 4]
HELDOUT_TASKS = [task for i, task in enumerate(TASKS) if i % 6 >= 4]


def randomize_names(task, rng):
    """A copy of the task whose function has another name,
    drawn by rng (random.Random) from the thirty names.

    The name is replaced in issue and source (the tests hold arguments and results, no name). Names that are
    words of the source are not drawn. `name` stays what it was, so FIX_OP and logs still know the task.
    """
    old, words = task["issue"][2], source_words(task["source"])
    new = rng.choice([name for name in FUNCTION_NAMES if name not in words])
    return {**task, "issue": [new if word == old else word for word in task["issue"]],
            "source": re.sub(rf"\b{old}\b", new, task["source"])}


# --------------------------------------------------------------------------------------------------
# Running a source
# --------------------------------------------------------------------------------------------------
BUILTINS = {f.__name__: f for f in (len, range, sum)}        # all that a source can reach
_PASSED = {}                                                 # (source, tests) -> bool, see run_tests


def run_tests(source, tests):
    """True if the function passes all (arguments, result) tests.

    An exception, a syntax error too, is a failed test. Sources loop over ranges and lists only and no op
    changes that, so they end. Whether a source passes does not depend on its function's name: results are
    kept by the source with its name replaced, and after the first few steps of a training run nothing is
    executed any more.
    """
    name = re.match(r"def (\w+)", source)[1]
    key = (re.sub(rf"\b{name}\b", "f", source), repr(tests))
    if key not in _PASSED:
        _PASSED[key] = _run(key[0], tests)
    return _PASSED[key]


def _run(source, tests):
    try:
        scope = {"__builtins__": BUILTINS}
        exec(source, scope)
        return all(scope["f"](*arguments) == result for arguments, result in tests)
    except Exception:
        return False


def blind_pass_rate(ops, tasks):
    """The share of tasks whose hidden tests pass after a fixed sequence of ops, applied without a look."""
    passed = 0
    for task in tasks:
        source = task["source"]
        for op in ops:
            source = apply_op(source, op)
        passed += run_tests(source, task["hidden"])
    return passed / len(tasks)


# --------------------------------------------------------------------------------------------------
# The environments
# --------------------------------------------------------------------------------------------------
CALLS = ["read", "test", "edit", "submit"]


class BugFixEnv:
    """One episode on one task, with as many edits as there are turns.

    reset() gives the issue's words. step(words) takes one call, costs one turn, and returns (the
    observation's words, done):

        read    the source as it is now           edit OP   ok
        test    pass or fail (visible tests)      submit    pass or fail (hidden tests); ends the episode
        anything else: malformed

    Only a submitted episode is graded (`passed`). One that runs out of turns is `truncated` and has failed;
    to grade it all the same would pay the policy for never submitting.
    """

    def __init__(self, task, max_turns=6):
        self.task, self.max_turns = task, max_turns
        self.reset()

    def reset(self):
        self.source = self.task["source"]
        self.turns, self.edits = 0, []                  # edits: the ops that were applied, in order
        self.done = self.truncated = self.passed = False
        return list(self.task["issue"])

    def step(self, words):
        if self.done:
            raise RuntimeError(f"the episode on {self.task['name']!r} is over; call reset() first")
        words = list(words)
        self.turns += 1
        if words == ["read"]:
            observation = source_words(self.source)
        elif words == ["test"]:
            observation = ["pass" if run_tests(self.source, self.task["visible"]) else "fail"]
        elif words == ["submit"]:
            self.done, self.passed = True, run_tests(self.source, self.task["hidden"])
            observation = ["pass" if self.passed else "fail"]
        elif len(words) == 2 and words[0] == "edit" and words[1] in REWRITES:
            observation = self.edit(words[1])
        else:
            observation = ["malformed"]
        if self.turns >= self.max_turns and not self.done:
            self.done = self.truncated = True
            observation = observation + ["truncated"]
        return observation, self.done

    def edit(self, op):
        # Whether the op changed anything is not said: `ok` either way,
        # or edit-until-it-bites would replace reading.
        self.source = apply_op(self.source, op)
        self.edits.append(op)
        return ["ok"]


class EditBudgetEnv(BugFixEnv):
    """BugFixEnv that refuses every edit past max_edits:
    the call uses its turn, the source stays as it is.
    """

    def __init__(self, task, max_edits, max_turns=6):
        self.max_edits = max_edits
        super().__init__(task, max_turns)

    def edit(self, op):
        return super().edit(op) if len(self.edits) < self.max_edits else ["refused"]


# --------------------------------------------------------------------------------------------------
# Demonstrations: lists of calls, for base agents to imitate
# --------------------------------------------------------------------------------------------------

def random_play(task, rng):
    """Calls at random, an edit or a submit twice as often as a read or a test; may never come to a submit."""
    calls = []
    while len(calls) < 6 and calls[-1:] != [["submit"]]:
        kind = rng.choices(CALLS, weights=(2, 2, 4, 4))[0]
        calls.append(["edit", rng.choice(OPS)] if kind == "edit" else [kind])
    return calls


def blind_play(task, rng):
    """One or two edits at random, then submit; never looks."""
    return [["edit", rng.choice(OPS)] for _ in range(rng.choice((1, 1, 2)))] + [["submit"]]


def oracle_play(task, rng):
    """Read, the op that the source calls for, test, submit."""
    return [["read"], ["edit", FIX_OP[task["name"]]], ["test"], ["submit"]]


# the players, all called with (task, rng); calls do not depend on observations
PLAYS = {"random": random_play, "blind": blind_play, "oracle": oracle_play}


# --------------------------------------------------------------------------------------------------
# Command line (the first four functions serve every script here)
# --------------------------------------------------------------------------------------------------

def fail(message):
    """Bad input: one line on stderr, exit status 2."""
    print(f"{sys.argv[0].rsplit('/')[-1]}: {message}", file=sys.stderr)
    sys.exit(2)


def open_for_writing(flag, path, mode):
    """The file opened; or one line and exit status 2, before any work and not when it is done."""
    try:
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        fail(f"{flag} {path}: cannot be written: {error.strerror}")


def one_line_parser(doc):
    """An argparse parser that shows a script's docstring as help
    and takes one line for an error, without the usage.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = fail
    return parser


def seed_list(text):
    """'3,5,7' -> [3, 5, 7]; '5' -> [0, 1, 2, 3, 4]."""
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    seeds = numbers if "," in text else list(range(numbers[0]))
    if min(seeds, default=-1) < 0 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seeds (5) "
                                         "nor a list of them (0,3,7)")
    return seeds


def best_blind(n_edits, tasks):
    """(pass rate, sequences that reach it) over all 5^n sequences of n ops."""
    rates = {ops: blind_pass_rate(ops, tasks) for ops in itertools.product(OPS, repeat=n_edits)}
    best = max(rates.values())
    return best, [ops for ops in rates if rates[ops] == best]


def show(task, calls):
    print(f"\ntask {task['name']}, family {task['family']}, repaired by {FIX_OP[task['name']]}\n")
    env = BugFixEnv(task)
    print(" ".join(env.reset()))
    for call in calls:
        observation, done = env.step(call)
        if call == ["read"]:                            # as Python, not as the words the policy gets
            observation = ["\n    " + env.source.replace("\n", "\n    ")]
        print(f"  > {' '.join(call):18} {' '.join(observation)}")
        if done:
            break


def main():
    parser = one_line_parser(__doc__)
    parser.add_argument("--task", default="leap", metavar="NAME", help="the task to play")
    parser.add_argument("--ops", nargs="*", help="apply these ops and submit, instead of the oracle's play")
    args = parser.parse_args()
    if args.task not in FIX_OP:
        fail(f"--task: unknown task {args.task!r}; allowed: {', '.join(FIX_OP)}")
    for op in args.ops or []:
        if op not in OPS:
            fail(f"--ops: unknown op {op!r}; allowed: {', '.join(OPS)}")
    if len(args.ops or []) > 4:
        fail(f"--ops: {len(args.ops)} ops are too many, "
             "at most 4 fit between the read and the submit of six turns")
    task = TASKS[FUNCTION_NAMES.index(args.task)]
    if args.ops is not None:
        show(task, [["read"]] + [["edit", op] for op in args.ops] + [["submit"]])
        return
    show(task, oracle_play(task, random.Random(0)))
    print("\nthe best a player can do who never looks, over all thirty tasks:\n")
    print("edits  sequences  pass rate  one of the best")
    for n in range(1, 6):
        best, sequences = best_blind(n, TASKS)
        print(f"{n:5}  {len(OPS) ** n:9}  {best:9.2f}  {' '.join(sequences[0])}")


if __name__ == "__main__":
    main()
