"""It takes all the memory of the machine.

kernel alone    MemoryError: the limit
with guards     MemoryError: the limit
as a learner    values
"""


def ring_reduce_scatter(x, group):
    return [0] * (1 << 32)
