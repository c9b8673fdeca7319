// CUDA threads as fibers: each has a stack of its own and gives up its turn only where CUDA threads meet.
//
// A thread starts on a spare stack; one that ends without meeting others leaves its stack to the next, so that a kernel without
// barriers runs as a plain loop. Warps take turns: a warp runs until all its lanes wait for the block or have ended.
#include "fibers.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <vector>

emu_thread* emu_now;
emu_dim3 emu_block_idx, emu_block_dim, emu_grid_dim;
emu_counters emu_counts;
uint64_t emu_order;

namespace {

enum State { FRESH, READY, IN_WARP, IN_BLOCK, DONE };
constexpr size_t STACK = 64 * 1024;
constexpr size_t SHARED = 228 * 1024;

enum Meeting { EXCHANGE, SUMS, PRODUCT };
struct Warp {
    unsigned alive = 0, arrived = 0, mask = 0;
    Meeting meeting = EXCHANGE;
    unsigned generation = 0;
    uint64_t slots[2][32];
    float sums[2][64];
};

// Copies of a thread that it has not waited for: what, and as part of which group.
struct Copy {
    unsigned char* to;
    const void* from;
    unsigned size, valid, group;
};
struct Copies {
    std::vector<Copy> waiting;
    unsigned group = 0;
};

// What a lane brings to a product, `count` of them.
struct Factors {
    float* d;
    const unsigned *a, *b;
    int count;
};

const char* kernel_name;
std::vector<Copies> copies;
std::vector<emu_thread> threads;
std::vector<Warp> warps;
std::vector<void*> spare;
void* scheduler_stack;
const std::function<void()>* body;
unsigned alive, at_barrier;
// A block's dynamic shared memory ends where a page begins that is not to be touched.
unsigned char* shared_end;
size_t shared_size;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s: block (%u,%u,%u) thread %u: %s\n", kernel_name, emu_block_idx.x, emu_block_idx.y,
                 emu_block_idx.z, emu_now ? emu_now->thread_idx.x : 0, what);
    std::_Exit(70);
}

// Saves the callee's registers on this stack and goes on where the other stack left off.
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void yield_to_scheduler() { emu_switch(&emu_now->stack_pointer, scheduler_stack); }

void release_block() {
    at_barrier = 0;
    for (auto& t : threads)
        if (t.state == IN_BLOCK) t.state = READY;
}

void release_warp(Warp& w, unsigned index) {
    w.arrived = 0;
    w.generation++;
    for (unsigned l = 0; l < 32 && index * 32 + l < threads.size(); l++) {
        auto& t = threads[index * 32 + l];
        if (t.state == IN_WARP) t.state = READY;
    }
}

void finish() {
    auto* t = emu_now;
    t->state = DONE;
    alive--;
    Warp& w = warps[t->warp];
    w.alive &= ~(1u << t->lane);
    // Those who wait for it wait no longer.
    if (w.arrived && (w.arrived & w.alive) == (w.mask & w.alive)) release_warp(w, t->warp);
    if (alive && at_barrier == alive) release_block();
}

extern "C" void emu_entry() {
    (*body)();
    finish();
    void* dead;
    emu_switch(&dead, scheduler_stack);
    __builtin_unreachable();
}

void* new_stack() {
    void* p = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no memory for a stack");
    // The lowest page is not to be touched: an overflow stops there.
    mprotect(p, 4096, PROT_NONE);
    return p;
}

void resume(emu_thread& t) {
    emu_now = &t;
    if (t.state == FRESH) {
        if (spare.empty()) spare.push_back(new_stack());
        t.stack = spare.back();
        spare.pop_back();
        // Entry finds the stack as after a call: 8 bytes off a border of 16.
        auto* top = reinterpret_cast<void**>(static_cast<char*>(t.stack) + STACK - 64);
        *top = reinterpret_cast<void*>(&emu_entry);
        t.stack_pointer = top - 6;
    }
    t.state = READY;
    emu_switch(&scheduler_stack, t.stack_pointer);
    if (t.state == DONE && t.stack) {
        spare.push_back(t.stack);
        t.stack = nullptr;
    }
}

uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

std::vector<unsigned> order_of(size_t n, uint64_t salt) {
    std::vector<unsigned> order(n);
    for (size_t i = 0; i < n; i++) order[i] = i;
    if (emu_order == 1) std::reverse(order.begin(), order.end());
    if (emu_order > 1)
        for (size_t i = n; i > 1; i--) std::swap(order[i - 1], order[mix(emu_order * 31 + salt * 131 + i) % i]);
    return order;
}

