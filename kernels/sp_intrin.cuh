// Everything that is not plain C++: loads with cache hints, conversions, warp operations, shared memory.
//
// This is the only file with inline PTX. Each such function has a twin in plain C++ that a host compiler takes, so that the
// same sources run under the emulator of `tests/emulator`; the twin also counts what a kernel loads and checks alignment.
// No CUDA header is included anywhere: the compiler's built-in types and functions are enough.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SP_FULL 0xffffffffu
#define SP_DEVICE static __device__ __forceinline__

// Most rows of one pass. A window has at most 16: an anchor and 15 drafts.
#define SP_ROWS 16

SP_DEVICE float sp_float(u32 bits) { return __uint_as_float(bits); }
SP_DEVICE u32 sp_bits(float x) { return __float_as_uint(x); }
SP_DEVICE float sp_nan() { return sp_float(0x7fc00000u); }
SP_DEVICE float sp_infinity() { return sp_float(0x7f800000u); }

// Whether a number is neither infinite nor NaN.
SP_DEVICE bool sp_finite(float x) { return (sp_bits(x) & 0x7f800000u) != 0x7f800000u; }

SP_DEVICE float sp_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
SP_DEVICE float sp_silu(float x) { return x / (1.0f + expf(-x)); }

// The upper half of a finite number rounded to nearest even: BF16. One beyond the largest becomes infinite.
SP_DEVICE u32 sp_bf16(float x) {
    const u32 bits = sp_bits(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A number as the sum of three in BF16, each of which has the eight bits after those of the one before: all 24 of FP32, but for what is
// smaller than BF16's smallest. What is not finite, or not in BF16, is so in the first term.
SP_DEVICE void sp_terms(float x, u32 (&terms)[3]) {
    terms[0] = sp_finite(x) ? sp_bf16(x) : sp_bits(x) >> 16 | (sp_bits(x) & 0xffff ? 0x40 : 0);
    terms[1] = terms[2] = 0;
    if (!sp_finite(sp_float(terms[0] << 16))) return;
    const float rest = x - sp_float(terms[0] << 16);
    terms[1] = sp_bf16(rest);
    terms[2] = sp_bf16(rest - sp_float(terms[1] << 16));
}

#ifdef __CUDA_ARCH__

// 16, 8 and 4 bytes of a weight. Weights are read once a pass: they pass by the first-level cache, which is left to the rows.
SP_DEVICE uint4 sp_weight16(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
SP_DEVICE uint2 sp_weight8(const void* at) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
SP_DEVICE u32 sp_weight4(const void* at) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
SP_DEVICE u32 sp_weight2(const void* at) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}
SP_DEVICE u32 sp_weight1(const void* at) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// Two E4M3 codes, the low byte first. NaN codes give NaN.
SP_DEVICE float2 sp_e4m3x2(u32 codes) {
    float2 v;
#if __CUDA_ARCH__ >= 890
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
    asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}" : "=f"(v.x), "=f"(v.y) : "r"(halves));
#else
    u32 a = codes & 0xff, b = codes >> 8 & 0xff;
    v.x = sp_float((a & 0x80) << 24 | (a & 0x7f) << 20) * sp_float(247u << 23);
    v.y = sp_float((b & 0x80) << 24 | (b & 0x7f) << 20) * sp_float(247u << 23);
    if ((a & 0x7f) == 0x7f) v.x = sp_nan();
    if ((b & 0x7f) == 0x7f) v.y = sp_nan();
#endif
    return v;
}

// cos and sin of pi times t, |t| <= 1.
SP_DEVICE void sp_cos_sin_pi(float t, float* c, float* s) { sincospif(t, s, c); }

// Copies 16 bytes (4 bytes) to shared memory by and by, `valid` of them, which are all or fewer; zeros take the place of the others. A
// thread's copies since the last sp_copies_end are a group; sp_copies_wait lets all but the last N groups of this thread arrive, and a
// barrier after it shows them to the block.
SP_DEVICE u32 sp_shared(const void* at) {
    u32 v;
    asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(v) : "l"(at));
    return v;
}
SP_DEVICE void sp_copy16(void* to, const void* from, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(sp_shared(to)), "l"(from), "r"(valid) : "memory");
}
// The same of weights, of which a whole line is soon wanted.
SP_DEVICE void sp_copy_weight16(void* to, const void* from, int valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(sp_shared(to)), "l"(from), "r"(valid) : "memory");
}
SP_DEVICE void sp_copy_weight4(void* to, const void* from, int valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(sp_shared(to)), "l"(from), "r"(valid) : "memory");
}
SP_DEVICE void sp_copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
SP_DEVICE void sp_copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// d[n] += A B[n] by a warp, A of 16 x 16 and each B of 16 x 8 numbers in BF16, the sums in FP32. Lane 4 g + t has of A the pairs
// (g, 2 t), (g + 8, 2 t), (g, 2 t + 8), (g + 8, 2 t + 8), of a B those of column g from 2 t and from 2 t + 8 on, and of the sums
// (g, 2 t), (g, 2 t + 1) and the same of g + 8. b[n] has three such B, the terms of its numbers: all are added, the smallest first.
template <int N>
SP_DEVICE void sp_mma(float (&d)[N][4], const u32 (&a)[4], const u32 (&b)[N][6]) {
#pragma unroll
    for (int term = 2; term >= 0; term--)
#pragma unroll
        for (int n = 0; n < N; n++)
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[n][term * 2]), "r"(b[n][term * 2 + 1]));
}

