#!/usr/bin/env python3
"""Makes the seeds of each reader: seeds.py OUT [DIRECTORY of more samples]...

A seed is a byte that chooses the options, then the file. Directories are packed as ZIP archives. Parquet is written again without
compression where pyarrow is there: mutations of compressed pages rarely unpack. SPECPROF names the program that makes partial reports,
reports, lines and tables of costs; without it these readers start from less.
"""

import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/import"
# Options that an input's first byte can choose (src/options.rs).
VARIANTS = {
    "vllm": 6, "sglang": 6, "recorder": 5, "torch": 5, "npy": 8, "npz": 8, "zip": 8, "router-log": 4, "llamacpp": 3, "imatrix": 3,
    "trtllm": 3, "nsys-sqlite": 3, "nsys-parquet": 3, "kineto": 3, "jsonl": 2, "config": 1, "trace": 4, "report": 3, "partial": 2,
    "costs": 1, "rules": 1,
}
# Sources whose words a reader knows.
WORDS = {
    "vllm": ["vllm", "response", "response_cut", "acceptance", "json_values", "sample"],
    "sglang": ["sglang", "response", "acceptance", "sample"],
    "recorder": ["recorder", "recorder_pass", "recorder_passes", "pickle", "pickle_machine", "torch"],
    "torch": ["torch", "torch_batch", "pickle", "pickle_machine"],
    "npy": ["npy"], "npz": ["npy"], "zip": ["zip"], "router-log": ["router_log"], "llamacpp": ["llamacpp", "llamacpp_read"],
    "imatrix": ["gguf", "imatrix"], "trtllm": ["trtllm", "safetensors_file"], "nsys-sqlite": ["annotation", "nsys", "nsys_export"],
    "nsys-parquet": ["annotation", "nsys", "nsys_export"], "kineto": ["kineto", "kineto_number", "annotation", "profile_passes"],
    "jsonl": ["jsonl", "jsonl_header", "jsonl_line", "jsonl_routes", "jsonl_rules", "jsonl_table"], "config": ["model"],
}


def plain_parquet(path):
    """The file without compression, or as it is."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        return path.read_bytes()
    table = pq.read_table(path, use_threads=False)
    words = [f.name for f in table.schema if str(f.type).startswith("dictionary")]
    out = io.BytesIO()
    pq.write_table(table, out, compression="none", use_dictionary=words or True, write_statistics=False)
    return out.getvalue()


def packed(directory, parquet=plain_parquet):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            name = str(path.relative_to(directory))
            archive.writestr(name, parquet(path) if path.suffix == ".parquet" else path.read_bytes())
    return out.getvalue()


def small_database(path, *statements):
    """The database in small pages."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "x.sqlite"
        copy.write_bytes(path.read_bytes())
        connection = sqlite3.connect(copy, isolation_level=None)
        for statement in (*statements, "PRAGMA page_size=512", "VACUUM"):
            try:
                connection.execute(statement)
            except sqlite3.Error:
                # Of a sample without that table.
                pass
        connection.close()
        return copy.read_bytes()


def specprof(*arguments, **more):
    program = os.environ.get("SPECPROF")
    if not program:
        return None
    done = subprocess.run([program, "--quiet", *map(str, arguments)], capture_output=True, **more)
    return done.stdout if done.returncode == 0 else None


def router_log(rows=12):
    out = ['{"type": "meta", "model_id": "m", "vllm_version": "0.15.1", "device": "gpu", "seed": 1, "layers_logged": [3, 4], "top_k": 2}']
    for forward in range(4):
        for token in range(3):
            for layer in (3, 4):
                out.append(json.dumps({"type": "route", "req_id": "r1", "token_idx": token, "layer": layer,
                                       "topk_ids": [token, 5 + forward], "topk_weights": [0.25, 0.5]}))
    return ("\n".join(out) + "\n").encode()


def costs():
    cell = lambda rows, union, us: {"rows": rows, "union": union, "pass": {"us": us, "ci95": [us - 1, us + 1]},
                                    "components": {"experts": {"us": us / 2, "ci95": None}}}
    return json.dumps({
        "schema": "specprof.costs/1", "written_by": "x", "engine": "x", "device": "x",
        "model": {"name": "m", "moe_layers": 2, "experts": 8, "experts_per_token": 2, "hidden_size": 64, "expert_size": 32,
                  "quantisation": "bf16"},
        "context_len": 16, "repeats": 9, "seed": 0, "draft": {"us": 5.0, "ci95": None},
        "cells": [cell(1, 2, 10.0), cell(3, 2, 12.0), cell(3, 6, 20.0)],
    }).encode()


