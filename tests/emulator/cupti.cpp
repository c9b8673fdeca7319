// A stand-in for libcupti over the stand-in for libcuda: subscriptions, activity records, callbacks about graphs' nodes.
//
// Its clock is its own: it begins at a fixed time, and work takes a time that depends on its size only; with EMU_CUPTI_CLOCK it is the
// host's, so many millionths fast, and work takes as long as it takes. Records are written as NVIDIA's
// headers lay them out. Knobs, all off: EMU_CUPTI_KERNEL_SIZE (bytes of a kernel's record), EMU_CUPTI_BUSY (another subscriber),
// EMU_CUPTI_DENIED (no permission), EMU_CUPTI_HANG (never answers), EMU_CUPTI_VERSION, EMU_CUPTI_DROP (so many kernels' records are dropped), EMU_CUPTI_ZERO (every so
// manieth kernel has no times), EMU_CUPTI_UNKNOWN (records of a kind of the future between the others), EMU_CUPTI_REVERSE (records come
// backwards), EMU_CUPTI_NO_NODES (records do not name nodes), EMU_CUPTI_SILENT (no callbacks about nodes), EMU_CUPTI_WHOLE
// (functions of the driver are traced all or none), EMU_CUPTI_COUNTS=FILE (how many calls were traced, by function).
#include "hooks.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

enum Result { OK = 0, INVALID_PARAMETER = 1, MAX_LIMIT_REACHED = 12, QUEUE_EMPTY = 18, INVALID_KIND = 21, NOT_SUPPORTED = 27, INSUFFICIENT_PRIVILEGES = 35, MULTIPLE_SUBSCRIBERS = 39, UNKNOWN = 999 };
enum Kind { MEMCPY = 1, MEMSET = 2, DRIVER = 4, CONCURRENT_KERNEL = 10, EXTERNAL_CORRELATION = 39, FUTURE = 77 };

using Callback = void (*)(void*, uint32_t, uint32_t, const void*);
using Request = void (*)(uint8_t**, size_t*, size_t*);
using Complete = void (*)(void*, uint32_t, uint8_t*, size_t, size_t);

uint64_t knob(const char* name) {
    const char* v = std::getenv(name);
    return v ? std::strtoull(v, nullptr, 10) : 0;
}

bool subscribed, subscribed_before;
Callback callback;
void* user;
std::map<uint32_t, bool> callbacks, kinds, functions;
std::map<uint32_t, uint64_t> traced;
Request request_buffer;
Complete complete_buffer;
std::map<uint32_t, std::vector<uint64_t>> pushed;
std::vector<std::string> records;
uint32_t correlations;
uint64_t now = 1700000000000000000ull, kernels;
size_t dropped;

// When the last call began, by the host's clock.
uint64_t called;

bool hosts_clock() {
    static const bool on = std::getenv("EMU_CUPTI_CLOCK");
    return on;
}

uint64_t hosts_now() {
    timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    uint64_t ns = at.tv_sec * 1000000000ull + at.tv_nsec;
    static const uint64_t origin = ns;
    return ns + (ns - origin) / 1000000 * knob("EMU_CUPTI_CLOCK");
}

uint64_t clock_now() { return hosts_clock() ? hosts_now() : now; }

size_t size_of(uint32_t kind) {
    static const size_t kernel = knob("EMU_CUPTI_KERNEL_SIZE") ? knob("EMU_CUPTI_KERNEL_SIZE") : 216;
    switch (kind) {
        case CONCURRENT_KERNEL: return kernel;
        case MEMCPY: return kernel > 232 ? 112 : 96;
        case MEMSET: return kernel > 232 ? 104 : 88;
        case DRIVER: return 40;
        case EXTERNAL_CORRELATION: return 24;
        case FUTURE: return 56;
        default: return 0;
    }
}

template <class T>
void put(std::string& record, size_t at, T value) { std::memcpy(record.data() + at, &value, sizeof value); }

