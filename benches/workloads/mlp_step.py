"""Training step of a perceptron of three layers."""

import torch
from measure import DEVICE, begin, check, measure, samples, training_step
from torch import nn

begin()
model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs = torch.randn(64, 784, device=DEVICE)
labels = torch.randint(0, 10, (64,), device=DEVICE)
measure("training step of a perceptron", "PyTorch, SGD, batch of 64", training_step(model, optimizer, inputs, labels), samples(30), parts=20)
check("weights", model.parameters())
