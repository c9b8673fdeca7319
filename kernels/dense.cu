// Dense projections: out[n] = W x[n] for the 1 to 16 rows of a pass, W read once. Head, router and every projection use it.
//
// Grid: ceil(W.rows / 16). Block: 128, a warp for four outputs. Row n comes from x + n * x_stride and goes to
// out + n * out_stride. `_rN` takes up to N rows; the bits of a row are the same with each of them. With more than four rows
// the products of scaled formats outweigh the bytes on a device without tensor-core use; see kernels/README.md.
// Bytes moved: stored bytes of W (codes and scales) + rows * (W.cols + W.rows) * 4; x is read again by each warp, from cache.
// `dense_f32_rows`: for passes of more rows, which other formats have dense_tiles for; grid (ceil(W.rows / 16), ceil(rows / 16)), and W comes
// again, from cache, for every 16 rows. Operations: 2 * W.rows * W.cols * rows, on FP32 units.
// Reference: engine::matmul.
#include "sp_dot.cuh"

template <class F, int ROWS>
SP_DEVICE void sp_dense(const SpMatrix& w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    const int OUT = 4;
    int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUT;
    if (first >= w.rows) return;
    const u8* codes[OUT];
    const u8* scales[OUT];
    int row[OUT];
    bool there[OUT];
#pragma unroll
    for (int o = 0; o < OUT; o++) {
        row[o] = first + o;
        there[o] = row[o] < w.rows;
        codes[o] = w.codes + (u64)row[o] * F::size(w.cols);
        scales[o] = w.scales;
    }
    sp_dots<F, ROWS, OUT>(w, codes, scales, row, there, [=](int n) { return x + (u64)n * x_stride; }, rows, [=](int n, int o, float v, float next) {
        float* to = out + (u64)n * out_stride + first + o;
        if (first + o < w.rows) to[0] = v;
        if (first + o + 1 < w.rows) to[1] = next;
    });
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_r1(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpF32, 1>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_r4(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpF32, 4>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_r16(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpF32, 16>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_rows(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    const int before = blockIdx.y * SP_ROWS;
    sp_dense<SpF32, SP_ROWS>(w, x + (u64)before * x_stride, x_stride, out + (u64)before * out_stride, out_stride, min(rows - before, SP_ROWS));
}

extern "C" __global__ void __launch_bounds__(128)
dense_bf16_r1(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpBf16, 1>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_bf16_r4(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpBf16, 4>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_bf16_r16(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpBf16, 16>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_fp8_r1(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpFp8, 1>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_fp8_r4(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpFp8, 4>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_fp8_r16(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpFp8, 16>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_int4_r1(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpInt4, 1>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_int4_r4(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpInt4, 4>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_int4_r16(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpInt4, 16>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_mxfp4_r1(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpMxfp4, 1>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_mxfp4_r4(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpMxfp4, 4>(w, x, x_stride, out, out_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_mxfp4_r16(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    sp_dense<SpMxfp4, 16>(w, x, x_stride, out, out_stride, rows);
}
