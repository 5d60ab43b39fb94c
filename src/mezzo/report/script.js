// What a script adds to a page that works without one: values under the pointer, and of ranges one
// tensor instead of all and another loss scale. Text is only ever set as text. The arithmetic of ranges is that of
// core/ranges.py; a test compares the two.
"use strict";
(() => {
  const root = document.documentElement;
  const each = (query, run, within = document) => within.querySelectorAll(query).forEach(run);
  const make = (name, text, style = "") => {
    const element = document.createElement(name);
    element.textContent = text;
    element.className = style;
    return element;
  };
  const comma = (number) => number.toLocaleString("en");
  const clamp = (value, most) => Math.max(0, Math.min(most, value));
  root.dataset.script = "on";

  each("svg[data-readout]", (chart) => {
    const data = JSON.parse(chart.dataset.readout);
    const last = data.x.length - 1;
    if (last < 0) return;
    const cursor = chart.querySelector(".cursor");
    const line = make("p", "", "readout");
    line.title = "Point at the curve to read other steps.";
    chart.before(line);
    const show = (at) => {
      const left = (100 * (data.x[at] - data.low)) / (data.high - data.low) + "%";
      for (const [key, value] of [["x1", left], ["x2", left], ["visibility", "visible"]]) cursor.setAttribute(key, value);
      line.replaceChildren(`${data.name} ${comma(data.x[at])}`);
      for (const column of data.columns) line.append(" · ", column.name, " ", make("b", column.values[at]));
    };
    const rest = () => { show(last); cursor.setAttribute("visibility", "hidden"); };
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const want = data.low + ((event.clientX - box.left) / box.width) * (data.high - data.low);
      const away = data.x.map((x) => Math.abs(x - want));
      show(away.indexOf(Math.min(...away)));
    });
    chart.addEventListener("pointerleave", rest);
    rest();
  });

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
  const shares = (counts, lowest, total, [zero, normal, overflow]) => {
    const found = [0, 0, 0, 0];
    counts.forEach((count, place) => {
      const exponent = lowest + place;
      found[exponent < zero ? 0 : exponent < normal ? 1 : exponent >= overflow ? 3 : 2] += count;
    });
    return found.map((one) => (total ? one / total : NaN));
  };

  const bars = (counts, first, size, total) => {
    const bins = new Array(size).fill(0);
    counts.forEach((count, place) => { bins[clamp(first + place, size - 1)] += count; });
    return bins.map((count, place) => {
      if (!count) return "";
      const height = Math.max(0.004, 1 + Math.log10(count / total) / 6);
      const [left, right] = [place, place + 1].map((edge) => Math.round((1000 * edge) / size));
      return `M${left} 1000V${Math.round(1000 * (1 - height))}H${right}V1000Z`;
    }).join("");
  };

  each(".ranges", (block) => {
    const slider = block.querySelector("input.scale");
    block.querySelector(".controls").hidden = false;

    each("figure[data-exponents]", (figure) => {
      const data = JSON.parse(figure.dataset.exponents);
      const which = figure.querySelector("select.which");
      const write = (query, text) => each(query, (element) => { element.textContent = text; }, figure);
      ["all together", ...data.names].forEach((label, place) => which.append(new Option(label, place)));
      which.parentElement.hidden = data.names.length < 2;
      const draw = () => {
        const [start, zeros, broken, largest, ...counts] = data.rows[Number(which.value)];
        const lowest = start + (data.moves ? Number(slider.value) : 0);
        const total = counts.reduce((sum, count) => sum + count, 0);
        const all = total + zeros + broken;
        const path = bars(counts, lowest - data.low, data.high - data.low, total);
        figure.querySelector(".bins").setAttribute("d", path);
        for (const row of figure.querySelector(".shares").tBodies[0].rows) {
          const found = shares(counts, lowest, total, data.limits[row.cells[0].textContent]);
          found.forEach((share, place) => { row.cells[place + 1].textContent = percent(share); });
        }
        write(".told", `${comma(all)} number${all === 1 ? "" : "s"}: ${comma(zeros)} of them zero, ` +
          `${comma(broken)} infinite or NaN, the largest ${largest.toPrecision(3)}.`);
        figure.querySelector(".broken").hidden = !broken;
        write(".broken", `${comma(broken)} of ${comma(all)} number${all === 1 ? "" : "s"} (${percent(broken / all)}) ` +
          `${broken === 1 ? "is" : "are"} infinite or NaN already. The shares below are of the finite ones.`);
        write(".scaled", power(Number(slider.value)));
      };
      which.addEventListener("change", draw);
      if (data.moves) slider.addEventListener("input", draw);
      draw();
    }, block);
    const show = () => { block.querySelector("output").textContent = power(Number(slider.value)); };
    slider.addEventListener("input", show);
    show();
  });
})();
