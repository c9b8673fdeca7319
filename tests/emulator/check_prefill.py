"""Kernels of passes of more rows than a window has: against double precision, and the bits of a row against other company.

Products on tensor cores take each row in three terms of BF16, whose sum it is: the tolerances are those of the products in FP32. A row's bits
do not depend on the rows beside it there either.
"""

import ctypes

import numpy as np

import check_kda
import check_mla
from check_moe import Experts, random_ids, reference
from checks import all_loaded, ceil, close, equal, in_every_order, same_bits
from formats import Weights, bf16_values

FORMATS = ("bf16", "fp8", "int4", "mxfp4")
TILE_OUT, DENSE_ROWS, EXPERT_ROWS = 64, 64, 32
# Bytes of a row's 32 columns in three terms.
TERMS = 192
# Bytes of a weight row's 32 columns.
TILE_BYTES = {"bf16": 64, "fp8": 32, "int4": 16, "mxfp4": 16}


class Tiles(ctypes.Structure):
    """`SpTiles` of kernels/experts_tiles.cu."""

    _fields_ = [(n, ctypes.c_uint64) for n in ("count", "expert", "begin", "end", "slot_row")]


def padded(cols):
    return ceil(cols, 32) * 32


def shared_bytes(form, rows):
    return (3 if rows > 32 else 4) * (TILE_OUT * TILE_BYTES[form] + rows * TERMS)


