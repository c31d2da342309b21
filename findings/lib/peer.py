"""BGP peers of one router, each at its address, for the scripts of this folder.

peer.py ROUTER SECONDS LOCAL:AS:HEX[,HEX]...   connects from every LOCAL to ROUTER, announces 10.255.0.2/32 with ORIGIN, AS_PATH, NEXT_HOP
and the path attributes HEX (nothing for an empty HEX), each further HEX after another KEEPALIVE of ROUTER, and prints each attribute of
the routes that the first peer receives: type, value.
"""
import socket
import struct
import sys
import threading
import time


def message(kind, body=b""):
    return b"\xff" * 16 + struct.pack(">HB", 19 + len(body), kind) + body


def attribute(flags, kind, value):
    return bytes([flags, kind, len(value)]) + value


def peer(*arguments):
    while True:
        try:
            session(*arguments)
        except OSError:  # closed or refused: once more
            pass
        time.sleep(1)


def session(router, local, number, extras, show):
    extras = list(extras)
    s = socket.create_connection((router, 179), 20, (local, 0))
    s.settimeout(None)
    # OPEN: capabilities multiprotocol IPv4 unicast and 4-octet AS
    capabilities = bytes([1, 4, 0, 1, 0, 1, 65, 4]) + struct.pack(">I", number)
    parameters = bytes([2, len(capabilities)]) + capabilities
    s.sendall(message(1, struct.pack(">BHH", 4, number, 90) + socket.inet_aton(local) + bytes([len(parameters)]) + parameters))
    while True:
        head = s.recv(19, socket.MSG_WAITALL)
        if len(head) < 19:
            return
        body = s.recv(struct.unpack(">H", head[16:18])[0] - 19, socket.MSG_WAITALL)
        if head[18] in (1, 4):
            s.sendall(message(4))
        if head[18] == 4 and extras:
            path = attribute(0x40, 2, bytes([2, 1]) + struct.pack(">I", number))
            attrs = attribute(0x40, 1, b"\0") + path + attribute(0x40, 3, socket.inet_aton(local)) + extras.pop(0)
            s.sendall(message(2, struct.pack(">HH", 0, len(attrs)) + attrs + bytes([32, 10, 255, 0, 2])))
        elif head[18] == 2 and show:
            gone = struct.unpack(">H", body[:2])[0]
            rest = body[4 + gone : 4 + gone + struct.unpack(">H", body[2 + gone : 4 + gone])[0]]
            while rest:
                size = 3 if not rest[0] & 0x10 else 4
                length = rest[2] if size == 3 else struct.unpack(">H", rest[2:4])[0]
                print(rest[1], rest[size : size + length].hex(), flush=True)
                rest = rest[size + length :]


for i, text in enumerate(sys.argv[3:]):
    local, number, extra = text.split(":")
    what = [bytes.fromhex(e) for e in extra.split(",") if e]
    threading.Thread(target=peer, args=(sys.argv[1], local, int(number), what, i == 0), daemon=True).start()
time.sleep(float(sys.argv[2]))
