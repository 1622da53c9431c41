"""Training step whose time the GPU takes: products of large matrices."""

import torch
from measure import DEVICE, begin, check, measure, samples, training_step
from torch import nn

SIZE = 8192 if DEVICE == "cuda" else 64

begin()
model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)).to(DEVICE, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16)
labels = torch.randint(0, SIZE, (SIZE,), device=DEVICE)
measure("training step of large layers", f"PyTorch, {SIZE} by {SIZE}, bfloat16", training_step(model, optimizer, inputs, labels), samples(20))
check("weights", model[0].parameters())
