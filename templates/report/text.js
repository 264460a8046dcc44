// -- the text of a graph, read as gradc.ir.text reads it: one value a line -------------------------------------------

/** A line cut at `separator` where no quote, bracket or brace is open. */
function cut(text, separator) {
  const parts = [];
  let depth = 0, quoted = false, from = 0;
  for (let at = 0; at < text.length; at++) {
    const c = text[at];
    if (quoted) {
      if (c === "\\") at++;
      else if (c === '"') quoted = false;
    } else if (c === '"') quoted = true;
    else if (depth === 0 && text.startsWith(separator, at)) {
      parts.push(text.slice(from, at));
      from = at + separator.length;
      at = from - 1;
    } else if ("([{".includes(c)) depth++;
    else if (")]}".includes(c)) depth--;
  }
  parts.push(text.slice(from));
  return parts;
}

/** "scope/name  file:line", or either part alone. */
function readNote(comment) {
  let [first, where = ""] = comment.split("  ");
  if (!where && /:\d+$/.test(first)) [first, where] = ["", first];
  const slash = first.lastIndexOf("/");
  return { scope: slash < 0 ? "" : first.slice(0, slash), name: first.slice(slash + 1), where: where.trim() };
}

/** {name, inputs, values: Map name -> {name, type, op, operands, attributes, body, scope, called, where}, outputs}. */
function readGraph(text) {
  const lines = text.split("\n");
  const values = new Map(), outputs = [], inputs = [];
  const add = (value) => values.set(value.name, { users: [], scope: "", called: "", where: "", attributes: "", ...value });
  const open = lines[0].indexOf("("), close = lines[0].lastIndexOf(")");
  for (const part of open < 0 ? [] : cut(lines[0].slice(open + 1, close), ", ")) {
    const colon = part.indexOf(": ");
    if (colon < 0) continue;
    const [name, type] = [part.slice(0, colon), part.slice(colon + 2)];
    add({ name, type, op: "input", operands: [], body: type });
    inputs.push(name);
  }
  for (const line of lines.slice(1)) {
    const head = /^ {2}(%[\w.]+): (\S+) = (\w+)/.exec(line);
    if (!head) {
      if (line.startsWith("  return "))
        for (const part of cut(line.slice(9), ", ")) {
          const equal = part.lastIndexOf("=");
          outputs.push([part.slice(0, equal), part.slice(equal + 1)]);
        }
      continue;
    }
    const rest = line.slice(head[0].length); // only a quoted text can hold the sign of a comment
    const [body, comment = ""] = rest.includes('"') ? cut(rest, "  # ") : rest.split("  # ");
    const brace = body.indexOf(" {");
    const listed = (brace < 0 ? body : body.slice(0, brace)).trim();
    const note = readNote(comment);
    add({
      name: head[1], type: head[2], op: head[3],
      operands: listed ? listed.split(", ") : [],
      attributes: brace < 0 ? "" : body.slice(brace + 2, -1),
      body: `${head[2]} = ${head[3]}${body}`,
      scope: note.scope, called: note.name, where: note.where,
    });
  }
  for (const value of values.values())
    for (const operand of new Set(value.operands)) values.get(operand)?.users.push(value.name);
  return { values, outputs, inputs };
}

/** name -> "added" or "rewritten" for the values of `now`, and the names that only `before` has. */
function difference(before, now) {
  const marks = new Map();
  for (const [name, value] of now.values) {
    const old = before.values.get(name);
    if (!old) marks.set(name, "added");
    else if (old.body !== value.body) marks.set(name, "rewritten");
  }
  return { marks, removed: [...before.values.keys()].filter((name) => !now.values.has(name)) };
}

// -- sizes and predicates, as gradc.ir.size_text reads them -----------------------------------------------------------

/** The number that a size such as `4*(N//2) + max(V, 3)` is. */
function size(text, dims) {
  const tokens = text.match(/\/\/|[A-Za-z_]\w*|\d+|[-+*(),]/g) ?? [];
  let at = 0;
  const next = () => tokens[at++];
  const factor = () => {
    const token = next();
    if (token === "-") return -factor();
    if (token === "(") {
      const inner = sum();
      next();
      return inner;
    }
    if (token === "max" || token === "min") {
      next();
      const left = sum();
      next();
      const right = sum();
      next();
      return Math[token](left, right);
    }
    return /^\d/.test(token) ? Number(token) : dims[token];
  };
  const product = () => {
    let left = factor();
    while (tokens[at] === "*" || tokens[at] === "//") left = next() === "*" ? left * factor() : Math.floor(left / factor());
    return left;
  };
  const sum = () => {
    let left = product();
    while (tokens[at] === "+" || tokens[at] === "-") left += next() === "+" ? product() : -product();
    return left;
  };
  return sum();
}

/** Whether `V >= 2*N + 1 and N <= 7 or V == 3` holds; "" always does. */
function holds(predicate, dims) {
  const compared = (text) => {
    const [, left, relation, right] = /^(.*?)\s*(>=|<=|==)\s*(.*)$/.exec(text);
    const [a, b] = [size(left, dims), size(right, dims)];
    return relation === "==" ? a === b : relation === ">=" ? a >= b : a <= b;
  };
  return !predicate || predicate.split(" or ").some((each) => each.split(" and ").every(compared));
}

/** A text with a unified diff applied to it that has no context. */
function patched(text, difference) {
  const lines = text.split("\n"), made = [];
  let at = 0;
  for (const line of difference ? difference.split("\n") : []) {
    const head = /^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@/.exec(line);
    if (head) {
      const count = Number(head[2] ?? 1), start = count ? head[1] - 1 : Number(head[1]);
      made.push(...lines.slice(at, start));
      at = start + count;
    } else if (line[0] === "+") made.push(line.slice(1));
  }
  return made.concat(lines.slice(at)).join("\n");
}
