//! Seeded mutations that keep lines and records whole: what can still be read is swapped, doubled, missing or has another number.
//! Every trace keeps every rule; the program ends with 0, 2, 3 or 4.

use super::hostile::mutate;
use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const LINES: &str = r#"{"type":"header","format":"specprof.jsonl/1","model":{"name":"m","experts":8,"experts_per_token":2,"moe_layers":[1,2]},"drafter":{"kind":"mtp","draft_len":2}}
{"type":"step","request_id":"a","tokens":[11,12],"pass_id":0,"begin_ns":10,"end_ns":12,"routes":[[[1,2],[3,4]],[[5,6],[7,1]]]}
{"type":"step","request_id":"b","tokens":[21,22],"pass_id":0,"begin_ns":10,"end_ns":12,"routes":[[[1,2],[3,4]],[[5,6],[7,1]]]}
{"type":"step","request_id":"a","tokens":[13,14,15],"accepted":1,"emitted":[14,99],"pass_id":1,"begin_ns":20,"end_ns":22,"draft_probs":[0.5,0.25],"parents":[-1,0,0],"routes":[[[1,2],[1,4],[6,7]],[[7,0],[7,1],[2,3]]]}
{"type":"step","request_id":"b","tokens":[23,24,25],"accepted":0,"emitted":[98],"pass_id":1,"begin_ns":20,"end_ns":22,"draft_probs":[0.5,0.25],"routes":[[[1,2],[1,4],[6,7]],[[7,0],[7,1],[2,3]]]}
{"type":"kernel","step_id":2,"component":"experts","layer":1,"begin_ns":20,"end_ns":21}
{"type":"step","request_id":"a","tokens":[99],"begin_ns":30,"end_ns":31,"routes":[[[1,2]],[[3,4]]]}
{"type":"telemetry","time_ns":5,"power_w":3.5}
{"type":"telemetry","time_ns":6,"power_w":3.5}
{"type":"request","request_id":"a","finish_reason":"stop","tags":{"x":1}}
{"type":"request","request_id":"b","generated_tokens":1}
"#;

const LOG: &str = r#"{"type":"meta","model_id":"m","top_k":2,"num_experts":8}
{"type":"route","req_id":"r","token_idx":0,"layer":0,"topk_ids":[1,2],"topk_weights":[0.5,0.5]}
{"type":"route","req_id":"r","token_idx":1,"layer":0,"topk_ids":[3,2],"topk_weights":[0.5,0.5]}
{"type":"route","req_id":"r","token_idx":0,"layer":1,"topk_ids":[5,2],"topk_weights":[0.5,0.5]}
{"type":"route","req_id":"r","token_idx":1,"layer":1,"topk_ids":[1,6],"topk_weights":[0.5,0.5]}
{"type":"route","req_id":"r","token_idx":0,"layer":0,"topk_ids":[7,2],"topk_weights":[0.5,0.5]}
{"type":"route","req_id":"r","token_idx":0,"layer":1,"topk_ids":[0,4],"topk_weights":[0.5,0.5]}
"#;

fn pick(rng: &mut ChaCha8Rng, n: usize) -> usize {
    rng.next_u32() as usize % n.max(1)
}

/// Swaps, doubles or drops pieces.
fn shuffle<T: Clone>(pieces: &mut Vec<T>, rng: &mut ChaCha8Rng) {
    let (a, b) = (pick(rng, pieces.len()), pick(rng, pieces.len()));
    match rng.next_u32() % 3 {
        0 => pieces.swap(a, b),
        1 => pieces.insert(a, pieces[b].clone()),
        _ => drop(pieces.remove(a)),
    }
}

/// Another number in the place of one of a line's.
fn renumber(line: &mut String, rng: &mut ChaCha8Rng) {
    let starts: Vec<usize> =
        (0..line.len()).filter(|&i| line.as_bytes()[i].is_ascii_digit() && (i == 0 || !line.as_bytes()[i - 1].is_ascii_digit())).collect();
    if starts.is_empty() {
        return;
    }
    let at = starts[pick(rng, starts.len())];
    let end = line[at..].find(|c: char| !c.is_ascii_digit()).map_or(line.len(), |n| at + n);
    let numbers = ["0", "1", "-1", "2", "3", "7", "65535", "65536", "4294967295", "9223372036854775808", "1e400"];
    line.replace_range(at..end, numbers[pick(rng, numbers.len())]);
}

