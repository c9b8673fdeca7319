// The grouped expert product of a pass of more rows than a window has, on tensor cores. A tile is up to 32 rows that chose one expert
// (moe_sort): an expert's weights are read once for them, and again, from cache, for every 32 rows more. Two kernels: gate and up with
// SwiGLU, then down. A gated MLP outside the routing is the same with one expert, which all rows have.
//
// experts_gate_up_tiles: mid[slot] = min(silu(gate x), limit) * clamp(up x, -limit, limit), limit 0 = none, in three terms (sp_tiles.cuh).
//   Grid: (ceil(inter / 32), tiles). Block: 128. Dynamic shared: 4 * (64 * bytes of 32 columns' codes + 32 * 192) bytes.
// experts_down_tiles: out[slot] = down mid[slot], in FP32. Grid: (ceil(hidden / 64), tiles). Block and shared memory as above.
// Blocks beyond the last tile leave at once. The matrices are those of expert 0; expert e's codes and scales lie e * stride further.
// Bytes moved: U * (stored bytes of gate + up) + slots * (padded hidden + padded inter) * 6, and U * stored bytes of down + slots * (padded
// inter * 6 + hidden * 4), with the union U; rows are read again, from cache, by every block of outputs.
// Operations: 12 * inter * padded hidden * slots and 6 * hidden * padded inter * slots, an expert's rows up to a multiple of 16.
// Reference: engine::moe.
#include "sp_experts.cuh"
#include "sp_tiles.cuh"

// The tiles of a pass; written by moe_sort. Without a count there is one expert, and slot n is row n.
struct SpTiles {
    const int* count;
    // Of each tile: its expert, its first slot and the one after its last.
    const int* expert;
    const int* begin;
    const int* end;
    const int* slot_row;
};

// The tile of this block; false when there is none.
SP_DEVICE bool sp_own_tile(const SpTiles& tiles, int rows, int& expert, int& begin, int& end) {
    const int tile = blockIdx.y;
    if (!tiles.count) {
        expert = 0, begin = tile * SP_EXPERT_ROWS, end = min(begin + SP_EXPERT_ROWS, rows);
        return begin < rows;
    }
    if (tile >= tiles.count[0]) return false;
    expert = tiles.expert[tile], begin = tiles.begin[tile], end = tiles.end[tile];
    return true;
}

template <class F>
SP_DEVICE void sp_gate_up_tiles(
    const SpMatrix& gate, const SpMatrix& up, SpStrides gs, SpStrides us, const SpTiles& tiles, int rows, const u8* x, float limit, u8* mid,
    int* damage, int site) {
    SP_DYNAMIC_SHARED(u8, shared);
    int expert, begin, end;
    if (!sp_own_tile(tiles, rows, expert, begin, end)) return;
    // Sixteen outputs of gate, then the same of up, so that both are in the same lane; then the next sixteen.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 32, own = first + warp % 2 * 16 + lane / 4;
    const SpTileScales scales[2] = {
        sp_tile_scales(gate, gate.scales + expert * gs.scales, own), sp_tile_scales(up, up.scales + expert * us.scales, own)};
    const u8* gate_codes = gate.codes + expert * gs.codes;
    const u8* up_codes = up.codes + expert * us.codes;
    const int inter = gate.rows;
    const u64 size = F::size(gate.cols), pitch = sp_pitch(gate.cols);
    const int* slot_row = tiles.slot_row;
    float acc[2][SP_EXPERT_ROWS / 16][4];
    sp_tile_product<F, SP_EXPERT_ROWS>(
        shared, gate.cols, gate.col_shift,
        [=](int r, bool& there) {
            const int to = first + r / 32 * 16 + r % 16;
            there = to < inter;
            return (r % 32 < 16 ? gate_codes : up_codes) + (there ? to : 0) * size;
        },
        [=](int r) { return x + (slot_row ? slot_row[begin + r] : begin + r) * pitch; }, end - begin, scales, acc);
    const u64 mid_pitch = sp_pitch(inter);
#pragma unroll
    for (int n = 0; n < SP_EXPERT_ROWS / 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int slot = begin + warp / 2 * (SP_EXPERT_ROWS / 2) + n * 8 + lane % 4 * 2 + i % 2, to = own + i / 2 * 8;
            if (slot >= end) continue;
            float v = 0.0f;
            if (to < inter) {
                const float a = acc[0][n][i], b = acc[1][n][i];
                // A clamp or a sigmoid would hide an infinity.
                if (!sp_finite(a) || !sp_finite(b)) sp_damaged(damage, site);
                v = sp_swiglu(a, b, limit);
            }
            u32 terms[3];
            sp_terms(v, terms);
            u8* row = mid + slot * mid_pitch + to % 4 * 2;
            u16* both = (u16*)(row + sp_first(to / 4));
            both[0] = (u16)terms[0], both[4] = (u16)terms[1];
            *(u16*)(row + sp_third(to / 4)) = (u16)terms[2];
        }
}

