// The last step of the run: bars over ranks, and time x rank.

const KINDS = ["load", "encode", "forward", "attention", "backward", "transfer", "reduce", "update", "wait"];

const colourOf = (kind) => {
  if (!kind.startsWith("degree ")) return KINDS.includes(kind) ? `kind-${kind}` : "kind-wait";
  return `ramp${Math.min(6, 2 + Math.round(Math.log2(Number(kind.slice(7)))))}`;
};

function pointed(shape, text) {
  shape.addEventListener("pointermove", (event) => tip.show(event, text()));
  shape.addEventListener("pointerleave", () => tip.hide());
  return shape;
}

// A bar for each device, its own work in front of the whole step.
function rankChart(workers) {
  const made = figure("Busy time", "Seconds of the last step, by rank");
  const whole = workers.map((each) => each.step_s ?? 0);
  const marks = ticks(0, Math.max(...whole, 1e-9));
  const width = 1160;
  const left = SIZE.left, right = width - SIZE.right, foot = SIZE.height - SIZE.bottom;
  const up = scale(marks[0], marks.at(-1), foot, SIZE.top);
  const pitch = (right - left) / workers.length;
  const thick = Math.min(56, pitch * 0.78);
  const across = (index) => left + pitch * (index + 0.5);
  const bar = (index, value, colour) => node("rect", { class: `${colour} on`, x: across(index) - thick / 2,
    y: up(value), width: thick, height: Math.max(0, foot - up(value)), rx: Math.min(2, thick / 4) });
  const told = (each) => [`rank ${each.rank}`, `step: ${seconds(each.step_s)}`,
    ...(each.busy_s === null ? [] : [`own work: ${seconds(each.busy_s)}`]),
    ...(each.speed === null ? [] : [`speed: ${number(each.speed)}`])].join("\n");
  const bars = workers.flatMap((each, index) => [
    pointed(bar(index, each.step_s ?? 0, "whole"), () => told(each)),
    ...(each.busy_s === null ? [] : [pointed(bar(index, each.busy_s, "own"), () => told(each))]),
  ]);
  const lines = marks.flatMap((mark) => [
    node("line", { class: "grid", x1: left, x2: right, y1: up(mark), y2: up(mark) }),
    node("text", { class: "tick", x: left - 7, y: up(mark) + 3.5, "text-anchor": "end" }, seconds(mark)),
  ]);
  const name = node("text", { class: "axis", x: (left + right) / 2, y: SIZE.height - 5, "text-anchor": "middle" }, "rank");
  const svg = node("svg", { class: "chart ranks", viewBox: `0 0 ${width} ${SIZE.height}`, role: "img",
    "aria-label": `Busy time of ${workers.length} ranks` },
    ...lines, ...bars, ...labels(workers.map((_, index) => index), across), name);
  made.append(legend([["own", "own work"], ["whole", "with waiting"]]), html("div", { class: "scroll" }, svg));
  return made;
}

// Panels of rows on one scale of time.
function timeline(picture) {
  const made = figure("Time × rank", "What the plan promised and what was measured, on one scale of time");
  const kinds = new Set(picture.panels.flatMap((panel) => panel.rows.flatMap((row) => row.bars.map((bar) => bar[2]))));
  const order = (kind) => kind.startsWith("degree ") ? Number(kind.slice(7)) - 1e6 : KINDS.indexOf(kind);
  made.append(legend([...kinds].sort((one, two) => order(one) - order(two)).map((kind) => [colourOf(kind), kind])));
  for (const panel of picture.panels) {
    made.append(html("h3", {}, panel.name), html("div", { class: "scroll" }, timelinePanel(panel, picture.duration_s)));
  }
  return made;
}

function timelinePanel(panel, duration) {
  const width = 1160, left = 104, right = width - 14, foot = 24;
  const pitch = Math.max(5, Math.min(23, 520 / panel.rows.length));
  const row = pitch * 0.8;
  const height = panel.rows.length * pitch + foot;
  const across = scale(0, duration, left, right);
  const every = Math.ceil(12 / pitch);
  const marks = ticks(0, duration, 8).filter((mark) => mark <= duration).flatMap((mark) => [
    node("line", { class: "grid", x1: across(mark), x2: across(mark), y1: 0, y2: height - foot }),
    node("text", { class: "tick", x: across(mark), y: height - 7, "text-anchor": "middle" }, seconds(mark)),
  ]);
  const rows = panel.rows.flatMap((each, index) => {
    const top = index * pitch;
    const label = index % every ? [] :
      [node("text", { class: "tick", x: left - 8, y: top + row / 2 + 4, "text-anchor": "end" }, each.name)];
    const lane = node("rect", { class: "lane", x: left, y: top, width: right - left, height: row, rx: 3 });
    const bars = each.bars.map(([start, lasts, kind, text]) => pointed(node("rect", { class: `${colourOf(kind)} on`,
      x: across(start), y: top, width: Math.max(0.6, across(start + lasts) - across(start)), height: row, rx: 1.5 }),
    () => `${each.name}: ${text || kind}\n${seconds(lasts)} from ${seconds(start)}`));
    return [...label, lane, ...bars];
  });
  return node("svg", { class: pitch > 12 ? "chart timeline roomy" : "chart timeline", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${panel.name}: ${panel.rows.length} rows over ${seconds(duration)}` }, ...marks, ...rows);
}
