"""Argmax, the sampling distribution, draws, acceptance and the draft module's input, against the engine's rules in double precision."""

import numpy as np

from checks import Failure, close, equal, in_every_order

# Ling 3.0's, of which flash's head is.
VOCAB = 157184


def argmax(device, logits, probabilities=True):
    rows, vocab = logits.shape
    at, best, prob = device.put(logits), device.put(np.zeros(rows, np.uint32)), device.put(np.full(rows, -1, np.float32))
    device.launch("argmax", rows, 512, [at, np.int32(vocab), best, prob if probabilities else 0, device.damage, np.int32(9)], 144)
    got = [device.get(best, rows, np.uint32), device.get(prob, rows)]
    device.free(at, best, prob)
    return got


def check_argmax(device, rng):
    for vocab in (5, 320, 2048, 5001, VOCAB):
        logits = np.round(rng.standard_normal((7, vocab)).astype(np.float32) * 4) / 4
        logits[3] = -5
        logits[4, vocab - 2] = 99
        best, prob = in_every_order(device, "argmax", lambda: argmax(device, logits))
        equal(f"argmax of {vocab}", best, logits.argmax(1))
        want = 1 / np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True)).sum(1)
        close(f"probability of the argmax of {vocab}", prob, want, want, 1e-6)
        best, prob = argmax(device, logits, probabilities=False)
        equal(f"argmax of {vocab} alone", best, logits.argmax(1))
        equal("probabilities that nobody wants", prob, np.full(7, -1, np.float32))
    equal("damage of finite logits", device.damaged(), 0)
    logits[0, 100] = np.nan
    argmax(device, logits)
    equal("damage of a logit that is no number", device.damaged(), 9)


