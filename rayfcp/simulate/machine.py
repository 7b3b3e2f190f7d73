"""The machine that programs are replayed on: seconds of kernels, bytes and bandwidths of links."""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from rayfcp.cost.analytic import REDUCED_BYTES, collective_s
from rayfcp.cost.stages import check_layers, outer_parameters, split_layers
from rayfcp.values import HardwareProfile, LayerKind, LayerProfile, ModelProfile
from rayfcp.values.arrays import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model on a kind of device, for `num_ranks` ranks on each stage; device p x `num_ranks` + r is that of rank r
    on stage p. Seconds and bytes are of one layer, forward.

    Attention over q queries and k keys takes q k + `half_tokens` max(q, k) pairs' time, over a causal square of
    n tokens n (n + 1) / 2 + `half_tokens` n / 2: that is 1 + `half_tokens` / min(q, k) as long per pair. Linear
    layers over n tokens take the time of n + `linear_half_tokens`, and experts that of n k / E + `linear_half_tokens`
    each, for k of E by token. Every device has a port each way inside the node
    and one between nodes, every node shares an uplink and a downlink. Numbers wider than the profile's
    run at proportionally less than its peak (as in `CostModel.from_profiles`). Computation of a device of rank r, the
    overhead of a microbatch included, takes 1 / `speed_of_rank[r]` of these seconds.
    """

    model: ModelProfile
    hardware: HardwareProfile
    num_ranks: int
    layers_of_stage: tuple[int, ...]
    bytes_per_element: int
    node_of_rank: tuple[int, ...]
    speed_of_rank: tuple[float, ...]

    @cached_property
    def num_stages(self) -> int:
        return len(self.layers_of_stage)

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.num_stages

    def part(self, stage: int) -> "StageModel":
        """The layers and parameters of a stage."""
        return StageModel(
            model=self.model,
            layers=self.model.layers_of(self.layers_of_stage)[stage],
            root_parameters=outer_parameters(self.model, num_stages=self.num_stages)[stage],
            last=stage == self.num_stages - 1,
            kinds=self.kinds[sum(self.layers_of_stage[:stage]) :][: self.layers_of_stage[stage]],
        )

    @cached_property
    def shapes(self) -> tuple[LayerProfile, ...]:
        """The distinct shapes of the model's layers, by kind, ascending."""
        return tuple(sorted(dict.fromkeys(self.model.every_layer), key=lambda each: each.kind))

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each of `shapes`."""
        return tuple(each.kind for each in self.shapes)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The number of the shape of each layer of the model."""
        number = {each: at for at, each in enumerate(self.shapes)}
        return tuple(number[each] for each in self.model.every_layer)

    def number(self, microbatch: int, *, backward: bool) -> int:
        """The number of a pass through the layers of the first shape; those of other shapes follow. Microbatch by
        microbatch, forward, then backward."""
        return (2 * microbatch + backward) * len(self.shapes)

    def features_number(self, microbatch: int, *, num_microbatches: int, backward: bool) -> int:
        """The number of an exchange of features, or of their gradients, behind the passes of all microbatches."""
        return 2 * num_microbatches * len(self.shapes) + 2 * microbatch + backward

    @property
    def features_bytes_per_token(self) -> int:
        """Bytes of the features of one image token."""
        vision = self.model.vision
        return vision.num_mergers * self.hidden_bytes_per_token if vision else 0

    @cached_property
    def slowness(self) -> Floats:
        """Seconds of each device over those of a device of speed 1."""
        return np.tile(1.0 / np.array(self.speed_of_rank, np.float64), self.num_stages)

    @property
    def hosted(self) -> bool:
        """Return whether devices may wait for their hosts."""
        return self.hardware.host_layer_s + self.hardware.host_round_s > 0

    def host_s(self, *, backward: bool) -> tuple[float, float]:
        """Seconds in which the host enqueues a layer, and a further round, in one pass."""
        times = self.model.linear_backward
        share = (times if backward else 1.0) / (1 + times)
        return share * self.hardware.host_layer_s, share * self.hardware.host_round_s

    def attention_s_per_pair(self, shape: LayerProfile) -> float:
        return shape.pair_flops / (self.peak_flops * self.hardware.attention_efficiency)

    def expansion_s_per_token(self, shape: LayerProfile) -> float:
        """Seconds of expanding what came of a token as a latent to keys and values of all heads."""
        return shape.expansion_flops / self._linear_flops

    def linear_s_per_token(self, shape: LayerProfile) -> float:
        """Seconds of a token in matrices; those of recurrences are in the rounds of these (`rayfcp.simulate.scans`)."""
        return self._matmul_flops(shape) / self._linear_flops

    def repeated_s_per_token(self, shape: LayerProfile) -> float:
        """Seconds of a token in a recomputed layer that has kept its attention and the states of its recurrence."""
        return self.model.linear_flops_of([shape]) / self._linear_flops

    def idle_s_per_token(self, shape: LayerProfile) -> float:
        """Seconds of a token in the experts that it does not pass: each of these takes half tokens as well."""
        return shape.idle_flops / self._linear_flops

    def _matmul_flops(self, shape: LayerProfile) -> int:
        return self.model.linear_flops_of([shape]) - shape.token_flops

    def linear_seconds(self, flops: Floats | float) -> Floats | float:
        """Seconds of so many FLOPs outside attention."""
        return flops / self._linear_flops

    def linear_backward_s(self, shape: LayerProfile) -> float:
        """Seconds of a token's linear work in backward, in which its own latent is expanded again."""
        return self.model.linear_backward * self.linear_s_per_token(shape) + self.expansion_s_per_token(shape)

    @property
    def _linear_flops(self) -> float:
        """FLOP/s of linear layers."""
        return self.peak_flops * self.hardware.linear_efficiency

    @cached_property
    def head_s_per_token(self) -> float:
        """Seconds of the output head, once a pass, divided by all tokens."""
        return self.model.head_flops_per_token / (self.peak_flops * self.hardware.linear_efficiency)

    def before_share(self, shape: LayerProfile) -> float:
        """Share of a layer's linear work that comes before tokens mix: queries, keys and values."""
        return 2 * shape.before_parameters / (self._matmul_flops(shape) or 1)

    def kv_bytes_per_token(self, shape: LayerProfile) -> int:
        """Keys and values, or what travels in place of them."""
        return shape.moved_elements * self.bytes_per_element

    def gradient_bytes_per_token(self, shape: LayerProfile) -> int:
        """Their partial gradients, in fp32 at least."""
        return shape.moved_elements * self.reduced_bytes

    @cached_property
    def reduced_bytes(self) -> int:
        """Bytes of an element whose parts are summed over ranks."""
        return max(self.bytes_per_element, REDUCED_BYTES)

    def kv_share(self, degree: int, *, shape: LayerProfile) -> float:
        """Share of the key and value heads that each of `degree` ranks of a Ulysses group has: one head at least."""
        heads = shape.attention.num_kv_heads if shape.attention else 1
        return max(1.0 / degree, 1.0 / heads)

    def exchanged_bytes_per_token(self, degree: int, *, shape: LayerProfile, gathered: bool) -> float:
        """Bytes that one rank of a Ulysses group gets of a token of another: 1 / degree of the query heads, and of the
        key and value heads, replicated beyond their count, in the exchange that brings these (`gathered`), and else of
        the outputs."""
        queries, outputs = shape.attention.exchanged_elements if shape.attention else (0, 0)
        if not gathered:
            return outputs / degree * self.bytes_per_element
        elements = queries / degree + shape.moved_elements * self.kv_share(degree, shape=shape)
        return elements * self.bytes_per_element

    @cached_property
    def hidden_bytes_per_token(self) -> int:
        """Bytes of a token's activations between stages."""
        return self.model.hidden_size * self.bytes_per_element

    @cached_property
    def nodes(self) -> Ints:
        """The node of each device."""
        return np.array(self.node_of_rank, np.int64)

    @cached_property
    def uplink_bandwidth(self) -> Floats:
        """Bytes/s of each node's uplink, and of its downlink."""
        sizes, shared = np.bincount(self.nodes).astype(np.float64), self.hardware.node_uplink_bandwidth
        return np.full(len(sizes), shared) if shared else sizes * self.hardware.inter_node_bandwidth

    @cached_property
    def peak_flops(self) -> float:
        """FLOPS of a device for numbers of this width."""
        return self.hardware.peak_flops * min(1.0, self.hardware.dtype_bytes / self.bytes_per_element)

    def port(self, device: Ints, *, across: Bools, receives: int) -> Ints:
        """The number of the server that stands for a device's port inside its node or (`across`) between nodes."""
        return np.asarray((2 * across.astype(np.int64) + receives) * self.num_devices + device)

    def trunk(self, node: Ints, *, receives: int) -> Ints:
        """The number of the server that stands for a node's uplink or (`receives`) downlink."""
        return 4 * self.num_devices + receives * len(self.uplink_bandwidth) + node

    def collective_s_per_byte(self) -> Floats:
        """`[stage, server]`: a collective moves (N - 1) / N of its bytes into and out of each of a stage's N ranks, and
        what enters a node comes over the links of all ranks that the stage has there."""
        return np.stack([self._of_stage(stage) for stage in range(self.num_stages)])

    def collective_latency_s(self) -> Floats:
        """`[stage]`: latency of a collective of a stage's ranks on the nodes that hold them."""
        nodes = [len(set(of_stage.tolist())) for of_stage in self.nodes.reshape(self.num_stages, -1)]
        sizes = {"num_ranks": self.num_ranks}
        return np.array([collective_s(self.hardware, num_nodes=count, **sizes) for count in nodes])

    def _of_stage(self, stage: int) -> Floats:
        share = (self.num_ranks - 1) / self.num_ranks
        own = np.arange(self.num_devices) // self.num_ranks == stage
        sizes = np.bincount(self.nodes[own], minlength=len(self.uplink_bandwidth))
        across = 0.0 if np.count_nonzero(sizes) == 1 else share
        inside = np.where(own, share / self.hardware.intra_node_bandwidth, 0.0)
        of_node = np.maximum(sizes, 1)[self.nodes] * self.hardware.inter_node_bandwidth
        between = np.where(own, across / of_node, 0.0)
        trunks = np.where(sizes > 0, across / self.uplink_bandwidth, 0.0)
        return np.concatenate([np.tile(inside, 2), np.tile(between, 2), np.tile(trunks, 2)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Layers of a stage, each of a shape (`Machine.kinds`), and embedding or (`last`) output head, gathered and reduced
    together."""

    model: ModelProfile
    layers: tuple[LayerProfile, ...]
    root_parameters: int
    last: bool
    kinds: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def share(self) -> float:
        """Share of the linear work of all layers."""
        flops = self.model.linear_flops_of
        return flops(self.layers) / flops(self.model.every_layer)

    @property
    def linear_flops_per_token(self) -> float:
        """Forward, outside attention."""
        head = self.model.head_flops_per_token if self.last else 0.0
        return float(self.model.linear_flops_of(self.layers)) + head

    def attention_flops(self, pairs: Floats) -> Floats:
        """Forward, of each device, where a layer of shape k computes `pairs[k, device]`."""
        per_pair = np.array([float(each.pair_flops) for each in self.layers])
        flops: Floats = (per_pair[:, None] * pairs[list(self.kinds)]).sum(axis=0)
        return flops


def machine_of(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    num_stages: int = 1,
    layers_of_stage: tuple[int, ...] = (),
    node_of_rank: tuple[int, ...] = (),
    speed_of_rank: tuple[float, ...] = (),
    bytes_per_element: int | None = None,
) -> Machine:
    """The machine; without `node_of_rank`, nodes are filled one after the other, without `layers_of_stage` layers are
    split evenly, without `speed_of_rank` all are as fast.

    Raises:
        ValueError: `node_of_rank` is not one node for each device, `speed_of_rank` not a positive number for each rank,
            the layers do not make up the stages, or a bandwidth is not above 0.
    """
    num_devices = num_ranks * num_stages
    for name, entries, count, each in (
        ("node_of_rank", node_of_rank, num_devices, "ranks"),
        ("speed_of_rank", speed_of_rank, num_ranks, "ranks"),
        ("layers_of_stage", layers_of_stage, num_stages, "stages"),
    ):
        if len(entries) not in (0, count):
            raise ValueError(f"{name} has {len(entries)} entries, must have one for each of {count} {each}, or none")
    layers = layers_of_stage or split_layers(model.num_layers, num_stages)
    check_layers(model, layers)
    _check_rates(hardware, speed_of_rank)
    named = node_of_rank or tuple(rank // max(hardware.devices_per_node, 1) for rank in range(num_devices))
    number = {node: at for at, node in enumerate(sorted(set(named)))}
    return Machine(
        model=model,
        hardware=hardware,
        num_ranks=num_ranks,
        layers_of_stage=layers,
        bytes_per_element=bytes_per_element or hardware.dtype_bytes,
        node_of_rank=tuple(number[node] for node in named),
        speed_of_rank=speed_of_rank or (1.0,) * num_ranks,
    )


def _check_rates(hardware: HardwareProfile, speed_of_rank: tuple[float, ...]) -> None:
    """
    Raises:
        ValueError: a rate is not above 0 and finite.
    """
    for name in (
        "peak_flops",
        "linear_efficiency",
        "attention_efficiency",
        "intra_node_bandwidth",
        "inter_node_bandwidth",
    ):
        if not 0 < getattr(hardware, name) < inf:
            raise ValueError(f"hardware.{name} is {getattr(hardware, name)}, must be above 0 and finite; correct it")
    if not all(0 < speed < inf for speed in speed_of_rank):
        raise ValueError(f"speed_of_rank is {speed_of_rank}, each must be above 0 and finite; measure it again")