std::string record_of(uint32_t kind) {
    std::string record(size_of(kind), '\xcd');
    put(record, 0, kind);
    return record;
}

void keep(std::string record) {
    if (knob("EMU_CUPTI_UNKNOWN") && records.size() % 3 == 0) records.push_back(record_of(FUTURE));
    records.push_back(std::move(record));
}

void write_counts() {
    const char* path = std::getenv("EMU_CUPTI_COUNTS");
    FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    const char* comma = "{";
    for (auto [function, calls] : traced) {
        std::fprintf(file, "%s\"%u\": %llu", comma, function, (unsigned long long)calls);
        comma = ", ";
    }
    std::fputs("}\n", file);
    std::fclose(file);
}

uint32_t api(uint32_t function) {
    if (hosts_clock()) called = hosts_now();
    // Ids are made only where an API is traced.
    if (!kinds[DRIVER] && !functions[function]) return 0;
    traced[function]++;
    uint32_t id = ++correlations;
    if (kinds[EXTERNAL_CORRELATION])
        for (auto& [kind, stack] : pushed)
            if (!stack.empty()) {
                std::string r = record_of(EXTERNAL_CORRELATION);
                put(r, 4, kind);
                put(r, 8, stack.back());
                put(r, 16, id);
                keep(std::move(r));
            }
    std::string r = record_of(DRIVER);
    put(r, 4, function);
    put(r, 32, id);
    keep(std::move(r));
    return id;
}

void done(const emu_work* w) {
    uint64_t blocks = uint64_t(w->grid[0]) * w->grid[1] * w->grid[2];
    uint64_t begin = now + 300, end = begin + 900 + blocks * 10 + w->bytes / 64;
    if (hosts_clock()) begin = std::max(now, called), end = std::max(hosts_now(), begin + 1);
    now = end;
    if (!kinds[w->kind]) return;
    std::string r = record_of(w->kind);
    uint64_t node = knob("EMU_CUPTI_NO_NODES") ? 0 : w->node;
    if (w->kind == CONCURRENT_KERNEL) {
        kernels++;
        if (kernels <= knob("EMU_CUPTI_DROP")) {
            dropped++;
            return;
        }
        if (knob("EMU_CUPTI_ZERO") && kernels % knob("EMU_CUPTI_ZERO") == 0) begin = end = 0;
        put(r, 6, uint16_t(32));
        put(r, 48, 7u);
        for (int i = 0; i < 3; i++) put(r, 52 + 4 * i, w->grid[i]), put(r, 64 + 4 * i, w->block[i]);
        put(r, 76, 0u);
        put(r, 80, w->shared);
        put(r, 92, w->correlation);
        put(r, 104, w->name);
        put(r, 144, node);
    } else {
        put(r, 8, w->bytes);
        put(r, 40, 7u);
        put(r, 44, w->correlation);
        put(r, 64, node);
    }
    put(r, 16, begin);
    put(r, 24, end);
    keep(std::move(r));
}

struct GraphData { void *graph, *original_graph, *node, *original_node; uint32_t type; void *dependency, *executable; };
struct ResourceData { void *context, *stream; const GraphData* descriptor; };

void node(void* made, void* original) {
    uint32_t id = original ? 20 : 13;
    if (!callback || !callbacks[id] || knob("EMU_CUPTI_SILENT")) return;
    GraphData graph{nullptr, nullptr, made, original, 0, nullptr, nullptr};
    ResourceData data{nullptr, nullptr, &graph};
    callback(user, 3, id, &data);
}

