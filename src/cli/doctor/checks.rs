//! The single checks.

use super::{Check, Status};
use crate::engine::cuda::{CuptiSearch, CuptiState};
use crate::metric::Unit;
use crate::record::nvml::Nvml;
use crate::record::{CudaDevice, machine};
use std::io::ErrorKind;
use std::path::PathBuf;

/// Checks that load nothing.
pub(super) fn safe() -> Vec<Check> {
    vec![processor(), memory(), gpu(), driver_library()]
}

fn processor() -> Check {
    let message = format!("{}, {} threads, {} kernels", machine::cpu_name(), machine::threads(), machine::simd());
    if machine::simd() == "portable" {
        return Check::new("cpu", Status::Warning, message)
            .hint("no AVX2 with FMA: the engine runs on its portable path, several times slower");
    }
    Check::new("cpu", Status::Ok, message)
}

fn bytes(count: u64) -> String {
    Unit::Bytes.show(count as f64)
}

fn memory() -> Check {
    match machine::memory() {
        Some(m) => Check::new("memory", Status::Ok, format!("{}, {} available", bytes(m.total), bytes(m.available))),
        None => Check::new("memory", Status::Warning, "unknown: /proc/meminfo cannot be read"),
    }
}

fn gpu() -> Check {
    let devices = machine::nvidia_devices();
    let denied = machine::unusable_devices(&devices);
    gpu_check(machine::nvidia_driver(), devices.len(), &denied)
}

fn gpu_check(driver: Option<String>, devices: usize, denied: &[(PathBuf, ErrorKind)]) -> Check {
    match (driver, devices, denied.first()) {
        (Some(version), n, None) if n > 0 => Check::new("gpu", Status::Ok, format!("{n} NVIDIA device(s), driver {version}")),
        (Some(version), n, Some((path, ErrorKind::PermissionDenied))) if n > 0 => {
            let text = format!("driver {version} is loaded, but there is no permission to use {}", path.display());
            Check::new("gpu", Status::Unavailable, text).hint("run as a member of the device's group (often video or render), or as root")
        }
        (Some(version), n, Some((path, kind))) if n > 0 => {
            let text = format!("driver {version} is loaded, but {} cannot be opened: {kind}", path.display());
            Check::new("gpu", Status::Unavailable, text)
                .hint("a container's device rules may forbid it (for Docker: --gpus all), or the device has failed: see `dmesg`")
        }
        (Some(version), ..) => Check::new("gpu", Status::Unavailable, format!("driver {version} is loaded, but there is no /dev/nvidia0"))
            .hint("in a container, pass the devices through (for Docker: --gpus all)"),
        (None, ..) => Check::new("gpu", Status::Unavailable, "no NVIDIA driver is loaded"),
    }
}

fn driver_library() -> Check {
    const FILE: &str = "libcuda.so";
    match machine::shared_library(FILE) {
        Some(path) => Check::new("libcuda", Status::Ok, path.display().to_string()),
        None => Check::new(
            "libcuda",
            Status::Unavailable,
            format!("{FILE} is not in the usual places or LD_LIBRARY_PATH; it comes with the driver"),
        ),
    }
}

/// Whether CUPTI times kernels. Loads it.
pub(super) fn cupti() -> Check {
    cupti_check(&CuptiState::find(), &CuptiSearch::new(), machine::profiling_restricted())
}

fn cupti_check(state: &CuptiState, search: &CuptiSearch, restricted: Option<bool>) -> Check {
    let library = state.library.as_ref().map(|(path, version)| format!("{path}, {version}"));
    let Some(reason) = &state.refusal else {
        // That the driver keeps its counters for administrators (RmProfilingAdminOnly) does not keep anybody from tracing.
        let library = library.unwrap_or_default();
        return match state.flaw {
            Some(flaw) => Check::new("cupti", Status::Warning, format!("{library}: {flaw}")),
            None => Check::new("cupti", Status::Ok, library),
        };
    };
    let what = match &library {
        Some(library) => format!("{library}: {reason}"),
        None if search.files.is_empty() && search.named.is_none() => {
            let places: Vec<String> = search.places.iter().map(|place| place.display().to_string()).collect();
            format!("libcupti.so is in none of {}, and the loader does not know it", places.join(", "))
        }
        None => reason.clone(),
    };
    let check = Check::new("cupti", Status::Unavailable, format!("{what}; kernels are timed by events"));
    match cupti_hint(reason, restricted) {
        Some(hint) => check.hint(hint),
        None => check,
    }
}

/// What to do about a refusal of CUPTI's.
fn cupti_hint(reason: &str, restricted: Option<bool>) -> Option<&'static str> {
    const HINTS: &[(&str, &str)] = &[
        ("no function", "the file is no CUPTI, or not a whole one: install that of the CUDA toolkit, or nvidia-cuda-cupti from PyPI"),
        ("or later is needed", "install the CUPTI of a newer toolkit, or nvidia-cuda-cupti from PyPI, and name it by SPECPROF_CUPTI"),
        ("cannot be loaded", "look at the file: it may be of another machine, or cut short"),
        ("without libcupti.so", "name the folder that has it, or the file"),
        ("not found", "it comes with the CUDA toolkit, or with nvidia-cuda-cupti from PyPI; name it by SPECPROF_CUPTI"),
        ("takes no subscriber", "CUPTI starts only where a driver has a device, and not with a driver that is older than itself"),
    ];
    if reason.contains("no permission") {
        return Some(match restricted {
            Some(true) => {
                "RmProfilingAdminOnly is 1, but tracing needs no more than a container's permission as a rule: try CAP_SYS_ADMIN first"
            }
            _ => "the driver does not say that it restricts profiling (RmProfilingAdminOnly): look at the container's rules",
        });
    }
    HINTS.iter().find(|(word, _)| reason.contains(word)).map(|(_, hint)| *hint)
}

