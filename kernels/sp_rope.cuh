// Rotary positions on interleaved pairs. `turns[j]` is theta^(-2j/d) / pi in double precision: position * turns[j] is the
// angle in half turns, whose whole turns are taken off before it becomes a float, so that far positions lose nothing.
#pragma once
#include "sp_intrin.cuh"

SP_DEVICE void sp_rotate(float& a, float& b, double turns, int position) {
    double t = turns * (double)position;
    t -= 2.0 * rint(t * 0.5);
    float c, s;
    sp_cos_sin_pi((float)t, &c, &s);
    float x = a, y = b;
    a = fmaf(x, c, -(y * s));
    b = fmaf(y, c, x * s);
}