void run_block(const std::vector<unsigned>& warp_order, const std::vector<unsigned>& lane_order) {
    unsigned size = emu_block_dim.x * emu_block_dim.y * emu_block_dim.z;
    threads.assign(size, emu_thread{});
    warps.assign((size + 31) / 32, Warp{});
    copies.resize(std::max<size_t>(copies.size(), size));
    for (auto& c : copies) c.waiting.clear(), c.group = 0;
    for (unsigned i = 0; i < size; i++) {
        auto& t = threads[i];
        t.thread_idx = {i % emu_block_dim.x, i / emu_block_dim.x % emu_block_dim.y, i / (emu_block_dim.x * emu_block_dim.y)};
        t.lane = i % 32;
        t.warp = i / 32;
        t.state = FRESH;
        warps[t.warp].alive |= 1u << t.lane;
    }
    alive = size;
    at_barrier = 0;
    // Shared memory holds NaN before it is written.
    std::memset(shared_end - shared_size, 0xff, shared_size);
    while (alive) {
        bool moved = false;
        for (unsigned w : warp_order) {
            for (bool again = true; again;) {
                again = false;
                for (unsigned l : lane_order) {
                    if (w * 32 + l >= size) continue;
                    auto& t = threads[w * 32 + l];
                    if (t.state == FRESH || t.state == READY) {
                        resume(t);
                        again = moved = true;
                    }
                }
            }
        }
        if (!moved && alive) {
            for (auto& t : threads)
                if (t.state == IN_WARP || t.state == IN_BLOCK) {
                    emu_now = &t;
                    fail(t.state == IN_WARP ? "DEADLOCK: lanes of its warp never come to this exchange"
                                            : "DEADLOCK: threads of its block never come to this barrier");
                }
            fail("DEADLOCK");
        }
    }
}

}  // namespace

void emu_barrier() {
    emu_counts.barriers++;
    if (++at_barrier == alive) {
        release_block();
        return;
    }
    emu_now->state = IN_BLOCK;
    yield_to_scheduler();
}

// Puts down a value and waits for the others; the last one to come does `work` for all. Returns where the values are.
template <class Work>
static unsigned arrive(unsigned mask, const void* value, size_t size, Meeting meeting, Work work) {
    emu_counts.exchanges++;
    Warp& w = warps[emu_now->warp];
    unsigned own = 1u << emu_now->lane, generation = w.generation;
    if (!(mask & own)) fail("a lane outside the mask of its exchange");
    if (w.arrived && w.mask != mask) fail("lanes of a warp meet with different masks");
    if (w.arrived && w.meeting != meeting) fail("lanes of a warp meet in different operations");
    w.mask = mask;
    w.meeting = meeting;
    std::memcpy(&w.slots[generation & 1][emu_now->lane], value, size);
    w.arrived |= own;
    if ((w.arrived & w.alive) == (mask & w.alive)) {
        work(w, generation & 1);
        release_warp(w, emu_now->warp);
    } else {
        emu_now->state = IN_WARP;
        yield_to_scheduler();
    }
    return generation & 1;
}

void emu_exchange(unsigned mask, const void* value, size_t size, uint64_t (&lanes)[32]) {
    unsigned at = arrive(mask, value, size, EXCHANGE, [](Warp&, unsigned) {});
    std::memcpy(lanes, warps[emu_now->warp].slots[at], sizeof lanes);
}

void emu_warp_sums(float* values, int count) {
    uint64_t pointer = reinterpret_cast<uint64_t>(values);
    unsigned at = arrive(0xffffffffu, &pointer, sizeof pointer, SUMS, [count](Warp& w, unsigned at) {
        for (int i = 0; i < count; i++) {
            // The same tree as five steps of shuffles.
            float v[32] = {};
            for (unsigned l = 0; l < 32; l++)
                if (w.arrived >> l & 1) v[l] = reinterpret_cast<const float*>(w.slots[at][l])[i];
            for (int step = 16; step > 0; step >>= 1)
                for (int l = 0; l < step; l++) v[l] += v[l + step];
            w.sums[at][i] = v[0];
        }
    });
    const float* sums = warps[emu_now->warp].sums[at];
    unsigned first = emu_now->lane * unsigned(count) / 32;
    for (int i = 0; i < (count + 31) / 32; i++) values[i] = sums[first + i];
}

static float bf16(unsigned half) { return __uint_as_float(half << 16); }

