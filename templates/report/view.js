// -- a graph on the page: folding, drawing, moving --------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const MOST_SHOWN = 150;
/** The graph's units of a pixel from which on labels cannot be read. */
const SMALLEST = 6;

/** An element with attributes, and children that are nodes or text (never markup). */
function el(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "rect", "path", "text", "title", "line", "circle", "polyline"].includes(tag);
  const made = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.flat(Infinity).filter((child) => child != null));
  return made;
}

/** The folders that a value lies in, outermost first: its scopes, its line, its composite. */
function foldersOf(value) {
  return (value.folders ??= foldersFrom(value));
}

function foldersFrom(value) {
  if (value.op === "input") return [];
  const path = value.scope ? value.scope.split("/") : [];
  if (value.where) path.push(value.where);
  const composite = DATA.composites[value.name.slice(1)];
  if (composite) path.push(composite);
  return path.map((_, depth) => path.slice(0, depth + 1).join(" \u203a "));
}

/** Which folders are closed at first: the outermost ones, where not everything can be shown. */
function closedAtFirst(graph) {
  const closed = new Set();
  if (graph.values.size > MOST_SHOWN)
    for (const value of graph.values.values()) {
      const [outer] = foldersOf(value);
      if (outer) closed.add(outer);
    }
  return closed;
}

/** The graph with closed folders as one node each: {nodes, edges}. */
function folded(graph, closed) {
  const members = new Map(), inside = new Map();
  for (const value of graph.values.values()) {
    const folder = foldersOf(value).find((name) => closed.has(name));
    inside.set(value.name, folder ?? value.name);
    if (!folder) continue;
    if (!members.has(folder)) members.set(folder, []);
    members.get(folder).push(value);
  }
  const nodes = [], at = new Map();
  for (const value of graph.values.values()) {
    const id = inside.get(value.name);
    if (at.has(id)) continue;
    at.set(id, nodes.length);
    const group = members.get(id);
    nodes.push(group && group.length > 1 ? { id, group } : { id, value });
  }
  const seen = new Set(), edges = [];
  for (const value of graph.values.values())
    for (const operand of value.operands) {
      if (!inside.has(operand)) continue;
      const [from, to] = [at.get(inside.get(operand)), at.get(inside.get(value.name))];
      const key = from * 1e6 + to;
      if (from !== to && !seen.has(key)) seen.add(key), edges.push([from, to]);
    }
  for (const [name, result] of graph.outputs) {
    if (!inside.has(result)) continue;
    edges.push([at.get(inside.get(result)), nodes.length]);
    nodes.push({ id: `output ${name}`, output: name, of: result });
  }
  return { nodes, edges, at, inside };
}

const LIBRARY = new Set(["matmul", "argsort", "sort"]);

function kindOf(node) {
  if (node.output) return "output";
  if (node.group) return node.group.every(isGradient) ? "group grad" : "group";
  const { op } = node.value;
  if (op === "input") return "input";
  if (op === "constant" || op === "iota" || op === "dim") return "const";
  return (LIBRARY.has(op) ? "lib " : "") + (isGradient(node.value) ? "grad" : "");
}

/** What only a gradient needs: the derivative of gelu makes values that gelu itself has, too. */
const isGradient = (value) => {
  const composite = DATA.composites[value.name.slice(1)];
  return composite ? composite.endsWith("_grad") : value.gradient === true;
};

function labelsOf(node) {
  if (node.output) return [node.output, "output"];
  if (node.group) return [node.id.split(" \u203a ").pop(), `${node.group.length} values`];
  const { value } = node;
  if (value.op === "input") return [value.name, value.type];
  return [`${value.op}${value.called ? ` ${value.called}` : ""}`, `${value.name}: ${value.type}`];
}

const short = (text, most = 34) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

