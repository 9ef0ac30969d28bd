"""What a training step must be like for a CUDA graph of it to be right; it can be seen without a GPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bethenet.learning.optimization import OptimizerOptions, PartOptimizer

LOOKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


class Blindfold(TorchDispatchMode):
    """Operations that would wait for the device are errors inside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in LOOKS, f"the host looks at a number: {name}"
        if name == "multinomial":
            several = args[1] > 1 and (args[2:3] or (kwargs or {}).get("replacement"))
            assert several, "a single draw is checked by the host"
        if name in ("index", "index_put", "index_put_"):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            assert not masks, "how many entries a mask has must be looked at"
        return function(*args, **(kwargs or {}))


def assert_recordable(objective, batch):
    """A step looks at no number and leaves every buffer where it is."""
    optimizers = {
        part: PartOptimizer([parameter for parameter in module.parameters() if parameter.requires_grad], _OPTIONS)
        for part, module in objective.parts().items()
    }
    generator = torch.Generator().manual_seed(0)
    _step(objective, batch, optimizers, generator)  # what is made once may look
    places = {name: buffer.data_ptr() for name, buffer in objective.named_buffers()}
    with Blindfold():
        _step(objective, batch, optimizers, generator)
    assert {name: buffer.data_ptr() for name, buffer in objective.named_buffers()} == places


_OPTIONS = OptimizerOptions(clip_norm=1.0)


def _step(objective, batch, optimizers, generator):
    for update in objective.updates(batch, generator):
        parameters = [parameter for part in update.parts for parameter in optimizers[part].parameters]
        gradients = update.gradients
        if gradients is None:
            gradients = torch.autograd.grad(update.loss.sum(), parameters, allow_unused=True)
        left = iter(gradients)
        for part in update.parts:
            optimizers[part].step([next(left) for _ in optimizers[part].parameters])