/// The CUDA engine's device, or why it has none.
pub(super) fn cuda(found: Result<CudaDevice, String>) -> Vec<Check> {
    let device = match found {
        Ok(device) => device,
        Err(reason) => {
            let check = Check::new("cuda backend", Status::Unavailable, format!("{reason}; recording runs on the CPU"));
            return vec![match hint(&reason) {
                Some(hint) => check.hint(hint),
                None => check,
            }];
        }
    };
    let memory = match device.memory {
        Some((free, all)) => Check::new("gpu memory", Status::Ok, format!("{}, {} free", bytes(all), bytes(free))),
        None => Check::new("gpu memory", Status::Warning, "unknown: the driver does not say"),
    };
    let text = if device.emulated {
        format!("{} (no GPU) runs the kernels for {}: its times mean nothing", device.name, device.image)
    } else {
        format!(
            "{} runs the kernels for {}; `record --backend cuda` can be tried, it has run on no real GPU yet",
            device.name, device.image
        )
    };
    vec![memory, Check::new("cuda backend", Status::Warning, text)]
}

/// What to do about a driver's refusal.
fn hint(reason: &str) -> Option<&'static str> {
    const HINTS: &[(&str, &str)] = &[
        ("too old", "install a newer driver; the toolkit's version does not matter"),
        (
            "CUDA_ERROR_NO_DEVICE",
            "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container, pass the devices through (for Docker: --gpus all)",
        ),
        ("has no device", "look at CUDA_VISIBLE_DEVICES"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "kernel module and libcuda are of different versions: reboot, or reload the module"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", "on machines with NVSwitch the fabric manager must be running"),
        ("CUDA_ERROR_STUB_LIBRARY", "the toolkit's stub of libcuda was found: take its folder out of LD_LIBRARY_PATH"),
        ("CUDA_ERROR_NOT_PERMITTED", "no permission: look at the group and the mode of /dev/nvidia*"),
        ("CUDA_ERROR_OPERATING_SYSTEM", "no permission or no device node: look at the group and the mode of /dev/nvidia*"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "another process has the device's memory: see `nvidia-smi`"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", "another process has it in exclusive mode: see `nvidia-smi -q -d COMPUTE`"),
    ];
    HINTS.iter().find(|(word, _)| reason.contains(word)).map(|(_, hint)| *hint)
}

/// What NVML can tell of the first device. Loads it.
pub(super) fn nvml() -> Check {
    let nvml = match Nvml::open(None) {
        Ok(nvml) => nvml,
        Err(reason) => return Check::new("nvml", Status::Unavailable, format!("{reason}; recordings lack the device's telemetry")),
    };
    let mut text = nvml.driver_version().map_or_else(String::new, |version| format!("driver {version}: "));
    let (mut told, mut lacking) = (Vec::new(), Vec::new());
    for (name, read) in nvml.counters() {
        match read {
            Ok(()) => told.push(name.to_owned()),
            Err(why) => lacking.push(format!("{name} ({why})")),
        }
    }
    text.push_str(if told.is_empty() { "nothing can be read" } else { "" });
    text.push_str(&told.join(", "));
    if lacking.is_empty() {
        return Check::new("nvml", Status::Ok, text);
    }
    text.push_str(&format!("; unknown: {}", lacking.join(", ")));
    Check::new("nvml", if told.is_empty() { Status::Unavailable } else { Status::Warning }, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that keeps its counters for administrators is no obstacle; who may not trace is told by CUPTI alone.
    #[test]
    fn restricted_counters_keep_nobody_from_tracing() {
        let search = CuptiSearch::default();
        let library = Some(("/x/libcupti.so.13".to_owned(), "version 130001 (CUDA 13.0 update 1)".to_owned()));
        let open = CuptiState { library: library.clone(), refusal: None, flaw: None };
        for restricted in [Some(true), Some(false), None] {
            let check = cupti_check(&open, &search, restricted);
            assert!(check.status == Status::Ok && check.hint.is_none() && check.message.contains("130001"), "{check:?}");
        }
        let denied = CuptiState { library, refusal: Some("no permission to profile (error 35)".to_owned()), flaw: None };
        for (restricted, word) in [(Some(true), "CAP_SYS_ADMIN"), (Some(false), "container's rules"), (None, "container's rules")] {
            let check = cupti_check(&denied, &search, restricted);
            assert!(check.status == Status::Unavailable && check.hint.as_ref().unwrap().contains(word), "{check:?}");
        }
    }

    #[test]
    fn what_keeps_a_gpu_from_being_used_is_named() {
        let denied = [(PathBuf::from("/dev/nvidia0"), ErrorKind::PermissionDenied)];
        let broken = [(PathBuf::from("/dev/nvidiactl"), ErrorKind::NotFound)];
        let driver = || Some("570.86".to_owned());
        for (check, status, word) in [
            (gpu_check(None, 0, &[]), Status::Unavailable, "no NVIDIA driver"),
            (gpu_check(driver(), 0, &broken), Status::Unavailable, "no /dev/nvidia0"),
            (gpu_check(driver(), 1, &denied), Status::Unavailable, "no permission to use /dev/nvidia0"),
            (gpu_check(driver(), 1, &broken), Status::Unavailable, "/dev/nvidiactl cannot be opened"),
            (gpu_check(driver(), 2, &[]), Status::Ok, "2 NVIDIA device(s), driver 570.86"),
        ] {
            assert!(check.status == status && check.message.contains(word), "{check:?}");
        }
    }
}
