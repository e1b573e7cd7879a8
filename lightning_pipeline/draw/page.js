"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const OPS = "FBIW";
const state = { ...DATA.start };

// Orders of work ---------------------------------------------------------------------------------

/** The orders of all sizes, by schedule, ranks and microbatches: see `encode` in page.py. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new DecompressionStream("deflate");
  const writer = stream.writable.getWriter();
  writer.write(bytes);
  writer.close();
  const reader = stream.readable.pipeThrough(new TextDecoderStream()).getReader();
  let lines = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return lines.split("\n");
    lines += value;
  }
}

/** The actions of every rank in order, or null where the schedule can't run with these sizes. */
function actionLists(orders, schedule, ranks, microbatches) {
  const column = DATA.ranks.indexOf(ranks);
  const row = schedule * DATA.ranks.length + column;
  const order = orders[row * DATA.microbatches.length + DATA.microbatches.indexOf(microbatches)];
  if (!order) return null;
  const stages = DATA.schedules[schedule].stages[column];
  return order.split(" ").map((text, rank) => decode(text, stages[rank]));
}

function decode(text, stages) {
  const following = {};
  return Array.from(text.matchAll(/(\D)(\d*)/gu), ([, letter, number]) => {
    const microbatch = number === "" ? following[letter] ?? 0 : Number(number);
    following[letter] = microbatch + 1;
    const code = letter.codePointAt(0) - 65;
    return { stage: stages[Math.floor(code / OPS.length)], op: OPS[code % OPS.length], microbatch };
  });
}

// The simulation: the rules of simulate.py -------------------------------------------------------

/** What must be there before an action starts, as [stage, kind, microbatch]. */
function needs({ stage, op, microbatch }, numStages) {
  if (op === "F") return stage > 0 ? [[stage - 1, "F", microbatch]] : [];
  if (op === "W") return [[stage, "B", microbatch]];
  const own = [stage, "F", microbatch];
  return stage === numStages - 1 ? [own] : [own, [stage + 1, "B", microbatch]];
}

/** When every action runs. `time`, `message` and `transfer` are as in `Step` of steps.py. */
function simulate(lists, time, message, transfer) {
  const rankOf = [];
  lists.forEach((row, rank) => row.forEach((action) => { rankOf[action.stage] = rank; }));
  const stagesPerRank = rankOf.length / lists.length;
  const [forward, input, weight] = time.map((part) => part / stagesPerRank);
  const seconds = { F: forward, B: input + weight, I: input, W: weight };
  const made = new Map();
  const free = new Map(); // when a direction of a pair of ranks has passed its last message
  const rows = lists.map(() => []);

  /** When the neighbouring stage has what an action made; called in each rank's order. */
  const arrival = ({ stage, op }, rank, end) => {
    const receiver = rankOf[op === "F" ? stage + 1 : stage - 1] ?? rank;
    if (op === "W" || receiver === rank) return end;
    const way = `${rank},${receiver}`;
    const sent = Math.max(end, free.get(way) ?? 0) + transfer;
    free.set(way, sent);
    return sent + message;
  };
  const spanOf = (action, rank) => {
    const sources = needs(action, rankOf.length).map((value) => made.get(value.join()));
    if (sources.includes(undefined)) return null;
    const idle = rows[rank].at(-1)?.end ?? 0;
    const waits = sources.map((source) => {
      const there = source.stage === action.stage ? source.end : source.arrival;
      return { source, arrival: there };
    });
    const start = Math.max(idle, ...waits.map((wait) => wait.arrival));
    const end = start + seconds[action.op];
    return { ...action, rank, free: idle, start, end, arrival: arrival(action, rank, end), waits };
  };
  for (let moved = true; moved;) {
    moved = false;
    lists.forEach((row, rank) => {
      while (rows[rank].length < row.length) {
        const span = spanOf(row[rows[rank].length], rank);
        if (span === null) break;
        rows[rank].push(span);
        const kind = span.op === "I" ? "B" : span.op;
        made.set([span.stage, kind, span.microbatch].join(), span);
        moved = true;
      }
    });
  }
  if (rows.some((row, rank) => row.length < lists[rank].length)) throw new Error("ranks deadlock");
  return rows;
}

