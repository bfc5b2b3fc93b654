"""How good the checks of the exercises are: references, changed automatically in one place, are judged as attempts.

    python benchmarks/mutation.py [--each 6] [--only 03.2] [--seed 0] [--json PATH]

Operators are those of Cosmic Ray (arithmetic, comparisons, numbers, booleans, loops). A mutant is killed if a verdict
is broken. One that survives is a hole in the check, or does the same as the reference: `EQUIVALENT` says why for each
that has been looked at, by a piece of its changed line.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import random
import time
from collections import Counter
from typing import Any

import machine
from cosmic_ray import mutating, plugins
from rich.console import Console
from rich.progress import track
from rich.table import Table

from labkit.course.exercises.catalogue import problem, problems
from labkit.course.exercises.problem import Problem
from labkit.course.judge.judge import judge

KINDS = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_Add", "Mod_FloorDiv", "Pow_Mul",
    "ReplaceComparisonOperator", "NumberReplacer", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr",
    "ReplaceOrWithAnd", "AddNot", "ZeroIterationForLoop", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
    "ReplaceUnaryOperator", "RemoveDecorator",
)  # fmt: skip
EQUIVALENT = {
    ("", "strict=False"): "both sides always have the same length",
    ("00.2", "for each in []"): "x does not change, and a message that was handed over arrives",
    ("00.2", "is not group.rank"): "Python has one object for each small number",
    ("00.3", "manual_seed("): "any seeds serve that differ between ranks and from the shared one",
    ("02.4", "called[ -1]"): "all are equal to the first just when all are equal to the last",
    ("04.5", "len(places) + 2"): "there is no set of more places than there are",
    ("05.4", '"max") != 0'): "a flag is 0 or 1",
    ("06.7", "index_add( -1"): "of one dim the last is the first",
    ("07.6", "micro != 0"): "micro is never negative",
    ("07.7", "norm >= max_norm"): "where both are equal, the factor is 1",
    ("08.2", "resize_( 1)"): "frees all but one byte",
    ("08.4", "i + 1 != len(shards)"): "i + 1 is never more than the length",
    ("11.1", "linear.in_features*0.5"): "any start of A serves, since B begins at zero",
    ("11.1", "linear.in_features** 1.5"): "any start of A serves, since B begins at zero",
    ("14.1", "stage >= pp - 1"): "there is no stage behind the last",
    ("15.1", "call is not most"): "equal words of one input are one object once they have travelled",
    ("15.3", "max(floors) < 1.02"): "no curve comes so near to 2%, which the exercise says",
    ("15.5", "most_common(1)[ -1]"): "the last of one is the first",
    ("15.5", "most_common( 2)[0]"): "the first of two is the first of one",
    ("15.4", "default= 0"): "where every step is skipped, more than one in ten is",
    ("15.7", "torch.zeros( 2)"): "two numbers of 4 bytes cost what one of 8 does, which the law allows",
    ("15.7", "stop[ -1]"): "the last of one number is the first",
    ("15.7", "source=0)[ -1]"): "the last of one number is the first",
    ("16.2", "zero <= 0"): "there is no stage of ZeRO below 0",
}


def mutants(it: Problem, each: int, seed: int) -> list[tuple[str, str]]:
    """(operator, program) of up to `each` different mutants of the reference's body, spread over the operators."""
    found: dict[str, str] = {}
    for name in plugins.operator_names():
        if any(kind in name for kind in KINDS):
            for occurrence in range(50):
                text = mutating.mutate_code(it.solution, plugins.get_operator(name)(), occurrence)
                if text is None:
                    break
                if text != it.solution and parses(text) and bodies(text) != bodies(it.solution):
                    found.setdefault(text, name.split("/")[1])
    chosen = sorted((name, text) for text, name in found.items())
    random.Random(f"{seed} {it.key}").shuffle(chosen)
    return chosen[:each]


def parses(text: str) -> bool:
    """Whether a program is one."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def bodies(text: str) -> list[str]:
    """What a program does, without signatures (an annotation that is changed changes nothing)."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [ast.unparse(part) for node in found for part in node.body]


def change(it: Problem, text: str) -> str:
    """The lines that are other than in the reference."""
    lines = difflib.ndiff(it.solution.splitlines(), text.splitlines())
    return " -> ".join(line[2:].strip() for line in lines if line.startswith(("- ", "+ ")))


def why_equivalent(key: str, changed: str) -> str:
    """Why a mutant that survives does what the reference does; "" if nobody has said so."""
    new = changed.split(" -> ")[-1]
    return next((why for (known, piece), why in EQUIVALENT.items() if known in (key, "") and piece in new), "")


def main() -> None:
    """Judge them all, and show who killed whom."""
    options = machine.options(__doc__, each=6, only="", seed=0)
    chosen = (problem(options.only),) if options.only else problems()
    todo = [(it, name, text) for it in chosen for name, text in mutants(it, options.each, options.seed)]
    by_verdict: Counter[str] = Counter()
    survivors: list[dict[str, Any]] = []
    began = time.perf_counter()
    for it, name, text in track(todo, description=f"{len(todo)} mutants"):
        report = judge(dataclasses.replace(it, mutants=()), text)  # nobody asks for the likely cause
        if report.broken is not None:
            by_verdict[report.broken.name] += 1
            continue
        changed = change(it, text)
        survivors.append({"key": it.key, "operator": name, "change": changed, "why": why_equivalent(it.key, changed)})
    holes = [each for each in survivors if not each["why"]]
    table = Table(title=f"{len(todo)} mutants of {len(chosen)} references in {time.perf_counter() - began:.0f} s")
    for column in ("", "mutants"):
        table.add_column(column)
    for verdict, count in by_verdict.most_common():
        table.add_row(f"killed by {verdict}", str(count))
    table.add_row("survive, equivalent", str(len(survivors) - len(holes)))
    table.add_row("survive, not explained", str(len(holes)))
    Console().print(table)
    for each in survivors:
        words = f"{each['key']} {each['change']}\n    {each['why'] or 'NOT EXPLAINED'}"
        Console().print(words, highlight=False, markup=False)
    killed = sum(by_verdict.values())
    print(f"{killed} of {killed + len(holes)} that can be told from the reference are killed")
    if options.json:
        found = {"mutants": len(todo), "killed": killed, "by_verdict": dict(by_verdict), "survivors": survivors}
        machine.write(options.json, found)


if __name__ == "__main__":
    main()
