//! `calibrate`, and what is made of its table: advice and step rates.

use assert_cmd::Command;
use serde_json::Value;
use specprof::engine::{Checkpoint, builtin};
use specprof::metric::costs::CostTable;
use std::path::Path;

fn run(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let out = Command::cargo_bin("specprof").unwrap().current_dir(dir).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

fn sample() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/samples/ling-nano").to_str().unwrap().to_owned()
}

/// A table of the emulator has every cell and the kernels of its passes, says what it is, and serves nobody who wants times.
#[test]
fn an_emulated_device_is_counted_and_never_timed() {
    let dir = tempfile::tempdir().unwrap();
    let driver = crate::kernels::emulator().parent().unwrap();
    let cupti = driver.join("cupti/libcupti.so.13");
    let emulated = |args: &[&str], more: &[(&str, &str)]| {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let out = command.current_dir(dir.path()).args(args).env("LD_LIBRARY_PATH", driver).envs(more.iter().copied()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
    };
    let args = ["calibrate", "--backend", "cuda", "--rows", "1,3", "--repeats", "3", "--context", "40", "--model"];
    let mut tables = Vec::new();
    for (timed_by, model, knobs) in [
        ("events", &["demo"][..], &[("SPECPROF_CUPTI", "/nowhere/libcupti.so"), ("EMU_LAZY", "1")][..]),
        ("cupti", &["demo"], &[("SPECPROF_CUPTI", cupti.to_str().unwrap())]),
        ("cupti", &["synthetic:ling-nano", "--quant", "fp8"], &[("SPECPROF_CUPTI", cupti.to_str().unwrap())]),
    ] {
        let (code, stdout, stderr) = emulated(&[&args[..], model, &["--json", "-o", "emulated.json"]].concat(), knobs);
        assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "", ""), "{timed_by}");
        let text = std::fs::read_to_string(dir.path().join("emulated.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["emulated"], &json["timed_by"], &json["draft"]), (&true.into(), &timed_by.into(), &Value::Null));
        assert_eq!(json["model"]["synthetic"], model.len() > 1);
        assert!(!text.contains("\"us\""), "a time: {text}");
        let table = CostTable::parse(&text).unwrap();
        assert!(table.device.contains("emulator") && table.engine.starts_with("specprof-cuda"), "{table:?}");
        assert_eq!(table.cells.iter().map(|c| (c.rows, c.union)).collect::<Vec<_>>(), [(1, 4), (3, 4), (3, 6), (3, 8), (3, 10), (3, 12)]);
        tables.push(table);
    }
    // The built-in model has 5 routed layers of 6; a pass has the same kernels whatever its rows and its union, in a graph or not.
    let demo = Checkpoint::load(builtin::ling_nano()).unwrap();
    let layers = demo.config.layers as u32;
    for cell in tables.iter().flat_map(|table| &table.cells) {
        let of = |name: &str| cell.kernels.get(name).copied().unwrap_or(0);
        // Logits, choice and plan in each; gate and up, down and sum of the experts; two norms a layer and the last one.
        assert_eq!((of("router"), of("experts"), of("shared")), (3 * (layers - 1), 3 * (layers - 1), 2 * (layers - 1)), "{cell:?}");
        assert_eq!((of("norm"), of("head"), of("embedding"), of("draft")), (2 * layers + 1, 1, 1, 0), "{cell:?}");
        assert!(of("kda") > 0 && of("mla") > 0, "{cell:?}");
    }
    assert_eq!(tables[0].cells, tables[1].cells);
    for args in [&["advise", &sample(), "--costs", "emulated.json"][..], &["export", "emulated.json", "--format", "sps"]] {
        let (code, stdout, stderr) = run(dir.path(), args);
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (2, "", 1), "{stderr}");
        assert!(stderr.contains("emulated.json") && stderr.contains("no times"), "{stderr}");
    }
    let (code, text, stderr) = emulated(&[&args[..], &["demo"]].concat(), &[]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(text.contains("emulated") && text.contains("kernels are counted") && !text.contains("µs") && !text.contains(" ms"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    // What does not fit and what is lost.
    let (code, _, stderr) = emulated(&[&args[..], &["synthetic:ling-3.0-flash", "--quant", "fp8"]].concat(), &[]);
    assert!(code == 3 && stderr.contains("--backend cuda") && stderr.contains("weights 128 GB"), "{stderr}");
    let knobs = [("SPECPROF_CUPTI", cupti.to_str().unwrap()), ("EMU_CUPTI_DROP", "5")];
    let (code, _, stderr) = emulated(&[&args[..], &["demo"]].concat(), &knobs);
    assert!(code == 3 && stderr.contains("the passes' times would be too short"), "{stderr}");
}

/// Passes that are timed leave their logits and hidden rows on the device; what the host is told of one is one small copy.
#[test]
fn timed_passes_bring_no_logits() {
    let dir = tempfile::tempdir().unwrap();
    let (driver, counts) = (crate::kernels::emulator().parent().unwrap(), dir.path().join("counts.json"));
    let brought = |repeats: &str, library: &str| -> std::collections::BTreeMap<u64, u64> {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let args = ["calibrate", "--backend", "cuda", "--model", "demo", "--rows", "1,3", "--unions", "4,8", "--context", "5", "--repeats"];
        let out = command.args(args).args([repeats, "--json"]).env("LD_LIBRARY_PATH", driver).env("SPECPROF_CUPTI", library);
        let out = out.env("EMU_COUNTS", &counts).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let json: Value = serde_json::from_slice(&std::fs::read(&counts).unwrap()).unwrap();
        let all = json["brought"].as_object().unwrap().iter();
        all.map(|(bytes, times)| (bytes.parse().unwrap(), times.as_u64().unwrap())).collect()
    };
    let config = Checkpoint::load(builtin::ling_nano()).unwrap().config;
    let rows_of = |bytes: u64, width: usize| bytes > 0 && bytes.is_multiple_of(width as u64 * 4);
    for library in ["/nowhere/libcupti.so", driver.join("cupti").to_str().unwrap()] {
        let (few, many) = (brought("2", library), brought("6", library));
        assert!(!many.keys().any(|&bytes| rows_of(bytes, config.vocab)), "{many:?}");
        let hidden = |all: &std::collections::BTreeMap<u64, u64>| -> u64 {
            all.iter().filter(|(bytes, _)| rows_of(**bytes, config.hidden)).map(|(_, times)| times).sum()
        };
        assert_eq!(hidden(&few), hidden(&many), "{few:?} {many:?}");
        // Three cells and a draft, each four times more.
        let copies = |all: &std::collections::BTreeMap<u64, u64>| all.values().sum::<u64>();
        assert_eq!(copies(&many) - copies(&few), 16, "{few:?} {many:?}");
    }
}

/// The bytes of kernels are those of the shapes: by hand for some, and by the union for the experts.
#[test]
fn kernels_have_the_bytes_of_their_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let driver = crate::kernels::emulator().parent().unwrap();
    let mut tables = Vec::new();
    // A file, and the folder of one.
    for (timed_by, library) in [("events", "/nowhere/libcupti.so"), ("cupti", driver.join("cupti").to_str().unwrap())] {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let args =
            ["calibrate", "--backend", "cuda", "--model", "synthetic:ling-nano", "--quant", "fp8", "--rows", "1,3", "--repeats", "2"];
        let out = command.args(args).args(["--context", "40", "--by-kernel", "--json", "-o"]).arg(dir.path().join("t.json"));
        let out = out.env("LD_LIBRARY_PATH", driver).env("SPECPROF_CUPTI", library).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = std::fs::read_to_string(dir.path().join("t.json")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["timed_by"], timed_by);
        tables.push(CostTable::parse(&text).unwrap());
    }
    // Graphs or not: the same kernels.
    assert_eq!(tables[0].cells, tables[1].cells);
    let (table, c) = (&tables[0], Checkpoint::load(builtin::ling_nano()).unwrap().config);
    assert!(table.stream_gb_per_s.is_none());
    let routed = (c.layers - c.dense_layers) as u64;
    for cell in &table.cells {
        let (rows, union, k) = (u64::from(cell.rows), u64::from(cell.union), c.experts_per_token as u64);
        let (hidden, inter, vocab) = (c.hidden as u64, c.expert_inter as u64, c.vocab as u64);
        let bytes = |component: &str, kernel: &str| {
            let found: Vec<_> = cell.by_kernel.iter().filter(|k| k.component == component && k.kernel.starts_with(kernel)).collect();
            assert_eq!(found.len(), 1, "{component} {kernel}: {cell:?}");
            assert!(found[0].time.is_none());
            (u64::from(found[0].launches), found[0].bytes.unwrap())
        };
        // One matrix in FP8: a byte a weight, a scale of four bytes for each 128 x 128.
        let matrix = hidden * inter + hidden.div_ceil(128) * inter.div_ceil(128) * 4;
        let slots = rows * k * (hidden + inter) * 4;
        assert_eq!(bytes("experts", "experts_gate_up_fp8"), (routed, routed * (2 * union * matrix + slots)));
        assert_eq!(bytes("experts", "experts_down_fp8"), (routed, routed * (union * matrix + slots)));
        assert_eq!(bytes("head", "dense_bf16"), (1, vocab * hidden * 2 + rows * (hidden + vocab) * 4));
        assert_eq!(bytes("embedding", "embed_bf16"), (1, rows * hidden * 6));
        // 40 tokens of context and the rows themselves, one split of 64 for each head.
        let (latent, rope, heads) = (c.kv_lora_rank as u64, c.qk_rope_head_dim as u64, c.heads as u64);
        let (layers, attended) = bytes("mla", "mla_attend");
        assert_eq!(attended, layers * ((40 + rows) * (latent + rope) + rows * heads * (2 * latent + rope + 2)) * 4);
        let by_component = |name: &str| cell.by_kernel.iter().filter(|k| k.component == name).map(|k| k.launches).sum::<u32>();
        assert!(cell.kernels.iter().all(|(name, n)| by_component(name) == *n), "{cell:?}");
        assert!(cell.by_kernel.iter().all(|k| k.bytes.is_some_and(|bytes| bytes > 0)), "{cell:?}");
    }
    let (code, _, stderr) = run(dir.path(), &["calibrate", "--model", "demo", "--by-kernel"]);
    assert!(code == 2 && stderr.contains("--by-kernel goes with --backend cuda"), "{stderr}");
}

/// A table with planted costs, 100 µs a pass besides 2 µs for each distinct expert of four layers and 7 µs for each further row.
fn planted(dir: &Path, model: &Value) -> String {
    let (k, layers) = (model["experts_per_token"].as_u64().unwrap(), model["moe_layers"].as_array().unwrap().len() as u64);
    let us = |rows: u64, union: u64| (100 + 2 * layers * union + 7 * (rows - 1)) as f64;
    let cells: Vec<Value> = [(1, k), (2, k), (2, 2 * k), (4, k), (4, 2 * k), (4, 4 * k)]
        .into_iter()
        .map(|(rows, union)| serde_json::json!({"rows": rows, "union": union, "pass": {"us": us(rows, union), "ci95": null}, "components": {}}))
        .collect();
    let table = serde_json::json!({
        "schema": "specprof.costs/1", "written_by": "test", "engine": "planted", "device": "planted", "context_len": 256, "repeats": 9, "seed": 0,
        "model": {"name": model["name"], "moe_layers": layers, "experts": model["experts"], "experts_per_token": k, "hidden_size": model["hidden_size"],
            "expert_size": model["expert_size"], "quantisation": model["quantisation"]},
        "draft": {"us": 11.0, "ci95": [10.0, 12.0]}, "cells": cells
    });
    std::fs::write(dir.join("planted.json"), table.to_string()).unwrap();
    "planted.json".to_owned()
}

#[test]
fn the_built_in_model_is_measured_and_the_table_serves_advice_and_rates() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["calibrate", "--model", "demo", "--rows", "1,2,4", "--repeats", "7", "--context", "64"];
    let (code, stdout, stderr) = run(dir.path(), &[&args[..], &["--json", "-o", "costs.json"]].concat());
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "", ""));
    let table = CostTable::parse(&std::fs::read_to_string(dir.path().join("costs.json")).unwrap()).unwrap();
    let cells: Vec<_> = table.cells.iter().map(|c| (c.rows, c.union)).collect();
    assert_eq!(cells, [(1, 4), (2, 4), (2, 5), (2, 6), (2, 7), (2, 8), (4, 4), (4, 7), (4, 10), (4, 13), (4, 16)]);
    let (code, text, _) = run(dir.path(), &args);
    assert!(code == 0 && text.contains("calibrated") && text.contains("a pass of 1 row; a draft"), "{text}");
    // Seven passes a cell are enough for intervals of the slopes, whatever they are on this machine.
    assert!(text.contains("for each distinct expert in one layer") && text.contains("(95 %: "), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");

    // Rates are the passes' times turned over.
    let (code, rates, stderr) = run(dir.path(), &["export", "costs.json", "--format", "sps"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let rates: Value = serde_json::from_str(&rates).unwrap();
    assert_eq!(rates["schema"], "specprof.sps/1");
    for (rate, cell) in rates["rates"].as_array().unwrap().iter().zip(&table.cells) {
        let pass = cell.pass.unwrap();
        assert_eq!(rate["steps_per_s"].as_f64().unwrap(), 1e6 / pass.us);
        let [low, high] = [0, 1].map(|i| rate["ci95"][i].as_f64().unwrap());
        assert!(low <= 1e6 / pass.us && 1e6 / pass.us <= high, "{rate}");
    }
    // Its slopes may have any sign on a loaded machine: then the advice says so instead of using it.
    let (code, advice, stderr) = run(dir.path(), &["advise", &sample(), "--costs", "costs.json", "--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{advice}");
    let advice: Value = serde_json::from_str(&advice).unwrap();
    let source = advice["advice"]["cost_source"].as_str();
    assert!(
        source == Some("calibrated") || advice["advice"]["measured_unused_because"].as_str().unwrap().contains("calibrated"),
        "{advice}"
    );
}

/// Advice by a table whose costs are known, beside the sum by hand over what the advice says of unions.
#[test]
fn advice_has_the_costs_of_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let manifest: Value = serde_json::from_slice(&std::fs::read(Path::new(&sample()).join("manifest.json")).unwrap()).unwrap();
    let (model, table) = (&manifest["model"], planted(dir.path(), &manifest["model"]));
    let (code, stdout, stderr) = run(dir.path(), &["advise", &sample(), "--costs", &table, "--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let advice: Value = serde_json::from_str(&stdout).unwrap();
    let advice = &advice["advice"];
    assert_eq!(advice["cost_source"], "calibrated");
    let (k, layers) = (model["experts_per_token"].as_f64().unwrap(), model["moe_layers"].as_array().unwrap().len() as f64);
    let decode = 100.0 + 2.0 * layers * k;
    let mut lengths = 0;
    for point in advice["by_draft_len"].as_array().unwrap() {
        let (n, union) = (point["draft_len"].as_f64().unwrap(), point["union_mean"].as_f64().unwrap());
        let verify = 100.0 + 2.0 * layers * union + 7.0 * n + 11.0 * n;
        let want = if n == 0.0 { 1.0 } else { verify / decode };
        assert!((point["step_ratio"].as_f64().unwrap() - want).abs() < 1e-9, "{point}: {want}");
        lengths += 1;
    }
    assert_eq!(lengths, 4);
    let (_, text, _) = run(dir.path(), &["advise", &sample(), "--costs", &table]);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("by a calibrated table of costs") && text.contains("another device"), "{text}");
}

/// The forecast of a model has a table's times beside the bytes, by hand: T + 2 L (U - k) + 7 (W - 1) over T.
#[test]
fn a_forecast_has_the_times_of_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let plain: Value = serde_json::from_str(&run(dir.path(), &["model", "demo", "--json"]).1).unwrap();
    let shape = &plain["shape"];
    let (layers, k) = (shape["moe_layers"].as_u64().unwrap(), shape["experts_per_token"].as_u64().unwrap());
    let model = serde_json::json!({"name": "demo", "moe_layers": (0..layers).collect::<Vec<_>>(), "experts": shape["experts"],
        "experts_per_token": k, "hidden_size": shape["hidden_size"], "expert_size": shape["expert_size"], "quantisation": shape["quantisation"]});
    let table = planted(dir.path(), &model);
    let (code, stdout, stderr) = run(dir.path(), &["model", "demo", "--costs", &table, "--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let timed: Value = serde_json::from_str(&stdout).unwrap();
    let decode = (100 + 2 * layers * k) as f64;
    let rows = timed["forecast"]["by_rows"].as_array().unwrap();
    assert!(rows.len() > 2);
    for row in rows {
        for case in [&row["uniform"], &row["maximum"]] {
            let (w, union) = (row["rows"].as_f64().unwrap(), case["union"].as_f64().unwrap());
            let want = (decode + 2.0 * layers as f64 * (union - k as f64) + 7.0 * (w - 1.0)) / decode;
            assert!((case["calibrated_ratio"].as_f64().unwrap() - want).abs() < 1e-9, "{case}: {want}");
        }
    }
    assert_eq!(timed["forecast"]["calibrated"]["device"], "planted");
    assert!(plain["forecast"]["calibrated"].is_null() && plain["forecast"]["by_rows"][0]["uniform"]["calibrated_ratio"].is_null());
    let (_, text, _) = run(dir.path(), &["model", "demo", "--costs", &table]);
    assert!(text.contains("timed") && text.contains("timed by planted on planted, after 256 tokens of context"), "{text}");
    let (code, _, stderr) = run(dir.path(), &["model", "ling-3.0-flash", "--costs", &table]);
    assert!(code == 2 && stderr.contains("planted.json: is of another model"), "{code} {stderr}");
}

/// A table of a disturbed machine is doubted wherever it is used, whatever its own file says.
#[test]
fn noisy_costs_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let manifest: Value = serde_json::from_slice(&std::fs::read(Path::new(&sample()).join("manifest.json")).unwrap()).unwrap();
    let table = planted(dir.path(), &manifest["model"]);
    let codes = |text: &str| -> Vec<String> {
        let value: Value = serde_json::from_str(text).unwrap();
        let warnings = value["warnings"].as_array().unwrap().iter().map(|w| w["code"].as_str().unwrap().to_owned());
        warnings.filter(|code| code.starts_with("costs_")).collect()
    };
    let everywhere = || {
        let (code, rates, stderr) = run(dir.path(), &["export", &table, "--format", "sps"]);
        assert_eq!((code, stderr.as_str()), (0, ""));
        let (code, advice, _) = run(dir.path(), &["advise", &sample(), "--costs", &table, "--json"]);
        assert_eq!(code, 0, "{advice}");
        assert_eq!(codes(&rates), codes(&advice));
        codes(&rates)
    };
    assert_eq!(everywhere(), Vec::<String>::new());
    let path = dir.path().join(&table);
    let mut value: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    // The widest pass is as fast as a decode pass, and nobody is sure.
    for (i, cell) in value["cells"].as_array_mut().unwrap().iter_mut().enumerate() {
        let us = if i == 5 { 60.0 } else { cell["pass"]["us"].as_f64().unwrap() };
        cell["pass"] = serde_json::json!({"us": us, "ci95": [us - 1.0, us + if i == 3 { 900.0 } else { 1.0 }]});
    }
    value["warnings"] = serde_json::json!([]);
    std::fs::write(&path, value.to_string()).unwrap();
    assert_eq!(everywhere(), ["costs_noisy", "costs_unclear", "costs_falling"]);
    let (_, text, _) = run(dir.path(), &["advise", &sample(), "--costs", &table]);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("costs_falling: 1 of 6 passes take less time than one of fewer rows"), "{text}");
}

#[test]
fn what_is_no_table_or_anothers_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let manifest: Value = serde_json::from_slice(&std::fs::read(Path::new(&sample()).join("manifest.json")).unwrap()).unwrap();
    let mut other = manifest["model"].clone();
    other["experts"] = 128.into();
    let table = planted(dir.path(), &other);
    std::fs::write(dir.path().join("not.json"), "{\"schema\": \"x\"}").unwrap();
    std::fs::write(dir.path().join("bytes"), [0xff, 0xfe, 0]).unwrap();
    let sample = sample();
    for (args, wanted, words) in [
        (vec!["advise", &sample, "--costs", &table], 2, "another model: experts 128"),
        (vec!["advise", &sample, "--costs", "not.json"], 4, "schema `x`"),
        (vec!["advise", &sample, "--costs", "bytes"], 4, "no text"),
        (vec!["advise", &sample, "--costs", "missing.json"], 2, "missing.json"),
        (vec!["export", &sample, "--format", "sps"], 2, "calibrate"),
        (vec!["export", &table, "--format", "sps", "--steps", "0..3"], 2, "--steps"),
        (vec!["calibrate", "--model", "demo", "--backend", "cuda"], 3, "--backend cuda"),
        (vec!["calibrate", "--model", "demo", "--rows", "17"], 2, "17"),
        (vec!["calibrate", "--model", "demo", "--context", "4000000"], 2, "has room for"),
        (vec!["calibrate", "--model", "nowhere"], 2, "nowhere"),
        (vec!["calibrate", "--model", "demo", "--unions", "1000"], 2, "--unions 1000"),
        (vec!["export", &table, "--format", "sps", "-o", &table], 2, "write elsewhere"),
    ] {
        let (code, stdout, stderr) = run(dir.path(), &args);
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (wanted, "", 1), "{args:?}: {stderr}");
        assert!(stderr.contains(words), "{args:?}: {stderr}");
    }
}

