"""Tests of fared_slots, by python3 -m unittest, with libfared in LD_LIBRARY_PATH. lib/lib_test.go runs them, and compares the module with the readers in Go and C."""

import ctypes
import errno
import gc
import importlib.util
import os
import pathlib
import random
import re
import signal
import struct
import tempfile
import threading
import time
import unittest
import unittest.mock
import warnings

import fared_slots as fs

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "internal/slotfile/testdata/v2.slots"
STEERED = ROOT / "internal/slotfile/testdata/v2-steered.slots"
LAYOUT = {name: int(value) for name, value in re.findall(r"#define L_(\w+) (\d+)", (ROOT / "lib/src/layout.h").read_text())}


class Slots(unittest.TestCase):
    def setUp(self):
        # In memory, as /run: where / is an overlay, as in containers, no reader sees that a directory is deleted.
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.addCleanup(self.directory.cleanup)
        self.path = os.path.join(self.directory.name, "slots")
        filters = warnings.catch_warnings()
        filters.__enter__()
        self.addCleanup(filters.__exit__, None, None, None)
        warnings.simplefilter("ignore", fs.StaleTable)  # nothing maintains most tables of these tests
        self.golden = GOLDEN.read_bytes()
        self.write(self.golden)

    def write(self, data):
        with open(self.path + ".new", "wb") as f:
            f.write(data)
        os.rename(self.path + ".new", self.path)

    def next_run(self):
        """Returns the golden table with the number of another file."""
        data = bytearray(self.golden)
        struct.pack_into("=Q", data, LAYOUT["HEADER_RUN"], 8)
        return data

    def poke(self, at, value, form="I"):
        fd = os.open(self.path, os.O_WRONLY)
        os.pwrite(fd, struct.pack("=" + form, value), at)
        os.close(fd)

    def test_golden(self):
        self.assertEqual(fs.dump(fs.open(self.path)), (ROOT / "internal/slotfile/testdata/v2.txt").read_text())

    def test_keys(self):
        lines = [line.split() for line in (ROOT / "lib/testdata/keys.txt").read_text().splitlines() if line[0] != "#"]
        self.assertGreaterEqual(len(lines), 500)
        for key, want, *shares in lines:
            self.assertEqual(fs.rendezvous([int(s) for s in shares], int(key, 0)), int(want), key)

    def test_shares(self):
        rng = random.Random(1)
        for _ in range(30):
            shares = [rng.randrange(20) * (rng.random() < 0.8) for _ in range(rng.randrange(1, 12))]
            slots = [fs.Slot(0, 0, s, 0, s == 0, False, True) for s in shares]
            slots = rng.choice((list, tuple))(slots)
            chooser, total, count = fs.Chooser(), sum(shares), [0] * len(shares)
            if total == 0:
                self.assertEqual(chooser.next(slots), -1)
                continue
            for k in range(1, 2 * total + 1):
                count[chooser.next(slots)] += 1
                for n, share in zip(count, shares):
                    self.assertLess(abs(n * total - k * share), total * len(shares))
            self.assertEqual(count, [2 * s for s in shares])

    def test_changed_shares(self):
        """A chooser goes on with other slots, more or fewer of them, also if a list has changed; a parked slot loses its credit."""
        slots = [fs.Slot(0, 0, 1, 0, False, False, True)] * 3
        chooser = fs.Chooser()
        self.assertEqual([chooser.next(slots) for _ in range(4)], [0, 1, 2, 0])
        slots[1] = fs.Slot(0, 0, 0, 0, True, False, True)
        self.assertEqual([chooser.next(slots) for _ in range(3)], [2, 2, 0])
        self.assertEqual([chooser.next(tuple(slots[:1])), chooser.next(()), chooser.next([slots[1]])], [0, -1, -1])
        self.assertEqual(sorted(chooser.next(tuple(slots[:1] * 4)) for _ in range(4)), [0, 1, 2, 3])
        self.assertEqual((fs.rendezvous([], 1), fs.rendezvous([0], 1), fs.for_key((), 1), fs.rendezvous([5], -1)), (-1, -1, -1, 0))
        for share in (-1, 1 << 32):
            with self.assertRaises(OverflowError):
                fs.rendezvous([share], 1)

    def test_lookup(self):
        table = fs.open(self.path)
        pair = table.lookup("10.255.0.1", "10.255.0.2")
        self.assertTrue(pair.owned and pair.in_effect and table.is_current(pair))
        self.assertEqual([s.source_port for s in pair.slots], [50000, 50001, 50002, 50003])
        with self.assertRaises(fs.NotFound):
            table.lookup("10.255.0.1", "10.255.9.9")
        number, sequence, vector, vector_sequence = struct.unpack_from("=4I", bytes(pair._read), 32)
        for name, n, sequence in (("PAIR", number, sequence), ("VECTOR", vector - 1, vector_sequence)):
            start, = struct.unpack_from("=Q", self.golden, LAYOUT[f"HEADER_{name}S_AT"])
            size, = struct.unpack_from("=I", self.golden, LAYOUT[f"HEADER_{name}_SIZE"])
            record = start + n * size
            self.assertEqual(struct.unpack_from("=I", self.golden, record), (sequence,))
            self.poke(record, sequence | 1)
            with self.assertRaises(fs.Busy):
                table.lookup("10.255.0.1", "10.255.0.2")
            self.assertFalse(table.is_current(pair))
            self.poke(record, sequence)
        self.assertTrue(table.is_current(pair))
        self.poke(LAYOUT["HEADER_STATE"], LAYOUT["STATE_ENDED"])
        self.assertFalse(table.is_current(pair) or table.lookup("10.255.0.1", "10.255.0.2").owned)
        status = table.status()
        self.assertEqual((status.instance, status.live, status.pairs, status.status_revision), ("test", False, 6, 42))

    def test_replaced_lookup(self):
        """A call continues with the file that has replaced the table's, and a pair of the last file is not current."""
        old = os.open(self.path, os.O_WRONLY)
        self.addCleanup(os.close, old)
        tables = [fs.open(self.path) for _ in range(3)]
        pair = tables[0].lookup("10.255.0.1", "10.255.0.2")
        self.write(self.next_run())
        self.assertTrue(tables[0].is_current(pair))
        os.pwrite(old, struct.pack("=I", LAYOUT["STATE_REPLACED"]), LAYOUT["HEADER_STATE"])
        self.assertFalse(tables[0].is_current(pair))
        for call in (lambda t: t.lookup("10.255.0.1", "10.255.0.2"), lambda t: self.assertRaises(fs.NotFound, t.lookup, "::1", "::2"), lambda t: t.planes()):
            table = tables.pop()
            call(table)
            self.assertEqual(table.status().run, 8)
            self.assertTrue(table.lookup("10.255.0.1", "10.255.0.2").owned)
            self.assertFalse(table.is_current(pair))

    def test_open(self):
        for data, at, value in ((b"", 0, None), (b"root:x:0:0", 0, None), (self.golden[:100], 0, None), (self.golden[:-1], 0, None),
                                (self.golden, LAYOUT["HEADER_LAYOUT"], 99), (self.golden, LAYOUT["HEADER_ORDER"], 9), (self.golden, LAYOUT["HEADER_PAIRS"], 1 << 30)):
            self.write(data)
            if value is not None:
                self.poke(at, value)
            with self.assertRaises(fs.BadTable):
                fs.open(self.path)
        os.remove(self.path)
        with self.assertRaises(fs.NoTable):
            fs.open(self.path)
        with self.assertRaises(fs.BadTable):
            fs.open(self.directory.name)
        with self.assertRaises(OSError) as refused:
            fs.open(self.path + "x" * 300)
        self.assertEqual((refused.exception.errno, refused.exception.filename), (errno.ENAMETOOLONG, self.path + "x" * 300))
        for service in ("udp", "sctp/1", "udp/x", "udp/65536", "tcp/-1"):
            with self.assertRaises(ValueError):
                fs.open(self.path, service)

    def test_close(self):
        """A table that is no longer used is unmapped."""
        table = fs.open(self.path)
        self.assertIn(self.path, pathlib.Path("/proc/self/maps").read_text())
        del table
        gc.collect()
        self.assertNotIn(self.path, pathlib.Path("/proc/self/maps").read_text())

    def test_library(self):
        """The constants are those of the library, and without it the error names the package and the variable."""
        self.assertEqual(fs._MAX_SLOTS, LAYOUT["MAX_SLOTS"])
        for attribute, call in (("PyDLL", unittest.mock.Mock(side_effect=OSError("libfared.so.1: cannot open"))), ("CDLL", unittest.mock.Mock(return_value=unittest.mock.Mock(spec=[])))):
            spec = importlib.util.spec_from_file_location("another", fs.__file__)
            with unittest.mock.patch.object(ctypes, attribute, call), self.assertRaises(ImportError) as missing:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            for text in ("libfared.so.1", "Debian package libfared", "LD_LIBRARY_PATH"):
                self.assertIn(text, str(missing.exception))

    def test_steered(self):
        self.write(STEERED.read_bytes())
        self.assertEqual(fs.open(self.path).steered(), ((17, 4791, 4791), (6, 4800, 5055)))
        first = fs.dump(fs.open(self.path))
        for service in ("tcp/4800", "tcp/5055", "udp/4791"):
            self.assertEqual(fs.dump(fs.open(self.path, service)), first)
        self.assertNotEqual(fs.dump(fs.open(self.path, "udp/4444")), first)  # it has separate ports
        for service in ("tcp/4799", "tcp/5056", "udp/4800"):
            with self.assertRaises(fs.NoService):
                fs.open(self.path, service)
        table = fs.open(self.path, "tcp/4800")
        self.write(self.golden)  # of a data plane that no longer steers by source port
        with self.assertRaises(fs.NoService):
            table.refresh()

    def test_damage(self):
        rng = random.Random(2)
        opened = 0
        for n in range(1500):
            data = bytearray((self.golden, STEERED.read_bytes())[n % 2])
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(rng.choice((LAYOUT["HEADER_BYTES"], len(data))))] = rng.randrange(256)
            self.write(data)
            try:
                table = fs.open(self.path)
                opened += 1
                table.lookup("10.255.0.1", "10.255.0.2")
                fs.dump(table)
            except fs.Error:
                pass
        self.assertGreater(opened, 100)

    def test_stale(self):
        table = fs.open(self.path)
        file = os.open(self.path, os.O_WRONLY)
        self.addCleanup(os.close, file)

        def beat(age):
            os.pwrite(file, struct.pack("=q", time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(age * 1e9)), LAYOUT["HEADER_HEARTBEAT"])

        def warned(text, call):
            with warnings.catch_warnings(record=True) as all:
                warnings.simplefilter("always")
                call()
            self.assertEqual([w.category for w in all], [fs.StaleTable] * (text is not None))
            if text is not None:
                self.assertIn(text, str(all[0].message))

        beat(1)
        warned(None, table.refresh)
        self.assertIsNone(table.check())
        for age in (60, -3600):  # that of an earlier boot may be in the future
            beat(age)
            warned("nothing has updated", table.refresh)
            warned(None, lambda: table.wait(0.01))  # once
            beat(1)
            warned(None, table.refresh)
        with warnings.catch_warnings(record=True) as all:
            warnings.simplefilter("default")  # that of Python: each outage is shown, though at the same line
            for age in (60, 1, 60, 1):
                beat(age)
                table.refresh()
        self.assertEqual([(w.category, w.filename) for w in all], [(fs.StaleTable, __file__)] * 2)
        gone = os.open(self.directory.name, os.O_RDONLY)  # leads to the directory after its end, as a mount does
        self.addCleanup(os.close, gone)
        mounted = fs.open(f"/proc/self/fd/{gone}/slots")
        os.remove(self.path)
        os.rmdir(self.directory.name)
        beat(60)
        warned("was deleted after it was mounted", lambda: mounted.wait(0.01))
        with self.assertRaises(fs.Deleted):
            fs.open(f"/proc/self/fd/{gone}/slots")
        self.assertIn("nothing has updated", table.check())
        os.mkdir(self.directory.name)

    def test_replaced(self):
        table = fs.open(self.path)
        old = os.open(self.path, os.O_WRONLY)
        self.addCleanup(os.close, old)
        os.pwrite(old, struct.pack("=q", time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 60 * 10**9), LAYOUT["HEADER_HEARTBEAT"])
        os.pwrite(old, struct.pack("=I", LAYOUT["STATE_REPLACED"]), LAYOUT["HEADER_STATE"])
        self.assertIn("nothing has updated", table.check())  # there is no other file yet
        self.write(self.golden)
        self.assertIsNone(table.check())
        self.assertTrue(table.wait(0))  # check has not taken the change
        self.assertFalse(table.wait(0))

    def test_wait(self):
        table = fs.open(self.path)
        self.assertFalse(table.wait(0))
        start = time.monotonic()
        self.assertFalse(table.wait(0.03))
        self.assertGreaterEqual(time.monotonic() - start, 0.03)
        self.poke(LAYOUT["HEADER_WAKE"], 77)
        self.assertTrue(table.wait())
        pair = table.lookup("10.255.0.1", "10.255.0.2")
        timer = threading.Timer(0.02, self.write, (self.next_run(),))
        timer.start()
        self.assertTrue(table.wait(60))
        self.assertFalse(table.is_current(pair))
        timer.join()
        os.remove(self.path)
        with self.assertRaises(fs.NoTable):
            table.refresh()
        table.lookup("10.255.0.1", "10.255.0.2")
        self.write(self.golden)
        self.assertTrue(table.refresh())
        os.truncate(self.path, 0)
        self.assertFalse(table.wait(0.05))
        for call in (table.status, table.refresh, lambda: table.lookup("::1", "::2")):
            with self.assertRaises(fs.BadTable):
                call()
        self.write(self.golden)
        self.assertTrue(table.wait(60))
        table.lookup("10.255.0.1", "10.255.0.2")

    def test_signal(self):
        """A signal handler runs during a wait without a limit, and may end it."""
        table = fs.open(self.path)

        def handler(*_):
            raise InterruptedError

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handler))
        with self.assertRaises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            table.wait()


if __name__ == "__main__":
    unittest.main()
