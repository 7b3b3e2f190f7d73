"""Forward and backward passes of one stage in one global batch, and what lives between them."""

import time

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.clocks import clock_of
from rayfcp.execute.device import numbers_dtype
from rayfcp.execute.features import handed_out, row_numbers
from rayfcp.execute.inputs import Inputs, load, pixels_of
from rayfcp.execute.interfaces import PictureSource, Placed, TokenSource, TrainableModel
from rayfcp.execute.pipes import Pipes
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import Transport
from rayfcp.program import Backward, Encode, Flow, Forward, Load, RankProgram, Receive, Send


class Passes:
    """Does instructions in the order in which it is asked.

    Of a microbatch under way there live what autograd saved, its input from the stage before, and until it is sent its
    output: for backward the output's place in the graph is enough.

    Args:
        program: whose instructions these are.
        loss_scale: what losses are multiplied by before they are differentiated.
        device: where inputs go.
    """

    def __init__(
        self,
        program: RankProgram,
        model: TrainableModel,
        *,
        pipes: Pipes | None,
        loss_scale: float,
        device: torch.device,
    ) -> None:
        self._model, self._pipes, self._loss_scale, self._device = model, pipes, loss_scale, device
        self._is_first, self._is_last = program.stage == 0, program.stage == program.num_stages - 1
        self.traffic = Traffic(clock=clock_of(device, time.perf_counter))
        self.loss_sum = torch.zeros((), dtype=numbers_dtype(device), device=device)
        self._loaded: dict[int, Inputs] = {}
        self._placed: dict[int, Placed] = {}
        self._entered: dict[int, Tensor] = {}
        self._leaving: dict[int, Tensor] = {}
        self._ends: dict[int, GradientEdge] = {}
        self._returned: dict[int, Tensor] = {}

    def load(self, item: Load, tokens: TokenSource, *, pictures: PictureSource | None) -> None:
        self._loaded[item.microbatch] = load(
            item, tokens, pictures=pictures, is_first=self._is_first, is_last=self._is_last, device=self._device
        )

    def encode(self, item: Encode, pictures: PictureSource | None, *, transport: Transport) -> None:
        """Run the vision encoder, and hand its features out and get those of own tokens."""
        features = self._model.encode(pixels_of(item, pictures))
        self._placed[item.microbatch] = Placed(
            features=handed_out(features, item.features, transport=transport, traffic=self.traffic),
            rows=row_numbers(item.rows, self._device),
        )

    def receive(self, item: Receive) -> None:
        """Wait for activations or for a gradient."""
        assert self._pipes is not None
        tensor = self._pipes.receive(item, traffic=self.traffic)
        if item.flow is Flow.ACTIVATION:
            self._entered[item.microbatch] = tensor.requires_grad_()
        else:
            self._returned[item.microbatch] = tensor

    def forward(self, item: Forward, context: AttentionContext, *, keep_logits: bool) -> None:
        loaded = self._loaded.pop(item.microbatch)
        inputs = loaded.ids if loaded.ids is not None else self._entered[item.microbatch]
        output = self._model.run(
            inputs,
            positions=loaded.positions,
            targets=loaded.targets,
            attention=context,
            keep_logits=keep_logits,
            placed=self._placed.pop(item.microbatch, None),
        )
        self.traffic.buffers.clear()
        self._ends[item.microbatch] = get_gradient_edge(output)
        if self._is_last:
            self.loss_sum += output.detach()
            self._returned[item.microbatch] = torch.full_like(output.detach(), self._loss_scale)
        else:
            self._leaving[item.microbatch] = output.detach()

    def backward(self, item: Backward) -> None:
        self._model.set_reduce(item.reduce)
        torch.autograd.backward((self._ends.pop(item.microbatch),), (self._returned.pop(item.microbatch),))
        self.traffic.buffers.clear()

    def send(self, item: Send) -> None:
        """Post activations, or the gradient of what entered."""
        assert self._pipes is not None
        if item.flow is Flow.ACTIVATION:
            tensor = self._leaving.pop(item.microbatch)
        else:
            gradient = self._entered.pop(item.microbatch).grad
            assert gradient is not None
            tensor = gradient
        self._pipes.send(item, tensor)
