//! A device that fails, on the emulator: what is refused after a failed pass, and that a reset makes up for it; drivers that never return, or
//! refuse a call.

use crate::cuda::record;
use crate::kernels::{emulator, on_emulator};
use assert_cmd::Command;
use specprof::engine::cuda::{CudaSession, Device, DeviceWeights, Upload};
use specprof::engine::drafter::Drafts;
use specprof::engine::matrix::Matrix;
use specprof::engine::sampling::{Sampler, Sampling};
use specprof::engine::target::Target;
use specprof::engine::{Checkpoint, EngineError, LogitRows, NoTap, builtin};
use specprof::trace::{Trace, validate};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The token whose embedding is no number.
const DAMAGED: u32 = 7;
/// Room of the timelines.
const TOKENS: usize = 600;

/// The built-in model, one token of which is damaged: no prompt without it notices.
fn model() -> Checkpoint {
    let mut model = Checkpoint::load(builtin::ling_nano()).unwrap();
    let (rows, cols) = (model.weights.embedding.rows(), model.weights.embedding.cols());
    let mut values = vec![0.0; rows * cols];
    values.chunks_mut(cols).enumerate().for_each(|(row, to)| model.weights.embedding.decode_row(row, to));
    values[DAMAGED as usize * cols + 3] = f32::NAN;
    model.weights.embedding = Matrix::from_f32(rows, cols, &values).unwrap();
    model
}

/// `n` tokens, none of them damaged.
fn sound(n: u32) -> Vec<u32> {
    (0..n).map(|i| 10 + (i * 37) % 200).collect()
}

/// Greedy tokens after a prompt.
fn decoded(session: &mut CudaSession<'_>, prompt: &[u32]) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut part = prompt.to_vec();
    for _ in 0..6 {
        let forward = session.forward(&part, LogitRows::Last, &mut NoTap).unwrap();
        let best = (0..forward.vocab).max_by(|a, b| forward.logits[*a].total_cmp(&forward.logits[*b])).unwrap();
        session.commit(part.len(), &mut NoTap).unwrap();
        part = vec![best as u32];
        tokens.push(best as u32);
    }
    assert_eq!(session.len(), prompt.len() + 5);
    tokens
}

fn not_finite<T>(what: Result<T, EngineError>) -> String {
    match what {
        Err(EngineError::NotFinite { what }) => what,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("damage is not seen"),
    }
}

/// Nothing runs on the timeline, whatever is asked of it.
fn refuses(session: &mut CudaSession<'_>) {
    for tokens in [vec![11], sound(40)] {
        let error = session.forward(&tokens, LogitRows::Last, &mut NoTap).err().unwrap();
        assert!(matches!(error, EngineError::Request(_)), "{error:?}");
        assert_eq!(error.to_string(), "a pass over this timeline has failed; reset it first");
    }
}

