"""Which devices were slow: the slowest ones as bars, and how busy each was over the steps."""

from collections.abc import Sequence
from html import escape

from rayfcp.telemetry.charts import key_mark
from rayfcp.telemetry.rank_times import RankTimes, Stretch
from rayfcp.telemetry.scales import runs_of
from rayfcp.telemetry.summary import seconds

WIDTH, LEFT, RIGHT, HEIGHT = 560, 84, 140, 224
MAX_BARS, MAX_ROWS, MAX_COLUMNS = 8, 24, 80
MOST_PITCH, LEAST_CELL, FOOT = 40.0, 12.0, 28


def rank_charts(times: RankTimes) -> str:
    """Two figures; nothing where no device told how busy it was, as where hosts do not wait for their accelerators."""
    whole = _whole(times.stretches)
    means = {number: whole.busy_s[number] / whole.count[number] for number in whole.busy_s}
    if not means:
        return ""
    order = sorted(means, key=lambda number: (-means[number], number))
    return _slowest(means, order=order) + _heat(times.stretches, rows=sorted(order[:MAX_ROWS]), all_ranks=len(order))


def _slowest(means: dict[int, float], *, order: Sequence[int]) -> str:
    shown, most_s = order[:MAX_BARS], means[order[0]] or 1.0
    mean_s = sum(means.values()) / len(means)
    pitch = min(MOST_PITCH, HEIGHT / len(shown))
    height, bar = len(shown) * pitch, pitch * 0.6
    room = WIDTH - LEFT - RIGHT
    rows = []
    for index, number in enumerate(shown):
        top, width = index * pitch + pitch * 0.2, room * means[number] / most_s
        more = means[number] / mean_s - 1 if mean_s > 0 else 0.0
        told = f"{seconds(means[number])}, {_signed(more)}"
        rows.append(
            f'<text class="tick" x="{LEFT - 8}" y="{top + bar / 2 + 4:.1f}" text-anchor="end">device {number}</text>'
            f'<rect class="fill1" x="{LEFT}" y="{top:.1f}" width="{max(width, 0.5):.2f}" height="{bar:.1f}" rx="2"/>'
            f'<text class="tick strong" x="{WIDTH - RIGHT + 10}" y="{top + bar / 2 + 4:.1f}">{escape(told)}</text>'
        )
    x = LEFT + room * mean_s / most_s
    rows.append(f'<line class="level" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height:.1f}"/>')
    title, note = "Slowest devices", f"Busy seconds a step, waiting left out; dashed: mean of all {len(means)}"
    return _figure(title, note, body="".join(rows), height=height)


def _heat(stretches: Sequence[Stretch], *, rows: Sequence[int], all_ranks: int) -> str:
    columns = [_whole(run) for run in runs_of(list(stretches), limit=MAX_COLUMNS)]
    pitch = (WIDTH - LEFT - 12) / len(columns)
    cell = min(MOST_PITCH, max(LEAST_CELL, (HEIGHT - FOOT) / len(rows)))
    parts = []
    for at, number in enumerate(rows):
        middle = (at + 0.5) * cell + 3.5
        label = f'<text class="tick" x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">device {number}</text>'
        parts.append(label if cell >= 14 or at % 2 == 0 else "")
        for index, column in enumerate(columns):
            own_s = column.mean_s(number)
            if own_s is None:
                continue
            others = [each for each in map(column.mean_s, column.busy_s) if each is not None]
            mean_s = sum(others) / len(others)
            more = own_s / mean_s - 1 if mean_s > 0 else 0.0
            tip = f"device {number}, {_steps(column)}: {seconds(own_s)}, {_signed(more)} of the mean"
            parts.append(
                f'<rect class="heat{_shade(more)}" x="{LEFT + index * pitch:.2f}" y="{at * cell:.1f}" '
                f'width="{max(pitch - 0.6, 0.4):.2f}" height="{cell - 1.5:.1f}"><title>{escape(tip)}</title></rect>'
            )
    height = len(rows) * cell + FOOT
    ends = ((columns[0].first_step, LEFT, "start"), (columns[-1].last_step, WIDTH - 12, "end"))
    parts += [
        f'<text class="tick" x="{x}" y="{height - 10}" text-anchor="{anchor}">step {step}</text>'
        for step, x, anchor in ends[: 2 if len(columns) > 1 else 1]
    ]
    of = f"the {len(rows)} slowest of {all_ranks} devices" if len(rows) < all_ranks else "every device"
    return _figure(
        "Busy time, device by device", f"Over the mean of its steps; {of}", body="".join(parts), height=height
    )


SHADES = ((-0.15, 1), (-0.05, 2), (0.05, 3), (0.15, 4), (0.4, 5))


def _shade(more: float) -> int:
    """1, far faster than the mean, to 6, far slower."""
    return next((shade for bound, shade in SHADES if more < bound), 6)


def _signed(more: float) -> str:
    return f"{'+' if more >= 0 else '−'}{abs(more):.1%}".replace("%", " %")


def _steps(stretch: Stretch) -> str:
    first, last = stretch.first_step, stretch.last_step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _whole(stretches: Sequence[Stretch]) -> Stretch:
    whole = Stretch(first_step=stretches[0].first_step if stretches else 0, last_step=0)
    for stretch in stretches:
        whole.add(stretch)
    return whole


def _figure(title: str, note: str, *, body: str, height: float) -> str:
    keys = ""
    if "heat" in body:
        words = ("15 % faster", "5 %", "even", "15 %", "40 %", "more")
        entries = "".join(f"<li>{key_mark(f'heat{at}')}{word}</li>" for at, word in enumerate(words, start=1))
        keys = f'<ul class="legend">{entries}</ul>'
    title, note = escape(title), escape(note)
    return (
        f'<figure class="top"><figcaption><h3>{title}</h3><p>{note}</p></figcaption>{keys}'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{title}: {note}">'
        f"{body}</svg></figure>"
    )
