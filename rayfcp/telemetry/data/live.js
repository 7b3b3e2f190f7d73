// The page itself: asks for the run's state and shows it.

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
const set = (id, text) => { byId(id).textContent = text; };
const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

const CHARTS = [...document.querySelectorAll("figure[data-steps]")].map(stepChart);

function duration(value) {
  if (value === null) return "";
  const minutes = Math.round(value / 60);
  if (value < 90) return `${Math.round(value)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function columnsOf(state) {
  return Object.fromEntries(state.columns.map((name, index) => [name, state.history.map((row) => row[index])]));
}

function showHead(state) {
  document.title = `${state.run} · step ${state.step} · rayfcp`;
  set("run", state.run);
  set("state", state.state);
  byId("state").className = `chip ${state.state}`;
  const done = state.target_steps ? Math.min(1, state.step / state.target_steps) : 0;
  byId("bar").firstElementChild.style.width = `${100 * done}%`;
  byId("bar").setAttribute("aria-valuenow", Math.round(100 * done));
  const last = state.last;
  const degrees = last && Object.entries(last.degrees).reverse()
    .map(([degree, count]) => count > 1 ? `${degree} (×${count})` : degree).join(", ");
  set("about", last ? [last.strategy, plural(state.devices.in_use, "device"), plural(last.num_microbatches, "microbatch",
    "microbatches"), `degrees ${degrees || "none"}`].join(" · ") : plural(state.devices.in_use, "device"));
  set("message", state.message);
}

function showTiles(state, now) {
  const { last, devices, counts } = state;
  set("step", `${number(state.step)} of ${number(state.target_steps)}`);
  set("eta", state.eta_s === null ? "" : state.eta_s > 0 ? `${duration(state.eta_s)} to go` : "all steps done");
  set("world-size", number(devices.in_use));
  set("devices", `${number(devices.standing_by)} standing by, ${number(devices.wanted)} wanted`);
  if (now === null) return;
  set("loss", number(now.loss));
  set("loss-note", last ? `gradient norm ${number(last.grad_norm)}` : "");
  set("tokens", number(now.tokens_per_s));
  set("tokens-note", `${number(counts.tokens_total ?? 0)} in all`);
  set("step-time", seconds(now.step_s));
  set("step-note", `${seconds(now.predicted_s)} predicted`);
  set("mfu", percent(now.mfu));
  set("mfu-note", `attention ${percent(now.attention_mfu)}`);
  set("imbalance", percent(now.compute));
  set("gap", `gap to the bound ${number(now.gap)}`);
  set("goodput", percent(state.goodput));
  set("goodput-note", `of wall time in committed steps; ${plural(counts.recoveries_total ?? 0, "recovery", "recoveries")}, ` +
    `${plural(counts.lost_steps_total ?? 0, "step")} lost`);
}

function showRecoveries(state) {
  const rows = state.recoveries.map((each) => html("tr", {},
    ...[new Date(each.at * 1000).toLocaleTimeString(), String(each.step), each.cause, seconds(each.seconds)]
      .map((value) => html("td", {}, value)))).reverse();
  const head = html("tr", {}, ...["at", "after step", "cause", "took"].map((value) => html("th", { scope: "col" }, value)));
  byId("recoveries").hidden = !rows.length;
  byId("recoveries").replaceChildren(html("h2", {}, "Recoveries"),
    html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows)));
}

const KINDS_OF_SPANS = { load: "--soft", score: "--r3", encode: "--r6", forward: "--c1", attention: "--c4", backward: "--c3",
  transfer: "--c2", reduce: "--c5", update: "--c6", wait: "--rule" };
const rampOfDegree = (degree) => Math.min(6, 2 + Math.round(Math.log2(degree)));

// The planned and the measured last step: colours mean degrees in the first, passes in the second.
function timelineChart(picture) {
  const kinds = [...new Set(picture.panels.flatMap(({ rows }) => rows.flatMap(({ bars }) => bars.map((bar) => bar[2]))))];
  const degree = (kind) => (kind.startsWith("degree ") ? Number(kind.slice(7)) : 0);
  const degrees = kinds.filter(degree).sort((one, two) => degree(one) - degree(two));
  const passes = Object.keys(KINDS_OF_SPANS).filter((kind) => kinds.includes(kind));
  const rows = picture.panels.flatMap((panel) => panel.rows);
  const words = [], bars = rows.flatMap((row, index) => row.bars.map(([start, lasts, kind, label]) => {
    words.push([label || kind]);
    return [index, index, start, start + lasts, kinds.indexOf(kind), words.length - 1];
  }));
  return { kind: "timeline", title: "Time by rank", note: "Planned and measured, on one scale of time", bars, words,
    groups: picture.panels.map(({ name, rows: own }) => ({ name, rows: own.map((row) => row.name) })),
    colours: kinds.map((kind) => (degree(kind) ? `--r${rampOfDegree(degree(kind))}` : KINDS_OF_SPANS[kind] ?? "--rule")),
    legends: [["planned:", degrees.map((kind) => [`ramp${rampOfDegree(degree(kind))}`, kind])],
      ["measured:", passes.map((kind) => [`kind-${kind}`, kind])]]
      .filter(([, entries]) => entries.length).map(([title, entries]) => ({ title, entries })),
    views: [["step", 0, picture.duration_s]], inscribed: false };
}

function deviceChart(workers) {
  const lines = (each) => [`device ${each.rank}`, `step\t${seconds(each.step_s)}`,
    ...(each.busy_s === null ? [] : [`own work\t${seconds(each.busy_s)}`]),
    ...(each.speed === null ? [] : [`speed\t${number(each.speed)}`])];
  const series = [{ name: "with waiting", colour: "whole", values: workers.map((each) => each.step_s) },
    { name: "own work", colour: "own", values: workers.map((each) => each.busy_s) }];
  return { kind: "columns", title: "Busy time", note: "Seconds of the last step, by device", axis: "device", format: "seconds",
    overlay: true, series, names: workers.map((each) => String(each.rank)), lines: workers.map(lines) };
}

// Losses on evaluation sets, over the steps after which they were evaluated.
function evaluationChart(evaluations) {
  const names = [...new Set(evaluations.flatMap(([, losses]) => Object.keys(losses)))];
  const series = names.map((name) => ({ name, values: evaluations.map(([, losses]) => losses[name] ?? null) }));
  return { kind: "lines", title: "Evaluation loss", note: "Nats per target token or per pair of answers, by set", format: "number", zero: false,
    dots: true, x: evaluations.map(([step]) => step), series };
}

const mounted = {};

// Draws into the element `id`, whose figure is made once.
function drawInto(id, chart) {
  if (!mounted[id]) {
    const holder = html("figure", {}, caption(chart.title, chart.note));
    byId(id).replaceChildren(holder);
    mounted[id] = mount(holder, chart);
  } else mounted[id](chart);
}

function showPicture(state) {
  const { picture } = state;
  set("picture-note", picture.panels.length ? `Step ${picture.step}. Point at a bar for its name and time; click to zoom.`
    : "No step has ended yet.");
  if (picture.panels.length) drawInto("plan-chart", timelineChart(picture));
  if (state.workers.length) drawInto("rank-chart", deviceChart(state.workers));
}

let shown = null;
let answeredAt = null;

function show(state) {
  const columns = columnsOf(state);
  const now = columns.step.length
    ? Object.fromEntries(state.columns.map((name) => [name, columns[name].at(-1)])) : null;
  showHead(state);
  showTiles(state, now);
  showRecoveries(state);
  const key = `${state.started} ${state.step} ${state.history.length} ${state.picture.step}`;
  if (key === shown) return;
  shown = key;
  if (now !== null) for (const update of CHARTS) update(columns);
  if (state.evaluations.length) drawInto("eval-chart", evaluationChart(state.evaluations));
  showPicture(state);
}

function fail(text) {
  set("error", text);
  byId("error").hidden = false;
  set("state", "no answer");
  byId("state").className = "chip gone";
}

async function ask() {
  try {
    const answer = await fetch("/api/state", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.status === 401) return fail("The run requires its token: open /?token=TOKEN with the token in its run directory.");
    if (!answer.ok) return fail(`The run answered ${answer.status} ${answer.statusText}.`);
    show(await answer.json());
    answeredAt = new Date();
    byId("error").hidden = true;
  } catch (error) {
    const since = answeredAt ? ` since ${answeredAt.toLocaleTimeString()}` : "";
    fail(`No answer from the run${since}: it has ended, or its controller is restarting.`);
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden || shown === null) await ask();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

follow();
