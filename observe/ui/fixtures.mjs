// Graphs as /v1/graph answers them, for the tests and the dev server.

const DROP = {
  reason: "outside_vpc",
  meaning: "destination outside the VPC, which has no way out",
  remedy:
    "ask the VPC's owner for spec.egress if pods should reach outside; a network with egress: false stays closed",
  packets: 12,
};
const DENIED = {
  reason: "policy_ingress",
  meaning: "the destination's ingress policies don't allow the packet",
  remedy: "kubectl thuban why SENDER TARGET:PORT says which policy; so does transitd denials, run on the target's node",
  packets: 3,
};

const droplets = (mode) => ["node-a", "node-b", "node-c"].map((name) => ({ name, connected: true, mode }));

function graph(parts) {
  const base = { generated_unix_ms: Date.now(), window_seconds: 60, truncated: false };
  return { ...base, vpcs: [], nodes: [], edges: [], droplets: droplets("all"), ...parts };
}

const edge = (from, to, bytes, reasons = []) => ({
  from,
  to,
  bytes,
  packets: Math.ceil(bytes / 700),
  dropped: reasons.reduce((sum, reason) => sum + reason.packets, 0),
  reasons,
});

/** Two VPCs with three networks. */
export function three({ hasDrops = true, tick = 0 } = {}) {
  const pod = (vpc, network, name, address, droplet) => ({
    id: `pod:${vpc}/${name}`,
    kind: "pod",
    name,
    namespace: vpc,
    vpc,
    network,
    address,
    droplet,
  });
  const role = (vpc, name, droplet, network = null) => {
    return { id: `role:${name}`, kind: "role", name, vpc, network, droplet };
  };
  const nodes = [
    pod("red", "red-web", "web-0", "10.0.1.3", "node-a"),
    pod("red", "red-web", "web-1", "10.0.1.4", "node-b"),
    pod("red", "red-web", "web-2", "10.0.1.5", "node-c"),
    pod("red", "red-db", "db-0", "10.0.2.4", "node-c"),
    pod("red", "red-db", "db-1", "10.0.2.5", "node-a"),
    pod("red", "red-db", "backup-28814400-x7k2p", "10.0.2.9", "node-b"),
    pod("blue", "blue-shop", "cart-0", "10.0.1.3", "node-b"),
    pod("blue", "blue-shop", "till-0", "10.0.1.4", "node-c"),
    { ...pod("red", "red-db", "db", "10.96.0.20", null), id: "service:red/db", kind: "service" },
    role("red", "red-web-b0", "node-a", "red-web"),
    role("red", "red-db-b0", "node-c", "red-db"),
    role("red", "red-d0", "node-a"),
    role("blue", "blue-shop-b0", "node-c", "blue-shop"),
    role("blue", "blue-d0", "node-b"),
    ...["a", "b", "c"].map((name) => ({ id: `droplet:node-${name}`, kind: "droplet", name: `node-${name}` })),
    { id: "outside:8.8.8.8", kind: "outside", name: null, address: "8.8.8.8" },
    { id: "withheld", kind: "withheld" },
  ];
  const edges = [
    edge("pod:red/web-0", "service:red/db", 420_000 + tick * 1000),
    edge("pod:red/web-1", "service:red/db", 88_000),
    edge("service:red/db", "pod:red/db-0", 310_000),
    edge("pod:red/db-0", "pod:red/db-1", 5_400_000),
    edge("pod:red/db-1", "pod:red/backup-28814400-x7k2p", 61_000_000),
    edge("pod:blue/till-0", "pod:blue/cart-0", 21_000),
    edge("withheld", "pod:red/web-1", 1_900),
  ];
  if (hasDrops) {
    edges.push(edge("pod:red/web-0", "outside:8.8.8.8", 0, [DROP]));
    edges.push(edge("pod:red/web-2", "pod:red/backup-28814400-x7k2p", 900, [DENIED]));
  }
  const vpcs = [
    { name: "red", vni: 7, networks: ["red-web", "red-db"], truncated: false },
    { name: "blue", vni: 8, networks: ["blue-shop"], truncated: false },
  ];
  return graph({ vpcs, nodes, edges });
}

/** Six VPCs with fifty networks each: pods are collapsed into their networks. */
export function many() {
  const names = ["red", "blue", "green", "payments", "analytics", "edge-gateways"];
  const vpcs = [];
  const nodes = [];
  const edges = [];
  names.forEach((vpc, index) => {
    const networks = Array.from({ length: 50 }, (_, number) => `${vpc.slice(0, 5)}-net-${number}`);
    vpcs.push({ name: vpc, vni: 100 + index, networks, truncated: true });
    const id = (number) => `network:${networks[number % 50]}`;
    networks.forEach((name, number) => {
      nodes.push({ id: id(number), kind: "network", name, vpc, network: name });
      if (number % 3 === 0) edges.push(edge(id(number), id(number * 7 + 11), 10 ** (2 + (number % 6))));
      if (number === 40) edges.push(edge(id(number), id(number), 700, [DENIED]));
      if (number % 25 === 4) edges.push(edge(id(number), id(number + 9), 400, [index % 2 ? DROP : DENIED]));
    });
  });
  return graph({ truncated: true, vpcs, nodes, edges });
}

/** Objects, but no packets: with this mode on all droplets. */
export function empty(mode = "drops") {
  return { ...three(), edges: [], droplets: droplets(mode) };
}