template <class F>
SP_DEVICE void sp_down_tiles(const SpMatrix& down, SpStrides ds, const SpTiles& tiles, int rows, const u8* mid, float* out) {
    SP_DYNAMIC_SHARED(u8, shared);
    int expert, begin, end;
    if (!sp_own_tile(tiles, rows, expert, begin, end)) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * SP_TILE_OUT, own = first + warp % 2 * 32 + lane / 4;
    const u8* expert_scales = down.scales + expert * ds.scales;
    const SpTileScales scales[2] = {sp_tile_scales(down, expert_scales, own), sp_tile_scales(down, expert_scales, own + 16)};
    const u8* codes = down.codes + expert * ds.codes;
    const int hidden = down.rows;
    const u64 size = F::size(down.cols), pitch = sp_pitch(down.cols);
    const u8* from = mid + begin * pitch;
    float acc[2][SP_EXPERT_ROWS / 16][4];
    sp_tile_product<F, SP_EXPERT_ROWS>(
        shared, down.cols, down.col_shift,
        [=](int r, bool& there) {
            there = first + r < hidden;
            return codes + (there ? first + r : first) * size;
        },
        [=](int r) { return from + r * pitch; }, end - begin, scales, acc);
#pragma unroll
    for (int n = 0; n < SP_EXPERT_ROWS / 16; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int slot = begin + warp / 2 * (SP_EXPERT_ROWS / 2) + n * 8 + lane % 4 * 2 + j;
            if (slot >= end) continue;
            float* to = out + (u64)slot * hidden;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (own + m * 16 + h * 8 < hidden) to[own + m * 16 + h * 8] = acc[m][n][h * 2 + j];
        }
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_tiles_bf16(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpTiles tiles, int rows, const u8* x, float limit, u8* mid, int* damage, int site) {
    sp_gate_up_tiles<SpBf16>(gate, up, gs, us, tiles, rows, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_tiles_bf16(SpMatrix down, SpStrides ds, SpTiles tiles, int rows, const u8* mid, float* out) {
    sp_down_tiles<SpBf16>(down, ds, tiles, rows, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_tiles_fp8(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpTiles tiles, int rows, const u8* x, float limit, u8* mid, int* damage, int site) {
    sp_gate_up_tiles<SpFp8>(gate, up, gs, us, tiles, rows, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_tiles_fp8(SpMatrix down, SpStrides ds, SpTiles tiles, int rows, const u8* mid, float* out) {
    sp_down_tiles<SpFp8>(down, ds, tiles, rows, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_tiles_int4(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpTiles tiles, int rows, const u8* x, float limit, u8* mid, int* damage, int site) {
    sp_gate_up_tiles<SpInt4>(gate, up, gs, us, tiles, rows, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_tiles_int4(SpMatrix down, SpStrides ds, SpTiles tiles, int rows, const u8* mid, float* out) {
    sp_down_tiles<SpInt4>(down, ds, tiles, rows, mid, out);
}

extern "C" __global__ void __launch_bounds__(128)
experts_gate_up_tiles_mxfp4(
    SpMatrix gate, SpMatrix up, SpStrides gs, SpStrides us, SpTiles tiles, int rows, const u8* x, float limit, u8* mid, int* damage, int site) {
    sp_gate_up_tiles<SpMxfp4>(gate, up, gs, us, tiles, rows, x, limit, mid, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
experts_down_tiles_mxfp4(SpMatrix down, SpStrides ds, SpTiles tiles, int rows, const u8* mid, float* out) {
    sp_down_tiles<SpMxfp4>(down, ds, tiles, rows, mid, out);
}
