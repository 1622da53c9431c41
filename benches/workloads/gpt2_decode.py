"""Generation of tokens by a transformer as large as GPT-2 small: that of transformers if it is there, or our own."""

import torch
from measure import DEVICE, begin, check, measure, samples

TOKENS = 40

begin()
prompt = torch.randint(0, 50000, (1, 16), device=DEVICE)
try:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).eval().to(DEVICE)
    detail = "PyTorch, transformers"

    def generate():
        return model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)

except ImportError:
    from gpt2 import Gpt2

    model = Gpt2().eval().to(DEVICE)
    detail = "PyTorch"

    def generate():
        return model.generate(prompt, TOKENS)


with torch.no_grad():
    measure("a token by GPT-2 small", f"{detail}, batch of 1", generate, samples(6), work=TOKENS)
    check("tokens", [generate()])
