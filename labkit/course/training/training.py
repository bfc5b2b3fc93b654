"""`labkit train`: real ranks train a GPT on the shipped text, and report the costs.

    kernel (this file, `train`)       ranks (`life`)
    Cluster of dp x pp x tp ranks --> assemble, load the last checkpoint if told to
                                      for each step: rows of this dp rank -> TrainStep; now and then save
    Report <------------------------- losses, seconds, memory by kind, bytes by axis

Checkpoints are written behind the steps that follow (labkit.parallel.checkpoint_write), and the last three are kept.
A run that is killed at any moment goes on with `resume=True` from the last whole checkpoint, with the same losses that
it would have had: the data depend only on (seed, step), and the optimizer's state is in the checkpoint. A folder has
one run at a time (run_lock.py). A checkpoint that is damaged or of another run is set aside, and the one before it
taken.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.course.training.run_lock import run_lock
from labkit.course.training.training_report import TrainingReport
from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import ExpertLoad, sent_per_step

if TYPE_CHECKING:
    from labkit.comm.group import Group
    from labkit.train.config import GPTConfig


WARM = 3
"""Steps whose times are not compared: the first make state and learn orders, the second is probed."""
FREE = (
    "strategy", "schedule", "n_micro", "stages_per_rank", "offload", "recompute", "sequence_parallel", "tp_overlap",
    "shard_ranks", "reshard", "fp8_gathers",
)  # fmt: skip
"""Fields of a recipe that may change when a run is resumed: they decide where and when, not what, is computed."""


@dataclass(frozen=True)
class Order:
    """Everything that the ranks need to know about a run. `run` is its folder, `run_id` stands in each checkpoint.

    `packed`: each row is made of several documents that do not see each other (labkit.train.packed)."""

    config: GPTConfig
    recipe: Recipe
    layout: Layout
    steps: int
    run: str = ""
    save_every: int = 0
    resume: bool = False
    device: str = "auto"
    run_id: str = ""
    packed: bool = False


def train(order: Order) -> TrainingReport:
    """Run `order.steps` steps on fresh ranks. With `order.run`, checkpoints, report and loss curve are written there.

    Raises ValueError, before any rank starts, for an impossible order, and if `run` holds another run's checkpoints or
    belongs to a run that is under way."""
    from labkit.plan.job.recipe import check

    check(order.config, order.recipe, order.layout)
    if order.steps < 1:
        raise ValueError(f"a run has at least 1 step, got {order.steps}")
    if (order.save_every or order.resume) and not order.run:
        raise ValueError("checkpoints need a folder: --out runs/first")
    folder = Path(order.run)
    with run_lock(folder, order.resume) if order.run else nullcontext("") as run_id:
        report = _trained(replace(order, run_id=run_id))
        if order.run:
            write_report(report, folder)
    return report


def write_report(report: TrainingReport, folder: Path) -> None:
    """Write report.json and loss.svg into a run's folder."""
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    (folder / "loss.svg").write_text(str(report.picture()), encoding="utf-8")


def _trained(order: Order) -> TrainingReport:
    from labkit.launch.cluster import BareCluster

    with BareCluster(order.layout.size, device=order.device, timeout_s=600) as cluster:
        return report_of(order, [reply.value for reply in cluster.run(life, order)])


def report_of(order: Order, replies: list[dict[str, Any]]) -> TrainingReport:
    """The report from what `life` gave on the first ranks, or on all."""
    first, layout = replies[0], order.layout
    step_s = first["step_s"]
    tokens_per_s = order.recipe.batch_size * order.config.seq / step_s
    law = None
    if not order.recipe.precision_law.casts:
        law = [
            dict(
                sent_per_step(
                    layout, order.recipe, rank, parameter_bytes=reply["parameter_bytes"], n_layer=reply["n_layer"],
                    d_model=order.config.d_model, seq=order.config.seq, coded_params=reply["coded_params"],
                    shape=order.config, experts=_load(order, reply),
                )
            )
            for rank, reply in enumerate(replies)
        ]  # fmt: skip
    return TrainingReport(
        config=asdict(order.config),
        recipe=asdict(order.recipe),
        layout=asdict(layout),
        losses=first["losses"],
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * order.config.flops_per_token() / (first["peak_flops"] * layout.size),
        peak_flops=first["peak_flops"],
        memory=[reply["memory"] for reply in replies],
        sent=[reply["sent"] for reply in replies],
        charged=[reply["charged"] for reply in replies],
        law=law,
        skipped=first["skipped"],
        saved=first["saved"],
        resumed_at=first["resumed_at"],
    )


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _load(order: Order, reply: dict[str, Any]) -> ExpertLoad | None:
    """The experts of the rank that replied, equally busy; None where they are not dealt out."""
    if order.layout.ep == 1:
        return None
    config = order.config
    return ExpertLoad(
        config.n_expert, config.top_k, reply["expert_bytes"], None, config.capacity, reply["coded_experts"]
    )


