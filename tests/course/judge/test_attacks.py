"""People who try hard: every way that we know of getting a green check without doing the exercise, or of doing harm.

Each attack is a whole attempt. None may pass, none may leave anything behind, and each gets a sentence.
"""

from __future__ import annotations

import textwrap
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from labkit.comm.message import code_of
from labkit.course.exercises.catalogue import problem
from labkit.course.judge.answer_bytes import packed, unpacked
from labkit.course.judge.case_run import run_case
from labkit.course.judge.judge import judge, unfit
from labkit.course.judge.judge_wire import ATTEMPT, ring_bytes
from labkit.course.judge.sandboxed_rank import Program, Weight
from labkit.course.judge.static_check import refusals
from labkit.course.judge.verdicts import verdicts
from tests.cases import cases

pytestmark = pytest.mark.slow  # processes of torch's size, some of which must hang first

SCATTER = "def ring_reduce_scatter(x, group):\n"

READ_BEFORE_IT_RUNS = {
    "a file is read": SCATTER + "    return open('/etc/passwd').read()",
    "an import of os": SCATTER + "    import os\n    os.system('true')",
    "an import under another name": SCATTER + "    import subprocess as math\n    return math.run(['true'])",
    "importlib": SCATTER + "    import importlib\n    return importlib.import_module('os')",
    "the library does it": "from labkit import ring\n" + SCATTER + "    return ring.reduce_scatter(x, group)",
    "a part of the library does it": "import labkit.comm.ring\n" + SCATTER + "    return 1",
    "torch.distributed does it": SCATTER + "    import torch\n    torch.distributed.all_reduce(x)",
    "the wire itself": SCATTER + "    group.wire._line.tell('mark', 'x', 0)",
    "underscores": SCATTER + "    return ().__class__.__base__.__subclasses__()",
    "getattr with a word": SCATTER + "    return getattr(group, 'wi' + 're')",
    "operator.attrgetter": "import operator\n" + SCATTER + "    return operator.attrgetter('wire')(group)",
    "eval": SCATTER + "    return eval('group.wi' + 're')",
    "exec": SCATTER + "    exec('import os')",
    "torch's own os": SCATTER + "    import torch\n    return torch.os.listdir('/')",
    "torch.hub": SCATTER + "    import torch\n    torch.hub.load('a', 'b')",
    "a file of torch": SCATTER + "    import torch\n    torch.save(x, 'left_behind')",
    "shared memory": SCATTER + "    x.share_memory_()",
    "the library is changed": SCATTER + "    import torch\n    torch.equal = lambda a, b: True",
    "the group is changed": SCATTER + "    group.send = None",
    "globals": "kept = 1\n" + SCATTER + "    global kept\n    kept = x",
    "frames": SCATTER + "    import sys\n    return sys._getframe(1).f_globals",
    "a class of one's own that lies about tensors": "import torch\nclass Liar(torch.Tensor):\n    @classmethod\n"
    "    def __torch_function__(cls, f, t, a=(), k=None):\n        return 1\n" + SCATTER + "    return x",
    "a hint that is a program": "import typing\nclass A:\n    a: \"__import__('os')\"\n" + SCATTER
    + "    return typing.get_type_hints(A)",
    "what torch has imported": "from torch import sys as s\n" + SCATTER + "    return s.modules",
    "what the standard library has imported": "from random import _os\n" + SCATTER + "    return _os",
    "builtins under another name": "import enum\n" + SCATTER + "    return enum.bltns.getattr(group, 'wi' + 're')",
    "the same, by an import": "from enum import bltns\n" + SCATTER + "    return bltns.open('/etc/passwd')",
    "a module in a module in a module": "import dataclasses\n" + SCATTER + "    return dataclasses.re.enum",
    "json, through torch": SCATTER + "    import torch\n    return torch.autograd.profiler_util.json.codecs",
    "attributes that are copied by name, into a property": "import functools\nkept = []\n\n\nclass Taker:\n"
    "    wire = property(None, lambda self, it: kept.append(it))\n\n\n" + SCATTER
    + "    functools.update_wrapper(Taker(), group, assigned=('wire',), updated=())\n    return kept[0]",
    "a pattern that looks into the group": SCATTER
    + "    match group:\n        case object(wire=w):\n            return w",
    "a pattern by place": "from labkit import Group\n" + SCATTER
    + "    match group:\n        case Group(a, b, c, w):\n            return w",
    "self is torch": "def look(self):\n    return self.sys\n" + SCATTER + "    import torch\n    return look(torch)",
    "self is a tensor": "def look(self):\n    return self._typed_storage()\n" + SCATTER + "    return look(x)",
    "a class changed through an object": SCATTER + "    type(x).add_ = type(x).sub_\n    return x",
    "a field that a dataclass compares": "import dataclasses\n\n\n@dataclasses.dataclass\nclass Look:\n"
    "    wire: object\n\n\n" + SCATTER + "    return Look(x) == group",
    "a comparison that is handed something else": SCATTER + "    return Exception.__eq__(group, x)",
    "a class from its parts": SCATTER + "    return type('A', (), {})",
    "a kind of class, by abc": "import abc\n\n\nclass Kind(abc.ABCMeta):\n    pass\n\n\n" + SCATTER + "    return x",
    "a kind of class, by enum": "from enum import EnumMeta\n" + SCATTER + "    return x",
    "the same, by its newer name": "from enum import EnumType\n" + SCATTER + "    return x",
    "torch casts by itself": SCATTER + "    import torch\n    with torch.amp.autocast('cpu'):\n        return x @ x",
    "numbers in eight bits": SCATTER + "    import torch\n    return torch.ao.nn.quantized.Quantize(1, 0, x.dtype)",
    "the same, by its older name": "from torch import quantization\n" + SCATTER + "    return x",
    "another group of the same wire": SCATTER + "    return group.parent.along(group, 'x', (0,), 0)",
    "a class that is made by its name": SCATTER + "    make = type(int)\n    return make('A', (), {'__hash__': None})",
    "a path in a format": SCATTER + "    return '{0.wire}'.format(group)",
    "a verb through the class": "from labkit import Group\n" + SCATTER + "    return Group.all_gather(group, x)",
    "another group": "from labkit import Group\n" + SCATTER + "    return Group('x', (0,), 0, None, {})",
    "the tap, by another name": SCATTER + "    g = group\n    g.tap = None\n    return x",
    "the ledger, by another name": SCATTER + "    ledger = group.ledger\n    ledger.keep = None\n    return x",
    "a class that is patched and put back": SCATTER + "    K = type(group.ledger)\n    K.keep = None\n    return x",
    "an answer that is worked out when it is looked at": SCATTER + "    return x.as_subclass(type(x))",
    "torch's own scaler": SCATTER + "    import torch\n    return torch.GradScaler('cpu').scale(x)",
    "memory whose bytes nobody can count": SCATTER + "    import torch as t\n"
    "    return t.quantize_per_channel(x, x.new_ones(1), x.new_zeros(1), 0, t.qint8)",
    "memory that has no storage": SCATTER + "    return x.to_mkldnn()",
    "numbers as text": SCATTER + "    import torch\n    torch.set_printoptions(profile='full')\n    return repr(x)",
    "numbers taken out by a function": SCATTER + "    kept = []\n    x.apply_(lambda v: kept.append(v) or v)",
    "numbers hidden in a generator's state": SCATTER + "    import torch\n    torch.set_rng_state(x.byte())",
    "star import": "from torch import *\n" + SCATTER + "    return x",
    "not Python": SCATTER + "    return (",
    "another signature": "def ring_reduce_scatter(x):\n    return x",
    "another name": "def reduce_scatter_ring(x, group):\n    return x",
    "no function": "ring_reduce_scatter = 5",
    "a class, not a function": "class ring_reduce_scatter:\n    def __init__(self, x, group):\n        self.x = x",
}  # fmt: skip


