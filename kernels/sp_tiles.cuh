// The product of a tile of weight rows with a tile of a pass's rows on tensor cores, for passes of more rows than a window has.
//
// A weight is exact in BF16 but for its scale, which multiplies the FP32 sum of its block of columns instead. A row's number is exactly the
// sum of three terms in BF16 (sp_terms), each of which meets every weight, so that nothing but the sums is rounded, in FP32 as when
// decoding. One term would be off by 2^-8 of a number and choose other experts; two, off by 2^-17, moved the gate weights of small models
// by more than 1e-5. Three cost three times the multiplications: of a pass of 512 rows through 5.1 G active parameters 16 TFLOP, beside
// 120 GB of experts of a byte a weight that it reads.
//
// Rows of a pass in three terms, as split_rows writes them, by tiles of 32 columns of 192 bytes: of every four columns the four first terms
// and the four second ones, 16 bytes, and behind all of these of every four columns the third ones, 8 bytes. A row is filled up to whole tiles
// of columns with zeros.
// Columns of a tile come in another order than their own, the same for weights and rows: sums do not mind, and a lane finds what it
// needs in one piece.
#pragma once
#include "sp_matrix.cuh"

#define SP_TILE_OUT 64
#define SP_TILE_COLS 32
// Rows of a tile: of a dense projection, and of an expert, which few rows choose.
#define SP_DENSE_ROWS 64
#define SP_EXPERT_ROWS 32
// Bytes of a row's tile in three terms.
#define SP_TERMS 192

// Columns of a row in three terms, and bytes from such a row to the next.
SP_DEVICE int sp_padded(int cols) { return (cols + SP_TILE_COLS - 1) / SP_TILE_COLS * SP_TILE_COLS; }

SP_DEVICE u64 sp_pitch(int cols) { return (u64)(sp_padded(cols) / SP_TILE_COLS) * SP_TERMS; }
// Where in such a row the first terms of columns 4 unit .. 4 unit + 4 are; the second ones come 8 bytes further, and the third ones
// are at sp_third(unit).
SP_DEVICE int sp_first(int unit) { return unit / 8 * SP_TERMS + unit % 8 * 16; }
SP_DEVICE int sp_third(int unit) { return unit / 8 * SP_TERMS + 128 + unit % 8 * 8; }

// How a format's codes lie in shared memory: BYTES of a row's tile in pieces of 16, `place` of a piece so that no two lanes of a load meet in
// a bank, and `four`, a lane's columns of step `step` of 16 columns as two words of BF16.
template <class F>
struct SpTile {
    enum { BYTES = SP_TILE_COLS };
    SP_DEVICE int place(int row, int piece) { return piece ^ (row >> 2 & 1); }
    SP_DEVICE void four(const u8* tile, int row, int step, int t, u32& first, u32& second) {
        u32 words[F::WORDS] = {*(const u32*)(tile + row * BYTES + place(row, step) * 16 + t * 4)};
        sp_pack(F::next4(words), first, second);
    }
    // Numbers of few bits: their upper halves are all of them.
    SP_DEVICE void sp_pack(float4 v, u32& first, u32& second) {
        first = sp_bits(v.x) >> 16 | (sp_bits(v.y) & 0xffff0000u);
        second = sp_bits(v.z) >> 16 | (sp_bits(v.w) & 0xffff0000u);
    }
};

template <>
struct SpTile<SpBf16> {
    enum { BYTES = SP_TILE_COLS * 2 };
    SP_DEVICE int place(int row, int piece) { return piece ^ (row & 2); }
    SP_DEVICE void four(const u8* tile, int row, int step, int t, u32& first, u32& second) {
        uint2 v = *(const uint2*)(tile + row * BYTES + place(row, step * 2 + t / 2) * 16 + t % 2 * 8);
        first = v.x, second = v.y;
    }
};

