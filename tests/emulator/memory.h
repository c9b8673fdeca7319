// Device memory of the emulator: every allocation ends at a page that is not to be touched, so that a kernel that reads or
// writes past it stops there, and holds NaN until it is written.
#pragma once
#include <cstddef>
#include <cstdint>

// `size` bytes whose end is within 16 of the forbidden page; null when there are not that many.
void* emu_allocate(size_t size);
// False when nothing was allocated there.
bool emu_free(void* at);
// Whether `size` bytes from `at` on are inside one allocation.
bool emu_inside(const void* at, size_t size);
// Bytes that are allocated, and that there are.
size_t emu_used();
// The most that there ever was.
size_t emu_most_used();
size_t emu_total();
