"use strict";

// The one chart renderer of all pages: report.html, the page of `rayfcp compare` and the live page of a run. A chart is
// plain data with a `kind`; `mount` draws it into a figure at the width that the figure has, and again whenever that
// changes. Text only ever becomes text nodes, so that nothing a run says can become markup.

const NAMES = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const node = (name, attributes = {}, ...children) => made(document.createElementNS(NAMES, name), attributes, children);
const html = (name, attributes = {}, ...children) => made(document.createElement(name), attributes, children);

// ---- Numbers

const isKnown = (value) => value !== null && value !== undefined;
const digits = (value, count) => String(Number(value.toPrecision(count)));

const number = (value) => {
  if (!isKnown(value)) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : digits(value, 4);
};
const seconds = (value) => {
  if (!isKnown(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return `${digits(value * 1e6, 3)} µs`;
  if (size !== 0 && size < 0.1) return `${digits(value * 1e3, 3)} ms`;
  return size >= 1000 ? `${number(value)} s` : `${digits(value, 3)} s`;
};
const percent = (value) => {
  if (!isKnown(value)) return "–";
  const share = value * 100;
  if (share > 0 && share < 0.01) return "under 0.01 %";
  return `${digits(Number(share.toFixed(2)), 3)} %`;
};
const FORMATS = { number, seconds, percent };

// Distance of round marks, 1, 2 or 5 times a power of ten apart, about `count` of them in `span`.
function roundStep(span, count) {
  const power = 10 ** Math.floor(Math.log10(span / count));
  return [1, 2, 5, 10].find((unit) => unit * power >= (span / count) * (1 - 1e-9)) * power;
}

// Round numbers whose ends cover low..high.
function ticks(low, high, count = 4) {
  const size = Math.max(Math.abs(low), Math.abs(high), 1e-90);
  if (!(high - low > 1e-9 * size)) high = low + (Math.abs(low) * 0.1 || 1);
  const step = roundStep(high - low, count);
  const marks = [];
  for (let at = Math.floor(low / step + 1e-9); at <= Math.ceil(high / step - 1e-9); at++) {
    marks.push(Number((at * step).toPrecision(12)));
  }
  return marks;
}

const scale = (low, high, start, stop) => (value) =>
  high > low ? start + ((value - low) / (high - low)) * (stop - start) : (start + stop) / 2;

// ---- Pointing

const tip = {
  // A head line and further lines; "name\tvalue" becomes two columns.
  show(event, [head, ...rest]) {
    const box = document.getElementById("tip");
    box.replaceChildren(html("strong", {}, head), ...rest.map((line) => {
      const [name, value] = line.split("\t");
      return html("div", {}, html("span", {}, name), ...(value === undefined ? [] : [html("b", {}, value)]));
    }));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect(), gap = 14;
    const left = event.clientX + gap + width > innerWidth ? event.clientX - gap - width : event.clientX + gap;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + gap, innerHeight - height - 4))}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

function pointed(shape, lines) {
  shape.addEventListener("pointermove", (event) => tip.show(event, lines()));
  shape.addEventListener("pointerleave", () => tip.hide());
  return shape;
}

// ---- Parts of figures

const caption = (title, note) => html("figcaption", {}, html("h3", {}, title), html("p", {}, note));

const keyMark = (colour) => node("svg", { class: "key", viewBox: "0 0 10 10", "aria-hidden": "true" },
  node("rect", { class: colour, width: 10, height: 10, rx: 2.5 }));

// Entries are [colour class, name, value]; `title` says what all of them are.
function legend(entries, title = "") {
  return html("ul", { class: "legend" }, ...(title ? [html("li", { class: "of" }, title)] : []),
    ...entries.map(([colour, name, value]) => html("li", {}, keyMark(colour), name,
      ...(value === undefined ? [] : [" ", html("b", {}, value)]))));
}

function drawing(width, height, label, ...children) {
  return node("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...children);
}

const rect = (colour, x, y, width, height) => node("rect", { class: colour, x: x.toFixed(2), y: y.toFixed(2),
  width: Math.max(width, 0).toFixed(2), height: Math.max(height, 0).toFixed(2) });
const text = (words, x, y, anchor = "middle", colour = "tick") =>
  node("text", { class: colour, x: x.toFixed(2), y: y.toFixed(2), "text-anchor": anchor }, words);
const line = (colour, x1, y1, x2, y2) => node("line", { class: colour, x1: x1.toFixed(2), y1: y1.toFixed(2),
  x2: x2.toFixed(2), y2: y2.toFixed(2) });

const FRAME = { left: 58, right: 14, top: 12, bottom: 38 };

function grid(marks, up, form, width) {
  return marks.flatMap((mark) => [line("grid", FRAME.left, up(mark), width - FRAME.right, up(mark)),
    text(form(mark), FRAME.left - 7, up(mark) + 3.5, "end")]);
}

// Labels below a horizontal axis, none nearer than `gap` to its neighbour, the last one always.
function labels(values, across, y, { gap = 34, name = String } = {}) {
  const kept = [], last = values.at(-1);
  for (const value of values) if (!kept.length || across(value) - across(kept.at(-1)) >= gap) kept.push(value);
  while (kept.length && kept.at(-1) !== last && across(last) - across(kept.at(-1)) < gap) kept.pop();
  if (kept.at(-1) !== last) kept.push(last);
  return kept.map((value) => text(name(value), across(value), y));
}

function stepLabels(steps, across, y) {
  const [first, last] = [steps[0], steps.at(-1)];
  const whole = ticks(first, last, 6).filter((mark) => mark % 1 === 0 && mark >= first && mark <= last);
  return labels([...new Set([first, ...whole, last])].sort((one, two) => one - two), across, y,
    { gap: 20 + 6 * String(last).length, name: (step) => String(Math.round(step)) });
}

// Steps at which something happened, as lines across; what happened before the first step stands at it.
function eventLines(marks, steps, across, bottom) {
  const places = new Set(marks.filter(([step]) => step <= steps.at(-1))
    .map(([step, kind]) => `${across(Math.max(step, steps[0])).toFixed(1)} ${kind}`));
  return [...places].map((place) => place.split(" "))
    .map(([x, kind]) => line(`mark-${kind}`, Number(x), FRAME.top - 4, Number(x), bottom));
}

// One step, or the steps that a point is the mean of.
const whenOf = (chart, index) => {
  const [first, last] = chart.spans ? chart.spans[index] : [chart.x[index], chart.x[index]];
  return first === last ? `step ${first}` : `steps ${first} to ${last}, mean`;
};

// A hairline at the point next to the pointer, and its values; also where a chart is drawn anew under the pointer.
function pointAlong(plot, svg, chart, { across, height, values, dots = () => [] }) {
  const cursor = node("g");
  svg.append(cursor);
  const point = (event) => {
    plot.pointer = { clientX: event.clientX, clientY: event.clientY };
    const x = event.clientX - svg.getBoundingClientRect().left;
    let near = 0;
    chart.x.forEach((step, index) => {
      if (Math.abs(across(step) - x) < Math.abs(across(chart.x[near]) - x)) near = index;
    });
    const at = across(chart.x[near]);
    cursor.replaceChildren(line("hair", at, FRAME.top, at, height - FRAME.bottom), ...dots(near, at));
    tip.show(event, [whenOf(chart, near), ...values(near)]);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => {
    plot.pointer = null;
    cursor.replaceChildren();
    tip.hide();
  });
  if (plot.pointer) point(plot.pointer);
}

// ---- Lines over steps: {x, spans?, series: [{name, values}], format, zero, stepped, dots, smooth, level, marks}

const OUTLIER = 3; // times the largest of the other values from which the first one is cut off: it pays for warming up

// The value at which the axis ends if the first point would hide all others, else null.
function clipOf(chart) {
  const first = Math.max(...chart.series.map(({ values }) => values[0] ?? 0));
  const rest = chart.series.flatMap(({ values }) => values.slice(1)).filter(isKnown);
  const most = Math.max(0, ...rest);
  return chart.zero && rest.length > 1 && most > 0 && first > OUTLIER * most ? most : null;
}

// Means over a window that grows with the series.
function smoothed(values) {
  const half = Math.max(2, Math.floor(values.length / 40));
  return values.map((value, index) => {
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter(isKnown);
    return isKnown(value) && near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : null;
  });
}

// A path that breaks where a value is missing; dots where asked for, at the end, and for a lone value.
function path(chart, values, colour, across, up, kind = "line") {
  let trace = "", pen = "M";
  const dots = [];
  values.forEach((value, index) => {
    if (!isKnown(value)) { pen = "M"; return; }
    const x = across(chart.x[index]).toFixed(2), y = up(value).toFixed(2);
    trace += chart.stepped && pen === "L" ? `H${x}V${y}` : `${pen}${x} ${y}`;
    const alone = pen === "M" && !isKnown(values[index + 1]);
    if (alone || chart.dots || index === values.length - 1) dots.push([x, y]);
    pen = "L";
  });
  if (!trace) return [];
  return [node("path", { class: `${kind} stroke${colour}`, d: trace }),
    ...(kind === "line" ? dots.map(([x, y]) => node("circle", { class: `fill${colour}`, cx: x, cy: y, r: 3 })) : [])];
}

const lastOf = (values) => values.findLast(isKnown);

function drawLines(plot, chart, width) {
  const height = 230, bottom = height - FRAME.bottom, form = FORMATS[chart.format];
  const series = chart.series.filter(({ values }) => values.some(isKnown));
  const known = series.flatMap(({ values }) => values).filter(isKnown);
  if (isKnown(chart.level)) known.push(chart.level);
  if (!known.length) known.push(0);
  const clip = clipOf(chart), highest = clip ?? Math.max(...known);
  const marks = ticks(chart.zero ? Math.min(0, ...known) : Math.min(...known), highest);
  const across = scale(chart.x[0], chart.x.at(-1), FRAME.left + 8, width - FRAME.right - 8);
  const scaled = scale(marks[0], marks.at(-1), bottom, FRAME.top);
  const up = (value) => scaled(Math.min(value, marks.at(-1)));
  const body = [...grid(marks, up, form, width), ...stepLabels(chart.x, across, height - 20),
    text("step", (FRAME.left + width - FRAME.right) / 2, height - 4),
    ...(isKnown(chart.level) ? [line("level", FRAME.left, up(chart.level), width - FRAME.right, up(chart.level))] : []),
    ...eventLines(chart.marks ?? [], chart.x, across, bottom)];
  series.forEach(({ values }, index) => {
    const colour = (index % 6) + 1, smooth = chart.smooth && values.length > 20;
    if (smooth) body.push(...path(chart, values, colour, across, up, "raw"));
    body.push(...path(chart, smooth ? smoothed(values) : values, colour, across, up));
  });
  if (clip !== null) {
    const beyond = Math.max(...chart.series.map(({ values }) => values[0] ?? 0));
    body.push(text(`↑ ${whenOf(chart, 0)}: ${form(beyond)}`, FRAME.left + 14, FRAME.top + 10, "start", "tick strong"));
  }
  const said = series.map(({ name, values }) => `${name} last ${form(lastOf(values))}`).join(", ");
  const svg = drawing(width, height, `${chart.title}: ${chart.note}; ${said}`, ...body);
  plot.replaceChildren(
    legend(series.map(({ name, values }, index) => [`fill${(index % 6) + 1}`, name, `last ${form(lastOf(values))}`])), svg);
  pointAlong(plot, svg, chart, { across, height,
    values: (near) => series.map(({ name, values }) => `${name}\t${form(values[near])}`),
    dots: (near, at) => series.flatMap(({ values }, index) => isKnown(values[near])
      ? [node("circle", { class: `dot fill${(index % 6) + 1}`, cx: at, cy: up(values[near]), r: 4 })] : []) });
}

// ---- Shares over steps, stacked to 100 %: {x, spans?, series: [{name, values}], marks}

const rampOf = (index, count) => `ramp${1 + Math.round((index * 5) / Math.max(1, count - 1))}`;

function drawShares(plot, chart, width) {
  const height = 230, bottom = height - FRAME.bottom, count = chart.series.length;
  const totals = chart.x.map((_, index) => chart.series.reduce((sum, { values }) => sum + values[index], 0));
  const share = (values, index) => (totals[index] > 0 ? values[index] / totals[index] : 0);
  const pitch = (width - FRAME.left - FRAME.right) / chart.x.length;
  const up = scale(0, 1, bottom, FRAME.top);
  const across = scale(chart.x[0], chart.x.at(-1), FRAME.left + pitch / 2, width - FRAME.right - pitch / 2);
  const bars = chart.x.flatMap((_, index) => {
    let below = 0;
    return chart.series.flatMap(({ values }, layer) => {
      const part = share(values, index), from = below;
      below += part;
      return part > 0 ? [rect(rampOf(layer, count), FRAME.left + pitch * (index + 0.08), up(below), pitch * 0.84,
        up(from) - up(below))] : [];
    });
  });
  const svg = drawing(width, height, `${chart.title}: ${chart.note}`, ...grid([0, 0.5, 1], up, percent, width),
    ...stepLabels(chart.x, across, height - 20), text("step", (FRAME.left + width - FRAME.right) / 2, height - 4),
    ...bars, ...eventLines(chart.marks ?? [], chart.x, across, bottom));
  plot.replaceChildren(legend(chart.series.map(({ name, values }, layer) =>
    [rampOf(layer, count), name, `last ${percent(share(values, values.length - 1))}`])), svg);
  pointAlong(plot, svg, chart, { across, height,
    values: (near) => chart.series.map(({ name, values }) => `${name}\t${percent(share(values, near))}`) });
}

// ---- Horizontal bars of parts: {rows: [{name, parts: [[value, colour]], text, lines}], high, format, axis, bound, legend}

function drawBars(plot, chart, width) {
  const form = FORMATS[chart.format], row = 30, thick = 20;
  const left = 14 + 7.2 * Math.max(...chart.rows.map(({ name }) => name.length));
  const right = 14 + 6.6 * Math.max(...chart.rows.map((each) => each.text.length));
  const across = scale(0, chart.high, left, width - right), body = [];
  const bottom = chart.rows.length * row, height = bottom + (chart.axis ? 26 : 4);
  const marks = chart.axis ? ticks(0, chart.high, Math.max(3, (width - left - right) / 130)) : [];
  for (const mark of marks.filter((each) => each <= chart.high * (1 + 1e-9))) {
    body.push(line("grid", across(mark), 0, across(mark), bottom), text(form(mark), across(mark), bottom + 17));
  }
  chart.rows.forEach(({ name, parts, text: said, lines }, index) => {
    let at = 0;
    const top = index * row + 4, shapes = [];
    for (const [value, colour] of parts) {
      const [from, to] = [across(Math.min(at, chart.high)), across(Math.min(at + value, chart.high))];
      at += value;
      if (to - from >= 0.05) shapes.push(rect(colour, from, top, to - from, thick));
    }
    shapes.push(text(name, left - 10, top + 14.5, "end", "name"),
      text(said, across(Math.min(at, chart.high)) + 8, top + 14.5, "start", "value"));
    body.push(pointed(node("g", {}, ...shapes), () => [name, ...lines]));
  });
  if (isKnown(chart.bound)) body.push(line("bound", across(chart.bound), 0, across(chart.bound), bottom));
  const said = chart.rows.map((each) => `${each.name} ${each.text}`).join(", ");
  plot.replaceChildren(...(chart.legend ? [legend(chart.legend)] : []),
    drawing(width, height, `${chart.title}: ${chart.note}; ${said}`, ...body));
}

// ---- Columns side by side, or one in front of another: {names, series: [{name, colour, values}], format, overlay, axis,
// lines}

function drawColumns(plot, chart, width) {
  const height = 230, bottom = height - FRAME.bottom, form = FORMATS[chart.format], count = chart.series.length;
  const marks = ticks(0, Math.max(1e-9, ...chart.series.flatMap(({ values }) => values.map((value) => value ?? 0))));
  const up = scale(marks[0], marks.at(-1), bottom, FRAME.top);
  const pitch = (width - FRAME.left - FRAME.right) / chart.names.length;
  const across = (index) => FRAME.left + pitch * (index + 0.5);
  const thick = Math.min(56, pitch * 0.8), each = chart.overlay ? thick : thick / count;
  const bars = chart.names.map((_, index) => {
    const shapes = chart.series.flatMap(({ colour, values }, at) => isKnown(values[index]) ? [rect(`${colour} on`,
      across(index) - thick / 2 + (chart.overlay ? 0 : at * each), up(values[index]), each, bottom - up(values[index]))] : []);
    return pointed(node("g", {}, rect("hit", across(index) - pitch / 2, FRAME.top, pitch, bottom - FRAME.top), ...shapes),
      () => chart.lines[index]);
  });
  const svg = drawing(width, height, `${chart.title}: ${chart.note}`, ...grid(marks, up, form, width), ...bars,
    ...labels(chart.names.map((_, index) => index), across, height - 20, { name: (index) => chart.names[index] }),
    text(chart.axis, (FRAME.left + width - FRAME.right) / 2, height - 4));
  plot.replaceChildren(legend(chart.series.map(({ colour, name }) => [colour, name])), svg);
}

// ---- Rows of shaded fields: {rows: [name], columns: [[first, last]], fields: [[row, column, shade, line]], legend}

function drawHeat(plot, chart, width) {
  const left = 84, foot = 28, pitch = (width - left - 12) / chart.columns.length;
  const row = Math.min(40, Math.max(12, 196 / chart.rows.length)), height = chart.rows.length * row + foot;
  const body = chart.rows.flatMap((name, at) => row >= 14 || at % 2 === 0
    ? [text(name, left - 8, (at + 0.5) * row + 3.5, "end")] : []);
  for (const [at, column, shade, said] of chart.fields) {
    body.push(pointed(rect(`heat${shade}`, left + column * pitch, at * row, Math.max(pitch - 0.6, 0.4), row - 1.5),
      () => [`${chart.rows[at]}, ${stepsOf(chart.columns[column])}`, said]));
  }
  body.push(text(`step ${chart.columns[0][0]}`, left, height - 10, "start"));
  if (chart.columns.length > 1) body.push(text(`step ${chart.columns.at(-1)[1]}`, width - 12, height - 10, "end"));
  plot.replaceChildren(legend(chart.legend), drawing(width, height, `${chart.title}: ${chart.note}`, ...body));
}

const stepsOf = ([first, last]) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);

// ---- Time by rank, on a canvas that can be zoomed and moved: {groups: [{name, rows: [name]}], bars: [[first row, last
// row, start_s, stop_s, colour, words]], words: [[line]], colours: [CSS variable], legends: [{title, entries}], views:
// [[name, from_s, to_s]], stop_s, inscribed}. Rows are numbered through all groups; `words` index lines shown for a bar.

const AXIS = 26, HEAD = 28;

function onAxis(at, step) {
  const [unit, name] = step >= 0.2 ? [1, "s"] : step >= 2e-4 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(at / unit).toFixed(Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)))} ${name}`;
}

class Timeline {
  constructor(plot, chart) {
    this.canvas = html("canvas", { tabindex: "0", role: "img", "aria-label": `${chart.title}: ${chart.note}` });
    this.steps = html("div", { class: "steps" });
    this.legends = html("div", {});
    plot.classList.add("zoom");
    plot.append(this.steps, this.legends, this.canvas);
    this.listen();
    this.update(chart);
  }

  update(chart) {
    this.chart = chart;
    const count = chart.groups.reduce((sum, group) => sum + group.rows.length, 0);
    this.row = count <= 16 ? 20 : count <= 48 ? 13 : count <= 128 ? 7 : Math.max(1.5, 640 / count);
    this.left = Math.min(140, 16 + 6.5 * Math.max(...chart.groups.flatMap(({ rows }) => rows.map((name) => name.length))));
    this.rows = [];
    this.titles = [];
    let top = 0;
    for (const group of chart.groups) {
      if (group.name) this.titles.push([group.name, top]);
      top += group.name ? HEAD : 2;
      for (const name of group.rows) {
        this.rows.push({ name, group: group.name, top });
        top += this.row;
      }
      top += 8;
    }
    this.height = top + AXIS;
    this.canvas.style.height = `${this.height}px`;
    this.legends.replaceChildren(...chart.legends.map(({ title, entries }) => legend(entries, title)));
    this.buttons = chart.views.map(([name, from, to]) => {
      const button = html("button", { type: "button" }, name);
      button.addEventListener("click", () => this.press(button, from, to));
      return button;
    });
    this.steps.replaceChildren(...(this.buttons.length > 1 ? this.buttons : []));
    this.stop = Math.max(...chart.views.map(([, , to]) => to));
    const chosen = chart.chosen ?? 0;
    this.press(this.buttons[chosen], chart.views[chosen][1], chart.views[chosen][2]);
  }

  press(button, from, to) {
    const margin = (to - from) * 0.01;
    this.zero = from;
    this.whole = [from - margin, to + margin];
    this.show(...this.whole);
    for (const each of this.buttons) each.setAttribute("aria-pressed", String(each === button));
  }

  show(from, to) {
    const all = this.stop * 1.02, span = Math.min(Math.max(to - from, 5e-7), all * 1.02);
    const start = Math.min(Math.max(from, -0.02 * all), all - span * 0.02);
    [this.from, this.to] = [start, start + span];
    this.canvas.dataset.view = `${this.from},${this.to}`;
    this.draw();
  }

  zoom(times, at = 0.5) {
    const span = this.to - this.from, middle = this.from + span * at;
    this.show(middle - (span / times) * at, middle + (span / times) * (1 - at));
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect(), plot = box.width - this.left;
    const share = (event.clientX - box.left - this.left) / plot;
    return { x: event.clientX - box.left, y: event.clientY - box.top, share: Math.min(Math.max(share, 0), 1), plot };
  }

  // The wheel zooms once the chart has been clicked: until then it scrolls the page.
  listen() {
    const canvas = this.canvas, held = new Map();
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / canvas.clientWidth);
      else this.zoom(Math.exp(-event.deltaY / 400), this.place(event).share);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      tip.hide();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held.has(event.pointerId)) this.drag(event, held);
      else this.point(event);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => held.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("dblclick", () => this.show(...this.whole));
    canvas.addEventListener("keydown", (event) => {
      const does = { "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5),
        0: () => this.show(...this.whole), ArrowLeft: () => this.move(-0.15), ArrowRight: () => this.move(0.15) }[event.key];
      if (does) { event.preventDefault(); does(); }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // One pointer moves, two pinch.
  drag(event, held) {
    const before = held.get(event.pointerId), { share, plot } = this.place(event);
    const others = [...held].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    held.set(event.pointerId, event.clientX);
    if (!others.length) return this.move((before - event.clientX) / plot);
    const [wide, narrow] = [Math.abs(event.clientX - others[0]), Math.abs(before - others[0])];
    if (narrow > 4 && wide > 4) this.zoom(wide / narrow, share);
  }

  point(event) {
    const { x, y, share } = this.place(event);
    const at = this.from + share * (this.to - this.from);
    const row = this.rows.findIndex(({ top }) => y >= top && y < top + this.row);
    const found = row >= 0 && x >= this.left ? this.chart.bars.findLast(([first, last, start, stop]) =>
      first <= row && row <= last && start <= at && at < stop) : undefined;
    if (!found) return tip.hide();
    const [, , start, stop, , words] = found, { group, name } = this.rows[row];
    const said = this.chart.words[words];
    tip.show(event, [[group, name].filter(Boolean).join(", "), ...said, `takes\t${seconds(stop - start)}`,
      `from\t${seconds(start - this.zero)}`]);
  }

  draw() {
    const width = this.canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const colours = this.chart.colours.map(colour), perSecond = (width - this.left) / (this.to - this.from);
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    pen.font = "600 12.5px system-ui, sans-serif";
    pen.fillStyle = colour("--ink");
    for (const [title, top] of this.titles) pen.fillText(title, 0, top + HEAD / 2 + 2);
    pen.font = "11.5px system-ui, sans-serif";
    this.drawAxis(pen, width, perSecond, colour);
    this.drawRows(pen, width, colour);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, width - this.left, this.height - AXIS);
    pen.clip();
    for (const bar of this.chart.bars) this.drawBar(pen, bar, { width, perSecond, colours, colour });
    pen.restore();
  }

  drawAxis(pen, width, perSecond, colour) {
    const step = roundStep(this.to - this.from, Math.max(2, (width - this.left) / 110)), bottom = this.height - AXIS;
    for (let at = Math.ceil((this.from - this.zero) / step); at * step + this.zero <= this.to; at++) {
      const mark = at * step, x = this.left + (mark + this.zero - this.from) * perSecond;
      pen.fillStyle = colour("--rule");
      pen.fillRect(x, 0, 1, bottom);
      const words = onAxis(mark, step), half = pen.measureText(words).width / 2;
      pen.fillStyle = colour("--soft");
      if (x + half <= width && x - half >= this.left - 30) pen.fillText(words, x - half, bottom + AXIS / 2);
    }
  }

  drawRows(pen, width, colour) {
    const every = Math.ceil(13 / this.row), height = this.row - (this.row > 10 ? 3 : this.row > 4 ? 1 : 0);
    let number = 0, group = null;
    for (const { name, group: own, top } of this.rows) {
      number = own === group ? number + 1 : 0;
      group = own;
      pen.fillStyle = colour("--lane");
      pen.fillRect(this.left, top, width - this.left, height);
      if (number % every) continue;
      pen.fillStyle = colour("--soft");
      pen.textAlign = "right";
      pen.fillText(name, this.left - 8, top + Math.max(height, 8) / 2 + 0.5);
      pen.textAlign = "left";
    }
  }

  drawBar(pen, [first, last, start, stop, kind, words], { width, perSecond, colours, colour }) {
    if (stop < this.from || start > this.to) return;
    const x = this.left + (start - this.from) * perSecond, wide = Math.max((stop - start) * perSecond, 0.7);
    const top = this.rows[first].top, height = this.rows[last].top + this.row - top - Math.min(3, this.row * 0.15);
    pen.fillStyle = colours[kind];
    pen.fillRect(x, top, wide > 3 ? wide - 0.8 : wide, height);
    if (!this.chart.inscribed || this.row < 13) return;
    const from = Math.max(x, this.left) + 5, space = Math.min(x + wide, width) - from - 5, [name] = this.chart.words[words];
    if (space > 24 && pen.measureText(name).width <= space) {
      pen.fillStyle = this.chart.colours[kind] === "--rule" ? colour("--ink") : colour("--card");
      pen.fillText(name, from, top + height / 2 + 0.5);
    }
  }
}

// ---- Figures

const KINDS = { lines: drawLines, shares: drawShares, bars: drawBars, columns: drawColumns, heat: drawHeat };

// Draws a chart into a figure that has its caption; returns the function that draws other data in its place.
function mount(holder, chart) {
  const plot = html("div", { class: "plot" });
  holder.append(plot);
  let width = 0;
  if (chart.kind === "timeline") {
    const view = new Timeline(plot, chart);
    new ResizeObserver(() => view.draw()).observe(plot);
    return (other) => view.update(other);
  }
  const draw = () => { if (width) KINDS[chart.kind](plot, chart, width); };
  new ResizeObserver(() => {
    if (plot.clientWidth !== width) {
      width = plot.clientWidth;
      draw();
    }
  }).observe(plot);
  return (other) => {
    chart = other;
    draw();
  };
}

// ---- Charts of steps, on the report and on the live page: options of line charts, and for each line the column of its
// values. `varies`: hidden while all values are equal.

const STEP_CHARTS = {
  loss: { title: "Loss", note: "Nats per target token, or per pair of answers", columns: { loss: "loss" }, zero: false },
  throughput: { title: "Throughput", note: "Tokens per second, all devices together",
    columns: { "tokens per second": "tokens_per_s" }, smooth: true },
  mfu: { title: "MFU", note: "Model FLOPs over step time and the devices' peak; attention FLOPs alone likewise",
    columns: { all: "mfu", attention: "attention_mfu" }, format: "percent", smooth: true },
  "grad-norm": { title: "Gradient norm", note: "Before clipping", columns: { norm: "grad_norm" } },
  "step-time": { title: "Step time", note: "Measured, and as the plan predicted it",
    columns: { measured: "step_s", predicted: "predicted_s" }, format: "seconds" },
  prediction: { title: "Predicted over measured", note: "1 is exact; below 1, steps took longer than predicted",
    columns: { ratio: "predicted_ratio" }, level: 1 },
  gap: { title: "Gap", note: "Predicted step time over its lower bound; 1 is optimal", columns: { gap: "gap" }, zero: false },
  planning: { title: "Planning", note: "Time to plan a batch, to have its programs ready, and how long the step was blocked on it",
    columns: { plan: "plan_s", programs: "prepare_s", blocked: "plan_wait_s" }, format: "seconds" },
  imbalance: { title: "Imbalance", note: "(max − mean) / max over ranks, by resource, as planned",
    columns: { compute: "compute", attention: "attention", memory: "memory", communication: "communication",
      encoder: "encoder" }, format: "percent" },
  bubble: { title: "Bubble", note: "Share of rank time spent waiting for other ranks", columns: { bubble: "bubble" },
    format: "percent" },
  rewards: { title: "Rewards", note: "Means over pairs of answers", columns: { chosen: "chosen", rejected: "rejected" } },
  accuracy: { title: "Accuracy", note: "Share of pairs of which the chosen answer has the higher reward",
    columns: { accuracy: "accuracy" }, format: "percent" },
  devices: { title: "Devices", note: "In use at each step", columns: { devices: "world_size" }, stepped: true, varies: true },
};

// Returns the function that draws the chart of a figure's `data-steps` from columns of values. Charts without values are
// hidden, except for the loss.
function stepChart(holder) {
  const { columns, varies, ...options } = STEP_CHARTS[holder.dataset.steps];
  holder.append(caption(options.title, options.note));
  let redraw = null;
  return (values, { spans, marks } = {}) => {
    const series = Object.entries(columns).map(([name, column]) => ({ name, values: values[column] }))
      .filter((each) => each.values.some(isKnown));
    const known = series.flatMap((each) => each.values);
    holder.hidden = varies ? known.every((value) => value === known[0]) : !known.length && holder.dataset.steps !== "loss";
    const chart = { kind: "lines", format: "number", zero: true, ...options, series, x: values.step, spans, marks };
    if (redraw) redraw(chart);
    else redraw = mount(holder, chart);
  };
}

document.body.append(html("div", { id: "tip", class: "tip", role: "tooltip", hidden: "" }));
for (const holder of document.querySelectorAll("figure[data-chart]")) {
  mount(holder, JSON.parse(holder.querySelector("script").textContent));
}

const stepValues = document.getElementById("step-values");
if (stepValues) {
  const { x, series, spans, marks } = JSON.parse(stepValues.textContent);
  const columns = Object.fromEntries(series.map(({ name, values }) => [name, values]));
  for (const holder of document.querySelectorAll("figure[data-steps]")) {
    stepChart(holder)({ ...columns, step: x }, { spans, marks });
  }
}
