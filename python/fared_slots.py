"""Reads the slot table of a running fared: the queue pair slots of every pair of a local and a remote loopback, in shared memory (docs/slots.md).

    table = fared_slots.open()
    pair = table.lookup("10.255.0.1", "10.255.0.2")
    chooser = fared_slots.Chooser()
    slot = pair.slots[chooser.next(pair.slots)]      # by share
    slot = pair.slots[fared_slots.for_key(pair.slots, key)]  # by address
    table.wait(timeout=1.0)                          # for a change of any pair

Look-ups take no lock, and make no system call while fared runs. The table stays readable while fared restarts: pair.owned is False then.
The module needs Python 3.9 or later and libfared.so.1 (Debian package libfared). The dynamic linker finds the library; LD_LIBRARY_PATH
names other folders.

Run as a program, it prints the whole table: python3 fared_slots.py [PATH [SERVICE]].
"""

import array
import ctypes
import dataclasses
import ipaddress
import math
import os
import struct
import sys
import time
import warnings
import weakref

DEFAULT_PATH = "/run/fared/table/slots"

_LIBRARY = "libfared.so.1"
_SYSTEM, _TRUNCATED, _NOT_FOUND = -2, -5, -6  # enum fared_error
_MAX_SLOTS = 4096  # of a pair
_PLACEMENTS = ("uniform", "hash", "none", "asked")
_PROTOCOLS = {"udp": 17, "tcp": 6}
_SLICE = 1  # s: the longest wait without a look at signals and at the age of the table

# The structures of fared.h.
_SLOT = struct.Struct("=IHHHHI")
_SUB_PORT = struct.Struct("=16s64sII32x")
_STATUS = struct.Struct("=QQQIIIIII64s64x")
_SERVICE = struct.Struct("=HH")
_RANGE = struct.Struct("=HHHxx")
_ADDRESS = struct.Struct("=16s")


class _Read(ctypes.Structure):
    """struct fared_pair."""

    _fields_ = [("revision", ctypes.c_uint64)] + [(n, ctypes.c_uint32) for n in ("flags", "slots", "vector", "placement")] + [("private", ctypes.c_uint64 * 5)]

    @property
    def owned(self):
        return not self.flags & 4


class Error(Exception):
    """An error of this module."""


class NoTable(Error):
    """There is no file at the path: fared has not published a table yet."""


class Deleted(NoTable):
    """The file or its directory was deleted while it is mounted here, as in a container: no later table appears at the path."""


class StaleTable(UserWarning):
    """Nothing has updated the table for a minute. Its weights stay in use, however old they are."""


class BadTable(Error):
    """The file is not a slot table, has an unknown layout, is damaged, or is shorter than its header states."""


class NotFound(Error):
    """The table does not have the pair."""


class NoService(Error):
    """The table has no source ports for the service: it is neither among Table.services() nor in a range of Table.steered()."""


class Busy(Error):
    """The record changed during every attempt to read it, or its writer was killed in the middle of a change. Use the last result and retry later."""


_ERRORS = {-1: NoTable, -3: BadTable, -4: BadTable, _TRUNCATED: BadTable, _NOT_FOUND: NotFound, -7: Busy, -8: ValueError, -9: NoService, -11: Deleted}


def _library():
    """Returns libfared for calls that keep the interpreter's lock, and its fared_wait, which releases it. Pointers are passed as c_void_p or by reference."""
    try:
        library = ctypes.PyDLL(_LIBRARY, use_errno=True)
        library.fared_error_text.restype = library.fared_plane_name.restype = ctypes.c_char_p
        library.fared_check  # the newest function pylint: disable=pointless-statement
        return library, ctypes.CDLL(_LIBRARY).fared_wait
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"fared_slots needs {_LIBRARY} of the same fared: {error}. Install the Debian package libfared, or set LD_LIBRARY_PATH, "
            f"which is {os.environ.get('LD_LIBRARY_PATH', '')!r}, to the library's folder before Python starts"
        ) from error


_lib, _wait = _library()


