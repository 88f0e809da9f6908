# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM beside its peers in one run on one GPU: uniep, PyTorch's grouped product, and cuBLAS
on one dense product of the same sizes. Batches of calls alternate between all of them, on random
data, so that they share the chip's clocks and power.

  python3 benchmarks/grouped_gemm_cuda.py --lib uniep=libuniep_grouped_gemm.so

Several builds or settings can run side by side: --lib NAME=PATH[:band=8][:sms=0][:walk=static].
"""
import argparse
import ctypes
import json
import statistics
import time

import torch

# hidden, ffn, local experts of one of two ranks
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 64),
    "qwen3-235b-a22b": (4096, 1536, 64),
    "deepseek-v3": (7168, 2048, 32),  # with 64 experts
    "mixtral-8x7b": (4096, 14336, 4),
    "deepseek-v2-lite": (2048, 1408, 32),
    "gpt-oss-120b": (2880, 2880, 64),
}
OPS = {"fprop": 0, "swiglu": 1, "swiglu+h": 1, "dgrad": 2, "dgrad_f32": 2, "wgrad": 3,
       "wgrad_f32": 3, "main_grad": 3}


class Library:
    """One build of uniep's grouped GEMM with one setting."""

    def __init__(self, spec):
        path, *settings = spec.split(":")
        values = {"band": "8", "sms": "0", "walk": "tickets"} | dict(
            setting.split("=") for setting in settings)
        self.launch = (int(values["sms"]), int(values["band"]))
        self.tickets = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.draws = values["walk"] == "tickets"
        self.call = ctypes.CDLL(path).uniep_grouped_gemm
        p, i, q = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.call.argtypes = [i, i, i, p, p, i, q, q, q, p, p, p, p, p, p, p, i, i, p]
        self.call.restype = ctypes.c_char_p

    def bind(self, op, case):
        args = case.arguments(op) + (torch.cuda.current_stream().cuda_stream,) + self.launch + (
            self.tickets.data_ptr() if self.draws else None,)

        def run():
            error = self.call(*args)
            if error:
                raise RuntimeError(error.decode())
        return run


