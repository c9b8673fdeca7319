// A weight matrix as the checkpoint stores it, and how each format's codes become numbers.
//
// A row is cut into chunks of 16 bytes of codes (8 with four-bit codes), one a lane. A chunk is decoded four columns at a
// time, and each number is the code's value times its scale, rounded once, as in the engine's decoder. Columns are a multiple of
// 4 (8 with four-bit codes), and a scale's block has a
// power of two of rows and of columns, 16 columns or more: the engine refuses what is not.
// Formats: OCP OFP8 E4M3 "fn", OCP MX 1.0 (E2M1 codes, E8M0 scales), compressed-tensors `pack-quantized` (offset-8 nibbles).
#pragma once
#include "sp_intrin.cuh"

// Passed by value. `[rows, cols]`; a scale for every block of 2^row_shift x 2^col_shift, partial blocks at the edges.
struct SpMatrix {
    const u8* codes;
    const u8* scales;
    int rows;
    int cols;
    int row_shift;
    int col_shift;
};

SP_DEVICE float sp_e8m0(u32 code) {
    if (code == 0) return sp_float(0x00400000u);
    return code == 255 ? sp_nan() : sp_float(code << 23);
}

// Number of the first of the scales of `row`.
SP_DEVICE u64 sp_scale_row(const SpMatrix& w, int row) { return (u64)(row >> w.row_shift) * (((w.cols - 1) >> w.col_shift) + 1); }

// Words of a row's codes from byte `at` on, 0 beyond its `size`. `wide`: rows begin on borders of as many bytes as a chunk has.
SP_DEVICE void sp_load16(const u8* row, int at, int size, bool wide, u32 (&words)[4]) {
    if (wide) {
        uint4 v = sp_weight16(row + at);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = at + i * 4 < size ? sp_weight4(row + at + i * 4) : 0;
    }
}

SP_DEVICE void sp_load8(const u8* row, int at, int size, bool wide, u32 (&words)[2]) {
    if (wide) {
        uint2 v = sp_weight8(row + at);
        words[0] = v.x, words[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) words[i] = at + i * 4 < size ? sp_weight4(row + at + i * 4) : 0;
    }
}

// A format has: CHUNK columns a lane, WORDS of codes, `size(cols)` bytes of a row, SCALED and scale number `at` when it has them, `load` of the chunk at
// byte `at`, and `next4`, which gives the first four columns of what is left in the words and drops them.

struct SpF32 {
    enum { CHUNK = 4, WORDS = 4, SCALED = 0 };
    SP_DEVICE float scale(const u8*, u64) { return 1.0f; }
    SP_DEVICE int size(int cols) { return cols * 4; }
    SP_DEVICE void load(const u8* row, int at, int size, bool wide, u32 (&words)[WORDS]) { sp_load16(row, at, size, wide, words); }
    SP_DEVICE float4 next4(u32 (&w)[WORDS]) { return make_float4(sp_float(w[0]), sp_float(w[1]), sp_float(w[2]), sp_float(w[3])); }
};

struct SpBf16 {
    enum { CHUNK = 8, WORDS = 4, SCALED = 0 };
    SP_DEVICE float scale(const u8*, u64) { return 1.0f; }
    SP_DEVICE int size(int cols) { return cols * 2; }
    SP_DEVICE void load(const u8* row, int at, int size, bool wide, u32 (&words)[WORDS]) { sp_load16(row, at, size, wide, words); }
    SP_DEVICE float4 next4(u32 (&w)[WORDS]) {
        float4 v = make_float4(sp_float(w[0] << 16), sp_float(w[0] & 0xffff0000u), sp_float(w[1] << 16), sp_float(w[1] & 0xffff0000u));
        w[0] = w[2], w[1] = w[3];
        return v;
    }
};

// Scales are F32: others are widened when a checkpoint is loaded, there being one for thousands of codes.
struct SpFp8 {
    enum { CHUNK = 16, WORDS = 4, SCALED = 1 };
    SP_DEVICE float scale(const u8* scales, u64 at) { return sp_float(sp_weight4(scales + at * 4)); }
    SP_DEVICE int size(int cols) { return cols; }
    SP_DEVICE void load(const u8* row, int at, int size, bool wide, u32 (&words)[WORDS]) { sp_load16(row, at, size, wide, words); }
    SP_DEVICE float4 next4(u32 (&w)[WORDS]) {
        float2 low = sp_e4m3x2(w[0] & 0xffff), high = sp_e4m3x2(w[0] >> 16);
        w[0] = w[1], w[1] = w[2], w[2] = w[3];
        return make_float4(low.x, low.y, high.x, high.y);
    }
};

// Scales are BF16.
struct SpInt4 {
    enum { CHUNK = 16, WORDS = 2, SCALED = 1 };
    SP_DEVICE float scale(const u8* scales, u64 at) { return sp_float(sp_weight2(scales + at * 2) << 16); }
    SP_DEVICE int size(int cols) { return cols / 2; }
    SP_DEVICE void load(const u8* row, int at, int size, bool wide, u32 (&words)[WORDS]) { sp_load8(row, at, size, wide, words); }
    SP_DEVICE float4 next4(u32 (&w)[WORDS]) {
        u32 v = w[0];
        w[0] = v >> 16 | w[1] << 16, w[1] >>= 16;
        // A nibble in the mantissa of 2^23: exact, and one subtraction instead of a conversion.
        return make_float4(
            sp_float(0x4b000000u | (v & 15)) - 8388616.0f, sp_float(0x4b000000u | (v >> 4 & 15)) - 8388616.0f,
            sp_float(0x4b000000u | (v >> 8 & 15)) - 8388616.0f, sp_float(0x4b000000u | (v >> 12 & 15)) - 8388616.0f);
    }
};

// Scales are E8M0.
struct SpMxfp4 {
    enum { CHUNK = 16, WORDS = 2, SCALED = 1 };
    SP_DEVICE float scale(const u8* scales, u64 at) { return sp_e8m0(sp_weight1(scales + at)); }
    SP_DEVICE int size(int cols) { return cols / 2; }
    SP_DEVICE void load(const u8* row, int at, int size, bool wide, u32 (&words)[WORDS]) { sp_load8(row, at, size, wide, words); }
    // Two exponent bits and one mantissa bit in a float's places give the value times 2^-126, the subnormal 0.5 included.
    SP_DEVICE float one(u32 code) { return sp_float((code & 8) << 28 | (code & 7) << 22) * sp_float(253u << 23); }
    SP_DEVICE float4 next4(u32 (&w)[WORDS]) {
        u32 v = w[0];
        w[0] = v >> 16 | w[1] << 16, w[1] >>= 16;
        return make_float4(one(v), one(v >> 4), one(v >> 8), one(v >> 12));
    }
};

// Whether rows of codes are whole chunks that begin on borders of as many bytes.
template <class F>
SP_DEVICE bool sp_wide_rows(const u8* codes, int cols) {
    const int bytes = F::WORDS * 4;
    return F::size(cols) % bytes == 0 && (u64)codes % bytes == 0;
}
