r"""The BugFix gym: thirty short Python functions with one bug each, and an environment to fix them.

Read this file first. It needs the standard library only. An episode is one attempt at one task. The
agent is told which function is wrong, and then has six turns. In each turn it makes one call: it
can read the source, edit it with one of five repair ops, run the visible tests, or submit. A
submitted source is graded by hidden tests. In this episode, the agent's calls come after the ">":

    issue : leap is wrong
      > read               def leap ( n ) : \n if n % 4 == 0 or n % 100 != 0 : return 1 \n return 0
      > edit or_to_and     ok
      > test               pass
      > submit             pass

    python env.py                               play one task, then list what blind play can reach
    python env.py --task mean                   another task
    python env.py --task leap --ops widen       apply these ops instead of the right one, and submit
"""
import argparse
import copy
import itertools
import random
import re

# ---- Repair ops ----------------------------------------------------------------------------------
# An op rewrites every place in the source that its pattern matches, whether that place is wrong or
# not. Two pairs of ops undo each other (or_to_and / and_to_or and div_to_mod / mod_to_div), and the
# last one wins. So a fixed sequence repairs the wrong_or or the wrong_and tasks but never both, and
# the same holds for wrong_div and wrong_mod. An agent that never looks repairs at most 60% of the
# tasks, and 20% if it has one edit.

REWRITES = {
    # op -> (pattern, replacement)
    "or_to_and": (r"\bor\b", "and"),
    "and_to_or": (r"\band\b", "or"),
    "div_to_mod": (r"//", "%"),
    "mod_to_div": (r"%", "//"),
    # range(1, n) -> range(1, n + 1)
    "widen": (r"\brange\((\w+, )?([a-z])\)", r"range(\1\2 + 1)"),
}
OPS = list(REWRITES)

# OPS[i] repairs FAMILIES[i]
FAMILIES = ["wrong_or", "wrong_and", "wrong_div", "wrong_mod", "short_range"]


def apply_op(source, op):
    """Returns the source (a string) after one op. Raises ValueError for an unknown op."""
    if op not in REWRITES:
        raise ValueError(f"op: {op!r} is not one of {', '.join(OPS)}")
    pattern, replacement = REWRITES[op]
    return re.sub(pattern, replacement, source)


def source_words(source):
    """Returns the source as the list of words that an agent reads. A line break is the word '\\n'.

    Indentation is left out. The sources are so short that it adds no information.
    """
    return re.findall(r"\w+|//|[=!<>*+]=|\n|[^\w\s]", source)


# ---- Tasks ---------------------------------------------------------------------------------------
# Each family has six tasks: four to train on, then two that are held out. The source alone is
# enough to find the bug. Most bugs break a rule of Python or of arithmetic, and a few go against
# what such code is usually for:
#
#   wrong_or     `lo < x or x < hi` is true for every x
#   wrong_and    `x == a and x == b` is almost never true, and `len(xs) and 1` sets no default
#   wrong_div    `n // 2 == 0` asks for a remainder, and so does an index that should wrap around
#   wrong_mod    the sum modulo the length is not a mean
#   short_range  range(1, n) leaves out n
#
# Looking for one word (or, and, //, %, range) is not enough. In sixteen sources another of these
# words is correct, and the op for it would break the source. `leap` has a correct % beside its
# wrong `or`.
#
# A test is a pair (arguments, expected result). The agent's `test` call runs the visible tests.
# For eight tasks they are so weak that they pass on the buggy source. The hidden tests grade the
# episode.

