// Unpacks the Chromium of the npm package @sparticuz/chromium beside it: node tests/browser/unpack.mjs DIR, where
// `npm install --prefix DIR --ignore-scripts @sparticuz/chromium` was run. Writes DIR/chromium and its libraries.
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { brotliDecompressSync } from "node:zlib";

const [home] = process.argv.slice(2);
const packed = (name) => brotliDecompressSync(readFileSync(join(home, "node_modules/@sparticuz/chromium/bin", name)));
writeFileSync(join(home, "chromium"), packed("chromium.br"), { mode: 0o755 });
mkdirSync(join(home, "libraries"), { recursive: true });
for (const name of ["al2023", "swiftshader", "fonts"]) {
  execFileSync("tar", ["x", "-C", join(home, "libraries")], { input: packed(name + ".tar.br") });
}
console.log(join(home, "chromium"));
