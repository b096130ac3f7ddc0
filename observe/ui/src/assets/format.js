// Words and numbers as people read them. Pure.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** Returns bytes with a decimal unit: 4.2 kB. */
export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit > 0 && value < 9.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** Returns a count with separators: 12,345. */
export function count(number) {
  return number.toLocaleString("en-US");
}

/** Returns the count with its noun: 1 packet, 2 packets. */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Returns the local time of a moment: 14:02:11. */
export function time(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}

/** Returns an edge's width in pixels. Each tenfold of bytes adds the same, from 1 to 7. */
export function edgeWidth(byteCount) {
  return Math.min(7, Math.max(1, Math.log10(byteCount + 1) - 1));
}

const KINDS = {
  pod: "Pod",
  service: "Service",
  network: "Network",
  vpc: "VPC",
  role: "Role",
  droplet: "Droplet",
  outside: "Outside",
  withheld: "Withheld",
};

/** Returns the word for a kind of object. */
export function kindName(kind) {
  return KINDS[kind] ?? "Unknown";
}

/** Returns the full name of an object: red/web-0. */
export function fullName(node) {
  if (node.kind === "withheld") return "withheld";
  const name = node.name ?? node.address ?? node.kind;
  return node.namespace ? `${node.namespace}/${name}` : name;
}

/** Returns the name for a tile of the graph, where the box around already says the VPC and network. */
export function shortName(node) {
  if (node.kind === "withheld") return "withheld";
  return node.name ?? node.address ?? kindName(node.kind);
}

/** Shortens a name in its middle, because names of pods often differ at their end. */
export function shorten(name, length) {
  if (name.length <= length) return name;
  const tail = Math.floor((length - 1) / 2);
  return `${name.slice(0, length - 1 - tail)}…${name.slice(-tail)}`;
}
