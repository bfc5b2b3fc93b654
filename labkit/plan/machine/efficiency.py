"""Practice: what training runs lose on a device and its links, beyond what a data sheet says.

    products       rate of the products in a step, as a share of that of a large product alone: a device that works
                   without a pause gets hot, and lowers its clock
    attention      rate of a fused causal attention, as such a share; it counts the half of the T x T products that a
                   causal kernel computes
    half_side      a product of which one side is this long reaches half of the rate: its tiles do not fill the device
    traffic        bytes that norms, sums and activations move, as a multiple of those in the table of compute_time.py
    wire           share of a link's bandwidth that a large collective reaches
    crossing_s     seconds of a tensor-parallel collective for each further node that it spans
    contention     seconds that a second of communication costs although something is computed meanwhile: both want the
                   same memory and the same processors of the device
    host_s         seconds in which Python issues one op; a device that is faster than that waits for its host
    host_call_s    the same for a collective in the middle of a layer; once more for each of its ranks while messages of
                   a pipeline cross between nodes
    step_s         seconds of each step in which nothing of it is computed: data, logging, the norm's answer
    sick, late_s   share of a cluster's nodes on which starting a message between two stages takes `late_s` seconds

`IDEAL` has none of these losses: for a machine of which rates were measured, and for laws. Those of GPUs are fitted to
runs that others have published; benchmarks/published.py does it, and holds the other runs against the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Practice:
    """Losses of practice; the head of this file says what each one is. ValueError for one that cannot be."""

    products: float = 1.0
    attention: float = 0.5
    half_side: float = 0.0
    traffic: float = 1.0
    wire: float = 1.0
    crossing_s: float = 0.0
    contention: float = 0.0
    host_s: float = 0.0
    host_call_s: float = 0.0
    step_s: float = 0.0
    sick: float = 0.0
    late_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (value == 0 and field.name in ("products", "attention", "traffic", "wire")):
                raise ValueError(f"{field.name} is a share or seconds: 0 or more, rates above 0; got {value}")
        if max(self.products, self.wire) > 1 or self.sick >= 1:
            raise ValueError(
                "products, wire and sick are shares, 0 to 1, and not all nodes are sick: "
                f"{self.products}, {self.wire}, {self.sick}"
            )

    def share(self, inside: float, out: float) -> float:
        """Share of the rate of a large product, 0 to 1, that one with sides of these lengths reaches in a step."""
        return self.products * inside / (inside + self.half_side) * out / (out + self.half_side)

    def late(self, n_nodes: int) -> float:
        """Seconds by which messages of a job on so many nodes are late: all of it, if one of them is more likely sick
        than not."""
        return self.late_s if (1 - self.sick) ** n_nodes < 0.5 else 0.0


IDEAL = Practice()
"""No losses but that of attention, whose causal kernel computes half and reaches half the rate."""
