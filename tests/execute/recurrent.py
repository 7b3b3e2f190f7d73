"""Recurrent layers on programs of ranks, against the recurrence of whole sequences, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.slots import ContextStore
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import AttentionStats, Fabric, Transport
from rayfcp.execute.recurrence.convolution import causal_convolution
from rayfcp.execute.recurrence.function import linear_recurrence
from rayfcp.models.attention_hook import KEYWORD, Carried, follow_context
from rayfcp.program import Backward, Forward, Free, Load, Piece, RankProgram, lower
from rayfcp.values import BatchPlan, RecurrentKind, SequenceSpec
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport

DK, DV = 4, 3
SCALE = 0.6

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A kind of recurrence: `key_heads` of `heads`; a decay for each of dk (`is_diagonal`), the same at each token
    (`is_constant`); a delta rule."""

    heads: int
    key_heads: int
    is_diagonal: bool = False
    is_constant: bool = False
    is_delta: bool = False

    def inputs(self, num_tokens: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensors:
        """Those of a sequence, `[tokens, ...]`; "x" are inputs of the convolutions."""

        def drawn(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=generator, dtype=dtype)

        gates = (self.heads, DK) if self.is_diagonal else (self.heads,)
        decay = -F.softplus(2 * drawn(*gates) - 2)
        found = {
            "query": drawn(self.key_heads, DK),
            "key": F.normalize(drawn(self.key_heads, DK), dim=-1),
            "value": drawn(self.heads, DV),
            "log_decay": -torch.linspace(0.01, 1, self.heads, dtype=dtype).expand(num_tokens, -1)
            if self.is_constant
            else decay,
            "x": drawn(self.heads * DV),
        }
        return found | ({"beta": torch.sigmoid(drawn(self.heads))} if self.is_delta else {})


RULES = {
    "gated delta rule": Rule(heads=4, key_heads=2, is_delta=True),
    "kda": Rule(heads=2, key_heads=2, is_diagonal=True, is_delta=True),
    "mamba-2": Rule(heads=6, key_heads=2),
    "gla": Rule(heads=2, key_heads=2, is_diagonal=True),
    "lightning": Rule(heads=2, key_heads=2, is_constant=True),
}


def parameters(rule: Rule, *, width: int) -> Tensors:
    """Of two convolutions."""
    generator, channels = torch.Generator().manual_seed(7), rule.heads * DV
    shapes = {"weight": (channels, width), "bias": (channels,), "other": (channels, width)}
    return {name: torch.randn(*of, generator=generator, dtype=torch.float64) for name, of in shapes.items()}


def stepwise(rule: Rule, given: Tensors) -> Tensor:
    """The recurrence of one sequence, token by token, `[tokens, heads, dv]`."""
    state, outs = torch.zeros(rule.heads, DK, DV, dtype=given["value"].dtype), []
    query, key = (given[name].repeat_interleave(rule.heads // rule.key_heads, dim=1) for name in ("query", "key"))
    for at, value in enumerate(given["value"]):
        state = given["log_decay"][at].exp().reshape(rule.heads, -1, 1) * state
        written = value
        if rule.is_delta:
            written = given["beta"][at].unsqueeze(-1) * (value - torch.einsum("hkv,hk->hv", state, key[at]))
        state = state + torch.einsum("hk,hv->hkv", key[at], written)
        outs.append(SCALE * torch.einsum("hkv,hk->hv", state, query[at]))
    return torch.stack(outs)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None) -> Tensor:
    """A causal convolution of one sequence, by the library's operator."""
    padded = F.pad(x.T.unsqueeze(0), (weight.shape[1] - 1, 0))
    out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight)).squeeze(0).T
    return F.silu(out) if activation else out


def whole(rule: Rule, given: Tensors, *, of: Tensors) -> Tensor:
    """What `Mixer` makes of a whole sequence."""
    value = given["value"] + convolved(given["x"], of["weight"], of["bias"], activation="silu").view_as(given["value"])
    out = stepwise(rule, given | {"value": value})
    return out + convolved(given["x"], of["other"], None, activation=None).view_as(out)


