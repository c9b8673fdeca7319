// What the grouped expert product works through in a pass of more rows than a window has: its choices sorted by expert, cut into tiles.
//
// Grid: 1. Block: 512. Dynamic shared: (parts * experts + 32) * 4 bytes. A slot is one (row, rank); slots are ordered by expert,
// then row. A tile is up to SP_EXPERT_ROWS slots of one expert. Writes: `count[0]`, the number of tiles; of tile t its expert and its slots,
// `begin[t]` .. `end[t]`; `slot_row[slot]`; `slot_of[row * k + rank]`. There are at most min(slots, experts) + slots / SP_EXPERT_ROWS tiles.
// The rows are cut into `parts`, at most 16, one a warp: each counts its own choices, then puts them behind those of the parts before it.
// Bytes moved: rows * k * (2 * 2 + 2 * 4) + tiles * 12. Reference: the counting sort in engine::moe.
#include "sp_tiles.cuh"

// The sums of the values of the threads before this one; `sums` has an int for each warp. The block is one of 512.
SP_DEVICE int sp_sum_before(int v, int* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A warp's inclusive sums, by exchanges in which lanes whose partner is behind them take nothing.
    int sum = v, all = v;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        // `all` is the sum over the 2 * step lanes that differ in the low bits; the upper half has the lower half before it.
        const int other = __shfl_xor_sync(SP_FULL, all, step);
        if (lane & step) sum += other;
        all += other;
    }
    __syncthreads();
    if (lane == 0) sums[warp] = all;
    __syncthreads();
    int before = 0;
    for (int w = 0; w < warp; w++) before += sums[w];
    return before + sum - v;
}

extern "C" __global__ void __launch_bounds__(512)
moe_sort(const u16* ids, int rows, int k, int experts, int parts, int* count, int* expert, int* begin, int* end, int* slot_row, int* slot_of) {
    SP_DYNAMIC_SHARED(int, placed);
    int* sums = placed + parts * experts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (rows + parts - 1) / parts;
    const int from = min(warp * each, rows), to = min(from + each, rows);
    for (int i = threadIdx.x; i < parts * experts; i += blockDim.x) placed[i] = 0;
    __syncthreads();
    if (warp < parts)
        for (int i = from * k + lane; i < to * k; i += 32) atomicAdd(&placed[warp * experts + ids[i]], 1);
    __syncthreads();
    // A thread has neighbouring experts: how many slots and tiles they have, then what is before them.
    const int share = (experts + 511) / 512, low = min((int)threadIdx.x * share, experts), high = min(low + share, experts);
    int slots = 0, tiles = 0;
    for (int e = low; e < high; e++) {
        int own = 0;
        for (int p = 0; p < parts; p++) own += placed[p * experts + e];
        slots += own;
        tiles += (own + SP_EXPERT_ROWS - 1) / SP_EXPERT_ROWS;
    }
    int slot = sp_sum_before(slots, sums), tile = sp_sum_before(tiles, sums + 16);
    if (threadIdx.x == blockDim.x - 1) count[0] = tile + tiles;
    for (int e = low; e < high; e++) {
        int at = slot;
        for (int p = 0; p < parts; p++) {
            const int own = placed[p * experts + e];
            placed[p * experts + e] = slot;
            slot += own;
        }
        for (; at < slot; at += SP_EXPERT_ROWS, tile++) {
            expert[tile] = e;
            begin[tile] = at;
            end[tile] = min(at + SP_EXPERT_ROWS, slot);
        }
    }
    __syncthreads();
    if (warp >= parts) return;
    // Row by row, so that an expert's slots are in the order of rows; a row's choices are of different experts.
    for (int row = from; row < to; row++) {
        for (int rank = lane; rank < k; rank += 32) {
            const int at = atomicAdd(&placed[warp * experts + ids[row * k + rank]], 1);
            slot_row[at] = row;
            slot_of[row * k + rank] = at;
        }
        __syncwarp();
    }
}
