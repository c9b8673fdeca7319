// The router's choice for each row: scores, groups, bias, the k experts in rank order and their weights. All in FP32.
//
// Grid: rows. Block: 32. Dynamic shared: (2 * experts + groups) * 4 bytes. `k` is at most 32. `logits` are `[rows, experts]`,
// made by a dense projection. Ids go straight to the route ring, `[rows, k]` of u16, which is what a recorder copies out: the tap adds no node.
// Scores are sigmoids; the bias counts for the choice alone; a group counts by its two best; the lower index wins a tie; a NaN
// counts as -infinity. Weights: score / (sum of the chosen + 1e-20) * scaling. Reference: engine::router.
// With `planned`, `[rows, k]` of u16, these experts take the place of the chosen ones, in descending order of their scores.
// Bytes moved: rows * experts * 4 + experts * 4 + rows * k * 6, and rows * k * 2 with a plan.
#include "sp_intrin.cuh"

// The best score of a warp and the lowest index that has it, -1 when no lane has one.
SP_DEVICE void sp_warp_best(float& score, int& index) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        float other = __shfl_xor_sync(SP_FULL, score, step);
        int at = __shfl_xor_sync(SP_FULL, index, step);
        if (at >= 0 && (index < 0 || other > score || (other == score && at < index))) score = other, index = at;
    }
}

SP_DEVICE float sp_sortable(float score) { return score == score ? score : -sp_infinity(); }

extern "C" __global__ void __launch_bounds__(32)
route(
    const float* logits, const float* bias, int experts, int k, int groups, int groups_kept, float scaling, int normalise,
    const u16* planned, u16* ids, float* weights, int* damage, int site) {
    SP_DYNAMIC_SHARED(float, scores);
    float* biased = scores + experts;
    float* sums = biased + experts;
    const int lane = threadIdx.x, size = experts / groups;
    for (int e = lane; e < experts; e += 32) {
        float logit = logits[(u64)blockIdx.x * experts + e];
        if (!sp_finite(logit)) sp_damaged(damage, site);
        float s = sp_sigmoid(logit), b = s + bias[e];
        scores[e] = s;
        biased[e] = b == b ? b : -sp_infinity();
    }
    __syncwarp();
    // The sum of each group's two best, then the groups that fewer than `groups_kept` others beat.
    for (int g = lane; g < groups; g += 32) {
        float first = -sp_infinity(), second = -sp_infinity();
        for (int i = 0; i < size; i++) {
            float b = biased[g * size + i];
            if (b > first) second = first, first = b;
            else if (b > second) second = b;
        }
        sums[g] = size == 1 ? first : first + second;
    }
    __syncwarp();
    if (groups_kept < groups) {
        for (int g = lane; g < groups; g += 32) {
            int better = 0;
            for (int o = 0; o < groups; o++) better += sums[o] > sums[g] || (sums[o] == sums[g] && o < g);
            // Dropped experts are NaN from here on: they are no candidates, while -infinity is one.
            if (better >= groups_kept)
                for (int i = 0; i < size; i++) biased[g * size + i] = sp_nan();
        }
        __syncwarp();
    }
    int mine = -1;
    float sum = 0.0f;
    for (int rank = 0; rank < k; rank++) {
        float best = 0.0f;
        int index = -1;
        for (int e = lane; e < groups * size; e += 32) {
            float b = biased[e];
            if (b == b && (index < 0 || b > best)) best = b, index = e;
        }
        sp_warp_best(best, index);
        // A config with fewer candidates than k is refused at load; a hole would be seen as expert 0.
        if (index < 0) index = 0;
        if (lane == index % 32) biased[index] = sp_nan();
        if (lane == rank % 32 && rank < 32) mine = index;
        sum += scores[index];
        __syncwarp();
    }
    if (planned) {
        const u16* own = planned + (u64)blockIdx.x * k;
        // The candidates are no longer needed.
        int* order = (int*)biased;
        if (lane < k) {
            int place = 0;
            float score = sp_sortable(scores[own[lane]]);
            for (int i = 0; i < k; i++) {
                float other = sp_sortable(scores[own[i]]);
                place += other > score || (other == score && own[i] < own[lane]);
            }
            order[place] = own[lane];
        }
        __syncwarp();
        sum = 0.0f;
        for (int rank = 0; rank < k; rank++) sum += scores[order[rank]];
        if (lane < k) mine = order[lane];
    }
    if (!normalise) sum = 1.0f;
    else sum += 1e-20f;
    if (lane < k) {
        ids[(u64)blockIdx.x * k + lane] = (u16)mine;
        weights[(u64)blockIdx.x * k + lane] = scores[mine] / sum * scaling;
    }
}
