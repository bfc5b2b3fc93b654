"""The table of a mixture of experts (labkit.train.moe, labkit.parallel.expert), under a balanced load.

    norm2, router, shares, chosen, weights        N tokens of this rank, E experts of which each token meets k
    copies, [sent, in order]                      R rows for this rank's experts
    experts                                       each its run of the rows: up, gelu, down
    [back], times weights, shared                 a weight for each row; added up [N, D]

A router computes in fp32 at least. With tp all of this stands between one f and one g. More than RUNS experts are taken
in as many runs of neighbours.
"""

from __future__ import annotations

from labkit.plan.closed.rows import Row, Tensors
from labkit.plan.closed.steps import Terms, entered, hidden_rows, norm
from labkit.plan.model.expert_load import Load

RUNS = 8
"""Runs of experts that have rows of their own in the table."""
INDEX = 8
"""Bytes of an index."""


def mixture(t: Terms) -> list[Row]:
    """norm2 to the sum of all experts that a token meets."""
    shape, setting, r, d = t.shape, t.setting, t.residual, t.shape.d_model
    n, k, e, h, exact = t.tokens, shape.top_k, shape.n_expert, t.narrow, t.exact
    table = Load.of(shape).table(setting.rows, setting.seq, setting.ep)
    kept, here = sum(table[setting.ep_rank]), e // setting.ep
    own = [sum(row[setting.ep_rank * here + i] for row in table) for i in range(here)]
    m = sum(own)
    sent, came = kept * d * h, m * d * h  # bytes of copies of tokens
    out = n * d * h  # bytes of the sum over the experts
    seen = f"norm2 [B,T,D]{', whole' * (t.cut > 1)}"
    cheap = t.selective and t.cut == 1  # norm2 is made again
    again = t.whole * cheap
    x: Tensors = ((seen, n * d * exact),) if exact > t.wide or not cheap else ()
    back = n * d * exact  # the gradient of what the router sees
    beside = r + n * d * t.wide  # the residual's gradient, and that of x as the experts see it

    # -- router
    size, scores = d * e * t.wide, n * e * exact
    saves = (*x, *((("router in fp32", d * e * exact),) if exact > t.wide else ()))
    cast = exact > t.wide
    around = beside + again + scores + back * (1 + (setting.tp > 1)) + d * e * exact
    rows = [
        norm(t, "norm2", "x + attention [B,T,D]", entered(t), 2 * r),
        Row("router", saves, (("router", d * e),), scores, around, beside + back + d * e * exact * cast, size),
        Row("shares of the experts", (("shares of the experts", scores),), (), 2 * scores, beside + 3 * scores),
        Row("chosen", (("experts of each token", INDEX * n * k),), (), 2 * n * k * exact, beside + 2 * scores),
    ]  # fmt: skip
    weights = n * k * exact
    if k > 1:
        sums = (("weights of the experts", weights), ("sums of weights", n * exact))
        rows.append(Row("weights", sums, (), weights, beside + 4 * weights + scores))
    if shape.balance == "loss":
        shares = (("shares of the rows", setting.rows * e * exact),)
        rows.append(Row("balance", shares, (), weights, beside + weights + scores))

    # -- copies, and what the experts make of them
    counts = INDEX * (e + 1)
    token: Tensors = (("tokens of the copies", INDEX * kept),)
    order: Tensors = (("places of the copies", INDEX * n * k),)
    waiting = r + weights  # gradients of the residual path and of the router's weights
    alive = weights + counts
    narrow = n * d * h * t.autocast
    if setting.ep == 1:
        rows.append(Row("copies", token, (), alive + narrow + sent, waiting + sent + out + narrow))
        copies: Tensors = (("copies of tokens", came),)
    else:
        rows.append(Row("copies, sent", token, (), alive + narrow + 2 * sent + came, waiting + 3 * sent + out))
        places = (("places of the rows that came", INDEX * m),)
        rows.append(Row("copies, in order", places, (), alive + 2 * came, waiting + max(2 * came, came + 2 * sent)))
        copies = (("copies of tokens, by expert", came),)
    hidden, size = shape.expert_hidden // setting.tp, -(-len(own) // RUNS)
    inner, done = list[Row](), 0
    for begin in range(0, len(own), size):
        run = own[begin : begin + size]
        ahead = (m - done - sum(run)) * d * h  # of runs that go backward first: gradients of their rows
        prefix = f"experts.{begin}."
        saved = copies if begin == 0 or not t.narrow else ()
        inner += [
            row._replace(forward=row.forward + done * d * h + alive, part=True)
            for row in hidden_rows(
                t, prefix, saved, (), d, hidden, waiting + came + ahead, rows=sum(run), experts=len(run), ends=False
            )
        ]
        done += sum(run)
    rows += inner
    # all gradients of rows are put together
    rows.append(Row("made", (), (), alive + 2 * came, waiting + came))
    if setting.ep > 1:
        going = (("places of the rows that go back", INDEX * m),)
        rows.append(Row("sent back", going, (), alive + 2 * came + sent, waiting + max(2 * came, came + 2 * sent)))
    made = ("what the experts made" + ", sent back" * (setting.ep > 1), sent)
    scale = (*order, made, ("weights, by expert", kept * h))
    rows.append(Row("times weights", scale, (), alive + sent + out, r + 3 * sent + kept * h))
    rows.append(Row("sum", (), (), alive + sent + out, r + out + sent))
    rows.append(Row("balance loss", (("the balance loss's gradient", exact),), (), alive + out, r + out))
    if shape.n_shared:
        width = shape.n_shared * shape.expert_hidden // setting.tp
        first: Tensors = ((seen, n * d * h),) if t.autocast or (cast and not cheap) else ()
        rows += hidden_rows(
            t, "shared.", first, first if t.autocast else (), d, width, r + out, again=again, ends=False
        )
    return rows
