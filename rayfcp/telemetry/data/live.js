// The page itself: asks for the run's state and shows it.

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
const set = (id, text) => { byId(id).textContent = text; };
const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

const CHARTS = [
  new LineChart("loss-chart", { title: "Loss", note: "Nats per target token", series: { loss: "loss" }, form: number,
    fromZero: false }),
  new LineChart("step-chart", { title: "Step time", note: "What the plan promised and what the clock said",
    series: { measured: "step_s", predicted: "predicted_s" }, form: seconds }),
  new LineChart("tokens-chart", { title: "Tokens per second", note: "Over all devices",
    series: { "tokens per second": "tokens_per_s" }, form: number }),
  new LineChart("mfu-chart", { title: "MFU", note: "Model FLOPs over time and peak",
    series: { all: "mfu", attention: "attention_mfu" }, form: percent }),
  new LineChart("imbalance-chart", { title: "Imbalance", note: "(max − mean) / max over ranks, by resource", form: percent,
    series: { compute: "compute", attention: "attention", memory: "memory", communication: "communication",
      encoder: "encoder" } }),
  new LineChart("world-chart", { title: "World size", note: "Devices in use", series: { devices: "world_size" },
    form: number }),
  new LineChart("gap-chart", { title: "Gap", note: "Predicted step over its lower bound; 1 is perfect",
    series: { gap: "gap" }, form: number, fromZero: false }),
  new LineChart("planning-chart", { title: "Planning", note: "Time to plan a batch, and what the step waited for it",
    series: { plan: "plan_s", wait: "plan_wait_s" }, form: seconds }),
];
byId("charts").append(...CHARTS.map((chart) => chart.figure));

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
    .map(([degree, count]) => count > 1 ? `${degree} (x${count})` : degree).join(", ");
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
  set("goodput-note", `${plural(counts.recoveries_total ?? 0, "recovery", "recoveries")}, ` +
    `${plural(counts.lost_steps_total ?? 0, "step")} lost`);
}

function showRecoveries(state) {
  const rows = state.recoveries.map((each) => html("tr", {},
    ...[new Date(each.at * 1000).toLocaleTimeString(), String(each.step), each.cause, seconds(each.seconds)]
      .map((text) => html("td", {}, text)))).reverse();
  const head = html("tr", {}, ...["at", "after step", "cause", "took"].map((text) => html("th", { scope: "col" }, text)));
  byId("recoveries").replaceChildren(rows.length ? html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows))
    : html("p", {}, "None since this controller started."));
}

function showPicture(state) {
  const { picture } = state;
  set("picture-note", picture.panels.length ? `Step ${picture.step}. Point at a bar for its name and time.`
    : "No step has ended yet.");
  byId("plan-chart").replaceChildren(...(picture.panels.length ? [timeline(picture)] : []));
  byId("rank-chart").replaceChildren(...(state.workers.length ? [rankChart(state.workers)] : []));
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
  if (now !== null) for (const chart of CHARTS) chart.update(columns);
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
    if (answer.status === 401) return fail("The run asks for its token: open /?token=TOKEN with the token of its folder.");
    if (!answer.ok) return fail(`The run answers ${answer.status} ${answer.statusText}.`);
    show(await answer.json());
    answeredAt = new Date();
    byId("error").hidden = true;
  } catch (error) {
    const since = answeredAt ? ` since ${answeredAt.toLocaleTimeString()}` : "";
    fail(`No answer from the run${since}: it has ended, or its controller is starting again.`);
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden || shown === null) await ask();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

follow();
