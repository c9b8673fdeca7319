"""Norm, embedding and dense projections against double precision; a row's bits alone and in company; bytes of weights loaded."""

import numpy as np

from checks import all_loaded, ceil, close, equal, in_every_order, padded, same_bits
from driver import Projections
from formats import E2M1, E4M3, Weights, scale_loads

FORMATS = ("f32", "bf16", "fp8", "int4", "mxfp4")
# (rows, cols, block): nano and other small sets, partial blocks and chunks; one of tiny.
SHAPES = [(128, 128, (128, 128)), (37, 40, (16, 16)), (160, 192, (128, 128)), (20, 320, (128, 128)), (3, 24, (32, 32)), (16, 1536, (128, 128))]


def variant(rows):
    return 1 if rows == 1 else 4 if rows <= 4 else 16


def dense(device, matrix, form, x, stride=None, rows_of_kernel=None, block=128):
    return projections(device, [matrix], form, x, [stride or matrix.rows], rows_of_kernel, block)[0]


def projections(device, matrices, form, x, strides, rows_of_kernel=None, block=128):
    """Several products with the same rows by one launch; what is between strided rows stays -7."""
    rows, per_block = len(x), block // 8
    at = device.put(padded(x))
    outs = [device.put(np.full(rows * stride, -7, np.float32)) for stride in strides]
    first = np.cumsum([0, *(ceil(m.rows, per_block) for m in matrices)])
    given = Projections(outs, strides, first, matrices)
    r = rows_of_kernel or variant(rows)
    device.launch(f"dense_{form}_r{r}", int(first[-1]), block, [given, at, np.int32(x.shape[1]), np.int32(rows)])
    got = [device.get(out, (rows, stride)) for out, stride in zip(outs, strides)]
    device.free(at, *outs)
    return got


def check_dense(device, rng):
    for rows_w, cols, block in SHAPES:
        for form in FORMATS:
            if form in ("int4", "mxfp4") and cols % 32:
                continue
            w = Weights(rng, form, rows_w, cols, block)
            matrix = w.upload(device)
            x = rng.standard_normal((16, cols)).astype(np.float32)
            want, size = x.astype(np.float64) @ w.values.T, np.abs(x) @ np.abs(w.values.T)
            alone = np.concatenate([dense(device, matrix, form, x[n : n + 1]) for n in range(16)])
            close(f"dense {form} {rows_w}x{cols}", alone, want, size)
            for rows in range(1, 17):
                device.loaded()
                got = dense(device, matrix, form, x[:rows])
                same_bits(f"dense {form} {rows_w}x{cols}, {rows} rows against each alone", got, alone[:rows])
                all_loaded(f"dense {form} {rows_w}x{cols}, {rows} rows", device, w.codes.nbytes + scale_loads(form, rows_w, cols))
            same_bits(f"dense {form}: the wide kernel for one row", dense(device, matrix, form, x[:1], rows_of_kernel=16), alone[:1])
            in_every_order(device, f"dense {form}", lambda: [dense(device, matrix, form, x[:rows]) for rows in (1, 3, 5)])
    # Projections of the same rows are one launch, of blocks of either size: the bits of each alone.
    for form in FORMATS:
        sets = [Weights(rng, form, n, 160, (32, 32)) for n in (37, 4, 1, 90, 16, 33)]
        x = rng.standard_normal((7, 160)).astype(np.float32)
        all_of_them = [w.upload(device) for w in sets]
        for rows, count in ((1, 6), (3, 2), (7, 6)):
            alone = [dense(device, m, form, x[:rows]) for m in all_of_them[:count]]
            for block in (32, 128):
                strides = [m.rows + 3 for m in all_of_them[:count]]
                device.loaded()
                got = projections(device, all_of_them[:count], form, x[:rows], strides, block=block)
                what = f"{count} projections {form}, {rows} rows, blocks of {block}"
                all_loaded(what, device, sum(w.codes.nbytes + scale_loads(form, w.rows, 160) for w in sets[:count]))
                for one, want in zip(got, alone):
                    same_bits(what, one[:, :-3].copy(), want)
                    equal(f"{what}, what lies between rows", one[:, -3:], np.full((rows, 3), -7))
    # Rows that are strided leave their neighbours alone.
    w = Weights(rng, "f32", rows_w, cols)
    matrix, form, x = w.upload(device), "f32", rng.standard_normal((3, cols)).astype(np.float32)
    alone = dense(device, matrix, form, x)
    got = dense(device, matrix, form, x[:3], stride=rows_w + 8)
    same_bits("dense, strided", got[:, :rows_w].copy(), alone)
    equal("dense, what lies between strided rows", got[:, rows_w:], np.full((3, 8), -7))


