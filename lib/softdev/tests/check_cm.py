"""Checks the connection management in a capture (pcap, Ethernet, IPv4) against the specification, independently of the device: headers, fields, reserved bits and
the order of messages.

usage: check_cm.py FILE [PEER]. Prints the number of messages by name, of connections, of those established and of those that ended in order; exits with 1 if a
message is wrong, or if the check would not notice some changed fields. PEER is the address of an implementation that may send IPv4 headers of another kind.
Sources: InfiniBand Architecture Specification, volume 1: sections 12.6, 12.7, 12.9, 13.4; annex A11 (RDMA IP CM service).
"""

import collections
import socket
import struct
import sys

import check_icrc

NAMES = {0x10: "REQ", 0x11: "MRA", 0x12: "REJ", 0x13: "REP", 0x14: "RTU", 0x15: "DREQ", 0x16: "DREP"}
BY_SERVER = {"REP", "MRA", "REJ"}


def number(b, at, size):
    return int.from_bytes(b[at : at + size], "big")


def require(condition, text):
    if not condition:
        raise ValueError(text)


def zero(b, *ranges):
    for first, end in ranges:
        require(not any(b[first:end]), f"reserved bytes {first} to {end - 1} are not 0")


def mapped(ip):
    return bytes(10) + b"\xff\xff" + ip


def req(b, source, destination):
    """Checks a REQ for a reliable connection, from its first byte after the common header."""
    zero(b, (4, 8), (24, 32), (36, 39), (40, 43), (96, 140))
    require(number(b, 8, 8) >> 16 == 0x106 and number(b, 14, 2), f"service {number(b, 8, 8):#x} is none of TCP's port space")
    require(number(b, 16, 8), "no CA GUID")
    require(number(b, 32, 3) > 1, f"queue pair {number(b, 32, 3)}")
    require(b[43] >> 1 & 3 == 0, "the transport service is not RC")
    require(b[43] >> 3 and b[47] >> 3 and b[51] >> 4, "no timeouts or no retries")
    require(number(b, 48, 2) == 0xFFFF, "P_Key")
    require(1 <= b[50] >> 4 <= 5 and b[50] & 8 == 0 and b[51] & 7 == 0, "path MTU, RDC or reserved bits")
    require(b[56:72] == mapped(source) and b[72:88] == mapped(destination), "the GIDs are not those of the packet")
    require(number(b, 88, 4) & 0xFC0 == 0 and b[93] > 1 and b[94] & 7 == 0 and b[95] & 7 == 0, "reserved bits or hop limit of the path")
    p = b[140:]
    require(p[0] == 0 and p[1] == 0x40 and number(p, 2, 2), "header of the RDMA IP CM service")
    zero(p, (4, 16), (20, 32))
    require(p[16:20] == source and p[32:36] == destination, "the IP addresses are not those of the packet")


