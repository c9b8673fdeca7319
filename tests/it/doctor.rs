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

/// `doctor` looks for CUPTI where a recording does: in `SPECPROF_CUPTI`, a file or its folder, and only without it elsewhere.
#[test]
fn doctor_says_where_it_looked_for_cupti() {
    let folder = tempfile::tempdir().unwrap();
    let cupti = |named: &str| emulated(false, &[("SPECPROF_CUPTI", named), ("CUDA_HOME", "/nowhere/cuda")])["cupti"].clone();
    let named = folder.path().to_str().unwrap();
    let empty = cupti(named);
    let text = empty["message"].as_str().unwrap();
    assert!(empty["status"] == "unavailable" && text.contains(named) && text.contains("a folder without") && !text.contains("/nowhere"));
    let elsewhere = cupti("");
    let text = elsewhere["message"].as_str().unwrap();
    assert!(!text.starts_with("libcupti.so is in none of") || text.contains("/nowhere/cuda/extras/CUPTI/lib64"), "{text}");
    // A file of the right name is not enough.
    let file = folder.path().join("libcupti.so.13");
    std::fs::write(&file, b"").unwrap();
    for place in [named, file.to_str().unwrap()] {
        let check = cupti(place);
        let text = check["message"].as_str().unwrap();
        assert!(check["status"] == "unavailable" && text.contains("cannot be loaded") && text.contains("file too short"), "{check}");
    }
    // Nor is a library that lacks what is called.
    let source = "extern \"C\" int cuptiGetVersion(unsigned* v) { *v = 130001; return 0; }";
    std::fs::write(folder.path().join("part.cpp"), source).unwrap();
    let built = std::process::Command::new("g++").args(["-shared", "-fPIC", "-o"]).arg(&file).arg(folder.path().join("part.cpp")).status();
    assert!(built.unwrap().success());
    let check = cupti(named);
    let text = check["message"].as_str().unwrap();
    assert!(check["status"] == "unavailable" && text.contains("has no function cuptiGetTimestamp"), "{check}");
}

/// The profiler is opened, in a process of its own, and what keeps it from being used is named.
#[test]
fn doctor_opens_the_profiler() {
    let folder = crate::kernels::emulator().parent().unwrap().join("cupti");
    let file = folder.join("libcupti.so.13");
    for (knob, status, words) in [
        (("EMU_LAZY", "0"), "ok", &["version 130001 (CUDA 13.0 update 1)", file.to_str().unwrap()][..]),
        (("EMU_CUPTI_VERSION", "18"), "ok", &["version 18 (CUDA 12)"]),
        (("EMU_CUPTI_VERSION", "130000"), "warning", &["version 130000 (CUDA 13.0)", "--kernel-every", "update 1 or later"]),
        (("EMU_CUPTI_DENIED", "1"), "unavailable", &["version 130001", "no permission to profile", "timed by events"]),
        (("EMU_CUPTI_BUSY", "1"), "unavailable", &["version 130001", "another profiler is attached"]),
        (("EMU_CUPTI_VERSION", "17"), "unavailable", &["has version 17", "18 (CUDA 12.1) or later is needed"]),
        (("EMU_CUPTI_HANG", "1"), "unavailable", &["CUPTI did not answer within 2 s"]),
    ] {
        let checks = emulated(true, &[("SPECPROF_CUPTI", folder.to_str().unwrap()), knob]);
        let check = &checks["cupti"];
        assert_eq!(check["status"], status, "{knob:?}: {check}");
        for word in words {
            assert!(check["message"].as_str().unwrap().contains(word), "{knob:?}: {word}: {check}");
        }
        assert_eq!(check["hint"].is_null(), status != "unavailable" || knob.0 == "EMU_CUPTI_BUSY", "{check}");
        // What CUPTI lacks says nothing of the device.
        assert!(checks.contains_key("gpu memory") && checks["nvml"]["status"] == "ok", "{knob:?}");
    }
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
        let row =
            table.lines().find(|line| line.starts_with(&format!("| {model} | the same |"))).unwrap_or_else(|| panic!("{model}: {table}"));
        // Routed rows, those of other experts, and near-ties among them.
        let counts: Vec<u64> = row.split('|').skip(4).filter_map(|cell| cell.trim().parse().ok()).collect();
        assert!(counts.len() == 3 && counts[0] > 100 && counts[1..] == [0, 0], "{row}");
    }
    for drafts in [1, 3, 5, 8] {
        assert!(table.contains(&format!("| ling-nano fp8 | {drafts} | unknown | unknown | unknown | unknown |")), "{table}");
    }
    // The report of an emulated trace has no times.
    assert!(table.contains("## Where the time goes, ling-nano fp8") && table.contains("by a share of unknown."), "{table}");
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