@cases("name", READ_BEFORE_IT_RUNS)
def test_is_refused_before_anything_runs(name: str) -> None:
    """What reaches round an exercise, in the text."""
    report = judge(problem("03.2"), READ_BEFORE_IT_RUNS[name])
    assert report.broken is not None
    assert report.broken.name == "rules"
    assert report.broken.seen
    assert report.n_cases == 0


@cases("words", ("self.kept = params[0].tolist()", "self.kept = params[0].detach().numpy()", "import numpy"))
def test_numbers_may_leave_their_tensors_only_where_memory_is_no_topic(words: str) -> None:
    """State that is kept in lists, or in NumPy, in an exercise that counts the bytes of tensors."""
    for key, head in (("07.2", "self.params, self.group = params, group"), ("06.1", "self.params, self.group = ")):
        it = problem(key)
        assert head in it.solution
        verdict = unfit(it, it.solution.replace(head, f"{words}\n        {head}", 1))
        assert (verdict is None) == (key == "06.1"), verdict


SLIPS_THROUGH = {
    "reads nothing, but asks the system": SCATTER + "    __import__('os').system('touch left_behind')",
    "writes with torch": SCATTER + "    import torch\n    torch.save(x, 'left_behind')",
    "removes a file": SCATTER + "    import os\n    os.remove('precious')",
    "patches torch": SCATTER + "    import torch\n    torch.Tensor.add_ = torch.Tensor.sub_\n"
    "    return group.reduce_scatter(x)",
    "patches what a probe says": SCATTER + "    import labkit\n    from labkit import Group\n"
    "    t = type(group.ledger)\n    t.sent_bytes = lambda self: 0\n    return group.reduce_scatter(x)",
    "replaces a property": SCATTER + "    group.__class__.size = property(lambda self: 1)\n    return x",
    "looks into other objects": SCATTER + "    import gc\n    return len(gc.get_objects())",
    "makes a kind of tensor": SCATTER + "    import torch\n    class Later(torch.Tensor):\n        pass\n    return x",
    "makes a kind of tensor by an alias": SCATTER
    + "    import torch\n    class Later(type(list[int])(torch.Tensor, (int,))):\n        pass\n    return x",
    "calls a builtin by the name of somebody's variable": "def named(getattr):\n    return getattr\n\n\n"
    + SCATTER
    + "    getattr(group, 'wi' + 're')\n    return x",
    "makes a kind of class": SCATTER + "    class Kind(type):\n        pass\n    return x",
    "makes a class by name": SCATTER + "    type('A', (), {})\n    return x",
    "asks what a class is": SCATTER + "    type(int)\n    return x",
    "asks what a group is": SCATTER + "    type(group)\n    return x",
    "changes a class and puts it back": SCATTER + "    kind, = [group.ledger.__class__]\n    old = kind.keep\n"
    "    kind.keep = lambda self, message: message\n    y = group.reduce_scatter(x)\n    kind.keep = old\n    return y",
    "changes tensors and puts them back": SCATTER + "    kind = x.__class__\n    old = kind.layout\n"
    "    kind.layout = None\n    y = group.reduce_scatter(x)\n    kind.layout = old\n    return y",
    "takes off the tap": SCATTER + "    group.tap = None\n    return group.reduce_scatter(x)",
    "listens to the pipe": SCATTER + "    group.wire._line.tell = print\n    return group.reduce_scatter(x)",
    "copies the group, to see what is in it": "seen = {}\n" + SCATTER + "    import copy\n    try:\n"
    "        copy.deepcopy(group, seen)\n    except TypeError:\n        pass\n"
    "    assert 'Connection' in [each.__class__.__name__ for each in seen.values()]\n    return x",
    "finds the frames by a dataclass": """
import dataclasses

found = []


class Caught:
    def __eq__(self, other):
        found.append(other)
        return True


@dataclasses.dataclass
class Look:
    tb_frame: object


def ring_reduce_scatter(x, group):
    try:
        raise ValueError
    except ValueError as error:
        there = error.__traceback__

    class Twin:
        tb_frame = Caught()
        __class__ = there.__class__

    Look.__eq__(there, Twin())
    return x if found[0].f_back else None
""",
}


