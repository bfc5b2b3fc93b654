"""The numbers of the cards on long context are those of the planner's law, which expressions of cards cannot call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.course.cards.deck import the_deck
from labkit.plan.laws import compressed_context, halo
from labkit.plan.laws.context import hides_from, seconds, sent
from labkit.plan.machine.link import Link, link_of
from labkit.plan.model.cut_attention import CutAttention, at_work, held_bytes
from tests.cases import cases

LLAMA = CutAttention(2**17, 8, 64, 8, 128)
OF_405B = CutAttention(2**17, 16, 16, 1, 128)
FOUR, WIDE = CutAttention(2**17, 4, 64, 8, 128), CutAttention(2**17, 4, 64, 64, 128)
MILLION = CutAttention(2**20, 8, 64, 8, 128)
MISTRAL = CutAttention(2**17, 8, 32, 8, 128, window=4096)
FAST, SLOW = link_of("nvlink"), link_of("infiniband")
BY_LAW = [
    ("ring-backward", "forward", sent("ring", LLAMA)[0]),
    ("ring-backward", "backward", sent("ring", LLAMA)[1]),
    ("ring-or-gather", "ring", at_work("ring", MILLION)),
    ("ring-or-gather", "gather", at_work("gather", MILLION)),
    ("ulysses-bytes", "wide", sent("ulysses", WIDE)[0]),
    ("ulysses-bytes", "wide_ring", sent("ring", WIDE)[0]),
    ("ulysses-bytes", "few", sent("ulysses", FOUR)[0]),
    ("ulysses-bytes", "few_ring", sent("ring", FOUR)[0]),
    ("ring-hides", "fast", hides_from(LLAMA, 400e12, FAST)),
    ("ring-hides", "slow", hides_from(LLAMA, 400e12, SLOW)),
    ("ring-hides", "wide", hides_from(WIDE, 400e12, SLOW)),
    ("halo-bytes", "bytes", sent("halo", MISTRAL)[0]),
    ("halo-bytes", "ring", sent("ring", MISTRAL)[0]),
    ("halo-hides", "tokens", halo.hides_from(MISTRAL, 4096, 400e12, Link("", 0.0, 50e9))),
    ("halo-over-pieces", "owners", len(halo.halo_of([1024] * 16, 15, 4096))),
    ("halo-over-pieces", "bytes", sent("halo", replace(MISTRAL, seq=2**14, n=16))[0]),
    ("halo-off-by-one", "more", halo.sent(MISTRAL, 4097)[0] - halo.sent(MISTRAL, 4096)[0]),
    ("halo-convoy", "once", halo.exchange_s(MISTRAL, 4096, Link("", 0.0, 50e9))),
    ("compressed-keys-bytes", "bytes", compressed_context.sent(replace(MISTRAL, window=128), 4)[0]),
    ("cp-memory", "short", held_bytes(LLAMA)),
    ("cp-memory", "long", held_bytes(MILLION)),
    ("llama3-gathers", "compute", seconds("gather", OF_405B, 400e12, SLOW)["compute"] / 3.5),
    ("llama3-gathers", "gather", sent("gather", OF_405B)[0] / SLOW.bytes_per_s),
]


@cases(("card", "name", "law"), BY_LAW)
def test_a_number_of_a_card_is_that_of_the_law(card, name, law):
    """Would catch a law that was changed, and a card that still says the old one."""
    assert the_deck()[card].figures[name].value == pytest.approx(law)


def test_ulysses_cannot_be_where_the_card_says_so():
    """Would catch a card that calls possible ways impossible."""
    assert not OF_405B.possible("ulysses")
