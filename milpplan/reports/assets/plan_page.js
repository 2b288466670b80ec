(function () {
  function secondsText(ns) {
    const s = ns / 1e9;
    if (Math.abs(s) >= 1) return s.toPrecision(4) + " s";
    if (Math.abs(s) >= 1e-3) return (s * 1e3).toPrecision(4) + " ms";
    return (s * 1e6).toPrecision(3) + " us";
  }

  function fitted(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, canvas.clientWidth);
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [pen, width];
  }

  // Tabs: a click, or the arrow keys.
  for (const list of document.querySelectorAll('[role="tablist"]')) {
    const tabs = [...list.querySelectorAll('[role="tab"]')];
    const choose = (chosen) => tabs.forEach((tab) => {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    });
    tabs.forEach((tab, place) => {
      tab.addEventListener("click", () => choose(tab));
      tab.addEventListener("keydown", (event) => {
        const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!way) return;
        const next = tabs[(place + way + tabs.length) % tabs.length];
        choose(next);
        next.focus();
      });
    });
  }

  // Copy: where the browser gives no clipboard to files, the text is selected instead.
  for (const button of document.querySelectorAll(".copy")) {
    const text = button.closest(".file").querySelector("pre");
    const said = (word) => {
      button.textContent = word;
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    const select = () => {
      const range = document.createRange();
      range.selectNodeContents(text);
      const chosen = window.getSelection();
      chosen.removeAllRanges();
      chosen.addRange(range);
      said(document.execCommand("copy") ? "Copied" : "Selected");
    };
    button.addEventListener("click", () => {
      if (!navigator.clipboard) return select();
      return navigator.clipboard.writeText(text.textContent).then(() => said("Copied"), select);
    });
  }

  function timeline() {
    const data = JSON.parse(byId("timeline-data").textContent);
    const canvas = byId("timeline");
    const unit = data.unit_ns, whole = data.step_ns;
    const names = data.kinds;
    const fill = { "forward": "--c0", "backward": "--c2", "weight gradients": "--c4", "norm": "--c8", "optimizer": "--c6",
      "gather": "--c7", "reduction": "--c1", "steady": "--c5" };
    const rows = data.rows.map((row) => {
      const slices = [];
      let at = 0;
      for (let i = 0; i < row.slices.length; i += 5) {
        const start = at + row.slices[i], end = start + row.slices[i + 1];
        slices.push([start * unit, end * unit, row.slices[i + 2], row.slices[i + 3], row.slices[i + 4]]);
        at = end;
      }
      const bars = [];
      for (let i = 0; i < row.bars.length; i += 3) {
        bars.push([row.bars[i] * unit, (row.bars[i] + row.bars[i + 1]) * unit, row.bars[i + 2]]);
      }
      return { rank: row.rank, name: row.name, layers: row.layers, steady: row.steady, slices, bars };
    });
    const used = new Set();
    rows.forEach((row) => { row.slices.forEach((s) => used.add(s[2])); row.bars.forEach((b) => used.add(b[2])); });
    let first = 0, last = whole;
    const left = 34, axis = 22;
    const rowHeight = () => (rows.length > 12 ? 22 : 34);
    const height = () => rows.length * rowHeight() + axis;
    let width = 1;
    const place = (ns) => left + (ns - first) / (last - first) * (width - left);

    function firstAfter(slices, ns) {
      let low = 0, high = slices.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (slices[middle][1] < ns) low = middle + 1; else high = middle;
      }
      return low;
    }

    function draw() {
      let pen;
      [pen, width] = fitted(canvas, height());
      const tall = rowHeight(), colours = {};
      names.forEach((name, kind) => { colours[kind] = colour(fill[name] || "--c8"); });
      const ink = colour("--ink"), soft = colour("--soft"), paper = colour("--paper"), line = colour("--line");
      pen.fillStyle = colour("--idle");
      pen.fillRect(0, 0, width, height());
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      pen.save();
      pen.beginPath();
      pen.rect(left, 0, width - left, height());
      pen.clip();
      rows.forEach((row, number) => {
        const top = number * tall + 2, box = tall - 9;
        for (let i = firstAfter(row.slices, first); i < row.slices.length && row.slices[i][0] <= last; i += 1) {
          const [start, end, kind, chunk, batch] = row.slices[i];
          const x = place(start), wide = Math.max(place(end) - x, 0.4);
          pen.globalAlpha = chunk > 0 ? Math.max(0.45, 1 - 0.09 * chunk) : 1;
          pen.fillStyle = colours[kind];
          pen.fillRect(x, top, wide, box);
          pen.globalAlpha = 1;
          if (wide > 3) { pen.fillStyle = paper; pen.fillRect(x + wide - 0.7, top, 0.7, box); }
          if (batch < 0) continue;
          const text = names[kind] === "steady" ? batch.toLocaleString("en") + " more, alike" : String(batch);
          if (wide > text.length * 6.5 + 4) {
            // On pale blocks the ink shows, on full ones the paper.
            pen.fillStyle = names[kind] === "steady" || chunk > 3 ? ink : paper;
            pen.fillText(text, x + wide / 2 - text.length * 3, top + box / 2 + 0.5);
          }
        }
        row.bars.forEach(([start, end, kind]) => {
          if (end < first || start > last) return;
          pen.fillStyle = colours[kind];
          pen.fillRect(place(start), top + box + 1, Math.max(place(end) - place(start), 0.7), 3);
        });
      });
      pen.restore();
      pen.fillStyle = soft;
      rows.forEach((row, number) => pen.fillText(String(row.rank), 6, number * tall + tall / 2));
      pen.strokeStyle = line;
      const below = rows.length * tall;
      const step = niceStep((last - first) / Math.max(2, (width - left) / 110));
      for (let at = Math.ceil(first / step) * step; at <= last; at += step) {
        const x = place(at);
        pen.beginPath(); pen.moveTo(x, below); pen.lineTo(x, below + 5); pen.stroke();
        const text = at ? secondsText(at) : "0";
        pen.fillText(text, Math.min(x + 3, width - text.length * 6.2), below + 13);
      }
      byId("span").textContent = first === 0 && last === whole ? "whole step, " + secondsText(whole)
        : first === 0 ? "the first " + secondsText(last)
          : secondsText(last - first) + " from " + secondsText(first);
    }

    function niceStep(rough) {
      const power = Math.pow(10, Math.floor(Math.log10(rough)));
      return power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
    }

    function show(from, to) {
      const least = Math.max(1000, unit * 20);
      const span = Math.min(whole, Math.max(least, to - from));
      first = Math.min(Math.max(0, from), whole - span);
      last = first + span;
      requestAnimationFrame(draw);
    }

    function zoom(factor, around) {
      const at = around === undefined ? (first + last) / 2 : around;
      show(at - (at - first) * factor, at + (last - at) * factor);
    }

    const timeAt = (x) => first + (x - left) / (width - left) * (last - first);

    function read(event) {
      const box = canvas.getBoundingClientRect();
      const x = event.clientX - box.left, row = rows[Math.floor((event.clientY - box.top) / rowHeight())];
      if (!row || x < left) return;
      const at = timeAt(x), slack = (last - first) / width;
      const bar = row.bars.find((b) => at >= b[0] - slack && at <= b[1] + slack);
      const slice = row.slices[firstAfter(row.slices, at - slack)];
      let text = row.name + " (" + row.layers + " layers), " + secondsText(at) + ": ";
      if (slice && slice[0] <= at + slack) {
        const name = names[slice[2]];
        if (name === "steady") text += slice[4].toLocaleString("en") + " more work items, alike";
        else {
          text += name + (slice[4] >= 0 ? " of micro-batch " + slice[4] : "");
          if (slice[3] > 0) text += ", piece " + slice[3];
        }
        text += ", " + secondsText(slice[1] - slice[0]);
      } else text += "waiting";
      if (bar) text += "; beside it a " + names[bar[2]];
      byId("item").textContent = text + ".";
    }

    const buttons = {
      in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, whole),
      start: () => show(0, Math.min(whole, 0.08 * whole)), end: () => show(0.92 * whole, whole),
    };
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", buttons[button.dataset.zoom]);
    }
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.002), timeAt(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event.offsetX)));
    canvas.addEventListener("keydown", (event) => {
      const move = 0.2 * (last - first);
      const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => show(first - move, last - move),
        ArrowRight: () => show(first + move, last + move), Home: () => show(0, last - first), End: () => show(whole - (last - first), whole) };
      if (act[event.key]) { event.preventDefault(); act[event.key](); }
    });

    const fingers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event.offsetX);
      canvas.setPointerCapture(event.pointerId);
      read(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return read(event);
      const before = [...fingers.values()];
      fingers.set(event.pointerId, event.offsetX);
      const after = [...fingers.values()];
      const each = (last - first) / (width - left);
      if (after.length === 1) {
        const moved = (before[0] - after[0]) * each;
        return show(Math.min(Math.max(0, first + moved), whole - (last - first)), first + moved + (last - first));
      }
      const was = Math.abs(before[0] - before[1]), is = Math.abs(after[0] - after[1]);
      if (is > 4 && was > 4) zoom(was / is, timeAt((after[0] + after[1]) / 2));
      return undefined;
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
    }

    const keys = byId("kinds");
    names.forEach((name, kind) => {
      if (!used.has(kind) || name === "steady") return;
      const key = document.createElement("span"), patch = document.createElement("i");
      key.className = "key";
      patch.style.background = "var(" + (fill[name] || "--c8") + ")";
      key.append(patch, name === "gather" ? "parameter gather" : name === "reduction" ? "gradient reduction"
        : name === "norm" ? "gradient norm" : name);
      keys.append(key);
    });
    const said = [];
    if (rows.length < data.num_ranks) said.push(rows.length + " of " + data.num_ranks + " stages are shown.");
    if (data.shortened) said.push("The steady part in the middle, where every row repeats, is one grey block.");
    byId("shortened").textContent = said.join(" ");
    drawOnChange(draw);
  }

  timeline();
})();