TASKS = [
    dict(name="between", family="wrong_or", visible=[((3, 1, 5), True)],
         source="def between(x, lo, hi): return lo < x or x < hi",
         hidden=[((3, 1, 5), True), ((0, 1, 5), False), ((9, 1, 5), False), ((5, 1, 5), False)]),
    dict(name="leap", family="wrong_or", visible=[((2024,), 1), ((1900,), 0)],
         source="def leap(n):\n    if n % 4 == 0 or n % 100 != 0: return 1\n    return 0",
         hidden=[((2024,), 1), ((1900,), 0), ((2023,), 0), ((1996,), 1)]),
    dict(name="divides", family="wrong_or", visible=[((6, 4), False)],
         source="def divides(a, b): return b > 0 or a % b == 0",
         hidden=[((6, 4), False), ((6, 3), True), ((6, 0), False), ((0, 5), True)]),
    dict(name="inner", family="wrong_or", visible=[(([1, 7, 3], 5), [1, 3])],
         source="def inner(xs, n): return [x for x in xs if x > 0 or x < n]",
         hidden=[(([1, 7, 3], 5), [1, 3]), (([-2, 2], 4), [2]), (([0, 4], 4), [])]),
    dict(name="valid", family="wrong_or", visible=[((42,), 1)],
         source="def valid(n):\n    if n > 0 or n < 100: return 1\n    return 0",
         hidden=[((42,), 1), ((0,), 0), ((100,), 0), ((-3,), 0)]),
    dict(name="proper", family="wrong_or", visible=[((8, 3), False)],
         source="def proper(a, b): return a % b == 0 or a > b",
         hidden=[((8, 3), False), ((8, 4), True), ((8, 8), False), ((9, 3), True)]),

    dict(name="outside", family="wrong_and", visible=[((0, 1, 5), True)],
         source="def outside(x, lo, hi): return x < lo and x > hi",
         hidden=[((0, 1, 5), True), ((9, 1, 5), True), ((3, 1, 5), False)]),
    dict(name="either", family="wrong_and", visible=[((2, 2, 7), 1)],
         source="def either(x, a, b):\n    if x == a and x == b: return 1\n    return 0",
         hidden=[((2, 2, 7), 1), ((7, 2, 7), 1), ((3, 2, 7), 0)]),
    dict(name="share", family="wrong_and", visible=[(([4, 6],), 5)],
         source="def share(xs): return sum(xs) // (len(xs) and 1)",
         hidden=[(([4, 6],), 5), (([],), 0), (([9],), 9), (([3, 3, 3],), 3)]),
    dict(name="ratio", family="wrong_and", visible=[((6, 1), 6)],
         source="def ratio(a, b): return a // (b and 1)",
         hidden=[((6, 1), 6), ((6, 3), 2), ((6, 0), 6)]),
    dict(name="bits", family="wrong_and", visible=[(([1, 5, 0],), [1, 0])],
         source="def bits(xs): return [x for x in xs if x == 0 and x == 1]",
         hidden=[(([1, 5, 0],), [1, 0]), (([2, 3],), []), (([0],), [0])]),
    dict(name="growth", family="wrong_and", visible=[((2, 6), 300)],
         source="def growth(lo, hi): return 100 * hi // (lo and 1)",
         hidden=[((2, 6), 300), ((0, 5), 500), ((3, 12), 400), ((1, 4), 400)]),

    dict(name="even", family="wrong_div", visible=[((6,), 1)],
         source="def even(n):\n    if n // 2 == 0: return 1\n    return 0",
         hidden=[((6,), 1), ((7,), 0), ((1,), 0), ((2,), 1)]),
    dict(name="cycle", family="wrong_div", visible=[(([5, 7], 0), 5)],
         source="def cycle(xs, i): return xs[i // len(xs)]",
         hidden=[(([5, 7], 0), 5), (([5, 7], 1), 7), (([5, 7, 9], 5), 9), (([4], 3), 4)]),
    dict(name="thirds", family="wrong_div", visible=[(([3, 4, 9],), 2)],
         source="def thirds(xs): return sum(1 for x in xs if x > 0 and x // 3 == 0)",
         hidden=[(([3, 4, 9],), 2), (([1, -3],), 0), (([6, 0],), 1)]),
    dict(name="factor", family="wrong_div", visible=[((6, 3), True)],
         source="def factor(a, b): return b > 0 and a // b == 0",
         hidden=[((6, 3), True), ((3, 6), False), ((7, 2), False), ((5, 0), False)]),
    dict(name="odds", family="wrong_div", visible=[(([1, 2, 5],), [1, 5])],
         source="def odds(xs): return [x for x in xs if x // 2 == 1]",
         hidden=[(([1, 2, 5],), [1, 5]), (([2],), []), (([9, 3],), [9, 3])]),
    dict(name="fizz", family="wrong_div", visible=[((0,), False)],
         source="def fizz(n): return n > 0 and n // 3 == 0",
         hidden=[((0,), False), ((9,), True), ((2,), False), ((3,), True)]),

    dict(name="mean", family="wrong_mod", visible=[(([4, 6],), 5)],
         source="def mean(xs): return sum(xs) % len(xs)",
         hidden=[(([4, 6],), 5), (([9],), 9), (([1, 2, 3],), 2)]),
    dict(name="deal", family="wrong_mod", visible=[((6, 2), [3, 3])],
         source="def deal(n, a): return [n % a for i in range(a)]",
         hidden=[((6, 2), [3, 3]), ((9, 3), [3, 3, 3]), ((5, 1), [5])]),
    dict(name="scale", family="wrong_mod", visible=[(([4, 6], 2), [2, 3])],
         source="def scale(xs, b): return [x % (b or 1) for x in xs]",
         hidden=[(([4, 6], 2), [2, 3]), (([9, 3], 3), [3, 1]), (([5], 0), [5])]),
    dict(name="percent", family="wrong_mod", visible=[((1, 4), 25)],
         source="def percent(a, b): return 100 * a % (b or 1)",
         hidden=[((1, 4), 25), ((3, 4), 75), ((0, 0), 0), ((2, 2), 100)]),
    dict(name="middle", family="wrong_mod", visible=[(([3, 1, 2],), 1)],
         source="def middle(xs): return xs[len(xs) % 2]",
         hidden=[(([3, 1, 2],), 1), (([5, 4, 3, 2, 1],), 3), (([7],), 7), (([6, 8, 9, 0],), 9)]),
    dict(name="average", family="wrong_mod", visible=[(([],), 0)],
         source="def average(xs): return sum(xs) % (len(xs) or 1)",
         hidden=[(([],), 0), (([4, 6],), 5), (([8],), 8), (([3, 3, 3],), 3)]),

    dict(name="triangle", family="short_range", visible=[((3,), 6)],
         source="def triangle(n): return sum(range(1, n))",
         hidden=[((3,), 6), ((1,), 1), ((0,), 0), ((4,), 10)]),
    dict(name="evens", family="short_range", visible=[((6,), [2, 4, 6])],
         source="def evens(n): return [i for i in range(1, n) if i % 2 == 0]",
         hidden=[((6,), [2, 4, 6]), ((5,), [2, 4]), ((2,), [2])]),
    dict(name="divisors", family="short_range", visible=[((6,), [1, 2, 3, 6])],
         source="def divisors(a): return [i for i in range(1, a) if a % i == 0]",
         hidden=[((6,), [1, 2, 3, 6]), ((5,), [1, 5]), ((1,), [1])]),
    dict(name="factorial", family="short_range", visible=[((0,), 1), ((1,), 1)],
         source="def factorial(n, p=1):\n    for i in range(1, n): p = p * i\n    return p",
         hidden=[((0,), 1), ((1,), 1), ((3,), 6), ((4,), 24)]),
    dict(name="cubes", family="short_range", visible=[((2,), 9)],
         source="def cubes(n): return sum(i * i * i for i in range(1, n))",
         hidden=[((2,), 9), ((1,), 1), ((3,), 36)]),
    dict(name="tally", family="short_range", visible=[((3, 6), 2)],
         source="def tally(a, n): return sum(1 for i in range(1, n) if i % a == 0)",
         hidden=[((3, 6), 2), ((2, 4), 2), ((2, 5), 2), ((1, 1), 1)]),
]
for _task in TASKS:
    _task["issue"] = ["issue", ":", _task["name"], "is", "wrong"]

