// A made-up tensor: bytes that are a function of a key and of their place, so that a model of full size needs no copy and no host
// memory. The same bytes as engine::made gives on the host.
//
// Word n of 64 bits is made of mix(key + n), splitmix64's finaliser, by one of four rules: 0, the bits of a mask; 1, sixteen nibbles of
// which a 0 becomes an 8; 2, four BF16 numbers, signed 16-bit integers times the F32 `parameter`, cut to the upper half; 3, the word
// `parameter` itself. The last word may be cut.
// Grid: ceil(bytes / 32768). Block: 256, 16 words a thread.
// Bytes moved: bytes, written once. Reference: engine::made.
#include "sp_intrin.cuh"

SP_DEVICE u64 sp_mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

SP_DEVICE u64 sp_made_word(u64 bits, int rule, u64 parameter) {
    if (rule == 0) return bits & parameter;
    if (rule == 3) return parameter;
    if (rule == 1) {
        const u64 ones = 0x1111111111111111ull;
        u64 any = (bits | bits >> 1 | bits >> 2 | bits >> 3) & ones;
        return bits | (any ^ ones) << 3;
    }
    const float scale = sp_float((u32)parameter);
    u64 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float number = (float)(short)(u16)(bits >> (16 * i)) * scale;
        word |= (u64)(sp_bits(number) >> 16) << (16 * i);
    }
    return word;
}

extern "C" __global__ void __launch_bounds__(256)
fill(u8* out, u64 bytes, u64 key, int rule, u64 parameter) {
    const bool wide = (u64)out % 8 == 0;
    u64 n = (u64)blockIdx.x * blockDim.x * 16 + threadIdx.x;
    for (int i = 0; i < 16; i++, n += blockDim.x) {
        const u64 at = n * 8;
        if (at >= bytes) return;
        u64 word = sp_made_word(sp_mix(key + n), rule, parameter);
        if (wide && bytes - at >= 8) {
            *(u64*)(out + at) = word;
        } else {
            for (u64 b = 0; b < 8 && at + b < bytes; b++) out[at + b] = (u8)(word >> (8 * b));
        }
    }
}
