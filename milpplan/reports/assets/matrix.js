(function () {
  function matrix() {
    const data = JSON.parse(byId("matrix-data").textContent);
    const canvas = byId("matrix"), choice = byId("maps");
    const n = data.places;
    const maps = {};
    for (const [name, map] of Object.entries(data.maps)) {
      const values = new Float64Array(n * n);
      let at = 0;
      for (let i = 0; i < map.cells.length; i += 2) {
        at += map.cells[i];
        values[at] = map.values[map.cells[i + 1]];
      }
      maps[name] = { values, most: Math.max(...map.values), least: Math.min(...map.values), total: map.total };
      choice.add(new Option(name + " (" + bytesText(map.total) + ")", name));
    }
    // From few to many bytes: Viridis, which print and colour-blind eyes tell apart, from a start that dark paper shows.
    const stops = [[106, 60, 148], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const shade = (share) => {
      const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), low = Math.floor(at), part = at - low;
      return stops[low].map((value, i) => Math.round(value + part * (stops[low + 1][i] - value)));
    };
    document.querySelector(".scale i").style.background =
      "linear-gradient(to top," + stops.map((stop) => "rgb(" + stop.join() + ")").join() + ")";

    function draw() {
      const map = maps[choice.value];
      const low = Math.max(map.least, map.most / 1e5), decades = Math.log10(map.most / low);
      const cell = Math.max(1, Math.floor(768 / n));
      canvas.width = canvas.height = n * cell;
      const pen = canvas.getContext("2d");
      pen.fillStyle = colour("--card");
      pen.fillRect(0, 0, n * cell, n * cell);
      map.values.forEach((value, index) => {
        if (!value) return;
        const share = decades > 0 ? Math.log10(Math.max(value, low) / low) / decades : 1;
        pen.fillStyle = "rgb(" + shade(share).join() + ")";
        pen.fillRect((index % n) * cell, Math.floor(index / n) * cell, cell, cell);
      });
      pen.fillStyle = colour("--soft");
      data.edges.forEach((edge) => {
        // Two wide, so that one is left where the picture is shown smaller.
        pen.fillRect(edge * cell - 1, 0, 2, n * cell);
        pen.fillRect(0, edge * cell - 1, n * cell, 2);
      });
      byId("most").textContent = bytesText(map.most);
      byId("least").textContent = (map.least < low ? "under " : "") + bytesText(low);
    }

    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / box.width * n);
      const row = Math.floor((event.clientY - box.top) / box.height * n);
      if (row < 0 || column < 0 || row >= n || column >= n) return;
      const value = maps[choice.value].values[row * n + column];
      byId("cell").textContent = data.word + " " + row + " to " + data.word + " " + column + ": "
        + (value ? bytesText(value) : "nothing") + ".";
    });
    choice.addEventListener("change", draw);
    drawOnChange(draw);
  }

  if (byId("matrix-data").textContent.trim()) matrix();
})();
