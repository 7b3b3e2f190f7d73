"""Layouts that devices can have: pipeline stages and tensor-parallel devices, and what one device sees of each."""

from dataclasses import dataclass, replace

from rayfcp.compare.inputs import Inputs
from rayfcp.compare.setting import GIB
from rayfcp.plan.costs.memory import ACCELERATOR_MEMORY_SHARE
from rayfcp.plan.costs.tensor_parallel import device_hardware, device_model
from rayfcp.plan.rivals.static import divisors
from rayfcp.values import HardwareProfile, ModelProfile

HOST = "cpu"
"""The device whose profile says what a worker may take; of others a run plans with a share."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """How the devices of a rank share the model's layers."""

    num_stages: int
    tensor_parallel: int

    @property
    def devices_per_rank(self) -> int:
        return self.num_stages * self.tensor_parallel

    def __str__(self) -> str:
        """
        >>> str(Layout(num_stages=2, tensor_parallel=1))
        '2 stages x 1 device'
        """
        stages, devices = self.num_stages, self.tensor_parallel
        return f"{stages} stage{'s' if stages > 1 else ''} x {devices} device{'s' if devices > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A layout as one of its devices sees it: a narrower model on a cluster whose ranks have one device a stage.
    `split_vocabulary`: embedding and head are shared out over tensor-parallel devices too, as Megatron-LM does; rayfcp
    holds them whole on each."""

    layout: Layout
    split_vocabulary: bool
    inputs: Inputs
    model: ModelProfile
    hardware: HardwareProfile

    @property
    def num_ranks(self) -> int:
        return self.inputs.devices // self.inputs.stages


def view_of(
    layout: Layout, *, inputs: Inputs, model: ModelProfile, hardware: HardwareProfile, split_vocabulary: bool = False
) -> View:
    """`inputs` say what there is beside the layout; their memory is that of a device."""
    size = layout.tensor_parallel
    own = device_model(model, size)
    if split_vocabulary:
        own = replace(own, vocab_size=-(-model.vocab_size // size))
    return View(
        layout=layout,
        split_vocabulary=split_vocabulary and size > 1,
        inputs=replace(inputs, devices=inputs.devices // size, stages=layout.num_stages, tensor_parallel=1),
        model=own,
        hardware=device_hardware(hardware, own, tensor_parallel=size),
    )


def planned_memory_gib(inputs: Inputs, hardware: HardwareProfile) -> float:
    """Of a device, as a run plans with it: as asked for, or the share of the hardware's that runs take."""
    if inputs.memory_gib is not None:
        return inputs.memory_gib
    share = 1.0 if hardware.name == HOST else ACCELERATOR_MEMORY_SHARE
    return int(share * hardware.memory_bytes) / GIB


def layouts(
    num_devices: int,
    *,
    hardware: HardwareProfile,
    stages: int | None = None,
    tensor_parallel: int | None = None,
) -> tuple[Layout, ...]:
    """All that leave none of the devices idle and keep a rank's tensor-parallel devices on one node; with the
    number of stages or of tensor-parallel devices that is given, or any that divides. At least one."""
    sizes = [tensor_parallel] if tensor_parallel else divisors(hardware.devices_per_node)
    found = [
        Layout(num_stages=number, tensor_parallel=size)
        for size in sizes
        if tensor_parallel or num_devices % size == 0
        for number in ([stages] if stages else divisors(max(num_devices // size, 1)))
    ]
    return tuple(sorted(found))


def misfit(layout: Layout, *, inputs: Inputs, model: ModelProfile, hardware: HardwareProfile) -> str:
    """Why a layout cannot be, whatever its memory; nothing if it can."""
    size, number = layout.tensor_parallel, layout.num_stages
    if layout.devices_per_rank > inputs.devices:
        return f"{number} stages x {size} devices are more than the {inputs.devices} devices that there are"
    if number > model.num_layers:
        return f"{number} stages are more than the model's {model.num_layers} layers"
    if layout.devices_per_rank > 1 and model.vision is not None:
        return f"{number} stages x {size} devices cannot share the model's vision encoder"
    if size > 1 and model.has_experts:
        return f"{size} tensor-parallel devices cannot share the model's experts"
    for what, bound in (
        ("heads of the model", model.num_heads),
        ("key/value heads of the model", model.num_kv_heads),
        ("numbers of the model's MLP", model.ffn_size),
        ("devices of a node", hardware.devices_per_node),
    ):
        if bound % size:
            return f"{size} tensor-parallel devices do not divide the {bound} {what}"
    return ""