fn lines(bytes: &[u8], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    for _ in 0..1 + rng.next_u32() % 3 {
        if lines.is_empty() {
            break;
        }
        if rng.next_u32() % 2 == 0 {
            shuffle(&mut lines, rng);
        } else {
            let at = pick(rng, lines.len());
            renumber(&mut lines[at], rng);
        }
    }
    lines.join("\n").into_bytes()
}

/// The records of C (no header) or of F, apart.
fn records(bytes: &[u8], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let half = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let moetrc = bytes.starts_with(b"MOETRC01");
    let head = if moetrc { 12 + word(8) } else { 0 };
    let (mut at, mut all) = (head, Vec::new());
    while at < bytes.len() {
        let len = if moetrc { 16 + 2 * half(at + 6) * word(at + 8) } else { 12 + 4 * word(at + 4) * word(at + 8) };
        all.push(bytes[at..at + len].to_vec());
        at += len;
    }
    for _ in 0..1 + rng.next_u32() % 2 {
        shuffle(&mut all, rng);
    }
    [bytes[..head].to_vec(), all.concat()].concat()
}

type Change = fn(&[u8], &mut ChaCha8Rng) -> Vec<u8>;

/// Runs the program on mutations of a file; how many it took, and how many it refused.
fn rounds(name: &str, file: &str, bytes: &[u8], args: &[&str], change: Change, n: u64) -> [u32; 2] {
    let mut tally = [0, 0];
    for round in 0..n {
        let dir = tempfile::tempdir().unwrap();
        let (path, out) = (dir.path().join(file), dir.path().join("t"));
        std::fs::write(&path, change(bytes, &mut ChaCha8Rng::seed_from_u64(round))).unwrap();
        let run = specprof().args(["import", name]).arg(&path).args(args).arg("-o").arg(&out).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        match run.status.code() {
            Some(0) => {
                tally[0] += 1;
                passes_check(&out, &format!("{name} {file} {args:?} round {round}"));
            }
            Some(2..=4) => {
                tally[1] += 1;
                assert!(said.starts_with("error: ") || said.contains("\nerror: "), "{name} {file} round {round}: {said}");
                assert!(!out.exists(), "{name} {file} round {round}: a trace was left behind");
            }
            code => panic!("{name} {file} round {round}: ended with {code:?}: {said}"),
        }
    }
    tally
}

#[test]
fn whole_lines_and_records_in_another_order() {
    let read = |file: &str| std::fs::read(data(file)).unwrap();
    let mut all = [0, 0];
    let mut add = |tally: [u32; 2]| all = [all[0] + tally[0], all[1] + tally[1]];
    add(rounds("jsonl", "t.jsonl", LINES.as_bytes(), &[], lines, 60));
    add(rounds("router-log", "log.jsonl", LOG.as_bytes(), &[], lines, 40));
    add(rounds("router-log", "log.jsonl", LOG.as_bytes(), &["--draft-len", "1"], lines, 20));
    for (file, args) in [
        ("A_pr28544_layer_expert.csv", &["--k", "4"][..]),
        ("B_fork_pos_layer_ids.csv", &[]),
        ("D_phase_token_layer_rank_expert.csv", &[]),
        ("E_user_query_prefill_only.csv", &[]),
        ("G_flash_moe.jsonl", &[]),
        ("G_flash_moe.jsonl", &["--prompt-tokens", "3"]),
    ] {
        add(rounds("llamacpp", file, &read(&format!("llamacpp/{file}")), args, lines, 25));
    }
    for file in ["C_int32_records.bin", "F_moetrc01.moetrace"] {
        add(rounds("llamacpp", file, &read(&format!("llamacpp/{file}")), &[], records, 30));
    }
    add(rounds("llamacpp", "c.bin", &read("llamacpp/C_int32_records.bin"), &["--prompt-tokens", "3"], records, 30));
    for (name, file) in [
        ("vllm", "completions_response_v0.33.json"),
        ("vllm", "completions_response_v0.21_nested_lists.json"),
        ("npy", "routed_experts_uint8.npy"),
    ] {
        let change: Change = |bytes, rng| {
            let mut bytes = bytes.to_vec();
            mutate(&mut bytes, rng);
            bytes
        };
        add(rounds(name, file, &read(&format!("vllm/{file}")), &[], change, 20));
    }
    assert!(all[0] > 100 && all[1] > 100, "{all:?}: the mutations are too weak or too strong");
}
