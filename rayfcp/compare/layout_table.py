"""All layouts that were looked at: a row each, a column for each strategy."""

from collections.abc import Sequence
from html import escape

from rayfcp.compare.advice import Advice
from rayfcp.compare.advice_words import known_s, recommendation
from rayfcp.compare.layouts import Layout
from rayfcp.compare.names import OURS
from rayfcp.compare.trials import Trial
from rayfcp.telemetry.summary import seconds

MARKS = {"simulated": "", "predicted": "~", "bounded": "≥"}
KEY = (
    "seconds an iteration; ~ predicted for the first batch only; ≥ lower bound of what was left out; - no plan; "
    "strategies that were not asked for are those of other systems"
)


def format_layouts(advice: Advice) -> str:
    """The recommendation, the table, and below it why there are gaps; without a newline at the end."""
    heads = ["stages", "tensor", "ranks", *columns(advice)]
    rows = [
        [str(each.num_stages), str(each.tensor_parallel), str(_ranks(advice, each)), *_texts(advice, each)]
        for each in advice.layouts
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]
    gaps = [f"  {layout}: {why}" for layout, why in _gaps(advice)]
    return "\n".join([*recommendation(advice), "", *lines, KEY, *(["left out:", *gaps] if gaps else [])])


def layout_section(advice: Advice) -> str:
    """The same for a page."""
    first, *others = recommendation(advice)
    names = columns(advice)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("layout", "ranks", *names))
    rows = []
    for layout in advice.layouts:
        cells = "".join(_cell(advice, _trial(advice, name, layout)) for name in names)
        rows.append(f"<tr><td>{layout}</td><td>{_ranks(advice, layout)}</td>{cells}</tr>")
    gaps = "".join(f"<li><b>{layout}</b>: {escape(why)}</li>" for layout, why in _gaps(advice))
    told = "".join(f"<p>{escape(line)}</p>" for line in others)
    return (
        f'<h2>Layout</h2><p class="lead">{escape(first)}</p>{told}'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">{escape(KEY[:1].upper() + KEY[1:])}. Point at a figure for its reason.</p>'
        + (f'<ul class="refused">{gaps}</ul>' if gaps else "")
    )


def columns(advice: Advice) -> list[str]:
    """Strategies in the order of the search; those that only rivals are searched for come last."""
    return list(dict.fromkeys(trial.strategy for trial in advice.trials))


def _ranks(advice: Advice, layout: Layout) -> int:
    return advice.question.inputs.devices // layout.devices_per_rank


def _trial(advice: Advice, name: str, layout: Layout) -> Trial | None:
    """As rayfcp runs it, else as the rival does."""
    found = [each for each in advice.trials if each.strategy == name and each.layout == layout]
    return min(found, key=lambda each: each.split_vocabulary, default=None)


def _texts(advice: Advice, layout: Layout) -> list[str]:
    return [_text(_trial(advice, name, layout)) for name in columns(advice)]


def _text(trial: Trial | None) -> str:
    if trial is None or trial.status == "infeasible":
        return "-"
    return f"{MARKS[trial.status]}{seconds(known_s(trial))}"


def _cell(advice: Advice, trial: Trial | None) -> str:
    if trial is None:
        return "<td>-</td>"
    why = trial.reason or (trial.entry.reason if trial.entry else "")
    text = escape(_text(trial))
    strong = f"<b>{text}</b>" if trial is advice.best else text
    mark = ' class="ours"' if trial.strategy in OURS else ""
    return f'<td{mark} title="{escape(why)}">{strong}</td>'


def _gaps(advice: Advice) -> Sequence[tuple[Layout, str]]:
    """Layouts on which nothing that was asked for has a plan, and why."""
    asked = {entry.strategy for entry in advice.comparison.entries}
    own = [each for each in advice.trials if each.strategy in asked and not each.split_vocabulary]
    found = list(advice.misfits.items())
    for layout in advice.layouts:
        trials = [each for each in own if each.layout == layout]
        if trials and all(each.status == "infeasible" for each in trials):
            found.append((layout, trials[0].reason))
    return sorted(found)