FUNCTION_NAMES = [task["name"] for task in TASKS]
FIX_OP = {task["name"]: OPS[FAMILIES.index(task["family"])] for task in TASKS}  # task -> its op
TRAIN_TASKS = [task for i, task in enumerate(TASKS) if i % 6 < 4]
HELDOUT_TASKS = [task for i, task in enumerate(TASKS) if i % 6 >= 4]


def function_name(source):
    """Returns the name of the first function that a source defines."""
    return re.search(r"\bdef (\w+)", source)[1]


def randomize_names(task, rng, names=FUNCTION_NAMES):
    """Returns a copy of the task whose function has another name, drawn by rng (a random.Random).

    The new name replaces the old one in the issue and in the source. A name that is a word of the
    source is not drawn, and neither is the current name. task["name"] stays, so FIX_OP and logs
    still know the task. A task of another kind, without a source, is not changed.
    """
    if not isinstance(task, dict) or "source" not in task:
        return copy.copy(task)
    source = task["source"]
    words = source_words(source)
    old = function_name(source)
    new = rng.choice([name for name in names if name not in words])
    return {
        **task,
        "issue": [new if word == old else word for word in task["issue"]],
        "source": re.sub(rf"(?<!\.)\b{old}\b", new, source),    # not the x.old of another object
    }