/** A canvas with one graph. */
class View {
  constructor(title, graph, marks, chosen) {
    Object.assign(this, { title, graph, marks, chosen, closed: closedAtFirst(graph), box: null });
    this.svg = el("svg", { tabindex: 0, role: "img", "aria-label": title });
    this.count = el("span", { class: "note" });
    const zoom = (factor) => () => this.zoom(factor);
    this.root = el("div", { class: "canvas" },
      el("div", { class: "tools" }, el("strong", {}, title),
        el("button", { type: "button", onclick: () => this.fold(true), title: "close all folders" }, "fold"),
        el("button", { type: "button", onclick: () => this.fold(false), title: "open all folders" }, "unfold"),
        el("button", { type: "button", onclick: zoom(0.8), "aria-label": "nearer" }, "+"),
        el("button", { type: "button", onclick: zoom(1.25), "aria-label": "farther" }, "\u2212"),
        el("button", { type: "button", onclick: () => this.fit(), title: "everything ( 0 )" }, "fit"), this.count),
      this.svg);
    this.listen();
    this.draw();
  }

  fold(close) {
    this.closed = new Set();
    if (close)
      for (const value of this.graph.values.values()) foldersOf(value).slice(0, 1).forEach((name) => this.closed.add(name));
    this.draw();
    this.home();
  }

  draw() {
    const { nodes, edges, at, inside } = folded(this.graph, this.closed);
    Object.assign(this, { nodes, at, inside });
    for (const node of nodes) {
      node.labels = labelsOf(node).map((text) => short(text));
      node.w = Math.max(48, 7 * Math.max(node.labels[0].length, 0.87 * node.labels[1].length) + 14);
      node.h = 32;
    }
    const { placed, bends, back } = arranged(nodes, edges);
    this.placed = placed;
    this.lines = edges.map(([from, to], e) => {
      const way = [{ x: placed[from].x, y: placed[from].y + 16 }, ...(bends[e] ?? []), { x: placed[to].x, y: placed[to].y - 16 }];
      let d = `M${way[0].x.toFixed(1)} ${way[0].y.toFixed(1)}`;
      for (let i = 1; i < way.length; i++) {
        const [a, b] = [way[i - 1], way[i]], middle = (a.y + b.y) / 2;
        d += `C${a.x.toFixed(1)} ${middle.toFixed(1)} ${b.x.toFixed(1)} ${middle.toFixed(1)} ${b.x.toFixed(1)} ${b.y.toFixed(1)}`;
      }
      const path = el("path", { class: back.has(e) ? "edge back" : "edge", d });
      path.ends = [from, to];
      return path;
    });
    this.boxes = nodes.map((node, i) => {
      const { x, y } = placed[i];
      const box = el("g", { class: `node ${kindOf(node)} ${this.markOf(node)}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` },
        el("title", {}, node.group ? `${node.id}: click opens it` : node.value ? node.value.body : node.id),
        el("rect", { x: -node.w / 2, y: -16, width: node.w, height: 32, rx: 4 }));
      box.addEventListener("click", () => this.moved || this.clicked(node));
      return box;
    });
    this.svg.replaceChildren(el("g", {}, this.lines), el("g", {}, this.boxes));
    const hidden = this.graph.values.size - nodes.filter((n) => n.value).length;
    this.count.textContent = `${this.graph.values.size} values${hidden > 0 ? `, ${hidden} of them in folders` : ""}`;
    this.extent = this.bounds();
    if (this.box) this.frame();
    else this.home();
    this.highlight(this.current);
  }

  markOf(node) {
    if (node.value) return this.marks.get(node.value.name) ?? "";
    const found = (node.group ?? []).map((value) => this.marks.get(value.name));
    return found.includes("added") ? "added" : found.includes("rewritten") ? "rewritten" : "";
  }

  clicked(node) {
    if (node.group) {
      this.closed.delete(node.id);
      const depth = node.id.split(" \u203a ").length;
      if (node.group.length > MOST_SHOWN)
        node.group.forEach((value) => foldersOf(value).slice(depth, depth + 1).forEach((name) => this.closed.add(name)));
      this.draw();
      this.home();
    } else this.chosen(node.value ? node.value.name : node.of, this);
  }

  /** Opens what hides a value, marks it, and moves to it. */
  show(name, move = true) {
    const value = this.graph.values.get(name);
    if (!value) return false;
    const closed = foldersOf(value).filter((folder) => this.closed.has(folder));
    if (closed.length && (this.folderSize(closed[0]) > 1)) {
      closed.forEach((folder) => this.closed.delete(folder));
      this.draw();
    }
    this.highlight(name);
    const at = this.placed[this.at.get(this.inside.get(name))];
    if (move && at) {
      const { w, h } = this.box;
      const scale = Math.min(1, 900 / w);
      this.box = { x: at.x - (w * scale) / 2, y: at.y - (h * scale) / 2, w: w * scale, h: h * scale };
      this.frame();
    }
    return true;
  }

