"""The memory model: bytes of states, layers and passes, and the tokens that a rank can hold (Eq. 7 turned around).

Planners, the ledger of programs, the simulator and plan checks count with these definitions (docs/cost_model.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rayfcp.cost.stages import outer_parameters
from rayfcp.values import InfeasiblePlanError, LayerProfile, ModelProfile
from rayfcp.values.arrays import Floats
from rayfcp.values.profile import PACKED_BYTES, PACKED_NUMBERS

Amount = TypeVar("Amount", int, Floats)

STATE_BYTES = 16  # per parameter: fp32 weight and gradient, Adam's two moments
FP32_BYTES = 4
GATHERED_LAYERS = 2  # the one that computes and the one being fetched
GIB = 1 << 30

ACCELERATOR_MEMORY_SHARE = 0.9
"""Share of a device's memory that a run plans with; the rest is for its context, communicators and fragmentation."""

LOSS_CHUNK_TOKENS = 2048
"""Most tokens of a rank whose logits exist at a time."""

_LOSS_BYTES_PER_WORD = 2 * LOSS_CHUNK_TOKENS * FP32_BYTES
_LEAST_CHUNK_TOKENS = 512
"""Below, products of matrices wait for memory."""


def max_tokens_per_rank(
    model: ModelProfile,
    *,
    num_devices: int,
    memory_bytes: int,
    recomputed_layers: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"] = "microbatch",
    by_heads: bool = False,
) -> int:
    """Tokens that fit beside the model's states on each of `num_devices` that share them. `by_heads`: ranks may share
    out heads (Ulysses). Groups that share them out over more ranks than there are key and value heads hold less
    (`CostModel.room`).

    Raises:
        InfeasiblePlanError: the states alone, or with one token, pass `memory_bytes`.
    """
    fixed_bytes = state_bytes(
        model,
        num_devices=num_devices,
        bytes_per_element=bytes_per_element,
        reduce_every=reduce_every,
        gather_every=gather_every,
    )
    per_token = token_bytes(
        model, recomputed_layers=recomputed_layers, bytes_per_element=bytes_per_element, by_heads=by_heads
    )
    least_bytes = ending_bytes(
        model, num_devices=num_devices, bytes_per_element=bytes_per_element, reduce_every=reduce_every
    )
    num_tokens = (memory_bytes - fixed_bytes) // per_token
    if num_tokens < 1 or memory_bytes < least_bytes:
        raise InfeasiblePlanError(
            f"memory per device is {memory_bytes / GIB:.3g} GiB, model {model.name} on {num_devices} devices needs "
            f"{max(fixed_bytes + per_token, least_bytes) / GIB:.3g} GiB for its states and one token; add devices or "
            "memory, or set train.reduce_every=microbatch"
        )
    return num_tokens


def state_bytes(
    model: ModelProfile,
    *,
    num_devices: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"] = "microbatch",
) -> int:
    """`stage_state_bytes` of a device of a single stage."""
    return stage_state_bytes(
        model,
        layers_of_stage=(model.num_layers,),
        stage=0,
        num_ranks=num_devices,
        bytes_per_element=bytes_per_element,
        reduce_every=reduce_every,
        gather_every=gather_every,
    )


def stage_state_bytes(
    model: ModelProfile,
    *,
    layers_of_stage: Sequence[int],
    stage: int,
    num_ranks: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"],
) -> int:
    """Bytes of a device of a stage that do not depend on tokens: the sum of `stage_state_parts`."""
    return sum(
        stage_state_parts(
            model,
            layers_of_stage=layers_of_stage,
            stage=stage,
            num_ranks=num_ranks,
            bytes_per_element=bytes_per_element,
            reduce_every=reduce_every,
            gather_every=gather_every,
        ).values()
    )


