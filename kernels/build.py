"""Compiles the kernels for every architecture with the pinned NVRTC and reports registers, spills and shared memory.

    build.py            writes prebuilt/*.cubin.gz, prebuilt/kernels.ptx.gz, prebuilt/report.json and registers.md
    build.py --check    compiles again and compares; exit 1 names what differs

One image an architecture holds all kernels. A device loads the image of its compute capability's major (sm_80 serves 8.x below 8.9,
sm_120 serves 12.x); the PTX is for majors that have none. Needs the wheel nvidia-cuda-nvrtc-cu12 of the version below in the
interpreter's environment, and neither a GPU nor a driver.
"""

import ctypes
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
PREBUILT, TABLE = HERE / "prebuilt", HERE / "registers.md"
WHEEL, VERSION = "nvidia-cuda-nvrtc-cu12", "12.9.86"
CUBINS = ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]
PTX = "compute_80"
# What is fused is written as fmaf, so that every target and the emulator add alike.
OPTIONS = ["--std=c++17", "--fmad=false", "--ptxas-options=-v"]
# Kernels that run once a step or less: a spill there costs nothing that matters.
PER_STEP = {"sample", "draw", "accept_greedy", "accept_sampled", "advance", "argmax"}

# How many blocks of a kernel's launch bounds have to fit the registers of a multiprocessor: an upper bound of its registers. The first pattern
# that is the whole name counts. Products keep a sum for every row and output in registers: the more rows, the fewer blocks.
RESIDENT = [
    (r"(dense|experts)_\w+_r16|dense_f32_rows|mla_query_rows_\w+", 2),
    (r"(dense|experts)_\w+_r4|dense_tiles_\w+|mla_prefill|mla_value_rows_\w+|moe_sort|sample", 3),
    (r"\w+", 4),
]
# Of each of these architectures; a warp's are given out in units of 8 a thread.
REGISTERS = 65536
BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:, \d+)?\)\s+(\w+)\(")


def load():
    try:
        version = importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{WHEEL} is not installed: pip install {WHEEL}=={VERSION}")
    if version != VERSION:
        sys.exit(f"{WHEEL} {version} is installed; the images are made by {VERSION}")
    files = importlib.metadata.files(WHEEL)
    path = {f.name: f.locate() for f in files if f.name.startswith("libnvrtc")}
    # The compiler looks for its built-ins by name: loaded before, they are found.
    ctypes.CDLL(str(next(p for n, p in path.items() if "builtins" in n and "alt" not in n)), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path["libnvrtc.so.12"]), mode=ctypes.RTLD_GLOBAL)


class Compiler:
    def __init__(self):
        self.lib = load()

    def call(self, name, *args):
        code = getattr(self.lib, name)(*args)
        if code and name != "nvrtcCompileProgram":
            sys.exit(f"{name} failed with {code}")
        return code

    def output(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def compile(self, arch, source, headers):
        """The image and the compiler's log."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
        texts = (ctypes.c_char_p * len(headers))(*(t.encode() for t in headers.values()))
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", len(headers), texts, names)
        options = [f"--gpu-architecture={arch}", *OPTIONS]
        failed = self.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        log = self.output(program, "ProgramLog").rstrip(b"\0").decode()
        if failed:
            raise SystemExit(f"{arch}: {log}")
        image = self.output(program, "PTX" if arch.startswith("compute") else "CUBIN")
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return image, log


def resources(log):
    """Registers, spilled bytes, stack and static shared memory of each kernel, out of the assembler's report."""
    found, name = {}, None
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\w+)'", line):
            name = m[1]
            found[name] = {"registers": None, "spill_stores": None, "spill_loads": None, "stack": None, "static_shared": 0}
        elif name and (m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            found[name].update(stack=int(m[1]), spill_stores=int(m[2]), spill_loads=int(m[3]))
        elif name and (m := re.search(r"Used (\d+) registers", line)):
            found[name]["registers"] = int(m[1])
            if m := re.search(r"(\d+) bytes smem", line):
                found[name]["static_shared"] = int(m[1])
            name = None
    return dict(sorted(found.items()))


def build():
    """Images by file name, and the report."""
    files = {p.name: p.read_text() for p in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")])}
    source = "".join(f'#include "{name}"\n' for name in files if name.endswith(".cu"))
    kernels = sorted(threads_of())
    compiler, images, report, targets = Compiler(), {}, {}, [*CUBINS, PTX]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda arch: compiler.compile(arch, source, files), targets))
    for arch, (image, log) in zip(targets, compiled):
        name = "kernels.ptx" if arch == PTX else f"{arch}.cubin"
        images[name] = image
        entry = {"bytes": len(image), "sha256": hashlib.sha256(image).hexdigest()}
        if arch != PTX:
            entry["kernels"] = resources(log)
            if sorted(entry["kernels"]) != kernels:
                sys.exit(f"{arch}: the report lacks {sorted(set(kernels) ^ set(entry['kernels']))}")
        report[name] = entry
    return images, {"compiler": f"{WHEEL} {VERSION}", "options": OPTIONS, "images": report}


