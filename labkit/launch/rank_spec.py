"""What a process needs to know to become a rank, on its way from the notebook through post and warden into the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScriptSpec:
    """What a rank that runs a script needs besides.

    keeper      the rank that runs nothing and keeps the store in which the others meet
    path        the script, and the `arguments` of its command line
    observer    module and class of what looks on from inside; None: nothing
    record      whether the flight recorder's records are fetched
    last_words  the file, without the rank's number, into which a rank that dies writes its records
    torchrun    the variables that torchrun would set
    break_on_error  the rank whose debugger opens when its script raises an exception; None: no rank's
    """

    keeper: int
    path: str
    arguments: tuple[str, ...]
    observer: str | None
    record: bool
    last_words: str
    torchrun: dict[str, str] = field(default_factory=dict)
    break_on_error: int | None = None


@dataclass(frozen=True)
class RankSpec:
    """One rank to be, or, without `rank`, `output`, `device` and `generation`, what all of a cluster have in common.

    module         whose `main` is called; `imports` are what the warden imports first, once for all
    address        the socket of the rank's messages; `output`, its screen; `blackbox`, the file of all black boxes
    store          the file or address of torch's store, without the generation; `mail`, the memory of mailboxes
    traffic        the file of shaped links' traffic, without the generation; `links` and `around` are pickled
    one_gpu        ranks share a GPU over NCCL
    fresh          executed and not forked
    on_node        LOCAL_RANK and LOCAL_WORLD_SIZE where ranks are on several machines; None: all are on this one
    script         None for a rank that serves a notebook
    """

    module: str = "labkit.launch.worker"
    imports: tuple[str, ...] = ()
    rank: int = -1
    n_ranks: int = 0
    generation: int = 0
    address: str = ""
    blackbox: str = ""
    output: str = ""
    store: str = ""
    traffic: str = ""
    mail: str | None = None
    shares_memory: bool = True
    links: bytes | None = None
    around: bytes | None = None
    backend: str = "gloo"
    device: str = "cpu"
    one_gpu: bool = False
    interface: str = ""
    threads: int = 1
    strict: bool = False
    blocking: bool = True
    fresh: bool = False
    torch_timeout_s: float = 1800.0
    cwd: str = ""
    path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    on_node: Mapping[str, str] | None = None
    script: ScriptSpec | None = None

    def written(self) -> dict[str, Any]:
        """As a message to another process: plain values by name."""
        return {**vars(self), "script": None if self.script is None else vars(self.script)}

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> RankSpec:
        """Make a specification of what `written` returned. A field that the message lacks has its default."""
        script = words.get("script")
        return cls(**{**words, "script": None if script is None else ScriptSpec(**script)})
