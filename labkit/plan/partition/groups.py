"""Parameter groups: what an optimizer does with a parameter, decided by the kind of the parameter.

    kind      which parameters                             decay_on="linears"    optimizer="muon", "shampoo"
    hidden    weights of the linears inside blocks,        decay                 the whole matrix
              those of experts and routers among them
    head      other matrices that multiply: the output     decay                 AdamW
    table     embeddings, also one that the head shares    no decay              AdamW
    vector    norms and biases                             no decay              AdamW

With the default, decay_on="all" and an optimizer that treats all alike, there is one group. Weight decay pulls a weight
towards 0; the scale of a norm belongs near 1, and a bias or a row of a table that is seldom used has little to pull
against. That these are left out is the usual rule of GPT recipes.

Parameters of different groups never share a flat buffer (labkit.parallel.bucket): a flat shard is then of one group,
and an optimizer that steps on shards needs no map of what lies where. It costs a padding for each group of a bucket,
fewer than n elements.

Sources: Brown et al., arXiv:2005.14165, appendix B (weight decay 0.1); the kinds for Muon: Jordan et al. 2024,
kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

KINDS = ("hidden", "head", "table", "vector")
TABLES = ("token", "position")
HIDDEN = ("query", "key", "value", "out", "gate", "up", "down", "router", "query_in", "latent", "key_value")
"""Last parts of the names of matrices inside blocks: attention's, an MLP's or an expert's, routers', latents'."""


class ParamGroup(NamedTuple):
    """What is done with a parameter. `by_matrix`: stepped on as a whole matrix; `decays`: weight decay applies."""

    by_matrix: bool = False
    decays: bool = True


class Grouping(NamedTuple):
    """The rule of a recipe: `by_matrix` steps on hidden matrices whole, `by_kind` decays only what linears multiply
    with."""

    by_matrix: bool = False
    by_kind: bool = False

    def of(self, kind: str) -> ParamGroup:
        """The group of a kind of parameter. ValueError for a kind that is none of KINDS."""
        if kind not in KINDS:
            raise ValueError(f"a parameter is one of {', '.join(KINDS)}; got {kind!r}")
        return ParamGroup(self.by_matrix and kind == "hidden", not self.by_kind or kind in ("hidden", "head"))

    def of_weight(self, name: str) -> ParamGroup:
        """The group of a weight by the name that the planner's layers give it: `query`, `up.bias`, `experts.0.up`."""
        return _group(self, name)


@lru_cache(maxsize=512)
def _group(grouping: Grouping, name: str) -> ParamGroup:
    small = "table" if name in TABLES else "vector"
    return grouping.of("hidden" if name.rpartition(".")[2] in HIDDEN else "head" if name == "logits" else small)
