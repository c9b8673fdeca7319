//! `specprof doctor`.

use assert_cmd::Command;

#[test]
fn doctor_says_the_same_in_text_and_json() {
    let json = Command::cargo_bin("specprof").unwrap().args(["doctor", "--json"]).output().unwrap();
    assert!(json.status.success());
    let report: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let text = String::from_utf8(Command::cargo_bin("specprof").unwrap().arg("doctor").output().unwrap().stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() >= 5);
    let narrow = Command::cargo_bin("specprof").unwrap().arg("doctor").env("COLUMNS", "80").output().unwrap().stdout;
    for line in String::from_utf8(narrow).unwrap().lines() {
        // Only a word that has no blank to break at, as a path, may stand out.
        let longest = line.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
        assert!(line.chars().count() <= longest.max(54) + 26, "{line}");
    }
    for check in checks {
        assert!(text.contains(check["name"].as_str().unwrap()), "{check}");
        assert!(["ok", "warning", "unavailable"].contains(&check["status"].as_str().unwrap()));
        assert!(!check["message"].as_str().unwrap().is_empty());
    }
}

/// The checks by name, with the driver's and NVML's stand-ins of these knobs; the exit code is 0 whatever they find.
fn emulated(nvml: bool, knobs: &[(&str, &str)]) -> serde_json::Map<String, serde_json::Value> {
    let driver = crate::kernels::emulator().parent().unwrap();
    let mut folders = driver.display().to_string();
    if nvml {
        folders.push_str(&format!(":{}", driver.join("nvml").display()));
    }
    let mut command = Command::cargo_bin("specprof").unwrap();
    let begin = std::time::Instant::now();
    let out = command.args(["doctor", "--json", "--timeout", "2"]).env("LD_LIBRARY_PATH", folders).envs(knobs.iter().copied()).output();
    let out = out.unwrap();
    assert!(out.status.success() && begin.elapsed().as_secs() < 60, "{knobs:?}: {out:?}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap().iter();
    checks.map(|check| (check["name"].as_str().unwrap().to_owned(), check.clone())).collect()
}

/// A driver that never returns, and each thing that can be missing, is named.
#[test]
fn doctor_never_hangs_and_names_what_is_missing() {
    for (nvml, knobs, name, status, words) in [
        (true, &[][..], "cuda backend", "warning", &["specprof emulator (no GPU)", "sm_90a", "mean nothing"][..]),
        (true, &[], "nvml", "ok", &["driver 570.86.10", "SM clock, memory clock, power, temperature, throttle reasons, memory used"]),
        (true, &[("EMU_INIT", "hang")], "cuda backend", "unavailable", &["did not answer within 2 s", "hangs in cuInit"]),
        (true, &[("EMU_FAIL", "cuDevicePrimaryCtxRetain:1:hang")], "cuda backend", "unavailable", &["hangs in cuDevicePrimaryCtxRetain"]),
        (true, &[("EMU_FAIL", "cuModuleLoadData:1:hang")], "cuda backend", "unavailable", &["hangs in cuModuleLoadData"]),
        (true, &[("EMU_NVML", "hang")], "nvml", "unavailable", &["NVML did not answer within 2 s"]),
        (true, &[("EMU_INIT", "100")], "cuda backend", "unavailable", &["CUDA_ERROR_NO_DEVICE", "CPU"]),
        (true, &[("EMU_INIT", "803")], "cuda backend", "unavailable", &["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"]),
        (true, &[("EMU_DEVICES", "0")], "cuda backend", "unavailable", &["the driver has no device"]),
        (true, &[("EMU_DRIVER", "11040")], "cuda backend", "unavailable", &["too old", "CUDA 11.4", "12.0", "driver 525"]),
        (false, &[], "nvml", "unavailable", &["libnvidia-ml.so.1 cannot be loaded"]),
        (true, &[("EMU_NVML", "4")], "nvml", "unavailable", &["does not start", "no permission"]),
        (true, &[("EMU_NVML", "18")], "nvml", "unavailable", &["different driver versions"]),
        (true, &[("EMU_NVML_UNSUPPORTED", "pr")], "nvml", "warning", &["unknown: power (not supported by the device), throttle reasons"]),
    ] {
        let checks = emulated(nvml, knobs);
        let check = &checks[name];
        assert_eq!(check["status"], status, "{knobs:?}: {check}");
        for word in words {
            assert!(check["message"].as_str().unwrap().contains(word), "{knobs:?}: {word}: {check}");
        }
        // What one library lacks says nothing of the other.
        assert_eq!(
            checks.contains_key("gpu memory"),
            !knobs.iter().any(|(knob, _)| matches!(*knob, "EMU_INIT" | "EMU_FAIL" | "EMU_DEVICES" | "EMU_DRIVER"))
        );
    }
}

#[test]
fn doctor_says_where_it_looked_for_cupti() {
    let folder = tempfile::tempdir().unwrap();
    let cupti = |named: &std::path::Path| {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let out = command.args(["doctor", "--json"]).env("SPECPROF_CUPTI", named).env("CUDA_HOME", "/nowhere/cuda").output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "cupti").unwrap().clone();
        check["message"].as_str().unwrap().to_owned()
    };
    let message = cupti(folder.path());
    let named = folder.path().display().to_string();
    if message.starts_with("libcupti.so is in none of") {
        assert!(message.contains(&named) && message.contains("/nowhere/cuda/extras/CUPTI/lib64"), "{message}");
    }
    std::fs::write(folder.path().join("libcupti.so.13"), b"").unwrap();
    assert_eq!(cupti(folder.path()), format!("{named}/libcupti.so.13"));
    assert_eq!(cupti(&folder.path().join("libcupti.so.13")), format!("{named}/libcupti.so.13"));
}

