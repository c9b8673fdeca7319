//! Made-up weights, filled in by the device itself: the same model as the CPU engine's, and none of it in the host's memory. Experts by a
//! plan: the same on both engines. All on the emulator.

use crate::cuda::{Routes, both, compare, record, routes};
use crate::kernels::on_emulator;
use specprof::engine::cuda::{DeviceWeights, Opening, Upload};
use specprof::engine::matrix::Matrix;
use specprof::engine::presets::Layout;
use specprof::engine::synthetic::Synthetic;
use specprof::engine::weights::{Attention, GatedMlp, MlaQuery, Mlp, ModelWeights};
use std::path::Path;

const QUANTS: [&str; 4] = ["bf16", "fp8", "mxfp4", "int4"];

#[test]
fn made_up_models_of_every_storage_decode_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    for quant in QUANTS {
        let args =
            ["--model", "synthetic:ling-nano", "--quant", quant, "--prompt-tokens", "20", "--requests", "2", "--max-new-tokens", "14"];
        let (cpu, cuda) = both(dir.path(), &[&args[..], &["--ignore-eos", "--baseline-steps", "2"]].concat(), &[("EMU_LAZY", "1")]);
        compare(quant, &cpu, &cuda);
        let (a, b) = (&cpu.manifest().model, &cuda.manifest().model);
        assert_eq!(a, b, "{quant}");
        assert!(b.synthetic && b.quantisation == quant && b.name == format!("synthetic-ling-nano-{quant}"), "{b:?}");
        let manifest = cuda.manifest();
        assert!(manifest.emulated && manifest.warnings.iter().any(|w| w.code == "synthetic_weights"), "{:?}", manifest.warnings);
    }
}

#[test]
fn a_made_up_model_that_does_not_fit_is_refused_with_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    // Not all of them have an MTP block.
    let args = ["--prompt-tokens", "8", "--max-new-tokens", "4", "--draft", "none", "--backend", "cuda", "--out", "t", "--model"];
    // More than the emulator's 4 GiB, and more than a small device has.
    for (model, quant, weights, knobs) in [
        ("synthetic:ling-3.0-flash", "fp8", "weights 128 GB", &[][..]),
        ("synthetic:ling-3.0-tiny", "bf16", "weights 15.8 GB", &[]),
        ("synthetic:ling-nano", "int4", "2.00 MB that are free", &[("EMU_MEMORY", "2000000")]),
    ] {
        let (code, stdout, stderr) = record(dir.path(), &[&args[..], &[model, "--quant", quant]].concat(), knobs);
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (3, "", 1), "{model}: {stderr}");
        assert!(["--backend cuda", "device memory", "caches of", weights].iter().all(|w| stderr.contains(w)), "{model}: {stderr}");
        assert!(!dir.path().join("t").exists());
    }
}

/// Experts, their order and their weights are those of the CPU engine, whether passes run as graphs or not.
#[test]
fn planned_experts_are_those_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let common = ["--model", "synthetic:ling-nano", "--quant", "fp8", "--prompt-tokens", "40", "--requests", "2", "--max-new-tokens", "20"];
    let run = |name: &str, more: &[&str]| {
        let args = [&common[..], &["--ignore-eos", "--seed", "5"], more].concat();
        let (cpu, cuda) = both(dir.path(), &args, &[("EMU_LAZY", "1")]);
        compare(name, &cpu, &cuda);
        assert_eq!(cpu.manifest().model, cuda.manifest().model, "{name}");
        cuda
    };
    let unplanned = routes(&run("model", &["--baseline-steps", "2"]));
    for plan in ["uniform", "zipf:1.2", "overlap:0.6"] {
        for more in [&["--baseline-steps", "2"][..], &["--kernels", "off", "--draft-len", "7"]] {
            let trace = run(plan, &[&["--routing", plan], more].concat());
            assert_eq!(trace.manifest().model.routing.as_deref(), Some(plan));
            assert!(trace.manifest().warnings.iter().any(|w| w.code == "planned_routing"));
            let graphs = trace.manifest().instrumentation.graphs.map_or(0, |graphs| graphs.launches);
            assert_eq!(graphs > 10, more.contains(&"off"), "{plan}: {graphs}");
            let planned = routes(&trace);
            // Both runs have the same prompts.
            let (a, b) = (first_ids(&unplanned), first_ids(&planned));
            assert!(a.iter().zip(&b).filter(|(a, b)| a != b).count() > 30, "{plan}: {a:?} {b:?}");
        }
    }
}

/// The experts of the first rows.
fn first_ids(routes: &Routes) -> Vec<&[u16]> {
    routes.iter().take(40).map(|(row, _)| row.4.as_slice()).collect()
}

/// Every matrix of a model.
fn matrices(weights: &ModelWeights) -> Vec<&Matrix> {
    fn gated<'w>(all: &mut Vec<&'w Matrix>, m: &'w GatedMlp) {
        all.extend([&m.gate, &m.up, &m.down]);
    }
    let mut all = vec![&weights.embedding, &weights.head];
    all.extend(weights.mtp.iter().map(|mtp| &mtp.projection));
    for layer in weights.layers.iter().chain(weights.mtp.iter().map(|mtp| &mtp.layer)) {
        match &layer.attention {
            Attention::Kda(w) => all.extend([&w.q, &w.k, &w.v, &w.f, &w.g, &w.b, &w.out]),
            Attention::Mla(w) => {
                all.extend([&w.kv_a, &w.kv_b, &w.gate, &w.out]);
                match &w.query {
                    MlaQuery::Full(q) => all.push(q),
                    MlaQuery::LowRank { a, b, .. } => all.extend([a, b]),
                }
            }
        }
        match &layer.mlp {
            Mlp::Dense(m) => gated(&mut all, m),
            Mlp::Moe(m) => {
                all.push(&m.router);
                m.experts.iter().for_each(|expert| gated(&mut all, expert));
                gated(&mut all, &m.shared);
            }
        }
    }
    all
}

#[test]
fn the_host_never_has_what_the_device_makes() {
    on_emulator(|device| {
        for layout in [Layout::Bf16, Layout::Fp8, Layout::Fp4, Layout::Int4] {
            let model = Synthetic::find(Path::new("synthetic:ling-nano"), layout).unwrap().unwrap().for_device().unwrap();
            let total = model.inventory.total();
            let before = device.free_bytes().unwrap();
            let mut made = Vec::new();
            let mut told = |opening| made.push(opening);
            let upload = Upload::new(device, total.bytes as usize, &mut told).unwrap();
            let loaded = DeviceWeights::upload(&upload, &model.config, &model.weights).unwrap();
            drop(upload);
            // The rate of what the device makes would be that of asking for it.
            let Some(Opening::Loading(last)) = made.last() else { panic!("{layout:?}: nothing was told") };
            assert!(made.len() > 1000 && last.gb_per_s.is_none() && last.done > last.total / 2, "{layout:?}: {last:?}");
            // INT4 checkpoints also store the shapes of their matrices, some bytes each, which no device needs.
            let stored = (total.bytes - total.note_bytes) as usize;
            assert!(before - device.free_bytes().unwrap() >= stored, "{layout:?}: the device has not all of the {stored} bytes");
            let all = matrices(&model.weights);
            assert!(all.len() > 1000, "{layout:?}: {}", all.len());
            assert_eq!(all.iter().filter(|m| m.is_held()).count(), 0, "{layout:?}: matrices in the host's memory");
            drop(loaded);
        }
    });
}
