"""Small random models of transformers that call the operations, and their results.

As a program, this file runs the models in a process where `fla` cannot be imported, because transformers chooses the
functions that it calls at import. It saves the results of transformers' own PyTorch code, and those in float64 on the CPU.

    python tests/clients/models.py OUT.pt [DEVICE]
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Keeps models from downloading anything.
os.environ['HF_HUB_OFFLINE'] = '1'

import torch
from torch.overrides import TorchFunctionMode

COMMON = {
    'vocab_size': 97,
    'num_attention_heads': 4,
    'max_position_embeddings': 4096,
    'rms_norm_eps': 1e-6,
    'pad_token_id': 0,
    'bos_token_id': None,
    'eos_token_id': None,
    'tie_word_embeddings': False,
}
GATED_DELTA_RULE = {'linear_num_key_heads': 2, 'linear_num_value_heads': 4}
EXPERTS = {'moe_intermediate_size': 32, 'num_experts_per_tok': 2}

# name → config class, model class, operation, arguments of the config
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    'qwen3_next': (
        'Qwen3NextConfig',
        'Qwen3NextForCausalLM',
        'gated_delta_rule',
        dict(**GATED_DELTA_RULE, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32, num_key_value_heads=2),
    ),
    'qwen3_5': (
        'Qwen3_5TextConfig',
        'Qwen3_5ForCausalLM',
        'gated_delta_rule',
        dict(**GATED_DELTA_RULE, num_key_value_heads=2),
    ),
    'kimi_linear': (
        'KimiLinearConfig',
        'KimiLinearForCausalLM',
        'kda',
        dict(
            **EXPERTS,
            num_local_experts=4,
            linear_num_heads=4,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    ),
    'olmo_hybrid': (
        'OlmoHybridConfig',
        'OlmoHybridForCausalLM',
        'gated_delta_rule',
        dict(**GATED_DELTA_RULE, linear_a_log_min=0.01, num_key_value_heads=4),
    ),
}


def build(name: str, hidden_size: int = 64, head_dim: int = 16, layers: int = 4) -> torch.nn.Module:
    """A model with random weights: every fourth layer is softmax attention, the others call the operation."""
    import transformers

    config_class, model_class, operation, given = MODELS[name]
    sizes = {'hidden_size': hidden_size, 'intermediate_size': 2 * hidden_size, 'num_hidden_layers': layers}
    if operation == 'kda':
        sizes |= {'linear_head_dim': head_dim}
    else:
        sizes |= {'linear_key_head_dim': head_dim, 'linear_value_head_dim': head_dim}
    if name.startswith('qwen'):
        sizes |= {'head_dim': head_dim}
    kinds = ['full_attention' if i % 4 == 3 else 'linear_attention' for i in range(layers)]
    config = getattr(transformers, config_class)(**COMMON, **given, **sizes, layer_types=kinds)
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, model_class)(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # larger than the usual 0.02, so that every layer matters
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def tokens(*shape: int) -> torch.Tensor:
    """Random tokens without padding."""
    return torch.randint(1, COMMON['vocab_size'], shape, generator=torch.Generator().manual_seed(1))


class InDouble(TorchFunctionMode):
    """Replaces float32 in a model's code by float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        named = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **named)


def exact_results(name: str) -> dict[str, Any]:
    """`results` in float64 on the CPU."""
    model = build(name).double()
    # grouped matrix products have no float64
    model.set_experts_implementation('eager')  # type: ignore[operator]
    with InDouble():
        return results_of(model, 'cpu')


def results(name: str, device: str = 'cpu') -> dict[str, Any]:
    """Logits, loss, gradients and greedy generations of a model on `device`, copied to the CPU."""
    return results_of(build(name).to(device), device)


def results_of(model: Any, device: str) -> dict[str, Any]:
    ids = tokens(2, 90).to(device)
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    model.eval()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    prompt, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    prompt[0, :5] = 0
    options = {'do_sample': False, 'max_new_tokens': 8, 'return_dict_in_generate': True, 'output_logits': True}
    generated = model.generate(prompt.to(device), attention_mask=mask.to(device), **options)
    found = {
        'logits': logits,
        'loss': loss.detach(),
        'gradients': gradients,
        'generated': generated.sequences,
        'generated logits': torch.stack(generated.logits),
    }
    gradients = {n: gradient.cpu() for n, gradient in found.pop('gradients').items()}
    return {'gradients': gradients, **{n: x.cpu() for n, x in found.items()}}


class WithoutFla:
    """Makes `import fla` fail, as if it were not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.split('.')[0] == 'fla':
            raise ModuleNotFoundError(f'No module named {name!r} (blocked)', name=name)


if __name__ == '__main__':
    sys.meta_path.insert(0, WithoutFla)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    theirs = {name: results(name, *sys.argv[2:]) for name in MODELS}
    torch.save((theirs, {name: exact_results(name) for name in MODELS}), sys.argv[1])
    assert 'fla' not in sys.modules
