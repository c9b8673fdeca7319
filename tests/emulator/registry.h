// The kernels that were built in, by name. Every source's part of the table is generated behind it (build.py).
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

struct emu_kernel {
    const char* name;
    // As `__launch_bounds__` says.
    unsigned max_threads;
    // Bytes of each parameter, and a call with pointers to them.
    const size_t* sizes;
    size_t count;
    void (*call)(void** parameters);
};
std::vector<emu_kernel>& emu_kernels();

struct emu_registration {
    explicit emu_registration(emu_kernel k) { emu_kernels().push_back(k); }
};

template <auto Kernel>
struct emu_entry;
template <class... A, void (*Kernel)(A...)>
struct emu_entry<Kernel> {
    static constexpr size_t sizes[] = {sizeof(A)...};
    template <size_t... I>
    static void call_with(void** p, std::index_sequence<I...>) {
        Kernel(*static_cast<A*>(p[I])...);
    }
    static void call(void** p) { call_with(p, std::index_sequence_for<A...>{}); }
    static constexpr emu_kernel of(const char* name, unsigned max_threads) { return {name, max_threads, sizes, sizeof...(A), call}; }
};
