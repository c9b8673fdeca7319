"""Kimi Delta Attention over windows: convolution, gates, delta rule, rollback with ragged accept counts, output norm."""

import numpy as np

from checks import ceil, close, equal, in_every_order, same_bits, sigmoid, silu
from driver import Delta, KdaRows

# (heads, dim): nano, tiny8, fp8 set, the built-in model; tiny's and flash's head with fewer of them.
SHAPES = [(2, 32), (4, 16), (2, 64), (4, 32), (2, 128)]
TAPS, BOUND, EPS = 4, -5.0, 1e-6
WINDOW = 16


class Layer:
    """One layer's weights, and its state and staged rows on the device."""

    def __init__(self, device, rng, heads, dim):
        self.device, self.heads, self.dim, self.width = device, heads, dim, heads * dim
        p = self.width
        self.convs = [rng.standard_normal((p, TAPS)).astype(np.float32) * 0.5 for _ in range(3)]
        self.bias, self.scale = rng.standard_normal(p).astype(np.float32), rng.uniform(0.2, 2, heads).astype(np.float32)
        self.norm = rng.uniform(0.5, 1.5, dim).astype(np.float32)
        self.at = [device.put(a) for a in (*self.convs, self.bias, self.scale, self.norm)]
        self.raw = device.put(np.zeros(((TAPS - 1 + WINDOW), 3 * p), np.float32))
        self.state = device.put(np.zeros((heads, dim, dim), np.float32))
        staged = [device.put(np.full((WINDOW, w), np.nan, np.float32)) for w in (p, p, p, p, heads)]
        self.rows = KdaRows(*staged)
        self.delta = Delta(heads, dim, *staged[1:])
        self.pending = 0

    def put_rows(self, at, first, values):
        address = at + first * values.shape[1] * 4
        self.device._check("cuMemcpyHtoD_v2", *address_and(values, address))

    def window(self, inputs):
        """Runs rows after the pending ones; the gated outputs, and the raw readouts."""
        d, p, rows = self.device, self.width, len(inputs["forget"])
        self.put_rows(self.raw, TAPS - 1 + self.pending, inputs["raw"])
        forget, beta, gate = (d.put(inputs[n]) for n in ("forget", "beta", "gate"))
        d.launch("kda_mix", (self.heads, rows), 128,
                 [self.raw, *self.at[:3], forget, self.at[3], self.at[4], np.float32(BOUND), beta, np.int32(self.heads), np.int32(self.dim),
                  np.int32(TAPS), np.int32(self.pending), self.rows, d.damage, np.int32(6)], (2 * self.dim + 4) * 4)
        read, mixed = d.put(np.zeros((rows, p), np.float32)), d.put(np.zeros((rows, p), np.float32))
        d.launch("kda_delta", (self.heads, ceil(self.dim, 16)), 128, [self.state, self.delta, np.int32(self.pending), np.int32(rows), self.rows.query, read])
        d.launch("kda_out", (self.heads, rows), 128,
                 [read, gate, self.at[5], np.float32(EPS), np.int32(self.heads), np.int32(self.dim), mixed, d.damage, np.int32(6)], 16)
        got = d.get(mixed, (rows, p)), d.get(read, (rows, p))
        d.free(forget, beta, gate, read, mixed)
        self.pending += rows
        return got

    def commit(self, keep):
        d, k = self.device, self.device.put(np.array([keep], np.int32))
        d.launch("kda_commit", (self.heads, ceil(self.dim, 16), 1), 128,
                 [self.state, np.uint64(0), self.delta, np.uint64(0), np.uint64(0), k])
        d.launch("kda_shift", (ceil(3 * self.width, 256), 1), 256, [self.raw, np.uint64(0), np.int32(3 * self.width), np.int32(TAPS), k])
        d.free(k)
        self.pending = 0

    def memory(self):
        return [self.device.get(self.state, (self.heads, self.dim, self.dim)), self.device.get(self.raw, (TAPS - 1, 3 * self.width))]


