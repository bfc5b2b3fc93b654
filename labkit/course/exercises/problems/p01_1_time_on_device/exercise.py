"""01.1: how long an operation takes on a device that answers before it is done."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


def time_on_device(
    launch: Callable[[], None], sync: Callable[[], None], clock: Callable[[], float], warmup: int, repeats: int
) -> float:
    """The median of the seconds that one run takes: its launch and its work, from an idle device to an idle device.

    `launch()` puts the work into the device's queue and returns long before it is done; `sync()` returns when the
    queue is empty; `clock()` tells the seconds. When you are called the queue may still hold somebody else's work.

    Launch `warmup` times (none or more) without timing, as first runs are slow, then `repeats` times (one or more),
    each timed by itself. For an even number of repeats the median is the mean of the two in the middle."""
    for _ in range(warmup):
        launch()
    sync()
    times = []
    for _ in range(repeats):
        began = clock()
        launch()
        sync()
        times.append(clock() - began)
    return statistics.median(times)


class Device:
    """A simulated device with a queue and a clock of its own: it works its queue off while the caller goes on.

    launch_s     what a launch costs the caller, before the run can begin
    durations    of its runs, in seconds; `launches` counts them
    """

    def __init__(self, began: float, launch_s: float, busy_s: float, durations: Sequence[float]):
        self.now, self.launch_s, self.durations, self.launches = began, launch_s, durations, 0
        self.idle_at = began + busy_s

    def launch(self) -> None:
        """Put a run at the end of the queue."""
        self.now += self.launch_s
        self.idle_at = max(self.now, self.idle_at) + self.durations[self.launches % len(self.durations)]
        self.launches += 1

    def sync(self) -> None:
        """Wait until the queue is empty."""
        self.now = max(self.now, self.idle_at)

    def clock(self) -> float:
        """The simulated time in seconds."""
        return self.now


def cases() -> list[Case]:
    """Even and odd numbers of repeats, with a warm-up and without; ten devices each."""
    return [Case.of(1, warmup=2, repeats=6), Case.of(1, warmup=4, repeats=9), Case.of(1, warmup=1, repeats=1),
            Case.of(1, warmup=0, repeats=2)]  # fmt: skip


def inputs(case: Case) -> Inputs:
    """The arguments of ten `Device`s, and the numbers of warm-ups and repeats."""
    drawn, devices = random.Random(case.seed), []
    for _ in range(10):
        usual = drawn.uniform(0.5, 5.0)
        slow = [usual * drawn.uniform(10, 80) for _ in range(case["warmup"])]
        steady = [usual * drawn.uniform(1.0, 1.2) for _ in range(case["repeats"])]
        steady[drawn.randrange(len(steady))] *= drawn.uniform(3, 9) if case["repeats"] > 2 else 1.0
        devices.append((drawn.uniform(0, 1000), usual / 20, drawn.uniform(20, 90), slow + steady))
    return [(devices, case["warmup"], case["repeats"])]


def play(attempt: Any, group: Group, devices: list[Any], warmup: int, repeats: int) -> Any:
    """The seconds that the attempt returns for each device, and how often it launched."""
    replies = []
    for began, launch_s, busy_s, durations in devices:
        device = Device(began, launch_s, busy_s, durations)
        seconds = attempt(lambda d=device: d.launch(), lambda d=device: d.sync(), lambda d=device: d.clock(),
                          warmup, repeats)  # fmt: skip
        replies.append({"seconds": float(seconds), "launches": device.launches})
    return replies


def answer(case: Case, inputs: Inputs) -> Answers:
    """The median of the durations that the judge drew, each with the cost of its launch."""
    devices, warmup, repeats = inputs[0]
    middle = [[launch_s + duration for duration in sorted(durations[warmup:])] for _, launch_s, _, durations in devices]
    half = repeats // 2
    return [[{"seconds": (seconds[half] + seconds[-half - 1]) / 2, "launches": warmup + repeats} for seconds in middle]]


PROBLEM = exercise(__name__, time_on_device)
