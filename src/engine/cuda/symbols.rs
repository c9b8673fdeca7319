//! The driver's functions that the engine calls. All are looked for before the first is called: one that is missing would be a panic
//! of the binding in the middle of a run.

use crate::engine::EngineError;
use cudarc::driver::sys;
use std::ffi::c_int;

/// Every function of libcuda that is called, in the order of a run.
pub(super) const USED: [&str; 40] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncGetAttribute",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuEventDestroy_v2",
];

/// Refuses a driver without one of the functions, with their names and the driver's version. The library must be there.
pub(super) fn check() -> Result<(), EngineError> {
    // SAFETY: the caller has found the library; its initialisers ran then.
    let library = unsafe { sys::culib() };
    // SAFETY: looks a symbol up; nothing is called.
    let has = |name: &str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok();
    let missing: Vec<&str> = USED.into_iter().filter(|name| !has(name)).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let more = if missing.len() > 1 { format!(" and {} more", missing.len() - 1) } else { String::new() };
    let version = version(&missing).map_or_else(|| "does not say its version".to_owned(), |v| format!("is of CUDA {v}"));
    Err(EngineError::Device(format!(
        "CUDA: libcuda.so.1 lacks a function that is needed, {first}{more}, and {version}: update the driver to one of CUDA 12 or later, \
         or look at what LD_LIBRARY_PATH finds"
    )))
}

/// The newest CUDA that the driver knows.
fn version(missing: &[&str]) -> Option<String> {
    if missing.contains(&"cuDriverGetVersion") {
        return None;
    }
    let mut version: c_int = 0;
    // SAFETY: the function is there, and may be called before the driver is started.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    (asked == sys::CUresult::CUDA_SUCCESS && version > 0).then(|| format!("{}.{}", version / 1000, version % 1000 / 10))
}
