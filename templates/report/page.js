// -- the page ----------------------------------------------------------------------------------------------------------

const DATA = JSON.parse(document.getElementById("data").textContent);
const TEXTS = [...document.querySelectorAll("pre[data-stage]")];
const SOURCES = new Map([...document.querySelectorAll("pre[data-source]")].map((pre) => [pre.dataset.source, pre]));
const sourceOf = (kernel) => SOURCES.get(`${kernel.direction} ${kernel.name}`)?.textContent ?? "";
const main = document.getElementById("view"), texts = document.getElementById("texts"), search = document.getElementById("search");

const parsed = new Map();
const graphStages = () => DATA.stages.filter((stage) => stage.kind === "graph");
const textAt = (at) => {
  const { base } = TEXTS[at].dataset, text = TEXTS[at].textContent;
  return base === undefined ? text : patched(textAt(Number(base)), text);
};
const textOf = (stage) => textAt(DATA.stages.indexOf(stage));
function graphOf(stage) {
  if (!parsed.has(stage)) parsed.set(stage, readGraph(textOf(stage)));
  return parsed.get(stage);
}

const state = { tab: "graph", stage: 0, value: undefined, beside: true };

/** The stage that a stage's changes are counted from. */
const before = (at) => (DATA.stages[at].changes ? DATA.stages[at - 1] : null);

/** Who made a value, as of a stage. */
function makerOf(name, at) {
  let maker = 0;
  for (let s = 0; s <= at; s++) maker = DATA.stages[s].made[name.slice(1)] ?? maker;
  return DATA.makers[maker];
}

const signed = (changes) => [["added", "+"], ["removed", "\u2212"], ["rewritten", "~"]].map(([kind, sign], i) =>
  (changes[i] ? el("span", { class: kind }, ` ${sign}${changes[i]}`) : null));

function stageList() {
  const longest = Math.max(1e-9, ...DATA.stages.map((stage) => stage.ms));
  return el("div", { class: "stages", "aria-label": "Passes" }, DATA.stages.map((stage, at) =>
    el("button", { type: "button", class: "stage", "aria-pressed": String(at === state.stage), onclick: () => go({ stage: at }) },
      el("span", {}, stage.name.split(/(?<=\.)/).map((part) => [el("wbr"), part])),
      el("small", {}, `${stage.size} ${stage.kind === "graph" ? "values" : "steps"}, ${stage.ms.toFixed(1)} ms`, stage.changes ? signed(stage.changes) : null),
      el("span", { class: "bar", style: `width:${((100 * stage.ms) / longest).toFixed(1)}%` }))));
}

let views = [];
function graphPage() {
  const stage = DATA.stages[state.stage], details = el("div", { class: "details", "aria-live": "polite" });
  const canvases = el("div", { class: "canvases" });
  const chosen = (name, view) => {
    state.value = name;
    details.replaceChildren(...about(name, view.stageAt));
    for (const other of views) if (other !== view) other.highlight(counterpart(name, view, other));
    view.highlight(name);
    remember();
  };
  views = [];
  if (stage.kind === "program") canvases.append(programText(state.stage));
  else {
    const both = state.beside && stage.name.endsWith(".partition") ? DATA.stages.map((s, at) => [s, at]).filter(([s]) => s.name.endsWith(".partition")) : [[stage, state.stage]];
    for (const [each, at] of both) {
      const past = before(at), graph = graphOf(each);
      const { marks } = past && past.kind === "graph" ? difference(graphOf(past), graph) : { marks: new Map() };
      for (const value of graph.values.values()) value.gradient = makerOf(value.name, at).startsWith("differentiate: ");
      const view = new View(each.name, graph, marks, chosen);
      view.stageAt = at;
      views.push(view);
      canvases.append(view.root);
    }
  }
  details.append(...summaryOf(state.stage));
  main.replaceChildren(el("div", { class: "graph" }, stageList(), canvases, details));
  views.forEach((view) => view.home()); // their sizes are known only now
  const view = views.find((each) => each.graph.values.has(state.value));
  if (view) view.show(state.value), chosen(state.value, view);
}

/** A residual's value in the other of forward and backward. */
function counterpart(name, view, other) {
  if (other.graph.values.has(name)) return name;
  const out = view.graph.outputs.find(([, value]) => value === name);
  if (out && other.graph.values.has(`%${out[0]}`)) return `%${out[0]}`;
  return other.graph.outputs.find(([output]) => `%${output}` === name)?.[1];
}

