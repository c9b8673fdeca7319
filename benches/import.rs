//! Bytes a second of importing what other engines wrote.
//!
//! `cargo bench --bench import [-- MEGABYTES]`. Inputs are made here: responses of 512 prompt and 512 generated tokens through 48 layers
//! with 8 of 128 experts. MB/s is of decompressed input by CPU time of all threads, so it does not depend on what else runs.

use specprof::import::{self, Options};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

const LAYERS: usize = 48;
const K: usize = 8;
const EXPERTS: u64 = 128;
const PROMPT: usize = 512;
const WINDOWS: usize = 256;

/// CPU time of the process so far, seconds.
fn cpu_seconds() -> f64 {
    // Fields 14 and 15 after the command's name: user and system time in ticks of 10 ms.
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks: u64 = after_name.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks as f64 / 100.0
}

/// Most memory that the process has had so far, MB.
fn peak_megabytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// K different experts.
    fn choice(&mut self) -> [u8; K] {
        let mut chosen = [0; K];
        let mut taken = 0u128;
        for place in &mut chosen {
            *place = loop {
                let id = self.next() % EXPERTS;
                if taken >> id & 1 == 0 {
                    taken |= 1 << id;
                    break id as u8;
                }
            };
        }
        chosen
    }
}

/// Rows of all layers, and the accepted drafts of the windows that they are in.
fn request(random: &mut Random) -> (Vec<u8>, Vec<u32>) {
    let accepted: Vec<u32> = (0..WINDOWS).map(|_| (random.next() % 4) as u32).collect();
    let rows = PROMPT + accepted.iter().map(|a| *a as usize + 1).sum::<usize>();
    let ids = (0..rows * LAYERS).flat_map(|_| random.choice()).collect();
    (ids, accepted)
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let n = three.iter().fold(0u32, |n, &b| n << 8 | u32::from(b)) << (8 * (3 - three.len()));
        for place in 0..4 {
            let letter = LETTERS[(n >> (18 - 6 * place) & 63) as usize];
            text.push(if place > three.len() { '=' } else { letter as char });
        }
    }
    text
}

/// One response; ids as base64 of a `.npy`, or as nested lists.
fn response(random: &mut Random, number: usize, nested: bool) -> String {
    let (ids, accepted) = request(random);
    let rows = ids.len() / LAYERS / K;
    let routed = if nested {
        let row = |row: &[u8]| serde_json::to_string(&row.chunks(K).collect::<Vec<_>>()).unwrap_or_default();
        format!("[{}]", ids.chunks(LAYERS * K).map(row).collect::<Vec<_>>().join(","))
    } else {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, {LAYERS}, {K}), }}\n");
        let mut npy = b"\x93NUMPY\x01\x00".to_vec();
        npy.extend((header.len() as u16).to_le_bytes());
        npy.extend(header.as_bytes());
        npy.extend(&ids);
        format!("\"{}\"", base64(&npy))
    };
    let generated = rows + 1 - PROMPT;
    let drafted = vec![3; WINDOWS];
    let mut text = String::new();
    let _ = write!(
        text,
        "{{\"id\":\"cmpl-{number}\",\"model\":\"bench\",\"choices\":[{{\"index\":0,\"finish_reason\":\"length\",\"routed_experts\":{routed}}}],\
         \"usage\":{{\"prompt_tokens\":{PROMPT},\"completion_tokens\":{generated}}},\
         \"metrics\":{{\"speculative_decoding\":{{\"per_step_accepted\":{accepted:?},\"per_step_drafted\":{drafted:?}}}}}}}"
    );
    text
}

fn made(dir: &Path, name: &str, bytes: u64, nested: bool) -> std::io::Result<PathBuf> {
    let path = dir.join(name);
    let mut file = BufWriter::new(File::create(&path)?);
    let (mut random, mut written, mut number) = (Random(1), 0, 0);
    while written < bytes {
        let line = response(&mut random, number, nested);
        writeln!(file, "{line}")?;
        (written, number) = (written + line.len() as u64, number + 1);
    }
    file.flush()?;
    Ok(path)
}

/// Imports one file and prints how fast that was.
fn timed(name: &str, format: &str, path: &Path, out: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let importer = import::find(format).into_iter().next().ok_or("no such format")?;
    // Lines say themselves how many experts there are, and the flag is refused.
    let experts = (format != "jsonl").then_some(EXPERTS as u16);
    let options = Options { experts, force: true, ..Options::default() };
    let (begin, clock) = (cpu_seconds(), Instant::now());
    let manifest = import::import(importer, &[path.to_owned()], out, &options)?;
    let (cpu, wall) = (cpu_seconds() - begin, clock.elapsed().as_secs_f64());
    let megabytes = fs::metadata(path)?.len() as f64 / 1e6;
    let rows: u64 = manifest.tables.get("routes").into_iter().flatten().map(|part| part.rows).sum();
    println!(
        "{name:<28}{megabytes:>8.0} MB{:>10.0}{:>10.0}{:>12.1}{:>9} MB",
        megabytes / cpu,
        megabytes / wall,
        cpu * 1e9 / (rows as f64 * K as f64),
        peak_megabytes()
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let megabytes: u64 = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(50);
    let dir = tempfile::tempdir()?;
    println!("{:<28}{:>11}{:>10}{:>10}{:>12}{:>12}", "", "input", "MB/s CPU", "MB/s wall", "ns CPU/id", "peak");
    for (name, nested) in [("vLLM, base64 of uint8", false), ("vLLM, nested lists", true)] {
        let path = made(dir.path(), "responses.jsonl", megabytes * 1_000_000, nested)?;
        timed(name, "vllm", &path, &dir.path().join("t"))?;
    }
    let lines = dir.path().join("lines.jsonl");
    let trace = specprof::trace::Trace::open(&dir.path().join("t"))?;
    specprof::export::jsonl::write(&trace, &mut BufWriter::new(File::create(&lines)?))?;
    timed("lines of export", "jsonl", &lines, &dir.path().join("t2"))
}
