"""The names with which PyTorch's partitioners cut a joint graph, each held by a test of its own.

Apart from ``_torch_private``, which plans of eager steps use. Written against torch 2.13; ``missing`` says in one
sentence what another version lacks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = [
    "Cut", "Parts", "cut", "described", "in_order", "is_symbolic", "joint_parts", "missing", "plain_backend",
    "without_modes",
]  # fmt: skip


class Parts(NamedTuple):
    """Of a joint graph: its inputs, the nodes that a forward pass runs, those that a gradient goes into, and the inputs
    that the step overwrites."""

    inputs: list[fx.Node]
    forward: set[fx.Node]
    gradients: set[fx.Node]
    written: set[fx.Node]


class Cut(NamedTuple):
    """Forward and backward graph, and the nodes of the joint graph that one hands the other, in their order."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: list[fx.Node]


def missing() -> str | None:
    """Why joint graphs cannot be cut here; None where they can."""
    try:
        from torch._dynamo.backends.common import aot_autograd  # noqa: F401
        from torch._functorch.compile_utils import fx_graph_cse  # noqa: F401
        from torch._functorch.partitioners import _extract_fwd_bwd_modules  # noqa: F401
    except ImportError as error:
        return f"this version of PyTorch has other partitioners ({error}); 2.13 is known to work"
    return None


def joint_parts(joint: fx.GraphModule, static: list[int] | None, outputs: int) -> Parts:
    """What a joint graph consists of. Equal nodes become one.

    The parts of a result that only backward reads, such as the statistics of a norm, are made by the forward pass too.
    """
    from torch._functorch import partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    partitioners.force_save_collectives(joint)
    partitioners.force_save_effectful_ops(joint)
    partitioners.force_save_bw_mutation_src(joint)
    parts = partitioners.classify_nodes(joint, static or [], outputs)
    forward, gradients = set(parts.required_fw_nodes), set[fx.Node]()
    for node in joint.graph.nodes:
        if node.target is operator.getitem and node.args[0] in forward:
            forward.add(node)
        if partitioners._is_tangent(node) or any(source in gradients for source in node.all_input_nodes):
            gradients.add(node)
    return Parts(list(parts.inputs), forward, gradients, _written(joint))


def _written(joint: fx.GraphModule) -> set[fx.Node]:
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    output = joint.graph.find_nodes(op="output")[0]
    names = {d.mutated_input.expr() for d in _leaves(output.meta.get("desc")) if isinstance(d, InputMutationAOTOutput)}
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") is not None]
    found = {node for node in inputs if node.meta["desc"].expr() in names}
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return found | {node.args[0] for node in copies}


def _leaves(tree: Any) -> list[Any]:
    return [x for part in tree for x in _leaves(part)] if isinstance(tree, list | tuple) else [tree]


def cut(joint: fx.GraphModule, saved: list[fx.Node], outputs: int) -> Cut:
    """The graphs that compute everything from the inputs, and from what is saved; what backward does not read of it
    is left out. Sizes must be numbers."""
    from torch._functorch import partitioners

    saved = list(saved)
    forward, backward = partitioners._extract_fwd_bwd_modules(joint, saved, [], num_fwd_outputs=outputs)
    return Cut(forward, backward, saved)


def in_order(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What backward computes again stands where it is first read, so that it is not held from the start."""
    from torch._functorch import partitioners
    from torch._functorch.compile_utils import raise_getitems

    return raise_getitems(forward), raise_getitems(partitioners.reordering_to_mimic_autograd_engine(backward))


def described(number: int) -> Any:
    """How AOTAutograd names a saved result of the forward graph."""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    return SavedForBackwardsAOTOutput(number)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node is a size, or has one, that is no number while the graph is compiled."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(bool(free_symbols(x)) for x in parts if isinstance(x, Tensor | torch.SymInt | torch.SymFloat))


def without_modes() -> Any:
    """A context in which tensors are real although a graph is traced around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def plain_backend(partition: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that runs both graphs operation by operation, without code generation."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.fx.graph import _BoxedCodeGen

    def as_it_is(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        """Takes its arguments out of a list, so that each is freed after its last use."""
        graph.graph.set_codegen(_BoxedCodeGen())
        graph.recompile()
        forward = graph.forward

        def run(arguments: list[Any]) -> Any:
            return forward(arguments)

        setattr(run, "_boxed_call", True)  # noqa: B010
        return run

    backend: Callable[..., Any] = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    return backend