def address_and(values, address):
    import ctypes

    return ctypes.c_uint64(address), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(values.nbytes)


def reference(layer, inputs):
    """All rows one after the other, in double precision: gated outputs and the final state [heads, V, K]."""
    heads, dim, p = layer.heads, layer.dim, layer.width
    raw = np.concatenate([np.zeros((TAPS - 1, 3 * p)), inputs["raw"].astype(np.float64)])
    state = np.zeros((heads, dim, dim))
    outs = []
    for n in range(len(inputs["forget"])):
        q, k, v = (silu(sum(layer.convs[i][:, j] * raw[n + j, i * p : (i + 1) * p] for j in range(TAPS))).reshape(heads, dim) for i in range(3))
        q = q / np.sqrt((q**2).sum(1, keepdims=True) + 1e-6) / np.sqrt(dim)
        k = k / np.sqrt((k**2).sum(1, keepdims=True) + 1e-6)
        decay = np.exp(BOUND * sigmoid(layer.scale[:, None] * (inputs["forget"][n].astype(np.float64) + layer.bias).reshape(heads, dim)))
        beta = sigmoid(inputs["beta"][n].astype(np.float64))
        state = state * decay[:, None, :]
        u = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
        state = state + u[:, :, None] * k[:, None, :]
        o = np.einsum("hvk,hk->hv", state, q)
        o = o / np.sqrt((o**2).mean(1, keepdims=True) + EPS) * layer.norm * sigmoid(inputs["gate"][n].astype(np.float64)).reshape(heads, dim)
        outs.append(o.reshape(p))
    return np.array(outs), state


def rows_of(rng, layer, rows):
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return {"raw": f(rows, 3 * layer.width), "forget": f(rows, layer.width), "beta": f(rows, layer.heads), "gate": f(rows, layer.width)}


def cut(inputs, begin, end):
    return {n: np.ascontiguousarray(v[begin:end]) for n, v in inputs.items()}


def check_windows(device, rng):
    """One row at a time against the reference; then windows of every width, some rows of each kept, against those bits."""
    for heads, dim in SHAPES:
        seed = rng.integers(1 << 30)
        make = lambda: Layer(device, np.random.default_rng(seed), heads, dim)
        plain = make()
        inputs = rows_of(rng, plain, 24)
        # Small rows, where the epsilons count.
        inputs["raw"][5:10] *= 1e-3
        steps = []
        for n in range(24):
            steps.append(plain.window(cut(inputs, n, n + 1))[0])
            plain.commit(1)
        alone = np.concatenate(steps)
        want, state = reference(plain, inputs)
        # The output's norm lifts small readouts: the error is relative to the head's largest.
        size = np.repeat(np.abs(want).reshape(24, heads, dim).max(2), dim, 1) + np.abs(want)
        close(f"KDA {heads}x{dim} outputs", alone, want, size, 2e-5)
        close(f"KDA {heads}x{dim} state", plain.memory()[0], state, np.abs(state).max(), 1e-5)
        equal("damage of finite rows", device.damaged(), 0)

        for rows in range(1, 17):
            spec = make()
            done = 0
            keeps = [int(rng.integers(0, rows + 1)) for _ in range(3)] + [rows, 1]
            for keep in keeps:
                keep = min(keep, 24 - done)
                right = cut(inputs, done, done + keep)
                wrong = rows_of(rng, spec, rows - keep)
                window = {n: np.concatenate([right[n], wrong[n]]) for n in right}
                got = spec.window(window)[0]
                same_bits(f"KDA {heads}x{dim}, window of {rows}, {keep} kept at {done}", got[:keep].copy(), alone[done : done + keep])
                spec.commit(keep)
                done += keep
            again = make()
            for n in range(done):
                again.window(cut(inputs, n, n + 1))
                again.commit(1)
            for what, a, b in zip(("state", "convolution's rows"), spec.memory(), again.memory()):
                same_bits(f"KDA {heads}x{dim}, windows of {rows}: {what} after rollbacks", a, b)

        # Two passes before a commit are one window.
        two = make()
        first, second = two.window(cut(inputs, 0, 3))[0], two.window(cut(inputs, 3, 8))[0]
        same_bits("KDA, a pass after a pending one", np.concatenate([first, second]), alone[:8])

        def run():
            layer = make()
            out = layer.window(cut(inputs, 0, 5))[0]
            layer.commit(3)
            return [out, *layer.memory()]

        in_every_order(device, "KDA", run)
    bad = rows_of(rng, plain, 1)
    bad["forget"][0, 3] = np.inf
    plain.window(bad)
    equal("damage of an infinite gate", device.damaged(), 6)


