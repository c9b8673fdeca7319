// A stand-in for the CUDA driver: the functions of libcuda that the project calls, over the emulator.
//
// It takes the same images as the real driver and looks for the kernel's name in them, but runs the sources that it was built
// from. EMU_LAZY=1 puts off all work of a stream until somebody waits for it, so that a missing wait shows every time. EMU_COUNTS=FILE leaves
// there, when the process ends, how often the host waited, what was copied to it, and the most memory that there was.
#include "fibers.h"
#include "hooks.h"
#include "memory.h"
#include "registry.h"
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

enum Result { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, DRIVER_MISMATCH = 803, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALID = 901, CAPTURE_IMPLICIT = 906 };

struct Operation {
    std::function<void()> run;
    emu_work work;

    void operator()() const;
};

struct Graph {
    // Nodes keep their places.
    std::vector<std::unique_ptr<Operation>> nodes;
    bool spoiled = false;
};
struct Stream {
    std::vector<Operation> waiting;
    std::unique_ptr<Graph> capture;
    // Whether it and work without a stream wait for each other; then they share a queue, which is in the order of the calls.
    bool blocking = true;
};
struct Event {
    uint64_t ns;
};
struct Module {
    std::string image;
};
struct Function {
    const emu_kernel* kernel;
    int dynamic_shared = 48 * 1024;
};

Stream default_stream;
emu_hooks hooks;
uint64_t nodes_made;
// The stream that is being captured, of which there is one at a time here.
Stream* capturing;
std::map<uintptr_t, size_t> pinned;
size_t pinned_now, most_pinned;
int context_storage;
void* current;
const char* running = "no kernel";

bool lazy() {
    static const bool on = [] { const char* v = std::getenv("EMU_LAZY"); return v && *v == '1'; }();
    return on;
}

// Knobs of tests.
bool set(const char* name) {
    const char* v = std::getenv(name);
    return v && *v == '1';
}

Stream& stream_of(void* s) { return s ? *static_cast<Stream*>(s) : default_stream; }
Stream& queue_of(Stream& s) { return s.blocking ? default_stream : s; }

// Work without a stream would wait for the captured one: the driver refuses it and spoils the capture.
bool spoils_capture() {
    if (!capturing) return false;
    capturing->capture->spoiled = true;
    return true;
}

bool is_pinned(const void* at, size_t size) {
    auto a = reinterpret_cast<uintptr_t>(at);
    auto it = pinned.upper_bound(a);
    if (it == pinned.begin()) return false;
    --it;
    return a - it->first <= it->second && size <= it->second - (a - it->first);
}

void drain(Stream& stream) {
    Stream& s = queue_of(stream);
    // An operation may add none: graphs are unrolled when they are launched.
    for (auto& op : s.waiting) op();
    s.waiting.clear();
}

void Operation::operator()() const {
    run();
    if (hooks.done && work.kind) hooks.done(&work);
}

// CUPTI's numbers of the driver's functions (cupti_driver_cbid.h).
enum Api { EVENT_RECORD = 119, STREAM_SYNCHRONIZE = 126, MEMSET_D8 = 216, TO_DEVICE = 277, TO_HOST = 279, ON_DEVICE = 281, LAUNCH_KERNEL = 307, LAUNCH_GRAPH = 514 };

uint32_t api_of(const emu_work& work) {
    if (work.kind == 2) return MEMSET_D8;
    if (work.kind == 1) return work.copy_kind == 1 ? TO_DEVICE : work.copy_kind == 2 ? TO_HOST : ON_DEVICE;
    return LAUNCH_KERNEL;
}

// The correlation id of an API call; 0 when it is captured or nobody profiles.
uint32_t begin_api(void* stream, uint32_t function) { return hooks.api && !stream_of(stream).capture ? hooks.api(function) : 0; }

void enqueue(void* stream, std::function<void()> run, emu_work work = {}) {
    Stream& s = stream_of(stream);
    if (!s.capture && work.kind) work.correlation = begin_api(stream, api_of(work));
    Operation op{std::move(run), work};
    if (s.capture) {
        op.work.node = ++nodes_made;
        s.capture->nodes.push_back(std::make_unique<Operation>(std::move(op)));
        if (hooks.node) hooks.node(s.capture->nodes.back().get(), nullptr);
    } else if (lazy()) queue_of(s).waiting.push_back(std::move(op));
    else op();
}

