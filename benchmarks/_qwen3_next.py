"""transformers' Qwen3-Next with random weights, and the functions of its linear attention, from the `fla` on the path."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

# no downloads, and no kernels from the hub
os.environ |= {'HF_HUB_OFFLINE': '1', 'USE_HUB_KERNELS': '0'}

import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

# One period of the layers of Qwen3-Next-80B-A3B, at its widths, which are the config's defaults. That model has 512 experts,
# of which ten are active for a token. Here there are only ten, so that rounding cannot change the choice of experts. The
# vocabulary is a fifth of that model's.
SIZES: dict[str, Any] = {'num_hidden_layers': 4, 'num_experts': 10, 'num_experts_per_tok': 10, 'vocab_size': 32768}
TINY: dict[str, Any] = {
    'vocab_size': 97,
    'hidden_size': 64,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'linear_num_key_heads': 2,
    'linear_num_value_heads': 4,
    'linear_key_head_dim': 16,
    'linear_value_head_dim': 16,
    'moe_intermediate_size': 32,
    'shared_expert_intermediate_size': 32,
    'num_experts': 4,
    'num_experts_per_tok': 4,
    # more than the default of 0.02, so that each layer matters
    'initializer_range': 0.1,
}
DELTA_RULE = ('torch_chunk_gated_delta_rule', 'torch_recurrent_gated_delta_rule')
CONVOLUTION = ('causal_conv1d_fn', 'causal_conv1d_update')
FUNCTIONS = (*DELTA_RULE, *CONVOLUTION)
CACHE = 'cache' if 'cache' in inspect.signature(modeling.Qwen3NextForCausalLM.forward).parameters else 'past_key_values'
"""Name of the cache argument, which depends on the version of transformers."""

Model = Any


def build(sizes: dict[str, Any], device: str) -> Model:
    """Returns a model in bfloat16 with weights made on `device`, the same in each process."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**sizes), dtype=torch.bfloat16, attn_implementation='sdpa')
    for layer in linear_layers(model):
        # steps from 0.001 to 0.1, Mamba-2's initial ones: with transformers' 1.3, a state decays within one token
        step = torch.logspace(-3, -1, layer.num_v_heads, device=device)
        layer.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model.eval()


def in_float32(model: Model) -> Model:
    """Returns a copy of the model in float32."""
    wide = copy.deepcopy(model).float()
    wide.set_experts_implementation('eager')
    return wide


def linear_layers(model: Model) -> list[Any]:
    """Returns the model's linear-attention modules."""
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, 'linear_attn')]


def fingerprint(model: Model) -> int:
    """Returns a sum over the bits of all weights."""
    return sum(int(one.detach().view(torch.int16).sum(dtype=torch.int64)) for one in model.parameters())


@contextlib.contextmanager
def transformers_alone() -> Iterator[None]:
    """Context in which transformers runs its own PyTorch code."""
    with _replaced({name: inspect.unwrap(getattr(modeling, name)) for name in FUNCTIONS}):
        yield


@contextlib.contextmanager
def with_modules(model: Model) -> Iterator[None]:
    """Context in which the short convolutions and the gated norms also come from `fla.modules`."""
    fla = importlib.import_module('fla.modules')
    convolution = importlib.import_module('fla.modules.convolution')
    layers = linear_layers(model)
    norms = [layer.norm for layer in layers]
    for layer in layers:
        norm = fla.FusedRMSNormGated(
            layer.head_v_dim, eps=layer.layer_norm_epsilon, activation='silu', device=layer.norm.weight.device
        )
        norm.weight = layer.norm.weight
        layer.norm = norm
    try:
        with _replaced(dict(zip(CONVOLUTION, _convolutions(convolution), strict=True))):
            yield
    finally:
        for layer, norm in zip(layers, norms, strict=True):
            layer.norm = norm


def _convolutions(module: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the package's convolutions with the signatures of transformers' own, which have channels before time."""

    def sequence(implementation: Callable[..., Any]) -> Callable[..., Any]:
        def convolve(x: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: Any) -> Any:
            return implementation(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)

        return convolve

    def step(implementation: Callable[..., Any]) -> Callable[..., Any]:
        def convolve(x: Any, state: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
            result = implementation(x.squeeze(-1), state, weight=weight, bias=bias, activation=activation)
            return (result[0] if isinstance(result, tuple) else result).unsqueeze(-1)

        return convolve

    return sequence(module.causal_conv1d), step(module.causal_conv1d_update)


@contextlib.contextmanager
def _replaced(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    originals = {name: getattr(modeling, name) for name in functions}
    for name, function in functions.items():
        setattr(modeling, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(modeling, name, function)


def serves(model: Model) -> dict[str, str]:
    """Returns what transformers now calls for each function of linear attention and for the gated norm."""
    found = {}
    for name in FUNCTIONS:
        function = getattr(modeling, name)
        inner = inspect.getclosurevars(function).nonlocals.get('implementation', function)
        found[name] = f'{inner.__module__}.{inner.__qualname__}'
    norm = type(linear_layers(model)[0].norm)
    return {**found, 'norm': f'{norm.__module__}.{norm.__qualname__}'}


def check_found(model: Model) -> None:
    """Raises ImportError if transformers did not find `fla`: it would silently run its own code."""
    missing = [name for name in DELTA_RULE if not serves(model)[name].startswith('fla.')]
    if missing:
        try:
            importlib.import_module('fla.ops.gated_delta_rule')
            why = 'although it can be imported'
        except Exception as error:
            why = f'{type(error).__name__}: {error}'
        raise ImportError(f'transformers did not find {", ".join(missing)} in `fla` ({why})')
