"""A block drafter's attention: heads normed and rotated, keys into the cache, attention over context and block; sums of rows; confidences."""

import numpy as np

from checks import ceil, close, equal, in_every_order, same_bits

EPS, SPLIT = 1e-6, 64
# (heads, kv_heads, dim, theta): the reference drafters', grouped heads, the released one's head and the largest.
SHAPES = [(4, 4, 16, 1e6), (2, 2, 32, 1e6), (6, 2, 8, 100.0), (2, 1, 128, 6e6), (1, 1, 256, 1e4)]


class Context:
    """Keys and values of one layer on the device, as the drafter keeps them."""

    def __init__(self, device, rng, shape, room):
        self.device, self.shape, self.room = device, shape, room
        heads, kv_heads, dim, theta = shape
        self.frequencies = theta ** (-2.0 * np.arange(dim // 2) / dim)
        self.norms = [rng.uniform(0.5, 1.5, dim).astype(np.float32) for _ in range(2)]
        self.turns = device.put(self.frequencies / np.pi)
        self.norm_at = [device.put(n) for n in self.norms]
        self.keys, self.values = (device.put(np.full((room, kv_heads, dim), np.nan, np.float32)) for _ in range(2))

    def heads(self, raw, norm, base, heads, into_cache, out):
        d, dim = self.device, self.shape[2]
        at, b = d.put(raw), d.put(np.array([base], np.int32))
        d.launch("block_heads", (heads, len(raw)), 64,
                 [at, self.norm_at[norm], np.float32(EPS), self.turns, b, np.int32(into_cache), np.int32(dim), out, d.damage, np.int32(9)], 8)
        d.free(at, b)

    def append(self, base, keys, values):
        d, (_, kv_heads, dim, _) = self.device, self.shape
        self.heads(keys, 1, base, kv_heads, 1, self.keys)
        at, b, width = d.put(values), d.put(np.array([base], np.int32)), kv_heads * dim
        d.launch("block_values", (ceil(width, 256), len(values)), 256, [at, b, np.int32(width), self.values])
        d.free(at, b)

    def attend(self, base, query, causal):
        d, (heads, kv_heads, dim, _) = self.device, self.shape
        rows, splits = len(query), ceil(self.room, SPLIT)
        q, b = d.put(np.full((rows, heads, dim), np.nan, np.float32)), d.put(np.array([base], np.int32))
        self.heads(query, 0, base, heads, 0, q)
        parts, stats = d.room(rows * heads * splits * dim * 4), d.room(rows * heads * splits * 8)
        out = d.put(np.full((rows, heads, dim), np.nan, np.float32))
        d.launch("block_attend", (splits, ceil(heads, 4), rows), 128,
                 [q, self.keys, self.values, b, np.int32(causal), np.int32(heads), np.int32(kv_heads), np.int32(dim), np.float32(1 / np.sqrt(dim)), parts, stats])
        d.launch("block_merge", (heads, rows), 64, [parts, stats, b, np.int32(causal), np.int32(dim), np.int32(splits), out])
        got, queries = d.get(out, (rows, heads, dim)), d.get(q, (rows, heads, dim))
        d.free(q, b, parts, stats, out)
        return got, queries


def rotated(raw, weight, frequencies, positions):
    """Each head normed and rotated by halves, in double precision."""
    x = raw.astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
    half = x.shape[-1] // 2
    angle = np.multiply.outer(np.asarray(positions, np.float64), frequencies)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def size_of(x):
    """What a rotation adds up to in each number: the length of its pair."""
    half = x.shape[-1] // 2
    return np.tile(np.hypot(x[..., :half], x[..., half:]), 2)


def check_blocks(device, rng):
    for number, shape in enumerate(SHAPES):
        heads, kv_heads, dim, _ = shape
        f = lambda *s: rng.standard_normal(s).astype(np.float32)
        # Every width of a block across the border of two splits, with the first shape.
        wide = [(61, n) for n in range(1, 17)] if number == 0 else [(61, 9)]
        for base, rows in ((0, 1), (5, 8), (60, 4), *wide, (130, 16)):
            context = Context(device, rng, shape, 160)
            keys, values, query = f(base + rows, kv_heads, dim), f(base + rows, kv_heads, dim), f(rows, heads, dim) * 3
            # The context in two pieces, then the block.
            for begin, end in ((0, base // 2), (base // 2, base), (base, base + rows)):
                if end > begin:
                    context.append(begin, keys[begin:end], values[begin:end])
            k = rotated(keys, context.norms[1], context.frequencies, np.arange(base + rows))
            q = rotated(query, context.norms[0], context.frequencies, np.arange(base, base + rows))
            what = f"block attention {shape}, {rows} rows after {base}"
            cached = device.get(context.keys, (base + rows, kv_heads, dim))
            close(f"{what}, keys", cached, k, size_of(k), 4e-6)
            for causal in (0, 1):
                got, queries = context.attend(base, query, causal)
                close(f"{what}, queries", queries, q, size_of(q), 4e-6)
                want = np.zeros((rows, heads, dim))
                for row in range(rows):
                    seen = base + (row + 1 if causal else rows)
                    for h in range(heads):
                        g = h // (heads // kv_heads)
                        scores = k[:seen, g] @ q[row, h] / np.sqrt(dim)
                        p = np.exp(scores - scores.max())
                        want[row, h] = p / p.sum() @ values[:seen, g].astype(np.float64)
                close(f"{what}, causal {causal}", got, want, np.broadcast_to(np.abs(want).max(-1, keepdims=True), want.shape), 2e-5)
                if number < 3:

                    def run():
                        context.append(base, keys[base:], values[base:])
                        return [*context.attend(base, query, causal), device.get(context.values, (base + rows, kv_heads, dim))]

                    in_every_order(device, what, run)
                if causal:
                    # A row sees nothing of those after it.
                    same_bits(f"{what}, the first row alone", context.attend(base, query[:1], 1)[0][0], got[0])
    equal("damage of finite heads", device.damaged(), 0)
    query[0, 0, 1] = np.nan
    context.attend(base, query, 0)
    equal("damage of a head that is no number", device.damaged(), 9)


def check_add_rows(device, rng):
    for rows, width, stride in ((1, 1, 1), (3, 255, 255), (16, 256, 1280), (2, 2560, 7680)):
        a, b = (rng.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
        at, other, out = device.put(a), device.put(b), device.put(np.full((rows, stride), -7, np.float32))

        def run():
            device.launch("add_rows", (ceil(width, 256), rows), 256, [at, other, np.int32(width), out, np.int32(stride)])
            return [device.get(out, (rows, stride))]

        got = in_every_order(device, "add_rows", run)[0]
        equal(f"{rows} sums of {width} numbers", got[:, :width], a + b)
        equal(f"what is between rows of {stride}", got[:, width:], np.full((rows, stride - width), -7, np.float32))
        equal(f"the {rows} rows themselves", device.get(at, (rows, width)), a)
        device.launch("add_rows", (ceil(width, 256), rows), 256, [at, other, np.int32(width), at, np.int32(width)])
        equal(f"{rows} rows of {width} in their place", device.get(at, (rows, width)), a + b)
        device.free(at, other, out)


def check_confidence(device, rng):
    for drafts, width, rank in ((1, 64, 0), (4, 64, 16), (8, 2560, 256), (15, 100, 3)):
        rows, embedded, proj = (rng.standard_normal(s).astype(np.float32) for s in ((drafts, width), (drafts, max(rank, 1)), width + rank))
        want, size = rows.astype(np.float64) @ proj[:width] + 0.25, np.abs(rows.astype(np.float64)) @ np.abs(proj[:width]) + 0.25
        if rank:
            want += embedded.astype(np.float64) @ proj[width:]
            size += np.abs(embedded.astype(np.float64)) @ np.abs(proj[width:])
        at, tokens, weights = device.put(rows), device.put(embedded), device.put(proj)

        def run():
            out = device.put(np.full(drafts, np.nan, np.float32))
            device.launch("confidence", drafts, 128, [at, np.int32(width), tokens, np.int32(rank), weights, np.float32(0.25), out], 16)
            got = device.get(out, drafts)
            device.free(out)
            return [got]

        what = f"confidence of {drafts} drafts, {width} and {rank} numbers"
        close(what, in_every_order(device, what, run)[0], want, size, 1e-6)
        device.free(at, tokens, weights)


CHECKS = [check_blocks, check_add_rows, check_confidence]
