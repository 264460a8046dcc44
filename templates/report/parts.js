// -- kernels, reductions, memory ---------------------------------------------------------------------------------------

function human(count) {
  for (const unit of ["B", "KB", "MB"]) {
    if (count < 1000) return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} GB`;
}

function micro(seconds) {
  if (seconds == null) return "";
  const [factor, unit] = seconds < 1e-3 ? [1e6, "\u00b5s"] : seconds < 1 ? [1e3, "ms"] : [1, "s"];
  return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
}
const atSizes = () => Object.entries(DATA.dims).map(([name, n]) => `${name}=${n}`).join(", ");
const meter = (share) => el("span", { class: "meter" }, el("i", { style: `width:${Math.min(100, 100 * share).toFixed(1)}%` }));

/** A table; the first column is text, cells are text or elements. */
function table(columns, rows, textual = []) {
  const cell = (tag) => (content, at) => el(tag, { class: textual.includes(at) ? "t" : false }, content ?? "");
  const body = rows.map((row) => el("tr", row.attributes ?? {}, (row.cells ?? row).map(cell("td"))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, columns.map(cell("th")))), el("tbody", {}, body)));
}

function kernelsPage(wanted) {
  const most = Math.max(1, ...DATA.kernels.map((k) => k.bytes));
  const timed = DATA.kernels.some((k) => k.measured != null);
  const below = el("div");
  const rows = DATA.kernels.map((kernel) => {
    const open = () => {
      tbody.querySelectorAll("tr").forEach((tr) => tr.classList.toggle("chosen", tr === row.tr));
      below.replaceChildren(...kernelPanes(kernel));
    };
    const row = {
      cells: [kernel.name, kernel.direction, human(kernel.bytes), meter(kernel.bytes / most), kernel.call ? "" : micro(kernel.predicted),
        ...(timed ? [micro(kernel.measured)] : []), kernel.strategy + (kernel.when ? ` when ${kernel.when}` : ""), kernel.where],
      attributes: { tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() }, open, kernel,
    };
    return row;
  });
  const columns = ["kernel", "direction", "bytes", "", "predicted", ...(timed ? ["measured"] : []), "strategy", "line"];
  const shown = table(columns, rows, [0, 1, columns.length - 2, columns.length - 1]);
  const tbody = shown.querySelector("tbody");
  rows.forEach((row, at) => (row.tr = tbody.children[at]));
  const programs = DATA.programs.map((p) => el("div", {},
    el("p", {}, `${p.direction}: moves ${human(p.moved)}; the floor, each input read once and each output written once, is ${human(p.floor)}.`),
    el("ul", {}, p.missed.map((line) => el("li", {}, line)))));
  const largest = rows.filter((row) => !row.kernel.call).sort((a, b) => b.kernel.bytes - a.kernel.bytes)[0];
  const first = rows.find((row) => row.kernel.name === wanted) ?? largest ?? rows[0];
  if (first) first.open();
  return el("div", { class: "page" }, el("p", { class: "note" }, `bytes and times on ${DATA.device}${atSizes() ? ` at ${atSizes()}` : ""}`),
    shown, below, el("h2", {}, "Why these kernels are not fewer"), programs);
}

/** Statements, generated text and the user's lines of a kernel side by side; what belongs together lights up. */
function kernelPanes(kernel) {
  const hot = [];
  const heat = (keys) => {
    hot.splice(0).forEach((each) => each.classList.remove("hot"));
    for (const key of keys) for (const each of marked.get(key) ?? []) each.classList.add("hot"), hot.push(each);
  };
  const marked = new Map();
  const mark = (element, ...keys) => {
    for (const key of keys) marked.set(key, [...(marked.get(key) ?? []), element]);
    const light = () => heat(keys);
    element.addEventListener("mouseenter", light);
    element.addEventListener("focus", light);
    return element;
  };
  const whereOf = (id) => (id == null ? "" : whereById().get(id) ?? "");
  let statement = 0;
  const ir = kernel.ir.split("\n").map((line, at, all) => {
    const own = at > 0 && line !== "}" && at < all.length && line.trim() !== "phase" && !kernel.call;
    if (!own) return el("span", { class: "l" }, line);
    const id = kernel.of[statement++], where = whereOf(id);
    const value = /^ *%(\d+) =/.exec(line)?.[1];
    return mark(el("span", { class: "l", tabindex: -1, title: id == null ? false : `value %${id}${where ? `, ${where}` : ""}` }, line),
      ...(value === undefined ? [] : [`v${value}`]), ...(where ? [`line ${where}`] : []));
  });
  const source = sourceOf(kernel).split("\n").map((line) => el("span", { class: "l" },
    line.split(/(\bv\d+\b)/).map((word, at) => (at % 2 ? mark(el("span", { class: "v" }, word), word) : word))));
  const lines = [...new Set([kernel.where, ...kernel.of.map(whereOf)].filter(Boolean))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const own = lines.map((where) => mark(el("span", { class: "l", tabindex: 0 }, `${where}  ${DATA.code[where] ?? ""}`), `line ${where}`));
  const pane = (title, content) => el("div", {}, el("h2", {}, title), el("pre", {}, content));
  return [el("h2", {}, kernel.name), el("div", { class: "panes" }, pane("Your lines", own.length ? own : ["(none is known)"]),
    pane("Statements", ir), pane("Generated text", sourceOf(kernel) ? source : ["(a library call)"]))];
}

let wheres = null;
function whereById() {
  if (!wheres) {
    wheres = new Map();
    for (const stage of graphStages()) for (const v of graphOf(stage).values.values()) if (v.where && v.op !== "input") wheres.set(Number(v.name.slice(1)), v.where);
    for (const r of DATA.residuals) if (r.id != null && wheres.has(r.id)) wheres.set(r.name, wheres.get(r.id));
  }
  return wheres;
}

// -- charts --

const COLOURS = ["#3b78d8", "#d9822b", "#2f9e55", "#a04fc2", "#c94f5c", "#5c8a8a", "#9a8c2f", "#7a6be0"];

/** Lines over logarithmic axes; {name: [[x, y]...]}. */
function chart(series, label, at, width = 520, height = 260) {
  const [left, bottom, right, top] = [64, 34, 120, 12];
  const points = Object.values(series).flat().filter(([, y]) => y > 0);
  if (!points.length) return el("p", { class: "note" }, "no estimates");
  const span = (k) => [Math.min(...points.map((p) => p[k])), Math.max(...points.map((p) => p[k]))];
  const [[x0, x1], [y0, y1]] = [span(0), span(1)];
  const across = (x) => left + ((Math.log(x) - Math.log(x0)) / (Math.log(x1 / x0) || 1)) * (width - left - right);
  const up = (y) => height - bottom - ((Math.log(y) - Math.log(y0)) / (Math.log(y1 / y0) || 1)) * (height - top - bottom);
  const parts = [el("line", { x1: left, y1: height - bottom, x2: width - right, y2: height - bottom, stroke: "currentColor" }),
    el("line", { x1: left, y1: top, x2: left, y2: height - bottom, stroke: "currentColor" })];
  for (let tick = 10 ** Math.ceil(Math.log10(x0)); tick <= x1; tick *= 10)
    parts.push(el("text", { x: across(tick), y: height - bottom + 14, "text-anchor": "middle" }, tick >= 1e6 ? `${tick / 1e6}M` : tick >= 1000 ? `${tick / 1000}k` : `${tick}`));
  for (let tick = 10 ** Math.ceil(Math.log10(y0)); tick <= y1; tick *= 10)
    parts.push(el("text", { x: left - 6, y: up(tick) + 4, "text-anchor": "end" }, micro(tick)));
  parts.push(el("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, label));
  let free = 0;
  const ends = Object.entries(series).map(([name, line], i) => [name, line.filter(([, y]) => y > 0), COLOURS[i % COLOURS.length]]).filter(([, line]) => line.length);
  ends.sort((a, b) => up(a[1].at(-1)[1]) - up(b[1].at(-1)[1]));
  for (const [name, line, colour] of ends) {
    parts.push(el("polyline", { fill: "none", stroke: colour, "stroke-width": 1.8, points: line.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ") }));
    free = Math.max(free + 13, up(line.at(-1)[1]) + 4);
    const text = el("text", { x: width - right + 6, y: free }, name);
    text.style.fill = colour;
    parts.push(text);
  }
  if (at >= x0 && at <= x1) parts.push(el("line", { x1: across(at), y1: top, x2: across(at), y2: height - bottom, stroke: "currentColor", "stroke-dasharray": "3 3" }));
  return el("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, parts);
}

function reductionsPage() {
  if (!DATA.combines.length) return el("div", { class: "page" }, el("p", {}, "Nothing is combined across rows: no choice was made."));
  const dims = { ...DATA.dims }, redraw = [];
  const sliders = Object.keys(dims).map((name) => {
    const said = el("output", {}, String(dims[name]));
    const input = el("input", { type: "range", min: 0, max: 24, step: 0.25, value: Math.log2(Math.max(1, dims[name])), "aria-label": `size ${name}` });
    input.addEventListener("input", () => {
      dims[name] = Math.round(2 ** Number(input.value));
      said.textContent = dims[name];
      redraw.forEach((draw) => draw());
    });
    return el("label", {}, `${name} `, input, said);
  });
  const blocks = DATA.combines.map((combine) => {
    const picked = el("p"), curves = el("div");
    const draw = () => {
      const found = combine.cases.find(([when]) => holds(when, dims));
      const all = combine.cases.map(([when, way]) => `${way}${when ? ` when ${when}` : combine.cases.length > 1 ? " otherwise" : ""}`).join("; ");
      picked.replaceChildren("here: ", el("strong", {}, found ? found[1] : "?"), el("span", { class: "note" }, `  (the program has: ${all})`));
      curves.replaceChildren(...Object.entries(combine.curves).map(([name, { at, seconds }]) =>
        chart(Object.fromEntries(Object.entries(seconds).map(([way, line]) => [way, line.map((y, i) => [at[i], y])])), `${name}, the others as given`, dims[name])));
    };
    redraw.push(draw);
    draw();
    const rows = combine.estimates.map((e) => ({ cells: [e.strategy, human(e.bytes), micro(e.seconds), e.why], attributes: { class: e.strategy === combine.pick ? "pick" : false } }));
    return el("section", {}, el("h2", {}, `${combine.buffer} by ${combine.kernel} (${combine.direction})`), picked,
      table(["strategy", "bytes", "predicted", "why"], rows, [0, 3]), curves);
  });
  return el("div", { class: "page" }, el("p", { class: "sliders" }, sliders),
    el("p", { class: "note" }, `Estimates on ${DATA.device}${atSizes() ? ` at ${atSizes()}` : ""}; the sliders move the predicates that the program tests at every call.`), blocks);
}

/** Bytes alive during each step, a band for each buffer. */
function memoryChart(program) {
  const [width, height, left, bottom] = [900, 260, 70, 30];
  const steps = Math.max(1, program.steps.length), alive = new Array(steps).fill(0);
  for (const b of program.buffers) for (let s = b.first; s <= b.last; s++) alive[s] += b.bytes;
  const most = Math.max(1, ...alive), floor = new Array(steps).fill(0);
  const across = (s) => left + (s / steps) * (width - left - 10), up = (n) => height - bottom - (n / most) * (height - bottom - 14);
  const bands = program.buffers.slice().sort((a, b) => a.first - b.first || b.bytes - a.bytes).map((b, i) => {
    let above = "", below = "";
    for (let s = b.first; s <= b.last; s++) {
      above += `${s === b.first ? "M" : "L"}${across(s).toFixed(1)} ${up(floor[s] + b.bytes).toFixed(1)}L${across(s + 1).toFixed(1)} ${up(floor[s] + b.bytes).toFixed(1)}`;
      below = `L${across(s + 1).toFixed(1)} ${up(floor[s]).toFixed(1)}L${across(s).toFixed(1)} ${up(floor[s]).toFixed(1)}${below}`;
      floor[s] += b.bytes;
    }
    return el("path", { d: `${above}${below}Z`, fill: COLOURS[i % COLOURS.length], opacity: 0.75, stroke: "var(--bg)" },
      el("title", {}, `${b.kind} ${b.name}: ${b.type}, ${human(b.bytes)}, steps ${b.first} to ${b.last}`));
  });
  return el("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `bytes alive by step of ${program.direction}` },
    bands, el("text", { x: 4, y: up(most) + 4 }, human(most)), el("text", { x: 4, y: up(0) + 4 }, "0"),
    el("text", { x: (left + width) / 2, y: height - 8, "text-anchor": "middle" }, `${steps} steps of ${program.direction}`));
}

function memoryPage() {
  const most = Math.max(1, ...DATA.residuals.map((r) => r.bytes));
  const rows = DATA.residuals.slice().sort((a, b) => b.bytes - a.bytes).map((r) => [r.name, r.type, human(r.bytes), meter(r.bytes / most), r.why]);
  return el("div", { class: "page" }, el("p", { class: "note" }, `What forward and backward allocate${atSizes() ? ` at ${atSizes()}` : ""}; inputs are the caller's.`),
    DATA.programs.map((program) => el("section", {}, el("h2", {}, program.direction), memoryChart(program),
      table(["buffer", "kind", "type", "bytes", "steps"], program.buffers.slice(0, 30).map((b) => [b.name, b.kind, b.type, human(b.bytes), `${b.first} to ${b.last}`]), [0, 1, 2]))),
    el("h2", {}, "Residuals: kept by forward for backward"), table(["residual", "type", "bytes", "", "why"], rows, [0, 1, 4]));
}
