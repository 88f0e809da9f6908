#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`--backend cuda` of the uniep program without a GPU: uniep_emulated is that program with the CUDA
runtime and the GPU's kernels emulated on the CPU. In emulation f32 has the CPU's bits, so outputs are
compared with those of the CPU backend byte for byte. Standard library only.

    python3 cuda_test.py path/to/uniep_emulated [unittest arguments]
"""

import json
import os
import re
import sys

import cli_test
from cli_test import RESULTS, Problem, read_bytes, read_tensors, relative_error

LABEL = "uniep_emulated: for tests; --backend cuda runs the GPU's kernels emulated on this CPU"
CUDA = ("--backend", "cuda")
SMALL = ("--hidden", 16, "--ffn", 24)


class CudaTest(cli_test.ProgramTest):
    def run_uniep(self, *args, **options):
        done = super().run_uniep(*args, **options)
        label, _, rest = done.stderr.partition("\n")
        self.assertTrue(label.startswith(LABEL), done.stderr)
        done.stderr = rest
        return done

    def run_case(self, *flags):
        """The output file's bytes."""
        self.ok("run", self.case, "-o", self.out, *flags)
        return read_bytes(self.out)

    # -- info

    def test_info_names_the_emulated_gpu(self):
        info = json.loads(self.ok("info", "--json", "-"))
        self.assertEqual(info["backends"], {"cpu": "ok", "cuda": "ok"})
        self.assertIs(info["gpu"]["emulated"], True)
        self.assertRegex(self.ok("info"), r"gpu +a GPU emulated on this CPU, capability 9.0, 8 SMs")

    # -- run

    def test_run_has_the_cpus_bits_in_f32(self):
        problem = Problem("F32")
        problem.ids[0:3] = [-1, -1, -1]  # a token without choice
        problem.ids[3:6] = [2, 2, 2]     # one expert three times
        tensors = problem.tensors("I64")
        tensors["tokens_per_rank"] = ("I64", [3], [7, 0, 4])
        self.write(tensors)
        expected = self.run_case("--backward")
        for flags in ((), ("--ranks", 1), ("--ranks", 8),
                      ("--ranks", 2, "--schedule", "fusion=split,payload=choice,dispatch=pull"),
                      ("--schedule", "combine=pull,blocks=2,push_warps=15,chunk=1,sms=3")):
            self.assertEqual(self.run_case("--backward", *CUDA, *flags), expected, flags)
        forward = self.run_case()
        self.assertNotEqual(forward, expected)
        self.assertEqual(self.run_case(*CUDA, "--ranks", 4), forward)

    def test_run_bf16_against_float64(self):
        problem = Problem("BF16")
        self.write(problem.tensors())
        alone = self.run_case("--backward", *CUDA, "--ranks", 1)
        got, want, bounds = read_tensors(self.out), problem.results(), problem.bounds()
        self.assertEqual(set(got), set(RESULTS))
        for name in RESULTS:
            self.assertLessEqual(relative_error(got[name][2], want[name]), bounds[name], name)
        self.assertEqual(self.run_case("--backward", *CUDA, "--ranks", 5), alone)

    def test_run_with_a_process_for_each_rank(self):
        problem = Problem("F32")
        problem.ids[0:3] = [-1, -1, -1]
        tensors = problem.tensors("I64")
        tensors["tokens_per_rank"] = ("I64", [3], [7, 0, 4])
        self.write(tensors)
        expected = self.run_case("--backward")
        for flags in ((), ("--ranks", 1), ("--ranks", 8),
                      ("--ranks", 2, "--schedule", "payload=choice,dispatch=pull,combine=pull")):
            got = self.run_case("--backward", *CUDA, "--processes", *flags)
            self.assertEqual(got, expected, flags)

    def test_run_without_tokens(self):
        self.write(Problem("F32", tokens=0).tensors())
        expected = self.run_case("--backward")
        self.assertEqual(self.run_case("--backward", *CUDA, "--ranks", 3), expected)

    def test_run_says_how(self):
        self.ok("case", "-o", self.case, *SMALL, "--global-tokens", 20)
        text = self.ok("run", self.case, "-o", self.out, *CUDA, "--ranks", 3, "--json", "-")
        report = json.loads(text)
        self.assertEqual((report["backend"], report["ranks"]), ("cuda", 3))
        self.assertIn("emulated", report["gpu"])
        self.assertEqual(report["schedule"], "fusion=split,payload=rank,dispatch=push,combine=push,"
                                             "blocks=2,push_warps=8,chunk=8,sms=0")
        self.assertGreater(report["memory_bytes"]["symmetric"], 0)

    # -- refusals

    def test_refusals(self):
        self.ok("case", "-o", self.case, *SMALL, "--global-tokens", 8)
        run = ("run", self.case, "-o", self.out, *CUDA)
        for schedule, says in (
            ("fusion=fused", ("fusion=fused", "tensor cores", "fusion=split")),
            ("fusion=fused,combine=pull", ("fusion=fused", "combine is pull", "fusion=split")),
            ("tile_m=64", ("'tile_m'", "payload, dispatch, combine")),
            ("direction=push", "'direction'"),
            ("blocks=33", ("blocks is 33", "0 to 32")),
            ("dispatch=throw", ("'throw'", "push or pull")),
        ):
            self.refused(*run, "--schedule", schedule, says=says)
        self.refused(*run, "--ranks", 17, says=("17", "1 to 16"))
        self.refused(*run, "--processes", "--ranks", 17, says=("17", "1 to 16"))
        self.refused("bench", *CUDA, "--processes", says=("--processes", "virtual ranks"))
        self.refused(*run, "--ranks", 16, "--schedule", "blocks=32", code=3,
                     says=("512 blocks", "fewer"))
        self.refused("trace", "-o", self.out, *CUDA, code=3, says=("trace", "cpu"))
        self.refused("train", *CUDA, code=3, says=("train", "cpu"))

    # -- verify

    def test_verify(self):
        text = self.ok("verify", *CUDA, *SMALL, "--global-tokens", 30, "--ranks", "2,3", "--routing",
                       "zipf:1.2", "--mask", 0.2, "--schedules", 8)
        self.assertEqual(text.count(" 8/8"), 4)
        self.assertRegex(text, r"PASS: 33 runs, 0 failures")
        # All rows of a dtype show the same hashes.
        for name, dtypes in (("2 ranks", 2), ("3 ranks", 2), ("cpu products", 1)):
            rows = re.findall(rf"^{name} +(.*)  \d/\d$", text, re.MULTILINE)
            alone = re.findall(r"^gpu alone +(.*)  1/1$", text, re.MULTILINE)
            self.assertEqual(rows, alone[:dtypes])
        text = self.ok("verify", *CUDA, *SMALL, "--global-tokens", 20, "--ranks", 8, "--dtype", "f32",
                       "--schedules", 2)
        self.assertIn(" 2/2", text)

    def test_verify_by_a_sample(self):
        text = self.ok("verify", *CUDA, *SMALL, "--global-tokens", 70, "--ranks", 2, "--topk", 3,
                       "--schedules", 1, "--sample", 30)
        self.assertEqual(len(re.findall("^30 tokens .* 1/1$", text, re.MULTILINE)), 2)
        self.assertEqual(text.count("f64 error     "), 2)
        self.assertNotIn("not compared", text)
        self.assertIn("PASS: 7 runs, 0 failures", text)
        self.refused("verify", "--sample", 3, says=("--sample", "cuda"))

    def test_fuzz_is_replayable(self):
        text = self.ok("verify", *CUDA, "--fuzz", "--seconds", 4, "--seed", 99)
        last = int(re.search(r"seeds 99 to (\d+)", text).group(1))
        for _ in range(2):
            text = self.ok("verify", *CUDA, "--fuzz", "--seconds", 0, "--seed", last, "--json", "-")
            replay = json.loads(text)
            self.assertEqual((replay["backend"], replay["runs"], replay["failures"]), ("cuda", 1, 0))

    # -- bench: what is recorded, since times of an emulation say nothing

    def bench(self, op, *flags):
        text = self.ok("bench", *CUDA, *SMALL, "--tokens-per-rank", 20, "--repeats", 2, "--op", op,
                       "--json", "-", *flags)
        (record,) = json.loads(text)["records"]
        self.assertEqual((record["op"], record["backend"], record["impl"], record["tokens"]),
                         (op, "cuda", "split", 20))
        self.assertEqual((record["hidden"], record["ffn"], record["gpus"]), (16, 24, 1))
        self.assertLessEqual(record["ms_min"], record["ms_median"])
        self.assertIs(record["machine"]["gpu"]["emulated"], True)
        self.assertTrue(record["commit"] and record["driver"])
        return record

    def test_bench(self):
        forward = ["plan", "dispatch", "products", "combine"]
        backward = ["backward dispatch", "backward products", "backward combine", "backward wgrad"]
        for op, stages in (("layer", forward + backward), ("backward", backward)):
            record = self.bench(op)
            self.assertEqual(set(record["stages_ms"]), set(stages))
            self.assertAlmostEqual(record["gemm_only_ms"], sum(
                ms for stage, ms in record["stages_ms"].items()
                if stage.endswith(("products", "wgrad"))))
            self.assertGreater(record["tflops"], 0)
        self.assertNotIn("gbps", self.bench("plan"))
        # Results return as a row a choice; two choices of a token may go out as one row.
        rates = {}
        for op in ("dispatch", "combine"):
            for payload in ("rank", "choice"):
                record = self.bench(op, "--schedule", "payload=" + payload)
                rates[op, payload] = record["gbps"] * record["ms_median"]
                self.assertGreater(record["ceiling"], 0)
        self.assertAlmostEqual(rates["combine", "rank"], rates["combine", "choice"])
        self.assertAlmostEqual(rates["dispatch", "choice"], rates["combine", "choice"])
        self.assertLess(rates["dispatch", "rank"], rates["dispatch", "choice"])

    def test_tune_measures(self):
        environment = dict(os.environ, UNIEP_CACHE=self.path("cache"))
        sizes = ("--global-tokens", 16, "--hidden", 16, "--ffn", 16, "--ranks", 2)
        done = self.run_uniep("tune", "--backend", "cuda", *sizes, "--measure", 1, "--repeats", 1,
                              "--json", "-", env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        tuned = json.loads(done.stdout)
        self.assertEqual(len(tuned["measured"]), 2)
        self.assertTrue(os.path.exists(tuned["stored"]))
        for point in tuned["measured"]:
            self.assertIn("fusion=split", point["schedule"])

    def test_bench_refusals(self):
        bench = ("bench", *CUDA, *SMALL)
        self.refused(*bench, "--op", "gemm", says=("'gemm'", "plan, dispatch, combine, grouped_gemm"))
        self.refused(*bench, "--op", "grouped_gemm", "--dtype", "f32", says=("'f32'", "bf16"))
        self.refused(*bench, "--op", "grouped_gemm", code=3, says="tensor cores")
        self.refused(*bench, "--baseline", "nccl", says=("'nccl'", "split"))
        self.refused("bench", "--op", "plan", says=("'plan'", "layer or forward"))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: cuda_test.py path/to/uniep_emulated [unittest arguments]")
    cli_test.UNIEP = os.path.abspath(sys.argv.pop(1))
    cli_test.unittest.main()
