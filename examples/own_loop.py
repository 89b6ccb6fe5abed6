"""A loop of your own: the same lines on one process, or on many under any strategy.

python examples/own_loop.py
torchrun --nproc_per_node 2 examples/own_loop.py strategy=fsdp
torchrun --nproc_per_node 2 examples/own_loop.py strategy=deepspeed deepspeed_zero_stage=3
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anyqlora.on_torch.runtime import Runtime

MICRO_BATCHES = 3  # of a step


def model_and_rows():
    """Something to learn: which of four corners a point is nearest to."""
    torch.manual_seed(0)
    points = torch.randn(101, 2)  # a number that no batch divides: the last step is a short one
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 4)])
    return Net(layers), TensorDataset(points, torch.cdist(points, corners).argmin(1))


class Net(nn.Module):
    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        first, second = self.layers
        return second(torch.tanh(first(x)))


def train(batch_size=4, epochs=3, state="", **settings) -> tuple[float, float, dict]:
    """Returns the last loss, the last gradient norm and, on the first process, what was learned."""
    runtime = Runtime.of(loss="sum", precision="fp32", **settings)
    model, rows = model_and_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    loader = DataLoader(rows, batch_size=batch_size)
    # In any order. The optimizer is made again over the parameters as sharding leaves them; each row is seen by one
    # process.
    loader, model, optimizer, scheduler = runtime.prepare(loader, model, optimizer, scheduler)

    for epoch in range(epochs):
        batches = iter(loader)
        while step := list(itertools.islice(batches, MICRO_BATCHES)):
            # A step's loss is the mean over all of its rows, on all processes: count them first, divide each part by
            # the whole. Gradients are summed, so however the rows are dealt and split, the step is the same.
            count = runtime.reduce(torch.tensor(float(sum(len(x) for x, _ in step))))
            total = torch.zeros(())
            for number, (x, y) in enumerate(step, 1):
                with runtime.micro_batch(is_final=number == len(step)):
                    with runtime.autocast():
                        loss = F.cross_entropy(model(x), y, reduction="sum") / count
                    runtime.backward(loss)
                total += loss.detach().cpu()
            norm = runtime.optimizer_step_and_zero_grad(optimizer, model, max_grad_norm=1.0)
            scheduler.step()
            loss = runtime.reduce(total).item()
        runtime.print(
            f"epoch {epoch + 1}: loss {loss:.4f}, gradient norm {norm:.4f}, rate {scheduler.get_last_lr()[0]:.4f}"
        )
    if state:
        runtime.save_state(state)  # loads under any strategy, on any number of processes
    learned = runtime.strategy.gather_trainable()
    runtime.end_training()
    return loss, norm, {name: tensor.numpy() for name, tensor in learned.items()}


if __name__ == "__main__":
    train(**dict(word.split("=", 1) for word in sys.argv[1:]))
