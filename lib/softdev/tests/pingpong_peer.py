"""The peer of ibv_ud_pingpong -n 1 -s 64, made from the specification alone: exchanges a datagram over IPv6 with it.

usage: pingpong_peer.py SERVER SERVER_ADDRESS ADDRESS CHECKSUM. SERVER is where the program listens by TCP, the addresses are those of the two devices, and CHECKSUM is "zero" for
a UDP checksum of 0, as rdma_rxe sends it, or "valid". Exits with 1 if the answer is wrong.
Sources: InfiniBand Architecture Specification, volume 1, sections 9.2 (BTH) and 9.3.1 (DETH), annex A17 (RoCEv2, ICRC); ud_pingpong.c of rdma-core.
"""

import socket
import struct
import sys
import zlib

PORT, TCP_PORT, SOURCE_PORT, SIZE = 4791, 18515, 50001, 64
QKEY, QPN = 0x11111111, 0x123456
UDP_NO_CHECK6_TX = 101


def icrc(source, destination, source_port, payload):
    """The CRC-32 over eight bytes of ones and the packet, whose fields that change on the way are ones."""
    length = 8 + len(payload) + 4
    ip = struct.pack("!IHBB", 0x6FFFFFFF, length, 17, 0xFF) + source + destination
    udp = struct.pack("!HHHH", source_port, PORT, length, 0xFFFF)
    masked = payload[:4] + b"\xff" + payload[5:]
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + ip + udp + masked) & 0xFFFFFFFF)


def main():
    server, server_address, address, checksum = sys.argv[1:]
    theirs, ours = (socket.inet_pton(socket.AF_INET6, a) for a in (server_address, address))
    receiver = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    receiver.bind((address, PORT))
    sender = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sender.bind((address, SOURCE_PORT))
    sender.setsockopt(socket.IPPROTO_UDP, UDP_NO_CHECK6_TX, checksum == "zero")

    tcp = socket.create_connection((server, TCP_PORT), 30)
    tcp.sendall(b"0000:%06x:000000:%s\0" % (QPN, ours.hex().encode()))
    reply = b""
    while len(reply) < 52:
        more = tcp.recv(52 - len(reply))
        if not more:
            sys.exit(f"the connection ends after {reply}")
        reply += more
    tcp.sendall(b"done\0")
    _, qpn, _, gid = reply.rstrip(b"\0").decode().split(":")
    if bytes.fromhex(gid) != theirs:
        sys.exit(f"the server's GID is {gid}")

    payload = struct.pack("!BBHII", 0x64, 0, 0xFFFF, int(qpn, 16), 0) + struct.pack("!II", QKEY, QPN) + bytes(SIZE)
    sender.sendto(payload + icrc(ours, theirs, SOURCE_PORT, payload), (server_address, PORT))
    receiver.settimeout(10)
    answer, (host, source_port, _, _) = receiver.recvfrom(2048)
    opcode, _, _, destination, _ = struct.unpack("!BBHII", answer[:12])
    if (opcode, destination, len(answer)) != (0x64, QPN, 12 + 8 + SIZE + 4) or struct.unpack("!II", answer[12:20]) != (QKEY, int(qpn, 16)):
        sys.exit(f"the answer from {host} is {answer.hex()}")
    if icrc(theirs, ours, source_port, answer[:-4]) != answer[-4:]:
        sys.exit("the ICRC of the answer is wrong")
    print("answered from port", source_port)


if __name__ == "__main__":
    main()