emu_work copy_of(uint32_t kind, uint32_t copy_kind, size_t bytes) {
    emu_work work;
    work.kind = kind;
    work.copy_kind = copy_kind;
    work.bytes = bytes;
    return work;
}

// How often the host waited for the device, and copies to it by their bytes.
uint64_t waits;
std::map<size_t, uint64_t> brought;

void write_counts() {
    const char* path = std::getenv("EMU_COUNTS");
    FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    std::fprintf(file, "{\"waits\": %llu, \"brought\": {", (unsigned long long)waits);
    const char* comma = "";
    for (auto [bytes, times] : brought) {
        std::fprintf(file, "%s\"%zu\": %llu", comma, bytes, (unsigned long long)times);
        comma = ", ";
    }
    std::fprintf(file, "}, \"device\": %zu, \"pinned\": %zu}\n", emu_most_used(), most_pinned);
    std::fclose(file);
}

// Work without a stream waits for all that came before; there is one stream at a time in use here.
int synchronise(void* stream) {
    waits++;
    begin_api(stream, STREAM_SYNCHRONIZE);
    Stream& s = stream_of(stream);
    if (s.capture) {
        s.capture->spoiled = true;
        return CAPTURE_UNSUPPORTED;
    }
    drain(s);
    return OK;
}

void on_fault(int, siginfo_t* info, void*) {
    char line[256];
    int n = std::snprintf(line, sizeof line, "emulator: %s: block (%u,%u,%u) thread %u: memory access out of bounds at %p\n", running,
                          emu_block_idx.x, emu_block_idx.y, emu_block_idx.z, emu_now ? emu_now->thread_idx.x : 0, info->si_addr);
    if (write(2, line, n) < 0) _exit(70);
    _exit(70);
}

// Bytes of an ELF image, by its section table, which comes last.
size_t elf_size(const unsigned char* p) {
    uint64_t offset;
    uint16_t each, count;
    std::memcpy(&offset, p + 40, 8);
    std::memcpy(&each, p + 58, 2);
    std::memcpy(&count, p + 60, 2);
    uint64_t programs;
    uint16_t program_size, program_count;
    std::memcpy(&programs, p + 32, 8);
    std::memcpy(&program_size, p + 54, 2);
    std::memcpy(&program_count, p + 56, 2);
    uint64_t sections_end = offset + uint64_t(each) * count, programs_end = programs + uint64_t(program_size) * program_count;
    return sections_end > programs_end ? sections_end : programs_end;
}

}  // namespace

std::vector<emu_kernel>& emu_kernels() {
    static std::vector<emu_kernel> all;
    return all;
}

#define API extern "C" __attribute__((visibility("default"))) int

// EMU_INIT: `hang`, or the code that cuInit gives. EMU_DRIVER: the version. EMU_DEVICES: how many there are. EMU_NAME: another name, for tests
// of what is done with a device's times; only by its name is the emulator known.
int knob(const char* name, int otherwise) {
    const char* v = std::getenv(name);
    return v ? std::atoi(v) : otherwise;
}

// EMU_BAD_CONTEXT=N: from the Nth context on, half of every large copy to the device arrives as zeros: a device that does not repeat itself.
int contexts;
void copy_to_device(void* to, const void* from, size_t size) {
    std::memcpy(to, from, size);
    if (size >= 4096 && contexts >= knob("EMU_BAD_CONTEXT", contexts + 1)) std::memset(static_cast<char*>(to) + size / 2, 0, size - size / 2);
}

