"""A transformer as large as GPT-2 small, with random weights and a cache of keys and values."""

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, POSITIONS = 50257, 768, 12, 12, 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, cache):
        batch, length, _ = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.perceptron(self.behind(x)), (key, value)


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, tokens, caches=None):
        start = 0 if caches is None else caches[0][0].shape[2]
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x, grown = self.words(tokens) + self.positions(places), []
        for index, block in enumerate(self.blocks):
            x, cache = block(x, caches and caches[index])
            grown.append(cache)
        return self.last(x[:, -1]) @ self.words.weight.T, grown

    def generate(self, tokens, count):
        """Returns the tokens with so many more, the likeliest ones."""
        caches, new = None, tokens
        for _ in range(count):
            scores, caches = self(new, caches)
            new = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
        return tokens
