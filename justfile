# List the recipes
default:
    @just --list

# Record and report the built-in model
demo:
    cargo run --release -- demo

# Every test (what CI runs)
test *args:
    tests/run {{args}}

# Tests of everything that needs no polars: engine, recorder, trace
test-fast:
    cargo test --release --no-default-features

# The recorder without the analysis (no polars) is smaller than 30 MB; puts that program into target/release
recorder-size:
    cargo build --release --locked --no-default-features --bin specprof
    @size=$(stat -c %s "${CARGO_TARGET_DIR:-target}/release/specprof"); echo "$size bytes"; test "$size" -lt 30000000

# Registers, spills and images of the CUDA kernels (needs nvidia-cuda-nvrtc-cu12 of the version in kernels/build.py)
kernels:
    python3 kernels/build.py

# Measure the CUDA engine on this machine's GPU into reports/gpu/ (needs the driver and the built program); not yet run on one
gpu program="specprof":
    reports/gpu/measure.sh {{program}}

# Parity of every kernel on this machine's GPU by its own driver (needs numpy); not yet run on one
gpu-parity image="sm_90a":
    python3 tests/emulator/parity.py libcuda.so.1 kernels/prebuilt/{{image}}.cubin.gz

# Format
fmt:
    cargo fmt

# Lints, with and without the analysis
lint:
    cargo clippy --release --all-targets -- -D warnings
    cargo clippy --release --no-default-features --all-targets -- -D warnings

# Benchmarks; ratios within one run, never a test
bench *args:
    cargo bench --features peers {{args}}

# API documentation
doc:
    cargo doc --no-deps

# Accept changed snapshots after looking at them
accept:
    INSTA_UPDATE=always cargo test --release