function programText(at) {
  const past = before(at), known = new Set(past ? textOf(past).split("\n") : []);
  return el("div", { class: "canvas" }, el("pre", {}, textOf(DATA.stages[at]).split("\n").map((line) =>
    el("span", { class: past && !known.has(line) ? "l new" : "l" }, line))));
}

function summaryOf(at) {
  const stage = DATA.stages[at], past = before(at), parts = [el("h2", {}, stage.name)];
  if (!past) return [...parts, el("p", { class: "note" }, "Click a value. Wheel and drag, or + \u2212 0 and the arrow keys, move; / searches; [ and ] go through the passes.")];
  const graphs = stage.kind === "graph" ? [graphOf(past), graphOf(stage)] : null;
  const { marks, removed: gone } = graphs ? difference(...graphs) : { marks: new Map(), removed: [] };
  const named = (kind) => [...marks].filter(([, mark]) => mark === kind).map(([name]) => name);
  const [added, removed, rewritten] = graphs ? [named("added").length, gone.length, named("rewritten").length] : stage.changes;
  if (!added && !removed && !rewritten) return [...parts, el("p", { id: "unchanged" }, "changed nothing")];
  parts.push(el("p", {}, el("span", { class: "added", id: "added" }, `${added} added`), ", ", el("span", { class: "removed", id: "removed" }, `${removed} removed`), ", ", el("span", { class: "rewritten", id: "rewritten" }, `${rewritten} rewritten`)));
  if (!graphs) return parts;
  const [old, now] = graphs;
  const list = (title, names, lines) => names.length ? [el("h2", { class: title }, title), el("pre", {}, names.slice(0, 200).map(lines), names.length > 200 ? `... ${names.length - 200} more` : null)] : [];
  const rule = (name) => { const maker = makerOf(name, at); return maker.startsWith(stage.name) || marks.get(name) === "added" ? maker : ""; };
  const line = (sign, name, value) => el("span", { class: "l" }, `${sign} `, link(name, at), ` ${value.body}`, rule(name) && sign === "+" ? el("span", { class: "note" }, `  by ${rule(name)}`) : null);
  return [...parts, ...list("rewritten", named("rewritten"), (name) => [el("span", { class: "l removed" }, `\u2212 ${name} ${old.values.get(name).body}`), line("+", name, now.values.get(name))]),
    ...list("added", named("added"), (name) => line("+", name, now.values.get(name))), ...list("removed", gone, (name) => el("span", { class: "l removed" }, `\u2212 ${name} ${old.values.get(name).body}`))];
}

const link = (name, at = state.stage) => el("a", { class: "go", tabindex: 0, role: "link", onclick: () => go({ tab: "graph", stage: at, value: name }),
  onkeydown: (event) => event.key === "Enter" && go({ tab: "graph", stage: at, value: name }) }, name);

/** Everything about a value. */
function about(name, at) {
  const stage = DATA.stages[at], value = graphOf(stage).values.get(name);
  if (!value) return [el("p", {}, `${name} is not in ${stage.name}`)];
  const maker = makerOf(name, at), id = Number(name.slice(1));
  const facts = [["type", value.type], ["op", value.op], value.attributes && ["attributes", value.attributes], value.called && ["your name", value.called],
    value.scope && ["scope", value.scope], value.where && ["line", el("span", {}, value.where, DATA.code[value.where] ? el("pre", {}, DATA.code[value.where]) : null)],
    DATA.composites[id] && ["part of", DATA.composites[id]], value.op !== "input" && ["made by", maker || "you"],
    value.operands.length && ["operands", el("span", {}, value.operands.flatMap((o, i) => [i ? ", " : "", link(o, at)]))],
    value.users.length && ["used by", el("span", {}, value.users.flatMap((u, i) => [i ? ", " : "", link(u, at)]))]].filter(Boolean);
  const kernels = DATA.kernels.filter((k) => k.of.includes(id) && value.op !== "input");
  if (kernels.length) facts.push(["kernels", el("span", {}, kernels.map((k) => el("div", {}, el("a", { class: "go", tabindex: 0, onclick: () => go({ tab: "kernels", kernel: k.name }) }, k.name), ` ${k.direction}`)))]);
  const residual = DATA.residuals.find((r) => r.id === id || `%${r.name}` === name);
  if (residual) facts.push(["kept for backward", `${residual.name}, ${human(residual.bytes)}: ${residual.why}`]);
  let last = null;
  const past = DATA.stages.map((each, s) => {
    if (each.kind !== "graph") return null;
    const there = graphOf(each).values.get(name);
    const said = there ? (last && last.body === there.body ? "the same" : there.body) : last ? "gone" : null;
    last = there ?? (last && said === "gone" ? null : last);
    return said && el("span", { class: "l" }, el("a", { class: "go", tabindex: 0, onclick: () => go({ stage: s, value: name }) }, each.name), `  ${said}`);
  });
  return [el("h2", { class: "mono" }, name), el("dl", {}, facts.flatMap(([term, what]) => [el("dt", {}, term), el("dd", {}, what)])), el("h2", {}, "Through the passes"), el("pre", {}, past)];
}

