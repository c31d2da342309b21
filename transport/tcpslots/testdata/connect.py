"""Opens TCP connections as any program does, prints the local address of each, and holds them until the end of standard input."""
import argparse
import errno
import select
import socket
import sys
import threading

p = argparse.ArgumentParser()
p.add_argument("targets", nargs="+", help="ADDRESS PORT ...")
p.add_argument("--bind", help="local address")
p.add_argument("--port", type=int, default=0, help="local port")
p.add_argument("--no-port", action="store_true", help="IP_BIND_ADDRESS_NO_PORT")
p.add_argument("--device", help="SO_BINDTODEVICE")
p.add_argument("--six", action="store_true", help="an IPv6 socket")
p.add_argument("--nonblocking", action="store_true")
p.add_argument("--threads", action="store_true", help="connect all at once")
o = p.parse_args()

sockets, lock = [], threading.Lock()
start = threading.Barrier(len(o.targets) // 2) if o.threads else None


def connect(address, port):
    s = socket.socket(socket.AF_INET6 if o.six or ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if o.device:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, o.device.encode())
        if o.no_port:
            s.setsockopt(socket.IPPROTO_IP, 24, 1)
        if o.bind:
            s.bind((o.bind, o.port))
        if start:
            start.wait()
        if o.nonblocking:
            s.setblocking(False)
            if s.connect_ex((address, int(port))) not in (0, errno.EINPROGRESS):
                raise OSError("connect_ex")
            select.select([], [s], [])
            if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError("SO_ERROR")
        else:
            s.connect((address, int(port)))
        text = "%s %d" % s.getsockname()[:2]
    except OSError as e:
        text = "error %s" % e
    with lock:
        sockets.append(s)
        print(text, flush=True)


jobs = []
for address, port in zip(o.targets[::2], o.targets[1::2]):
    if o.threads:
        jobs.append(threading.Thread(target=connect, args=(address, port)))
        jobs[-1].start()
    else:
        connect(address, port)
for j in jobs:
    j.join()
print("done", flush=True)
sys.stdin.read()
