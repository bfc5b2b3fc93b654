"""assemble: a model, a recipe and a mesh become one training step. All parts of labkit meet in this file.

    GPT on the meta device                             no bytes yet
      0  ep: keep the experts of this rank             a name that is gone is neither cut nor filled
      1  tp: cut layers into shards                    before anything holds on to a parameter
      2  cp: let attention reach over ranks            all else works on each token by itself
      3  pp: keep the layers of this rank's stages     only these get memory and values
      4  recomputation: around each block's forward    inside ZeRO-3's hooks, so that one gather serves both runs
      5  dp: DDP or ZeRO takes over the parameters     last, for it moves them into its own buffers; with ep the
                                                       experts are a module apart, with a strategy over `expert_dp`
      6  the pipeline runs it all                      also a pipeline of one rank

    step:  zero_grad -> forward and backward of every micro-batch -> finish -> unscale -> clip -> optimizer -> update

The order inside a step has one reason each: gradients must be complete before they are divided by the loss scale (an
infinity of another rank would be missed), divided before they are clipped (the limit is in true units), and all ranks
must agree to skip before any of them steps.

tp changes layers, cp attention, pp order and dp bookkeeping; that is why they compose, and why nothing here asks which
of them is in use. Bytes on the wire: see the part that sends them.

Long because all parts meet here, in an order that a reader can follow on one page.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.fake import Nobody
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.parallel.checkpoints import Parts, parts_of
from labkit.parallel.compress import compressor
from labkit.parallel.contexts import Context
from labkit.parallel.data_parallel import DataParallel, MakeOptimizer
from labkit.parallel.ddp import DDP
from labkit.parallel.eight_bit_weights import EightBits
from labkit.parallel.expert import Balance, Together, apart, deal, give_, layers_of
from labkit.parallel.hsdp import HSDP
from labkit.parallel.norm import clip_grad_norm_
from labkit.parallel.overlapped_tensor import overlap_
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.tensor_plan import EXPERT_PLAN, EXPERT_SEQUENCE_PLAN, GPT_PLAN, GPT_SEQUENCE_PLAN, split
from labkit.parallel.vocab import vocab_parallel_cross_entropy
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.contracts import shard_dim_of
from labkit.plan.job.recipe import Recipe, check
from labkit.plan.job.stages import blocks_of
from labkit.plan.model.expert_load import Load
from labkit.plan.model.shape import ModelShape
from labkit.train import packed
from labkit.train.checkpoint import checkpoint, checkpoint_once
from labkit.train.config import GPTConfig
from labkit.train.fp8 import delayed_in, encode, in_8_bits, in_fp8_, unit_of, weights_in_8_bits
from labkit.train.gpt import GPT, Block, cross_entropy
from labkit.train.groups import grouped, mark_
from labkit.train.large_batch import Warmup
from labkit.train.loss_scale import Scaler
from labkit.train.offload import Offload
from labkit.train.optimizers import optimizer_of
from labkit.train.precision import MasterWeights
from labkit.train.recompute import recompute_selectively_

WEIGHTS = MappingProxyType(
    {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "pure-bf16": torch.bfloat16,
        "fp8": torch.bfloat16,
        "nvfp4": torch.bfloat16,
        "amp": torch.float32,
        "fp16": torch.float32,
    }
)
"""The dtype of the weights, and of what flows between layers, by precision."""
PRODUCTS = MappingProxyType({"amp": torch.bfloat16, "fp16": torch.float16})
"""The dtype of matrix products where it is not that of the weights."""


def assemble(config: GPTConfig, recipe: Recipe, mesh: Mesh) -> TrainStep:
    """The training step of this rank; all ranks of the mesh call it. ValueError on all of them for what cannot work."""
    check(config, recipe, mesh.layout)
    if recipe.shard_ranks is not None:
        mesh = mesh.cut(recipe.shard_ranks)
    if recipe.copies > 1:
        mesh = mesh.paired()
    with torch.device("meta"):
        model = deal(GPT(config, seed=recipe.seed), mesh.ep)
    if mesh.tp.size > 1:
        split(model, plan_of(config, recipe.sequence_parallel), mesh.tp)
        if recipe.tp_overlap:
            overlap_(model)
    if mesh.cp.size > 1:
        Context(recipe.context, mesh.cp, config.window).into_(model)
    schedule = recipe.schedule_for(mesh.pp.size)
    own_layers = _mine(model, schedule, mesh)
    stages = {stage: TrainedStage(model, layers, recipe, mesh) for stage, layers in own_layers.items()}
    for module in stages.values():
        fill_(module, config, recipe, mesh)
    for module in stages.values():
        mark_(module, recipe.grouping)  # while experts are in their block
    if config.n_expert and isinstance(mesh.world.wire, Nobody):  # a rehearsal: nothing has values to route by
        for module in stages.values():
            give_(module, Load.of(config), mesh.ep)
    besides = {stage: experts_and_balance(module, recipe, mesh) for stage, module in stages.items()}
    syncs = {stage: data_parallel(module, recipe, mesh, mesh.data) for stage, module in stages.items()}
    return TrainStep(recipe, mesh, stages, syncs, schedule, besides)


def plan_of(config: GPTConfig, in_sequence: bool = False) -> Mapping[str, str]:
    """What tp makes of the layers of a GPT, with experts or without; `in_sequence`: also cut by position."""
    if not config.n_expert:
        return GPT_SEQUENCE_PLAN if in_sequence else GPT_PLAN
    shared = {"blocks.*.mlp.shared.up": "column", "blocks.*.mlp.shared.down": "row"} if config.n_shared else {}
    return MappingProxyType({**(EXPERT_SEQUENCE_PLAN if in_sequence else EXPERT_PLAN), **shared})


class TrainedStage(nn.Sequential):
    """Some layers of the model in a row, and the names that they have in it.   tokens or [B, T, D] -> [B, T, D or V]"""

    def __init__(self, model: GPT, layers: Sequence[tuple[str, nn.Module]], recipe: Recipe, mesh: Mesh) -> None:
        """Give the layers memory (not values); the recipe says what blocks compute again."""
        super().__init__(OrderedDict((str(index), layer) for index, (_, layer) in enumerate(layers)))
        self.paths = tuple(path for path, _ in layers)
        shard_dims = {name: dim for name, p in self.named_parameters() if (dim := shard_dim_of(p)) is not None}
        self.to_empty(device=mesh.world.device)  # makes new parameters, which lack `shard_dim`
        for name, shard_dim in shard_dims.items():
            self.get_parameter(name).shard_dim = shard_dim  # type: ignore[attr-defined]
        ends = {id(layer) for layer in (model.embedding, model.head)}
        if {id(layer) for _, layer in layers} >= ends and model.config.tied:
            model.head.out.weight = model.embedding.token.weight  # to_empty has separated them
        for path, block in [(path, layer) for path, layer in layers if isinstance(layer, Block)]:
            if recipe.eight_bits:
                noise = random.Random(f"{recipe.seed} {path} {mesh.world.rank}").getrandbits(62)
                in_fp8_(block, recipe.units, noise)
            if recipe.recompute == "full":
                recomputed = checkpoint_once if recipe.splits else checkpoint
                block.forward = partial(recomputed, block.forward)  # type: ignore[method-assign]
            elif recipe.recompute != "none":
                recompute_selectively_(block, gathers_only=recipe.recompute == "gathers")
        # ZeRO-3 needs no autocast: it gathers weights in the dtype of the products
        products = None if recipe.strategy_law.computes_gathered else PRODUCTS.get(recipe.precision)
        self.autocast = partial(torch.autocast, torch.device(mesh.world.device).type, products, products is not None)

    def forward(self, x: Tensor, *documents: Tensor) -> Tensor:
        """Run the layers one after another; all are given the documents that the rows pack, if they pack several."""
        with self.autocast():
            for layer in self:
                x = layer(x, *documents)
        return x

    def names(self) -> dict[str, str]:
        """{name of a parameter here: its name in the whole model}."""
        full_names = {}
        for name, _ in self.named_parameters():
            index, _, rest = name.partition(".")
            full_names[name] = f"{self.paths[int(index)]}.{rest}"
        return full_names


def fill_(stage: TrainedStage, config: GPTConfig, recipe: Recipe, mesh: Mesh) -> None:
    """Give a stage the values that GPT(config, seed) has there, one whole layer at a time."""
    dtype = WEIGHTS[recipe.precision]
    with torch.device("meta"):
        model = deal(GPT(config, seed=recipe.seed), mesh.ep)
    for _, mixture in layers_of(stage):
        mixture.rows = recipe.batch_size // mesh.layout.dp  # a balance loss is a mean over all of a step
    for path, layer in zip(stage.paths, stage, strict=True):
        whole = model.get_submodule(path).to_empty(device="cpu")
        model.init_(recipe.seed)  # draws for what has memory, each layer from a stream of its own
        for name, p in layer.named_parameters():
            part = _cut(whole.get_parameter(name).detach(), shard_dim_of(p), mesh.tp)
            # steps of a bias between experts are too short for 16 bits
            width = torch.promote_types(dtype, torch.float32) if name == "mlp.bias" else dtype
            p.data = part.to(p.device, width, copy=True, memory_format=torch.contiguous_format)
            if recipe.fp32_gradients and p.requires_grad:
                p.grad_dtype = torch.float32
            del part
        whole.to_empty(device="meta")


Besides = list[tuple[DataParallel, dict[str, str]]]
"""Strategies of a stage besides that of the stage itself: each with {its own name: name in the whole model}."""


def experts_and_balance(stage: TrainedStage, recipe: Recipe, mesh: Mesh) -> Besides:
    """With ep, the strategy of the experts, which leave the stage; with a bias between them, that of the biases."""
    names, besides = stage.names(), Besides()
    if mesh.ep.size > 1:
        held, inner = apart(stage)
        full = {own: names[name] for own, name in inner.items()}
        besides.append((data_parallel(held, recipe, mesh, mesh.expert_dp), full))
    if any(layer.bias is not None for _, layer in layers_of(stage)):
        balance = Balance(stage, mesh.data)
        besides.append((balance, {own: names[name] for own, name in balance.names.items()}))
    return besides


def data_parallel(module: nn.Module, recipe: Recipe, mesh: Mesh, group: Group) -> DataParallel:
    """The recipe's strategy around one module whose gradients are averaged over `group`."""
    make = make_optimizer(recipe, mesh.tp)
    if recipe.offload:
        make = Offload(make)  # its copies are fp32 masters, too
    elif recipe.has_masters:
        make = partial(MasterWeights, make_optimizer=make)
    return STRATEGIES[recipe.strategy](module, group, make, recipe, mesh)


