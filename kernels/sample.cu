// The distribution that a token is drawn from: softmax of logits / temperature, cut to the k most likely tokens and
// renormalised, cut to the smallest set of mass top-p and renormalised. Sums are doubles or exact integers, as the tail of a
// large vocabulary needs. Equally likely tokens are kept in order of their ids. Where the mass of top-p ends is decided in whole units of
// 2^-40 of the largest mass, as in the reference: no order of adding can decide otherwise.
//
// sample: grid rows, block 512, dynamic shared 256 * 16 + 160 bytes. `probs` is `[rows, vocab]` of doubles. `top_k` 0 = off, `top_p` >= 1 = off.
//   A logit that is not finite is noted in `damage`.
//   Nothing is sorted: the border of each cut is found digit by digit over (logit, id), with counts, or with masses in units.
//   Digits end as soon as the border is known.
//   Bytes moved: rows * vocab * (4 + 8) * (3 + digits), of which all but the first 4 come from cache; 3 to 5 digits a cut.
// draw: grid 1, block 256, dynamic shared 256 * 8 + 16 bytes: token = inverse CDF of probs at uniform[0], and its probability where
//   `prob` is not null. Bytes moved: vocab * 8 * 2.
// Reference: engine::sampling.
#include "sp_intrin.cuh"
#include "sp_cdf.cuh"

// A logit as an integer that sorts alike, larger first among the most significant bits; the id below it, lower ids larger.
SP_DEVICE u64 sp_rank_key(float logit, int id) {
    u32 b = sp_bits(logit);
    if (b == 0x80000000u) b = 0;
    b = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)b << 32 | (u32)~id;
}

// The mass of the keys at or above `least`, the same bits in every thread.
SP_DEVICE double sp_kept_mass(const float* logits, const double* probs, int vocab, u64 least, double* sums) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x)
        if (sp_rank_key(logits[i], i) >= least) sum += probs[i];
    return sp_block_sum_double(sum, sums);
}

// A mass in units of 2^-40.
SP_DEVICE u64 sp_units(double p) { return (u64)(p * 1099511627776.0); }

// The same in units; `total` is a word of shared memory.
SP_DEVICE u64 sp_kept_units(const float* logits, const double* probs, int vocab, u64 least, u64* total) {
    if (threadIdx.x == 0) total[0] = 0;
    __syncthreads();
    u64 sum = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x)
        if (sp_rank_key(logits[i], i) >= least) sum += sp_units(probs[i]);
    atomicAdd(total, sum);
    __syncthreads();
    sum = total[0];
    __syncthreads();
    return sum;
}

// The smallest key of the shortest descending run of keys at or above `least` whose weights sum to `wanted` or more. Weights are 1
// each, or masses. `bins` is 256 weights, `counts` 256 numbers of keys, `found` four words.
SP_DEVICE u64 sp_border(
    const float* logits, const double* probs, int vocab, u64 least, bool masses, u64 wanted, u64* bins, u32* counts, u64* found) {
    u64 prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0, counts[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            u64 key = sp_rank_key(logits[i], i);
            if (key < least || (shift < 56 && key >> (shift + 8) != prefix)) continue;
            int digit = key >> shift & 255;
            atomicAdd(&bins[digit], masses ? sp_units(probs[i]) : 1ull);
            atomicAdd(&counts[digit], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255, last = 0;
            u64 left = wanted;
            // Without enough weight the run takes everything: the border is in the last bin that has a key.
            for (int d = 0; d < 256; d++)
                if (counts[d]) { last = d; break; }
            while (digit > last && (counts[digit] == 0 || bins[digit] < left)) left -= bins[digit--];
            found[0] = digit;
            found[1] = left;
            found[2] = counts[digit];
        }
        __syncthreads();
        prefix = prefix << 8 | found[0];
        wanted = found[1];
        u64 inside = found[2];
        __syncthreads();
        // One key in the bin: its lower digits do not matter, since no other key at or above `least` shares the prefix.
        if (inside <= 1) return prefix << shift > least ? prefix << shift : least;
    }
    return prefix;
}

extern "C" __global__ void __launch_bounds__(512)
sample(const float* logits, int vocab, double temperature, int top_k, double top_p, double* probs, int* damage, int site) {
    SP_DYNAMIC_SHARED(u64, bins);
    u32* counts = (u32*)(bins + 256);
    u64* found = (u64*)(counts + 256);
    double* sums = (double*)bins;
    const float* row = logits + (u64)blockIdx.x * vocab;
    double* p = probs + (u64)blockIdx.x * vocab;
    float top = -sp_infinity();
    bool finite = true;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        finite = finite && sp_finite(row[i]);
        top = fmaxf(top, row[i]);
    }
    if (!finite) sp_damaged(damage, site);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(SP_FULL, top, step));
    float* tops = (float*)bins;
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (u32 w = 0; w < blockDim.x / 32; w++) top = fmaxf(top, tops[w]);
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) p[i] = exp(((double)row[i] - (double)top) / temperature);
    u64 least = 0;
    if (top_k > 0 && top_k < vocab) least = sp_border(row, p, vocab, 0, false, (u64)top_k, bins, counts, found);
    if (top_p < 1.0) {
        u64 wanted = (u64)(top_p * (double)sp_kept_units(row, p, vocab, least, found));
        least = sp_border(row, p, vocab, least, true, wanted > 0 ? wanted : 1, bins, counts, found);
    }
    double mass = sp_kept_mass(row, p, vocab, least, sums);
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) p[i] = sp_rank_key(row[i], i) >= least ? p[i] / mass : 0.0;
}

extern "C" __global__ void __launch_bounds__(256)
draw(const double* probs, int vocab, const double* uniform, u32* token, float* prob) {
    SP_DYNAMIC_SHARED(double, sums);
    int id = sp_inverse_cdf([=](int i) { return probs[i]; }, vocab, uniform[0], sums);
    if (threadIdx.x != 0) return;
    token[0] = id;
    if (prob) prob[0] = (float)probs[id];
}