def split(device, x):
    """Rows in three terms."""
    rows, cols = x.shape
    at, out = device.put(x), device.room(rows * padded(cols) * 6)
    device.launch("split_rows", (ceil(padded(cols) // 4, 128), rows), 128, [at, np.int32(cols), out])
    device.free(at)
    return out


def joined(device, at, rows, cols):
    """The sum of the terms, in double precision, without what fills the rows up; the filling must be zeros."""
    terms = bf16_values(device.get(at, (rows, padded(cols) // 32, TERMS // 2), np.uint16))
    both, thirds = terms[..., :64].reshape(rows, -1, 8, 2, 4), terms[..., 64:].reshape(rows, -1, 8, 4)
    values = (both.sum(3) + thirds).reshape(rows, padded(cols))
    equal("what fills a row up", values[:, cols:], np.zeros((rows, padded(cols) - cols)))
    return values[:, :cols]


def check_split(device, rng):
    for rows, cols in ((1, 24), (17, 128), (40, 320), (3, 2560)):
        x = (rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-8, 8, (rows, cols))).astype(np.float32)
        x[0, :4] = 0, -0.0, 1, 3.3e38
        got = in_every_order(device, "split", lambda: [joined(device, split(device, x), rows, cols)])[0]
        equal(f"three terms {rows}x{cols}", got, x.astype(np.float64))
    x[0, :3] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        got = joined(device, split(device, x), rows, cols)[0, :3]
    equal("what is not finite", [got[0], got[1], np.isnan(got[2])], [np.inf, -np.inf, True])


def dense(device, matrix, form, x, stride=None):
    rows, outputs = len(x), matrix.rows
    stride = stride or outputs
    out = device.put(np.full(rows * stride, -7, np.float32))
    if form == "f32":
        at = device.put(x)
        device.launch("dense_f32_rows", (ceil(outputs, 16), ceil(rows, 16)), 128,
                      [matrix, at, np.int32(x.shape[1]), out, np.int32(stride), np.int32(rows)])
    else:
        at = split(device, x)
        device.launch(f"dense_tiles_{form}", (ceil(rows, DENSE_ROWS), ceil(outputs, TILE_OUT)), 128,
                      [matrix, at, out, np.int32(stride), np.int32(rows)], shared_bytes(form, DENSE_ROWS))
    got = device.get(out, (rows, stride))
    device.free(at, out)
    return got


def scale_bytes(w, rows, tile_rows, other=None):
    """Bytes of scales that a product loads: four lanes of each working warp load the scale of every row and block."""
    each = {"bf16": 0, "fp8": 4, "int4": 2, "mxfp4": 1}[w.form]
    warps = sum(2 if min(tile_rows, rows - n) > tile_rows // 2 else 1 for n in range(0, rows, tile_rows))
    return 4 * warps * w.rows * ceil(w.cols, 1 << w.col_shift) * each


# (outputs, columns, block): nano and other small sets, partial blocks, tiles and chunks; one of tiny, scales of 16 columns.
SHAPES = [(128, 128, (128, 128)), (37, 40, (16, 16)), (160, 192, (128, 128)), (20, 320, (128, 128)), (3, 24, (32, 32)), (70, 1536, (128, 128))]


def check_dense_tiles(device, rng):
    for outputs, cols, block in SHAPES:
        for form in ("f32", *FORMATS):
            if form in ("int4", "mxfp4") and cols % 32:
                continue
            name = f"dense tiles {form} {outputs}x{cols}"
            w = Weights(rng, form, outputs, cols, block)
            matrix = w.upload(device)
            many = 512 if cols <= 40 else 200 if cols < 1536 else 70
            x = rng.standard_normal((many, cols)).astype(np.float32)
            want, size = x.astype(np.float64) @ w.values.T, np.abs(x) @ np.abs(w.values.T)
            whole = dense(device, matrix, form, x)
            close(name, whole, want, size)
            for rows in (17, 32, 33, 63, 64, 65, 129, 391, 511):
                if rows > many:
                    continue
                first = int(rng.integers(0, many - rows + 1))
                device.loaded()
                got = dense(device, matrix, form, x[first : first + rows])
                same_bits(f"{name}, {rows} rows from {first} on", got, whole[first : first + rows])
                if form != "f32":
                    all_loaded(f"{name}, {rows} rows", device, w.codes.nbytes * ceil(rows, DENSE_ROWS) + scale_bytes(w, rows, DENSE_ROWS))
            in_every_order(device, name, lambda: [dense(device, matrix, form, x[:37])])
    # Rows that are strided leave their neighbours alone.
    got = dense(device, matrix, form, x[:40], stride=outputs + 8)
    same_bits("dense tiles, strided", got[:, :outputs].copy(), whole[:40])
    equal("dense tiles, what lies between strided rows", got[:, outputs:], np.full((40, 8), -7))


class Sorted:
    """A pass's choices by expert, on the device."""

    def __init__(self, device, ids, experts):
        rows, k = ids.shape
        slots, parts = ids.size, max(1, min(16, 8192 // experts))
        most = min(slots, experts) + slots // EXPERT_ROWS
        sizes = {"count": 1, "expert": most, "begin": most, "end": most, "slot_row": slots, "slot_of": slots}
        self.at = {n: device.put(np.full(size, -1, np.int32)) for n, size in sizes.items()}
        i = device.put(ids.astype(np.uint16))
        device.launch("moe_sort", 1, 512, [i, np.int32(rows), np.int32(k), np.int32(experts), np.int32(parts), *self.at.values()],
                      (parts * experts + 32) * 4)
        device.free(i)
        self.most = most
        self.struct = Tiles(*(self.at[n] for n in ("count", "expert", "begin", "end", "slot_row")))
        self.arrays = {n: device.get(at, sizes[n], np.int32) for n, at in self.at.items()}


def skewed_ids(rng, rows, k, experts):
    """Choices with some experts that most rows have and some that none has."""
    weights = rng.permutation(1.0 / np.arange(1, experts + 1) ** 2) + 1e-9
    return np.stack([rng.choice(experts, k, False, weights / weights.sum()) for _ in range(rows)])


def check_sort(device, rng):
    for rows, k, experts in ((17, 4, 16), (40, 8, 32), (512, 8, 512), (512, 8, 128), (33, 1, 2), (100, 16, 16), (300, 3, 7)):
        for choose in (random_ids, skewed_ids):
            ids = choose(rng, rows, k, experts)
            found = in_every_order(device, "sort", lambda: list(Sorted(device, ids, experts).arrays.values()))
            count, expert, begin, end, slot_row, slot_of = found
            order = np.argsort(ids.ravel(), kind="stable")
            equal("slots' rows", slot_row, order // k)
            equal("slots", slot_of[order], np.arange(ids.size))
            tiles, at = [], 0
            for e, n in zip(*np.unique(ids, return_counts=True)):
                tiles += [(e, at + i, at + min(i + EXPERT_ROWS, n)) for i in range(0, n, EXPERT_ROWS)]
                at += n
            equal("tiles", count[0], len(tiles))
            equal("tiles' experts and slots", np.stack([expert, begin, end], 1)[: len(tiles)], np.array(tiles))


def run_experts(device, form, matrices, x, ids, weights, shared, limit):
    """Routed experts and their weighted sum; with `ids` null the one expert of all rows."""
    gate, up, down = matrices
    rows, hidden = x.shape
    inter = gate.matrix.rows
    if ids is None:
        slots, tiles, struct = rows, ceil(rows, EXPERT_ROWS), Tiles()
    else:
        plan = Sorted(device, ids, len(gate.each))
        slots, tiles, struct = ids.size, plan.most, plan.struct
    at, mid, out = split(device, x), device.room(slots * padded(inter) * 6), device.room(slots * hidden * 4)
    memory = shared_bytes(form, EXPERT_ROWS)
    device.launch(f"experts_gate_up_tiles_{form}", (ceil(inter, 32), tiles), 128,
                  [gate.matrix, up.matrix, gate.strides, up.strides, struct, np.int32(rows), at, np.float32(limit), mid, device.damage, np.int32(8)], memory)
    device.launch(f"experts_down_tiles_{form}", (ceil(hidden, TILE_OUT), tiles), 128, [down.matrix, down.strides, struct, np.int32(rows), mid, out], memory)
    if ids is None:
        got = device.get(out, (rows, hidden))
        device.free(at, mid, out)
        return got
    w, sums = device.put(weights), device.put(shared)
    device.launch("moe_combine", (ceil(hidden, 256), rows), 256, [out, w, plan.at["slot_of"], np.int32(ids.shape[1]), np.int32(hidden), sums])
    got = device.get(sums, (rows, hidden))
    device.free(at, mid, out, w, sums, *plan.at.values())
    return got


def expected_loads(matrices, ids):
    """An expert's weights once for each of its tiles."""
    total = 0
    for e, n in zip(*np.unique(ids, return_counts=True)):
        for m in matrices:
            total += m.each[e].codes.nbytes * ceil(n, EXPERT_ROWS) + scale_bytes(m.each[e], n, EXPERT_ROWS)
    return total


# (hidden, inter, experts, k): nano, tiny8 and the built-in model, one whose rows end within tiles, and eight choices a row.
MOES = [(64, 32, 16, 4), (128, 64, 16, 4), (192, 160, 8, 2), (128, 32, 64, 4), (72, 40, 8, 2), (64, 32, 32, 8)]


def check_experts_tiles(device, rng):
    for hidden, inter, count, k in MOES:
        for form in FORMATS:
            if form in ("int4", "mxfp4") and (hidden % 32 or inter % 32):
                continue
            name = f"experts tiles {form} {hidden}x{inter}"
            gate, up = (Experts(rng, device, form, count, inter, hidden) for _ in range(2))
            down = Experts(rng, device, form, count, hidden, inter)
            matrices = gate, up, down
            rows = 512 if inter == 40 else 150
            x, shared = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
            ids = skewed_ids(rng, rows, k, count)
            weights = rng.uniform(0.1, 1, (rows, k)).astype(np.float32)
            for limit in (0.0, 0.4):
                device.loaded()
                whole = run_experts(device, form, matrices, x, ids, weights, shared, limit)
                all_loaded(name, device, expected_loads(matrices, ids))
                want, size = reference(x, ids, weights, shared, matrices, limit)
                close(name, whole, want, size, 4e-6)
            for n in (17, 40, 77):
                got = run_experts(device, form, matrices, x[:n], ids[:n], weights[:n], shared[:n], limit)
                same_bits(f"{name}, {n} rows of {rows}", got, whole[:n])
            in_every_order(device, name, lambda: [run_experts(device, form, matrices, x[:20], ids[:20], weights[:20], shared[:20], 0.0)])
            # One expert outside the routing, which all rows have.
            one = run_experts(device, form, matrices, x, None, None, None, 0.4)
            zero, first = np.zeros((rows, hidden)), np.zeros((rows, 1), int)
            want, size = reference(x, first, np.ones((rows, 1)), zero, matrices, 0.4)
            close(f"{name}, one for all rows", one, want, size, 4e-6)
            same_bits(f"{name}, one for 45 rows", run_experts(device, form, matrices, x[:45], None, None, None, 0.4), one[:45])
    equal("damage of finite experts", device.damaged(), 0)
    x[3, 5] = np.inf
    run_experts(device, form, matrices, x[:20], None, None, None, 0.4)
    equal("damage of an infinite input", device.damaged(), 8)


def check_scan(device, rng):
    """A pass of many rows leaves the outputs and the state that windows leave."""
    for heads, dim in check_kda.SHAPES:
        for rows in (17, 50):
            layer, seed = None, int(rng.integers(1 << 30))
            make = lambda room: Wide(device, np.random.default_rng(seed), heads, dim, room)
            windows = check_kda.Layer(device, np.random.default_rng(seed), heads, dim)
            inputs = check_kda.rows_of(rng, windows, rows + 3)
            parts = []
            for n in range(0, rows + 3, 10):
                part = check_kda.cut(inputs, n, min(n + 10, rows + 3))
                parts.append(windows.window(part)[0])
                windows.commit(len(part["forget"]))

            def run():
                layer = make(rows)
                first = layer.scan(check_kda.cut(inputs, 0, rows))
                rest = layer.narrow(check_kda.cut(inputs, rows, rows + 3))
                return [np.concatenate([first, rest]), *layer.memory()]

            got = in_every_order(device, "scan", run)
            same_bits(f"KDA {heads}x{dim}, a pass of {rows} rows and a window after it", got[0], np.concatenate(parts))
            for what, a, b in zip(("state", "convolution's rows"), got[1:], windows.memory()):
                same_bits(f"KDA {heads}x{dim}, {what} after {rows} rows", a, b)
    equal("damage of finite rows", device.damaged(), 0)


class Wide(check_kda.Layer):
    """A layer with room for the rows of a long pass beside those of a window."""

    def __init__(self, device, rng, heads, dim, room):
        super().__init__(device, rng, heads, dim)
        p = self.width
        self.wide_raw = device.put(np.full((check_kda.TAPS - 1 + room, 3 * p), np.nan, np.float32))
        staged = [device.put(np.full((room, w), np.nan, np.float32)) for w in (p, p, p, p, heads)]
        self.wide_rows, self.wide_delta = check_kda.KdaRows(*staged), check_kda.Delta(heads, dim, *staged[1:])

    def copy(self, to, source):
        d, size = self.device, (check_kda.TAPS - 1) * 3 * self.width * 4
        d._check("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), None)

    def scan(self, inputs):
        d, p, rows = self.device, self.width, len(inputs["forget"])
        self.copy(self.wide_raw, self.raw)
        self.put_rows(self.wide_raw, check_kda.TAPS - 1, inputs["raw"])
        forget, beta, gate = (d.put(inputs[n]) for n in ("forget", "beta", "gate"))
        d.launch("kda_mix", (self.heads, rows), 128,
                 [self.wide_raw, *self.at[:3], forget, self.at[3], self.at[4], np.float32(check_kda.BOUND), beta, np.int32(self.heads),
                  np.int32(self.dim), np.int32(check_kda.TAPS), np.int32(0), self.wide_rows, d.damage, np.int32(6)], (2 * self.dim + 4) * 4)
        read, mixed = (d.put(np.zeros((rows, p), np.float32)) for _ in range(2))
        d.launch("kda_scan", (self.heads, ceil(self.dim, 16)), 128, [self.state, self.wide_delta, np.int32(rows), self.wide_rows.query, read])
        d.launch("kda_out", (self.heads, rows), 128,
                 [read, gate, self.at[5], np.float32(check_kda.EPS), np.int32(self.heads), np.int32(self.dim), mixed, d.damage, np.int32(6)], 16)
        self.copy(self.raw, self.wide_raw + rows * 3 * p * 4)
        return d.get(mixed, (rows, p))

    def narrow(self, inputs):
        got = self.window(inputs)[0]
        self.commit(len(inputs["forget"]))
        return got


class WideAttention(check_mla.Attention):
    """A layer whose rows are all of one pass."""

    def rows(self, base, query, compressed, gate):
        d = self.device
        heads, nope, rope, v, latent, _ = self.shape
        rows, width, groups = len(query), latent + rope, ceil(len(query), 16)
        kv_b, norm, turns = self.at
        b, c, q, g = (d.put(a) for a in (np.array([base], np.int32), compressed, query, gate))
        d.launch("mla_append", rows, 128, [c, norm, np.float32(check_mla.EPS), turns, b, np.int32(latent), np.int32(rope), self.cache, d.damage, np.int32(7)], 16)
        absorbed = d.put(np.full((rows, heads, width), np.nan, np.float32))
        d.launch(f"mla_query_rows_{self.form}", (ceil(latent, 128), heads, groups), 128,
                 [kv_b, check_mla.Heads(heads, nope, rope, v), q, turns, b, np.int32(rows), absorbed], 4 * 16 * 128 * 4)
        context, out = d.room(rows * heads * latent * 4), d.put(np.full((rows, heads * v), np.nan, np.float32))
        d.launch("mla_prefill", (ceil(rows, 2), ceil(heads, 4)), 128,
                 [absorbed, self.cache, b, np.int32(rows), np.int32(heads), np.int32(latent), np.int32(rope), np.float32(1 / np.sqrt(nope + rope)), context])
        d.launch(f"mla_value_rows_{self.form}", (ceil(v, 8), heads, groups), 128,
                 [kv_b, np.int32(heads), np.int32(nope), np.int32(v), context, g, np.int32(gate.shape[1]), np.int32(rows), out, d.damage, np.int32(7)])
        got = d.get(out, (rows, heads * v))
        d.free(b, c, q, g, absorbed, context, out)
        return got


def check_wide_attention(device, rng):
    for number, shape in enumerate(check_mla.SHAPES):
        heads, nope, rope, v, latent, _ = shape
        for form in ("bf16", "fp8"):
            tokens = 101 if latent < 512 else 37
            seed = rng.integers(1 << 30)
            make = lambda: WideAttention(device, np.random.default_rng(seed), form, shape, tokens)
            f = lambda *s: rng.standard_normal(s).astype(np.float32)
            query, compressed = f(tokens, heads * (nope + rope)) * 2, f(tokens, latent + rope)
            gate = f(tokens, heads if number % 2 == 0 else heads * v)
            layer = make()
            want, cached = check_mla.reference(layer, query, compressed, gate)
            cut = tokens - 20
            got = np.concatenate([layer.rows(0, query[:cut], compressed[:cut], gate[:cut]), layer.rows(cut, query[cut:], compressed[cut:], gate[cut:])])
            size = np.abs(want).max(1, keepdims=True)
            close(f"wide MLA {form} {shape}", got, want, np.broadcast_to(size, want.shape), 2e-5)
            close(f"wide MLA {form} {shape} cache", device.get(layer.cache, (tokens, latent + rope)), cached, np.abs(cached) + 0.05, 4e-6)
            same_bits(f"wide MLA {form} {shape}, in one pass", make().rows(0, query, compressed, gate), got)
            if latent < 512:
                in_every_order(device, f"wide MLA {form}", lambda: [make().rows(0, query[:19], compressed[:19], gate[:19])])
    equal("damage of finite rows", device.damaged(), 0)


def check_flash_tiles(device, rng):
    """Columns of flash and tiny with a few outputs, and their experts."""
    for form in FORMATS:
        for cols in (2560, 4096):
            w = Weights(rng, form, 72, cols)
            matrix, x = w.upload(device), rng.standard_normal((70, cols)).astype(np.float32)
            got = dense(device, matrix, form, x)
            close(f"dense tiles {form} 72x{cols}", got, x.astype(np.float64) @ w.values.T, np.abs(x) @ np.abs(w.values.T))
    for (hidden, inter), forms in (((2560, 768), FORMATS), ((1536, 512), ("bf16", "int4"))):
        for form in forms:
            gate, up = (Experts(rng, device, form, 3, inter, hidden) for _ in range(2))
            down = Experts(rng, device, form, 3, hidden, inter)
            rows = 34 if inter == 768 else 17
            x, shared = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
            ids, weights = skewed_ids(rng, rows, 2, 3), rng.uniform(0.1, 1, (rows, 2)).astype(np.float32)
            got = run_experts(device, form, (gate, up, down), x, ids, weights, shared, 4.0)
            want, size = reference(x, ids, weights, shared, (gate, up, down), 4.0)
            close(f"experts tiles {form} {hidden}x{inter}", got, want, size, 4e-6)
    equal("damage of finite experts", device.damaged(), 0)


CHECKS = [check_split, check_dense_tiles, check_sort, check_experts_tiles, check_scan, check_wide_attention, check_flash_tiles]
