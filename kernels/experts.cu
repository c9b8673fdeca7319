// The grouped expert product of a window. Each distinct expert's weights are read exactly once, whatever number of rows chose
// it: the cost follows the union, not rows * k. Two kernels: gate and up with SwiGLU, then down. A gated MLP outside the
// routing (shared expert, dense layer) is the same with a plan of one expert and all rows.
//
// experts_gate_up: mid[slot] = min(silu(gate x), limit) * clamp(up x, -limit, limit), limit 0 = none, for the slot's row x.
//   Grid: (ceil(inter / 8), slots). Block: 128, a warp for two outputs of both matrices. Blocks beyond the union leave at once.
// experts_down: out[slot] = down mid[slot].
//   Grid: (ceil(hidden / 16), slots). Block: 128, a warp for four outputs.
// The matrices are those of expert 0; expert e's codes and scales lie e * stride further. An expert has at most 16 rows.
// Bytes moved: U * (stored bytes of gate + up) + slots * (hidden + inter) * 4, and U * stored bytes of down + slots *
// (inter + hidden) * 4. Reference: engine::moe.
#include "sp_dot.cuh"
#include "sp_experts.cuh"

// Where a window's distinct experts and their rows are; written by moe_plan, or fixed for a single MLP.
struct SpPlan {
    const int* count;
    const int* expert;
    const int* start;
    const int* slot_row;
};

template <class F, int ROWS>
SP_DEVICE void sp_gate_up(
    const SpMatrix& gate, const SpMatrix& up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage,
    int site) {
    const int u = blockIdx.y;
    const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 2;
    if (u >= plan.count[0] || first >= gate.rows) return;
    const int e = plan.expert[u], begin = plan.start[u], rows = plan.start[u + 1] - begin;
    const u8* codes[4];
    const u8* scales[4];
    int row[4];
    bool there[4];
#pragma unroll
    for (int o = 0; o < 4; o++) {
        // gate and up of one output are a pair, then those of the next.
        const SpMatrix& w = o % 2 == 0 ? gate : up;
        const SpStrides s = o % 2 == 0 ? gs : us;
        row[o] = first + o / 2;
        there[o] = row[o] < gate.rows;
        codes[o] = w.codes + e * s.codes + (u64)row[o] * F::size(gate.cols);
        scales[o] = w.scales + e * s.scales;
    }
    const int* slot_row = plan.slot_row + begin;
    const int cols = gate.cols, inter = gate.rows;
    sp_dots<F, ROWS, 4>(
        gate, codes, scales, row, there, [=](int n) { return x + (u64)slot_row[n] * cols; }, rows, [=](int n, int o, float g, float v) {
            int to = first + o / 2;
            if (to >= inter) return;
            // A clamp or a sigmoid would hide an infinity.
            if (!sp_finite(g) || !sp_finite(v)) sp_damaged(damage, site);
            mid[(u64)(begin + n) * inter + to] = sp_swiglu(g, v, limit);
        });
}

template <class F, int ROWS>
SP_DEVICE void sp_down(const SpMatrix& down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    const int u = blockIdx.y;
    const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 4;
    if (u >= plan.count[0] || first >= down.rows) return;
    const int e = plan.expert[u], begin = plan.start[u], rows = plan.start[u + 1] - begin;
    const u8* codes[4];
    const u8* scales[4];
    int row[4];
    bool there[4];
#pragma unroll
    for (int o = 0; o < 4; o++) {
        row[o] = first + o;
        there[o] = row[o] < down.rows;
        codes[o] = down.codes + e * ds.codes + (u64)row[o] * F::size(down.cols);
        scales[o] = down.scales + e * ds.scales;
    }
    const float* x = mid + (u64)begin * down.cols;
    const int cols = down.cols, hidden = down.rows;
    sp_dots<F, ROWS, 4>(
        down, codes, scales, row, there, [=](int n) { return x + (u64)n * cols; }, rows, [=](int n, int o, float v, float next) {
            float* to = out + (u64)(begin + n) * hidden + first + o;
            if (first + o < hidden) to[0] = v;
            if (first + o + 1 < hidden) to[1] = next;
        });
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_bf16_r4(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpBf16, 4>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_bf16_r4(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpBf16, 4>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_bf16_r16(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpBf16, 16>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_bf16_r16(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpBf16, 16>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_fp8_r4(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpFp8, 4>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_fp8_r4(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpFp8, 4>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_fp8_r16(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpFp8, 16>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_fp8_r16(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpFp8, 16>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_int4_r4(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpInt4, 4>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_int4_r4(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpInt4, 4>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_int4_r16(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpInt4, 16>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_int4_r16(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpInt4, 16>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_mxfp4_r4(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpMxfp4, 4>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_mxfp4_r4(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpMxfp4, 4>(down, ds, plan, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_mxfp4_r16(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpPlan plan, const float* x, float limit, float* mid, int* damage, int site) {
    sp_gate_up<SpMxfp4, 16>(gate, up, gs, us, plan, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_mxfp4_r16(SpMatrix down, SpStrides ds, SpPlan plan, const float* mid, float* out) {
    sp_down<SpMxfp4, 16>(down, ds, plan, mid, out);
}
