// Cytoscape's elements of a graph, with their places and the curves of edges. Pure.

import { edgeWidth, shorten, shortName } from "./format.js";
import { freeLabels } from "./labels.js";
import { layout } from "./layout.js";
import { mainReason } from "./model.js";

/** Pixels of a letter in a tile, about. */
const LETTER = 7.6;
const COMPACT_LETTER = 6.6;
/** How far a curve between two tiles of one column stands out to the side: at least, and for each pixel between. */
const BOW = { least: 12, slope: 0.12 };
const COMPACT_BOW = { least: 6, slope: 0.02 };
/** Edges leave above a tile's name and arrive below it, so that they cross no name of a tile in the same row. */
const OFFSET = 0.3;

/** Returns {elements, isCompact} for a part of the screen with this aspect. */
export function toElements(graph, aspect) {
  const { places, isCompact } = layout(graph, aspect);
  const letter = isCompact ? COMPACT_LETTER : LETTER;
  // Pods of one network are one tile in a truncated graph, and so an edge may have one end.
  const inside = graph.edges.filter((edge) => edge.from === edge.to && edge.dropped > 0).map((edge) => edge.from);
  const nodes = [...places].map(([id, place]) => nodeElement(graph.nodes.get(id), place, letter));
  for (const node of nodes) if (inside.includes(node.data.id)) node.classes.push("drops-inside");
  const bow = isCompact ? COMPACT_BOW : BOW;
  const drawn = graph.edges.filter((edge) => edge.from !== edge.to);
  const curves = new Map(drawn.map((edge) => [edge, curve(places.get(edge.from), places.get(edge.to), bow)]));
  const labels = drawn.filter((edge) => edge.dropped > 0).map((edge) => [edge, curves.get(edge), mainReason(edge)]);
  const shifts = isCompact ? new Map() : freeLabels(labels, places);
  const edges = drawn.map((edge) => edgeElement(edge, curves.get(edge), shifts.get(edge)));
  return { elements: [...nodes, ...edges], isCompact };
}

function nodeElement(node, { x, y, width, height, isBox }, letter) {
  const classes = [node.kind, isBox ? "box" : "tile"];
  if (node.state?.connected === false) classes.push("away");
  const suffix = node.kind === "vpc" && node.vni ? `  ·  VNI ${node.vni}` : "";
  const label = shorten(shortName(node), Math.floor((width - 12) / letter) - suffix.length) + suffix;
  return {
    group: "nodes",
    data: { id: node.id, label, width, height },
    position: { x, y },
    classes,
    grabbable: false,
  };
}

function edgeElement(edge, { points: _, ...ends }, shift = { x: 0, y: 0 }) {
  const data = {
    id: edge.id,
    source: edge.from,
    target: edge.to,
    width: edgeWidth(edge.bytes),
    label: mainReason(edge),
    shift,
    ...ends,
  };
  return { group: "edges", data, classes: [edge.dropped > 0 ? "dropped" : "passed"] };
}

/**
 * Returns the ends of an edge and its two control points, as Cytoscape wants them: a share of the line between the
 * ends, and a distance from that line.
 */
function curve(from, to, bow) {
  const isAside = Math.abs(to.x - from.x) < (from.width + to.width) / 2;
  const direction = to.x > from.x ? 1 : -1;
  const start = { x: from.x + ((isAside ? 1 : direction) * from.width) / 2, y: from.y - OFFSET * from.height };
  const end = { x: to.x + ((isAside ? 1 : -direction) * to.width) / 2, y: to.y + OFFSET * to.height };
  const reach = isAside ? bow.least + bow.slope * Math.abs(end.y - start.y) : Math.abs(end.x - start.x) / 2;
  const points = isAside
    ? [{ x: start.x + reach, y: start.y }, { x: end.x + reach, y: end.y }]
    : [{ x: start.x + direction * reach, y: start.y }, { x: end.x - direction * reach, y: end.y }];
  const along = { x: end.x - start.x, y: end.y - start.y };
  const length = Math.hypot(along.x, along.y) || 1;
  const weights = points.map((point) => ((point.x - start.x) * along.x + (point.y - start.y) * along.y) / length ** 2);
  const distances = points.map((point) => ((point.y - start.y) * along.x - (point.x - start.x) * along.y) / length);
  return {
    points: [start, ...points, end],
    weights,
    distances,
    sourceEnd: [start.x - from.x, start.y - from.y],
    targetEnd: [end.x - to.x, end.y - to.y],
  };
}
