// Reads memory as fast as it comes, and does nothing else: the rate that other kernels are held against.
//
// Grid: any. Block: 256. A thread has eight loads of 16 bytes in flight. `seen[0]` becomes 1 when any byte is not 0, so that no load
// can be left out.
// Bytes moved: chunks * 16. Reference: none is needed.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
stream_read(const u8* from, u64 chunks, int* seen) {
    const int LOADS = 8;
    const u64 step = (u64)gridDim.x * blockDim.x;
    u32 any = 0;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < chunks; at += step * LOADS) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            v[i].x = v[i].y = v[i].z = v[i].w = 0;
            if (at + i * step < chunks) v[i] = sp_weight16(from + (at + i * step) * 16);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) any |= v[i].x | v[i].y | v[i].z | v[i].w;
    }
    if (any) seen[0] = 1;
}
