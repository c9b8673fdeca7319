// What the grouped expert product works through: the distinct experts of a window and, for each, the rows that chose it.
//
// Grid: 1. Block: 512, of which rows * k threads work. Dynamic shared: rows * k * 8 bytes. A slot is one (row, rank); slots are
// ordered by expert, then row. Writes: `count[0]` = U, the union; `expert[u]`, ascending; `start[u]`, the first slot of distinct
// expert u, and start[U] = rows * k; `slot_row[slot]`; `slot_of[row * k + rank]`.
// Bytes moved: rows * k * (2 + 4 * 4). Reference: the counting sort in engine::moe.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(512)
moe_plan(const u16* ids, int rows, int k, int* count, int* expert, int* start, int* slot_row, int* slot_of) {
    SP_DYNAMIC_SHARED(int, chosen);
    const int slots = rows * k, i = threadIdx.x;
    int* first = chosen + slots;
    if (i < slots) chosen[i] = ids[i];
    __syncthreads();
    int slot = 0, earlier = 0;
    if (i < slots) {
        for (int j = 0; j < slots; j++) {
            slot += chosen[j] < chosen[i] || (chosen[j] == chosen[i] && j < i);
            earlier += chosen[j] == chosen[i] && j < i;
        }
        first[i] = earlier == 0;
        slot_of[i] = slot;
        slot_row[slot] = i / k;
    }
    __syncthreads();
    if (i < slots && earlier == 0) {
        int distinct = 0;
        for (int j = 0; j < slots; j++) distinct += first[j] && chosen[j] < chosen[i];
        expert[distinct] = chosen[i];
        start[distinct] = slot;
    }
    if (i == 0) {
        int union_size = 0;
        for (int j = 0; j < slots; j++) union_size += first[j];
        count[0] = union_size;
        start[union_size] = slots;
    }
}