API cuInit(unsigned) {
    const char* init = std::getenv("EMU_INIT");
    while (init && std::string(init) == "hang") pause();
    if (int code = knob("EMU_INIT", OK)) return code;
    static unsigned char stack[32 * 1024];
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    std::atexit(write_counts);
    return OK;
}
API cuDriverGetVersion(int* version) { *version = knob("EMU_DRIVER", 12080); return OK; }
API cuDeviceGetCount(int* count) { *count = knob("EMU_DEVICES", 1); return OK; }
API cuDeviceGet(int* device, int ordinal) { *device = 0; return ordinal == 0 ? OK : 101; }
API cuDeviceGetName(char* name, int size, int) {
    const char* other = std::getenv("EMU_NAME");
    std::snprintf(name, size, "%s", other ? other : "specprof emulator");
    return OK;
}
API cuDeviceGetUuid(char* uuid, int) { std::memset(uuid, 0xee, 16); return OK; }
API cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = emu_total(); return OK; }
API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 1: *value = 1024; break;             // threads of a block
        case 8: *value = 48 * 1024; break;        // shared memory of a block
        case 10: *value = 32; break;              // lanes of a warp
        case 16: *value = 1; break;               // multiprocessors
        case 75: *value = 9; break;               // compute capability
        case 76: *value = 0; break;
        case 97: *value = 227 * 1024; break;      // shared memory of a block on request
        case 115: *value = 1; break;              // memory pools
        default: *value = 0;
    }
    return OK;
}
API cuDevicePrimaryCtxRetain(void** context, int) { contexts++, *context = &context_storage; return OK; }
API cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API cuCtxGetCurrent(void** context) { *context = current; return OK; }
API cuCtxSetCurrent(void* context) { current = context; return OK; }
API cuCtxSynchronize() { return synchronise(nullptr); }

API cuStreamCreate(void** stream, unsigned flags) {
    *stream = new Stream;
    static_cast<Stream*>(*stream)->blocking = !(flags & 1);
    return OK;
}
API cuStreamCreateWithPriority(void** stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
API cuStreamDestroy_v2(void* stream) { drain(stream_of(stream)); delete static_cast<Stream*>(stream); return OK; }
API cuStreamSynchronize(void* stream) { return synchronise(stream); }
API cuStreamWaitEvent(void*, void*, unsigned) { return OK; }
API cuStreamIsCapturing(void* stream, int* status) { *status = stream_of(stream).capture ? 1 : 0; return OK; }
API cuStreamBeginCapture_v2(void* stream, int) {
    if (!stream || capturing) return INVALID_VALUE;
    if (set("EMU_NO_CAPTURE")) return NOT_SUPPORTED;
    capturing = &stream_of(stream);
    capturing->capture = std::make_unique<Graph>();
    return OK;
}
API cuStreamEndCapture(void* stream, void** graph) {
    if (!stream_of(stream).capture) return CAPTURE_INVALID;
    capturing = nullptr;
    std::unique_ptr<Graph> captured = std::move(stream_of(stream).capture);
    if (captured->spoiled) return CAPTURE_INVALID;
    *graph = captured.release();
    return OK;
}
API cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    auto* made = new Graph;
    for (const auto& node : static_cast<Graph*>(graph)->nodes) {
        made->nodes.push_back(std::make_unique<Operation>(*node));
        made->nodes.back()->work.node = ++nodes_made;
        if (hooks.node) hooks.node(made->nodes.back().get(), node.get());
    }
    *executable = made;
    return OK;
}
API cuGraphGetNodes(void* graph, void**, size_t* count) { *count = static_cast<Graph*>(graph)->nodes.size(); return OK; }
API cuGraphUpload(void*, void*) { return OK; }
API cuGraphLaunch(void* executable, void* stream) {
    if (stream_of(stream).capture) return NOT_SUPPORTED;
    Stream& queue = queue_of(stream_of(stream));
    uint32_t correlation = begin_api(stream, LAUNCH_GRAPH);
    for (const auto& node : static_cast<Graph*>(executable)->nodes) {
        Operation op = *node;
        op.work.correlation = correlation;
        if (lazy()) queue.waiting.push_back(std::move(op));
        else op();
    }
    return OK;
}
API cuGraphDestroy(void* graph) { delete static_cast<Graph*>(graph); return OK; }
API cuGraphExecDestroy(void* graph) { delete static_cast<Graph*>(graph); return OK; }