fn with_sessions(run: impl FnOnce(&Rc<Device>, &dyn Fn() -> CudaSession<'static>)) {
    on_emulator(|device| {
        // Sessions borrow the configuration.
        let model: &'static Checkpoint = Box::leak(Box::new(model()));
        let mut told = |_| {};
        let upload = Upload::new(device, 1 << 20, &mut told).unwrap();
        let weights = Rc::new(DeviceWeights::upload(&upload, &model.config, &model.weights).unwrap());
        drop(upload);
        run(device, &|| CudaSession::new(device, &model.config, &weights, TOKENS, &[]).unwrap());
    });
}

/// A failed long pass leaves states that nothing takes back: the timeline refuses until it is reset, and then it is as good as a fresh one.
#[test]
fn a_failed_long_pass_is_refused_until_reset() {
    with_sessions(|_, fresh| {
        let wanted = decoded(&mut fresh(), &sound(40));
        for at in [0, 25] {
            let mut session = fresh();
            // Something is committed before, by a long pass and by a window.
            session.forward(&sound(30), LogitRows::None, &mut NoTap).unwrap();
            session.commit(30, &mut NoTap).unwrap();
            session.forward(&[12, 13], LogitRows::Last, &mut NoTap).unwrap();
            session.commit(2, &mut NoTap).unwrap();
            let mut prompt = sound(26);
            prompt[at] = DAMAGED;
            assert!(not_finite(session.forward(&prompt, LogitRows::Last, &mut NoTap)).contains("embedding"));
            refuses(&mut session);
            session.reset().unwrap();
            assert_eq!(session.len(), 0);
            assert_eq!(decoded(&mut session, &sound(40)), wanted, "damaged at {at}");
        }
    });
}

/// A prompt is cut into passes that are committed as they go; when a later one fails, which is no long one, those before are in the states.
#[test]
fn a_prompt_that_fails_behind_its_first_pass_is_refused_until_reset() {
    with_sessions(|_, fresh| {
        let wanted = decoded(&mut fresh(), &sound(40));
        let mut session = fresh();
        let mut prompt = sound(515);
        prompt[514] = DAMAGED;
        assert!(not_finite(session.forward(&prompt, LogitRows::Last, &mut NoTap)).contains("embedding"));
        refuses(&mut session);
        session.reset().unwrap();
        assert_eq!(decoded(&mut session, &sound(40)), wanted);
    });
}

/// A window that fails before anything is committed is rolled back like any other.
#[test]
fn a_failed_window_is_rolled_back() {
    with_sessions(|_, fresh| {
        let mut session = fresh();
        assert!(not_finite(session.forward(&[11, DAMAGED, 12], LogitRows::All, &mut NoTap)).contains("embedding"));
        let wanted = decoded(&mut fresh(), &sound(40));
        assert_eq!(decoded(&mut session, &sound(40)), wanted);
    });
}

/// A window that is judged on the device commits there: when it fails nothing takes its rows back.
#[test]
fn a_failed_judged_window_is_refused_until_reset() {
    with_sessions(|_, fresh| {
        let wanted = decoded(&mut fresh(), &sound(40));
        let sampling = Sampling::GREEDY;
        let mut session = fresh().choosing(sampling, false).unwrap();
        let mut sampler = Sampler::new(sampling, 1);
        let judge = session.judge().unwrap();
        judge.prompt_end(&sound(5), &mut sampler, &mut NoTap).unwrap();
        session.commit(5, &mut NoTap).unwrap();
        let drafts = Drafts::default();
        assert!(not_finite(session.judge().unwrap().window(DAMAGED, &drafts, &mut sampler, &mut NoTap)).contains("embedding"));
        refuses(&mut session);
        let again = session.judge().unwrap().window(11, &drafts, &mut sampler, &mut NoTap).err().unwrap();
        assert_eq!(again.to_string(), "a pass over this timeline has failed; reset it first");
        session.reset().unwrap();
        assert_eq!(decoded(&mut session, &sound(40)), wanted);
    });
}

/// Whatever opens the device tries it in another process first: a driver that never returns is an error like any other, which names the call.
#[test]
fn a_driver_that_never_returns_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/nano");
    let (checkpoint, file) = (golden.join("checkpoint"), golden.join("golden.safetensors"));
    let record = ["record", "--model", "demo", "--prompt", "x", "--backend", "cuda", "--out", "t"];
    let run = |args: &[&str], knobs: &[(&str, &str)]| {
        let mut command = Command::cargo_bin("specprof").unwrap();
        command.current_dir(dir.path()).args(args).env("LD_LIBRARY_PATH", emulator().parent().unwrap());
        let out = command.envs(knobs.iter().copied()).timeout(Duration::from_secs(120)).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert!(out.stdout.is_empty() && stderr.lines().count() == 1, "{args:?}: {stderr}");
        assert!(!dir.path().join("t").exists());
        (out.status.code(), stderr)
    };
    let second = ("SPECPROF_DRIVER_TIMEOUT", "1");
    for args in [
        &record[..],
        &["calibrate", "--model", "demo", "--backend", "cuda"],
        &["model", checkpoint.to_str().unwrap(), "--golden", file.to_str().unwrap(), "--backend", "cuda"],
    ] {
        for (knob, call) in [
            (("EMU_INIT", "hang"), "in cuInit"),
            (("EMU_FAIL", "cuDevicePrimaryCtxRetain:1:hang"), "in cuDevicePrimaryCtxRetain"),
            (("EMU_FAIL", "cuDevicePrimaryCtxRelease_v2:1:hang"), "in cuDevicePrimaryCtxRelease"),
        ] {
            let begin = Instant::now();
            let (code, stderr) = run(args, &[second, knob]);
            assert_eq!(code, Some(3), "{args:?}: {stderr}");
            for words in ["--backend cuda: the driver did not return within 1 s", call, "SPECPROF_DRIVER_TIMEOUT", "use --backend cpu"] {
                assert!(stderr.contains(words), "{args:?}: {stderr}");
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{args:?}");
        }
    }
    for seconds in ["soon", "0", "-1", "3601"] {
        let (code, stderr) = run(&record, &[("SPECPROF_DRIVER_TIMEOUT", seconds)]);
        assert!(code == Some(2) && stderr.contains(&format!("SPECPROF_DRIVER_TIMEOUT={seconds}: is no number of seconds")), "{stderr}");
    }
}

/// A driver that ends its caller ends the process that tries it.
#[test]
fn a_driver_that_ends_its_caller_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--model", "demo", "--prompt", "x", "--backend", "cuda", "--out", "t"];
    let (code, stdout, stderr) = record(dir.path(), &args, &[("EMU_FAIL", "cuDevicePrimaryCtxRetain:1:abort")]);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (3, "", 1), "{stderr}");
    assert!(
        ["(signal 6) in cuDevicePrimaryCtxRetain", "LD_LIBRARY_PATH", "use --backend cpu"].iter().all(|words| stderr.contains(words)),
        "{stderr}"
    );
}

