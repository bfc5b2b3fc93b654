"""Pages of the documentation site that are made of what labkit's files say, when a build begins.

    generated/api/comm.rst                    the public names of labkit/__init__.pyi, by folder, with their docstrings
    generated/mechanisms/parallel.ddp.rst     a mechanism of docs/mechanisms.md: its docstring, its law, its code
    generated/laws/bytes_sent.rst             a law that a mechanism names: its docstring, its code
    generated/glossary.md                     the words of the course
    generated/claims.md                       what does not hold of what everybody says, by the stored audit

Nothing of it is stored: git ignores the folder.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from badges import ROOT, notebooks, repository
from docstrings import markdown

import labkit
from labkit.course.cards.deck import the_deck
from labkit.course.claims.audit import Result, kept
from labkit.course.claims.claims_picture import amount, asked
from labkit.course.numbers import number_of
from labkit.course.reading.glossary import page as glossary

DOCS = ROOT / "docs"
GENERATED = "generated"
LINK = re.compile(r"\]\((?P<file>[^)\s#:]+)(?P<place>#[^)\s]*)?\)")
TO_CODE = re.compile(r"\]\(\.\./(labkit/[\w/]+\.py)\)")
GROUPS = MappingProxyType(
    {
        "plan": "The planner: models, machines, layouts and schedules as values, and laws over them. Pure Python.",
        "comm": "Groups of ranks, collectives, and the ledger that counts what they send.",
        "parallel": "Strategies: one file each, over a group.",
        "train": "The parts of a training step that one rank does by itself.",
        "probe": "Measuring: memory, time, and one rank of a job that is not there.",
        "launch": "Real processes that run a function.",
        "view": "Pictures of the library's own values.",
        "course": "Exercises, cards, claims, and what this machine can do.",
    }
)
"""What the public names of each folder are for, in the order of the pages."""
OTHER_HOMES = MappingProxyType({"capped": "launch", "rehearsal": "probe"})
"""Modules that lie in no folder, and the page on which their names stand."""
SIGNS = MappingProxyType(
    {"wrong": "✗ Wrong", "holds with conditions": "◐ Holds with conditions", "depends": "± Depends"}
)


class Row(NamedTuple):
    """A row of docs/mechanisms.md: what its files do, their laws, and what they are tested against."""

    name: str
    files: tuple[str, ...]
    laws: tuple[str, ...]
    tested: str


def write(folder: Path) -> None:
    """Make all pages in `folder`. What is there already and has not changed is left alone, so that a second build is
    quick; what is no page any more is removed."""
    made = {folder / name: text for name, text in pages().items()}
    for path, text in made.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")  # another build may be reading
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
    for path in folder.rglob("*.*"):
        if path.suffix in (".md", ".rst") and path not in made and not path.name.startswith("."):
            path.unlink(missing_ok=True)


def pages() -> dict[str, str]:
    """Every generated page by its place in the folder."""
    labs = {number_of(path.name): f"../../notebooks/{path.name}" for path in notebooks()[1:]}
    made = {f"api/{group}.rst": _api(group) for group in GROUPS}
    made["api/index.rst"] = _index("The names of labkit", _directive(
        "Each of these names is had by `import labkit`, and is loaded when it is first used. Editors and type checkers "
        "read them from `labkit/__init__.pyi`."), GROUPS)  # fmt: skip
    for row in rows():
        made |= {f"mechanisms/{_place(file)}.rst": _mechanism(file, row) for file in row.files}
        made |= {f"laws/{_place(law)}.rst": _law(law) for law in row.laws}
    made["laws/index.rst"] = _index("The laws", _directive(
        "What the mechanisms send, hold and wait for, as labkit's planner computes it, without a process."),
        sorted(Path(name).stem for name in made if name.startswith("laws/")))  # fmt: skip
    made["glossary.md"] = glossary(labs)
    made["claims.md"] = _claims(kept().results, kept().made, labs)
    return made


# Links


def relinked(text: str, docname: str) -> str:
    """A page of Markdown with its links to files led to where the site has what they mean: a page of this site, one of
    the course beside it, or else the repository."""
    here = (DOCS / docname).parent
    up = "../" * (docname.count("/") + 1)
    documented = {ROOT / file: f"{GENERATED}/{name}" for file, name in _documented().items()}

    def one(link: re.Match[str]) -> str:
        path, place = Path(os.path.normpath(here / link["file"])), link["place"] or ""
        if not path.exists() or (path.is_relative_to(DOCS) and path.suffix in (".md", ".svg")):
            return link[0]
        if path in documented:
            return f"]({os.path.relpath(DOCS / documented[path], here)})"
        if path in notebooks():
            return f"]({up}{path.stem}.html{place}){{.external}}"  # for the parser, whatever is no page of this site is
        if path == ROOT / "exercises" / "README.md":
            return f"]({up}exercises/index.html{place}){{.external}}"
        return f"]({_address(path.relative_to(ROOT).as_posix(), path.is_dir())}{place})"

    return LINK.sub(one, text)


def contents(docname: str) -> str:
    """What a page of Markdown has below it in the menu: the table of mechanisms has their pages. No code host would
    understand it, so it does not stand in the file."""
    if docname != "mechanisms":
        return ""
    files = [f"{GENERATED}/mechanisms/{_place(file)}" for row in rows() for file in row.files]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *dict.fromkeys(files), "```", ""])


def source_of(domain: str, info: Mapping[str, str]) -> str | None:
    """The address of the lines in which a documented name is written."""
    thing: Any = import_module(info["module"])
    for name in info["fullname"].split("."):
        thing = inspect.getattr_static(thing, name) if inspect.isclass(thing) else getattr(thing, name, None)
    thing = getattr(thing, "fget", None) or getattr(thing, "__func__", None) or getattr(thing, "func", thing)
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(thing))
        path = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").relative_to(ROOT)
    except (TypeError, OSError, ValueError):
        return None
    return f"{_address(path.as_posix())}#L{first}-L{first + len(lines) - 1}"


def _address(path: str, is_folder: bool = False) -> str:
    return f"https://github.com/{repository()}/{'tree' if is_folder else 'blob'}/main/{path}"


# Mechanisms and laws


@cache
def rows() -> tuple[Row, ...]:
    """The table of docs/mechanisms.md."""
    table = [line for line in (DOCS / "mechanisms.md").read_text(encoding="utf-8").splitlines() if TO_CODE.search(line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    return tuple(
        Row(name, tuple(TO_CODE.findall(files)), tuple(TO_CODE.findall(laws)), tested)
        for name, files, laws, tested in cells
    )


def _documented() -> dict[str, str]:
    """{file: its page} of every mechanism and law."""
    mechanisms = {file: f"mechanisms/{_place(file)}.rst" for row in rows() for file in row.files}
    return {law: f"laws/{_place(law)}.rst" for row in rows() for law in row.laws} | mechanisms


def _place(file: str) -> str:
    """labkit/parallel/ddp.py -> parallel.ddp; a law by its own name."""
    path = Path(file)
    return path.stem if path.is_relative_to("labkit/plan") else file.removeprefix("labkit/")[:-3].replace("/", ".")


def _mechanism(file: str, row: Row) -> str:
    laws = ", ".join(f":doc:`/{GENERATED}/laws/{_place(law)}`" for law in row.laws)
    facts = [
        f":Source: `{file} <{_address(file)}>`__",
        *([f":Law: {laws}"] if laws else []),
        *([f":Tested against: {_literal(row.tested)}"] if row.tested else []),
        *([f":Public names: {names}"] if (names := _names_in(file)) else []),
    ]
    return _of_file(file, facts)


def _law(file: str) -> str:
    users = [other for row in rows() if file in row.laws for other in row.files]
    links = ", ".join(f":doc:`/{GENERATED}/mechanisms/{_place(other)}`" for other in users)
    facts = [f":Source: `{file} <{_address(file)}>`__", f":Law of: {links}"]
    return _of_file(file, [*facts, *([f":Public names: {names}"] if (names := _names_in(file)) else [])])


def _names_in(file: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    return ", ".join(f":py:obj:`labkit.{name}`" for home, name in _public() if home == module)


def _of_file(file: str, facts: Sequence[str]) -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    head, first = _head(file)
    code = [f".. literalinclude:: /../{file}", "   :language: python", f"   :lines: {first}-", "   :lineno-match:"]
    count = len(text.splitlines()) - first + 1
    fold = f"<details><summary>{count} lines of {file}</summary>"
    return "\n".join([
        *_title(_name(head), "="), *facts, "", *_directive(head),
        *_title("The code", "-"), *_raw(fold), *code, "", *_raw("</details>"), "",
    ])  # fmt: skip


def _head(file: str) -> tuple[str, int]:
    """The docstring of a module, and the number of the line after it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return ast.get_docstring(tree) or "", (tree.body[0].end_lineno or 0) + 1


