"use strict";
// What the scripts of several pages share.
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function bytesText(bytes) {
  for (const [limit, unit] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= limit) return +(bytes / limit).toPrecision(3) + " " + unit;
  }
  return Math.round(bytes) + " B";
}

function drawOnChange(draw) {
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
