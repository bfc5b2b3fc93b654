"""The layers of labkit's GPT on shadows, tensors that have a size and no values (tape.py): what autograd holds of each
layer, tensor by tensor, and how much at its highest moments.

    Embedding   ids                                                  -> x [B,T,D]
    Block       x, n1, q, k, v, mixed, x1, n2, u [F], g [F]          -> x            (8 D + 2 F) B T elements are held
    Head        x, n                                                 -> logits [B,T,V]
    loss        log-probabilities [B,T,V]                            -> one number

The same program as labkit.train.gpt, op by op, with what tensor and sequence parallelism (labkit.parallel.tensor,
.sequence, .vocab), autocast and checkpointing make of it. Attention is a fused kernel, as torch runs it: it holds q, k,
v, its result and one number a row, and never the T x T scores (Dao et al., arXiv:2205.14135, section 3.1).

    way          weights  activations
    "fp32"       4 bytes  4 bytes
    "fp64"       8        8
    "autocast"   4        products 2, norms and the residual path 4; a half copy of each weight until its backward
    "half"       2        2: a model in bf16, or what ZeRO-3 gathers for products in half precision; with 8-bit products
                          (labkit.train.fp8) the same is held, and casts come and go

Models that labkit's GPT does not have (gated MLP, fewer key heads, RMSNorm, latent attention) are the plain torch
program for them.

With experts, routing is taken as balanced: each rank of ep sends k copies of its tokens, [k B T, D], and gets as many
(labkit.plan.model.mixture).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.model.mixture import Mixture
from labkit.plan.model.ops import HEAD, Setting
from labkit.plan.model.sizes import Sizes
from labkit.plan.model.tape import OTHER, Bytes, Segment, Shadow

LAYERS = ("embedding", "block", "dense", "head", "loss")
"""The layers of a model; "dense" are the blocks that keep an MLP in a model whose other blocks have experts."""


class Profile(NamedTuple):
    """The bytes that one layer holds at each moment. All are by kind and count from an empty memory.

    forward    the highest moment of its forward, its input included
    held       what stays alive after its forward, including its input and without its result
    result     bytes of its result
    cached     what autocast's cache holds on top, until the forward of all layers is over
    segments   its backward, cut where a weight's gradient arrives
    tensors    what is held, tensor by tensor: (name, bytes)
    top        the highest moment of its backward
    doors      its forward, cut where experts are entered and left; () if it has none
    """

    forward: Bytes
    held: Bytes
    result: int
    cached: int
    segments: tuple[Segment, ...]
    tensors: tuple[tuple[str, int], ...]
    top: Bytes
    doors: tuple[Segment, ...] = ()


@lru_cache(maxsize=4096)
def profile(shape: Sizes, layer: str, setting: Setting) -> Profile:
    """Run one layer of the model on a tape, forward and backward. Equal questions are answered from a cache."""
    return Program(shape, setting).measured(layer)


def held(shape: Sizes, setting: Setting) -> Breakdown:
    """Bytes that autograd holds of one block, item by item; items of equal names are added up."""
    totals: dict[str, int] = {}
    for name, n_bytes in profile(shape, "block", setting).tensors:
        totals[name] = totals.get(name, 0) + n_bytes
    b, t = setting.rows, setting.seq
    per = b * t
    return Breakdown(
        Item(name, n_bytes, "B", f"{n_bytes / per:,.6g} bytes x B T = {b} x {t}", "labkit.plan.model.layers")
        for name, n_bytes in totals.items()
    )


class Program(Mixture):
    """One layer on a tape of its own."""

    def measured(self, layer: str) -> Profile:
        """The layer's profile."""
        tape, rows, tp = self.tape, self.rows // self.cut, self.setting.tp
        self.mixed = layer == "block" and self.shape.n_expert > 0
        if layer == "embedding":
            y = self.embedding()
        elif layer == "loss":
            y = self.loss(tape.enter(self.rows * (self.shape.vocab // tp), self.narrow, "logits"))
        else:
            x = tape.enter(rows * self.shape.d_model, self.wide, f"x, input of the {layer}")
            run = self.head if layer == "head" else self.block
            rerun = self.setting.recompute if layer != "head" else "none"
            self.selective, self.gathers = rerun == "selective", rerun in ("gathers", "selective")
            y = tape.checkpoint(run, x, self.cache.clear) if rerun == "full" else run(x)
            del x
        forward, end, result = tape.mark(), y.node, y.storage.n_bytes
        doors = (*tape.segments, Segment(forward, tape.moment(), None, 0)) if tape.segments else ()
        forward = max((forward, *(segment.top for segment in doors)), key=sum)
        tape.segments.clear()
        del y
        before = tape.total
        self.cache.clear()
        held, cached = tape.moment(), before - tape.total
        tensors = tuple((storage.name, storage.n_bytes) for storage in tape.held(end))
        grad = tape.new(result, OTHER)
        tape.mark()
        left = tape.backward(end, grad)
        del grad
        tape.segments.append(Segment(tape.mark(), tape.moment(), None, 0))
        del left
        top = max((segment.top for segment in tape.segments), key=sum)
        return Profile(forward, held, result, cached, tuple(tape.segments), tensors, top, doors)

    # -- layers ------------------------------------------------------------------------------------------------------

    def embedding(self) -> Shadow:
        """[B, T] -> [B, T, D]"""
        shape, tape, d, tp = self.shape, self.tape, self.shape.d_model, self.setting.tp
        own = [] if tp == 1 else [tape.new(8 * self.rows, name="ids of this rank's rows")]
        x = self.look_up("token", shape.vocab // tp * d, self.rows * d, own)
        if tp > 1:
            x = self.leave(self.op(x, x.numel, x.width, [tape.new(self.rows, name="which ids are this rank's")]))
        if shape.position == "learned":
            n = self.setting.seq // self.cut
            positions = [tape.new(8 * self.setting.seq, name="positions")]
            x = self.add(x, self.look_up("position", self.shape.seq * d, n * d, positions))
        return x

    def block(self, x: Shadow) -> Shadow:
        """[B, T, D] -> [B, T, D]"""
        attention = self.attention if self.shape.kv_lora is None else self.latent_attention
        x = self.add(x, attention(self.norm(x, "norm1")))
        return self.add(x, (self.mixture if self.mixed else self.mlp)(self.norm(x, "norm2")))

    def attention(self, x: Shadow) -> Shadow:
        """[B, T, D] -> [B, T, D], over this rank's heads."""
        shape, tp = self.shape, self.setting.tp
        heads, keys = shape.n_head // tp, max(1, shape.kv_heads // tp)
        x = self.enter(x)
        query = self.linear(x, heads * shape.width, "query")
        key, value = self.linear(x, keys * shape.width, "key"), self.linear(x, keys * shape.width, "value")
        if shape.position == "rotary":
            query, key = self.rotate(query, "query"), self.rotate(key, "key")
        return self.row(self.attend(query, key, value, heads), "out")

    def latent_attention(self, x: Shadow) -> Shadow:
        """[B, T, D] -> [B, T, D]: queries, and keys and values, each made of one latent vector a token."""
        shape, rows = self.shape, self.rows
        q_lora, kv_lora = shape.q_lora or 0, shape.kv_lora or 0
        wide, narrow = shape.n_head * (shape.width + shape.rope_width), shape.n_head * shape.width
        query = self.linear(self.norm(self.linear(x, q_lora, "query_in"), "query_norm", q_lora), wide, "query")
        query = self.op(query, query.numel, query.width, (), "query, turned")
        latent = self.linear(x, kv_lora + shape.rope_width, "latent")
        both = self.op(latent, rows * kv_lora, latent.width, (), "latent of keys and values")
        both = self.linear(self.norm(both, "latent_norm", kv_lora), 2 * narrow, "key_value")
        key, value = (self.op(both, rows * size, both.width) for size in (wide, narrow))
        return self.linear(self.attend(query, key, value, shape.n_head), shape.d_model, "out")

    def mlp(self, x: Shadow) -> Shadow:
        """[B, T, D] -> [B, T, D], through this rank's hidden units."""
        hidden = self.shape.hidden // self.setting.tp
        x = self.enter(x)
        if self.shape.gated:
            gate = self.pointwise(self.linear(x, hidden, "gate"), "silu of gate")
            return self.row(self.product(gate, self.linear(x, hidden, "up")), "down")
        return self.row(self.pointwise(self.linear(x, hidden, "up"), "gelu of up"), "down")

    def head(self, x: Shadow) -> Shadow:
        """[B, T, D] -> [B, T, V], over this rank's words."""
        n = self.enter(self.norm(x, "norm"))
        return self.linear(n, self.shape.vocab // self.setting.tp, HEAD, False)
