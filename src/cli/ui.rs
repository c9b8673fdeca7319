//! The terminal: the only file that prints. stdout is the result, stderr is everything else.

use super::exit::Failure;
use crate::trace::temporaries::{self, Kind, Making};
use crate::trace::{MANIFEST, schema};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// `--color`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ColorChoice {
    /// Colour on a terminal, unless NO_COLOR is set
    Auto,
    /// Colour also into pipes and files
    Always,
    /// No colour
    Never,
}

/// Streams, width, colour and verbosity of one invocation.
#[derive(Debug)]
pub struct Ui {
    color: anstream::ColorChoice,
    quiet: bool,
    verbose: u8,
    progress: bool,
}

impl Ui {
    /// The terminal as the global options want it.
    pub fn new(color: ColorChoice, quiet: bool, verbose: u8, no_progress: bool) -> Self {
        let color = match color {
            ColorChoice::Auto => anstream::ColorChoice::Auto,
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
        };
        color.write_global();
        let progress = !no_progress && !quiet && io::stderr().is_terminal() && std::env::var_os("CI").is_none();
        Self { color, quiet, verbose, progress }
    }

    /// Columns to lay tables out in: the terminal's, else `COLUMNS`, else 100.
    pub fn width(&self) -> usize {
        let from_env = || std::env::var("COLUMNS").ok().and_then(|c| c.trim().parse().ok());
        let terminal = || terminal_size::terminal_size_of(io::stdout()).map(|(w, _)| usize::from(w.0));
        terminal().or_else(from_env).unwrap_or(100).clamp(40, 400)
    }

    /// Whether what goes to stdout may carry colour.
    pub fn color(&self) -> bool {
        match self.color {
            anstream::ColorChoice::Always | anstream::ColorChoice::AlwaysAnsi => true,
            anstream::ColorChoice::Never => false,
            anstream::ColorChoice::Auto => anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never,
        }
    }

    /// Whether the locale can show block characters; otherwise bars are ASCII.
    pub fn unicode(&self) -> bool {
        ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(|key| std::env::var(key).ok().filter(|v| !v.is_empty())).is_none_or(|locale| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        })
    }

    /// Writes a piece of the result to stdout.
    ///
    /// # Errors
    /// [`Failure::BrokenPipe`] when nobody reads it, [`Failure::Environment`] when it cannot be written.
    pub fn result(&mut self, text: &str) -> Result<(), Failure> {
        anstream::AutoStream::new(io::stdout().lock(), self.color).write_all(text.as_bytes()).map_err(stdout_failure)
    }

    /// A remark on stderr, hidden by `--quiet`.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(anstream::stderr(), "{}", tame(text));
        }
    }

    /// A remark on stderr for `--verbose`.
    pub fn detail(&self, text: &str) {
        if self.verbose > 0 {
            let _ = writeln!(anstream::stderr(), "{}", tame(text));
        }
    }

    /// A warning on stderr.
    pub fn warn(&self, text: &str) {
        if !self.quiet {
            let yellow = anstyle::AnsiColor::Yellow.on_default().bold();
            let _ = writeln!(anstream::stderr(), "{yellow}warning:{yellow:#} {}", tame(text));
        }
    }

    /// The error that ends the command, on one line.
    pub fn error(&self, text: &str) {
        let red = anstyle::AnsiColor::Red.on_default().bold();
        let _ = writeln!(anstream::stderr(), "{red}error:{red:#} {}", tame(text));
    }

    /// A progress bar over `len` units (0 = unknown); invisible unless stderr is a terminal.
    pub fn progress(&self, len: u64, unit: &str) -> ProgressBar {
        let target = if self.progress { ProgressDrawTarget::stderr_with_hz(4) } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target((len > 0).then_some(len), target);
        let template = format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {unit} {{elapsed}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar
    }

    /// Ends stdout.
    ///
    /// # Errors
    /// As [`Ui::result`].
    pub fn flush(&mut self) -> Result<(), Failure> {
        io::stdout().flush().map_err(stdout_failure)
    }
}

/// Most characters of a message: names in it come from files.
const LONGEST_MESSAGE: usize = 2000;

/// A message that cannot steer the terminal: control characters and marks that turn the direction of writing are shown as `?`,
/// and what is too long is cut.
fn tame(text: &str) -> String {
    let mut out: String = text.chars().take(LONGEST_MESSAGE).map(|c| if steers(c) { '?' } else { c }).collect();
    if text.chars().nth(LONGEST_MESSAGE).is_some() {
        out.push_str("...");
    }
    out
}

fn steers(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn stdout_failure(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        Failure::BrokenPipe
    } else {
        Failure::Environment(format!("stdout: cannot write: {error}"))
    }
}

