//! NVML: clocks, power, temperature, throttling and memory of one device, as its driver tells them.
//!
//! The library comes with the driver and is found at run time. Only six of its functions are read, all of them of its first
//! versions, so that any driver that runs the kernels has them; the record layouts are those of NVIDIA's `nvml.h`. A counter
//! that the device does not have is `None`, and costs nothing but that. **Not yet run against a real driver**: tests use a
//! stand-in library.

use crate::trace::TelemetrySample;
use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

const LIBRARY: &str = "libnvidia-ml.so.1";
/// `nvmlClockType_t`.
const CLOCK_SM: c_int = 1;
const CLOCK_MEMORY: c_int = 2;
/// `NVML_TEMPERATURE_GPU`.
const SENSOR_GPU: c_int = 0;

/// Bits of `nvmlClocksThrottleReasons`, by the words that traces use for them.
const REASONS: &[(u64, &str)] = &[
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks_setting"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
];

type Handle = *mut c_void;
/// `nvmlReturn_t`.
type Code = c_int;

/// `nvmlMemory_t`, bytes.
#[repr(C)]
#[derive(Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// The counters of one device. Dropping it closes the library.
#[derive(Debug)]
pub struct Nvml {
    library: Library,
    device: Handle,
}

// SAFETY: NVML may be called from any thread; the handle is a number of the library's own, valid while it is loaded.
unsafe impl Send for Nvml {}

impl Nvml {
    /// Opens the library and finds a device: the one with this UUID (`GPU-...`), or the first.
    ///
    /// # Errors
    /// One line that says what is missing: the library, the permission, the driver, the device.
    pub fn open(uuid: Option<&str>) -> Result<Self, String> {
        // SAFETY: loads the driver's library, whose initialisers are as safe as any library's.
        let library = unsafe { Library::new(LIBRARY) }
            .map_err(|_| format!("NVML: {LIBRARY} cannot be loaded: it comes with the driver, look at LD_LIBRARY_PATH"))?;
        let mut nvml = Self { library, device: null_mut() };
        // SAFETY: of this type since NVML 4.
        let started = unsafe { nvml.call("nvmlInit_v2", |f: unsafe extern "C" fn() -> Code| f()) };
        started.map_err(|why| format!("NVML: it does not start: {why}"))?;
        let mut device = null_mut();
        let found = match uuid {
            Some(uuid) => {
                let text = CString::new(uuid).map_err(|e| format!("NVML: device {uuid}: {e}"))?;
                type ByUuid = unsafe extern "C" fn(*const c_char, *mut Handle) -> Code;
                // SAFETY: a string with an end, and room for a handle.
                unsafe { nvml.call("nvmlDeviceGetHandleByUUID", |f: ByUuid| f(text.as_ptr(), &raw mut device)) }
            }
            None => {
                type ByIndex = unsafe extern "C" fn(c_uint, *mut Handle) -> Code;
                // SAFETY: room for a handle.
                unsafe { nvml.call("nvmlDeviceGetHandleByIndex_v2", |f: ByIndex| f(0, &raw mut device)) }
            }
        };
        found.map_err(|why| format!("NVML: device {}: {why}", uuid.unwrap_or("0")))?;
        nvml.device = device;
        Ok(nvml)
    }

    /// Version of the driver; `None` when the library does not say.
    pub fn driver_version(&self) -> Option<String> {
        type Version = unsafe extern "C" fn(*mut c_char, c_uint) -> Code;
        let mut bytes = [0_u8; 96];
        // SAFETY: the library writes no more than the length that it is told.
        unsafe { self.call("nvmlSystemGetDriverVersion", |f: Version| f(bytes.as_mut_ptr().cast(), bytes.len() as c_uint)) }.ok()?;
        let end = bytes.iter().position(|b| *b == 0)?;
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// Writes what the device tells into a sample. The temperature of a device that tells none is unknown, not the host's.
    pub fn fill(&self, sample: &mut TelemetrySample) {
        sample.sm_clock_mhz = self.clock(CLOCK_SM).ok();
        sample.memory_clock_mhz = self.clock(CLOCK_MEMORY).ok();
        sample.power_w = self.power().ok();
        sample.temperature_c = self.temperature().ok();
        sample.throttle_reasons = self.reasons().ok().map(words);
        sample.memory_used_bytes = self.memory_used().ok();
    }

    /// Each counter by name, with the library's reason where it cannot be read.
    pub fn counters(&self) -> [(&'static str, Result<(), &'static str>); 6] {
        [
            ("SM clock", self.clock(CLOCK_SM).map(drop)),
            ("memory clock", self.clock(CLOCK_MEMORY).map(drop)),
            ("power", self.power().map(drop)),
            ("temperature", self.temperature().map(drop)),
            ("throttle reasons", self.reasons().map(drop)),
            ("memory used", self.memory_used().map(drop)),
        ]
    }

    /// MHz.
    fn clock(&self, which: c_int) -> Result<u32, &'static str> {
        type Clock = unsafe extern "C" fn(Handle, c_int, *mut c_uint) -> Code;
        let mut mhz = 0;
        // SAFETY: a handle of this library, and room for the answer.
        unsafe { self.call("nvmlDeviceGetClockInfo", |f: Clock| f(self.device, which, &raw mut mhz)) }?;
        Ok(mhz)
    }

