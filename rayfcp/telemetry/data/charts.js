"use strict";

// Charts of the live page as SVG elements: lines over steps, bars over ranks, time x rank. Text only ever becomes text
// nodes, so that nothing a run says can become markup.

const SIZE = { width: 560, height: 230, left: 58, right: 14, top: 12, bottom: 38 };
const NAMES = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, ...children) {
  const made = document.createElementNS(NAMES, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const number = (value) => {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
};
const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 0.1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return Math.abs(value) >= 1000 ? `${number(value)} s` : `${Number(value.toPrecision(3))} s`;
};
const percent = (value) => {
  if (value === null || value === undefined) return "–";
  const share = value * 100;
  if (share > 0 && share < 0.01) return "under 0.01 %";
  return `${Number(Number(share.toFixed(2)).toPrecision(3))} %`;
};

// About `count` round numbers, 1, 2 or 5 times a power of ten apart, whose ends cover low..high.
function ticks(low, high, count = 4) {
  if (!(high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high), 1e-90))) high = low + (Math.abs(low) * 0.1 || 1);
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((each) => each * power >= rough * (1 - 1e-9)) * power;
  const marks = [];
  for (let at = Math.floor(low / unit + 1e-9); at <= Math.ceil(high / unit - 1e-9); at++) {
    marks.push(Number((at * unit).toPrecision(12)));
  }
  return marks;
}

const scale = (low, high, start, stop) => (value) =>
  high > low ? start + ((value - low) / (high - low)) * (stop - start) : (start + stop) / 2;

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

function legend(entries) {
  return html("ul", { class: "legend" }, ...entries.map(([colour, name, value]) => html("li", {},
    node("svg", { class: "key", viewBox: "0 0 10 10", "aria-hidden": "true" },
      node("rect", { class: colour, width: 10, height: 10, rx: 2.5 })),
    name, ...(value === undefined ? [] : [" ", html("b", {}, value)]))));
}

function figure(title, note) {
  return html("figure", {}, html("figcaption", {}, html("h3", {}, title), html("p", {}, note)));
}

function grid(marks, up, form) {
  return marks.flatMap((mark) => [
    node("line", { class: "grid", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: up(mark), y2: up(mark) }),
    node("text", { class: "tick", x: SIZE.left - 7, y: up(mark) + 3.5, "text-anchor": "end" }, form(mark)),
  ]);
}

// Labels below the horizontal axis, none closer than `gap` to its neighbour, the last one always.
function labels(values, across, gap = 34) {
  const kept = [];
  for (const value of values) if (!kept.length || across(value) - across(kept.at(-1)) >= gap) kept.push(value);
  const last = values.at(-1);
  while (kept.length && kept.at(-1) !== last && across(last) - across(kept.at(-1)) < gap) kept.pop();
  if (kept.at(-1) !== last) kept.push(last);
  return kept.map((value) => node("text",
    { class: "tick", x: across(value), y: SIZE.height - 22, "text-anchor": "middle" }, String(value)));
}

const axisName = (text) => node("text",
  { class: "axis", x: (SIZE.left + SIZE.width - SIZE.right) / 2, y: SIZE.height - 5, "text-anchor": "middle" }, text);

// A figure whose lines are drawn anew by `update`; `series`: name to column; those without a value are left out.
class LineChart {
  constructor(id, { title, note, series, form, fromZero = true }) {
    Object.assign(this, { title, note, known: series, form, fromZero });
    this.figure = figure(title, note);
    this.figure.id = id;
    this.legend = legend([]);
    this.svg = node("svg", { class: "chart", viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img",
      "aria-label": `${title}: ${note}` });
    this.figure.append(this.legend, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.unpoint());
  }

  update(columns) {
    const steps = columns.step;
    this.series = Object.fromEntries(Object.entries(this.known).filter(([, name]) => columns[name].some((value) => value !== null)));
    const values = Object.values(this.series).flatMap((name) => columns[name]).filter((value) => value !== null);
    if (!values.length) return;
    const marks = ticks(this.fromZero ? Math.min(0, ...values) : Math.min(...values), Math.max(...values));
    this.across = scale(steps[0], steps.at(-1), SIZE.left + 8, SIZE.width - SIZE.right - 8);
    this.up = scale(marks[0], marks.at(-1), SIZE.height - SIZE.bottom, SIZE.top);
    this.columns = columns;
    const lines = Object.values(this.series).flatMap((name, index) => this.line(steps, columns[name], index + 1));
    const whole = ticks(steps[0], steps.at(-1), 6).filter((mark) => mark % 1 === 0 && mark >= steps[0] && mark <= steps.at(-1));
    const shown = [...new Set([steps[0], ...whole, steps.at(-1)])].sort((one, two) => one - two);
    this.cursor = node("g");
    this.svg.replaceChildren(...grid(marks, this.up, this.form), ...labels(shown, this.across), axisName("step"),
      ...lines, this.cursor);
    const entries = Object.entries(this.series).map(([name, column], index) =>
      [`fill${index + 1}`, name, this.form(columns[column].at(-1))]);
    const made = legend(entries);
    this.legend.replaceWith(made);
    this.legend = made;
    if (this.event) this.point(this.event);
  }

  // A path that breaks where a value is missing, and a dot at its end.
  line(steps, values, colour) {
    let path = "", pen = "M", last = null;
    values.forEach((value, index) => {
      if (value === null) { pen = "M"; return; }
      path += `${pen}${this.across(steps[index]).toFixed(2)} ${this.up(value).toFixed(2)}`;
      pen = "L";
      last = index;
    });
    if (last === null) return [];
    return [node("path", { class: `line stroke${colour}`, d: path }),
      node("circle", { class: `fill${colour}`, cx: this.across(steps[last]), cy: this.up(values[last]), r: 3 })];
  }

  point(event) {
    if (!this.columns) return;
    this.event = { clientX: event.clientX, clientY: event.clientY };
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * SIZE.width;
    const steps = this.columns.step;
    let near = 0;
    steps.forEach((step, index) => {
      if (Math.abs(this.across(step) - x) < Math.abs(this.across(steps[near]) - x)) near = index;
    });
    const at = this.across(steps[near]);
    const found = Object.entries(this.series).map(([name, column]) => [name, this.columns[column][near]]);
    const dots = found.flatMap(([, value], index) => value === null ? [] :
      [node("circle", { class: `dot fill${index + 1}`, cx: at, cy: this.up(value), r: 4 })]);
    this.cursor.replaceChildren(
      node("line", { class: "cross", x1: at, x2: at, y1: SIZE.top, y2: SIZE.height - SIZE.bottom }), ...dots);
    tip.show(event, [`step ${steps[near]}`, ...found.map(([name, value]) => `${name}: ${this.form(value)}`)].join("\n"));
  }

  unpoint() {
    this.event = null;
    this.cursor?.replaceChildren();
    tip.hide();
  }
}
