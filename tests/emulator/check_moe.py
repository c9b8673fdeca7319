"""Router, plan, grouped experts and combination against double precision, with the engine's rules written out again."""

import numpy as np

from checks import Failure, all_loaded, ceil, close, equal, in_every_order, same_bits, sigmoid, silu
from driver import Plan, Strides
from formats import Weights, scale_loads

FORMATS = ("bf16", "fp8", "int4", "mxfp4")


def choose(logits, bias, k, groups, kept, scaling, normalise):
    """Ids and weights of one row; the lower index wins a tie, a NaN counts as -infinity."""
    scores = sigmoid(logits.astype(np.float32)).astype(np.float32)
    biased = scores + bias
    biased = np.where(np.isnan(biased), -np.inf, biased)
    by_group = biased.reshape(groups, -1)
    size = by_group.shape[1]
    best = np.sort(by_group, 1)[:, ::-1]
    sums = best[:, 0] + best[:, 1] if size > 1 else best[:, 0]
    stay = sorted(range(groups), key=lambda g: (-sums[g], g))[:kept]
    candidates = [e for e in range(len(scores)) if e // size in stay]
    ids = sorted(candidates, key=lambda e: (-biased[e], e))[:k]
    chosen = scores[ids].astype(np.float64)
    total = chosen.sum() + 1e-20 if normalise else 1.0
    return np.array(ids, np.uint16), chosen / total * scaling


def route(device, logits, bias, k, groups, kept, scaling=2.5, normalise=True, planned=None):
    rows, experts = logits.shape
    l, b = device.put(logits), device.put(bias)
    p = 0 if planned is None else device.put(planned)
    ids, weights = device.put(np.zeros((rows, k), np.uint16)), device.put(np.zeros((rows, k), np.float32))
    args = [l, b, np.int32(experts), np.int32(k), np.int32(groups), np.int32(kept), np.float32(scaling), np.int32(normalise), p, ids, weights, device.damage, np.int32(4)]
    device.launch("route", rows, 32, args, (2 * experts + groups) * 4)
    got = [device.get(ids, (rows, k), np.uint16), device.get(weights, (rows, k))]
    device.free(l, b, ids, weights, *([p] if p else []))
    return got


# (experts, k, groups, kept): nano, the built-in model, tiny8, tiny, flash, ungrouped, groups of one.
ROUTERS = [(16, 4, 4, 2), (64, 4, 8, 4), (32, 8, 8, 4), (128, 8, 8, 4), (512, 8, 8, 4), (24, 6, 1, 1), (8, 3, 8, 5)]


def check_router(device, rng):
    for experts, k, groups, kept in ROUTERS:
        logits = rng.standard_normal((16, experts)).astype(np.float32) * 2
        # Exact ties, all-negative biased scores.
        logits[1] = 0.25
        logits[2] = np.round(logits[2])
        bias = (rng.standard_normal(experts) * 0.05 - 2).astype(np.float32)
        for normalise in (True, False):
            ids, weights = in_every_order(device, "router", lambda: route(device, logits, bias, k, groups, kept, normalise=normalise))
            for row in range(16):
                want_ids, want = choose(logits[row], bias, k, groups, kept, 2.5, normalise)
                if not np.array_equal(ids[row], want_ids):
                    # numpy's exponential may differ by an ulp: only scores that close may change places.
                    b = (sigmoid(logits[row].astype(np.float64)) + bias)
                    if not np.allclose(b[ids[row]], b[want_ids], rtol=0, atol=2e-7):
                        raise Failure(f"router {experts}/{k}, row {row}: {ids[row].tolist()}, not {want_ids.tolist()}")
                else:
                    close(f"router {experts}/{k} weights", weights[row], want, want, 1e-6)
        whole = route(device, logits, bias, k, groups, kept)
        for rows in range(1, 16):
            for what, got, all_rows in zip(("ids", "weights"), route(device, logits[:rows], bias, k, groups, kept), whole):
                same_bits(f"router {experts}/{k}, {what} of {rows} rows", got, all_rows[:rows].copy())
    equal("damage of finite logits", device.damaged(), 0)
    ids, _ = route(device, np.full((1, 8), np.nan, np.float32), np.zeros(8, np.float32), 4, 4, 2)
    equal("experts for logits that are no numbers", ids[0], [0, 1, 2, 3])
    equal("their damage", device.damaged(), 4)


def check_planned_router(device, rng):
    for experts, k, groups, kept in ROUTERS:
        logits = rng.standard_normal((16, experts)).astype(np.float32) * 2
        # Exact ties.
        logits[1] = 0.25
        logits[2] = np.round(logits[2])
        bias = (rng.standard_normal(experts) * 0.05 - 2).astype(np.float32)
        # Also experts of groups that the router drops.
        planned = np.stack([rng.permutation(experts)[:k] for _ in range(16)]).astype(np.uint16)
        for normalise in (True, False):
            run = lambda: route(device, logits, bias, k, groups, kept, normalise=normalise, planned=planned)
            ids, weights = in_every_order(device, "planned router", run)
            for row in range(16):
                scores = sigmoid(logits[row].astype(np.float64))
                equal(f"planned experts {experts}/{k}, row {row}", np.sort(ids[row]), np.sort(planned[row]))
                own = scores[ids[row]]
                # The order of single precision, the lower index first among equals.
                descending = all(a > b - 1e-7 and (logits[row][i] != logits[row][j] or i < j) for a, b, i, j in zip(own, own[1:], ids[row], ids[row][1:]))
                equal(f"planned experts {experts}/{k}, row {row}, descend", descending, True)
                want = own / (own.sum() + 1e-20 if normalise else 1.0) * 2.5
                close(f"planned router {experts}/{k} weights", weights[row], want, want, 1e-6)
        # A plan of what the router chooses changes nothing: without a bias it has the same order.
        none = np.zeros(experts, np.float32)
        chosen = route(device, logits, none, k, groups, kept)
        again = route(device, logits, none, k, groups, kept, planned=np.ascontiguousarray(chosen[0][:, ::-1]))
        for name, a, b in zip(("ids", "weights"), chosen, again):
            same_bits(f"planned router {experts}/{k}, {name} of its own choice", a, b)
    equal("damage of finite logits", device.damaged(), 0)
    ids, _ = route(device, np.full((1, 8), np.nan, np.float32), np.zeros(8, np.float32), 4, 4, 2, planned=np.array([[7, 1, 4, 2]], np.uint16))
    equal("planned experts for logits that are no numbers", ids[0], [1, 2, 4, 7])
    equal("their damage", device.damaged(), 4)


class Planned:
    """A window's plan on the device."""

    def __init__(self, device, ids):
        self.rows, self.k = ids.shape
        slots = ids.size
        self.at = {n: device.put(np.full(size, -1, np.int32)) for n, size in (("count", 1), ("expert", slots), ("start", slots + 1), ("slot_row", slots), ("slot_of", slots))}
        i = device.put(ids.astype(np.uint16))
        device.launch("moe_plan", 1, 512, [i, np.int32(self.rows), np.int32(self.k), *self.at.values()], slots * 8)
        self.struct = Plan(*(self.at[n] for n in ("count", "expert", "start", "slot_row")))
        self.arrays = {n: device.get(at, {"count": 1, "start": slots + 1}.get(n, slots), np.int32) for n, at in self.at.items()}


def random_ids(rng, rows, k, experts):
    return np.stack([rng.permutation(experts)[:k] for _ in range(rows)])


def check_plan(device, rng):
    for rows, k, experts in ((1, 4, 16), (4, 8, 32), (9, 8, 512), (16, 8, 512), (16, 8, 128), (16, 1, 2), (16, 16, 16)):
        ids = random_ids(rng, rows, k, experts)
        plan = in_every_order(device, "plan", lambda: list(Planned(device, ids).arrays.values()))
        count, expert, start, slot_row, slot_of = plan
        distinct = np.unique(ids)
        equal("union", count[0], len(distinct))
        equal("distinct experts", expert[: len(distinct)], distinct)
        order = np.argsort(ids.ravel(), kind="stable")
        equal("slots' rows", slot_row, order // k)
        equal("slots", slot_of[order], np.arange(ids.size))
        equal("starts", start[: len(distinct) + 1], [*(np.searchsorted(np.sort(ids.ravel()), distinct)), ids.size])


class Experts:
    """Matrices of all experts one after the other."""

    def __init__(self, rng, device, form, experts, rows, cols):
        self.each = [Weights(rng, form, rows, cols) for _ in range(experts)]
        self.codes = device.put(np.concatenate([w.codes.reshape(-1) for w in self.each]))
        scales = np.concatenate([w.scales.reshape(-1) for w in self.each])
        self.scales = device.put(scales) if scales.size else 0
        first = self.each[0]
        self.matrix = first.upload(device)
        self.matrix.codes, self.matrix.scales = self.codes, self.scales
        self.strides = Strides(first.codes.nbytes, first.scales.nbytes)
        self.loads = first.codes.nbytes + scale_loads(form, rows, cols)


# (hidden, inter, experts, k): nano, tiny8 and the built-in model; eight choices a row, as tiny and flash have. Their sizes: check_flash.
MOES = [(64, 32, 16, 4), (128, 64, 16, 4), (192, 160, 8, 2), (128, 32, 64, 4), (64, 32, 32, 8)]


def check_experts(device, rng):
    for hidden, inter, count, k in MOES:
        for form in FORMATS:
            gate, up = (Experts(rng, device, form, count, inter, hidden) for _ in range(2))
            down = Experts(rng, device, form, count, hidden, inter)
            x = rng.standard_normal((16, hidden)).astype(np.float32)
            ids = random_ids(rng, 16, k, count)
            weights = rng.uniform(0.1, 1, (16, k)).astype(np.float32)
            shared = rng.standard_normal((16, hidden)).astype(np.float32)
            for limit in (0.0, 0.4):
                alone = [run_experts(device, form, (gate, up, down), x[n : n + 1], ids[n : n + 1], weights[n : n + 1], shared[n : n + 1], limit) for n in range(16)]
                want, size = reference(x, ids, weights, shared, (gate, up, down), limit)
                close(f"experts {form} {hidden}x{inter}", np.concatenate(alone), want, size, 4e-6)
                for rows in (4, 16) if not limit else range(2, 17) if (hidden, k) == (64, 4) else (2, 3, 4, 5, 9, 16):
                    device.loaded()
                    got = run_experts(device, form, (gate, up, down), x[:rows], ids[:rows], weights[:rows], shared[:rows], limit)
                    union = len(np.unique(ids[:rows]))
                    all_loaded(f"experts {form}, {rows} rows, union {union}", device, union * (gate.loads + up.loads + down.loads))
                    same_bits(f"experts {form}, {rows} rows against each alone", got, np.concatenate(alone[:rows]))
            in_every_order(device, f"experts {form}", lambda: [run_experts(device, form, (gate, up, down), x[:n], ids[:n], weights[:n], shared[:n], 0.0) for n in (3, 5)])
    equal("damage of finite experts", device.damaged(), 0)


def run_experts(device, form, matrices, x, ids, weights, shared, limit):
    gate, up, down = matrices
    rows, hidden = x.shape
    inter, slots, k = gate.matrix.rows, ids.size, ids.shape[1]
    plan = Planned(device, ids)
    r = 4 if rows <= 4 else 16
    at, mid, routed, out, w = device.put(x), device.room(slots * inter * 4), device.room(slots * hidden * 4), device.put(shared), device.put(weights)
    device.launch(f"experts_gate_up_{form}_r{r}", (ceil(inter, 8), slots), 128,
                  [gate.matrix, up.matrix, gate.strides, up.strides, plan.struct, at, np.float32(limit), mid, device.damage, np.int32(8)])
    device.launch(f"experts_down_{form}_r{r}", (ceil(hidden, 16), slots), 128, [down.matrix, down.strides, plan.struct, mid, routed])
    device.launch("moe_combine", (ceil(hidden, 256), rows), 256, [routed, w, plan.at["slot_of"], np.int32(k), np.int32(hidden), out])
    got = device.get(out, (rows, hidden))
    device.free(at, mid, routed, out, w, *plan.at.values())
    return got


def reference(x, ids, weights, shared, matrices, limit):
    gate, up, down = (m.each for m in matrices)
    x = x.astype(np.float64)
    out, size = shared.astype(np.float64), np.abs(shared).astype(np.float64)
    for n, (row, w) in enumerate(zip(ids, weights.astype(np.float64))):
        for e, weight in zip(row, w):
            a, b = silu(gate[e].values @ x[n]), up[e].values @ x[n]
            # How far rounding in the first products may carry.
            first = (np.abs(gate[e].values) @ np.abs(x[n]) + 1) * (np.abs(up[e].values) @ np.abs(x[n]) + 1)
            if limit:
                a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
            out[n] += weight * (down[e].values @ (a * b))
            size[n] += weight * (np.abs(down[e].values) @ first)
    return out, size


CHECKS = [check_router, check_planned_router, check_plan, check_experts]
