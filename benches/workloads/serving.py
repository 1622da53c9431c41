"""Serving by the continuous batching of transformers: the time of a token with many requests at once."""

import sys

import torch
from measure import DEVICE, begin, check, line, measure, samples

try:
    from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
except ImportError:
    line(skipped="no transformers with continuous batching is installed")
    sys.exit()

REQUESTS, TOKENS = (64, 64) if DEVICE == "cuda" else (4, 4)

begin()
shape = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16)
model = LlamaForCausalLM(shape).eval().to(DEVICE, torch.bfloat16)
prompts = [torch.randint(3, 32000, (16 + 2 * i,)).tolist() for i in range(REQUESTS)]
generation = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
# Set here, since both are chosen by the free memory otherwise.
batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=1024)
answers = []


def serve():
    answers[:] = model.generate_batch(
        inputs=prompts, generation_config=generation, continuous_batching_config=batching, persistent_manager=True
    ).values()


with torch.no_grad():
    measure("a served token", f"transformers, {REQUESTS} requests at once", serve, samples(5), work=REQUESTS * TOKENS)
# Batches form by the time in which requests arrive, so that the tokens themselves may differ.
check("numbers of tokens", [torch.tensor([len(answer.generated_tokens) for answer in answers])])
model.destroy_cached_continuous_batching_manager()
