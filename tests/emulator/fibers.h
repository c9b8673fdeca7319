// Runs one launch: every block, every thread, on this thread of the host.
#pragma once
#include "device.h"
#include <functional>

// What a launch loaded as weights, in bytes, and how it was scheduled.
struct emu_counters {
    uint64_t weight_bytes;
    uint64_t threads;
    uint64_t barriers;
    uint64_t exchanges;
};
extern emu_counters emu_counts;

// Order in which a block's warps, a warp's lanes and the grid's blocks take their turns: 0 forward, 1 backward, others: shuffled
// by this seed. A kernel whose result depends on it has a race.
extern uint64_t emu_order;

// Runs `body` in every thread of the grid. A deadlock, a wrong mask or a misaligned load ends the process with a line that names
// `kernel`, the block and the thread.
void emu_launch(const char* kernel, emu_dim3 grid, emu_dim3 block, size_t shared, const std::function<void()>& body);
