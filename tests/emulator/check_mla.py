"""Latent attention: the cache's rows, absorbed queries, attention split over the cache, gated values; against the expanded form."""

import numpy as np

from checks import all_loaded, ceil, close, equal, in_every_order, same_bits, sigmoid
from driver import Heads
from formats import Weights, scale_loads

EPS, SPLIT = 1e-6, 64
# (heads, nope, rope, v, latent, theta): nano, tiny8, fp4 set, the built-in model; flash's sizes with two heads.
SHAPES = [(2, 24, 16, 32, 48, 6e6), (4, 16, 8, 16, 48, 6e6), (2, 64, 32, 64, 128, 6e6), (4, 32, 16, 32, 64, 1e4), (2, 128, 64, 128, 512, 6e6)]


class Attention:
    """One layer's weights, and its cache on the device."""

    def __init__(self, device, rng, form, shape, room):
        self.device, self.form, self.shape = device, form, shape
        heads, nope, rope, v, latent, theta = shape
        self.kv_b = Weights(rng, form, heads * (nope + v), latent)
        self.norm = rng.uniform(0.5, 1.5, latent).astype(np.float32)
        self.frequencies = theta ** (-2.0 * np.arange(rope // 2) / rope)
        self.at = self.kv_b.upload(device), device.put(self.norm), device.put(self.frequencies / np.pi)
        self.cache = device.put(np.full((room, latent + rope), np.nan, np.float32))
        self.room = room

    def window(self, base, query, compressed, gate):
        d = self.device
        heads, nope, rope, v, latent, _ = self.shape
        rows, width = len(query), latent + rope
        kv_b, norm, turns = self.at
        b, c, q, g = (d.put(a) for a in (np.array([base], np.int32), compressed, query, gate))
        d.launch("mla_append", rows, 128, [c, norm, np.float32(EPS), turns, b, np.int32(latent), np.int32(rope), self.cache, d.damage, np.int32(7)], 16)
        absorbed = d.put(np.full((rows, heads, width), np.nan, np.float32))
        d.launch(f"mla_query_{self.form}", (ceil(latent, 128), heads), 128, [kv_b, Heads(heads, nope, rope, v), q, turns, b, np.int32(rows), absorbed], 4 * rows * 128 * 4)
        # A graph is launched for the longest context: splits beyond the last token do nothing.
        splits = ceil(self.room, SPLIT)
        parts, stats = d.room(rows * heads * splits * latent * 4), d.room(rows * heads * splits * 8)
        d.launch("mla_attend", (splits, ceil(heads, 4), rows), 128,
                 [absorbed, self.cache, b, np.int32(heads), np.int32(latent), np.int32(rope), np.float32(1 / np.sqrt(nope + rope)), np.int32(splits), parts, stats])
        context, out = d.room(rows * heads * latent * 4), d.put(np.full((rows, heads * v), np.nan, np.float32))
        d.launch("mla_merge", (heads, rows), 128, [parts, stats, b, np.int32(latent), np.int32(splits), context])
        d.launch(f"mla_value_{self.form}", (ceil(v, 8), heads), 128,
                 [kv_b, np.int32(heads), np.int32(nope), np.int32(v), context, g, np.int32(gate.shape[1]), np.int32(rows), out, d.damage, np.int32(7)])
        got = d.get(out, (rows, heads * v))
        d.free(b, c, q, g, absorbed, parts, stats, context, out)
        return got


def rotate(x, frequencies, positions):
    angle = np.multiply.outer(np.asarray(positions, np.float64), frequencies)
    a, b = x[..., ::2], x[..., 1::2]
    while angle.ndim < a.ndim:
        angle = angle[:, None]
    out = np.empty_like(x)
    out[..., ::2], out[..., 1::2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


def reference(layer, query, compressed, gate):
    """The expanded form over all rows: keys and values of every token made out of its latent."""
    heads, nope, rope, v, latent, _ = layer.shape
    rows, c, positions = len(query), compressed.astype(np.float64), np.arange(len(query))
    lat = c[:, :latent]
    lat = lat / np.sqrt((lat**2).mean(1, keepdims=True) + EPS) * layer.norm
    keys = rotate(c[:, latent:], layer.frequencies, positions)
    q = query.astype(np.float64).reshape(rows, heads, nope + rope)
    q = np.concatenate([q[..., :nope], rotate(q[..., nope:], layer.frequencies, positions)], 2)
    expanded = (lat @ layer.kv_b.values.T).reshape(rows, heads, nope + v)
    out = np.zeros((rows, heads, v))
    for h in range(heads):
        k = np.concatenate([expanded[:, h, :nope], keys], 1)
        scores = q[:, h] @ k.T / np.sqrt(nope + rope)
        scores[np.triu_indices(rows, 1)] = -np.inf
        p = np.exp(scores - scores.max(1, keepdims=True))
        out[:, h] = p / p.sum(1, keepdims=True) @ expanded[:, h, nope:]
    g = sigmoid(gate.astype(np.float64))
    return (out * (g[..., None] if gate.shape[1] == heads else g.reshape(rows, heads, v))).reshape(rows, heads * v), np.concatenate([lat, keys], 1)


def check_attention(device, rng):
    for number, shape in enumerate(SHAPES):
        heads, nope, rope, v, latent, _ = shape
        for form in ("bf16", "fp8"):
            tokens = 150 if latent < 512 else 70
            seed = rng.integers(1 << 30)
            make = lambda: Attention(device, np.random.default_rng(seed), form, shape, tokens)
            f = lambda *s: rng.standard_normal(s).astype(np.float32)
            query, compressed = f(tokens, heads * (nope + rope)) * 2, f(tokens, latent + rope)
            compressed[3] *= 1e-3
            gate = f(tokens, heads if number % 2 == 0 else heads * v)
            whole = make()
            want, cached = reference(whole, query, compressed, gate)
            # Windows of 16, then single rows: the same bits.
            parts = [whole.window(n, query[n : n + 16], compressed[n : n + 16], gate[n : n + 16]) for n in range(0, tokens, 16)]
            got = np.concatenate(parts)
            size = np.abs(want).max(1, keepdims=True)
            close(f"MLA {form} {shape}", got, want, np.broadcast_to(size, want.shape), 2e-5)
            close(f"MLA {form} {shape} cache", device.get(whole.cache, (tokens, latent + rope)), cached, np.abs(cached) + 0.05, 4e-6)
            single = make()
            for n in range(tokens if latent < 512 else 20):
                same_bits(f"MLA {form} {shape}, row {n} alone", single.window(n, query[n : n + 1], compressed[n : n + 1], gate[n : n + 1])[0], got[n])
            # Windows of every width, or some: the cache after them has rows already, which no row sees.
            for rows in range(1, 17) if number == 0 else (4, 11) if latent < 512 else (6,):
                at = int(rng.integers(0, tokens - rows + 1))
                again = whole.window(at, query[at : at + rows], compressed[at : at + rows], gate[at : at + rows])
                same_bits(f"MLA {form} {shape}, {rows} rows at {at}", again, got[at : at + rows])
            # Rejected rows are overwritten by the next window.
            done, spec = 0, make()
            for rows, keep in ((5, 2), (16, 9), (3, 0), (7, 7), (2, 1)):
                wrong = f(rows - keep, latent + rope)
                mixed = np.concatenate([compressed[done : done + keep], wrong])
                out = spec.window(done, query[done : done + rows], mixed, gate[done : done + rows])
                same_bits(f"MLA {form} {shape}, window of {rows} at {done}", out[:keep].copy(), got[done : done + keep])
                done += keep
            device.loaded()
            spec.window(done, query[:3], compressed[:3], gate[:3])
            stored = whole.kv_b.codes.nbytes
            # Scales: mla_value loads one a chunk, mla_query one a group of four columns.
            if form == "fp8":
                stored += scale_loads(form, heads * v, latent) + heads * nope * (latent // 4) * 4
            all_loaded(f"MLA {form} {shape}", device, stored)
            if latent < 512:
                in_every_order(device, f"MLA {form}", lambda: [make().window(0, query[:3], compressed[:3], gate[:3])])
    equal("damage of finite rows", device.damaged(), 0)
    compressed[0, latent + 1] = np.inf
    make().window(0, query[:1], compressed[:1], gate[:1])
    equal("damage of an infinite key", device.damaged(), 7)


def check_far_positions(device, rng):
    """Rotated keys at positions where single-precision angles would be wrong."""
    layer = Attention(device, rng, "bf16", SHAPES[4], 4)
    heads, nope, rope, v, latent, _ = SHAPES[4]
    compressed = rng.standard_normal((1, latent + rope)).astype(np.float32)
    for position in (1, 1000, 131071, 262143):
        kv_b, norm, turns = layer.at
        base, c = device.put(np.array([position], np.int32)), device.put(compressed)
        # Of the cache there is this row alone: it begins where row 0 of a whole one would be.
        room = device.room((latent + rope) * 4)
        cache = room - position * (latent + rope) * 4
        device.launch("mla_append", 1, 128, [c, norm, np.float32(EPS), turns, base, np.int32(latent), np.int32(rope), cache, device.damage, np.int32(7)], 16)
        got = device.get(room + latent * 4, rope)
        want = rotate(compressed[:, latent:].astype(np.float64), layer.frequencies, [position])[0]
        close(f"rotation to position {position}", got, want, np.abs(compressed).max(), 1e-6)
        device.free(base, c, room)


CHECKS = [check_attention, check_far_positions]
