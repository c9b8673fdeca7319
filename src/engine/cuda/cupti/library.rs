//! CUPTI's library: which version will do, and the functions that are called.

use super::search::CuptiSearch;
use crate::engine::EngineError;
use std::error::Error;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

/// The oldest CUPTI whose records name the node of a graph, that of CUDA 12.1.
const OLDEST: u32 = 18;

/// What errors of CUPTI begin with.
pub(super) const PREFIX: &str = "CUPTI: ";

pub(super) type RequestBuffer = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
pub(super) type CompleteBuffer = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
pub(super) type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The functions that are called; each gives a `CUptiResult`, 0 for success.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Functions {
            /// Finds all of them in a library, or names the one that is missing.
            fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the types are those of CUPTI's headers, with enumerations as `u32`.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(|_| $symbol)?,)*
                })
            }
        }
    };
}

functions! {
    version = "cuptiGetVersion": fn(*mut u32);
    timestamp = "cuptiGetTimestamp": fn(*mut u64);
    result_string = "cuptiGetResultString": fn(u32, *mut *const c_char);
    subscribe = "cuptiSubscribe": fn(*mut *mut c_void, Callback, *mut c_void);
    unsubscribe = "cuptiUnsubscribe": fn(*mut c_void);
    enable_callback = "cuptiEnableCallback": fn(u32, *mut c_void, u32, u32);
    register = "cuptiActivityRegisterCallbacks": fn(RequestBuffer, CompleteBuffer);
    enable = "cuptiActivityEnable": fn(u32);
    disable = "cuptiActivityDisable": fn(u32);
    flush = "cuptiActivityFlushAll": fn(u32);
    next_record = "cuptiActivityGetNextRecord": fn(*mut u8, usize, *mut *mut u8);
    dropped = "cuptiActivityGetNumDroppedRecords": fn(*mut c_void, u32, *mut usize);
    push = "cuptiActivityPushExternalCorrelationId": fn(u32, u64);
    pop = "cuptiActivityPopExternalCorrelationId": fn(u32, *mut u64);
    node_id = "cuptiGetGraphNodeId": fn(*mut c_void, *mut u64);
}

/// `cuptiActivityEnableDriverApi`: a function of the driver by its number, and whether its calls are traced.
pub(super) type OneDriverFunction = unsafe extern "C" fn(u32, u8) -> u32;

/// A loaded CUPTI. It stays loaded: its own threads may run to the end of the process.
#[derive(Debug, Clone)]
pub(super) struct Library {
    pub functions: Functions,
    /// Since CUDA 12.5: traces single functions of the driver.
    pub one_driver_function: Option<OneDriverFunction>,
    /// As `cuptiGetVersion` gives it: 18 to 28 up to CUDA 12.9, then 130000 and more.
    pub version: u32,
    /// Where it was found.
    pub path: String,
}

/// The CUDA release that a version of CUPTI belongs to.
pub(super) fn release(version: u32) -> String {
    // 18 to 28 are of CUDA 12; from CUDA 13 on the digits are the release's: major, minor and update.
    match (version / 10_000, version / 100 % 100, version % 100) {
        (0, ..) => "CUDA 12".to_owned(),
        (major, minor, 0) => format!("CUDA {major}.{minor}"),
        (major, minor, update) => format!("CUDA {major}.{minor} update {update}"),
    }
}

/// What is known to be wrong with a version that is used all the same, with the way out.
pub(super) fn flaw(version: u32) -> Option<&'static str> {
    // NVIDIA's notes on CUDA 13.0 update 1, whose version is 130001, name both as mended.
    (version == 130_000).then_some(
        "CUPTI of CUDA 13.0 before update 1 may stop for ever when it switches the records of kernels off, as --kernel-every does at every step, \
         and may crash in long runs of graphs: install that of update 1 or later and name it by SPECPROF_CUPTI",
    )
}

pub(super) fn refused(reason: &str) -> EngineError {
    EngineError::Device(format!("{PREFIX}{reason}"))
}

impl Library {
    /// Loads the first CUPTI that is found.
    pub fn load() -> Result<Self, EngineError> {
        let search = CuptiSearch::new();
        // What the loader says of a file that is there; that it does not know a name says nothing.
        let mut why = None;
        for path in &search.candidates() {
            // SAFETY: loads a library, whose initialisers are as safe as any library's.
            match unsafe { libloading::Library::new(path) } {
                Ok(library) => return Self::of(library, path),
                // The loader's own words, which name the file, are the error's source.
                Err(error) if search.files.contains(path) => {
                    why = why.or_else(|| Some(error.source().map_or_else(|| error.to_string(), ToString::to_string)));
                }
                Err(_) => {}
            }
        }
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        Err(refused(&format!("{}{why}", search.nothing())))
    }

    fn of(library: libloading::Library, path: &Path) -> Result<Self, EngineError> {
        let path = path.display().to_string();
        let functions = Functions::find(&library).map_err(|name| refused(&format!("{path} has no function {name}")))?;
        // SAFETY: the type is that of CUPTI's headers.
        let one = unsafe { library.get::<OneDriverFunction>(b"cuptiActivityEnableDriverApi\0") }.ok().map(|symbol| *symbol);
        std::mem::forget(library);
        let mut version = 0;
        // SAFETY: the function is CUPTI's.
        let asked = unsafe { (functions.version)(&raw mut version) };
        if asked != 0 {
            return Err(refused(&format!("{path} does not say its version (error {asked})")));
        }
        if version < OLDEST {
            return Err(refused(&format!(
                "{path} has version {version}, whose records do not name a graph's nodes; version {OLDEST} (CUDA 12.1) or later is needed"
            )));
        }
        Ok(Self { functions, one_driver_function: one, version, path })
    }

    /// The error of a call that gave `code`.
    pub fn failure(&self, what: &str, code: u32) -> EngineError {
        match code {
            39 => refused("another profiler is attached (Nsight, cuda-gdb, or a framework's own): end it, or use --kernels off"),
            35 | 40 => refused(
                "no permission to profile (error 35): as root set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module, or give the container CAP_SYS_ADMIN",
            ),
            _ => refused(&format!("{}, version {}: {what}: error {code} ({})", self.path, self.version, self.text(code))),
        }
    }

    /// What CUPTI calls an error.
    fn text(&self, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: CUPTI gives a static string, or none.
        let said = unsafe { (self.functions.result_string)(code, &raw mut text) };
        if said != 0 || text.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::{flaw, release};

    #[test]
    fn versions_are_of_releases() {
        let releases = [18, 28, 130_000, 130_001, 130_200].map(release);
        assert_eq!([18, 28, 130_000, 130_001, 130_200].map(|v| flaw(v).is_some()), [false, false, true, false, false]);
        assert_eq!(releases, ["CUDA 12", "CUDA 12", "CUDA 13.0", "CUDA 13.0 update 1", "CUDA 13.2"]);
    }
}
