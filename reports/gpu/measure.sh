#!/bin/sh
# Measures the CUDA engine on this machine's GPU: needs the driver and the built program, nothing else.
#
#   reports/gpu/measure.sh [SPECPROF]     the program, else `specprof` from PATH
#
# 1. the built-in model decodes to the same tokens as on the CPU; 2. made-up FP8 models decode and verify with 1, 3, 5 and 8 drafts,
# kernels timed by events; 3. one table of it goes to reports/gpu/, named by device and date. Refuses to run without a GPU, and on the
# tests' emulator, whose times mean nothing. NOT YET RUN ON A GPU. What the CUDA engine cannot do yet is not in it: exact
# unions (`calibrate`), weights made on the device, single kernels against their bytes.
set -eu
specprof=${1:-specprof}
here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "measure.sh: $1" >&2; exit "$2"; }

command -v "$specprof" >/dev/null || fail "$specprof: no such program; build it, or name it: measure.sh PATH" 2
doctor=$("$specprof" doctor)
line=$(printf '%s\n' "$doctor" | grep '^cuda backend') || fail "doctor says nothing of the CUDA backend" 3
case $line in
    *unavailable*) printf '%s\n' "$doctor" >&2; fail "no GPU that the CUDA engine can use; see above" 3 ;;
    *"no GPU"* | *emulator*) fail "the driver is the tests' emulator: its times mean nothing" 3 ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A value of a manifest or report: the first line with the key.
value() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$2" | head -n 1; }

for backend in cpu cuda; do
    "$specprof" -q record --model demo --workload chat --max-new-tokens 64 --backend $backend --out "$work/nano-$backend" >/dev/null
done
cpu=$(value token_hash "$work/nano-cpu/manifest.json")
cuda=$(value token_hash "$work/nano-cuda/manifest.json")
[ -n "$cpu" ] || fail "the CPU's trace has no token hash" 1
parity="the same tokens as on the CPU"
[ "$cpu" = "$cuda" ] || parity="OTHER TOKENS than on the CPU ($cuda, not $cpu)"

name=$(printf '%s\n' "$line" | sed 's/^cuda backend *[a-z]* *//; s/ runs the kernels.*//')
slug=$(printf '%s' "$name" | tr -c 'A-Za-z0-9' '-' | tr 'A-Z' 'a-z')
table="$here/$slug-$(date -u +%Y%m%d-%H%M).md"
{
    echo "# $name, $(date -u '+%Y-%m-%d %H:%M') UTC"
    echo
    echo "$("$specprof" --version); built-in model: $parity"
    echo
    echo '```'
    printf '%s\n' "$doctor"
    echo '```'
    echo
    echo "| model | drafts | verify ratio | step ratio | break-even | decode step, µs |"
    echo "|---|---|---|---|---|---|"
} >"$work/table.md"
for model in ling-3.0-tiny ling-3.0-flash; do
    # ling-3.0-tiny has no MTP block: looked-up drafts give windows only where the text repeats itself.
    draft=mtp
    [ $model = ling-3.0-flash ] || draft=ngram
    for drafts in 1 3 5 8; do
        run="$work/$model-$drafts"
        if "$specprof" -q record --backend cuda --model synthetic:$model --quant fp8 --draft $draft --draft-len $drafts --prompt-tokens 256 --requests 4 \
            --max-new-tokens 128 --ignore-eos --baseline-steps 64 --warmup 1 --out "$run" >/dev/null 2>"$work/error"; then
            "$specprof" -q report "$run" --format json -o "$run.json"
            row="| $model fp8 | $drafts"
            for key in verify_ratio step_ratio break_even decode_step_us; do
                found=$(value $key "$run.json")
                row="$row | ${found:-unknown}"
            done
            echo "$row |" >>"$work/table.md"
            rm -rf "$run"
        else
            echo "| $model fp8 | $drafts | not run: $(tr '\n|' '  ' <"$work/error") | | | |" >>"$work/table.md"
        fi
    done
done
cp "$work/table.md" "$table"
cat "$table"
[ "$cpu" = "$cuda" ] || fail "the built-in model's tokens differ between CPU and GPU" 1