def distribution(logits, temperature, top_k, top_p):
    """Sorted in full, as the rule says."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(p)), -logits.astype(np.float64)))
    if 0 < top_k < len(p):
        order = order[:top_k]
    if top_p < 1:
        units = (p[order] * 2.0**40).astype(np.uint64)
        wanted = max(int(top_p * float(int(units.sum()))), 1)
        order = order[: np.searchsorted(np.cumsum(units), wanted) + 1]
    out = np.zeros_like(p)
    out[order] = p[order] / p[order].sum()
    return out


def sample(device, logits, temperature, top_k, top_p):
    rows, vocab = logits.shape
    at, probs = device.put(logits), device.put(np.zeros((rows, vocab)))
    args = [at, np.int32(vocab), np.float64(temperature), np.int32(top_k), np.float64(top_p), probs, device.damage, np.int32(11)]
    device.launch("sample", rows, 512, args, 256 * 16 + 160)
    got = device.get(probs, (rows, vocab), np.float64)
    device.free(at, probs)
    return got


def check_distribution(device, rng):
    for vocab in (4, 320, 3001, VOCAB):
        rows = 5 if vocab < VOCAB else 2
        logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
        logits[1] = np.round(logits[1])
        logits[2:3] = 1.5
        cuts = ((1.0, 0, 1.0), (0.6, 20, 0.95), (1.0, 2, 1.0), (1.3, 0, 0.5), (0.3, 7, 0.8), (2.0, 1, 0.3), (1.0, 0, 1e-9), (0.05, 50, 0.999), (0.7, 0, 0.55))
        for temperature, top_k, top_p in cuts if vocab < VOCAB else cuts[:2] + cuts[3:4]:
            run = lambda: [sample(device, logits, temperature, top_k, top_p)]
            got = (in_every_order(device, "distribution", run) if vocab < VOCAB else run())[0]
            for row in range(rows):
                want = distribution(logits[row], temperature, top_k, top_p)
                what = f"distribution of {vocab}, T {temperature}, k {top_k}, p {top_p}, row {row}"
                equal(f"{what}: kept", np.flatnonzero(got[row]), np.flatnonzero(want))
                close(what, got[row], want, want, 1e-9)
    equal("damage of finite logits", device.damaged(), 0)
    logits[1, 5] = np.inf
    sample(device, logits, 1.0, 0, 1.0)
    equal("damage of a logit that is infinite", device.damaged(), 11)


def inverse_cdf(p, u):
    target = u * p.sum()
    below, last = 0.0, len(p) - 1
    for i in np.flatnonzero(p > 0):
        below += p[i]
        if target < below:
            return i
        last = i
    return last


def check_draw(device, rng):
    for vocab in (1, 4, 300, VOCAB):
        p = rng.uniform(0, 1, vocab) * (rng.uniform(0, 1, vocab) < 0.3)
        for u in (0.0, 0.1, 0.5, 0.999, 1 - 2.0**-53):

            def run():
                at, uniform, token, prob = device.put(p), device.put(np.array([u])), device.put(np.zeros(1, np.uint32)), device.put(np.full(1, -1, np.float32))
                device.launch("draw", 1, 256, [at, np.int32(vocab), uniform, token, prob], 256 * 8 + 16)
                return [device.get(token, 1, np.uint32), device.get(prob, 1)]

            token, prob = in_every_order(device, "draw", run) if vocab < VOCAB else run()
            got = int(token[0])
            equal(f"probability of the draw of {vocab} at {u}", prob[0], np.float32(p[got]))
            if got != inverse_cdf(p, u):
                running = np.cumsum(p) / max(p.sum(), 1e-300)
                if not (p[got] > 0 and abs(running[got] - u) < 1e-12):
                    raise Failure(f"draw of {vocab} at {u}: {got}, not {inverse_cdf(p, u)}")
    for p, u, want in (([0.25, 0, 0.5, 0.25], 0.25, 2), ([0.25, 0, 0.5, 0.25], 0.0, 0), ([0, 0.2, 0], 0.99, 1), ([0, 0, 0], 0.5, 2)):
        at, uniform, token = device.put(np.array(p, np.float64)), device.put(np.array([u])), device.put(np.zeros(1, np.uint32))
        device.launch("draw", 1, 256, [at, np.int32(len(p)), uniform, token, 0], 256 * 8 + 16)
        equal(f"draw from {p} at {u}", device.get(token, 1, np.uint32)[0], want)


def verdict_of(device, name, args, shared=0, block=32):
    verdict = device.put(np.full(3 + 16, -1, np.int32))
    device.launch(name, 1, block, [*args, verdict], shared)
    got = device.get(verdict, 3 + 16, np.int32).tolist()
    return got[:3], verdict, [v for v in got[3:] if v != -1]


def check_acceptance(device, rng):
    for drafts in range(0, 16):
        for accepted in range(0, drafts + 1):
            best = rng.integers(0, 50, drafts + 1).astype(np.uint32)
            window = np.concatenate([[99], best[:-1]]).astype(np.uint32)
            if accepted < drafts:
                window[accepted + 1] += 1
            w, b = device.put(window), device.put(best)

            def run():
                device.copy_in(w, window)
                got, verdict, told = verdict_of(device, "accept_greedy", [w, b, np.int32(drafts)])
                equal(f"greedy, {accepted} of {drafts}", got + told, [accepted, int(best[accepted]), accepted + 1, *window])
                base = device.put(np.array([40], np.int32))
                device.launch("advance", 1, 32, [base, w, verdict])
                return [device.get(base, 1, np.int32), device.get(w, 1, np.uint32)]

            base, anchor = in_every_order(device, "greedy acceptance", run) if drafts == 3 else run()
            equal("position after", base[0], 41 + accepted)
            equal("next anchor", anchor[0], best[accepted])
    for drawn in (True, False):
        seen = set()
        for _ in range(150):
            vocab, drafts = int(rng.integers(3, 40)), int(rng.integers(0, 6))
            p = rng.dirichlet(np.ones(vocab) * 0.3, drafts + 1)
            q = 0.5 * p[:drafts] + 0.5 * rng.dirichlet(np.ones(vocab) * 0.3, drafts)
            window = np.concatenate([[0], [rng.choice(vocab, p=r / r.sum()) for r in q]]).astype(np.uint32)
            uniforms = rng.uniform(0, 1, drafts + 1)
            want = sampled(p, q if drawn else None, window, uniforms)
            seen.add(want[0] == drafts)
            accept_sampled(device, p, q if drawn else None, window, uniforms, want)
        equal("both ends were seen", seen, {True, False})
        # Every accept count of every number of drafts; a few of them over a whole vocabulary.
        for vocab, cases in ((40, [(d, a) for d in range(1, 16) for a in range(d + 1)]), (VOCAB, ((15, 0), (15, 11), (15, 15)) if drawn else ((15, 14),))):
            p, q = (rng.uniform(0, 1, (16, vocab)) ** 8 for _ in range(2))
            p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
            # Tokens that q likes better than p: a uniform of almost 1 rejects them, 0 keeps them.
            window = np.concatenate([[0], (q - p)[:15].argmax(1)]).astype(np.uint32)
            for drafts, accepted in cases:
                uniforms = np.where(np.arange(drafts + 1) == accepted, 1 - 2.0**-53, 0.0)
                uniforms[drafts] = rng.uniform(0.01, 0.99)
                own_q = q[:drafts] if drawn else None
                want = sampled(p[: drafts + 1], own_q, window[: drafts + 1], uniforms)
                equal("what was to be accepted", want[0], accepted)
                accept_sampled(device, p[: drafts + 1], own_q, window[: drafts + 1], uniforms, want, every_order=vocab == 40 and drafts == 5)


def accept_sampled(device, p, q, window, uniforms, want, every_order=False):
    drafts, vocab = len(window) - 1, p.shape[1]
    at = [device.put(window), device.put(p), device.put(q) if q is not None and drafts else 0, device.put(uniforms)]

    def run():
        got, verdict, told = verdict_of(device, "accept_sampled", [*at, np.int32(drafts), np.int32(vocab)], 256 * 8 + 32, 256)
        device.free(verdict)
        return [np.array(got + told)]

    got = (in_every_order(device, "sampled acceptance", run) if every_order else run())[0]
    equal(f"sampled acceptance of {drafts} drafts of {vocab}", got.tolist(), [*want, *window])
    device.free(*(a for a in at if a))


def sampled(p, q, window, uniforms):
    drafts = len(window) - 1
    for j in range(drafts):
        d = window[j + 1]
        if not uniforms[j] * (q[j, d] if q is not None else 1.0) < p[j, d]:
            other = q[j] if q is not None else (np.arange(p.shape[1]) == d).astype(float)
            return [j, int(inverse_cdf(np.maximum(p[j] - other, 0), uniforms[-1])), j + 1]
    return [drafts, int(inverse_cdf(p[drafts], uniforms[-1])), drafts + 1]


def check_join(device, rng):
    for rows, width in ((1, 64), (5, 128), (16, 1536), (3, 2560)):
        e, h = (rng.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
        e[0], h[-1] = e[0] * 1e-3, h[-1] * 1e-3
        we, wh = (rng.uniform(0.5, 1.5, width).astype(np.float32) for _ in range(2))

        def run():
            at = [device.put(a) for a in (e, h, we, wh)]
            out = device.put(np.zeros((rows, 2 * width), np.float32))
            device.launch("mtp_join", rows, 256, [*at, np.float32(1e-6), np.int32(width), out], 32)
            return [device.get(out, (rows, 2 * width))]

        norm = lambda x, w: x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * w
        want = np.concatenate([norm(e, we), norm(h, wh)], 1)
        close(f"draft module's input {rows}x{width}", in_every_order(device, "join", run)[0], want, want, 1e-6)


CHECKS = [check_argmax, check_distribution, check_draw, check_acceptance, check_join]