def stage_state_parts(
    model: ModelProfile,
    *,
    layers_of_stage: Sequence[int],
    stage: int,
    num_ranks: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"],
) -> dict[str, int]:
    """Bytes of a device of a stage beside tokens, by kind: states of its layers, sharded over `num_ranks`; what is
    gathered; unreduced gradients; on the last stage the head's gradient; and what exists for a moment, a chunk of the
    loss or one layer's gradients. With a vision encoder also its own.

    The embedding is on the first stage, the head on the last; tied, both have the matrix. Gradients of both are summed
    when the activations of a microbatch are gone (`ending_bytes`), but with stages beside those of other microbatches.
    """
    outer = outer_parameters(model, num_stages=len(layers_of_stage))[stage]
    is_last = stage == len(layers_of_stage) - 1
    settings: dict[str, Any] = {"num_ranks": num_ranks, "bytes_per_element": bytes_per_element}
    settings |= {"reduce_every": reduce_every, "gather_every": gather_every, "staged": len(layers_of_stage) > 1}
    trains_head = model.adapter is None
    head = bytes_per_element * model.head_parameters if is_last and trains_head else 0
    loss = loss_bytes(model, bytes_per_element=bytes_per_element, trains_head=trains_head) if is_last else 0
    layers = model.layers_of(layers_of_stage)[stage]
    found = _states(
        [model.parameters_of([each]) for each in layers],
        outer=outer,
        trained=([model.trained_of(each) for each in layers], outer if model.adapter is None else 0),
        packed=model.adapter.packed_parameters if model.adapter else 0,
        **settings,
    )
    found["passing"] += bytes_per_element * (model.adapter.largest_packed if model.adapter else 0)
    if vision := model.vision:
        sizes, outer = [vision.layer_parameters] * vision.num_layers, vision.outer_parameters(model.hidden_size)
        none = [0] * vision.num_layers, 0
        more = _states(sizes, outer=outer, trained=none if vision.frozen else (sizes, outer), **settings)
        found = {kind: size + more[kind] for kind, size in found.items()}
    return found | {"head": head, "passing": max(found["passing"], loss - head)}