def _name(docstring: str) -> str:
    """`Data parallel: the same weights ...` -> `Data parallel`: the title of the page."""
    first = docstring.partition("\n\n")[0].replace("\n", " ").replace("`", "")
    return re.sub(r" \([^)]*\d{4}[^)]*\)", "", re.split(r"[:.] |\.$", first)[0])


# The public names


@cache
def _public() -> tuple[tuple[str, str], ...]:
    """(module, name) of all public names, as labkit/__init__.pyi has them."""
    tree = ast.parse((ROOT / "labkit/__init__.pyi").read_text(encoding="utf-8"))
    imports = [(node.module or "", node.names) for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [(home, alias.name) for home, aliases in imports for alias in aliases if alias.name in labkit.__all__]
    return tuple((f"{home}.{name}" if inspect.ismodule(getattr(labkit, name)) else home, name) for home, name in names)


def _api(group: str) -> str:
    by_module: dict[str, list[str]] = {}
    for module, name in _public():
        folder = module.split(".")[1]
        if OTHER_HOMES.get(folder, folder) == group:
            by_module.setdefault(module, []).append(name)
    parts = [*_title(f"labkit: {group}", "="), GROUPS[group], ""]
    for module, names in by_module.items():
        parts += [*_title(", ".join(names), "-"), *_about(module, names), *_entries(module, names)]
    return "\n".join(parts)


def _about(module: str, names: Sequence[str]) -> list[str]:
    """What stands at the head of the file: names go by it. A mechanism or law has a page that says it."""
    file = f"{module.replace('.', '/')}.py"
    if file in _documented():
        return [f"How it works: :doc:`/{GENERATED}/{_documented()[file].removesuffix('.rst')}`", ""]
    return [] if inspect.ismodule(getattr(labkit, names[0])) else _directive(_head(file)[0])


def _entries(module: str, names: Sequence[str]) -> list[str]:
    entries: list[str] = []
    for name in names:
        thing = getattr(labkit, name)
        if inspect.ismodule(thing):
            entries += [f".. automodule:: {module}", "   :no-inherited-members:", ""]
        else:
            entries += [f".. {'autoclass' if inspect.isclass(thing) else 'autofunction'}:: labkit.{name}", ""]
    return entries


# What everybody says


def _claims(results: Sequence[Result], made: Mapping[str, str], labs: Mapping[str, str]) -> str:
    shown = [result for result in results if result.finding.verdict in SIGNS]
    counts = Counter(result.finding.verdict for result in results)
    origin = f"{made['date']}, torch {made['torch']}, {made['machine']}"
    parts = [
        "---\ntocdepth: 2\n---\n\n# What is wrong in what everybody says\n",
        f"labkit has put {len(results)} claims to the test that are often repeated about distributed training: "
        f"{counts['wrong']} are wrong, {counts['holds with conditions']} hold under conditions only, and for "
        f"{counts['depends']} it depends. These stand here with their numbers; the others hold, or nothing could be "
        f"shown. `labkit claims c12` runs the test of one again. The results are of {origin}.\n",
    ]
    where = _labs_by_claim()
    for topic in dict.fromkeys(result.claim.topic for result in shown):
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n")
        parts += [_claim(result, labs, where) for result in shown if result.claim.topic == topic]
    return "\n".join(parts)


def _claim(result: Result, labs: Mapping[str, str], where: Mapping[str, Sequence[str]]) -> str:
    row, finding = result.claim, result.finding
    conditions = f" Condition: {_escaped(finding.premise)}." if finding.premise else ""
    numbers = where.get(row.id, ("17",))
    links = ", ".join(f"[lab {number}]({labs[number]})" for number in numbers)
    links += f"; [said or asked here]({row.address})" if row.address else ""
    table = ["| | where | the claim says | found | |", "|---|---|---|---|---|"]
    table += [
        f"| {'✓' if setting.holds else '✗'} | {_escaped(setting.name)} | {_escaped(asked(setting))} "
        f"| {_escaped(amount(setting.truth, setting.unit))} | {'measured' if setting.measured else 'computed'} |"
        for setting in finding.settings
    ]
    truth = result.truth[0].upper() + result.truth[1:]
    return (
        f"### “{_escaped(row.claim)}”\n\n**{SIGNS[finding.verdict]}.** {_escaped(truth.rstrip('.'))}.{conditions} "
        f"({row.id}; {links})\n\n" + "\n".join(table) + "\n"
    )


@cache
def _labs_by_claim() -> Mapping[str, tuple[str, ...]]:
    """The labs whose cells show what a claim is about, by the cards that have it as their proof."""
    labs: dict[str, set[str]] = {}
    for card in the_deck():
        for proof in card.proofs:
            labs.setdefault(proof, set()).update(re.split("[-·]", cell)[0] for cell in card.lab)
    return MappingProxyType({claim: tuple(sorted(numbers)) for claim, numbers in labs.items() if numbers})


# reStructuredText and Markdown


def _title(text: str, sign: str) -> list[str]:
    return [text, sign * len(text), ""]


def _directive(docstring: str) -> list[str]:
    return [".. markdown::", "", *(f"   {line}".rstrip() for line in markdown(docstring).splitlines()), ""]


def _raw(html: str) -> list[str]:
    return [".. raw:: html", "", f"   {html}", ""]


def _index(title: str, opening: Sequence[str], names: Iterable[str]) -> str:
    toctree = [".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in names if name != "index"), ""]
    return "\n".join([*_title(title, "="), *opening, *toctree])


def _literal(text: str) -> str:
    """Code of Markdown as code of reStructuredText."""
    return re.sub(r"`([^`]+)`", r"``\1``", text)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", text)
