#!/usr/bin/env python3
"""A rank of scripts/gpu-check: collectives of PyTorch whose every element is checked, one process a rank.

Options and output are those of nccl-net-check, with lists of operations and sizes, because a start of PyTorch takes
seconds. The ranks find each other by a file in a directory. Exit code: 0 if every element is right, 1 if not.
"""
import argparse
import datetime
import os
import time

import torch
import torch.distributed as dist

RANKS = 2


def value(rank, elements, iteration, device):
    """Returns the contribution of a rank: elements below 2^24, so that sums of two are exact; others in each iteration."""
    index = torch.arange(elements, dtype=torch.int64, device=device)
    return ((index * 40503 + (rank * 7919 + iteration + 1) * 65537) & 0xFFFFFF).to(torch.int32)


class Collectives:
    """The operations. Each prepares memory, and returns the function to measure, the result and the expected result."""

    def __init__(self, rank, device):
        self.rank, self.device = rank, device

    def value(self, rank, elements, iteration):
        return value(rank, elements, iteration, self.device)

    def allreduce(self, elements, iteration):
        data = self.value(self.rank, elements, iteration)
        return lambda: dist.all_reduce(data), data, self.value(0, elements, iteration) + self.value(1, elements, iteration)

    def allgather(self, elements, iteration):
        parts = [self.value(r, elements // RANKS, iteration) for r in range(RANKS)]
        data = torch.full((elements // RANKS * RANKS,), -1, dtype=torch.int32, device=self.device)
        return lambda: dist.all_gather(list(data.chunk(RANKS)), parts[self.rank]), data, torch.cat(parts)

    def sendrecv(self, elements, iteration):
        other = 1 - self.rank
        out = self.value(self.rank, elements, iteration)
        data = torch.full_like(out, -1)

        def exchange():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, data, other)]):
                work.wait()

        return exchange, data, self.value(other, elements, iteration)


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(collectives, op, size, iteration):
    """Runs one iteration, and returns its duration in seconds and the number of wrong elements."""
    run, result, expected = getattr(collectives, op)(size // 4, iteration)
    sync(collectives.device)
    dist.barrier()
    sync(collectives.device)
    begin = time.perf_counter()
    run()
    sync(collectives.device)
    seconds = time.perf_counter() - begin
    return seconds, int((result != expected).sum())


def more(args, iteration, device):
    """Decides for all ranks whether iteration N follows. Rank 0 creates the file more-N, for those that count them."""
    if not args.until:
        return iteration < args.iterations
    word = torch.tensor([0 if os.path.exists(args.until) else 1], device=device)
    dist.broadcast(word, 0)
    if args.rank == 0 and word.item():
        open(os.path.join(args.rendezvous, "more-%d" % iteration), "w").close()
    return bool(word.item())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="a directory that the ranks share")
    parser.add_argument("--op", default="allreduce", help="allreduce, allgather, sendrecv; several with commas between them")
    parser.add_argument("--bytes", default="1048576", help="size of the result at each rank; several sizes, each as BYTES:ITERATIONS, with commas between them")
    parser.add_argument("--until", help="repeat until this file exists")
    parser.add_argument("--backend", default="nccl", help="nccl, or gloo, which needs no GPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.backend == "gloo" else "cuda:0")
    version = torch.__version__
    if device.type == "cuda":
        torch.cuda.set_device(device)
        version = "NCCL %s, %s" % (".".join(map(str, torch.cuda.nccl.version())), torch.cuda.get_device_name(0))
    dist.init_process_group(args.backend, init_method="file://%s/store" % os.path.abspath(args.rendezvous), rank=args.rank, world_size=RANKS,
                            timeout=datetime.timedelta(seconds=300))
    collectives, bad = Collectives(args.rank, device), 0
    for op in args.op.split(","):
        for word in args.bytes.split(","):
            size, _, iterations = word.partition(":")
            args.iterations = int(iterations or 1)
            wrong = measure(collectives, op, int(size), -1)[1]  # not timed: the first use of an operation opens its connections
            iteration, total = 0, 0.0
            while more(args, iteration, device):
                seconds, n = measure(collectives, op, int(size), iteration)
                total, wrong, iteration = total + seconds, wrong + n, iteration + 1
            bad += wrong
            print("rank %d: %s %s: %d x %s bytes in %.6f s, %.6f MB/s; wrong elements: %d" % (
                args.rank, version, op, iteration, size, total, iteration * int(size) / max(total, 1e-9) / 1e6, wrong), flush=True)
    dist.destroy_process_group()
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
