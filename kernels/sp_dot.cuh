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
#pragma unroll 1
    for (int c = lane; c < chunks; c += 32) {
        u32 words[OUT][F::WORDS];
        float scale[OUT];
#pragma unroll
        for (int o = 0; o < OUT; o++) {
#pragma unroll
            for (int i = 0; i < F::WORDS; i++) words[o][i] = 0;
            scale[o] = 1.0f;
            if (there[o]) {
                F::load(codes[o], c * F::WORDS * 4, size, wide, words[o]);
                if (F::SCALED) scale[o] = F::scale(scales[o], scale_row[o] + (c * F::CHUNK >> w.col_shift));
            }
        }
        // Unrolled for single rows, where decoding is the work; rolled otherwise, so that the code stays small.
        const int UNROLL = ROWS == 1 ? F::CHUNK / 4 : 1;
#pragma unroll UNROLL
        for (int g = 0; g < F::CHUNK / 4; g++) {
            int col = c * F::CHUNK + g * 4;
            float4 v[OUT];
#pragma unroll
            for (int o = 0; o < OUT; o++) {
                v[o] = F::next4(words[o]);
                if (F::SCALED) v[o].x *= scale[o], v[o].y *= scale[o], v[o].z *= scale[o], v[o].w *= scale[o];
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
    }
    const int VALUES = OUT * ROWS, EACH = 32 / (VALUES < 32 ? VALUES : 32);
    sp_warp_sums(acc);
    // With 64 values a lane has a pair; with fewer its second half is with a neighbour.
    float next = VALUES == 64 ? acc[1] : __shfl_xor_sync(SP_FULL, acc[0], EACH);
    int first = VALUES == 64 ? lane * 2 : lane / EACH;
    if ((VALUES == 64 || lane % (2 * EACH) == 0) && first / OUT < rows) emit(first / OUT, first % OUT, acc[0], next);
}
