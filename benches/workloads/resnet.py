"""ResNets for images of 224 by 224 points."""

import torch
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


def resnet(blocks_of_stages):
    """Returns a ResNet of bottlenecks with so many blocks in its stages, and random weights."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for stage, blocks in enumerate(blocks_of_stages):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            layers.append(Bottleneck(width_in, width, stride))
            width_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 1000))