/** Step time, bubble, and for each rank its activations at the peak, in those of its whole part. */
function figures(rows) {
  const step = Math.max(...rows.map((row) => row.at(-1).end));
  const work = rows.flat().reduce((sum, span) => sum + (span.end - span.start), 0);
  const peaks = rows.map((row) => {
    let held = 0;
    let peak = 0;
    for (const { op } of row) {
      held += { F: 1, B: -1, I: 0, W: -1 }[op];
      peak = Math.max(peak, held);
    }
    return peak / new Set(row.map((span) => span.stage)).size;
  });
  return { step, bubble: step > 0 ? 1 - work / (rows.length * step) : 0, peaks };
}

// Drawing ----------------------------------------------------------------------------------------

const ROW = 16, PITCH = 18, HEAD = 15, LEFT = 20, RIGHT = 34;
const number = (value, digits = 2) => String(Number(value.toFixed(digits)));
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (count, noun, ending = "s") => `${count} ${noun}${count === 1 ? "" : ending}`;
const nameOf = ({ stage, op, microbatch }) => `${stage}${op}${microbatch}`;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The card of a schedule; its timeline is drawn anew whenever something changes. */
function card(entry) {
  const stages = entry.stages[0][0].length;
  const placed = entry.placement === "v" ? ", as a V" : "";
  const note = `${plural(stages, "stage")} a rank${placed}`;
  const body = make("div");
  const element = make("article", { class: "card" },
    make("div", { class: "heading" }, make("h2", {}, entry.name), make("span", {}, note)), body);
  document.getElementById("schedules").append(element);
  return { entry, body };
}

/** Draws a timeline, `scale` pixels for a unit of time; strings, because nodes are slow. */
function draw(view, width, scale) {
  const { step, bubble, peaks } = view.figures;
  view.scale = scale;
  const facts = [
    ["bubble", percent(bubble)],
    ["step", number(step)],
    ["peak activations", number(Math.max(...peaks))],
  ];
  const label = `Timeline of ${view.entry.name}: bubble ${percent(bubble)}, step ${number(step)}, ` +
    `peak activations by rank ${peaks.map((peak) => number(peak)).join(", ")}`;
  const height = HEAD + PITCH * view.rows.length;
  view.body.innerHTML = `
    <dl>${facts.map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join("")}</dl>
    <svg viewBox="0 0 ${width} ${height}" height="${height}" tabindex="0" role="application"
      aria-roledescription="timeline" aria-label="${label.replace(/[&"<]/g, " ")}">
      <text x="0" y="10">rank</text><text class="end" x="${width}" y="10">peak</text>
      ${view.rows.map((row, rank) => drawRow(row, rank, step, peaks[rank], width, scale)).join("")}
      <g class="marks"></g>
    </svg>`;
}

function drawRow(row, rank, step, peak, width, scale) {
  const y = HEAD + rank * PITCH;
  const stages = [...new Set(row.map((span) => span.stage))].sort((a, b) => a - b);
  const paths = {};
  let numbers = "";
  for (const { stage, op, microbatch, start, end } of row) {
    const kind = op === "I" ? "B" : op;
    const shade = Math.min(1, stages.indexOf(stage));
    const x = LEFT + start * scale, cell = (end - start) * scale;
    // The hairline between cells is the ground showing through.
    const filled = Math.max(cell - Math.min(0.8, cell / 6), 0);
    const path = `M${x.toFixed(2)} ${y}h${filled.toFixed(2)}v${ROW}h-${filled.toFixed(2)}z`;
    paths[kind + shade] = (paths[kind + shade] ?? "") + path;
    if (cell >= 5 + 6 * String(microbatch).length) {
      const ink = shade || kind === "W" ? "off" : "on";
      const middle = (x + filled / 2).toFixed(2);
      numbers += `<text class="number ${ink}" x="${middle}" y="${y + 11.5}">${microbatch}</text>`;
    }
  }
  const cells = Object.entries(paths).map(([kind, path]) => `<path class="${kind}" d="${path}"/>`);
  return `
    <text x="0" y="${y + 12}">${rank}</text>
    <rect class="idle" x="${LEFT}" y="${y}" width="${(step * scale).toFixed(2)}" height="${ROW}"/>
    ${cells.join("")}${numbers}
    <text class="end" x="${width}" y="${y + 12}">${number(peak)}</text>`;
}

