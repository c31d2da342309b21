"""Counts the SUNH frames that arrive at devices, and checks their headers, until standard input ends.

    sunhcount.py ETHERTYPE SOURCE DESTINATION DEVICE...

Written from version 0.4 of SUPERp's description. Prints a JSON object by device.
"""
import json
import select
import socket
import struct
import sys

ETH_P_ALL, OUTGOING = 3, 4


def main():
    ethertype = int(sys.argv[1], 0)
    source, destination = (struct.unpack("!H", socket.inet_aton(a)[2:])[0] for a in sys.argv[2:4])
    sockets, counts = {}, {}
    for device in sys.argv[4:]:
        s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        s.bind((device, ETH_P_ALL))
        s.setblocking(False)
        sockets[s] = device
        counts[device] = {"Frames": 0, "Bytes": 0, "Short": 0, "Labels": {}, "Other": 0}
    print("ready", flush=True)
    open_ = True
    while open_:
        ready, _, _ = select.select(list(sockets) + [sys.stdin], [], [])
        if sys.stdin in ready and not sys.stdin.read(1):
            open_ = False
            ready = list(sockets)  # frames that have arrived already
        for s in ready:
            if s is sys.stdin:
                continue
            while True:
                try:
                    frame, at = s.recvfrom(65536)
                except BlockingIOError:
                    break
                if at[2] != OUTGOING:
                    count(counts[sockets[s]], frame, ethertype, source, destination)
    print(json.dumps(counts))


def count(c, frame, ethertype, source, destination):
    kind = struct.unpack_from("!H", frame, 12)[0]
    if kind in (0x0800, 0x86DD):
        # Router solicitations and the like are the kernel's; UDP and TCP are not.
        protocol = frame[23] if kind == 0x0800 else frame[20]
        c["Other"] += protocol in (6, 17)
    if kind != ethertype:
        return
    if len(frame) < 60:
        c["Short"] += 1
    traffic_class, next_header, word, src, dst = struct.unpack_from("!BBHHH", frame, 14)
    if traffic_class != 0 or next_header != 253 or word >> 12 != 15 or src != source or dst != destination:
        sys.exit("a wrong SUNH header: " + frame[14:22].hex())
    c["Frames"] += 1
    c["Bytes"] += len(frame)
    label = "%#x" % (word & 0xFFF)
    c["Labels"][label] = c["Labels"].get(label, 0) + 1


main()
