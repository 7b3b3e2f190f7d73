"""Choice of compiled layers by `train.compile`, before a run starts: a compiled layer is compared with the same layer
as it is, since the compiler may be missing, fail, or generate wrong code.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.models import Config
from rayfcp.cost.fit import PassShape
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.losses.base import Targets
from rayfcp.models.build import DTYPES, WITHOUT_ADAPTERS, Initializer, compile_parts, empty_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import configured_model
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import text_of
from rayfcp.models.selfcheck import additive_loss, lone_context
from rayfcp.models.stages import Stage
from rayfcp.values.layers import count_kinds

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Norm of a difference, relative to that of the tensor, which is always allowed."""

_NOISE_FACTOR = 4.0
"""Times the effect of one rounding of the layer's input: sums that cancel and choices of experts amplify roundings."""

_LENGTHS = (150, 43)


def runs_compiled(
    config: Config, *, vocab_size: int, device: torch.device, kernel: AttentionKernel, backend: str = "inductor"
) -> bool:
    """Return whether the layers of a run are to be compiled on `device`; checks first that they can be.

    Devices decide alone: attention and the gathers of parameters stay outside of what is compiled, so that compiled
    layers and others exchange the same messages in the same order, and differ by roundings.

    Raises:
        ConfigError: `train.compile` is true, and the compiler fails or its code differs.
    """
    if not config.compiles_layers(by_default=backend_of(device).info.compiles):
        return False
    library = configured_model(config, vocab_size=vocab_size)
    lora = config.model.lora
    fault = fault_of_compiled(
        library, dtype=config.model.dtype, device=device, kernel=kernel, backend=backend, lora=lora
    )
    if fault is None:
        return True
    if config.train.compile == "auto":
        logger.warning("layers are not compiled: %s; set train.compile=false to silence this", fault)
        return False
    raise ConfigError(f"train.compile is true, must be false here: {fault}; set train.compile=false")


def fault_of_compiled(
    config: PreTrainedConfig,
    *,
    dtype: str,
    device: torch.device,
    kernel: AttentionKernel,
    backend: str,
    lora: LoraConfig = WITHOUT_ADAPTERS,
) -> str | None:
    """Describe why a layer of the model's sizes cannot run compiled; None if output and gradients agree.

    The layer has random weights and is not sharded. Nothing of the global random state is used.
    """
    model = _one_layer(config, dtype=dtype, device=device, lora=lora)
    name = f"layer {model.stage.start}"
    want = _results(model, config, kernel=kernel)
    close = _results(model, config, kernel=kernel, noise=torch.finfo(DTYPES[dtype]).eps)
    try:
        compile_parts(model, backend=backend)
        found = _results(model, config, kernel=kernel)
    except Exception as error:  # whatever a compiler raises, and the libraries and tools that it calls
        return f"{name} cannot be compiled, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        torch.compiler.reset()  # the run's own layers are sharded: what is compiled for this one does not fit them
        backend_of(device).release_cached_memory()
    faults: list[tuple[float, str]] = []
    for what, own in want.items():
        norm, noise, by = (_norm(each) for each in (own, close[what] - own, found[what] - own))
        limit = TOLERANCE[DTYPES[dtype]] * norm + _NOISE_FACTOR * noise
        if not by <= limit:  # nor if it is not a number
            share, most = (each / (norm or 1.0) for each in (by, limit))
            faults.append((share, f"{what} differs by {share:.2g} of its norm, by more than {most:.2g}"))
    return f"of {name} compiled, the {max(faults)[1]}" if faults else None


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))


@torch.no_grad()
def _one_layer(config: PreTrainedConfig, *, dtype: str, device: torch.device, lora: LoraConfig) -> CausalLM:
    """A stage of one layer, in the dtype of the run's computations; between others if the model has three."""
    total = text_of(config).num_hidden_layers
    start = min(1, total - 1)
    model = empty_model(config, dtype=dtype, stage=Stage(start=start, stop=start + 1, num_layers=total), lora=lora)
    initializer = Initializer(model, seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    model.to_empty(device=device)
    model.tie()
    initializer.fill(model, names=())
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        is_matrix = parameter.ndim > 1
        mean, deviation = (0.0, parameter.shape[-1] ** -0.5) if is_matrix else (1.0, 0.1)
        parameter.normal_(mean, deviation, generator=generator)
    return model


def _results(
    model: CausalLM, config: PreTrainedConfig, *, kernel: AttentionKernel, noise: float = 0.0
) -> dict[str, Tensor]:
    """Output, and gradients of input and parameters. `noise`: relative, added to the input."""
    text, parameter = text_of(config), next(model.parameters())
    generator = torch.Generator(parameter.device).manual_seed(1)
    drawn: dict[str, Any] = {"device": parameter.device, "generator": generator}
    num_tokens = sum(_LENGTHS)
    tokens = torch.randint(0, text.vocab_size, (num_tokens,), **drawn)
    hidden = torch.randn(num_tokens, text.hidden_size, dtype=parameter.dtype, **drawn)
    hidden = torch.addcmul(hidden, hidden, torch.randn(hidden.shape, dtype=hidden.dtype, **drawn), value=noise)
    hidden.requires_grad_()
    positions = torch.cat([torch.arange(length, device=parameter.device) for length in _LENGTHS])
    shape = PassShape(degree=1, lengths=_LENGTHS, layer_kinds=count_kinds(kinds_of_layers(text)))
    context = lone_context(shape, kernel=kernel)
    out = model(
        tokens if model.stage.is_first else hidden, positions, Targets.of(tokens, loss=additive_loss(config)), context
    )
    model.zero_grad()  # to None: what was returned before stays
    out.backward(torch.randn(out.shape, dtype=out.dtype, **drawn))
    gradients = {f"gradient of {name.removeprefix('model.')}": each.grad for name, each in model.named_parameters()}
    found = {"output": out.detach(), "gradient of the input": hidden.grad, **gradients}
    return {what: each for what, each in found.items() if each is not None}
