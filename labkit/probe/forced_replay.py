"""One step computed again in float64, each module from what the run itself has handed it: so each answers for itself.

    run        x --> [layer 0] --> y0 --> [layer 1] --> y1 --> [layer 2] --> y2
    replay     x --> (layer 0) --> z0     |             z1     |             z2
                                   y0 --> (layer 1) --> |      |
                                                        y1 --> (layer 2) --> |

After each module the replay goes on with the recorded y, not with its own z. Then y - z is what that one module has
added, its rounding or its mistake, whatever came in: no difference travels on, and none grows. Backward is replayed
in the same way: where the gradient of an output arrives, it is kept, and the recorded one goes on. A module that
contains others is computed with what these have returned, so that only what lies between them (an attention, a
residual sum) is its own.

How much rounding may add is measured on the same replay: `RoundingNoise` makes each operation err at random, by as
much as the format would, and the spread of z is kept. That is Monte Carlo arithmetic: an operation on numbers of
relative precision h returns a number of relative precision h, and a sum of n terms sees its terms with a precision of
h sqrt(n), as a chain of n roundings that do not know of each other adds up (Higham and Mary 2019). Cancellation
inside a layer, what an earlier rounding becomes on its way through it, and the length of each sum are all in that
number.

Sources: Parker, Pierce and Eggert, Monte Carlo arithmetic, Computing in Science and Engineering 2(4), 2000,
doi:10.1109/5992.852391; Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, A2815, theorem 2.4; the idea to hand each
module the other run's input: TTrace, arXiv:2506.09280.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.private import private
from labkit.probe.tensor_record import RootCall, tensors_in, with_tensors
from labkit.probe.whole_tensors import Key, Part, WholeRun, assembled

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
REDUCTIONS = ("sum", "mean", "var", "std", "var_mean", "linalg_vector_norm", "norm", "logsumexp")
BY_ROW = ("softmax", "layer_norm", "rms_norm")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class RoundingNoise(TorchDispatchMode):
    """Lets every operation err at random: results by `size` of themselves, terms of a sum of n by size share sqrt(n).

    share     how much finer sums are kept than results: 2**-16 for bf16 with sums in float32, 1 where both are alike"""

    def __init__(self, size: float, share: float, seed: int) -> None:
        super().__init__()
        self.size, self.share = size, share
        self.stream = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name.endswith("_") and not name.endswith("__"):  # in place, as optimizers work
            output = func(*args, **kwargs)
            if isinstance(output, Tensor) and output.is_floating_point() and output.dim():
                output.mul_(1 + self._draw(output, self.size))
            return output
        n_terms = terms(name, args)
        if name in REDUCTIONS:
            results = list(tensors_in(func(*args, **kwargs)))
            n_terms //= max(1, min((x.numel() for x in results), default=1))
        if n_terms > 1:
            size = self.size * self.share * math.sqrt(n_terms)
            if "batch_norm" in name:  # it writes its running means into what it was given
                args = (self._noisy(args[0], size), *args[1:])
            else:
                args = with_tensors(args, (self._noisy(x, size) for x in list(tensors_in(args))))
        output = func(*args, **kwargs)
        held = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs)) if x.numel()}
        results = list(tensors_in(output))
        if any(x.numel() and x.untyped_storage().data_ptr() in held for x in results):
            return output  # a view: nothing was computed
        return with_tensors(output, (self._noisy(x, self.size) for x in results))

    def _noisy(self, x: Tensor, size: float) -> Tensor:
        return x * (1 + self._draw(x, size)) if x.is_floating_point() else x

    def _draw(self, x: Tensor, size: float) -> Tensor:
        return torch.empty_like(x).normal_(0.0, size, generator=self.stream)


def terms(name: str, args: Any) -> int:
    """How many terms an operation adds up for one number of its result, at most; 1 if it adds up none.

    Of a reduction it is all terms, for all of its results together."""
    shapes = [tuple(x.shape) for x in tensors_in(args) if x.is_floating_point()]
    if not shapes:
        return 1
    if name in PRODUCTS:
        return shapes[-2][-1] if len(shapes) > 1 else 1
    largest = max(math.prod(shape) for shape in shapes)
    if "convolution" in name:
        smallest = min(math.prod(shape[1:]) for shape in shapes if len(shape) > 2)
        return max(smallest, largest // max(1, shapes[0][1])) if "backward" in name else math.prod(shapes[1][1:])
    if "scaled_dot_product" in name:
        return max(shape[-2] for shape in shapes if len(shape) > 2) + shapes[0][-1]
    if "batch_norm" in name:
        return largest // max(1, shapes[0][1])
    if "backward" in name and ("embedding" in name or any(word in name for word in BY_ROW[1:])):
        return max(shapes[0][-1], largest // max(1, shapes[0][-1]))
    if any(word in name for word in BY_ROW):
        return shapes[0][-1]
    return largest if name in REDUCTIONS else 1


@dataclass
class Computed:
    """What a replay has computed, in its own order."""

    outputs: dict[Key, Tensor] = field(default_factory=dict)
    gradients_out: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    roots: list[Key] = field(default_factory=list)


class ForcedReplay:
    """The replay of one step of one run."""

    def __init__(self, model: nn.Module, run: WholeRun, reference: WholeRun, step: int) -> None:
        """`model` is whole and stays as it is; `reference` says which elements dropouts have kept."""
        self.model = copy.deepcopy(model).double()
        self.run, self.reference, self.step = run, reference, step
        self.computed = Computed()
        self.count: Counter[str] = Counter()
        self.missing: list[str] = []

    def play(
        self,
        roots: list[tuple[RootCall, list[Tensor]]],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> Computed:
        """Compute forward and backward with these inputs of the root modules and these values before the step."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in parameters:
                    p.copy_(parameters[name])
            for name, buffer in self.model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(self._before(name))
            module.register_forward_hook(self._after(name))
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for root, tensors in roots:
                self._root(root, tensors)
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.computed.gradients[name] = p.grad.detach().clone()
        self.computed.buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        return self.computed

    def _root(self, root: RootCall, tensors: list[Tensor]) -> None:
        module = self.model.get_submodule(root.module)
        if module.training != root.training:
            module.train(root.training)
        self.count.clear()
        args, kwargs = with_tensors((root.args, dict(root.kwargs)), iter(tensors))
        output = module(*args, **kwargs)
        ends, gradients = [], []
        for number, y in enumerate(tensors_in(output)):
            key = (root.module, 0, number)
            self.computed.roots.append(key)
            parts = self.run.gradients_out(self.step, key, y.shape) if y.requires_grad else None
            if parts is not None:
                ends.append(y)
                gradients.append(assembled(parts, y).to(y.dtype))
        if ends:
            torch.autograd.backward(ends, gradients)

    def _before(self, name: str) -> Callable[..., Any]:
        def before(_: nn.Module, args: Any) -> Any:
            handed = list(tensors_in(args))
            forced = [self._hand((name, self.count[name], -1 - number), x) for number, x in enumerate(handed)]
            return with_tensors(args, iter(forced))

        return before

    def _hand(self, key: Key, x: Tensor) -> Tensor:
        parts = self.run.outputs(self.step, key, x.shape) if x.is_floating_point() else None
        if parts is None:
            return x  # a module has returned it, and it is the recorded one already
        self.computed.outputs[key] = x.detach().clone()
        return x + (assembled(parts, x).to(x.dtype) - x).detach()

    def _after(self, name: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            nth = self.count[name]
            self.count[name] += 1
            results = list(tensors_in(output))
            forced = [self._force((name, nth, number), module, args, y) for number, y in enumerate(results)]
            return with_tensors(output, iter(forced))

        return after

    def _force(self, key: Key, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        if not y.is_floating_point():
            return y
        if isinstance(module, DROPOUTS) and module.training and module.p > 0:
            y = self._dropped(key, module.p, next(tensors_in(args)))
        self.computed.outputs[key] = y.detach().clone()
        parts = self.run.outputs(self.step, key, y.shape)
        if parts is None:
            forced = y
        else:
            recorded = assembled(parts, y).to(y.dtype)
            forced = y + (recorded - y).detach()  # the recorded values, and the way back through the module
        if forced.requires_grad:
            forced.register_hook(self._arrives(key))
        return forced

    def _dropped(self, key: Key, p: float, x: Tensor) -> Tensor:
        """What a dropout returns for x if it keeps the elements that the reference has kept."""
        parts = self.reference.outputs(self.step, key, x.shape)
        if parts is None or p >= 1:
            return x * 0.0
        kept = (assembled(parts, x) != 0) | (x.detach() == 0)
        return x * kept.to(x.dtype) / (1 - p)

    def _arrives(self, key: Key) -> Callable[[Tensor], Tensor | None]:
        def arrives(gradient: Tensor) -> Tensor | None:
            self.computed.gradients_out[key] = gradient.detach().clone()
            parts = self.run.gradients_out(self.step, key, gradient.shape)
            return None if parts is None else assembled(parts, gradient).to(gradient.dtype).mul(1.0)

        return arrives


def residual(part: Part, computed: Tensor) -> Tensor:
    """A rank's part minus what was computed; 0 where both are the same infinity, or no number."""
    own = computed[part.where].double()
    alike = (part.value == own) | (part.value.isnan() & own.isnan())
    return torch.where(alike, 0.0, part.value - own)
