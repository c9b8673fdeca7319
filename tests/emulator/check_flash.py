"""One layer of each kind at the sizes of Ling-3.0-flash, and tiny's experts: few rows and few experts, every column, head and format."""

import numpy as np

import check_kda
import check_mla
import check_moe
from check_dense import dense
from checks import close, equal, same_bits
from formats import Weights


def check_flash_projections(device, rng):
    """Rows of 2560 and 4096 columns, a few outputs of each, in windows of every width."""
    for form in ("f32", "bf16", "fp8", "int4", "mxfp4"):
        for cols in (2560, 4096):
            w = Weights(rng, form, 24, cols)
            matrix, x = w.upload(device), rng.standard_normal((16, cols)).astype(np.float32)
            got = dense(device, matrix, form, x)
            close(f"dense {form} 24x{cols}", got, x.astype(np.float64) @ w.values.T, np.abs(x) @ np.abs(w.values.T))
            same_bits(f"dense {form} 24x{cols}, one row", dense(device, matrix, form, x[3:4])[0], got[3])
            for rows in range(1, 16):
                same_bits(f"dense {form} 24x{cols}, {rows} rows", dense(device, matrix, form, x[:rows]), got[:rows])


def check_flash_experts(device, rng):
    """(hidden, inter): flash, tiny. Three experts and a window of five rows that share some; two of the rows by the kernels of fewer rows."""
    for hidden, inter in ((2560, 768), (1536, 512)):
        for form in check_moe.FORMATS:
            # Tiny's, with fewer columns, in the formats that its checkpoints have beside flash's.
            if inter == 512 and form == "fp8":
                continue
            gate, up = (check_moe.Experts(rng, device, form, 3, inter, hidden) for _ in range(2))
            down = check_moe.Experts(rng, device, form, 3, hidden, inter)
            x, shared = (rng.standard_normal((5, hidden)).astype(np.float32) for _ in range(2))
            ids, weights = np.array([[0, 1], [1, 2], [1, 0], [2, 1], [2, 0]]), rng.uniform(0.1, 1, (5, 2)).astype(np.float32)
            if inter == 512:
                x, shared, ids, weights = x[:3], shared[:3], ids[:3], weights[:3]
            got = check_moe.run_experts(device, form, (gate, up, down), x, ids, weights, shared, 4.0)
            want, size = check_moe.reference(x, ids, weights, shared, (gate, up, down), 4.0)
            close(f"experts {form} {hidden}x{inter}", got, want, size, 4e-6)
            if inter == 768:
                few = check_moe.run_experts(device, form, (gate, up, down), x[:2], ids[:2], weights[:2], shared[:2], 4.0)
                same_bits(f"experts {form} {hidden}x{inter}, two rows", few, got[:2].copy())
    equal("damage of finite experts", device.damaged(), 0)


def check_flash_kda(device, rng):
    """32 heads of 128: a window of four, two kept, one more."""
    layer = check_kda.Layer(device, rng, 32, 128)
    inputs, wrong = check_kda.rows_of(rng, layer, 3), check_kda.rows_of(rng, layer, 2)
    window = {n: np.concatenate([inputs[n][:2], wrong[n]]) for n in inputs}
    got = layer.window(window)[0][:2]
    layer.commit(2)
    got = np.concatenate([got, layer.window(check_kda.cut(inputs, 2, 3))[0]])
    layer.commit(1)
    want, state = check_kda.reference(layer, inputs)
    size = np.repeat(np.abs(want).reshape(3, 32, 128).max(2), 128, 1) + np.abs(want)
    close("KDA 32x128 outputs", got, want, size, 2e-5)
    close("KDA 32x128 state", layer.memory()[0], state, np.abs(state).max(), 1e-5)


def check_flash_mla(device, rng):
    """32 heads over a latent of 512: five windows of 16, so that rows see two splits of the cache; windows across their border in FP8."""
    shape = (32, 128, 64, 128, 512, 6e6)
    layer = check_mla.Attention(device, rng, "bf16", shape, 80)
    f = lambda *s: rng.standard_normal(s).astype(np.float32)
    query, compressed, gate = f(80, 32 * 192) * 2, f(80, 576), f(80, 32)
    got = np.concatenate([layer.window(n, query[n : n + 16], compressed[n : n + 16], gate[n : n + 16]) for n in range(0, 80, 16)])
    want, _ = check_mla.reference(layer, query, compressed, gate)
    close(f"MLA {shape}", got, want, np.broadcast_to(np.abs(want).max(1, keepdims=True), want.shape), 2e-5)
    layer = check_mla.Attention(device, rng, "fp8", shape, 80)
    want, cache = check_mla.reference(layer, query, compressed, gate)
    device.copy_in(layer.cache, cache[:60].astype(np.float32))
    got = layer.window(60, query[60:71], compressed[60:71], gate[60:71])
    close(f"MLA fp8 {shape}", got, want[60:71], np.broadcast_to(np.abs(want[60:71]).max(1, keepdims=True), got.shape), 2e-5)
    for rows in (1, 4):
        same_bits(f"MLA fp8 {shape}, {rows} rows", layer.window(60, query[60 : 60 + rows], compressed[60 : 60 + rows], gate[60 : 60 + rows]), got[:rows].copy())


CHECKS = [check_flash_projections, check_flash_experts, check_flash_kda, check_flash_mla]
