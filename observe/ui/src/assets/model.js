// The answer of /v1/graph, made whole: every edge has both ends, every network a node, every field a value. Pure.

/**
 * Returns {nodes: Map of id to node, edges, vpcs, droplets, isTruncated}. Nodes of the kinds vpc and network are there
 * for every VPC and network. An edge has an id of its own.
 */
export function readGraph(json) {
  const nodes = new Map();
  for (const node of json.nodes ?? []) nodes.set(node.id, { ...node });
  const vpcs = (json.vpcs ?? []).map((vpc) => addVpc(nodes, vpc));
  const states = new Map((json.droplets ?? []).map((droplet) => [droplet.name, droplet]));
  for (const node of nodes.values()) {
    if (node.kind === "droplet") node.state = states.get(node.name);
  }
  const edges = (json.edges ?? []).map((edge) => readEdge(nodes, edge));
  const isTruncated = Boolean(json.truncated) || vpcs.some((vpc) => vpc.truncated);
  return { nodes, edges, vpcs, droplets: [...states.values()], isTruncated };
}

function addVpc(nodes, vpc) {
  const id = `vpc:${vpc.name}`;
  const node = { ...vpc, id, kind: "vpc" };
  const known = new Set();
  for (const other of nodes.values()) {
    if (other.kind === "network" && other.vpc === vpc.name) known.add(other.name);
  }
  for (const name of vpc.networks ?? []) {
    if (known.has(name)) continue;
    const network = `network:${vpc.name}/${name}`;
    nodes.set(network, { id: network, kind: "network", name, vpc: vpc.name });
  }
  nodes.set(id, node);
  return node;
}

function readEdge(nodes, edge) {
  for (const id of [edge.from, edge.to]) {
    // An edge without its end would be lost, and with it a drop.
    if (!nodes.has(id)) nodes.set(id, { id, kind: "unknown", name: id });
  }
  return {
    id: `edge:${edge.from}>${edge.to}`,
    from: edge.from,
    to: edge.to,
    bytes: edge.bytes ?? 0,
    packets: edge.packets ?? 0,
    dropped: edge.dropped ?? 0,
    reasons: edge.reasons ?? [],
  };
}

/** Returns the name of an edge's worst reason, or an empty text. */
export function mainReason(edge) {
  const [first] = [...edge.reasons].sort((one, other) => (other.packets ?? 0) - (one.packets ?? 0));
  return edge.dropped > 0 ? (first?.reason ?? "dropped") : "";
}

/** Compares edges: dropped ones first, then by bytes. */
export function byWeight(one, other) {
  return other.dropped - one.dropped || other.bytes - one.bytes || (one.id < other.id ? -1 : 1);
}