# ---- Running a source ----------------------------------------------------------------------------
_PASSED = {}            # (source, tests) -> bool. A training run meets only a few hundred of them.


def run_tests(source, tests):
    """Returns True if the function in source passes all tests: pairs (arguments, expected result).

    A source that raises an exception fails, and so does one with a syntax error. The sources of the
    gym only loop over ranges and lists, so they always terminate.
    """
    key = (source, repr(tests))
    if key not in _PASSED:
        _PASSED[key] = passes(source, tests)
    return _PASSED[key]


def passes(source, tests):
    scope = {}
    try:
        exec(source, scope)
        function = scope[function_name(source)]
        for arguments, expected in tests:
            if function(*copy.deepcopy(arguments)) != expected:     # it may change its arguments
                return False
    except Exception:
        return False
    return True


def blind_pass_rate(ops, tasks):
    """Returns the share of tasks that pass their hidden tests after the same ops on each."""
    passed = 0
    for task in tasks:
        source = task["source"]
        for op in ops:
            source = apply_op(source, op)
        if run_tests(source, task["hidden"]):
            passed += 1
    return passed / len(tasks)


# ---- The environments ----------------------------------------------------------------------------
CALLS = ["read", "test", "edit", "submit"]


class BugFixEnv:
    """One episode on one task, with as many edits as there are turns.

    reset() returns the issue as a list of words. step(words) makes one call, uses one turn, and
    returns (the answer as a list of words, done). The calls and their answers:

        read      the current source
        test      pass or fail (visible tests)
        edit OP   ok
        submit    pass or fail (hidden tests), and the episode ends
        anything else: malformed

    Afterwards `passed` says whether the hidden tests passed, `truncated` whether the turns ran out,
    and `edits` lists the ops that were applied. Only a submitted episode is graded. If an episode
    that ran out of turns were graded too, the policy would learn never to submit.
    """

    def __init__(self, task, max_turns=6):
        self.task = task
        self.max_turns = max_turns
        self.reset()

    def reset(self):
        self.source = self.task["source"]
        self.turns = 0
        self.edits = []
        self.done = False
        self.passed = False
        self.truncated = False
        return list(self.task["issue"])

    def step(self, words):
        if self.done:
            raise RuntimeError("this episode is over, call reset() first")
        self.turns += 1
        answer = self.call(list(words))
        if self.turns >= self.max_turns and not self.done:
            self.done = True
            self.truncated = True
            answer = answer + ["truncated"]
        return answer, self.done

    def call(self, words):
        if words == ["read"]:
            return source_words(self.source)
        if words == ["test"]:
            return self.grade("visible")
        if words == ["submit"]:
            answer = self.grade("hidden")
            self.passed = answer == ["pass"]
            self.done = True
            return answer
        if len(words) == 2 and words[0] == "edit" and words[1] in OPS:
            return self.edit(words[1])
        return ["malformed"]

    def grade(self, tests):
        passed = run_tests(self.source, self.task[tests])
        return ["pass"] if passed else ["fail"]

    def edit(self, op):
        # The answer is `ok` whether or not the op changed anything. Otherwise the agent could try
        # edits until one changed something, and would not need to read.
        self.source = apply_op(self.source, op)
        self.edits.append(op)
        return ["ok"]


