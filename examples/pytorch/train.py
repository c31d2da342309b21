"""Data parallel training over Gloo, as of any program of PyTorch: it knows nothing of planes.

Every step reduces the gradients of all ranks. The data of each rank and step, and the initial weights, come from fixed seeds, so two runs end with equal
weights, bit by bit, if no byte of any reduction was wrong, lost or added twice. The last bits of a gradient can vanish when it is added to the weights, so the
gradients of all steps have a digest, too. It waits before the ninth step while the file $HOLD/first exists, and before the last three while $HOLD/last does.
"""
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
gradients = hashlib.blake2b(digest_size=16)
hold = {8: "first", steps - 3: "last"}
for step in range(steps):
    while step in hold and os.path.exists(os.path.join(os.environ["HOLD"], hold[step])):
        time.sleep(0.05)
    source = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 512, generator=source)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    for p in model.parameters():
        gradients.update(p.grad.numpy())
    optimizer.step()
    if rank == 0:
        print("step %d loss %.6f at %.4f" % (step + 1, loss.item(), time.time()), flush=True)
weights = hashlib.blake2b(digest_size=16)
for p in model.parameters():
    weights.update(p.detach().numpy())
print("rank %d of %d on %s: weights %s gradients %s" % (rank, dist.get_world_size(), os.environ["SERVER"], weights.hexdigest(), gradients.hexdigest()), flush=True)
dist.destroy_process_group()
