"use strict";
// What the report's charts and its time x rank view do when pointed at. Everything is on the page already.

const tip = document.querySelector(".tip");

function part(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function showTip(event, [head, ...rest]) {
  tip.replaceChildren(part("strong", head));
  for (const line of rest) {
    const [name, value] = line.split("\t"), row = document.createElement("div");
    row.append(part("span", name), ...(value === undefined ? [] : [part("b", value)]));
    tip.append(row);
  }
  tip.hidden = false;
  const room = 14;
  const left = event.clientX + room + tip.offsetWidth > innerWidth ? event.clientX - room - tip.offsetWidth : event.clientX + room;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + room, innerHeight - tip.offsetHeight - 4))}px`;
}

function hideTip() {
  tip.hidden = true;
}

// Charts: a hairline at the nearest point, and its values.
for (const chart of document.querySelectorAll("svg[data-tips]")) {
  const { x: places, t: told } = JSON.parse(chart.dataset.tips);
  const hair = chart.querySelector(".hair");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    let near = 0;
    places.forEach((place, index) => {
      if (Math.abs(place - at) < Math.abs(places[near] - at)) near = index;
    });
    hair.setAttribute("x1", places[near]);
    hair.setAttribute("x2", places[near]);
    hair.classList.add("shown");
    showTip(event, told[near]);
  });
  chart.addEventListener("pointerleave", () => {
    hair.classList.remove("shown");
    hideTip();
  });
}

// The time x rank view.
const COLOURS = { encode: "--r6", forward: "--c1", transfer: "--c2", backward: "--c3", attention: "--c4", reduce: "--c5", update: "--c6", wait: "--rule", load: "--soft" };
const LEFT = 104, HEAD = 28, AXIS = 26;

function inWords(microseconds) {
  const size = Math.abs(microseconds);
  const [unit, name] = size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  return `${Number((microseconds / unit).toPrecision(3))} ${name}`;
}

function roundStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((unit) => unit * power >= rough);
}

// Of an axis whose marks are `step` apart, all microseconds: as many digits as tell them apart.
function onAxis(at, step) {
  const [unit, name] = step >= 2e5 ? [1e6, "s"] : step >= 2e2 ? [1e3, "ms"] : [1, "µs"];
  return `${(at / unit).toFixed(Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)))} ${name}`;
}

class TimeView {
  constructor(figure) {
    this.canvas = figure.querySelector("canvas");
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.buttons = [...figure.querySelectorAll("button")];
    this.processes = [...new Set(this.data.tracks.map((track) => track.process))];
    const most = Math.max(...this.processes.map((name) => this.data.tracks.filter((track) => track.process === name).length));
    this.row = most <= 8 ? 22 : most <= 32 ? 14 : most <= 96 ? 8 : 5;
    this.rows = [];
    let top = 0;
    for (const process of this.processes) {
      this.rows.push({ title: process, top });
      top += HEAD;
      for (const track of this.data.tracks.filter((each) => each.process === process)) {
        this.rows.push({ track, top });
        top += this.row;
      }
      top += 10;
    }
    this.height = top + AXIS;
    this.canvas.style.height = `${this.height}px`;
    this.listen();
    const last = this.buttons.filter((button) => button.textContent !== "all").at(-1);
    this.press(last || this.buttons[0]);
  }

  press(button) {
    const [from, to] = [Number(button.dataset.from) * 1e6, Number(button.dataset.to) * 1e6];
    const room = (to - from) * 0.01;
    this.zero = from;
    this.whole = [from - room, to + room];
    this.show(...this.whole);
    for (const each of this.buttons) each.setAttribute("aria-pressed", String(each === button));
  }

  show(from, to) {
    const least = 0.5, all = this.data.stop * 1.02;
    const span = Math.min(Math.max(to - from, least), all * 1.02);
    const start = Math.min(Math.max(from, -0.02 * all), all - span * 0.02);
    [this.from, this.to] = [start, start + span];
    this.canvas.dataset.view = `${this.from},${this.to}`;
    this.draw();
  }

  zoom(times, at = 0.5) {
    const span = this.to - this.from, middle = this.from + span * at;
    this.show(middle - (span / times) * at, middle + (span / times) * (1 - at));
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, share: (event.clientX - box.left - LEFT) / (box.width - LEFT) };
  }

  listen() {
    const canvas = this.canvas;
    for (const button of this.buttons) button.addEventListener("click", () => this.press(button));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = (event.deltaX / canvas.clientWidth) * (this.to - this.from);
        this.show(this.from + by, this.to + by);
      } else this.zoom(Math.exp(-event.deltaY / 400), Math.min(Math.max(this.place(event).share, 0), 1));
    }, { passive: false });
    const held = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      hideTip();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held.has(event.pointerId)) return this.point(event);
      const before = held.get(event.pointerId), span = this.to - this.from;
      const others = [...held].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      held.set(event.pointerId, event.clientX);
      if (others.length) {
        const [wide, narrow] = [Math.abs(event.clientX - others[0]), Math.abs(before - others[0])];
        if (narrow > 4 && wide > 4) this.zoom(wide / narrow, Math.min(Math.max(this.place(event).share, 0), 1));
      } else {
        const by = ((before - event.clientX) / (canvas.clientWidth - LEFT)) * span;
        this.show(this.from + by, this.to + by);
      }
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => held.delete(event.pointerId));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => this.show(...this.whole));
    canvas.addEventListener("keydown", (event) => {
      const by = (this.to - this.from) * 0.15;
      const does = { "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5), 0: () => this.show(...this.whole),
        ArrowLeft: () => this.show(this.from - by, this.to - by), ArrowRight: () => this.show(this.from + by, this.to + by) }[event.key];
      if (does) { event.preventDefault(); does(); }
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  point(event) {
    const { x, y } = this.place(event);
    const row = this.rows.find((each) => each.track && y >= each.top && y < each.top + this.row);
    const at = this.from + ((x - LEFT) / (this.canvas.clientWidth - LEFT)) * (this.to - this.from);
    const found = row && x >= LEFT ? row.track.events.filter(([start, stop]) => start <= at && at < stop).at(-1) : undefined;
    if (!found) return hideTip();
    const [start, stop, , name] = found;
    showTip(event, [`${row.track.process}, ${row.track.name}`, name, `takes\t${inWords(stop - start)}`, `from\t${inWords(start - this.zero)}`]);
  }

  draw() {
    const width = this.canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const known = new Map();
    const colour = (name) => {
      if (!known.has(name)) known.set(name, style.getPropertyValue(name).trim());
      return known.get(name);
    };
    pen.scale(ratio, ratio);
    pen.font = "11.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const scale = (width - LEFT) / (this.to - this.from);
    this.drawAxis(pen, { width, scale, colour });
    for (const row of this.rows) row.track ? this.drawTrack(pen, row, { width, scale, colour }) : this.drawTitle(pen, row, colour);
  }

  drawTitle(pen, row, colour) {
    pen.fillStyle = colour("--ink");
    pen.font = "600 12.5px system-ui, sans-serif";
    pen.fillText(row.title, 0, row.top + HEAD / 2 + 2);
    pen.font = "11.5px system-ui, sans-serif";
  }

  drawAxis(pen, { width, scale, colour }) {
    const step = roundStep(this.to - this.from, Math.max(2, (width - LEFT) / 110)), bottom = this.height - AXIS;
    for (let mark = Math.ceil((this.from - this.zero) / step) * step; mark + this.zero <= this.to; mark += step) {
      const x = LEFT + (mark + this.zero - this.from) * scale;
      pen.fillStyle = colour("--rule");
      pen.fillRect(x, 0, 1, bottom);
      const text = onAxis(Math.abs(mark) < step / 2 ? 0 : mark, step), half = pen.measureText(text).width / 2;
      pen.fillStyle = colour("--soft");
      if (x + half <= width && x - half >= LEFT - 30) pen.fillText(text, x - half, bottom + AXIS / 2);
    }
  }

  drawTrack(pen, row, { width, scale, colour }) {
    const height = this.row - (this.row > 10 ? 3 : 1), number = Number(row.track.name.replace(/\D/g, ""));
    if (this.row >= 12 || number % 8 === 0) {
      pen.fillStyle = colour("--soft");
      pen.textAlign = "right";
      pen.fillText(row.track.name, LEFT - 10, row.top + height / 2 + 0.5);
      pen.textAlign = "left";
    }
    pen.fillStyle = colour("--lane");
    pen.fillRect(LEFT, row.top, width - LEFT, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, row.top, width - LEFT, height);
    pen.clip();
    for (const [start, stop, kind, name] of row.track.events) {
      if (stop < this.from || start > this.to) continue;
      const x = LEFT + (start - this.from) * scale, wide = Math.max((stop - start) * scale, 0.7);
      const key = this.data.kinds[kind];
      pen.fillStyle = colour(COLOURS[key] || "--rule");
      pen.fillRect(x, row.top, wide > 3 ? wide - 0.8 : wide, height);
      const from = Math.max(x, LEFT) + 5, room = Math.min(x + wide, width) - from - 5;
      if (this.row >= 14 && room > 24 && pen.measureText(name).width <= room) {
        pen.fillStyle = key === "wait" ? colour("--ink") : colour("--card");
        pen.fillText(name, from, row.top + height / 2 + 0.5);
      }
    }
    pen.restore();
  }
}

for (const figure of document.querySelectorAll(".zoom")) new TimeView(figure);
