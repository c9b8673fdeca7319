"""Builds the stand-ins for libcuda, out of the kernels' sources, and for libcupti and NVML.

    build.py OUT [-DNAME]   OUT/libcuda.so.1, OUT/cupti/libcupti.so.13 and, standing in for NVML, OUT/nvml/libnvidia-ml.so.1; sources
                            that have not changed are not compiled again. NAME: EMU_SHUFFLES, which adds
                            over warps by shuffles, as a device does

Needs g++ and nothing else.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "kernels"
HOST = ["fibers.cpp", "memory.cpp", "driver.cpp"]
ENTRY = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+)(?:, \d+)?\)\s+(\w+)\(')
# -fno-strict-aliasing: kernels read rows of bytes as words. -ffp-contract=off: what is fused is written as fmaf.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-exceptions", "-Wall", "-Werror",
         "-Wno-unknown-pragmas"]
# Headers define more functions than each source uses; what only a pragma names counts as unused.
DEVICE_FLAGS = ["-Wno-unused-function", "-Wno-unused-variable"]


class Builder:
    """Compiles with g++ into `out`, keeping objects by the hash of everything that went into them."""

    def __init__(self, out, defines=()):
        self.out = Path(out)
        self.compiler = shutil.which("g++")
        if not self.compiler:
            sys.exit("g++ is not on PATH: the emulator of the CUDA kernels is built with it (Debian: apt-get install g++)")
        self.flags = [*FLAGS, *defines]
        if "fma" in Path("/proc/cpuinfo").read_text().split():
            self.flags += ["-mfma", "-mavx2"]
        self.out.mkdir(parents=True, exist_ok=True)
        self.headers = "".join(p.read_text() for p in sorted(HERE.glob("*.h")))

    def object(self, name, text, folder, extra):
        digest = hashlib.sha256("\0".join([*self.flags, *extra, str(folder), name, text, self.headers]).encode()).hexdigest()[:16]
        target = self.out / f"{name}-{digest}.o"
        if not target.exists():
            source = self.out / f"{name}-{digest}.cpp"
            source.write_text(text)
            partial = target.with_suffix(".new")
            run = [self.compiler, *self.flags, f"-I{folder}", f"-I{HERE}", *extra, "-c", source, "-o", partial]
            done = subprocess.run(run, capture_output=True, text=True)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                sys.exit(f"{name}: " + "\n".join(errors[:8] or [done.stderr]))
            partial.rename(target)
        return target

    def host(self, name):
        return self.object(name, (HERE / name).read_text(), HERE, [])

    def kernels(self, name, texts):
        """The object of one source out of `texts`, all sources and headers by name, with its part of the table."""
        text = inlined(name, texts)
        entries = ENTRY.findall(text)
        if len(entries) != text.count("__global__") or not entries:
            sys.exit(f"{name}: a kernel is not written as `extern \"C\" __global__ void __launch_bounds__(N)` before its name")
        table = [f'static const emu_registration emu_{n}{{emu_entry<{n}>::of("{n}", {threads})}};' for threads, n in entries]
        return self.object(name, "\n".join([text, '#include "registry.h"', *table, ""]), HERE, ["-include", str(HERE / "device.h"), *DEVICE_FLAGS])

    def link(self, objects, target):
        target.parent.mkdir(exist_ok=True)
        partial = target.with_suffix(".new")
        run = [self.compiler, *self.flags, "-shared", f"-Wl,-soname,{target.name}", *objects, "-o", partial]
        subprocess.run(run, check=True)
        partial.rename(target)

    def all_objects(self, texts):
        jobs = [lambda n=n: self.host(n) for n in HOST] + [lambda n=n: self.kernels(n, texts) for n in sorted(texts) if n.endswith(".cu")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [f.result() for f in [pool.submit(j) for j in jobs]]


def sources():
    return {p.name: p.read_text() for p in [*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]}


def inlined(name, texts, seen=None):
    """A source with the headers that it includes in their places, each once."""
    seen = set() if seen is None else seen
    lines = []
    for line in texts[name].splitlines():
        if m := re.match(r'#include "(\w+\.cuh)"', line):
            if m[1] not in seen:
                seen.add(m[1])
                lines.append(inlined(m[1], texts, seen))
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines)


def main():
    builder = Builder(sys.argv[1], sys.argv[2:])
    objects = builder.all_objects(sources())
    builder.link(objects, builder.out / "libcuda.so.1")
    # In folders of their own: they are used where they are asked for only.
    beside = {"cupti/libcupti.so.13": builder.host("cupti.cpp"), "nvml/libnvidia-ml.so.1": builder.host("nvml.cpp")}
    for name, made in beside.items():
        builder.link([made], builder.out / name)
    # Objects of sources that are no more.
    for old in builder.out.glob("*-*.o"):
        if old not in [*objects, *beside.values()]:
            old.unlink()
            old.with_suffix(".cpp").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
