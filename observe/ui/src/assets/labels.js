// Where the labels of edges stand: on their curve, on no tile and on no other label. Pure.

const LETTER = 7;
const HEIGHT = 20;
/** Places along a curve: the middle first. */
const SHARES = [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82];

/**
 * Returns a Map of an edge to how far its label stands from the curve's middle. Labels are [edge, curve, text]. A label
 * without a free place stays in the middle.
 */
export function freeLabels(labels, places) {
  const taken = [...places.values()].filter((place) => !place.isBox);
  const shifts = new Map();
  for (const [edge, { points }, text] of labels) {
    const size = { width: text.length * LETTER + 8, height: HEIGHT };
    const middle = pointAt(points, 0.5);
    const spots = SHARES.map((share) => ({ ...pointAt(points, share), ...size }));
    const spot = spots.find((candidate) => !taken.some((other) => overlaps(candidate, other))) ?? spots[0];
    taken.push(spot);
    shifts.set(edge, { x: spot.x - middle.x, y: spot.y - middle.y });
  }
  return shifts;
}

/** Whether two rectangles with these middles overlap. */
export function overlaps(one, other) {
  const [across, down] = [Math.abs(one.x - other.x), Math.abs(one.y - other.y)];
  return across * 2 < one.width + other.width && down * 2 < one.height + other.height;
}

/** A curve is two quadratic ones, which meet in the middle of its control points, as Cytoscape draws it. */
function pointAt([start, first, second, end], share) {
  const middle = { x: (first.x + second.x) / 2, y: (first.y + second.y) / 2 };
  const [from, control, to] = share < 0.5 ? [start, first, middle] : [middle, second, end];
  const part = share < 0.5 ? share * 2 : share * 2 - 1;
  const along = (axis) => (1 - part) ** 2 * from[axis] + 2 * part * (1 - part) * control[axis] + part ** 2 * to[axis];
  return { x: along("x"), y: along("y") };
}