API cuEventCreate(void** event, unsigned) { *event = new Event{}; return OK; }
API cuEventDestroy_v2(void* event) { delete static_cast<Event*>(event); return OK; }
API cuEventRecord(void* event, void* stream) {
    begin_api(stream, EVENT_RECORD);
    enqueue(stream, [event] {
        auto host = std::chrono::steady_clock::now().time_since_epoch();
        static_cast<Event*>(event)->ns = hooks.now ? hooks.now() : uint64_t(std::chrono::nanoseconds(host).count());
    });
    return OK;
}
API cuEventSynchronize(void*) {
    waits++;
    if (spoils_capture()) return CAPTURE_UNSUPPORTED;
    drain(default_stream);
    return OK;
}
API cuEventQuery(void*) { return OK; }
// The host's time, or that of the stand-in for CUPTI once it has come: of use to no report, which is why traces of the emulator have no device
// times.
API cuEventElapsedTime(float* ms, void* begin, void* end) {
    *ms = float(double(static_cast<Event*>(end)->ns - static_cast<Event*>(begin)->ns) / 1e6);
    return OK;
}

API cuMemGetInfo_v2(size_t* available, size_t* total) { *total = emu_total(); *available = emu_total() - emu_used(); return OK; }
API cuMemAlloc_v2(void** at, size_t size) {
    if (spoils_capture()) return CAPTURE_UNSUPPORTED;
    *at = emu_allocate(size);
    return *at ? OK : size ? OUT_OF_MEMORY : INVALID_VALUE;
}
API cuMemFree_v2(void* at) {
    if (spoils_capture()) return CAPTURE_UNSUPPORTED;
    drain(default_stream);
    return emu_free(at) ? OK : INVALID_VALUE;
}
API cuMemAllocAsync(void** at, size_t size, void*) { return cuMemAlloc_v2(at, size); }
API cuMemFreeAsync(void* at, void* stream) {
    enqueue(stream, [at] { emu_free(at); });
    return OK;
}
API cuMemHostAlloc(void** at, size_t size, unsigned) {
    *at = std::malloc(size ? size : 1);
    if (!*at) return OUT_OF_MEMORY;
    std::memset(*at, 0xff, size);
    pinned[reinterpret_cast<uintptr_t>(*at)] = size;
    pinned_now += size;
    if (pinned_now > most_pinned) most_pinned = pinned_now;
    return OK;
}
API cuMemFreeHost(void* at) {
    drain(default_stream);
    auto known = pinned.find(reinterpret_cast<uintptr_t>(at));
    if (known == pinned.end()) return INVALID_VALUE;
    pinned_now -= known->second;
    pinned.erase(known);
    std::free(at);
    return OK;
}
API cuMemsetD8Async(void* at, unsigned char value, size_t size, void* stream) {
    if (!emu_inside(at, size)) return INVALID_VALUE;
    if (!stream && spoils_capture()) return CAPTURE_IMPLICIT;
    enqueue(stream, [=] { std::memset(at, value, size); }, copy_of(2, 0, size));
    return OK;
}
API cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t size, void* stream) {
    if (!emu_inside(to, size)) return INVALID_VALUE;
    if (is_pinned(from, size)) {
        enqueue(stream, [=] { copy_to_device(to, from, size); }, copy_of(1, 1, size));
        return OK;
    }
    // Pageable memory is read before the call returns.
    std::string bytes(static_cast<const char*>(from), size);
    enqueue(stream, [=] { copy_to_device(to, bytes.data(), size); }, copy_of(1, 1, size));
    return OK;
}
API cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t size, void* stream) {
    if (!emu_inside(from, size)) return INVALID_VALUE;
    // Counted when it runs: a graph's copies run with every launch.
    enqueue(stream, [=] { brought[size]++, std::memcpy(to, from, size); }, copy_of(1, 2, size));
    return OK;
}
API cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* stream) {
    if (!emu_inside(to, size) || !emu_inside(from, size)) return INVALID_VALUE;
    enqueue(stream, [=] { std::memmove(to, from, size); }, copy_of(1, 8, size));
    return OK;
}
API cuMemcpyHtoD_v2(void* to, const void* from, size_t size) {
    waits++;
    if (spoils_capture()) return CAPTURE_IMPLICIT;
    drain(default_stream);
    if (!emu_inside(to, size)) return INVALID_VALUE;
    copy_to_device(to, from, size);
    return OK;
}
API cuMemcpyDtoH_v2(void* to, const void* from, size_t size) {
    waits++, brought[size]++;
    if (spoils_capture()) return CAPTURE_IMPLICIT;
    drain(default_stream);
    if (!emu_inside(from, size)) return INVALID_VALUE;
    std::memcpy(to, from, size);
    return OK;
}