def check(frame, connections, change):
    """Returns the name of a frame's message, or None if it has none."""
    require(check_icrc.check(frame), "no packet of RoCEv2")
    source, destination, bth = frame[26:30], frame[30:34], frame[42:]
    require(bth[0] == 0x64 and number(bth, 5, 3) == 1, "not for queue pair 1")
    require(number(bth, 12, 4) == 0x80010000 and number(bth, 16, 4) == 1, "Q_Key or source queue pair")
    m = bytearray(bth[20:-4])
    require(len(m) == 256, f"a datagram of {len(m)} bytes")
    if change:
        m[change[0]] ^= change[1]
    require(m[:4] == b"\x01\x07\x02\x03", f"header {m[:4].hex()}")
    zero(m, (4, 8), (18, 24))
    name = NAMES.get(number(m, 16, 2))
    require(name, f"attribute {number(m, 16, 2):#x}")
    transaction, b = number(m, 8, 8), m[24:]
    local, remote = number(b, 0, 4), number(b, 4, 4)
    if name == "REQ":
        req(b, source, destination)
        c = connections.setdefault((source, destination, local), {"transaction": transaction, "client": number(b, 32, 3), "state": "REQ", "service": number(b, 8, 8), "req": bytes(m)})
        require(c["req"] == m, "a REQ differs from its first transmission")
        return name
    # The client of the connection and its identifier.
    for key, identifier, other in (((destination, source, remote), remote, local), ((source, destination, local), local, remote)):
        c = connections.get(key)
        if c:
            break
    require(c, f"{name} for an unknown connection")
    by_server = key[0] == destination
    if name in ("REP", "MRA", "RTU", "REJ"):
        require(transaction == c["transaction"], f"transaction of {name}")
    if name == "REP":
        require(by_server and local, "REP by the client, or without an identifier")
        zero(b, (8, 12), (15, 20), (23, 24))
        require(number(b, 12, 3) > 1 and b[27] & 15 == 0 and b[26] & 6 == 0 and number(b, 28, 8), "REP: queue pair, reserved bits or CA GUID")
        require(c.setdefault("identifier", local) == local and c.setdefault("server", number(b, 12, 3)) == number(b, 12, 3), "a REP differs from its first transmission")
        c["state"] = "REP" if c["state"] == "REQ" else c["state"]
        return name
    if name in ("RTU", "DREQ", "DREP"):
        require(c.get("identifier") == other, f"{name}: identifiers")
    if name == "RTU":
        require(not by_server and c["state"] != "REQ", "RTU by the server or before the REP")
        c["state"] = "RTU" if c["state"] == "REP" else c["state"]
    elif name == "DREQ":
        require(number(b, 8, 3) == c["client" if by_server else "server"] and b[11] == 0 and c["state"] != "REQ", "DREQ: queue pair or state")
        c.setdefault("dreq", set()).add(transaction)
    elif name == "DREP":
        require(transaction in c.get("dreq", ()), "DREP without a DREQ")
        c["state"] = "DREP"
    elif name == "MRA":
        require(b[8] & 0x3F == 0 and b[9] & 7 == 0 and b[8] >> 6 == (0 if by_server else 1), "MRA: message or reserved bits")
    elif name == "REJ":
        require(b[8] & 0x3F == 0 and b[9] & 1 == 0 and number(b, 10, 2), "REJ: reason or reserved bits")
        c["state"] = "REJ"
    return name


# Bytes of a message and bits of them whose change must be noticed: class, reserved bytes, attribute, identifiers; of a REQ the service, CA GUID and so on.
CHANGES = [(1, 1), (5, 1), (17, 0x40), (19, 1), (27, 1), (31, 1), (32 + 5, 1), (24 + 36, 1), (24 + 43, 2), (24 + 48, 1), (24 + 60, 2), (24 + 94, 1), (24 + 100, 8), (24 + 159, 1)]


def check_all(frames, change=None):
    """Returns the number of messages by name, the connections and the errors."""
    names, connections, wrong = collections.Counter(), {}, []
    for at, frame in frames:
        try:
            names[check(frame, connections, change)] += 1
        except ValueError as error:
            wrong.append(f"packet at {at}: {error}")
    return names, connections, wrong


def main():
    data = open(sys.argv[1], "rb").read()
    check_icrc.foreign.update(socket.inet_aton(a) for a in sys.argv[2:])
    order = "<" if data[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    at, frames = 24, []
    while at + 16 <= len(data):
        size = struct.unpack(order + "I", data[at + 8 : at + 12])[0]
        frame = data[at + 16 : at + 16 + size]
        if len(frame) > 58 and frame[12:14] == b"\x08\x00" and frame[42] == 0x64 and number(frame, 47, 3) == 1:
            frames.append((at, frame))
        at += 16 + size
    names, connections, wrong = check_all(frames)
    for change in CHANGES:
        if not check_all(frames, change)[2]:
            wrong.append(f"a change of byte {change[0]} is not noticed")
    print(*wrong, sep="\n")
    states = collections.Counter(c["state"] for c in connections.values())
    print("messages", *(f"{name}:{n}" for name, n in sorted(names.items())), "connections", len(connections), "established", states["RTU"] + states["DREP"], "complete", states["DREP"], "wrong", len(wrong))
    sys.exit(1 if wrong or not names else 0)


main()
