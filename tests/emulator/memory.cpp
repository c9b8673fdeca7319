#include "memory.h"
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>

namespace {

constexpr size_t PAGE = 4096;

struct Block {
    void* pages;
    size_t mapped, size;
};
std::map<uintptr_t, Block> blocks;
size_t used, most;

}  // namespace

size_t emu_used() { return used; }
size_t emu_most_used() { return most; }

size_t emu_total() {
    // Small on request, so that a plan that does not fit can be tried.
    static const char* wanted = std::getenv("EMU_MEMORY");
    return wanted ? std::strtoull(wanted, nullptr, 10) : size_t(4) << 30;
}

void* emu_allocate(size_t size) {
    if (size == 0 || size > emu_total() - used) return nullptr;
    size_t rounded = (size + 15) / 16 * 16, pages = (rounded + PAGE - 1) / PAGE * PAGE;
    void* p = mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    mprotect(static_cast<char*>(p) + pages, PAGE, PROT_NONE);
    char* at = static_cast<char*>(p) + pages - rounded;
    std::memset(at, 0xff, rounded);
    blocks[reinterpret_cast<uintptr_t>(at)] = {p, pages + PAGE, size};
    used += size;
    if (used > most) most = used;
    return at;
}

bool emu_free(void* at) {
    auto it = blocks.find(reinterpret_cast<uintptr_t>(at));
    if (it == blocks.end()) return false;
    munmap(it->second.pages, it->second.mapped);
    used -= it->second.size;
    blocks.erase(it);
    return true;
}

bool emu_inside(const void* at, size_t size) {
    auto a = reinterpret_cast<uintptr_t>(at);
    auto it = blocks.upper_bound(a);
    if (it == blocks.begin()) return false;
    --it;
    return a - it->first <= it->second.size && size <= it->second.size - (a - it->first);
}
