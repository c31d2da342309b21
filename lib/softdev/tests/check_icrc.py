"""Checks the RoCEv2 packets of a capture (pcap, Ethernet, IPv4 and IPv6) against the specification, independently of the device: ICRC, lengths, fields.

usage: check_icrc.py FILE [PEER]... Prints the number of packets by opcode, and of those with an IPv4 identification above 0; exits with 1 if a packet is wrong. PEER is
the address of another implementation, whose IP headers may lack DF and ECT(0); it may be repeated.
Sources: InfiniBand Architecture Specification, volume 1, section 9.2 (BTH), annex A17 (RoCEv2, ICRC).
"""

import collections
import socket
import struct
import sys
import zlib

# Bytes of headers after the BTH, by opcode: RC requests and responses, UD, CNP.
EXTENDED = {0: 0, 1: 0, 2: 0, 3: 4, 4: 0, 5: 4, 6: 16, 7: 0, 8: 0, 9: 4, 10: 16, 11: 20, 12: 16, 13: 4, 14: 0, 15: 4, 16: 4, 17: 4, 18: 12, 19: 28, 20: 28, 0x64: 8, 0x65: 12, 0x81: 16}
foreign = set()  # addresses of other implementations
NO_PAYLOAD = {12, 17, 18, 19, 20, 0x81}


def icrc(ip, udp_and_rest):
    """The CRC-32 over eight bytes of ones and the packet, whose fields that change on the way are ones."""
    ip, rest = bytearray(ip), bytearray(udp_and_rest)
    if ip[0] >> 4 == 6:
        ip[0:4] = b"\x6f\xff\xff\xff"  # traffic class, flow label
        ip[7] = 0xFF  # hop limit
    else:
        ip[1] = 0xFF  # type of service
        ip[8] = 0xFF  # time to live
        ip[10] = ip[11] = 0xFF  # header checksum
    rest[6] = rest[7] = 0xFF  # UDP checksum
    rest[8 + 4] = 0xFF  # FECN, BECN, reserved bits of the BTH
    return zlib.crc32(b"\xff" * 8 + bytes(ip) + bytes(rest[:-4])) & 0xFFFFFFFF


def check(frame):
    """Returns the opcode and the IPv4 identification (0 over IPv6) of a frame's packet, or None if it is not RoCEv2. Raises ValueError if the packet is wrong."""
    if frame[12:14] == b"\x08\x00" and frame[23] == 17:
        ip, end = frame[14:34], 14 + struct.unpack("!H", frame[16:18])[0]
    elif frame[12:14] == b"\x86\xdd" and frame[20] == 17:
        ip, end = frame[14:54], 54 + struct.unpack("!H", frame[18:20])[0]
    else:
        return None
    six = len(ip) == 40
    rest = frame[14 + len(ip) : end]
    source_port, port, length, _ = struct.unpack("!HHHH", rest[:8])
    if port != 4791:
        return None
    if six and bytes(ip[8:24]) not in foreign and ip[1] >> 4 & 3 not in (2, 3):
        raise ValueError("IPv6 header: no ECT(0)")
    if not six and bytes(ip[12:16]) not in foreign and (ip[0] != 0x45 or struct.unpack("!H", ip[6:8])[0] != 0x4000 or ip[1] & 3 not in (2, 3)):
        raise ValueError("IPv4 header: options, no DF, or no ECT(0)")
    if length != len(rest) or length % 4 or source_port < 49152:
        raise ValueError(f"UDP header: length {length} of {len(rest)}, source port {source_port}")
    opcode, flags, pkey = struct.unpack("!BBH", rest[8:12])
    pad = flags >> 4 & 3
    if opcode not in EXTENDED or flags & 15 or pkey != 0xFFFF or rest[12] & 0x3F or rest[16] & 0x7F:
        raise ValueError(f"BTH: opcode {opcode}, flags {flags:#x}, P_Key {pkey:#x}, reserved bits")
    payload = length - 8 - 12 - EXTENDED[opcode] - pad - 4
    if payload < 0 or (payload and opcode in NO_PAYLOAD) or any(rest[len(rest) - 4 - pad : len(rest) - 4]):
        raise ValueError(f"payload of {payload} bytes after opcode {opcode}, or padding that is not 0")
    if opcode in (10, 11) and struct.unpack("!I", rest[32:36])[0] != payload:
        raise ValueError("RETH: the length is not that of the only packet")
    if icrc(ip, rest) != struct.unpack("<I", rest[-4:])[0]:
        raise ValueError(f"ICRC of opcode {opcode}")
    return opcode, 0 if six else struct.unpack("!H", ip[4:6])[0]


def main():
    data = open(sys.argv[1], "rb").read()
    foreign.update(socket.inet_pton(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in sys.argv[2:])
    order = "<" if data[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    at, wrong, numbered, opcodes = 24, 0, 0, collections.Counter()
    while at + 16 <= len(data):
        size = struct.unpack(order + "I", data[at + 8 : at + 12])[0]
        try:
            result = check(data[at + 16 : at + 16 + size])
            if result:
                opcodes[result[0]] += 1
                numbered += result[1] > 0
        except ValueError as error:
            wrong += 1
            print(f"packet at {at}: {error}")
        at += 16 + size
    print("opcodes", *(f"{opcode}:{n}" for opcode, n in sorted(opcodes.items())), "numbered", numbered, "wrong", wrong)
    sys.exit(1 if wrong or not opcodes else 0)


if __name__ == "__main__":
    main()
