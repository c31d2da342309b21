"""Runs rdma-core's tests in Python over a device, and writes a line for each: its result, its name and the reason. Debian's python3-pyverbs has them,
partly compressed, among the documentation of rdma-core.

suite.py FOLDER DEVICE    FOLDER: empty, for the unpacked tests
"""
import gzip
import importlib
import pathlib
import random
import sys
import unittest

folder, device = pathlib.Path(sys.argv[1], "tests"), sys.argv[2]
folder.mkdir()
for path in pathlib.Path("/usr/share/doc/rdma-core/tests").glob("*.py*"):
    data = path.read_bytes()
    (folder / path.name.removesuffix(".gz")).write_bytes(gzip.decompress(data) if path.suffix == ".gz" else data)
sys.path[:0] = [str(folder.parent), str(folder)]
sys.argv[1:] = ["--dev", device, "--gid", "0"]
importlib.import_module("args_parser").parser.parse_args()


def line(result, test, reason=""):
    print(result, test.id(), " ".join(str(reason).split()), sep="\t", flush=True)


class Result(unittest.TestResult):
    def addSuccess(self, test):
        line("passed", test)

    def addSkip(self, test, reason):
        line("skipped", test, reason)

    def addFailure(self, test, err):
        line("failed", test, err[1])

    addError = addFailure


random.seed(1)  # the tests draw flags and sizes
tests = importlib.import_module("tests")
unittest.defaultTestLoader.loadTestsFromModule(tests).run(Result())