def check_special_codes(device, rng):
    """Every code of the small formats by itself, and numbers that are none."""
    w = Weights(rng, "fp8", 256, 16, (128, 128))
    w.codes[:] = 0
    w.codes[:, 3] = np.arange(256)
    w.scales[:] = 1
    x = np.zeros((1, 16), np.float32)
    x[0, 3] = 1
    got = dense(device, w.upload(device), "fp8", x)[0]
    equal("every E4M3 code", np.nan_to_num(got, nan=-1000), np.nan_to_num(E4M3, nan=-1000))
    w = Weights(rng, "mxfp4", 16, 32)
    w.scales[:] = 127
    w.codes[:] = 0
    w.codes[:, 1] = np.arange(16) << 4
    x = np.zeros((1, 32), np.float32)
    x[0, 3] = 1
    equal("every E2M1 code, high nibble", dense(device, w.upload(device), "mxfp4", x)[0], E2M1)
    w.scales[:, 0] = np.array([0, 255, 1, 254] * 4, np.uint8)
    w.codes[:, 1] = 2 << 4
    got = dense(device, w.upload(device), "mxfp4", x)[0]
    equal("E8M0 at its ends", np.nan_to_num(got[:4], nan=-1), np.array([2.0**-127, -1, 2.0**-126, 2.0**127], np.float32))


def check_norm(device, rng):
    # nano, partial warps, tiny, flash.
    for width in (24, 128, 1536, 2560):
        for rows in range(1, 17) if width == 128 else (1, 3, 16):
            x, branch = rng.standard_normal((rows, width)).astype(np.float32), rng.standard_normal((rows, width)).astype(np.float32)
            # A small row, where the epsilon counts.
            x[0], branch[0] = x[0] * 1e-3, branch[0] * 1e-3
            weight = rng.uniform(0.5, 1.5, width).astype(np.float32)
            for with_branch in (False, True):

                def run():
                    r, b, w, o = device.put(x), device.put(branch), device.put(weight), device.put(np.zeros_like(x))
                    device.launch("rmsnorm", rows, 256, [r, b if with_branch else 0, w, np.float32(1e-6), np.int32(width), o, device.damage, np.int32(5)], 32)
                    got = [device.get(o, x.shape), device.get(r, x.shape)]
                    device.free(r, b, w, o)
                    return got

                out, residual = in_every_order(device, "rmsnorm", run)
                total = x + branch if with_branch else x
                same_bits("rmsnorm, residual", residual, total)
                want = total / np.sqrt(np.mean(total.astype(np.float64) ** 2, 1, keepdims=True) + 1e-6) * weight
                close(f"rmsnorm {rows}x{width}", out, want, want, 1e-6)
    equal("damage of finite rows", device.damaged(), 0)
    bad = np.ones((2, 24), np.float32)
    bad[1, 3] = np.inf
    r, w, o = device.put(bad), device.put(np.ones(24, np.float32)), device.room(bad.nbytes)
    device.launch("rmsnorm", 2, 256, [r, 0, w, np.float32(1e-6), np.int32(24), o, device.damage, np.int32(5)], 32)
    equal("damage of an infinite row", device.damaged(), 5)


def check_embedding(device, rng):
    for form in ("f32", "bf16"):
        for width in (40, 128, 2560):
            w = Weights(rng, form, 50, width)
            tokens = np.array([0, 49, 7, 7, 31], np.uint32)

            def run():
                t, o = device.put(tokens), device.put(np.zeros((5, width), np.float32))
                device.launch(f"embed_{form}", 5, 128, [w.upload(device), t, o, device.damage, np.int32(3)])
                return [device.get(o, (5, width))]

            same_bits(f"embedding {form}", in_every_order(device, "embedding", run)[0], w.values[tokens].astype(np.float32))
            equal("damage of known tokens", device.damaged(), 0)
    t, o = device.put(np.array([3, 50], np.uint32)), device.put(np.ones((2, width), np.float32))
    device.launch(f"embed_{form}", 2, 128, [w.upload(device), t, o, device.damage, np.int32(3)])
    equal("damage of a token outside the vocabulary", device.damaged(), 3)
    equal("its row", device.get(o, (2, width))[1], np.zeros(width))


CHECKS = [check_norm, check_embedding, check_dense, check_special_codes]