def check_accept_counts(device, rng):
    """Every accept count of every width of a window: the state, and the next row, are those of the kept rows one by one."""
    before, seed = 3, int(rng.integers(1 << 30))
    make = lambda: Layer(device, np.random.default_rng(seed), 2, 16)
    plain = make()
    inputs = rows_of(rng, plain, before + WINDOW + 1)
    alone, memory = [], [plain.memory()]
    for n in range(before + WINDOW + 1):
        alone.append(plain.window(cut(inputs, n, n + 1))[0])
        plain.commit(1)
        memory.append(plain.memory())
    spec = make()
    for rows in range(1, WINDOW + 1):
        for keep in range(rows + 1):
            device.copy_in(spec.state, memory[before][0])
            device.copy_in(spec.raw, memory[before][1])
            right, wrong = cut(inputs, before, before + keep), rows_of(rng, spec, rows - keep)
            got = spec.window({n: np.concatenate([right[n], wrong[n]]) for n in right})[0]
            spec.commit(keep)
            what, end = f"KDA, {keep} of {rows} rows kept", before + keep
            same_bits(f"{what}: outputs", got[:keep].copy(), np.concatenate([np.zeros((0, got.shape[1]), np.float32), *alone[before:end]]))
            for name, a, b in zip(("state", "convolution's rows"), spec.memory(), memory[end]):
                same_bits(f"{what}: {name}", a, b)
            same_bits(f"{what}: the row after", spec.window(cut(inputs, end, end + 1))[0], alone[end])
            spec.commit(0)
    equal("damage of finite rows", device.damaged(), 0)


def check_layers_of_commit(device, rng):
    """Several layers in one launch, each with its own rows."""
    heads, dim, layers, keep = 2, 32, 3, 2
    p = heads * dim
    f = lambda *shape: rng.uniform(0.1, 0.9, shape).astype(np.float32)
    state, rows = f(layers, heads, dim, dim), [f(layers, 4, p) for _ in range(3)]
    betas, raw, k = f(layers, 4, heads), f(layers, 8, 3 * p), device.put(np.array([keep], np.int32))

    def run(which):
        s, r = device.put(state[which]), [device.put(a[which]) for a in rows]
        b, w = device.put(betas[which]), device.put(raw[which])
        n = len(state[which])
        device.launch("kda_commit", (heads, 2, n), 128, [s, np.uint64(heads * dim * dim), Delta(heads, dim, *r, b), np.uint64(4 * p), np.uint64(4 * heads), k])
        device.launch("kda_shift", (1, n), 256, [w, np.uint64(8 * 3 * p), np.int32(3 * p), np.int32(TAPS), k])
        return device.get(s, state[which].shape), device.get(w, raw[which].shape)

    together = run(slice(0, 3))
    for layer in range(3):
        for a, b in zip(together, run(slice(layer, layer + 1))):
            same_bits(f"commit of layer {layer} of three", a[layer : layer + 1].copy(), b)
        same_bits("rows moved to the front", together[1][layer, : TAPS - 1].copy(), raw[layer, keep : keep + TAPS - 1])


CHECKS = [check_windows, check_accept_counts, check_layers_of_commit]
