#!/bin/sh
# Measures the CUDA engine on this machine's GPU: needs the driver and the built program, nothing else.
#
#   reports/gpu/measure.sh [SPECPROF]     the program, else `specprof` from PATH
#
# 1. The built-in model decodes to the same tokens as on the CPU, with made-up weights and planned experts too. 2. Made-up models, FP8 by
# default, decode and verify with 1, 3, 5 and 8 drafts, with kernels untimed, so that steps run as graphs, and once with kernels timed in every
# second step: components, what is unattributed, and what timing costs. 3. `calibrate` measures passes by
# rows and distinct experts, and every kernel beside the time that its bytes take at the rate at which the device reads. 4. Prompts of one long
# pass, beside the time that all weights take at that rate, and the operations a second that it and its parts reach. One file of it goes to reports/gpu/, named by device and date. NOT YET RUN ON A GPU.
#
# SPECPROF_GPU_SHAPES, SPECPROF_GPU_QUANT: other shapes than "ling-3.0-tiny ling-3.0-flash" and another storage than fp8.
# SPECPROF_GPU_CONTEXT, SPECPROF_GPU_TOKENS, SPECPROF_GPU_REPEATS: tokens of a prompt and in the caches, tokens of each of four requests, and
# passes of each cell; 256, 128 and 15. SPECPROF_GPU_PROMPT: tokens of a long pass; 512.
# SPECPROF_GPU_DRY=DIR: also run on the tests' emulator, and write to DIR: no number of its file is a time, and the file says so.
set -eu
specprof=${1:-specprof}
here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "measure.sh: $1" >&2; exit "$2"; }

command -v "$specprof" >/dev/null || fail "$specprof: no such program; build it, or name it: measure.sh PATH" 2
doctor=$("$specprof" doctor)
line=$(printf '%s\n' "$doctor" | grep '^cuda backend') || fail "doctor says nothing of the CUDA backend" 3
dry=${SPECPROF_GPU_DRY:-}
case $line in
    *unavailable*) printf '%s\n' "$doctor" >&2; fail "no GPU that the CUDA engine can use; see above" 3 ;;
    *"no GPU"* | *emulator*) [ -n "$dry" ] || fail "the driver is the tests' emulator: its times mean nothing" 3; here=$dry ;;
    *) [ -z "$dry" ] || fail "SPECPROF_GPU_DRY is for the tests' emulator, and this is a device" 2 ;;
esac
shapes=${SPECPROF_GPU_SHAPES:-ling-3.0-tiny ling-3.0-flash}
quant=${SPECPROF_GPU_QUANT:-fp8}
context=${SPECPROF_GPU_CONTEXT:-256}
tokens=${SPECPROF_GPU_TOKENS:-128}
repeats=${SPECPROF_GPU_REPEATS:-15}
prompt=${SPECPROF_GPU_PROMPT:-512}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A value of a manifest or report: the first line with the key.
value() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$2" | head -n 1; }
# A reason in one cell of a table.
cell() { tr '\n|' '  ' <"$1"; }

name=$(printf '%s\n' "$line" | sed 's/^cuda backend *[a-z]* *//; s/ runs the kernels.*//')
slug=$(printf '%s' "$name" | tr -c 'A-Za-z0-9' '-' | tr 'A-Z' 'a-z')
table="$here/$slug-$(date -u +%Y%m%d-%H%M).md"
differs=
{
    echo "# $name, $(date -u '+%Y-%m-%d %H:%M') UTC"
    echo
    [ -z "$dry" ] || { echo "**Emulated: no device ran, and nothing here is a time of one.**"; echo; }
    "$specprof" --version
    echo
    echo '```'
    printf '%s\n' "$doctor"
    echo '```'
    echo
    echo "## Parity with the CPU engine"
    echo
    echo "Tokens of both engines, of the device with recording on and off (\`--self-check\`), and the routed rows of the same text that chose other experts:"
    echo "near-ties are those whose routers had the same scores."
    echo
    echo "| model | experts | tokens | rows | other experts | near-ties |"
    echo "|---|---|---|---|---|---|"
} >"$work/table.md"

