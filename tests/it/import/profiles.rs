//! Profiles: kernels by pass, alone and in the steps of a trace.

use super::*;
use rusqlite::Connection;
use specprof::trace::{Component, KernelEvent, Module, Phase};
use std::io::Write;

fn kernels(t: &Imported) -> Vec<(u32, KernelEvent)> {
    t.trace.kernels().unwrap()
}

fn copied(dir: &TempDir, name: &str, changes: &str) -> PathBuf {
    let path = dir.path().join("profile.sqlite");
    std::fs::copy(data(name), &path).unwrap();
    Connection::open(&path).unwrap().execute_batch(changes).unwrap();
    path
}

/// Kernels by step: correlation and name, in order of time.
fn by_step(t: &Imported) -> Vec<Vec<(u64, String)>> {
    let steps = t.trace.steps().unwrap();
    let mut found = vec![Vec::new(); steps.len()];
    for (step, kernel) in kernels(t) {
        let at = steps.step_id.binary_search(&step).unwrap();
        found[at].push((kernel.correlation_id.unwrap(), kernel.name.into_owned()));
    }
    found
}

#[test]
fn nsys_kernels_stand_in_the_pass_that_launched_them() {
    let t = import(&[text(&data("nsys/synthetic_node_mode_nvtx.sqlite"))]);
    let steps = t.trace.steps().unwrap();
    // Three passes, and a kernel in none.
    assert_eq!(steps.phase, [Phase::Prefill, Phase::Verify, Phase::Verify, Phase::Prefill]);
    assert_eq!((steps.rows.as_slice(), steps.context_len[1]), (&[7, 4, 4, 1][..], 46));
    assert!(t.warning("no_range").starts_with("1 kernel (5 us)"));
    // The expected list has for each kernel its correlation, and the step of its launch; both launches of a step without a
    // range of their own are in the step, too.
    let expected = json("nsys/synthetic_expected.json");
    let mut want = vec![BTreeMap::<u64, usize>::new(); 3];
    for row in expected["graph_node"].as_array().unwrap() {
        *want[row[4].as_u64().unwrap() as usize].entry(row[1].as_u64().unwrap()).or_default() += 1;
    }
    for (step, kernels) in by_step(&t).iter().take(3).enumerate() {
        for (correlation, n) in &want[step] {
            assert_eq!(kernels.iter().filter(|(c, _)| c == correlation).count(), *n, "step {step}, correlation {correlation}");
        }
    }
    let all = kernels(&t);
    assert_eq!(all.len(), 19);
    let moe: Vec<_> = all.iter().filter(|(_, k)| k.graph_node_id.is_none() && k.component == Component::Experts).collect();
    assert!(moe.len() == 3 && moe.iter().all(|(_, k)| k.layer == Some(0) && k.registers == Some(64) && k.grid == Some([64, 1, 1])));
    // From the first kernel to the last one.
    assert_eq!(steps.device_ns[0], Some(1_238_000 - 1_040_000));
    assert!(t.warning("batched_passes").starts_with("2 passes"));
    assert_eq!((t.manifest().device.kind.as_str(), t.manifest().device.name.as_str()), ("cuda", "NVIDIA GeForce RTX 3060"));
    t.report();
}

/// Neither k nor routes are in a profile: what is said of that names an option that there is, and its lines come back.
#[test]
fn a_profile_alone_is_told_and_exported_like_any_trace() {
    for (format, name) in [("nsys", "nsys/synthetic_node_mode_nvtx.sqlite"), ("kineto", "kineto/synthetic_cuda_graph_steps.json")] {
        let t = import(&[format, text(&data(name))]);
        let told = t.warning("experts_per_token_unknown");
        assert!(told.contains("--model-config") && !told.contains("--k"), "{told}");
        assert!(refused(&[format, text(&data(name)), "--k", "2"]).contains("--k says nothing of"));
        let back = super::round_trip::round_trip(&t.path);
        assert_eq!(kernels(&back), kernels(&t));
        back.report();
    }
}