/// Each call of the driver that a run makes, refused at its first or a later time: one line and exit 3, and what is left opens.
#[test]
fn a_driver_that_refuses_a_call_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--model", "demo", "--prompt", "def main():\n    return 1", "--max-new-tokens", "12", "--prefill-chunk", "20", "--backend"];
    let args = [&args[..], &["cuda", "--telemetry", "off", "--out", "t", "--force", "--kernels"]].concat();
    let mut begun = 0;
    // Those that only a wait or an event makes are called late; the first graph is launched behind two windows.
    for (function, kernels, calls, words) in [
        ("cuMemGetInfo_v2", "off", &[1][..], "does not say what memory is free"),
        ("cuStreamCreate", "off", &[1], "no stream"),
        ("cuModuleLoadData", "off", &[1], "a newer driver may be needed"),
        ("cuMemAlloc_v2", "off", &[1, 40, 200], "bytes of device memory, of which others may have taken some"),
        ("cuMemHostAlloc", "off", &[1, 4], "bytes of page-locked memory"),
        ("cuMemsetD8Async", "off", &[1, 4], "clearing device memory"),
        ("cuMemcpyHtoDAsync_v2", "off", &[1, 7], "a copy to the device"),
        ("cuMemcpyDtoHAsync_v2", "off", &[1, 5], "a copy from the device"),
        ("cuMemcpyDtoDAsync_v2", "off", &[1], "a copy on the device"),
        ("cuModuleGetFunction", "off", &[1, 15], "the image has no kernel"),
        ("cuLaunchKernel", "off", &[1, 60, 400], "kernel "),
        ("cuStreamSynchronize", "off", &[1, 4], "waiting for a pass"),
        ("cuGraphLaunch", "off", &[1], "a graph"),
        ("cuEventCreate", "auto", &[1, 100], "no event"),
    ] {
        for call in calls {
            let fail = format!("{function}:{call}:2");
            let (code, stdout, stderr) = record(dir.path(), &[&args[..], &[kernels]].concat(), &[("EMU_FAIL", &fail)]);
            let error = stderr.lines().last().unwrap_or_default();
            assert!(code == 3 && stdout.is_empty(), "{fail}: {code}: {stderr}");
            for wanted in ["--backend cuda: CUDA: ", words, "CUDA_ERROR_OUT_OF_MEMORY"] {
                assert!(error.contains(wanted), "{fail}: {stderr}");
            }
            assert!(!stderr.contains("panicked"), "{fail}: {stderr}");
            if dir.path().join("t").exists() {
                let trace = Trace::open(&dir.path().join("t")).unwrap();
                assert!(!trace.manifest().complete && validate(&trace).unwrap().failed() == 0, "{fail}: {:?}", trace.manifest());
                std::fs::remove_dir_all(dir.path().join("t")).unwrap();
                begun += 1;
            }
        }
    }
    assert!(begun >= 3, "{begun} runs had begun to record");
}

/// A capture may be refused at any of its calls: the run goes on kernel by kernel, with the same tokens, and says so.
#[test]
fn a_capture_that_fails_at_any_call_is_done_without() {
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "--model",
        "demo",
        "--prompt",
        "def main():",
        "--max-new-tokens",
        "24",
        "--backend",
        "cuda",
        "--telemetry",
        "off",
        "--force",
        "--kernels",
        "off",
        "--out",
        "t",
    ];
    let run = |fail: &str| {
        let (code, _, stderr) = record(dir.path(), &args, &[("EMU_FAIL", fail)]);
        assert_eq!(code, 0, "{fail}: {stderr}");
        Trace::open(&dir.path().join("t")).unwrap().manifest().clone()
    };
    let whole = run("");
    assert!(whole.token_hash.is_some() && whole.instrumentation.graphs.is_some());
    for function in ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"] {
        for call in [1, 2] {
            let manifest = run(&format!("{function}:{call}:801"));
            assert_eq!(manifest.token_hash, whole.token_hash, "{function}:{call}");
            assert_eq!(manifest.instrumentation.graphs.is_some(), call > 1, "{function}:{call}: graphs before the refusal are used");
            let refused: Vec<_> = manifest.warnings.iter().filter(|w| w.code == "cuda_graphs_refused").collect();
            assert!(refused.len() == 1 && refused[0].message.contains("CUDA_ERROR_NOT_SUPPORTED"), "{function}:{call}: {refused:?}");
        }
    }
}