// -- tabs, search, keys --

const TABS = { graph: graphPage, kernels: () => main.replaceChildren(kernelsPage(state.kernel)), reductions: () => main.replaceChildren(reductionsPage()),
  memory: () => main.replaceChildren(memoryPage()), text: () => main.replaceChildren() };

function go(change) {
  Object.assign(state, "stage" in change && !("value" in change) ? { ...change } : change);
  document.querySelectorAll("#tabs button").forEach((tab) => tab.setAttribute("aria-selected", String(tab.dataset.tab === state.tab)));
  texts.classList.toggle("shown", state.tab === "text");
  TABS[state.tab]();
  remember();
}

const remember = () => history.replaceState(null, "", `#${new URLSearchParams({ tab: state.tab, stage: DATA.stages[state.stage].name, ...(state.value ? { value: state.value } : {}) })}`);

function recalled() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const stage = DATA.stages.findIndex((each) => each.name === asked.get("stage"));
  const joint = DATA.stages.findIndex((each) => each.name === "joint");
  return { tab: asked.get("tab") in TABS ? asked.get("tab") : "graph", stage: stage >= 0 ? stage : Math.max(0, joint), value: asked.get("value") ?? undefined };
}

let results = null;
function find() {
  results?.remove();
  const word = search.value.trim().toLowerCase();
  if (word.length < 1) return;
  const at = DATA.stages[state.stage].kind === "graph" ? state.stage : DATA.stages.findIndex((s) => s.kind === "graph");
  const values = [...graphOf(DATA.stages[at]).values.values()].filter((v) => `${v.name} ${v.op} ${v.called} ${v.scope} ${v.where} ${v.type}`.toLowerCase().includes(word));
  const kernels = DATA.kernels.filter((k) => `${k.name} ${k.where} ${k.strategy}`.toLowerCase().includes(word));
  results = el("div", { class: "results", role: "listbox", "aria-label": "Found" },
    values.slice(0, 60).map((v) => el("a", { class: "go", tabindex: 0, "data-value": v.name, onclick: () => (results.remove(), go({ tab: "graph", stage: at, value: v.name })) }, `${v.name} ${v.op} ${v.called} ${v.where}`)),
    kernels.slice(0, 20).map((k) => el("a", { class: "go", tabindex: 0, onclick: () => (results.remove(), go({ tab: "kernels", kernel: k.name })) }, `kernel ${k.name}`)),
    values.length + kernels.length ? (values.length > 60 ? el("div", { class: "note" }, `${values.length} values in all`) : null) : el("div", {}, "nothing found"));
  search.after(results);
}

function dark(on) {
  document.documentElement.classList.toggle("dark", on);
}

function begin() {
  document.body.classList.add("app");
  const tabs = document.getElementById("tabs"), theme = document.getElementById("theme");
  for (const name of Object.keys(TABS)) tabs.append(el("button", { type: "button", role: "tab", "data-tab": name, onclick: () => go({ tab: name }) }, name));
  search.hidden = theme.hidden = false;
  dark(matchMedia("(prefers-color-scheme: dark)").matches);
  theme.addEventListener("click", () => dark(!document.documentElement.classList.contains("dark")));
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") results?.querySelector("a")?.click();
    if (event.key === "Escape") (search.value = ""), find(), search.blur();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target === search || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") event.preventDefault(), search.focus();
    const step = { "[": -1, "]": 1 }[event.key];
    if (step && state.tab === "graph") go({ stage: Math.max(0, Math.min(DATA.stages.length - 1, state.stage + step)) });
  });
  go(recalled());
}

begin();
