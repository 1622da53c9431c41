"""Inference by ResNet-152 with random weights, one image at a time."""

import torch
from measure import DEVICE, begin, check, measure, samples
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        wide = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or width_in != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x):
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet152():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for stage, blocks in enumerate([3, 8, 36, 3]):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            layers.append(Bottleneck(width_in, width, stride))
            width_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 1000))


begin()
model = resnet152().eval().to(DEVICE)
image = torch.randn(1, 3, 224, 224, device=DEVICE)
with torch.no_grad():
    measure("inference by ResNet-152", "PyTorch, batch of 1", lambda: model(image), samples(60))
    check("scores", [model(image)])