def ddp(module: nn.Module, group: Group, make: MakeOptimizer, recipe: Recipe, mesh: Mesh) -> DataParallel:
    """DDP, with gradients that travel as the recipe says."""
    return DDP(module, group, make, recipe.bucket_bytes, compress=compressor(recipe.gradients, group))


def zero1(module: nn.Module, group: Group, make: MakeOptimizer, recipe: Recipe, mesh: Mesh) -> DataParallel:
    """ZeRO-1."""
    return ZeRO1(module, group, make, recipe.bucket_bytes)


def zero2(module: nn.Module, group: Group, make: MakeOptimizer, recipe: Recipe, mesh: Mesh) -> DataParallel:
    """ZeRO-2."""
    return ZeRO2(module, group, make, recipe.bucket_bytes)


def zero3(module: nn.Module, group: Group, make: MakeOptimizer, recipe: Recipe, mesh: Mesh) -> DataParallel:
    """ZeRO-3, or HSDP where the mesh cuts dp into groups."""
    options: dict[str, Any] = {"prefetch": recipe.prefetch, "compute_dtype": PRODUCTS.get(recipe.precision)}
    options["reshard"] = recipe.reshard
    if recipe.fp8_gathers:
        weights = frozenset(part.get_parameter("weight") for part in in_8_bits(module))
        options["codec"] = EightBits(weights, unit_of, encode)
    if mesh.shard is not None and mesh.replicate is not None:
        return HSDP(module, group, make, mesh.shard, mesh.replicate, **options)
    return ZeRO3(module, group, make, **options)