# Model, storage (- = as stored) and routing.
parity() {
    model=$1 routing=$3
    quantised=
    [ "$2" = - ] || quantised="--quant $2"
    for backend in cpu cuda; do
        check=
        [ $backend = cpu ] || check=--self-check
        # shellcheck disable=SC2086
        "$specprof" -q record --model "$model" $quantised --routing "$routing" --prompt-tokens 24 --requests 2 --max-new-tokens 32 --ignore-eos \
            --seed 1 --backend $backend --router-probs $check --out "$work/parity-$backend" --force >/dev/null 2>"$work/error" ||
            fail "$model on $backend: $(cell "$work/error")" 3
    done
    "$specprof" -q diff "$work/parity-cpu" "$work/parity-cuda" --allow device --format json -o "$work/diff.json" 2>"$work/error" ||
        fail "$model: $(cell "$work/error")" 1
    sed -n '/"routing": {/,/"layers"/p' "$work/diff.json" >"$work/routing.json"
    cpu=$(value token_hash "$work/parity-cpu/manifest.json")
    cuda=$(value token_hash "$work/parity-cuda/manifest.json")
    [ -n "$cpu" ] || fail "the CPU's trace has no token hash" 1
    same="the same"
    [ "$cpu" = "$cuda" ] || { same="OTHER ($cuda, not $cpu)"; differs="$differs $model"; }
    row="| $model $quantised | $routing | $same"
    for key in rows differing near_ties; do row="$row | $(value $key "$work/routing.json")"; done
    echo "$row |" >>"$work/table.md"
}
parity demo - model
for storage in bf16 fp8 mxfp4 int4; do
    parity synthetic:ling-nano $storage model
done
parity synthetic:ling-nano fp8 uniform

{
    echo
    echo "## Steps"
    echo
    echo "Windows of 1 and more drafts beside plain decode steps of the same run, which run as graphs; experts by a uniform plan."
    echo
    echo "| model | drafts | verify ratio | step ratio | break-even | decode step, µs |"
    echo "|---|---|---|---|---|---|"
} >>"$work/table.md"
for shape in $shapes; do
    # ling-3.0-tiny has no MTP block: looked-up drafts give windows only where the text repeats itself.
    draft=mtp
    [ "$shape" != ling-3.0-tiny ] || draft=ngram
    for drafts in 1 3 5 8; do
        run="$work/$shape-$drafts"
        if "$specprof" -q record --backend cuda --model "synthetic:$shape" --quant "$quant" --routing uniform --kernels off --draft $draft \
            --draft-len $drafts --prompt-tokens "$context" --requests 4 --max-new-tokens "$tokens" --ignore-eos --baseline-steps 64 --warmup 1 \
            --out "$run" >/dev/null 2>"$work/error"; then
            "$specprof" -q report "$run" --format json -o "$run.json"
            row="| $shape $quant | $drafts"
            for key in verify_ratio step_ratio break_even decode_step_us; do
                found=$(value $key "$run.json")
                [ "$found" != null ] || found=
                row="$row | ${found:-unknown}"
            done
            echo "$row |" >>"$work/table.md"
            rm -rf "$run"
        else
            echo "| $shape $quant | $drafts | not run: $(cell "$work/error") | | | |" >>"$work/table.md"
        fi
    done
done

