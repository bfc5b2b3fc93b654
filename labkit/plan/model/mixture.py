"""A mixture of experts on shadows (tape.py): labkit.train.moe and labkit.parallel.expert, op by op, under a given load.

    router          x [N, D], W in fp32 at least; p [N, E]; chosen, weights [N, k]       N = B T tokens of this rank
    copies          the token of each kept row, and its place in the order by expert
    dispatch        rows that came from the ranks of ep, in order                        R rows for this rank's experts
    experts         each its run of the rows: up, gelu, down, with a gradient for each weight of each
    combine         what came back, a weight for each row; added up [N, D]

With tp all of this stands between one f and one g, and a rank has 1/tp of the hidden units of each expert
(labkit.parallel.expert_tensor).

The load is balanced (plan.model.expert_load): no law knows what a router will choose. Experts run one after another,
and their gradients arrive one after another; more than RUNS of them are taken in as many runs of neighbours.
"""

from __future__ import annotations

from labkit.plan.model.expert_load import Load
from labkit.plan.model.ops import Ops
from labkit.plan.model.tape import GRADIENTS, OTHER, Node, Shadow, Storage, Weight

RUNS = 8
"""Experts of a rank that are walked one by one."""
INDEX = 8
"""Bytes of an index."""


class Mixture(Ops):
    """The ops of a mixture on the tape of a layer."""

    def mixture(self, x: Shadow) -> Shadow:
        """[B, T, D] -> [B, T, D], through the k experts of each token, here or on other ranks, and the shared ones."""
        shape, x = self.shape, self.enter(x, keeps=True)  # a router looks at it, which never runs again
        chosen, weights, loss = self.route(x)
        y = self.through_experts(self.cast(x, self.narrow), chosen, weights)
        del chosen, weights
        exact = max(4, self.wide)
        one = self.tape.new(exact, name="the balance loss's gradient")
        both = (y.node,) if loss is None else (y.node, loss)
        node = self.tape.node(both, lambda g: [g, self.tape.new(0, OTHER)][: len(both)], (one,))
        y = Shadow(y.storage, y.numel, y.width, node)
        if shape.n_shared:
            hidden = shape.n_shared * shape.expert_hidden // self.setting.tp
            y = self.add(y, self.expert(x, shape.d_model, hidden, "shared", self.rows, 1))
        return y if self.setting.tp == 1 else self.leave(y)

    def route(self, x: Shadow) -> tuple[Storage, Shadow, Node | None]:
        """Indices of each token's experts, their weights, and the op that makes the balance loss if there is one."""
        shape, tape, n, k, e = self.shape, self.tape, self.rows, self.shape.top_k, self.shape.n_expert
        exact, d = max(4, self.wide), self.shape.d_model
        x = self.cast(self.alike(x, x.numel * x.width), exact)
        weight, saved, kind = Weight("router", d * e), [x.storage], GRADIENTS
        giver: Node | Weight = weight
        if exact > self.wide:
            saved.append(tape.new(d * e * exact, name="router in fp32"))
            giver = tape.node((weight,), lambda g: [tape.new(d * e * self.wide, GRADIENTS)], ())
            kind = OTHER
        back, table = n * d * exact, n * e * exact
        node = tape.node((x.node, giver), lambda g: [tape.new(back, OTHER), tape.new(d * e * exact, kind)], saved)
        scores = tape.new(table)
        shares = tape.new(table, name="shares of the experts")
        node = tape.node((node,), self.makes(table), (shares,))
        del scores
        biased = tape.new(table) if shape.balance == "bias" else None
        tape.scratch(n * k * exact)  # topk gives values, too
        chosen = tape.new(INDEX * n * k, name="experts of each token")
        picked = tape.new(n * k * exact, name="weights of the experts")
        pick = tape.node((node,), self.makes(table), (chosen,))
        weights = Shadow(picked, n * k, exact, pick)
        if k > 1:
            total = tape.new(n * exact, name="sums of weights")
            added = tape.node((pick,), self.makes(n * k * exact), ())
            share = tape.node((pick, added), self.makes(n * k * exact, n * exact), (picked, total))
            weights = Shadow(tape.new(n * k * exact, name="weights, with the sum 1"), n * k, exact, share)
        weights = self.alike(weights, n * k * exact)  # their gradients are terms, which are summed over tp
        if shape.balance == "loss":
            rows = tape.new(self.setting.rows * e * exact, name="shares of the rows")
            return chosen, weights, tape.node((node,), self.makes(table), (rows,))
        assert biased is None or biased.n_bytes == table  # alive until here
        return chosen, weights, None

    def alike(self, x: Shadow, back: int) -> Shadow:
        """x itself, the same on all ranks of tp, whose gradient becomes another one on its way back."""
        if self.setting.tp == 1:
            return x
        return Shadow(x.storage, x.numel, x.width, self.tape.node((x.node,), self.makes(back), ()))

    def through_experts(self, x: Shadow, chosen: Storage, weights: Shadow) -> Shadow:
        """The sum of the experts' outputs for each token, by the router's weights."""
        shape, setting, tape, d = self.shape, self.setting, self.tape, self.shape.d_model
        n, k, e = self.rows, shape.top_k, shape.n_expert
        table = Load.of(shape).table(setting.rows, setting.seq, setting.ep)
        kept = sum(table[setting.ep_rank])
        target = chosen
        if shape.capacity is not None:
            tape.scratch(2 * INDEX * n * k * e)  # places taken so far, by expert, before and after they are summed up
            target = tape.new(INDEX * n * k)
        counts = tape.new(INDEX * (e + 1))
        order = self.sorted(n * k, "places of the copies")
        token = tape.new(INDEX * kept, name="tokens of the copies")
        n_local = e // setting.ep
        loads = [sum(row[setting.ep_rank * n_local + k] for row in table) for k in range(n_local)]
        if setting.ep == 1:
            y = self.experts(self.op(x, kept * d, x.width, (token,), "copies of tokens"), loads)
        else:
            y = self.away(x, token, kept, loads)
        # each row times its weight, added to its token
        exact, width = weights.width, y.width
        own = self.op(weights, kept, exact, (order,), "weights, by expert")
        own = self.cast(own, width)
        scaled, n_bytes = tape.new(kept * d * width), kept * d * width

        def scale(g: Storage) -> list[Storage]:
            back, products = tape.new(n_bytes, OTHER), tape.new(n_bytes, OTHER)
            sums = tape.new(kept * width, OTHER)
            del products
            return [back, sums]

        node = tape.node((y.node, own.node), scale, (y.storage, own.storage))
        del y, own
        total = tape.new(n * d * width, name="sum over the experts")
        node = tape.node((node,), self.makes(n_bytes), (token,))
        del scaled
        assert target  # alive until here, as are the counts
        assert counts
        return Shadow(total, n * d, width, node)

    def sorted(self, numel: int, name: str) -> Storage:
        """The places of so many numbers in their order: torch sorts the numbers, too."""
        values = self.tape.new(INDEX * numel)
        places = self.tape.new(INDEX * numel, name=name)
        del values
        return places

    def away(self, x: Shadow, token: Storage, kept: int, loads: list[int]) -> Shadow:
        """Copies go to the ranks of their experts, are put in order there, and what is made of them comes back."""
        tape, d, m = self.tape, self.shape.d_model, sum(loads)
        numbers = tape.new(2 * INDEX * self.shape.n_expert)  # of rows that come, and of experts
        experts = tape.new(INDEX * m)
        tape.scratch(INDEX * m)
        order = self.sorted(m, "places of the rows that came")
        del experts
        x = self.travel(self.op(x, kept * d, x.width, (token,), "copies of tokens, sent"), m * d, "copies, received")
        x = self.op(x, x.numel, x.width, (order,), "copies of tokens, by expert")
        y = self.experts(x, loads)
        del x
        back = self.sorted(m, "places of the rows that go back")
        y = self.travel(self.op(y, y.numel, y.width, (back,)), kept * d, "what the experts made, sent back")
        assert numbers  # alive until here
        return y

    def travel(self, x: Shadow, numel: int, name: str) -> Shadow:
        """A ragged all_to_all; its gradient comes home the same way, and is scaled."""
        size = x.numel * x.width

        def run(g: Storage) -> list[Storage]:
            home = self.tape.new(size, OTHER)
            scaled = self.tape.new(size, OTHER)
            assert home
            return [scaled]

        y = self.tape.new(numel * x.width, name=name)
        return Shadow(y, numel, x.width, self.tape.node((x.node,), run, ()))

    def experts(self, x: Shadow, loads: list[int]) -> Shadow:
        """Each expert's run of the rows through its MLP, and the results in one tensor.   [R, D] -> [R, D]"""
        tape, d, total = self.tape, self.shape.d_model, x.numel * x.width
        parts = list[Storage]()

        def together(g: Storage) -> list[Storage]:
            whole = tape.new(total, OTHER)
            parts.clear()
            tape.at_door("leave")
            return [whole]

        def part(last: bool) -> Node:
            def run(g: Storage) -> list[Storage | None]:
                parts.append(g)
                return [tape.new(0, OTHER) if last else None]  # the last to come calls the op that joins them

            return tape.node((split,), run, ())

        tape.at_door("enter")
        split = tape.node((x.node,), together, ())
        made, size, width = list[Shadow](), -(-len(loads) // RUNS), self.narrow
        hidden = self.shape.expert_hidden // self.setting.tp
        for begin in range(0, len(loads), size):
            some = loads[begin : begin + size]
            run = Shadow(x.storage, sum(some) * d, x.width, part(begin == 0))
            made.append(self.expert(run, d, hidden, f"experts.{begin}", sum(some), len(some)))
            del run
        y = tape.new(sum(loads) * d * width, name="what the experts made")
        node, count = tape.node(tuple(shadow.node for shadow in made), lambda g: [g] * count, ()), len(made)
        made.clear()
        tape.at_door("leave")

        def entered(g: Storage) -> list[Storage]:
            tape.at_door("enter")
            return [g]

        return Shadow(y, sum(loads) * d, width, tape.node((node,), entered, ()))

    def expert(self, x: Shadow, d: int, hidden: int, name: str, rows: int, experts: int) -> Shadow:
        """[rows, D] -> [rows, D] through the hidden units of one MLP, or of several that share the rows."""

        def linear(x: Shadow, inside: int, out: int, matrix: str) -> Shadow:
            return self.linear(x, out, f"{name}.{matrix}", None, rows, experts, inside)

        if self.shape.gated:
            gate = self.pointwise(linear(x, d, hidden, "gate"), "silu of gate")
            return linear(self.product(gate, linear(x, d, hidden, "up")), hidden, d, "down")
        return linear(self.pointwise(linear(x, d, hidden, "up"), "gelu of up"), hidden, d, "down")
