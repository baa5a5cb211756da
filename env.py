"""The BugFix gym: thirty short Python functions with one bug each, and an environment to repair them in.

Read this file first. It needs the standard library only. An episode is one attempt at one task: the agent is
told which function is wrong and has six turns. In each turn it makes one call, to read the source, to edit it
with one of five repair ops, to run the visible tests, or to submit. A submitted source is graded by hidden
tests. A sample episode, with the agent's calls after the ">":

    issue : leap is wrong
      > read               def leap ( n ) : \\n if n % 4 == 0 or n % 100 != 0 : return 1 \\n return 0
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
import signal

# ---- Repair ops --------------------------------------------------------------------------------------------
# An op rewrites every place in the source that its pattern matches, whether that place is wrong or not. Two
# pairs of ops undo each other (or_to_and / and_to_or and div_to_mod / mod_to_div), and the last one wins. So
# a fixed sequence repairs the wrong_or or the wrong_and tasks, never both, and wrong_div or wrong_mod.
# An agent that never looks repairs at most 60% of the tasks, and 20% if it has one edit.
REWRITES = {
    "or_to_and":  (r"\bor\b", "and"),
    "and_to_or":  (r"\band\b", "or"),
    "div_to_mod": (r"//", "%"),
    "mod_to_div": (r"%", "//"),
    "widen":      (r"\brange\((\w+, )?([a-z])\)", r"range(\1\2 + 1)"),     # range(1, n) -> range(1, n + 1)
}
OPS = list(REWRITES)
FAMILIES = ["wrong_or", "wrong_and", "wrong_div", "wrong_mod", "short_range"]    # OPS[i] repairs FAMILIES[i]

def apply_op(source, op):
    """Returns the source (a string) after one op. An unknown op is a ValueError that names it."""
    if op not in REWRITES:
        raise ValueError(f"op: {op!r} is unknown, allowed are {', '.join(OPS)}")
    pattern, replacement = REWRITES[op]
    return re.sub(pattern, replacement, source)

def source_words(source):
    """Returns the source as the list of words that an agent reads. A line break is the word '\\n'.

    Indentation is left out. The sources are so short that it tells nothing.
    """
    return re.findall(r"\w+|//|[=!<>*+]=|\n|[^\w\s]", source)

# ---- Tasks -------------------------------------------------------------------------------------------------
# Each family has six tasks: four to train on, then two that are held out. The bug can be told from the source
# alone. Most bugs break a rule of Python or of arithmetic, a few go against what such code is usually for:
#
#   wrong_or     `lo < x or x < hi` is true for every x
#   wrong_and    `x == a and x == b` is almost never true, and `len(xs) and 1` is no default value
#   wrong_div    `n // 2 == 0` asks for a remainder, and so does an index that should wrap around
#   wrong_mod    the sum modulo the length is not a mean
#   short_range  range(1, n) leaves out n
#
# Looking for one word (or, and, //, %, range) is not enough. In sixteen sources another of these words is
# correct, and the op for it would break the source. `leap` has a right % beside its wrong `or`.
# A test is a pair (arguments, expected result). The agent's `test` call runs the visible tests, which for
# eight tasks are so weak that they pass on the buggy source. The hidden tests grade the episode.
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
FUNCTION_NAMES = [task["name"] for task in TASKS]
FIX_OP = {task["name"]: OPS[FAMILIES.index(task["family"])] for task in TASKS}   # task name -> its repair op
for _task in TASKS:
    _task["issue"] = ["issue", ":", _task["name"], "is", "wrong"]
TRAIN_TASKS = [task for i, task in enumerate(TASKS) if i % 6 < 4]
HELDOUT_TASKS = [task for i, task in enumerate(TASKS) if i % 6 >= 4]

def randomize_names(task, rng, names=FUNCTION_NAMES):
    """Returns a copy of the task whose function has another name, drawn from names by rng (random.Random).

    The new name replaces the old one in the issue and in the source. A name that is a word of the source is
    not drawn, and neither is the present name. task["name"] stays, so FIX_OP and logs still know the task.
    """
    old, words = task["issue"][2], source_words(task["source"])
    new = rng.choice([name for name in names if name not in words])
    return {**task, "issue": [new if word == old else word for word in task["issue"]],
            "source": re.sub(rf"\b{old}\b", new, task["source"])}

# ---- Running a source --------------------------------------------------------------------------------------
BUILTINS = {f.__name__: f for f in (len, range, sum)}        # all that a source can use
_PASSED = {}                                                 # (source, tests) -> bool, filled by run_tests

def run_tests(source, tests):
    """Returns True if the function in source passes all tests, a list of (arguments, expected result).

    A source that raises an exception fails, and so does one with a syntax error. Every source terminates,
    since it loops over ranges and lists only. Whether it passes does not depend on its function's name, so
    results are remembered under one common name. After the first training steps nothing is executed any more.
    """
    name = re.match(r"def (\w+)", source)[1]
    key = (re.sub(rf"\b{name}\b", "f", source), repr(tests))
    if key not in _PASSED:
        try:
            scope = {"__builtins__": BUILTINS}
            exec(key[0], scope)
            _PASSED[key] = all(scope["f"](*copy.deepcopy(arguments)) == result for arguments, result in tests)
        except Exception:
            _PASSED[key] = False
    return _PASSED[key]

def blind_pass_rate(ops, tasks):
    """Returns the share of tasks that pass their hidden tests after the same sequence of ops on each."""
    passed = 0
    for task in tasks:
        source = task["source"]
        for op in ops:
            source = apply_op(source, op)
        passed += run_tests(source, task["hidden"])
    return passed / len(tasks)

# ---- The environments --------------------------------------------------------------------------------------
CALLS = ["read", "test", "edit", "submit"]

class BugFixEnv:
    """One episode on one task, with as many edits as there are turns.

    reset() returns the issue as a list of words. step(words) makes one call, uses one turn, and returns
    (the answer as a list of words, done). The calls and their answers:

        read      the present source
        test      pass or fail (visible tests)
        edit OP   ok
        submit    pass or fail (hidden tests), and the episode ends
        anything else: malformed

    Afterwards `passed` says whether the hidden tests passed, `truncated` whether the turns ran out, `edits`
    lists the ops that were applied. Only a submitted episode is graded. If an episode that ran out of turns
    were graded too, the policy would learn never to submit.
    """

    def __init__(self, task, max_turns=6):
        self.task, self.max_turns = task, max_turns
        self.reset()

    def reset(self):
        self.source = self.task["source"]
        self.turns, self.edits = 0, []
        self.done = self.truncated = self.passed = False
        return list(self.task["issue"])

    def step(self, words):
        if self.done:
            raise RuntimeError(f"the episode on {self.task['name']!r} is over, call reset() first")
        words = list(words)
        self.turns += 1
        if words == ["read"]:
            answer = source_words(self.source)
        elif words == ["test"]:
            answer = ["pass" if run_tests(self.source, self.task["visible"]) else "fail"]
        elif words == ["submit"]:
            self.done, self.passed = True, run_tests(self.source, self.task["hidden"])
            answer = ["pass" if self.passed else "fail"]
        elif len(words) == 2 and words[0] == "edit" and words[1] in REWRITES:
            answer = self.edit(words[1])
        else:
            answer = ["malformed"]
        if self.turns >= self.max_turns and not self.done:
            self.done = self.truncated = True
            answer = answer + ["truncated"]
        return answer, self.done

    def edit(self, op):
        # The answer is `ok` whether or not the op changed anything. Otherwise the agent could try edits until
        # one changed something, and would not need to read.
        self.source = apply_op(self.source, op)
        self.edits.append(op)
        return ["ok"]

class EditBudgetEnv(BugFixEnv):
    """BugFixEnv that applies only the first max_edits edits. It refuses the others: they use a turn and
    leave the source unchanged."""

    def __init__(self, task, max_edits, max_turns=6):
        self.max_edits = max_edits
        super().__init__(task, max_turns)

    def edit(self, op):
        return super().edit(op) if len(self.edits) < self.max_edits else ["refused"]

# ---- Scripted players, whose play the base agents imitate. Their calls do not depend on the answers. -------
def random_play(task, rng):
    """Random calls, with edit and submit twice as likely as read and test. It may run out of turns."""
    calls = []
    while len(calls) < 6 and calls[-1:] != [["submit"]]:
        kind = rng.choices(CALLS, weights=(2, 2, 4, 4))[0]
        calls.append(["edit", rng.choice(OPS)] if kind == "edit" else [kind])
    return calls

def blind_play(task, rng):
    """One or two random edits, then submit. It never looks."""
    return [["edit", rng.choice(OPS)] for _ in range(rng.choice((1, 1, 2)))] + [["submit"]]

def oracle_play(task, rng):
    """Read, apply the right op, test, submit."""
    return [["read"], ["edit", FIX_OP[task["name"]]], ["test"], ["submit"]]

PLAYS = {"random": random_play, "blind": blind_play, "oracle": oracle_play}

# ---- Command line ------------------------------------------------------------------------------------------
def best_blind(n_edits, tasks):
    """Returns the best pass rate over all 5^n_edits sequences of ops, and the sequences that reach it."""
    rates = {ops: blind_pass_rate(ops, tasks) for ops in itertools.product(OPS, repeat=n_edits)}
    best = max(rates.values())
    return best, [ops for ops in rates if rates[ops] == best]

def calls_text(calls):
    return ", ".join(" ".join(call) for call in calls).replace("\n", "\\n")

def transcript(env, calls):
    """Plays the calls in the environment and returns a readable text, with sources as Python."""
    lines = [" ".join(env.reset())]
    for call in calls:
        answer, done = env.step(call)
        said = "\n" + "\n".join(f"{'':8}{line}" for line in env.source.splitlines())
        lines.append(f"  > {calls_text([call]):18} {said if call == ['read'] else ' '.join(answer)}")
        if done:
            break
    return "\n".join(lines)

def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="leap", choices=FUNCTION_NAMES, metavar="NAME",
                        help="the task to play")
    parser.add_argument("--ops", nargs="*", choices=OPS, metavar="OP",
                        help="apply these ops to the task and submit, and play nothing else")
    args = parser.parse_args()
    if len(args.ops or []) > 4:
        parser.error(f"argument --ops: {len(args.ops)} ops given, at most 4 fit between read and submit")
    task = TASKS[FUNCTION_NAMES.index(args.task)]
    print(f"task {args.task}, family {task['family']}, repaired by {FIX_OP[args.task]}\n")
    if args.ops is not None:
        print(transcript(BugFixEnv(task), [["read"], *(["edit", op] for op in args.ops), ["submit"]]))
        return
    print("the oracle plays in the default gym, with a random name for the function and one edit\n")
    rng = random.Random(0)
    read, fix, *rest = oracle_play(task, rng)
    calls = [read, fix, ["edit", "widen"], *rest]           # with a second edit, to show that it is refused
    print(transcript(EditBudgetEnv(randomize_names(task, rng), max_edits=1), calls))
    print("\nthe best that a player who never looks can do, over all thirty tasks\n")
    print("edits  sequences  pass rate  one of the best")
    for n in range(1, 6):
        best, sequences = best_blind(n, TASKS)
        print(f"{n:5}  {len(OPS) ** n:9}  {best:9.2f}  {' '.join(sequences[0])}")

if __name__ == "__main__":
    for name in ("SIGINT", "SIGPIPE"):          # Ctrl-C and a closed pipe end the script without a traceback
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    main()
