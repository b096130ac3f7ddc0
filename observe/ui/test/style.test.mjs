import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

const css = await readFile(new URL("../src/assets/style.css", import.meta.url), "utf8");
const [light, dark] = [...css.matchAll(/:root \{([^}]*)\}/g)].map(([, body]) =>
  Object.fromEntries([...body.matchAll(/--([\w-]+): (#\w{6});/g)].map(([, name, value]) => [name, value])),
);

/** Relative luminance: WCAG 2.2. */
function luminance(colour) {
  const [red, green, blue] = [1, 3, 5].map((place) => {
    const part = parseInt(colour.slice(place, place + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((first, second) => first - second);
  return (high + 0.05) / (low + 0.05);
}

const TEXTS = {
  text: ["surface", "ground", "vpc", "box", "tile", "droplet", "accent-soft", "drop-soft"],
  muted: ["surface", "box", "vpc"],
  accent: ["surface"],
  drop: ["surface", "drop-soft", "accent-soft"],
  warn: ["warn-soft"],
  good: ["good-soft"],
};
const LINES = { edge: ["surface", "vpc", "box"], drop: ["vpc", "box"], accent: ["box"] };

for (const [theme, colours] of [["light", light], ["dark", dark]]) {
  for (const [least, pairs] of [[4.5, TEXTS], [3, LINES]]) {
    for (const [front, grounds] of Object.entries(pairs)) {
      for (const ground of grounds) {
        test(`${theme}: ${front} on ${ground} has a contrast of ${least}`, () => {
          const found = contrast(colours[front], colours[ground]);
          assert.ok(found >= least, `${found.toFixed(2)}`);
        });
      }
    }
  }
}
