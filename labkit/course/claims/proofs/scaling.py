"""Claims on scaling: how much more devices help, by Amdahl's law and by simulation."""

from __future__ import annotations

from labkit.course.claims.finding import Finding, Setting
from labkit.plan.pocket.scaling import amdahl, serial_share
from labkit.plan.schedules.schedule import one_f_one_b, simulate
from labkit.plan.step.bottlenecks import gustafson


def pipelined(stages: int, n_micro: int) -> float:
    """The speed-up of a simulated 1F1B pipeline over one device: a stage's forward takes 1, its backward 2."""
    took = max(span.end for span in simulate(one_f_one_b(stages, n_micro)))
    return 3 * n_micro * stages / took


def c49() -> Finding:
    """Apply Amdahl's law to very many ranks, and simulate a pipeline whose fill and drain is a tenth of the work."""
    return Finding.of(
        [
            Setting("endless GPUs", 10.0, amdahl(1e12, 0.1), "times", within=1e-6),
            Setting("1,024 GPUs", 10.0, amdahl(1024, 0.1), "times", rule="at most", within=0),
            Setting("64 stages, 10 micro-batches", 10.0, pipelined(64, 10), "times", within=0, rule="at most"),
        ],
        pipeline_by_law=amdahl(64, 1 / 10),
    )


def c50() -> Finding:
    """Apply Amdahl's law for speed-up and efficiency, and Karp and Flatt's for the share that the claim would need."""
    speed_up = amdahl(256, 0.02)
    return Finding.of(
        [
            Setting("speed-up on 256 GPUs", 50.0, speed_up, "times"),
            Setting("efficiency on 256 GPUs", 0.78, speed_up / 256),
        ],
        limit=amdahl(1e12, 0.02),
        efficiency_at_50=50 / 256,
        share_for_50=serial_share(256, 50),
    )


def c51() -> Finding:
    """Apply Amdahl's law at 5% for the three sizes, and divide each speed-up by its number of GPUs."""
    claimed = {8: (6.0, 0.75), 64: (15.4, 0.24), 256: (18.6, 0.07)}
    settings = []
    for n, (speed_up, efficiency) in claimed.items():
        settings.append(Setting(f"speed-up on {n} GPUs", speed_up, amdahl(n, 0.05), "times"))
        settings.append(Setting(f"efficiency on {n} GPUs", efficiency, amdahl(n, 0.05) / n))
    return Finding.of(settings)


def c102() -> Finding:
    """Simulate pipelines, and compare with Amdahl's law for a serial share of one over the micro-batches."""
    sizes = ((4, 8), (16, 8), (64, 8), (16, 32))
    return Finding.of(
        [
            Setting(f"{p} stages, {m} micro-batches", amdahl(p, 1 / m), pipelined(p, m), "times", within=1e-9)
            for p, m in sizes
        ]
    )


def c95() -> Finding:
    """Efficiency on 256 ranks if 2% do not shrink: by Amdahl for the same batch, by Gustafson for a larger."""
    kept, grown = amdahl(256, 0.02) / 256, gustafson(256, 0.02) / 256
    return Finding.of(
        [
            Setting("the batch stays", 0.5, kept, rule="below"),
            Setting("the batch grows with the GPUs", 0.5, grown, rule="below"),
        ],
        premise="the batch stays as it is",
    )
