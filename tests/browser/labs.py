"""The labs' widgets: what somebody does to each of them in JupyterLab, and what must be seen then.

A widget is named by its cell and its class. Only the cells that it needs are run (excerpt.py): those whose names it
uses, and those that `also` names, which draw into it; `short` names cells that a shortcut stands for (shortcuts.py), as
in the journey. The steps above GOES_ON are the journey's (test_journey.py), too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from labkit.course.numbers import number_of
from labkit.course.topics.design_cases import case
from tests.browser.jupyter import END_MS
from tests.browser.steps import (
    GOES_ON,
    HANDLE,
    Step,
    at_last,
    chooses,
    clicks,
    clicks_on,
    counts,
    focuses,
    has,
    hovers_over_an_action,
    is_asked_about_system_design,
    lacks,
    links,
    predict,
    presses,
    redraws,
    rewords,
    sees,
    shows,
    slides,
    types,
    writes,
)

NONSENSE = "the picture is the last one that made sense"
BITS = "button.jupyter-widget-toggle-button, button.widget-toggle-button"
CHECKBOX = "input[type=checkbox]"


@dataclass(frozen=True)
class Shown:
    """What a cell shows: a widget of the class `kind`, or plain outputs if there is none; and what is done to it."""

    cell: str
    kind: str
    steps: tuple[Step, ...]

    @property
    def of_the_journey(self) -> tuple[Step, ...]:
        """The first steps; none if the journey does not come here."""
        return self.steps[: self.steps.index(GOES_ON)] if GOES_ON in self.steps else ()


@dataclass(frozen=True)
class Lab:
    """The notebook `stem`: what is done to what it shows, and the cells that must run for that besides those needed."""

    stem: str
    shown: tuple[Shown, ...]
    also: tuple[str, ...] = ()
    short: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.stem

    @property
    def number(self) -> str:
        """Such as "04" or "05b"."""
        return number_of(self.stem)

    @property
    def touched(self) -> tuple[Shown, ...]:
        """What the journey touches."""
        return tuple(shown for shown in self.shown if shown.of_the_journey)


def widget(cell: str, kind: str, *steps: Step) -> Shown:
    """A live widget."""
    return Shown(cell, kind, steps)


def printed(cell: str, *steps: Step) -> Shown:
    """What a cell prints or draws, without a widget."""
    return Shown(cell, "", steps)


def predicted(cell: str, question: str, typed: str, answer: str, *steps: Step) -> Shown:
    """A prediction that is typed, and what the widget answers."""
    return Shown(cell, "Predict", (predict(question, typed, answer), *steps))


def eight_plans() -> str:
    """How many plans fit in the case of eight devices, as the planner's panel says it."""
    plans = case("eight").found
    return f"{sum(plan.kept for plan in plans)} of {len(plans)} plans fit"