def spills(report):
    """Kernels that run in every layer and spill."""
    for name, entry in report["images"].items():
        for kernel, r in entry.get("kernels", {}).items():
            if kernel not in PER_STEP and (r["registers"] is None or r["spill_stores"] or r["spill_loads"] or r["stack"]):
                yield f"{name}: {kernel}: {r}"


def threads_of():
    """Threads of a block by kernel, as its launch bounds say."""
    return {name: int(threads) for p in sorted(HERE.glob("*.cu")) for threads, name in BOUNDS.findall(p.read_text())}


def blocks(kernel):
    """Blocks of a kernel that have to fit a multiprocessor's registers."""
    return next(n for pattern, n in RESIDENT if re.fullmatch(pattern, kernel))


def bound(kernel, threads):
    """The most registers a thread may have: a multiple of 8, 255 at most."""
    return min(REGISTERS // (blocks(kernel) * threads) // 8 * 8, 255)


def over(report, threads):
    """Kernels with more registers than their bound."""
    for name, entry in report["images"].items():
        for kernel, r in entry.get("kernels", {}).items():
            most = bound(kernel, threads[kernel])
            if r["registers"] is None or r["registers"] > most:
                yield f"{name}: {kernel}: {r['registers']} registers, more than {most}: {blocks(kernel)} blocks of {threads[kernel]} threads do not fit"


def table(report, threads):
    """Registers, static shared memory and spills by kernel and architecture, in Markdown."""
    images = {n.removesuffix(".cubin"): e["kernels"] for n, e in report["images"].items() if "kernels" in e}
    lines = ["# Registers of the kernels", "",
             f"Written by `build.py` from what {report['compiler']} reports; `build.py --check` compares it. Registers a thread; *bound*: the most, so",
             "that as many blocks of the launch bounds' threads as *blocks* says fit the 65536 registers of a multiprocessor. `+N sh`: bytes of static shared",
             "memory; `+N sp`: bytes of spill stores and loads. Dynamic shared memory is in the heads of the sources.", "",
             f"| kernel | threads | blocks | bound | {' | '.join(images)} |", "|---|---|---|---|" + "---|" * len(images)]
    for kernel, count in sorted(threads.items()):
        cells = []
        for found in images.values():
            r = found[kernel]
            spilled = r["spill_stores"] + r["spill_loads"]
            cells.append(f"{r['registers']}" + (f" +{r['static_shared']} sh" if r["static_shared"] else "") + (f" +{spilled} sp" if spilled else ""))
        lines.append(f"| `{kernel}` | {count} | {blocks(kernel)} | {bound(kernel, count)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    (images, report), threads = build(), threads_of()
    failed = [*spills(report), *over(report, threads)]
    if "--check" in sys.argv:
        old = json.loads((PREBUILT / "report.json").read_text())
        if old != report:
            for name in report["images"]:
                was, now = (r["images"].get(name, {}).get("kernels", {}) for r in (old, report))
                failed += [f"{name}: {k}: was {was.get(k)}, is {now.get(k)}" for k in sorted({*was, *now}) if was.get(k) != now.get(k)]
            failed.append("prebuilt/report.json is not that of the sources: run kernels/build.py")
        failed += [f"prebuilt/{n}.gz is not that of the sources: run kernels/build.py" for n, image in images.items()
                   if not (PREBUILT / f"{n}.gz").exists() or gzip.decompress((PREBUILT / f"{n}.gz").read_bytes()) != image]
        if not TABLE.exists() or TABLE.read_text() != table(report, threads):
            failed.append("registers.md is not that of the sources: run kernels/build.py")
        known = {"report.json", *(f"{n}.gz" for n in images)}
        failed += [f"prebuilt/{p.name} is made by nobody" for p in sorted(PREBUILT.iterdir()) if p.name not in known]
    else:
        PREBUILT.mkdir(exist_ok=True)
        for name, image in images.items():
            (PREBUILT / f"{name}.gz").write_bytes(gzip.compress(image, 9, mtime=0))
        (PREBUILT / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        TABLE.write_text(table(report, threads))
    stored = sum(p.stat().st_size for p in PREBUILT.iterdir())
    print(f"{len(images)} images, {stored} bytes stored, {len(next(iter(report['images'].values()))['kernels'])} kernels")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
