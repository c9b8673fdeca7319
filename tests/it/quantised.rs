//! Block-FP8 with F32 scales, experts included: the FP4 set's checkpoint written another way must have the FP4 set's numbers.
//!
//! Every MXFP4 value times its group's power of two is an E4M3 value times a power of two, so that the rewriting is exact and the
//! reference's numbers hold for it unchanged.

use crate::safetensors_files::{Tensors, read_all, write_checkpoint};
use safetensors::Dtype;
use serde_json::Value;
use specprof::engine::{Checkpoint, golden};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const BLOCK: usize = 128;

fn set() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/fp4")
}

/// E2M1: sign, two exponent bits, one mantissa bit.
fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

/// E4M3 without infinities: the last code of each sign is NaN.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let size = if exponent == 0 { mantissa * (-6.0_f32).exp2() } else { (1.0 + mantissa) * ((exponent - 7) as f32).exp2() };
    if code & 0x80 == 0 { size } else { -size }
}

fn power(code: u8) -> f32 {
    (f32::from(code) - 127.0).exp2()
}

/// A `[rows, cols]` matrix of MXFP4 with its scales for 32 columns each, as numbers.
fn numbers(rows: usize, codes: &[u8], scales: &[u8]) -> Vec<f32> {
    let cols = codes.len() * 2 / rows;
    (0..rows * cols).map(|i| e2m1(codes[i / 2] >> (4 * (i % 2)) & 15) * power(scales[i / 32])).collect()
}

/// Numbers as E4M3 codes with an F32 scale for each block; every number is met exactly.
fn to_fp8(rows: usize, numbers: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let cols = numbers.len() / rows;
    let codes_of: HashMap<u32, u8> = (0..=255u8).filter(|c| c & 0x7f != 0x7f).map(|c| (e4m3(c).to_bits(), c)).collect();
    let (mut codes, mut scales) = (vec![0; numbers.len()], Vec::new());
    for top in (0..rows).step_by(BLOCK) {
        for left in (0..cols).step_by(BLOCK) {
            let places = || (top..(top + BLOCK).min(rows)).flat_map(|r| (left..(left + BLOCK).min(cols)).map(move |c| r * cols + c));
            let largest = places().map(|at| numbers[at].abs()).fold(f32::MIN_POSITIVE, f32::max);
            let scale = (largest / 256.0).log2().ceil().exp2();
            places().for_each(|at| codes[at] = codes_of[&(numbers[at] / scale).to_bits()]);
            scales.push(scale);
        }
    }
    (codes, scales)
}

fn f32_bytes(numbers: impl IntoIterator<Item = f32>) -> Vec<u8> {
    numbers.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// The FP4 set's checkpoint in block-FP8 with F32 scales; `factor` damages the scales of routed experts.
pub fn rewritten(factor: f32) -> tempfile::TempDir {
    let checkpoint = set().join("checkpoint");
    let all = read_all(&checkpoint);
    let mut plain = Tensors::new();
    for (name, (shape, data, dtype)) in &all {
        let Some(base) = name.strip_suffix(".weight") else { continue };
        let scale_name = format!("{base}.weight_scale_inv");
        match (*dtype, all.get(&scale_name)) {
            (Dtype::F8_E4M3, Some((scale_shape, scales, Dtype::F8_E8M0))) => {
                plain.insert(name.clone(), (shape.clone(), data.clone(), *dtype));
                plain.insert(scale_name, (scale_shape.clone(), f32_bytes(scales.iter().map(|&s| power(s))), Dtype::F32));
            }
            (Dtype::I8, Some((_, scales, Dtype::F8_E8M0))) => {
                let (rows, cols) = (shape[0], shape[1] * 2);
                let (codes, scales) = to_fp8(rows, &numbers(rows, data, scales));
                plain.insert(name.clone(), (vec![rows, cols], codes, Dtype::F8_E4M3));
                let blocks = vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
                plain.insert(scale_name, (blocks, f32_bytes(scales.into_iter().map(|s| s * factor)), Dtype::F32));
            }
            (dtype, None) => drop(plain.insert(name.clone(), (shape.clone(), data.clone(), dtype))),
            other => panic!("{name}: {other:?}"),
        }
    }
    for (name, tensor) in all.iter().filter(|(name, _)| !name.ends_with(".weight") && !name.ends_with(".weight_scale_inv")) {
        plain.insert(name.clone(), tensor.clone());
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(checkpoint.join("config.json")).unwrap()).unwrap();
    let quantisation = config["quantization_config"].as_object_mut().unwrap();
    for key in ["routed_experts_quant_method", "routed_experts_group_size", "scale_fmt"] {
        quantisation.remove(key);
    }
    write_checkpoint(&config, &plain)
}

#[test]
fn block_fp8_with_f32_scales_has_the_references_numbers() {
    let dir = rewritten(1.0);
    let model = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(model.expert_format(), "fp8");
    let file = set().join("golden.safetensors");
    let report = golden::compare(&model.config, &model.weights, &file).unwrap();
    let failed: Vec<_> = report.checks.iter().filter(|c| !c.passed).collect();
    assert!(report.passed() && report.checks.len() > 20, "{failed:#?}");
    // The same weights in two formats: the same bits.
    let fp4 = Checkpoint::open(&set().join("checkpoint")).unwrap();
    assert_eq!(fp4.expert_format(), "mxfp4");
    assert_eq!(golden::compare(&fp4.config, &fp4.weights, &file).unwrap().checks, report.checks);
    // And the scales matter.
    let dir = rewritten(1.01);
    let wrong = Checkpoint::open(dir.path()).unwrap();
    assert!(!golden::compare(&wrong.config, &wrong.weights, &file).unwrap().passed());
}
