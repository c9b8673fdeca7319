// The CUDA language as a host compiler reads it: put before the kernels' sources when they are built for the emulator.
//
// Only what the kernels use is here; anything else is a compile error, which is meant. Each CUDA thread is a fiber (fibers.cpp);
// threads of a block take turns, so plain memory operations of one thread are never interleaved with another's, and atomics
// are plain too. What this cannot show: races that no order of whole threads shows, memory order, real rounding of expf.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((noinline))
#define __grid_constant__

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct emu_dim3 { unsigned x, y, z; };
struct emu_thread {
    emu_dim3 thread_idx;
    unsigned lane, warp;
    int state;
    void* stack_pointer;
    void* stack;
};
extern emu_thread* emu_now;
extern emu_dim3 emu_block_idx, emu_block_dim, emu_grid_dim;
#define threadIdx (emu_now->thread_idx)
#define blockIdx emu_block_idx
#define blockDim emu_block_dim
#define gridDim emu_grid_dim

// A rendezvous of the block, and of the lanes in `mask` of a warp with one 8-byte value each.
void emu_barrier();
void emu_exchange(unsigned mask, const void* value, size_t size, uint64_t (&lanes)[32]);
// The sums over a warp's lanes of `count` values, left as sp_warp_sums says.
void emu_warp_sums(float* values, int count);
// A product of a warp's matrices as sp_mma says: `d` has `count` times four sums, `b` as many times six words.
void emu_mma(float* d, const unsigned* a, const unsigned* b, int count);
// Copies into shared memory that arrive when they are waited for; until then their places hold NaN.
void emu_copy(void* to, const void* from, unsigned size, int valid, bool weight);
void emu_copies_end();
void emu_copies_wait(int left);
// Notes a load of a weight and checks its alignment.
const void* emu_weight(const void* at, size_t size);
void* emu_dynamic_shared();
void emu_cos_sin_pi(float t, float* c, float* s);

#define __syncthreads() emu_barrier()
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    uint64_t lanes[32];
    int nothing = 0;
    emu_exchange(mask, &nothing, sizeof nothing, lanes);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int step) {
    static_assert(sizeof(T) <= 8, "a lane gives at most eight bytes");
    uint64_t lanes[32];
    emu_exchange(mask, &v, sizeof v, lanes);
    T other;
    std::memcpy(&other, &lanes[emu_now->lane ^ step], sizeof other);
    return other;
}

template <class T>
static inline T atomicAdd(T* at, T v) { T old = *at; *at = old + v; return old; }
static inline int atomicCAS(int* at, int expected, int v) { int old = *at; if (old == expected) *at = v; return old; }

static inline float __uint_as_float(unsigned b) { float v; std::memcpy(&v, &b, 4); return v; }
static inline unsigned __float_as_uint(float v) { unsigned b; std::memcpy(&b, &v, 4); return b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
