// Sums and inverse of a distribution over the vocabulary, in doubles, by one block.
#pragma once
#include "sp_intrin.cuh"

// The sum over a block's threads, the same bits in every thread; `sums` has a double for each warp.
SP_DEVICE double sp_block_sum_double(double v, double* sums) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(SP_FULL, v, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    double sum = 0.0;
    for (u32 w = 0; w < blockDim.x / 32; w++) sum += sums[w];
    __syncthreads();
    return sum;
}

// The index whose interval of the running sum of `mass(i)` holds u times the total. A range is cut into a part a thread, then
// the part that holds it is cut again. Without any mass it is the last index; rounding at the end gives the last one with mass.
// `sums` has a double for each thread and two more. The result is the same in every thread.
template <class M>
SP_DEVICE int sp_inverse_cdf(M mass, int size, double u, double* sums) {
    double* state = sums + blockDim.x;
    int low = 0, high = size;
    double below = 0.0, target = 0.0;
    bool first = true;
    while (true) {
        int each = (high - low + (int)blockDim.x - 1) / (int)blockDim.x;
        int begin = min(low + (int)threadIdx.x * each, high), end = min(begin + each, high);
        double sum = 0.0;
        for (int i = begin; i < end; i++) sum += mass(i);
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            if (first) {
                double total = 0.0;
                for (u32 t = 0; t < blockDim.x; t++) total += sums[t];
                target = u * total;
            }
            int part = -1;
            double start = below;
            for (u32 t = 0; t < blockDim.x; t++) {
                if (!(sums[t] > 0.0)) continue;
                part = t;
                start = below;
                below += sums[t];
                if (target < below) break;
            }
            below = start;
            state[0] = part;
        }
        __syncthreads();
        int part = (int)state[0];
        __syncthreads();
        if (part < 0) return high - 1;
        low += part * each;
        high = min(low + each, high);
        first = false;
        if (each == 1) return low;
    }
}
