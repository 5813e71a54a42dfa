"""Extension kernels that PyTorch cannot trace (CUTLASS, TileLang, a vendor's wheel), made safe to call from anywhere.

`opaque()` turns a kernel into one function with two roads to the same code:

1. Eager code with plain tensors on the kernel's device runs the kernel as it is, in the `torch.autograd.Function` that
   its author would have written when a gradient is wanted. Nothing goes through PyTorch's dispatcher: the choice of the
   road costs 0.8 x `torch.empty(0)`.
2. Everything else (Dynamo, `torch.export`, FakeTensor, meta, tensor subclasses, dispatch modes, `torch.func`) calls a
   library operator with a fake implementation and the same gradient.

The gradient belongs to the operator. With the usual `autograd.Function` around an operator that has none, Dynamo inlines
the Function, and then `torch.func.grad` in compiled code gives zeros and an exported module has no gradient, silently
(torch 2.13). What has no answer raises instead of losing a gradient or a tangent: `torch.func.grad`, forward-mode AD,
double backward, an input that requires grad where the kernel has no gradient for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fla.opaque.declaration import Kernel, declare
from fla.opaque.entry import OpaqueKernel, entry_point, takes_eager_path
from fla.opaque.operators import define_operators
from fla.opaque.vmap import in_a_loop

__all__ = ['OpaqueKernel', 'in_a_loop', 'opaque', 'takes_eager_path']


def opaque(
    name: str,
    *,
    schema: str,
    forward: Kernel,
    fake: Kernel,
    backward: Kernel | None = None,
    grads: Sequence[str] = (),
    intermediates: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    fake_backward: Kernel | None = None,
    devices: Sequence[str] = ('cuda',),
) -> OpaqueKernel:
    """Wrap an untraceable kernel for eager code, `torch.compile`, `torch.export` and fake tensors.

        def forward(q, k, v, scale):                     # raw: tensors in, new tensors out
            o, lse = vendor.attention_fwd(q, k, v, scale)
            return o, lse

        def backward(q, k, v, o, lse, do, scale):        # names inputs, outputs and `d<output>`, in any order
            return vendor.attention_bwd(do, q, k, v, o, lse, scale)

        attention = opaque(
            'fla::vendor_attention',
            schema='(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor o, Tensor lse)',
            forward=forward,
            fake=lambda q, k, v, scale: (torch.empty_like(v), q.new_empty(q.shape[:-1], dtype=torch.float32)),
            backward=backward,
            grads=('q', 'k', 'v'),                       # what backward returns, in this order
            intermediates=('lse',),                      # only backward reads it: attention(...) returns o alone
        )

    Args:
        name: `'namespace::name'` of the operator; below autograd there are `name_forward` and `name_backward` as well.
        schema: arguments and results without the name, in PyTorch's schema language. All arguments are positional and
            without defaults (an operator drops those before the kernel sees them: write them in the calling function).
            `SymInt` instead of `int` for a number that derives from a size, or each size compiles anew. Tensors are
            `Tensor` or `Tensor?`, the first one not optional; no lists of tensors, autograd does not look into them.
            `Tensor(a!) cache` says that the kernel writes into it, for inference only. Results need names where there
            is a backward.
        forward: called with all arguments by position. Returns one tensor, or several in a tuple, as the schema says.
            Results are new memory: none is an input, or shares memory with an input or another result. Compiled code
            checks that, eager code does not. Strides are the caller's, also when compiled.
        fake: same arguments, but tensors without data and maybe symbolic sizes: returns empty tensors of the right shape,
            dtype, device *and strides*.
        backward: computes gradients, without autograd. Its parameter names say what is saved: an input, a result
            (intermediates too), the gradient of a result (`do` for a result `o`; None only where the result was None;
            with any strides, 0 too), or `needs_input_grad`, a tuple of bools parallel to `grads`. Returns one gradient
            per name in `grads`; None only where the input is None or needs no gradient.
        grads: the inputs that backward differentiates. Any other input that requires grad is an error when called.
        intermediates: the last results, which only backward reads; the caller does not get them.
        non_differentiable: results without a gradient (indices, a log-sum-exp for the caller). All others must be named
            by backward as `d<result>`.
        fake_backward: like `fake`, with backward's arguments. By default a gradient is contiguous with its input's
            shape, dtype and device, which compiled code makes true by converting.
        devices: torch device types that the kernel runs on; `'cuda'` includes ROCm.

    Returns:
        The function to call. With one visible result it returns that, with several a tuple, with none None.

    Defining a name again with the same schema (a module reloaded, a notebook cell run twice) replaces the kernels.
    Autocast neither casts the inputs nor is switched off inside the kernels. `torch.vmap` runs the kernel, and a backward
    inside it, in a loop; the older vmap of `is_grads_batched=True` is not supported. `torch.jit.trace` is not supported: it
    records the numbers of one run.

    Raises:
        TypeError, ValueError: here, for a declaration that does not hold together; says which argument and what to do.
        RuntimeError: when called, for `torch.func.grad`, forward-mode AD and inputs that require grad but have no
            gradient; in a second backward; in compiled code, for results that share memory.
        NotImplementedError: when called with tensors on a device that is not among `devices`.
    """
    caller = sys._getframe(1)
    declaration = declare(
        name, schema, forward, fake, backward, grads, intermediates, non_differentiable, fake_backward, devices
    )
    function = entry_point(declaration, define_operators(declaration, caller.f_code.co_filename))
    function.__module__ = caller.f_globals.get('__name__', '')
    return function