class EditBudgetEnv(BugFixEnv):
    """BugFixEnv that applies only the first max_edits edits.

    It refuses the others. A refused edit uses a turn and leaves the source unchanged.
    """

    def __init__(self, task, max_edits, max_turns=6):
        self.max_edits = max_edits
        super().__init__(task, max_turns)

    def edit(self, op):
        if len(self.edits) >= self.max_edits:
            return ["refused"]
        return super().edit(op)


# ---- Scripted players ----------------------------------------------------------------------------
# The base agents imitate them. Their calls do not depend on the answers.


def random_play(task, rng):
    """Random calls, with edit and submit twice as likely as read and test. Some never submit."""
    calls = []
    while len(calls) < 6 and calls[-1:] != [["submit"]]:
        kind = rng.choices(CALLS, weights=(2, 2, 4, 4))[0]
        if kind == "edit":
            calls.append(["edit", rng.choice(OPS)])
        else:
            calls.append([kind])
    return calls


def blind_play(task, rng):
    """One or two random edits, then submit. It never looks."""
    n_edits = rng.choice((1, 1, 2))
    return [["edit", rng.choice(OPS)] for _ in range(n_edits)] + [["submit"]]


def oracle_play(task, rng):
    """Read, apply the right op, test, submit."""
    return [["read"], ["edit", FIX_OP[task["name"]]], ["test"], ["submit"]]


PLAYS = {"random": random_play, "blind": blind_play, "oracle": oracle_play}


# ---- Command line --------------------------------------------------------------------------------


def best_blind(n_edits, tasks):
    """The best pass rate over all sequences of n_edits ops, and one sequence that reaches it."""
    sequences = list(itertools.product(OPS, repeat=n_edits))
    rates = [blind_pass_rate(ops, tasks) for ops in sequences]
    return max(rates), sequences[rates.index(max(rates))]


def calls_text(calls):
    return ", ".join(" ".join(call) for call in calls).replace("\n", "\\n")


def transcript(env, calls):
    """Plays the calls in the environment and returns a readable text, with sources as Python."""
    lines = [" ".join(env.reset()) + f"     (repaired by {FIX_OP[env.task['name']]})"]
    for call in calls:
        answer, done = env.step(call)
        if call == ["read"]:
            lines.append("  > read")
            lines += [f"{'':8}{line}" for line in env.source.splitlines()]
        else:
            lines.append(f"  > {calls_text([call]):18} {' '.join(answer)}")
        if done:
            break
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--task", default="leap", choices=FUNCTION_NAMES, metavar="NAME", help="the task to play")
    flag("--ops", nargs="+", choices=OPS, metavar="OP", help="apply at most four ops, and submit")
    args = parser.parse_args()
    if args.ops and len(args.ops) > 4:
        parser.error("argument --ops: at most four fit between read and submit")

    task = TASKS[FUNCTION_NAMES.index(args.task)]
    print(f"task {args.task}, family {task['family']}\n")
    if args.ops:
        edits = [["edit", op] for op in args.ops]
        print(transcript(BugFixEnv(task), [["read"], *edits, ["submit"]]))
        return

    print("the oracle plays in the default gym, with a random name for the function and one edit\n")
    rng = random.Random(0)
    read, fix, *rest = oracle_play(task, rng)
    calls = [read, fix, ["edit", "widen"], *rest]       # with a second edit, which is refused
    print(transcript(EditBudgetEnv(randomize_names(task, rng), max_edits=1), calls))
    print("\nthe best that a player who never looks can do, over all thirty tasks\n")
    print("edits  sequences  pass rate  one of the best")
    for n in range(1, 6):
        best, ops = best_blind(n, TASKS)
        print(f"{n:5}  {len(OPS) ** n:9}  {best:9.2f}  {' '.join(ops)}")


if __name__ == "__main__":
    main()
