"""What a layer's attention needs besides its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayfcp.execute.context import ContextStore
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.schedule import ReadyHeads, ReadyProgram
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What a layer's attention needs besides its tensors; travels as a keyword argument of the layer.

    `program`: of the layer; the model is given that of its stage's first kind of layers, with window `window`, and in
    `others` those of other kinds by their windows. A layer takes its own by `of_window`.
    The first `recomputed_layers` layers of the stage keep only their input; `recomputed`: this layer, number `layer`
    of the model, does. `store`: what microbatches keep for later ones, this one being number `microbatch`.
    """

    program: ReadyProgram | ReadyHeads
    transport: Transport
    kernel: AttentionKernel
    recomputed_layers: int = 0
    store: ContextStore = field(default_factory=ContextStore)
    microbatch: int = 0
    layer: int = 0
    recomputed: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    window: int = 0
    others: Mapping[int, ReadyProgram | ReadyHeads] = field(default_factory=dict)

    def of_window(self, window: int) -> "AttentionContext":
        """For a layer with this window (0: none).

        Raises:
            ValueError: the stage's program was not lowered for such layers.
        """
        if window == self.window:
            return self
        if window not in self.others:
            raise ValueError(
                f"attention: a layer has window {window}, the program is of layers with windows "
                f"{sorted({self.window, *self.others})} (0: none); give sequences the model's windows and lower again"
            )
        return replace(self, program=self.others[window])