/** What stands in place of a timeline. */
function refuse(view) {
  const fits = DATA.microbatches.filter((m) =>
    actionLists(orders, views.indexOf(view), state.ranks, m));
  const near = [fits.filter((m) => m < state.microbatches).at(-1),
    fits.find((m) => m > state.microbatches)].filter((m) => m !== undefined);
  const cure = near.length ? `; it runs with ${near.join(" or ")}` : "";
  view.body.replaceChildren(make("p", {},
    `Not with ${plural(state.microbatches, "microbatch", "es")} on ` +
    `${plural(state.ranks, "rank")}${cure}.`));
}

/** Computes and draws everything. */
function render() {
  hideTip();
  const time = [state.forward, state.backwardInput, state.backwardWeight];
  views.forEach((view, schedule) => {
    const lists = actionLists(orders, schedule, state.ranks, state.microbatches);
    view.rows = lists && simulate(lists, time, state.message, state.transfer);
    view.figures = view.rows && figures(view.rows);
    view.at = null;
  });
  const shown = views.filter((view) => view.rows);
  const longest = Math.max(...shown.map((view) => view.figures.step), Number.MIN_VALUE);
  const width = views[0].body.clientWidth;
  const scale = (width - LEFT - RIGHT) / longest;
  for (const view of views) view.rows ? draw(view, width, scale) : refuse(view);
}

// Looking at one action --------------------------------------------------------------------------

const tip = document.getElementById("tip");
const WORK = {
  F: "forward", B: "backward", I: "gradients of inputs", W: "gradients of weights",
};

function describe(span) {
  const plain = (value) => number(value, 3);
  const lines = [
    `${nameOf(span)} on rank ${span.rank}`,
    `${WORK[span.op]} of microbatch ${span.microbatch} on stage ${span.stage}`,
    `start ${plain(span.start)}, end ${plain(span.end)}`,
  ];
  for (const { source, arrival } of span.waits) {
    const where = source.rank === span.rank ? "on the same rank" : `from rank ${source.rank}`;
    lines.push(`needs ${nameOf(source)} ${where}, there at ${plain(arrival)}`);
  }
  if (!span.waits.length) lines.push("needs nothing but its rank");
  lines.push(span.start > span.free
    ? `its rank waits for it from ${plain(span.free)} to ${plain(span.start)}`
    : `its rank is busy until ${plain(span.free)}`);
  return lines.join("\n");
}