// Four-bit codes.
template <class F>
struct SpNibbleTile : SpTile<F> {
    enum { BYTES = SP_TILE_COLS / 2 };
    SP_DEVICE int place(int, int piece) { return piece; }
    SP_DEVICE void four(const u8* tile, int row, int step, int t, u32& first, u32& second) {
        u32 words[F::WORDS] = {*(const u16*)(tile + row * BYTES + step * 8 + t * 2)};
        SpTile<F>::sp_pack(F::next4(words), first, second);
    }
};
template <class F>
struct SpTileOf { typedef SpTile<F> Type; };
template <>
struct SpTileOf<SpInt4> { typedef SpNibbleTile<SpInt4> Type; };
template <>
struct SpTileOf<SpMxfp4> { typedef SpNibbleTile<SpMxfp4> Type; };

// The scales of a lane's weight rows in one matrix: rows g and g + 8 of a tile of 16.
struct SpTileScales {
    const u8* scales;
    u64 first[2];
    bool there[2];
};

SP_DEVICE SpTileScales sp_tile_scales(const SpMatrix& w, const u8* scales, int row) {
    SpTileScales s;
    s.scales = scales;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        s.there[h] = row + h * 8 < w.rows;
        s.first[h] = s.there[h] ? sp_scale_row(w, row + h * 8) : 0;
    }
    return s;
}