# Where the time of a verify step goes: kernels by CUPTI where it can be used, in every second step, so that what timing costs is measured.
for shape in $shapes; do
    draft=mtp
    [ "$shape" != ling-3.0-tiny ] || draft=ngram
    run="$work/$shape-kernels"
    {
        echo
        echo "## Where the time goes, $shape $quant, windows of 4"
        echo
        if "$specprof" -q record --backend cuda --model "synthetic:$shape" --quant "$quant" --routing uniform --kernels auto --kernel-every 2 \
            --draft $draft --draft-len 3 --prompt-tokens "$context" --requests 4 --max-new-tokens "$tokens" --ignore-eos --baseline-steps 64 \
            --warmup 1 --out "$run" >/dev/null 2>"$work/error"; then
            overhead=$(value overhead_share "$run/manifest.json")
            [ "$overhead" != null ] || overhead=
            echo "Timed steps take longer than untimed ones by a share of ${overhead:-unknown}."
            echo
            echo '```'
            "$specprof" -q report "$run" --color never 2>"$work/error" || cat "$work/error"
            echo '```'
        else
            echo "not run: $(cell "$work/error")"
        fi
    } >>"$work/table.md"
    rm -rf "$run"
done

for shape in $shapes; do
    {
        echo
        echo "## Passes and kernels of $shape $quant"
        echo
        echo '```'
        "$specprof" -q calibrate --backend cuda --model "synthetic:$shape" --quant "$quant" --rows 1,2,4,6,9,16 --context "$context" --repeats "$repeats" \
            --by-kernel 2>"$work/error" || echo "not run: $(cell "$work/error")"
        echo '```'
    } >>"$work/table.md"
