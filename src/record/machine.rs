//! What the machine is: processor, memory, and whether a GPU could be used.
//!
//! Everything is read from the kernel's own files; nothing is loaded and nothing is changed.

use std::fs;
use std::path::{Path, PathBuf};

/// Name of the processor as the kernel gives it.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        info.lines()
            .find(|l| l.starts_with(key))
            .and_then(|l| l.split_once(':'))
            .map(|(_, v)| v.trim().to_owned())
            .filter(|v| !v.is_empty())
    };
    field("model name").or_else(|| field("Model")).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Number of threads that the process may use at once.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The widest vector instructions that the engine has a path for and the processor offers.
pub fn simd() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return "avx512";
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return "avx2";
        }
    }
    "portable"
}

/// Host memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What can be had without swapping.
    pub available: u64,
}

/// Host memory; `None` where the kernel does not say.
pub fn memory() -> Option<Memory> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let field = |key: &str| -> Option<u64> {
        let line = text.lines().find(|l| l.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
}

/// Version of the NVIDIA kernel driver; `None` without one.
pub fn nvidia_driver() -> Option<String> {
    parse_driver_version(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

fn parse_driver_version(text: &str) -> Option<String> {
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Fri ..."
    let is_version = |w: &&str| w.contains('.') && w.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// NVIDIA device nodes, `/dev/nvidia0` and so on.
pub fn nvidia_devices() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/dev") else { return Vec::new() };
    let is_device = |name: &str| name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let mut found: Vec<_> = entries
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.file_name().and_then(|n| n.to_str()).is_some_and(is_device))
        .collect();
    found.sort();
    found
}

/// Whether the driver lets only administrators profile; `None` when it does not say.
pub fn profiling_restricted() -> Option<bool> {
    parse_profiling_restricted(&fs::read_to_string("/proc/driver/nvidia/params").ok()?)
}

fn parse_profiling_restricted(text: &str) -> Option<bool> {
    let line = text.lines().find(|l| l.starts_with("RmProfilingAdminOnly:"))?;
    line.split(':').nth(1)?.trim().parse::<u32>().ok().map(|v| v != 0)
}

/// NVIDIA device nodes that this process may not use, with the reason. `/dev/nvidiactl` is one of them.
pub fn unusable_devices(devices: &[PathBuf]) -> Vec<(PathBuf, std::io::ErrorKind)> {
    let control = PathBuf::from("/dev/nvidiactl");
    let looked_at = devices.iter().chain(std::iter::once(&control)).filter(|path| path.exists());
    // Opening changes nothing: the driver sets a device up on the first request to it.
    let denied = |path: &PathBuf| Some((path.clone(), fs::OpenOptions::new().read(true).write(true).open(path).err()?.kind()));
    looked_at.filter_map(denied).collect()
}

/// Path of a shared library in the usual places and in `LD_LIBRARY_PATH`, without loading it.
pub fn shared_library(name: &str) -> Option<PathBuf> {
    library_dirs().iter().find_map(|dir| library_in(dir, name))
}

/// Where the loader finds libraries of a driver or a toolkit, in order.
fn library_dirs() -> Vec<PathBuf> {
    const USUAL: &[&str] = &[
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/local/cuda/lib64",
    ];
    let extra = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    extra.split(':').filter(|p| !p.is_empty()).chain(USUAL.iter().copied()).map(PathBuf::from).collect()
}

fn library_in(dir: &Path, name: &str) -> Option<PathBuf> {
    let exact = dir.join(name);
    if exact.exists() {
        return Some(exact);
    }
    let mut versioned: Vec<_> = fs::read_dir(dir)
        .ok()?
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))))
        .collect();
    versioned.sort();
    versioned.pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kib() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(parse_meminfo(text), Some(Memory { total: 24_000_000 * 1024, available: 23_000_000 * 1024 }));
        assert_eq!(parse_meminfo("MemTotal: x kB\n"), None);
    }

    #[test]
    fn driver_files_are_read() {
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Fri Jan 17\nGCC version: 12";
        assert_eq!(parse_driver_version(version).as_deref(), Some("570.86.10"));
        assert_eq!(parse_profiling_restricted("EnableMSI: 1\nRmProfilingAdminOnly: 1\n"), Some(true));
        assert_eq!(parse_profiling_restricted("EnableMSI: 1\n"), None);
    }

    #[test]
    fn a_library_is_found_by_its_version_too() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libcuda.so.1"), b"").unwrap();
        std::fs::write(dir.path().join("libcudart.so"), b"").unwrap();
        assert_eq!(library_in(dir.path(), "libcuda.so"), Some(dir.path().join("libcuda.so.1")));
        assert_eq!(library_in(dir.path(), "libnvidia-ml.so"), None);
    }
}
