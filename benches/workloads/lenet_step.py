"""Training step of LeNet with Adam."""

import torch
from measure import DEVICE, begin, check, measure, samples, training_step
from torch import nn

begin()
model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
    nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters())
images = torch.randn(64, 1, 28, 28, device=DEVICE)
labels = torch.randint(0, 10, (64,), device=DEVICE)
measure("training step of LeNet", "PyTorch, Adam, batch of 64", training_step(model, optimizer, images, labels), samples(30), parts=20)
check("weights", model.parameters())