#define SP_DYNAMIC_SHARED(type, name) \
    extern __shared__ __align__(16) u8 sp_dynamic_bytes[]; \
    type* name = (type*)sp_dynamic_bytes

#else

SP_DEVICE uint4 sp_weight16(const void* at) { return *(const uint4*)emu_weight(at, 16); }
SP_DEVICE uint2 sp_weight8(const void* at) { return *(const uint2*)emu_weight(at, 8); }
SP_DEVICE u32 sp_weight4(const void* at) { return *(const u32*)emu_weight(at, 4); }
SP_DEVICE u32 sp_weight2(const void* at) { return *(const u16*)emu_weight(at, 2); }
SP_DEVICE u32 sp_weight1(const void* at) { return *(const u8*)emu_weight(at, 1); }

SP_DEVICE float sp_e4m3(u32 code) {
    // Four exponent and three mantissa bits in a float's places give the value times 2^-120, subnormals included.
    float v = sp_float((code & 0x80) << 24 | (code & 0x7f) << 20) * sp_float(247u << 23);
    return (code & 0x7f) == 0x7f ? sp_nan() : v;
}
SP_DEVICE float2 sp_e4m3x2(u32 codes) { return make_float2(sp_e4m3(codes & 0xff), sp_e4m3(codes >> 8 & 0xff)); }

SP_DEVICE void sp_cos_sin_pi(float t, float* c, float* s) { emu_cos_sin_pi(t, c, s); }

// The twins copy when they are waited for, not before.
SP_DEVICE void sp_copy16(void* to, const void* from, int valid) { emu_copy(to, from, 16, valid, false); }
SP_DEVICE void sp_copy_weight16(void* to, const void* from, int valid) { emu_copy(to, from, 16, valid, true); }
SP_DEVICE void sp_copy_weight4(void* to, const void* from, int valid) { emu_copy(to, from, 4, valid, true); }
SP_DEVICE void sp_copies_end() { emu_copies_end(); }
template <int N>
SP_DEVICE void sp_copies_wait() { emu_copies_wait(N); }

template <int N>
SP_DEVICE void sp_mma(float (&d)[N][4], const u32 (&a)[4], const u32 (&b)[N][6]) { emu_mma(d[0], a, b[0], N); }

#define SP_DYNAMIC_SHARED(type, name) type* name = (type*)emu_dynamic_shared()

#endif

// The emulator adds a warp's values at one meeting instead of five, unless it is built with EMU_SHUFFLES to run what a device runs.
#if defined(__CUDA_ARCH__) || defined(EMU_SHUFFLES)

// The sum of all lanes' values, the same bits in every lane.
SP_DEVICE float sp_warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(SP_FULL, v, step);
    return v;
}

// The sums over lanes of N values, a power of two up to 64: lane l is left with max(N / 32, 1) of them in v[0], v[1], of the values
// from l * N / 32 on. A sum has the bits that sp_warp_sum gives: the tree is the same, but each step halves what a lane carries.
template <int N>
SP_DEVICE void sp_warp_sums(float (&v)[N]) {
    int left = N;
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        if (left > 1) {
            left >>= 1;
            bool upper = threadIdx.x & step;
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (i < left) {
                    float send = upper ? v[i] : v[i + left], keep = upper ? v[i + left] : v[i];
                    v[i] = keep + __shfl_xor_sync(SP_FULL, send, step);
                }
        } else {
            v[0] += __shfl_xor_sync(SP_FULL, v[0], step);
        }
    }
}

#else

SP_DEVICE float sp_warp_sum(float v) {
    emu_warp_sums(&v, 1);
    return v;
}
template <int N>
SP_DEVICE void sp_warp_sums(float (&v)[N]) { emu_warp_sums(v, N); }

#endif

// The sum over a block's threads, the same bits in every thread; `scratch` has a float for each warp. The block's size is a
// multiple of 32. Begins and ends with the block together.
SP_DEVICE float sp_block_sum(float v, float* scratch) {
    v = sp_warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.0f;
    for (u32 w = 0; w < blockDim.x / 32; w++) sum += scratch[w];
    return sum;
}

// Notes that a number is not finite; the first site to say so is kept, 0 = none yet.
SP_DEVICE void sp_damaged(int* damage, int site) { atomicCAS(damage, 0, site); }