def seeds(more):
    """Reader -> list of files."""
    found = {name: [] for name in VARIANTS}
    files = [p for top in (DATA, *more) for p in sorted(top.rglob("*")) if p.is_file() and p.stat().st_size < 200_000]
    for path in files:
        bytes_, folder, suffix = path.read_bytes(), path.parent.name, path.suffix
        if suffix in (".json", ".txt", ".jsonl") and folder in ("vllm", "acceptance") and "expected" not in path.name:
            found["vllm"].append(bytes_)
        if suffix == ".json" and folder == "sglang" and "expected" not in path.name:
            found["sglang"].append(bytes_)
        if folder == "sglang_recorder" and suffix == ".pt":
            found["recorder"].append(bytes_)
        elif suffix == ".pt":
            found["torch"].append(bytes_)
        elif suffix == ".npy":
            found["npy"].append(bytes_)
        elif suffix in (".npz", ".zip"):
            found["npz"].append(bytes_)
            found["zip"].append(bytes_)
        elif folder in ("llamacpp", "moe_trace_variants") and suffix in (".csv", ".bin", ".moetrace", ".jsonl", ".txt"):
            found["llamacpp"].append(bytes_)
        elif suffix == ".gguf" or path.name.endswith("legacy.dat"):
            found["imatrix"].append(bytes_)
        elif suffix == ".sqlite":
            found["nsys-sqlite"].append(small_database(path))
            found["nsys-sqlite"].append(small_database(
                path,
                "UPDATE NVTX_EVENTS SET text = replace(replace(text, 'forward_id=3', 'forward_id=2'), 'forward_id=4', 'forward_id=3')",
                "UPDATE NVTX_EVENTS SET text = replace(replace(text, 'g_sq=8', 'g_sq=6'), 'layers.0.', 'layers.2.')",
                "UPDATE StringIds SET value = replace(value, 'layers.0.', 'layers.2.')",
            ))
        elif folder == "kineto" and suffix in (".json", ".gz"):
            found["kineto"].append(bytes_)
            found["kineto"].append(bytes_.replace(b"g_sq=8", b"g_sq=6"))
        elif folder == "vllm_moe_jsonl" and suffix == ".jsonl":
            found["router-log"].append(bytes_)
        if path.name == "meta_info.json":
            found["trtllm"].append(packed(path.parent))
        if path.name == "StringIds.parquet":
            found["nsys-parquet"] += [packed(path.parent), packed(path.parent, Path.read_bytes)]
        if "logical_count" in path.name or "expert_location" in path.name:
            found["sglang"].append(bytes_)
    found["router-log"].append(router_log())
    document = (ROOT / "docs/jsonl.md").read_text()
    found["jsonl"].append(document.split("```jsonl\n")[1].split("```")[0].encode())
    found["config"].append(b'{"architectures":["DeepseekV3ForCausalLM"],"num_hidden_layers":61,"first_k_dense_replace":3,'
                           b'"n_routed_experts":256,"num_experts_per_tok":8,"moe_layer_freq":1,"num_nextn_predict_layers":1}')
    found["config"].append(b'{"text_config":{"num_hidden_layers":6,"num_experts":128,"num_experts_per_tok":8,"mlp_only_layers":[0],'
                           b'"decoder_sparse_step":2}}')
    found["report"].append((ROOT / "reports/compat/report.v1.json").read_bytes())
    found["costs"].append(costs())
    found["rules"].append(b"# gates\nunion.mean > +3%  # why\nallow device, workload\nlayer:*:union.p99>+10%\ncost.step_ratio>1.2\n"
                          b"layer:3-5:union.mean<-2\n")
    with tempfile.TemporaryDirectory() as scratch:
        recorded = Path(scratch) / "recorded"
        specprof("import", DATA / "sglang_recorder/per_token_spec_verify_cuda0_rank0.pt", "-o", recorded)
        traces = [*sorted((ROOT / "traces/compat").glob("*/trace")), recorded]
        for trace in (t for t in traces if (t / "manifest.json").is_file()):
            found["trace"] += [packed(trace), packed(trace, Path.read_bytes)]
            found["jsonl"] += filter(None, [specprof("export", trace, "--format", "jsonl")])
            found["report"] += filter(None, [specprof("report", trace, "--format", "json")])
            partial = Path(scratch) / "partial.parquet"
            if specprof("report", trace, "--partial", "-o", partial) is not None:
                found["partial"] += [plain_parquet(partial), partial.read_bytes()]
    return found


def dictionary(name):
    """libFuzzer's dictionary: the words in the reader's source."""
    words = set()
    for source in WORDS.get(name, []):
        text = (ROOT / f"src/import/{source}.rs").read_text().split("#[cfg(test)]")[0]
        words |= set(re.findall(r'b?"([A-Za-z0-9_.:/ -]{2,32})"', text))
    return "".join(f'"{word}"\n' for word in sorted(words))


def main():
    out = Path(sys.argv[1])
    for name, files in seeds([Path(p) for p in sys.argv[2:]]).items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(dict.fromkeys(files)):
            for variant in range(VARIANTS[name]):
                (folder / f"{number:03}-{variant}").write_bytes(bytes([variant]) + content)
        if name == "trtllm":
            for path in list(folder.iterdir()):
                content = path.read_bytes()
                (folder / f"{path.name}-file").write_bytes(bytes([content[0] + 129]) + content[1:])
        (out / f"{name}.dict").write_text(dictionary(name))
        print(f"{name}: {len(files)} files, {len(list(folder.iterdir()))} seeds")


if __name__ == "__main__":
    main()
