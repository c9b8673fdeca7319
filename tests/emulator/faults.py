"""Puts faults into copies of the kernels, one at a time, and demands that the parity checks see each.

    faults.py OUT IMAGE [NUMBER...]

A fault replaces something in one source or header and names the check that has to fail. Only the sources of that check's kernels are
compiled again, in `OUT`.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build import Builder, inlined, sources

HERE = Path(__file__).resolve().parent

# (file, old, new, check)
FAULTS = [
    ("rmsnorm.cu", "sum / (float)width + eps", "sum / (float)width", "norm"),
    ("sp_matrix.cuh", "8388616.0f, sp_float(0x4b000000u | (v >> 4 & 15))", "8388616.0f, sp_float(0x4b000000u | (v >> 3 & 15))", "dense"),
    ("sp_matrix.cuh", "(u64)(row >> w.row_shift)", "(u64)(0 >> w.row_shift)", "dense"),
    ("sp_dot.cuh", "acc[n * OUT + o] = fmaf(v[o].w, p.w, a);", "acc[n * OUT + o] = rows > 4 ? fmaf(p.w, v[o].w, a) + 1e-7f : fmaf(v[o].w, p.w, a);", "dense"),
    ("dense.cu", "block - p.first[m], x", "block, x", "dense"),
    ("sp_dot.cuh", "fetch(c + 32 * DEPTH, words", "fetch(c + 32 * DEPTH + 32, words", "dense"),
    ("router.cu", "other == score && at < index", "other == score && at > index", "router"),
    ("router.cu", "biased[g * size + i] = sp_nan();", "biased[g * size + i] = 0.0f;", "router"),
    ("router.cu", "weights[(u64)blockIdx.x * k + lane] = scores[mine] / sum", "weights[(u64)blockIdx.x * k + lane] = biased[mine] / sum", "router"),
    ("moe_plan.cu", "chosen[j] == chosen[i] && j < i);", "chosen[j] == chosen[i] && j > i);", "plan"),
    ("experts.cu", "w.codes + e * s.codes", "w.codes + plan.expert[0] * s.codes", "experts"),
    ("experts.cu", "(u64)slot_row[n] * cols", "(u64)slot_row[0] * cols", "experts"),
    ("sp_experts.cuh", "if (a > limit) a = limit;", "if (a > limit) a = a;", "experts"),
    ("experts.cu", "if (u >= plan.count[0] || first >= gate.rows) return;", "if (first >= gate.rows) return;\n    if (u >= plan.count[0]) { sp_weight16(gate.codes); return; }", "experts"),
    ("moe_combine.cu", "slots[rank] * hidden", "slots[0] * hidden", "experts"),
    ("kda_mix.cu", "k_norm = 1.0f / sqrtf(k_sum + 1e-6f)", "k_norm = 1.0f / (sqrtf(k_sum) + 1e-6f)", "windows"),
    ("mla_append.cu", "(float)latent + eps", "(float)latent", "attention"),
    ("kda_mix.cu", "decay_scale[head] * (f + dt_bias[c])", "decay_scale[head] * f + dt_bias[c]", "windows"),
    ("kda_mix.cu", "const float* window = raw + (u64)(first + row)", "const float* window = raw + (u64)row", "windows"),
    ("kda_delta.cu", "const int rows = keep[0];", "const int rows = keep[0] > 1 ? keep[0] - 1 : keep[0];", "windows"),
    ("kda_delta.cu", "state[c][j] *= decay[j];\n                p = fmaf(state[c][j], key[j], p);", "p = fmaf(state[c][j], key[j], p);\n                state[c][j] *= decay[j];", "windows"),
    ("kda_delta.cu", "u64 kept = (u64)keep[0] * width;", "u64 kept = (u64)(keep[0] ? keep[0] - 1 : 0) * width;", "windows"),
    ("kda_out.cu", "* weight[i] * sp_sigmoid(g)", "* weight[i] * sp_silu(g)", "windows"),
    ("sp_rope.cuh", "(float)t, &c, &s", "(float)(turns * (double)position), &c, &s", "far"),
    ("sp_rope.cuh", "b = fmaf(y, c, x * s);", "b = fmaf(y, c, -(x * s));", "attention"),
    ("mla_attend.cu", "const int tokens = base[0] + row + 1, begin", "const int tokens = base[0] + (int)gridDim.z, begin", "attention"),
    ("sp_splits.cuh", "expf(stats[s * 2] - top), sum);", "1.0f, sum);", "attention"),
    ("block_attend.cu", "(causal ? row + 1 : rows)", "(causal ? row : rows)", "blocks"),
    ("block_attend.cu", "first = head / (heads / kv_heads) * dim", "first = head % kv_heads * dim", "blocks"),
    ("block_attend.cu", "sum[j] * shrink);", "sum[j]);", "blocks"),
    ("block_values.cu", "(u64)base[0] + blockIdx.y", "(u64)blockIdx.y", "blocks"),
    ("block_heads.cu", "(into_cache ? position : row)", "row", "blocks"),
    ("block_heads.cu", "sp_rotate(a, b, turns[j], position)", "sp_rotate(a, b, turns[j], row)", "blocks"),
    ("add_rows.cu", "a[at] + b[at]", "a[at] - b[at]", "add_rows"),
    ("add_rows.cu", "blockIdx.y * stride + i", "blockIdx.y * width + i", "add_rows"),
    ("confidence.cu", "proj[width + i]", "proj[i]", "confidence"),
    ("confidence.cu", "blockIdx.x * rank", "0", "confidence"),
    ("mla_query.cu", "float q = query[((u64)n * m.heads + head) * size + i];", "float q = query[((u64)n * m.heads + 0) * size + i];", "attention"),
    ("mla_value.cu", "each == 1 ? 0 : at", "0", "attention"),
    ("argmax.cu", "other == top && where < at", "other == top && where > at", "argmax"),
    ("argmax.cu", "expf(row[i] - top)", "expf(row[i])", "argmax"),
    ("sample.cu", "sp_kept_units(row, p, vocab, least, found)", "sp_kept_units(row, p, vocab, 0, found)", "distribution"),
    ("sample.cu", "bins[digit] < left)", "bins[digit] <= left)", "distribution"),
    ("sample.cu", "? prefix << shift : least;", "? prefix << shift : prefix << shift;", "distribution"),
    ("sp_cdf.cuh", "if (target < below) break;", "if (target <= below) break;", "draw"),
    ("accept.cu", "if (!(v > 0.0)) v = 0.0;", "if (!(v > 0.0)) v = -v;", "acceptance"),
    ("accept.cu", "window[accepted + 1] == best[accepted]", "window[accepted] == best[accepted]", "acceptance"),
    ("accept.cu", "verdict[3 + i] = (int)window[i];", "verdict[3 + i] = (int)window[0];", "acceptance"),
    ("mtp_join.cu", "to[width + i] = h[i]", "to[width + i] = e[i]", "join"),
]
FAULTS += [
    ("router.cu", "place += other > score", "place += other < score", "planned_router"),
    ("router.cu", "own[i] < own[lane]", "own[i] > own[lane]", "planned_router"),
    ("router.cu", "planned + (u64)blockIdx.x * k;", "planned;", "planned_router"),
    ("router.cu", "sum += scores[order[rank]];", "sum += scores[order[0]];", "planned_router"),
    ("fill.cu", "bits | (any ^ ones) << 3", "bits | any << 3", "made"),
    ("fill.cu", "sp_mix(key + n)", "sp_mix(key + n % 4096)", "made"),
    ("fill.cu", "at + b < bytes", "at + b <= bytes", "made"),
    ("stream.cu", "if (at + i * step < chunks) v[i]", "if (at + i * step + 1 < chunks) v[i]", "stream"),
    ("fill.cu", "(float)(short)(u16)(bits", "(float)(u16)(bits", "made"),
]
# Passes of more rows than a window has.
FAULTS += [
    ("sp_tiles.cuh", "part[m][n][i], scale[m][i / 2]", "part[m][n][i], scale[m][0]", "dense_tiles"),
    ("sp_tiles.cuh", "fetch((col >> col_shift) + 2);", "fetch((col >> col_shift) + 1);", "dense_tiles"),
    ("sp_tiles.cuh", "sp_copies_wait<STAGES - 2>();", "sp_copies_wait<STAGES - 1>();", "dense_tiles"),
    ("sp_tiles.cuh", "        __syncthreads();\n        if (tile + STAGES - 1", "        if (tile + STAGES - 1", "dense_tiles"),
    ("sp_tiles.cuh", "b[n][4] = third.x, b[n][5] = third.y;", "b[n][4] = third.y, b[n][5] = third.x;", "dense_tiles"),
    ("dense_tiles.cu", "const u8* from = x + first_row * pitch;", "const u8* from = x;", "dense_tiles"),
    ("dense.cu", "x += (u64)before * x_stride;", "x += 0;", "dense_tiles"),
    ("experts_tiles.cu", "slot_row ? slot_row[begin + r] : begin + r", "begin + r", "experts_tiles"),
    ("experts_tiles.cu", "r % 32 < 16 ? gate_codes : up_codes", "r % 32 < 16 ? up_codes : gate_codes", "experts_tiles"),
    ("experts_tiles.cu", "begin = tile * SP_EXPERT_ROWS, end", "begin = 0, end", "experts_tiles"),
    ("experts_tiles.cu", "            float v = 0.0f;\n            if (to < inter) {", "            float v = sp_nan();\n            if (to < inter) {", "experts_tiles"),
    ("moe_sort.cu", "if (lane & step) sum += other;", "sum += other;", "sort"),
    ("moe_sort.cu", "        __syncwarp();\n    }", "    }", "sort"),
    ("moe_sort.cu", "end[tile] = min(at + SP_EXPERT_ROWS, slot);", "end[tile] = at + SP_EXPERT_ROWS;", "sort"),
    ("split_rows.cu", "both.z = a[1] | b[1] << 16", "both.z = a[1] | b[0] << 16", "split"),
    ("mla_prefill.cu", "t + a <= base[0] + first + n", "t + a <= base[0] + first + 1", "wide"),
    ("mla_prefill.cu", "mass[n] *= shrink;", "mass[n] *= 1.0f;", "wide"),
    ("mla_query.cu", "turns, base[0] + before,", "turns, base[0],", "wide"),
    ("mla_value.cu", "sp_values<SpFp8>(\n        kv_b, heads, nope, v, context + head * kv_b.cols, gate + (u64)before * gates,", "sp_values<SpFp8>(\n        kv_b, heads, nope, v, context + head * kv_b.cols, gate,", "wide"),
    ("kda_delta.cu", "sp_delta_rows(d, s, head, column, rows, 0, query, out);\n    sp_store_state(s, d.dim, column, own);", "sp_delta_rows(d, s, head, column, rows, 0, query, out);", "scan"),
]
# What only flash's sizes, its vocabulary, eight choices a row or many drafts show.
FAULTS += [
    ("argmax.cu", "float v = row[i];", "float v = row[i % 131072];", "argmax"),
    ("sample.cu", "p[i] = sp_rank_key(row[i], i) >= least ? p[i] / mass : 0.0;", "p[i] = sp_rank_key(row[i], (int)(u16)i) >= least ? p[i] / mass : 0.0;", "distribution"),
    ("accept.cu", "    while (accepted < drafts) {", "    while (accepted < drafts && accepted < 7) {", "acceptance"),
    ("moe_combine.cu", "rank < k; rank++", "rank < k && rank < 4; rank++", "experts"),
    ("rmsnorm.cu", "for (int i = threadIdx.x; i < width; i += blockDim.x) {", "for (int i = threadIdx.x; i < min(width, 2048); i += blockDim.x) {", "norm"),
    ("mtp_join.cu", "to[width + i] = h[i]", "to[width + i] = h[i & 2047]", "join"),
    ("mla_value.cu", "sp_values<SpFp8>(kv_b, heads, nope, v, context, gate,", "kv_b.scales -= (blockIdx.y & 16) * 2 * 4 * 4; sp_values<SpFp8>(kv_b, heads, nope, v, context, gate,", "flash_mla"),
    ("experts.cu", "    sp_down<SpInt4, 16>(down, ds, plan, mid, out);", "    down.cols = min(down.cols, 512); sp_down<SpInt4, 16>(down, ds, plan, mid, out);", "flash_experts"),
]
# A thread that does not wait for the others, and one that reads past its memory.
FAULTS += [
    ("sp_intrin.cuh", "if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;\n    __syncthreads();", "if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;", "norm"),
    ("rmsnorm.cu", "out[at + i] = residual[at + i] * scale * weight[i];", "out[at + i] = residual[at + i] * scale * weight[i + 1];", "norm"),
]


def seen(builder, texts, objects, image, number):
    """Whether the check of a fault fails."""
    file, old, new, check = FAULTS[number]
    if texts[file].count(old) != 1:
        sys.exit(f"fault {number}: {file} has {texts[file].count(old)} times: {old}")
    faulty = {**texts, file: texts[file].replace(old, new)}
    changed = dict(objects)
    for name in objects:
        if name in faulty and inlined(name, faulty) != inlined(name, texts) and (file == name or name in HEADER_USERS.get(check, [name])):
            changed[name] = builder.kernels(name, faulty)
    library = builder.out / f"fault-{number}.so"
    builder.link(list(changed.values()), library)
    run = subprocess.run([sys.executable, HERE / "parity.py", library, image, check], capture_output=True, text=True)
    library.unlink()
    # A failed check, or the emulator's own end: a deadlock, a wrong address.
    return run.returncode == 70 or run.returncode == 1 and "FAILED" in run.stdout


# The sources that a check of a header's fault needs again.
HEADER_USERS = {"norm": ["rmsnorm.cu"], "dense": ["dense.cu"], "dense_tiles": ["dense_tiles.cu"], "experts": ["experts.cu"], "far": ["mla_append.cu"], "attention": ["mla_append.cu", "mla_attend.cu"], "draw": ["sample.cu"]}


def main():
    out, image, *numbers = sys.argv[1:]
    builder, texts = Builder(out), sources()
    names = [n for n in sorted(texts) if n.endswith(".cu")]
    objects = dict(zip(["fibers.cpp", "memory.cpp", "driver.cpp", *names], builder.all_objects(texts)))
    numbers = [int(n) for n in numbers] or range(len(FAULTS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda n: seen(builder, texts, objects, image, n), numbers))
    missed = [f"fault {n} is not seen by `{FAULTS[n][3]}`: {FAULTS[n][0]}: {FAULTS[n][2]}" for n, f in zip(numbers, found) if not f]
    print(f"{len(numbers) - len(missed)} of {len(numbers)} faults seen")
    if missed:
        sys.exit("\n".join(missed))


main()
