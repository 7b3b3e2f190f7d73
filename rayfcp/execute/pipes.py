"""What passes between the stages of a rank: activations one way, their gradients the other, each on its own channel."""

import torch
from torch import Tensor

from rayfcp.execute.groups import Channels
from rayfcp.execute.progress import Progress
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import DistributedTransport, Pending, Transport
from rayfcp.program import Flow, Receive, Send


class Pipes:
    """One stage's ends of both channels. On a channel, peers are numbers of stages.

    Sent tensors are kept until they are known to have left: when the channel says so, when the answer to
    them came (the gradient of what was sent on), at the latest in `finish`.

    Args:
        activations: the channel from each stage to the next.
        gradients: the channel back.
        hidden_size: of the model.
        dtype: of activations and their gradients.
    """

    def __init__(
        self,
        *,
        activations: Transport,
        gradients: Transport,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._channels = {Flow.ACTIVATION: activations, Flow.GRADIENT: gradients}
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._leaving: dict[tuple[Flow, int], tuple[Pending, Tensor]] = {}

    @property
    def stage(self) -> int:
        return self._channels[Flow.ACTIVATION].rank

    def send(self, item: Send, tensor: Tensor) -> None:
        """Post `tensor`, `[tokens, hidden]`, and go on.

        Raises:
            ValueError: it is not what the program says.
        """
        due = (item.num_tokens, self._hidden_size)
        if tensor.shape != due or tensor.dtype is not self._dtype:
            raise ValueError(
                f"{item.flow.value} of microbatch {item.microbatch} is {tuple(tensor.shape)} in {tensor.dtype}, must "
                f"be {due} in {self._dtype}; lower the program and build the model from one configuration"
            )
        self._leaving = {at: held for at, held in self._leaving.items() if not held[0].done()}
        tensor = tensor.contiguous()
        pending = self._channels[item.flow].post([(item.stage, tensor)], [])
        self._leaving[item.flow, item.microbatch] = (pending, tensor)

    def receive(self, item: Receive, *, traffic: Traffic) -> Tensor:
        """Wait for `[tokens, hidden]`."""
        tensor = torch.empty((item.num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        traffic.wait(self._channels[item.flow].post([], [(item.stage, tensor)]))
        if item.flow is Flow.GRADIENT and (Flow.ACTIVATION, item.microbatch) in self._leaving:
            self._leaving.pop((Flow.ACTIVATION, item.microbatch))[0].wait()
        return tensor

    def finish(self) -> None:
        """Wait until everything has left."""
        for pending, _ in self._leaving.values():
            pending.wait()
        self._leaving.clear()


def make_pipes(
    channels: Channels, *, hidden_size: int, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Pipes | None:
    """Those of a device of several stages."""
    if channels.pipe_forward is None or channels.pipe_backward is None:
        return None
    return Pipes(
        activations=DistributedTransport(channels.pipe_forward, progress),
        gradients=DistributedTransport(channels.pipe_backward, progress),
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
    )