/// A Kineto trace of one decode pass with these kernels, `(name, µs)`, as a replayed graph has them.
fn decode_pass(path: &Path, kernels: &[(&str, u32)]) {
    let launch = r#"{"ph":"X","cat":"cuda_runtime","name":"cudaGraphLaunch","pid":1,"tid":1,"ts":10,"dur":2,"args":{"correlation":7}}"#;
    let step = r#"{"ph":"X","cat":"user_annotation","name":"execute_context_0(0)_generation_4(4)","pid":1,"tid":1,"ts":1,"dur":90}"#;
    let mut events = vec![step.to_owned(), launch.to_owned()];
    let mut at = 20;
    for (name, us) in kernels {
        events.push(
            serde_json::json!({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 3, "ts": at, "dur": us,
                               "args": {"device": 0, "stream": 3, "correlation": 7}})
            .to_string(),
        );
        at += us + 1;
    }
    std::fs::write(path, format!(r#"{{"traceEvents":[{}]}}"#, events.join(","))).unwrap();
}

#[test]
fn kernels_that_nothing_tells_are_named_with_their_share() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.json");
    let known = [
        ("_topk_forward", 3),
        ("_combined_routing_compute", 3),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_8x64x64x1_swiglu", 40),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_8x64x64x1", 30),
        ("_finalize_matmul_scatter_bf16", 2),
        ("void vllm::rotary_embedding_kernel<float>(long*)", 1),
        ("kernel_unified_attention_3d", 3),
    ];
    let import_of = |more: &[(&str, u32)]| {
        decode_pass(&path, &[&known[..], more].concat());
        import(&["kineto", text(&path)])
    };
    let t = import_of(&[("some_gemm", 18)]);
    let mut us: BTreeMap<Component, i64> = BTreeMap::new();
    kernels(&t).iter().for_each(|(_, k)| *us.entry(k.component).or_default() += (k.end_ns - k.begin_ns) / 1000);
    let want = [(Component::Mla, 4), (Component::Router, 6), (Component::Experts, 72), (Component::Other, 18)];
    assert_eq!(us, want.into_iter().collect());
    assert!(t.manifest().warnings.iter().all(|w| w.code != "unknown_kernels"));
    let long = "x".repeat(500);
    let t = import_of(&[("some_gemm", 18), ("other_gemm", 20), ("third", 2), (&long, 8)]);
    let told = t.warning("unknown_kernels");
    assert!(told.starts_with("36.9 % of the kernels' time"), "{told}");
    assert!(told.contains("other_gemm (15.4 %), some_gemm (13.8 %), xxx") && told.contains("and 1 more names"), "{told}");
    assert!(told.contains("layerwise-nvtx") && told.len() < 400, "{told}");
    // Four requests are in the pass, and none of them is known.
    assert!(t.warning("batched_passes").starts_with("1 pass was of several requests"));
    let stderr = specprof().args(["import", "kineto", text(&path), "-o", text(&dir.path().join("again"))]).assert().success();
    let stderr = String::from_utf8(stderr.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("imported rows of unknown requests in 1 step"), "{stderr}");
    let shown = specprof().arg("report").arg(&t.path).assert().success();
    let shown = String::from_utf8(shown.get_output().stdout.clone()).unwrap();
    assert!(shown.contains("workload    unknown requests, 1 step (0 prefill, 1 decode, 0 verify), unknown tokens"), "{shown}");
}

#[test]
fn tokens_of_unknown_acceptance_are_no_count() {
    let t = import(&["kineto", text(&data("kineto/synthetic_cuda_graph_steps.json"))]);
    let shown = specprof().arg("report").arg(&t.path).assert().success();
    let shown = String::from_utf8(shown.get_output().stdout.clone()).unwrap();
    assert!(shown.contains("2 verify), unknown tokens"), "{shown}");
    assert!(t.warning("no_range").contains("counts as a prefill step"));
}

