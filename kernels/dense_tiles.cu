// Dense projections for passes of more rows than a window has, on tensor cores: out[n] = W x[n] for up to thousands of rows.
//
// Grid: (ceil(rows / 64), ceil(W.rows / 64)): blocks of the same weights are neighbours, so that memory gives them once. Block: 128. Dynamic
// shared: 3 * (64 * bytes of 32 columns' codes + 64 * 192) bytes. `x` are rows in three terms (sp_tiles.cuh), one after the other;
// row n goes to out + n * out_stride. F32 weights have dense_f32_r16.
// Bytes moved: stored bytes of W + rows * (padded columns * 6 + W.rows * 4); both come again from cache, W for every 64 rows, x for every 64
// outputs. Operations: 6 * W.rows * padded columns * rows, rows up to a multiple of 32: three terms, a multiplication and an addition.
// Reference: engine::matmul.
#include "sp_tiles.cuh"

template <class F>
SP_DEVICE void sp_dense_tiles(const SpMatrix& w, const u8* x, float* out, int out_stride, int rows) {
    SP_DYNAMIC_SHARED(u8, shared);
    const int first_row = blockIdx.x * SP_DENSE_ROWS, first = blockIdx.y * SP_TILE_OUT, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = first + warp % 2 * 32 + lane / 4;
    const SpTileScales scales[2] = {sp_tile_scales(w, w.scales, own), sp_tile_scales(w, w.scales, own + 16)};
    const u64 size = F::size(w.cols), pitch = sp_pitch(w.cols);
    const u8* from = x + first_row * pitch;
    float acc[2][SP_DENSE_ROWS / 16][4];
    sp_tile_product<F, SP_DENSE_ROWS>(
        shared, w.cols, w.col_shift,
        [=](int r, bool& there) {
            there = first + r < w.rows;
            return w.codes + (there ? first + r : first) * size;
        },
        [=](int r) { return from + r * pitch; }, min(rows - first_row, SP_DENSE_ROWS), scales, acc);
#pragma unroll
    for (int n = 0; n < SP_DENSE_ROWS / 16; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int row = first_row + warp / 2 * (SP_DENSE_ROWS / 2) + n * 8 + lane % 4 * 2 + j;
            if (row >= rows) continue;
            float* to = out + (u64)row * out_stride;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (own + m * 16 + h * 8 < w.rows) to[own + m * 16 + h * 8] = acc[m][n][h * 2 + j];
        }
}

extern "C" __global__ void __launch_bounds__(128)
dense_tiles_bf16(SpMatrix w, const u8* x, float* out, int out_stride, int rows) {
    sp_dense_tiles<SpBf16>(w, x, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_tiles_fp8(SpMatrix w, const u8* x, float* out, int out_stride, int rows) {
    sp_dense_tiles<SpFp8>(w, x, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_tiles_int4(SpMatrix w, const u8* x, float* out, int out_stride, int rows) {
    sp_dense_tiles<SpInt4>(w, x, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_tiles_mxfp4(SpMatrix w, const u8* x, float* out, int out_stride, int rows) {
    sp_dense_tiles<SpMxfp4>(w, x, out, out_stride, rows);
}
