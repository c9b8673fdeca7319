"""Runs the parity checks of the kernels on a CUDA driver: the emulator of this folder, or a real one.

    parity.py LIBRARY IMAGE [NAME...]     LIBRARY: libcuda.so.1; IMAGE: a .cubin.gz of kernels/prebuilt; NAME: parts of checks' names

Exit 1 names the kernel, the shape and the number that is off, and without NAMEs the kernels that no check runs, or none in every order. On a real device thread orders and byte counts are not controlled.
"""

import sys
import time
from pathlib import Path

import numpy as np

import check_block
import check_dense
import check_fill
import check_flash
import check_kda
import check_mla
import check_moe
import check_prefill
import check_sampling
from checks import ORDERS, Failure
from driver import Device

MODULES = [check_fill, check_dense, check_moe, check_kda, check_mla, check_block, check_sampling, check_prefill, check_flash]


def main():
    library, image, *names = sys.argv[1:]
    device = Device(library, Path(image))
    print(f"device: {device.name}")
    failed = 0
    for module in MODULES:
        for check in module.CHECKS:
            name = check.__name__.removeprefix("check_")
            if names and not any(n in name for n in names):
                continue
            begin, calls = time.process_time(), device.calls
            try:
                check(device, np.random.default_rng(20260701))
                word = "ok"
            except Failure as failure:
                word = f"FAILED: {failure}"
                failed += 1
            print(f"{name}: {word} ({device.calls - calls} launches, {time.process_time() - begin:.1f} s)", flush=True)
    unused = sorted(set(kernels()) - set(device.functions))
    if unused and not names:
        print(f"kernels that no check runs: {', '.join(unused)}")
        failed += 1
    unordered = sorted(n for n, orders in device.orders.items() if not orders.issuperset(ORDERS))
    if unordered and not names:
        print(f"kernels that no check runs in every order of threads: {', '.join(unordered)}")
        failed += 1
    sys.exit(1 if failed else 0)


def kernels():
    """Every kernel of the sources."""
    import re

    folder = Path(__file__).resolve().parent.parent.parent / "kernels"
    return [n for p in folder.glob("*.cu") for n in re.findall(r"__launch_bounds__\(\d+(?:, \d+)?\)\s+(\w+)\(", p.read_text())]


main()
