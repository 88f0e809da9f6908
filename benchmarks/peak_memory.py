#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of `uniep run` against what it must hold.

Samples the proportional set size (PSS), summed over the program and its children, every 20 ms, and
divides its peak by the bytes of the tensors and of the declared buffers that the program reports.

    benchmarks/peak_memory.py build/release/uniep [flags of uniep run]
"""

import json
import os
import subprocess
import sys
import tempfile
import time

CASE = ("--global-tokens", "8192", "--hidden", "1024", "--ffn", "1024", "--experts", "32",
        "--topk", "2")


def family(process):
    found = [process]
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as children:
                for child in children.read().split():
                    found += family(child)
    except OSError:
        pass  # it has ended
    return found


def pss_bytes(process):
    total = 0
    for member in family(process):
        try:
            with open(f"/proc/{member}/smaps_rollup") as rollup:
                total += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        except OSError:
            pass
    return total * 1024


def measure(uniep, case, folder, flags):
    summary = os.path.join(folder, "summary.json")
    process = subprocess.Popen(
        [uniep, "run", case, "--backward", "-o", os.path.join(folder, "out"), "--json", summary,
         *flags], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, pss_bytes(process.pid))
        time.sleep(0.02)
    if process.returncode != 0:
        sys.exit(f"uniep run ended with {process.returncode}")
    with open(summary) as file:
        need = json.load(file)["memory_bytes"]
    mib = 1 << 20
    total = need["tensors"] + need["buffers"]
    print(f"{' '.join(flags):<52} {need['tensors'] / mib:>8.0f} {need['buffers'] / mib:>8.0f} "
          f"{peak / mib:>8.0f} {peak / total:>8.2f}", flush=True)


def main():
    uniep = os.path.abspath(sys.argv[1])
    variants = [sys.argv[2:]] if len(sys.argv) > 2 else [
        ["--ranks", "2"],
        ["--ranks", "4", "--processes"],
        ["--ranks", "4", "--schedule", "fusion=split,payload=choice"],
    ]
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("bf16", "f32"):
            case = os.path.join(folder, dtype)
            subprocess.run([uniep, "case", *CASE, "--dtype", dtype, "-o", case], check=True)
            print(f"{'flags of uniep run, MiB':<52} {'tensors':>8} {'buffers':>8} {'peak':>8} "
                  f"{'ratio':>8}")
            for flags in variants:
                measure(uniep, case, folder, flags)


if __name__ == "__main__":
    main()
