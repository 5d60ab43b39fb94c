// What a script adds to a page that works without one: values under the pointer, and gradients at another loss scale.
// Text is only ever set as text. The arithmetic of ranges is that of core/ranges.py; a test compares the two.
"use strict";
(() => {
  const each = (query, run, within = document) => within.querySelectorAll(query).forEach(run);
  const make = (name, text, style = "") => {
    const element = document.createElement(name);
    element.textContent = text;
    element.className = style;
    return element;
  };
  const comma = (number) => number.toLocaleString("en");
  document.documentElement.dataset.script = "on";

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
    counts.forEach((count, place) => { bins[Math.max(0, Math.min(size - 1, first + place))] += count; });
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
      const total = data.counts.reduce((sum, count) => sum + count, 0);
      slider.addEventListener("input", () => {
        const lowest = data.lowest + Number(slider.value);
        const path = bars(data.counts, lowest - data.low, data.high - data.low, total);
        figure.querySelector(".bins").setAttribute("d", path);
        for (const row of figure.querySelector(".shares").tBodies[0].rows) {
          const limits = data.limits[row.cells[0].textContent];
          if (!limits) continue; // the loss scale does not matter
          const found = shares(data.counts, lowest, total, limits);
          found.forEach((share, place) => { row.cells[place + 1].textContent = percent(share); });
        }
        figure.querySelector(".scaled").textContent = power(Number(slider.value));
      });
    }, block);
    slider.addEventListener("input", () => { block.querySelector("output").textContent = power(Number(slider.value)); });
    slider.dispatchEvent(new Event("input"));
  });
})();