/// What measures a GPU says so when there is none, and takes no emulator for one.
#[test]
fn the_script_that_measures_a_gpu_refuses_to_measure_nothing() {
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/gpu/measure.sh");
    let program = assert_cmd::cargo::cargo_bin("specprof");
    let measure = |program: &std::path::Path, knobs: &[(&str, &str)]| {
        let folder = crate::kernels::emulator().parent().unwrap();
        let mut command = std::process::Command::new("sh");
        command.arg(&script).arg(program).env("LD_LIBRARY_PATH", folder).envs(knobs.iter().copied());
        let out = command.output().unwrap();
        assert!(out.stdout.is_empty(), "{out:?}");
        (out.status.code().unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, stderr) = measure(&program, &[]);
    assert!(code == 3 && stderr.contains("emulator: its times mean nothing"), "{code} {stderr}");
    let (code, stderr) = measure(&program, &[("EMU_DEVICES", "0")]);
    assert!(code == 3 && stderr.contains("no GPU that the CUDA engine can use") && stderr.contains("has no device"), "{code} {stderr}");
    let (code, stderr) = measure(std::path::Path::new("/nowhere/specprof"), &[]);
    assert!(code == 2 && stderr.contains("no such program"), "{code} {stderr}");
}

/// The whole script by the emulator, on the smallest shape: every part of it runs, and nothing of it is a time.
#[test]
fn the_script_that_measures_a_gpu_runs_to_its_end_dry() {
    let dir = tempfile::tempdir().unwrap();
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/gpu/measure.sh");
    let driver = crate::kernels::emulator().parent().unwrap();
    let mut command = std::process::Command::new("sh");
    command.arg(&script).arg(assert_cmd::cargo::cargo_bin("specprof")).current_dir(dir.path()).env("LD_LIBRARY_PATH", driver);
    command.env("SPECPROF_GPU_DRY", dir.path()).env("SPECPROF_GPU_SHAPES", "ling-nano").env("SPECPROF_CUPTI", driver.join("cupti"));
    let small =
        [("SPECPROF_GPU_CONTEXT", "20"), ("SPECPROF_GPU_TOKENS", "6"), ("SPECPROF_GPU_REPEATS", "1"), ("SPECPROF_GPU_PROMPT", "70")];
    let out = command.envs(small).output().unwrap();
    let (table, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!((out.status.code(), stderr.as_str()), (Some(0), ""), "{table}");
    let written: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(written.len(), 1, "{written:?}");
    assert!(written[0].to_str().unwrap().contains("specprof-emulator") && std::fs::read_to_string(&written[0]).unwrap() == table);
    assert!(table.contains("**Emulated: no device ran"), "{table}");
    for model in ["demo  | model", "synthetic:ling-nano --quant mxfp4 | model", "synthetic:ling-nano --quant fp8 | uniform"] {
        assert!(table.contains(&format!("| {model} | the same |")), "{model}: {table}");
    }
    for drafts in [1, 3, 5, 8] {
        assert!(table.contains(&format!("| ling-nano fp8 | {drafts} | unknown | unknown | unknown | unknown |")), "{table}");
    }
    for words in ["experts_gate_up_fp8_r16", "dense_bf16_r1", "of a pass of 16 rows and 64 experts a layer", "there are no times"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    assert!(table.contains("Passes of 70 tokens") && table.contains("| ling-nano fp8 | 0 | unknown | unknown | unknown | 0."), "{table}");
    // Operations are the model's; there is a row for each part, none of which has a time.
    let mut command = Command::cargo_bin("specprof").unwrap();
    let model = command.args(["model", "synthetic:ling-nano", "--quant", "fp8", "--prompt-rows", "70", "--json"]).output().unwrap();
    let model: serde_json::Value = serde_json::from_slice(&model.stdout).unwrap();
    let parts = model["prompt_pass"]["parts"].as_array().unwrap();
    assert!(parts.len() == 9, "{parts:?}");
    for part in parts {
        let giga = part["operations"].as_f64().unwrap() / 1e9;
        let row = format!("| {} {} | unknown | {giga:.2} | unknown |", part["component"].as_str().unwrap(), part["part"].as_str().unwrap());
        assert!(table.contains(&row), "{row}: {table}");
    }
    assert!(!table.contains("not run") && !table.contains("GB/s at which the device reads"), "{table}");
}