#[test]
fn every_form_of_an_nsys_export_gives_the_same() {
    let want = by_step(&import(&[text(&data("nsys/synthetic_node_mode_nvtx.sqlite"))]));
    assert_eq!(by_step(&import(&[text(&data("nsys/parquetdir"))])), want);
    let dir = tempfile::tempdir().unwrap();
    let renamed = copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", "ALTER TABLE NVTX_EVENTS RENAME TO NVTX_EVENTS_V3;");
    assert_eq!(by_step(&import(&[text(&renamed)])), want);
    // Texts by id only, texts of their own only; columns in another order.
    let by_id = "UPDATE NVTX_EVENTS SET textId = (SELECT max(id) + 1 FROM StringIds) WHERE text LIKE 'execute_context%';
        INSERT INTO StringIds SELECT max(id) + 1, 'execute_context_1(7)_generation_0(0)' FROM StringIds;
        UPDATE NVTX_EVENTS SET text = NULL WHERE text LIKE 'execute_context%';";
    assert_eq!(by_step(&import(&[text(&copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", by_id))])), want);
    let no_ids = "UPDATE NVTX_EVENTS SET text = (SELECT value FROM StringIds WHERE id = textId) WHERE text IS NULL;
        ALTER TABLE NVTX_EVENTS DROP COLUMN textId;";
    assert_eq!(by_step(&import(&[text(&copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", no_ids))])), want);
    // Start/end ranges are ranges; one without an end is open until the last kernel.
    let open = "UPDATE NVTX_EVENTS SET eventType = 60 WHERE text LIKE 'step[%'; UPDATE NVTX_EVENTS SET end = NULL WHERE start = 2000000;";
    assert_eq!(by_step(&import(&[text(&copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", open))])), want);
}

#[test]
fn correlations_are_of_a_process() {
    // A second process with the same ids, whose launches are in no range, on another device.
    let dir = tempfile::tempdir().unwrap();
    let second = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start, end, eventClass, globalTid + (100 << 24), correlationId, nameId, returnValue, callchainId
            FROM CUPTI_ACTIVITY_KIND_RUNTIME;
        CREATE TEMP TABLE k AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL;
        UPDATE k SET globalPid = globalPid + (100 << 24), deviceId = 1;
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM k;";
    let path = copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", second);
    let want = by_step(&import(&[text(&data("nsys/synthetic_node_mode_nvtx.sqlite"))]));
    let t = import(&[text(&path)]);
    assert_eq!(by_step(&t), want);
    assert!(t.warning("other_devices").starts_with("19 rows"));
    let other = import(&[text(&path), "--device", "1"]);
    assert_eq!(kernels(&other).len(), 19);
    assert_eq!(other.trace.steps().unwrap().len(), 1);
    assert!(other.warning("no_step_ranges").contains("no range names a forward pass"));
    assert!(refused(&[text(&path), "--device", "7"]).contains("no kernels of device 7"));
}

#[test]
fn what_an_nsys_export_lacks_is_said_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let graphs = import(&[text(&data("nsys/synthetic_graph_mode_nvtx.sqlite"))]);
    assert!(graphs.warning("graphs_only").contains("--cuda-graph-trace=node"));
    assert_eq!(kernels(&graphs).iter().filter(|(_, k)| k.name == "graph").count(), 3);
    let no_nvtx = import(&[text(&copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", "DROP TABLE NVTX_EVENTS;"))]);
    assert_eq!((kernels(&no_nvtx).len(), no_nvtx.trace.steps().unwrap().len()), (19, 1));
    no_nvtx.warning("no_nvtx");
    let no_kernels = copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL;");
    assert!(refused(&[text(&no_kernels)]).contains("no kernels, although there are 9 launches"));
    // One kernel's ranges are gone.
    let one = copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId = 100;");
    let t = import(&[text(&one)]);
    assert!(t.warning("no_range").starts_with("2 kernels (35 us)"));
    assert_eq!((kernels(&t).len(), t.trace.steps().unwrap().len()), (19, 4));
    let zeros = dir.path().join("x.sqlite");
    std::fs::write(&zeros, [0; 4096]).unwrap();
    assert!(refused(&[text(&zeros)]).contains("interrupted export"));
    let report = dir.path().join("x.nsys-rep");
    std::fs::write(&report, "anything").unwrap();
    assert!(refused(&[text(&report)]).contains("nsys export --type=sqlite"));
    let other = dir.path().join("other.sqlite");
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE t(a);").unwrap();
    assert!(refused(&[text(&other)]).contains("none of the tables"));
}

#[test]
fn kineto_traces_in_all_their_forms() {
    let t = import(&[text(&data("kineto/synthetic_cuda_graph_steps.json"))]);
    let steps = t.trace.steps().unwrap();
    assert_eq!((steps.phase.as_slice(), steps.rows[0]), (&[Phase::Prefill, Phase::Verify, Phase::Verify, Phase::Prefill][..], 8));
    let want = by_step(&t);
    // What drafts for a pass that is not in the profile any more is in none of it.
    assert_eq!(want.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 5, 7]);
    let (_, first) = &kernels(&t)[0];
    assert_eq!((first.begin_ns, first.end_ns), (1_795_956_000_001_030_125, 1_795_956_000_001_055_625));
    assert_eq!((first.stream, first.graph_node_id, t.manifest().device.name.as_str()), (Some(7), None, "NVIDIA H200"));
    assert_eq!(by_step(&import(&[text(&data("kineto/synthetic_bare_array.json"))])), want);
    // Packed, in two members.
    let dir = tempfile::tempdir().unwrap();
    let plain = std::fs::read(data("kineto/synthetic_cuda_graph_steps.json")).unwrap();
    let pack = |bytes: &[u8]| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    };
    let mut packed = pack(&plain[..5000]);
    packed.extend(pack(&plain[5000..]));
    let path = dir.path().join("t.json.gz");
    std::fs::write(&path, &packed).unwrap();
    assert_eq!(by_step(&import(&[text(&path)])), want);
    // Cut off, as text and as a packed file: what is whole is there.
    for bytes in [pack(&plain[..9000]), packed[..packed.len() - 700].to_vec()] {
        std::fs::write(&path, bytes).unwrap();
        let cut = import(&[text(&path)]);
        cut.warning("profile_cut");
        assert!(!kernels(&cut).is_empty() && kernels(&cut).len() < 22);
    }
    import(&[text(&data("kineto/NEGATIVE_truncated_array.json"))]).warning("profile_cut");
    let nan = import(&[text(&data("kineto/NEGATIVE_nan_arg.json"))]);
    assert_eq!(kernels(&nan).len(), 1);
    nan.warning("json_repaired");
    // Nothing of a GPU in it, but readable.
    assert!(refused(&[text(&data("kineto/NEGATIVE_invalid_escape.json"))]).contains("no GPU events"));
    let launches = r#"{"traceEvents":[{"ph":"X","cat":"cuda_runtime","name":"hipGraphLaunch","pid":1,"tid":1,"ts":1,"dur":1,"args":{"correlation":5}}]}"#;
    std::fs::write(dir.path().join("l.json"), launches).unwrap();
    assert!(refused(&[text(&dir.path().join("l.json"))]).contains("kernels missing for 1 graph launches"));
    std::fs::write(dir.path().join("m.json"), "{\"traceEvents\":[{\"ph\":\"X\" \"cat\"").unwrap();
    assert!(refused(&[text(&dir.path().join("m.json"))]).contains("byte 26"));
}

/// A trace of the recorder, and the profile's kernels in its steps.
fn joined(profile: &[&str]) -> Imported {
    let t = import(&[text(&data("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt"))]);
    specprof().arg("import").args(profile).arg("--into").arg(&t.path).assert().success();
    let trace = Trace::open(&t.path).unwrap();
    let broken: Vec<_> = validate(&trace).unwrap().checks.into_iter().filter(|c| !c.ok).collect();
    assert!(broken.is_empty(), "{broken:?}");
    Imported { trace, ..t }
}

#[test]
fn a_profile_goes_into_the_steps_of_its_passes() {
    let before = import(&[text(&data("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt"))]);
    // The recording's windows have 3 rows, the profile's 4.
    let dir = tempfile::tempdir().unwrap();
    let profile = dir.path().join("steps.json");
    let sample = std::fs::read_to_string(data("kineto/synthetic_cuda_graph_steps.json")).unwrap();
    std::fs::write(&profile, sample.replace("VERIFY bs=2 g_sq=8", "VERIFY bs=2 g_sq=6")).unwrap();
    let t = joined(&["kineto", text(&profile)]);
    // All of the trace is as it was.
    assert_eq!(route_rows(&t.trace).unwrap(), route_rows(&before.trace).unwrap());
    assert_eq!(t.trace.requests().unwrap(), before.trace.requests().unwrap());
    assert_eq!(t.manifest().token_hash, before.manifest().token_hash);
    let (steps, old) = (t.trace.steps_with_details().unwrap(), before.trace.steps_with_details().unwrap());
    assert_eq!((&steps.step_id, &steps.emitted_tokens, &steps.accepted), (&old.step_id, &old.emitted_tokens, &old.accepted));
    // Passes 1, 2 and 3 are of both requests: their kernels are with the first one's step, their time with both.
    let tags: BTreeMap<u32, Value> =
        t.trace.requests().unwrap().iter().map(|r| (r.request_id, serde_json::from_str(&r.tags).unwrap())).collect();
    let mut seen = [0usize; 2];
    for i in 0..steps.len() {
        let request = steps.request_id[i];
        let pass = tags[&request]["forward_pass_ids"][seen[request as usize]].as_u64().unwrap();
        seen[request as usize] += 1;
        let own: Vec<_> = kernels(&t).into_iter().filter(|(step, _)| *step == steps.step_id[i]).collect();
        assert_eq!(steps.device_ns[i], Some(157_875), "pass {pass}");
        assert_eq!(own.len(), if request == 0 { 5 } else { 0 }, "pass {pass}");
        assert!(own.iter().all(|(_, k)| k.module == Module::Target && k.begin_ns > 1_795_956_000_000_000_000));
    }
    assert_eq!(seen, [3, 3]);
    t.warning("batched_passes");
    t.warning("layers_unknown");
    // Reports use the times, and do not fit experts to passes that were not one window's.
    let report = t.report();
    let cost = &report["layers"][0]["cost"];
    assert!(cost["us_per_expert"].is_null() && cost.to_string().contains("several requests"), "{cost}");
    // Once more only by force.
    let path = text(&t.path);
    let again = |force: &[&str]| specprof().args(["import", "kineto", text(&profile), "--into", path]).args(force).assert();
    let text = String::from_utf8(again(&[]).code(2).get_output().stderr.clone()).unwrap();
    assert!(text.contains("--force replaces them"), "{text}");
    again(&["--force"]).success();
    assert_eq!(Trace::open(&t.path).unwrap().kernels().unwrap(), kernels(&t));
}

#[test]
fn nsys_passes_with_numbers_find_their_steps() {
    // The first pass has vLLM's name and no number; the others become the recorder's second and third pass, of windows of 3.
    let dir = tempfile::tempdir().unwrap();
    let fitting = "UPDATE NVTX_EVENTS SET text = replace(replace(text, 'forward_id=3', 'forward_id=2'), 'forward_id=4', 'forward_id=3');
        UPDATE NVTX_EVENTS SET text = replace(text, 'g_sq=8', 'g_sq=6');
        UPDATE NVTX_EVENTS SET text = replace(text, 'layers.0.', 'layers.2.');
        UPDATE StringIds SET value = replace(value, 'layers.0.', 'layers.2.');";
    let t = joined(&["nsys", text(&copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", fitting))]);
    assert!(t.warning("passes_unmatched").starts_with("1 pass "));
    let steps = t.trace.steps().unwrap();
    assert!(!kernels(&t).is_empty());
    assert_eq!(steps.device_ns.iter().filter(|ns| ns.is_some()).count(), 4);
    // As the profile is, it is of another run: windows of 4 rows, experts in a dense layer, or passes that nobody has recorded.
    let before = std::fs::read(t.path.join("manifest.json")).unwrap();
    for (change, why) in [
        (fitting.replace("g_sq=6", "g_sq=8"), "has 2 windows of 4 rows, the trace's step 3 rows"),
        (fitting.replace("'layers.2.'", "'layers.0.'"), "run experts in layer 0, which is not routed"),
        (fitting.replace("'forward_id=2')", "'forward_id=99')"), "2 of its 3 passes are no steps of the trace"),
    ] {
        let other = copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", &change);
        let out = specprof().args(["import", "nsys", text(&other), "--into", text(&t.path), "--force"]).assert().code(2);
        let error = String::from_utf8_lossy(&out.get_output().stderr).into_owned();
        assert!(error.contains(why), "{error}");
        assert_eq!(std::fs::read(t.path.join("manifest.json")).unwrap(), before);
    }
}

#[test]
fn profiles_of_other_runs_are_refused() {
    let t = import(&[text(&data("sglang_recorder/per_token_decode_padded_cpu_rank0.pt"))]);
    let into = |profile: &Path| {
        let out = specprof().args(["import", text(profile), "--into", text(&t.path)]).assert().code(2);
        String::from_utf8(out.get_output().stderr.clone()).unwrap()
    };
    let before = std::fs::read(t.path.join("manifest.json")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let unnumbered = copied(
        &dir,
        "nsys/synthetic_node_mode_nvtx.sqlite",
        "UPDATE NVTX_EVENTS SET text = 'execute_context_0(0)_generation_2(8)' WHERE text LIKE 'step[%';
        UPDATE NVTX_EVENTS SET text = replace(text, 'layers.0.', 'layers.2.');
        UPDATE StringIds SET value = replace(value, 'layers.0.', 'layers.2.');",
    );
    assert!(into(&unnumbered).contains("3 passes in the profile, 8 steps in the trace"));
    assert!(
        into(&copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", "DROP TABLE NVTX_EVENTS;"))
            .contains("nothing ties its kernels to steps")
    );
    assert!(into(&data("r3/routed_experts.npz")).contains("--into adds the kernels of a profile (kineto, nsys)"));
    assert_eq!(std::fs::read(t.path.join("manifest.json")).unwrap(), before);
    // What specprof has recorded on the CPU has its own operations.
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/samples/ling-nano");
    let copy = dir.path().join("own");
    copy_directory(&own, &copy);
    let out = specprof()
        .args(["import", "kineto", text(&data("kineto/synthetic_cuda_graph_steps.json")), "--into", text(&copy)])
        .assert()
        .code(2);
    assert!(String::from_utf8_lossy(&out.get_output().stderr).contains("not its own"));
}

fn copy_directory(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn passes_without_numbers_are_tied_in_order() {
    // A profile of exactly the steps of a trace: here one that was itself made of a profile.
    let dir = tempfile::tempdir().unwrap();
    let renamed = |from: &str| copied(&dir, "nsys/synthetic_node_mode_nvtx.sqlite", from);
    let plain = "UPDATE NVTX_EVENTS SET text = 'execute_context_0(0)_generation_1(4)' WHERE text LIKE 'step[%';
        DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE correlationId = 999999;";
    let t = import(&[text(&renamed(plain))]);
    let first = kernels(&t);
    let out = specprof().args(["import", "nsys", text(&renamed(plain)), "--into", text(&t.path), "--force"]).assert().success();
    drop(out);
    let again = Trace::open(&t.path).unwrap();
    assert_eq!(again.kernels().unwrap(), first);
    assert!(again.manifest().warnings.iter().all(|w| w.code != "batched_passes"));
    // As many passes, but with other rows, or of several requests: another run's.
    for (name, why) in
        [("execute_context_0(0)_generation_1(3)", "do different things"), ("execute_context_0(0)_generation_2(8)", "several requests")]
    {
        let other = renamed(&plain.replace("execute_context_0(0)_generation_1(4)", name));
        let out = specprof().args(["import", "nsys", text(&other), "--into", text(&t.path), "--force"]).assert().code(2);
        assert!(String::from_utf8_lossy(&out.get_output().stderr).contains(why));
    }
}

#[test]
fn ranges_that_announce_many_rows_are_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let event = |category: &str, name: &str, at: usize| {
        format!(r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":1,"tid":1,"ts":{at},"dur":1,"args":{{"correlation":1}}}}"#)
    };
    let mut events = vec![event("kernel", "k", 5), event("cuda_runtime", "cudaLaunchKernel", 1)];
    events.extend((0..300).map(|i| event("user_annotation", "execute_context_1(65535)_generation_0(0)", 1 + 10 * i)));
    let path = dir.path().join("x.json");
    std::fs::write(&path, format!(r#"{{"traceEvents":[{}]}}"#, events.join(","))).unwrap();
    assert!(refused(&["kineto", text(&path)]).contains("19660500 rows, and hardly any of them has a token or routes"));
}
