//! NVRTC's library: where it is looked for, and the functions that are called. Only a developer who builds kernels needs it.

use crate::engine::EngineError;
use libloading::os::unix::{Library as Raw, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{OsString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// Names under which the loader may know it.
const SONAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// A program of NVRTC.
pub(super) type Program = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The functions that are called; each gives an `nvrtcResult`, 0 for success.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// Finds all of them in a library, or names the one that is missing.
            fn find(library: &Raw) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the types are those of NVRTC's header, with enumerations as `int`.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(|_| $symbol)?,)*
                })
            }
        }
    };
}

functions! {
    version = "nvrtcVersion": fn(*mut c_int, *mut c_int);
    create = "nvrtcCreateProgram": fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    compile = "nvrtcCompileProgram": fn(Program, c_int, *const *const c_char);
    destroy = "nvrtcDestroyProgram": fn(*mut Program);
    log_size = "nvrtcGetProgramLogSize": fn(Program, *mut usize);
    log = "nvrtcGetProgramLog": fn(Program, *mut c_char);
    cubin_size = "nvrtcGetCUBINSize": fn(Program, *mut usize);
    cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char);
    ptx_size = "nvrtcGetPTXSize": fn(Program, *mut usize);
    ptx = "nvrtcGetPTX": fn(Program, *mut c_char);
}

/// A loaded NVRTC; it stays loaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Library {
    pub functions: Functions,
    /// Major and minor.
    pub version: (c_int, c_int),
}

pub(super) fn refused(reason: &str) -> EngineError {
    EngineError::Device(format!("--kernel-src: {reason}"))
}

impl Library {
    /// Loads the first NVRTC that is found.
    pub fn load() -> Result<Self, EngineError> {
        let chosen = variable("SPECPROF_NVRTC");
        let candidates = match &chosen {
            Some(path) if path.is_dir() => files_named(path, "libnvrtc.so"),
            Some(path) => vec![path.clone()],
            None => candidates(),
        };
        for path in &candidates {
            // It looks for its built-ins by name: loaded before, they are found.
            for builtins in path.parent().map(|folder| files_named(folder, "libnvrtc-builtins.so")).unwrap_or_default() {
                // SAFETY: loads a library, whose initialisers are as safe as any library's.
                let _ = unsafe { Raw::open(Some(&builtins), RTLD_NOW | RTLD_GLOBAL) }.map(std::mem::forget);
            }
            // SAFETY: as above.
            if let Ok(library) = unsafe { Raw::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
                return Self::of(library, path);
            }
        }
        Err(refused(&match chosen {
            Some(path) => format!("SPECPROF_NVRTC names {}, where there is no libnvrtc that can be loaded", path.display()),
            None => "libnvrtc.so is not found (it is not part of the driver): pip install nvidia-cuda-nvrtc-cu12, or install the CUDA \
                     toolkit, and name the file or its folder in SPECPROF_NVRTC"
                .to_owned(),
        }))
    }

    fn of(library: Raw, path: &Path) -> Result<Self, EngineError> {
        let functions = Functions::find(&library)
            .map_err(|name| refused(&format!("{} has no function {name}; it needs CUDA 12 or later", path.display())))?;
        std::mem::forget(library);
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function is NVRTC's.
        match unsafe { (functions.version)(&raw mut major, &raw mut minor) } {
            0 => Ok(Self { functions, version: (major, minor) }),
            code => Err(refused(&format!("{} does not say its version (error {code})", path.display()))),
        }
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from)
}

/// Files that may be NVRTC, the likeliest first.
fn candidates() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect();
    folders.extend(listed(Path::new("/usr/local"), "cuda"));
    let mut places: Vec<PathBuf> = folders.iter().flat_map(|f| [f.join("lib64"), f.join("targets/x86_64-linux/lib")]).collect();
    if let Some(environment) = variable("VIRTUAL_ENV") {
        for python in listed(&environment.join("lib"), "python") {
            places.extend(["cu13", "cuda_nvrtc"].map(|part| python.join("site-packages/nvidia").join(part).join("lib")));
        }
    }
    let files = places.iter().flat_map(|place| SONAMES.map(|name| place.join(name))).filter(|file| file.is_file());
    files.chain(SONAMES.map(PathBuf::from)).collect()
}

/// What `folder` has whose name begins with `prefix`, the last first.
fn listed(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<PathBuf> = entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect();
    found.sort();
    found.reverse();
    found
}

fn files_named(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut files = listed(folder, prefix);
    files.retain(|path| path.is_file());
    files
}