def _reason(error, path):
    return f"{path}: {_lib.fared_error_text(error).decode()}"


@dataclasses.dataclass(frozen=True)
class Slot:
    """A queue pair slot. sub_port is -1 if packets are sprayed over the plane; share is in parts per billion; parked slots send nothing; probes by the
    sub-ports of wrong ones are lost or go another way."""

    plane: int
    sub_port: int
    share: int
    source_port: int
    parked: bool
    drain: bool
    in_effect: bool
    wrong: bool = False


@dataclasses.dataclass(frozen=True)
class Pair:
    """The state of a pair at one moment. owned is False if no process maintains the table."""

    source: object
    destination: object
    revision: int
    vector: int
    placement: str
    reachable: bool
    in_effect: bool
    owned: bool
    slots: tuple
    _read: object = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class SubPort:
    """A netdev of a plane, with its RDMA device and port (empty and 0 without one) and the GID index of each source, -1 without one."""

    device: str
    plane: int
    rdma_device: str
    rdma_port: int
    gids: tuple


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of the table as a whole. live: fared maintains it, and its heartbeat is at most five seconds old."""

    instance: str
    run: int
    revision: int
    status_revision: int
    live: bool
    pairs: int


def _text(data):
    return data.split(b"\0", 1)[0].decode("utf-8", "replace")


def _address(data):
    data = bytes(data)
    if data[:12] == b"\0" * 10 + b"\xff\xff":
        return ipaddress.IPv4Address(data[12:])
    return ipaddress.IPv6Address(data)


def _bytes(address):
    a = ipaddress.ip_address(address)
    return b"\0" * 10 + b"\xff\xff" + a.packed if a.version == 4 else a.packed


def _service(text):
    """Returns the numbers of a service, such as (17, 4791) of "udp/4791"."""
    name, _, port = text.partition("/")
    try:
        return _SERVICE.pack(_PROTOCOLS[name], int(port))
    except (KeyError, ValueError, struct.error):
        raise ValueError(f"{text!r} is not a service: udp/PORT or tcp/PORT") from None


def open(path=None, service=None):  # pylint: disable=redefined-builtin
    """Opens the table at a path; None means the environment variable FARED_SLOTS, or else DEFAULT_PATH. Source ports are those for flows to a service,
    such as "udp/4444"; None means the table's first service. Where the data plane steers by source port, whatever the service, every service that it
    steers may be named. A table that names no service, of an older fared, is used as it is. Raises NoTable, BadTable, NoService, ValueError or OSError."""
    return Table(path or os.environ.get("FARED_SLOTS") or DEFAULT_PATH, service)


class Table:
    """An open slot table, for one thread at a time."""

    def __init__(self, path, service=None):
        self.path = path
        self._warned = None
        self._slots = ctypes.create_string_buffer(_MAX_SLOTS * _SLOT.size)
        self._table = ctypes.c_void_p()
        self._check(_lib.fared_open_service(ctypes.byref(self._table), os.fsencode(path), bytes(4) if service is None else _service(service)))
        weakref.finalize(self, _lib.fared_close, self._table)

    def _check(self, error):
        """Raises the exception for an error of libfared."""
        if error == _SYSTEM:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.path)
        if error < 0:
            raise _ERRORS[error](_reason(error, self.path))

    def check(self):
        """Returns None while a process maintains the table, and in the first minute without one; afterwards the reason, a text. wait and refresh warn of
        it once, by StaleTable."""
        error = _lib.fared_check(self._table)
        if error == _TRUNCATED:
            self._check(error)
        return _reason(error, self.path) if error else None

    def _warn(self):
        """Warns the caller of wait or refresh once of each outage: by a new registry, because Python's default filter shows the same warning at the same
        line once in a process."""
        error = _lib.fared_check(self._table)
        reason = _reason(error, self.path) if error not in (0, _TRUNCATED) else None
        if reason is not None and reason != self._warned:
            frame = sys._getframe(1)  # pylint: disable=protected-access
            frame = frame.f_back or frame
            warnings.warn_explicit(reason, StaleTable, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry={})
        self._warned = reason

    def refresh(self):
        """Continues with the file that is now at the path, and returns whether it is another one. After an error the table keeps the last file; if that was
        truncated, look-ups raise BadTable until there is another one."""
        result = _lib.fared_refresh(self._table)
        try:
            self._check(result)
            return result == 1
        finally:
            self._warn()

    def wait(self, timeout=None):
        """Waits until the table has changed since the last wait, refresh or open. Returns False after the timeout, in seconds; None means no limit."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0
        while not _wait(self._table, pause):
            self._warn()
            left = _SLICE if end is None else end - time.monotonic()
            if left <= 0:
                return False
            pause = math.ceil(1000 * min(left, _SLICE))
        return True

    def _status(self):
        """Returns the fields of the status, after a look for another file unless fared maintains this one."""
        status = ctypes.create_string_buffer(_STATUS.size)
        error = _lib.fared_get_status(self._table, status)
        if (error or not _STATUS.unpack(status)[3]) and _lib.fared_refresh(self._table) == 1:
            error = _lib.fared_get_status(self._table, status)
        self._check(error)
        return _STATUS.unpack(status)

    def _records(self, function, form):
        """Returns the fields of all records that a function reads by number."""
        self._status()
        out, record = [], ctypes.create_string_buffer(form.size)
        while True:
            error = function(self._table, len(out), record)
            if error == _NOT_FOUND:
                return tuple(out)
            self._check(error)
            out.append(form.unpack(record))

    def status(self):
        """Returns the Status of the table."""
        run, revision, status_revision, live, pairs, *_, instance = self._status()
        return Status(_text(instance), run, revision, status_revision, bool(live), pairs)

    def planes(self):
        """Returns the names of the planes, in the configured order."""
        return tuple(_text(_lib.fared_plane_name(self._table, n) or b"") for n in range(self._status()[5]))

    def sources(self):
        """Returns the local loopbacks."""
        return tuple(_address(address) for address, in self._records(_lib.fared_get_source, _ADDRESS))

    def services(self):
        """Returns the services for which the table has source ports, as pairs of the IP protocol's number and the port."""
        return self._records(_lib.fared_get_service, _SERVICE)

    def steered(self):
        """Returns the ranges of services that have the source ports of the first service, because the data plane steers by them, whatever the service: the
        IP protocol's number and the first and last port of each. There are none where each service has separate ports."""
        return self._records(_lib.fared_get_steered, _RANGE)

    def sub_ports(self):
        """Returns the sub-ports, in the configured order. Raises Busy."""
        sources = [address for address, in self._records(_lib.fared_get_source, _ADDRESS)]
        return tuple(
            SubPort(_text(device), plane, _text(rdma_device), rdma_port, tuple(self._gid(n, address) for address in sources))
            for n, (device, rdma_device, plane, rdma_port) in enumerate(self._records(_lib.fared_get_sub_port, _SUB_PORT))
        )

    def _gid(self, sub_port, source):
        gid = _lib.fared_gid_index(self._table, sub_port, source)
        if gid == _NOT_FOUND:
            return -1
        self._check(gid)
        return gid

    def _pair(self, source, destination, read):
        slots = tuple(
            Slot(plane, -1 if sub_port == 0xFFFF else sub_port, share, port, bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8))
            for share, port, _, plane, sub_port, flags in _SLOT.iter_unpack(memoryview(self._slots)[: read.slots * _SLOT.size])
        )
        placement = _PLACEMENTS[read.placement & 3]
        return Pair(_address(source), _address(destination), read.revision, read.vector, placement, bool(read.flags & 1), bool(read.flags & 2), read.owned, slots, read)

    def lookup(self, source, destination):
        """Returns a Pair. Raises NotFound or Busy."""
        a, b, read = _bytes(source), _bytes(destination), _Read()
        while True:
            error = _lib.fared_lookup(self._table, a, b, ctypes.byref(read), self._slots, _MAX_SLOTS)
            if (not error and read.owned) or _lib.fared_refresh(self._table) != 1:
                break  # no other file has replaced this one
        if error == _NOT_FOUND:
            raise NotFound(f"no pair {source} {destination}")
        self._check(error)
        return self._pair(a, b, read)

    def pairs(self):
        """Yields every pair, in no order. A pair that is added or removed meanwhile may be missing. Raises Busy."""
        self._status()
        cursor, source, destination = ctypes.c_uint32(), ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
        while True:
            read = _Read()
            error = _lib.fared_next_pair(self._table, ctypes.byref(cursor), source, destination, ctypes.byref(read), self._slots, _MAX_SLOTS)
            if error == _NOT_FOUND:
                return
            self._check(error)
            yield self._pair(source, destination, read)

    def is_current(self, pair):
        """Returns whether a pair is still the state of the table."""
        return bool(_lib.fared_is_current(self._table, ctypes.byref(pair._read)))