/// Why a result did not get out piece by piece.
#[derive(Debug)]
pub enum Streamed {
    /// It cannot be written; the output knows its own name.
    Output(io::Error),
    /// It cannot be made.
    Source(Failure),
}

impl From<io::Error> for Streamed {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl Streamed {
    /// The command's failure, where what cannot be written is called by `named`.
    fn failure(self, named: impl FnOnce(io::Error) -> Failure) -> Failure {
        match self {
            Self::Output(error) => named(error),
            Self::Source(failure) => failure,
        }
    }
}

/// Where a command's result goes: stdout, or a file that appears whole at the end or not at all.
#[derive(Debug)]
pub enum Output {
    /// `-o -`, or no `-o`.
    Stdout,
    /// A device, a pipe or a socket: written straight through, for nothing may be put into its place.
    Special {
        /// Open for writing.
        file: File,
        /// The path as given.
        path: PathBuf,
    },
    /// A temporary file beside the wanted one, renamed by [`Output::finish`].
    File {
        /// The open temporary file.
        file: File,
        /// Its path.
        temporary: PathBuf,
        /// The wanted path.
        path: PathBuf,
        /// A signal removes the temporary file.
        _making: Making,
    },
}

impl Output {
    /// Opens the output before the work starts, so that a bad path fails at once.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path.filter(|p| p.as_os_str() != "-") else { return Ok(Self::Stdout) };
        if path.is_dir() {
            return Err(Failure::Input(format!("{}: is a directory; name a file", path.display())));
        }
        if path.metadata().is_ok_and(|m| !m.is_file()) {
            let file = File::options().write(true).open(path).map_err(|e| output_failure(path, &e))?;
            return Ok(Self::Special { file, path: path.to_owned() });
        }
        // Through a link the file that it points to is replaced, not the link.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if path.file_name().is_none() {
            return Err(Failure::Input(format!("{}: not a file name", path.display())));
        }
        if lies_in_a_trace(&path) {
            return Err(Failure::Input(format!("{}: lies in a trace, which it would break; write elsewhere", path.display())));
        }
        temporaries::remove_leftovers(&path, Kind::File);
        let temporary = temporaries::place(&path, Kind::File);
        // Created anew, so that nothing that lies there under this name is written to.
        let _ = std::fs::remove_file(&temporary);
        let file = File::options().write(true).create_new(true).open(&temporary).map_err(|e| output_failure(&path, &e))?;
        // Tells processes of other machines that somebody writes it; where there are no locks, nobody is told.
        let _ = file.try_lock();
        let making = temporaries::making(&temporary);
        Ok(Self::File { file, temporary, path, _making: making })
    }

    /// Lets `write` write a result piece by piece, byte for byte as it is, and puts it into place.
    ///
    /// # Errors
    /// What `write` says, or when it cannot be written; then no file is left behind.
    pub fn stream<E: Into<Streamed>>(mut self, ui: &mut Ui, write: impl FnOnce(&mut dyn Write) -> Result<(), E>) -> Result<(), Failure> {
        // What is written last leaves the buffer here.
        let whole = |out: &mut dyn Write| {
            write(out).map_err(E::into)?;
            out.flush().map_err(Streamed::Output)
        };
        match &mut self {
            Self::Stdout => {
                ui.flush()?;
                whole(&mut io::BufWriter::new(io::stdout().lock())).map_err(|e| e.failure(stdout_failure))
            }
            Self::Special { file, path } => {
                whole(&mut io::BufWriter::new(&mut *file)).map_err(|e| e.failure(|e| special_failure(path, &e)))
            }
            Self::File { file, temporary, path, .. } => {
                whole(&mut io::BufWriter::new(&mut *file)).map_err(|e| e.failure(|e| output_failure(path, &e)))?;
                file.sync_all().map_err(|e| output_failure(path, &e))?;
                std::fs::rename(&*temporary, &*path).map_err(|e| output_failure(path, &e))
            }
        }
    }

    /// Refuses a file inside a trace that is being read, which would be a part of it no longer.
    ///
    /// # Errors
    /// When the output lies in `dir`.
    pub fn not_inside(self, dir: &Path) -> Result<Self, Failure> {
        if let Self::File { temporary, path, .. } = &self {
            let folder = temporary.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if folder.canonicalize().is_ok_and(|folder| dir.canonicalize().is_ok_and(|dir| folder.starts_with(dir))) {
                return Err(Failure::Input(format!("{}: lies in the trace that is read; write elsewhere", path.display())));
            }
        }
        Ok(self)
    }

    /// Refuses a file that is read as well, which would be lost.
    ///
    /// # Errors
    /// When the output is `input`.
    pub fn not_over(self, input: &Path) -> Result<Self, Failure> {
        if let Self::File { path, .. } = &self
            && path.canonicalize().is_ok_and(|path| input.canonicalize().is_ok_and(|input| path == input))
        {
            return Err(Failure::Input(format!("{}: is read by this command; write elsewhere", path.display())));
        }
        Ok(self)
    }

    /// Writes the whole result and puts it into place.
    ///
    /// # Errors
    /// When it cannot be written; then nothing is left behind.
    pub fn finish(mut self, ui: &mut Ui, text: &str) -> Result<(), Failure> {
        match &mut self {
            Self::Stdout => ui.result(text),
            Self::Special { file, path } => {
                let written = anstream::AutoStream::new(&mut *file, ui.color).write_all(text.as_bytes());
                written.map_err(|e| special_failure(path, &e))
            }
            Self::File { file, temporary, path, .. } => {
                // A file is not a terminal: colour is stripped unless it was asked for.
                let color = if ui.color == anstream::ColorChoice::Always { ui.color } else { anstream::ColorChoice::Never };
                anstream::AutoStream::new(&mut *file, color).write_all(text.as_bytes()).map_err(|e| output_failure(path, &e))?;
                file.sync_all().map_err(|e| output_failure(path, &e))?;
                std::fs::rename(&*temporary, &*path).map_err(|e| output_failure(path, &e))
            }
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Self::File { temporary, .. } = self {
            // Gone already when `finish` renamed it.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// A pipe may lose its reader, as stdout may.
fn special_failure(path: &Path, error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe { Failure::BrokenPipe } else { output_failure(path, error) }
}

/// A folder that is not there is a wrong argument, as a file that is not there; what the machine refuses is not.
fn output_failure(path: &Path, error: &io::Error) -> Failure {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::Input(format!("{}: cannot write: there is no folder {}; make it first", path.display(), folder.display()))
        }
        io::ErrorKind::NotADirectory => Failure::Input(format!("{}: cannot write: {} is no folder", path.display(), folder.display())),
        io::ErrorKind::InvalidFilename => Failure::Input(format!("{}: cannot write: {error}", path.display())),
        _ => Failure::Environment(format!("{}: cannot write: {error}", path.display())),
    }
}

/// Whether a file of that name would be one of a trace's: its manifest, or a part of a table.
fn lies_in_a_trace(path: &Path) -> bool {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    folder.ancestors().take(2).any(|dir| dir.join(MANIFEST).is_file() && dir.join(schema::STEPS).is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_cannot_steer_the_terminal() {
        assert_eq!(tame("a\x1b[2Jb\u{9b}c\u{202e}d\ne"), "a?[2Jb?c?d?e");
        assert_eq!(tame(&"x".repeat(LONGEST_MESSAGE + 1)).len(), LONGEST_MESSAGE + 3);
    }

    #[test]
    fn a_failed_write_is_told_from_a_failed_source_by_its_kind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o");
        let mut ui = Ui::new(ColorChoice::Never, true, 0, true);
        let mut stream = |error: Streamed| Output::open(Some(&path)).unwrap().stream(&mut ui, |_| Err::<(), _>(error)).unwrap_err();
        let full = stream(Streamed::Output(io::ErrorKind::StorageFull.into()));
        assert!(matches!(&full, Failure::Environment(text) if text.starts_with(&path.display().to_string())), "{full:?}");
        let corrupt = stream(Streamed::Source(Failure::Corrupt("cannot write: a text that is none of the output's".into())));
        assert!(matches!(&corrupt, Failure::Corrupt(text) if text.starts_with("cannot write")), "{corrupt:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(matches!(special_failure(&path, &io::ErrorKind::BrokenPipe.into()), Failure::BrokenPipe));
    }

    #[test]
    fn an_output_inside_the_trace_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("steps")).unwrap();
        let inside = dir.path().join("steps/part-00000.parquet");
        assert!(matches!(Output::open(Some(&inside)).unwrap().not_inside(dir.path()), Err(Failure::Input(_))));
        assert_eq!(std::fs::read_dir(dir.path().join("steps")).unwrap().count(), 0);
    }

    #[test]
    fn no_trace_is_written_into() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("t");
        std::fs::create_dir_all(trace.join("steps")).unwrap();
        let files = [trace.join(MANIFEST), trace.join("steps/part-00000.parquet"), trace.join("new.txt")];
        // Without a manifest it is a folder like any other.
        assert!(files.iter().all(|file| Output::open(Some(file)).is_ok()));
        std::fs::write(trace.join(MANIFEST), "{}").unwrap();
        for file in &files {
            assert!(matches!(Output::open(Some(file)), Err(Failure::Input(text)) if text.contains("lies in a trace")));
        }
        assert!(Output::open(Some(&dir.path().join("beside.txt"))).is_ok());
    }

    #[test]
    fn a_link_is_written_through() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let mut ui = Ui::new(ColorChoice::Never, true, 0, true);
        Output::open(Some(&link)).unwrap().finish(&mut ui, "new").unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "new");
        // Nothing but the two is left.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
