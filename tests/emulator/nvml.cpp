// A stand-in for NVML with one device, the emulator's, whose counters have fixed values.
//
//   EMU_NVML=hang             nvmlInit_v2 never returns
//   EMU_NVML=N                nvmlInit_v2 gives the code N: 4 no permission, 9 no driver, 18 other versions
//   EMU_NVML_THROTTLE=BITS    reasons in decimal, from the second reading on; before that, 1 (idle)
//   EMU_NVML_UNSUPPORTED=ABC  counters that the device lacks: s SM clock, m memory clock, p power, t temperature, r reasons, b memory
//   EMU_NVML_UUID=TEXT        the device's identity, instead of that of the emulator's driver
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace {

enum Result { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

int device_storage;
std::atomic<int> users, samples;

const char* text(const char* name, const char* otherwise) {
    const char* v = std::getenv(name);
    return v ? v : otherwise;
}

// OK, or why a counter cannot be read.
int reads(void* device, char counter) {
    if (!users) return UNINITIALIZED;
    if (device != &device_storage) return INVALID_ARGUMENT;
    return std::strchr(text("EMU_NVML_UNSUPPORTED", ""), counter) ? NOT_SUPPORTED : OK;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API nvmlInit_v2() {
    const char* knob = text("EMU_NVML", "0");
    while (!std::strcmp(knob, "hang")) pause();
    if (int code = std::atoi(knob)) return code;
    ++users;
    return OK;
}
API nvmlShutdown() {
    if (!users) return UNINITIALIZED;
    --users;
    return OK;
}
API nvmlSystemGetDriverVersion(char* version, unsigned length) {
    if (length < 16) return INSUFFICIENT_SIZE;
    std::snprintf(version, length, "570.86.10");
    return users ? OK : UNINITIALIZED;
}
API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = &device_storage;
    return index ? NOT_FOUND : users ? OK : UNINITIALIZED;
}
API nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
    *device = &device_storage;
    bool known = !std::strcmp(uuid, text("EMU_NVML_UUID", "GPU-eeeeeeee-eeee-eeee-eeee-eeeeeeeeeeee"));
    return !known ? NOT_FOUND : users ? OK : UNINITIALIZED;
}
API nvmlDeviceGetClockInfo(void* device, int which, unsigned* mhz) {
    if (which != 1 && which != 2) return INVALID_ARGUMENT;
    *mhz = which == 1 ? 1980 : 3201;
    return reads(device, which == 1 ? 's' : 'm');
}
API nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
    *milliwatts = 543210;
    return reads(device, 'p');
}
API nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) {
    *degrees = 61;
    return sensor ? INVALID_ARGUMENT : reads(device, 't');
}
API nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* bits) {
    *bits = ++samples > 1 ? std::strtoull(text("EMU_NVML_THROTTLE", "1"), nullptr, 10) : 1;
    return reads(device, 'r');
}
struct Memory {
    unsigned long long total, free, used;
};
API nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
    *memory = {141ull << 30, 101ull << 30, 40ull << 30};
    return reads(device, 'b');
}
