// What the stand-in for libcuda tells the stand-in for libcupti.
#pragma once
#include <cstdint>

// A piece of work as a profiler sees it; `kind` is CUPTI's kind of record, 0 for what it does not see.
struct emu_work {
    uint32_t kind = 0;
    uint32_t copy_kind = 0;
    uint64_t bytes = 0;
    uint32_t grid[3] = {}, block[3] = {};
    uint32_t shared = 0;
    const char* name = nullptr;
    // Of the API call that launched it, and inside a graph its node.
    uint32_t correlation = 0;
    uint64_t node = 0;
};

struct emu_hooks {
    // An API call begins, by CUPTI's number of its function; gives its correlation id.
    uint32_t (*api)(uint32_t function);
    // Work was done.
    void (*done)(const emu_work*);
    // A node was created (`original` null) or cloned for an executable graph.
    void (*node)(void* node, void* original);
    // The clock of the work, ns.
    uint64_t (*now)();
};