def _states(
    layers: Sequence[int],
    *,
    outer: int,
    trained: tuple[Sequence[int], int],
    packed: int = 0,
    num_ranks: int,
    bytes_per_element: int,
    reduce_every: Literal["microbatch", "step"],
    gather_every: Literal["microbatch", "step"],
    staged: bool,
) -> dict[str, int]:
    """By kind, of layers of so many parameters each and `outer` beside them; `trained`: how many of each layer and of
    the others have gradients and moments. The rest are weights alone, in the precision in which they are used, or
    `packed` of a layer in four bits.

    `sharded`: weights and moments, and gradients: of the microbatches before, or of the first layer that is reduced.
    `gathered`: two layers at a time, those neighbours that are largest, or all through the step. `unreduced`: fp32
    gradients of the whole model, where they are summed once a step. `passing`: gradients of the layer that computes,
    and otherwise those of the one before in fp32, which are being summed; of the largest layer both.
    """
    whole, saved = sum(layers) + outer, packed * bytes_per_element - packed * PACKED_BYTES // PACKED_NUMBERS
    at_once = len(layers) if gather_every == "step" else min(GATHERED_LAYERS, len(layers))
    gathered = (_most_at_once(layers, at_once) + outer) * bytes_per_element - at_once * saved
    once, (own, others) = reduce_every == "step", trained
    all_trained, largest = sum(own) + others, max(own)
    states = (STATE_BYTES - FP32_BYTES) * all_trained + FP32_BYTES * (largest if once else all_trained)
    states += bytes_per_element * (whole - all_trained) - len(layers) * saved
    return {
        "sharded": -(-states // num_ranks),
        "gathered": gathered,
        "unreduced": FP32_BYTES * (all_trained if once else staged * others),
        "passing": (bytes_per_element + (0 if once else FP32_BYTES)) * largest,
    }


def _most_at_once(layers: Sequence[int], count: int) -> int:
    """Most parameters of `count` neighbouring layers."""
    return max(sum(layers[first : first + count]) for first in range(len(layers) - count + 1))


def ending_bytes(
    model: ModelProfile, *, num_devices: int, bytes_per_element: int, reduce_every: Literal["microbatch", "step"]
) -> int:
    """Bytes of a device of a single stage at the end of a backward pass, without activations: states, embedding and
    head, and if these are trained their gradients, and the same in fp32 as they are summed."""
    outer = outer_parameters(model, num_stages=1)[0]
    whole = model.parameters_of(model.every_layer) + outer
    if model.adapter is not None:
        states = STATE_BYTES * model.num_trained + model.frozen_bytes(bytes_per_element)
        return -(-states // num_devices) + bytes_per_element * outer
    gradients = bytes_per_element if reduce_every == "microbatch" else max(bytes_per_element, FP32_BYTES)
    return -(-STATE_BYTES * whole // num_devices) + (bytes_per_element + gradients + FP32_BYTES) * outer


def forward_tokens_per_rank(
    model: ModelProfile,
    *,
    num_devices: int,
    memory_bytes: int,
    bytes_per_element: int,
    gather_every: Literal["microbatch", "step"] = "microbatch",
) -> int:
    """Tokens that fit on each of `num_devices` of a single stage in passes that are not followed by a backward pass; 0
    or less if states alone pass `memory_bytes`."""
    states = forward_state_bytes(
        model,
        layers_of_stage=(model.num_layers,),
        stage=0,
        num_ranks=num_devices,
        bytes_per_element=bytes_per_element,
        gather_every=gather_every,
    )
    degree = largest_degree(model, num_devices)
    return (memory_bytes - states) // forward_token_bytes(model, bytes_per_element=bytes_per_element, degree=degree)


def forward_state_bytes(
    model: ModelProfile,
    *,
    layers_of_stage: Sequence[int],
    stage: int,
    num_ranks: int,
    bytes_per_element: int,
    gather_every: Literal["microbatch", "step"],
) -> int:
    """Bytes of a device of a stage beside tokens in passes that are not followed by a backward pass: weights and
    moments, gathered layers, on the last stage a chunk's logits, but no gradients."""
    outer = outer_parameters(model, num_stages=len(layers_of_stage))[stage]
    layers = [model.parameters_of([each]) for each in model.layers_of(layers_of_stage)[stage]]
    whole = sum(layers) + outer
    few = _most_at_once(layers, min(GATHERED_LAYERS, len(layers))) + outer
    gathered = bytes_per_element * (whole if gather_every == "step" else few)
    is_last = stage == len(layers_of_stage) - 1
    logits = loss_bytes(model, bytes_per_element=bytes_per_element, trains_head=False) if is_last else 0
    return -(-(STATE_BYTES - FP32_BYTES) * whole // num_ranks) + gathered + logits


def forward_token_bytes(model: ModelProfile, *, bytes_per_element: int, degree: int = 1) -> int:
    """Bytes per token of such a pass: what one layer makes, at most all that its backward pass would need, its input
    and output, inputs of all layers, the last norm, keys and values of two rounds, and exchanges for heads, over which
    `degree` ranks replicate keys and values beyond their heads."""
    attended = max(degree // model.num_kv_heads, 1)

    def needed(layer: LayerProfile) -> int:
        each = layer_bytes(model, layer, bytes_per_element=bytes_per_element)
        by_heads = bytes_per_element * layer.exchanged_elements + each.kv * (attended - 1)
        travelling = (each.buffers - 2 * each.kv_gradients) * attended + each.expanded
        return each.layer(1, attended) + each.head + travelling + by_heads

    inputs = bytes_per_element * sum(each.input_size for each in model.every_layer)
    between = _residual_bytes(model, bytes_per_element=bytes_per_element) * model.hidden_size
    return max(map(needed, model.every_layer)) + 2 * between + inputs


def loss_chunk_tokens(hidden_size: int, *, bytes_per_element: int) -> int:
    """Return the tokens per chunk of the loss. Each token has logits and, in fp32 at least, probabilities of all words.
    Chunks of a wide head are smaller, since its gradient is in memory beside them.

    >>> loss_chunk_tokens(2048, bytes_per_element=2), loss_chunk_tokens(4096, bytes_per_element=2)
    (2048, 1365)
    """
    left = _LOSS_BYTES_PER_WORD - bytes_per_element * hidden_size
    return min(max(left // _logit_bytes(bytes_per_element), _LEAST_CHUNK_TOKENS), LOSS_CHUNK_TOKENS)


def loss_bytes(model: ModelProfile, *, bytes_per_element: int, trains_head: bool = True) -> int:
    """Return the bytes of the loss: a chunk's logits and the head's gradient, which is summed in fp32 at least. During
    its cast both dtypes exist, but no logits."""
    logits = loss_chunk_tokens(model.hidden_size, bytes_per_element=bytes_per_element) * _logit_bytes(bytes_per_element)
    if not trains_head:
        return model.head_size * logits
    sums = max(bytes_per_element, FP32_BYTES) * model.hidden_size
    cast = bytes_per_element * model.hidden_size if bytes_per_element < FP32_BYTES else 0
    return model.head_size * max(logits + sums, sums + cast, _LOSS_BYTES_PER_WORD)


def _logit_bytes(bytes_per_element: int) -> int:
    return bytes_per_element + max(bytes_per_element, FP32_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes per token of a rank in one layer, from a forward pass to its backward pass.

    `whole`: everything that backward needs (`layer_token_bytes`); `kept`: what a recomputed layer keeps, its input,
    and output and logsumexp of attention if that is kept; `exchanged`: what it keeps more then where ranks share out
    heads, so that no exchange is repeated: queries, keys, values and outputs by heads; `kv`: keys and values, part of
    `whole`, which a recomputed layer keeps too where later slices need them; `kv_gradients`: their gradients, in fp32
    at least. Not by layer: `head`, the last norm, on the last stage; `working`: gradients of the MLP's two inner
    activations, with experts of their inputs too, of the one microbatch that computes; `buffers`: per token whose keys
    and values travel, those of one round in use and one arriving, with their gradients; `expanded`: the same of keys
    and values that are made from the latent of a token, in shares of all heads.
    """

    whole: int
    kept: int
    exchanged: int
    kv: int
    kv_gradients: int
    head: int
    working: int
    buffers: int
    expanded: int

    def layer(self, tokens: Amount, attended: Amount) -> Amount:
        """Bytes that a layer which is not recomputed keeps of `tokens` of a rank, which has the keys and values of
        `attended` tokens (in shares of all heads) while it computes."""
        return self.whole * tokens + self.kv * (attended - tokens)

    def freed(self, tokens: Amount, attended: Amount, *, later: Amount, by_heads: Amount | int = 0) -> Amount:
        """Bytes less that a recomputed layer keeps: `kept` stays, and the keys and values of `later` tokens, which
        later slices need. `by_heads`: 1 on a rank that shares out heads with others."""
        less = self.layer(tokens, attended) - self.kept * tokens - self.kv * later
        if self.exchanged:
            less = less - by_heads * ((self.exchanged - self.kv) * tokens + self.kv * (attended - later))
        return (less + abs(less)) // 2  # at least 0

    def computing(self, tokens: Amount, travelling: Amount, *, by_heads: Amount | int = 0) -> Amount:
        """Bytes more of the one microbatch that computes, beside which the keys and values of at most `travelling`
        tokens are in buffers at a time. Latents are expanded where they are attended to: to all heads, or, on a rank
        that shares out heads with others (`by_heads`: 1), to its share, as much as its own tokens to all heads."""
        found = self.working * tokens + self.buffers * travelling
        if self.expanded:
            found = found + self.expanded * (travelling + by_heads * (tokens - travelling))
        return found


def layer_bytes(model: ModelProfile, layer: LayerProfile | None = None, *, bytes_per_element: int) -> LayerBytes:
    """`LayerBytes` of a layer of `model`, the first one if absent."""
    e, layer = bytes_per_element, layer or model.every_layer[0]
    routed = layer.experts_per_token * layer.hidden_size if layer.has_experts else 0
    kv, gradients = e * layer.moved_elements, max(e, FP32_BYTES) * layer.moved_elements
    expanded = sum(mixer.expanded_elements for mixer in layer.mixers)
    kept = sum(e * each.kept_elements + FP32_BYTES * each.kept_statistics for each in layer.mixers)
    computing = FP32_BYTES * sum(mixer.working_elements for mixer in layer.mixers)
    lent = e * sum(mixer.lent_elements for mixer in layer.mixers)
    inputs = _norm_bytes(model, bytes_per_element=e) * layer.input_size
    between = _residual_bytes(model, bytes_per_element=e) * layer.hidden_size
    return LayerBytes(
        whole=layer_token_bytes(model, layer, bytes_per_element=e) + inputs,
        kept=between + e * layer.input_size + model.keeps_attention * kept + lent + inputs,
        exchanged=(model.keeps_attention and layer.attention is not None) * e * layer.exchanged_elements,
        kv=kv,
        kv_gradients=gradients,
        head=_norm_bytes(model, bytes_per_element=e) * layer.hidden_size,
        working=e * (2 * layer.active_ffn_size + routed) + computing,
        buffers=2 * (kv + gradients),
        expanded=2 * e * expanded,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersBytes:
    """Layers of several stages by what they keep: layer i of stage p is of `shapes[stages[p][i]]`. Where layers differ,
    amounts that stand for any layer of any stage are those of the one that has most, or frees least: of a pipeline each
    of whose passes recomputes another number of layers, that is a bound."""

    shapes: tuple[LayerBytes, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: ModelProfile, *, layers_of_stage: Sequence[int], bytes_per_element: int) -> "LayersBytes":
        """Those of `model`."""
        stages = model.layers_of(layers_of_stage)
        found = {each: layer_bytes(model, each, bytes_per_element=bytes_per_element) for own in stages for each in own}
        shapes = tuple(dict.fromkeys(found.values()))
        numbers = {each: shapes.index(size) for each, size in found.items()}
        return cls(shapes=shapes, stages=tuple(tuple(numbers[each] for each in own) for own in stages))

    def of_stage(self, stage: int) -> tuple[LayerBytes, ...]:
        """Each layer of a stage."""
        return tuple(self.shapes[number] for number in self.stages[stage])

    @property
    def head(self) -> int:
        """As of `LayerBytes`."""
        return self.shapes[0].head

    @property
    def kv_gradients(self) -> int:
        """Most of any stage in the mean over its layers, rounded up."""
        sums = [(sum(each.kv_gradients for each in self.of_stage(p)), len(own)) for p, own in enumerate(self.stages)]
        return max(-(-total // count) for total, count in sums)

    def most(self, name: str) -> int:
        """The largest value of a field of `LayerBytes`."""
        return max(int(getattr(each, name)) for each in self.shapes)

    def layers(self, tokens: Amount, attended: Amount) -> list[Amount]:
        """`LayerBytes.layer` of all layers together, by stage."""
        each = [shape.layer(tokens, attended) for shape in self.shapes]
        counts = [[own.count(number) for number in range(len(each))] for own in self.stages]
        return [_total(each, own) for own in counts]

    def largest(self, tokens: Amount, attended: Amount) -> Amount:
        """`LayerBytes.layer` of the layer that has most."""
        return _most([shape.layer(tokens, attended) for shape in self.shapes])

    def freed(self, tokens: Amount, attended: Amount, *, later: Amount, by_heads: Amount | int = 0) -> Amount:
        """`LayerBytes.freed` of the layer that frees least."""
        found = [shape.freed(tokens, attended, later=later, by_heads=by_heads) for shape in self.shapes]
        return -_most([-each for each in found])

    def computing(self, tokens: Amount, travelling: Amount, *, by_heads: Amount | int = 0) -> Amount:
        """`LayerBytes.computing` of the layer that has most."""
        return _most([shape.computing(tokens, travelling, by_heads=by_heads) for shape in self.shapes])


def _total(amounts: Sequence[Amount], counts: Sequence[int]) -> Amount:
    total = counts[0] * amounts[0]
    for amount, count in zip(amounts[1:], counts[1:], strict=True):
        total = total + count * amount
    return total


def _most(amounts: Sequence[Amount]) -> Amount:
    most = amounts[0]
    for amount in amounts[1:]:
        most = (most + amount + abs(most - amount)) // 2  # the larger of both
    return most


def token_bytes(
    model: ModelProfile, *, recomputed_layers: int, bytes_per_element: int, by_heads: bool = False, degree: int = 1
) -> int:
    """Bytes per token (M_token of Eq. 7): saved activations and one layer's working set. `by_heads`: on a rank that
    shares out heads with others, `degree` of them together: where these are a times as many as key and value heads, a
    rank has the keys and values of a times its tokens.

    A recomputed layer keeps its input (and its attention, `LayerBytes.kept`). While it is computed again one layer is
    whole, which adds to the peak only if all are recomputed: others, the last ones, are freed before; where layers
    differ, the largest of them counts if those not recomputed are smaller. The working set holds the gradients of the
    MLP's two inner activations and the ring's buffers. The last norm counts only if it is larger, for it is freed
    before layers compute their backward passes. Any token of a VLM may have features.
    """
    stages = LayersBytes.of(model, layers_of_stage=(model.num_layers,), bytes_per_element=bytes_per_element)
    every = stages.of_stage(0)
    attended = max(degree // model.num_kv_heads, 1) if by_heads else 1
    freed = [each.freed(1, attended, later=0, by_heads=by_heads) for each in every[:recomputed_layers]]
    whole = [each.layer(1, attended) for each in every]
    rest = whole[recomputed_layers:]
    more = max(max(freed if rest else whole, default=0) - sum(rest), 0)
    features = model.vision.num_mergers * bytes_per_element * model.hidden_size if model.vision else 0
    working = max(each.computing(1, attended, by_heads=by_heads) for each in every)
    return sum(whole) - sum(freed) + max(more + working, stages.head) + features


def kv_growth(model: ModelProfile, *, recomputed_layers: int, bytes_per_element: int) -> float:
    """Return by what part of `token_bytes` a token of a rank grows with each time that its keys and values are
    replicated, in groups that share out heads over more ranks than there are key and value heads."""
    sizes = {"recomputed_layers": recomputed_layers, "bytes_per_element": bytes_per_element}
    times = model.num_heads // model.num_kv_heads
    if times <= 1:
        return 0.0
    most = token_bytes(model, by_heads=True, degree=model.num_heads, **sizes)
    return (most / token_bytes(model, by_heads=True, **sizes) - 1) / (times - 1)


def largest_degree(model: ModelProfile, num_ranks: int) -> int:
    """Return the largest group of at most `num_ranks` ranks that can share out the model's heads."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    sizes = (each for each in range(min(num_ranks, heads), 1, -1) if heads % each == 0)
    return next((each for each in sizes if kv_heads % each == 0 or each % kv_heads == 0), 1)


def patch_bytes(model: ModelProfile, *, bytes_per_element: int) -> tuple[int, int]:
    """Bytes per patch that `model.vision`, h wide, e bytes per element, keeps from Encode to Backward, and needs beside
    while it computes.

    A layer saves inputs and outputs of two norms, 4 e h; queries, keys, values, the first two also after rotation, and
    outputs, 6 e h, and fp32 logsumexp, 4 H; of the MLP two inner activations, four where it is gated. A merger saves
    its normed input, two inner activations and its rows. A frozen encoder keeps only its rows and computes one layer.
    """
    assert model.vision is not None, "the model is a VLM"
    vision, e = model.vision, bytes_per_element
    layer = e * 10 * vision.hidden_size + FP32_BYTES * vision.num_heads
    layer += (4 if vision.gated else 2) * e * vision.ffn_size
    rows = vision.num_mergers * e * model.hidden_size // vision.merged_patches
    if vision.frozen:
        return rows, layer
    mergers = vision.num_mergers * e * (2 * vision.hidden_size + 2 * vision.merger_size // vision.merged_patches)
    return vision.num_layers * layer + mergers + rows, layer


def layer_token_bytes(model: ModelProfile, layer: LayerProfile, *, bytes_per_element: int) -> int:
    """Bytes that one layer saves for backward per token, flash attention and gated MLP, e bytes an element.

    Two norms, one before what mixes tokens and one before the MLP: input in fp32, normalised input, output:
    2 (4 + 2e) h; `extra_norms` as much each. Attention: query, output, keys and values, fp32 logsumexp:
    e (2 H + 2 H_kv) D + 4 H; norms of heads, of queries and keys, their input in fp32 and normalised:
    (4 + e) (H + H_kv) D. Other mixers say what they save (`MixerProfile.saved_elements`). MLP: gate, up, activated
    gate, product: 4 e F, and without a gate 2 e F. With experts F is the sum over those of a token, and each of these
    keeps its input and its output beside, the router fp32 shares of all E. Beside adapters norms are frozen, and
    normalised inputs are not kept; adapters keep what `AdapterProfile` says.

    A compiled layer saves inputs and outputs of matrix products, and computes what lies between again: norms keep
    their input in e bytes and their output, 2 (2e) h, those of heads their input alone, e (H + H_kv) D, and the MLP no
    activated gate, 3 e F. With experts norms alone are compiled, those of heads are not. Beside adapters layers are
    counted as if they were not compiled.
    """
    e, trained, fused = bytes_per_element, model.adapter is None, _is_fused(model)
    whole = fused and not layer.has_experts
    has_mlp = layer.active_ffn_size > 0
    num_norms = (bool(layer.mixers) + has_mlp or 1) + layer.extra_norms
    norms = num_norms * _norm_bytes(model, bytes_per_element=e) * layer.hidden_size
    normed = e if whole else FP32_BYTES + trained * e
    mixers = sum(
        e * mixer.saved_elements + FP32_BYTES * mixer.saved_statistics + normed * mixer.normed_elements
        for mixer in layer.mixers
    )
    gated = layer.mlp_matrices > 2
    mlp = ((3 if whole else 4) if gated else 2) * e * layer.active_ffn_size
    if layer.has_experts:
        mlp += 2 * e * layer.experts_per_token * layer.hidden_size + FP32_BYTES * layer.num_experts
    return norms + mixers + mlp + (e * model.adapter.token_elements if model.adapter else 0)


def _norm_bytes(model: ModelProfile, *, bytes_per_element: int) -> int:
    """Bytes per element that a norm between layers keeps, see `layer_token_bytes`."""
    if _is_fused(model):
        return 2 * bytes_per_element
    return FP32_BYTES + (1 + (model.adapter is None)) * bytes_per_element


def _residual_bytes(model: ModelProfile, *, bytes_per_element: int) -> int:
    return max(bytes_per_element, FP32_BYTES) if model.fp32_residual else bytes_per_element


def _is_fused(model: ModelProfile) -> bool:
    return model.compiled and model.adapter is None
