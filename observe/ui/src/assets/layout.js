// Where everything stands in the graph. Pure, and the same for the same objects: nothing moves while only traffic
// changes. Nothing overlaps, because every part is a block that keeps its own room.
//
// A block has a width, a height, and place(left, top), which writes the places of what is in it.

const WIDE = { width: 136, height: 34, gap: 14, beside: 48, padding: 18, header: 34, between: 72, rows: 8 };
// For hundreds of networks: names are still legible when all of them are on a screen.
const COMPACT = { width: 96, height: 24, gap: 6, beside: 6, padding: 10, header: 24, between: 20, rows: 8 };
const MAX_WIDE = 120;

const byName = (one, other) => {
  const [first, second] = [one.name ?? "", other.name ?? ""];
  return first.localeCompare(second, "en", { numeric: true }) || (one.id < other.id ? -1 : 1);
};
const KIND_ORDER = ["service", "pod", "role"];
const byKind = (one, other) => KIND_ORDER.indexOf(one.kind) - KIND_ORDER.indexOf(other.kind) || byName(one, other);

/**
 * Returns {places, isCompact}. Places is a Map of a node's id to {x, y, width, height, isBox}; x and y are the middle.
 * The aspect is the width of the screen's part divided by its height.
 */
export function layout(graph, aspect) {
  const { networks, loose, droplets, far, tileCount } = group(graph);
  const isCompact = graph.isTruncated || tileCount > MAX_WIDE;
  const size = isCompact ? COMPACT : WIDE;
  const places = new Map();
  const tile = (node) => tileBlock(places, node.id, size);
  const networkBlock = (node) => {
    const children = networks.get(node.id);
    if (!children) return tile(node);
    return boxBlock(places, node.id, columns(children.sort(byKind).map(tile), size), size);
  };
  const vpcBlock = (vpc) => {
    const own = [...graph.nodes.values()].filter((node) => node.kind === "network" && node.vpc === vpc.name);
    own.sort((one, other) => networks.has(other.id) - networks.has(one.id) || byName(one, other));
    const inner = shelves(own.map(networkBlock), aspect, isCompact ? size.gap : size.between);
    const loosely = (loose.get(vpc.name) ?? []).sort(byKind).map(tile);
    const head = shelves(loosely, Math.max(1, inner.width / size.height), size.gap);
    return boxBlock(places, vpc.id, stack([head, inner], size.gap), size);
  };
  const boxes = [...graph.vpcs].sort(byName).map(vpcBlock);
  const middle = shelves(boxes, aspect, size.between);
  const left = columns(far.sort(byKind).map(tile), { ...size, rows: 12 });
  const upper = row([left, middle], size.between * (isCompact ? 2 : 1));
  const lower = shelves(droplets.sort(byName).map(tile), Math.max(1, upper.width / size.height), size.gap);
  stack([upper, lower], size.between / 2).place(0, 0);
  return { places, isCompact };
}

/** Sorts the nodes by the part of the graph that they stand in. */
function group(graph) {
  const [networks, loose, droplets, far] = [new Map(), new Map(), [], []];
  const networkIds = new Map();
  const vpcNames = new Set(graph.vpcs.map((vpc) => vpc.name));
  for (const node of graph.nodes.values()) {
    if (node.kind === "network") networkIds.set(`${node.vpc}/${node.name}`, node.id);
  }
  const append = (map, key, node) => map.set(key, [...(map.get(key) ?? []), node]);
  let tileCount = 0;
  for (const node of graph.nodes.values()) {
    tileCount += 1;
    const network = networkIds.get(`${node.vpc}/${node.network}`);
    if (node.kind === "vpc") continue;
    if (node.kind === "droplet") droplets.push(node);
    else if (node.kind === "network") {
      if (!vpcNames.has(node.vpc)) far.push(node);
    } else if (network && vpcNames.has(node.vpc)) append(networks, network, node);
    else if (vpcNames.has(node.vpc)) append(loose, node.vpc, node);
    else far.push(node);
  }
  return { networks, loose, droplets, far, tileCount };
}

function tileBlock(places, id, { width, height }) {
  const place = (left, top) =>
    places.set(id, { x: left + width / 2, y: top + height / 2, width, height, isBox: false });
  return { width, height, place };
}

function boxBlock(places, id, inner, { width: least, height: low, padding, header }) {
  const width = Math.max(inner.width, least) + 2 * padding;
  const height = Math.max(inner.height, low) + header + padding;
  const place = (left, top) => {
    places.set(id, { x: left + width / 2, y: top + height / 2, width, height, isBox: true });
    inner.place(left + padding, top + header);
  };
  return { width, height, place };
}

/** Blocks of one size, from top to bottom in as many columns as they need. */
function columns(blocks, { rows, gap, beside }) {
  const stacks = [];
  const perColumn = Math.ceil(blocks.length / Math.ceil(blocks.length / rows));
  for (let start = 0; start < blocks.length; start += perColumn) {
    stacks.push(stack(blocks.slice(start, start + perColumn), gap));
  }
  return row(stacks, beside, false);
}

/** Blocks in rows, like words in a paragraph. Of all widths, takes that which fits best into the aspect. */
function shelves(blocks, aspect, gap) {
  let best = row([], gap);
  let bestScale = 0;
  let limit = 0;
  for (const block of blocks) {
    limit += block.width + gap;
    const candidate = stack(wrap(blocks, limit, gap), gap);
    const scale = Math.min(aspect / candidate.width, 1 / candidate.height);
    if (scale > bestScale) [best, bestScale] = [candidate, scale];
  }
  return best;
}

function wrap(blocks, limit, gap) {
  const rows = [];
  let current = [];
  let width = 0;
  for (const block of blocks) {
    if (current.length > 0 && width + block.width + gap > limit) {
      rows.push(row(current, gap, false));
      [current, width] = [[], 0];
    }
    current.push(block);
    width += block.width + gap;
  }
  rows.push(row(current, gap, false));
  return rows;
}

function row(blocks, gap, isCentred = true) {
  const parts = blocks.filter((block) => block.width > 0);
  const width = parts.reduce((sum, block) => sum + block.width + gap, -gap);
  const height = Math.max(0, ...parts.map((block) => block.height));
  const place = (left, top) => {
    let next = left;
    for (const block of parts) {
      block.place(next, isCentred ? top + (height - block.height) / 2 : top);
      next += block.width + gap;
    }
  };
  return { width: Math.max(0, width), height, place };
}

function stack(blocks, gap) {
  const parts = blocks.filter((block) => block.height > 0);
  const width = Math.max(0, ...parts.map((block) => block.width));
  const height = parts.reduce((sum, block) => sum + block.height + gap, -gap);
  const place = (left, top) => {
    let next = top;
    for (const block of parts) {
      block.place(left, next);
      next += block.height + gap;
    }
  };
  return { width, height: Math.max(0, height), place };
}
