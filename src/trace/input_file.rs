//! Opening what a command line names as a file to read, so that nothing hangs and nothing that is no file is read as one.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// How long a pipe may be without anybody who writes into it.
const PATIENCE: Duration = Duration::from_secs(3);

/// Opens a file that is read once, from begin to end: a pipe is as good as a file. Of devices, what is read must be bounded.
///
/// # Errors
/// When it cannot be opened; of [`io::ErrorKind::InvalidInput`] with the reason when it is a socket, or a pipe that nobody writes into,
/// of [`io::ErrorKind::IsADirectory`] when it is a directory.
pub fn open(path: &Path) -> io::Result<File> {
    match kind(path)? {
        Kind::Pipe => open_pipe(path, PATIENCE),
        Kind::Other => File::open(path),
    }
}

/// Opens a file that is read more than once, or not in order.
///
/// # Errors
/// As [`open`]; of a pipe or a device, too.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let refuse = |what: &str| Err(invalid(format!("is {what}, and this is read more than once; save it as a file")));
    match kind(path)? {
        Kind::Pipe => refuse("a pipe"),
        Kind::Other if fs::metadata(path)?.is_file() => File::open(path),
        Kind::Other => refuse("a device"),
    }
}

enum Kind {
    Pipe,
    /// A file, or a device.
    Other,
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

fn kind(path: &Path) -> io::Result<Kind> {
    let found = fs::metadata(path)?.file_type();
    if found.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "is a directory, not a file"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if found.is_socket() {
            return Err(invalid("is a socket, not a file; save what it gives as a file".into()));
        }
        if found.is_fifo() {
            return Ok(Kind::Pipe);
        }
    }
    Ok(Kind::Other)
}

/// Opening a pipe waits for whoever writes into it: a thread does that, which ends with the process when nobody comes.
fn open_pipe(path: &Path, patience: Duration) -> io::Result<File> {
    let (sender, opened) = mpsc::channel();
    let name = path.to_owned();
    thread::Builder::new().name("open a pipe".into()).spawn(move || sender.send(File::open(name)))?;
    match opened.recv_timeout(patience) {
        Ok(file) => file,
        Err(_) => Err(invalid("is a pipe that nobody writes into".into())),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::Command;

    #[test]
    fn files_and_pipes_are_opened_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join(name);
        fs::write(of("file"), "text").unwrap();
        assert!(Command::new("mkfifo").arg(of("pipe")).status().unwrap().success());
        let _socket = std::os::unix::net::UnixListener::bind(of("socket")).unwrap();
        let mut text = String::new();
        open(&of("file")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        open_regular(&of("file")).unwrap();
        let told = |opened: io::Result<File>, kind: io::ErrorKind, why: &str| {
            let error = opened.unwrap_err();
            assert!(error.kind() == kind && error.to_string().contains(why), "{error:?}");
        };
        for open in [open, open_regular] {
            told(open(&of("socket")), io::ErrorKind::InvalidInput, "is a socket");
            told(open(dir.path()), io::ErrorKind::IsADirectory, "is a directory");
            told(open(&of("none")), io::ErrorKind::NotFound, "");
        }
        told(open_regular(&of("pipe")), io::ErrorKind::InvalidInput, "is a pipe, and this is read more than once");
        told(open_regular(Path::new("/dev/null")), io::ErrorKind::InvalidInput, "is a device");
        told(open_pipe(&of("pipe"), Duration::from_millis(50)), io::ErrorKind::InvalidInput, "nobody writes into");
        // Somebody who comes a little later; the thread that waited before may have the pipe as well, but reads nothing.
        assert!(Command::new("mkfifo").arg(of("later")).status().unwrap().success());
        let later = of("later");
        let writer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            fs::OpenOptions::new().write(true).open(later).unwrap().write_all(b"piped").unwrap();
        });
        text.clear();
        open(&of("later")).unwrap().read_to_string(&mut text).unwrap();
        writer.join().unwrap();
        assert_eq!(text, "piped");
    }
}