function look(view, span) {
  view.at = span;
  const svg = view.body.querySelector("svg");
  const mark = (kind, { rank, start, end }) =>
    `<rect class="${kind}" x="${LEFT + start * view.scale}" y="${HEAD + rank * PITCH}"
      width="${(end - start) * view.scale}" height="${ROW}"/>`;
  svg.querySelector(".marks").innerHTML =
    span.waits.map(({ source }) => mark("needed", source)).join("") + mark("chosen", span);
  tip.textContent = describe(span);
  tip.hidden = false;
  const box = svg.getBoundingClientRect();
  const x = box.left + LEFT + (span.start + span.end) / 2 * view.scale - tip.offsetWidth / 2;
  const y = box.top + HEAD + span.rank * PITCH;
  const above = y - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${above > 8 ? above : y + PITCH + 4}px`;
}

function hideTip() {
  tip.hidden = true;
  for (const marks of document.querySelectorAll(".marks")) marks.replaceChildren();
}

/** The action under the pointer. */
function under(view, event) {
  const box = view.body.querySelector("svg").getBoundingClientRect();
  const time = (event.clientX - box.left - LEFT) / view.scale;
  const row = view.rows[Math.floor((event.clientY - box.top - HEAD) / PITCH)];
  return row?.find((span) => span.start <= time && time < span.end);
}

/** The action that an arrow key leads to. */
function beside(view, key) {
  const span = view.at;
  if (!span) return view.rows[0][0];
  const row = view.rows[span.rank];
  const at = row.indexOf(span);
  if (key === "ArrowRight") return row[at + 1] ?? span;
  if (key === "ArrowLeft") return row[at - 1] ?? span;
  const other = view.rows[span.rank + (key === "ArrowDown" ? 1 : -1)];
  return other?.find(({ end }) => end > span.start) ?? other?.at(-1) ?? span;
}

function listen(view) {
  view.body.addEventListener("pointermove", (event) => {
    if (!view.rows) return;
    const span = under(view, event);
    if (!span) hideTip();
    else if (tip.hidden || span !== view.at) look(view, span);
  });
  view.body.addEventListener("pointerleave", hideTip);
  view.body.addEventListener("focusout", hideTip);
  view.body.addEventListener("keydown", (event) => {
    if (!view.rows || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    look(view, tip.hidden && view.at ? view.at : beside(view, event.key));
  });
}

// Controls ---------------------------------------------------------------------------------------

/** A slider over numbers that can be chosen, with the number beside it. */
function choice(name, label, values) {
  const at = () => values.indexOf(state[name]);
  const slider = make("input", {
    id: name, name, type: "range", min: 0, max: values.length - 1, step: 1, value: at(),
  });
  const select = make("select", { "aria-label": label },
    ...values.map((value) => make("option", { value }, value)));
  const set = (value) => {
    state[name] = value;
    slider.value = at();
    slider.setAttribute("aria-valuetext", value);
    select.value = value;
  };
  slider.addEventListener("input", () => { set(values[slider.value]); render(); });
  select.addEventListener("input", () => { set(Number(select.value)); render(); });
  set(state[name]);
  return make("div", { class: "control" }, make("label", { for: name }, label), slider, select);
}

/** A slider of a time, with a field for any number. */
function duration(name, label, unit) {
  const slider = make("input", {
    id: name, name, type: "range", min: 0, max: 4 * unit, step: unit / 20, value: state[name],
  });
  const field = make("input", {
    type: "number", min: 0, step: "any", value: state[name], "aria-label": label,
  });
  slider.addEventListener("input", () => {
    state[name] = field.value = Number(Number(slider.value).toPrecision(12));
    render();
  });
  field.addEventListener("input", () => {
    if (field.value === "" || !field.checkValidity()) return;
    state[name] = slider.value = Number(field.value);
    render();
  });
  return make("div", { class: "control" }, make("label", { for: name }, label), slider, field);
}

function start() {
  const most = Math.max(state.forward, state.backwardInput, state.backwardWeight);
  const unit = 10 ** Math.round(Math.log10(most));
  document.getElementById("controls").append(
    choice("ranks", "Ranks in the pipeline", DATA.ranks),
    choice("microbatches", "Microbatches", DATA.microbatches),
    duration("forward", "Time of a forward (F)", unit),
    duration("backwardInput", "Time of input gradients (I)", unit),
    duration("backwardWeight", "Time of weight gradients (W)", unit),
    duration("message", "Latency of a message", unit),
    duration("transfer", "Bytes of a message / bandwidth", unit),
  );
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  const swatch = (kind) => make("span", { class: `swatch ${kind}` });
  document.getElementById("legend").append(
    ...Object.entries(DATA.legend).map(([kind, text]) =>
      make("li", {}, swatch(`${kind}0`), swatch(`${kind}1`), text)),
    make("li", {}, swatch("idle"), "waiting"),
    make("li", {}, "lighter: a later stage of the rank"),
  );
  views.forEach(listen);
  let width = views[0].body.clientWidth;
  addEventListener("resize", () => {
    if (views[0].body.clientWidth === width) return;
    width = views[0].body.clientWidth;
    render();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  document.addEventListener("scroll", hideTip, { passive: true });
  render();
}

let orders;
const views = DATA.schedules.map(card);
const ready = unpack(DATA.orders).then((unpacked) => { orders = unpacked; start(); });
