// The product of a few weight rows with all rows of a pass, by one warp.
//
// Each weight is loaded once and meets every row of the pass in registers. The additions of one row's result have an order
// that depends on the number of columns alone: lane l takes chunks l, l+32, ..., then the lanes are added in a tree. So a
// row's bits do not depend on its company, and a verify step repeats a decode step's arithmetic.
#pragma once
#include "sp_matrix.cuh"

// For each pair of the OUT weight rows o, o + 1 and each row n < rows of the pass, `rows` <= ROWS: emit(n, o, v, next), by one lane,
// where v is the sum over columns of W[row[o]] * x(n) and `next` that of o + 1. Codes of weight row o begin at codes[o], its scales at
// scales[o], whose matrix row is row[o]; what is not there[o] is not loaded. Rows of x begin on borders of 16 bytes.
template <class F, int ROWS, int OUT, class X, class E>
SP_DEVICE void sp_dots(
    const SpMatrix& w, const u8* const (&codes)[OUT], const u8* const (&scales)[OUT], const int (&row)[OUT], const bool (&there)[OUT],
    X x, int rows, E emit) {
    const int lane = threadIdx.x % 32;
    const int size = F::size(w.cols);
    const bool wide = sp_wide_rows<F>(codes[0], w.cols);
    const int chunks = (w.cols + F::CHUNK - 1) / F::CHUNK;
    u64 scale_row[OUT];
#pragma unroll
    for (int o = 0; o < OUT; o++) scale_row[o] = F::SCALED ? sp_scale_row(w, row[o]) : 0;
    float acc[OUT * ROWS];
#pragma unroll
    for (int i = 0; i < OUT * ROWS; i++) acc[i] = 0.0f;
    // Loads of DEPTH chunks are on their way while one is used: a launch with few warps an SM, as most projections are, waits for memory once
    // where it would wait DEPTH times. Many rows leave no registers for more. Moving the words along is cheaper than as many copies of the loop.
    const int DEPTH = ROWS <= 4 ? 4 : 2;
    u32 words[DEPTH][OUT][F::WORDS];
    float scale[DEPTH][OUT];
    auto fetch = [&](int c, u32(&to)[OUT][F::WORDS], float(&factor)[OUT]) {
#pragma unroll
        for (int o = 0; o < OUT; o++) {
#pragma unroll
            for (int i = 0; i < F::WORDS; i++) to[o][i] = 0;
            factor[o] = 1.0f;
            if (there[o] && c < chunks) {
                F::load(codes[o], c * F::WORDS * 4, size, wide, to[o]);
                if (F::SCALED) factor[o] = F::scale(scales[o], scale_row[o] + (c * F::CHUNK >> w.col_shift));
            }
        }
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) fetch(lane + d * 32, words[d], scale[d]);
#pragma unroll 1
    for (int c = lane; c < chunks; c += 32) {
        // Unrolled for single rows, where decoding is the work; rolled otherwise, so that the code stays small.
        const int UNROLL = ROWS == 1 ? F::CHUNK / 4 : 1;
#pragma unroll UNROLL
        for (int g = 0; g < F::CHUNK / 4; g++) {
            int col = c * F::CHUNK + g * 4;
            float4 v[OUT];
#pragma unroll
            for (int o = 0; o < OUT; o++) {
                v[o] = F::next4(words[0][o]);
                if (F::SCALED) v[o].x *= scale[0][o], v[o].y *= scale[0][o], v[o].z *= scale[0][o], v[o].w *= scale[0][o];
            }
            // A narrow row may end within a chunk, between two groups of four.
            bool inside = wide || col < w.cols;
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                if (n < rows) {
                    float4 p = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (inside) p = *(const float4*)(x(n) + col);
#pragma unroll
                    for (int o = 0; o < OUT; o++) {
                        float a = acc[n * OUT + o];
                        a = fmaf(v[o].x, p.x, a);
                        a = fmaf(v[o].y, p.y, a);
                        a = fmaf(v[o].z, p.z, a);
                        acc[n * OUT + o] = fmaf(v[o].w, p.w, a);
                    }
                }
            }
        }
#pragma unroll
        for (int d = 0; d + 1 < DEPTH; d++) {
#pragma unroll
            for (int o = 0; o < OUT; o++) {
#pragma unroll
                for (int i = 0; i < F::WORDS; i++) words[d][o][i] = words[d + 1][o][i];
                scale[d][o] = scale[d + 1][o];
            }
        }
        fetch(c + 32 * DEPTH, words[DEPTH - 1], scale[DEPTH - 1]);
    }
    const int VALUES = OUT * ROWS, EACH = 32 / (VALUES < 32 ? VALUES : 32);
    sp_warp_sums(acc);
    // With 64 values a lane has a pair; with fewer its second half is with a neighbour.
    float next = VALUES == 64 ? acc[1] : __shfl_xor_sync(SP_FULL, acc[0], EACH);
    int first = VALUES == 64 ? lane * 2 : lane / EACH;
    if ((VALUES == 64 || lane % (2 * EACH) == 0) && first / OUT < rows) emit(first / OUT, first % OUT, acc[0], next);
}