done
{
    echo
    echo "## Prompts"
    echo
    echo "Passes of $prompt tokens on tensor cores, without drafts; experts as the routers choose. Floor: all weights, each byte once, at the rate at"
    echo "which the device reads (see above). Operations: those of the model (\`specprof model --json\`, \`prompt_pass\`); the tensor cores do three"
    echo "times as many, a row being in three terms. The rate at which this device computes was not measured, so there is no floor by arithmetic."
    echo
    echo "| model | passes | a pass, ms | tokens/s | floor, ms | Giga operations | Tera operations/s |"
    echo "|---|---|---|---|---|---|---|"
} >>"$work/table.md"
# GB a second of the last calibration that has one.
stream=$(sed -n 's/.* at the \([0-9]*\) GB\/s at which the device reads.*/\1/p' "$work/table.md" | tail -n 1)
# Median time of each part of a pass and the rate that it reached, out of the parts' operations and a trace's lines. A kernel that is called
# mla_ or kda_ is part of attention or recurrence, every other one of its component's products. An emulated device has no times.
parts() {
    awk -v dry="$dry" '
        function median(list, n,    i, j, v, at) {
            split(list, at, " ")
            for (i = 2; i <= n; i++) { v = at[i] + 0; for (j = i - 1; j > 0 && at[j] + 0 > v; j--) at[j + 1] = at[j]; at[j + 1] = v }
            return at[int((n + 1) / 2)]
        }
        function word(key) { return match($0, "\"" key "\":\"[^\"]*\"") ? substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 5) : "" }
        function number(key) { return match($0, "\"" key "\":[0-9]+") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : -1 }
        FNR == NR {
            if ($1 == "\"component\":") component = $2
            if ($1 == "\"part\":") part = $2
            if ($1 == "\"operations\":") { name = component " " part; gsub(/[",]/, "", name); order[++parts] = name; operations[name] = $2 + 0 }
            next
        }
        /^{"type":"step"/ && word("phase") == "prefill" { wanted[number("step_id")] = ++steps }
        /^{"type":"kernel"/ && word("module") == "target" && number("step_id") in wanted && !dry {
            kernel = word("name"); component = word("component")
            name = component " " (kernel ~ /^mla_/ ? "attention" : kernel ~ /^kda_/ ? "recurrence" : "products")
            if (!(name in operations)) name = "all else"
            # Nanoseconds of now have more digits than a number here: only their ends are taken.
            match($0, /"begin_ns":[0-9]+/); begin = substr($0, RSTART + 11, RLENGTH - 11)
            match($0, /"end_ns":[0-9]+/); end = substr($0, RSTART + 9, RLENGTH - 9)
            took = substr(end, length(end) - 13) - substr(begin, length(begin) - 13)
            if (took < 0) took += 1e14
            ns[name, wanted[number("step_id")]] += took
        }
        END {
            order[++parts] = "all else"
            for (p = 1; p <= parts; p++) {
                name = order[p]; list = ""; n = 0
                for (s = 1; s <= steps; s++) if ((name, s) in ns) { list = list " " sprintf("%.0f", ns[name, s]); n++ }
                time = n > 0 ? median(list, n) : 0
                shown = n > 0 ? sprintf("%.3f", time / 1e6) : "unknown"
                rate = time > 0 && name in operations ? sprintf("%.2f", operations[name] / time / 1e3) : name in operations ? "unknown" : ""
                printf "| %s | %s | %s | %s |\n", name, shown, name in operations ? sprintf("%.2f", operations[name] / 1e9) : "", rate
            }
        }' "$1" "$2"
}
: >"$work/parts.md"
for shape in $shapes; do
    run="$work/$shape-prompt"
    # Model, passes and how kernels are timed.
    prompts() {
        "$specprof" -q record --backend cuda --model "synthetic:$shape" --quant "$quant" --kernels "$1" --draft none --prompt-tokens "$prompt" \
            --prefill-chunk "$prompt" --requests "$repeats" --max-new-tokens 2 --ignore-eos --warmup 1 --out "$run" --force >/dev/null 2>"$work/error"
    }
    if prompts off; then
        "$specprof" -q model "synthetic:$shape" --quant "$quant" --prompt-rows "$prompt" --json >"$work/model.json" 2>"$work/error" ||
            fail "$shape: $(cell "$work/error")" 1
        "$specprof" -q export "$run" --format jsonl | sed -n '/"phase":"prefill"/s/.*"device_ns":\([0-9]*\).*/\1/p' | sort -n >"$work/times"
        awk -v name="$shape $quant" -v rows="$prompt" -v stream="${stream:-0}" -v bytes="$(value total_bytes "$work/model.json")" \
            -v operations="$(value total_operations "$work/model.json")" '
            { ns[NR] = $1 }
            END {
                floor = stream > 0 ? sprintf("%.2f", bytes / stream / 1e6) : "unknown"
                giga = sprintf("%.2f", operations / 1e9)
                if (NR == 0) { printf "| %s | 0 | unknown | unknown | %s | %s | unknown |\n", name, floor, giga; exit }
                median = ns[int((NR + 1) / 2)]
                printf "| %s | %d | %.2f | %.0f | %s | %s | %.1f |\n", name, NR, median / 1e6, rows / median * 1e9, floor, giga, operations / median / 1e3
            }' "$work/times" >>"$work/table.md"
        {
            echo
            echo "### A prompt's pass of $shape $quant by part"
            echo
            echo "Medians of the kernels' times, by CUPTI where it can be used, else by an event after each kernel, when gaps count. Products run on tensor"
            echo "cores, of weights in F32 on FP32 units, and their times include splitting, choosing, sorting and adding up; attention and recurrence"
            echo "run on FP32 units."
            echo
            if prompts auto && "$specprof" -q export "$run" --format jsonl >"$work/lines" 2>"$work/error"; then
                echo "| part | ms | Giga operations | Tera operations/s |"
                echo "|---|---|---|---|"
                parts "$work/model.json" "$work/lines"
            else
                echo "not run: $(cell "$work/error")"
            fi
        } >>"$work/parts.md"
        rm -rf "$run"
    else
        echo "| $shape $quant | not run: $(cell "$work/error") | | | | | |" >>"$work/table.md"
    fi
done
cat "$work/parts.md" >>"$work/table.md"
cp "$work/table.md" "$table"
cat "$table"
[ -z "$differs" ] || fail "tokens differ between CPU and GPU:$differs" 1