void* driver() {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    return library;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API cuptiGetVersion(uint32_t* version) {
    *version = knob("EMU_CUPTI_VERSION") ? uint32_t(knob("EMU_CUPTI_VERSION")) : 130001;
    return OK;
}
API cuptiGetTimestamp(uint64_t* at) { *at = clock_now(); return OK; }
API cuptiGetResultString(uint32_t, const char** text) { *text = "CUPTI_ERROR_OF_THE_EMULATOR"; return OK; }
API cuptiSubscribe(void** subscriber, Callback c, void* u) {
    while (knob("EMU_CUPTI_HANG")) pause();
    if (subscribed || knob("EMU_CUPTI_BUSY")) return MULTIPLE_SUBSCRIBERS;
    auto set = driver() ? reinterpret_cast<void (*)(emu_hooks)>(dlsym(driver(), "emu_set_hooks")) : nullptr;
    if (!set) return UNKNOWN;
    set({api, done, node, clock_now});
    if (!subscribed_before) std::atexit(write_counts);
    subscribed_before = true;
    subscribed = true;
    callback = c;
    user = u;
    *subscriber = &subscribed;
    return OK;
}
API cuptiUnsubscribe(void*) { subscribed = false; callback = nullptr; return OK; }
API cuptiEnableCallback(uint32_t on, void*, uint32_t domain, uint32_t id) {
    if (domain != 3) return INVALID_PARAMETER;
    callbacks[id] = on;
    return OK;
}
API cuptiActivityRegisterCallbacks(Request request, Complete complete) {
    if (knob("EMU_CUPTI_DENIED")) return INSUFFICIENT_PRIVILEGES;
    request_buffer = request;
    complete_buffer = complete;
    return OK;
}
int switched(uint32_t kind, bool on) {
    if (!size_of(kind)) return INVALID_KIND;
    if (kind == DRIVER) functions.clear();
    kinds[kind] = on;
    return OK;
}
API cuptiActivityEnable(uint32_t kind) { return switched(kind, true); }
API cuptiActivityDisable(uint32_t kind) { return switched(kind, false); }
// The whole kind overrides what was switched before it.
API cuptiActivityEnableDriverApi(uint32_t function, uint8_t on) {
    if (knob("EMU_CUPTI_WHOLE")) return NOT_SUPPORTED;
    functions[function] = on;
    return OK;
}
API cuptiActivityFlushAll(uint32_t) {
    if (knob("EMU_CUPTI_REVERSE")) std::reverse(records.begin(), records.end());
    uint8_t* buffer = nullptr;
    size_t size = 0, most = 0, used = 0;
    for (const auto& r : records) {
        if (buffer && used + r.size() > size) {
            complete_buffer(nullptr, 0, buffer, size, used);
            buffer = nullptr;
        }
        if (!buffer) {
            request_buffer(&buffer, &size, &most);
            used = 0;
        }
        if (!buffer || r.size() > size) {
            dropped++;
            continue;
        }
        std::memcpy(buffer + used, r.data(), r.size());
        used += r.size();
    }
    if (buffer) complete_buffer(nullptr, 0, buffer, size, used);
    records.clear();
    return OK;
}
API cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, uint8_t** record) {
    uint32_t kind;
    uint8_t* next = buffer;
    if (*record) {
        std::memcpy(&kind, *record, sizeof kind);
        next = *record + size_of(kind);
    }
    if (next >= buffer + valid) return MAX_LIMIT_REACHED;
    std::memcpy(&kind, next, sizeof kind);
    if (!size_of(kind)) return INVALID_KIND;
    *record = next;
    return OK;
}
API cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* count) {
    *count = dropped;
    dropped = 0;
    return OK;
}
API cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) { pushed[kind].push_back(id); return OK; }
API cuptiActivityPopExternalCorrelationId(uint32_t kind, uint64_t* last) {
    auto& stack = pushed[kind];
    if (stack.empty()) return QUEUE_EMPTY;
    if (last) *last = stack.back();
    stack.pop_back();
    return OK;
}
API cuptiGetGraphNodeId(void* node, uint64_t* id) {
    auto of = driver() ? reinterpret_cast<uint64_t (*)(void*)>(dlsym(driver(), "emu_node_id")) : nullptr;
    if (!of || !node) return INVALID_PARAMETER;
    *id = of(node);
    return OK;
}