def life(group: Group, order: Order) -> dict[str, Any]:
    """The training run on one rank."""
    from labkit.assemble import PRODUCTS, WEIGHTS, assemble
    from labkit.comm.mesh import Mesh
    from labkit.launch.progress import track
    from labkit.parallel import checkpoints
    from labkit.parallel.expert import Balance
    from labkit.probe.peak import peak_flops
    from labkit.probe.straggler import OwnTime, of_all, stragglers
    from labkit.train.data import batch, packed_batch

    mesh = Mesh.connect(order.layout, group)
    step = assemble(order.config, order.recipe, mesh)
    losses, begin, where, run_id = _resume(order, step, mesh)
    products = PRODUCTS.get(order.recipe.precision, WEIGHTS[order.recipe.precision])
    peak = peak_flops(group, products)
    seconds, skipped, probed = [], 0, min(begin + 1, order.steps - 1)
    own_time = OwnTime(group)
    seen: dict[str, Any] = {"memory": {}, "sent": {}, "charged": {}}
    saving: checkpoints.Saving | None = None
    for number in track(range(begin, order.steps), group):
        tokens, targets, *documents = (packed_batch if order.packed else batch)(
            order.recipe.seed, number, mesh.dp.rank, mesh.dp.size, order.recipe.batch_size, order.config.seq,
            device=group.device,
        )  # fmt: skip
        arguments: tuple[Any, ...] = (tokens, targets, number, *documents)
        if number == probed:  # the second step, in which the optimizer already has its state
            loss, seen = _probed(step, arguments, group)
        else:
            started = time.perf_counter()
            with own_time:
                loss = step(*arguments)
            seconds.append(time.perf_counter() - started)
        losses.append((number, loss))
        skipped += step.skipped
        last = number == order.steps - 1
        if group.rank == 0 and (last or number % max(1, order.steps // 10) == 0):
            print(f"step {number:5d}   loss {loss:.4f}", flush=True)
        if order.run and (last or (order.save_every and (number + 1) % order.save_every == 0)):
            note: dict[str, Any] = {"losses": losses, "config": asdict(order.config), "recipe": asdict(order.recipe)}
            note["scaler"] = step.scaler.state_dict() if step.scaler else None
            note["packed"] = order.packed
            check_replicas(step, number)  # a corrupt state is never saved as a good one
            if saving is not None:
                saving.wait(group)
            saving = checkpoints.save_start(order.run, number + 1, step.parts, mesh, note, run_id=run_id)
    if saving is not None:
        where = str(saving.wait(group))
    peak = max(peak, peak_flops(group, products))  # the machine may have been busier before the run than during it
    by_rank = of_all(group, own_time.seconds[WARM:])
    if group.rank == 0:
        for slow in stragglers(by_rank):
            others = statistics.median(by_rank[:slow] + by_rank[slow + 1 :])
            print(f"rank {slow} is slow: {by_rank[slow]:.3g} s of each step are its own, {others:.3g} s of the others'")
    return {
        **seen,
        "losses": losses,
        "step_s": statistics.median(seconds or [1e-9]),
        "peak_flops": peak,
        "skipped": skipped,
        "saved": where,
        "resumed_at": begin,
        "parameter_bytes": step.parameter_bytes,
        "coded_params": step.coded_params,
        "coded_experts": step.coded_experts,
        "expert_bytes": sum(
            p.nbytes for sync in step.besides if not isinstance(sync, Balance) for p in sync.module.parameters()
        )
        if order.config.n_expert
        else 0,
        "n_layer": sum(path.startswith("blocks.") for stage in step.stages.values() for path in stage.paths),
    }


def check_replicas(step: Any, number: int) -> None:
    """ValueError on every rank if ranks that should hold the same bits after step `number` do not.

    DDP: gradients and weights over dp; ZeRO-1 and 2: the weights; HSDP: each shard's gradients over its copies. ZeRO-3
    holds nothing twice."""
    import torch

    from labkit.probe.replicas import odd_ranks

    mesh, world = step.mesh, step.mesh.world
    copies = mesh.data if mesh.replicate is None else mesh.replicate
    odd = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    if copies.size > 1 and (step.recipe.strategy != "zero3" or mesh.replicate is not None):
        for sync in step.syncs.values():
            whole = [] if mesh.replicate is not None else list(sync.module.parameters())
            held = list(sync.grads()) if step.recipe.strategy in ("ddp", "zero3") else []
            odd[[copies.ranks[rank] for rank in odd_ranks([*whole, *held], copies)]] = 1
    ranks = world.all_reduce(odd, "max").nonzero().flatten().tolist()  # of all groups of replicas, on every rank
    if ranks:
        raise ValueError(
            f"after step {number} the replicas on ranks {', '.join(map(str, ranks))} do not have the bits of the "
            "others (with two replicas: of each other). A device or a link has computed or sent wrong numbers. Nothing "
            "of this step was saved: find the device, and go on from the last checkpoint with --resume"
        )


def _resume(order: Order, step: Any, mesh: Any) -> tuple[list[tuple[int, float]], int, str, str]:
    """(losses so far, first step to do, folder, run id), from the last checkpoint that is whole and of this run."""
    from labkit.parallel import checkpoints

    if not order.resume:
        return [], 0, "", order.run_id
    faults: dict[Path, str] = {}
    for candidate, contents, fault in checkpoints.checked(order.run, mesh, order.run_id):
        if not fault:
            folder, whole = candidate, contents
            break
        faults[candidate] = fault
    else:
        mend = f": {'; '.join(faults.values())}: choose another folder" if faults else ": leave --resume out"
        raise ValueError(f"there is no whole checkpoint in {order.run} to resume{mend}")
    _same_run(order, folder, whole["extra"])
    extra = checkpoints.load(folder, step.parts, mesh, whole)
    if step.scaler and extra["scaler"]:
        step.scaler.load_state_dict(extra["scaler"])
    if extra["step"] >= order.steps:
        raise ValueError(f"{folder} is at step {extra['step']}, the run ends at {order.steps}: ask for more --steps")
    if mesh.world.rank == 0:
        for passed, fault in faults.items():
            aside = checkpoints.set_aside(passed)
            print(f"{fault}. It is kept as {aside.name}, and the run goes on from {folder.name}.", flush=True)
    losses = [(number, loss) for number, loss in extra["losses"]]
    return losses, extra["step"], str(folder), order.run_id or whole["run"]


def _same_run(order: Order, folder: Path, note: dict[str, Any]) -> None:
    for name, own in (("config", order.config), ("recipe", order.recipe)):
        free, now = () if name == "config" else FREE, asdict(own)
        was = asdict(type(own)()) | note[name]  # a field that is younger than the checkpoint had its usual value
        differs = {key: (was[key], now[key]) for key in now if key not in free and was[key] != now[key]}
        if differs:
            changes = ", ".join(f"{key} was {was}, is {is_now}" for key, (was, is_now) in differs.items())
            raise ValueError(f"{folder} was made by another {name}: {changes}")
    if note.get("packed", False) != order.packed:
        made, mend = ("with", "give") if not order.packed else ("without", "leave out")
        raise ValueError(f"{folder} was made {made} packed documents: {mend} --packed")


def _probed(step: Any, arguments: tuple[Any, ...], group: Group) -> tuple[float, dict[str, Any]]:
    from labkit.parallel.eight_bit_gradients import EightBitGradients
    from labkit.probe.memory import MemoryProbe

    probe = MemoryProbe(device=group.device.partition(":")[0])  # what is offloaded is not on the GPU
    for sync in (*step.syncs.values(), *step.besides):
        compress = getattr(sync, "compress", None)
        for remembered in compress.held() if isinstance(compress, EightBitGradients) else ():
            probe.label(remembered, "other")  # it was made in an earlier step
    for stage, module in step.stages.items():
        probe.watch(module, step.syncs[stage].optimizer, f"stage{stage}")
    for number, sync in enumerate(step.besides):  # experts that were dealt out are in no stage
        probe.watch(sync.module, sync.optimizer, f"experts{number}")
    cut, dealt = step.mesh.cp.size > 1, step.mesh.ep.size > 1
    axes = (*step.recipe.axes, *(("cp",) if cut else ()), *(("ep", "expert_dp") if dealt else ()))
    ledger = group.ledger
    before = {axis: (ledger.sent_bytes(axis=axis), ledger.charged_bytes(axis=axis)) for axis in axes}
    with probe:
        loss = step(*arguments)
    sent = {axis: ledger.sent_bytes(axis=axis) - was for axis, (was, _) in before.items()}
    charged = {axis: ledger.charged_bytes(axis=axis) - was for axis, (_, was) in before.items()}
    peak: Breakdown = probe.peak
    return loss, {"memory": dict(peak), "sent": sent, "charged": charged}
