// What a script adds to the section about ranges: one tensor's exponents in place of all, another loss scale, another
// format, and the cell under the pointer. Its arithmetic is that of core/ranges.py; a test holds the two together.
"use strict";
(() => {
  const power = (exponent) => "2" + String(exponent).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);

  const percent = (share) => {
    if (Number.isNaN(share)) return "–";
    if (share === 0) return "0";
    const shown = 100 * share;
    if (shown < 0.01) return "<0.01\u00a0%";
    if (shown >= 99.95) return share === 1 ? "100\u00a0%" : ">99.9\u00a0%";
    return (shown < 10 ? shown.toFixed(2) : shown.toFixed(1)) + "\u00a0%";
  };

  // What a format makes of counts by exponent, as shares: to zero, subnormal, kept, overflow.
  const shares = (counts, lowest, [zero, normal, overflow]) => {
    const found = [0, 0, 0, 0];
    let total = 0;
    counts.forEach((count, place) => {
      const exponent = lowest + place;
      found[exponent < zero ? 0 : exponent < normal ? 1 : exponent >= overflow ? 3 : 2] += count;
      total += count;
    });
    return found.map((one) => (total ? one / total : NaN));
  };

  const bars = (counts, lowest, low, high) => {
    const bins = new Array(high - low).fill(0);
    let total = 0;
    counts.forEach((count, place) => {
      bins[Math.min(bins.length - 1, Math.max(0, lowest + place - low))] += count;
      total += count;
    });
    return bins.map((count, place) => {
      if (!count) return "";
      const height = Math.max(0.004, 1 + Math.log10(count / total) / 6);
      const [left, right] = [place, place + 1].map((edge) => Math.round((1000 * edge) / bins.length));
      return `M${left} 1000V${Math.round(1000 * (1 - height))}H${right}V1000Z`;
    }).join("");
  };

  const liven = (block) => {
    const controls = block.querySelector(".controls");
    const slider = controls.querySelector("input.scale");
    const output = controls.querySelector("output");
    const format = controls.querySelector("select.format");
    controls.hidden = false;

    const figures = [...block.querySelectorAll("figure[data-exponents]")].map((figure) => {
      const data = JSON.parse(figure.dataset.exponents);
      const which = figure.querySelector("select.which");
      ["all together", ...data.names].forEach((name, place) => which.append(new Option(name, place)));
      which.parentElement.hidden = data.names.length < 2;
      const draw = () => {
        const [start, zeros, broken, largest, ...counts] = data.rows[Number(which.value)];
        const lowest = start + (data.moves ? Number(slider.value) : 0);
        figure.querySelector(".bins").setAttribute("d", bars(counts, lowest, data.low, data.high));
        for (const row of figure.querySelector(".shares").tBodies[0].rows) {
          const found = shares(counts, lowest, data.limits[row.cells[0].textContent]);
          found.forEach((share, place) => { row.cells[place + 1].textContent = percent(share); });
        }
        const all = counts.reduce((sum, count) => sum + count, 0) + zeros + broken;
        figure.querySelector(".told").textContent = `${all.toLocaleString("en")} numbers: ` +
          `${zeros.toLocaleString("en")} of them zero, ${broken.toLocaleString("en")} infinite or NaN, ` +
          `the largest ${largest.toPrecision(3)}.`;
        const bad = figure.querySelector(".broken");
        bad.hidden = !broken;
        bad.textContent = `${broken.toLocaleString("en")} of ${all.toLocaleString("en")} ` +
          `number${all === 1 ? "" : "s"} (${percent(broken / all)}) ${broken === 1 ? "is" : "are"} ` +
          "infinite or NaN already. The shares below are of the finite ones.";
        const scaled = figure.querySelector(".scaled");
        if (scaled) scaled.textContent = power(Number(slider.value));
      };
      which.addEventListener("change", draw);
      return { draw, moves: data.moves };
    });
    const show = () => { output.textContent = power(Number(slider.value)); };
    slider.addEventListener("input", () => { show(); figures.forEach((one) => one.moves && one.draw()); });
    show();
    figures.forEach((one) => one.draw());

    const maps = [...block.querySelectorAll("figure[data-heat]")].map((figure) => {
      const data = JSON.parse(figure.dataset.heat);
      const map = figure.querySelector(".heatmap");
      const words = Object.fromEntries([...figure.querySelectorAll(".legend li")].map((item) =>
        [item.querySelector("rect").getAttribute("class"), item.textContent]));
      const line = document.createElement("p");
      line.className = "readout";
      line.textContent = "Point at a cell to read it.";
      figure.querySelector(".heatbox").before(line);
      const draw = () => {
        const paths = new Map();
        data.levels[format.value].forEach((levels, y) => {
          let start = 0;
          for (let x = 1; x <= levels.length; x += 1) {
            if (x < levels.length && levels[x] === levels[start]) continue;
            const name = levels[start] === "." ? "u" : levels[start];
            paths.set(name, (paths.get(name) || "") + `M${start} ${y}h${x - start}v1h${start - x}z`);
            start = x;
          }
        });
        map.querySelectorAll("path").forEach((path) => path.remove());
        for (const [level, d] of paths) {
          const path = document.createElementNS(map.namespaceURI, "path");
          path.setAttribute("class", "h" + level);
          path.setAttribute("d", d);
          map.append(path);
        }
        figure.querySelector(".chosen").textContent = format.value;
        figure.querySelector(".most").textContent = data.most[format.value];
      };
      map.addEventListener("pointermove", (event) => {
        const box = map.getBoundingClientRect();
        const lines = data.levels[format.value];
        const at = (part, most) => Math.max(0, Math.min(most - 1, Math.floor(part * most)));
        const y = at((event.clientY - box.top) / box.height, lines.length);
        const x = at((event.clientX - box.left) / box.width, data.updates.length);
        const value = document.createElement("b");
        value.textContent = words[lines[y][x] === "." ? "hu" : "h" + lines[y][x]];
        line.replaceChildren(`${data.names[y]} · update ${data.updates[x].toLocaleString("en")} · `, value);
      });
      return draw;
    });
    format.addEventListener("change", () => maps.forEach((draw) => draw()));
  };

  document.querySelectorAll(".ranges").forEach(liven);
})();