#[test]
fn rows_are_lists_and_ranges_and_a_made_up_model_is_measured_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let quick = ["--repeats", "2", "--context", "8", "--json"];
    let cells = |args: &[&str]| {
        let (code, stdout, stderr) = run(dir.path(), &[&["calibrate", "--model"], args, &quick].concat());
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        CostTable::parse(&stdout).unwrap().cells.iter().map(|c| (c.rows, c.union)).collect::<Vec<_>>()
    };
    let wanted = [(1, 4), (2, 4), (2, 6), (3, 4), (3, 6)];
    for rows in [&["1,2,3"][..], &["1", "2", "3"], &["1 2 3"], &["1-3"], &["1..=3"], &["1..4"], &["1,2", "3"]] {
        assert_eq!(cells(&[&["demo", "--unions", "4,6", "--rows"], rows].concat()), wanted, "{rows:?}");
    }
    assert_eq!(cells(&["synthetic:ling-nano", "--rows", "2", "--unions", "4"]), [(1, 4), (2, 4)]);
    for (rows, why) in [("0-3", "`0` is not a number from 1 to 16"), ("17", "`17` is not"), ("3-1", "backwards"), ("1,,2", "missing")] {
        let (code, _, stderr) = run(dir.path(), &["calibrate", "--model", "demo", "--rows", rows]);
        assert!(code == 2 && stderr.contains(why), "{stderr}");
    }
    for name in ["synthetic:", "synthetic:ling-9"] {
        let (code, _, stderr) = run(dir.path(), &["calibrate", "--model", name]);
        let told = format!("{name}: no such shape; name one of synthetic:ling-3.0-flash");
        assert!(code == 2 && stderr.contains(&told), "{stderr}");
    }
}