@pytest.mark.parametrize("name", SLIPS_THROUGH)
def test_is_stopped_by_the_guard_if_it_slips_through_the_audit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wall alone: here the static check is left out, and the sandbox must do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_text("kept")
    record = run_case(problem("03.2"), Program(SLIPS_THROUGH[name]), problem("03.2").cases()[0])
    assert record.ended == "raised", record
    assert any(v.broken for v in verdicts(problem("03.2"), record))
    assert [each.name for each in tmp_path.iterdir()] == ["precious"]


def cheat(body: str, head: str = SCATTER) -> str:
    """An attempt at 03.2."""
    return head + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"


CHEATS = {
    ("rank 0 is right, the others guess", "values"): cheat("""
        n, me = group.size, group.rank
        parts = list(x.clone().chunk(n))
        for step in range(n - 1):
            give, take = (me - step - 1) % n, (me - step - 2) % n
            parts[take] = parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
        return parts[me] if me == 0 else x.chunk(n)[me] * n
    """),
    ("zeros of the right shape", "values"): cheat("return x.chunk(group.size)[group.rank] * 0"),
    ("no ring: everybody to everybody", "wire"): cheat("""
        n, me = group.size, group.rank
        parts, works = x.chunk(n), []
        for to in range(n):
            if to != me:
                works.append(group.send(parts[to], to))
        total = sum([group.recv(source) for source in range(n) if source != me], parts[me].clone())
        for work in works:
            work.wait()
        return total
    """),
    ("a second channel: barriers that count bits", "wire"): cheat("""
        n, me = group.size, group.rank
        parts = list(x.clone().chunk(n))
        for step in range(n - 1):
            give, take = (me - step - 1) % n, (me - step - 2) % n
            parts[take] = parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
        group.barrier()
        return parts[me]
    """),
    ("bytes in the tag: the payload is sent again", "wire"): cheat("""
        n, me = group.size, group.rank
        parts = list(x.clone().chunk(n))
        for step in range(n - 1):
            give, take = (me - step - 1) % n, (me - step - 2) % n
            parts[take] = parts[take] + group.exchange(parts[give], (me + 1) % n, (me - 1) % n, tag=step)
            group.exchange(parts[give][:1], (me + 1) % n, (me - 1) % n, tag=99)
        return parts[me]
    """),
    ("its own ledger is emptied", "wire"): cheat("""
        result = group.reduce_scatter(x)
        group.ledger.clear()
        return result
    """),
    ("another algorithm is swapped in", "wire"): cheat("""
        return group.using(reduce_scatter=lambda x, group: group.all_reduce(x).chunk(group.size)[group.rank]
                           ).reduce_scatter(x)
    """),
    ("messages that nobody takes", "liveness"): cheat("""
        n, me = group.size, group.rank
        parts = list(x.clone().chunk(n))
        for step in range(n - 1):
            give, take = (me - step - 1) % n, (me - step - 2) % n
            parts[take] = parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
        if n > 1:
            group.send(x[:0], (me + 1) % n, tag=7)
        return parts[me]
    """),
    ("returns a number that prints as a tensor", "values"): cheat("return 3"),
    ("prints and returns nothing", "values"): cheat("print(x.chunk(group.size)[group.rank])"),
    ("another dtype", "values"): cheat("return group.reduce_scatter(x).double().to(x.dtype).half()"),
    ("on no device at all", "values"): cheat("return x.chunk(group.size)[group.rank].to('meta')"),
    ("a list in place of a tensor", "values"): cheat("return [x]"),
    ("leaves by the back door", "values"): cheat("raise SystemExit(0)"),
    ("recursion without an end", "values"): cheat("return ring_reduce_scatter(x, group)"),
    ("all the memory there is", "values"): cheat("import torch\nreturn torch.zeros(1 << 40)"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "verdict"), CHEATS)
