//! The compiled kernels that are part of the program, and which of them a device takes. Made by `kernels/build.py`.

use super::device::failed;
use super::nvrtc;
use crate::engine::EngineError;
use crate::trace::manifest::Warning;
use cudarc::driver::{DriverError, result, sys};
use std::io::Read;
use std::path::Path;

macro_rules! image {
    ($file:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/prebuilt/", $file, ".gz"))
    };
}

/// Bytes that an image may have when it is unpacked; the largest has 3 MB.
const MAX_IMAGE: u64 = 64 << 20;

/// The image that a driver compiles for any device.
const PTX: &str = "compute_80";

/// Kernels on a device.
#[derive(Debug)]
pub(super) struct Loaded {
    pub module: sys::CUmodule,
    /// The architecture that they are for.
    pub image: &'static str,
    /// What a manifest says of them.
    pub warning: Option<Warning>,
}

/// Loads the packed image of [`packed`] on the device of the context, which is called `name`. Where the driver refuses code, it is given the
/// PTX.
///
/// # Errors
/// [`EngineError::Device`] when the driver takes neither.
pub(super) fn load(name: &str, (image, packed): (&'static str, &[u8])) -> Result<Loaded, EngineError> {
    let error = match module_of(&unpack(image, packed)?) {
        Ok(module) => return Ok(Loaded { module, image, warning: None }),
        Err(error) => failed(&format!("the kernels for {image} do not load on {name}"), error),
    };
    if image == PTX {
        return Err(EngineError::Device(format!("{error}; a newer driver may be needed")));
    }
    match module_of(&unpack(PTX, image!("kernels.ptx"))?) {
        Ok(module) => {
            let text = format!(
                "{error}: the driver compiled them from PTX of compute capability 8.0, which may be slower than code made for the device; a \
                 newer driver may take that"
            );
            Ok(Loaded { module, image: PTX, warning: Some(Warning::new("kernels_compiled_by_driver", text)) })
        }
        Err(second) => {
            let second = failed("nor does their PTX", second);
            Err(EngineError::Device(format!("{error}; {second}; a newer driver may be needed")))
        }
    }
}

/// Loads kernels that are built from the sources in `dir` for the architecture `image`.
///
/// # Errors
/// [`EngineError::Device`] when they cannot be built, then with the compiler's log, or the driver does not take them.
pub(super) fn load_built(name: &str, image: &'static str, dir: &Path) -> Result<Loaded, EngineError> {
    let built = nvrtc::build(dir, image)?;
    let refused = |e| failed(&format!("the kernels built from {} for {image} do not load on {name}", dir.display()), e);
    let module = module_of(&built.image).map_err(refused)?;
    Ok(Loaded { module, image, warning: Some(built.warning) })
}

/// A module of an unpacked image, in the current context.
fn module_of(image: &[u8]) -> Result<sys::CUmodule, DriverError> {
    // SAFETY: a whole image that ends with a zero byte.
    unsafe { result::module::load_data(image.as_ptr().cast()) }
}

/// The packed image for a compute capability, and its name: code for the same major version, else PTX that the driver compiles.
pub(super) fn packed(major: i32, minor: i32) -> Option<(&'static str, &'static [u8])> {
    Some(match (major, minor) {
        (8, ..=8) => ("sm_80", image!("sm_80.cubin")),
        (8, _) => ("sm_89", image!("sm_89.cubin")),
        (9, _) => ("sm_90a", image!("sm_90a.cubin")),
        (10, _) => ("sm_100", image!("sm_100.cubin")),
        (12, _) => ("sm_120", image!("sm_120.cubin")),
        (11.., _) => (PTX, image!("kernels.ptx")),
        _ => return None,
    })
}

/// An unpacked image, ended by a zero byte, as the driver wants PTX.
pub(super) fn unpack(name: &str, packed: &[u8]) -> Result<Vec<u8>, EngineError> {
    let mut image = Vec::new();
    let read = flate2::read::GzDecoder::new(packed).take(MAX_IMAGE).read_to_end(&mut image);
    read.map_err(|e| EngineError::Device(format!("the built-in kernels for {name} cannot be unpacked: {e}; reinstall specprof")))?;
    image.push(0);
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_capability_from_8_0_on_has_an_image_that_unpacks() {
        for (capability, name) in [
            ((8, 0), "sm_80"),
            ((8, 6), "sm_80"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90a"),
            ((10, 3), "sm_100"),
            ((11, 0), "compute_80"),
            ((12, 1), "sm_120"),
            ((13, 0), "compute_80"),
        ] {
            let (found, bytes) = packed(capability.0, capability.1).unwrap();
            assert_eq!(found, name);
            let image = unpack(found, bytes).unwrap();
            let start: &[u8] = if name == "compute_80" { b"//" } else { b"\x7fELF" };
            assert!(image.starts_with(start) && image.len() > 100_000, "{name}");
        }
        assert!(packed(7, 5).is_none());
        assert!(unpack("none", b"no gzip").is_err());
    }
}
