// Makes dist/, which thuban-observe embeds: the page's own sources as they are, and Cytoscape.js of the lockfile.

import { cp, copyFile, rm } from "node:fs/promises";

const here = (path) => new URL(path, import.meta.url);
const library = "node_modules/cytoscape/";

await rm(here("dist"), { recursive: true, force: true });
await cp(here("src"), here("dist"), { recursive: true });
// Servers know the type of .js, and few know that of .mjs.
await copyFile(here(`${library}dist/cytoscape.esm.min.mjs`), here("dist/assets/cytoscape.js"));
await copyFile(here(`${library}LICENSE`), here("dist/assets/cytoscape.LICENSE.txt"));
