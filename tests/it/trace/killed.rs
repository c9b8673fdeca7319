//! A writer that is killed, or whose disk is full, leaves a trace that opens and says what it is.

use super::files;
use specprof::trace::synth::Synth;
use specprof::trace::{Ending, Probe, RequestEvent, StepEvent, Trace, TraceError, TraceWriter, WriterOptions, validate};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const DIR: &str = "SPECPROF_TEST_TRACE_DIR";
const FLUSH_MS: &str = "SPECPROF_TEST_FLUSH_MS";
const STEP_US: &str = "SPECPROF_TEST_STEP_US";
const STEPS: &str = "SPECPROF_TEST_STEPS";

fn now_ns() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()
}

/// Passes events on at the pace of a recording and says after each what was handed over.
struct Paced<'a> {
    writer: &'a mut TraceWriter,
    pause: Duration,
}

impl Probe for Paced<'_> {
    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        let id = step.step_id;
        self.writer.step(step)?;
        println!("step {id} {}", now_ns());
        std::io::stdout().flush().unwrap();
        // The first step alone, so that there is a commit before the disk is full.
        std::thread::sleep(if id == 0 { Duration::from_millis(300) } else { self.pause });
        Ok(())
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.writer.request(request)
    }
}

/// The recording process of the tests below, which run it with a place and a pace; by itself it records a
/// little and ends well.
#[test]
#[ignore = "the process that the tests of this file kill"]
fn recorder() {
    let number = |key: &str, otherwise: u64| std::env::var(key).ok().map_or(otherwise, |v| v.parse().unwrap());
    let temporary = tempfile::tempdir().unwrap();
    let dir = std::env::var_os(DIR).map_or_else(|| temporary.path().join("t"), Into::into);
    let steps = u32::try_from(number(STEPS, 20)).unwrap();
    let synth = Synth { requests: steps.div_ceil(10), verify_steps: 9, prompt_rows: 3, decode_every: 0, ..Synth::default() };
    let options = WriterOptions { flush_interval: Duration::from_millis(number(FLUSH_MS, 500)), ..WriterOptions::default() };
    let mut writer = TraceWriter::create(&dir, synth.manifest(), &options).unwrap();
    println!("ready");
    let mut paced = Paced { writer: &mut writer, pause: Duration::from_micros(number(STEP_US, 1000)) };
    let ended = synth.emit(&mut paced).and_then(|()| writer.finish(Ending::Complete).map(drop));
    match ended {
        Ok(()) => println!("complete"),
        Err(error) => println!("error {error}"),
    }
}

fn recorder_command(
    dir: &Path,
    flush_ms: u64,
    step_us: u64,
    steps: u64,
) -> (std::path::PathBuf, Vec<&'static str>, BTreeMap<&'static str, String>) {
    let environment = BTreeMap::from([
        (DIR, dir.to_str().unwrap().to_owned()),
        (FLUSH_MS, flush_ms.to_string()),
        (STEP_US, step_us.to_string()),
        (STEPS, steps.to_string()),
    ]);
    let arguments = vec!["trace::killed::recorder", "--exact", "--ignored", "--nocapture", "--test-threads=1"];
    (std::env::current_exe().unwrap(), arguments, environment)
}

/// Kills a recorder after some time; gives the moment and what it had handed over when.
fn kill_after(mut child: Child, after: Duration) -> (u128, Vec<(u32, u128)>) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().ends_with("ready")), "the recorder did not start");
    let reader = std::thread::spawn(move || {
        let parse = |line: String| {
            let mut words = line.strip_prefix("step ")?.split(' ');
            Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
        };
        lines.map_while(Result::ok).filter_map(parse).collect::<Vec<(u32, u128)>>()
    });
    std::thread::sleep(after);
    let killed = now_ns();
    child.kill().unwrap();
    child.wait().unwrap();
    (killed, reader.join().unwrap())
}

fn check_killed(seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    // Every other recorder commits all the time, so that kills fall into commits and merges.
    let flush_ms = if seed % 2 == 0 { 500 } else { 5 };
    let (program, arguments, environment) = recorder_command(&path, flush_ms, 1500, 100_000);
    let child = Command::new(program).args(arguments).envs(environment).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // Spread over 0.2 to 2.4 s without a pattern.
    let after = Duration::from_millis(200 + seed * 7919 % 2200);
    let (killed, handed_over) = kill_after(child, after);
    let trace = Trace::open(&path).unwrap();
    let manifest = trace.manifest();
    assert!(!manifest.complete && manifest.incomplete_reason.as_deref() == Some("recording") && manifest.token_hash.is_none());
    assert!(trace.warnings().iter().any(|w| w.code == "incomplete"));
    let steps = trace.steps().unwrap();
    let want = handed_over.iter().filter(|(_, at)| at + 1_000_000_000 <= killed).count();
    assert!(want > 0 || after < Duration::from_millis(1500), "the recorder did nothing");
    assert!(steps.len() >= want, "{} steps of the {want} that are older than a second", steps.len());
    assert!(steps.step_id.iter().copied().eq(0..steps.len() as u32), "a step is missing");
    let validation = validate(&trace).unwrap();
    assert!(validation.relaxed && validation.failed() == 0, "{validation:#?}");
}

#[test]
fn killed_at_any_moment_it_lacks_at_most_the_last_second() {
    // Few at a time: they share the disk, and each has to keep its promise.
    let moments: Vec<u64> = (0..24).collect();
    for some in moments.chunks(2) {
        std::thread::scope(|scope| some.iter().for_each(|&seed| drop(scope.spawn(move || check_killed(seed)))));
    }
}

#[test]
#[cfg(unix)]
fn a_full_disk_ends_the_recording_and_keeps_what_was_committed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let (program, arguments, environment) = recorder_command(&path, 20, 0, 20_000);
    // No file may become larger than 64 blocks (32 or 64 kB, by the shell); the signal that would kill is ignored.
    let script = format!("trap '' XFSZ; ulimit -f 64; exec '{}' {}", program.display(), arguments.join(" "));
    let begin = Instant::now();
    let output = Command::new("sh").arg("-c").arg(script).envs(environment).stderr(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let error = text.lines().find_map(|line| line.strip_prefix("error ")).unwrap_or_else(|| panic!("no error: {text}"));
    assert!(error.contains("cannot write") && error.contains(".parquet"), "{error}");
    let handed_over = text.lines().filter(|line| line.starts_with("step ")).count();
    assert!(handed_over < 20_000, "the engine was not stopped");
    assert!(begin.elapsed() < Duration::from_secs(60));

    let trace = Trace::open(&path).unwrap();
    let reason = trace.manifest().incomplete_reason.clone().unwrap();
    assert!(!trace.manifest().complete && reason.starts_with("cannot write"), "{reason}");
    let steps = trace.steps().unwrap();
    assert!(!steps.is_empty(), "the first commit is gone");
    assert_eq!(validate(&trace).unwrap().failed(), 0);
    assert!(files(&path).iter().all(|file| file.extension().is_none_or(|e| e != "tmp")), "{:?}", files(&path));
}