class Mixer(nn.Module):
    """A recurrence whose values have been through a convolution, and another convolution beside it."""

    def __init__(self, rule: Rule, kind: RecurrentKind) -> None:
        super().__init__()
        self._rule, self._kind = rule, kind
        for name, each in parameters(rule, width=kind.halo + 1).items():
            self.register_parameter(name, nn.Parameter(each))

    def forward(self, *tensors: Tensor, names: Sequence[str], **keywords: Carried) -> Tensor:
        given, options = dict(zip(names, tensors, strict=True)), {"context": keywords[KEYWORD].context}
        options["kind"] = self._kind
        x = given.pop("x")
        first = causal_convolution(x, self.weight, self.bias, activation="silu", **options)
        given["value"] = given["value"] + first.view_as(given["value"])
        out = linear_recurrence(**given, scale=SCALE, **options)
        return out + causal_convolution(x, self.other, None, activation=None, **options).view_as(out)


@dataclass(kw_only=True)
class Found:
    """By layer and sequence: "out" and gradients by name, not a number where nothing was found. `parameters`: gradients
    by layer, rank and name. `sent`: bytes by rank. `left`: what stores still keep."""

    tensors: list[dict[int, Tensors]]
    parameters: list[list[Tensors]]
    sent: list[int]
    left: list[int] = field(default_factory=list)

    def merge(self, other: "Found", *, rank: int) -> None:
        """Take what another process found on its rank."""
        for own, its in zip(self.tensors, other.tensors, strict=True):
            for sequence, found in its.items():
                for name, source in found.items():
                    own[sequence][name] = torch.where(source.isnan(), own[sequence][name], source)
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            mine[rank] = theirs[rank]
        self.left += other.left