  folderSize(folder) {
    return [...this.graph.values.values()].filter((value) => foldersOf(value).includes(folder)).length;
  }

  highlight(name) {
    this.current = name;
    const chosen = name === undefined ? -1 : this.at.get(this.inside.get(name));
    this.boxes.forEach((box, i) => box.classList.toggle("chosen", i === chosen));
    this.lines.forEach((line) => line.classList.toggle("near", line.ends.includes(chosen)));
  }

  bounds() {
    let [left, top, right, bottom] = [0, 0, 100, 60];
    this.placed.forEach((p, i) => {
      const half = this.nodes[i].w / 2;
      [left, right] = [Math.min(left, p.x - half), Math.max(right, p.x + half)];
      [top, bottom] = [Math.min(top, p.y - 16), Math.max(bottom, p.y + 16)];
    });
    return { x: left - 20, y: top - 20, w: right - left + 40, h: bottom - top + 40 };
  }

  /** The whole graph, or of a large one the top, at a size that can be read. */
  home() {
    const { width, height } = this.svg.getBoundingClientRect();
    this.box = { ...this.extent };
    if (width && this.unit() > 1.9) {
      const [w, h] = [width * 1.5, height * 1.5];
      this.box = { x: this.extent.x + this.extent.w / 2 - w / 2, y: this.extent.y, w, h };
    }
    this.frame();
  }

  fit() {
    this.box = { ...this.extent };
    this.frame();
  }

  zoom(factor, x = this.box.x + this.box.w / 2, y = this.box.y + this.box.h / 2) {
    const { box } = this;
    this.box = { x: x - (x - box.x) * factor, y: y - (y - box.y) * factor, w: box.w * factor, h: box.h * factor };
    this.frame();
  }

  frame() {
    const { x, y, w, h } = this.box;
    this.svg.setAttribute("viewBox", `${x} ${y} ${w} ${h}`);
    if (this.svg.isConnected && this.unit() < SMALLEST) this.label();
  }

  /** Writes the labels of what is in view: those of thousands of values take a browser longer than all else. */
  label() {
    const { width, height } = this.svg.getBoundingClientRect(), unit = this.unit();
    const [x, y] = [this.box.x + this.box.w / 2, this.box.y + this.box.h / 2];
    this.boxes.forEach((box, i) => {
      const at = this.placed[i], node = this.nodes[i];
      if (node.labelled || Math.abs(at.x - x) > (width * unit + node.w) / 2 || Math.abs(at.y - y) > (height * unit + node.h) / 2) return;
      node.labelled = true;
      box.append(el("text", { "text-anchor": "middle", y: -2 }, node.labels[0]), el("text", { "text-anchor": "middle", y: 11, class: "sub" }, node.labels[1]));
    });
  }

  /** The graph's units of a pixel. */
  unit() {
    const { width, height } = this.svg.getBoundingClientRect();
    return Math.max(this.box.w / (width || 1), this.box.h / (height || 1));
  }

  listen() {
    const { svg } = this;
    let from = null;
    svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      this.zoom(event.deltaY > 0 ? 1.15 : 0.87, point.x, point.y);
    }, { passive: false });
    svg.addEventListener("pointerdown", (event) => {
      from = [event.clientX, event.clientY];
      this.moved = false;
    });
    svg.addEventListener("pointermove", (event) => {
      if (!from || !event.buttons) return;
      const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
      if (!this.moved && Math.hypot(dx, dy) < 4) return;
      this.moved = true;
      const unit = this.unit();
      this.box.x -= dx * unit;
      this.box.y -= dy * unit;
      from = [event.clientX, event.clientY];
      this.frame();
    });
    svg.addEventListener("pointerup", () => (from = null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (step) {
        this.box.x += (step[0] * this.box.w) / 8;
        this.box.y += (step[1] * this.box.h) / 8;
        this.frame();
      } else if (event.key === "+" || event.key === "=") this.zoom(0.8);
      else if (event.key === "-") this.zoom(1.25);
      else if (event.key === "0") this.fit();
      else return;
      event.preventDefault();
    });
  }
}
