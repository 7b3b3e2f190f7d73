"""The advice in words: what is recommended, what it gains, and why."""

from rayfcp.compare.advice import Advice
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.table import degrees_text
from rayfcp.compare.trials import Trial
from rayfcp.telemetry.summary import number, seconds

OTHERS = {"simulated": "takes", "predicted": "is predicted to take", "bounded": "cannot take less than"}


def recommendation(advice: Advice) -> list[str]:
    """A few lines; the first says what."""
    best = advice.best
    if best is None or best.entry is None:
        return [
            f"No recommendation: no strategy has a plan on any of {len(advice.layouts)} layouts.",
            *_refusals(advice),
        ]
    lines = [
        f"Recommended: {named(best)}: {seconds(best.iteration_s)} an iteration expected "
        f"({number(round(_tokens_per_s(advice, best)))} tokens/s), {best.entry.peak_memory_gib:.1f} of "
        f"{advice.memory_gib:.1f} GiB a device."
    ]
    for name, rival in advice.rivals.items():
        lines.append(
            f"{advice.gain(name):.2f} times as fast as {name}'s best layout: {named(rival)}, "
            f"{seconds(rival.iteration_s)}{_advantage(rival) if advice.gain(name) < 1 else ''}."
        )
    return [*lines, f"Why: {_why(advice, best)}"]


def named(trial: Trial) -> str:
    """Strategy, layout, and what is set beside."""
    assert trial.entry is not None
    entry, layout = trial.entry, trial.layout
    on = f"{trial.strategy} on {entry.num_ranks} rank{'s' if entry.num_ranks > 1 else ''} of {layout}"
    if layout.num_stages > 1:
        return f"{on}, gradients reduced each {entry.reduce_every}, parameters gathered each {entry.gather_every}"
    return f"{on}, {entry.recomputed_layers} layers recomputed, gradients reduced each {entry.reduce_every}"


def _advantage(rival: Trial) -> str:
    return " (embedding and head shared by tensor-parallel devices, on which rayfcp has them whole)" * (
        rival.split_vocabulary
    )


def _tokens_per_s(advice: Advice, best: Trial) -> float:
    batches = advice.comparison.case.batches
    return sum(lengths_of(batches)) / len(batches) / best.iteration_s


def _why(advice: Advice, best: Trial) -> str:
    """What the strategy takes on other layouts, as far as that is known, and what its plans look like."""
    assert best.entry is not None
    own = [each for each in advice.trials if each.strategy == best.strategy and not each.split_vocabulary]
    others = [each for each in own if each is not best]
    parts = []
    for status, says in OTHERS.items():
        found = [each for each in others if each.status == status]
        if found:
            nearest = min(found, key=known_s)
            parts.append(f"on {nearest.layout} it {says} {seconds(known_s(nearest))}{_beside(len(found) - 1)}")
    unfit = sum(each.status == "infeasible" for each in others) + len(advice.misfits)
    parts += [f"{unfit} layout{'s do' if unfit > 1 else ' does'} not fit"] if unfit else []
    degrees = degrees_text(best.entry.degrees or {})
    parts.append(f"its groups have degrees {degrees}, {100 * max((best.entry.gap or 1) - 1, 0):.1f} % above the bound")
    return "; ".join(parts) + "."


def known_s(trial: Trial) -> float:
    """Seconds that are simulated, predicted, or a lower bound, as the trial's status says."""
    known = {"predicted": trial.predicted_s, "bounded": trial.lower_bound_s}
    return trial.iteration_s if trial.status == "simulated" else known[trial.status] or 0.0


def _beside(count: int) -> str:
    return f", on {count} other{'s' if count > 1 else ''} more" if count else ""


def _refusals(advice: Advice) -> list[str]:
    return [f"{entry.strategy}: {entry.reason}" for entry in advice.comparison.entries]
