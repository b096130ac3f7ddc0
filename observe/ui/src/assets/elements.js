// Cytoscape's elements of a graph, with their places and the curves of edges. Pure.

import { edgeWidth, shortName } from "./format.js";
import { layout } from "./layout.js";
import { mainReason } from "./model.js";

/** How far a curve between two tiles of one column stands out to the side. */
const BOW = 30;

/** Returns {elements, isCompact} for a part of the screen with this aspect. */
export function toElements(graph, aspect) {
  const { places, isCompact } = layout(graph, aspect);
  const nodes = [...places].map(([id, place]) => nodeElement(graph.nodes.get(id), place));
  const edges = graph.edges
    .filter((edge) => edge.from !== edge.to)
    .map((edge) => edgeElement(edge, places.get(edge.from), places.get(edge.to)));
  return { elements: [...nodes, ...edges], isCompact };
}

function nodeElement(node, { x, y, width, height, isBox }) {
  const classes = [node.kind, isBox ? "box" : "tile"];
  if (node.state?.connected === false) classes.push("away");
  const label = node.kind === "vpc" && node.vni ? `${node.name}  ·  VNI ${node.vni}` : shortName(node);
  return {
    group: "nodes",
    data: { id: node.id, label, width, height },
    position: { x, y },
    classes,
    grabbable: false,
  };
}

function edgeElement(edge, from, to) {
  const data = {
    id: edge.id,
    source: edge.from,
    target: edge.to,
    width: edgeWidth(edge.bytes),
    label: mainReason(edge),
    ...curve(from, to),
  };
  return { group: "edges", data, classes: [edge.dropped > 0 ? "dropped" : "passed"] };
}

/**
 * Returns the ends of an edge and its two control points, as Cytoscape wants them: a share of the line between the
 * ends, and a distance from that line. An edge leaves and reaches tiles at their sides, so that names stay free.
 */
function curve(from, to) {
  const isAside = Math.abs(to.x - from.x) < (from.width + to.width) / 2;
  const direction = to.x > from.x ? 1 : -1;
  const start = { x: from.x + ((isAside ? 1 : direction) * from.width) / 2, y: from.y };
  const end = { x: to.x + ((isAside ? 1 : -direction) * to.width) / 2, y: to.y };
  const reach = isAside ? BOW : Math.abs(end.x - start.x) / 2;
  const points = isAside
    ? [{ x: start.x + reach, y: start.y }, { x: end.x + reach, y: end.y }]
    : [{ x: start.x + direction * reach, y: start.y }, { x: end.x - direction * reach, y: end.y }];
  const along = { x: end.x - start.x, y: end.y - start.y };
  const length = Math.hypot(along.x, along.y) || 1;
  const weights = points.map((point) => ((point.x - start.x) * along.x + (point.y - start.y) * along.y) / length ** 2);
  const distances = points.map((point) => ((point.y - start.y) * along.x - (point.x - start.x) * along.y) / length);
  return {
    weights,
    distances,
    sourceEnd: [start.x - from.x, 0],
    targetEnd: [end.x - to.x, 0],
  };
}
