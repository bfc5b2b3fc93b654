"""Programs in few columns: docstrings and signatures of a reference, so that no line of a stub runs off its cell.

    \"\"\"The sum of x over all ranks, cut along dim 0; this rank keeps part `group.rank`.   [n*k, d] -> [k, d]\"\"\"

    \"\"\"The sum of x over all ranks, cut along dim 0; this rank keeps part
    `group.rank`.   [n*k, d] -> [k, d]\"\"\"

References are written in 120 columns, as all of labkit is. A cell of JupyterLab shows 81 of them where its window is
1,080 pixels wide and has its side bar open.
"""

from __future__ import annotations

import ast
import re

COLUMNS = 80
ROW = re.compile(r" *\S+(?: \S+)*(?<![.;:]) {2,}(?![\[-])(?=\S)")
"""The name of a table's row and the gap of two or more spaces behind it, as in `"rank"    who it is`. A gap before a
shape, `[n] -> [n]`, begins no row."""
ITEM = re.compile(r" *- ")
KEPT = re.compile(r"\[[^\[\]]*\](?: -> \[[^\[\]]*\])*|`[^`]{1,30}`")
"""Shapes and `names`, which are never broken over two lines."""


def narrow(source: str, columns: int = COLUMNS) -> str:
    """A program with its docstrings filled, and its signatures laid out, to so many columns; the same program.

    Only paragraphs and signatures with a line that is too long are touched. Longer lines of code stay as they are."""
    lines, tree = source.splitlines(), ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        first = node.body[0]
        if ast.get_docstring(node) and first.lineno > node.lineno:
            lines[first.lineno - 1 : first.end_lineno] = _filled(lines[first.lineno - 1 : first.end_lineno], columns)
        head = lines[node.lineno - 1 : first.lineno - 1]
        if isinstance(node, ast.FunctionDef) and any(len(line) > columns for line in head):
            lines[node.lineno - 1 : first.lineno - 1] = _laid_out(head, columns)
    return "\n".join(lines) + "\n" * source.endswith("\n")


def _filled(lines: list[str], columns: int) -> list[str]:
    """The lines of a docstring, its paragraphs and rows filled where one of their lines is too long."""
    out: list[str] = []
    for block in _blocks(lines):
        if max(map(len, block)) <= columns:
            out += block
            continue
        start, hang, first = _indent(block[0]), _hang(block[0]), block[0].strip()
        if hang > columns // 2:  # a name that takes half of the line has its words below it
            out.append(block[0][:hang].rstrip())
            start, hang, first = start + 4, start + 4, block[0][hang:]
        out += _lines_of(" ".join([first, *(line.strip() for line in block[1:])]), start, hang, columns)
    return out


def _blocks(lines: list[str]) -> list[list[str]]:
    """Groups of lines that are filled together: paragraphs, items of lists, and rows of tables, the last two with the
    lines that continue them."""
    blocks: list[list[str]] = []
    for line in lines:
        above = blocks[-1][0] if blocks else ""
        begins = not line.strip() or not above.strip() or _hang(line) != _indent(line)
        if begins or _indent(line) != _hang(above):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return blocks


def _hang(line: str) -> int:
    """The column at which the words of this line begin, behind a row's name or a list's dash. The next line of the same
    row or item begins there too."""
    begun = ROW.match(line) or ITEM.match(line)
    return begun.end() if begun else _indent(line)


def _lines_of(words: str, start: int, hang: int, columns: int) -> list[str]:
    """Words broken into lines, the first indented by `start`, the others by `hang`. Gaps of several spaces stay, except
    at the end of a line."""
    text = KEPT.sub(lambda match: match[0].replace(" ", "\0"), words)
    parts = re.split(r"( +)", text)
    out, line = [], " " * start + parts[0]
    for gap, word in zip(parts[1::2], parts[2::2], strict=True):
        if len(line) + len(gap) + len(word) <= columns:
            line += gap + word
        else:
            out.append(line)
            line = " " * hang + word
    return [done.replace("\0", " ") for done in [*out, line]]


def _laid_out(head: list[str], columns: int) -> list[str]:
    """A signature with all its arguments on a line of their own, or, if they do not fit, a line for each."""
    margin, text = " " * _indent(head[0]), " ".join(line.strip() for line in head)
    opened = text.index("(")
    commas, depth, closed = [opened], 0, opened
    for place, letter in enumerate(text[opened:], opened):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 1:
            commas.append(place)
        if depth == 0:
            closed = place
            break
    ends = zip(commas, [*commas[1:], closed], strict=True)
    arguments = [argument for a, b in ends if (argument := text[a + 1 : b].strip())]
    together = f"{margin}    {', '.join(arguments)}"
    rows = [together] if len(together) <= columns else [f"{margin}    {argument}," for argument in arguments]
    return [margin + text[: opened + 1], *rows, margin + text[closed:]]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
