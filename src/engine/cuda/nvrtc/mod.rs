//! Kernels built from a folder of sources when a run begins, instead of those that are part of the program: a developer's override. The
//! sources are put together as `kernels/build.py` does, so that the same sources and the same compiler make the same bytes.

mod library;

use crate::engine::EngineError;
use crate::trace::manifest::Warning;
use library::{Library, Program, refused};
use sha2::{Digest, Sha256};
use std::ffi::{CString, c_char, c_int};
use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Options of `kernels/build.py`: what is fused is written as fmaf, so that every target and the emulator add alike.
const OPTIONS: [&str; 3] = ["--std=c++17", "--fmad=false", "--ptxas-options=-v"];
/// Most files of a folder of sources, and most bytes of them; the project's own have some 0.2 MB.
const MAX_FILES: usize = 1000;
const MAX_BYTES: u64 = 16 << 20;
/// Most bytes of an image, and of a compiler's log.
const MAX_OUTPUT: usize = 256 << 20;

/// An image out of sources.
#[derive(Debug)]
pub(super) struct Built {
    /// Ended by a zero byte, as the driver wants PTX.
    pub image: Vec<u8>,
    /// What a manifest says of it.
    pub warning: Warning,
}

/// Compiles every `.cu` of `dir` for `arch`, as `sm_90a` or, for PTX, `compute_80`.
///
/// # Errors
/// [`EngineError::Device`] when the folder cannot be read, NVRTC is not found, or the sources do not compile; then with its log.
pub(super) fn build(dir: &Path, arch: &str) -> Result<Built, EngineError> {
    let sources = read(dir)?;
    let compiler = Library::load()?;
    let (major, minor) = compiler.version;
    let mut image = compile(&compiler, arch, &sources)
        .map_err(|log| refused(&format!("{}: NVRTC {major}.{minor} does not compile it for {arch}: {log}", dir.display())))?;
    let mut hash = String::new();
    for byte in Sha256::digest(&image) {
        let _ = write!(hash, "{byte:02x}");
    }
    image.push(0);
    let text = format!(
        "kernels were built from {} files of --kernel-src by NVRTC {major}.{minor} for {arch}, and are not those of the program (image of SHA-256 \
         {hash})",
        sources.len()
    );
    Ok(Built { image, warning: Warning::new("kernels_from_sources", text) })
}

/// Names and texts of the sources of a folder, in the order of their names.
fn read(dir: &Path) -> Result<Vec<(CString, CString)>, EngineError> {
    let named = |path: &Path, why: &str| refused(&format!("{}: {why}", path.display()));
    let is_source = |path: &PathBuf| path.extension().is_some_and(|e| e == "cu" || e == "cuh");
    let entries = fs::read_dir(dir).map_err(|e| named(dir, &e.to_string()))?;
    let mut paths: Vec<PathBuf> =
        entries.filter_map(Result::ok).map(|e| e.path()).filter(|p| is_source(p) && p.is_file()).take(MAX_FILES + 1).collect();
    if paths.len() > MAX_FILES {
        return Err(named(dir, &format!("has more than {MAX_FILES} sources")));
    }
    if !paths.iter().any(|path| path.extension().is_some_and(|e| e == "cu")) {
        return Err(named(dir, "has no .cu; name the folder of the kernels' sources"));
    }
    paths.sort();
    let mut left = MAX_BYTES;
    let mut sources = Vec::with_capacity(paths.len());
    for path in &paths {
        let mut text = Vec::new();
        let file = fs::File::open(path).map_err(|e| named(path, &e.to_string()))?;
        file.take(left + 1).read_to_end(&mut text).map_err(|e| named(path, &e.to_string()))?;
        left = left.checked_sub(text.len() as u64).ok_or_else(|| named(dir, &format!("has more than {MAX_BYTES} bytes of sources")))?;
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let no_zeros = |_| named(path, "is no text");
        sources.push((CString::new(name).map_err(no_zeros)?, CString::new(text).map_err(no_zeros)?));
    }
    Ok(sources)
}

