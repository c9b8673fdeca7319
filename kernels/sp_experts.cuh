// What all kernels of gated MLPs have in common.
#pragma once
#include "sp_intrin.cuh"

// Offsets in bytes from one expert's tensor to the next one's.
struct SpStrides {
    u64 codes;
    u64 scales;
};

SP_DEVICE float sp_swiglu(float gate, float up, float limit) {
    float a = sp_silu(gate);
    if (limit > 0.0f) {
        // Comparisons that leave a NaN as it is.
        if (a > limit) a = limit;
        if (up > limit) up = limit;
        else if (up < -limit) up = -limit;
    }
    return a * up;
}
