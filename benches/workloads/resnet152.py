"""Inference by ResNet-152 with random weights, one image at a time."""

import torch
from measure import DEVICE, begin, check, measure, samples
from resnet import resnet

begin()
model = resnet([3, 8, 36, 3]).eval().to(DEVICE)
image = torch.randn(1, 3, 224, 224, device=DEVICE)
with torch.no_grad():
    measure("inference by ResNet-152", "PyTorch, batch of 1", lambda: model(image), samples(60))
    check("scores", [model(image)])
