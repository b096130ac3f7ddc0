// What the search box finds. Pure.

import { fullName } from "./format.js";
import { mainReason } from "./model.js";

const FIELDS = ["name", "namespace", "vpc", "network", "address", "droplet", "kind"];

function text(node) {
  return [fullName(node), ...FIELDS.map((field) => node[field] ?? "")].join(" ").toLowerCase();
}

/** Returns the ids of the nodes and edges that have every word of the query. An edge has the words of its ends. */
export function search(graph, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (subject) => words.every((word) => subject.includes(word));
  const texts = new Map([...graph.nodes].map(([id, node]) => [id, text(node)]));
  const found = new Set([...texts].filter(([, own]) => has(own)).map(([id]) => id));
  for (const edge of graph.edges) {
    const reasons = edge.reasons.map((reason) => reason.reason).join(" ");
    const verdict = edge.dropped > 0 ? `dropped ${mainReason(edge)} ${reasons}` : "passed";
    if (has(`${texts.get(edge.from)} ${texts.get(edge.to)} ${verdict.toLowerCase()}`)) found.add(edge.id);
  }
  return found;
}