STRATEGIES = MappingProxyType({"ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3})
"""What makes each strategy of labkit.plan.laws.strategies around a module."""


def make_optimizer(recipe: Recipe, tp: Group | None = None) -> MakeOptimizer:
    """The recipe's optimizer, for any list of parameters or flat shards; `tp` is the group that cuts matrices."""
    make = partial(optimizer_of(recipe.optimizer, tp), lr=recipe.lr, weight_decay=recipe.weight_decay)
    return lambda params: make(grouped(params, recipe.weight_decay))


class TrainStep:
    """One rank's training step: `step(tokens, targets, number)` -> mean loss over the whole batch, on every rank.

    `stages` and `syncs` are this rank's, by stage; `besides` are the strategies of experts that left their stage, and
    of biases between experts; `parts` is what `checkpoints.save` and `checkpoints.load` want."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        stages: Mapping[int, TrainedStage],
        syncs: Mapping[int, DataParallel],
        schedule: Any,
        besides: Mapping[int, Besides] = MappingProxyType({}),
    ) -> None:
        """Everything is in place: tie it together."""
        others = [pair for stage in syncs for pair in besides.get(stage, [])]
        self.besides = [sync for sync, _ in others]
        self.recipe, self.mesh, self.stages, self.syncs = recipe, mesh, dict(stages), dict(syncs)
        self.scaler = Scaler(agree=[mesh.world]) if recipe.precision == "fp16" else None
        self.warmup = Warmup(recipe.warmup_steps, start=1 / (recipe.warmup_steps + 1))
        self.context = Context(recipe.context, mesh.cp)
        together = {s: Together([sync, *(other for other, _ in besides.get(s, []))]) for s, sync in self.syncs.items()}
        modules = {s: [stage, *(sync.module for sync, _ in besides.get(s, []))] for s, stage in self.stages.items()}
        params = {s: [p for module in those for p in module.parameters()] for s, those in modules.items()}
        self.pipeline = Pipeline(
            self.stages, schedule, mesh.pp, loss=self._loss, sync=together, params=params, averaged=True
        )
        # those who have the same layers agree on what they have seen: of experts that left their stage, fewer ranks
        held = ((mesh.data, [*self.stages.values()]), (mesh.expert_dp, [sync.module for sync in self.besides]))
        self.delayed = [(group, linears) for group, modules in held if (linears := delayed_in(modules))]
        own = [(sync, self.stages[stage].names()) for stage, sync in self.syncs.items()]
        self.parts: Parts = parts_of([*own, *others])
        self.norm: float | None = None
        self.share: float | None = None  # of a packed step: what one target's loss counts
        self.skipped = False

    def __call__(self, tokens: Tensor, targets: Tensor, number: int = 0, documents: Tensor | None = None) -> float:
        """One step on this dp rank's rows, [rows, T] each; `number` counts steps from 0 and sets the learning rate.

        Rows are whole also where cp cuts them: the step takes this rank's tokens out of them.

        `documents`, of the shape of the tokens, number the documents that each row packs (labkit.train.packed). The
        loss is then the mean over all targets of the step that count, those that are not -100; to count them, one more
        number is sent over dp and cp. Each stage of a pipeline takes them from what its own rank was given.
        Raises ValueError on every rank, before anything is stepped, if the loss is not finite or, with a clip_norm, the
        gradients are not (in fp16 the step is skipped instead)."""
        recipe, everything = self.recipe, [*self.syncs.values(), *self.besides]
        syncs = [sync for sync in everything if not isinstance(sync, Balance)]  # those with gradients
        for sync in everything:
            sync.zero_grad()
        for sync in syncs:
            for group in sync.optimizer.param_groups:
                group["lr"] = recipe.lr * self.warmup(number)
        beside = None if documents is None else packed.checked(documents, tokens).tensor_split(recipe.n_micro)
        tokens, targets = self.context.cut(tokens), self.context.cut(targets)
        rows = tokens.tensor_split(recipe.n_micro), targets.tensor_split(recipe.n_micro)
        self.share = None if beside is None else packed.share(targets, recipe.n_micro, self.mesh.data)
        weights = [len(micro_batch) for micro_batch in rows[0]] if beside is None else None
        loss = self.pipeline.step(*rows, loss_weights=weights, beside=beside)
        mean = self._everybodys(loss, self.scaler.loss_scale.scale if self.scaler else 1.0)
        if self.scaler:
            finite = [self.scaler.unscale_(sync) for sync in syncs]  # all of them, finite or not
            self.skipped = not all(finite)
        elif not math.isfinite(mean):
            raise ValueError(
                f"the loss of step {number} is {mean}: nothing was stepped. Look at the data of this step, or "
                f"lower the learning rate of {recipe.lr * self.warmup(number):g}"
            )
        self._note_largest()
        if recipe.clip_norm is not None and not self.skipped:
            self.norm = clip_grad_norm_(syncs, self.mesh, recipe.clip_norm)
        for sync in syncs:
            if self.scaler:
                self.scaler.step(sync)
            else:
                sync.step()
        if self.scaler:
            self.scaler.update()
        for sync in everything:
            if isinstance(sync, Balance) and not self.skipped:
                sync.step()
        return mean

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters, whole over dp, but for experts that left it: the N of the laws."""
        return sum(p.nbytes for stage in self.stages.values() for p in stage.parameters())

    @property
    def coded_params(self) -> int:
        """Those of them that ZeRO-3 gathers as 8-bit codes: the C of the laws."""
        return sum(map(weights_in_8_bits, self.stages.values())) * self.recipe.fp8_gathers

    @property
    def coded_experts(self) -> int:
        """The same of the experts that left their stage."""
        return sum(weights_in_8_bits(sync.module) for sync in self.besides) * self.recipe.fp8_gathers

    def _note_largest(self) -> None:
        """Delayed scaling: the largest numbers of this step over all ranks with these layers become history.

        Sends 12 bytes a linear, twice (n-1)/n of them along dp (of experts that were dealt out along expert_dp) and
        along tp."""
        for alike, linears in self.delayed:
            seen = torch.stack([linear.seen for linear in linears])
            for group in (alike, self.mesh.tp):
                seen = group.all_reduce(seen, op="max") if group.size > 1 else seen
            for linear, largest in zip(linears, seen, strict=True):
                linear.turn(largest)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.mesh.tp.size > 1:
            loss = vocab_parallel_cross_entropy(logits, targets, self.mesh.tp)
        else:
            loss = cross_entropy(logits, targets)
        if self.share is not None:
            loss = packed.weighted(loss, targets, self.share)
        return self.scaler.scale(loss) if self.scaler else loss

    def _everybodys(self, loss: Tensor | None, factor: float) -> float:
        """The mean over all tokens, from the ranks of the last stage to all: one number over the world."""
        share = torch.zeros(1, dtype=torch.float64, device=self.mesh.world.device)
        if loss is not None and self.mesh.tp.rank == 0:
            share += loss.double() / factor
        return float(self.mesh.world.all_reduce(share)) / self.mesh.data.size


def _cut(whole: Tensor, dim: int | None, tp: Group) -> Tensor:
    return whole if dim is None else whole.tensor_split(tp.size, dim)[tp.rank]


def _mine(model: GPT, schedule: Any, mesh: Mesh) -> dict[int, list[tuple[str, nn.Module]]]:
    """The layers of each of this rank's stages: the embedding with the first, the head with the last, which gets fewer
    blocks where the head takes as long as some."""
    blocks = iter([(f"blocks.{index}", block) for index, block in enumerate(model.blocks)])
    counts = blocks_of(ModelShape.of(model.config), schedule.n_stages)
    runs = [[*islice(blocks, count)] for count in counts]
    runs[0] = [("embedding", model.embedding), *runs[0]]
    runs[-1] = [*runs[-1], ("head", model.head)]
    return {stage: runs[stage] for stage in schedule.stages_of(mesh.pp.rank)}
