// Embedding rows of tokens: out[n] = table[tokens[n]]. Tokens are read from device memory, where drafting leaves them.
//
// Grid: rows. Block: 128. A token outside the vocabulary, or a row that is not finite, is noted in `damage`; the row is 0 then.
// Bytes moved: rows * width * (bytes of an element + 4). Reference: engine::session::embed.
#include "sp_matrix.cuh"

template <class F>
SP_DEVICE void sp_embed(SpMatrix table, const u32* tokens, float* out, int* damage, int site) {
    int width = table.cols, size = F::size(width);
    u32 token = tokens[blockIdx.x];
    bool known = token < (u32)table.rows, wide = sp_wide_rows<F>(table.codes, width);
    if (!known && threadIdx.x == 0) sp_damaged(damage, site);
    const u8* row = table.codes + (u64)(known ? token : 0) * size;
    float* to = out + (u64)blockIdx.x * width;
    for (int c = threadIdx.x; c * F::CHUNK < width; c += blockDim.x) {
        u32 words[F::WORDS] = {};
        if (known) F::load(row, c * F::WORDS * 4, size, wide, words);
        bool finite = true;
#pragma unroll
        for (int g = 0; g < F::CHUNK / 4; g++) {
            float4 v = F::next4(words);
            int i = c * F::CHUNK + g * 4;
            finite = finite && sp_finite(v.x) && sp_finite(v.y) && sp_finite(v.z) && sp_finite(v.w);
            if (i < width) *(float4*)(to + i) = v;
        }
        if (!finite) sp_damaged(damage, site);
    }
}

extern "C" __global__ void __launch_bounds__(128)
embed_f32(SpMatrix table, const u32* tokens, float* out, int* damage, int site) {
    sp_embed<SpF32>(table, tokens, out, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
embed_bf16(SpMatrix table, const u32* tokens, float* out, int* damage, int site) {
    sp_embed<SpBf16>(table, tokens, out, damage, site);
}
