"""Options of the accelerators' communication libraries."""

from typing import Any

import torch
import torch.distributed as dist

MOST_SMS = 64
"""NCCL has no more channels, and a channel has one thread block."""


def group_options(backend: str, *, communication_sms: int) -> Any | None:
    """For `dist.new_group`; None where there is nothing to choose.

    nccl: messages run in a stream of high priority, so that their blocks start as soon as a multiprocessor is free, on
    at most `communication_sms` of them (0: as many as the library likes). hccl: torch-npu sets its own.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if communication_sms:
        options.config.max_ctas = min(communication_sms, MOST_SMS)
    return options


def spare_sms(device: torch.device, communication_sms: int) -> None:
    """From now on cuBLAS leaves that many multiprocessors of a GPU alone (0: none), where torch can tell it to;
    attention kernels are told when they are picked."""
    tell = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if device.type == "cuda" and tell is not None:
        tell(communication_sms or None)