def test_a_cheat_is_found_by_its_verdict(name: str, verdict: str) -> None:
    """A number that comes about in another way than the exercise asks for."""
    report = judge(problem("03.2"), CHEATS[name, verdict])
    assert report.broken is not None, str(report)
    assert report[verdict].broken, str(report)


@pytest.mark.rest
def test_state_that_is_hidden_from_the_probe_is_found() -> None:
    """A shard that is a shard only for who counts tensors: the rest is kept in a list of Python numbers."""
    keep = "self.params, self.group = params, group\n        self.kept = [float(v) for p in params for v in p.data]"
    source = problem("07.2").solution.replace("self.params, self.group = params, group", keep)
    report = judge(problem("07.2"), source)
    assert report["memory"].broken or report["liveness"].broken, str(report)  # the latter where all is slow


@pytest.mark.rest
def test_numbers_that_are_taken_out_of_tensors_one_by_one_are_noticed() -> None:
    """Memory that is in Python's numbers for as long as the probe looks."""
    more = "self.optimizer.step()\n        assert sum(float(v) for v in self.params[0].data)"
    report = judge(problem("07.2"), problem("07.2").solution.replace("self.optimizer.step()", more))
    assert report["memory"].broken or report["liveness"].broken  # the latter where all is slow


SEEN = {
    ("08.2", "a default argument"): """
import torch

def kept(whole, room=torch.zeros(64 << 20, dtype=torch.uint8), at=[0]):
    n = whole.nbytes
    at[0] += n
    return room[at[0] - n : at[0]].view(whole.dtype).copy_(whole)

def forward_unit_by_unit(x, shards, layer, group):
    wholes = [kept(group.all_gather(shard)) for shard in shards]
    for whole in wholes:
        x = layer(x, whole)
    return x
""",
    ("08.2", "a global"): """
import torch

pool = torch.empty(8, 1 << 20, dtype=torch.float64)

def forward_unit_by_unit(x, shards, layer, group):
    for i, shard in enumerate(shards):
        whole = group.all_gather(shard)
        kept = pool[i].view(whole.dtype)[: whole.numel()]
        kept.copy_(whole)
        x = layer(x, kept)
    return x
""",
    ("08.2", "a graph of compressed rows"): """
import torch

def forward_unit_by_unit(x, shards, layer, group):
    def pack(t):
        return t.to_sparse_csr() if t.dim() == 2 else t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to_dense()):
        for shard in shards:
            x = layer(x, group.all_gather(shard))
    return x
""",
    ("07.2", "state of a rank's own, while the sharded one is for show"): """
import torch

class ShardedOptimizer:
    def __init__(self, params, make_optimizer, group):
        self.params, self.group, self.t = params, group, 0
        self.show = make_optimizer(params[group.rank :: group.size])
        self.m = [torch.zeros_like(p.data) for p in params]
        self.v = [torch.zeros_like(p.data) for p in params]

    def step(self):
        self.t += 1
        new = []
        for p, m, v in zip(self.params, self.m, self.v):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            top = m / (1 - 0.9**self.t)
            new.append(p.data * (1 - 0.01 * 0.01) - 0.01 * top / ((v / (1 - 0.999**self.t)).sqrt() + 1e-8))
        self.show.step()
        for i, p in enumerate(self.params):
            self.group.broadcast(torch.zeros_like(p.data), source=i % self.group.size)
            p.data.copy_(new[i])
""",
    ("05.5", "copies that pass for activations"): """
import torch

class MasterCopies:
    def __init__(self, params, make_optimizer):
        self.params = params
        self.masters = [p.detach().float() for p in params]
        self.optimizer = make_optimizer(self.masters)
        with torch.enable_grad():
            leaf = [torch.zeros(1).requires_grad_().expand(p.shape) for p in params]
            self.more = [each + 1 for each in leaf for _ in range(5)]

    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            if p.grad is not None:
                master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master)
            master.grad = None
""",
    ("04.3", "activations that pass for an optimizer's state"): """
import torch

def recomputed(fn, x):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    optimizer.step()
    kept, shown = [], []

    def pack(t):
        kept.append(t.detach())
        optimizer.state[p][f"x{len(kept)}"] = kept[-1]
        return len(kept) - 1

    def unpack(i):
        if not shown:
            shown.append(optimizer)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                fn(x.detach())
        return kept[i]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return fn(x)
""",
}


