//! The engine's speed: a decoded token of the built-in model, and the product with one large matrix beside a
//! plain read of the same bytes.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use rayon::prelude::*;
use specprof::engine::matmul::matmul;
use specprof::engine::matrix::{Matrix, MatrixFormat, TensorBytes};
use specprof::engine::{Checkpoint, LogitRows, NoTap, Session};
use std::path::Path;
use std::sync::{Arc, LazyLock};

fn main() {
    divan::main();
}

static MODEL: LazyLock<Checkpoint> = LazyLock::new(|| Checkpoint::resolve(Path::new("demo")).expect("the built-in model"));

/// One pass of `rows` rows after 64 tokens, rolled back, per row.
#[divan::bench(args = [1, 4, 9], sample_count = 50, sample_size = 10)]
fn nano_rows(bencher: Bencher<'_, '_>, rows: usize) {
    let tokens: Vec<u32> = (0..64).map(|i| i * 31 % 2041).collect();
    let mut session = Session::new(&MODEL.config, &MODEL.weights);
    session.prefill(&tokens, 32, &mut NoTap).expect("tokens of the vocabulary");
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        let forward = session.forward(&tokens[..rows], LogitRows::All, &mut NoTap).expect("tokens of the vocabulary");
        black_box(forward.logits);
        session.commit(0);
    });
}

const ROWS: usize = 32 * 1024;
const COLS: usize = 8 * 1024;

/// 512 MiB of BF16.
static BYTES: LazyLock<Arc<Vec<u8>>> =
    LazyLock::new(|| Arc::new(std::iter::repeat_n([0x80, 0x3f, 0x00, 0xbf], ROWS * COLS / 2).flatten().collect()));

#[divan::bench(args = [1, 4], sample_count = 5, sample_size = 1)]
fn bf16_product(bencher: Bencher<'_, '_>, rows: usize) {
    let bytes = TensorBytes::new(BYTES.clone(), 0..ROWS * COLS * 2).expect("the whole of it");
    let w = Matrix::new(ROWS, COLS, bytes, MatrixFormat::Bf16).expect("the right length");
    let (x, mut out) = (vec![0.5; rows * COLS], vec![0.0; rows * ROWS]);
    bencher.counter(BytesCount::new(ROWS * COLS * 2)).bench_local(|| matmul(&w, black_box(&x), &mut out));
}

/// What the memory gives: all threads add up the bytes.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn plain_read(bencher: Bencher<'_, '_>) {
    let add = |part: &[u8]| part.as_chunks::<8>().0.iter().fold(0u64, |sum, b| sum.wrapping_add(u64::from_le_bytes(*b)));
    bencher.counter(BytesCount::new(BYTES.len())).bench_local(|| BYTES.par_chunks(1 << 20).map(add).reduce(|| 0, u64::wrapping_add));
}