/// The image, or why there is none: the compiler's log.
fn compile(compiler: &Library, arch: &str, sources: &[(CString, CString)]) -> Result<Vec<u8>, String> {
    let f = &compiler.functions;
    let mut main = Vec::new();
    for (name, _) in sources.iter().filter(|(name, _)| name.as_bytes().ends_with(b".cu")) {
        main.extend([b"#include \"", name.as_bytes(), b"\"\n"].concat());
    }
    let c_string = |bytes: Vec<u8>| CString::new(bytes).map_err(|e| e.to_string());
    let (main, of) = (c_string(main)?, c_string(b"kernels.cu".to_vec())?);
    let options = [format!("--gpu-architecture={arch}")].into_iter().chain(OPTIONS.map(str::to_owned));
    let options: Vec<CString> = options.map(|option| c_string(option.into_bytes())).collect::<Result<_, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let names: Vec<*const c_char> = sources.iter().map(|(name, _)| name.as_ptr()).collect();
    let texts: Vec<*const c_char> = sources.iter().map(|(_, text)| text.as_ptr()).collect();

    let mut program = Created { program: std::ptr::null_mut(), compiler };
    let count = c_int::try_from(sources.len()).map_err(|e| e.to_string())?;
    // SAFETY: as many headers as names, each ended by a zero; NVRTC copies what it keeps.
    let code = unsafe { (f.create)(&raw mut program.program, main.as_ptr(), of.as_ptr(), count, texts.as_ptr(), names.as_ptr()) };
    if code != 0 {
        return Err(format!("no program (error {code})"));
    }
    // SAFETY: the program was created above; as many options as are named.
    let code = unsafe { (f.compile)(program.program, options.len() as c_int, options.as_ptr()) };
    if code != 0 {
        let log = output(program.program, f.log_size, f.log).unwrap_or_default();
        let log = errors_of(&String::from_utf8_lossy(&log));
        return Err(if log.is_empty() { format!("error {code}, and no log") } else { log });
    }
    let image = if arch.starts_with("compute") {
        output(program.program, f.ptx_size, f.ptx)
    } else {
        output(program.program, f.cubin_size, f.cubin)
    };
    image.ok_or_else(|| "it gives no image".to_owned())
}

/// A log from its first error on, as one line.
fn errors_of(log: &str) -> String {
    let lines: Vec<&str> = log.trim_end_matches('\0').lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let first = lines.iter().position(|line| line.contains("error")).unwrap_or(0);
    lines[first..].join("; ")
}

type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// What a program has, by the two functions for it.
fn output(program: Program, size_of: SizeOf, bytes_of: BytesOf) -> Option<Vec<u8>> {
    let mut size = 0;
    // SAFETY: the program lives.
    let sized = unsafe { size_of(program, &raw mut size) };
    if sized != 0 || size > MAX_OUTPUT {
        return None;
    }
    let mut bytes = vec![0_u8; size];
    // SAFETY: room for as many bytes as were said.
    (unsafe { bytes_of(program, bytes.as_mut_ptr().cast()) } == 0).then_some(bytes)
}

/// A program that is destroyed when it is dropped.
struct Created<'l> {
    program: Program,
    compiler: &'l Library,
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created by NVRTC, and by nobody else destroyed.
            let _ = unsafe { (self.compiler.functions.destroy)(&raw mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_begin_with_their_first_error() {
        let log = "a.cuh(3): warning #177-D: unused\n\nb.cu(1): error: no x\n  x\n  ^\n\n1 error detected.\n\0";
        assert_eq!(errors_of(log), "b.cu(1): error: no x; x; ^; 1 error detected.");
        assert_eq!(errors_of("only this"), "only this");
        assert_eq!(errors_of("\0"), "");
    }

    #[test]
    fn folders_without_sources_and_texts_with_zeros_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let said = |dir: &Path| read(dir).unwrap_err().to_string();
        assert!(said(&dir.path().join("none")).contains("--kernel-src"));
        fs::write(dir.path().join("a.cuh"), "int x;").unwrap();
        assert!(said(dir.path()).contains("has no .cu"));
        fs::write(dir.path().join("b.cu"), "int y;").unwrap();
        fs::write(dir.path().join("README.md"), "none of the sources").unwrap();
        let names: Vec<_> = read(dir.path()).unwrap().into_iter().map(|(name, _)| name.into_string().unwrap()).collect();
        assert_eq!(names, ["a.cuh", "b.cu"]);
        fs::write(dir.path().join("c.cu"), b"a\0b").unwrap();
        assert!(said(dir.path()).contains("is no text"));
        fs::write(dir.path().join("c.cu"), vec![b' '; MAX_BYTES as usize + 1]).unwrap();
        assert!(said(dir.path()).contains("bytes of sources"));
    }
}