API cuModuleLoadData(void** module, const void* image) {
    auto* p = static_cast<const unsigned char*>(image);
    if (std::memcmp(p, "\x7f" "ELF", 4) == 0) *module = new Module{std::string(static_cast<const char*>(image), elf_size(p))};
    else if (std::strstr(static_cast<const char*>(image), ".version")) *module = new Module{std::string(static_cast<const char*>(image))};
    else return INVALID_IMAGE;
    return OK;
}
API cuModuleUnload(void* module) { delete static_cast<Module*>(module); return OK; }
API cuModuleGetFunction(void** function, void* module, const char* name) {
    // Kernels are loaded when they are first asked for.
    if (spoils_capture()) return CAPTURE_UNSUPPORTED;
    if (static_cast<Module*>(module)->image.find(name) == std::string::npos) return NOT_FOUND;
    for (const auto& kernel : emu_kernels())
        if (std::strcmp(kernel.name, name) == 0) {
            *function = new Function{&kernel};
            return OK;
        }
    return NOT_FOUND;
}
API cuFuncGetAttribute(int* value, int attribute, void* function) {
    *value = attribute == 0 ? int(static_cast<Function*>(function)->kernel->max_threads) : 0;
    return OK;
}
API cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute == 8) {
        if (value > 227 * 1024) return INVALID_VALUE;
        static_cast<Function*>(function)->dynamic_shared = value;
    }
    return OK;
}
API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
    if (!function || extra) return INVALID_HANDLE;
    if (!stream && spoils_capture()) return CAPTURE_IMPLICIT;
    auto* f = static_cast<Function*>(function);
    const emu_kernel* k = f->kernel;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || !by || !bz || bx * by * bz > k->max_threads) return INVALID_VALUE;
    if (shared > unsigned(f->dynamic_shared)) return INVALID_VALUE;
    // Parameters are read at the launch, whenever it runs.
    std::vector<std::string> values;
    for (size_t i = 0; i < k->count; i++) values.emplace_back(static_cast<const char*>(parameters[i]), k->sizes[i]);
    emu_work work;
    work.kind = 10;
    work.grid[0] = gx, work.grid[1] = gy, work.grid[2] = gz;
    work.block[0] = bx, work.block[1] = by, work.block[2] = bz;
    work.shared = shared;
    work.name = k->name;
    enqueue(stream, [=] {
        std::vector<std::vector<uint64_t>> aligned;
        std::vector<void*> pointers;
        for (auto& v : values) {
            aligned.emplace_back(v.size() / 8 + 1);
            std::memcpy(aligned.back().data(), v.data(), v.size());
            pointers.push_back(aligned.back().data());
        }
        running = k->name;
        emu_launch(k->name, {gx, gy, gz}, {bx, by, bz}, shared, [&] { k->call(pointers.data()); });
        running = "no kernel";
    }, work);
    return OK;
}

API cuGetErrorName(int error, const char** name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND"
          : error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : error == DRIVER_MISMATCH ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
          : error == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE" : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : error == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
          : error == CAPTURE_IMPLICIT || error == CAPTURE_UNSUPPORTED || error == CAPTURE_INVALID ? "CUDA_ERROR_STREAM_CAPTURE" : "CUDA_ERROR_UNKNOWN";
    return OK;
}
API cuGetErrorString(int error, const char** text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == NOT_FOUND ? "named symbol not found" : "emulated error";
    return OK;
}

// For tests: the order in which threads take turns, and what was counted since the last time.
extern "C" __attribute__((visibility("default"))) void emu_set_order(unsigned long long order) { emu_order = order; }
extern "C" __attribute__((visibility("default"))) void emu_take_counters(unsigned long long* four) {
    four[0] = emu_counts.weight_bytes;
    four[1] = emu_counts.threads;
    four[2] = emu_counts.barriers;
    four[3] = emu_counts.exchanges;
    emu_counts = {};
}

// For the stand-in for libcupti: who is to be told, and a node's number.
extern "C" __attribute__((visibility("default"))) void emu_set_hooks(emu_hooks h) { hooks = h; }
extern "C" __attribute__((visibility("default"))) unsigned long long emu_node_id(void* node) { return static_cast<Operation*>(node)->work.node; }