def _weights(shares):
    """Returns slots of libfared with shares, which its choices read."""
    words = array.array("I", bytes(len(shares) * _SLOT.size))
    words[:: _SLOT.size // 4] = array.array("I", shares)
    return words


def _pointer(words):
    """Returns a pointer to an array, which must stay alive."""
    return ctypes.c_void_p(words.buffer_info()[0])


class Chooser:
    """Chooses slots by their shares, exactly over time (smooth weighted round robin). Each sender has a separate one."""

    def __init__(self):
        self._credit = array.array("q")
        self._slots = self._weights = self._arguments = None

    def next(self, slots):
        """Returns the index of the next slot, or -1 if every share is 0. A parked slot loses its credit."""
        if slots is not self._slots:
            self._slots = slots if isinstance(slots, tuple) else None  # another sequence may change
            self._weights = _weights([slot.share for slot in slots])
            self._credit.extend([0] * (len(slots) - len(self._credit)))
            self._arguments = _pointer(self._weights), len(slots), _pointer(self._credit)
        return max(_lib.fared_choose(*self._arguments), -1)


def rendezvous(shares, key):
    """Returns the index of the slot for a key by a weighted rendezvous over shares, or -1 if every share is 0: wecmp.Rendezvous."""
    weights = _weights(shares)
    return max(_lib.fared_choose_key(_pointer(weights), len(shares), ctypes.c_uint64(key)), -1)


def for_key(slots, key):
    """Returns the index of the slot for a memory address or a hash key, or -1 if every share is 0."""
    return rendezvous([slot.share for slot in slots], key)


def dump(table):
    """Returns the text of a whole table, one line a fact, pairs by address."""
    lines = [f"plane {i} {name}" for i, name in enumerate(table.planes())]
    lines += [f"source {i} {address}" for i, address in enumerate(table.sources())]
    lines += [f"service {i} {protocol}/{port}" for i, (protocol, port) in enumerate(table.services())]
    lines += [f"steered {i} {protocol}/{first}-{last}" for i, (protocol, first, last) in enumerate(table.steered())]
    for i, sp in enumerate(table.sub_ports()):
        lines.append(f"sub-port {i} {sp.device} plane={sp.plane} rdma={sp.rdma_device} port={sp.rdma_port} gids={','.join(map(str, sp.gids))}")
    for p in sorted(table.pairs(), key=lambda p: (p.source.version, p.source, p.destination.version, p.destination)):
        text = f"pair {p.source} {p.destination} vector={p.vector} {p.placement}{' reachable' * p.reachable}{' in-effect' * p.in_effect}"
        for s in p.slots:
            text += f"; {s.plane}.{s.sub_port} {s.share}:{s.source_port}{' parked' * s.parked}{' drain' * s.drain}{' in-effect' * s.in_effect}{' wrong' * s.wrong}"
        lines.append(text)
    return "".join(line + "\n" for line in lines)


if __name__ == "__main__":
    try:
        sys.stdout.write(dump(open(*sys.argv[1:3])))
    except (Error, ValueError, OSError) as error:
        sys.exit(f"fared_slots: {error}")
