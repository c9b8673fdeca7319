//! Where libcupti may lie: one search, for the engine and for `doctor`.

use std::path::{Path, PathBuf};

/// Names under which the loader may know it.
const SONAMES: [&str; 2] = ["libcupti.so.13", "libcupti.so.12"];

/// What links of toolkits and packages are called, with a version behind it or without.
const NAME: &str = "libcupti.so";

/// The folder of libraries in a toolkit's `targets`.
const TARGET: &str = if cfg!(target_arch = "aarch64") { "sbsa-linux" } else { "x86_64-linux" };

/// Where CUPTI was looked for, and what lies there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CuptiSearch {
    /// `SPECPROF_CUPTI`, a file or the folder of one: nothing else is looked at then.
    pub named: Option<PathBuf>,
    /// Folders that were looked into, in order.
    pub places: Vec<PathBuf>,
    /// Files that may be it, the likeliest first.
    pub files: Vec<PathBuf>,
}

impl CuptiSearch {
    /// Looks for it: where `SPECPROF_CUPTI` says, else in `CUDA_HOME`, `CUDA_PATH`, the toolkits in `/usr/local`, and the Python
    /// environment `VIRTUAL_ENV`.
    pub fn new() -> Self {
        match variable("SPECPROF_CUPTI") {
            Some(named) if named.is_dir() => Self { files: libraries(&named), places: vec![named.clone()], named: Some(named) },
            Some(named) => Self { files: vec![named.clone()], places: Vec::new(), named: Some(named) },
            None => Self::of(usual_places()),
        }
    }

    fn of(places: Vec<PathBuf>) -> Self {
        let files = places.iter().flat_map(|place| libraries(place)).collect();
        Self { named: None, places, files }
    }

    /// What is to be loaded, in turn: the files, and behind them the names that the loader may know a place for.
    pub fn candidates(&self) -> Vec<PathBuf> {
        let known = SONAMES.iter().filter(|_| self.named.is_none()).map(PathBuf::from);
        self.files.iter().cloned().chain(known).collect()
    }

    /// Why nothing was loaded, in words, with the way out.
    pub fn nothing(&self) -> String {
        match &self.named {
            Some(named) if self.files.is_empty() => format!("SPECPROF_CUPTI names {}, a folder without {NAME}", named.display()),
            Some(named) => format!("SPECPROF_CUPTI names {}, which cannot be loaded", named.display()),
            None if !self.files.is_empty() => format!("what was found of {NAME} cannot be loaded; name another by SPECPROF_CUPTI"),
            None => format!(
                "{NAME} is not found (it is not part of the driver): install the CUDA toolkit's extras, or pip install nvidia-cuda-cupti, and \
                 name the file or its folder in SPECPROF_CUPTI"
            ),
        }
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn usual_places() -> Vec<PathBuf> {
    let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect();
    let local = listed(Path::new("/usr/local"), "cuda");
    // Always named, so that it is said where one belongs.
    toolkits.extend(if local.is_empty() { vec![PathBuf::from("/usr/local/cuda")] } else { local });
    let mut places: Vec<PathBuf> =
        toolkits.iter().flat_map(|kit| [kit.join("extras/CUPTI/lib64"), kit.join("targets").join(TARGET).join("lib")]).collect();
    for python in variable("VIRTUAL_ENV").iter().flat_map(|environment| listed(&environment.join("lib"), "python")) {
        places.extend(["cu13", "cuda_cupti"].map(|part| python.join("site-packages/nvidia").join(part).join("lib")));
    }
    places
}

/// CUPTI's files in a folder: by the names that a loader knows, then by any other.
fn libraries(place: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = SONAMES.iter().map(|name| place.join(name)).filter(|file| file.is_file()).collect();
    let is_named = |path: &Path| path.file_name().is_some_and(|name| name == NAME || name.to_string_lossy().starts_with("libcupti.so."));
    for other in listed(place, NAME) {
        if is_named(&other) && other.is_file() && !files.contains(&other) {
            files.push(other);
        }
    }
    files
}

/// Entries of `parent` whose names begin with `prefix`, the last one first.
fn listed(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(parent) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        entries.filter_map(|e| e.ok()).filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect();
    found.sort();
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_s_libraries_come_by_the_names_that_a_loader_knows_first() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["libcupti.so", "libcupti.so.12", "libcupti.so.2025.2.1", "libcupti_static.a", "libcupti.sources"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        std::fs::create_dir(dir.path().join("libcupti.so.13")).unwrap();
        let search = CuptiSearch::of(vec![dir.path().join("nowhere"), dir.path().to_owned()]);
        let wanted = ["libcupti.so.12", "libcupti.so.2025.2.1", "libcupti.so"].map(|name| dir.path().join(name));
        assert_eq!(search.files, wanted);
        assert_eq!(search.candidates()[3..], SONAMES.map(PathBuf::from));
        assert!(search.nothing().contains("SPECPROF_CUPTI"));
        let named = CuptiSearch { named: Some(dir.path().to_owned()), ..CuptiSearch::default() };
        assert!(named.candidates().is_empty() && named.nothing().contains("a folder without libcupti.so"), "{}", named.nothing());
    }
}
