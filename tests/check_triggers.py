#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every test that docs/design/triggers.md names exists.

    python3 check_triggers.py triggers.md path/to/uniep_tests cli_test.py
"""

import re
import subprocess
import sys


def gtest_names(program):
    """Suite.Test, without prefixes and parameters of instances; and the suites alone."""
    names, suite = set(), ""
    listing = subprocess.run([program, "--gtest_list_tests"], check=True, text=True,
                             stdout=subprocess.PIPE).stdout
    for line in listing.splitlines():
        word = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = word.rstrip(".").split("/")[-1]
            names.add(suite)
        else:
            names.add(f"{suite}.{word.split('/')[0]}")
    return names


def main():
    document, program, cli = sys.argv[1:]
    with open(document, encoding="utf-8") as file:
        quoted = re.findall(r"`([^`\n]+)`", file.read())
    with open(cli, encoding="utf-8") as file:
        known = gtest_names(program) | set(re.findall(r"def (test_\w+)", file.read()))
    named = [name for name in quoted
             if re.fullmatch(r"[A-Z]\w+\.\w+|test_(?!grouped_gemm_cuda)\w+", name)]
    missing = [name for name in named if name not in known]
    if missing or len(named) < 30:
        sys.exit(f"{document} names {len(named)} tests; these do not exist: {missing}")
    print(f"{len(named)} names of tests, all there")


if __name__ == "__main__":
    main()
