"""What a collective is charged: the bytes of a rank in a collective that a backend carries out.

gloo, NCCL and memory that ranks share do not say what they send, and each of them sends something else. So the ledger
writes down what labkit's own ring (ring.py) would have sent for the same tensor on the same rank, chunk for chunk:

    all_reduce      2(n-1)/n N     N = bytes of the whole tensor
    reduce_scatter   (n-1)/n N
    all_gather       (n-1)/n N
    all_to_all       (n-1)/n N, with ragged parts N but for the part that stays
    broadcast        N from the source, 0 from the others

Chunks are whole elements. Where n does not divide a tensor the first chunks have one element more, and the ranks send
different numbers of bytes: 3 ranks that sum 2 float32 are charged 8, 12 and 12 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.plan.machine.collectives import part_bytes


def charged_bytes(
    verb: str, x: Tensor, rank: int, size: int, source: int = 0, send_rows: Sequence[int] | None = None
) -> int:
    """Bytes that `rank` of `size` sends when it hands x to this collective; by the table above."""
    n_bytes = x.nbytes
    if size == 1 or not n_bytes or verb == "barrier":
        return 0
    if verb == "broadcast":
        return n_bytes if rank == source else 0
    if verb == "all_to_all":
        kept = 1 if send_rows is None else send_rows[rank]
        return n_bytes - n_bytes * kept // (size if send_rows is None else x.shape[0])
    if verb == "all_gather":
        return (size - 1) * n_bytes
    row_bytes = x.element_size() if verb == "all_reduce" else n_bytes // x.shape[0]
    scatter = n_bytes - part_bytes(n_bytes, size, rank, row_bytes)  # a rank keeps its own chunk
    gather = n_bytes - part_bytes(n_bytes, size, (rank + 1) % size, row_bytes)  # its right neighbour has that chunk
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter}[verb]
