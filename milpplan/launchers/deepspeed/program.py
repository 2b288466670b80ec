"""Training program for DeepSpeed's JSON, which does only what the JSON leaves to a program."""

PROGRAM = '''"""Trains the model of deepspeed.json with DeepSpeed, on made-up data unless load_batch has others."""

import json
import sys

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 100


def load_batch(size, length, vocabulary, device):
    """The tokens of a micro-batch, [size, length]; put your data here."""
    return torch.randint(vocabulary, (size, length), device=device)


def main(path):
    with open(path) as file:
        settings = json.load(file)
    own = settings.pop("milpplan")
    fields = dict(own["model"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
    config._attn_implementation = own["attn_implementation"]
    deepspeed.init_distributed()
    if torch.distributed.get_world_size() != own["world_size"]:
        sys.exit(f"{path} is for {own['world_size']} processes")
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=settings["zero_optimization"]["stage"] == 3):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if own["recompute"]:
        # Every layer, wholly: nothing but its input is kept.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    size, length = settings["train_micro_batch_size_per_gpu"], own["sequence_length"]
    for _ in range(STEPS * settings["gradient_accumulation_steps"]):
        tokens = load_batch(size, length, config.vocab_size, engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
'''