class OneRank:
    """Runs the layers of a program one beside the other, all on the same tensors; the first `recomputed` of them are
    recomputed, and keep their results if the program says so."""

    def __init__(
        self, program: RankProgram, transport: Transport, *, rule: Rule, kind: RecurrentKind, layers: int = 2
    ) -> None:
        self._program, self._transport, self._store = program, transport, ContextStore()
        self._layers = [Mixer(rule, kind) for _ in range(layers)]
        follow_context(dict(enumerate(self._layers)), kinds=[kind] * layers)
        self._running: dict[int, list[tuple[Tensor, Tensors]]] = {}
        self._loads: dict[int, tuple[Piece, ...]] = {}
        self._rule, self.stats = rule, AttentionStats()

    def run(self, given: dict[int, Tensors], grads: dict[int, Tensor], *, found: Found) -> None:
        for item in self._program.instructions:
            if isinstance(item, Load):
                self._loads[item.microbatch] = item.pieces
            elif isinstance(item, Forward):
                self._running[item.microbatch] = self._forward(item, given)
            elif isinstance(item, Backward):
                self._backward(item.microbatch, grads, found=found)
            elif isinstance(item, Free):
                self._store.free(item.microbatch)
        rank = self._program.rank
        for number, layer in enumerate(self._layers):
            found.parameters[number][rank] = {name: each.grad for name, each in layer.named_parameters()}
        found.sent[rank] = self.stats.bytes_sent
        found.left.append(len(self._store))

    def _own(self, microbatch: int, of: dict[int, Tensor], *, padding: Tensor) -> Tensor:
        rows = [of[each.sequence][each.start : each.stop] for each in self._loads[microbatch]]
        return torch.cat(rows) if rows else padding

    def _forward(self, item: Forward, given: dict[int, Tensors]) -> list[tuple[Tensor, Tensors]]:
        padding = self._rule.inputs(1, generator=torch.Generator().manual_seed(0))
        context = AttentionContext.of(
            item, transport=self._transport, kernel=pick_kernel("cpu"), store=self._store, stats=self.stats
        )
        results = []
        for layer in self._layers:
            own = {
                name: self._own(
                    item.microbatch, {each: of[name] for each, of in given.items()}, padding=pad
                ).requires_grad_()
                for name, pad in padding.items()
            }
            out = layer(*own.values(), names=tuple(own), **{KEYWORD: Carried(context)})
            results.append((out, own))
        return results

    def _backward(self, microbatch: int, grads: dict[int, Tensor], *, found: Found) -> None:
        for number, (out, own) in reversed(list(enumerate(self._running.pop(microbatch)))):
            out.backward(self._own(microbatch, grads, padding=torch.zeros_like(out)))
            at = 0
            for each in self._loads[microbatch]:
                rows, to = slice(at, at + each.num_tokens), slice(each.start, each.stop)
                whole = found.tensors[number][each.sequence]
                whole["out"][to] = out.detach()[rows]
                for name, tensor in own.items():
                    whole[name][to] = tensor.grad[rows]
                at += each.num_tokens


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tensors of sequences, and gradients of their outputs."""

    rule: Rule
    given: dict[int, Tensors]
    grads: dict[int, Tensor]

    @classmethod
    def of(cls, rule: Rule, sequences: Sequence[SequenceSpec]) -> "Batch":
        generator = torch.Generator().manual_seed(3)
        given = {each.id: rule.inputs(each.num_tokens, generator=generator) for each in sequences}
        grads = {
            each: torch.randn(of["value"].shape, generator=generator, dtype=torch.float64) for each, of in given.items()
        }
        return cls(rule=rule, given=given, grads=grads)

    def nothing(self, *, layers: int, num_ranks: int) -> Found:
        missing = [
            {
                at: {name: torch.full_like(each, torch.nan) for name, each in {**of, "out": self.grads[at]}.items()}
                for at, of in self.given.items()
            }
            for _ in range(layers)
        ]
        parameters: list[list[Tensors]] = [[{} for _ in range(num_ranks)] for _ in range(layers)]
        return Found(tensors=missing, parameters=parameters, sent=[0] * num_ranks)


def with_kind(sequences: Sequence[SequenceSpec], kind: RecurrentKind) -> list[SequenceSpec]:
    return [replace(each, layer_kinds=((kind, 2),)) for each in sequences]


def on_threads(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, rule: Rule, kind: RecurrentKind
) -> tuple[Batch, Found]:
    """Two layers of a plan on ranks that are threads."""
    programs, fabric = lower(plan, with_kind(sequences, kind)), Fabric(plan.num_ranks)
    batch = Batch.of(rule, sequences)
    found = batch.nothing(layers=2, num_ranks=plan.num_ranks)

    def work(rank: int) -> None:
        runner = OneRank(programs[rank], InProcessTransport(fabric, rank), rule=rule, kind=kind)
        runner.run(batch.given, batch.grads, found=found)

    run_ranks(work, num_ranks=plan.num_ranks, fabric=fabric)
    return batch, found


def assert_same(batch: Batch, found: Found, *, width: int, bound: float = 1e-9) -> None:
    """Outputs and every input's and parameter's gradient, each on its own, equal those of whole sequences."""
    assert batch.given
    of = {name: each.requires_grad_() for name, each in parameters(batch.rule, width=width).items()}
    for sequence, given in batch.given.items():
        leaves = {name: each.detach().clone().requires_grad_() for name, each in given.items()}
        out = whole(batch.rule, leaves, of=of)
        out.backward(batch.grads[sequence])
        want = {"out": out.detach(), **{name: each.grad for name, each in leaves.items()}}
        for layer, tensors in enumerate(found.tensors):
            for name, right in want.items():
                what = f"layer {layer}, sequence {sequence}, {name}"
                _assert_near(tensors[sequence][name], right, bound=bound, what=what)
    for layer, ranks in enumerate(found.parameters):
        for name, right in of.items():
            total = sum(each[name] for each in ranks if each[name] is not None)
            _assert_near(total, right.grad, bound=bound, what=f"layer {layer}, {name}")
    assert not any(found.left)


def _assert_near(have: Tensor, want: Tensor, *, bound: float, what: str) -> None:
    error = float((have - want).abs().max() / want.abs().max().clamp_min(1e-3))
    assert error <= bound, f"{what}: relative error {error:.1e}"