def count_rows(routing, rows, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    if routing == "even":
        return [rows // experts] * experts
    if routing == "multinomial":
        picks = torch.randint(0, experts, (rows,), generator=generator)
        return torch.bincount(picks, minlength=experts).tolist()
    # zipf: half of an even share each, at most 1,024 rows, and the rest as 1 / rank
    floor = min(1024, rows // experts // 2)
    weights = 1.0 / torch.arange(1, experts + 1, dtype=torch.float64)
    weights = weights[torch.randperm(experts, generator=generator)]
    extra = (weights / weights.sum() * (rows - floor * experts)).long()
    extra[0] += rows - floor * experts - int(extra.sum())
    return (extra + floor).tolist()


class Case:
    """Operands of one product [rows, k] x [experts, n, k], padded for uniep and dense for peers."""

    def __init__(self, counts, n, k):
        self.counts, self.n, self.k = counts, n, k
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + (count + 63) // 64 * 64)
        self.capacity, self.rows = starts[-1], sum(counts)
        cuda = {"device": "cuda"}
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.starts = torch.tensor(starts, **cuda)
        self.row_counts = torch.tensor(counts, **cuda)
        self.offsets = torch.tensor(counts, **cuda).cumsum(0).to(torch.int32)
        self.x, self.d_y = torch.randn(self.rows, k, **bf16), torch.randn(self.rows, n, **bf16)
        self.w = torch.randn(len(counts), n, k, **bf16)
        self.padded_x, self.padded_d_y = self.pad(self.x, starts), self.pad(self.d_y, starts)
        self.row_weights = torch.rand(self.capacity, **cuda)
        self.out_rows = torch.empty(self.capacity * max(n, k), **cuda)  # also holds fp32
        self.h = torch.empty(self.capacity * n, **bf16)
        self.out_grad = torch.zeros(len(counts) * n * k, **cuda)

    def pad(self, dense, starts):
        padded = torch.zeros(self.capacity, dense.shape[1], device="cuda", dtype=dense.dtype)
        source = 0
        for start, count in zip(starts, self.counts):
            padded[start:start + count] = dense[source:source + count]
            source += count
        return padded

    def arguments(self, op):
        kind = OPS[op]
        f32 = op in ("dgrad_f32", "wgrad_f32", "main_grad")
        out = self.out_grad if kind == 3 else self.out_rows
        swiglu = kind == 1
        return (kind, int(f32), int(op == "main_grad"), self.starts.data_ptr(),
                self.row_counts.data_ptr(), len(self.counts), self.capacity, self.n, self.k,
                self.padded_x.data_ptr(), self.padded_d_y.data_ptr(), self.w.data_ptr(),
                out.data_ptr(), self.h.data_ptr() if op == "swiglu+h" else None,
                self.row_weights.data_ptr() if swiglu else None)

    def torch_grouped(self, op):
        grouped = torch._grouped_mm
        if OPS[op] <= 1:
            return lambda: grouped(self.x, self.w.transpose(-2, -1), offs=self.offsets)
        if OPS[op] == 2:
            return lambda: grouped(self.d_y, self.w, offs=self.offsets)
        return lambda: grouped(self.d_y.t(), self.x, offs=self.offsets)

    def dense(self, op):
        w = self.w[0]
        if OPS[op] <= 1:
            out = torch.empty(self.rows, self.n, device="cuda", dtype=torch.bfloat16)
            return lambda: torch.mm(self.x, w.t(), out=out)
        if OPS[op] == 2:
            out = torch.empty(self.rows, self.k, device="cuda", dtype=torch.bfloat16)
            return lambda: torch.mm(self.d_y, w, out=out)
        out = torch.empty(self.n, self.k, device="cuda", dtype=torch.bfloat16)
        return lambda: torch.mm(self.d_y.t(), self.x, out=out)


def time_batch(run, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def time_interleaved(impls, rounds, batch_ms):
    calls = {}
    for name, run in impls.items():
        time_batch(run, 2)
        calls[name] = max(1, round(batch_ms / time_batch(run, 3)))
    times = {name: [] for name in impls}
    for _ in range(rounds):
        for name, run in impls.items():
            times[name].append(time_batch(run, calls[name]))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lib", action="append", required=True, metavar="NAME=PATH[:SETTING]")
    parser.add_argument("--shapes", default="qwen3-30b-a3b,qwen3-235b-a22b,deepseek-v3,mixtral-8x7b,"
                        "deepseek-v2-lite")
    parser.add_argument("--ops", default="fprop,dgrad,wgrad")
    parser.add_argument("--routing", default="even")
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-ms", type=float, default=25)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    libraries = {}
    for spec in args.lib:
        name, path = spec.split("=", 1)
        libraries[name] = Library(path)
    names = list(libraries) + ([] if args.no_peers else ["torch", "cublas"])
    records = []
    print(f"{args.rows} rows, TFLOP/s over gemm1 and gemm2 (median ms of each)")
    print(f"{'shape':<17} {'routing':<11} {'op':<9} " + " ".join(f"{name:>22}" for name in names))
    for shape in args.shapes.split(","):
        hidden, ffn, experts = SHAPES[shape]
        totals = {}
        for routing in args.routing.split(","):
            counts = count_rows(routing, args.rows, experts, 1)
            for gemm, (n, k) in (("gemm1", (2 * ffn, hidden)), ("gemm2", (hidden, ffn))):
                case = Case(counts, n, k)
                for op in args.ops.split(","):
                    if OPS[op] == 1 and gemm == "gemm2":
                        continue
                    impls = {name: lib.bind(op, case) for name, lib in libraries.items()}
                    if not args.no_peers:
                        impls |= {"torch": case.torch_grouped(op), "cublas": case.dense(op)}
                    times = time_interleaved(impls, args.rounds, args.batch_ms)
                    flops = 2.0 * args.rows * n * k
                    for name, ms in times.items():
                        median = statistics.median(ms)
                        totals.setdefault((routing, op), {}).setdefault(name, []).append(
                            (flops, median))
                        records.append({
                            "op": "grouped_gemm", "pass": op, "gemm": gemm, "shape": shape,
                            "tokens": args.rows, "ranks": 2, "routing": routing, "dtype": "bf16",
                            "impl": name, "backend": "cuda", "hidden": hidden, "ffn": ffn,
                            "experts": experts, "n": n, "k": k, "ms_median": median,
                            "ms_min": min(ms), "ms_max": max(ms), "runs": len(ms),
                            "tflops": flops / median * 1e-9, "seed": 1, "numerics": "default",
                            "commit": args.commit, "machine": torch.cuda.get_device_name(),
                            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
                del case
                torch.cuda.empty_cache()
        for (routing, op), by_name in totals.items():
            cells = []
            for name in names:
                parts = by_name[name]
                rate = sum(f for f, _ in parts) / sum(ms for _, ms in parts) * 1e-9
                cells.append(f"{rate:6.0f} ({' '.join(f'{ms:.3f}' for _, ms in parts)})")
            print(f"{shape:<17} {routing:<11} {op:<9} " + " ".join(f"{c:>22}" for c in cells),
                  flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"schema": 1, "records": records}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