# fmt: off
LABS = (
    Lab("00_doctor_and_first_cluster", (
        predicted(
            "c18", "Seconds from Cluster(4) to its first all_reduce?", "80 ms", "you predict 80 ms",
            GOES_ON,
            sees("measured"),
            predict("Seconds from Cluster(4)", "soon", "still 80 ms"),
        ),
        predicted(
            "00-42", "One way, 64 bytes, between two ranks of this machine?", "0.2 ms", "you predict 200 us",
            sees("measured"),
        ),
        widget(
            "c26", "Play",
            sees("1,048,576 bytes"),
            slides(0, "ArrowRight"), sees("2,097,152 bytes"),
            GOES_ON,
        ),
        predicted("00-47", "How many processes are new afterwards?", "1", "you predict 1 process", sees("measured")),
        printed("00-52", sees("torchrun", "spawn", "labkit", "rank 0 of 2 has 2.0", "rank 1 of 2 has 2.0")),
    ), also=("c20", "00-43", "00-48", "00-56")),
    Lab("01_one_step_all_its_bytes", (
        predicted(
            "01-17", "Highest number of bytes that one device holds in a step?", "33 MiB", "you predict 34,603,008 B",
        ),
        widget(
            "01-33", "MemoryAnatomy",
            sees("bytes / N", "4 x 128 tokens, fp32, adamw"), sees("measured", part="svg"),
            slides(0, "ArrowRight"), sees("5 x 128 tokens, fp32, adamw"),
            clicks("rehearse"), at_last("rehearsed in"), sees("rehearsed", part="svg"),
            chooses(2, "bf16"), sees("5 x 128 tokens, bf16, adamw"),
            clicks_on(CHECKBOX), sees("adamw, checkpointing"),
            types(0, "-8", part="input[type=number]"), sees("seq must be a whole number of at least 1, got -8"),
            sees("5 x 128 tokens, bf16, adamw, checkpointing"),
            chooses(0, "llama-7b"),
            chooses(-1, "h100"), sees("llama-7b, 5 x 2,048 tokens", "do not fit h100"),
        ),
    ), short=("01-19",)),
    Lab("01b_one_step_all_its_time", (
        predicted("01b-09", "times the bytes of one kernel?", "6.5", "you predict 6.5 times", sees("measured")),
        predicted("01b-10", "bytes that are loaded?", "128 KiB", "you predict 131,072 B", sees("measured")),
        widget(
            "01-45", "RooflineExplorer",
            sees("left of it an op waits for memory", "gpt2, 1 x 1,024 tokens, forward"),
            slides(0, "ArrowRight"), sees("gpt2, 2 x 1,024 tokens, forward, on this machine in fp32"),
            chooses(0, "h100"), sees("on h100 in fp32"),
        ),
    ), also=("01b-12-answer", "01b-13"), short=("01-42",)),
    Lab("02_point_to_point", (
        predicted("c08", "Bytes that each rank sends?", "4000", "you predict 4,000 B"),
        predicted("02-31", "as long as one of 64 bytes?", "3", "you predict 3 times", sees("measured")),
        widget(
            "c14", "Play",
            sees("ring shift of 65,536 bytes"),
            slides(0, "ArrowRight"), at_last("ring shift of 131,072 bytes"),
            slides(0, "Home"), at_last("ring shift of 64 bytes"),
        ),
        predicted(
            "02-34", "Messages for one batch, there and back", "6", "you predict 6 messages",
            sees(re.compile("measured.*6 messages")),
        ),
        printed("02-40", sees("wait in all_reduce #3")),
        printed("02-44", sees("timeout=1800: TypeError")),
    ), also=("02-32", "02-35-answer")),
    Lab("03_collectives", (
        predicted(
            "c10", "Bytes that each rank sends in a ring all-reduce?", "28,800", "you predict 28,800 B",
            sees("measured"),
        ),
        predicted("03-39", "share of the bytes of all_reduce?", "50", "you predict 50 %", sees("measured")),
        predicted(
            "03-44", "Latencies that a ring all-reduce of 8 ranks waits for", "14", "you predict 14 latencies",
            sees("measured"),
        ),
        widget(
            "c15", "RingFilm",
            sees("step 0 of 6"),
            clicks("next step"), sees("step 1 of 6", "before step 1 of 6"),
            presses(".lk-film", 0, "ArrowRight"), sees("step 2 of 6"),
            presses(".lk-film", 0, "End"), sees("the end"),
            GOES_ON,
        ),
        widget(
            "c21", "CrossoverExplorer",
            sees("alpha, us"),
            slides(0, "ArrowRight"), sees("all_reduce on 5 ranks"),
            GOES_ON,
            rewords(1, "ArrowLeft", r"ring and tree meet at [\d.,]+ \w+"),
            rewords(2, "ArrowLeft", r"ring and tree meet at [\d.,]+ \w+"),
        ),
        predicted("03-62", "which share of what the single tree", "50", "you predict 50 %"),
        predicted("03-52", "takes how many times as long as one inside?", "9", "you predict 9 times", sees("measured")),
        printed("03-56", sees("leaves a node", "1.5 S", "1.0 S")),
    ), also=("c12", "03-40-answer", "03-45-answer", "03-53-answer")),
    Lab("04_one_device_less_memory", (
        predicted("04-14", "take how many times as long", "3", "you predict 3 times"),
        predicted("04-26", "36 layers in 6 segments?", "11 MiB", "you predict 11,534,336 B = 11 MiB"),
        widget(
            "04-32", "CheckpointExplorer",
            sees("layers in a segment, k", "lowest at k = 6: 11 MiB", "measured with segments of 6"),
            slides(1, "ArrowLeft"), sees("36 layers in 8 segments of 4 or 5"),
            slides(2, "ArrowRight"), sees("lowest at k = 4.24"),
            slides(0, "ArrowRight"), sees("37 layers in 8 segments"),
            types(-1, "lots"), sees(NONSENSE),
            types(-1, "30 MiB"), sees("cap 30 MiB"),
        ),
        widget(
            "04-34", "Play",
            sees("at the peak", "6 segments: peak"),
            slides(0, "ArrowRight"), at_last("7 segments: peak"),
            slides(0, "Home"), at_last("VirtualOutOfMemory", "7 segments: peak"),
        ),
    )),
    Lab("05_precision", (
        widget(
            "05-14", "FloatExplorer",
            sees("bits of"), counts(BITS, 16),
            clicks_on(BITS, 0), sees("-0.000120162963867 in 7 formats"),
            presses(BITS, 0, "Space"), sees(re.compile(r"(?<!-)0\.000120162963867 in 7 formats")),
            presses(BITS, 0, "Tab"), focuses(BITS, 1),
            types(0, "1 + 2^-9"), sees("1.001953125 in 7 formats"),
            types(0, "one"), sees("'one' is no number", "1.001953125 in 7 formats"),
            chooses(0, "fp32"),
            counts(BITS, 32),
        ),
        predicted("05-16", "What does it hold, in units of 1e-9?", "119", "you predict 119 e-9"),
        predicted("05-24", "zero after a step in fp16?", "95", "you predict 95 %"),
        predicted("05-34", "before the first one is taken?", "10", "you predict 10 steps"),
        widget(
            "05-50", "GradientHistogram",
            sees("scale 2^", "gradients times 2^16, as fp16 holds them"),
            slides(0, "ArrowRight"), sees("gradients times 2^17"),
            chooses(0, "fp8_e5m2"), sees("as e5m2 holds them"),
            chooses(-1, "head.norm.weight"), sees("head.norm.weight: 32 gradients"),
        ),
        widget(
            "05-52", "LossScaleExplorer",
            sees("interval"), sees("of 40 steps skipped", part="svg text"),
            redraws(0, *4 * ["ArrowLeft"]),
            counts(HANDLE, 4),
            *(redraws(place, *4 * ["ArrowLeft"]) for place in range(1, 4)),
        ),
    )),
    Lab("05b_eight_bits", (
        widget("05b-10", "BlockExplorer", sees("one of them 16384")),
        predicted("05b-12", "does 1 become 0 in e4m3?", "458752", "you predict"),
        predicted("05b-23", "rounded stochastically to e2m1: their sum?", "200", "you predict"),
        predicted("05b-27", "percent of bf16's bytes?", "50", "you predict 50 %"),
        predicted("05b-31b", "percent of fp32's bytes?", "25", "you predict 25 %"),
    )),
    Lab("06_data_parallel", (
        predicted("06-17", "each rank sends in one DDP step?", "200 KiB", "you predict 204,800 B = 200 KiB"),
        predicted("06-36", "Which bucket size ends the step first?", "200 KiB", "you predict 204,800 B = 200 KiB"),
        widget(
            "06-41", "BucketExplorer",
            sees("begin of backward to end of the last bucket"),
            slides(0, "Home"), sees("buckets of 64 KiB: 12 buckets"),
            slides(0, "End"), sees("buckets of 768 KiB: 1 bucket; ", "0% of the wire hidden"),
            types(0, "huge"), sees(NONSENSE, "buckets of 768 KiB: 1 bucket; "),
            types(0, "200 KiB"), sees("buckets of 200 KiB: 4 buckets"),
            clicks("run it on the ranks"), at_last("measured with buckets of 200 KiB: "),
            slides(1, "ArrowRight"), lacks("measured with buckets of 200 KiB: "),
        ),
    ), short=("06-38",)),
    Lab("06b_stale_and_compressed", (
        predicted(
            "06b-10", "steps old: from which learning rate on does w diverge?", "0.7", "you predict 0.7",
        ),
        widget(
            "06-53", "StaleExplorer",
            sees("recorded runs: a dot converged, a cross diverged"),
            sees("gradients 2 steps old, lr × curvature 0.501: swings"),
            sees("recorded: staleness 2, lr × curvature 0.927: diverged"),
            slides(0, "ArrowRight"), sees("gradients 3 steps old, lr × curvature 0.501: diverges"),
            slides(1, "Home"), sees("lr × curvature 0.01: creeps"),
            types(0, "steep"), sees(NONSENSE, "lr × curvature 0.01: creeps"),
            types(0, "20"), sees("lr × curvature 0.2: swings"),
        ),
        widget(
            "06-64", "CompressionExplorer",
            sees("the largest 0.01 of 21,768 gradients, 4 ranks", "measured on 4 ranks: 5,232 B"),
            clicks_on(CHECKBOX), sees("without feedback", part="svg"),
            slides(0, "ArrowRight"), sees("pays below 10 ranks"),
            types(0, "2.5"), sees("a whole number from 1 to 4,096"),
            types(0, "1000"), sees("21,768 gradients, 1,000 ranks"),
        ),
    ), short=("06-50", "06-62")),
    Lab("07_zero_1_and_2", (
        predicted("07-19", "ZeRO-1, mixed precision, AdamW?", "5.5", "you predict 5.5 B"),
        predicted("07-21", "what share of DDP's bytes", "1", "you predict 1 of DDP"),
        widget(
            "07-39", "ZeROExplorer",
            sees("model state of one rank", "measured"),
            sees("ZeRO-1, 407,040 parameters on n = 4 ranks, mixed, adamw"),
            slides(0, "ArrowRight"),
            sees("ZeRO-2, 407,040 parameters", "2 N + 14 N/4 = 5.5 bytes a parameter"),
            slides(1, "ArrowRight"), sees("sends 1.83 MB a step"),
            types(0, "70B"), sees("70 billion parameters"), lacks("measured"),
            types(1, "0"), sees(f"got '0': {NONSENSE}", "70 billion parameters on n = 4"),
            types(1, "64"), sees("1.12 TB", "16 B × N"),
            chooses(2, "h200"), sees("h200: 141 GB"),
            chooses(0, "fp32"), sees("fp32, adamw"),
            chooses(1, "sgd"), sees("fp32, sgd"),
        ),
    )),
    Lab("08_zero_3_fsdp", (
        predicted("08-15", "bytes that a rank of ZeRO-3 sends", "12 MiB", "you predict 12,582,912 B = 12 MiB"),
        predicted("08-17", "GB of weights on a rank at the peak", "2.2", "you predict 2.2 GB"),
        widget(
            "08-29", "GatherExplorer",
            sees("held at the moment", "prefetch 0: moment 4 of 48", "blocks.0 on the way"),
            slides(0, "ArrowRight"), sees("prefetch 0: moment 5 of 48", "whole in forward", "blocks.0 whole"),
            slides(0, "Home"), sees("moment 0 of 48, 0 s: nothing whole"),
            chooses(0, "prefetch 1"), sees("prefetch 1: moment 6 of 48", "blocks.0 whole, blocks.1 on the way"),
            chooses(0, "segments checkpointed"), sees("segments checkpointed: moment"),
            has("svg title:has-text('whole again')"),
            types(-1, "at lunch"), sees(NONSENSE, "segments checkpointed: moment"),
            types(-1, "0 ms"), sees("segments checkpointed: moment 0 of"),
        ),
        widget(
            "08-42", "Play",
            sees("sequences on a rank", "ms a sequence, 64 GPUs, infiniband between nodes, amp"),
            chooses(0, "ethernet"), sees("64 GPUs, ethernet between nodes, amp"),
            chooses(1, "512"), sees("512 GPUs, ethernet between nodes, amp"),
            chooses(2, "fp32"), sees("512 GPUs, ethernet between nodes, fp32"),
        ),
    )),
    Lab("09_tensor_parallel", (
        predicted("09-24", "that one rank sends for one block", "768 KiB", "you predict 786,432 B = 768 KiB"),
        widget(
            "09-34", "SplitExplorer",
            sees("as on every rank", "column, then row on 4 ranks, forward: rank 0 sends 192 KiB"),
            sees("on ranks: 196,608 B, as the law"),
            slides(0, "ArrowRight"), sees("rank 1 sends 192 KiB"),
            slides(0, "End"), sees("rank 3 sends 192 KiB"),
            clicks("backward"), sees("backward (shown above)"),
            chooses(0, "column"), sees("column on 4 ranks, backward: rank 3 sends", "as the law"),
            chooses(0, "row"), sees("row on 4 ranks, backward: rank 3 sends", "as the law"),
            chooses(0, "attention"), sees("attention on 4 ranks, backward: rank 3 sends", "as the law"),
            counts("input[type=text]", 6),
            types(0, "3"),
            sees("the number of heads = 8 has no 3 equal parts; 1, 2, 4 or 8", "attention on 4 ranks"),
            types(0, "8"), sees("attention on 8 ranks"), lacks("measured"),
            # Tab goes from one size to the next:
            types(1, "256", end="Tab"), sees("[256, 256]"), focuses("input[type=text]", 2),
            types(3, "12"), sees("heads = 12 has no 8 equal parts"),
            types(3, "16"), sees("[256, 32]"),
            types(4, "2"), sees("[128, 256]"),
            types(5, "32"), sees("[64, 256]"),
            chooses(0, "column, then row"),
            types(2, "1024"), sees("[256, 1024]"),
            presses(CHECKBOX, 0, "Space"), sees("cut by position outside", "reduce-scatter of dx"),
        ),
        predicted("09-47", "how many times as fast as tp = 8", "0.9", "you predict 0.9 times"),
        predicted("09-80", "A gather and its product, in pieces", "150 ms", "you predict 150 ms"),
    )),
    Lab("10_pipelines", (
        predicted("10-07", "how many times as fast as one device?", "1", "you predict 1 time"),
        predicted("10-19", "% of the step spent waiting?", "43", "you predict 43 %"),
        predicted("10-26", "micro-batches that rank 0 holds at most?", "4", "you predict 4 micro-batches"),
        widget(
            "10-30", "InFlightExplorer",
            sees("time of one step, from the first forward on"),
            sees("a rank holds 4 at most, gpipe 32: 8 times as many", "measured 4."),
            slides(0, "ArrowLeft"), sees("gpipe, p = 4, m = 32: a rank holds 32 at most"),
            GOES_ON,
            slides(1, "ArrowRight"), sees("gpipe, p = 5", "rank 4"),
            types(0, "lots"), sees(NONSENSE, "gpipe, p = 5, m = 32"),
            types(0, "8"), sees("gpipe, p = 5, m = 8"),
            slides(0, "End"), sees("interleaved, p = 5, m = 8, v = 2"),
            slides(2, "ArrowRight"), sees("v = 3"),
        ),
        widget(
            "10-32", "PipelinePlayer",
            sees("1f1b, 4 ranks, 8 micro-batches: 33 forwards, ranks wait 27.3%"),
            slides(-1, "ArrowRight"), sees("0F0 runs on rank 0 from 0 to 1; it needs nothing"),
            hovers_over_an_action("needs 2F0"),
            GOES_ON,
            sees("recorded in"),
            slides(1, "ArrowRight"), sees("1f1b, 4 ranks, 9 micro-batches: 36 forwards"), lacks("recorded in"),
            slides(2, "ArrowUp", part=f".noUi-vertical {HANDLE}"),
            lacks("1f1b, 4 ranks, 9 micro-batches: 36 forwards", "law (p-1)"),
            chooses(0, "zero_bubble"), sees("zero_bubble, 4 ranks", "W weights"),
            chooses(0, "by hand"),
            writes("F0 F1 B0 B1\nB0 F0 F1 B1"), sees("deadlocks: rank 0 at 0B0 needs 1B0", "W weights"),
            writes("F0 F1 B0 B1\nF0 B0 F1 B1"), sees("by hand, 2 ranks, 2 micro-batches"),
        ),
        predicted("10-39", "there and back together?", "48", "you predict 48 messages"),
        predicted("10-43", "step on the slow links", "1.2", "you predict 1.2 times"),
        predicted("10-67", "% of the time that ranks work?", "70", "you predict 70 %"),
    )),
    Lab("10b_zero_bubbles", (
        widget(
            "10-38e", "SchedulePad",
            sees("zb_v, 4 ranks, 8 micro-batches", "recorded in", "without the ramp"),
            writes("F0 F1 B0 B1\nB0 F0 F1 B1"), sees("line 1, column 7", "deadlocks: rank 0 at 0B0 needs 1B0"),
            writes("F0 F1 B0 B1\nF0 B0 F1 B1"), sees("by hand, 2 ranks, 2 micro-batches"), lacks("recorded in"),
            chooses(0, "dualpipe"), sees("dualpipe, 4 ranks, 8 micro-batches"),
        ),
        predicted("10-38a", "% of the step that ranks wait?", "0", "you predict 0 %"),
        predicted("10-34", "messages of a step, over those of 1F1B?", "2.3", "you predict 2.3 times"),
    )),
    Lab("11_lora", (
        predicted("11-16", "Bytes that LoRA holds", "4 MiB", "you predict 4,194,304 B = 4 MiB"),
        predicted("11-18", "in a step of DDP, with LoRA", "48 KiB", "you predict 49,152 B = 48 KiB"),
        widget(
            "11-47", "LoRAExplorer",
            sees("loss of real runs over the rank", "8,192 of 210,304 parameters train, 3.895%"),
            sees("optimizer, measured"),
            slides(0, "ArrowRight"), sees("16,384 of 210,304 parameters train", "query, value, rank 16:"),
            chooses(1, "all linears"), sees("73,728 of 210,304"),
            types(0, "66"), sees(NONSENSE, "73,728 of 210,304"),
            types(0, ""), lacks(NONSENSE),
            chooses(0, "llama-7b"), sees("39,976,960 of 6,738,415,616 parameters train, 0.593%"),
            chooses(2, "4 bits"), sees("3.75 GiB"),
        ),
    )),
    Lab("12_three_dimensions", (
        predicted("12-13", "how many of the 80 layers", "20", "you predict 20 layers"),
        predicted("12-14", "weights, gradients and Adam", "35 GB", "you predict 35,000,000,000 B"),
        predicted("12-15", "bytes sent along tp, for each byte along dp", "10", "you predict 10 times"),
        widget(
            "12-35", "CubeExplorer",
            sees("dp group (dotted)", "rank 9 is dp 0, pp 1, tp 1"),
            slides(3, "ArrowRight"), sees("rank 10 is dp 0, pp 1, tp 2"),
            slides(0, "ArrowLeft"), sees("= 224 ranks"),
            slides(1, "ArrowLeft"), sees("= 168 ranks"),
            slides(2, "ArrowLeft"), sees("= 147 ranks"),
        ),
        widget(
            "12-38", "InterconnectExplorer",
            sees("in each box: rank; dp,pp,tp", "4 edges between nodes", "measured"),
            slides(1, "ArrowLeft"), sees("dp takes"),
            slides(1, "ArrowRight"),
            sees("tp takes"),
            slides(0, "ArrowLeft", "ArrowLeft"),  # past dp 1, pp 4, tp 1
            sees("dp 2 x pp 2 x tp 1", "round trips"),
            types(0, "100 us"),
            types(1, "90 MB/s"),
            types(2, "soon"),
            types(3, "10 MB/s"), sees(NONSENSE),
            types(2, "500 us"), sees("(0.5 ms, 10 MB/s) between"),
            clicks("measure on real ranks"), at_last("pp takes"),
            shows("svg[aria-label*='pp measured']", END_MS),
            slides(0, "End"), sees("tp takes 100%"),
            clicks("measure on real ranks"),
            clicks("stop"), at_last("stopped: nothing is kept"),
        ),
    )),
    Lab("13_scaling_limits", (
        predicted("13-04", "2% serial, 256 devices", "42", "you predict 42 times"),
        predicted("13-20", "the same 24 samples", "2", "you predict 2 times"),
        predicted("13-21", "24 samples *each*", "85", "you predict 85 %"),
        predicted("13-37", "one worker: a step takes?", "80 ms", "you predict 80 ms"),
        predicted("13-41", "endless stages", "8", "you predict 8 times"),
        predicted("13-46", "wait for gradients: MFU?", "30", "you predict 30 %"),
        widget(
            "13-51", "BottleneckExplorer",
            sees("the recorded steps fit a serial share of", "a step by its parts"),
            slides(0, "End"), sees("at 1,024 ranks, by Amdahl's law"),
            slides(1, "Home"), sees("1024 times, 100% efficient, no limit"),
            slides(2, "End"), sees("; what if: ", "times as fast"),
            slides(3, "ArrowRight"), sees("1.5 x"),
            slides(2, "Home"),
            slides(3, "Home"), lacks("what if"),
            slides(0, "Home"), sees("1 rank: "),
        ),
        predicted("13-57", "messages become 1", "2", "you predict 2 times"),
    )),
    Lab("14_system_design", (
        predicted("14-13", "how long for a trillion", "700", "you predict 700 days"),
        predicted("14-14", "what is left beside the state", "32 GB", "you predict 32,000,000,000 B"),
        predicted("14-15", "activations of ONE block", "2 GB", "you predict 2,000,000,000 B"),
        predicted("14-16", "flops of one token", "2e10", "you predict 20,000,000,000 flops"),
        widget(
            "14-42b", "MemoryAnatomy",
            sees("do not fit a100-80gb"),
            slides(0, "Home"), sees("fit a100-80gb"),
            chooses(-1, "h200"), sees("fit h200"),
        ),
    ), also=("14-26", "14-31", "14-33-answer", "14-36-answer")),
    Lab("14b_design_with_a_planner", (
        predicted("14b-04", "bytes of the fullest rank?", "2.9 MB", "you predict 2,900,000 B"),
        predicted("14b-05", "times as long as the planner's fastest plan", "1.2", "you predict 1.2 times", sees("law")),
        predicted("14b-21", "that ZeRO-3 can train here", "500000", "you predict 500,000 parameters"),
        widget(
            "14-65", "PlannerPanel",
            sees("eight devices of 80 GB, 60 GB of state", "opened: dp 8, pp 1, tp 1, ZeRO-1"),
            sees(lambda: f"8 x a100-80gb, 128 sequences of 2,048: {eight_plans()}"),
            chooses(4, 6), sees("opened: dp 8, pp 1, tp 1, DDP"),
            chooses(1, "h200"), sees("of 141 GB a device"),
            GOES_ON,
            chooses(2, "fp32"), lacks(eight_plans),
            chooses(3, "sgd"), sees("(sgd)"),
            types(0, "16"), sees("16 x h200"),
            types(1, "64"), sees("64 sequences of 2,048"),
            types(2, "1024"), sees("64 sequences of 1,024"),
            types(0, "many"), sees(NONSENSE, "16 x h200"),
            types(0, "8"), sees("8 x h200"),
            chooses(0, "gpt2-xl"), sees("gpt2-xl, 8 x h200"),
            chooses(0, "own sizes"), sees("own sizes, 8 x h200"),
            types(3, "12"),
            types(4, "1024"),
            types(5, "16"),
            # about 12 x 12 x 1024^2 + 2 x 32,000 x 1024, in millions:
            types(6, "32000"), sees(re.compile("N = 21[67]")),
        ),
        predicted("14-77c", "how many are foretold within 15%?", "50", "you predict 50 %"),
    ), also=("14b-08",)),
    Lab("15_clinic", (
        widget(
            "15-39", "Ward",
            chooses(0, "Mia"), sees("Suspects:", "Mia: loss explodes", "0 minutes", "No probe has been ordered."),
            clicks("gradients · 5 min"), sees("0.weight 4.7 long", "5 minutes"),
            chooses(1, "fp16 overflow"),
            clicks("name it"), sees("It is not “fp16 overflow”", "45 minutes", "Repaired in vain: fp16 overflow"),
            clicks("reference · 30 min"), sees("first gradient 8", "75 minutes"),
            lacks("sums, divided by the rows", "lab 04"),
            clicks("run it"), at_last("8 signs of Mia are from this run", "75 minutes"),
            chooses(1, "accumulation without normalisation"),
            clicks("name it"), sees("you had ordered what shows it", "55 points", "normalisation: lab 04"),
            sees("inf; and in fp32 all is well", "sums, divided by the samples of the whole batch"),
            clicks("score card"), sees("55 of 100 points; 75 minutes, par is 30", "Worth another look"),
            clicks("back to Mia"), sees("If it were another of the suspects"),
            clicks("next patient"), sees("No probe has been ordered."), lacks("Mia: "),
            chooses(0, "Bea"), clicks("memory"), sees("the job does not come so far", "20 minutes"),
            clicks("give up"), sees("You gave up", "0 points", "a skipped collective"),
            chooses(0, "Ned"), sees("Ned: ranks disagree"),
            clicks("run it"),
            clicks("stop"), shows("text=/^stopped$/", END_MS),
        ),
        predicted("15-19", "first gradient, against the whole batch", "8", "you predict 8 times"),
        predicted("15-20", "time does Rosa", "90", "you predict 90 %"),
    )),
    Lab("16_capstone", (
        predicted("16-13", "highest bytes of a rank, pipeline", "3.5 MB", "you predict 3,500,000 B"),
        predicted("16-14", "its score at home", "2", "you predict 2 MB s"),
        widget(
            "16-29", "CapstoneExplorer",
            sees("predicted bytes", "home; pp 4: 1f1b of 2, checkpointing: predicted"),
            sees("measured, the reference"),
            clicks_on(CHECKBOX), sees("MB over the cap"),
            chooses(0, "roomy"), sees("roomy; pp 4: 1f1b of 2: predicted", "fits under the cap"),
            slides(4, "ArrowRight"),
            sees("1f1b of 4"),
            slides(3, "ArrowRight"), sees("gpipe of 4"),
            slides(0, "Home"), sees(NONSENSE),
            slides(4, "Home"), sees("roomy; dp 4: ddp"),
            slides(2, "ArrowRight"), sees("dp 4: zero1"),
            slides(1, "ArrowRight"), sees("dp 4, apart: zero1"),
            clicks("run on real ranks"), at_last("(added to the board)", "measured by you"),
            clicks("run on real ranks"),
            clicks("stop"), at_last("stopped: nothing is kept"),
        ),
    ), short=("16-16",)),
    Lab("17_interview_room", (
        predicted("17-14", "ZeRO-2, 4 micro-batches: bytes sent", "2.5", "you predict 2.5 times DDP"),
        predicted("17-15", "ZeRO-3, 4 micro-batches: bytes sent", "6", "you predict 6 times DDP"),
        predicted("17-16", "ZeRO-3: weights and moments that a rank holds", "3", "you predict 3 B a parameter"),
        widget(
            "17-34", "Whiteboard",
            sees("show the answer", "Which share of a step do p ranks wait"),
            types(0, "(p-1)/m"),
            sees("the wait as a share of the ideal time, not of the step", "apart everywhere", "read as"),
            shows("mjx-container, .MathJax"),
            GOES_ON,
            types(0, "(p-1)m"), sees("column 6", NONSENSE, "apart everywhere"),
            types(0, "(p-1)/(m+p-1)"), sees("1 of 30 derived", "nowhere apart"),
            chooses(1, "p"), sees("with m ="),
            chooses(0, "ZeRO-2: bytes sent in a step"), sees("parameters of the model"),
            types(0, "2*N*(n-1)/n"), sees("It is 1/2 of the truth everywhere"),
            clicks_on(CHECKBOX), sees("plan.pocket.zero_table.ModelState.sent has it"),
        ),
        printed("17-68", sees("c12", "wrong")),
        widget(
            "17-51", "ExplainTrace",
            sees("it shows", "communicates"),
            chooses(1, 3),  # a straggler, which trace A is not on any machine: its ranks are equal
            sees("of 4 explained", "waiting for the wire"),
            GOES_ON,
            chooses(0, "trace B"), sees("trace B: what does it show?"),
            chooses(1, 3),  # a straggler, which trace A is not on any machine: its ranks are equal
            sees("Rank 1 computes for", "Right"),
        ),
        widget(
            "17-71", "ReviewPanel",
            sees("10 to go"),
            presses(".lk-review", 0, "Space"), shows(".lk-card-claim"),
            presses(".lk-review", 0, "5"), sees("1 done · 1 day in a row"),
            GOES_ON,
        ),
        widget(
            "17-75", "InterviewPanel",
            sees("Mock interview."),
            chooses(0, "5"),
            clicks("start"), sees("1 · "),
            clicks("show the answer"), shows(CHECKBOX),
            clicks("next"), sees("2 · "),
            clicks("end"), shows("svg"),
            links("a[data-cell]", r"/lab/tree/notebooks/\d\db?_\w+\.ipynb(#cell-id=.+)?$"),  # what to look at next
            GOES_ON,
            clicks("again"),
            chooses(0, "30"),  # long enough, at level 3, to end with a case of system design
            chooses(2, "ring"),  # few cards, so that it comes soon
            clicks("start"),
            is_asked_about_system_design(),
        ),
    )),
    Lab("18_fault_tolerance", (
        predicted("18-08", "hours until the job stops?", "3", "you predict 3 hours"),
        predicted("18-16", "seconds between checkpoints", "1200", "you predict 1,200 s"),
        predicted("18-17", "share of the time that is useful then?", "85", "you predict 85 %"),
        predicted("18-34", "its bytes on the wire", "12.5", "you predict 12.5 %"),
        widget(
            "18-41", "SurvivalExplorer",
            sees("16,384 devices, saved every 1,000 s"),
            clicks("best interval"), sees("saved every 257 s"),
            clicks("play 2,000"), sees("dots: played"),
            types(0, "soon"), sees(NONSENSE),
            types(0, "5 s"), slides(0, "ArrowRight"), sees("32,768 devices"),
        ),
    )),
    Lab("19_experts", (
        predicted("19-04", "how many billion does one token meet?", "37", "you predict 37 billion"),
        predicted("19-16", "Bytes that a rank sends over ep", "221184", "you predict 221,184 B"),
        predicted("19-33", "dispatch and combine take how many times as long?", "4", "you predict 4 times"),
        widget(
            "19-13", "DispatchFilm",
            sees("0. each token, and the experts that its router chose", "step 0 of 4"),
            clicks("next step"), sees("1. permute"),
            presses(".lk-film", 0, "End"), sees("4. combine: back at home"),
        ),
        widget(
            "19-28", "RouterExplorer",
            sees("16 experts on 4 ranks, 2 a token, dropless: rank 0 has 2.10 times the mean"),
            slides(0, "ArrowRight"), sees("waiting"), lacks("2.10 times the mean"),
            slides(1, "ArrowRight"), sees("4 a token"),
            chooses(0, "1.25"), sees("4 a token, capacity 1.25", "dropped"),
            slides(2, "Home"), sees("on 1 rank", "one rank has all"),
        ),
    )),
    Lab("20_long_context", (
        predicted("20-04", "every layer recomputed: GB on each device?", "393", "you predict 393 GB"),
        predicted("20-13", "how many times the ring's bytes", "1", "you predict 1 time"),
        predicted("20-14", "how many times the first rank's products", "4", "you predict 4 times"),
        predicted("20-15", "what factor do a rank's bytes change", "0.5", "you predict 0.5 times"),
        widget(
            "20-47", "ContextExplorer",
            sees("128k tokens, 64 heads, 8 for keys, over 8 ranks: ring waits least"),
            chooses(0, "ethernet"), sees("ulysses waits least"),
            slides(1, "ArrowRight"), sees("16 ranks do not divide 64 heads"),
            types(0, "fast"), sees(NONSENSE),
            types(0, "400e12"), slides(1, "ArrowLeft"),
            clicks("work of each rank"), sees("causal: who computes which scores"),
        ),
    )),
    Lab("21_after_pretraining", (
        predicted("21-13", "all sequences together?", "2000", "you predict 2,000 tokens/s"),
        widget(
            "21-26", "GenerationExplorer",
            sees("llama3-70b on 8 x h100, tp 8: 16 sequences of 4,096 tokens"),
            clicks("most sequences"), sees("91 sequences of 4,096 tokens"),
            chooses(1, "h200"), sees("on 8 x h200"),
            types(0, "soon"), sees(NONSENSE),
            types(0, "50 ms"), slides(1, "ArrowRight"), sees("8,192 tokens"),
        ),
        predicted("21-33", "what the first rank sends when it broadcasts", "50", "you predict 50 %"),
        predicted("21-54", "if all is sent at the end?", "40", "you predict 40 %"),
    )),
    Lab("22_what_you_use_at_work", (
        predicted("22-14", "bf16 gathers and fp32 sums?", "3 MiB", "you predict 3,145,728 B = 3 MiB"),
        widget(
            "22-30", "PlacementExplorer",
            sees("S(0) to R on 4 ranks, GPUs: all_gather: each rank sends 12 MiB"),
            chooses(1, "S(1)"), sees("all_to_all"),
            clicks("CPUs"), sees("S(0) to S(1) on 4 ranks, CPUs: all_gather"),
            types(0, "many"), sees(NONSENSE),
            types(0, "1000"), chooses(1, "R"), slides(0, "ArrowRight"), sees("on 6 ranks"),
        ),
    )),
    Lab("23_is_this_difference_normal", (
        predicted("23-10", "is how many times as large?", "8", "you predict 8 times"),
        predicted("23-23", "how many times that after the first block?", "6", "you predict 6 times"),
        predicted("23-45", "to find the first wrong one?", "7", "you predict 7 layers"),
    )),
)
# fmt: on
