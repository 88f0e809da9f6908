#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The uniep program as a user meets it: exit codes, sentences, files, and results that are compared
with an independent computation in Python. Standard library only.

    python3 cli_test.py path/to/uniep [unittest arguments]
"""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

UNIEP = ""
RESULTS = ("out", "d_x", "d_topk_weights", "d_w1", "d_w2")
SIZES = {"BF16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}
FORMATS = {"F32": "f", "F64": "d", "I32": "i", "I64": "q"}


# ---- safetensors, written and read from their description alone -------------------------------


def to_bf16(value):
    """Bits of the nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if math.isnan(value):
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 & 0xFFFF


def round_to(dtype, value):
    """The value that a file of this dtype would hold."""
    if dtype == "BF16":
        return struct.unpack("<f", struct.pack("<I", to_bf16(value) << 16))[0]
    return struct.unpack("<f", struct.pack("<f", value))[0]


def pack(dtype, values):
    if dtype == "BF16":
        return struct.pack(f"<{len(values)}H", *(to_bf16(v) for v in values))
    return struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)


def unpack(dtype, data):
    if dtype == "BF16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return [struct.unpack("<f", struct.pack("<I", w << 16))[0] for w in words]
    return list(struct.unpack(f"<{len(data) // SIZES[dtype]}{FORMATS[dtype]}", data))


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def file_bytes(header, data=b""):
    """A file from a header (text, or an object for JSON) and the bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_case(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, values)."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, values) in tensors.items():
        raw = pack(dtype, values)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    with open(path, "wb") as file:
        file.write(file_bytes(header, data))


def read_tensors(path):
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            values = unpack(entry["dtype"], content[begin:end])
            tensors[name] = (entry["dtype"], entry["shape"], values)
    return tensors


# ---- the layer in Python floats, which are float64 --------------------------------------------


class Problem:
    """A random case; every value is exact in its dtype."""

    def __init__(self, dtype, tokens=11, hidden=24, ffn=16, experts=5, topk=3, seed=7):
        rng = random.Random(seed)
        self.dtype, self.hidden, self.ffn = dtype, hidden, ffn
        self.tokens, self.experts, self.topk = tokens, experts, topk

        def normal(count, scale):
            return [round_to(dtype, rng.gauss(0, scale)) for _ in range(count)]

        self.x = normal(tokens * hidden, 1)
        self.d_out = normal(tokens * hidden, 1)
        self.w1 = normal(experts * 2 * ffn * hidden, 1 / math.sqrt(hidden))
        self.w2 = normal(experts * hidden * ffn, 1 / math.sqrt(ffn))
        self.ids = [rng.randrange(-1, experts) for _ in range(tokens * topk)]
        self.weights = [round_to("F32", rng.uniform(0.05, 1)) for _ in range(tokens * topk)]

    def tensors(self, id_dtype="I32"):
        t, h, f, e, k = self.tokens, self.hidden, self.ffn, self.experts, self.topk
        return {
            "topk_ids": (id_dtype, [t, k], self.ids),
            "x": (self.dtype, [t, h], self.x),
            "w1": (self.dtype, [e, 2 * f, h], self.w1),
            "topk_weights": ("F32", [t, k], self.weights),
            "w2": (self.dtype, [e, h, f], self.w2),
            "d_out": (self.dtype, [t, h], self.d_out),
        }

    def results(self):
        """out, d_x, d_topk_weights, d_w1, d_w2 by the formulas of the layer."""
        h, f = self.hidden, self.ffn
        out = [0.0] * len(self.x)
        d_x = [0.0] * len(self.x)
        d_weights = [0.0] * len(self.weights)
        d_w1 = [0.0] * len(self.w1)
        d_w2 = [0.0] * len(self.w2)
        for i, expert in enumerate(self.ids):
            if expert < 0:
                continue
            weight, token = self.weights[i], i // self.topk
            x = self.x[token * h : (token + 1) * h]
            d_out = self.d_out[token * h : (token + 1) * h]
            gate, up = expert * 2 * f * h, (expert * 2 + 1) * f * h  # where their rows start in w1
            down = expert * h * f
            for j in range(f):
                g = sum(self.w1[gate + j * h + c] * x[c] for c in range(h))
                u = sum(self.w1[up + j * h + c] * x[c] for c in range(h))
                sigmoid = 1 / (1 + math.exp(-g))
                silu = g * sigmoid
                a = silu * u * weight
                d_a = sum(d_out[c] * self.w2[down + c * f + j] for c in range(h))
                d_weights[i] += silu * u * d_a
                d_g = d_a * weight * u * sigmoid * (1 + g * (1 - sigmoid))
                d_u = d_a * weight * silu
                for c in range(h):
                    out[token * h + c] += a * self.w2[down + c * f + j]
                    d_x[token * h + c] += d_g * self.w1[gate + j * h + c]
                    d_x[token * h + c] += d_u * self.w1[up + j * h + c]
                    d_w1[gate + j * h + c] += d_g * x[c]
                    d_w1[up + j * h + c] += d_u * x[c]
                    d_w2[down + c * f + j] += d_out[c] * a
        return {"out": out, "d_x": d_x, "d_topk_weights": d_weights, "d_w1": d_w1, "d_w2": d_w2}

    def bounds(self):
        """Relative error by norm: roundings to storage on the longest path, amplified by the
        activation, and one fp32 rounding for each step of the chains (docs/design/numerics.md)."""
        storage = 2.0**-8 if self.dtype == "BF16" else 2.0**-24
        fp32 = 2.0**-24
        h, f, k, rows = self.hidden, self.ffn, self.topk, self.tokens * self.topk
        return {
            "out": 7 * storage + (3 * h + f + k + 16) * fp32,
            "d_x": 10 * storage + (6 * h + 2 * f + k + 32) * fp32,
            "d_topk_weights": 6 * storage + (6 * h + f + 32) * fp32,
            "d_w1": 9 * storage + (6 * h + rows + 32) * fp32,
            "d_w2": 6 * storage + (3 * h + rows + 16) * fp32,
        }


def relative_error(got, want):
    error = math.sqrt(sum((a - b) ** 2 for a, b in zip(got, want)))
    return error / math.sqrt(sum(b * b for b in want))


# ---- the tests --------------------------------------------------------------------------------


class ProgramTest(unittest.TestCase):
    """A folder of its own for each test, and the program run in it."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="uniep-cli-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.case = self.path("case.safetensors")
        self.out = self.path("result.safetensors")

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_uniep(self, *args, **options):
        options.setdefault("timeout", 60)
        return subprocess.run(
            [UNIEP, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=self.folder, encoding="utf-8", errors="replace", **options)

    def ok(self, *args, **options):
        done = self.run_uniep(*args, **options)
        self.assertEqual(done.returncode, 0, f"{args}: {done.stderr}")
        self.assertEqual(done.stderr, "")
        return done.stdout

    def refused(self, *args, says=(), code=2, **options):
        """Refused with `code`, one sentence, nothing on stdout and no file left behind."""
        before = sorted(os.listdir(self.folder))
        done = self.run_uniep(*args, **options)
        self.assertEqual(done.returncode, code, f"{args}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "", args)
        self.assertTrue(done.stderr.startswith("uniep: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for text in (says,) if isinstance(says, str) else says:
            self.assertIn(text, done.stderr)
        self.assertEqual(sorted(os.listdir(self.folder)), before, args)
        return done.stderr

    def hashes(self, *args):
        return json.loads(self.ok("run", *args, "--json", "-"))["hashes"]

    def write(self, tensors, metadata=None):
        write_case(self.case, tensors, metadata)


class CliTest(ProgramTest):
    # -- what it prints

    def test_version_and_help(self):
        self.assertRegex(self.ok("--version"), r"^uniep \d+\.\d+\.\d+\n$")
        commands = re.findall(r"^  ([a-z]+) ", self.ok("--help"), re.MULTILINE)
        expected = {"info", "case", "run", "verify", "bench", "trace", "train", "simulate", "tune"}
        self.assertTrue(expected <= set(commands))
        for command in commands:
            text = self.ok(command, "--help")
            self.assertIn("--json FILE", text)
            self.assertIn("Exit codes", text)

    def test_info(self):
        info = json.loads(self.ok("info", "--json", "-"))
        self.assertEqual(info["schema"], 1)
        self.assertEqual(info["backends"]["cpu"], "ok")
        table = self.ok("info", "--json", self.path("info.json"))
        with open(self.path("info.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["cpu"], info["cpu"])
        self.assertIn(info["cpu"], table)

    def test_json_is_all_there_is_on_standard_output(self):
        summary = json.loads(self.ok("case", "-o", self.case, "--json", "-"))
        self.assertEqual((summary["tokens"], summary["hidden"]), (256, 64))
        self.assertEqual(list(self.hashes(self.case, "-o", self.out)), ["out"])
        self.assertEqual(set(self.hashes(self.case, "-o", self.out, "--backward")), set(RESULTS))
        report = json.loads(self.ok("verify", "--schedules", 2, "--ranks", "1,2", "--json", "-"))
        self.assertEqual((report["runs"], report["failures"]), (8, 0))
        text = self.ok("bench", "--repeats", 2, "--tokens-per-rank", 16, "--json", "-")
        records = json.loads(text)["records"]
        self.assertEqual([record["impl"] for record in records], ["fused", "split"])
        for record in records:
            self.assertEqual((record["op"], record["tokens"], record["ranks"]), ("layer", 16, 2))
            self.assertLessEqual(record["ms_min"], record["ms_median"])
            self.assertGreater(record["gbps"], 0)
            self.assertTrue(record["commit"])
        self.assertIn("traceEvents", json.loads(self.ok("trace", "-o", "-")))

    # -- refusals of the command line

    def test_bad_command_lines(self):
        case, out = self.case, self.out
        self.ok("case", "-o", case)
        self.refused(says=("no command", "info, case, run"))
        self.refused("fly", says=("'fly'", "info, case, run"))
        self.refused("run", case, says="--output")
        self.refused("run", "-o", out, says="CASE")
        self.refused("run", case, "-o", says="--output needs a value")
        self.refused("run", case, "-o", out, "--bogus", says=("'--bogus'", "--backward"))
        self.refused("run", case, "-o", out, "more", says="'more'")
        self.refused("run", case, "-o", out, "--ranks=2", "--ranks=2", says="--ranks is given 2")
        self.refused("run", case, "-o", out, "-o", self.path("b"), says="--output is given 2 times")
        self.refused("run", case, "-o", out, "--backward", "--backward", says="given 2 times")
        self.refused("run", case, "-o", out, "--json", out, says="different files")
        self.refused("run", case, "-o", "-", says="standard output")
        self.refused("run", case, "-o", out, "--backend", "tpu", says=("'tpu'", "cpu or cuda"))
        self.refused("run", case, "-o", out, "--numerics", "fast", says=("'fast'", "default"))
        self.refused("verify", "--fuzz", "--ranks", 2, says="--ranks")
        self.refused("verify", "--seconds", 1, says="--fuzz")
        self.refused("verify", "--dtype", "f64", says=("'f64'", "bf16"))
        self.refused("bench", "--op", "nothing", says=("'nothing'", "layer"))
        self.refused("bench", "--baseline", "nccl", says=("'nccl'", "split"))

    def test_bad_numbers(self):
        for flag, values in {
            "--ranks": ("0", "-1", "1025", "two", "1.5", "", "99999999999999999999", "0x2", " 2"),
            "--seed": ("-1", "18446744073709551616", "1e3"),
            "--hidden": ("0", "-1", "12", "9223372036854775808"),
            "--ffn": ("7",),
            "--experts": ("0", "1048577"),
            "--topk": ("0", "65"),
            "--global-tokens": ("-1", "1e2"),
            "--mask": ("nan", "-0.1", "1.1", "half"),
            "--dtype": ("f16",),
            "--shape": ("huge",),
            "--routing": ("W8", "zipf:", "zipf:x", "file:"),
        }.items():
            for value in values:
                self.refused("case", "-o", self.out, flag, value, says=value)
        self.refused("case", "-o", self.out, "--shape", "qwen3-30b-a3b", says="--global-tokens")
        self.refused("case", "-o", self.out, "--routing", "file:absent", says="'absent'")
        self.refused("case", "-o", self.out, "--routing", "W5", says=("W5", "2 ranks"))
        self.refused("verify", "--ranks", "1,,2", says="1 to 1024")
        self.refused("verify", "--ranks", "1,2x", says="'2x'")
        self.refused("verify", "--schedules", "0", says="1 to 100000")
        self.refused("verify", "--fuzz", "--seconds", "-1", says="'-1'")
        self.refused("bench", "--tokens-per-rank", 1 << 62, "--ranks", 8, says=str(1 << 62))

    def test_bad_schedules(self):
        self.ok("case", "-o", self.case, "--global-tokens", 8)
        for schedule, says in {
            "nonsense": "'nonsense'",
            "fusion": "key=value",
            "=": "keys are",
            "fusion=": "split or fused",
            "fusion=fused,": "key=value",
            ",": "key=value",
            "fusion=melted": "'melted'",
            "fusion=split,fusion=split": "given twice",
            "speed=11": "'speed'",
            "tile_m=7": "multiple of 8",
            "tile_m=99999999999": "99999999999",
            "tile_n=65": "multiple of 64",
            "workers=0": "1 to 256",
            "workers=2,comm_workers=2": "at least one worker",
            "chunk=1.5": "whole number",
        }.items():
            self.refused("run", self.case, "-o", self.out, "--schedule", schedule, says=says)

    def test_too_many_threads(self):
        self.ok("case", "-o", self.case, "--global-tokens", 8)
        for flags in (("--ranks", 1024, "--schedule", "workers=64"),
                      ("--ranks", 17, "--schedule", "workers=256", "--processes")):
            self.refused("run", self.case, "-o", self.out, *flags, says=("threads", "4096"))
            self.refused("verify", "--global-tokens", 8, *flags, says=("threads", "4096"))

    # -- refusals of files

    def test_bad_files(self):
        self.refused("run", self.path("absent"), "-o", self.out, says=("absent", "No such file"))
        self.refused("run", self.folder, "-o", self.out, says="directory")
        os.mkfifo(self.path("fifo"))
        self.refused("run", self.path("fifo"), "-o", self.out, says="regular file")
        self.ok("case", "-o", self.case, "--global-tokens", 8)
        self.refused("run", self.case, "-o", self.path("no/where"), says="writable folder")
        self.refused("run", self.case, "-o", self.folder, says="regular file")
        nowhere = self.path("no/where")
        self.refused("run", self.case, "-o", self.out, "--json", nowhere, says="JSON file")
        self.refused("case", "-o", self.out, "--json", self.path("no/where"), says="JSON file")

    def test_bad_headers(self):
        one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        two = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
        text = json.dumps(one).encode()
        eight, sixteen = bytes(8), bytes(16)

        def entry(**changes):
            return {"x": {**one, **changes}}

        for content, says in (
            (b"", "length field"),
            (b"\0\0\0", "length field"),
            (struct.pack("<Q", 1 << 63) + b"{}", "at most"),
            (struct.pack("<Q", 100_000_001) + b"{}", "at most"),
            (struct.pack("<Q", 50) + b"{}", "cut short"),
            (file_bytes(b""), "begin with"),
            (file_bytes(b"[]"), "begin with"),
            (file_bytes(b" {}"), "begin with"),
            (file_bytes(b"{"), "not valid JSON"),
            (file_bytes(b'{"x":'), "not valid JSON"),
            (file_bytes(b"{} {}"), "not valid JSON"),
            (file_bytes(b'{"\xff":1}'), "not valid JSON"),
            (file_bytes(b"{}\0{}"), "NUL"),
            (file_bytes(b'{"x":' * 5000), "only dtype"),
            (file_bytes(b'{"x":' + b"[" * 5000), "a list"),
            (file_bytes(b'{"x":' + text + b',"x":' + text + b"}", eight), "'x' twice"),
            (file_bytes(b'{"x":' + text + b',"\\u0078":' + text + b"}", eight), "'x' twice"),
            (file_bytes(b'{"x":{"dtype":"F32","dtype":"F32"}}'), "twice"),
            (file_bytes({"x": one}, bytes(7)), "cut short"),
            (file_bytes({"x": one}, bytes(9)), "trailing bytes"),
            (file_bytes({"x": one, "y": two}, sixteen[:12]), "cut short"),
            (file_bytes({"x": one, "y": {**two, "data_offsets": [4, 12]}}, sixteen), "overlaps"),
            (file_bytes({"x": one, "y": {**one}}, eight), "overlaps"),
            (file_bytes({"x": one, "y": {**two, "data_offsets": [12, 20]}}, bytes(20)), "gaps"),
            (file_bytes(entry(data_offsets=[4, 12]), bytes(12)), "gaps"),
            (file_bytes(entry(data_offsets=[8, 0]), eight), "ascending"),
            (file_bytes(entry(data_offsets=[0, 8, 8]), eight), "begin, end"),
            (file_bytes(entry(data_offsets=[0]), eight), "begin, end"),
            (file_bytes(entry(data_offsets=[-8, 0]), eight), "negative"),
            (file_bytes(entry(data_offsets=[0, 1 << 63]), eight), "63 bits"),
            (file_bytes(entry(shape=[3]), eight), "takes 12"),
            (file_bytes(entry(shape=[1 << 62, 4]), eight), "63 bits"),
            (file_bytes(entry(shape=[0, 1 << 62, 1 << 62]), eight), "63 bits"),
            (file_bytes(entry(shape=[2.0]), eight), "whole numbers"),
            (file_bytes(entry(shape="2"), eight), "list"),
            (file_bytes(entry(shape=[[2]]), eight), "list"),
            (file_bytes(entry(dtype="F8_E4M3"), eight), "F8_E4M3"),
            (file_bytes(entry(dtype=1), eight), "string"),
            (file_bytes(entry(extra=1), eight), "extra"),
            (file_bytes({"x": {"dtype": "F32", "shape": [2]}}, eight), "data_offsets"),
            (file_bytes({"x": None}), "object"),
            (file_bytes({"__metadata__": {"a": 1}}), "strings"),
            (file_bytes({"__metadata__": {}}), "no tensor x"),
        ):
            with open(self.case, "wb") as file:
                file.write(content)
            self.refused("run", self.case, "-o", self.out, says=(says, "case.safetensors"))

    def test_every_truncation_is_refused(self):
        self.write(Problem("F32", tokens=1, hidden=8, ffn=8, experts=1, topk=1).tensors())
        with open(self.case, "rb") as file:
            content = file.read()
        for length in sorted({*range(0, 40), *range(40, len(content), 97), len(content) - 1}):
            with open(self.case, "wb") as file:
                file.write(content[:length])
            self.refused("run", self.case, "-o", self.out)

    def test_mutated_files_are_refused_or_run(self):
        self.write(Problem("F32", tokens=2, hidden=8, ffn=8, experts=2, topk=1).tensors())
        with open(self.case, "rb") as file:
            content = file.read()
        header_end = 8 + struct.unpack("<Q", content[:8])[0]
        rng = random.Random(3)
        pieces = (b"0", b"9", b"-", b'"', b"[", b"]", b"{", b"}", b",", b":", b"\\", b"\0", b"\xff",
                  b"18446744073709551616", b"9223372036854775807", b"null", b"1e9", b"\\u0000")
        for _ in range(200):
            mutant = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 5))):
                begin = rng.randrange(header_end)
                end = begin + rng.choice((0, 1, 1, 3))
                mutant[begin:end] = rng.choice(pieces)
            with open(self.case, "wb") as file:
                file.write(mutant)
            done = self.run_uniep("run", self.case, "-o", "/dev/null")
            self.assertIn(done.returncode, (0, 2), (bytes(mutant[:header_end]), done.stderr))

    def test_tensors_that_disagree(self):
        for says, change in (
            ("no tensor w1", {"w1": None}),
            ("no tensor topk_ids", {"topk_ids": None}),
            ("tokens", {"x": ("F32", [1, 8], [0.5] * 8)}),
            ("hidden", {"x": ("F32", [2, 16], [0.5] * 32)}),
            ("[tokens, hidden]", {"x": ("F32", [16], [0.5] * 16)}),
            ("dtype", {"x": ("BF16", [2, 8], [0.5] * 16)}),
            ("F64", {"x": ("F64", [2, 8], [0.5] * 16)}),
            ("dtype", {"w2": ("BF16", [2, 8, 8], [0.5] * 128)}),
            ("experts", {"w2": ("F32", [1, 8, 8], [0.5] * 64)}),
            ("ffn", {"w1": ("F32", [2, 8, 8], [0.5] * 128)}),
            ("multiple of 8", {"x": ("F32", [2, 4], [0.5] * 8), "d_out": None,
                               "w1": ("F32", [2, 16, 4], [0.5] * 128),
                               "w2": ("F32", [2, 4, 8], [0.5] * 64)}),
            ("value 2 at token 1, choice 0", {"topk_ids": ("I32", [2, 1], [0, 2])}),
            ("value -2 at token 0, choice 0", {"topk_ids": ("I32", [2, 1], [-2, 0])}),
            ("4294967296", {"topk_ids": ("I64", [2, 1], [1 << 32, 0])}),
            ("I32 or I64", {"topk_ids": ("F32", [2, 1], [0, 0])}),
            ("must be F32", {"topk_weights": ("BF16", [2, 1], [1, 1])}),
            ("topk", {"topk_weights": ("F32", [2, 2], [1] * 4)}),
            ("adds up to 1", {"tokens_per_rank": ("I64", [2], [1, 0])}),
            ("rank 1 the count 3", {"tokens_per_rank": ("I64", [2], [1, 3])}),
            ("rank 0 the count -1", {"tokens_per_rank": ("I64", [2], [-1, 3])}),
            ("must be I64", {"tokens_per_rank": ("I32", [2], [1, 1])}),
            ("1 to 1024", {"tokens_per_rank": ("I64", [0], [])}),
            ("d_out", {"d_out": ("F32", [1, 8], [0.5] * 8)}),
        ):
            tensors = Problem("F32", tokens=2, hidden=8, ffn=8, experts=2, topk=1).tensors()
            tensors.update(change)
            self.write({name: t for name, t in tensors.items() if t is not None})
            self.refused("run", self.case, "-o", self.out, says=says)
        tensors = Problem("F32", tokens=2, hidden=8, ffn=8, experts=2, topk=1).tensors()
        for key, value in {"uniep_format": "2", "activation": "gelu", "numerics": "fp8"}.items():
            self.write(tensors, metadata={key: value})
            self.refused("run", self.case, "-o", self.out, says=(key, value))
        del tensors["d_out"]
        self.write(tensors)
        self.ok("run", self.case, "-o", self.out)
        os.remove(self.out)
        self.refused("run", self.case, "-o", self.out, "--backward", says="d_out")

    # -- the world

    def test_the_world_fails(self):
        for flags in (
            ("case", "--global-tokens", 1 << 30),
            ("case", "--hidden", 1 << 20, "--ffn", 1 << 20, "--experts", 64),
            ("trace", "--hidden", 8, "--ffn", 8, "--experts", 1 << 20, "--ranks", 1024),
        ):
            self.refused(*flags, "-o", self.out, code=3, says=("needs about", "memory"))
        self.ok("case", "-o", self.case, "--global-tokens", 8)
        cuda = json.loads(self.ok("info", "--json", "-"))["backends"]["cuda"]
        if cuda != "ok":
            self.assertRegex(cuda, "^no: this build has no CUDA|^no: no NVIDIA GPU|^no: this GPU is")
            for args in (("run", self.case, "-o", self.out), ("verify",), ("verify", "--fuzz"),
                         ("bench",)):
                self.refused(*args, "--backend", "cuda", code=3,
                             says=("--backend cuda cannot run here: ", cuda[len("no: "):]))
        self.refused("run", self.case, "-o", "/dev/full", code=3, says="No space left")
        self.refused("run", self.case, "-o", self.out, "--json", "/dev/full", code=3,
                     says="No space left")
        self.ok("run", self.case, "-o", "/dev/null")

        def small_address_space():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))

        self.refused("case", "-o", self.out, "--hidden", 4096, "--ffn", 4096, code=3, says="memory",
                     preexec_fn=small_address_space)

        def small_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            # The signal's default action would end the program before it could say why.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        self.refused("run", self.case, "-o", self.out, code=3, says="too large",
                     preexec_fn=small_files)

    def test_standard_output_that_fails(self):
        self.ok("case", "-o", self.case, "--global-tokens", 8)
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run([UNIEP, "info"], stdout=full, stderr=subprocess.PIPE, timeout=60,
                                  check=False)
        self.assertEqual(done.returncode, 3)
        self.assertIn(b"standard output", done.stderr)
        # Closed descriptors must not be taken by the output file.
        closed = f'"{UNIEP}" run "{self.case}" -o "{self.out}" >&- 2>&- <&-'
        subprocess.run(closed, shell=True, timeout=60, check=True)
        self.assertEqual(read_tensors(self.out)["out"][1], [8, 64])
        # A reader that leaves: the signal's own exit, and no word.
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([UNIEP, "info"], stdout=writer, stderr=subprocess.PIPE, timeout=60,
                              check=False)
        os.close(writer)
        self.assertEqual((done.returncode, done.stderr), (-13, b""))

    def test_outputs_replace_only_what_they_should(self):
        self.ok("case", "-o", self.case, "--global-tokens", 8)
        with open(self.out, "w", encoding="utf-8") as file:
            file.write("kept")
        self.refused("run", self.path("absent"), "-o", self.out)
        with open(self.out, encoding="utf-8") as file:
            self.assertEqual(file.read(), "kept")
        os.symlink(self.out, self.path("link"))
        self.ok("run", self.case, "-o", self.path("link"))
        self.assertTrue(os.path.islink(self.path("link")))
        self.assertIn("out", read_tensors(self.out))
        os.symlink(self.path("nothing"), self.path("dangling"))
        self.refused("run", self.case, "-o", self.path("dangling"), says="leads nowhere")
        before = self.hashes(self.case, "-o", self.out)
        self.assertEqual(self.hashes(self.case, "-o", self.out), before)
        self.assertFalse([name for name in os.listdir(self.folder) if name.endswith(".tmp")])

    # -- what it computes

    def check_against_float64(self, problem, tensors, *flags):
        self.write(tensors)
        table = self.ok("run", self.case, "-o", self.out, "--backward", *flags)
        self.assertEqual([line.split()[0] for line in table.splitlines()], list(RESULTS))
        got, want, bounds = read_tensors(self.out), problem.results(), problem.bounds()
        t, h, f, e, k = problem.tokens, problem.hidden, problem.ffn, problem.experts, problem.topk
        shapes = {"out": [t, h], "d_x": [t, h], "d_topk_weights": [t, k], "d_w1": [e, 2 * f, h],
                  "d_w2": [e, h, f]}
        self.assertEqual(set(got), set(RESULTS))
        for name in RESULTS:
            dtype, shape, values = got[name]
            self.assertEqual(dtype, problem.dtype if name in ("out", "d_x") else "F32")
            self.assertEqual(shape, shapes[name])
            self.assertLessEqual(relative_error(values, want[name]), bounds[name], name)
        return table

    def test_against_float64(self):
        for dtype in ("F32", "BF16"):
            problem = Problem(dtype)
            problem.ids[0:3] = [-1, -1, -1]  # a token without choice
            problem.ids[3:6] = [2, 2, 2]     # one expert three times
            table = self.check_against_float64(problem, problem.tensors())
            # The same tensors as another program might write them: I64 ids, ranks of uneven size.
            tensors = problem.tensors("I64")
            tensors["tokens_per_rank"] = ("I64", [3], [7, 0, 4])
            tensors["something_else"] = ("F64", [1], [1.0])
            self.assertEqual(self.check_against_float64(problem, tensors), table)
            for schedule in ("fusion=split,direction=pull",
                             "payload=choice,workers=2,comm_workers=1,tile_m=8"):
                flags = ("--ranks", 8, "--schedule", schedule)
                self.assertEqual(self.check_against_float64(problem, tensors, *flags), table)

    def test_zero_tokens(self):
        self.write(Problem("F32", tokens=0).tensors())
        for ranks in (1, 3):
            self.ok("run", self.case, "-o", self.out, "--backward", "--ranks", ranks)
            got = read_tensors(self.out)
            self.assertEqual(got["out"][1:], ([0, 24], []))
            self.assertEqual(set(got["d_w1"][2]), {0.0})
        self.ok("verify", "--global-tokens", 0, "--schedules", 2)

    def test_nan_and_infinity_touch_only_their_rows(self):
        problem = Problem("F32")
        problem.ids = [i % problem.experts for i in range(len(problem.ids))]
        problem.ids[4] = -1
        self.write(problem.tensors())
        self.ok("run", self.case, "-o", self.out, "--backward", "--ranks", 2)
        clean = read_tensors(self.out)
        problem.weights[4] = math.nan  # of a masked choice: ignored
        self.write(problem.tensors())
        self.ok("run", self.case, "-o", self.out, "--backward", "--ranks", 2)
        self.assertEqual(read_tensors(self.out), clean)
        h = problem.hidden
        problem.x[2 * h] = math.nan
        problem.x[5 * h + 3] = math.inf
        self.write(problem.tensors())
        for ranks in (1, 2, 4):
            self.ok("run", self.case, "-o", self.out, "--backward", "--ranks", ranks)
            got = read_tensors(self.out)["out"][2]
            for token in range(problem.tokens):
                row = slice(token * h, (token + 1) * h)
                if token in (2, 5):
                    self.assertTrue(any(not math.isfinite(v) for v in got[row]))
                else:
                    self.assertEqual(got[row], clean["out"][2][row])

    def test_replay_gives_the_same_hash(self):
        flags = ("--routing", "zipf:1.2", "--seed", 5, "--mask", 0.1)
        self.ok("case", "-o", self.case, *flags)
        hashes = self.hashes(self.case, "-o", self.out, "--backward")
        again = self.path("again")
        self.ok("case", "-o", again, *flags)
        for flags in ((), ("--ranks", 5), ("--schedule", "fusion=split,payload=choice")):
            self.assertEqual(self.hashes(again, "-o", self.out, "--backward", *flags), hashes)
        self.ok("case", "-o", self.path("other"), "--seed", 6)
        self.assertNotEqual(self.hashes(self.path("other"), "-o", self.out, "--backward"), hashes)
        self.ok("case", "-o", self.path("routed"), "--routing", f"file:{self.case}", "--seed", 9)
        routed = read_tensors(self.path("routed"))
        self.assertEqual(routed["topk_ids"], read_tensors(self.case)["topk_ids"])

    def launch(self, variables, *args, ranks=3, kill=None):
        """A process a rank, as a launcher starts them; `kill` is killed once it has started."""
        processes = []
        for rank in range(ranks):
            environment = dict(os.environ)
            environment.update({k: v.format(rank=rank, ranks=ranks) for k, v in variables.items()})
            processes.append(subprocess.Popen(
                [UNIEP, *args], env=environment, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True))
        if kill is not None:
            processes[kill].kill()
        ends = []
        for process in processes:
            out, err = process.communicate(timeout=120)
            ends.append((process.returncode, out, err))
        return ends

    def test_launchers(self):
        case = self.path("case")
        self.ok("case", "-o", case, "--routing", "zipf:1.1")
        self.ok("run", case, "-o", self.path("one"), "--backward")
        expected = read_bytes(self.path("one"))
        torchrun = {"RANK": "{rank}", "WORLD_SIZE": "{ranks}", "LOCAL_WORLD_SIZE": "{ranks}",
                    "MASTER_ADDR": "localhost", "MASTER_PORT": str(os.getpid())}
        mpi = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{ranks}"}
        for name, variables in (("torchrun", torchrun), ("mpi", mpi)):
            output = self.path(name)
            ends = self.launch(variables, "run", case, "-o", output, "--backward", "--processes")
            self.assertEqual([end[0] for end in ends], [0, 0, 0], ends)
            self.assertEqual(read_bytes(output), expected)
            # Only rank 0 speaks.
            self.assertEqual([bool(end[1]) for end in ends], [True, False, False])
        # Without --processes the variables mean nothing.
        self.ok("run", case, "-o", self.path("plain"), "--ranks", "2", env={**os.environ, "RANK": "9"})

    def test_launchers_that_lose_a_rank(self):
        case, output = self.path("case"), self.path("out")
        self.ok("case", "-o", case)
        variables = {"RANK": "{rank}", "WORLD_SIZE": "{ranks}", "UNIEP_JOB": f"lost {os.getpid()}"}
        args = ("run", case, "-o", output, "--processes", "--timeout", "5")
        for kill in (0, 1, 2):
            ends = self.launch(variables, *args, kill=kill)
            for rank, (code, out, err) in enumerate(ends):
                if rank == kill or code == 0:  # it may have done its work before
                    continue
                self.assertEqual(code, 3, err)
                self.assertRegex(err, f"rank {kill}\\b")
            self.assertEqual(os.listdir(os.path.dirname(output)).count("out"),
                             1 if ends[0][0] == 0 else 0)
        self.refused(*args, "--ranks", "2", says=["--ranks is 2", "3 ranks"],
                     env={**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "1"})
        self.refused(*args, says=["RANK=x"],
                     env={**os.environ, "RANK": "x", "WORLD_SIZE": "3", "MASTER_PORT": "1"})

    def test_verify(self):
        table = self.ok("verify", "--shape", "tiny", "--ranks", "1,2,4", "--schedules", 5)
        self.assertEqual(table.count(" 5/5"), 6)
        self.assertIn("PASS: 30 runs, 0 failures", table)
        lines = table.splitlines()
        sequential = [line.split()[-6:-1] for line in lines if line.startswith("sequential")]
        self.assertEqual(len(sequential), 2)
        for name in ("1 ranks", "2 ranks", "4 ranks"):
            rows = [line.split()[-6:-1] for line in lines if line.startswith(name)]
            self.assertEqual(rows, sequential)

    def test_fuzz_is_replayable(self):
        table = self.ok("verify", "--fuzz", "--seconds", 5, "--seed", 1234)
        self.assertTrue(table.startswith("seed 1234 "), table)
        last = int(re.search(r"seeds 1234 to (\d+)", table).group(1))
        for _ in range(2):
            text = self.ok("verify", "--fuzz", "--seconds", 0, "--seed", last, "--json", "-")
            replay = json.loads(text)
            self.assertEqual((replay["seed"], replay["runs"], replay["failures"]), (last, 1, 0))

    ROLES = ("send", "pull", "fanout", "gemm1", "activation", "gemm2", "dgrad2", "d_activation",
             "dgrad1", "wgrad2", "wgrad1", "reduce")

    def read_trace(self, path):
        """The slices of a trace-event file, checked as a viewer would: every process and thread has
        a name, and slices of a thread nest or follow one another."""
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
        slices = [e for e in events if e["ph"] == "X"]
        self.assertEqual({e["ph"] for e in events}, {"M", "X", "C"})
        threads = {}
        for event in slices:
            self.assertIn(("process_name", event["pid"], 0), named)
            self.assertIn(("thread_name", event["pid"], event["tid"]), named)
            self.assertGreaterEqual(event["ts"], 0)
            self.assertGreaterEqual(event["dur"], 0)
            self.assertIn(event["cat"], ("task", "wait", "plan", "operation"))
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        for own in threads.values():
            ends = []  # of the slices that are open, in whole nanoseconds
            for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
                start = round(event["ts"] * 1000)
                end = start + round(event["dur"] * 1000)
                while ends and ends[-1] <= start:
                    ends.pop()
                if ends:
                    self.assertLessEqual(end, ends[-1])
                ends.append(end)
        return slices

    def test_trace_shows_overlap(self):
        trace = self.path("trace.json")
        self.ok("trace", "-o", trace, "--ranks", 4, "--global-tokens", 2048, "--hidden", 256,
                "--schedule", "fusion=fused,workers=2,comm_workers=1,chunk=4,tile_m=8")
        slices = self.read_trace(trace)
        self.assertEqual({event["pid"] for event in slices}, {1, 2, 3, 4})
        whole = [(e["pid"], e["name"]) for e in slices if e["cat"] == "operation"]
        self.assertEqual(sorted(whole), [(pid, name) for pid in (1, 2, 3, 4)
                                         for name in ("backward", "forward")])
        forward = [e for e in slices if e["cat"] == "task" and e["args"]["pass"] == "forward"]
        dispatch_end = max(e["ts"] + e["dur"] for e in forward if e["name"] == "send")
        started = [e for e in forward if e["name"] == "gemm1" and e["ts"] < dispatch_end]
        self.assertGreater(len(started), 0, "no gemm1 tile started before dispatch ended")

    def test_trace_draws_a_picture(self):
        svg, report = self.path("a.svg"), self.path("report.json")
        args = ("--ranks", 2, "--schedule", "fusion=split,direction=pull,workers=2")
        text = self.ok("trace", "-o", self.path("a.json"), "--svg", svg, "--json", report, *args)
        self.assertIn(svg, text)
        slices = self.read_trace(self.path("a.json"))
        with open(report, encoding="utf-8") as file:
            summary = json.load(file)
        self.assertEqual((summary["events"], summary["dropped"]), (len(slices), 0))
        space = "{http://www.w3.org/2000/svg}"
        picture = xml.etree.ElementTree.parse(svg).getroot()
        self.assertEqual(picture.tag, space + "svg")
        groups = {}
        for group in picture.iter(space + "g"):
            groups.setdefault(group.get("class"), []).append(group)
        self.assertEqual({name: len(found) for name, found in groups.items()},
                         {"axis": 1, "legend": 1, "lane": 4, "rate": 2, "waits": 1})
        labels = [text.text for text in groups["axis"][0].iter(space + "text")]
        self.assertGreaterEqual(len(labels), 6)
        self.assertTrue(all(re.fullmatch(r"0|[0-9.]+ (ns|µs|ms|s)", label) for label in labels))
        legend = " ".join(text.text for text in groups["legend"][0].iter(space + "text"))
        for role in self.ROLES:
            self.assertRegex(legend, rf"\b{role} [0-9.]+ %")
            self.assertTrue(any(e["name"] == role and e["dur"] > 0 for e in slices), role)
        # A worker may have come too late for any task; rank 0 at least waited or planned.
        self.assertTrue([bar for bar in groups["lane"][0] if bar.get("class")])
        lines = [path for path in picture.iter(space + "path") if path.get("class") == "ceiling"]
        self.assertEqual(len(lines), 2)
        self.ok("trace", "-o", "/dev/null", "--svg", "/dev/null")

    def test_trace_of_a_file(self):
        self.write(Problem("F32").tensors())
        trace = self.path("trace.json")
        self.ok("trace", self.case, "-o", trace, "--ranks", 3)
        rows = sum(1 for expert in Problem("F32").ids if expert >= 0)
        flops = sum(e["args"].get("flops", 0) for e in self.read_trace(trace))
        self.assertEqual(flops, 18 * rows * 24 * 16)
        self.refused("trace", self.case, "-o", trace, "--hidden", 8, says=["--hidden", "case file"])
        self.refused("trace", self.path("none"), "-o", trace, says="none")
        self.refused("trace", "-o", trace, "--svg", trace, says=["-o and --svg", "different"])
        self.refused("trace", "-o", trace, "--svg", "-", says="--svg")
        self.refused("trace", "-o", trace, "--records", 0, says="--records is '0'")
        text = self.ok("trace", "-o", trace, "--records", 4)
        self.assertRegex(text, r"\d+ older events were not kept")

    def test_simulated_trace(self):
        trace, svg, report = self.path("trace.json"), self.path("a.svg"), self.path("report.json")
        args = ("--simulate", "--ranks", 2, "--global-tokens", 512, "--hidden", 256, "--ffn", 128)
        for schedule in ("blocks=4", "fusion=fused,blocks=4,chunk=4"):
            text = self.ok("trace", "-o", trace, "--svg", svg, "--json", report, "--schedule",
                           schedule, *args)
            self.assertIn("predicted", text)
            slices = self.read_trace(trace)
            whole = [(e["pid"], e["name"]) for e in slices if e["cat"] == "operation"]
            self.assertEqual(sorted(whole), [(pid, name) for pid in (1, 2)
                                             for name in ("backward", "forward")])
            flops = sum(e["args"].get("flops", 0) for e in slices)
            self.assertEqual(flops, 18 * 512 * 2 * 256 * 128)
            for role in ("send", "fanout", "gemm1", "gemm2", "dgrad2", "d_activation", "dgrad1",
                         "wgrad2", "wgrad1", "reduce"):
                self.assertTrue(any(e["name"] == role and e["dur"] > 0 for e in slices), role)
            with open(report, encoding="utf-8") as file:
                summary = json.load(file)
            self.assertGreater(summary["forward_us"], 0)
            self.assertIn("class=\"lane", read_bytes(svg).decode())
        self.write(Problem("BF16").tensors())
        self.ok("trace", self.case, "--simulate", "-o", trace, "--ranks", 1)
        flops = sum(e["args"].get("flops", 0) for e in self.read_trace(trace))
        self.assertGreater(flops, 0)
        for flags, says in ((("--simulate", "--schedule", "workers=2"), "'workers'"),
                            (("--simulate", "--dtype", "f32"), "bf16"),
                            (("--simulate", "--hw", "b100"), "'b100'"),
                            (("--simulate", "--processes"), "--processes"),
                            (("--simulate", "--ranks", 3, "--ranks-per-gpu", 2), "divide"),
                            (("--simulate", "--schedule", "sms=200"), "sms is 200"),
                            (("--hw", "h100"), "--simulate")):
            self.refused("trace", "-o", trace, *flags, says=says)

    def test_simulate(self):
        args = ("simulate", "--shape", "qwen3-30b-a3b", "--tokens-per-rank", 1024)
        self.assertRegex(self.ok(*args), r"forward +[0-9.]+")
        predicted = json.loads(self.ok(*args, "--best", 3, "--json", "-"))
        for name in ("forward", "backward"):
            parts = predicted[name]
            total = sum(parts[part] for part in ("tensor", "link", "hbm", "tail", "latency"))
            self.assertAlmostEqual(total, parts["us"], delta=1e-6 * total)
            stages = sum(stage["us"] for stage in parts["stages"].values())
            self.assertAlmostEqual(stages, total, delta=1e-6 * total)
        best = [entry["us"] for entry in predicted["best"]]
        self.assertEqual(len(best), 3)
        self.assertEqual(best, sorted(best))
        self.assertLessEqual(best[0], predicted["forward"]["us"] + predicted["backward"]["us"])
        profile = self.path("hw.json")
        for text, says in (("{", "no JSON"), ("{}", "no hardware profile"),
                           ('{"uniep_hardware":1,"name":"x","figures":{}}', "sms is missing")):
            with open(profile, "w", encoding="utf-8") as file:
                file.write(text)
            self.refused(*args, "--hw", profile, says=[profile, says])
        self.refused(*args, "--hw", self.path("none.json"), says="cannot be read")
        self.refused(*args, "--schedule", "blocks=33", says="blocks is 33")

    def test_tune(self):
        cache = self.path("cache")
        environment = dict(os.environ, UNIEP_CACHE=cache)
        sizes = ("--global-tokens", 64, "--hidden", 32, "--ffn", 16)
        args = ("tune", *sizes, "--ranks", 2, "--measure", 2, "--repeats", 1, "--json", "-")
        tuned = json.loads(self.ok(*args, env=environment))
        self.assertGreater(tuned["scored"], 100)
        self.assertEqual(len(tuned["measured"]), 3)
        self.assertGreater(tuned["choice"]["measured_us"], 0)
        self.assertLessEqual(tuned["choice"]["measured_us"], tuned["default"]["measured_us"])
        stored = os.path.join(cache, "tuned.json")
        self.assertEqual(tuned["stored"], stored)
        text = self.ok(*args[:-2], "--explain", env=environment)
        for part in ("choice", "default", "runner-up", "limit now", "predicted", "measured",
                     "stored in"):
            self.assertIn(part, text)
        # What was stored is what runs, with the same bits.
        self.ok("case", "-o", self.case, *sizes, "--ranks", 2)
        run = ("run", self.case, "-o", self.out, "--backward", "--json", "-", "--schedule")
        plain = json.loads(self.ok(*run[:-1], env=environment))
        self.assertEqual(plain["schedule_from"], "given")
        result = json.loads(self.ok(*run, "auto", env=environment))
        with open(stored, encoding="utf-8") as file:
            entries = json.load(file)["entries"]
        self.assertEqual(result["schedule_from"], "tuned")
        self.assertIn(result["schedule"], [entry["schedule"] for entry in entries.values()])
        self.assertEqual(result["hashes"], plain["hashes"])
        bench = json.loads(self.ok("bench", *sizes, "--ranks", 2, "--repeats", 1, "--schedule",
                                   "auto", "--json", "-", env=environment))
        self.assertEqual([r["impl"] for r in bench["records"]], ["tuned", "fused", "split"])
        self.assertEqual(bench["records"][0]["schedule"], result["schedule"])
        # Whatever lies there, the default runs; one warning says so.
        for text in ("{", '{"uniep_tuned": 0, "entries": {}}'):
            with open(stored, "w", encoding="utf-8") as file:
                file.write(text)
            done = self.run_uniep(*run, "auto", env=environment)
            self.assertEqual(done.returncode, 0)
            self.assertEqual(done.stderr.count("warning"), 1)
            self.assertIn(stored, done.stderr)
            again = json.loads(done.stdout)
            self.assertEqual((again["schedule_from"], again["hashes"]),
                             ("default", plain["hashes"]))
        with open(os.path.join(cache, "cpu.json"), "w", encoding="utf-8") as file:
            file.write("x")
        done = self.run_uniep(*args, env=environment)
        self.assertEqual((done.returncode, done.stderr.count("warning")), (0, 2), done.stderr)
        self.assertEqual(self.run_uniep(*args, env=environment).stderr, "")
        bare = {name: value for name, value in environment.items()
                if name not in ("UNIEP_CACHE", "XDG_CACHE_HOME", "HOME")}
        result = json.loads(self.ok(*run, "auto", env=bare))
        self.assertEqual(result["schedule_from"], "default")
        self.refused("tune", "--schedule", "workers=1", says="--schedule is given")
        self.refused("tune", "--backend", "tpu", says="--backend is 'tpu'")
        self.refused("tune", "--backend", "cuda", "--processes", says="--processes cannot be given")
        self.refused("trace", "-o", self.out, "--schedule", "auto", says="'auto'")

    def test_tune_for_a_gpu_that_is_not_here(self):
        tuned = json.loads(self.ok("tune", "--backend", "cuda", "--shape", "qwen3-30b-a3b",
                                   "--tokens-per-rank", 1024, "--explain", "--json", "-",
                                   env=dict(os.environ, UNIEP_CACHE=self.path("cache"))))
        if "not_measured" not in tuned:
            self.skipTest("there is a GPU")
        self.assertGreater(tuned["scored"], 10000)
        self.assertIsNone(tuned["stored"])
        self.assertLessEqual(tuned["choice"]["predicted"]["us"], tuned["default"]["predicted"]["us"])
        self.assertTrue(tuned["runner_up"]["why"])

    def test_trace_of_a_run_that_loses_a_rank(self):
        trace, svg = self.path("trace.json"), self.path("trace.svg")
        process = subprocess.Popen(
            [UNIEP, "trace", "-o", trace, "--svg", svg, "--ranks", "3", "--processes", "--timeout",
             "20", "--rounds", "1000", "--global-tokens", "2048", "--hidden", "256"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            children = []
            for _ in range(3000):
                with open(f"/proc/{process.pid}/task/{process.pid}/children",
                          encoding="ascii") as file:
                    children = file.read().split()
                if len(children) == 3:
                    break
                time.sleep(0.01)
            time.sleep(0.2)  # somewhere in the midst of the rounds
            os.kill(int(children[1]), signal.SIGKILL)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        self.assertEqual(process.returncode, 3, err)
        self.assertIn("rank 1", err)
        slices = self.read_trace(trace)
        # Of the others, which tell what they stood at.
        self.assertEqual({e["pid"] for e in slices} - {1, 3}, set())
        failed = [e for e in slices if e["args"].get("failed")]
        self.assertTrue(failed)
        with open(svg, encoding="utf-8") as file:
            self.assertIn("FAILED", file.read())


    # -- training

    SMALL = ("--hidden", 16, "--ffn", 16, "--experts", 5, "--context", 4, "--sequence", 16,
             "--batch", 6)

    def train(self, *args):
        return json.loads(self.ok("train", "--json", "-", *args))

    def write_text(self, size=4000):
        text = self.path("text")
        with open(text, "wb") as file:
            file.write((b"A text of its own, again and again. " * (size // 36 + 1))[:size])
        return text

    def test_train_gives_one_hash_and_learns(self):
        text = self.write_text()
        flags = ("--text", text, *self.SMALL, "--steps", 30)
        checkpoint = self.path("checkpoint")
        first = self.train(*flags, "--ranks", 1)
        self.assertEqual(len(first["steps"]), 30)
        self.assertTrue(all(s["step"] == i for i, s in enumerate(first["steps"], 1)))
        for more in (("--ranks", 2), ("--ranks", 7, "--schedule", "fusion=split,payload=choice")):
            again = self.train(*flags, *more)
            for same in ("steps", "loss_hash", "held_out", "config"):
                self.assertEqual(again[same], first[same], more)
        self.assertNotEqual(self.train(*flags, "--seed", 9)["loss_hash"], first["loss_hash"])
        # Stopped at 12, gone on elsewhere; sizes are the checkpoint's.
        self.train("--text", text, *self.SMALL, "--steps", 12, "--checkpoint", checkpoint)
        rest = self.train("--text", text, "--steps", 30, "--resume", checkpoint, "--ranks", 3)
        self.assertEqual(rest["steps"], first["steps"][12:])
        self.assertEqual(rest["loss_hash"], first["loss_hash"])
        self.assertEqual(rest["held_out"], first["held_out"])
        # The entropies, counted here again.
        with open(text, "rb") as file:
            held_out = file.read()[-first["text"]["held_out_bytes"]:]
        self.assertEqual(len(held_out), 400)

        def entropy(things):
            return sum(-math.log2(things.count(t) / len(things)) for t in things) / len(things)

        pairs = list(zip(held_out, held_out[1:]))
        order1 = entropy(pairs) - entropy(list(held_out[:-1]))
        results = first["held_out"]
        self.assertAlmostEqual(results["unigram_entropy"], entropy(list(held_out)), 9)
        self.assertAlmostEqual(results["order1_entropy"], order1, 9)
        self.assertLess(results["bits_per_byte"], results["unigram_entropy"])
        self.assertLess(results["bits_per_byte"], results["bits_per_byte_moe_zeroed"])
        self.assertEqual(sum(results["expert_load"]), 400 * 2 * 2)

    def test_train_prints_a_table(self):
        table = self.ok("train", "--text", self.write_text(), *self.SMALL, "--steps", 3,
                        "--report-every", 2, "--json", self.path("train.json"))
        steps = re.findall(r"^ +(\d+) +\d\.\d{4} ", table, re.MULTILINE)
        self.assertEqual(steps, ["1", "2", "3"])
        with open(self.path("train.json"), encoding="utf-8") as file:
            self.assertIn(f"loss hash {json.load(file)['loss_hash']} after 3 steps", table)

    def test_train_on_the_bundled_text(self):
        run = self.train("--steps", 0, *self.SMALL[:-4], "--sequence", 64)
        self.assertEqual(run["text"]["bytes"], 1358458)
        self.assertAlmostEqual(run["held_out"]["order1_entropy"], 3.4886, 4)

    def test_train_refusals(self):
        text = self.write_text()
        flags = ("--text", text, "--steps", 1, *self.SMALL)
        self.refused("train", "--hidden", 12, says=("hidden is 12", "multiple of 8"))
        self.refused("train", "--experts", 3, "--topk", 4, says=("topk is 4", "1 to 3"))
        self.refused("train", "--learning-rate", 0, says=("--learning-rate", "'0'"))
        self.refused("train", "--steps", "many", says=("--steps", "'many'"))
        self.refused("train", "--processes", says=("--processes", "is no option"))
        self.refused("train", "--text", self.path("none"), says="does not exist")
        self.refused("train", "--text", self.folder, says="no regular file")
        self.refused("train", "--text", text, "--sequence", 4096, says="must have at least")
        self.refused("train", *flags, "--checkpoint", self.path("no/where"), says="no/where")
        self.refused("train", *flags, "--checkpoint", "-", says="--checkpoint")
        self.refused("train", *flags, "--checkpoint", "x", "--json", "x", says=(
            "--checkpoint and --json both name", "different files"))
        self.refused("train", *flags, "--checkpoint", text, says="--checkpoint and --text")
        self.refused("train", *flags, "--resume", text, says="text")
        self.refused("train", "--resume", self.path("none"), says="none")
        self.refused("train", "--hidden", 4096, "--experts", 1024, "--ffn", 16384, code=3,
                     says=("the model", "available"))
        self.refused("train", "--batch", 4096, "--sequence", 4096, code=3,
                     says="available")
        checkpoint = self.path("checkpoint")
        self.ok("train", *flags, "--checkpoint", checkpoint)
        resume = ("train", "--text", text, "--resume", checkpoint)
        self.refused(*resume, "--hidden", 32, says=("--hidden is 32", "trained with 16"))
        self.refused(*resume, "--seed", 2, says=("--seed is 2", "trained with 1"))
        self.refused(*resume, "--learning-rate", 0.5, says=("--learning-rate is 0.5", "0.01"))
        self.refused(*resume, "--steps", 0, says=("--steps is 0", "has done 1"))
        with open(text, "ab") as file:
            file.write(b"more")
        self.refused(*resume, says="is not the one")
        self.ok("case", "-o", self.case)
        self.refused("train", "--resume", self.case, says="no checkpoint")

    def test_train_interrupted_keeps_the_last_checkpoint(self):
        text, checkpoint = self.write_text(), self.path("checkpoint")
        command = [UNIEP, "train", "--text", text, *self.SMALL, "--steps", 1000000,
                   "--checkpoint", checkpoint, "--save-every", 1]
        pause = random.Random(20261203)
        for end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 4:
            process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, cwd=self.folder)
            try:
                for _ in range(3000):
                    if os.path.exists(checkpoint):
                        break
                    time.sleep(0.01)
                time.sleep(pause.uniform(0, 0.03))  # anywhere, also in the midst of a save
                process.send_signal(end)
                self.assertEqual(process.wait(timeout=30), -end)
            finally:
                process.kill()
                process.stderr.close()
            self.assertEqual(sorted(os.listdir(self.folder)), ["checkpoint", "text"])
        with open(checkpoint, "rb") as file:
            content = file.read()
        length = struct.unpack("<Q", content[:8])[0]
        step = int(json.loads(content[8 : 8 + length])["__metadata__"]["step"])
        self.assertGreaterEqual(step, 1)
        rest = self.train("--text", text, "--resume", checkpoint, "--steps", step + 1)
        self.assertEqual(rest["step"], step + 1)

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: cli_test.py path/to/uniep [unittest arguments]")
    UNIEP = os.path.abspath(sys.argv.pop(1))
    unittest.main()
