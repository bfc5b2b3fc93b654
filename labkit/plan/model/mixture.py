"""The table of a mixture of experts (labkit.train.moe, labkit.parallel.expert), under a balanced load.

    norm2, router, shares, chosen, weights        N tokens of this rank, E experts of which each token meets k
    copies, [sent, in order]                      R rows for this rank's experts
    experts                                       each its run of the rows: up, gelu, down
    [back], times weights, shared                 a weight for each row; added up [N, D]

A router computes in fp32 at least. With tp all of this stands between one f and one g, and a rank has 1/tp of the
hidden units of each expert (labkit.parallel.expert_tensor). The load is balanced (labkit.plan.model.expert_load): no
law knows what a router will choose. More than RUNS experts are taken in as many runs of neighbours.
"""

from __future__ import annotations

from labkit.plan.model.expert_load import Load
from labkit.plan.model.layer_rows import Terms, after_branch, hidden_rows, product, second_entering
from labkit.plan.model.layer_table import Row, Tensors

RUNS = 8
"""Runs of experts that have rows of their own in the table."""
INDEX = 8
"""Bytes of an index."""


def mixture(t: Terms) -> list[Row]:
    """norm2 to the sum of all experts that a token meets."""
    shape, r, out = t.shape, t.residual, t.products
    seen = f"norm2 [B,T,D]{', whole' * (t.cut > 1)}"
    repeated = t.whole * (t.selective and t.cut == 1)  # norm2 is made again
    rows = [second_entering(t), *router(t, seen, repeated), *routed(t)]
    if shape.n_shared:
        # the router has saved what they read, unless in other numbers
        x: Tensors = ((seen, out),) if t.autocast or (t.exact > t.wide and not repeated) else ()
        rows += expert(t, "shared.", x, t.another(x), shape.n_shared, r + out, repeated=repeated)
    if shape.shared_gate:
        rows.append(gate_of_shared(t))
    return rows + after_branch(t, "experts")


def gate_of_shared(t: Terms) -> Row:
    """The result of all shared experts, times one number a token: the sigmoid of a product of its own."""
    d, out = t.shape.d_model, t.products
    saves, fresh = (("what the shared experts made", out), ("their weights", t.tokens * t.narrow)), d * t.wide
    return Row("shared gate", saves, (("shared_gate", d),), out, t.residual + 2 * out + fresh, t.residual + out, fresh)


def router(t: Terms, seen: str, repeated: int) -> list[Row]:
    """Scores of all experts for each token, which of them are chosen, and their weights, in fp32 at least."""
    shape, n, k, e, exact = t.shape, t.tokens, t.shape.top_k, t.shape.n_expert, t.exact
    vectors, matrix, scores, weights = (count * exact for count in (n * shape.d_model, shape.d_model * e, n * e, n * k))
    cast = exact > t.wide
    saves = ((seen, vectors),) * (cast or not repeated) + (("router in fp32", matrix),) * cast
    beside = t.residual + t.whole  # gradients of the residual path, and of x as the experts see it
    around = beside + repeated + scores + vectors * (1 + (t.setting.tp > 1)) + matrix
    size, own_bias = shape.d_model * e, shape.has_bias("router")
    weights_of, fresh = (("router", size), ("router.bias", e))[: 1 + own_bias], (size + e * own_bias) * t.wide
    rows = [
        Row("router", saves, weights_of, scores, around, beside + vectors + matrix * cast, fresh),
        Row("shares of the experts", (("shares of the experts", scores),), (), 2 * scores, beside + 3 * scores),
        Row("chosen", (("experts of each token", INDEX * n * k),), (), 2 * weights, beside + 2 * scores),
    ]
    if k > 1:
        sums = (("weights of the experts", weights), ("sums of weights", n * exact))
        rows.append(Row("weights", sums, (), weights, beside + 4 * weights + scores))
    if shape.balance == "loss":
        shares = (("shares of the rows", t.setting.rows * e * exact),)
        rows.append(Row("balance", shares, (), weights, beside + weights + scores))
    return rows


def routed(t: Terms) -> list[Row]:
    """Copies of tokens, sent to the ranks of their experts, through these, back again and added up by weight."""
    setting, r, d, n, k, h, out = t.setting, t.residual, t.shape.d_model, t.tokens, t.shape.top_k, t.narrow, t.products
    table, n_local = Load.of(t.shape).table(setting.rows, setting.seq, setting.ep), t.shape.n_expert // setting.ep
    first = setting.ep_rank * n_local
    loads = [sum(row[first + i] for row in table) for i in range(n_local)]
    kept, m = sum(table[setting.ep_rank]), sum(loads)
    sent, came = kept * d * h, m * d * h  # bytes of copies of tokens
    weights = n * k * t.exact
    waiting = r + weights  # gradients of the residual path and of the router's weights
    alive = weights + INDEX * (t.shape.n_expert + 1)  # with how many rows each expert has
    cast = out * t.autocast
    token: Tensors = (("tokens of the copies", INDEX * kept),)
    if setting.ep == 1:
        rows = [Row("copies", token, (), alive + cast + sent, waiting + sent + out + cast)]
    else:
        places = (("places of the rows that came", INDEX * m),)
        rows = [
            Row("copies, sent", token, (), alive + cast + 2 * sent + came, waiting + 3 * sent + out),
            Row("copies, in order", places, (), alive + 2 * came, waiting + max(2 * came, came + 2 * sent)),
        ]
    x: Tensors = ((f"copies of tokens{', by expert' * (setting.ep > 1)}", came),)
    size, done = -(-n_local // RUNS), 0
    for begin in range(0, n_local, size):
        run = loads[begin : begin + size]
        ahead = came - (done + sum(run)) * d * h  # gradients of rows of the runs that go backward first
        rows += [
            row._replace(forward=row.forward + done * d * h + alive, part=True)
            for row in expert(t, f"experts.{begin}.", x, (), 1, waiting + came + ahead, rows=sum(run), experts=len(run))
        ]
        x, done = (), done + sum(run)
    rows.append(Row("made", (), (), alive + 2 * came, waiting + came))  # gradients of all rows are put together
    made = "what the experts made"
    if setting.ep > 1:
        going, made = (("places of the rows that go back", INDEX * m),), f"{made}, sent back"
        rows.append(Row("sent back", going, (), alive + 2 * came + sent, waiting + max(2 * came, came + 2 * sent)))
    scale = (("places of the copies", INDEX * n * k), (made, sent), ("weights, by expert", kept * h))
    rows.append(Row("times weights", scale, (), alive + sent + out, r + 3 * sent + kept * h))
    rows.append(Row("sum", (), (), alive + sent + out, r + out + sent))
    rows.append(Row("balance loss", (("the balance loss's gradient", t.exact),), (), alive + out, r + out))
    return rows


def expert(
    t: Terms, prefix: str, x: Tensors, others: Tensors, width: int, beside: int, *, rows: int | None = None,
    experts: int = 1, repeated: int = 0,
) -> list[Row]:  # fmt: skip
    """up to down of MLPs that are `width` times as wide as one expert."""
    hidden = width * t.shape.expert_hidden // t.setting.tp
    made, saves, remade = hidden_rows(
        t, prefix, x, others, hidden, beside, rows=rows, experts=experts, repeated=repeated
    )
    d, down = t.shape.d_model, f"{prefix}down"
    last = product(t, down, saves, hidden, d, beside=beside, repeated=remade, rows=rows, experts=experts)
    return [*made, last]