// acc[m][n] = the sums over columns of 16 weight rows times 8 rows, as sp_mma has them, by a block of 128. Warp w has weight rows w % 2 * 32
// + m * 16 and rows w / 2 * ROWS / 2 + n * 8 on. `codes(r, there)`: where the codes of weight row r of the tile begin, some readable address
// where none is `there`; `terms(r)`: row r < `rows` in three terms. `scales`: those of the weight rows of m. `shared`: as many tiles of columns as are in it or on
// their way, 3 with 64 rows and 4 with 32, of 64 * Tile::BYTES + ROWS * SP_TERMS bytes.
template <class F, int ROWS, class W, class X>
SP_DEVICE void sp_tile_product(
    u8* shared, int cols, int col_shift, W codes, X terms, int rows, const SpTileScales (&scales)[2], float (&acc)[2][ROWS / 16][4]) {
    typedef typename SpTileOf<F>::Type Tile;
    const int PIECES = Tile::BYTES / 16, LOADS = (SP_TILE_OUT * PIECES + 127) / 128, ROW_LOADS = ROWS * 8 / 128, N = ROWS / 16;
    const int STAGES = ROWS > 32 ? 3 : 4, STAGE = SP_TILE_OUT * Tile::BYTES + ROWS * SP_TERMS;
    const int tiles = sp_padded(cols) / SP_TILE_COLS, blocks = F::SCALED ? ((cols - 1) >> col_shift) + 1 : 0;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int out = warp % 2 * 32 + g, row = warp / 2 * (ROWS / 2) + g, piece = threadIdx.x % PIECES, row_piece = threadIdx.x % 8;
    // What this thread copies of every tile of columns: a piece of some weight rows, and of some rows.
    const u8* own_codes[LOADS];
    const u8* own_terms[ROW_LOADS];
    const u8* own_thirds[ROW_LOADS / 2];
    int own_size[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        bool there = true;
        own_codes[i] = codes(min((int)threadIdx.x / PIECES + i * (128 / PIECES), SP_TILE_OUT - 1), there);
        own_size[i] = there ? F::size(cols) : 0;
    }
#pragma unroll
    for (int i = 0; i < ROW_LOADS; i++) own_terms[i] = terms(min((int)threadIdx.x / 8 + i * 16, rows - 1)) + row_piece * 16;
#pragma unroll
    for (int i = 0; i < ROW_LOADS / 2; i++) own_thirds[i] = terms(min((int)threadIdx.x / 4 + i * 32, rows - 1)) + 128 + threadIdx.x % 4 * 16;
    auto load = [&](int tile) {
        u8* to = shared + tile % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int r = threadIdx.x / PIECES + i * (128 / PIECES), at = tile * Tile::BYTES + piece * 16;
            if (r >= SP_TILE_OUT) continue;
            u8* place = to + r * Tile::BYTES + Tile::place(r, piece) * 16;
            const int left = max(own_size[i] - at, 0);
            if (((u64)own_codes[i] | (u64)own_size[i]) % 16 == 0) {
                sp_copy_weight16(place, own_codes[i] + (left ? at : 0), min(left, 16));
            } else {
                // Narrow rows: they begin and end on borders of four bytes.
#pragma unroll 1
                for (int b = 0; b < 16; b += 4) sp_copy_weight4(place + b, own_codes[i] + (b < left ? at + b : 0), b < left ? 4 : 0);
            }
        }
        to += SP_TILE_OUT * Tile::BYTES;
#pragma unroll
        for (int i = 0; i < ROW_LOADS; i++) {
            const int r = threadIdx.x / 8 + i * 16;
            sp_copy16(to + r * 128 + (row_piece ^ (r & 1) * 4) * 16, own_terms[i] + tile * SP_TERMS, r < rows ? 16 : 0);
        }
        to += ROWS * 128;
#pragma unroll
        for (int i = 0; i < ROW_LOADS / 2; i++) {
            const int r = threadIdx.x / 4 + i * 32;
            sp_copy16(to + r * 64 + (threadIdx.x % 4 ^ (r & 2)) * 16, own_thirds[i] + tile * SP_TERMS, r < rows ? 16 : 0);
        }
    };
    // With scales: the sums of a block of columns, and the scales of this block and the next, which are on their way.
    float part[2][N][4], scale[2][2], next[2][2];
    auto fetch = [&](int block) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                next[m][h] = scales[m].there[h] && block < blocks ? F::scale(scales[m].scales, scales[m].first[h] + block) : 0.0f;
    };
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = part[m][n][i] = 0.0f;
    const bool works = row - g < rows;
    if (F::SCALED && works) {
        fetch(0);
#pragma unroll
        for (int m = 0; m < 2; m++) scale[m][0] = next[m][0], scale[m][1] = next[m][1];
        fetch(1);
    }
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; tile++) {
        if (tile < tiles) load(tile);
        sp_copies_end();
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        sp_copies_wait<STAGES - 2>();
        // Every thread has done with the stage of the tile before this one, into which the next copies go.
        __syncthreads();
        if (tile + STAGES - 1 < tiles) load(tile + STAGES - 1);
        sp_copies_end();
        if (!works) continue;
        const u8* weights = shared + tile % STAGES * STAGE;
        const u8* x = weights + SP_TILE_OUT * Tile::BYTES;
#pragma unroll
        for (int step = 0; step < 2; step++) {
            u32 b[N][6];
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 v = *(const uint4*)(x + (row + n * 8) * 128 + ((step * 4 + t) ^ (g & 1) * 4) * 16);
                const uint2 third = *(const uint2*)(x + ROWS * 128 + (row + n * 8) * 64 + ((step * 2 + t / 2) ^ (g & 2)) * 16 + t % 2 * 8);
                b[n][0] = v.x, b[n][1] = v.y, b[n][2] = v.z, b[n][3] = v.w, b[n][4] = third.x, b[n][5] = third.y;
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
                u32 a[4];
                Tile::four(weights, out + m * 16, step, t, a[0], a[2]);
                Tile::four(weights, out + m * 16 + 8, step, t, a[1], a[3]);
                sp_mma(F::SCALED ? part[m] : acc[m], a, b);
            }
            if (!F::SCALED) continue;
            const int col = tile * SP_TILE_COLS + step * 16;
            if (((col + 16) >> col_shift) == (col >> col_shift) && (step == 0 || tile + 1 < tiles)) continue;
            // The last columns of a block of scales.
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        acc[m][n][i] = fmaf(part[m][n][i], scale[m][i / 2], acc[m][n][i]);
                        part[m][n][i] = 0.0f;
                    }
                scale[m][0] = next[m][0], scale[m][1] = next[m][1];
            }
            fetch((col >> col_shift) + 2);
        }
    }
}
