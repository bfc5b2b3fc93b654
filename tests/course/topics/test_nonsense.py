"""What explorers answer to a control that cannot be read: the reason, and the last picture that made sense.

(The frame that they share: tests/course/widgets/test_explorer.py. Those whose buttons must not work then, either, are
asked in their own files.)"""

from __future__ import annotations

from html import unescape

from labkit.course.topics.bucket_explorer import BucketExplorer
from labkit.course.topics.checkpoint_explorer import CheckpointExplorer
from labkit.course.topics.compression_explorer import CompressionExplorer
from labkit.course.topics.float_explorer import FloatExplorer
from labkit.course.topics.in_flight_explorer import InFlightExplorer
from labkit.course.topics.in_flight_picture import Pick
from labkit.course.topics.lora_explorer import LoRAExplorer
from labkit.course.topics.split_explorer import SplitExplorer
from labkit.course.topics.stale_explorer import StaleExplorer
from labkit.course.topics.zero_explorer import ZeROExplorer
from tests.cases import cases
from tests.course.topics import test_buckets as of_buckets, test_checkpoint_explorer as of_segments
from tests.course.topics.test_compression import LOSSES, RUNS
from tests.course.topics.test_lora_explorer import HELD, SEEN, SHAPE
from tests.course.topics.test_split_explorer import LAYER

SENSE = "the last one that made sense"
MICRO = "micro-batches: a whole number from 1 to 64, got "
RANKS = "ranks n: a whole number from 1 to 1,000,000, got "
FIELDS = [  # an explorer, its field, {what is typed: what must be said}, and what makes sense again
    (lambda: BucketExplorer(of_buckets.BLOCKS, of_buckets.WIRE, 0.1), lambda it: it.typed,
     dict.fromkeys(["large", "0", "-3 KiB", ""], SENSE), "128 KiB"),
    (lambda: CheckpointExplorer(of_segments.STACK, of_segments.DOTS), lambda it: it.cap,
     {"a lot": "'a lot' is not a number of B"}, "16 MiB"),
    (lambda: CompressionExplorer(RUNS, LOSSES, 21_768, 4), lambda it: it.ranks,
     dict.fromkeys(["many", "2.5", "0", "1e9", "-4", ""], SENSE), "64"),
    (lambda: FloatExplorer(0.5), lambda it: it.field, {"<b>half</b>": "<b>half"}, "0.25"),
    (lambda: InFlightExplorer(Pick("1f1b", 4, 32)), lambda it: it.micro,
     dict.fromkeys(["", "many", "-3", "0", "65", "1e3", "\u00b2", "9" * 5000], MICRO), "16"),
    (lambda: LoRAExplorer(SHAPE, 8, 8, HELD, SEEN), lambda it: it.width,
     {"wide": "width D: a whole number from 1", "66": "n_head", "4": "rank of 1 to 4"}, "1,024"),
    (lambda: SplitExplorer(LAYER), lambda it: it.typed["n_ranks"],
     {"3": "F = 512 has no 3 equal parts; 1, 2, 4, 8", "four": f"{RANKS}'four'"}, "2"),
    (StaleExplorer, lambda it: it.curvature, dict.fromkeys(["steep", "-1", "0", "1e9", ""], SENSE), "2"),
    (lambda: ZeROExplorer(device="h200"), lambda it: it.ranks, {"eight": f"{RANKS}'eight'"}, "16"),
    (lambda: ZeROExplorer(device="h200"), lambda it: it.params,
     {"<b>7</b>": "is not a number of parameters, 0 or more: write 7B or 124,000,000",
      "7e9 T": "1 to 10^15 parameters"}, "1.5e9"),
]  # fmt: skip


@cases(("make", "field", "odd", "good"), FIELDS)
def test_nonsense_is_told_and_the_last_picture_stays_until_there_is_sense_again(make, field, odd, good):
    """Would catch a typing error that empties the page or becomes part of it, and a message that stays."""
    explorer = make()
    before, control = explorer.shown.value, field(explorer)
    for typed, reason in odd.items():
        control.value = typed
        assert reason in unescape(explorer.message.value)
        assert SENSE in explorer.message.value
        assert "<b>" not in explorer.message.value
        assert len(explorer.message.value) < 400
        assert explorer.shown.value == before == str(explorer.static())
    control.value = good
    assert SENSE not in explorer.message.value
    assert explorer.shown.value != before
