//! Where an imported trace goes: checked at the begin, put into place at the end.

use crate::trace::TraceError;
use std::fs;
use std::path::Path;

/// Whether a trace may be made at `out`.
pub fn check_free(out: &Path, force: bool) -> Result<(), TraceError> {
    let Ok(found) = fs::symlink_metadata(out) else { return Ok(()) };
    let not_a_trace = |reason: String| Err(TraceError::NotATrace { path: out.to_owned(), reason });
    let io = |source| TraceError::Io { path: out.to_owned(), action: "read the directory", source };
    if found.is_dir() {
        let names: Vec<String> =
            fs::read_dir(out).map_err(io)?.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
        if names.is_empty() {
            return Ok(());
        }
        if force {
            let own = |name: &&String| name.as_str() == crate::trace::MANIFEST || crate::trace::schema::TABLES.contains(&name.as_str());
            return match names.iter().find(|name| !own(name)) {
                Some(other) => {
                    not_a_trace(format!("--force replaces only a trace, and `{}` is not of one; give another -o", other.escape_debug()))
                }
                None => crate::trace::check_replaceable(out),
            };
        }
    } else if force {
        return not_a_trace("--force replaces only a trace directory, and this is a file or a link; give another -o".into());
    }
    Err(TraceError::Exists { path: out.to_owned() })
}

/// Puts the finished trace where it belongs; an old one goes only when the new one is whole.
pub fn place(temporary: &Path, out: &Path) -> Result<(), TraceError> {
    let io = |action| move |source| TraceError::Io { path: out.to_owned(), action, source };
    if out.is_dir() {
        let old = temporary.with_extension("replaced");
        fs::rename(out, &old).map_err(io("replace the old trace"))?;
        fs::rename(temporary, out).map_err(io("write"))?;
        // What stays behind is beside the trace and not of it.
        let _ = fs::remove_dir_all(old);
        return Ok(());
    }
    fs::rename(temporary, out).map_err(io("write"))
}