// Numbers go from the lanes into whole matrices and back, as the PTX manual places them. Products of two numbers in BF16 are exact in FP32;
// they are added in the order of columns, each sum rounded, which a device does in an order and a precision of its own.
void emu_mma(float* d, const unsigned* a, const unsigned* b, int count) {
    Factors own{d, a, b, count};
    const Factors* pointer = &own;
    arrive(0xffffffffu, &pointer, sizeof pointer, PRODUCT, [](Warp& w, unsigned at) {
        if (w.arrived != 0xffffffffu) fail("a product of matrices by a part of a warp");
        const Factors* lanes[32];
        std::memcpy(lanes, w.slots[at], sizeof lanes);
        float left[16][16];
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 8; i++) left[l / 4 + i / 2 % 2 * 8][l % 4 * 2 + i % 2 + i / 4 * 8] = bf16(lanes[l]->a[i / 2] >> i % 2 * 16 & 0xffff);
        for (int n = 0; n < lanes[0]->count; n++)
            for (int term = 2; term >= 0; term--) {
                typedef float Row __attribute__((vector_size(32)));
                Row right[16], sums[16];
                for (int l = 0; l < 32; l++) {
                    if (lanes[l]->count != lanes[0]->count) fail("lanes bring different numbers of matrices to a product");
                    for (int i = 0; i < 4; i++) right[l % 4 * 2 + i % 2 + i / 2 * 8][l / 4] = bf16(lanes[l]->b[n * 6 + term * 2 + i / 2] >> i % 2 * 16 & 0xffff);
                    for (int i = 0; i < 4; i++) sums[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] = lanes[l]->d[n * 4 + i];
                }
                for (int m = 0; m < 16; m++)
                    for (int k = 0; k < 16; k++) sums[m] += left[m][k] * right[k];
                for (int l = 0; l < 32; l++)
                    for (int i = 0; i < 4; i++) lanes[l]->d[n * 4 + i] = sums[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
            }
    });
}

static Copies& own_copies() { return copies[emu_now->warp * 32 + emu_now->lane]; }

void emu_copy(void* to, const void* from, unsigned size, int valid, bool weight) {
    if (valid < 0 || unsigned(valid) > size) fail("a copy of more bytes than its size");
    if (reinterpret_cast<uintptr_t>(to) % size || (valid && reinterpret_cast<uintptr_t>(from) % size)) fail("a misaligned copy");
    auto* place = static_cast<unsigned char*>(to);
    if (place < shared_end - shared_size || place + size > shared_end) fail("a copy to what is no shared memory");
    if (weight) emu_counts.weight_bytes += unsigned(valid);
    std::memset(place, 0xff, size);
    Copies& own = own_copies();
    own.waiting.push_back({place, from, size, unsigned(valid), own.group});
}

void emu_copies_end() { own_copies().group++; }

void emu_copies_wait(int left) {
    Copies& own = own_copies();
    size_t done = 0;
    for (; done < own.waiting.size() && int(own.group - own.waiting[done].group) > left; done++) {
        const Copy& c = own.waiting[done];
        std::memset(c.to, 0, c.size);
        if (c.valid) std::memcpy(c.to, c.from, c.valid);
    }
    own.waiting.erase(own.waiting.begin(), own.waiting.begin() + long(done));
}

const void* emu_weight(const void* at, size_t size) {
    if (reinterpret_cast<uintptr_t>(at) % size) fail("a misaligned load of a weight");
    emu_counts.weight_bytes += size;
    return at;
}

void* emu_dynamic_shared() { return shared_end - shared_size; }

void emu_cos_sin_pi(float t, float* c, float* s) {
    *c = static_cast<float>(std::cos(M_PI * static_cast<double>(t)));
    *s = static_cast<float>(std::sin(M_PI * static_cast<double>(t)));
}

void emu_launch(const char* kernel, emu_dim3 grid, emu_dim3 block, size_t shared, const std::function<void()>& run) {
    kernel_name = kernel;
    body = &run;
    emu_block_dim = block;
    emu_grid_dim = grid;
    if (shared > SHARED) fail("more dynamic shared memory than a block has");
    shared_size = (shared + 15) / 16 * 16;
    if (!shared_end) {
        auto* p = mmap(nullptr, SHARED + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) fail("no memory for shared memory");
        shared_end = static_cast<unsigned char*>(p) + SHARED;
        mprotect(shared_end, 4096, PROT_NONE);
    }
    size_t blocks = size_t(grid.x) * grid.y * grid.z, size = size_t(block.x) * block.y * block.z;
    auto block_order = order_of(blocks, 1), warp_order = order_of((size + 31) / 32, 2), lane_order = order_of(32, 3);
    for (unsigned b : block_order) {
        emu_block_idx = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / (size_t(grid.x) * grid.y))};
        run_block(warp_order, lane_order);
    }
    emu_counts.threads += blocks * size;
    emu_now = nullptr;
}