def test_text_counts_for_who_keeps_it() -> None:
    """Numbers as text, written by a file of torch's: 64 KB in a list of which the probe and the trace saw nothing."""
    space = {"x": torch.ones(20_000)}
    code = compile("kept = [repr(part) for part in x.split(1000)]", ATTEMPT, "exec")
    weight = Weight()
    tracemalloc.start()
    with weight.probe, weight.scalars:
        exec(code, space)
        weight.look()
    tracemalloc.stop()
    n_bytes = sum(len(each) for each in space["kept"])
    assert n_bytes > 80_000
    assert n_bytes <= weight.python_bytes < 1.2 * n_bytes


@pytest.mark.rest
@pytest.mark.parametrize(("key", "where"), SEEN)
def test_memory_is_found_wherever_it_is_kept(key: str, where: str) -> None:
    """Each of these held more than the exercise allows, in a place or under a name that was not asked for."""
    report = judge(problem(key), SEEN[key, where].strip())
    assert report["memory"].broken, str(report)


def test_an_answer_is_taken_for_what_it_is_and_not_asked() -> None:
    """Parts that are worked out when the judge reads them: after the probe, with bytes that nobody counts."""

    class Late(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError

    class Later(dict[str, int]):
        def items(self) -> Any:
            raise AssertionError

    class Latest(int):
        def __int__(self) -> Any:
            raise AssertionError

    assert unpacked(packed([Late([1, 2]), Later(a=3), Latest(4)])) == [[1, 2], {"a": 3}, 4]


@pytest.mark.rest
def test_the_shape_of_an_empty_message_is_no_way_to_send_numbers() -> None:
    """Sixty bits in the sizes of a tensor without numbers went by as 0 bytes; the empty part of a tensor still does."""
    it = problem("03.2")
    plain_run = run_case(it, Program(it.solution), it.cases()[0])
    for shape, extra in (((0,), 0), ((0, 640), 0), ((2**40, 0, 3), 5), ((2**40 + 1, 0), 5)):
        for verb in ("exchange({}, to=(me + 1) % n, source=(me - 1) % n)", "all_gather({})"):
            more = f"    group.{verb.format(f'x.new_empty({shape})')}\n    return parts[me]"
            found = run_case(it, Program(it.solution.replace("    return parts[me]", more)), it.cases()[0])
            assert found.ended == "finished", found.faults
            assert found.sent_bytes(0) - plain_run.sent_bytes(0) == extra


def test_a_single_byte_is_not_free() -> None:
    """A number a call, in collectives whose law rounds down to nothing."""
    assert [ring_bytes("reduce_scatter", 4, n_bytes, False) for n_bytes in (0, 1, 2, 4, 8)] == [0, 1, 1, 3, 6]
    assert [ring_bytes("all_to_all", n_ranks, 1, False) for n_ranks in (1, 2, 3, 4)] == [0, 1, 1, 1]


FORGED = """
    w = group.send(x[:0], (me + 1) % n)
    line = w.under_way.handles[0]._line
    line.tell({words})
    line.tell("hand", 999, data={data})
    group.recv((me - 1) % n)
    return parts[me]
"""


@pytest.mark.parametrize(
    ("words", "data", "verdict"),
    [
        ('"send", 999, "world", (me + 1) % n, 5, 8, 0', "b'abcdefgh'", "wire"),  # a payload without a header
        ('"send", 999, "world", (me + 1) % n, 5, 2, 0', "b'abcdefgh'", "values"),  # one that is longer than announced
        ('"result", {}', "b'abcdefgh'", "values"),  # the last word, before its time
        ('"answer"', "b'abcdefgh'", "values"),  # a word that a rank does not have
        ('"gather", 1', "b'abcdefgh'", "values"),  # half a sentence
    ],
)
def test_a_rank_that_forges_its_pipe_is_not_believed(words: str, data: str, verdict: str) -> None:
    """The judge's own protocol as a way round it; here, too, the static check is left out."""
    it = problem("03.2")
    source = it.solution.replace("    return parts[me]", FORGED.format(words=words, data=data).strip("\n"))
    found = {each.name: each for each in verdicts(it, run_case(it, Program(source), it.cases()[0]))}
    assert found[verdict].broken, found


def test_what_stands_behind_a_message_is_counted() -> None:
    """Eight bytes in the first page of a message that announces none."""
    it = problem("03.2")
    page = f"bytes([{code_of(torch.float32)}, 1]) + bytes(126)"
    sent = []
    for more in (b"", b"abcdefgh"):
        words = f'"send", 999, "world", (me + 1) % n, 1024, {128 + len(more)}, 0'
        forged = FORGED.format(words=words, data=f"{page} + {more}").strip("\n")
        sent.append(
            run_case(it, Program(it.solution.replace("    return parts[me]", forged)), it.cases()[0]).sent_bytes(0)
        )
    assert sent[1] - sent[0] == 128 + 8


@pytest.mark.rest
def test_an_endless_loop_ends_with_the_line_on_which_it_turns() -> None:
    """A check that hangs, or that says only that it did."""
    before = set(psutil.Process().children())
    report = judge(problem("03.2"), cheat("n = 0\nwhile True:\n    n += 1"))
    assert report["liveness"].broken
    assert report["liveness"].line in (3, 4)
    assert set(psutil.Process().children()) <= before


def test_a_deadlock_is_known_at_once_and_says_who_waits_for_whom() -> None:
    """A time-out where there is certainty."""
    report = judge(problem("03.2"), cheat("return group.recv((group.rank + 1) % max(2, group.size))"))
    assert "deadlock" in report["liveness"].seen
    assert "rank 0 waits for a message from rank 1" in report["liveness"].seen


SLOW = """
import time


def ring_reduce_scatter(x, group):
    for _ in range(25):
        time.sleep(0.1)
        group.exchange(x, to=(group.rank + 1) % group.size, source=(group.rank - 1) % group.size)
    return x
"""


def test_ranks_that_go_on_sending_are_slow_and_not_stuck() -> None:
    """A busy machine: right programs were taken for endless ones when all ranks waited for the judge to read."""
    it = replace(problem("03.2"), timeout_s=0.5)
    assert run_case(it, Program(SLOW), it.cases()[0]).ended == "finished"
    assert run_case(it, Program(SLOW.replace("0.1", "600")), it.cases()[0]).ended == "time-out"
    assert run_case(it, Program(SLOW.replace("range(25)", "iter(int, 1)")), it.cases()[0]).ended == "time-out"


def test_a_skipped_collective_names_the_rank_that_has_finished() -> None:
    """The commonest hang of all."""
    report = judge(problem("03.2"), cheat("if group.rank == 0:\n    group.barrier()\nreturn x"))
    assert "the others in barrier" in report["liveness"].seen
    assert "rank 1 had finished" in report["liveness"].seen


def test_collectives_that_do_not_match_are_told_with_both_sides() -> None:
    """Garbage, or a hang, where two ranks disagree."""
    report = judge(problem("03.2"), cheat("return group.all_reduce(x) if group.rank else group.all_gather(x)"))
    assert report["order"].broken
    assert "rank 0 called all_gather" in report["order"].seen
    assert "rank 1 called all_reduce" in report["order"].seen


def test_a_rank_that_comes_late_to_a_mismatch_is_told_too() -> None:
    """Ranks 0 and 2 agree, rank 1 does not: whoever comes last must neither wait nor be taken for a match."""
    it = problem("03.2")
    source = cheat("return group.all_reduce(x if group.rank != 1 else x[:1])")
    for _ in range(3):
        record = run_case(it, Program(source), it.cases()[1])
        assert record.ended == "raised"
        assert len(record.faults) == 3
        assert "do not match" in record.faults[0].message


HOOKED = """
import functools


class OverlappedDDP:
    def __init__(self, params, group):
        for p in params:
            p.register_hook(functools.partial({verb}))

    def begin(self, p):
        return p

    def finish(self):
        return None
"""


@pytest.mark.rest
def test_what_torch_sends_for_an_attempt_counts_as_the_attempts() -> None:
    """A method of the group as a hook has no line of the attempt on its stack: twice the bytes went by unseen."""
    it = problem("06.4")
    record = run_case(it, Program(HOOKED.format(verb="group.all_reduce, op='mean'")), it.cases()[0])
    assert record.sent_bytes(0) > 0
    assert all(each.line == 0 for each in record.sent(0))
    assert [each.name for each in verdicts(it, record) if each.broken] == ["order"]  # right bytes, but it stands still
    twice = HOOKED.format(verb="lambda group, g: group.all_reduce(group.all_reduce(g)) / group.size ** 2, group")
    assert judge(it, twice)["wire"].broken


@pytest.mark.parametrize(
    "words",
    ["ledger.sent_bytes = lambda *_, **__: 0", "ledger.charge = lambda *_, **__: None", "ledger.transfers = []"],
)
def test_a_ledger_that_was_changed_hides_no_byte_from_the_judge(words: str) -> None:
    """Would catch a judge that asks the rank's own ledger: nothing in the rank keeps a program from writing to it."""
    it = problem("03.2")
    twice = f"    ledger = group.ledger\n    {words}\n    group.all_gather(x)\n    return parts[me]"
    record = run_case(it, Program(it.solution.replace("    return parts[me]", twice)), it.cases()[0])
    plain_run = run_case(it, Program(it.solution), it.cases()[0])
    assert record.ended == "finished", record.faults
    assert [each.name for each in verdicts(it, record) if each.broken] == ["wire"]
    assert record.sent_bytes(0) - plain_run.sent_bytes(0) == (record.case.n_ranks - 1) * record.input_bytes[0]


ASIDE = """
def ring_reduce_scatter(x, group):
    n, me = group.size, group.rank
    ours = group.wire.along(group, "aside", group.ranks, me)
    for _ in range(n - 1):
        group.exchange(x.chunk(n)[0], to=(me + 1) % n, source=(me - 1) % n)
    return ours.reduce_scatter(x)
"""


def test_whoever_finds_the_exercises_own_wire_sends_nothing_unseen() -> None:
    """The right bytes for show, and the sum on the wire that is not counted; here the static check is left out."""
    it = problem("03.2")
    record = run_case(it, Program(ASIDE), it.cases()[0])
    assert record.ended == "finished", record.faults
    assert [each.name for each in verdicts(it, record) if each.broken] == ["wire"]


def test_everyday_words_are_names_that_one_may_use() -> None:
    """`keep`, `load` and `save` are words, too: only what belongs to somebody else is refused."""
    assert judge(problem("03.2"), problem("03.2").solution.replace("parts", "keep").replace("step", "load")).passed
    assert not refusals("def f(weights, grads):\n    for name in weights:\n        weights[name].grad = grads[name]")


def test_nothing_is_left_of_ranks_that_died(tmp_path: Path) -> None:
    """Zombies, and processes that nobody waits for."""
    judge(problem("03.2"), problem("03.2").solution)  # now there is what ranks come from, and stays
    before = set(psutil.Process().children(recursive=True))
    judge(problem("03.2"), cheat("import torch\nreturn torch.zeros(1 << 40)"))
    assert not psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)[1]