    /// W; the library counts in mW.
    fn power(&self) -> Result<f64, &'static str> {
        type Power = unsafe extern "C" fn(Handle, *mut c_uint) -> Code;
        let mut milliwatts = 0;
        // SAFETY: as above.
        unsafe { self.call("nvmlDeviceGetPowerUsage", |f: Power| f(self.device, &raw mut milliwatts)) }?;
        Ok(f64::from(milliwatts) / 1000.0)
    }

    /// °C.
    fn temperature(&self) -> Result<f64, &'static str> {
        type Temperature = unsafe extern "C" fn(Handle, c_int, *mut c_uint) -> Code;
        let mut degrees = 0;
        // SAFETY: as above.
        unsafe { self.call("nvmlDeviceGetTemperature", |f: Temperature| f(self.device, SENSOR_GPU, &raw mut degrees)) }?;
        Ok(f64::from(degrees))
    }

    fn reasons(&self) -> Result<u64, &'static str> {
        type Reasons = unsafe extern "C" fn(Handle, *mut u64) -> Code;
        let mut bits = 0;
        // The second is the name of newer drivers for the same.
        for name in ["nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons"] {
            // SAFETY: as above.
            match unsafe { self.call(name, |f: Reasons| f(self.device, &raw mut bits)) } {
                Err(MISSING) => {}
                other => return other.map(|()| bits),
            }
        }
        Err(MISSING)
    }

    fn memory_used(&self) -> Result<u64, &'static str> {
        type Memory = unsafe extern "C" fn(Handle, *mut MemoryInfo) -> Code;
        let mut info = MemoryInfo::default();
        // SAFETY: as above; the record is that of the function's first version.
        unsafe { self.call("nvmlDeviceGetMemoryInfo", |f: Memory| f(self.device, &raw mut info)) }?;
        Ok(info.used)
    }

    /// Calls a function of the library.
    ///
    /// # Safety
    /// `F` must be the function's type, and `call` keep its rules.
    unsafe fn call<F: Copy>(&self, name: &str, call: impl FnOnce(F) -> Code) -> Result<(), &'static str> {
        // SAFETY: the caller's word for the type.
        let function = unsafe { self.library.get::<F>(name) }.map_err(|_| MISSING)?;
        match call(*function) {
            0 => Ok(()),
            code => Err(explain(code)),
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: of this type since NVML 2; one that never started says so, and nobody listens.
        let _ = unsafe { self.call("nvmlShutdown", |f: unsafe extern "C" fn() -> Code| f()) };
    }
}

const MISSING: &str = "the library lacks the function";

/// What an `nvmlReturn_t` means.
fn explain(code: Code) -> &'static str {
    match code {
        3 => "not supported by the device",
        4 => "no permission",
        6 => "not found",
        9 => "the driver is not loaded",
        10 => "the driver does not answer in time",
        12 => "a library of the driver is missing",
        15 => "the GPU has fallen off the bus",
        17 => "the operating system or a control group blocks the device",
        18 => "kernel module and library are of different driver versions",
        _ => "an unknown error",
    }
}

/// Throttle reasons as a trace has them: words joined by commas, `none` without any. Bits without a word are in hexadecimal.
fn words(bits: u64) -> String {
    let known = REASONS.iter().fold(0, |all, (bit, _)| all | bit);
    let mut words: Vec<String> = REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, word)| (*word).to_owned()).collect();
    if bits & !known != 0 {
        words.push(format!("0x{:x}", bits & !known));
    }
    if words.is_empty() { "none".to_owned() } else { words.join(",") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_words_and_unknown_bits_stay_visible() {
        assert_eq!(words(0), "none");
        assert_eq!(words(1), "gpu_idle");
        assert_eq!(words(0x24), "sw_power_cap,sw_thermal_slowdown");
        assert_eq!(words(0x8000_0000_0000_0008), "hw_slowdown,0x8000000000000000");
    }
}
