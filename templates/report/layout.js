// -- layers: every edge goes down; neighbours stand near each other -----------------------------------------------------

const GAP = 14, LAYER = 54, MOST_BENDS = 6000;

/** Ranks of nodes by the longest way from a source; edges that close a circle are left out and returned. */
function ranked(nodes, edges) {
  const out = nodes.map(() => []), state = new Uint8Array(nodes.length), back = new Set(), order = [];
  edges.forEach(([from, to], e) => out[from].push([to, e]));
  for (let root = 0; root < nodes.length; root++) {
    if (state[root]) continue;
    const stack = [[root, 0]];
    state[root] = 1;
    while (stack.length) {
      const top = stack[stack.length - 1];
      if (top[1] < out[top[0]].length) {
        const [to, e] = out[top[0]][top[1]++];
        if (state[to] === 1) back.add(e);
        else if (!state[to]) {
          state[to] = 1;
          stack.push([to, 0]);
        }
      } else {
        state[top[0]] = 2;
        order.push(top[0]);
        stack.pop();
      }
    }
  }
  const rank = new Int32Array(nodes.length);
  for (const from of order.slice().reverse())
    for (const [to, e] of out[from]) if (!back.has(e)) rank[to] = Math.max(rank[to], rank[from] + 1);
  const feeders = nodes.map(() => []);
  edges.forEach(([from, to], e) => back.has(e) || feeders[to].push(from));
  const alone = new Uint8Array(nodes.length); // a source, or what is made of one source alone
  for (const node of order.slice().reverse()) alone[node] = feeders[node].length === 0 || (feeders[node].length === 1 && alone[feeders[node][0]]);
  for (const from of order) // such stand just above their first user
    if (alone[from]) {
      const below = out[from].filter(([, e]) => !back.has(e)).map(([to]) => rank[to]);
      if (below.length) rank[from] = Math.min(...below) - 1;
    }
  return { rank, back };
}

/** Coordinates {x, y} (of middles) for nodes {w, h}, and the bends of each edge; edges are pairs of positions. */
function arranged(nodes, edges) {
  const { rank, back } = ranked(nodes, edges);
  const points = nodes.map((n) => ({ w: n.w, h: n.h, up: [], down: [], x: 0 }));
  const layers = [];
  const put = (point, r) => ((layers[r] ??= []).push(point), (point.rank = r));
  points.forEach((p, i) => put(p, rank[i]));
  let room = MOST_BENDS;
  const bends = edges.map(([from, to], e) => {
    if (back.has(e)) return null;
    let last = points[from];
    const way = [];
    const long = rank[to] - rank[from] - 1;
    if (long > 0 && (room -= long) >= 0)
      for (let r = rank[from] + 1; r < rank[to]; r++) {
        const bend = { w: 4, h: 0, up: [last], down: [], x: 0 };
        last.down.push(bend);
        put(bend, r);
        way.push(bend);
        last = bend;
      }
    last.down.push(points[to]);
    points[to].up.push(last);
    return way;
  });
  for (let r = 0; r < layers.length; r++) layers[r] ??= [];
  const mean = (near) => near.reduce((total, p) => total + p.at, 0) / near.length;
  const number = (layer) => layer.forEach((p, i) => (p.at = i));
  layers.forEach(number);
  for (let sweep = 0; sweep < 10; sweep++) {
    const down = sweep % 2 === 0;
    const walk = down ? layers : layers.slice().reverse();
    for (const layer of walk) {
      const key = new Map(layer.map((p) => [p, (down ? p.up : p.down).length ? mean(down ? p.up : p.down) : p.at]));
      layer.sort((a, b) => key.get(a) - key.get(b));
      number(layer);
    }
  }
  for (const layer of layers) {
    let x = 0;
    for (const p of layer) {
      p.x = x + p.w / 2;
      x += p.w + GAP;
    }
  }
  for (let sweep = 0; sweep < 12; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : layers.slice().reverse()) pulled(layer, down);
  }
  const y = [];
  let depth = 0;
  layers.forEach((layer, r) => {
    const tall = layer.reduce((most, p) => Math.max(most, p.h), 0);
    y[r] = depth + tall / 2;
    depth += tall + LAYER - 20 + Math.min(40, layer.length);
  });
  const placed = points.map((p) => ({ x: p.x, y: y[p.rank] }));
  return { placed, bends: bends.map((way) => way && way.map((p) => ({ x: p.x, y: y[p.rank] }))), back };
}

/** Moves the nodes of a layer towards the middle of their neighbours without changing their order. */
function pulled(layer, down) {
  const wish = layer.map((p) => {
    const near = down ? p.up : p.down;
    const all = near.length ? near : down ? p.down : p.up;
    return all.length ? all.reduce((total, q) => total + q.x, 0) / all.length : p.x;
  });
  // blocks of neighbours that touch, each at the mean of its wishes (pool adjacent violators)
  const blocks = [];
  layer.forEach((p, i) => {
    let block = { from: i, to: i, width: p.w + GAP, sum: wish[i] - p.w / 2, count: 1 };
    while (blocks.length) {
      const last = blocks[blocks.length - 1];
      if (last.sum / last.count + last.width <= block.sum / block.count) break;
      blocks.pop();
      block = { from: last.from, to: block.to, width: last.width + block.width,
        sum: last.sum + block.sum - last.width * block.count, count: last.count + block.count };
    }
    blocks.push(block);
  });
  for (const block of blocks) {
    let x = block.sum / block.count;
    for (let i = block.from; i <= block.to; i++) {
      layer[i].x = x + layer[i].w / 2;
      x += layer[i].w + GAP;
    }
  }
}
